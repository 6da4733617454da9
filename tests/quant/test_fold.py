"""MXFP8 folded to 128-wide scales: the kernel equals its definition byte for byte, and the values are MXFP8's."""

import math

import pytest
import torch

from moe_ops import dequantize, grouped_gemm, quantize, quantize_weight
from moe_ops.core.numerics import decode_e8m0, relative_error, uneven
from moe_ops.quant.fold import MAX_ROW, MAX_TENSOR, fold_rows_ref, fold_weight, is_folded
from moe_ops.quant.quantize import quantize_folded, quantize_into
from moe_ops.quant.scale_layout import to_layout
from moe_ops.quant.silu_mul_quantize import silu_mul_quantize_into, silu_mul_quantize_ref


def unfolded(bits, scale):
    return bits.view(torch.float8_e4m3fn).double() * scale.double().repeat_interleave(128, -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows,k", [(1, 128), (5, 384), (3, 2048)])
def test_rows_kernel_equals_definition(device, rows, k, dtype):
    x = uneven((rows, k), seed=rows, dtype=dtype).to(device)
    if dtype == torch.float32:
        x[0, :32] = 0.0
        x[0, 40], x[0, 70], x[0, 100] = float("inf"), float("nan"), 1e-38
    bits, scale = torch.empty(rows, k, dtype=torch.uint8, device=device), torch.empty(rows, k // 128, device=device)
    quantize_into(x, bits, scale, None, "fp8_block", "folded")
    want = fold_rows_ref(x)
    assert torch.equal(bits, want[0]) and torch.equal(scale, want[1])


def test_folded_rows_hold_the_values_of_1x32():
    x = uneven((64, 1024), seed=1, spread=3)
    assert relative_error(unfolded(*fold_rows_ref(x)), dequantize(quantize(x, "mxfp8"))) < 1e-5
    # another format: quantizing straight to 1x128 is not the same
    assert relative_error(dequantize(quantize(x, "fp8_block")), dequantize(quantize(x, "mxfp8"))) > 1e-2


def test_folded_activations_meet_folded_weights(device):
    """The product of what `quantize_folded` and `fold_weight` return is the product of the 1x32 values."""
    x, w = uneven((12, 256), seed=1).to(device), quantize_weight(uneven((2, 256, 256), seed=2).to(device), "mxfp8")
    folded, report = fold_weight(w)
    a = quantize_folded(x)
    assert report.folded and is_folded(a) and a.block == (1, 128)
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    exact = grouped_gemm(quantize(x, "mxfp8"), w, offsets, out_dtype=torch.float32)
    assert relative_error(grouped_gemm(a, folded, offsets, out_dtype=torch.float32), exact) < 5e-4
    with pytest.raises(ValueError, match="quantize_folded: the last dimension of x must be a multiple of 128"):
        quantize_folded(x[:, :96])


def test_hand_worked_block():
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 32], x[0, 64] = 448.0, 28.0, 0.4375  # bytes 127, 123, 117 and 0: q = 448 in the first three blocks
    bits, scale = fold_rows_ref(x)
    assert scale.tolist() == [[1.0]]
    assert [int(bits[0, c]) for c in (0, 32, 64, 96)] == [0x7E, 0x5E, 0x2E, 0x00]  # 448, 28, 0.4375, 0 in units of 1.0


@pytest.mark.parametrize("form", [("silu", 1.0, math.inf, 0.0), ("silu", 1.702, 7.0, 1.0)], ids=["silu", "gpt-oss"])
def test_activation_kernel_equals_definition(device, form):
    x = uneven((6, 512), seed=3, dtype=torch.float32).to(device)
    bits, scale = torch.empty(6, 256, dtype=torch.uint8, device=device), torch.empty(6, 2, device=device)
    silu_mul_quantize_into(x, bits, scale, None, "fp8_block", "folded", *form, False)
    want = silu_mul_quantize_ref(x, None, "fp8_block", "row_major", "folded", *form, False)
    assert torch.equal(scale, want[1])
    assert (bits != want[0]).float().mean() <= 2e-3  # an exponential stands before the rounding
    assert relative_error(unfolded(bits, scale), unfolded(*want)) < 2e-3


@pytest.mark.parametrize("shape,segments", [((256, 256), 1), ((3, 384, 128), 2), ((2, 320, 256), 1)], ids=["2-D", "gate and up apart", "ragged N"])
def test_weights_fold_with_their_values(device, shape, segments):
    w = uneven(shape, block=(128, 128), seed=4, spread=2).to(device)
    q = quantize_weight(w, "mxfp8")
    folded, report = fold_weight(q, segments=segments)
    assert report.folded and is_folded(folded) and folded.block == (128, 128) and folded.segments == segments
    assert report.row_error <= MAX_ROW and report.tensor_error <= MAX_TENSOR
    assert relative_error(dequantize(folded), dequantize(q)) <= MAX_TENSOR


def test_weights_that_would_lose_values_stay_as_they_are():
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    w[5] *= 2.0**-20  # one row far below its tile: its elements would become zero
    q = quantize_weight(w.to(torch.bfloat16), "mxfp8")
    same, report = fold_weight(q)
    assert same is q and not report.folded and report.row_error > 0.5 and report.tensor_error < 1e-3
    same, report = fold_weight(quantize_weight(torch.ones(64, 96, dtype=torch.bfloat16), "mxfp8"))
    assert not report.folded and math.isinf(report.row_error)


def test_folded_scales_convert_as_the_fp32_scales_they_are():
    folded, _ = fold_weight(quantize_weight(uneven((256, 256), block=(128, 128), seed=4, spread=1), "mxfp8"))
    moved = to_layout(folded, "mn_major")
    assert (
        moved.scale.dtype == torch.float32
        and torch.equal(moved.scale, folded.scale)
        and torch.equal(to_layout(moved, "row_major").scale, folded.scale)
    )
    with pytest.raises(ValueError, match="to_layout: .*swizzle_32x4x4"):
        to_layout(folded, "swizzle_32x4x4")


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"fold_weight: q must be an mxfp8 weight with 1x32 blocks"):
        fold_weight(quantize_weight(torch.ones(128, 128, dtype=torch.bfloat16), "fp8_block"))
    with pytest.raises(TypeError, match="fold_weight: q must be a QTensor, got Tensor"):
        fold_weight(torch.ones(4, 128))
    with pytest.raises(ValueError, match="129 rows do not divide into 2 segments"):
        fold_weight(quantize_weight(torch.ones(129, 128, dtype=torch.bfloat16), "mxfp8"), segments=2)


def test_zero_block_and_smallest_scale():
    bits, scale = fold_rows_ref(torch.zeros(1, 128))
    assert float(scale) == float(decode_e8m0(torch.tensor([0], dtype=torch.uint8))) and not bits.any()
