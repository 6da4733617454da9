"""Modules that hold quantized experts and a router under the names of a state dict, and never convert their bits."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from moe_ops.core.formats import E4M3, MIN_SCALE, MXFP8, Format, QTensor, as_bytes, as_e4m3
from moe_ops.core.numerics import decode_e8m0
from moe_ops.layer.arguments import check_scales
from moe_ops.layer.folding import capturing, fold_pair, state_of
from moe_ops.layer.load import ExpertWeights, Weight


def _frozen(t: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(t.detach(), requires_grad=False)


class Exact(nn.Module):
    """Base of modules with tensors whose bits must stay: `.to(dtype)`, `.half()` and `.float()` move them and never convert them."""

    #: What errors call the module that holds the tensors.
    owner = "MoELayer"

    def exact(self) -> list[str]:
        """Names of the tensors of this module (not of its children) that keep their bits."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Exact":
        keep = {id(getattr(self, name)) for name in self.exact()}

        def apply(t: torch.Tensor) -> torch.Tensor:
            if id(t) not in keep:
                return fn(t)
            as_int = torch.uint8 if t.element_size() == 1 else torch.int32
            moved = fn(t.view(as_int))
            if moved.dtype != as_int:  # type(dtype) converts integers too
                moved = t.view(as_int).to(moved.device)
            return moved.view(t.dtype)

        return super()._apply(apply, recurse)

    def requires_grad_(self, requires_grad: bool = True) -> "Exact":
        """As `Module.requires_grad_`; quantized experts have no gradients and refuse True."""
        if requires_grad and any(isinstance(m, Experts) and m.format is not None for m in self.modules()):
            raise ValueError("MoELayer: requires_grad_(True) on quantized experts, which are for inference only and have no gradients")
        super().requires_grad_(requires_grad)
        return self

    def loadable(self, state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        """The entries below `prefix` for `exact` tensors, as they will be copied.

        Raises:
            ValueError: one that this module cannot hold, named.
        """
        return {prefix + n: _bits(self.owner, prefix + n, state[prefix + n], getattr(self, n)) for n in self.exact() if prefix + n in state}

    def _load_from_state_dict(self, state_dict: Mapping[str, torch.Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        own = self.loadable(state_dict, prefix)
        for name, child in self.named_modules():  # all of them before the first copy: a layer is loaded whole or not at all
            if child is not self and isinstance(child, Exact):
                child.loadable(state_dict, f"{prefix}{name}.")
        super()._load_from_state_dict(dict(state_dict) | own, prefix, *args, **kwargs)
        self.loaded()

    def loaded(self) -> None:
        """Called after a load: remakes copies of the weights, which compiled code and captured graphs read without asking."""


def _bits(owner: str, name: str, t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`t` in the dtype of `like` without touching a bit: Module.load_state_dict would convert, and E8M0 byte 127 would become 1."""
    t = t.detach()
    if like.dtype == E4M3:
        t = as_e4m3(t)
    elif like.dtype == torch.uint8:
        t = as_bytes(t)
    elif t.dtype == torch.float8_e8m0fnu:
        t = decode_e8m0(as_bytes(t)).clamp_min(MIN_SCALE)
    elif t.dtype in (torch.bfloat16, torch.float16):
        t = t.float()
    if t.dtype != like.dtype:
        raise ValueError(f"{owner}: {name!r} must be {like.dtype} as in this layer, got {t.dtype}; build the layer with from_state_dict instead")
    if name.endswith("_scale_inv"):
        check_scales(repr(name), t, owner)
    return t


class Experts(Exact):
    """Stacked experts under the names `gate_up_proj`, `down_proj`, with `_scale_inv` where quantized and `_bias` where biased."""

    gate_up_proj: nn.Parameter
    gate_up_proj_scale_inv: nn.Parameter | None
    gate_up_proj_bias: nn.Parameter | None
    down_proj: nn.Parameter
    down_proj_scale_inv: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        self.format: Format | None = None
        self.rules = ("unknown", "unknown")
        self.block = (1, 1)
        self.fold = True
        self._folded: tuple[QTensor, QTensor] | None = None
        self._folded_from: tuple[object, ...] = ()
        w13, w2 = weights.w13, weights.w2
        if isinstance(w13, QTensor) and isinstance(w2, QTensor):
            self.format, self.block, self.rules = w13.format, w13.block, (w13.rule, w2.rule)
        for name, w in (("gate_up_proj", w13), ("down_proj", w2)):
            self.register_parameter(name, _frozen(w.data if isinstance(w, QTensor) else w))
            self.register_parameter(f"{name}_scale_inv", _frozen(w.scale) if isinstance(w, QTensor) else None)
        self.register_parameter("gate_up_proj_bias", None if weights.b13 is None else _frozen(weights.b13))
        self.register_parameter("down_proj_bias", None if weights.b2 is None else _frozen(weights.b2))

    def exact(self) -> list[str]:
        """Data and scales, where quantized."""
        if self.format is None:
            return []
        return ["gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"]

    def loadable(self, state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        """See `Exact.loadable`; also refuses quantized weights for a layer in 16 bit, where the base class would convert the elements."""
        for name in ("gate_up_proj", "down_proj") if self.format is None else ():
            data, scale = prefix + name, f"{prefix}{name}_scale_inv"
            if scale in state or (data in state and state[data].element_size() == 1):
                raise ValueError(
                    f"MoELayer: {(scale if scale in state else data)!r} is quantized, but this layer holds {getattr(self, name).dtype}; "
                    f"build the layer with from_state_dict instead"
                )
        return super().loadable(state, prefix)

    def weights(self) -> tuple[Weight, Weight]:
        """(w13, w2) over the module's own storage."""
        f = self.format
        if f is None:
            return self.gate_up_proj, self.down_proj
        assert self.gate_up_proj_scale_inv is not None and self.down_proj_scale_inv is not None
        segments = 2 if self.block[0] > 1 else 1
        w13 = QTensor(self.gate_up_proj, self.gate_up_proj_scale_inv, f, self.block, "row_major", self.rules[0], segments)
        return w13, QTensor(self.down_proj, self.down_proj_scale_inv, f, self.block, "row_major", self.rules[1])

    def ready(self) -> tuple[Weight, Weight]:
        """(w13, w2) as the kernels read them: the folded copies where `prepare_weights` made some, else the stored weights."""
        return self.weights() if self._folded is None else self._folded

    def prepare_weights(self) -> None:
        """Fold mxfp8 weights on Hopper, once and after every change of the weights; reads the device only then.

        Under capture nothing is read: copies that are out of date are dropped, and the stored weights run.
        """
        if self.format is not MXFP8:
            return
        state = (self.fold, *state_of(self.gate_up_proj, self.gate_up_proj_scale_inv, self.down_proj, self.down_proj_scale_inv))
        if state == self._folded_from:
            return
        if capturing():
            self._folded = None
            return
        pair = fold_pair(*self.weights()) if self.fold else None
        old = self._folded
        if pair is not None and old is not None and pair[0].device == old[0].device and pair[0].shape == old[0].shape:
            for new, kept in zip(pair, old, strict=True):  # captured graphs read there
                kept.data.view(torch.uint8).copy_(new.data.view(torch.uint8))
                kept.scale.copy_(new.scale)
            pair = old
        self._folded, self._folded_from = pair, state

    def loaded(self) -> None:
        """See `Exact.loaded`; what was never prepared stays so."""
        if self._folded_from:
            self._folded_from = ()
            self.prepare_weights()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Experts":
        self._folded, self._folded_from = None, ()
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_folded": None, "_folded_from": ()}


class Gate(Exact):
    """Router: `weight` [E, H], and where the model has them `bias` [E] (of the logits) and `e_score_correction_bias` [E] (fp32, of the ranking)."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    e_score_correction_bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, correction: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = _frozen(weight)
        self.register_parameter("bias", None if bias is None else _frozen(bias))
        self.register_buffer("e_score_correction_bias", None if correction is None else correction.detach().float().contiguous())

    def exact(self) -> list[str]:
        """The correction bias: a rank decided in bf16 would be another one."""
        return [] if self.e_score_correction_bias is None else ["e_score_correction_bias"]
