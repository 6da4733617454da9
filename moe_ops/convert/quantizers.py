"""Rounding rows of weights on one device: the same bytes on each, with the errors measured on the way."""

import math
from typing import Protocol

import torch

from moe_ops.convert.source import ConvertError
from moe_ops.convert.types import Options
from moe_ops.core.formats import Format, as_bytes, scale_shape
from moe_ops.quant import fp8_block, mxfp8
from moe_ops.quant.dequantize import dequantize, dequantize_ref
from moe_ops.quant.stochastic import stochastic_bits
from moe_ops.quant.weight import quantize_weight
from moe_ops.quant.weight_cpu import Sums, WeightQuantizer

#: Width of the rows that a GPU sees of an mxfp8 weight, whose blocks do not care: kernels are compiled for a width, and this is the only one.
_WIDTH = 1024


class Quantizer(Protocol):
    """Rounds rows of one weight on some device."""

    device: torch.device

    def __call__(self, w: torch.Tensor, key: int, first: int) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        """(N, K) floating -> bits uint8, scales, errors; `first` is the index of w[0, 0] in its tensor."""
        ...


class CpuQuantizer:
    """`WeightQuantizer` with buffers for its results; for one thread."""

    device = torch.device("cpu")

    def __init__(self, fmt: Format, rule: str) -> None:
        self._run = WeightQuantizer(fmt, rule, measure=True)
        self._fmt = fmt
        self._data = torch.empty(0, dtype=torch.uint8)
        self._scale = torch.empty(0, dtype=fmt.scale_dtype)

    def __call__(self, w: torch.Tensor, key: int, first: int) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        """See `Quantizer`; the results are valid until the next call."""
        shape = scale_shape(tuple(w.shape), self._fmt.weight_block)
        if self._data.numel() < w.numel():
            self._data = torch.empty(w.numel(), dtype=torch.uint8)
        if self._scale.numel() < shape[0] * shape[1]:
            self._scale = torch.empty(shape[0] * shape[1], dtype=self._fmt.scale_dtype)
        data, scale = self._data[: w.numel()].view(w.shape), self._scale[: shape[0] * shape[1]].view(shape)
        return data, scale, self._run(w, data, scale, key=key, first=first)


class CudaQuantizer:
    """The kernels of `quantize_weight`; stochastic rounding in plain torch, which takes any first index."""

    def __init__(self, fmt: Format, rule: str, device: torch.device) -> None:
        self._fmt, self._rule, self.device = fmt, rule, device

    def __call__(self, w: torch.Tensor, key: int, first: int) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        """See `Quantizer`."""
        shape, scales = w.shape, scale_shape(tuple(w.shape), self._fmt.weight_block)
        w = w.contiguous()
        if self._fmt.name == "mxfp8":
            if w.numel() % _WIDTH == 0:
                w = w.view(-1, _WIDTH)
            q = quantize_weight(w, self._fmt, rule=self._rule)
            data = as_bytes(q.data) if key < 0 else self._stochastic(mxfp8.values_ref(w, self._rule)[0], key, first)
            y = dequantize(q) if key < 0 else dequantize_ref(data, q.scale, "mxfp8", 1, 1, torch.float32)
        else:
            q = quantize_weight(w, self._fmt, rule=self._rule)
            data = as_bytes(q.data) if key < 0 else self._stochastic(fp8_block.weight_values_ref(w, 1, self._rule)[0], key, first)
            y = dequantize_ref(data, q.scale, "fp8_block", 128, 1, torch.float32)
        x = w.double()
        signal, noise, result = torch.stack((x.square().sum(), (x - y).square_().sum(), y.double().square_().sum())).tolist()
        return data.view(shape), q.scale.view(scales), Sums(signal, noise, result, w.numel(), not math.isfinite(signal))

    @staticmethod
    def _stochastic(v: torch.Tensor, key: int, first: int) -> torch.Tensor:
        return stochastic_bits(v, first + torch.arange(v.numel(), device=v.device).view(v.shape), key)


def quantizer_for(options: Options) -> Quantizer:
    """The quantizer of the options' device.

    Raises:
        ConvertError: a device that is not there.
    """
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise ConvertError(f"convert: device must be cpu or cuda, got {options.device!r}") from error
    if device.type == "cpu":
        return CpuQuantizer(options.fmt, options.rule)
    if device.type != "cuda" or not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ConvertError(f"convert: device {options.device!r} is not available here")
    return CudaQuantizer(options.fmt, options.rule, device)


def warm_up(options: Options) -> None:
    """Start the device and compile what it will run; nothing to do on a CPU."""
    quantize = quantizer_for(options)
    if quantize.device.type == "cuda":
        quantize(torch.zeros(128, _WIDTH, dtype=torch.bfloat16, device=quantize.device), -1, 0)
