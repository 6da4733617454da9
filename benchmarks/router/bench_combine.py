"""`combine`: weighted sum of each token's expert outputs."""

import torch

from moe_ops import Routing, combine
from moe_ops.bench.goal import Goal
from moe_ops.bench.harness import Bench
from moe_ops.bench.shapes import MODELS
from moe_ops.core.numerics import random_topk
from moe_ops.router.combine import combine_ref

CASES = [(name, tokens) for name in ("deepseek-v3", "qwen3-235b", "gpt-oss-20b", "mixtral-8x7b") for tokens in (1, 16, 128, 1024, 4096)]

bench = Bench("combine")


def measure(name: str, tokens: int) -> None:
    model = MODELS[name]

    def inputs(copy: int):
        ids, weights = random_topk(tokens, model.experts, model.top_k, seed=copy)
        routing = Routing.from_topk(ids.to(bench.device), weights.to(bench.device), model.experts)
        g = torch.Generator(bench.device).manual_seed(copy)
        return torch.randn(tokens * model.top_k, model.hidden, device=bench.device, generator=g).bfloat16(), routing

    def make(copy: int):
        y, routing = inputs(copy)
        return lambda: combine(y, routing)

    def reference():
        y, routing = inputs(0)
        return combine_ref(y, routing.inverse, routing.weights)

    bench.case(
        f"{name} T={tokens} H={model.hidden}",
        {"triton": make},
        reference=reference,
        nbytes=tokens * model.hidden * 2 * (model.top_k + 1),
        goal=Goal("of_limit", 0.9) if (name, tokens) == ("qwen3-235b", 1024) else None,
    )


for case in bench.sizes(gpu=CASES, cpu=[("gpt-oss-20b", 2)]):
    measure(*case)
bench.exit()
