"""What a conversion did: counts, sizes and errors, for people, machines and the model card."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_ops.convert.source import Checkpoint
from moe_ops.convert.types import Entry, Keep, Options, TensorPlan, Weight
from moe_ops.quant.weight_cpu import Sums


@dataclass(frozen=True)
class Error:
    """Error of one weight of the result against the source.

    Attributes:
        sqnr_db: signal to quantization noise, 10 * log10(sum x^2 / sum (x - y)^2); infinite where nothing was lost.
        cosine: cosine between x and y.
        relative: ||x - y|| / ||x||.
        exact: the elements kept their bytes.
    """

    sqnr_db: float
    cosine: float
    relative: float
    exact: bool = False

    def as_json(self) -> dict[str, Any]:
        """Six significant digits; an infinite SQNR is null."""
        sqnr = None if math.isinf(self.sqnr_db) else round(self.sqnr_db, 4)
        return {"sqnr_db": sqnr, "cosine": float(f"{self.cosine:.8f}"), "relative_error": float(f"{self.relative:.5e}"), "exact": self.exact}


def error_of(sums: Sums, exact: bool = False) -> Error:
    """The measures that sums give."""
    if exact or sums.noise == 0.0:
        return Error(math.inf, 1.0, 0.0, exact)
    if sums.signal == 0.0:
        return Error(-math.inf, 0.0, math.inf)
    product = (sums.signal + sums.result - sums.noise) / 2
    cosine = product / math.sqrt(sums.signal * sums.result) if sums.result > 0.0 else 0.0
    ratio = sums.noise / sums.signal
    return Error(-10.0 * math.log10(ratio), min(1.0, cosine), math.sqrt(ratio))


def describe_options(options: Options) -> dict[str, Any]:
    """The options that decide the bytes of a result, defaults filled in."""
    return {
        "format": options.format,
        "layout": options.layout,
        "rounding": options.rule,
        "stochastic": options.stochastic,
        "include": list(options.include),
        "exclude": list(options.exclude),
        "only": options.only,
    }


def held_in(plan: TensorPlan) -> str:
    """How the source holds the weights that are quantized: its dialect, or their dtypes."""
    dtypes = sorted({e.fmt for e in plan.entries if isinstance(e, Weight)})
    return plan.dialect.name if plan.dialect.format is not None else " and ".join(dtypes)


def kind_of(entry: Entry) -> str:
    """What happens to an entry, in a word."""
    return "kept" if isinstance(entry, Keep) else {"quantize": "quantized", "reencode": "reencoded", "dequantize": "dequantized"}[entry.action]


@dataclass
class Report:
    """The outcome of `convert`.

    Attributes:
        source: name of the source.
        destination: folder of the result.
        options: as asked for.
        plan: what became of each tensor.
        files: file of the result -> its bytes.
        bytes_in: bytes of the source's tensors.
        sums: entry number -> errors as the journal holds them.
        left_out: files of the source that were not copied.
        dry_run: nothing was written.
        resumed: files that an earlier run had finished.
        bytes_done: bytes of the source that this run converted.
        already_complete: the result was there before this run, which verified it and wrote nothing.
        seconds: how long this run took.
        cpu_seconds: of all cores together.
    """

    source: str
    destination: str
    options: Options
    plan: TensorPlan
    files: dict[str, int]
    bytes_in: int
    sums: dict[int, list[Any]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    dry_run: bool = False
    resumed: tuple[str, ...] = ()
    bytes_done: int = 0
    already_complete: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def bytes_out(self) -> int:
        """Bytes of the result's weight files."""
        return sum(self.files.values())

    def errors(self) -> dict[str, Error]:
        """Name of a weight -> its error, in the plan's order."""
        out = {}
        for i, entry in enumerate(self.plan.entries):
            if i in self.sums and isinstance(entry, Weight):
                signal, noise, result, count, exact = self.sums[i]
                out[entry.data.name] = error_of(Sums(signal, noise, result, count), exact)
        return out

    def overall(self) -> Error | None:
        """The error of all rounded weights as one; None where none was rounded."""
        total = Sums()
        for signal, noise, result, count, exact in self.sums.values():
            if not exact:
                total.add(Sums(signal, noise, result, count))
        return error_of(total) if total.count else None

    def counts(self) -> dict[str, int]:
        """How many tensors of the result were quantized, reencoded (exactly or not), dequantized and kept."""
        out: dict[str, int] = dict.fromkeys(("quantized", "reencoded", "dequantized", "kept"), 0)
        for entry in self.plan.entries:
            out[kind_of(entry)] += 1
        return out

    def exact(self) -> int:
        """How many quantized weights of the source kept the bytes of their elements."""
        return sum(1 for s in self.sums.values() if s[4])

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        overall = self.overall()
        return {
            "source": self.source,
            "destination": self.destination,
            "dry_run": self.dry_run,
            "already_complete": self.already_complete,
            "options": {**describe_options(self.options), "device": self.options.device},
            "family": self.plan.family,
            "source_dialect": self.plan.dialect.name,
            "tensors": self.counts(),
            "reencoded_exactly": self.exact(),
            "bytes_in": self.bytes_in,
            "bytes_done": self.bytes_done,
            "bytes_out": self.bytes_out,
            "files": self.files,
            "resumed": list(self.resumed),
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "kept": {e.data.name: e.reason for e in self.plan.entries if isinstance(e, Keep)},
            "dequantized": {e.data.name: e.reason for e in self.plan.entries if isinstance(e, Weight) and e.action == "dequantize"},
            "kept_modules": list(self.plan.kept_modules),
            "left_out": list(self.left_out),
            "warnings": list(self.plan.warnings),
            "error": overall.as_json() if overall else None,
            "errors": {name: e.as_json() for name, e in self.errors().items()},
        }

    def kept(self) -> list[str]:
        """What is kept bit for bit, a line for each reason."""
        groups: dict[str, list[str]] = defaultdict(list)
        for e in self.plan.entries:
            if isinstance(e, Keep):
                groups[e.reason].append(e.data.name)
        return [f"{reason}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}" for reason, names in groups.items()]

    def text(self) -> str:
        """A summary for people."""
        counts = self.counts()
        lines = [f"{self.source} -> {self.destination}: {self.options.format}, rounding {self.options.rule}, layout {self.options.layout}"]
        if self.already_complete:
            lines.append("already complete; every byte of it was verified")
            lines.append("of the source, headers, config and 4 KiB of each tensor were compared (everything: verify --against)")
        parts = [f"{n} {kind}" for kind, n in counts.items() if n]
        lines.append(f"family {self.plan.family or 'unknown'}, source {held_in(self.plan)}; tensors: {', '.join(parts)}")
        if counts["reencoded"] and self.sums:
            lines.append(f"of {counts['reencoded']} reencoded weights {self.exact()} kept the bytes of their elements exactly")
        lines.append(f"{size(self.bytes_in)} -> {size(self.bytes_out)} in {len(self.files)} file{'s' if len(self.files) > 1 else ''}")
        kept = self.kept()
        lines += [f"{'would keep' if self.dry_run else 'kept'}, {line}" for line in kept[:20]]
        if len(kept) > 20:
            lines.append(f"and for {len(kept) - 20} more reasons (--json has every tensor)")
        if self.dry_run:
            lines.append("dry run: nothing was written")
        if self.resumed:
            lines.append(f"went on from an earlier run: {len(self.resumed)} of {len(self.files)} files were finished, and verified byte for byte")
        if self.seconds > 0 and self.bytes_done:
            lines.append(f"{self.seconds:.1f} s, {size(self.bytes_done / self.seconds)}/s of source")
        overall = self.overall()
        if overall is not None:
            lines.append(f"error of rounded weights: SQNR {overall.sqnr_db:.2f} dB, cosine {overall.cosine:.6f}, relative {overall.relative:.4f}")
        if self.left_out:
            lines.append(f"not copied: {', '.join(self.left_out[:5])}{' ..' if len(self.left_out) > 5 else ''}")
        lines += [f"warning: {w}" for w in self.plan.warnings]
        return "\n".join(lines)


def size(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1000
    return f"{n:.2f} TB"


def _by_leaf(errors: Mapping[str, Error]) -> dict[str, list[Error]]:
    groups: dict[str, list[Error]] = defaultdict(list)
    for name, error in errors.items():
        groups[name.removesuffix(".weight").rpartition(".")[2]].append(error)
    return dict(sorted(groups.items()))


def _sqnr(value: float) -> str:
    return "exact" if math.isinf(value) and value > 0 else f"{value:.2f}"


def card(report: Report, source: Checkpoint, version: str, front: Sequence[str]) -> str:
    """The model card of a result. It names no time, so that equal runs give equal bytes.

    Args:
        report: of the conversion.
        source: its source.
        version: of this library.
        front: lines of the source's front matter to keep (its licence, language and task).
    """
    options, counts = report.options, report.counts()
    lines = ["---", f"base_model: {_yaml(source.name)}", "base_model_relation: quantized"]
    lines += [*front, "tags:", f"- {options.format}", *(["- compressed-tensors"] if options.layout == "compressed-tensors" else []), "---", ""]
    lines += [f"# {source.name.rpartition('/')[2]}, {options.format}", ""]
    block = (
        "1 x 32 elements along the input dimension share one E8M0 scale" if options.format == "mxfp8" else "128 x 128 elements share one FP32 scale"
    )
    lines.append(f"Weights of {_link(source)} in FP8 E4M3: {block}. Activations are quantized at run time.")
    elements = "to nearest, ties to even" if options.stochastic is None else f"stochastic, seed {options.stochastic}"
    lines += ["", "| | |", "|---|---|", f"| format | {options.format} |", f"| layout | {options.layout} |", f"| scales | {options.rule} |"]
    lines += [f"| rounding of elements | {elements} |", f"| tool | quantized-moe-ops {version}, `moe-ops convert` |"]
    lines.append(f"| source | {held_in(report.plan)}, {size(report.bytes_in)} |")
    lines.append(f"| weights | {', '.join(f'{n} {kind}' for kind, n in counts.items() if n)}, {size(report.bytes_out)} |")
    if counts["reencoded"]:
        lines.append(f"| elements whose bytes were kept | all of {report.exact()} of {counts['reencoded']} weights |")
    lines += ["", "## Errors against the source", ""]
    overall = report.overall()
    if overall is None:
        lines.append("None: no element was rounded.")
    else:
        lines += ["| modules | weights | SQNR dB, all or mean | worst | lowest cosine | largest relative error |", "|---|---|---|---|---|---|"]
        lines.append(f"| all rounded | | {overall.sqnr_db:.2f} | | {overall.cosine:.6f} | {overall.relative:.4f} |")
        for leaf, found in _by_leaf(report.errors()).items():
            values = [e.sqnr_db for e in found if not math.isinf(e.sqnr_db)]
            mean = sum(values) / len(values) if values else math.inf
            worst = min(e.sqnr_db for e in found)
            low, high = min(e.cosine for e in found), max(e.relative for e in found)
            lines.append(f"| {leaf} | {len(found)} | {_sqnr(mean)} | {_sqnr(worst)} | {low:.6f} | {high:.4f} |")
        lines += ["", "SQNR = 10 log10(sum x^2 / sum (x - y)^2); every weight's own figures are in moe_ops_convert.json."]
    lines += ["", "## Not quantized", ""]
    lines += [f"- `{name}`" for name in report.plan.kept_modules[:100]] or ["Every matrix was quantized."]
    if len(report.plan.kept_modules) > 100:
        lines.append(f"- and {len(report.plan.kept_modules) - 100} more, all named in config.json")
    reasons = sorted({e.reason for e in report.plan.entries if isinstance(e, Keep)})
    lines += ["", f"Tensors that are kept bit for bit: {'; '.join(reasons)}."] if reasons else []
    lines += ["", *(f"Note: {w}." for w in report.plan.warnings)]
    return "\n".join(lines).rstrip() + "\n"


def _yaml(name: str) -> str:
    """A name as YAML reads it back: in quotes, where it is not plainly a hub id or a word."""
    plain = re.fullmatch(r"[A-Za-z][\w.-]*(/[\w.-]+)?", name, re.ASCII)
    word = name.lower() in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
    return name if plain and not word else json.dumps(name, ensure_ascii=False)


def _link(source: Checkpoint) -> str:
    name = source.name
    target = f"https://huggingface.co/{name}" if "/" in name else "README.source.md" if "README.md" in source.others else None
    return f"[{name}]({target})" if target else name
