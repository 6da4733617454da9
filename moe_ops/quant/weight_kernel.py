"""Kernels of the weight quantizers: 128x128 tiles of fp8_block, and mxfp8 rows with stochastic rounding.

mxfp8 without stochastic rounding is what the activation quantizer computes, and uses its kernel.
"""

import triton
import triton.language as tl

from moe_ops.quant.row_tiles import e4m3_bits, finite_magnitude, fp8_block_scale, quotient, scaled


@triton.jit
def mix(x):
    """MurmurHash3's 32-bit finalizer."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def stochastic_bits(q, index, key_high, key_low):
    """fp32 -> e4m3 bits, rounded stochastically; see stochastic.py."""
    h = mix(index.to(tl.uint32) ^ key_high.to(tl.uint32))
    noise = (mix(h ^ (index >> 32).to(tl.uint32) ^ key_low.to(tl.uint32)) >> 12).to(tl.int32)
    sign = (q.to(tl.int32, bitcast=True) >> 24) & 0x80
    a = tl.minimum(tl.abs(q), 448.0)
    small = a < 0.015625
    normal = ((a.to(tl.int32, bitcast=True) + noise) >> 20) - 960
    steps = tl.where(small, a * 536870912.0, 0.0).to(tl.int32)
    code = tl.where(small, (steps + noise) >> 20, normal) | sign
    return tl.where(q == q, code, 0x7F).to(tl.uint8)


@triton.jit(do_not_specialize=["key_high", "key_low"])
def _quantize_weight_kernel(
    w_ptr, data_ptr, scale_ptr,
    N, K, key_high, key_low,
    stride_we: tl.int64, stride_wn: tl.int64,
    SEGMENTS: tl.constexpr, RULE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """One program quantizes one 128x128 tile of w (E, N, K); each of the SEGMENTS parts of N has tiles of its own."""
    tiles_k = (K + 127) // 128
    per = N // SEGMENTS
    tiles_n = (per + 127) // 128
    tile = tl.program_id(0)
    tile_k = tile % tiles_k
    tile_row = (tile // tiles_k).to(tl.int64)  # over experts, segments and tiles of rows
    part = tile_row // tiles_n
    expert = part // SEGMENTS
    local = (tile_row - part * tiles_n) * 128 + tl.arange(0, 128)
    row = (part - expert * SEGMENTS) * per + local
    column = tile_k * 128 + tl.arange(0, 128)
    mask = (local < per)[:, None] & (column < K)[None, :]
    v = tl.load(w_ptr + expert * stride_we + (row * stride_wn)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    amax = tl.max(tl.max(finite_magnitude(v), axis=1), axis=0)
    scale = fp8_block_scale(tl.where(amax == amax, amax, 0.0), RULE)
    q = quotient(v, scale)
    index = ((expert * N + row) * K)[:, None] + column[None, :]
    if STOCHASTIC:
        bits = stochastic_bits(q, index, key_high, key_low)
    else:
        bits = e4m3_bits(q)
    tl.store(data_ptr + index, bits, mask=mask)
    tl.store(scale_ptr + tile_row * tiles_k + tile_k, scale)


@triton.jit(do_not_specialize=["key_high", "key_low"])
def _quantize_weight_rows_kernel(
    w_ptr, data_ptr, scale_ptr,
    rows, N, K, key_high, key_low,
    stride_we: tl.int64, stride_wn: tl.int64,
    RULE: tl.constexpr, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program quantizes BLOCK_R rows by GROUPS groups of 32 columns of w (E, N, K) seen as `rows` = E * N rows, rounding stochastically."""
    tiles = (K + GROUPS * 32 - 1) // (GROUPS * 32)
    item = tl.program_id(0)
    tile = item % tiles
    row = (item // tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    expert = row // N
    group = tile * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = (row < rows)[:, None, None] & (column < K)[None, :, :]
    source = expert * stride_we + (row - expert * N) * stride_wn
    v = tl.load(w_ptr + source[:, None, None] + column[None, :, :], mask=mask, other=0.0).to(tl.float32)
    q, scale = scaled(v, RULE)
    index = (row * K)[:, None, None] + column[None, :, :]
    tl.store(data_ptr + index, stochastic_bits(q, index, key_high, key_low), mask=mask)
    offset = (row * (K // 32))[:, None] + group[None, :]
    tl.store(scale_ptr + offset, scale.to(tl.uint8), mask=(row < rows)[:, None] & (group < K // 32)[None, :])
