"""Prefill grouped GEMM for Hopper in Gluon: FP8 block scaling, warp-specialized, persistent over the experts' device-side counts.

One program on each SM, three roles:

    producer     finds the tiles, in turn or as a counter has it, and fills a ring of STAGES slots: 128 rows of A (TMA, or cp.async by row
                 index), two boxes of 128 weight rows (TMA), and the scales of both (cp.async)
    consumer 0   rows 0 .. 63 of the tile     two 64x128 accumulators, one temporary: wgmma of K = 128, then promotion with both scales
    consumer 1   rows 64 .. 127

The two boxes are neighbours (a plain 128x256 tile), or gate and up rows of the same 128 columns: then the epilogue applies the
activation, quantizes 1x128 and stores e4m3, and the 2I-wide product never exists in memory. Of a tile with at most 64 rows both consumers
take those rows and half of the columns each. Results leave through shared memory by TMA where a consumer's 64 rows are all the expert's.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.core.arch import arch_of
from moe_ops.core.formats import as_e4m3
from moe_ops.core.launch import launch
from moe_ops.core.zeroed import zeroed_words
from moe_ops.gemm import grouped_config
from moe_ops.gemm.gluon_compat import (
    cp_async,
    expert_rows,
    find_tile,
    gdc_launch_dependents,
    gdc_wait,
    read_tile,
    thread_barrier,
    tile_line,
    tma_load,
    tma_store_wait,
    write_tile,
)
from moe_ops.gemm.hopper_epilogue import biased, folded, gated, kind_of, quantized, refold, row_amax, store, store_tile
from moe_ops.gemm.hopper_products_kernel import scaled_product, scaled_products
from moe_ops.quant.activation import lowest_gate

STAGES = 4
#: Row tiles that share a weight tile in L2 before the next columns are taken.
GROUP_M = 8
#: Bytes of an output's elements for which the tile leaves through shared memory by TMA, while the next one is being computed; the ring leaves
#: no room for elements of four.
BOXED = (1, 2)


@gluon.jit
def _ask(w_desc, w_row, kb, rows, bar, b_buf, HALF: gl.constexpr, GATHER: gl.constexpr):
    """Expect all bytes that TMA brings into a slot, and ask for the weights."""
    if GATHER:
        mbarrier.expect(bar, 2 * 128 * 128)
    elif rows > 64:
        mbarrier.expect(bar, 3 * 128 * 128)
    else:
        mbarrier.expect(bar, 2 * 128 * 128 + 64 * 128)
    tma_load(w_desc, [w_row, kb * 128], bar, b_buf.slice(0, 128))
    tma_load(w_desc, [w_row + HALF, kb * 128], bar, b_buf.slice(128, 128))


@gluon.jit
def _producer(
    a, sa_ptr, w_desc, sw_ptr, offsets_ptr, order_ptr, words_ptr, a_bufs, b_bufs, sa_bufs, sw_bufs, full, empty, tiles, tiles_full, tiles_empty,
    rows_total, a_rows_total, capacity, least_rounds, least_tails, stride_am, stride_sam, stride_sak,
    E: gl.constexpr, E2: gl.constexpr, N: gl.constexpr, K: gl.constexpr, HALF: gl.constexpr, STEP_N: gl.constexpr, TOP_K: gl.constexpr,
    GATHER: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, WARPS: gl.constexpr,
    EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    KB: gl.constexpr = K // 128
    N_TILES: gl.constexpr = N // 256
    PREFETCH: gl.constexpr = (STAGES if STAGES < KB else KB) if EARLY and PDL else 0
    experts: gl.constexpr = gl.BlockedLayout([E2 // (32 * WARPS)], [32], [WARPS], [0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    box: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    if PDL and not EARLY:
        gdc_wait()
    programs = gl.num_programs(0)
    keys, m_tiles, tails = tile_line(offsets_ptr, rows_total, capacity, E, MASKED, experts)
    total = m_tiles * N_TILES
    last = total % programs
    if last * 2 > programs:
        last = 0
    whole = total - last  # the tiles of a last wave that fills at most half of the programs are shared out as halves of 64 rows
    end = whole + last * 2
    word = gl.arange(0, 4, flat)
    if words_ptr is not None:
        draws = (total >= least_rounds * programs) & (tails * 64 >= least_tails * m_tiles)
    r = gl.arange(0, 128, gl.SliceLayout(1, box))
    c = gl.arange(0, 128, gl.SliceLayout(0, box))
    s_i = gl.arange(0, 128, flat)
    it = 0
    j = 0
    item = gl.program_id(0)
    while item < end:
        t = gl.where(item < whole, item, whole + (item - whole) // 2)
        # groups of GROUP_M row tiles, m fastest inside, so that a wave shares weights in L2
        group = t // (GROUP_M * N_TILES)
        size = gl.minimum(m_tiles - group * GROUP_M, GROUP_M)
        rest = t - group * GROUP_M * N_TILES
        m = group * GROUP_M + rest % size
        n = rest // size
        expert, before = find_tile(keys, m)
        first, filled = expert_rows(offsets_ptr, expert, rows_total, capacity, MASKED)
        m0 = (m - before) * 128
        rows = gl.minimum(filled - m0, 128)
        if item >= whole:
            half = ((item - whole) % 2) * 64
            m0 += half
            rows = gl.minimum(rows - half, 64)
        row0 = first + m0
        w_row = expert * N + n * STEP_N
        if PREFETCH > 0:
            if it == 0:
                if rows > 0:
                    for kb in gl.static_range(PREFETCH):
                        _ask(w_desc, w_row, kb, rows, full.index(kb), b_bufs.index(kb), HALF, GATHER)
                gdc_wait()
        item += programs
        if words_ptr is not None:  # after `gdc_wait`: the launch before this one may use the same words
            if draws:
                item = programs + gl.atomic_add(words_ptr, 1, sem="relaxed")
        if rows > 0:
            mbarrier.wait(tiles_empty.index(j % 2), ((j // 2) & 1) ^ 1)
            write_tile(tiles.index(j % 2), row0, rows, n, expert, flat)
            thread_barrier()
            mbarrier.arrive(tiles_full.index(j % 2))
            j += 1

            s_row = (row0 + gl.minimum(s_i, rows - 1)).to(gl.int64)
            if GATHER:
                row = row0 + gl.minimum(r, rows - 1)
                row = gl.minimum(gl.maximum(gl.load(order_ptr + row, cache_modifier=".cg") // TOP_K, 0), a_rows_total - 1).to(gl.int64)
                ptrs = a + (row * stride_am)[:, None] + c[None, :]
                a_ok = (r < rows)[:, None] & (c >= 0)[None, :]
                s_row = gl.minimum(gl.maximum(gl.load(order_ptr + s_row, cache_modifier=".cg") // TOP_K, 0), a_rows_total - 1).to(gl.int64)
            sa = sa_ptr + s_row * stride_sam
            sw = sw_ptr + (expert.to(gl.int64) * (N // 128) + n * (STEP_N // 128) + (word % 2) * (HALF // 128)) * KB
            for kb in range(KB):
                slot = it % STAGES
                bar = full.index(slot)
                mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
                if it >= PREFETCH:
                    _ask(w_desc, w_row, kb, rows, bar, b_bufs.index(slot), HALF, GATHER)
                if GATHER:
                    cp_async(a_bufs.index(slot), ptrs + kb * 128, mask=a_ok)
                else:
                    tma_load(a, [row0, kb * 128], bar, a_bufs.index(slot).slice(0, 64))
                    if rows > 64:
                        tma_load(a, [row0 + 64, kb * 128], bar, a_bufs.index(slot).slice(64, 64))
                cp_async(sa_bufs.index(slot), sa + kb * stride_sak)
                cp_async(sw_bufs.index(slot), sw + kb)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                it += 1
    mbarrier.wait(tiles_empty.index(j % 2), ((j // 2) & 1) ^ 1)
    tiles.index(j % 2).store(gl.zeros([4], gl.int32, flat))
    thread_barrier()
    mbarrier.arrive(tiles_full.index(j % 2))
    if words_ptr is not None:
        if draws & (gl.program_id(0) < end):  # the last program that has drawn in vain leaves zeros
            if gl.atomic_add(words_ptr + 1, 1, sem="acq_rel") == gl.minimum(programs, end) - 1:
                gl.store(words_ptr + word, gl.zeros([4], gl.int32, flat), mask=word < 2)
    async_copy.wait_group(0)


@gluon.jit
def _consumer(
    WG: gl.constexpr, bias_ptr, out_ptr, out_desc, out_scale_ptr, a_bufs, b_bufs, sa_bufs, sw_bufs, full, empty, tiles, tiles_full, tiles_empty,
    stage_bufs, amax_bufs, amax_bars, stride_om, zero, alpha, lowest, limit, up_offset,
    N: gl.constexpr, K: gl.constexpr, STEP_N: gl.constexpr, HALF: gl.constexpr, GATHER: gl.constexpr, FUSED: gl.constexpr, KIND: gl.constexpr,
    RULE: gl.constexpr, STAGES: gl.constexpr, BOXED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Rows WG * 64 .. of each tile; of a tile with at most 64 rows all of them, and half of the columns."""
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    KB: gl.constexpr = K // 128
    I: gl.constexpr = N // 2
    use_acc = zero != 0
    if PDL:
        gdc_wait()
        if WG == 0:
            gdc_launch_dependents()
    it = 0
    j = 0
    tails = 0
    rows = 1
    while rows > 0:
        mbarrier.wait(tiles_full.index(j % 2), (j // 2) & 1)
        row0, rows, n, expert = read_tile(tiles.index(j % 2), flat)
        thread_barrier()
        mbarrier.arrive(tiles_empty.index(j % 2))
        j += 1
        bias0 = expert.to(gl.int64) * N + n * STEP_N
        if rows > 64:
            acc0, acc1, it = scaled_products(
                a_bufs, b_bufs, sa_bufs, sw_bufs, full, empty, use_acc, it, WG * 64, 0, 128, 128, KB, STAGES, GATHER, wide
            )
            if bias_ptr is not None:
                acc0 = biased(acc0, bias_ptr + bias0, 128, wide)
                acc1 = biased(acc1, bias_ptr + bias0 + HALF, 128, wide)
            if FUSED:
                offs = WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, wide))
                h = gated(acc0, acc1, alpha, lowest, limit, up_offset, KIND)
                if RULE == "folded":
                    small, byte = folded(h, 128)
                    q, scale = refold(small, byte, gl.convert_layout(gl.max(byte, 1), gl.SliceLayout(1, wide)), 128, wide)
                else:
                    q, scale = quantized(h, row_amax(h))
                gl.store(out_scale_ptr + (row0 + offs).to(gl.int64) * (I // 128) + n, scale, mask=offs < rows)
                store_tile(out_ptr, out_desc, stage_bufs.index(WG), q, row0, WG * 64, rows, n * 128, stride_om, 128, 16, BOXED)
            else:
                y = acc0.to(out_ptr.dtype.element_ty)
                store_tile(out_ptr, out_desc, stage_bufs.index(WG), y, row0, WG * 64, rows, n * STEP_N, stride_om, 128, 8, BOXED)
                y = acc1.to(out_ptr.dtype.element_ty)
                store_tile(out_ptr, out_desc, stage_bufs.index(WG), y, row0, WG * 64, rows, n * STEP_N + 128, stride_om, 128, 8, BOXED)
        elif rows > 0:
            if FUSED:
                gate, up, it = scaled_products(
                    a_bufs, b_bufs, sa_bufs, sw_bufs, full, empty, use_acc, it,
                    0, WG * 64, 128 + WG * 64, 64, KB, STAGES, GATHER, narrow,
                )  # fmt: skip
                if bias_ptr is not None:
                    gate = biased(gate, bias_ptr + bias0 + WG * 64, 64, narrow)
                    up = biased(up, bias_ptr + bias0 + HALF + WG * 64, 64, narrow)
                h_n = gated(gate, up, alpha, lowest, limit, up_offset, KIND)
                if RULE == "folded":
                    small_n, byte_n = folded(h_n, 64)
                    amax = gl.convert_layout(gl.max(byte_n, 1), gl.SliceLayout(1, narrow)).to(gl.float32)
                else:
                    amax = row_amax(h_n)
                # the other consumer holds the other 64 columns of the same scale group
                turn = tails & 1
                amax_bufs.index(turn * 2 + WG).store(amax)
                thread_barrier()
                mbarrier.arrive(amax_bars.index(turn))
                mbarrier.wait(amax_bars.index(turn), (tails >> 1) & 1)
                amax = gl.maximum(amax, amax_bufs.index(turn * 2 + 1 - WG).load(gl.SliceLayout(1, narrow)))
                tails += 1
                if RULE == "folded":
                    q_n, scale_n = refold(small_n, byte_n, amax.to(gl.int32), 64, narrow)
                else:
                    q_n, scale_n = quantized(h_n, amax)
                offs_n = gl.arange(0, 64, gl.SliceLayout(1, narrow))
                if WG == 0:
                    gl.store(out_scale_ptr + (row0 + offs_n).to(gl.int64) * (I // 128) + n, scale_n, mask=offs_n < rows)
                store(out_ptr, q_n, row0, 0, rows, n * 128 + WG * 64, stride_om, 64, 16)
            else:
                half, it = scaled_product(a_bufs, b_bufs, sa_bufs, sw_bufs, full, empty, use_acc, it, WG, KB, STAGES, GATHER, wide)
                if bias_ptr is not None:
                    half = biased(half, bias_ptr + bias0 + WG * 128, 128, wide)
                y = half.to(out_ptr.dtype.element_ty)
                store_tile(out_ptr, out_desc, stage_bufs.index(WG), y, row0, 0, rows, n * STEP_N + WG * 128, stride_om, 128, 8, BOXED)
    if BOXED:
        tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "rows_total", "a_rows_total", "capacity", "least_rounds", "least_tails", "stride_sam", "stride_sak", "zero", "alpha", "lowest", "limit",
        "up_offset",
    ]
)  # fmt: skip
def _grouped_gemm_hopper_kernel(
    a, sa_ptr, w_desc, sw_ptr, bias_ptr, out_ptr, out_desc, out_scale_ptr, offsets_ptr, order_ptr, words_ptr,
    rows_total, a_rows_total, capacity, least_rounds, least_tails, stride_am, stride_sam, stride_sak, stride_om,
    zero, alpha, lowest, limit, up_offset,
    E: gl.constexpr, E2: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, MASKED: gl.constexpr,
    FUSED: gl.constexpr, KIND: gl.constexpr, RULE: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    BOXED: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs draw tiles from `words_ptr` (tiles drawn, programs done drawing; zeros before and after the launch) if there are `least_rounds` of
    them for each program, and `least_tails` of 64 row tiles have at most 64 rows; else, or without words, they are shared out in turn.

    `zero` is 0 at run time: wgmma overwrites in place.
    """
    STEP_N: gl.constexpr = 128 if FUSED else 256
    HALF: gl.constexpr = N // 2 if FUSED else 128
    WARPS: gl.constexpr = 4 if GATHER else 1
    smem: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], smem)
    b_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 256, 128], smem)
    sa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 128], flat)
    sw_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 4], flat)
    tiles = gl.allocate_shared_memory(gl.int32, [2, 4], flat)
    amax_bufs = gl.allocate_shared_memory(gl.float32, [4, 64 if FUSED else 1], flat)  # the staging of plain products leaves no kilobyte free
    stage_bufs = amax_bufs
    if BOXED:
        stage_bufs = gl.allocate_shared_memory(out_desc.dtype, [2, 64, 128], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tiles_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tiles_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    amax_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * WARPS)  # the expected bytes, and the copies of each thread
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(tiles_full.index(i), count=1)
        mbarrier.init(tiles_empty.index(i), count=2)
        mbarrier.init(amax_bars.index(i), count=2)
    gl.warp_specialize(
        [
            (_consumer, (0, bias_ptr, out_ptr, out_desc, out_scale_ptr, a_bufs, b_bufs, sa_bufs, sw_bufs, full, empty,
                         tiles, tiles_full, tiles_empty, stage_bufs, amax_bufs, amax_bars, stride_om, zero, alpha, lowest, limit, up_offset,
                         N, K, STEP_N, HALF, GATHER, FUSED, KIND, RULE, STAGES, BOXED, PDL)),
            (_consumer, (1, bias_ptr, out_ptr, out_desc, out_scale_ptr, a_bufs, b_bufs, sa_bufs, sw_bufs, full, empty,
                         tiles, tiles_full, tiles_empty, stage_bufs, amax_bufs, amax_bars, stride_om, zero, alpha, lowest, limit, up_offset,
                         N, K, STEP_N, HALF, GATHER, FUSED, KIND, RULE, STAGES, BOXED, PDL)),
            (_producer, (a, sa_ptr, w_desc, sw_ptr, offsets_ptr, order_ptr, words_ptr, a_bufs, b_bufs, sa_bufs, sw_bufs, full, empty,
                         tiles, tiles_full, tiles_empty, rows_total, a_rows_total, capacity, least_rounds, least_tails,
                         stride_am, stride_sam, stride_sak,
                         E, E2, N, K, HALF, STEP_N, TOP_K, GATHER, MASKED, STAGES, GROUP_M, WARPS, EARLY, PDL)),
        ],
        [4, WARPS],
        [224, 64],
    )  # fmt: skip


_BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_BOX16 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def launch_hopper(
    op: str, a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    out_scale: torch.Tensor | None, offsets: torch.Tensor | None, order: torch.Tensor | None, top_k: int,
    act_kind: str = "silu", alpha: float = 1.0, limit: float = math.inf, up_offset: float = 0.0, rule: str = "fp32", early: bool = False,
) -> None:  # fmt: skip
    """Launch on given buffers: with `out_scale` the fused GEMM1, without it the plain product in out's dtype.

    Args:
        out: rows at one distance, of whole 16 elements.
        offsets: (E + 1,) for a (R, K), or counts (E,) for a (E, capacity, K), or None for one expert that has all rows.
        early: see `grouped_stream.launch_stream`; and tiles are handed out whatever the tails (`grouped_config.HOPPER_TAILS`).
    """
    experts, n, k = w.shape
    arch = arch_of(a.device)
    a, w = as_e4m3(a), as_e4m3(w)
    masked = a.dim() == 3
    capacity = a.shape[1] if masked else 0
    if masked:
        a = a.view(-1, k)
        a_scale = a_scale.as_strided((a.shape[0], a_scale.shape[-1]), a_scale.stride()[1:])
        out = out.view(-1, out.shape[-1])
    gather = order is not None
    rows = out.shape[0]
    operand = a if gather else TensorDescriptor.from_tensor(a, [64, 128], _BOX)
    programs, many = grouped_config.hopper_programs(rows, experts, n, arch)
    words = zeroed_words(a.device, 2) if many and offsets is not None else None  # one expert has one tail at most
    lowest = lowest_gate(act_kind, alpha)
    if out_scale is not None:
        out = as_e4m3(out)
    boxed = out.element_size() in BOXED and out.data_ptr() % 16 == 0
    out_desc = TensorDescriptor.from_tensor(out, [64, 128], _BOX if out.element_size() == 1 else _BOX16) if boxed else None
    launch(
        op, _grouped_gemm_hopper_kernel, (programs,),
        operand, a_scale, TensorDescriptor.from_tensor(w.view(experts * n, k), [128, 128], _BOX), w_scale, bias,
        out, out_desc, out_scale, offsets, order, words,
        rows, a.shape[0], capacity, grouped_config.HOPPER_ROUNDS, grouped_config.HOPPER_TAILS[early], a.stride(0), *a_scale.stride(), out.stride(0),
        0, alpha, lowest, limit, up_offset,
        E=experts, E2=max(128, 1 << (experts - 1).bit_length()), N=n, K=k, TOP_K=top_k, GATHER=gather, MASKED=masked, FUSED=out_scale is not None,
        KIND=kind_of(act_kind, alpha, limit, up_offset), RULE=rule, STAGES=STAGES, GROUP_M=GROUP_M, BOXED=boxed, EARLY=early,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
