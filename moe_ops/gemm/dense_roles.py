"""Whether `dense_gemm` runs as the grouped GEMM's prefill kernel with warp roles, for one expert: many rows, or few rows where it is faster."""

import functools
from dataclasses import replace

from moe_ops.core.arch import Arch
from moe_ops.core.formats import ceil_div
from moe_ops.gemm.dense_config import DenseGemmProblem, estimate_us, heuristic, stream_us
from moe_ops.gemm.grouped_config import HOPPER_ROWS

#: The time of a step of 128 along K of a tile of 128 x 256 by the kernel with warp roles where all tiles fit one round and where they do not, of
#: what comes before and after a tile, and the share of it that a tile of at most 64 rows takes: within 17% of nine problems of 256 to 2048 rows
#: (H200, 2026-11-30, results/nvidia_h200/kernel_variants.json, prefill_stores_and_order).
ROLES_STEP_US, ROLES_TILE_US, ROLES_TAIL = (0.73, 0.875), 2.0, 0.6
#: That kernel is asked about from here on, since its tile has 128 rows, and runs where it is estimated at less than this share of the streaming
#: kernel's time: with 128 rows 15.8 us (estimated 13.8) against 14.0 (15.8) at N x K = 24576 x 1536, 17.9 against 15.4 at 9216 x 4096,
#: 44.1 to 50.7 against 39.0 at 18432 x 7168 (H200, 2026-11-30, dense_sweep.json).
ROLES_ROWS, ROLES_LEAD = 64, 0.8
#: The plain Triton kernel's time over `estimate_us` at more than 128 rows: 0.52 to 0.63 at M = 2048, N x K = 1536 x 7168, 7168 x 16384 and
#: 9216 x 4096 (79.6, 591 and 190 us; H200, 2026-11-30).
PLAIN_SHARE = 0.6


def roles_us(problem: DenseGemmProblem, arch: Arch) -> float:
    """Rough time of the prefill kernel with warp roles: rounds of tiles, the last one of halves where it fills at most half of the programs."""
    tiles = ceil_div(problem.rows, 128) * (problem.n // 256)
    programs = max(1, min(arch.sms, 2 * tiles))
    rounds, last = divmod(tiles, programs)
    rest = 0.0 if last == 0 else ROLES_TAIL if 2 * last <= programs else 1.0
    return 3.0 + (rounds + rest) * (ROLES_TILE_US + problem.k // 128 * ROLES_STEP_US[tiles > arch.sms])


def roles_reason(problem: DenseGemmProblem, arch: Arch) -> str | None:
    """None where the grouped GEMM's prefill kernel with warp roles computes `problem` as that of one expert, else why not.

    Equal for all M up to the same power of two, as the heuristic; it adds no residual, and out must lie on the 16-byte grid.
    """
    if problem.batch > 1 or not problem.aligned:
        return "the Gluon kernels are behind dense_gemm alone"
    if problem.fmt != "fp8_block":
        return "the Gluon kernels take fp8_block"
    if not arch.has_wgmma:
        return "the Gluon kernels are for SM90"
    if problem.fused or problem.rows <= ROLES_ROWS:
        return f"the kernel with warp roles is for more than {ROLES_ROWS} rows"
    if problem.rows >= HOPPER_ROWS:
        return f"the kernel with warp roles takes fewer than {HOPPER_ROWS} rows"
    if problem.n == 0 or problem.n % 256 or problem.k % 128:
        return "the kernel with warp roles wants N % 256 == 0 and K % 128 == 0"
    return _roles_reason(replace(problem, rows=1 << (problem.rows - 1).bit_length()), arch)


@functools.lru_cache(maxsize=4096)
def _roles_reason(problem: DenseGemmProblem, arch: Arch) -> str | None:
    cfg, roles = heuristic(problem, arch), roles_us(problem, arch)
    lead, other = (ROLES_LEAD, stream_us(cfg, problem, arch)) if cfg.programs else (PLAIN_SHARE, estimate_us(cfg, cfg.split, problem, arch))
    return None if roles < lead * other else f"the kernel with warp roles would take longer: about {roles:.0f} us against {lead * other:.0f}"
