"""Stochastic rounding to e4m3 in plain torch, the definition: the same bytes on every device and for any number of workers.

The 20 random bits of an element depend on (seed, tensor name, element index) alone: a stateless hash of the index (two rounds of
MurmurHash3's 32-bit finalizer) under a key made from seed and name. A value between two neighbours of the e4m3 grid goes to the upper one
with a probability of its distance from the lower, to 2^-20.
"""

import hashlib

import torch

from moe_ops.core.formats import E4M3_MAX

_MASK = 0xFFFFFFFF
_C1 = 0x85EBCA6B - 2**32  # negative twins of the constants: the product with 32 bits fits int64
_C2 = 0xC2B2AE35 - 2**32


def key_of(seed: int, name: str) -> int:
    """62 bits from seed and tensor name, which the kernel takes as two positive int32."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * _C1) & _MASK
    x = ((x ^ (x >> 13)) * _C2) & _MASK
    return x ^ (x >> 16)


def random_bits(index: torch.Tensor, key: int) -> torch.Tensor:
    """20 random bits (int32) for each element index (int64)."""
    h = _mix((index & _MASK) ^ (key >> 31))
    return (_mix(h ^ (index >> 32) ^ (key & 0x7FFFFFFF)) >> 12).to(torch.int32)


def stochastic_bits(q: torch.Tensor, index: torch.Tensor, key: int) -> torch.Tensor:
    """fp32 -> e4m3 bits as uint8, rounded stochastically; exact values stay, infinities become +-448 and NaN 0x7f."""
    a = q.abs().clamp(max=E4M3_MAX)
    noise = random_bits(index, key)
    bits = a.view(torch.int32)
    normal = ((bits + noise) >> 20) - 960  # both have 3 more mantissa bits above bit 20; the exponent biases differ by 120
    steps = torch.where(a < 2.0**-6, a * 2.0**29, 0.0).to(torch.int32)  # in units of 2^-29, 2^20 of them to a subnormal step
    code = torch.where(a < 2.0**-6, (steps + noise) >> 20, normal)
    code = code | ((q.view(torch.int32) >> 24) & 0x80)
    return torch.where(q.isnan(), 0x7F, code).to(torch.uint8)
