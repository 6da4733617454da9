"""The fast quantizer of the CPU writes the bytes of the definition, tile by tile, for every rule, dtype and special value."""

import pytest
import torch

from moe_ops.core.formats import as_bytes
from moe_ops.core.numerics import uneven
from moe_ops.quant import weight_cpu
from moe_ops.quant.dequantize import dequantize_ref
from moe_ops.quant.quantize import dequantize, quantize_weight
from moe_ops.quant.weight_cpu import WeightQuantizer, quantize_weight_cpu

RULES = [("mxfp8", "rceil"), ("mxfp8", "floor"), ("mxfp8", "even"), ("fp8_block", "fp32"), ("fp8_block", "pow2")]


def same(w, fmt, **options):
    a, b = quantize_weight_cpu(w, fmt, **options), quantize_weight(w, fmt, **options)
    assert torch.equal(as_bytes(a.data), as_bytes(b.data))
    assert torch.equal(a.scale, b.scale) and a.scale.dtype == b.scale.dtype
    assert (a.format, a.block, a.layout, a.rule, a.segments) == (b.format, b.block, b.layout, b.rule, b.segments)


def awkward(dtype):
    """Rows of zeros, of the smallest and largest numbers, of exact ties and block maxima at the edges of the rules."""
    w = uneven((160, 1088), seed=1, dtype=torch.float32, spread=8)
    w[0] = 0.0
    w[1] = -0.0
    top = 6.0e4 if dtype == torch.float16 else 3.0e38
    w[2, ::3], w[3, 5] = top, -top
    w[4] = torch.linspace(-1, 1, 1088) * (2.0**-14 if dtype == torch.float16 else 2.0**-126)
    w[5] = 1.0e-45 if dtype == torch.float32 else w[4]
    for i, amax in enumerate((448.0, 449.0, 480.0, 500.0, 896.0, 1.9999999, 0.3, 464.0)):
        w[6 + i, 0::32] = amax
        w[6 + i, 1::32] = amax / 448 * 17 / 16  # half way between two codes
        w[6 + i, 2::32] = amax / 448 * 2.0**-10  # half of the smallest one
    return w.to(dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("seed", (None, 3), ids=("nearest", "stochastic"))
@pytest.mark.parametrize(("fmt", "rule"), RULES)
def test_bytes_are_those_of_the_definition(fmt, rule, dtype, seed):
    same(awkward(dtype), fmt, rule=rule, stochastic_seed=seed, name="a.weight")


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("seed", (None, 3), ids=("nearest", "stochastic"))
@pytest.mark.parametrize("fmt", ("mxfp8", "fp8_block"))
def test_special_values_stay_in_their_block_and_are_reported(fmt, seed, value):
    w = uneven((256, 256), seed=2)
    w[130, 40] = value
    same(w, fmt, stochastic_seed=seed)
    data, scale = torch.empty(256, 256, dtype=torch.uint8), quantize_weight(w, fmt).scale.clone()
    assert WeightQuantizer(fmt, measure=True)(w, data, scale).not_finite
    assert not WeightQuantizer(fmt, measure=True)(w[:128], data[:128], scale[: scale.shape[0] // 2]).not_finite


@pytest.mark.parametrize("shape", ((0, 64), (1, 32), (576, 96), (129, 2080), (3, 131104), (2, 131, 160)), ids=str)
@pytest.mark.parametrize("seed", (None, 5), ids=("nearest", "stochastic"))
@pytest.mark.parametrize("fmt", ("mxfp8", "fp8_block"))
def test_shapes(fmt, seed, shape):
    same(uneven(shape, seed=4), fmt, stochastic_seed=seed, name="b")


def test_ragged_columns_of_fp8_block():
    same(uneven((130, 1025), seed=4), "fp8_block")


def test_segments_and_strided_rows():
    w = uneven((2, 2 * 100, 192), seed=6)
    same(w, "fp8_block", segments=2)
    assert torch.equal(as_bytes(quantize_weight_cpu(w[0, ::2], "mxfp8").data), as_bytes(quantize_weight(w[0, ::2].contiguous(), "mxfp8").data))
    turned = quantize_weight_cpu(w[0].T[:192].contiguous().T, "mxfp8")
    assert torch.equal(as_bytes(turned.data), as_bytes(quantize_weight(w[0], "mxfp8").data))


@pytest.mark.parametrize("start", (2**31 - 70, 2**32 - 70, 2**32 + 5), ids=("int32's sign", "upper half changes", "upper half set"))
def test_random_numbers_far_into_a_tensor(start):
    from moe_ops.quant.stochastic import key_of, stochastic_bits

    w, key = uneven((4, 64), seed=7), key_of(9, "c")
    data, scale = torch.empty(4, 64, dtype=torch.uint8), torch.empty(4, 2, dtype=torch.uint8)
    WeightQuantizer("mxfp8")(w, data, scale, key=key, first=start)
    values = weight_cpu.mxfp8.values_ref(w, "rceil")[0]
    assert torch.equal(data, stochastic_bits(values, start + torch.arange(256).view(4, 64), key))


@pytest.mark.parametrize(("fmt", "rule"), RULES)
@pytest.mark.parametrize("size", (1.0, 1e30, 1e-30))
def test_sums_measure_the_error(fmt, rule, size):
    w = uneven((256, 512), seed=8, dtype=torch.float32) * size
    data, q = torch.empty(256, 512, dtype=torch.uint8), quantize_weight(w, fmt, rule=rule)
    sums = WeightQuantizer(fmt, rule, measure=True)(w, data, torch.empty_like(q.scale))
    x, y = w.double(), dequantize(q).double()
    for found, wanted in ((sums.signal, x.square().sum()), (sums.noise, (x - y).square().sum()), (sums.result, y.square().sum())):
        assert found == pytest.approx(float(wanted), rel=1e-4)
    assert sums.count == w.numel() and not sums.not_finite


@pytest.mark.parametrize("shape", ((0, 64), (1, 32), (300, 96), (129, 1088)), ids=str)
@pytest.mark.parametrize("fmt", ("mxfp8", "fp8_block"))
def test_rows_are_dequantized_to_the_same_values(fmt, shape):
    q = quantize_weight(uneven(shape, seed=9), fmt)
    assert torch.equal(weight_cpu.dequantize_rows_cpu(as_bytes(q.data), q.scale, fmt), dequantize(q))


def test_every_byte_under_every_scale_is_dequantized_to_the_same_value():
    data = torch.arange(256, dtype=torch.uint8)
    data[data & 0x7F == 0x7F] = 0  # NaN
    for fmt, scale in (("mxfp8", torch.arange(255, dtype=torch.uint8).view(-1, 1).expand(-1, 8)), ("fp8_block", torch.tensor([[2.0**-126, 3.0e38]]))):
        rows = data.expand(scale.shape[0], 256).contiguous()
        wanted = dequantize_ref(rows, scale.contiguous(), fmt, 1 if fmt == "mxfp8" else 128, 1, torch.float32)
        assert torch.equal(weight_cpu.dequantize_rows_cpu(rows, scale.contiguous(), fmt), wanted)
