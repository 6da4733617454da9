"""GEMM1 with the activation and the quantization in its epilogue, and GEMM2 over the same rows.

The plain-Triton kernel runs everywhere (in the interpreter without a GPU); on a Hopper GPU its Gluon twins run under the same bodies.
"""

import math

import pytest
import torch

from moe_ops import quantize, quantize_weight
from moe_ops.core.arch import arch_of, arch_of_capability
from moe_ops.core.numerics import random_topk, relative_error, uneven
from moe_ops.gemm.grouped_act import grouped_act_into, grouped_act_ref, kernel_of, unsupported
from moe_ops.quant.activation import Activation
from moe_ops.router.routing import Routing

HOPPER = torch.cuda.is_available() and arch_of(torch.device("cuda")).has_wgmma
KERNELS = ["triton", *(pytest.param(k, marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")) for k in ("stream", "hopper"))]


def problem(counts, tokens, h, i, device, top_k=2):
    e = len(counts)
    x = quantize(uneven((tokens, h), seed=1).to(device), "fp8_block")
    w = quantize_weight((uneven((e, 2 * i, h), block=(128, 128), seed=2, spread=1) * h**-0.5).to(device), "fp8_block", segments=2)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
    order = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(3))[: sum(counts)].to(torch.int32).to(device)
    return x, w, offsets, order


def decoded(bits, scale):
    rows, i = bits.shape
    return (bits.view(torch.float8_e4m3fn).float().view(rows, -1, 128) * scale[..., None]).view(rows, i)


CASES = [
    ("one row a expert", [1, 1, 1]),
    ("tails, whole tiles, empty", [5, 0, 130, 64, 65, 128, 1]),
    ("all rows on one expert", [0, 200, 0]),
    ("no rows", [0, 0]),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", ["fp32", "folded"])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("counts", [c[1] for c in CASES], ids=[c[0] for c in CASES])
def test_fused_gemm1_matches_reference(device, counts, gather, rule, kernel):
    h, i, top_k = 256, 128, 2
    rows = sum(counts) + 2
    tokens = rows if not gather else (rows + 1) // 2
    x, w, offsets, order = problem(counts, tokens, h, i, device)
    order = torch.nn.functional.pad(order, (0, 2), value=-1) if gather else None
    bits = torch.empty(rows, i, dtype=torch.uint8, device=device)
    scale = torch.empty(rows, i // 128, device=device)
    args = (x.data.view(torch.uint8), x.scale, w.data.view(torch.uint8), w.scale, None)
    act = ("silu", 1.0, math.inf, 0.0)
    grouped_act_into(*args, offsets, order, top_k, *act, bits, scale, rule, kernel=kernel)
    filled = sum(counts)
    ref_bits, ref_scale = grouped_act_ref(*args, offsets, order, top_k, *act, rule)
    if filled:
        if rule == "fp32":  # a power of two may step
            assert relative_error(scale[:filled], ref_scale[:filled]) < 2e-3  # the tensor core's sums within 128 are not fp32
        assert relative_error(decoded(bits, scale)[:filled], decoded(ref_bits, ref_scale)[:filled]) <= 1e-2
    assert torch.isnan(scale[filled:]).all() and (bits[filled:] == 0xFF).all()  # nothing else is written


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("act", [Activation.gelu_tanh(), Activation.gpt_oss(), Activation.clamped(0.5)], ids=["gelu", "gpt-oss", "clamped"])
def test_activations_and_bias(device, act, kernel):
    counts, h, i = [3, 70], 128, 256
    x, w, offsets, order = problem(counts, 73, h, i, device, top_k=1)
    bias = torch.randn(2, 2 * i, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).to(device)
    bits, scale = torch.empty(73, i, dtype=torch.uint8, device=device), torch.empty(73, i // 128, device=device)
    args = (x.data.view(torch.uint8), x.scale, w.data.view(torch.uint8), w.scale, bias)
    form = (act.kind, act.alpha, act.limit_or_inf, act.up_offset)
    grouped_act_into(*args, offsets, order, 1, *form, bits, scale, kernel=kernel)
    assert relative_error(decoded(bits, scale), decoded(*grouped_act_ref(*args, offsets, order, 1, *form))) <= 1e-2


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", ["fp32", "folded"])
@pytest.mark.parametrize("rows", [40, 100], ids=["tail", "whole tile"])
def test_an_infinity_spoils_its_own_element(device, rows, rule, kernel):
    """NAN: a product that overflows becomes 448 of its block's scale; its neighbours keep theirs."""
    h, i = 128, 256
    x, w, offsets, _ = problem([rows], rows, h, i, device, top_k=1)
    bias = torch.zeros(1, 2 * i, device=device)
    bias[0, 5] = float("inf")
    bits, scale = torch.empty(rows, i, dtype=torch.uint8, device=device), torch.empty(rows, i // 128, device=device)
    args = (x.data.view(torch.uint8), x.scale, w.data.view(torch.uint8), w.scale, bias)
    grouped_act_into(*args, offsets, None, 1, "silu", 1.0, math.inf, 0.0, bits, scale, rule, kernel=kernel)
    ref_bits, ref_scale = grouped_act_ref(*args, offsets, None, 1, "silu", 1.0, math.inf, 0.0, rule)
    assert torch.isfinite(scale).all() and ((bits[:, 5] & 0x7F) == (ref_bits[:, 5] & 0x7F)).all()
    assert relative_error(decoded(bits, scale), decoded(ref_bits, ref_scale)) <= 1e-2


@pytest.mark.gpu
def test_same_bits_every_run(device):
    ids, weights = random_topk(300, 8, 4, seed=1)
    routing = Routing.from_topk(ids.to(device), weights.to(device), 8)
    x = quantize(uneven((300, 512), seed=1).to(device), "fp8_block")
    w = quantize_weight(uneven((8, 512, 512), seed=2).to(device), "fp8_block")
    results = []
    for _ in range(5):
        bits, scale = torch.empty(1200, 256, dtype=torch.uint8, device=device), torch.empty(1200, 2, device=device)
        args = (x.data.view(torch.uint8), x.scale, w.data.view(torch.uint8), w.scale, None, routing.offsets, routing.order)
        grouped_act_into(*args, 4, "silu", 1.0, math.inf, 0.0, bits, scale)
        results.append((bits, scale))
    assert all(torch.equal(a, b) for r in results for a, b in zip(r, results[0], strict=True))


def test_kernel_and_reasons():
    hopper, ada = arch_of_capability(90), arch_of_capability(89)
    assert (kernel_of(64, 8, hopper), kernel_of(65, 8, hopper), kernel_of(1, 8, ada)) == ("stream", "hopper", "triton")
    assert unsupported(256, 128, 8, "fp8_block", False, hopper) is None
    assert "interleaved" in str(unsupported(256, 128, 8, "fp8_block", True, hopper))
    assert "I = 192" in str(unsupported(384, 128, 8, "fp8_block", False, hopper))
    assert "513 experts" in str(unsupported(256, 128, 513, "fp8_block", False, hopper))
    assert "mxfp8" in str(unsupported(256, 128, 8, "mxfp8", False, hopper))
    assert "sm_89" in str(unsupported(256, 128, 8, "fp8_block", False, ada))
    assert "sm_120" in str(unsupported(256, 128, 8, "fp8_block", False, arch_of_capability(120)))
