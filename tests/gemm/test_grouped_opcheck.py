"""The grouped GEMM as torch ops: schema, fake and aliasing (`opcheck`), and `torch.compile` with a dynamic number of rows."""

import pytest
import torch

from moe_ops import grouped_gemm, quantize, quantize_weight
from moe_ops.core.formats import as_bytes
from moe_ops.core.numerics import uneven

COUNTS = [3, 0, 5]


def arguments(fmt, device, masked=False):
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    a = uneven((len(COUNTS), 6, 128) if masked else (sum(COUNTS), 128), seed=1)
    w = uneven((len(COUNTS), 64, 128), block=(64, 128), seed=2)
    offsets = counts if masked else torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
    if masked:
        offsets = torch.full_like(offsets, 6)  # every row filled: opcheck compares all of the output
    if fmt == "plain":
        operands = (a, None, w, None)
    else:
        qa, qw = quantize(a, fmt), quantize_weight(w, fmt)
        operands = (as_bytes(qa.data), qa.scale, as_bytes(qw.data), qw.scale)
    operands = [t if t is None else t.to(device) for t in operands]
    return (*operands, None, offsets.to(device), None, 1, fmt, 1)


@pytest.mark.parametrize("masked", [False, True], ids=["packed", "masked"])
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "plain"])
def test_opcheck(fmt, masked, device):
    args = arguments(fmt, device, masked)
    torch.library.opcheck(torch.ops.moe_ops.grouped_gemm.default, (*args, torch.bfloat16, None))
    out = torch.zeros((3, 6, 64) if masked else (8, 64), device=device, dtype=torch.float32)
    torch.library.opcheck(torch.ops.moe_ops.grouped_gemm_out.default, (*args, out, None))


def test_compiles_once_for_any_number_of_rows(device):
    w = quantize_weight(uneven((3, 64, 128), seed=2).to(device), "fp8_block")

    def call(x, offsets):
        return grouped_gemm(quantize(x, "fp8_block"), w, offsets)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for rows in (5, 8, 17):
        x = uneven((rows, 128), seed=rows).to(device)
        offsets = torch.tensor([0, 2, 2, rows], dtype=torch.int32, device=device)
        assert torch.equal(compiled(x, offsets), call(x, offsets))
    assert len(graphs) == 1
    torch._dynamo.reset()
