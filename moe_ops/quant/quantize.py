"""Quantization of activations: bf16, fp16 or fp32 rows -> e4m3 rows with a scale for every 1x128 (fp8_block) or 1x32 (mxfp8) block.

The formulas are those of fp8_block.py and mxfp8.py, byte for byte. The scales come in the layout that the consumer reads, written by the
same kernel. `quantize_weight` and `dequantize`, which live in files of their own, are named here too.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch

from moe_ops.core import checks
from moe_ops.core.formats import E4M3, FP8_BLOCK, MXFP8, Format, QTensor
from moe_ops.core.ops import register
from moe_ops.quant.dequantize import dequantize
from moe_ops.quant.row_config import RowConfig
from moe_ops.quant.rows import check_rows, device_counts, filled_rows, finish_ref, new_quantized, resolve, row_arguments, rows_ref, write_ref
from moe_ops.quant.weight import quantize_weight

if TYPE_CHECKING:
    from moe_ops.router.routing import Routing

__all__ = ["dequantize", "quantize", "quantize_folded", "quantize_weight"]


def quantize_ref(x: torch.Tensor, counts: torch.Tensor | None, fmt: str, layout: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `quantize`, any device: (bits uint8, scales in `layout`)."""
    data, scale = rows_ref(x, fmt, rule)
    return finish_ref(data, scale, filled_rows(x, counts), layout)


@functools.cache
def _launcher() -> tuple[Any, Any, Any]:
    """Kernel and launch functions: Triton is imported on first use, once."""
    from moe_ops.core.launch import launch, runs_kernels
    from moe_ops.quant.quantize_kernel import _quantize_kernel

    return _quantize_kernel, launch, runs_kernels


def quantize_into(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor | None, fmt: str, rule: str, layout: str = "row_major",
    config: RowConfig | None = None,
) -> None:  # fmt: skip
    """Quantize x into given buffers; allocates nothing on a GPU. The arguments are not checked.

    Args:
        x: (R, K) or (E, capacity, K), bf16, fp16 or fp32, last stride 1.
        data: uint8 of the same shape, last stride 1.
        scale: scales in `layout`; padded layouts need the storage that `scale_storage.new_scale` gives.
        counts: int32 on x's device, or None for all rows: sum(counts) rows of a 2-D x, counts[e] rows of x[e].
        fmt: "fp8_block" or "mxfp8".
        rule: one of the format's rules.
        layout: one of `core.formats.LAYOUTS`.
        config: work sharing, or None for the heuristic's.
    """
    kernel, launch, runs_kernels = _launcher()
    if not runs_kernels(x):
        return write_ref((data, scale), *quantize_ref(x, counts, fmt, layout, rule), filled_rows(x, counts), fmt, layout)
    if data.numel() == 0:
        return None
    grid, args, meta = row_arguments(x, data, scale, counts, fmt, rule, layout, config)
    launch("quantize", kernel, grid, *args, **meta)


def _quantize_triton(
    x: torch.Tensor, counts: torch.Tensor | None, fmt: str, layout: str, rule: str, config: RowConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale = new_quantized(x, tuple(x.shape), fmt, layout)
    quantize_into(x, data, scale, counts, fmt, rule, layout, config)
    return data, scale


def _fake(x: torch.Tensor, counts: torch.Tensor | None, fmt: str, layout: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    return new_quantized(x, tuple(x.shape), fmt, layout)


_op = register("quantize", cuda=_quantize_triton, cpu=quantize_ref, fake=_fake)


def quantize(
    x: torch.Tensor, format: str | Format, *, counts: "torch.Tensor | Routing | None" = None, layout: str | None = None, rule: str | None = None
) -> QTensor:
    """Quantize activations in blocks of 1x128 (fp8_block) or 1x32 (mxfp8) along the last dimension: x ~= data * scale.

    Args:
        x: (M, K) rows, packed rows (R, K), or masked rows (E, capacity, K), bf16, fp16 or fp32, last stride 1: activations. mxfp8 needs K % 32 == 0.
        format: "fp8_block" or "mxfp8".
        counts: (E,) int32 on x's device, or a Routing: how many rows are filled. 2-D x: the first sum(counts) rows (one entry will do);
            3-D x: the first counts[e] rows of x[e]. Counts are clamped to what x holds. None: all rows.
        layout: scale layout, "row_major" (default), "mn_major", "ue8m0_packed" (mxfp8, or fp8_block with rule "pow2") or "swizzle_32x4x4" (mxfp8).
        rule: fp8_block: "fp32" (default) or "pow2"; mxfp8: "rceil" (default), "floor" or "even".

    Returns:
        QTensor of x's shape. Rows that counts do not fill are neither read nor written: on a GPU they hold what the memory held.

    Layout: see `moe_ops.quant.scale_storage`; padding rows and blocks hold zero bytes.

    Numerics: scale = amax / 448 (fp8_block, IEEE division, at least 2^-126, 1 for a zero block) or 2^ceil(log2(amax / 448)) (mxfp8, exactly,
        byte 0 for a zero block); elements round to nearest even and clamp to +-448. amax counts finite values only; an infinity becomes +-448
        and a NaN 0x7f, in their own block alone. Deterministic; the same bytes on CPU and GPU.

    Raises:
        TypeError: x or counts of another dtype.
        ValueError: wrong number of dimensions, last stride, K, format, layout, rule, devices, or an input that requires grad.

    Cost: reads the filled rows once, writes one byte an element and the scales; one launch.

    See also: tests/quant/test_quantize.py, benchmarks/quant/bench_quantize.py.
    """
    f, layout, rule = resolve("quantize", format, layout, rule)
    checks.is_tensor("quantize", "x", x)
    counts = device_counts("quantize", counts, x)
    check_rows("quantize", x, counts)
    if f.name == "mxfp8" and x.shape[-1] % 32:
        raise ValueError(f"quantize: the last dimension of x must be a multiple of 32 for mxfp8, got shape {tuple(x.shape)}")
    data, scale = _op(x, counts, f.name, layout, rule)
    return QTensor(data.view(E4M3), scale, f, f.act_block, layout, rule)


def quantize_folded(x: torch.Tensor, *, counts: "torch.Tensor | Routing | None" = None) -> QTensor:
    """Quantize activations to mxfp8, 1x32, and fold them to one power of two for each 1x128, for weights that `fold_weight` folded.

    Args:
        x: as in `quantize`, with K % 128 == 0.
        counts: as in `quantize`.

    Returns:
        QTensor of format mxfp8 with block (1, 128) and fp32 scales (.., K / 128): the values of `quantize(x, "mxfp8")`, except for elements that
        fall among e4m3's subnormals in their block's unit.

    Raises:
        TypeError, ValueError: as `quantize`, or K % 128 != 0.

    Cost: as `quantize`.

    See also: `moe_ops.quant.fold`; tests/quant/test_fold.py.
    """
    op = "quantize_folded"
    checks.is_tensor(op, "x", x)
    counts = device_counts(op, counts, x)
    check_rows(op, x, counts)
    if x.shape[-1] % 128:
        raise ValueError(f"{op}: the last dimension of x must be a multiple of 128, got shape {tuple(x.shape)}")
    data, scale = _op(x, counts, FP8_BLOCK.name, "row_major", "folded")
    return QTensor(data.view(E4M3), scale, MXFP8, FP8_BLOCK.act_block, "row_major", "rceil")
