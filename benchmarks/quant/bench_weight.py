"""Weight quantizers on the expert weights of real models, rounded to nearest and stochastically."""

import torch

from moe_ops import quantize_weight
from moe_ops.bench.harness import Bench
from moe_ops.quant.stochastic import key_of
from moe_ops.quant.weight import quantize_weight_ref

GPU = [(16, 3072, 4096), (16, 4096, 1536), (8, 4096, 7168), (8, 5760, 2880)]
CPU = [(2, 192, 160)]

bench = Bench("weight")
for experts, n, k in bench.sizes(gpu=GPU, cpu=CPU):
    for fmt, rule, seed, scale_bytes in (("fp8_block", "fp32", None, 4 / 128**2), ("mxfp8", "rceil", None, 1 / 32), ("mxfp8", "rceil", 1, 1 / 32)):

        def data(copy: int):
            g = torch.Generator(bench.device).manual_seed(copy)
            return torch.randn(experts, n, k, device=bench.device, dtype=torch.bfloat16, generator=g)

        def make(copy: int):
            w = data(copy)
            return lambda: quantize_weight(w, fmt, segments=2, stochastic_seed=seed, name="w")

        def check(out):
            bits, scale = quantize_weight_ref(data(0), fmt, out.segments, rule, -1 if seed is None else key_of(seed, "w"))
            return None if torch.equal(out.data.view(torch.uint8), bits) and torch.equal(out.scale, scale) else "bytes differ from the reference"

        bench.case(
            f"E={experts} N={n} K={k} {fmt}{' stochastic' if seed is not None else ''}",
            {"triton": make},
            check=check,
            nbytes=experts * n * k * (3 + scale_bytes),
            format=fmt,
        )
bench.exit()
