"""Dense GEMM of the linear layers around the experts at few rows: split-K against DeepGEMM and torch, and one GEMM against the two it fuses.

Rows are written to dense_splitk.json. All get what suits them outside of the timing: scales in the order that they read (MN-major, the same
for DeepGEMM and "triton"), rows in fours, an output made before. They take an activation that is quantized already; "triton from bf16" quantizes
it within the call.
"""

import torch

from moe_ops import dense_gemm, quantize, quantize_weight
from moe_ops.bench.goal import Goal
from moe_ops.bench.harness import Bench
from moe_ops.core.formats import QTensor
from moe_ops.gemm.deep_gemm import lacking, problem_reason
from moe_ops.gemm.deep_gemm_library import NAMES, library
from moe_ops.gemm.registry import Problem, Where
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
#: format -> bytes of a weight and its scales, for one element
BYTES = {"fp8_block": 1 + 4 / 128**2, "mxfp8": 1 + 1 / 32, "mxfp8 folded": 1 + 4 / 128**2, "bfloat16": 2.0}
#: cases that the formats other than fp8_block run
OTHERS = {(name, m) for name in ("dsv3 q_a", "dsv3 o", "qwen3 qkv", *TINY) for m in (1, 64, 3, 20)}
GAIN_UP_TO, GAIN = 64, 1.25

bench = Bench("dense_gemm", file="dense_splitk")


def data(copy: int, m: int, n: int, k: int):
    g = torch.Generator(bench.device).manual_seed(copy)
    x = torch.randn(m, k, device=bench.device, dtype=torch.bfloat16, generator=g)
    return x, torch.randn(n, k, device=bench.device, dtype=torch.bfloat16, generator=g)


def weight_of(w: torch.Tensor, fmt: str):
    if fmt == "bfloat16":
        return w
    q = quantize_weight(w, fmt.removesuffix(" folded"))
    return fold_weight(q)[0] if fmt.endswith("folded") else q


def from_bf16(m, n, k, fmt):
    """The activation is quantized within the call, where the weight is."""

    def make(copy: int):
        x, w = data(copy, m, n, k)
        q = weight_of(w, fmt)
        return lambda: dense_gemm(x, q)

    return make


def given(m, n, k):
    """The activation is quantized already: what the GEMM alone takes."""

    def make(copy: int):
        x, w = data(copy, m, n, k)
        q, a = quantize_weight(w, "fp8_block"), quantize(x, "fp8_block", layout="mn_major")
        return lambda: dense_gemm(a, q)

    return make


def deep_gemm(m, n, k):
    """The library itself, with N and K compiled in and the activation's scales as it reads them: nothing of ours around it."""

    def make(copy: int):
        lib = library()
        product = next(getattr(lib, name) for name in NAMES["dense"] if hasattr(lib, name))
        x, w = data(copy, m, n, k)
        a, q = quantize(x, "fp8_block", layout="mn_major"), quantize_weight(w, "fp8_block")
        out = torch.empty(m, n, dtype=torch.bfloat16, device=bench.device)

        def call():
            product((a.data, a.scale), (q.data, q.scale), out, compiled_dims="nk")
            return out

        return call

    return make


def scaled_mm(m, n, k):
    """torch's FP8-block product: rows in fours, scales of the activation stored column by column."""
    product = torch._scaled_mm

    def make(copy: int):
        x, w = data(copy, m, n, k)
        x = torch.nn.functional.pad(x, (0, 0, 0, -m % 4))
        a, q = quantize(x, "fp8_block"), quantize_weight(w, "fp8_block")
        columns = a.scale.T.contiguous().T
        return lambda: product(a.data, q.data.T, scale_a=columns, scale_b=q.scale.T, out_dtype=torch.bfloat16)[:m]

    return make


def linear(m, n, k):
    """torch's 16-bit product."""

    def make(copy: int):
        x, w = data(copy, m, n, k)
        return lambda: torch.nn.functional.linear(x, w)

    return make


def rivals(m, n, k):
    """The other implementations that can compute this case here; of the library's own word nothing is asked, its result is checked as any."""
    where, found = Where.of(bench.device), {}
    if where.arch.capability == 90 and not lacking() and problem_reason(Problem("dense_gemm", "fp8_block", m, n, k), where) is None:
        found["deep_gemm"] = deep_gemm(m, n, k)
    if scaled_mm_reason(Problem("dense_gemm", "fp8_block", m + -m % 4, n, k), where) is None:
        found["torch._scaled_mm"] = scaled_mm(m, n, k)
    return found


few: list[str] = []  # the cases whose gain is averaged
for name, (n, k) in bench.sizes(gpu=tuple(LINEARS.items()), cpu=tuple(TINY.items())):
    for m in bench.sizes(gpu=(1, 8, 16, 64, 128), cpu=(3, 20)):
        shape, against = f"{name} M={m} N={n} K={k}", rivals(m, n, k)
        few += [shape] if m <= GAIN_UP_TO else []
        for fmt, size in BYTES.items():
            if fmt != "fp8_block" and ((name, m) not in OTHERS or (fmt.endswith("folded") and k % 128)):
                continue

            def reference():
                x, w = data(0, m, n, k)
                return dense_gemm(x, weight_of(w, fmt), out_dtype=torch.float32, impl="torch")

            if fmt == "fp8_block":
                impls = {"triton": given(m, n, k), "triton from bf16": from_bf16(m, n, k, fmt), **against}
            else:
                impls = {"triton": from_bf16(m, n, k, fmt), **({"torch": linear(m, n, k)} if fmt == "bfloat16" else {})}
            bench.case(
                shape if fmt == "fp8_block" else f"{shape} {fmt}",
                impls,
                reference=reference,
                tolerance=6e-3 if fmt == "bfloat16" else 4e-3,  # of rivals; torch may add 16-bit partials, ours is held to less by the tests
                nbytes=n * k * size + m * (k * (1 if fmt == "fp8_block" else 2) + 2 * n),
                flops=2 * m * n * k,
                memory="read",
                math="bf16" if fmt == "bfloat16" else "fp8",
                goal=Goal("ratio", 1.0, to=tuple(against)) if fmt == "fp8_block" and against else None,
                group=name,
                format=fmt,
            )
bench.gain(f"rival / ours, {len(few)} cases with M <= {GAIN_UP_TO}", few, GAIN)


def activation(x: torch.Tensor, kind: str) -> QTensor | torch.Tensor:
    return x if kind == "from bf16" else quantize(x, "fp8_block")


for kind in ("quantized before", "from bf16"):
    for m in bench.sizes(gpu=(1, 16, 64), cpu=(3,)):
        n1, n2, k = (1536, 576, 7168) if bench.has_gpu else (128, 64, 256)

        def fused(copy: int):
            x, w = data(copy, m, n1 + n2, k)
            a, q = activation(x, kind), quantize_weight(w, "fp8_block")
            return lambda: dense_gemm(a, q)

        def apart(copy: int):
            x, w = data(copy, m, n1 + n2, k)
            a, q1, q2 = activation(x, kind), *(quantize_weight(part.contiguous(), "fp8_block") for part in (w[:n1], w[n1:]))
            out = torch.empty(m, n1 + n2, dtype=torch.bfloat16, device=x.device)

            def call():
                dense_gemm(a, q1, out=out[:, :n1])
                dense_gemm(a, q2, out=out[:, n1:])
                return out

            return call

        def reference_fused():
            x, w = data(0, m, n1 + n2, k)
            return dense_gemm(x, quantize_weight(w, "fp8_block"), out_dtype=torch.float32, impl="torch")

        bench.case(
            f"q_a+kv_a in one, {kind}, M={m}",
            {"triton": fused, "two calls": apart},
            reference=reference_fused,
            tolerance=3e-3,
            nbytes=(n1 + n2) * k * BYTES["fp8_block"] + m * (k * (2 if kind == "from bf16" else 1) + 2 * (n1 + n2)),
            flops=2 * m * (n1 + n2) * k,
            memory="read",
            goal=Goal("ratio", 0.9, to="two calls"),
            group="q_a+kv_a",
            format="fp8_block",
        )
bench.exit()
