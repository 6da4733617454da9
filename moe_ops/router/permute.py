"""Permute: copy token rows to the places that a padded routing gives them, one copy for each expert that a token chose.

    rows[d] = x[order[d] // k]          padding rows of a block are zero; masked rows beyond a count are left alone

Any dtype: activations, quantized bytes and their scales move alike. `combine` is the way back.
"""

import torch
import triton
import triton.language as tl

from moe_ops.core import checks
from moe_ops.core.arch import arch_of
from moe_ops.core.formats import QTensor, as_bytes, as_e4m3, ceil_div, make_qtensor
from moe_ops.core.launch import launch
from moe_ops.core.ops import register
from moe_ops.router.padding import PaddedRouting, check_padded, spread
from moe_ops.router.routing import Routing

_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
)


def permute_ref(
    x: torch.Tensor, order: torch.Tensor, target: torch.Tensor | None, total: torch.Tensor, rows: int, top_k: int, columns: bool
) -> torch.Tensor:
    """Definition of `moe_ops::permute`; rows that nothing is written to are zero here."""
    out = _permute_fake(x, order, target, total, rows, top_k, columns).zero_()
    pair = order.long()
    used = (pair >= 0) & (pair < x.shape[0] * top_k) & (torch.arange(order.shape[0], device=x.device) < total)
    if x.shape[0] and rows:
        place = torch.arange(order.shape[0], device=x.device) if target is None else target.flatten().long()[torch.where(used, pair, 0)]
        used = used & (place >= 0) & (place < rows)
        padded = torch.zeros((rows + 1, x.shape[1]), dtype=x.dtype, device=x.device)
        padded[torch.where(used, place, rows)] = x[torch.where(used, pair, 0) // top_k]
        out.copy_(padded[:rows])
    return out


@triton.jit(do_not_specialize=["rows", "pairs", "out_rows", "stride_xm", "stride_xk", "stride_om", "stride_ok"])
def _permute_kernel(
    x_ptr,
    order_ptr,
    target_ptr,
    total_ptr,
    out_ptr,
    rows,
    pairs,
    out_rows,
    C: tl.constexpr,
    stride_xm,
    stride_xk,
    stride_om,
    stride_ok,
    TOP_K: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Tiles of BLOCK_R rows x BLOCK_C columns, shared among a fixed number of programs; only rows below the device's total.

    A pair or place out of range, which only a routing made by hand can hold, counts as none.
    """
    blocks = tl.cdiv(C, BLOCK_C)
    total = tl.minimum(tl.load(total_ptr), rows)
    for tile in range(tl.program_id(0), tl.cdiv(total, BLOCK_R) * blocks, tl.num_programs(0)):
        row = (tile // blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
        cols = (tile % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
        pair = tl.load(order_ptr + row, mask=row < total, other=-1)
        present = (pair >= 0) & (pair < pairs)
        place = row
        write = row < total
        if target_ptr is not None:
            place = tl.load(target_ptr + pair, mask=present, other=-1)
            write = (place >= 0) & (place < out_rows)
        source = (tl.where(present, pair, 0) // TOP_K).to(tl.int64) * stride_xm
        place = place.to(tl.int64) * stride_om
        inside = (cols < C)[None, :]
        if UNIT_STRIDE:
            x = tl.load(x_ptr + source[:, None] + cols[None, :], mask=present[:, None] & inside, other=0)
            tl.store(out_ptr + place[:, None] + cols[None, :], x, mask=write[:, None] & inside)
        else:
            wide = cols.to(tl.int64)[None, :]
            x = tl.load(x_ptr + source[:, None] + wide * stride_xk, mask=present[:, None] & inside, other=0)
            tl.store(out_ptr + place[:, None] + wide * stride_ok, x, mask=write[:, None] & inside)


def _permute_triton(
    x: torch.Tensor, order: torch.Tensor, target: torch.Tensor | None, total: torch.Tensor, rows: int, top_k: int, columns: bool
) -> torch.Tensor:
    out = _permute_fake(x, order, target, total, rows, top_k, columns)
    width = x.shape[1]
    if rows == 0 or width == 0:
        return out
    block_c = min(1 << (width - 1).bit_length(), 2048)
    block_r = max(1, 2048 // block_c)
    tiles = ceil_div(order.shape[0], block_r) * ceil_div(width, block_c)
    launch(
        "permute",
        _permute_kernel,
        (min(tiles, 8 * arch_of(x.device).sms),),
        x,
        order,
        target,
        total,
        out,
        order.shape[0],
        x.shape[0] * top_k,
        rows,
        width,
        *x.stride(),
        *out.stride(),
        TOP_K=top_k,
        UNIT_STRIDE=x.stride(1) == 1 and out.stride(1) == 1,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def _permute_fake(
    x: torch.Tensor, order: torch.Tensor, target: torch.Tensor | None, total: torch.Tensor, rows: int, top_k: int, columns: bool
) -> torch.Tensor:
    strides = (1, ceil_div(rows, 4) * 4) if columns else (x.shape[1], 1)
    return torch.empty_strided((rows, x.shape[1]), strides, dtype=x.dtype, device=x.device)


_permute = register("permute", cuda=_permute_triton, cpu=permute_ref, fake=_permute_fake)


def permute(
    x: torch.Tensor | QTensor, routing: Routing | PaddedRouting, *, block: int | None = None, capacity: int | None = None
) -> tuple[torch.Tensor | QTensor, PaddedRouting]:
    """Copy each token's row to its places in the dense per-expert form: rows[d] = x[order[d] // k].

    Args:
        x: (T, K), any strides, bf16, fp16, fp32, uint8, int8, int32, int64, e4m3 or E8M0; or a quantized activation with scales in layout
            row_major or mn_major, whose data and scales both move.
        routing: a `Routing`, to be spread out by `block` or `capacity` (see `pad_routing`; neither means block 1, the packed rows), or a
            `PaddedRouting` to be used as it is.
        block: every expert's rows start at a multiple of it.
        capacity: every expert has room for that many rows (masked form).

    Returns:
        (rows, padded): rows (P, K) of x's kind, and the routing they follow. Block form: padding rows before padded.offsets[E_local] are zero
        bytes, later rows are not written. Masked form: view rows as (E_local, capacity, K); rows beyond a count are not written.

    Numerics:
        A copy of bytes.

    Raises:
        TypeError: another dtype, or no routing. ValueError: shape, device or scale layout that does not fit; block or capacity where they do
            not belong.

    Cost:
        One launch (two for a QTensor), one more where the routing is spread out; reads and writes the filled rows.

    See Also:
        `moe_ops.combine`, the way back; tests/router/test_permute.py, benchmarks/router/bench_permute.py.
    """
    op = "permute"
    if isinstance(routing, PaddedRouting):
        if block is not None or capacity is not None:
            raise ValueError(f"{op}: block and capacity belong to a Routing, got block={block} and capacity={capacity} with a PaddedRouting")
        check_padded(op, routing)
        padded = routing
    else:
        padded = spread(op, routing, 1 if block is None and capacity is None else block, capacity)
    if not isinstance(x, QTensor):
        return _move(op, "x", x, padded, False), padded
    if x.layout not in ("row_major", "mn_major"):
        raise ValueError(f"{op}: scales of x must be in layout row_major or mn_major, got {x.layout}")
    if x.layout == "mn_major" and padded.capacity is not None:
        raise ValueError(f"{op}: scales of x must be in layout row_major for the masked form, got mn_major")
    if x.block != x.format.act_block:
        raise ValueError(f"{op}: x must be quantized as an activation, in blocks {x.format.act_block}, got {x.block}")
    data = as_e4m3(_move(op, "x.data", x.data, padded, False))
    scale = _move(op, "x.scale", x.scale, padded, x.layout == "mn_major")
    return make_qtensor(data, scale, x.format, weight=False, layout=x.layout, rule=x.rule), padded


def _move(op: str, name: str, x: torch.Tensor, padded: PaddedRouting, columns: bool) -> torch.Tensor:
    checks.is_tensor(op, name, x)
    checks.dtype(op, name, x, _DTYPES)
    tokens, top_k = padded.inverse.shape
    checks.shape(op, name, x, (tokens, None))
    checks.no_grad(op, x=x)
    checks.same_device(op, x=x, inverse=padded.inverse)
    if padded.capacity is None:
        order, target, total = padded.order, None, padded.offsets[-1:]
    else:
        order, target, total = padded.packed.order, padded.inverse, padded.packed.offsets[-1:]
    out = _permute(as_bytes(x), order, target, total, padded.num_rows, top_k, columns)
    return out.view(x.dtype) if out.dtype != x.dtype else out
