"""Dense GEMM of the linear layers around the experts at few rows: split-K against DeepGEMM and torch, and one GEMM against the two it fuses."""

import torch

from moe_ops import dense_gemm, quantize, quantize_weight
from moe_ops.bench.goal import Goal
from moe_ops.bench.harness import Bench
from moe_ops.gemm.registry import Problem, Where, reasons
from moe_ops.gemm.torch_scaled import scaled_mm_reason
from moe_ops.quant.fold import fold_weight

#: name -> (N, K): DeepSeek-V3's projections, then Qwen3-235B's
LINEARS = {
    "dsv3 q_a": (1536, 7168),
    "dsv3 kv_a": (576, 7168),
    "dsv3 q_a+kv_a": (2112, 7168),
    "dsv3 q_b": (24576, 1536),
    "dsv3 o": (7168, 16384),
    "dsv3 gate or up": (18432, 7168),
    "dsv3 down": (7168, 18432),
    "qwen3 qkv": (9216, 4096),
    "qwen3 o": (4096, 8192),
}
TINY = {"tiny": (80, 256), "tiny long": (64, 576)}

bench = Bench("dense_gemm")


def data(copy: int, m: int, n: int, k: int):
    g = torch.Generator(bench.device).manual_seed(copy)
    x = torch.randn(m, k, device=bench.device, dtype=torch.bfloat16, generator=g)
    return x, torch.randn(n, k, device=bench.device, dtype=torch.bfloat16, generator=g)


def weight_of(w: torch.Tensor, fmt: str):
    if fmt == "bfloat16":
        return w
    q = quantize_weight(w, fmt.removesuffix(" folded"))
    return fold_weight(q)[0] if fmt.endswith("folded") else q


def triton(m, n, k, fmt):
    def make(copy: int):
        x, w = data(copy, m, n, k)
        q = weight_of(w, fmt)
        return lambda: dense_gemm(x, q)

    return make


def given(m, n, k, fmt):
    """The activation is quantized already: what the GEMM alone takes."""

    def make(copy: int):
        x, w = data(copy, m, n, k)
        q, a = weight_of(w, fmt), quantize(x, fmt)
        return lambda: dense_gemm(a, q)

    return make


def deep_gemm(m, n, k):
    """DeepGEMM behind our function, the activation's scales in the layout that it reads without a transposition."""

    def make(copy: int):
        x, w = data(copy, m, n, k)
        a, q = quantize(x, "fp8_block", layout="mn_major"), quantize_weight(w, "fp8_block")
        return lambda: dense_gemm(a, q, impl="deep_gemm")

    return make


def scaled_mm(m, n, k):
    """torch's FP8-block product: rows in fours (padded outside of the timing), scales of the activation stored column by column."""
    product = torch._scaled_mm

    def make(copy: int):
        x, w = data(copy, m, n, k)
        x = torch.nn.functional.pad(x, (0, 0, 0, -m % 4))
        a, q = quantize(x, "fp8_block"), quantize_weight(w, "fp8_block")
        columns = a.scale.T.contiguous().T
        return lambda: product(a.data, q.data.T, scale_a=columns, scale_b=q.scale.T, out_dtype=torch.bfloat16)[:m]

    return make


def others(m, n, k):
    """The other implementations that can compute this case here."""
    where, found = Where.of(bench.device), {}
    if reasons(Problem("dense_gemm", "fp8_block", m, n, k, layout="mn_major"), where)["deep_gemm"] is None:
        found["deep_gemm"] = deep_gemm(m, n, k)
    if scaled_mm_reason(Problem("dense_gemm", "fp8_block", m + -m % 4, n, k), where) is None:
        found["torch._scaled_mm"] = scaled_mm(m, n, k)
    return found


for name, (n, k) in bench.sizes(gpu=tuple(LINEARS.items()), cpu=tuple(TINY.items())):
    for m in bench.sizes(gpu=(1, 8, 16, 64, 128), cpu=(3, 20)):
        for fmt, scale_bytes in (("fp8_block", 4 / 128**2), ("mxfp8", 1 / 32), ("mxfp8 folded", 4 / 128**2), ("bfloat16", 1.0)):
            if (fmt.endswith("folded") and k % 128) or (fmt != "fp8_block" and bench.has_gpu and m not in (1, 64)):
                continue

            def reference():
                x, w = data(0, m, n, k)
                return dense_gemm(x, weight_of(w, fmt), out_dtype=torch.float32, impl="torch")

            goal = Goal("of_limit", 0.5) if m <= 64 and fmt == "fp8_block" and n * k > 8e6 else None
            bench.case(
                f"{name} M={m} N={n} K={k} {fmt}",
                {"triton": triton(m, n, k, fmt)},
                reference=reference,
                tolerance=3e-3,
                nbytes=n * k * (1 + scale_bytes) + m * (2 * k + 2 * n),
                flops=2 * m * n * k,
                memory="read",
                math="bf16" if fmt == "bfloat16" else "fp8",
                goal=goal,
                format=fmt,
            )
        given_impls = {"triton": given(m, n, k, "fp8_block"), **others(m, n, k)}
        rival = next((name for name in ("deep_gemm", "torch._scaled_mm") if name in given_impls), "")

        def reference_given():
            x, w = data(0, m, n, k)
            return dense_gemm(quantize(x, "fp8_block"), weight_of(w, "fp8_block"), out_dtype=torch.float32, impl="torch")

        bench.case(
            f"{name} M={m} N={n} K={k} fp8_block quantized before",
            given_impls,
            reference=reference_given,
            tolerance=3e-3,
            nbytes=n * k * (1 + 4 / 128**2) + m * (k + 2 * n),
            flops=2 * m * n * k,
            memory="read",
            goal=Goal("ratio", 1.0, to=rival) if m <= 64 and rival else None,
            format="fp8_block",
        )

for m in bench.sizes(gpu=(1, 16, 64), cpu=(3,)):
    n1, n2, k = (1536, 576, 7168) if bench.has_gpu else (128, 64, 256)

    def fused(copy: int):
        x, w = data(copy, m, n1 + n2, k)
        q = quantize_weight(w, "fp8_block")
        return lambda: dense_gemm(x, q)

    def apart(copy: int):
        x, w = data(copy, m, n1 + n2, k)
        q1, q2 = quantize_weight(w[:n1].contiguous(), "fp8_block"), quantize_weight(w[n1:].contiguous(), "fp8_block")
        out = torch.empty(m, n1 + n2, dtype=torch.bfloat16, device=x.device)

        def call():
            dense_gemm(x, q1, out=out[:, :n1])
            dense_gemm(x, q2, out=out[:, n1:])
            return out

        return call

    def reference_fused():
        x, w = data(0, m, n1 + n2, k)
        return dense_gemm(x, quantize_weight(w, "fp8_block"), out_dtype=torch.float32, impl="torch")

    bench.case(
        f"q_a+kv_a in one M={m}",
        {"triton": fused, "two calls": apart},
        reference=reference_fused,
        tolerance=3e-3,
        nbytes=(n1 + n2) * k + m * (2 * k + 2 * (n1 + n2)),
        flops=2 * m * (n1 + n2) * k,
        memory="read",
        goal=Goal("ratio", 0.9, to="two calls"),
        format="fp8_block",
    )
bench.exit()
