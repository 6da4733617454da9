"""A checkpoint folder as the converter reads it: every header checked against its file and the index, and no weight loaded."""

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ops.convert.types import DTYPES, Source

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Our own record beside a result, and the folder that exists while a conversion runs.
MANIFEST = "moe_ops_convert.json"
STATE = ".moe_ops_convert"

#: How the shards of one model are named: number, how many there are.
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")

#: Bytes in the middle of every tensor by which weights under equal headers are told apart.
SAMPLE = 4096

_MAX_HEADER = 100 << 20  # the limit of the safetensors library
#: Weights in other forms: they are not what the result holds, so they are not copied.
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".npz")


class ConvertError(ValueError):
    """A source, destination or option that cannot be converted; the text names file and tensor."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A source folder.

    Attributes:
        path: the folder.
        name: how the model card calls it: a hub id, or the folder's name.
        files: its weight files, in the index's order.
        tensors: name -> `Source`, in order of file and offset.
        metadata: file -> the `__metadata__` of its header.
        headers: file -> SHA-256 of its header.
        config: content of config.json, {} where it is missing.
        quantization: config of quantization: from config.json, else hf_quant_config.json.
        others: files beside the weights, to be copied (relative, sorted).
        left_out: weights in other forms, hidden folders and links to folders, which are not copied.
        alone: the source is one file, whatever lies beside it.
    """

    path: Path
    name: str
    files: tuple[str, ...]
    tensors: dict[str, Source]
    metadata: dict[str, dict[str, str]]
    headers: dict[str, str]
    config: dict[str, Any]
    quantization: dict[str, Any] | None
    others: tuple[str, ...]
    left_out: tuple[str, ...]
    alone: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @functools.cached_property
    def sample(self) -> dict[str, str]:
        """File -> SHA-256 of `SAMPLE` bytes out of each of its tensors: equal headers do not mean equal weights.

        Raises:
            ConvertError: bytes that cannot be read.
        """
        per_file: dict[str, list[Source]] = {file: [] for file in self.files}
        for source in self.tensors.values():
            per_file[source.file].append(source)
        with ThreadPoolExecutor(8) as pool:
            return dict(zip(per_file, pool.map(lambda file: _sample(self.path / file, per_file[file]), per_file), strict=True))


def _sample(path: Path, tensors: Iterable[Source]) -> str:
    digest, at = hashlib.sha256(), None
    try:
        with open(path, "rb", buffering=0) as f:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read beyond
            for at in tensors:
                n = min(SAMPLE, at.nbytes)
                f.seek(at.begin + (at.nbytes - n) // 2)
                digest.update(f.read(n))
    except OSError as error:
        name = f"tensor {at.name!r} of " if at else ""
        raise ConvertError(f"convert: cannot read {name}{path}: {error.strerror}") from error
    return digest.hexdigest()


def locate(path: str | Path) -> tuple[Path, str]:
    """A local folder (or one safetensors file), or the snapshot of a hub id where huggingface_hub is installed; and the source's name.

    Raises:
        ConvertError: neither exists.
    """
    local = Path(path)
    if local.exists():
        return local, _name_of(local)
    parts = str(path).split("/")
    if len(parts) != 2 or not all(p and not p.startswith(".") for p in parts):
        raise ConvertError(f"convert: {path} does not exist")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConvertError(f"convert: {path} is no local folder, and huggingface_hub, which could fetch it, is not installed") from None
    try:
        return Path(snapshot_download(str(path))), str(path)
    except Exception as error:  # the hub's errors have no common base
        raise ConvertError(f"convert: {path} is no local folder and could not be fetched: {error}") from error


def _name_of(path: Path) -> str:
    """The name of a local folder or file: its last part, or the hub id where it lies in the cache of the hub."""
    called = Path(os.path.abspath(path))
    for folder in (*called.parents, *path.resolve().parents):
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return folder.parent.name.removeprefix("models--").replace("--", "/", 1)
    return called.name


def read_json(path: Path) -> Any:
    """Content of a JSON file.

    Raises:
        ConvertError: it cannot be read or parsed.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConvertError(f"convert: cannot read {path}: {error}") from error


def read_header(path: Path) -> tuple[dict[str, Source], dict[str, str], str]:
    """Tensors (in order of their bytes), metadata and SHA-256 of the header of a safetensors file, all checked against the file's size.

    Raises:
        ConvertError: an unreadable, damaged or truncated file; a tensor whose dtype, shape and offsets contradict each other.
    """
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            first = f.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length < 2 or length > _MAX_HEADER or 8 + length > size:
                raise ConvertError(f"convert: {path} is no safetensors file or is truncated: {size} bytes, header of {length}")
            raw = f.read(length)
    except OSError as error:
        raise ConvertError(f"convert: cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(raw)
        metadata = {str(k): str(v) for k, v in (header.pop("__metadata__", None) or {}).items()}
        entries = sorted(((v["data_offsets"], name, v) for name, v in header.items()), key=lambda e: (e[0], e[1]))
        "".join(header).encode()  # half of a surrogate pair stands for no character
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConvertError(f"convert: {path} has a damaged header: {error!r}") from None
    start = 8 + length
    tensors: dict[str, Source] = {}
    at = 0
    for offsets, name, entry in entries:
        tensors[name] = _source(path, name, entry, offsets, at, start, size)
        at = offsets[1]
    if start + at != size:
        what = "truncated" if start + at > size else "longer than its header says"
        raise ConvertError(f"convert: {path} is {what}: {size} bytes, but the header describes {start + at}")
    return tensors, metadata, hashlib.sha256(first + raw).hexdigest()


def _source(path: Path, name: str, entry: dict[str, Any], offsets: Any, at: int, start: int, size: int) -> Source:
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        begin, end = offsets
        if not all(type(n) is int for n in (*shape, begin, end)):
            raise ValueError("shape and data_offsets must be integers")
    except (ValueError, KeyError, TypeError) as error:
        raise ConvertError(f"convert: {path}: damaged entry of tensor {name!r}: {error!r}") from None
    if dtype not in DTYPES:
        raise ConvertError(f"convert: {path}: tensor {name!r} has dtype {dtype}, which is not supported; supported are {', '.join(DTYPES)}")
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ConvertError(f"convert: {path}: tensor {name!r} of {dtype} {list(shape)} cannot lie in bytes {begin}..{end}")
    if begin != at:
        raise ConvertError(f"convert: {path}: tensor {name!r} begins at byte {begin}, but the one before it ends at {at}")
    if start + end > size:
        raise ConvertError(f"convert: {path} is truncated: {size} bytes, but tensor {name!r} ends at byte {start + end}")
    return Source(name, dtype, shape, path.name, start + begin, start + end)


def _weight_files(path: Path) -> tuple[list[str], dict[str, str] | None]:
    """The weight files of a folder, and what its index declares."""
    index = path / INDEX
    if index.exists():
        content = read_json(index)
        declared = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(declared, dict) or not declared or not all(isinstance(v, str) for v in declared.values()):
            raise ConvertError(f"convert: {index} has no weight_map")
        files = list(dict.fromkeys(sorted(declared.values())))
        outside = [f for f in files if os.path.basename(f) != f]
        if outside:
            raise ConvertError(f"convert: {index} names a file outside its folder: {outside[0]!r}")
        if (path / SINGLE).exists() and SINGLE not in files:
            raise ConvertError(f"convert: {path} holds both {SINGLE} and {INDEX}, which does not name it; remove the one that is not meant")
        return files, declared
    if (path / SINGLE).exists():
        return [SINGLE], None
    files = sorted(p.name for p in path.glob("*.safetensors"))
    found = [m for m in map(_SHARD.fullmatch, files) if m]
    for stem, total in sorted({(m["stem"], m["total"]) for m in found}):
        there = {int(m["number"]) for m in found if (m["stem"], m["total"]) == (stem, total)}
        if len(there) < int(total):
            lost = next(n for n in range(0 if 0 in there else 1, int(total) + 1) if n not in there)
            raise ConvertError(f"convert: {path} holds no {INDEX}, and of {int(total)} shards {stem}-*-of-{total} only {len(there)}: no {lost}")
    return files, None


def read_source(path: str | Path) -> Checkpoint:
    """Read everything about a checkpoint but its weights.

    Args:
        path: a Hugging Face folder (single file, or shards with or without an index), one safetensors file, or a hub id.

    Raises:
        ConvertError: a missing, unreadable, damaged or truncated file, a tensor in two files, or an index that contradicts the headers;
            the text names file and tensor.
    """
    folder, name = locate(path)
    if folder.is_file():
        files, declared, folder, alone = [folder.name], None, folder.parent, True
    else:
        files, declared = _weight_files(folder)
        alone = False
    if not files:
        raise ConvertError(f"convert: {folder} holds no *.safetensors file")
    tensors: dict[str, Source] = {}
    metadata, headers = {}, {}
    for file in files:
        if not (folder / file).is_file():
            raise ConvertError(f"convert: shard {folder / file} is missing, though {INDEX} names it")
        found, metadata[file], headers[file] = read_header(folder / file)
        for key, source in found.items():
            if key in tensors:
                raise ConvertError(f"convert: tensor {key!r} is in {tensors[key].file} and in {file}")
            tensors[key] = source
    if declared is not None:
        _check_index(folder / INDEX, declared, tensors)
    config, quantization = _configs(folder)
    others, left_out = ((), ()) if alone else _others(folder, files)
    return Checkpoint(folder, name, tuple(files), tensors, metadata, headers, config, quantization, others, left_out, alone)


def _check_index(index: Path, declared: dict[str, str], tensors: dict[str, Source]) -> None:
    for key, file in declared.items():
        if key not in tensors:
            raise ConvertError(f"convert: {index} says that tensor {key!r} is in {file}, but it is in no file")
        if tensors[key].file != file:
            raise ConvertError(f"convert: {index} says that tensor {key!r} is in {file}, but it is in {tensors[key].file}")
    for key, source in tensors.items():
        if key not in declared:
            raise ConvertError(f"convert: tensor {key!r} of {source.file} is not in {index}")


def _configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    if not isinstance(config, dict):
        raise ConvertError(f"convert: {folder / 'config.json'} holds no object")
    nested = config.get("text_config")
    where = folder / "config.json"
    quantization = config.get("quantization_config") or (nested.get("quantization_config") if isinstance(nested, dict) else None)
    if not quantization and (folder / "hf_quant_config.json").exists():
        where = folder / "hf_quant_config.json"
        quantization = read_json(where)
    inner = quantization.get("quantization") or {} if isinstance(quantization, dict) else quantization
    if quantization and not isinstance(inner, dict):
        raise ConvertError(f"convert: {where} describes the quantization by something that is no object: {str(quantization)[:80]!r}")
    return config, quantization or None


def _others(folder: Path, files: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    others, left_out = [], []
    weights = set(files)

    def refuse(error: OSError) -> None:
        raise ConvertError(f"convert: cannot read {error.filename}: {error.strerror}")

    for root, folders, names in os.walk(folder, onerror=refuse):
        hidden = [f for f in folders if f.startswith(".") or os.path.islink(os.path.join(root, f))]
        left_out += [os.path.relpath(os.path.join(root, f), folder) + "/" for f in hidden]
        folders[:] = sorted(f for f in folders if f not in hidden)
        for name in sorted(names):
            relative = os.path.relpath(os.path.join(root, name), folder)
            if relative in weights or relative == INDEX:
                continue
            foreign = name.endswith(_WEIGHT_FILES) or name.endswith((".bin.index.json", ".safetensors.index.json", ".incomplete", ".tmp"))
            (left_out if foreign else others).append(relative)
    return tuple(sorted(others)), tuple(sorted(left_out))
