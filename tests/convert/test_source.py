"""WHOLE: a source that is damaged, truncated or contradicts itself is an error that names file and tensor, before anything is written."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_ops.convert import ConvertError, convert
from moe_ops.convert.source import STATE, read_source

FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.0.mlp.experts.1.gate_proj.weight"


def edit_header(path, change):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def edit_index(path, change):
    content = json.loads(path.read_text())
    change(content["weight_map"])
    path.write_text(json.dumps(content))


def truncate(source):
    os.truncate(source / SECOND, (source / SECOND).stat().st_size - 1)


def lengthen(source):
    with open(source / SECOND, "ab") as f:
        f.write(b"\0")


def no_header(source):
    (source / SECOND).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")


def empty(source):
    (source / SECOND).write_bytes(b"")


def damaged_header(source):
    raw = bytearray((source / SECOND).read_bytes())
    raw[8:12] = b"\0\0\0\0"
    (source / SECOND).write_bytes(raw)


def wrong_shape(source):
    edit_header(source / FIRST, lambda h: h[EXPERT].update(shape=[384, 255]))


def negative_shape(source):
    edit_header(source / FIRST, lambda h: h[EXPERT].update(shape=[-384, -256]))


def unknown_dtype(source):
    edit_header(source / FIRST, lambda h: h[EXPERT].update(dtype="F4"))


def overlap(source):
    edit_header(source / FIRST, lambda h: h[EXPERT].update(data_offsets=[0, 2 * 384 * 256]))


def no_offsets(source):
    edit_header(source / FIRST, lambda h: h[EXPERT].pop("data_offsets"))


def missing_shard(source):
    (source / SECOND).unlink()


def tensor_in_another_file(source):
    edit_index(source / INDEX, lambda m: m.update({EXPERT: SECOND}))


def tensor_in_no_file(source):
    edit_index(source / INDEX, lambda m: m.update({"ghost.weight": FIRST}))


def tensor_not_in_the_index(source):
    edit_index(source / INDEX, lambda m: m.pop(EXPERT))


def tensor_twice(source):
    tensors = load_file(source / SECOND)
    save_file({**tensors, EXPERT: torch.zeros(2, 2)}, source / SECOND, {"format": "pt"})


def index_without_a_map(source):
    (source / INDEX).write_text("{}")


def index_that_leaves_the_folder(source):
    edit_index(source / INDEX, lambda m: m.update({EXPERT: f"../{FIRST}"}))


def index_is_no_json(source):
    (source / INDEX).write_text("{")


def config_is_no_json(source):
    (source / "config.json").write_text("{")


def both_forms(source):
    (source / "model.safetensors").write_bytes((source / FIRST).read_bytes())


def index_lost_and_a_shard_too(source):
    (source / INDEX).unlink()
    (source / SECOND).unlink()


def unfinished_conversion(source):
    (source / STATE).mkdir()


def offsets_are_text(source):
    edit_header(source / FIRST, lambda h: h[EXPERT].update(data_offsets=[str(n) for n in h[EXPERT]["data_offsets"]]))


def shape_is_no_integer(source):
    edit_header(source / FIRST, lambda h: h[EXPERT].update(shape=[384.0, 256]))


def name_is_no_text(source):
    edit_header(source / FIRST, lambda h: h.update({"\ud800": h.pop(EXPERT)}))


def deep_header(source):
    raw = b"[" * 100_000
    (source / FIRST).write_bytes(struct.pack("<Q", len(raw)) + raw)


def deep_config(source):
    (source / "config.json").write_text("[" * 100_000)


def quantization_is_no_object(source):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": "fp8"}))


def modelopt_is_no_object(source):
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": 5}))


def file_beside_that_is_gone(source):
    (source / "merges.txt").symlink_to(source / "gone")


def file_beside_that_is_a_pipe(source):
    os.mkfifo(source / "pipe")


DAMAGE = {
    truncate: (SECOND, "truncated"),
    lengthen: (SECOND, "longer than its header says"),
    no_header: (SECOND, "no safetensors file or is truncated"),
    empty: (SECOND, "truncated"),
    damaged_header: (SECOND, "damaged header"),
    wrong_shape: (FIRST, EXPERT, "cannot lie in bytes"),
    negative_shape: (FIRST, EXPERT, "cannot lie in bytes"),
    unknown_dtype: (FIRST, EXPERT, "dtype F4"),
    overlap: (FIRST, "begins at byte"),
    no_offsets: (FIRST, "damaged header"),
    missing_shard: (SECOND, "missing"),
    tensor_in_another_file: (EXPERT, SECOND, FIRST),
    tensor_in_no_file: ("ghost.weight", "in no file"),
    tensor_not_in_the_index: (EXPERT, FIRST, "is not in"),
    tensor_twice: (EXPERT, FIRST, SECOND),
    index_without_a_map: (INDEX, "weight_map"),
    index_that_leaves_the_folder: (INDEX, "outside its folder"),
    index_is_no_json: (INDEX, "cannot read"),
    config_is_no_json: ("config.json", "cannot read"),
    index_lost_and_a_shard_too: (INDEX, "of 3 shards model-*-of-00003 only 2: no 2"),
    unfinished_conversion: ("unfinished conversion", STATE),
    offsets_are_text: (FIRST, "damaged header"),
    shape_is_no_integer: (FIRST, EXPERT, "integers"),
    name_is_no_text: (FIRST, "damaged header"),
    deep_header: (FIRST, "damaged header"),
    deep_config: ("config.json", "cannot read"),
    quantization_is_no_object: ("config.json", "'fp8'"),
    modelopt_is_no_object: ("hf_quant_config.json", "no object"),
    file_beside_that_is_gone: ("merges.txt", "cannot be copied"),
    file_beside_that_is_a_pipe: ("pipe", "cannot be copied"),
    both_forms: ("model.safetensors", INDEX),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_WHOLE_damage_is_found_before_anything_is_written(damage, source, tmp_path):
    damage(source)
    with pytest.raises(ConvertError) as error:
        convert(source, tmp_path / "out")
    for part in DAMAGE[damage]:
        assert part in str(error.value)
    assert not (tmp_path / "out").exists()


def test_WHOLE_unreadable_shard(source, tmp_path):
    (source / SECOND).unlink()
    (source / SECOND).symlink_to(tmp_path / "gone")
    with pytest.raises(ConvertError, match=SECOND):
        convert(source, tmp_path / "out")
    (source / SECOND).unlink()
    (source / SECOND).mkdir()
    with pytest.raises(ConvertError, match=SECOND):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_there(tmp_path):
    for path, text in ((tmp_path / "none", "does not exist"), (tmp_path, r"no \*\.safetensors")):
        with pytest.raises(ConvertError, match=text):
            convert(path, tmp_path / "out")


def test_hub_id_without_the_hub(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConvertError, match="huggingface_hub, which could fetch it, is not installed"):
        convert("someone/some-model", tmp_path / "out")


def test_hub_id_is_fetched_and_named_in_the_card(pristine, tmp_path, monkeypatch):
    import sys
    import types

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = lambda name: str(pristine)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    convert("someone/some-model", tmp_path / "out")
    assert "base_model: someone/some-model\n" in (tmp_path / "out" / "README.md").read_text()


def test_headers_give_what_safetensors_gives(pristine):
    found = read_source(pristine)
    for file in found.files:
        for name, t in load_file(pristine / file).items():
            s = found.tensors[name]
            raw = (pristine / file).read_bytes()[s.begin : s.end]
            assert (s.file, s.shape) == (file, tuple(t.shape)) and raw == t.contiguous().view(torch.uint8).numpy().tobytes()
    assert found.others == ("README.md", "assets/chat.jinja", "config.json", "tokenizer.json")
    assert found.left_out == (".cache/", "pytorch_model.bin")


def test_the_cache_of_the_hub(pristine, tmp_path):
    """Links to blobs, under the id of the model."""
    snapshot, blobs = tmp_path / "models--acme--tiny--moe" / "snapshots" / ("0" * 40), tmp_path / "models--acme--tiny--moe" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in (p for p in pristine.iterdir() if p.is_file()):
        (blobs / f"blob of {path.name}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/blob of {path.name}")
    report = convert(snapshot, tmp_path / "out")
    assert report.source == "acme/tiny--moe" and not any(p.is_symlink() for p in (tmp_path / "out").iterdir())
    assert "\nbase_model: acme/tiny--moe\n" in (tmp_path / "out" / "README.md").read_text()
    assert report.source == read_source(snapshot / FIRST).name


def test_what_is_not_copied_is_told(source, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    for name in ("recipe.yaml", "README.source.md"):
        (source / name).write_text("x")
    left_out = convert(source, tmp_path / "out", dry_run=True).left_out
    assert left_out == (".cache/", "README.source.md", "linked/", "pytorch_model.bin", "recipe.yaml")
