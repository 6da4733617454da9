"""Compile cases of the activation quantizers and of SiLU * up with quantization."""

import itertools

import torch

from moe_ops.quant.quantize import _quantize_triton
from moe_ops.quant.row_config import RowConfig
from moe_ops.quant.silu_mul_quantize import _silu_mul_quantize_triton

COUNTS = torch.zeros(8, dtype=torch.int32)
INF = float("inf")
# (format, rule, layout): every layout and every rule
MODES = (
    ("fp8_block", "fp32", "row_major"),
    ("fp8_block", "fp32", "mn_major"),
    ("fp8_block", "pow2", "ue8m0_packed"),
    ("mxfp8", "rceil", "row_major"),
    ("mxfp8", "floor", "ue8m0_packed"),
    ("mxfp8", "even", "swizzle_32x4x4"),
)
# (shape of rows, counts, rows of a tile): packed with counts, all rows, masked; few and many rows
ROWS = (((64,), COUNTS, RowConfig(1)), ((4096,), None, RowConfig(4, warps=8, programs=4)), ((8, 64), COUNTS, RowConfig(4, warps=8, programs=4)))


def quantize(mode, rows, dtype):
    shape, counts, config = rows
    return lambda: _quantize_triton(torch.zeros((*shape, 2880), dtype=dtype), counts, mode[0], mode[2], mode[1], config)


def silu_mul_quantize(mode, rows, dtype, kind, limit, interleaved):
    shape, counts, config = rows
    if interleaved and config.block_r == 4:
        config = RowConfig(2, warps=8, programs=4)
    args = (counts, mode[0], mode[2], mode[1], kind, 1.0, limit, 0.0, interleaved, config)
    return lambda: _silu_mul_quantize_triton(torch.zeros((*shape, 2 * 2880), dtype=dtype), *args)


COMPILE_CASES = [
    (f"quantize {' '.join(mode)} {len(rows[0])}-D {dtype}", quantize(mode, rows, dtype))
    for (mode, rows), dtype in zip(itertools.product(MODES, ROWS), itertools.cycle((torch.bfloat16, torch.float32, torch.float16)), strict=False)
]
COMPILE_CASES += [
    (f"silu_mul_quantize {mode} {kind} {len(rows[0])}-D interleaved={inter}", silu_mul_quantize(mode, rows, torch.float32, kind, limit, inter))
    for mode, rows, kind, limit, inter in (
        (MODES[0], ROWS[0], "silu", INF, False),
        (MODES[0], ROWS[1], "silu", 7.0, True),
        (MODES[0], ROWS[2], "silu", INF, False),
        (MODES[3], ROWS[0], "silu", INF, True),
        (MODES[3], ROWS[1], "gelu_tanh", INF, False),
        (MODES[5], ROWS[2], "silu", 7.0, False),
        (MODES[2], ROWS[2], "silu", INF, True),
    )
]
# the conversion saturates by itself: no kernel clamps before it; and 16-byte loads
_EVERYWHERE = {capability: [r"cvt\.rn\.satfinite\.e4m3x2\.f32", r"ld\.global\S*\.v4"] for capability in (90, 100, 120)}
EXPECT = {"_quantize_kernel": _EVERYWHERE, "_silu_mul_quantize_kernel": _EVERYWHERE}
