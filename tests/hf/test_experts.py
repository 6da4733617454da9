"""The experts implementation: modules of every layout and dtype against fp32 arithmetic, sentinels, gradients, stale copies, compile."""

import copy
import sys
import types

import pytest
import torch

from moe_ops.core.numerics import random_topk, relative_error
from moe_ops.hf import prepare_model, register
from moe_ops.hf.experts import experts_forward, experts_modules, run
from moe_ops.hf.small import FAMILIES, build

pytest.importorskip("transformers")
import transformers  # noqa: E402
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

E, H, INTER, K, T = 6, 192, 320, 2, 11


@pytest.fixture(autouse=True)
def registered():
    register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def config_of(kind, inter=INTER, **extra):
    name, sizes = {
        "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": E, "moe_intermediate_size": inter}),
        "deepseek_v3": ("DeepseekV3Config", {"n_routed_experts": E, "moe_intermediate_size": inter}),
        "mixtral": ("MixtralConfig", {"num_local_experts": E, "intermediate_size": inter}),
        "gpt_oss": ("GptOssConfig", {"num_local_experts": E, "intermediate_size": inter}),
        "deepseek_v4": ("DeepseekV4Config", {"n_routed_experts": E, "moe_intermediate_size": inter}),
        "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": E, "intermediate_size": inter}),
    }[kind]
    config = getattr(transformers, name)(**({"hidden_size": H, "num_experts_per_tok": K} | sizes | extra))
    config._experts_implementation = "moe_ops"
    return config


CLASSES = {
    "qwen3_moe": "Qwen3MoeExperts",
    "deepseek_v3": "DeepseekV3Experts",
    "mixtral": "MixtralExperts",
    "gpt_oss": "GptOssExperts",
    "deepseek_v4": "DeepseekV4Experts",
    "minimax_m2": "MiniMaxM2Experts",
}


def experts_of(kind, dtype=torch.bfloat16, device="cpu", **extra):
    """An experts module of Transformers with random weights."""
    cls = getattr(__import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["x"]), CLASSES[kind])
    module = cls(config_of(kind, **extra))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.5 if "bias" in name else 0.1))
    return module.to(device, dtype)


def inputs(device="cpu", t=T, dtype=torch.bfloat16):
    x = torch.randn(t, H, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    ids, weights = random_topk(t, E, K, seed=3)
    return x, ids.long().to(device), weights.to(device)


def exact(module, x, ids, weights):
    """Transformers' own loop over the experts, in fp32."""
    reference = copy.deepcopy(module).float()
    reference.config = copy.copy(module.config)
    reference.config._experts_implementation = "eager"
    return reference(x.float(), ids, weights.float())


# ---- registration


def test_registered_in_both_tables_under_one_name():
    assert ALL_EXPERTS_FUNCTIONS["moe_ops"] is experts_forward and ALL_FP8_EXPERTS_FUNCTIONS["moe_ops"] is experts_forward
    register()
    model = build("qwen3-moe")
    model.set_experts_implementation("moe_ops")
    assert model.get_experts_implementation() == {"": "moe_ops"}
    assert prepare_model(model) == 2


def test_transformers_missing_or_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers >= 5.17, which is not installed: pip install 'transformers"):
        register()
    old = types.ModuleType("transformers")
    old.__version__ = "4.57.0"
    old.__path__ = []
    monkeypatch.setitem(sys.modules, "transformers", old)
    for name in [n for n in sys.modules if n.startswith("transformers.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="needs transformers >= 5.17 with its experts interface, got 4.57.0"):
        register()


def test_importing_hf_imports_no_transformers():
    import subprocess

    code = "import sys, moe_ops.hf; assert 'transformers' not in sys.modules and 'accelerate' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- 16-bit experts of every layout


@pytest.mark.parametrize("kind", CLASSES)
def test_experts_of_every_family(kind, device):
    module, args = experts_of(kind, device=device), inputs(device)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with torch.no_grad():
        y = module(*args)
        assert y.dtype == torch.bfloat16 and relative_error(y, exact(module, *args)) < 1e-2
        assert relative_error(y, run(module, *args, impl="torch")) < 1e-2
        assert torch.equal(y, module(*args))
        assert torch.equal(copy.deepcopy(module)(*args), y)
    after = module.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], before[k]) for k in before)


def test_transposed_but_not_interleaved(device):
    """openai_privacy_filter keeps [E, H, 2I] with gate columns, then up columns."""
    from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts as Experts

    config = transformers.OpenAIPrivacyFilterConfig(hidden_size=H, intermediate_size=INTER, num_local_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "moe_ops"
    module = Experts(config)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * 0.1)
        module = module.to(device, torch.bfloat16)
        args = inputs(device)
        # its loop multiplies by the number of experts in the model's forward, not here
        assert relative_error(module(*args), exact(module, *args)) < 1e-2


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_SENT_ids_outside_the_experts_are_skipped(kind, device):
    """Transformers' expert-parallel sentinel is num_experts with weight 0; other backends use -1. A token without experts is exactly 0."""
    module, (x, ids, weights) = experts_of(kind, device=device), inputs(device)
    with torch.no_grad():
        want = module(x[1:], ids[1:], weights[1:])
        for sentinel in (E, -1, E + 1000, 2**31 - 1):
            bad = ids.clone()
            bad[0] = sentinel
            y = module(x, bad, weights * (bad < E) * (bad >= 0))
            assert torch.equal(y[0], torch.zeros_like(y[0])) and relative_error(y[1:], want) < 5e-3
            loud = module(x, bad, torch.full_like(weights, float("nan")).where(bad == sentinel, weights))
            assert torch.equal(loud, y)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_LAYOUT_strided_inputs(kind, device):
    module, (x, ids, weights) = experts_of(kind, device=device), inputs(device)
    wide, wide_ids = torch.randn(T, 3 * H, device=device).bfloat16(), torch.zeros(T, 2 * K, dtype=torch.int64, device=device)
    wide[:, H : 2 * H], wide_ids[:, ::2] = x, ids
    with torch.no_grad():
        want = module(x, ids, weights)
        assert torch.equal(module(wide[:, H : 2 * H], ids, weights), want)
        assert torch.equal(module(x, wide_ids[:, ::2], weights.T.contiguous().T), want)
        assert torch.equal(module(x, ids.int(), weights), want)
        assert torch.equal(module(x.view(1, T, H), ids, weights), want.view(1, T, H))
        assert module(x[:0], ids[:0], weights[:0]).shape == (0, H)
        one = module(x[:1].expand(T, H).contiguous(), ids[:1].expand(T, K), weights[:1].expand(T, K))
        assert torch.equal(one, one[:1].expand_as(one))


def test_weights_in_bf16_are_taken(device):
    """Qwen3-MoE and gpt-oss give routing weights in bf16, DeepSeek and Mixtral in fp32."""
    module, (x, ids, weights) = experts_of("qwen3_moe", device=device), inputs(device)
    with torch.no_grad():
        assert torch.equal(module(x, ids, weights.bfloat16()), module(x, ids, weights.bfloat16().float()))


def test_gradients_are_refused_with_the_way_out():
    module, (x, ids, weights) = experts_of("qwen3_moe"), inputs()
    assert module.gate_up_proj.requires_grad
    with pytest.raises(ValueError, match=r"have no backward: call the model under torch.no_grad\(\)"):
        module(x, ids, weights)
    with torch.inference_mode():
        module(x, ids, weights)
    module.requires_grad_(False)
    module(x, ids, weights)
    with pytest.raises(ValueError, match="no backward"):
        module(x.clone().requires_grad_(), ids, weights)
    with pytest.raises(ValueError, match="weights requires grad"):
        module(x, ids, weights.clone().requires_grad_())


# ---- rearranged copies


def test_copies_of_gpt_oss_follow_the_weights(device):
    """In place (optimizer, load_state_dict) or replaced: the copy is remade, in the same memory where it fits, and is never saved."""
    module, args = experts_of("gpt_oss", device=device), inputs(device)
    module.requires_grad_(False)
    first = module(*args)
    where = module._moe_ops.w13.data_ptr()
    assert module._moe_ops.w13.shape == (E, 2 * INTER, H) and module._moe_ops.w13.is_contiguous()
    assert set(module.state_dict()) == {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
    for change in (
        lambda m: m.down_proj.mul_(2),
        lambda m: m.gate_up_proj_bias.add_(1),
        lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}),
        lambda m: setattr(m, "gate_up_proj", torch.nn.Parameter(m.gate_up_proj * 3, requires_grad=False)),
    ):
        change(module)
        y = module(*args)
        assert not torch.equal(y, first) and relative_error(y, exact(module, *args)) < 1e-2
        assert module._moe_ops.w13.data_ptr() == where
        first = y


def test_plain_layouts_are_read_in_place():
    module, args = experts_of("qwen3_moe"), inputs()
    module.requires_grad_(False)
    module(*args)
    assert all(getattr(module._moe_ops, role) is None for role in ("w13", "w2", "b13"))
    module.down_proj.zero_()
    assert torch.equal(module(*args), torch.zeros(T, H, dtype=torch.bfloat16))


REFUSED = [
    ("fp32 experts", lambda: experts_of("qwen3_moe", torch.float32), "got torch.float32: load the model with dtype=torch.bfloat16"),
    ("erf gelu", lambda: experts_of("qwen3_moe", hidden_act="gelu"), "Qwen3MoeExperts._apply_gate is none of silu"),
    ("meta", lambda: experts_of("qwen3_moe").to("meta"), "is on the meta device: load its weights first"),
]


@pytest.mark.parametrize(("make", "text"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_with_a_reason(make, text):
    with torch.no_grad(), pytest.raises(ValueError, match=text):
        make()(*inputs())


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("ran", [False, True])
def test_16_bit_dtypes_must_agree(kind, ran):
    module, (x, ids, weights) = experts_of(kind), inputs()
    with torch.no_grad():
        if ran:
            module(x, ids, weights)
        with pytest.raises(ValueError, match=r"hidden_states in torch.float16, gate_up_proj in torch.bfloat16 and down_proj in torch.bfloat16"):
            module(x.half(), ids, weights)
        module.down_proj = torch.nn.Parameter(module.down_proj.half(), requires_grad=False)
        with pytest.raises(ValueError, match=r"has gate_up_proj in torch.bfloat16 and down_proj in torch.float16; they must agree"):
            module(x, ids, weights)
        module.half()
        assert relative_error(module(x.half(), ids, weights), exact(module, x, ids, weights)) < 1e-2


def test_experts_without_gate_are_refused():
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = transformers.NemotronHConfig(hidden_size=64, moe_intermediate_size=64, n_routed_experts=4)
    config._experts_implementation = "moe_ops"
    module = NemotronHExperts(config)
    with torch.no_grad(), pytest.raises(ValueError, match=r"NemotronHExperts has no gate \(has_gate=False\)"):
        module(torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2))


def test_flags_that_contradict_the_gate_are_refused():
    module = experts_of("qwen3_moe")
    module.is_concatenated = False
    with torch.no_grad(), pytest.raises(ValueError, match="declares is_concatenated=False, but its _apply_gate reads columns the other way"):
        module(*inputs())


# ---- compile


def compiled(model, backend="aot_eager"):
    nodes = []

    def keep(gm, example):
        nodes.append(sum(n.op == "call_function" and n.target is torch.ops.moe_ops.fused_moe.default for n in gm.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(gm, example)

    return torch.compile(model, fullgraph=True, backend=keep), nodes


@pytest.mark.parametrize("family", FAMILIES)
def test_COMPILE_one_node_a_layer_and_the_same_bits(family, device):
    """The first call of all is the traced one: plans and rearranged copies are made while tracing."""
    model = build(family, device=device)
    model.set_experts_implementation("moe_ops")
    layers = len(list(experts_modules(model)))
    ids = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        fast, nodes = compiled(model)
        got, want = fast(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    # on a GPU the traced dense layers may take other cuBLAS kernels than the eager ones
    assert torch.equal(got, want) if device.type == "cpu" else relative_error(got, want) < 5e-2
    assert nodes == [layers] and layers == (1 if family == "deepseek-v3" else 2)


def test_COMPILE_copies_refreshed_by_prepare_model(device):
    module, args = experts_of("gpt_oss", device=device), inputs(device)
    module.requires_grad_(False)
    fast, nodes = compiled(module)
    fast(*args)
    module.down_proj.mul_(2)
    prepare_model(module)
    assert torch.equal(fast(*args), module(*args)) and len(nodes) == 1


def test_COMPILE_inductor(device):
    """fp32 around quantized experts: Inductor's other rounding then moves no route, and what is left is within the layer's bound."""
    from moe_ops.hf import quantize_model_

    model = build("qwen3-moe", dtype=torch.float32, device=device)
    quantize_model_(model, "mxfp8")
    ids = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        fast, nodes = compiled(model, "inductor")
        assert relative_error(fast(ids, use_cache=False).logits, model(ids, use_cache=False).logits) < 1e-2
    assert nodes == [2]
