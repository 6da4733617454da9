"""Kernel of SiLU * up fused with quantization: both formats, every activation and every scale layout."""

import triton
import triton.language as tl

from moe_ops.core.pdl import after_previous
from moe_ops.quant.row_tiles import encode, filled_row_blocks, locate_rows, store_scales, zero_padding


@triton.jit
def exp_bounded(x):
    """exp(x) in fp32 to about 1 ulp for |x| < 88: x = n ln2 + r, and a polynomial of r whose exponent n is added to."""
    m = tl.fma(x, 1.4426950408889634, 12582912.0)  # 1.5 * 2^23: the low bits of m hold n
    n = m - 12582912.0
    r = tl.fma(n, -1.428606820309417e-06, tl.fma(n, -0.693145751953125, x))  # ln2 split so that n * high is exact
    p = tl.fma(r, 0.001394645543769002, 0.00836915709078312)  # least squares for the relative error: 5e-9
    p = tl.fma(p, r, 0.04166626185178757)
    p = tl.fma(p, r, 0.16666516661643982)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(p, r, 1.0)
    p = tl.fma(p, r, 1.0)
    return (p.to(tl.int32, bitcast=True) + (m.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def divide(a, b):
    """a / b for b in 1 .. 2^126, to half an ulp (a remainder step), without the slow path of a general division.

    Negations are products with -1, which compile to nothing: Triton's unary minus is 0 - x, and loses the sign of a zero.
    """
    y = tl.rsqrt(b)
    y = y * y
    y = tl.fma(tl.fma(b * -1.0, y, 1.0), y, y)
    q = a * y
    return tl.where(a < float("inf"), tl.fma(tl.fma(b, q, a * -1.0) * -1.0, y, q), q)  # an infinity leaves no remainder


@triton.jit
def gated_activation(gate, up, alpha, lowest, limit, up_offset, KIND: tl.constexpr):
    """f(clamp(gate, lowest, limit)) * (clamp(up, -limit, limit) + up_offset) in fp32; see activation.py for the form of f.

    KIND "plain_silu" is "silu" with alpha 1, no limit and no offset.
    """
    gate = tl.maximum(gate, lowest, propagate_nan=tl.PropagateNan.ALL)
    if KIND != "plain_silu":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL), limit, propagate_nan=tl.PropagateNan.ALL)
        up += up_offset
    t = gate
    if KIND == "silu":
        t = alpha * gate
    elif KIND == "gelu_tanh":
        t = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))
    t = tl.minimum(t, 87.0)  # a NaN becomes 87 here, and stays a NaN in the numerator
    return divide(gate, 1.0 + exp_bounded(t * -1.0)) * up


@triton.jit(do_not_specialize=["rows", "experts", "padding", "stride_se", "stride_sm", "stride_sb", "alpha", "lowest", "limit", "up_offset"])
def _silu_mul_quantize_kernel(
    x_ptr, counts_ptr, data_ptr, scale_ptr,
    rows, experts, padding,
    stride_xe: tl.int64, stride_xm: tl.int64, stride_qe: tl.int64, stride_qm: tl.int64, stride_se: tl.int64, stride_sm: tl.int64, stride_sb: tl.int64,
    alpha, lowest, limit, up_offset,
    K: tl.constexpr, GROUP: tl.constexpr, RULE: tl.constexpr, LAYOUT: tl.constexpr, COUNTS: tl.constexpr, NUM_COUNTS: tl.constexpr,
    BLOCK_R: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (experts, rows, 2K) -> e4m3 bits (experts, rows, K) and scales. A program takes every num_programs-th tile of the filled rows.

    A tile is GROUPS groups of GROUP output columns; it reads the same columns of the gate half and the up half, or twice as many
    neighbouring columns when the two are interleaved.
    """
    after_previous(PDL)
    TILES: tl.constexpr = (K + GROUPS * GROUP - 1) // (GROUPS * GROUP)
    GROUPS_TOTAL: tl.constexpr = (K + GROUP - 1) // GROUP
    zero_padding(scale_ptr, rows, padding, experts, stride_se, stride_sm, stride_sb, GROUPS_TOTAL, LAYOUT)
    filled, ends, total = filled_row_blocks(counts_ptr, rows, experts, COUNTS, NUM_COUNTS, BLOCK_R)
    for item in range(tl.program_id(0), total * TILES, tl.num_programs(0)):
        block = item // TILES
        tile = item - block * TILES
        expert, first, limit_row = locate_rows(block, counts_ptr, rows, filled, ends, COUNTS, BLOCK_R)
        row = first + tl.arange(0, BLOCK_R).to(tl.int64)
        group = tile * GROUPS + tl.arange(0, GROUPS)
        valid = (row < limit_row)[:, None, None]
        x_rows = x_ptr + expert * stride_xe + (row * stride_xm)[:, None, None]
        if INTERLEAVED:
            pair = group[:, None] * (2 * GROUP) + tl.arange(0, 2 * GROUP)[None, :]
            both = tl.load(x_rows + pair[None, :, :], mask=valid & (pair < 2 * K)[None, :, :], other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(both, (BLOCK_R, GROUPS, GROUP, 2)))
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = valid & (column < K)[None, :, :]
        if not INTERLEAVED:
            gate = tl.load(x_rows + column[None, :, :], mask=mask, other=0.0).to(tl.float32)
            up = tl.load(x_rows + K + column[None, :, :], mask=mask, other=0.0).to(tl.float32)
        bits, scale = encode(gated_activation(gate, up, alpha, lowest, limit, up_offset, KIND), RULE)
        tl.store(data_ptr + expert * stride_qe + (row * stride_qm)[:, None, None] + column[None, :, :], bits, mask=mask)
        store_scales(scale_ptr + expert * stride_se, scale, row, tile * GROUPS, limit_row, stride_sm, stride_sb, GROUPS_TOTAL, LAYOUT)
