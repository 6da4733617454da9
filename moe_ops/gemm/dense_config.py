"""Configs of the dense and the batched GEMM: one frozen dataclass, one legality function, one heuristic that needs no database."""

import functools
from dataclasses import astuple, dataclass, replace

import torch

from moe_ops.core.arch import Arch, arch_of
from moe_ops.core.formats import ceil_div
from moe_ops.gemm.grouped_config import tile_reason

#: K that one split holds at least, and the unit in which K is shared: a scale block of fp8_block, four of mxfp8.
SPLIT_UNIT = 128
MAX_SPLIT = 64
#: Most rows, and most columns, of a GEMM that quantizes its activation itself: every column tile repeats that work. 16 rows, K = 7168: 6.8 us
#: with 576 columns against 5.7 and 1.4 in two kernels, 9.3 against 6.6 and 1.4 with 1536, 98.7 against 35 and 1.4 with 18432 (H200, 2026-11-30).
FUSED_ROWS, FUSED_COLUMNS = 16, 1024


def quantizes_inside(rows: int, n: int) -> bool:
    """Whether a 16-bit activation is quantized by the GEMM's kernel, else by one before it."""
    return rows <= FUSED_ROWS and n <= FUSED_COLUMNS


#: Weight rows of a tile of the Gluon kernel, for each number of activation rows: one box of a power of two or two boxes, so that the tiles of
#: most projections come out just below the number of SMs (18432 = 128 x 144, 9216 = 128 x 72, 24576 = 128 x 192).
WIDE_WIDTHS = (32, 64, 72, 80, 96, 128, 144)
STREAM_WIDTHS = {16: (64, 128), 32: (64, 128), 64: WIDE_WIDTHS, 128: (*WIDE_WIDTHS, 192)}
#: Widest tile of 128 rows that two warpgroups compute in turns along K; wider ones they share by rows. The widest one whose two boxes they multiply
#: at once.
TURNS_WIDTH, AT_ONCE_WIDTH = 80, 144


def boxes(width: int) -> tuple[int, int]:
    """Weight rows of a tile's first and second box. All first boxes stand before all second ones: each lies in one block of 128."""
    first = min(128, 1 << (width.bit_length() - 1))
    return first, width - first


@dataclass(frozen=True)
class DenseGemmConfig:
    """How one dense or batched GEMM runs.

    Attributes:
        block_m: activation rows of a tile.
        block_n: weight rows (output columns) of a tile; a power of two that divides 128, so that a tile sees one 128-wide scale block, or with
            programs one of `STREAM_WIDTHS`.
        block_k: step along K; 128 for fp8_block; 32 for mxfp8 promoted in fp32, 128 for mxfp8 by the block-scaled instruction.
        warps: warps of a program.
        stages: depth of the software pipeline.
        split: parts of K, each of whole 128s, computed by programs of their own; their fp32 partials are added in a fixed order.
        swap: weights as the first operand of the tensor-core instruction (its M dimension): for few rows.
        programs: 0 for the plain Triton kernel; else the Gluon kernel of dense_stream.py with this many programs, which share all steps
            along K of all tiles evenly (split is 1 then, block_m holds all rows). Two of each tile of 128 x 32 or 128 x 64 wait for one
            another and may be no more than the SMs.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split: int
    swap: bool
    programs: int = 0

    @property
    def by_rows(self) -> bool:
        """Whether the warpgroups of the Gluon kernel share a tile by rows; else they take turns along K."""
        return self.programs > 0 and self.block_m == 128 and self.block_n > TURNS_WIDTH

    def ints(self) -> list[int]:
        """The config as it crosses an op boundary."""
        return [int(v) for v in astuple(self)]

    @staticmethod
    def of_ints(values: list[int]) -> "DenseGemmConfig":
        """The inverse of `ints`."""
        return DenseGemmConfig(*values[:6], swap=bool(values[6]), programs=values[7])


@dataclass(frozen=True)
class DenseGemmProblem:
    """What decides which config runs.

    Attributes:
        rows: M, of one batch.
        batch: products of this size (heads of `bmm`), 1 for `dense_gemm`.
        n, k: weight rows and reduction length.
        fmt: one of `grouped_config.GEMM_FORMATS`.
        fused: whether the activation is 16-bit and quantized inside the kernel.
        aligned: whether the Gluon kernel can take the operands of this `dense_gemm`: TMA needs rows on 16-byte boundaries. False for `bmm`.
    """

    rows: int
    batch: int
    n: int
    k: int
    fmt: str
    fused: bool = False
    aligned: bool = False


def shared_bytes(cfg: DenseGemmConfig, problem: DenseGemmProblem) -> int:
    """Shared memory of the operand ring and, of the Gluon kernel, what lies beside it, in bytes."""
    if cfg.programs:
        # beside the ring: the sums of warpgroups that take turns, and what rows of the output are put together in
        rest = 4096 + 64 if cfg.by_rows or in_pairs(cfg, problem.n) else cfg.block_m * cfg.block_n * 4 + (2048 if cfg.block_m >= 64 else 0)
        return cfg.stages * ((cfg.block_m + cfg.block_n) * 128 + cfg.block_m * 4 + 32) + rest
    size = 2 if problem.fmt == "plain" else 1
    return cfg.stages * (cfg.block_m * (2 if problem.fused else size) + cfg.block_n * size) * cfg.block_k


def is_legal(cfg: DenseGemmConfig, problem: DenseGemmProblem, arch: Arch) -> str | None:
    """None when `cfg` can run `problem` on `arch`, else why not."""
    reason = _stream_reason(cfg, problem, arch) if cfg.programs else tile_reason(cfg, problem.fmt, arch)
    if reason is not None:
        return reason
    if not 1 <= cfg.split <= MAX_SPLIT:
        return f"split must be between 1 and {MAX_SPLIT}, got {cfg.split}"
    need = shared_bytes(cfg, problem)
    if need + 2048 > arch.smem:
        return f"needs {need} bytes of shared memory, {arch.name} has {arch.smem}"
    return None


def _stream_reason(cfg: DenseGemmConfig, problem: DenseGemmProblem, arch: Arch) -> str | None:
    """None when the Gluon kernel can run `cfg`, its shared memory aside; else why not."""
    if not arch.has_wgmma:
        return f"programs must be 0: the kernel with programs is for Hopper, not {arch.name}"
    if problem.fmt != "fp8_block" or problem.fused or problem.batch != 1 or not problem.aligned or problem.k % 16:
        return "programs must be 0: the kernel with programs takes one product of quantized fp8_block operands with rows on 16-byte boundaries"
    if cfg.block_m not in (16, 32, 64, 128) or cfg.block_m < problem.rows:
        return f"block_m must be 16, 32, 64 or 128 and hold all {problem.rows} rows, got {cfg.block_m}"
    widths = STREAM_WIDTHS[cfg.block_m]
    if cfg.block_n not in widths or (cfg.block_k, cfg.warps, cfg.split, cfg.swap) != (128, 4, 1, cfg.block_m <= 32):
        return f"with programs, block_n must be one of {widths}, block_k 128, warps 4, split 1, swap {cfg.block_m <= 32}, got {cfg}"
    steps = ceil_div(problem.n, cfg.block_n) * ceil_div(problem.k, 128)
    if not 2 <= cfg.stages <= 16 or not 1 <= cfg.programs <= min(steps, 16 * arch.sms) or steps * cfg.programs >= 2**31:
        return f"stages must be between 2 and 16, programs between 1 and {min(steps, 16 * arch.sms)}, got {cfg.stages} and {cfg.programs}"
    if cfg.stages % 2 and not cfg.by_rows:
        return f"stages must be even where two warpgroups take turns, got {cfg.stages}"
    if in_pairs(cfg, problem.n):
        return None if cfg.programs <= arch.sms else f"programs that wait for one another must all find an SM, got {cfg.programs} on {arch.sms}"
    if cfg.block_n % 32 and most_parts(cfg, problem.n, problem.k) > 1:
        return f"tiles of {cfg.block_n} columns must each fall to one program"
    if most_parts(cfg, problem.n, problem.k) > MAX_SPLIT + 1:
        return f"{cfg.programs} programs cut a tile into more than {MAX_SPLIT} parts"
    return None


def fits_twice(cfg: DenseGemmConfig) -> bool:
    """Whether two programs of the Gluon kernel are meant to share an SM: 112 KiB each, and tiles for which 96 registers a thread are enough."""
    small = cfg.block_m * cfg.block_n <= 2048
    ring = shared_bytes(cfg, DenseGemmProblem(cfg.block_m, 1, cfg.block_n, 128, "fp8_block"))
    return small and ring <= 112 * 1024


def steps_in_flight(cfg: DenseGemmConfig, k: int) -> int:
    """Steps that a program of the Gluon kernel has asked for and not received yet, at most. More only lets some programs starve.

    In us (H200, 2026-12-01, results/nvidia_h200/dense_sweep.json, in_flight): 64 rows of 7168 x 16384 with 12 and 8 steps 34.4 and 33.5, 128 rows of
    18432 x 7168 with 6 and 3 steps 45.3 and 42.6; but 64 rows of 24576 x 1536 with 8 and 5 steps 12.9 and 13.3.
    """
    if cfg.block_m == 128:
        return min(cfg.stages, 3) if cfg.block_n >= 128 else cfg.stages
    return max(4, 512 // cfg.block_n) if cfg.block_m == 64 and k > 48 * 128 else cfg.stages


def steps_ahead(cfg: DenseGemmConfig) -> int:
    """Steps whose weights the Gluon kernel asks into the L2 while its predecessor ends.

    In us without and with 1 and 2 of them (H200, 2026-12-01, same file, ahead): 128 rows of 18432 x 7168 42.9, 41.7 and 43.0, of 24576 x 1536 14.0,
    13.6 and 13.6; 64 rows of 9216 x 4096 without and with 2 and 4 12.4, 12.2 and 12.1.
    """
    return max(1, 144 // cfg.block_n) if cfg.block_m == 128 else min(4, cfg.stages) if cfg.block_m == 64 else 0


def in_pairs(cfg: DenseGemmConfig, n: int) -> bool:
    """Whether the two programs of each tile of the Gluon kernel exchange sums, instead of a second kernel that adds them."""
    return cfg.block_m == 128 and cfg.block_n in (32, 64) and cfg.programs == 2 * ceil_div(n, cfg.block_n)


#: Fewest SMs on which `stream_configs` offers programs that wait for one another (see dense_exchange_kernel.py).
PAIRS_SMS = 64


def most_parts(cfg: DenseGemmConfig, n: int, k: int) -> int:
    """Most programs that share one tile of the Gluon kernel; 1 where each tile falls to one."""
    tiles, steps = ceil_div(n, cfg.block_n), ceil_div(k, 128)
    if tiles % cfg.programs == 0:
        return 1
    return ceil_div(steps - 1, tiles * steps // cfg.programs) + 1


def part_bytes(cfg: DenseGemmConfig, rows: int, n: int, k: int) -> int:
    """Bytes of the fp32 partial sums of one product; programs that exchange them have their slots elsewhere."""
    if cfg.programs:
        cut = most_parts(cfg, n, k) > 1 and not in_pairs(cfg, n)
        return 8 * cfg.programs * cfg.block_m * cfg.block_n if cut else 0
    return 4 * cfg.split * rows * n if cfg.split > 1 else 0


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
    return _heuristic(DenseGemmProblem(rows, problem.batch, problem.n, problem.k, problem.fmt, problem.fused, problem.aligned), arch)


def choose(op: str, problem: DenseGemmProblem, device: torch.device, config: list[int] | None) -> DenseGemmConfig:
    """The pinned config if it is legal, else the heuristic's."""
    arch = arch_of(device)
    if config is None:
        return heuristic(problem, arch)
    cfg = DenseGemmConfig.of_ints(config)
    reason = is_legal(cfg, problem, arch)
    if reason is not None:
        raise ValueError(f"{op}: config {cfg} cannot run here: {reason}")
    return cfg


@functools.lru_cache(maxsize=4096)
def _heuristic(problem: DenseGemmProblem, arch: Arch) -> DenseGemmConfig:
    best = min(stream_configs(problem, arch), key=lambda c: stream_us(c, problem, arch), default=None)
    if best is not None:
        return best
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


def stream_configs(problem: DenseGemmProblem, arch: Arch) -> list[DenseGemmConfig]:
    """The configs of the Gluon kernel worth timing for `problem`; none where it cannot run."""
    out: dict[DenseGemmConfig, None] = {}
    if problem.rows > 128 or problem.n == 0 or not arch.has_wgmma:
        return []
    block_m = max(16, 1 << (problem.rows - 1).bit_length())
    for block_n in STREAM_WIDTHS[block_m]:
        tiles, steps = ceil_div(problem.n, block_n), ceil_div(problem.k, 128)
        for per_sm in (1, 2) if block_m <= 32 else (1,):
            most = min(per_sm * arch.sms, tiles * steps)
            rounds = ceil_div(tiles, most) if block_m >= 64 and most else 1
            counts = {tiles * parts for parts in (1, 2, 3, 4, 6, 8, 12, 16)} | {ceil_div(tiles, rounds + i) for i in (0, 1, 2)}
            # parts of unequal length cost more than they even out where a part has many rows
            for programs in sorted(counts | ({most} if block_m <= 32 else set())):
                probe = [DenseGemmConfig(block_m, block_n, 128, 4, d, 1, block_m <= 32, programs) for d in (0, 1)]
                fixed, one = (shared_bytes(c, problem) for c in probe)
                stages = min(16 if block_m >= 64 else 12, ((arch.smem - 3072) // per_sm - fixed) // (one - fixed))
                cfg = replace(probe[0], stages=stages - (stages % 2 if not probe[0].by_rows else 0))
                if programs > most or (in_pairs(cfg, problem.n) and arch.sms < PAIRS_SMS):
                    continue
                if is_legal(cfg, problem, arch) is None and (block_m >= 64 or fits_twice(cfg) == (per_sm == 2)):
                    out[cfg] = None
    return list(out)


def stream_us(cfg: DenseGemmConfig, problem: DenseGemmProblem, arch: Arch) -> float:
    """Rough time of the Gluon kernel and its second launch, to compare configs with one another.

    The slowest of four bounds, and what a cut tile costs. The constants were fitted to 533 configs of 27 problems (H200, Triton 3.6, 2026-11-30,
    results/nvidia_h200/dense_sweep.json). Of the 439 that are still configs the choice is 1% above the best on the geometric mean, 7% at worst.
    """
    if cfg.block_m >= 64:
        return _wide_us(cfg, problem, arch)
    tiles, steps = ceil_div(problem.n, cfg.block_n), ceil_div(problem.k, 128)
    cut = most_parts(cfg, problem.n, problem.k) > 1
    each = tiles * steps / cfg.programs if cut else ceil_div(tiles, cfg.programs) * steps
    twice = fits_twice(cfg)
    on_one = each * (2 if twice and cfg.programs > arch.sms else 1)  # steps of the busiest SM
    step = (cfg.block_m + cfg.block_n) * 128
    fill = on_one * step / min(75e3, cfg.stages * step / 1.35)  # bytes a microsecond that one SM is filled with; a load takes 1.35
    memory = problem.n * problem.k / (26.5e3 * arch.sms)
    l2 = tiles * steps * step / (56e3 * arch.sms)
    math = on_one * cfg.block_m * cfg.block_n * 128 / 4e6
    time = max(fill, memory, l2, math) + 0.07 * min(fill, memory) + 1e-4 * cfg.block_m * cfg.block_n
    if not twice:  # the next kernel on the stream finds no room to start early
        time += 0.5
    if cut:
        parts = (cfg.programs + min(tiles, cfg.programs)) * problem.rows * cfg.block_n * 8
        time += 1.85 + parts / (19e3 * arch.sms) + 0.1 * most_parts(cfg, problem.n, problem.k)
    return time


def _wide_us(cfg: DenseGemmConfig, problem: DenseGemmProblem, arch: Arch) -> float:
    """`stream_us` for tiles of 64 and 128 rows: a step takes what the memory or one program needs.

    Fitted to 82 configs of 18 problems with MN-major scales; start and end then to 49 of 10 with wider stores (H200, Triton 3.6, 2026-11-30,
    results/nvidia_h200/dense_sweep.json): the choice was 0.3% above the best on the geometric mean both times, 4% at worst. Programs that exchange
    sums: to six configs (2026-12-01, same file, pairs); since then they take from 1.2 us less to 0.3 more (exchange).
    """
    tiles, steps = ceil_div(problem.n, cfg.block_n), ceil_div(problem.k, 128)
    cut, pairs = most_parts(cfg, problem.n, problem.k) > 1, in_pairs(cfg, problem.n)
    rounds = 1 if cut else ceil_div(tiles, cfg.programs)
    each = tiles * steps / cfg.programs if cut else rounds * steps
    program = 0.067 + 0.00078 * cfg.block_n if cfg.block_m == 64 else 0.081 + 0.002 * cfg.block_n
    memory = cfg.programs * cfg.block_n * 128 / (34.7e3 * arch.sms)
    time = 3.4 + each * (max(program, memory) + 0.323 * min(program, memory)) + 0.8 * rounds * cfg.block_m * cfg.block_n / 8192
    if pairs:
        time += 0.4
    elif cut:
        time += 0.8 + (cfg.programs + tiles) * cfg.block_m * cfg.block_n * 8 / (115e3 * arch.sms)
        if cfg.block_n >= 64 and cfg.programs > 0.95 * arch.sms:  # the second launch finds no SM to start on
            time += 1.4
    return time


def search_space(problem: DenseGemmProblem, arch: Arch) -> list[DenseGemmConfig]:
    """Every legal config worth timing for `problem`."""
    out = stream_configs(problem, arch)
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
