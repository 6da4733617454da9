"""Dense GEMM on a GPU: the shapes of real models, graphs, no synchronisation, no allocation, large offsets."""

import pytest
import torch

from moe_ops import dense_gemm, make_qtensor, quantize, quantize_weight
from moe_ops.core.arch import arch_of
from moe_ops.core.numerics import relative_error
from moe_ops.gemm import dense_workspace
from moe_ops.gemm.dense import dense_gemm_workspace
from moe_ops.gemm.dense_config import DenseGemmConfig
from moe_ops.quant.scale_layout import to_layout

pytestmark = pytest.mark.gpu
HOPPER = torch.cuda.is_available() and arch_of(torch.device("cuda")).has_wgmma
LINEARS = [(1536, 7168), (576, 7168), (2112, 7168), (24576, 1536), (7168, 16384), (9216, 4096), (4096, 8192)]
FORMATS = ("fp8_block", "mxfp8", "plain")


def operands(fmt, m, n, k, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, generator=g)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16, generator=g)
    return x, (w if fmt == "plain" else quantize_weight(w, fmt))


@pytest.mark.parametrize("m", [1, 16, 17, 64, 128])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("n,k", LINEARS)
def test_real_projections(n, k, fmt, m):
    x, w = operands(fmt, m, n, k)
    out = dense_gemm(x, w)
    assert relative_error(out, dense_gemm(x, w, out_dtype=torch.float32, impl="torch")) <= 3e-3
    assert torch.equal(out.view(torch.int16), dense_gemm(x, w).view(torch.int16))


@pytest.mark.parametrize("split", [1, 2, 3, 4, 7, 8, 16, 56, 64])
@pytest.mark.parametrize("fmt", FORMATS)
def test_splitk_long_sums(fmt, split):
    """SPLITK: K = 7168 in any number of parts, in dirty memory: as good as in one, bias and residual added once."""
    block_k = 64 if fmt == "plain" else 128 if fmt == "fp8_block" or torch.cuda.get_device_capability()[0] >= 10 else 32
    x, w = operands(fmt, 8, 576, 7168)
    bias, residual = torch.randn(576, device="cuda"), torch.randn(8, 576, device="cuda", dtype=torch.bfloat16)
    dirt = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(4)]
    del dirt
    options = {"bias": bias, "residual": residual, "out_dtype": torch.float32}
    exact = dense_gemm(x, w, impl="torch", **options)
    one, parts = (dense_gemm(x, w, config=DenseGemmConfig(16, 64, block_k, 4, 3, s, True), **options) for s in (1, split))
    assert relative_error(parts, exact) <= relative_error(one, exact) + 1e-5


def test_graph_replay_no_sync_and_no_allocation():
    """GRAPH: one capture with a split, replayed over changed activations, equals eager bit for bit; the out form allocates nothing."""
    for fmt in FORMATS:
        for m, n in ((1, 576), (16, 576), (40, 576), (128, 2112)):
            x, w = operands(fmt, m, n, 7168)
            out, workspace = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), dense_gemm_workspace(128, w)
            dense_gemm(x, w, out=out, workspace=workspace)
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            torch.cuda.set_sync_debug_mode("error")
            try:
                dense_gemm(x, w, out=out, workspace=workspace)
                after = torch.cuda.memory_stats()["allocation.all.allocated"]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert after == before
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                dense_gemm(x, w, out=out, workspace=workspace)
                alone = dense_gemm(x, w)  # partials in the graph's own pool
            for seed in (1, 2):
                x.copy_(operands("plain", m, 8, 7168, seed)[0])
                out.fill_(float("nan"))
                graph.replay()
                wanted = dense_gemm(x, w)
                assert torch.equal(out.view(torch.int16), wanted.view(torch.int16)) and torch.equal(alone, wanted)


def test_a_row_has_the_same_bits_under_a_pinned_config_whatever_m_is():
    x, w = operands("fp8_block", 16, 576, 7168)
    q = quantize(x, "fp8_block")
    cfg = DenseGemmConfig(16, 64, 128, 4, 4, 8, True)
    whole = dense_gemm(x, w, config=cfg, out_dtype=torch.float32)
    assert torch.equal(whole[3:5], dense_gemm(x[3:5], w, config=cfg, out_dtype=torch.float32))
    assert relative_error(whole, dense_gemm(q, w, config=cfg, out_dtype=torch.float32)) <= 1e-5


@pytest.mark.slow
def test_addr_weights_beyond_two_gib():
    """ADDR: the last rows of a weight of more than 2^31 bytes, by descriptor and, off its 16-byte grid, by pointers."""
    for n, k in ((300_000, 7296), (300_000, 7304)):
        w = torch.randint(0, 0x70, (n, k), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        q = make_qtensor(w, torch.rand(-(-n // 128), -(-k // 128), device="cuda") + 0.1, "fp8_block")
        x = torch.randn(2, k, device="cuda", dtype=torch.bfloat16)
        out = dense_gemm(x, q)
        first = n - 96  # a multiple of 128, so that the tail has scale rows of its own
        tail = make_qtensor(w[first:], q.scale[first // 128 :].contiguous(), "fp8_block")
        assert first % 128 == 0 and relative_error(out[:, first:], dense_gemm(x, tail, out_dtype=torch.float32, impl="torch")) <= 3e-3


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")
@pytest.mark.parametrize("m", [70, 129, 300, 1024, 2048])
@pytest.mark.parametrize("n,k", [(7168, 2048), (1536, 7168), (9216, 4096)])
def test_many_rows(monkeypatch, n, k, m):
    """Rows far apart, scales in both orders, 16-bit activations; a residual and an out off the 16-byte grid take the other kernel."""
    monkeypatch.setattr(dense_workspace, "roles_reason", lambda problem, arch: None)  # whatever the estimate says
    x, w = operands("fp8_block", m, n, k)
    bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    q = quantize(x, "fp8_block")
    want = dense_gemm(q, w, bias=bias, out_dtype=torch.float32, impl="torch")
    wide = torch.zeros(m, k + 128, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    wide[:, :k].copy_(q.data)
    apart = make_qtensor(wide[:, :k], q.scale, "fp8_block", weight=False)
    for dtype, bound in ((torch.float32, 5e-4), (torch.bfloat16, 4e-3), (torch.float16, 2e-3)):
        got = dense_gemm(q, w, bias=bias, out_dtype=dtype)
        assert relative_error(got, want) <= bound
        for a in (x, apart, to_layout(q, "mn_major")):
            assert torch.equal(got, dense_gemm(a, w, bias=bias, out_dtype=dtype))
    for gap, first in ((64, 8), (3, 1)):
        sliced = torch.full((m, n + gap), 7.0, device="cuda", dtype=torch.bfloat16)
        dense_gemm(x, w, bias=bias, out=sliced[:, first : first + n])
        assert relative_error(sliced[:, first : first + n], want) <= 4e-3
        assert (sliced[:, :first] == 7).all() and (sliced[:, first + n :] == 7).all()
    assert relative_error(dense_gemm(x, w, bias=bias, residual=residual), want + residual.float()) <= 4e-3
    out, workspace = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), dense_gemm_workspace(m, w)
    assert torch.equal(dense_gemm(x, w, bias=bias, out=out, workspace=workspace), dense_gemm(x, w, bias=bias))
