"""Stacks of experts are taken apart, and weights find their scales in every dialect; what does not belong together is named and refused."""

import math

import pytest

from moe_ops.convert.planning import plan_tensors
from moe_ops.convert.source import ConvertError
from moe_ops.convert.types import DTYPES, Keep, Options, Part, Source, Weight
from moe_ops.layer.dialects import quantization_config

H, INTER, E = 256, 128, 4
P = "model.layers.0.mlp.experts."


def sources(**tensors):
    """name -> Source from name=(dtype, shape) or (dtype, shape, file)."""
    out, at = {}, {}
    for name, (dtype, shape, *file) in tensors.items():
        file = file[0] if file else "model.safetensors"
        begin = at.get(file, 0)
        at[file] = begin + math.prod(shape) * DTYPES[dtype].itemsize
        out[name] = Source(name, dtype, tuple(shape), file, begin, at[file])
    return out


def bf16(*shape):
    return ("BF16", shape)


def stacks():
    return sources(**{P + "gate_up_proj": bf16(E, 2 * INTER, H), P + "down_proj": bf16(E, H, INTER)})


def one_by_one():
    w = {f"{P}{e}.{x}_proj.weight": bf16(INTER, H) for e in range(E) for x in ("gate", "up")}
    return sources(**w | {f"{P}{e}.down_proj.weight": bf16(H, INTER) for e in range(E)})


def fp8():
    """Attention and experts of one layer in FP8 blocks."""
    w = {f"model.layers.0.self_attn.{x}_proj": (H, H) for x in "qkvo"}
    w |= {f"{P}{e}.{x}_proj": (H, INTER) if x == "down" else (INTER, H) for e in range(E) for x in ("gate", "up", "down")}
    out = {f"{n}.weight": ("F8_E4M3", shape) for n, shape in w.items()}
    return sources(**out | {f"{n}.weight_scale_inv": ("F32", (a // 128, b // 128)) for n, (a, b) in w.items()})


CONFIG = {"model_type": "qwen3_moe", "num_experts": E}
STACKED = {"model_type": "qwen3_5_moe_text", "num_experts": E}
FP8 = CONFIG | {"quantization_config": quantization_config("fp8_block")}


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


# ---- weights of a quantized source that lose their format


@pytest.mark.parametrize(
    ("options", "reason", "modules"),
    (
        ({"only": "experts"}, "not a routed expert", [f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"]),
        ({"include": (r"re:.*experts\..*",)}, "matched by no --include", [f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"]),
        ({"exclude": ("model.layers.0.self_attn.o_proj",)}, "excluded by model.layers.0.self_attn.o_proj", ["model.layers.0.self_attn.o_proj"]),
    ),
)
def test_MAP_weights_that_become_bf16_are_named_with_the_reason(options, reason, modules):
    plan = plan_tensors(FP8, fp8(), Options(**options))
    lost = [e for e in plan.entries if isinstance(e, Weight) and e.action == "dequantize"]
    assert [e.name for e in lost] == modules and {e.reason for e in lost} == {reason} and {e.data.dtype for e in lost} == {"BF16"}
    count = f"4 weights, {modules[0]} first, are" if len(modules) > 1 else f"{modules[0]} is"
    assert f"{count} fp8_block in the source and bf16 in the result: {reason}" in plan.warnings
    assert not any("bf16 in the result" in w for w in plan_tensors(FP8, fp8(), Options()).warnings)


# ---- stacks of experts


def test_MAP_stacks_are_taken_apart_expert_by_expert():
    tensors = stacks()
    plan = plan_tensors(STACKED, tensors, Options())
    apart = plan_tensors(CONFIG, one_by_one(), Options())
    assert quantized(plan) == quantized(apart)
    pieces = [e for e in plan.entries if isinstance(e, Weight) and e.expert]
    assert [p.part for p in pieces[:3]] == [Part(0, False, 0, 1, INTER), Part(0, False, INTER, 1, INTER), Part(1, False, 0, 1, INTER)]
    assert {(p.name, p.data, p.data_scale) for p in pieces} == {
        (w.name, w.data, w.data_scale) for w in apart.entries if isinstance(w, Weight) and w.expert
    }
    check_accounting(plan, tensors)


def test_gpt_oss_stacks_are_transposed_and_interleaved_and_have_biases():
    h, inter = 64, 96
    p = "model.layers.0.mlp."
    tensors = sources(
        **{
            p + "router.weight": bf16(E, h),
            p + "router.bias": bf16(E),
            p + "experts.gate_up_proj": bf16(E, h, 2 * inter),
            p + "experts.gate_up_proj_bias": bf16(E, 2 * inter),
            p + "experts.down_proj": bf16(E, inter, h),
            p + "experts.down_proj_bias": bf16(E, h),
            "model.layers.0.self_attn.q_proj.weight": bf16(64, h),
            "model.layers.0.self_attn.sinks": bf16(8),
        }
    )
    plan = plan_tensors({"model_type": "gpt_oss", "num_local_experts": E}, tensors, Options())
    assert len(quantized(plan)) == 3 * E and all(".experts." in n for n in quantized(plan))
    by_name = {e.data.name: e for e in plan.entries}
    up = by_name[p + "experts.2.up_proj.weight"]
    assert up.part == Part(2, True, 1, 2, inter) and up.data.shape == (inter, h) and up.data_scale.shape == (inter, h // 32)
    assert by_name[p + "experts.2.down_proj.weight"].part == Part(2, True)
    assert by_name[p + "experts.2.up_proj.bias"].part == Part(2, False, 1, 2, inter)
    assert by_name[p + "experts.3.down_proj.bias"].data.shape == (h,)
    assert plan.kept_modules == ("model.layers.0.mlp.router", "model.layers.0.self_attn.q_proj")
    assert "load_quantized" in plan.warnings[-1]
    check_accounting(plan, tensors)


def test_kept_stacks_stay_stacks():
    tensors = stacks() | sources(**{"model.layers.0.self_attn.q_proj.weight": bf16(H, H)})
    plan = plan_tensors({"model_type": "qwen3_5_moe"}, tensors, Options(exclude=(r"re:.*experts\..*",)))
    assert set(kept(plan)) >= {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"}
    assert "model.layers.0.mlp.experts" in plan.kept_modules


@pytest.mark.parametrize(
    ("tensors", "config", "text"),
    [
        ({"experts.gate_up_proj": bf16(E, 256, 64)}, {}, "has no model.layers.0.mlp.experts.down_proj of three dimensions"),
        ({"experts.gate_up_proj": bf16(E, 256, 64), "experts.down_proj": bf16(E, 128, 64)}, {}, "does not belong to .*gate_up_proj"),
        ({"experts.gate_up_proj": bf16(E, 64, 256), "experts.down_proj": bf16(E, 128, 64)}, {}, "as stacks of qwen3_5_moe"),
        ({"experts.gate_up_proj": bf16(3, 256, 64), "experts.down_proj": bf16(3, 64, 128)}, {}, "3 experts, but config.json says num_experts = 4"),
        (
            {"experts.gate_up_proj": bf16(E, 256, 64), "experts.down_proj": bf16(E, 64, 128), "experts.down_proj_bias": bf16(E, 32)}, {},
            r"must have shape \[4, 64\], got \[4, 32\]",
        ),
    ],
)  # fmt: skip
def test_stacks_that_do_not_fit(tensors, config, text):
    named = sources(**{f"model.layers.0.mlp.{k}": v for k, v in tensors.items()})
    with pytest.raises(ConvertError, match=text):
        plan_tensors({"model_type": "qwen3_5_moe", "num_experts": E} | config, named, Options())


def test_stacks_of_an_unknown_family_are_refused():
    with pytest.raises(ConvertError, match="is a stack of experts, whose layout is unknown for model_type 'new_moe'"):
        plan_tensors({"model_type": "new_moe"}, stacks(), Options(include=(r"re:.*experts\..*",)))


# ---- quantized sources


def test_PAIR_scale_in_another_file_and_ragged_blocks():
    tensors = fp8() | sources(
        **{
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("F8_E4M3", (576, 7168), "a.safetensors"),
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv": ("F32", (5, 56), "b.safetensors"),
        }
    )
    plan = plan_tensors(FP8, tensors, Options())
    found = next(e for e in plan.entries if isinstance(e, Weight) and e.name.endswith("with_mqa"))
    assert (found.action, found.fmt, found.weight.file, found.scale.file) == ("reencode", "fp8_block", "a.safetensors", "b.safetensors")
    assert found.data.shape == (576, 7168) and found.data_scale.shape == (576, 224)
    check_accounting(plan, tensors)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"x.weight": ("F8_E4M3", (576, 7168))}, "model.safetensors: 'x.weight' is float8_e4m3fn but its scale 'x.weight_scale_inv' is missing"),
        ({"x.weight": ("F8_E4M3", (576, 7168)), "x.weight_scale_inv": ("F32", (4, 56))}, r"'x.weight_scale_inv' must have shape \(5, 56\)"),
        ({"x.weight": ("F8_E4M3", (576, 7168)), "x.weight_scale_inv": ("I32", (5, 56))}, "'x.weight_scale_inv' must be float32"),
        ({"x.weight_scale_inv": ("F32", (5, 56))}, "'x.weight_scale_inv' is an orphan scale: there is no 'x.weight'"),
        ({"x.weight": bf16(576, 7168), "x.weight_scale_inv": ("F32", (5, 56))}, "'x.weight_scale_inv' is an orphan scale"),
        (
            {"x.weight": ("F8_E4M3", (64, 64)), "x.weight_scale_inv": ("F32", (1, 1)), "x.scale": ("F32", (1, 1))},
            "has 2 scales",
        ),
        ({"x.weight": ("F8_E5M2", (64, 64)), "x.weight_scale_inv": ("F32", (1, 1))}, "must be float8_e4m3fn or a floating dtype"),
        ({"x.weight": ("I8", (64, 32)), "x.weight_scale_inv": ("F32", (1, 1))}, "FP4 packed in int8 is not supported"),
        ({"x.table": ("F8_E4M3", (64, 64))}, r"is F8_E4M3 of shape \[64, 64\], but neither a weight"),
        ({f"{P}down_proj_scale_inv": ("F32", (2, 1, 1))}, f"is an orphan scale: there is no '{P}down_proj'"),
    ],
)  # fmt: skip
def test_PAIR_what_does_not_belong_together(tensors, text):
    with pytest.raises(ConvertError, match=text):
        plan_tensors(FP8, fp8() | sources(**tensors), Options())


def test_fp8_elements_without_a_declared_format():
    with pytest.raises(ConvertError, match="no quantization_config: its format is unknown"):
        plan_tensors(CONFIG, fp8(), Options())


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4' is not supported"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme 'static' is not supported"),
    ],
)
def test_PAIR_unknown_quantization_is_an_error(section, text):
    with pytest.raises(ConvertError, match=text):
        plan_tensors(CONFIG | {"quantization_config": section}, one_by_one(), Options())


def test_what_a_quantized_source_left_alone_stays_alone():
    tensors = fp8() | sources(**{"model.layers.0.mlp.shared.weight": bf16(H, H)})
    plan = plan_tensors(FP8, tensors, Options())
    assert kept(plan)["model.layers.0.mlp.shared.weight"] == "left unquantized by the source"
    again = plan_tensors(FP8, tensors, Options(include=("re:.*mlp.shared",)))
    assert "model.layers.0.mlp.shared" in quantized(again)


def test_quantized_weights_that_are_kept_become_bf16():
    """One quantization_config declares one format: FP8 blocks cannot stay beside mxfp8."""
    tensors = fp8()
    plan = plan_tensors(FP8, tensors, Options(only="experts"))
    attention = [e for e in plan.entries if isinstance(e, Weight) and not e.expert]
    assert {e.action for e in attention} == {"dequantize"} and len(attention) == 4
    assert all(e.data.dtype == "BF16" and e.data_scale is None for e in attention)
    assert "model.layers.0.self_attn.q_proj" in plan.kept_modules
    check_accounting(plan, tensors)


def test_quantized_stacks_share_out_their_scales():
    tensors = stacks()
    tensors |= sources(**{P + "gate_up_proj": ("F8_E4M3", (E, 2 * INTER, H)), P + "gate_up_proj_scale_inv": ("F32", (E, 2, 2))})
    tensors |= sources(**{P + "down_proj": ("F8_E4M3", (E, H, INTER)), P + "down_proj_scale_inv": ("F32", (E, 2, 1))})
    config = {"model_type": "qwen3_5_moe", "quantization_config": quantization_config("fp8_block")}
    plan = plan_tensors(config, tensors, Options())
    by_name = {e.name: e for e in plan.entries if isinstance(e, Weight)}
    up = by_name[P + "1.up_proj"]
    assert (up.part, up.scale_part) == (Part(1, False, INTER, 1, INTER), Part(1, False, 1, 1, 1))
    assert by_name[P + "1.down_proj"].scale_part == Part(1)
    mx = quantization_config("mxfp8")
    tensors |= sources(**{P + "gate_up_proj_scale_inv": ("U8", (E, 2 * INTER, H // 32)), P + "down_proj_scale_inv": ("U8", (E, H, INTER // 32))})
    up = next(e for e in plan_tensors(config | {"quantization_config": mx}, tensors, Options()).entries if e.data.name == P + "1.up_proj.weight")
    assert up.scale_part == Part(1, False, INTER, 1, INTER)
    assert not [e for e in plan.entries if isinstance(e, Keep) and "scale" in e.data.name]


def test_a_fused_scale_that_mixes_gate_and_up_is_refused():
    tensors = sources(
        **{
            P + "gate_up_proj": ("F8_E4M3", (E, 640, H)),
            P + "gate_up_proj_scale_inv": ("F32", (E, 5, 2)),
            P + "down_proj": ("F8_E4M3", (E, H, 320)),
            P + "down_proj_scale_inv": ("F32", (E, 2, 3)),
        }
    )
    with pytest.raises(ConvertError, match="one scale covers gate and up rows together"):
        plan_tensors({"model_type": "qwen3_5_moe", "quantization_config": quantization_config("fp8_block")}, tensors, Options())
