"""The commands: exit status, what goes to stdout and to stderr, and JSON for machines."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ops.cli import main
from moe_ops.convert import ConvertError, conversion, verification


def test_convert_verify_inspect(pristine, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert", str(pristine), out, "--format", "fp8_block", "--rounding", "pow2", "--exclude", "re:.*o_proj", "--threads", "2"]) == 0
    printed = capsys.readouterr()
    assert "fp8_block, rounding pow2, layout hf" in printed.out and "24 quantized" in printed.out and "SQNR" in printed.out
    assert "convert:" not in printed.err  # no terminal, no progress bar
    assert main(["verify", out, "--against", str(pristine)]) == 0
    assert "byte for byte" in capsys.readouterr().out
    assert main(["inspect", out]) == 0
    assert "F8_E4M3" in capsys.readouterr().out
    assert main(["convert", out, str(tmp_path / "mx"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tensors"]["reencoded"] == report["reencoded_exactly"] == 24 and report["bytes_out"] > 0


def test_json_is_all_there_is_on_stdout(pristine, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert", str(pristine), out, "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["already_complete"] is False
    assert report["dry_run"] and report["tensors"]["quantized"] == 26 and not os.path.exists(out)
    assert report["kept"]["model.layers.0.mlp.gate.weight"].endswith("router")
    assert main(["convert", str(pristine), out, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["errors"]) == 26 and report["error"]["cosine"] > 0.999
    assert main(["verify", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hashed"] == 59 and found["ok"] is True
    assert main(["inspect", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dialect"] == "mxfp8" and found["ok"] is True


def test_errors_go_to_stderr_and_set_the_status(pristine, tmp_path, capsys):
    out = str(tmp_path / "out")
    for argv, text in (
        (["convert", str(tmp_path / "none"), out], "does not exist"),
        (["convert", str(pristine), str(pristine)], "must lie outside"),
        (["convert", str(pristine), out, "--include", "re:nothing"], "nothing"),
        (["verify", str(tmp_path / "none")], "no folder"),
        (["inspect", str(tmp_path)], "no *.safetensors"),
    ):
        assert main([*argv, "--json"]) == 1
        printed = capsys.readouterr()
        assert text in printed.err and printed.err.startswith(f"moe-ops: {argv[0]}: ") and printed.err.count("convert:") == (argv[0] == "convert")
        assert text in json.loads(printed.out)["message"] and f"moe-ops: {json.loads(printed.out)['message']}\n" == printed.err
    assert not os.path.exists(out)


@pytest.mark.parametrize("argv", (["convert"], ["convert", "a", "b", "--format", "int4"], ["convert", "a", "b", "--threads", "0"], ["verify"]))
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and "usage: moe-ops" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    (
        (["convert", "a", "b", "--rounding", "pow2"], "rounding must be one of rceil, floor, even for mxfp8, got 'pow2'"),
        (["convert", "a", "b", "--device", "tpu"], "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        (["verify", "a", "--device", "cuda:x"], "--device must be cpu, cuda or cuda:N, got 'cuda:x'"),
        (["convert", "a", "b", "--exclude", "re:("], "--exclude 're:(' is no regular expression"),
    ),
)
def test_arguments_that_are_wrong_whatever_the_source_are_wrong_usage_in_json_too(argv, text, capsys):
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            main([*argv, *more])
        printed = capsys.readouterr()
        assert end.value.code == 2 and "usage: moe-ops" in printed.err and text in printed.err and bool(printed.out) == bool(more)
    message = json.loads(printed.out)
    assert message["ok"] is False and message["message"].startswith(f"{argv[0]}: ") and text in message["message"]


@pytest.mark.parametrize("argv", (["inspect", "{src}", "--json"], ["convert", "--help"], ["--help"]), ids=" ".join)
def test_a_reader_that_leaves_is_no_traceback(argv, pristine):
    command = [sys.executable, "-m", "moe_ops", *(a.format(src=pristine) for a in argv)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2])
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    assert run.stderr.read() == "" and run.wait(timeout=120) in (141, 141 if "--json" in argv else 0)  # argparse itself may swallow it
    run.stderr.close()


def test_a_bad_result_sets_the_status(pristine, tmp_path, capsys):
    assert main(["verify", str(pristine)]) == 1
    assert "NOT OK" in capsys.readouterr().out


def test_what_is_kept_is_listed_by_reason(pristine, tmp_path, capsys):
    assert main(["convert", str(pristine), str(tmp_path / "out"), "--dry-run", "--exclude", "re:.*o_proj"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line for line in lines if line.startswith("would keep")) == [
        "would keep, excluded by re:.*o_proj: model.layers.0.self_attn.o_proj.weight and 1 more",
        "would keep, never quantized: embedding: model.embed_tokens.weight",
        "would keep, never quantized: norm: model.layers.0.input_layernorm.weight and 2 more",
        "would keep, never quantized: output head: lm_head.weight",
        "would keep, never quantized: router: model.layers.0.mlp.gate.weight and 1 more",
    ]


def test_weights_that_lose_their_format_are_a_warning_everywhere(pristine, tmp_path, capsys):
    fp8, out = str(tmp_path / "fp8"), tmp_path / "out"
    assert main(["convert", str(pristine), fp8, "--format", "fp8_block", "--rounding", "pow2"]) == 0
    capsys.readouterr()
    text = "8 weights, model.layers.0.self_attn.k_proj first, are fp8_block in the source and bf16 in the result: not a routed expert"
    for more in (["--dry-run"], ["--json"], []):
        assert main(["convert", fp8, str(out), "--only", "experts", *more]) == 0
        printed = capsys.readouterr().out
        assert text in printed and ("--json" in more or f"warning: {text}" in printed)
        if "--json" in more:
            assert json.loads(printed)["warnings"] == [text]
            assert set(json.loads(printed)["dequantized"].values()) == {"not a routed expert"}
    assert "already complete" in printed and "reencoded weights" not in printed  # how many kept their bytes is not known again
    assert f"Note: {text}." in (out / "README.md").read_text()


def test_interrupt(pristine, tmp_path, monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "plan_conversion", stop)
    assert main(["convert", str(pristine), str(tmp_path / "out")]) == 130
    assert "goes on from here" in capsys.readouterr().err
    monkeypatch.setattr(verification, "read_source", stop)
    assert main(["verify", str(pristine)]) == 130
    assert capsys.readouterr().err == "moe-ops: verify: interrupted\n"


def test_progress_bar_has_rate_and_time_left(pristine, tmp_path):
    code = "import sys; from moe_ops.convert import convert; convert(sys.argv[1], sys.argv[2], progress=True)"
    done = subprocess.run([sys.executable, "-c", code, pristine, tmp_path / "out"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"convert: 100%.* 4.36M/4.36M \[.*<00:00, .*B/s", done.stderr), done.stderr
    assert not done.stdout


MEMORY = """
import json, re, sys, threading, time
from moe_ops.convert import convert

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

peak, stop = [0], threading.Event()
def watch():
    while not stop.wait(0.002):
        peak[0] = max(peak[0], anonymous())
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
convert(sys.argv[1], sys.argv[2], include=["re:.*"], threads=2)
stop.set()
print(peak[0] - before)
"""


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status") or "RssAnon" not in Path("/proc/self/status").read_text(),
    reason="needs Linux's /proc, with RssAnon: the system does not tell anonymous memory apart here",
)
def test_WHOLE_memory_is_a_few_buffers_whatever_the_size(tmp_path):
    """One tensor of 192 MiB and 100 MiB of others, on two threads of about 35 MiB."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    g = torch.Generator().manual_seed(0)
    row = torch.randn(1024, generator=g).bfloat16()
    tensors = {"big.weight": row.expand(96 * 1024, 1024).contiguous()}
    tensors |= {f"layers.{i}.up.weight": row.roll(i).expand(2560, 1024).contiguous() for i in range(20)}
    save_file(tensors, folder / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", MEMORY, folder, tmp_path / "out"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150 << 20


def test_functions_are_the_commands():
    import moe_ops.convert as package

    assert {"convert", "verify", "inspect", "Options", "Report", "ConvertError"} <= set(package.__all__)
    assert callable(package.convert) and callable(package.verify) and callable(package.inspect)
    assert issubclass(ConvertError, ValueError)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
