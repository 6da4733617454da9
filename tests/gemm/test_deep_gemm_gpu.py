"""DeepGEMM itself behind our functions, on a GPU, where it is installed and works: real shapes, empty experts, tails, graphs.

Every size is a kernel that the library compiles for seconds, so there are few.
"""

import pytest
import torch

from moe_ops import bmm, dense_gemm, grouped_gemm, make_qtensor, quantize, quantize_weight
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm import deep_gemm
from moe_ops.gemm.registry import Where

pytestmark = pytest.mark.gpu


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture
def real():
    here = Where.of(torch.device("cuda"))
    for forms in (("contiguous", "psum"), ("masked",)):  # the one or the other is enough for packed rows
        reason = deep_gemm.machine_reason(here, forms)
        if reason is not None:
            pytest.skip(reason[:400])


@pytest.mark.parametrize(
    "e,n,k,counts",
    [
        (8, 3072, 4096, [1] * 8),
        (8, 4096, 7168, [948, 92, 15, 315, 34, 30, 244, 370]),
        (256, 256, 512, [1] + [0] * 16 + [129] + [0] * 237 + [3]),
        (4, 256, 512, [0] * 4),
    ],
    ids=["Qwen3 decode", "DeepSeek skew", "EMPTY: three of 256", "EMPTY: all"],
)
def test_library_on_real_shapes(real, e, n, k, counts):
    data = torch.randint(0, 0x70, (e, n, k), dtype=torch.uint8, device="cuda")
    w = make_qtensor(data, torch.rand(e, n // 128, k // 128, device="cuda") * 1e-3 + 1e-4, "fp8_block")
    a = quantize(uneven((sum(counts) + 5, k), seed=1).cuda(), "fp8_block")
    a.data.view(torch.uint8)[sum(counts) :] = 0x7F
    offsets = ints([0, *torch.tensor(counts).cumsum(0).tolist()], "cuda")
    out = grouped_gemm(a, w, offsets, impl="deep_gemm")
    ref = grouped_gemm(a, w, offsets, impl="torch", out_dtype=torch.float32)
    assert relative_error(out[: sum(counts)], ref[: sum(counts)]) <= 2e-3
    again = torch.full_like(out, 5.0)
    grouped_gemm(a, w, offsets, impl="deep_gemm", out=again)
    assert torch.equal(again[: sum(counts)], out[: sum(counts)]) and (again[sum(counts) :] == 5.0).all()


@pytest.mark.parametrize("capacity", [128, 384])
def test_library_masked_in_place(real, capacity):
    counts = [0, 1, capacity + 7, capacity - 1]
    a = quantize(uneven((4, capacity, 512), seed=1).cuda(), "fp8_block", layout="mn_major")
    assert deep_gemm.in_place(a.data, a.scale, "fp8_block")
    w = quantize_weight(uneven((4, 384, 512), seed=2).cuda(), "fp8_block")
    out = grouped_gemm(a, w, ints(counts, "cuda"), impl="deep_gemm")
    ref = grouped_gemm(a, w, ints(counts, "cuda"), impl="torch", out_dtype=torch.float32)
    for i, c in enumerate(counts):
        assert relative_error(out[i, :c], ref[i, :c]) <= 2e-3


@pytest.mark.parametrize("capacity", [8, 100, 256])
def test_library_masked(real, capacity):
    counts = [0, 1, capacity, capacity - 1]
    a = quantize(uneven((4, capacity, 512), seed=1).cuda(), "fp8_block")
    w = quantize_weight(uneven((4, 384, 512), seed=2).cuda(), "fp8_block")
    out = torch.full((4, capacity, 384), 5.0, dtype=torch.bfloat16, device="cuda")
    grouped_gemm(a, w, ints(counts, "cuda"), impl="deep_gemm", out=out)
    ref = grouped_gemm(a, w, ints(counts, "cuda"), impl="torch", out_dtype=torch.float32)
    for i, c in enumerate(counts):
        assert relative_error(out[i, :c], ref[i, :c]) <= 2e-3 and (out[i, c:] == 5.0).all()


@pytest.mark.parametrize("m", [1, 70])
@pytest.mark.parametrize("n,k", [(576, 7168), (7168, 2048)])
def test_library_dense(n, k, m):
    reason = deep_gemm.machine_reason(Where.of(torch.device("cuda")), ("dense",))
    if reason is not None:
        pytest.skip(reason[:400])
    x, w = uneven((m, k), seed=1).cuda(), quantize_weight(uneven((n, k), block=(128, 128), seed=2).cuda(), "fp8_block")
    for a in (x, quantize(x, "fp8_block"), quantize(x, "fp8_block", layout="mn_major")):
        assert relative_error(dense_gemm(a, w, impl="deep_gemm"), dense_gemm(a, w, impl="torch", out_dtype=torch.float32)) <= 3e-3


@pytest.mark.parametrize("rows", [48, 600])
def test_graph_replay_with_changed_counts(real, rows):
    e, n, k = 4, 256, 512
    a = quantize(uneven((rows, k), seed=1).cuda(), "fp8_block")
    w = quantize_weight(uneven((e, n, k), seed=2).cuda(), "fp8_block")
    offsets = ints([0, rows // 4, rows // 2, rows // 2, rows], "cuda")
    out = torch.zeros((rows, n), dtype=torch.bfloat16, device="cuda")
    grouped_gemm(a, w, offsets, impl="deep_gemm", out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(a, w, offsets, impl="deep_gemm", out=out)
    for ends in ([0, 0, 0, 0], [rows, rows, rows, rows], [1, 2, 3, rows - 1], [0, 0, rows // 2, rows]):
        offsets.copy_(ints([0, *ends], "cuda"))
        out.fill_(5.0)
        graph.replay()
        ref = grouped_gemm(a, w, offsets, impl="torch", out_dtype=torch.float32)
        assert relative_error(out[: ends[-1]], ref[: ends[-1]]) <= 2e-3 and (out[ends[-1] :] == 5.0).all()


def test_graph_first_call_under_capture_is_refused_and_leaves_the_process_well(real):
    a = quantize(uneven((24, 640), seed=1).cuda(), "fp8_block")
    w = quantize_weight(uneven((2, 320, 640), seed=2).cuda(), "fp8_block")
    offsets = ints([0, 7, 24], "cuda")
    with pytest.raises(RuntimeError, match=r"never (run|been compiled) for .* while a CUDA graph is being captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            grouped_gemm(a, w, offsets, impl="deep_gemm")
    ref = grouped_gemm(a, w, offsets, impl="torch", out_dtype=torch.float32)
    assert relative_error(grouped_gemm(a, w, offsets, impl="deep_gemm"), ref) <= 2e-3


@pytest.mark.parametrize("tokens", [1, 130])
@pytest.mark.parametrize("n,k", [(512, 128), (128, 512)], ids=["k_b_proj", "v_b_proj"])
def test_library_bmm(n, k, tokens):
    reason = deep_gemm.machine_reason(Where.of(torch.device("cuda")), ("bmm",))
    if reason is not None:
        pytest.skip(reason[:400])
    x, w = uneven((tokens, 128, k), seed=1).cuda(), quantize_weight(uneven((128, n, k), block=(128, 128), seed=2).cuda(), "fp8_block")
    for a in (x, quantize(x, "fp8_block")):
        assert relative_error(bmm(a, w, impl="deep_gemm"), bmm(a, w, impl="torch", out_dtype=torch.float32)) <= 3e-3
