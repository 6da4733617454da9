"""Pairs of programs that exchange sums: every width, halves of one step, slots that are taken or half written, streams and graphs at once."""

import time

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops import quantize, quantize_weight
from moe_ops.core import zeroed
from moe_ops.core.arch import arch_of
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm.dense import dense_gemm_into, dense_gemm_ref
from moe_ops.gemm.dense_config import DenseGemmConfig, DenseGemmProblem, in_pairs, is_legal, part_bytes
from moe_ops.gemm.dense_exchange_kernel import HEAD_WORDS, NUMBERS, SLOT_BITS, received, slots

HOPPER = torch.cuda.is_available() and arch_of(torch.device("cuda")).has_wgmma
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")]


def pairs(n, width):
    return DenseGemmConfig(128, width, 128, 4, 8, 1, False, 2 * -(-n // width))


def operands(m, n, k, seed=1):
    """Bits and scales of both operands; each block has a scale of its own."""
    q = quantize(uneven((m, k), seed=seed).cuda(), "fp8_block")
    w = quantize_weight(uneven((n, k), block=(128, 128), seed=seed + 1, spread=1).cuda(), "fp8_block")
    return q.data.view(torch.uint8), q.scale, w.data.view(torch.uint8), w.scale


def into(out, args, cfg, bias=None, residual=None):
    dense_gemm_into(*args, bias, residual, "fp8_block", "given", out, torch.empty(0, dtype=torch.uint8, device="cuda"), cfg.ints())
    return out


def run(args, cfg, bias=None, residual=None, dtype=torch.float32):
    """In memory full of NaN: what is not written shows, and what is written before or behind the result. Pairs need no workspace."""
    m, n, k = args[0].shape[0], args[2].shape[0], args[0].shape[1]
    assert part_bytes(cfg, m, n, k) == 0
    room = torch.full((m + 256, n), float("nan"), device="cuda", dtype=dtype)
    out = into(room[128:-128], args, cfg, bias, residual)
    assert torch.isnan(room[:128]).all() and torch.isnan(room[-128:]).all()
    return out


@pytest.mark.parametrize(
    "n,k,width", [(4096, 8192, 64), (2112, 7168, 32), (200, 400, 32), (512, 256, 64), (576, 640, 64), (40, 384, 32), (203, 400, 64)]
)
def test_programs_that_exchange_sums(n, k, width):
    """SPLITK, TAIL, GRAPH: halves of K, of one step too; one half of the rows, or none of it; the same bits each time, and words left at zero.

    Two sets of operands take turns: sums that an earlier launch left in a slot are wrong ones.
    """
    cfg = pairs(n, width)
    assert in_pairs(cfg, n) and is_legal(cfg, DenseGemmProblem(128, 1, n, k, "fp8_block", aligned=True), arch_of(torch.device("cuda"))) is None
    for m in (128, 101, 64, 3):
        sets = [operands(m, n, k, seed) for seed in (1, 3)]
        bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        for more in ((None, None), (bias, residual)):
            outs = [run(args, cfg, *more) for args in sets]
            for args, out in zip(sets, outs, strict=True):
                want = dense_gemm_ref(*args, *more, "fp8_block", "given", torch.float32)
                assert relative_error(out, want) <= 5e-4, (m, more)
                assert relative_error(run(args, cfg, *more, dtype=torch.bfloat16), want) <= 3e-3
            assert all(torch.equal(out, run(args, cfg, *more)) for _ in range(20) for args, out in zip(sets, outs, strict=True))
    args, out, graph = sets[0], torch.full((m, n), float("nan"), device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        into(out, args, cfg)
    for seed in (5, 6):
        fresh = operands(m, n, k, seed)
        for mine, other in zip(args, fresh, strict=True):
            mine.copy_(other)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, run(fresh, cfg))
    assert all(not kept.any() for kept in zeroed._kept) and not any((s[: HEAD_WORDS.value] == -1).any() for s in zeroed._shared.values())


@gluon.jit
def _receive_kernel(slots_ptr, slot, out_ptr, W: gl.constexpr):
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 32])
    got = received(gl.zeros([64, W], gl.float32, mma), slot, slots_ptr, W)
    rows, cols = gl.arange(0, 64, gl.SliceLayout(1, mma))[:, None], gl.arange(0, W, gl.SliceLayout(0, mma))[None, :]
    gl.store(out_ptr + rows * W + cols, got)


@pytest.mark.parametrize("width", [32, 64])
def test_a_slot_of_which_one_unit_is_not_there_yet(width):
    """SPLITK: the receiver waits for every unit of every thread, whichever comes last, with its earlier sums (NaN) in the place till then."""
    units, number, place = -(-width // 2 // 3), 7, 5
    memory = torch.zeros_like(slots(torch.device("cuda", torch.cuda.current_device()), arch_of(torch.device("cuda")).sms, width))
    sums = torch.arange(units * 128 * 3, device="cuda", dtype=torch.float32).view(units, 128, 3) + 1
    slot = memory[HEAD_WORDS.value :].view(-1, units, 128, 4)[place]
    values, numbers = slot[..., :3].view(torch.float32), slot[..., 3]
    reader, outs = torch.cuda.Stream(), []
    # the last of all, then ones that a warp does not look at first
    for unit, thread in [(units - 1, 127), (units - 1, 33), (0, 0), (0, 127), *((i, 37 * i % 128) for i in range(units))]:
        values.copy_(sums)
        numbers.fill_(number)
        values[unit, thread] = float("nan")
        numbers[unit, thread] = number - 1
        memory[place] = -1
        out, done = torch.full((64, width), float("nan"), device="cuda"), torch.cuda.Event()
        torch.cuda.synchronize()
        with torch.cuda.stream(reader):
            _receive_kernel[(1,)](memory, number << SLOT_BITS.value | place, out, width, num_warps=4)
            done.record()
        time.sleep(2e-3)  # a kernel that does not wait is over in some microseconds
        assert not done.query(), (unit, thread)
        values[unit, thread] = sums[unit, thread]
        numbers[unit, thread] = number
        torch.cuda.synchronize()
        assert memory[place] == number
        outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs) and torch.isfinite(outs[0]).all()
    assert torch.equal(outs[0].flatten().sort().values, sums.permute(1, 0, 2).reshape(128, -1)[:, : width // 2].flatten().sort().values)


def shared(cfg):
    """The slots of this GPU for a config: first a word for each, then what they hold."""
    sms = arch_of(torch.device("cuda")).sms
    return slots(torch.device("cuda", torch.cuda.current_device()), sms, cfg.block_n)[: HEAD_WORDS.value], sms


@pytest.mark.parametrize("width", [32, 64])
def test_slots_that_others_have_and_numbers_that_start_again(width, monkeypatch):
    """SPLITK: a program passes over slots that are taken; numbers of launches wrap around, and what a slot holds from before is not taken for new."""
    monkeypatch.setattr(zeroed, "_shared", {})  # slots of its own: taken ones that are left behind would stop later tests
    n, k = 4 * width, 1024
    cfg, args = pairs(n, width), operands(128, n, k)
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
    cfg, args = pairs(n, width), operands(128, n, k)
    args[0][64:].copy_(args[0][:64])
    args[1][64:].copy_(args[1][:64])
    args[0][[3, 67]] = 0
    args[1][[5, 69]] = float("nan")
    out = run(args, cfg)
    assert torch.equal(out[:64].view(torch.int32), out[64:].view(torch.int32)) and (out[[3, 67]] == 0).all() and torch.isnan(out[[5, 69]]).all()
    assert torch.isnan(out).sum() == 2 * n
    both = torch.randn(128, n, device="cuda")
    before = both.clone()
    into(both, args, cfg, residual=both)
    assert torch.equal(both.nan_to_num(7.0), (out + before).nan_to_num(7.0))


def test_pairs_in_a_graph_of_their_own(monkeypatch):
    """GRAPH: captured before anything else ran, words and slots are the graph's and begin anew with each replay."""
    n, k = 512, 1024
    cfg, args = pairs(n, 64), operands(128, n, k)
    want, other = run(args, cfg), operands(128, n, k, seed=9)
    new = run(other, cfg)
    with monkeypatch.context() as patch:
        patch.setattr(zeroed, "_chunks", {})
        patch.setattr(zeroed, "_shared", {})
        out, graph = torch.empty(128, n, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            into(out, args, cfg)
        assert not zeroed._shared and not zeroed._chunks  # nothing of the graph's memory is remembered
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
    for mine, fresh in zip(args, other, strict=True):
        mine.copy_(fresh)
    graph.replay()
    assert torch.equal(out, new)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("width", [32, 64])
def test_pairs_of_two_streams_at_once(width, captured):
    """Programs that wait for their neighbours end, whatever else runs: such kernels of two streams at once, and others that hold SMs."""
    n, k, launches = 64 * width, 4096, 10
    cfg, args = pairs(n, width), [operands(128, n, k, seed) for seed in (1, 2)]
    other, held = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    want = [run(a, cfg, dtype=torch.bfloat16) for a in args]
    outs = [[torch.empty(128, n, device="cuda", dtype=torch.bfloat16) for _ in range(launches)] for _ in args]
    streams = [torch.cuda.Stream() for _ in args]

    def launch_all(a, out):
        for one in out:
            into(one, a, cfg)

    graphs = [torch.cuda.CUDAGraph() for _ in args]
    if captured:
        for graph, a, out in zip(graphs, args, outs, strict=True):
            with torch.cuda.graph(graph):
                launch_all(a, out)
    for _ in range(10):
        for out in outs:
            for one in out:
                one.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(launches):
                held @ held
        for graph, a, out, stream in zip(graphs, args, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                if captured:
                    graph.replay()
                else:
                    launch_all(a, out)
        torch.cuda.synchronize()
        assert all(torch.equal(one, right) for out, right in zip(outs, want, strict=True) for one in out)
