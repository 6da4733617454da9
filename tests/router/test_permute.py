"""Permute: rows of any dtype land where the padded routing says, and combine brings them back."""

import dataclasses
import importlib
import math

import pytest
import torch

from moe_ops.core.formats import make_qtensor
from moe_ops.core.numerics import random_topk
from moe_ops.router.combine import combine
from moe_ops.router.padding import pad_routing
from moe_ops.router.routing import Routing

module = importlib.import_module("moe_ops.router.permute")
permute = module.permute
OP = torch.ops.moe_ops.permute.default
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int32, torch.int64)


def routing_of(tokens, top_k, experts, device="cpu", **kwargs):
    ids, weights = random_topk(tokens, experts, top_k, seed=tokens)
    return Routing.from_topk(ids.to(device), weights.to(device), experts, **kwargs)


def rows_of(tokens, width, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, width, generator=g).to(dtype)
        if dtype.is_floating_point
        else torch.randint(0, 200, (tokens, width), generator=g).to(dtype)
    )


def check(device, x, padded, columns=False):
    """Kernel (and on a GPU the op too) against the reference, in the rows that are written."""
    if padded.capacity is None:
        args = (padded.order, None, padded.offsets[-1:])
        written = torch.arange(padded.num_rows) < padded.offsets[-1]
    else:
        args = (padded.packed.order, padded.inverse, padded.packed.offsets[-1:])
        written = padded.order >= 0
    args = (x, *args, padded.num_rows, padded.inverse.shape[1], columns)
    wanted = module.permute_ref(*args)
    for call in (module._permute_triton, OP):
        got = call(*[a.to(device) if isinstance(a, torch.Tensor) else a for a in args])
        assert got.dtype == wanted.dtype and got.stride() == wanted.stride()
        assert torch.equal(got.cpu()[written], wanted[written])
    return wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ({"block": 1}, {"block": 8}, {"capacity": 6}))
def test_every_dtype_and_form(dtype, form, device):
    padded = pad_routing(routing_of(9, 3, 7, num_valid=torch.tensor(8), local=(1, 5)), **form)
    x = rows_of(9, 20, dtype)
    out = check(device, x, padded)
    for row, pair in enumerate(padded.order.tolist()):
        if pair >= 0:
            assert torch.equal(out[row], x[pair // 3])
    if "block" in form:
        assert bool((out[: int(padded.offsets[-1])][padded.order[: int(padded.offsets[-1])] < 0] == 0).all()), "padding is zero"


WIDTHS = {"one-column": 1, "not-a-power-of-two": 56, "exactly-a-block": 2048, "more-than-a-block": 2049}


@pytest.mark.parametrize("name", WIDTHS)
def test_widths(name, device):
    check(device, rows_of(5, WIDTHS[name], torch.uint8), pad_routing(routing_of(5, 2, 4), block=4))


def test_more_tiles_than_programs(device):
    check(device, rows_of(40, 2100), pad_routing(routing_of(40, 2, 4), block=4))


def test_padding_tokens_are_not_read(device):
    x = rows_of(6, 32)
    x[4:] = math.nan
    rows, padded = permute(x, routing_of(6, 2, 4, num_valid=torch.tensor(4)), block=4)
    assert bool(rows[: int(padded.offsets[-1])].isfinite().all())
    check(device, x, padded)


STRIDES = {
    "column-slice": lambda t: torch.cat([t, t], 1)[:, 24:48],
    "row-slice": lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
    "transposed": lambda t: t.t().contiguous().t(),
    "expanded-row": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("name", STRIDES)
def test_any_strides_equal_contiguous(name, device):
    padded = pad_routing(routing_of(7, 2, 4), block=4)
    x = STRIDES[name](rows_of(7, 24))
    assert torch.equal(check(device, x, padded), check(device, x.contiguous(), padded))


@pytest.mark.parametrize("fmt, scale_dtype, width", [("fp8_block", torch.float32, 2), ("mxfp8", torch.uint8, 8)])
@pytest.mark.parametrize("layout", ("row_major", "mn_major"))
def test_quantized_rows_move_with_their_scales(fmt, scale_dtype, width, layout, device):
    routing = routing_of(5, 2, 4, device)
    scale = rows_of(5, width, scale_dtype).abs().to(device)
    if layout == "mn_major":
        scale = torch.empty_strided((5, width), (1, 8), dtype=scale_dtype, device=device).copy_(scale)
    x = make_qtensor(rows_of(5, 256, torch.uint8).to(device), scale, fmt, weight=False, layout=layout, rule="unknown")
    rows, padded = permute(x, routing, block=4)
    assert rows.layout == layout and rows.format is x.format and rows.data.dtype == torch.float8_e4m3fn
    assert rows.scale.stride() == ((1, padded.num_rows) if layout == "mn_major" else (width, 1))
    for row, pair in enumerate(padded.order.tolist()):
        if pair >= 0:
            assert torch.equal(rows.data[row].view(torch.uint8), x.data[pair // 2].view(torch.uint8))
            assert torch.equal(rows.scale[row], x.scale[pair // 2])
    check(device, scale.cpu(), pad_routing(routing_of(5, 2, 4), block=4), layout == "mn_major")


@pytest.mark.parametrize("form", ({}, {"block": 16}, {"capacity": 8}))
def test_combine_brings_rows_back(form, device):
    routing = routing_of(8, 3, 6, device)
    x = rows_of(8, 40, torch.float32).to(device)
    rows, padded = permute(x, routing, **form)
    torch.testing.assert_close(combine(rows, padded), x * routing.weights.sum(-1, keepdim=True))


def test_masked_rows_beyond_a_count_are_left_alone_and_dropped_pairs_add_nothing(device):
    routing = Routing.from_topk(torch.tensor([[0], [0], [0], [1]], device=device), torch.ones(4, 1, device=device), 2)
    rows, padded = permute(rows_of(4, 8).to(device), routing, capacity=2)
    assert padded.counts.tolist() == [2, 1]
    assert torch.equal(combine(rows, padded).cpu(), rows_of(4, 8) * torch.tensor([[1], [1], [0], [1]]))


@pytest.mark.parametrize("tokens, width", [(0, 16), (3, 0)])
def test_empty(tokens, width, device):
    rows, padded = permute(rows_of(tokens, width).to(device), routing_of(tokens, 2, 4, device), block=8)
    assert rows.shape == (padded.num_rows, width)
    check(device, rows_of(tokens, width), pad_routing(routing_of(tokens, 2, 4), block=8))


def on_meta(padded):
    return {f.name: t.to("meta") for f in dataclasses.fields(padded) if isinstance(t := getattr(padded, f.name), torch.Tensor)}


def bad_calls():
    x, routing = rows_of(4, 256), routing_of(4, 2, 4)
    q = make_qtensor(rows_of(4, 256, torch.uint8), torch.ones(1, 2), "fp8_block")
    columns = torch.empty_strided((4, 2), (1, 4)).fill_(1.0)
    mn = make_qtensor(rows_of(4, 256, torch.uint8), columns, "fp8_block", weight=False, layout="mn_major")
    yield "x must be a torch.Tensor, got list", TypeError, dict(x=[1])
    yield "x must be bfloat16 or float16 or float32", TypeError, dict(x=x.bool())
    yield "x must have shape (4, *), got shape (3, 256)", ValueError, dict(x=x[:3])
    yield "x requires grad", ValueError, dict(x=x.float().requires_grad_())
    yield "give exactly one of block and capacity, got block=4 and capacity=3", ValueError, dict(block=4, capacity=3)
    yield "block must be an int, got str", TypeError, dict(block="a")
    yield "capacity must be between 1 and", ValueError, dict(capacity=0)
    narrow = dataclasses.replace(routing, weights=routing.weights.bfloat16())
    yield "routing.weights must be float32, got bfloat16", TypeError, dict(routing=narrow)
    padded = pad_routing(routing, block=4)
    yield "routing.order must be contiguous", ValueError, dict(routing=dataclasses.replace(padded, order=padded.order.repeat_interleave(2)[::2]))
    yield "routing.packed.ids is on", ValueError, dict(routing=dataclasses.replace(padded, **on_meta(padded)))
    yield "block and capacity belong to a Routing", ValueError, dict(routing=pad_routing(routing, block=4), block=4)
    yield "routing must be a Routing, got Tensor", TypeError, dict(routing=x)
    yield "x must be quantized as an activation, in blocks (1, 128), got (128, 128)", ValueError, dict(x=q)
    yield "scales of x must be in layout row_major for the masked form, got mn_major", ValueError, dict(x=mn, capacity=4)


@pytest.mark.parametrize("text, error, change", list(bad_calls()), ids=lambda v: v[:40].replace(" ", "-") if isinstance(v, str) else "")
def test_bad_input_is_named(text, error, change):
    call = {"x": rows_of(4, 256), "routing": routing_of(4, 2, 4), **change}
    with pytest.raises(error) as raised:
        permute(call.pop("x"), call.pop("routing"), **call)
    assert text in str(raised.value) and str(raised.value).startswith("permute: ")


@pytest.mark.parametrize("columns", (False, True))
@pytest.mark.parametrize("masked", (False, True))
def test_numbers_out_of_range_are_skipped(masked, columns, device):
    """A `Routing` made by hand can hold anything: rows of x that do not exist are not read, rows of the output not written."""
    memory = torch.full((6, 16), 9.0, device=device)  # x in the middle, as if its neighbours were other tensors
    x = memory[1:4]
    x.copy_(rows_of(3, 16, torch.float32))
    huge = 2**31 - 1
    order = torch.tensor([6, 0, -7, 5, huge, 3], dtype=torch.int32, device=device)  # 3 tokens, k = 2: pairs 0 .. 5 exist
    target = torch.tensor([[4, 1], [huge, -9], [0, 2]], dtype=torch.int32, device=device) if masked else None
    total = torch.tensor([huge], dtype=torch.int32, device=device)
    out = module._permute_triton(x, order, target, total, 4 if masked else 6, 2, columns)
    wanted = module.permute_ref(x, order, target, total, 4 if masked else 6, 2, columns)
    if masked:  # pair 0 has no row 4, pair 3 no row -9; pair 5 goes to row 2
        assert torch.equal(out[2], x[2]) and torch.equal(wanted[2], x[2]) and bool((wanted[[0, 1, 3]] == 0).all())
    else:
        assert torch.equal(out, wanted) and torch.equal(out[[1, 3, 5]], x[[0, 2, 1]]) and bool((out[[0, 2, 4]] == 0).all())


def test_a_routing_of_garbage_reads_and_writes_nothing_out_of_range(device):
    routing = routing_of(4, 2, 4, device)
    rows = dataclasses.replace(routing, order=torch.full_like(routing.order, 2**30), inverse=torch.full_like(routing.inverse, 2**30))
    for form in ({"block": 4}, {"capacity": 4}):
        out, padded = permute(rows_of(4, 16).to(device), rows, **form)
        assert bool((padded.order == -1).all()) and bool((padded.row_weights == 0).all())
        assert bool((out[: int(padded.offsets[-1])] == 0).all()) or "capacity" in form


@pytest.mark.parametrize("tokens, experts, form", [(5, 1, {"block": 1}), (0, 8, {"block": 4}), (5, 8, {"block": 4}), (5, 8, {"capacity": 3})])
def test_opcheck(tokens, experts, form, device):
    padded = pad_routing(routing_of(tokens, min(2, experts), experts, device), **form)
    target = None if padded.capacity is None else padded.inverse
    order, total = (padded.order, padded.offsets[-1:]) if target is None else (padded.packed.order, padded.packed.offsets[-1:])
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if device.type == "cpu" or form == {"block": 1}:  # elsewhere some rows hold what the allocator gave, and this test compares them
        tests.append("test_aot_dispatch_dynamic")
    args = (rows_of(tokens, 16).to(device), order, target, total, padded.num_rows, padded.inverse.shape[1], target is None)
    torch.library.opcheck(OP, args, test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, top_k, experts, width", [(128, 8, 256, 7168), (4096, 8, 64, 4096), (8192, 8, 64, 128), (16384, 8, 64, 128)])
def test_real_sizes_equal_the_reference(tokens, top_k, experts, width):
    check(torch.device("cuda"), rows_of(tokens, width, torch.uint8), pad_routing(routing_of(tokens, top_k, experts), block=128))


@pytest.mark.gpu
def test_row_offsets_beyond_2_to_the_31():
    tokens, width = 270000, 8192
    x = torch.randint(0, 255, (tokens, width), dtype=torch.uint8, device="cuda")
    ids = (torch.arange(tokens, device="cuda") % 8).view(-1, 1)
    rows, padded = permute(x, Routing.from_topk(ids, torch.ones(tokens, 1, device="cuda"), 8), block=128)
    for row in (0, 262143, 262144, int(padded.offsets[-1]) - 1):
        pair = int(padded.order[row])
        assert torch.equal(rows[row], x[pair] if pair >= 0 else torch.zeros_like(rows[row]))
