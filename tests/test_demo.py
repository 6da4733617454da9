"""The demo: its tables, its exit status, its JSON, and that it fails when a bound does not hold."""

import json

import pytest
import torch

from moe_ops import demo
from moe_ops.hf.small import FAMILIES

pytest.importorskip("transformers")


def test_all_families_hold_the_bounds(capsys, tmp_path):
    file = tmp_path / "demo.json"
    assert demo.main(["--device", "cpu", "--steps", "4", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert [(r["model"], r["format"]) for r in record["models"]] == [(f, q) for f in FAMILIES for q in ("bf16", "bf16", "fp8_block", "mxfp8")]
    assert record["layers"] == [] and "all bounds hold" in text
    assert text.count("its layer error compares the reference with itself") == 1
    for row in record["models"]:
        assert row["ok"] and row["logits_error"] <= 0.15 and row["layer_error"] <= 1e-2 and 0 <= row["token_agreement"] <= 1
        assert f"{row['model']:<12} {row['format']:<10}" in text
        quantized = row["format"] != "bf16"
        assert (row["impl"] == "transformers") == (row["logits_error"] == 0) and (row["logits_error"] > 5e-3) >= quantized
    by = {(r["model"], r["format"]): r["experts_mib"] for r in record["models"]}
    assert all(by[f, "mxfp8"] < 0.53 * by[f, "bf16"] and by[f, "fp8_block"] < 0.53 * by[f, "bf16"] for f in FAMILIES)


def test_exit_status_follows_the_bounds(monkeypatch, capsys):
    monkeypatch.setattr(demo, "LOGITS_BOUND", 1e-6)
    assert demo.main(["--device", "cpu", "--steps", "3", "--model", "mixtral"]) == 1
    assert "3 of 4 rows are out of bounds" in capsys.readouterr().out


def test_where_it_cannot_run(monkeypatch, capsys):
    if not torch.cuda.is_available():
        assert demo.main(["--device", "cuda"]) == 2
        assert "cannot run: no cuda device here" in capsys.readouterr().out
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert demo.main(["--device", "cpu"]) == 2
    assert "needs transformers >= 5.17, which is not installed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        demo.main(["--steps", "2"])


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_with_real_layers(capsys, tmp_path):
    file = tmp_path / "demo.json"
    assert demo.main(["--steps", "8", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [(r["layer"], r["format"]) for r in record["layers"][::2]] == [
        (n, f) for n in ("qwen3-235b/EP8", "deepseek-v3/EP8") for f in ("fp8_block", "mxfp8")
    ]
    assert all(r["ok"] and 0 < r["share"] < 1.2 and r["error"] <= 1e-2 for r in record["layers"])
