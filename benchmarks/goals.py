"""Every case that has a goal, figure and goal side by side.

python benchmarks/goals.py [FOLDER ..] [--only TEXT] [--out DIR] [--commit ID] [--reps N]    folders, as `quant router`, limit it to their files

First all files compile and check their results, each in a process of its own; then this process times them one after another. A missed goal is
printed; the exit status is 1 when a result was wrong.
"""

import itertools
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def files(folders: list[str]) -> list[Path]:
    """Benchmark files with a goal, in those folders, or everywhere."""
    found = [path for path in sorted(HERE.glob("*/bench_*.py")) if "Goal(" in path.read_text()]
    return [path for path in found if not folders or path.parent.name in folders]


def compile_and_check(paths: list[Path], args: list[str]) -> bool:
    """Run all files at once without timing; whether every result is right."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
    running = {path: subprocess.Popen([sys.executable, str(path), "--goals", "--no-time", *args], **pipe) for path in paths}
    right = True
    for path, process in running.items():
        output = process.communicate()[0]
        if process.returncode:
            right = False
            print(f"{path.name} failed:\n{output}", flush=True)
    return right


def time_all(paths: list[Path], args: list[str]) -> bool:
    """Run all files here; whether every result is right."""
    right = True
    for path in paths:
        sys.argv = [str(path), "--goals", *args]
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            right &= not end.code
        except Exception:
            right = False
            traceback.print_exc()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return right


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    given = sys.argv[1:]
    folders = list(itertools.takewhile(lambda arg: not arg.startswith("-"), given))
    given = given[len(folders) :]
    paths = files(folders)
    if not paths:
        sys.exit(f"goals.py: no file with a goal in {folders}")
    compiled = compile_and_check(paths, given) if torch.cuda.is_available() else True
    sys.exit(0 if time_all(paths, given) and compiled else 1)
