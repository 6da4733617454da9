"""mxfp8 in plain torch, the definition: e4m3 elements, one E8M0 byte b for 1x32 along K, meaning 2^(b - 127).

The byte comes from amax (fp32, over finite values) by integer work on its bits, clamped to 0 .. 254; a zero block has byte 0:

- "rceil" (default): ceil(log2(amax / 448)) + 127. Nothing clips.
- "floor" (OCP): floor(log2(amax)) - 8 + 127. Magnitudes above 448 * scale clip to 448.
- "even": amax rounded to 3 mantissa bits (ties to even), then floor.

q = rne(clamp(x / 2^(b - 127), +-448)); an infinity becomes +-448 and a NaN 0x7f, in their own block alone. Byte 255 is never written.
"""

import torch

from moe_ops.core.formats import ceil_div
from moe_ops.quant.fp8_block import e4m3_bits, finite_amax

GROUP = 32


def scale_byte(amax: torch.Tensor, rule: str) -> torch.Tensor:
    """E8M0 byte (int32) of a block from its amax (fp32, finite, not negative)."""
    bits = amax.view(torch.int32)
    if rule == "even":
        bits = bits + 0x7FFFF + ((bits >> 20) & 1)
    byte = (bits >> 23) - 8
    if rule == "rceil":
        byte = byte + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)  # mantissa above that of 448 = 1.75 * 2^8
    return byte.clamp(0, 254)


def reciprocal(byte: torch.Tensor) -> torch.Tensor:
    """2^(127 - byte) in fp32, exactly; bytes that the rules give are at most 247, so it is a normal number."""
    return ((254 - byte) << 23).view(torch.float32)


def values_ref(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (.., K) with K % 32 == 0 -> x / scale fp32 (.., K) before rounding, bytes uint8 (.., K / 32)."""
    x = x.float().unflatten(-1, (ceil_div(x.shape[-1], GROUP), GROUP))
    byte = scale_byte(finite_amax(x, -1), rule)
    return (x * reciprocal(byte).unsqueeze(-1)).flatten(-2), byte.to(torch.uint8)


def quantize_rows_ref(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (.., K) with K % 32 == 0 -> bits uint8 (.., K), bytes uint8 (.., K / 32)."""
    v, byte = values_ref(x, rule)
    return e4m3_bits(v), byte


def check_e8m0(scale: torch.Tensor, name: str = "scale") -> None:
    """Refuse E8M0 scales that hold byte 255 (NaN); for load time, because it reads the data on the host.

    Args:
        scale: uint8 or float8_e8m0fnu of any shape, or int32 holding four bytes a word.
        name: what the error calls the tensor.

    Raises:
        TypeError: another dtype.
        ValueError: a byte 255, with how many there are.
    """
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu, torch.int32):
        raise TypeError(f"check_e8m0: {name} must be uint8, float8_e8m0fnu or int32, got {scale.dtype}")
    if scale.is_meta:
        return
    found = int((scale.contiguous().view(torch.uint8) == 255).sum())
    if found:
        raise ValueError(f"check_e8m0: {name} holds {found} scale bytes of 255, which E8M0 defines as NaN; the tensor is damaged or is not E8M0")
