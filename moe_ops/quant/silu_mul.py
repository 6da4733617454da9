"""Gated activation without quantization, for experts in 16 bits: rows of GEMM1's fp32 output to bf16 or fp16, once rounded."""

import math

import torch
import triton
import triton.language as tl

from moe_ops.core.arch import arch_of
from moe_ops.core.formats import ceil_div
from moe_ops.core.launch import launch, runs_kernels
from moe_ops.core.pdl import after_previous
from moe_ops.quant.activation import Activation, activation_ref, lowest_gate
from moe_ops.quant.silu_mul_quantize_kernel import gated_activation

BLOCK = 1024


def silu_mul_ref(x: torch.Tensor, dtype: torch.dtype, act_kind: str, alpha: float, limit: float, up_offset: float, interleaved: bool) -> torch.Tensor:
    """The definition: activation in fp32, one rounding to `dtype` (.., I)."""
    act = Activation(act_kind, alpha, None if math.isinf(limit) else limit, up_offset, interleaved)
    return activation_ref(x, act).to(dtype)


@triton.jit(do_not_specialize=["rows", "alpha", "lowest", "limit", "up_offset"])
def _silu_mul_kernel(
    x_ptr, filled_ptr, out_ptr, rows, alpha, lowest, limit, up_offset,
    K: tl.constexpr, KIND: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes every num_programs-th tile of BLOCK_K columns of the filled rows; x is (rows, 2K), out (rows, K), contiguous."""
    after_previous(PDL)
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    filled = tl.minimum(tl.maximum(tl.load(filled_ptr), 0), rows)
    for item in range(tl.program_id(0), filled * TILES, tl.num_programs(0)):
        row = tl.cast(item // TILES, tl.int64)
        column = (item % TILES) * BLOCK_K + tl.arange(0, BLOCK_K)  # pyright: ignore[reportOperatorIssue]
        ok = column < K
        x_row = x_ptr + row * (2 * K)
        if INTERLEAVED:
            gate = tl.load(x_row + 2 * column, mask=ok, other=0.0).to(tl.float32)
            up = tl.load(x_row + 2 * column + 1, mask=ok, other=0.0).to(tl.float32)
        else:
            gate = tl.load(x_row + column, mask=ok, other=0.0).to(tl.float32)
            up = tl.load(x_row + K + column, mask=ok, other=0.0).to(tl.float32)
        h = gated_activation(gate, up, alpha, lowest, limit, up_offset, KIND)
        tl.store(out_ptr + row * K + column, h.to(out_ptr.dtype.element_ty), mask=ok)


def silu_mul_into(
    x: torch.Tensor, out: torch.Tensor, filled: torch.Tensor, act_kind: str, alpha: float, limit: float, up_offset: float, interleaved: bool
) -> None:
    """Rows 0 .. filled of x (R, 2I) to out (R, I), both contiguous; `filled` is one int32 on the device. Allocates nothing on a GPU."""
    rows, k = out.shape
    if not runs_kernels(x):
        ready = min(max(int(filled), 0), rows)
        out[:ready] = silu_mul_ref(x[:ready], out.dtype, act_kind, alpha, limit, up_offset, interleaved)
        return
    grid = (min(rows * ceil_div(k, BLOCK), arch_of(x.device).sms * 8),)
    launch(
        "silu_mul", _silu_mul_kernel, grid, x, filled, out, rows, alpha, lowest_gate(act_kind, alpha), limit, up_offset,
        K=k, KIND=act_kind, INTERLEAVED=interleaved, BLOCK_K=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
