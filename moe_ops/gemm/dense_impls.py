"""The implementations of `dense_gemm`, best first: Triton (ours), DeepGEMM and CUTLASS when asked for, and torch."""

from typing import Any

import torch

from moe_ops.core.arch import Arch
from moe_ops.gemm import cutlass_choice as cutlass
from moe_ops.gemm.cutlass_gemm import cutlass_dense
from moe_ops.gemm.deep_gemm import deep_gemm_dense, dense_plan, dense_reason, refuse_traced
from moe_ops.gemm.dense import dense_gemm_ref
from moe_ops.gemm.dense_config import (
    FUSED_COLUMNS,
    FUSED_ROWS,
    STREAM_WIDTHS,
    DenseGemmConfig,
    DenseGemmProblem,
    heuristic,
    in_pairs,
    quantizes_inside,
)
from moe_ops.gemm.dense_roles import ROLES_ROWS, roles_reason
from moe_ops.gemm.grouped_impls import operand_words, torch_reason, triton_reason
from moe_ops.gemm.registry import Implementation, Problem, Where, choose
from moe_ops.gemm.torch_scaled import scaled_mm, scaled_mm_reason
from moe_ops.quant.quantize import _op as quantize_rows

#: Most rows of the Gluon kernel.
MOST_ROWS = max(STREAM_WIDTHS)


def gluon_reason(problem: DenseGemmProblem, arch: Arch) -> str | None:
    """None where the Gluon kernel may have a config for `problem`, else why it has none."""
    if problem.batch > 1 or not problem.aligned:
        return "the Gluon kernel is behind dense_gemm alone"
    if problem.fmt != "fp8_block":
        return "the Gluon kernel takes fp8_block"
    if not arch.has_wgmma:
        return "the Gluon kernel is for SM90"
    if problem.fused:
        return "the Gluon kernel quantizes nothing"
    if problem.rows > MOST_ROWS:
        return f"the Gluon kernel takes at most {MOST_ROWS} rows"
    return "the Gluon kernel wants K % 16 == 0" if problem.k % 16 else None


def config_words(config: DenseGemmConfig, problem: DenseGemmProblem, arch: Arch) -> str:
    """Why the heuristic takes `config` for `problem`, in a few words."""
    if config.programs:
        pairs = ", two of each tile, which exchange their sums" if in_pairs(config, problem.n) else ""
        return f"at most {MOST_ROWS} quantized rows on SM90; {config.programs} programs by the estimate of its time{pairs}"
    split = f"; K in {config.split} parts by the estimate of its time" if config.split > 1 else ""
    against = gluon_reason(problem, arch) or "no config of the Gluon kernel fits"
    if problem.rows > ROLES_ROWS and problem.fmt == "fp8_block" and arch.has_wgmma and problem.aligned:
        against += f"; {roles_reason(problem, arch) or 'and the one with warp roles adds no residual and wants out on the 16-byte grid'}"
    return f"{against}; {operand_words(config)}{split}"


def _triton_plan(p: Problem, where: Where) -> str:
    fused = p.unquantized and quantizes_inside(p.rows, p.n)
    if p.pinned:
        return "Triton kernel, the config given"
    problem = DenseGemmProblem(p.rows, 1, p.n, p.k, p.fmt, fused, True)
    config = heuristic(problem, where.arch)
    kernel = "Gluon kernel whose programs share K" if config.programs else "Triton kernel"
    quantizes = ""
    if fused:
        quantizes = f"; quantizes inside: at most {FUSED_ROWS} rows and {FUSED_COLUMNS} columns"
    elif p.unquantized:
        over = f"{p.rows} rows, more than {FUSED_ROWS}" if p.rows > FUSED_ROWS else f"{p.n} columns, more than {FUSED_COLUMNS}"
        quantizes = f"; after a kernel that quantizes: {over}"
    if roles_reason(problem, where.arch) is None:
        tile = "128 rows x 256 weight rows a tile, 4 stages, 1 program an SM"
        why = f"more than {ROLES_ROWS} quantized rows on SM90, by the estimate of its time{quantizes}"
        return f"Gluon kernel with warp roles, {tile}; {why}; with a residual, or an out off the 16-byte grid, {kernel}, {config}"
    return f"{kernel}, {'quantizing inside, ' if fused else ''}{config}; {config_words(config, problem, where.arch)}{quantizes}"


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
