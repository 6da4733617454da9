"""What CUTLASS can run and why not, on machines that lack something, and its first use."""

import pytest
import torch

from moe_ops import explain, freeze, grouped_gemm, quantize, quantize_weight
from moe_ops.core.numerics import uneven
from moe_ops.gemm import cutlass_build as build
from moe_ops.gemm import cutlass_choice as choice
from moe_ops.gemm import cutlass_library as library
from moe_ops.gemm import deep_gemm, registry
from moe_ops.gemm.registry import Problem, Where, choose

HOPPER = Where(registry.arch_of_capability(90), True, 0, "cuda:0")
BLACKWELL = Where(registry.arch_of_capability(100), True, 0, "cuda:0")


@pytest.fixture
def built(monkeypatch):
    """A machine where the kernels have been built and work."""
    monkeypatch.setattr(choice, "unbuilt", lambda arch, kind: [])
    monkeypatch.setattr(choice, "features", lambda index, kind: None)


@pytest.mark.parametrize(
    "changes,where,text",
    [
        (dict(fmt="plain"), 90, "16-bit operands stay with Triton and torch"),
        (dict(fmt="mxfp8"), 90, "the CUTLASS kernels for mxfp8 need SM100, sm_90 is SM90; fold the weight"),
        ({}, 100, "the CUTLASS kernels for fp8_block need SM90, sm_100 is SM100"),
        (dict(fmt="mxfp8"), 120, "need SM100, sm_120 is SM120$"),
        ({}, 89, "need SM90, sm_89 is SM89"),
        (dict(out_dtype=torch.float32), 90, "write bfloat16, not float32"),
        (dict(bias=True), 90, "add no bias"),
        (dict(pinned=True), 90, "a config pins a Triton kernel"),
        (dict(n=3076), 90, r"want N % 8 == 0 and K % 16 == 0 \(16 bytes for TMA\), got 3076 and 4096"),
        (dict(k=4104), 90, "got 3072 and 4104"),
        (dict(segments=2, n=392), 90, "want rows of a segment % 8 == 0 and K % 16 == 0 .* got 196 and 4096"),
        (dict(fmt="mxfp8", layout="mn_major"), 100, "scales of a must be row_major, got mn_major"),
        (dict(op="dense_gemm", groups=1, fmt="mxfp8"), 100, "the CUTLASS kernel for mxfp8 is behind grouped_gemm alone$"),
        (dict(op="bmm"), 90, "there is no CUTLASS kernel for heads here"),
        (dict(op="bmm", fmt="mxfp8"), 90, "there is no CUTLASS kernel for heads here$"),
        (dict(op="bmm"), 100, "there is no CUTLASS kernel for heads here"),
        (dict(op="dense_gemm", groups=1, fmt="mxfp8"), 90, "is behind grouped_gemm alone; fold the weight"),
        (dict(op="dense_gemm", groups=1, fmt="mxfp8"), 89, "is behind grouped_gemm alone$"),
    ],
)
def test_refused_by_name(built, changes, where, text):
    problem = Problem(**{"op": "grouped_gemm", "fmt": "fp8_block", "rows": 64, "n": 3072, "k": 4096, "groups": 8, **changes})
    with pytest.raises(ValueError, match=text):
        choose(problem, Where(registry.arch_of_capability(where), True, 0, "cuda:0"), "cutlass")


def test_what_can_run_says_what_would(built, monkeypatch):
    few, many = (Problem("grouped_gemm", "fp8_block", rows, 5760, 2880, 8, segments=2) for rows in (16, 8000))
    assert choose(few, HOPPER, "cutlass").plan(few, HOPPER) == "CUTLASS, 64x128x128 ping-pong"
    gathered = Problem("grouped_gemm", "fp8_block", 8000, 256, 256, 8, gather=True)
    assert choose(gathered, HOPPER, "cutlass").plan(gathered, HOPPER) == "CUTLASS, 128x128x128 cooperative, after a copy of the gathered rows"
    assert choice.plan(many, HOPPER) == "CUTLASS, 128x128x128 cooperative"
    blocks = Problem("grouped_gemm", "mxfp8", 8000, 256, 256, 8)
    assert choice.reason(blocks, BLACKWELL) is None and choice.plan(blocks, BLACKWELL) == "CUTLASS, 256x128x128 two multiprocessors"
    linear = Problem("dense_gemm", "fp8_block", 8, 576, 7168, unquantized=True)
    assert choice.plan(linear, HOPPER) == "CUTLASS, 64x128x128 ping-pong, after a kernel that quantizes"
    monkeypatch.setattr(choice, "unbuilt", build.of_kind)
    assert choice.plan(linear, HOPPER).endswith("quantizes; compiled by the first call, which takes a minute")
    assert choose(Problem("grouped_gemm", "fp8_block", 4096, 3072, 4096, 8), HOPPER).name == "triton"  # nobody is taken unasked


def test_env_a_machine_that_lacks_something_says_what(monkeypatch):
    """ENV: no nvcc, no headers: the reason, with the remedy, and no traceback."""
    monkeypatch.setattr(choice, "unbuilt", build.of_kind)
    monkeypatch.setattr(deep_gemm, "compiler", lambda: None)
    monkeypatch.setattr(build, "headers", lambda: None)
    answer = explain("grouped_gemm", rows=16, n=3072, k=4096, groups=8, device="sm90")["cutlass"].reason
    assert answer.startswith(
        "cutlass_sm90a_grouped_64x128x128 has not been built (moe-ops build cutlass), and cannot be built here: no nvcc (CUDA_HOME"
    )
    assert "no CUTLASS headers (CUTLASS_PATH, or pip install nvidia-cutlass==4.2.0.0 --no-deps)" in answer
    a, w = quantize(uneven((4, 128), seed=1), "fp8_block"), quantize_weight(uneven((2, 64, 128), seed=2), "fp8_block")
    with pytest.raises(ValueError, match="^grouped_gemm: impl 'cutlass' cannot run here: cutlass_sm90a_grouped_64x128x128 has not been built"):
        grouped_gemm(a, w, torch.tensor([0, 1, 4], dtype=torch.int32), impl="cutlass")
    monkeypatch.setattr(choice, "unbuilt", lambda arch, kind: [])
    assert explain("grouped_gemm", rows=16, n=64, k=128, device="cpu")["cutlass"].reason == "needs CUDA tensors, got cpu"
    assert explain("grouped_gemm", rows=16, n=64, k=128, device="sm90")["cutlass"].reason == "can only be tried on a GPU of this machine"


def test_env_a_kernel_that_does_not_work_is_the_reason(built, monkeypatch):
    monkeypatch.setattr(choice, "features", lambda index, kind: f"{kind} gives wrong results here")
    problem = Problem("grouped_gemm", "fp8_block", 16, 3072, 4096, 8)
    assert registry.reasons(problem, HOPPER)["cutlass"] == "grouped gives wrong results here"


def test_the_disk_is_asked_until_all_is_there(monkeypatch):
    asked = []
    monkeypatch.setattr(choice, "_there", set())
    monkeypatch.setattr(choice.build, "missing", lambda kernels: asked.append(kernels) or ([] if len(asked) > 1 else list(kernels)))
    assert [len(choice.unbuilt("sm90a", "dense")) for _ in range(4)] == [2, 0, 0, 0] and len(asked) == 2


def test_first_use_builds_and_tries(built, monkeypatch):
    made = []
    monkeypatch.setattr(choice, "unbuilt", lambda arch, kind: [] if made else build.of_kind(arch, kind))
    monkeypatch.setattr(choice.build, "build", made.extend)
    problem = Problem("dense_gemm", "fp8_block", 16, 3072, 4096)
    freeze()
    try:
        with pytest.raises(
            RuntimeError, match=r"dense_gemm: cutlass_sm90a_dense_64x128x128 has never run .* after moe_ops.freeze\(\): run the op once"
        ):
            choice.make_ready(problem, HOPPER)
    finally:
        freeze(False)
    choice.make_ready(problem, HOPPER)
    choice.make_ready(problem, HOPPER)
    assert [i.name for i in made] == ["cutlass_sm90a_dense_64x128x128", "cutlass_sm90a_dense_128x128x128"]
    made.clear()
    monkeypatch.setattr(choice, "features", lambda index, kind: "wrong results")
    with pytest.raises(ValueError, match="dense_gemm: impl 'cutlass' cannot run here: wrong results"):
        choice.make_ready(problem, HOPPER)


def test_graph_first_call_is_refused_when_frozen(monkeypatch):
    monkeypatch.setattr(library, "_loaded", {})
    freeze()
    try:
        with pytest.raises(
            RuntimeError, match=r"grouped_gemm: cutlass_sm90a_grouped_64x128x128 has never run on this GPU and cannot be loaded after"
        ):
            library.library_of("grouped_gemm", build.INSTANTIATIONS[0], 0)
        monkeypatch.setattr(library, "_loaded", {build.INSTANTIATIONS[0]: "loaded"})
        monkeypatch.setattr(library, "_warm", {(build.INSTANTIATIONS[0], 0)})
        assert library.library_of("grouped_gemm", build.INSTANTIATIONS[0], 0) == "loaded"
    finally:
        freeze(False)
