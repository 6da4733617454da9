"""torch's own products where they compute what our functions promise: grouped 16-bit (`torch._grouped_mm`), and FP8 blocks (`torch._scaled_mm`).

Neither has an `out=` form or a bias that fits, so calls with one of these stay with the reference.
"""

from typing import Any

import torch

from moe_ops.core.formats import as_e4m3, ceil_div
from moe_ops.gemm.registry import Problem, Where


def grouped_mm_reason(p: Problem, where: Where) -> str | None:
    """None when `torch._grouped_mm` computes `p`, else why not."""
    if p.fmt == "fp8_block":
        return "torch's grouped FP8 product has scales of whole rows, not of blocks"
    if p.fmt == "mxfp8":
        return "torch's grouped MXFP8 product needs SM100 and scales swizzled expert by expert"
    if not hasattr(torch, "_grouped_mm"):
        return "this torch has no _grouped_mm"
    if not where.cuda:
        return f"torch._grouped_mm takes part for CUDA tensors, got {where.device}"
    if where.arch.capability not in (90, 100, 103):
        return "torch._grouped_mm has a kernel for SM90 and SM100"
    if p.masked or p.gather:
        return f"torch._grouped_mm reads packed rows, not {'masked' if p.masked else 'gathered'} ones"
    if p.bias or p.given_out or p.pinned:
        return "torch._grouped_mm takes no bias, output or config"
    if p.dtype != torch.bfloat16 or p.out_dtype != torch.bfloat16:
        return "torch._grouped_mm is bfloat16 in and out"
    if p.n % 8 or p.k % 8:
        return f"torch._grouped_mm wants N % 8 == 0 and K % 8 == 0, got N = {p.n} and K = {p.k}"
    return None


def grouped_mm(a: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """a (R, K), w (E, N, K), offsets (E + 1,) -> (R, N), by torch, which takes offsets as they are: here no group ends past the last row."""
    if a.shape[0] == 0:
        return a.new_empty((0, w.shape[1]))
    if a.data_ptr() % 16 or a.stride(0) % 8 or a.stride(0) < a.shape[1]:
        a = a.clone(memory_format=torch.contiguous_format)
    product: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    ends = offsets[1:].clamp(0, a.shape[0]).cummax(0).values.to(torch.int32)
    return product(a, w.transpose(1, 2), offs=ends, out_dtype=torch.bfloat16)


def scaled_mm_reason(p: Problem, where: Where) -> str | None:
    """None when `torch._scaled_mm` computes the dense problem `p` in blocks of 1x128 and 128x128, else why not."""
    if p.fmt != "fp8_block":
        return f"torch._scaled_mm takes part for fp8_block, not for {p.fmt}"
    if not where.cuda:
        return f"torch._scaled_mm needs CUDA tensors for scales of blocks, got {where.device}"
    if where.arch.capability != 90:
        return "torch._scaled_mm has scales of 1x128 and 128x128 blocks on SM90 alone"
    if torch.version.cuda is None:
        return "torch._scaled_mm has scales of blocks in builds with CUDA, this torch is without"
    if tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 9):
        return f"torch._scaled_mm has scales of blocks from CUDA 12.9 on, this torch has {torch.version.cuda}"
    if p.out_dtype != torch.bfloat16:
        return "torch._scaled_mm with scales of blocks writes bfloat16"
    if p.bias or p.given_out or p.pinned:
        return "torch._scaled_mm takes no bias, output or config here"
    if p.segments > 1 and (p.n // p.segments) % 128:
        return "torch._scaled_mm knows no scale blocks that start anew within the weight"
    if p.rows == 0 or p.rows % 4 or p.n % 128 or p.k % 512:
        return f"torch._scaled_mm takes part for M % 4 == 0, N % 128 == 0 and K % 512 == 0 (rows of four scales), got {p.rows}, {p.n}, {p.k}"
    return None


def scaled_mm(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """a (M, K) with scales (M, ceil(K / 128)), w (N, K) with scales (ceil(N / 128), ceil(K / 128)) -> (M, N) bfloat16, by torch."""
    m, blocks = a.shape[0], ceil_div(a.shape[1], 128)
    if a.stride(0) != a.shape[1] or a.data_ptr() % 16:
        a = a.clone(memory_format=torch.contiguous_format)
    if a_scale.stride() != (1, m):
        a_scale = a_scale.t().clone(memory_format=torch.contiguous_format).view(blocks, m).t()
    product: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(as_e4m3(a), as_e4m3(w).t(), a_scale, w_scale.t(), out_dtype=torch.bfloat16)
