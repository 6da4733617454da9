"""GEMM1 of the layer fused with what follows it: rows gathered, gate and up product, activation, quantized 1x128 in the epilogue.

The 2I-wide product never exists in memory, and nothing is rounded between the fp32 accumulators and the quantization.
"""

import torch

from moe_ops.core.arch import Arch, arch_of
from moe_ops.core.formats import as_bytes, as_e4m3
from moe_ops.gemm.grouped import grouped_gemm_into, grouped_gemm_ref
from moe_ops.gemm.tile_list import tile_list_into

#: Row tiles that share a weight tile in L2 before the next columns are taken.
GROUP_M = 8


def unsupported(n: int, k: int, fmt: str, interleaved: bool, arch: Arch) -> str | None:
    """None when GEMM1 of w13 (E, n = 2I, k) can run fused on `arch`, else why not."""
    if fmt != "fp8_block":
        return f"only fp8_block has a fused GEMM1, got {fmt}"
    if interleaved:
        return "gate and up columns are interleaved"
    if n % 256 or k % 128:
        return f"I = {n // 2} and H = {k} must be multiples of 128"
    if not arch.has_tma or arch.smem < 150_000:
        return f"{arch.name} has no tensor descriptors, or too little shared memory for the tiles"
    return None


def uses_hopper(arch: Arch) -> bool:
    """The Gluon kernel runs on SM90 alone; everything else takes its plain-Triton twin."""
    return arch.has_wgmma


def tile_rows(arch: Arch) -> int:
    """Rows of a tile in the list that `grouped_act_into` and `grouped_down_into` walk."""
    return 128 if uses_hopper(arch) else 64


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
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, tiles: torch.Tensor,
    order: torch.Tensor | None, top_k: int, act_kind: str, alpha: float, limit: float, up_offset: float, out: torch.Tensor, out_scale: torch.Tensor,
    rule: str = "fp32", hopper: bool | None = None,
) -> None:  # fmt: skip
    """One launch on given buffers; `tiles` is the list of `tile_list_into` with `tile_rows` rows. Arguments are not checked.

    Args:
        a: (T, K) e4m3 bits, rows read through `order` (R,), or (R, K) with order None.
        a_scale: (.., K / 128) fp32, any strides.
        w, w_scale: (E, 2I, K) e4m3 bits and (E, 2I / 128, K / 128) fp32, contiguous.
        bias: (E, 2I) or None.
        out, out_scale: (R, I) e4m3 bits and (R, I / 128) fp32, written in the filled rows.
        rule: how the result is quantized: "fp32", or "folded" for mxfp8 folded to 1x128 (`quant/fold.py`).
        hopper: which of the two kernels (tiles of 128 or 64 rows); None: what the device has.
    """
    from moe_ops.core.launch import launch

    experts, n, k = w.shape
    arch = arch_of(a.device)
    rows = out.shape[0]
    strides = (a.stride(0), *a_scale.stride())
    if uses_hopper(arch) if hopper is None else hopper:
        from moe_ops.gemm.grouped_hopper import launch_hopper

        launch_hopper("grouped_act", a, a_scale, w, w_scale, bias, out, out_scale, tiles, order, top_k, rows, act_kind, alpha, limit, up_offset, rule)
        return
    from triton.tools.tensor_descriptor import TensorDescriptor

    from moe_ops.gemm.grouped_act_kernel import _grouped_act_kernel
    from moe_ops.quant.activation import lowest_gate

    w_desc = TensorDescriptor.from_tensor(as_e4m3(w).view(experts * n, k), [128, 128])
    tiles_bound = (min(experts, rows) + rows // 64) * (n // 256)
    launch(
        "grouped_act", _grouped_act_kernel, (min(arch.sms, tiles_bound),),
        as_e4m3(a), a_scale, w_desc, w_scale, bias, as_bytes(out), out_scale, tiles, order, a.shape[0], *strides,
        alpha, lowest_gate(act_kind, alpha), limit, up_offset,
        N=n, K=k, TOP_K=top_k, KIND=act_kind, RULE=rule, GROUP_M=GROUP_M, BLOCK_M=64, num_warps=8, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip


def make_tiles(offsets: torch.Tensor, rows: int, tiles: torch.Tensor) -> None:
    """The tile list that both fused GEMMs walk."""
    tile_list_into(offsets, rows, tile_rows(arch_of(offsets.device)), tiles)


def grouped_down_into(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, tiles: torch.Tensor,
    offsets: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """GEMM2 over the same tiles: (R, K) rows x (E, N, K) -> (R, N) of out's dtype; one launch on given buffers."""
    _, n, k = w.shape
    arch = arch_of(a.device)
    if uses_hopper(arch) and n % 256 == 0 and k % 128 == 0:
        from moe_ops.gemm.grouped_hopper import launch_hopper

        launch_hopper("grouped_gemm", a, a_scale, w, w_scale, bias, out, None, tiles, None, 1, out.shape[0])
    else:
        grouped_gemm_into(a, a_scale, w, w_scale, bias, offsets, None, 1, "fp8_block", 1, out)
