"""Compile cases of the batched GEMM: both projections of absorbed MLA, every format, quantized in the kernel and before, few tokens and many."""

import torch

from moe_ops.gemm.bmm import _bmm_triton, bmm_into

HEADS = 128


def _call(
    fmt: str, tokens: int, rule: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16, a_dtype: torch.dtype = torch.bfloat16, beside: int = 0
):  # fmt: skip
    """A call into `dtype`; `beside`: elements of the buffer before the first one of a head's results."""

    def call():
        if fmt == "plain":
            a, sa, w, sw = torch.zeros((tokens, HEADS, k), dtype=torch.bfloat16), None, torch.zeros((HEADS, n, k), dtype=torch.bfloat16), None
        else:
            a, w = torch.zeros((tokens, HEADS, k), dtype=torch.uint8), torch.zeros((HEADS, n, k), dtype=torch.uint8)
            if fmt == "fp8_block":
                sa, sw = torch.ones((tokens, HEADS, k // 128)), torch.ones((HEADS, n // 128, k // 128))
            else:
                sa, sw = torch.ones((tokens, HEADS, k // 32), dtype=torch.uint8), torch.ones((HEADS, n, k // 32), dtype=torch.uint8)
            if rule != "given":
                a, sa = torch.zeros((tokens, HEADS, k + 64), dtype=a_dtype)[..., :k], None
        if beside:
            bmm_into(a, sa, w, sw, fmt, rule, torch.zeros((tokens, HEADS, beside + n), dtype=dtype)[..., beside:])
        else:
            _bmm_triton(a, sa, w, sw, fmt, rule, dtype)

    return call


COMPILE_CASES = [
    (f"bmm {fmt} tokens={tokens} N={n} K={k} {rule}", _call(fmt, tokens, rule, n, k))
    for fmt, rules in (("fp8_block", ("given", "fp32", "folded")), ("mxfp8", ("given", "rceil")), ("plain", ("given",)))
    for rule in rules
    for tokens in ((1, 32, 64, 512) if rule == "fp32" else (1, 512))
    for n, k in ((512, 128), (128, 512))
]
COMPILE_CASES += [
    (f"bmm into fp32, tokens={tokens} N={n} K={k}", _call("fp8_block", tokens, "fp32", n, k, torch.float32), (90,))
    for tokens, n, k in ((64, 128, 512), (512, 512, 128))
]
# two and three warpgroups of rows, stored by TMA and, off the 16-byte grid, by the threads
COMPILE_CASES += [
    (f"bmm {rule}, {a} to {dtype}, {beside} beside, tokens={tokens} N={n} K={k}", _call("fp8_block", tokens, rule, n, k, dtype, a, beside), (90,))
    for tokens, n, k, rule, a, dtype, beside in (
        (128, 128, 512, "given", torch.bfloat16, torch.bfloat16, 0),
        (512, 128, 512, "given", torch.bfloat16, torch.float16, 4),
        (512, 128, 512, "fp32", torch.float16, torch.float16, 0),
        (512, 128, 512, "fp32", torch.bfloat16, torch.bfloat16, 4),
        (512, 128, 512, "folded", torch.float16, torch.float32, 0),
        (512, 128, 2048, "fp32", torch.bfloat16, torch.bfloat16, 0),
    )
]
COMPILE_CASES += [(f"bmm given tokens=64 N={n} K={k}", _call("fp8_block", 64, "given", n, k), (90,)) for n, k in ((128, 512), (512, 128))]
# one step, more steps than slots, blocks in both directions
COMPILE_CASES += [
    (f"bmm tokens={tokens} N={n} K={k}", _call("fp8_block", tokens, "fp32", n, k), (90,))
    for tokens, n, k in ((20, 128, 128), (300, 128, 128), (40, 128, 2048), (300, 1024, 128))
]
# a slot goes back behind a fence: TMA or cp.async could overtake loads of other warps
FREED = (
    r"(?s)fence\.proxy\.async\.shared::cta;(\s|//[^\n]*|\.loc[^\n]*)*"
    r"bar\.sync[^;]*;(\s|//[^\n]*|\.loc[^\n]*)*@%p\d+ mbarrier\.arrive"
)
EXPECT = {
    "_bmm_few_kernel": {90: [r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3"]},
    "_bmm_hopper_kernel": {90: [r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", "setmaxnreg", FREED]},
    "_dense_gemm_kernel": {
        90: [r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k(32\.f32\.e4m3\.e4m3|16\.f32\.bf16\.bf16)"],
        100: [r"tcgen05\.mma\.cta_group::1\.kind::(mxf8f6f4\.block_scale|f8f6f4|f16)"],
        120: [r"mma\.sync\.aligned\.m16n8k(32\.row\.col\.(kind::mxf8f6f4\.block_scale|f32\.e4m3)|16\.row\.col\.f32\.bf16)"],
    },
}
ONLY = {"_bmm_few_kernel": (90,), "_bmm_hopper_kernel": (90,)}
SPILLS = {
    "_bmm_hopper_kernel": (
        16,
        "three warpgroups that quantize for folded weights, outside of the steps; Triton 3.9: those whose results TMA cannot store",
    )
}
