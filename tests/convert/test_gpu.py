"""A GPU writes the bytes that the CPU writes, on every way through the converter: stacks, rounding again, bf16 again, verification."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_ops.convert import ConvertError, convert, pieces, stream, verify
from moe_ops.core.numerics import uneven

pytestmark = pytest.mark.gpu

E, H, INTER = 3, 64, 96
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=(False, True), ids=("whole", "cut"))
def cut(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(pieces, "PIECE", 24 << 10)


@pytest.fixture
def same(tmp_path, content):
    """Function: convert on both devices; all files must be equal but those whose errors are summed in another order."""

    def check(source, name="again", **options):
        on_cpu = convert(source, tmp_path / f"{name}-cpu", **options)
        on_gpu = convert(source, tmp_path / f"{name}-gpu", device="cuda", **options)
        a, b = content(tmp_path / f"{name}-cpu"), content(tmp_path / f"{name}-gpu")
        for file in ("moe_ops_convert.json", "README.md"):
            a.pop(file), b.pop(file)
        assert a.keys() == b.keys() and [n for n in a if a[n] != b[n]] == []
        assert on_gpu.counts() == on_cpu.counts() and on_gpu.exact() == on_cpu.exact()
        for tensor, error in on_cpu.errors().items():
            assert on_gpu.errors()[tensor].relative == pytest.approx(error.relative, rel=1e-3)
        return on_gpu

    return check


def stacks(folder, dtype):
    """gpt-oss: an expert is stored transposed, the gate and up rows in turns."""
    folder.mkdir()
    config = {"model_type": "gpt_oss", "num_local_experts": E}
    (folder / "config.json").write_text(json.dumps(config))
    p = "model.layers.0.mlp."
    tensors = {
        f"{p}experts.gate_up_proj": uneven((E, H, 2 * INTER), seed=1, dtype=dtype),
        f"{p}experts.gate_up_proj_bias": uneven((E, 2 * INTER), seed=2, dtype=dtype),
        f"{p}experts.down_proj": uneven((E, INTER, H), seed=3, dtype=dtype),
        f"{p}router.weight": uneven((E, H), seed=4, dtype=dtype),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ({}, {"format": "fp8_block", "rounding": "pow2"}, {"rounding": "floor", "stochastic": 7}), ids=str)
def test_stacks_are_taken_apart_to_the_same_bytes(options, dtype, same, tmp_path):
    assert same(stacks(tmp_path / "model", dtype), **options).counts()["quantized"] == 3 * E


@pytest.mark.parametrize("fmt", ("mxfp8", "fp8_block"))
@pytest.mark.parametrize("first", ({}, {"format": "fp8_block"}, {"format": "fp8_block", "rounding": "pow2"}), ids=str)
def test_quantized_sources_become_the_same_bytes(first, fmt, cut, same, pristine, tmp_path):
    """Kept exactly, rounded again and, attention, dequantized."""
    convert(pristine, tmp_path / "quantized", **first)
    counts = same(tmp_path / "quantized", format=fmt, only="experts").counts()
    assert counts["reencoded"] == 2 * 9 and counts["dequantized"] == 2 * 4
    same(tmp_path / "quantized", "stochastic", format=fmt, stochastic=3, exclude=["re:.*o_proj"])


@pytest.mark.parametrize("options", ({}, {"format": "fp8_block", "stochastic": 2}), ids=str)
def test_verify_converts_the_source_again(options, cut, pristine, tmp_path):
    out = tmp_path / "out"
    convert(pristine, out, **options)
    found = verify(out, against=pristine, device="cuda")
    assert found.ok and found.compared == found.hashed > 0, found.problems
    with pytest.raises(ConvertError, match="'cuda:99' is not available"):
        verify(out, against=pristine, device="cuda:99")


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("fmt", ("mxfp8", "fp8_block"))
def test_nan_in_a_weight_is_an_error(fmt, value, source, tmp_path):
    name, file = "model.layers.1.mlp.experts.2.up_proj.weight", source / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    tensors[name][5, 7] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConvertError, match=f"{name}.*NaN or infinity"):
        convert(source, tmp_path / "out", format=fmt, device="cuda")
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_conversion_that_began_on_the_cpu_ends_on_the_gpu(pristine, tmp_path, content, monkeypatch):
    finish, left = stream.FileWriter.finish, [1]

    def stop(self):
        if not left:
            raise InterruptedError
        left.pop()
        finish(self)

    with monkeypatch.context() as patch:
        patch.setattr(stream.FileWriter, "finish", stop)
        patch.setattr(stream, "ThreadPoolExecutor", lambda n, *a: ThreadPoolExecutor(1, *a))  # one file after the other
        with pytest.raises(InterruptedError):
            convert(pristine, tmp_path / "out", threads=1)
    report = convert(pristine, tmp_path / "out", device="cuda")
    assert len(report.resumed) == 1
    convert(pristine, tmp_path / "whole")
    weights = {n: d for n, d in content(tmp_path / "whole").items() if n.endswith(".safetensors")}
    assert weights == {n: d for n, d in content(tmp_path / "out").items() if n.endswith(".safetensors")}
