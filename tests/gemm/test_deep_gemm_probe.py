"""The process that tries DeepGEMM: what it finds, and what the caller makes of a process that ends in any other way."""

import json
import sys
import types

import pytest
import torch

from moe_ops.gemm import deep_gemm, deep_gemm_probe, registry
from moe_ops.gemm.registry import Problem, Where, choose

ALL = dict.fromkeys(deep_gemm_probe.FORMS)


@pytest.mark.parametrize(
    "stdout,stderr,code,expected",
    [
        (f"noise\n{deep_gemm_probe._MARK}" + json.dumps({**ALL, "psum": "no"}), "", 0, {**ALL, "psum": "no"}),
        ("", "Traceback\nundefined symbol: c10", 1, "ended the process that tried it (1): undefined symbol: c10"),
        ("", "", -11, "ended the process that tried it (-11): no message"),
    ],
    ids=["works", "another libtorch", "signal"],
)
def test_env_probe_survives_what_the_library_does_to_its_process(monkeypatch, stdout, stderr, code, expected):
    run = types.SimpleNamespace(stdout=stdout, stderr=stderr, returncode=code)
    monkeypatch.setattr(deep_gemm_probe.subprocess, "run", lambda *args, **options: run)
    found = deep_gemm_probe.probe(0)
    assert found == expected if isinstance(expected, dict) else all(expected in found[form] for form in deep_gemm_probe.FORMS)


def test_env_probe_of_a_process_whose_words_are_no_text(monkeypatch, tmp_path):
    """Compilers print in encodings of their own, and nobody may wait for an answer on the terminal."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nread -r answer\nprintf 'libcudart: \\377\\n' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(deep_gemm_probe.sys, "executable", str(program))
    found = deep_gemm_probe.probe(0)
    assert all("ended the process that tried it (3): libcudart: \ufffd" in found[form] for form in deep_gemm_probe.FORMS)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 is the first that can leave the current folder out")
def test_env_probe_finds_what_this_process_finds_and_nothing_in_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch of the current folder')")
    monkeypatch.chdir(tmp_path)
    assert "torch of the current folder" not in str(deep_gemm_probe.probe(0))


def test_env_probe_of_a_real_process_that_cannot_import():
    found = deep_gemm_probe.probe(0) if deep_gemm.lacking() else None
    if found is None:
        pytest.skip("deep_gemm is here and so is a GPU")
    assert set(found) == set(deep_gemm_probe.FORMS) and all(isinstance(reason, str) for reason in found.values())


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """Installs a deep_gemm that runs the given lines when it is imported, for this process and the ones that it starts."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(deep_gemm, "features", deep_gemm.features.__wrapped__)

    def install(lines):
        (tmp_path / "deep_gemm").mkdir()
        (tmp_path / "deep_gemm" / "__init__.py").write_text(lines)

    return install


SYMBOL = "deep_gemm/_C.so: undefined symbol: _ZN3c106detail14torchCheckFailE"


@pytest.mark.parametrize(
    "lines,text",
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "cannot be imported: ImportError: libcudart.so.12: cannot open"),
        (f"print('loading', end='')\nraise OSError('{SYMBOL}')", f"cannot be imported: OSError: {SYMBOL} ("),
        ("raise SystemExit('built for another torch')", "ended the process that tried it (1): built for another torch ("),
        ("import os, sys\nprint('c10::Error', file=sys.stderr, flush=True)\nos.abort()", "ended the process that tried it (-6): "),
    ],
    ids=["a library is missing", "another libtorch", "it ends the process", "it aborts"],
)
def test_env_a_wheel_that_cannot_be_loaded_is_a_reason_with_a_remedy(wheel, monkeypatch, lines, text):
    """In a real process, with a package that is found and fails as broken wheels do; named, it is one error, and unasked Triton is taken."""
    wheel(lines)
    monkeypatch.setattr(deep_gemm, "lacking", list)  # a GPU, as far as this is concerned
    problem, hopper = Problem("dense_gemm", "fp8_block", 16, 1536, 7168), Where(registry.arch_of_capability(90), True, 0, "cuda:0")
    with pytest.raises(ValueError) as refused:
        choose(problem, hopper, "deep_gemm")
    said = str(refused.value)
    assert said.startswith("dense_gemm: impl 'deep_gemm' cannot run here: deep_gemm ") and text in said
    assert f"known to work with torch 2.11: {deep_gemm_probe.deep_gemm_library.INSTALL}" in said
    assert choose(problem, hopper).name == "triton"


def test_env_a_wheel_that_never_comes_back(wheel, monkeypatch):
    wheel("import time\ntime.sleep(600)")
    monkeypatch.setattr(deep_gemm_probe, "SECONDS", 1)
    found = deep_gemm_probe.probe(0)
    assert all("trying deep_gemm failed: " in found[form] and "timed out after 1 seconds" in found[form] for form in deep_gemm_probe.FORMS)


def test_env_a_package_that_loads_and_has_nothing(wheel):
    """A folder of that name, or a release without the functions: named as what it lacks, or, without a GPU, as what stopped the attempt."""
    wheel("")
    found = deep_gemm_probe.probe(0)
    wanted = "does not tell its alignment" if torch.cuda.is_available() else "ended the process that tried it (1): "
    assert all(wanted in found[form] for form in deep_gemm_probe.FORMS)
