"""Calls of the CUTLASS libraries through their C interface, and the rule that nothing compiles or loads under capture."""

import ctypes
import functools
from typing import Any

import torch

from moe_ops.core.arch import arch_of
from moe_ops.gemm import cutlass_build as build
from moe_ops.gemm.cutlass_build import Instantiation

#: MOE_CUTLASS_INTERFACE of interface.cuh.
INTERFACE = 1

_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
#: The arguments of each kind's functions, as the sources declare them.
_SIGNATURES = {
    "grouped": {
        "moe_cutlass_workspace": (_I, _I, _I, ctypes.POINTER(_L)),
        "moe_cutlass_grouped": (_P, _L, _L, _P, _P, _P, _P, _P, _L, _I, _I, _I, _I, _I, _P, _L, _I, _I, _P),
    },
    "dense": {
        "moe_cutlass_workspace": (_I, _I, _I, _I, ctypes.POINTER(_L)),
        "moe_cutlass_dense": (_P, _L, _P, _I, _P, _P, _P, _L, _I, _I, _I, _P, _L, _I, _I, _P),
    },
}

_loaded: dict[Instantiation, Any] = {}
_warm: set[tuple[Instantiation, int]] = set()


def _load(instantiation: Instantiation) -> Any:
    """The library, loaded; it must have been built.

    Raises:
        RuntimeError: it cannot be loaded, or speaks another version of the interface.
    """
    path = instantiation.path
    try:
        library = ctypes.CDLL(str(path))
        spoken = library.moe_cutlass_interface()
    except (OSError, AttributeError) as failure:
        raise RuntimeError(f"cutlass: {path} cannot be loaded: {failure}") from None
    if spoken != INTERFACE:
        raise RuntimeError(f"cutlass: {path} speaks version {spoken} of the interface, version {INTERFACE} is needed")
    library.moe_cutlass_error.restype = ctypes.c_char_p
    library.moe_cutlass_error.argtypes = (_I,)
    for name, arguments in _SIGNATURES[instantiation.kind].items():
        getattr(library, name).argtypes = arguments
    return library


def library_of(op: str, instantiation: Instantiation, index: int) -> Any:
    """The library, built and loaded on first use.

    Raises:
        BuildError: it has not been built and cannot be.
        RuntimeError: it would be built or loaded under graph capture or after `freeze()`.
    """
    if (instantiation, index) in _warm:
        return _loaded[instantiation]
    refuse_first_use(op, instantiation)
    if instantiation not in _loaded:
        if build.missing([instantiation]):  # then the other tiles are wanted soon
            build.build(build.of_kind(instantiation.arch, instantiation.kind))
        _loaded[instantiation] = _load(instantiation)
    return _loaded[instantiation]


def refuse_first_use(op: str, instantiation: Instantiation) -> None:
    """Where a first use has to be: not under graph capture, not after `freeze()`.

    Raises:
        RuntimeError: this is such a place.
    """
    from moe_ops.core.launch import is_frozen

    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing or is_frozen():
        why = "while a CUDA graph is being captured" if capturing else "after moe_ops.freeze()"
        raise RuntimeError(f"{op}: {instantiation.name} has never run on this GPU and cannot be loaded {why}: run the op once before")


def _check(op: str, library: Any, instantiation: Instantiation, code: int, sizes: str) -> None:
    if code != 0:
        text = library.moe_cutlass_error(code).decode(errors="replace")
        raise RuntimeError(f"{op}: {instantiation.name} failed for {sizes}: {text} ({code})")


@functools.cache
def _workspace_bytes(op: str, instantiation: Instantiation, sizes: tuple[int, ...]) -> int:
    library, found = _loaded[instantiation], _L(0)
    _check(op, library, instantiation, library.moe_cutlass_workspace(*sizes, ctypes.byref(found)), f"sizes {sizes}")
    return found.value


def _address(t: torch.Tensor) -> int:
    return t.data_ptr()


def call_grouped(
    instantiation: Instantiation, a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, offsets: torch.Tensor,
    segments: int, out: torch.Tensor,
) -> None:  # fmt: skip
    """One grouped product on the current stream: two launches, one of which describes the groups from `offsets`."""
    op = "grouped_gemm"
    (experts, n, k), masked, index = w.shape, a.dim() == 3, a.device.index
    library, sms = library_of(op, instantiation, index), arch_of(a.device).sms
    rows = a.shape[1] if masked else out.shape[0]
    size = _workspace_bytes(op, instantiation, (experts, segments, sms))
    workspace = torch.empty(size, dtype=torch.uint8, device=a.device)
    stream = torch.cuda.current_stream(a.device).cuda_stream
    code = library.moe_cutlass_grouped(
        _address(a), a.stride(-2), a.stride(0) if masked else 0, _address(a_scale), _address(w), _address(w_scale), _address(offsets), _address(out),
        rows, experts, segments, n, k, int(masked), _address(workspace), size, index, sms, stream,
    )  # fmt: skip
    _check(op, library, instantiation, code, f"{rows} {'rows of each expert' if masked else 'rows'}, {experts} experts, N = {n}, K = {k}")
    _warm.add((instantiation, index))


def call_dense(
    instantiation: Instantiation, a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor
) -> None:
    """One product on the current stream, one launch."""
    op = "dense_gemm"
    (m, k), n, index = a.shape, w.shape[0], a.device.index
    library, sms = library_of(op, instantiation, index), arch_of(a.device).sms
    size = _workspace_bytes(op, instantiation, (m, n, k, sms))
    workspace = torch.empty(size, dtype=torch.uint8, device=a.device)
    stream = torch.cuda.current_stream(a.device).cuda_stream
    code = library.moe_cutlass_dense(
        _address(a), a.stride(0), _address(a_scale), a_scale.stride(0), _address(w), _address(w_scale), _address(out), out.stride(0), m, n, k,
        _address(workspace), size, index, sms, stream,
    )  # fmt: skip
    _check(op, library, instantiation, code, f"M = {m}, N = {n}, K = {k}")
    _warm.add((instantiation, index))
