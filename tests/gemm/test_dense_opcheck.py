"""The dense GEMM as torch ops: schema, fake and aliasing (`opcheck`), and `torch.compile` with a dynamic number of rows."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_ops import bmm, dense_gemm, quantize, quantize_weight
from moe_ops.core.formats import as_bytes
from moe_ops.core.numerics import uneven


@pytest.mark.parametrize("fmt,fused", [("fp8_block", False), ("fp8_block", True), ("mxfp8", False), ("mxfp8", True), ("plain", False)])
def test_opcheck(fmt, fused, device):
    a, w = uneven((5, 256), seed=1).to(device), uneven((64, 256), seed=2).to(device)
    bias, residual = torch.randn(64).to(device), torch.randn(5, 64).to(device)
    if fmt == "plain":
        args = (a, None, w, None, bias, residual, fmt, "given")
    else:
        qa, qw = quantize(a, fmt), quantize_weight(w, fmt)
        activation = (a, None) if fused else (as_bytes(qa.data), qa.scale)
        args = (*activation, as_bytes(qw.data), qw.scale, bias, residual, fmt, qw.format.rules[0] if fused else "given")
    torch.library.opcheck(torch.ops.moe_ops.dense_gemm.default, (*args, torch.bfloat16, None))
    out = torch.zeros((5, 64), device=device)
    torch.library.opcheck(torch.ops.moe_ops.dense_gemm_out.default, (*args, out, None, None))
    torch.library.opcheck(torch.ops.moe_ops.dense_gemm_out.default, (*args, out, torch.zeros(1 << 20, dtype=torch.uint8, device=device), None))


def test_compiles_once_for_any_number_of_rows(device):
    w = quantize_weight(uneven((64, 256), seed=2).to(device), "fp8_block")

    def call(x):
        return dense_gemm(x, w) + dense_gemm(quantize(x, "fp8_block"), w)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for rows in (5, 8, 17, 40):
        x = uneven((rows, 256), seed=rows).to(device)
        assert torch.equal(compiled(x), call(x))
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("marked", [True, False], ids=["mark_dynamic", "unmarked"])
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "plain"])
def test_rows_are_no_reason_to_trace_again(device, fmt, marked):
    """Both functions in every form, through AOTAutograd: marked, one graph serves every M; unmarked, the second M makes it so. M = 1 has its own."""
    w, heads = uneven((64, 256), seed=2).to(device), uneven((2, 64, 128), seed=3).to(device)
    if fmt != "plain":
        w, heads = quantize_weight(w, fmt), quantize_weight(heads, fmt)

    def call(x):
        both = dense_gemm(x, w, residual=x[:, :64], bias=x.new_ones(64)), bmm(x.view(-1, 2, 128), heads)
        out, turned = torch.empty_like(both[0]), x.new_empty((2, x.shape[0], 64))
        dense_gemm(x, w, out=out)
        bmm(x.view(-1, 2, 128), heads, out=turned.transpose(0, 1))
        quantized = () if fmt == "plain" else (dense_gemm(quantize(x, fmt), w, out_dtype=torch.float32),)
        return *both, out, turned, *quantized

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for rows, graphs in ((5, 1), (8, 1 if marked else 2), (16, None), (17, None), (40, None), (129, None), (1, 2 if marked else 3)):
        x = uneven((rows, 256), seed=rows).to(device)
        if marked and rows > 1:
            torch._dynamo.mark_dynamic(x, 0)
        for got, wanted in zip(compiled(x), call(x), strict=True):
            assert torch.equal(got, wanted)
        graphs = graphs or (1 if marked else 2)
        assert counter.frame_count == graphs, rows
    torch._dynamo.reset()
