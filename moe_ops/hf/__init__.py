"""Transformers integration: run a model's experts through `moe_ops`, in bf16, FP8 blocks or MXFP8.

    import moe_ops
    moe_ops.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation="moe_ops")
    moe_ops.hf.quantize_model_(model, "mxfp8")

Transformers is imported when one of these functions runs, not before. Inference only.
"""

from moe_ops.hf.experts import prepare_model, register
from moe_ops.hf.load import load_quantized
from moe_ops.hf.quantize import QuantizeReport, quantize_model_

__all__ = ["QuantizeReport", "load_quantized", "prepare_model", "quantize_model_", "register"]
