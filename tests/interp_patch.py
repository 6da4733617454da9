"""Correct casts and bf16 dots for Triton's CPU interpreter, applied by conftest.py before any kernel module is imported.

Unpatched (3.6.0 to 3.9.0), the interpreter casts fp32 to e4m3 wrongly (ties, subnormals, carry, NaN, overflow), truncates fp32 to bf16,
multiplies raw bits in a bf16 `tl.dot` and rounds the product in `tl.fma`. Patched, all bf16 patterns, two million random
floats and all ties are byte-equal to torch.
"""

import inspect
import threading
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TYPES = {
    tl.float32: (torch.float32, torch.int32),
    tl.float64: (torch.float64, torch.int64),
    tl.float16: (torch.float16, torch.int16),
    tl.bfloat16: (torch.bfloat16, torch.int16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8),
}
CARRIER = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}
original_convert, original_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
original_fma = interpreter.InterpreterBuilder.create_fma


def convert_float(x, src, dst, rounding):
    if src not in TYPES or dst not in TYPES:
        return original_convert(x, src, dst, rounding)
    bits = np.ascontiguousarray(x).view(CARRIER[src.primitive_bitwidth])
    value = torch.from_numpy(bits.copy()).view(TYPES[src][0])
    out = value.to(TYPES[dst][0])
    if dst == tl.float8e4nv:  # the hardware's cvt.rn.satfinite saturates, infinities too, and makes every NaN 0x7f
        f = value.float()
        out = torch.where(f.isnan(), torch.nan, f.clamp(-448, 448)).to(torch.float8_e4m3fn)
    return out.view(TYPES[dst][1]).numpy().view(getattr(np, f"uint{dst.primitive_bitwidth}")).reshape(x.shape)


def create_dot(self, a, b, acc, *rest):
    def widen(h):
        if h.dtype.scalar not in (tl.bfloat16, tl.float8e4nv):
            return h
        return interpreter.TensorHandle(convert_float(h.data, h.dtype.scalar, tl.float32, None).view(np.float32), tl.float32)

    return original_dot(self, widen(a), widen(b), acc, *rest)


def create_fma(self, x, y, z):
    if z.dtype.scalar != tl.float32:
        return original_fma(self, x, y, z)
    with np.errstate(invalid="ignore", over="ignore"):
        product, addend = x.data.astype(np.float64) * y.data.astype(np.float64), z.data.astype(np.float64)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        # round to odd in fp64, so that rounding again to fp32 equals rounding once
        odd = np.isfinite(error) & (error != 0) & (np.ascontiguousarray(total).view(np.int64) & 1 == 0).reshape(total.shape)
        total = np.where(odd, np.nextafter(total, np.copysign(np.inf, error)), total)
        return interpreter.TensorHandle(total.astype(np.float32), z.dtype.scalar)


interpreter._convert_float = convert_float
interpreter.InterpreterBuilder.create_fma = create_fma
interpreter.InterpreterBuilder.create_dot = create_dot


# ---- not for its results: a third of the interpreter's time

original_patch, original_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # stands for a function that sees both
builtins: dict[object, list[str]] = {}
np_dtypes: dict[tl.dtype, np.dtype] = {}
running, held, lock, here = 0, None, threading.Lock(), threading.local()  # kernels of all threads, and what the first of them has patched


def patch_lang(fn):
    """Once for a kernel, for it and all it calls. Unpatched, each device function that is called looks through all of triton.language again."""
    global running, held
    scope = interpreter._LangPatchScope()
    if getattr(here, "inside", False):
        return scope
    with lock:
        held = held or original_patch(language)
        running += 1
    here.inside = True

    def leave():
        global running, held
        here.inside = False
        with lock:
            running -= 1
            if running == 0:
                held.restore()
                held = None

    scope.restore = leave
    return scope


def patch_builtin(package, builder, scope):
    """With the names looked up once."""
    if package not in builtins:
        builtins[package] = [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
    for name in builtins[package]:
        interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


def get_np_dtype(dtype):
    """Without a new table of all dtypes for each call."""
    scalar = dtype.scalar
    if isinstance(scalar, tl.pointer_type):
        return original_np_dtype(scalar)
    if scalar not in np_dtypes:
        np_dtypes[scalar] = original_np_dtype(scalar)
    return np_dtypes[scalar]


interpreter._patch_lang = patch_lang
interpreter._patch_builtin = patch_builtin
interpreter._get_np_dtype = get_np_dtype
