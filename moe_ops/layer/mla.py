"""Weights of absorbed multi-head latent attention (DeepSeek): kv_b_proj as the two products that `bmm` runs, head by head.

    kv_b_proj (heads * (nope + v), rank)  ->  k_b (heads, rank, nope): q_nope @ k_b^T is the query in the latent space
                                              v_b (heads, v, rank): latent @ v_b^T is the head's value

Attention then reads the cached latents as they are, and never expands them to keys and values.
"""

from dataclasses import replace

import torch

from moe_ops.core import checks
from moe_ops.core.formats import FP8_BLOCK, Format, QTensor, ceil_div, get_format
from moe_ops.layer.load import Weight
from moe_ops.quant.quantize import dequantize, quantize_weight

__all__ = ["absorbed_kv_b"]

_OP = "absorbed_kv_b"


def absorbed_kv_b(weight: Weight, nope: int, v: int, *, format: str | Format | None = None) -> tuple[Weight, Weight]:
    """Split kv_b_proj into (k_b, v_b), at load time.

    Args:
        weight: kv_b_proj, (heads * (nope + v), rank): of each head `nope` rows of keys, then `v` rows of values; a QTensor or bf16 / fp16.
        nope: columns of a query head without position.
        v: columns of a value head.
        format: quantize a 16-bit weight to "fp8_block" or "mxfp8"; None keeps its dtype.

    Returns:
        k_b (heads, rank, nope) and v_b (heads, v, rank), contiguous, in the weight's format.

    Numerics: bits are kept where scale blocks allow it: fp8_block with nope and v multiples of 128 (k_b is a transposition of data and of
        scales), and v_b in mxfp8. Else the part is dequantized and quantized again by the same rule; mxfp8 scales run along K, which is another
        axis of k_b.

    Raises:
        TypeError, ValueError: a weight that is not 2-D, has other blocks, or rows that do not divide into heads; an unknown format, or a
            weight that is quantized in the other one.
    """
    checks.int_range(_OP, "nope", nope, 1, 2**16)
    checks.int_range(_OP, "v", v, 1, 2**16)
    quantized = isinstance(weight, QTensor)
    if quantized:
        checks.qtensor(_OP, "weight", weight)
        if weight.block != weight.format.weight_block or weight.layout != "row_major":
            raise ValueError(f"{_OP}: weight must have weight blocks {weight.format.weight_block} and row_major scales, got {weight}")
        if format is not None and weight.format is not get_format(format, _OP):
            raise ValueError(f"{_OP}: weight is {weight.format.name} and another format was asked for; dequantize it first, which is lossy")
    else:
        checks.is_tensor(_OP, "weight", weight)
        checks.dtype(_OP, "weight", weight, (torch.bfloat16, torch.float16, torch.float32))
    data = weight.data if quantized else weight
    checks.ndim(_OP, "weight", data, (2,))
    rows, rank = data.shape
    heads = rows // (nope + v)
    if rows % (nope + v):
        raise ValueError(f"{_OP}: weight has {rows} rows, which do not divide into heads of nope + v = {nope + v}")
    if not quantized:
        k_b, v_b = _split(data, heads, nope, v)
        k_b = k_b.transpose(1, 2)
        f = None if format is None else get_format(format, _OP)
        return (k_b.contiguous(), v_b.contiguous()) if f is None else (quantize_weight(k_b.contiguous(), f), quantize_weight(v_b.contiguous(), f))
    fmt = weight.format
    k_data, v_data = _split(data.view(torch.uint8), heads, nope, v)
    if fmt is FP8_BLOCK and nope % 128 == 0 and v % 128 == 0 and rows // weight.segments % 128 == 0:
        k_scale, v_scale = _split(weight.scale, heads, nope // 128, v // 128)
        k_data, k_scale = k_data.transpose(1, 2).contiguous(), k_scale.transpose(1, 2).contiguous()
        assert k_scale.shape == (heads, ceil_div(rank, 128), nope // 128)
        k_b = replace(weight, data=k_data.view(data.dtype), scale=k_scale, segments=1)
        return k_b, replace(weight, data=v_data.contiguous().view(data.dtype), scale=v_scale.contiguous(), segments=1)
    k_float, v_float = _split(dequantize(weight), heads, nope, v)
    rule = weight.rule if weight.rule in fmt.rules else None
    k_b = quantize_weight(k_float.transpose(1, 2).contiguous(), fmt, rule=rule)
    if fmt is FP8_BLOCK:
        return k_b, quantize_weight(v_float.contiguous(), fmt, rule=rule)
    v_scale = _split(weight.scale, heads, nope, v)[1].contiguous()
    return k_b, replace(weight, data=v_data.contiguous().view(data.dtype), scale=v_scale, segments=1)


def _split(t: torch.Tensor, heads: int, first: int, second: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `t`, head by head: (heads, first, ..) and (heads, second, ..), as views."""
    t = t.view(heads, first + second, t.shape[-1])
    return t[:, :first], t[:, first:]
