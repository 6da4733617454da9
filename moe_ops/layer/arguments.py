"""What `MoELayer` accepts, checked when a layer is made: nothing that cannot run, or that would run wrong, gets past its constructor."""

import dataclasses
from typing import Any

import torch

from moe_ops.core import checks
from moe_ops.core.formats import FORMATS, FP8_BLOCK, MXFP8, QTensor
from moe_ops.layer.load import ExpertWeights, Weight
from moe_ops.layer.models import RoutingOptions
from moe_ops.quant.activation import Activation
from moe_ops.router.topk import MAX_TOP_K, SCORES

_OP = "MoELayer"
_16BIT = (torch.bfloat16, torch.float16)
_FLOATS = (*_16BIT, torch.float32)


def check_local(local: object, total: int) -> None:
    """`local` is None or (first, count) within `total` experts."""
    if local is None:
        return
    if not (isinstance(local, tuple) and len(local) == 2 and all(isinstance(v, int) and not isinstance(v, bool) for v in local)):
        raise TypeError(f"{_OP}: local must be None or a tuple of two ints, (first, count), got {local!r}")
    first, count = local
    if not (0 <= first and 1 <= count and first + count <= total):
        raise ValueError(f"{_OP}: local must lie within the {total} experts of gate, got (first, count) = {local}")


def check_routing(routing: object, total: int) -> None:
    """`RoutingOptions` that `route` takes for a router over `total` experts."""
    if not isinstance(routing, RoutingOptions):
        raise TypeError(f"{_OP}: routing must be RoutingOptions, got {type(routing).__name__}")
    checks.one_of(_OP, "score", routing.score, SCORES)
    checks.int_range(_OP, "n_group", routing.n_group, 1, total)
    if total % routing.n_group:
        raise ValueError(f"{_OP}: n_group must divide the {total} experts, got {routing.n_group}")
    checks.int_range(_OP, "topk_group", routing.topk_group, 1, routing.n_group)
    checks.int_range(_OP, "top_k", routing.top_k, 1, min(MAX_TOP_K, routing.topk_group * (total // routing.n_group)))
    if isinstance(routing.scale, bool) or not isinstance(routing.scale, int | float):
        raise TypeError(f"{_OP}: scale must be a float, got {type(routing.scale).__name__}")


def check_scales(name: str, scale: torch.Tensor, op: str = _OP) -> None:
    """No E8M0 byte 255, and no fp32 scale that is NaN, infinite, zero or negative; reads the device."""
    if scale.is_meta:
        return
    if scale.dtype == torch.uint8:
        if bool((scale == 255).any()):
            raise ValueError(f"{op}: {name} holds the E8M0 byte 255, which is NaN")
    elif not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(f"{op}: {name} holds a scale that is NaN, infinite, zero or negative")


def _weight(name: str, w: object, segments: int) -> Weight:
    """A stack that can run, its `segments` as `Experts` holds them."""
    if not isinstance(w, QTensor):
        checks.is_tensor(_OP, name, w)
        assert isinstance(w, torch.Tensor)
        if w.element_size() == 1:
            raise TypeError(f"{_OP}: {name} is {w.dtype} without scales: give a QTensor (make_qtensor) or a bfloat16 or float16 tensor")
        checks.dtype(_OP, name, w, _16BIT)
        checks.ndim(_OP, name, w, (3,))
        return w
    if FORMATS.get(w.format.name) is not w.format or w.block not in (w.format.weight_block, FP8_BLOCK.weight_block) or w.layout != "row_major":
        raise ValueError(
            f"{_OP}: {name} must be a weight with row_major scales: fp8_block in blocks {FP8_BLOCK.weight_block}, mxfp8 in blocks "
            f"{MXFP8.weight_block} or folded to {FP8_BLOCK.weight_block}; got {w}"
        )
    checks.qtensor(_OP, name, w)
    checks.ndim(_OP, name, w.data, (3,))
    if w.format is MXFP8 and w.shape[-1] % 32:
        raise ValueError(f"{_OP}: {name} has {w.shape[-1]} columns; mxfp8 needs a multiple of 32")
    checks.same_device(_OP, **{f"{name}.data": w.data, f"{name}.scale": w.scale})
    check_scales(f"{name}.scale", w.scale)
    height = w.block[0]
    if height == 1:
        return dataclasses.replace(w, segments=1)
    if w.segments == segments:
        return w
    if any(n > 1 and (w.shape[1] % n or (w.shape[1] // n) % height) for n in (w.segments, segments)):
        why = ": a scale of the fused gate|up matrix mixes gate and up rows; quantize them apart (segments=2)" if segments == 2 else ""
        raise ValueError(
            f"{_OP}: {name} must have segments={segments} where its {w.shape[1]} rows do not divide into whole blocks of {height} either way, "
            f"got segments={w.segments}{why}"
        )
    return dataclasses.replace(w, segments=segments)


def _stack(w13_name: str, w2_name: str, experts: ExpertWeights) -> ExpertWeights:
    """Both weights of a stack, each checked and of one kind."""
    w13, w2 = experts.w13, experts.w2
    if isinstance(w13, QTensor) != isinstance(w2, QTensor):
        raise TypeError(
            f"{_OP}: {w13_name} and {w2_name} must both be quantized or both be floating, got {type(w13).__name__} and {type(w2).__name__}"
        )
    w13, w2 = _weight(w13_name, w13, 2), _weight(w2_name, w2, 1)
    if isinstance(w13, QTensor) and isinstance(w2, QTensor):
        if w13.format is not w2.format or w13.block != w2.block:
            kinds = " and ".join(f"{q.format.name} in blocks {q.block}" for q in (w13, w2))
            raise ValueError(f"{_OP}: {w13_name} and {w2_name} must have one format and one block, got {kinds}")
    elif isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor) and w13.dtype != w2.dtype:
        raise TypeError(f"{_OP}: {w13_name} and {w2_name} must have one dtype, got {w13.dtype} and {w2.dtype}")
    return ExpertWeights(w13, w2, experts.b13, experts.b2)


def check_layer(
    gate: torch.Tensor,
    experts: ExpertWeights,
    routing: RoutingOptions,
    act: Any,
    gate_bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    local: tuple[int, int] | None,
    shared: ExpertWeights | None,
    shared_gate: torch.Tensor | None,
) -> tuple[ExpertWeights, ExpertWeights | None]:
    """Check the arguments of `MoELayer`; returns experts and shared expert with their `segments` normalised.

    Raises:
        TypeError, ValueError: the text names the argument, what came and what is accepted.
    """
    checks.is_tensor(_OP, "gate", gate)
    checks.ndim(_OP, "gate", gate, (2,))
    checks.dtype(_OP, "gate", gate, _FLOATS)
    total, hidden = gate.shape
    check_local(local, total)
    check_routing(routing, total)
    if act is not None and not isinstance(act, Activation):
        raise TypeError(f"{_OP}: act must be an Activation or None, got {type(act).__name__}")
    if not isinstance(experts, ExpertWeights):
        raise TypeError(f"{_OP}: experts must be ExpertWeights, got {type(experts).__name__}")
    count = total if local is None else local[1]
    experts = _stack("w13", "w2", experts)
    shape = tuple(experts.w13.shape)
    if shape[0] != count or shape[1] % 2 or shape[2] != hidden:
        raise ValueError(f"{_OP}: w13 must have shape ({count}, 2I, {hidden}) for {count} local experts and this gate, got {shape}")
    if tuple(experts.w2.shape) != (count, hidden, shape[1] // 2):
        raise ValueError(f"{_OP}: w2 must have shape {(count, hidden, shape[1] // 2)}, got {tuple(experts.w2.shape)}")
    _check_contiguous(w13=experts.w13, w2=experts.w2)
    if shared is not None:
        shared = _check_shared(shared, experts, hidden)
    elif shared_gate is not None:
        raise ValueError(f"{_OP}: shared_gate needs a shared expert")
    for name, t, wanted in (
        ("shared_gate", shared_gate, (1, hidden)),
        ("gate_bias", gate_bias, (total,)),
        ("correction_bias", correction_bias, (total,)),
        ("b13", experts.b13, (count, shape[1])),
        ("b2", experts.b2, (count, hidden)),
    ):
        if t is not None:
            checks.is_tensor(_OP, name, t)
            checks.dtype(_OP, name, t, _FLOATS)
            checks.shape(_OP, name, t, wanted)
    on = {"gate": gate, "w13": data(experts.w13), "w2": data(experts.w2), "b13": experts.b13, "b2": experts.b2}
    on |= {"gate_bias": gate_bias, "correction_bias": correction_bias, "shared_gate": shared_gate}
    if shared is not None:
        on |= {"shared w13": data(shared.w13), "shared w2": data(shared.w2)}
    checks.same_device(_OP, **on)
    return experts, shared


def _check_shared(shared: ExpertWeights, experts: ExpertWeights, hidden: int) -> ExpertWeights:
    shared = _stack("shared w13", "shared w2", shared)
    up, down = tuple(shared.w13.shape), tuple(shared.w2.shape)
    if up[0] != 1 or up[1] % 2 or up[2] != hidden or down != (1, hidden, up[1] // 2):
        raise ValueError(f"{_OP}: shared must be a stack of one expert, (1, 2I', {hidden}) and (1, {hidden}, I'), got {up} and {down}")
    _check_contiguous(**{"shared w13": shared.w13, "shared w2": shared.w2})
    if not isinstance(shared.w13, QTensor) and not isinstance(experts.w13, QTensor) and shared.w13.dtype != experts.w13.dtype:
        raise TypeError(f"{_OP}: shared expert and experts must have one dtype, got {shared.w13.dtype} and {experts.w13.dtype}")
    return shared


def _check_contiguous(**weights: Weight) -> None:
    for name, w in weights.items():
        checks.contiguous(_OP, name, data(w))
        if isinstance(w, QTensor):
            checks.contiguous(_OP, f"{name}.scale", w.scale)


def data(w: Weight) -> torch.Tensor:
    """The elements of a weight, quantized or not."""
    return w.data if isinstance(w, QTensor) else w
