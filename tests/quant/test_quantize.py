"""Activation quantizers: kernel, op and reference byte for byte, for every format, rule, layout and form of rows."""

import importlib
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

import moe_ops
from moe_ops.core.formats import LAYOUTS
from moe_ops.core.numerics import uneven
from moe_ops.quant.row_config import RowConfig
from moe_ops.quant.rows import filled_rows, new_quantized, write_ref
from moe_ops.quant.scale_storage import unpack_ref

module = importlib.import_module("moe_ops.quant.quantize")
quantize = module.quantize
OP = torch.ops.moe_ops.quantize.default
MODES = [
    *(("fp8_block", "fp32", layout) for layout in ("row_major", "mn_major")),
    *(("fp8_block", "pow2", layout) for layout in ("row_major", "mn_major", "ue8m0_packed")),
    *(("mxfp8", "rceil", layout) for layout in LAYOUTS),
    ("mxfp8", "floor", "row_major"),
    ("mxfp8", "even", "row_major"),
]
FORMATS = [("fp8_block", "fp32", "row_major"), ("mxfp8", "rceil", "row_major")]


def storage(t):
    """All elements that the storage holds, padding included."""
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0).cpu()


def check(device, x, mode, config=None):
    """Kernel (and on a GPU the op too) against the reference: data, scales with their strides, and padding."""
    fmt, rule, layout = mode
    data, scale = module.quantize_ref(x, None, fmt, layout, rule)
    x = x if device.type == "cpu" else move(x, device)
    calls = [lambda: module._quantize_triton(x, None, fmt, layout, rule, config), lambda: OP(x, None, fmt, layout, rule)]
    for call in calls if config is None else calls[:1]:
        got_data, got_scale = call()
        assert torch.equal(got_data.cpu(), data)
        assert got_scale.stride() == scale.stride() and torch.equal(storage(got_scale), storage(scale))
    return data, scale


def move(x, device):
    """To the device with the same strides and offset."""
    base = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device=device)
    base.copy_(storage(x))
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


def hard(shape, dtype=torch.float32, seed=0):
    """Uneven data with zero blocks, signed zeros, infinities, NaN of both signs, and magnitudes down to subnormal numbers."""
    x = uneven(shape, dtype=torch.float32, seed=seed, spread=12)
    flat = x.view(-1, shape[-1])
    flat[0, 0], flat[-1, 3], flat[-1, -1] = math.nan, -math.inf, math.inf
    flat[len(flat) // 2, :32] = 0
    flat[len(flat) // 2, 5:20] = -0.0
    flat[len(flat) // 3, :] *= 1e-40
    flat[:, 7] = -math.nan
    return x.to(dtype)


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize(("shape", "dtype"), (((5, 1056), torch.bfloat16), ((3, 6, 160), torch.float32), ((131, 64), torch.float16)))
def test_equals_the_reference(mode, shape, dtype, device):
    check(device, hard(shape, dtype), mode)


@pytest.mark.parametrize("mode", FORMATS + [("fp8_block", "pow2", "row_major"), ("mxfp8", "even", "row_major")], ids=" ".join)
@pytest.mark.parametrize("part", ("positive", "negative"))
def test_every_bf16_pattern(mode, part, device):
    """CAST: all 65536 patterns, in blocks that share an exponent and in blocks that mix them."""
    bits = torch.arange(0, 32768, dtype=torch.int32) + (0 if part == "positive" else 32768)
    x = bits.to(torch.int16).view(torch.bfloat16).reshape(256, 128)
    check(device, x, mode, RowConfig(4))
    check(device, x.T.contiguous(), mode, RowConfig(8, 512))


@pytest.mark.parametrize("mode", FORMATS, ids=" ".join)
def test_quotients_at_the_ties_of_e4m3(mode, device):
    """CAST: x / scale exactly on a tie, and an ulp to both sides, for scales of many mantissas (the last bit of the quotient decides)."""
    g = torch.Generator().manual_seed(7)
    rows = 64
    scale = 1 + torch.rand(rows, 1, generator=g)
    scale[0] = 2 - 2**-22
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    tie = ((grid[1:] + grid[:-1]) / 2)[torch.randint(0, 126, (rows, 128), generator=g)]
    x = (tie.double() * scale.double()).float()
    x = (x.view(torch.int32) + torch.randint(-1, 2, x.shape, generator=g, dtype=torch.int32)).view(torch.float32)
    x[:, 0] = 448 * scale[:, 0]
    check(device, x * torch.where(torch.arange(128) % 2 == 0, 1.0, -1.0), mode)
    check(device, x * 2.0**-100, mode)  # far below: remainders stay exact
    check(device, x * 2.0**-117, mode)  # at the smallest scale


@pytest.mark.parametrize("mode", FORMATS, ids=" ".join)
@pytest.mark.parametrize("power", (0, -118, 126), ids="2^{}".format)
def test_every_pair_of_bf16_mantissas(mode, power, device):
    """CAST: each mantissa as a block's maximum, with each mantissa of each exponent below it: all quotients that bf16 data can have.

    The first power leaves everything normal; scales then come to their bound, and to reciprocals whose remainder is subnormal.
    """
    mantissa = 1 + torch.arange(128) / 128
    below = torch.cat([mantissa * 2.0**-e for e in range(20)])
    x = torch.where(below > mantissa[:, None], below / 2, below)
    x[:, ::128] = mantissa[:, None]
    # the maxima stand where the mantissa 1 of each exponent was: once more, moved by a column
    y = torch.where(below.roll(1) > mantissa[:, None], below.roll(1) / 2, below.roll(1))
    y[:, ::128] = mantissa[:, None]
    check(device, (torch.cat([x, -y]) * 2.0**power).bfloat16(), mode, RowConfig(4))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_random_patterns_at_real_sizes(mode, device):
    bits = torch.randint(-(2**31), 2**31, (2048, 2880), generator=torch.Generator().manual_seed(1), dtype=torch.int64).to(torch.int32)
    check(device, bits.view(torch.float32), mode)
    check(device, bits.to(torch.int16).view(torch.bfloat16), mode)
    check(device, uneven((4, 1000, 7168)), mode)


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize(
    ("shape", "counts", "why"),
    (
        ((40, 160), (3, 0, 7), "packed"),
        ((40, 160), (13,), "packed, one entry"),
        ((6, 160), (5, 9), "more than there is room for"),
        ((6, 160), (-3, 2, -(2**31)), "negative counts are none"),
        ((6, 160), (2**31 - 1, 2**31 - 1), "the sum leaves int32"),
        ((4, 9, 160), (0, 9, 1, 8), "masked, an empty and a full expert"),
        ((3, 5, 160), (100, -1, 2), "masked, counts out of range"),
        ((4, 9, 160), (0, 0, 0, 0), "nothing filled"),
    ),
)
def test_only_filled_rows_are_read_and_written(mode, shape, counts, why, device):
    fmt, rule, layout = mode
    x = uneven(shape, dtype=torch.float32)
    counts = torch.tensor(counts, dtype=torch.int32)
    filled = filled_rows(x, counts)
    x[~filled] = math.nan
    wanted = [t.fill_(9) for t in new_quantized(x, shape, fmt, layout)]
    write_ref((wanted[0], wanted[1]), *module.quantize_ref(x, counts, fmt, layout, rule), filled, fmt, layout)
    blocks = -(-shape[-1] // (128 if fmt == "fp8_block" else 32))
    for config in (RowConfig(1), RowConfig(4, warps=8, programs=4)):
        data, scale = (t.fill_(9) for t in new_quantized(torch.empty(0, device=device), shape, fmt, layout))
        module.quantize_into(x.to(device), data, scale, counts.to(device), fmt, rule, layout, config)
        assert torch.equal(data.cpu(), wanted[0])
        assert torch.equal(unpack_ref(scale.cpu(), layout, shape[-2], blocks, fmt), unpack_ref(wanted[1], layout, shape[-2], blocks, fmt))


@pytest.mark.parametrize("capacity", (1, 8, 16, 32, 63, 64, 65))
def test_masked_rows_beyond_a_count_stay_untouched(capacity, device):
    """TAIL: small and unaligned capacities."""
    counts = torch.tensor([0, 1, capacity, capacity - 1], dtype=torch.int32)
    x = uneven((4, capacity, 128))
    for fmt in ("fp8_block", "mxfp8"):
        data, scale = (t.fill_(9) for t in new_quantized(torch.empty(0, device=device), x.shape, fmt, "row_major"))
        module.quantize_into(x.to(device), data, scale, counts.to(device), fmt, "fp32" if fmt == "fp8_block" else "rceil")
        wanted, s = module.quantize_ref(x, None, fmt, "row_major", "fp32" if fmt == "fp8_block" else "rceil")
        filled = filled_rows(x, counts)
        assert torch.equal(data.cpu()[filled], wanted[filled]) and (data.cpu()[~filled] == 9).all()
        assert torch.equal(scale.cpu()[filled], s[filled]) and (scale.cpu()[~filled] == 9).all()


@pytest.mark.parametrize("experts", (1, 33, 300, 2048))
def test_many_experts(experts, device):
    counts = torch.zeros(experts, dtype=torch.int32)
    counts[:: 1 + experts // 20] = 2
    counts[-1] = 1
    x = uneven((experts, 2, 32))
    wanted, s = module.quantize_ref(x, counts, "mxfp8", "row_major", "rceil")
    data, scale = module._quantize_triton(x.to(device), counts.to(device), "mxfp8", "row_major", "rceil", RowConfig(1, 512, programs=1))
    filled = filled_rows(x, counts)
    assert torch.equal(data.cpu()[filled], wanted[filled]) and torch.equal(scale.cpu()[filled], s[filled])


def test_a_routing_gives_its_counts(device):
    class Routing:
        counts = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
        offsets = torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=device)

    x = uneven((5, 64)).to(device)
    q = quantize(x, "mxfp8", counts=Routing())
    assert torch.equal(q.data[:3].view(torch.uint8), quantize(x[:3], "mxfp8").data.view(torch.uint8))
    x = uneven((3, 2, 64)).to(device)
    q = quantize(x, "mxfp8", counts=Routing())
    assert torch.equal(q.scale[2, :1], quantize(x[2, :1], "mxfp8").scale) and torch.equal(q.scale[0], quantize(x[0], "mxfp8").scale)


@pytest.mark.parametrize("mode", FORMATS, ids=" ".join)
def test_nan_in_padding_rows_and_blocks_changes_nothing_else(mode, device):
    """NAN: rows 5..7 NaN; then one NaN in one block."""
    x = uneven((8, 512))
    x[5:] = math.nan
    data, scale = check(device, x, mode)
    alone = check(device, x[:5], mode)
    assert torch.equal(data[:5], alone[0]) and torch.equal(scale[:5], alone[1])
    x = uneven((8, 512))
    clean = check(device, x, mode)
    x[1, 3] = math.nan
    data, scale = check(device, x, mode)
    width = 128 if mode[0] == "fp8_block" else 32
    assert torch.equal(data[1, width:], clean[0][1, width:]) and torch.equal(scale[1, 1:], clean[1][1, 1:]) and data[1, 3] == 0x7F


@pytest.mark.parametrize("k", (1, 100, 576, 2880))
def test_ragged_last_block_reads_nothing_past_the_row(k, device):
    """TAIL: K = 576 has 5 scales of which the last covers 64 values; memory past the row holds NaN."""
    big = torch.full((4, k + 64), math.nan)
    big[:, :k] = uneven((4, k), dtype=torch.float32)
    data, scale = check(device, big[:, :k], ("fp8_block", "fp32", "row_major"))
    assert scale.shape == (4, -(-k // 128)) and scale.isfinite().all()
    last = big[:, (k - 1) // 128 * 128 : k].abs().amax(-1)
    assert torch.equal(scale[:, -1], last / torch.full_like(last, 448))


def views():
    big = uneven((9, 640))
    yield "columns of a wider matrix", big[:, 64:576]
    yield "every second row", big[::2, :512]
    yield "one row repeated", big[:1, :512].expand(5, 512)
    yield "base not aligned to 16 bytes", big.flatten()[1 : 1 + 512 * 5].view(5, 512)
    yield "odd row stride", big.flatten()[3 : 3 + 5 * 513].view(5, 513)[:, :512]
    yield "one row of odd stride", big.flatten().as_strided((1, 512), (7, 1))
    yield "one column of odd stride", big.flatten().as_strided((130, 1), (1, 9))
    yield "experts apart", uneven((3, 8, 512))[:, 2:7]


@pytest.mark.parametrize(("name", "x"), list(views()), ids=lambda v: v if isinstance(v, str) else "")
def test_views_equal_their_contiguous_copies(name, x, device):
    """LAYOUT: the output is contiguous whatever the input's strides."""
    for mode in FORMATS if x.shape[-1] % 32 == 0 else FORMATS[:1]:
        data, scale = check(device, x, mode)
        alone = module.quantize_ref(x.contiguous(), None, mode[0], mode[2], mode[1])
        assert data.is_contiguous() and torch.equal(data, alone[0]) and torch.equal(scale, alone[1])


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize("shape", ((0, 256), (3, 0, 256), (0, 4, 256), (4, 0)))
def test_no_rows_or_columns(mode, shape, device):
    """EMPTY: an empty result of the right shape, and the next call works."""
    data, scale = check(device, torch.zeros(shape), mode)
    assert data.shape == shape
    check(device, uneven((4, 256)), mode)


def test_public_call_and_record(device):
    x = uneven((6, 256)).to(device)
    q = moe_ops.quantize(x, "mxfp8", layout="swizzle_32x4x4", rule="floor")
    assert (q.format.name, q.rule, q.layout, q.block, q.segments) == ("mxfp8", "floor", "swizzle_32x4x4", (1, 32), 1)
    assert q.data.dtype == torch.float8_e4m3fn and q.shape == x.shape and q.device == x.device
    assert moe_ops.quantize(x, "fp8_block").rule == "fp32"


BAD = (
    (lambda x: quantize(x.double(), "mxfp8"), TypeError, "quantize: x must be bfloat16 or float16 or float32, got float64"),
    (lambda x: quantize(x[0], "mxfp8"), ValueError, "quantize: x must be 2-D or 3-D, got shape (256,)"),
    (lambda x: quantize(x.T, "mxfp8"), ValueError, "quantize: x must have last stride 1, got shape (256, 8) with strides (1, 256)"),
    (lambda x: quantize(x[:, :48], "mxfp8"), ValueError, "quantize: the last dimension of x must be a multiple of 32 for mxfp8, got shape (8, 48)"),
    (lambda x: quantize(x, "int8"), ValueError, "quantize: format must be one of ['fp8_block', 'mxfp8'], got 'int8'"),
    (lambda x: quantize(x, "mxfp8", rule="pow2"), ValueError, "quantize: rule of mxfp8 must be one of 'rceil', 'floor', 'even', got 'pow2'"),
    (lambda x: quantize(x, "mxfp8", layout="tiled"), ValueError, "quantize: layout must be one of 'row_major', "),
    (lambda x: quantize(x, "fp8_block", layout="ue8m0_packed"), ValueError, "are not powers of two: quantize with rule='pow2'"),
    (lambda x: quantize(x, "fp8_block", layout="swizzle_32x4x4"), ValueError, "holds the E8M0 scales of mxfp8, not those of fp8_block"),
    (lambda x: quantize(x, "mxfp8", counts=torch.ones(2).to(x.device)), TypeError, "quantize: counts must be int32, got float32"),
    (lambda x: quantize(x, "mxfp8", counts=[1, 2]), TypeError, "quantize: counts must be an int32 tensor, a Routing or None, got list"),
    (lambda x: quantize(x[None], "mxfp8", counts=torch.ones(2, dtype=torch.int32, device=x.device)), ValueError, "counts must be 1-D with 1 entries"),
    (lambda x: quantize(x, "mxfp8", counts=torch.ones(2, dtype=torch.int32, device="meta")), ValueError, "quantize: counts is on meta but x is on"),
    (lambda x: quantize(x.requires_grad_(), "mxfp8"), ValueError, "quantize: x requires grad, and this op is for inference only"),
    (lambda x: quantize("x", "mxfp8"), TypeError, "quantize: x must be a torch.Tensor, got str"),
    (lambda x: module._quantize_triton(x, None, "mxfp8", "row_major", "rceil", RowConfig(3)), ValueError, "block_r must be a power of two, got 3"),
)


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=[b[2][:60] for b in BAD])
def test_bad_input(call, error, text, device):
    with pytest.raises(error) as caught:
        call(torch.randn(8, 256, device=device))
    assert text in str(caught.value)


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_fake_tensors_have_the_real_shapes_and_strides(mode):
    """COMPILE: the shape function tells the truth, strides and padding rows included."""
    fmt, rule, layout = mode
    for shape in ((0, 256), (1, 2880), (7, 256), (3, 5, 256)):
        real = OP(torch.zeros(shape), None, fmt, layout, rule)
        with FakeTensorMode():
            fake = OP(torch.empty(shape), None, fmt, layout, rule)
        assert [(t.shape, t.stride(), t.dtype) for t in real] == [(t.shape, t.stride(), t.dtype) for t in fake]


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_opcheck(mode, device):
    fmt, rule, layout = mode
    counts = torch.tensor([2, 1], dtype=torch.int32, device=device)
    torch.library.opcheck(OP, (uneven((5, 256)).to(device), None, fmt, layout, rule))
    torch.library.opcheck(OP, (uneven((2, 3, 256)).to(device), counts, fmt, layout, rule), test_utils=("test_schema", "test_faketensor"))
