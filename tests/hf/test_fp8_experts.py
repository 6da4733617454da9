"""Quantized experts modules as Transformers loads them (FP8Experts): every scale dtype, refusals, compile, CUDA graphs."""

import pytest
import torch
import torch.nn.functional as F

from moe_ops import dequantize, quantize_weight
from moe_ops.core.numerics import decode_e8m0, random_topk, relative_error
from moe_ops.hf import prepare_model, register
from moe_ops.hf.experts import run

transformers = pytest.importorskip("transformers")
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

E, H, INTER, K, T = 6, 192, 320, 2, 11


@pytest.fixture(autouse=True)
def registered():
    register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(device="cpu", t=T, hidden=H):
    x = torch.randn(t, hidden, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    ids, weights = random_topk(t, E, K, seed=3)
    return x, ids.long().to(device), weights.to(device)


def fp8_experts(fmt, scale_dtype=None, device="cpu", inter=INTER, hidden=H):
    """FP8Experts as the loader leaves them, and the same weights in fp32."""
    cls = use_experts_implementation(FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    config = transformers.Qwen3MoeConfig(hidden_size=hidden, num_experts=E, moe_intermediate_size=inter, num_experts_per_tok=K)
    config._experts_implementation = "moe_ops"
    block = (128, 128) if fmt == "fp8_block" else (1, 32)
    module = cls(config, block_size=block)
    g = torch.Generator().manual_seed(1)
    w13, w2 = (torch.randn(E, n, k, generator=g) * 0.1 for n, k in ((2 * inter, hidden), (hidden, inter)))
    rule = "pow2" if fmt == "fp8_block" and scale_dtype is not None else None
    q13, q2 = quantize_weight(w13, fmt, segments=2 if fmt == "fp8_block" else 1, rule=rule), quantize_weight(w2, fmt, rule=rule)
    for name, q in (("gate_up_proj", q13), ("down_proj", q2)):
        scale = q.scale
        if scale_dtype is torch.float8_e8m0fnu and scale.dtype == torch.float32:
            scale = (torch.log2(scale) + 127).to(torch.uint8)
        if scale_dtype is not None:
            scale = scale.view(scale_dtype) if scale.element_size() == 1 else scale.to(scale_dtype)
        setattr(module, name, torch.nn.Parameter(q.data, requires_grad=False))
        setattr(module, f"{name}_scale_inv", torch.nn.Parameter(scale, requires_grad=False))
    return module.to(device), dequantize(q13).to(device), dequantize(q2).to(device)


def by_hand(w13, w2, x, ids, weights):
    out = torch.zeros_like(x, dtype=torch.float32)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            gate, up = (w13[ids[t, j]] @ x[t].float()).chunk(2)
            out[t] += weights[t, j] * (w2[ids[t, j]] @ (F.silu(gate) * up))
    return out


QUANTIZED = [
    ("fp8_block", None),
    ("fp8_block", torch.float8_e8m0fnu),
    ("fp8_block", torch.bfloat16),
    ("mxfp8", None),
    ("mxfp8", torch.float8_e8m0fnu),
]


@pytest.mark.parametrize(("fmt", "scale_dtype"), QUANTIZED)
def test_fp8_experts(fmt, scale_dtype, device):
    module, w13, w2 = fp8_experts(fmt, scale_dtype, device=device)
    args = inputs(device)
    y = module(*args)
    assert y.dtype == torch.bfloat16 and relative_error(y, by_hand(w13, w2, *args)) < 5e-2
    assert relative_error(y, run(module, *args, impl="torch")) < 1e-2
    bad = args[1].clone()
    bad[0] = E
    assert torch.equal(module(args[0], bad, args[2])[0], torch.zeros_like(y[0]))
    # activations of a quantized layer may be fp32
    assert relative_error(module(args[0].float(), *args[1:]), y) < 1e-2


def test_SCALE_bytes_pass_untouched(device):
    """[120, 125, 127, 130, 140] as E8M0 stays so; the factor of every weight is the one stored."""
    module, w13, w2 = fp8_experts("mxfp8", torch.float8_e8m0fnu, device=device)
    pattern = torch.tensor([120, 125, 127, 130, 140], dtype=torch.uint8, device=device)
    scale = pattern.repeat(E * H * INTER // 32)[: E * H * (INTER // 32)].view(E, H, INTER // 32)
    module.down_proj_scale_inv.data.view(torch.uint8).copy_(scale)
    args = inputs(device)
    w2 = module.down_proj.float() * decode_e8m0(scale).repeat_interleave(32, -1)
    assert relative_error(module(*args), by_hand(w13, w2, *args)) < 5e-2
    assert torch.equal(module.down_proj_scale_inv.view(torch.uint8), scale)


@pytest.mark.parametrize("scale_dtype", [None, torch.float8_e8m0fnu])
def test_folded_copies_on_hopper(scale_dtype, monkeypatch):
    """FP8Experts keep their parameters, which Transformers may save; the folded copies live beside them and follow them."""
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    module, w13, w2 = fp8_experts("mxfp8", scale_dtype, inter=256, hidden=256)
    args = inputs(hidden=256)
    before = {k: v.view(torch.uint8).clone() for k, v in module.state_dict().items()}
    y = module(*args)
    plan = module._moe_ops
    assert plan.block == (128, 128) and plan.w13.shape == module.gate_up_proj.shape and plan.s13.dtype == torch.float32
    assert relative_error(y, by_hand(w13, w2, *args)) < 5e-2
    assert all(torch.equal(v.view(torch.uint8), before[k]) for k, v in module.state_dict().items())
    where = plan.s2.data_ptr(), plan.w2.data_ptr()
    module.down_proj_scale_inv.data.view(torch.uint8).add_(1)
    module.down_proj_scale_inv = torch.nn.Parameter(module.down_proj_scale_inv.data.clone(), requires_grad=False)
    assert torch.equal(module(*args), 2 * y) and (plan.s2.data_ptr(), plan.w2.data_ptr()) == where
    fast, nodes = compiled(module)
    assert torch.equal(fast(*args), 2 * y) and nodes == [1]
    prepare_model(module, fold=False)
    assert module._moe_ops.block == (1, 32) and module._moe_ops.w13 is None
    assert relative_error(module(*args), 2 * y) < 1e-2


def test_TAIL_fused_scale_is_refused_with_the_reason():
    """I = 320: Transformers quantizes the fused 640 rows in 5 blocks, of which one mixes gate and up; apart they are 3 + 3."""
    module, _, _ = fp8_experts("fp8_block")
    module.gate_up_proj_scale_inv = torch.nn.Parameter(torch.ones(E, 5, 2), requires_grad=False)
    with pytest.raises(ValueError, match=r"FP8Experts.gate_up_proj_scale_inv: .*\(6, 6, 2\).*\(6, 5, 2\); .*one fused matrix"):
        module(*inputs())
    whole, w13, w2 = fp8_experts("fp8_block", inter=256)
    assert relative_error(whole(*inputs()), by_hand(w13, w2, *inputs())) < 5e-2


def _changed(change, fmt="mxfp8"):
    module, _, _ = fp8_experts(fmt)
    change(module)
    return module


def parameter(name, t):
    return lambda m: setattr(m, name, torch.nn.Parameter(t, requires_grad=False))


REFUSED = [
    ("static activations", lambda: _changed(lambda m: setattr(m, "activation_scheme", "static")), "activation_scheme='static'"),
    ("no block size", lambda: _changed(lambda m: setattr(m, "block_size", None)), "block_size=None; supported are"),
    ("other block size", lambda: _changed(lambda m: setattr(m, "block_size", (64, 64))), r"block_size=\(64, 64\)"),
    ("FP4", lambda: _changed(parameter("gate_up_proj", torch.zeros(E, 640, H, dtype=torch.int8))), "FP4 packed in int8 is not supported"),
    ("cast", lambda: _changed(lambda m: m.half()), "has a scale: was a quantized model converted by .to"),
    (
        "scale shape",
        lambda: _changed(parameter("down_proj_scale_inv", torch.ones(E, 2, 2)), "fp8_block"),
        r"FP8Experts.down_proj_scale_inv: .*\(6, 2, 3\)",
    ),
    ("scale dtype", lambda: _changed(parameter("down_proj_scale_inv", torch.ones(E, H, 10))), "must be torch.uint8"),
    (
        "NaN scale",
        lambda: _changed(parameter("down_proj_scale_inv", torch.full((E, H, 10), 255, dtype=torch.uint8))),
        "FP8Experts.down_proj_scale_inv.* holds the E8M0 byte 255",
    ),
]


@pytest.mark.parametrize(("make", "text"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_with_a_reason(make, text):
    with torch.no_grad(), pytest.raises(ValueError, match=text):
        make()(*inputs())


def compiled(model, backend="aot_eager"):
    nodes = []

    def keep(gm, example):
        nodes.append(sum(n.op == "call_function" and n.target is torch.ops.moe_ops.fused_moe.default for n in gm.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(gm, example)

    return torch.compile(model, fullgraph=True, backend=keep), nodes


@pytest.mark.parametrize(("fmt", "scale_dtype"), QUANTIZED)
def test_COMPILE_quantized_modules_with_changing_tokens(fmt, scale_dtype, device):
    module, _, _ = fp8_experts(fmt, scale_dtype, device=device)
    fast, nodes = compiled(module)
    for t in (8, 5, 13, 31):
        args = inputs(device, t)
        assert torch.equal(fast(*args), module(*args))
    assert len(nodes) <= 2 and set(nodes) == {1}


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "scale_dtype"), QUANTIZED)
def test_GRAPH_no_sync_and_replay(fmt, scale_dtype, device):
    module, _, _ = fp8_experts(fmt, scale_dtype, device=device)
    x, ids, weights = inputs(device)
    want = module(x, ids, weights)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        module(x, ids, weights)
        with torch.cuda.graph(graph):
            out = module(x, ids, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert torch.equal(out, want)
    ids.copy_((ids + 1) % E)
    graph.replay()
    assert torch.equal(out, module(x, ids, weights)) and not torch.equal(out, want)


@pytest.mark.gpu
def test_GRAPH_capture_before_any_call_is_one_clear_error(device):
    module, _, _ = fp8_experts("mxfp8", device=device)
    args = inputs(device)
    with pytest.raises(RuntimeError, match="FP8Experts was never run before capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(*args)
    torch.cuda.synchronize()
    assert module(*args).isfinite().all()
