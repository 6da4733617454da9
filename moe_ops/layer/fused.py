"""The fused MoE layer after routing: quantize x -> GEMM1 (rows gathered) -> activation and quantize -> GEMM2 -> weighted sum.

GEMM1's output stays fp32 until the activation is applied and quantized again: rounding it to bf16 in between costs 1.3e-2 to 1.7e-2
of the layer's output. Five launches; counts stay on the device; nothing is permuted.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_ops.core import checks
from moe_ops.core.arch import Arch, arch_of
from moe_ops.core.formats import FORMATS, FP8_BLOCK, QTensor, as_bytes, ceil_div
from moe_ops.core.ops import register
from moe_ops.gemm import grouped_act
from moe_ops.gemm.grouped import check_operands, grouped_gemm_into, grouped_gemm_ref
from moe_ops.gemm.tile_list import list_size
from moe_ops.quant.activation import Activation

if TYPE_CHECKING:
    from moe_ops.router.routing import Routing

__all__ = ["Workspace", "fused_moe", "make_workspace"]

_X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IMPLS = ("triton", "torch")
_SILU = Activation()
#: Format of the op -> (how kernels read operands, rule that quantizes the activations).
_SCHEMES = {"fp8_block": ("fp8_block", "fp32"), "mxfp8": ("mxfp8", "rceil"), "mxfp8_folded": ("fp8_block", "folded"), "plain": ("plain", "")}
#: Rows an expert, on average, from which on GEMM1 is fused with what follows it.
FUSE_ROWS = 64


class Workspace(NamedTuple):
    """Buffers of one layer call, made once by `make_workspace` and reused by every call of that size or smaller layers of that shape.

    Attributes:
        xq, xs: quantized tokens and their scales (empty for 16-bit weights).
        h: GEMM1's output (R, 2I) fp32.
        aq, a_s: quantized (or 16-bit) activation rows (R, I) and their scales.
        y: GEMM2's rows (R, H).
        tiles: the list of row tiles of a prefill.
    """

    xq: torch.Tensor
    xs: torch.Tensor
    h: torch.Tensor
    aq: torch.Tensor
    a_s: torch.Tensor
    y: torch.Tensor
    tiles: torch.Tensor


def fuses_gemm1(rows: int, experts: int, inter: int, hidden: int, fmt: str, interleaved: bool, arch: Arch) -> bool:
    """Whether GEMM1 runs with the activation and the quantization in its epilogue: many rows for each expert, and a shape that allows it.

    With few rows the two stay apart: a tile of 2 x 128 weight rows leaves too few tiles to fill the GPU with loads.
    """
    return rows >= FUSE_ROWS * experts and grouped_act.unsupported(2 * inter, hidden, _SCHEMES[fmt][0], interleaved, arch) is None


def _workspace(
    tokens: int, top_k: int, experts: int, hidden: int, inter: int, fmt: str, dtype: torch.dtype, device: torch.device, fused: bool
) -> Workspace:  # fmt: skip
    rows = tokens * top_k
    y_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # GEMM2 in fp16 can overflow
    h = torch.empty((0 if fused else rows, 2 * inter), dtype=torch.float32, device=device)
    tiles = torch.empty((list_size(rows, experts, 64) if fused else 0,), dtype=torch.int32, device=device)
    y = torch.empty((rows, hidden), dtype=y_dtype, device=device)
    if fmt == "plain":
        # three separate empties: arguments that an op writes must not alias
        xq, xs, a_s = (torch.empty((0,), dtype=torch.uint8, device=device) for _ in range(3))
        return Workspace(xq, xs, h, torch.empty((rows, inter), dtype=dtype, device=device), a_s, y, tiles)
    scheme = FORMATS[_SCHEMES[fmt][0]]
    width, scale = scheme.act_block[1], scheme.scale_dtype
    return Workspace(
        torch.empty((tokens, hidden), dtype=torch.uint8, device=device),
        torch.empty((tokens, ceil_div(hidden, width)), dtype=scale, device=device),
        h,
        torch.empty((rows, inter), dtype=torch.uint8, device=device),
        torch.empty((rows, ceil_div(inter, width)), dtype=scale, device=device),
        y,
        tiles,
    )


def fused_moe_ref(
    x: torch.Tensor, w13: torch.Tensor, s13: torch.Tensor | None, w2: torch.Tensor, s2: torch.Tensor | None, b13: torch.Tensor | None,
    b2: torch.Tensor | None, weights: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, fmt: str, segments: int,
    act_kind: str, alpha: float, limit: float, up_offset: float, interleaved: bool,
    config13: list[int] | None = None, config2: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Reference of `fused_moe`: fp32 everywhere between the quantizations, fp32 sum (reads the offsets on the host)."""
    from moe_ops.quant.activation import activation_ref
    from moe_ops.quant.quantize import quantize_ref
    from moe_ops.router.combine import combine_ref

    tokens, top_k = inverse.shape
    act = Activation(act_kind, alpha, None if math.isinf(limit) else limit, up_offset, interleaved)
    rows = int(offsets[-1])
    order = order[:rows]
    scheme, rule = _SCHEMES[fmt]
    a, sa = (x, None) if fmt == "plain" else quantize_ref(x, None, scheme, "row_major", rule)
    h = grouped_gemm_ref(a, sa, w13, s13, b13, offsets, order, top_k, scheme, segments, torch.float32)
    g = activation_ref(h, act)
    a, sa = (g.to(x.dtype), None) if fmt == "plain" else quantize_ref(g, None, scheme, "row_major", rule)
    y = grouped_gemm_ref(a, sa, w2, s2, b2, offsets, None, 1, scheme, 1, torch.float32)
    return combine_ref(y, inverse, weights, x.dtype)


def fused_moe_into(args: tuple[Any, ...], out: torch.Tensor, ws: Workspace) -> None:
    """Launch the chain on given buffers; allocates nothing. `args` are the op's, with the two configs or without them."""
    x, w13, s13, w2, s2, b13, b2, weights, offsets, order, inverse, fmt, segments, act_kind, alpha, limit, up_offset, interleaved = args[:18]
    config13, config2 = args[18:] if len(args) == 20 else (None, None)
    from moe_ops.quant.quantize import quantize_into
    from moe_ops.quant.silu_mul import silu_mul_into
    from moe_ops.quant.silu_mul_quantize import silu_mul_quantize_into
    from moe_ops.router.combine import combine_into

    tokens, top_k = inverse.shape
    if tokens == 0:
        return
    rows, experts, two_i, hidden = tokens * top_k, *w13.shape
    filled = offsets[-1:]
    h = ws.h[: tokens * top_k]
    aq = ws.aq[: tokens * top_k]
    y = ws.y[: tokens * top_k]
    if fmt == "plain":
        grouped_gemm_into(x, None, w13, None, b13, offsets, order, top_k, fmt, segments, h, config13)
        silu_mul_into(h, aq, filled, act_kind, alpha, limit, up_offset, interleaved)
        grouped_gemm_into(aq, None, w2, None, b2, offsets, None, 1, fmt, 1, y, config2)
    else:
        scheme, rule = _SCHEMES[fmt]
        xq, xs, a_s = ws.xq[:tokens], ws.xs[:tokens], ws.a_s[: tokens * top_k]
        quantize_into(x, xq, xs, None, scheme, rule)
        if fuses_gemm1(rows, experts, two_i // 2, hidden, fmt, interleaved, arch_of(x.device)):
            tiles = ws.tiles[: list_size(rows, experts, 64)]
            grouped_act.make_tiles(offsets, rows, tiles)
            grouped_act.grouped_act_into(xq, xs, w13, s13, b13, tiles, order, top_k, act_kind, alpha, limit, up_offset, aq, a_s, rule)
            grouped_act.grouped_down_into(aq, a_s, w2, s2, b2, tiles, offsets, y, config2)
            combine_into(y, inverse, weights, out)
            return
        grouped_gemm_into(xq, xs, w13, s13, b13, offsets, order, top_k, scheme, segments, h, config13)
        silu_mul_quantize_into(h, aq, a_s, filled, scheme, rule, act_kind, alpha, limit, up_offset, interleaved)
        grouped_gemm_into(aq, a_s, w2, s2, b2, offsets, None, 1, scheme, 1, y, config2)
    combine_into(y, inverse, weights, out)


def _fused_moe_cuda(*args: Any) -> torch.Tensor:
    """Arguments as `_fake`."""
    x, w13, inverse, fmt, interleaved = args[0], args[1], args[10], args[11], args[17]
    tokens, top_k = inverse.shape
    experts, two_i, hidden = w13.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    fused = fuses_gemm1(tokens * top_k, experts, two_i // 2, hidden, fmt, interleaved, arch_of(x.device))
    ws = _workspace(tokens, top_k, experts, hidden, two_i // 2, fmt, x.dtype, x.device, fused)
    fused_moe_into(args, out, ws)
    return out


def _fake(
    x: torch.Tensor, w13: torch.Tensor, s13: torch.Tensor | None, w2: torch.Tensor, s2: torch.Tensor | None, b13: torch.Tensor | None,
    b2: torch.Tensor | None, weights: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, fmt: str, segments: int,
    act_kind: str, alpha: float, limit: float, up_offset: float, interleaved: bool,
    config13: list[int] | None = None, config2: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_op = register("fused_moe", cuda=_fused_moe_cuda, cpu=fused_moe_ref, fake=_fake)


def _out_cuda(*args: Any) -> None:
    """Arguments as `_out_fake`."""
    fused_moe_into(args[:20], args[20], Workspace(*args[21:]))


def _out_cpu(*args: Any) -> None:
    """Arguments as `_out_fake`."""
    args[20].copy_(fused_moe_ref(*args[:18]))


def _out_fake(
    x: torch.Tensor, w13: torch.Tensor, s13: torch.Tensor | None, w2: torch.Tensor, s2: torch.Tensor | None, b13: torch.Tensor | None,
    b2: torch.Tensor | None, weights: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, fmt: str, segments: int,
    act_kind: str, alpha: float, limit: float, up_offset: float, interleaved: bool,
    config13: list[int] | None, config2: list[int] | None,
    out: torch.Tensor, xq: torch.Tensor, xs: torch.Tensor, h: torch.Tensor, aq: torch.Tensor, a_s: torch.Tensor, y: torch.Tensor, tiles: torch.Tensor,
) -> None:  # fmt: skip
    return None


_out_op = register("fused_moe_out", cuda=_out_cuda, cpu=_out_cpu, fake=_out_fake, mutates=("out", "xq", "xs", "h", "aq", "a_s", "y", "tiles"))


def layer_format(w: "QTensor | torch.Tensor") -> str:
    """The op's name for a weight's format; see `_SCHEMES`."""
    if not isinstance(w, QTensor):
        return "plain"
    return "mxfp8_folded" if w.format.name == "mxfp8" and w.scheme == "fp8_block" else w.format.name


def _check(
    x: torch.Tensor, w13: "QTensor | torch.Tensor", w2: "QTensor | torch.Tensor", routing: "Routing", b13: torch.Tensor | None,
    b2: torch.Tensor | None,
) -> str:  # fmt: skip
    op = "fused_moe"
    checks.is_tensor(op, "x", x)
    checks.ndim(op, "x", x, (2,))
    checks.dtype(op, "x", x, _X_DTYPES)
    checks.last_stride_one(op, "x", x)
    if isinstance(w13, QTensor) != isinstance(w2, QTensor):
        raise TypeError(f"{op}: w13 and w2 must both be QTensor or both be 16-bit tensors, got {type(w13).__name__} and {type(w2).__name__}")
    d13, d2 = (w13.data, w2.data) if isinstance(w13, QTensor) and isinstance(w2, QTensor) else (w13, w2)
    assert isinstance(d13, torch.Tensor) and isinstance(d2, torch.Tensor)
    checks.ndim(op, "w13", d13, (3,))
    experts, two_i, hidden = d13.shape
    if two_i % 2:
        raise ValueError(f"{op}: w13 must have 2I rows (gate rows, then up rows), got an odd number, {two_i}")
    checks.shape(op, "w2", d2, (experts, hidden, two_i // 2))
    if x.shape[1] != hidden:
        raise ValueError(f"{op}: x has H = {x.shape[1]} and w13 has H = {hidden}; they must be equal")
    if routing.num_local_experts != experts:
        raise ValueError(f"{op}: routing has {routing.num_local_experts} local experts and w13 has {experts}; they must be equal")
    if routing.num_tokens != x.shape[0]:
        raise ValueError(f"{op}: routing has {routing.num_tokens} tokens and x has {x.shape[0]} rows; they must be equal")
    for name, b, width in (("b13", b13, two_i), ("b2", b2, hidden)):
        if b is not None:
            checks.shape(op, name, b, (experts, width))
            checks.dtype(op, name, b, (torch.float32, torch.bfloat16, torch.float16))
            checks.contiguous(op, name, b)
    for name, d in (("w13", d13), ("w2", d2)):
        checks.contiguous(op, name, d)
    checks.same_device(op, x=x, w13=d13, w2=d2, b13=b13, b2=b2, routing=routing.ids)
    checks.no_grad(op, x=x, w13=d13, w2=d2, b13=b13, b2=b2)
    if isinstance(w13, QTensor) and isinstance(w2, QTensor):
        if w13.format is not w2.format:
            raise ValueError(f"{op}: w13 is {w13.format.name} and w2 is {w2.format.name}; both must have one format")
        for name, q in (("w13", w13), ("w2", w2)):
            if q.block not in (q.format.weight_block, FP8_BLOCK.weight_block) or q.layout != "row_major":
                raise ValueError(f"{op}: {name} must have weight blocks {q.format.weight_block} with row_major scales, got {q}")
            checks.contiguous(op, f"{name}.scale", q.scale)
            if q.format.name == "mxfp8" and q.shape[-1] % 32:
                raise ValueError(f"{op}: mxfp8 needs K % 32 == 0, got {name} with K = {q.shape[-1]}")
        if w13.block != w2.block:
            raise ValueError(f"{op}: w13 has blocks {w13.block} and w2 {w2.block}; fold both mxfp8 weights or neither")
        return layer_format(w13)
    if d13.dtype != x.dtype:
        raise TypeError(f"{op}: 16-bit w13 must have x's dtype {x.dtype}, got {d13.dtype}")
    return check_operands(op, x, d13)


def make_workspace(tokens: int, top_k: int, w13: "QTensor | torch.Tensor", dtype: torch.dtype = torch.bfloat16) -> Workspace:
    """Buffers for `fused_moe(..., out=, workspace=)` with up to `tokens` tokens of `dtype`, on w13's device."""
    fmt = layer_format(w13)
    experts, two_i, hidden = w13.shape
    ws = _workspace(tokens, top_k, experts, hidden, two_i // 2, fmt, dtype, w13.device, False)
    return ws._replace(tiles=torch.empty((list_size(tokens * top_k, experts, 64),), dtype=torch.int32, device=w13.device))


def fused_moe(
    x: torch.Tensor,
    w13: "QTensor | torch.Tensor",
    w2: "QTensor | torch.Tensor",
    routing: "Routing",
    *,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    act: Activation | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """The MoE layer after routing: y[t] = sum_j weight[t, j] * (f(x[t] @ w13[e]^T + b13[e]) @ w2[e]^T + b2[e]), e = ids[t, j].

    Args:
        x: tokens (T, H), bf16, fp16 or fp32, last stride 1.
        w13: gate and up weights (E, 2I, H), gate rows then up rows (or interleaved, when `act` says so): a QTensor with weight blocks,
            or x's 16-bit dtype.
            mxfp8 weights may be folded (`quant.fold.fold_weight`): the same values at the speed of fp8_block on Hopper.
        w2: down weights (E, H, I), in the same format.
        routing: a `Routing` of these T tokens over E local experts.
        b13: biases (E, 2I) added before the activation, or None.
        b2: biases (E, H) added before the weights are applied, or None.
        act: an `Activation`; SiLU gating by default.
        out: (T, H) tensor of x's dtype that receives the result; with `workspace` the call allocates nothing.
        workspace: from `make_workspace`, for at least T tokens.
        impl: "triton", "torch" (the reference; reads counts on the host) or None, which takes "triton" on CUDA and "torch" on a CPU.

    Returns:
        (T, H) of x's dtype (`out` if given). Tokens without rows (padding, all experts remote) are exactly 0.

    Numerics: x and the activation are quantized in the weights' format, GEMMs accumulate in fp32, GEMM1's output is never rounded before the
        activation, weights are applied once, in the fp32 sum over j in order. Same call, same bits. Within 1e-2 of the reference.

    Raises:
        TypeError, ValueError: arguments that do not fit (named), an unknown impl, a requires_grad argument.
        RuntimeError: a first compile under graph capture or after `freeze()`.

    Cost: 6 * rows * I * H flops; E_active * 3 * I * H weight bytes (FP8); five launches.
    """
    op = "fused_moe"
    fmt = _check(x, w13, w2, routing, b13, b2)
    if act is None:
        act = _SILU
    if impl is not None:
        checks.one_of(op, "impl", impl, IMPLS)
        if impl == "triton" and not x.is_cuda:
            raise ValueError(f"{op}: impl 'triton' needs CUDA tensors, got {x.device}")
    d13, s13 = (w13.data, w13.scale) if isinstance(w13, QTensor) else (w13, None)
    d2, s2 = (w2.data, w2.scale) if isinstance(w2, QTensor) else (w2, None)
    limit = math.inf if act.limit is None else act.limit
    args = (
        x, as_bytes(d13), s13, as_bytes(d2), s2, b13, b2, routing.weights, routing.offsets, routing.order, routing.inverse,
        fmt, w13.segments if isinstance(w13, QTensor) else 1, act.kind, act.alpha, limit, act.up_offset, act.interleaved,
    )  # fmt: skip
    if out is None and workspace is None:
        return fused_moe_ref(*args) if impl == "torch" else _op(*args)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    checks.shape(op, "out", out, tuple(x.shape))
    checks.dtype(op, "out", out, (x.dtype,))
    checks.contiguous(op, "out", out)
    checks.same_device(op, x=x, out=out)
    if impl == "torch":
        return out.copy_(fused_moe_ref(*args))
    if workspace is None:
        workspace = make_workspace(x.shape[0], routing.top_k, w13, x.dtype)
    elif workspace.h.shape[0] < routing.order.shape[0] or workspace.h.shape[1] != d13.shape[1] or workspace.y.shape[1] != x.shape[1]:
        raise ValueError(
            f"{op}: workspace has room for {workspace.h.shape[0]} rows of 2I = {workspace.h.shape[1]}, H = {workspace.y.shape[1]}; "
            f"this call needs {routing.order.shape[0]} rows of 2I = {d13.shape[1]}, H = {x.shape[1]}: use make_workspace"
        )
    elif workspace.aq.dtype != (x.dtype if fmt == "plain" else torch.uint8) or workspace.h.device != x.device:
        raise ValueError(f"{op}: workspace was made for another format, dtype or device; use make_workspace with this w13 and dtype {x.dtype}")
    _out_op(*args, None, None, out, *workspace)
    return out
