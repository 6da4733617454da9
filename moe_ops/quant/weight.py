"""Quantization of weights [N, K] or [E, N, K]: 128x128 tiles (fp8_block) or 1x32 blocks (mxfp8), rounded to nearest or stochastically."""

import torch

from moe_ops.core import checks
from moe_ops.core.formats import E4M3, Format, QTensor, ceil_div, scale_shape
from moe_ops.core.ops import register
from moe_ops.quant import fp8_block, mxfp8
from moe_ops.quant.rows import DTYPES, resolve
from moe_ops.quant.stochastic import key_of, stochastic_bits

__all__ = ["quantize_weight"]


def _new(w: torch.Tensor, fmt: str, segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    block, dtype = ((128, 128), torch.float32) if fmt == "fp8_block" else ((1, 32), torch.uint8)
    shape = tuple(w.shape)
    return w.new_empty(shape, dtype=torch.uint8), w.new_empty(scale_shape(shape, block, segments if fmt == "fp8_block" else 1), dtype=dtype)


def quantize_weight_ref(w: torch.Tensor, fmt: str, segments: int, rule: str, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `quantize_weight`, any device: (bits uint8, row-major scales); `key` is -1 for rounding to nearest.

    Works expert by expert, so that its fp32 temporaries are those of one expert.
    """
    data, scale = _new(w, fmt, segments)
    n, k = w.shape[-2:]
    parts = [(w, data, scale)] if w.dim() == 2 else list(zip(w, data, scale, strict=True))
    for e, (source, bits, s) in enumerate(parts):
        v, found = fp8_block.weight_values_ref(source, segments, rule) if fmt == "fp8_block" else mxfp8.values_ref(source, rule)
        if key < 0:
            bits.copy_(fp8_block.e4m3_bits(v))
        else:
            index = torch.arange(e * n * k, (e + 1) * n * k, device=w.device).reshape(n, k)
            bits.copy_(stochastic_bits(v, index, key))
        s.copy_(found)
    return data, scale


def _quantize_weight_triton(w: torch.Tensor, fmt: str, segments: int, rule: str, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    from moe_ops.core.launch import launch
    from moe_ops.quant.quantize import quantize_into
    from moe_ops.quant.weight_kernel import _quantize_weight_kernel, _quantize_weight_rows_kernel

    data, scale = _new(w, fmt, segments)
    experts = w.shape[0] if w.dim() == 3 else 1
    n, k = w.shape[-2:]
    stride_we = w.stride(0) if w.dim() == 3 else 0
    key_high, key_low = max(key, 0) >> 31, max(key, 0) & 0x7FFFFFFF
    if fmt == "fp8_block":
        launch(
            "quantize_weight", _quantize_weight_kernel, (scale.numel(),), w, data, scale, n, k, key_high, key_low, stride_we, w.stride(-2),
            SEGMENTS=segments, RULE=rule, STOCHASTIC=key >= 0, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    elif key < 0:
        quantize_into(w, data, scale, None, fmt, rule)
    else:
        rows, block_r, columns = experts * n, 4, 512
        launch(
            "quantize_weight", _quantize_weight_rows_kernel, (ceil_div(rows, block_r) * ceil_div(k, columns),),
            w, data, scale, rows, n, k, key_high, key_low, stride_we, w.stride(-2),
            RULE=rule, BLOCK_R=block_r, GROUPS=columns // 32, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return data, scale


def _fake(w: torch.Tensor, fmt: str, segments: int, rule: str, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _new(w, fmt, segments)


_op = register("quantize_weight", cuda=_quantize_weight_triton, cpu=quantize_weight_ref, fake=_fake)


def quantize_weight(
    w: torch.Tensor, format: str | Format, *, segments: int = 1, rule: str | None = None, stochastic_seed: int | None = None, name: str = ""
) -> QTensor:
    """Quantize a weight in tiles of 128x128 (fp8_block) or blocks of 1x32 along K (mxfp8): w ~= data * scale.

    Args:
        w: (N, K) or (E, N, K), bf16, fp16 or fp32, last stride 1. mxfp8 needs K % 32 == 0; fp8_block takes any N and K.
        format: "fp8_block" or "mxfp8".
        segments: equal parts of N whose 128-row tiles are counted apart: 2 for gate rows followed by up rows. It makes no difference to mxfp8.
        rule: fp8_block: "fp32" (default) or "pow2"; mxfp8: "rceil" (default), "floor" or "even".
        stochastic_seed: round elements stochastically under this seed; None rounds to nearest even.
        name: name of the tensor, which stochastic rounding takes into its random numbers; unused otherwise.

    Returns:
        QTensor of w's shape with row-major scales: (.., segments * ceil(N / segments / 128), ceil(K / 128)) fp32, or (.., N, K / 32) uint8 E8M0
        bytes. A stack of experts gives the bytes of each expert alone, except under stochastic rounding, whose element index counts through the
        stack.

    Numerics: scales and special values as for `quantize`, with amax over the whole tile. Random numbers depend on (stochastic_seed, name,
        element index) alone. Deterministic; the same bytes on CPU and GPU.

    Raises:
        TypeError: w of another dtype, or a seed that is no int.
        ValueError: wrong number of dimensions, last stride, N, K, format, rule, device, or a w that requires grad.

    Cost: reads w once, writes one byte an element and the scales; one launch.

    See also: tests/quant/test_weight.py, benchmarks/quant/bench_weight.py.
    """
    f, _, rule = resolve("quantize_weight", format, None, rule)
    checks.is_tensor("quantize_weight", "w", w)
    checks.dtype("quantize_weight", "w", w, DTYPES)
    checks.ndim("quantize_weight", "w", w, (2, 3))
    checks.last_stride_one("quantize_weight", "w", w)
    checks.no_grad("quantize_weight", w=w)
    checks.same_device("quantize_weight", w=w)
    checks.int_range("quantize_weight", "segments", segments, 1, max(1, w.shape[-2]))
    if w.shape[-2] % segments:
        raise ValueError(f"quantize_weight: segments must divide the {w.shape[-2]} rows of w, got {segments}")
    if f.name == "mxfp8":
        segments = 1
        if w.shape[-1] % 32:
            raise ValueError(f"quantize_weight: the last dimension of w must be a multiple of 32 for mxfp8, got shape {tuple(w.shape)}")
    if stochastic_seed is not None and (isinstance(stochastic_seed, bool) or not isinstance(stochastic_seed, int)):
        raise TypeError(f"quantize_weight: stochastic_seed must be an int or None, got {type(stochastic_seed).__name__}")
    key = -1 if stochastic_seed is None else key_of(stochastic_seed, name)
    data, scale = _op(w, f.name, segments, rule, key)
    return QTensor(data.view(E4M3), scale, f, f.weight_block, "row_major", rule, segments)
