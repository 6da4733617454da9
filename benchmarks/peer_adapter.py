"""How the comparison scripts call this project, through its public functions alone.

Both makers return (call, out): `call()` takes no arguments, allocates nothing of its own after the first call and can be captured; what a
user does once at load time (wrapping weights) happens in the maker, what a step of the model pays happens in `call`.
"""

import torch

from moe_ops import Routing, fused_moe, grouped_gemm, make_qtensor
from moe_ops.layer.fused import make_workspace


def make_grouped_gemm(a, a_scale, w, w_scale, offsets):
    """a (R, K) e4m3, a_scale (R, K/128), w (E, N, K) e4m3, w_scale (E, ceil(N/128), K/128), offsets (E+1,) int32; out (R, N) bf16."""
    qa = make_qtensor(a, a_scale, "fp8_block", weight=False)
    qw = make_qtensor(w, w_scale, "fp8_block")
    out = torch.empty(a.shape[0], w.shape[1], dtype=torch.bfloat16, device=a.device)
    return lambda: grouped_gemm(qa, qw, offsets, out=out), out


def make_moe_layer(x, topk_ids, topk_weights, w13, s13, w2, s2):
    """x (T, H) bf16, ids (T, k) int32, weights (T, k) fp32, w13 (E, 2I, H) gate rows then up rows, w2 (E, H, I); out (T, H) bf16."""
    q13 = make_qtensor(w13, s13, "fp8_block", segments=2 if (w13.shape[1] // 2) % 128 else 1)
    q2 = make_qtensor(w2, s2, "fp8_block")
    experts = w13.shape[0]
    out = torch.empty_like(x)
    workspace = make_workspace(x.shape[0], topk_ids.shape[1], q13, x.dtype)

    def call():
        routing = Routing.from_topk(topk_ids, topk_weights, experts)
        fused_moe(x, q13, q2, routing, out=out, workspace=workspace)

    return call, out
