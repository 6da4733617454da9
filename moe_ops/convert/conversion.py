"""`convert`: a checkpoint folder in another format, in bounded memory, whole or not at all."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moe_ops.convert.compute import Reader, Scales, Worker
from moe_ops.convert.journal import Journal, differences, sync_folder
from moe_ops.convert.pieces import OutFile, layout
from moe_ops.convert.planning import plan_tensors
from moe_ops.convert.publish import changed_files, copied, copied_bytes, has_index, identity_of, not_copied, publish, read_manifest
from moe_ops.convert.quantizers import quantizer_for, warm_up
from moe_ops.convert.report import Report
from moe_ops.convert.source import INDEX, MANIFEST, STATE, Checkpoint, ConvertError, read_source
from moe_ops.convert.stream import FileWriter, ahead_of, check_file, cores, run
from moe_ops.convert.types import Options, TensorPlan


def plan_conversion(src: str | Path, options: Options) -> tuple[Checkpoint, TensorPlan, list[OutFile]]:
    """Read the source's headers and decide what becomes of each tensor and where it goes; see `convert` for what it raises."""
    source = read_source(src)
    if (source.path / STATE).exists() and not source.alone:
        raise ConvertError(f"convert: the source {source.path} is an unfinished conversion ({STATE}); finish it first")
    config = {**source.config, "quantization_config": source.quantization} if source.quantization else source.config
    plan = plan_tensors(config, source.tensors, options)
    return source, plan, layout(source, plan, {"moe_ops_format": options.format, "moe_ops_rounding": options.rule})


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    format: str = "mxfp8",
    layout: str = "hf",
    rounding: str | None = None,
    stochastic: int | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    only: str | None = None,
    device: str = "cpu",
    dry_run: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Report:
    """Convert a checkpoint to MXFP8 or FP8 blocks.

    Args:
        src: a Hugging Face folder (one file, or shards with an index), a safetensors file, or a hub id. It may be stored in bf16, fp16 or fp32, or
            be quantized already in any dialect of `moe_ops.layer.dialects`.
        dst: a folder that does not exist or is empty, or the unfinished or finished result of the same call.
        format: "mxfp8" or "fp8_block".
        layout: "hf", "compressed-tensors" or "modelopt": names, dtypes and config keys of the result.
        rounding: rule of the scales: "rceil" (default), "floor" or "even" for mxfp8; "fp32" (default) or "pow2" for fp8_block.
        stochastic: seed of stochastic rounding of elements; None rounds to nearest even.
        include: patterns (`re:REGEX`, or names) of modules; with any, only those are quantized.
        exclude: patterns of modules that are kept.
        only: "experts" quantizes nothing else.
        device: "cpu" or "cuda"; both give the same bytes.
        dry_run: read the headers, decide and check everything, write nothing.
        threads: items worked on at once; None fits the machine.
        progress: show a progress bar on stderr; None shows it on a terminal.

    Returns:
        Report with counts, sizes and the error of every weight.

    Numerics: the bytes are those of `quantize_weight` for each weight, expert by expert.

    Raises:
        ConvertError: a source that is missing, damaged, truncated or contradicts itself, a tensor without a decision, a destination that
            holds something else, too little space, NaN in a weight. The text names file and tensor; the source is never touched, and no index
            is published.

    Cost: reads the source once, writes the result once. Memory: some 30 MB a thread, or the largest expert where it is stored transposed.

    See also: tests/convert/, benchmarks/convert/bench_convert.py.
    """
    started, cpu = time.monotonic(), time.process_time()
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"convert: threads must be an int of at least 1 or None, got {threads!r}")
    options = Options(format, layout, rounding, stochastic, include, exclude, only, device)  # type: ignore[arg-type]
    destination = Path(dst)
    source, plan, files = plan_conversion(src, options)
    left_out = not_copied(source)
    report = Report(source.name, str(dst), options, plan, {f.name: f.nbytes for f in files}, source.nbytes, left_out=left_out, dry_run=dry_run)
    quantizer_for(options)  # a device that is missing is an error before anything is written
    _check_places(source, destination)
    made = identity_of(source, files, report)
    unfinished = (destination / STATE).exists()
    if not unfinished and destination.exists() and any(destination.iterdir()):
        _already_there(destination, made, files, report, threads or cores())
    elif dry_run:
        _check_space(source, destination, files, {})
    else:
        if not unfinished:  # too little space leaves nothing behind that another command would have to remove
            _check_space(source, destination, files, {})
        stats = {file: (source.path / file).stat() for file in source.files}
        stamps = {file: {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns} for file, stat in stats.items()}
        journal = Journal(destination, {**made, "files": stamps})
        try:
            if journal.fresh and any(p.name != STATE for p in destination.iterdir()):
                # killed when only the journal was left to be removed, or another process finished meanwhile
                _already_there(destination, made, files, report, threads or cores())
            else:
                _carry_out(source, plan, files, destination, journal, options, report, threads, progress)
            journal.remove()
        finally:
            journal.close()
    report.seconds, report.cpu_seconds = time.monotonic() - started, time.process_time() - cpu
    return report


def _check_places(source: Checkpoint, destination: Path) -> None:
    here, there = source.path.resolve(), destination.resolve()
    inside = here in there.parents and not source.alone
    if here == there or inside or there in here.parents:
        raise ConvertError(f"convert: the destination {destination} must lie outside the source {source.path}, and the source outside of it")
    if destination.exists() and not destination.is_dir():
        raise ConvertError(f"convert: the destination {destination} is no folder")
    for name in copied(source):
        if not (source.path / name).is_file():
            raise ConvertError(f"convert: {source.path / name} cannot be copied: it is a link to nothing, or no plain file")


def _already_there(destination: Path, made: dict[str, Any], files: Sequence[OutFile], report: Report, threads: int) -> None:
    """A folder that holds something and no unfinished conversion: only the same result, whole, is accepted."""
    found = read_manifest(destination)
    if found is None:
        raise ConvertError(f"convert: the destination {destination} is not empty and holds no conversion")
    changed = differences({k: found.get(k) for k in made}, made)
    if changed:
        other = [text for text in changed if not text.startswith("source.sample.")]
        what = f"another conversion: {'; '.join(other[:3])}" if other else f"the conversion of other weights under the same names: {changed[0]}"
        raise ConvertError(f"convert: {destination} holds {what}; remove it or choose another destination")
    with ThreadPoolExecutor(threads) as pool:
        for file in files:
            tensors = found["files"].get(file.name, {}).get("tensors", {})
            record = {"digests": {name: entry[0] for name, entry in tensors.items()}}
            if not check_file(destination / file.name, file, record, report.plan.entries, pool):
                raise ConvertError(
                    f"convert: {destination / file.name} is damaged: it is not what {MANIFEST} says; remove {destination} and run again"
                )
    changed = changed_files(destination, found)
    if changed:
        raise ConvertError(
            f"convert: {destination / changed[0]} is missing or not what {MANIFEST} says; put it back, or remove {destination} and run again"
        )
    report.already_complete = True


def _check_space(source: Checkpoint, destination: Path, files: Sequence[OutFile], done: dict[str, Any]) -> None:
    needed = sum(f.nbytes for f in files if f.name not in done) + copied_bytes(source)
    there = destination.absolute()
    while not there.exists():
        there = there.parent
    stat = os.statvfs(there)
    free = stat.f_bavail * stat.f_frsize
    # what an interrupted run left is overwritten
    free += sum(p.stat().st_blocks * 512 for p in destination.glob("*.tmp") if p.stem not in done) if destination.exists() else 0
    if needed > free:
        raise ConvertError(f"convert: the result needs {needed} bytes in {destination}, but only {free} are free there")


def _resume(files: Sequence[OutFile], destination: Path, journal: Journal, plan: TensorPlan, threads: int) -> dict[str, Any]:
    """Records of the finished files whose every byte is as recorded; what else lies there under a final name goes."""
    done = {}
    with ThreadPoolExecutor(threads) as pool:
        for file in files:
            path, temporary = destination / file.name, destination / f"{file.name}.tmp"
            record = journal.done.get(file.name)
            there = path if path.exists() else temporary
            if record is not None and check_file(there, file, record, plan.entries, pool):
                done[file.name] = record
            elif path.exists():
                path.unlink()
    return done


def _carry_out(
    source: Checkpoint,
    plan: TensorPlan,
    files: Sequence[OutFile],
    destination: Path,
    journal: Journal,
    options: Options,
    report: Report,
    threads: int | None,
    progress: bool | None,
) -> None:
    threads = threads or (min(8, max(4, cores())) if options.device != "cpu" else min(32, cores() + 1))
    records = _resume(files, destination, journal, plan, threads)
    report.resumed = tuple(records)
    todo = [f for f in files if f.name not in records]
    _check_space(source, destination, files, records)
    if todo:  # a result that was published and then damaged is not whole until it is published again
        (destination / INDEX).unlink(missing_ok=True)
    rename = has_index(source, files)
    lock, gpu, reader, scales = threading.Lock(), threading.Lock(), Reader(source), Scales()

    def finished(file: OutFile, record: dict[str, Any]) -> None:
        with lock:
            if rename:
                os.replace(destination / f"{file.name}.tmp", destination / file.name)
                sync_folder(destination)
            journal.add(record)
            records[file.name] = record

    total = sum(item.nbytes for f in files for item in f.items)
    report.bytes_done = left = sum(item.nbytes for f in todo for item in f.items)
    hidden = None if progress is None else not progress
    try:
        if todo:
            with ahead_of(todo, plan.entries, reader):
                warm_up(options)
        with tqdm(total=total, initial=total - left, unit="B", unit_scale=True, desc="convert", file=sys.stderr, disable=hidden, miniters=1) as bar:

            def advance(n: int) -> None:
                with lock:
                    bar.update(n)

            run(
                todo,
                lambda f: FileWriter(f, destination, finished),
                lambda: Worker(plan, options, reader, gpu, scales),
                plan.entries,
                reader,
                threads,
                advance,
            )
    finally:
        reader.close()
    report.sums = {int(entry): sums for file in files for entry, sums in records[file.name]["errors"].items()}
    publish(source, files, destination, records, report)
