"""Combine: bit-equal to the reference, weights applied once, skipped rows never read."""

import dataclasses
import importlib
import math

import pytest
import torch

from moe_ops.core.numerics import random_topk
from moe_ops.router.padding import pad_routing
from moe_ops.router.routing import Routing

module = importlib.import_module("moe_ops.router.combine")
combine = module.combine
OP = torch.ops.moe_ops.combine.default
OP_OUT = torch.ops.moe_ops.combine_out.default


def routing_of(tokens, top_k, experts, device="cpu", **kwargs):
    ids, weights = random_topk(tokens, experts, top_k, seed=tokens)
    return Routing.from_topk(ids.to(device), weights.to(device), experts, **kwargs)


def outputs(rows, hidden, dtype=torch.bfloat16, seed=0):
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(device, y, routing, out_dtype=None):
    """Kernel (and on a GPU the op too) against the reference, bit for bit."""
    out_dtype = y.dtype if out_dtype is None else out_dtype
    inverse, weights = routing.inverse.cpu(), routing.weights.cpu()
    wanted = module.combine_ref(y, inverse, weights, out_dtype)
    for call in (module._combine_triton, OP):
        got = call(y.to(device), inverse.to(device), weights.to(device), str(out_dtype).removeprefix("torch."))
        assert got.dtype == out_dtype and torch.equal(got.cpu(), wanted)
    return wanted


def test_hand_worked_sum(device):
    routing = Routing.from_topk(torch.tensor([[1, 0], [3, 1]]), torch.tensor([[0.5, 2.0], [1.0, 4.0]]), 4, local=(0, 3))
    y = torch.tensor([[1.0], [10.0], [100.0], [math.nan]])
    assert routing.inverse.tolist() == [[1, 0], [-1, 2]]
    assert check(device, y, routing).tolist() == [[7.0], [400.0]]


SHAPES = {
    "one-column": (3, 2, 8, 1),
    "below-a-block": (3, 2, 8, 255),
    "above-a-block": (3, 2, 8, 257),
    "many-tokens-wide-blocks": (17, 2, 8, 1025),
    "k-above-the-unroll": (2, 11, 16, 64),
    "k-64": (2, 64, 64, 32),
    "one-expert": (4, 1, 1, 96),
}


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference(name, device):
    tokens, top_k, experts, hidden = SHAPES[name]
    check(device, outputs(tokens * top_k, hidden), routing_of(tokens, top_k, experts))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_dtypes(dtype, out_dtype, device):
    check(device, outputs(10, 40, dtype), routing_of(5, 2, 4), out_dtype)


def test_skipped_rows_are_not_read_and_tokens_without_rows_are_zero(device):
    ids, weights = random_topk(12, 16, 4)
    ids[3] = -1
    ids[4, 1:] = 99
    routing = Routing.from_topk(ids, weights, 16, local=(4, 8), num_valid=torch.tensor(9))
    y = outputs(48, 33)
    y[int(routing.offsets[-1]) :] = math.nan
    out = check(device, y, routing)
    assert bool(out.isfinite().all()) and bool((out[3] == 0).all()) and bool((out[9:] == 0).all())
    local = (ids >= 4) & (ids < 12)
    wanted = torch.stack(
        [sum((float(weights[t, j]) * y[routing.inverse[t, j]].double() for j in range(4) if local[t, j]), torch.zeros(33).double()) for t in range(9)]
    )
    torch.testing.assert_close(out[:9].double(), wanted, rtol=1e-2, atol=1e-6)


def test_infinite_rows_of_others_do_not_leak(device):
    routing = Routing.from_topk(torch.tensor([[0, -1], [1, 0]]), torch.ones(2, 2), 2)
    y = torch.tensor([[1.0], [math.inf], [2.0], [math.nan]])
    assert routing.inverse.tolist() == [[0, -1], [2, 1]]
    assert check(device, y, routing).tolist() == [[1.0], [math.inf]]


def test_rows_beyond_the_buffer_are_never_read(device):
    out = torch.empty(1, 4, device=device)
    inverse = torch.tensor([[0, 7]], dtype=torch.int32, device=device)
    module.combine_into(torch.ones(1, 4, device=device), inverse, torch.ones(1, 2, device=device), out)
    assert out.tolist() == [[1.0] * 4]


def test_strided_input_and_output(device):
    routing = routing_of(6, 3, 8)
    y = torch.cat([outputs(18, 64)] * 2, 1)[:, 64:]
    wanted = check(device, y, routing)
    big = torch.full((6, 100), 7.0, dtype=torch.bfloat16, device=device)
    moved = routing_of(6, 3, 8, device)
    module.combine_into(y.to(device), moved.inverse, moved.weights, big[:, 20:84])
    assert torch.equal(big[:, 20:84].cpu(), wanted)
    assert bool((big[:, :20] == 7).all()) and bool((big[:, 84:] == 7).all())
    assert torch.equal(combine(torch.cat([y, y]).to(device), moved).cpu(), wanted), "spare rows are allowed"


def test_out_argument(device):
    routing, y = routing_of(6, 3, 8, device), outputs(18, 64).to(device)
    out = torch.empty(6, 64, dtype=torch.float32, device=device)
    assert combine(y, routing, out=out) is out
    assert torch.equal(out, combine(y, routing, out_dtype=torch.float32))


@pytest.mark.parametrize("tokens, hidden", [(0, 64), (3, 0)])
def test_empty(tokens, hidden, device):
    routing = routing_of(tokens, 2, 4, device)
    assert combine(outputs(tokens * 2, hidden).to(device), routing).shape == (tokens, hidden)
    assert module._combine_triton(outputs(tokens * 2, hidden).to(device), routing.inverse, routing.weights, "bfloat16").shape == (tokens, hidden)


def bad_calls():
    y = outputs(8, 16)
    yield "y must be a torch.Tensor, got NoneType", TypeError, dict(y=None)
    yield "y must be bfloat16 or float16 or float32, got float64", TypeError, dict(y=y.double())
    yield "y must be 2-D, got shape (2, 4, 16)", ValueError, dict(y=y.view(2, 4, 16))
    yield "y must have last stride 1", ValueError, dict(y=outputs(16, 8).t())
    yield "y must have at least 8 rows (the length of routing.order), got shape (7, 16)", ValueError, dict(y=y[:7])
    yield "y requires grad", ValueError, dict(y=y.float().requires_grad_())
    yield "out_dtype must be bfloat16 or float16 or float32, got torch.float64", TypeError, dict(out_dtype=torch.float64)
    yield "give out or out_dtype, not both", ValueError, dict(out=torch.empty(4, 16), out_dtype=torch.float32)
    yield "out must have shape (4, 16), got shape (4, 15)", ValueError, dict(out=torch.empty(4, 15))
    yield "out must be bfloat16 or float16 or float32, got int32", TypeError, dict(out=torch.empty(4, 16, dtype=torch.int32))
    yield "out must have last stride 1", ValueError, dict(out=torch.empty(16, 4).t())
    yield "routing must be a Routing or PaddedRouting, got Tensor", TypeError, dict(routing=y)
    routing = routing_of(4, 2, 4)
    padded = pad_routing(routing, block=1)
    for form in (routing, padded):
        narrow = dataclasses.replace(form, weights=form.weights.bfloat16())
        yield "routing.weights must be float32, got bfloat16", TypeError, dict(routing=narrow)
        apart = dataclasses.replace(form, weights=form.weights.to("meta"))
        yield "routing.weights is on meta but routing.", ValueError, dict(routing=apart)
        grad = dataclasses.replace(form, weights=form.weights.clone().requires_grad_())
        yield "routing.weights requires grad", ValueError, dict(routing=grad)
        wide = dataclasses.replace(form, inverse=form.inverse.long())
        yield "routing.inverse must be int32, got int64", TypeError, dict(routing=wide)
        short = dataclasses.replace(form, weights=form.weights[:3])
        yield "routing.weights must have shape (4, 2), got shape (3, 2)", ValueError, dict(routing=short)
    yield (
        "routing.ids must be int32, got int64",
        TypeError,
        dict(routing=dataclasses.replace(padded, packed=dataclasses.replace(routing, ids=routing.ids.long()))),
    )


@pytest.mark.parametrize("text, error, change", list(bad_calls()), ids=lambda v: v[:40].replace(" ", "-") if isinstance(v, str) else "")
def test_bad_input_is_named(text, error, change):
    call = {"y": outputs(8, 16), "routing": routing_of(4, 2, 4), **change}
    with pytest.raises(error) as raised:
        combine(call.pop("y"), call.pop("routing"), **call)
    assert text in str(raised.value) and str(raised.value).startswith("combine: ")


@pytest.mark.parametrize("tokens", (0, 1, 7))
def test_opcheck(tokens, device):
    routing, y = routing_of(tokens, 2, 4, device), outputs(2 * tokens, 48).to(device)
    torch.library.opcheck(OP, (y, routing.inverse, routing.weights, "float32"))
    torch.library.opcheck(OP_OUT, (y, routing.inverse, routing.weights, torch.zeros(tokens, 48, device=device)))


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, top_k, hidden", [(1, 8, 7168), (128, 8, 7168), (4096, 4, 2880), (8191, 8, 128), (16384, 8, 128)])
def test_real_sizes_equal_the_reference(tokens, top_k, hidden):
    y, routing = outputs(tokens * top_k, hidden), routing_of(tokens, top_k, 64)
    check(torch.device("cuda"), y, routing)


@pytest.mark.gpu
def test_row_offsets_beyond_2_to_the_31(request):
    tokens, top_k, hidden = 131073, 8, 2048
    ids = torch.arange(tokens, device="cuda", dtype=torch.int32)[:, None].add(torch.arange(top_k, device="cuda", dtype=torch.int32)) % 16
    routing = Routing.from_topk(ids, torch.rand(tokens, top_k, device="cuda"), 16)
    y = torch.empty(tokens * top_k, hidden, dtype=torch.bfloat16, device="cuda").normal_()
    out = combine(y, routing)
    for token in (0, 131071, 131072):
        alone = module.combine_ref(y, routing.inverse[token : token + 1], routing.weights[token : token + 1])
        assert torch.equal(out[token : token + 1], alone)


@pytest.mark.gpu
def test_graph_replay_follows_the_routing():
    ids, weights = torch.zeros(64, 8, dtype=torch.int32, device="cuda"), torch.rand(64, 8, device="cuda")
    y = outputs(512, 256).cuda()
    combine(y, Routing.from_topk(ids, weights, 32))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = combine(y, Routing.from_topk(ids, weights, 32))
    for pattern in (torch.full((64, 8), -1), torch.full((64, 8), 31), torch.arange(512).view(64, 8) % 40, random_topk(64, 32, 8)[0]):
        ids.copy_(pattern)
        graph.replay()
        assert torch.equal(out, combine(y, Routing.from_topk(ids, weights, 32)))
