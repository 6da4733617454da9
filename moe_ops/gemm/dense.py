"""Dense GEMM, split over K where that fills the machine: out = a @ w^T (+ bias + residual), for FP8 block scaling, MXFP8 and 16-bit operands.

For the linear layers around the experts: at few rows, where time is the reading of the weights, and on SM90 in fp8_block at many.
"""

import torch

from moe_ops.core import checks
from moe_ops.core.arch import arch_of
from moe_ops.core.formats import QTensor, as_bytes, as_e4m3, ceil_div
from moe_ops.core.ops import in_full, register
from moe_ops.gemm.dense_config import DenseGemmConfig, DenseGemmProblem, choose, heuristic, part_bytes, quantizes_inside
from moe_ops.gemm.dense_workspace import carve, check_workspace, needs, quantized_bytes
from moe_ops.gemm.grouped import check_operands, dequantized
from moe_ops.quant.fold import is_folded
from moe_ops.quant.rows import rows_ref
from moe_ops.quant.scale_storage import padded_rows

__all__ = ["dense_gemm", "dense_gemm_workspace"]

IMPLS = ("triton", "deep_gemm", "cutlass", "torch")
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN_DTYPES = (torch.bfloat16, torch.float16)


def product_ref(a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, fmt: str, rule: str) -> torch.Tensor:
    """The definition of the product, fp32: a (.., M, K) quantized by `rule` unless that is "given", times w (.., N, K) transposed."""
    if rule != "given":
        a, a_scale = rows_ref(a, fmt, rule)
    x = dequantized(a, a_scale, fmt, 1, 1)
    return x @ dequantized(w, w_scale, fmt, 128 if fmt == "fp8_block" else 1, 1).mT


@in_full
def dense_gemm_ref(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, fmt: str, rule: str, out_dtype: torch.dtype, config: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Reference of `dense_gemm`, any device."""
    y = product_ref(a, a_scale, w, w_scale, fmt, rule)
    if bias is not None:
        y += bias.float()
    if residual is not None:
        y += residual.float()
    return y.to(out_dtype)


def launch_dense(
    op: str, a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor, part: torch.Tensor | None, fmt: str, rule: str, cfg: DenseGemmConfig,
) -> None:  # fmt: skip
    """Launch the kernels; allocates nothing.

    Args:
        op: name for errors.
        a: (B, M, K), e4m3 bits or 16-bit, last stride 1; quantized in the kernel by `rule` unless that is "given".
        a_scale: (B, M, K / block), or None.
        w: (B, N, K), contiguous.
        w_scale: contiguous, or None.
        bias: (N,) or None.
        residual: (M, N), last stride 1, or None.
        out: (B, M, N), last stride 1.
        part: contiguous fp32 of at least split * B * M * N elements, or None without a split.
        fmt: how scales are read: "fp8_block", "mxfp8" or "plain".
        rule: "given" or a rule of `quant.row_tiles.encode`.
        cfg: a legal config.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from moe_ops.core.launch import launch
    from moe_ops.gemm.dense_kernel import _dense_gemm_kernel, _split_reduce_kernel

    if cfg.programs:
        raise ValueError(f"{op}: config {cfg} is for the kernel with programs")
    batch, n, k = w.shape
    rows = a.shape[1]
    if rows == 0 or batch == 0 or n == 0:
        return
    arch = arch_of(a.device)
    if fmt != "plain":
        a, w = as_e4m3(a), as_e4m3(w)
    tma = arch.has_tma and k * w.element_size() % 16 == 0 and w.data_ptr() % 16 == 0
    operand = TensorDescriptor(w, [batch * n, k], [k, 1], [cfg.block_n, cfg.block_k]) if tma else w
    scale_strides = (0, 0, 0) if a_scale is None else a_scale.stride()
    stride_rm = 0 if residual is None else residual.stride(0)
    # one batch: its distance is M times something, and every other M could compile anew
    stride_ab, stride_ob = (a.stride(0), out.stride(0)) if batch > 1 else (0, 0)
    split = cfg.split > 1
    launch(
        op, _dense_gemm_kernel, (ceil_div(rows, cfg.block_m) * ceil_div(n, cfg.block_n) * cfg.split * batch,),
        a, a_scale, operand, w_scale, None if split else bias, None if split else residual, out, part if split else None,
        rows, stride_ab, a.stride(1), *scale_strides, stride_rm, stride_ob, out.stride(1),
        BATCH=batch, N=n, K=k, FORMAT="mxfp8_native" if fmt == "mxfp8" and arch.has_block_scaled_mma else fmt, RULE=rule,
        BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, BLOCK_K=cfg.block_k, SPLIT=cfg.split, SWAP=cfg.swap, TMA=tma,
        num_warps=cfg.warps, num_stages=cfg.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if split:
        launch(
            op, _split_reduce_kernel, (batch * rows * ceil_div(n, 256),), part, bias, residual, out, rows, stride_rm, stride_ob, out.stride(1),
            BATCH=batch, N=n, SPLIT=cfg.split, BLOCK=256, num_warps=2, enable_fp_fusion=True,
        )  # fmt: skip


def dense_gemm_into(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, fmt: str, rule: str, out: torch.Tensor, workspace: torch.Tensor | None = None, config: list[int] | None = None,
) -> None:  # fmt: skip
    """Launch the kernels on `out`; allocates nothing where a workspace is given. Arguments as the op's, see `dense_gemm`."""
    op = "dense_gemm"
    rows, k = a.shape
    cfg, quantized, need = needs(op, a, w, fmt, rule, config, residual, out)
    quantizes = any(quantized)
    if workspace is None:
        workspace = a.new_empty(need, dtype=torch.uint8)
    else:
        check_workspace(op, workspace, need)
    if quantizes:
        from moe_ops.quant.quantize import quantize_into

        data = carve(workspace, 0, (rows, k), torch.uint8)
        layout, blocks, padded = "row_major", ceil_div(k, 128), padded_rows(rows, "mn_major")
        if fmt == "fp8_block" and rows <= 128:  # a step's scales side by side: far apart, 128 of them take the Gluon kernel longer than its boxes
            layout, scale = "mn_major", carve(workspace, quantized[0], (blocks, padded), torch.float32).T[:rows]
        elif fmt == "fp8_block":
            scale = carve(workspace, quantized[0], (rows, blocks), torch.float32)
        else:
            scale = carve(workspace, quantized[0], (rows, k // 32), torch.uint8)
        quantize_into(a, data, scale, None, fmt, rule, layout)
        a, a_scale, rule = data, scale, "given"
    if cfg is None:
        from moe_ops.gemm.grouped_hopper import launch_hopper

        if a_scale is None or w_scale is None:
            raise ValueError(f"{op}: quantized operands need scales")
        added = None if bias is None else bias[None]
        launch_hopper(op, a, a_scale, w[None], w_scale, added, out, None, None, None, 1, early=quantizes)
        return
    part = workspace[sum(quantized) : need].view(torch.float32) if need > sum(quantized) else None
    if cfg.programs:
        from moe_ops.gemm.dense_stream import launch_dense_stream

        if a_scale is None or w_scale is None:
            raise ValueError(f"{op}: quantized operands need scales")
        if rows:
            launch_dense_stream(op, a, a_scale, w, w_scale, bias, residual, out, part, cfg, early=quantizes)
        return
    launch_dense(
        op, a[None], None if a_scale is None else a_scale[None], w[None], w_scale, bias, residual, out[None], part, fmt, rule, cfg
    )  # fmt: skip


def _dense_gemm_triton(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, fmt: str, rule: str, out_dtype: torch.dtype, config: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    out = a.new_empty((a.shape[0], w.shape[0]), dtype=out_dtype)
    dense_gemm_into(a, a_scale, w, w_scale, bias, residual, fmt, rule, out, None, config)
    return out


def _fake(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, fmt: str, rule: str, out_dtype: torch.dtype, config: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    return a.new_empty((a.shape[0], w.shape[0]), dtype=out_dtype)


_op = register("dense_gemm", cuda=_dense_gemm_triton, cpu=dense_gemm_ref, fake=_fake)


def _out_ref(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, fmt: str, rule: str, out: torch.Tensor, workspace: torch.Tensor | None = None, config: list[int] | None = None,
) -> None:  # fmt: skip
    if workspace is not None:  # used by none, and yet an error here as on a GPU
        check_workspace("dense_gemm", workspace, needs("dense_gemm", a, w, fmt, rule, config, residual, out)[2])
    out.copy_(dense_gemm_ref(a, a_scale, w, w_scale, bias, residual, fmt, rule, out.dtype))


def _out_fake(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, fmt: str, rule: str, out: torch.Tensor, workspace: torch.Tensor | None = None, config: list[int] | None = None,
) -> None:  # fmt: skip
    return None


_out_op = register("dense_gemm_out", cuda=dense_gemm_into, cpu=_out_ref, fake=_out_fake, mutates=("out", "workspace"))


def check_dense(op: str, a: "QTensor | torch.Tensor", w: "QTensor | torch.Tensor") -> tuple[str, str]:
    """(format, rule) of two operands: the rule is "given" unless a 16-bit a has to be quantized for a quantized w."""
    if not (isinstance(w, QTensor) and isinstance(a, torch.Tensor)):
        return check_operands(op, a, w), "given"
    checks.qtensor(op, "w", w)
    checks.dtype(op, "a", a, PLAIN_DTYPES)
    if w.block not in (w.format.weight_block, (128, 128)):
        raise ValueError(f"{op}: w must have weight blocks {w.format.weight_block}, got {w.block}; use quantize_weight")
    if w.layout != "row_major":
        raise ValueError(f"{op}: scales of w must be row_major, got {w.layout}")
    return w.scheme, "folded" if is_folded(w) else w.format.rules[0]


def check_product(op: str, a: "QTensor | torch.Tensor", w: "QTensor | torch.Tensor", fmt: str, impl: str | None) -> None:
    """What `dense_gemm` and `bmm` demand of K, strides, segments, devices, gradients and impl alike."""
    a_data, a_scale = (a.data, a.scale) if isinstance(a, QTensor) else (a, None)
    w_data, w_scale = (w.data, w.scale) if isinstance(w, QTensor) else (w, None)
    n, k = w_data.shape[-2:]
    if a_data.shape[-1] != k:
        raise ValueError(f"{op}: a has K = {a_data.shape[-1]} and w has K = {k}; they must be equal")
    if k == 0 or (fmt == "mxfp8" and k % 32):
        raise ValueError(f"{op}: {'mxfp8 needs K % 32 == 0' if k else 'K must not be 0'}, got K = {k}")
    if isinstance(w, QTensor) and w.segments > 1 and fmt == "fp8_block" and (n // w.segments) % 128:
        raise ValueError(f"{op}: w has segments = {w.segments} of {n // w.segments} rows; they must be multiples of 128 here")
    checks.last_stride_one(op, "a", a_data)
    checks.contiguous(op, "w", w_data)
    if w_scale is not None:
        checks.contiguous(op, "w.scale", w_scale)
    checks.same_device(op, a=a_data, a_scale=a_scale, w=w_data, w_scale=w_scale)
    checks.no_grad(op, a=a_data, a_scale=a_scale, w=w_data, w_scale=w_scale)
    if impl is not None:
        checks.one_of(op, "impl", impl, IMPLS)
    if impl == "triton" and not a_data.is_cuda:
        raise ValueError(f"{op}: impl 'triton' needs CUDA tensors, got {a_data.device}")


def check_config(op: str, config: DenseGemmConfig | None, problem: DenseGemmProblem, device: torch.device) -> list[int] | None:
    """The config as it crosses the op boundary, or an error that says why it cannot run."""
    if config is None:
        return None
    if not isinstance(config, DenseGemmConfig):
        raise TypeError(f"{op}: config must be a DenseGemmConfig, got {type(config).__name__}")
    choose(op, problem, device, config.ints())
    return config.ints()


def check_out(op: str, out: torch.Tensor, shape: tuple[int, ...], a: torch.Tensor, w: torch.Tensor) -> None:
    """What an output demands: shape, dtype, last stride 1, memory of its own for each element, other than the operands', a's device, no gradient."""
    checks.is_tensor(op, "out", out)
    checks.no_grad(op, out=out)
    checks.shape(op, "out", out, shape)
    checks.dtype(op, "out", out, OUT_DTYPES)
    checks.last_stride_one(op, "out", out)
    reach = 0  # of the dimensions with smaller strides
    for stride, size in () if torch.compiler.is_compiling() else sorted(zip(out.stride(), out.shape, strict=True)):  # would pin M
        if size > 1:
            if stride <= reach:
                raise ValueError(f"{op}: out must not be expanded or overlap itself, got shape {tuple(out.shape)} with strides {out.stride()}")
            reach += (size - 1) * stride
    checks.apart(op, out, a=a, w=w)
    checks.same_device(op, a=a, out=out)


def dense_gemm_workspace(rows: int, w: "QTensor | torch.Tensor", *, config: DenseGemmConfig | None = None) -> torch.Tensor:
    """Memory for every `dense_gemm` of up to `rows` rows with weights like `w`, whatever its activation: uint8, on w's device.

    Args:
        rows: largest M.
        w: the weight, or one of its shape and format.
        config: the config that the calls will pin, if they do.

    Raises:
        TypeError, ValueError: rows that are no count, or a w that is no 2-D tensor.
    """
    op = "dense_gemm_workspace"
    fmt, data = (w.scheme, w.data) if isinstance(w, QTensor) else ("plain", w)
    checks.int_range(op, "rows", rows, 0, 2**31 - 1)
    checks.is_tensor(op, "w", data)
    checks.ndim(op, "w", data, (2,))
    n, k = data.shape
    most, bucket = 0, 16
    while True:
        m = min(bucket, rows)
        quantized = sum(quantized_bytes(m, k, fmt)) if fmt != "plain" and not quantizes_inside(m, n) else 0
        for fused, aligned in ((False, False), (False, True), (True, True)):
            cfg = heuristic(DenseGemmProblem(m, 1, n, k, fmt, fused, aligned), arch_of(data.device)) if config is None else config
            most = max(most, quantized + part_bytes(cfg, m, n, k))
        if bucket >= rows:
            return data.new_empty(most, dtype=torch.uint8)
        bucket *= 2


def dense_gemm(
    a: "QTensor | torch.Tensor",
    w: "QTensor | torch.Tensor",
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
    config: DenseGemmConfig | None = None,
) -> torch.Tensor:
    """Dense GEMM: out = a @ w^T (+ bias + residual).

    Args:
        a: activations (M, K), last stride 1: a QTensor with activation blocks of w's format, w's 16-bit dtype, or bf16 / fp16 for a quantized w:
            then a is quantized inside the call by the format's default rule, inside the GEMM's kernel where M is at most 16 and N at most 1024.
        w: weights (N, K), contiguous: a QTensor with weight blocks (mxfp8 folded to 128x128 too), or bf16 / fp16.
        bias: (N,) fp32, bf16 or fp16, or None.
        residual: (M, N) fp32, bf16 or fp16, last stride 1, added in fp32, or None; may be `out`.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; ignored when `out` is given.
        out: (M, N), last stride 1, receives the result.
        workspace: from `moe_ops.gemm.dense.dense_gemm_workspace`, for calls with `out`: then nothing is allocated (but, once for
            a device, 4 MiB, and on Hopper from 65 rows on up to 3 MiB for each of two tile widths).
        impl: "triton", "deep_gemm" or "cutlass" (both allocate), "torch" (`torch._scaled_mm` where it fits, else the reference), or None, which
            takes "triton" on CUDA and the reference on a CPU. `moe_ops.explain` tells who can.
        config: pins the kernel's config, so that a row's bits do not depend on M.

    Returns:
        (M, N) of out_dtype (`out` if given).

    Numerics: fp32 accumulation; fp8_block promotes every 128 of K with both scales, mxfp8 every 32 (SM100 and newer: the block-scaled
        instruction). With a split, fp32 partials are added in a fixed order before bias, residual and rounding. Same call, same bits.

    Raises:
        TypeError: operands of kinds or dtypes that do not go together.
        ValueError: shapes, strides, devices or formats that do not fit, an impl that is unknown or cannot run this, an illegal config, a
            workspace that is too small or off 16 bytes, or an operand that requires grad.
        RuntimeError: a first compile under graph capture or after `freeze()`.

    Cost: 2 * M * N * K flops; N * K + M * (K + N * out bytes) bytes; a split writes and reads 4 * split * M * N more, mostly within the L2.
        One launch, one more with a split, one more to quantize where that is not done inside.
    """
    op = "dense_gemm"
    fmt, rule = check_dense(op, a, w)
    a_data, a_scale = (a.data, a.scale) if isinstance(a, QTensor) else (a, None)
    w_data, w_scale = (w.data, w.scale) if isinstance(w, QTensor) else (w, None)
    checks.ndim(op, "a", a_data, (2,))
    checks.ndim(op, "w", w_data, (2,))
    check_product(op, a, w, fmt, impl)
    rows, n, k = a_data.shape[0], *w_data.shape
    for name, t, shape in (("bias", bias, (n,)), ("residual", residual, (rows, n))):
        if t is not None:
            checks.is_tensor(op, name, t)
            checks.shape(op, name, t, shape)
            checks.dtype(op, name, t, OUT_DTYPES)
            checks.last_stride_one(op, name, t)
    if workspace is not None:
        if out is None:
            raise ValueError(f"{op}: workspace is for calls with out")
        checks.is_tensor(op, "workspace", workspace)
        checks.dtype(op, "workspace", workspace, (torch.uint8,))
        checks.ndim(op, "workspace", workspace, (1,))
        checks.contiguous(op, "workspace", workspace)
    checks.same_device(op, a=a_data, bias=bias, residual=residual, workspace=workspace)
    checks.no_grad(op, bias=bias, residual=residual)
    checks.one_of(op, "out_dtype", out_dtype, OUT_DTYPES)
    pinned = None
    if config is not None:
        pinned = check_config(op, config, DenseGemmProblem(rows, 1, n, k, fmt, rule != "given" and quantizes_inside(rows, n), True), a_data.device)
    args = (as_bytes(a_data), a_scale, as_bytes(w_data), w_scale, bias, residual, fmt, rule)
    if out is not None:
        check_out(op, out, (rows, n), a_data, w_data)
        if residual is not None and residual is not out and not torch.compiler.is_compiling():
            if residual.dtype != out.dtype or residual.data_ptr() != out.data_ptr():
                checks.apart(op, out, residual=residual)
        out_dtype = out.dtype
    if impl is not None and impl != "triton":
        from moe_ops.gemm.dense_impls import run_named
        from moe_ops.gemm.registry import Problem

        segments, layout = (w.segments if isinstance(w, QTensor) else 1), (a.layout if isinstance(a, QTensor) else "row_major")
        added = bias is not None or residual is not None
        flags = {"bias": added, "given_out": out is not None, "pinned": config is not None, "unquantized": rule != "given"}
        problem = Problem(op, fmt, rows, n, k, 1, out_dtype, a_data.dtype, segments=segments, layout=layout, **flags)
        return run_named(impl, problem, args, out_dtype, out)
    if out is None:
        return _op(*args, out_dtype, pinned)
    _out_op(*args, out, workspace, pinned)
    return out
