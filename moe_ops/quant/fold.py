"""MXFP8 folded to wider blocks, for tensor cores that apply scales every 128 of K (Hopper).

A product with a scale for each 1x32 on both operands must leave the tensor core four times as often; with one power of two for each 1x128
(activations) and each 128x128 (weights) it runs at the speed of fp8_block. Folding keeps MXFP8's values: elements move by the difference of
two exponents, exactly, unless they fall among e4m3's subnormals. What that costs is measured for every weight at load, and a
weight that would lose more than `MAX_ROW` and `MAX_TENSOR` stays as it is.

    activation   quantized 1x32 (rceil), then q * 2^(byte - top) for the largest byte `top` of 1x128, scale 2^(top - 127) in fp32
    weight       the same with `top` over a 128x128 tile, once, at load
"""

from dataclasses import dataclass, replace

import torch

from moe_ops.core import checks
from moe_ops.core.formats import FP8_BLOCK, MXFP8, QTensor, ceil_div
from moe_ops.core.numerics import decode_e8m0
from moe_ops.quant import mxfp8
from moe_ops.quant.fp8_block import e4m3_bits

__all__ = ["FoldReport", "fold_weight", "is_folded"]

#: ||folded - w|| / ||w|| that a row, and the whole tensor, may lose at most.
MAX_ROW = 1e-4
MAX_TENSOR = 1e-5


@dataclass(frozen=True)
class FoldReport:
    """What folding a weight did.

    Attributes:
        folded: whether the errors allow it.
        row_error: largest relative error of one row against the unfolded values.
        tensor_error: relative error of the whole tensor.
    """

    folded: bool
    row_error: float
    tensor_error: float


def is_folded(q: QTensor) -> bool:
    """Whether q holds mxfp8 values under scales of 128 columns."""
    return q.format is MXFP8 and q.block[1] == 128


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32 for exponents of at most 0, exactly; below 2^-127, where every element rounds to zero, 2^-127."""
    return decode_e8m0((exponent + 127).clamp(min=0).to(torch.uint8))


def fold_rows_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition for activations: x (.., K), K % 128 == 0 -> bits uint8 (.., K), scales fp32 (.., K / 128)."""
    bits, byte = mxfp8.quantize_rows_ref(x, "rceil")
    byte = byte.unflatten(-1, (x.shape[-1] // 128, 4)).to(torch.int32)
    top = byte.amax(-1, keepdim=True)
    values = bits.view(torch.float8_e4m3fn).float().unflatten(-1, (x.shape[-1] // 128, 4, 32))
    folded = values * _power(byte - top).unsqueeze(-1)
    return e4m3_bits(folded.flatten(-3)), decode_e8m0(top.squeeze(-1).to(torch.uint8))


def fold_weight(q: QTensor, *, segments: int = 1, max_row: float = MAX_ROW, max_tensor: float = MAX_TENSOR) -> tuple[QTensor, FoldReport]:
    """Fold an mxfp8 weight to 128x128 scales where that keeps its values; at load time, because it reads the errors on the host.

    Args:
        q: weight (N, K) or (E, N, K), format mxfp8, blocks 1x32, row_major scales; K % 128 == 0.
        segments: equal parts of N that fold apart: 2 for w13, whose gate and up rows may share no tile.
        max_row: relative error that a row may lose at most.
        max_tensor: relative error that the tensor may lose at most.

    Returns:
        (folded, report): a QTensor of the same shape with block (128, 128) and fp32 scales, or q itself where the report says
        `folded=False` (K off the grid gives that too, with errors of infinity).

    Raises:
        TypeError, ValueError: not an mxfp8 weight with 1x32 blocks, or N that does not divide into segments.

    Source: exponents fold exactly because e4m3 has 4 bits of exponent and MX tensors rarely spread further within a tile.
    """
    op = "fold_weight"
    if not isinstance(q, QTensor):
        raise TypeError(f"{op}: q must be a QTensor, got {type(q).__name__}")
    if q.format is not MXFP8 or q.block != MXFP8.weight_block or q.layout != "row_major":
        raise ValueError(f"{op}: q must be an mxfp8 weight with 1x32 blocks and row_major scales, got {q}")
    *lead, n, k = q.shape
    checks.int_range(op, "segments", segments, 1, 2)
    if n % segments:
        raise ValueError(f"{op}: {n} rows do not divide into {segments} segments")
    if k % 128:
        return q, FoldReport(False, float("inf"), float("inf"))
    per, tiles = n // segments, ceil_div(n // segments, 128)
    experts = q.data.reshape(-1, n, k)
    bytes_ = q.scale.reshape(-1, n, k // 32)
    data = torch.empty_like(experts)
    scale = torch.empty((experts.shape[0], segments * tiles, k // 128), dtype=torch.float32, device=q.device)
    worst = torch.zeros((), device=q.device)
    lost, whole = torch.zeros((), dtype=torch.float64, device=q.device), torch.zeros((), dtype=torch.float64, device=q.device)
    for e in range(experts.shape[0]):  # expert by expert: the fp32 copies stay small
        byte = bytes_[e].to(torch.int32)
        row_top = byte.unflatten(-1, (k // 128, 4)).amax(-1)
        padded = torch.nn.functional.pad(row_top.view(segments, per, k // 128), (0, 0, 0, tiles * 128 - per))
        top = padded.view(segments, tiles, 128, k // 128).amax(2).view(segments * tiles, k // 128)
        spread = top.view(segments, tiles, k // 128).repeat_interleave(128, 1)[:, :per].reshape(n, k // 128)
        shift = _power(byte - spread.repeat_interleave(4, -1)).repeat_interleave(32, -1)
        values = experts[e].float()
        bits = e4m3_bits(values * shift)
        data[e] = bits.view(torch.float8_e4m3fn)
        scale[e] = decode_e8m0(top.to(torch.uint8))
        # errors in units of each tile's own scale would hide the small rows' share: compare the real values
        unit = decode_e8m0(byte.to(torch.uint8)).repeat_interleave(32, -1).double()
        true = values.double() * unit
        diff = bits.view(torch.float8_e4m3fn).double() * decode_e8m0(spread.to(torch.uint8)).repeat_interleave(128, -1).double() - true
        norm2, diff2 = true.square().sum(-1), diff.square().sum(-1)
        worst = torch.maximum(worst, torch.where(norm2 > 0, diff2 / norm2, 0).amax().float())
        lost += diff2.sum()
        whole += norm2.sum()
    report_row, report_tensor = float(worst.sqrt()), float((lost / whole.clamp(min=1e-300)).sqrt())
    if not (report_row <= max_row and report_tensor <= max_tensor):
        return q, FoldReport(False, report_row, report_tensor)
    folded = replace(q, data=data.reshape(q.shape), scale=scale.reshape(*lead, *scale.shape[1:]), block=FP8_BLOCK.weight_block, segments=segments)
    return folded, FoldReport(True, report_row, report_tensor)
