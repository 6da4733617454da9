"""Configs of the dense and the batched GEMM: one frozen dataclass, one legality function, one heuristic that needs no database."""

import functools
from dataclasses import astuple, dataclass

from moe_ops.core.arch import Arch
from moe_ops.core.formats import ceil_div
from moe_ops.gemm.grouped_config import tile_reason

#: K that one split holds at least, and the unit in which K is shared: a scale block of fp8_block, four of mxfp8.
SPLIT_UNIT = 128
MAX_SPLIT = 64
#: Most rows that the GEMM quantizes itself; above, every column tile would repeat work that one pass over the activation does once.
FUSED_ROWS = 16


@dataclass(frozen=True)
class DenseGemmConfig:
    """How one dense or batched GEMM runs.

    Attributes:
        block_m: activation rows of a tile.
        block_n: weight rows (output columns) of a tile; a power of two that divides 128, so that a tile sees one 128-wide scale block.
        block_k: step along K; 128 for fp8_block; 32 for mxfp8 promoted in fp32, 128 for mxfp8 by the block-scaled instruction.
        warps: warps of a program.
        stages: depth of the software pipeline.
        split: parts of K, each of whole 128s, computed by programs of their own; their fp32 partials are added in a fixed order.
        swap: weights as the first operand of the tensor-core instruction (its M dimension): for few rows.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split: int
    swap: bool

    def ints(self) -> list[int]:
        """The config as it crosses an op boundary."""
        return [int(v) for v in astuple(self)]

    @staticmethod
    def of_ints(values: list[int]) -> "DenseGemmConfig":
        """The inverse of `ints`."""
        return DenseGemmConfig(*values[:-1], swap=bool(values[-1]))


@dataclass(frozen=True)
class DenseGemmProblem:
    """What decides which config runs.

    Attributes:
        rows: M, of one batch.
        batch: products of this size (heads of `bmm`), 1 for `dense_gemm`.
        n, k: weight rows and reduction length.
        fmt: one of `grouped_config.GEMM_FORMATS`.
        fused: whether the activation is 16-bit and quantized inside the kernel.
    """

    rows: int
    batch: int
    n: int
    k: int
    fmt: str
    fused: bool = False


def shared_bytes(cfg: DenseGemmConfig, problem: DenseGemmProblem) -> int:
    """Shared memory of the operand ring, in bytes."""
    size = 2 if problem.fmt == "plain" else 1
    return cfg.stages * (cfg.block_m * (2 if problem.fused else size) + cfg.block_n * size) * cfg.block_k


def is_legal(cfg: DenseGemmConfig, problem: DenseGemmProblem, arch: Arch) -> str | None:
    """None when `cfg` can run `problem` on `arch`, else why not."""
    reason = tile_reason(cfg, problem.fmt, arch)
    if reason is not None:
        return reason
    if not 1 <= cfg.split <= MAX_SPLIT:
        return f"split must be between 1 and {MAX_SPLIT}, got {cfg.split}"
    need = shared_bytes(cfg, problem)
    if need + 2048 > arch.smem:
        return f"needs {need} bytes of shared memory, {arch.name} has {arch.smem}"
    return None


def _tile(rows: int, problem: DenseGemmProblem, arch: Arch) -> DenseGemmConfig:
    """The tile for `rows` rows, without a split."""
    small = arch.smem < 150_000  # SM89 and SM120: less than half of Hopper's shared memory
    if problem.fmt == "mxfp8":
        if not arch.has_block_scaled_mma:
            if rows <= 32:  # SM89's instruction takes its operands from registers: four warps would spill
                return DenseGemmConfig(max(16, rows), 64, 32, 4, 8, 1, True) if arch.has_wgmma else DenseGemmConfig(16, 64, 32, 8, 4, 1, True)
            return DenseGemmConfig(64, 64, 32, 4, 6, 1, False)
        # 128 rows in the instruction's M: with 64, SM100 widens both operands to 16 bits
        if rows <= 32:
            return DenseGemmConfig(32, 128, 128, 8, 3, 1, True)
        return DenseGemmConfig(128, 128, 128, 8, 2 if problem.fused else 3, 1, False)
    block_k = 64 if problem.fmt == "plain" else 128
    if small:
        if rows <= 16:
            return DenseGemmConfig(16, 64, block_k, 4, 3, 1, True)
        return DenseGemmConfig(64, 64, block_k, 8 if problem.fused else 4, 3, 1, False)
    tiles = problem.batch * ceil_div(rows, 64) * ceil_div(problem.n, 128)
    block_n = 128 if rows > 64 and tiles >= 2 * arch.sms else 64
    if problem.fused and rows > 32:  # 8 warps: the tile that is being quantized takes registers too
        return DenseGemmConfig(64, block_n, block_k, 8, 3, 1, rows <= 64)
    if rows <= 64:
        return DenseGemmConfig(max(16, rows), 64, block_k, 4, 5 if rows <= 32 else 4, 1, True)
    return DenseGemmConfig(64, block_n, block_k, 4, 4, 1, False)


def heuristic(problem: DenseGemmProblem, arch: Arch) -> DenseGemmConfig:
    """A config for every problem, from its size alone; equal for all M up to the same power of two, so that few kernels are compiled."""
    rows = max(16, 1 << (problem.rows - 1).bit_length())
    return _heuristic(DenseGemmProblem(rows, problem.batch, problem.n, problem.k, problem.fmt, problem.fused), arch)


@functools.lru_cache(maxsize=4096)
def _heuristic(problem: DenseGemmProblem, arch: Arch) -> DenseGemmConfig:
    cfg = _tile(problem.rows, problem, arch)
    if problem.batch > 1:  # the batch fills the machine
        return cfg
    best = min(range(1, min(MAX_SPLIT, ceil_div(problem.k, SPLIT_UNIT)) + 1), key=lambda split: estimate_us(cfg, split, problem, arch))
    return DenseGemmConfig(cfg.block_m, cfg.block_n, cfg.block_k, cfg.warps, cfg.stages, best, cfg.swap)


def estimate_us(cfg: DenseGemmConfig, split: int, problem: DenseGemmProblem, arch: Arch) -> float:
    """Rough time of a split, to compare splits with one another; the constants are estimates for Hopper, no measurement is behind them.

    Programs run in waves. A step of 128 along K takes as long as the slowest of: the memory, which all programs of the wave share and whose
    weights row tiles share; one program's own loads in flight; the multiprocessor's port to the L2; its tensor cores. A split pays the
    reduction's launch and the way of the partials to the L2 and back.
    """
    size = 2 if problem.fmt == "plain" else 1
    m_tiles = ceil_div(problem.rows, cfg.block_m)
    units = ceil_div(problem.k, SPLIT_UNIT)
    steps = ceil_div(units, split)
    programs = problem.batch * m_tiles * ceil_div(problem.n, cfg.block_n) * ceil_div(units, steps)
    resident = min(4 if cfg.block_m <= 32 else 3, 12 // cfg.warps + 1, max(1, arch.smem // (shared_bytes(cfg, problem) + 1024)))
    weight = cfg.block_n * size * SPLIT_UNIT
    both = weight + cfg.block_m * (2 if problem.fused else size) * SPLIT_UNIT
    time, left = 0.0, programs
    while left > 0:
        wave = min(left, resident * arch.sms)
        waves = left // wave
        on_one = ceil_div(wave, arch.sms)
        memory = wave * weight / m_tiles / (arch.sms * 32e3)  # bytes a microsecond, as all that follow
        math = 2 * cfg.block_m * cfg.block_n * SPLIT_UNIT * on_one / (7e6 / size)
        time += waves * (1.0 + steps * max(memory, both / 20e3, on_one * both / 60e3, math))
        left -= waves * wave
    if split > 1:
        time += 1.5 + 8.0 * split * problem.batch * problem.rows * problem.n / (arch.sms * 20e3)
    return time


def search_space(problem: DenseGemmProblem, arch: Arch) -> list[DenseGemmConfig]:
    """Every legal config worth timing for `problem`."""
    out = []
    block_k = {"plain": 64, "fp8_block": 128, "mxfp8": 128 if arch.has_block_scaled_mma else 32}[problem.fmt]
    units = ceil_div(problem.k, SPLIT_UNIT)
    splits = sorted({ceil_div(units, ceil_div(units, s)) for s in range(1, min(MAX_SPLIT, units) + 1)})
    for bm in (16, 32, 64, 128):
        if bm > 16 and bm >= 2 * problem.rows:
            continue
        for bn in (64, 128):
            for warps in (4, 8):
                for stages in (2, 3, 4, 5, 6):
                    for split in splits:
                        for swap in (True, False):
                            cfg = DenseGemmConfig(bm, bn, block_k, warps, stages, split, swap)
                            if (swap or bm >= 64) and is_legal(cfg, problem, arch) is None:
                                out.append(cfg)
    return out
