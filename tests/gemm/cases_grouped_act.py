"""Compile cases of GEMM1 with its epilogue: the Gluon kernel for Hopper, its plain-Triton twin everywhere, and the tile list."""

import math

import torch

from moe_ops.gemm.grouped_act import grouped_act_into
from moe_ops.gemm.tile_list import list_size, tile_list_into

E, H, I, R = 4, 512, 256, 600


def _act(hopper: bool, gather: bool, kind: str = "silu", rule: str = "fp32"):
    def call():
        a, sa = torch.zeros((R, H), dtype=torch.uint8), torch.ones((R, H // 128))
        w, sw = torch.zeros((E, 2 * I, H), dtype=torch.uint8), torch.ones((E, 2 * I // 128, H // 128))
        out, so = torch.zeros((R, I), dtype=torch.uint8), torch.zeros((R, I // 128))
        tiles, order = torch.zeros(list_size(R, E, 64), dtype=torch.int32), torch.zeros(R, dtype=torch.int32)
        bias = torch.zeros((E, 2 * I)) if kind != "silu" else None
        grouped_act_into(a, sa, w, sw, bias, tiles, order if gather else None, 2, kind, 1.0, math.inf, 0.0, out, so, rule, hopper)

    return call


def _down():
    from moe_ops.gemm.grouped_hopper import launch_hopper

    a, sa = torch.zeros((R, I), dtype=torch.uint8), torch.ones((R, I // 128))
    w, sw = torch.zeros((E, H, I), dtype=torch.uint8), torch.ones((E, H // 128, I // 128))
    out, tiles = torch.zeros((R, H), dtype=torch.bfloat16), torch.zeros(list_size(R, E, 64), dtype=torch.int32)
    launch_hopper("grouped_gemm", a, sa, w, sw, None, out, None, tiles, None, 1, R)


COMPILE_CASES = [
    ("tile list", lambda: tile_list_into(torch.zeros(E + 1, dtype=torch.int32), R, 128, torch.zeros(list_size(R, E, 128), dtype=torch.int32))),
    ("gemm1 + silu, gather", _act(False, True), (90, 100)),
    ("gemm1 + silu, folded", _act(False, True, rule="folded"), (90, 100)),
    ("gemm1 + silu, folded, hopper", _act(True, True, rule="folded"), (90,)),
    ("gemm1 + gelu, bias", _act(False, False, "gelu_tanh"), (90, 100)),
    ("gemm1 + silu, gather, hopper", _act(True, True), (90,)),
    ("gemm1 + gelu, bias, hopper", _act(True, False, "gelu_tanh"), (90,)),
    ("gemm2, hopper", _down, (90,)),
]
EXPECT = {
    "_grouped_gemm_hopper_kernel": {90: [r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", r"setmaxnreg"]},
    "_grouped_act_kernel": {90: [r"wgmma\.mma_async"], 100: [r"tcgen05\.mma"]},
}
ONLY = {"_grouped_gemm_hopper_kernel": (90,), "_grouped_act_kernel": (90, 100)}
