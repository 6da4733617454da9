import math

import pytest
import torch

from moe_ops.core.numerics import decode_e8m0, random_topk, relative_error, to_e4m3, uneven


def test_all_e8m0_bytes():
    out = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert out.dtype == torch.float32
    assert out[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(out[255])


def test_e4m3_saturates_and_keeps_nan():
    x = torch.tensor([0.0, -0.0, 448.0, 449.0, 1e30, float("inf"), -float("inf"), float("nan"), 2.0**-9, 2.0**-10, 1.0625, 1.1875])
    bits = to_e4m3(x).view(torch.uint8).tolist()
    # ties go to the even mantissa: 2^-10 (half the smallest subnormal) to 0, 1.0625 to 1.0, 1.1875 to 1.25
    assert bits == [0x00, 0x80, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x01, 0x00, 0x38, 0x3A]


def test_every_e4m3_value_survives():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(to_e4m3(codes.view(torch.float8_e4m3fn).float()).view(torch.uint8), codes)


def test_relative_error():
    a = torch.tensor([3.0, 4.0])
    assert relative_error(a, a) == 0
    assert relative_error(a * 1.01, a) == pytest.approx(0.01, rel=1e-5)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) > 0
    assert math.isnan(relative_error(torch.tensor([float("nan"), 4.0]), a))
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0


@pytest.mark.parametrize("shape, block", [((4, 256), (1, 32)), ((2, 130, 200), (128, 128)), ((0, 64), (1, 32))])
def test_uneven_data_has_another_scale_in_every_block(shape, block):
    x = uneven(shape, block=block, seed=3, dtype=torch.float32)
    assert x.shape == shape and torch.equal(x, uneven(shape, block=block, seed=3, dtype=torch.float32))
    if x.numel():
        assert x.isfinite().all()
        first, second = x[..., : block[0], : block[1]].abs().max(), x[..., : block[0], block[1] : 2 * block[1]].abs().max()
        assert first != second


def test_random_topk_is_distinct_and_normalised():
    ids, weights = random_topk(20, 16, 4, seed=1)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.allclose(weights.sum(-1), torch.ones(20)) and (weights > 0).all()
    hot, _ = random_topk(20, 16, 1, seed=1, skew=30.0)
    assert (hot == 0).float().mean() > 0.5
    assert random_topk(0, 8, 2)[0].shape == (0, 2)
