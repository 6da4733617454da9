"""The dense GEMM as torch ops: schema, fake and aliasing (`opcheck`), and `torch.compile` with a dynamic number of rows."""

import pytest
import torch

from moe_ops import dense_gemm, quantize, quantize_weight
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
