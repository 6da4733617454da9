"""Scale layouts: the addresses of the definition, conversions both ways, padding that is zero and is never read as data."""

import dataclasses
import importlib

import pytest
import torch
from torch._subclasses import FakeTensorMode

from moe_ops.core.formats import LAYOUTS, make_qtensor
from moe_ops.core.numerics import uneven
from moe_ops.quant.quantize import dequantize, quantize, quantize_weight
from moe_ops.quant.scale_storage import new_scale, pack_ref, padded_rows, unpack_ref

module = importlib.import_module("moe_ops.quant.scale_layout")
to_layout = module.to_layout
OP = torch.ops.moe_ops.convert_scale.default
FP8_LAYOUTS = ("row_major", "mn_major", "ue8m0_packed")
PAIRS = [("mxfp8", a, b) for a in LAYOUTS for b in LAYOUTS if a != b] + [("fp8_block", a, b) for a in FP8_LAYOUTS for b in FP8_LAYOUTS if a != b]
SIZES = {"one": (1, 1), "below the padding": (5, 3), "a whole tile": (128, 4), "above a tile": (130, 9), "2880 wide": (100, 90)}


def storage(t):
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,)).cpu()


def scales(fmt, shape, seed=0):
    byte = torch.randint(1, 255, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    return byte if fmt == "mxfp8" else torch.exp2(byte.float() - 127)


def to_device(scale, layout, device):
    """The same storage on the device."""
    flat = storage(scale).to(device)
    return flat.as_strided(scale.shape, scale.stride())


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("lead", ((), (2,)), ids=("2-D", "3-D"))
@pytest.mark.parametrize(("fmt", "src", "dst"), PAIRS)
def test_conversion_equals_the_reference_and_goes_back(fmt, src, dst, lead, size, device):
    rows, blocks = size
    row_major = scales(fmt, (*lead, *size))
    packed = pack_ref(row_major, src)
    wanted = module.convert_scale_ref(packed, src, dst, rows, blocks, fmt)
    for call in (module._convert_scale_triton, OP):
        got = call(to_device(packed, src, device), src, dst, rows, blocks, fmt)
        assert got.dtype == wanted.dtype and got.stride() == wanted.stride() and torch.equal(storage(got), storage(wanted))
    assert torch.equal(unpack_ref(wanted, dst, rows, blocks, fmt), row_major)


@pytest.mark.parametrize("lead", ((), (2,)))
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_every_scale_lies_where_the_definition_says(lead, size):
    rows, blocks = size
    s = scales("mxfp8", (*lead, *size))
    words, padded = -(-blocks // 4), -(-rows // 4) * 4
    flat = {layout: storage(pack_ref(s, layout)).view(torch.uint8).view(*lead, -1) for layout in LAYOUTS}
    r, b = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    at = {
        "row_major": r * blocks + b,
        "mn_major": b * padded + r,
        "ue8m0_packed": (b // 4 * padded + r) * 4 + b % 4,
        "swizzle_32x4x4": (r // 128 * words + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4,
    }
    for layout, address in at.items():
        assert torch.equal(flat[layout][..., address], s)
        everything = torch.ones(flat[layout].shape[-1], dtype=torch.bool)
        everything[address.flatten()] = False
        assert not flat[layout][..., everything].any(), "padding is zero"


def test_packed_words_hold_the_low_block_first():
    word = pack_ref(torch.tensor([[0x11, 0x22, 0x33, 0x44]], dtype=torch.uint8), "ue8m0_packed")
    assert word.shape == (1, 1) and int(word) == 0x44332211


@pytest.mark.parametrize(("fmt", "layout"), [("mxfp8", v) for v in LAYOUTS] + [("fp8_block", "mn_major"), ("fp8_block", "ue8m0_packed")])
def test_padding_is_never_read_as_data(fmt, layout, device):
    """LAYOUT: K = 2880, 100 rows, every padding byte 255: dequantized values are those of the clean case."""
    q = quantize(uneven((100, 2880)).to(device), fmt, layout=layout, rule="pow2" if fmt == "fp8_block" else None)
    clean = dequantize(q)
    blocks = 2880 // 32 if fmt == "mxfp8" else 23
    marks = storage(pack_ref(torch.full((100, blocks), 1, dtype=torch.uint8), layout)).view(torch.uint8)
    if layout == "mn_major" and fmt == "fp8_block":
        marks = marks.repeat_interleave(4)
    raw = storage(q.scale).view(torch.uint8)
    raw[marks == 0] = 255
    dirty = raw.view(q.scale.dtype).to(device).as_strided(q.scale.shape, q.scale.stride())
    again = make_qtensor(q.data, dirty, fmt, weight=False, layout=layout, rule=q.rule)
    assert torch.equal(dequantize(again), clean) and clean.isfinite().all()
    assert torch.equal(dequantize(to_layout(again, "row_major")), clean)


@pytest.mark.parametrize("layout", FP8_LAYOUTS[1:])
def test_weight_scales_convert_too(layout, device):
    q = quantize_weight(uneven((3, 384, 576), block=(64, 32)).to(device), "fp8_block", segments=2, rule="pow2")
    other = to_layout(q, layout)
    assert other.layout == layout and other.data is q.data and other.segments == 2
    assert torch.equal(to_layout(other, "row_major").scale, q.scale) and to_layout(q, "row_major") is q
    assert torch.equal(dequantize(other), dequantize(q))


def test_new_scale_has_room_for_the_padding():
    for layout in LAYOUTS:
        s = new_scale(torch.empty(0), (2,), 5, 3, torch.uint8, layout)
        used = s.untyped_storage().nbytes() // 2
        assert used == {"row_major": 15, "mn_major": 24, "ue8m0_packed": 32, "swizzle_32x4x4": 512}[layout]
    assert [padded_rows(129, v) for v in LAYOUTS] == [129, 132, 132, 256]


BAD = (
    (lambda q: to_layout(q, "tiled"), ValueError, "to_layout: layout must be one of 'row_major', 'mn_major'"),
    (lambda q: to_layout(q, "ue8m0_packed"), ValueError, "keeps only exponents, and fp8_block scales of rule 'fp32' are not powers of two"),
    (lambda q: to_layout(q, "swizzle_32x4x4"), ValueError, "holds the E8M0 scales of mxfp8, not those of fp8_block"),
    (lambda q: to_layout(q.data, "mn_major"), TypeError, "to_layout: q must be a QTensor, got Tensor"),
)


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input(call, error, text, device):
    """E8M0: fp32 scales are never cut down to their exponents in silence."""
    with pytest.raises(error) as caught:
        call(quantize(torch.randn(8, 256, device=device), "fp8_block"))
    assert text in str(caught.value)


def test_scales_of_another_shape_are_refused(device):
    q = quantize(torch.randn(8, 256, device=device), "mxfp8", layout="ue8m0_packed")
    short = dataclasses.replace(q, scale=q.scale[:4])
    with pytest.raises(ValueError, match=r"to_layout: q.scale must have shape \(8, 2\), got shape \(4, 2\)"):
        to_layout(short, "row_major")


@pytest.mark.parametrize(("fmt", "src", "dst"), PAIRS)
def test_fake_tensors_have_the_real_shapes_and_strides(fmt, src, dst):
    for lead, size in (((), (5, 3)), ((2,), (130, 9))):
        packed = pack_ref(scales(fmt, (*lead, *size)), src)
        real = OP(packed, src, dst, *size, fmt)
        with FakeTensorMode() as mode:
            fake = OP(mode.from_tensor(packed), src, dst, *size, fmt)
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_opcheck(device):
    torch.library.opcheck(OP, (scales("mxfp8", (5, 3)).to(device), "row_major", "swizzle_32x4x4", 5, 3, "mxfp8"))
    torch.library.opcheck(OP, (scales("fp8_block", (2, 5, 3)).to(device), "row_major", "mn_major", 5, 3, "fp8_block"))
