"""The plan of a conversion, from headers alone: what is quantized in each family, what never is, and which options are refused."""

import math
import re

import pytest

from moe_ops.convert.families import FAMILIES, family_of
from moe_ops.convert.pairing import skipped_by, sort_tensors
from moe_ops.convert.planning import plan_tensors
from moe_ops.convert.source import ConvertError
from moe_ops.convert.types import DTYPES, Keep, Options, Source, Weight

H, INTER, E = 256, 128, 4


def sources(**tensors):
    """name -> Source from name=(dtype, shape) or (dtype, shape, file); dots are written as __."""
    out, at = {}, {}
    for name, (dtype, shape, *file) in tensors.items():
        name, file = name.replace("__", "."), file[0] if file else "model.safetensors"
        begin = at.get(file, 0)
        at[file] = begin + math.prod(shape) * DTYPES[dtype].itemsize
        out[name] = Source(name, dtype, tuple(shape), file, begin, at[file])
    return out


def bf16(*shape):
    return ("BF16", shape)


def model(layers=1, inter=INTER, h=H):
    """Tensors of a small Qwen3-MoE."""
    w = {"model.embed_tokens.weight": bf16(512, h), "model.norm.weight": bf16(h), "lm_head.weight": bf16(512, h)}
    for i in range(layers):
        p = f"model.layers.{i}."
        w |= {p + "input_layernorm.weight": bf16(h), p + "self_attn.q_norm.weight": bf16(64)}
        w |= {p + f"self_attn.{x}_proj.weight": bf16(h, h) for x in "qkvo"}
        w[p + "mlp.gate.weight"] = bf16(E, h)
        for e in range(E):
            w |= {p + f"mlp.experts.{e}.{x}_proj.weight": bf16(inter, h) for x in ("gate", "up")}
            w[p + f"mlp.experts.{e}.down_proj.weight"] = bf16(h, inter)
    return sources(**w)


CONFIG = {"model_type": "qwen3_moe", "num_experts": E}


def quantized(plan):
    return {e.name for e in plan.entries if isinstance(e, Weight) and e.data_scale is not None}


def kept(plan):
    return {e.source.name: e.reason for e in plan.entries if isinstance(e, Keep)}


def check_accounting(plan, tensors):
    """Every element of every tensor is in exactly one entry, or is the scale of one."""
    taken = dict.fromkeys(tensors, 0)
    scales = {e.scale.name for e in plan.entries if isinstance(e, Weight) and e.scale}
    for e in plan.entries:
        source = e.source if isinstance(e, Keep) else e.weight
        taken[source.name] += math.prod(e.data.shape)
    for name, source in tensors.items():
        assert taken[name] == (0 if name in scales else math.prod(source.shape)), name


# ---- what is quantized


def test_MAP_everything_but_the_never_list_is_quantized_and_each_tensor_is_accounted_for():
    tensors = model()
    plan = plan_tensors(CONFIG, tensors, Options())
    p = "model.layers.0."
    assert quantized(plan) == {f"{p}self_attn.{x}_proj" for x in "qkvo"} | {
        f"{p}mlp.experts.{e}.{x}_proj" for e in range(E) for x in ("gate", "up", "down")
    }
    assert set(kept(plan)) == set(tensors) - {f"{n}.weight" for n in quantized(plan)}
    assert plan.kept_modules == ("lm_head", "model.embed_tokens", "model.layers.0.mlp.gate")
    assert plan.family == "qwen_moe" and not plan.warnings
    check_accounting(plan, tensors)


def test_MAP_names_that_contain_each_other():
    """Router, gate projection, gate of the shared expert: only the projection is quantized, whatever the names share."""
    tensors = model() | sources(
        **{
            "model.layers.1.mlp.gate_proj.weight": bf16(INTER, H),
            "model.layers.1.mlp.up_proj.weight": bf16(INTER, H),
            "model.layers.2.mlp.gate.weight": bf16(E, H),
            "model.layers.2.mlp.gate.e_score_correction_bias": ("F32", (E,)),
            "model.layers.2.mlp.shared_expert_gate.weight": bf16(1, H),
            "model.layers.2.mlp.shared_expert.gate_proj.weight": bf16(INTER, H),
            "model.layers.2.mlp.shared_expert.up_proj.weight": bf16(INTER, H),
        }
    )
    plan = plan_tensors(CONFIG, tensors, Options())
    new = {n for n in quantized(plan) if not n.startswith("model.layers.0.")}
    assert new == {f"model.layers.{x}_proj" for x in ("1.mlp.gate", "1.mlp.up", "2.mlp.shared_expert.gate", "2.mlp.shared_expert.up")}
    bias = next(e for e in plan.entries if e.data.name.endswith("correction_bias"))
    assert isinstance(bias, Keep) and bias.data.dtype == "F32"
    assert "model.layers.2.mlp.shared_expert_gate" in plan.kept_modules
    assert not plan.warnings


def test_MAP_a_kept_name_inside_a_quantized_one_is_a_warning_where_it_matters():
    """vLLM looks for ModelOpt's excluded names anywhere inside a module's name; in the other layouts names can be told apart."""
    tensors = model() | sources(**{"model.layers.0.mlp.gate_proj.weight": bf16(INTER, H), "model.layers.0.mlp.up_proj.weight": bf16(INTER, H)})
    (warning,) = plan_tensors(CONFIG, tensors, Options(layout="modelopt")).warnings
    assert "model.layers.0.mlp.gate is kept, and its name stands inside that of a quantized module" in warning
    assert not plan_tensors(CONFIG, tensors, Options()).warnings


@pytest.mark.parametrize("row", FAMILIES, ids=lambda f: f.name)
def test_every_family_keeps_what_is_never_quantized(row):
    for kind in row.model_types:
        assert family_of({"model_type": kind}) is row
        assert family_of({"model_type": "wrapper", "text_config": {"model_type": kind}}) is row
    for module in ("lm_head", "model.embed_tokens", "model.layers.3.mlp.gate", "model.layers.3.block_sparse_moe.gate", "model.layers.3.mlp.router",
                   "model.layers.61.eh_proj", "model.layers.61.shared_head.head", "model.layers.61.embed_tokens", "mtp.fc", "model.norm",
                   "model.layers.1.input_layernorm", "model.layers.1.self_attn.q_a_layernorm", "model.visual.blocks.0.attn.qkv"):  # fmt: skip
        assert row.why_kept(module, "mxfp8") and row.why_kept(module, "fp8_block"), module
    for module in ("model.layers.3.mlp.experts.0.gate_proj", "model.layers.3.mlp.gate_proj", "model.layers.3.block_sparse_moe.experts.0.w1",
                   "model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.mlp.shared_expert.gate_proj"):  # fmt: skip
        assert row.why_kept(module, "mxfp8") is None, module
    attention = row.why_kept("model.layers.3.self_attn.q_proj", "mxfp8")
    assert (attention is not None) == (row.name == "gpt_oss")
    latent = row.name in ("deepseek", "kimi", "glm4_moe")
    assert (row.why_kept("model.layers.3.self_attn.kv_b_proj", "mxfp8") is not None) == (latent or row.name == "gpt_oss")
    assert (row.why_kept("model.layers.3.self_attn.kv_b_proj", "fp8_block") is not None) == (row.name == "gpt_oss")


def test_only_experts():
    plan = plan_tensors(CONFIG, model(), Options(only="experts"))
    assert quantized(plan) == {f"model.layers.0.mlp.experts.{e}.{x}_proj" for e in range(E) for x in ("gate", "up", "down")}
    assert kept(plan)["model.layers.0.self_attn.q_proj.weight"] == "not a routed expert"
    assert "model.layers.0.self_attn.q_proj" in plan.kept_modules


def test_include_and_exclude():
    attention = plan_tensors(CONFIG, model(), Options(include=(r"re:.*self_attn\.[qkv]_proj",)))
    assert quantized(attention) == {f"model.layers.0.self_attn.{x}_proj" for x in "qkv"}
    assert "model.layers.0.mlp.experts" in attention.kept_modules
    assert not any(n.startswith("model.layers.0.mlp.experts.") for n in attention.kept_modules)
    second = plan_tensors(CONFIG, model(layers=2), Options(exclude=("model.layers.0",)))
    assert all(n.startswith("model.layers.1.") for n in quantized(second))
    assert kept(second)["model.layers.0.self_attn.q_proj.weight"] == "excluded by model.layers.0"
    # a pattern without wildcards at its end matches no longer name
    assert "model.layers.10" not in {e.reason for e in second.entries if isinstance(e, Keep)}


def test_never_wins_over_include():
    plan = plan_tensors(CONFIG, model(), Options(include=("re:.*",)))
    assert "lm_head" in plan.kept_modules and "model.layers.0.mlp.gate" in plan.kept_modules


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"include": ("re:model.layers.9.*",)}, "--include 're:model.layers.9.*' matches no weight"),
        ({"exclude": ("mlp.experts",)}, "--exclude 'mlp.experts' matches no weight"),
        ({"include": ("re:(",)}, r"--include 're:\(' is no regular expression"),
        ({"include": ("lm_head",)}, "nothing would be quantized.*never quantized: output head"),
        ({"exclude": (r"re:.*experts\.2\..*",)}, "9 of 12 weights would be quantized and the rest not .excluded by"),
        ({"exclude": (r"re:.*experts\.\d\.down_proj",)}, "8 of 12 weights would be quantized"),
    ],
)
def test_options_that_fit_nothing(options, text):
    with pytest.raises(ValueError, match=text):
        plan_tensors(CONFIG, model(), Options(**options))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"format": "mxfp4"}, ValueError, "format must be one of"),
        ({"rounding": "pow2"}, ValueError, "rounding must be one of rceil, floor, even for mxfp8, got 'pow2'"),
        ({"layout": "gguf"}, ValueError, "layout must be one of hf, compressed-tensors, modelopt"),
        ({"only": "attention"}, ValueError, "only must be 'experts' or None"),
        ({"stochastic": 1.5}, TypeError, "stochastic must be an int seed"),
        ({"include": "re:.*"}, TypeError, "include must be a sequence of patterns"),
        ({"exclude": [1]}, TypeError, "exclude must hold patterns as strings, got 1"),
    ],
)
def test_options_are_checked(options, error, text):
    with pytest.raises(error, match=text):
        Options(**options)


def test_unknown_family_needs_patterns():
    config = {"model_type": "bert"}
    tensors = sources(
        **{
            "embeddings.word_embeddings.weight": bf16(512, 64),
            "encoder.layer.0.attention.self.query.weight": ("F32", (64, 64)),
            "encoder.layer.0.attention.self.query.bias": ("F32", (64,)),
            "embeddings.position_ids": ("I64", (1, 512)),
        }
    )
    with pytest.raises(ConvertError, match="model_type 'bert' is not in the family table .*--include"):
        plan_tensors(config, tensors, Options())
    plan = plan_tensors(config, tensors, Options(include=(r"re:encoder\.layer\..*",)))
    assert quantized(plan) == {"encoder.layer.0.attention.self.query"} and plan.family is None
    assert kept(plan)["embeddings.position_ids"] == "I64 is copied"
    check_accounting(plan, tensors)


def test_k_that_mxfp8_cannot_hold():
    odd = sources(**{"model.layers.0.mlp.odd.weight": bf16(64, 40)})
    plan = plan_tensors(CONFIG, model() | odd, Options())
    assert kept(plan)["model.layers.0.mlp.odd.weight"] == "K = 40 is no multiple of 32" and "model.layers.0.mlp.odd" in plan.kept_modules
    assert "model.layers.0.mlp.odd" in quantized(plan_tensors(CONFIG, model() | odd, Options(format="fp8_block")))
    with pytest.raises(ConvertError, match=r"model.safetensors: 'model.layers.0.mlp.odd.weight' has K = 40, but mxfp8 has blocks of 32"):
        plan_tensors(CONFIG, model() | odd, Options(include=("model.layers.0.mlp.odd",)))
    with pytest.raises(ConvertError, match=r"down_proj.*has K = 80.*keep all experts with --exclude 're:") as error:
        plan_tensors(CONFIG, model(inter=80), Options())
    advice = re.search(r"--exclude '(.*)'", str(error.value))[1]
    assert quantized(plan_tensors(CONFIG, model(inter=80), Options(exclude=(advice,)))) == {f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"}


def test_MAP_big_tensors_of_no_known_kind_are_no_silent_leftovers():
    big = sources(**{"model.layers.0.mlp.fused_experts": bf16(64, 256, 256)})
    with pytest.raises(ConvertError, match=r"'model.layers.0.mlp.fused_experts' of shape \[64, 256, 256\] is big and of no kind"):
        plan_tensors(CONFIG, model() | big, Options())
    plan = plan_tensors(CONFIG, model() | big, Options(exclude=("model.layers.0.mlp.fused_experts",)))
    assert kept(plan)["model.layers.0.mlp.fused_experts"] == "excluded by model.layers.0.mlp.fused_experts"


def test_other_tensors_are_kept_as_they_are():
    others = sources(**{"model.scalar": ("F32", ()), "model.ids": ("I64", (7,)), "model.layers.0.linear_attn.conv1d.weight": bf16(64, 1, 4)})
    tensors = model() | others
    plan = plan_tensors(CONFIG, tensors, Options())
    assert set(others) <= set(kept(plan))
    assert "model.layers.0.linear_attn.conv1d" in plan.kept_modules  # a weight, though no matrix
    check_accounting(plan, tensors)


def test_PAIR_an_excluded_name_hides_no_orphan_scale():
    """Scales are bytes too: of an excluded module they belong to a weight, or to nothing."""
    orphan = sources(**{"lm_head.weight_scale_inv": ("U8", (512, 8))})
    named = CONFIG | {"quantization_config": {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}}
    for config, options in ((CONFIG, Options(exclude=("lm_head",))), (named, Options())):
        with pytest.raises(ConvertError, match=r"'lm_head.weight_scale_inv' is an orphan scale"):
            plan_tensors(config, model() | orphan, options)


def test_MAP_stacks_and_other_tensors_of_odd_dtypes_are_copied_too():
    p = "model.layers.0.mlp.experts."
    stacks = {p + "gate_up_proj": ("I8", (E, 64, 32)), p + "gate_up_proj_scale": ("F32", (E, 64)), p + "down_proj": ("I8", (E, 64, 32))}
    tensors = sources(**stacks, **{"model.table": ("F8_E5M2", (4, 4)), "model.layers.0.self_attn.q_proj.weight": bf16(H, H)})
    with pytest.raises(ConvertError, match="must be float8_e4m3fn or a floating dtype, got int8 .*; --exclude"):
        plan_tensors(CONFIG, tensors, Options(exclude=("model.table",)))
    with pytest.raises(ConvertError, match="'model.table' is F8_E5M2"):
        plan_tensors(CONFIG, tensors, Options(exclude=("model.layers.0.mlp.experts",)))
    plan = plan_tensors(CONFIG, tensors, Options(exclude=("model.table", "model.layers.0.mlp.experts")))
    assert set(kept(plan)) == {*stacks, "model.table"}
    named = {"quantization_config": {"quant_method": "mxfp8", "ignored_layers": list(plan.kept_modules)}}
    sort_tensors(named, {k: v for k, v in tensors.items() if k in kept(plan)}, skipped_by(named["quantization_config"]))  # as `verify` reads it


ODD = {"model.layers.0.odd.weight": ("I64", (64, 64)), "model.layers.0.mask.weight": ("BOOL", (8, 8)), "model.e5.weight": ("F8_E5M2", (64, 64))}


@pytest.mark.parametrize("name", ODD)
def test_MAP_matrices_that_cannot_be_quantized_are_copied_where_the_user_says_so(name):
    tensors, module = model() | sources(**{name: ODD[name], name + "_scale_inv": ("F32", (1, 1))}), name.removesuffix(".weight")
    if ODD[name][0] != "F8_E5M2":
        del tensors[name + "_scale_inv"]
    with pytest.raises(ConvertError, match=rf"'{name}' must be float8_e4m3fn or a floating dtype, got .*; --exclude {module} copies it as it is"):
        plan_tensors(CONFIG, tensors, Options())
    plan = plan_tensors(CONFIG, tensors, Options(exclude=(module,)))
    entry = next(e for e in plan.entries if e.data.name == name)
    assert isinstance(entry, Keep) and (entry.data.dtype, entry.reason) == (ODD[name][0], f"excluded by {module}")
    assert module in plan.kept_modules
    check_accounting(plan, tensors)
    # the config of the result says so, and is enough for the next conversion
    named = CONFIG | {"quantization_config": {"quant_method": "mxfp8", "ignored_layers": [module]}}
    assert name in kept(plan_tensors(named, {k: v for k, v in tensors.items() if "experts" not in k} | mx(), Options()))


def mx():
    names = [f"model.layers.0.mlp.experts.{e}.{x}_proj" for e in range(E) for x in ("gate", "up", "down")]
    return sources(**{f"{n}.weight": ("F8_E4M3", (64, 64)) for n in names} | {f"{n}.weight_scale_inv": ("U8", (64, 2)) for n in names})


def test_missing_experts_are_named():
    tensors = model()
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    with pytest.raises(ConvertError, match="model.layers.0.mlp.experts, whose expert 2 lacks up_proj"):
        plan_tensors(CONFIG, tensors, Options())
    tensors = {k: v for k, v in model().items() if ".experts.3." not in k}
    with pytest.raises(ConvertError, match="3 experts, but config.json says num_experts = 4"):
        plan_tensors(CONFIG, tensors, Options())


# ---- warnings


def test_layers_that_servers_fuse():
    (warning,) = plan_tensors(CONFIG, model(), Options(exclude=("model.layers.0.self_attn.q_proj",))).warnings
    assert "model.layers.0.self_attn.{q_proj,k_proj,v_proj}: servers fuse these into one layer" in warning


def test_fp8_blocks_that_others_do_not_load():
    ragged = plan_tensors(CONFIG, model(inter=192), Options(format="fp8_block")).warnings
    assert any("I = 192 is no multiple of 128: moe_ops loads such" in w for w in ragged)
    assert not plan_tensors(CONFIG, model(inter=192), Options()).warnings
    assert "ModelOpt's names" in plan_tensors(CONFIG, model(), Options(format="fp8_block", layout="modelopt")).warnings[0]
