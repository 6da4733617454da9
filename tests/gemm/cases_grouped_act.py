"""Compile cases of GEMM1 with its epilogue: the Gluon kernels for Hopper and their plain-Triton twin everywhere."""

import math

import torch

from moe_ops.gemm.grouped_act import grouped_act_into

E, H, I = 4, 512, 256


def _act(kernel: str, gather: bool, kind: str = "silu", rule: str = "fp32", early: bool = False, rows: int = 600):
    def call():
        R = rows
        a, sa = torch.zeros((R, H), dtype=torch.uint8), torch.ones((R, H // 128))
        w, sw = torch.zeros((E, 2 * I, H), dtype=torch.uint8), torch.ones((E, 2 * I // 128, H // 128))
        out, so = torch.zeros((R, I), dtype=torch.uint8), torch.zeros((R, I // 128))
        offsets, order = torch.zeros(E + 1, dtype=torch.int32), torch.zeros(R, dtype=torch.int32)
        bias = torch.zeros((E, 2 * I)) if kind != "silu" else None
        grouped_act_into(a, sa, w, sw, bias, offsets, order if gather else None, 2, kind, 1.0, math.inf, 0.0, out, so, rule, early, kernel)

    return call


COMPILE_CASES = [
    ("gemm1 + silu, gather", _act("triton", True), (90, 100)),
    ("gemm1 + silu, folded", _act("triton", True, rule="folded"), (90, 100)),
    ("gemm1 + silu, folded, hopper", _act("hopper", True, rule="folded"), (90,)),
    ("gemm1 + gelu, bias", _act("triton", False, "gelu_tanh"), (90, 100)),
    ("gemm1 + silu, gather, hopper", _act("hopper", True), (90,)),
    ("gemm1 + silu, gather, hopper, early, tiles handed out", _act("hopper", True, early=True, rows=1300), (90,)),
    ("gemm1 + silu, gather, stream, early", _act("stream", True, early=True), (90,)),
    ("gemm1 + silu, stream, two programs an SM", _act("stream", True, rows=4), (90,)),
    ("gemm1 + silu, folded, stream", _act("stream", True, rule="folded"), (90,)),
    ("gemm1 + gelu, bias, stream", _act("stream", False, "gelu_tanh"), (90,)),
    ("gemm1 + gelu, bias, hopper", _act("hopper", False, "gelu_tanh"), (90,)),
]
EXPECT = {
    "_grouped_gemm_hopper_kernel": {90: [r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", r"setmaxnreg"]},
    "_grouped_act_kernel": {90: [r"wgmma\.mma_async"], 100: [r"tcgen05\.mma"]},
}
ONLY = {"_grouped_gemm_hopper_kernel": (90,), "_grouped_act_kernel": (90, 100)}
SPILLS = {"_grouped_gemm_hopper_kernel": (72, "the producer keeps what belongs to a tile, not to a step, in local memory")}
