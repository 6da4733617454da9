"""From the bytes of a piece of the source to the bytes of the result, on the CPU or a GPU: the same bytes on both."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from moe_ops.convert.pieces import Item, Piece, contiguous, first_byte, matrix, output_ranges, stored
from moe_ops.convert.quantizers import quantizer_for
from moe_ops.convert.source import Checkpoint, ConvertError
from moe_ops.convert.types import DTYPES, FLOATS, Entry, Options, Output, Source, TensorPlan, Weight
from moe_ops.core.formats import MIN_SCALE, as_bytes, ceil_div
from moe_ops.layer.dialects import read_scale
from moe_ops.quant.dequantize import dequantize_ref
from moe_ops.quant.stochastic import key_of
from moe_ops.quant.weight_cpu import Sums, dequantize_rows_cpu

#: Elements whose fp32 values exist at once where a quantized source is rounded again.
_AGAIN = 1 << 20
#: Bits of infinity.
_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


@dataclass
class Done:
    """What became of one piece.

    Attributes:
        piece: which one.
        parts: (tensor of the result, first byte in it, bytes).
        sums: errors, of a weight that was rounded.
        exact: the bytes of a quantized source were kept.
    """

    piece: Piece
    parts: list[tuple[Output, int, memoryview]]
    sums: Sums = field(default_factory=Sums)
    exact: bool = False


class Reader:
    """Reads byte ranges of the source's files; for all threads."""

    def __init__(self, source: Checkpoint) -> None:
        self.path = source.path
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()

    def _file(self, name: str) -> int:
        with self._lock:
            if name not in self._files:
                try:
                    self._files[name] = os.open(self.path / name, os.O_RDONLY)
                except OSError as error:
                    raise ConvertError(f"convert: cannot read {self.path / name}: {error.strerror}") from error
            return self._files[name]

    def read(self, source: Source, at: int, into: torch.Tensor) -> None:
        """Fill `into` (uint8, contiguous, CPU) with the bytes of the source's file from `at` on.

        Raises:
            ConvertError: a read error, or the file ends before them.
        """
        view = into.numpy().data
        done = 0
        while done < len(view):
            try:
                n = os.preadv(self._file(source.file), [view[done:]], at + done)
            except OSError as error:
                raise ConvertError(f"convert: cannot read tensor {source.name!r} of {self.path / source.file}: {error.strerror}") from error
            if n == 0:
                raise ConvertError(f"convert: {self.path / source.file} ends within tensor {source.name!r}; it was truncated while being read")
            done += n

    def ahead(self, item: Item, entry: Entry) -> None:
        """Ask the system to load what an item will read."""
        if not hasattr(os, "posix_fadvise"):
            return
        source, part = stored(entry)
        at = source.begin if not contiguous(part) else first_byte(source, part)
        os.posix_fadvise(self._file(source.file), at, item.nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()


class Scales:
    """The scales of the weight that is being cut: read and looked at once, not by every piece; for all threads."""

    def __init__(self) -> None:
        self._entry: int | None = None
        self._found: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._lock = threading.Lock()

    def of(self, entry: int, read: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `read` gives for an entry of the plan, remembered until another entry comes."""
        with self._lock:
            if self._found is None or self._entry != entry:
                self._found = None  # the old ones go first
                self._entry, self._found = entry, read()
            return self._found


class Worker:
    """Does items, one after the other; for one thread.

    Args:
        plan: what becomes of all tensors.
        options: of the conversion.
        reader: of the source.
        gpu: held while the GPU computes, so that the memory there is that of one item.
        scales: of the weights that are cut.
    """

    def __init__(self, plan: TensorPlan, options: Options, reader: Reader, gpu: threading.Lock, scales: Scales) -> None:
        self.plan, self.options, self.reader, self.gpu, self.scales = plan, options, reader, gpu, scales
        self.quantize = quantizer_for(options)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._back = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def _space(self, n: int) -> torch.Tensor:
        if self._buffer.numel() < n:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._buffer = torch.empty(n, dtype=torch.uint8, pin_memory=self.quantize.device.type == "cuda")
        return self._buffer[:n]

    def do(self, item: Item) -> Iterator[Done]:
        """The results of an item's pieces, each valid until the next is asked for.

        Raises:
            ConvertError: an unreadable or damaged tensor; the text names it and its file.
        """
        entry = self.plan.entries[item.pieces[0].entry]
        source, part = stored(entry)
        if contiguous(part):
            (piece,) = item.pieces
            raw = self._space(item.nbytes)
            width = item.nbytes // max(1, piece.stop - piece.start)
            self.reader.read(source, first_byte(source, part) + piece.start * width, raw)
            if isinstance(entry, Weight):
                rows = raw.view(DTYPES[source.dtype]).view(piece.stop - piece.start, matrix(entry)[1])
                yield self._weight(entry, piece, rows)
            else:
                self._no_nan(source, raw)
                yield Done(piece, [(entry.data, piece.start, _bytes(raw))])
            return
        raw = self._space(item.nbytes)
        shape = source.shape if part.index is None else source.shape[1:]
        self.reader.read(source, source.begin + (part.index or 0) * item.nbytes, raw)
        slab = raw.view(DTYPES[source.dtype]).view(shape)
        there = slab.to(self.quantize.device)  # strided parts become contiguous over there
        for piece in item.pieces:
            entry = self.plan.entries[piece.entry]
            part = replace(entry.part, index=None)
            if isinstance(entry, Weight):
                yield self._weight(entry, piece, part.view(there))
            else:
                kept = part.view(slab).contiguous().view(-1).view(torch.uint8)
                self._no_nan(source, kept)
                yield Done(piece, [(entry.data, piece.start, _bytes(kept))])

    def _no_nan(self, source: Source, raw: torch.Tensor) -> None:
        """NaN in a kept matrix is damage; buffers of other shapes may hold anything."""
        if source.dtype in FLOATS and len(source.shape) > 1 and raw.numel():
            bits = raw.view(torch.int32 if source.dtype == "F32" else torch.int16)
            # magnitudes in the order of their bits; NaN is above infinity
            if int((bits & torch.iinfo(bits.dtype).max).max()) > _INFINITY[source.dtype]:
                raise ConvertError(f"convert: tensor {source.name!r} of {self.reader.path / source.file} holds NaN")

    def _weight(self, entry: Weight, piece: Piece, rows: torch.Tensor) -> Done:
        if self.quantize.device.type == "cpu":
            return self._transform(entry, piece, rows)
        with self.gpu:
            return self._transform(entry, piece, rows.to(self.quantize.device))

    def _transform(self, entry: Weight, piece: Piece, rows: torch.Tensor) -> Done:
        exact, sums = False, Sums()
        if entry.scale is None:
            data, scale, sums = self.quantize(rows, self._key(entry), piece.start * rows.shape[-1])
            found = [data, scale]
        else:
            rows = as_bytes(rows)
            if rows.numel() and int((rows & 0x7F).max()) == 0x7F:
                raise ConvertError(f"convert: tensor {entry.weight.name!r} of {self.reader.path / entry.weight.file} holds NaN")
            cut = piece.stop - piece.start < matrix(entry)[0]
            scale, kept = self.scales.of(piece.entry, lambda: self._scales(entry)) if cut else self._scales(entry)
            part = _rows(scale, entry.fmt, piece)
            if entry.action == "dequantize":
                found = [dequantized(rows, part, entry.fmt, torch.bfloat16)]
            elif kept is not None:
                exact, found = True, [rows.contiguous(), _rows(kept, self.options.format, piece).contiguous()]
            else:
                *found, sums = self._again(entry, piece, rows, part)
        if sums.not_finite:
            raise ConvertError(f"convert: tensor {entry.weight.name!r} of {self.reader.path / entry.weight.file} holds NaN or infinity")
        ranges = output_ranges(entry, piece.start, piece.stop)
        parts = [(out, start, self._bytes(t, i)) for i, ((out, start, _), t) in enumerate(zip(ranges, found, strict=True))]
        return Done(piece, parts, sums, exact)

    def _bytes(self, t: torch.Tensor, i: int) -> memoryview:
        """The bytes of a result; those of a GPU come through pinned buffers of this thread."""
        if t.device.type == "cpu":
            return _bytes(t)
        t = t.contiguous().view(-1).view(torch.uint8)
        if self._back[i].numel() < t.numel():
            self._back[i] = torch.empty(t.numel(), dtype=torch.uint8, pin_memory=True)
        into = self._back[i][: t.numel()]
        into.copy_(t)  # waits until it is there
        return _bytes(into)

    def _key(self, entry: Weight) -> int:
        seed = self.options.stochastic
        return -1 if seed is None else key_of(seed, entry.data.name)

    def _scales(self, entry: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The whole scale of an entry's weight, and that of the result under which the elements keep their bytes, where there is one."""
        scale = self._scale(entry)
        return scale, None if entry.action == "dequantize" else exact_scale(scale, entry.fmt, self.options, matrix(entry))

    def _scale(self, entry: Weight) -> torch.Tensor:
        """The whole scale of an entry's weight: fp32 [ceil(N / 128), ceil(K / 128)] or bytes [N, K / 32]."""
        source = entry.scale
        assert source is not None
        raw = torch.empty(source.nbytes, dtype=torch.uint8)
        if entry.scale_part.index is not None:
            raw = raw[: source.nbytes // source.shape[0]]
        self.reader.read(source, source.begin + (entry.scale_part.index or 0) * raw.numel(), raw)
        shape = source.shape if entry.scale_part.index is None else source.shape[1:]
        part = entry.scale_part
        stored_scale = replace(part, index=None).view(raw.view(DTYPES[source.dtype]).view(shape))
        try:
            return read_scale(stored_scale, f"{source.name} of {source.file}", self.plan.dialect, matrix(entry)).to(self.quantize.device)
        except ValueError as error:
            raise ConvertError(str(error).replace("checkpoint:", "convert:", 1)) from error

    def _again(self, entry: Weight, piece: Piece, rows: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        """Rows of a quantized source rounded again, from fp32."""
        k = rows.shape[-1]
        step = max(128, _AGAIN // k // 128 * 128)
        data, scales, sums = [], [], Sums()
        for start in range(0, rows.shape[0], step):
            part = Piece(piece.entry, start, min(start + step, rows.shape[0]))
            values = dequantized(rows[part.start : part.stop], _rows(scale, entry.fmt, part), entry.fmt, torch.float32)
            d, s, found = self.quantize(values, self._key(entry), (piece.start + start) * k)
            data.append(d.clone())
            scales.append(s.clone())
            sums.add(found)
        return torch.cat(data), torch.cat(scales), sums


def _bytes(t: torch.Tensor) -> memoryview:
    return t.contiguous().view(-1).view(torch.uint8).cpu().numpy().data


def _rows(scale: torch.Tensor, fmt: str, piece: Piece) -> torch.Tensor:
    """Scales of a piece's rows."""
    per = 128 if fmt == "fp8_block" else 1
    return scale[piece.start // per : ceil_div(piece.stop, per)]


def dequantized(rows: torch.Tensor, scale: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    """Values of rows (uint8 [N, K], from a tile of 128 rows on) under their scales."""
    if rows.device.type == "cpu":
        return dequantize_rows_cpu(rows, scale, fmt).to(dtype)
    return dequantize_ref(rows.contiguous(), scale.contiguous(), fmt, 128 if fmt == "fp8_block" else 1, 1, dtype)


def powers_of_two(scale: torch.Tensor) -> bool:
    """Whether E8M0 bytes can hold fp32 scales exactly: all are powers of two, 2^-127 or more."""
    bits = scale.contiguous().view(torch.int32)
    return bool((((bits & 0x7FFFFF) == 0) & (bits >= 0x00800000) | (bits == 0x00400000)).all())


def exact_scale(scale: torch.Tensor, fmt: str, options: Options, shape: tuple[int, int]) -> torch.Tensor | None:
    """The result's scale under which a quantized weight keeps its bytes, or None where there is none.

    Args:
        scale: of the whole weight, as `read_scale` gives it.
        fmt: format of the source.
        options: of the conversion.
        shape: (N, K) of the weight.
    """
    n, k = shape
    if fmt == options.format:
        if fmt == "mxfp8":
            return scale
        # scales of fp8_block are normal numbers, and powers of two where its readers were promised them
        return scale if bool((scale >= MIN_SCALE).all()) and (options.rule == "fp32" or powers_of_two(scale)) else None
    if fmt == "fp8_block":
        if not powers_of_two(scale):
            return None
        byte = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        return byte.repeat_interleave(128, 0)[:n].repeat_interleave(4, 1)[:, : k // 32]
    # bytes that agree over every tile of 128 x 128
    tiles_n, tiles_k = ceil_div(n, 128), ceil_div(k, 128)
    corner = scale[::128, ::4]
    if not torch.equal(corner.repeat_interleave(128, 0)[:n].repeat_interleave(4, 1)[:, : k // 32], scale) or bool((corner == 0).any()):
        return None
    assert tuple(corner.shape) == (tiles_n, tiles_k)
    return (corner.to(torch.int32) << 23).view(torch.float32).clamp_min(MIN_SCALE)
