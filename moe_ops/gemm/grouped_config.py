"""Configs of the grouped GEMM: one frozen dataclass, one legality function, one heuristic that needs no database."""

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from moe_ops.core.arch import Arch
from moe_ops.core.formats import ceil_div

if TYPE_CHECKING:
    from moe_ops.gemm.dense_config import DenseGemmConfig

#: Formats of the operands: the quantized ones, and "plain" for bf16 or fp16 on both sides.
GEMM_FORMATS = ("fp8_block", "mxfp8", "plain")


@dataclass(frozen=True)
class GroupedGemmConfig:
    """How one grouped GEMM runs.

    Attributes:
        block_m: routed rows of a tile.
        block_n: weight rows (output columns) of a tile; a power of two that divides 128, so that a tile sees one 128-wide scale block.
        block_k: step along K; 128 for fp8_block; 32 for mxfp8 promoted in fp32, 128 for mxfp8 by the block-scaled instruction.
        warps: warps of a program.
        stages: depth of the software pipeline.
        programs: programs per multiprocessor; 0 launches one program for each tile that could exist.
        swap: weights as the first operand of the tensor-core instruction (its M dimension): for few rows per expert.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    programs: int
    swap: bool

    def ints(self) -> list[int]:
        """The config as it crosses an op boundary."""
        return [int(v) for v in astuple(self)]

    @staticmethod
    def of_ints(values: list[int]) -> "GroupedGemmConfig":
        """The inverse of `ints`."""
        return GroupedGemmConfig(*values[:-1], swap=bool(values[-1]))


@dataclass(frozen=True)
class GroupedGemmProblem:
    """What decides which kernel and config run.

    Attributes:
        rows: rows there is room for (packed), or E * capacity (masked); an upper bound, the filled ones are known on the device alone.
        experts: E.
        n, k: weight rows and reduction length.
        fmt: one of `GEMM_FORMATS`.
    """

    rows: int
    experts: int
    n: int
    k: int
    fmt: str

    @property
    def rows_per_expert(self) -> int:
        """Average of the rows there is room for."""
        return ceil_div(self.rows, max(1, self.experts))


def shared_bytes(cfg: GroupedGemmConfig, fmt: str) -> int:
    """Shared memory of the operand ring, in bytes."""
    return cfg.stages * (cfg.block_m + cfg.block_n) * cfg.block_k * (2 if fmt == "plain" else 1)


def tile_reason(cfg: "GroupedGemmConfig | DenseGemmConfig", fmt: str, arch: Arch) -> str | None:
    """None when the tile of `cfg` suits operands of `fmt` on `arch`, its shared memory aside; else why not."""
    for name in ("block_m", "block_n", "block_k", "warps"):
        value = getattr(cfg, name)
        if value < 1 or value & (value - 1):
            return f"{name} must be a power of two, got {value}"
    if cfg.block_m < 16:
        return f"block_m must be at least 16, got {cfg.block_m}"
    if not 16 <= cfg.block_n <= 128:
        return f"block_n must be between 16 and 128, got {cfg.block_n}"
    if fmt == "fp8_block" and cfg.block_k != 128:
        return f"fp8_block needs block_k = 128 (one scale a step), got {cfg.block_k}"
    mx_k = 128 if arch.has_block_scaled_mma else 32
    if fmt == "mxfp8" and cfg.block_k != mx_k:
        return f"mxfp8 needs block_k = {mx_k} on {arch.name}, got {cfg.block_k}"
    if fmt == "plain" and not 16 <= cfg.block_k <= 256:
        return f"plain needs block_k between 16 and 256, got {cfg.block_k}"
    if cfg.swap and cfg.block_n < 64:
        return f"swap needs block_n >= 64 (the instruction's M), got {cfg.block_n}"
    if cfg.warps not in (4, 8):
        return f"warps must be 4 or 8, got {cfg.warps}"
    if not 1 <= cfg.stages <= 12:
        return f"stages must be between 1 and 12, got {cfg.stages}"
    return None


def is_legal(cfg: GroupedGemmConfig, problem: GroupedGemmProblem, arch: Arch) -> str | None:
    """None when `cfg` can run `problem` on `arch`, else why not."""
    reason = tile_reason(cfg, problem.fmt, arch)
    if reason is not None:
        return reason
    if not 0 <= cfg.programs <= 16:
        return f"programs must be between 0 and 16, got {cfg.programs}"
    need = shared_bytes(cfg, problem.fmt)
    if need + 2048 > arch.smem:
        return f"needs {need} bytes of shared memory, {arch.name} has {arch.smem}"
    return None


#: Most rows an expert, on average, for the kernel that streams the weights. Its tiles hold 16 rows, and at 16 on average half of the experts have
#: more and read their weights twice: 380 us against 368 (DeepSeek-V3, 32 experts, 64 tokens; H200, Triton 3.6, 2026-11-30).
STREAM_ROWS = 8
HOPPER_EXPERTS = 512
#: Rows that the kernels' counts of tiles have no room for.
HOPPER_ROWS = 2**27
#: Rounds of tiles on every SM from which on the kernel for many rows hands out tiles as SMs become free, and not in turn, and how many of 64
#: row tiles must have at most 64 rows for it: by itself, and in the layer (launched early). H200, Triton 3.6, 2026-11-30: 368 to 337 us by itself
#: with skewed counts, 18% such tiles; even counts, none, 0.999. Layers whose GEMMs have 9.3 and 16.3 rounds 0.971, 14.4 and 19.2 0.984, the second
#: alone 8.9 1.004 (results/nvidia_h200/kernel_variants.json, tile_counter). Not timed: shares between none and 18%.
HOPPER_ROUNDS = 7
HOPPER_TAILS = (4, 0)


def hopper_kernel(problem: GroupedGemmProblem, segments: int, masked: bool, arch: Arch) -> str | None:
    """Which Gluon kernel computes `problem` on `arch`: "stream" (decode), "hopper" (more rows), or None for plain Triton."""
    if problem.fmt != "fp8_block" or not arch.has_wgmma or problem.experts > HOPPER_EXPERTS or problem.rows >= HOPPER_ROWS:
        return None
    if problem.n % 128 or problem.k % 128 or (problem.n // segments) % 128:
        return None
    few = min(problem.experts, problem.rows) * problem.n < 256 * arch.sms  # tiles of the other kernel
    if not masked and problem.rows_per_expert <= (2 * STREAM_ROWS if few else STREAM_ROWS):
        return "stream"
    tiles = min(problem.experts, problem.rows) * ceil_div(problem.rows_per_expert, 128) * (problem.n // 256)
    return "hopper" if problem.n % 256 == 0 and tiles * 4 >= arch.sms else None


def hopper_programs(rows: int, experts: int, n: int, arch: Arch) -> tuple[int, bool]:
    """Programs of the kernel "hopper", and whether `rows` rows can make so many tiles that it may hand them out (the device knows how many)."""
    tiles = (min(experts, rows) + rows // 128) * (n // 256)
    programs = max(1, min(arch.sms, 2 * tiles))
    return programs, tiles >= HOPPER_ROUNDS * programs


class StreamTile(NamedTuple):
    """Weight rows and activation rows of a tile, slots of the ring, programs on an SM."""

    weights: int
    rows: int
    stages: int
    programs: int


def stream_tile(rows: int, experts: int, n: int, fused: bool, arch: Arch) -> tuple[StreamTile, int]:
    """Tile of the kernel that streams the weights, and the most tiles that `rows` rows over weights of n rows can make.

    H200, Triton 3.6, 2026-11-30: 128 weight rows, other depths and 1 or 3 programs an SM were within 2% or slower (benchmarks/NOTES.md).
    Fused, a tile is a scale group: 128 gate rows, then 128 up rows; two programs an SM where that puts all tiles into one round.
    """
    row_tiles = min(experts, rows) + rows // 16
    if not fused:
        return StreamTile(64, 16, 10, 2), row_tiles * (n // 64)
    tiles = row_tiles * (n // 256)
    shared = arch.sms < tiles <= 2 * arch.sms
    return StreamTile(128, 16, 5, 2) if shared else StreamTile(128, 16, 11, 1), tiles


def hopper_operands(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether the Gluon kernels can address the operands: rows on 16-byte boundaries, masked ones at one distance."""
    if a.data_ptr() % 16 or w.data_ptr() % 16 or a.stride(-2) % 16 or a.stride(-2) < a.shape[-1]:
        return False
    return a.dim() == 2 or (a.is_contiguous() and a_scale.stride(0) == a_scale.shape[1] * a_scale.stride(1))


def heuristic(problem: GroupedGemmProblem, arch: Arch) -> GroupedGemmConfig:
    """A config for every problem, from its size alone."""
    m = problem.rows_per_expert
    if problem.fmt == "mxfp8":
        if not arch.has_block_scaled_mma:
            if m <= 32:  # SM89's instruction takes its operands from registers: four warps would spill
                return GroupedGemmConfig(16, 64, 32, 4, 8, 0, True) if arch.has_wgmma else GroupedGemmConfig(16, 64, 32, 8, 4, 0, True)
            return GroupedGemmConfig(64, 64, 32, 4, 6, 3, False)
        # 128 rows in the instruction's M: with 64, SM100 widens both operands to 16 bits
        return GroupedGemmConfig(32, 128, 128, 8, 3, 2, True) if m <= 32 else GroupedGemmConfig(128, 128, 128, 8, 3, 1, False)
    block_k = 64 if problem.fmt == "plain" else 128
    if arch.smem < 150_000:  # SM89 and SM120: less than half of Hopper's shared memory
        return GroupedGemmConfig(16, 64, block_k, 4, 3, 0, True) if m <= 16 else GroupedGemmConfig(64, 64, block_k, 4, 3, 2, False)
    active = min(problem.experts, problem.rows)
    if problem.fmt == "plain" and arch.has_wgmma and active * ceil_div(m, 32) * ceil_div(problem.n, 64) <= 2 * arch.sms:
        # few tiles, as of a router: what counts is the time of a step along K, 0.13 us and 0.07 for each 64 (kernel_variants.json, router)
        return GroupedGemmConfig(16, 64, 256, 4, 3, 3, True) if m <= 64 else GroupedGemmConfig(32, 64, 256, 4, 4, 3, True)
    # All rows below: H200, Triton 3.6, 2026-11-30, benchmarks/results/nvidia_h200/grouped_gemm_sweep.json
    if m <= 16:
        if active * problem.n < 2 * 64 * arch.sms:  # few tiles: more bytes in flight for each
            return GroupedGemmConfig(16, 128, block_k, 4, 3, 3, True)
        return GroupedGemmConfig(16, 64, block_k, 4, 5, 0, True)
    if m <= 32 or active * ceil_div(m, 64) * problem.n < 4 * 128 * arch.sms:
        return GroupedGemmConfig(64, 64, block_k, 4, 4, 3, False)
    # 206 registers a thread in fp8_block: two programs an SM, and four stages fit
    return GroupedGemmConfig(64, 128, block_k, 4, 4, 2, False)


def search_space(problem: GroupedGemmProblem, arch: Arch) -> list[GroupedGemmConfig]:
    """Every legal config worth timing for `problem`."""
    out = []
    block_k = {"plain": 64, "fp8_block": 128, "mxfp8": 128 if arch.has_block_scaled_mma else 32}[problem.fmt]
    for bm in (16, 32, 64, 128):
        for bn in (64, 128):
            for warps in (4, 8):
                for stages in (2, 3, 4, 5, 6):
                    for programs in (0, 1, 2, 3, 4):
                        for swap in (True, False):
                            if swap == (bm >= 64):
                                continue
                            cfg = GroupedGemmConfig(bm, bn, block_k, warps, stages, programs, swap)
                            if is_legal(cfg, problem, arch) is None:
                                out.append(cfg)
    return out
