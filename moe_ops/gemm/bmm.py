"""Batched GEMM over heads, in the layouts of attention: out[t, h] = a[t, h] @ w[h]^T, for the projections of absorbed MLA.

    k_b_proj   q_nope (T, heads, 128)  x  w (heads, 512, 128)  ->  (T, heads, 512)
    v_b_proj   latent (T, heads, 512)  x  w (heads, 128, 512)  ->  (T, heads, 128)

Heads are a stride, never a transposed copy. On Hopper these two shapes have kernels of their own (bmm_few.py, bmm_hopper.py),
which take others of whole 128s too; the rest runs in those of `dense_gemm`, with one batch a head.
"""

import torch

from moe_ops.core import checks
from moe_ops.core.arch import arch_of
from moe_ops.core.formats import QTensor, as_bytes
from moe_ops.core.ops import in_full, register
from moe_ops.gemm.bmm_config import few_parts, kernel_for
from moe_ops.gemm.dense import OUT_DTYPES, check_config, check_dense, check_out, check_product, launch_dense, product_ref
from moe_ops.gemm.dense_config import DenseGemmConfig, DenseGemmProblem, choose

__all__ = ["bmm"]


@in_full
def bmm_ref(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, fmt: str, rule: str, out_dtype: torch.dtype,
    config: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Reference of `bmm`, any device: a (T, heads, K), w (heads, N, K) -> (T, heads, N)."""
    scale = None if a_scale is None else a_scale.transpose(0, 1)
    y = product_ref(a.transpose(0, 1).contiguous(), scale, w, w_scale, fmt, rule)
    return y.transpose(0, 1).to(out_dtype).contiguous()


def bmm_into(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, fmt: str, rule: str, out: torch.Tensor,
    config: list[int] | None = None,
) -> None:  # fmt: skip
    """Launch a kernel on `out`; allocates nothing without a split. Arguments as the op's, see `bmm`."""
    tokens, heads, k = a.shape
    n = w.shape[1]
    if config is None and w_scale is not None:
        arch = arch_of(a.device)
        kernel, view = kernel_for(a, w, fmt, arch)
        if kernel == "few":
            from moe_ops.gemm.bmm_few import launch_bmm_few

            launch_bmm_few(a, a_scale, w, w_scale, out, rule, few_parts(heads, n, arch))
            return
        if kernel == "ring":
            from moe_ops.gemm.bmm_hopper import launch_bmm_hopper

            launch_bmm_hopper(a, a_scale, w, w_scale, out, rule, view)
            return
    cfg = choose("bmm", DenseGemmProblem(tokens, heads, n, k, fmt, rule != "given"), a.device, config)
    part = a.new_empty((cfg.split, heads, tokens, n), dtype=torch.float32) if cfg.split > 1 else None
    scale = None if a_scale is None else a_scale.transpose(0, 1)
    launch_dense("bmm", a.transpose(0, 1), scale, w, w_scale, None, None, out.transpose(0, 1), part, fmt, rule, cfg)


def _bmm_triton(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, fmt: str, rule: str, out_dtype: torch.dtype,
    config: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    out = a.new_empty((a.shape[0], a.shape[1], w.shape[1]), dtype=out_dtype)
    bmm_into(a, a_scale, w, w_scale, fmt, rule, out, config)
    return out


def _fake(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, fmt: str, rule: str, out_dtype: torch.dtype,
    config: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    return a.new_empty((a.shape[0], a.shape[1], w.shape[1]), dtype=out_dtype)


_op = register("bmm", cuda=_bmm_triton, cpu=bmm_ref, fake=_fake)


def _out_ref(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, fmt: str, rule: str, out: torch.Tensor,
    config: list[int] | None = None,
) -> None:  # fmt: skip
    out.copy_(bmm_ref(a, a_scale, w, w_scale, fmt, rule, out.dtype))


def _out_fake(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, fmt: str, rule: str, out: torch.Tensor,
    config: list[int] | None = None,
) -> None:  # fmt: skip
    return None


_out_op = register("bmm_out", cuda=bmm_into, cpu=_out_ref, fake=_out_fake, mutates=("out",))


def bmm(
    a: "QTensor | torch.Tensor",
    w: "QTensor | torch.Tensor",
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    config: DenseGemmConfig | None = None,
) -> torch.Tensor:
    """One GEMM for each head: out[t, h] = a[t, h] @ w[h]^T.

    Args:
        a: activations (T, heads, K), any strides with last stride 1 (a slice of a wider head, or (heads, T, K) transposed): bf16 / fp16, quantized
            inside the kernel for a quantized w; or a QTensor with activation blocks of w's format.
        w: weights (heads, N, K), contiguous: a QTensor with weight blocks (mxfp8 folded to 128x128 too), or a's 16-bit dtype.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; ignored when `out` is given.
        out: (T, heads, N), any strides with last stride 1, receives the result; then the call allocates nothing but a split's partials
            (one head, or a `config` that splits).
        impl: "triton", "deep_gemm" (its fp8_einsum; allocates), "torch" (the reference) or None, which takes "triton" on CUDA and "torch" on a CPU.
            `moe_ops.explain` tells who can.
        config: pins the kernel's config, so that a token's bits do not depend on T.

    Returns:
        (T, heads, N) of out_dtype, contiguous (`out` if given).

    Numerics: as `dense_gemm`, head by head. Same call, same bits.

    Raises:
        TypeError: operands of kinds or dtypes that do not go together.
        ValueError: shapes, strides, devices or formats that do not fit, an impl that is unknown or cannot run this, an illegal config, or an
            operand that requires grad.
        RuntimeError: a first compile under graph capture or after `freeze()`.

    Cost: 2 * T * heads * N * K flops; heads * (N * K + T * (K * a bytes + N * out bytes)) bytes; one launch.
    """
    op = "bmm"
    fmt, rule = check_dense(op, a, w)
    a_data, a_scale = (a.data, a.scale) if isinstance(a, QTensor) else (a, None)
    w_data, w_scale = (w.data, w.scale) if isinstance(w, QTensor) else (w, None)
    checks.ndim(op, "a", a_data, (3,))
    checks.ndim(op, "w", w_data, (3,))
    check_product(op, a, w, fmt, impl)
    tokens, heads, k = a_data.shape
    if w_data.shape[0] != heads:
        raise ValueError(f"{op}: a has {heads} heads and w has {w_data.shape[0]}; they must be equal")
    n = w_data.shape[1]
    checks.one_of(op, "out_dtype", out_dtype, OUT_DTYPES)
    pinned = check_config(op, config, DenseGemmProblem(tokens, heads, n, k, fmt, rule != "given"), a_data.device) if config is not None else None
    args = (as_bytes(a_data), a_scale, as_bytes(w_data), w_scale, fmt, rule)
    if out is not None:
        check_out(op, out, (tokens, heads, n), a_data, w_data)
        out_dtype = out.dtype
    if impl is not None and impl != "triton":
        from moe_ops.gemm.bmm_impls import run_named
        from moe_ops.gemm.registry import Problem

        segments, layout = (w.segments if isinstance(w, QTensor) else 1), (a.layout if isinstance(a, QTensor) else "row_major")
        flags = {"given_out": out is not None, "pinned": config is not None, "unquantized": rule != "given"}
        problem = Problem(op, fmt, tokens, n, k, heads, out_dtype, a_data.dtype, segments=segments, layout=layout, **flags)
        return run_named(impl, problem, args, out_dtype, out)
    if out is None:
        return _op(*args, out_dtype, pinned)
    _out_op(*args, out, pinned)
    return out
