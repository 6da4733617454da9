"""The work of a conversion, cut into pieces of bounded size, and where each byte of the result goes.

A piece is some rows of one entry of the plan; its bytes go to fixed places of a fixed file, so pieces can be done in any order, on any thread,
and done again. Every tensor of the result is hashed in the same cuts: the SHA-256 of its bytes, or of the SHA-256 of its cuts where there are
more than one.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_ops.convert.source import Checkpoint, ConvertError
from moe_ops.convert.types import DTYPES, Entry, Keep, Output, Part, Source, TensorPlan, Weight

#: Bytes of source that one piece reads, about; part of the manifest's meaning, because tensors are hashed in these cuts.
PIECE = 16 << 20


@dataclass(frozen=True)
class Piece:
    """Rows start .. stop of the result of an entry (bytes start .. stop for a `Keep`)."""

    entry: int
    start: int
    stop: int


@dataclass(frozen=True)
class Item:
    """Pieces that one worker does together because they read the same bytes: the gate and the up rows of an interleaved expert.

    Attributes:
        pieces: in the plan's order.
        file: the file that they go to.
        nbytes: bytes of source that they read.
    """

    pieces: tuple[Piece, ...]
    file: str
    nbytes: int


@dataclass
class OutFile:
    """One file of the result.

    Attributes:
        name: its name.
        header: its first bytes, up to the first tensor.
        offsets: tensor -> where its bytes begin.
        tensors: in the order of their bytes.
        items: the work that fills it.
    """

    name: str
    header: bytes
    offsets: dict[str, int]
    tensors: list[Output]
    items: list[Item] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(t.nbytes for t in self.tensors)


def stored(entry: Entry) -> tuple[Source, Part]:
    """The source tensor that an entry reads, and which part of it."""
    return (entry.weight if isinstance(entry, Weight) else entry.source), entry.part


def outputs(entry: Entry) -> list[Output]:
    """Tensors of the result that an entry fills: the data first, then the scale."""
    scale = entry.data_scale if isinstance(entry, Weight) else None
    return [entry.data] if scale is None else [entry.data, scale]


def matrix(entry: Entry) -> tuple[int, int]:
    """(N, K) of a weight's result: leading dimensions count as rows."""
    *lead, k = entry.data.shape
    return math.prod(lead), k


def contiguous(part: Part) -> bool:
    """Whether the elements of a part lie in one run of bytes."""
    return not part.transposed and (part.step == 1 or part.rows in (0, 1))


def first_byte(source: Source, part: Part) -> int:
    """Where in its file a contiguous part begins."""
    shape, at = source.shape, 0
    if part.index is not None:
        at, shape = part.index * math.prod(shape[1:]), shape[1:]
    if part.rows is not None:
        at += part.start * math.prod(shape[1:])
    return source.begin + at * DTYPES[source.dtype].itemsize


def rows_of_a_piece(entry: Weight) -> int:
    """Rows in one piece of a weight: a multiple of 128, so that no tile is cut."""
    n, k = matrix(entry)
    row = max(1, k * DTYPES[entry.weight.dtype].itemsize)
    return n if not contiguous(entry.part) else max(128, PIECE // row // 128 * 128)


def cuts(entry: Entry) -> list[tuple[int, int]]:
    """The pieces of an entry as (start, stop)."""
    if isinstance(entry, Weight):
        total, step = matrix(entry)[0], rows_of_a_piece(entry)
    else:
        total = entry.data.nbytes
        step = PIECE if contiguous(entry.part) else total
    return [(a, min(a + step, total)) for a in range(0, total, max(1, step))] or [(0, 0)]


def output_ranges(entry: Entry, start: int, stop: int) -> list[tuple[Output, int, int]]:
    """(tensor, first byte, last byte) of the result of a piece, in the tensors of `outputs`."""
    if isinstance(entry, Keep):
        return [(entry.data, start, stop)]
    n, k = matrix(entry)
    width = k * DTYPES[entry.data.dtype].itemsize
    found = [(entry.data, start * width, stop * width)]
    if entry.data_scale is not None:
        rows = entry.data_scale.shape[0]
        per, columns = (1 if rows == n else 128), entry.data_scale.nbytes // max(1, rows)
        found.append((entry.data_scale, -(-start // per) * columns, -(-stop // per) * columns))
    return found


def items_of(entries: Sequence[Entry]) -> list[Item]:
    """All work, in the plan's order."""
    items: list[Item] = []
    slab: list[Piece] = []
    shared: tuple[str, int | None] | None = None

    def close() -> None:
        if slab:
            source, part = stored(entries[slab[0].entry])
            size = source.nbytes // (source.shape[0] if part.index is not None else 1)
            items.append(Item(tuple(slab), source.file, size))
            slab.clear()

    for i, entry in enumerate(entries):
        source, part = stored(entry)
        key = (source.name, part.index)
        if contiguous(part):
            close()
            shared = None
            row = source.nbytes // max(1, math.prod(source.shape)) * (matrix(entry)[1] if isinstance(entry, Weight) else 1)
            for start, stop in cuts(entry):
                size = (stop - start) * (row if isinstance(entry, Weight) else 1)
                items.append(Item((Piece(i, start, stop),), source.file, size))
            continue
        if key != shared:
            close()
        shared = key
        slab += [Piece(i, start, stop) for start, stop in cuts(entry)]
    close()
    return items


def header_bytes(tensors: Sequence[Output], metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file that holds these tensors in this order, and where each begins in the file."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    places = {}
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        places[t.name] = at
        at += t.nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw, {name: 8 + len(raw) + place for name, place in places.items()}


def layout(source: Checkpoint, plan: TensorPlan, metadata: dict[str, str]) -> list[OutFile]:
    """The files of the result, with the names of the source's and the work that fills them.

    Larger elements come first in a file, so that every tensor is aligned to its own.

    Raises:
        ConvertError: two entries write one name.
    """
    per_file: dict[str, list[Output]] = defaultdict(list)
    seen: dict[str, str] = {}
    for entry in plan.entries:
        origin = stored(entry)[0]
        for out in outputs(entry):
            if out.name in seen:
                raise ConvertError(f"convert: tensors {seen[out.name]!r} and {origin.name!r} would both become {out.name!r}")
            seen[out.name] = origin.name
            per_file[origin.file].append(out)
    files = []
    for name in source.files:
        tensors = sorted(per_file[name], key=lambda t: -DTYPES[t.dtype].itemsize)
        if not tensors:
            continue
        header, offsets = header_bytes(tensors, {**source.metadata[name], "format": "pt", **metadata})
        files.append(OutFile(name, header, offsets, tensors))
    by_name = {f.name: f for f in files}
    for item in items_of(plan.entries):
        by_name[item.file].items.append(item)
    return files


def digest_of_cuts(cut_digests: Sequence[bytes]) -> str:
    """Hash of a tensor from the hashes of its cuts."""
    return cut_digests[0].hex() if len(cut_digests) == 1 else hashlib.sha256(b"".join(cut_digests)).hexdigest()
