"""The Gluon kernel of the dense GEMM by itself: every tile shape and way to cut, tails of M, N and K, early starts, graphs."""

import pytest
import torch

from moe_ops import dense_gemm, quantize, quantize_weight
from moe_ops.core import zeroed
from moe_ops.core.arch import arch_of
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm.dense import dense_gemm_into, dense_gemm_ref, dense_gemm_workspace
from moe_ops.gemm.dense_config import STREAM_WIDTHS, DenseGemmConfig, DenseGemmProblem, in_pairs, is_legal, most_parts, part_bytes, steps_in_flight
from moe_ops.gemm.dense_exchange_kernel import HEAD_WORDS, NUMBERS, slots

HOPPER = torch.cuda.is_available() and arch_of(torch.device("cuda")).has_wgmma
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")]

TILES = [(rows, width) for rows, widths in STREAM_WIDTHS.items() for width in widths]


def config(tile, programs, stages=2):
    return DenseGemmConfig(*tile, 128, 4, stages, 1, tile[0] <= 32, programs)


def operands(m, n, k, seed=1):
    """Bits and scales of both operands; each block has a scale of its own."""
    q = quantize(uneven((m, k), seed=seed).cuda(), "fp8_block")
    w = quantize_weight(uneven((n, k), block=(128, 128), seed=seed + 1, spread=1).cuda(), "fp8_block")
    return q.data.view(torch.uint8), q.scale, w.data.view(torch.uint8), w.scale


def run(args, cfg, bias=None, residual=None, dtype=torch.float32):
    """In memory full of NaN: what is not written shows, and what is written before or behind the result or the partial sums."""
    m, n, k = args[0].shape[0], args[2].shape[0], args[0].shape[1]
    room = torch.full((m + 256, n), float("nan"), device="cuda", dtype=dtype)
    out, size = room[128:-128], part_bytes(cfg, m, n, k)
    work = torch.full((size + (1 << 17),), 0xFF, dtype=torch.uint8, device="cuda")
    dense_gemm_into(*args, bias, residual, "fp8_block", "given", out, work, cfg.ints())
    assert torch.isnan(room[:128]).all() and torch.isnan(room[-128:]).all() and (work[size:] == 0xFF).all()
    return out


@pytest.mark.parametrize("programs", [1, 2, 4, 5, 7, 20])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_and_cut(tile, programs):
    """SPLITK, TAIL: whole tiles, halves, tiles among many programs; N off the tile, K off the block; bias and residual once.

    A tile's second box lies behind all first ones: inside N, across its end, and beyond it.
    """
    for m, n, k in ((tile[0] - 3, 576, 640), (1, 203, 400), (tile[0], 512, 1536)):
        cfg = config(tile, programs)
        if is_legal(cfg, DenseGemmProblem(m, 1, n, k, "fp8_block", aligned=True), arch_of(torch.device("cuda"))) is not None:
            continue
        args, bias, residual = operands(m, n, k), torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        out = run(args, cfg, bias, residual)
        assert relative_error(out, dense_gemm_ref(*args, bias, residual, "fp8_block", "given", torch.float32)) <= 5e-4, (m, n, k)
        assert torch.equal(out, run(args, cfg, bias, residual))
        # 16-bit results leave in another layout, with what is added or without
        for more in ((None, None), (bias, residual)):
            low = run(args, cfg, *more, dtype=torch.bfloat16)
            assert relative_error(low, dense_gemm_ref(*args, *more, "fp8_block", "given", torch.float32)) <= 3e-3, (m, n, k)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("stages", [2, 3])
def test_ring_of_any_depth(tile, stages):
    """Fewer steps than slots, and many rounds of the ring."""
    for k in (128, 2048):
        if stages % 2 and not config(tile, 1).by_rows:
            stages = 4
        args = operands(5, 384, k)
        ref = dense_gemm_ref(*args, None, None, "fp8_block", "given", torch.float32)
        assert relative_error(run(args, config(tile, 1, stages)), ref) <= 5e-4


@pytest.mark.parametrize(
    "n,k,width", [(4096, 8192, 64), (2112, 7168, 32), (200, 400, 32), (512, 256, 64), (576, 640, 64), (40, 384, 32), (203, 400, 64)]
)
def test_programs_that_exchange_sums(n, k, width):
    """SPLITK, TAIL, GRAPH: halves of K, of one step too; one half of the rows, or none of it; the same bits each time, and words left at zero."""
    cfg = config((128, width), 2 * -(-n // width), 8)
    assert in_pairs(cfg, n) and is_legal(cfg, DenseGemmProblem(128, 1, n, k, "fp8_block", aligned=True), arch_of(torch.device("cuda"))) is None
    for m in (128, 101, 64, 3):
        args, bias, residual = operands(m, n, k), torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        for more in ((None, None), (bias, residual)):
            want = dense_gemm_ref(*args, *more, "fp8_block", "given", torch.float32)
            out = run(args, cfg, *more)
            assert relative_error(out, want) <= 5e-4, (m, more)
            assert all(torch.equal(out, run(args, cfg, *more)) for _ in range(20))
            assert relative_error(run(args, cfg, *more, dtype=torch.bfloat16), want) <= 3e-3
    work = torch.full((part_bytes(cfg, m, n, k),), 0xFF, dtype=torch.uint8, device="cuda")
    out, graph = torch.full((m, n), float("nan"), device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense_gemm_into(*args, None, None, "fp8_block", "given", out, work, cfg.ints())
    for seed in (5, 6):
        fresh = operands(m, n, k, seed)
        for mine, other in zip(args, fresh, strict=True):
            mine.copy_(other)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, run(fresh, cfg))
    assert all(not kept.any() for kept in zeroed._kept) and not any((s[: HEAD_WORDS.value] == -1).any() for s in zeroed._shared.values())


def shared(cfg):
    """The slots of this GPU for a config: first a word for each, then what they hold."""
    sms = arch_of(torch.device("cuda")).sms
    return slots(torch.device("cuda", torch.cuda.current_device()), sms, cfg.block_n)[: HEAD_WORDS.value], sms


@pytest.mark.parametrize("width", [32, 64])
def test_slots_that_others_have_and_numbers_that_start_again(width, monkeypatch):
    """SPLITK: a program passes over slots that are taken; numbers of launches wrap around, and what a slot holds from before is not taken for new."""
    monkeypatch.setattr(zeroed, "_shared", {})  # slots of its own: taken ones that are left behind would stop later tests
    n, k = 4 * width, 1024
    cfg, args = config((128, width), 8, 8), operands(128, n, k)
    want, (head, sms) = run(args, cfg), shared(cfg)
    fresh = operands(128, n, k, seed=5)
    new = run(fresh, cfg)
    assert relative_error(new, dense_gemm_ref(*fresh, None, None, "fp8_block", "given", torch.float32)) <= 5e-4
    for free in (range(8), range(sms - 8, sms), range(0, sms, sms // 9)):
        numbers, taken = head[:sms].clone(), torch.ones(sms, dtype=torch.bool, device="cuda")
        taken[list(free)] = False
        head[:sms][taken] = -1
        for _ in range(3):
            assert torch.equal(run(args, cfg), want) and torch.equal(run(fresh, cfg), new)
        assert torch.equal(head[:sms] == -1, taken) and (head[:sms] - numbers)[~taken].sum() == 2 * 3 * 8
        head[:sms][taken] = numbers[taken]
    head[:sms] = NUMBERS.value - 3  # no slot holds one of these numbers
    for _ in range(40):
        assert torch.equal(run(args, cfg), want) and torch.equal(run(fresh, cfg), new)
    assert (head[:sms] >= 0).all() and head[:sms].min() < 100


@pytest.mark.parametrize("width", [32, 64])
def test_a_row_has_its_bits_in_either_half(width):
    """SPLITK: rows of zeros, of NaN and equal rows, in the half that is finished here and in the other one; the residual in place."""
    n, k = 512, 2048
    cfg, args = config((128, width), 2 * n // width, 8), operands(128, n, k)
    args[0][64:].copy_(args[0][:64])
    args[1][64:].copy_(args[1][:64])
    args[0][[3, 67]] = 0
    args[1][[5, 69]] = float("nan")
    out = run(args, cfg)
    assert torch.equal(out[:64].view(torch.int32), out[64:].view(torch.int32)) and (out[[3, 67]] == 0).all() and torch.isnan(out[[5, 69]]).all()
    assert torch.isnan(out).sum() == 2 * n
    both = torch.randn(128, n, device="cuda")
    before = both.clone()
    dense_gemm_into(*args, None, both, "fp8_block", "given", both, torch.empty(0, dtype=torch.uint8, device="cuda"), cfg.ints())
    assert torch.equal(both.nan_to_num(7.0), (out + before).nan_to_num(7.0))


def test_pairs_in_a_graph_of_their_own(monkeypatch):
    """GRAPH: captured before anything else ran, words and slots are the graph's and begin anew with each replay."""
    n, k = 512, 1024
    cfg, args = config((128, 64), 16, 8), operands(128, n, k)
    want, other = run(args, cfg), operands(128, n, k, seed=9)
    new = run(other, cfg)
    with monkeypatch.context() as patch:
        patch.setattr(zeroed, "_chunks", {})
        patch.setattr(zeroed, "_shared", {})
        out, graph, none = torch.empty(128, n, device="cuda"), torch.cuda.CUDAGraph(), torch.empty(0, dtype=torch.uint8, device="cuda")
        with torch.cuda.graph(graph):
            dense_gemm_into(*args, None, None, "fp8_block", "given", out, none, cfg.ints())
        assert not zeroed._shared and not zeroed._chunks  # nothing of the graph's memory is remembered
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
    for mine, fresh in zip(args, other, strict=True):
        mine.copy_(fresh)
    graph.replay()
    assert torch.equal(out, new)


def test_pairs_of_two_streams_at_once():
    """Programs that wait for their neighbours end, whatever else runs: such kernels of two streams at once, and others that hold SMs."""
    n, k = 4096, 4096
    cfg, args = config((128, 64), 128, 8), [operands(128, n, k, seed) for seed in (1, 2)]
    other, held = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    want = [run(a, cfg, dtype=torch.bfloat16) for a in args]
    work = [torch.full((part_bytes(cfg, 128, n, k),), 0xFF, dtype=torch.uint8, device="cuda") for _ in args]
    outs = [[torch.empty(128, n, device="cuda", dtype=torch.bfloat16) for _ in range(100)] for _ in args]
    streams = [torch.cuda.Stream() for _ in args]
    torch.cuda.synchronize()
    for i in range(100):
        with torch.cuda.stream(other):
            held @ held
        for a, w, out, stream in zip(args, work, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                dense_gemm_into(*a, None, None, "fp8_block", "given", out[i], w, cfg.ints())
    torch.cuda.synchronize()
    assert all(torch.equal(one, right) for out, right in zip(outs, want, strict=True) for one in out)


@pytest.mark.parametrize("tile,stages", [((128, 128), 6), ((128, 144), 6), ((128, 192), 5), ((64, 64), 12), ((64, 144), 6)], ids=str)
def test_fewer_steps_in_flight_than_slots(tile, stages):
    """Producers that wait for earlier steps to come, over several tiles a program, whole and cut."""
    n, k = 7 * tile[1] - 40, 6400
    for programs in (1, 2, 7, 11):
        cfg = config(tile, programs, stages)
        reason = is_legal(cfg, DenseGemmProblem(tile[0] - 5, 1, n, k, "fp8_block", aligned=True), arch_of(torch.device("cuda")))
        assert reason is None or (programs in (2, 11) and "must each fall to one program" in reason)
        if reason is None:
            assert steps_in_flight(cfg, k) < stages
            args = operands(tile[0] - 5, n, k)
            assert relative_error(run(args, cfg), dense_gemm_ref(*args, None, None, "fp8_block", "given", torch.float32)) <= 5e-4, programs


def test_most_parts_is_enough():
    """No tile has more parts than the second kernel adds."""
    for n, k in ((576, 7168), (1536, 7168), (9216, 4096), (64, 128)):
        for width in (32, 64, 128):
            tiles, steps = -(-n // width), -(-k // 128)
            for programs in range(1, min(300, tiles * steps) + 1):
                cfg = config((64, width), programs)
                starts = [p * tiles * steps // programs for p in range(programs + 1)]
                parts = max(sum(a < t * steps + steps and b > t * steps for a, b in zip(starts, starts[1:], strict=False)) for t in range(tiles))
                assert parts <= most_parts(cfg, n, k), (n, k, width, programs)


@pytest.mark.parametrize(
    "m,n,k",
    [
        (17, 576, 7168),
        (40, 576, 7168),
        (100, 576, 7168),
        (128, 2112, 7168),
        (90, 4096, 8192),
        (64, 18432, 1024),
        (128, 18432, 1024),
        (64, 9216, 1024),
    ],
)
def test_early_start_gives_the_same_bits(m, n, k):
    """The activation is quantized by the kernel before it, whose end it does not await to ask for weights."""
    x, w = uneven((m, k), seed=3).cuda(), quantize_weight(uneven((n, k), seed=4).cuda(), "fp8_block")
    apart = dense_gemm(quantize(x, "fp8_block"), w)
    for _ in range(5):
        assert torch.equal(dense_gemm(x, w), apart)


@pytest.mark.parametrize("m", [1, 16, 33, 64, 128])
def test_layouts_rows_apart_and_graphs(m):
    """LAYOUT, GRAPH: MN-major scales, NaN in their padding, rows of a wider tensor, out with a stride, one capture replayed over other contents."""
    n, k = 2112, 7168
    wide = uneven((m, 2 * k), seed=5).cuda()
    q, major, w = (
        quantize(wide, "fp8_block"),
        quantize(wide, "fp8_block", layout="mn_major"),
        quantize_weight(uneven((n, k), seed=6).cuda(), "fp8_block"),
    )
    bits, ws = q.data.view(torch.uint8)[:, :k], (w.data.view(torch.uint8), w.scale)
    assert torch.equal(major.data.view(torch.uint8)[:, :k], bits)
    outs, padded = [], torch.full((k // 128, m + 7), float("nan"), device="cuda")[:, :m].T
    padded.copy_(q.scale[:, : k // 128])
    for scale in (q.scale[:, : k // 128], major.scale[:, : k // 128], padded):
        buffer = torch.full((m, n + 64), float("nan"), device="cuda", dtype=torch.bfloat16)
        dense_gemm_into(bits, scale, *ws, None, None, "fp8_block", "given", buffer[:, :n])
        assert torch.isnan(buffer[:, n:]).all()
        outs.append(buffer[:, :n].contiguous())
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert relative_error(outs[0], dense_gemm_ref(bits, q.scale[:, : k // 128], *ws, None, None, "fp8_block", "given", torch.float32)) <= 3e-3
    out, workspace = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), dense_gemm_workspace(m, w)
    x = uneven((m, k), seed=7).cuda()
    a = quantize(x, "fp8_block")
    dense_gemm(a, w, out=out, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense_gemm(a, w, out=out, workspace=workspace)
    for seed in (8, 9):
        fresh = quantize(uneven((m, k), seed=seed).cuda(), "fp8_block")
        a.data.view(torch.uint8).copy_(fresh.data.view(torch.uint8))
        a.scale.copy_(fresh.scale)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, dense_gemm(fresh, w))


def test_first_call_under_capture_is_one_error_and_the_process_goes_on():
    """GRAPH: nothing compiles under capture; eager and a later capture work."""
    m, n, k = 40, 1856, 1408  # a shape that no other test uses
    a, w = quantize(uneven((m, k), seed=1).cuda(), "fp8_block"), quantize_weight(uneven((n, k), seed=2).cuda(), "fp8_block")
    with pytest.raises(RuntimeError, match=r"dense_gemm: kernel \w+ has never been compiled for \(.*\) and cannot be compiled while a CUDA graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dense_gemm(a, w)
    torch.cuda.synchronize()
    eager, graph = dense_gemm(a, w), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dense_gemm(a, w)
    graph.replay()
    assert torch.equal(out, eager)


def test_unaligned_rows_take_the_other_kernel():
    """ALIGN: rows off 16 bytes cannot be addressed by TMA; the result is there all the same."""
    args = operands(20, 256, 512)
    off = torch.empty(20, 512 + 8, dtype=torch.uint8, device="cuda")[:, 8:]
    off.copy_(args[0])
    out = torch.full((20, 256), float("nan"), device="cuda")
    same = args[0][:1].expand(20, 512)  # every row the same one
    dense_gemm_into(same, args[1][:1].expand(20, 4), *args[2:], None, None, "fp8_block", "given", out)
    assert relative_error(out, dense_gemm_ref(same, args[1][:1].expand(20, 4), *args[2:], None, None, "fp8_block", "given", torch.float32)) <= 5e-4
    one = torch.randint(0, 0x70, (5, 520), dtype=torch.uint8, device="cuda")[:1, :512]  # a single weight row, its distance to the next off 16
    lone = torch.full((20, 1), float("nan"), device="cuda")
    dense_gemm_into(*args[:2], one, args[3][:1], None, None, "fp8_block", "given", lone)
    assert relative_error(lone, dense_gemm_ref(*args[:2], one, args[3][:1], None, None, "fp8_block", "given", torch.float32)) <= 5e-4
    dense_gemm_into(off, *args[1:], None, None, "fp8_block", "given", out)
    assert relative_error(out, dense_gemm_ref(*args, None, None, "fp8_block", "given", torch.float32)) <= 5e-4
    with pytest.raises(ValueError, match="16-byte boundaries"):
        dense_gemm_into(off, *args[1:], None, None, "fp8_block", "given", out, None, config((32, 64), 2).ints())
