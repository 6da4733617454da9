"""Grouped GEMM over routed rows: out[r] = a[r] @ w[e(r)]^T, for FP8 block scaling, MXFP8 and plain 16-bit operands.

Rows are packed (offsets, 2-D) or masked ([E, capacity, K], counts). Counts live on the device alone: time follows the filled rows.
"""

import math
from typing import TYPE_CHECKING

import torch

from moe_ops.core import checks
from moe_ops.core.arch import arch_of
from moe_ops.core.formats import QTensor, as_bytes, as_e4m3, ceil_div
from moe_ops.core.numerics import decode_e8m0
from moe_ops.core.ops import in_full, register
from moe_ops.gemm.grouped_config import GroupedGemmConfig, GroupedGemmProblem, heuristic, hopper_kernel, hopper_operands, is_legal
from moe_ops.router.routing import check_routing

if TYPE_CHECKING:
    from moe_ops.router.routing import Routing

__all__ = ["grouped_gemm"]

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN_DTYPES = (torch.bfloat16, torch.float16)


def dequantized(data: torch.Tensor, scale: torch.Tensor | None, fmt: str, block_m: int, segments: int) -> torch.Tensor:
    """fp32 values of (.., M, K) data with row- or MN-major scales; block_m is the rows of one scale."""
    x = as_e4m3(data).float()
    if scale is None:
        return x
    m, k = x.shape[-2:]
    s = scale if fmt == "fp8_block" else decode_e8m0(scale)
    width = 128 if fmt == "fp8_block" else 32
    if block_m > 1:
        per = ceil_div(m // segments, block_m)
        parts = [s[..., i * per : (i + 1) * per, :].repeat_interleave(block_m, -2)[..., : m // segments, :] for i in range(segments)]
        s = torch.cat(parts, -2)
    return x * s.repeat_interleave(width, -1)[..., :k]


@in_full
def _ref_into(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None, offsets: torch.Tensor,
    order: torch.Tensor | None, top_k: int, fmt: str, segments: int, out: torch.Tensor,
) -> None:  # fmt: skip
    """The definition: fp32 products of the dequantized operands, expert by expert; rows that no expert owns stay untouched."""
    block_m = 128 if fmt == "fp8_block" else 1
    experts = w.shape[0]
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "grouped_gemm: the reference reads the counts on the host, which a CUDA graph cannot capture; impl 'triton' can be captured"
        )
    host = [int(v) for v in offsets.tolist()]
    for e in range(experts):
        if a.dim() == 3:
            filled = min(max(host[e], 0), a.shape[1])
            if filled == 0:
                continue
            x = dequantized(a[e, :filled], None if a_scale is None else a_scale[e, :filled], fmt, 1, 1)
            target = out[e, :filled]
        else:
            rows = out.shape[0]
            low = min(max(host[e], 0), rows)
            high = min(host[e + 1], rows)
            if high <= low:
                continue
            index: slice | torch.Tensor = slice(low, high)
            if order is not None:
                index = (order[low:high].long() // top_k).clamp(0, a.shape[0] - 1)
            x = dequantized(a[index], None if a_scale is None else a_scale[index], fmt, 1, 1)
            target = out[low:high]
        y = x @ dequantized(w[e], None if w_scale is None else w_scale[e], fmt, block_m, segments).T
        if bias is not None:
            y += bias[e].float()
        target.copy_(y)


def grouped_gemm_ref(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None, offsets: torch.Tensor,
    order: torch.Tensor | None, top_k: int, fmt: str, segments: int, out_dtype: torch.dtype, config: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Reference of `grouped_gemm`, any device (reads the counts on the host)."""
    out = a.new_empty(_out_shape(a, w, order), dtype=out_dtype)
    _ref_into(a, a_scale, w, w_scale, bias, offsets, order, top_k, fmt, segments, out)
    return out


def _out_shape(a: torch.Tensor, w: torch.Tensor, order: torch.Tensor | None) -> tuple[int, ...]:
    if a.dim() == 3:
        return (a.shape[0], a.shape[1], w.shape[1])
    return (a.shape[0] if order is None else order.shape[0], w.shape[1])


def grouped_gemm_into(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None, offsets: torch.Tensor,
    order: torch.Tensor | None, top_k: int, fmt: str, segments: int, out: torch.Tensor, config: list[int] | None = None,
    early: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel on `out`; allocates nothing. Arguments as the op's; see `grouped_gemm`, and for the last `grouped_hopper.launch_hopper`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from moe_ops.core.launch import launch
    from moe_ops.gemm.grouped_kernel import _grouped_gemm_kernel

    experts, n, k = w.shape
    masked = a.dim() == 3
    rows = out.shape[0] * out.shape[1] if masked else out.shape[0]
    if rows == 0 or experts == 0 or n == 0:
        return
    arch = arch_of(a.device)
    problem = GroupedGemmProblem(rows, experts, n, k, fmt)
    if config is None and a_scale is not None and w_scale is not None:
        kernel = hopper_kernel(problem, segments, masked, arch)
        if kernel is not None and hopper_operands(a, a_scale, w):
            if kernel == "stream":
                from moe_ops.gemm.grouped_stream import launch_stream

                launch_stream("grouped_gemm", a, a_scale, w, w_scale, bias, out, None, offsets, order, top_k, early=early)
            else:
                from moe_ops.gemm.grouped_hopper import launch_hopper

                launch_hopper("grouped_gemm", a, a_scale, w, w_scale, bias, out, None, offsets, order, top_k, early=early)
            return
    cfg = heuristic(problem, arch) if config is None else GroupedGemmConfig.of_ints(config)
    reason = None if config is None else is_legal(cfg, problem, arch)
    if reason is not None:
        raise ValueError(f"grouped_gemm: config {cfg} cannot run here: {reason}")
    if fmt == "mxfp8" and arch.has_block_scaled_mma:
        kind = "mxfp8_native"
    else:
        kind = fmt
    if fmt != "plain":
        a, w = as_e4m3(a), as_e4m3(w)
    size = w.element_size()
    tma = arch.has_tma and k * size % 16 == 0 and w.data_ptr() % 16 == 0
    operand = TensorDescriptor.from_tensor(w.view(experts * n, k), [cfg.block_n, cfg.block_k]) if tma else w
    n_tiles = segments * ceil_div(n // segments, cfg.block_n)
    tiles = (min(experts, rows) + rows // cfg.block_m) * n_tiles
    grid = tiles if cfg.programs == 0 else min(tiles, arch.sms * cfg.programs)
    stride_sae, stride_sam, stride_sak = 0, 0, 0
    if a_scale is not None:
        stride_sae, (stride_sam, stride_sak) = (a_scale.stride(0) if masked else 0), a_scale.stride()[-2:]
    launch(
        "grouped_gemm", _grouped_gemm_kernel, (grid,),
        a, a_scale, operand, w_scale, bias, out, offsets, order,
        rows, a.shape[0], a.shape[1] if masked else 0, a.stride(-2), a.stride(0) if masked else 0, stride_sam, stride_sak, stride_sae,
        E=experts, N=n, K=k, SEGMENTS=segments, TOP_K=top_k, FORMAT=kind, MASKED=masked,
        BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, BLOCK_K=cfg.block_k, SWAP=cfg.swap, TMA=tma, E2=1 << (experts - 1).bit_length(),
        num_warps=cfg.warps, num_stages=cfg.stages, enable_fp_fusion=True,
    )  # fmt: skip


def _grouped_gemm_triton(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None, offsets: torch.Tensor,
    order: torch.Tensor | None, top_k: int, fmt: str, segments: int, out_dtype: torch.dtype, config: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    out = a.new_empty(_out_shape(a, w, order), dtype=out_dtype)
    grouped_gemm_into(a, a_scale, w, w_scale, bias, offsets, order, top_k, fmt, segments, out, config)
    return out


def _fake(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None, offsets: torch.Tensor,
    order: torch.Tensor | None, top_k: int, fmt: str, segments: int, out_dtype: torch.dtype, config: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    return a.new_empty(_out_shape(a, w, order), dtype=out_dtype)


_op = register("grouped_gemm", cuda=_grouped_gemm_triton, cpu=grouped_gemm_ref, fake=_fake)


def _out_cpu(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None, offsets: torch.Tensor,
    order: torch.Tensor | None, top_k: int, fmt: str, segments: int, out: torch.Tensor, config: list[int] | None = None,
) -> None:  # fmt: skip
    _ref_into(a, a_scale, w, w_scale, bias, offsets, order, top_k, fmt, segments, out)


def _out_fake(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, bias: torch.Tensor | None, offsets: torch.Tensor,
    order: torch.Tensor | None, top_k: int, fmt: str, segments: int, out: torch.Tensor, config: list[int] | None = None,
) -> None:  # fmt: skip
    return None


_out_op = register("grouped_gemm_out", cuda=grouped_gemm_into, cpu=_out_cpu, fake=_out_fake, mutates=("out",))


def check_operands(op: str, a: "QTensor | torch.Tensor", w: "QTensor | torch.Tensor", tiled: bool = False) -> str:
    """The common format of two operands ("plain" for 16-bit tensors), or a clear error; `tiled`: w's scales may be swizzle_32x4x4."""
    for name, t in (("a", a), ("w", w)):
        if isinstance(t, QTensor):
            checks.qtensor(op, name, t)
        elif not isinstance(t, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a QTensor or a torch.Tensor, got {type(t).__name__}")
    if isinstance(a, QTensor) != isinstance(w, QTensor):
        raise TypeError(f"{op}: a and w must both be QTensor or both be 16-bit tensors, got {type(a).__name__} and {type(w).__name__}")
    if isinstance(a, QTensor) and isinstance(w, QTensor):
        if a.format is not w.format:
            raise ValueError(f"{op}: a is {a.format.name} and w is {w.format.name}; both must have one format")
        wide = a.scheme == "fp8_block" and w.scheme == "fp8_block"  # fp8_block, or mxfp8 folded on both sides
        act, weight = ((1, 128), (128, 128)) if wide else (a.format.act_block, w.format.weight_block)
        if a.block != act:
            raise ValueError(f"{op}: a must have activation blocks {act}, got {a.block}; use quantize, not quantize_weight")
        if w.block != weight:
            raise ValueError(f"{op}: w must have weight blocks {weight}, got {w.block}; use quantize_weight")
        for name, q in (("a", a), ("w", w)):
            if tiled and name == "w" and q.layout == "swizzle_32x4x4":
                continue
            if q.layout not in ("row_major", "mn_major") or (name == "w" and q.layout != "row_major"):
                wanted = "row_major or mn_major" if name == "a" else "row_major"
                raise ValueError(f"{op}: scales of {name} must be {wanted}, got {q.layout}")
        return w.scheme
    assert isinstance(a, torch.Tensor) and isinstance(w, torch.Tensor)  # for the type checker: said above
    checks.dtype(op, "a", a, _PLAIN_DTYPES)
    if w.dtype != a.dtype:
        raise TypeError(f"{op}: w must have a's dtype {a.dtype}, got {w.dtype}")
    return "plain"


def grouped_gemm(
    a: "QTensor | torch.Tensor",
    w: "QTensor | torch.Tensor",
    routing: "Routing | torch.Tensor",
    *,
    gather: bool = False,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    config: GroupedGemmConfig | None = None,
) -> torch.Tensor:
    """One GEMM for each expert over that expert's rows: out[r] = a[r] @ w[e(r)]^T (+ bias[e(r)]).

    Args:
        a: activations, a QTensor with activation blocks, or bf16 / fp16; last stride 1.
            Packed (R, K): rows of expert e are offsets[e] .. offsets[e + 1]. With `gather`, (T, K): row r is read from token order[r] // k.
            Masked (E, capacity, K): the first counts[e] rows of each expert.
        w: weights (E, N, K), contiguous, a QTensor with weight blocks of a's format (for "cutlass" on SM100 with scales in swizzle_32x4x4 too, which
            spares a conversion in each call), or a's 16-bit dtype.
        routing: a `Routing`; or int32 offsets (E + 1,) for packed rows; or int32 counts (E,) for masked rows. Read on the device.
        gather: read rows of the unpermuted a through routing.order (a `Routing` is needed).
        bias: (E, N) fp32, bf16 or fp16, or None.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; ignored when `out` is given.
        out: contiguous tensor of the result's shape that receives it; then the call allocates nothing.
        impl: "triton", "deep_gemm" (leads the rows into that library's layout and back; allocates), "cutlass" (reads rows as they lie, gathered
            ones after a copy; allocates; compiled on first use), "torch" (`torch._grouped_mm` where it fits, else the reference, which reads counts
            on the host), or None: "triton" on CUDA and the reference on a CPU. `moe_ops.explain` tells who can.
        config: pins the kernel's config, so that calls of other shapes give the same bits.

    Returns:
        (R, N) or (E, capacity, N) of out_dtype (`out` if given). Rows that no expert owns are undefined (untouched in `out`; "deep_gemm" on masked
        rows of whole 128s with mn_major scales works in place and may overwrite those up to the next multiple of 128 past a count).

    Numerics: fp32 accumulation; fp8_block promotes every 128 of K with both scales, mxfp8 every 32 (SM100 and newer: the block-scaled
        instruction). Same call, same bits. Counts and order are clamped: nothing is read or written out of bounds whatever they hold.

    Raises:
        TypeError: operands of mixed kinds or of another dtype.
        ValueError: shapes, strides, devices or formats that do not fit, an impl that is unknown or cannot run this (its reason is the text),
            an illegal config, or a requires_grad operand.
        RuntimeError: a first compile under graph capture or after `freeze()`.

    Cost: 2 * rows * N * K flops; E_active * N * K + rows * (K + N * out bytes) bytes.
    """
    op = "grouped_gemm"
    fmt = check_operands(op, a, w, tiled=impl == "cutlass")
    a_data, a_scale = (a.data, a.scale) if isinstance(a, QTensor) else (a, None)
    w_data, w_scale = (w.data, w.scale) if isinstance(w, QTensor) else (w, None)
    segments = w.segments if isinstance(w, QTensor) else 1
    checks.ndim(op, "a", a_data, (2, 3))
    checks.ndim(op, "w", w_data, (3,))
    experts, n, k = w_data.shape
    if a_data.shape[-1] != k:
        raise ValueError(f"{op}: a has K = {a_data.shape[-1]} and w has K = {k}; they must be equal")
    if k == 0 or (fmt == "mxfp8" and k % 32):
        raise ValueError(f"{op}: {'mxfp8 needs K % 32 == 0' if k else 'K must not be 0'}, got K = {k}")
    checks.last_stride_one(op, "a", a_data)
    checks.contiguous(op, "w", w_data)
    if w_scale is not None:
        checks.contiguous(op, "w.scale", w_scale)
    order, top_k = None, 1
    if isinstance(routing, torch.Tensor):
        offsets = routing
        if gather:
            raise ValueError(f"{op}: gather needs a Routing (its order maps rows to tokens), got a tensor")
        masked = a_data.dim() == 3
        what = "routing (counts of masked rows)" if masked else "routing (offsets of packed rows)"
        checks.device_counts(op, what, offsets, experts if masked else experts + 1)
    else:
        check_routing(op, routing)
        if routing.num_local_experts != experts:
            raise ValueError(f"{op}: routing has {routing.num_local_experts} local experts and w has {experts}; they must be equal")
        offsets = routing.counts if a_data.dim() == 3 else routing.offsets
        if gather:
            if a_data.dim() != 2:
                raise ValueError(f"{op}: gather needs a 2-D a (tokens), got shape {tuple(a_data.shape)}")
            order, top_k = routing.order, routing.top_k
            if a_data.shape[0] != routing.num_tokens:
                raise ValueError(f"{op}: gather needs one row of a for each of the {routing.num_tokens} tokens of routing, got {a_data.shape[0]}")
        elif a_data.dim() == 2 and a_data.shape[0] < routing.order.shape[0]:
            raise ValueError(
                f"{op}: packed a must have a row for each of the {routing.order.shape[0]} entries of routing.order, got {a_data.shape[0]}; "
                f"gather=True reads the rows of the {routing.num_tokens} tokens in place"
            )
    if a_data.dim() == 3 and a_data.shape[0] != experts:
        raise ValueError(f"{op}: masked a has {a_data.shape[0]} experts and w has {experts}; they must be equal")
    if bias is not None:
        checks.is_tensor(op, "bias", bias)
        checks.shape(op, "bias", bias, (experts, n))
        checks.dtype(op, "bias", bias, (torch.float32, torch.bfloat16, torch.float16))
        checks.contiguous(op, "bias", bias)
    checks.one_of(op, "out_dtype", out_dtype, _OUT_DTYPES)
    checks.same_device(op, a=a_data, a_scale=a_scale, w=w_data, w_scale=w_scale, bias=bias, routing=offsets)
    checks.no_grad(op, a=a_data, a_scale=a_scale, w=w_data, w_scale=w_scale, bias=bias)
    if impl == "triton" and not a_data.is_cuda:
        raise ValueError(f"{op}: impl 'triton' needs CUDA tensors, got {a_data.device}")
    args = (as_bytes(a_data), a_scale, as_bytes(w_data), w_scale, bias, offsets, order, top_k, fmt, segments)
    if config is not None:
        if not isinstance(config, GroupedGemmConfig):
            raise TypeError(f"{op}: config must be a GroupedGemmConfig, got {type(config).__name__}")
        out_rows = a_data.shape[0] * a_data.shape[1] if a_data.dim() == 3 else _out_shape(a_data, w_data, order)[0]
        reason = is_legal(config, GroupedGemmProblem(out_rows, experts, n, k, fmt), arch_of(a_data.device))
        if reason is not None:
            raise ValueError(f"{op}: config {config} cannot run here: {reason}")
    pinned = config.ints() if config is not None else None
    shape = _out_shape(a_data, w_data, order)
    if out is not None:
        checks.is_tensor(op, "out", out)
        checks.no_grad(op, out=out)
        checks.apart(op, out, a=a_data, w=w_data)
        checks.shape(op, "out", out, shape)
        checks.dtype(op, "out", out, _OUT_DTYPES)
        checks.contiguous(op, "out", out)
        checks.same_device(op, a=a_data, out=out)
        out_dtype = out.dtype
    if impl is not None and impl != "triton":
        from moe_ops.gemm.grouped_impls import run_named
        from moe_ops.gemm.registry import Problem

        rows, layout = math.prod(shape[:-1]), a.layout if isinstance(a, QTensor) else "row_major"
        flags = {"masked": a_data.dim() == 3, "gather": gather, "bias": bias is not None, "given_out": out is not None, "pinned": config is not None}
        problem = Problem(op, fmt, rows, n, k, experts, out_dtype, a_data.dtype, segments=segments, layout=layout, **flags)
        return run_named(impl, problem, args, out_dtype, out, shape)
    if out is None:
        return _op(*args, out_dtype, pinned)
    _out_op(*args, out, pinned)
    return out
