"""`Routing.from_topk`: foreign ids to the token layout, in even and in skewed routings."""

from moe_ops import Routing
from moe_ops.bench.harness import Bench
from moe_ops.core.numerics import random_topk
from moe_ops.router.layout import routing_layout_ref

CASES = [(t, 8, e, skew) for e in (128, 256, 512) for t in (1, 128, 1024, 4096, 16384, 65536) for skew in (0.0, 3.0)]

bench = Bench("layout")


def measure(tokens: int, top_k: int, experts: int, skew: float) -> None:
    def inputs(copy: int):
        ids, weights = random_topk(tokens, experts, top_k, seed=copy, skew=skew)
        return ids.to(bench.device), weights.to(bench.device)

    def make(copy: int):
        ids, weights = inputs(copy)
        return lambda: Routing.from_topk(ids, weights, experts)

    bench.case(
        f"T={tokens} k={top_k} E={experts} skew={skew:g}",
        {"triton": make},
        reference=lambda: routing_layout_ref(*inputs(0), experts, experts, 0, None, None),
        nbytes=tokens * top_k * 24,
        copies=4,
    )


for case in bench.sizes(gpu=CASES, cpu=[(4, 2, 8, 0.0)]):
    measure(*case)
bench.exit()
