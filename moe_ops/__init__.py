"""Quantized Mixture-of-Experts ops for torch: FP8 block scaling and MXFP8, Triton first.

Names load on first use: `import moe_ops` imports nothing, not even torch, needs no GPU and compiles nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ops import hf as hf
    from moe_ops.core.formats import QTensor as QTensor
    from moe_ops.core.formats import make_qtensor as make_qtensor
    from moe_ops.core.launch import freeze as freeze
    from moe_ops.gemm.bmm import bmm as bmm
    from moe_ops.gemm.dense import dense_gemm as dense_gemm
    from moe_ops.gemm.explain import explain as explain
    from moe_ops.gemm.grouped import grouped_gemm as grouped_gemm
    from moe_ops.layer.fused import fused_moe as fused_moe
    from moe_ops.layer.linear import Linear as Linear
    from moe_ops.layer.module import MoELayer as MoELayer
    from moe_ops.layer.warmup import warmup as warmup
    from moe_ops.quant.activation import Activation as Activation
    from moe_ops.quant.quantize import dequantize as dequantize
    from moe_ops.quant.quantize import quantize as quantize
    from moe_ops.quant.quantize import quantize_weight as quantize_weight
    from moe_ops.quant.silu_mul_quantize import silu_mul_quantize as silu_mul_quantize
    from moe_ops.router.combine import combine as combine
    from moe_ops.router.route import route as route
    from moe_ops.router.routing import Routing as Routing

__version__ = "0.1.0"

_HOME = {
    "Activation": "moe_ops.quant.activation",
    "Linear": "moe_ops.layer.linear",
    "MoELayer": "moe_ops.layer.module",
    "QTensor": "moe_ops.core.formats",
    "Routing": "moe_ops.router.routing",
    "bmm": "moe_ops.gemm.bmm",
    "combine": "moe_ops.router.combine",
    "dense_gemm": "moe_ops.gemm.dense",
    "dequantize": "moe_ops.quant.quantize",
    "explain": "moe_ops.gemm.explain",
    "freeze": "moe_ops.core.launch",
    "fused_moe": "moe_ops.layer.fused",
    "grouped_gemm": "moe_ops.gemm.grouped",
    "make_qtensor": "moe_ops.core.formats",
    "quantize": "moe_ops.quant.quantize",
    "quantize_weight": "moe_ops.quant.quantize",
    "route": "moe_ops.router.route",
    "silu_mul_quantize": "moe_ops.quant.silu_mul_quantize",
    "warmup": "moe_ops.layer.warmup",
}

__all__ = [*sorted(_HOME), "hf"]


def __getattr__(name: str) -> Any:
    if name == "hf":
        return importlib.import_module("moe_ops.hf")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'moe_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
