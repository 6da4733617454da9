"""The token layout and `Routing.from_topk`: equal to the reference entry by entry, for whatever ids hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops.core.numerics import random_topk
from moe_ops.router import layout
from moe_ops.router.routing import Routing

NAMES = ("ids", "weights", "counts", "offsets", "order", "inverse")
OP = torch.ops.moe_ops.routing_layout.default


def move(device, *args):
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]


def check(device, ids, weights, experts, num_local=None, first=0, expert_map=None, num_valid=None):
    """Kernel (and on a GPU the op too) against the reference; returns the reference's result."""
    args = (ids, weights, experts, experts if num_local is None else num_local, first, expert_map, num_valid)
    wanted = layout.routing_layout_ref(*args)
    for call in (layout._routing_layout_triton, OP):
        for name, got, want in zip(NAMES, call(*move(device, *args)), wanted, strict=True):
            assert got.dtype == want.dtype and torch.equal(got.cpu(), want), f"{name}: {got} instead of {want}"
    return wanted


def by_hand(ids, weights, experts, first, num_local, valid):
    """The same by Python loops."""
    rows = []
    for e in range(num_local):
        rows += [(e, t * len(ids[0]) + j) for t in range(valid) for j in range(len(ids[0])) if ids[t][j] == first + e]
    counts = [sum(1 for e, _ in rows if e == want) for want in range(num_local)]
    order = [p for _, p in rows]
    inverse = [order.index(p) if p in order else -1 for p in range(len(ids) * len(ids[0]))]
    offsets = [sum(counts[:e]) for e in range(num_local + 1)]
    return counts, offsets, order + [-1] * (len(inverse) - len(order)), inverse


def test_hand_worked_example(device):
    ids = torch.tensor([[2, 0], [1, 2], [7, 2], [2, 2]])
    weights = torch.arange(8.0).view(4, 2)
    got_ids, got_weights, counts, offsets, order, inverse = check(device, ids, weights, 4, num_valid=torch.tensor(3))
    assert counts.tolist() == [1, 1, 3, 0] and offsets.tolist() == [0, 1, 2, 5, 5]
    assert order.tolist() == [1, 2, 0, 3, 5, -1, -1, -1]
    assert inverse.tolist() == [[2, 0], [1, 3], [-1, 4], [-1, -1]]
    assert got_ids.tolist() == [[2, 0], [1, 2], [-1, 2], [-1, -1]]
    assert got_weights.tolist() == [[0, 1], [2, 3], [0, 5], [0, 0]]


def ids_of(tokens, top_k, experts, seed=0):
    return random_topk(tokens, experts, top_k, seed=seed)


CASES = {
    "no-token": (ids_of(0, 2, 8), 8),
    "one-pair": (ids_of(1, 1, 1), 1),
    "fewer-pairs-than-experts": (ids_of(2, 3, 20), 20),
    "a-full-step": (ids_of(32, 8, 9), 9),
    "one-pair-more-than-a-step": ((torch.arange(257)[:, None] % 5, torch.rand(257, 1)), 5),
    "two-steps-of-the-middle-size": (ids_of(171, 6, 7), 7),
    "odd-number-of-experts": (ids_of(11, 4, 13), 13),
    "one-hot-expert": ((torch.full((40, 7), 3), torch.rand(40, 7)), 6),
    "all-invalid": ((torch.full((9, 3), -1), torch.rand(9, 3)), 6),
    "same-expert-twice-in-a-token": ((torch.tensor([[1, 1, 0], [0, 1, 0]]), torch.rand(2, 3)), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, device):
    (ids, weights), experts = CASES[name]
    check(device, ids, weights, experts)


def test_largest_scan_step_equals_the_reference(device):
    ids, weights = ids_of(1030, 4, 5)
    check(device, ids.fmod(3), weights, 3, num_valid=torch.tensor(1025))


CHUNKED = {
    "many-pairs": (ids_of(275, 4, 9), 9, {}),
    "one-hot-expert": ((torch.full((1100, 1), 70), torch.rand(1100, 1)), 130, {}),
    "all-invalid": ((torch.full((367, 3), 9), torch.rand(367, 3)), 9, {}),
    "padding-ends-inside-a-chunk": (ids_of(275, 4, 9), 9, {"num_valid": torch.tensor(150)}),
    "no-valid-row": (ids_of(275, 4, 9), 9, {"num_valid": torch.tensor(0)}),
    "window-of-int64-ids": ((ids_of(140, 8, 40)[0].long(), ids_of(140, 8, 40)[1].bfloat16()), 40, {"num_local": 7, "first": 30}),
    "map": (ids_of(140, 8, 40), 40, {"expert_map": torch.arange(40).flip(0) - 3}),
    "strided": (tuple(torch.cat([t, t], 1)[:, 8:] for t in ids_of(140, 8, 40)), 40, {}),
    "one-pair-more-than-a-chunk": (ids_of(257, 1, 300), 300, {}),
}


@pytest.mark.parametrize("name", CHUNKED)
def test_chunked_form_equals_the_reference(name, device, monkeypatch):
    monkeypatch.setattr(layout, "LARGEST_STEP", 256)
    (ids, weights), experts, kwargs = CHUNKED[name]
    check(device, ids, weights, experts, **kwargs)


def test_the_chunked_form_takes_over_above_the_largest_step(device):
    for tokens in (layout.LARGEST_STEP // 4, layout.LARGEST_STEP // 4 + 1):
        check(device, *ids_of(tokens, 4, 6), 6)


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_fuzz_against_the_reference_and_loops(data):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    experts = data.draw(st.integers(1, 12), label="experts")
    top_k = data.draw(st.sampled_from([1, 2, 3, 5]), label="top_k")
    tokens = data.draw(st.integers(1, 9), label="tokens")
    value = st.one_of(st.integers(0, experts - 1), st.integers(-3, experts + 3), st.sampled_from([-(2**31), 2**31 - 1]))
    ids = data.draw(st.lists(st.lists(value, min_size=top_k, max_size=top_k), min_size=tokens, max_size=tokens), label="ids")
    first = data.draw(st.integers(0, experts - 1), label="first")
    num_local = data.draw(st.integers(1, experts - first), label="num_local")
    valid = data.draw(st.one_of(st.none(), st.integers(-1, tokens + 2)), label="num_valid")
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), label="dtype")
    weights = torch.rand(tokens, top_k)
    num_valid = None if valid is None else torch.tensor(valid, dtype=torch.int32)
    got = check(device, torch.tensor(ids, dtype=dtype), weights, experts, num_local, first, None, num_valid)
    inside = tokens if valid is None else min(max(valid, 0), tokens)
    known = [[i if 0 <= i < experts else -1 for i in row] for row in ids]
    assert [t.flatten().tolist() for t in got[2:]] == list(by_hand(known, weights, experts, first, num_local, inside))


@given(data=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_fuzz_expert_maps(data):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    experts = data.draw(st.integers(1, 10), label="experts")
    num_local = data.draw(st.integers(1, experts), label="num_local")
    entries = data.draw(st.lists(st.integers(-2, experts), min_size=experts, max_size=experts), label="map")
    expert_map = torch.tensor(entries, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]), label="dtype"))
    ids = torch.randint(-1, experts + 1, (6, 3), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9), label="seed")))
    check(device, ids, torch.rand(6, 3), experts, num_local, 0, expert_map)


# ---- ids of others


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("sentinel", (-1, 256, -(2**31), 2**31 - 1))
def test_foreign_ids_are_never_used_as_an_index(sentinel, dtype, device):
    ids, weights = ids_of(16, 8, 256, seed=1)
    ids = ids.to(dtype)
    ids[3] = sentinel
    ids[5, ::2] = sentinel
    window = check(device, ids, weights, 256, 64, 64)
    expert_map = torch.full((256,), -1, dtype=dtype)
    expert_map[64:128] = torch.arange(64)
    for got, want in zip(check(device, ids, weights, 256, 64, 0, expert_map), window, strict=True):
        assert torch.equal(got, want)
    local = (ids >= 64) & (ids < 128)
    assert int(window[3][-1]) == int(local.sum()) and torch.equal(window[5] >= 0, local)
    assert bool((window[1][~local] == 0).all())


def test_int64_ids_beyond_int32_are_out_of_range(device):
    ids = torch.tensor([[2**32 + 1, 1], [-(2**32), 0]])
    assert check(device, ids, torch.rand(2, 2), 4)[0].tolist() == [[-1, 1], [-1, 0]]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_weights_are_widened_in_the_same_launch(dtype, device):
    ids, weights = ids_of(5, 3, 8)
    assert torch.equal(check(device, ids, weights.to(dtype), 8)[1], weights.to(dtype).float())


STRIDES = {
    "column-slice": lambda t: torch.stack([t, t], -1).flatten(1)[:, ::2],
    "row-slice": lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
    "transposed": lambda t: t.t().contiguous().t(),
    "offset-by-one": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "expanded-row": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("name", STRIDES)
def test_any_strides_equal_contiguous(name, device):
    ids, weights = ids_of(37, 8, 16)
    same_ids, same_weights = STRIDES[name](ids), STRIDES[name](weights)
    check(device, same_ids, same_weights, 16)
    got = layout._routing_layout_triton(*[STRIDES[name](t.to(device)) for t in (ids, weights)], 16, 16, 0, None, None)
    for a, b in zip(got, check(device, same_ids.contiguous(), same_weights.contiguous(), 16), strict=True):
        assert torch.equal(a.cpu(), b)


def test_rows_beyond_num_valid_are_not_read(device):
    ids, weights = ids_of(6, 2, 4)
    weights[4:] = float("nan")
    padded = check(device, ids, weights, 4, num_valid=torch.tensor([4], dtype=torch.int64))
    alone = check(device, ids[:4], weights[:4], 4)
    assert torch.equal(padded[5][:4], alone[5]) and bool((padded[5][4:] == -1).all())
    assert bool((padded[1][4:] == 0).all()) and bool((padded[0][4:] == -1).all())
    assert torch.equal(padded[2], alone[2])


def test_layout_into_allocates_nothing_and_writes_every_element(device):
    ids, weights = move(device, *ids_of(9, 3, 5))
    buffers = layout.empty_layout(9, 3, 5, device)
    _, _, counts, offsets, order, inverse = buffers
    layout.layout_into(ids, counts, offsets, order, inverse, num_experts=5)
    wanted = layout.routing_layout_ref(*[t.cpu() for t in (ids, weights)], 5, 5, 0, None, None)
    for got, want in zip(buffers[2:], wanted[2:], strict=True):
        assert torch.equal(got.cpu(), want)


# ---- the public constructor


@pytest.mark.parametrize("local, count, first", [(None, 8, 0), ((2, 3), 3, 2), ("map", 8, 0), ("map-and-count", 3, 0)])
def test_from_topk_fields(local, count, first, device):
    ids, weights = ids_of(4, 2, 8)
    if isinstance(local, str):
        expert_map = torch.tensor([-1, -1, 0, 1, 2, -1, -1, -1], device=device)
        local = expert_map if local == "map" else (expert_map, 3)
    routing = Routing.from_topk(ids.to(device), weights.to(device), 8, local=local)
    assert (routing.num_tokens, routing.top_k, routing.num_local_experts) == (4, 2, count)
    assert (routing.num_experts, routing.first_expert) == (8, first)
    assert (routing.expert_map is None) == (not isinstance(local, torch.Tensor) and not (local and isinstance(local[0], torch.Tensor)))


def test_zero_tokens_give_zero_counts(device):
    routing = Routing.from_topk(torch.zeros(0, 8, dtype=torch.int64, device=device), torch.zeros(0, 8, device=device), 16)
    assert routing.ids.shape == (0, 8) and routing.order.shape == (0,) and routing.inverse.shape == (0, 8)
    assert routing.counts.tolist() == [0] * 16 and routing.offsets.tolist() == [0] * 17
    again = Routing.from_topk(*move(device, *ids_of(4, 8, 16)), 16)
    assert int(again.offsets[-1]) == 32


def bad_calls():
    ids, weights = ids_of(4, 2, 8)
    yield "ids must be a torch.Tensor, got list", TypeError, dict(ids=[[1]])
    yield "ids must be int32 or int64, got float32", TypeError, dict(ids=weights)
    yield "ids must be 2-D, got shape (4,)", ValueError, dict(ids=ids[:, 0])
    yield "weights must be float32 or bfloat16 or float16, got float64", TypeError, dict(weights=weights.double())
    yield "weights must have shape (4, 2), got shape (3, 2)", ValueError, dict(weights=weights[:3])
    yield "num_experts must be between 1 and 2048, got 0", ValueError, dict(num_experts=0)
    yield "num_experts must be an int, got float", TypeError, dict(num_experts=8.0)
    yield "weights requires grad", ValueError, dict(weights=weights.clone().requires_grad_())
    yield "num_valid must be a torch.Tensor, got int", TypeError, dict(num_valid=3)
    yield "num_valid must be int32 or int64, got float32", TypeError, dict(num_valid=torch.ones(1))
    yield "num_valid must have one element, got shape (2,)", ValueError, dict(num_valid=torch.ones(2, dtype=torch.int32))
    yield "local must be None, (first, count), an expert map tensor", TypeError, dict(local=3)
    yield "local[0] (first expert) must be between 0 and 7, got 8", ValueError, dict(local=(8, 1))
    yield "local[1] (number of local experts) must be between 1 and 3, got 4", ValueError, dict(local=(5, 4))
    yield "local (expert map) must have shape (8", ValueError, dict(local=torch.zeros(7, dtype=torch.int32))
    yield "local (expert map) must be int32 or int64, got float32", TypeError, dict(local=torch.zeros(8))
    yield "local (expert map) must be contiguous", ValueError, dict(local=torch.zeros(16, dtype=torch.int32)[::2])
    yield "tokens * top_k must be at most", ValueError, dict(ids=ids[:1, :1].expand(2**27, 16), weights=weights[:1, :1].expand(2**27, 16))


@pytest.mark.parametrize("text, error, change", list(bad_calls()), ids=lambda v: v[:40].replace(" ", "-") if isinstance(v, str) else "")
def test_bad_input_is_named(text, error, change):
    ids, weights = ids_of(4, 2, 8)
    call = {"ids": ids, "weights": weights, "num_experts": 8, **change}
    with pytest.raises(error) as raised:
        Routing.from_topk(**call)
    assert text in str(raised.value) and str(raised.value).startswith("Routing.from_topk: ")


@pytest.mark.parametrize("tokens", (0, 1, 4096))
@pytest.mark.parametrize("experts", (2049, 2**19))
def test_the_limit_of_experts_is_the_same_for_every_batch_size(experts, tokens):
    for local in (None, (0, 8)):
        with pytest.raises(ValueError, match=f"Routing.from_topk: num_experts must be between 1 and 2048, got {experts}"):
            Routing.from_topk(torch.zeros(tokens, 4, dtype=torch.int32), torch.zeros(tokens, 4), experts, local=local)


@pytest.mark.parametrize("tokens", (0, 1, 7))
def test_opcheck(tokens, device):
    ids, weights = move(device, *ids_of(tokens, 3, 8))
    torch.library.opcheck(OP, (ids, weights.bfloat16(), 8, 4, 2, None, None))
    torch.library.opcheck(OP, (ids.long(), weights, 8, 8, 0, torch.arange(8, device=device), torch.tensor(2, device=device)))


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, top_k, experts", [(1, 8, 256), (128, 8, 256), (4096, 8, 256), (60000, 8, 384), (4096, 22, 2048), (3, 64, 1024)])
def test_real_sizes_equal_the_reference(tokens, top_k, experts):
    ids, weights = ids_of(tokens, top_k, experts, seed=3)
    check(torch.device("cuda"), ids, weights, experts)


@pytest.mark.gpu
def test_graph_replay_follows_the_ids():
    ids = torch.zeros(64, 8, dtype=torch.int64, device="cuda")
    weights = torch.rand(64, 8, device="cuda")
    num_valid = torch.tensor(64, dtype=torch.int32, device="cuda")
    Routing.from_topk(ids, weights, 32, num_valid=num_valid)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing = Routing.from_topk(ids, weights, 32, num_valid=num_valid)
    patterns = {
        "none": torch.full((64, 8), -1),
        "one-row": torch.where(torch.arange(512).view(64, 8) == 77, 5, -1),
        "one-hot": torch.full((64, 8), 31),
        "even": torch.arange(512).view(64, 8) % 32,
        "full": ids_of(64, 8, 32)[0].long(),
    }
    for pattern in patterns.values():
        for valid in (0, 1, 63, 64, 99):
            ids.copy_(pattern)
            num_valid.fill_(valid)
            graph.replay()
            wanted = layout.routing_layout_ref(pattern, weights.cpu(), 32, 32, 0, None, torch.tensor(valid))
            for got, want in zip((getattr(routing, n) for n in NAMES), wanted, strict=True):
                assert torch.equal(got.cpu(), want)


@pytest.mark.multigpu
def test_tensors_on_another_than_the_current_device():
    with torch.cuda.device(0):
        routing = Routing.from_topk(*move("cuda:1", *ids_of(5, 2, 8)), 8)
        assert torch.cuda.current_device() == 0 and routing.order.device.index == 1
    wanted = layout.routing_layout_ref(*ids_of(5, 2, 8), 8, 8, 0, None, None)
    assert torch.equal(routing.order.cpu(), wanted[4])
    with pytest.raises(ValueError, match="weights is on cuda:1 but ids is on cuda:0"):
        Routing.from_topk(ids_of(5, 2, 8)[0].to("cuda:0"), ids_of(5, 2, 8)[1].to("cuda:1"), 8)
