"""Padded and masked forms of the layout: equal to the reference, and to what a loop over the experts gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops.core.numerics import random_topk
from moe_ops.router import padding
from moe_ops.router.padding import pad_routing
from moe_ops.router.routing import Routing

OP = torch.ops.moe_ops.routing_pad.default


def routing_of(tokens, top_k, experts, seed=0, **kwargs):
    return Routing.from_topk(*random_topk(tokens, experts, top_k, seed=seed), experts, **kwargs)


def check(device, routing, spacing, masked):
    args = (routing.order, routing.counts, routing.offsets, routing.inverse, routing.weights)
    wanted = padding.routing_pad_ref(*args, spacing, masked)
    for call in (padding._routing_pad_triton, OP):
        for name, got, want in zip(
            ("order", "experts", "row_weights", "counts", "offsets", "inverse"),
            call(*[a.to(device) for a in args], spacing, masked),
            wanted,
            strict=True,
        ):
            assert got.dtype == want.dtype and torch.equal(got.cpu(), want), f"{name}: {got} instead of {want}"
    return wanted


def by_hand(routing, spacing, masked):
    order, experts, starts = [], [], [0]
    for e, count in enumerate(routing.counts.tolist()):
        first = int(routing.offsets[e])
        pairs = routing.order[first : first + (min(count, spacing) if masked else count)].tolist()
        size = spacing if masked else -(-count // spacing) * spacing
        order += pairs + [-1] * (size - len(pairs))
        experts += [e] * len(pairs) + [-1] * (size - len(pairs))
        starts.append(len(order))
    return order, experts, starts


@pytest.mark.parametrize("spacing", (1, 4, 6, 128))
@pytest.mark.parametrize("masked", (False, True))
def test_equals_the_reference_and_a_loop(spacing, masked, device):
    routing = routing_of(11, 3, 7, local=(1, 5), num_valid=torch.tensor(9))
    order, experts, row_weights, counts, offsets, inverse = check(device, routing, spacing, masked)
    rows, owners, starts = by_hand(routing, spacing, masked)
    assert order.tolist() == rows + [-1] * (len(order) - len(rows)) and experts.tolist()[: len(rows)] == owners
    assert offsets.tolist() == starts
    placed = inverse.flatten() >= 0
    assert torch.equal(order[inverse.flatten()[placed].long()], torch.arange(33, dtype=torch.int32)[placed])
    assert torch.equal(row_weights[inverse.flatten()[placed].long()], routing.weights.flatten()[placed])
    assert bool((row_weights[order < 0] == 0).all())


@given(ids=st.lists(st.lists(st.integers(-1, 6), min_size=2, max_size=2), min_size=1, max_size=8), spacing=st.integers(1, 9), masked=st.booleans())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_fuzz(ids, spacing, masked):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    routing = Routing.from_topk(torch.tensor(ids), torch.rand(len(ids), 2), 6)
    order, *_ = check(device, routing, spacing, masked)
    rows, *_ = by_hand(routing, spacing, masked)
    assert order.tolist() == rows + [-1] * (len(order) - len(rows))


CASES = {
    "no-token": (0, 2, 4, 8, False),
    "no-token-masked": (0, 2, 4, 8, True),
    "one-expert": (5, 1, 1, 4, False),
    "several-programs": (90, 4, 40, 16, False),
    "capacity-below-the-load": (40, 3, 4, 5, True),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes(name, device):
    tokens, top_k, experts, spacing, masked = CASES[name]
    check(device, routing_of(tokens, top_k, experts), spacing, masked)


def test_one_hot_expert_fills_the_room_exactly(device):
    routing = Routing.from_topk(torch.full((3, 2), 1), torch.ones(3, 2), 4)
    order, *_, offsets, _ = check(device, routing, 4, False)
    assert order.shape == (6 + 4 * 3 - 2,) and offsets.tolist() == [0, 0, 8, 8, 8]


def test_rows_above_the_capacity_are_dropped_and_counts_clamped(device):
    routing = Routing.from_topk(torch.tensor([[0], [1], [0], [0]]), torch.ones(4, 1), 2)
    order, experts, _, counts, _, inverse = check(device, routing, 2, True)
    assert order.tolist() == [0, 2, 1, -1] and experts.tolist() == [0, 0, 1, -1]
    assert counts.tolist() == [2, 1] and inverse.flatten().tolist() == [0, 2, 1, -1]


def test_fields():
    routing = routing_of(4, 2, 8)
    blocks, masked = pad_routing(routing, block=16), pad_routing(routing, capacity=4)
    assert (blocks.block, blocks.capacity, blocks.num_rows) == (16, None, 128)
    assert (masked.block, masked.capacity, masked.num_rows) == (None, 4, 32)
    assert blocks.packed is routing and blocks.weights is routing.weights


@pytest.mark.parametrize(
    "text, kwargs",
    [
        ("give exactly one of block and capacity, got block=None and capacity=None", {}),
        ("give exactly one of block and capacity, got block=4 and capacity=4", {"block": 4, "capacity": 4}),
        ("block must be between 1 and 65536, got 0", {"block": 0}),
        ("capacity must be between 1 and", {"capacity": 0}),
        ("the padded form would have", {"capacity": 2**29}),
    ],
)
def test_bad_input_is_named(text, kwargs):
    with pytest.raises(ValueError) as raised:
        pad_routing(routing_of(4, 2, 8), **kwargs)
    assert text in str(raised.value) and str(raised.value).startswith("pad_routing: ")
    with pytest.raises(TypeError, match="pad_routing: routing must be a Routing, got Tensor"):
        pad_routing(torch.zeros(1), block=4)


@pytest.mark.parametrize("tokens", (0, 5))
@pytest.mark.parametrize("masked", (False, True))
def test_opcheck(tokens, masked, device):
    r = routing_of(tokens, 2, 8)
    torch.library.opcheck(OP, (*[t.to(device) for t in (r.order, r.counts, r.offsets, r.inverse, r.weights)], 4, masked))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, top_k, experts, spacing, masked", [(128, 8, 256, 128, False), (4096, 8, 256, 128, False), (4096, 8, 2048, 64, True)]
)
def test_real_sizes_equal_the_reference(tokens, top_k, experts, spacing, masked):
    check(torch.device("cuda"), routing_of(tokens, top_k, experts), spacing, masked)
