"""Dequantization: x = data * scale in fp32, then rounded to the dtype asked for."""

import torch

from moe_ops.core import checks
from moe_ops.core.arch import arch_of
from moe_ops.core.formats import QTensor, as_bytes, as_e4m3, ceil_div, get_format
from moe_ops.core.numerics import decode_e8m0
from moe_ops.core.ops import register
from moe_ops.quant.row_config import heuristic
from moe_ops.quant.scale_layout import to_layout

__all__ = ["dequantize"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dequantize_ref(data: torch.Tensor, scale: torch.Tensor, fmt: str, block_m: int, segments: int, dtype: torch.dtype) -> torch.Tensor:
    """Reference of `dequantize`, any device: data (.., M, K), row- or MN-major scales, blocks of block_m rows."""
    m, k = data.shape[-2:]
    per = m // segments
    s = decode_e8m0(scale) if fmt == "mxfp8" else scale
    if block_m > 1:
        s = s.unflatten(-2, (segments, ceil_div(per, block_m))).repeat_interleave(block_m, -2)[..., :per, :].flatten(-3, -2)
    s = s.repeat_interleave(get_format(fmt).act_block[1], -1)[..., :k]
    return (as_e4m3(data).float() * s).to(dtype)


def _dequantize_triton(data: torch.Tensor, scale: torch.Tensor, fmt: str, block_m: int, segments: int, dtype: torch.dtype) -> torch.Tensor:
    from moe_ops.core.launch import launch
    from moe_ops.quant.dequantize_kernel import _dequantize_kernel

    out = data.new_empty(data.shape, dtype=dtype)
    masked = data.dim() == 3
    experts = data.shape[0] if masked else 1
    rows, k = data.shape[-2:]
    group = get_format(fmt).act_block[1]
    arch = arch_of(data.device)
    cfg = heuristic(experts * rows, k, arch)
    tiles = experts * ceil_div(rows, cfg.block_r) * ceil_div(k, cfg.columns)
    launch(
        "dequantize", _dequantize_kernel, (min(tiles, arch.sms * cfg.programs),), data, scale, out, rows, experts,
        data.stride(0) if masked else 0, data.stride(-2), scale.stride(0) if masked else 0, scale.stride(-2), scale.stride(-1),
        K=k, BLOCK_M=block_m, GROUP=group, SEGMENTS=segments, E8M0=fmt == "mxfp8", BLOCK_R=cfg.block_r, GROUPS=cfg.columns // group,
        num_warps=cfg.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _fake(data: torch.Tensor, scale: torch.Tensor, fmt: str, block_m: int, segments: int, dtype: torch.dtype) -> torch.Tensor:
    return data.new_empty(data.shape, dtype=dtype)


_op = register("dequantize", cuda=_dequantize_triton, cpu=dequantize_ref, fake=_fake)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of a quantized tensor: data * scale in fp32, rounded once to `dtype`.

    Args:
        q: QTensor (M, K) or (E, M, K) of either format, activation or weight blocks, any scale layout.
        dtype: float32, bfloat16 or float16.

    Returns:
        (.., M, K) contiguous. Rows that were never filled give whatever their bytes mean.

    Numerics: one fp32 product, rounded to nearest, exact for powers of two within fp32's range. Scale byte 0 is 2^-127, a subnormal number;
        byte 255 makes its whole block NaN, without a look at the device (`mxfp8.check_e8m0` refuses it at load time).

    Raises:
        TypeError: q is no QTensor, or dtype is not among the three.
        ValueError: wrong number of dimensions, last stride or device.

    Cost: reads one byte an element and the scales, writes the result; one launch, two for packed or swizzled scales.

    See also: tests/quant/test_dequantize.py, benchmarks/quant/bench_dequantize.py.
    """
    if not isinstance(q, QTensor):
        raise TypeError(f"dequantize: q must be a QTensor, got {type(q).__name__}")
    if dtype not in _DTYPES:
        raise TypeError(f"dequantize: dtype must be float32 or bfloat16 or float16, got {dtype}")
    checks.qtensor("dequantize", "q", q)
    checks.last_stride_one("dequantize", "q.data", q.data)
    checks.same_device("dequantize", data=q.data, scale=q.scale)
    if q.layout not in ("row_major", "mn_major"):
        q = to_layout(q, "row_major")
    return _op(as_bytes(q.data), as_bytes(q.scale), q.scheme, q.block[0], q.segments, dtype)
