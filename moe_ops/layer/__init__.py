"""The whole MoE layer: the fused op, the module that holds its weights, and the checkpoint dialects."""
