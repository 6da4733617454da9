"""The definitions of fp8_block and mxfp8 against hand-worked blocks and independent formulas (fp64, integers), without any kernel."""

import math

import pytest
import torch

from moe_ops.core.numerics import decode_e8m0
from moe_ops.quant import fp8_block, mxfp8

F32 = torch.float32


def bits_of(values):
    return torch.tensor(values, dtype=torch.int32).view(F32)


def power_of_two(k):
    return (2.0 ** k.double()).float()


def e4m3_by_hand(value: float) -> int:
    """e4m3 code of a finite value: nearest of the 127 magnitudes, ties to the even code, saturating."""
    code = torch.arange(127, dtype=torch.uint8)
    grid = code.view(torch.float8_e4m3fn).double().tolist()
    best = min(range(127), key=lambda i: (abs(grid[i] - abs(value)), i & 1))
    return best | (0x80 if math.copysign(1.0, value) < 0 else 0)


def test_cast_saturates_and_has_one_nan():
    """CAST: 464 is the last value that rounds to 448; beyond it some stacks give NaN."""
    x = torch.tensor([464.0, 465.0, 1e9, -1e9, 448.00003, math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0])
    assert fp8_block.e4m3_bits(x).tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x00, 0x80]


def test_cast_rounds_to_nearest_even_at_every_tie_and_next_to_it():
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (grid[1:] + grid[:-1]) / 2
    around = torch.cat([ties, torch.nextafter(ties, torch.tensor(math.inf)), torch.nextafter(ties, torch.tensor(0.0)), grid])
    around = torch.cat([around, -around])
    assert fp8_block.e4m3_bits(around).tolist() == [e4m3_by_hand(v) for v in around.tolist()]


def test_fp8_block_by_hand():
    x = torch.zeros(1, 256)
    x[0, :4] = torch.tensor([896.0, 1.0, -3.0, 2.0])
    data, scale = fp8_block.quantize_rows_ref(x, "fp32")
    assert scale.tolist() == [[2.0, 1.0]]  # 896 / 448, and a block of zeros
    assert data[0, :4].tolist() == [0x7E, 0x30, 0xBC, 0x38]  # 448, 0.5, -1.5, 1
    assert not data[0, 4:].any()


def test_scale_of_tiny_and_zero_blocks_stays_a_normal_number():
    """SCALE: no 0 / 0, no subnormal scale whose reciprocal overflows, no half-precision scale."""
    tiny = bits_of([0, 1, 0x00800000, 0x7F7FFFFF])
    scale = fp8_block.block_scale(tiny, "fp32")
    assert scale.tolist() == [1.0, 2.0**-126, 2.0**-126, float(tiny[3]) / 448]
    for dtype in (torch.float16, torch.bfloat16):
        data, scale = fp8_block.quantize_rows_ref(torch.tensor([[0.0, 0.0, 0.1, 0.1]], dtype=dtype), "fp32")
        assert scale.dtype == F32 and data.tolist() == [[0, 0, 0x7E, 0x7E]]
    w = torch.zeros(256, 256, dtype=torch.bfloat16)
    w[0, 0] = 1
    values, scale = fp8_block.weight_values_ref(w, 1, "fp32")
    data = fp8_block.e4m3_bits(values)
    assert (data == 0x7E).sum() == 1 and data.count_nonzero() == 1
    assert torch.equal(scale, torch.tensor([[1 / 448, 1.0], [1.0, 1.0]]))


def test_scale_is_the_ieee_quotient():
    amax = torch.rand(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float() * 1000
    assert torch.equal(fp8_block.block_scale(amax, "fp32"), (amax.double() / 448).float())


def test_pow2_rule_is_the_smallest_power_that_does_not_clip():
    k = torch.arange(-100, 119)
    edge = 448 * power_of_two(k)
    above = torch.nextafter(edge, torch.tensor(math.inf))
    assert torch.equal(fp8_block.block_scale(edge, "pow2"), power_of_two(k))
    assert torch.equal(fp8_block.block_scale(above, "pow2"), power_of_two(k + 1))
    assert torch.equal(fp8_block.block_scale(above, "pow2"), decode_e8m0(mxfp8.scale_byte(above, "rceil")))


@pytest.mark.parametrize("rule", ("fp32", "pow2"))
def test_special_values_spoil_only_themselves(rule):
    """NAN: amax over finite values, so neighbours keep their bytes."""
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(3))
    clean = fp8_block.quantize_rows_ref(x, rule)
    x[0, 5], x[1, 6], x[2, 7] = math.nan, math.inf, -math.inf
    x[3] = math.nan
    data, scale = fp8_block.quantize_rows_ref(x, rule)
    assert data[0, 5] == 0x7F and data[1, 6] == 0x7E and data[2, 7] == 0xFE and (data[3] == 0x7F).all() and scale[3] == 1
    keep = torch.ones(4, 128, dtype=torch.bool)
    keep[0, 5] = keep[1, 6] = keep[2, 7] = False
    keep[3] = False
    assert torch.equal(data[keep], clean[0][keep]) and torch.equal(scale[:3], clean[1][:3])


# ---- mxfp8


@pytest.mark.parametrize(
    ("amax", "rceil", "floor", "even"),
    (
        (448.0, 127, 127, 127),
        (449.0, 128, 127, 127),
        (480.0, 128, 127, 127),  # 1.875 * 2^8 has three mantissa bits, and stays
        (500.0, 128, 127, 128),
        (896.0, 128, 128, 128),
        (1.0, 119, 119, 119),
        (1.9999999, 120, 119, 120),
        (0.0, 0, 0, 0),
        (2.0**-149, 0, 0, 0),
        (3.4028234663852886e38, 247, 246, 247),
    ),
)
def test_byte_by_hand(amax, rceil, floor, even):
    """E8M0: the three rules on the block maxima where they part."""
    a = torch.tensor([amax])
    assert [int(mxfp8.scale_byte(a, r)) for r in ("rceil", "floor", "even")] == [rceil, floor, even]


def test_even_rounds_the_mantissa_to_three_bits_with_ties_to_even():
    # 1.9375 lies half way between 1.875 and 2 and goes to 2 (even); 1.8125 goes to 1.75; just below 1.9375 stays
    a = torch.tensor([1.9375, 1.8125, 1.9374999]) * 256
    assert mxfp8.scale_byte(a, "even").tolist() == [128, 127, 127]


def test_rceil_is_exact_at_every_power():
    """E8M0: a logarithm in floating point is off by one next to a power of two."""
    k = torch.arange(-126, 120)
    edge = 448 * power_of_two(k)
    assert mxfp8.scale_byte(edge, "rceil").tolist() == (k + 127).tolist()
    assert mxfp8.scale_byte(torch.nextafter(edge, torch.tensor(math.inf)), "rceil").tolist() == (k + 128).tolist()
    assert mxfp8.scale_byte(torch.nextafter(edge, torch.tensor(0.0)), "rceil").tolist() == (k + 127).tolist()


def test_floor_is_exact_at_every_power():
    k = torch.arange(-118, 128)
    power = power_of_two(k)
    assert mxfp8.scale_byte(power, "floor").tolist() == (k + 119).tolist()
    below = torch.nextafter(power, torch.tensor(0.0))
    assert mxfp8.scale_byte(below, "floor").tolist() == [max(0, v) for v in (k + 118).tolist()]


def test_every_byte_decodes_exactly():
    """E8M0: byte 0 is a subnormal number, not 0; 255 is NaN, not infinity."""
    value = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert value[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)] and value[255].isnan()


@pytest.mark.parametrize("rule", ("rceil", "floor", "even"))
def test_byte_255_is_never_written(rule):
    patterns = torch.arange(0, 2**31, 65521, dtype=torch.int64).to(torch.int32).view(F32)
    x = patterns[: patterns.numel() // 32 * 32].reshape(-1, 32).contiguous()
    _, byte = mxfp8.quantize_rows_ref(x, rule)
    assert byte.max() <= 247


def test_clipping_by_rule():
    """E8M0: a block maximum of 500 dequantizes to 512 when the scale is rounded up and clips to 448 when it is floored."""
    x = torch.zeros(1, 32)
    x[0, 0] = 500.0
    for rule, value in (("rceil", 512.0), ("floor", 448.0), ("even", 512.0)):
        data, byte = mxfp8.quantize_rows_ref(x, rule)
        assert float(data.view(torch.float8_e4m3fn).float()[0, 0] * decode_e8m0(byte)[0, 0]) == value


def test_zero_block_has_byte_zero_and_keeps_the_sign_of_zero():
    x = torch.zeros(1, 64)
    x[0, 1] = -0.0
    data, byte = mxfp8.quantize_rows_ref(x, "rceil")
    assert byte.tolist() == [[0, 0]] and data[0, :3].tolist() == [0, 0x80, 0]


def test_check_e8m0_refuses_255_and_names_it():
    mxfp8.check_e8m0(torch.arange(255, dtype=torch.uint8))
    for scale in (torch.tensor([1, 255, 255], dtype=torch.uint8), torch.tensor([255, 255, 3, 4], dtype=torch.uint8).view(torch.int32)):
        with pytest.raises(ValueError, match=r"check_e8m0: w\.weight_scale holds 2 scale bytes of 255"):
            mxfp8.check_e8m0(scale, "w.weight_scale")
    with pytest.raises(ValueError, match="255"):
        mxfp8.check_e8m0(torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu))
    with pytest.raises(TypeError, match="scale must be uint8, float8_e8m0fnu or int32, got torch.float32"):
        mxfp8.check_e8m0(torch.ones(3))
