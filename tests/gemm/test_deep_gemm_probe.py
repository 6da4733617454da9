"""The process that tries DeepGEMM: what it finds, and what the caller makes of a process that ends in any other way."""

import json
import sys
import types

import pytest

from moe_ops.gemm import deep_gemm, deep_gemm_probe

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
