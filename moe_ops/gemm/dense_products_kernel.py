"""The products of the dense stream kernel along K: FP8 tensor cores out of the ring of slots, promoted in fp32 every 128 of K."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _pin(x):
    """Keep ptxas from giving several products temporaries of their own (see grouped_hopper.py)."""
    return gl.inline_asm_elementwise("// pin $0", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def products(
    wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, order, use_acc, it, steps, WG: gl.constexpr, TURN: gl.constexpr,
    WA: gl.constexpr, WB: gl.constexpr, T: gl.constexpr, A0: gl.constexpr, STAGES: gl.constexpr, mma_a: gl.constexpr, mma_b: gl.constexpr,
):  # fmt: skip
    """Rows A0 .. A0 + 64 of 128, or all rows, against the tile's boxes: sums over every TURN-th slot of `steps`, from `it` on.

    Returns the sums of (first 64 rows, box a), (first 64 rows, box b), (the other 64 rows, box a), (.., box b).

    `order`: where both warpgroups WG take every slot (TURN is 1) they ask for its products in turns, and the turn is over once they are asked for:
    the others' scaled sums then hide behind one's products. 128 rows of 18432 x 7168 44.4 us without, 41.7 with it, 41.2 with box b before box a, and
    in another run 39.3, 38.0, but 40.8 where the turn ends with the products (H200, 2026-12-01, results/nvidia_h200/dense_sweep.json, order).

    A slot always belongs to the same consumer (the ring is of even depth where they take turns): one that skipped a round of a slot would
    take an old phase of its barrier for the new one.
    """
    SWAP: gl.constexpr = T <= 32
    ORDERED: gl.constexpr = TURN == 1
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
    row_b: gl.constexpr = gl.SliceLayout(1, mma_b)
    slot = it % STAGES
    phase = (it // STAGES) & 1
    turn = (it // TURN) & 1
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
            swa = sw.slice(0, 1).load(row)
            if WB > 0:
                swb = sw.slice(1, 1).load(row_b)
            if BOTH:
                sc = sa_bufs.index(slot).slice(64, 64).load(row)
            a = a_bufs.index(slot).slice(A0, 64)
            wb = wb_bufs.index(slot if WB > 0 else 0)
            if ORDERED:
                mbarrier.wait(order.index(WG), turn ^ (1 - WG))
            if WB > 0:
                tmp_b = warpgroup_mma(a, wb.permute((1, 0)), tmp_b, use_acc=use_acc, is_async=True)
            tmp_a = warpgroup_mma(a, wa.permute((1, 0)), tmp_a, use_acc=use_acc, is_async=True)
            if BOTH:
                c = a_bufs.index(slot).slice(64, 64)
                tmp_c = warpgroup_mma(c, wa.permute((1, 0)), tmp_c, use_acc=use_acc, is_async=True)
                if WB > 0:
                    tmp_d = warpgroup_mma(c, wb.permute((1, 0)), tmp_d, use_acc=use_acc, is_async=True)
            if ORDERED:
                mbarrier.arrive(order.index(1 - WG))
                turn ^= 1
            p = (sa * swa)[:, None]
            if WB > 0:
                pb = (gl.convert_layout(sa, row_b) * swb)[:, None]
            if BOTH:
                pc = (sc * swa)[:, None]
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
def wide_products(
    wa_bufs, wb_bufs, a_bufs, sa_bufs, sw_bufs, full, empty, it, steps,
    WA: gl.constexpr, WB: gl.constexpr, A0: gl.constexpr, STAGES: gl.constexpr, mma_a: gl.constexpr, mma_b: gl.constexpr,
):  # fmt: skip
    """`products` of rows A0 .. A0 + 64 and two boxes whose temporaries would not fit side by side: one after the other."""
    acc_a = gl.zeros([64, WA], gl.float32, mma_a)
    acc_b = gl.zeros([64, WB], gl.float32, mma_b)
    row: gl.constexpr = gl.SliceLayout(1, mma_a)
    row_b: gl.constexpr = gl.SliceLayout(1, mma_b)
    slot = it % STAGES
    phase = (it // STAGES) & 1
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        sw = sw_bufs.index(slot)
        sa = sa_bufs.index(slot).slice(A0, 64).load(row)
        swa = sw.slice(0, 1).load(row)
        swb = sw.slice(1, 1).load(row_b)
        a = a_bufs.index(slot).slice(A0, 64)
        tmp_a = gl.zeros([64, WA], gl.float32, mma_a)
        tmp_a = warpgroup_mma(a, wa_bufs.index(slot).permute((1, 0)), tmp_a, use_acc=False, is_async=True)
        p = (sa * swa)[:, None]
        pb = (gl.convert_layout(sa, row_b) * swb)[:, None]
        tmp_a = warpgroup_mma_wait(0, deps=[tmp_a])
        acc_a = _pin(acc_a + tmp_a * p)
        tmp_b = gl.zeros([64, WB], gl.float32, mma_b)
        tmp_b = warpgroup_mma(a, wb_bufs.index(slot).permute((1, 0)), tmp_b, use_acc=False, is_async=True)
        tmp_b = warpgroup_mma_wait(0, deps=[tmp_b])
        mbarrier.arrive(empty.index(slot))
        acc_b += tmp_b * pb
        wraps = slot == STAGES - 1
        slot = gl.where(wraps, 0, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
    return acc_a, acc_b
