"""Batched GEMM of absorbed MLA (DeepSeek-V3: 128 heads) in 8 bits, activations quantized inside the call, against torch.bmm and DeepGEMM.

DeepGEMM takes quantized activations, so our function quantizes for it; "quantized before" sets its einsum alone, on operands as it reads them,
beside our kernel alone.
"""

import torch

from moe_ops import bmm, quantize, quantize_weight
from moe_ops.bench.goal import Goal
from moe_ops.bench.harness import Bench
from moe_ops.gemm.deep_gemm_library import library
from moe_ops.gemm.registry import Problem, Where, reasons
from moe_ops.quant.fold import fold_weight

#: projection -> (N, K) of a head; its activations are a slice of 64 columns more
HEADS = {"k_b_proj": (512, 128), "v_b_proj": (128, 512)}
FORMATS = (("fp8_block", 4 / 128**2), ("mxfp8", 1 / 32), ("mxfp8 folded", 4 / 128**2))

bench = Bench("bmm")


def data(copy: int, tokens: int, heads: int, n: int, k: int):
    g = torch.Generator(bench.device).manual_seed(copy)
    x = torch.randn(tokens, heads, k + 64, device=bench.device, dtype=torch.bfloat16, generator=g)[..., :k]
    return x, torch.randn(heads, n, k, device=bench.device, dtype=torch.bfloat16, generator=g)


for name, (n, k) in HEADS.items():
    for tokens, heads in bench.sizes(gpu=((1, 128), (32, 128), (128, 128), (512, 128), (32, 16)), cpu=((3, 2), (20, 2))):
        for fmt, scale_bytes in FORMATS:

            def quantized(copy: int):
                x, w = data(copy, tokens, heads, n, k)
                q = quantize_weight(w, fmt.removesuffix(" folded"))
                q = fold_weight(q)[0] if fmt.endswith("folded") else q
                return lambda: bmm(x, q)

            def deep_gemm(copy: int):
                x, w = data(copy, tokens, heads, n, k)
                q = quantize_weight(w, "fp8_block")
                return lambda: bmm(x, q, impl="deep_gemm")

            def bf16(copy: int):
                x, w = data(copy, tokens, heads, n, k)
                turned, columns = x.transpose(0, 1), w.transpose(1, 2)
                return lambda: torch.bmm(turned, columns).transpose(0, 1)

            def reference():
                x, w = data(0, tokens, heads, n, k)
                return bmm(x, w, out_dtype=torch.float32, impl="torch")

            providers = {"triton": quantized, "torch.bmm": bf16}
            asked = Problem("bmm", "fp8_block", tokens, n, k, heads, unquantized=True)
            if fmt == "fp8_block" and reasons(asked, Where.of(bench.device))["deep_gemm"] is None:
                providers["deep_gemm"] = deep_gemm

            bench.case(
                f"{name} T={tokens} heads={heads} N={n} K={k} {fmt}",
                providers,
                reference=reference,
                tolerance=0.06,  # of quantizing both operands; the tests hold the kernel itself to far less
                nbytes=heads * (n * k * (1 + scale_bytes) + tokens * 2 * (n + k)),
                flops=2 * tokens * heads * n * k,
                goal=Goal("ratio", 1.0, to=tuple(other for other in providers if other != "triton")) if heads == 128 and fmt != "mxfp8" else None,
                group=name,
                format=fmt,
            )

        def given(copy: int):
            x, w = data(copy, tokens, heads, n, k)
            a, q = quantize(x, "fp8_block"), quantize_weight(w, "fp8_block")
            return lambda: bmm(a, q)

        def einsum(copy: int):
            x, w = data(copy, tokens, heads, n, k)
            a, q = quantize(x.transpose(0, 1), "fp8_block", layout="mn_major"), quantize_weight(w, "fp8_block")
            out = torch.empty(tokens, heads, n, dtype=torch.bfloat16, device=bench.device)
            operands = (a.data.transpose(0, 1), a.scale.transpose(0, 1)), (q.data, q.scale), out

            def call():
                library().fp8_einsum("bhr,hdr->bhd", *operands)
                return out

            return call

        def reference_given():
            x, w = data(0, tokens, heads, n, k)
            return bmm(quantize(x, "fp8_block"), quantize_weight(w, "fp8_block"), out_dtype=torch.float32, impl="torch")

        there = reasons(Problem("bmm", "fp8_block", tokens, n, k, heads), Where.of(bench.device))["deep_gemm"] is None
        bench.case(
            f"{name} T={tokens} heads={heads} N={n} K={k} fp8_block quantized before",
            {"triton": given, **({"deep_gemm": einsum} if there else {})},
            reference=reference_given,
            tolerance=3e-3,
            nbytes=heads * (n * k * (1 + 4 / 128**2) + tokens * (k + 2 * n)),
            flops=2 * tokens * heads * n * k,
            goal=Goal("ratio", 1.0, to="deep_gemm") if there and heads == 128 else None,
            group=name,
            format="fp8_block",
        )
bench.exit()
