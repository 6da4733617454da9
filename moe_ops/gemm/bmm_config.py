"""Which batched GEMMs the Gluon kernels take, and how bmm_hopper.py sees the heads of an activation."""

from typing import Any

import torch

from moe_ops.core.arch import Arch

#: Most tokens of the kernel in bmm_few.py, and most blocks of 128x128 that one of its programs holds.
FEW_TOKENS, FEW_BLOCKS = 32, 8
#: Slots of bmm_hopper.py: 64 rows x 128 of K up to 64 tokens (`hopper_slots` beyond them), and 128 weight rows x 128 of K. Even for warpgroups that
#: take turns at them: one that skipped a round of a slot would take an old phase of its barrier for the new one.
A_SLOTS, W_SLOTS = 4, 4


def ring_reason(fmt: str, heads: int, n: int, k: int, arch: Arch) -> str | None:
    """None where bmm_hopper.py has a kernel for a problem, else why not. It is made for the projections of absorbed MLA."""
    if fmt != "fp8_block":
        return "the Gluon kernels take fp8_block"
    if not arch.has_wgmma:
        return "the Gluon kernels are for SM90"
    if n == 0 or n % 128 or k % 128 or heads * n >= 2**31:
        return "the Gluon kernels want N and K in whole 128s"
    steps = (n // 128) * (k // 128)
    if min(n, k) > 128 or (steps > 1 and steps % 2):
        return f"beyond {FEW_TOKENS} tokens the Gluon kernel wants N or K of 128 and the other in whole 256s"
    return None


def hopper_kernel(fmt: str, tokens: int, heads: int, n: int, k: int, arch: Arch) -> str | None:
    """The Gluon kernel for a problem, "few" (bmm_few.py) or "ring" (bmm_hopper.py), or None."""
    if fmt == "fp8_block" and arch.has_wgmma and n > 0 and n % 128 == 0 and k % 128 == 0 and heads * n < 2**31 and tokens <= FEW_TOKENS:
        if (n // 128) * (k // 128) // few_parts(heads, n, arch) <= FEW_BLOCKS:
            return "few"
    return "ring" if ring_reason(fmt, heads, n, k, arch) is None else None


def few_parts(heads: int, n: int, arch: Arch) -> int:
    """Programs that share a head's columns: as many as still fit two to a multiprocessor."""
    return next(parts for parts in (4, 2, 1) if parts == 1 or (n // 128 % parts == 0 and heads * parts <= 2 * arch.sms))


def hopper_consumers(tokens: int, k: int, dtype: torch.dtype, rule: str, out_dtype: torch.dtype) -> int:
    """Warpgroups of bmm_hopper.py that quantize and multiply, each with 64 rows beyond 64 tokens, for an activation of `dtype` quantized by `rule`.

    Each of three has 160 registers a thread where each of two has 232, and fewer slots (`hopper_slots`). H200, 2026-11-30, Triton 3.6, 128 heads,
    bf16 out, us of three and of two at 128, 256 and 512 tokens: K = 512, N = 128 "fp32" 11.7 and 12.4, 17.9 and 19.1, 28.7 and 30.2; "given" 9.3 and
    9.2, 13.3 and 14.0, 19.6 and 22.0 (before its scales came through the ring); "folded" 11.1 and 12.2, 17.0 and 18.2, 26.4 and 28.7 (with 16 bytes a
    thread spilled outside of the steps). K = 128, N = 512 "fp32" 10.7 and 10.5, 16.0 and 15.5, 26.6 and 26.1. Three that quantize float16 spill 172
    bytes a thread, three whose weights do not stay 8, three with K = 256 16.
    """
    if not 256 < k <= 128 * W_SLOTS or out_dtype.itemsize > 2:
        return 2
    return 3 if (tokens > 128 and rule == "given") or (tokens > 64 and rule != "given" and dtype == torch.bfloat16) else 2


def hopper_rows(tokens: int, k: int, dtype: torch.dtype, rule: str, out_dtype: torch.dtype) -> int:
    """Rows of an item of bmm_hopper.py: up to 64 its warpgroups share the steps, beyond them the rows. Arguments as `hopper_consumers`'."""
    return 64 if tokens <= 64 else 64 * hopper_consumers(tokens, k, dtype, rule, out_dtype)


def hopper_slots(rows: int, a_bytes: int, out_bytes: int) -> int:
    """Slots of each ring of activations and scales: beyond 64 rows as many as fit beside the weights, results on their way out and barriers."""
    if rows == 64:
        return A_SLOTS
    return (227 * 1024 - 2048 - W_SLOTS * 16384 - rows * 128 * out_bytes) // (rows * (128 * a_bytes + (4 if a_bytes == 1 else 0)))


def view_of_heads(a: torch.Tensor) -> tuple[list[int], list[int], int, int] | None:
    """How a (T, heads, K) is one matrix for TMA, or None where it is not: rows must lie on 16-byte boundaries.

    Returns:
        Its shape and strides, and what lies between one head and the next: rows (heads one after another) and columns (heads beside each
        other in a token's row), one of them 0, both where all heads are one.
    """
    (tokens, heads, k), (stride_t, stride_h) = a.shape, a.stride()[:2]
    unit, most = 16 // a.element_size(), 2**31
    if a.data_ptr() % 16 or (tokens > 1 and (stride_t % unit or stride_t < k)) or (heads > 1 and stride_h % unit):
        return None
    if heads == 1 or stride_h == 0:
        return [tokens, k], [stride_t if tokens > 1 else k, 1], 0, 0
    if stride_h < k:
        return None
    if tokens <= 1:  # the distance of its tokens can be anything
        return [heads, k], [stride_h, 1], 1, 0
    if (heads - 1) * stride_h + k <= min(stride_t, most):
        return [tokens, (heads - 1) * stride_h + k], [stride_t, 1], 0, stride_h
    rows = (heads - 1) * (stride_h // stride_t) + tokens
    if stride_h % stride_t == 0 and (tokens - 1) * stride_t + k <= stride_h and rows < most:
        return [rows, k], [stride_t, 1], stride_h // stride_t, 0
    return None


def kernel_for(a: torch.Tensor, w: torch.Tensor, fmt: str, arch: Arch) -> tuple[str | None, Any]:
    """`hopper_kernel` for these operands, if its TMA can read them, and for "ring" the `view_of_heads` that it launches with.

    a (T, heads, K) is e4m3 bits or 16-bit, w (heads, N, K) contiguous.
    """
    heads, n, k = w.shape
    kernel = hopper_kernel(fmt, a.shape[0], heads, n, k, arch)
    view = view_of_heads(a) if kernel == "ring" else None
    return (None, None) if w.data_ptr() % 16 or (kernel == "ring" and view is None) else (kernel, view)
