"""Experts of a checkpoint, in any dialect and naming, as stacks in our order: w13 [E, 2I, H] (gate rows, then up rows) and w2 [E, H, I].

Namings, below the prefix of the experts:

| naming             | gate, up, down                                                                    | used by                             |
|--------------------|-----------------------------------------------------------------------------------|-------------------------------------|
| per expert         | `{e}.gate_proj.weight`, `{e}.up_proj.weight`, `{e}.down_proj.weight`, `.bias`      | Qwen, DeepSeek, GLM, Kimi           |
| per expert, w1w3w2 | `{e}.w1.weight`, `{e}.w3.weight`, `{e}.w2.weight`                                 | Mixtral, MiniMax, DeepSeek's own    |
| stacked            | `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I], `gate_up_proj_bias`, `down_proj_bias` | Transformers, this library     |
| stacked transposed | `gate_up_proj` [E, H, 2I] (gpt-oss: columns g0, u0, g1, u1, ..), `down_proj` [E, I, H]  | gpt-oss, Qwen3-VL, Llama 4     |

Bits of quantized data and scales are copied, never converted; one expert at a time is read, so memory stays at the result plus one tensor.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.core.formats import E4M3, FP8_BLOCK, Format, QTensor, get_format, make_qtensor
from moe_ops.layer.dialects import SCALE_SUFFIXES, Dialect, detect, read_weight, scale_keys
from moe_ops.quant.quantize import quantize_weight

#: Names of (gate, up, down) below one expert.
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

Weight = QTensor | torch.Tensor


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Stacked experts.

    Attributes:
        w13: [E, 2I, H], gate rows then up rows; a QTensor or a floating tensor.
        w2: [E, H, I].
        b13: [E, 2I] or None, in the order of w13's rows.
        b2: [E, H] or None.
    """

    w13: Weight
    w2: Weight
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None


def canonical_w13(w: torch.Tensor, *, transposed: bool, interleaved: bool) -> torch.Tensor:
    """gate|up weights [.., 2I, H] in our order from a stored layout; a copy unless nothing has to change."""
    w = w.transpose(-1, -2) if transposed else w
    return deinterleave(w) if interleaved else w.contiguous()


def deinterleave(w: torch.Tensor) -> torch.Tensor:
    """Rows g0, u0, g1, u1, .. of [.., 2I, H] as gate rows, then up rows."""
    return torch.cat((w[..., 0::2, :], w[..., 1::2, :]), dim=-2)


def canonical_b13(b: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """gate|up bias [.., 2I] in the order of `canonical_w13`'s rows."""
    return torch.cat((b[..., 0::2], b[..., 1::2]), dim=-1) if interleaved else b.contiguous()


def in_format(weights: ExpertWeights, fmt: str | Format | None, what: str) -> ExpertWeights:
    """Weights quantized to `fmt`, or as they are for None; `what` names them in errors.

    Raises:
        ValueError: an unknown format, or weights that are quantized in the other one.
    """
    if fmt is None:
        return weights
    f = get_format(fmt, "MoELayer")
    out: list[Weight] = []
    for w, segments in ((weights.w13, 2 if f is FP8_BLOCK else 1), (weights.w2, 1)):
        if isinstance(w, QTensor):
            if w.format is not f:
                raise ValueError(f"MoELayer: {what} is {w.format.name} and format={f.name!r} was asked for; dequantize it first, which is lossy")
            out.append(w)
        else:
            out.append(quantize_weight(w, f, segments=segments))
    return ExpertWeights(out[0], out[1], weights.b13, weights.b2)


def load_experts(
    sd: Mapping[str, torch.Tensor],
    prefix: str,
    quantization_config: Mapping[str, Any] | None = None,
    *,
    num_experts: int | None = None,
    local: tuple[int, int] | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    halves: bool = False,
    device: torch.device | str | None = None,
) -> ExpertWeights:
    """Read and stack the experts below `prefix`.

    Args:
        sd: name -> tensor; read lazily, entry by entry.
        prefix: what comes before `{e}.gate_proj.weight` or `gate_up_proj`, with its dot: "model.layers.3.mlp.experts.".
        quantization_config: of the checkpoint's config.json (or hf_quant_config.json); None for bf16.
        num_experts: how many there must be; None takes what is there.
        local: (first, count) of the experts to read; None reads all.
        transposed: stacks are [E, H, 2I] and [E, I, H].
        interleaved: gate and up rows of a stack alternate (gpt-oss).
        halves: see `read_weight`.
        device: where the stacks go; None leaves them where the tensors are.

    Raises:
        KeyError: no experts below the prefix, or one tensor of an expert missing; the text names it.
        ValueError: an orphan, missing or wrong scale, a tensor that no naming knows, experts that differ in shape or dtype, or a
            quantized stack in a layout whose scale blocks run along the wrong dimension.
    """
    dialect = detect(quantization_config)
    under = [k for k in sd if k.startswith(prefix)]
    if f"{prefix}gate_up_proj" in sd:
        out = _load_stacked(sd, prefix, dialect, transposed, interleaved, halves, local, device)
        allowed = {f"{prefix}{n}" for n in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")}
        allowed |= {k for n in ("gate_up_proj", "down_proj") for k in scale_keys(f"{prefix}{n}")}
        unknown = [k for k in under if k not in allowed]
        if unknown:
            raise ValueError(f"checkpoint: {unknown[0]!r} beside stacked experts is not known to any dialect")
        total = sd[f"{prefix}gate_up_proj"].shape[0]
    else:
        found, names = _find(under, prefix)
        total = max(found) + 1 if found else 0
        if not names:
            looked = f"{prefix}0.gate_proj.weight, {prefix}0.w1.weight, {prefix}gate_up_proj"
            raise KeyError(f"checkpoint: no experts below {prefix!r}: looked for {looked}; found {under[:3] or 'nothing there'}")
        total = max(total, num_experts or 0)
        _check_leaves(sd, under, prefix, names)
        first, count = _window(local, total)
        stems = [f"{prefix}{e}." for e in range(first, first + count)]
        out = _stack([functools.partial(_read_expert, sd, s, names, dialect) for s in stems], stems, device)
    if num_experts is not None and total != num_experts:
        raise ValueError(f"checkpoint: {prefix!r} holds {total} experts, but the config says {num_experts}")
    return out


def load_mlp(
    sd: Mapping[str, torch.Tensor], prefix: str, quantization_config: Mapping[str, Any] | None = None, *, device: torch.device | str | None = None
) -> ExpertWeights:
    """One gated MLP (a shared expert) below `prefix` ("model.layers.3.mlp.shared_experts."), as a stack of one expert; see `load_experts`.

    Raises:
        KeyError: no gated MLP there, or one tensor of it missing.
        ValueError: as `load_experts`.
    """
    names = next((n for n in PROJECTIONS if f"{prefix}{n[0]}.weight" in sd), None)
    if names is None:
        raise KeyError(f"checkpoint: no gated MLP below {prefix!r}: looked for {prefix}gate_proj.weight and {prefix}w1.weight")
    return _stack([functools.partial(_read_expert, sd, prefix, names, detect(quantization_config))], [prefix], device)


def _window(local: tuple[int, int] | None, total: int) -> tuple[int, int]:
    if local is None:
        return 0, total
    first, count = local
    if not (0 <= first and 1 <= count and first + count <= total):
        raise ValueError(f"checkpoint: local must lie within the {total} experts, got (first, count) = {local}")
    return first, count


def _find(under: list[str], prefix: str) -> tuple[set[int], tuple[str, str, str] | None]:
    """Expert numbers below the prefix and the naming of their projections."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.([a-z0-9_]+)\.")
    numbers, leaves = set(), set()
    for key in under:
        m = pattern.match(key)
        if m:
            numbers.add(int(m.group(1)))
            leaves.add(m.group(2))
    return numbers, next((n for n in PROJECTIONS if leaves & set(n)), None)


def _check_leaves(sd: Mapping[str, torch.Tensor], under: list[str], prefix: str, names: tuple[str, str, str]) -> None:
    pattern = re.compile(re.escape(prefix) + r"\d+\.(\w+)\.(\w+)")
    for key in under:
        m = pattern.fullmatch(key)
        if m is None or m.group(1) not in names or m.group(2) not in ("weight", "bias", *SCALE_SUFFIXES):
            raise ValueError(f"checkpoint: {key!r} among the experts is not known to any dialect")
        if m.group(2) in SCALE_SUFFIXES and f"{key.rpartition('.')[0]}.weight" not in sd:
            raise ValueError(f"checkpoint: {key!r} is an orphan scale: there is no {key.rpartition('.')[0]}.weight")


Expert = tuple[Weight, Weight, Weight, tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None]


def _read_expert(sd: Mapping[str, torch.Tensor], stem: str, names: tuple[str, str, str], dialect: Dialect) -> Expert:
    gate, up, down = (read_weight(sd, f"{stem}{n}.weight", dialect) for n in names)
    biases = [f"{stem}{n}.bias" for n in names]
    present = [b for b in biases if b in sd]
    if present and len(present) < 3:
        missing = next(b for b in biases if b not in sd)
        raise KeyError(f"checkpoint: tensor {missing!r} is missing, though {present[0]!r} is there")
    return gate, up, down, (sd[biases[0]], sd[biases[1]], sd[biases[2]]) if present else None


def _raw(w: Weight) -> torch.Tensor:
    """Storage to copy bit for bit: e4m3 as bytes."""
    data = w.data if isinstance(w, QTensor) else w
    return data.view(torch.uint8) if data.dtype == E4M3 else data


def _signature(w: Weight) -> tuple[Any, ...]:
    if isinstance(w, QTensor):
        return (w.format.name, tuple(w.shape))
    return (str(w.dtype), tuple(w.shape))


class _Stack:
    """[E, rows, ..] filled expert by expert from parts that lie one after the other in each expert; sized by the first."""

    def __init__(self, count: int, device: torch.device | str | None, segments: int = 1) -> None:
        self.count, self.device, self.segments = count, device, segments
        self.first: Weight | None = None
        self.data = self.scale = torch.empty(0)
        self.rules: set[str] = set()

    def _new(self, like: list[torch.Tensor]) -> torch.Tensor:
        rows = sum(t.shape[0] for t in like)
        return torch.empty((self.count, rows, *like[0].shape[1:]), dtype=like[0].dtype, device=self.device or like[0].device)

    def put(self, e: int, *parts: Weight) -> None:
        data, scales = [_raw(p) for p in parts], [p.scale for p in parts if isinstance(p, QTensor)]
        if self.first is None:
            self.first = parts[0]
            self.data = self._new(data)
            if scales:
                self.scale = self._new(scales)
        for into, tensors in ((self.data, data), (self.scale, scales)):
            row = 0
            for t in tensors:
                into[e, row : row + t.shape[0]].copy_(t)
                row += t.shape[0]
        self.rules |= {p.rule for p in parts if isinstance(p, QTensor)}

    def done(self) -> Weight:
        if not isinstance(self.first, QTensor):
            return self.data
        fmt = self.first.format
        rule = self.rules.pop() if len(self.rules) == 1 else "unknown"
        return make_qtensor(self.data, self.scale, fmt, segments=self.segments if fmt is FP8_BLOCK else 1, rule=rule)


def _stack(readers: list[Callable[[], Expert]], stems: list[str], device: torch.device | str | None) -> ExpertWeights:
    w13, w2 = _Stack(len(readers), device, segments=2), _Stack(len(readers), device)
    b13, b2 = _Stack(len(readers), device), _Stack(len(readers), device)
    first: tuple[Any, ...] = ()
    for e, (read, stem) in enumerate(zip(readers, stems, strict=True)):
        gate, up, down, biases = read()
        if _signature(gate) != _signature(up):
            raise ValueError(f"checkpoint: gate and up of {stem!r} differ: {_signature(gate)} and {_signature(up)}")
        wanted = tuple(gate.shape)[::-1]
        if tuple(down.shape) != wanted:
            raise ValueError(f"checkpoint: down of {stem!r} must be {wanted} for a gate of {tuple(gate.shape)}, got {tuple(down.shape)}")
        signature = (_signature(gate), _signature(down), "no biases" if biases is None else "biases")
        first = first or signature
        if signature != first:
            raise ValueError(f"checkpoint: expert {stem!r} is {signature}, but {stems[0]!r} is {first}; all experts of a layer must be alike")
        w13.put(e, gate, up)
        w2.put(e, down)
        if biases is not None:
            b13.put(e, biases[0], biases[1])
            b2.put(e, biases[2])
    if b13.first is None:
        return ExpertWeights(w13.done(), w2.done())
    return ExpertWeights(w13.done(), w2.done(), b13.data, b2.data)


def _load_stacked(
    sd: Mapping[str, torch.Tensor],
    prefix: str,
    dialect: Dialect,
    transposed: bool,
    interleaved: bool,
    halves: bool,
    local: tuple[int, int] | None,
    device: torch.device | str | None,
) -> ExpertWeights:
    names = (f"{prefix}gate_up_proj", f"{prefix}down_proj")
    quantized = sd[names[0]].dtype == E4M3
    if quantized and (transposed or (interleaved and dialect.format is FP8_BLOCK)):
        kind = "a transposed" if transposed else "an interleaved"
        raise ValueError(f"checkpoint: {names[0]!r} is quantized in {kind} layout, whose scale blocks mix gate and up; store them per expert")
    segments = 2 if dialect.format is FP8_BLOCK else 1
    w13, w2 = read_weight(sd, names[0], dialect, segments=segments, halves=halves), read_weight(sd, names[1], dialect)
    first, count = _window(local, sd[names[0]].shape[0])
    pick = slice(first, first + count)

    def place(t: torch.Tensor) -> torch.Tensor:
        return t[pick].to(device) if device is not None else t[pick]

    if isinstance(w13, QTensor):
        data, scale = place(w13.data.view(torch.uint8)), place(w13.scale)
        if interleaved:
            data, scale = deinterleave(data), deinterleave(scale)
        w13 = make_qtensor(data, scale, w13.format, segments=segments, rule=w13.rule)
    else:
        w13 = canonical_w13(place(w13), transposed=transposed, interleaved=interleaved)
    if isinstance(w2, QTensor):
        w2 = make_qtensor(place(w2.data.view(torch.uint8)), place(w2.scale), w2.format, rule=w2.rule)
    else:
        w2 = place(w2).transpose(-1, -2).contiguous() if transposed else place(w2).contiguous()
    e, rows, h = w13.shape
    if rows % 2 or tuple(w2.shape) != (e, h, rows // 2):
        raise ValueError(
            f"checkpoint: {names[0]!r} and {names[1]!r} do not belong together as{' transposed' if transposed else ''} stacks: "
            f"{tuple(sd[names[0]].shape)} and {tuple(sd[names[1]].shape)}"
        )
    b13, b2 = sd.get(f"{prefix}gate_up_proj_bias"), sd.get(f"{prefix}down_proj_bias")
    if (b13 is None) != (b2 is None):
        raise KeyError(f"checkpoint: one of {prefix}gate_up_proj_bias and {prefix}down_proj_bias is missing")
    if b13 is not None and b2 is not None:
        b13, b2 = canonical_b13(place(b13), interleaved=interleaved), place(b2)
        if tuple(b13.shape) != (e, rows) or tuple(b2.shape) != (e, h):
            raise ValueError(f"checkpoint: biases below {prefix!r} must be {(e, rows)} and {(e, h)}, got {tuple(b13.shape)} and {tuple(b2.shape)}")
    return ExpertWeights(w13, w2, b13, b2)
