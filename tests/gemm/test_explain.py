"""Registry, `explain` and `moe-ops env`: who would run what, and a reason for each that cannot, on machines that lack something."""

import json
import os
import types

import pytest
import torch

from moe_ops import dense_gemm, explain, grouped_gemm, quantize, quantize_weight
from moe_ops.cli import main
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm import cutlass_choice, deep_gemm, env, registry, torch_scaled
from moe_ops.gemm.deep_gemm_probe import FORMS
from moe_ops.gemm.explain import explain_problem
from moe_ops.gemm.registry import Problem, Where, choose

DECODE = dict(rows=16, n=3072, k=4096, groups=8)
HOPPER = Where(registry.arch_of_capability(90), True, 0, "cuda:0")


@pytest.fixture
def bare(monkeypatch):
    """A machine without GPU, nvcc and deep_gemm."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MOE_OPS_CACHE", "/nowhere")
    monkeypatch.setattr(cutlass_choice, "_there", set())  # what was found before
    monkeypatch.setattr(deep_gemm, "compiler", lambda: None)
    monkeypatch.setattr(deep_gemm.importlib.util, "find_spec", lambda name: None)


def found(**reasons):
    return lambda index: {**dict.fromkeys(FORMS), **reasons}


@pytest.fixture
def installed(monkeypatch):
    """A machine where deep_gemm is installed and its probe says that all works."""
    monkeypatch.setattr(deep_gemm, "lacking", list)
    monkeypatch.setattr(deep_gemm, "features", found())


def test_env_a_bare_machine_says_why_for_each(bare):
    answer = explain("grouped_gemm", **DECODE)
    assert answer.chosen == "torch" and answer["triton"].reason == "needs CUDA tensors, got cpu"
    reason = answer["deep_gemm"].reason
    assert "cutlass_sm90a_grouped_64x128x128 has not been built (moe-ops build cutlass)" in answer["cutlass"].reason
    assert "no nvcc (CUDA_HOME" in answer["cutlass"].reason and "no CUTLASS headers" in answer["cutlass"].reason
    assert "deep_gemm is not installed (pip install sgl-deep-gemm" in reason and "no CUDA GPU" in reason and "no nvcc (CUDA_HOME" in reason
    text = str(answer)
    assert text.splitlines()[0] == "grouped_gemm fp8_block: 16 rows, 8 groups, N = 3072, K = 4096, to bfloat16; on cpu (cpu)"
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["triton", "deep_gemm", "cutlass", "torch"]
    assert "cannot: needs CUDA tensors" in text and "runs (the first that can): fp32 products of the dequantized operands" in text


def test_env_forcing_what_is_missing_is_one_error(bare):
    a, w = quantize(uneven((4, 128), seed=1), "fp8_block"), quantize_weight(uneven((2, 64, 128), seed=2), "fp8_block")
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^grouped_gemm: impl 'deep_gemm' cannot run here: deep_gemm is not installed \(pip install"):
        grouped_gemm(a, w, offsets, impl="deep_gemm")
    with pytest.raises(ValueError, match=r"^dense_gemm: impl 'deep_gemm' cannot run here: deep_gemm is not installed \(pip install"):
        dense_gemm(a, quantize_weight(uneven((64, 128), seed=2), "fp8_block"), impl="deep_gemm")


@pytest.mark.parametrize("name,path", [("CUDA_HOME", "/nowhere"), ("CUDA_PATH", "/nowhere")])
def test_env_toolkit_folders_without_nvcc(monkeypatch, tmp_path, name, path):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv(name, path)
    assert deep_gemm.compiler() is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv(name, str(tmp_path))
    assert deep_gemm.compiler() == str(tmp_path / "bin" / "nvcc")


def test_env_a_wheel_that_does_not_match_is_the_reason(monkeypatch, installed):
    broken = "deep_gemm cannot be imported: OSError: undefined symbol"
    monkeypatch.setattr(deep_gemm, "features", lambda index: dict.fromkeys(FORMS, broken))
    problem = Problem("grouped_gemm", "fp8_block", 16, 3072, 4096, 8)
    assert registry.reasons(problem, HOPPER)["deep_gemm"] == broken
    with pytest.raises(ValueError, match="impl 'deep_gemm' cannot run here: deep_gemm cannot be imported: OSError: undefined symbol"):
        choose(problem, HOPPER, "deep_gemm")


def test_forms_that_the_library_lacks_are_gone_round(monkeypatch, installed):
    packed = Problem("grouped_gemm", "fp8_block", 4000, 3072, 4096, 8)
    few = Problem("grouped_gemm", "fp8_block", 16, 3072, 4096, 8)
    masked = Problem("grouped_gemm", "fp8_block", 1024, 3072, 4096, 8, masked=True)

    def forms(**reasons):
        monkeypatch.setattr(deep_gemm, "features", found(**reasons))
        return [deep_gemm.grouped_reason(p, HOPPER) or deep_gemm.grouped_plan(p, HOPPER).split()[1] for p in (packed, few, masked)]

    assert forms() == ["psum", "masked", "masked"]
    lies = Problem("grouped_gemm", "fp8_block", 1024, 3072, 4096, 8, masked=True, layout="mn_major")
    assert deep_gemm.grouped_plan(lies, HOPPER) == "deep_gemm, masked form on the rows as they lie"
    assert forms(psum="no psum") == ["contiguous", "masked", "masked"]
    assert forms(masked="no masked") == ["psum", "psum", "no masked"]
    assert forms(psum="no psum", contiguous="none", masked="no masked") == ["none; no psum", "none; no psum", "no masked"]


def test_nothing_but_triton_is_taken_unasked_on_a_gpu(installed):
    for fmt in ("fp8_block", "mxfp8", "plain"):
        assert choose(Problem("grouped_gemm", fmt, 4096, 3072, 4096, 8), HOPPER).name == "triton"


@pytest.mark.parametrize(
    "changes,where,text",
    [
        (dict(fmt="plain"), 90, "16-bit operands stay with Triton and torch"),
        (dict(fmt="mxfp8"), 90, "DeepGEMM's MXFP8 needs SM100; fold the weight"),
        ({}, 100, "on SM100 DeepGEMM keeps only the exponent of a scale"),
        (dict(out_dtype=torch.float32), 90, "DeepGEMM writes bfloat16, not float32"),
        (dict(bias=True), 90, "DeepGEMM adds no bias"),
        (dict(pinned=True), 90, "a config pins a Triton kernel"),
        (dict(n=576 + 8), 90, "want N % 64 == 0 and K % 128 == 0, got N = 584"),
        (dict(k=2880), 90, "got N = 3072 and K = 2880"),
        (dict(segments=2, n=384), 90, r"scale blocks that start anew within the weight \(2 segments of 192 rows\)"),
        (dict(fmt="mxfp8", layout="mn_major"), 100, "scales of a must be row_major, got mn_major"),
        ({}, 89, "DeepGEMM has kernels for SM90 and SM100, sm_89 is SM89"),
        (dict(fmt="mxfp8"), 120, "DeepGEMM has kernels for SM90 and SM100, sm_120 is SM120"),
        ({}, 120, "DeepGEMM has kernels for SM90 and SM100, sm_120 is SM120"),
        (dict(out_dtype=torch.float32), 120, "DeepGEMM has kernels for SM90 and SM100, sm_120 is SM120"),
        ({}, 103, "on SM100 DeepGEMM keeps only the exponent of a scale"),
        (dict(op="bmm", fmt="mxfp8"), 90, "takes fp8_block, not mxfp8; fold the weight"),
        (dict(op="bmm", fmt="mxfp8"), 100, "takes fp8_block, not mxfp8$"),
    ],
)
def test_deep_gemm_refuses_by_name(installed, changes, where, text):
    problem = Problem(**{"op": "grouped_gemm", "fmt": "fp8_block", "rows": 64, "n": 3072, "k": 4096, "groups": 8, **changes})
    with pytest.raises(ValueError, match=text):
        choose(problem, Where(registry.arch_of_capability(where), True, 0, "cuda:0"), "deep_gemm")


def test_architectures_as_such(installed):
    answer = explain("grouped_gemm", **DECODE, device="sm90")
    assert answer.chosen == "triton" and "Gluon kernel that streams the weights" in answer["triton"].plan
    assert answer["deep_gemm"].reason == "can only be tried on a GPU of this machine"
    assert "Triton kernel, GroupedGemmConfig(" in explain("grouped_gemm", **DECODE, format="mxfp8", device="sm120")["triton"].plan
    plain = explain("grouped_gemm", rows=64, n=256, k=128, groups=2, format="plain", device="sm90")
    assert plain["torch"].plan == "torch._grouped_mm" and plain.chosen == "triton"


@pytest.mark.parametrize(
    "arguments,error,text",
    [
        (dict(op="gem"), ValueError, "op must be one of 'bmm', 'dense_gemm', 'grouped_gemm'"),
        (dict(format="int8"), ValueError, "format must be one of 'fp8_block', 'mxfp8', 'plain', got 'int8'"),
        (dict(rows=1.5), TypeError, "rows must be an int, got float"),
        (dict(k=0), ValueError, "k must be between 1 and"),
        (dict(k=48, format="mxfp8"), ValueError, "mxfp8 needs K % 32 == 0, got K = 48"),
        (dict(n=65, segments=2), ValueError, "65 rows of a weight do not divide into 2 segments"),
        (dict(device="sm70"), ValueError, "device must be one of 'sm89', 'sm90', 'sm100', 'sm103', 'sm120', got 'sm70'"),
        (dict(device="sm9.0"), ValueError, "device must be one of 'sm89', 'sm90', .* got 'sm9.0'"),
        (dict(device="70"), ValueError, "device must be one of 'sm89', 'sm90', .* got '70'"),
        (dict(device="meta"), ValueError, "device must be 'cuda', 'cpu' or an architecture such as 'sm90', got 'meta'"),
        (dict(out_dtype=torch.int8), ValueError, "out_dtype must be one of"),
        (dict(device="gpu"), ValueError, "device must be 'cuda', 'cpu' or an architecture such as 'sm90', got 'gpu'"),
        (dict(masked=True, gather=True), ValueError, "masked rows are not gathered"),
        (dict(masked=True, rows=17), ValueError, "17 masked rows do not divide into 8 groups"),
        (dict(unquantized=True), ValueError, "grouped_gemm: takes no activation that is not quantized for a quantized weight"),
        (dict(op="dense_gemm"), ValueError, "dense_gemm: is one product, got 8 groups"),
        (dict(op="dense_gemm", groups=1, masked=True), ValueError, "dense_gemm: masked and gathered rows are for grouped_gemm"),
        (dict(op="bmm", gather=True), ValueError, "bmm: masked and gathered rows are for grouped_gemm"),
        (dict(op="bmm", bias=True), ValueError, "bmm: takes no bias"),
        (dict(op="bmm", n=384, segments=2), ValueError, "bmm: segments of 192 rows; they must be multiples of 128 here"),
    ],
)
def test_bad_questions_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        explain(**{"op": "grouped_gemm", **DECODE, **arguments})


def test_asking_for_a_gpu_where_there_is_none(bare):
    with pytest.raises(ValueError, match="explain: there is no CUDA GPU here; ask about an architecture instead"):
        explain("grouped_gemm", **DECODE, device="cuda")


@pytest.mark.parametrize("device", ["90", "sm90", "sm_90", "sm_90a"])
def test_an_architecture_is_asked_about_in_any_spelling(device):
    assert str(explain("grouped_gemm", **DECODE, device=device)).splitlines()[0].endswith("on sm90 (sm_90)")


def test_env_an_override_does_not_contradict_the_cpu_that_runs(bare, monkeypatch):
    """MOE_OPS_ARCH on a CPU: the configs of that architecture, computed by the CPU; no reason asks for the architecture that is named above it."""
    monkeypatch.setenv("MOE_OPS_ARCH", "sm90")
    text = str(explain("dense_gemm", rows=16, n=1024, k=1024))
    assert text.splitlines()[0].endswith("on cpu (with the configs of sm_90)")
    assert "SM90 alone" not in text and "torch._scaled_mm needs CUDA tensors for scales of blocks, got cpu" in text
    text = str(explain("grouped_gemm", **DECODE, format="plain"))
    assert "SM90" not in text and "torch._grouped_mm takes part for CUDA tensors, got cpu" in text


def test_an_answer_has_no_entry_for_a_name_it_does_not_know():
    with pytest.raises(KeyError, match="cublas"):
        explain("grouped_gemm", **DECODE, device="sm90")["cublas"]


@pytest.mark.parametrize("op", registry.operations())
def test_env_a_gpu_without_fp8_is_served_by_nobody(installed, op):
    """The public functions refuse tensors there, whoever would compute: so does every answer."""
    old = Where(registry.arch_of_capability(80, 108), True, 0, "cuda:0")
    answer = explain_problem(Problem(op, "fp8_block", 16, 512, 128), old)
    assert answer.chosen is None and all("SM80" in entry.reason for entry in answer.entries)
    assert "runs" not in str(answer)


def test_nobody_can(monkeypatch):
    never = registry.Implementation("a", True, lambda p, w: "too large", lambda p, w: "")
    monkeypatch.setattr(registry, "implementations", lambda op: (never,))
    with pytest.raises(ValueError, match="grouped_gemm: no implementation can run here; a: too large"):
        choose(Problem("grouped_gemm", "plain", 1, 1, 1), HOPPER)


def test_dense_gemm_chooses_in_the_same_way(monkeypatch, installed):
    sizes = dict(rows=8, n=1536, k=7168)
    answer = explain("dense_gemm", **sizes | {"n": 576}, unquantized=True, device="sm90")
    assert answer.chosen == "triton" and "Triton kernel, quantizing inside, DenseGemmConfig(" in answer["triton"].plan
    for unquantized in (False, True):  # so many columns are quantized for by a kernel of their own
        plan = explain("dense_gemm", **sizes, unquantized=unquantized, device="sm90")["triton"].plan
        assert plan.startswith("Gluon kernel whose programs share K, DenseGemmConfig(")
    problem = Problem("dense_gemm", "fp8_block", 8, 1536, 7168, unquantized=True)
    assert choose(problem, HOPPER, "deep_gemm").plan(problem, HOPPER) == "deep_gemm, dense form, after a kernel that quantizes"
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert explain("dense_gemm", **sizes, device="sm90")["torch"].plan == "torch._scaled_mm"
    assert "DeepGEMM adds no bias and no residual" in explain("dense_gemm", **sizes, bias=True, device="sm90")["deep_gemm"].reason


def test_bmm_chooses_in_the_same_way(installed):
    answer = explain("bmm", rows=32, n=512, k=128, groups=128, unquantized=True, device="sm90")
    assert answer.chosen == "triton" and "at most 32 tokens, quantizing inside" in answer["triton"].plan and "head by head" in answer["torch"].plan
    problem = Problem("bmm", "fp8_block", 32, 512, 128, 128, unquantized=True)
    assert choose(problem, HOPPER, "deep_gemm").plan(problem, HOPPER) == "deep_gemm, fp8_einsum, after a kernel that quantizes"
    assert "takes fp8_block, not mxfp8" in explain("bmm", rows=32, n=512, k=128, groups=128, format="mxfp8", device="sm90")["deep_gemm"].reason


# ---- torch's own products


def test_torch_products_get_what_torch_wants(monkeypatch):
    """torch's operands, in torch's layout, as a stand-in sees them."""
    seen = {}

    def grouped(a, b, offs, out_dtype):
        assert b.stride(-2) == 1 and offs.tolist() == [3, 3, 8]
        parts, low = [], 0
        for i, high in enumerate(offs.tolist()):
            parts.append(a[low:high].float() @ b[i].float())
            low = high
        return torch.cat(parts).to(out_dtype)

    def scaled(a, b, scale_a, scale_b, out_dtype):
        seen.update(a=a, b=b, scale_a=scale_a, scale_b=scale_b)
        return torch.zeros((a.shape[0], b.shape[1]), dtype=out_dtype)

    monkeypatch.setattr(torch, "_grouped_mm", grouped)
    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    a, w, offsets = uneven((8, 64), seed=1), uneven((3, 16, 64), seed=2), torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    ref = grouped_gemm(a, w, offsets, impl="torch", out_dtype=torch.float32)
    assert relative_error(torch_scaled.grouped_mm(a, w, offsets), ref) < 4e-3
    wide = torch.zeros((8, 72), dtype=a.dtype)
    wide[:, 3:67] = a
    assert torch.equal(torch_scaled.grouped_mm(wide[:, 3:67], w, offsets), torch_scaled.grouped_mm(a, w, offsets))
    for layout in ("row_major", "mn_major"):
        qa, qw = quantize(uneven((8, 1024), seed=1), "fp8_block", layout=layout), quantize_weight(uneven((256, 1024), seed=2), "fp8_block")
        torch_scaled.scaled_mm(qa.data, qa.scale, qw.data, qw.scale)
        assert seen["scale_a"].stride() == (1, 8) and torch.equal(seen["scale_a"], qa.scale)
        assert seen["b"].shape == (1024, 256) and seen["scale_b"].shape == (8, 2) and seen["scale_b"].stride() == (1, 8)


def test_torch_scaled_mm_says_why_not(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.9")

    def reason(where=HOPPER, **changes):
        return torch_scaled.scaled_mm_reason(Problem(**{"op": "dense_gemm", "fmt": "fp8_block", "rows": 8, "n": 1536, "k": 7168, **changes}), where)

    assert reason() is None
    assert (
        "M % 4 == 0" in reason(rows=5)
        and "K % 512" in reason(k=640)
        and "N % 128" in reason(n=2112)
        and "bfloat16" in reason(out_dtype=torch.float32)
    )
    assert "not for mxfp8" in reason(fmt="mxfp8") and "no bias" in reason(bias=True) and "start anew" in reason(segments=2, n=384)
    assert "SM90 alone" in reason(Where(registry.arch_of_capability(100), True, 0, "cuda:0"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "from CUDA 12.9 on, this torch has 12.8" in reason()


@pytest.mark.gpu
def test_torch_grouped_mm_on_a_gpu():
    if torch.cuda.get_device_capability() != (9, 0) or not hasattr(torch, "_grouped_mm"):
        pytest.skip("torch._grouped_mm takes part on SM90, from torch 2.8 on")
    a, w = uneven((300, 512), seed=1).cuda(), uneven((5, 256, 512), seed=2).cuda()
    for ends in ([0, 17, 17, 200, 300], [0, 0, 0, 0, 0], [1, 2, 3, 4, 250]):
        offsets = torch.tensor([0, *ends], dtype=torch.int32, device="cuda")
        ref = grouped_gemm(a, w, offsets, impl="torch", out_dtype=torch.float32)
        out = grouped_gemm(a, w, offsets, impl="torch")
        assert relative_error(out[: ends[-1]], ref[: ends[-1]]) <= 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("m,n,k", [(4, 1536, 7168), (64, 7168, 2048), (128, 256, 512)])
def test_torch_scaled_mm_on_a_gpu(m, n, k):
    reason = torch_scaled.scaled_mm_reason(Problem("dense_gemm", "fp8_block", m, n, k), Where.of(torch.device("cuda")))
    if reason is not None:
        pytest.skip(reason)
    w = quantize_weight(uneven((n, k), block=(128, 128), seed=2).cuda(), "fp8_block")
    for x in (uneven((m, k), seed=1).cuda(), quantize(uneven((m, k), seed=1).cuda(), "fp8_block", layout="mn_major")):
        assert relative_error(dense_gemm(x, w, impl="torch"), dense_gemm(x, w, impl="torch", out_dtype=torch.float32)) <= 4e-3


# ---- moe-ops env


def test_env_command_on_a_bare_machine(bare, capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert (
        "no CUDA GPU: public functions compute with plain torch on the CPU" in text
        and "nvcc: none (only DeepGEMM and building the CUTLASS kernels need it)" in text
    )
    assert "CUTLASS headers: none (pip install nvidia-cutlass==4.2.0.0 --no-deps" in text and "CUTLASS kernels built: none (moe-ops build" in text
    assert f"torch {torch.__version__}" in text and "triton cache: " in text
    assert text.count("cannot: deep_gemm is not installed") == 6 and text.count("cannot: needs CUDA tensors, got cpu") == len(env.PROBLEMS)
    assert main(["env", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["gpus"] == [] and record["nvcc"] is None
    assert record["config_hits"] == {"tuned": 0, "problems": len(env.PROBLEMS)}
    assert f"config hits: 0 of the {len(env.PROBLEMS)} problems below have a tuned config" in text
    assert record["implementations"]["decode, FP8 blocks"]["chosen"] == "torch"
    assert record["implementations"]["decode, FP8 blocks"]["deep_gemm"]["can"] is False


def test_env_caches_that_cannot_be_written_are_named(bare, monkeypatch, tmp_path, capsys):
    """ENV: a cache folder that is missing, a file, or not ours; the folder above decides where it does not exist yet."""
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kernel").touch()
    assert env.cache_state(tmp_path / "missing" / "deeper") == {"path": str(tmp_path / "missing" / "deeper"), "entries": 0, "writable": True}
    assert env.cache_state(tmp_path / "full")["entries"] == 1
    assert env.cache_state(tmp_path / "file" / "below")["writable"] is False
    assert env.cache_state(tmp_path / "file") == {"path": str(tmp_path / "file"), "entries": None, "writable": False}
    denied = tmp_path / "denied" / ".triton" / "cache"  # somebody else's home, as a user who is not root sees it

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    exists, stat, listdir = os.path.exists, env.Path.stat, os.listdir
    (tmp_path / "denied").mkdir()
    below = str(tmp_path / "denied") + os.sep
    with monkeypatch.context() as m:
        m.setattr(env.Path, "stat", lambda self, **options: refuse(self) if str(self).startswith(below) else stat(self, **options))
        m.setattr(os.path, "exists", lambda path: not str(path).startswith(below) and exists(path))
        m.setattr(os, "listdir", lambda path: refuse(path) if str(path).startswith(below) else listdir(path))
        m.setattr(os, "access", lambda path, mode: False)
        assert env.cache_state(denied) == {"path": str(denied), "entries": None, "writable": False}
    monkeypatch.setattr(env.os, "access", lambda path, mode: False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "full"))
    main(["env"])
    assert f"triton cache: {tmp_path / 'full'}, 1 entries, NOT WRITABLE: every process compiles anew" in capsys.readouterr().out


def test_env_lists_gpus_and_why_one_is_too_old(bare, monkeypatch):
    old = "A100 is SM80; FP8 needs SM89 or newer (Ada, Hopper, Blackwell)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(total_memory=40 * 2**30))
    monkeypatch.setattr(env, "arch_of", lambda device: registry.arch_of_capability(80, 108))
    monkeypatch.setattr(env, "unsupported_reason", lambda device: old)
    assert env._gpus() == [{"name": "sm_80", "sm": 80, "multiprocessors": 108, "gib": 40.0, "reason_against": old}]
