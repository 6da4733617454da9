"""GEMM1 with its epilogue in plain Triton: gate and up columns of one 128-wide group in one tile, activation, 1x128 quantization.

The portable twin of the fused form of grouped_hopper.py: same arguments, any architecture with FP8.
"""

import triton
import triton.language as tl

from moe_ops.core.pdl import after_previous
from moe_ops.gemm.grouped_kernel import row_tiles
from moe_ops.quant.row_tiles import encode
from moe_ops.quant.silu_mul_quantize_kernel import gated_activation


@triton.jit(do_not_specialize=["rows_total", "a_rows_total", "stride_sam", "stride_sak", "alpha", "lowest", "limit", "up_offset"])
def _grouped_act_kernel(
    a_ptr, sa_ptr, w_desc, sw_ptr, bias_ptr, out_ptr, out_scale_ptr, offsets_ptr, order_ptr, rows_total, a_rows_total,
    stride_am, stride_sam, stride_sak, alpha, lowest, limit, up_offset,
    E: tl.constexpr, E2: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes every num_programs-th tile of BLOCK_M rows x 128 columns of the activation (256 rows of the weights)."""
    after_previous(PDL)
    I: tl.constexpr = N // 2  # noqa: E741
    N_TILES: tl.constexpr = I // 128
    KB: tl.constexpr = K // 128
    per_expert = row_tiles(offsets_ptr, rows_total, 0, E, E2, BLOCK_M, False)
    ends = tl.cumsum(per_expert, 0)
    m_tiles = tl.sum(per_expert, 0)
    experts = tl.arange(0, E2)
    for tile in range(tl.program_id(0), m_tiles * N_TILES, tl.num_programs(0)):
        group = tile // (GROUP_M * N_TILES)
        size = tl.minimum(m_tiles - group * GROUP_M, GROUP_M)
        rest = tile - group * GROUP_M * N_TILES
        m = group * GROUP_M + rest % size
        n = rest // size
        expert = tl.sum((ends <= m).to(tl.int32), 0)
        before = tl.sum(tl.where(experts < expert, per_expert, 0), 0)
        low = tl.minimum(tl.maximum(tl.load(offsets_ptr + expert), 0), rows_total)
        filled = tl.minimum(tl.maximum(tl.load(offsets_ptr + expert + 1), 0), rows_total) - low
        row0 = low + (m - before) * BLOCK_M
        rows = tl.minimum(filled - (m - before) * BLOCK_M, BLOCK_M)
        offs = tl.arange(0, BLOCK_M)
        inside = row0 + tl.minimum(offs, rows - 1)
        if order_ptr is not None:
            a_row = tl.minimum(tl.maximum(tl.load(order_ptr + inside) // TOP_K, 0), a_rows_total - 1).to(tl.int64)
        else:
            a_row = inside.to(tl.int64)
        a_rows = a_ptr + (a_row * stride_am)[:, None] + tl.arange(0, 128)[None, :]
        sa = sa_ptr + a_row * stride_sam
        sw = sw_ptr + (expert.to(tl.int64) * (N // 128) + n) * KB
        w_row = expert * N + n * 128
        gate = tl.zeros((BLOCK_M, 128), tl.float32)
        up = tl.zeros((BLOCK_M, 128), tl.float32)
        for kb in range(0, KB):
            a = tl.load(a_rows + kb * 128)
            g = w_desc.load([w_row, kb * 128])
            u = w_desc.load([w_row + I, kb * 128])
            s = tl.load(sa + kb * stride_sak)
            gate += tl.dot(a, g.T) * (s * tl.load(sw + kb))[:, None]
            up += tl.dot(a, u.T) * (s * tl.load(sw + I // 128 * KB + kb))[:, None]
        column = n * 128 + tl.arange(0, 128)
        if bias_ptr is not None:
            bias = bias_ptr + expert.to(tl.int64) * N + column
            gate += tl.load(bias).to(tl.float32)[None, :]
            up += tl.load(bias + I).to(tl.float32)[None, :]
        h = gated_activation(gate, up, alpha, lowest, limit, up_offset, KIND)
        bits, scale = encode(tl.reshape(h, (BLOCK_M, 1, 128)), RULE)
        ok = offs < rows
        out_row = (row0 + offs).to(tl.int64)
        tl.store(out_scale_ptr + out_row[:, None] * N_TILES + n + tl.zeros((1, 1), tl.int32), scale, mask=ok[:, None])
        tl.store(out_ptr + out_row[:, None] * I + column[None, :], tl.reshape(bits, (BLOCK_M, 128)), mask=ok[:, None])
