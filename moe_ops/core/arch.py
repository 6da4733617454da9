"""Questions about the device, answered once per device and never by synchronising.

`MOE_OPS_ARCH` ("90", "sm90" and "sm_90" are one) overrides the compute capability, so that a machine without a GPU can ask what would run elsewhere.
"""

import functools
import os
import re
from dataclasses import dataclass

import torch

#: Programs of a persistent grid where there is no GPU (Triton's interpreter runs them one after the other).
INTERPRETER_SMS = 4


@dataclass(frozen=True)
class Arch:
    """What the launchers ask of a device.

    Attributes:
        capability: compute capability as one number: 90 for Hopper, 100 and 120 for Blackwell, 0 for a CPU.
        sms: streaming multiprocessors.
        smem: shared memory one block may use, in bytes.
        name: the device's name as the driver gives it.
    """

    capability: int
    sms: int
    smem: int
    name: str

    @property
    def has_fp8(self) -> bool:
        """FP8 tensor-core instructions exist from SM89 on."""
        return self.capability >= 89

    @property
    def has_tma(self) -> bool:
        """Bulk tensor copies (tensor descriptors) exist from SM90 on; the interpreter has them too."""
        return self.capability >= 90 or self.capability == 0

    @property
    def has_wgmma(self) -> bool:
        return self.capability == 90

    @property
    def has_block_scaled_mma(self) -> bool:
        """MXFP8 products in hardware (`tcgen05 ... block_scale` on SM100, `mma ... block_scale` on SM120)."""
        return self.capability >= 100


# Shared memory of one block, by compute capability (CUDA C++ programming guide, table of technical specifications).
_SMEM = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376}


def arch_of_capability(capability: int, sms: int = 132) -> Arch:
    """The `Arch` of a compute capability, for compile checks without that GPU."""
    return Arch(capability, sms, _SMEM.get(capability, 101376), f"sm_{capability}")


def parse_arch(text: str) -> int | None:
    """The compute capability that "90", "sm90", "sm_90" or nvcc's "sm_90a" names; None for any other text."""
    found = re.fullmatch(r"(?:sm_?)?([1-9][0-9]{1,2})a?", text.strip(), re.IGNORECASE | re.ASCII)
    return int(found[1]) if found else None


@functools.cache
def _cuda_arch(index: int) -> Arch:
    props = torch.cuda.get_device_properties(index)
    smem = getattr(props, "shared_memory_per_block_optin", _SMEM.get(props.major * 10 + props.minor, 101376))
    return Arch(props.major * 10 + props.minor, props.multi_processor_count, smem, props.name)


@functools.cache
def _cpu_arch(override: str | None) -> Arch:
    if override:
        capability = parse_arch(override)
        if capability not in _SMEM:
            known = ", ".join(map(str, _SMEM))
            raise ValueError(f"MOE_OPS_ARCH must be a compute capability, one of {known} (or sm90, sm_90 and so on), got {override!r}")
        return arch_of_capability(capability, INTERPRETER_SMS)
    return Arch(0, INTERPRETER_SMS, 232448, "cpu")


def arch_of(device: torch.device) -> Arch:
    """The `Arch` of `device`; cached, no synchronisation."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return _cuda_arch(index)
    return _cpu_arch(os.environ.get("MOE_OPS_ARCH"))


def too_old_reason(arch: Arch) -> str | None:
    """None when a CUDA GPU of this architecture has FP8, else why the library does not run there."""
    return None if arch.has_fp8 else f"{arch.name} is SM{arch.capability}; FP8 needs SM89 or newer (Ada, Hopper, Blackwell)"


def unsupported_reason(device: torch.device) -> str | None:
    """None when the library's kernels can run on `device` (a CPU runs the references), else why not."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"device type {device.type!r} is not supported; use 'cuda' (SM89 or newer) or 'cpu'"
    if torch.version.hip is not None:
        return "ROCm devices are not supported; use an NVIDIA GPU (SM89 or newer) or 'cpu'"
    return too_old_reason(arch_of(device))
