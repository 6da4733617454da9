"""Quantization of activations: bf16, fp16 or fp32 rows -> e4m3 rows with a scale for every 1x128 (fp8_block) or 1x32 (mxfp8) block.

The formulas are those of fp8_block.py and mxfp8.py, byte for byte. The scales come in the layout that the consumer reads, written by the
same kernel. `quantize_weight` and `dequantize` live in files of their own and are named here too.
"""

from typing import TYPE_CHECKING, Any

import torch

from moe_ops.core import checks
from moe_ops.core.arch import arch_of
from moe_ops.core.formats import E4M3, LAYOUTS, Format, QTensor, ceil_div, get_format
from moe_ops.core.ops import register
from moe_ops.quant import fp8_block, mxfp8
from moe_ops.quant.row_config import RowConfig, heuristic, is_legal
from moe_ops.quant.scale_storage import kernel_view, layout_reason, new_scale, pack_ref, padded_rows, unpack_ref

if TYPE_CHECKING:
    from moe_ops.router.routing import Routing

__all__ = ["quantize"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def filled_rows(x: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor | None:
    """Bool mask of the rows of x (R, K) or (E, capacity, K) that counts fill, or None for all."""
    if counts is None:
        return None
    rows = x.shape[-2]
    index = torch.arange(rows, device=x.device)
    filled = counts.reshape(-1).clamp(0, rows)
    return index < (filled.sum() if x.dim() == 2 else filled[:, None])


def finish_ref(data: torch.Tensor, scale: torch.Tensor, filled: torch.Tensor | None, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and row-major scales -> what the op returns; rows that are not filled hold zeros (on a GPU they are not written)."""
    if filled is not None:
        data = torch.where(filled.unsqueeze(-1), data, 0)
        scale = torch.where(filled.unsqueeze(-1), scale, 0)
    return data, pack_ref(scale, layout)


def quantize_ref(x: torch.Tensor, counts: torch.Tensor | None, fmt: str, layout: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `quantize`, any device: (bits uint8, scales in `layout`)."""
    data, scale = (fp8_block if fmt == "fp8_block" else mxfp8).quantize_rows_ref(x, rule)
    return finish_ref(data, scale, filled_rows(x, counts), layout)


def write_ref(
    out: tuple[torch.Tensor, torch.Tensor], data: torch.Tensor, scale: torch.Tensor, filled: torch.Tensor | None, fmt: str, layout: str
) -> None:
    """Copy the filled rows of a reference's results into given buffers."""
    if filled is not None:
        blocks = ceil_div(data.shape[-1], get_format(fmt).act_block[1])
        new, old = (unpack_ref(s, layout, data.shape[-2], blocks, fmt) for s in (scale, out[1]))
        data = torch.where(filled.unsqueeze(-1), data, out[0])
        scale = pack_ref(torch.where(filled.unsqueeze(-1), new, old), layout)
    out[0].copy_(data)
    out[1].copy_(scale)


def row_arguments(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor | None, fmt: str, rule: str, layout: str, config: RowConfig | None
) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """Grid, run-time arguments and constants that the row kernels share; data is (rows, K) or (experts, rows, K)."""
    rows, k = data.shape[-2:]
    masked = data.dim() == 3
    experts = data.shape[0] if masked else 1
    group = 128 if fmt == "fp8_block" else 32
    arch = arch_of(x.device)
    if config is None:
        config = heuristic(experts * rows, k, group, arch)
    elif (reason := is_legal(config, group)) is not None:
        raise ValueError(f"quantize: {config} cannot run: {reason}")
    tiles = experts * ceil_div(rows, config.block_r) * ceil_div(k, config.columns)
    scale, stride_se, stride_sm, stride_sb = kernel_view(scale, layout)
    args = (
        x, counts, data, scale, rows, experts, padded_rows(rows, layout) - rows,
        x.stride(0) if masked else 0, x.stride(-2), data.stride(0) if masked else 0, data.stride(-2), stride_se, stride_sm, stride_sb,
    )  # fmt: skip
    meta = {
        "K": k, "GROUP": group, "RULE": rule, "LAYOUT": layout,
        "COUNTS": "all" if counts is None else "masked" if masked else "packed", "NUM_COUNTS": 0 if counts is None else counts.numel(),
        "BLOCK_R": config.block_r, "GROUPS": config.columns // group, "num_warps": config.warps, "enable_fp_fusion": False,
    }  # fmt: skip
    return (min(tiles, arch.sms * config.programs),), args, meta


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
    from moe_ops.core.launch import can_launch, launch
    from moe_ops.quant.quantize_kernel import _quantize_kernel

    if not can_launch(_quantize_kernel, x.device):
        return write_ref((data, scale), *quantize_ref(x, counts, fmt, layout, rule), filled_rows(x, counts), fmt, layout)
    grid, args, meta = row_arguments(x, data, scale, counts, fmt, rule, layout, config)
    launch("quantize", _quantize_kernel, grid, *args, **meta)


def new_quantized(like: torch.Tensor, shape: tuple[int, ...], fmt: str, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (data uint8, scales in `layout`) for an activation of `shape` on the device of `like`."""
    block = 128 if fmt == "fp8_block" else 32
    scale_dtype = torch.float32 if fmt == "fp8_block" else torch.uint8
    return like.new_empty(shape, dtype=torch.uint8), new_scale(like, shape[:-2], shape[-2], ceil_div(shape[-1], block), scale_dtype, layout)


def _quantize_triton(
    x: torch.Tensor, counts: torch.Tensor | None, fmt: str, layout: str, rule: str, config: RowConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale = new_quantized(x, tuple(x.shape), fmt, layout)
    quantize_into(x, data, scale, counts, fmt, rule, layout, config)
    return data, scale


def _fake(x: torch.Tensor, counts: torch.Tensor | None, fmt: str, layout: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    return new_quantized(x, tuple(x.shape), fmt, layout)


_op = register("quantize", cuda=_quantize_triton, cpu=quantize_ref, fake=_fake)


def resolve(op: str, fmt: str | Format, layout: str | None, rule: str | None) -> tuple[Format, str, str]:
    """Descriptor, layout and rule of a call, checked against each other."""
    f = get_format(fmt, op)
    rule = f.rules[0] if rule is None else rule
    layout = "row_major" if layout is None else layout
    if rule not in f.rules:
        checks.one_of(op, f"rule of {f.name}", rule, f.rules)
    if layout not in LAYOUTS:
        checks.one_of(op, "layout", layout, LAYOUTS)
    reason = layout_reason(f.name, rule, layout)
    if reason is not None:
        raise ValueError(f"{op}: {reason}")
    return f, layout, rule


def device_counts(op: str, counts: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The counts tensor that kernels read, from what the user gave: None, a tensor, or a Routing."""
    if counts is None:
        return None
    if not isinstance(counts, torch.Tensor):
        if not hasattr(counts, "offsets"):
            raise TypeError(f"{op}: counts must be an int32 tensor, a Routing or None, got {type(counts).__name__}")
        counts = counts.offsets[-1:] if x.dim() == 2 else counts.counts
    checks.device_counts(op, "counts", counts, x.shape[0] if x.dim() == 3 else None)
    return counts


def check_rows(op: str, x: torch.Tensor, counts: torch.Tensor | None) -> None:
    """What every quantizer of rows demands of its input."""
    checks.is_tensor(op, "x", x)
    checks.dtype(op, "x", x, _DTYPES)
    checks.ndim(op, "x", x, (2, 3))
    checks.last_stride_one(op, "x", x)
    checks.no_grad(op, x=x)
    checks.same_device(op, x=x, counts=counts)


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

    Numerics: scale = amax / 448 (fp8_block, IEEE division, at least 2^-126, 1 for a zero block) or 2^ceil(log2(amax / 448)) (mxfp8, exactly, byte 0 for a
        zero block); elements round to nearest even and clamp to +-448. amax counts finite values only; an infinity becomes +-448 and a NaN 0x7f,
        in their own block alone. Deterministic; the same bytes on CPU and GPU.

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
