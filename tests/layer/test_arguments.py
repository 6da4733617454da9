"""What MoELayer refuses at construction and at a call, and what it takes in more than one form."""

import dataclasses

import pytest
import torch

from moe_ops import MoELayer, make_qtensor, quantize, quantize_weight
from moe_ops.core.formats import MXFP8, QTensor
from moe_ops.layer.load import ExpertWeights
from moe_ops.layer.models import RoutingOptions
from moe_ops.quant.fold import fold_weight

E, H, K = 4, 256, 2


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16() / 16


def parts(fmt, inter=256, segments=None):
    w13, w2 = randn(E, 2 * inter, H, seed=1), randn(E, H, inter, seed=2)
    if fmt is None:
        return w13, w2
    return quantize_weight(w13, fmt, segments=segments or (2 if fmt == "fp8_block" else 1)), quantize_weight(w2, fmt)


def layer_of(w13, w2, **kw):
    return MoELayer.from_quantized(randn(E, H, seed=3) * 16, w13, w2, top_k=K, **kw)


def tokens(t=6, dtype=torch.bfloat16):
    return randn(t, H, seed=5).to(dtype) * 16


# ---- quantized weights


def test_segments_that_mean_the_same_are_one():
    two = layer_of(*parts("fp8_block"))
    up, down = parts("fp8_block", segments=1)
    one = layer_of(up, dataclasses.replace(down, segments=2))
    assert one.weights()[0].segments == 2 and one.weights()[1].segments == 1
    assert torch.equal(one(tokens()), two(tokens()))
    up, down = parts("mxfp8", inter=96)
    assert layer_of(dataclasses.replace(up, segments=2), down).weights()[0].segments == 1


@pytest.mark.parametrize("inter", [64, 96, 160, 320])
def test_fused_scale_is_refused_with_the_reason(inter):
    """ceil(2I / 128) = 2 ceil(I / 128) for I = 96: the shape does not tell, the segments do."""
    up, down = parts("fp8_block", inter, segments=1)
    with pytest.raises(ValueError, match=r"MoELayer: w13 must have segments=2 .* got segments=1: a scale of the fused gate\|up matrix mixes"):
        layer_of(up, down)
    wrong = dataclasses.replace(up, segments=2)
    if wrong.scale.shape[1] != 2 * -(-inter // 128):
        with pytest.raises(ValueError, match=r"w13.scale must have shape"):
            layer_of(wrong, down)


def test_folded_weights_are_kept_as_they_are():
    (up, _), (down, _) = (fold_weight(w, segments=s) for w, s in zip(parts("mxfp8"), (2, 1), strict=True))
    assert up.block == down.block == (128, 128)
    layer, plain = layer_of(up, down), layer_of(*parts("mxfp8"))
    w13, w2 = layer.weights()
    assert w13.format is MXFP8 and w13.block == w2.block == (128, 128) and w13.segments == 2
    assert torch.equal(layer.gate_up_proj_scale_inv, up.scale) and layer.gate_up_proj.data_ptr() == up.data.data_ptr()
    y, want = layer(tokens()).float(), plain(tokens()).float()
    assert float((y - want).norm() / want.norm()) < 1e-2
    again = layer_of(*(dataclasses.replace(q, data=q.data.clone(), scale=q.scale.clone()) for q in (up, down)))
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(tokens()), layer(tokens()))
    with pytest.raises(ValueError, match="'gate_up_proj_scale_inv' must be torch.uint8 as in this layer, got torch.float32"):
        plain.load_state_dict(layer.state_dict())


def bad_scale(q, value):
    scale = q.scale.clone()
    scale.view(-1)[3] = value
    return dataclasses.replace(q, scale=scale)


def test_quantized_weights_that_do_not_fit_are_refused():
    fp8, mx = parts("fp8_block"), parts("mxfp8")
    folded, _ = fold_weight(mx[0], segments=2)
    acts = quantize(randn(E, 512, H), "fp8_block")
    strided = dataclasses.replace(mx[0], scale=mx[0].scale.transpose(1, 2).contiguous().transpose(1, 2))
    cases = [
        (lambda: layer_of(acts, fp8[1]), ValueError, r"MoELayer: w13 must be a weight with row_major scales: .* got QTensor\(fp8_block"),
        (lambda: layer_of(fp8[0], dataclasses.replace(fp8[1], layout="mn_major")), ValueError, "MoELayer: w2 must be a weight with row_major"),
        (lambda: layer_of(dataclasses.replace(mx[0], layout="swizzle_32x4x4"), mx[1]), ValueError, "MoELayer: w13 must be a weight with row_major"),
        (
            lambda: layer_of(fp8[0], mx[1]),
            ValueError,
            r"one format and one block, got fp8_block in blocks \(128, 128\) and mxfp8 in blocks \(1, 32\)",
        ),
        (lambda: layer_of(folded, mx[1]), ValueError, r"got mxfp8 in blocks \(128, 128\) and mxfp8 in blocks \(1, 32\)"),
        (lambda: layer_of(dataclasses.replace(mx[0], scale=mx[0].scale[:, :5]), mx[1]), ValueError, r"MoELayer: w13.scale must have shape"),
        (lambda: layer_of(dataclasses.replace(mx[0], scale=mx[0].scale.float()), mx[1]), TypeError, "MoELayer: w13.scale must be torch.uint8"),
        (lambda: layer_of(strided, mx[1]), ValueError, "MoELayer: w13.scale must be contiguous"),
        (lambda: layer_of(mx[0][0], mx[1]), ValueError, "MoELayer: w13 must be 3-D"),
        (lambda: layer_of(bad_scale(mx[0], 255), mx[1]), ValueError, "MoELayer: w13.scale holds the E8M0 byte 255, which is NaN"),
        (lambda: layer_of(fp8[0], bad_scale(fp8[1], float("nan"))), ValueError, "MoELayer: w2.scale holds a scale that is NaN"),
        (lambda: layer_of(fp8[0], bad_scale(fp8[1], 0.0)), ValueError, "MoELayer: w2.scale holds a scale that is NaN, infinite, zero"),
        (lambda: layer_of(*mx, shared=(acts, fp8[1])), ValueError, "MoELayer: shared w13 must be a weight"),
        (lambda: layer_of(*mx, shared=mx[0]), TypeError, "shared must be None or a tuple of two QTensor"),
        (lambda: layer_of(*mx, shared=mx), ValueError, "shared must be a stack of one expert"),
        (
            lambda: MoELayer(randn(E, H), ExpertWeights(mx[0].data, mx[1].data), RoutingOptions(1)),
            TypeError,
            "MoELayer: w13 is torch.float8_e4m3fn without scales",
        ),
        (lambda: MoELayer(randn(E, H), ExpertWeights(mx[0], parts(None)[1]), RoutingOptions(1)), TypeError, "both be quantized or both be floating"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()


# ---- the other arguments


def test_arguments_that_do_not_fit_are_refused_at_construction():
    gate, (w13, w2) = randn(E, H), parts(None)

    def make(**kw):
        given = {"gate": gate, "w13": w13, "w2": w2, "top_k": K} | kw
        return MoELayer.from_weights(given.pop("gate"), given.pop("w13"), given.pop("w2"), **given)

    config = {"model_type": "mixtral", "num_local_experts": E, "num_experts_per_tok": K}
    sd = {"gate.weight": gate, "gate_up_proj": w13, "down_proj": w2}
    cases = [
        ({"gate": None}, TypeError, "gate must be a torch.Tensor, got NoneType"),
        ({"w13": None}, TypeError, "w13 must be a torch.Tensor, got NoneType"),
        ({"w2": None, "format": "mxfp8"}, TypeError, "w2 must be a torch.Tensor, got NoneType"),
        ({"shared_w13": [1], "shared_w2": w2[0]}, TypeError, "shared_w13 must be a torch.Tensor, got list"),
        ({"w2": w2.half()}, TypeError, "w13 and w2 must have one dtype, got torch.bfloat16 and torch.float16"),
        ({"w13": w13.float(), "w2": w2.float()}, TypeError, "w13 must be bfloat16 or float16, got float32"),
        ({"shared_w13": w13[0].half(), "shared_w2": w2[0].half()}, TypeError, "shared expert and experts must have one dtype"),
        ({"top_k": 0}, ValueError, "top_k must be between 1 and 4, got 0"),
        ({"top_k": 5}, ValueError, "top_k must be between 1 and 4, got 5"),
        ({"top_k": 1.0}, TypeError, "top_k must be an int, got float"),
        ({"top_k": 2, "n_group": 4, "topk_group": 1}, ValueError, "top_k must be between 1 and 1, got 2"),
        ({"n_group": 3}, ValueError, "n_group must divide the 4 experts, got 3"),
        ({"topk_group": 2}, ValueError, "topk_group must be between 1 and 1, got 2"),
        ({"score": "relu"}, ValueError, "score must be one of 'softmax'"),
        ({"scale": "2"}, TypeError, "scale must be a float, got str"),
        ({"act": "silu"}, TypeError, "act must be an Activation or None, got str"),
        ({"local": [0, 4]}, TypeError, r"local must be None or a tuple of two ints, \(first, count\), got \[0, 4\]"),
        ({"local": (0, 4.0)}, TypeError, "local must be None or a tuple of two ints"),
        ({"local": (-1, 4)}, ValueError, "local must lie within the 4 experts"),
        ({"b13": [0.0]}, TypeError, "b13 must be a torch.Tensor, got list"),
        ({"gate_bias": torch.zeros(E, dtype=torch.int32)}, TypeError, "gate_bias must be bfloat16 or float16 or float32, got int32"),
    ]
    for kw, error, text in cases:
        with pytest.raises(error, match=f"MoELayer: {text}"):
            make(**kw)
    for kw, error, text in (
        ({"local": [0, 4]}, TypeError, "local must be None or a tuple of two ints"),
        ({"local": (3, 2)}, ValueError, "local must lie within the 4 experts"),
        ({"top_k": 0}, ValueError, "top_k must be between 1 and 4, got 0"),
    ):
        with pytest.raises(error, match=f"MoELayer: {text}"):
            MoELayer.from_state_dict(sd, "", config, **kw)
    for make, name in ((MoELayer.from_weights, "from_weights"), (MoELayer.from_quantized, "from_quantized")):
        with pytest.raises(TypeError, match=rf"^MoELayer\.{name}: unknown argument 'foo'; the routing options are top_k, score, n_group, "):
            make(randn(E, H), *parts(None if name == "from_weights" else "mxfp8"), top_k=1, foo=1)
    with pytest.raises(TypeError, match=r"^MoELayer\.from_state_dict: unknown argument 'foo'"):
        MoELayer.from_state_dict({}, "", {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}, foo=1)
    with pytest.raises(TypeError, match="MoELayer: routing must be RoutingOptions, got dict"):
        MoELayer(gate, ExpertWeights(w13, w2), {"top_k": 1})


def test_arguments_that_do_not_fit_are_refused_at_a_call(device):
    layer, x = MoELayer.from_weights(randn(E, H), *parts(None), top_k=K).to(device), tokens().to(device)
    cases = [
        ({"out": [1]}, TypeError, "out must be a torch.Tensor, got list"),
        ({"out": torch.empty(6, H, device=device)}, TypeError, "out must be bfloat16, got float32"),
        ({"num_valid": 3}, TypeError, "num_valid must be a torch.Tensor, got int"),
        ({"num_valid": torch.tensor([3.0], device=device)}, TypeError, "num_valid must be int32 or int64, got float32"),
        ({"num_valid": torch.tensor([3, 3], dtype=torch.int32, device=device)}, ValueError, r"num_valid must have one element, got shape \(2,\)"),
        ({"num_valid": torch.zeros(1, dtype=torch.int32, device="meta")}, ValueError, "num_valid is on meta but hidden is on"),
    ]
    for kw, error, text in cases:
        with pytest.raises(error, match=f"MoELayer: {text}"):
            layer(x, **kw)
    with pytest.raises(TypeError, match="MoELayer: hidden must be bfloat16, got float16"):
        layer(x.half())
    with pytest.raises(TypeError, match="MoELayer: hidden must be bfloat16 or float16 or float32, got int32"):
        MoELayer.from_weights(randn(E, H), *parts(None), top_k=K, format="mxfp8")(x.int())


@pytest.mark.parametrize("format", [None, "fp8_block", "mxfp8"])
@pytest.mark.parametrize("gated", [False, True])
def test_out_may_be_hidden(format, gated, device):
    """The shared expert reads hidden, too."""
    kw = {"shared_w13": randn(128, H, seed=8), "shared_w2": randn(H, 64, seed=9), "shared_gate": randn(1, H, seed=10) if gated else None}
    layer = MoELayer.from_weights(randn(E, H, seed=3), *parts(None), top_k=K, format=format, **kw).to(device)
    x = tokens().to(device)
    want = layer(x.clone())
    for workspace in (None, layer.make_workspace(8)):
        y = x.clone()
        assert layer(y, out=y, workspace=workspace) is y and torch.equal(y, want)


def test_gradients_of_quantized_experts_are_refused():
    layer = MoELayer.from_weights(randn(E, H), *parts(None), top_k=K, format="mxfp8")
    with pytest.raises(ValueError, match=r"MoELayer: requires_grad_\(True\) on quantized experts, which are for inference only"):
        layer.requires_grad_()
    assert layer.requires_grad_(False) is layer and not any(p.requires_grad for p in layer.parameters())


def test_make_qtensor_gives_what_the_layer_takes():
    up, down = parts("mxfp8")
    layer = layer_of(make_qtensor(up.data, up.scale, "mxfp8"), make_qtensor(down.data, down.scale.view(torch.float8_e8m0fnu), "mxfp8"))
    assert isinstance(layer.weights()[0], QTensor) and torch.equal(layer(tokens()), layer_of(up, down)(tokens()))
