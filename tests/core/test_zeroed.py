"""Words that kernels find zero and leave zero: who shares which, and on a GPU that launches in flight at once keep apart."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_ops.core import zeroed
from moe_ops.core.arch import arch_of
from moe_ops.core.zeroed import SECTOR_WORDS, STREAM_WORDS, shared_words, zeroed_words

CUDA = torch.device("cuda", 0)


@pytest.fixture
def fake(monkeypatch):
    """CUDA as `zeroed` sees it: a current stream, whether it captures, and the tensors that were allocated."""
    state = types.SimpleNamespace(stream=7, capturing=False, made=[], waits=0)

    def wait():
        state.waits += 1

    def zeros(words, dtype, device):
        state.made.append((words, device))
        return torch.zeros(words, dtype=dtype)

    cuda = types.SimpleNamespace(
        is_current_stream_capturing=lambda: state.capturing,
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=state.stream, synchronize=wait),
    )
    monkeypatch.setattr(zeroed, "torch", types.SimpleNamespace(cuda=cuda, zeros=zeros, int32=torch.int32))
    for name, empty in (("_chunks", {}), ("_streams", {}), ("_shared", {}), ("_kept", [])):
        monkeypatch.setattr(zeroed, name, empty)
    return state


def places(t):
    """Addresses of the words."""
    return set(range(t.data_ptr(), t.data_ptr() + 4 * t.numel(), 4))


def test_a_stream_keeps_its_words(fake):
    first = zeroed_words(CUDA, 2)
    assert first.dtype == torch.int32 and first.shape == (2,) and fake.waits == 1
    again = zeroed_words(CUDA, STREAM_WORDS)
    assert again.data_ptr() == first.data_ptr() and again.numel() == STREAM_WORDS
    fake.stream = 8
    other = zeroed_words(CUDA, STREAM_WORDS)
    assert not places(other) & places(again) and fake.waits == 1
    fake.stream = 7
    assert zeroed_words(CUDA, 5).data_ptr() == first.data_ptr()
    elsewhere = zeroed_words(torch.device("cuda", 1), 2)
    assert not places(elsewhere) & (places(again) | places(other))
    assert [device for _, device in fake.made] == [CUDA, torch.device("cuda", 1)] and fake.waits == 2


def test_each_captured_launch_has_words_of_its_own(fake):
    taken = [zeroed_words(CUDA, STREAM_WORDS)]
    fake.capturing = True
    taken += [zeroed_words(CUDA, n) for n in (2, 2, 9, 1)]
    assert sum(len(places(t)) for t in taken) == len(set.union(*map(places, taken)))
    assert all((t.data_ptr() - taken[0].data_ptr()) % (4 * SECTOR_WORDS) == 0 for t in taken) and len(fake.made) == 1
    fake.capturing = False
    assert zeroed_words(CUDA, 2).data_ptr() == taken[0].data_ptr()


def test_a_capture_without_room_brings_its_own_zeros(fake, monkeypatch):
    monkeypatch.setattr(zeroed, "CHUNK_WORDS", STREAM_WORDS + SECTOR_WORDS)
    fake.capturing = True
    assert zeroed_words(CUDA, 3).tolist() == [0, 0, 0] and fake.made == [(3, CUDA)]  # no chunk yet, and none is made
    assert not (zeroed._chunks or zeroed._streams or zeroed._kept)  # GRAPH: nothing of a graph's memory is remembered beyond it
    fake.capturing = False
    eager = zeroed_words(CUDA, STREAM_WORDS)
    fake.capturing = True
    last = zeroed_words(CUDA, SECTOR_WORDS)
    assert len(fake.made) == 2
    own = zeroed_words(CUDA, 1)
    assert fake.made[2:] == [(1, CUDA)] and not places(own) & (places(last) | places(eager))
    assert not any(places(own) & places(t) for t in (*zeroed._kept, *zeroed._streams.values()))
    fake.capturing, fake.stream = False, 8
    fresh = zeroed_words(CUDA, STREAM_WORDS)  # a new stream, a new chunk; the old one is kept
    assert len(fake.made) == 4 and not places(fresh) & (places(last) | places(eager)) and len(zeroed._kept) == 2
    fake.stream = 7
    assert zeroed_words(CUDA, 1).data_ptr() == eager.data_ptr()


def test_shared_words_are_the_same_for_all_streams_and_graphs(fake):
    """GRAPH: but those of a graph that is captured before any other launch are its own, and nobody remembers them."""
    fake.capturing = True
    own = shared_words(CUDA, 100)
    assert own.tolist() == [0] * 100 and not zeroed._shared and fake.waits == 0
    fake.capturing = False
    first = shared_words(CUDA, 100)
    assert first.tolist() == [0] * 100 and not places(own) & places(first) and fake.waits == 1
    for fake.capturing, fake.stream in ((False, 8), (True, 8), (True, 7)):
        assert shared_words(CUDA, 100).data_ptr() == first.data_ptr()
    fake.capturing = False
    others = shared_words(CUDA, 99), shared_words(torch.device("cuda", 1), 100), zeroed_words(CUDA, STREAM_WORDS)
    assert not any(places(t) & places(first) for t in others) and len(fake.made) == 5
    with ThreadPoolExecutor(8) as pool:
        assert len({t.data_ptr() for t in pool.map(lambda _: shared_words(CUDA, 98), range(8))}) == 1
    assert shared_words(torch.device("cpu"), 2).tolist() == [0, 0]


def test_threads_at_once_share_no_words(fake, monkeypatch):
    """The first launches of eight threads, on streams of their own, and what each captures after them: one chunk, no word twice."""
    mine, barrier = threading.local(), threading.Barrier(8)
    cuda = types.SimpleNamespace(
        is_current_stream_capturing=lambda: mine.capturing,
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=getattr(mine, "stream", 0), synchronize=lambda: None),
    )
    monkeypatch.setattr(zeroed.torch, "cuda", cuda)

    def launches(stream):
        mine.stream, mine.capturing = stream, False
        barrier.wait(timeout=60)
        eager = zeroed_words(CUDA, STREAM_WORDS)
        mine.capturing = True
        return [eager, *(zeroed_words(CUDA, 2) for _ in range(50))]

    with ThreadPoolExecutor(8) as pool:
        taken = [t for some in pool.map(launches, range(8)) for t in some]
    assert len(fake.made) == 1 and sum(len(places(t)) for t in taken) == len(set.union(*map(places, taken)))


def test_what_stops_the_first_chunk_reaches_the_caller(fake, monkeypatch):
    """An error in the thread that allocates is the caller's, and nothing is handed out that nobody waited for."""

    def none_left(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(zeroed.torch, "zeros", none_left)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        zeroed_words(CUDA, 2)
    assert not (zeroed._chunks or zeroed._streams or zeroed._kept)


def test_compiling_ahead_and_too_many():
    assert zeroed_words(torch.device("cpu"), 2).tolist() == [0, 0]
    with pytest.raises(ValueError, match=f"zeroed_words: at most {STREAM_WORDS} words, got {STREAM_WORDS + 1}"):
        zeroed_words(torch.device("cpu"), STREAM_WORDS + 1)


# ---- the prefill GEMM for Hopper, tiles handed out whatever their number

HOPPER = torch.cuda.is_available() and arch_of(torch.device("cuda")).has_wgmma
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")


@pytest.fixture
def products(monkeypatch):
    """calls(launches): one call that launches as many products, the tensors they write, and what these have to hold."""
    from moe_ops.gemm import grouped_config
    from moe_ops.gemm.grouped_hopper import launch_hopper

    def e4m3(*shape):
        return (torch.randn(shape, device="cuda", generator=g) * 30).to(torch.float8_e4m3fn).view(torch.uint8)

    def calls(launches, seed=1):
        g.manual_seed(seed)
        counts, n, k = [200, 0, 64, 130, 1], 768, 512  # 18 tiles for 48 programs: two launches fit on the GPU at once
        rows = sum(counts)
        args = e4m3(rows, k), torch.rand(rows, k // 128, device="cuda"), e4m3(5, n, k), torch.rand(5, n // 128, k // 128, device="cuda")
        offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        outs = [torch.empty(rows, n, device="cuda") for _ in range(launches)]

        def call():
            for out in outs:
                launch_hopper("test", *args, None, out, None, offsets, None, 1)

        monkeypatch.setattr(grouped_config, "HOPPER_ROUNDS", 10**6)
        call()  # in turn
        want = outs[0].clone()
        monkeypatch.setattr(grouped_config, "HOPPER_ROUNDS", 0)
        return call, outs, want

    g = torch.Generator("cuda")
    monkeypatch.setattr(grouped_config, "HOPPER_TAILS", (0, 0))
    calls(1)[0]()  # compiles
    yield calls
    torch.cuda.synchronize()
    assert not any(chunk.any() for chunk in zeroed._kept)


def check(outs, want):
    """Look, and put NaN there for the next time."""
    assert all(torch.equal(out, want) for out in outs)
    for out in outs:
        out.fill_(float("nan"))


def captured(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.gpu
@hopper
def test_eager_launches_and_replays_leave_zeros(products):
    call, outs, want = products(6)
    for _ in range(3):
        check(outs, want)
        call()
        assert not zeroed_words(outs[0].device, STREAM_WORDS).any()
    graph = captured(call)
    for _ in range(5):
        check(outs, want)
        graph.replay()
    check(outs, want)
    call()
    check(outs, want)


@pytest.mark.gpu
@hopper
def test_eager_launches_allocate_once(products):
    call, _, _ = products(2)
    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@hopper
def test_a_graph_without_room_clears_its_own(products, monkeypatch):
    """GRAPH: and what it counted in goes with it: eager calls and a second capture after its end are right."""
    call, outs, want = products(3)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(zeroed, "_chunks", {})
            graph = captured(call)
        for _ in range(5):
            check(outs, want)
            graph.replay()
        check(outs, want)
        torch.cuda.synchronize()
        del graph
        call()
    check(outs, want)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_streams_in_flight_at_once(products, graphs):
    """Three streams, each with products of its own, launched without waiting for one another."""
    work = [products(8, seed) for seed in (1, 2, 3)]
    run = [captured(call).replay if graphs else call for call, _, _ in work]
    streams = [torch.cuda.Stream() for _ in work]
    for _ in range(10):
        for _, outs, want in work:
            check(outs, want)
        torch.cuda.synchronize()
        for _ in range(2):
            for stream, call in zip(streams, run, strict=True):
                with torch.cuda.stream(stream):
                    call()
        torch.cuda.synchronize()
    for _, outs, want in work:
        check(outs, want)
