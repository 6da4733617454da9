"""What tests of several files share: a stand-in for DeepGEMM's library."""

import types

import pytest
import torch

from moe_ops.core.numerics import decode_e8m0
from moe_ops.gemm import deep_gemm, deep_gemm_library, deep_gemm_probe


def check_box(t):
    """What TMA can address: from a multiple of 16 bytes, at distances of such multiples, none of them 0."""
    distances = [s * t.element_size() for s, n in zip(t.stride(), t.shape, strict=True) if n > 1 and s != 1]
    assert t.data_ptr() % 16 == 0 and all(d > 0 and d % 16 == 0 for d in distances), (t.data_ptr() % 16, t.stride())


def dequantize(pair, weight):
    """fp32 values of what the library is given; asserts its demands on strides."""
    data, scale = pair
    check_box(data)
    assert data.dtype == torch.float8_e4m3fn and data.stride(-1) == 1 and data.is_contiguous()
    rows = data.shape[-2]
    if scale.dtype == torch.int32:  # SM100: four E8M0 bytes along K
        assert scale.shape[-2] == rows and scale.stride()[-2:] == (1, -(-rows // 4) * 4)
        byte = scale.contiguous().view(torch.uint8)
        return data.float() * decode_e8m0(byte).repeat_interleave(32, -1)
    if weight:
        assert scale.is_contiguous() and scale.shape[-2] == -(-rows // 128)
        scale = scale.repeat_interleave(128, -2)[..., :rows, :]
    else:
        assert scale.shape[-2] == rows and scale.stride()[-2:] == (1, -(-rows // 4) * 4), "the library would launch a transpose"
        check_box(scale)
    return data.float() * scale.repeat_interleave(128, -1)[..., : data.shape[-1]]


class DeepGemm(types.ModuleType):
    """Computes what DeepGEMM computes, from the same arguments; rows that a tile covers in passing become garbage, as there."""

    def __init__(self):
        super().__init__("deep_gemm")
        self.aligned_to, self.calls = 64, []

    def get_mk_alignment_for_contiguous_layout(self):
        return self.aligned_to

    def set_mk_alignment_for_contiguous_layout(self, value):
        self.aligned_to = value

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, use_psum_layout=False):
        assert self.aligned_to == 128 and a[0].shape[0] % 128 == 0 and d.dtype == torch.bfloat16 and grouped_layout.dtype == torch.int32
        assert (recipe_a is None) == (a[1].dtype == torch.float32)
        check_box(d)
        self.calls.append("psum" if use_psum_layout else "contiguous")
        x, w, layout = dequantize(a, False), dequantize(b, True), grouped_layout.tolist()
        if use_psum_layout:
            begin = 0
            for e, end in enumerate(layout):
                d[begin : -(-end // 128) * 128] = 77.0
                d[begin:end] = (x[begin:end] @ w[e].T).bfloat16()
                begin = -(-end // 128) * 128
            return
        for block in range(0, len(layout), 128):
            e = layout[block]
            if e >= 0:
                assert set(layout[block : block + 128]) <= {e, -1}
                d[block : block + 128] = (x[block : block + 128] @ w[e].T).bfloat16()

    def fp8_m_grouped_gemm_nt_masked(self, a, b, d, masked_m, expected_m, recipe_a=None, recipe_b=None):
        assert expected_m > 0 and a[0].shape[1] % 128 == 0
        check_box(d)
        self.calls.append("masked")
        self.operand = a[0]
        assert 0 <= int(masked_m.min()) and int(masked_m.max()) <= a[0].shape[1]
        x, w = dequantize(a, False), dequantize(b, True)
        for e, count in enumerate(masked_m.tolist()):
            d[e, : -(-count // 64) * 64] = (x[e, : -(-count // 64) * 64] @ w[e].T).bfloat16()

    def fp8_gemm_nt(self, a, b, d, recipe_a=None, recipe_b=None):
        check_box(d)
        self.calls.append("dense")
        d.copy_(dequantize(a, False) @ dequantize(b, True).T)

    def fp8_einsum(self, expr, a, b, d):
        assert expr == "bhr,hdr->bhd" and d.is_contiguous()
        (data, scale), w = a, dequantize(b, True)
        tokens, heads, k = data.shape
        by_head = scale.transpose(0, 1)
        assert by_head.stride() == (k // 128 * -(-tokens // 4) * 4, 1, -(-tokens // 4) * 4), "the library would launch a transpose"
        assert data.stride(2) == 1
        for box in (data, scale, d):
            check_box(box)
        self.calls.append("bmm")
        d.copy_(torch.einsum("bhr,hdr->bhd", data.float() * scale.repeat_interleave(128, -1), w))


@pytest.fixture
def deep_gemm_stand_in(monkeypatch):
    """Refuses what the library would refuse or transpose (stride orders, dtypes, addresses), so that what reaches the library is right."""
    stand_in = DeepGemm()
    monkeypatch.setattr(deep_gemm_library, "library", lambda: stand_in)
    monkeypatch.setattr(deep_gemm, "features", lambda index: dict.fromkeys(deep_gemm_probe.FORMS))
    monkeypatch.setattr(deep_gemm_library, "_warm", set())
    return stand_in
