"""The fused layer: the chain of kernels against its reference, and the public function in all its forms."""

import math
from dataclasses import replace

import pytest
import torch

from moe_ops import Activation, Routing, fused_moe, make_qtensor, quantize_weight
from moe_ops.core.numerics import random_topk, relative_error, uneven
from moe_ops.layer.fused import _SCHEMES, fused_moe_into, fused_moe_ref, make_workspace
from moe_ops.quant.fold import fold_weight
from moe_ops.quant.quantize import quantize_ref

BOUND = 1e-2
GPU = torch.cuda.is_available()


def layer_weights(fmt, e, h, i, device, dtype=torch.bfloat16):
    w13 = (uneven((e, 2 * i, h), block=(128, 128), seed=1, spread=1) * h**-0.5).to(dtype).to(device)
    w2 = (uneven((e, h, i), block=(128, 128), seed=2, spread=1) * i**-0.5).to(dtype).to(device)
    if fmt == "plain":
        return w13, w2
    if fmt == "mxfp8_folded":
        folded = fold_weight(quantize_weight(w13, "mxfp8"), segments=2), fold_weight(quantize_weight(w2, "mxfp8"))
        assert all(report.folded for _, report in folded)
        return folded[0][0], folded[1][0]
    return quantize_weight(w13, fmt, segments=2 if fmt == "fp8_block" else 1), quantize_weight(w2, fmt)


def split(w):
    return (w.data.view(torch.uint8), w.scale) if hasattr(w, "scale") else (w, None)


def op_args(x, w13, w2, routing, fmt, act=None, b13=None, b2=None):
    act = act or Activation()
    (d13, s13), (d2, s2) = split(w13), split(w2)
    segments = w13.segments if fmt != "plain" else 1
    return (
        x, d13, s13, d2, s2, b13, b2, routing.weights, routing.offsets, routing.order, routing.inverse, fmt, segments,
        act.kind, act.alpha, math.inf if act.limit is None else act.limit, act.up_offset, act.interleaved,
    )  # fmt: skip


def kernels(x, w13, w2, routing, fmt, **kw):
    """The chain of launches on its own buffers: on a GPU, or in the interpreter."""
    out = torch.empty_like(x)
    ws = make_workspace(x.shape[0], routing.top_k, w13, x.dtype)
    fused_moe_into(op_args(x, w13, w2, routing, fmt, **kw), out, ws)
    return out


def tokens(t, h, device, dtype=torch.bfloat16):
    return uneven((t, h), block=(1, 128), seed=3, spread=2, dtype=dtype).to(device)


def make_routing(pattern, t, e, k, device, local=None):
    ids, weights = random_topk(t, e, k, seed=5)
    if pattern == "none":
        ids[:] = -1
    elif pattern == "one row":
        ids[:] = -1
        ids[t // 2, 0] = e - 1
    elif pattern == "hot":
        ids[:] = -1
        ids[:, 0] = 1
    return Routing.from_topk(ids.to(device), weights.to(device), e, local=local)


PATTERNS = ("none", "one row", "hot", "even")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "mxfp8_folded", "plain"])
def test_chain_matches_reference(device, fmt, pattern):
    t, e, k, h, i = 9, 4, 2, 256, 256 if fmt == "mxfp8_folded" else 192  # I % 128 = 64: gate and up scales apart
    w13, w2 = layer_weights(fmt, e, h, i, device)
    x, routing = tokens(t, h, device), make_routing(pattern, t, e, k, device)
    out = kernels(x, w13, w2, routing, fmt)
    ref = fused_moe_ref(*op_args(x, w13, w2, routing, fmt))
    assert relative_error(out, ref) <= BOUND
    empty = (routing.inverse < 0).all(1)
    assert (out[empty] == 0).all()  # tokens without rows are exactly 0


@pytest.mark.parametrize(
    "act", [Activation.gelu_tanh(), Activation.gpt_oss(interleaved=True), Activation.clamped(1.5)], ids=["gelu", "gpt-oss", "clamped"]
)
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "plain"])
def test_activations_and_biases(device, fmt, act):
    t, e, k, h, i = 5, 3, 2, 128, 128
    w13, w2 = layer_weights(fmt, e, h, i, device)
    g = torch.Generator().manual_seed(7)
    b13, b2 = (torch.randn(e, n, generator=g).to(torch.bfloat16).to(device) for n in (2 * i, h))
    x, routing = tokens(t, h, device), make_routing("even", t, e, k, device)
    out = kernels(x, w13, w2, routing, fmt, act=act, b13=b13, b2=b2)
    ref = fused_moe_ref(*op_args(x, w13, w2, routing, fmt, act=act, b13=b13, b2=b2))
    assert relative_error(out, ref) <= BOUND


@pytest.mark.parametrize("tokens_", [5, 200], ids=["decode", "prefill"])
def test_folded_weights_give_what_the_unfolded_ones_give(device, tokens_):
    """Same layer function, numbers within the bound, whether MXFP8 weights were folded or not."""
    e, k, h, i = 2, 1, 256, 128
    exact, folded = layer_weights("mxfp8", e, h, i, device), layer_weights("mxfp8_folded", e, h, i, device)
    x, routing = tokens(tokens_, h, device), make_routing("even", tokens_, e, k, device)
    want = fused_moe_ref(*op_args(x, *exact, routing, "mxfp8"))
    assert relative_error(fused_moe_ref(*op_args(x, *folded, routing, "mxfp8_folded")), want) <= 1e-3
    assert relative_error(kernels(x, *folded, routing, "mxfp8_folded"), want) <= BOUND
    assert relative_error(fused_moe(x, *folded, routing), want) <= BOUND
    with pytest.raises(ValueError, match="fused_moe: w13 has blocks .* fold both mxfp8 weights or neither"):
        fused_moe(x, folded[0], exact[1], routing)


def test_reference_against_an_independent_formula():
    """fp32 everywhere, 16-bit weights: the reference is the textbook MoE layer."""
    t, e, k, h, i = 11, 5, 3, 96, 64
    w13, w2 = layer_weights("plain", e, h, i, "cpu", torch.float16)
    x, routing = tokens(t, h, "cpu", torch.float16), make_routing("even", t, e, k, "cpu")
    expected = torch.zeros(t, h)
    for token in range(t):
        for j in range(k):
            expert = int(routing.ids[token, j])
            gate, up = (w13[expert].float() @ x[token].float()).chunk(2)
            expected[token] += routing.weights[token, j] * (w2[expert].float() @ (torch.nn.functional.silu(gate) * up))
    assert relative_error(fused_moe(x, w13, w2, routing), expected) < 2e-3


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_tokens(device, fmt, dtype):
    t, e, k, h, i = 4, 3, 2, 128, 128
    w13, w2 = layer_weights(fmt, e, h, i, device)
    x, routing = tokens(t, h, device, dtype), make_routing("even", t, e, k, device)
    out = kernels(x, w13, w2, routing, fmt)
    assert out.dtype == dtype and relative_error(out, fused_moe_ref(*op_args(x, w13, w2, routing, fmt))) <= BOUND


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "plain"])
def test_sent_remote_experts_give_what_the_local_ones_alone_give(device, fmt):
    """SENT: a window of experts computes its pairs only; foreign, -1 and out-of-range ids are skipped; a row of only those is exactly 0."""
    t, e, k, h, i = 8, 8, 3, 128, 128
    w13, w2 = layer_weights(fmt, 3, h, i, device)
    ids, weights = random_topk(t, e, k, seed=9)
    ids[0], ids[1, 0], ids[1, 1] = -1, e, 2**31 - 1
    x = tokens(t, h, device)
    routing = Routing.from_topk(ids.to(device), weights.to(device), e, local=(2, 3))
    out = kernels(x, w13, w2, routing, fmt)
    inside = (ids >= 2) & (ids < 5)
    alone = Routing.from_topk(torch.where(inside, ids - 2, -1).to(device), weights.to(device), 3)
    assert torch.equal(out, kernels(x, w13, w2, alone, fmt))
    assert (out[0] == 0).all() and torch.isfinite(out).all()


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "plain"])
def test_nan_padding_rows_do_not_leak(device, fmt):
    """NAN: rows past num_valid hold NaN; real rows are those of a call without the padding (config pinned by the small size)."""
    t, valid, e, k, h, i = 8, 5, 4, 2, 256, 128
    w13, w2 = layer_weights(fmt, e, h, i, device)
    x = tokens(t, h, device)
    x[valid:] = float("nan")
    ids, weights = random_topk(t, e, k, seed=2)
    num_valid = torch.tensor(valid, dtype=torch.int32, device=device)
    padded = Routing.from_topk(ids.to(device), weights.to(device), e, num_valid=num_valid)
    short = Routing.from_topk(ids[:valid].to(device), weights[:valid].to(device), e)
    out = kernels(x, w13, w2, padded, fmt)
    assert (out[valid:] == 0).all()
    assert torch.equal(out[:valid], kernels(x[:valid].contiguous(), w13, w2, short, fmt))


def test_out_and_workspace_forms(device):
    t, e, k, h, i = 6, 4, 2, 128, 128
    w13, w2 = layer_weights("fp8_block", e, h, i, device)
    x, routing = tokens(t, h, device), make_routing("even", t, e, k, device)
    plain = fused_moe(x, w13, w2, routing)
    out, ws = torch.empty_like(x), make_workspace(t + 3, k, w13)
    assert fused_moe(x, w13, w2, routing, out=out, workspace=ws) is out
    assert torch.equal(out, plain) and torch.equal(fused_moe(x, w13, w2, routing, out=torch.empty_like(x)), plain)
    assert relative_error(fused_moe(x, w13, w2, routing, impl="torch"), plain) <= BOUND


@pytest.mark.parametrize(
    "make,field",
    [
        (lambda w: make_workspace(8, 2, layer_weights("fp8_block", 4, 128, 128, "cpu")[0], torch.float16), "xs"),
        (lambda w: make_workspace(2, 8, w, torch.float16), "xq"),
        (lambda w: make_workspace(8, 2, w, torch.bfloat16), "y"),
        (lambda w: make_workspace(8, 2, layer_weights("mxfp8", 4, 128, 256, "cpu")[0], torch.float16), "h"),
    ],
    ids=["another format", "fewer tokens, more experts a token", "bf16 for fp16 tokens", "another I"],
)
def test_workspaces_that_do_not_fit_are_refused(make, field):
    w13, w2 = layer_weights("mxfp8", 4, 128, 128, "cpu")
    x, routing = tokens(8, 128, "cpu", torch.float16), make_routing("even", 8, 4, 2, "cpu")
    with pytest.raises(ValueError, match=rf"fused_moe: workspace.{field} must be at least .* use make_workspace"):
        fused_moe(x, w13, w2, routing, out=torch.empty_like(x), workspace=make(w13))
    fused_moe(x, w13, w2, routing, out=torch.empty_like(x), workspace=make_workspace(9, 2, w13, torch.float16))


@pytest.mark.parametrize("t", [1, 2, 300])
def test_weights_off_the_16_byte_grid(device, t):
    """Tensor descriptors cannot address them: the chain runs unfused and gives the same result at every size."""
    e, h, i = 2, 128, 128
    w13, w2 = layer_weights("fp8_block", e, h, i, device)

    def off(w, segments):
        flat = torch.empty(w.data.numel() + 8, dtype=torch.uint8, device=device)
        flat[8:].copy_(w.data.view(torch.uint8).flatten())
        return make_qtensor(flat[8:].view(w.data.shape), w.scale, "fp8_block", segments=segments)

    x, routing = tokens(t, h, device), make_routing("even", t, e, 1, device)
    want = fused_moe(x, w13, w2, routing)
    for pair in ((off(w13, 2), w2), (w13, off(w2, 1)), (off(w13, 2), off(w2, 1))):
        assert relative_error(fused_moe(x, *pair, routing), want) <= 1e-2
        workspace = make_workspace(t, 1, pair[0])
        assert relative_error(fused_moe(x, *pair, routing, out=torch.empty_like(x), workspace=workspace), want) <= 1e-2


def test_zero_tokens(device):
    w13, w2 = layer_weights("fp8_block", 4, 128, 128, device)
    routing = Routing.from_topk(torch.empty(0, 2, dtype=torch.int32, device=device), torch.empty(0, 2, device=device), 4)
    x = torch.empty(0, 128, dtype=torch.bfloat16, device=device)
    out = fused_moe(x, w13, w2, routing)
    assert out.shape == (0, 128) and out.dtype == torch.bfloat16


def test_strided_tokens_equal_contiguous_ones(device):
    """LAYOUT: a view with another row stride, or a start that is not 16-byte aligned, gives the same bits."""
    t, e, k, h, i = 5, 3, 2, 128, 128
    w13, w2 = layer_weights("fp8_block", e, h, i, device)
    routing = make_routing("even", t, e, k, device)
    big = tokens(t, h + 64, device)
    for x in (big[:, 64:], big[:, 1 : 1 + h], tokens(2 * t, h, device)[::2], tokens(1, h, device).expand(t, h)):
        assert torch.equal(kernels(x, w13, w2, routing, "fp8_block"), kernels(x.contiguous(), w13, w2, routing, "fp8_block"))


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "mxfp8_folded", "plain"])
def test_opcheck(device, fmt):
    t, e, k, h, i = 3, 3, 2, 128, 128
    w13, w2 = layer_weights(fmt, e, h, i, device)
    args = op_args(tokens(t, h, device), w13, w2, make_routing("even", t, e, k, device), fmt)
    torch.library.opcheck(torch.ops.moe_ops.fused_moe.default, args)
    ws = make_workspace(t, k, w13)
    torch.library.opcheck(torch.ops.moe_ops.fused_moe_out.default, (*args, torch.empty_like(args[0]), *ws))
    a, sa, w, sw = args[0], None, args[1], args[2]
    if fmt != "plain":
        a, sa = quantize_ref(args[0], None, *_SCHEMES[fmt][:1], "row_major", _SCHEMES[fmt][1])
    gemm = (a, sa, w, sw, None, args[8], args[9], k, _SCHEMES[fmt][0], args[12])
    torch.library.opcheck(torch.ops.moe_ops.grouped_gemm.default, (*gemm, torch.float32))
    torch.library.opcheck(torch.ops.moe_ops.grouped_gemm_out.default, (*gemm, torch.zeros(t * k, 2 * i, device=device)))


def test_compiles_to_one_node_with_dynamic_tokens(device):
    e, k, h, i = 4, 2, 128, 128
    w13, w2 = layer_weights("fp8_block", e, h, i, device)

    def layer(x, ids, weights):
        return fused_moe(x, w13, w2, Routing.from_topk(ids, weights, e)) * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for t in (3, 7, 5):
        ids, weights = random_topk(t, e, k, seed=t)
        args = (tokens(t, h, device), ids.to(device), weights.to(device))
        assert torch.equal(compiled(*args), layer(*args))


def _bad(**kw):
    device = "cpu"
    w13, w2 = layer_weights("fp8_block", 3, 128, 128, device)
    args = dict(x=tokens(4, 128, device), w13=w13, w2=w2, routing=make_routing("even", 4, 3, 2, device))
    args.update(kw)
    return lambda: fused_moe(args.pop("x"), args.pop("w13"), args.pop("w2"), args.pop("routing"), **args)


X = torch.zeros(4, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "call,error,text",
    [
        (_bad(x=X[0]), ValueError, "x must be 2-D, got shape"),
        (_bad(x=X.long()), TypeError, "x must be bfloat16 or float16 or float32, got int64"),
        (_bad(x=torch.zeros(4, 256, dtype=torch.bfloat16)), ValueError, "x has H = 256 and w13 has H = 128"),
        (_bad(x=torch.zeros(5, 128, dtype=torch.bfloat16)), ValueError, "routing has 4 tokens and x has 5 rows"),
        (_bad(w2=torch.zeros(3, 128, 128, dtype=torch.bfloat16)), TypeError, "w13 and w2 must both be QTensor or both be 16-bit tensors"),
        (_bad(w2=layer_weights("mxfp8", 3, 128, 128, "cpu")[1]), ValueError, "w13 is fp8_block and w2 is mxfp8; both must have one format"),
        (_bad(w2=layer_weights("fp8_block", 3, 128, 256, "cpu")[1]), ValueError, r"w2 must have shape \(3, 128, 128\)"),
        (_bad(routing=make_routing("even", 4, 5, 2, "cpu")), ValueError, "routing has 5 local experts and w13 has 3"),
        (_bad(b13=torch.zeros(3, 128)), ValueError, r"b13 must have shape \(3, 256\)"),
        (_bad(b2=torch.zeros(3, 128, dtype=torch.int32)), TypeError, "b2 must be float32 or bfloat16 or float16, got int32"),
        (_bad(w13=None), TypeError, "w13 must be a QTensor or a torch.Tensor, got NoneType"),
        (
            _bad(w13=replace(layer_weights("fp8_block", 3, 128, 128, "cpu")[0], scale=torch.ones(3, 1, 1))),
            ValueError,
            r"w13.scale must have shape \(3, 2, 1\)",
        ),
        (
            _bad(w13=replace(layer_weights("fp8_block", 3, 128, 128, "cpu")[0], scale=torch.ones(3, 2, 1).half())),
            TypeError,
            "w13.scale must be torch.float32",
        ),
        (_bad(routing=None), TypeError, "routing must be a Routing"),
        (_bad(act="silu"), TypeError, "act must be an Activation, got str"),
        (_bad(b13=[1]), TypeError, "b13 must be a torch.Tensor, got list"),
        (_bad(out=[1]), TypeError, "out must be a torch.Tensor, got list"),
        (_bad(out=X.clone(), workspace=(1, 2)), TypeError, "workspace must come from make_workspace, got tuple"),
        (
            lambda: fused_moe(X, torch.ones(3, 256, 128).bfloat16(), torch.ones(3, 128, 128).half(), make_routing("even", 4, 3, 2, "cpu")),
            TypeError,
            "16-bit w2 must have x's dtype torch.bfloat16, got torch.float16",
        ),
        (
            lambda: fused_moe(
                torch.zeros(4, 128).bfloat16(),
                quantize_weight(torch.ones(3, 2 * 192, 128).bfloat16(), "fp8_block"),
                quantize_weight(torch.ones(3, 128, 192).bfloat16(), "fp8_block"),
                make_routing("even", 4, 3, 2, "cpu"),
            ),
            ValueError,
            "w13 has I = 192, which 128 does not divide, .* quantize it with segments=2",
        ),
        (_bad(impl="deepgemm"), ValueError, "impl must be one of 'triton', 'torch', got 'deepgemm'"),
        (_bad(impl="triton"), ValueError, "impl 'triton' needs CUDA tensors, got cpu"),
        (_bad(out=torch.zeros(4, 64, dtype=torch.bfloat16)), ValueError, r"out must have shape \(4, 128\)"),
        (_bad(x=X.clone().requires_grad_()), ValueError, "x requires grad, and this op is for inference only"),
        (
            _bad(out=X.clone(), workspace=make_workspace(1, 2, layer_weights("fp8_block", 3, 128, 128, "cpu")[0])),
            ValueError,
            r"workspace.h must be at least \(8, 256\) of torch.float32 .* got \(2, 256\) .* use make_workspace",
        ),
    ],
)
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=f"fused_moe: .*{text}"):
        call()
