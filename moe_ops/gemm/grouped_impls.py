"""The implementations of `grouped_gemm`, best first: Triton (ours), DeepGEMM and CUTLASS when asked for, and torch."""

from typing import Any

import torch

from moe_ops.core import checks
from moe_ops.core.arch import too_old_reason
from moe_ops.gemm import cutlass_choice as cutlass
from moe_ops.gemm.cutlass_gemm import cutlass_grouped
from moe_ops.gemm.deep_gemm import deep_gemm_grouped, grouped_plan, grouped_reason, refuse_traced
from moe_ops.gemm.grouped import _ref_into
from moe_ops.gemm.grouped_config import GroupedGemmProblem, heuristic, hopper_kernel
from moe_ops.gemm.registry import Implementation, Problem, Where, choose
from moe_ops.gemm.torch_scaled import grouped_mm, grouped_mm_reason


def triton_reason(p: Problem, where: Where) -> str | None:
    """None, or why the Triton kernels cannot run there."""
    if not where.cuda:
        return f"needs CUDA tensors, got {where.device}"
    return too_old_reason(where.arch)


def torch_reason(p: Problem, where: Where) -> str | None:
    """None, or why the public functions refuse tensors there whoever would compute."""
    return too_old_reason(where.arch) if where.cuda else None


def _triton_plan(p: Problem, where: Where) -> str:
    problem = GroupedGemmProblem(p.rows, p.groups, p.n, p.k, p.fmt)
    kernel = None if p.pinned else hopper_kernel(problem, p.segments, p.masked, where.arch)
    if kernel is not None:
        return {"stream": "Gluon kernel that streams the weights (few rows)", "hopper": "Gluon kernel with warp roles (many rows)"}[kernel]
    return "Triton kernel, " + ("the config given" if p.pinned else str(heuristic(problem, where.arch)))


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
