"""Every benchmark file runs: on a machine without a GPU its small sizes are checked and nothing is timed."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

FILES = sorted((Path(__file__).resolve().parents[2] / "benchmarks").glob("*/bench_*.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="make bench runs them on a GPU")
@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_benchmark_runs_and_its_results_are_right(path, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    assert "right (no GPU here, no time)" in printed
    assert not list(tmp_path.iterdir())
