"""Kernel of the activation quantizers, both formats, every scale layout."""

import triton
import triton.language as tl

from moe_ops.core.pdl import after_previous
from moe_ops.quant.row_tiles import encode, filled_row_blocks, locate_rows, store_scales, widened, zero_padding


@triton.jit(do_not_specialize=["rows", "experts", "padding", "stride_se", "stride_sm", "stride_sb"])
def _quantize_kernel(
    x_ptr, counts_ptr, data_ptr, scale_ptr,
    rows, experts, padding,
    stride_xe: tl.int64, stride_xm: tl.int64, stride_qe: tl.int64, stride_qm: tl.int64, stride_se: tl.int64, stride_sm: tl.int64, stride_sb: tl.int64,
    K: tl.constexpr, GROUP: tl.constexpr, RULE: tl.constexpr, LAYOUT: tl.constexpr, COUNTS: tl.constexpr, NUM_COUNTS: tl.constexpr,
    BLOCK_R: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (experts, rows, K) -> e4m3 bits of the same shape, and scales. A program takes every num_programs-th tile of the filled rows."""
    after_previous(PDL)
    TILES: tl.constexpr = (K + GROUPS * GROUP - 1) // (GROUPS * GROUP)
    GROUPS_TOTAL: tl.constexpr = (K + GROUP - 1) // GROUP
    zero_padding(scale_ptr, rows, padding, experts, stride_se, stride_sm, stride_sb, GROUPS_TOTAL, LAYOUT)
    filled, ends, total = filled_row_blocks(counts_ptr, rows, experts, COUNTS, NUM_COUNTS, BLOCK_R)
    for item in range(tl.program_id(0), total * TILES, tl.num_programs(0)):
        block = item // TILES
        tile = item - block * TILES
        expert, first, limit = locate_rows(block, counts_ptr, rows, filled, ends, COUNTS, BLOCK_R)
        row = first + tl.arange(0, BLOCK_R).to(tl.int64)
        group = tile * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = (row < limit)[:, None, None] & (column < K)[None, :, :]
        x = tl.load(x_ptr + expert * stride_xe + (row * stride_xm)[:, None, None] + column[None, :, :], mask=mask, other=0.0)
        bits, scale = encode(widened(x), RULE, x_ptr.dtype.element_ty.primitive_bitwidth > 16)
        tl.store(data_ptr + expert * stride_qe + (row * stride_qm)[:, None, None] + column[None, :, :], bits, mask=mask)
        store_scales(scale_ptr + expert * stride_se, scale, row, tile * GROUPS, limit, stride_sm, stride_sb, GROUPS_TOTAL, LAYOUT)
