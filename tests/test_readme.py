"""The README's Python blocks run as they stand, in a fresh folder, each block on its own."""

import os
import re
import shutil
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
    for _ in range(1 + ("convert(" in block)):  # people paste a second time, where the first has left its files
        run = subprocess.run([sys.executable, "-c", block], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-3000:]


def test_there_is_one_quick_start_for_each_kind_of_user_of_ten_lines_or_so():
    assert len(BLOCKS) >= 3
    for block in BLOCKS:
        code = [line for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]
        assert len(code) <= 14, title(block)


def test_every_public_name_is_in_the_table_of_ops():
    import moe_ops

    table = README.partition("## Ops\n")[2].partition("\n## ")[0]
    named = {word for row in table.splitlines() for word in re.findall(r"\w+", row[1:].partition(" | ")[0])}
    assert set(moe_ops.__all__) <= named


def test_make_targets_named_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {t for t in re.findall(r"`make ([a-z-]+)", README)} <= targets


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize(("target", "lost"), (("demo", "torch"), ("test", "pytest"), ("bench", "triton"), ("lint", "ruff")))
def test_make_says_what_an_interpreter_lacks(target, lost):
    """`VENV=0` takes an interpreter as it is; without its packages it has nothing but the standard library."""
    command = ["make", target, "VENV=0", f"PYTHON={sys.executable} -I -S"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode and "Traceback" not in run.stderr
    assert re.search(rf"lacks [\w, ]*\b{lost}\b.*: install them for it, or leave out VENV=0", run.stderr), run.stderr


def test_families_of_the_converter_are_those_of_its_table():
    from moe_ops.convert.families import FAMILIES
    from moe_ops.layer.models import FAMILIES as LAYERS

    table = re.search(r"^\| family \| `model_type`s.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert table is not None
    rows = [row.strip("|").split("|") for row in table[1].splitlines()]
    converted = {word for row in rows for word in re.findall(r"\w+", row[1])}
    not_loaded = {word for row in rows for word in re.findall(r"\w+", row[2].partition(":")[0])}
    assert converted == {kind for family in FAMILIES for kind in family.model_types}
    assert not_loaded == converted - set(LAYERS)
