"""Which weights a layer folds (`moe_ops.quant.fold`), and how modules make such copies at the right time."""

import ctypes
from typing import Any

import torch

from moe_ops.core.arch import arch_of
from moe_ops.core.formats import MXFP8, QTensor
from moe_ops.layer.load import Weight
from moe_ops.quant.fold import fold_weight, is_folded


def wants_folding(w13: Weight, w2: Weight) -> bool:
    """Whether folding would make these weights faster where they are: mxfp8 on Hopper, H and I multiples of 128, not folded yet."""
    if not (isinstance(w13, QTensor) and isinstance(w2, QTensor)) or w13.format is not MXFP8 or is_folded(w13):
        return False
    return arch_of(w13.device).has_wgmma and w13.shape[-1] % 128 == 0 and w2.shape[-1] % 128 == 0


@torch.no_grad()
def fold_pair(w13: Weight, w2: Weight) -> tuple[QTensor, QTensor] | None:
    """Both weights folded, or None where it is not wanted or one of them would lose too much; reads the device."""
    if not wants_folding(w13, w2):
        return None
    assert isinstance(w13, QTensor) and isinstance(w2, QTensor)
    up, up_report = fold_weight(w13, segments=2)
    if not up_report.folded:
        return None
    down, down_report = fold_weight(w2)
    return (up, down) if down_report.folded else None


def object_at(address: int) -> Any:
    """The object whose `id` is `address`; the caller keeps it alive.

    For functions that run while torch.compile traces (`torch.compiler.assume_constant_result`): Dynamo hands them constants, and before
    torch 2.13 a module is none, but its id is.
    """
    return ctypes.cast(address, ctypes.py_object).value


@torch.compiler.assume_constant_result
def prepare_at(address: int) -> int:
    """`prepare()` of the module at `address`, at trace time, on its real tensors."""
    object_at(address).prepare()
    return 0


def capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be read from the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def state_of(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """Changes whenever one of the tensors is replaced, moved or written in place; reads nothing from the device."""
    return tuple(None if t is None else (t.data_ptr(), -1 if t.is_inference() else t._version, t.device) for t in tensors)
