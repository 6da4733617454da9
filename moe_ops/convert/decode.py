"""Reading quantized weights of a source, and writing them in another format: exactly where that is possible.

An FP8 block whose scale is a power of two is an mxfp8 block as it stands: its elements keep their bytes, and the scale's exponent is written
once for every 32 columns of every row. So is a weight that only changes its dialect. Where a scale is no power of two, elements are rounded
again from fp32. Where some scales of a weight are and some are not, the whole weight goes through fp32: "rceil" loses nothing in the blocks
that are (a smaller group has a scale at most as large, so that every element stays representable).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from moe_ops.convert.source import ConvertError
from moe_ops.convert.types import Options, Weight
from moe_ops.core.formats import FP8_BLOCK, MIN_SCALE, MXFP8, QTensor, as_bytes, ceil_div
from moe_ops.core.numerics import decode_e8m0
from moe_ops.layer.dialects import Dialect, read_weight

#: e4m3 has NaN in two bytes, 0x7f and 0xff.
_NAN = 0x7F


def read_quantized(weight: Weight, data: torch.Tensor, scale: torch.Tensor, dialect: Dialect) -> QTensor:
    """The weight of one entry with its scale, checked.

    Args:
        weight: the entry, with a scale.
        data: the piece `weight.part` of its elements, float8_e4m3fn or their bytes, [N, K].
        scale: the piece `weight.scale_part` of its scale tensor, as stored.
        dialect: of the source.

    Raises:
        ConvertError: a scale with NaN (E8M0 byte 255), infinity or zero, or one that is no power of two though the config promises it; of
            a wrong dtype or shape. The text names file and tensor.
    """
    assert weight.scale is not None
    # names of a stack's scale follow another grammar; one expert's are looked up under those of a module
    stacked = weight.part.index is not None
    name = "expert.weight" if stacked else weight.weight.name
    key = f"expert.{dialect.suffixes[0]}" if stacked else weight.scale.name
    sd: Mapping[str, torch.Tensor] = {name: data.view(torch.float8_e4m3fn), key: scale}
    try:
        q = read_weight(sd, name, dialect)
    except ValueError as error:
        text = str(error).removeprefix("checkpoint: ")
        if stacked:
            text = text.replace(key, weight.scale.name).replace(name, weight.weight.name) + f" (expert {weight.part.index})"
        raise ConvertError(f"convert: {weight.scale.file}: {text}") from None
    assert isinstance(q, QTensor)
    if q.format is FP8_BLOCK and scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        q = replace(q, scale=decode_e8m0(as_bytes(scale)).reshape(q.scale.shape))  # layers clamp 2^-127 to a normal number; here it is exact
    return q


def check_elements(weight: Weight, data: torch.Tensor) -> None:
    """Refuse e4m3 elements that are NaN.

    Raises:
        ConvertError: naming file and tensor.
    """
    if bool(((data.view(torch.uint8) & 0x7F) == _NAN).any()):
        raise ConvertError(f"convert: {weight.weight.file}: {weight.weight.name!r} holds NaN")


def exact_scale(q: QTensor, options: Options) -> torch.Tensor | None:
    """The scale of a weight in the format asked for that lets its elements keep their bytes, or None where there is none.

    Args:
        q: a weight [N, K], from `read_quantized`.
        options: format and rule that are asked for.

    Returns:
        uint8 [N, K/32] for mxfp8, fp32 [N/128, K/128] for fp8_block (a view where nothing changes).
    """
    want = options.fmt
    if q.format is want:
        # the pow2 rule promises its readers powers of two
        if want is MXFP8:
            return q.scale
        fits = bool((q.scale >= MIN_SCALE).all()) and (options.rule != "pow2" or _exponents(q.scale) is not None)
        return q.scale if fits else None
    if want is FP8_BLOCK:
        return None
    exponents = _exponents(q.scale)
    n, k = q.shape
    if exponents is None or k % 32:
        return None
    rows = exponents.repeat_interleave(128, 0)[:n]
    return rows.repeat_interleave(4, 1)[:, : ceil_div(k, 32)].contiguous()


def _exponents(scale: torch.Tensor) -> torch.Tensor | None:
    """E8M0 bytes of fp32 scales, or None if one is no power of two between 2^-127 and 2^127."""
    bits = scale.contiguous().view(torch.int32)
    smallest = bits == 0x00400000  # 2^-127, byte 0, is subnormal in fp32
    if bool((((bits & 0x807FFFFF) != 0) | (bits == 0))[~smallest].any()):
        return None
    return (bits >> 23).to(torch.uint8)


def dequantize_rows(q: QTensor, start: int, stop: int) -> torch.Tensor:
    """Rows start .. stop of a weight [N, K] in fp32; `start` begins a block of rows (a multiple of 128)."""
    rows = q.data[start:stop].float()
    n, k = rows.shape
    if q.format is MXFP8:
        scale = decode_e8m0(q.scale[start:stop]).unsqueeze(-1)
        return (rows.view(n, k // 32, 32) * scale).view(n, k)
    assert start % 128 == 0
    scale = q.scale[start // 128 : ceil_div(stop, 128)].repeat_interleave(128, 0)[:n]
    return rows.mul_(scale.repeat_interleave(128, 1)[:, :k])
