"""The public functions under torch.compile: one graph, dynamic row counts, equal to eager."""

import pytest
import torch

from moe_ops.core.numerics import uneven
from moe_ops.quant.activation import Activation
from moe_ops.quant.quantize import dequantize, quantize, quantize_weight
from moe_ops.quant.silu_mul_quantize import silu_mul_quantize


def chain(x, counts):
    q = quantize(x, "fp8_block", counts=counts, layout="mn_major")
    h = silu_mul_quantize(x, "mxfp8", act=Activation.gpt_oss(), layout="swizzle_32x4x4")
    w = quantize_weight(x, "mxfp8", rule="even")
    return q.scale.sum(-1), dequantize(h, torch.bfloat16), w.data.view(torch.uint8), dequantize(w)


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_one_graph_for_changing_rows(backend, device):
    """COMPILE: fullgraph, dynamic; a few row counts, zero among them, need at most two compilations."""
    torch._dynamo.reset()
    compilations = []

    def counted(graph, inputs):
        compilations.append(graph)
        return graph if backend == "eager" else torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(chain, fullgraph=True, dynamic=True, backend=counted)
    for rows in (7, 130, 33, 4):
        x = uneven((rows, 256), seed=rows).to(device)
        counts = torch.tensor([rows, 3], dtype=torch.int32, device=device)
        for got, wanted in zip(compiled(x, counts), chain(x, counts), strict=True):
            assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    assert len(compilations) <= 2
    torch._dynamo.reset()
