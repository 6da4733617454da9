"""Prefill grouped GEMM for Hopper in Gluon: FP8 block scaling, warp-specialized, persistent over a device-side tile list.

One program on each SM, three roles:

    producer     fills a ring of STAGES slots: 128 rows of A (TMA, or cp.async by row index), two boxes of 128 weight rows (TMA)
    consumer 0   rows 0 .. 63 of the tile     two 64x128 accumulators, one temporary: wgmma of K = 128, then promotion with both scales
    consumer 1   rows 64 .. 127

The two boxes are neighbours (a plain 128x256 tile), or gate and up rows of the same 128 columns: then the epilogue applies the
activation, quantizes 1x128 and stores e4m3, and the 2I-wide product never exists in memory.
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
from moe_ops.gemm.gluon_compat import cp_async, thread_barrier, tma_load
from moe_ops.quant.activation import lowest_gate


@gluon.jit
def _tile_of(t, m_tiles, n_tiles, GROUP_M: gl.constexpr):
    """Tile number -> (row tile, column tile): groups of GROUP_M row tiles, m fastest inside, so that a wave shares weights in L2."""
    group = t // (GROUP_M * n_tiles)
    size = gl.minimum(m_tiles - group * GROUP_M, GROUP_M)
    rest = t - group * GROUP_M * n_tiles
    return group * GROUP_M + rest % size, rest // size


@gluon.jit
def _producer(
    a, w_desc, order_ptr, tiles_ptr, a_bufs, b_bufs, full, empty, a_rows_total, stride_am,
    N: gl.constexpr, K: gl.constexpr, HALF: gl.constexpr, N_TILES: gl.constexpr, STEP_N: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    lay: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    LAG: gl.constexpr = 2  # slots whose copies by cp.async may still be in flight
    m_tiles = gl.load(tiles_ptr)
    it = 0
    for t in range(gl.program_id(0), m_tiles * N_TILES, gl.num_programs(0)):
        m, n = _tile_of(t, m_tiles, N_TILES, GROUP_M)
        expert = gl.load(tiles_ptr + 4 + m * 4)
        row0 = gl.load(tiles_ptr + 4 + m * 4 + 1)
        rows = gl.load(tiles_ptr + 4 + m * 4 + 2)
        w_row = expert * N + n * STEP_N
        if GATHER:
            offs = gl.arange(0, 128, gl.SliceLayout(1, lay))
            pair = gl.load(order_ptr + row0 + gl.minimum(offs, rows - 1))
            row = gl.minimum(gl.maximum(pair // TOP_K, 0), a_rows_total - 1).to(gl.int64)
            ptrs = a + (row * stride_am)[:, None] + gl.arange(0, 128, gl.SliceLayout(0, lay))[None, :]
        for kb in range(K // 128):
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            if GATHER:
                mbarrier.expect(bar, 2 * 128 * 128)
                cp_async(a_bufs.index(slot), ptrs + kb * 128)
                async_copy.commit_group()
            else:
                mbarrier.expect(bar, 3 * 128 * 128)
                tma_load(a, [row0, kb * 128], bar, a_bufs.index(slot))
            tma_load(w_desc, [w_row, kb * 128], bar, b_bufs.index(slot).slice(0, 128))
            tma_load(w_desc, [w_row + HALF, kb * 128], bar, b_bufs.index(slot).slice(128, 128))
            if GATHER:
                if it >= LAG:
                    async_copy.wait_group(LAG)
                    _publish(full.index((it - LAG) % STAGES))
            it += 1
    if GATHER:
        for i in gl.static_range(LAG):
            if it >= LAG - i:
                async_copy.wait_group(LAG - 1 - i)
                _publish(full.index((it - LAG + i) % STAGES))


@gluon.jit
def _publish(bar):
    """Tell the consumers that this warpgroup's own copies into a slot are there, for the tensor cores too.

    Fencing here and not in the consumers keeps a MEMBAR, which waits for their scale loads, out of their loop.
    """
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bar)


@gluon.jit
def _pin(x):
    """Keep ptxas from giving both products temporaries of their own (without it: 190 spills; Triton 3.6)."""
    return gl.inline_asm_elementwise("// pin $0", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _gated(gate, up, alpha, lowest, limit, up_offset, KIND: gl.constexpr):
    """f(clamp(gate, lowest, limit)) * (clamp(up, -limit, limit) + up_offset); see quant/activation.py. NaN stays NaN."""
    gate = gl.where(gate > limit, limit, gl.where(gate < lowest, lowest, gate))
    up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    t = alpha * gate
    if KIND == "gelu_tanh":
        t = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))
    return gate * _reciprocal(1.0 + gl.exp2(t * -1.4426950408889634)) * (up + up_offset)


@gluon.jit
def _reciprocal(x):
    """1 / x to 1 ulp; a division compiles to several times the instructions.

    With divisions the fused kernel took 14 us more than the plain one, 1.6 us a tile (12,000 rows; H200, Triton 3.6, 2026-11-30).
    """
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _biased(acc, bias_ptr, BN: gl.constexpr, layout: gl.constexpr):
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + gl.arange(0, BN, gl.SliceLayout(0, layout))).to(gl.float32)[None, :]
    return acc


@gluon.jit
def _scaled_products(
    sa, stride_sak, sw0, sw1, a_bufs, b_bufs, full, empty, use_acc, it,
    A0: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr, BN: gl.constexpr, KB: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Walk K: rows A0.. of the slot's A against the BN weight rows at B0 and at B1; both promoted every 128 of K."""
    acc0 = gl.zeros((64, BN), gl.float32, mma)
    acc1 = gl.zeros((64, BN), gl.float32, mma)
    tmp = gl.zeros((64, BN), gl.float32, mma)
    s, w0, w1 = gl.load(sa), gl.load(sw0), gl.load(sw1)
    for kb in range(KB):
        slot = it % STAGES
        # the products come before the next loads: a carried `next` would become a move that waits for the load at once
        p0 = s * w0
        p1 = s * w1
        after = gl.minimum(kb + 1, KB - 1)
        s, w0, w1 = gl.load(sa + after * stride_sak), gl.load(sw0 + after), gl.load(sw1 + after)
        mbarrier.wait(full.index(slot), (it // STAGES) & 1)
        a = a_bufs.index(slot).slice(A0, 64)
        tmp = warpgroup_mma(a, b_bufs.index(slot).slice(B0, BN).permute((1, 0)), tmp, use_acc=use_acc, is_async=True)
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        acc0 = _pin(acc0 + tmp * p0[:, None])
        tmp = warpgroup_mma(a, b_bufs.index(slot).slice(B1, BN).permute((1, 0)), tmp, use_acc=use_acc, is_async=True)
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        mbarrier.arrive(empty.index(slot))
        acc1 = _pin(acc1 + tmp * p1[:, None])
        it += 1
    return acc0, acc1, it


@gluon.jit
def _scaled_product(
    sa, stride_sak, sw, a_bufs, b_bufs, full, empty, use_acc, it,
    B0: gl.constexpr, KB: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The first 64 rows of the slot's A against the 128 weight rows at B0."""
    acc = gl.zeros((64, 128), gl.float32, mma)
    tmp = gl.zeros((64, 128), gl.float32, mma)
    s, w = gl.load(sa), gl.load(sw)
    for kb in range(KB):
        slot = it % STAGES
        p = s * w
        after = gl.minimum(kb + 1, KB - 1)
        s, w = gl.load(sa + after * stride_sak), gl.load(sw + after)
        mbarrier.wait(full.index(slot), (it // STAGES) & 1)
        a = a_bufs.index(slot).slice(0, 64)
        tmp = warpgroup_mma(a, b_bufs.index(slot).slice(B0, 128).permute((1, 0)), tmp, use_acc=use_acc, is_async=True)
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        mbarrier.arrive(empty.index(slot))
        acc = _pin(acc + tmp * p[:, None])
        it += 1
    return acc, it


@gluon.jit
def _finite(h):
    """|h| with infinities and NaN as 0: an overflow spoils its own element and not its block."""
    a = gl.abs(h)
    return gl.where(a < float("inf"), a, 0.0)


@gluon.jit
def _quantized(h, amax):
    """e4m3 of h with one scale a row, amax / 448. The conversion saturates; the reciprocal, not a division, moves 1 element in 10^4 by a step."""
    scale = gl.maximum(amax / 448.0, 1.1754943508222875e-38)
    scale = gl.where(amax == 0, 1.0, scale)
    return (h * (1.0 / scale)[:, None]).to(gl.float8e4nv), scale


@gluon.jit
def _folded(h, BN: gl.constexpr):
    """mxfp8 of h (64, BN), 1x32 along the columns: (fp32 values of the rounded elements (64, BN / 32, 32), bytes (64, BN / 32))."""
    small = gl.reshape(h, (64, BN // 32, 32))
    amax = gl.max(_finite(small), 2)
    bits = amax.to(gl.int32, bitcast=True)
    byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    byte = gl.minimum(gl.maximum(byte, 0), 254)
    inverse = ((254 - byte) << 23).to(gl.float32, bitcast=True)
    return (small * gl.expand_dims(inverse, 2)).to(gl.float8e4nv).to(gl.float32), byte


@gluon.jit
def _refold(q, byte, top, BN: gl.constexpr, layout: gl.constexpr):
    """The elements in the unit of the row's largest byte, `top` (64,): (e4m3 (64, BN), scales (64,))."""
    top3 = gl.convert_layout(top, gl.SliceLayout(1, byte.type.layout))
    shift = gl.maximum(byte - gl.expand_dims(top3, 1) + 127, 0)
    q = q * gl.expand_dims((shift << 23).to(gl.float32, bitcast=True), 2)
    scale = gl.where(top == 0, 0x00400000, top << 23).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(q, (64, BN)), layout).to(gl.float8e4nv), scale


@gluon.jit
def _store(out_ptr, x, row0, r0, rows, col, stride, BN: gl.constexpr, VEC: gl.constexpr):
    """Rows r0 .. r0 + 64 of a tile, coalesced: VEC elements a thread."""
    lay: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // (BN // VEC), BN // VEC], [4, 1], [1, 0])
    r = r0 + gl.arange(0, 64, gl.SliceLayout(1, lay))
    c = gl.arange(0, BN, gl.SliceLayout(0, lay))
    out = out_ptr + (row0 + r).to(gl.int64)[:, None] * stride + (col + c)[None, :]
    gl.store(out, gl.convert_layout(x, lay), mask=(r < rows)[:, None])


@gluon.jit
def _consumer(
    WG: gl.constexpr, sa_ptr, sw_ptr, bias_ptr, out_ptr, out_scale_ptr, order_ptr, tiles_ptr, a_bufs, b_bufs, full, empty, amax_bufs, amax_bars,
    a_rows_total, stride_sam, stride_sak, zero, alpha, lowest, limit, up_offset,
    N: gl.constexpr, K: gl.constexpr, N_TILES: gl.constexpr, STEP_N: gl.constexpr, HALF: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr,
    FUSED: gl.constexpr, KIND: gl.constexpr, RULE: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Rows WG * 64 .. of each tile; of a tile with at most 64 rows both consumers take those rows and half of the columns each."""
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
    rows_l: gl.constexpr = gl.SliceLayout(1, wide)
    rows_n: gl.constexpr = gl.SliceLayout(1, narrow)
    KB: gl.constexpr = K // 128
    I: gl.constexpr = N // 2
    m_tiles = gl.load(tiles_ptr)
    use_acc = zero != 0
    it = 0
    tails = 0
    for t in range(gl.program_id(0), m_tiles * N_TILES, gl.num_programs(0)):
        m, n = _tile_of(t, m_tiles, N_TILES, GROUP_M)
        expert = gl.load(tiles_ptr + 4 + m * 4)
        row0 = gl.load(tiles_ptr + 4 + m * 4 + 1)
        rows = gl.load(tiles_ptr + 4 + m * 4 + 2)
        first = WG * 64
        if rows <= 64:
            first = 0
        offs = first + gl.arange(0, 64, rows_l)
        inside = row0 + gl.minimum(offs, rows - 1)
        if GATHER:
            a_row = gl.minimum(gl.maximum(gl.load(order_ptr + inside) // TOP_K, 0), a_rows_total - 1).to(gl.int64)
        else:
            a_row = inside.to(gl.int64)
        sa = sa_ptr + a_row * stride_sam
        sw0 = sw_ptr + (expert.to(gl.int64) * (N // 128) + n * (STEP_N // 128)) * KB
        sw1 = sw0 + (HALF // 128) * KB
        bias0 = expert.to(gl.int64) * N + n * STEP_N
        if rows > 64:
            acc0, acc1, it = _scaled_products(
                sa, stride_sak, sw0, sw1, a_bufs, b_bufs, full, empty, use_acc, it, WG * 64, 0, 128, 128, KB, STAGES, wide
            )
            if bias_ptr is not None:
                acc0 = _biased(acc0, bias_ptr + bias0, 128, wide)
                acc1 = _biased(acc1, bias_ptr + bias0 + HALF, 128, wide)
            if FUSED:
                h = _gated(acc0, acc1, alpha, lowest, limit, up_offset, KIND)
                if RULE == "folded":
                    small, byte = _folded(h, 128)
                    q, scale = _refold(small, byte, gl.convert_layout(gl.max(byte, 1), rows_l), 128, wide)
                else:
                    q, scale = _quantized(h, gl.max(_finite(h), 1))
                gl.store(out_scale_ptr + (row0 + offs).to(gl.int64) * (I // 128) + n, scale, mask=offs < rows)
                _store(out_ptr, q, row0, WG * 64, rows, n * 128, I, 128, 16)
            else:
                _store(out_ptr, acc0.to(out_ptr.dtype.element_ty), row0, WG * 64, rows, n * STEP_N, N, 128, 8)
                _store(out_ptr, acc1.to(out_ptr.dtype.element_ty), row0, WG * 64, rows, n * STEP_N + 128, N, 128, 8)
        elif FUSED:
            sa_n = gl.convert_layout(sa, rows_n)
            gate, up, it = _scaled_products(
                sa_n, stride_sak, sw0, sw1, a_bufs, b_bufs, full, empty, use_acc, it, 0, WG * 64, 128 + WG * 64, 64, KB, STAGES, narrow
            )
            if bias_ptr is not None:
                gate = _biased(gate, bias_ptr + bias0 + WG * 64, 64, narrow)
                up = _biased(up, bias_ptr + bias0 + HALF + WG * 64, 64, narrow)
            h_n = _gated(gate, up, alpha, lowest, limit, up_offset, KIND)
            if RULE == "folded":
                small_n, byte_n = _folded(h_n, 64)
                amax = gl.convert_layout(gl.max(byte_n, 1), rows_n).to(gl.float32)
            else:
                amax = gl.max(_finite(h_n), 1)
            # the other consumer holds the other 64 columns of the same scale group
            turn = tails & 1
            amax_bufs.index(turn * 2 + WG).store(amax)
            thread_barrier()
            mbarrier.arrive(amax_bars.index(turn))
            mbarrier.wait(amax_bars.index(turn), (tails >> 1) & 1)
            amax = gl.maximum(amax, amax_bufs.index(turn * 2 + 1 - WG).load(rows_n))
            tails += 1
            if RULE == "folded":
                q_n, scale_n = _refold(small_n, byte_n, amax.to(gl.int32), 64, narrow)
            else:
                q_n, scale_n = _quantized(h_n, amax)
            offs_n = gl.arange(0, 64, rows_n)
            if WG == 0:
                gl.store(out_scale_ptr + (row0 + offs_n).to(gl.int64) * (I // 128) + n, scale_n, mask=offs_n < rows)
            _store(out_ptr, q_n, row0, 0, rows, n * 128 + WG * 64, I, 64, 16)
        else:
            sw = sw0 if WG == 0 else sw1
            half, it = _scaled_product(sa, stride_sak, sw, a_bufs, b_bufs, full, empty, use_acc, it, WG * 128, KB, STAGES, wide)
            if bias_ptr is not None:
                half = _biased(half, bias_ptr + bias0 + WG * 128, 128, wide)
            _store(out_ptr, half.to(out_ptr.dtype.element_ty), row0, 0, rows, n * STEP_N + WG * 128, N, 128, 8)


@gluon.jit(do_not_specialize=["a_rows_total", "stride_sam", "stride_sak", "zero", "alpha", "lowest", "limit", "up_offset"])
def _grouped_gemm_hopper_kernel(
    a, sa_ptr, w_desc, sw_ptr, bias_ptr, out_ptr, out_scale_ptr, tiles_ptr, order_ptr, a_rows_total, stride_am, stride_sam, stride_sak, zero,
    alpha, lowest, limit, up_offset,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, FUSED: gl.constexpr,
    KIND: gl.constexpr, RULE: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One program computes every num_programs-th tile; `zero` is 0 at run time, which lets wgmma overwrite its accumulator in place."""
    STEP_N: gl.constexpr = 128 if FUSED else 256
    HALF: gl.constexpr = N // 2 if FUSED else 128
    N_TILES: gl.constexpr = N // 256
    smem: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], smem)
    b_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 256, 128], smem)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    amax_bufs = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    amax_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(amax_bars.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2 if GATHER else 1)
        mbarrier.init(empty.index(i), count=2)
    producer_warps: gl.constexpr = 4 if GATHER else 1
    producer_regs: gl.constexpr = 48 if GATHER else 24
    gl.warp_specialize(
        [
            (_consumer, (0, sa_ptr, sw_ptr, bias_ptr, out_ptr, out_scale_ptr, order_ptr, tiles_ptr, a_bufs, b_bufs, full, empty, amax_bufs, amax_bars,
                         a_rows_total, stride_sam, stride_sak, zero, alpha, lowest, limit, up_offset,
                         N, K, N_TILES, STEP_N, HALF, TOP_K, GATHER, FUSED, KIND, RULE, STAGES, GROUP_M)),
            (_consumer, (1, sa_ptr, sw_ptr, bias_ptr, out_ptr, out_scale_ptr, order_ptr, tiles_ptr, a_bufs, b_bufs, full, empty, amax_bufs, amax_bars,
                         a_rows_total, stride_sam, stride_sak, zero, alpha, lowest, limit, up_offset,
                         N, K, N_TILES, STEP_N, HALF, TOP_K, GATHER, FUSED, KIND, RULE, STAGES, GROUP_M)),
            (_producer, (a, w_desc, order_ptr, tiles_ptr, a_bufs, b_bufs, full, empty, a_rows_total, stride_am,
                         N, K, HALF, N_TILES, STEP_N, TOP_K, GATHER, STAGES, GROUP_M)),
        ],
        [4, producer_warps],
        [232, producer_regs],
    )  # fmt: skip


_BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
STAGES = 4
GROUP_M = 8


def launch_hopper(
    op: str, a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    out_scale: torch.Tensor | None, tiles: torch.Tensor, order: torch.Tensor | None, top_k: int, rows: int,
    act_kind: str = "silu", alpha: float = 1.0, limit: float = math.inf, up_offset: float = 0.0, rule: str = "fp32",
) -> None:  # fmt: skip
    """Launch on given buffers: with `out_scale` the fused GEMM1, without it the plain product in out's dtype. `tiles` holds 128-row tiles."""
    experts, n, k = w.shape
    arch = arch_of(a.device)
    a, w = as_e4m3(a), as_e4m3(w)
    gather = order is not None
    operand = a if gather else TensorDescriptor.from_tensor(a, [128, 128], _BOX)
    bound = (min(experts, rows) + rows // 128) * (n // 256)
    launch(
        op, _grouped_gemm_hopper_kernel, (max(1, min(arch.sms, bound)),),
        operand, a_scale, TensorDescriptor.from_tensor(w.view(experts * n, k), [128, 128], _BOX), w_scale, bias,
        as_e4m3(out) if out_scale is not None else out, out_scale, tiles, order, a.shape[0], a.stride(0), *a_scale.stride(), 0,
        alpha, lowest_gate(act_kind, alpha), limit, up_offset,
        N=n, K=k, TOP_K=top_k, GATHER=gather, FUSED=out_scale is not None, KIND=act_kind, RULE=rule, STAGES=STAGES, GROUP_M=GROUP_M, num_warps=4,
    )  # fmt: skip
