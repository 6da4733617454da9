import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import json, sys, time
import torch
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
import moe_ops
loaded = [m for m in sys.modules if m.startswith("moe_ops.")]
print(json.dumps(dict(seconds=seconds, triton="triton" in sys.modules, loaded=loaded, names=moe_ops.__all__)))
"""


def probe(module):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", PROBE.format(module=module)], env=env, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_import_is_quick_and_loads_no_triton_and_needs_no_gpu():
    result = probe("moe_ops")
    assert result["seconds"] < 1 and not result["triton"] and result["loaded"] == []
    assert {"quantize", "route", "grouped_gemm", "fused_moe", "MoELayer", "hf"} <= set(result["names"])


def test_importing_one_part_loads_no_other():
    for part in ("quant", "router", "gemm", "layer"):
        result = probe(f"moe_ops.{part}")
        assert result["seconds"] < 1 and not result["triton"], part
        assert {m.split(".")[1] for m in result["loaded"]} == {part}


def test_unknown_name_is_an_attribute_error():
    import moe_ops

    try:
        moe_ops.quantise  # noqa: B018
    except AttributeError as error:
        assert "module 'moe_ops' has no attribute 'quantise'" in str(error)
    else:
        raise AssertionError("no error")
    assert set(moe_ops.__all__) <= set(dir(moe_ops))
