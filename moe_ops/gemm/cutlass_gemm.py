"""CUTLASS behind our functions: operands as its kernels want them, and the ops.

    cutlass/*.cu        the kernels, over CUTLASS's headers      cutlass_library.py  calls of a library
    cutlass_build.py    which there are, and how nvcc makes them cutlass_choice.py   what can run, and why not
    cutlass_kernel.py   rows and scales led to them              cutlass_probe.py    one small product with every tile

SM90 reads row-major fp32 scales in place, so packed and masked rows are taken as they lie; SM100 reads E8M0 bytes in tiles of 128 rows of one
expert, which a kernel writes first. Gathered rows are copied side by side first. Rows need no padding; counts stay on the device.
"""

import torch

from moe_ops.core.arch import arch_of
from moe_ops.core.formats import ceil_div
from moe_ops.core.ops import register
from moe_ops.gemm.cutlass_build import Instantiation, of_kind
from moe_ops.gemm.cutlass_library import call_dense, call_grouped
from moe_ops.gemm.grouped import _ref_into, dequantized
from moe_ops.quant.scale_layout import _op as convert_scale
from moe_ops.quant.scale_storage import unpack_ref


def arch_name(capability: int) -> str:
    """What nvcc calls the architecture whose instructions the kernels use."""
    return f"sm{capability}a"


def pick(arch: str, kind: str, rows: int) -> Instantiation:
    """The kernel for about `rows` rows in each product: the smallest tile that holds them, else the largest."""
    tiles = of_kind(arch, kind)
    return next((tile for tile in tiles if rows <= tile.tile_m), tiles[-1])


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """Bytes whose rows start at multiples of 16, as TMA reads them: `t`, or a copy."""
    apart = all(s >= size for s, size in zip(t.stride()[:-1], t.shape[1:], strict=True))  # TMA takes no expanded rows
    if t.data_ptr() % 16 == 0 and apart and all(s % 16 == 0 for s in t.stride()[:-1]):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _check_address(op: str, **tensors: torch.Tensor) -> None:
    for name, t in tensors.items():
        if t.data_ptr() % 16:
            raise ValueError(f"{op}: {name} must start at a multiple of 16 bytes for impl 'cutlass', its address is {t.data_ptr()}")


def gather_rows(
    a: torch.Tensor, a_scale: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor, top_k: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and row-major scales of a[order // top_k], those of no expert uninitialised; one launch."""
    from moe_ops.core.launch import launch
    from moe_ops.gemm.cutlass_kernel import _gather_rows_kernel

    rows, k, blocks = order.shape[0], a.shape[1], a_scale.shape[1]
    data, scale = a.new_empty((rows, k)), a_scale.new_empty((rows, blocks))
    block_r, block_c = 4, 1024
    launch(
        "grouped_gemm", _gather_rows_kernel, (ceil_div(rows, block_r) * ceil_div(k, block_c),),
        a, a_scale, offsets, order, data, scale, rows, a.shape[0], a.stride(0), *a_scale.stride(),
        E=experts, K=k, BLOCKS=blocks, TOP_K=top_k, BLOCK_R=block_r, BLOCK_C=block_c, BLOCK_S=64, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return data, scale


def tile_scales(a_scale: torch.Tensor, offsets: torch.Tensor, experts: int) -> torch.Tensor:
    """E8M0 bytes of packed (R, blocks) or masked (E, capacity, blocks) rows in tiles of 128 rows x 4 bytes, each expert's own; one launch.

    Returns int32 (tile rows, words, 128); tile rows of no expert are uninitialised. See `_tile_scales_kernel` for where an expert's start.
    """
    from moe_ops.core.launch import launch
    from moe_ops.gemm.cutlass_kernel import _tile_scales_kernel

    masked = a_scale.dim() == 3
    rows, blocks = a_scale.shape[-2:]
    tiles, words = ceil_div(rows, 128), ceil_div(blocks, 4)
    out = a_scale.new_empty((experts * tiles if masked else rows // 128 + experts, words, 128), dtype=torch.int32)
    block_w = 8
    launch(
        "grouped_gemm", _tile_scales_kernel, (out.shape[0] * ceil_div(words, block_w),),
        a_scale, offsets, out, rows, tiles, a_scale.stride(-2), a_scale.stride(-1), a_scale.stride(0) if masked else 0,
        E=experts, E2=1 << (experts - 1).bit_length(), BLOCKS=blocks, MASKED=masked, BLOCK_W=block_w, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def grouped_into(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor | None, top_k: int,
    fmt: str, segments: int, out: torch.Tensor,
) -> None:  # fmt: skip
    """`grouped_gemm` by CUTLASS: two launches, one more to gather rows, two more for the scales of mxfp8 (one where w's are in tiles already)."""
    experts, n, k = w.shape
    rows = out.numel() // max(1, n)
    if rows == 0 or experts == 0 or n == 0:
        return
    _check_address("grouped_gemm", w=w, out=out)
    if order is not None:
        a, a_scale = gather_rows(a, a_scale, offsets, order, top_k, experts)
    else:
        a = _aligned(a)
    if fmt == "mxfp8":
        a_scale, segments = tile_scales(a_scale, offsets, experts), 1
        if w_scale.dim() == 2 and k % 128:  # the padding of tiles may hold anything, NaN too, and the kernel multiplies its zeros by it
            w_scale = convert_scale(w_scale, "swizzle_32x4x4", "row_major", n, k // 32, fmt)
        if w_scale.dim() == 3:  # row_major
            w_scale = convert_scale(w_scale, "row_major", "swizzle_32x4x4", n, k // 32, fmt)
    else:
        a_scale = a_scale.contiguous()
    instantiation = pick(arch_name(arch_of(a.device).capability), "grouped", ceil_div(rows, experts))
    call_grouped(instantiation, a, a_scale, w, w_scale, offsets, segments, out)


def dense_into(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor) -> None:
    """out (M, N) = a (M, K) @ w (N, K)^T by CUTLASS, fp8_block; one launch where the scales are row_major."""
    m, n = a.shape[0], w.shape[0]
    if m == 0 or n == 0:
        return
    _check_address("dense_gemm", w=w, out=out)
    if a_scale.stride(1) != 1:
        a_scale = a_scale.contiguous()
    call_dense(pick(arch_name(arch_of(a.device).capability), "dense", m), _aligned(a), a_scale, w, w_scale, out)


def _grouped_cpu(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor | None, top_k: int,
    fmt: str, segments: int, out: torch.Tensor,
) -> None:  # fmt: skip
    if w_scale.dim() == 2:  # tiles
        w_scale = unpack_ref(w_scale, "swizzle_32x4x4", w.shape[1], w.shape[2] // 32, fmt)
    _ref_into(a, a_scale, w, w_scale, None, offsets, order, top_k, fmt, segments, out)


def _grouped_fake(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor | None, top_k: int,
    fmt: str, segments: int, out: torch.Tensor,
) -> None:  # fmt: skip
    return None


cutlass_grouped = register("cutlass_grouped", cuda=grouped_into, cpu=_grouped_cpu, fake=_grouped_fake, mutates=("out",))


def _dense_cpu(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(dequantized(a, a_scale, "fp8_block", 1, 1) @ dequantized(w, w_scale, "fp8_block", 128, 1).T)


def _dense_fake(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor) -> None:
    return None


cutlass_dense = register("cutlass_dense", cuda=dense_into, cpu=_dense_cpu, fake=_dense_fake, mutates=("out",))
