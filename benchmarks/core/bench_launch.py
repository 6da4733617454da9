"""CPU time of one eager call of each op beyond that of Triton's own launcher for the same kernels and arguments, at small sizes."""

import torch

from moe_ops import Routing, combine, fused_moe, grouped_gemm, quantize, quantize_weight, route, silu_mul_quantize
from moe_ops.bench.goal import Goal
from moe_ops.bench.harness import Bench
from moe_ops.core.numerics import random_topk

bench = Bench("launch")


def sizes():
    """T, H, I, E, k."""
    return bench.sizes(gpu=[(16, 4096, 1536, 16, 8)], cpu=[(3, 256, 128, 4, 2)])[0]


def calls():
    """Op -> (call, bytes it moves); the inputs are as small as a decode step's."""
    tokens, hidden, inner, experts, top_k = sizes()
    g = torch.Generator(bench.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=bench.device, generator=g).bfloat16()

    ids, weights = random_topk(tokens, experts, top_k)
    ids, weights, logits = ids.to(bench.device), weights.to(bench.device), torch.randn(tokens, experts, device=bench.device, generator=g)
    routing = Routing.from_topk(ids, weights, experts)
    x, h, y = normal(tokens, hidden), normal(tokens * top_k, 2 * inner), normal(tokens * top_k, hidden)
    w13, w2 = (
        quantize_weight(normal(experts, 2 * inner, hidden), "fp8_block", segments=2),
        quantize_weight(normal(experts, hidden, inner), "fp8_block"),
    )
    a = quantize(x, "fp8_block")
    out = torch.empty(tokens * top_k, 2 * inner, dtype=torch.bfloat16, device=bench.device)
    return {
        "quantize": (lambda: quantize(x, "fp8_block"), 3 * x.numel()),
        "silu_mul_quantize": (lambda: silu_mul_quantize(h, "fp8_block"), 2.5 * h.numel()),
        "route": (lambda: route(logits, top_k, renormalize=True), 4 * logits.numel()),
        "Routing.from_topk": (lambda: Routing.from_topk(ids, weights, experts), 24 * ids.numel()),
        "combine": (lambda: combine(y, routing), 2 * y.numel() + 2 * x.numel()),
        "grouped_gemm": (lambda: grouped_gemm(a, w13, routing, gather=True, out=out), w13.nbytes),
        "fused_moe": (lambda: fused_moe(x, w13, w2, routing), w13.nbytes + w2.nbytes),
    }


table = calls()
for op in table:
    call, nbytes = table[op]

    def check(out):
        """Other benchmarks compare the values."""
        first = out.ids if isinstance(out, Routing) else getattr(out, "data", out)
        return None if bool(first.float().isfinite().all()) else "not finite"

    bench.case(op, {"triton": lambda copy: call}, check=check, nbytes=nbytes, copies=1, goal=Goal("beyond_launcher_us", 10.0))
bench.exit()
