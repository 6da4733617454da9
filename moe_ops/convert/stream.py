"""The stream of a conversion: threads that each read, compute and write one item after another, so that the three overlap.

Memory is a few buffers of one item's size a thread, whatever the size of the model. Finished files are synced by a thread of their own while
the next one is being written.
"""

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from moe_ops.convert.compute import Done, Reader, Worker
from moe_ops.convert.pieces import Item, OutFile, cuts, digest_of_cuts, output_ranges
from moe_ops.convert.source import ConvertError
from moe_ops.convert.types import Entry
from moe_ops.quant.weight_cpu import Sums

#: Bytes written to a file after which they are brought to the disk and dropped from the system's cache: the sync at the end is short, the same
#: pages serve again (one core: 0.66 GB/s of source, 0.42 where the result fills the cache), and other programs keep theirs.
_FLUSH = 128 << 20
#: Bytes of source that are loaded at most while a device starts.
_AHEAD = 4 << 30


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Results:
    """Hashes and errors of a file's pieces, from any thread; its record does not depend on the order in which they came."""

    def __init__(self, file: OutFile) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._digests: dict[str, dict[int, bytes]] = {}
        self._sums: dict[int, dict[int, Sums]] = {}
        self._exact: dict[int, bool] = {}

    def add(self, done: Done) -> None:
        """Take in one piece; its bytes are hashed here."""
        digests = [(out.name, at, hashlib.sha256(view).digest()) for out, at, view in done.parts]
        with self._lock:
            for name, at, digest in digests:
                self._digests.setdefault(name, {})[at] = digest
            self._sums.setdefault(done.piece.entry, {})[done.piece.start] = done.sums
            self._exact[done.piece.entry] = done.exact

    def digests(self) -> dict[str, str]:
        """Hash of each tensor."""
        return {t.name: digest_of_cuts([d for _, d in sorted(self._digests[t.name].items())]) for t in self.file.tensors}

    def errors(self) -> dict[str, list[Any]]:
        """Entry number -> [signal, noise, result, count, exact], of the weights that were rounded or kept exactly."""
        out = {}
        for entry, pieces in sorted(self._sums.items()):
            total = Sums()
            for _, sums in sorted(pieces.items()):
                total.add(sums)
            if total.count or self._exact[entry]:
                out[str(entry)] = [total.signal, total.noise, total.result, total.count, self._exact[entry]]
        return out

    def record(self) -> dict[str, Any]:
        """What the journal keeps of the file."""
        return {"file": self.file.name, "digests": self.digests(), "errors": self.errors()}


class Sink(Protocol):
    """Where the pieces of one file go."""

    def put(self, done: Done) -> None:
        """Take one piece; called from any thread."""
        ...

    def finish(self) -> None:
        """All pieces are there."""
        ...

    def abandon(self) -> None:
        """No more pieces will come."""
        ...


class FileWriter:
    """Writes one file of the result under a temporary name.

    Args:
        file: its layout.
        folder: of the result.
        finished: called with the record once the file is on the disk, still under the temporary name.
    """

    def __init__(self, file: OutFile, folder: Path, finished: Callable[[OutFile, dict[str, Any]], None]) -> None:
        self.file, self.finished = file, finished
        self.path = folder / f"{file.name}.tmp"
        self.results = Results(file)
        self._lock = threading.Lock()
        self._dirty = 0
        self._fd = -1
        try:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._write(file.header, 0)
        except OSError as error:
            self.abandon()
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> ConvertError:
        more = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            more = f"; this file alone needs {self.file.nbytes} bytes; make room and run the same command again, which goes on from here"
        return ConvertError(f"convert: cannot write {self.path}: {error.strerror}{more}")

    def _write(self, view: Any, at: int) -> None:
        view = memoryview(view)
        while len(view):
            n = os.pwrite(self._fd, view, at)
            view, at = view[n:], at + n

    def put(self, done: Done) -> None:
        """Write and hash one piece."""
        try:
            for out, at, view in done.parts:
                self._write(view, self.file.offsets[out.name] + at)
        except OSError as error:
            raise self._failed(error) from error
        self.results.add(done)
        with self._lock:
            self._dirty += sum(len(view) for _, _, view in done.parts)
            flush, self._dirty = self._dirty > _FLUSH, 0 if self._dirty > _FLUSH else self._dirty
        if flush:
            self._sync(os.fdatasync if hasattr(os, "fdatasync") else os.fsync)

    def _sync(self, sync: Callable[[int], None]) -> None:
        try:
            sync(self._fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Bring the file to the disk and say so."""
        self._sync(os.fsync)
        self.abandon()
        self.finished(self.file, self.results.record())

    def abandon(self) -> None:
        """Close the file; what was written stays under the temporary name."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Stream:
    """State that the threads of one `run` share."""

    def __init__(self, files: Sequence[OutFile], open_sink: Callable[[OutFile], Sink], entries: Sequence[Entry], reader: Reader, ahead: int) -> None:
        self.work = [(file, item) for file in files for item in file.items]
        self.open_sink, self.entries, self.reader, self.ahead = open_sink, entries, reader, ahead
        self.left = {file.name: len(file.items) for file in files}
        self.sinks: dict[str, Sink] = {}
        self.next = 0
        self.lock = threading.Lock()
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error

    def take(self) -> Iterator[tuple[OutFile, Item, Sink]]:
        while True:
            with self.lock:
                if self.error is not None or self.next >= len(self.work):
                    return
                at, self.next = self.next, self.next + 1
                file, item = self.work[at]
                if file.name not in self.sinks:
                    self.sinks[file.name] = self.open_sink(file)
                sink = self.sinks[file.name]
            if at + self.ahead < len(self.work):
                later = self.work[at + self.ahead][1]
                self.reader.ahead(later, self.entries[later.pieces[0].entry])
            yield file, item, sink

    def finished_item(self, file: OutFile) -> bool:
        """Count an item; True for the last one of its file."""
        with self.lock:
            self.left[file.name] -= 1
            return self.left[file.name] == 0


@contextlib.contextmanager
def ahead_of(files: Sequence[OutFile], entries: Sequence[Entry], reader: Reader) -> Iterator[None]:
    """Have the system load the first of the source while something else is done: the start of a GPU takes seconds."""
    stop = threading.Event()

    def load() -> None:
        left = _AHEAD
        for item in (item for file in files for item in file.items):
            left -= item.nbytes
            if left < 0 or stop.is_set():
                return
            with contextlib.suppress(ConvertError, OSError):  # whoever reads it will say so
                reader.ahead(item, entries[item.pieces[0].entry])

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def run(
    files: Sequence[OutFile],
    open_sink: Callable[[OutFile], Sink],
    worker: Callable[[], Worker],
    entries: Sequence[Entry],
    reader: Reader,
    threads: int,
    progress: Callable[[int], object],
) -> None:
    """Do all items of the files.

    Args:
        files: what is to be made, each with at least one item.
        open_sink: called once a file, when its first item begins.
        worker: makes what one thread works with.
        entries: of the plan.
        reader: of the source.
        threads: how many items are worked on at once.
        progress: called with the bytes of source of each item that is done.

    Raises:
        ConvertError: the first error of any thread; all others have stopped then.
    """
    state = _Stream(files, open_sink, entries, reader, threads)
    before = torch.get_num_threads()

    def work(finishers: ThreadPoolExecutor) -> None:
        try:
            torch.set_num_threads(1)  # of this thread; the threads fill the cores
            own = worker()
            for file, item, sink in state.take():
                for done in own.do(item):
                    sink.put(done)
                progress(item.nbytes)
                if state.finished_item(file):
                    finishers.submit(finish, sink)
        except BaseException as error:  # raised by `run`
            state.fail(error)

    def finish(sink: Sink) -> None:
        try:
            sink.finish()
        except BaseException as error:  # raised by `run`
            state.fail(error)

    with ThreadPoolExecutor(2, "finish") as finishers, ThreadPoolExecutor(threads, "convert") as pool:
        try:
            for future in [pool.submit(work, finishers) for _ in range(threads)]:
                future.result()
        except BaseException as error:  # the user's interrupt
            state.fail(error)
            raise
        finally:
            pool.shutdown(wait=True)
            finishers.shutdown(wait=True)
            torch.set_num_threads(before)
            if state.error is not None:
                for sink in state.sinks.values():
                    sink.abandon()
    if state.error is not None:
        raise state.error


def check_file(path: Path, file: OutFile, record: dict[str, Any], entries: Sequence[Entry], pool: ThreadPoolExecutor) -> bool:
    """Whether a finished file still holds what its record says; every byte is read."""
    try:
        if path.stat().st_size != file.nbytes:
            return False
        found: dict[str, dict[int, Any]] = {}
        for item in file.items:
            for piece in item.pieces:
                for out, start, stop in output_ranges(entries[piece.entry], piece.start, piece.stop):
                    future = pool.submit(_hash, path, file.offsets[out.name] + start, stop - start)
                    found.setdefault(out.name, {})[start] = future
        with open(path, "rb") as f:
            if f.read(len(file.header)) != file.header:
                return False
        digests = {name: digest_of_cuts([d.result() for _, d in sorted(parts.items())]) for name, parts in found.items()}
        return digests == record.get("digests")
    except OSError:
        return False


def _hash(path: Path, at: int, n: int) -> bytes:
    with open(path, "rb", buffering=0) as f:
        f.seek(at)
        digest = hashlib.sha256()
        while n:
            raw = f.read(min(n, 1 << 20))
            if not raw:
                break
            digest.update(raw)
            n -= len(raw)
        return digest.digest()


def cut_bytes(entry: Entry) -> dict[str, int]:
    """Bytes of one cut of each tensor that an entry fills, for those with more than one."""
    found = cuts(entry)
    if len(found) == 1:
        return {}
    return {out.name: stop - start for out, start, stop in output_ranges(entry, *found[0])}
