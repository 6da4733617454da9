"""Kernel that moves scales from one layout to another."""

import triton
import triton.language as tl

from moe_ops.quant.dequantize_kernel import decode_e8m0
from moe_ops.quant.row_tiles import scale_offset


@triton.jit(do_not_specialize=["rows", "padded", "stride_ie", "stride_im", "stride_ib", "stride_oe", "stride_om", "stride_ob"])
def _convert_scale_kernel(
    in_ptr, out_ptr,
    rows, padded,
    stride_ie: tl.int64, stride_im: tl.int64, stride_ib: tl.int64, stride_oe: tl.int64, stride_om: tl.int64, stride_ob: tl.int64,
    BLOCKS: tl.constexpr, SRC: tl.constexpr, DST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program moves BLOCK_R rows by BLOCK_W words of four scales of one expert; rows past `rows` and blocks past BLOCKS are written as zeros.

    SRC and DST name layouts; "bytes" says that a strided side holds E8M0 bytes, "floats" that it holds fp32.
    """
    WORDS: tl.constexpr = (BLOCKS + 3) // 4
    TILES: tl.constexpr = (WORDS + BLOCK_W - 1) // BLOCK_W
    row_tiles = (padded + BLOCK_R - 1) // BLOCK_R
    item = tl.program_id(0)
    block = item // TILES
    expert = (block // row_tiles).to(tl.int64)
    row = (block - expert * row_tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    word = (item - block * TILES) * BLOCK_W + tl.arange(0, BLOCK_W)
    lane = tl.arange(0, 4)
    group = word[:, None] * 4 + lane[None, :]
    valid = (row < rows)[:, None, None] & (group < BLOCKS)[None, :, :]
    if SRC == "floats" or SRC == "bytes":
        at = in_ptr + expert * stride_ie + scale_offset(row[:, None, None], group[None, :, :], stride_im, stride_ib, WORDS, SRC)
        value = tl.load(at, mask=valid, other=0)
    else:
        at = in_ptr + expert * stride_ie + scale_offset(row[:, None], word[None, :], stride_im, stride_ib, WORDS, SRC)
        packed = tl.load(at, mask=(row < rows)[:, None] & (word < WORDS)[None, :], other=0)
        value = (tl.expand_dims(packed, 2) >> (8 * lane)[None, None, :]) & 0xFF
    if DST == "floats":
        if SRC != "floats":
            value = tl.where(valid, decode_e8m0(value), 0.0)
        at = out_ptr + expert * stride_oe + scale_offset(row[:, None, None], group[None, :, :], stride_om, stride_ob, WORDS, DST)
        tl.store(at, value, mask=(row < padded)[:, None, None] & (group < BLOCKS)[None, :, :])
    else:
        if SRC == "floats":
            value = value.to(tl.int32, bitcast=True) >> 23
        value = tl.where(valid, value.to(tl.int32), 0)
        if DST == "bytes":
            at = out_ptr + expert * stride_oe + scale_offset(row[:, None, None], group[None, :, :], stride_om, stride_ob, WORDS, DST)
            tl.store(at, value.to(tl.uint8), mask=(row < padded)[:, None, None] & (group < BLOCKS)[None, :, :])
        else:
            packed = tl.sum(value << (8 * lane)[None, None, :], axis=2)
            at = out_ptr + expert * stride_oe + scale_offset(row[:, None], word[None, :], stride_om, stride_ob, WORDS, DST)
            tl.store(at, packed, mask=(row < padded)[:, None] & (word < WORDS)[None, :])
