"""SiLU * up fused with quantization: h = f(gate) * up in fp32, then e4m3 rows with a scale for every 1x128 or 1x32 block of h.

The activation between the two GEMMs of an expert. A fixed number of programs reads the routed counts and shares the filled rows, in tiles
of 1024 output columns, so that cost follows the filled rows and not the capacity.
"""

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from moe_ops.core import checks
from moe_ops.core.formats import E4M3, Format, QTensor
from moe_ops.core.ops import register
from moe_ops.quant.activation import Activation, activation_ref, lowest_gate
from moe_ops.quant.row_config import RowConfig
from moe_ops.quant.rows import check_rows, device_counts, filled_rows, finish_ref, new_quantized, resolve, row_arguments, rows_ref, write_ref

if TYPE_CHECKING:
    from moe_ops.router.routing import Routing

__all__ = ["silu_mul_quantize"]

_SILU = Activation()


def silu_mul_quantize_ref(
    x: torch.Tensor, counts: torch.Tensor | None, fmt: str, layout: str, rule: str, act_kind: str, alpha: float, limit: float, up_offset: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Reference of `silu_mul_quantize`, any device: (bits uint8 (.., I), scales in `layout`)."""
    act = Activation(act_kind, alpha, None if math.isinf(limit) else limit, up_offset, interleaved)
    data, scale = rows_ref(activation_ref(x, act), fmt, rule)
    return finish_ref(data, scale, filled_rows(x, counts), layout)


@functools.cache
def _launcher() -> tuple[Any, Any, Any]:
    """Kernel and launch functions: Triton is imported on first use, once."""
    from moe_ops.core.launch import launch, runs_kernels
    from moe_ops.quant.silu_mul_quantize_kernel import _silu_mul_quantize_kernel

    return _silu_mul_quantize_kernel, launch, runs_kernels


def silu_mul_quantize_into(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor | None, fmt: str, rule: str, act_kind: str, alpha: float,
    limit: float, up_offset: float, interleaved: bool, layout: str = "row_major", config: RowConfig | None = None,
) -> None:  # fmt: skip
    """Compute and quantize into given buffers; allocates nothing on a GPU. The arguments are not checked.

    Args:
        x: (R, 2I) or (E, capacity, 2I), fp32, bf16 or fp16, last stride 1.
        data: uint8 (.., I), last stride 1.
        scale: scales in `layout`; padded layouts need the storage that `scale_storage.new_scale` gives.
        counts: int32 on x's device, or None for all rows: sum(counts) rows of a 2-D x, counts[e] rows of x[e].
        fmt: "fp8_block" or "mxfp8".
        rule: one of the format's rules.
        act_kind: `Activation.kind`; alpha, up_offset and interleaved follow it, and limit is `Activation.limit_or_inf`.
        layout: one of `core.formats.LAYOUTS`.
        config: work sharing, or None for the heuristic's.
    """
    kernel, launch, runs_kernels = _launcher()
    if not runs_kernels(x):
        result = silu_mul_quantize_ref(x, counts, fmt, layout, rule, act_kind, alpha, limit, up_offset, interleaved)
        return write_ref((data, scale), *result, filled_rows(x, counts), fmt, layout)
    if data.numel() == 0:
        return None
    # splitting interleaved pairs takes more registers, so fewer rows at once
    grid, args, meta = row_arguments(x, data, scale, counts, fmt, rule, layout, config, block_r=2 if interleaved else 4)
    lowest = lowest_gate(act_kind, alpha)
    if act_kind == "silu" and alpha == 1.0 and limit == math.inf and up_offset == 0.0:
        act_kind = "plain_silu"
    launch(
        "silu_mul_quantize", kernel, grid, *args, alpha, lowest, limit, up_offset,
        KIND=act_kind, INTERLEAVED=interleaved, **meta,
    )  # fmt: skip


def _out_shape(x: torch.Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2)


def _silu_mul_quantize_triton(
    x: torch.Tensor, counts: torch.Tensor | None, fmt: str, layout: str, rule: str, act_kind: str, alpha: float, limit: float, up_offset: float,
    interleaved: bool, config: RowConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    data, scale = new_quantized(x, _out_shape(x), fmt, layout)
    silu_mul_quantize_into(x, data, scale, counts, fmt, rule, act_kind, alpha, limit, up_offset, interleaved, layout, config)
    return data, scale


def _fake(
    x: torch.Tensor, counts: torch.Tensor | None, fmt: str, layout: str, rule: str, act_kind: str, alpha: float, limit: float, up_offset: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return new_quantized(x, _out_shape(x), fmt, layout)


_op = register("silu_mul_quantize", cuda=_silu_mul_quantize_triton, cpu=silu_mul_quantize_ref, fake=_fake)


def silu_mul_quantize(
    x: torch.Tensor, format: str | Format, *, act: Activation = _SILU, counts: "torch.Tensor | Routing | None" = None, layout: str | None = None,
    rule: str | None = None,
) -> QTensor:  # fmt: skip
    """Gated activation and quantization in one pass: f(gate) * up in fp32, then blocks of 1x128 (fp8_block) or 1x32 (mxfp8).

    Args:
        x: (R, 2I) or (E, capacity, 2I), fp32, bf16 or fp16, last stride 1: GEMM1's output, gate columns then up columns, or interleaved as
            `act` says. mxfp8 needs I % 32 == 0.
        format: "fp8_block" or "mxfp8".
        act: which activation; default silu(gate) * up.
        counts: (E,) int32 on x's device, or a Routing: how many rows are filled. 2-D x: the first sum(counts) rows (one entry will do);
            3-D x: the first counts[e] rows of x[e]. Counts are clamped to what x holds. None: all rows.
        layout: scale layout, as for `quantize`.
        rule: scale rule, as for `quantize`.

    Returns:
        QTensor (.., I). Rows that counts do not fill are neither read nor written: on a GPU they hold what the memory held.

    Layout: see `moe_ops.quant.scale_storage`; padding rows and blocks hold zero bytes.

    Numerics: the activation is computed in fp32 and never rounded before quantization, which follows `quantize` exactly. Against the
        reference, scales agree within 2 ulp (1 in 10^3 within 4: the exponential) and data within one e4m3 step in at most 1 of 10^4
        elements. Deterministic.

    Raises:
        TypeError: x or counts of another dtype, or act that is no Activation.
        ValueError: an odd last dimension, wrong number of dimensions, last stride, I, format, layout, rule, devices, or an input that requires grad.

    Cost: reads the filled rows once (2I elements each), writes I bytes and the scales; one launch.

    See also: tests/quant/test_silu_mul_quantize.py, benchmarks/quant/bench_silu_mul_quantize.py.
    """
    f, layout, rule = resolve("silu_mul_quantize", format, layout, rule)
    checks.is_tensor("silu_mul_quantize", "x", x)
    counts = device_counts("silu_mul_quantize", counts, x)
    check_rows("silu_mul_quantize", x, counts)
    if not isinstance(act, Activation):
        raise TypeError(f"silu_mul_quantize: act must be an Activation, got {type(act).__name__}")
    if x.shape[-1] % 2:
        raise ValueError(f"silu_mul_quantize: the last dimension of x must be even (gate and up), got shape {tuple(x.shape)}")
    if f.name == "mxfp8" and x.shape[-1] % 64:
        raise ValueError(f"silu_mul_quantize: half the last dimension of x must be a multiple of 32 for mxfp8, got shape {tuple(x.shape)}")
    data, scale = _op(x, counts, f.name, layout, rule, act.kind, act.alpha, act.limit_or_inf, act.up_offset, act.interleaved)
    return QTensor(data.view(E4M3), scale, f, f.act_block, layout, rule)
