import pytest
import torch

from moe_ops import QTensor, make_qtensor
from moe_ops.core.formats import E4M3, FP8_BLOCK, MXFP8, as_bytes, as_e4m3, ceil_div, get_format, scale_shape


@pytest.mark.parametrize("fmt, name", [("fp8_block", "fp8_block"), ("mxfp8", "mxfp8"), (FP8_BLOCK, "fp8_block")])
def test_formats_have_names(fmt, name):
    assert get_format(fmt).name == name


@pytest.mark.parametrize("bad", ("fp8", "", None, 3, ["mxfp8"]))
def test_unknown_format_names_what_is_accepted(bad):
    with pytest.raises(ValueError, match=r"quantize: format must be one of \['fp8_block', 'mxfp8'\], got "):
        get_format(bad, "quantize")


def test_ceil_div():
    assert [ceil_div(a, 128) for a in (0, 1, 127, 128, 129)] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "shape, block, segments, expected",
    [
        ((3, 256), (1, 128), 1, (3, 2)),
        ((4, 300, 200), (128, 128), 1, (4, 3, 2)),
        ((2, 2 * 2880, 2880), (128, 128), 2, (2, 46, 23)),  # gpt-oss: each half has its own 23 row blocks
        ((2, 2 * 2880, 2880), (128, 128), 1, (2, 45, 23)),
        ((0, 64), (1, 32), 1, (0, 2)),
    ],
)
def test_scale_shape(shape, block, segments, expected):
    assert scale_shape(shape, block, segments) == expected


def weight(n=256, k=128, **kwargs):
    data = torch.zeros(n, k, dtype=torch.uint8)
    return make_qtensor(data, torch.ones(scale_shape((n, k), (128, 128))), "fp8_block", **kwargs)


def test_qtensor_carries_its_layout():
    q = weight()
    assert isinstance(q, QTensor) and q.data.dtype == E4M3 and q.is_weight
    assert q.shape == (256, 128) and q.nbytes == 256 * 128 + 2 * 4
    assert q.device.type == "cpu"
    for word in ("fp8_block", "(256, 128)", "row_major", "unknown", "segments=1"):
        assert word in repr(q)


def test_storage_views_share_memory():
    t = torch.arange(256, dtype=torch.uint8)
    assert as_e4m3(t).data_ptr() == t.data_ptr() and torch.equal(as_bytes(as_e4m3(t)), t)
    f = torch.ones(3)
    assert as_bytes(f) is f and as_e4m3(f) is f
    assert as_bytes(t.view(torch.float8_e8m0fnu)).dtype == torch.uint8


def test_one_expert_of_a_stack_is_a_view():
    data = torch.zeros(3, 128, 128, dtype=torch.uint8)
    q = make_qtensor(data, torch.arange(3.0).view(3, 1, 1), "fp8_block")
    assert q[2].scale.item() == 2 and q[2].data.data_ptr() == data[2].data_ptr()
    with pytest.raises(TypeError, match="3-D tensor with row_major scales"):
        weight()[0]


def test_scales_of_16_bits_are_widened_once():
    q = make_qtensor(torch.zeros(128, 128, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.bfloat16), "fp8_block")
    assert q.scale.dtype == torch.float32


def test_e8m0_scales_are_viewed_as_bytes():
    scale = torch.full((4, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    q = make_qtensor(torch.zeros(4, 64, dtype=torch.uint8), scale, "mxfp8")
    assert q.scale.dtype == torch.uint8 and q.format is MXFP8


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: weight(layout="columns"), ValueError, "layout must be one of"),
        (lambda: make_qtensor(torch.zeros(4, 4), torch.ones(1, 1), "fp8_block"), TypeError, "data must be float8_e4m3fn or uint8, got torch.float32"),
        (
            lambda: make_qtensor(torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1), "mxfp8"),
            TypeError,
            "scale of mxfp8 in layout row_major must be torch.uint8, got torch.float32",
        ),
        (lambda: make_qtensor(torch.zeros(4, dtype=torch.uint8), torch.ones(1), "fp8_block"), ValueError, "2 or 3 dimensions, got shape"),
        (
            lambda: make_qtensor(torch.zeros(256, 128, dtype=torch.uint8), torch.ones(1, 1), "fp8_block"),
            ValueError,
            r"scale must have shape \(2, 1\) for data \(256, 128\) in blocks \(128, 128\), got \(1, 1\)",
        ),
        (
            lambda: make_qtensor(torch.zeros(5, 128, dtype=torch.uint8), torch.ones(2, 1), "fp8_block", segments=2),
            ValueError,
            "5 rows, which do not divide into 2 segments",
        ),
        (
            # a scale over the whole of gate|up, whose middle block would mix both
            lambda: make_qtensor(torch.zeros(2 * 192, 128, dtype=torch.uint8), torch.ones(3, 1), "fp8_block", segments=2),
            ValueError,
            "blocks mix gate and up rows where I % 128 != 0: quantize gate and up apart",
        ),
    ],
)
def test_bad_parts_are_refused_with_the_reason(call, error, text):
    with pytest.raises(error, match=f"make_qtensor: .*{text}"):
        call()


@pytest.mark.gpu
def test_to_moves_data_and_scale():
    q = weight().to("cuda")
    assert q.data.is_cuda and q.scale.is_cuda
    with pytest.raises(ValueError, match="make_qtensor: data is on cuda:0, scale on cpu"):
        make_qtensor(q.data, q.scale.cpu(), "fp8_block")


DATA = torch.zeros(2, 128, dtype=torch.uint8)


@pytest.mark.parametrize(
    "call,error,text",
    [
        (lambda: make_qtensor(None, torch.ones(1), "mxfp8"), TypeError, "data must be a torch.Tensor, got NoneType"),
        (lambda: make_qtensor(DATA, torch.ones(2, 1), "fp8_block", rule="best", weight=False), ValueError, "rule of fp8_block must be one of"),
        (lambda: make_qtensor(DATA, torch.ones(2, 1), "fp8_block", segments=0), ValueError, "do not divide into 0 segments"),
        (lambda: make_qtensor(DATA.t(), torch.ones(128, 1), "fp8_block", weight=False), ValueError, "data must have last stride 1"),
        (
            lambda: make_qtensor(DATA, torch.ones(1, dtype=torch.uint8), "mxfp8", layout="swizzle_32x4x4"),
            ValueError,
            r"scale must have shape \(512,\)",
        ),
        (
            lambda: make_qtensor(DATA, torch.ones(1, 1, dtype=torch.int32), "mxfp8", layout="ue8m0_packed"),
            ValueError,
            r"scale must have shape \(2, 1\)",
        ),
        (lambda: make_qtensor(DATA, torch.full((2, 4), 255, dtype=torch.uint8), "mxfp8"), ValueError, "holds the E8M0 byte 255"),
    ],
)
def test_make_qtensor_refuses_what_does_not_belong_together(call, error, text):
    with pytest.raises(error, match=f"make_qtensor: .*{text}"):
        call()
