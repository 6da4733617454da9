"""SiLU * up with quantization: kernel against the reference within the bounds of an exponential, filled rows only, every activation."""

import importlib
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

import moe_ops
from moe_ops.core.formats import LAYOUTS
from moe_ops.core.numerics import uneven
from moe_ops.quant import fp8_block
from moe_ops.quant.activation import Activation, activation_ref
from moe_ops.quant.row_config import RowConfig
from moe_ops.quant.rows import filled_rows, new_quantized
from moe_ops.quant.scale_storage import unpack_ref

module = importlib.import_module("moe_ops.quant.silu_mul_quantize")
silu_mul_quantize = module.silu_mul_quantize
OP = torch.ops.moe_ops.silu_mul_quantize.default
FP8 = ("fp8_block", "fp32", "row_major")
MX = ("mxfp8", "rceil", "row_major")
ACTS = {
    "silu": Activation(),
    "gpt-oss": Activation.gpt_oss(),
    "gpt-oss interleaved": Activation.gpt_oss(interleaved=True),
    "clamped": Activation.clamped(2.0),
    "gelu": Activation.gelu_tanh(),
    "gelu clamped interleaved": Activation("gelu_tanh", limit=1.5, up_offset=-0.5, interleaved=True),
}


def act_args(act):
    return act.kind, act.alpha, act.limit_or_inf, act.up_offset, act.interleaved


def steps(bits):
    """e4m3 bits as integers in the order of their values, NaN far away."""
    b = bits.to(torch.int32)
    magnitude = torch.where((b & 0x7F) == 0x7F, 1000, b & 0x7F)
    return torch.where(b >= 128, -magnitude, magnitude)


def compare(mode, got, wanted, rows, blocks):
    """Scales within 2 ulp (a byte may move only with its whole block), data within one step in at most 1 of 10^4 elements.

    One scale in a thousand may be 3 or 4 ulp off: two exponentials within 1 ulp of the truth can round 1 + e apart, and the following
    product and division can carry that single step to a mantissa where it counts double (seen on an H200: 4 ulp once in 11,776 scales).
    """
    fmt, _, layout = mode
    s, t = (unpack_ref(v[1].cpu(), layout, rows, blocks, fmt) for v in (got, wanted))
    if t.dtype == torch.float32:
        ulp = (s.view(torch.int32) - t.view(torch.int32)).abs()
        if mode[1] == "pow2":
            assert not ulp.any()
        else:
            assert ulp.max() <= 4 and (ulp > 2).sum() <= ulp.numel() / 1000
    else:
        assert torch.equal(s, t)
    off = (steps(got[0].cpu()) - steps(wanted[0])).abs()
    assert off.max() <= 1 and off.count_nonzero() <= max(1, off.numel() / 10**4), (
        f"{off.count_nonzero()} of {off.numel()} elements, by up to {off.max()}"
    )


def check(device, x, mode, act, config=None):
    fmt, rule, layout = mode
    wanted = module.silu_mul_quantize_ref(x, None, fmt, layout, rule, *act_args(act))
    blocks = -(-x.shape[-1] // 2 // (128 if fmt == "fp8_block" else 32))
    calls = [module._silu_mul_quantize_triton(x.to(device), None, fmt, layout, rule, *act_args(act), config)]
    if config is None:
        calls.append(OP(x.to(device), None, fmt, layout, rule, *act_args(act)))
    for got in calls:
        assert got[0].shape == wanted[0].shape and got[1].stride() == wanted[1].stride()
        compare(mode, got, wanted, x.shape[-2], blocks)
    return wanted


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("mode", (FP8, ("fp8_block", "pow2", "row_major"), MX), ids=" ".join)
def test_equals_the_reference(mode, act, device):
    """Every activation; an interior that is no multiple of the tile or of a 128-block, and more than one tile."""
    check(device, 2 * uneven((9, 2 * 160), dtype=torch.float32), mode, act)
    check(device, uneven((3, 2 * 1056), dtype=torch.bfloat16, spread=1), mode, act, RowConfig(2, warps=8))


@pytest.mark.parametrize(
    "mode", [FP8, ("fp8_block", "fp32", "mn_major"), ("fp8_block", "pow2", "ue8m0_packed"), *(("mxfp8", "rceil", v) for v in LAYOUTS)]
)
def test_every_layout(mode, device):
    check(device, uneven((2, 5, 2 * 288), dtype=torch.float16, spread=2), mode, ACTS["silu"])


@pytest.mark.gpu
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("mode", (FP8, MX), ids=" ".join)
def test_real_sizes(mode, act, device):
    for dtype in (torch.float32, torch.bfloat16):
        check(device, torch.randn((512, 2 * 2880), generator=torch.Generator().manual_seed(5)).to(dtype), mode, act)
        check(device, torch.randn((4, 300, 2 * 2048), generator=torch.Generator().manual_seed(6)).to(dtype), mode, act)


def test_hand_worked_block(device):
    """gate 1, up 2 in one column, zeros elsewhere: h = 2 / (1 + exp(-1)) fills the block's range."""
    x = torch.zeros(1, 256)
    x[0, 3], x[0, 131] = 1.0, 2.0
    q = silu_mul_quantize(x.to(device), "fp8_block")
    h = 2 / (1 + math.exp(-1))
    assert q.data.view(torch.uint8)[0, 3] == 0x7E and q.data.view(torch.uint8).count_nonzero() == 1
    assert float(q.scale) == pytest.approx(h / 448, rel=1e-6)


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_activation_against_fp64(act):
    """An independent formula: torch's own functions in fp64."""
    x = 4 * torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    d = x.double()
    gate, up = (d[:, 0::2], d[:, 1::2]) if act.interleaved else d.chunk(2, -1)
    if act.limit is not None:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    f = gate * torch.sigmoid(act.alpha * gate) if act.kind == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(activation_ref(x, act).double(), f * (up + act.up_offset), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("mode", (FP8, MX), ids=" ".join)
def test_special_values_spoil_only_themselves(mode, act, device):
    """NAN: infinities and NaN in gate or up; very large and very negative gates keep their neighbours finite."""
    x = uneven((12, 512), dtype=torch.float32, spread=1)
    specials = (math.nan, -math.nan, math.inf, -math.inf, 3e38, -3e38, 1e4, -1e4, -87.5, 88.5, 0.0, -0.0)
    for row, value in enumerate(specials):
        x[row, row] = value
        x[row, 400 + row] = value
    data, _ = check(device, x, mode, act)
    h = activation_ref(x, act)
    assert torch.equal(data & 0x7F == 0x7F, h.isnan())


@pytest.mark.parametrize("mode", (FP8, MX), ids=" ".join)
def test_nan_rows_change_nothing_else(mode, device):
    """NAN: rows that padding filled with NaN."""
    x = uneven((8, 512))
    x[5:] = math.nan
    data, scale = check(device, x, mode, ACTS["silu"])
    alone = check(device, x[:5], mode, ACTS["silu"])
    assert torch.equal(data[:5], alone[0]) and torch.equal(scale[:5], alone[1])


@pytest.mark.parametrize("mode", (FP8, ("mxfp8", "rceil", "swizzle_32x4x4")), ids=" ".join)
@pytest.mark.parametrize(
    ("shape", "counts", "why"),
    (
        ((40, 320), (3, 0, 7), "packed"),
        ((6, 320), (5, 9), "more than there is room for"),
        ((6, 320), (-3, 2), "a negative count is none"),
        ((4, 9, 320), (0, 9, 1, 8), "masked, an empty and a full expert"),
        ((3, 5, 320), (100, -1, 2), "masked, counts out of range"),
        ((2, 5, 320), (0, 0), "nothing filled"),
    ),
)
def test_only_filled_rows_are_read_and_written(mode, shape, counts, why, device):
    fmt, rule, layout = mode
    x = uneven(shape, dtype=torch.float32)
    counts = torch.tensor(counts, dtype=torch.int32)
    filled = filled_rows(x, counts)
    out = (*shape[:-1], shape[-1] // 2)
    blocks = -(-out[-1] // (128 if fmt == "fp8_block" else 32))
    whole = module._silu_mul_quantize_triton(x.to(device), None, fmt, layout, rule, "silu", 1.0, math.inf, 0.0, False, RowConfig(1))
    x[~filled] = math.nan
    for config in (RowConfig(1), RowConfig(4, warps=8, programs=4)):
        data, scale = (t.fill_(9) for t in new_quantized(torch.empty(0, device=device), out, fmt, layout))
        module.silu_mul_quantize_into(x.to(device), data, scale, counts.to(device), fmt, rule, "silu", 1.0, math.inf, 0.0, False, layout, config)
        s, t = (unpack_ref(v.cpu(), layout, out[-2], blocks, fmt) for v in (scale, whole[1]))
        assert torch.equal(data.cpu()[filled], whole[0].cpu()[filled]) and (data.cpu()[~filled] == 9).all()
        assert torch.equal(s[filled], t[filled]) and (layout != "row_major" or (s[~filled] == 9).all())


def test_views_equal_their_contiguous_copies(device):
    """LAYOUT: row strides, offsets."""
    big = uneven((9, 1100)).to(device)
    for x in (big[:, 60:572], big[::2, :512], big[:1, :512].expand(3, 512), big.flatten()[1 : 1 + 512 * 4].view(4, 512)):
        for fmt in ("fp8_block", "mxfp8"):
            for act in (ACTS["silu"], ACTS["gpt-oss interleaved"]):
                a, b = silu_mul_quantize(x, fmt, act=act), silu_mul_quantize(x.contiguous(), fmt, act=act)
                assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("mode", (FP8, ("mxfp8", "rceil", "swizzle_32x4x4"), ("fp8_block", "pow2", "ue8m0_packed")), ids=" ".join)
@pytest.mark.parametrize("shape", ((0, 256), (3, 0, 256), (0, 4, 256)))
def test_no_rows(mode, shape, device):
    """EMPTY: an empty result of the right shape, and the next call works."""
    got = module._silu_mul_quantize_triton(torch.zeros(shape, device=device), None, *_order(mode), *act_args(ACTS["silu"]))
    assert got[0].shape == (*shape[:-1], 128)
    check(device, uneven((4, 256)), mode, ACTS["silu"])


def _order(mode):
    return mode[0], mode[2], mode[1]


def test_the_scale_never_sees_a_rounded_activation(device):
    """h is quantized in fp32: quantizing a bf16 copy of it gives other bytes somewhere."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(9))
    q = moe_ops.silu_mul_quantize(x.to(device), "fp8_block")
    h = activation_ref(x, Activation())
    exact = fp8_block.quantize_rows_ref(h, "fp32")[0]
    rounded = fp8_block.quantize_rows_ref(h.bfloat16(), "fp32")[0]
    bits = q.data.view(torch.uint8).cpu()
    assert (bits != exact).sum() < (bits != rounded).sum() / 10


BAD = (
    (lambda x: silu_mul_quantize(x.double(), "mxfp8"), TypeError, "silu_mul_quantize: x must be bfloat16 or float16 or float32, got float64"),
    (
        lambda x: silu_mul_quantize(x[:, :65], "fp8_block"),
        ValueError,
        "the last dimension of x must be even (gate and up), got shape (4, 65)",
    ),
    (
        lambda x: silu_mul_quantize(x[:, :96], "mxfp8"),
        ValueError,
        "half the last dimension of x must be a multiple of 32 for mxfp8, got",
    ),
    (lambda x: silu_mul_quantize(x, "mxfp8", act="silu"), TypeError, "silu_mul_quantize: act must be an Activation, got str"),
    (lambda x: silu_mul_quantize(x.T, "mxfp8"), ValueError, "silu_mul_quantize: x must have last stride 1, got shape (256, 4) with strides (1, 256)"),
    (lambda x: silu_mul_quantize(x, "mxfp4"), ValueError, "silu_mul_quantize: format must be one of"),
    (lambda x: silu_mul_quantize(x.requires_grad_(), "mxfp8"), ValueError, "silu_mul_quantize: x requires grad"),
    (lambda x: Activation("relu"), ValueError, "Activation: kind must be one of 'silu', 'gelu_tanh', got 'relu'"),
    (lambda x: Activation(limit=0.0), ValueError, "Activation: limit must be positive or None, got 0.0"),
    (lambda x: Activation(alpha=-1.0), ValueError, "Activation: alpha must be positive and up_offset finite, got alpha=-1.0"),
    (lambda x: Activation("gelu_tanh", alpha=2.0), ValueError, "alpha belongs to kind 'silu'"),
)


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=[b[2][:60] for b in BAD])
def test_bad_input(call, error, text, device):
    with pytest.raises(error) as caught:
        call(torch.randn(4, 256, device=device))
    assert text in str(caught.value)


def test_fake_tensors_have_the_real_shapes_and_strides():
    for mode in (FP8, ("fp8_block", "fp32", "mn_major"), ("mxfp8", "rceil", "swizzle_32x4x4")):
        for shape in ((0, 256), (1, 2 * 2880), (7, 256), (3, 5, 256)):
            args = (None, *_order(mode), *act_args(ACTS["gpt-oss"]))
            real = OP(torch.zeros(shape), *args)
            with FakeTensorMode():
                fake = OP(torch.empty(shape), *args)
            assert [(t.shape, t.stride(), t.dtype) for t in real] == [(t.shape, t.stride(), t.dtype) for t in fake]


@pytest.mark.parametrize("mode", (FP8, ("mxfp8", "rceil", "swizzle_32x4x4")), ids=" ".join)
def test_opcheck(mode, device):
    torch.library.opcheck(OP, (uneven((5, 256)).to(device), None, *_order(mode), *act_args(ACTS["gpt-oss"])))
