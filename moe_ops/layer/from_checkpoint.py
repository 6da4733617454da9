"""The constructor arguments of a `MoELayer` from a state dict: a model's checkpoint in any dialect, or a layer's own."""

from collections.abc import Mapping
from typing import Any

import torch

from moe_ops.core.formats import E4M3, Format, get_format
from moe_ops.layer.dialects import quantization_config
from moe_ops.layer.load import ExpertWeights, in_format, load_experts, load_mlp
from moe_ops.layer.models import ModelMoE

_STACK_NAMES = tuple(f"{n}{s}" for n in ("gate_up_proj", "down_proj") for s in ("", "_scale_inv", "_bias"))


def read_layer(
    sd: Mapping[str, torch.Tensor],
    prefix: str,
    model: ModelMoE,
    fmt: str | Format | None,
    local: tuple[int, int] | None,
    device: torch.device | str | None,
) -> dict[str, Any]:
    """Arguments of `MoELayer(..)` read from below `prefix`; see `MoELayer.from_state_dict` for what they mean and what it raises."""
    family = model.family

    def one(*names: str) -> torch.Tensor | None:
        for name in names:
            if prefix + name in sd:
                t = sd[prefix + name]
                return t if device is None else t.to(device)
        return None

    gate = one("gate.weight", "router.weight")
    if gate is None:
        raise KeyError(f"checkpoint: the router's weight is missing: looked for {prefix}gate.weight and {prefix}router.weight")
    if prefix + "gate.tid2eid" in sd:
        raise ValueError(f"checkpoint: {prefix}gate.tid2eid: layers that choose experts by token id are not supported")
    correction = one("gate.e_score_correction_bias", "e_score_correction_bias", *(["gate.bias"] if family.correction else []))
    if family.correction and correction is None:
        raise KeyError(f"checkpoint: tensor '{prefix}gate.e_score_correction_bias' is missing")
    gate_bias = one("gate.bias", "router.bias") if family.bias else None
    if family.bias and gate_bias is None:
        raise KeyError(f"checkpoint: tensor '{prefix}router.bias' is missing")

    own = f"{prefix}gate_up_proj" in sd
    if own:
        experts = _own_stack(sd, prefix, model, fmt, device)
    else:
        experts = load_experts(
            sd,
            f"{prefix}experts.",
            model.quantization,
            num_experts=model.num_experts,
            local=local,
            transposed=family.transposed,
            interleaved=family.interleaved,
            device=device,
        )
    shared = None
    if own and f"{prefix}shared_expert.gate_up_proj" in sd:
        shared = _own_stack(sd, f"{prefix}shared_expert.", model, fmt, device)
    elif not own and family.shared is not None:
        shared = load_mlp(sd, f"{prefix}{family.shared}.", model.quantization, device=device)
    return {
        "gate": gate,
        "experts": in_format(experts, fmt, "experts"),
        "routing": model.routing,
        "act": model.act,
        "gate_bias": gate_bias,
        "correction_bias": correction,
        "local": local,
        "shared": None if shared is None else in_format(shared, fmt, "shared expert"),
        "shared_gate": one("shared_expert_gate.weight"),
    }


def _own_stack(sd: Mapping[str, torch.Tensor], prefix: str, model: ModelMoE, fmt: str | Format | None, device: Any) -> ExpertWeights:
    """Stacks that `MoELayer.state_dict()` wrote: our order, gate and up scaled apart, whatever the model's own files look like."""
    stacks = {name: sd[prefix + name] for name in _STACK_NAMES if prefix + name in sd}
    config = model.quantization
    if config is None and fmt is not None and stacks["gate_up_proj"].dtype == E4M3:
        config = quantization_config(get_format(fmt, "MoELayer").name)
    return load_experts(stacks, "", config, halves=True, device=device)
