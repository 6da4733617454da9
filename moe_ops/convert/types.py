"""What the parts of the converter say to each other: a tensor of the source, a piece of it, what becomes of it, and the plan of all pieces.

`plan_tensors` (planning.py) turns the headers of a source into a `TensorPlan` without reading a weight; the engine carries it out piece by
piece. Every element of every source tensor belongs to exactly one entry.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from moe_ops.core.formats import Format, get_format
from moe_ops.layer.dialects import Dialect

#: dtype in a safetensors header -> torch's.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
#: dtypes of weights that can be quantized.
FLOATS = ("BF16", "F16", "F32")

LAYOUTS = ("hf", "compressed-tensors", "modelopt")

Action = Literal["quantize", "reencode", "dequantize"]


@dataclass(frozen=True)
class Options:
    """What a user asks for. All but `device` decide the bytes of the result.

    Attributes:
        format: "mxfp8" or "fp8_block".
        layout: one of `LAYOUTS`: names, dtypes and config keys of the result.
        rounding: how scales are chosen: one of the format's rules, or None for its default ("rceil", "fp32").
        stochastic: seed of stochastic rounding of elements; None rounds to nearest even.
        include: patterns (`re:REGEX`, matched whole, or a module's name, which covers all below it); with any, only modules that match one
            are quantized. An unknown model family needs them.
        exclude: patterns of modules that are kept.
        only: "experts" quantizes nothing else; None everything that is not on the family's never-list.
        device: where quantizers run.
    """

    format: str = "mxfp8"
    layout: str = "hf"
    rounding: str | None = None
    stochastic: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        rules = self.fmt.rules
        if self.rounding is not None and self.rounding not in rules:
            raise ValueError(f"convert: rounding must be one of {', '.join(rules)} for {self.format}, got {self.rounding!r}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"convert: layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if self.only not in (None, "experts"):
            raise ValueError(f"convert: only must be 'experts' or None, got {self.only!r}")
        if self.stochastic is not None and (isinstance(self.stochastic, bool) or not isinstance(self.stochastic, int)):
            raise TypeError(f"convert: stochastic must be an int seed or None, got {self.stochastic!r}")
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), (str, bytes)):
                raise TypeError(f"convert: {name} must be a sequence of patterns, got the string {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
            wrong = [p for p in getattr(self, name) if not isinstance(p, str)]
            if wrong:
                raise TypeError(f"convert: {name} must hold patterns as strings, got {wrong[0]!r}")

    @property
    def fmt(self) -> Format:
        """Descriptor of the format."""
        return get_format(self.format, "convert")

    @property
    def rule(self) -> str:
        """The rule that scales follow, the default filled in."""
        return self.rounding or self.fmt.rules[0]


@dataclass(frozen=True)
class Source:
    """A tensor of the source, as its file's header describes it.

    Attributes:
        name: its key.
        dtype: as safetensors writes it ("BF16").
        shape: its shape.
        file: name of its file in the source folder.
        begin: first byte of its data, counted from the start of the file.
        end: one past the last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.end - self.begin


@dataclass(frozen=True)
class Part:
    """Which elements of a source tensor an entry takes; apply in this order.

    Attributes:
        index: of the first dimension (an expert of a stack), or None for all.
        transposed: swap the last two dimensions.
        start: first row (first element of a 1-D tensor) that is taken.
        step: distance between rows that are taken.
        rows: how many, or None for all.
    """

    index: int | None = None
    transposed: bool = False
    start: int = 0
    step: int = 1
    rows: int | None = None

    def view(self, t: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor, without a copy."""
        if self.index is not None:
            t = t[self.index]
        if self.transposed:
            t = t.transpose(-1, -2)
        if self.rows is None:
            return t
        return t[self.start : self.start + (self.rows - 1) * self.step + 1 : self.step]


@dataclass(frozen=True)
class Output:
    """A tensor of the result: key, dtype as safetensors writes it, shape. It goes to the file of the same name as its source's."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Weight:
    """A weight [N, K] whose bytes change on the way.

    Attributes:
        name: of its module in the result, without `.weight`. Stochastic rounding takes `data.name` as the tensor's name.
        weight: where its elements are.
        part: which of them.
        scale: its scale tensor, where the source is quantized. It may lie in another file.
        scale_part: which part of the scale tensor (the same expert of a stack).
        fmt: "bf16", "fp16", "fp32", "fp8_block" or "mxfp8": how the source holds it.
        action: "quantize" rounds floating elements; "reencode" keeps the elements' bytes where the scales allow it exactly, and rounds again
            from fp32 otherwise; "dequantize" gives bf16, for a quantized weight that the options keep.
        data: the weight of the result.
        data_scale: its scale; None for "dequantize".
        expert: it belongs to a routed expert.
        reason: why it is not quantized, for "dequantize".
    """

    name: str
    weight: Source
    part: Part
    scale: Source | None
    scale_part: Part
    fmt: str
    action: Action
    data: Output
    data_scale: Output | None
    expert: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Keep:
    """A tensor, or a piece of one (the bias of one expert), that is copied bit for bit.

    Attributes:
        source: the tensor.
        part: which elements.
        data: the tensor of the result.
        reason: why it is kept: "never quantized in qwen3_moe: router", "excluded by re:..".
    """

    source: Source
    part: Part
    data: Output
    reason: str


Entry = Weight | Keep


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of all tensors.

    Attributes:
        entries: in the order of the source's tensors; pieces of one tensor follow each other, expert by expert.
        dialect: how the source is quantized.
        family: row of the family table, or None for an unknown model type.
        kept_modules: names, as in the result, of modules with a weight of two dimensions or more that is left unquantized, sorted.
        warnings: what a user should know before trusting the result to a server.
    """

    entries: tuple[Entry, ...]
    dialect: Dialect
    family: str | None
    kept_modules: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())
