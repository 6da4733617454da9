"""Rows and scales as the CUTLASS kernels read them: gathered rows side by side, and E8M0 bytes in the tiles of SM100."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "tokens", "stride_sm", "stride_sk"])
def _gather_rows_kernel(
    a_ptr,
    scale_ptr,
    offsets_ptr,
    order_ptr,
    a_out_ptr,
    scale_out_ptr,
    rows,
    tokens,
    stride_am,
    stride_sm,
    stride_sk,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """BLOCK_R rows x BLOCK_C columns of a[order // TOP_K]; the first column block copies the scales too.

    Rows past the last expert's are left alone; an entry of nobody's becomes a row of zeros.
    """
    blocks: tl.constexpr = (K + BLOCK_C - 1) // BLOCK_C
    column = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    filled = tl.minimum(tl.load(offsets_ptr + E), rows)
    inside = row < filled
    pair = tl.load(order_ptr + row, mask=inside, other=-1)
    token = pair // TOP_K
    valid = inside & (pair >= 0) & (token < tokens)
    source = tl.where(valid, token, 0).to(tl.int64)
    target = row.to(tl.int64)
    cols = column * BLOCK_C + tl.arange(0, BLOCK_C)
    x = tl.load(a_ptr + source[:, None] * stride_am + cols[None, :], mask=valid[:, None] & (cols < K)[None, :], other=0)
    tl.store(a_out_ptr + target[:, None] * K + cols[None, :], x, mask=inside[:, None] & (cols < K)[None, :])
    if column == 0:
        for start in tl.static_range(0, BLOCKS, BLOCK_S):
            block = start + tl.arange(0, BLOCK_S)
            there = (block < BLOCKS)[None, :]
            at = source[:, None] * stride_sm + block.to(tl.int64)[None, :] * stride_sk
            s = tl.load(scale_ptr + at, mask=valid[:, None] & there, other=0)
            tl.store(scale_out_ptr + target[:, None] * BLOCKS + block[None, :], s, mask=inside[:, None] & there)


@triton.jit(do_not_specialize=["rows", "tiles", "stride_sm", "stride_sk", "stride_se"])
def _tile_scales_kernel(
    scale_ptr,
    offsets_ptr,
    out_ptr,
    rows,
    tiles,
    stride_sm,
    stride_sk,
    stride_se,
    E: tl.constexpr,
    E2: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """BLOCK_W words (4 bytes along K) of one tile row, 128 rows of one expert; padding becomes zero, tile rows of nobody are left alone.

    Expert e's tile rows start at e * tiles (masked; tiles of one expert), or at first row // 128 + e (packed).
    """
    words: tl.constexpr = (BLOCKS + 3) // 4
    columns: tl.constexpr = (words + BLOCK_W - 1) // BLOCK_W
    tile = tl.program_id(0) // columns
    word = (tl.program_id(0) % columns) * BLOCK_W + tl.arange(0, BLOCK_W)
    if MASKED:
        owner = tile // tiles
        rank = (tile - owner * tiles) * 128 + tl.arange(0, 128)
        count = tl.minimum(tl.maximum(tl.load(offsets_ptr + owner), 0), rows)
        first = tl.cast(0, tl.int64)
        base = owner.to(tl.int64) * stride_se
    else:
        expert = tl.arange(0, E2)
        low = tl.load(offsets_ptr + expert, mask=expert < E, other=0)
        low = tl.minimum(tl.maximum(low, 0), rows)
        high = tl.load(offsets_ptr + expert + 1, mask=expert < E, other=0)
        high = tl.minimum(tl.maximum(high, 0), rows)
        begin = low // 128 + expert
        mine = (expert < E) & (begin <= tile) & (tile < begin + (high - low + 127) // 128)
        # garbage in offsets may name two owners: one of them
        owner = tl.max(tl.where(mine, expert, -1), axis=0)
        chosen = mine & (expert == owner)
        first = tl.sum(tl.where(chosen, low, 0), axis=0).to(tl.int64)
        count = tl.sum(tl.where(chosen, high - low, 0), axis=0)
        rank = (tile - tl.sum(tl.where(chosen, begin, 0), axis=0)) * 128 + tl.arange(0, 128)
        base = tl.cast(0, tl.int64)
    if tl.max(rank, axis=0) - 127 < count:
        row = first + tl.where(rank < count, rank, 0).to(tl.int64)
        packed = tl.zeros((128, BLOCK_W), dtype=tl.int32)
        for byte in tl.static_range(4):
            block = word * 4 + byte
            inside = (rank < count)[:, None] & (block < BLOCKS)[None, :]
            at = base + row[:, None] * stride_sm + block.to(tl.int64)[None, :] * stride_sk
            packed |= tl.load(scale_ptr + at, mask=inside, other=0).to(tl.int32) << (8 * byte)
        within = tl.arange(0, 128)
        place = (tile.to(tl.int64) * words + word.to(tl.int64))[None, :] * 128 + (within % 32 * 4 + within // 32)[:, None]
        tl.store(out_ptr + place, packed, mask=(word < words)[None, :])
