"""Shared numerics: error measures, integer decoding of the element and scale types, and makers of test and benchmark data.

The data makers give every block another scale, so that a kernel that mixes two scales up cannot pass.
"""

import torch

from moe_ops.core.formats import E4M3_MAX


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| in fp64; NaN anywhere gives NaN, and 0 / 0 is 0. Reads the device."""
    out, ref = out.detach().double(), ref.detach().double()
    norm = ref.norm()
    diff = (out - ref).norm()
    return float(diff) if float(norm) == 0.0 else float(diff / norm)


def decode_e8m0(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) as fp32: 2^(b - 127), exactly, subnormal 2^-127 for byte 0 and NaN for byte 255."""
    b = byte.to(torch.int32)
    bits = torch.where(b == 0, torch.full_like(b, 0x00400000), b << 23)
    bits = torch.where(b == 255, torch.full_like(b, 0x7FC00000), bits)
    return bits.view(torch.float32)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 to e4m3, round to nearest even, saturating at 448 (infinities too); NaN stays NaN (0x7f).

    The clamp comes before the cast: overflow saturates in some torch versions and is NaN in others.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def uneven(
    shape: tuple[int, ...], *, block: tuple[int, int] = (1, 32), seed: int = 0, dtype: torch.dtype = torch.bfloat16, spread: int = 4
) -> torch.Tensor:
    """Normal data whose blocks of (rows, columns) have scales that differ by up to 2^(2 * spread); on the CPU, from `seed`."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    *lead, m, k = shape
    bm, bk = -(-m // block[0]), -(-k // block[1])
    e = torch.randint(-spread, spread + 1, (*lead, bm, bk), generator=g).float().exp2()
    e = e.repeat_interleave(block[0], -2)[..., :m, :].repeat_interleave(block[1], -1)[..., :k]
    return (x * e).to(dtype)


def random_topk(tokens: int, experts: int, top_k: int, *, seed: int = 0, skew: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct expert ids [T, k] int32 and positive weights [T, k] fp32 that sum to 1, on the CPU.

    Args:
        skew: 0 for even routing; larger values favour low experts (3 is close to one hot expert).
    """
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=g) - skew * torch.arange(experts) / max(1, experts)
    ids = scores.topk(top_k, dim=-1).indices.to(torch.int32)
    weights = torch.rand(tokens, top_k, generator=g) + 0.05
    return ids, weights / weights.sum(-1, keepdim=True)
