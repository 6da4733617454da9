"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs, and waits before it touches memory.

A kernel that takes part has a constexpr argument PDL, which `core.launch` sets from SM90 on, and calls `after_previous` first. Waiting before
the next kernel is let go keeps one rule: when a kernel starts, everything before its direct predecessor has ended. (A foreign kernel that is
launched with this attribute and never waits can end before its own predecessor; nothing that follows it can repair that.)
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended and its writes are visible, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
