"""Dense GEMM of at most 128 rows for Hopper in Gluon: FP8 block scaling, bound by the weights' bytes, K split wherever that evens out the work.

All steps of all tiles (a step is 128 of K for one tile) form one line, which the programs cut into equal parts:

    tile            |  0: kb 0 .. 55  |  1: kb 0 .. 55  |  2 ..
    program         |  0    |  1    |  2    |  3    |  ..            where a tile falls to one program it is finished there, else its parts
                                                                     go to slots of their own, which a second kernel adds in a fixed order

    two producers   a warp each, a slot of a ring at a time, across tiles: weights and activations by TMA; their scales by cp.async
    two consumers   a warpgroup each, promotion every 128 of K. They take turns at the steps, so that one multiplies while the other promotes,
                    and add their sums in shared memory; a wide tile of 128 rows they share by rows instead.
                    Up to 32 rows the weights are the instruction's M operand, above them the rows, 64 at a time.

A tile's columns are one box of weights or two, a and b, so that the tiles come out just below the number of SMs.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.core.formats import as_e4m3
from moe_ops.core.launch import launch
from moe_ops.gemm.dense_config import TURNS_WIDTH as _TURNS_WIDTH
from moe_ops.gemm.dense_config import DenseGemmConfig, boxes, fits_twice
from moe_ops.gemm.dense_kernel import add_parts
from moe_ops.gemm.gluon_compat import cp_async, gdc_launch_dependents, gdc_wait, thread_barrier, tma_load

TURNS_WIDTH = gl.constexpr(_TURNS_WIDTH)


@gluon.jit
def _share(TILES: gl.constexpr, KB: gl.constexpr, WHOLE: gl.constexpr):
    """First and last step (exclusive) of this program."""
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    if WHOLE:
        return p * TILES // programs * KB, (p + 1) * TILES // programs * KB
    return p * (TILES * KB) // programs, (p + 1) * (TILES * KB) // programs


@gluon.jit
def _ask(wa_desc, wb_desc, s, bar, wa_buf, wb_buf, KB: gl.constexpr, WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr):
    """Expect all bytes that TMA brings for step s, and ask for the weights."""
    mbarrier.expect(bar, (WA + WB + T) * 128)
    tma_load(wa_desc, [s // KB * (WA + WB), s % KB * 128], bar, wa_buf)
    if WB > 0:
        tma_load(wb_desc, [s // KB * (WA + WB) + WA, s % KB * 128], bar, wb_buf)


@gluon.jit
def _producer(
    a_desc, wa_desc, wb_desc, wa_bufs, wb_bufs, a_bufs, full, empty,
    KB: gl.constexpr, TILES: gl.constexpr, WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    start, end = _share(TILES, KB, WHOLE)
    if PDL and EARLY:
        for i in gl.static_range(STAGES):
            if start + i < end:
                _ask(wa_desc, wb_desc, start + i, full.index(i), wa_bufs.index(i), wb_bufs.index(i if WB > 0 else 0), KB, WA, WB, T)
    if PDL:
        gdc_wait()
    for s in range(start, end):
        it = s - start
        slot = it % STAGES
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
        if not (PDL and EARLY) or it >= STAGES:
            _ask(wa_desc, wb_desc, s, bar, wa_bufs.index(slot), wb_bufs.index(slot if WB > 0 else 0), KB, WA, WB, T)
        tma_load(a_desc, [0, s % KB * 128], bar, a_bufs.index(slot))


@gluon.jit
def _scale_producer(
    sa_ptr, sw_ptr, rows, stride_sam, stride_sak, sa_bufs, sw_bufs, full, empty,
    N: gl.constexpr, KB: gl.constexpr, TILES: gl.constexpr, WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr,
    WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Row-major scales lie a row's length apart: a warp of their own asks for them, so that the boxes need not wait."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    word = gl.arange(0, 4, flat)
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
        # the scale of the tile's beginning, the next one, and that of box b
        n0 = s // KB * (WA + WB)
        scale_row = gl.minimum(gl.where(word == 2, (n0 + WA) // 128, n0 // 128 + word), (N + 127) // 128 - 1)
        cp_async(sw_bufs.index(slot), sw_ptr + scale_row.to(gl.int64) * KB + kb)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _pin(x):
    """Keep ptxas from giving several products temporaries of their own (see grouped_hopper.py)."""
    return gl.inline_asm_elementwise("// pin $0", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _factors(sa, sw, before, SPANS: gl.constexpr, W: gl.constexpr, mma: gl.constexpr):
    """What a product (64, W) is multiplied by: (64, 1), or (64, W) where a box SPANS two blocks of 128 columns, `before` of them in the first.

    A border lies on a multiple of 8 columns, so that a thread's neighbours share a select.
    """
    row: gl.constexpr = gl.SliceLayout(1, mma)
    p = (sa * sw.slice(0, 1).load(row))[:, None]
    if SPANS:
        group = gl.arange(0, W, gl.SliceLayout(0, mma))[None, :] // 8
        p = gl.where(group < before // 8, p, (sa * sw.slice(1, 1).load(row))[:, None])
    return p


@gluon.jit
def _products(
    wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, use_acc, before, it, steps, TURN: gl.constexpr,
    WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, A0: gl.constexpr, STAGES: gl.constexpr, mma_a: gl.constexpr, mma_b: gl.constexpr,
):  # fmt: skip
    """Rows A0 .. A0 + 64 of 128, or all rows, against the tile's boxes: sums over every TURN-th slot of `steps`, from `it` on.

    Returns the sums of (first 64 rows, box a), (first 64 rows, box b), (the other 64 rows, box a), (.., box b).

    A slot always belongs to the same consumer (the ring is of even depth where they take turns): one that skipped a round of a slot would
    take an old phase of its barrier for the new one.
    """
    SWAP: gl.constexpr = T <= 32
    SPANS: gl.constexpr = 128 % (WA + WB) != 0 and (WA + WB) % 128 != 0
    BOTH: gl.constexpr = T == 128 and TURN == 2
    SHAPE_A: gl.constexpr = [WA, T] if SWAP else [64, WA]
    SHAPE_B: gl.constexpr = [64, WB if WB > 0 else 8]
    acc_a = gl.zeros(SHAPE_A, gl.float32, mma_a)
    acc_b = gl.zeros(SHAPE_B, gl.float32, mma_b)
    acc_c = gl.zeros(SHAPE_A, gl.float32, mma_a)
    acc_d = gl.zeros(SHAPE_B, gl.float32, mma_b)
    tmp_a = gl.zeros(SHAPE_A, gl.float32, mma_a)
    tmp_b = gl.zeros(SHAPE_B, gl.float32, mma_b)
    tmp_c = gl.zeros(SHAPE_A, gl.float32, mma_a)
    tmp_d = gl.zeros(SHAPE_B, gl.float32, mma_b)
    row: gl.constexpr = gl.SliceLayout(1, mma_a)
    slot = it % STAGES
    phase = (it // STAGES) & 1
    for _ in range(0, steps, TURN):
        mbarrier.wait(full.index(slot), phase)
        sw = sw_bufs.index(slot)
        wa = wa_bufs.index(slot)
        if SWAP:
            tmp_a = warpgroup_mma(wa, a_bufs.index(slot).permute((1, 0)), tmp_a, use_acc=use_acc, is_async=True)
            lay: gl.constexpr = gl.SliceLayout(0, mma_a)
            p = (sa_bufs.index(slot).load(lay) * sw.slice(0, 1).load(lay))[None, :]
            tmp_a = warpgroup_mma_wait(0, deps=[tmp_a])
            mbarrier.arrive(empty.index(slot))
            acc_a += tmp_a * p
        else:
            a = a_bufs.index(slot).slice(A0, 64)
            wb = wb_bufs.index(slot if WB > 0 else 0)
            tmp_a = warpgroup_mma(a, wa.permute((1, 0)), tmp_a, use_acc=use_acc, is_async=True)
            if WB > 0:
                tmp_b = warpgroup_mma(a, wb.permute((1, 0)), tmp_b, use_acc=use_acc, is_async=True)
            if BOTH:
                c = a_bufs.index(slot).slice(64, 64)
                tmp_c = warpgroup_mma(c, wa.permute((1, 0)), tmp_c, use_acc=use_acc, is_async=True)
                if WB > 0:
                    tmp_d = warpgroup_mma(c, wb.permute((1, 0)), tmp_d, use_acc=use_acc, is_async=True)
            # all scales are there before the product is
            sa = sa_bufs.index(slot).slice(A0, 64).load(row)
            p = _factors(sa, sw, before, SPANS, WA, mma_a)
            if WB > 0:
                pb = _factors(gl.convert_layout(sa, gl.SliceLayout(1, mma_b)), sw.slice(2, 1), before, False, WB, mma_b)
            if BOTH:
                sc = sa_bufs.index(slot).slice(64, 64).load(row)
                pc = _factors(sc, sw, before, SPANS, WA, mma_a)
                if WB > 0:
                    pd = _factors(gl.convert_layout(sc, gl.SliceLayout(1, mma_b)), sw.slice(2, 1), before, False, WB, mma_b)
            if WB > 0 and BOTH:
                tmp_a, tmp_b, tmp_c, tmp_d = warpgroup_mma_wait(0, deps=[tmp_a, tmp_b, tmp_c, tmp_d])
            elif WB > 0:
                tmp_a, tmp_b = warpgroup_mma_wait(0, deps=[tmp_a, tmp_b])
            elif BOTH:
                tmp_a, tmp_c = warpgroup_mma_wait(0, deps=[tmp_a, tmp_c])
            else:
                tmp_a = warpgroup_mma_wait(0, deps=[tmp_a])
            mbarrier.arrive(empty.index(slot))
            acc_a = _pin(acc_a + tmp_a * p)
            if WB > 0:
                acc_b += tmp_b * pb
            if BOTH:
                acc_c = _pin(acc_c + tmp_c * pc)
                if WB > 0:
                    acc_d += tmp_d * pd
        slot += TURN
        wraps = slot >= STAGES
        slot = gl.where(wraps, slot - STAGES, slot)
        phase = gl.where(wraps, phase ^ 1, phase)
    return acc_a, acc_b, acc_c, acc_d


@gluon.jit
def _finish(
    acc, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, slot, n0, rows, stride_rm, stride_om,
    N: gl.constexpr, W: gl.constexpr, T: gl.constexpr, R0: gl.constexpr, W0: gl.constexpr, SWAP: gl.constexpr,
):  # fmt: skip
    """Store a tile's corner (rows R0 .., columns n0 + W0 ..): finished to `out`, or as it is to a slot of (T, W)."""
    lay: gl.constexpr = acc.type.layout
    # in the instruction's own layout: what it takes to write whole lines would cost slots of the ring
    first = gl.expand_dims(gl.arange(0, acc.shape[0], gl.SliceLayout(1, lay)), 1)
    second = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, lay)), 0)
    r = R0 + (second if SWAP else first)
    c = W0 + (first if SWAP else second)
    n = n0 + c
    ok = (r < rows) & (n < N)
    if whole:
        if bias_ptr is not None:
            acc += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
        if residual_ptr is not None:
            acc += gl.load(residual_ptr + r.to(gl.int64) * stride_rm + n, mask=ok, other=0.0).to(gl.float32)
        gl.store(out_ptr + r.to(gl.int64) * stride_om + n, acc.to(out_ptr.dtype.element_ty), mask=ok)
    elif part_ptr is not None:
        gl.store(part_ptr + (slot.to(gl.int64) * T + r) * W + c, acc, mask=ok)


@gluon.jit
def _consumer(
    WG: gl.constexpr, bias_ptr, residual_ptr, out_ptr, part_ptr, wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, sums_a, sums_b, full, empty,
    sums_full, sums_empty, rows, stride_rm, stride_om, zero,
    N: gl.constexpr, KB: gl.constexpr, TILES: gl.constexpr, WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr,
    WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    SWAP: gl.constexpr = T <= 32
    W: gl.constexpr = WA + WB
    BY_ROWS: gl.constexpr = T == 128 and W > TURNS_WIDTH
    TURN: gl.constexpr = 1 if BY_ROWS else 2
    BOTH: gl.constexpr = T == 128 and TURN == 2
    A0: gl.constexpr = WG * 64 if BY_ROWS else 0
    mma_a: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, T if SWAP else WA, 32])
    mma_b: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WB if WB > 0 else 8, 32])
    if PDL:
        gdc_wait()
        if WG == 0:
            gdc_launch_dependents()
    start, end = _share(TILES, KB, WHOLE)
    s = start
    j = 0
    while s < end:
        kb = s % KB
        n0 = s // KB * W
        steps = gl.minimum(KB - kb, end - s)
        skip = 0 if BY_ROWS else (s - start + WG) % 2
        acc_a, acc_b, acc_c, acc_d = _products(
            wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, zero != 0, 128 - n0 % 128, s - start + skip, steps - skip,
            TURN, WA, WB, T, A0, STAGES, mma_a, mma_b,
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
                _finish(acc_b, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, part, n0, rows, stride_rm, stride_om, N, W, T, A0, WA, SWAP)
            if BOTH:
                _finish(acc_c, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, part, n0, rows, stride_rm, stride_om, N, W, T, 64, 0, SWAP)
                if WB > 0:
                    _finish(acc_d, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, part, n0, rows, stride_rm, stride_om, N, W, T, 64, WA, SWAP)
        s += steps
        j += 1


@gluon.jit(do_not_specialize=["rows", "stride_sam", "stride_sak", "zero"])
def _dense_stream_kernel(
    a_desc, sa_ptr, wa_desc, wb_desc, sw_ptr, bias_ptr, residual_ptr, out_ptr, part_ptr,
    rows, stride_sam, stride_sak, stride_rm, stride_om, zero,
    N: gl.constexpr, K: gl.constexpr, WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    EARLY: gl.constexpr, REGS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`part_ptr`: fp32 (2 * programs, T, WA + WB), or None where every tile falls to one program. `zero` is 0: wgmma overwrites in place."""
    KB: gl.constexpr = (K + 127) // 128
    TILES: gl.constexpr = (N + WA + WB - 1) // (WA + WB)
    BY_ROWS: gl.constexpr = T == 128 and WA + WB > TURNS_WIDTH
    SUMS_A: gl.constexpr = [1, 1, 4] if BY_ROWS else ([1, WA, T] if T <= 32 else [T // 64, 64, WA])
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
    sums_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    sums_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=33)  # the expected bytes, and each lane's copies
        mbarrier.init(empty.index(i), count=2 if BY_ROWS else 1)
    mbarrier.init(sums_full, count=1)
    mbarrier.init(sums_empty, count=1)
    gl.warp_specialize(
        [
            (_consumer, (0, bias_ptr, residual_ptr, out_ptr, part_ptr, wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, sums_a, sums_b, full, empty,
                         sums_full, sums_empty, rows, stride_rm, stride_om, zero, N, KB, TILES, WA, WB, T, STAGES, WHOLE, PDL)),
            (_consumer, (1, bias_ptr, residual_ptr, out_ptr, part_ptr, wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, sums_a, sums_b, full, empty,
                         sums_full, sums_empty, rows, stride_rm, stride_om, zero, N, KB, TILES, WA, WB, T, STAGES, WHOLE, PDL)),
            (_producer, (a_desc, wa_desc, wb_desc, wa_bufs, wb_bufs, a_bufs, full, empty, KB, TILES, WA, WB, T, STAGES, WHOLE, EARLY, PDL)),
            (_scale_producer, (sa_ptr, sw_ptr, rows, stride_sam, stride_sak, sa_bufs, sw_bufs, full, empty,
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
    """Launch on given buffers; allocates nothing.

    Args:
        a: (M, K) e4m3 bits, rows on 16-byte boundaries; M at most `cfg.block_m`.
        a_scale: (M, K / 128), any strides.
        w: (N, K) contiguous; w_scale: contiguous.
        part: contiguous fp32 of `dense_config.part_bytes`, or None where no tile is cut.
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
    small = fits_twice(cfg)
    launch(
        op, _dense_stream_kernel, (cfg.programs,),
        a_desc, a_scale, wa_desc, wb_desc, w_scale, bias, residual, out, part, rows, *a_scale.stride(), stride_rm, out.stride(0), 0,
        N=n, K=k, WA=first, WB=second, T=tile_t, STAGES=cfg.stages, WHOLE=part is None, EARLY=early,
        REGS=96 if small else 232, num_warps=4, maxnreg=80 if small else 168, enable_fp_fusion=True,
    )  # fmt: skip
    if part is not None:
        add_parts(op, part, bias, residual, out, k, cfg)
