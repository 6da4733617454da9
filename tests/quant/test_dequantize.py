"""Dequantizer: kernel, op and reference bit for bit; every scale byte and every element."""

import importlib
import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import moe_ops
from moe_ops.core.formats import LAYOUTS, MXFP8, QTensor, as_bytes, make_qtensor
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.quant.quantize import dequantize, quantize, quantize_weight

module = importlib.import_module("moe_ops.quant.dequantize")
OP = torch.ops.moe_ops.dequantize.default
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(a, b):
    """Equal bits, all NaN counting as one."""
    assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.isnan(), b.isnan())
    whole = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(torch.where(a.isnan(), 0, a.view(whole)), torch.where(b.isnan(), 0, b.view(whole)))


def check(device, q, dtype):
    args = (q.format.name, q.block[0], q.segments, dtype)
    data, scale = as_bytes(q.data).cpu(), as_bytes(q.scale).cpu()
    wanted = module.dequantize_ref(data, scale, *args)
    for call in (module._dequantize_triton, OP):
        assert same(call(data.to(device), scale.to(device), *args).cpu(), wanted)
    return wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ("fp8_block", "mxfp8"))
@pytest.mark.parametrize("shape", ((5, 160), (2, 7, 1056), (130, 64)))
def test_equals_the_reference(shape, fmt, dtype, device):
    x = uneven(shape, dtype=torch.float32)
    x[..., 0, 0] = math.nan
    check(device, quantize(x, fmt), dtype)
    check(device, quantize_weight(x, fmt), dtype)


def test_weights_in_segments_and_ragged_tiles(device):
    w = uneven((2, 384, 100), block=(64, 32), dtype=torch.float32)
    q = quantize_weight(w, "fp8_block", segments=2)
    back = check(device, q, torch.float32)
    assert relative_error(back, w) < 0.05
    halves = [module.dequantize(quantize_weight(part, "fp8_block")) for part in (w[:, :192], w[:, 192:])]
    assert torch.equal(back, torch.cat(halves, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes(dtype, device):
    for fmt in ("fp8_block", "mxfp8"):
        check(device, quantize(uneven((300, 7168)), fmt), dtype)
        check(device, quantize_weight(uneven((4, 5760, 2880)), fmt, segments=2), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_with_every_element(dtype, device):
    """E8M0: all 65536 pairs: byte 0 is 2^-127, byte 254 overflows only where the product does, byte 255 is NaN."""
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    out = check(device, QTensor(data.view(torch.float8_e4m3fn), scale, MXFP8, MXFP8.weight_block), dtype)
    if dtype == torch.float32:
        element = data[0].view(torch.float8_e4m3fn).double()
        exact = element * 2.0 ** (torch.arange(255, dtype=torch.float64)[:, None] - 127)
        assert torch.equal(
            out[:255].double().nan_to_num(0, math.inf), torch.where(exact.abs() < 2.0**128, exact, exact * math.inf).nan_to_num(0, math.inf)
        )
        assert out[0, 0x38] == 2.0**-127 and out[254, 1] == 2.0**118
    assert out[255].isnan().all() and not out[254, :0x7F].isnan().any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_scale_layout(layout, device):
    x = uneven((2, 9, 160)).to(device)
    q, plain = quantize(x, "mxfp8", layout=layout), quantize(x, "mxfp8")
    assert torch.equal(moe_ops.dequantize(q), moe_ops.dequantize(plain))


@pytest.mark.parametrize("fmt", ("fp8_block", "mxfp8"))
def test_a_second_round_trip_changes_nothing(fmt, device):
    """Values on the grid come back exactly."""
    x = uneven((16, 256), dtype=torch.float32).to(device)
    once = quantize(x, fmt, rule="pow2" if fmt == "fp8_block" else None)
    twice = quantize(dequantize(once), fmt, rule=once.rule)
    assert torch.equal(dequantize(once), dequantize(twice)) and relative_error(dequantize(once), x) < 0.05


def test_views(device):
    """LAYOUT: rows cut out of a wider matrix, an expert of a stack, one row of odd stride."""
    q = quantize(uneven((6, 512)).to(device), "mxfp8")
    part = make_qtensor(q.data[1:5, 64:320], q.scale[1:5, 2:10], "mxfp8", weight=False)
    assert torch.equal(dequantize(part), dequantize(q)[1:5, 64:320])
    w = quantize_weight(uneven((3, 200, 96)).to(device), "fp8_block")
    assert torch.equal(dequantize(w[1]), dequantize(w)[1])


@pytest.mark.parametrize("shape", ((0, 256), (3, 0, 256), (0, 4, 256)))
def test_no_rows(shape, device):
    """EMPTY."""
    for fmt in ("fp8_block", "mxfp8"):
        assert check(device, quantize(torch.zeros(shape), fmt), torch.bfloat16).shape == shape


BAD = (
    (lambda q: dequantize(q.data), TypeError, "dequantize: q must be a QTensor, got Tensor"),
    (lambda q: dequantize(q, torch.float64), TypeError, "dequantize: dtype must be float32 or bfloat16 or float16, got torch.float64"),
    (lambda q: dequantize(replace(q, data=q.data.view(1, 1, 8, 64))), ValueError, "dequantize: q.data must be 2-D or 3-D"),
    (lambda q: dequantize(replace(q, data=q.data.T, scale=q.scale.new_zeros(64, 1))), ValueError, "dequantize: q.data must have last stride 1"),
)


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input(call, error, text, device):
    with pytest.raises(error) as caught:
        call(quantize(torch.randn(8, 64, device=device), "mxfp8"))
    assert text in str(caught.value)


def test_fake_tensors_have_the_real_shape():
    q = quantize_weight(torch.zeros(2, 130, 96), "fp8_block")
    data = as_bytes(q.data)
    with FakeTensorMode() as mode:
        fake = OP(mode.from_tensor(data), mode.from_tensor(q.scale), "fp8_block", 128, 1, torch.bfloat16)
    assert fake.shape == (2, 130, 96) and fake.dtype == torch.bfloat16 and fake.is_contiguous()


def test_opcheck(device):
    q = quantize(uneven((5, 96)).to(device), "mxfp8")
    torch.library.opcheck(OP, (as_bytes(q.data), q.scale, "mxfp8", 1, 1, torch.bfloat16))
