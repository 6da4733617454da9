"""DeepGEMM's wrapper against a stand-in that reads DeepGEMM's layouts in plain torch (conftest.py); the library itself: test_deep_gemm_gpu.py."""

import types

import pytest
import torch

from moe_ops import Routing, bmm, dense_gemm, freeze, grouped_gemm, quantize, quantize_weight
from moe_ops.core.numerics import random_topk, relative_error, uneven
from moe_ops.gemm import bmm_impls, deep_gemm, deep_gemm_library, deep_gemm_probe, dense_impls, grouped_impls
from moe_ops.gemm.grouped import _ref_into

ALL = dict.fromkeys(deep_gemm_probe.FORMS)


@pytest.fixture
def lib(deep_gemm_stand_in):
    return deep_gemm_stand_in


def operands(fmt, shape, e, n, k, device, layout=None):
    a = quantize(uneven((*shape, k), seed=1).to(device), fmt, layout=layout)
    w = quantize_weight(uneven((e, n, k), block=(128, 128), seed=2).to(device), fmt)
    return a.data.view(torch.uint8), a.scale, w.data.view(torch.uint8), w.scale


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    "form,fmt,layout",
    [
        ("contiguous", "fp8_block", "row_major"),
        ("psum", "fp8_block", "mn_major"),
        ("masked", "fp8_block", "mn_major"),
        ("psum", "mxfp8", "row_major"),
        ("masked", "mxfp8", "row_major"),
    ],
)
@pytest.mark.parametrize(
    "counts",
    [[1, 0, 2], [0, 0, 70], [0, 0, 0], [128, 1, 0], [127, 129, 1]],
    ids=["EMPTY: between", "one expert", "EMPTY: all", "a whole block", "TAIL: around a block"],
)
def test_every_form_leads_rows_there_and_back(lib, device, form, fmt, layout, counts):
    rows, n, k = sum(counts) + 2, 64, 256  # two rows of room beyond the filled ones
    a, sa, w, sw = operands(fmt, (rows,), len(counts), n, k, device, layout)
    a[sum(counts) :] = 0x7F  # NaN in rows of nobody
    offsets = ints([0, *torch.tensor(counts).cumsum(0).tolist()], device)
    out, ref = (torch.full((rows, n), 5.0, dtype=t, device=device) for t in (torch.bfloat16, torch.float32))
    deep_gemm._into(a, sa, w, sw, offsets, None, 1, fmt, out, form)
    _ref_into(a, sa, w, sw, None, offsets, None, 1, fmt, 1, ref)
    assert lib.calls == [form] and lib.aligned_to == 64  # restored
    assert relative_error(out, ref) < 2e-3
    assert (out[sum(counts) :] == 5.0).all()  # untouched


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8"])
@pytest.mark.parametrize("capacity", [1, 8, 63, 65, 128, 130])
def test_tail_masked_rows_of_any_capacity(lib, device, fmt, capacity):
    """TAIL: the library's tiles would cross into the next expert; rows beyond a count are neither read nor written."""
    counts = [0, 1, capacity, max(0, capacity - 1), capacity + 9]
    n, k = 64, 256
    a, sa, w, sw = operands(fmt, (len(counts), capacity), len(counts), n, k, device)
    for e, c in enumerate(counts):
        a[e, c:] = 0x7F
    out, ref = (torch.full((len(counts), capacity, n), 5.0, dtype=t, device=device) for t in (torch.bfloat16, torch.float32))
    deep_gemm.deep_gemm_grouped_into(a, sa, w, sw, ints(counts, device), None, 1, fmt, out)
    _ref_into(a, sa, w, sw, None, ints(counts, device), None, 1, fmt, 1, ref)
    assert lib.calls == ["masked"] and relative_error(out, ref) < 2e-3
    for e, c in enumerate(counts):
        assert (out[e, c:] == 5.0).all()


@pytest.mark.parametrize("capacity", [128, 256])
def test_masked_rows_that_lie_right_are_not_copied(lib, device, capacity):
    """Whole tiles and MN-major scales: the library reads and writes in place, counts are clamped, and rows of whole tiles of nobody stay."""
    counts = [0, 1, capacity + 9, 65]
    a, sa, w, sw = operands("fp8_block", (4, capacity), 4, 64, 256, device, "mn_major")
    assert deep_gemm.in_place(a, sa, "fp8_block") and not deep_gemm.in_place(a, sa.contiguous(), "fp8_block")
    assert not deep_gemm.in_place(a[:, :100], sa[:, :100], "fp8_block")
    out, ref = (torch.full((4, capacity, 64), 5.0, dtype=t, device=device) for t in (torch.bfloat16, torch.float32))
    deep_gemm.deep_gemm_grouped_into(a, sa, w, sw, ints(counts, device), None, 1, "fp8_block", out)
    _ref_into(a, sa, w, sw, None, ints(counts, device), None, 1, "fp8_block", 1, ref)
    assert lib.calls == ["masked"] and lib.operand is not None and lib.operand.data_ptr() == a.data_ptr()
    for e, c in enumerate(counts):
        filled = min(c, capacity)
        assert relative_error(out[e, :filled], ref[e, :filled]) < 2e-3 and (out[e, -(-filled // 128) * 128 :] == 5.0).all()


@pytest.mark.parametrize("tokens,form", [(5, "masked"), (60, "psum")])
def test_sent_gathered_tokens_and_pairs_of_nobody(lib, device, tokens, form):
    e, top_k, n, k = 4, 3, 64, 256
    ids, weights = random_topk(tokens, e, top_k, seed=4)
    ids[2] = -1
    ids[3, 1] = -1
    routing = Routing.from_topk(ids.to(device), weights.to(device), e)
    a, sa, w, sw = operands("fp8_block", (tokens,), e, n, k, device)
    out, ref = (torch.full((tokens * top_k, n), 5.0, dtype=t, device=device) for t in (torch.bfloat16, torch.float32))
    deep_gemm.deep_gemm_grouped_into(a, sa, w, sw, routing.offsets, routing.order, top_k, "fp8_block", out)
    _ref_into(a, sa, w, sw, None, routing.offsets, routing.order, top_k, "fp8_block", 1, ref)
    assert lib.calls == [form] and relative_error(out, ref) < 2e-3


@pytest.mark.parametrize("form", ["contiguous", "masked"])
def test_layout_rows_with_any_distance(lib, device, form):
    """LAYOUT: activations that are a slice of something wider."""
    a, sa, w, sw = operands("fp8_block", (9,), 2, 64, 256, device)
    wide = torch.full((9, 300), 0x7F, dtype=torch.uint8, device=device)
    wide[:, 3:259] = a
    results = []
    for source in (a, wide[:, 3:259]):
        out = torch.zeros((9, 64), dtype=torch.bfloat16, device=device)
        deep_gemm._into(source, sa, w, sw, ints([0, 4, 9], device), None, 1, "fp8_block", out, form)
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.parametrize("offsets", [[0, 10**6, -5, 8], [-(2**31), 2**31 - 1, 0, 3], [5, 4, 3, 2]])
@pytest.mark.parametrize("form", ["psum", "masked"])
def test_garbage_in_offsets_and_order_stays_inside(lib, device, offsets, form):
    a, sa, w, sw = operands("fp8_block", (4,), 3, 64, 128, device)
    order = ints([-7, 2**31 - 1, 3, 0, 1, 2, 9, 8], device)
    out = torch.zeros((8, 64), dtype=torch.bfloat16, device=device)
    deep_gemm._into(a, sa, w, sw, ints(offsets, device), order, 2, "fp8_block", out, form)


def test_weight_off_16_bytes_is_refused(lib, device):
    a, sa, w, sw = operands("fp8_block", (4,), 1, 64, 128, device)
    off = torch.zeros(64 * 128 + 1, dtype=torch.uint8, device=device)[1:].view(1, 64, 128)
    out = torch.zeros((4, 64), dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="grouped_gemm: w must start at a multiple of 16 bytes for impl 'deep_gemm'"):
        deep_gemm.deep_gemm_grouped_into(a, sa, off, sw, ints([0, 4], device), None, 1, "fp8_block", out)
    with pytest.raises(ValueError, match="dense_gemm: w must start at a multiple of 16 bytes for impl 'deep_gemm'"):
        deep_gemm.dense_into(a, sa, off[0], sw[0], "fp8_block", out)


def test_no_rows_and_no_launch(lib, device):
    a, sa, w, sw = operands("fp8_block", (0,), 2, 64, 128, device)
    deep_gemm.deep_gemm_grouped_into(a, sa, w, sw, ints([0, 0, 0], device), None, 1, "fp8_block", torch.empty((0, 64), device=device).bfloat16())
    assert lib.calls == []


@pytest.mark.parametrize("fmt,layout", [("fp8_block", "row_major"), ("fp8_block", "mn_major"), ("mxfp8", "row_major")])
@pytest.mark.parametrize("m", [0, 1, 6, 130])
def test_dense(lib, device, fmt, layout, m):
    a, sa, w, sw = operands(fmt, (m,), 1, 192, 256, device, layout)
    out, ref = (torch.zeros((m, 192), dtype=t, device=device) for t in (torch.bfloat16, torch.float32))
    deep_gemm.dense_into(a, sa, w[0], sw[0], fmt, out)
    _ref_into(a, sa, w, sw, None, ints([0, m], device), None, 1, fmt, 1, ref)
    assert relative_error(out, ref) < 2e-3 and lib.calls == (["dense"] if m else [])


@pytest.mark.parametrize("tokens", [0, 1, 6, 33])
@pytest.mark.parametrize("heads,n,k", [(3, 128, 256), (2, 192, 128)])
def test_bmm_of_heads_in_the_layout_of_attention(lib, device, tokens, heads, n, k):
    w = quantize_weight(uneven((heads, n, k), block=(128, 128), seed=2).to(device), "fp8_block")
    x = quantize(uneven((tokens, heads, k), seed=1).to(device), "fp8_block")
    by_head = quantize(uneven((tokens, heads, k), seed=1).to(device).transpose(0, 1), "fp8_block", layout="mn_major")
    wide = torch.zeros((tokens, heads, k + 40), dtype=torch.uint8, device=device)
    wide[..., 5 : 5 + k] = x.data.view(torch.uint8)
    sources = (
        (x.data.view(torch.uint8), x.scale),
        (by_head.data.view(torch.uint8).transpose(0, 1), by_head.scale.transpose(0, 1)),
        (wide[..., 5 : 5 + k], x.scale),
    )
    for a, scale in sources:
        out = torch.zeros((tokens, heads, n), dtype=torch.bfloat16, device=device)
        deep_gemm.bmm_into(a, scale, w.data.view(torch.uint8), w.scale, out)
        assert relative_error(out, bmm(x, w, impl="torch", out_dtype=torch.float32)) < 2e-3
    assert lib.calls == ["bmm"] * (3 if tokens else 0)


# ---- the global alignment, capture, versions


def test_alignment_is_restored_after_a_failure_and_asserted(lib):
    with pytest.raises(RuntimeError, match="inside"), deep_gemm_library.alignment(lib, 128):
        assert lib.aligned_to == 128
        raise RuntimeError("inside")
    assert lib.aligned_to == 64
    lib.set_mk_alignment_for_contiguous_layout = lambda value: None
    with pytest.raises(RuntimeError, match="alignment of contiguous layouts is 64 after it was set to 128"), deep_gemm_library.alignment(lib, 128):
        pass
    lib.set_mk_alignment_for_contiguous_layout = None
    with pytest.raises(RuntimeError, match="is 64 and cannot be set; 128 is needed"), deep_gemm_library.alignment(lib, 128):
        pass


def test_graph_first_call_of_a_shape_is_refused_when_frozen(lib, device):
    a, sa, w, sw = operands("fp8_block", (4,), 1, 64, 128, device)
    out = torch.zeros((4, 64), dtype=torch.bfloat16, device=device)
    deep_gemm.dense_into(a, sa, w[0], sw[0], "fp8_block", out)
    freeze()
    try:
        deep_gemm.dense_into(a, sa, w[0], sw[0], "fp8_block", out)  # has run before
        with pytest.raises(RuntimeError, match=r"deep_gemm: the dense form has never run for sizes .* after moe_ops.freeze\(\): run the op once"):
            deep_gemm.call_library("dense", ("fp8_block", 5, 64, 128), (a, sa), (w[0], sw[0]), out)
    finally:
        freeze(False)
    assert lib.calls == ["dense", "dense"]


def test_graph_packed_and_masked_rows_of_one_size_are_two_choices_of_kernel(lib, device):
    """The library picks its masked kernel by the expected rows of an expert too."""
    offsets, counts = ints([0, 1, 2, 3, 4], device), ints([1, 1, 1, 1], device)
    packed, masked = (operands("fp8_block", shape, 4, 64, 128, device) for shape in ((128,), (4, 128)))
    out = torch.zeros((4, 128, 64), dtype=torch.bfloat16, device=device)
    warm = set(deep_gemm_library._warm)
    deep_gemm.deep_gemm_grouped_into(*masked, counts, None, 1, "fp8_block", out)  # our own kernels around it, on a GPU
    deep_gemm_library._warm.intersection_update(warm)
    deep_gemm.deep_gemm_grouped_into(*packed, offsets, None, 1, "fp8_block", out[0])
    freeze()
    try:
        with pytest.raises(RuntimeError, match="deep_gemm: the masked form has never run for sizes"):
            deep_gemm.deep_gemm_grouped_into(*masked, counts, None, 1, "fp8_block", out)
    finally:
        freeze(False)


def test_env_a_version_without_the_function_says_which(lib):
    with pytest.raises(RuntimeError, match="deep_gemm has none of m_grouped_fp8_gemm_nt_masked, m_grouped_fp8_fp4_gemm_nt_masked"):
        deep_gemm_library._function(types.ModuleType("deep_gemm"), "masked")


# ---- the probe


def test_env_probe_tries_every_form(lib, device):
    assert {form: deep_gemm_probe.try_form(form, device) for form in deep_gemm_probe.FORMS} == ALL
    assert lib.calls == list(deep_gemm_probe.FORMS)

    def wrong(a, b, d, masked_m, expected_m, **options):
        d.zero_()

    def broken(*args, **options):
        raise RuntimeError("assertion\ndim == 2 or dim == 3")

    lib.fp8_m_grouped_gemm_nt_masked, lib.fp8_gemm_nt = wrong, broken
    assert "masked form gives wrong results here (relative error 1.0e+00)" in deep_gemm_probe.try_form("masked", device)
    assert "dense form fails here: RuntimeError: dim == 2 or dim == 3" in deep_gemm_probe.try_form("dense", device)


def test_opcheck(device, lib):
    a, sa, w, sw = operands("fp8_block", (8,), 3, 64, 128, device)
    out = torch.zeros((8, 64), dtype=torch.bfloat16, device=device)
    args = (a, sa, w, sw, ints([0, 3, 3, 8], device), None, 1, "fp8_block", out)
    torch.library.opcheck(torch.ops.moe_ops.deep_gemm_grouped.default, args)
    torch.library.opcheck(torch.ops.moe_ops.deep_gemm_dense.default, (a, sa, w[0], sw[0], "fp8_block", out))
    torch.library.opcheck(torch.ops.moe_ops.deep_gemm_bmm.default, (a[:, None], sa[:, None], w[:1], sw[:1], out[:, None]))


@pytest.mark.parametrize("given", [True, False], ids=["quantized", "16-bit"])
def test_public_functions_reach_the_wrapper(monkeypatch, device, lib, given):
    """On a CPU the op's reference answers; on a GPU the stand-in."""
    for module in (bmm_impls, dense_impls, grouped_impls):
        monkeypatch.setattr(module, "choose", lambda problem, where, impl: None)
    x, w = uneven((8, 256), seed=1).to(device), quantize_weight(uneven((3, 64, 256), block=(128, 128), seed=2).to(device), "fp8_block")
    q = quantize(x, "fp8_block")
    bad = torch.zeros((8, 128), dtype=torch.bfloat16, device=device)[:, :64]
    for out in (None, torch.zeros((8, 64), dtype=torch.bfloat16, device=device)):
        got = dense_gemm(q if given else x, w[0], impl="deep_gemm", out=out)
        assert relative_error(got, dense_gemm(q, w[0], impl="torch", out_dtype=torch.float32)) < 2e-3 and (out is None or got is out)
        got = grouped_gemm(q, w, ints([0, 3, 3, 8], device), impl="deep_gemm", out=out)
        ref = grouped_gemm(q, w, ints([0, 3, 3, 8], device), impl="torch", out_dtype=torch.float32)
        assert relative_error(got, ref) < 2e-3 and (out is None or got is out)
        heads = None if out is None else torch.zeros((8, 3, 64), dtype=torch.bfloat16, device=device)
        x3 = x[:, None].expand(8, 3, 256)
        q3 = quantize(x3.contiguous(), "fp8_block")
        got = bmm(q3 if given else x3, w, impl="deep_gemm", out=heads)
        assert relative_error(got, bmm(q3, w, impl="torch", out_dtype=torch.float32)) < 2e-3 and (out is None or got is heads)
    with pytest.raises(ValueError, match=r"out must be contiguous for impl 'deep_gemm', got strides \(128, 1\)"):
        dense_gemm(q, w[0], impl="deep_gemm", out=bad)


def test_torch_compile_reaches_the_op_without_a_break(monkeypatch, device, lib):
    monkeypatch.setattr(grouped_impls, "choose", lambda problem, where, impl: None)
    w = quantize_weight(uneven((3, 64, 128), seed=2).to(device), "fp8_block")

    def call(x, offsets):
        return grouped_gemm(quantize(x, "fp8_block"), w, offsets, impl="deep_gemm")

    x, offsets = uneven((8, 128), seed=1).to(device), ints([0, 3, 3, 8], device)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, offsets), call(x, offsets))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "call,text",
    [
        (lambda x, w: dense_gemm(x, w[0], bias=torch.ones(64), impl="deep_gemm"), "DeepGEMM adds no bias and no residual"),
        (lambda x, w: dense_gemm(x, w[0], out_dtype=torch.float32, impl="deep_gemm"), "DeepGEMM writes bfloat16, not float32"),
        (
            lambda x, w: grouped_gemm(quantize(x, "fp8_block"), w, ints([0, 8], "cpu"), bias=torch.ones(1, 64), impl="deep_gemm"),
            "DeepGEMM adds no bias and no residual",
        ),
        (lambda x, w: bmm(x[:, None], w, out_dtype=torch.float32, impl="deep_gemm"), "DeepGEMM writes bfloat16, not float32"),
    ],
)
def test_torch_compile_does_not_drop_what_the_library_cannot(call, text):
    """Traced, the machine is not asked, but the problem is: a bias may not be left out in silence."""
    w = quantize_weight(torch.ones(1, 64, 128, dtype=torch.bfloat16), "fp8_block")
    with pytest.raises(ValueError, match=f"impl 'deep_gemm' cannot run here: {text}"):
        torch.compile(call, backend="eager")(torch.ones(8, 128, dtype=torch.bfloat16), w)
    torch._dynamo.reset()
