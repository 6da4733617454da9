"""Compile and select everything before it is needed: under CUDA graph capture, and after `freeze()`, nothing may compile."""

from collections.abc import Iterable
from typing import Any

import torch

from moe_ops.core.formats import QTensor
from moe_ops.quant.activation import Activation

__all__ = ["warmup"]

#: Token counts that reach every config the heuristics choose between, for few and for many experts.
DEFAULT_TOKENS = (1, 16, 64, 256, 1024, 4096)


def warmup(
    target: "torch.nn.Module | tuple[QTensor | torch.Tensor, QTensor | torch.Tensor]",
    tokens: Iterable[int] = DEFAULT_TOKENS,
    *,
    top_k: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    act: Activation | None = None,
) -> None:
    """Run a layer once for each token count, so that later calls of these sizes compile nothing.

    Args:
        target: a module that is or holds `MoELayer`s; or the weights (w13, w2) that `fused_moe` will get.
        tokens: token counts to prepare; a model's decode batch sizes and its longest prefill.
        top_k: experts per token; needed for a pair of weights.
        dtype: dtype of the tokens.
        b13: as in `fused_moe`, for a pair of weights.
        b2: as in `fused_moe`, for a pair of weights.
        act: as in `fused_moe`, for a pair of weights.

    Raises:
        ValueError: a pair of weights without top_k, or a module that holds no MoELayer.
    """
    calls: list[Any] = []
    with torch.no_grad():
        if isinstance(target, tuple):
            if top_k is None:
                raise ValueError("warmup: top_k is needed for a pair of weights")
            w13, w2 = target
            calls.append(lambda t: _run_weights(t, w13, w2, top_k, dtype, b13, b2, act))
        else:
            layers = [m for m in target.modules() if hasattr(m, "warmup_call")]
            if not layers:
                raise ValueError(f"warmup: {type(target).__name__} holds no MoELayer")
            calls.extend(m.warmup_call for m in layers)
        for count in tokens:
            for call in calls:
                call(count)


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
