"""Weights quantized on a CPU at the speed of memory: the bytes of `quantize_weight_ref`, tile by tile.

A tile fits the caches and every step works in place on buffers that live as long as the quantizer, so that one pass over the weight reads it
once and writes one byte an element. A quantizer belongs to one thread; torch releases the interpreter's lock inside each step,
so threads with a quantizer each scale with the cores. Errors are measured on the way, while values and bytes are both in the cache.
"""

from dataclasses import dataclass

import torch

from moe_ops.core.formats import E4M3, E4M3_MAX, Format, QTensor, as_bytes, get_format, scale_shape
from moe_ops.core.numerics import decode_e8m0
from moe_ops.quant import fp8_block, mxfp8
from moe_ops.quant.fp8_block import block_scale
from moe_ops.quant.mxfp8 import GROUP, reciprocal, scale_byte
from moe_ops.quant.stochastic import _C1, _C2, key_of, random_bits, stochastic_bits
from moe_ops.quant.weight import quantize_weight_ref

#: Elements of a tile: 4 bytes each in two or three buffers, and enough that the steps outweigh the interpreter between them, whose lock all
#: threads share: in memory 1.3, 2.4, 2.2 and 1.6 GB/s of bf16 for 1, 2, 3 and 8 threads on two cores (EPYC, 2026-11-30), where 256 K give
#: 1.0, 1.5, 1.3 and 0.8, and 2 M, which no cache holds, 1.1, 1.7, 1.9 and 1.5.
TILE = 1024 * 1024
_COLUMNS = TILE // 128


@dataclass
class Sums:
    """Sums over elements of a weight x and its quantized values y, enough for every error measure; they add up over parts.

    Attributes:
        signal: sum of x * x.
        noise: sum of (x - y) * (x - y).
        result: sum of y * y.
        count: number of elements.
        not_finite: elements that are NaN or infinite make this True; such parts are left out of the sums.
    """

    signal: float = 0.0
    noise: float = 0.0
    result: float = 0.0
    count: int = 0
    not_finite: bool = False

    def add(self, other: "Sums") -> None:
        """Take in the sums of another part."""
        self.signal += other.signal
        self.noise += other.noise
        self.result += other.result
        self.count += other.count
        self.not_finite |= other.not_finite


class WeightQuantizer:
    """Quantizes rows of weights on the CPU, for one thread.

    Args:
        fmt: "fp8_block" or "mxfp8".
        rule: as in `quantize_weight`; None is the format's default.
        measure: also sum up the errors.
    """

    def __init__(self, fmt: str | Format, rule: str | None = None, *, measure: bool = False) -> None:
        self.format = get_format(fmt, "WeightQuantizer")
        self.rule = rule or self.format.rules[0]
        self.measure = measure
        self._x = torch.empty(0)
        self._y = torch.empty(0)
        self._ints: list[torch.Tensor] = []
        self._arange = torch.empty(0, dtype=torch.int32)

    def _buffers(self, n: int, stochastic: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if self._x.numel() < n:
            self._x, self._y = torch.empty(max(n, TILE)), torch.empty(max(n, TILE))
        if stochastic and self._arange.numel() < n:
            self._arange = torch.arange(max(n, TILE), dtype=torch.int32)
            self._ints = [torch.empty(max(n, TILE), dtype=torch.int32) for _ in range(2)]
        return self._x[:n], self._y[:n]

    def __call__(self, w: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, *, key: int = -1, first: int = 0) -> Sums:
        """Quantize rows of one matrix.

        Args:
            w: [N, K] bf16, fp16 or fp32, any strides; for fp8_block, N starts at a tile of 128 rows.
            data: [N, K] uint8, contiguous: the elements' bits go here.
            scale: [N, K / 32] uint8 or [ceil(N / 128), ceil(K / 128)] fp32: the scales go here.
            key: of stochastic rounding (`stochastic.key_of`), -1 for rounding to nearest.
            first: index of w[0, 0] in its tensor, which stochastic rounding counts from.
        """
        return self._mxfp8(w, data, scale, key, first) if self.format.name == "mxfp8" else self._fp8_block(w, data, scale, key, first)

    def _mxfp8(self, w: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, key: int, first: int) -> Sums:
        n, k = w.shape
        total = Sums()
        if n == 0 or k == 0:
            return total
        if w.is_contiguous():
            w, data, scale, step, width = w.view(-1), data.view(-1), scale.view(-1), TILE, 1
        else:  # whole rows, at least one
            step, width = max(1, TILE // k), k
        for at in range(0, w.shape[0], step):
            rows = slice(at, min(at + step, w.shape[0]))
            groups = slice(rows.start // GROUP, rows.stop // GROUP) if width == 1 else rows
            total.add(self._mx_tile(w[rows], data[rows].view(-1), scale[groups].view(-1), key, first + at * width))
        return total

    def _mx_tile(self, w: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, key: int, first: int) -> Sums:
        n = w.numel()
        x, y = self._buffers(n, key >= 0)
        x.view(w.shape).copy_(w)
        torch.abs(x, out=y)
        amax = y.view(-1, GROUP).amax(-1)
        if not float(amax.max()) < torch.inf:
            return self._reference(w.reshape(-1, GROUP), data, scale, key, first)
        byte = scale_byte(amax, self.rule)
        scale.copy_(byte)
        x2 = x.view(-1, GROUP)
        torch.mul(x2, reciprocal(byte).unsqueeze(-1), out=x2)
        self._round(x, y, data, key, first, clip=self.rule != "rceil")
        if not self.measure:
            return Sums()
        # relative to the tile's largest scale, so that no square leaves fp32's range
        top = int(byte.max())
        weight = ((byte - top).add_(127).clamp_(min=0) << 23).view(torch.float32).unsqueeze(-1)
        return self._sums(x2, y.view(-1, GROUP), data, weight, 2.0 ** (top - 127))

    def _fp8_block(self, w: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, key: int, first: int) -> Sums:
        n, k = w.shape
        total = Sums()
        for row in range(0, n, 128):
            rows = slice(row, min(row + 128, n))
            whole = k // 128 * 128
            cuts = [(c, min(c + _COLUMNS, whole)) for c in range(0, whole, _COLUMNS)] + ([(whole, k)] if whole < k else [])
            for start, stop in cuts:
                tiles = scale[row // 128, start // 128 : -(-stop // 128)]
                total.add(self._block_tile(w[rows, start:stop], data[rows, start:stop], tiles, key, first + row * k + start, k))
        return total

    def _block_tile(self, w: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, key: int, first: int, stride: int) -> Sums:
        r, c = w.shape
        x, y = self._buffers(r * c, key >= 0)
        x, y = x.view(r, c), y.view(r, c)
        x.copy_(w)
        torch.abs(x, out=y)
        width = min(c, 128)
        amax = y.view(r, -1, width).amax(-1).amax(0)
        if not float(amax.max()) < torch.inf:
            return self._reference(w, data, scale, key, first, stride)
        s = block_scale(amax, self.rule)
        scale.copy_(s)
        x3, s3 = x.view(r, -1, width), s.view(1, -1, 1)
        torch.div(x3, s3, out=x3)
        self._round(x, y, data, key, first, clip=True, stride=stride)
        if not self.measure:
            return Sums()
        top = 2.0 ** (int(s.max().view(torch.int32) >> 23) - 127)
        return self._sums(x3, y.view(r, -1, width), data, s3 / top, top)

    def _round(self, x: torch.Tensor, y: torch.Tensor, data: torch.Tensor, key: int, first: int, *, clip: bool, stride: int | None = None) -> None:
        """Round scaled values x to bytes; y is scratch."""
        if key < 0:
            out = data.view(E4M3)
            out.copy_(torch.clamp(x, -E4M3_MAX, E4M3_MAX, out=y) if clip else x)
            return
        n = x.numel()
        a, noise, code = y, self._ints[0][:n].view(x.shape), self._ints[1][:n].view(x.shape)
        self._noise(noise, code, key, first, stride)
        torch.abs(x, out=a)
        a.clamp_(max=E4M3_MAX)
        small = a < 2.0**-6
        torch.add(a.view(torch.int32), noise, out=code)
        code.bitwise_right_shift_(20).sub_(960)
        if bool(small.any()):
            a.mul_(2.0**29).clamp_(max=2.0**23)
            noise.add_(a.to(torch.int32)).bitwise_right_shift_(20)
            torch.where(small, noise, code, out=code)
        sign = torch.bitwise_right_shift(x.view(torch.int32), 24, out=noise).bitwise_and_(0x80)
        data.copy_(code.bitwise_or_(sign))

    def _noise(self, h: torch.Tensor, t: torch.Tensor, key: int, first: int, stride: int | None) -> None:
        """`stochastic.random_bits` in 32-bit integers that wrap, of a line of elements or of rows `stride` apart; t is scratch."""
        rows, columns = (1, h.numel()) if stride is None else tuple(h.shape)
        start = _signed(first)
        last = first + (rows - 1) * (stride or 0) + columns - 1
        if first >> 32 != last >> 32:  # once in 2^32 elements
            index = first + torch.arange(rows).unsqueeze(1) * (stride or 0) + torch.arange(columns)
            h.copy_(random_bits(index, key).view(h.shape))
            return
        lines = torch.tensor([_signed(first + r * stride) for r in range(rows)], dtype=torch.int32).unsqueeze(1) if stride is not None else start
        torch.add(self._arange[:columns], lines, out=h)
        h.bitwise_xor_(key >> 31)
        _mix(h, t)
        h.bitwise_xor_((last >> 32) ^ (key & 0x7FFFFFFF))
        _mix(h, t)
        h.bitwise_right_shift_(12).bitwise_and_(0xFFFFF)

    def _sums(self, x: torch.Tensor, y: torch.Tensor, data: torch.Tensor, weight: torch.Tensor, top: float) -> Sums:
        """Sums of one tile from scaled values x, bytes and the scales relative to `top`."""
        _decode(data, y.view(data.shape))
        torch.mul(y, weight * 2.0**120, out=y)
        torch.mul(x, weight, out=x)
        a, b = x.view(-1), y.view(-1)
        signal, result = float(torch.dot(a, a)), float(torch.dot(b, b))
        torch.sub(a, b, out=a)
        square = top * top
        return Sums(signal * square, float(torch.dot(a, a)) * square, result * square, a.numel())

    def _reference(self, w: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, key: int, first: int, stride: int | None = None) -> Sums:
        """A tile with NaN or infinities, by the definition."""
        fmt = self.format.name
        if key < 0:
            bits, s = quantize_weight_ref(w, fmt, 1, self.rule, key)
        else:
            v, s = mxfp8.values_ref(w, self.rule) if fmt == "mxfp8" else fp8_block.weight_values_ref(w, 1, self.rule)
            rows, columns = w.shape
            index = first + torch.arange(rows).unsqueeze(1) * (stride or columns) + torch.arange(columns)
            bits = stochastic_bits(v, index, key)
        data.copy_(bits.view(data.shape))
        scale.copy_(s.view(scale.shape))
        return Sums(not_finite=True)


def _decode(data: torch.Tensor, into: torch.Tensor) -> None:
    """e4m3 bytes, none of them NaN, to 2^-120 of their values in fp32.

    In integers, since torch's cast is not vectorised: the byte with its sign extended, moved to where fp32 has sign, exponent and mantissa.
    """
    bits = into.view(torch.int32)
    bits.copy_(data.view(torch.int8))
    bits.bitwise_left_shift_(20).bitwise_and_(-0x78100000)


def dequantize_rows_cpu(data: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    """`dequantize_ref` of rows [N, K] on the CPU, the same fp32 values, where no element is NaN.

    Args:
        data: uint8 [N, K], N starting at a tile of 128 rows for fp8_block.
        scale: bytes [N, K / 32] or fp32 [ceil(N / 128), ceil(K / 128)].
        fmt: "mxfp8" or "fp8_block".
    """
    n, k = data.shape
    out = torch.empty(n, k)
    _decode(data, out)
    out.mul_(2.0**120)
    if fmt == "mxfp8":
        out.view(-1, GROUP).mul_(decode_e8m0(scale).reshape(-1, 1))
        return out
    whole = k // 128 * 128
    for row in range(0, n, 128):
        tiles, s = out[row : row + 128], scale[row // 128]
        if whole:
            tiles[:, :whole].unflatten(1, (-1, 128)).mul_(s[: whole // 128].unsqueeze(-1))
        if whole < k:
            tiles[:, whole:].mul_(s[-1])
    return out


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def _mix(x: torch.Tensor, t: torch.Tensor) -> None:
    """`stochastic._mix` in place on int32 that stand for uint32; t is scratch."""
    for shift, factor in ((16, _C1), (13, _C2), (16, None)):
        torch.bitwise_right_shift(x, shift, out=t).bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(t)
        if factor is not None:
            x.mul_(factor)


def quantize_weight_cpu(
    w: torch.Tensor, format: str | Format, *, segments: int = 1, rule: str | None = None, stochastic_seed: int | None = None, name: str = ""
) -> QTensor:
    """`quantize_weight` of a CPU tensor with the same bytes, through `WeightQuantizer`.

    Args:
        w: (N, K) or (E, N, K), bf16, fp16 or fp32.
        format: "fp8_block" or "mxfp8".
        segments: as in `quantize_weight`.
        rule: as in `quantize_weight`.
        stochastic_seed: as in `quantize_weight`.
        name: as in `quantize_weight`.
    """
    f = get_format(format, "quantize_weight_cpu")
    run = WeightQuantizer(f, rule)
    parts = segments if f.name == "fp8_block" else 1
    key = -1 if stochastic_seed is None else key_of(stochastic_seed, name)
    data = torch.empty(w.shape, dtype=torch.uint8)
    scale = torch.empty(scale_shape(tuple(w.shape), f.weight_block, parts), dtype=f.scale_dtype)
    k = w.shape[-1]
    per, rows = w.shape[-2] // parts, scale.shape[-2] // parts
    stacks = [(w, data, scale)] if w.dim() == 2 else list(zip(w, data, scale, strict=True))
    for e, (source, bits, s) in enumerate(stacks):
        for i in range(parts):
            own, tiles = slice(i * per, (i + 1) * per), slice(i * rows, (i + 1) * rows)
            run(source[own], bits[own], s[tiles], key=key, first=(e * parts + i) * per * k)
    return QTensor(data.view(E4M3), as_bytes(scale), f, f.weight_block, "row_major", run.rule, parts)
