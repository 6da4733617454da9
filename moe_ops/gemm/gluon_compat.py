"""Names of Gluon that changed between the Triton versions this package accepts, and what its kernels share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

#: Barrier among the warps of a partition: `thread_barrier` up to Triton 3.6, `barrier` from 3.7 on.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
#: TMA box load: `async_copy_global_to_shared` up to 3.7, `async_load` from 3.8 on (3.9 raises on the old name).
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
#: TMA box store: `async_copy_shared_to_global` up to 3.7, `async_store` where 3.8 and later have it.
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
#: Copies by the threads of a partition (cp.async): `async_copy_global_to_shared` up to 3.7, `async_load` from 3.8 on.
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: Whether shared memory is read as another type by `reinterpret` (from 3.8 on) or by `_reinterpret`.
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def as_words(buf, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Shared memory seen as int32 (ROWS, COLUMNS)."""
    if _REINTERPRETS:
        words = buf.reinterpret(gl.int32, [ROWS, COLUMNS], layout)
    else:
        words = buf._reinterpret(gl.int32, [ROWS, COLUMNS], layout)
    return words


@gluon.constexpr_function
def wide_rows(width: int) -> gl.DistributedLinearLayout:
    """The layout of an instruction's (64, width), but with 8 neighbouring columns a thread, 4 of 8, which it gets from threads of its own warp."""
    columns, rows = [[0, 1 << i] for i in range((width - 1).bit_length())], [[1, 0], [2, 0], [4, 0], [8, 0]]
    vec = min(3, len(columns) - 1)
    lanes = (columns[vec:] + rows[3:])[:2]
    rest = [base for base in columns[vec:] + rows[3:] if base not in lanes]
    return gl.DistributedLinearLayout(columns[:vec] + rest, lanes + rows[:3], [[16, 0], [32, 0]], [], [64, width])


@gluon.jit
def gdc_wait():
    """Wait for the kernel before this one; see core/pdl.py."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gdc_launch_dependents():
    """Let the next kernel start."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch_l2(ptr, ok):
    """Ask the L2 for the 128 bytes that begin at each of `ptr` where `ok`.

    Allowed before `gdc_wait` whatever the predecessor writes: nobody reads the bytes here, and the L2 keeps them current.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", [ptr.to(gl.int64), ok.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def expert_fill(offsets_ptr, rows, capacity, E: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr):
    """(experts 0 .. E2, rows of each), both (E2,) int32 in `layout`; see `expert_rows`.

    Offsets and order may be read before the predecessor has ended: from L2, because L1 may hold what was there before.
    """
    e = gl.arange(0, layout.size_per_thread[0] * 32 * layout.warps_per_cta[0], layout)
    if offsets_ptr is None:
        filled = gl.where(e == 0, rows, 0)
    else:
        low = gl.load(offsets_ptr + e, mask=e < E, other=0, cache_modifier=".cg")
        if MASKED:
            filled = gl.minimum(gl.maximum(low, 0), capacity)
        else:
            high = gl.load(offsets_ptr + e + 1, mask=e < E, other=0, cache_modifier=".cg")
            filled = gl.maximum(gl.minimum(gl.maximum(high, 0), rows) - gl.minimum(gl.maximum(low, 0), rows), 0)
    return e, filled


@gluon.jit
def expert_tiles(offsets_ptr, rows, capacity, E: gl.constexpr, BLOCK: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr):
    """Row tiles of BLOCK rows: (tiles of each expert, running sum of tiles), each (E2,) int32 in `layout`."""
    _, filled = expert_fill(offsets_ptr, rows, capacity, E, MASKED, layout)
    tiles = (filled + BLOCK - 1) // BLOCK
    return tiles, gl.associative_scan(tiles, 0, _add)


@gluon.jit
def tile_line(offsets_ptr, rows, capacity, E: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr):
    """The row tiles of 128 rows, expert by expert: keys for `find_tile`, (E2,) int32 in `layout`; how many there are, below 2^21; and how many
    of them have at most 64 rows.
    """
    e, filled = expert_fill(offsets_ptr, rows, capacity, E, MASKED, layout)
    tiles = (filled + 127) // 128
    both = gl.sum(tiles + ((((filled + 63) // 64) & 1) << 21), 0)  # one sum: two spill a register more (SM90, Triton 3.6)
    return (gl.associative_scan(tiles, 0, _add) << 10) + e + 1, both & 0x1FFFFF, both >> 21


@gluon.jit
def find_tile(keys, m):
    """(expert, tiles of the experts before it) of tile m of a line; keys are (sum of tiles up to here, inclusive) << 10 | expert + 1."""
    found = gl.max(gl.where(keys < ((m + 1) << 10), keys, 0), 0)
    return found & 1023, found >> 10


@gluon.jit
def expert_rows(offsets_ptr, e, rows, capacity, MASKED: gl.constexpr):
    """(first row, rows) of expert `e`, clamped: counts of masked rows, offsets of packed ones, or None: one expert has all rows."""
    if offsets_ptr is None:
        first = e * 0
        filled = rows
    else:
        low = gl.load(offsets_ptr + e, cache_modifier=".cg")
        if MASKED:
            first = e * capacity
            filled = gl.minimum(gl.maximum(low, 0), capacity)
        else:
            first = gl.minimum(gl.maximum(low, 0), rows)
            high = gl.load(offsets_ptr + e + 1, cache_modifier=".cg")
            filled = gl.maximum(gl.minimum(gl.maximum(high, 0), rows) - first, 0)
    return first, filled


@gluon.jit
def write_tile(slot, row0, rows, n, expert, layout: gl.constexpr):
    """Put what consumers need to know of a tile into `slot`, four int32; zero rows end the work."""
    word = gl.arange(0, 4, layout)
    slot.store(gl.where(word == 0, row0, gl.where(word == 1, rows, gl.where(word == 2, n, expert))))


@gluon.jit
def read_tile(slot, layout: gl.constexpr):
    """(first row, rows, column tile, expert) of a tile."""
    row0 = gl.sum(slot.slice(0, 1).load(layout), 0)
    rows = gl.sum(slot.slice(1, 1).load(layout), 0)
    n = gl.sum(slot.slice(2, 1).load(layout), 0)
    return row0, rows, n, gl.sum(slot.slice(3, 1).load(layout), 0)
