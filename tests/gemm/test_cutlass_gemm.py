"""CUTLASS's wrapper against a stand-in that reads what the kernels read, in plain torch; the kernels: test_cutlass_gemm_gpu.py.

The stand-in refuses what a kernel would read wrongly (strides, alignment, shapes), so that what reaches the kernels is right.
"""

from dataclasses import replace

import pytest
import torch

from moe_ops import Routing, dense_gemm, grouped_gemm, quantize, quantize_weight
from moe_ops.core.formats import ceil_div
from moe_ops.core.numerics import random_topk, relative_error, uneven
from moe_ops.gemm import cutlass_build as build
from moe_ops.gemm import cutlass_choice as choice
from moe_ops.gemm import cutlass_gemm as operands
from moe_ops.gemm import cutlass_library as library
from moe_ops.gemm import cutlass_probe as probe
from moe_ops.gemm import dense_impls, grouped_impls, registry
from moe_ops.gemm.grouped import _ref_into
from moe_ops.quant.scale_layout import to_layout
from moe_ops.quant.scale_storage import pack_ref, unpack_ref


class StandIn:
    """Computes what the kernels compute, from the same arguments."""

    def __init__(self):
        self.calls, self.operand = [], None

    def grouped(self, instantiation, a, a_scale, w, w_scale, offsets, segments, out):
        self.calls.append(instantiation)
        self.operand = a
        experts, n, k = w.shape
        assert a.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in a.stride()[:-1]) and a.stride(-1) == 1 and a.stride(-2) >= k
        assert w.data_ptr() % 16 == out.data_ptr() % 16 == 0
        assert w.is_contiguous() and out.is_contiguous() and a_scale.is_contiguous() and w_scale.is_contiguous() and offsets.dtype == torch.int32
        masked = a.dim() == 3
        rows = a.shape[1] if masked else out.shape[0]
        if instantiation.arch == "sm90a":
            assert a_scale.dtype == torch.float32 and a_scale.shape == (*a.shape[:-1], ceil_div(k, 128))
            _ref_into(a, a_scale, w, w_scale, None, offsets, None, 1, "fp8_block", segments, out)
            return
        assert segments == 1
        w_bytes = unpack_ref(w_scale, "swizzle_32x4x4", n, k // 32, "mxfp8")
        whole_w = unpack_ref(w_scale, "swizzle_32x4x4", ceil_div(n, 128) * 128, ceil_div(k // 32, 4) * 4, "mxfp8")
        assert not (whole_w[..., k // 32 :] == 255).any(), "a NaN that zeros beyond K would meet"
        for e in range(experts):
            if masked:
                first, count, tile = 0, min(max(int(offsets[e]), 0), rows), e * ceil_div(rows, 128)
                x, y = a[e], out[e]
            else:
                first, end = (min(max(int(v), 0), rows) for v in offsets[e : e + 2])
                count, tile = max(0, end - first), first // 128 + e
                x, y = a, out
            if count == 0:
                continue
            tiles = a_scale[tile : tile + ceil_div(count, 128)]
            assert tiles.shape[0] == ceil_div(count, 128), "an expert's tiles lie within the buffer"
            byte = unpack_ref(tiles.contiguous().view(torch.uint8).view(-1), "swizzle_32x4x4", count, k // 32, "mxfp8")
            whole = unpack_ref(
                tiles.contiguous().view(torch.uint8).view(-1), "swizzle_32x4x4", tiles.shape[0] * 128, ceil_div(k // 32, 4) * 4, "mxfp8"
            )
            assert not whole[count:].any() and not whole[:, k // 32 :].any(), "padding is zero: 255 would be NaN"
            part = torch.tensor([0, count], dtype=torch.int32, device=a.device)
            _ref_into(x[first : first + count], byte, w[e : e + 1], w_bytes[e : e + 1], None, part, None, 1, "mxfp8", 1, y[first : first + count])

    def dense(self, instantiation, a, a_scale, w, w_scale, out):
        self.calls.append(instantiation)
        assert (
            a.data_ptr() % 16 == out.data_ptr() % 16 == 0
            and a.stride(0) % 16 == 0
            and a.stride(0) >= a.shape[1]
            and (a_scale.stride(1) == 1 or a_scale.shape[1] == 1)
        )
        _ref_into(a, a_scale, w[None], w_scale[None], None, ints([0, a.shape[0]], a.device), None, 1, "fp8_block", 1, out)


@pytest.fixture(params=["90", "100"])
def arch(request, monkeypatch):
    """The operands are laid out for this architecture, wherever the test runs."""
    found = registry.arch_of_capability(int(request.param))
    monkeypatch.setattr(operands, "arch_of", lambda device: found)
    return request.param


@pytest.fixture
def lib(monkeypatch):
    stand_in = StandIn()
    for module in (operands, library):
        monkeypatch.setattr(module, "call_grouped", stand_in.grouped)
        monkeypatch.setattr(module, "call_dense", stand_in.dense)
    monkeypatch.setattr(library, "_warm", set())
    return stand_in


def fmt_of(arch):
    return "fp8_block" if arch == "90" else "mxfp8"


def make(fmt, shape, e, n, k, device, layout=None, segments=1):
    a = quantize(uneven((*shape, k), seed=1).to(device), fmt, layout=layout)
    w = quantize_weight(uneven((e, n, k), block=(128, 128), seed=2).to(device), fmt, segments=segments)
    return a.data.view(torch.uint8), a.scale, w.data.view(torch.uint8), w.scale


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def pair(shape, device):
    return tuple(torch.full(shape, 5.0, dtype=t, device=device) for t in (torch.bfloat16, torch.float32))


@pytest.mark.parametrize(
    "counts",
    [[1, 0, 2], [0, 0, 70], [0, 0, 0], [128, 1, 0], [127, 129, 1], [3, 130, 17]],
    ids=["EMPTY: between", "one expert", "EMPTY: all", "a whole tile", "TAIL: around a tile", "TAIL: odd"],
)
def test_packed_rows(lib, arch, device, counts):
    rows, n, k, fmt = sum(counts) + 2, 72, 160, fmt_of(arch)
    a, sa, w, sw = make(fmt, (rows,), len(counts), n, k, device)
    a[sum(counts) :] = 0x7F  # NaN in rows of nobody
    sa[sum(counts) :] = 255 if fmt == "mxfp8" else float("nan")
    offsets = ints([0, *torch.tensor(counts).cumsum(0).tolist()], device)
    out, ref = pair((rows, n), device)
    operands.grouped_into(a, sa, w, sw, offsets, None, 1, fmt, 1, out)
    _ref_into(a, sa, w, sw, None, offsets, None, 1, fmt, 1, ref)
    assert len(lib.calls) == 1 and relative_error(out, ref) < 2e-3 and (out[sum(counts) :] == 5.0).all()
    assert lib.operand.data_ptr() == a.data_ptr()  # as they lie


@pytest.mark.parametrize("capacity", [1, 8, 65, 128, 130])
def test_tail_masked_rows_of_any_capacity(lib, arch, device, capacity):
    counts, n, k, fmt = [0, 1, capacity, max(0, capacity - 1), capacity + 9, -3], 64, 256, fmt_of(arch)
    a, sa, w, sw = make(fmt, (len(counts), capacity), len(counts), n, k, device)
    for e, c in enumerate(counts):
        a[e, max(0, c) :] = 0x7F
        sa[e, max(0, c) :] = 255 if fmt == "mxfp8" else float("nan")
    out, ref = pair((len(counts), capacity, n), device)
    operands.grouped_into(a, sa, w, sw, ints(counts, device), None, 1, fmt, 1, out)
    _ref_into(a, sa, w, sw, None, ints(counts, device), None, 1, fmt, 1, ref)
    assert relative_error(out, ref) < 2e-3
    for e, c in enumerate(counts):
        assert (out[e, max(0, c) :] == 5.0).all()


@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_sent_gathered_tokens_and_pairs_of_nobody(lib, arch, device, tokens):
    e, top_k, n, k, fmt = 4, 3, 64, 160, fmt_of(arch)
    ids, weights = random_topk(tokens, e, top_k, seed=4)
    if tokens > 1:
        ids[2] = -1
        ids[3, 1] = -1
    routing = Routing.from_topk(ids.to(device), weights.to(device), e)
    a, sa, w, sw = make(fmt, (tokens,), e, n, k, device)
    out, ref = pair((tokens * top_k, n), device)
    operands.grouped_into(a, sa, w, sw, routing.offsets, routing.order, top_k, fmt, 1, out)
    _ref_into(a, sa, w, sw, None, routing.offsets, routing.order, top_k, fmt, 1, ref)
    assert relative_error(out, ref) < 2e-3 and (out[int(routing.offsets[-1]) :] == 5.0).all()


def test_sent_entries_of_nobody_become_zeros(device):
    a, sa, _, _ = make("fp8_block", (3,), 1, 64, 256, device)
    data, scale = operands.gather_rows(a, sa, ints([0, 3, 4], device), ints([2, -1, 99, 5, 0, 1], device), 2, 2)
    assert torch.equal(data[[0, 3]], a[[1, 2]]) and torch.equal(scale[[0, 3]], sa[[1, 2]])
    assert not data[1:3].any() and not scale[1:3].any()


@pytest.mark.parametrize("offsets", [[0, 10**6, -5, 8], [-(2**31), 2**31 - 1, 0, 3], [5, 4, 3, 2]])
def test_garbage_in_offsets_and_order_stays_inside(lib, arch, device, offsets):
    fmt = fmt_of(arch)
    a, sa, w, sw = make(fmt, (4,), 3, 64, 128, device)
    order = ints([-7, 2**31 - 1, 3, 0, 1, 2, 9, 8], device)
    data, scale = operands.gather_rows(a, sa, ints(offsets, device), order, 2, 3)
    assert data.shape == (8, 128) and scale.shape[0] == 8
    if fmt == "mxfp8":
        assert operands.tile_scales(scale, ints(offsets, device), 3).shape == (3, 1, 128)


@pytest.mark.parametrize("layout", ["a slice", "off 16 bytes", "mn_major", "expanded"])
def test_layout_rows_with_any_distance(lib, device, layout, monkeypatch):
    """LAYOUT: activations that are a slice of something wider, and scales in the other order, which cost a copy."""
    monkeypatch.setattr(operands, "arch_of", lambda device: registry.arch_of_capability(90))
    a, sa, w, sw = make("fp8_block", (9,), 2, 64, 256, device)
    at = {"a slice": 16, "off 16 bytes": 3, "mn_major": 0, "expanded": 0}[layout]
    wide = torch.full((9, 304), 0x7F, dtype=torch.uint8, device=device)
    if layout == "expanded":
        a.copy_(a[:1].clone().expand(9, 256))
        wide = a[:1].clone().expand(9, 256)
    else:
        wide[:, at : at + 256] = a
    scale = make("fp8_block", (9,), 2, 64, 256, device, "mn_major")[1] if layout == "mn_major" else sa
    results = []
    for data, s in ((a, sa), (wide[:, at : at + 256], scale)):
        out = torch.zeros((9, 64), dtype=torch.bfloat16, device=device)
        operands.grouped_into(data, s, w, sw, ints([0, 4, 9], device), None, 1, "fp8_block", 1, out)
        operands.dense_into(data, s, w[0], sw[0], dense := torch.zeros_like(out))
        results.append((out, dense))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    if layout == "a slice":
        assert lib.calls and lib.operand.stride(0) == 304  # no copy


def test_segments_with_ragged_scale_blocks(lib, device, monkeypatch):
    """TAIL: gate and up of 192 rows each: scale blocks start anew at row 192."""
    monkeypatch.setattr(operands, "arch_of", lambda device: registry.arch_of_capability(90))
    a, sa, w, sw = make("fp8_block", (9,), 2, 384, 256, device, segments=2)
    out, ref = pair((9, 384), device)
    operands.grouped_into(a, sa, w, sw, ints([0, 4, 9], device), None, 1, "fp8_block", 2, out)
    _ref_into(a, sa, w, sw, None, ints([0, 4, 9], device), None, 1, "fp8_block", 2, ref)
    assert sw.shape == (2, 4, 2) and relative_error(out, ref) < 2e-3


@pytest.mark.parametrize("k", [128, 160])
def test_weight_scales_in_tiles_already(lib, device, monkeypatch, k):
    """A weight that was led into the layout once is taken as it is, or without the NaN in its padding; by nobody else."""
    monkeypatch.setattr(operands, "arch_of", lambda device: registry.arch_of_capability(100))
    x, w = quantize(uneven((9, k), seed=1).to(device), "mxfp8"), quantize_weight(uneven((2, 72, k), seed=2).to(device), "mxfp8")
    padded = pack_ref(torch.full((2, 128, ceil_div(k // 32, 4) * 4), 255, dtype=torch.uint8, device=device), "swizzle_32x4x4")
    tiled, offsets = to_layout(w, "swizzle_32x4x4"), ints([0, 4, 9], device)
    inside = unpack_ref(padded, "swizzle_32x4x4", 128, ceil_div(k // 32, 4) * 4, "mxfp8")
    inside[:, :72, : k // 32] = w.scale
    tiled = replace(tiled, scale=pack_ref(inside, "swizzle_32x4x4"))
    assert torch.equal(unpack_ref(tiled.scale, "swizzle_32x4x4", 72, k // 32, "mxfp8"), w.scale)
    results = []
    for q in (w, tiled):
        out = torch.zeros((9, 72), dtype=torch.bfloat16, device=device)
        operands.grouped_into(x.data.view(torch.uint8), x.scale, q.data.view(torch.uint8), q.scale, offsets, None, 1, "mxfp8", 1, out)
        results.append(out)
        monkeypatch.setattr(operands, "convert_scale", None if k % 128 == 0 else operands.convert_scale)
    assert torch.equal(*results)
    monkeypatch.setattr(grouped_impls, "choose", lambda problem, where, impl: None)
    monkeypatch.setattr(choice, "make_ready", lambda problem, where: None)
    assert torch.equal(grouped_gemm(x, tiled, offsets, impl="cutlass"), results[0])
    for impl in (None, "torch"):
        with pytest.raises(ValueError, match="scales of w must be row_major, got swizzle_32x4x4"):
            grouped_gemm(x, tiled, offsets, impl=impl)


def test_tiles_are_chosen_by_rows():
    chosen = [operands.pick("sm90a", "grouped", rows).tile_m for rows in (0, 1, 64, 65, 128, 10**6)]
    assert chosen == [64, 64, 64, 128, 128, 128]
    assert [operands.pick("sm100a", "grouped", rows).tile_m for rows in (1, 128, 129, 300)] == [128, 128, 256, 256]


@pytest.mark.parametrize("m", [0, 1, 6, 130])
def test_dense(lib, device, monkeypatch, m):
    monkeypatch.setattr(operands, "arch_of", lambda device: registry.arch_of_capability(90))
    a, sa, w, sw = make("fp8_block", (m,), 1, 200, 272, device)
    out, ref = pair((m, 200), device)
    operands.dense_into(a, sa, w[0], sw[0], out)
    _ref_into(a, sa, w, sw, None, ints([0, m], device), None, 1, "fp8_block", 1, ref)
    assert relative_error(out, ref) < 2e-3 and [i.tile_m for i in lib.calls] == ([] if m == 0 else [64] if m <= 64 else [128])


def test_no_rows_and_no_call(lib, arch, device):
    a, sa, w, sw = make(fmt_of(arch), (0,), 2, 64, 128, device)
    operands.grouped_into(a, sa, w, sw, ints([0, 0, 0], device), None, 1, fmt_of(arch), 1, torch.empty((0, 64), device=device).bfloat16())
    assert lib.calls == []


def test_weight_and_result_off_16_bytes_are_refused(lib, device):
    a, sa, w, sw = make("fp8_block", (4,), 1, 64, 128, device)
    off = torch.zeros(64 * 128 + 1, dtype=torch.uint8, device=device)[1:].view(1, 64, 128)
    out = torch.zeros((4, 64), dtype=torch.bfloat16, device=device)
    result = torch.zeros(4 * 64 + 1, dtype=torch.bfloat16, device=device)[1:].view(4, 64)
    with pytest.raises(ValueError, match="grouped_gemm: out must start at a multiple of 16 bytes for impl 'cutlass'"):
        operands.grouped_into(a, sa, w, sw, ints([0, 4], device), None, 1, "fp8_block", 1, result)
    with pytest.raises(ValueError, match="dense_gemm: out must start at a multiple of 16 bytes for impl 'cutlass'"):
        operands.dense_into(a, sa, w[0], sw[0], result)
    with pytest.raises(ValueError, match="grouped_gemm: w must start at a multiple of 16 bytes for impl 'cutlass'"):
        operands.grouped_into(a, sa, off, sw, ints([0, 4], device), None, 1, "fp8_block", 1, out)
    with pytest.raises(ValueError, match="dense_gemm: w must start at a multiple of 16 bytes for impl 'cutlass'"):
        operands.dense_into(a, sa, off[0], sw[0], out)


# ---- the probe


def test_env_probe_tries_every_tile(lib, device):
    for instantiation in build.INSTANTIATIONS:
        assert probe.try_kernel(instantiation, device) is None
    assert lib.calls == list(build.INSTANTIATIONS)


def test_env_probe_tells_wrong_from_failed(lib, device, monkeypatch):
    monkeypatch.setattr(library, "call_grouped", lambda *args: None)
    assert "gives wrong results here (relative error" in probe.try_kernel(build.INSTANTIATIONS[0], device)

    def broken(*args):
        raise RuntimeError("assertion\ninvalid device function")

    monkeypatch.setattr(library, "call_dense", broken)
    assert probe.try_kernel(build.INSTANTIATIONS[2], device) == "cutlass_sm90a_dense_64x128x128 fails here: RuntimeError: invalid device function"


def test_env_probe_of_a_real_process_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "the CUTLASS kernels ended the process that tried them (1): " in probe.probe(0, "grouped")


# ---- through the public functions


def test_opcheck(device, lib, monkeypatch):
    monkeypatch.setattr(operands, "arch_of", lambda device: registry.arch_of_capability(90))
    a, sa, w, sw = make("fp8_block", (8,), 3, 64, 128, device)
    out = torch.zeros((8, 64), dtype=torch.bfloat16, device=device)
    torch.library.opcheck(torch.ops.moe_ops.cutlass_grouped.default, (a, sa, w, sw, ints([0, 3, 3, 8], device), None, 1, "fp8_block", 1, out))
    torch.library.opcheck(torch.ops.moe_ops.cutlass_dense.default, (a, sa, w[0], sw[0], out))


@pytest.mark.parametrize("given", [True, False], ids=["quantized", "16-bit"])
def test_public_functions_reach_the_wrapper(monkeypatch, device, lib, given):
    """On a CPU the op's reference answers; on a GPU the stand-in."""
    monkeypatch.setattr(operands, "arch_of", lambda device: registry.arch_of_capability(90))
    for module in (dense_impls, grouped_impls):
        monkeypatch.setattr(module, "choose", lambda problem, where, impl: None)
    monkeypatch.setattr(choice, "make_ready", lambda problem, where: None)
    x, w = uneven((8, 256), seed=1).to(device), quantize_weight(uneven((3, 64, 256), block=(128, 128), seed=2).to(device), "fp8_block")
    a = quantize(x, "fp8_block") if given else x
    one = dense_gemm(a, w[0], impl="cutlass")
    assert relative_error(one, dense_gemm(a, w[0], impl="torch", out_dtype=torch.float32)) < 3e-3
    if given:
        out = grouped_gemm(a, w, ints([0, 3, 3, 8], device), impl="cutlass")
        assert relative_error(out, grouped_gemm(a, w, ints([0, 3, 3, 8], device), impl="torch", out_dtype=torch.float32)) < 2e-3


def test_traced_by_torch_compile(device, lib, monkeypatch):
    monkeypatch.setattr(operands, "arch_of", lambda device: registry.arch_of_capability(90))
    a, w = quantize(uneven((8, 256), seed=1).to(device), "fp8_block"), quantize_weight(uneven((3, 64, 256), seed=2).to(device), "fp8_block")

    def run(offsets):
        return grouped_gemm(a, w, offsets, impl="cutlass")

    offsets = ints([0, 3, 3, 8], device)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    assert relative_error(compiled(offsets), grouped_gemm(a, w, offsets, impl="torch", out_dtype=torch.float32)) < 2e-3
    refused = torch.compile(lambda: grouped_gemm(a, w, offsets, impl="cutlass", out_dtype=torch.float32), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="the CUTLASS kernels write bfloat16, not float32"):
        refused()
    torch._dynamo.reset()
