"""Compile cases of the token layout: one per form of input and size class."""

import torch

from moe_ops.router import layout


def _case(tokens, top_k, experts, *, ids=torch.int32, weights=torch.float32, expert_map=False, num_valid=False, flat=True):
    def call():
        shape = (tokens, top_k if flat else 2 * top_k)
        layout._routing_layout_triton(
            torch.zeros(shape, dtype=ids)[:, :: 1 if flat else 2],
            torch.zeros(shape, dtype=weights)[:, :: 1 if flat else 2],
            experts,
            experts,
            0,
            torch.zeros(experts, dtype=torch.int64) if expert_map else None,
            torch.ones((), dtype=torch.int32) if num_valid else None,
        )

    return call


COMPILE_CASES = [
    ("decode", _case(4, 8, 256)),
    ("middle", _case(128, 8, 256)),
    ("largest-single-launch", _case(1024, 8, 256, num_valid=True)),
    ("prefill", _case(4096, 8, 256, num_valid=True)),
    ("prefill-map-strided", _case(4096, 8, 60, ids=torch.int64, weights=torch.bfloat16, expert_map=True, flat=False)),
    ("many-experts", _case(1024, 22, 2048, ids=torch.int64, expert_map=True)),
    ("strided-int64-bf16", _case(64, 3, 60, ids=torch.int64, weights=torch.bfloat16, flat=False)),
]
