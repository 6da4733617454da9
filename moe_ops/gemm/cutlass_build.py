"""The CUTLASS kernels: which there are, where their libraries lie, and how nvcc makes them.

moe-ops build cutlass                   every kernel, ahead of time
moe-ops build cutlass --arch sm90a      those of one architecture

A library's name holds a hash of what it is made of: the sources in cutlass/, the flags, and the kernel. A library of that name is used
wherever it comes from, so a machine without nvcc or without CUTLASS's headers can be given the folder of another (`MOE_OPS_CACHE`).
"""

import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from moe_ops.gemm import deep_gemm

#: The headers that the sources are written for.
HEADERS = "nvidia-cutlass==4.2.0.0"
INSTALL = f"pip install {HEADERS}"
#: Oldest nvcc that knows each architecture and what CUTLASS needs of it.
NVCC = {"sm90a": (12, 3), "sm100a": (12, 8)}
#: Memory that compiling one kernel takes, bytes; measured 3.7 to 4.1e9 with nvcc 13.0.
COMPILE_MEMORY = 4.2e9
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-shared", "-cudart", "static", "-Xcompiler", "-fPIC,-fvisibility=hidden")

#: The sources, C++ and CUDA.
_SOURCES = Path(__file__).parent / "cutlass"


class BuildError(RuntimeError):
    """A kernel's library could not be made; the text says why."""


@dataclass(frozen=True)
class Instantiation:
    """One kernel, and the library that holds it.

    Attributes:
        arch: "sm90a" or "sm100a".
        kind: "grouped" or "dense".
        tile_m: rows of a tile; 128 columns and 128 of K always.
        schedule: how the tile is computed, in a word.
    """

    arch: str
    kind: str
    tile_m: int
    schedule: str

    @property
    def name(self) -> str:
        """What its library and its messages call it."""
        return f"cutlass_{self.arch}_{self.kind}_{self.tile_m}x128x128"

    @property
    def source(self) -> str:
        """Name of the file in cutlass/ that holds it."""
        return f"{self.arch.removesuffix('a')}_{self.kind}.cu"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of nvcc that make this kernel."""
        number = self.arch.removeprefix("sm")
        return (*FLAGS, "-gencode", f"arch=compute_{number},code=sm_{number}", f"-DMOE_TILE_M={self.tile_m}")

    @property
    def path(self) -> Path:
        """Where its library lies or will lie."""
        return cache_dir() / f"{self.name}-{_digest(self)}.so"


INSTANTIATIONS = (
    Instantiation("sm90a", "grouped", 64, "ping-pong"),
    Instantiation("sm90a", "grouped", 128, "cooperative"),
    Instantiation("sm90a", "dense", 64, "ping-pong"),
    Instantiation("sm90a", "dense", 128, "cooperative"),
    Instantiation("sm100a", "grouped", 128, "one multiprocessor"),
    Instantiation("sm100a", "grouped", 256, "two multiprocessors"),
)
ARCHS = tuple(dict.fromkeys(i.arch for i in INSTANTIATIONS))


def cache_dir() -> Path:
    """Folder of the libraries: below `MOE_OPS_CACHE`, else below `XDG_CACHE_HOME` or ~/.cache."""
    own = os.environ.get("MOE_OPS_CACHE")
    if own:
        return Path(own, "cutlass").expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(home, "moe_ops", "cutlass")


@functools.cache
def _sources() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(_SOURCES.glob("*.cu*"))}


@functools.cache
def _digest(instantiation: Instantiation) -> str:
    """Of the source, the headers beside it, and the arguments; independent of the machine."""
    found = hashlib.sha256("\0".join(instantiation.arguments).encode())
    for name, text in _sources().items():
        if name.endswith(".cuh") or name == instantiation.source:
            found.update(b"\0" + name.encode() + b"\0" + text)
    return found.hexdigest()[:16]


def of_kind(arch: str, kind: str) -> tuple[Instantiation, ...]:
    """The kernels of one kind on one architecture, smallest tile first; empty where there is none."""
    return tuple(i for i in INSTANTIATIONS if (i.arch, i.kind) == (arch, kind))


def missing(instantiations: Sequence[Instantiation]) -> list[Instantiation]:
    """Those whose library has not been made."""
    return [i for i in instantiations if not os.path.exists(i.path)]


# ---- what making them needs


def headers() -> str | None:
    """The folder of CUTLASS's headers: include below `CUTLASS_PATH`, else in the package nvidia-cutlass; None where there is none."""
    own = os.environ.get("CUTLASS_PATH")
    if own:
        folder = Path(own, "include")
    else:
        spec = importlib.util.find_spec("cutlass_library")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent / "source" / "include"
    return str(folder) if os.path.exists(folder / "cutlass" / "cutlass.h") else None


@functools.cache
def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    """(major, minor) of the compiler, or None where it does not say."""
    try:
        run = subprocess.run([nvcc, "--version"], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+)\.(\d+)", run.stdout)
    return None if found is None else (int(found[1]), int(found[2]))


def build_reason(arch: str) -> str | None:
    """None, or what making kernels for `arch` lacks here, with the remedy."""
    lacks = []
    nvcc = deep_gemm.compiler()
    if nvcc is None:
        lacks.append("no nvcc (CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda)")
    else:
        version, least = nvcc_version(nvcc), NVCC[arch]
        if version is None:
            lacks.append(f"{nvcc} does not tell its version")
        elif version < least:
            lacks.append(f"{nvcc} is {version[0]}.{version[1]}, and {arch} needs {least[0]}.{least[1]} or newer")
    if headers() is None:
        lacks.append(f"no CUTLASS headers (CUTLASS_PATH, or {INSTALL} --no-deps)")
    folder = cache_dir()
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        lacks.append(f"{cache_dir()} cannot be written (MOE_OPS_CACHE names another folder)")
    return "; ".join(lacks) or None


def available_memory() -> float:
    """Bytes that new processes may take, as far as the system tells; infinite where it does not."""
    found = [float("inf")]
    try:
        text = Path("/proc/meminfo").read_text()
        found += [1024.0 * int(kib) for kib in re.findall(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)]
    except OSError:
        pass
    try:  # a container's limit
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            found.append(float(int(limit) - int(used)))
    except (OSError, ValueError):
        pass
    return min(found)


def jobs(most: int | None = None) -> int:
    """How many kernels to compile at once: by cores, by memory, at most `most`, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores if most is None else most, available_memory() / COMPILE_MEMORY)))


# ---- making them


def first_errors(text: str, most: int = 6) -> str:
    """The lines of a compiler's output that say what is wrong."""
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(r"\b(error|fatal|killed|cannot|undefined)\b", line, re.IGNORECASE)]
    return "\n".join((wrong or lines)[:most]) or "no message"


def build_one(instantiation: Instantiation) -> Path:
    """Make one library, unless another process has; nobody ever sees half of one.

    Raises:
        BuildError: something that the build needs is missing, or the compiler failed.
    """
    path = instantiation.path
    reason = build_reason(instantiation.arch)
    if reason is not None:
        raise BuildError(f"{instantiation.name} cannot be built here: {reason}")
    nvcc, include = deep_gemm.compiler(), headers()
    assert nvcc is not None and include is not None  # for the type checker: said above
    nvcc, include = os.path.abspath(nvcc), os.path.abspath(include)  # it runs in a folder of its own
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if path.exists():
            return path
        with tempfile.TemporaryDirectory(dir=path.parent.absolute(), prefix=f".{instantiation.name}-") as folder:
            for name, text in _sources().items():  # what the name's hash is of, even when the files have changed since
                Path(folder, name).write_bytes(text)
            made = Path(folder, "library.so")
            command = [nvcc, *instantiation.arguments, f"-I{include}", instantiation.source, "-o", str(made)]
            try:
                run = subprocess.run(
                    command, cwd=folder, env={**os.environ, "TMPDIR": folder}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
                )  # fmt: skip
            except OSError as failure:
                raise BuildError(f"{nvcc} cannot be started: {failure}") from None
            if run.returncode != 0 or not made.exists():
                raise BuildError(f"nvcc failed ({run.returncode}) on {instantiation.name}:\n{first_errors(run.stdout)}")
            os.replace(made, path)
    return path


def build(instantiations: Sequence[Instantiation], *, most: int | None = None, say: Callable[[str], object] | None = None) -> None:
    """Make what is missing of `instantiations`, several at once; `say` gets a line for each step.

    Raises:
        BuildError: of every library that could not be made, after the others were.
    """
    wanted = missing(instantiations)
    if not wanted:
        return
    tell = say or (lambda line: sys.stderr.write(f"moe-ops: {line}\n"))
    at_once = min(jobs(most), len(wanted))
    tell(f"compiling {len(wanted)} CUTLASS kernels into {cache_dir()}, {at_once} at once; a minute each, once")
    done, lock = 0, threading.Lock()

    def one(instantiation: Instantiation) -> str | None:
        nonlocal done
        try:
            build_one(instantiation)
            failure = None
        except (BuildError, OSError) as error:
            failure = str(error)
        with lock:
            done += 1
            tell(f"{instantiation.name} {'done' if failure is None else 'FAILED'} ({done} of {len(wanted)})")
        return failure

    with ThreadPoolExecutor(at_once) as pool:
        failures = [f for f in pool.map(one, wanted) if f is not None]
    if failures:
        raise BuildError("\n".join(dict.fromkeys(failures)))
