"""kv_b_proj as the weights of absorbed attention: bits kept where blocks allow it, and the same attention in the end."""

import pytest
import torch

from moe_ops import bmm, dequantize, quantize_weight
from moe_ops.core.numerics import relative_error
from moe_ops.layer.mla import absorbed_kv_b

HEADS, RANK = 3, 256


def kv_b(nope, v, rank=RANK):
    return torch.randn(HEADS * (nope + v), rank, generator=torch.Generator().manual_seed(1)).bfloat16()


def parts_of(w, nope, v):
    w = w.float().view(HEADS, nope + v, -1)
    return w[:, :nope].transpose(1, 2), w[:, nope:]


@pytest.mark.parametrize("fmt,nope,v,kept", [("fp8_block", 128, 128, 2), ("fp8_block", 128, 64, 0), ("mxfp8", 128, 64, 1), ("mxfp8", 96, 160, 1)])
def test_quantized_bits_are_kept_where_blocks_allow(fmt, nope, v, kept):
    q = quantize_weight(kv_b(nope, v), fmt)
    exact = parts_of(dequantize(q), nope, v)
    got = absorbed_kv_b(q, nope, v)
    errors = [relative_error(dequantize(g), e) for g, e in zip(got, exact, strict=True)]
    assert [g.shape for g in got] == [(HEADS, RANK, nope), (HEADS, v, RANK)]
    assert all(g.data.is_contiguous() and g.scale.is_contiguous() and g.is_weight for g in got)
    assert errors[1] == 0 if kept else errors[1] < 0.04
    assert errors[0] == 0 if kept == 2 else errors[0] < 0.04


@pytest.mark.parametrize("fmt,rule", [("fp8_block", "pow2"), ("mxfp8", "floor")])
def test_a_part_that_is_quantized_again_keeps_the_rule(fmt, rule):
    parts = absorbed_kv_b(quantize_weight(kv_b(96, 64), fmt, rule=rule), 96, 64)
    assert [p.rule for p in parts] == [rule, rule]
    if rule == "pow2":
        assert all(torch.equal(p.scale.log2(), p.scale.log2().round()) for p in parts)


def test_scale_blocks_that_start_anew_within_a_head():
    q = quantize_weight(kv_b(128, 128), "fp8_block", segments=4)
    for got, exact in zip(absorbed_kv_b(q, 128, 128), parts_of(dequantize(q), 128, 128), strict=True):
        assert relative_error(dequantize(got), exact) < 0.04


def test_sixteen_bit_weights_and_quantizing_them():
    w = kv_b(128, 64)
    exact = parts_of(w, 128, 64)
    assert all(torch.equal(g.float(), e) for g, e in zip(absorbed_kv_b(w, 128, 64), exact, strict=True))
    for fmt in ("fp8_block", "mxfp8"):
        assert all(relative_error(dequantize(g), e) < 0.04 for g, e in zip(absorbed_kv_b(w, 128, 64, format=fmt), exact, strict=True))


@pytest.mark.parametrize("fmt", [None, "fp8_block", "mxfp8"])
def test_scores_and_values_are_those_of_expanded_keys(device, fmt):
    """q_nope . (W_k c) = (W_k^T q_nope) . c, and P (c W_v^T) = (P c) W_v^T."""
    tokens, past = 4, 9
    w = kv_b(128, 128).to(device)
    k_b, v_b = absorbed_kv_b(w, 128, 128, format=fmt)
    g = torch.Generator().manual_seed(2)
    q = torch.randn(tokens, HEADS, 128 + 64, generator=g).bfloat16().to(device)
    latent = torch.randn(past, RANK, generator=g).bfloat16().to(device)
    expanded = (latent.float() @ w.float().T).view(past, HEADS, 256)
    scores = torch.einsum("thd,shd->ths", q[..., :128].float(), expanded[..., :128])
    absorbed = torch.einsum("thr,sr->ths", bmm(q[..., :128], k_b, out_dtype=torch.float32), latent.float())
    assert relative_error(absorbed, scores) < (1e-4 if fmt is None else 0.06)
    p = scores.mul(0.01).softmax(-1)
    values = torch.einsum("ths,shd->thd", p, expanded[..., 128:])
    mixed = torch.einsum("ths,sr->thr", p, latent.float()).bfloat16()
    assert relative_error(bmm(mixed, v_b), values) < (6e-3 if fmt is None else 0.06)


@pytest.mark.parametrize(
    "wrong,error,text",
    [
        (lambda: absorbed_kv_b(kv_b(128, 64), 128, 128), ValueError, "weight has 576 rows, which do not divide into heads of nope"),
        (lambda: absorbed_kv_b(kv_b(128, 64)[None], 128, 64), ValueError, "weight must be 2-D"),
        (lambda: absorbed_kv_b(quantize_weight(kv_b(128, 64), "mxfp8"), 128, 64, format="fp8_block"), ValueError, "weight is mxfp8 and another"),
        (lambda: absorbed_kv_b(3, 128, 64), TypeError, "weight must be a torch.Tensor, got int"),
        (lambda: absorbed_kv_b(kv_b(128, 64), 128.0, 64), TypeError, "nope must be an int, got float"),
    ],
)
def test_bad_input_is_named(wrong, error, text):
    with pytest.raises(error, match=f"absorbed_kv_b: {text}"):
        wrong()
