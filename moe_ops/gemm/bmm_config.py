"""Which batched GEMMs the Gluon kernels take, and how bmm_hopper.py sees the heads of an activation."""

import torch

from moe_ops.core.arch import Arch
from moe_ops.core.formats import ceil_div

#: Most tokens of the kernel in bmm_few.py, and most blocks of 128x128 that one of its programs holds.
FEW_TOKENS, FEW_BLOCKS = 32, 8


def hopper_kernel(fmt: str, tokens: int, heads: int, n: int, k: int, arch: Arch) -> str | None:
    """The Gluon kernel for a problem, "few" (bmm_few.py) or "ring" (bmm_hopper.py), or None. Both are made for the projections of absorbed MLA."""
    if fmt != "fp8_block" or not arch.has_wgmma or n % 128 or k % 128 or heads * n >= 2**31:
        return None
    steps = (n // 128) * (k // 128)
    if tokens <= FEW_TOKENS and steps // few_parts(heads, n, arch) <= FEW_BLOCKS:
        return "few"
    # one block of K or one tile of columns; an even number of steps, because warpgroups that take turns at them need slots of their own
    return "ring" if min(n, k) == 128 and (steps == 1 or steps % 2 == 0) else None


def few_parts(heads: int, n: int, arch: Arch) -> int:
    """Programs that share a head's columns: as many as still fit two to a multiprocessor."""
    return next(parts for parts in (4, 2, 1) if parts == 1 or (n // 128 % parts == 0 and heads * parts <= 2 * arch.sms))


def hopper_rows(tokens: int) -> int:
    """Rows of an item of the Gluon kernel: up to 64 its warpgroups share the steps, beyond them the rows."""
    return 64 if tokens <= 64 else 128


def hopper_items(tokens: int, heads: int) -> int:
    """Items of (head, rows) that the programs share."""
    return heads * ceil_div(tokens, hopper_rows(tokens))


def view_of_heads(a: torch.Tensor) -> tuple[list[int], list[int], int, bool] | None:
    """How a (T, heads, K) is one matrix for TMA, or None where it is not: rows must lie on 16-byte boundaries.

    Returns:
        Its shape and strides, the distance from one head to the next, and whether that counts rows (heads lie one after another) or
        columns (they lie beside each other in a token's row).
    """
    (tokens, heads, k), (stride_t, stride_h) = a.shape, a.stride()[:2]
    unit = 16 // a.element_size()
    if heads == 1:
        stride_h = k
    if tokens == 1:  # its own distance can be anything
        stride_t = heads * stride_h
    if a.data_ptr() % 16 or stride_t % unit or stride_h % unit or min(stride_t, stride_h) < k:
        return None
    if (heads - 1) * stride_h + k <= stride_t:
        return [tokens, (heads - 1) * stride_h + k], [stride_t, 1], stride_h, False
    if stride_h % stride_t == 0 and (tokens - 1) * stride_t + k <= stride_h:
        return [(heads - 1) * (stride_h // stride_t) + tokens, k], [stride_t, 1], stride_h // stride_t, True
    return None


def kernel_for(a: torch.Tensor, w: torch.Tensor, fmt: str, arch: Arch) -> str | None:
    """`hopper_kernel` for these operands, which its TMA can read: e4m3 bits or 16-bit a (T, heads, K), w (heads, N, K) contiguous."""
    heads, n, k = w.shape
    kernel = hopper_kernel(fmt, a.shape[0], heads, n, k, arch)
    return None if w.data_ptr() % 16 or (kernel == "ring" and view_of_heads(a) is None) else kernel
