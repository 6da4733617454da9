"""Triton helpers of the quantizers that walk rows: sharing the filled rows among programs, encoding a tile, storing its scales.

A tile is (BLOCK_R rows, GROUPS groups of GROUP columns), and every group's scale is found inside it. A fixed number of programs shares the
tiles that hold filled rows, column tiles fastest, so that cost follows the filled rows and not the capacity.
"""

import triton
import triton.language as tl


@triton.jit
def filled_row_blocks(counts_ptr, rows, experts, COUNTS: tl.constexpr, NUM_COUNTS: tl.constexpr, BLOCK_R: tl.constexpr):
    """How many blocks of BLOCK_R filled rows there are, and what `locate_rows` needs to find the i-th.

    COUNTS: "all": every row of every expert; "run": every row of one run; "packed": sum(counts) rows of one run; "masked": counts[e] rows
    of expert e.
    Counts outside 0 .. rows are clamped, so that no count reaches past the buffers.
    """
    if COUNTS == "all" or COUNTS == "run":
        filled = rows
        ends = (rows + BLOCK_R - 1) // BLOCK_R
        total = ends * experts
    else:
        index = tl.arange(0, triton.next_power_of_2(NUM_COUNTS))
        counts = tl.load(counts_ptr + index, mask=index < NUM_COUNTS, other=0)
        counts = tl.minimum(tl.maximum(counts, 0), rows)
        if COUNTS == "packed":
            filled = tl.minimum(tl.sum(counts.to(tl.int64)), rows).to(tl.int32)
            ends = (filled + BLOCK_R - 1) // BLOCK_R
            total = ends
        else:
            filled = counts
            ends = tl.cumsum((counts + BLOCK_R - 1) // BLOCK_R)
            total = tl.max(ends)
    return filled, ends, total


@triton.jit
def locate_rows(block, counts_ptr, rows, filled, ends, COUNTS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Row block `block` -> (expert as int64, its first row, filled rows of that expert)."""
    if COUNTS == "all":
        expert = block // ends
        first = (block - expert * ends) * BLOCK_R
        limit = filled
    elif COUNTS == "run" or COUNTS == "packed":  # no division, which would stand before every tile's loads
        expert = block * 0
        first = block * BLOCK_R
        limit = filled
    else:
        before = ends <= block
        expert = tl.sum(before.to(tl.int32))
        first = (block - tl.max(tl.where(before, ends, 0))) * BLOCK_R
        limit = tl.minimum(tl.maximum(tl.load(counts_ptr + expert), 0), rows)
    return tl.cast(expert, tl.int64), first, limit


@triton.jit
def widened(x):
    """x in fp32; a bf16 by its bits, because the conversion takes two instructions for the upper half of a register (sm_90, Triton 3.6.0)."""
    if x.dtype == tl.bfloat16:
        v = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        v = x.to(tl.float32)
    return v


@triton.jit
def fp8_block_scale(amax, RULE: tl.constexpr):
    """fp8_block scale of a block's amax; see fp8_block.py."""
    # amax / 448 rounded once: the quotient's remainder is exact wherever the quotient is above the bound that follows
    q = amax * 0.002232142857142857
    scale = tl.maximum(tl.fma(tl.fma(q, -448.0, amax), 0.002232142857142857, q), 1.1754943508222875e-38)
    if RULE == "pow2":
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def e8m0_byte(amax, RULE: tl.constexpr):
    """E8M0 byte (int32) of a block's amax; see mxfp8.py."""
    bits = amax.to(tl.int32, bitcast=True)
    if RULE == "even":
        bits = bits + 0x7FFFF + ((bits >> 20) & 1)
    byte = (bits >> 23) - 8
    if RULE == "rceil":
        byte += ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(byte, 0), 254)


@triton.jit
def quotient(v, scale):
    """v / scale in fp32, correctly rounded, for an fp8_block scale that broadcasts against v.

    Without a division for each element (Markstein): with the scale's power of two taken out of both, the reciprocal of its mantissa is
    rounded once and the remainder is exact. In this form a zero keeps its sign (unary minus, which is 0 - x, would lose it).
    """
    bits = scale.to(tl.int32, bitcast=True)
    power = ((254 << 23) - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(mantissa * 0.0 + 1.0, mantissa)
    u = v * power
    q = u * inverse
    exact = tl.fma(tl.fma(q, mantissa, u * -1.0) * -1.0, inverse, q)
    return tl.where(tl.abs(q) < float("inf"), exact, q)  # an infinity leaves no remainder


@triton.jit
def short_quotient(v, scale):
    """v / scale in fp32 to within 2^-45 of itself before it is rounded: two instructions for an element instead of six.

    `near` is below 1 / scale and `rest` what it lacks, so an infinity, which times a negative rest would become NaN, stays one. For every
    two bf16 values |v| <= amax, and every two fp16 values, e4m3 rounds the result as it rounds the correct quotient (compared one by one,
    1.04e9 pairs, on a CPU, 2026-11-30; so also where scale > 2^102 makes `rest` subnormal). An fp32 v beside a tie may round the other way.
    """
    inverse = tl.div_rn(scale * 0.0 + 1.0, scale)
    near = (inverse.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    rest = tl.fma(scale * -1.0, near, 1.0) * near
    return tl.fma(v, near, v * rest)


@triton.jit
def finite_magnitude(v):
    """|v|, or NaN for an infinity, so that a maximum, which passes over NaN, sees finite values only."""
    return tl.abs(tl.fma(v, 0.0, v))


@triton.jit
def scaled(v, RULE: tl.constexpr, EXACT: tl.constexpr = True):
    """Tile v (R, GROUPS, GROUP) fp32 -> (v / scale fp32, scales (R, GROUPS)): fp32 scales for the fp8_block rules, else E8M0 bytes as int32.

    EXACT: whether rule "fp32" divides by `quotient`, which an fp32 v needs for its bytes to be those of the division, or by `short_quotient`.
    """
    amax = tl.max(finite_magnitude(v), axis=2)
    amax = tl.where(amax == amax, amax, 0.0)
    if RULE == "fp32":
        scale = fp8_block_scale(amax, RULE)
        divisor = tl.expand_dims(scale, 2)
        q = quotient(v, divisor) if EXACT else short_quotient(v, divisor)
    else:
        # a division by a power of two: multiply by its inverse, which is a normal number under every rule
        if RULE == "pow2":
            scale = fp8_block_scale(amax, RULE)
            inverse = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        else:
            scale = e8m0_byte(amax, RULE)
            inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
        q = v * tl.expand_dims(inverse, 2)
    return q, scale


@triton.jit
def e4m3_bits(q):
    """fp32 -> e4m3 bits, to nearest even; the conversion saturates, infinities too, and makes every NaN 0x7f (`cvt.rn.satfinite`)."""
    return q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def folded(v):
    """Tile v (R, GROUPS, 128) fp32 -> (values in the block's unit, fp32 scales): quantized 1x32, then folded to 1x128; see fold.py."""
    small = tl.reshape(v, (v.shape[0], v.shape[1], 4, 32))
    a = tl.abs(small)
    byte = e8m0_byte(tl.max(tl.where(a < float("inf"), a, 0.0), axis=3), "rceil")
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    q = (small * tl.expand_dims(inverse, 3)).to(tl.float8e4nv).to(tl.float32)
    top = tl.max(byte, axis=2)
    shift = tl.maximum(byte - tl.expand_dims(top, 2) + 127, 0)  # below 2^-126 every element rounds to zero
    q = q * tl.expand_dims((shift << 23).to(tl.float32, bitcast=True), 3)
    scale = tl.where(top == 0, 0x00400000, top << 23).to(tl.float32, bitcast=True)
    return tl.reshape(q, v.shape), scale


@triton.jit
def encode(v, RULE: tl.constexpr, EXACT: tl.constexpr = True):
    """Tile v (R, GROUPS, GROUP) fp32 -> (e4m3 bits, scales (R, GROUPS)); see `scaled` and `folded`."""
    if RULE == "folded":
        q, scale = folded(v)
    else:
        q, scale = scaled(v, RULE, EXACT)
    return e4m3_bits(q), scale


@triton.jit
def scale_offset(row, column, stride_m, stride_b, words, LAYOUT: tl.constexpr):
    """Offset of a row's scale (or word of four scales) within one expert; `words` is how many words a row has."""
    if LAYOUT == "swizzle_32x4x4":
        offset = ((row // 128) * words + column) * 128 + (row % 32) * 4 + (row % 128) // 32
    else:
        offset = row * stride_m + column * stride_b
    return offset


@triton.jit
def store_scales(scale_ptr, scale, row, first_group, limit, stride_m, stride_b, GROUPS_TOTAL: tl.constexpr, LAYOUT: tl.constexpr):
    """Store a tile's scales (R, GROUPS) of the rows `row` (R,) int64 that are below `limit`.

    Groups past the last one are not stored, except as zero bytes that fill up a word.
    """
    group = first_group + tl.arange(0, scale.shape[1])
    if LAYOUT == "row_major" or LAYOUT == "mn_major":
        mask = (row < limit)[:, None] & (group < GROUPS_TOTAL)[None, :]
        offset = scale_offset(row[:, None], group[None, :], stride_m, stride_b, 0, LAYOUT)
        tl.store(scale_ptr + offset, scale.to(scale_ptr.dtype.element_ty), mask=mask)
    else:
        WORDS: tl.constexpr = (GROUPS_TOTAL + 3) // 4
        byte = scale if scale.dtype == tl.int32 else scale.to(tl.int32, bitcast=True) >> 23
        byte = tl.where((group < GROUPS_TOTAL)[None, :], byte, 0)
        lanes = tl.reshape(byte, (scale.shape[0], scale.shape[1] // 4, 4))
        word = tl.sum(lanes << (8 * tl.arange(0, 4))[None, None, :], axis=2)
        column = first_group // 4 + tl.arange(0, scale.shape[1] // 4)
        mask = (row < limit)[:, None] & (column < WORDS)[None, :]
        offset = scale_offset(row[:, None], column[None, :], stride_m, stride_b, WORDS, LAYOUT)
        tl.store(scale_ptr + offset, word, mask=mask)


@triton.jit
def zero_padding(scale_ptr, rows, padding, experts, stride_e, stride_m, stride_b, GROUPS_TOTAL: tl.constexpr, LAYOUT: tl.constexpr):
    """Store zeros in the `padding` rows that the layout appends to each expert's `rows`."""
    WIDTH: tl.constexpr = GROUPS_TOTAL if LAYOUT == "row_major" or LAYOUT == "mn_major" else (GROUPS_TOTAL + 3) // 4
    total = experts * padding * WIDTH
    for start in range(tl.program_id(0) * 256, total, tl.num_programs(0) * 256):
        index = start + tl.arange(0, 256)
        column = index % WIDTH
        row = index // WIDTH
        expert = row // padding
        row = rows + (row - expert * padding).to(tl.int64)
        offset = expert.to(tl.int64) * stride_e + scale_offset(row, column.to(tl.int64), stride_m, stride_b, WIDTH, LAYOUT)
        tl.store(scale_ptr + offset, tl.zeros((256,), scale_ptr.dtype.element_ty), mask=index < total)
