"""State dicts of MoELayer: its own, and those of every checkpoint dialect, bit for bit; moving and casting change no bit."""

import copy

import pytest
import torch

from moe_ops import MoELayer, quantize_weight
from moe_ops.core.formats import FP8_BLOCK
from moe_ops.core.numerics import decode_e8m0, uneven
from moe_ops.layer.dialects import DIALECTS, quantization_config
from moe_ops.layer.models import FAMILIES

E, H, INTER, K = 8, 192, 320, 2  # neither H nor I is a multiple of 128
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


@pytest.mark.parametrize("format", FORMATS)
def test_own_state_dict_round_trip(format, tmp_path, device):
    from safetensors.torch import load_file, save_file

    kw = {"shared_w13": torch.randn(192, H).bfloat16().to(device), "shared_w2": torch.randn(H, 96).bfloat16().to(device)}
    layer = make(format, device, score="sigmoid", correction_bias=torch.randn(E).to(device), scale=2.5, **kw)
    x = tokens(6, device)
    save_file({f"l.{k}": v for k, v in layer.state_dict().items()}, tmp_path / "l.safetensors")
    sd = load_file(tmp_path / "l.safetensors")
    assert not [k for k in sd if "rows" in k]
    config = {"model_type": "deepseek_v3", "n_routed_experts": E, "num_experts_per_tok": K, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    again = MoELayer.from_state_dict(sd, "l.", config, format=format, device=device)
    same_state(layer.state_dict(), again.state_dict())
    assert torch.equal(layer(x), again(x))
    other = make(format, device, score="sigmoid", correction_bias=torch.zeros(E, device=device), scale=2.5, **kw)
    other.load_state_dict({k.removeprefix("l."): v for k, v in sd.items()})
    same_state(layer.state_dict(), other.state_dict())
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d != "bf16"])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_state_dict_of_every_dialect(dialect, names, device):
    """The same quantized experts through each dialect's files give the same layer, bit for bit."""
    d = DIALECTS[dialect]
    fp8 = d.format is FP8_BLOCK
    gate, w13, w2 = raw_weights()
    q13, q2 = (
        quantize_weight(w13, d.format, segments=2 if fp8 else 1, rule="pow2" if fp8 else None),
        quantize_weight(w2, d.format, rule="pow2" if fp8 else None),
    )
    rows = q13.scale.shape[1] // 2
    sd = {"m.gate.weight": gate}
    for e in range(E):
        parts = {
            names[0]: (q13.data[e, :INTER], q13.scale[e, :rows]),
            names[1]: (q13.data[e, INTER:], q13.scale[e, rows:]),
            names[2]: (q2.data[e], q2.scale[e]),
        }
        for name, (data, scale) in parts.items():
            if d.rank4:
                scale = scale[:, None, :, None]
            elif dialect == "mxfp8":
                scale = scale.view(torch.float8_e8m0fnu)
            sd[f"m.experts.{e}.{name}.weight"], sd[f"m.experts.{e}.{name}.{d.suffixes[0]}"] = data, scale
    config = {"model_type": "mixtral", "num_local_experts": E, "num_experts_per_tok": K, "quantization_config": quantization_config(dialect)}
    layer = MoELayer.from_state_dict(sd, "m.", config, device=device)
    want = MoELayer.from_quantized(gate, q13, q2, top_k=K, renormalize=True).to(device)
    same_state(layer.state_dict(), want.state_dict())
    x = tokens(4, device)
    assert torch.equal(layer(x), want(x))


def test_load_state_dict_copies_bits_and_never_converts():
    """E8M0 byte 120 copied as a number would become 2^-7 -> 0; e4m3 data may come as uint8."""
    layer = make("mxfp8")
    scale = (
        torch.tensor([120, 125, 127, 130, 140], dtype=torch.uint8).repeat(E * 2 * INTER * H)[: E * 2 * INTER * (H // 32)].view(E, 2 * INTER, H // 32)
    )
    sd = layer.state_dict()
    sd["gate_up_proj_scale_inv"] = scale.view(torch.float8_e8m0fnu)
    sd["gate_up_proj"] = torch.arange(256, dtype=torch.uint8).repeat(E * 2 * INTER * H // 256).view(E, 2 * INTER, H)
    layer.load_state_dict(sd)
    assert torch.equal(layer.gate_up_proj_scale_inv, scale) and torch.equal(bits(layer.gate_up_proj), sd["gate_up_proj"])
    sd["gate_up_proj_scale_inv"] = torch.full_like(scale, 255)
    with pytest.raises(ValueError, match="'gate_up_proj_scale_inv' holds the E8M0 byte 255"):
        layer.load_state_dict(sd)
    with pytest.raises(ValueError, match="'gate_up_proj' must be torch.float8_e4m3fn as in this layer, got torch.bfloat16"):
        layer.load_state_dict(make(None).state_dict(), strict=False)
    fp8 = make("fp8_block")
    sd = fp8.state_dict()
    sd["down_proj_scale_inv"] = torch.full(sd["down_proj_scale_inv"].shape, 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    fp8.load_state_dict(sd)
    assert torch.equal(fp8.down_proj_scale_inv, decode_e8m0(torch.tensor(120)).expand(fp8.down_proj_scale_inv.shape))


@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
def test_moving_and_casting_keep_every_bit(format, device, tmp_path):
    layer = make(format, correction_bias=torch.randn(E), shared_w13=torch.randn(192, H).bfloat16(), shared_w2=torch.randn(H, 96).bfloat16())
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    for change in (
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.float(),
        lambda m: m.to(device, torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.type(torch.float64),
        lambda m: m.type(torch.bfloat16),
        lambda m: m.cpu(),
    ):
        change(layer)
        assert layer._all_rows.dtype == torch.int32 and int(layer._all_rows) == 2**31 - 1
        after = layer.state_dict()
        for name in before:
            if name != "gate.weight":
                assert after[name].dtype == before[name].dtype and torch.equal(bits(after[name].cpu()), bits(before[name])), name
    x = tokens(3)
    layer.to(torch.bfloat16)
    torch.save(layer, tmp_path / "layer.pt")
    assert torch.equal(copy.deepcopy(layer)(x), layer(x)) and torch.equal(torch.load(tmp_path / "layer.pt", weights_only=False)(x), layer(x))
    empty = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x)) and int(empty._all_rows) == 2**31 - 1


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("have", "come"), [(a, b) for a in FORMATS for b in FORMATS if a != b])
def test_another_format_is_refused_before_anything_is_copied(have, come, strict):
    """Copied as numbers, e4m3 elements would become bf16 weights without their scales; the router must not change either."""
    kw = {"shared_w13": torch.randn(192, H).bfloat16(), "shared_w2": torch.randn(H, 96).bfloat16()}
    layer, other = make(have, **kw), make(come, **kw)
    state = {k: torch.zeros_like(v) if k == "gate.weight" else v for k, v in other.state_dict().items()}
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with pytest.raises(ValueError, match="MoELayer: '.*gate_up_proj.*' (is quantized, but this layer holds|must be .* as in this layer)"):
        layer.load_state_dict(state, strict=strict)
    same_state(layer.state_dict(), before)
    # the shared expert alone is of another format: a child's mismatch is found before the parent copies
    mixed = before | {k: v for k, v in state.items() if k.startswith("shared_expert.") or k == "gate.weight"}
    with pytest.raises(ValueError, match="MoELayer: 'shared_expert"):
        layer.load_state_dict({k: torch.zeros_like(v) if k == "gate_up_proj" else v for k, v in mixed.items()}, strict=strict)
    same_state(layer.state_dict(), before)


@pytest.mark.parametrize(("format", "value"), [("fp8_block", float("nan")), ("fp8_block", float("inf")), ("fp8_block", 0.0), ("mxfp8", 255)])
def test_scales_that_are_no_numbers_are_not_loaded(format, value):
    layer = make(format)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    state = {k: v.clone() for k, v in before.items()}
    state["down_proj_scale_inv"].view(-1)[5] = value
    state["gate.weight"].zero_()
    with pytest.raises(ValueError, match="MoELayer: 'down_proj_scale_inv' holds (a scale that is NaN|the E8M0 byte 255)"):
        layer.load_state_dict(state)
    same_state(layer.state_dict(), before)


def test_missing_tensors_of_a_checkpoint_are_named():
    gate, w13, w2 = raw_weights()
    config = {"model_type": "deepseek_v3", "n_routed_experts": E, "num_experts_per_tok": K}
    sd = {"m.gate.weight": gate}
    for missing, text in (
        ({}, "m.gate.weight and m.router.weight"),
        (sd, "'m.gate.e_score_correction_bias' is missing"),
        (sd | {"m.gate.e_score_correction_bias": torch.zeros(E)}, "no experts below 'm.experts.'"),
        (
            sd | {"m.gate.e_score_correction_bias": torch.zeros(E), "m.experts.gate_up_proj": w13, "m.experts.down_proj": w2},
            "no gated MLP below 'm.shared_experts.'",
        ),
    ):
        with pytest.raises(KeyError, match=rf"MoELayer\.from_state_dict: .*{text}"):
            MoELayer.from_state_dict(missing, "m.", config)
    hashed = sd | {"m.gate.tid2eid": torch.zeros(3, 2)}
    with pytest.raises(ValueError, match=r"^MoELayer\.from_state_dict: m\.gate\.tid2eid: layers that choose experts by token id are not supported"):
        MoELayer.from_state_dict(hashed, "m.", {"model_type": "deepseek_v4", "n_routed_experts": E, "num_experts_per_tok": K})
    assert set(FAMILIES) >= {"qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "glm4_moe", "kimi_k2"}


# ---- folded copies (mxfp8 on Hopper)


def foldable(**kw):
    g = torch.Generator().manual_seed(0)
    shapes = ((4, 256), (4, 256, 256), (4, 256, 128))
    gate, w13, w2 = (torch.randn(s, generator=g).bfloat16() / 16 for s in shapes)
    return MoELayer.from_weights(gate, w13, w2, top_k=2, format="mxfp8", **kw)


def test_folded_copies_are_made_once_used_and_never_saved(monkeypatch, tmp_path):
    layer, x = foldable(shared_w13=torch.randn(256, 256).bfloat16() / 16, shared_w2=torch.randn(256, 128).bfloat16() / 16), tokens(6, h=256)
    before, plain = {k: v.clone() for k, v in layer.state_dict().items()}, layer(x)
    assert layer.ready()[0].block == (1, 32) and layer._folded is None
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    hopper = copy.deepcopy(layer)
    workspace = hopper.make_workspace(8)
    y = hopper(x, out=torch.empty_like(x), workspace=workspace)
    up, down = hopper.ready()
    assert up.block == down.block == (128, 128) and up.segments == 2 and hopper.shared_expert.ready()[0].block == (128, 128)
    assert float((y - plain).float().norm() / plain.float().norm()) < 1e-2
    same_state(hopper.state_dict(), before)
    assert hopper.prepare().ready()[0] is up
    # weights written in place: the copies follow, where they lie
    once = down.scale.clone()
    with torch.no_grad():
        hopper.down_proj_scale_inv.add_(1)
    assert hopper.prepare().ready()[1] is down and torch.equal(down.scale, 2 * once)
    hopper.load_state_dict(before)
    assert hopper.ready()[1] is down and torch.equal(down.scale, once)  # at once: compiled code and captured graphs read there
    assert torch.equal(hopper(x), y)
    for experts in (hopper, hopper.shared_expert):  # as loaders write, which torch does not count
        kept, once = experts.ready()[1], experts.ready()[1].scale.clone()
        experts.down_proj_scale_inv.data.add_(1)
        assert torch.equal(hopper.prepare(again=True) and kept.scale, 2 * once)
        experts.down_proj_scale_inv.data.sub_(1)
        assert torch.equal(hopper.prepare(again=True) and kept.scale, once)
    torch.save(hopper, tmp_path / "layer.pt")
    assert torch.load(tmp_path / "layer.pt", weights_only=False)._folded is None
    hopper.fold = False
    assert torch.equal(hopper(x), plain) and hopper.ready()[0].block == (1, 32)
    hopper.fold = True
    assert hopper.prepare()._folded is not None and hopper.to("meta")._folded is None


def test_weights_that_would_lose_too_much_stay_unfolded(monkeypatch):
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    layer = foldable()
    with torch.no_grad():
        layer.down_proj_scale_inv[0, 0, 0] = 160  # 2^33 above its neighbours: folded, they would vanish
    y = layer(tokens(3, h=256))
    assert layer.ready()[0].block == (1, 32) and bool(y.isfinite().all())


def test_COMPILE_folds_while_tracing(monkeypatch):
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    torch._dynamo.reset()
    layer, x = foldable(), tokens(5, h=256)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert layer.ready()[0].block == (128, 128) and torch.equal(y, layer(x))
    torch._dynamo.reset()
