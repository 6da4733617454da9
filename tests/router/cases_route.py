"""Compile cases of the expert choice: every score, groups, one warp and several, one token a program and several."""

import torch

from moe_ops.router import route


def _case(tokens, experts, top_k, score="softmax", *, dtype=torch.bfloat16, bias=False, n_group=1, topk_group=1, renormalize=False, local=False):
    def call():
        route._route_triton(
            torch.zeros(1, experts, dtype=dtype).expand(tokens, experts),
            top_k,
            score,
            torch.zeros(experts) if bias else None,
            n_group,
            topk_group,
            renormalize,
            2.5,
            torch.ones(1, dtype=torch.int32) if local else None,
            experts,
            0,
            torch.zeros(experts, dtype=torch.int32) if local else None,
        )

    return call


COMPILE_CASES = [
    ("deepseek-v3", _case(4, 256, 8, "sigmoid", dtype=torch.float32, bias=True, n_group=8, topk_group=4, renormalize=True)),
    ("deepseek-v3-prefill", _case(8192, 256, 8, "sigmoid", dtype=torch.float32, bias=True, n_group=8, topk_group=4, renormalize=True)),
    ("qwen3", _case(4, 128, 8, renormalize=True)),
    ("mixtral-prefill", _case(8192, 8, 2, "topk_softmax")),
    ("gpt-oss", _case(4, 32, 4, "topk_softmax", local=True)),
    ("sqrt-softplus-k64", _case(4, 384, 64, "sqrt_softplus", dtype=torch.float16, bias=True)),
    ("largest", _case(4, 2048, 64, dtype=torch.float32)),
    ("odd-groups", _case(4, 15 * 129, 32, "sigmoid", n_group=129, topk_group=65)),
    ("groups-of-one", _case(4, 6, 2, n_group=6, topk_group=3)),
]
