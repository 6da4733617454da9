"""Grouped GEMM over packed rows, both formats, on the shapes of real models; groups as even as can be, and skewed."""

import torch

from moe_ops import grouped_gemm, quantize, quantize_weight
from moe_ops.bench import shapes
from moe_ops.bench.harness import Bench
from moe_ops.bench.shapes import Model

#: (model, its GEMM, routed rows on this rank, distribution)
GPU = [
    *((name, gemm, rows, "even") for name, rows in (("qwen3-235b/EP16", 8), ("qwen3-235b/EP8", 1024)) for gemm in ("gate_up", "down")),
    *(("qwen3-235b/EP4", gemm, 12000, kind) for kind in ("even", "zipf") for gemm in ("gate_up", "down")),
    *(("deepseek-v3/EP8", gemm, rows, "even") for rows in (32, 2048) for gemm in ("gate_up", "down")),
    *(("deepseek-v3/EP32", gemm, 2048, "zipf") for gemm in ("gate_up", "down")),
    *(("gpt-oss-20b", gemm, 256, "zipf") for gemm in ("gate_up", "down")),
]
CPU = [("tiny", "gate_up", 12, "zipf"), ("tiny", "down", 12, "sparse")]
TINY = Model("tiny", hidden=192, intermediate=160, experts=4, top_k=2)

bench = Bench("grouped_gemm")
for name, gemm, rows, kind in bench.sizes(gpu=GPU, cpu=CPU):
    layer = TINY if name == "tiny" else shapes.model(name)
    n, k = layer.gemms[gemm]
    experts = layer.local_experts
    counts = shapes.counts(kind, rows, experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()]).to(bench.device)
    active = int((counts > 0).sum())
    for fmt, scale_bytes in (("fp8_block", 4 / 128**2), ("mxfp8", 1 / 32)):

        def operands(copy: int):
            g = torch.Generator(bench.device).manual_seed(copy)
            w = torch.randn(experts, n, k, device=bench.device, dtype=torch.bfloat16, generator=g)
            a = torch.randn(rows, k, device=bench.device, dtype=torch.bfloat16, generator=g)
            return quantize(a, fmt), quantize_weight(w, fmt, segments=2 if gemm == "gate_up" and fmt == "fp8_block" else 1)

        def make(copy: int):
            a, w = operands(copy)
            return lambda: grouped_gemm(a, w, offsets)

        bench.case(
            f"{name} {gemm} E={experts} rows={rows} {kind} {fmt}",
            {"triton": make},
            reference=lambda: grouped_gemm(*operands(0), offsets, out_dtype=torch.float32, impl="torch"),
            tolerance=2e-3,
            nbytes=active * n * k * (1 + scale_bytes) + rows * (k + 2 * n),
            flops=2 * rows * n * k,
            memory="read",
            format=fmt,
            distribution=kind,
        )
bench.exit()
