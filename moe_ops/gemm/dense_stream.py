"""Dense GEMM of at most 128 rows for Hopper in Gluon: FP8 block scaling, bound by the weights' bytes, K split wherever that evens out the work.

All steps of all tiles (a step is 128 of K for one tile) form one line, which the programs cut into equal parts:

    tile            |  0: kb 0 .. 55  |  1: kb 0 .. 55  |  2 ..
    program         |  0    |  1    |  2    |  3    |  ..            where a tile falls to one program it is finished there, else its parts
                                                                     go to slots of their own, which a second kernel adds in a fixed order;
                                                                     two halves of 128 rows are exchanged instead (dense_exchange_kernel.py)

    two producers   a warp each, a slot of a ring at a time, across tiles: weights and activations by TMA; their scales by cp.async
    two consumers   a warpgroup each, promotion every 128 of K. They take turns at the steps, so that one multiplies while the other promotes,
                    and add their sums in shared memory; a wide tile of 128 rows they share by rows instead, and ask for products in turns.
                    Up to 32 rows the weights are the instruction's M operand, above them the rows, 64 at a time.

A tile's columns are one box of weights or two, a and b, so that the tiles come out just below the number of SMs. All boxes a come first, then all
boxes b, so that each lies in one block of weight scales. Above 32 rows, 16-bit results are put together within a warp, 16 bytes a thread.
"""

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
from moe_ops.gemm import dense_config
from moe_ops.gemm.dense_config import DenseGemmConfig, boxes, fits_twice, in_pairs, steps_ahead, steps_in_flight
from moe_ops.gemm.dense_exchange_kernel import claim, received, send, slots, tell, told
from moe_ops.gemm.dense_kernel import add_parts
from moe_ops.gemm.dense_products_kernel import products, wide_products
from moe_ops.gemm.gluon_compat import as_words, cp_async, gdc_launch_dependents, gdc_wait, prefetch_l2, thread_barrier, tma_load, wide_rows

TURNS_WIDTH = gl.constexpr(dense_config.TURNS_WIDTH)
AT_ONCE_WIDTH = gl.constexpr(dense_config.AT_ONCE_WIDTH)


@gluon.jit
def _share(TILES: gl.constexpr, KB: gl.constexpr, WHOLE: gl.constexpr):
    """First and last step (exclusive) of this program."""
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    if WHOLE:
        return p * TILES // programs * KB, (p + 1) * TILES // programs * KB
    return p * (TILES * KB) // programs, (p + 1) * (TILES * KB) // programs


@gluon.jit
def _ask(wa_desc, wb_desc, s, bar, wa_buf, wb_buf, KB: gl.constexpr, TILES: gl.constexpr, WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr):
    """Expect all bytes that TMA brings for step s, and ask for the weights."""
    mbarrier.expect(bar, (WA + WB + T) * 128)
    tma_load(wa_desc, [s // KB * WA, s % KB * 128], bar, wa_buf)
    if WB > 0:
        tma_load(wb_desc, [TILES * WA + s // KB * WB, s % KB * 128], bar, wb_buf)


@gluon.jit
def _producer(
    a_desc, wa_desc, wb_desc, wa_bufs, wb_bufs, a_bufs, full, empty,
    KB: gl.constexpr, TILES: gl.constexpr, WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    FLIGHT: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    start, end = _share(TILES, KB, WHOLE)
    if PDL and EARLY:
        for i in gl.static_range(STAGES):
            if start + i < end:
                _ask(wa_desc, wb_desc, start + i, full.index(i), wa_bufs.index(i), wb_bufs.index(i if WB > 0 else 0), KB, TILES, WA, WB, T)
    if PDL:
        gdc_wait()
    for s in range(start, end):
        it = s - start
        slot = it % STAGES
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
        if FLIGHT < STAGES and it >= FLIGHT:
            mbarrier.wait(full.index((it - FLIGHT) % STAGES), ((it - FLIGHT) // STAGES) & 1)
        if not (PDL and EARLY) or it >= STAGES:
            _ask(wa_desc, wb_desc, s, bar, wa_bufs.index(slot), wb_bufs.index(slot if WB > 0 else 0), KB, TILES, WA, WB, T)
        tma_load(a_desc, [0, s % KB * 128], bar, a_bufs.index(slot))


@gluon.jit
def _scale_producer(
    sa_ptr, sw_ptr, words_ptr, rows, stride_sam, stride_sak, sa_bufs, sw_bufs, full, empty, there, there_known,
    N: gl.constexpr, KB: gl.constexpr, TILES: gl.constexpr, WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr,
    WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Row-major scales lie a row's length apart: a warp of their own asks for them, so that the boxes need not wait."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    word = gl.arange(0, 4, flat)  # the scale of box a, then that of box b
    sa = sa_ptr + gl.minimum(gl.arange(0, T, flat), rows - 1).to(gl.int64) * stride_sam
    start, end = _share(TILES, KB, WHOLE)
    if PDL:
        gdc_wait()
    for s in range(start, end):
        it = s - start
        slot = it % STAGES
        kb = s % KB
        mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
        cp_async(sa_bufs.index(slot), sa + kb.to(gl.int64) * stride_sak)
        n0 = s // KB * WA + (gl.where(word == 0, 0, TILES * WA + s // KB * (WB - WA)) if WB > 0 else word * 0)
        scale_row = gl.minimum(n0 // 128, (N + 127) // 128 - 1)
        cp_async(sw_bufs.index(slot), sw_ptr + scale_row.to(gl.int64) * KB + kb)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
    async_copy.wait_group(0)
    if words_ptr is not None:
        there.store(told(words_ptr) + word * 0)
        thread_barrier()
        mbarrier.arrive(there_known)


@gluon.jit
def _places(x, R0, SWAP: gl.constexpr):
    """Rows of a tile and columns of a box that a tensor holds, (.., 1) and (1, ..) or the other way round."""
    first = gl.expand_dims(gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout)), 1)
    second = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout)), 0)
    return R0 + (second if SWAP else first), first if SWAP else second


@gluon.jit
def _finish(
    acc, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, slot, n0, rows, stride_rm, stride_om,
    N: gl.constexpr, W: gl.constexpr, T: gl.constexpr, R0, W0: gl.constexpr, SWAP: gl.constexpr,
):  # fmt: skip
    """Store rows R0 .. and columns n0 .. of the result: finished to `out`, or as they are to columns W0 .. of a slot of (T, W)."""
    r, c = _places(acc, R0, SWAP)
    n = n0 + c
    ok = (r < rows) & (n < N)
    if whole:
        if bias_ptr is not None:
            acc += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
        if residual_ptr is not None:
            acc += gl.load(residual_ptr + r.to(gl.int64) * stride_rm + n, mask=ok, other=0.0).to(gl.float32)
        y = acc.to(out_ptr.dtype.element_ty)
        if out_ptr.dtype.element_ty.primitive_bitwidth == 16 and not SWAP and N % 8 == 0:  # 16 bytes a thread instead of 4
            y = gl.convert_layout(y, wide_rows(y.shape[1]))
        yr, yc = _places(y, R0, SWAP)
        gl.store(out_ptr + yr.to(gl.int64) * stride_om + (n0 + yc), y, mask=(yr < rows) & (n0 + yc < N))
    elif part_ptr is not None:
        gl.store(part_ptr + (slot.to(gl.int64) * T + r) * W + W0 + c, acc, mask=ok)


@gluon.jit
def _exchange(
    WG: gl.constexpr, acc_a, acc_c, a_bufs, sums_full, sums_empty, slot, there, there_known, slots_ptr, bias_ptr, residual_ptr, out_ptr,
    n0, rows, stride_rm, stride_om, N: gl.constexpr, W: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """One tile in two halves of K. The warpgroups give each other their sums of 64 rows; WG 1 sends its ones away, WG 0 receives and finishes."""
    first = gl.program_id(0) % 2 == 0
    kept = gl.where(first, acc_a, acc_c)
    sent = gl.where(first, acc_c, acc_a)
    # slots of one's own steps, in which no load can be under way any more
    theirs = as_words(a_bufs.index(1 - WG), 64, 64, gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0])).slice(0, W, dim=1)
    mine = as_words(a_bufs.index(WG), 64, 64, gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0])).slice(0, W, dim=1)
    thread_barrier()
    mine.store((sent if WG == 0 else kept).to(gl.int32, bitcast=True))
    thread_barrier()
    if WG == 1:
        mbarrier.arrive(sums_full)
        mbarrier.wait(sums_empty, 0)
        mbarrier.wait(there_known, 0)
        to = gl.max(there.load(gl.SliceLayout(0, mma)), 0)
        send(sent + theirs.load(mma).to(gl.float32, bitcast=True), to, slots_ptr, W)
    else:
        mbarrier.arrive(sums_empty)
        mbarrier.wait(sums_full, 0)
        kept = received(kept + theirs.load(mma).to(gl.float32, bitcast=True), slot, slots_ptr, W)
        r0 = gl.where(first, 0, 64)
        _finish(kept, bias_ptr, residual_ptr, out_ptr, None, True, 0, n0, rows, stride_rm, stride_om, N, W, 128, r0, 0, False)


@gluon.jit
def _consumer(
    WG: gl.constexpr, w_ptr, bias_ptr, residual_ptr, out_ptr, part_ptr, slots_ptr, words_ptr, wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs,
    sums_a, sums_b, full, empty, order, sums_full, sums_empty, there, there_known, rows, stride_rm, stride_om, zero,
    N: gl.constexpr, K: gl.constexpr, TILES: gl.constexpr, WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr,
    WHOLE: gl.constexpr, PAIRS: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    SWAP: gl.constexpr = T <= 32
    W: gl.constexpr = WA + WB
    BY_ROWS: gl.constexpr = T == 128 and W > TURNS_WIDTH
    TURN: gl.constexpr = 1 if BY_ROWS else 2
    BOTH: gl.constexpr = T == 128 and TURN == 2
    A0: gl.constexpr = WG * 64 if BY_ROWS else 0
    mma_a: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, T if SWAP else WA, 32])
    mma_b: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WB if WB > 0 else 8, 32])
    KB: gl.constexpr = (K + 127) // 128
    start, end = _share(TILES, KB, WHOLE)
    if PDL and AHEAD > 0 and WG == 1:  # the predecessor may have written the weights, but their first bytes may come to the L2 already
        i = gl.arange(0, 256, gl.BlockedLayout([1], [32], [4], [0]))
        n = gl.where(i < WA, start // KB * WA + i, TILES * WA + start // KB * WB + i - WA)
        for step in gl.static_range(AHEAD):
            kb = start % KB + step
            prefetch_l2(w_ptr + n.to(gl.int64) * K + kb * 128, (i < W) & (n < N) & (kb < KB))
    if PDL:
        gdc_wait()
        if WG == 0:
            gdc_launch_dependents()
    slot = 0
    if PAIRS and WG == 0:
        slot = claim(slots_ptr, SLOTS)
        tell(slot, words_ptr)
    if PAIRS:  # without a loop over tiles: what waits for another program within one would cost each step of the main loop instructions
        acc_a, acc_b, acc_c, acc_d = products(
            wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, order, zero != 0, WG, end - start - WG,
            WG, TURN, WA, WB, T, A0, STAGES, mma_a, mma_b,
        )  # fmt: skip
        n0 = start // KB * WA
        _exchange(
            WG, acc_a, acc_c, a_bufs, sums_full, sums_empty, slot, there, there_known, slots_ptr, bias_ptr, residual_ptr, out_ptr,
            n0, rows, stride_rm, stride_om, N, WA, mma_a,
        )  # fmt: skip
    else:
        s = start
        j = 0
        while s < end:
            kb = s % KB
            n0 = s // KB * WA
            n1 = TILES * WA + s // KB * WB
            steps = gl.minimum(KB - kb, end - s)
            skip = 0 if BY_ROWS else (s - start + WG) % 2
            if W > AT_ONCE_WIDTH:
                acc_a, acc_b = wide_products(
                    wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, s - start, steps, WA, WB, A0, STAGES, mma_a, mma_b
                )
            else:
                acc_a, acc_b, acc_c, acc_d = products(
                    wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, order, zero != 0, s - start + skip, steps - skip,
                    WG, TURN, WA, WB, T, A0, STAGES, mma_a, mma_b,
                )  # fmt: skip
            if not BY_ROWS:
                if WG == 1:
                    mbarrier.wait(sums_empty, (j & 1) ^ 1)
                    sums_a.index(0).store(acc_a)
                    if WB > 0:
                        sums_b.index(0).store(acc_b)
                    if BOTH:
                        sums_a.index(1).store(acc_c)
                        if WB > 0:
                            sums_b.index(1).store(acc_d)
                    thread_barrier()
                    mbarrier.arrive(sums_full)
                else:
                    mbarrier.wait(sums_full, j & 1)
                    acc_a += sums_a.index(0).load(mma_a)
                    if WB > 0:
                        acc_b += sums_b.index(0).load(mma_b)
                    if BOTH:
                        acc_c += sums_a.index(1).load(mma_a)
                        if WB > 0:
                            acc_d += sums_b.index(1).load(mma_b)
                    thread_barrier()
                    mbarrier.arrive(sums_empty)
            if BY_ROWS or WG == 0:
                whole = steps == KB
                part = 2 * gl.program_id(0) + (kb == 0).to(gl.int32)
                _finish(acc_a, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, part, n0, rows, stride_rm, stride_om, N, W, T, A0, 0, SWAP)
                if WB > 0:
                    _finish(acc_b, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, part, n1, rows, stride_rm, stride_om, N, W, T, A0, WA, SWAP)
                if BOTH:
                    _finish(acc_c, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, part, n0, rows, stride_rm, stride_om, N, W, T, 64, 0, SWAP)
                    if WB > 0:
                        _finish(acc_d, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, part, n1, rows, stride_rm, stride_om, N, W, T, 64, WA, SWAP)
            s += steps
            j += 1


@gluon.jit(do_not_specialize=["rows", "stride_sam", "stride_sak", "zero"])
def _dense_stream_kernel(
    a_desc, sa_ptr, w_ptr, wa_desc, wb_desc, sw_ptr, bias_ptr, residual_ptr, out_ptr, part_ptr, slots_ptr, words_ptr,
    rows, stride_sam, stride_sak, stride_rm, stride_om, zero,
    N: gl.constexpr, K: gl.constexpr, WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    PAIRS: gl.constexpr, SLOTS: gl.constexpr, FLIGHT: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr, REGS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`part_ptr`: fp32 (2 * programs, T, WA + WB), or None where no second kernel adds. With PAIRS: `slots_ptr`, SLOTS slots of
    dense_exchange_kernel.py, and `words_ptr`, a zero for each program. `zero` is 0: wgmma overwrites in place.
    """
    KB: gl.constexpr = (K + 127) // 128
    TILES: gl.constexpr = (N + WA + WB - 1) // (WA + WB)
    BY_ROWS: gl.constexpr = T == 128 and WA + WB > TURNS_WIDTH
    SUMS_A: gl.constexpr = [1, 1, 4] if BY_ROWS or PAIRS else ([1, WA, T] if T <= 32 else [T // 64, 64, WA])
    SUMS_B: gl.constexpr = [1, 1, 4] if BY_ROWS or WB == 0 else [T // 64, 64, WB]
    B_BUFS: gl.constexpr = [STAGES, WB, 128] if WB > 0 else [1, 8, 16]
    smem: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    wa_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WA, 128], smem)
    wb_bufs = gl.allocate_shared_memory(gl.float8e4nv, B_BUFS, smem if WB > 0 else gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, T, 128], smem)
    sa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, T], flat)
    sw_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 4], flat)
    sums_a = gl.allocate_shared_memory(gl.float32, SUMS_A, gl.SwizzledSharedLayout(4, 1, 8 if SUMS_A[2] >= 32 else 1, order=[1, 0]))
    sums_b = gl.allocate_shared_memory(gl.float32, SUMS_B, gl.SwizzledSharedLayout(4, 1, 8 if SUMS_B[2] >= 32 else 1, order=[1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sums_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    sums_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    there_known = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int32, [4], flat)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=33)  # the expected bytes, and each lane's copies
        mbarrier.init(empty.index(i), count=2 if BY_ROWS else 1)
    mbarrier.init(sums_full, count=1)
    mbarrier.init(order.index(0), count=1)
    mbarrier.init(order.index(1), count=1)
    mbarrier.init(sums_empty, count=1)
    mbarrier.init(there_known, count=1)
    gl.warp_specialize(
        [
            (_consumer, (0, w_ptr, bias_ptr, residual_ptr, out_ptr, part_ptr, slots_ptr, words_ptr, wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs,
                         sums_a, sums_b, full, empty, order, sums_full, sums_empty, there, there_known, rows, stride_rm, stride_om, zero,
                         N, K, TILES, WA, WB, T, STAGES, WHOLE, PAIRS, SLOTS, AHEAD, PDL)),
            (_consumer, (1, w_ptr, bias_ptr, residual_ptr, out_ptr, part_ptr, slots_ptr, words_ptr, wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs,
                         sums_a, sums_b, full, empty, order, sums_full, sums_empty, there, there_known, rows, stride_rm, stride_om, zero,
                         N, K, TILES, WA, WB, T, STAGES, WHOLE, PAIRS, SLOTS, AHEAD, PDL)),
            (_producer, (a_desc, wa_desc, wb_desc, wa_bufs, wb_bufs, a_bufs, full, empty,
                         KB, TILES, WA, WB, T, STAGES, WHOLE, FLIGHT, EARLY, PDL)),
            (_scale_producer, (sa_ptr, sw_ptr, words_ptr, rows, stride_sam, stride_sak, sa_bufs, sw_bufs, full, empty, there, there_known,
                               N, KB, TILES, WA, WB, T, STAGES, WHOLE, PDL)),
        ],
        [4, 1, 1],
        [REGS, 40, 40],
    )  # fmt: skip


_BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def launch_dense_stream(
    op: str, a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor, part: torch.Tensor | None, cfg: DenseGemmConfig, early: bool = False,
) -> None:  # fmt: skip
    """Launch on given buffers; allocates nothing, but once for a device `zeroed_words`, and `slots` for each width of a tile.

    Args:
        a: (M, K) e4m3 bits, rows on 16-byte boundaries; M at most `cfg.block_m`.
        a_scale: (M, K / 128), any strides.
        w: (N, K) contiguous; w_scale: contiguous.
        part: contiguous fp32 of `dense_config.part_bytes`, or None where those are 0.
        early: the predecessor on the stream is one of this package's kernels and did not write w: the weights are asked for before it ends.
    """
    (rows, k), n = a.shape, w.shape[0]
    tile_w, tile_t = cfg.block_n, cfg.block_m
    stride_rm = 0 if residual is None else residual.stride(0)
    # the distance of a single row can be anything
    a_desc = TensorDescriptor(as_e4m3(a), [rows, k], [a.stride(0) if rows > 1 else k, 1], [tile_t, 128], _BOX)
    first, second = boxes(tile_w)
    wa_desc = TensorDescriptor(as_e4m3(w), [n, k], [k, 1], [first, 128], _BOX)
    wb_desc = TensorDescriptor(as_e4m3(w), [n, k], [k, 1], [second, 128], _BOX) if second else None
    small, pairs, sms = fits_twice(cfg), in_pairs(cfg, n), arch_of(a.device).sms
    between = (slots(a.device, sms, cfg.block_n), zeroed_words(a.device, cfg.programs)) if pairs else (None, None)
    launch(
        op, _dense_stream_kernel, (cfg.programs,),
        a_desc, a_scale, as_e4m3(w), wa_desc, wb_desc, w_scale, bias, residual, out, part, *between,
        rows, *a_scale.stride(), stride_rm, out.stride(0), 0,
        N=n, K=k, WA=first, WB=second, T=tile_t, STAGES=cfg.stages, WHOLE=part is None and not pairs, PAIRS=pairs, SLOTS=sms if pairs else 0,
        FLIGHT=steps_in_flight(cfg, k), EARLY=early, AHEAD=0 if early else steps_ahead(cfg),
        REGS=96 if small else 232, num_warps=4, maxnreg=80 if small else 168, enable_fp_fusion=True,
    )  # fmt: skip
    if part is not None:
        add_parts(op, part, bias, residual, out, k, cfg)
