"""What CUTLASS can run, and why not: by problem, by machine, and by the probe."""

import functools

import torch

from moe_ops.core.arch import too_old_reason
from moe_ops.core.formats import ceil_div
from moe_ops.gemm import cutlass_build as build
from moe_ops.gemm.cutlass_build import Instantiation, of_kind
from moe_ops.gemm.cutlass_gemm import arch_name, pick
from moe_ops.gemm.registry import Problem, Where

_KIND = {"grouped_gemm": "grouped", "dense_gemm": "dense"}


_there: set[tuple[str, str]] = set()


def unbuilt(arch: str, kind: str) -> list[Instantiation]:
    """The kernels of one kind whose libraries have not been made; asked of the disk until there is none."""
    if (arch, kind) in _there:
        return []
    found = build.missing(of_kind(arch, kind))
    if not found:
        _there.add((arch, kind))
    return found


@functools.cache
def features(index: int, kind: str) -> str | None:
    """None, or why the kernels of `kind` do not work on GPU `index`; asked once, in another process, when they have been built."""
    from moe_ops.gemm.cutlass_probe import probe

    return probe(index, kind)


def problem_reason(p: Problem, where: Where) -> str | None:
    """None, or why the kernels cannot compute problem `p`, wherever that is."""
    capability, per = where.arch.capability, p.n // p.segments
    too_old = too_old_reason(where.arch) if where.cuda else None
    if too_old is not None:
        return too_old
    if p.fmt == "plain":
        return "16-bit operands stay with Triton and torch"
    if p.op == "bmm":
        return "there is no CUTLASS kernel for heads here"
    fold = "; fold the weight (moe_ops.quant.fold) and it runs as fp8_block" if capability == 90 else ""
    if p.fmt == "mxfp8" and p.op == "dense_gemm":
        return f"the CUTLASS kernel for mxfp8 is behind grouped_gemm alone{fold}"
    if p.fmt == "mxfp8" and where.cuda and capability != 100:
        return f"the CUTLASS kernels for mxfp8 need SM100, {where.arch.name} is SM{capability}{fold}"
    if p.fmt == "fp8_block" and where.cuda and capability != 90:
        return f"the CUTLASS kernels for fp8_block need SM90, {where.arch.name} is SM{capability}"
    if p.out_dtype != torch.bfloat16:
        return f"the CUTLASS kernels write bfloat16, not {str(p.out_dtype).removeprefix('torch.')}"
    if p.bias:
        return "the CUTLASS kernels add no bias and no residual"
    if p.pinned:
        return "a config pins a Triton kernel"
    if per % 8 or p.k % 16:
        rows = "N" if p.segments == 1 else "rows of a segment"
        return f"the CUTLASS kernels want {rows} % 8 == 0 and K % 16 == 0 (16 bytes for TMA), got {per} and {p.k}"
    if p.fmt == "mxfp8" and p.layout != "row_major":
        return f"scales of a must be row_major, got {p.layout}"
    return None


def machine_reason(p: Problem, where: Where) -> str | None:
    """None, or why they cannot run there."""
    arch, kind = arch_name(100 if p.fmt == "mxfp8" else 90), _KIND[p.op]
    lacking = unbuilt(arch, kind)
    if lacking:
        against = build.build_reason(arch)
        if against is not None:
            return f"{lacking[0].name} has not been built (moe-ops build cutlass), and cannot be built here: {against}"
    if not where.cuda:
        return f"needs CUDA tensors, got {where.device}"
    if where.index is None:
        return "can only be tried on a GPU of this machine"
    if lacking:  # the first call builds and tries them
        return None
    return features(where.index, kind)


def reason(p: Problem, where: Where) -> str | None:
    """None, or why the problem cannot go to CUTLASS."""
    return problem_reason(p, where) or machine_reason(p, where)


def plan(p: Problem, where: Where) -> str:
    """What it would run."""
    arch, kind = arch_name(where.arch.capability), _KIND[p.op]
    chosen = pick(arch, kind, ceil_div(p.rows, p.groups))
    first = ", after a kernel that quantizes" if p.unquantized else ", after a copy of the gathered rows" if p.gather else ""
    later = "; compiled by the first call, which takes a minute" if chosen in unbuilt(arch, kind) else ""
    return f"CUTLASS, {chosen.tile_m}x128x128 {chosen.schedule}{first}{later}"


def make_ready(p: Problem, where: Where) -> None:
    """Build what the first call finds unbuilt, and try it; nothing to do ever after.

    Raises:
        BuildError: it cannot be built. ValueError: it was built and does not work here. RuntimeError: under graph capture, or frozen.
    """
    from moe_ops.gemm.cutlass_library import refuse_first_use

    assert where.index is not None  # for the type checker: `reason` has said so
    arch, kind = arch_name(where.arch.capability), _KIND[p.op]
    lacking = unbuilt(arch, kind)
    if lacking:
        refuse_first_use(p.op, lacking[0])
        build.build(lacking)
        against = features(where.index, kind)
        if against is not None:
            raise ValueError(f"{p.op}: impl 'cutlass' cannot run here: {against}")


def refuse_traced(p: Problem, device: torch.device) -> None:
    """What torch.compile can ask while it traces: the problem, not the machine.

    Raises:
        ValueError: the kernels cannot compute `p`.
    """
    against = problem_reason(p, Where.of(device))
    if against is not None:
        raise ValueError(f"{p.op}: impl 'cutlass' cannot run here: {against}")
