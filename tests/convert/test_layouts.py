"""What is written satisfies the readers' rules: names, dtypes, shapes, config keys and the modules that each reader leaves unquantized.

The rules are those that vLLM 0.33.0, SGLang 0.5.23 and Transformers 5.17.0 apply when they load, written down once more here; none of the
three runs. `test_loading.py` loads with Transformers itself.
"""

import fnmatch
import json
import math
import re

import pytest
import torch

from moe_ops import dequantize, quantize_weight
from moe_ops.convert.layouts import dialect_of, output_config, outputs, quantization_section
from moe_ops.convert.planning import plan_tensors
from moe_ops.convert.types import LAYOUTS, Options, Source, Weight
from moe_ops.layer.dialects import detect

H, INTER, E = 256, 128, 4
CONFIG = {"architectures": ["X"], "model_type": "qwen2_moe", "num_experts": E, "torch_dtype": "bfloat16"}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def model():
    """Layer 0 with a dense MLP, layers 1 and 2 with experts and a shared expert; and a vision tower."""
    w = {"model.embed_tokens.weight": (512, H), "lm_head.weight": (512, H), "model.visual.blocks.0.attn.qkv.weight": (H, H)}
    for i in range(3):
        p = f"model.layers.{i}."
        w |= {f"{p}self_attn.{x}_proj.weight": (H, H) for x in "qkvo"} | {p + "input_layernorm.weight": (H,)}
        mlps = ["mlp"] if i == 0 else ["mlp.shared_expert", *(f"mlp.experts.{e}" for e in range(E))]
        for m in mlps:
            w |= {f"{p}{m}.gate_proj.weight": (INTER, H), f"{p}{m}.up_proj.weight": (INTER, H), f"{p}{m}.down_proj.weight": (H, INTER)}
        if i:
            w |= {p + "mlp.gate.weight": (E, H), p + "mlp.shared_expert_gate.weight": (1, H)}
    return {n: Source(n, "BF16", s, "model.safetensors", 0, 2 * math.prod(s)) for n, s in w.items()}


#: What a server builds: layers by their fused names, and one module for all experts of a layer.
SERVED = ["lm_head", "model.visual.blocks.0.attn.qkv", "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"]
for _i in range(3):
    SERVED += [f"model.layers.{_i}.self_attn.qkv_proj", f"model.layers.{_i}.self_attn.o_proj"]
    if _i:
        SERVED += [
            f"model.layers.{_i}.mlp.{m}" for m in ("experts", "gate", "shared_expert_gate", "shared_expert.gate_up_proj", "shared_expert.down_proj")
        ]

CHOICES = {
    "all": {},
    "experts": {"only": "experts"},
    "no experts in layer 1": {"exclude": (r"re:model\.layers\.1\.mlp\.experts\..*",)},
    "no experts": {"exclude": (r"re:.*\.mlp\.experts\..*",)},
    "no attention in layer 2": {"exclude": ("model.layers.2.self_attn",)},
    "no shared expert": {"exclude": (r"re:.*\.shared_expert\..*",)},
}


def parts(name):
    """Modules of the checkpoint that a server's layer is made of."""
    stem, _, leaf = name.rpartition(".")
    if leaf == "experts":
        return [f"{name}.{e}.{x}_proj" for e in range(E) for x in ("gate", "up", "down")]
    return [f"{stem}.{x}" for x in FUSED[leaf]] if leaf in FUSED else [name]


def skipped_by_vllm(name, ignored):
    """quant_method fp8 and the exact part of modelopt: whole names; experts by any name that holds theirs."""
    if name.rpartition(".")[2] in FUSED:
        hits = {p in ignored for p in parts(name)}
        assert len(hits) == 1, f"vLLM refuses {name}: only some of its parts are skipped"
        return hits.pop()
    if "experts" in name:
        return any(name in i for i in ignored if "experts" in i)
    return name in ignored


def skipped_by_vllm_modelopt(name, ignored):
    return skipped_by_vllm(name, ignored) or any(i in name or fnmatch.fnmatch(name, i) for i in ignored)


def skipped_by_compressed_tensors(name, ignored):
    def hit(module):
        return any(re.match(i[3:], module) if i.startswith("re:") else i == module for i in ignored)

    names = [p for p in parts(name) if ".experts." not in p or ".experts.0." in p]
    hits = {bool(hit(p)) for p in names}
    assert len(hits) == 1, f"{name}: only some of its parts are skipped"
    return hits.pop()


def skipped_by_sglang(name, ignored):
    ignored = [v for i in ignored for v in (i.removeprefix("model."), "model." + i.removeprefix("model."))]

    def hit(module):
        return any(i == module or module.startswith(i + ".") or f".{i}." in f".{module}." for i in ignored)

    hits = {hit(p) for p in (parts(name) if name.rpartition(".")[2] in FUSED else [name])}
    assert len(hits) == 1, f"SGLang refuses {name}: only some of its parts are skipped"
    return hits.pop() or ("experts" in name and any(name in i for i in ignored if "experts" in i))


def skipped_by_transformers(name, ignored):
    return any(re.match(rf"{i}\.", name) or re.match(i, name) or name.endswith(i) for i in ignored)


def planned(layout, fmt, **options):
    options = Options(format=fmt, layout=layout, **options)
    plan = plan_tensors(CONFIG, model(), options)
    files = {k: json.loads(v) for k, v in output_config(CONFIG, options, plan).items()}
    return options, plan, files


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_block"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_reader_quantizes_exactly_what_is_quantized(choice, layout, fmt):
    _, plan, files = planned(layout, fmt, **CHOICES[choice])
    section = files["config.json"]["quantization_config"]
    done = {e.name for e in plan.entries if isinstance(e, Weight)}
    served = {name: all(p in done for p in parts(name)) for name in SERVED}
    assert {name: any(p in done for p in parts(name)) for name in SERVED} == served
    readers = {
        "hf": [
            (skipped_by_sglang, section.get("ignored_layers")),
            (skipped_by_vllm, section.get("ignored_layers")),
            (skipped_by_vllm, section.get("modules_to_not_convert")),
        ],
        "compressed-tensors": [(skipped_by_compressed_tensors, section.get("ignore"))],
        "modelopt": [(skipped_by_vllm_modelopt, section.get("ignore")), (skipped_by_sglang, section.get("ignore"))],
    }[layout]
    for skipped, ignored in readers:
        assert {name: not skipped(name, ignored) for name in SERVED} == served, skipped.__name__
    if layout == "hf":  # modules are not fused there, but experts are one
        names = [n for s in SERVED for n in ([s] if s.endswith("experts") else parts(s))]
        for name in names:
            quantized = served[name] if name.endswith("experts") else name in done
            assert skipped_by_transformers(name, section["modules_to_not_convert"]) != quantized, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_block"])
def test_tensors_are_what_the_readers_register(fmt, layout):
    options, plan, _ = planned(layout, fmt)
    for e in (e for e in plan.entries if isinstance(e, Weight)):
        n, k = e.weight.shape
        assert (e.data.name, e.data.dtype, e.data.shape) == (f"{e.name}.weight", "F8_E4M3", (n, k))
        suffix = "weight_scale_inv" if layout == "hf" else "weight_scale"
        # vLLM and SGLang register [N, K/32] uint8; Transformers takes the dtype of the file
        dtype, shape = ("U8", (n, k // 32)) if fmt == "mxfp8" else ("F32", (-(-n // 128), -(-k // 128)))
        if layout == "modelopt" and fmt == "fp8_block":
            shape = (shape[0], 1, shape[1], 1)
        assert (e.data_scale.name, e.data_scale.dtype, e.data_scale.shape) == (f"{e.name}.{suffix}", dtype, shape)
    assert outputs("m", (130, 96), options)[1].shape[0] == (130 if fmt == "mxfp8" else 2)  # ragged rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_block"])
def test_our_own_reader_detects_the_dialect(fmt, layout):
    options, _, files = planned(layout, fmt)
    assert detect(files["config.json"]["quantization_config"]).name == dialect_of(options)
    for content in files.values():
        section = content.get("quantization_config") or content
        assert detect(section).format.name == fmt


def test_fp8_blocks_with_powers_of_two_say_so():
    options = Options(format="fp8_block", rounding="pow2")
    assert quantization_section(options, [])["scale_fmt"] == "ue8m0" and dialect_of(options) == "fp8_block_ue8m0"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_block_size_is_always_written(layout):
    """Without it Transformers reads mxfp8 as blocks of 128x128 with scales of another shape."""
    assert quantization_section(Options(layout=layout), [])["weight_block_size"] == [1, 32]
    assert quantization_section(Options(layout=layout, format="fp8_block"), [])["weight_block_size"] == [128, 128]


def test_hf_keys():
    section = quantization_section(Options(), ["lm_head"])
    # SGLang demands activation_scheme, and [1, 32] where weight_block_size is given
    assert section["quant_method"] == "mxfp8" and section["activation_scheme"] == "dynamic" and section["scale_fmt"] == "ue8m0"
    assert section["ignored_layers"] == section["modules_to_not_convert"] == ["lm_head"]
    block = quantization_section(Options(format="fp8_block"), ["lm_head"])
    assert block["quant_method"] == "fp8" and "scale_fmt" not in block and block["activation_scheme"] == "dynamic"


def test_MAP_a_router_beside_a_gate_projection_of_the_same_layer():
    """Transformers takes "mlp.gate" for the beginning of "mlp.gate_proj", and would leave that one with raw, unscaled elements."""
    extra = {f"model.layers.1.mlp.{x}_proj.weight": (INTER, H) for x in ("gate", "up")}
    tensors = model() | {n: Source(n, "BF16", s, "model.safetensors", 0, 2 * math.prod(s)) for n, s in extra.items()}
    section = json.loads(output_config(CONFIG, Options(), plan_tensors(CONFIG, tensors, Options()))["config.json"])["quantization_config"]
    router, projection = "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"
    assert router in section["ignored_layers"]
    for skipped, ignored in ((skipped_by_transformers, section["modules_to_not_convert"]), (skipped_by_sglang, section["ignored_layers"])):
        assert skipped(router, ignored) and not skipped(projection, ignored)


def test_compressed_tensors_keys():
    for fmt in ("mxfp8", "fp8_block"):
        section = quantization_section(Options(layout="compressed-tensors", format=fmt), [])
        (group,) = section["config_groups"].values()
        weights, inputs = group["weights"], group["input_activations"]
        assert section["quant_method"] == "compressed-tensors" and group["targets"] == ["Linear"]
        assert weights["num_bits"] == 8 and weights["type"] == "float" and weights["symmetric"] and not weights["dynamic"]
        assert inputs["num_bits"] == 8 and inputs["type"] == "float" and inputs["dynamic"]
        if fmt == "mxfp8":
            assert weights["strategy"] == "group" and weights["group_size"] == 32 and weights["scale_dtype"] == "torch.uint8"
        else:
            assert weights["strategy"] == "block" and weights["block_structure"] == [128, 128]


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_block"])
def test_compressed_tensors_itself_reads_it(fmt):
    """Where the library is installed (0.17.0 was tried): it accepts the section and decompresses to our values."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(quantization_section(Options(layout="compressed-tensors", format=fmt), ["lm_head"]))
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    q = quantize_weight(w, fmt)
    compressor = BaseCompressor.load_from_registry(config.format)
    out = compressor.decompress({"weight": q.data, "weight_scale": q.scale}, config.config_groups["group_0"])["weight"]
    assert torch.equal(out, dequantize(q).to(out.dtype))


def vllm_modelopt(section):
    """quant_algo as vLLM finds it in config.json: flat, because its nested form names no MXFP8 where a producer is modelopt."""
    assert "quantization" not in section and section["quant_method"].startswith("modelopt")
    assert isinstance(section["ignore"], list) and not isinstance(section["kv_cache_scheme"], dict) and isinstance(section["group_size"], int)
    return section["quant_algo"].upper()


def sglang_modelopt(section):
    """What SGLang makes of it: MXFP8 becomes its native method, and `.weight_scale` is renamed to `.weight_scale_inv` while loading."""
    flat = section.get("quantization", section)
    if flat["quant_algo"] != "MXFP8":
        return None
    return {"quant_method": "mxfp8", "weight_block_size": [1, flat["group_size"]], "skip": flat.get("exclude_modules", flat.get("ignore"))}


def test_modelopt_keys_in_both_files():
    _, plan, files = planned("modelopt", "mxfp8", only="experts")
    section, legacy = files["config.json"]["quantization_config"], files["hf_quant_config.json"]
    assert vllm_modelopt(section) == "MXFP8"
    # vLLM refuses the file without these two keys, whatever they hold
    assert {"kv_cache_quant_algo", "exclude_modules"} <= set(legacy["quantization"])
    for found in (sglang_modelopt(section), sglang_modelopt(legacy)):
        assert found == {"quant_method": "mxfp8", "weight_block_size": [1, 32], "skip": list(plan.kept_modules)}
    assert set(planned("hf", "mxfp8")[2]) == {"config.json"}
    assert vllm_modelopt(planned("modelopt", "fp8_block")[2]["config.json"]["quantization_config"]) == "FP8_PB_WO"


def test_the_rest_of_the_config_stays_and_the_old_quantization_goes():
    old = {"quantization_config": {"quant_method": "fp8"}, "compression_config": {}, "text_config": {"hidden_size": 7, "quantization_config": {}}}
    options = Options()
    files = output_config(CONFIG | old, options, plan_tensors(CONFIG, model(), options))
    new = json.loads(files["config.json"])
    assert list(new)[: len(CONFIG)] == list(CONFIG) and all(new[k] == v for k, v in CONFIG.items())
    assert new["text_config"] == {"hidden_size": 7} and "compression_config" not in new
    assert new["quantization_config"]["quant_method"] == "mxfp8"
    assert files == output_config(CONFIG | old, options, plan_tensors(CONFIG, model(), options))
