"""The stream: every byte is that of `quantize_weight`, however the work is cut and shared out, and everything beside the weights is there."""

import hashlib
import json
import math
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_ops import dequantize, quantize_weight
from moe_ops.convert import ConvertError, conversion, convert, pieces
from moe_ops.convert.quantizers import CpuQuantizer, CudaQuantizer
from moe_ops.convert.types import DTYPES
from moe_ops.core.formats import as_bytes, get_format
from moe_ops.core.numerics import uneven
from moe_ops.hf.checkpoint import CheckpointFolder

INDEX = "model.safetensors.index.json"


def small_pieces(monkeypatch):
    """Pieces of 128 rows, so that every expert is cut; kept tensors are cut every 24 KiB."""
    monkeypatch.setattr(pieces, "PIECE", 24 << 10)


def raw(t):
    return as_bytes(t).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("cut", (False, True), ids=("whole", "cut"))
@pytest.mark.parametrize(
    "options",
    ({}, {"rounding": "floor"}, {"stochastic": 7}, {"format": "fp8_block"}, {"format": "fp8_block", "rounding": "pow2", "stochastic": 7}),
    ids=("rceil", "floor", "stochastic", "block", "block-pow2-stochastic"),
)
def test_bytes_are_those_of_quantize_weight(options, cut, pristine, tmp_path, monkeypatch):
    if cut:
        small_pieces(monkeypatch)
    report = convert(pristine, tmp_path / "out", **options)
    fmt, rule, seed = options.get("format", "mxfp8"), options.get("rounding"), options.get("stochastic")
    there, here = CheckpointFolder(pristine), CheckpointFolder(tmp_path / "out")
    quantized = 0
    for name, t in there.items():
        if name not in report.errors():
            assert raw(here[name]) == raw(t)
            continue
        wanted = quantize_weight(t, fmt, rule=rule, stochastic_seed=seed, name=name)
        assert raw(here[name]) == raw(wanted.data)
        assert raw(here[f"{name}_scale_inv"]) == raw(wanted.scale)
        error = report.errors()[name]
        x, y = t.double(), dequantize(wanted).double()
        assert error.relative == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-4)
        assert error.cosine == pytest.approx(float((x * y).sum() / x.norm() / y.norm()), abs=1e-6)
        assert error.sqnr_db == pytest.approx(-20 * math.log10(error.relative), abs=1e-6)
        quantized += 1
    assert quantized == 2 * (4 + 9) == report.counts()["quantized"]
    assert len(here) == len(there) + quantized


def test_threads_and_cuts_change_nothing(pristine, tmp_path, content, monkeypatch):
    convert(pristine, tmp_path / "a", stochastic=1, threads=1)
    convert(pristine, tmp_path / "b", stochastic=1, threads=7)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    small_pieces(monkeypatch)
    convert(pristine, tmp_path / "c", stochastic=1, threads=5)
    a, c = content(tmp_path / "a"), content(tmp_path / "c")
    # hashes and the order of sums follow the cuts
    for name in ("moe_ops_convert.json", "README.md"):
        a.pop(name), c.pop(name)
    assert a == c


def test_result_is_whole(pristine, tmp_path, content):
    before = content(pristine)
    report = convert(pristine, tmp_path / "out")
    assert content(pristine) == before
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == {
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        INDEX,
        "config.json",
        "tokenizer.json",
        "assets",
        "README.md",
        "README.source.md",
        "moe_ops_convert.json",
    }
    assert (out / "README.source.md").read_bytes() == before["README.md"] and (out / "assets" / "chat.jinja").exists()
    assert report.left_out == (".cache/", "pytorch_model.bin")
    index, found, total = json.loads((out / INDEX).read_text()), {}, 0
    for file in sorted(out.glob("*.safetensors")):
        for name, t in load_file(file).items():
            found[name] = file.name
            total += t.nbytes
        header = int.from_bytes(file.read_bytes()[:8], "little")
        entries = json.loads(file.read_bytes()[8 : 8 + header])
        assert entries.pop("__metadata__") == {"format": "pt", "moe_ops_format": "mxfp8", "moe_ops_rounding": "rceil"}
        assert header % 8 == 0 and all(e["data_offsets"][0] % DTYPES[e["dtype"]].itemsize == 0 for e in entries.values())
    assert index == {"metadata": {"total_size": total}, "weight_map": found} and list(index["weight_map"]) == sorted(found)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["weight_block_size"] == [1, 32]


def test_card_and_manifest_say_what_was_done(pristine, tmp_path):
    report = convert(pristine, tmp_path / "out", stochastic=5, exclude=["re:.*o_proj"])
    text = (tmp_path / "out" / "README.md").read_text()
    front = "---\nbase_model: model\nbase_model_relation: quantized\nlicense: apache-2.0\nlanguage:\n- en\ntags:\n- mxfp8\n---\n"
    assert text.startswith(front) and "datasets" not in text
    for part in ("stochastic, seed 5", "| scales | rceil |", "`model.layers.0.self_attn.o_proj`", "`lm_head`", "excluded by re:.*o_proj"):
        assert part in text
    overall = report.overall()
    assert f"| {overall.sqnr_db:.2f} |" in text and 27 < overall.sqnr_db < 30 and overall.cosine > 0.999
    manifest = json.loads((tmp_path / "out" / "moe_ops_convert.json").read_text())
    assert manifest["options"] | {"stochastic": 5, "exclude": ["re:.*o_proj"], "format": "mxfp8"} == manifest["options"]
    assert set(manifest["errors"]) == set(report.errors())
    with safe_open(tmp_path / "out" / "model-00001-of-00003.safetensors", "pt") as f:
        name = "model.layers.0.mlp.experts.0.gate_proj.weight"
        digest = hashlib.sha256(raw(f.get_tensor(name))).hexdigest()
    assert manifest["files"]["model-00001-of-00003.safetensors"]["tensors"][name] == [digest]


def test_equal_runs_give_equal_bytes(pristine, tmp_path, content):
    convert(pristine, tmp_path / "a")
    convert(pristine, tmp_path / "b")
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_one_file_stays_one_file_without_an_index(single, tmp_path):
    convert(single, tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json", "README.md", "moe_ops_convert.json"}
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 2 * (4 + 9) * 2 + 2 * 2 + 3


def test_a_safetensors_file_alone(tmp_path):
    save_file({"block.weight": torch.randn(64, 64), "block.bias": torch.zeros(64)}, tmp_path / "some.safetensors")
    convert(tmp_path / "some.safetensors", tmp_path / "out" / "deep", include=["block"])
    assert set(load_file(tmp_path / "out" / "deep" / "some.safetensors")) == {"block.weight", "block.weight_scale_inv", "block.bias"}


def test_dry_run_writes_nothing_and_checks_everything(pristine, source, tmp_path):
    report = convert(pristine, tmp_path / "out", dry_run=True)
    assert report.dry_run and report.counts()["quantized"] == 26 and not (tmp_path / "out").exists()
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConvertError, match="missing"):
        convert(source, tmp_path / "out", dry_run=True)


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("name", ("model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"))
def test_WHOLE_nan_in_a_weight_is_an_error_and_publishes_nothing(name, value, source, tmp_path):
    file = source / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    tensors[name][5, 7] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConvertError) as error:
        convert(source, tmp_path / "out")
    assert name in str(error.value) and file.name in str(error.value) and "NaN or infinity" in str(error.value)
    assert not (tmp_path / "out" / INDEX).exists() and not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_WHOLE_nan_in_a_kept_matrix_is_an_error_and_infinity_is_kept(dtype, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    gate = torch.randn(64, 64).to(dtype)
    gate[3, 3] = -float("inf")
    save_file({"a.weight": torch.randn(64, 64).to(dtype), "gate.weight": gate}, folder / "model.safetensors")
    convert(folder, tmp_path / "out", include=["a"])
    assert raw(load_file(tmp_path / "out" / "model.safetensors")["gate.weight"]) == raw(gate)
    gate[63, 63] = float("nan")
    save_file({"a.weight": torch.randn(64, 64).to(dtype), "gate.weight": gate}, folder / "model.safetensors")
    with pytest.raises(ConvertError, match=r"'gate.weight' of .*model.safetensors holds NaN"):
        convert(folder, tmp_path / "other", include=["a"])


def test_WHOLE_source_that_shrinks_while_it_is_read(source, tmp_path, monkeypatch):
    original = conversion.plan_conversion

    def plan_then_truncate(src, options):
        found = original(src, options)
        os.truncate(source / "model-00002-of-00003.safetensors", 200000)
        return found

    monkeypatch.setattr(conversion, "plan_conversion", plan_then_truncate)
    with pytest.raises(ConvertError, match=r"model-00002-of-00003.safetensors ends within tensor 'model.layers"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out" / INDEX).exists()


def test_WHOLE_a_read_error_names_file_and_tensor(pristine, tmp_path, monkeypatch):
    real = os.preadv

    def fail(fd, buffers, at):
        if at > 100000:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ConvertError, match=r"cannot read tensor 'model\..*' of .*model-0000\d-of-00003.safetensors: Input/output error"):
        convert(pristine, tmp_path / "out")
    assert not (tmp_path / "out" / INDEX).exists()


def test_empty_tensors_and_scalars_are_kept(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {"a.weight": torch.randn(64, 64), "none": torch.empty(0, 4), "step": torch.tensor(7), "mask": torch.tensor([True, False])}
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "out", include=["a"])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(raw(found[n]) == raw(tensors[n]) and found[n].shape == tensors[n].shape for n in ("none", "step", "mask"))


@pytest.mark.parametrize(
    ("device", "text"),
    (("cuda", "not available"), ("cuda:99", "not available"), ("tpu", "must be cpu or cuda"), ("meta", "not available")),
)
def test_device_that_is_not_there(device, text, pristine, tmp_path):
    if torch.cuda.is_available() and device == "cuda":
        pytest.skip("there is a GPU here")
    with pytest.raises(ConvertError, match=text):
        convert(pristine, tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shape", ((256, 384), (7, 96)), ids=("even", "odd"))
@pytest.mark.parametrize("key", (-1, 12345678901), ids=("nearest", "stochastic"))
@pytest.mark.parametrize(("fmt", "rule"), (("mxfp8", "rceil"), ("mxfp8", "floor"), ("fp8_block", "fp32"), ("fp8_block", "pow2")))
def test_quantizers_of_both_devices_agree(fmt, rule, key, shape):
    """The GPU's, run here on the CPU."""
    w = uneven(shape, seed=3)
    ours = CpuQuantizer(get_format(fmt), rule)(w, key, 640)
    theirs = CudaQuantizer(get_format(fmt), rule, torch.device("cpu"))(w, key, 640)
    assert raw(ours[0]) == raw(theirs[0]) and raw(ours[1]) == raw(theirs[1]) and ours[0].shape == theirs[0].shape and ours[1].shape == theirs[1].shape
    for name in ("signal", "noise", "result", "count", "not_finite"):
        assert getattr(ours[2], name) == pytest.approx(getattr(theirs[2], name), rel=1e-4)
    w[3, 3] = float("nan")
    assert CudaQuantizer(get_format(fmt), rule, torch.device("cpu"))(w, key, 0)[2].not_finite


@pytest.mark.gpu
@pytest.mark.parametrize("options", ({}, {"stochastic": 7}, {"format": "fp8_block"}, {"format": "fp8_block", "stochastic": 7}), ids=str)
def test_gpu_writes_the_bytes_of_the_cpu(options, pristine, tmp_path, content, monkeypatch):
    small_pieces(monkeypatch)
    convert(pristine, tmp_path / "a", **options)
    convert(pristine, tmp_path / "b", device="cuda", **options)
    a, b = content(tmp_path / "a"), content(tmp_path / "b")
    for name in ("moe_ops_convert.json", "README.md"):  # errors are summed in another order
        a.pop(name), b.pop(name)
    assert a == b


@pytest.mark.parametrize("name", ("a: b #c", "@at", "null", "{}", "7", 'mod\u00e8le "x"', "plain-name_2.5"))
def test_front_matter_of_the_card_is_yaml_whatever_the_name(name, single, tmp_path):
    yaml = pytest.importorskip("yaml")
    convert(single.rename(tmp_path / name), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(text.split("---\n")[1])["base_model"] == name
    assert ("base_model: plain-name_2.5\n" in text) == (name == "plain-name_2.5")


@pytest.mark.parametrize("threads", (0, -1, 1.5, "2", True))
def test_threads_are_checked_before_anything_is_written(threads, single, tmp_path):
    with pytest.raises(ValueError, match="threads must be an int of at least 1 or None"):
        convert(single, tmp_path / "out", threads=threads)
    assert not (tmp_path / "out").exists()


def test_one_pattern_is_no_list_of_patterns(single, tmp_path):
    with pytest.raises(TypeError, match=r"include must be a sequence of patterns, got the string 're:\.\*'"):
        convert(single, tmp_path / "out", include="re:.*")
