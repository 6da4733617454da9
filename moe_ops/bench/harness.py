"""One way to measure every op: check against the reference first, then time CUDA graphs over rotating copies, then write JSON rows.

A benchmark file (benchmarks/<part>/bench_<stem>.py) reads

    import torch
    from moe_ops import quantize
    from moe_ops.bench.harness import Bench
    from moe_ops.core.numerics import uneven
    from moe_ops.quant.quantize import quantize_ref

    bench = Bench("quantize")
    for rows, hidden in bench.sizes(gpu=[(64, 7168), (8192, 7168)], cpu=[(4, 256)]):

        def make(copy: int):                                   # inputs number `copy`, outside the timing
            x = uneven((rows, hidden), seed=copy).to(bench.device)
            return lambda: quantize(x, "mxfp8")                # what is timed; returns its output

        bench.case(
            f"M={rows} K={hidden}",
            {"triton": make},                                  # several implementations are timed in turns, in one run
            reference=lambda: quantize_ref(uneven((rows, hidden), seed=0).to(bench.device), "mxfp8"),   # result of copy 0
            nbytes=rows * hidden * (2 + 1 + 1 / 32),           # memory traffic of one call
        )
    bench.exit()

- Inputs rotate: as many copies as it takes for 400 MB of traffic (32 at most), so that weights come from memory and not from the L2.
- All calls of a pass are captured in one CUDA graph; implementations take turns, replay by replay. A row holds p20, p50 and p80.
- No time without a right result: the output must match the reference (bytes equal, or `tolerance` on ||out - ref|| / ||ref||) in memory
  that held 0xFF bytes before, and the graph's replay must give the same bytes as the eager call.
- A case may have a goal (`Goal`), which its row is judged by; `benchmarks/goals.py` runs all of those alone.
- With `--jobs N`, N processes first compile and check a part of the cases each, so that this one finds every kernel compiled.
- On a machine without a GPU the `cpu` sizes are checked and nothing is timed or written, so every benchmark file can run as a test.

Command line of every benchmark file: [--only SUBSTRING] [--goals] [--no-time] [--out DIR] [--commit ID] [--reps N] [--jobs N].
"""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_ops.bench.goal import Goal, gain_columns
from moe_ops.bench.launches import launches_of
from moe_ops.bench.provenance import device_folder, device_name, provenance
from moe_ops.bench.roofline import roof_of
from moe_ops.core.numerics import relative_error

T = TypeVar("T")
Call = Callable[[], Any]
Make = Callable[[int], Call]

ROTATE_BYTES = 400e6
MAX_COPIES = 32
#: Calls in one graph: enough for the time of a replay to be far above the clock's step.
MIN_CALLS = 20


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors in a result: a tensor, a tuple or list, a dict, a dataclass such as QTensor or Routing; None is skipped."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, dict):
        return [t for v in out.values() for t in tensors_of(v)]
    if isinstance(out, (tuple, list)):
        return [t for v in out for t in tensors_of(v)]
    if dataclasses.is_dataclass(out):
        return [t for f in dataclasses.fields(out) for t in tensors_of(getattr(out, f.name))]
    return []


def difference(out: Any, ref: Any, tolerance: float = 0.0) -> str | None:
    """None when every tensor of `out` agrees with its counterpart in `ref`, else what differs.

    Args:
        out: result; see `tensors_of`.
        ref: expected result, same structure, on any device.
        tolerance: 0 demands equal bytes; otherwise the bound of ||out - ref|| / ||ref||. Reads the device.
    """
    ours, theirs = tensors_of(out), tensors_of(ref)
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors, expected {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape or (tolerance == 0 and a.dtype != b.dtype):
            return f"tensor {i} is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
        b = b.to(a.device)
        if tolerance == 0:
            same = a.contiguous().flatten().view(torch.uint8) == b.contiguous().flatten().view(torch.uint8)
            if not bool(same.all()):
                return f"tensor {i}: {int((~same).sum())} of {same.numel()} bytes differ"
        else:
            error = relative_error(a, b)
            if math.isnan(error) or error > tolerance:
                return f"tensor {i}: relative error {error:.3g}, allowed {tolerance:.3g}"
    return None


def _dirty(sizes: Sequence[int], device: torch.device) -> None:
    """Leave 0xFF bytes in the allocator's free blocks, so that an unwritten output cannot look right."""
    blocks = [torch.full((n,), 0xFF, dtype=torch.uint8, device=device) for n in sizes if n]
    del blocks


def checked(call: Call, check: Callable[[Any], str | None], device: torch.device) -> str | None:
    """Run `call` in dirty memory; None when `check` accepts its result."""
    sizes = [t.numel() * t.element_size() for t in tensors_of(call())]
    _dirty(sizes, device)
    return check(call())


class _Graph:
    """The calls of one implementation, captured."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls * -(-MIN_CALLS // len(calls))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.first_output = self.calls[0]()
            for call in self.calls[1:]:
                call()
        for _ in range(3):
            self.graph.replay()
        torch.cuda.synchronize()
        self.times: list[float] = []

    def replay(self) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.times.append(start.elapsed_time(end) * 1e-3 / len(self.calls))

    def percentile(self, p: float) -> float:
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(p * len(ordered)))]


def graph_times(impls: dict[str, list[Call]], reps: int = 50) -> dict[str, tuple[float, float, float]]:
    """p20, p50 and p80 in seconds of one call of each implementation, measured in turns on the current GPU.

    Args:
        impls: name -> calls on rotating inputs, as many as it takes to outgrow the L2.
        reps: replays of each implementation's graph.
    """
    graphs = {name: _Graph(calls) for name, calls in impls.items()}
    return _timed(graphs, reps)


def _timed(graphs: dict[str, _Graph], reps: int) -> dict[str, tuple[float, float, float]]:
    for _ in range(reps):
        for graph in graphs.values():
            graph.replay()
    return {name: (g.percentile(0.2), g.percentile(0.5), g.percentile(0.8)) for name, g in graphs.items()}


def host_seconds(call: Call, reps: int = 100) -> float:
    """CPU seconds that one eager call takes to return, the median of three runs; the GPU's work is not waited for."""
    runs = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(reps):
            call()
        runs.append((time.perf_counter() - start) / reps)
        torch.cuda.synchronize()
    return sorted(runs)[1]


def _host_columns(call: Call, *, bare: bool) -> dict[str, float]:
    """Columns about the CPU's work in one eager call; with `bare`, that of the same launches by Triton alone beside it."""
    launches = launches_of(call)
    columns = {"host_us": round(host_seconds(call) * 1e6, 2), "launches": len(launches)}
    if bare:
        launcher = host_seconds(lambda: [launch() for launch in launches]) * 1e6
        columns |= {"launcher_us": round(launcher, 2), "beyond_launcher_us": round(columns["host_us"] - launcher, 2)}
    return columns


def _judged(row: dict[str, Any]) -> str:
    """Goal and verdict of a row."""
    return f"goal {row['goal']}: {row['goal_value']:g}, {'met' if row['goal_met'] else 'MISSED'}"


class Bench:
    """Cases of one op: checked, timed, printed, written. See the module's docstring for a whole benchmark file."""

    def __init__(self, op: str, argv: Sequence[str] | None = None, *, file: str = "") -> None:
        """Read the command line.

        Args:
            op: the op's stem; results go to `<out>/<device>/bench_<op>.json`.
            argv: arguments, default `sys.argv[1:]`.
            file: another stem of the results file.
        """
        parser = argparse.ArgumentParser(prog=f"bench_{op}")
        parser.add_argument("--only", default="", help="run the cases whose name holds this text")
        parser.add_argument("--goals", action="store_true", help="run the cases that have a goal")
        parser.add_argument("--no-time", action="store_true", help="compile and check, time nothing")
        parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
        parser.add_argument("--commit", default="", help="commit to record where git cannot be asked")
        parser.add_argument("--reps", type=int, default=50, help="replays of each graph")
        parser.add_argument("--jobs", type=int, default=0, help="compile and check in so many processes first (on a GPU)")
        parser.add_argument("--part", default="0/1", help="run one group of cases in so many: 2/8 are the groups 2, 10, 18, ..")
        self.args = parser.parse_args(argv)
        self.part, self.parts = map(int, self.args.part.split("/"))
        self.groups: dict[str, int] = {}
        self.op, self.file = op, file or f"bench_{op}"
        self.has_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.has_gpu else "cpu")
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        if self.args.jobs and self.has_gpu:
            self._compile(self.args.jobs)

    def _compile(self, jobs: int) -> None:
        """Run this file's cases in processes that time nothing; what they compile stays in the caches on disk."""
        options = ["--no-time", "--only", self.args.only, *(["--goals"] if self.args.goals else [])]
        command = [sys.executable, sys.argv[0], *options, "--part"]
        running = [subprocess.Popen([*command, f"{i}/{jobs}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(jobs)]
        for process in running:
            output = process.communicate()[0]
            if process.returncode:
                print(output, flush=True)

    def sizes(self, *, gpu: Sequence[T], cpu: Sequence[T]) -> Sequence[T]:
        """The sizes to loop over: `gpu` for measuring, `cpu` (few and small) where there is no GPU and results are only checked."""
        return gpu if self.has_gpu else cpu

    def case(
        self,
        shape: str,
        impls: dict[str, Make],
        *,
        reference: Call | None = None,
        tolerance: float = 0.0,
        check: Callable[[Any], str | None] | None = None,
        nbytes: float,
        flops: float = 0.0,
        memory: str = "copy",
        math: str = "fp8",
        copies: int | None = None,
        goal: Goal | None = None,
        group: str = "",
        **extra: Any,
    ) -> None:
        """Check and time several implementations of one problem, in turns.

        Args:
            shape: name of the case; with op and implementation it is the key of a row.
            impls: implementation name -> make(copy), which builds inputs number `copy` and returns the call to time.
            reference: returns the expected output for copy 0; computed once.
            tolerance: see `difference`.
            check: instead of `reference`: takes the output for copy 0 and returns None or what is wrong.
            nbytes: bytes that one call must move.
            flops: floating-point operations of one call.
            memory: "copy" or "read": the bandwidth that the limit counts with.
            math: "fp8" or "bf16": the rate that the limit counts with.
            copies: input copies to rotate over; default by `nbytes`.
            goal: what one implementation has to reach; a missed one is printed, and is no failure.
            group: name that cases share which compile the same kernels; `--jobs` keeps them in one process. Default: each alone.
            extra: more columns for the rows (config, distribution, ..).

        Raises:
            ValueError: neither or both of `reference` and `check`.
        """
        if self.args.only not in shape or (self.args.goals and goal is None):
            return
        if self.groups.setdefault(group or shape, len(self.groups)) % self.parts != self.part:
            return
        if (reference is None) == (check is None):
            raise ValueError("Bench.case: give one of reference and check")
        if check is None:
            expected = reference() if reference is not None else None
            check = lambda out: difference(out, expected, tolerance)  # noqa: E731
        count = copies or max(1, min(MAX_COPIES, int(-(-ROTATE_BYTES // max(1.0, nbytes)))))
        graphs: dict[str, _Graph] = {}
        host: dict[str, dict[str, float]] = {}
        for impl, make in impls.items():
            label = f"{self.op} {impl} {shape}"
            try:
                first = make(0)
                wrong = checked(first, check, self.device)
            except Exception as failure:  # one implementation that cannot is no reason to lose the rows of the others
                wrong = f"{type(failure).__name__}: {failure}"
            if wrong is not None:
                self._fail(f"{label}: {wrong}")
                continue
            if not self.has_gpu or self.args.no_time:
                print(f"{label}: right ({'not timed' if self.has_gpu else 'no GPU here, no time'})", flush=True)
                continue
            host[impl] = _host_columns(first, bare=goal is not None and goal.figure == "beyond_launcher_us" and impl == goal.impl)
            graph = _Graph([first, *(make(copy) for copy in range(1, count))])
            replayed = difference(graph.first_output, first())
            if replayed is not None:
                self._fail(f"{label}: a graph replay differs from the eager call: {replayed}")
                continue
            graphs[impl] = graph
        limit = None
        roof = roof_of(device_name())
        if roof is not None:
            limit = roof.limit(nbytes, flops, memory=memory, math=math)
        times = _timed(graphs, self.args.reps)
        for impl, (p20, p50, p80) in times.items():
            row = {
                "op": self.op,
                "impl": impl,
                "shape": shape,
                "p20_us": round(p20 * 1e6, 2),
                "p50_us": round(p50 * 1e6, 2),
                "p80_us": round(p80 * 1e6, 2),
                **host[impl],
                "GB_s": round(nbytes / p50 / 1e9, 1),
                "TFLOP_s": round(flops / p50 / 1e12, 1),
                "limit_us": None if limit is None else round(limit * 1e6, 2),
                "of_limit": None if limit is None else round(limit / p50, 3),
                **extra,
                **provenance(self.args.commit),
            }
            if goal is not None:
                row |= goal.columns(row, {name: t[1] * 1e6 for name, t in times.items()})
            self.rows.append(row)
            self._print(row)

    def gain(self, name: str, shapes: Sequence[str], at_least: float) -> None:
        """One row over many cases: the geometric mean of how many times faster than their goals' rivals they are; none unless all were judged.

        Args:
            name: name of the row, as a case's shape.
            shapes: the cases, each with a goal "ratio".
            at_least: what the mean has to reach.
        """
        rows = [r for r in self.rows if r["shape"] in shapes and str(r.get("goal", "")).startswith("ratio")]
        if not rows or len(rows) < len(shapes):
            return
        row = {"op": self.op, "impl": rows[0]["impl"], "shape": name, **gain_columns(rows, at_least), **provenance(self.args.commit)}
        self.rows.append(row)
        print(f"{row['op']} {row['impl']:10} {row['shape']}: {_judged(row)}", flush=True)

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        print(f"FAILED {text}", flush=True)

    def _print(self, row: dict[str, Any]) -> None:
        share = "" if row["of_limit"] is None else f"  {100 * row['of_limit']:5.1f}% of {row['limit_us']} us"
        host = f"  {row['launches']} launches, CPU {row['host_us']} us"
        if "launcher_us" in row:
            host += f" (Triton's launcher alone {row['launcher_us']})"
        goal = f"  {_judged(row)}" if "goal" in row else ""
        print(
            f"{row['op']} {row['impl']:10} {row['shape']:40} {row['p50_us']:9.2f} us ({row['p20_us']} - {row['p80_us']})"
            f"  {row['GB_s']:8.1f} GB/s  {row['TFLOP_s']:7.1f} TFLOP/s{share}{host}{goal}",
            flush=True,
        )

    def write(self) -> Path | None:
        """Merge the rows into the results file (a row replaces the older one of its op, implementation and shape)."""
        if not self.rows:
            return None
        path = self.args.out / device_folder() / f"{self.file}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = json.loads(path.read_text()) if path.exists() else []
        merged = {(r["op"], r["impl"], r["shape"]): r for r in [*rows, *self.rows]}
        path.write_text("[\n" + ",\n".join(json.dumps(r) for r in merged.values()) + "\n]\n")
        return path

    def exit(self) -> None:
        """Write the rows and end the process: exit status 1 when a case failed its check."""
        path = self.write()
        judged = [r for r in self.rows if "goal" in r]
        if judged:
            missed = "".join(f"\n  missed: {r['op']} {r['impl']} {r['shape']}: {_judged(r)}" for r in judged if not r["goal_met"])
            print(f"{self.op}: {sum(r['goal_met'] for r in judged)} of {len(judged)} goals met{missed}")
        if path is not None:
            print(f"wrote {path}")
        sys.exit(1 if self.failures else 0)
