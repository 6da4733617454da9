"""The figures of the README's section on conversion are those of the committed results."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
README = (ROOT / "README.md").read_text()

ROWS = {
    "mxfp8 rceil": "mxfp8 rceil (default)",
    "mxfp8 floor": "mxfp8 floor",
    "mxfp8 even": "mxfp8 even",
    "mxfp8 stochastic": "mxfp8 rceil, stochastic",
    "fp8_block": "fp8_block",
}


@pytest.mark.parametrize("variant", ROWS)
def test_trained_weights(variant):
    v = json.loads((RESULTS / "real_weights.json").read_text())["variants"][variant]
    embedding = f"{v['embedding_cosine_mean']:.5f} / {v['embedding_cosine_min']:.5f}"
    row = f"| {ROWS[variant]} | {v['sqnr_db']:.2f} | {v['worst_sqnr_db']:.2f} | {v['lowest_cosine']:.6f} | {embedding} |"
    assert f"{row} {v['similarity_largest_change']:.4f} |" in README
    assert len(v["weights"]) == 36 and all({"sqnr_db", "cosine"} == set(w) for w in v["weights"].values())


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3-moe", "Qwen3-MoE"), ("deepseek-v3", "DeepSeek-V3"), ("mixtral", "Mixtral"), ("gpt-oss", "gpt-oss")]
)
def test_four_families(family, name):
    rows = {r["format"]: r for r in json.loads((RESULTS / "round_trip.json").read_text())["rows"] if r["family"] == family}
    cells = []
    for fmt in ("mxfp8", "fp8_block"):
        weights = rows[fmt]["weights"]
        cells += ["" if weights is None else f"{weights:.3f}", f"{rows[fmt]['experts_run_quantized']:.3f}"]
    assert "| " + " | ".join([name, *cells]).replace("|  |", "| |") + " |" in README


def test_what_a_conversion_takes():
    r = json.loads((RESULTS / "bench_convert.json").read_text())
    gpu = json.loads((RESULTS.parent / "nvidia_h200" / "bench_convert.json").read_text())
    cold, one, memory = r["convert_cold"], r["convert_one_core_cached"], r["one_core_in_memory"]

    def gb(value):
        return f"{value / 1e9:.2f}"

    for figure in (
        f"{r['bytes'] / 1e9:.1f} GB checkpoint whose largest tensor has {gb(r['largest_tensor'])} GB took {gb(cold['rss_anon_peak'])} GB",
        f"{cold['seconds']:.1f} s from a cold cache: {gb(cold['rate'])} GB of source a second",
        f"reads {gb(r['read_cold'])} and writes {gb(r['write_synced'])}",
        f"One core alone, from a cached source, converts {gb(one['rate'])} GB/s",
        f"measures the error too, {gb(memory['mxfp8_converter_with_errors'])} where the plain",
        f"reaches {gb(memory['mxfp8_plain'])} in the median process and {' to '.join(map(gb, memory['ranges']['mxfp8_plain']))} in all",
        f"{gpu['convert_cold']['seconds']:.1f} s: {gb(gpu['convert_cold']['rate'])} GB/s where that disk reads {gb(gpu['read_cold'])}",
        f"took {gpu['convert_cold_cpu']['seconds']:.1f} s, {gb(gpu['convert_cold_cpu']['rate'])} GB/s",
    ):
        assert figure in " ".join(README.split()), figure
    assert cold["rss_anon_peak"] <= r["memory_limit"] and gpu["convert_cold"]["rss_anon_peak"] <= gpu["memory_limit"]
    assert gpu["share_of_slower"] > 0.7
    assert one["rate"] > 2 * 250e6  # twice what a core was expected to reach with the plain expression
    assert memory["mxfp8_converter_with_errors"] > 2 * memory["mxfp8_plain"]
