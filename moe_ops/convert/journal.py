"""What a conversion has done so far, so that a run killed at any moment can go on; and durable files.

The journal is a file of JSON lines: first a fingerprint of everything that decides the bytes of the result, then a record for each file that
was finished. A line counts once it is whole; a torn one is dropped. It exists only while the result is not published.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from moe_ops.convert.source import STATE, ConvertError


def sync_folder(path: Path) -> None:
    """Make renames within a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:  # some network file systems refuse it for folders
        pass
    finally:
        os.close(fd)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file so that its name never stands for half of it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def differences(old: Any, new: Any, at: str = "") -> list[str]:
    """Where two fingerprints differ, each as text."""
    if isinstance(old, dict) and isinstance(new, dict):
        out = []
        for key in sorted({*old, *new}):
            out += differences(old.get(key), new.get(key), f"{at}.{key}" if at else str(key))
        return out
    return [] if old == new else [f"{at} was {old!r} and is {new!r}"]


class Journal:
    """The journal of one destination, which it locks.

    Args:
        destination: folder of the result; it is made.
        fingerprint: of this conversion, as JSON.

    Attributes:
        done: file of the result -> its record.
        fresh: no conversion had begun here.

    Raises:
        ConvertError: another process converts into the folder, or an unfinished conversion of other options or another source lies there.
    """

    def __init__(self, destination: Path, fingerprint: dict[str, Any]) -> None:
        self.folder = destination / STATE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConvertError(f"convert: cannot make {destination}: {error.strerror}") from error
        self._lock = FileLock(self.folder / "lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConvertError(f"convert: another process is converting into {destination}") from None
        except OSError as error:
            raise ConvertError(f"convert: cannot lock {destination}: {error.strerror}") from error
        if not (self.folder / "lock").exists():  # removed between the opening and the locking of it
            self._lock.release()
            raise ConvertError(f"convert: another process has just finished with {destination}; run the command again")
        self._path = self.folder / "journal.jsonl"
        self.done: dict[str, dict[str, Any]] = {}
        self.fresh = True
        try:
            self._open(json.loads(json.dumps(fingerprint)), destination)
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        except BaseException:
            self.close()
            raise

    def _failed(self, error: OSError) -> ConvertError:
        return ConvertError(f"convert: cannot write {self._path}: {error.strerror}; the same command goes on from here once it can be written")

    def _open(self, fingerprint: dict[str, Any], destination: Path) -> None:
        lines = self._whole_lines()
        self.fresh = not lines
        if lines:
            changed = differences(lines[0], fingerprint)
            if changed:
                more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
                raise ConvertError(
                    f"convert: {destination} holds an unfinished conversion of other options or of another source: {'; '.join(changed[:3])}{more}; "
                    f"finish it with the old ones, remove the folder, or choose another"
                )
            self.done = {record["file"]: record for record in lines[1:]}
        elif any(p != self.folder for p in destination.iterdir()):
            return  # whatever lies there is not of a conversion that began; nothing is recorded
        # written anew: a torn line at the end would spoil the next
        write_file(self._path, b"".join(_line(r) for r in (fingerprint, *self.done.values())))
        self._file = open(self._path, "ab")  # noqa: SIM115 (open as long as the journal)

    def _whole_lines(self) -> list[dict[str, Any]]:
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return []
        lines = []
        for line in raw.split(b"\n")[:-1]:
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        return lines

    def add(self, record: dict[str, Any]) -> None:
        """Record a finished file, durably; `record["file"]` names it."""
        try:
            self._file.write(_line(record))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        self.done[record["file"]] = record

    def remove(self) -> None:
        """The result is published: the journal goes."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Release the destination."""
        with contextlib.suppress(AttributeError, OSError):
            self._file.close()
        self._lock.release()


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
