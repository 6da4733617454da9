"""Compile cases of the dense GEMM: every format, few rows and many, quantized activations and 16-bit ones, with and without a split."""

import torch

from moe_ops.gemm.dense import _dense_gemm_triton
from moe_ops.gemm.dense_config import DenseGemmConfig

N = 576


def _call(fmt: str, rows: int, rule: str, k: int, n: int = N):
    def call():
        if fmt == "plain":
            a, sa, w, sw = torch.zeros((rows, k), dtype=torch.bfloat16), None, torch.zeros((n, k), dtype=torch.bfloat16), None
        else:
            a, w = torch.zeros((rows, k), dtype=torch.uint8), torch.zeros((n, k), dtype=torch.uint8)
            if fmt == "fp8_block":
                sa, sw = torch.ones((rows, -(-k // 128))), torch.ones((-(-n // 128), -(-k // 128)))
            else:
                sa, sw = torch.ones((rows, k // 32), dtype=torch.uint8), torch.ones((n, k // 32), dtype=torch.uint8)
            if rule != "given":
                a, sa = torch.zeros((rows, k), dtype=torch.bfloat16), None
        bias, residual = torch.zeros(n), torch.zeros((rows, n), dtype=torch.bfloat16)
        _dense_gemm_triton(a, sa, w, sw, bias, residual, fmt, rule, torch.bfloat16)

    return call


def _stream(block_m: int, block_n: int, stages: int, programs: int, n: int = N):
    def call():
        rows, k = block_m - 1, 640
        operands = (torch.zeros((rows, k), dtype=torch.uint8), torch.ones((rows, 5)), torch.zeros((n, k), dtype=torch.uint8), torch.ones((5, 5)))
        config = DenseGemmConfig(block_m, block_n, 128, 4, stages, 1, block_m <= 32, programs)
        bias, residual = torch.zeros(n), torch.zeros((rows, n), dtype=torch.bfloat16)
        _dense_gemm_triton(*operands, bias, residual, "fp8_block", "given", torch.bfloat16, config.ints())

    return call


def _roles(rule: str):
    def call():
        rows, n, k = 2048, 1536, 7168
        a, sa = torch.zeros((rows, k), dtype=torch.uint8), torch.ones((rows, k // 128))
        if rule != "given":
            a, sa = torch.zeros((rows, k), dtype=torch.bfloat16), None
        w, sw, bias = torch.zeros((n, k), dtype=torch.uint8), torch.ones((n // 128, k // 128)), torch.zeros(n)
        _dense_gemm_triton(a, sa, w, sw, bias, None, "fp8_block", rule, torch.bfloat16)

    return call


COMPILE_CASES = [
    (f"dense {fmt} rows={rows} K={k} N={n} {rule}", _call(fmt, rows, rule, k, n))
    for fmt, rule in (
        ("fp8_block", "given"),
        ("fp8_block", "fp32"),
        ("fp8_block", "folded"),
        ("mxfp8", "given"),
        ("mxfp8", "rceil"),
        ("plain", "given"),
    )
    for rows, k, n in ((4, 7168, N), (32, 7168, N), (64, 7168, N), (200, 512, N), (4096, 512, 4096), (3, 160, 80))
    if (rule == "given" and (rows != 32 or fmt == "fp8_block")) or (rows <= 16 and not (rule == "folded" and k % 128))
]
COMPILE_CASES += [
    (f"dense stream {bm}x{bn} programs={programs}", _stream(bm, bn, stages, programs), (90,))
    for bm, bn, stages in (
        *((16, 64, 10), (16, 128, 4), (32, 128, 10), (64, 32, 16), (64, 72, 10), (64, 144, 6)),
        *((128, 80, 6), (128, 192, 5), (128, 144, 6)),
    )
    for programs in ((1, 5) if bn % 32 == 0 else (4,))
]
# programs that exchange sums
COMPILE_CASES += [(f"dense stream 128x{bn} in pairs", _stream(128, bn, stages, 4, 2 * bn), (90,)) for bn, stages in ((32, 10), (64, 8))]
COMPILE_CASES += [(f"dense with warp roles, {rule}", _roles(rule), (90,)) for rule in ("given", "fp32")]
# the weights asked for before the quantizer has ended
COMPILE_CASES += [(f"dense after its quantizer, {n} x {k}", _call("fp8_block", 63, "fp32", k, n), (90,)) for n, k in ((18432, 7168), (576, 7168))]
EXPECT = {
    "_grouped_gemm_hopper_kernel": {90: [r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", r"cp\.async\.bulk\.tensor\.2d\.global"]},
    "_dense_stream_kernel": {90: [r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3", r"setmaxnreg|maxnreg"]},
    "_dense_gemm_kernel": {
        90: [r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k(32\.f32\.e4m3\.e4m3|16\.f32\.bf16\.bf16)"],
        100: [r"tcgen05\.mma\.cta_group::1\.kind::(mxf8f6f4\.block_scale|f8f6f4|f16)"],
        120: [r"mma\.sync\.aligned\.m16n8k(32\.row\.col\.(kind::mxf8f6f4\.block_scale|f32\.e4m3)|16\.row\.col\.f32\.bf16)"],
    },
}
SPILLS = {
    "_dense_stream_kernel": (8, "with bias, residual and an early start: in the epilogue"),
    "_grouped_gemm_hopper_kernel": (72, "the producer keeps what belongs to a tile, not to a step, in local memory"),
}
ONLY = {"_dense_stream_kernel": (90,), "_stream_reduce_kernel": (90,)}
