"""Compile cases of the grouped GEMM: every format, both orientations, packed with gather and masked."""

import torch

from moe_ops.core.arch import arch_of
from moe_ops.gemm.grouped import _grouped_gemm_triton
from moe_ops.gemm.grouped_config import GroupedGemmConfig, GroupedGemmProblem, heuristic

E, N, K = 4, 256, 512


def _call(fmt: str, rows: int, masked: bool = False, k: int = K, pinned: bool = False, config: GroupedGemmConfig | None = None):
    def call():
        shape = (E, rows // E, k) if masked else (rows // 2, k)
        if fmt == "plain":
            a, sa, w, sw = torch.zeros(shape, dtype=torch.bfloat16), None, torch.zeros((E, N, k), dtype=torch.bfloat16), None
        else:
            a, w = torch.zeros(shape, dtype=torch.uint8), torch.zeros((E, N, k), dtype=torch.uint8)
            if fmt == "fp8_block":
                sa, sw = torch.ones((*shape[:-1], -(-k // 128))), torch.ones((E, N // 128, -(-k // 128)))
            else:
                sa, sw = torch.ones((*shape[:-1], k // 32), dtype=torch.uint8), torch.ones((E, N, k // 32), dtype=torch.uint8)
        offsets = torch.zeros(E if masked else E + 1, dtype=torch.int32)
        order = None if masked else torch.zeros(rows, dtype=torch.int32)
        bias = None if masked else torch.zeros((E, N))
        chosen = heuristic(GroupedGemmProblem(rows, E, N, k, fmt), arch_of(a.device)) if pinned else config
        _grouped_gemm_triton(
            a, sa, w, sw, bias, offsets, order, 2, fmt, 1, torch.float32 if masked else torch.bfloat16, None if chosen is None else chosen.ints()
        )

    return call


COMPILE_CASES = [
    (f"grouped {fmt} rows={rows} {'masked' if masked else 'gather'} K={k}", _call(fmt, rows, masked, k))
    for fmt in ("fp8_block", "mxfp8", "plain")
    for rows, masked, k in ((8, False, K), (128, True, K), (4000, False, K), (2000, False, 576))
]
COMPILE_CASES += [("grouped fp8_block rows=4000 masked", _call("fp8_block", 4000, True), (90,))]  # enough tiles to hand them out, as for packed rows
COMPILE_CASES += [(f"grouped fp8_block rows={rows} plain Triton", _call("fp8_block", rows, pinned=True)) for rows in (8, 4000)]
#: what a router's product takes on Hopper
FEW_TILES = [GroupedGemmConfig(16, 64, 256, 4, 3, 3, True), GroupedGemmConfig(32, 64, 256, 4, 4, 3, True)]
COMPILE_CASES += [
    (f"grouped plain few tiles of {c.block_m} rows, K={k}, masked={m}", _call("plain", 128, m, k, config=c), (90, 100))
    for c in FEW_TILES
    for k, m in ((K, True), (200, False), (2888, True))
]
EXPECT = {
    "_grouped_gemm_stream_kernel": {90: [r"wgmma\.mma_async\.sync\.aligned\.m64n16k32\.f32\.e4m3\.e4m3", r"setmaxnreg", r"griddepcontrol\.wait"]},
    "_grouped_gemm_kernel": {
        90: [r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k(32\.f32\.e4m3\.e4m3|16\.f32\.bf16\.bf16)"],
        100: [r"tcgen05\.mma\.cta_group::1\.kind::(mxf8f6f4\.block_scale|f8f6f4|f16)"],
        120: [r"mma\.sync\.aligned\.m16n8k(32\.row\.col\.(kind::mxf8f6f4\.block_scale|f32\.e4m3)|16\.row\.col\.f32\.bf16)"],
    },
}
ONLY = {"_grouped_gemm_stream_kernel": (90,)}
SPILLS = {"_grouped_gemm_hopper_kernel": (72, "the producer keeps what belongs to a tile, not to a step, in local memory")}
