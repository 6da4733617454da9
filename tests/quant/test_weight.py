"""Weight quantizers: kernel, op and reference byte for byte; ragged tiles, gate and up apart, stochastic rounding."""

import importlib
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

import moe_ops
from moe_ops.core.formats import make_qtensor
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.quant import fp8_block, stochastic

module = importlib.import_module("moe_ops.quant.weight")
quantize_weight = module.quantize_weight
OP = torch.ops.moe_ops.quantize_weight.default
MODES = [("fp8_block", "fp32"), ("fp8_block", "pow2"), ("mxfp8", "rceil"), ("mxfp8", "floor"), ("mxfp8", "even")]
KEY = stochastic.key_of(1234, "model.layers.3.mlp.experts.7.down_proj.weight")


def check(device, w, fmt, rule, segments=1, key=-1):
    data, scale = module.quantize_weight_ref(w, fmt, segments, rule, key)
    for call in (module._quantize_weight_triton, OP):
        got = call(w.to(device), fmt, segments, rule, key)
        assert torch.equal(got[0].cpu(), data) and torch.equal(got[1].cpu(), scale)
    return data, scale


def hard(shape, dtype=torch.bfloat16, seed=0):
    w = uneven(shape, block=(64, 32), dtype=torch.float32, seed=seed, spread=8)
    w[..., 0, 0], w[..., 1, 3], w[..., -1, -1] = math.nan, -math.inf, math.inf
    w[..., 2, :32] = 0
    w[..., 3, :] = -0.0
    return w.to(dtype)


@pytest.mark.parametrize(("fmt", "rule", "key"), [(*mode, -1) for mode in MODES] + [("fp8_block", "fp32", KEY), ("mxfp8", "rceil", KEY)])
def test_equals_the_reference(fmt, rule, key, device):
    rows = 130 if fmt == "fp8_block" else 9  # tiles of 128 rows, or rows on their own
    check(device, hard((2, rows, 160)), fmt, rule, key=key)
    check(device, hard((rows, 1056), torch.float32), fmt, rule, key=key)
    check(device, hard((2 * rows, 64), torch.float16), fmt, rule, 2, key)


@pytest.mark.gpu
@pytest.mark.parametrize("key", (-1, KEY), ids=("nearest", "stochastic"))
@pytest.mark.parametrize(("fmt", "rule"), MODES)
def test_real_sizes(fmt, rule, key, device):
    check(device, hard((4, 2 * 768, 2048)), fmt, rule, 2, key)
    check(device, hard((1, 5760, 2880)), fmt, rule, 2, key)
    check(device, hard((576, 7168)), fmt, rule, 1, key)


def test_zero_tiles_and_a_single_value(device):
    """SCALE: no NaN, finite positive scales, exact back."""
    w = torch.zeros(256, 256, dtype=torch.bfloat16)
    w[0, 0] = 1
    for fmt in ("fp8_block", "mxfp8"):
        q = quantize_weight(w.to(device), fmt)
        assert not (q.data.view(torch.uint8) & 0x7F == 0x7F).any() and torch.equal(moe_ops.dequantize(q, torch.bfloat16).cpu(), w)
    assert (quantize_weight(w.to(device), "fp8_block").scale > 0).all()


@pytest.mark.parametrize("fmt", ("fp8_block", "mxfp8"))
def test_tiles_are_those_of_the_formula(fmt, device):
    """Each scale against the amax of its own tile, cut out by hand."""
    w = uneven((300, 224), block=(64, 32), dtype=torch.float32)
    _, scale = check(device, w, fmt, "fp32" if fmt == "fp8_block" else "rceil")
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            tile = w[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] if fmt == "fp8_block" else w[i, j * 32 : (j + 1) * 32]
            amax = float(tile.abs().max())
            wanted = torch.tensor(amax, dtype=torch.float64).div(448).float() if fmt == "fp8_block" else math.ceil(math.log2(amax / 448)) + 127
            assert scale[i, j] == wanted
        if fmt == "mxfp8" and i == 20:
            break


def test_gate_and_up_are_quantized_apart(device):
    """TAIL: I = 192: 2 + 2 rows of scales; as one matrix of 384 rows the middle tile would mix gate and up."""
    w = torch.ones(384, 576)
    w[:192] = 1e-5
    q = quantize_weight(w.to(device), "fp8_block", segments=2)
    assert q.scale.shape == (4, 5) and q.segments == 2
    assert ((moe_ops.dequantize(q).cpu()[:192] - 1e-5).abs() <= 1e-5 * 0.0625).all()
    mixed = quantize_weight(w.to(device), "fp8_block")
    assert mixed.scale.shape == (3, 5)
    assert ((moe_ops.dequantize(mixed).cpu()[128:192] - 1e-5).abs() > 1e-5 * 0.0625).all()
    with pytest.raises(ValueError, match="blocks mix gate and up rows"):
        make_qtensor(mixed.data, mixed.scale, "fp8_block", segments=2)
    halves = [quantize_weight(part.to(device), "fp8_block") for part in (w[:192], w[192:])]
    assert torch.equal(q.scale, torch.cat([h.scale for h in halves]))
    assert torch.equal(q.data.view(torch.uint8), torch.cat([h.data.view(torch.uint8) for h in halves]))


@pytest.mark.parametrize("fmt", ("fp8_block", "mxfp8"))
def test_a_stack_gives_the_bytes_of_each_expert(fmt, device):
    """Blocks never cross experts."""
    w = uneven((3, 200, 96), block=(64, 32))
    q = quantize_weight(w.to(device), fmt)
    for e in range(3):
        one = quantize_weight(w[e].to(device), fmt)
        assert torch.equal(q[e].data.view(torch.uint8), one.data.view(torch.uint8)) and torch.equal(q[e].scale, one.scale)


def test_views_equal_their_contiguous_copies(device):
    """LAYOUT: row strides, offsets, experts apart."""
    big = uneven((4, 160, 400)).to(device)
    for w in (big[1, :140, 32:96], big[::2, 5:150:20, :64], big.flatten()[1 : 1 + 140 * 64].view(140, 64), big[:1, :9, :64].expand(2, 9, 64)):
        for fmt in ("fp8_block", "mxfp8"):
            for seed in (None, 3):
                a, b = (quantize_weight(v, fmt, stochastic_seed=seed, name="w") for v in (w, w.contiguous()))
                assert a.data.is_contiguous()
                assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("shape", ((0, 64), (0, 128, 64), (2, 0, 64)))
def test_no_rows(shape, device):
    """EMPTY."""
    for fmt, rule in (("fp8_block", "fp32"), ("mxfp8", "rceil")):
        assert check(device, torch.zeros(shape), fmt, rule)[0].shape == shape
        check(device, torch.zeros(shape), fmt, rule, key=KEY)


# ---- stochastic rounding


def test_random_bits_are_a_fixed_function_of_seed_name_and_index():
    """Fixed values, because a later version must give the same bytes, and the formula in plain integers."""
    index = [0, 1, 2**32 - 1, 2**32, 2**40 + 5]
    assert KEY == 3521046544198432826
    assert stochastic.random_bits(torch.tensor(index), KEY).tolist() == [709278, 427228, 33328, 631143, 270457]

    def mix(x):
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    assert [mix(mix(i % 2**32 ^ KEY >> 31) ^ i >> 32 ^ KEY % 2**31) >> 12 for i in index] == [709278, 427228, 33328, 631143, 270457]
    keys = {stochastic.key_of(s, n) for s in (0, 1, 2**40) for n in ("", "a", "b")}
    assert len(keys) == 9 and all(0 <= k < 2**62 for k in keys)


def test_random_bits_are_uniform_and_uncorrelated():
    a = stochastic.random_bits(torch.arange(2**18), KEY).double() / 2**20
    b = stochastic.random_bits(torch.arange(2**18), KEY + 1).double() / 2**20
    counts = torch.histc(a.float(), 64, 0, 1)
    assert ((counts - 4096).abs() < 6 * 64).all()
    for other in (a.roll(1), a.roll(32), b):
        assert abs(float(torch.corrcoef(torch.stack([a, other]))[0, 1])) < 0.01


def test_exact_values_stay_and_others_go_to_a_neighbour():
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = torch.cat([grid, -grid])
    assert torch.equal(stochastic.stochastic_bits(x, torch.arange(254), KEY), fp8_block.e4m3_bits(x))
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 1e9, -1e9, -0.0])
    assert stochastic.stochastic_bits(special, torch.arange(7), KEY).tolist() == [0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0xFE, 0x80]
    middle = (grid[1:] + grid[:-1]) / 2
    for seed in range(4):
        code = stochastic.stochastic_bits(middle, torch.arange(126), stochastic.key_of(seed, "")).to(torch.int32)
        assert (((code - torch.arange(126)) == 0) | ((code - torch.arange(126)) == 1)).all()


@pytest.mark.parametrize("value", (1.03, -300.5, 0.0021, 0.0145, 2.0**-11))
def test_stochastic_rounding_is_unbiased(value):
    bits = stochastic.stochastic_bits(torch.full((2**17,), value), torch.arange(2**17), KEY)
    mean = bits.view(torch.float8_e4m3fn).double().mean()
    step = {1.03: 0.125, -300.5: 32}.get(value, 2.0**-9)
    assert abs(float(mean) - value) < 4 * step * 0.5 / math.sqrt(2**17)


def test_seed_and_name_choose_the_bytes(device):
    w = uneven((64, 256)).to(device)
    q = {(s, n): quantize_weight(w, "mxfp8", stochastic_seed=s, name=n).data.view(torch.uint8) for s in (0, 1) for n in ("a", "b")}
    assert len({tuple(v.flatten().tolist()) for v in q.values()}) == 4
    again = quantize_weight(w, "mxfp8", stochastic_seed=0, name="a")
    assert torch.equal(again.data.view(torch.uint8), q[0, "a"])
    nearest = quantize_weight(w, "mxfp8")
    assert torch.equal(again.scale, nearest.scale)
    assert relative_error(moe_ops.dequantize(again), w.float()) < 2 * relative_error(moe_ops.dequantize(nearest), w.float())


# ---- errors, fakes


BAD = (
    (lambda w: quantize_weight(w.int(), "mxfp8"), TypeError, "quantize_weight: w must be bfloat16 or float16 or float32, got int32"),
    (lambda w: quantize_weight(w[0], "mxfp8"), ValueError, "quantize_weight: w must be 2-D or 3-D, got shape (96,)"),
    (lambda w: quantize_weight(w.T, "fp8_block"), ValueError, "quantize_weight: w must have last stride 1, got shape (96, 64) with strides (1, 96)"),
    (lambda w: quantize_weight(w[:, :48], "mxfp8"), ValueError, "quantize_weight: the last dimension of w must be a multiple of 32 for mxfp8, got"),
    (lambda w: quantize_weight(w, "fp8"), ValueError, "quantize_weight: format must be one of ['fp8_block', 'mxfp8'], got 'fp8'"),
    (lambda w: quantize_weight(w, "fp8_block", rule="rceil"), ValueError, "quantize_weight: rule of fp8_block must be one of 'fp32', 'pow2'"),
    (lambda w: quantize_weight(w, "fp8_block", segments=3), ValueError, "quantize_weight: segments must divide the 64 rows of w, got 3"),
    (lambda w: quantize_weight(w, "fp8_block", segments=0), ValueError, "quantize_weight: segments must be between 1 and 64, got 0"),
    (lambda w: quantize_weight(w, "mxfp8", stochastic_seed=1.5), TypeError, "quantize_weight: stochastic_seed must be an int or None, got float"),
    (lambda w: quantize_weight(w.requires_grad_(), "mxfp8"), ValueError, "quantize_weight: w requires grad"),
    (lambda w: quantize_weight(None, "mxfp8"), TypeError, "quantize_weight: w must be a torch.Tensor, got NoneType"),
)


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=[b[2][:60] for b in BAD])
def test_bad_input(call, error, text, device):
    with pytest.raises(error) as caught:
        call(torch.randn(64, 96, device=device))
    assert text in str(caught.value)


def test_fake_tensors_have_the_real_shapes_and_strides():
    for fmt, rule in MODES:
        for shape in ((0, 64), (130, 96), (1, 384, 1056), (2, 256, 32)):
            real = OP(torch.zeros(shape), fmt, 2, rule, -1)
            with FakeTensorMode():
                fake = OP(torch.empty(shape), fmt, 2, rule, -1)
            assert [(t.shape, t.stride(), t.dtype) for t in real] == [(t.shape, t.stride(), t.dtype) for t in fake]


@pytest.mark.parametrize(("fmt", "rule"), (MODES[0], MODES[2]))
def test_opcheck(fmt, rule, device):
    torch.library.opcheck(OP, (uneven((2, 130, 96)).to(device), fmt, 2, rule, KEY))
