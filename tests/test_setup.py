"""The test set-up itself: poisoned memory, correct casts in the interpreter, the walk over the kernels."""

import importlib.util
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from moe_ops.core.launch import launch


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn))
def test_fresh_floats_are_nan(dtype, device):
    x = torch.zeros(3, 4, device=device).to(dtype)
    for fresh in (
        torch.empty(3, 4, dtype=dtype, device=device),
        torch.empty_like(x),
        x.new_empty(5),
        torch.empty_strided((2, 3), (1, 2), dtype=dtype),
    ):
        assert fresh.dtype == dtype and fresh.float().isnan().all()


@pytest.mark.parametrize("dtype, value", [(torch.uint8, 0xFF), (torch.int32, 0x7F7F7F7F), (torch.int64, 0x7F7F7F7F7F7F7F7F), (torch.int16, 0x7F7F)])
def test_fresh_integers_are_large_garbage(dtype, value, device):
    assert (torch.empty(7, dtype=dtype, device=device) == value).all()
    assert torch.empty(0, dtype=dtype).shape == (0,)
    assert torch.empty(7, dtype=dtype, device="meta").is_meta


def test_poison_can_be_left_out_and_does_not_break_compiled_code(unpoisoned, device):
    torch.empty(1000, device=device)
    compiled = torch.compile(lambda x: torch.empty_like(x).copy_(x) + x.new_empty(x.shape).zero_(), backend="eager", fullgraph=True, dynamic=True)
    for n in (3, 4, 0):
        assert torch.equal(compiled(torch.ones(n, 2, device=device)), torch.ones(n, 2, device=device))
    torch._dynamo.reset()


@triton.jit
def cast_kernel(x_ptr, bf16_ptr, e4m3_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(bf16_ptr + i, x.to(tl.bfloat16), mask=i < n)
    tl.store(e4m3_ptr + i, x.to(tl.float8e4nv), mask=i < n)


def test_casts_of_kernels_equal_torch_byte_for_byte(device):
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    every_tie = torch.arange(0, 2**16, dtype=torch.int32) << 16 | 0x8000
    e4m3 = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (e4m3[1:] + e4m3[:-1]) / 2
    x = torch.cat([bits.view(torch.float32), every_tie.view(torch.float32), e4m3, -e4m3, ties, -ties]).nan_to_num(nan=1.0).clamp(-448, 448)
    x = torch.cat([x, torch.tensor([float("nan")])]).to(device)
    bf16, fp8 = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.float8_e4m3fn)
    launch("cast", cast_kernel, (-(-x.numel() // 4096),), x, bf16, fp8, x.numel(), BLOCK=4096)
    assert torch.equal(bf16[:-1].view(torch.int16), x[:-1].bfloat16().view(torch.int16)) and bf16[-1].isnan()
    assert torch.equal(fp8[:-1].view(torch.uint8), x[:-1].to(torch.float8_e4m3fn).view(torch.uint8)) and fp8[-1].float().isnan()


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i[:, None] * BLOCK + i[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def test_bf16_dot_multiplies_values(device):
    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(s)).bfloat16().to(device) for s in (1, 2))
    c = torch.empty(32, 32, device=device)
    launch("dot", dot_kernel, (1,), a, b, c, BLOCK=32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-4)


def test_the_walk_over_the_package_finds_kernels():
    path = Path(__file__).with_name("compile_cases.py")
    spec = importlib.util.spec_from_file_location("compile_cases", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "_grouped_gemm_kernel" in module.entry_kernels()
    assert module.gluon_kernels() <= set(module.entry_kernels())
    assert [p.name for p in module.case_files()]
