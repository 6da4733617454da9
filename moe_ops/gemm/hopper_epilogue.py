"""Epilogue helpers of the Hopper prefill kernel: bias, activation, quantization in registers, coalesced stores."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from moe_ops.gemm.gluon_compat import thread_barrier, tma_store, tma_store_wait, wide_rows


def kind_of(act_kind: str, alpha: float, limit: float, up_offset: float) -> str:
    """KIND of `gated`."""
    plain = act_kind == "silu" and alpha == 1.0 and limit == math.inf and up_offset == 0.0
    return "plain_silu" if plain else act_kind


@gluon.jit
def gated(gate, up, alpha, lowest, limit, up_offset, KIND: gl.constexpr):
    """f(clamp(gate, lowest, limit)) * (clamp(up, -limit, limit) + up_offset); see quant/activation.py. NaN stays NaN.

    KIND "plain_silu" is "silu" with alpha 1, no limit and no offset. Every instruction counts: with compares and selects for the clamps
    an element took 25, and both consumers' epilogues 3200 issue slots a tile.
    """
    gate = _max_nan(gate, lowest)
    t = gate
    if KIND != "plain_silu":
        gate = _min_nan(gate, limit)
        up = _min_nan(_max_nan(up, -limit), limit) + up_offset
        t = alpha * gate
        if KIND == "gelu_tanh":
            t = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))
    return gate * _reciprocal(1.0 + _exp2(t * -1.4426950408889634)) * up


@gluon.jit
def _max_nan(x, y):
    return gl.inline_asm_elementwise("max.NaN.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _min_nan(x, y):
    return gl.inline_asm_elementwise("min.NaN.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exp2(x):
    """2^x to 2 ulp; results below 2^-126 are 0 (they are added to 1)."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    """1 / x to 1 ulp; a division compiles to several times the instructions."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def biased(acc, bias_ptr, BN: gl.constexpr, layout: gl.constexpr):
    """acc (.., BN) plus a bias of the columns, or None."""
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + gl.arange(0, BN, gl.SliceLayout(0, layout))).to(gl.float32)[None, :]
    return acc


@gluon.jit
def finite(h):
    """|h|, or NaN for an infinity: a maximum passes over NaN, so that an overflow spoils its own element and not its block."""
    return gl.abs(gl.fma(h, gl.zeros_like(h), h))


@gluon.jit
def row_amax(h):
    """Largest finite magnitude along the last axis, 0 where there is none."""
    amax = gl.max(finite(h), len(h.shape) - 1)
    return gl.where(amax == amax, amax, 0.0)


@gluon.jit
def quantized(h, amax):
    """e4m3 of h with one scale a row, amax / 448. The conversion saturates; the reciprocal, not a division, moves 1 element in 10^4 by a step."""
    scale = gl.maximum(amax / 448.0, 1.1754943508222875e-38)
    scale = gl.where(amax == 0, 1.0, scale)
    return (h * (1.0 / scale)[:, None]).to(gl.float8e4nv), scale


@gluon.jit
def folded(h, BN: gl.constexpr):
    """mxfp8 of h (R, BN), 1x32 along the columns: (e4m3 (R, BN / 32, 32), bytes (R, BN / 32))."""
    small = gl.reshape(h, (h.shape[0], BN // 32, 32))
    amax = row_amax(small)
    bits = amax.to(gl.int32, bitcast=True)
    byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    byte = gl.minimum(gl.maximum(byte, 0), 254)
    inverse = ((254 - byte) << 23).to(gl.float32, bitcast=True)
    return (small * gl.expand_dims(inverse, 2)).to(gl.float8e4nv), byte


@gluon.jit
def shifted(q, factor):
    """e4m3 of q * factor by pairs, with the bytes of fp32's product: q e4m3, factor fp16 that broadcasts against q, a power of two up to 1, or 0.

    A product has q's four bits, and fp16 holds them all in what e4m3 does not round to zero, above 2^-10.
    """
    return gl.inline_asm_elementwise(
        """{
            .reg .b16 c0, c1; .reg .b32 p0, p1;
            mov.b32 {c0, c1}, $1;
            cvt.rn.f16x2.e4m3x2 p0, c0;
            cvt.rn.f16x2.e4m3x2 p1, c1;
            mul.rn.f16x2 p0, p0, $2;
            mul.rn.f16x2 p1, p1, $3;
            cvt.rn.satfinite.e4m3x2.f16x2 c0, p0;
            cvt.rn.satfinite.e4m3x2.f16x2 c1, p1;
            mov.b32 $0, {c0, c1};
        }""", "=r,r,r,r", [q, factor], dtype=gl.float8e4nv, is_pure=True, pack=4
    )  # fmt: skip


@gluon.jit
def refold(q, byte, top, BN: gl.constexpr, layout: gl.constexpr):
    """The elements in the unit of the row's largest byte, `top` (R,): (e4m3 (R, BN), scales (R,))."""
    top3 = gl.convert_layout(top, gl.SliceLayout(1, byte.type.layout))
    shift = gl.maximum(byte - gl.expand_dims(top3, 1) + 127, 0)
    factor = (shift << 23).to(gl.float32, bitcast=True).to(gl.float16)
    q = shifted(q, gl.expand_dims(factor, 2))
    scale = gl.where(top == 0, 0x00400000, top << 23).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(q, (q.shape[0], BN)), layout), scale


@gluon.jit
def store(out_ptr, x, row0, r0, rows, col, stride, BN: gl.constexpr, VEC: gl.constexpr, AS_IS: gl.constexpr = False):
    """Rows r0 .. r0 + 64 of a tile, coalesced: VEC elements a thread, which exchange them unless x is AS_IS."""
    blocked: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // (BN // VEC), BN // VEC], [4, 1], [1, 0])
    lay: gl.constexpr = x.type.layout if AS_IS else wide_rows(BN) if VEC == 8 else blocked
    r = r0 + gl.arange(0, 64, gl.SliceLayout(1, lay))
    c = gl.arange(0, BN, gl.SliceLayout(0, lay))
    out = out_ptr + (row0 + r).to(gl.int64)[:, None] * stride + (col + c)[None, :]
    gl.store(out, gl.convert_layout(x, lay), mask=(r < rows)[:, None])


@gluon.jit
def store_tile(
    out_ptr, desc, stage, x, row0, r0, rows, col, stride, BN: gl.constexpr, VEC: gl.constexpr, BOXED: gl.constexpr
):  # fmt: skip
    """`store`; BOXED by TMA through `stage` (64, BN), this warpgroup's own, unless some of the 64 rows are another expert's.

    The box is read in the background: before `stage` is written again, and before the program ends, `tma_store_wait(0)` is due.
    """
    if BOXED:
        tma_store_wait(0)  # of the threads that asked for the box before; the barrier tells the others
        thread_barrier()
        stage.store(x)
        fence_async_shared()
        thread_barrier()
        if rows - r0 >= 64:
            tma_store(desc, [row0 + r0, col], stage)
        else:
            lay: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // (BN // VEC), BN // VEC], [4, 1], [1, 0])
            store(out_ptr, stage.load(lay), row0, r0, rows, col, stride, BN, VEC, True)
    else:
        store(out_ptr, x, row0, r0, rows, col, stride, BN, VEC)
