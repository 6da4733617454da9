"""Kernels that lead into DeepGEMM's row layouts and back; what lies where is said in deep_gemm.py.

    packed or masked rows --spread--> rows of expert e from begin[e] on, scales MN-major, group layout --DeepGEMM--> --collect--> rows as they came

begin[e] is the sum of the earlier counts, each rounded up to `spacing` (contiguous), or e * spacing (masked).
"""

import triton
import triton.language as tl

from moe_ops.core.pdl import after_previous


@triton.jit
def _experts(offsets_ptr, limit, spacing, E: tl.constexpr, E2: tl.constexpr, FROM_MASKED: tl.constexpr, TO_MASKED: tl.constexpr):
    """Of every expert: first row where the rows come from, rows, first row where they go to, and the end of its room there."""
    expert = tl.arange(0, E2)
    here = expert < E
    low = tl.load(offsets_ptr + expert, mask=here, other=0)
    low = tl.minimum(tl.maximum(low, 0), limit)
    if FROM_MASKED:
        first = expert * 0
        count = low
    else:
        high = tl.load(offsets_ptr + expert + 1, mask=here, other=0)
        first = low
        count = tl.maximum(tl.minimum(tl.maximum(high, 0), limit) - low, 0)
    if TO_MASKED:
        room = tl.where(here, spacing, 0)
        count = tl.minimum(count, spacing)
    else:
        room = tl.cdiv(count, spacing) * spacing
    end = tl.cumsum(room, axis=0)
    return first, count, end - room, end


@triton.jit(do_not_specialize=["limit", "tokens", "padded", "spacing", "stride_ae", "stride_sae", "stride_sak", "stride_oe", "stride_ok"])
def _spread_rows_kernel(
    a_ptr,
    scale_ptr,
    offsets_ptr,
    order_ptr,
    data_out_ptr,
    scale_out_ptr,
    experts_ptr,
    ends_ptr,
    limit,
    tokens,
    padded,
    spacing,
    stride_am,
    stride_ae,
    stride_sam,
    stride_sak,
    stride_sae,
    stride_oe,
    stride_ok,
    E: tl.constexpr,
    E2: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    TOP_K: tl.constexpr,
    FROM_MASKED: tl.constexpr,
    TO_MASKED: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_R rows of DeepGEMM's layout, which belong to one expert, x BLOCK_C columns; the first column block writes scales and group layout.

    Rows that no source row goes to are left alone: what DeepGEMM makes of them is read by nobody.
    """
    after_previous(PDL)
    blocks: tl.constexpr = (K + BLOCK_C - 1) // BLOCK_C
    first, count, begin, end = _experts(offsets_ptr, limit, spacing, E, E2, FROM_MASKED, TO_MASKED)
    expert = tl.arange(0, E2)
    column = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks) * BLOCK_R
    if tl.program_id(0) == 0:
        ends = count if TO_MASKED else tl.minimum(begin + count, padded)
        tl.store(ends_ptr + expert, ends, mask=expert < E)
    owner = tl.sum(((end <= row) & (expert < E)).to(tl.int32), axis=0)
    mine = expert == owner
    rank = row - tl.sum(tl.where(mine, begin, 0), axis=0) + tl.arange(0, BLOCK_R)
    valid = (owner < E) & (rank >= 0) & (rank < tl.sum(tl.where(mine, count, 0), axis=0))
    if HAS_EXPERTS:
        if column == 0:
            tl.store(experts_ptr + row + tl.arange(0, BLOCK_R), tl.where(valid, owner, -1))
    source = tl.sum(tl.where(mine, first, 0), axis=0) + rank
    if order_ptr is not None:
        pair = tl.load(order_ptr + source, mask=valid & (source < limit), other=-1)
        valid = valid & (pair >= 0)
        source = tl.where(valid, pair, 0) // TOP_K
    valid = valid & (source < tokens)
    wide_owner = tl.where(owner < E, owner, 0).to(tl.int64)
    source = tl.where(valid, source, 0).to(tl.int64)
    target = row.to(tl.int64) + tl.arange(0, BLOCK_R)

    cols = column * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = valid[:, None] & (cols < K)[None, :]
    x = tl.load(a_ptr + wide_owner * stride_ae + source[:, None] * stride_am + cols[None, :], mask=inside, other=0)
    tl.store(data_out_ptr + target[:, None] * K + cols[None, :], x, mask=inside)
    if column == 0:
        place = wide_owner * stride_oe + rank if TO_MASKED else target
        for start in tl.static_range(0, WORDS, BLOCK_W):
            words = start + tl.arange(0, BLOCK_W)
            wide = words.to(tl.int64)[None, :]
            there = valid[:, None] & (words < WORDS)[None, :]
            s = tl.load(scale_ptr + wide_owner * stride_sae + source[:, None] * stride_sam + wide * stride_sak, mask=there, other=0)
            tl.store(scale_out_ptr + place[:, None] + wide * stride_ok, s, mask=there)


@triton.jit(do_not_specialize=["rows", "limit", "padded", "spacing"])
def _collect_rows_kernel(
    d_ptr,
    offsets_ptr,
    out_ptr,
    rows,
    limit,
    padded,
    spacing,
    E: tl.constexpr,
    E2: tl.constexpr,
    N: tl.constexpr,
    FROM_MASKED: tl.constexpr,
    TO_MASKED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_R rows of the result x BLOCK_C columns, from where DeepGEMM left them; rows of no expert stay untouched."""
    after_previous(PDL)
    blocks: tl.constexpr = (N + BLOCK_C - 1) // BLOCK_C
    column = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    expert = tl.arange(0, E2)
    if FROM_MASKED:
        owner = row // limit
        rank = row - owner * limit
        count = tl.load(offsets_ptr + owner, mask=row < rows, other=0)
        valid = (row < rows) & (rank < tl.minimum(count, spacing))
        place = owner.to(tl.int64) * spacing + rank
    else:
        first, count, begin, _end = _experts(offsets_ptr, limit, spacing, E, E2, FROM_MASKED, TO_MASKED)
        passed = ((first + count)[None, :] <= row[:, None]) & (expert < E)[None, :]
        owner = tl.sum(passed.to(tl.int32), axis=1)
        mine = expert[None, :] == owner[:, None]
        rank = row - tl.sum(tl.where(mine, first[None, :], 0), axis=1)
        valid = (row < rows) & (owner < E) & (rank >= 0) & (rank < tl.sum(tl.where(mine, count[None, :], 0), axis=1))
        place = tl.sum(tl.where(mine, begin[None, :], 0), axis=1).to(tl.int64) + rank
    valid = valid & (place >= 0) & (place < padded)
    cols = column * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = valid[:, None] & (cols < N)[None, :]
    y = tl.load(d_ptr + tl.where(valid, place, 0)[:, None] * N + cols[None, :], mask=inside)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * N + cols[None, :], y, mask=inside)
