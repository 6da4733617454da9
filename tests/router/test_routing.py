"""`Routing` in its surroundings: inside torch.compile, inside CUDA graphs, without host syncs, with no kernels but ours."""

import dataclasses
import time

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_ops.core.launch import freeze
from moe_ops.core.numerics import random_topk
from moe_ops.router.combine import combine
from moe_ops.router.permute import permute
from moe_ops.router.route import route
from moe_ops.router.routing import Routing, check_routing

FIELDS = ("ids", "weights", "counts", "offsets", "order", "inverse")
DEEPSEEK = dict(score="sigmoid", n_group=8, topk_group=4, renormalize=True, scale=2.5)


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


def logits_of(tokens, experts, device, seed=0):
    return (torch.randint(-64, 65, (tokens, experts), generator=torch.Generator().manual_seed(seed)) / 8).to(device)


def small_model(logits, bias, x):
    """Everything a model does with a routing, in one traced function."""
    routing = route(logits, 2, score="sigmoid", bias=bias, n_group=4, topk_group=2, renormalize=True, local=(2, 10))
    again = Routing.from_topk(routing.ids, routing.weights, routing.num_experts, local=(2, 10))
    rows, padded = permute(x, again, block=4)
    y = combine(rows * 2, padded)
    out = combine(rows[: routing.order.shape[0]], routing, out=torch.empty_like(x))
    return routing, y + out, routing.per_expert(3).token_ids, routing.to_psum(8)


def test_routing_is_frozen_and_compares_by_identity():
    routing = Routing.from_topk(*random_topk(2, 4, 2), 4)
    with pytest.raises(AttributeError):
        routing.num_experts = 5
    assert routing == routing and routing != Routing.from_topk(*random_topk(2, 4, 2), 4) and len({routing}) == 1


def made_by_hand():
    r = Routing.from_topk(*random_topk(4, 8, 2), 8)
    for name in FIELDS:
        t = getattr(r, name)
        kind = "float32" if name == "weights" else "int32"
        yield f"routing.{name} must be a torch.Tensor, got list", TypeError, {name: t.tolist()}
        yield f"routing.{name} must be {kind}, got int64", TypeError, {name: t.long()}
        yield f"routing.{name} must be contiguous", ValueError, {name: t.repeat_interleave(2, -1)[..., ::2]}
        yield (
            f"routing.{name} is on meta but" if name != "ids" else "routing.counts is on cpu but routing.ids is on meta",
            ValueError,
            {name: t.to("meta")},
        )
    yield "routing.weights must be float32, got bfloat16", TypeError, {"weights": r.weights.bfloat16()}
    yield "routing.weights requires grad", ValueError, {"weights": r.weights.clone().requires_grad_()}
    yield "routing.weights must have shape (4, 2), got shape (4, 1)", ValueError, {"weights": r.weights[:, :1].contiguous()}
    yield "routing.ids must be 2-D", ValueError, {"ids": r.ids.view(-1)}
    yield "routing.counts must be 1-D", ValueError, {"counts": r.counts.view(1, -1)}
    yield "routing.offsets must have shape (9", ValueError, {"offsets": r.offsets[1:].clone()}
    yield "routing.order must have shape (8", ValueError, {"order": r.order[:7]}
    yield "routing.inverse must have shape (4, 2)", ValueError, {"inverse": r.inverse.view(-1)}


@pytest.mark.parametrize("text, error, change", list(made_by_hand()), ids=lambda v: v[:40].replace(" ", "-") if isinstance(v, str) else "")
def test_what_is_wrong_with_a_routing_made_by_hand_is_named(text, error, change):
    routing = dataclasses.replace(Routing.from_topk(*random_topk(4, 8, 2), 8), **change)
    with pytest.raises(error) as raised:
        check_routing("some_op", routing)
    assert text in str(raised.value) and str(raised.value).startswith("some_op: ")


def test_a_routing_is_checked_by_type_and_not_by_what_it_looks_like():
    with pytest.raises(TypeError, match="some_op: routing must be a Routing, got tuple"):
        check_routing("some_op", random_topk(4, 8, 2))


def test_sound_routings_pass_their_check_quickly():
    for tokens in (0, 1, 5):
        routing = Routing.from_topk(*random_topk(tokens, 8, 2), 8, local=(2, 4))
        check_routing("some_op", routing)
    best = min(duration(lambda: check_routing("some_op", routing)) for _ in range(200))
    assert best < 30e-6, "far above the usual 2 us, for slow machines"
    with torch.no_grad():
        check_routing("some_op", dataclasses.replace(routing, weights=routing.weights.clone().requires_grad_()))


def duration(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_traced_in_one_graph_for_changing_batch_sizes(backend, device):
    counter = CompileCounterWithBackend(backend)
    traced = torch.compile(small_model, fullgraph=True, dynamic=True, backend=counter)
    bias = logits_of(1, 16, device, 5)[0]
    for tokens in (3, 5, 12, 40):
        inputs = logits_of(tokens, 16, device, tokens), bias, torch.randn(tokens, 24, device=device)
        got, wanted = traced(*inputs), small_model(*inputs)
        assert isinstance(got[0], Routing) and same(got[0], wanted[0])
        assert all(torch.equal(a, b) for a, b in zip(got[1:], wanted[1:], strict=True))
    assert counter.frame_count <= 2


@pytest.mark.gpu
def test_traced_by_inductor(unpoisoned):
    device = torch.device("cuda")
    traced = torch.compile(small_model, fullgraph=True)
    inputs = logits_of(9, 16, device), logits_of(1, 16, device, 5)[0], torch.randn(9, 24, device=device)
    got, wanted = traced(*inputs), small_model(*inputs)
    assert same(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1])


def test_a_routing_can_enter_a_traced_function(device):
    routing = Routing.from_topk(*[t.to(device) for t in random_topk(6, 8, 2)], 8)
    y = torch.randn(12, 16, device=device)
    traced = torch.compile(lambda r, v: combine(v, r) * (r.num_experts + r.top_k), fullgraph=True, backend="eager")
    assert torch.equal(traced(routing, y), combine(y, routing) * 10)


# ---- on a GPU


def captured(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.gpu
def test_graph_replay_with_other_logits_and_other_counts():
    device = torch.device("cuda")
    logits, bias = logits_of(64, 256, device), logits_of(1, 256, device, 5)[0]
    num_valid = torch.tensor(64, dtype=torch.int32, device=device)
    graph, routing = captured(lambda: route(logits, 8, bias=bias, num_valid=num_valid, **DEEPSEEK))
    hot = torch.full((64, 256), -8.0, device=device)
    hot[:, 40:48] = 8.0
    for pattern in (logits_of(64, 256, device, 1), hot, torch.zeros_like(hot), torch.full_like(hot, float("nan"))):
        for valid in (0, 1, 5, 63, 64, 200):
            logits.copy_(pattern)
            logits[min(valid, 64) :] = float("nan")
            num_valid.fill_(valid)
            graph.replay()
            eager = route(logits, 8, bias=bias, num_valid=num_valid, **DEEPSEEK)
            assert same(routing, eager)
            inside = min(valid, 64)
            assert bool((routing.ids[inside:] == -1).all()) and int(routing.counts.sum()) == 8 * inside
            if inside:
                alone = route(logits[:inside], 8, bias=bias, **DEEPSEEK)
                assert torch.equal(routing.ids[:inside], alone.ids) and torch.equal(routing.weights[:inside], alone.weights)


@pytest.mark.gpu
def test_capture_again_after_the_graph_is_gone():
    logits = logits_of(16, 64, torch.device("cuda"))
    wanted = route(logits, 4)
    for _ in range(3):
        graph, routing = captured(lambda: route(logits, 4))
        graph.replay()
        assert same(routing, wanted)
        del graph, routing
        torch.cuda.empty_cache()
    assert same(route(logits, 4), wanted)


@pytest.mark.gpu
def test_no_host_sync_anywhere():
    device = torch.device("cuda")
    logits, x = logits_of(32, 64, device), torch.randn(32, 128, device=device)
    num_valid, expert_map = torch.tensor(20, device=device), torch.arange(64, device=device)

    def everything():
        routing = route(logits, 4, num_valid=num_valid, local=expert_map)
        again = Routing.from_topk(routing.ids, routing.weights, 64, num_valid=num_valid)
        rows, padded = permute(x, again, block=16)
        masked, form = permute(x, again, capacity=8)
        combine(rows, padded)
        combine(masked, form)
        again.per_expert(), again.to_sorted_block(16), again.to_psum(), again.to_m_indices(), again.to_m_indptr(), again.to_masked_m(4)

    everything()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
def test_token_counts_share_one_compile():
    """Capacities that are the number of tokens, as by default, are no constants of a kernel."""

    def everything(tokens):
        routing = route(logits_of(tokens, 48, "cuda"), 3, renormalize=True)
        routing.per_expert(), routing.to_psum()
        x = torch.randn(tokens, 264, device="cuda")
        for form in ({"capacity": tokens}, {"block": 32}):
            combine(*permute(x, routing, **form))

    everything(2)
    freeze()
    try:
        for tokens in (1, 8, 9, 10, 16, 17):
            everything(tokens)
    finally:
        freeze(False)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", (1, 64, 128, 4096))
def test_launches_of_our_own_kernels_alone(tokens, monkeypatch):
    monkeypatch.setattr(torch, "empty", torch.empty.__wrapped__)  # the suite fills fresh memory, which would be a kernel too
    logits, bias = logits_of(tokens, 256, "cuda"), logits_of(1, 256, "cuda", 5)[0]
    route(logits, 8, bias=bias, **DEEPSEEK)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        route(logits, 8, bias=bias, **DEEPSEEK)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and "memset" not in e.name.lower()]
    few = ["_routing_layout_kernel", "_topk_kernel"]
    assert sorted(kernels) == (few if tokens <= 1024 else ["_chunk_counts_kernel", "_chunk_place_kernel", "_topk_kernel"])


@pytest.mark.gpu
@pytest.mark.parametrize("experts", (1, 3, 6, 60, 72, 160, 384, 512, 1024, 2048))
def test_every_number_of_experts_for_every_batch_size(experts):
    for tokens in (1, 4096, 60000):
        for top_k in {min(experts, 8), min(experts, 22)}:
            logits = logits_of(tokens, experts, "cuda", experts)
            routing = route(logits, top_k, score="sigmoid", renormalize=True)
            ids = logits.sigmoid().sort(dim=-1, descending=True, stable=True).indices[:, :top_k].int()
            assert torch.equal(routing.ids, ids)
            assert torch.equal(routing.counts, torch.bincount(ids.flatten(), minlength=experts).int())
            placed = routing.order.long()
            assert torch.equal(placed, ids.flatten().sort(stable=True).indices)
            assert torch.equal(routing.inverse.flatten()[placed], torch.arange(tokens * top_k, device="cuda", dtype=torch.int32))


@pytest.mark.multigpu
def test_route_on_another_than_the_current_device():
    with torch.cuda.device(0):
        routing = route(logits_of(5, 32, "cuda:1"), 4)
        assert torch.cuda.current_device() == 0 and routing.order.device.index == 1
    assert torch.equal(routing.ids.cpu(), route(logits_of(5, 32, "cpu"), 4).ids)
    with pytest.raises(ValueError, match="bias is on cuda:0 but logits is on cuda:1"):
        route(logits_of(5, 32, "cuda:1"), 4, bias=torch.zeros(32, device="cuda:0"))
