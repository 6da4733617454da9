"""Kernel of the dequantizer: both formats, activation and weight blocks."""

import triton
import triton.language as tl


@triton.jit
def decode_e8m0(byte):
    """E8M0 byte -> fp32, exactly: 2^(byte - 127), the subnormal 2^-127 for byte 0, NaN for byte 255."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, b << 23)
    return tl.where(b == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "experts", "stride_se", "stride_sm", "stride_sb"])
def _dequantize_kernel(
    data_ptr, scale_ptr, out_ptr,
    rows, experts,
    stride_qe: tl.int64, stride_qm: tl.int64, stride_se: tl.int64, stride_sm: tl.int64, stride_sb: tl.int64,
    K: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr, E8M0: tl.constexpr,
    BLOCK_R: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """data (experts, rows, K) e4m3 bits -> out (experts, rows, K); a scale covers BLOCK_M rows of a segment and GROUP columns."""
    TILES: tl.constexpr = (K + GROUPS * GROUP - 1) // (GROUPS * GROUP)
    GROUPS_TOTAL: tl.constexpr = (K + GROUP - 1) // GROUP
    per = rows // SEGMENTS
    row_blocks = (rows + BLOCK_R - 1) // BLOCK_R
    for item in range(tl.program_id(0), experts * row_blocks * TILES, tl.num_programs(0)):
        block = item // TILES
        tile = item - block * TILES
        expert = tl.cast(block // row_blocks, tl.int64)
        row = (block - expert * row_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
        segment = row // per
        scale_row = segment * ((per + BLOCK_M - 1) // BLOCK_M) + (row - segment * per) // BLOCK_M
        group = tile * GROUPS + tl.arange(0, GROUPS)
        scale_mask = (row < rows)[:, None] & (group < GROUPS_TOTAL)[None, :]
        scale_at = scale_ptr + expert * stride_se + (scale_row * stride_sm)[:, None] + (group * stride_sb)[None, :]
        if E8M0:
            scale = decode_e8m0(tl.load(scale_at, mask=scale_mask, other=0))
        else:
            scale = tl.load(scale_at, mask=scale_mask, other=0.0)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = (row < rows)[:, None, None] & (column < K)[None, :, :]
        bits = tl.load(data_ptr + expert * stride_qe + (row * stride_qm)[:, None, None] + column[None, :, :], mask=mask, other=0)
        out = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.expand_dims(scale, 2)
        offset = ((expert * rows + row) * K)[:, None, None] + column[None, :, :]
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=mask)
