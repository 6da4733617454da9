"""Compile cases of combine: few and many tokens, k below, at and above the unroll."""

import torch

from moe_ops.router import combine


def _case(tokens, top_k, hidden, dtype=torch.bfloat16, out_dtype="bfloat16"):
    def call():
        y = torch.zeros(1, hidden, dtype=dtype).expand(tokens * top_k, hidden)
        combine._combine_triton(y, torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, top_k), out_dtype)

    return call


COMPILE_CASES = [
    ("decode", _case(1, 8, 7168)),
    ("prefill", _case(1024, 8, 7168)),
    ("one-expert-fp16", _case(2, 1, 96, torch.float16, "float32")),
    ("k-22-fp32", _case(2, 22, 2880, torch.float32)),
]
