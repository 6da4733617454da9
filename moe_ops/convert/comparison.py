"""A quantized checkpoint of any tool against its source, by value: what `verify --against` does where no manifest says how it was made."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from moe_ops.convert.compute import Reader, dequantized
from moe_ops.convert.conversion import plan_conversion
from moe_ops.convert.pairing import Tensors
from moe_ops.convert.pieces import outputs, stored
from moe_ops.convert.source import Checkpoint, ConvertError
from moe_ops.convert.types import DTYPES, Entry, Options, Part, Source, Weight
from moe_ops.core.formats import as_bytes
from moe_ops.layer.dialects import Dialect, read_scale
from moe_ops.quant.weight_cpu import Sums

#: Relative errors that rounding can explain, in a weight and in a row of it: stochastic rounding and the floor rule stay below 0.05 over many
#: blocks, and the floor rule clips one element by up to an eighth.
ROUNDED, ROW = 0.08, 0.15
#: The same for tensors that are only kept, in another floating dtype perhaps.
KEPT = 0.005


def _part(reader: Reader, source: Source, part: Part) -> torch.Tensor:
    """A piece of a tensor, as stored."""
    shape, at, n = source.shape, source.begin, source.nbytes
    if part.index is not None:
        n //= shape[0]
        at, shape = at + part.index * n, shape[1:]
    raw = torch.empty(n, dtype=torch.uint8)
    reader.read(source, at, raw)
    return replace(part, index=None).view(raw.view(DTYPES[source.dtype]).view(shape))


def _values(reader: Reader, source: Source, part: Part, scale: tuple[Source, Part] | None, dialect: Dialect) -> torch.Tensor:
    """A piece of a tensor in fp32 (other dtypes than floating as they are), quantized weights dequantized."""
    t = _part(reader, source, part)
    if scale is None:
        return t.float() if t.is_floating_point() else t
    assert dialect.format is not None
    shape = (int(t.shape[0]), int(t.shape[1]))
    s = read_scale(_part(reader, *scale), scale[0].name, dialect, shape)
    return dequantized(as_bytes(t), s, dialect.format.name, torch.float32)


def compare_values(found: Checkpoint, tensors: Tensors, against: str | Path, threads: int) -> tuple[list[str], int, Sums]:
    """Compare every tensor of a checkpoint with what the source holds under its name.

    Args:
        found: the checkpoint.
        tensors: its tensors, sorted.
        against: the source.
        threads: tensors looked at at once; each needs its fp32 values twice.

    Returns:
        Problems, number of tensors that agree, sums over all quantized weights.

    Raises:
        ConvertError: a source that cannot be read or planned.
    """
    fmt = tensors.dialect.format
    assert fmt is not None
    quantized = {f"{m}.weight": tensors.scales[m] for m in tensors.weights if m in tensors.scales}
    scales = {s.name for s in quantized.values()}
    source, plan, _ = plan_conversion(against, Options(fmt.name, include=()))
    wanted: dict[str, Entry] = {outputs(e)[0].name: e for e in plan.entries}
    names = [n for n in found.tensors if n not in scales]
    problems = [f"{n!r} is not in the source" for n in names if n not in wanted]
    problems += [f"{n!r} of the source is missing" for n in wanted if n not in found.tensors]
    theirs, ours = Reader(source), Reader(found)

    def look(name: str) -> tuple[str | None, Sums]:
        entry, here = wanted[name], found.tensors[name]
        origin, part = stored(entry)
        scale = (entry.scale, entry.scale_part) if isinstance(entry, Weight) and entry.scale is not None else None
        own = (quantized[name], Part()) if name in quantized else None
        try:
            x = _values(theirs, origin, part, scale, plan.dialect)
            y = _values(ours, here, Part(), own, tensors.dialect)
        except ConvertError as error:
            return str(error), Sums()
        except ValueError as error:
            return f"{here.file}: {name!r}: {error}", Sums()
        if x.shape != y.shape:
            return f"{here.file}: {name!r} has shape {list(y.shape)}, that of the source is {list(x.shape)}", Sums()
        if x.dtype != y.dtype or not x.is_floating_point():
            return (None if torch.equal(x, y) else f"{here.file}: {name!r} is not that of the source"), Sums()
        sums = _difference(x, y)
        bound = ROUNDED if own is not None else KEPT
        if not sums.noise <= bound * bound * sums.signal:
            error = math.sqrt(sums.noise / sums.signal) if sums.signal > 0 else math.inf
            return f"{here.file}: {name!r} differs from that of the source by {error:.3g} of its norm; rounding explains {bound}", Sums()
        if own is not None and (row := _row_that_differs(x, y)) is not None:
            return f"{here.file}: row {row} of {name!r} differs from that of the source by more than {ROW} of its norm", Sums()
        return None, sums if own is not None else Sums()

    total, agree = Sums(), 0
    try:
        with ThreadPoolExecutor(threads) as pool:
            for problem, sums in pool.map(look, [n for n in names if n in wanted]):
                total.add(sums)
                agree += problem is None
                if problem:
                    problems.append(problem)
    finally:
        theirs.close()
        ours.close()
    return problems, agree, total


def _difference(x: torch.Tensor, y: torch.Tensor) -> Sums:
    """Sums in fp64; a value that is no number on one side alone makes the noise NaN, which no bound admits."""
    same = x == y  # infinities among them
    x, y = torch.where(same & ~torch.isfinite(x), 0.0, x).double(), torch.where(same & ~torch.isfinite(y), 0.0, y).double()
    return Sums(float(x.square().sum()), float((x - y).square().sum()), float(y.square().sum()), x.numel())


def _row_that_differs(x: torch.Tensor, y: torch.Tensor) -> int | None:
    """The first row of a quantized weight whose error rounding does not explain, or None."""
    signal, noise = x.square().sum(-1), (x - y).square().sum(-1)
    # elements far below the largest that shares their scale may vanish: half of the smallest step, 2^-9 of the scale, each
    vanished = x.shape[-1] * (float(x.abs().max()) / 448 * 2.0**-10) ** 2 if x.numel() else 0.0
    wrong = (noise > ROW * ROW * signal + vanished).nonzero()
    return int(wrong[0]) if len(wrong) else None
