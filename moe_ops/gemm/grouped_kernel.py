"""The Triton kernel of the grouped GEMM: out[r] = a[row(r)] @ w[e]^T for the rows r of each expert e.

A fixed grid reads the counts (masked) or offsets (packed) on the device and shares the tiles that exist:

    tile t  ->  expert e, row tile m, column tile n          m runs fastest, so that neighbours share a weight tile in L2
    rows    ->  first[e] + m * BLOCK_M ..                    first[e] = offsets[e], or e * capacity
    columns ->  segment, then BLOCK_N columns inside it      a tile never crosses the gate|up border or a 128-wide scale block

One tile loader per format (`_tile_*`) walks K and returns the fp32 accumulator, [BLOCK_M, BLOCK_N], or [BLOCK_N, BLOCK_M] where the
weights are the first operand (SWAP: the instruction wants 64 rows there, and a decode step has few tokens but many weight rows).
"""

import triton
import triton.language as tl

from moe_ops.core.pdl import after_previous


@triton.jit
def row_tiles(offsets_ptr, rows, capacity, E: tl.constexpr, E2: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr):
    """Row tiles of each expert, [E2] int32."""
    e = tl.arange(0, E2)
    if MASKED:
        filled = tl.load(offsets_ptr + e, mask=e < E, other=0)
        filled = tl.minimum(tl.maximum(filled, 0), capacity)
    else:
        low = tl.load(offsets_ptr + e, mask=e < E, other=0)
        high = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
        low = tl.minimum(tl.maximum(low, 0), rows)
        filled = tl.maximum(tl.minimum(tl.maximum(high, 0), rows) - low, 0)
    return (filled + BLOCK_M - 1) // BLOCK_M


@triton.jit
def _load_w(w, row, k, col_ok, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """[BLOCK_N, BLOCK_K] of the weights from (row, k) on; a descriptor's box is zero outside, pointers are masked."""
    if TMA:
        b = w.load([row, k])
    else:
        offs_k = k + tl.arange(0, BLOCK_K)
        offs_n = row.to(tl.int64) + tl.arange(0, BLOCK_N)
        ptrs = w + offs_n[:, None] * K + offs_k[None, :]
        if K % BLOCK_K == 0:
            b = tl.load(ptrs, mask=col_ok[:, None], other=0.0)
        else:
            b = tl.load(ptrs, mask=col_ok[:, None] & (offs_k < K)[None, :], other=0.0)
    return b


@triton.jit
def _load_a(a_rows, k, row_ok, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of the activations; rows outside the expert are zero and not read."""
    offs_k = k + tl.arange(0, BLOCK_K)
    ptrs = a_rows[:, None] + offs_k[None, :]
    if K % BLOCK_K == 0:
        a = tl.load(ptrs, mask=row_ok[:, None], other=0.0)
    else:
        a = tl.load(ptrs, mask=row_ok[:, None] & (offs_k < K)[None, :], other=0.0)
    return a


@triton.jit
def _exp2_byte(b):
    """2^(b - 127) of an E8M0 byte in fp32, exact, subnormal 2^-127 for byte 0 and NaN for byte 255."""
    wide = b.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    bits = tl.where(wide == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tile_plain(
    a_rows, sa_rows, stride_sak, row_ok, w, sw, row, col_ok, acc,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    for k in range(0, K, BLOCK_K):
        a = _load_a(a_rows, k, row_ok, K, BLOCK_K)
        b = _load_w(w, row, k, col_ok, K, BLOCK_N, BLOCK_K, TMA)
        if SWAP:
            acc = tl.dot(b, a.T, acc)
        else:
            acc = tl.dot(a, b.T, acc)
    return acc


@triton.jit
def _tile_fp8_block(
    a_rows, sa_rows, stride_sak, row_ok, w, sw, row, col_ok, acc,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """`sw` points at the scales of this tile's 128 rows; every 128 of K the product is promoted to fp32 with both scales."""
    for kb in range(0, (K + 127) // 128):
        a = _load_a(a_rows, kb * 128, row_ok, K, BLOCK_K)
        b = _load_w(w, row, kb * 128, col_ok, K, BLOCK_N, BLOCK_K, TMA)
        p = tl.load(sa_rows + kb * stride_sak, mask=row_ok, other=0.0) * tl.load(sw + kb)
        if SWAP:
            acc += tl.dot(b, a.T) * p[None, :]
        else:
            acc += tl.dot(a, b.T) * p[:, None]
    return acc


@triton.jit
def _tile_mxfp8(
    a_rows, sa_rows, stride_sak, row_ok, w, sw, row, col_ok, acc,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """`sw` points at the scale rows of this tile, [BLOCK_N]; each 32 of K is one product, promoted with both of its scales."""
    for kb in range(0, K // 32):
        a = _load_a(a_rows, kb * 32, row_ok, K, 32)
        b = _load_w(w, row, kb * 32, col_ok, K, BLOCK_N, 32, TMA)
        sa = _exp2_byte(tl.load(sa_rows + kb * stride_sak, mask=row_ok, other=127))
        sb = _exp2_byte(tl.load(sw + kb, mask=col_ok, other=127))
        if SWAP:
            acc += tl.dot(b, a.T) * sb[:, None] * sa[None, :]
        else:
            acc += tl.dot(a, b.T) * sa[:, None] * sb[None, :]
    return acc


@triton.jit
def _tile_mxfp8_native(
    a_rows, sa_rows, stride_sak, row_ok, w, sw, row, col_ok, acc,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Block-scaled instruction of SM100 and SM120: the hardware applies both E8M0 scales."""
    groups = tl.arange(0, BLOCK_K // 32)
    for k in range(0, K, BLOCK_K):
        a = _load_a(a_rows, k, row_ok, K, BLOCK_K)
        b = _load_w(w, row, k, col_ok, K, BLOCK_N, BLOCK_K, TMA)
        g = k // 32 + groups
        sa = tl.load(sa_rows[:, None] + g[None, :] * stride_sak, mask=row_ok[:, None] & (g < K // 32)[None, :], other=127)
        sb = tl.load(sw[:, None] + g[None, :], mask=col_ok[:, None] & (g < K // 32)[None, :], other=127)
        if SWAP:
            acc = tl.dot_scaled(b, sb, "e4m3", a.T, sa, "e4m3", acc)
        else:
            acc = tl.dot_scaled(a, sa, "e4m3", b.T, sb, "e4m3", acc)
    return acc


@triton.jit(do_not_specialize=["rows", "a_rows_total", "capacity", "stride_sam", "stride_sak", "stride_sae"])
def _grouped_gemm_kernel(
    a_ptr,
    sa_ptr,
    w,
    sw_ptr,
    bias_ptr,
    out_ptr,
    offsets_ptr,
    order_ptr,
    rows,
    a_rows_total,
    capacity,
    stride_am,
    stride_ae,
    stride_sam,
    stride_sak,
    stride_sae,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    E2: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes every num_programs-th tile.

    `w` is a tensor descriptor over [E * N, K] (TMA) or a pointer. `order_ptr` (or None) maps a routed row to its pair t * TOP_K + j,
    so that row t of `a` is read in place. Ids and counts are clamped: nothing is read or written out of bounds whatever they hold.
    """
    after_previous(PDL)
    NSEG: tl.constexpr = N // SEGMENTS
    TILES_SEG: tl.constexpr = (NSEG + BLOCK_N - 1) // BLOCK_N
    N_TILES: tl.constexpr = SEGMENTS * TILES_SEG
    SCALE_SEG: tl.constexpr = (NSEG + 127) // 128
    K_SCALES: tl.constexpr = K // 32 if FORMAT == "mxfp8" or FORMAT == "mxfp8_native" else (K + 127) // 128

    per_expert = row_tiles(offsets_ptr, rows, capacity, E, E2, BLOCK_M, MASKED)
    ends = tl.cumsum(per_expert, 0) * N_TILES
    total = tl.sum(per_expert, 0) * N_TILES
    experts = tl.arange(0, E2)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        e = tl.sum((ends <= tile).to(tl.int32), 0)
        local = tile - tl.sum(tl.where(experts < e, per_expert, 0), 0) * N_TILES
        m_tiles = tl.sum(tl.where(experts == e, per_expert, 0), 0)
        n = local // m_tiles
        m0 = (local % m_tiles) * BLOCK_M
        if MASKED:
            filled = tl.minimum(tl.maximum(tl.load(offsets_ptr + e), 0), capacity)
            first = e.to(tl.int64) * capacity
        else:
            low = tl.minimum(tl.maximum(tl.load(offsets_ptr + e), 0), rows)
            filled = tl.minimum(tl.maximum(tl.load(offsets_ptr + e + 1), 0), rows) - low
            first = low.to(tl.int64)
        offs_m = m0 + tl.arange(0, BLOCK_M)
        row_ok = offs_m < filled
        out_row = first + offs_m
        if MASKED:
            a_row = offs_m.to(tl.int64)
            a_rows = a_ptr + e.to(tl.int64) * stride_ae + a_row * stride_am
            sa_base = e.to(tl.int64) * stride_sae
        else:
            if order_ptr is not None:
                pair = tl.load(order_ptr + out_row, mask=row_ok, other=0)
                a_row = tl.minimum(tl.maximum(pair // TOP_K, 0), a_rows_total - 1).to(tl.int64)
            else:
                a_row = out_row
            a_rows = a_ptr + a_row * stride_am
            sa_base = tl.zeros((), tl.int64)

        segment = n // TILES_SEG
        n0 = (n % TILES_SEG) * BLOCK_N
        offs_n = n0 + tl.arange(0, BLOCK_N)
        col_ok = offs_n < NSEG
        w_row = e * N + segment * NSEG + n0
        if SWAP:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if FORMAT == "plain":
            acc = _tile_plain(a_rows, None, 0, row_ok, w, None, w_row, col_ok, acc, K, BLOCK_N, BLOCK_K, SWAP, TMA)
        else:
            sa_rows = sa_ptr + sa_base + a_row * stride_sam
            if FORMAT == "fp8_block":
                sw = sw_ptr + (e.to(tl.int64) * (SEGMENTS * SCALE_SEG) + segment * SCALE_SEG + n0 // 128) * K_SCALES
                acc = _tile_fp8_block(a_rows, sa_rows, stride_sak, row_ok, w, sw, w_row, col_ok, acc, K, BLOCK_N, BLOCK_K, SWAP, TMA)
            else:
                sw = sw_ptr + (w_row.to(tl.int64) + tl.arange(0, BLOCK_N)) * K_SCALES
                if FORMAT == "mxfp8":
                    acc = _tile_mxfp8(a_rows, sa_rows, stride_sak, row_ok, w, sw, w_row, col_ok, acc, K, BLOCK_N, BLOCK_K, SWAP, TMA)
                else:
                    acc = _tile_mxfp8_native(a_rows, sa_rows, stride_sak, row_ok, w, sw, w_row, col_ok, acc, K, BLOCK_N, BLOCK_K, SWAP, TMA)

        col = segment * NSEG + offs_n
        if SWAP:
            acc = tl.trans(acc)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + e.to(tl.int64) * N + col, mask=col_ok, other=0.0).to(tl.float32)
            acc += bias[None, :]
        out = out_ptr + out_row[:, None] * N + col[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])
