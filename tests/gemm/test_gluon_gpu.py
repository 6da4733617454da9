"""The Gluon kernels for Hopper by themselves: against plain Triton, early starts, tiles handed out, halves of a last wave, many experts."""

import math

import pytest
import torch

from moe_ops import Routing, fused_moe, grouped_gemm, make_qtensor, quantize, quantize_weight
from moe_ops.core.arch import arch_of
from moe_ops.core.numerics import random_topk, relative_error, uneven
from moe_ops.core.zeroed import zeroed_words
from moe_ops.gemm import grouped_config
from moe_ops.gemm.grouped import grouped_gemm_into, grouped_gemm_ref
from moe_ops.gemm.grouped_act import grouped_act_into, grouped_act_ref
from moe_ops.gemm.grouped_config import GroupedGemmProblem, heuristic, stream_tile
from moe_ops.layer.fused import make_workspace
from moe_ops.quant.quantize import quantize_into
from moe_ops.quant.scale_layout import to_layout

HOPPER = torch.cuda.is_available() and arch_of(torch.device("cuda")).has_wgmma
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")]
if HOPPER:
    from moe_ops.gemm import grouped_hopper
    from moe_ops.gemm.grouped_hopper import launch_hopper
    from moe_ops.gemm.grouped_stream import launch_stream

SILU = ("silu", 1.0, math.inf, 0.0)
KERNELS = ["stream", "hopper"]
#: Least rounds and least tails for which tiles are handed out: never, never but with words given to the kernel, always.
SHARED_OUT = {"in turn": (10**6, (0, 0)), "in turn, with words": (0, (65, 65)), "handed out": (0, (0, 0))}


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def offsets_of(counts):
    return int32([0, *torch.tensor(counts).cumsum(0).tolist()])


def operands(rows, e, n, k, seed=1):
    """Quantized rows and weights as the launchers take them: bits, scales, bits, scales."""
    q = quantize(uneven((rows, k), seed=seed).cuda(), "fp8_block")
    w = quantize_weight(uneven((e, n, k), block=(128, 128), seed=seed + 1, spread=1).cuda(), "fp8_block")
    return q.data.view(torch.uint8), q.scale, w.data.view(torch.uint8), w.scale


def nan(rows, n):
    return torch.full((rows, n), float("nan"), device="cuda")


def run(kernel, args, bias, out, offsets, **more):
    launcher = launch_stream if kernel == "stream" else launch_hopper
    launcher("test", *args, bias, out, None, offsets, None, 1, **more)
    return out


@pytest.fixture
def share_out(monkeypatch):
    """Sets how tiles are shared out: one of SHARED_OUT."""

    def choose(how):
        rounds, tails = SHARED_OUT[how]
        monkeypatch.setattr(grouped_config, "HOPPER_ROUNDS", rounds)
        monkeypatch.setattr(grouped_config, "HOPPER_TAILS", tails)

    return choose


def words():
    """What launches on this stream draw tiles from."""
    return zeroed_words(torch.device("cuda", torch.cuda.current_device()), 2)


def plain(args, bias, offsets, rows):
    a, _, w, _ = args
    e, n, k = w.shape
    config = heuristic(GroupedGemmProblem(rows, e, n, k, "fp8_block"), arch_of(a.device)).ints()
    out = nan(rows, n)
    grouped_gemm_into(*args, bias, offsets, None, 1, "fp8_block", 1, out, config)
    return out


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("k", [128, 256, 384, 1536])
@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 17], [64, 65, 128], [200, 3, 1]], ids=["none", "few", "whole tiles", "tails"])
def test_equal_to_plain_triton(kernel, k, counts):
    """The same products in the same order of K; rows that no expert owns stay untouched."""
    n, rows, filled = 512, sum(counts) + 3, sum(counts)
    args, bias, offsets = operands(rows, 3, n, k), torch.randn(3, n, device="cuda"), offsets_of(counts)
    out = run(kernel, args, bias, nan(rows, n), offsets)
    assert torch.isnan(out[filled:]).all()
    assert filled == 0 or relative_error(out[:filled], plain(args, bias, offsets, rows)[:filled]) <= 1e-5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("offsets", [[200, -(2**31)], [0, 300, -(2**31), 300], [2**31 - 1, -5, 7, 300, 1]], ids=str)
def test_garbage_offsets_stay_inside(kernel, offsets):
    """CLAMP, SENT: whatever the offsets, and the order of gathered rows, hold, nothing outside the 300 rows is written."""
    args = operands(300, len(offsets) - 1, 512, 256)
    for order in (None, int32([-1, 2**31 - 1, -(2**31), 299] * 75)):
        buffer = torch.full((700, 512), 7.0, device="cuda")
        (launch_stream if kernel == "stream" else launch_hopper)("test", *args, None, buffer[200:500], None, int32(offsets), order, 1)
        torch.cuda.synchronize()
        assert (buffer[:200] == 7).all() and (buffer[500:] == 7).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("k", [128, 384, 2048])
def test_early_start_gives_the_same_bits(kernel, k):
    """Weights are asked for before the predecessor has ended: fewer steps than slots, programs without a tile, an empty first half."""
    e, n = 9, 512
    for counts in ([0] * 8 + [5], [1] * 9, [70, 0, 129, 64, 1, 1, 1, 1, 30], [0] * 9):
        rows = max(1, sum(counts))
        args, offsets, x = operands(rows, e, n, k), offsets_of(counts), uneven((rows, k), seed=1).cuda()
        late = run(kernel, args, None, nan(rows, n), offsets)
        for _ in range(3):
            bits, scale = torch.zeros_like(args[0]), torch.zeros_like(args[1])
            quantize_into(x, bits, scale, None, "fp8_block", "fp32")
            early = run(kernel, (bits, scale, *args[2:]), None, nan(rows, n), offsets, early=True)
            assert torch.equal(early.nan_to_num(-1.0), late.nan_to_num(-1.0))


@pytest.mark.parametrize("last", [-1, 0, 1], ids=["below half", "half", "above half"])
@pytest.mark.parametrize("rows", [64, 65, 128])
def test_last_wave(last, rows):
    """A last wave of at most half of the SMs is shared out in halves of 64 rows; tiles of one m group cross experts."""
    sms = arch_of(torch.device("cuda")).sms
    e = sms + sms // 2 + last  # one column tile and one row tile an expert
    args = operands(rows * e, e, 256, 128)
    offsets = offsets_of([rows] * e)
    out = run("hopper", args, None, nan(rows * e, 256), offsets)
    assert relative_error(out, plain(args, None, offsets, rows * e)) <= 1e-5


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("rows", [300, 4000])
def test_tiles_handed_out_give_the_same_bits(share_out, rows, early):
    """The counter decides who computes a tile, not how; launches one after another find the words zero and leave them so."""
    args = operands(rows, 5, 768, 512)
    offsets = int32([0, rows // 7, rows // 7, rows // 2, rows - 1, rows])
    results = []
    for how in SHARED_OUT:
        share_out(how)
        outs = [nan(rows, 768) for _ in range(4)]
        for out in outs:
            run("hopper", args, None, out, offsets, early=early)
        results += outs
        assert not words().any()
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_more_programs_than_tiles_draw(share_out, early):
    """Room for 4000 rows, and none to three row tiles: programs without a tile take no part."""
    args = operands(4000, 5, 512, 256)
    for counts in ([0] * 5, [0, 0, 0, 0, 5], [1, 0, 130, 0, 0]):
        offsets, results = offsets_of(counts), []
        for how in SHARED_OUT:
            share_out(how)
            results += [run("hopper", args, None, nan(4000, 512), offsets, early=early) for _ in range(3)]
            assert not words().any()
        assert torch.isnan(results[0][sum(counts) :]).all() and not torch.isnan(results[0][: sum(counts)]).any()
        assert all(torch.equal(r.nan_to_num(-1.0), results[0].nan_to_num(-1.0)) for r in results)


def drawn(counts, early=False, masked=False):
    """Whether a launch draws its tiles: it then takes the words' garbage for tiles drawn, and leaves zeros."""
    n, k, e = 4096, 128, len(counts)
    rows = (e, max(counts)) if masked else (sum(counts),)
    a, w = (torch.zeros(*shape, k, dtype=torch.uint8, device="cuda") for shape in (rows, (e, n)))
    sa, sw = torch.ones(*rows, 1, device="cuda"), torch.ones(e, n // 128, 1, device="cuda")
    out, of = torch.empty(*rows, n, dtype=torch.bfloat16, device="cuda"), int32(counts) if masked else offsets_of(counts)
    words()[0] = 1 << 20
    launch_hopper("test", a, sa, w, sw, None, out, None, of, None, 1, early=early)
    left = words()[0].item()
    words().zero_()
    assert left in (0, 1 << 20)
    return left == 0


@pytest.mark.parametrize("masked", [False, True], ids=["packed", "masked"])
def test_what_decides_on_the_device(masked):
    """Seven rounds, and one small tail in 16 row tiles where the launch is not early."""
    tiles = -(-7 * arch_of(torch.device("cuda")).sms // 16)  # row tiles of seven rounds of 16 column tiles
    few = -(-tiles // 16)
    assert drawn([128] * tiles, early=True, masked=masked) and not drawn([128] * tiles, masked=masked)
    assert drawn([64] * few + [128] * (tiles - few), masked=masked)
    assert not drawn([65] * few + [128] * (tiles - few), masked=masked)
    assert not drawn([64] * (few - 1) + [128] * (tiles - few + 1), masked=masked)
    assert not drawn([64] * (tiles - 1), masked=masked) and not drawn([64] * (tiles - 1), early=True, masked=masked)


LINES = {
    "edges": [64, 65, 127, 128, 0, 129, 192, 193, 1, 0],
    "all tails": [3, 64, 1, 30],
    "tails of every second": [200, 140] * 40,
    "many tails": [40] * 200,
    "one expert": [300],
    "none": [0, 0],
}


@pytest.mark.parametrize("counts", LINES.values(), ids=LINES.keys())
def test_tails_in_turn_and_handed_out(share_out, counts):
    rows, filled = sum(counts) + 5, sum(counts)
    args, offsets = operands(rows, len(counts), 768, 384), offsets_of(counts)
    results = []
    for how in SHARED_OUT:
        share_out(how)
        results += [run("hopper", args, None, nan(rows, 768), offsets) for _ in range(3)]
    assert torch.isnan(results[0][filled:]).all() and not torch.isnan(results[0][:filled]).any()
    assert all(torch.equal(r.nan_to_num(-1.0), results[0].nan_to_num(-1.0)) for r in results) and not words().any()
    assert filled == 0 or relative_error(results[0][:filled], plain(args, None, offsets, rows)[:filled]) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gather", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize("counts", LINES.values(), ids=LINES.keys())
def test_boxed_stores_give_the_same_bits(monkeypatch, counts, gather, dtype):
    """TMA writes whole boxes: rows of other experts, and of none, keep what they hold; repeated launches agree."""
    rows, filled, n = sum(counts) + 70, sum(counts), 512
    args, offsets, bias = operands(rows, len(counts), n, 256), offsets_of(counts), torch.randn(len(counts), n, device="cuda")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3)).to(torch.int32).cuda() if gather else None
    results = []
    for boxed in ((), (1, 2), (1, 2), (1, 2)):
        monkeypatch.setattr(grouped_hopper, "BOXED", boxed)
        out = torch.full((rows + 8, n), 7.0, dtype=dtype, device="cuda")
        launch_hopper("test", *args, bias, out[4:-4], None, offsets, order, 1)
        results.append(out)
    assert (results[1][:4] == 7).all() and (results[1][4 + filled :] == 7).all()
    assert all(torch.equal(r.view(torch.int16), results[0].view(torch.int16)) for r in results)


def test_boxed_stores_of_masked_rows(monkeypatch):
    """Each expert's free rows stay untouched."""
    q = quantize(uneven((4, 200, 256), seed=3).cuda(), "fp8_block")
    w = quantize_weight(uneven((4, 512, 256), seed=2).cuda(), "fp8_block")
    counts, results = int32([200, 0, 64, 130]), []
    for boxed in ((), (1, 2)):
        monkeypatch.setattr(grouped_hopper, "BOXED", boxed)
        out = torch.full((4, 200, 512), 7.0, dtype=torch.bfloat16, device="cuda")
        launch_hopper("test", q.data.view(torch.uint8), q.scale, w.data.view(torch.uint8), w.scale, None, out, None, counts, None, 1)
        results.append(out)
    assert torch.equal(*results) and (out[1] == 7).all() and (out[2, 64:] == 7).all() and (out[3, 130:] == 7).all()


@pytest.mark.parametrize("rule", ["fp32", "folded"])
@pytest.mark.parametrize("counts", [[40, 200, 64], [128, 65, 256]], ids=str)
def test_fused_boxed_stores_give_the_same_bits(monkeypatch, counts, rule):
    rows, i = sum(counts) + 70, 256
    args, offsets, results = operands(rows, 3, 2 * i, 256), offsets_of(counts), []
    for boxed in ((), (1, 2)):
        monkeypatch.setattr(grouped_hopper, "BOXED", boxed)
        bits, scale = torch.full((rows, i), 3, dtype=torch.uint8, device="cuda"), torch.full((rows, i // 128), 7.0, device="cuda")
        grouped_act_into(*args, None, offsets, None, 1, *SILU, bits, scale, rule, kernel="hopper")
        results.append((bits, scale))
    assert (results[1][0][sum(counts) :] == 3).all()
    assert all(torch.equal(a, b) for r in results for a, b in zip(r, results[0], strict=True))


@pytest.mark.parametrize("e", [200, 257, 512])
def test_many_experts(e):
    counts = [(i * 37) % 140 for i in range(e)]
    rows = sum(counts)
    args, offsets = operands(rows, e, 256, 128), offsets_of(counts)
    assert relative_error(run("hopper", args, None, nan(rows, 256), offsets), plain(args, None, offsets, rows)) <= 1e-5


@pytest.mark.parametrize("counts", [[3, 0, 5], [90, 0, 200]], ids=["few", "many"])
def test_mn_major_scales_and_masked_rows(counts):
    w = quantize_weight(uneven((3, 8192, 256), seed=2).cuda(), "fp8_block")
    q = quantize(uneven((sum(counts), 256), seed=1).cuda(), "fp8_block")
    offsets = offsets_of(counts)
    want = grouped_gemm(q, w, offsets, out_dtype=torch.float32)
    assert torch.equal(grouped_gemm(to_layout(q, "mn_major"), w, offsets, out_dtype=torch.float32), want)
    masked = quantize(uneven((3, 300, 256), seed=3).cuda(), "fp8_block")
    got = grouped_gemm(masked, w, int32(counts), out_dtype=torch.float32)
    for i, c in enumerate(counts):
        one = make_qtensor(masked.data[i, :c], masked.scale[i, :c].contiguous(), "fp8_block", weight=False)
        ref = grouped_gemm_ref(one.data.view(torch.uint8), one.scale, w.data.view(torch.uint8), w.scale, None, int32([0] * (i + 1) + [c] * (3 - i)),
                               None, 1, "fp8_block", 1, torch.float32)  # fmt: skip
        assert c == 0 or relative_error(got[i, :c], ref) <= 5e-4


@pytest.mark.parametrize("rule", ["fp32", "folded"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [40, 200], ids=["tails", "whole tiles"])
def test_fused_epilogue_at_the_edges(share_out, kernel, rows, rule):
    """Gates of minus infinity and NaN, a NaN up, a zero row: as the definition has it; tiles handed out or in turn, the same bits."""
    h, i, e = 256, 256, 3
    x = quantize(uneven((rows, h), seed=1).cuda(), "fp8_block")
    x.data.view(torch.uint8)[3] = 0
    w = quantize_weight((uneven((e, 2 * i, h), block=(128, 128), seed=2, spread=1) * h**-0.5).cuda(), "fp8_block", segments=2)
    bias = torch.zeros(e, 2 * i, dtype=torch.float16, device="cuda")
    bias[0, 7], bias[0, 140], bias[1, i + 9] = -float("inf"), float("nan"), float("nan")
    offsets = int32([0, rows // 3, rows // 2, rows])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3)).to(torch.int32).cuda()
    args = (x.data.view(torch.uint8), x.scale, w.data.view(torch.uint8), w.scale, bias)
    results = []
    for how in ("in turn", "handed out"):
        share_out(how)
        bits, scale = torch.zeros(rows, i, dtype=torch.uint8, device="cuda"), nan(rows, i // 128)
        grouped_act_into(*args, offsets, order, 1, *SILU, bits, scale, rule, kernel=kernel)
        results.append((bits, scale))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    ref_bits, ref_scale = grouped_act_ref(*args, offsets, order, 1, *SILU, rule)
    bits, scale = results[0]

    def values(b, s):
        return b.view(torch.float8_e4m3fn).float().view(rows, -1, 128) * s[..., None]

    got, want = values(bits, scale), values(ref_bits, ref_scale)
    assert torch.equal(torch.isnan(got), torch.isnan(want)) and torch.isfinite(scale).all()
    assert relative_error(got.nan_to_num(), want.nan_to_num()) <= 1e-2


def test_chained_rounds_in_one_graph():
    """Two layers and two routings in one graph, one workspace, nothing between: each kernel sees what its predecessors wrote."""
    e, k, h, i, t = 16, 4, 512, 256, 5
    layers = [(quantize_weight((uneven((e, 2 * i, h), seed=s) * h**-0.5).cuda(), "fp8_block", segments=2),
               quantize_weight((uneven((e, h, i), seed=s + 1) * i**-0.5).cuda(), "fp8_block")) for s in (1, 3)]  # fmt: skip
    x = uneven((t, h), seed=5).cuda()
    routes = [[v.cuda() for v in random_topk(t, e, k, seed=s)] for s in range(4)]
    workspace, outs = make_workspace(t, k, layers[0][0]), [torch.empty_like(x) for _ in range(8)]

    def step():
        for n, out in enumerate(outs):
            fused_moe(x, *layers[n % 2], Routing.from_topk(*routes[n % 4], e), out=out, workspace=workspace)

    want = [fused_moe(x, *layers[n % 2], Routing.from_topk(*routes[n % 4], e)).clone() for n in range(8)]
    torch.cuda.synchronize()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))


def test_both_gemms_of_a_layer_draw_from_the_same_words(share_out):
    """One after the other, early, on one stream; in a graph each from its own."""
    e, k, h, i, t = 8, 2, 1024, 256, 900
    w13 = quantize_weight((uneven((e, 2 * i, h), seed=1) * h**-0.5).cuda(), "fp8_block", segments=2)
    w2 = quantize_weight((uneven((e, h, i), seed=2) * i**-0.5).cuda(), "fp8_block")
    x, routing = uneven((t, h), seed=3).cuda(), Routing.from_topk(*[v.cuda() for v in random_topk(t, e, k)], e)
    workspace = make_workspace(t, k, w13)
    share_out("in turn")
    want = fused_moe(x, w13, w2, routing)
    share_out("handed out")
    outs = [torch.empty_like(x) for _ in range(4)]

    def step():
        for out in outs:
            fused_moe(x, w13, w2, routing, out=out, workspace=workspace)

    step()
    assert all(torch.equal(out, want) for out in outs) and not words().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, want) for out in outs)


def test_both_fused_decode_tiles_are_reached():
    arch = arch_of(torch.device("cuda"))
    deep, _ = stream_tile(8, 8, 3072, True, arch)
    shared, tiles = stream_tile(32, 16, 3072, True, arch)
    assert (deep.programs, shared.programs) == (1, 2) and arch.sms < tiles <= 2 * arch.sms
    e, h, i, rows = 16, 256, 1536, 32
    args = operands(rows, e, 2 * i, h)
    offsets = offsets_of([2] * e)
    results = []
    for count in (rows, 8):  # the second time as if there were room for fewer rows: the other tile
        bits, scale = torch.zeros(count, i, dtype=torch.uint8, device="cuda"), nan(count, i // 128)
        grouped_act_into(*args, None, offsets, None, 1, *SILU, bits, scale, kernel="stream")
        results.append((bits[:8], scale[:8]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
