"""The dense GEMM as it is called on a Hopper GPU, without one: workspaces, empty calls, rows off the grid, words for programs that wait."""

import importlib
from dataclasses import replace

import pytest
import torch

from moe_ops import make_qtensor
from moe_ops.core.arch import arch_of_capability
from moe_ops.core.zeroed import STREAM_WORDS
from moe_ops.gemm.dense import _dense_gemm_triton, dense_gemm_into, dense_gemm_workspace
from moe_ops.gemm.dense_config import (
    STREAM_WIDTHS,
    DenseGemmConfig,
    DenseGemmProblem,
    boxes,
    is_legal,
)
from moe_ops.gemm.dense_exchange_kernel import slots
from moe_ops.gemm.dense_workspace import needs

HOPPER = replace(arch_of_capability(90), sms=132)


@pytest.fixture
def hopper(monkeypatch):
    """What chooses kernels sees an H200."""
    for module in ("dense", "dense_config", "dense_workspace"):
        monkeypatch.setattr(f"moe_ops.gemm.{module}.arch_of", lambda device: HOPPER)


@pytest.mark.parametrize("n,k", [(2112, 7168), (4096, 8192), (1536, 7168), (24576, 1536), (100, 400), (4224, 1000)])
def test_workspace_is_enough_for_hopper(hopper, n, k):
    """Every M up to the workspace's, activation quantized before, inside or given, rows on the 16-byte grid and off it, residual or none."""
    w = torch.empty(n, k, dtype=torch.uint8)
    q = make_qtensor(w.view(torch.float8_e4m3fn), torch.ones(-(-n // 128), -(-k // 128)), "fp8_block")
    room = torch.empty(200, k + 16, dtype=torch.bfloat16)
    bits = torch.empty(200, k + 8, dtype=torch.uint8)
    for most in (1, 16, 33, 65, 100, 128, 130, 200):
        have = dense_gemm_workspace(most, q).numel()
        for rows in {1, 15, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, most}:
            if rows > most:
                continue
            out = torch.empty(rows, n, dtype=torch.bfloat16)
            for a, rule in ((room[:rows, :k], "fp32"), (bits[:rows, :k], "given"), (bits[:rows, :k].contiguous(), "given")):
                for residual in (None, out):
                    assert needs("dense_gemm", a, w, "fp8_block", rule, None, residual, out)[2] <= have, (most, rows, rule)


@pytest.mark.parametrize("n", [64, 2112])
def test_empty_launches_no_gluon_kernel(hopper, monkeypatch, n):
    """EMPTY: no rows, where Hopper's kernels would be taken: their grid is not 0, but a box of no rows is the driver's error."""
    for name in ("dense_kernel", "dense_stream"):
        importlib.import_module(f"moe_ops.gemm.{name}")
    for module in ("gemm.dense_stream", "gemm.dense_kernel", "core.launch"):
        monkeypatch.setattr(f"moe_ops.{module}.launch", lambda *args, **meta: pytest.fail(f"launched {args[1]}"))
    k = 256
    w, sw = torch.zeros(n, k, dtype=torch.uint8), torch.ones(-(-n // 128), 2)
    pinned = DenseGemmConfig(128, 64, 128, 4, 8, 1, False, 2 * -(-n // 64)).ints()
    x, q, sa = torch.zeros(0, k, dtype=torch.bfloat16), torch.zeros(0, k, dtype=torch.uint8), torch.ones(0, 2)
    for config in (None, pinned):
        assert _dense_gemm_triton(q, sa, w, sw, None, None, "fp8_block", "given", torch.bfloat16, config).shape == (0, n)
        dense_gemm_into(q, sa, w, sw, None, None, "fp8_block", "given", torch.zeros(0, n), torch.zeros(1 << 24, dtype=torch.uint8), config)
    assert _dense_gemm_triton(x, None, w, sw, None, None, "fp8_block", "fp32", torch.bfloat16).shape == (0, n)


def test_boxes_lie_in_one_block_of_scales():
    """TAIL: first boxes, then second ones: every column once, no box across a border between two scales."""
    for width in {w for widths in STREAM_WIDTHS.values() for w in widths}:
        first, second = boxes(width)
        assert first + second == width and 128 % first == 0 and (second == 0 or first % second == 0 and second % 8 == 0)
        for tiles in range(1, 130):
            starts = [(t * first, first) for t in range(tiles)] + [(tiles * first + t * second, second) for t in range(tiles) if second]
            assert all(at // 128 == (at + wide - 1) // 128 for at, wide in starts)
            assert [c for at, wide in starts for c in range(at, at + wide)] == list(range(tiles * width))


def test_a_word_for_every_program_that_waits():
    """GRAPH: `zeroed_words` has as many as any legal config asks for."""
    for sms in (64, 78, 114, 132, 144):
        arch = replace(HOPPER, sms=sms)
        for n in range(32, 9000, 32):
            for width in (32, 64):
                cfg = DenseGemmConfig(128, width, 128, 4, 8, 1, False, 2 * -(-n // width))
                if is_legal(cfg, DenseGemmProblem(128, 1, n, 7168, "fp8_block", aligned=True), arch) is None:
                    assert cfg.programs <= STREAM_WORDS
    with pytest.raises(ValueError, match="257 SMs"):
        slots(torch.device("cpu"), 257, 64)


@pytest.mark.parametrize("rows", [1, 20, 64, 100])
def test_rows_off_the_grid_take_no_boxes(hopper, rows):
    """ALIGN: only rows apart and on 16-byte boundaries reach the Gluon kernel; 16-bit rows are quantized into memory that lies right."""
    n, k = 2112, 512
    w, out, wide = torch.empty(n, k, dtype=torch.uint8), torch.empty(rows, n), torch.empty(200, k + 16, dtype=torch.uint8)
    for a, boxed in (
        (wide[:rows, :k], True),
        (wide[:rows, 16:], True),
        (wide[:rows, 8 : 8 + k], False),
        (wide[:1, :k].expand(rows, k), rows == 1),
        (torch.empty(200, k + 8, dtype=torch.uint8)[:rows, :k], rows == 1),
    ):
        assert (needs("dense_gemm", a, w, "fp8_block", "given", None, None, out)[0].programs > 0) == boxed
    odd = torch.empty(200, k + 3, dtype=torch.bfloat16)[:rows, 1 : 1 + k]
    assert needs("dense_gemm", odd, w, "fp8_block", "fp32", None, out, out)[0].programs > 0
    off = torch.empty(n * k + 8, dtype=torch.uint8)[8:].view(n, k)
    assert needs("dense_gemm", wide[:rows, :k], off, "fp8_block", "given", None, out, out)[0].programs == 0
