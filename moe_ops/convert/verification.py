"""`verify`: is a result whole, undamaged, loadable, and what its source becomes under its options?"""

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_ops.convert.comparison import compare_values
from moe_ops.convert.compute import Done, Reader, Scales, Worker
from moe_ops.convert.conversion import plan_conversion
from moe_ops.convert.pairing import Tensors, quantization_of, skipped_by, sort_tensors
from moe_ops.convert.pieces import PIECE, OutFile, digest_of_cuts
from moe_ops.convert.publish import CARD, changed_files, read_manifest
from moe_ops.convert.quantizers import warm_up
from moe_ops.convert.report import Error, error_of
from moe_ops.convert.source import INDEX, MANIFEST, STATE, Checkpoint, ConvertError, read_json, read_source
from moe_ops.convert.stream import Results, cores, run
from moe_ops.convert.types import DTYPES, FLOATS, Options, Source, Weight
from moe_ops.quant.weight_cpu import Sums

_GPU = threading.Lock()


@dataclass
class Verification:
    """The outcome of `verify`.

    Attributes:
        path: the folder.
        problems: what is wrong; empty for a good result.
        notes: what is worth knowing and wrong only for some readers.
        dialect: how its weights are quantized.
        quantized: number of quantized weights.
        kept: number of other tensors, scales aside.
        hashed: tensors whose bytes are those of the manifest.
        compared: tensors whose bytes are those that the source gives now.
        close: tensors whose values are those of the source up to rounding, where there is no manifest.
        checked: what was looked at, whatever came of it.
        not_checked: what nothing was compared with, and why.
        error: of all rounded weights against the source, where one was given.
    """

    path: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dialect: str = ""
    quantized: int = 0
    kept: int = 0
    hashed: int = 0
    compared: int = 0
    close: int = 0
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    error: Error | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        return {**self.__dict__, "ok": self.ok, "error": self.error.as_json() if self.error else None}

    def text(self) -> str:
        """A summary for people."""
        lines = [f"{self.path}: {'ok' if self.ok else 'NOT OK'}, {self.dialect or 'unknown dialect'}, {self.quantized} quantized, {self.kept} kept"]
        if self.hashed:
            lines.append(f"{self.hashed} tensors are what {MANIFEST} says, byte for byte")
        if self.compared:
            lines.append(f"{self.compared} tensors are what the source gives, byte for byte")
        if self.close:
            lines.append(f"{self.close} tensors have the values of the source, up to rounding")
        if self.error is not None and math.isfinite(self.error.sqnr_db):
            e = self.error
            lines.append(f"error of rounded weights: SQNR {e.sqnr_db:.2f} dB, cosine {e.cosine:.6f}, relative {e.relative:.4f}")
        lines += [f"checked: {', '.join(self.checked)}"] if self.checked else []
        lines += [f"not checked: {text}" for text in self.not_checked]
        lines += [f"problem: {p}" for p in self.problems[:20]]
        if len(self.problems) > 20:
            lines.append(f"and {len(self.problems) - 20} more problems")
        return "\n".join(lines + [f"note: {n}" for n in self.notes])


def verify(dst: str | Path, *, against: str | Path | None = None, device: str = "cpu", threads: int | None = None) -> Verification:
    """Check a quantized checkpoint: everything that can be wrong with it, reading every byte.

    Args:
        dst: folder of a result of `convert`, or of another tool.
        against: the source. For a result of `convert` it is converted again, in memory, and compared byte for byte; for that of another tool the
            values of every tensor are compared, within what rounding explains.
        device: where that is computed.
        threads: tensors looked at at once; None fits the machine.

    Returns:
        Verification; `ok` says whether anything is wrong. Checked are the headers, the index and its total_size, that every FP8 weight has exactly
        one scale of the right name, dtype and shape and the other way round, NaN in elements and scales (E8M0 byte 255), the config keys that
        readers need, that the modules left unquantized are named there, and the hashes of the manifest, of tensors and of other files. Without a
        manifest there are no hashes: whether bytes changed since they were written is not checked then; `not_checked` says so.

    Raises:
        ConvertError: no such folder, a source that cannot be read, or a device that is not there.

    See also: tests/convert/test_verify.py.
    """
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"verify: threads must be an int of at least 1 or None, got {threads!r}")
    out = Verification(str(dst))
    if not Path(dst).is_dir():
        raise ConvertError(f"verify: {dst} is no folder")
    if (Path(dst) / STATE).exists():
        out.problems.append(f"{STATE} exists: the conversion is not finished; run it again")
    try:
        found = read_source(dst)
        made = read_manifest(Path(dst))
        config = {**found.config, "quantization_config": found.quantization} if found.quantization else found.config
        tensors = sort_tensors(config, found.tensors, skipped_by(quantization_of(config)))
    except ConvertError as error:
        out.problems.append(str(error).removeprefix("convert: "))
        out.not_checked.append("anything else: the folder cannot be read as a checkpoint")
        return out
    out.checked += ["headers and index", "one scale for each quantized weight"]
    out.dialect = tensors.dialect.name
    scales = {s.name for s in tensors.scales.values()} | {s.name for stack in tensors.stacks.values() for s in stack.scales.values()}
    out.quantized = sum(1 for t in found.tensors.values() if t.dtype == "F8_E4M3")
    out.kept = len(found.tensors) - out.quantized - len(scales)
    if not out.quantized:
        out.problems.append("no tensor is quantized")
    try:
        _check_index(found, out)
        _check_config(found, tensors, config, out, made is not None)
        for name in changed_files(found.path, made) if made is not None else ():
            text = f"{name} is missing or not what {MANIFEST} says"
            (out.notes if name == CARD else out.problems).append(text)  # people add to a card
    except ConvertError as error:
        out.problems.append(str(error).removeprefix("convert: "))
    out.checked.append("config keys that readers need")
    _check_bytes(found, tensors, scales, made, out, threads or cores())
    out.checked.append("NaN in quantized elements and scales")
    if made is not None:
        out.checked.append(f"SHA-256 of every tensor and every other file, from {MANIFEST}")
    else:
        out.not_checked.append(f"whether any byte is the one that was written: there is no {MANIFEST}, which would hold the hashes")
    if against is None:
        out.not_checked.append("whether these are the weights of a source: none was given (--against)")
    else:
        if made is not None:
            out.checked.append("every byte of every tensor against the source, converted again")
            _compare(found, made, against, device, threads or cores() + 1, out)
        elif tensors.dialect.format is not None:
            out.checked.append("the values of every tensor against the source, up to rounding")
            out.not_checked.append("the files beside the weights against those of the source")
            problems, out.close, sums = compare_values(found, tensors, against, threads or cores())
            out.problems += problems
            out.error = error_of(sums) if sums.count else None
            out.notes.append(f"there is no {MANIFEST}: compared with the source by value, not by bytes")
        else:
            out.not_checked.append("anything against the source: no tensor is quantized here")
    return out


def _check_index(found: Checkpoint, out: Verification) -> None:
    if not (found.path / INDEX).exists():
        if len(found.files) > 1:
            out.problems.append(f"{len(found.files)} weight files and no {INDEX}")
        return
    metadata = read_json(found.path / INDEX).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total != found.nbytes:
        out.problems.append(f"{INDEX} says total_size {total}, the tensors have {found.nbytes} bytes")


def _check_config(found: Checkpoint, tensors: Tensors, config: Mapping[str, Any], out: Verification, own: bool) -> None:
    section = quantization_of(config) or {}
    if not (found.path / "config.json").exists():
        out.problems.append("config.json is missing")
    method = section.get("quant_method")
    if "weight_block_size" not in section and method in ("fp8", "mxfp8"):
        out.problems.append("quantization_config has no weight_block_size: Transformers would take blocks of 128x128")
    if method in ("fp8", "mxfp8"):
        wrong = [s.name for s in tensors.scales.values() if not s.name.endswith("_scale_inv")]
        if wrong:
            out.problems.append(f"{len(wrong)} scales, {wrong[0]!r} first, are not named .weight_scale_inv: Transformers would load raw elements")
    if method == "modelopt":
        path = found.path / "hf_quant_config.json"
        body = read_json(path).get("quantization", {}) if path.exists() else {}
        missing = [k for k in ("quant_algo", "kv_cache_quant_algo", "exclude_modules") if k not in body]
        if missing:
            out.problems.append(f"hf_quant_config.json lacks {', '.join(missing)}, which vLLM demands")
    skipped = skipped_by(section)
    unnamed = [m for m, s in tensors.weights.items() if s.dtype in FLOATS and not skipped(m)]
    if unnamed:
        text = f"{len(unnamed)} modules are not quantized and not named in quantization_config: {', '.join(unnamed[:3])}"
        (out.problems if own else out.notes).append(text)
    wrongly = [m for m, s in tensors.weights.items() if s.dtype == "F8_E4M3" and skipped(m)]
    if wrongly:
        out.problems.append(f"{len(wrongly)} modules are quantized, but quantization_config says they are not: {', '.join(wrongly[:3])}")


def _check_bytes(found: Checkpoint, tensors: Tensors, scales: set[str], made: dict[str, Any] | None, out: Verification, threads: int) -> None:
    """Read every tensor once: hashes, and what no element and no scale may be."""
    declared: dict[str, list[Any]] = {}
    if made is not None:
        for file, entry in made["files"].items():
            declared |= entry.get("tensors", {})
            if file not in found.headers:
                out.problems.append(f"file {file} of {MANIFEST} is missing")
            elif found.headers[file] != entry.get("header"):
                out.problems.append(f"the header of {file} is not the one that was written")
    reader = Reader(found)
    e8m0 = tensors.dialect.format is not None and tensors.dialect.format.name == "mxfp8"

    def look(source: Source) -> tuple[str | None, bool]:
        entry = declared.get(source.name)
        step = entry[1] if entry is not None and len(entry) > 1 else max(source.nbytes, 1) if entry is not None else PIECE
        digests, wrong = [], None
        try:
            for at in range(0, source.nbytes, step) or (0,):
                raw = torch.empty(min(step, source.nbytes - at), dtype=torch.uint8)
                reader.read(source, source.begin + at, raw)
                if entry is not None:
                    digests.append(hashlib.sha256(raw.numpy().data).digest())
                wrong = wrong or _what_is_wrong(raw, source, source.name in scales, e8m0)
        except ConvertError as error:
            return str(error), False
        same = entry is not None and digest_of_cuts(digests) == entry[0]
        if entry is not None and not same:
            wrong = wrong or "is damaged: its bytes are not those that were written"
        elif made is not None and entry is None:
            wrong = wrong or f"is not in {MANIFEST}"
        return (f"{source.file}: {source.name!r} {wrong}" if wrong else None), same

    try:
        with ThreadPoolExecutor(threads) as pool:
            for problem, same in pool.map(look, found.tensors.values()):
                out.hashed += same
                if problem:
                    out.problems.append(problem)
    finally:
        reader.close()
    out.problems += [f"{name!r} of {MANIFEST} is missing" for name in declared if name not in found.tensors]


def _what_is_wrong(raw: torch.Tensor, source: Source, scale: bool, e8m0: bool) -> str | None:
    if source.dtype == "F8_E4M3":
        return "holds NaN" if raw.numel() and int((raw & 0x7F).max()) == 0x7F else None
    if not scale:
        return None
    if source.dtype in ("U8", "F8_E8M0"):
        return "holds the E8M0 byte 255, which is NaN" if bool((raw == 255).any()) else None
    values = raw.view(DTYPES[source.dtype]).float()
    if e8m0 or source.dtype not in FLOATS:
        return f"is a scale of {source.dtype}"
    return None if bool((torch.isfinite(values) & (values > 0)).all()) else "holds a scale that is NaN, infinite, zero or negative"


class _Comparison:
    """Takes the pieces of one file as they should be, and compares them with what is there."""

    def __init__(self, file: OutFile, found: Checkpoint, reader: Reader, wrong: Callable[[str], None], results: dict[str, Results]) -> None:
        self.file, self.found, self.reader, self.wrong = file, found, reader, wrong
        self.results = results[file.name] = Results(file)

    def put(self, done: Done) -> None:
        for out, at, view in done.parts:
            there = self.found.tensors.get(out.name)
            if there is None or (there.dtype, there.shape) != (out.dtype, out.shape):
                self.wrong(out.name)
                continue
            raw = torch.empty(len(view), dtype=torch.uint8)
            self.reader.read(there, there.begin + at, raw)
            if raw.numpy().data != view:
                self.wrong(out.name)
        self.results.add(done)

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def _compare(found: Checkpoint, made: Mapping[str, Any], against: str | Path, device: str, threads: int, out: Verification) -> None:
    chosen = made["options"]
    options = Options(
        chosen["format"],
        chosen["layout"],
        chosen["rounding"],
        chosen["stochastic"],
        tuple(chosen["include"]),
        tuple(chosen["exclude"]),
        chosen["only"],
        device,
    )
    source, plan, files = plan_conversion(against, options)
    warm_up(options)
    expected = [t.name for f in files for t in f.tensors]
    extra = sorted(set(found.tensors) - set(expected))
    if extra:
        out.problems.append(f"{len(extra)} tensors do not come from the source: {', '.join(extra[:3])}")
    if source.headers != made.get("source", {}).get("headers"):
        out.notes.append("the headers of the source are not those that it had when it was converted")
    bad: set[str] = set()
    lock, results = threading.Lock(), {}

    def wrong(name: str) -> None:
        with lock:
            bad.add(name)

    reader, own, cut = Reader(source), Reader(found), Scales()
    try:
        run(
            files,
            lambda f: _Comparison(f, found, own, wrong, results),
            lambda: Worker(plan, options, reader, _GPU, cut),
            plan.entries,
            reader,
            threads,
            lambda n: None,
        )
    finally:
        reader.close()
        own.close()
    out.compared = len(set(expected) - bad)
    if bad:
        out.problems.append(f"{len(bad)} tensors are not what the source gives: {', '.join(sorted(bad)[:5])}")
    out.error = _overall(results.values(), plan.entries)


def _overall(results: Iterable[Results], entries: Sequence[Any]) -> Error | None:
    total = Sums()
    for result in results:
        for entry, (signal, noise, y, count, exact) in result.errors().items():
            if isinstance(entries[int(entry)], Weight) and not exact:
                total.add(Sums(signal, noise, y, count))
    return error_of(total) if total.count else None
