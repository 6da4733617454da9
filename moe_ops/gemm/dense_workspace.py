"""The check of a workspace that a call on the CPU makes, which uses none: what is an error on a GPU is one there too."""

import torch

from moe_ops.gemm.dense import _quantized_bytes, choose, rows_aligned
from moe_ops.gemm.dense_config import DenseGemmProblem, part_bytes, quantizes_inside


def check_workspace(
    workspace: torch.Tensor, a: torch.Tensor, w: torch.Tensor, fmt: str, rule: str, config: list[int] | None
) -> None:  # fmt: skip
    """Arguments as of `dense_gemm_into`, whose needs and words these are.

    Raises:
        ValueError: a workspace that is too small, or off a multiple of 16 bytes.
    """
    op, (rows, k), n = "dense_gemm", a.shape, w.shape[0]
    quantizes = rule != "given" and not quantizes_inside(rows, n)
    aligned = k % 16 == 0 and w.data_ptr() % 16 == 0 and (quantizes or rows_aligned(a))
    cfg = choose(op, DenseGemmProblem(rows, 1, n, k, fmt, rule != "given" and not quantizes, aligned), a.device, config)
    need = (sum(_quantized_bytes(rows, k, fmt)) if quantizes else 0) + part_bytes(cfg, rows, n, k)
    if workspace.numel() < need:
        raise ValueError(f"{op}: workspace has {workspace.numel()} bytes, this call needs {need}; make it with dense_gemm_workspace")
    if workspace.data_ptr() % 16:
        raise ValueError(f"{op}: workspace must start at a multiple of 16 bytes, its address is {workspace.data_ptr()}")
