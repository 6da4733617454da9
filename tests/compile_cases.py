"""Compile every kernel of the package ahead of time, without a GPU, and look at what came out.

    python tests/compile_cases.py 89 90 100 120 [--thin]

`--thin`: every second case of each file.

Each tests/**/cases_<stem>.py defines

    COMPILE_CASES = [(name, call), ..]        # call() makes small CPU tensors and calls the launcher under test
                    [(name, call, (90,)), ..] # only for these compute capabilities
    EXPECT = {"_x_kernel": {90: ["wgmma"], 100: ["tcgen05"]}}   # optional: regular expressions that the PTX must hold
    ONLY = {"_x_kernel": (90,)}               # optional: kernels that exist for these compute capabilities alone
    SPILLS = {"_x_kernel": (bytes, "reason")} # optional: registers a thread that a kernel may spill

The run fails when a case does not compile, when a kernel wants more shared memory than the architecture has, spills registers or lacks
an expected instruction, and when an entry kernel of the package is launched by no case. It must not run under TRITON_INTERPRET.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CAPABILITIES = (89, 90, 100, 120)


def entry_kernels() -> dict[str, Path]:
    """Every `@triton.jit` or `@gluon.jit` function of the package whose name ends with `_kernel`, found without importing anything."""
    found: dict[str, Path] = {}
    for path, node in _entry_nodes():
        assert node.name not in found, f"{node.name} is defined in {found[node.name]} and in {path}"
        found[node.name] = path
    return found


def gluon_kernels() -> set[str]:
    """Entry kernels that the interpreter cannot run."""
    return {node.name for _, node in _entry_nodes() if _jit_of(node) == "gluon"}


def _entry_nodes():
    for path in sorted((ROOT / "moe_ops").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and _jit_of(node):
                yield path, node


def _jit_of(node: ast.FunctionDef) -> str | None:
    for decorator in node.decorator_list:
        text = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if text in ("triton.jit", "gluon.jit"):
            return text.split(".")[0]
    return None


def case_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("cases_*.py"))


def load(path: Path):
    """Import one file by its path."""
    spec = importlib.util.spec_from_file_location(f"compile_case_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spilled_bytes(compiled) -> int:
    """Bytes of registers that a thread spills; 0 where the tools that come with Triton cannot tell.

    The resource usage of the binary is quick to read but counts arrays on the stack too, so ptxas is asked only where it is not zero.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", str(cubin))
        if not any(int(n) for n in re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage)):
            return 0
        ptx.write_text(compiled.asm["ptx"])
        target = re.search(r"\.target\s+(sm_\w+)", compiled.asm["ptx"])[1]
        for ptxas in ("ptxas-blackwell", "ptxas"):  # the first one that knows this target and this version of PTX
            report = _output(tools / ptxas, "-v", f"--gpu-name={target}", str(ptx), "-o", str(cubin))
            spills = re.findall(r"(\d+) bytes spill", report)
            if spills:
                return max(int(n) for n in spills)
    return 0


def _output(*command) -> str:
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError:
        return ""
    return run.stdout


def problems_of(kernel: str, compiled, capability: int, module) -> list[str]:
    """What is wrong with one compiled kernel."""
    from moe_ops.core.arch import arch_of_capability

    found = []
    if not kernel.endswith("_kernel"):
        found.append("the name of an entry kernel ends with _kernel")
    limit = arch_of_capability(capability).smem
    if compiled.metadata.shared > limit:
        found.append(f"needs {compiled.metadata.shared} bytes of shared memory, sm_{capability} has {limit}")
    ptx = compiled.asm["ptx"]
    for pattern in getattr(module, "EXPECT", {}).get(kernel, {}).get(capability, []):
        if not re.search(pattern, ptx):
            found.append(f"no {pattern!r} in the PTX")
    waits, frees = "griddepcontrol.wait" in ptx, "griddepcontrol.launch_dependents" in ptx
    if not waits == frees == compiled.metadata.launch_pdl:
        found.append("programmatic dependent launch needs both instructions, and the launch attribute")
    allowed, _reason = getattr(module, "SPILLS", {}).get(kernel, (0, ""))
    spilled = spilled_bytes(compiled)
    if spilled > allowed:
        found.append(f"spills {spilled} bytes of registers a thread, allowed are {allowed}")
    return found


def check(capability: int, only: str = "", thin: bool = False) -> tuple[set[str], list[str]]:
    """Run all cases (whose file's path holds `only`) for one architecture: the kernels compiled, and the failures as text."""
    from moe_ops.core import launch

    kernels: set[str] = set()
    failures: list[str] = []
    excused: set[str] = set()
    for path in case_files():
        where = path.relative_to(ROOT)
        if only not in str(where):
            continue
        module = load(path)
        excused |= {k for k, capabilities in getattr(module, "ONLY", {}).items() if capability not in capabilities}
        cases = [case for case in module.COMPILE_CASES if len(case) == 2 or capability in case[2]]
        for name, call, *_ in cases[:: 2 if thin else 1]:
            label = f"{where}::{name} for sm_{capability}"
            try:
                with launch.compile_for(capability) as compiled:
                    call()
            except Exception:
                failures.append(f"{label}: {traceback.format_exc()[-3000:]}")
                continue
            if not compiled:
                failures.append(f"{label}: launched no kernel")
            for _op, kernel, result in compiled:
                kernels.add(kernel)
                failures += [f"{label}: {kernel} {problem}" for problem in problems_of(kernel, result, capability, module)]
    if not only:
        missing = sorted(set(entry_kernels()) - kernels - excused)
        failures += [f"no case compiles {k} ({entry_kernels()[k].relative_to(ROOT)}) for sm_{capability}" for k in missing]
    return kernels, list(dict.fromkeys(failures))


def main(argv: list[str]) -> int:
    import triton

    assert os.environ.get("TRITON_INTERPRET", "0") in ("", "0"), "unset TRITON_INTERPRET: the interpreter compiles nothing"
    capabilities = [int(a) for a in argv if a.isdigit()] or list(CAPABILITIES)
    only = next((a for a in argv if not a.isdigit() and a != "--thin"), "")
    failed = 0
    for capability in capabilities:
        kernels, failures = check(capability, only, "--thin" in argv)
        print(f"sm_{capability}, Triton {triton.__version__}: {len(kernels)} kernels, {len(failures)} failures", flush=True)
        for failure in failures:
            print(f"FAILED {failure}", flush=True)
        failed += len(failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
