"""What the quantizers of rows share on the host: which rows are filled, buffers, kernel arguments, checks."""

from typing import Any

import torch

from moe_ops.core import checks
from moe_ops.core.arch import arch_of
from moe_ops.core.formats import LAYOUTS, Format, ceil_div, get_format
from moe_ops.quant import fp8_block, mxfp8
from moe_ops.quant.fold import fold_rows_ref
from moe_ops.quant.row_config import RowConfig, heuristic, is_legal
from moe_ops.quant.scale_storage import kernel_view, layout_reason, new_scale, pack_ref, padded_rows, unpack_ref

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_ref(x: torch.Tensor, fmt: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-major (bits uint8, scales) of x under a format's rule; rule "folded" of fp8_block is mxfp8 folded to 1x128, see fold.py."""
    if rule == "folded":
        return fold_rows_ref(x)
    return (fp8_block if fmt == "fp8_block" else mxfp8).quantize_rows_ref(x, rule)


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
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor | None, fmt: str, rule: str, layout: str,
    config: RowConfig | None, block_r: int = 4,
) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Grid, run-time arguments and constants that the row kernels share; data is (rows, K) or (experts, rows, K)."""
    rows, k = data.shape[-2:]
    masked = data.dim() == 3
    experts = data.shape[0] if masked else 1
    group = 128 if fmt == "fp8_block" else 32
    arch = arch_of(x.device)
    if config is None:
        config = heuristic(experts * rows, k, arch, block_r)
    elif (reason := is_legal(config, group)) is not None:
        raise ValueError(f"quantize: {config} cannot run: {reason}")
    tiles = experts * ceil_div(rows, config.block_r) * ceil_div(k, config.columns)
    scale, stride_se, stride_sm, stride_sb = kernel_view(scale, layout)
    args = (
        x, counts, data, scale, rows, experts, padded_rows(rows, layout) - rows,
        x.stride(0) if masked else 0, x.stride(-2), data.stride(0) if masked else 0, data.stride(-2), stride_se, stride_sm, stride_sb,
    )  # fmt: skip
    filled = ("all" if masked else "run") if counts is None else "masked" if masked else "packed"
    meta = {
        "K": k, "GROUP": group, "RULE": rule, "LAYOUT": layout,
        "COUNTS": filled, "NUM_COUNTS": 0 if counts is None else counts.numel(),
        "BLOCK_R": config.block_r, "GROUPS": config.columns // group, "num_warps": config.warps, "enable_fp_fusion": False,
    }  # fmt: skip
    return (min(tiles, arch.sms * config.programs),), args, meta


def new_quantized(like: torch.Tensor, shape: tuple[int, ...], fmt: str, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (data uint8, scales in `layout`) for an activation of `shape` on the device of `like`."""
    block = 128 if fmt == "fp8_block" else 32
    scale_dtype = torch.float32 if fmt == "fp8_block" else torch.uint8
    return like.new_empty(shape, dtype=torch.uint8), new_scale(like, shape[:-2], shape[-2], ceil_div(shape[-1], block), scale_dtype, layout)


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
    """What every quantizer of rows demands of its input, a tensor."""
    if x.dtype not in DTYPES or not 2 <= x.dim() <= 3 or x.stride(-1) != 1 or x.requires_grad:  # then one of these says what, if it is wrong
        checks.dtype(op, "x", x, DTYPES)
        checks.ndim(op, "x", x, (2, 3))
        checks.last_stride_one(op, "x", x)
        checks.no_grad(op, x=x)
    checks.same_device(op, x=x, counts=counts)
