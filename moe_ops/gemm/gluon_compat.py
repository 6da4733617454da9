"""Names of Gluon that changed between the Triton versions this package accepts."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

#: Barrier among the warps of a partition: `thread_barrier` up to Triton 3.6, `barrier` from 3.7 on.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
#: TMA box load: `async_copy_global_to_shared` up to 3.7, `async_load` from 3.8 on (3.9 raises on the old name).
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
#: Copies by the threads of a partition (cp.async): `async_copy_global_to_shared` up to 3.7, `async_load` from 3.8 on.
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
