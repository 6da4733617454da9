"""What a GPU alone can show of every implementation: masked and gathered counts that change under a graph, captures anew, rows apart on Hopper."""

import os
import subprocess
import sys

import pytest
import torch

from moe_ops import Routing, grouped_gemm, quantize, quantize_weight
from moe_ops.core.arch import arch_of
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm.grouped import _ref_into
from moe_ops.gemm.grouped_config import GroupedGemmProblem, hopper_kernel
from moe_ops.gemm.registry import Problem, Where
from moe_ops.gemm.torch_scaled import grouped_mm_reason

pytestmark = pytest.mark.gpu
HOPPER = torch.cuda.is_available() and arch_of(torch.device("cuda")).has_wgmma
E, N, K = 4, 320, 512
IMPLS = pytest.mark.parametrize("impl", ["triton", "deep_gemm", "cutlass"])


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def made(shape, n=N, k=K, e=E):
    return quantize(uneven((*shape, k), seed=1).cuda(), "fp8_block"), quantize_weight(uneven((e, n, k), block=(128, 128), seed=2).cuda(), "fp8_block")


def bits(q):
    return q.data.view(torch.uint8), q.scale


def ran(call, impl):
    try:
        return call()
    except ValueError as refused:
        if impl == "triton" or "cannot run here" not in str(refused):
            raise
        pytest.skip(str(refused)[:300])


def right(out, a, w, counts):
    ref = torch.zeros(out.shape, device="cuda")
    _ref_into(*bits(a), *bits(w), None, counts, None, 1, "fp8_block", 1, ref)
    for e, count in enumerate(counts.tolist()):
        filled = min(max(count, 0), out.shape[1])
        assert filled == 0 or relative_error(out[e, :filled], ref[e, :filled]) <= 3e-3, (e, count)
        assert (out[e, filled:] == 5.0).all(), (e, count)


@IMPLS
@pytest.mark.parametrize("capacity", [65, 128])
def test_graph_masked_counts_change(impl, capacity):
    a, w = made((E, capacity))
    counts, out = ints([3, 0, capacity, 7]), torch.zeros((E, capacity, N), dtype=torch.bfloat16, device="cuda")
    ran(lambda: grouped_gemm(a, w, counts, out=out, impl=impl), impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(a, w, counts, out=out, impl=impl)
    for fresh in ([0, 0, 0, 0], [capacity] * 4, [-3, capacity + 9, 1, -(2**31)], [64, 65, 0, 2]):
        counts.copy_(ints(fresh))
        out.fill_(5.0)
        graph.replay()
        right(out, a, w, counts)


@IMPLS
def test_graph_gathered_tokens_change(impl):
    tokens, k = 40, 2
    a, w = made((tokens,))

    def routing(seed):
        ids = torch.randint(-1, E, (tokens, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        return Routing.from_topk(ids.cuda(), torch.ones(tokens, k, device="cuda"), E)

    held, out = routing(0), torch.zeros((tokens * k, N), dtype=torch.bfloat16, device="cuda")
    ran(lambda: grouped_gemm(a, w, held, gather=True, out=out, impl=impl), impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(a, w, held, gather=True, out=out, impl=impl)
    for seed in (1, 2):
        fresh = routing(seed)
        held.offsets.copy_(fresh.offsets)
        held.order.copy_(fresh.order)
        out.fill_(5.0)
        graph.replay()
        ref = torch.full((tokens * k, N), 5.0, device="cuda")
        _ref_into(*bits(a), *bits(w), None, fresh.offsets, fresh.order, k, "fp8_block", 1, ref)
        filled = int(fresh.offsets[-1])
        assert 0 < filled < tokens * k and relative_error(out[:filled], ref[:filled]) <= 3e-3 and (out[filled:] == 5.0).all()


def test_graph_of_torch_grouped_mm():
    """Rows that lie apart, offsets that change, and garbage in them: no group ends past the last row."""
    rows = 60
    reason = grouped_mm_reason(Problem("grouped_gemm", "plain", rows, N, K, E), Where.of(torch.device("cuda")))
    if reason is not None:
        pytest.skip(reason)
    room, w = torch.full((rows, K + 8), float("nan"), dtype=torch.bfloat16, device="cuda"), uneven((E, N, K), seed=2).cuda()
    room[:, :K] = uneven((rows, K), seed=1)
    offsets = ints([0, 15, 30, 30, 60])
    grouped_gemm(room[:, :K], w, offsets, impl="torch")
    same = room[:1, :K].expand(rows, K)
    assert torch.equal(grouped_gemm(same, w, offsets, impl="torch"), grouped_gemm(same.contiguous(), w, offsets, impl="torch"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_gemm(room[:, :K], w, offsets, impl="torch")
    for fresh in ([0, 0, 0, 0, 0], [0, 60, 60, 60, 60], [0, 1, 2, 3, 60], [0, 0, 10**6, -5, 7]):
        offsets.copy_(ints(fresh))
        out.fill_(5.0)
        graph.replay()
        torch.cuda.synchronize()
        ends = offsets[1:].clamp(0, rows).cummax(0).values.tolist()
        for e, (low, high) in enumerate(zip([0, *ends], ends, strict=False)):
            assert low == high or relative_error(out[low:high], room[low:high, :K].float() @ w[e].float().T) <= 3e-3


def test_graph_capture_of_the_reference_says_so_and_the_process_goes_on():
    a, w = made((9,))
    offsets = ints([0, 3, 3, 5, 9])
    with pytest.raises(RuntimeError, match="the reference reads the counts on the host, which a CUDA graph cannot capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            grouped_gemm(a, w, offsets, impl="torch")
    torch.cuda.synchronize()
    assert relative_error(grouped_gemm(a, w, offsets), grouped_gemm(a, w, offsets, impl="torch")) <= 4e-3


CAPTURES = """
import gc, sys, torch
from moe_ops import bmm, dense_gemm, grouped_gemm, quantize, quantize_weight
from moe_ops.core.numerics import uneven
a, w = quantize(uneven((40, 512), seed=1).cuda(), "fp8_block"), quantize_weight(uneven((4, 320, 512), seed=2).cuda(), "fp8_block")
heads = uneven((40, 4, 512), seed=3).cuda()
offsets = torch.tensor([0, 3, 20, 20, 40], dtype=torch.int32, device="cuda")
for impl in ("triton", "deep_gemm", "cutlass"):
    for call in (lambda: grouped_gemm(a, w, offsets, impl=impl), lambda: dense_gemm(a, w[0], impl=impl), lambda: bmm(heads, w, impl=impl)):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call()
            assert 0, "captured before it was ever compiled"
        except ValueError as refused:
            assert impl != "triton" and "cannot run here" in str(refused), refused
            continue
        except RuntimeError as refused:
            assert "has never" in str(refused), refused
        want = call().clone()
        for _ in range(3):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = call()
            graph.replay()
            assert torch.equal(out, want), impl
            del graph, out
            gc.collect()
            torch.cuda.empty_cache()
        print("captured", impl, flush=True)
"""


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"], ids=["segments", "expandable"])
def test_graph_captured_deleted_and_captured_again(allocator, tmp_path):
    """After a first capture that is refused, in a process of its own."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CAPTURES], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout.count("captured triton") == 3, done.stdout + done.stderr[-3000:]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")
@pytest.mark.parametrize("rows", [9, 300])
def test_layout_rows_apart_on_hopper(rows):
    """What the Gluon kernels can address they do, and what not another kernel."""
    e, n, k = 3, 512, 256
    a, w = made((rows,), n, k, e)
    offsets = ints([0, 4, 4, rows])
    want = grouped_gemm(a, w, offsets)
    for at, wide in ((16, 304), (3, 304), (0, 264)):
        room = torch.full((rows, wide), 0x7F, dtype=torch.uint8, device="cuda")
        room[:, at : at + k] = a.data.view(torch.uint8)
        apart = type(a)(room[:, at : at + k].view(torch.float8_e4m3fn), a.scale, a.format, a.block, a.layout, a.rule, a.segments)
        assert relative_error(grouped_gemm(apart, w, offsets), want) <= 4e-3


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")
@pytest.mark.parametrize("capacity", [8, 63, 64, 65, 128])
def test_tail_masked_rows_on_hopper(capacity):
    """Counts past the capacity and below 0: the next expert's rows stay as they are."""
    a, w = made((3, capacity), 8192, 256, 3)
    assert hopper_kernel(GroupedGemmProblem(3 * capacity, 3, 8192, 256, "fp8_block"), 1, True, arch_of(torch.device("cuda"))) is not None
    for counts in ([capacity + 9, -3, capacity], [2**31 - 1, 1, 0], [0, 10**6, -(2**31)]):
        out = torch.full((3, capacity, 8192), 5.0, dtype=torch.bfloat16, device="cuda")
        grouped_gemm(a, w, ints(counts), out=out)
        right(out, a, w, ints(counts))
