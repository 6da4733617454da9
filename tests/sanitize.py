"""Every kernel once at small, awkward shapes, for compute-sanitizer (`make memcheck`): ragged sizes, empty experts, counts past the capacity.

    python tests/sanitize.py [PART ..]        parts by name, as `gemms_on_hopper`; all without one

Needs a GPU. Without names it fails when an entry kernel of the package was not launched. Numbers are other tests' work; here each access counts.
"""

import importlib.util
import math
import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from moe_ops import Activation, Routing, combine, dequantize, fused_moe, grouped_gemm, quantize, quantize_weight, route, silu_mul_quantize  # noqa: E402
from moe_ops.core.arch import arch_of  # noqa: E402
from moe_ops.core.formats import LAYOUTS  # noqa: E402
from moe_ops.core.numerics import random_topk, uneven  # noqa: E402
from moe_ops.gemm import cutlass_gemm, deep_gemm  # noqa: E402
from moe_ops.gemm.bmm import bmm  # noqa: E402
from moe_ops.gemm.dense import dense_gemm  # noqa: E402
from moe_ops.gemm.dense_config import STREAM_WIDTHS, DenseGemmConfig  # noqa: E402
from moe_ops.gemm.grouped_act import grouped_act_into  # noqa: E402
from moe_ops.quant.fold import fold_weight  # noqa: E402
from moe_ops.quant.scale_layout import to_layout  # noqa: E402
from moe_ops.router.permute import permute  # noqa: E402

CUDA = torch.device("cuda")


def data(*shape, seed=0, dtype=torch.bfloat16):
    return uneven(shape, seed=seed, dtype=dtype).to(CUDA)


def counts(*values):
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


def quantizers():
    for fmt, k in (("fp8_block", 200), ("fp8_block", 1160), ("mxfp8", 224), ("mxfp8", 1056)):
        for layout in LAYOUTS:
            if fmt == "fp8_block" and layout in ("ue8m0_packed", "swizzle_32x4x4"):
                continue
            dequantize(quantize(data(5, k), fmt, layout=layout))
            quantize(data(3, 7, k, dtype=torch.float32), fmt, counts=counts(0, 3, 99), layout=layout)
            silu_mul_quantize(data(5, 2 * k, dtype=torch.float32), fmt, layout=layout)
        silu_mul_quantize(data(3, 7, 2 * k), fmt, counts=counts(7, 0, -1), act=Activation.gpt_oss(interleaved=True))
        weight = quantize_weight(data(2, 130, k), fmt, segments=2 if fmt == "fp8_block" else 1)
        dequantize(weight, torch.bfloat16)
        if fmt == "mxfp8":
            quantize_weight(data(33, k), fmt, stochastic_seed=1, name="w")
            for layout in LAYOUTS:
                to_layout(to_layout(quantize(data(5, k), fmt), layout), "row_major")


def router():
    for e, k, groups in ((1, 1, 1), (6, 2, 1), (60, 4, 1), (256, 8, 8), (384, 6, 1)):
        for score in ("softmax", "topk_softmax", "sigmoid", "sqrt_softplus"):
            for t in (1, 37):
                logits = data(t, e, dtype=torch.float32)
                valid = torch.tensor(t - 1, dtype=torch.int32, device=CUDA)
                kw = dict(n_group=groups, topk_group=max(1, groups // 2))
                bias = torch.randn(e, device=CUDA) if score == "sigmoid" else None
                route(logits, k, score=score, bias=bias, renormalize=score != "topk_softmax", num_valid=valid, local=(0, max(1, e // 2)), **kw)
    for t, e, k in ((1, 4, 2), (300, 40, 4), (30000, 300, 8)):
        ids, weights = random_topk(t, e, k)
        ids[0, 0], ids[-1, -1] = -(2**31), 2**31 - 1
        routing = Routing.from_topk(ids.to(CUDA), weights.to(CUDA), e)
        x = data(t, 72)
        padded = permute(x, routing, block=16)
        combine(torch.randn(t * k, 72, device=CUDA, dtype=torch.bfloat16), routing)
        routing.to_offs(), routing.to_m_indices(), routing.to_psum(), routing.to_masked_m(64), routing.to_sorted_block(64), routing.to_m_indptr()
        assert padded is not None


def gemms():
    for fmt, k in (("fp8_block", 200), ("fp8_block", 136), ("mxfp8", 224), ("plain", 136)):
        for n, segments in ((80, 1), (2 * 192, 2)):
            w = data(3, n, k)
            q = w if fmt == "plain" else quantize_weight(w, fmt, segments=segments if fmt == "fp8_block" else 1)
            for rows in (7, 300):
                a = data(rows, k) if fmt == "plain" else quantize(data(rows, k), fmt)
                grouped_gemm(a, q, counts(0, 5, 5, rows), bias=torch.randn(3, n, device=CUDA))
                grouped_gemm(a, q, counts(9, 2**31 - 1, -4, rows + 50), out_dtype=torch.float32)
                m = data(3, rows, k) if fmt == "plain" else quantize(data(3, rows, k), fmt)
                grouped_gemm(m, q, counts(rows + 9, 0, 3))


def dense_gemms():
    for fmt, k in (("fp8_block", 200), ("fp8_block", 136), ("mxfp8", 224), ("plain", 136)):
        for n in (80, 192):
            w = data(n, k)
            q = w if fmt == "plain" else quantize_weight(w, fmt)
            for rows in (3, 40, 300):
                x, residual = data(rows, k), data(rows, n)
                dense_gemm(x, q, bias=torch.randn(n, device=CUDA), residual=residual)
                step = 64 if fmt == "plain" else 128 if fmt == "fp8_block" or arch_of(CUDA).has_block_scaled_mma else 32
                dense_gemm(x, q, residual=residual, config=DenseGemmConfig(16, 64, step, 4, 2, 3, True))


def dense_gemms_on_hopper():
    if not arch_of(CUDA).has_wgmma:
        return
    q = quantize_weight(data(200, 400), "fp8_block")
    for block_m, widths in STREAM_WIDTHS.items():
        a, residual = quantize(data(block_m - 3, 400), "fp8_block"), data(block_m - 3, 200)
        for block_n in widths:
            for programs in (1, 3) if block_n % 32 == 0 else (1,):
                config = DenseGemmConfig(block_m, block_n, 128, 4, 2, 1, block_m <= 32, programs)
                dense_gemm(a, q, bias=torch.randn(200, device=CUDA), residual=residual, config=config)
    for block_n in (32, 64):  # programs that exchange sums
        config = DenseGemmConfig(128, block_n, 128, 4, 4, 1, False, 2 * -(-200 // block_n))
        dense_gemm(quantize(data(90, 400), "fp8_block"), q, config=config)
    dense_gemm(data(20, 400), q)  # quantized by the kernel before, whose end is not awaited
    many = quantize_weight(data(512, 384), "fp8_block")
    with mock.patch("moe_ops.gemm.dense_workspace.roles_reason", lambda problem, arch: None):  # too few tiles to be chosen
        for rows in (70, 200):
            dense_gemm(data(rows, 384), many, bias=torch.randn(512, device=CUDA))
            dense_gemm(quantize(data(rows, 384), "fp8_block"), many, out=torch.empty(rows, 1024, device=CUDA, dtype=torch.bfloat16)[:, :512])


def batched_gemms():
    for fmt, k in (("fp8_block", 200), ("fp8_block", 136), ("mxfp8", 224), ("plain", 136)):
        w = data(3, 80, k)
        q = w if fmt == "plain" else quantize_weight(w, fmt)
        for tokens in (1, 20, 70):
            bmm(data(tokens, 3, k), q)
            if fmt != "plain":
                bmm(quantize(data(tokens, 3, k), fmt), q)


def batched_gemms_on_hopper():
    """Absorbed MLA: both kernels, one to three warpgroups of rows, a head's slice, heads first, quantized before, folded, an fp32 result."""
    if not arch_of(CUDA).has_wgmma:
        return
    for n, k in ((256, 128), (128, 256), (128, 128), (128, 512)):
        w = quantize_weight(data(3, n, k), "fp8_block")
        folded, _ = fold_weight(quantize_weight(torch.randn(3, n, k, device=CUDA).bfloat16(), "mxfp8"))
        for tokens in (1, 19, 50, 150):
            room = data(tokens, 3, k + 64)
            bmm(room[..., :k], w)
            bmm(room[..., 64:].half(), w, out_dtype=torch.float32)
            bmm(data(3, tokens, k).transpose(0, 1), w)
            bmm(quantize(room[..., :k].contiguous(), "fp8_block"), w)
            bmm(room[..., :k], folded)


def fused_gemm1():
    e, i, h, k = 3, 256, 384, 2
    x = quantize(data(110, h), "fp8_block")
    w = quantize_weight(data(e, 2 * i, h), "fp8_block", segments=2)
    ids, weights = random_topk(110, e, k)
    routing = Routing.from_topk(ids.to(CUDA), weights.to(CUDA), e)
    rows = 110 * k
    for kernel in ("triton", "stream", "hopper") if arch_of(CUDA).has_wgmma else ("triton",):
        for rule in ("fp32", "folded"):
            bits, scale = torch.empty(rows, i, dtype=torch.uint8, device=CUDA), torch.empty(rows, i // 128, device=CUDA)
            args = (x.data.view(torch.uint8), x.scale, w.data.view(torch.uint8), w.scale, torch.randn(e, 2 * i, device=CUDA))
            grouped_act_into(*args, routing.offsets, routing.order, k, "silu", 1.0, math.inf, 0.0, bits, scale, rule, kernel=kernel)


def gemms_on_hopper():
    """The Gluon kernels behind grouped_gemm: few rows and many, packed and masked."""
    w = quantize_weight(data(3, 512, 384), "fp8_block")
    for rows in (5, 40, 400):
        a = quantize(data(rows, 384), "fp8_block")
        grouped_gemm(a, w, counts(0, 1, 1, rows), bias=torch.randn(3, 512, device=CUDA))
        grouped_gemm(a, w, counts(9, 2**31 - 1, -4, rows + 50), out_dtype=torch.float32)
        grouped_gemm(quantize(data(3, rows, 384), "fp8_block"), w, counts(rows + 9, 0, 3))
    with mock.patch.multiple("moe_ops.gemm.grouped_config", HOPPER_ROUNDS=0, HOPPER_TAILS=(0, 0)):  # tiles drawn from a counter
        for _ in range(2):
            grouped_gemm(a, w, counts(0, 1, 1, 400), bias=torch.randn(3, 512, device=CUDA))


def rows_for_deep_gemm():
    """Our kernels around DeepGEMM, without it: rows led there and back, counts past every end."""
    for fmt in ("fp8_block", "mxfp8"):
        w = quantize_weight(data(3, 192, 384), fmt)
        for rows in (7, 300):
            packed, masked = quantize(data(rows, 384), fmt), quantize(data(3, rows, 384), fmt)
            out, out_masked = (torch.empty(*shape, 192, dtype=torch.bfloat16, device=CUDA) for shape in ((rows,), (3, rows)))
            order = torch.arange(rows, dtype=torch.int32, device=CUDA) * 2 - 3
            with mock.patch.object(deep_gemm, "call_library"):
                for a, offsets, forms, result in (
                    (packed, counts(0, 5, 5, rows), ("masked", "psum", "contiguous"), out),
                    (packed, counts(9, 2**31 - 1, -4, rows + 50), ("masked", "psum", "contiguous"), out),
                    (masked, counts(rows + 9, 0, -3), ("masked",), out_masked),
                ):
                    for form in forms:
                        args = (a.data.view(torch.uint8), a.scale, w.data.view(torch.uint8), w.scale, offsets)
                        deep_gemm._into(*args, order if a is packed else None, 2 if a is packed else 1, fmt, result, form)


def rows_for_cutlass():
    """Our kernels before CUTLASS's, with garbage in every index; then CUTLASS's, where they have been built for this GPU."""
    for rows in (7, 300):
        packed, masked = quantize(data(rows, 416), "mxfp8"), quantize(data(3, rows, 416), "mxfp8")
        order = torch.arange(rows, dtype=torch.int32, device=CUDA) * 2 - 3
        for offsets in (counts(0, 5, 5, rows), counts(9, 2**31 - 1, -4, rows + 50)):
            gathered = cutlass_gemm.gather_rows(packed.data.view(torch.uint8), packed.scale, offsets, order, 2, 3)
            cutlass_gemm.tile_scales(gathered[1], offsets, 3)
        cutlass_gemm.tile_scales(masked.scale, counts(rows + 9, 0, -3), 3)
        a, w = quantize(data(rows, 400), "fp8_block"), quantize_weight(data(3, 200, 400), "fp8_block")
        try:
            for offsets in (counts(0, 5, 5, rows), counts(9, 2**31 - 1, -4, rows + 50), counts(0, 0, 0, 0)):
                grouped_gemm(a, w, offsets, impl="cutlass")
            grouped_gemm(quantize(data(3, rows, 400), "fp8_block"), w, counts(rows + 9, 0, 3), impl="cutlass")
            dense_gemm(a, w[0], impl="cutlass")
        except ValueError as reason:
            print(reason)


def layers():
    for fmt in ("fp8_block", "mxfp8", "folded", "plain"):
        w13, w2 = data(4, 512, 256), data(4, 256, 256)
        if fmt == "folded":
            w13, w2 = fold_weight(quantize_weight(w13, "mxfp8"), segments=2)[0], fold_weight(quantize_weight(w2, "mxfp8"))[0]
        elif fmt != "plain":
            w13, w2 = quantize_weight(w13, fmt, segments=2 if fmt == "fp8_block" else 1), quantize_weight(w2, fmt)
        for t in (1, 200):
            ids, weights = random_topk(t, 4, 2)
            fused_moe(data(t, 256), w13, w2, Routing.from_topk(ids.to(CUDA), weights.to(CUDA), 4))


def launched() -> set[str]:
    """Names of the package's kernels that were compiled, hence launched, in this process."""
    from triton.runtime.jit import JITFunction

    names = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("moe_ops."):
            for value in vars(module).values():
                if isinstance(value, JITFunction) and any(cache[0] for cache in value.device_caches.values()):
                    names.add(value.fn.__name__)
    return names


PARTS = (
    quantizers,
    router,
    gemms,
    dense_gemms,
    dense_gemms_on_hopper,
    batched_gemms,
    batched_gemms_on_hopper,
    fused_gemm1,
    gemms_on_hopper,
    rows_for_deep_gemm,
    rows_for_cutlass,
    layers,
)


def main() -> int:
    for part in PARTS:
        if not sys.argv[1:] or part.__name__ in sys.argv[1:]:
            part()
            torch.cuda.synchronize()
            print(f"{part.__name__} done", flush=True)
    if sys.argv[1:]:
        return 0
    spec = importlib.util.spec_from_file_location("compile_cases", ROOT / "tests/compile_cases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernels, ran = set(module.entry_kernels()), launched()
    missing = sorted(kernels - ran - (set() if arch_of(CUDA).has_wgmma else module.gluon_kernels()))
    print(f"{len(kernels & ran)} of {len(kernels)} kernels launched; missing: {missing}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
