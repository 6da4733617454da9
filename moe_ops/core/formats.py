"""Formats and the quantized tensor: the layout travels with the data and is never guessed from a shape or a dtype.

`scale` always multiplies back: x ~= q * scale.

| format    | elements | activations            | weights                       |
|-----------|----------|------------------------|-------------------------------|
| fp8_block | e4m3     | one fp32 scale a 1x128 | one fp32 scale a 128x128 tile |
| mxfp8     | e4m3     | one E8M0 byte a 1x32   | one E8M0 byte a 1x32          |

An E8M0 byte b means 2^(b - 127); byte 255 is NaN, is never written and is refused on reading.
"""

from dataclasses import dataclass, replace

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
#: Smallest fp8_block scale: a scale is a normal fp32 number, so that its reciprocal is finite.
MIN_SCALE = 2.0**-126

#: Scale layouts. `row_major` and `mn_major` hold the logical shape [.., rows, blocks] and differ in strides;
#: `ue8m0_packed` holds int32 [.., rows, ceil(blocks/4)], four bytes a word; `swizzle_32x4x4` is flat uint8 tiles of 128 rows x 4 blocks.
LAYOUTS = ("row_major", "mn_major", "ue8m0_packed", "swizzle_32x4x4")


@dataclass(frozen=True)
class Format:
    """Descriptor of a quantized format.

    Attributes:
        name: "fp8_block" or "mxfp8".
        scale_dtype: dtype of row-major scales (E8M0 is carried as uint8).
        act_block: (rows, columns) that share one scale in an activation.
        weight_block: the same in a weight [N, K].
        rules: how a scale may be chosen from a block's amax; the first is the default.
    """

    name: str
    scale_dtype: torch.dtype
    act_block: tuple[int, int]
    weight_block: tuple[int, int]
    rules: tuple[str, ...]

    def __reduce__(self) -> tuple[object, tuple[str]]:
        # formats are compared by identity: a copied or unpickled module must hold the same object
        return get_format, (self.name,)


FP8_BLOCK = Format("fp8_block", torch.float32, (1, 128), (128, 128), ("fp32", "pow2"))
MXFP8 = Format("mxfp8", torch.uint8, (1, 32), (1, 32), ("rceil", "floor", "even"))
FORMATS: dict[str, Format] = {f.name: f for f in (FP8_BLOCK, MXFP8)}


def get_format(fmt: "str | Format", op: str = "moe_ops") -> Format:
    """The descriptor of a format's name.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(fmt, Format):
        return fmt
    try:
        return FORMATS[fmt]
    except (KeyError, TypeError):
        raise ValueError(f"{op}: format must be one of {sorted(FORMATS)}, got {fmt!r}") from None


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized tensor: data, scales, and everything needed to read them.

    Attributes:
        data: (.., M, K) float8_e4m3fn, row-major.
        scale: scales in `layout`; logically (.., segments * ceil(M / segments / block[0]), ceil(K / block[1])).
        format: its `Format`.
        block: (rows, columns) of one scale: the format's act_block or weight_block.
        layout: one of `LAYOUTS`.
        rule: how scales were chosen ("fp32", "pow2", "rceil", "floor", "even"), or "unknown" for a foreign tensor.
        segments: equal parts of the M dimension whose blocks are counted apart: 2 for w13 (gate rows, then up rows), else 1.
    """

    data: torch.Tensor
    scale: torch.Tensor
    format: Format
    block: tuple[int, int]
    layout: str = "row_major"
    rule: str = "unknown"
    segments: int = 1

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def scheme(self) -> str:
        """How kernels read the scales: "fp8_block" for fp32 scales of 128 columns (folded mxfp8 too), "mxfp8" for bytes of 32."""
        return "fp8_block" if self.block[1] == 128 else "mxfp8"

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.numel() * self.data.element_size() + self.scale.numel() * self.scale.element_size()

    @property
    def is_weight(self) -> bool:
        return self.block == self.format.weight_block

    def to(self, device: torch.device | str) -> "QTensor":
        """The same tensor on another device."""
        return replace(self, data=self.data.to(device), scale=self.scale.to(device))

    def __getitem__(self, index: int) -> "QTensor":
        """One expert of a stacked weight (row-major scales), as a view."""
        if self.data.dim() != 3 or self.layout != "row_major":
            raise TypeError(f"QTensor: only a 3-D tensor with row_major scales can be indexed, got {self}")
        return replace(self, data=self.data[index], scale=self.scale[index])

    def __repr__(self) -> str:
        return (
            f"QTensor({self.format.name}, shape={tuple(self.shape)}, scale={tuple(self.scale.shape)} {self.scale.dtype}, "
            f"block={self.block}, layout={self.layout!r}, rule={self.rule!r}, segments={self.segments}, device={self.device})"
        )


def scale_shape(shape: tuple[int, ...], block: tuple[int, int], segments: int = 1) -> tuple[int, ...]:
    """Logical shape of the scales of a (.., M, K) tensor; see `QTensor.scale`."""
    *lead, m, k = shape
    return (*lead, segments * ceil_div(m // segments, block[0]), ceil_div(k, block[1]))


def as_e4m3(t: torch.Tensor) -> torch.Tensor:
    """View uint8 storage as e4m3 (bits untouched); e4m3 passes through."""
    return t.view(E4M3) if t.dtype == torch.uint8 else t


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """View a one-byte floating tensor (e4m3, E8M0) as uint8, the dtype that crosses the op boundary; others pass through."""
    return t.view(torch.uint8) if t.dtype in (E4M3, torch.float8_e8m0fnu) else t


def make_qtensor(
    data: torch.Tensor, scale: torch.Tensor, fmt: str | Format, *, weight: bool = True, layout: str = "row_major", segments: int = 1,
    rule: str = "unknown",
) -> QTensor:  # fmt: skip
    """Wrap existing data and scales, checking that they belong together.

    Args:
        data: (.., M, K) float8_e4m3fn or uint8 holding its bits.
        scale: scales in `layout`; E8M0 as uint8 or float8_e8m0fnu; fp8_block scales may be fp32 or bf16 (widened once).
        fmt: format name or descriptor.
        weight: whether the blocks are the format's weight blocks (else its activation blocks).
        layout: one of `LAYOUTS`.
        segments: see `QTensor`.
        rule: how the scales were chosen, where known.

    Raises:
        TypeError: data or scale of another dtype.
        ValueError: an unknown format, layout or rule, a scale of another shape than the data demands, or (on a CPU, where looking costs
            nothing) an E8M0 byte 255.
    """
    f = get_format(fmt, "make_qtensor")
    for name, t in (("data", data), ("scale", scale)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"make_qtensor: {name} must be a torch.Tensor, got {type(t).__name__}")
    if rule != "unknown" and rule not in f.rules:
        raise ValueError(f"make_qtensor: rule of {f.name} must be one of {f.rules} or 'unknown', got {rule!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"make_qtensor: layout must be one of {LAYOUTS}, got {layout!r}")
    if data.dtype not in (E4M3, torch.uint8):
        raise TypeError(f"make_qtensor: data must be float8_e4m3fn or uint8, got {data.dtype}")
    scale = as_bytes(scale)
    if f is FP8_BLOCK and scale.dtype in (torch.bfloat16, torch.float16):
        scale = scale.float()
    wanted = torch.int32 if layout == "ue8m0_packed" else f.scale_dtype
    if scale.dtype != wanted:
        raise TypeError(f"make_qtensor: scale of {f.name} in layout {layout} must be {wanted}, got {scale.dtype}")
    block = f.weight_block if weight else f.act_block
    if data.dim() not in (2, 3):
        raise ValueError(f"make_qtensor: data must have 2 or 3 dimensions, got shape {tuple(data.shape)}")
    if data.shape[-1] > 1 and data.stride(-1) != 1:
        raise ValueError(f"make_qtensor: data must have last stride 1, got shape {tuple(data.shape)} with strides {data.stride()}")
    if segments < 1 or data.shape[-2] % segments:
        raise ValueError(f"make_qtensor: data has {data.shape[-2]} rows, which do not divide into {segments} segments")
    if layout == "swizzle_32x4x4" and f is not MXFP8:
        raise ValueError(f"make_qtensor: layout swizzle_32x4x4 holds E8M0 scales, not those of {f.name}")
    expected = scale_shape(tuple(data.shape), block, segments)
    *lead, rows, blocks = expected
    if layout == "ue8m0_packed":
        expected = (*lead, rows, ceil_div(blocks, 4))
    elif layout == "swizzle_32x4x4":
        expected = (*lead, ceil_div(rows, 128) * ceil_div(blocks, 4) * 512)
    if tuple(scale.shape) != expected:
        fused = scale_shape(tuple(data.shape), block, 1)
        hint = ""
        if segments == 2 and tuple(scale.shape) == fused:
            hint = "; this is the scale of one fused matrix, whose blocks mix gate and up rows"
            hint += f" where I % {block[0]} != 0: quantize gate and up apart"
        got = tuple(scale.shape)
        raise ValueError(f"make_qtensor: scale must have shape {expected} for data {tuple(data.shape)} in blocks {block}, got {got}{hint}")
    # the padding of a packed layout may hold anything
    if scale.dtype == torch.uint8 and layout in ("row_major", "mn_major") and scale.device.type == "cpu" and bool((scale == 255).any()):
        raise ValueError("make_qtensor: scale holds the E8M0 byte 255, which is NaN")
    if data.device != scale.device:
        raise ValueError(f"make_qtensor: data is on {data.device}, scale on {scale.device}")
    return QTensor(as_e4m3(data), scale, f, block, layout, rule, segments)
