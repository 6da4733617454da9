"""The products of the Hopper prefill kernel along K: FP8 tensor cores out of the ring of slots, promoted in fp32 every 128 of K."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _pin(x):
    """Keep ptxas from giving both products temporaries of their own (without it: 190 spills; Triton 3.6)."""
    return gl.inline_asm_elementwise("// pin $0", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def scaled_products(
    a_bufs, b_bufs, sa_bufs, sw_bufs, full, empty, use_acc, it,
    A0: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr, BN: gl.constexpr, KB: gl.constexpr,
    STAGES: gl.constexpr, GATHER: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Walk K: rows A0 .. A0 + 64 of the slot's A against the BN weight rows at B0 and at B1; both promoted every 128 of K."""
    acc0 = gl.zeros((64, BN), gl.float32, mma)
    acc1 = gl.zeros((64, BN), gl.float32, mma)
    tmp = gl.zeros((64, BN), gl.float32, mma)
    for _ in range(KB):
        slot = it % STAGES
        mbarrier.wait(full.index(slot), (it // STAGES) & 1)
        if GATHER:
            fence_async_shared()
        a = a_bufs.index(slot).slice(A0, 64)
        tmp = warpgroup_mma(a, b_bufs.index(slot).slice(B0, BN).permute((1, 0)), tmp, use_acc=use_acc, is_async=True)
        s = sa_bufs.index(slot).slice(A0, 64).load(gl.SliceLayout(1, mma))
        p0 = s * sw_bufs.index(slot).slice(0, 1).load(gl.SliceLayout(1, mma))
        p1 = s * sw_bufs.index(slot).slice(1, 1).load(gl.SliceLayout(1, mma))
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        acc0 = _pin(acc0 + tmp * p0[:, None])
        tmp = warpgroup_mma(a, b_bufs.index(slot).slice(B1, BN).permute((1, 0)), tmp, use_acc=use_acc, is_async=True)
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        mbarrier.arrive(empty.index(slot))
        acc1 = _pin(acc1 + tmp * p1[:, None])
        it += 1
    return acc0, acc1, it


@gluon.jit
def scaled_product(
    a_bufs, b_bufs, sa_bufs, sw_bufs, full, empty, use_acc, it,
    WG: gl.constexpr, KB: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The first 64 rows of the slot's A against the weight rows of one box."""
    acc = gl.zeros((64, 128), gl.float32, mma)
    tmp = gl.zeros((64, 128), gl.float32, mma)
    for _ in range(KB):
        slot = it % STAGES
        mbarrier.wait(full.index(slot), (it // STAGES) & 1)
        if GATHER:
            fence_async_shared()
        a = a_bufs.index(slot).slice(0, 64)
        tmp = warpgroup_mma(a, b_bufs.index(slot).slice(WG * 128, 128).permute((1, 0)), tmp, use_acc=use_acc, is_async=True)
        s = sa_bufs.index(slot).slice(0, 64).load(gl.SliceLayout(1, mma))
        p = s * sw_bufs.index(slot).slice(WG, 1).load(gl.SliceLayout(1, mma))
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        mbarrier.arrive(empty.index(slot))
        acc = _pin(acc + tmp * p[:, None])
        it += 1
    return acc, it
