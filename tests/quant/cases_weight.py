"""Compile cases of the weight quantizers, the dequantizer and the conversions between scale layouts."""

import torch

from moe_ops.core.formats import LAYOUTS
from moe_ops.quant.dequantize import _dequantize_triton
from moe_ops.quant.scale_layout import _convert_scale_triton
from moe_ops.quant.scale_storage import pack_ref
from moe_ops.quant.weight import _quantize_weight_triton


def weight(fmt, rule, key, dtype):
    return lambda: _quantize_weight_triton(torch.zeros((2, 384, 2880), dtype=dtype), fmt, 2, rule, key)


def dequantize(fmt, block_m, dtype):
    rows = 3 if block_m == 128 else 384
    scale = torch.zeros((2, rows, 23)) if fmt == "fp8_block" else torch.zeros((2, rows, 90), dtype=torch.uint8)
    return lambda: _dequantize_triton(torch.zeros((2, 384, 2880), dtype=torch.uint8), scale, fmt, block_m, 1, dtype)


def convert(fmt, src, dst):
    scale = torch.ones((2, 64, 23)) if fmt == "fp8_block" else torch.zeros((2, 64, 90), dtype=torch.uint8)
    return lambda: _convert_scale_triton(pack_ref(scale, src), src, dst, 64, scale.shape[-1], fmt)


PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b and "row_major" in (a, b)]
COMPILE_CASES = [
    ("weight fp8_block", weight("fp8_block", "fp32", -1, torch.bfloat16)),
    ("weight fp8_block fp32", weight("fp8_block", "pow2", -1, torch.float32)),
    ("weight mxfp8 stochastic", weight("mxfp8", "rceil", 5, torch.bfloat16)),
    ("weight fp8_block stochastic", weight("fp8_block", "fp32", 5, torch.bfloat16)),
    *((f"dequantize {fmt} {block} {dtype}", dequantize(fmt, block, dtype)) for fmt, block, dtype in (
        ("fp8_block", 128, torch.bfloat16), ("fp8_block", 1, torch.float32), ("mxfp8", 1, torch.float16))),
    *((f"convert mxfp8 {a} {b}", convert("mxfp8", a, b)) for a, b in PAIRS),
    *((f"convert fp8_block {a} {b}", convert("fp8_block", a, b)) for a, b in PAIRS if "swizzle_32x4x4" not in (a, b)),
]  # fmt: skip
