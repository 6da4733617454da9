"""Batched GEMM of absorbed MLA for Hopper in Gluon, up to 32 tokens: bound by latency, so everything is asked for at once.

    program      one head, and a part of its columns or all
    weights      M operand of the instruction; all by TMA, asked for before anything else
    activation   read by all threads, quantized once, written to shared memory as the N operand

bmm_hopper.py has 64 rows in a warpgroup's registers: with one token a quarter of its threads would do all of the quantizing.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.core.formats import as_e4m3
from moe_ops.core.launch import launch
from moe_ops.gemm.gluon_compat import gdc_launch_dependents, gdc_wait, thread_barrier, tma_load
from moe_ops.gemm.hopper_quantize import quantize


@gluon.jit(do_not_specialize=["tokens", "stride_sah", "stride_sam", "stride_sak"])
def _bmm_few_kernel(
    a_ptr, sa_ptr, w_desc, sw_ptr, out_ptr, tokens, stride_ah, stride_am, stride_sah, stride_sam, stride_sak, stride_oh, stride_om,
    N: gl.constexpr, K: gl.constexpr, T: gl.constexpr, PARTS: gl.constexpr, RULE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Columns part * N / PARTS .. of a head; K and N / PARTS in whole 128s, together at most eight blocks of 128x128."""
    KB: gl.constexpr = K // 128
    NT: gl.constexpr = N // PARTS // 128
    VEC: gl.constexpr = 4 if out_ptr.dtype.element_ty == gl.float32 else 8
    boxes: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 16 if RULE == "given" else 8], [4 if RULE == "given" else 2, 8 if RULE == "given" else 16], [8, 1], [1, 0]
    )
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, T, 32])
    by_token: gl.constexpr = gl.SliceLayout(0, mma)
    lines: gl.constexpr = gl.BlockedLayout([1, VEC], [VEC // 4, 128 // VEC], [8, 1], [1, 0])
    w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [KB * NT, 128, 128], boxes)
    a_buf = gl.allocate_shared_memory(gl.float8e4nv, [KB, T, 128], boxes)
    sa_buf = gl.allocate_shared_memory(gl.float32, [KB, T], flat)
    full = gl.allocate_shared_memory(gl.int64, [KB * NT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(KB * NT):
        mbarrier.init(full.index(i), count=1)
    thread_barrier()
    head = gl.program_id(0) // PARTS
    n0 = gl.program_id(0) % PARTS * (N // PARTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for n in gl.static_range(NT):
        for kb in gl.static_range(KB):
            mbarrier.expect(full.index(n * KB + kb), 128 * 128)
            tma_load(w_desc, [head * N + n0 + n * 128, kb * 128], full.index(n * KB + kb), w_bufs.index(n * KB + kb))

    head = head.to(gl.int64)
    t = gl.arange(0, T, gl.SliceLayout(1, wide))
    k = gl.arange(0, 128, gl.SliceLayout(0, wide))
    rows = a_ptr + head * stride_ah + t.to(gl.int64)[:, None] * stride_am + k[None, :]
    # everything is asked for before the first use of anything
    blocks = ()
    for kb in gl.static_range(KB):
        blocks = blocks + (gl.load(rows + kb * 128, mask=(t < tokens)[:, None] & (k >= 0)[None, :], other=0.0),)
    sws = ()
    for i in gl.static_range(KB * NT):
        sws = sws + (gl.load(sw_ptr + (head * (N // 128) + n0 // 128) * KB + i),)
    sas = ()
    if RULE == "given":
        tt = gl.minimum(gl.arange(0, T, by_token), tokens - 1).to(gl.int64)
        for kb in gl.static_range(KB):
            sas = sas + (gl.load(sa_ptr + head * stride_sah + tt * stride_sam + kb * stride_sak),)
    for kb in gl.static_range(KB):
        if RULE == "given":
            a_buf.index(kb).store(blocks[kb])
        else:
            a, sa = quantize(blocks[kb].to(gl.float32), RULE, wide)
            sa_buf.index(kb).store(sa)
            a_buf.index(kb).store(a)
    fence_async_shared()
    thread_barrier()

    t = gl.arange(0, T, gl.SliceLayout(1, lines))
    c = gl.arange(0, 128, gl.SliceLayout(0, lines))
    out = out_ptr + head * stride_oh + t.to(gl.int64)[:, None] * stride_om + (n0 + c)[None, :]
    for n in gl.static_range(NT):
        acc = gl.zeros((128, T), gl.float32, mma)
        for kb in gl.static_range(KB):
            if RULE == "given":
                sa = sas[kb]
            else:
                sa = sa_buf.index(kb).load(by_token)
            mbarrier.wait(full.index(n * KB + kb), 0)
            tmp = warpgroup_mma(
                w_bufs.index(n * KB + kb), a_buf.index(kb).permute((1, 0)), gl.zeros((128, T), gl.float32, mma), use_acc=False, is_async=True
            )
            p = sa * sws[n * KB + kb]
            tmp = warpgroup_mma_wait(0, deps=[tmp])
            acc += tmp * p[None, :]
        y = gl.convert_layout(acc.to(out_ptr.dtype.element_ty).permute((1, 0)), lines)
        gl.store(out + n * 128, y, mask=(t < tokens)[:, None] & (c >= 0)[None, :])


_BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def launch_bmm_few(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, rule: str, parts: int
) -> None:  # fmt: skip
    """Launch on given buffers; allocates nothing. Arguments as `launch_bmm_hopper`'s; `parts` programs share the columns of a head."""
    heads, n, k = w.shape
    tokens = a.shape[0]
    if tokens == 0 or heads == 0:
        return
    a, w = as_e4m3(a), as_e4m3(w)
    stride_sam, stride_sah, stride_sak = (0, 0, 0) if a_scale is None else a_scale.stride()
    # a single token's distance can be anything, and would compile anew
    stride_am = max(a.stride(0), heads * a.stride(1)) if tokens == 1 else a.stride(0)
    stride_om = max(out.stride(0), heads * out.stride(1)) if tokens == 1 else out.stride(0)
    launch(
        "bmm", _bmm_few_kernel, (heads * parts,),
        a, a_scale, TensorDescriptor(w, [heads * n, k], [k, 1], [128, 128], _BOX), w_scale, out,
        tokens, a.stride(1), stride_am, stride_sah, stride_sam, stride_sak, out.stride(1), stride_om,
        N=n, K=k, T=16 if tokens <= 16 else 32, PARTS=parts, RULE=rule, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
