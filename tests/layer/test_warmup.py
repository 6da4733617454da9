"""Warm-up reaches every variant that the heuristics can choose."""

import pytest
import torch

from moe_ops import Linear, bmm, dense_gemm, freeze, quantize, quantize_weight, warmup
from moe_ops.core.arch import arch_of_capability
from moe_ops.core.numerics import uneven
from moe_ops.gemm import bmm as bmm_module
from moe_ops.gemm import dense as dense_module
from moe_ops.gemm import dense_config
from moe_ops.gemm.grouped_config import GroupedGemmProblem, heuristic, hopper_programs
from moe_ops.layer.mla import absorbed_kv_b
from moe_ops.layer.warmup import _changes, _grid, dense_counts, representatives
from moe_ops.quant.fold import fold_weight


def test_every_choice_of_the_gemms_is_reached(monkeypatch):
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    w13 = torch.empty((16, 3072, 4096), dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr("moe_ops.layer.warmup.arch_of", lambda _: arch_of_capability(90))
    counts = representatives(w13, 8, 3000)
    arch = arch_of_capability(90)
    reached = {heuristic(GroupedGemmProblem(t * 8, 16, 3072, 4096, "plain"), arch) for t in counts}
    assert reached == {heuristic(GroupedGemmProblem(t * 8, 16, 3072, 4096, "plain"), arch) for t in range(1, 3001)}
    assert counts[0] == 1 and counts[-1] == 3000 and len(counts) < 80


def test_the_first_count_that_may_hand_out_tiles_is_reached(monkeypatch):
    """A kernel of its own, for each GEMM from a count of its own on."""
    arch = arch_of_capability(90)
    monkeypatch.setattr("moe_ops.layer.warmup.arch_of", lambda _: arch)
    w13 = torch.empty((16, 3072, 4096), dtype=torch.bfloat16, device="meta")
    counts = representatives(w13, 8, 3000)
    for n in (3072, 4096):
        first = next(t for t in range(1, 3001) if hopper_programs(t * 8, 16, n, arch)[1])
        assert first in counts and not hopper_programs((first - 1) * 8, 16, n, arch)[1] and first - 1 > counts[0]


def test_grid_and_changes():
    assert _grid(1) == [1] and _grid(2) == [1, 2]
    grid = _grid(100)
    assert {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 100} <= set(grid)
    assert all(b <= 1.5 * a + 1 for a, b in zip(grid, grid[1:], strict=False))
    assert _changes(lambda t: t > 7, 100) == [1, 8]


@pytest.mark.parametrize("heads", [1, 128])
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "plain"])
def test_every_choice_of_the_dense_and_the_batched_gemm_is_reached(monkeypatch, fmt, heads):
    arch = arch_of_capability(90)
    monkeypatch.setattr("moe_ops.layer.warmup.arch_of", lambda _: arch)
    n, k = (576, 7168) if heads == 1 else (512, 128)
    w = torch.empty((n, k) if heads == 1 else (heads, n, k), dtype=torch.bfloat16, device="meta")
    if fmt != "plain":
        w = quantize_weight(torch.ones(w.shape, dtype=torch.bfloat16), fmt)

    def choices(counts):
        kinds = [False] if fmt == "plain" else [False, True]
        problems = [(dense_config.DenseGemmProblem(t, heads, n, k, fmt, fused), t <= 16) for t in counts for fused in kinds]
        return {(dense_config.heuristic(p, arch), p.fused, few) for p, few in problems}

    counts = dense_counts(w, 3000)
    assert choices(counts) == choices(range(1, 3001)) and counts[0] == 1 and counts[-1] == 3000 and len(counts) < 80


@pytest.fixture
def called(monkeypatch):
    """What the two ops are called with: op, rows, format and rule, dtype of the activation and of the result."""
    seen = set()
    for module, name in ((dense_module, "dense_gemm"), (bmm_module, "bmm")):
        run = module._op

        def spy(*args, run=run, name=name):
            a, fmt, rule, out_dtype = args[0], *[x for x in args if isinstance(x, str)], [x for x in args if isinstance(x, torch.dtype)][0]
            seen.add((name, a.shape[0], fmt, rule, a.dtype, out_dtype))
            return run(*args)

        monkeypatch.setattr(module, "_op", spy)
    return seen


@pytest.mark.parametrize("fmt", [None, "fp8_block", "mxfp8"])
def test_parts_of_absorbed_attention_and_their_dtypes(called, fmt):
    """kv_b_proj as two weights of `bmm`, the first with an fp32 result (scores), fp16 activations."""
    kv_b = torch.randn(2 * 256, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    k_b, v_b = absorbed_kv_b(kv_b, 128, 128, format=fmt)
    warmup(k_b, 20, dtype=torch.float16, out_dtype=torch.float32)
    warmup(v_b, 20)
    rows = set(dense_counts(k_b, 20))
    assert rows >= {1, 16, 17, 20} and {c[:2] for c in called} == {("bmm", t) for t in rows}
    kinds = {c[2:] for c in called}
    if fmt is None:
        assert kinds == {("plain", "given", torch.bfloat16, torch.float32), ("plain", "given", torch.bfloat16, torch.bfloat16)}
        return
    rule = quantize_weight(kv_b, fmt).format.rules[0]
    first = {(fmt, rule, torch.float16, torch.float32), (fmt, "given", torch.uint8, torch.float32)}
    assert kinds == first | {(fmt, rule, torch.bfloat16, torch.bfloat16), (fmt, "given", torch.uint8, torch.bfloat16)}


@pytest.mark.parametrize("which", ["fp8_block", "mxfp8 folded"])
def test_one_weight_of_dense_gemm(called, which):
    w = quantize_weight(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16(), which.split()[0])
    w = fold_weight(w)[0] if which.endswith("folded") else w
    warmup(w, 17)
    rule = "folded" if which.endswith("folded") else w.format.rules[0]
    assert {c[0] for c in called} == {"dense_gemm"} and {c[1] for c in called} == set(dense_counts(w, 17))
    assert {c[2:5] for c in called} == {("fp8_block", rule, torch.bfloat16), ("fp8_block", "given", torch.uint8)}


@pytest.mark.parametrize("fmt", [None, "fp8_block"])
def test_one_weight_is_run_with_and_without_bias_and_residual(monkeypatch, fmt):
    """Each of them is a kernel of its own: a call with one must not be the first after `freeze`."""
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    seen, run = set(), dense_module._op

    def spy(*args):
        seen.add((args[0].shape[0], args[0].dtype, *(None if t is None else (t.dtype, tuple(t.shape[1:])) for t in args[4:6])))
        return run(*args)

    monkeypatch.setattr(dense_module, "_op", spy)
    warmup(w if fmt is None else quantize_weight(w, fmt), 17, dtype=torch.bfloat16)
    bias, residual = (torch.bfloat16, ()), (torch.bfloat16, (64,))
    kinds = {torch.bfloat16} | ({torch.uint8} if fmt else set())
    rows = dense_counts(w if fmt is None else quantize_weight(w, fmt), 17)
    assert seen == {(t, kind, b, r) for t in rows for kind in kinds for b in (None, bias) for r in (None, residual)}


def test_linear_takes_the_dtype_and_its_folded_copy_too(called, monkeypatch):
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    layer = Linear.from_weight(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16(), format="mxfp8")
    warmup(torch.nn.Sequential(layer), 1, dtype=torch.float16)
    out = torch.float16
    assert {c[2:] for c in called} == {
        ("fp8_block", "folded", out, out),  # 16-bit rows, quantized for the folded copy
        ("fp8_block", "given", torch.uint8, torch.bfloat16),  # rows quantized and folded by the caller
        ("mxfp8", "given", torch.uint8, torch.bfloat16),  # rows quantized as the weight is stored
    }


def test_modules_of_ones_own():
    class Attention(torch.nn.Module):
        seen: list[int] = []

        def warmup_call(self, tokens):
            self.seen.append(tokens)

    warmup(torch.nn.ModuleList([Attention()]), 17)
    assert Attention.seen == _grid(17)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [None, "fp8_block", "mxfp8"])
def test_freeze_after_warmup_allows_every_size_of_a_projection_and_of_absorbed_attention(fmt):
    heads, nope, v, rank, most = 16, 128, 128, 512, 300
    g = torch.Generator("cuda").manual_seed(1)
    layer = Linear.from_weight(torch.randn(576, 1024, device="cuda", generator=g).bfloat16(), torch.randn(576, device="cuda"), format=fmt)
    k_b, v_b = absorbed_kv_b(torch.randn(heads * (nope + v), rank, device="cuda", generator=g).bfloat16(), nope, v, format=fmt)
    alone = torch.randn(320, 1024, device="cuda", generator=g).bfloat16()
    alone = alone if fmt is None else quantize_weight(alone, fmt)
    for target, options in ((layer, {}), (k_b, {"out_dtype": torch.float32}), (v_b, {})):
        warmup(target, most, **options)
    few = 20  # the larger sizes of `alone` would be four compiles for each of the layer's
    warmup(alone, few)
    sizes, shapes = (1, 2, 15, 16, 17, 33, 64, 65, 130, most), ((1024,), (heads, nope + 64), (heads, rank))
    xs = {t: [uneven((t, *shape), seed=t).cuda() for shape in shapes] for t in sizes}
    given = {t: quantize(x, fmt) for t, (x, _, _) in xs.items()} if fmt else {}
    outs = {t: torch.empty(t, 576, dtype=torch.bfloat16, device="cuda") for t in xs}
    bias_alone, residual_alone = (torch.zeros(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((320,), (few, 320)))
    residuals, workspace = {t: torch.zeros_like(out) for t, out in outs.items()}, layer.make_workspace(most)
    freeze()
    try:
        for t, (x, q, latent) in xs.items():
            for a in (x, given[t]) if fmt else (x,):
                layer(a)
                layer(a, residual=residuals[t], out=outs[t], workspace=workspace)
                for bias, residual in ((None, None), (bias_alone, None), (None, residual_alone[:t]), (bias_alone, residual_alone[:t])):
                    if t <= few:
                        dense_gemm(a, alone, bias=bias, residual=residual)
            bmm(q[..., :nope], k_b, out_dtype=torch.float32)
            bmm(latent, v_b)
        with pytest.raises(RuntimeError, match="bmm: kernel .* cannot be compiled after moe_ops.freeze"):
            bmm(xs[1][2], v_b, out_dtype=torch.float16)
    finally:
        freeze(False)


def test_bad_input_is_named():
    w = torch.zeros(2, 64, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="warmup: top_k is needed for a pair of weights"):
        warmup((w, w))
    with pytest.raises(ValueError, match="warmup: Linear holds no MoELayer, no Linear and nothing else with a warmup_call"):
        warmup(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="warmup: target must be 2-D or 3-D"):
        warmup(w[0, 0])
    with pytest.raises(TypeError, match="warmup: target must be a module, a weight or a pair of weights, got list"):
        warmup([w, w])
    with pytest.raises(ValueError, match="warmup: max_tokens must be between 1 and"):
        warmup((w, w), 0, top_k=1)
