"""The Triton kernels of the dense and the batched GEMM: out[b, m] = a[b, m] @ w[b]^T (+ bias + residual).

    program  ->  batch b, split s, column tile n, row tile m     m runs fastest, so that neighbours share a weight tile in L2
    split s  ->  whole 128s of K, from s * per on                its fp32 partial goes to slot s, and `_split_reduce_kernel` adds the slots

A slot is private to its program and nothing is added by atomics: the order of the sum, and so the bits, are fixed. Bias, residual and the
output's dtype come after the whole sum. A 16-bit activation can be quantized on the way in (RULE), with the quantizer's own formulas.
"""

import torch
import triton
import triton.language as tl

from moe_ops.core.formats import ceil_div
from moe_ops.core.launch import launch
from moe_ops.core.pdl import after_previous
from moe_ops.gemm.dense_config import DenseGemmConfig, boxes, most_parts
from moe_ops.gemm.grouped_kernel import _exp2_byte, _load_a, _load_w
from moe_ops.quant.row_tiles import encode


@triton.jit
def _quantized(a, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, RULE: tl.constexpr):
    """16-bit tile (BLOCK_M, BLOCK_K) -> (e4m3 tile, scales (BLOCK_M, BLOCK_K // GROUP): fp32, or E8M0 bytes as int32)."""
    bits, scale = encode(tl.reshape(a.to(tl.float32), (BLOCK_M, BLOCK_K // GROUP, GROUP)), RULE)
    return tl.reshape(bits, (BLOCK_M, BLOCK_K)).to(tl.float8e4nv, bitcast=True), scale


@triton.jit
def _walk_plain(
    a_rows, row_ok, w, row, col_ok, acc, first, last, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    for k in range(first, last, BLOCK_K):
        a = _load_a(a_rows, k, row_ok, K, BLOCK_K)
        b = _load_w(w, row, k, col_ok, K, BLOCK_N, BLOCK_K, TMA)
        if SWAP:
            acc = tl.dot(b, a.T, acc)
        else:
            acc = tl.dot(a, b.T, acc)
    return acc


@triton.jit
def _walk_fp8_block(
    a_rows, sa_rows, stride_sak, row_ok, w, sw, row, col_ok, acc, first, last,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """`sw` points at the scales of this tile's 128 rows; every 128 of K the product is promoted to fp32 with both scales."""
    for k in range(first, last, 128):
        a = _load_a(a_rows, k, row_ok, K, 128)
        b = _load_w(w, row, k, col_ok, K, BLOCK_N, 128, TMA)
        if RULE == "given":
            sa = tl.load(sa_rows + (k // 128) * stride_sak, mask=row_ok, other=0.0)
        else:
            a, sa = _quantized(a, BLOCK_M, 128, 128, RULE)
            sa = tl.reshape(sa, (BLOCK_M,))
        p = sa * tl.load(sw + k // 128)
        if SWAP:
            acc += tl.dot(b, a.T) * p[None, :]
        else:
            acc += tl.dot(a, b.T) * p[:, None]
    return acc


@triton.jit
def _walk_mxfp8(
    a_rows, sa_rows, stride_sak, row_ok, w, sw, row, col_ok, acc, first, last,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """`sw` points at the scale rows of this tile, [BLOCK_N]; each 32 of K is one product, promoted with both of its scales."""
    for k in range(first, last, 32):
        a = _load_a(a_rows, k, row_ok, K, 32)
        b = _load_w(w, row, k, col_ok, K, BLOCK_N, 32, TMA)
        if RULE == "given":
            byte = tl.load(sa_rows + (k // 32) * stride_sak, mask=row_ok, other=127)
        else:
            a, byte = _quantized(a, BLOCK_M, 32, 32, RULE)
            byte = tl.reshape(byte, (BLOCK_M,))
        sa = _exp2_byte(byte)
        sb = _exp2_byte(tl.load(sw + k // 32, mask=col_ok, other=127))
        if SWAP:
            acc += tl.dot(b, a.T) * sb[:, None] * sa[None, :]
        else:
            acc += tl.dot(a, b.T) * sa[:, None] * sb[None, :]
    return acc


@triton.jit
def _walk_mxfp8_native(
    a_rows, sa_rows, stride_sak, row_ok, w, sw, row, col_ok, acc, first, last, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Block-scaled instruction of SM100 and SM120: the hardware applies both E8M0 scales."""
    groups = tl.arange(0, BLOCK_K // 32)
    for k in range(first, last, BLOCK_K):
        a = _load_a(a_rows, k, row_ok, K, BLOCK_K)
        b = _load_w(w, row, k, col_ok, K, BLOCK_N, BLOCK_K, TMA)
        g = k // 32 + groups
        if RULE == "given":
            sa = tl.load(sa_rows[:, None] + g[None, :] * stride_sak, mask=row_ok[:, None] & (g < K // 32)[None, :], other=127)
        else:
            a, sa = _quantized(a, BLOCK_M, BLOCK_K, 32, RULE)
            sa = sa.to(tl.uint8)
        sb = tl.load(sw[:, None] + g[None, :], mask=col_ok[:, None] & (g < K // 32)[None, :], other=127)
        if SWAP:
            acc = tl.dot_scaled(b, sb, "e4m3", a.T, sa, "e4m3", acc)
        else:
            acc = tl.dot_scaled(a, sa, "e4m3", b.T, sb, "e4m3", acc)
    return acc


@triton.jit(do_not_specialize=["rows", "stride_sam", "stride_sak", "stride_sab"])
def _dense_gemm_kernel(
    a_ptr,
    sa_ptr,
    w,
    sw_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    part_ptr,
    rows,
    stride_ab,
    stride_am,
    stride_sab,
    stride_sam,
    stride_sak,
    stride_rm,
    stride_ob,
    stride_om,
    BATCH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes one tile of one split.

    `w` is a tensor descriptor over [BATCH * N, K] (TMA) or a pointer. RULE is "given" for quantized activations, else how they are quantized
    here. `part_ptr`: fp32 [SPLIT, BATCH, rows, N], or None without a split. Splits past the end of K store zeros.
    """
    after_previous(PDL)
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PER: tl.constexpr = ((K + 127) // 128 + SPLIT - 1) // SPLIT * 128
    K_SCALES: tl.constexpr = K // 32 if FORMAT == "mxfp8" or FORMAT == "mxfp8_native" else (K + 127) // 128
    m_tiles = (rows + BLOCK_M - 1) // BLOCK_M
    tile = tl.program_id(0)
    m = tile % m_tiles
    tile = tile // m_tiles
    n = tile % N_TILES
    tile = tile // N_TILES
    split = tile % SPLIT
    batch = tile // SPLIT
    batch = batch.to(tl.int64)
    first = tl.minimum(split * PER, K)
    last = tl.minimum(first + PER, K)

    offs_m = m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = offs_m < rows
    out_row = offs_m.to(tl.int64)
    n0 = n * BLOCK_N
    offs_n = n0 + tl.arange(0, BLOCK_N)
    col_ok = offs_n < N
    w_row = (batch * N).to(tl.int32) + n0
    a_rows = a_ptr + batch * stride_ab + out_row * stride_am
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FORMAT == "plain":
        acc = _walk_plain(a_rows, row_ok, w, w_row, col_ok, acc, first, last, K, BLOCK_N, BLOCK_K, SWAP, TMA)
    else:
        sa_rows = a_rows  # not read where the kernel quantizes
        if RULE == "given":
            sa_rows = sa_ptr + batch * stride_sab + out_row * stride_sam
        if FORMAT == "fp8_block":
            sw = sw_ptr + (batch * ((N + 127) // 128) + n0 // 128) * K_SCALES
            acc = _walk_fp8_block(a_rows, sa_rows, stride_sak, row_ok, w, sw, w_row, col_ok, acc, first, last, K, BLOCK_M, BLOCK_N, SWAP, TMA, RULE)
        else:
            sw = sw_ptr + (batch * N + offs_n) * K_SCALES
            if FORMAT == "mxfp8":
                acc = _walk_mxfp8(a_rows, sa_rows, stride_sak, row_ok, w, sw, w_row, col_ok, acc, first, last, K, BLOCK_M, BLOCK_N, SWAP, TMA, RULE)
            else:
                acc = _walk_mxfp8_native(
                    a_rows, sa_rows, stride_sak, row_ok, w, sw, w_row, col_ok, acc, first, last, K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TMA, RULE
                )

    if SWAP:
        acc = tl.trans(acc)
    ok = row_ok[:, None] & col_ok[None, :]
    if SPLIT > 1:
        slot = part_ptr + ((split * BATCH + batch) * rows + out_row)[:, None] * N + offs_n[None, :]
        tl.store(slot, acc, mask=ok)
    else:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + offs_n, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        if residual_ptr is not None:
            acc += tl.load(residual_ptr + out_row[:, None] * stride_rm + offs_n[None, :], mask=ok, other=0.0).to(tl.float32)
        out = out_ptr + batch * stride_ob + out_row[:, None] * stride_om + offs_n[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def _split_reduce_kernel(
    part_ptr, bias_ptr, residual_ptr, out_ptr, rows, stride_rm, stride_ob, stride_om,
    BATCH: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program adds BLOCK columns of one row over the slots 0 .. SPLIT - 1, in this order, then bias and residual."""
    after_previous(PDL)
    COLUMN_TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    tile = tl.program_id(0)
    column = tile % COLUMN_TILES * BLOCK + tl.arange(0, BLOCK)
    item = (tile // COLUMN_TILES).to(tl.int64)  # row of [BATCH, rows]
    row = item % rows
    ok = column < N
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT):
        acc += tl.load(part_ptr + (tl.cast(rows, tl.int64) * (split * BATCH) + item) * N + column, mask=ok, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=ok, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + row * stride_rm + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + item // rows * stride_ob + row * stride_om + column, acc.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "programs"])
def _stream_reduce_kernel(
    part_ptr, bias_ptr, residual_ptr, out_ptr, rows, programs, stride_rm, stride_om,
    N: tl.constexpr, KB: tl.constexpr, W: tl.constexpr, WA: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finish the tiles that dense_stream.py cut: add their parts in the order of K, then bias and residual.

    One program: BLOCK_R rows, BLOCK_C columns.
    """
    after_previous(PDL)
    TILES: tl.constexpr = (N + W - 1) // W
    block = tl.program_id(0) % (TILES * (W // BLOCK_C))
    tile = block // (W // BLOCK_C)
    row = tl.program_id(0) // (TILES * (W // BLOCK_C)) * BLOCK_R + tl.arange(0, BLOCK_R)
    inner = block % (W // BLOCK_C) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = tl.where(inner < WA, tile * WA + inner, TILES * WA + tile * (W - WA) + inner - WA)
    # programs that hold the tile's first and its last step: program p starts at step p * TILES * KB // programs
    first = ((tile * KB + 1) * programs - 1) // (TILES * KB)
    last = ((tile * KB + KB) * programs - 1) // (TILES * KB)
    if first < last:
        ok = (row < rows)[:, None] & (column < N)[None, :]
        inside = row[:, None] * W + inner[None, :]
        acc = tl.load(part_ptr + (2 * first + 1).to(tl.int64) * (T * W) + inside, mask=ok, other=0.0)
        for i in tl.static_range(1, PARTS):
            acc += tl.load(part_ptr + (2 * (first + i)).to(tl.int64) * (T * W) + inside, mask=ok & (first + i <= last), other=0.0)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        out_row = row.to(tl.int64)[:, None]
        if residual_ptr is not None:
            acc += tl.load(residual_ptr + out_row * stride_rm + column[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(out_ptr + out_row * stride_om + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=ok)


def add_parts(
    op: str, part: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor, k: int, cfg: DenseGemmConfig
) -> None:  # fmt: skip
    """Launch the kernel that finishes the cut tiles of `out` (M, N); `part` is fp32 (2 * programs, block_m, block_n), contiguous."""
    rows, n = out.shape
    block_c = min(64, cfg.block_n & -cfg.block_n)
    launch(
        op, _stream_reduce_kernel, (ceil_div(n, cfg.block_n) * (cfg.block_n // block_c) * ceil_div(rows, 16),),
        part, bias, residual, out, rows, cfg.programs, 0 if residual is None else residual.stride(0), out.stride(0),
        N=n, KB=ceil_div(k, 128), W=cfg.block_n, WA=boxes(cfg.block_n)[0], T=cfg.block_m, PARTS=most_parts(cfg, n, k), BLOCK_R=16, BLOCK_C=block_c,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
