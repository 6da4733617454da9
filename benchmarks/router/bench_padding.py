"""`pad_routing`: the block-padded and the masked form of a token layout."""

from moe_ops import Routing
from moe_ops.bench.harness import Bench
from moe_ops.core.numerics import random_topk
from moe_ops.router.padding import pad_routing, routing_pad_ref

CASES = [(t, 8, 256, *form) for t in (16, 128, 4096) for form in (("block", 128), ("capacity", 128), ("block", 16))]

bench = Bench("padding")


def measure(tokens: int, top_k: int, experts: int, form: str, size: int) -> None:
    def routing_of(copy: int) -> Routing:
        ids, weights = random_topk(tokens, experts, top_k, seed=copy)
        return Routing.from_topk(ids.to(bench.device), weights.to(bench.device), experts)

    def fields(p):
        return p.order, p.experts, p.row_weights, p.counts, p.offsets, p.inverse

    def make(copy: int):
        routing = routing_of(copy)
        return lambda: fields(pad_routing(routing, **{form: size}))

    def reference():
        r = routing_of(0)
        return routing_pad_ref(r.order, r.counts, r.offsets, r.inverse, r.weights, size, form == "capacity")

    rows = pad_routing(routing_of(0), **{form: size}).num_rows
    bench.case(f"T={tokens} k={top_k} E={experts} {form}={size}", {"triton": make}, reference=reference, nbytes=rows * 12, copies=4)


for case in bench.sizes(gpu=CASES, cpu=[(4, 2, 8, "block", 4), (4, 2, 8, "capacity", 2)]):
    measure(*case)
bench.exit()
