"""Compile and select everything before it is needed: under CUDA graph capture, and after `freeze()`, nothing may compile."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from moe_ops.core import checks
from moe_ops.core.arch import arch_of
from moe_ops.core.formats import QTensor
from moe_ops.layer.linear import Linear
from moe_ops.quant.activation import Activation
from moe_ops.quant.fold import is_folded
from moe_ops.quant.quantize import quantize, quantize_folded

__all__ = ["warmup"]


def warmup(
    target: "torch.nn.Module | QTensor | torch.Tensor | tuple[QTensor | torch.Tensor, QTensor | torch.Tensor]",
    max_tokens: int = 4096,
    *,
    top_k: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype = torch.bfloat16,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    act: Activation | None = None,
) -> None:
    """Run a layer at each token count where a heuristic changes its mind, so that calls of 1 .. max_tokens tokens compile nothing.

    What is run are the calls that leave `impl` and `config` to the library, on 16-bit and on quantized activations, in contiguous memory. One
    weight of `dense_gemm` is run without and with a bias and a residual, both of the activations' 16-bit dtype; other dtypes of these compile anew.

    Args:
        target: a module that is or holds `MoELayer`s, `Linear`s and modules of your own with a method `warmup_call(tokens)`; or the weights (w13, w2)
            that `fused_moe` will get; or one weight: (N, K) for `dense_gemm`, (heads, N, K) for `bmm` (both parts of `absorbed_kv_b`, one by one).
        max_tokens: most tokens of a call; a model's longest prefill.
        top_k: experts per token; needed for a pair of weights.
        dtype: dtype of the tokens, for weights and for a `Linear` whose weight is quantized; of a bias and a residual too, for one weight.
        out_dtype: dtype of the result, for one weight.
        b13: as in `fused_moe`, for a pair of weights.
        b2: as in `fused_moe`, for a pair of weights.
        act: as in `fused_moe`, for a pair of weights.

    Raises:
        TypeError: a target that is none of these.
        ValueError: a pair of weights without top_k, one weight that is neither 2-D nor 3-D, a module that holds nothing to run, or max_tokens
            below 1.
    """
    checks.int_range("warmup", "max_tokens", max_tokens, 1, 2**24)
    with torch.no_grad():
        if isinstance(target, tuple):
            if top_k is None:
                raise ValueError("warmup: top_k is needed for a pair of weights")
            w13, w2 = target
            for tokens in representatives(w13, top_k, max_tokens):
                _run_weights(tokens, w13, w2, top_k, dtype, b13, b2, act)
            return
        if isinstance(target, (QTensor, torch.Tensor)):
            for tokens in dense_counts(target, max_tokens):
                _run_weight(tokens, target, dtype, out_dtype)
            return
        if not isinstance(target, torch.nn.Module):
            raise TypeError(f"warmup: target must be a module, a weight or a pair of weights, got {type(target).__name__}")
        layers: list[Any] = [m for m in target.modules() if hasattr(m, "warmup_call")]
        if not layers:
            raise ValueError(f"warmup: {type(target).__name__} holds no MoELayer, no Linear and nothing else with a warmup_call")
        for layer in layers:
            if isinstance(layer, Linear):
                weights = (layer.prepare().ready(), layer.weights())
                for tokens in sorted({count for w in weights for count in dense_counts(w, max_tokens)}):
                    layer.warmup_call(tokens, dtype)
                continue
            routed = getattr(layer, "routing", None)
            for tokens in _grid(max_tokens) if routed is None else representatives(layer.weights()[0], routed.top_k, max_tokens):
                layer.warmup_call(tokens)


def dense_counts(weight: "QTensor | torch.Tensor", max_tokens: int) -> list[int]:
    """Token counts that reach every kernel variant of `dense_gemm` (weight (N, K)) or `bmm` (weight (heads, N, K)) up to `max_tokens` tokens."""
    from moe_ops.gemm.dense_config import DenseGemmProblem, heuristic, quantizes_inside

    checks.ndim("warmup", "target", weight.data if isinstance(weight, QTensor) else weight, (2, 3))
    heads = weight.shape[0] if len(weight.shape) == 3 else 1
    n, k = weight.shape[-2:]
    arch, fmt = arch_of(weight.device), weight.scheme if isinstance(weight, QTensor) else "plain"

    def choice(tokens: int) -> tuple[Any, ...]:
        kinds = (
            DenseGemmProblem(tokens, heads, n, k, fmt, fused, len(weight.shape) == 2) for fused in ((False,) if fmt == "plain" else (False, True))
        )
        return (*(heuristic(p, arch) for p in kinds), quantizes_inside(tokens, n))

    return sorted({*_changes(choice, max_tokens), *_grid(max_tokens)})


def representatives(w13: "QTensor | torch.Tensor", top_k: int, max_tokens: int) -> list[int]:
    """Token counts that together reach every kernel variant which calls of 1 .. max_tokens tokens can reach.

    The two GEMMs' choices are asked for every count; the other ops change at a few thresholds, which four counts an octave step over.
    """
    from moe_ops.gemm.grouped_config import GroupedGemmProblem, heuristic, hopper_kernel, hopper_programs, stream_tile
    from moe_ops.layer.fused import fuses_gemm1, layer_format

    data = w13.data if isinstance(w13, QTensor) else w13
    experts, two_i, hidden = w13.shape
    arch, fmt = arch_of(w13.device), layer_format(w13)
    scheme = "fp8_block" if fmt == "mxfp8_folded" else fmt

    def choice(tokens: int) -> tuple[Any, ...]:
        rows = tokens * top_k
        first, second = (GroupedGemmProblem(rows, experts, n, k, scheme) for n, k in ((two_i, hidden), (hidden, two_i // 2)))
        fused = fuses_gemm1(rows, data, fmt, False, arch)
        return (
            heuristic(first, arch),
            heuristic(second, arch),
            hopper_kernel(first, 1, False, arch),
            hopper_kernel(second, 1, False, arch),
            stream_tile(rows, experts, two_i, True, arch)[0],
            fused,
            *(hopper_programs(p.rows, p.experts, p.n, arch)[1] for p in (first, second)),
        )

    return sorted({*_changes(choice, max_tokens), *_grid(max_tokens)})


def _grid(most: int) -> list[int]:
    """1 .. most, four an octave, and both sides of each power of two."""
    counts = {1, most}
    step = 1.0
    while step < most:
        counts |= {int(step), int(step) + 1} if step == int(step) else {int(step)}
        step *= 2**0.25
        if abs(step - round(step)) < 1e-6:
            step = float(round(step))
    return sorted(c for c in counts if 1 <= c <= most)


def _changes(choice: Callable[[int], Any], most: int) -> list[int]:
    """The first count of each different choice; beyond 64k counts, where nothing changes any more, every 64th is asked."""
    found: dict[Any, int] = {}
    for tokens in (*range(1, min(most, 65536) + 1), *range(65536, most + 1, 64)):
        found.setdefault(choice(tokens), tokens)
    return list(found.values())


def _run_weights(
    tokens: int, w13: "QTensor | torch.Tensor", w2: "QTensor | torch.Tensor", top_k: int, dtype: torch.dtype,
    b13: torch.Tensor | None, b2: torch.Tensor | None, act: Activation | None,
) -> None:  # fmt: skip
    from moe_ops.layer.fused import fused_moe
    from moe_ops.router.routing import Routing

    x = torch.zeros((tokens, w13.shape[2]), dtype=dtype, device=w13.device)
    ids = torch.zeros((tokens, top_k), dtype=torch.int32, device=w13.device)
    routing = Routing.from_topk(ids, torch.zeros((tokens, top_k), dtype=torch.float32, device=w13.device), w13.shape[0])
    fused_moe(x, w13, w2, routing, b13=b13, b2=b2, act=act)


def _run_weight(tokens: int, w: "QTensor | torch.Tensor", dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    from moe_ops.gemm.bmm import bmm
    from moe_ops.gemm.dense import dense_gemm

    quantized = isinstance(w, QTensor)
    x = torch.zeros((tokens, *w.shape[:-2], w.shape[-1]), dtype=dtype if quantized else w.dtype, device=w.device)
    for a in (x, quantized_for(w, x)) if quantized else (x,):
        if len(w.shape) == 3:
            bmm(a, w, out_dtype=out_dtype)
            continue
        n = w.shape[0]
        for bias, residual in itertools.product((None, x.new_zeros(n)), (None, x.new_zeros((tokens, n)))):
            dense_gemm(a, w, bias=bias, residual=residual, out_dtype=out_dtype)


def quantized_for(w: QTensor, x: torch.Tensor) -> QTensor:
    """Activations in the form that weight `w` multiplies."""
    return quantize_folded(x) if is_folded(w) else quantize(x, w.format)
