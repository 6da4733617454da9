"""How the row-walking quantizers share their work: tile shape, warps, and programs per SM."""

from dataclasses import dataclass

from moe_ops.core.arch import Arch
from moe_ops.core.formats import ceil_div

__all__ = ["RowConfig", "heuristic", "is_legal", "search_space"]


@dataclass(frozen=True)
class RowConfig:
    """One program's tile and how many programs run.

    Attributes:
        block_r: rows of a tile, a power of two.
        columns: columns of a tile, a power of two that holds whole scale groups, four at least.
        warps: warps of a program.
        programs: programs per SM; they share the filled tiles.
    """

    block_r: int = 1
    columns: int = 1024
    warps: int = 4
    programs: int = 8


def is_legal(cfg: RowConfig, group: int) -> str | None:
    """None, or why the config cannot run for scale groups of `group` columns."""
    for name in ("block_r", "columns", "warps"):
        value = getattr(cfg, name)
        if value < 1 or value & (value - 1):
            return f"{name} must be a power of two, got {value}"
    if cfg.columns < 4 * group:
        return f"columns must hold at least 4 groups of {group}, got {cfg.columns}"
    if cfg.block_r * cfg.columns > 16384:
        return f"a tile may hold at most 16384 elements, got {cfg.block_r} x {cfg.columns}"
    if cfg.warps > 16 or cfg.programs < 1:
        return f"warps must be at most 16 and programs at least 1, got {cfg.warps} and {cfg.programs}"
    return None


def heuristic(rows: int, k: int, arch: Arch, block_r: int = 4) -> RowConfig:
    """The config for `rows` rows of capacity (all experts together) of k columns.

    Few rows: tiles of one row, so that as many programs as possible work at once. Many: tiles of `block_r` rows, which keep more loads in
    flight and share one search for the expert; 64 registers a thread let 4 programs of 8 warps share an SM.
    """
    columns = 1024 if k > 512 else 512
    if rows * ceil_div(k, columns) >= 32 * arch.sms:
        return _MANY[columns, block_r]
    return _FEW[columns]


# made once: a frozen dataclass costs a microsecond to make, on the path of every eager call
_FEW = {columns: RowConfig(1, columns, warps=4, programs=8) for columns in (512, 1024)}
_MANY = {(columns, block_r): RowConfig(block_r, columns, warps=8, programs=4) for columns in (512, 1024) for block_r in (2, 4)}


def search_space(group: int) -> list[RowConfig]:
    """Candidates for a tuner, all legal."""
    space = [RowConfig(r, c, w, p) for r in (1, 2, 4, 8) for c in (512, 1024, 2048) for w in (2, 4, 8) for p in (4, 8, 16)]
    return [cfg for cfg in space if is_legal(cfg, group) is None]
