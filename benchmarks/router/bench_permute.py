"""`permute`: rows copied to their experts; the routing is spread out beforehand, so that the copy alone is timed."""

import torch

from moe_ops import Routing
from moe_ops.bench.harness import Bench
from moe_ops.core.numerics import random_topk
from moe_ops.router.padding import pad_routing
from moe_ops.router.permute import permute

CASES = [(t, 8, 128, width, dtype) for t in (16, 1024, 4096) for width, dtype in ((7168, torch.uint8), (56, torch.float32), (4096, torch.bfloat16))]

bench = Bench("permute")


def measure(tokens: int, top_k: int, experts: int, width: int, dtype: torch.dtype) -> None:
    def inputs(copy: int):
        ids, weights = random_topk(tokens, experts, top_k, seed=copy)
        routing = Routing.from_topk(ids.to(bench.device), weights.to(bench.device), experts)
        x = torch.randint(0, 100, (tokens, width), generator=torch.Generator().manual_seed(copy)).to(dtype)
        return x.to(bench.device), pad_routing(routing, block=1)  # block 1: every row of the buffer is written

    def make(copy: int):
        x, padded = inputs(copy)
        return lambda: permute(x, padded)[0]

    def reference():
        x, padded = inputs(0)
        return x[padded.order.long() // top_k]

    bench.case(
        f"T={tokens} k={top_k} K={width} {str(dtype).removeprefix('torch.')}",
        {"triton": make},
        reference=reference,
        nbytes=tokens * width * dtype.itemsize * (top_k + 1),
    )


for case in bench.sizes(gpu=CASES, cpu=[(4, 2, 8, 56, torch.float32)]):
    measure(*case)
bench.exit()
