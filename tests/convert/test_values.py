"""Bytes of results, end to end through files: scales and elements at the edges of the formats, stacks against single experts, bits that must stay."""

import json

import pytest
import torch
from safetensors.torch import save_file

from moe_ops import dequantize, quantize_weight
from moe_ops.convert import ConvertError, compute, convert, pieces
from moe_ops.hf.checkpoint import CheckpointFolder
from moe_ops.layer.dialects import quantization_config

E4M3 = torch.float8_e4m3fn
PLAIN = {"model_type": "plain"}
ALL = {"include": ("re:w.*",)}


def write(folder, tensors, config=PLAIN, quantization=None):
    folder.mkdir()
    config = config | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def converted(tmp_path, tensors, config=PLAIN, quantization=None, name="out", **options):
    source = tmp_path / f"source-{name}"
    report = convert(write(source, tensors, config, quantization), tmp_path / name, progress=False, **options)
    return CheckpointFolder(tmp_path / name), report


def raw(t):
    return t.contiguous().view(torch.uint8)


# ---- scales


def test_SCALE_zero_blocks_and_a_block_with_one_value(tmp_path):
    w = torch.zeros(256, 256, dtype=torch.bfloat16)
    w[0, 0] = 1.0
    w[1, 0] = -0.0
    for fmt in ("mxfp8", "fp8_block"):
        out, report = converted(tmp_path, {"w.weight": w}, name=fmt, format=fmt, **ALL)
        data, scale = out["w.weight"], out["w.weight_scale_inv"]
        assert int((raw(data) & 0x7F == 0x7F).sum()) == 0
        assert torch.equal(raw(data).flatten().nonzero().flatten()[:1], torch.tensor([0]))
        if fmt == "mxfp8":
            assert scale[0, 0] == 119 and int((scale != 0).sum()) == 1  # 2^-8: 1 / 2^-8 = 256
            assert float(data[0, 0]) * 2.0**-8 == 1.0
        else:
            assert bool((scale > 0).all()) and bool(scale.isfinite().all())
            assert abs(float(data[0, 0]) * float(scale[0, 0]) - 1.0) < 1e-6
        assert report.errors()["w.weight"].cosine > 0.999999


def test_SCALE_fp16_input_has_fp32_scales(tmp_path):
    w = torch.zeros(128, 128, dtype=torch.float16)
    w[0, 2:4] = 0.1
    w[1, 0] = 6e-8  # subnormal in fp16
    out, _ = converted(tmp_path, {"w.weight": w}, format="fp8_block", **ALL)
    assert out["w.weight_scale_inv"].dtype == torch.float32 and not bool(out["w.weight"].float().isnan().any())
    assert torch.equal(raw(out["w.weight"]), raw(quantize_weight(w, "fp8_block").data))


@pytest.mark.parametrize(
    ("amax", "rceil", "floor"),
    [(448.0, 127, 127), (449.0, 128, 127), (480.0, 128, 127), (500.0, 128, 127), (896.0, 128, 128), (1.9999999, 120, 119), (0.3, 117, 117)],
)
def test_E8M0_each_rule_gives_its_byte(amax, rceil, floor, tmp_path):
    w = torch.zeros(1, 32)
    w[0, 3] = amax
    for rule, byte in (("rceil", rceil), ("floor", floor)):
        out, report = converted(tmp_path, {"w.weight": w}, name=rule, rounding=rule, **ALL)
        assert int(out["w.weight_scale_inv"][0, 0]) == byte
        found = json.loads((tmp_path / rule / "moe_ops_convert.json").read_text())
        assert found["options"]["rounding"] == rule
    if amax == 500.0:
        assert float(CheckpointFolder(tmp_path / "rceil")["w.weight"][0, 3].float()) * 2 == 512.0
        assert float(CheckpointFolder(tmp_path / "floor")["w.weight"][0, 3].float()) == 448.0


def test_E8M0_exponents_are_exact_over_the_whole_range(tmp_path):
    """amax = 448 * 2^k needs byte k + 127, and the next number above it one more; bytes end at 0."""
    k = torch.arange(-126, 119)
    exact = torch.full((len(k),), 448.0).ldexp(k)
    w = torch.zeros(2 * len(k), 32)
    w[: len(k), 0], w[len(k) :, 0] = exact, torch.nextafter(exact, torch.tensor(torch.inf))
    out, _ = converted(tmp_path, {"w.weight": w}, **ALL)
    byte = out["w.weight_scale_inv"].flatten().int()
    assert torch.equal(byte[: len(k)], (k + 127).int()) and torch.equal(byte[len(k) :], (k + 128).int())


def test_E8M0_every_byte_of_a_source_keeps_its_meaning(tmp_path):
    """mxfp8 bytes 0 .. 254 and FP8-block scales of 2^-127 .. 2^127 come out as the bytes that went in."""
    byte = torch.arange(255, dtype=torch.uint8)
    data = torch.full((255, 32), 1.0).to(E4M3)
    for kind in (byte[:, None], byte[:, None].view(torch.float8_e8m0fnu)):
        name = f"mx-{kind.dtype}"
        out, report = converted(
            tmp_path, {"w.weight": data, "w.weight_scale_inv": kind}, name=name, quantization=quantization_config("mxfp8"), layout="modelopt", **ALL
        )
        assert torch.equal(out["w.weight_scale"], byte[:, None]) and report.exact() == 1
    blocks = torch.full((255 * 128, 32), 1.0).to(E4M3)
    out, report = converted(
        tmp_path, {"w.weight": blocks, "w.weight_scale_inv": byte[:, None].view(torch.float8_e8m0fnu)},
        name="blocks", quantization=quantization_config("fp8_block_ue8m0"), **ALL,
    )  # fmt: skip
    assert report.exact() == 1 and torch.equal(out["w.weight_scale_inv"][::128, 0], byte)


@pytest.mark.parametrize("dialect", ["mxfp8", "mxfp8_compressed_tensors", "mxfp8_modelopt", "fp8_block_ue8m0"])
def test_E8M0_byte_255_is_refused(dialect, tmp_path):
    rows = 1 if dialect == "fp8_block_ue8m0" else 4
    scale = torch.full((rows, 1), 127, dtype=torch.uint8)
    scale[-1, 0] = 255
    name = "w.weight_scale_inv" if dialect in ("mxfp8", "fp8_block_ue8m0") else "w.weight_scale"
    with pytest.raises(ConvertError, match=rf"{name}.*model.safetensors.*255|model.safetensors.*{name}.*255"):
        converted(tmp_path, {"w.weight": torch.ones(4, 32).to(E4M3), name: scale}, quantization=quantization_config(dialect), **ALL)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_E8M0_promised_powers_of_two_that_are_none_are_refused(tmp_path):
    tensors = {"w.weight": torch.ones(128, 128).to(E4M3), "w.weight_scale_inv": torch.tensor([[1.5]])}
    with pytest.raises(ConvertError, match="w.weight_scale_inv.*must hold powers of two"):
        converted(tmp_path, tensors, quantization=quantization_config("fp8_block_ue8m0"), **ALL)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.inf, torch.nan])
def test_SCALE_damaged_scales_are_refused(scale, tmp_path):
    tensors = {"w.weight": torch.ones(128, 128).to(E4M3), "w.weight_scale_inv": torch.tensor([[scale]])}
    with pytest.raises(ConvertError, match="w.weight_scale_inv.*NaN, infinite, zero or negative"):
        converted(tmp_path, tensors, quantization=quantization_config("fp8_block"), **ALL)


# ---- bits that must stay


def test_PAIR_all_element_bytes_survive(tmp_path):
    """e4m3 bytes 0x00 .. 0xff but the NaNs, and scale bytes next to 127: copied, never converted as numbers."""
    every = torch.arange(256, dtype=torch.uint8)
    data = torch.where((every & 0x7F) == 0x7F, 0, every).view(8, 32)
    scale = torch.tensor([120, 125, 127, 130, 140, 1, 254, 0], dtype=torch.uint8)[:, None]
    tensors = {"w.weight": data.view(E4M3), "w.weight_scale_inv": scale, "bytes": every, "odd": torch.tensor([1.0, torch.nan], dtype=torch.float16)}
    for layout, key in (("hf", "w.weight_scale_inv"), ("modelopt", "w.weight_scale")):
        out, _ = converted(tmp_path, tensors, quantization=quantization_config("mxfp8"), name=layout, layout=layout, **ALL)
        assert torch.equal(raw(out["w.weight"]), data) and torch.equal(out[key], scale)
        assert torch.equal(out["bytes"], every) and torch.equal(raw(out["odd"]), raw(tensors["odd"]))


@pytest.mark.parametrize("where", ["first", "last"])
def test_WHOLE_nan_in_a_quantized_source_names_the_tensor(where, tmp_path):
    data = torch.zeros(128, 128, dtype=torch.uint8)
    data[(0, 0) if where == "first" else (-1, -1)] = 0xFF
    tensors = {"w.weight": data.view(E4M3), "w.weight_scale_inv": torch.tensor([[1.0]])}
    with pytest.raises(ConvertError, match="'w.weight' of .*model.safetensors holds NaN"):
        converted(tmp_path, tensors, quantization=quantization_config("fp8_block"), **ALL)
    assert not (tmp_path / "out" / "model.safetensors").exists()


# ---- stacks and single experts


E, H, INTER = 3, 64, 96


def experts():
    g = torch.Generator().manual_seed(4)
    gate, up, down = torch.randn(E, INTER, H, generator=g), torch.randn(E, INTER, H, generator=g), torch.randn(E, H, INTER, generator=g)
    gate[1] *= 100  # blocks and scales never cross experts
    return gate.bfloat16(), up.bfloat16(), down.bfloat16()


def one_by_one(prefix, leaves=("gate_proj", "up_proj", "down_proj")):
    return {f"{prefix}{e}.{leaf}.weight": t[e] for leaf, t in zip(leaves, experts(), strict=True) for e in range(E)}


P = "model.layers.0.mlp.experts."
OTHERS = {
    "model.norm.weight": torch.ones(H).bfloat16(),
    "model.layers.0.mlp.gate.weight": torch.ones(E, H).bfloat16(),
    "model.layers.0.linear_attn.conv1d.weight": torch.ones(8, 1, 4).bfloat16(),
    "model.scalar": torch.tensor(3.0),
    "model.ids": torch.arange(5),
}


@pytest.mark.parametrize("options", [{}, {"format": "fp8_block"}, {"stochastic": 7}], ids=str)
def test_MAP_stacked_experts_give_the_bytes_of_single_ones(options, tmp_path):
    gate, up, down = experts()
    stacks = {P + "gate_up_proj": torch.cat((gate, up), 1), P + "down_proj": down}
    single, _ = converted(tmp_path, one_by_one(P) | OTHERS, {"model_type": "qwen3_5_moe_text"}, name="single", **options)
    stacked, report = converted(tmp_path, stacks | OTHERS, {"model_type": "qwen3_5_moe_text"}, name="stacked", **options)
    mixed = torch.stack((gate, up), 2).reshape(E, 2 * INTER, H)
    interleaved, _ = converted(
        tmp_path, {P + "gate_up_proj": mixed.transpose(1, 2), P + "down_proj": down.transpose(1, 2)} | OTHERS,
        {"model_type": "gpt_oss", "num_local_experts": E}, name="interleaved", **options,
    )  # fmt: skip
    assert report.counts()["quantized"] == 3 * E and report.counts()["kept"] == len(OTHERS)
    for other in (stacked, interleaved):
        assert set(other) == set(single)
        assert all(torch.equal(raw(other[n]), raw(single[n])) if single[n].dim() else other[n] == single[n] for n in single)
    q = quantize_weight(up[2], options.get("format", "mxfp8"), stochastic_seed=options.get("stochastic"), name=f"{P}2.up_proj.weight")
    assert torch.equal(raw(single[f"{P}2.up_proj.weight"]), raw(q.data)) and torch.equal(single[f"{P}2.up_proj.weight_scale_inv"], q.scale)


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8"])
def test_MAP_quantized_stacks_give_the_bytes_of_single_experts(fmt, tmp_path):
    """gate_up_proj and its scale, as Transformers saves quantized models: each expert gets its rows and its own tiles of the scale."""
    h, inter = 256, 128
    g = torch.Generator().manual_seed(5)
    w = {n: torch.randn(E, *shape, generator=g) for n, shape in (("gate", (inter, h)), ("up", (inter, h)), ("down", (h, inter)))}
    q = {n: [quantize_weight(t[e], fmt, rule="pow2" if fmt == "fp8_block" else None) for e in range(E)] for n, t in w.items()}
    data = {n: torch.stack([raw(x.data) for x in xs]) for n, xs in q.items()}
    scale = {n: torch.stack([x.scale for x in xs]) for n, xs in q.items()}
    stacks = {
        P + "gate_up_proj": torch.cat((data["gate"], data["up"]), 1).view(E4M3),
        P + "gate_up_proj_scale_inv": torch.cat((scale["gate"], scale["up"]), 1),
        P + "down_proj": data["down"].view(E4M3),
        P + "down_proj_scale_inv": scale["down"],
    }
    single = {f"{P}{e}.{n}_proj.weight": q[n][e].data for n in q for e in range(E)}
    single |= {f"{P}{e}.{n}_proj.weight_scale_inv": q[n][e].scale for n in q for e in range(E)}
    config, section = {"model_type": "qwen3_5_moe"}, quantization_config(fmt)
    a, report = converted(tmp_path, stacks, config, section, name="stacked")
    b, _ = converted(tmp_path, single, config, section, name="single")
    assert report.exact() == 3 * E and set(a) == set(b) and all(torch.equal(raw(a[n]), raw(b[n])) for n in b)
    assert torch.equal(raw(a[f"{P}2.up_proj.weight"]), raw(q["up"][2].data))
    # kept experts of a quantized source become bf16, one by one
    kept, report = converted(tmp_path, stacks | {"model.layers.0.self_attn.q_proj.weight": q["down"][0].data,
                             "model.layers.0.self_attn.q_proj.weight_scale_inv": q["down"][0].scale}, config, section, name="kept",
                             exclude=(r"re:.*\.experts\..*",))  # fmt: skip
    assert report.counts()["dequantized"] == 3 * E
    assert torch.equal(kept[f"{P}1.up_proj.weight"], dequantize(q["up"][1], torch.bfloat16))


def test_a_scale_that_a_writer_squeezed_has_its_shape_again(tmp_path):
    """K = 32: Transformers saves scales of shape [N], not [N, 1]."""
    q = quantize_weight(torch.randn(64, 32, generator=torch.Generator().manual_seed(6)), "mxfp8")
    tensors = {"w.weight": q.data, "w.weight_scale_inv": q.scale.squeeze(-1)}
    out, report = converted(tmp_path, tensors, quantization=quantization_config("mxfp8"), **ALL)
    assert out["w.weight_scale_inv"].shape == (64, 1) and report.exact() == 1


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8"])
def test_PAIR_scales_of_a_weight_that_is_cut_are_looked_at_once(fmt, tmp_path, monkeypatch):
    """Two weights of 8 pieces each, one whose bytes stay and one that is rounded again: as whole, and no scale is read for every piece."""
    g = torch.Generator().manual_seed(8)
    pow2 = quantize_weight(torch.randn(1024, 256, generator=g), "fp8_block", rule="pow2")
    byte = (pow2.scale.view(torch.int32) >> 23).to(torch.uint8).repeat_interleave(128, 0).repeat_interleave(4, 1)
    other = quantize_weight(torch.randn(1024, 256, generator=g), "mxfp8")
    if fmt == "fp8_block":
        tensors = {"w1.weight": pow2.data, "w1.weight_scale_inv": byte, "w2.weight": other.data, "w2.weight_scale_inv": other.scale}
    else:
        q = quantize_weight(torch.randn(1024, 256, generator=g), "fp8_block")
        tensors = {"w1.weight": pow2.data, "w1.weight_scale_inv": pow2.scale, "w2.weight": q.data, "w2.weight_scale_inv": q.scale}
    source = quantization_config("mxfp8" if fmt == "fp8_block" else "fp8_block")
    whole, report = converted(tmp_path, tensors, quantization=source, name="whole", format=fmt, **ALL)
    assert report.exact() == 1 and report.counts()["reencoded"] == 2
    seen, exact = [], compute.exact_scale
    monkeypatch.setattr(compute, "exact_scale", lambda *args: (seen.append(args), exact(*args))[1])
    monkeypatch.setattr(pieces, "PIECE", 128 * 256)
    cut, again = converted(tmp_path, tensors, quantization=source, name="cut", format=fmt, threads=1, **ALL)
    assert len(seen) == 2
    assert set(cut) == set(whole) and all(torch.equal(raw(cut[n]), raw(whole[n])) for n in whole)
    assert again.exact() == 1 and again.errors()["w2.weight"].cosine == pytest.approx(report.errors()["w2.weight"].cosine)


def test_biases_of_a_stack_go_to_their_experts(tmp_path):
    gate, up, down = experts()
    bias = torch.arange(E * 2 * INTER).reshape(E, 2 * INTER).float().bfloat16()
    tensors = {
        P + "gate_up_proj": torch.stack((gate, up), 2).reshape(E, 2 * INTER, H).transpose(1, 2),
        P + "gate_up_proj_bias": bias,
        P + "down_proj": down.transpose(1, 2),
        P + "down_proj_bias": bias[:, :H],
    }
    out, _ = converted(tmp_path, tensors, {"model_type": "gpt_oss"})
    assert torch.equal(out[f"{P}1.gate_proj.bias"], bias[1, 0::2]) and torch.equal(out[f"{P}1.up_proj.bias"], bias[1, 1::2])
    assert torch.equal(out[f"{P}2.down_proj.bias"], bias[2, :H])


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_WHOLE_tied_heads_stay_as_they_were(head, tmp_path):
    """The index and header are made from what is written, never copied: no empty entry, and no head that is dropped because it looks tied."""
    embed = torch.randn(8, H, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = one_by_one(P) | {"model.embed_tokens.weight": embed}
    if head != "absent":
        tensors["lm_head.weight"] = embed.clone() if head == "equal" else embed + 1
    out, report = converted(tmp_path, tensors, {"model_type": "qwen3_moe", "num_experts": E, "tie_word_embeddings": True})
    assert ("lm_head.weight" in out) == (head != "absent")
    if head != "absent":
        assert torch.equal(out["lm_head.weight"], tensors["lm_head.weight"])
    assert ("lm_head" in report.plan.kept_modules) == (head != "absent")
