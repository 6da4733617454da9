"""Checkpoints on disk: our own loader for every dialect and family, and Transformers' loader with our experts."""

import json

import pytest
import torch
from safetensors.torch import save_file

from moe_ops import dequantize, make_qtensor, quantize_weight
from moe_ops.core.formats import FP8_BLOCK
from moe_ops.core.numerics import relative_error
from moe_ops.hf import load_quantized, quantize_model_, register
from moe_ops.hf.checkpoint import CheckpointFolder
from moe_ops.hf.experts import experts_modules
from moe_ops.hf.small import FAMILIES, build
from moe_ops.layer.dialects import DIALECTS, quantization_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def prompt():
    return torch.randint(1, 512, (2, 16), generator=torch.Generator().manual_seed(0))


def tensors_of(model, family, dialect, quantize_dense=False):
    """The model's tensors under the names that its publishers use, experts one by one and quantized."""
    d = DIALECTS[dialect]
    modules = [n for n, _ in experts_modules(model)]
    leaves = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    sd = {}

    def put(stem, w):
        if d.format is None:
            sd[f"{stem}.weight"] = w.contiguous()
            return
        q = quantize_weight(w.contiguous(), d.format, rule="pow2" if dialect == "fp8_block_ue8m0" else None)
        sd[f"{stem}.weight"] = q.data
        sd[f"{stem}.{d.suffixes[0]}"] = q.scale[:, None, :, None].contiguous() if d.rank4 else q.scale

    for name, t in model.state_dict().items():
        if not name.startswith(tuple(f"{m}." for m in modules)):
            if quantize_dense and name.endswith("_proj.weight"):
                put(name.removesuffix(".weight"), t)
            else:
                sd[name] = t
    for name in modules:
        m = model.get_submodule(name)
        stem = name.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else name
        w13, w2 = m.gate_up_proj, m.down_proj
        if m.is_transposed:
            w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
        for e in range(w13.shape[0]):
            gate, up = (w13[e, 0::2], w13[e, 1::2]) if not m.is_concatenated else w13[e].chunk(2)
            for leaf, w in zip(leaves, (gate, up, w2[e]), strict=True):
                put(f"{stem}.{e}.{leaf}", w)
            if m.has_bias:
                for leaf, b in zip(leaves, (m.gate_up_proj_bias[e, 0::2], m.gate_up_proj_bias[e, 1::2], m.down_proj_bias[e]), strict=True):
                    sd[f"{stem}.{e}.{leaf}.bias"] = b.contiguous()
    if family == "mixtral":
        sd = {k.replace(".mlp.gate.", ".block_sparse_moe.gate."): v for k, v in sd.items()}
    return sd


def write(path, model, tensors, dialect, shards=1):
    config = model.config.to_dict()
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    if quantization_config(dialect) is not None:
        config["quantization_config"] = quantization_config(dialect, ("lm_head", "model.embed_tokens"))
    (path / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)  # weights and scales of one module end up in different shards
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        part = names[i::shards]
        save_file({n: tensors[n].clone() for n in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


CASES = [(f, d) for f in FAMILIES for d in ("fp8_block", "mxfp8")] + [("mixtral", d) for d in DIALECTS if d not in ("fp8_block", "mxfp8")]


@pytest.mark.parametrize(("family", "dialect"), CASES)
def test_load_quantized(family, dialect, tmp_path, device):
    """Equal, logit for logit, to the same model quantized in memory: nothing is lost on the way through the files."""
    model = build(family)
    write(tmp_path, model, tensors_of(model, family, dialect), dialect, shards=2)
    loaded = load_quantized(tmp_path, device=device)
    d = DIALECTS[dialect]
    if d.format is None:
        model.set_experts_implementation("moe_ops") if register() is None else None
    else:
        quantize_model_(model, d.format, rule="pow2" if dialect == "fp8_block_ue8m0" else None)
    model.to(device)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    with torch.no_grad():
        assert torch.equal(loaded(prompt().to(device)).logits, model(prompt().to(device)).logits)
    for _, m in experts_modules(loaded):
        assert m.gate_up_proj.dtype == (torch.bfloat16 if d.format is None else torch.float8_e4m3fn)
        assert (m.gate_up_proj_bias is not None) == (family == "gpt-oss") if m.has_bias else True
    if family == "deepseek-v3":
        assert dict(loaded.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_dense_weights_of_the_checkpoint_are_dequantized(tmp_path):
    model = build("qwen3-moe")
    tensors = tensors_of(model, "qwen3-moe", "fp8_block", quantize_dense=True)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    write(tmp_path, model, tensors, "fp8_block")
    loaded = load_quantized(tmp_path)
    q = loaded.model.layers[0].self_attn.q_proj.weight
    want = dequantize(quantize_weight(model.model.layers[0].self_attn.q_proj.weight, FP8_BLOCK), torch.bfloat16)
    assert q.dtype == torch.bfloat16 and torch.equal(q, want)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_16_bit_checkpoint_of_transformers_is_quantized_while_loading(family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    loaded = load_quantized(tmp_path, format="mxfp8")
    quantize_model_(model, "mxfp8")
    with torch.no_grad():
        assert torch.equal(loaded(prompt()).logits, model(prompt()).logits)
        plain = load_quantized(tmp_path)
        assert relative_error(plain(prompt()).logits, build(family)(prompt()).logits) < 3e-2
    assert all(m.gate_up_proj.dtype == torch.bfloat16 for _, m in experts_modules(plain))


def test_tied_head(tmp_path):
    model = build("mixtral")
    model.config.tie_word_embeddings = True
    tensors = {k: v for k, v in tensors_of(model, "mixtral", "mxfp8").items() if k != "lm_head.weight"}
    write(tmp_path, model, tensors, "mxfp8")
    loaded = load_quantized(tmp_path)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


STEM = "model.layers.1.mlp.experts.3.up_proj"
BAD = [
    ("missing scale", lambda t: t.pop(f"{STEM}.weight_scale_inv"), ValueError, f"its scale '{STEM}.weight_scale_inv' is missing"),
    ("missing expert", lambda t: [t.pop(f"{STEM}.{s}") for s in ("weight", "weight_scale_inv")], KeyError, f"tensor '{STEM}.weight' is missing"),
    ("missing dense weight", lambda t: t.pop("model.norm.weight"), KeyError, "lacks 1 tensors: model.norm.weight"),
    ("missing buffer", lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"), KeyError, "gate.e_score_correction_bias"),
    ("unknown tensor", lambda t: t.update({"model.layers.0.extra": torch.ones(1)}), ValueError, "no place for 1 tensors: model.layers.0.extra"),
    (
        "wrong shape",
        lambda t: t.update({"model.norm.weight": torch.ones(3)}),
        ValueError,
        r"'model.norm.weight' must have shape \(256,\), got \(3,\)",
    ),
]


@pytest.mark.parametrize(("change", "error", "text"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_checkpoints_are_named(change, error, text, tmp_path):
    model = build("deepseek-v3")
    tensors = tensors_of(model, "deepseek-v3", "mxfp8")
    change(tensors)
    write(tmp_path, model, tensors, "mxfp8")
    with pytest.raises(error, match=text):
        load_quantized(tmp_path)


def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load_quantized(tmp_path)
    model = build("mixtral")
    write(tmp_path, model, tensors_of(model, "mixtral", "mxfp8"), "mxfp8", shards=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="quant_method 'gptq' is not supported"):
        load_quantized(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    with pytest.raises(ValueError, match="has no quantization_config: its format is unknown"):
        load_quantized(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "MXFP8"}}))
    assert load_quantized(tmp_path) is not None  # ModelOpt's file says the same
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    wrong = {k: "model-00001-of-00002.safetensors" for k in index["weight_map"]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong | {"x": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match="says that .* is in model-00001-of-00002.safetensors, but it is not"):
        CheckpointFolder(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors is missing"):
        CheckpointFolder(tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no \*.safetensors file"):
        CheckpointFolder(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Transformers does not dequantize: the next test")
@pytest.mark.parametrize("dialect", ["fp8_block", "mxfp8"])
def test_checkpoint_loaded_by_transformers_itself(dialect, tmp_path):
    """Without a GPU Transformers dequantizes to bf16, and our bf16 experts run: close to the quantized model, equal to its weights."""
    register()
    model = build("qwen3-moe")
    write(tmp_path, model, tensors_of(model, "qwen3-moe", dialect), dialect)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moe_ops", dtype=torch.bfloat16)
    assert loaded.get_experts_implementation() == {"": "moe_ops"}
    quantized = load_quantized(tmp_path)
    with torch.no_grad():
        assert relative_error(loaded(prompt()).logits, quantized(prompt()).logits) < 0.15
    for (_, a), (_, b) in zip(experts_modules(loaded), experts_modules(quantized), strict=True):
        for name, segments in (("gate_up_proj", 2 if dialect == "fp8_block" else 1), ("down_proj", 1)):
            q = make_qtensor(getattr(b, name), getattr(b, f"{name}_scale_inv"), dialect, segments=segments)
            assert torch.equal(getattr(a, name), dequantize(q, torch.bfloat16))


@pytest.mark.parametrize("dialect", ["fp8_block", "fp8_block_ue8m0", "mxfp8"])
def test_checkpoint_kept_in_8_bits_by_transformers(dialect, tmp_path, device, monkeypatch):
    """On a GPU Transformers keeps FP8Experts (its dense layers stay in bf16 here), and our function runs them as they are stored."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    if device.type == "cpu":  # it would dequantize; without the check it loads as on a GPU
        monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
    register()
    model = build("qwen3-moe")
    write(tmp_path, model, tensors_of(model, "qwen3-moe", dialect), dialect)
    config = json.loads((tmp_path / "config.json").read_text())
    dense = ["lm_head", "model.embed_tokens", *(f"model.layers.{i}.self_attn" for i in range(2)), *(f"model.layers.{i}.mlp.gate" for i in range(2))]
    config["quantization_config"] |= {"modules_to_not_convert": dense, "ignored_layers": dense}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moe_ops", dtype=torch.bfloat16, device_map={"": device}
    )
    assert all(type(m).__name__ == "FP8Experts" and m.gate_up_proj.dtype == torch.float8_e4m3fn for _, m in experts_modules(loaded))
    ours = load_quantized(tmp_path, device=device)
    with torch.no_grad():
        assert torch.equal(loaded(prompt().to(device)).logits, ours(prompt().to(device)).logits)
