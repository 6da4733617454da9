"""The README's Python blocks run as they stand, in a fresh folder, each block on its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def title(block):
    return re.sub(r"\W+", "-", block.splitlines()[0].lstrip("# ")).strip("-")


@pytest.mark.parametrize("block", BLOCKS, ids=title)
def test_quick_start_runs(block, tmp_path):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", block], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


def test_there_is_one_quick_start_for_each_kind_of_user_of_ten_lines_or_so():
    assert len(BLOCKS) >= 3
    for block in BLOCKS:
        code = [line for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]
        assert len(code) <= 14, title(block)


def test_make_targets_named_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {t for t in re.findall(r"`make ([a-z-]+)", README)} <= targets
