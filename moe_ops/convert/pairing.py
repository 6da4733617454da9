"""The tensors of a source, sorted by what they are: weights with their scales, stacks of experts with their biases, and the rest.

Looks at names, dtypes and shapes alone. Whatever does not fit together is an error that names file and tensor.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_ops.convert.source import ConvertError
from moe_ops.convert.types import DTYPES, FLOATS, Source
from moe_ops.layer.dialects import SCALE_SUFFIXES, Dialect, detect, scale_key

#: A stack of experts, or its biases.
STACK = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<leaf>gate_up_proj|down_proj)(?P<bias>_bias)?")
#: One tensor of one expert.
EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<index>\d+)\.(?P<leaf>\w+)")
#: A scale, by its name.
_SCALE = re.compile(r"(?P<of>.*)[._]scale(_inv)?")
#: Scales that belong to the cache or to activations, not to a weight; they are kept.
_OTHER_SCALES = re.compile(r".*\.([kvq]_scale|input_scale|output_scale)")


@dataclass
class Stack:
    """The stacked experts of one layer: sources of `gate_up_proj`, `down_proj`, their scales and biases."""

    experts: str
    weights: dict[str, Source] = field(default_factory=dict)
    biases: dict[str, Source] = field(default_factory=dict)
    scales: dict[str, Source] = field(default_factory=dict)


@dataclass
class Tensors:
    """What a source holds.

    Attributes:
        dialect: how it is quantized.
        weights: module -> its weight of two dimensions.
        scales: module -> scale of its weight.
        stacks: module of the experts -> its stacks.
        rest: everything else.
    """

    dialect: Dialect
    weights: dict[str, Source] = field(default_factory=dict)
    scales: dict[str, Source] = field(default_factory=dict)
    stacks: dict[str, Stack] = field(default_factory=dict)
    rest: list[Source] = field(default_factory=list)


def refuse(source: Source, reason: str) -> ConvertError:
    """The error for one tensor, with its file and name."""
    return ConvertError(f"convert: {source.file}: {source.name!r} {reason}")


class _Meta(Mapping[str, torch.Tensor]):
    """The tensors without their data."""

    def __init__(self, tensors: Mapping[str, Source]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self.tensors[name]
        return torch.empty(source.shape, dtype=DTYPES[source.dtype], device="meta")

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` of a config.json, of its text model where only that has one."""
    text = config.get("text_config")
    nested = text.get("quantization_config") or text.get("compression_config") if isinstance(text, Mapping) else None
    return config.get("quantization_config") or config.get("compression_config") or nested


def skipped_by(section: Mapping[str, Any] | None) -> Callable[[str], bool]:
    """Whether a `quantization_config` says of a module that it is not quantized: it names it, or what it lies below, or matches it (`re:`).

    Raises:
        ConvertError: a regular expression that does not compile.
    """
    keys = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    names = {str(name) for key in keys for name in (section or {}).get(key) or ()}
    try:
        patterns = [re.compile(name[3:]) for name in sorted(names) if name.startswith("re:")]
    except re.error as error:
        raise ConvertError(f"convert: config of the source: {error.pattern!r} is no regular expression: {error}") from None

    def skipped(module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[:i]) in names for i in range(1, len(parts) + 1)) or any(p.fullmatch(module) for p in patterns)

    return skipped


def sort_tensors(config: Mapping[str, Any], tensors: Mapping[str, Source], keep: Callable[[str], bool] = lambda module: False) -> Tensors:
    """Sort all tensors of a source and pair weights with scales.

    Args:
        config: content of config.json, with the `quantization_config` filled in from hf_quant_config.json where it lacks one.
        tensors: name -> tensor, in the source's order.
        keep: whether a module is to stay as it is: a weight of a dtype that cannot be quantized is then one of the rest, not an error.

    Raises:
        ConvertError: a quantization that is not read, a dtype that safetensors does not define, an orphan, missing, doubled or wrongly shaped
            scale, or stacks that do not belong together.
    """
    try:
        out = Tensors(detect(quantization_of(config)))
    except ValueError as error:
        raise ConvertError(f"convert: config of the source: {error}") from None
    meta, used = _Meta(tensors), set()
    others = (n for n, s in tensors.items() if s.dtype not in (*FLOATS, "F8_E4M3") and not _SCALE.fullmatch(n))
    odd = {n for n in others if keep(n.removesuffix(".weight"))}
    for name, source in tensors.items():
        if source.dtype not in DTYPES:
            raise refuse(source, f"has dtype {source.dtype}, which is not known")
        stack = STACK.fullmatch(name) if name not in odd else None
        if stack and stack["bias"]:
            out.stacks.setdefault(stack["experts"], Stack(stack["experts"])).biases[stack["leaf"]] = source
        elif (stack and len(source.shape) == 3) or (name.endswith(".weight") and len(source.shape) == 2 and name not in odd):
            # gate|up tiles of a stack are checked once its layout is known
            segments = 2 if stack and stack["leaf"] == "gate_up_proj" and source.shape[-2] % 2 == 0 else 1
            key = _scale_of(source, meta, out.dialect, segments)
            if key is not None:
                used.add(key)
            if stack:
                into = out.stacks.setdefault(stack["experts"], Stack(stack["experts"]))
                into.weights[stack["leaf"]] = source
                if key is not None:
                    into.scales[stack["leaf"]] = tensors[key]
            else:
                module = name.removesuffix(".weight")
                out.weights[module] = source
                if key is not None:
                    out.scales[module] = tensors[key]
    placed = used | {s.name for s in out.weights.values()}
    placed |= {s.name for stack in out.stacks.values() for s in (*stack.weights.values(), *stack.biases.values())}
    for name, source in tensors.items():
        if name not in placed:
            _check_rest(source, tensors, out.dialect, odd)
            out.rest.append(source)
    return out


def _scale_of(source: Source, meta: _Meta, dialect: Dialect, segments: int) -> str | None:
    try:
        quantized = dialect.format is not None and dialect.format.name == "fp8_block"
        return scale_key(meta, source.name, dialect, segments=segments if quantized else 1)
    except ValueError as error:
        known = source.dtype in (*FLOATS, "F8_E4M3")
        advice = "" if known else f"; --exclude {source.name.removesuffix('.weight')} copies it as it is"
        raise ConvertError(f"convert: {source.file}: {str(error).removeprefix('checkpoint: ')}{advice}") from None


def _check_rest(source: Source, tensors: Mapping[str, Source], dialect: Dialect, odd: set[str]) -> None:
    """Refuse what only looks like the rest: scales without a weight and FP8 elements without a place."""
    stem, _, leaf = source.name.rpartition(".")
    if _OTHER_SCALES.fullmatch(source.name) or source.name in odd or (leaf in SCALE_SUFFIXES and f"{stem}.weight" in odd):
        return
    if leaf in SCALE_SUFFIXES[:2] or (leaf == "scale" and "scale" in dialect.suffixes and len(source.shape) > 1):
        beside = " (its weight is no matrix)" if f"{stem}.weight" in tensors else f": there is no {f'{stem}.weight'!r} in any file"
        raise refuse(source, f"is an orphan scale{beside}")
    owner = _SCALE.fullmatch(source.name)
    if owner and STACK.fullmatch(owner["of"]) and owner["of"] not in odd:
        raise refuse(source, f"is an orphan scale: there is no {owner['of']!r} in any file")
    if source.dtype.startswith("F8_"):
        raise refuse(source, f"is {source.dtype} of shape {list(source.shape)}, but neither a weight [N, K] with a scale nor a stack of experts")


def is_float(source: Source) -> bool:
    """Whether a tensor can be quantized as it is."""
    return source.dtype in FLOATS
