"""What a call of the dense GEMM needs of a workspace: the quantized activation, then the partial sums."""

import torch

from moe_ops.core.arch import arch_of
from moe_ops.core.formats import ceil_div
from moe_ops.gemm.dense_config import DenseGemmConfig, DenseGemmProblem, choose, part_bytes, quantizes_inside
from moe_ops.gemm.dense_roles import roles_reason
from moe_ops.quant.scale_storage import padded_rows


def quantized_bytes(rows: int, k: int, fmt: str) -> tuple[int, int]:
    """Bytes of an activation's data and scales (with room for MN-major ones), each rounded up so that what follows is aligned."""
    scales = padded_rows(rows, "mn_major") * 4 * ceil_div(k, 128) if fmt == "fp8_block" else rows * (k // 32)
    return ceil_div(rows * k, 256) * 256, ceil_div(scales, 256) * 256


def rows_aligned(a: torch.Tensor) -> bool:
    """Whether TMA can address a (M, K) of bytes: rows apart from one another, each on a 16-byte boundary."""
    return a.data_ptr() % 16 == 0 and (a.shape[0] == 1 or (a.stride(0) % 16 == 0 and a.stride(0) >= a.shape[1]))


def needs(
    op: str, a: torch.Tensor, w: torch.Tensor, fmt: str, rule: str, config: list[int] | None, residual: torch.Tensor | None, out: torch.Tensor
) -> tuple[DenseGemmConfig | None, tuple[int, int], int]:  # fmt: skip
    """How `dense_gemm_into` runs: (config, bytes of data and of scales that it quantizes before the GEMM, bytes of workspace in all).

    The config is None where the prefill kernel with warp roles runs, see `dense_roles.roles_reason`.

    Raises:
        ValueError: a pinned config that cannot run this.
    """
    (rows, k), n = a.shape, w.shape[0]
    quantized = quantized_bytes(rows, k, fmt) if rule != "given" and not quantizes_inside(rows, n) else (0, 0)
    quantizes = any(quantized)
    aligned = k % 16 == 0 and w.data_ptr() % 16 == 0 and (quantizes or rows_aligned(a))
    problem = DenseGemmProblem(rows, 1, n, k, fmt, rule != "given" and not quantizes, aligned)
    roomy = out.data_ptr() % 16 == 0 and out.stride(0) % 16 == 0 and out.stride(0) >= n
    if config is None and residual is None and roomy and roles_reason(problem, arch_of(a.device)) is None:
        return None, quantized, sum(quantized)
    cfg = choose(op, problem, a.device, config)
    return cfg, quantized, sum(quantized) + part_bytes(cfg, rows, n, k)


def check_workspace(op: str, workspace: torch.Tensor, need: int) -> None:
    """Raise ValueError unless `workspace` has `need` bytes and starts at a multiple of 16."""
    if workspace.numel() < need:
        raise ValueError(f"{op}: workspace has {workspace.numel()} bytes, this call needs {need}; make it with dense_gemm_workspace")
    if workspace.data_ptr() % 16:
        raise ValueError(f"{op}: workspace must start at a multiple of 16 bytes, its address is {workspace.data_ptr()}")


def carve(workspace: torch.Tensor, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`shape` of `dtype` from byte `first` of a workspace on."""
    size = dtype.itemsize
    for s in shape:
        size *= s
    return workspace[first : first + size].view(dtype).view(shape)
