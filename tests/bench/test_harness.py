import json

import pytest
import torch

from moe_ops.bench import harness, shapes
from moe_ops.bench.harness import Bench, difference
from moe_ops.bench.roofline import KNOWN, roof_of
from moe_ops.core.formats import FP8_BLOCK, QTensor


def double(copy):
    x = torch.full((64, 64), float(copy + 1), device="cuda" if torch.cuda.is_available() else "cpu")
    return lambda: x * 2


def test_right_result_is_accepted_and_wrong_one_is_reported_without_a_time(capsys):
    bench = Bench("double", [])
    bench.case("ok", {"torch": double}, reference=lambda: double(0)(), nbytes=2 * 64 * 64 * 4, copies=3)
    bench.case("bad", {"torch": double}, reference=lambda: double(1)(), nbytes=2 * 64 * 64 * 4, copies=3)
    assert [f.split(":")[0] for f in bench.failures] == ["double torch bad"]
    assert "bytes differ" in bench.failures[0]
    assert {r["shape"] for r in bench.rows} == ({"ok"} if bench.has_gpu else set())
    with pytest.raises(SystemExit) as end:
        bench.rows.clear()
        bench.exit()
    assert end.value.code == 1


def test_unwritten_output_is_caught():
    def make(copy):
        return lambda: torch.empty(4096)

    bench = Bench("lazy", [])
    bench.case("empty", {"torch": make}, reference=lambda: torch.zeros(4096), nbytes=1)
    assert bench.failures


@pytest.mark.gpu
def test_row_has_times_rates_share_of_the_limit_and_provenance(tmp_path):
    bench = Bench("double", ["--out", str(tmp_path), "--reps", "5", "--commit", "abc"])
    bench.case("row", {"a": double, "b": double}, reference=lambda: double(0)(), nbytes=2 * 64 * 64 * 4, flops=64 * 64)
    path = bench.write()
    rows = json.loads(path.read_text())
    assert [r["impl"] for r in rows] == ["a", "b"]
    assert {"op", "shape", "p20_us", "p50_us", "p80_us", "host_us", "GB_s", "TFLOP_s", "of_limit", "gpu", "torch", "triton", "date", "commit"} <= set(
        rows[0]
    )
    assert rows[0]["commit"] == "abc"
    bench.write()
    assert len(json.loads(path.read_text())) == 2


def test_bad_case_is_refused():
    with pytest.raises(ValueError, match="give one of reference and check"):
        Bench("x", []).case("y", {}, nbytes=1)


def test_difference_looks_into_results_of_every_kind():
    data = torch.zeros(2, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    a = QTensor(data, torch.ones(2, 1), FP8_BLOCK, (1, 128))
    b = QTensor(data, torch.ones(2, 1) * 2, FP8_BLOCK, (1, 128))
    assert difference(a, a) is None
    assert difference((a, None), [a, None]) is None
    assert "tensor 1" in difference(a, b)
    assert "expected" in difference(torch.ones(2), torch.ones(3))
    nan = torch.full((3,), float("nan"))
    assert difference(nan, nan) is None
    assert difference(nan, nan, tolerance=1.0) is not None
    assert difference(torch.ones(3) * 1.001, torch.ones(3), tolerance=1e-2) is None
    assert difference(torch.ones(3) * 1.1, torch.ones(3), tolerance=1e-2) is not None


@pytest.mark.parametrize("kind", shapes.DISTRIBUTIONS)
@pytest.mark.parametrize("rows", (0, 1, 1000))
def test_group_distributions_sum_to_the_rows(kind, rows):
    counts = shapes.counts(kind, rows, 24)
    assert counts.dtype == torch.int32 and counts.sum() == rows and counts.min() >= 0
    if kind == "even":
        assert counts.max() - counts.min() <= 1
    if kind == "one_hot":
        assert counts.max() == rows


def test_models_and_expert_parallel_variants():
    m = shapes.model("deepseek-v3/EP8")
    assert (m.experts, m.local_experts, m.gemms["gate_up"]) == (256, 32, (4096, 7168))
    ids, weights = shapes.routed(m, 50)
    assert ids.shape == weights.shape == (50, 8)
    assert ((ids >= 0) & (ids < 256)).all() and (ids < 32).any(-1).all()
    assert all(len(set(row.tolist())) == 8 for row in ids)
    for name, ranks, _tokens in shapes.LAYER_CASES:
        shapes.MODELS[name].ep(ranks)
    with pytest.raises(ValueError, match="do not divide"):
        shapes.MODELS["mixtral-8x7b"].ep(3)
    with pytest.raises(ValueError, match="model must be one of"):
        shapes.model("gpt-5")


def test_roof_limit_is_the_larger_of_memory_and_math():
    roof = KNOWN["NVIDIA H200"]
    assert roof.limit(4.28e12) == pytest.approx(1.0)
    assert roof.limit(4.46e12, memory="read") == pytest.approx(1.0)
    assert roof.limit(1, 1463e12) == pytest.approx(1.0)
    assert roof.limit(1, 764e12, math="bf16") == pytest.approx(1.0)
    assert roof_of("a GPU nobody measured") is None


def test_tensors_of_nested_results():
    assert len(harness.tensors_of({"a": torch.ones(1), "b": [None, (torch.ones(1), 3)]})) == 2
