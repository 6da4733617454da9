"""The fused MoE layer after routing: quantize x -> GEMM1 (rows gathered) -> activation and quantize -> GEMM2 -> weighted sum.

GEMM1's output stays fp32 until the activation is applied and quantized again: rounding it to bf16 in between costs 1.3e-2 to 1.7e-2
of the layer's output. At most five launches; counts stay on the device; nothing is permuted.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_ops.core import checks
from moe_ops.core.arch import Arch, arch_of
from moe_ops.core.formats import FORMATS, FP8_BLOCK, QTensor, as_bytes, ceil_div
from moe_ops.core.ops import register
from moe_ops.gemm import grouped_act
from moe_ops.gemm.grouped import grouped_gemm_into, grouped_gemm_ref
from moe_ops.gemm.grouped_config import HOPPER_ROWS, STREAM_ROWS
from moe_ops.quant.activation import Activation
from moe_ops.router.routing import check_routing

if TYPE_CHECKING:
    from moe_ops.router.routing import Routing

__all__ = ["Workspace", "fused_moe", "make_workspace"]

_X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IMPLS = ("triton", "torch")
_SILU = Activation()
#: Format of the op -> (how kernels read operands, rule that quantizes the activations).
_SCHEMES = {"fp8_block": ("fp8_block", "fp32"), "mxfp8": ("mxfp8", "rceil"), "mxfp8_folded": ("fp8_block", "folded"), "plain": ("plain", "")}
#: Rows an expert, on average, from which on GEMM1 is fused with what follows it in plain Triton; with fewer rows a tile of 2 x 128 weight rows
#: leaves too few tiles.
FUSE_ROWS = 64
#: Tiles of 2 x 128 weight rows from which on the kernel that streams the weights is fused too. H200, Triton 3.6, 2026-11-30, one token: 28.2 us
#: fused and 26.6 apart with 48 tiles (Qwen3-30B), 53.0 and 58.0 with 96 (Qwen3-235B).
FUSE_TILES = 64


class Workspace(NamedTuple):
    """Buffers of one layer call, made once by `make_workspace` and reused by every call of that size or smaller layers of that shape.

    Attributes:
        xq, xs: quantized tokens and their scales (empty for 16-bit weights).
        h: GEMM1's output (R, 2I) fp32.
        aq, a_s: quantized (or 16-bit) activation rows (R, I) and their scales.
        y: GEMM2's rows (R, H).
    """

    xq: torch.Tensor
    xs: torch.Tensor
    h: torch.Tensor
    aq: torch.Tensor
    a_s: torch.Tensor
    y: torch.Tensor


def fuses_gemm1(rows: int, w13: torch.Tensor, fmt: str, interleaved: bool, arch: Arch) -> bool:
    """Whether GEMM1 runs with the activation and the quantization in its epilogue: a shape that allows it, and rows enough.

    Weights off the 16-byte grid, which tensor descriptors cannot address, run apart.
    """
    experts, inter, hidden = w13.shape[0], w13.shape[1] // 2, w13.shape[2]
    if w13.data_ptr() % 16 or rows >= HOPPER_ROWS:
        return False
    if grouped_act.unsupported(2 * inter, hidden, experts, _SCHEMES[fmt][0], interleaved, arch) is not None:
        return False
    if arch.has_wgmma and rows <= STREAM_ROWS * experts:
        return min(experts, rows) * inter >= FUSE_TILES * 128
    return arch.has_wgmma or rows >= FUSE_ROWS * experts


def _fields(
    tokens: int, top_k: int, hidden: int, inter: int, fmt: str, dtype: torch.dtype, fused: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:  # fmt: skip
    """(shape, dtype) that each buffer of a call needs at least."""
    rows = tokens * top_k
    y_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # GEMM2 in fp16 can overflow
    fields = {
        "h": ((0 if fused else rows, 2 * inter), torch.float32),
        "y": ((rows, hidden), y_dtype),
    }
    if fmt == "plain":
        nothing = ((0,), torch.uint8)
        return fields | {"xq": nothing, "xs": nothing, "aq": ((rows, inter), dtype), "a_s": nothing}
    scheme = FORMATS[_SCHEMES[fmt][0]]
    width, scale = scheme.act_block[1], scheme.scale_dtype
    return fields | {
        "xq": ((tokens, hidden), torch.uint8),
        "xs": ((tokens, ceil_div(hidden, width)), scale),
        "aq": ((rows, inter), torch.uint8),
        "a_s": ((rows, ceil_div(inter, width)), scale),
    }


def _allocate(fields: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> Workspace:
    return Workspace(**{name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in fields.items()})


def _check_workspace(ws: object, fields: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
    """Refuse a workspace that was made for another layer, format, dtype or device, or for fewer tokens."""
    if not isinstance(ws, Workspace):
        raise TypeError(f"fused_moe: workspace must come from make_workspace, got {type(ws).__name__}")
    for name, (shape, dtype) in fields.items():
        t = getattr(ws, name)
        fits = t.dim() == len(shape) and t.shape[0] >= shape[0] and t.shape[1:] == shape[1:] and t.is_contiguous()
        if shape[0] > 0 and not (fits and t.dtype == dtype and t.device == device):
            raise ValueError(
                f"fused_moe: workspace.{name} must be at least {shape} of {dtype} on {device} for this call, got {tuple(t.shape)} of {t.dtype} "
                f"on {t.device}; use make_workspace with this w13, this top_k, x's dtype and enough tokens"
            )


def fused_moe_ref(
    x: torch.Tensor, w13: torch.Tensor, s13: torch.Tensor | None, w2: torch.Tensor, s2: torch.Tensor | None, b13: torch.Tensor | None,
    b2: torch.Tensor | None, weights: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, fmt: str, segments: int,
    act_kind: str, alpha: float, limit: float, up_offset: float, interleaved: bool,
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
    """Launch the chain on given buffers; allocates nothing. `args` are the op's."""
    x, w13, s13, w2, s2, b13, b2, weights, offsets, order, inverse, fmt, segments, act_kind, alpha, limit, up_offset, interleaved = args
    from moe_ops.quant.quantize import quantize_into
    from moe_ops.quant.silu_mul import silu_mul_into
    from moe_ops.quant.silu_mul_quantize import silu_mul_quantize_into
    from moe_ops.router.combine import combine_into

    tokens, top_k = inverse.shape
    if tokens == 0:
        return
    filled = offsets[-1:]
    h = ws.h[: tokens * top_k]
    aq = ws.aq[: tokens * top_k]
    y = ws.y[: tokens * top_k]
    if fmt == "plain":
        grouped_gemm_into(x, None, w13, None, b13, offsets, order, top_k, fmt, segments, h)
        silu_mul_into(h, aq, filled, act_kind, alpha, limit, up_offset, interleaved)
        grouped_gemm_into(aq, None, w2, None, b2, offsets, None, 1, fmt, 1, y)
    else:
        scheme, rule = _SCHEMES[fmt]
        xq, xs, a_s = ws.xq[:tokens], ws.xs[:tokens], ws.a_s[: tokens * top_k]
        quantize_into(x, xq, xs, None, scheme, rule)
        if fuses_gemm1(tokens * top_k, w13, fmt, interleaved, arch_of(x.device)):
            act = (act_kind, alpha, limit, up_offset)
            grouped_act.grouped_act_into(xq, xs, w13, s13, b13, offsets, order, top_k, *act, aq, a_s, rule, early=True)
        else:
            grouped_gemm_into(xq, xs, w13, s13, b13, offsets, order, top_k, scheme, segments, h, early=True)
            silu_mul_quantize_into(h, aq, a_s, filled, scheme, rule, act_kind, alpha, limit, up_offset, interleaved)
        grouped_gemm_into(aq, a_s, w2, s2, b2, offsets, None, 1, scheme, 1, y, early=True)
    combine_into(y, inverse, weights, out)


def _fused_moe_cuda(*args: Any) -> torch.Tensor:
    """Arguments as `_fake`."""
    x, w13, inverse, fmt, interleaved = args[0], args[1], args[10], args[11], args[17]
    tokens, top_k = inverse.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    fused = fuses_gemm1(tokens * top_k, w13, fmt, interleaved, arch_of(x.device))
    fields = _fields(tokens, top_k, w13.shape[2], w13.shape[1] // 2, fmt, x.dtype, fused)
    fused_moe_into(args, out, _allocate(fields, x.device))
    return out


def _fake(
    x: torch.Tensor, w13: torch.Tensor, s13: torch.Tensor | None, w2: torch.Tensor, s2: torch.Tensor | None, b13: torch.Tensor | None,
    b2: torch.Tensor | None, weights: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, fmt: str, segments: int,
    act_kind: str, alpha: float, limit: float, up_offset: float, interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_op = register("fused_moe", cuda=_fused_moe_cuda, cpu=fused_moe_ref, fake=_fake)


def _out_cuda(*args: Any) -> None:
    """Arguments as `_out_fake`."""
    fused_moe_into(args[:18], args[18], Workspace(*args[19:]))


def _out_cpu(*args: Any) -> None:
    """Arguments as `_out_fake`."""
    args[18].copy_(fused_moe_ref(*args[:18]))


def _out_fake(
    x: torch.Tensor, w13: torch.Tensor, s13: torch.Tensor | None, w2: torch.Tensor, s2: torch.Tensor | None, b13: torch.Tensor | None,
    b2: torch.Tensor | None, weights: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, fmt: str, segments: int,
    act_kind: str, alpha: float, limit: float, up_offset: float, interleaved: bool,
    out: torch.Tensor, xq: torch.Tensor, xs: torch.Tensor, h: torch.Tensor, aq: torch.Tensor, a_s: torch.Tensor, y: torch.Tensor,
) -> None:  # fmt: skip
    return None


_out_op = register("fused_moe_out", cuda=_out_cuda, cpu=_out_cpu, fake=_out_fake, mutates=("out", "xq", "xs", "h", "aq", "a_s", "y"))


def layer_format(w: "QTensor | torch.Tensor") -> str:
    """The op's name for a weight's format; see `_SCHEMES`."""
    if not isinstance(w, QTensor):
        return "plain"
    return "mxfp8_folded" if w.format.name == "mxfp8" and w.scheme == "fp8_block" else w.format.name


def _check(
    x: torch.Tensor, w13: "QTensor | torch.Tensor", w2: "QTensor | torch.Tensor", routing: "Routing", b13: torch.Tensor | None,
    b2: torch.Tensor | None, act: Activation,
) -> str:  # fmt: skip
    op = "fused_moe"
    checks.is_tensor(op, "x", x)
    checks.ndim(op, "x", x, (2,))
    checks.dtype(op, "x", x, _X_DTYPES)
    checks.last_stride_one(op, "x", x)
    for name, w in (("w13", w13), ("w2", w2)):
        if isinstance(w, QTensor):
            checks.qtensor(op, name, w)
        elif not isinstance(w, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a QTensor or a torch.Tensor, got {type(w).__name__}")
    if isinstance(w13, QTensor) != isinstance(w2, QTensor):
        raise TypeError(f"{op}: w13 and w2 must both be QTensor or both be 16-bit tensors, got {type(w13).__name__} and {type(w2).__name__}")
    check_routing(op, routing)
    d13 = w13.data if isinstance(w13, QTensor) else w13
    d2 = w2.data if isinstance(w2, QTensor) else w2
    checks.ndim(op, "w13", d13, (3,))
    experts, two_i, hidden = d13.shape
    if hidden == 0 or two_i == 0:
        raise ValueError(f"{op}: H and I must be at least 1, got w13 of shape {tuple(d13.shape)}")
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
            checks.is_tensor(op, name, b)
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
        if w13.scheme == "fp8_block" and (two_i // 2) % 128 and w13.segments != 2 and not act.interleaved:
            raise ValueError(
                f"{op}: w13 has I = {two_i // 2}, which 128 does not divide, and one run of scale blocks over its 2I rows, so that a block mixes "
                f"gate and up rows; quantize it with segments=2"
            )
        return layer_format(w13)
    checks.dtype(op, "x (with 16-bit weights)", x, (torch.bfloat16, torch.float16))
    for name, d in (("w13", d13), ("w2", d2)):
        if d.dtype != x.dtype:
            raise TypeError(f"{op}: 16-bit {name} must have x's dtype {x.dtype}, got {d.dtype}")
    return "plain"


def make_workspace(tokens: int, top_k: int, w13: "QTensor | torch.Tensor", dtype: torch.dtype = torch.bfloat16) -> Workspace:
    """Buffers for `fused_moe(..., out=, workspace=)` with up to `tokens` tokens of `dtype`, top_k rows each, on w13's device.

    Args:
        tokens: most tokens of a call.
        top_k: experts per token.
        w13: the layer's gate and up weights; the format and the sizes are theirs.
        dtype: dtype of the tokens: bf16, fp16 or fp32.

    Raises:
        TypeError: dtype is none of the three. ValueError: tokens below 0 or top_k below 1.
    """
    op = "make_workspace"
    checks.int_range(op, "tokens", tokens, 0, 2**31 - 1)
    checks.int_range(op, "top_k", top_k, 1, 2**16)
    if dtype not in _X_DTYPES:
        raise TypeError(f"{op}: dtype must be bfloat16, float16 or float32, got {dtype}")
    return _allocate(_fields(tokens, top_k, w13.shape[2], w13.shape[1] // 2, layer_format(w13), dtype, False), w13.device)


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
    if act is None:
        act = _SILU
    elif not isinstance(act, Activation):
        raise TypeError(f"{op}: act must be an Activation, got {type(act).__name__}")
    fmt = _check(x, w13, w2, routing, b13, b2, act)
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
    checks.is_tensor(op, "out", out)
    checks.shape(op, "out", out, tuple(x.shape))
    checks.dtype(op, "out", out, (x.dtype,))
    checks.no_grad(op, out=out)
    checks.contiguous(op, "out", out)
    checks.same_device(op, x=x, out=out)
    if impl == "torch":
        return out.copy_(fused_moe_ref(*args))
    fused = x.is_cuda and fuses_gemm1(routing.order.shape[0], d13, fmt, act.interleaved, arch_of(x.device))
    fields = _fields(x.shape[0], routing.top_k, d13.shape[2], d13.shape[1] // 2, fmt, x.dtype, fused)
    if workspace is None:
        workspace = _allocate(fields, x.device)
    else:
        _check_workspace(workspace, fields, x.device)
    _out_op(*args, out, *workspace)
    return out
