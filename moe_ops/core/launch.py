"""The one place where kernels are launched.

- Under CUDA graph capture, and after `freeze()`, a launch that would compile raises one RuntimeError that names op and shapes.
- In a process that runs Triton's interpreter, compiler options are dropped and the names of the kernels that ran are kept.
- Kernels that take part in programmatic dependent launch (`core.pdl`) are launched so from SM90 on.
- `compile_for(capability)` turns launches into ahead-of-time compiles for that architecture, on a machine without a GPU.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from moe_ops.core.arch import arch_of

#: Kernels that ran in the interpreter in this process; the test suite checks that none is missing.
interpreted: set[str] = set()

_frozen = False
_compiled: list[tuple[str, str, Any]] | None = None  # (op, kernel name, compiled kernel) while compile_for is active


class _CompileRefused(Exception):
    pass


def freeze(enabled: bool = True) -> None:
    """Make any later compile an error that names the op (`freeze(False)` lifts it).

    Call it once everything was warmed up, so that a serving process never compiles by surprise.
    """
    global _frozen
    _frozen = enabled


def is_frozen() -> bool:
    return _frozen


def _install_hook() -> None:
    previous = knobs.runtime.jit_cache_hook

    def refuse(*args: Any, **kwargs: Any) -> Any:
        fn = kwargs.get("fn")
        if fn is not None and str(fn.module).startswith("moe_ops.") and _compiled is None:
            if _frozen:
                raise _CompileRefused("frozen")
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise _CompileRefused("capturing")
        return previous(*args, **kwargs) if previous is not None else None

    knobs.runtime.jit_cache_hook = refuse


_install_hook()


def runs_kernels(t: torch.Tensor) -> bool:
    """Whether a launch on `t` runs or compiles a kernel: on a GPU, in Triton's interpreter, and inside `compile_for`."""
    return t.is_cuda or knobs.runtime.interpret or _compiled is not None


@functools.cache
def _takes_pdl(kernel: Any) -> bool:
    return "PDL" in kernel.arg_names


def _has_pdl(args: tuple[Any, ...]) -> bool:
    """Whether the device of the tensors among `args` has programmatic dependent launch."""
    tensor = next(a for a in args if isinstance(a, torch.Tensor))
    return arch_of(tensor.device).capability >= 90


def _describe(args: tuple[Any, ...]) -> str:
    return ", ".join(f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" for a in args if isinstance(a, torch.Tensor))


def launch(op: str, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch `kernel` over `grid` on the current stream; a grid with a zero launches nothing.

    Raises:
        RuntimeError: the kernel would have to be compiled under capture or after `freeze()`.
    """
    if 0 in grid:
        return
    if _takes_pdl(kernel):
        meta["PDL"] = not isinstance(kernel, InterpretedFunction) and _has_pdl(args)
        if meta["PDL"]:
            meta["launch_pdl"] = True
    if _compiled is not None:
        _compiled.append((op, kernel.fn.__name__, kernel.warmup(*args, grid=grid, **meta)))
        return
    if isinstance(kernel, InterpretedFunction):
        interpreted.add(kernel.fn.__name__)
        names = set(kernel.arg_names)
        kernel[grid](*args, **{k: v for k, v in meta.items() if k in names})
        return
    try:
        kernel[grid](*args, **meta)
    except _CompileRefused as refused:
        why = "while a CUDA graph is being captured" if str(refused) == "capturing" else "after moe_ops.freeze()"
        raise RuntimeError(
            f"{op}: kernel {kernel.fn.__name__} has never been compiled for ({_describe(args)}) and cannot be compiled {why}: "
            f"call moe_ops.warmup(...) or run the op once with these shapes before"
        ) from None


class _OfflineDriver:
    """Answers what `JITFunction.warmup` asks of a driver; there is no GPU behind it."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextlib.contextmanager
def compile_for(capability: int) -> Iterator[list[tuple[str, str, Any]]]:
    """Within the context, every launch compiles its kernel for `capability` instead of running it; needs no GPU.

    Yields:
        The list that collects (op, kernel name, compiled kernel); `.asm["ptx"]` and `.metadata.shared` hold what to check.
    """
    global _compiled
    _compiled = []
    active: Any = driver._active  # None while nothing asked for it: reset_active() would look for a GPU
    override = os.environ.get("MOE_OPS_ARCH")
    os.environ["MOE_OPS_ARCH"] = str(capability)
    offline: Any = _OfflineDriver(capability)
    driver.set_active(offline)
    _forget_compiled()
    try:
        yield _compiled
    finally:
        _compiled = None
        os.environ.pop("MOE_OPS_ARCH")
        if override is not None:
            os.environ["MOE_OPS_ARCH"] = override
        _forget_compiled()
        driver.set_active(active)


def _forget_compiled() -> None:
    """Forget the compiled forms of this package's kernels in this process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("moe_ops."):
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()
