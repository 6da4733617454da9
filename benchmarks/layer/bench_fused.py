"""The layer after routing and with it, both formats, on the layers of real models under a CUDA graph."""

import torch

from moe_ops import Routing, fused_moe, quantize_weight, route
from moe_ops.bench import shapes
from moe_ops.bench.harness import Bench
from moe_ops.bench.shapes import LAYER_CASES, Model

TINY = Model("tiny", hidden=192, intermediate=160, experts=4, top_k=2)

bench = Bench("fused_moe")
for name, ranks, tokens in bench.sizes(gpu=LAYER_CASES, cpu=[("tiny", 1, 3)]):
    layer = TINY if name == "tiny" else shapes.MODELS[name].ep(ranks)
    experts, hidden, inner = layer.local_experts, layer.hidden, layer.intermediate
    ids, weights = shapes.routed(layer, tokens)
    local = ids < experts
    rows, active = int(local.sum()), int(ids[local].unique().numel())
    for fmt, scale_bytes in (("fp8_block", 4 / 128**2), ("mxfp8", 1 / 32)):

        def inputs(copy: int):
            g = torch.Generator(bench.device).manual_seed(copy)
            w13 = torch.randn(experts, 2 * inner, hidden, device=bench.device, dtype=torch.bfloat16, generator=g) / hidden**0.5
            w2 = torch.randn(experts, hidden, inner, device=bench.device, dtype=torch.bfloat16, generator=g) / inner**0.5
            x = torch.randn(tokens, hidden, device=bench.device, dtype=torch.bfloat16, generator=g)
            routing = Routing.from_topk(ids.to(bench.device), weights.to(bench.device), layer.experts, local=(0, experts))
            return x, quantize_weight(w13, fmt, segments=2 if fmt == "fp8_block" else 1), quantize_weight(w2, fmt), routing

        def after_routing(copy: int):
            args = inputs(copy)
            return lambda: fused_moe(*args)

        bench.case(
            f"{layer.name} T={tokens} {fmt}",
            {"triton": after_routing},
            reference=lambda: fused_moe(*inputs(0), impl="torch"),
            tolerance=1e-2,
            nbytes=active * 3 * inner * hidden * (1 + scale_bytes) + tokens * hidden * 4,
            flops=6 * rows * inner * hidden,
            memory="read",
            format=fmt,
        )

        def with_routing(copy: int):
            x, w13, w2, _ = inputs(copy)
            logits = torch.randn(tokens, layer.experts, device=bench.device, generator=torch.Generator(bench.device).manual_seed(copy))
            groups = dict(n_group=layer.n_group, topk_group=layer.topk_group)
            return lambda: fused_moe(x, w13, w2, route(logits, layer.top_k, score=layer.score, renormalize=True, local=(0, experts), **groups))

        bench.case(
            f"{layer.name} T={tokens} {fmt} routing included",
            {"triton": with_routing},
            check=lambda y: None if bool(y.isfinite().all()) else "not finite",
            nbytes=active * 3 * inner * hidden * (1 + scale_bytes) + tokens * hidden * 4,
            flops=6 * rows * inner * hidden,
            memory="read",
            format=fmt,
        )
bench.exit()
