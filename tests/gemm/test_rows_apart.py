"""LAYOUT: rows of wider tensors, rows off 16 bytes, expanded ones and slices of scales, through each implementation; what has to be contiguous."""

from dataclasses import replace

import pytest
import torch

from moe_ops import bmm, dense_gemm, grouped_gemm, quantize, quantize_weight
from moe_ops.core.numerics import uneven
from moe_ops.gemm import bmm_impls, cutlass_choice, deep_gemm, dense_impls, torch_scaled
from moe_ops.gemm.grouped import _grouped_gemm_triton
from moe_ops.gemm.grouped_config import GroupedGemmConfig, hopper_operands

FORMATS = ["fp8_block", "mxfp8", "plain"]
MX_K = 128 if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10 else 32
STEP = {"fp8_block": 128, "mxfp8": MX_K, "plain": 64}


def operands(fmt, shape, e, n, k, device, layout=None):
    a, w = uneven((*shape, k), seed=1).to(device), uneven((e, n, k), block=(128, 128), seed=2).to(device)
    if fmt == "plain":
        return a, None, w, None
    qa, qw = quantize(a, fmt, layout=layout), quantize_weight(w, fmt)
    return qa.data.view(torch.uint8), qa.scale, qw.data.view(torch.uint8), qw.scale


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def nan_room(shape, like):
    return torch.full(shape, 0x7F if like.dtype == torch.uint8 else float("nan"), dtype=like.dtype, device=like.device)


def placed(a, shape, views):
    """a in each of the views of a tensor of NaN."""
    for view in views:
        room = nan_room(shape, a)
        view(room).copy_(a)
        yield view(room)


PACKED = (lambda room: room[:9, 16:272], lambda room: room[:9, 3:259], lambda room: room[::2, :256])
MASKED = (lambda room: room[:2, : room.shape[1] - 3, 16:272], lambda room: room[::2, 2:-1, 3:259])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("swap", [True, False], ids=["swap", "rows"])
def test_triton_packed(device, fmt, swap):
    a, sa, w, sw = operands(fmt, (9,), 2, 64, 256, device)
    config = GroupedGemmConfig(16, 64, STEP[fmt], 4, 3, 2, True) if swap else GroupedGemmConfig(64, 64, STEP[fmt], 4, 3, 0, False)
    rest = (sa, w, sw, None, ints([0, 4, 9], device), None, 1, fmt, 1, torch.float32, config.ints())
    want = _grouped_gemm_triton(a, *rest)
    assert all(torch.equal(_grouped_gemm_triton(view, *rest), want) for view in placed(a, (18, 304), PACKED))


@pytest.mark.parametrize("fmt", FORMATS)
def test_triton_masked(device, fmt):
    a, sa, w, sw = operands(fmt, (2, 9), 2, 64, 256, device)
    config = GroupedGemmConfig(16, 64, STEP[fmt], 4, 3, 2, True)
    rest = (sa, w, sw, None, ints([9, 5], device), None, 1, fmt, 1, torch.float32, config.ints())
    want = _grouped_gemm_triton(a, *rest)
    for view in placed(a, (3, 12, 304), MASKED):
        out = _grouped_gemm_triton(view, *rest)
        assert torch.equal(out[0], want[0]) and torch.equal(out[1, :5], want[1, :5])


def test_which_operands_the_hopper_kernels_take():
    """Their boxes begin at multiples of 16 bytes and lie apart by such; masked experts follow each other without a gap."""
    room, w, s = torch.empty(9, 304, dtype=torch.uint8), torch.empty(2, 64, 256, dtype=torch.uint8), torch.empty(9, 2)
    assert hopper_operands(room[:, 16:272], s, w)
    assert not hopper_operands(room[:, 3:259], s, w) and not hopper_operands(room[:1, :256].expand(9, 256), s, w)
    assert not hopper_operands(torch.empty(9, 264, dtype=torch.uint8)[:, :256], s, w)
    masked, scale = torch.empty(2, 12, 256, dtype=torch.uint8), torch.empty(2, 12, 2)
    assert hopper_operands(masked, scale, w)
    assert not hopper_operands(masked[:, :9], scale[:, :9], w) and not hopper_operands(masked, torch.empty(2, 16, 2)[:, :12], w)


def test_what_has_to_be_contiguous(device, deep_gemm_stand_in, monkeypatch):
    """A clear error instead of numbers read at wrong places."""
    q, w = quantize(uneven((4, 256), seed=1).to(device), "fp8_block"), quantize_weight(uneven((2, 256, 256), seed=2).to(device), "fp8_block")
    offsets, x = ints([0, 1, 4], device), torch.ones(4, 64, dtype=torch.bfloat16, device=device)
    turned = replace(w, scale=w.scale.transpose(1, 2))
    with pytest.raises(ValueError, match="w must be contiguous"):
        grouped_gemm(x, torch.ones(2, 64, 64, dtype=torch.bfloat16, device=device).transpose(1, 2), offsets)
    with pytest.raises(ValueError, match="w.scale must be contiguous"):
        grouped_gemm(q, turned, offsets)
    with pytest.raises(ValueError, match="w.scale must be contiguous"):
        dense_gemm(q, replace(w[0], scale=w.scale[0].t()))
    with pytest.raises(ValueError, match="w.scale must be contiguous"):
        bmm(uneven((4, 2, 256), seed=1).to(device), turned)
    with pytest.raises(ValueError, match="out must be contiguous"):
        grouped_gemm(q, w, offsets, out=torch.zeros(4, 512, device=device)[:, :256])
    for module in (dense_impls, bmm_impls):
        monkeypatch.setattr(module, "choose", lambda problem, where, impl: None)
    monkeypatch.setattr(cutlass_choice, "make_ready", lambda problem, where: None)
    for impl in ("deep_gemm", "cutlass"):
        with pytest.raises(ValueError, match="out must be contiguous"):
            dense_gemm(q, w[0], impl=impl, out=torch.zeros(4, 512, dtype=torch.bfloat16, device=device)[:, :256])
    with pytest.raises(ValueError, match="out must be contiguous"):
        x = quantize(uneven((4, 2, 256), seed=1).to(device), "fp8_block")
        bmm(x, w, impl="deep_gemm", out=torch.zeros(4, 2, 512, dtype=torch.bfloat16, device=device)[..., :256])


# ---- DeepGEMM: the stand-in asserts what boxes can address


@pytest.fixture
def lib(deep_gemm_stand_in):
    return deep_gemm_stand_in


def test_deep_gemm_dense(lib, device):
    a, sa, w, sw = operands("fp8_block", (9,), 1, 64, 256, device)
    outs = []
    for view in (a, *placed(a, (18, 304), PACKED)):
        outs.append(torch.zeros((9, 64), dtype=torch.bfloat16, device=device))
        deep_gemm.dense_into(view, sa, w[0], sw[0], "fp8_block", outs[-1])
    assert all(torch.equal(out, outs[0]) for out in outs) and outs[0].any()


@pytest.mark.parametrize("capacity", [9, 128])
@pytest.mark.parametrize("layout", ["row_major", "mn_major"])
def test_deep_gemm_masked(lib, device, capacity, layout):
    a, sa, w, sw = operands("fp8_block", (2, capacity), 2, 64, 256, device, layout)
    outs, counts = [], ints([capacity, 5], device)
    for view in (a, *placed(a, (3, capacity + 3, 304), MASKED)):
        outs.append(torch.zeros((2, capacity, 64), dtype=torch.bfloat16, device=device))
        deep_gemm.deep_gemm_grouped_into(view, sa, w, sw, counts, None, 1, "fp8_block", outs[-1])
    off = torch.zeros(2 * capacity * 64 + 1, dtype=torch.bfloat16, device=device)[1:].view(2, capacity, 64)  # not written by the library then
    deep_gemm.deep_gemm_grouped_into(a, sa, w, sw, counts, None, 1, "fp8_block", off)
    assert all(torch.equal(out[0], outs[0][0]) and torch.equal(out[1, :5], outs[0][1, :5]) for out in (*outs, off)) and outs[0].any()


def test_deep_gemm_slices_of_scales_and_expanded_heads(lib, device):
    """The first rows cut off MN-major scales leave the others off 16 bytes, with the distances of whole ones."""
    a, sa, w, sw = operands("fp8_block", (8,), 3, 64, 256, device, "mn_major")
    whole, cut = (torch.zeros(m, 64, dtype=torch.bfloat16, device=device) for m in (8, 7))
    deep_gemm.dense_into(a, sa, w[0], sw[0], "fp8_block", whole)
    deep_gemm.dense_into(a[1:], sa[1:], w[0], sw[0], "fp8_block", cut)
    assert torch.equal(cut, whole[1:]) and cut.any()
    by_head, scale, w, sw = operands("fp8_block", (3, 8), 3, 64, 256, device, "mn_major")
    whole, cut, same = (torch.zeros(m, 3, 64, dtype=torch.bfloat16, device=device) for m in (8, 7, 8))
    deep_gemm.bmm_into(by_head.transpose(0, 1), scale.transpose(0, 1), w, sw, whole)
    deep_gemm.bmm_into(by_head.transpose(0, 1)[1:], scale.transpose(0, 1)[1:], w, sw, cut)
    assert torch.equal(cut, whole[1:]) and cut.any()
    deep_gemm.bmm_into(by_head[0, :, None].expand(8, 3, 256), scale[0, :, None].expand(8, 3, 2), w, sw, same)
    assert torch.equal(same[:, 0], whole[:, 0]) and same[:, 1].any()


def test_deep_gemm_result_off_16_bytes_is_refused(lib, device):
    a, sa, w, sw = operands("fp8_block", (8,), 1, 64, 256, device)
    off = torch.zeros(8 * 64 + 1, dtype=torch.bfloat16, device=device)[1:].view(8, 64)
    with pytest.raises(ValueError, match="dense_gemm: out must start at a multiple of 16 bytes for impl 'deep_gemm'"):
        deep_gemm.dense_into(a, sa, w[0], sw[0], "fp8_block", off)
    with pytest.raises(ValueError, match="bmm: out must start at a multiple of 16 bytes for impl 'deep_gemm'"):
        deep_gemm.bmm_into(a[:, None], sa[:, None], w, sw, off[:, None])
    assert not lib.calls


# ---- torch: stand-ins assert what its products demand


def test_torch_products(monkeypatch):
    seen = []

    def grouped(a, b, offs, out_dtype):
        assert a.data_ptr() % 16 == 0 and a.stride(0) % 8 == 0 and a.stride(0) >= a.shape[1] and a.stride(1) == 1 and len(a)
        seen.append(a.clone())
        assert offs.dtype == torch.int32 and offs.is_contiguous() and 0 <= offs.min() and offs.max() <= len(a) and (offs.diff() >= 0).all()
        return torch.zeros(a.shape[0], b.shape[2], dtype=out_dtype)

    def scaled(a, b, scale_a, scale_b, out_dtype):
        assert a.is_contiguous() and a.data_ptr() % 16 == 0 and len(a) and scale_a.stride() == (1, len(a))
        seen.append(a.view(torch.uint8).clone())
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_grouped_mm", grouped)
    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    w, wide = uneven((3, 16, 64), seed=2), uneven((8, 80), seed=3)
    assert torch_scaled.grouped_mm(wide[:0, :64], w, ints([0, 0, 0, 0], "cpu")).shape == (0, 16) and not seen
    for a in (wide[:, 3:67], wide[:, :64], wide[:, :64].contiguous(), wide[:1, :64].expand(8, 64), wide[:, :76].contiguous()[:, :64]):
        for offsets in ([0, 3, 3, 8], [0, 10**6, -5, 8], [-(2**31), 2**31 - 1, 0, 3], [5, 4, 3, 2]):
            torch_scaled.grouped_mm(a, w, ints(offsets, "cpu"))
            assert torch.equal(seen.pop(), a)
    qa, qw = quantize(uneven((8, 1024), seed=1), "fp8_block"), quantize_weight(uneven((256, 1024), seed=2), "fp8_block")
    bits = qa.data.view(torch.uint8)
    for view in (lambda room: room[:8, 3:1027], lambda room: room[:8, 16:1040]):
        for a in placed(bits, (8, 1104), (view,)):
            torch_scaled.scaled_mm(a, qa.scale, qw.data, qw.scale)
            assert torch.equal(seen.pop(), bits)


# ---- results in memory that is still read


def test_a_result_over_its_operands_is_refused(device):
    """LAYOUT: by another view of the same memory too; side by side in one buffer is well, and a residual in place."""
    x, w = torch.randn(64, 64, device=device).bfloat16(), torch.randn(64, 64, device=device).bfloat16()
    for name, out in (("a", x[:]), ("a", x.view(-1)[:4096].view(64, 64)), ("w", w[:])):
        with pytest.raises(ValueError, match=f"dense_gemm: out must not share memory with {name}"):
            dense_gemm(x, w, out=out)
        with pytest.raises(ValueError, match=f"grouped_gemm: out must not share memory with {name}"):
            grouped_gemm(x, w[None], ints([0, 64], device), out=out)
        with pytest.raises(ValueError, match=f"bmm: out must not share memory with {name}"):
            bmm(x[:, None], w[None], out=out[:, None])
    sums = torch.randn(65, 64, device=device)
    with pytest.raises(ValueError, match="dense_gemm: out must not share memory with residual"):
        dense_gemm(x, w, residual=sums[:64], out=sums[1:])
    want = dense_gemm(x, w, residual=sums[:64], out_dtype=torch.float32)
    assert torch.equal(dense_gemm(x, w, residual=sums[:64], out=sums[:64]), want)
    both = torch.zeros(64, 128, dtype=torch.bfloat16, device=device)
    both[:, :64] = x
    assert torch.equal(dense_gemm(both[:, :64], w, out=both[:, 64:]), dense_gemm(x, w)) and torch.equal(both[:, :64], x)


def test_scales_that_require_grad_and_no_k(device):
    q, w = quantize(uneven((4, 256), seed=1).to(device), "fp8_block"), quantize_weight(uneven((1, 128, 256), seed=2).to(device), "fp8_block")
    for a, b, name in (
        (replace(q, scale=q.scale.clone().requires_grad_()), w, "a_scale"),
        (q, replace(w, scale=w.scale.clone().requires_grad_()), "w_scale"),
    ):
        with pytest.raises(ValueError, match=f"grouped_gemm: {name} requires grad"):
            grouped_gemm(a, b, ints([0, 4], device))
        with pytest.raises(ValueError, match=f"dense_gemm: {name} requires grad"):
            dense_gemm(a, b[0])
    with pytest.raises(ValueError, match="grouped_gemm: K must not be 0"):
        grouped_gemm(torch.ones(4, 0, device=device).bfloat16(), torch.ones(1, 8, 0, device=device).bfloat16(), ints([0, 4], device))


@pytest.mark.parametrize("impl", [None, "torch"])
def test_autocast_leaves_sums_alone(device, impl):
    q, w = quantize(uneven((64, 1024), seed=1).to(device), "fp8_block"), quantize_weight(uneven((1, 128, 1024), seed=2).to(device), "fp8_block")

    def outs():
        dense = dense_gemm(q, w[0], out_dtype=torch.float32, impl=impl)
        return dense, grouped_gemm(q, w, ints([0, 64], device), out_dtype=torch.float32, impl=impl)

    want = outs()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(outs(), want, strict=True))
