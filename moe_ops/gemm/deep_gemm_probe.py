"""Whether DeepGEMM works on this machine, found out by one small product in each of its forms, in a process of its own.

    python -m moe_ops.gemm.deep_gemm_probe 0      one line of JSON: form -> null, or what went wrong

An import proves nothing: a wheel built for another libtorch may import and fail in the first call, or end the process. Experts with 1, 70, 0 and
130 rows tell a form whose row layout is another than ours from one that works.
"""

import json
import os
import subprocess
import sys

import torch

from moe_ops.gemm import deep_gemm, deep_gemm_library

FORMS = ("contiguous", "masked", "psum", "dense", "bmm")
COUNTS = (1, 70, 0, 130)
N, K = 256, 256
#: The first call of each form compiles.
SECONDS = 300
_MARK = "deep_gemm probe: "


def probe(index: int) -> dict[str, str | None]:
    """Of each form: None, or why it cannot run on GPU `index`. Starts a process, which takes seconds the first time."""
    # the modules that this process would import, and not those of the current folder, which -m would put first
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "moe_ops.gemm.deep_gemm_probe", str(index)]
    try:
        run = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        return dict.fromkeys(FORMS, f"trying deep_gemm failed: {failure}")
    found = [line.removeprefix(_MARK) for line in run.stdout.splitlines() if line.startswith(_MARK)]
    if not found:
        return dict.fromkeys(FORMS, with_remedy(f"deep_gemm ended the process that tried it ({run.returncode}): {last_words(run.stderr)}"))
    return json.loads(found[-1])


def last_words(text: str) -> str:
    """The last line that says something, of a failure's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def with_remedy(reason: str) -> str:
    """The reason, and what is known to help."""
    hints = [f"known to work with torch 2.11: {deep_gemm_library.INSTALL}"]
    if deep_gemm.compiler() is None:
        hints.insert(0, "no nvcc was found, with which it compiles its kernels")
    return f"{reason} ({'; '.join(hints)})"


def try_form(form: str, device: torch.device) -> str | None:
    """None when `form` gives the product of the dequantized operands on `device`, else what went wrong."""
    from moe_ops.core.arch import arch_of
    from moe_ops.core.numerics import relative_error, uneven
    from moe_ops.gemm.grouped import _ref_into
    from moe_ops.quant.quantize import quantize, quantize_weight

    fmt = "mxfp8" if arch_of(device).capability >= 100 else "fp8_block"
    a = quantize(uneven((sum(COUNTS), K), seed=1).to(device), fmt)
    w = quantize_weight(uneven((len(COUNTS), N, K), block=(128, 128), seed=2).to(device), fmt)
    offsets = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    args = (a.data.view(torch.uint8), a.scale, w.data.view(torch.uint8), w.scale)
    out = torch.zeros((sum(COUNTS), N), dtype=torch.bfloat16, device=device)
    ref = torch.zeros((sum(COUNTS), N), dtype=torch.float32, device=device)
    try:
        if form == "bmm":
            if fmt == "mxfp8":
                return "DeepGEMM's product of heads takes fp8_block"
            heads = quantize(uneven((len(COUNTS), 37, K), seed=3).to(device), fmt)
            out, ref = (torch.zeros((37, len(COUNTS), N), dtype=t, device=device) for t in (torch.bfloat16, torch.float32))
            operands = (heads.data.view(torch.uint8).transpose(0, 1), heads.scale.transpose(0, 1), *args[2:])
            deep_gemm.bmm_into(*operands, out)
            deep_gemm._bmm_cpu(*operands, ref)
        elif form == "dense":
            first = [0] + [sum(COUNTS)] * len(COUNTS)  # expert 0 has every row
            _ref_into(*args, None, torch.tensor(first, dtype=torch.int32, device=device), None, 1, fmt, 1, ref)
            deep_gemm.dense_into(args[0], args[1], args[2][0], args[3][0], fmt, out)
        else:
            _ref_into(*args, None, offsets, None, 1, fmt, 1, ref)
            deep_gemm._into(*args, offsets, None, 1, fmt, out, form)
        error = relative_error(out, ref)
    except Exception as failure:
        return with_remedy(f"deep_gemm's {form} form fails here: {type(failure).__name__}: {last_words(str(failure))}")
    if not error < 1e-2:  # NaN too
        return with_remedy(f"deep_gemm's {form} form gives wrong results here (relative error {error:.1e})")
    return None


def main(argv: list[str]) -> int:
    """Try every form and print what came of it."""
    try:
        deep_gemm_library.library()
    except Exception as failure:
        found = dict.fromkeys(FORMS, with_remedy(f"deep_gemm cannot be imported: {type(failure).__name__}: {last_words(str(failure))}"))
    else:
        device = torch.device("cuda", int(argv[0]))
        torch.cuda.set_device(device)
        found = {form: try_form(form, device) for form in FORMS}
    sys.stdout.write(f"\n{_MARK}{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # what was found out counts, even where the library cannot end a process


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
