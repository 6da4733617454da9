"""DeepGEMM (upstream, or the sgl-deep-gemm wheel) behind our functions: its layouts, and what can run.

DeepGEMM wants its own row layouts, so rows are led there and back by two kernels of ours (deep_gemm_kernel.py):

    contiguous | e0 e0 e0 .. | e2 e2 .. |       experts start at multiples of ALIGNMENT; expert of each row, or (psum) end of each expert's rows
    masked     | e0 .. | e1 .. | e2 .. |        experts start at multiples of a capacity, itself a multiple of ALIGNMENT; rows of each expert

Activation scales are MN-major, as its kernels read them, so that it launches no transpose. Its alignment is a global of the process, which each
call sets, checks and restores under a lock (deep_gemm_library.py). What the library can do is found out by calling it, in a process of its own
(deep_gemm_probe.py): a wheel that does not match libtorch imports well and fails in the first call, or takes the process with it.
"""

import functools
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from moe_ops.core.formats import as_bytes, as_e4m3, ceil_div
from moe_ops.core.ops import register
from moe_ops.gemm.deep_gemm_library import ALIGNMENT, INSTALL, call_library
from moe_ops.gemm.grouped import _ref_into, dequantized
from moe_ops.gemm.registry import Problem, Where
from moe_ops.quant.scale_layout import _op as convert_scale


def _recipe(fmt: str) -> dict[str, Any]:
    return {"recipe_a": (1, 32), "recipe_b": (1, 32)} if fmt == "mxfp8" else {}


def _check_address(op: str, **operands: torch.Tensor) -> None:
    """What is not copied for the library: its boxes (TMA) begin at multiples of 16 bytes."""
    for name, t in operands.items():
        if t.data_ptr() % 16:
            raise ValueError(f"{op}: {name} must start at a multiple of 16 bytes for impl 'deep_gemm', its address is {t.data_ptr()}")


def _weight_scale(w: torch.Tensor, w_scale: torch.Tensor, fmt: str) -> torch.Tensor:
    """Scales of a weight as DeepGEMM reads them: fp8_block as they are, E8M0 bytes packed by four along K."""
    return w_scale if fmt == "fp8_block" else convert_scale(w_scale, "row_major", "ue8m0_packed", w.shape[-2], w.shape[-1] // 32, fmt)


def masked_form(rows: int, experts: int) -> bool:
    """Whether packed rows go into the masked layout: no larger than the contiguous one there, and the kernel skips what is empty."""
    return experts <= rows <= ALIGNMENT


def _into(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor | None, top_k: int,
    fmt: str, out: torch.Tensor, form: str,
) -> None:  # fmt: skip
    """Compute `out` in one of the forms "masked", "psum" and "contiguous"; three launches."""
    from moe_ops.core.launch import launch
    from moe_ops.gemm.deep_gemm_kernel import _collect_rows_kernel, _spread_rows_kernel

    experts, n, k = w.shape
    from_masked = a.dim() == 3
    limit = a.shape[1] if from_masked else out.shape[0]
    rows = out.numel() // max(1, n)
    if rows == 0 or experts == 0 or n == 0:
        return
    _check_address("grouped_gemm", w=w)
    to_masked = form == "masked"
    spacing = ceil_div(limit, ALIGNMENT) * ALIGNMENT if to_masked else ALIGNMENT
    padded = experts * spacing if to_masked else (rows + min(experts, rows) * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    if fmt == "mxfp8":  # four E8M0 bytes are one word
        a_scale = a_scale.contiguous().view(torch.int32)
    words = a_scale.shape[-1]
    data = a.new_empty((padded, k))
    scale = a_scale.new_empty((experts, words, spacing) if to_masked else (words, padded)).transpose(-1, -2)
    layout = offsets.new_empty(experts if form != "contiguous" else padded)
    ends = layout if form != "contiguous" else offsets.new_empty(experts)
    e2, block_r = 1 << (experts - 1).bit_length(), 16
    block_c, block_w = min(2048, 1 << (k - 1).bit_length()), min(64, 1 << (words - 1).bit_length())
    launch(
        "grouped_gemm", _spread_rows_kernel, (padded // block_r * ceil_div(k, block_c),),
        as_bytes(a), a_scale, offsets, order, data, scale, layout if form == "contiguous" else None, ends,
        limit, limit if from_masked else a.shape[0], padded, spacing,
        a.stride(-2), a.stride(0) if from_masked else 0, a_scale.stride(-2), a_scale.stride(-1), a_scale.stride(0) if from_masked else 0,
        scale.stride(0) if to_masked else 0, scale.stride(-1),
        E=experts, E2=e2, K=k, WORDS=words, TOP_K=top_k, FROM_MASKED=from_masked, TO_MASKED=to_masked, HAS_EXPERTS=form == "contiguous",
        BLOCK_R=block_r, BLOCK_C=block_c, BLOCK_W=block_w, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    d = out.new_empty((experts, spacing, n) if to_masked else (padded, n))
    operands = ((as_e4m3(data.view(experts, spacing, k) if to_masked else data), scale), (as_e4m3(w), _weight_scale(w, w_scale, fmt)), d, layout)
    if to_masked:
        expected = max(1, ceil_div(rows, experts))
        call_library(form, (fmt, experts, spacing, expected, n, k), *operands, expected, **_recipe(fmt))
    else:
        call_library(form, (fmt, experts, padded, n, k), *operands, **_recipe(fmt))
    block_r = max(1, min(16, 4096 // e2))
    block_c = min(1024, 1 << (n - 1).bit_length())
    launch(
        "grouped_gemm", _collect_rows_kernel, (ceil_div(rows, block_r) * ceil_div(n, block_c),),
        d, offsets, out, rows, limit, padded, spacing,
        E=experts, E2=e2, N=n, FROM_MASKED=from_masked, TO_MASKED=to_masked, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


def in_place(a: torch.Tensor, a_scale: torch.Tensor, fmt: str) -> bool:
    """Whether masked rows lie as DeepGEMM wants them: whole tiles for each expert, contiguous, MN-major fp32 scales."""
    capacity, blocks = a.shape[1], a_scale.shape[2]
    lies = capacity % ALIGNMENT == 0 and a.is_contiguous() and a.data_ptr() % 16 == 0
    return fmt == "fp8_block" and capacity > 0 and lies and a_scale.stride() == (blocks * capacity, 1, capacity) and a_scale.data_ptr() % 16 == 0


def _in_place(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """The masked form without copies of rows: two launches, the first of which clamps the counts."""
    (experts, capacity, k), n = a.shape, w.shape[1]
    if experts == 0 or n == 0:
        return
    _check_address("grouped_gemm", w=w)
    operands = ((as_e4m3(a), a_scale), (as_e4m3(w), w_scale), out, counts.clamp(0, capacity))
    call_library("masked", ("fp8_block", experts, capacity, capacity, n, k), *operands, capacity)


def deep_gemm_grouped_into(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor | None, top_k: int,
    fmt: str, out: torch.Tensor,
) -> None:  # fmt: skip
    """`grouped_gemm` by DeepGEMM: the form by what the library can and by the number of rows."""
    if a.dim() == 3 and in_place(a, a_scale, fmt) and out.data_ptr() % 16 == 0:
        _in_place(a, a_scale, w, w_scale, offsets, out)
        return
    can = features(a.device.index)
    if a.dim() == 3 or (can["masked"] is None and masked_form(out.shape[0], w.shape[0])):
        form = "masked"
    else:
        form = "psum" if can["psum"] is None else "contiguous"
    _into(a, a_scale, w, w_scale, offsets, order, top_k, fmt, out, form)


def dense_into(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, fmt: str, out: torch.Tensor) -> None:
    """out (M, N) = a (M, K) @ w (N, K)^T by DeepGEMM, contiguous out; one launch where the fp32 scales are MN-major."""
    (m, k), n = a.shape, w.shape[0]
    if m == 0 or n == 0:
        return
    _check_address("dense_gemm", w=w, out=out)
    if a.stride(0) != k or a.data_ptr() % 16:
        a = a.clone(memory_format=torch.contiguous_format)
    if fmt == "mxfp8":
        a_scale = convert_scale(a_scale, "row_major", "ue8m0_packed", m, k // 32, fmt)
    elif a_scale.stride() != (1, ceil_div(m, 4) * 4) or a_scale.data_ptr() % 16:
        a_scale = convert_scale(a_scale, "row_major", "mn_major", m, ceil_div(k, 128), fmt)
    call_library("dense", (fmt, m, n, k), (as_e4m3(a), a_scale), (as_e4m3(w), _weight_scale(w, w_scale, fmt)), out, **_recipe(fmt))


def bmm_into(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor) -> None:
    """out (T, heads, N) = a (T, heads, K) @ w (heads, N, K)^T head by head, by DeepGEMM, fp8_block.

    One launch where a lies head by head and its scales, seen as (heads, T, K / 128), are MN-major.
    """
    (tokens, heads, k), n = a.shape, w.shape[1]
    if tokens == 0 or heads == 0 or n == 0:
        return
    _check_address("bmm", w=w, out=out)
    if any(s % 16 or s == 0 for s in a.stride()[:2]) or a.data_ptr() % 16:  # a box takes no expanded rows
        a = a.clone(memory_format=torch.contiguous_format)
    blocks, padded = ceil_div(k, 128), ceil_div(tokens, 4) * 4
    scale = a_scale.transpose(0, 1)
    if scale.stride() != (blocks * padded, 1, padded) or scale.data_ptr() % 16:
        scale = convert_scale(scale, "row_major", "mn_major", tokens, blocks, "fp8_block")
    call_library("bmm", (heads, tokens, n, k), "bhr,hdr->bhd", (as_e4m3(a), scale.transpose(0, 1)), (as_e4m3(w), w_scale), out)


def _bmm_cpu(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor) -> None:
    x = dequantized(a.transpose(0, 1), a_scale.transpose(0, 1), "fp8_block", 1, 1)
    out.copy_((x @ dequantized(w, w_scale, "fp8_block", 128, 1).mT).transpose(0, 1))


def _bmm_fake(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor) -> None:
    return None


deep_gemm_bmm = register("deep_gemm_bmm", cuda=bmm_into, cpu=_bmm_cpu, fake=_bmm_fake, mutates=("out",))


def _dense_cpu(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, fmt: str, out: torch.Tensor) -> None:
    x, y = dequantized(a, a_scale, fmt, 1, 1), dequantized(w, w_scale, fmt, 128 if fmt == "fp8_block" else 1, 1)
    out.copy_(x @ y.T)


def _dense_fake(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, fmt: str, out: torch.Tensor) -> None:
    return None


deep_gemm_dense = register("deep_gemm_dense", cuda=dense_into, cpu=_dense_cpu, fake=_dense_fake, mutates=("out",))


def _grouped_cpu(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor | None, top_k: int,
    fmt: str, out: torch.Tensor,
) -> None:  # fmt: skip
    _ref_into(a, a_scale, w, w_scale, None, offsets, order, top_k, fmt, 1, out)


def _grouped_fake(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor | None, top_k: int,
    fmt: str, out: torch.Tensor,
) -> None:  # fmt: skip
    return None


deep_gemm_grouped = register("deep_gemm_grouped", cuda=deep_gemm_grouped_into, cpu=_grouped_cpu, fake=_grouped_fake, mutates=("out",))


# ---- what can run, and why not


@functools.cache
def features(index: int | None) -> dict[str, str | None]:
    """Of each form: None, or why the library cannot compute it on GPU `index` of this machine; asked once, in another process."""
    from moe_ops.gemm.deep_gemm_probe import probe

    return probe(index or 0)


def lacking() -> list[str]:
    """What this machine lacks before the library can be tried at all, each with its remedy."""
    found = []
    if importlib.util.find_spec("deep_gemm") is None:
        found.append(f"deep_gemm is not installed ({INSTALL})")
    if not torch.cuda.is_available():
        found.append("no CUDA GPU")
    return found


def compiler() -> str | None:
    """Path of the nvcc that DeepGEMM would find, or None; it compiles its kernels when they are first called."""
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if root:
            path = Path(root, "bin", "nvcc")
            return str(path) if path.exists() else None
    found = shutil.which("nvcc")
    return found or ("/usr/local/cuda/bin/nvcc" if Path("/usr/local/cuda/bin/nvcc").exists() else None)


def machine_reason(where: Where, forms: tuple[str, ...]) -> str | None:
    """None, or why none of `forms` can run there."""
    short = lacking()
    if short and compiler() is None:
        short.append("no nvcc (CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda), with which it compiles its kernels")
    if short:
        return "; ".join(short)
    if not where.cuda:
        return f"needs CUDA tensors, got {where.device}"
    if where.index is None:
        return "can only be tried on a GPU of this machine"
    against = features(where.index)
    if all(against[form] is not None for form in forms):
        return "; ".join(dict.fromkeys(str(against[form]) for form in forms))
    return None


def problem_reason(p: Problem, where: Where) -> str | None:
    """None, or why its kernels cannot compute problem `p`, wherever that is."""
    if p.fmt == "plain":
        return "16-bit operands stay with Triton and torch"
    if where.cuda and where.arch.capability not in (90, 100, 103):
        return f"DeepGEMM has kernels for SM90 and SM100, {where.arch.name} is SM{where.arch.capability}"
    fold = "; fold the weight (moe_ops.quant.fold) and it runs as fp8_block" if where.arch.capability == 90 else ""
    if p.fmt == "mxfp8" and p.op == "bmm":
        return f"DeepGEMM's product of heads takes fp8_block, not mxfp8{fold}"
    if p.fmt == "mxfp8" and where.arch.capability == 90:
        return f"DeepGEMM's MXFP8 needs SM100{fold}"
    if p.fmt == "fp8_block" and where.arch.capability in (100, 103):
        return "on SM100 DeepGEMM keeps only the exponent of a scale, and those of fp8_block are no powers of two"
    if p.out_dtype != torch.bfloat16:
        return f"DeepGEMM writes bfloat16, not {str(p.out_dtype).removeprefix('torch.')}"
    if p.bias:
        return "DeepGEMM adds no bias and no residual"
    if p.pinned:
        return "a config pins a Triton kernel"
    if p.n % 64 or p.k % 128:
        return f"DeepGEMM's kernels want N % 64 == 0 and K % 128 == 0, got N = {p.n} and K = {p.k}"
    if p.fmt == "fp8_block" and p.segments > 1 and (p.n // p.segments) % 128:
        return f"scale blocks that start anew within the weight ({p.segments} segments of {p.n // p.segments} rows) are unknown to DeepGEMM"
    if p.fmt == "mxfp8" and p.layout != "row_major":
        return f"scales of a must be row_major, got {p.layout}"
    return None


def refuse_traced(p: Problem, device: torch.device) -> None:
    """What torch.compile can ask while it traces: the problem, not the machine.

    Raises:
        ValueError: the library's kernels cannot compute `p`.
    """
    reason = problem_reason(p, Where.of(device))
    if reason is not None:
        raise ValueError(f"{p.op}: impl 'deep_gemm' cannot run here: {reason}")


def grouped_reason(p: Problem, where: Where) -> str | None:
    """None, or why `grouped_gemm` cannot go to DeepGEMM."""
    return problem_reason(p, where) or machine_reason(where, ("masked",) if p.masked else ("contiguous", "psum"))


def grouped_plan(p: Problem, where: Where) -> str:
    """What `deep_gemm_grouped_into` would run."""
    can = features(where.index)
    if p.masked or (can["masked"] is None and masked_form(p.rows, p.groups)):
        form = "masked"
    else:
        form = "psum" if can["psum"] is None else "contiguous"
    if p.masked and p.fmt == "fp8_block" and p.layout == "mn_major" and p.rows // p.groups % ALIGNMENT == 0:
        return "deep_gemm, masked form on the rows as they lie"
    return f"deep_gemm, {form} form, rows led there and back"


def dense_reason(p: Problem, where: Where) -> str | None:
    """None, or why `dense_gemm` cannot go to DeepGEMM."""
    return problem_reason(p, where) or machine_reason(where, ("dense",))


def dense_plan(p: Problem, where: Where) -> str:
    """What `dense_into` would run."""
    return "deep_gemm, dense form" + (", after a kernel that quantizes" if p.unquantized else "")


def bmm_reason(p: Problem, where: Where) -> str | None:
    """None, or why `bmm` cannot go to DeepGEMM."""
    return problem_reason(p, where) or machine_reason(where, ("bmm",))


def bmm_plan(p: Problem, where: Where) -> str:
    """What `bmm_into` would run."""
    return "deep_gemm, fp8_einsum" + (", after a kernel that quantizes" if p.unquantized else "")
