"""The implementations of `dense_gemm`, best first: Triton (ours), DeepGEMM and CUTLASS when asked for, and torch."""

from typing import Any

import torch

from moe_ops.gemm import cutlass_choice as cutlass
from moe_ops.gemm.cutlass_gemm import cutlass_dense
from moe_ops.gemm.deep_gemm import deep_gemm_dense, dense_plan, dense_reason, refuse_traced
from moe_ops.gemm.dense import dense_gemm_ref
from moe_ops.gemm.dense_config import DenseGemmProblem, heuristic, quantizes_inside
from moe_ops.gemm.grouped_impls import torch_reason, triton_reason
from moe_ops.gemm.registry import Implementation, Problem, Where, choose
from moe_ops.gemm.torch_scaled import scaled_mm, scaled_mm_reason
from moe_ops.quant.quantize import _op as quantize_rows


def _triton_plan(p: Problem, where: Where) -> str:
    fused = p.unquantized and quantizes_inside(p.rows, p.n)
    if p.pinned:
        return "Triton kernel, the config given"
    config = heuristic(DenseGemmProblem(p.rows, 1, p.n, p.k, p.fmt, fused, True), where.arch)
    kernel = "Gluon kernel whose programs share K" if config.programs else "Triton kernel"
    return f"{kernel}, {'quantizing inside, ' if fused else ''}{config}"


def _torch_plan(p: Problem, where: Where) -> str:
    reason = scaled_mm_reason(p, where)
    return "torch._scaled_mm" if reason is None else f"fp32 product of the dequantized operands ({reason})"


IMPLEMENTATIONS = (
    Implementation("triton", True, triton_reason, _triton_plan),
    Implementation("deep_gemm", False, dense_reason, dense_plan),
    Implementation("cutlass", False, cutlass.reason, cutlass.plan),
    Implementation("torch", True, torch_reason, _torch_plan),
)


def run_named(impl: str, problem: Problem, operands: tuple[Any, ...], out_dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """`dense_gemm` of checked operands by DeepGEMM, CUTLASS or torch. Traced by torch.compile, the problem is asked and the machine is not.

    Raises:
        ValueError: an implementation that cannot run this.
    """
    a, a_scale, w, w_scale, bias, residual, fmt, rule = operands
    own_kernel = False
    if not torch.compiler.is_compiling():
        where = Where.of(a.device)
        choose(problem, where, impl)
        own_kernel = impl == "torch" and scaled_mm_reason(problem, where) is None
        if impl == "cutlass":
            cutlass.make_ready(problem, where)
    elif impl == "deep_gemm":
        refuse_traced(problem, a.device)
    elif impl == "cutlass":
        cutlass.refuse_traced(problem, a.device)
    if impl == "torch" and not own_kernel:
        y = dense_gemm_ref(a, a_scale, w, w_scale, bias, residual, fmt, rule, out_dtype)
        return y if out is None else out.copy_(y)
    if rule != "given":
        a, a_scale = quantize_rows(a, None, fmt, "mn_major" if fmt == "fp8_block" and impl != "cutlass" else "row_major", rule)
    if own_kernel:
        return scaled_mm(a, a_scale, w, w_scale)
    result = a.new_empty((a.shape[0], w.shape[0]), dtype=out_dtype) if out is None else out
    if not result.is_contiguous():
        raise ValueError(f"{problem.op}: out must be contiguous for impl {impl!r}, got strides {result.stride()}")
    if impl == "cutlass":
        cutlass_dense(a, a_scale, w, w_scale, result)
    else:
        deep_gemm_dense(a, a_scale, w, w_scale, fmt, result)
    return result
