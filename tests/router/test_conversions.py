"""The forms of other libraries, each against its definition by a loop, and the way back."""

import pytest
import torch

from moe_ops.core.numerics import random_topk
from moe_ops.router import conversions as c
from moe_ops.router.routing import Routing


def routing_of(tokens=9, top_k=3, experts=7, device="cpu", **kwargs):
    ids, weights = random_topk(tokens, experts, top_k, seed=tokens)
    return Routing.from_topk(ids.to(device), weights.to(device), experts, **kwargs)


def round_up(n, block):
    return -(-n // block) * block


def test_offs(device):
    routing = routing_of(device=device)
    offs = routing.to_offs()
    assert offs.dtype == torch.int32 and offs.tolist() == routing.counts.cumsum(0).tolist()
    assert offs.data_ptr() == routing.offsets.data_ptr() + 4, "a view"


@pytest.mark.parametrize("block", (4, 128))
def test_deepgemm_and_flashinfer_forms(block, device):
    routing = routing_of(device=device, num_valid=torch.tensor(7, device=device))
    counts = routing.counts.tolist()
    m_indices, psum, m_indptr = routing.to_m_indices(block), routing.to_psum(block), routing.to_m_indptr(block)
    wanted, ends, starts = [], [], [0]
    for e, n in enumerate(counts):
        ends.append(starts[-1] + n)
        wanted += [e] * n + [-1] * (round_up(n, block) - n)
        starts.append(starts[-1] + round_up(n, block))
    assert m_indices.tolist() == wanted + [-1] * (m_indices.numel() - len(wanted)) and m_indices.numel() % block == 0
    assert psum.tolist() == ends and m_indptr.tolist() == starts
    assert {t.dtype for t in (m_indices, psum, m_indptr)} == {torch.int32}


def test_masked_m(device):
    routing = Routing.from_topk(torch.tensor([[0], [0], [0], [2]], device=device), torch.ones(4, 1, device=device), 3)
    assert routing.to_masked_m(2).tolist() == [2, 0, 1]


@pytest.mark.parametrize("block", (1, 4, 16))
def test_vllm_sorted_ids_and_back(block, device):
    routing = routing_of(device=device, num_valid=torch.tensor(8, device=device))
    sorted_ids, expert_ids, used = routing.to_sorted_block(block)
    wanted, experts = [], []
    for e in range(7):
        pairs = [p for p, i in enumerate(routing.ids.flatten().tolist()) if i == e]
        wanted += pairs + [27] * (round_up(len(pairs), block) - len(pairs))
        experts += [e] * (round_up(len(pairs), block) // block)
    assert used.tolist() == [len(wanted)] and used.shape == (1,)
    assert sorted_ids.tolist() == wanted + [27] * (sorted_ids.numel() - len(wanted))
    assert expert_ids.tolist() == experts + [-1] * (expert_ids.numel() - len(experts)) and expert_ids.numel() * block == sorted_ids.numel()
    back = c.from_sorted_block(sorted_ids, expert_ids, used, routing.weights, 7)
    for name in ("ids", "weights", "counts", "offsets", "order", "inverse"):
        assert torch.equal(getattr(back, name), getattr(routing, name)), name


def test_vllm_rows_beyond_the_used_ones_are_ignored(device):
    routing = routing_of(device=device)
    sorted_ids, expert_ids, used = routing.to_sorted_block(4)
    sorted_ids[int(used) :], expert_ids[int(used) // 4 :] = 0, 3
    back = c.from_sorted_block(sorted_ids, expert_ids, used, routing.weights, 7)
    assert torch.equal(back.ids, routing.ids)


def test_empty_vllm_form(device):
    routing = routing_of(tokens=0, device=device)
    back = c.from_sorted_block(*routing.to_sorted_block(4), routing.weights, 7)
    assert back.ids.shape == (0, 3) and back.counts.tolist() == [0] * 7


def test_rows_of_torch_and_flashinfer_forms(device):
    offs = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    for routing in (c.from_offs(offs, 7), c.from_m_indptr(torch.tensor([0, 2, 2, 5], device=device), 7)):
        assert routing.ids.flatten().tolist() == [0, 0, 2, 2, 2, -1, -1]
        assert routing.offsets.tolist() == [0, 2, 2, 5] and routing.order.tolist() == [0, 1, 2, 3, 4, -1, -1]
        assert routing.weights.flatten().tolist() == [1, 1, 1, 1, 1, 0, 0]
        assert torch.equal(routing.to_offs(), offs)


@pytest.mark.parametrize("block", (4, 128))
def test_rows_of_deepgemm_forms(block, device):
    routing = routing_of(device=device)
    rows = routing.to_m_indices(block).numel()
    by_index = c.from_m_indices(routing.to_m_indices(block), 7)
    by_psum = c.from_psum(routing.to_psum(block), rows, block)
    assert torch.equal(by_index.ids, by_psum.ids) and torch.equal(by_index.counts, routing.counts)
    assert torch.equal(by_index.ids.flatten(), routing.to_m_indices(block))


def test_rows_of_the_masked_form(device):
    routing = c.from_masked_m(torch.tensor([2, 0, 3], dtype=torch.int32, device=device), 3)
    assert routing.ids.view(3, 3).tolist() == [[0, 0, -1], [-1] * 3, [2, 2, 2]]
    assert routing.counts.tolist() == [2, 0, 3] and routing.order.tolist() == [0, 1, 6, 7, 8, -1, -1, -1, -1]


def test_per_expert_gives_views_of_ids_weights_and_counts(device):
    routing = routing_of(device=device, local=(1, 5))
    rows = routing.per_expert()
    assert len(rows) == 5 and rows.token_ids.shape == rows.weights.shape == (5, 9)
    for e in range(5):
        tokens, weights, count = rows[e]
        assert tokens.data_ptr() == rows.token_ids.data_ptr() + e * 9 * 4 and count.dim() == 0
        where = (routing.ids == e + 1).nonzero()
        n = len(where)
        assert int(count) == n and tokens[:n].tolist() == where[:, 0].tolist()
        assert torch.equal(weights[:n], routing.weights[where[:, 0], where[:, 1]])
        assert bool((tokens[n:] == -1).all()) and bool((weights[n:] == 0).all())


def test_per_expert_with_a_capacity(device):
    routing = Routing.from_topk(torch.tensor([[0], [0], [0], [1]], device=device), torch.ones(4, 1, device=device), 2)
    rows = routing.per_expert(capacity=2)
    assert rows.token_ids.tolist() == [[0, 1], [3, -1]] and rows.counts.tolist() == [2, 1]
    assert routing_of(tokens=0, device=device).per_expert().counts.tolist() == [0] * 7


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda t: c.from_offs(t.float(), 3), TypeError, "from_offs: offs must be int32 or int64, got float32"),
        (lambda t: c.from_offs(t.view(1, -1), 3), ValueError, "from_offs: offs must be 1-D, got shape (1, 4)"),
        (lambda t: c.from_offs(t, -1), ValueError, "from_offs: rows must be between 0 and"),
        (lambda t: c.from_m_indptr([1], 3), TypeError, "from_m_indptr: m_indptr must be a torch.Tensor, got list"),
        (lambda t: c.from_m_indices(t.bool(), 3), TypeError, "from_m_indices: m_indices must be int32 or int64, got bool"),
        (lambda t: c.from_psum(t, 3, 0), ValueError, "from_psum: block must be between 1 and 65536, got 0"),
        (lambda t: c.from_masked_m(t, 0), ValueError, "from_masked_m: capacity must be between 1 and"),
        (
            lambda t: c.from_sorted_block(t, t[:3], t[:1], torch.ones(2, 2), 4),
            ValueError,
            "from_sorted_block: sorted_ids must hold a whole number of rows for each of the 3 blocks, got 4",
        ),
        (lambda t: routing_of().to_psum(0), ValueError, "to_psum: block must be between 1 and 65536, got 0"),
        (lambda t: routing_of().to_m_indices("a"), TypeError, "to_m_indices: block must be an int, got str"),
        (lambda t: routing_of().to_m_indptr(0), ValueError, "to_m_indptr: block must be between 1 and 65536, got 0"),
        (lambda t: routing_of().to_sorted_block(0), ValueError, "to_sorted_block: block must be between 1 and 65536, got 0"),
        (lambda t: routing_of().per_expert("a"), TypeError, "per_expert: capacity must be an int, got str"),
    ],
)
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error) as raised:
        call(torch.arange(4, dtype=torch.int32))
    assert text in str(raised.value)
