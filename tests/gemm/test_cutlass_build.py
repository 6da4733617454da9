"""Making the CUTLASS kernels: what it needs and says, names by content, one builder at a time; and the real compiler, where there is one.

`make test` compiles one kernel of each architecture, `--all-cutlass` every one. Libraries stay in build/cutlass (or
`MOE_OPS_CACHE`), by content, for the next run.
"""

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import triton
from filelock import FileLock

from moe_ops.cli import main
from moe_ops.core.formats import ceil_div
from moe_ops.gemm import cutlass_build as build
from moe_ops.gemm import cutlass_library as library
from moe_ops.gemm import deep_gemm

ROOT = Path(__file__).resolve().parents[2]
KEPT = os.environ.get("MOE_OPS_CACHE") or str(ROOT / "build")
FIRST = build.INSTANTIATIONS[0]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_OPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cutlass"


@pytest.fixture
def nvcc(monkeypatch, tmp_path):
    """Replaces the compiler by a shell script, and the headers by a folder; nvcc(script) -> list of calls so far."""
    build.nvcc_version.cache_clear()
    home, log = tmp_path / "cuda", tmp_path / "calls"
    (home / "bin").mkdir(parents=True)
    (tmp_path / "cutlass" / "include" / "cutlass").mkdir(parents=True)
    (tmp_path / "cutlass" / "include" / "cutlass" / "cutlass.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass"))

    def install(script='echo made > "$out"', version="13.0"):
        text = f"""#!/bin/bash
if [ "$1" = --version ]; then echo "Cuda compilation tools, release {version}, V{version}.88"; exit 0; fi
echo "$@" >> {log}
out="${{@: -1}}"
{script}
"""
        (home / "bin" / "nvcc").write_text(text)
        (home / "bin" / "nvcc").chmod(0o755)
        return lambda: log.read_text().splitlines() if log.exists() else []

    yield install
    build.nvcc_version.cache_clear()


def run(*arguments, capsys):
    code = main(["build", "cutlass", *arguments])
    return code, *capsys.readouterr()


def test_build_makes_what_is_missing_once(nvcc, cache, capsys):
    calls = nvcc()
    code, out, err = run("--arch", "sm90a", capsys=capsys)
    assert code == 0 and out.count("to build") == 4 and "compiling 4 CUTLASS kernels into" in err and "done (4 of 4)" in err
    assert sorted(p.name for p in cache.glob("*.so")) == sorted(i.path.name for i in build.INSTANTIATIONS if i.arch == "sm90a")
    assert len(calls()) == 4 and all("-gencode arch=compute_90a,code=sm_90a" in c and "-cudart static" in c for c in calls())
    assert sorted(c.split("-DMOE_TILE_M=")[1].split()[0] for c in calls()) == ["128", "128", "64", "64"]
    for name in ("sm90a", "sm90", "sm_90", "90"):  # one architecture in every spelling
        code, out, err = run("--arch", name, capsys=capsys)
        assert code == 0 and out.count("there") == 4 and err == "" and len(calls()) == 4
    assert not [p for p in cache.iterdir() if p.is_dir()]  # nothing half made stays


def test_dry_run_builds_nothing(nvcc, cache, capsys):
    calls = nvcc()
    code, out, err = run("--dry-run", capsys=capsys)
    assert code == 0 and out.count("to build") == len(build.INSTANTIATIONS) and calls() == [] and not cache.exists()


@pytest.mark.parametrize(
    "change,text",
    [
        (dict(CUDA_HOME="/nowhere"), r"no nvcc \(CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda\)"),
        (dict(CUTLASS_PATH="/nowhere"), r"no CUTLASS headers \(CUTLASS_PATH, or pip install nvidia-cutlass==4.2.0.0 --no-deps\)"),
        (dict(MOE_OPS_CACHE=__file__), r".*test_cutlass_build.py/cutlass cannot be written \(MOE_OPS_CACHE names another folder\)"),
    ],
    ids=["no nvcc", "no headers", "read-only cache"],
)
def test_env_what_is_missing_is_one_line_and_an_exit_status(nvcc, monkeypatch, capsys, change, text):
    nvcc()
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    for arguments in ((), ("--dry-run",)):
        code, out, err = run(*arguments, capsys=capsys)
        assert code == 1 and len(err.splitlines()) == 1
        pytest.raises(build.BuildError, build.build_one, FIRST).match(f"{FIRST.name} cannot be built here: {text}")


def test_env_nvcc_too_old_for_an_architecture(nvcc, capsys):
    nvcc(version="12.4")
    assert build.build_reason("sm90a") is None
    code, _, err = run(capsys=capsys)
    assert code == 1 and "nvcc is 12.4, and sm100a needs 12.8 or newer" in err


def test_env_nvcc_that_does_not_tell_its_version(nvcc, tmp_path):
    nvcc()
    (tmp_path / "cuda" / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert "does not tell its version" in build.build_reason("sm90a")
    (tmp_path / "cuda" / "bin" / "nvcc").write_text("no program")
    build.nvcc_version.cache_clear()
    assert "does not tell its version" in build.build_reason("sm90a")


def test_env_a_failed_compile_shows_its_first_errors(nvcc, cache, capsys):
    nvcc("echo 'a note'; for i in 1 2 3 4 5 6 7 8; do echo \"grouped.cu($i): error: no such thing\"; done; exit 2")
    code, _, err = run("--arch", "sm90a", "--jobs", "1", capsys=capsys)
    assert code == 1 and "nvcc failed (2) on cutlass_sm90a_grouped_64x128x128:\ngrouped.cu(1): error: no such thing" in err
    assert "a note" not in err and "grouped.cu(7)" not in err and "Traceback" not in err
    assert not list(cache.glob("*.so"))


def test_env_a_killed_compiler(nvcc):
    nvcc("kill -9 $$")
    pytest.raises(build.BuildError, build.build_one, FIRST).match(rf"nvcc failed \(-9\) on {FIRST.name}:\nno message")


def test_half_a_library_is_nobodys(nvcc):
    """LOAD: the compiler is killed while it writes; what it wrote has not the name that others look for."""
    nvcc('echo half > "$out"; kill -9 $$')
    with pytest.raises(build.BuildError, match="nvcc failed"):
        build.build_one(FIRST)
    assert not FIRST.path.exists()


def test_env_folders_named_from_where_one_is(nvcc, monkeypatch, tmp_path):
    nvcc()
    monkeypatch.chdir(tmp_path)
    for name, folder in (("CUDA_HOME", "cuda"), ("CUTLASS_PATH", "cutlass"), ("MOE_OPS_CACHE", "here")):
        monkeypatch.setenv(name, folder)
    assert build.build_one(FIRST).exists() and list(Path(tmp_path, "here", "cutlass").glob("*.so"))
    monkeypatch.setenv("MOE_OPS_CACHE", "~/kept")
    assert build.cache_dir() == Path.home() / "kept" / "cutlass"


def test_env_nvcc_too_old_for_hopper(nvcc):
    nvcc(version="11.8")
    assert "is 11.8, and sm90a needs 12.3 or newer" in build.build_reason("sm90a")


def test_one_failure_leaves_the_others_built(nvcc, cache):
    nvcc('case "$*" in *MOE_TILE_M=64*) echo "error: tile"; exit 1;; esac; echo made > "$out"')
    said = []
    with pytest.raises(build.BuildError, match="grouped_64x128x128:\nerror: tile\nnvcc failed .* on cutlass_sm90a_dense_64"):
        build.build([i for i in build.INSTANTIATIONS if i.arch == "sm90a"], say=said.append)
    assert len(list(cache.glob("*.so"))) == 2 and sum("FAILED" in line for line in said) == 2


def test_env_two_builders_make_it_once(nvcc):
    """Threads here, processes there: the lock is a file."""
    calls = nvcc('sleep 0.3; echo made > "$out"')
    threads = [threading.Thread(target=build.build_one, args=(FIRST,)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls()) == 1 and FIRST.path.read_text() == "made\n"


def test_names_follow_the_content(monkeypatch, cache):
    paths = [i.path for i in build.INSTANTIATIONS]
    assert len(set(paths)) == len(paths) and all(p.parent == cache for p in paths)

    def of(sources):
        build._digest.cache_clear()
        monkeypatch.setattr(build, "_sources", lambda: sources)
        return [i.path.name for i in build.INSTANTIATIONS]

    before = build._sources()
    try:
        assert of(before) == [p.name for p in paths]
        dense = of({**before, "sm90_dense.cu": b"other"})
        assert [a != b.name for a, b in zip(dense, paths, strict=True)] == [i.kind == "dense" for i in build.INSTANTIATIONS]
        assert not set(of({**before, "interface.cuh": b"other"})) & {p.name for p in paths}
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-G"))
        assert not set(of(before)) & {p.name for p in paths}
    finally:
        build._digest.cache_clear()


def test_a_library_that_was_carried_here_is_used_without_compiler_and_headers(monkeypatch, cache):
    monkeypatch.setattr(deep_gemm, "compiler", lambda: None)
    monkeypatch.setattr(build, "headers", lambda: None)
    assert build.missing([FIRST]) == [FIRST]
    cache.mkdir(parents=True)
    FIRST.path.touch()
    assert build.missing([FIRST]) == []
    build.build([FIRST])


def test_where_libraries_lie(monkeypatch):
    monkeypatch.delenv("MOE_OPS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(build.cache_dir()) == "/somewhere/moe_ops/cutlass"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/person")
    assert str(build.cache_dir()) == "/person/.cache/moe_ops/cutlass"


@pytest.mark.parametrize("memory,most,expected", [(float("inf"), 3, 3), (9e9, None, 2), (9e9, 8, 2), (1e9, 4, 1)])
def test_jobs_by_cores_and_memory(monkeypatch, memory, most, expected):
    monkeypatch.setattr(build, "available_memory", lambda: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16), raising=False)
    assert build.jobs(most) == expected
    assert build.available_memory() == memory


def test_bad_arguments(capsys):
    for arguments, text in ((["--jobs", "0"], "--jobs must be at least 1, got 0"), (["--arch", "sm80"], "invalid choice: 'sm80'")):
        with pytest.raises(SystemExit):
            main(["build", "cutlass", *arguments])
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("content,text", [(b"", "cannot be loaded"), (b"\x7fELF rest", "cannot be loaded")])
def test_env_a_damaged_library(cache, content, text):
    cache.mkdir(parents=True)
    FIRST.path.write_bytes(content)
    with pytest.raises(RuntimeError, match=text):
        library._load(FIRST)


def test_interface_numbers_agree():
    text = build._sources()["interface.cuh"].decode()
    assert f"#define MOE_CUTLASS_INTERFACE {library.INTERFACE}\n" in text


# ---- the real compiler


def of_real_compiler(instantiation, monkeypatch):
    """The library, from MOE_OPS_CACHE or build/cutlass, or compiled now."""
    monkeypatch.setenv("MOE_OPS_CACHE", KEPT)
    if build.missing([instantiation]):
        reason = build.build_reason(instantiation.arch)
        if reason is not None:
            pytest.skip(reason)
        few = build.available_memory() < 2 * build.COMPILE_MEMORY
        with FileLock(f"{build.cache_dir()}.lock") if few else contextlib.nullcontext():  # one compiler at a time, of all workers
            build.build_one(instantiation)
    return library._load(instantiation)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("instantiation", build.INSTANTIATIONS, ids=lambda i: i.name)
def test_compiles(instantiation, monkeypatch, request):
    one_of_each = next(i for i in build.INSTANTIATIONS if i.arch == instantiation.arch)
    if instantiation is not one_of_each and not request.config.getoption("--all-cutlass"):
        pytest.skip("one kernel of each architecture is compiled; --all-cutlass compiles every one")
    lib = of_real_compiler(instantiation, monkeypatch)
    assert lib.moe_cutlass_error(1) == b"an argument that the kernel cannot take" and lib.moe_cutlass_error(0) == b"no error"
    assert lib.moe_cutlass_error(102).decode() != lib.moe_cutlass_error(107).decode() and lib.moe_cutlass_error(1001) == b"invalid argument"
    size = ctypes.c_longlong()
    if instantiation.kind == "grouped":
        assert lib.moe_cutlass_workspace(8, 2, 132, ctypes.byref(size)) == 0
        bad = [16, 4096, 0, 16, 16, 16, 16, 24, 4, 8, 1, 256, 128, 0, 0, 0, 0, 132, None]  # out off 16 bytes
        assert lib.moe_cutlass_grouped(*bad) == 1
        bad[7] = 16
        assert lib.moe_cutlass_grouped(*bad) == 2  # no workspace
        assert 132 * 3 * 128 < size.value < 2**20
    else:
        assert lib.moe_cutlass_workspace(7, 256, 128, 132, ctypes.byref(size)) == 0 and size.value >= 0
        assert lib.moe_cutlass_dense(16, 128, 16, 1, 16, 16, 16, 256, 4, 250, 128, 0, 0, 0, 132, None) == 1
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(instantiation.path)], capture_output=True, text=True)
    if symbols.returncode == 0:  # nothing that could meet another library's
        names = {line.split()[-1] for line in symbols.stdout.splitlines() if " T " in line}
        assert names and all(name.startswith("moe_cutlass_") for name in names)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    code, usage = (
        subprocess.run([tools / "cuobjdump", option, instantiation.path], capture_output=True, text=True, env=environment).stdout
        for option in ("-sass", "--dump-resource-usage")
    )
    if "Function :" in code and "REG:" in usage:  # the tool knows this architecture
        assert {"sm90a": "QGMMA.64x128x32.F32.E4M3.E4M3", "sm100a": "UTCQMMA"}[instantiation.arch] in code
        assert set(re.findall(r"STACK:\d+|LOCAL:\d+", usage)) == {"STACK:0", "LOCAL:0"}, "no registers are spilled"
    needed = subprocess.run(["ldd", str(instantiation.path)], capture_output=True, text=True).stdout
    assert "libtorch" not in needed and "libcudart" not in needed


def describe(lib, *, rows, experts, segments, n, k, masked, offsets, a_row, a_expert):
    """The arrays that the kernel before the GEMM fills, filled on the host: addresses as differences from the operands'."""
    groups, base = experts * segments, dict(a=1 << 20, a_scale=2 << 20, w=3 << 20, w_scale=4 << 20, out=5 << 20)
    memory = torch.zeros(groups * 400 + 128 * 12, dtype=torch.uint8)
    held = torch.tensor(offsets, dtype=torch.int32)
    P, L, I = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
    lib.moe_cutlass_describe_on_host.argtypes = (P, L, L, P, P, P, P, P, L, I, I, I, I, I, P)
    lib.moe_cutlass_describe_on_host.restype = None
    lib.moe_cutlass_describe_on_host(
        base["a"], a_row, a_expert, base["a_scale"], base["w"], base["w_scale"], held.data_ptr(), base["out"],
        rows, experts, segments, n, k, int(masked), memory.data_ptr(),
    )  # fmt: skip
    at = 0

    def take(dtype, width):
        nonlocal at
        size = groups * width * torch.empty(0, dtype=dtype).element_size()
        found = memory[at : at + size].view(dtype).view(groups, width)
        at += ceil_div(size, 128) * 128
        return found.tolist()

    shapes = take(torch.int32, 3)
    pointers = {name: [v - base[name] for [v] in take(torch.int64, 1)] for name in ("a", "w", "a_scale", "w_scale", "out")}
    strides = {name: [v for [v] in take(torch.int64, 1)] for name in ("a", "w", "out")}
    return shapes, pointers, strides


@pytest.mark.timeout(900)
@pytest.mark.parametrize("offsets", [[0, 1, 71, 71, 201], [5, 4, 2**30, -7, 201], [0, 0, 0, 0, 0]], ids=["counts", "garbage", "EMPTY: all"])
def test_groups_of_packed_rows_on_sm90(offsets, monkeypatch):
    lib = of_real_compiler(FIRST, monkeypatch)
    rows, e, n, k, kb = 201, 4, 384, 272, 3
    shapes, pointers, strides = describe(lib, rows=rows, experts=e, segments=2, n=n, k=k, masked=False, offsets=offsets, a_row=288, a_expert=0)
    clamped = [min(max(v, 0), rows) for v in offsets]
    for group in range(2 * e):
        expert, segment = divmod(group, 2)
        count = max(0, clamped[expert + 1] - clamped[expert])
        first = clamped[expert] if count else 0
        assert shapes[group] == [count, n // 2, k]
        assert pointers["a"][group] == first * 288 and pointers["a_scale"][group] == first * kb * 4
        assert pointers["w"][group] == (expert * n + segment * n // 2) * k and pointers["w_scale"][group] == (expert * 2 + segment) * 2 * kb * 4
        assert pointers["out"][group] == (first * n + segment * n // 2) * 2
        assert (strides["a"][group], strides["w"][group], strides["out"][group]) == (288, k, n)


@pytest.mark.timeout(900)
def test_groups_of_masked_rows_on_sm90(monkeypatch):
    lib = of_real_compiler(FIRST, monkeypatch)
    shapes, pointers, _ = describe(
        lib, rows=130, experts=3, segments=1, n=64, k=256, masked=True, offsets=[-3, 7, 999], a_row=256, a_expert=256 * 140
    )
    assert shapes == [[0, 64, 256], [7, 64, 256], [130, 64, 256]]
    assert pointers["a"] == [0, 256 * 140, 2 * 256 * 140] and pointers["a_scale"] == [0, 130 * 8, 2 * 130 * 8]
    assert pointers["out"] == [0, 130 * 128, 2 * 130 * 128]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("masked,offsets", [(False, [0, 1, 130, 130, 300]), (True, [4, 0, 200, 130])], ids=["packed", "masked"])
def test_groups_on_sm100_start_at_tiles_of_their_own(masked, offsets, monkeypatch):
    first = next(i for i in build.INSTANTIATIONS if i.arch == "sm100a")
    lib = of_real_compiler(first, monkeypatch)
    rows, e, n, k = (130 if masked else 300), 4, 200, 160
    shapes, pointers, _ = describe(
        lib, rows=rows, experts=e, segments=1, n=n, k=k, masked=masked, offsets=offsets, a_row=160, a_expert=160 * 130 if masked else 0
    )
    tile = 2 * 512  # 160 / 32 = 5 bytes of a row lie in two words
    starts = [2 * i for i in range(e)] if masked else [0, 1, 4, 4]  # expert 2 is empty
    counts = [4, 0, 130, 130] if masked else [1, 129, 0, 170]
    assert [s[0] for s in shapes] == counts
    assert [p // tile for p, c in zip(pointers["a_scale"], counts, strict=True) if c] == [s for s, c in zip(starts, counts, strict=True) if c]
    assert pointers["w_scale"] == [i * 2 * tile for i in range(e)]


def test_module_run_as_a_command():
    run = subprocess.run([sys.executable, "-m", "moe_ops", "build", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0 and "--dry-run" in run.stdout and "nvidia-cutlass==4.2.0.0" in run.stdout
