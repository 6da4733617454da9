"""How the model families route and activate: what `MoELayer.from_state_dict` reads from a model's config.

One row per `model_type`; the values that vary inside a family come from config.json under the keys that Transformers uses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moe_ops.quant.activation import Activation


@dataclass(frozen=True)
class RoutingOptions:
    """The arguments of `moe_ops.route` that belong to a layer.

    Attributes:
        top_k: experts per token.
        score: "softmax", "topk_softmax", "sigmoid" or "sqrt_softplus".
        n_group: expert groups.
        topk_group: groups that may be chosen from.
        renormalize: divide the chosen weights by their sum.
        scale: factor of the weights (`routed_scaling_factor`).
    """

    top_k: int
    score: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    renormalize: bool = False
    scale: float = 1.0


def routing_options(op: str, top_k: int, given: Mapping[str, Any]) -> RoutingOptions:
    """`RoutingOptions` of what a caller of `op` gave by name.

    Raises:
        TypeError: a name that is no field, under the name of `op`.
    """
    names = [f.name for f in fields(RoutingOptions)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise TypeError(f"{op}: unknown argument {unknown[0]!r}; the routing options are {', '.join(names)}")
    return RoutingOptions(top_k, **given)


@dataclass(frozen=True)
class Family:
    """What all models of one `model_type` share.

    Attributes:
        score: as in `RoutingOptions`.
        renormalize: whether weights are renormalized where the config does not say (`norm_topk_prob`).
        fixed: `norm_topk_prob` is not read: the family always does what `renormalize` says.
        correction: the router has an `e_score_correction_bias`.
        bias: the router is a linear layer with bias.
        shared: name of the shared expert below the layer, or None.
        act: the activation, where it is not `hidden_act` (with `swiglu_limit`) of the config.
        transposed: expert stacks on disk are [E, H, 2I].
        interleaved: gate and up alternate in stacks on disk.
    """

    score: str = "softmax"
    renormalize: bool = False
    fixed: bool = False
    correction: bool = False
    bias: bool = False
    shared: str | None = None
    act: Activation | None = None
    transposed: bool = False
    interleaved: bool = False


_V3 = Family("sigmoid", renormalize=True, correction=True, shared="shared_experts")
FAMILIES: dict[str, Family] = {
    "mixtral": Family(renormalize=True, fixed=True),
    "qwen3_moe": Family(),
    "qwen2_moe": Family(shared="shared_expert"),
    "qwen3_next": Family(renormalize=True, shared="shared_expert"),
    "qwen3_5_moe_text": Family(renormalize=True, fixed=True, shared="shared_expert"),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe": _V3,
    "minimax_m2": Family("sigmoid", renormalize=True, fixed=True, correction=True),
    "deepseek_v4": Family("sqrt_softplus", renormalize=True, fixed=True, correction=True, shared="shared_experts"),
    "gpt_oss": Family("topk_softmax", bias=True, act=Activation.gpt_oss(), transposed=True, interleaved=True),
}

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class ModelMoE:
    """A model's MoE layer as its config describes it.

    Attributes:
        family: the row of its `model_type`.
        routing: routing options.
        act: activation of the experts and of the shared expert.
        num_experts: experts of a layer, over all ranks.
        quantization: its `quantization_config`, or None.
    """

    family: Family
    routing: RoutingOptions
    act: Activation
    num_experts: int
    quantization: Mapping[str, Any] | None = field(default=None)


def _get(config: Any, *names: str, default: Any = None) -> Any:
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return default


def model_moe(config: Any, **overrides: Any) -> ModelMoE:
    """Read a model config (an object of Transformers, or the content of config.json).

    Args:
        config: the config; of a multimodal model, its text config.
        overrides: fields of `RoutingOptions` that win over the config.

    Raises:
        TypeError: an override that is no field.
        ValueError: a `model_type` without a row in `FAMILIES`, an activation that has no `Activation`, or a missing number of experts.
    """
    kind = _get(config, "model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"MoELayer.from_state_dict: model_type {kind!r} is not known; known are {', '.join(sorted(FAMILIES))}. "
            f"Use MoELayer.from_weights or from_quantized and give the routing options"
        )
    family = FAMILIES[kind]
    experts = _get(config, "n_routed_experts", "num_local_experts", "num_experts")
    top_k = overrides.pop("top_k", None)
    if top_k is None:
        top_k = _get(config, "num_experts_per_tok")
    if experts is None or top_k is None:
        raise ValueError("MoELayer.from_state_dict: config must have num_experts (or n_routed_experts) and num_experts_per_tok")
    options: dict[str, Any] = {"score": family.score, "renormalize": family.renormalize}
    if not family.fixed:
        options["renormalize"] = bool(_get(config, "norm_topk_prob", default=family.renormalize))
    if family.correction:
        options |= {"n_group": _get(config, "n_group", default=1), "topk_group": _get(config, "topk_group", default=1)}
        options["scale"] = float(_get(config, "routed_scaling_factor", default=1.0))
    quantization = _get(config, "quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    routing = routing_options("MoELayer.from_state_dict", top_k, options | overrides)
    return ModelMoE(family, routing, family.act or _activation(config), experts, quantization)


def _activation(config: Any) -> Activation:
    name = _get(config, "hidden_act", "hidden_activation", default="silu")
    if name not in _ACTIVATIONS:
        raise ValueError(f"MoELayer.from_state_dict: hidden_act {name!r} is not supported; supported are {', '.join(sorted(_ACTIVATIONS))}")
    limit = _get(config, "swiglu_limit")
    return Activation(kind=_ACTIVATIONS[name], limit=None if limit is None else float(limit))
