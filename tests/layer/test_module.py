"""MoELayer: against the blocks of Transformers, every way to make one, state dicts bit for bit, padding, windows, compile and graphs."""

import pytest
import torch
import torch.nn.functional as F

from moe_ops import MoELayer, dequantize, quantize_weight
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.quant.activation import Activation, activation_ref

E, H, INTER, K = 8, 192, 320, 2  # like gpt-oss's 2880, neither H nor I is a multiple of 128
FORMATS = [None, "fp8_block", "mxfp8"]


def bits(t):
    return t.view(torch.uint8) if t.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else t


def same_state(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(bits(a[name]), bits(b[name])), name


def raw_weights(device="cpu", e=E, h=H, inter=INTER):
    w13 = uneven((e, 2 * inter, h), block=(64, 32), seed=1, spread=1) * 0.05
    w2 = uneven((e, h, inter), block=(64, 32), seed=2, spread=1) * 0.05
    gate = torch.randn(e, h, generator=torch.Generator().manual_seed(3)).bfloat16()
    return gate.to(device), w13.to(device), w2.to(device)


def make(format=None, device="cpu", **kw):
    gate, w13, w2 = raw_weights(device)
    return MoELayer.from_weights(gate, w13, w2, format=format, **({"top_k": K, "renormalize": True} | kw))


def tokens(t, device="cpu", seed=5, h=H):
    return torch.randn(t, h, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


# ---- against Transformers' own blocks


def hf_block(kind):
    """(fp32 block, its config, hidden) of a small random model's MoE layer, bf16-representable weights."""
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": H, "num_experts_per_tok": 3, "num_hidden_layers": 2, "vocab_size": 32}
    made = {
        "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", {"num_experts": E, "moe_intermediate_size": INTER, "norm_topk_prob": True}),
        "qwen2_moe": (
            "Qwen2MoeConfig",
            "Qwen2MoeSparseMoeBlock",
            {"num_experts": E, "moe_intermediate_size": INTER, "shared_expert_intermediate_size": 96},
        ),
        "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock", {"num_local_experts": E, "intermediate_size": INTER}),
        "deepseek_v3": (
            "DeepseekV3Config",
            "DeepseekV3MoE",
            {"n_routed_experts": E, "moe_intermediate_size": INTER, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
        ),
        "glm4_moe": (
            "Glm4MoeConfig",
            "Glm4MoeMoE",
            {
                "n_routed_experts": E,
                "moe_intermediate_size": INTER,
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 1,
                "routed_scaling_factor": 1.5,
            },
        ),
        "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2SparseMoeBlock", {"num_local_experts": E, "intermediate_size": INTER}),
        "gpt_oss": ("GptOssConfig", "GptOssMLP", {"num_local_experts": E, "intermediate_size": INTER}),
    }
    config_class, block_class, extra = made[kind]
    config = getattr(transformers, config_class)(**common, **extra)
    config._experts_implementation = "eager"
    block = getattr(__import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=[block_class]), block_class)(config)
    g = torch.Generator().manual_seed(11)
    for name, t in block.state_dict().items():
        scale = 0.5 if "bias" in name else 1.0 if "gate.weight" in name or "router.weight" in name else 0.1
        t.copy_((torch.randn(t.shape, generator=g) * scale).bfloat16().to(t.dtype))
    return block.float().eval(), config, tokens(17).view(1, 17, H)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss"])
def test_equals_the_block_of_transformers(kind, device):
    block, config, hidden = hf_block(kind)
    with torch.no_grad():
        want = block(hidden.float())
    want = want[0] if isinstance(want, tuple) else want
    sd = {f"model.layers.0.mlp.{k}": v.bfloat16() if v.dim() > 1 else v for k, v in block.state_dict().items()}
    for source in (config, config.to_dict()):
        layer = MoELayer.from_state_dict(sd, "model.layers.0.mlp.", source, device=device)
        assert relative_error(layer(hidden.to(device)), want.to(device)) < 1e-2
    for fmt in ("fp8_block", "mxfp8"):
        layer = MoELayer.from_state_dict(sd, "model.layers.0.mlp.", config, format=fmt, device=device)
        assert layer.format.name == fmt
        assert relative_error(layer(hidden.to(device)), want.to(device)) < 0.1


# ---- the chain


def by_hand(layer, x):
    """Token by token in fp64 from dequantized weights; only the activations' quantization is missing."""
    w13, w2 = (dequantize(w) if layer.format is not None else w.float() for w in layer.weights())
    logits = x.double() @ layer.gate.weight.double().T
    p = logits.softmax(-1)
    top, ids = p.topk(layer.routing.top_k, dim=-1)
    top = top / top.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t in range(x.shape[0]):
        for j in range(layer.routing.top_k):
            e = int(ids[t, j])
            h = x[t].double() @ w13[e].double().T
            a = activation_ref(h.float(), layer.act).double()
            out[t] += top[t, j] * (a @ w2[e].double().T)
    return out


@pytest.mark.parametrize(("format", "bound"), [(None, 6e-3), ("fp8_block", 5e-2), ("mxfp8", 5e-2)])
def test_equals_the_sum_by_hand(format, bound, device):
    layer, x = make(format, device), tokens(9, device)
    y = layer(x)
    assert y.dtype == torch.bfloat16 and relative_error(y, by_hand(layer, x)) < bound
    assert relative_error(y, layer(x, impl="torch")) < 1e-2
    assert torch.equal(y, layer(x))
    out = torch.full_like(x, float("nan"))
    assert layer(x, out=out) is out and torch.equal(out, y)
    out.fill_(float("nan"))
    layer(x, out=out, workspace=layer.make_workspace(16))
    assert torch.equal(out, y)
    assert torch.equal(layer(x.view(3, 3, H)), y.view(3, 3, H))


def test_quantized_weights_are_used_as_they_are(device):
    gate, w13, w2 = raw_weights(device)
    for fmt in ("fp8_block", "mxfp8"):
        q13, q2 = quantize_weight(w13, fmt, segments=2 if fmt == "fp8_block" else 1), quantize_weight(w2, fmt)
        a = MoELayer.from_quantized(gate, q13, q2, top_k=K, renormalize=True)
        assert a.gate_up_proj.data_ptr() == q13.data.data_ptr()
        same_state(a.state_dict(), make(fmt, device).state_dict())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gated", [False, True])
def test_shared_expert(format, gated, device):
    g = torch.Generator().manual_seed(8)
    s13, s2 = (torch.randn(2 * 96, H, generator=g) * 0.1).bfloat16().to(device), (torch.randn(H, 96, generator=g) * 0.1).bfloat16().to(device)
    sg = torch.randn(1, H, generator=g).bfloat16().to(device) if gated else None
    layer, plain, x = make(format, device, shared_w13=s13, shared_w2=s2, shared_gate=sg), make(format, device), tokens(7, device)
    w13, w2 = (dequantize(w) if format else w.float() for w in layer.shared_expert.weights())
    want = activation_ref(x.float() @ w13[0].T, layer.act) @ w2[0].T
    if gated:
        want = want * torch.sigmoid(x.float() @ sg.float().T)
    assert relative_error(layer(x).float() - plain(x).float(), want) < (2e-2 if format is None else 6e-2)
    assert "shared_expert.gate_up_proj" in layer.state_dict() and ("shared_expert_gate.weight" in layer.state_dict()) == gated
    padded = torch.cat((x, torch.full_like(x, float("nan"))))
    y = layer(padded, num_valid=torch.tensor([7], dtype=torch.int32, device=device))
    assert torch.equal(y[7:], torch.zeros_like(x)) and relative_error(y[:7], layer(x)) < 5e-3


@pytest.mark.parametrize("format", FORMATS)
def test_padded_rows_cost_nothing_and_may_hold_anything(format, device):
    layer, x = make(format, device), tokens(6, device)
    want = layer(x)
    padded = torch.cat((x, torch.full((5, H), float("nan"), dtype=x.dtype, device=device)))
    for dtype in (torch.int32, torch.int64):
        y = layer(padded, num_valid=torch.tensor([6], dtype=dtype, device=device))
        assert torch.equal(y[6:], torch.zeros_like(y[6:])) and relative_error(y[:6], want) < 5e-3
    y = layer(padded, num_valid=torch.tensor([0], dtype=torch.int32, device=device))
    assert torch.equal(y, torch.zeros_like(y))
    assert layer(x[:0]).shape == (0, H)


@pytest.mark.parametrize("format", FORMATS)
def test_SENT_windows_of_experts_sum_to_the_whole(format, device):
    """Rows of remote experts contribute exactly nothing; a token without a local expert is exactly 0."""
    gate, w13, w2 = raw_weights(device)
    x = tokens(40, device)
    whole = make(format, device)(x)
    total = torch.zeros_like(whole, dtype=torch.float32)
    for first in (0, 3, 5):
        count = {0: 3, 3: 2, 5: 3}[first]
        pick = slice(first, first + count)
        part = MoELayer.from_weights(gate, w13[pick], w2[pick], top_k=K, renormalize=True, format=format, local=(first, count))
        y = part(x)
        ids = (x.float() @ gate.float().T).softmax(-1).topk(K, dim=-1).indices
        remote = ~((ids >= first) & (ids < first + count)).any(-1)
        assert bool(remote.any()) and torch.equal(y[remote], torch.zeros_like(y[remote]))
        total += y.float()
    assert relative_error(total, whole) < 1e-2


@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
def test_SCALE_zero_experts_stay_zero(format, device):
    gate, w13, w2 = raw_weights(device)
    layer = MoELayer.from_weights(gate, torch.zeros_like(w13), w2, top_k=K, format=format)
    y = layer(tokens(5, device))
    assert torch.equal(y, torch.zeros_like(y))
    assert bool((bits(layer.gate_up_proj) == 0).all())


@pytest.mark.parametrize("format", FORMATS)
def test_TAIL_every_ragged_width(format, device):
    """I = 192 and H = 576: the last block of gate, of up, of H and of I is partial, and gate and up differ by 1e5."""
    gate, w13, w2 = raw_weights(device, e=4, h=576, inter=192)
    w13[:, :192] *= 1e-3
    layer = MoELayer.from_weights(gate, w13, w2, top_k=K, renormalize=True, format=format)
    if format == "fp8_block":
        assert layer.gate_up_proj_scale_inv.shape == (4, 4, 5)
    x = tokens(9, device, h=576)
    assert relative_error(layer(x), by_hand(layer, x)) < 5e-2


def test_activations(device):
    x = tokens(5, device)
    for act in (Activation.gelu_tanh(), Activation.gpt_oss(), Activation.clamped(0.5)):
        layer = make(None, device, act=act)
        assert relative_error(layer(x), by_hand(layer, x)) < 1e-2
        assert relative_error(layer(x), make(None, device)(x)) > 0.1


def test_parameters_want_no_gradients_and_inputs_are_refused():
    layer = make("mxfp8")
    assert not any(p.requires_grad for p in layer.parameters())
    with pytest.raises(ValueError, match="MoELayer: hidden requires grad"):
        layer(tokens(2).requires_grad_())
    with torch.no_grad():
        layer(tokens(2).requires_grad_())


# ---- compile


def count_nodes(model, *args, backend="aot_eager", **kw):
    seen = []

    def keep(gm, inputs):
        seen.append(sum(n.op == "call_function" and n.target is torch.ops.moe_ops.fused_moe.default for n in gm.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=keep, **kw)
    return compiled, compiled(*args), seen


@pytest.mark.parametrize("format", FORMATS)
def test_COMPILE_one_node_and_the_same_bits(format, device):
    torch._dynamo.reset()
    layer, x = make(format, device), tokens(8, device)
    compiled, y, nodes = count_nodes(layer, x)
    assert nodes == [1] and torch.equal(y, layer(x))
    for t in (5, 13, 31):
        x = tokens(t, device, seed=t)
        assert torch.equal(compiled(x), layer(x))
    assert len(nodes) <= 2
    torch._dynamo.reset()


# ---- bad input


def test_errors_name_the_argument():
    gate, w13, w2 = raw_weights()
    layer = make()
    cases = [
        (lambda: make("fp4"), ValueError, "format must be one of"),
        (lambda: MoELayer.from_weights(gate[:, :64], w13, w2, top_k=1), ValueError, r"w13 must have shape \(8, 2I, 64\)"),
        (lambda: MoELayer.from_weights(gate, w13, w2[:, :, :5], top_k=1), ValueError, r"w2 must have shape \(8, 192, 320\)"),
        (lambda: MoELayer.from_weights(gate, w13.transpose(1, 2).contiguous().transpose(1, 2), w2, top_k=1), ValueError, "w13 must be contiguous"),
        (lambda: MoELayer.from_weights(gate, w13, w2, top_k=1, local=(6, 3)), ValueError, "local must lie within the 8 experts"),
        (lambda: MoELayer.from_weights(gate, w13[:2], w2[:2], top_k=1), ValueError, r"for 8 local experts"),
        (lambda: MoELayer.from_weights(gate, w13, w2, top_k=1, shared_w13=w13[0]), ValueError, "shared_w13 and shared_w2 must be given together"),
        (lambda: MoELayer.from_weights(gate, w13, w2, top_k=1, shared_gate=gate[:1]), ValueError, "shared_gate needs a shared expert"),
        (lambda: MoELayer.from_weights(gate, w13, w2, top_k=1, correction_bias=torch.zeros(3)), ValueError, r"correction_bias must have shape \(8\)"),
        (lambda: MoELayer.from_weights(gate.int(), w13, w2, top_k=1), TypeError, "gate must be bfloat16 or"),
        (lambda: MoELayer.from_weights(gate, w13, w2, top_k=1, groups=3), TypeError, "groups"),
        (lambda: MoELayer.from_quantized(gate, w13, w2, top_k=1), TypeError, "w13 and w2 must be QTensor, got Tensor"),
        (lambda: layer(tokens(3)[:, :64]), ValueError, "hidden must be contiguous"),
        (lambda: layer(tokens(3, h=64)), ValueError, r"hidden must have H = 192 columns, got shape \(3, 64\)"),
        (lambda: layer(tokens(3).T.contiguous().T), ValueError, "hidden must be contiguous"),
        (lambda: layer(tokens(3), out=torch.empty(3, 5)), ValueError, r"out must have shape \(3, 192\)"),
        (lambda: layer(tokens(3).float()), TypeError, "hidden must be bfloat16, got float32"),
        (lambda: layer([1.0]), TypeError, "hidden must be a torch.Tensor"),
        (lambda: MoELayer.from_state_dict({}, "m.", {"model_type": "llama"}), ValueError, "model_type 'llama' is not known; known are deepseek_v3"),
        (lambda: MoELayer.from_state_dict({}, "m.", {"model_type": "mixtral"}), ValueError, "config must have num_experts"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_GRAPH_captured_once_and_replayed(format, device):
    """One capture at 64 rows; replays with none, one, some and all rows valid equal eager calls bit for bit; nothing synchronises."""
    layer = make(format, device)
    x, valid = tokens(64, device), torch.tensor([64], dtype=torch.int32, device=device)
    out = torch.empty_like(x)
    layer(x, num_valid=valid, out=out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, num_valid=valid, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x, num_valid=valid, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for count, seed in ((64, 1), (0, 2), (1, 3), (5, 4), (63, 5), (64, 6)):
        x.copy_(tokens(64, device, seed=seed))
        if seed == 6:
            x.copy_(x[:1].expand_as(x))  # all rows to the same experts
        valid.fill_(count)
        graph.replay()
        got = out.clone()
        assert torch.equal(got, layer(x, num_valid=valid))
        assert torch.equal(got[count:], torch.zeros_like(got[count:]))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens_", [1, 64])
@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
def test_eight_launches_all_ours(format, tokens_, device, unpoisoned):
    layer, x = make(format, device, score="sigmoid", correction_bias=torch.zeros(E, device=device)), tokens(tokens_, device)
    layer(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        layer(x)
        torch.cuda.synchronize()
    names = [e.name for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert 5 <= len(names) <= 8, names
    assert not [n for n in names if "at::" in n or "cutlass" in n or "nvjet" in n or "Mem" in n], names


@pytest.mark.gpu
def test_router_logits_come_from_our_gemm(device):
    for dtype in (torch.bfloat16, torch.float16):
        layer = make().to(device, dtype)
        layer.gate.bias = torch.nn.Parameter(torch.randn(E, device=device, dtype=dtype), requires_grad=False)
        x = tokens(33, device).to(dtype)
        want = F.linear(x.double(), layer.gate.weight.double(), layer.gate.bias.double())
        assert relative_error(layer.router_logits(x), want) < 1e-5
