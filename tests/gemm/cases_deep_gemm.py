"""Compile cases of the kernels around DeepGEMM: every form, both formats, packed with gather and masked. The library itself is left out."""

from unittest import mock

import torch

from moe_ops.gemm import deep_gemm

E, N, K = 4, 256, 512


def _call(fmt: str, rows: int, form: str, masked: bool):
    def call():
        shape = (E, rows // E, K) if masked else (rows // 2, K)
        a, w = torch.zeros(shape, dtype=torch.uint8), torch.zeros((E, N, K), dtype=torch.uint8)
        if fmt == "fp8_block":
            sa, sw = torch.ones((*shape[:-1], K // 128)), torch.ones((E, N // 128, K // 128))
        else:
            sa, sw = torch.ones((*shape[:-1], K // 32), dtype=torch.uint8), torch.ones((E, N, K // 32), dtype=torch.uint8)
        offsets = torch.zeros(E if masked else E + 1, dtype=torch.int32)
        order = None if masked else torch.zeros(rows, dtype=torch.int32)
        out = torch.zeros((*shape[:-1], N) if masked else (rows, N), dtype=torch.bfloat16)
        with mock.patch.object(deep_gemm, "call_library"):
            deep_gemm._into(a, sa, w, sw, offsets, order, 2, fmt, out, form)

    return call


COMPILE_CASES = [
    (f"deep_gemm {fmt} rows={rows} {form} {'masked rows' if masked else 'gather'}", _call(fmt, rows, form, masked))
    for fmt in ("fp8_block", "mxfp8")
    for rows, form, masked in ((8, "masked", False), (256, "psum", False), (256, "contiguous", False), (128, "masked", True))
]
