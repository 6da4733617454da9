"""`verify` finds every damage that a loader would load without a word; `inspect` describes what is there."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_ops.convert import ConvertError, convert, inspect, pieces, verify
from moe_ops.convert.source import MANIFEST, STATE

INDEX, FIRST = "model.safetensors.index.json", "model-00001-of-00003.safetensors"
EXPERT = "model.layers.0.mlp.experts.0.gate_proj"


@pytest.fixture(scope="module", params=("mxfp8", "fp8_block"))
def made(request, pristine, tmp_path_factory):
    """A result, made once."""
    out = tmp_path_factory.mktemp("made") / request.param
    convert(pristine, out, format=request.param)
    return out


@pytest.fixture
def result(made, tmp_path):
    return shutil.copytree(made, tmp_path / "out")


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rewrite(folder, change, file=FIRST):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def problems(folder, **options):
    found = verify(folder, **options)
    assert found.ok == (not found.problems)
    return "\n".join(found.problems)


def test_a_good_result(result, pristine):
    found = verify(result, against=pristine)
    assert found.ok and found.quantized == 26 and found.hashed == found.compared == 59
    assert 30 < found.error.sqnr_db < 33
    text = found.text()
    assert "ok, " in text and "59 tensors are what moe_ops_convert.json says, byte for byte" in text and "what the source gives" in text
    assert json.loads(json.dumps(found.as_json()))["ok"]


def test_tensors_that_are_cut(pristine, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 24 << 10)
    convert(pristine, tmp_path / "out")
    found = verify(tmp_path / "out", against=pristine)
    assert found.ok and found.hashed == found.compared == 59


def flip_a_byte(folder, at=-3):
    with open(folder / FIRST, "r+b") as f:
        f.seek(at, os.SEEK_END)
        byte = f.read(1)
        f.seek(at, os.SEEK_END)
        f.write(bytes([byte[0] ^ 1]))


def test_a_flipped_bit_is_found(result):
    flip_a_byte(result)
    assert "is damaged: its bytes are not those that were written" in problems(result)


def drop_manifest(folder):
    (folder / "moe_ops_convert.json").unlink()


def nan_element(folder):
    rewrite(folder, lambda t: t[f"{EXPERT}.weight"].view(torch.uint8)[3].fill_(0xFF))


def nan_scale(folder):
    def change(tensors):
        scale = tensors[f"{EXPERT}.weight_scale_inv"]
        scale[0, 0] = 255 if scale.dtype == torch.uint8 else float("nan")

    rewrite(folder, change)


def missing_scale(folder):
    rewrite(folder, lambda t: t.pop(f"{EXPERT}.weight_scale_inv"))
    edit(folder / INDEX, lambda c: c["weight_map"].pop(f"{EXPERT}.weight_scale_inv"))


def scale_of_another_shape(folder):
    def change(tensors):
        name = f"{EXPERT}.weight_scale_inv"
        tensors[name] = tensors[name][:-1].contiguous()

    rewrite(folder, change)


def scale_of_another_name(folder):
    """Transformers only reports the keys and leaves raw elements in the model."""
    rewrite(folder, lambda t: t.update({f"{EXPERT}.weight_scale": t.pop(f"{EXPERT}.weight_scale_inv")}))
    edit(folder / INDEX, lambda c: c["weight_map"].update({f"{EXPERT}.weight_scale": c["weight_map"].pop(f"{EXPERT}.weight_scale_inv")}))


@pytest.mark.parametrize("own", (True, False), ids=("with manifest", "without"))
@pytest.mark.parametrize("damage", (nan_element, nan_scale, missing_scale, scale_of_another_shape, scale_of_another_name), ids=lambda f: f.__name__)
def test_damaged_pairs(damage, own, result):
    if not own:
        drop_manifest(result)
    damage(result)
    text = problems(result)
    assert EXPERT in text
    assert {"nan_element": "NaN", "nan_scale": "NaN", "missing_scale": "missing", "scale_of_another_shape": "shape"}.get(
        damage.__name__, "scale"
    ) in text


@pytest.mark.parametrize(
    ("damage", "text"),
    (
        (lambda f: (f / INDEX).unlink(), f"no {INDEX}"),
        (lambda f: edit(f / INDEX, lambda c: c["metadata"].update(total_size=1)), "total_size 1"),
        (lambda f: edit(f / INDEX, lambda c: c["weight_map"].popitem()), "is not in"),
        (lambda f: edit(f / "config.json", lambda c: c["quantization_config"].pop("weight_block_size")), "weight_block_size"),
        (lambda f: edit(f / "config.json", lambda c: c.pop("quantization_config")), "no quantization_config"),
        (
            lambda f: edit(
                f / "config.json", lambda c: c["quantization_config"].update(modules_to_not_convert=["model.norm"], ignored_layers=["model.norm"])
            ),
            "4 modules are not quantized and not named in quantization_config",
        ),
        (
            lambda f: edit(f / "config.json", lambda c: c["quantization_config"]["ignored_layers"].append(EXPERT)),
            "1 modules are quantized, but quantization_config says they are not",
        ),
        (lambda f: (f / FIRST).unlink(), "is missing"),
        (lambda f: os.truncate(f / FIRST, 5000), "truncated"),
        (lambda f: (f / STATE).mkdir(), "not finished"),
        (lambda f: rewrite(f, lambda t: t.update(extra=torch.zeros(2))), "extra"),
    ),
)
def test_damaged_folder(damage, text, result):
    damage(result)
    assert text in problems(result)


def test_another_source_is_told_from_the_right_one(result, source, single):
    def change(tensors):
        tensors["model.layers.0.mlp.experts.2.up_proj.weight"][7, 7] += 1.0

    rewrite(source, change)
    text = problems(result, against=source)
    assert "model.layers.0.mlp.experts.2.up_proj.weight" in text and "are not what the source gives" in text
    assert problems(result, against=single) == ""  # the same tensors in one file


def swap_experts(tensors):
    a, b = f"{EXPERT}.weight", f"{EXPERT.replace('.0.gate', '.1.gate')}.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def double_a_scale(tensors):
    scale = tensors[f"{EXPERT}.weight_scale_inv"]
    scale[0] = scale[0] + 1 if scale.dtype == torch.uint8 else scale[0] * 2


def change_the_router(tensors):
    tensors["model.layers.0.mlp.gate.weight"] *= 1.01


def lose_the_router(tensors):
    del tensors["model.layers.0.mlp.gate.weight"]


@pytest.mark.parametrize(
    ("change", "text"),
    (
        (None, ""),
        (swap_experts, f"{EXPERT}.weight' differs"),
        (double_a_scale, f"'{EXPERT}.weight' differs"),
        (change_the_router, "gate.weight' differs"),
        (lose_the_router, "gate.weight' of the source is missing"),
    ),
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_results_of_other_tools_are_compared_by_value(change, text, result, pristine):
    drop_manifest(result)
    if change is not None:
        rewrite(result, change)
        if change is lose_the_router:
            edit(result / INDEX, lambda c: c["weight_map"].pop("model.layers.0.mlp.gate.weight"))
    total = sum(t.nbytes for f in result.glob("*.safetensors") for t in load_file(f).values())
    edit(result / INDEX, lambda c: c["metadata"].update(total_size=total))
    found = verify(result, against=pristine)
    if not text:
        assert found.ok and found.close == 59 - 26 and found.error.sqnr_db > 30 and "by value" in found.notes[-1] and "up to rounding" in found.text()
    else:
        assert text in "\n".join(found.problems)


def test_WHOLE_what_was_compared_with_nothing_is_said(result, pristine):
    """Without hashes a flipped bit of an element is just another element: `verify` must not look as if it had seen to that."""
    own = verify(result)
    assert any(MANIFEST in text and "SHA-256 of every tensor" in text for text in own.checked)
    assert len(own.not_checked) == 1 and "--against" in own.not_checked[0] and f"not checked: {own.not_checked[0]}" in own.text()
    full = verify(result, against=pristine)
    assert not full.not_checked and "every byte of every tensor against the source, converted again" in full.checked

    drop_manifest(result)
    flip_a_byte(result)
    found = verify(result)
    assert found.ok and found.hashed == found.compared == found.close == 0
    assert not any("SHA" in text or "source" in text for text in found.checked)
    text = f"whether any byte is the one that was written: there is no {MANIFEST}"
    assert len(found.not_checked) == 2 and found.not_checked[0].startswith(text) and f"not checked: {text}" in found.text()
    assert json.loads(json.dumps(found.as_json()))["not_checked"] == found.not_checked
    values = verify(result, against=pristine)
    assert any("up to rounding" in t for t in values.checked) and values.not_checked[0].startswith(text)


def test_a_folder_that_cannot_be_read_was_not_checked(result):
    (result / FIRST).unlink()
    found = verify(result)
    assert not found.ok and not found.checked and "anything else" in found.not_checked[0]


@pytest.mark.parametrize("layout", ("hf", "compressed-tensors", "modelopt"))
def test_matrices_of_other_dtypes_are_copied_and_verified(layout, source, tmp_path):
    odd = {
        "model.layers.0.hash.weight": torch.arange(48).view(6, 8),
        "model.layers.0.mask.weight": torch.eye(8, dtype=torch.bool),
        "model.e5.weight": torch.arange(256, dtype=torch.uint8).view(8, 32).view(torch.float8_e5m2),
    }
    rewrite(source, lambda t: t.update(odd))
    edit(source / INDEX, lambda c: c["weight_map"].update(dict.fromkeys(odd, FIRST)))
    with pytest.raises(ConvertError, match=r"must be float8_e4m3fn or a floating dtype, got .*; --exclude \S+ copies it as it is"):
        convert(source, tmp_path / "odd", layout=layout)
    convert(source, tmp_path / "odd", layout=layout, exclude=[n.removesuffix(".weight") for n in odd])
    there = load_file(tmp_path / "odd" / FIRST)
    assert all(torch.equal(there[n].view(torch.uint8), t.view(torch.uint8)) and there[n].dtype == t.dtype for n, t in odd.items())
    found = verify(tmp_path / "odd", against=source)
    assert found.ok and found.compared == 62
    assert inspect(tmp_path / "odd")["problem"] is None


def test_results_of_quantized_and_stacked_sources_are_compared_by_value(result, tmp_path):
    out = tmp_path / "again"
    convert(result, out, format="mxfp8", layout="compressed-tensors")
    drop_manifest(out)
    assert verify(out, against=result).close == 59 - 26


def test_modelopt_needs_both_keys(pristine, tmp_path):
    out = tmp_path / "out"
    convert(pristine, out, layout="modelopt")
    assert verify(out, against=pristine).ok
    edit(out / "hf_quant_config.json", lambda c: c["quantization"].pop("kv_cache_quant_algo"))
    assert "kv_cache_quant_algo" in problems(out)


def test_source_that_is_not_quantized(pristine, tmp_path):
    assert "no tensor is quantized" in problems(pristine)
    with pytest.raises(ConvertError, match="no folder"):
        verify(tmp_path / "none")


def test_inspect(result, pristine):
    found = inspect(result)
    assert found["problem"] is None and found["family"] == "qwen_moe" and found["made_by"]["source_name"] == "model"
    assert found["kinds"]["model.layers.*.mlp.experts.*.gate_proj.weight"] == {
        "count": 6,
        "dtypes": ["F8_E4M3"],
        "shapes": [[384, 256]],
        "bytes": 6 * 384 * 256,
    }
    plain = inspect(pristine)
    assert (plain["dialect"], plain["made_by"]) == ("bf16", None) and plain["parameters"] == found["parameters"]
    missing_scale(result)
    assert EXPERT in inspect(result)["problem"]


@pytest.mark.parametrize("layout", ("hf", "modelopt"))
def test_WHOLE_a_flipped_byte_is_found_in_every_file(layout, pristine, tmp_path):
    convert(pristine, tmp_path / "out", layout=layout)
    for path in (p for p in sorted((tmp_path / "out").rglob("*")) if p.is_file()):
        raw = path.read_bytes()
        for at in (0, len(raw) // 3, len(raw) // 2, len(raw) - 2):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
            found = verify(tmp_path / "out")
            if path.name == "README.md":  # people add to a card
                assert found.ok and "README.md" in found.notes[0]
            elif path.name != "moe_ops_convert.json" or json.loads(raw) != loaded(path):
                assert not found.ok, (path.name, at)
        path.write_bytes(raw)
    assert verify(tmp_path / "out").ok


def loaded(path):
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None
