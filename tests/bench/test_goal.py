import runpy
import sys
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction

from moe_ops.bench import filled
from moe_ops.bench.goal import Goal
from moe_ops.bench.harness import Bench
from moe_ops.bench.launches import launches_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "goal,row,value,met,text",
    [
        (Goal("p50_us", 8.0), {"p50_us": 8.0}, 8.0, True, "p50_us <= 8"),
        (Goal("p50_us", 8.0), {"p50_us": 8.1}, 8.1, False, "p50_us <= 8"),
        (Goal("of_limit", 0.9), {"p50_us": 1.0, "of_limit": 0.9}, 0.9, True, "of_limit >= 0.9"),
        (Goal("of_limit", 0.9), {"p50_us": 1.0, "of_limit": 0.899}, 0.899, False, "of_limit >= 0.9"),
        (Goal("beyond_launcher_us", 10.0), {"p50_us": 1.0, "beyond_launcher_us": 12.5}, 12.5, False, "beyond_launcher_us <= 10"),
    ],
    ids=["time at the bound", "time above it", "share at the bound", "share below it", "CPU time above the bound"],
)
def test_row_is_judged_by_its_figure(goal, row, value, met, text):
    row = {"impl": "triton"} | row
    assert goal.columns(row, {"triton": row["p50_us"]}) == {"goal": text, "goal_value": value, "goal_met": met}


def test_ratio_compares_two_implementations_of_one_case():
    goal = Goal("ratio", 1.3, "large", to="small")
    times = {"small": 2.0, "large": 2.5}
    assert goal.columns({"impl": "large"}, times) == {"goal": "ratio to small <= 1.3", "goal_value": 1.25, "goal_met": True}
    assert goal.columns({"impl": "small"}, times) == {}
    assert goal.columns({"impl": "large"}, {"large": 2.5}) == {}  # the other one failed its check
    assert not goal.columns({"impl": "large"}, {"small": 1.0, "large": 2.0})["goal_met"]


def test_ratio_to_the_fastest_of_several():
    goal = Goal("ratio", 1.0, to=("a", "b"))
    times = {"triton": 3.0, "a": 4.0, "b": 2.0}
    text = "ratio to the best of a, b <= 1"
    assert goal.columns({"impl": "triton"}, times) == {"goal": text, "goal_value": 1.5, "goal_met": False, "goal_to": "b"}
    assert goal.columns({"impl": "triton"}, times | {"b": 6.0}) == {"goal": text, "goal_value": 0.75, "goal_met": True, "goal_to": "a"}
    assert goal.columns({"impl": "triton"}, {"triton": 3.0, "a": 4.0}) == {}  # the faster one may be the one that is missing
    assert str(Goal("ratio", 1.0, to=("a",))) == str(Goal("ratio", 1.0, to="a")) == "ratio to a <= 1"


def test_gain_over_many_cases(capsys):
    bench = Bench("op", [])
    row = {"op": "op", "impl": "triton", "goal": "ratio to a <= 1"}
    bench.rows += [row | {"shape": "x", "goal_value": 0.5, "goal_met": True}, row | {"shape": "y", "goal_value": 0.8, "goal_met": True}]
    bench.rows.append({"op": "op", "impl": "a", "shape": "x"})
    bench.gain("two", ["x", "y"], 1.5)
    bench.gain("one that was not judged is missing", ["x", "y", "z"], 1.5)
    (mean,) = bench.rows[3:]
    assert mean["goal"] == "geometric mean of rival / ours >= 1.5" and mean["goal_value"] == 1.581 and mean["goal_met"]  # sqrt(2 * 1.25)
    assert (mean["op"], mean["impl"], mean["shape"]) == ("op", "triton", "two") and "two: goal geometric mean" in capsys.readouterr().out
    bench.gain("two", ["x", "y"], 1.6)
    assert not bench.rows[-1]["goal_met"]


def test_results_file_of_another_name(tmp_path):
    bench = Bench("op", ["--out", str(tmp_path)], file="op_of_few_rows")
    bench.rows.append({"op": "op", "impl": "triton", "shape": "x"})
    assert bench.write().name == "op_of_few_rows.json" and Bench("op", []).file == "bench_op"


def test_parts_of_a_run_share_the_cases_and_keep_groups_together(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = []
    for part in ("0/2", "1/2"):
        bench = Bench("op", ["--part", part])
        for name in ("a 1", "a 2", "b 1", "c 1", "b 2"):
            bench.case(name, {"triton": lambda copy: lambda: torch.ones(1)}, reference=lambda: torch.ones(1), nbytes=1, group=name[0])
        ran.append([line.split(":")[0].removeprefix("op triton ") for line in capsys.readouterr().out.splitlines()])
    assert ran == [["a 1", "a 2", "c 1"], ["b 1", "b 2"]]


def test_jobs_run_every_part_of_the_same_cases(monkeypatch, tmp_path, capsys):
    script = tmp_path / "bench_x.py"
    script.write_text(
        "import sys, pathlib\npathlib.Path(__file__ + sys.argv[-1][0]).write_text(' '.join(sys.argv[1:]))\nsys.exit('wrong ' + sys.argv[-1])"
    )
    monkeypatch.setattr(sys, "argv", [str(script)])
    Bench("x", ["--goals", "--only", "M=1 N"])._compile(2)
    seen = [(tmp_path / f"bench_x.py{i}").read_text() for i in range(2)]
    assert seen == [f"--no-time --only M=1 N --goals --part {i}/2" for i in range(2)]
    assert "wrong 0/2" in capsys.readouterr().out


def test_an_implementation_that_raises_costs_its_own_rows_alone(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def broken(copy):
        raise RuntimeError("no such kernel")

    bench = Bench("op", [])
    bench.case("x", {"rival": broken, "triton": lambda copy: lambda: torch.ones(1)}, reference=lambda: torch.ones(1), nbytes=1)
    assert bench.failures == ["op rival x: RuntimeError: no such kernel"] and "op triton x: right" in capsys.readouterr().out


def test_baseline_and_a_row_without_the_figure_are_not_judged():
    goal = Goal("of_limit", 0.9)
    assert goal.columns({"impl": "torch", "of_limit": 0.1}, {"torch": 1.0}) == {}
    assert goal.columns({"impl": "triton", "of_limit": None}, {"triton": 1.0}) == {}  # nobody measured this machine's limits


@pytest.mark.parametrize(
    "figure,to", [("p90_us", ""), ("ratio", ""), ("p50_us", "other")], ids=["no such figure", "ratio to nothing", "time to something"]
)
def test_goal_that_means_nothing_is_refused(figure, to):
    with pytest.raises(ValueError, match="Goal: figure"):
        Goal(figure, 1.0, to=to)


def test_goals_alone_run_on_request(capsys):
    def make(copy):
        return lambda: torch.ones(3)

    bench = Bench("ones", ["--goals", "--no-time"])
    bench.case("with", {"triton": make}, reference=lambda: torch.ones(3), nbytes=1, goal=Goal("p50_us", 1.0))
    bench.case("without", {"triton": make}, reference=lambda: torch.ones(3), nbytes=1)
    bench.case("wrong", {"triton": make}, reference=lambda: torch.zeros(3), nbytes=1, goal=Goal("p50_us", 1.0))
    printed = capsys.readouterr().out
    assert "ones triton with: right" in printed and "without" not in printed
    assert not bench.rows and [f.split(":")[0] for f in bench.failures] == ["ones triton wrong"]


def test_end_of_a_run_counts_the_goals_and_names_the_missed(capsys, tmp_path):
    bench = Bench("op", ["--out", str(tmp_path)])
    row = {"op": "op", "impl": "triton", "goal": "p50_us <= 8"}
    bench.rows += [row | {"shape": "T=1", "goal_value": 7.5, "goal_met": True}, row | {"shape": "T=16", "goal_value": 9.0, "goal_met": False}]
    with pytest.raises(SystemExit) as end:
        bench.exit()
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "op: 1 of 2 goals met" in printed and "missed: op triton T=16: goal p50_us <= 8: 9, MISSED" in printed


def test_launches_of_a_call_can_be_repeated_alone(monkeypatch):
    ran = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **options: ran.append((kernel, args, grid, warmup, options)))
    kernel = JITFunction.__new__(JITFunction)

    def call():
        kernel[(2,)](1, x=3)
        kernel[(5, 1)](2, num_warps=4)
        kernel.run(7, grid=(1,), warmup=True)  # compiled ahead, not launched

    launches = launches_of(call)
    first, ran[:] = list(ran), []
    assert len(launches) == 2 and len(first) == 3
    for launch in launches:
        launch()
    assert ran == first[:2]


@pytest.mark.gpu
def test_call_is_set_beside_its_bare_launches():
    from moe_ops import quantize

    x = torch.randn(4, 256, device="cuda")
    bench = Bench("quantize", ["--reps", "3"])
    bench.case("x", {"triton": lambda copy: lambda: quantize(x, "mxfp8")}, check=lambda out: None, nbytes=1, goal=Goal("beyond_launcher_us", 1e3))
    (row,) = bench.rows
    # which of the two times is longer is not asked: other tests share the cores
    assert row["launches"] == 1 and row["launcher_us"] > 0 and row["host_us"] > 0
    assert row["goal_met"] and row["goal_value"] == round(row["beyond_launcher_us"], 3)


@pytest.mark.parametrize("form", filled.FORMS)
def test_filled_rows_are_the_same_in_every_capacity_and_the_rest_is_nan(form):
    small, counts = filled.buffer(form, 64, 64, 8, torch.float32, torch.device("cpu"), 3)
    large, more = filled.buffer(form, 128, 64, 8, torch.float32, torch.device("cpu"), 3)
    assert torch.equal(counts, more) and counts.sum() == 64
    assert torch.equal(filled.rows_of(small, form, 64), filled.rows_of(large, form, 64))
    assert small.isfinite().all() and large.isnan().sum() == 64 * 8


def test_files_with_goals_are_found():
    files = runpy.run_path(str(BENCHMARKS / "goals.py"))["files"]
    assert {f.stem for f in files([])} >= {"bench_launch", "bench_quantize", "bench_silu_mul_quantize", "bench_combine", "bench_route", "bench_dense"}
    assert {f.stem for f in files(["quant"])} == {"bench_quantize", "bench_silu_mul_quantize"} and not files(["nowhere"])
