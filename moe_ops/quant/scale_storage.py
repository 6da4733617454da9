"""Storage of scales in each layout, and the layouts' definition in plain torch.

| layout           | storage for (.., rows, blocks) scales                                   | who reads it              |
|------------------|-------------------------------------------------------------------------|---------------------------|
| row_major        | (.., rows, blocks)                                                      | this library, checkpoints |
| mn_major         | same shape, strides (1, P): P = rows rounded up to 4                    | DeepGEMM on SM90          |
| ue8m0_packed     | int32 (.., rows, W), strides (1, P): W = ceil(blocks / 4), low byte first | DeepGEMM on SM100         |
| swizzle_32x4x4   | uint8 (.., ceil(rows / 128) * W * 512), see below                       | CUTLASS, torch on SM100   |

Swizzle: row r, block b lies at ((r // 128) * W + b // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + b % 4.
Padding (rows up to P or to a multiple of 128, blocks up to 4 W) holds zero bytes wherever this library wrote the scales.
"""

import torch

from moe_ops.core.formats import ceil_div
from moe_ops.core.numerics import decode_e8m0


def layout_reason(fmt: str, rule: str, layout: str) -> str | None:
    """None, or why scales of this format and rule cannot be kept in this layout."""
    if layout == "ue8m0_packed" and fmt == "fp8_block" and rule != "pow2":
        return f"layout 'ue8m0_packed' keeps only exponents, and fp8_block scales of rule {rule!r} are not powers of two: quantize with rule='pow2'"
    if layout == "swizzle_32x4x4" and fmt != "mxfp8":
        return f"layout 'swizzle_32x4x4' holds the E8M0 scales of mxfp8, not those of {fmt}"
    return None


_ROW_MULTIPLE = {"row_major": 1, "mn_major": 4, "ue8m0_packed": 4, "swizzle_32x4x4": 128}


def padded_rows(rows: int, layout: str) -> int:
    """Rows that the layout's storage has."""
    multiple = _ROW_MULTIPLE[layout]
    return ceil_div(rows, multiple) * multiple


def new_scale(like: torch.Tensor, lead: tuple[int, ...], rows: int, blocks: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Uninitialised scales of `layout` on the device of `like`, with the storage that the layout's padding needs.

    Args:
        like: any tensor on the device.
        lead: sizes before the rows: () or (experts,).
        rows: rows of scales.
        blocks: scales in a row.
        dtype: float32 or uint8, that of row-major scales.
        layout: one of `core.formats.LAYOUTS`.
    """
    if layout == "row_major":
        return like.new_empty((*lead, rows, blocks), dtype=dtype)
    padded = padded_rows(rows, layout)
    if layout == "swizzle_32x4x4":
        return like.new_empty((*lead, padded * 4 * ceil_div(blocks, 4)), dtype=torch.uint8)
    width = blocks if layout == "mn_major" else ceil_div(blocks, 4)
    base = like.new_empty((*lead, width, padded), dtype=dtype if layout == "mn_major" else torch.int32)
    return base.as_strided((*lead, rows, width), (*base.stride()[: len(lead)], 1, max(1, padded)))


def kernel_view(scale: torch.Tensor, layout: str) -> tuple[torch.Tensor, int, int, int]:
    """What kernels take: (scales, stride of experts, of rows, of columns), in elements of the returned view."""
    if layout == "swizzle_32x4x4":
        words = scale.view(torch.int32)
        return words, words.stride(0) if words.dim() == 2 else 0, 0, 0
    return scale, scale.stride(0) if scale.dim() == 3 else 0, scale.stride(-2), scale.stride(-1)


def exponent_bytes(scale: torch.Tensor) -> torch.Tensor:
    """Row-major scales as E8M0 bytes: uint8 as they are, fp32 powers of two by their exponent field."""
    return scale if scale.dtype == torch.uint8 else (scale.view(torch.int32) >> 23).to(torch.uint8)


def pack_ref(scale: torch.Tensor, layout: str) -> torch.Tensor:
    """The definition: row-major scales (.., rows, blocks) -> `layout`, padding zero."""
    *lead, rows, blocks = scale.shape
    lead = tuple(lead)
    out = new_scale(scale, lead, rows, blocks, scale.dtype, layout)
    if layout == "row_major":
        return out.copy_(scale)
    if out.numel() == 0:
        return out
    padded = padded_rows(rows, layout)
    if layout == "mn_major":
        out.as_strided((*lead, blocks, padded), (*out.stride()[: len(lead)], padded, 1)).zero_()
        return out.copy_(scale)
    words = ceil_div(blocks, 4)
    byte = torch.nn.functional.pad(exponent_bytes(scale), (0, 4 * words - blocks, 0, padded - rows))
    if layout == "ue8m0_packed":
        out.as_strided((*lead, padded, words), (*out.stride()[: len(lead)], 1, padded)).copy_(byte.view(torch.int32))
        return out
    tiles = byte.reshape(*lead, padded // 128, 4, 32, words, 4)
    return out.copy_(tiles.movedim((-2, -3, -4), (-4, -3, -2)).reshape(out.shape))


def unpack_ref(scale: torch.Tensor, layout: str, rows: int, blocks: int, fmt: str) -> torch.Tensor:
    """The inverse of `pack_ref`: scales in `layout` -> row-major (.., rows, blocks), fp32 for fp8_block and uint8 for mxfp8."""
    if layout in ("row_major", "mn_major"):
        return scale.clone(memory_format=torch.contiguous_format)
    words = ceil_div(blocks, 4)
    if scale.numel() == 0:
        lead = scale.shape[: scale.dim() - (1 if layout == "swizzle_32x4x4" else 2)]
        return scale.new_empty((*lead, rows, blocks), dtype=torch.uint8 if fmt == "mxfp8" else torch.float32)
    if layout == "ue8m0_packed":
        byte = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    else:
        tiles = scale.reshape(*scale.shape[:-1], -1, words, 32, 4, 4)
        byte = tiles.movedim((-4, -3, -2), (-2, -3, -4)).flatten(-5, -3).flatten(-2)
    byte = byte[..., :rows, :blocks].clone(memory_format=torch.contiguous_format)
    if fmt == "mxfp8":
        return byte
    return decode_e8m0(byte)
