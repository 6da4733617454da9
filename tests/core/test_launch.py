from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import moe_ops
from moe_ops.core import launch

GPU = torch.cuda.is_available()


@triton.jit
def add_one_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


def test_launch_runs_and_notes_the_kernel(device):
    x = torch.zeros(100, device=device)
    launch.launch("add", add_one_kernel, (2,), x, 100, BLOCK=64, num_warps=1)
    assert torch.equal(x.cpu(), torch.ones(100))
    if not GPU:
        assert "add_one_kernel" in launch.interpreted


@pytest.mark.parametrize("grid", [(0,), (4, 0), (1, 1, 0)])
def test_empty_grid_launches_nothing(grid, device):
    x = torch.zeros(4, device=device)
    launch.launch("add", add_one_kernel, grid, x, 4, BLOCK=64)
    assert torch.equal(x.cpu(), torch.zeros(4))


class Uncompiled:
    """A kernel that Triton would have to compile, on any machine."""

    arg_names = ()
    fn = SimpleNamespace(__name__="_x_kernel", module="moe_ops.quant.x")

    def __getitem__(self, grid):
        from triton import knobs

        return lambda *args, **kwargs: knobs.runtime.jit_cache_hook(fn=self.fn)


def test_after_freeze_a_compile_is_an_error_that_names_op_kernel_and_shapes():
    try:
        moe_ops.freeze()
        assert launch.is_frozen()
        with pytest.raises(RuntimeError) as raised:
            launch.launch("quantize", Uncompiled(), (1,), torch.zeros(3, 4, dtype=torch.bfloat16), 7)
    finally:
        moe_ops.freeze(False)
    text = str(raised.value)
    assert text.startswith("quantize: kernel _x_kernel has never been compiled for (bfloat16[3, 4]) and cannot be compiled after moe_ops.freeze()")
    assert "warmup" in text
    launch.launch("quantize", Uncompiled(), (1,), torch.zeros(3, 4))


def test_kernels_of_others_may_compile_after_freeze():
    other = Uncompiled()
    other.fn = SimpleNamespace(__name__="_x_kernel", module="someone.else")
    try:
        moe_ops.freeze()
        launch.launch("quantize", other, (1,), torch.zeros(1))
    finally:
        moe_ops.freeze(False)


@triton.jit
def never_compiled_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@pytest.mark.gpu
def test_under_capture_a_compile_is_an_error_and_the_stream_stays_usable():
    never_compiled_kernel.fn.__module__ = "moe_ops.test"  # the guard looks after this package's kernels only
    x = torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"fill: kernel never_compiled_kernel .*float32\[64\].* while a CUDA graph is being captured"):
        with torch.cuda.graph(graph):
            launch.launch("fill", never_compiled_kernel, (1,), x, BLOCK=64)
    torch.cuda.synchronize()
    launch.launch("fill", never_compiled_kernel, (1,), x, BLOCK=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.launch("fill", never_compiled_kernel, (1,), x, BLOCK=64)
    x.zero_()
    graph.replay()
    assert torch.equal(x, torch.ones_like(x))
