"""WHOLE: killed with SIGKILL at random moments and run again, a conversion gives the bytes of an undisturbed one, every time.

A few kills in each run of the tests; `--kills 30` (`make test-all`) for more.
"""

import json
import subprocess
import sys

#: Runs in a process of its own, which has torch imported once and forks one child for each conversion.
DRIVER = r"""
import json, os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from moe_ops.convert import convert, pieces
from moe_ops.convert.source import STATE

torch.set_num_threads(1)
pieces.PIECE = 64 << 10
source, base, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])


def start(out):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            convert(source, out, stochastic=3, threads=2)
            status = 0
        finally:
            os._exit(status)
    return child


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def undisturbed():
    shutil.rmtree(base / "whole", ignore_errors=True)
    began = time.perf_counter()
    assert os.waitpid(start(base / "whole"), 0)[1] == 0
    return time.perf_counter() - began


undisturbed()  # warms up
longest = undisturbed()
whole = content(base / "whole")
assert not any(STATE in name for name in whole)

seed = int(sys.argv[4])
chance = random.Random(seed)
found = {"killed": 0, "finished_first": 0, "resumed": 0, "seed": seed}
while found["killed"] < kills:
    out = base / "out"
    shutil.rmtree(out, ignore_errors=True)
    for _ in range(chance.choice((1, 1, 2, 3))):  # some are killed again while they resume
        child = start(out)
        time.sleep(chance.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            found["finished_first"] += 1
            longest = undisturbed()  # the machine may have less to do than when the time was taken
            continue
        found["killed"] += 1
        left = content(out) if out.exists() else {}
        if "model.safetensors.index.json" in left:  # published: everything else is there already
            assert all(left[name] == data for name, data in whole.items()), "published, but not whole"
        for name, data in left.items():
            if not name.endswith(".tmp") and not name.startswith(STATE):
                assert data == whole[name], f"{name} has its final name and is not whole"
        found["resumed"] += any(name.endswith(".safetensors") for name in left)
    assert os.waitpid(start(out), 0)[1] == 0, "the last run failed"
    assert content(out) == whole, "not the bytes of an undisturbed run"
print(json.dumps(found))
"""


def test_WHOLE_killed_at_random_moments_and_resumed(pristine, tmp_path, request):
    kills = request.config.getoption("--kills")
    seed = 20  # another one gives other moments; so does every run, by its timing
    command = [sys.executable, "-c", DRIVER, str(pristine), str(tmp_path), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    print(found)
    assert found["killed"] >= kills
