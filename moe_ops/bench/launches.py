"""Which kernels one eager call launches, so that the CPU time of the call can be set beside that of its bare launches."""

from collections.abc import Callable
from typing import Any
from unittest import mock


def launches_of(call: Callable[[], Any]) -> list[Callable[[], Any]]:
    """Run `call` once; one function for each Triton launch in it, which does that launch again: the same kernel, grid and arguments.

    The call should have run before, or what it compiles counts as its launches' work. Nothing is found in Triton's interpreter.
    """
    from triton.runtime.jit import JITFunction

    found: list[Callable[[], Any]] = []
    run = JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not warmup:
            found.append(lambda: kernel[grid](*args, **options))
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    with mock.patch.object(JITFunction, "run", record):
        call()
    return found
