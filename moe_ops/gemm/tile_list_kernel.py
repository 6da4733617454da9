"""Kernel of the tile list; see tile_list.py."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "slots"])
def _tile_list_kernel(offsets_ptr, out_ptr, rows, slots, E: tl.constexpr, E2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """One program writes BLOCK entries: each finds its expert among the running sums of tiles."""
    e = tl.arange(0, E2)
    low = tl.load(offsets_ptr + e, mask=e < E, other=0)
    high = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
    low = tl.minimum(tl.maximum(low, 0), rows)
    filled = tl.maximum(tl.minimum(tl.maximum(high, 0), rows) - low, 0)
    tiles = (filled + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    total = tl.minimum(tl.sum(tiles, 0), slots)
    if tl.program_id(0) == 0:
        words = tl.arange(0, 4)
        tl.store(out_ptr + words, tl.where(words == 0, total, 0))
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    past = ends[None, :] <= i[:, None]
    expert = tl.sum(past.to(tl.int32), 1)
    before = tl.sum(tl.where(past, tiles[None, :], 0), 1)
    mine = e[None, :] == expert[:, None]
    first = tl.sum(tl.where(mine, low[None, :], 0), 1) + (i - before) * BLOCK_M
    end = tl.sum(tl.where(mine, (low + filled)[None, :], 0), 1)
    real = i < total
    entry = out_ptr + 4 + i.to(tl.int64) * 4
    ok = i < slots
    tl.store(entry, tl.where(real, expert, -1), mask=ok)
    tl.store(entry + 1, tl.where(real, first, -1), mask=ok)
    tl.store(entry + 2, tl.where(real, tl.minimum(end - first, BLOCK_M), -1), mask=ok)
    tl.store(entry + 3, tl.where(real, 0, -1), mask=ok)
