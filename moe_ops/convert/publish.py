"""The last step of a conversion: everything beside the weights, in an order that makes the result loadable with its very last file."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_ops import __version__
from moe_ops.convert.journal import sync_folder, write_file
from moe_ops.convert.layouts import STALE_FILES, output_config
from moe_ops.convert.pieces import PIECE, OutFile
from moe_ops.convert.report import Report, card, describe_options
from moe_ops.convert.source import INDEX, MANIFEST, Checkpoint, ConvertError, read_json
from moe_ops.convert.stream import cut_bytes

CARD = "README.md"
SOURCE_CARD = "README.source.md"
_FRONT = ("license:", "license_name:", "license_link:", "language:", "pipeline_tag:", "library_name:")


def copied(source: Checkpoint) -> dict[str, str]:
    """File of the source -> its name in the result, for all that is copied as it is."""
    out = {f: f for f in source.others if f not in (*STALE_FILES, "config.json", MANIFEST)}
    if CARD in out:
        out.pop(SOURCE_CARD, None)
        out[CARD] = SOURCE_CARD
    return out


def not_copied(source: Checkpoint) -> tuple[str, ...]:
    """Files and folders of the source that are neither copied nor written anew."""
    mine = {*copied(source), "config.json", MANIFEST}
    return tuple(sorted({*source.left_out, *(f for f in source.others if f not in mine)}))


def copied_bytes(source: Checkpoint) -> int:
    """Bytes of the files that are copied."""
    return sum((source.path / f).stat().st_size for f in copied(source))


def has_index(source: Checkpoint, files: Sequence[OutFile]) -> bool:
    """Whether the result has an index; a single file without one is renamed last instead."""
    return len(files) > 1 or (not source.alone and (source.path / INDEX).exists())


def identity_of(source: Checkpoint, files: Sequence[OutFile], report: Report) -> dict[str, Any]:
    """What decides the bytes of a result: of the source, its headers, config and a few bytes of every tensor."""
    digest = hashlib.sha256(b"".join(f.header for f in files)).hexdigest()
    config = hashlib.sha256(json.dumps([source.config, source.quantization], sort_keys=True).encode()).hexdigest()
    return {
        "version": __version__,
        "options": describe_options(report.options),
        "source": {"headers": dict(source.headers), "config": config, "sample": source.sample},
        "result": digest,
        "piece": PIECE,
    }


def index_of(files: Sequence[OutFile]) -> bytes:
    """model.safetensors.index.json of the result."""
    weight_map = {t.name: f.name for f in files for t in f.tensors}
    total = sum(t.nbytes for f in files for t in f.tensors)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def manifest(
    source: Checkpoint, files: Sequence[OutFile], records: Mapping[str, Mapping[str, Any]], report: Report, others: Mapping[str, str]
) -> bytes:
    """moe_ops_convert.json: how the result was made, a hash of every tensor and every other file, the errors of every weight, a hash of all that."""
    cuts: dict[str, int] = {}
    for entry in report.plan.entries:
        cuts |= cut_bytes(entry)
    content = {
        "tool": "quantized-moe-ops",
        **identity_of(source, files, report),
        "source_name": source.name,
        "family": report.plan.family,
        "source_dialect": report.plan.dialect.name,
        "files": {
            f.name: {
                "bytes": f.nbytes,
                "header": hashlib.sha256(f.header).hexdigest(),
                # SHA-256 of a tensor, or of the SHA-256 of its cuts of so many bytes
                "tensors": {name: [digest, *([cuts[name]] if name in cuts else [])] for name, digest in records[f.name]["digests"].items()},
            }
            for f in files
        },
        "others": dict(sorted(others.items())),
        "errors": {name: error.as_json() for name, error in report.errors().items()},
    }
    content["sha256"] = _own_hash(content)
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _own_hash(content: Mapping[str, Any]) -> str:
    """Hash of what a manifest says."""
    rest = {k: v for k, v in content.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while raw := f.read(1 << 20):
            digest.update(raw)
    return digest.hexdigest()


def changed_files(folder: Path, found: Mapping[str, Any]) -> list[str]:
    """Files beside the weights that are missing or not what the manifest says.

    Raises:
        ConvertError: one that cannot be read.
    """
    try:
        return [name for name, digest in found["others"].items() if not (folder / name).is_file() or _file_hash(folder / name) != digest]
    except OSError as error:
        raise ConvertError(f"convert: cannot read {error.filename}: {error.strerror}") from error


def _front_matter(source: Checkpoint) -> list[str]:
    """Lines of the source's card that hold for the result as well."""
    path = source.path / CARD
    if CARD not in source.others:
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return []
    out: list[str] = []
    keep = False
    for line in lines[1:]:
        if line.strip() == "---":
            break
        if not line.startswith((" ", "-", "\t")):
            keep = line.startswith(_FRONT)
        if keep:
            out.append(line)
    return out


def _copy(source: Path, target: Path) -> str:
    """Copy a file, durably; the hash of the copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    shutil.copyfile(source, temporary)
    with open(temporary, "rb+") as f:
        os.fsync(f.fileno())
    digest = _file_hash(temporary)
    os.replace(temporary, target)
    sync_folder(target.parent)
    return digest


def publish(source: Checkpoint, files: Sequence[OutFile], destination: Path, records: Mapping[str, Mapping[str, Any]], report: Report) -> None:
    """Write everything beside the weights; the index, or the only weight file's name, comes last.

    Raises:
        ConvertError: a file that cannot be read or written.
    """
    written = output_config(source.config, report.options, report.plan)
    index = index_of(files) if has_index(source, files) else None
    others = {}
    try:
        for name, new in sorted(copied(source).items()):
            if new not in written:
                others[new] = _copy(source.path / name, destination / new)
        written = {CARD: card(report, source, __version__, _front_matter(source)).encode(), **dict(sorted(written.items(), reverse=True))}
        for name, content in written.items():
            write_file(destination / name, content)
        others |= {name: hashlib.sha256(content).hexdigest() for name, content in (*written.items(), (INDEX, index)) if content is not None}
        write_file(destination / MANIFEST, manifest(source, files, records, report, others))
        if index is not None:
            write_file(destination / INDEX, index)
        else:
            (only,) = files
            temporary = destination / f"{only.name}.tmp"
            if temporary.exists():
                os.replace(temporary, destination / only.name)
            sync_folder(destination)
    except OSError as error:
        raise ConvertError(f"convert: cannot publish {destination}: {error}") from error


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a result, or None where the folder holds none.

    Raises:
        ConvertError: one that is damaged.
    """
    if not (folder / MANIFEST).exists():
        return None
    content = read_json(folder / MANIFEST)
    if not isinstance(content, dict) or content.get("sha256") != _own_hash(content):
        raise ConvertError(f"convert: {folder / MANIFEST} is damaged")
    return content
