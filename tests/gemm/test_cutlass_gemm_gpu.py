"""The CUTLASS kernels behind our functions, on a GPU, where they have been built or can be: real shapes, empty experts, tails, graphs."""

import pytest
import torch

from moe_ops import Routing, dense_gemm, explain, grouped_gemm, make_qtensor, quantize, quantize_weight
from moe_ops.core.numerics import random_topk, relative_error, uneven
from moe_ops.gemm import cutlass_build as build
from moe_ops.gemm import cutlass_choice as choice
from moe_ops.gemm import cutlass_library as library
from moe_ops.gemm import cutlass_probe as probe
from moe_ops.gemm.cutlass_gemm import arch_name
from moe_ops.gemm.registry import Problem, Where

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def fmt():
    """The format that the kernels of this GPU take; skips with the reason where they cannot be had."""
    here = Where.of(torch.device("cuda"))
    for name in ("fp8_block", "mxfp8"):
        problem = Problem("grouped_gemm", name, 64, 256, 256, 2)
        reason = choice.reason(problem, here)
        if reason is None:
            choice.make_ready(problem, here)
            return name
    pytest.skip(str(reason)[:400])


@pytest.fixture(scope="module")
def dense():
    here, problem = Where.of(torch.device("cuda")), Problem("dense_gemm", "fp8_block", 64, 256, 256)
    reason = choice.reason(problem, here)
    if reason is not None:
        pytest.skip(reason[:400])
    choice.make_ready(problem, here)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def ends(counts):
    return ints([0, *torch.tensor(counts).cumsum(0).tolist()])


def weight(fmt, e, n, k, segments=1):
    """Random e4m3 bits and uneven scales, made on the GPU."""
    data = torch.randint(0, 256, (e, n, k), dtype=torch.uint8, device="cuda")
    data[(data & 0x7F) == 0x7F] = 0x30  # no NaN
    if fmt == "mxfp8":
        return make_qtensor(data, torch.randint(110, 117, (e, n, k // 32), dtype=torch.uint8, device="cuda"), fmt)
    return make_qtensor(data, torch.rand(e, segments * -(-n // segments // 128), -(-k // 128), device="cuda") * 1e-3 + 1e-4, fmt, segments=segments)


def spoil(a, rows):
    """NaN in data and scales of rows that nobody owns."""
    a.data.view(torch.uint8)[..., rows:, :] = 0x7F
    a.scale[..., rows:, :] = 255 if a.scale.dtype == torch.uint8 else float("nan")


@pytest.mark.parametrize("index", [0, 1], ids=["small tile", "large tile"])
@pytest.mark.parametrize("kind", ["grouped", "dense"])
def test_every_tile_by_itself(fmt, kind, index):
    kernels = build.of_kind(arch_name(Where.of(torch.device("cuda")).arch.capability), kind)
    if not kernels:
        pytest.skip(f"there is no {kind} kernel for this architecture")
    build.build(kernels)
    assert probe.try_kernel(kernels[index], torch.device("cuda", torch.cuda.current_device())) is None


@pytest.mark.parametrize(
    "e,n,k,counts,segments",
    [
        (8, 3072, 4096, [1] * 8, 2),
        (16, 4096, 1536, [64] * 16, 1),
        (8, 4096, 7168, [948, 92, 15, 315, 34, 30, 244, 370], 1),
        (32, 5760, 2880, [0, 40] * 16, 2),
        (256, 256, 512, [1] + [0] * 16 + [129] + [0] * 237 + [3], 1),
        (32, 264, 272, [0] * 31 + [700], 1),
        (64, 256, 512, [0] * 64, 1),
        (4, 256, 512, [1, 3, 17, 130], 1),
    ],
    ids=["Qwen3 decode", "Qwen3 EP8", "DeepSeek skew", "gpt-oss, ragged", "EMPTY: three of 256", "one expert has all", "EMPTY: all", "TAIL: rows"],
)
def test_real_shapes(fmt, e, n, k, counts, segments):
    if fmt == "mxfp8":
        k = -(-k // 32) * 32
    w, rows = weight(fmt, e, n, k, segments), sum(counts)
    a = quantize(uneven((rows + 5, k), seed=1).cuda(), fmt)
    spoil(a, rows)
    out = torch.full((rows + 5, n), 5.0, dtype=torch.bfloat16, device="cuda")
    grouped_gemm(a, w, ends(counts), impl="cutlass", out=out)
    ref = grouped_gemm(a, w, ends(counts), impl="torch", out_dtype=torch.float32)
    assert (out[rows:] == 5.0).all()
    if rows:
        assert relative_error(out[:rows], ref[:rows]) <= 2e-3
    fresh = torch.full_like(out, float("nan"))
    grouped_gemm(a, w, ends(counts), impl="cutlass", out=fresh)
    assert torch.equal(fresh[:rows], out[:rows])


@pytest.mark.parametrize("capacity", [1, 8, 100, 130, 256])
@pytest.mark.parametrize("layout", ["row_major", "mn_major"])
def test_masked_rows(fmt, capacity, layout):
    if fmt == "mxfp8" and layout == "mn_major":
        pytest.skip("mxfp8 takes row_major scales")
    counts = [0, 1, capacity, max(0, capacity - 1), capacity + 9, -3]
    a = quantize(uneven((len(counts), capacity, 512), seed=1).cuda(), fmt, layout=layout)
    w = quantize_weight(uneven((len(counts), 384, 512), block=(128, 128), seed=2).cuda(), fmt)
    for i, c in enumerate(counts):
        a.data.view(torch.uint8)[i, max(0, c) :] = 0x7F
        a.scale[i, max(0, c) :] = 255 if fmt == "mxfp8" else float("nan")
    out = torch.full((len(counts), capacity, 384), 5.0, dtype=torch.bfloat16, device="cuda")
    grouped_gemm(a, w, ints(counts), impl="cutlass", out=out)
    ref = grouped_gemm(a, w, ints(counts), impl="torch", out_dtype=torch.float32)
    for i, c in enumerate(counts):
        filled = min(max(0, c), capacity)
        assert (out[i, filled:] == 5.0).all()
        if filled:
            assert relative_error(out[i, :filled], ref[i, :filled]) <= 2e-3


@pytest.mark.parametrize("tokens", [1, 33, 700])
def test_sent_gathered_tokens_and_pairs_of_nobody(fmt, tokens):
    e, top_k, n, k = 8, 4, 512, 1024
    ids, weights = random_topk(tokens, e, top_k, seed=4)
    if tokens > 1:
        ids[2] = -1
        ids[3, 1] = -1
    routing = Routing.from_topk(ids.cuda(), weights.cuda(), e)
    a = quantize(uneven((tokens, k), seed=1).cuda(), fmt)
    w = quantize_weight(uneven((e, n, k), block=(128, 128), seed=2).cuda(), fmt)
    out = torch.full((tokens * top_k, n), 5.0, dtype=torch.bfloat16, device="cuda")
    grouped_gemm(a, w, routing, gather=True, impl="cutlass", out=out)
    ref = grouped_gemm(a, w, routing, gather=True, impl="torch", out_dtype=torch.float32)
    filled = int(routing.offsets[-1])
    assert relative_error(out[:filled], ref[:filled]) <= 2e-3 and (out[filled:] == 5.0).all()


@pytest.mark.parametrize("offsets", [[0, 10**6, -5, 8, 40], [-(2**31), 2**31 - 1, 0, 3, 3], [40, 30, 20, 10, 0]])
def test_garbage_in_offsets_stays_inside(fmt, offsets):
    a = quantize(uneven((40, 512), seed=1).cuda(), fmt)
    w = quantize_weight(uneven((4, 256, 512), seed=2).cuda(), fmt)
    grouped_gemm(a, w, ints(offsets), impl="cutlass")
    torch.cuda.synchronize()
    ref = grouped_gemm(a, w, ends([10] * 4), impl="torch", out_dtype=torch.float32)
    assert relative_error(grouped_gemm(a, w, ends([10] * 4), impl="cutlass"), ref) <= 2e-3


def test_layout_rows_with_any_distance(fmt):
    if fmt == "mxfp8":
        pytest.skip("the scales of mxfp8 are led into tiles whatever the rows' distance")
    x = quantize(uneven((70, 512), seed=1).cuda(), fmt)
    w = quantize_weight(uneven((2, 256, 512), seed=2).cuda(), fmt)
    expected = grouped_gemm(x, w, ends([30, 40]), impl="cutlass")
    for at, width in ((16, 1024), (3, 1021)):
        wide = torch.full((70, width), 0x7F, dtype=torch.uint8, device="cuda")
        wide[:, at : at + 512] = x.data.view(torch.uint8)
        a = make_qtensor(wide[:, at : at + 512], x.scale, fmt, weight=False)
        assert torch.equal(grouped_gemm(a, w, ends([30, 40]), impl="cutlass"), expected)


@pytest.mark.parametrize("m", [1, 3, 64, 130])
@pytest.mark.parametrize("n,k", [(576, 7168), (7168, 2048), (264, 272)])
def test_dense(dense, n, k, m):
    x, w = uneven((m, k), seed=1).cuda(), quantize_weight(uneven((n, k), block=(128, 128), seed=2).cuda(), "fp8_block")
    for a in (quantize(x, "fp8_block"), quantize(x, "fp8_block", layout="mn_major"), x):
        ref = dense_gemm(quantize(x, "fp8_block"), w, impl="torch", out_dtype=torch.float32)
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        dense_gemm(a, w, impl="cutlass", out=out)
        assert relative_error(out, ref) <= (2e-3 if a is not x else 3e-3)
        assert torch.equal(dense_gemm(a, w, impl="cutlass"), out)


@pytest.mark.parametrize("rows", [48, 600])
@pytest.mark.parametrize("gather", [False, True], ids=["packed", "gathered"])
def test_graph_replay_with_changed_counts(fmt, rows, gather):
    e, n, k = 4, 256, 512
    a = quantize(uneven((rows, k), seed=1).cuda(), fmt)
    w = quantize_weight(uneven((e, n, k), seed=2).cuda(), fmt)
    ids = torch.arange(rows, device="cuda").remainder(e).view(rows, 1)
    routing = Routing.from_topk(ids, torch.ones(rows, 1, device="cuda"), e)
    out = torch.zeros((rows, n), dtype=torch.bfloat16, device="cuda")

    def call(impl, **options):
        return grouped_gemm(a, w, routing if gather else routing.offsets, gather=gather, impl=impl, **options)

    call("cutlass", out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call("cutlass", out=out)
    for last in ([0, 0, 0, 0], [rows, rows, rows, rows], [1, 2, 3, rows - 1], [0, 0, rows // 2, rows], [rows // 4, rows // 2, rows // 2, rows]):
        routing.offsets.copy_(ints([0, *last]))
        out.fill_(float("nan"))
        graph.replay()
        ref = call("torch", out_dtype=torch.float32)
        assert out[last[-1] :].isnan().all()
        if last[-1]:
            assert relative_error(out[: last[-1]], ref[: last[-1]]) <= 2e-3


def test_graph_replay_of_masked_rows_and_of_dense(fmt, dense):
    a = quantize(uneven((3, 96, 512), seed=1).cuda(), fmt)
    w = quantize_weight(uneven((3, 256, 512), seed=2).cuda(), fmt)
    counts, out = ints([5, 0, 96]), torch.zeros((3, 96, 256), dtype=torch.bfloat16, device="cuda")
    linear = torch.zeros((96, 256), dtype=torch.bfloat16, device="cuda")
    one = quantize(uneven((96, 512), seed=1).cuda(), fmt)

    def call():
        grouped_gemm(a, w, counts, impl="cutlass", out=out)
        dense_gemm(one, w[0], impl="cutlass", out=linear)

    call()
    expected, graph = linear.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for changed in ([0, 0, 0], [96, 200, 1], [1, 65, 17]):
        counts.copy_(ints(changed))
        out.fill_(float("nan")), linear.fill_(float("nan"))
        graph.replay()
        ref = grouped_gemm(a, w, counts, impl="torch", out_dtype=torch.float32)
        for i, c in enumerate(changed):
            filled = min(c, 96)
            assert out[i, filled:].isnan().all()
            assert filled == 0 or relative_error(out[i, :filled], ref[i, :filled]) <= 2e-3
        assert torch.equal(linear, expected)


def test_graph_first_call_under_capture_is_refused_and_leaves_the_process_well(fmt, monkeypatch):
    a = quantize(uneven((24, 640), seed=1).cuda(), fmt)
    w = quantize_weight(uneven((2, 320, 640), seed=2).cuda(), fmt)
    offsets = ends([7, 17])
    monkeypatch.setattr(library, "_warm", set())
    with pytest.raises(RuntimeError, match="has never run on this GPU and cannot be loaded while a CUDA graph is being captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            grouped_gemm(a, w, offsets, impl="cutlass")
    ref = grouped_gemm(a, w, offsets, impl="torch", out_dtype=torch.float32)
    assert relative_error(grouped_gemm(a, w, offsets, impl="cutlass"), ref) <= 2e-3


def test_a_side_stream(fmt):
    a = quantize(uneven((130, 1024), seed=1).cuda(), fmt)
    w = quantize_weight(uneven((2, 512, 1024), seed=2).cuda(), fmt)
    offsets = ends([60, 70])
    expected, stream = grouped_gemm(a, w, offsets, impl="cutlass"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [grouped_gemm(a, w, offsets, impl="cutlass") for _ in range(20)]
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(out, expected) for out in found)


@pytest.mark.multigpu
def test_another_device(fmt):
    w = quantize_weight(uneven((2, 256, 512), seed=2), fmt)
    a = quantize(uneven((40, 512), seed=1), fmt)
    outs = [grouped_gemm(a.to(d), w.to(d), torch.tensor([0, 15, 40], dtype=torch.int32, device=d), impl="cutlass") for d in ("cuda:1", "cuda:0")]
    assert torch.equal(outs[0].cpu(), outs[1].cpu())


def test_explain_says_what_would_run(fmt):
    answer = explain("grouped_gemm", rows=64, n=256, k=512, groups=8, format=fmt)["cutlass"]
    assert answer.reason is None and answer.plan.startswith("CUTLASS, ") and "compiled by the first call" not in answer.plan
