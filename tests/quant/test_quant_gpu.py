"""What only a GPU shows: offsets beyond 2^31, grids, CUDA graphs, hidden synchronisations, compiles, cost by filled rows, other devices."""

import dataclasses
import math

import pytest
import torch

from moe_ops.core.formats import LAYOUTS, as_bytes
from moe_ops.core.launch import freeze
from moe_ops.core.numerics import uneven
from moe_ops.quant import fp8_block, mxfp8
from moe_ops.quant.activation import Activation
from moe_ops.quant.quantize import dequantize, quantize, quantize_into, quantize_weight
from moe_ops.quant.rows import filled_rows, new_quantized
from moe_ops.quant.scale_layout import to_layout
from moe_ops.quant.silu_mul_quantize import silu_mul_quantize, silu_mul_quantize_into
from moe_ops.quant.stochastic import key_of, stochastic_bits

pytestmark = pytest.mark.gpu
CUDA = "cuda"
FORMATS = ("fp8_block", "mxfp8")
OPS = {
    "quantize": lambda x, fmt, counts=None: quantize(x, fmt, counts=counts),
    "silu_mul_quantize": lambda x, fmt, counts=None: silu_mul_quantize(x, fmt, counts=counts),
}


def same(a, b):
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


def part(q, rows):
    """The last `rows` rows of a row-major result."""
    return q.data[..., -rows:, :].view(torch.uint8), q.scale[..., -rows:, :]


@pytest.mark.parametrize("shape", ((524416, 4096), (61682, 34816)), ids=("many rows", "wide rows"))
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_row_offsets_beyond_int32(op, fmt, shape):
    """ADDR: more than 2^31 elements; the last rows equal the same rows alone."""
    x = torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
    q, alone = OPS[op](x, fmt), OPS[op](x[-128:], fmt)
    for got, wanted in zip(part(q, 128), (alone.data.view(torch.uint8), alone.scale), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_expert_offsets_beyond_int32(op, fmt):
    """ADDR: masked rows whose last expert lies past 2^31 elements, few of them filled."""
    x = torch.zeros((512, 2056, 2048), device=CUDA, dtype=torch.bfloat16)
    x[-1, :3] = torch.randn(3, 2048, device=CUDA)
    counts = torch.zeros(512, device=CUDA, dtype=torch.int32)
    counts[-1] = 3
    q, alone = OPS[op](x, fmt, counts), OPS[op](x[-1, :3], fmt)
    assert torch.equal(q.data[-1, :3].view(torch.uint8), alone.data.view(torch.uint8)) and torch.equal(q.scale[-1, :3], alone.scale)


@pytest.mark.parametrize("fmt", FORMATS)
def test_weight_offsets_beyond_int32(fmt):
    """ADDR: 64 experts of 14336 x 4096: the last one equals itself alone, quantized and back."""
    w = torch.zeros((64, 14336, 4096), device=CUDA, dtype=torch.bfloat16)
    w[-1] = torch.randn(14336, 4096, device=CUDA) * 0.02
    q, alone = quantize_weight(w, fmt), quantize_weight(w[-1], fmt)
    assert same(q[63], alone)
    back = dequantize(q, torch.bfloat16)
    assert torch.equal(back[-1], dequantize(alone, torch.bfloat16)) and not back[:63].any()
    del back
    q = quantize_weight(w, fmt, stochastic_seed=1, name="w")
    values, _ = fp8_block.weight_values_ref(w[-1], 1, "fp32") if fmt == "fp8_block" else mxfp8.values_ref(w[-1], "rceil")
    index = torch.arange(63 * 14336 * 4096, 64 * 14336 * 4096, device=CUDA).view(14336, 4096)
    assert torch.equal(q.data[-1].view(torch.uint8), stochastic_bits(values, index, key_of(1, "w")))


def test_scale_layout_offsets_beyond_int32():
    """ADDR: more than 2^31 scale bytes."""
    q = quantize(torch.zeros((8, 8192), device=CUDA), "mxfp8")
    rows = 8_400_000
    scale = torch.zeros((rows, 256), device=CUDA, dtype=torch.uint8)
    scale[-100:] = torch.randint(1, 255, (100, 256), device=CUDA, dtype=torch.uint8)
    big = dataclasses.replace(q, data=q.data[:1, :1].expand(rows, 8192), scale=scale)
    back = to_layout(to_layout(big, "swizzle_32x4x4"), "row_major")
    assert torch.equal(back.scale[-100:], scale[-100:]) and not back.scale[:-100].any()


@pytest.mark.parametrize("rows", (65528, 65536, 131072))
@pytest.mark.parametrize("fmt", FORMATS)
def test_row_counts_around_the_grid_limit(fmt, rows):
    """LIMIT: no grid dimension of 65535 stands in the way."""
    x = uneven((rows, 128)).to(CUDA)
    module = fp8_block if fmt == "fp8_block" else mxfp8
    data, scale = module.quantize_rows_ref(x, "fp32" if fmt == "fp8_block" else "rceil")
    q = quantize(x, fmt)
    assert torch.equal(q.data.view(torch.uint8), data) and torch.equal(q.scale, scale)
    assert dequantize(q).isfinite().all()
    w = quantize_weight(x, fmt)
    if fmt == "mxfp8":
        assert torch.equal(w.scale, scale)
        assert torch.equal(to_layout(to_layout(q, "swizzle_32x4x4"), "row_major").scale, scale)
    both = torch.cat([x, x], 1)
    for got, wanted in zip(part(silu_mul_quantize(both, fmt), 5), part(silu_mul_quantize(both[-5:], fmt), 5), strict=True):
        assert torch.equal(got, wanted)


PATTERNS = {"none": [0] * 8, "one row": [0, 0, 1, 0, 0, 0, 0, 0], "one hot expert": [0, 64, 0, 0, 0, 0, 0, 0], "even": [8] * 8, "full": [64] * 8}


@pytest.mark.parametrize("form", ("packed", "masked"))
@pytest.mark.parametrize("fmt", FORMATS)
def test_graph_replays_with_other_counts_and_data(fmt, form):
    """GRAPH: captured once, replayed with five patterns: equal to eager bit for bit."""
    rule = "fp32" if fmt == "fp8_block" else "rceil"
    lead = (512,) if form == "packed" else (8, 64)
    x = torch.randn((*lead, 2 * 384), device=CUDA)
    counts = torch.zeros(8, device=CUDA, dtype=torch.int32)
    plain, gated = new_quantized(x, x.shape, fmt, "row_major"), new_quantized(x, (*lead, 384), fmt, "row_major")

    def run():
        quantize_into(x, *plain, counts, fmt, rule)
        silu_mul_quantize_into(x, *gated, counts, fmt, rule, "silu", 1.0, math.inf, 0.0, False)

    run()
    quantize(x, fmt, counts=counts, layout="mn_major")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
        public = quantize(x, fmt, counts=counts, layout="mn_major")
    for seed, pattern in enumerate(PATTERNS.values()):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        counts.copy_(torch.tensor(pattern, dtype=torch.int32))
        for t in (*plain, *gated):
            t.fill_(9)
        graph.replay()
        filled = filled_rows(x, counts)
        for (data, scale), q in ((plain, quantize(x, fmt, counts=counts)), (gated, silu_mul_quantize(x, fmt, counts=counts))):
            assert torch.equal(data[filled], q.data.view(torch.uint8)[filled]) and (data[~filled] == 9).all()
            assert torch.equal(scale[filled], q.scale[filled]) and (scale[~filled] == 9).all()
        assert torch.equal(public.scale[filled], plain[1][filled])


def test_no_hidden_synchronisation():
    """GRAPH: no op waits for the device."""
    x = torch.randn(64, 512, device=CUDA)
    counts = torch.tensor([3, 4], device=CUDA, dtype=torch.int32)

    def everything():
        for fmt in FORMATS:
            for layout in LAYOUTS[: 2 if fmt == "fp8_block" else 4]:
                q = quantize(x, fmt, counts=counts, layout=layout)
                dequantize(to_layout(q, "row_major"), torch.bfloat16)
                silu_mul_quantize(x, fmt, counts=counts, layout=layout, act=Activation.gpt_oss())
            dequantize(quantize_weight(x, fmt, stochastic_seed=2))

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_counts_share_one_compile(layout):
    """Row counts of 1, 16 and 17 would be three compiles if Triton specialised on them."""
    fmt = "mxfp8"

    def everything(rows):
        x = torch.randn(rows, 768, device=CUDA)
        counts = torch.ones(4, device=CUDA, dtype=torch.int32)
        dequantize(quantize(x, fmt, layout=layout))
        quantize(x, fmt, counts=counts, layout=layout)
        silu_mul_quantize(x, fmt, layout=layout)
        quantize(x.view(1, rows, 768).expand(4, rows, 768), fmt, counts=counts, layout=layout)

    everything(8)
    freeze()
    try:
        for rows in (1, 2, 3, 16, 17, 48):
            everything(rows)
    finally:
        freeze(False)


def graph_time(run, repeats=20):
    """Microseconds of one run, from a CUDA graph of `repeats` runs; the best of ten replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    best = math.inf
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / repeats)
    return best


@pytest.mark.parametrize("form", ("packed", "masked"))
@pytest.mark.parametrize("fmt", FORMATS)
def test_cost_follows_the_filled_rows(fmt, form):
    """64 filled rows of a capacity of 32768 cost at most twice those of a capacity of 64."""
    rule = "fp32" if fmt == "fp8_block" else "rceil"
    times = {}
    for capacity in (64, 32768):
        lead = (capacity,) if form == "packed" else (32, capacity // 32)
        x = torch.randn((*lead, 4096), device=CUDA)
        out = new_quantized(x, (*lead, 2048), fmt, "row_major")
        counts = torch.full((32,), 2, device=CUDA, dtype=torch.int32)
        args = (x, *out, counts, fmt, rule, "silu", 1.0, math.inf, 0.0, False)
        times[capacity] = graph_time(lambda args=args: silu_mul_quantize_into(*args))
    assert times[32768] <= 2 * times[64], times


@pytest.mark.multigpu
def test_tensors_on_another_device_than_the_current_one():
    """DEV: the result lies where the input lies, and the current device stays."""
    x = uneven((5, 256))
    with torch.cuda.device(0):
        for fmt in FORMATS:
            q = quantize(x.to("cuda:1"), fmt)
            assert q.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
            assert same(q.to("cpu"), quantize(x, fmt))
            assert dequantize(q).device == q.device and silu_mul_quantize(x.to("cuda:1"), fmt).device == q.device
        with pytest.raises(ValueError, match="quantize: counts is on cuda:0 but x is on cuda:1"):
            quantize(x.to("cuda:1"), "mxfp8", counts=torch.ones(1, dtype=torch.int32, device="cuda:0"))


def test_other_streams_and_freed_inputs():
    """DEV: the current stream alone orders an op's effects."""
    x = uneven((512, 2048)).to(CUDA)
    wanted = quantize(x, "mxfp8")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy = x.clone()
        q = quantize(copy, "mxfp8")
        copy.fill_(math.nan)
    stream.synchronize()
    assert same(q, wanted)


def test_two_runs_give_the_same_bytes():
    x = torch.randn(300, 4096, device=CUDA)
    for fmt in FORMATS:
        assert same(quantize(x, fmt), quantize(x, fmt)) and same(silu_mul_quantize(x, fmt), silu_mul_quantize(x, fmt))
        assert torch.equal(as_bytes(quantize(x[7:9], fmt).data), as_bytes(quantize(x, fmt).data)[7:9])
