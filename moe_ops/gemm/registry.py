"""One registry of the implementations behind each GEMM function: who can compute a problem here, why the others cannot, and who is taken.

    problem, where -> each implementation's reason (None: it can) -> the one asked for, or the first automatic one that can

A function's implementations are the tuple IMPLEMENTATIONS of the module that `_HOMES` names. A reason is a sentence for the user, made without
computing anything; `moe_ops.explain` prints all of them.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_ops.core import checks
from moe_ops.core.arch import Arch, arch_of, arch_of_capability
from moe_ops.gemm.grouped_config import GEMM_FORMATS

#: function -> module that holds its implementations
_HOMES = {"bmm": "moe_ops.gemm.bmm_impls", "dense_gemm": "moe_ops.gemm.dense_impls", "grouped_gemm": "moe_ops.gemm.grouped_impls"}


@dataclass(frozen=True)
class Problem:
    """What decides which implementation can compute a product; sizes and kinds, no tensors.

    Attributes:
        op: the function, one of `operations()`.
        fmt: how the operands are stored, one of `GEMM_FORMATS`.
        rows: rows of the activations there is room for (of all experts together; tokens of `bmm`).
        n, k: rows of one weight, and the reduction length.
        groups: experts or heads; 1 for a dense GEMM.
        out_dtype: dtype of the result.
        dtype: dtype of the operands where fmt is "plain".
        masked: (groups, capacity, K) activations; capacity is rows // groups.
        gather: rows are read through a routing's order.
        bias: a bias, or a residual, is added.
        given_out: the result goes into a tensor of the caller.
        segments: parts of the weight's rows with scale blocks of their own.
        layout: how the scales of the activations are stored.
        pinned: a config is given.
        unquantized: the activation is 16-bit and the call quantizes it for a quantized weight.
    """

    op: str
    fmt: str
    rows: int
    n: int
    k: int
    groups: int = 1
    out_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    masked: bool = False
    gather: bool = False
    bias: bool = False
    given_out: bool = False
    segments: int = 1
    layout: str = "row_major"
    pinned: bool = False
    unquantized: bool = False


@dataclass(frozen=True)
class Where:
    """Where a problem would run.

    Attributes:
        arch: of the device, or of the architecture asked about.
        cuda: whether that is a CUDA GPU.
        index: number of the GPU of this machine; None on a CPU and for an architecture that was only asked about.
        device: the words of whoever asked.
    """

    arch: Arch
    cuda: bool
    index: int | None
    device: str

    @staticmethod
    def of(device: torch.device) -> "Where":
        """A device of this machine."""
        if device.type != "cuda":
            return Where(arch_of(device), False, None, str(device))
        index = torch.cuda.current_device() if device.index is None else device.index
        return Where(arch_of(device), True, index, str(device))

    @staticmethod
    def of_capability(capability: int) -> "Where":
        """An architecture as such ("what would run on SM100?"), whether or not this machine has it."""
        return Where(arch_of_capability(capability), True, None, f"sm{capability}")


@dataclass(frozen=True)
class Implementation:
    """One way to compute the problems of one function.

    Attributes:
        name: what `impl=` calls it.
        automatic: whether `impl=None` may take it.
        reason: None when it can compute the problem there, else why not.
        plan: what it would run, in a few words; asked only where there is no reason against it.
    """

    name: str
    automatic: bool
    reason: Callable[[Problem, Where], str | None]
    plan: Callable[[Problem, Where], str]


def operations() -> tuple[str, ...]:
    """The functions that choose among implementations."""
    return tuple(_HOMES)


@functools.cache
def implementations(op: str) -> tuple[Implementation, ...]:
    """All implementations of `op`, best first."""
    return importlib.import_module(_HOMES[op]).IMPLEMENTATIONS


def names(op: str) -> tuple[str, ...]:
    """What `impl=` of `op` may be, None aside."""
    return tuple(i.name for i in implementations(op))


def reasons(problem: Problem, where: Where) -> dict[str, str | None]:
    """Each implementation's reason against `problem`, None where it can."""
    return {i.name: i.reason(problem, where) for i in implementations(problem.op)}


def choose(problem: Problem, where: Where, impl: str | None = None) -> Implementation:
    """The implementation called `impl`, or the first automatic one that can compute `problem`.

    Raises:
        ValueError: an unknown name, a named implementation that cannot (with its reason), or nobody that can (with all reasons).
    """
    op = problem.op
    if impl is not None:
        checks.one_of(op, "impl", impl, names(op))
        chosen = next(i for i in implementations(op) if i.name == impl)
        reason = chosen.reason(problem, where)
        if reason is not None:
            raise ValueError(f"{op}: impl {impl!r} cannot run here: {reason}")
        return chosen
    against = []
    for candidate in implementations(op):
        if candidate.automatic:
            reason = candidate.reason(problem, where)
            if reason is None:
                return candidate
            against.append(f"{candidate.name}: {reason}")
    raise ValueError(f"{op}: no implementation can run here; {'; '.join(against)}")


def check_problem(problem: Problem) -> None:
    """Refuse sizes and kinds that the function takes from nobody, whoever would compute."""
    op = problem.op
    checks.one_of(op, "format", problem.fmt, GEMM_FORMATS)
    for name in ("rows", "n", "k", "groups", "segments"):
        checks.int_range(op, name, getattr(problem, name), 0 if name == "rows" else 1, 2**31 - 1)
    if problem.fmt == "mxfp8" and problem.k % 32:
        raise ValueError(f"{op}: mxfp8 needs K % 32 == 0, got K = {problem.k}")
    per, rest = divmod(problem.n, problem.segments)
    if rest:
        raise ValueError(f"{op}: {problem.n} rows of a weight do not divide into {problem.segments} segments")
    if op == "grouped_gemm":
        if problem.unquantized:
            raise ValueError(f"{op}: takes no activation that is not quantized for a quantized weight")
        if problem.masked and problem.gather:
            raise ValueError(f"{op}: masked rows are not gathered")
        if problem.masked and problem.rows % problem.groups:
            raise ValueError(f"{op}: {problem.rows} masked rows do not divide into {problem.groups} groups")
        return
    if problem.masked or problem.gather:
        raise ValueError(f"{op}: masked and gathered rows are for grouped_gemm")
    if op == "dense_gemm" and problem.groups > 1:
        raise ValueError(f"{op}: is one product, got {problem.groups} groups")
    if op == "bmm" and problem.bias:
        raise ValueError(f"{op}: takes no bias")
    if problem.segments > 1 and per % 128:
        raise ValueError(f"{op}: segments of {per} rows; they must be multiples of 128 here")
