"""Dense GEMM of at most 128 rows for Hopper in Gluon: FP8 block scaling, bound by the weights' bytes, K split wherever that evens out the work.

All steps of all tiles (a step is 128 of K for one tile) form one line, which the programs cut into equal parts:

    tile            |  0: kb 0 .. 55  |  1: kb 0 .. 55  |  2 ..
    program         |  0    |  1    |  2    |  3    |  ..            where a tile falls to one program it is finished there, else its parts
                                                                     go to slots of their own, which a second kernel adds in a fixed order

    producer        one warp: weights and activations by TMA, their scales by cp.async, a slot of a ring at a time, across tiles
    two consumers   a warpgroup each, promotion every 128 of K. They take turns at the steps, so that one multiplies while the other promotes,
                    and add their sums in shared memory; a wide tile of 128 rows they share by rows instead.
                    Up to 32 rows the weights are the instruction's M operand, above them the rows, 64 at a time.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.core.formats import as_e4m3
from moe_ops.core.launch import launch
from moe_ops.gemm.dense_config import DenseGemmConfig, fits_twice
from moe_ops.gemm.dense_kernel import add_parts
from moe_ops.gemm.gluon_compat import cp_async, gdc_launch_dependents, gdc_wait, thread_barrier, tma_load


@gluon.jit
def _share(TILES: gl.constexpr, KB: gl.constexpr, WHOLE: gl.constexpr):
    """First and last step (exclusive) of this program."""
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    if WHOLE:
        return p * TILES // programs * KB, (p + 1) * TILES // programs * KB
    return p * (TILES * KB) // programs, (p + 1) * (TILES * KB) // programs


@gluon.jit
def _ask(w_desc, s, bar, w_buf, KB: gl.constexpr, W: gl.constexpr, T: gl.constexpr):
    """Expect all bytes that TMA brings for step s, and ask for the weights."""
    mbarrier.expect(bar, (W + T) * 128)
    tma_load(w_desc, [s // KB * W, s % KB * 128], bar, w_buf)


@gluon.jit
def _producer(
    a_desc, sa_ptr, w_desc, sw_ptr, rows, stride_sam, stride_sak, w_bufs, a_bufs, sa_bufs, sw_bufs, full, empty,
    N: gl.constexpr, KB: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    word = gl.arange(0, 4, flat)
    sa = sa_ptr + gl.minimum(gl.arange(0, T, flat), rows - 1).to(gl.int64) * stride_sam
    start, end = _share(TILES, KB, WHOLE)
    if PDL and EARLY:
        for i in gl.static_range(STAGES):
            if start + i < end:
                _ask(w_desc, start + i, full.index(i), w_bufs.index(i), KB, W, T)
    if PDL:
        gdc_wait()
    for s in range(start, end):
        it = s - start
        slot = it % STAGES
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
        if PDL and EARLY:
            if it >= STAGES:
                _ask(w_desc, s, bar, w_bufs.index(slot), KB, W, T)
        else:
            _ask(w_desc, s, bar, w_bufs.index(slot), KB, W, T)
        kb = s % KB
        tma_load(a_desc, [0, kb * 128], bar, a_bufs.index(slot))
        cp_async(sa_bufs.index(slot), sa + kb.to(gl.int64) * stride_sak)
        # a scale for each 64 weight rows
        scale_row = gl.minimum((s // KB * W + word * 64) // 128, (N + 127) // 128 - 1)
        cp_async(sw_bufs.index(slot), sw_ptr + scale_row.to(gl.int64) * KB + kb)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _pin(x):
    """Keep ptxas from giving several products temporaries of their own (see grouped_hopper.py)."""
    return gl.inline_asm_elementwise("// pin $0", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _product(
    acc, tmp, use_acc, slot, w_bufs, a_bufs, sa_bufs, sw_bufs,
    A0: gl.constexpr, B0: gl.constexpr, BN: gl.constexpr, W: gl.constexpr, SWAP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """acc + the scaled product of one slot: rows A0 .. A0 + 64 against weight rows B0 .. B0 + BN; swapped, all weight rows against all rows."""
    scales: gl.constexpr = gl.SliceLayout(0 if SWAP else 1, mma)
    if SWAP:
        tmp = warpgroup_mma(w_bufs.index(slot), a_bufs.index(slot).permute((1, 0)), tmp, use_acc=use_acc, is_async=True)
        p = sa_bufs.index(slot).load(scales) * sw_bufs.index(slot).slice(0, 1).load(scales)
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        acc += tmp * p[None, :]
    else:
        b = w_bufs.index(slot).slice(B0, BN)
        tmp = warpgroup_mma(a_bufs.index(slot).slice(A0, 64), b.permute((1, 0)), tmp, use_acc=use_acc, is_async=True)
        p = sa_bufs.index(slot).slice(A0, 64).load(scales) * sw_bufs.index(slot).slice(B0 // 64, 1).load(scales)
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        acc = _pin(acc + tmp * p[:, None])
    return acc, tmp


@gluon.jit
def _products(
    w_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, use_acc, it, first, steps, TURN: gl.constexpr,
    W: gl.constexpr, T: gl.constexpr, A0: gl.constexpr, BN: gl.constexpr, COUNT: gl.constexpr, STEP_A: gl.constexpr, STEP_B: gl.constexpr,
    STAGES: gl.constexpr, SWAP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """One or two corners of a tile, STEP_A rows and STEP_B columns apart: sums over every TURN-th of `steps` slots, from `first` on.

    A slot always belongs to the same consumer (the ring is of even depth where they take turns): one that skipped a round of a slot would
    take an old phase of its barrier for the new one.
    """
    SHAPE: gl.constexpr = [W, T] if SWAP else [64, BN]
    acc0 = gl.zeros(SHAPE, gl.float32, mma)
    acc1 = gl.zeros(SHAPE, gl.float32, mma)
    tmp = gl.zeros(SHAPE, gl.float32, mma)
    for i in range(first, steps, TURN):
        slot = (it + i) % STAGES
        mbarrier.wait(full.index(slot), ((it + i) // STAGES) & 1)
        acc0, tmp = _product(acc0, tmp, use_acc, slot, w_bufs, a_bufs, sa_bufs, sw_bufs, A0, 0, BN, W, SWAP, mma)
        if COUNT > 1:
            acc1, tmp = _product(acc1, tmp, use_acc, slot, w_bufs, a_bufs, sa_bufs, sw_bufs, A0 + STEP_A, STEP_B, BN, W, SWAP, mma)
        mbarrier.arrive(empty.index(slot))
    return acc0, acc1


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
    WG: gl.constexpr, bias_ptr, residual_ptr, out_ptr, part_ptr, w_bufs, a_bufs, sa_bufs, sw_bufs, sums, full, empty, sums_full, sums_empty,
    rows, stride_rm, stride_om, zero,
    N: gl.constexpr, KB: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    SWAP: gl.constexpr = T <= 32
    BY_ROWS: gl.constexpr = T == 128 and W > 64
    BN: gl.constexpr = T if SWAP else (64 if W == 64 else 128)
    COUNT: gl.constexpr = 1 if SWAP else ((W // BN) if BY_ROWS else (T // 64) * (W // BN))
    STEP_A: gl.constexpr = 64 if T == 128 and not BY_ROWS else 0
    STEP_B: gl.constexpr = 0 if T == 128 and not BY_ROWS else BN
    A0: gl.constexpr = WG * 64 if BY_ROWS else 0
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    if PDL:
        gdc_wait()
        if WG == 0:
            gdc_launch_dependents()
    start, end = _share(TILES, KB, WHOLE)
    s = start
    j = 0
    while s < end:
        kb = s % KB
        steps = gl.minimum(KB - kb, end - s)
        acc0, acc1 = _products(
            w_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, zero != 0, s - start, 0 if BY_ROWS else (s - start + WG) % 2, steps, 1 if BY_ROWS else 2,
            W, T, A0, BN, COUNT, STEP_A, STEP_B, STAGES, SWAP, mma,
        )  # fmt: skip
        if not BY_ROWS:
            if WG == 1:
                mbarrier.wait(sums_empty, (j & 1) ^ 1)
                sums.index(0).store(acc0)
                if COUNT > 1:
                    sums.index(1).store(acc1)
                thread_barrier()
                mbarrier.arrive(sums_full)
            else:
                mbarrier.wait(sums_full, j & 1)
                acc0 += sums.index(0).load(mma)
                if COUNT > 1:
                    acc1 += sums.index(1).load(mma)
                thread_barrier()
                mbarrier.arrive(sums_empty)
        if BY_ROWS or WG == 0:
            n0 = s // KB * W
            whole = steps == KB
            part = 2 * gl.program_id(0) + (kb == 0).to(gl.int32)
            _finish(acc0, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, part, n0, rows, stride_rm, stride_om, N, W, T, A0, 0, SWAP)
            if COUNT > 1:
                _finish(
                    acc1, bias_ptr, residual_ptr, out_ptr, part_ptr, whole, part, n0, rows, stride_rm, stride_om, N, W, T, A0 + STEP_A, STEP_B, SWAP
                )
        s += steps
        j += 1


@gluon.jit(do_not_specialize=["rows", "stride_sam", "stride_sak", "zero"])
def _dense_stream_kernel(
    a_desc, sa_ptr, w_desc, sw_ptr, bias_ptr, residual_ptr, out_ptr, part_ptr, rows, stride_sam, stride_sak, stride_rm, stride_om, zero,
    N: gl.constexpr, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr, EARLY: gl.constexpr,
    REGS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`part_ptr`: fp32 (2 * programs, T, W), or None where every tile falls to one program. `zero` is 0: wgmma overwrites in place."""
    KB: gl.constexpr = (K + 127) // 128
    TILES: gl.constexpr = (N + W - 1) // W
    BY_ROWS: gl.constexpr = T == 128 and W > 64
    BN: gl.constexpr = 64 if W == 64 else 128
    SUMS: gl.constexpr = [1, W, T] if T <= 32 else ([1, 64, 4] if BY_ROWS else [(T // 64) * (W // BN), 64, BN])
    smem: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, W, 128], smem)
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, T, 128], smem)
    sa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, T], flat)
    sw_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 4], flat)
    sums = gl.allocate_shared_memory(gl.float32, SUMS, gl.SwizzledSharedLayout(4, 1, 8 if SUMS[2] >= 32 else 1, order=[1, 0]))
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
            (_consumer, (0, bias_ptr, residual_ptr, out_ptr, part_ptr, w_bufs, a_bufs, sa_bufs, sw_bufs, sums, full, empty, sums_full,
                         sums_empty, rows, stride_rm, stride_om, zero, N, KB, TILES, W, T, STAGES, WHOLE, PDL)),
            (_consumer, (1, bias_ptr, residual_ptr, out_ptr, part_ptr, w_bufs, a_bufs, sa_bufs, sw_bufs, sums, full, empty, sums_full,
                         sums_empty, rows, stride_rm, stride_om, zero, N, KB, TILES, W, T, STAGES, WHOLE, PDL)),
            (_producer, (a_desc, sa_ptr, w_desc, sw_ptr, rows, stride_sam, stride_sak, w_bufs, a_bufs, sa_bufs, sw_bufs, full, empty,
                         N, KB, TILES, W, T, STAGES, WHOLE, EARLY, PDL)),
        ],
        [4, 1],
        [REGS, 40],
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
    w_desc = TensorDescriptor(as_e4m3(w), [n, k], [k, 1], [tile_w, 128], _BOX)
    small = fits_twice(cfg)
    launch(
        op, _dense_stream_kernel, (cfg.programs,),
        a_desc, a_scale, w_desc, w_scale, bias, residual, out, part, rows, *a_scale.stride(), stride_rm, out.stride(0), 0,
        N=n, K=k, W=tile_w, T=tile_t, STAGES=cfg.stages, WHOLE=part is None, EARLY=early,
        REGS=96 if small else 232, num_warps=4, maxnreg=80 if small else 168, enable_fp_fusion=True,
    )  # fmt: skip
    if part is not None:
        add_parts(op, part, bias, residual, out, k, cfg)
