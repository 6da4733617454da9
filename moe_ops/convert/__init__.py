"""Checkpoints to MXFP8 or FP8-block: convert, verify, inspect. See the README's section on converting a checkpoint."""
