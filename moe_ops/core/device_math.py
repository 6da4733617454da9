"""Triton helpers that several kernels share: exponentials accurate to about 1e-7 relative, and IEEE division.

Triton's `/` on fp32 is an approximation (2 ulp) and `tl.exp` multiplies by log2(e) before `ex2.approx`, whose argument error grows with |x|.
"""

import triton
import triton.language as tl


@triton.jit
def exp_accurate(x):
    """exp(x) in fp32 within about 2 ulp for every finite x (NaN stays NaN): x = n ln2 + r, |r| <= ln2 / 2."""
    x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 89.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = tl.fma(n, -0.693145751953125, x)  # ln2 split so that n * high is exact
    r = tl.fma(n, -1.428606820309417e-06, r)
    # two factors: 2^n alone underflows too early and overflows too early
    half = tl.floor(n * 0.5)
    return tl.exp(r) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def sigmoid_accurate(x):
    """1 / (1 + exp(-x)) in fp32."""
    return tl.div_rn(tl.zeros_like(x) + 1.0, 1.0 + exp_accurate(-x))


@triton.jit
def tanh_accurate(x):
    """tanh(x) in fp32, to about 1e-7 absolute."""
    e = exp_accurate(-2.0 * tl.abs(x))
    t = tl.div_rn(1.0 - e, 1.0 + e)
    return tl.where(x < 0, -t, t)
