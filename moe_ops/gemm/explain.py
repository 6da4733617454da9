"""`explain`: which implementation would compute a problem, on this machine or on an architecture as such, and why the others would not."""

from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.core import checks
from moe_ops.core.arch import parse_arch
from moe_ops.core.formats import FORMATS
from moe_ops.gemm.registry import Problem, Where, check_problem, implementations, operations

__all__ = ["explain"]

#: Compute capabilities that the kernels are compiled for.
CAPABILITIES = (89, 90, 100, 103, 120)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Entry:
    """One implementation's answer.

    Attributes:
        name: what `impl=` calls it.
        automatic: whether `impl=None` may take it.
        reason: why it cannot run, or None.
        plan: what it would run; None where it cannot.
    """

    name: str
    automatic: bool
    reason: str | None
    plan: str | None


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; as text, a table.

    Attributes:
        problem: what was asked about.
        where: the device or architecture.
        entries: every implementation, best first.
        chosen: the one that `impl=None` takes, or None.
    """

    problem: Problem
    where: Where
    entries: tuple[Entry, ...]
    chosen: str | None

    def __getitem__(self, name: str) -> Entry:
        """The answer of the implementation called `name`."""
        return {entry.name: entry for entry in self.entries}[name]

    def _place(self) -> str:
        arch = self.where.arch
        if not self.where.cuda and arch.capability:  # MOE_OPS_ARCH: what runs is the CPU's all the same
            return f"{self.where.device} (with the configs of {arch.name})"
        return f"{self.where.device} ({arch.name})"

    def __str__(self) -> str:
        p = self.problem
        form = "masked rows" if p.masked else "gathered rows" if p.gather else "rows"
        groups = "" if p.groups == 1 else f", {p.groups} groups"
        dtype = str(p.out_dtype).removeprefix("torch.")
        lines = [f"{p.op} {p.fmt}: {p.rows} {form}{groups}, N = {p.n}, K = {p.k}, to {dtype}; on {self._place()}"]
        for entry in self.entries:
            if entry.name == self.chosen:
                verdict = f"runs (the first that can): {entry.plan}"
            elif entry.reason is not None:
                verdict = f"cannot: {entry.reason}"
            elif entry.automatic:
                verdict = f"can: {entry.plan}"
            else:
                verdict = f"can, when asked for by name: {entry.plan}"
            lines.append(f"  {entry.name:<10}{verdict}")
        return "\n".join(lines)


def _where(device: torch.device | str | None) -> Where:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    capability = parse_arch(device) if isinstance(device, str) else None
    if capability is not None and capability in CAPABILITIES:
        return Where.of_capability(capability)
    if isinstance(device, str) and (capability is not None or device.startswith("sm")):
        checks.one_of("explain", "device", device, tuple(f"sm{c}" for c in CAPABILITIES))
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"explain: device must be 'cuda', 'cpu' or an architecture such as 'sm90', got {device!r}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"explain: there is no CUDA GPU here; ask about an architecture instead, for example device='sm90' (got {device!r})")
    return Where.of(found)


def explain(
    op: str,
    *,
    rows: int,
    n: int,
    k: int,
    format: str = "fp8_block",
    groups: int = 1,
    masked: bool = False,
    gather: bool = False,
    bias: bool = False,
    segments: int = 1,
    out_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    unquantized: bool = False,
    device: torch.device | str | None = None,
) -> Explanation:
    """Which implementation and config `op` would run, and for each other one the reason why it would not.

    Args:
        op: the function: "grouped_gemm", "dense_gemm" or "bmm".
        rows: rows of the activations there is room for: R, or E * capacity for masked rows; tokens T of "bmm".
        n: rows of one weight, N.
        k: reduction length, K.
        format: "fp8_block" (folded mxfp8 runs as this too), "mxfp8", or "plain" for 16-bit operands.
        groups: experts E, or heads; 1 for one product.
        masked: activations come as (E, capacity, K).
        gather: rows are read through a routing.
        bias: a bias, or a residual, is added.
        segments: 2 for a w13 whose halves have scale blocks of their own.
        out_dtype: dtype of the result.
        dtype: dtype of the operands where format is "plain".
        unquantized: activations are 16-bit and the call quantizes them for a quantized weight ("dense_gemm", "bmm").
        device: a device of this machine, an architecture as such ("sm90", "sm_90" or "90"; "sm100", ..), or None for the GPU here, else the CPU.

    Returns:
        Explanation: `print` it for the table; `.chosen`, and `[name]` with `.reason` and `.plan`, for programs.

    Raises:
        ValueError: an unknown op, format, dtype or device, or sizes and kinds that `op` takes from nobody. TypeError: sizes that are no integers.

    Numerics: none; nothing is computed.

    Cost: none, but for the first question about DeepGEMM where it is installed, and about CUTLASS where its kernels have been built: that starts
        a process which tries them, for some seconds.
    """
    name = "explain"
    checks.one_of(name, "op", op, operations())
    checks.one_of(name, "format", format, (*FORMATS, "plain"))
    checks.one_of(name, "out_dtype", out_dtype, _DTYPES)
    checks.one_of(name, "dtype", dtype, _DTYPES[:2])
    parts = segments if format == "fp8_block" else 1
    sizes = {"rows": rows, "n": n, "k": k, "groups": groups, "segments": parts}
    flags: Any = {"masked": masked, "gather": gather, "bias": bias, "unquantized": unquantized and format != "plain"}
    problem = Problem(op, format, **sizes, out_dtype=out_dtype, dtype=dtype, **flags)
    check_problem(problem)
    return explain_problem(problem, _where(device))


def explain_problem(problem: Problem, where: Where) -> Explanation:
    """`explain` of a problem that is known to make sense."""
    entries, chosen = [], None
    for implementation in implementations(problem.op):
        reason = implementation.reason(problem, where)
        entries.append(Entry(implementation.name, implementation.automatic, reason, None if reason else implementation.plan(problem, where)))
        if chosen is None and implementation.automatic and reason is None:
            chosen = implementation.name
    return Explanation(problem, where, tuple(entries), chosen)
