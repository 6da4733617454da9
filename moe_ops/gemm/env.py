"""`moe-ops env`: versions, GPUs, compiler, caches, and which implementations can run here and why the others cannot.

moe-ops env            for people
moe-ops env --json     for a report or a program
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_ops.core.arch import arch_of, unsupported_reason
from moe_ops.gemm import cutlass_build, deep_gemm
from moe_ops.gemm.explain import explain_problem
from moe_ops.gemm.registry import Problem, Where

PACKAGES = ("quantized-moe-ops", "torch", "triton", "transformers", "sgl-deep-gemm", "deep-gemm", "apache-tvm-ffi", "nvidia-cutlass")
#: Problems that stand for what a model asks: a rank of Qwen3-235B-A22B with eight experts, gate_up, and projections of DeepSeek-V3.
PROBLEMS = {
    "linear layer, FP8 blocks": Problem("dense_gemm", "fp8_block", 16, 1536, 7168, unquantized=True),
    "absorbed attention, FP8 blocks": Problem("bmm", "fp8_block", 16, 512, 128, 128, unquantized=True),
    "decode, FP8 blocks": Problem("grouped_gemm", "fp8_block", 16, 3072, 4096, 8, segments=2),
    "prefill, FP8 blocks": Problem("grouped_gemm", "fp8_block", 8192, 3072, 4096, 8, segments=2),
    "masked rows, FP8 blocks": Problem("grouped_gemm", "fp8_block", 1024, 3072, 4096, 8, segments=2, masked=True),
    "decode, MXFP8 not folded": Problem("grouped_gemm", "mxfp8", 16, 3072, 4096, 8),
    "prefill, bf16": Problem("grouped_gemm", "plain", 8192, 3072, 4096, 8),
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        arch, memory = arch_of(device), torch.cuda.get_device_properties(index).total_memory
        found.append({"name": arch.name, "sm": arch.capability, "multiprocessors": arch.sms, "gib": round(memory / 2**30, 1)})
        found[-1]["reason_against"] = unsupported_reason(device)
    return found


def cache_state(path: Path) -> dict[str, Any]:
    """Where a compile cache is, how many entries it has, and whether this process can add to it."""
    try:
        entries = len(os.listdir(path))
    except FileNotFoundError:
        entries = 0
    except OSError:
        entries = None
    parent = path
    while not os.path.exists(parent) and parent != parent.parent:  # a Path raises where a folder above may not be looked into
        parent = parent.parent
    usable = os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)
    return {"path": str(path), "entries": entries, "writable": usable}


def _caches() -> dict[str, dict[str, Any]]:
    home = Path(os.environ.get("HOME") or os.path.expanduser("~"))
    triton = os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or home, ".triton", "cache")
    deep = os.environ.get("DG_JIT_CACHE_DIR") or home / ".deep_gemm"
    return {"triton": cache_state(Path(triton)), "deep_gemm": cache_state(Path(deep)), "cutlass": cache_state(cutlass_build.cache_dir())}


def environment() -> dict[str, Any]:
    """All that `moe-ops env` prints, as plain values for JSON."""
    where = Where.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    answers = {title: explain_problem(problem, where) for title, problem in PROBLEMS.items()}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda_of_torch": torch.version.cuda,
        # torch's own word: it names the build, which a wheel's metadata may leave out
        "packages": {p: _version(p) for p in PACKAGES} | {"torch": torch.__version__},
        "gpus": _gpus(),
        "nvcc": deep_gemm.compiler(),
        "cutlass_headers": cutlass_build.headers(),
        "cutlass_kernels": {i.name: not cutlass_build.missing([i]) for i in cutlass_build.INSTANTIATIONS},
        "caches": _caches(),
        "config_hits": {"tuned": 0, "problems": len(PROBLEMS)},  # no database of tuned configs is shipped
        "implementations": {
            title: {"chosen": a.chosen, **{e.name: {"can": e.reason is None, "what": e.plan or e.reason} for e in a.entries}}
            for title, a in answers.items()
        },
    }


def as_text(found: dict[str, Any]) -> str:
    """`environment()` for people."""
    lines = [f"python {found['python']} on {found['platform']}", f"CUDA of torch: {found['cuda_of_torch'] or 'none (a build for CPUs)'}"]
    lines += [f"{name} {version or 'not installed'}" for name, version in found["packages"].items()]
    if not found["gpus"]:
        lines.append("no CUDA GPU: public functions compute with plain torch on the CPU")
    for number, gpu in enumerate(found["gpus"]):
        against = f"; {gpu['reason_against']}" if gpu["reason_against"] else ""
        lines.append(f"GPU {number}: {gpu['name']}, SM{gpu['sm']}, {gpu['multiprocessors']} multiprocessors, {gpu['gib']} GiB{against}")
    lines.append(f"nvcc: {found['nvcc'] or 'none (only DeepGEMM and building the CUTLASS kernels need it)'}")
    lines.append(f"CUTLASS headers: {found['cutlass_headers'] or f'none ({cutlass_build.INSTALL} --no-deps; only building its kernels needs them)'}")
    built = [name for name, there in found["cutlass_kernels"].items() if there]
    lines.append(f"CUTLASS kernels built: {', '.join(built) or 'none (moe-ops build cutlass)'}")
    for name, cache in found["caches"].items():
        state = f"{cache['entries']} entries" if cache["entries"] is not None else "unreadable"
        lines.append(f"{name} cache: {cache['path']}, {state}{'' if cache['writable'] else ', NOT WRITABLE: every process compiles anew'}")
    hits = found["config_hits"]
    lines.append(f"config hits: {hits['tuned']} of the {hits['problems']} problems below have a tuned config (none are shipped); heuristics choose")
    for title, answer in found["implementations"].items():
        lines.append(f"{PROBLEMS[title].op}, {title}: {answer['chosen'] or 'nobody'}")
        lines += [f"  {name:<10}{'can' if entry['can'] else 'cannot'}: {entry['what']}" for name, entry in answer.items() if name != "chosen"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what there is to know about this machine."""
    parser = argparse.ArgumentParser(prog="moe-ops env", description="Versions, GPUs, caches, and which implementations can run here and why not.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    found = environment()
    sys.stdout.write((json.dumps(found, indent=1) if args.json else as_text(found)) + "\n")
    return 0
