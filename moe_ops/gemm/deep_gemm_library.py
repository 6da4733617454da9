"""Calls of the DeepGEMM library: names through its versions, its global alignment, and the rule that nothing compiles under capture."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: Rows that every expert's rows start at a multiple of; DeepGEMM's default, and the tile that its contiguous kernels use.
ALIGNMENT = 128
#: Names of each function through the versions, newest first.
NAMES = {
    "dense": ("fp8_gemm_nt", "fp8_fp4_gemm_nt"),
    "contiguous": ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
    "psum": ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
    "bmm": ("fp8_einsum",),
    "masked": ("m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked"),
}
#: The versions that are known to work with torch 2.11 on an H200.
INSTALL = "pip install sgl-deep-gemm==0.1.2 apache-tvm-ffi==0.1.9"

_lock = threading.Lock()
_warm: set[tuple[Any, ...]] = set()


def library() -> Any:
    """The module; imported on first use."""
    import deep_gemm  # pyright: ignore[reportMissingImports]

    return deep_gemm


def _function(lib: Any, form: str) -> Callable[..., None]:
    for name in NAMES[form]:
        found = getattr(lib, name, None)
        if found is not None:
            return found
    raise RuntimeError(f"deep_gemm has none of {', '.join(NAMES[form])}")


@contextlib.contextmanager
def alignment(lib: Any, rows: int) -> Iterator[None]:
    """Within the context, the library's alignment of contiguous layouts is `rows`; afterwards what it was.

    Raises:
        RuntimeError: the library keeps another value.
    """
    get = getattr(lib, "get_mk_alignment_for_contiguous_layout", None) or getattr(lib, "get_m_alignment_for_contiguous_layout", None)
    put = getattr(lib, "set_mk_alignment_for_contiguous_layout", None)
    if get is None:
        raise RuntimeError("deep_gemm does not tell its alignment of contiguous layouts")
    with _lock:
        before = get()
        if before != rows:
            if put is None:
                raise RuntimeError(f"deep_gemm's alignment of contiguous layouts is {before} and cannot be set; {rows} is needed")
            put(rows)
        try:
            if get() != rows:
                raise RuntimeError(f"deep_gemm's alignment of contiguous layouts is {get()} after it was set to {rows}")
            yield
        finally:
            if put is not None and get() != before:
                put(before)


def call_library(form: str, shape: tuple[Any, ...], *args: Any, **options: Any) -> None:
    """One call of the library, in the form `form`; `shape` is what its choice of kernel depends on.

    Raises:
        RuntimeError: the call would compile or load a kernel under graph capture or after `freeze()`.
    """
    key = (form, *shape, args[-1].device.index if form == "bmm" else args[2].device.index)
    if key not in _warm:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if capturing or _is_frozen():
            why = "while a CUDA graph is being captured" if capturing else "after moe_ops.freeze()"
            raise RuntimeError(
                f"deep_gemm: the {form} form has never run for sizes {shape} and cannot be compiled {why}: run the op once with these shapes before"
            )
    lib = library()
    if form == "psum":
        options["use_psum_layout"] = True
    with alignment(lib, ALIGNMENT):
        _function(lib, form)(*args, **options)
    _warm.add(key)


def _is_frozen() -> bool:
    from moe_ops.core.launch import is_frozen

    return is_frozen()
