"""Argument checks. Each error names the op, the argument, what came and what is accepted; none reads the device."""

from collections.abc import Iterable

import torch

from moe_ops.core.arch import unsupported_reason
from moe_ops.core.formats import E4M3, QTensor, scale_shape

#: Not those of tracing, which have addresses of nothing.
_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter)


def _shape(t: torch.Tensor) -> str:
    return f"shape {tuple(t.shape)} with strides {tuple(t.stride())}"


def is_tensor(op: str, name: str, t: object) -> None:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(t).__name__}")


def dtype(op: str, name: str, t: torch.Tensor, allowed: Iterable[torch.dtype]) -> None:
    allowed = tuple(allowed)
    if t.dtype not in allowed:
        accepted = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{op}: {name} must be {accepted}, got {str(t.dtype).removeprefix('torch.')}")


def ndim(op: str, name: str, t: torch.Tensor, allowed: Iterable[int]) -> None:
    allowed = tuple(allowed)
    if t.dim() not in allowed:
        raise ValueError(f"{op}: {name} must be {' or '.join(f'{n}-D' for n in allowed)}, got {_shape(t)}")


def shape(op: str, name: str, t: torch.Tensor, wanted: tuple[int | None, ...]) -> None:
    """Each entry of `wanted` is a size, or None for any."""
    if t.dim() != len(wanted) or any(w is not None and w != s for w, s in zip(wanted, t.shape, strict=True)):
        pretty = "(" + ", ".join("*" if w is None else str(w) for w in wanted) + ")"
        raise ValueError(f"{op}: {name} must have shape {pretty}, got {_shape(t)}")


def last_stride_one(op: str, name: str, t: torch.Tensor) -> None:
    if t.dim() and t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"{op}: {name} must have last stride 1, got {_shape(t)}")


def contiguous(op: str, name: str, t: torch.Tensor) -> None:
    if not t.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, got {_shape(t)}")


def same_device(op: str, **tensors: torch.Tensor | None) -> torch.device:
    """All given tensors on one supported device; returns it."""
    first_name, device = "", None
    for name, t in tensors.items():
        if t is None:
            continue
        if device is None:
            first_name, device = name, t.device
        elif t.device != device:
            raise ValueError(f"{op}: {name} is on {t.device} but {first_name} is on {device}; all tensors must be on one device")
    if device is None:
        raise ValueError(f"{op}: no tensor given")
    if device.type != "cpu" and device.type != "meta":
        reason = unsupported_reason(device)
        if reason is not None:
            raise ValueError(f"{op}: {reason}")
    return device


def apart(op: str, out: torch.Tensor, **read: torch.Tensor | None) -> None:
    """`out` is no memory that other programs still read. Looked at where both are contiguous, and outside of tracing."""
    known = not torch.compiler.is_compiling() and type(out) in _WITH_MEMORY and out.is_contiguous()
    begin = out.data_ptr() if known else 0
    end = begin + out.nbytes if known else 0
    for name, t in read.items():
        if t is out:
            raise ValueError(f"{op}: out must not be {name}: other programs still read it")
        if t is not None and known:
            first = t.data_ptr()
            if first < end and begin < first + t.nbytes and t.is_contiguous():
                raise ValueError(f"{op}: out must not share memory with {name}: other programs still read it")


def no_grad(op: str, **tensors: torch.Tensor | None) -> None:
    """These ops have no backward; a result detached in silence would be worse than an error."""
    if not torch.is_grad_enabled():
        return
    for name, t in tensors.items():
        if t is not None and t.requires_grad:
            raise ValueError(f"{op}: {name} requires grad, and this op is for inference only: call it under torch.no_grad() or pass {name}.detach()")


def one_of(op: str, name: str, value: object, allowed: Iterable[object]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(repr(a) for a in allowed)}, got {value!r}")


def int_range(op: str, name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{op}: {name} must be between {low} and {high}, got {value}")


def qtensor(op: str, name: str, q: object) -> None:
    """A `QTensor` whose scales belong to its data in every layout whose shape says so: consumers index scales by the data's shape."""
    if not isinstance(q, QTensor):
        raise TypeError(f"{op}: {name} must be a QTensor, got {type(q).__name__}")
    is_tensor(op, f"{name}.data", q.data)
    is_tensor(op, f"{name}.scale", q.scale)
    dtype(op, f"{name}.data", q.data, (E4M3,))
    ndim(op, f"{name}.data", q.data, (2, 3))
    rows = q.data.shape[-2]
    if not (isinstance(q.segments, int) and q.segments >= 1) or rows % q.segments:
        raise ValueError(f"{op}: {name} has {rows} rows, which do not divide into segments = {q.segments!r}")
    if q.layout in ("row_major", "mn_major"):
        wanted = torch.float32 if q.scheme == "fp8_block" else torch.uint8
        if q.scale.dtype != wanted:
            raise TypeError(f"{op}: {name}.scale must be {wanted} for blocks {q.block}, got {q.scale.dtype}")
        shape(op, f"{name}.scale", q.scale, scale_shape(tuple(q.data.shape), q.block, q.segments))


def device_counts(op: str, name: str, t: torch.Tensor, numel: int | None = None) -> None:
    """Counts or offsets that kernels read on the device: contiguous int32, of `numel` entries where given."""
    is_tensor(op, name, t)
    dtype(op, name, t, (torch.int32,))
    if t.dim() > 1 or (numel is not None and t.numel() != numel):
        raise ValueError(f"{op}: {name} must be 1-D with {'any number of' if numel is None else numel} entries, got {_shape(t)}")
    contiguous(op, name, t)
