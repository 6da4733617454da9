"""What a result needs beside its numbers: the machine, the versions, the date, the commit."""

import datetime
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "numpy")


def device_name() -> str:
    """Name of the first GPU as the driver gives it, or "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def device_folder() -> str:
    """The device's name as a folder: "NVIDIA H200" is nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", device_name().lower()).strip("_")


def version(package: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str:
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return out.splitlines()[0].strip() if out else ""


def driver_and_clock() -> tuple[str, int]:
    """NVIDIA driver version and the SM clock of the moment in MHz; ("", 0) without a GPU or without nvidia-ml-py."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        return pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
    except Exception:  # NVML's own errors derive from Exception: no driver, no permission, not supported
        return "", 0


def commit_id() -> str:
    """Commit of the checkout that this package lies in, with "+" for uncommitted changes; empty outside a checkout."""
    root = str(Path(__file__).resolve().parents[2])
    commit = _first_line("git", "-C", root, "rev-parse", "--short=12", "HEAD")
    dirty = _first_line("git", "-C", root, "status", "--porcelain", "--untracked-files=no") if commit else ""
    return commit + ("+" if dirty else "")


def provenance(commit: str = "") -> dict[str, Any]:
    """GPU, driver, versions, date (UTC) and commit of a result.

    Args:
        commit: commit to name where the checkout cannot be asked (a copy of the tree without its history).
    """
    driver, clock = driver_and_clock() if torch.cuda.is_available() else ("", 0)
    return {
        "gpu": device_name(),
        "driver": driver,
        "sm_clock_mhz": clock,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{p: version(p) for p in PACKAGES},
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit or commit_id(),
    }
