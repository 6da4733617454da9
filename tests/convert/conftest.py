"""A small Qwen3-MoE checkpoint in three shards, with the other files that a model folder has."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from moe_ops.core.numerics import uneven

H, INTER, EXPERTS, LAYERS, VOCAB = 256, 384, 3, 2, 160
CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\ndatasets:\n- none\n---\n\n# A model\n"


def tensors(dtype=torch.bfloat16):
    """Shard by shard, name -> tensor; an expert's down projection lies in another shard than its gate."""
    seed = iter(range(1000))

    def w(*shape):
        return uneven(shape, seed=next(seed), dtype=dtype)

    shards = [{"model.embed_tokens.weight": w(VOCAB, H)}, {}, {"lm_head.weight": w(VOCAB, H), "model.norm.weight": w(1, H)[0]}]
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        shards[layer][f"{stem}.input_layernorm.weight"] = w(1, H)[0]
        shards[layer][f"{stem}.mlp.gate.weight"] = w(EXPERTS, H)
        for n, shape in (("q", (H, H)), ("k", (64, H)), ("v", (64, H)), ("o", (H, H))):
            shards[layer][f"{stem}.self_attn.{n}_proj.weight"] = w(*shape)
        for e in range(EXPERTS):
            for n, shape in (("gate", (INTER, H)), ("up", (INTER, H)), ("down", (H, INTER))):
                shards[layer + (n == "down")][f"{stem}.mlp.experts.{e}.{n}_proj.weight"] = w(*shape)
    return shards


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    folder.mkdir()
    shards, weight_map = tensors(), {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS, "hidden_size": H}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "README.md").write_text(CARD)
    (folder / "assets").mkdir()
    (folder / "assets" / "chat.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return folder


@pytest.fixture
def source(pristine, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(pristine, tmp_path / "model")


@pytest.fixture
def single(tmp_path):
    """The same tensors in one file, without an index."""
    folder = tmp_path / "single"
    folder.mkdir()
    save_file({k: t for shard in tensors() for k, t in shard.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": EXPERTS}))
    return folder


@pytest.fixture
def content():
    """Function: folder -> {relative path: bytes}."""

    def read(folder):
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    return read
