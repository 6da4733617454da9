"""Compile cases of the kernels before CUTLASS's: gathered rows of both formats, and scales in tiles. CUTLASS's own: test_cutlass_build.py."""

import torch

from moe_ops.gemm.cutlass_gemm import gather_rows, tile_scales

E = 4


def _offsets(masked: bool):
    return torch.zeros(E if masked else E + 1, dtype=torch.int32)


def _gather(dtype: torch.dtype, blocks: int, k: int):
    def call():
        gather_rows(torch.zeros((7, k), dtype=torch.uint8), torch.ones((7, blocks), dtype=dtype), _offsets(False), _offsets(True).repeat(4), 2, E)

    return call


def _tile(*shape: int):
    return lambda: tile_scales(torch.zeros(shape, dtype=torch.uint8), _offsets(len(shape) == 3), E)


COMPILE_CASES = [
    ("cutlass gather fp8_block", _gather(torch.float32, 16, 2048)),
    ("cutlass gather mxfp8, ragged", _gather(torch.uint8, 90, 2880)),
    ("cutlass tiles packed", _tile(300, 90)),
    ("cutlass tiles masked", _tile(E, 130, 16)),
]
