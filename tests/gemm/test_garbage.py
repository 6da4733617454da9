"""SENT, TAIL, EMPTY: garbage in offsets, order and counts stays inside operands and result, through each implementation; no rows, no launch.

The rows that may be read lie between rows of huge numbers and the result between other values, so that a wrong place shows.
"""

import importlib

import pytest
import torch

from moe_ops import quantize, quantize_weight
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm import cutlass_gemm, deep_gemm, deep_gemm_library
from moe_ops.gemm.grouped import _grouped_gemm_triton, _ref_into, grouped_gemm_into
from moe_ops.gemm.grouped_config import GroupedGemmConfig

FALLING = [5, 4, 3, 2]  # no expert has a row
OFFSETS = [[0, 10**6, -5, 8], [-(2**31), 2**31 - 1, 0, 3], FALLING, [0, 8, 8, 8]]
ORDER = [-7, 40, 3, 0, 1, 2, 9, 8]
COUNTS = [-3, 5, -200, 70, 2**31 - 1, -(2**31)]
HUGE = 1e5


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def operands(shape, e, n, k, device, layout=None):
    q = quantize(uneven((*shape, k), seed=1).to(device), "fp8_block", layout=layout)
    w = quantize_weight(uneven((e, n, k), block=(128, 128), seed=2).to(device), "fp8_block")
    return q.data.view(torch.uint8), q.scale, w.data.view(torch.uint8), w.scale


def guarded(device, rows=4, k=128):
    """Small rows between rows of 448e6."""
    data, scale = torch.full((rows + 64, k), 0x7E, dtype=torch.uint8, device=device), torch.full((rows + 64, k // 128), 1e6, device=device)
    a, sa, w, sw = operands((rows,), 3, 64, k, device)
    data[32 : 32 + rows], scale[32 : 32 + rows] = a, sa
    return data[32 : 32 + rows], scale[32 : 32 + rows], w, sw


@pytest.fixture
def lib(deep_gemm_stand_in):
    return deep_gemm_stand_in


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_triton(device, offsets):
    a, sa, w, sw = guarded(device)
    room = torch.full((24, 64), 5.0, device=device)
    grouped_gemm_into(a, sa, w, sw, None, ints(offsets, device), ints(ORDER, device), 2, "fp8_block", 1, room[8:16])
    assert (room[:8] == 5).all() and (room[16:] == 5).all() and not (room.abs() > HUGE).any()
    assert (room[8:16] != 5).any() == (offsets != FALLING)


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("form", ["psum", "masked", "contiguous"])
def test_deep_gemm(lib, device, offsets, form, monkeypatch):
    a, sa, w, sw = guarded(device)
    given, new_empty = [], torch.Tensor.new_empty

    def call(form, shape, x, y, d, *more, **options):
        given.append(x[0].float() * x[1].contiguous().repeat_interleave(128, -1))
        d.fill_(1.0)

    def between(self, *args, **kwargs):  # fresh results lie between others
        t = new_empty(self, *args, **kwargs)
        if t.dtype != torch.bfloat16:
            return t
        return torch.full((t.numel() + 8192,), 99.0, dtype=t.dtype, device=t.device)[4096 : 4096 + t.numel()].view(t.shape)

    monkeypatch.setattr(deep_gemm, "call_library", call)
    monkeypatch.setattr(torch.Tensor, "new_empty", between)
    room = torch.full((24, 64), 5.0, dtype=torch.bfloat16, device=device)
    deep_gemm._into(a, sa, w, sw, ints(offsets, device), ints(ORDER, device), 2, "fp8_block", room[8:16], form)
    assert (room[:8] == 5).all() and (room[16:] == 5).all() and ((room == 5) | (room == 1)).all()
    assert (room == 1).any() == (offsets != FALLING)
    assert not (given[0].abs() > HUGE).any()


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_cutlass_gathers_rows(device, offsets, monkeypatch):
    a, sa, w, sw = guarded(device)
    kept, new_empty = [], torch.Tensor.new_empty

    def between(self, *args, **kwargs):
        t = new_empty(self, *args, **kwargs)
        kept.append((torch.full((t.numel() + 2048,), 99, dtype=t.dtype, device=t.device), t.numel()))
        return kept[-1][0][1024 : 1024 + t.numel()].view(t.shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", between)
    order = ints(ORDER[:7], device)  # the last program has room for eight
    data, scale = cutlass_gemm.gather_rows(a, sa, ints(offsets, device), order, 2, 3)
    assert not (scale > HUGE).any() and not (data == 0x7E).all(-1).any()
    assert kept and all((room[:1024] == 99).all() and (room[1024 + size :] == 99).all() for room, size in kept)


@pytest.mark.parametrize("swap", [True, False], ids=["swap", "rows"])
def test_triton_masked_counts(device, swap):
    a, sa, w, sw = operands((6, 70), 6, 64, 128, device)
    config = GroupedGemmConfig(16, 64, 128, 4, 3, 2, True) if swap else GroupedGemmConfig(64, 64, 128, 4, 3, 0, False)
    counts = ints(COUNTS, device)
    out = _grouped_gemm_triton(a, sa, w, sw, None, counts, None, 1, "fp8_block", 1, torch.float32, config.ints())
    ref = torch.full_like(out, float("nan"))  # as the fresh memory of a result here
    _ref_into(a, sa, w, sw, None, counts, None, 1, "fp8_block", 1, ref)
    assert torch.equal(out.isnan(), ref.isnan()) and relative_error(out.nan_to_num(), ref.nan_to_num()) <= 5e-4


@pytest.mark.parametrize("capacity,layout", [(70, "row_major"), (128, "mn_major")], ids=["led there and back", "in place"])
def test_deep_gemm_masked_counts(lib, device, capacity, layout):
    """The stand-in refuses counts below 0 and beyond the capacity."""
    a, sa, w, sw = operands((6, capacity), 6, 64, 256, device, layout)
    out, ref = torch.full((6, capacity, 64), 5.0, dtype=torch.bfloat16, device=device), torch.zeros((6, capacity, 64), device=device)
    deep_gemm.deep_gemm_grouped_into(a, sa, w, sw, ints(COUNTS, device), None, 1, "fp8_block", out)
    _ref_into(a, sa, w, sw, None, ints(COUNTS, device), None, 1, "fp8_block", 1, ref)
    for e, count in enumerate(COUNTS):
        filled = min(max(count, 0), capacity)
        assert filled == 0 or relative_error(out[e, :filled], ref[e, :filled]) <= 3e-3
        assert (out[e, -(-filled // 128) * 128 :] == 5).all()


@pytest.mark.parametrize("e,n", [(3, 8192), (200, 512), (2, 128)])
def test_no_rows_launch_nothing(monkeypatch, e, n):
    for module in ("gemm.grouped_hopper", "gemm.grouped_stream", "core.launch"):
        importlib.import_module(f"moe_ops.{module}")
        monkeypatch.setattr(f"moe_ops.{module}.launch", lambda *args, **meta: pytest.fail(f"launched {args[1]}"))
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    w, sw = torch.zeros(e, n, 256, dtype=torch.uint8), torch.ones(e, n // 128, 2)
    for shape in ((0,), (e, 0)):
        a, sa, offsets = torch.zeros(*shape, 256, dtype=torch.uint8), torch.ones(*shape, 2), torch.zeros(e + (len(shape) == 1), dtype=torch.int32)
        assert _grouped_gemm_triton(a, sa, w, sw, None, offsets, None, 1, "fp8_block", 1, torch.bfloat16).shape == (*shape, n)


def test_each_number_of_rows_is_warmed_for_deep_gemm(lib, device):
    """GRAPH: the library compiles by the number of rows, so that a capture of another number is refused until it ran once."""
    a, sa, w, sw = operands((8,), 1, 64, 128, device)
    out, seen = torch.zeros(8, 64, dtype=torch.bfloat16, device=device), []
    for m in (4, 8, 4):
        deep_gemm.dense_into(a[:m], sa[:m], w[0], sw[0], "fp8_block", out[:m])
        deep_gemm.bmm_into(a[:m, None], sa[:m, None], w, sw, out[:m, None])
        seen.append(len(deep_gemm_library._warm))
    assert seen == [2, 4, 4]
