"""The activation quantizer inside Gluon kernels: one scale for 128 elements of a row, in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.gemm.gluon_compat import as_words
from moe_ops.gemm.hopper_epilogue import folded, refold, row_amax, shifted


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
    """Two bf16, NaN for an infinity; see `hopper_epilogue.finite`."""
    return gl.inline_asm_elementwise("{ .reg .b32 z; mov.b32 z, 0; fma.rn.bf16x2 $0, $1, z, $1; }", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _larger_pair(x, y):
    """A number of the larger magnitude of two pairs of bf16, each half by itself, with any sign (|x| would be an instruction more); a NaN loses."""
    return gl.inline_asm_elementwise("max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _largest(top):
    """The larger magnitude of a pair as fp32; 0 where both are NaN."""
    amax = gl.maximum(gl.abs((top << 16).to(gl.float32, bitcast=True)), gl.abs((top & -65536).to(gl.float32, bitcast=True)))
    return gl.where(amax == amax, amax, 0.0)


@gluon.jit
def _larger_field(x, y):
    """The larger of two pairs of unsigned 16-bit numbers, each half by itself."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _times_pair(x, y):
    """The products of two pairs of bf16."""
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _magnitude(x):
    """|x| of a pair of bf16, 0 where NaN."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; abs.bf16x2 $0, $1; max.bf16x2 $0, $0, z; }", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _both_halves(x, y):
    """x's half of the larger magnitude beside y's, as `_larger_pair` finds them."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 z; prmt.b32 z, $1, $2, 0x5410; prmt.b32 $0, $1, $2, 0x7632; max.xorsign.abs.bf16x2 $0, z, $0; }",
        "=&r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _low_half(x):
    """A word's low 16 bits in both of its halves."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _high_half(x):
    """A word's high 16 bits in both of its halves."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _of_rows(low, high):
    """(4, 8, 4) of the rows r and of the rows r + 8 of every 16 -> (64, 4)."""
    return gl.reshape(gl.permute(gl.join(low, high), (0, 3, 1, 2)), (64, 4))


@gluon.jit
def _fold_pairs(x, lay: gl.constexpr):
    """`quantize` by "folded" of `_pairs` of a bf16 (64, 128).

    A thread holds rows r and r + 8 of every 16, so what belongs to a group of 32 is computed for both in the halves of a word: its amax, then the
    exponent of its power of two where bf16 has it. A product that bf16 cannot hold is below 2^-126: e4m3 rounds it to zero. By elements in fp32
    a step of the batched GEMM took 756 instructions instead of 509 (sm_90, Triton 3.6).
    """
    top = gl.reshape(_finite_pair(x), (64, 4, 2, 4, 2))
    top = gl.reduce(gl.reduce(top, 4, _larger_pair), 2, _larger_pair)
    low, high = gl.split(gl.permute(gl.reshape(top, (4, 2, 8, 4, 4)), (0, 2, 4, 3, 1)))
    amax = gl.reduce(_both_halves(low, high), 2, _larger_pair)
    # 8 + the group's byte: 448 is 1.75 * 2^8, so a mantissa above 0x60 carries
    field = (_magnitude(amax) + 0x001F001F) & 0x7F807F80
    field = _larger_field(field, gl.full_like(field, 0x04000400))
    largest = gl.reduce(field, 2, _larger_field)
    inverse = -0x7CFF7D00 - field  # 0x8300 - the field: 2^(127 - byte)
    inverse = _of_rows(_low_half(inverse), _high_half(inverse))
    grouped = gl.reshape(x, (64, 4, 16))
    y = _times_pair(grouped, gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(2, grouped.type.layout)), 2))
    # the group's power of two over the row's, at least 2^-127
    one = gl.full_like(largest, 0x3F803F80)
    least = gl.expand_dims(_larger_field(largest, one) - one, 2)
    shift = _larger_field(field, least + gl.zeros_like(field)) + gl.expand_dims(one - largest, 2)
    low = (shift << 16).to(gl.float32, bitcast=True).to(gl.float16)
    high = (shift & -65536).to(gl.float32, bitcast=True).to(gl.float16)
    q = gl.reshape(_wide(gl.reshape(y, (64, 64)), lay).to(gl.float8e4nv), (64, 4, 32))
    factor = gl.expand_dims(gl.convert_layout(_of_rows(low, high), gl.SliceLayout(2, q.type.layout)), 2)
    q = gl.convert_layout(gl.reshape(shifted(q, factor), (64, 128)), lay)
    largest -= 0x04000400
    low = largest << 16
    high = largest & -65536
    scale = gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), (64,))
    scale = gl.where(scale == 0, 0x00400000, scale).to(gl.float32, bitcast=True)
    return q, gl.convert_layout(scale, gl.SliceLayout(1, lay))


@gluon.jit
def quantize_tile(buf, RULE: gl.constexpr, lay: gl.constexpr):
    """`quantize` of a 16-bit (64, 128) in shared memory. With one scale a row, bf16 finds its largest by pairs."""
    if buf.dtype == gl.bfloat16:
        x = _pairs(buf, lay)
        if RULE == "folded":
            q, scale = _fold_pairs(x, lay)
        else:
            v = _wide(x, lay)
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
