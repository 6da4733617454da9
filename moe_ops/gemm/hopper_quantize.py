"""The activation quantizer inside Gluon kernels: one scale for 128 elements of a row, in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.gemm.gluon_compat import as_words
from moe_ops.gemm.hopper_epilogue import folded, refold, row_amax


@gluon.jit
def _quotient(v, scale):
    """v / scale, scale a column, v of 16-bit precision; see `quant.row_tiles.short_quotient`."""
    inverse = gl.div_rn(scale * 0.0 + 1.0, scale)
    near = (inverse.to(gl.int32, bitcast=True) - 1).to(gl.float32, bitcast=True)
    rest = gl.fma(scale * -1.0, near, 1.0 + gl.zeros_like(near)) * near
    return gl.fma(v, gl.expand_dims(near, 1) + gl.zeros_like(v), v * gl.expand_dims(rest, 1))


@gluon.jit
def _pairs(buf, lay: gl.constexpr):
    """A bf16 (64, 128) in shared memory as words of two, for the layout of an 8-bit operand."""
    words: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    return as_words(buf, 64, 64, words).load(gl.DotOperandLayout(operand_index=0, parent=lay.parent, k_width=2))


@gluon.jit
def _wide(x, lay: gl.constexpr):
    """Pairs of bf16 as fp32: a pair's upper half is there with one instruction, where the conversion of a single one takes two."""
    low = (x << 16).to(gl.float32, bitcast=True)
    high = (x & -65536).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), (64, 128)), lay)


@gluon.jit
def _finite_pair(x):
    """|x| of two bf16, NaN for an infinity; see `hopper_epilogue.finite`."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; fma.rn.bf16x2 z, $1, z, $1; abs.bf16x2 $0, z; }", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _larger_pair(x, y):
    """The larger of two pairs of bf16, each half by itself; a NaN loses."""
    return gl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _largest(top):
    """The larger half of a pair as fp32; 0 where both are NaN."""
    amax = gl.maximum((top << 16).to(gl.float32, bitcast=True), (top & -65536).to(gl.float32, bitcast=True))
    return gl.where(amax == amax, amax, 0.0)


@gluon.jit
def quantize_tile(buf, RULE: gl.constexpr, lay: gl.constexpr):
    """`quantize` of a 16-bit (64, 128) in shared memory. With one scale a row, bf16 finds its largest by pairs."""
    if buf.dtype == gl.bfloat16:
        x = _pairs(buf, lay)
        v = _wide(x, lay)
        if RULE == "folded":
            q, scale = quantize(v, RULE, lay)
        else:
            amax = _largest(gl.reduce(_finite_pair(x), 1, _larger_pair))
            scale = _scale_of(gl.convert_layout(amax, gl.SliceLayout(1, lay)))
            q = _quotient(v, scale).to(gl.float8e4nv)
    else:
        q, scale = quantize(buf.load(lay).to(gl.float32), RULE, lay)
    return q, scale


@gluon.jit
def _scale_of(amax):
    """amax / 448, at least the smallest normal number; 1 where amax is 0."""
    q = amax * 0.002232142857142857
    scale = gl.maximum(gl.fma(gl.fma(q, -448.0 + gl.zeros_like(q), amax), 0.002232142857142857 + gl.zeros_like(q), q), 1.1754943508222875e-38)
    return gl.where(amax == 0, 1.0, scale)


@gluon.jit
def quantize(a, RULE: gl.constexpr, lay: gl.constexpr):
    """(e4m3 of a (R, 128), 16-bit values as fp32 in layout `lay`, its scales (R,)) with the bytes of `quant.row_tiles.encode`."""
    if RULE == "folded":
        small, byte = folded(a, 128)
        q, scale = refold(small, byte, gl.convert_layout(gl.max(byte, 1), gl.SliceLayout(1, lay)), 128, lay)
    else:
        scale = _scale_of(row_amax(a))
        q = _quotient(a, scale).to(gl.float8e4nv)
    return q, scale
