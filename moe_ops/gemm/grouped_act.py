"""GEMM1 of the layer fused with what follows it: rows gathered, gate and up product, activation, quantized 1x128 in the epilogue.

The 2I-wide product never exists in memory, and nothing is rounded between the fp32 accumulators and the quantization.
"""

import torch

from moe_ops.core.arch import Arch, arch_of
from moe_ops.core.formats import as_bytes, as_e4m3
from moe_ops.gemm.grouped import grouped_gemm_ref
from moe_ops.gemm.grouped_config import HOPPER_EXPERTS, STREAM_ROWS

#: Row tiles that share a weight tile in L2 before the next columns are taken.
GROUP_M = 8


def unsupported(n: int, k: int, experts: int, fmt: str, interleaved: bool, arch: Arch) -> str | None:
    """None when GEMM1 of w13 (E, n = 2I, k) can run fused on `arch`, else why not."""
    if fmt != "fp8_block":
        return f"only fp8_block has a fused GEMM1, got {fmt}"
    if interleaved:
        return "gate and up columns are interleaved"
    if n % 256 or k % 128:
        return f"I = {n // 2} and H = {k} must be multiples of 128"
    if experts > HOPPER_EXPERTS:
        return f"{experts} experts, more than {HOPPER_EXPERTS}"
    if not arch.has_tma or arch.smem < 150_000:
        return f"{arch.name} has no tensor descriptors, or too little shared memory for the tiles"
    return None


def kernel_of(rows: int, experts: int, arch: Arch) -> str:
    """Which kernel runs: "stream" or "hopper" on SM90 (few rows an expert, or more), and elsewhere their plain-Triton twin, "triton"."""
    if not arch.has_wgmma:
        return "triton"
    return "stream" if rows <= STREAM_ROWS * experts else "hopper"


def grouped_act_ref(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor,
    order: torch.Tensor | None, top_k: int, act_kind: str, alpha: float, limit: float, up_offset: float,
    rule: str = "fp32",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The definition: fp32 GEMM, activation in fp32, 1x128 quantization; (bits uint8 (R, I), scales fp32 (R, I / 128))."""
    from moe_ops.quant.silu_mul_quantize import silu_mul_quantize_ref

    h = grouped_gemm_ref(a, a_scale, w, w_scale, bias, offsets, order, top_k, "fp8_block", 1, torch.float32)
    return silu_mul_quantize_ref(h, None, "fp8_block", "row_major", rule, act_kind, alpha, limit, up_offset, False)


def grouped_act_into(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor,
    order: torch.Tensor | None, top_k: int, act_kind: str, alpha: float, limit: float, up_offset: float, out: torch.Tensor, out_scale: torch.Tensor,
    rule: str = "fp32", early: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """One launch on given buffers. Arguments are not checked.

    Args:
        a: (T, K) e4m3 bits, rows read through `order` (R,), or (R, K) with order None.
        a_scale: (.., K / 128) fp32, any strides.
        w, w_scale: (E, 2I, K) e4m3 bits and (E, 2I / 128, K / 128) fp32, contiguous.
        bias: (E, 2I) or None.
        offsets: (E + 1,) int32, read on the device.
        out, out_scale: (R, I) e4m3 bits and (R, I / 128) fp32, written in the filled rows.
        rule: how the result is quantized: "fp32", or "folded" for mxfp8 folded to 1x128 (`quant/fold.py`).
        early: the predecessor on the stream is one of this package's kernels and wrote none of w, offsets and order: they may be read early.
        kernel: "stream", "hopper" or "triton"; None: `kernel_of`.
    """
    from moe_ops.core.launch import launch

    experts, n, k = w.shape
    arch = arch_of(a.device)
    rows = out.shape[0]
    strides = (a.stride(0), *a_scale.stride())
    kernel = kernel_of(rows, experts, arch) if kernel is None else kernel
    act = (act_kind, alpha, limit, up_offset, rule)
    if kernel == "stream":
        from moe_ops.gemm.grouped_stream import launch_stream

        return launch_stream("grouped_act", a, a_scale, w, w_scale, bias, out, out_scale, offsets, order, top_k, *act, early)
    if kernel == "hopper":
        from moe_ops.gemm.grouped_hopper import launch_hopper

        return launch_hopper("grouped_act", a, a_scale, w, w_scale, bias, out, out_scale, offsets, order, top_k, *act, early)
    from triton.tools.tensor_descriptor import TensorDescriptor

    from moe_ops.gemm.grouped_act_kernel import _grouped_act_kernel
    from moe_ops.quant.activation import lowest_gate

    w_desc = TensorDescriptor.from_tensor(as_e4m3(w).view(experts * n, k), [128, 128])
    tiles = (min(experts, rows) + rows // 64) * (n // 256)
    launch(
        "grouped_act", _grouped_act_kernel, (min(arch.sms, tiles),),
        as_e4m3(a), a_scale, w_desc, w_scale, bias, as_bytes(out), out_scale, offsets, order, rows, a.shape[0], *strides,
        alpha, lowest_gate(act_kind, alpha), limit, up_offset,
        E=experts, E2=1 << (experts - 1).bit_length(), N=n, K=k, TOP_K=top_k, KIND=act_kind, RULE=rule, GROUP_M=GROUP_M, BLOCK_M=64,
        num_warps=8, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return None
