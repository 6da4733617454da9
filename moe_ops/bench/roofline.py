"""The limits of a machine, measured on it rather than read off a data sheet, and how close a time comes to them.

Measured on NVIDIA H200, 2026-11-30, torch 2.11, Triton 3.6: device copy 4.28 TB/s (read + write), read of 4 GiB 4.46 TB/s,
FP8 matmul (`torch._scaled_mm`, row-wise scales, 8192^3) 1463 TFLOP/s, bf16 matmul 764 TFLOP/s. The FP8 figure is what the library call
reaches, not the hardware's ceiling. `measure()` takes the same four numbers on the machine at hand.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Roof:
    """Limits in bytes/s and FLOP/s.

    Attributes:
        read: reading memory once, writing almost nothing (weights of a GEMM in decode).
        copy: bytes read plus bytes written of a device copy (quantizers, permutations).
        fp8: FP8 matmul.
        bf16: bf16 matmul.
    """

    read: float
    copy: float
    fp8: float
    bf16: float

    def limit(self, nbytes: float, flops: float = 0.0, *, memory: str = "copy", math: str = "fp8") -> float:
        """Seconds below which no kernel can do this work: max(bytes / bandwidth, FLOPs / rate).

        Args:
            nbytes: bytes that must move between memory and the chip, each counted once.
            flops: 2 per multiply-add.
            memory: "copy" or "read", which bandwidth bounds it.
            math: "fp8" or "bf16".
        """
        return max(nbytes / getattr(self, memory), flops / getattr(self, math))


KNOWN = {"NVIDIA H200": Roof(read=4.46e12, copy=4.28e12, fp8=1463e12, bf16=764e12)}


def roof_of(name: str) -> Roof | None:
    """The measured roof of a device's name, or None where nobody has measured it (then `measure()`)."""
    return KNOWN.get(name)


def median_seconds(call: Callable[[], object], reps: int = 20) -> float:
    """Median time of one call on the current stream, by events, after three that do not count."""
    for _ in range(3):
        call()
    times = []
    for _ in range(reps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return sorted(times)[reps // 2]


def _copy_rate(gib: int) -> float:
    source = torch.zeros(gib << 28, device="cuda")
    target = torch.zeros_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source))


def _read_rate(gib: int) -> float:
    source = torch.zeros(gib << 28, device="cuda")
    return source.nbytes / median_seconds(lambda: torch.sum(source))


def measure(gib: int = 4, size: int = 8192) -> Roof:
    """Measure this machine's roof; takes a few seconds and 2 x `gib` GiB.

    Args:
        gib: GiB that the copy and the read go over, far more than the L2.
        size: M = N = K of the matrix products.

    Raises:
        RuntimeError: no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("roofline.measure: needs a CUDA GPU")
    copy = _copy_rate(gib)
    read = _read_rate(gib)
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2.0 * size**3
    bf16 = flops / median_seconds(lambda: a @ b.T)
    qa, qb = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    row, column = torch.ones(size, 1, device="cuda"), torch.ones(1, size, device="cuda")
    fp8 = flops / median_seconds(lambda: scaled_mm(qa, qb.T, scale_a=row, scale_b=column, out_dtype=torch.bfloat16))
    return Roof(read, copy, fp8, bf16)
