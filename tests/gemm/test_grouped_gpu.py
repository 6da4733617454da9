"""Grouped GEMM on a GPU: real sizes, big addresses, graphs, devices."""

import pytest
import torch

from moe_ops import Routing, fused_moe, grouped_gemm, make_qtensor, quantize, quantize_weight
from moe_ops.core.formats import QTensor
from moe_ops.core.numerics import random_topk, relative_error, uneven
from moe_ops.gemm.grouped import grouped_gemm_ref
from moe_ops.gemm.grouped_config import GroupedGemmConfig

pytestmark = pytest.mark.gpu


def random_weight(fmt, e, n, k, segments=1) -> QTensor:
    """Random e4m3 bits and uneven scales made on the GPU: no bf16 copy of a large weight is needed."""
    data = torch.randint(0, 256, (e, n, k), dtype=torch.uint8, device="cuda")
    data[(data & 0x7F) == 0x7F] = 0x30  # no NaN
    if fmt == "mxfp8":
        return make_qtensor(data, torch.randint(110, 117, (e, n, k // 32), dtype=torch.uint8, device="cuda"), fmt)
    return make_qtensor(data, torch.rand(e, segments * -(-n // segments // 128), -(-k // 128), device="cuda") * 1e-3 + 1e-4, fmt, segments=segments)


def ref_of(q, w, offsets):
    operands = (q.data.view(torch.uint8), q.scale, w.data.view(torch.uint8), w.scale)
    return grouped_gemm_ref(*operands, None, offsets, None, 1, w.format.name, w.segments, torch.float32)


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8"])
@pytest.mark.parametrize(
    "e,n,k,counts",
    [
        (16, 3072, 4096, [1] * 16),
        (16, 4096, 1536, [64] * 16),
        (8, 4096, 7168, [948, 92, 15, 315, 34, 30, 244, 370]),
        (32, 5760, 2880, [0, 40] * 16),
        (256, 256, 512, [1] + [0] * 16 + [129] + [0] * 237 + [3]),
        (512, 512, 256, [2] * 512),
    ],
    ids=["Qwen3 decode", "Qwen3 EP8 m=64", "DeepSeek skew", "gpt-oss, ragged", "three of 256", "512 experts"],
)
def test_real_shapes(fmt, e, n, k, counts):
    w = random_weight(fmt, e, n, k, segments=2 if fmt == "fp8_block" and n == 5760 else 1)
    q = quantize(uneven((sum(counts), k), seed=1).cuda(), fmt)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    ref = ref_of(q, w, offsets)
    for dtype, bound in ((torch.bfloat16, 2e-3), (torch.float32, 5e-4)):
        assert relative_error(grouped_gemm(q, w, offsets, out_dtype=dtype), ref) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("e,n,k,experts", [(64, 14336, 4096, [63]), (512, 2048, 4096, [255, 256, 511])], ids=["2^31 bytes", "crossed at 256"])
def test_addr_expert_base_beyond_int32(e, n, k, experts):
    """ADDR: the expert's base is a 64-bit product; the same rows on that expert alone give the same bits."""
    w = random_weight("fp8_block", e, n, k)
    q = quantize(uneven((16 * len(experts), k), seed=1).cuda(), "fp8_block")
    counts = torch.zeros(e, dtype=torch.int64)
    counts[experts] = 16
    offsets = torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    cfg = GroupedGemmConfig(16, 64, 128, 4, 4, 0, True)
    out = grouped_gemm(q, w, offsets, config=cfg)
    for i, expert in enumerate(experts):
        rows = slice(16 * i, 16 * i + 16)
        one = make_qtensor(w.data[expert : expert + 1], w.scale[expert : expert + 1], "fp8_block")
        alone = make_qtensor(q.data[rows], q.scale[rows].contiguous(), "fp8_block", weight=False)
        assert torch.equal(out[rows], grouped_gemm(alone, one, torch.tensor([0, 16], dtype=torch.int32, device="cuda"), config=cfg))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [65528, 65536, 131072, 600000])
def test_limit_many_rows(rows):
    """LIMIT: more row tiles than a grid dimension other than x may have; more output elements than int32 at the last size."""
    n, k = (4096, 128) if rows == 600000 else (128, 128)
    w = random_weight("fp8_block", 4, n, k)
    data = torch.randint(0, 0x70, (rows, k), dtype=torch.uint8, device="cuda")
    q = make_qtensor(data, torch.rand(rows, 1, device="cuda") + 0.1, "fp8_block", weight=False)
    offsets = torch.tensor([0, 10, rows // 2, rows - 3, rows], dtype=torch.int32, device="cuda")
    out = grouped_gemm(q, w, offsets)
    for row in (0, 9, 10, rows // 2 - 1, rows // 2, rows - 4, rows - 3, rows - 1):
        e = int((offsets[1:] <= row).sum())
        one = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        a = make_qtensor(q.data[row : row + 1], q.scale[row : row + 1].contiguous(), "fp8_block", weight=False)
        b = make_qtensor(w.data[e : e + 1], w.scale[e : e + 1], "fp8_block")
        assert relative_error(out[row : row + 1], ref_of(a, b, one)) < 3e-3


def test_graph_replay_with_changed_counts():
    """GRAPH: one capture, replayed with other counts in the same buffers, equals eager bit for bit."""
    e, n, k, rows = 8, 512, 1024, 64
    w, q = random_weight("fp8_block", e, n, k), quantize(uneven((rows, k), seed=1).cuda(), "fp8_block")
    offsets = torch.zeros(e + 1, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    grouped_gemm(q, w, offsets, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(q, w, offsets, out=out)
    for counts in ([0] * 8, [1] + [0] * 7, [0, 0, 64, 0, 0, 0, 0, 0], [8] * 8, [5, 0, 20, 1, 0, 0, 30, 8]):
        offsets.copy_(torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        out.fill_(float("nan"))
        grouped_gemm(q, w, offsets, out=out)
        assert torch.equal(replayed.view(torch.int16), out.view(torch.int16))


def test_no_host_sync_and_no_allocation_in_the_out_forms():
    e, k_top, t, h, i = 8, 2, 40, 512, 256
    from moe_ops.layer.fused import make_workspace

    for fmt in ("fp8_block", "mxfp8"):
        w13, w2 = random_weight(fmt, e, 2 * i, h), random_weight(fmt, e, h, i)
        x = uneven((t, h), seed=1).cuda()
        ids, weights = random_topk(t, e, k_top)
        ids, weights = ids.cuda(), weights.cuda()
        routing = Routing.from_topk(ids, weights, e)
        out, ws = torch.empty_like(x), make_workspace(t, k_top, w13)
        fused_moe(x, w13, w2, routing, out=out, workspace=ws)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            fused_moe(x, w13, w2, routing, out=out, workspace=ws)
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
            fused_moe(x, w13, w2, Routing.from_topk(ids, weights, e))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert after == before


def test_empty_experts_in_dirty_memory():
    """EMPTY: 256 experts of which three have rows, allocator full of NaN: the result is finite and right; all counts 0 as well."""
    dirt = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    del dirt
    w = random_weight("fp8_block", 256, 256, 256)
    counts = torch.zeros(256, dtype=torch.int64)
    counts[0], counts[17], counts[255] = 1, 129, 3
    offsets = torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    q = quantize(uneven((133, 256), seed=1).cuda(), "fp8_block")
    out = grouped_gemm(q, w, offsets)
    assert torch.isfinite(out).all() and relative_error(out, ref_of(q, w, offsets)) <= 2e-3
    grouped_gemm(q, w, torch.zeros_like(offsets))
    torch.cuda.synchronize()


def test_current_stream_and_inputs_freed_at_once():
    """DEV: work is ordered by the stream it was called on; inputs freed right after the call may be overwritten."""
    w = random_weight("fp8_block", 4, 512, 1024)
    offsets = torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32, device="cuda")
    x = uneven((32, 1024), seed=1).cuda()
    want = grouped_gemm(quantize(x, "fp8_block"), w, offsets)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        q = quantize(x, "fp8_block")
        out = grouped_gemm(q, w, offsets)
        shape = q.data.shape
        del q
        torch.full(shape, 0xFF, dtype=torch.uint8, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, want)


@pytest.mark.multigpu
def test_tensors_on_another_device_than_the_current_one():
    w = quantize_weight(uneven((2, 128, 256), seed=2).to("cuda:1"), "fp8_block")
    q = quantize(uneven((4, 256), seed=1).to("cuda:1"), "fp8_block")
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32, device="cuda:1")
    out = grouped_gemm(q, w, offsets)
    assert out.device.index == 1 and torch.cuda.current_device() == 0
    assert relative_error(out, ref_of(q, w, offsets)) <= 2e-3
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        grouped_gemm(q, w, offsets.to("cuda:0"))
