"""What all tests share: Triton's interpreter where there is no GPU, poisoned fresh memory, markers, and the record of a run.

Options:
    --all-kernels   fail the run when an entry kernel of the package was interpreted by no test (CPU machines; `make test`)
    --require-gpu   fail at once where there is no GPU, instead of skipping, and run what a GPU changes alone: tests marked gpu, and tests with the
                    `device` fixture, which stands for it (`make test-gpu`; `make test` runs the others anywhere)
    --results FILE  write the counts, the machine and the versions of the run as JSON
    --commit ID     the commit that --results names
    --all-cutlass   compile every CUTLASS kernel, not one of each architecture (`make test-all`)
    --kills N       how often tests/convert/test_kill.py kills a conversion (`make test-all` asks for 30)
"""

import functools
import importlib.util
import json
import os
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Triton reads the variable when a kernel is decorated, so this comes before any test imports a kernel module.
if not GPUS:
    os.environ["TRITON_INTERPRET"] = "1"
    _load("interp_patch")
else:
    os.environ.pop("TRITON_INTERPRET", None)
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers already fill the cores
    torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if GPUS else "cpu")


# ---- fresh memory holds NaN, or large garbage: an output that nobody wrote cannot look right by luck


_poisoning = True


@pytest.fixture
def unpoisoned():
    """For tests that look at every kernel that runs: no fills of fresh memory among them."""
    global _poisoning
    _poisoning = False
    yield
    _poisoning = True


def _poison(t: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() or not _poisoning or t.is_meta or t.numel() == 0:
        return t
    with torch.no_grad():
        if t.dtype in (torch.float8_e8m0fnu, torch.uint8):
            t.view(torch.uint8).fill_(0xFF)
        elif t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            t.view(torch.uint8).fill_(0x7F)
        elif t.is_floating_point() or t.is_complex():
            t.fill_(float("nan"))
        elif t.dtype in (torch.int16, torch.int32, torch.int64):
            t.fill_({torch.int16: 0x7F7F, torch.int32: 0x7F7F7F7F, torch.int64: 0x7F7F7F7F7F7F7F7F}[t.dtype])
    return t


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory():
    def poisoned(make):
        @functools.wraps(make)
        def empty(*args, **kwargs):
            out = make(*args, **kwargs)
            return out if kwargs.get("out") is not None else _poison(out)

        return empty

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
        yield


# ---- options, markers, coverage of kernels, record


def pytest_addoption(parser):
    group = parser.getgroup("moe_ops")
    group.addoption("--all-kernels", action="store_true", help="fail when an entry kernel was interpreted by no test")
    group.addoption("--require-gpu", action="store_true", help="fail where there is no GPU")
    group.addoption("--results", help="write a JSON record of the run to this file")
    group.addoption("--commit", default="", help="commit that --results names")
    group.addoption("--all-cutlass", action="store_true", help="compile every CUTLASS kernel, not one of each architecture")
    group.addoption("--kills", type=int, default=5, help="how often a conversion is killed")


def pytest_configure(config):
    if config.getoption("--require-gpu") and not GPUS:
        pytest.exit("no CUDA GPU here, and --require-gpu was given", returncode=2)
    config.started_at = time.time()
    config.interpreted_kernels = set()


def _takes_device(item) -> bool:
    """Whether the test uses the fixture `device`, not a parameter of its own by that name."""
    return "device" in getattr(item, "fixturenames", ()) and "device" not in getattr(getattr(item, "callspec", None), "params", ())


def pytest_collection_modifyitems(config, items):
    if config.getoption("--require-gpu"):
        kept = [item for item in items if "gpu" in item.keywords or _takes_device(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    if not GPUS:  # first, so that none is left when all other workers are done
        items.sort(key=lambda item: "slow" not in item.keywords)
    for item in items:
        if "gpu" in item.keywords and not GPUS:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif "multigpu" in item.keywords and GPUS < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))
        if "slow" in item.keywords:  # with --dist loadgroup, one worker runs them one after the other
            item.add_marker(pytest.mark.xdist_group("slow"))


def _interpreted_here() -> set[str]:
    from moe_ops.core import launch

    return launch.interpreted


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """A worker process of pytest-xdist has finished: take over the kernels that it interpreted."""
    node.config.interpreted_kernels |= set(getattr(node, "workeroutput", {}).get("interpreted", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["interpreted"] = sorted(_interpreted_here())
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.getoption("--all-kernels") and not GPUS:
        compile_cases = _load("compile_cases")
        seen = config.interpreted_kernels | _interpreted_here()
        missing = sorted(set(compile_cases.entry_kernels()) - compile_cases.gluon_kernels() - seen)
        if missing:
            reporter.write_line(f"\nFAILED: kernels that no test ran in the interpreter: {', '.join(missing)}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if config.getoption("--results"):
        _write_results(config, reporter, session.exitstatus)


def _write_results(config, reporter, exitstatus) -> None:
    from moe_ops.bench.provenance import provenance

    counts = {k: len(v) for k, v in reporter.stats.items() if k in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")}
    skips: dict[str, int] = {}
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        skips[reason] = skips.get(reason, 0) + 1
    record = {
        **provenance(config.getoption("--commit")),
        "exit_status": int(exitstatus),
        "counts": counts,
        "failed": sorted({r.nodeid for k in ("failed", "error") for r in reporter.stats.get(k, [])}),
        "skipped": skips,
        "seconds": round(time.time() - config.started_at, 1),
        "slowest": {r.nodeid: round(r.duration, 1) for r in sorted(reporter.stats.get("passed", []), key=lambda r: -r.duration)[:10]},
    }
    path = Path(config.getoption("--results"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
