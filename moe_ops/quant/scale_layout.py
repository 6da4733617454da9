"""Conversion of scales between layouts, both ways; the layouts themselves are defined in scale_storage.py.

On the hot path no conversion runs: the quantizers write the layout that the consumer reads. This is for loading and for interchange.
"""

import dataclasses

import torch

from moe_ops.core import checks
from moe_ops.core.formats import LAYOUTS, QTensor, as_bytes, ceil_div, scale_shape
from moe_ops.core.ops import register
from moe_ops.quant.scale_storage import kernel_view, layout_reason, new_scale, pack_ref, padded_rows, unpack_ref

__all__ = ["to_layout"]


def convert_scale_ref(scale: torch.Tensor, src: str, dst: str, rows: int, blocks: int, fmt: str) -> torch.Tensor:
    """Reference of the conversion, any device: by way of row-major scales."""
    return pack_ref(unpack_ref(scale, src, rows, blocks, fmt), dst)


def _new(scale: torch.Tensor, src: str, dst: str, rows: int, blocks: int, fmt: str) -> torch.Tensor:
    lead = tuple(scale.shape[: scale.dim() - (1 if src == "swizzle_32x4x4" else 2)])
    return new_scale(scale, lead, rows, blocks, torch.float32 if fmt == "fp8_block" else torch.uint8, dst)


def _kind(layout: str, fmt: str) -> str:
    return ("floats" if fmt == "fp8_block" else "bytes") if layout in ("row_major", "mn_major") else layout


def _convert_scale_triton(scale: torch.Tensor, src: str, dst: str, rows: int, blocks: int, fmt: str) -> torch.Tensor:
    from moe_ops.core.launch import launch
    from moe_ops.quant.scale_layout_kernel import _convert_scale_kernel

    out = _new(scale, src, dst, rows, blocks, fmt)
    experts = out.shape[0] if out.dim() == (2 if dst == "swizzle_32x4x4" else 3) else 1
    padded = padded_rows(rows, dst)
    source, *in_strides = kernel_view(scale, src)
    target, *out_strides = kernel_view(out, dst)
    block_r, block_w = 32, 8
    launch(
        "convert_scale", _convert_scale_kernel, (experts * ceil_div(padded, block_r) * ceil_div(ceil_div(blocks, 4), block_w),),
        source, target, rows, padded, *in_strides, *out_strides,
        BLOCKS=blocks, SRC=_kind(src, fmt), DST=_kind(dst, fmt), BLOCK_R=block_r, BLOCK_W=block_w, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


_op = register("convert_scale", cuda=_convert_scale_triton, cpu=convert_scale_ref, fake=_new)


def to_layout(q: QTensor, layout: str) -> QTensor:
    """The same quantized tensor with its scales in another layout; data is shared, not copied.

    Args:
        q: QTensor (M, K) or (E, M, K), activation or weight blocks, scales in any layout.
        layout: "row_major", "mn_major", "ue8m0_packed" (mxfp8, or fp8_block of rule "pow2") or "swizzle_32x4x4" (mxfp8).

    Returns:
        QTensor in `layout`; q itself when it is there already. Padding holds zero bytes.

    Layout: see `moe_ops.quant.scale_storage`.

    Raises:
        TypeError: q is no QTensor.
        ValueError: an unknown layout, one that cannot hold these scales, or scales of another shape than q's layout demands.

    Cost: reads and writes the scales; one launch.

    See also: tests/quant/test_scale_layout.py, benchmarks/quant/bench_scale_layout.py.
    """
    if not isinstance(q, QTensor):
        raise TypeError(f"to_layout: q must be a QTensor, got {type(q).__name__}")
    checks.one_of("to_layout", "layout", layout, LAYOUTS)
    if layout == q.layout:
        return q
    reason = layout_reason(q.scheme, q.rule, layout)
    if reason is not None:
        raise ValueError(f"to_layout: {reason}")
    checks.ndim("to_layout", "q.data", q.data, (2, 3))
    checks.same_device("to_layout", scale=q.scale)
    *lead, rows, blocks = scale_shape(tuple(q.shape), q.block, q.segments)
    scale = as_bytes(q.scale)
    if q.layout == "swizzle_32x4x4":
        wanted = (*lead, padded_rows(rows, q.layout) * 4 * ceil_div(blocks, 4))
    else:
        wanted = (*lead, rows, ceil_div(blocks, 4) if q.layout == "ue8m0_packed" else blocks)
    checks.shape("to_layout", "q.scale", scale, wanted)
    if q.layout == "swizzle_32x4x4":
        checks.contiguous("to_layout", "q.scale", scale)
    return dataclasses.replace(q, scale=_op(scale, q.layout, layout, rows, blocks, q.scheme), layout=layout)
