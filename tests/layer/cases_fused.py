"""Compile cases of the fused layer: the chain in every format, at a decode and a prefill size."""

import torch

from moe_ops.layer.fused import _fused_moe_cuda


def _call(fmt: str, tokens: int):
    def call():
        e, h, i = 4, 256, 256
        w13, w2 = torch.zeros((e, 2 * i, h), dtype=torch.bfloat16), torch.zeros((e, h, i), dtype=torch.bfloat16)
        x = torch.zeros((tokens, h), dtype=torch.bfloat16)
        offsets, order = torch.zeros(e + 1, dtype=torch.int32), torch.zeros(tokens * 2, dtype=torch.int32)
        inverse, weights = torch.zeros((tokens, 2), dtype=torch.int32), torch.zeros((tokens, 2))
        scales = (None, None)
        if fmt in ("fp8_block", "mxfp8_folded"):
            scales = (torch.ones((e, 2 * i // 128, h // 128)), torch.ones((e, h // 128, i // 128)))
        elif fmt == "mxfp8":
            scales = (torch.ones((e, 2 * i, h // 32), dtype=torch.uint8), torch.ones((e, h, i // 32), dtype=torch.uint8))
        if fmt != "plain":
            w13, w2 = torch.zeros(w13.shape, dtype=torch.uint8), torch.zeros(w2.shape, dtype=torch.uint8)
        _fused_moe_cuda(x, w13, scales[0], w2, scales[1], None, None, weights, offsets, order, inverse, fmt, 1, "silu", 1.0, float("inf"), 0.0, False)

    return call


COMPILE_CASES = [(f"fused {fmt} T={t}", _call(fmt, t)) for fmt in ("fp8_block", "mxfp8", "mxfp8_folded", "plain") for t in (2, 2000)]
SPILLS = {"_grouped_gemm_hopper_kernel": (76, "what belongs to a tile, where K has two steps: two registers a consumer's, the others the producer's")}
