"""`inspect`: what a checkpoint holds, from its headers alone."""

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from moe_ops.convert.families import family_of
from moe_ops.convert.pairing import quantization_of, skipped_by, sort_tensors
from moe_ops.convert.publish import read_manifest
from moe_ops.convert.report import size
from moe_ops.convert.source import STATE, ConvertError, read_source

_NUMBER = re.compile(r"\.\d+(?=\.)")


def inspect(path: str | Path) -> dict[str, Any]:
    """Describe a checkpoint without reading a weight.

    Args:
        path: a Hugging Face folder, a safetensors file, or a hub id.

    Returns:
        A dictionary that JSON can hold: model type, family, dialect, bytes and parameters by dtype, and a row for each kind of tensor (names with
        their numbers replaced by `*`) with its count, dtypes, shapes and bytes; how it was made where `convert` made it; and what does not fit
        together, where something does not.

    Raises:
        ConvertError: nothing there that can be read.
    """
    source = read_source(path)
    config = {**source.config, "quantization_config": source.quantization} if source.quantization else source.config
    problem, dialect, scales = None, None, set()
    try:
        tensors = sort_tensors(config, source.tensors, skipped_by(quantization_of(config)))
        dialect = tensors.dialect.name
        scales = {s.name for s in tensors.scales.values()} | {s.name for stack in tensors.stacks.values() for s in stack.scales.values()}
    except ConvertError as error:
        problem = str(error).removeprefix("convert: ")
    kinds: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "elements": 0, "bytes": 0})
    for name, tensor in source.tensors.items():
        elements = math.prod(tensor.shape)
        row = kinds.setdefault(_NUMBER.sub(".*", name), {"count": 0, "dtypes": [], "shapes": [], "bytes": 0})
        row["count"] += 1
        row["bytes"] += tensor.nbytes
        for key, value in (("dtypes", tensor.dtype), ("shapes", list(tensor.shape))):
            if value not in row[key]:
                row[key].append(value)
        sums = dtypes[tensor.dtype]
        sums["tensors"] += 1
        sums["elements"] += elements
        sums["bytes"] += tensor.nbytes
    family = family_of(config)
    made = read_manifest(source.path)
    if (source.path / STATE).exists():
        problem = problem or "the conversion into this folder is not finished"
    return {
        "path": str(path),
        "model_type": source.config.get("model_type"),
        "family": family.name if family else None,
        "dialect": dialect,
        "quantization_config": quantization_of(config),
        "files": {f: sum(t.nbytes for t in source.tensors.values() if t.file == f) for f in source.files},
        "bytes": source.nbytes,
        "parameters": sum(math.prod(t.shape) for t in source.tensors.values() if t.name not in scales),
        "dtypes": dict(dtypes),
        "kinds": kinds,
        "made_by": {k: made.get(k) for k in ("tool", "version", "source_name", "options")} if made else None,
        "problem": problem,
    }


def text_of(found: dict[str, Any]) -> str:
    """The description for people."""
    lines = [
        f"{found['path']}: {found['model_type'] or 'no model_type'} (family {found['family'] or 'unknown'}), {found['dialect'] or 'unreadable'}",
        f"{found['parameters'] / 1e9:.3f} billion parameters, {size(found['bytes'])} in {len(found['files'])} file{'s'[: len(found['files']) != 1]}",
    ]
    lines += [f"  {name:8s} {row['tensors']:7d} tensors {size(row['bytes']):>11s}" for name, row in sorted(found["dtypes"].items())]
    width = max((len(k) for k in found["kinds"]), default=0)
    for name, row in sorted(found["kinds"].items()):
        shapes = ", ".join("x".join(map(str, s)) or "scalar" for s in row["shapes"][:2]) + (", .." if len(row["shapes"]) > 2 else "")
        lines.append(f"  {name:{width}s} {row['count']:6d}  {'/'.join(row['dtypes']):8s} {size(row['bytes']):>11s}  {shapes}")
    if found["made_by"]:
        options = found["made_by"]["options"]
        lines.append(f"made by {found['made_by']['tool']} {found['made_by']['version']} from {found['made_by']['source_name']}: {options}")
    if found["problem"]:
        lines.append(f"problem: {found['problem']}")
    return "\n".join(lines)
