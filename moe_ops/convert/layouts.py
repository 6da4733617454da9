"""How a result is written: names, dtypes and shapes of its tensors, and the config files that its readers demand.

| layout             | scale of mxfp8                  | scale of fp8_block                      | `quantization_config`                      |
|--------------------|---------------------------------|-----------------------------------------|--------------------------------------------|
| hf                 | `weight_scale_inv` U8 [N, K/32] | `weight_scale_inv` F32 [N/128, K/128]   | `quant_method` mxfp8 or fp8                |
| compressed-tensors | `weight_scale` U8 [N, K/32]     | `weight_scale` F32 [N/128, K/128]       | `config_groups`, format                    |
| modelopt           | `weight_scale` U8 [N, K/32]     | `weight_scale` F32 [N/128, 1, K/128, 1] | `quant_algo`; hf_quant_config.json as well |

N/128 and K/128 round up. Weights are F8_E4M3 [N, K], one tensor an expert. `weight_block_size` is always written: without it Transformers
reads mxfp8 as blocks of 128x128.

What the readers do with the names of the modules that were kept (read in vLLM 0.33.0, SGLang 0.5.23 and Transformers 5.17.0):

- hf: SGLang reads `ignored_layers`, Transformers and vLLM `ignored_layers` or `modules_to_not_convert`; all compare whole names, but
  Transformers also takes a name for a regular expression that only has to match the beginning, or for an ending.
- compressed-tensors: whole names, or `re:` expressions; of a layer's experts, the names of expert 0 decide.
- modelopt: vLLM compares whole names, looks for each name anywhere inside a module's name, and tries it as a wildcard.

So a kept name inside the name of a quantized module would leave that one out: `name_conflicts` finds those, and for Transformers their end
is marked (`name$`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_ops import __version__
from moe_ops.convert.types import Options, Output, TensorPlan, Weight
from moe_ops.core.formats import scale_shape
from moe_ops.layer.dialects import DIALECTS, quantization_config

#: Files of a source that describe its old quantization: not copied, whatever the layout.
STALE_FILES = ("hf_quant_config.json", "quantization_config.json", "quantize_config.json", "recipe.yaml")

#: Linear layers that servers fuse into one: all of a group are quantized, or none.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
_FUSED_NAMES = {"gate_proj": "gate_up_proj", "q_proj": "qkv_proj", "q_a_proj": "fused_qkv_a_proj_with_mqa", "in_proj_qkv": "in_proj_qkvz"}


def dialect_of(options: Options) -> str:
    """The dialect (a key of `moe_ops.layer.dialects.DIALECTS`) that a result is written in."""
    if options.layout != "hf":
        return f"{options.format}_{options.layout.replace('-', '_')}"
    return "fp8_block_ue8m0" if options.format == "fp8_block" and options.rule == "pow2" else options.format


def outputs(module: str, shape: tuple[int, int], options: Options) -> tuple[Output, Output]:
    """(weight, scale) of a module whose weight has this shape."""
    dialect = DIALECTS[dialect_of(options)]
    scale = scale_shape(shape, options.fmt.weight_block)
    if dialect.rank4:
        scale = (scale[0], 1, scale[1], 1)
    dtype = "U8" if options.format == "mxfp8" else "F32"
    return Output(f"{module}.weight", "F8_E4M3", shape), Output(f"{module}.{dialect.suffixes[0]}", dtype, scale)


def quantization_section(options: Options, kept: Sequence[str], quantized: Sequence[str] = ()) -> dict[str, Any]:
    """The `quantization_config` of config.json; `kept` names the modules left unquantized, `quantized` the others."""
    if options.layout == "compressed-tensors":
        kept = [_anchored(name) if name.rpartition(".")[2] == "experts" else name for name in kept]
    out = quantization_config(dialect_of(options), tuple(kept))
    assert out is not None
    out["weight_block_size"] = list(options.fmt.weight_block)
    if options.layout == "hf":
        conflicts = set(name_conflicts(quantized, kept))
        out["modules_to_not_convert"] = [f"{name}$" if name in conflicts else name for name in kept]
    if options.layout == "compressed-tensors":
        out |= {"quantization_status": "compressed", "kv_cache_scheme": None}
    if options.layout == "modelopt":
        out |= {"group_size": options.fmt.weight_block[1], "producer": {"name": "moe_ops", "version": __version__}}
    return out


def _anchored(experts: str) -> str:
    """All modules below a layer's experts, as compressed-tensors names them."""
    return "re:" + experts.replace(".", r"\.") + r"\..*"


def output_config(config: Mapping[str, Any], options: Options, plan: TensorPlan) -> dict[str, bytes]:
    """The config files of a result: file name -> content.

    Args:
        config: content of the source's config.json.
        options: what was asked for.
        plan: what becomes of its tensors.
    """
    kept = list(plan.kept_modules)
    section = quantization_section(options, kept, [e.name for e in plan.entries if isinstance(e, Weight) and e.data_scale is not None])
    new = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config")}
    if isinstance(new.get("text_config"), Mapping):  # readers look there too
        new["text_config"] = {k: v for k, v in new["text_config"].items() if k not in ("quantization_config", "compression_config")}
    new["quantization_config"] = section
    files = {"config.json": _json(new)}
    if options.layout == "modelopt":
        body = {
            "quant_algo": section["quant_algo"],
            "kv_cache_quant_algo": None,  # vLLM demands both keys, with or without a value
            "group_size": section["group_size"],
            "exclude_modules": kept,
        }
        files["hf_quant_config.json"] = _json({"producer": section["producer"], "quantization": body})
    return files


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def name_conflicts(quantized: Iterable[str], kept: Iterable[str]) -> list[str]:
    """Names of kept modules that stand inside the name of a quantized one (or of the fused layer that a server makes of it)."""
    names = set(quantized)
    fused = set()
    for name in names:
        stem, _, leaf = name.rpartition(".")
        if leaf in _FUSED_NAMES:
            fused.add(f"{stem}.{_FUSED_NAMES[leaf]}")
    text = "\n".join([*names, *fused])
    return [name for name in kept if name in text]


def split_groups(quantized: Iterable[str], kept: Iterable[str]) -> list[str]:
    """Layers of which servers fuse several into one, and of which only some are quantized: "model.layers.0.self_attn.{q_proj,k_proj,v_proj}"."""
    by_stem: dict[str, list[set[str]]] = {}
    for i, names in enumerate((quantized, kept)):
        for name in names:
            stem, _, leaf = name.rpartition(".")
            by_stem.setdefault(stem, [set(), set()])[i].add(leaf)
    return [f"{stem}.{{{','.join(group)}}}" for stem, (a, b) in by_stem.items() for group in FUSED if a & set(group) and b & set(group)]
