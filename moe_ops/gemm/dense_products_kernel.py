"""The products of the dense stream kernel along K: FP8 tensor cores out of the ring of slots, promoted in fp32 every 128 of K."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from moe_ops.gemm import dense_config

spans = gluon.constexpr_function(dense_config.spans)


@gluon.jit
def _pin(x):
    """Keep ptxas from giving several products temporaries of their own (see grouped_hopper.py)."""
    return gl.inline_asm_elementwise("// pin $0", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _scaled(x, p):
    """x (64, W) times p (64, 1), or (64, W / 8): one factor for 8 columns."""
    if p.shape[1] > 1:
        y = gl.reshape(x, (64, p.shape[1], 8)) * gl.expand_dims(p, 2)
        y = gl.convert_layout(gl.reshape(y, x.shape), x.type.layout)
    else:
        y = x * p
    return y


@gluon.jit
def products(
    wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, use_acc, it, steps, TURN: gl.constexpr,
    WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, A0: gl.constexpr, STAGES: gl.constexpr, mma_a: gl.constexpr, mma_b: gl.constexpr,
):  # fmt: skip
    """Rows A0 .. A0 + 64 of 128, or all rows, against the tile's boxes: sums over every TURN-th slot of `steps`, from `it` on.

    Returns the sums of (first 64 rows, box a), (first 64 rows, box b), (the other 64 rows, box a), (.., box b).

    A slot always belongs to the same consumer (the ring is of even depth where they take turns): one that skipped a round of a slot would
    take an old phase of its barrier for the new one.
    """
    SWAP: gl.constexpr = T <= 32
    SPANS: gl.constexpr = spans(WA + WB)
    GROUPS: gl.constexpr = WA // 8
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
    # a factor for each row, or for each row and 8 columns of box a
    by_8: gl.constexpr = gl.SliceLayout(2, gl.reshape(acc_a, (SHAPE_A[0], SHAPE_A[1] // 8, 8)).type.layout) if SPANS else mma_a
    row: gl.constexpr = gl.SliceLayout(1, by_8)
    column: gl.constexpr = gl.SliceLayout(0, by_8)
    row_b: gl.constexpr = gl.SliceLayout(1, mma_b)
    slot = it % STAGES
    phase = (it // STAGES) & 1
    for _ in range(0, steps, TURN):
        mbarrier.wait(full.index(slot), phase)
        sw = sw_bufs.index(slot)
        wa = wa_bufs.index(slot)
        # scales are asked for before the product: behind it they would wait until its instructions are taken
        if SWAP:
            lay: gl.constexpr = gl.SliceLayout(0, mma_a)
            sa = sa_bufs.index(slot).load(lay)
            swa = sw.slice(0, 1).load(lay)
            tmp_a = warpgroup_mma(wa, a_bufs.index(slot).permute((1, 0)), tmp_a, use_acc=use_acc, is_async=True)
            p = (sa * swa)[None, :]
            tmp_a = warpgroup_mma_wait(0, deps=[tmp_a])
            mbarrier.arrive(empty.index(slot))
            acc_a += tmp_a * p
        else:
            sa = sa_bufs.index(slot).slice(A0, 64).load(row)
            swa = sw.slice(0, GROUPS if SPANS else 1).load(column if SPANS else row)
            if WB > 0:
                swb = sw.slice(GROUPS, 1).load(row_b)
            if BOTH:
                sc = sa_bufs.index(slot).slice(64, 64).load(row)
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
            p = sa[:, None] * swa[None, :] if SPANS else (sa * swa)[:, None]
            if WB > 0:
                pb = (gl.convert_layout(sa, row_b) * swb)[:, None]
            if BOTH:
                pc = sc[:, None] * swa[None, :] if SPANS else (sc * swa)[:, None]
                if WB > 0:
                    pd = (gl.convert_layout(sc, row_b) * swb)[:, None]
            if WB > 0 and BOTH:
                tmp_a, tmp_b, tmp_c, tmp_d = warpgroup_mma_wait(0, deps=[tmp_a, tmp_b, tmp_c, tmp_d])
            elif WB > 0:
                tmp_a, tmp_b = warpgroup_mma_wait(0, deps=[tmp_a, tmp_b])
            elif BOTH:
                tmp_a, tmp_c = warpgroup_mma_wait(0, deps=[tmp_a, tmp_c])
            else:
                tmp_a = warpgroup_mma_wait(0, deps=[tmp_a])
            mbarrier.arrive(empty.index(slot))
            acc_a = _pin(acc_a + _scaled(tmp_a, p))
            if WB > 0:
                acc_b += tmp_b * pb
            if BOTH:
                acc_c = _pin(acc_c + _scaled(tmp_c, pc))
                if WB > 0:
                    acc_d += tmp_d * pd
        slot += TURN
        wraps = slot >= STAGES
        slot = gl.where(wraps, slot - STAGES, slot)
        phase = gl.where(wraps, phase ^ 1, phase)
    return acc_a, acc_b, acc_c, acc_d


@gluon.jit
def wide_products(
    wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, it, steps,
    WA: gl.constexpr, WB: gl.constexpr, A0: gl.constexpr, STAGES: gl.constexpr, mma_a: gl.constexpr, mma_b: gl.constexpr,
):  # fmt: skip
    """`products` of rows A0 .. A0 + 64 and two boxes whose temporaries would not fit side by side: one after the other."""
    acc_a = gl.zeros([64, WA], gl.float32, mma_a)
    acc_b = gl.zeros([64, WB], gl.float32, mma_b)
    by_8: gl.constexpr = gl.SliceLayout(2, gl.reshape(acc_a, (64, WA // 8, 8)).type.layout)
    row_b: gl.constexpr = gl.SliceLayout(1, mma_b)
    slot = it % STAGES
    phase = (it // STAGES) & 1
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        sw = sw_bufs.index(slot)
        sa = sa_bufs.index(slot).slice(A0, 64).load(gl.SliceLayout(1, by_8))
        swa = sw.slice(0, WA // 8).load(gl.SliceLayout(0, by_8))
        swb = sw.slice(WA // 8, 1).load(row_b)
        a = a_bufs.index(slot).slice(A0, 64)
        tmp_a = gl.zeros([64, WA], gl.float32, mma_a)
        tmp_a = warpgroup_mma(a, wa_bufs.index(slot).permute((1, 0)), tmp_a, use_acc=False, is_async=True)
        p = sa[:, None] * swa[None, :]
        pb = (gl.convert_layout(sa, row_b) * swb)[:, None]
        tmp_a = warpgroup_mma_wait(0, deps=[tmp_a])
        acc_a = _pin(acc_a + _scaled(tmp_a, p))
        tmp_b = gl.zeros([64, WB], gl.float32, mma_b)
        tmp_b = warpgroup_mma(a, wb_bufs.index(slot).permute((1, 0)), tmp_b, use_acc=False, is_async=True)
        tmp_b = warpgroup_mma_wait(0, deps=[tmp_b])
        mbarrier.arrive(empty.index(slot))
        acc_b += tmp_b * pb
        wraps = slot == STAGES - 1
        slot = gl.where(wraps, 0, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
    return acc_a, acc_b
