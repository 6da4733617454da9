"""The Gluon kernel of the dense GEMM by itself: every tile shape and way to cut, tails of M, N and K, early starts, graphs."""

import pytest
import torch

from moe_ops import dense_gemm, quantize, quantize_weight
from moe_ops.core.arch import arch_of
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm.dense import dense_gemm_into, dense_gemm_ref, dense_gemm_workspace
from moe_ops.gemm.dense_config import STREAM_WIDTHS, DenseGemmConfig, DenseGemmProblem, is_legal, most_parts, part_bytes, steps_in_flight

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
