"""`route`: logits to a whole Routing, beside the same in torch (library sorts)."""

import torch

from moe_ops import route
from moe_ops.bench.goal import Goal
from moe_ops.bench.harness import Bench
from moe_ops.bench.shapes import MODELS
from moe_ops.router.layout import routing_layout_ref
from moe_ops.router.topk import Choice, topk_ref

CASES = [(name, tokens) for name in ("deepseek-v3", "qwen3-235b", "gpt-oss-120b", "mixtral-8x7b") for tokens in (1, 16, 128, 1024, 4096, 16384)]
#: us from logits to order and inverse, E = 256 in 8 groups of which 4 are kept, k = 8
GOALS = {("deepseek-v3", tokens): Goal("p50_us", bound) for tokens, bound in ((1, 8.0), (16, 8.0), (128, 8.0), (4096, 15.0))}

bench = Bench("route")


def measure(name: str, tokens: int) -> None:
    model = MODELS[name]
    grouped = model.n_group > 1

    def logits_of(copy: int) -> torch.Tensor:
        # a coarse grid: scores, and sums of two of them, tie exactly or differ by more than rounding
        return (torch.randint(-8, 9, (tokens, model.experts), generator=torch.Generator().manual_seed(copy)) / 2).to(bench.device)

    bias = (torch.arange(model.experts, device=bench.device) % 8) / 8 if grouped else None
    choice = Choice(model.top_k, model.score, bias, model.n_group, model.topk_group, True, 1.0)

    def ours(copy: int):
        logits = logits_of(copy)
        return lambda: route(logits, model.top_k, score=model.score, bias=bias, n_group=model.n_group, topk_group=model.topk_group, renormalize=True)

    def in_torch(logits: torch.Tensor):
        ids, weights = topk_ref(logits, choice, None, model.experts, 0, None)
        return routing_layout_ref(ids, weights, model.experts, model.experts, 0, None, None)

    def baseline(copy: int):
        logits = logits_of(copy)
        return lambda: in_torch(logits)

    bench.case(
        f"{name} T={tokens}",
        {"triton": ours, "torch": baseline},
        reference=lambda: in_torch(logits_of(0)),
        tolerance=1e-6,
        nbytes=tokens * model.experts * 4 + tokens * model.top_k * 16,
        copies=8,
        goal=GOALS.get((name, tokens)),
    )


for case in bench.sizes(gpu=CASES, cpu=[("qwen3-235b", 3), ("mixtral-8x7b", 5)]):
    measure(*case)
bench.exit()
