"""Triton helpers that several kernels share: exponentials accurate to about 1e-7 relative, and IEEE division.

Triton's `/` on fp32 is an approximation (2 ulp) and `tl.exp` multiplies by log2(e) before `ex2.approx`, whose argument error grows with |x|.
"""

import triton
import triton.language as tl


@triton.jit
def exp_accurate(x):
    """exp(x) in fp32 to about 1 ulp for every finite x (NaN stays NaN): x = n ln2 + r, |r| <= ln2 / 2, and e^r = 1 + r + r^2 P(r)."""
    x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 89.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = tl.fma(n, -0.693145751953125, x)  # ln2 split so that n * high is exact
    r = tl.fma(n, -1.428606820309417e-06, r)
    p = r * 0.001394645543769002 + 0.00836915709078312  # least squares for the relative error: 5e-9
    p = p * r + 0.04166626185178757
    p = p * r + 0.16666516661643982
    p = p * r + 0.5
    y = 1.0 + tl.fma(r * r, p, r)
    # two factors: 2^n alone underflows too early and overflows too early
    i = n.to(tl.int32)
    half = i >> 1
    return y * ((half + 127) << 23).to(tl.float32, bitcast=True) * ((i - half + 127) << 23).to(tl.float32, bitcast=True)


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
