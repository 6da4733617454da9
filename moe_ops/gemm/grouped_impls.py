"""The implementations of `grouped_gemm`, best first: Triton (ours), DeepGEMM and CUTLASS when asked for, and torch."""

from typing import Any

import torch

from moe_ops.core import checks
from moe_ops.core.arch import Arch, too_old_reason
from moe_ops.gemm import cutlass_choice as cutlass
from moe_ops.gemm.cutlass_gemm import cutlass_grouped
from moe_ops.gemm.deep_gemm import deep_gemm_grouped, grouped_plan, grouped_reason, refuse_traced
from moe_ops.gemm.grouped import _ref_into
from moe_ops.gemm.grouped_config import (
    HOPPER_EXPERTS,
    HOPPER_ROWS,
    STREAM_ROWS,
    GroupedGemmConfig,
    GroupedGemmProblem,
    heuristic,
    hopper_kernel,
    stream_tile,
)
from moe_ops.gemm.registry import Implementation, Problem, Where, choose
from moe_ops.gemm.torch_scaled import grouped_mm, grouped_mm_reason

#: Rows, weight rows and slots of a tile of grouped_hopper.py, which cannot be imported where there is no Triton.
HOPPER_TILE = (128, 256, 4)


def triton_reason(p: Problem, where: Where) -> str | None:
    """None, or why the Triton kernels cannot run there."""
    if not where.cuda:
        return f"needs CUDA tensors, got {where.device}"
    return too_old_reason(where.arch)


def torch_reason(p: Problem, where: Where) -> str | None:
    """None, or why the public functions refuse tensors there whoever would compute."""
    return too_old_reason(where.arch) if where.cuda else None


def operand_words(config: Any) -> str:
    """Why a config of a Triton kernel has its operands where they are."""
    return "few rows, so the weights are the instruction's M" if config.swap else "rows enough to be the instruction's M"


def streamed_rows(problem: GroupedGemmProblem, arch: Arch) -> int:
    """Most rows an expert, on average, for which `hopper_kernel` streams the weights: twice as many where tiles are few."""
    return STREAM_ROWS * (2 if min(problem.experts, problem.rows) * problem.n < 256 * arch.sms else 1)


def gluon_reason(problem: GroupedGemmProblem, segments: int, masked: bool, arch: Arch) -> str:
    """Why `hopper_kernel` has no Gluon kernel for `problem`, where it has none."""
    if problem.fmt != "fp8_block":
        return "the Gluon kernels take fp8_block"
    if not arch.has_wgmma:
        return "the Gluon kernels are for SM90"
    if problem.experts > HOPPER_EXPERTS:
        return f"the Gluon kernels take at most {HOPPER_EXPERTS} experts"
    if problem.rows >= HOPPER_ROWS:
        return f"the Gluon kernels take fewer than {HOPPER_ROWS} rows"
    if problem.n % 128 or problem.k % 128 or (problem.n // segments) % 128:
        return "the Gluon kernels want N, K and a segment's rows in whole 128s"
    many = "masked rows" if masked else f"{problem.rows_per_expert} rows an expert on average, more than {streamed_rows(problem, arch)}"
    if problem.n % 256:
        return f"{many}, and the kernel with warp roles wants N % 256 == 0"
    return f"{many}, and too few tiles for the kernel with warp roles to fill {arch.sms} multiprocessors"


def _triton_plan(p: Problem, where: Where) -> str:
    problem, arch = GroupedGemmProblem(p.rows, p.groups, p.n, p.k, p.fmt), where.arch
    if p.pinned:
        return "Triton kernel, the config given"
    kernel = hopper_kernel(problem, p.segments, p.masked, arch)
    mean, most = problem.rows_per_expert, streamed_rows(problem, arch)
    if kernel == "stream":
        t, _ = stream_tile(p.rows, p.groups, p.n, False, arch)
        tile = f"{t.weights} weight rows x {t.rows} rows a tile, {t.stages} stages, {t.programs} programs an SM"
        return f"Gluon kernel that streams the weights, {tile}; few rows: {mean} an expert on average, at most {most}"
    if kernel == "hopper":
        rows, weights, stages = HOPPER_TILE
        why = f"masked rows, {mean} an expert" if p.masked else f"many rows: {mean} an expert on average, more than {most}"
        return f"Gluon kernel with warp roles, {rows} rows x {weights} weight rows a tile, {stages} stages, 1 program an SM; {why}"
    config: GroupedGemmConfig = heuristic(problem, arch)
    return f"Triton kernel, {config}; {gluon_reason(problem, p.segments, p.masked, arch)}; {operand_words(config)}"


def _torch_plan(p: Problem, where: Where) -> str:
    reason = grouped_mm_reason(p, where)
    return "torch._grouped_mm" if reason is None else f"fp32 products of the dequantized operands, counts read on the host ({reason})"


IMPLEMENTATIONS = (
    Implementation("triton", True, triton_reason, _triton_plan),
    Implementation("deep_gemm", False, grouped_reason, grouped_plan),
    Implementation("cutlass", False, cutlass.reason, cutlass.plan),
    Implementation("torch", True, torch_reason, _torch_plan),
)


def run_named(
    impl: str, problem: Problem, operands: tuple[Any, ...], out_dtype: torch.dtype, out: torch.Tensor | None, shape: tuple[int, ...]
) -> torch.Tensor:
    """`grouped_gemm` of checked operands by DeepGEMM, CUTLASS or torch. Traced by torch.compile, the problem is asked and the machine is not.

    Raises:
        ValueError: an unknown implementation, or one that cannot run this.
    """
    a, a_scale, w, w_scale, bias, offsets, order, top_k, fmt, segments = operands
    checks.one_of(problem.op, "impl", impl, ("triton", "deep_gemm", "cutlass", "torch"))
    own_kernel = False
    if not torch.compiler.is_compiling():
        where = Where.of(a.device)
        choose(problem, where, impl)
        own_kernel = impl == "torch" and grouped_mm_reason(problem, where) is None
        if impl == "cutlass":
            cutlass.make_ready(problem, where)
    elif impl == "deep_gemm":
        refuse_traced(problem, a.device)
    elif impl == "cutlass":
        cutlass.refuse_traced(problem, a.device)
    if own_kernel:
        return grouped_mm(a, w, offsets)
    result = a.new_empty(shape, dtype=out_dtype) if out is None else out
    if impl == "deep_gemm":
        deep_gemm_grouped(a, a_scale, w, w_scale, offsets, order, top_k, fmt, result)
    elif impl == "cutlass":
        cutlass_grouped(a, a_scale, w, w_scale, offsets, order, top_k, fmt, segments, result)
    else:
        _ref_into(a, a_scale, w, w_scale, bias, offsets, order, top_k, fmt, segments, result)
    return result
