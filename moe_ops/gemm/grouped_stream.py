"""Decode grouped GEMM for Hopper in Gluon: FP8 block scaling, few rows an expert, bound by the weights' bytes.

Persistent programs, each with a ring that never drains between tiles:

    producer   one warp: weight rows by TMA, 16 activation rows and the scales by cp.async, all of 128 columns, a slot at a time; it also
               finds the tiles, the next one while the copies of this one are in flight, and tells the consumer through a ring of its own
    consumer   one warpgroup: weights as the instruction's M operand, promotion every 128 of K, rows stored transposed

The fused form walks 128 gate rows, then the 128 up rows of the same columns, applies the activation and quantizes 1x128.
A launch that knows its predecessor (`early`) asks for its first weights before it waits for the activations.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.core.arch import arch_of
from moe_ops.core.formats import as_e4m3
from moe_ops.core.launch import launch
from moe_ops.gemm.gluon_compat import (
    cp_async,
    expert_rows,
    expert_tiles,
    gdc_launch_dependents,
    gdc_wait,
    read_tile,
    thread_barrier,
    tma_load,
    write_tile,
)
from moe_ops.gemm.grouped_config import stream_tile
from moe_ops.gemm.hopper_epilogue import folded, gated, kind_of, quantized, refold, row_amax
from moe_ops.quant.activation import lowest_gate


@gluon.jit
def _find(
    t, per, ends, offsets_ptr, order_ptr, rows_total, a_rows_total,
    E: gl.constexpr, N_TILES: gl.constexpr, T: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, box: gl.constexpr, flat: gl.constexpr,
):  # fmt: skip
    """Tile t: (expert, first row, rows, column tile, source rows of A in the layout of its copy and of the scales' copy)."""
    past = ends * N_TILES <= t
    e = gl.minimum(gl.sum(past.to(gl.int32), 0), E - 1)
    local = t - gl.sum(gl.where(past, per, 0), 0) * N_TILES
    first, filled = expert_rows(offsets_ptr, e, rows_total, 0, False)
    m_tiles = gl.maximum((filled + T - 1) // T, 1)
    m0 = (local % m_tiles) * T
    row0 = first + m0
    rows = gl.minimum(filled - m0, T)
    last = gl.minimum(row0 + gl.maximum(rows, 1), rows_total) - 1  # a program without a tile looks for one too
    a_row = gl.minimum(row0 + gl.arange(0, T, gl.SliceLayout(1, box)), last)
    s_row = gl.minimum(row0 + gl.arange(0, 2 * T, flat) % T, last)
    if GATHER:
        a_row = gl.minimum(gl.maximum(gl.load(order_ptr + a_row, cache_modifier=".cg") // TOP_K, 0), a_rows_total - 1)
        s_row = gl.minimum(gl.maximum(gl.load(order_ptr + s_row, cache_modifier=".cg") // TOP_K, 0), a_rows_total - 1)
    return e, row0, rows, local // m_tiles, a_row, s_row


@gluon.jit
def _producer(
    a, sa_ptr, w_desc, sw_ptr, offsets_ptr, order_ptr, rows_total, a_rows_total, stride_am, stride_sam, stride_sak,
    w_bufs, a_bufs, s_bufs, full, empty, tiles, tiles_full, tiles_empty,
    E: gl.constexpr, E2: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, W: gl.constexpr, T: gl.constexpr,
    STAGES: gl.constexpr, GATHER: gl.constexpr, FUSED: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    KB: gl.constexpr = K // 128
    N_TILES: gl.constexpr = N // 2 // W if FUSED else N // W
    SPAN: gl.constexpr = KB if FUSED else (KB + 1) // 2  # steps before the next tile is looked for: gate rows, or half of K
    PREFETCH: gl.constexpr = (STAGES if STAGES < KB else KB) if EARLY and PDL else 0
    experts: gl.constexpr = gl.BlockedLayout([E2 // 32], [32], [1], [0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    box: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [1, 1], [1, 0])
    if PDL and not EARLY:
        gdc_wait()
    per, ends = expert_tiles(offsets_ptr, rows_total, 0, E, T, False, experts)
    total = gl.sum(per, 0) * N_TILES
    r = gl.arange(0, T, gl.SliceLayout(1, box))
    c = gl.arange(0, 128, gl.SliceLayout(0, box))
    s_i = gl.arange(0, 2 * T, flat)
    it = 0
    j = 0
    t = gl.program_id(0)
    e, row0, rows, n, a_row, s_row = _find(
        gl.minimum(t, gl.maximum(total - 1, 0)), per, ends, offsets_ptr, order_ptr, rows_total, a_rows_total, E, N_TILES, T, TOP_K, GATHER, box, flat
    )
    while t < total:
        w_row = e * N + n * W
        if PREFETCH > 0:
            if it == 0:
                for kb in gl.static_range(PREFETCH):
                    mbarrier.expect(full.index(kb), W * 128)
                    tma_load(w_desc, [w_row, kb * 128], full.index(kb), w_bufs.index(kb))
                gdc_wait()
        mbarrier.wait(tiles_empty.index(j % 2), ((j // 2) & 1) ^ 1)
        write_tile(tiles.index(j % 2), row0, rows, n, e, flat)
        mbarrier.arrive(tiles_full.index(j % 2))
        j += 1
        a_ptrs = a + (a_row.to(gl.int64) * stride_am)[:, None] + c[None, :]
        a_ok = (r < rows)[:, None] & (c >= 0)[None, :]
        # one copy brings the rows' scales and, T times, the weights' scale
        s_rows = sa_ptr + s_row.to(gl.int64) * stride_sam
        s_step = gl.where(s_i < T, stride_sak, 1)
        sw = sw_ptr + (e.to(gl.int64) * (N // 128) + (n * W) // 128) * KB
        t += gl.num_programs(0)
        for part in gl.static_range(2):
            # gate rows, then up rows; or the first half of K, then the second
            row = w_row + (part * (N // 2) if FUSED else 0)
            s_ptrs = gl.where(s_i < T, s_rows, sw + (part * (N // 2 // 128) * KB if FUSED else 0))
            for kb in range(0 if FUSED else part * SPAN, KB if FUSED else (SPAN if part == 0 else KB)):
                slot = it % STAGES
                bar = full.index(slot)
                mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
                if it >= PREFETCH:
                    mbarrier.expect(bar, W * 128)
                    tma_load(w_desc, [row, kb * 128], bar, w_bufs.index(slot))
                cp_async(a_bufs.index(slot), a_ptrs + kb * 128, mask=a_ok)
                cp_async(s_bufs.index(slot), s_ptrs + kb * s_step)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                it += 1
            if part == 0:  # while copies are in flight: between tiles nothing would be asked for
                e, row0, rows, n, a_row, s_row = _find(
                    gl.minimum(t, total - 1), per, ends, offsets_ptr, order_ptr, rows_total, a_rows_total, E, N_TILES, T, TOP_K, GATHER, box, flat
                )
    mbarrier.wait(tiles_empty.index(j % 2), ((j // 2) & 1) ^ 1)
    write_tile(tiles.index(j % 2), 0, 0, 0, 0, flat)
    mbarrier.arrive(tiles_full.index(j % 2))
    async_copy.wait_group(0)


@gluon.jit
def _product(
    w_bufs, a_bufs, s_bufs, full, empty, it, STEPS: gl.constexpr, W: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr
):  # fmt: skip
    """(W, T) fp32 of the next STEPS slots, promoted every 128 of K."""
    cols: gl.constexpr = gl.SliceLayout(0, mma)
    acc = gl.zeros((W, T), gl.float32, mma)
    for _ in range(STEPS):
        slot = it % STAGES
        mbarrier.wait(full.index(slot), (it // STAGES) & 1)
        fence_async_shared()
        zero = gl.zeros((W, T), gl.float32, mma)
        p = warpgroup_mma(w_bufs.index(slot), a_bufs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = s_bufs.index(slot).slice(0, T).load(cols) * s_bufs.index(slot).slice(T, T).load(cols)
        p = warpgroup_mma_wait(0, deps=[p])
        mbarrier.arrive(empty.index(slot))
        acc += p * s[None, :]
        it += 1
    return acc, it


@gluon.jit
def _consumer(
    bias_ptr, out_ptr, out_scale_ptr, w_bufs, a_bufs, s_bufs, full, empty, tiles, tiles_full, tiles_empty, alpha, lowest, limit, up_offset,
    N: gl.constexpr, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, FUSED: gl.constexpr, KIND: gl.constexpr,
    RULE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, T, 32])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    KB: gl.constexpr = K // 128
    I: gl.constexpr = N // 2
    r = gl.arange(0, W, gl.SliceLayout(1, mma))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    it = 0
    j = 0
    rows = 1
    while rows > 0:
        mbarrier.wait(tiles_full.index(j % 2), (j // 2) & 1)
        row0, rows, n, e = read_tile(tiles.index(j % 2), flat)
        thread_barrier()
        mbarrier.arrive(tiles_empty.index(j % 2))
        j += 1
        if rows > 0:
            acc, it = _product(w_bufs, a_bufs, s_bufs, full, empty, it, KB, W, T, STAGES, mma)
            if bias_ptr is not None:
                bias = bias_ptr + e.to(gl.int64) * N + n * W + r
                acc += gl.load(bias).to(gl.float32)[:, None]
            if FUSED:
                up, it = _product(w_bufs, a_bufs, s_bufs, full, empty, it, KB, W, T, STAGES, mma)
                if bias_ptr is not None:
                    up += gl.load(bias + I).to(gl.float32)[:, None]
                h = gated(acc, up, alpha, lowest, limit, up_offset, KIND)
                wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
                h = gl.convert_layout(gl.permute(h, (1, 0)), wide)
                if RULE == "folded":
                    small, byte = folded(h, 128)
                    q, scale = refold(small, byte, gl.convert_layout(gl.max(byte, 1), gl.SliceLayout(1, wide)), 128, wide)
                else:
                    q, scale = quantized(h, row_amax(h))
                row = gl.arange(0, T, gl.SliceLayout(1, wide))
                column = n * 128 + gl.arange(0, 128, gl.SliceLayout(0, wide))
                to = (row0 + row).to(gl.int64)
                gl.store(out_scale_ptr + to * (I // 128) + n, scale, mask=row < rows)
                gl.store(out_ptr + to[:, None] * I + column[None, :], q, mask=(row < rows)[:, None] & (column >= 0)[None, :])
            else:
                c = gl.arange(0, T, gl.SliceLayout(0, mma))
                out = out_ptr + (row0 + c).to(gl.int64)[None, :] * N + (n * W + r)[:, None]
                gl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(c < rows)[None, :] & (r >= 0)[:, None])


@gluon.jit(do_not_specialize=["rows_total", "a_rows_total", "stride_sam", "stride_sak", "alpha", "lowest", "limit", "up_offset"])
def _grouped_gemm_stream_kernel(
    a, sa_ptr, w_desc, sw_ptr, bias_ptr, out_ptr, out_scale_ptr, offsets_ptr, order_ptr,
    rows_total, a_rows_total, stride_am, stride_sam, stride_sak, alpha, lowest, limit, up_offset,
    E: gl.constexpr, E2: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, W: gl.constexpr, T: gl.constexpr,
    STAGES: gl.constexpr, GATHER: gl.constexpr, FUSED: gl.constexpr, KIND: gl.constexpr, RULE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program computes every num_programs-th tile. Offsets and order are clamped: nothing is read or written out of bounds."""
    smem: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, W, 128], smem)
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, T, 128], smem)
    s_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * T], flat)
    tiles = gl.allocate_shared_memory(gl.int32, [2, 4], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tiles_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tiles_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=33)  # the expected bytes, and each lane's copies
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(tiles_full.index(i), count=1)
        mbarrier.init(tiles_empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_consumer, (bias_ptr, out_ptr, out_scale_ptr, w_bufs, a_bufs, s_bufs, full, empty, tiles, tiles_full, tiles_empty,
                         alpha, lowest, limit, up_offset, N, K, W, T, STAGES, FUSED, KIND, RULE, PDL)),
            (_producer, (a, sa_ptr, w_desc, sw_ptr, offsets_ptr, order_ptr, rows_total, a_rows_total, stride_am, stride_sam, stride_sak,
                         w_bufs, a_bufs, s_bufs, full, empty, tiles, tiles_full, tiles_empty,
                         E, E2, N, K, TOP_K, W, T, STAGES, GATHER, FUSED, EARLY, PDL)),
        ],
        [1],
        [96],
    )  # fmt: skip


_BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def launch_stream(
    op: str, a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    out_scale: torch.Tensor | None, offsets: torch.Tensor, order: torch.Tensor | None, top_k: int,
    act_kind: str = "silu", alpha: float = 1.0, limit: float = math.inf, up_offset: float = 0.0, rule: str = "fp32", early: bool = False,
) -> None:  # fmt: skip
    """Launch on given buffers: with `out_scale` the fused GEMM1, without it the plain product in out's dtype.

    Args:
        early: the predecessor on the stream is one of this package's kernels and wrote none of w, offsets and order: they are read early.
    """
    experts, n, k = w.shape
    a, w = as_e4m3(a), as_e4m3(w)
    rows = out.shape[0]
    fused = out_scale is not None
    arch = arch_of(a.device)
    tile, tiles = stream_tile(rows, experts, n, fused, arch)
    lowest = lowest_gate(act_kind, alpha)
    launch(
        op, _grouped_gemm_stream_kernel, (max(1, min(tile.programs * arch.sms, tiles)),),
        a, a_scale, TensorDescriptor.from_tensor(w.view(experts * n, k), [tile.weights, 128], _BOX), w_scale, bias,
        as_e4m3(out) if fused else out, out_scale, offsets, order,
        rows, a.shape[0], a.stride(0), *a_scale.stride(), alpha, lowest, limit, up_offset,
        E=experts, E2=max(32, 1 << (experts - 1).bit_length()), N=n, K=k, TOP_K=top_k, W=tile.weights, T=tile.rows, STAGES=tile.stages,
        GATHER=order is not None, FUSED=fused, KIND=kind_of(act_kind, alpha, limit, up_offset), RULE=rule, EARLY=early,
        num_warps=4, maxnreg=112, enable_fp_fusion=True,
    )  # fmt: skip
