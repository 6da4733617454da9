"""Whether the CUTLASS kernels work on this machine, found out by one small product with every tile, in a process of its own.

    python -m moe_ops.gemm.cutlass_probe 0 grouped      one line of JSON: null, or what went wrong

Experts with 1, 70, 0 and 130 rows tell wrong counts, strides and scales from right ones.
"""

import json
import os
import subprocess
import sys

import torch

from moe_ops.core.arch import arch_of
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm import cutlass_library as library
from moe_ops.gemm.cutlass_build import Instantiation, of_kind
from moe_ops.gemm.cutlass_gemm import arch_name, tile_scales
from moe_ops.gemm.deep_gemm_probe import last_words
from moe_ops.gemm.grouped import _ref_into
from moe_ops.quant.quantize import quantize, quantize_weight
from moe_ops.quant.scale_layout import to_layout

COUNTS = (1, 70, 0, 130)
N, K = 264, 384
SECONDS = 120
_MARK = "cutlass probe: "


def probe(index: int, kind: str) -> str | None:
    """None, or why the kernels of `kind` do not work on GPU `index`. Starts a process: a kernel that faults takes its process with it."""
    # the modules that this process would import, and not those of the current folder, which -m would put first
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "moe_ops.gemm.cutlass_probe", str(index), kind]
    try:
        run = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        return f"trying the CUTLASS kernels failed: {failure}"
    found = [line.removeprefix(_MARK) for line in run.stdout.splitlines() if line.startswith(_MARK)]
    if not found:
        return f"the CUTLASS kernels ended the process that tried them ({run.returncode}): {last_words(run.stderr)}"
    return json.loads(found[-1])


def try_kernel(instantiation: Instantiation, device: torch.device) -> str | None:
    """None when the kernel gives the product of the dequantized operands on `device`, else what went wrong."""
    fmt = "mxfp8" if instantiation.arch == "sm100a" else "fp8_block"
    rows, e = sum(COUNTS), len(COUNTS)
    a = quantize(uneven((rows, K), seed=1).to(device), fmt)
    w = quantize_weight(uneven((e, N, K), block=(128, 128), seed=2).to(device), fmt)
    grouped = instantiation.kind == "grouped"
    first = [0, *torch.tensor(COUNTS).cumsum(0).tolist()] if grouped else [0] + [rows] * e  # dense: expert 0 has every row
    offsets = torch.tensor(first, dtype=torch.int32, device=device)
    data, weight = a.data.view(torch.uint8), w.data.view(torch.uint8)
    out = torch.full((rows, N), float("nan"), dtype=torch.bfloat16, device=device)
    ref = torch.zeros((rows, N), dtype=torch.float32, device=device)
    try:
        if not grouped:
            library.call_dense(instantiation, data, a.scale, weight[0], w.scale[0], out)
        elif fmt == "mxfp8":
            tiles = tile_scales(a.scale, offsets, e)
            library.call_grouped(instantiation, data, tiles, weight, to_layout(w, "swizzle_32x4x4").scale, offsets, 1, out)
        else:
            library.call_grouped(instantiation, data, a.scale, weight, w.scale, offsets, 1, out)
        _ref_into(data, a.scale, weight, w.scale, None, offsets, None, 1, fmt, 1, ref)
        error = relative_error(out, ref)
    except Exception as failure:
        return f"{instantiation.name} fails here: {type(failure).__name__}: {last_words(str(failure))}"
    if not error < 1e-2:  # NaN too
        return f"{instantiation.name} gives wrong results here (relative error {error:.1e})"
    return None


def main(argv: list[str]) -> int:
    """Try every tile and print what came of it."""
    device = torch.device("cuda", int(argv[0]))
    torch.cuda.set_device(device)
    kernels = of_kind(arch_name(arch_of(device).capability), argv[1])
    reasons = [reason for kernel in kernels if (reason := try_kernel(kernel, device)) is not None]
    sys.stdout.write(f"\n{_MARK}{json.dumps('; '.join(reasons) or None)}\n")
    sys.stdout.flush()
    os._exit(0)  # what was found out counts, even where a kernel left the process unwell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
