"""The same tests for every function, format and implementation: a skip is the reason that `explain` would give. CPU machines run torch's alone."""

import re

import pytest
import torch

from moe_ops import Routing, bmm, dense_gemm, dequantize, explain, grouped_gemm, quantize, quantize_weight
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.quant.fold import fold_weight
from moe_ops.quant.quantize import quantize_folded

IMPLS = ("triton", "deep_gemm", "cutlass", "torch")
FORMATS = ("fp8_block", "mxfp8", "mxfp8 folded", "plain")
E, N, K = 4, 320, 512
BOUND = 3e-3

every = pytest.mark.parametrize("fmt", FORMATS)
whoever = pytest.mark.parametrize("impl", IMPLS)


@pytest.fixture
def run(impl, device):
    """Calls a function by `impl`, and skips with the reason of one that cannot; ours cannot be unable on a GPU, nor torch anywhere."""

    def call(function, *args, **options):
        try:
            return function(*args, impl=impl, **options)
        except ValueError as refused:
            found = re.search(r"impl '\w+' (cannot run here: .*|needs CUDA tensors.*)", str(refused))
            if found is None or impl == "torch" or (impl == "triton" and device.type == "cuda"):
                raise
            pytest.skip(f"{impl}: {found[1][:300]}")

    return call


@pytest.fixture(autouse=True)
def built(impl, device):
    """A library that the first call would compile for a minute is none of these tests' business."""
    if impl == "cutlass" and device.type == "cuda":
        for op in ("grouped_gemm", "dense_gemm"):
            plan = explain(op, rows=8, n=N, k=K, device="cuda")["cutlass"].plan
            if plan is not None and "compiled by the first call" in plan:
                pytest.skip("CUTLASS: not built (moe-ops build cutlass)")


def quantized(x, fmt):
    return x if fmt == "plain" else quantize_folded(x) if fmt.endswith("folded") else quantize(x, fmt)


def weight(shape, fmt, device):
    # scales of four binades at most within 128x128, so that every one can be folded
    w = uneven(shape, block=(128, 128), seed=2, spread=2).to(device)
    if fmt == "plain":
        return w
    q = quantize_weight(w, fmt.split()[0])
    if fmt.endswith("folded"):
        q, report = fold_weight(q)
        assert report.folded
    return q


def values(q):
    return q.float() if isinstance(q, torch.Tensor) else dequantize(q)


def spoil(a, rows):
    """NaN in rows that nobody may read."""
    data = a if isinstance(a, torch.Tensor) else a.data.view(torch.uint8)
    data[rows] = float("nan") if isinstance(a, torch.Tensor) else 0x7F


def ints(numbers, device):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def agrees(out, a, w, offsets, order=None, top_k=1):
    """Rows offsets[e] .. offsets[e + 1] are those of expert e; the rest is 5, as before."""
    x, low = values(a), 0
    for e, high in enumerate(offsets[1:]):
        rows = slice(low, high) if order is None else order[low:high].long() // top_k
        assert high == low or relative_error(out[low:high], x[rows] @ values(w)[e].T) <= BOUND
        low = high
    assert (out[low:] == 5.0).all()


@whoever
@every
@pytest.mark.parametrize("counts", [[5, 0, 70, 1], [0, 0, 0, 0], [0, 200, 0, 0]], ids=["EMPTY: between", "EMPTY: all", "TAIL: one expert"])
def test_packed_rows(run, device, fmt, counts):
    rows = sum(counts) + 3
    a, w = quantized(uneven((rows, K), seed=1).to(device), fmt), weight((E, N, K), fmt, device)
    spoil(a, slice(sum(counts), None))
    offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
    out = torch.full((rows, N), 5.0, dtype=torch.bfloat16, device=device)
    assert run(grouped_gemm, a, w, ints(offsets, device), out=out) is out
    agrees(out, a, w, offsets)


@whoever
@every
def test_sent_gathered_tokens(run, device, fmt):
    """SENT: pairs of nobody (-1, an expert elsewhere); a token without any expert holds NaN."""
    tokens, top_k = 40, 2
    ids = torch.randint(0, E, (tokens, top_k), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    ids[::5, 1], ids[3, 0], ids[7] = -1, E + 2, -1
    routing = Routing.from_topk(ids.to(device), torch.ones(tokens, top_k, device=device), E + 4, local=(0, E))
    a, w = quantized(uneven((tokens, K), seed=1).to(device), fmt), weight((E, N, K), fmt, device)
    spoil(a, 7)
    out = torch.full((tokens * top_k, N), 5.0, dtype=torch.bfloat16, device=device)
    run(grouped_gemm, a, w, routing, gather=True, out=out)
    agrees(out, a, w, routing.offsets.tolist(), routing.order, top_k)


@whoever
@every
@pytest.mark.parametrize("capacity", [8, 65, 128])
def test_tail_masked_rows(run, device, fmt, capacity):
    counts = [0, capacity, capacity + 9, 3]
    a, w = quantized(uneven((E, capacity, K), seed=1).to(device), fmt), weight((E, N, K), fmt, device)
    for e, count in enumerate(counts):
        spoil(a, (e, slice(count, None)))
    out = torch.full((E, capacity, N), 5.0, dtype=torch.bfloat16, device=device)
    run(grouped_gemm, a, w, ints(counts, device), out=out)
    for e, count in enumerate(counts):
        filled = min(count, capacity)
        assert filled == 0 or relative_error(out[e, :filled], values(a)[e, :filled] @ values(w)[e].T) <= BOUND
        assert (out[e, filled:] == 5.0).all()


@whoever
@every
@pytest.mark.parametrize("given", [True, False], ids=["quantized", "16-bit"])
@pytest.mark.parametrize("m", [0, 1, 17, 130])
def test_dense(run, device, fmt, given, m):
    """EMPTY, TAIL, LAYOUT: rows out of a wider buffer of NaN, MN-major scales where there are some."""
    wide = torch.full((m + 1, K + 64), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:m, 32 : 32 + K] = uneven((m, K), seed=1)
    x, w = wide[:m, 32 : 32 + K], weight((N, K), fmt, device)
    forms = [quantized(x, fmt) if given else x]
    if given and fmt == "fp8_block" and m:
        forms.append(quantize(x, fmt, layout="mn_major"))
    for a in forms:
        out = torch.full((m, N), float("nan"), dtype=torch.bfloat16, device=device)
        assert run(dense_gemm, a, w, out=out) is out
        fresh = run(dense_gemm, a, w)
        assert fresh.shape == (m, N) and fresh.dtype == torch.bfloat16
        for y in (out, fresh) if m else ():
            assert relative_error(y, values(quantized(x, fmt)) @ values(w).T) <= BOUND


@whoever
@every
@pytest.mark.parametrize("given", [True, False], ids=["quantized", "16-bit"])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_layout_heads(run, device, fmt, given, tokens):
    """A slice of a wider head in, (T, heads, N) out."""
    q = uneven((tokens, E, K + 64), seed=1).to(device)[..., :K]
    a, w = quantized(q, fmt) if given else q, weight((E, N, K), fmt, device)
    out = torch.full((tokens, E, N), float("nan"), dtype=torch.bfloat16, device=device)
    assert run(bmm, a, w, out=out) is out and run(bmm, a, w).shape == (tokens, E, N)
    if tokens:
        wanted = torch.einsum("thk,hnk->thn", values(quantized(q.contiguous(), fmt)), values(w))
        assert relative_error(out, wanted) <= BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "deep_gemm", "cutlass"])
@every
def test_graph_replay_with_changed_counts(run, device, fmt):
    """GRAPH: packed rows; none, one expert alone, uneven ones."""
    rows = 60
    a, w = quantized(uneven((rows, K), seed=1).to(device), fmt), weight((E, N, K), fmt, device)
    offsets, out = ints([0, 15, 30, 30, 60], device), torch.zeros((rows, N), dtype=torch.bfloat16, device=device)
    run(grouped_gemm, a, w, offsets, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(grouped_gemm, a, w, offsets, out=out)
    for ends in ([0, 0, 0, 0], [60, 60, 60, 60], [1, 2, 3, 59], [0, 0, 30, 60]):
        offsets.copy_(ints([0, *ends], device))
        out.fill_(5.0)
        graph.replay()
        agrees(out, a, w, [0, *ends])


@pytest.mark.gpu
@whoever
@every
@pytest.mark.parametrize("m", [1, 17, 64])
def test_graph_replay_with_changed_activations(run, device, impl, fmt, m):
    """GRAPH: the dense and the batched GEMM, on 16-bit rows, which each quantizes in its own way; N as torch._scaled_mm wants it."""
    n, ran = 384, 0
    if impl == "torch" and explain("dense_gemm", rows=m, n=n, k=K, format=fmt.split()[0], device="cuda")["torch"].plan != "torch._scaled_mm":
        pytest.skip("torch: the reference would compute, which nobody captures")
    dense, heads = (
        (uneven((m, K), seed=1).to(device), weight((n, K), fmt, device)),
        (uneven((m, E, K), seed=2).to(device), weight((E, n, K), fmt, device)),
    )
    for function, (a, w), product in ((dense_gemm, dense, "mk,nk->mn"), (bmm, heads, "thk,hnk->thn")):
        try:
            run(function, a, w)
        except pytest.skip.Exception:
            if ran:  # CUTLASS has no product of heads
                continue
            raise
        if impl == "torch" and function is bmm:
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(function, a, w)
        for seed in (5, 6):
            a.copy_(uneven(tuple(a.shape), seed=seed))
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, run(function, a, w))
            wanted = torch.einsum(product, values(quantized(a, fmt)), values(w))
            assert relative_error(out, wanted) <= (4e-3 if impl == "torch" else BOUND)
        ran += 1
