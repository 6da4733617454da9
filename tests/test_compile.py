"""Every kernel compiles for every architecture (tests/compile_cases.py, in a process of its own: this one may run the interpreter)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUNNER = Path(__file__).parent / "compile_cases.py"


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="make test compiles ahead, on machines without a GPU")
@pytest.mark.parametrize("capability", (89, 90, 100, 120))
def test_every_kernel_compiles(capability, request):
    """SM89 and SM120, whose kernels are SM90's and SM100's without what those have more of, by every second case; `make test-all` all."""
    thin = ["--thin"] if capability in (89, 120) and not request.config.getoption("--all-cutlass") else []
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(RUNNER), str(capability), *thin], env=env, cwd=RUNNER.parent.parent, capture_output=True, text=True)
    if run.returncode:
        pytest.fail(run.stdout[-10000:] + run.stderr[-3000:], pytrace=False)
