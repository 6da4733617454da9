"""The implementations of `bmm`, best first: Triton (ours), DeepGEMM when asked for, and torch (the reference)."""

from typing import Any

import torch

from moe_ops.gemm import cutlass_choice as cutlass
from moe_ops.gemm.bmm import bmm_ref
from moe_ops.gemm.bmm_config import FEW_TOKENS, W_SLOTS, few_parts, hopper_kernel, hopper_rows, ring_reason
from moe_ops.gemm.deep_gemm import bmm_plan, bmm_reason, deep_gemm_bmm, refuse_traced
from moe_ops.gemm.dense_config import DenseGemmProblem, heuristic
from moe_ops.gemm.grouped_impls import operand_words, torch_reason, triton_reason
from moe_ops.gemm.registry import Implementation, Problem, Where, choose
from moe_ops.quant.quantize import _op as quantize_rows


def _triton_plan(p: Problem, where: Where) -> str:
    inside = "quantizing inside, " if p.unquantized else ""
    if p.pinned:
        return f"Triton kernel, {inside}the config given"
    problem = DenseGemmProblem(p.rows, p.groups, p.n, p.k, p.fmt, p.unquantized)
    config = heuristic(problem, where.arch)
    kernel = hopper_kernel(p.fmt, p.rows, p.groups, p.n, p.k, where.arch)
    if kernel == "few":
        parts = few_parts(p.groups, p.n, where.arch)
        what = f"Gluon kernel for at most {FEW_TOKENS} tokens, {inside}programs a head: {parts}"
        return f"{what}; with a weight off the 16-byte grid, Triton kernel, {config}"
    if kernel == "ring":
        kept = "a head's weights kept in shared memory" if (p.n // 128) * (p.k // 128) <= W_SLOTS else "weights read for each item"
        off = "with operands off the 16-byte grid, or heads that are not at one distance of rows or columns"
        # which dtype is quantized is not known here: float16 has items of its own size
        rule = "fp32" if p.unquantized else "given"
        rows, half = (hopper_rows(p.rows, p.k, dtype, rule, p.out_dtype) for dtype in (torch.bfloat16, torch.float16))
        items = f"{rows} rows an item" + (f" ({half} of float16)" if half != rows else "")
        return f"Gluon kernel with warp roles, {inside}{items}, {kept}; {off}, Triton kernel, {config}"
    quantizes = "; quantizes inside: bmm has no kernel before it" if p.unquantized else ""
    words = f"{ring_reason(p.fmt, p.groups, p.n, p.k, where.arch)}; {operand_words(config)}"
    return f"Triton kernel, {inside}{config}; {words}{quantizes}"


def _torch_plan(p: Problem, where: Where) -> str:
    return "fp32 product of the dequantized operands, head by head"


IMPLEMENTATIONS = (
    Implementation("triton", True, triton_reason, _triton_plan),
    Implementation("deep_gemm", False, bmm_reason, bmm_plan),
    Implementation("cutlass", False, cutlass.reason, cutlass.plan),
    Implementation("torch", True, torch_reason, _torch_plan),
)


def run_named(impl: str, problem: Problem, operands: tuple[Any, ...], out_dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """`bmm` of checked operands by DeepGEMM or torch. Traced by torch.compile, the problem is asked and the machine is not.

    Raises:
        ValueError: an implementation that cannot run this.
    """
    a, a_scale, w, w_scale, fmt, rule = operands
    if not torch.compiler.is_compiling():
        choose(problem, Where.of(a.device), impl)
    elif impl == "deep_gemm":
        refuse_traced(problem, a.device)
    elif impl == "cutlass":
        cutlass.refuse_traced(problem, a.device)
    if impl == "torch":
        y = bmm_ref(a, a_scale, w, w_scale, fmt, rule, out_dtype)
        return y if out is None else out.copy_(y)
    if rule != "given":  # head by head, as DeepGEMM reads data and scales
        data, scale = quantize_rows(a.transpose(0, 1), None, fmt, "mn_major", rule)
        a, a_scale = data.transpose(0, 1), scale.transpose(0, 1)
    result = a.new_empty((a.shape[0], a.shape[1], w.shape[1]), dtype=out_dtype) if out is None else out
    if not result.is_contiguous():
        raise ValueError(f"{problem.op}: out must be contiguous for impl 'deep_gemm', got strides {result.stride()}")
    deep_gemm_bmm(a, a_scale, w, w_scale, result)
    return result
