"""Grouped and dense GEMM by the CUTLASS kernels behind our functions beside our other kernels, on the shapes of real models."""

import torch

from moe_ops import dense_gemm, grouped_gemm, quantize, quantize_weight
from moe_ops.bench import shapes
from moe_ops.bench.harness import Bench
from moe_ops.bench.shapes import Model
from moe_ops.gemm.registry import Problem, Where, choose

#: (model, its GEMM, routed rows on this rank, distribution)
GPU = [
    *((name, gemm, rows, "even") for name, rows in (("qwen3-235b/EP16", 8), ("qwen3-235b/EP8", 1024)) for gemm in ("gate_up", "down")),
    *(("qwen3-235b/EP4", gemm, 12000, "even") for gemm in ("gate_up", "down")),
    *(("deepseek-v3/EP8", gemm, rows, "even") for rows in (32, 2048) for gemm in ("gate_up", "down")),
    *(("deepseek-v3/EP32", gemm, 2048, "zipf") for gemm in ("gate_up", "down")),
]
CPU = [("tiny", "gate_up", 12, "zipf")]
TINY = Model("tiny", hidden=256, intermediate=128, experts=4, top_k=2)

LINEARS = {"dsv3 q_a": (1536, 7168), "dsv3 o": (7168, 16384), "qwen3 qkv": (9216, 4096)}

bench = Bench("cutlass_gemm")


def cutlass(problem: Problem, make):
    """The kernels, where they can run here."""
    try:
        choose(problem, Where.of(torch.device(bench.device)), "cutlass")
    except ValueError as reason:
        print(reason)
        return {}
    return {"cutlass": make("cutlass")}


for name, gemm, rows, kind in bench.sizes(gpu=GPU, cpu=CPU):
    layer = TINY if name == "tiny" else shapes.model(name)
    n, k = layer.gemms[gemm]
    experts = layer.local_experts
    counts = shapes.counts(kind, rows, experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()]).to(bench.device)
    active = int((counts > 0).sum())

    def operands(copy: int):
        g = torch.Generator(bench.device).manual_seed(copy)
        w = torch.randn(experts, n, k, device=bench.device, dtype=torch.bfloat16, generator=g)
        a = torch.randn(rows, k, device=bench.device, dtype=torch.bfloat16, generator=g)
        return quantize(a, "fp8_block"), quantize_weight(w, "fp8_block")

    def make(impl):
        def made(copy: int):
            a, w = operands(copy)
            return lambda: grouped_gemm(a, w, offsets, impl=impl)

        return made

    providers = {"moe_ops": make(None), **cutlass(Problem("grouped_gemm", "fp8_block", rows, n, k, experts), make)}
    bench.case(
        f"{name} {gemm} E={experts} rows={rows} {kind}",
        providers,
        reference=lambda: grouped_gemm(*operands(0), offsets, out_dtype=torch.float32, impl="torch"),
        tolerance=2e-3,
        nbytes=active * n * k * (1 + 4 / 128**2) + rows * (k + 2 * n),
        flops=2 * rows * n * k,
        memory="read",
        format="fp8_block",
        distribution=kind,
    )

for name, (n, k) in bench.sizes(gpu=tuple(LINEARS.items()), cpu=(("tiny", (80, 256)),)):
    for m in bench.sizes(gpu=(1, 16, 64, 128, 2048), cpu=(3,)):

        def data(copy: int):
            g = torch.Generator(bench.device).manual_seed(copy)
            x = torch.randn(m, k, device=bench.device, dtype=torch.bfloat16, generator=g)
            w = torch.randn(n, k, device=bench.device, dtype=torch.bfloat16, generator=g)
            return quantize(x, "fp8_block"), quantize_weight(w, "fp8_block")

        def make_dense(impl):
            def made(copy: int):
                a, w = data(copy)
                return lambda: dense_gemm(a, w, impl=impl)

            return made

        bench.case(
            f"{name} M={m} N={n} K={k}",
            {"moe_ops": make_dense(None), **cutlass(Problem("dense_gemm", "fp8_block", m, n, k), make_dense)},
            reference=lambda: dense_gemm(*data(0), out_dtype=torch.float32, impl="torch"),
            tolerance=3e-3,
            nbytes=n * k * (1 + 4 / 128**2) + m * (k + 2 * n),
            flops=2 * m * n * k,
            memory="read",
            format="fp8_block",
        )
bench.exit()
