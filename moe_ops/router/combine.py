"""Combine: out[t] = sum over j of weights[t, j] * y[inverse[t, j]], the inverse permutation with the weighted sum.

The only place where routing weights are applied. Sums run in fp32 in the order j = 0 .. k-1, each product rounded before it is added, so the
kernel equals the reference bit for bit. Rows of pairs without an expert here (inverse -1) are never read: they may hold anything.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_ops.core import checks
from moe_ops.core.arch import Arch, arch_of
from moe_ops.core.formats import ceil_div
from moe_ops.core.launch import launch, runs_kernels
from moe_ops.core.ops import register
from moe_ops.core.pdl import after_previous
from moe_ops.router.padding import PaddedRouting, check_padded
from moe_ops.router.routing import Routing, check_routing

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class CombineConfig:
    """Columns of one program and warps."""

    block_h: int
    num_warps: int


def heuristic(tokens: int, hidden: int, arch: Arch) -> CombineConfig:
    """Eight columns a thread where there are tokens enough; few tokens are split over more programs."""
    if tokens * ceil_div(hidden, 1024) >= 4 * arch.sms:
        return CombineConfig(1024, 4)
    return CombineConfig(256, 2)


def combine_ref(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Definition of `moe_ops::combine`."""
    acc = torch.zeros(inverse.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for j in range(inverse.shape[1]):
        row = inverse[:, j].long()
        used = (row >= 0) & (row < y.shape[0])
        if y.shape[0]:
            term = weights[:, j, None].float() * y[torch.where(used, row, 0)].float()
            acc = acc + torch.where(used[:, None], term, 0.0)
    return acc.to(out_dtype or y.dtype)


@triton.jit(do_not_specialize=["R"])
def _combine_kernel(
    y_ptr,
    inverse_ptr,
    weights_ptr,
    out_ptr,
    R,
    H,
    stride_ym,
    stride_om,
    TOP_K: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_H columns of one token; the loads of UNROLL rows are in flight together."""
    after_previous(PDL)
    blocks = tl.cdiv(H, BLOCK_H)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros([BLOCK_H], tl.float32)
    for j0 in range(0, TOP_K, UNROLL):
        for u in tl.static_range(UNROLL):  # pyright: ignore[reportGeneralTypeIssues]
            j = j0 + u
            row = tl.load(inverse_ptr + token * TOP_K + j, mask=j < TOP_K, other=-1).to(tl.int64)
            used = (row >= 0) & (row < R)
            weight = tl.load(weights_ptr + token * TOP_K + j, mask=used, other=0.0)
            y = tl.load(y_ptr + row * stride_ym + cols, mask=used & (cols < H), other=0.0).to(tl.float32)
            acc += tl.where(used, weight * y, 0.0)
    tl.store(out_ptr + token * stride_om + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < H)


def combine_into(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Write the weighted sum of each token's rows into `out`; one launch, no allocation, no checks.

    Args:
        y: (R, H) bf16, fp16 or fp32, last stride 1.
        inverse: (T, k) int32 contiguous: row of each pair in y; negative ones, and ones past R, are skipped.
        weights: (T, k) fp32 contiguous.
        out: (T, H) bf16, fp16 or fp32, last stride 1; every element is written.
    """
    if not runs_kernels(y):
        out.copy_(combine_ref(y, inverse, weights, out.dtype))
        return
    tokens, hidden = out.shape
    top_k = inverse.shape[1]
    config = heuristic(tokens, hidden, arch_of(y.device))
    launch(
        "combine",
        _combine_kernel,
        (tokens * ceil_div(hidden, config.block_h),),
        y,
        inverse,
        weights,
        out,
        y.shape[0],
        hidden,
        y.stride(0),
        out.stride(0),
        TOP_K=top_k,
        UNROLL=min(8, 1 << (top_k - 1).bit_length()),
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )


def _combine_triton(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, out_dtype: str) -> torch.Tensor:
    out = _combine_fake(y, inverse, weights, out_dtype)
    combine_into(y, inverse, weights, out)
    return out


def _combine_cpu(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, out_dtype: str) -> torch.Tensor:
    return combine_ref(y, inverse, weights, _DTYPES[out_dtype])


def _combine_fake(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, out_dtype: str) -> torch.Tensor:
    return torch.empty(inverse.shape[0], y.shape[1], dtype=_DTYPES[out_dtype], device=y.device)


_combine = register("combine", cuda=_combine_triton, cpu=_combine_cpu, fake=_combine_fake)


def combine(
    y: torch.Tensor, routing: Routing | PaddedRouting, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sum each token's expert outputs with their routing weights: out[t] = sum_j weights[t, j] * y[row of pair (t, j)].

    Args:
        y (R, H), bf16, fp16 or fp32, last stride 1: expert outputs in the row order of `routing`, with R >= the length of `routing.order`.
        routing: a `Routing` (packed rows), or the `PaddedRouting` of `permute`; masked rows come as y.view(-1, H).
        out (T, H), bf16, fp16 or fp32, last stride 1: written and returned; must not overlap y.
        out_dtype: dtype of a new output; None takes y's.

    Returns:
        (T, H). Tokens without a row here are exactly 0.

    Numerics:
        fp32, products rounded to fp32 and added in the order j = 0 .. k-1, then one rounding to the output dtype; deterministic.
        Rows of skipped pairs are not read.

    Raises:
        TypeError: another dtype. ValueError: shape, stride or device that does not fit, in the routing too; both `out` and
            `out_dtype`; an input that requires grad.

    Cost:
        Reads T * k * H and writes T * H elements.

    See Also:
        `moe_ops.router.permute.permute`; tests/router/test_combine.py, benchmarks/router/bench_combine.py.
    """
    op = "combine"
    checks.is_tensor(op, "y", y)
    checks.dtype(op, "y", y, _FLOATS)
    checks.ndim(op, "y", y, (2,))
    checks.last_stride_one(op, "y", y)
    checks.no_grad(op, y=y, out=out)
    if not isinstance(routing, (Routing, PaddedRouting)):
        raise TypeError(f"{op}: routing must be a Routing or PaddedRouting, got {type(routing).__name__}")
    if isinstance(routing, Routing):
        check_routing(op, routing)
    else:
        check_padded(op, routing)
    rows = routing.order.shape[0]
    if y.shape[0] < rows:
        raise ValueError(f"{op}: y must have at least {rows} rows (the length of routing.order), got shape {tuple(y.shape)}")
    if out is None:
        dtype = y.dtype if out_dtype is None else out_dtype
        if dtype not in _FLOATS:
            raise TypeError(f"{op}: out_dtype must be bfloat16 or float16 or float32, got {dtype}")
        checks.same_device(op, y=y, inverse=routing.inverse)
        return _combine(y, routing.inverse, routing.weights, str(dtype).removeprefix("torch."))
    checks.is_tensor(op, "out", out)
    if out_dtype is not None:
        raise ValueError(f"{op}: give out or out_dtype, not both")
    checks.dtype(op, "out", out, _FLOATS)
    checks.shape(op, "out", out, (routing.inverse.shape[0], y.shape[1]))
    checks.last_stride_one(op, "out", out)
    checks.same_device(op, y=y, inverse=routing.inverse, out=out)
    _combine_out(y, routing.inverse, routing.weights, out)
    return out


def _combine_out_cpu(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(combine_ref(y, inverse, weights, out.dtype))


def _combine_out_fake(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    return None


_combine_out = register("combine_out", cuda=combine_into, cpu=_combine_out_cpu, fake=_combine_out_fake, mutates=("out",))
