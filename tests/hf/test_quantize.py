"""quantize_model_: the four families in both formats, what it reports, what it refuses, and that it changes nothing when it refuses."""

import copy
import pickle

import pytest
import torch

from moe_ops import dequantize, make_qtensor, quantize_weight
from moe_ops.core.formats import FORMATS
from moe_ops.core.numerics import relative_error
from moe_ops.hf import quantize_model_
from moe_ops.hf.experts import experts_modules
from moe_ops.hf.small import FAMILIES, build, experts_bytes

pytest.importorskip("transformers")

FORMAT_NAMES = sorted(FORMATS)


def bits(t):
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def prompt(device="cpu"):
    return torch.randint(1, 512, (2, 24), generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, fmt, device):
    """Logits within 0.15 of bf16; weights in our order, each expert as quantize_weight gives it; half the memory."""
    model = build(family, device=device)
    reference = copy.deepcopy(model)
    report = quantize_model_(model, fmt, fold=False)
    names = [n for n, _ in experts_modules(reference)]
    assert report.format == fmt and report.modules == tuple(names) and report.skipped == ()
    assert report.bytes_before == experts_bytes(reference) and report.bytes_after == experts_bytes(model) < 0.55 * report.bytes_before
    assert f"{len(names)} experts modules quantized to {fmt}" in str(report)
    assert model.get_experts_implementation() == {"": "moe_ops"}
    segments = 2 if fmt == "fp8_block" else 1
    for name in names:
        old, new = reference.get_submodule(name), model.get_submodule(name)
        w13, w2 = old.gate_up_proj, old.down_proj
        if family == "gpt-oss":
            w13 = torch.cat((w13[..., 0::2], w13[..., 1::2]), dim=-1).transpose(1, 2).contiguous()
            w2 = w2.transpose(1, 2).contiguous()
            assert torch.equal(new.gate_up_proj_bias, torch.cat((old.gate_up_proj_bias[:, 0::2], old.gate_up_proj_bias[:, 1::2]), dim=1))
        q13, q2 = quantize_weight(w13, fmt, segments=segments), quantize_weight(w2, fmt)
        for stem, q in (("gate_up_proj", q13), ("down_proj", q2)):
            assert torch.equal(bits(getattr(new, stem)), bits(q.data)) and torch.equal(getattr(new, f"{stem}_scale_inv"), q.scale)
            assert not getattr(new, stem).requires_grad
    with torch.no_grad():
        want, got = reference(prompt(device)).logits, model(prompt(device)).logits
        assert relative_error(got, want) < 0.15
        assert torch.equal(copy.deepcopy(model)(prompt(device)).logits, got)
        assert torch.equal(model.to(device)(prompt(device)).logits, got)


def test_again_is_nothing_and_another_format_is_refused():
    model = build("mixtral")
    quantize_model_(model, "mxfp8")
    before = {k: bits(v).clone() for k, v in model.state_dict().items()}
    report = quantize_model_(model, "mxfp8")
    assert report.modules == () and len(report.skipped) == 2 and report.bytes_before == 0
    with pytest.raises(ValueError, match=r"mlp.experts is quantized already, in blocks of \(1, 32\), not \(128, 128\); load the 16-bit model"):
        quantize_model_(model, "fp8_block")
    assert all(torch.equal(bits(v), before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("skip", [lambda name: [name], lambda name: name], ids=["list", "one name"])
def test_skip_leaves_a_module_in_16_bit(skip):
    model = build("mixtral")
    first, second = (n for n, _ in experts_modules(model))
    report = quantize_model_(model, "fp8_block", skip=skip(first))
    assert report.modules == (second,) and report.skipped == (first,)
    assert model.get_submodule(first).gate_up_proj.dtype == torch.bfloat16
    with torch.no_grad():
        assert relative_error(model(prompt()).logits, build("mixtral")(prompt()).logits) < 0.15


@pytest.mark.parametrize(("fmt", "rule"), [("fp8_block", "pow2"), ("mxfp8", "floor"), ("mxfp8", "even")])
def test_rule(fmt, rule):
    model = build("mixtral")
    reference = copy.deepcopy(model)
    quantize_model_(model, fmt, rule=rule, fold=False)
    (name, module), *_ = experts_modules(model)
    want = quantize_weight(reference.get_submodule(name).down_proj, fmt, rule=rule)
    assert torch.equal(module.down_proj_scale_inv, want.scale) and torch.equal(bits(module.down_proj), bits(want.data))


def test_folded_on_hopper_without_more_memory(monkeypatch):
    """qwen3-moe has H and I that divide by 128, gpt-oss has not and stays in blocks of 32."""
    want = {}
    for family in ("qwen3-moe", "gpt-oss"):
        model = build(family)
        quantize_model_(model, "mxfp8")
        with torch.no_grad():
            want[family] = model(prompt()).logits
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    for family in ("qwen3-moe", "gpt-oss"):
        model, unfolded = build(family), build(family)
        report, other = quantize_model_(model, "mxfp8"), quantize_model_(unfolded, "mxfp8", fold=False)
        block = (128, 128) if family == "qwen3-moe" else (1, 32)
        assert report.bytes_after <= other.bytes_after
        with torch.no_grad():
            assert relative_error(model(prompt()).logits, want[family]) < 1e-2
            assert torch.equal(unfolded(prompt()).logits, want[family])
            assert torch.equal(copy.deepcopy(model)(prompt()).logits, model(prompt()).logits)
        for _, m in experts_modules(model):
            assert m.block_size == m._moe_ops.block == block and m._moe_ops.w13 is None
        assert quantize_model_(model, "mxfp8").modules == ()
        with pytest.raises(ValueError, match="is quantized already"):
            quantize_model_(model, "fp8_block")


def test_fp32_model_stays_fp32_around_its_experts():
    model = build("mixtral", dtype=torch.float32)
    with torch.no_grad():
        want = model(prompt()).logits
        quantize_model_(model, "mxfp8")
        got = model(prompt()).logits
    assert got.dtype == torch.float32 and 1e-3 < relative_error(got, want) < 0.15


def test_SCALE_unused_expert_of_zeros():
    model = build("mixtral")
    (name, module), *_ = experts_modules(model)
    with torch.no_grad():
        module.gate_up_proj[3].zero_()
        module.down_proj[3].zero_()
        module.down_proj[2, 0, 0] = 1.0
        module.down_proj[2, 0, 1:] = 0.0
    for fmt in FORMAT_NAMES:
        m = copy.deepcopy(model)
        quantize_model_(m, fmt, fold=False)
        new = m.get_submodule(name)
        assert bool((bits(new.down_proj)[3] == 0).all()) and bool(new.down_proj_scale_inv[3].float().isfinite().all())
        q = make_qtensor(new.down_proj, new.down_proj_scale_inv, fmt)
        assert torch.equal(dequantize(q)[3], torch.zeros_like(module.down_proj[3], dtype=torch.float32))
        assert dequantize(q)[2, 0, 0] == 1.0
        with torch.no_grad():
            assert bool(m(prompt()).logits.isfinite().all())


def test_saving_is_refused_and_casting_is_noticed(tmp_path):
    model = build("mixtral")
    quantize_model_(model, "mxfp8")
    with pytest.raises(NotImplementedError, match="cannot be saved by Transformers: its files would lose the scales"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.to(torch.float16)
    with torch.no_grad(), pytest.raises((ValueError, TypeError), match="float16"):
        model(prompt())


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float"])
@pytest.mark.parametrize("fmt", [*FORMAT_NAMES, "folded"])
def test_casting_after_a_run_is_noticed(fmt, cast, monkeypatch):
    """The plan was made by the run before; a stale one would read the converted bytes as e4m3."""
    if fmt == "folded":
        monkeypatch.setenv("MOE_OPS_ARCH", "90")
    model = build("qwen3-moe")
    quantize_model_(model, "mxfp8" if fmt == "folded" else fmt)
    with torch.no_grad():
        model(prompt())
        getattr(model, cast)()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"gate_up_proj is torch.\w+ but has a scale: was a quantized model converted by .to\(dtype\)"):
                model(prompt())


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_pickled_models_run_and_still_refuse_saving(family, fmt, tmp_path):
    model = build(family)
    quantize_model_(model, fmt)
    with torch.no_grad():
        want = model(prompt()).logits
        torch.save(model, tmp_path / "model.pt")
        for again in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
            assert torch.equal(again(prompt()).logits, want)
            with pytest.raises(NotImplementedError, match="cannot be saved by Transformers"):
                again.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pickled_plans_carry_no_copies():
    """gpt-oss in 16 bit runs on rearranged copies, which would double the file."""
    model = build("gpt-oss")
    model.set_experts_implementation("moe_ops")
    with torch.no_grad():
        want = model(prompt()).logits
        again = pickle.loads(pickle.dumps(model))
        plans = [m._moe_ops for _, m in experts_modules(again)]
        assert all(p.w13 is None and p.w2 is None and not p.owned for p in plans)
        assert torch.equal(again(prompt()).logits, want)
    assert all(m._moe_ops.w13 is not None for _, m in experts_modules(model))


def test_bad_calls_name_what_is_wrong_and_change_nothing():
    model = build("qwen3-moe")
    before = {k: (v.data_ptr(), v.dtype) for k, v in model.state_dict().items()}

    class Plain(torch.nn.Module):
        pass

    class Odd(torch.nn.Module):
        """Experts that Transformers does not dispatch (as Llama 4's)."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.set_experts_implementation = inner, inner.set_experts_implementation
            self.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 8, 4))

    ragged = build("qwen3-moe")
    for _, m in experts_modules(ragged):
        m.gate_up_proj = torch.nn.Parameter(torch.zeros(32, 2 * 40, 256).bfloat16())
        m.down_proj = torch.nn.Parameter(torch.zeros(32, 256, 40).bfloat16())
    cases = [
        (lambda: quantize_model_(model, "int8"), ValueError, "quantize_model_: format must be one of"),
        (lambda: quantize_model_(model, "mxfp8", rule="pow2"), ValueError, "rule must be one of .* for mxfp8, got 'pow2'"),
        (lambda: quantize_model_(model, "mxfp8", skip=["model.layers.7"]), ValueError, r"skip names no experts module: \['model.layers.7'\]"),
        (lambda: quantize_model_(Plain(), "mxfp8"), TypeError, "must be a Transformers model with set_experts_implementation, got Plain"),
        (lambda: quantize_model_(Odd(model), "mxfp8"), ValueError, r"\(Odd\) holds experts that Transformers does not dispatch"),
        (lambda: quantize_model_(ragged, "mxfp8"), ValueError, "has H = 256 and I = 40; mxfp8 needs multiples of 32"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
    assert {k: (v.data_ptr(), v.dtype) for k, v in model.state_dict().items()} == before
    quantize_model_(ragged, "fp8_block")


def test_dense_model_is_refused():
    import transformers

    config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=32)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts module that Transformers dispatches"):
        quantize_model_(transformers.AutoModelForCausalLM.from_config(config), "mxfp8")
