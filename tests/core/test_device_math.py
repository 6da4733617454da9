"""The shared exponentials against fp64, in the interpreter or on the GPU."""

import pytest
import torch
import triton
import triton.language as tl

from moe_ops.core import launch
from moe_ops.core.device_math import exp_accurate, sigmoid_accurate, tanh_accurate


@triton.jit
def functions_kernel(x_ptr, exp_ptr, sigmoid_ptr, tanh_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(exp_ptr + i, exp_accurate(x), mask=i < n)
    tl.store(sigmoid_ptr + i, sigmoid_accurate(x), mask=i < n)
    tl.store(tanh_ptr + i, tanh_accurate(x), mask=i < n)


def run(x):
    outs = [torch.empty_like(x) for _ in range(3)]
    launch.launch("functions", functions_kernel, (-(-x.numel() // 1024),), x, *outs, x.numel(), BLOCK=1024, enable_fp_fusion=False)
    return [o.cpu() for o in outs]


def test_accurate_over_the_whole_range(device):
    x = torch.cat([torch.linspace(-87, 88, 40_001), torch.linspace(-1, 1, 10_001), torch.logspace(-20, 0, 2_001), -torch.logspace(-20, 0, 2_001)])
    exp, sigmoid, tanh = run(x.to(device))
    x = x.double()
    assert ((exp.double() - x.exp()).abs() / x.exp()).max() < 4e-7
    assert ((sigmoid.double() - x.sigmoid()).abs() / x.sigmoid()).max() < 4e-7
    assert (tanh.double() - x.tanh()).abs().max() < 2e-7


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1e30, -1e30, 0.0, -0.0])
def test_edges(value, device):
    x = torch.full((4,), value)
    exp, sigmoid, tanh = run(x.to(device))
    assert torch.equal(sigmoid, x.sigmoid()) or (value < 0 and (sigmoid < 1e-37).all())
    assert torch.equal(tanh, x.tanh())
    if value < 0:
        assert (exp < 1e-37).all()
    elif value == 0:
        assert torch.equal(exp, torch.ones(4))
    else:
        assert (exp > 3e38).all()


def test_nan_stays_nan(device):
    assert all(o.isnan().all() for o in run(torch.full((4,), float("nan"), device=device)))
