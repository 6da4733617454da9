"""What Transformers writes is converted to every layout and loaded again: by our own loaders, by MoELayer and by Transformers itself."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from moe_ops import MoELayer, dequantize, quantize_weight
from moe_ops.convert import convert, verify
from moe_ops.convert.types import LAYOUTS, Weight
from moe_ops.core.numerics import decode_e8m0, relative_error
from moe_ops.hf import load_quantized, quantize_model_, register
from moe_ops.hf.checkpoint import CheckpointFolder
from moe_ops.hf.experts import experts_modules
from moe_ops.hf.small import FAMILIES, build
from moe_ops.layer.dialects import quantization_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

FORMATS = ("mxfp8", "fp8_block")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """family -> folder that Transformers wrote: one file for Mixtral, shards with an index for the others."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            build(family).save_pretrained(made[family], max_shard_size="50GB" if family == "mixtral" else "3MB")
        return made[family]

    return get


def prompt():
    return torch.randint(1, 512, (2, 16), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        return model(prompt()).logits


def rounded(source, plan, fmt, into, experts):
    """A copy of a checkpoint in which each weight of the plan (routed experts on request) holds its quantized values, in bf16."""
    shutil.copy(source / "config.json", into)
    tensors = {name: t.clone() for name, t in CheckpointFolder(source).items()}
    for w in plan.entries:
        if isinstance(w, Weight) and (experts or not w.expert):
            view = w.part.view(tensors[w.weight.name])
            view.copy_(dequantize(quantize_weight(view.contiguous(), fmt), torch.bfloat16))
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return into


def tensor_bytes(t):
    return t.contiguous().view(torch.uint8)


def from_pretrained(folder, kind=transformers.AutoModelForCausalLM):
    """The model of Transformers. On a GPU its FP8 layers would need kernels from a hub: it dequantizes there too."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        config.quantization_config["dequantize"] = True
    model = kind.from_pretrained(folder, config=config, dtype=torch.bfloat16)
    model.set_experts_implementation("eager")
    return model.eval()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt-oss"])
def test_transformers_loads_the_default_layout(family, fmt, checkpoints, tmp_path):
    """It dequantizes, so the logits are those of the rounded weights, bit for bit."""
    source, out, same = checkpoints(family), tmp_path / "out", tmp_path / "same"
    report = convert(source, out, format=fmt)
    same.mkdir()
    want = logits(from_pretrained(rounded(source, report.plan, fmt, same, experts=True)))
    got = from_pretrained(out)
    assert torch.equal(logits(got), want)
    # e4m3 has 3 mantissa bits: 3% an element, and random weights do not average it out
    assert relative_error(want.float(), logits(from_pretrained(source)).float()) < 0.15
    # nothing was left as raw, unscaled elements
    assert all(p.dtype == torch.bfloat16 for n, p in got.named_parameters() if n.endswith("proj.weight"))


COMMON = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
COMMON |= {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256, "num_experts_per_tok": 2}
QWEN = {"num_experts": 4, "moe_intermediate_size": 128, "intermediate_size": 256, "shared_expert_intermediate_size": 128}
LINEAR = {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 128, "intermediate_size": 256, "first_k_dense_replace": 1}
LATENT = ROUTED | {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
#: model_type -> (config class, sizes, what one layer keeps beside norms)
OTHERS = {
    "qwen2_moe": ("Qwen2MoeConfig", QWEN, {"mlp.gate", "mlp.shared_expert_gate"}),
    "qwen3_next": ("Qwen3NextConfig", QWEN | LINEAR, {"mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d", "linear_attn.in_proj_ba"}),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig", QWEN | LINEAR,
        {"mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b"},
    ),
    "glm4_moe": ("Glm4MoeConfig", ROUTED | {"head_dim": 32}, {"mlp.gate"}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", LATENT, {"mlp.gate", "self_attn.kv_b_proj"}),
    "minimax_m2": ("MiniMaxM2Config", {"head_dim": 32, "num_local_experts": 4, "intermediate_size": 128}, {"block_sparse_moe.gate"}),
    "minimax": ("MiniMaxConfig", {"head_dim": 32, "num_local_experts": 4, "intermediate_size": 128}, {"block_sparse_moe.gate"}),
    "deepseek_v2": ("DeepseekV2Config", LATENT | {"topk_method": "greedy"}, {"mlp.gate", "self_attn.kv_b_proj"}),
    "deepseek_v32": ("DeepseekV32Config", LATENT, {"mlp.gate", "self_attn.kv_b_proj", "self_attn.indexer.weights_proj"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_MAP_other_families_as_transformers_writes_them(kind, tmp_path):
    """The family's row knows its names: what is kept is what the row says, and the result loads with the logits of the rounded weights."""
    name, sizes, keeps = OTHERS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**COMMON, **sizes)
    assert config.model_type == kind
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out")
    assert {m.split(".", 3)[3] for m in report.plan.kept_modules if ".layers." in m} == keeps
    assert {m for m in report.plan.kept_modules if ".layers." not in m} == {"lm_head", "model.embed_tokens"} and not report.plan.warnings
    (tmp_path / "same").mkdir()
    same = rounded(tmp_path / "source", report.plan, "mxfp8", tmp_path / "same", experts=True)
    assert torch.equal(logits(from_pretrained(tmp_path / "out")), logits(from_pretrained(same)))


def test_MAP_a_model_with_a_vision_tower(tmp_path):
    """Its language model lies one name deeper and its model_type one config deeper; the tower is kept."""
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128, "num_position_embeddings": 64}
    config = transformers.Qwen3_5MoeConfig(text_config=COMMON | QWEN | LINEAR, vision_config=vision)
    torch.manual_seed(0)
    transformers.Qwen3_5MoeForConditionalGeneration(config).bfloat16().save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out")
    names = [e.name for e in report.plan.entries if isinstance(e, Weight)]
    assert names and all(n.startswith("model.language_model.layers.") for n in names)
    assert any(n.startswith("model.visual.") for n in report.plan.kept_modules) and report.plan.family == "qwen3_5_moe"
    (tmp_path / "same").mkdir()
    same = rounded(tmp_path / "source", report.plan, "mxfp8", tmp_path / "same", experts=True)
    kind = transformers.AutoModelForImageTextToText
    assert torch.equal(logits(from_pretrained(tmp_path / "out", kind)), logits(from_pretrained(same, kind)))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_our_loaders_read_every_layout(family, layout, fmt, checkpoints, tmp_path):
    """The model equals the same model quantized in memory, logit for logit, and one layer of it equals the layer of the source."""
    source, out, same = checkpoints(family), tmp_path / "out", tmp_path / "same"
    report = convert(source, out, format=fmt, layout=layout)
    assert verify(out, against=source).problems == []
    same.mkdir()
    model = from_pretrained(rounded(source, report.plan, fmt, same, experts=False))
    quantize_model_(model, fmt)
    assert torch.equal(logits(load_quantized(out)), logits(model))

    config = json.loads((out / "config.json").read_text())
    folder, plain = CheckpointFolder(out), CheckpointFolder(source)
    prefix = "model.layers.1.block_sparse_moe." if family == "mixtral" else "model.layers.1.mlp."
    got = MoELayer.from_state_dict(folder, prefix, config)
    unquantized = {k: v for k, v in config.items() if k != "quantization_config"}
    want = MoELayer.from_state_dict(plain, prefix, unquantized, format=fmt)
    x = torch.randn(5, config["hidden_size"], generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(got(x), want(x))
    state, expected = got.state_dict(), want.state_dict()
    assert set(state) == set(expected) and all(torch.equal(tensor_bytes(state[n]), tensor_bytes(expected[n])) for n in expected)
    assert any("shared" in n for n in state) == (family == "deepseek-v3")  # quantized as well


@pytest.mark.parametrize("fmt", FORMATS)
def test_only_experts_leaves_attention_as_it_is(fmt, checkpoints, tmp_path):
    source = checkpoints("qwen3-moe")
    convert(source, tmp_path / "out", format=fmt, only="experts")
    model = from_pretrained(source)
    quantize_model_(model, fmt)
    assert torch.equal(logits(load_quantized(tmp_path / "out")), logits(model))
    q = CheckpointFolder(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(q, CheckpointFolder(source)["model.layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize("options", [{}, {"format": "fp8_block"}, {"format": "fp8_block", "rounding": "pow2"}], ids=str)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt-oss"])
def test_transformers_keeps_experts_in_8_bits(family, options, checkpoints, tmp_path, device, monkeypatch):
    """On a GPU Transformers holds the experts of the default layout as they are stored, and our function runs them; attention stays in bf16."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    if device.type == "cpu":  # it would dequantize; without the check it loads as on a GPU
        monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
    convert(checkpoints(family), tmp_path / "out", only="experts", **options)
    register()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", experts_implementation="moe_ops", dtype=torch.bfloat16, device_map={"": device}
    )
    assert all(type(m).__name__ == "FP8Experts" and m.gate_up_proj.dtype == torch.float8_e4m3fn for _, m in experts_modules(model))
    assert not any(type(m).__name__ == "FP8Linear" for m in model.modules())
    ids = prompt().to(device)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, load_quantized(tmp_path / "out", device=device)(ids).logits)


def fp8_checkpoint(source, into, rule, kind):
    """The checkpoint in FP8 blocks, as one of the publishers writes it."""
    config = json.loads((source / "config.json").read_text())
    dialect = {"modelopt": "fp8_block_modelopt", "compressed-tensors": "fp8_block_compressed_tensors"}.get(kind, "fp8_block")
    config["quantization_config"] = quantization_config("fp8_block_ue8m0" if kind == "e8m0" else dialect)
    (into / "config.json").write_text(json.dumps(config))
    suffix = {"fp8_block": "weight_scale_inv"}.get(dialect, "weight_scale")
    tensors = {}
    for name, t in CheckpointFolder(source).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = t
            continue
        q = quantize_weight(t, "fp8_block", rule=rule)
        scale = {"bf16": q.scale.bfloat16(), "e8m0": (q.scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)}.get(kind, q.scale)
        if kind == "modelopt":
            scale = scale[:, None, :, None]
        module = name.removesuffix("weight")
        tensors[name], tensors[module + ("scale" if kind == "dot-scale" else suffix)] = q.data, scale.contiguous()
    # a weight and its scale lie in different files
    names = sorted(tensors)
    files = {n: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({n: tensors[n] for n in names if files[n] == file}, into / file, {"format": "pt"})
    (into / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return tensors


KINDS = ("fp32", "bf16", "e8m0", "dot-scale", "modelopt", "compressed-tensors")


@pytest.mark.parametrize("kind", KINDS)
def test_PAIR_E8M0_fp8_blocks_with_powers_of_two_become_mxfp8_bit_for_bit(kind, checkpoints, tmp_path):
    """Elements keep their bytes, a scale becomes one byte for each of 128 rows x 4 groups, and the values are the same."""
    source = tmp_path / "fp8"
    source.mkdir()
    tensors = fp8_checkpoint(checkpoints("qwen3-moe"), source, "pow2", kind)
    report = convert(source, tmp_path / "out")
    assert report.exact() == report.counts()["reencoded"] > 0 and report.overall() is None
    assert "kept the bytes of their elements exactly" in report.text()
    out = CheckpointFolder(tmp_path / "out")
    for w in (e for e in report.plan.entries if isinstance(e, Weight)):
        data, byte = out[w.data.name], out[w.data_scale.name]
        assert torch.equal(tensor_bytes(data), tensor_bytes(tensors[w.weight.name])), w.name
        scale = tensors[w.scale.name]
        scale = scale.float().reshape(-(-data.shape[0] // 128), -1)
        n, k = data.shape
        wide = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        assert torch.equal(decode_e8m0(byte).repeat_interleave(32, 1), wide), w.name
    shutil.rmtree(tmp_path / "out")
    again = convert(source, tmp_path / "out", format="fp8_block")
    assert again.exact() == again.counts()["reencoded"]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_PAIR_other_scales_are_rounded_again_and_the_error_is_told(kind, checkpoints, tmp_path):
    source = tmp_path / "fp8"
    source.mkdir()
    tensors = fp8_checkpoint(checkpoints("qwen3-moe"), source, "fp32", kind)
    report = convert(source, tmp_path / "out")
    assert report.exact() == 0 and 25 < report.overall().sqnr_db < 40
    w = next(e for e in report.plan.entries if isinstance(e, Weight) and e.name.endswith("experts.3.down_proj"))
    data, scale = tensors[w.weight.name], tensors[w.scale.name].float()
    n, k = data.shape
    values = data.float() * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    want = quantize_weight(values, "mxfp8")
    out = CheckpointFolder(tmp_path / "out")
    assert torch.equal(tensor_bytes(out[w.data.name]), tensor_bytes(want.data)) and torch.equal(out[w.data_scale.name], want.scale)


def test_mxfp8_changes_its_dialect_and_keeps_its_bytes(checkpoints, tmp_path):
    convert(checkpoints("qwen3-moe"), tmp_path / "hf")
    first = CheckpointFolder(tmp_path / "hf")
    for layout in ("modelopt", "compressed-tensors"):
        report = convert(tmp_path / "hf", tmp_path / layout, layout=layout)
        assert report.exact() == report.counts()["reencoded"] > 0
        out = CheckpointFolder(tmp_path / layout)
        for w in (e for e in report.plan.entries if isinstance(e, Weight)):
            assert torch.equal(tensor_bytes(out[w.data.name]), tensor_bytes(first[w.weight.name]))
            assert torch.equal(out[w.data_scale.name], first[w.scale.name])
    # and back again, from the file that only ModelOpt writes
    convert(tmp_path / "modelopt", tmp_path / "back")
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()
    back = CheckpointFolder(tmp_path / "back")
    assert set(back) == set(first) and all(torch.equal(tensor_bytes(back[n]), tensor_bytes(first[n])) for n in first if first[n].dim())
