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
def load_wide(buf, lay: gl.constexpr):
    """A 16-bit (64, 128) in shared memory as fp32 in the layout of an 8-bit operand.

    bf16 by pairs: a pair's upper half is there with one instruction, where the conversion of a single one takes two.
    """
    if buf.dtype == gl.bfloat16:
        words: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
        pairs: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=lay.parent, k_width=2)
        x = as_words(buf, 64, 64, words).load(pairs)
        low = (x << 16).to(gl.float32, bitcast=True)
        high = (x & -65536).to(gl.float32, bitcast=True)
        v = gl.convert_layout(gl.reshape(gl.join(low, high), (64, 128)), lay)
    else:
        v = buf.load(lay).to(gl.float32)
    return v


@gluon.jit
def quantize(a, RULE: gl.constexpr, lay: gl.constexpr):
    """(e4m3 of a (R, 128), 16-bit values as fp32 in layout `lay`, its scales (R,)) with the bytes of `quant.row_tiles.encode`."""
    if RULE == "folded":
        small, byte = folded(a, 128)
        q, scale = refold(small, byte, gl.convert_layout(gl.max(byte, 1), gl.SliceLayout(1, lay)), 128, lay)
    else:
        amax = row_amax(a)
        q = amax * 0.002232142857142857
        scale = gl.maximum(gl.fma(gl.fma(q, -448.0 + gl.zeros_like(q), amax), 0.002232142857142857 + gl.zeros_like(q), q), 1.1754943508222875e-38)
        scale = gl.where(amax == 0, 1.0, scale)
        q = _quotient(a, scale).to(gl.float8e4nv)
    return q, scale
