"""The gated activation of an expert: one descriptor for every variant, and its definition in plain torch."""

import math
from dataclasses import dataclass

import torch

__all__ = ["Activation", "activation_ref"]

KINDS = ("silu", "gelu_tanh")
_GELU_SCALE = 2.0 * math.sqrt(2.0 / math.pi)


@dataclass(frozen=True)
class Activation:
    """f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset), computed in fp32.

    Attributes:
        kind: "silu": f(g) = g * sigmoid(alpha * g); "gelu_tanh": f(g) = GELU with the tanh approximation.
        alpha: slope inside the sigmoid of "silu", positive.
        limit: bound on gate (above) and up (both sides), or None.
        up_offset: added to up after the clamp.
        interleaved: columns are g0, u0, g1, u1, .. instead of all gates, then all ups.

    Raises:
        ValueError: an unknown kind, a limit or alpha that is not positive, or an alpha or up_offset that is not finite.
    """

    kind: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Activation: kind must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}")
        for name in ("alpha", "up_offset", *(() if self.limit is None else ("limit",))):
            if not isinstance(getattr(self, name), (int, float)):
                raise TypeError(f"Activation: {name} must be a number, got {getattr(self, name)!r}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"Activation: limit must be positive or None, got {self.limit!r}")
        if not (0 < self.alpha < math.inf and -math.inf < self.up_offset < math.inf):  # torch 2.11 cannot trace math.isfinite
            raise ValueError(f"Activation: alpha must be positive and up_offset finite, got alpha={self.alpha!r}, up_offset={self.up_offset!r}")
        if self.kind == "gelu_tanh" and self.alpha != 1.0:
            raise ValueError(f"Activation: alpha belongs to kind 'silu', got alpha={self.alpha!r} with kind 'gelu_tanh'")

    @classmethod
    def silu(cls, *, interleaved: bool = False) -> "Activation":
        """silu(gate) * up: DeepSeek, Qwen, Mixtral, GLM, Kimi."""
        return cls(interleaved=interleaved)

    @classmethod
    def gelu_tanh(cls, *, interleaved: bool = False) -> "Activation":
        """gelu_tanh(gate) * up."""
        return cls(kind="gelu_tanh", interleaved=interleaved)

    @classmethod
    def gpt_oss(cls, *, interleaved: bool = False) -> "Activation":
        """gpt-oss: gate * sigmoid(1.702 * gate) * (up + 1), gate at most 7, up within [-7, 7]; its checkpoints interleave gate and up."""
        return cls(alpha=1.702, limit=7.0, up_offset=1.0, interleaved=interleaved)

    @classmethod
    def clamped(cls, limit: float, *, interleaved: bool = False) -> "Activation":
        """silu with gate at most `limit` and up within [-limit, limit] (DeepSeek-V4)."""
        return cls(limit=limit, interleaved=interleaved)

    @property
    def limit_or_inf(self) -> float:
        """`limit` as the kernels take it."""
        return math.inf if self.limit is None else self.limit


def lowest_gate(kind: str, alpha: float) -> float:
    """Where gates are clamped below: f is within 2e-36 of zero there, and its exponential is still finite in fp32.

    So a gate of minus infinity gives (almost) the limit, zero, instead of NaN.
    """
    return -87.0 / alpha if kind == "silu" else -10.0


def activation_ref(x: torch.Tensor, act: Activation) -> torch.Tensor:
    """The definition: x (.., 2I) gate and up columns -> (.., I) fp32.

    Both kinds are g / (1 + exp(-t)): 0.5 * (1 + tanh(z)) is sigmoid(2z) exactly, and this form does not cancel for negative gates.
    """
    x = x.float()
    half = x.shape[-1] // 2
    gate, up = (x[..., 0::2], x[..., 1::2]) if act.interleaved else (x[..., :half], x[..., half:])
    gate = gate.clamp(lowest_gate(act.kind, act.alpha), act.limit)
    if act.limit is not None:
        up = up.clamp(-act.limit, act.limit)
    t = act.alpha * gate if act.kind == "silu" else _GELU_SCALE * (gate + 0.044715 * (gate * gate * gate))
    return gate / (1.0 + torch.exp(-t)) * (up + act.up_offset)
