"""fp8_block in plain torch, the definition: e4m3 elements, one fp32 scale for 1x128 of an activation or 128x128 of a weight.

scale = amax / 448 by IEEE division, at least 2^-126, and 1 for a zero block; q = rne(clamp(x / scale, +-448)).
amax is taken over finite values: an infinity becomes +-448 and a NaN 0x7f, in their own block alone.
Rule "pow2" rounds the scale up to a power of two, as kernels that read only its exponent demand.
"""

import torch

from moe_ops.core.formats import E4M3_MAX, MIN_SCALE, ceil_div

GROUP = 128


def finite_amax(x: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Largest magnitude along `dim` over the finite values (0 where there is none); x is fp32."""
    a = x.abs()
    return torch.where(a < torch.inf, a, 0.0).amax(dim)


def e4m3_bits(q: torch.Tensor) -> torch.Tensor:
    """fp32 -> e4m3 bits as uint8: saturating round to nearest even; any NaN is 0x7f, as the hardware's conversion gives."""
    q = torch.where(q.isnan(), torch.nan, q.clamp(-E4M3_MAX, E4M3_MAX))
    return q.to(torch.float8_e4m3fn).view(torch.uint8)


def block_scale(amax: torch.Tensor, rule: str) -> torch.Tensor:
    """Scale of a block from its amax (fp32); `rule` is "fp32" or "pow2"."""
    # division by a tensor: a Python scalar would become a multiplication by its reciprocal on a GPU
    scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=MIN_SCALE)
    if rule == "pow2":
        bits = scale.view(torch.int32)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


def quantize_rows_ref(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (.., K) -> bits uint8 (.., K), scales fp32 (.., ceil(K / 128))."""
    k = x.shape[-1]
    x = torch.nn.functional.pad(x.float(), (0, -k % GROUP)).unflatten(-1, (ceil_div(k, GROUP), GROUP))
    scale = block_scale(finite_amax(x, -1), rule)
    return e4m3_bits(x / scale.unsqueeze(-1)).flatten(-2)[..., :k].clone(memory_format=torch.contiguous_format), scale


def weight_values_ref(w: torch.Tensor, segments: int, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """w (.., N, K) -> w / scale fp32 (.., N, K) before rounding, scales (.., segments * ceil(N / segments / 128), ceil(K / 128))."""
    *lead, n, k = w.shape
    per = n // segments
    tiles_n, tiles_k = ceil_div(per, GROUP), ceil_div(k, GROUP)
    x = w.float().reshape(*lead, segments, per, k)
    x = torch.nn.functional.pad(x, (0, -k % GROUP, 0, -per % GROUP))
    x = x.reshape(*lead, segments, tiles_n, GROUP, tiles_k, GROUP)
    scale = block_scale(finite_amax(x, (-3, -1)), rule)
    v = (x / scale[..., :, None, :, None]).reshape(*lead, segments, tiles_n * GROUP, tiles_k * GROUP)
    return v[..., :per, :k].reshape(*lead, n, k), scale.reshape(*lead, segments * tiles_n, tiles_k)
