import pytest
import torch

from moe_ops.core import arch
from moe_ops.core.arch import arch_of, arch_of_capability, parse_arch, unsupported_reason


def test_cpu_has_a_small_grid(monkeypatch):
    monkeypatch.delenv("MOE_OPS_ARCH", raising=False)
    a = arch_of(torch.device("cpu"))
    assert a.sms == arch.INTERPRETER_SMS and a.capability == 0 and not a.has_fp8


def test_override_asks_for_another_architecture(monkeypatch):
    monkeypatch.setenv("MOE_OPS_ARCH", "100")
    a = arch_of(torch.device("cpu"))
    assert a.capability == 100 and a.has_block_scaled_mma and not a.has_wgmma
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    assert arch_of(torch.device("cpu")).has_wgmma


@pytest.mark.parametrize("text", ["90", "sm90", "sm_90", "SM90", "sm_90a", " 90 "])
def test_an_architecture_has_one_number_however_it_is_written(monkeypatch, text):
    assert parse_arch(text) == 90
    monkeypatch.setenv("MOE_OPS_ARCH", text)
    assert arch_of(torch.device("cpu")).has_wgmma


@pytest.mark.parametrize("text", ["abc", "9.0", "sm", "9", "999", "90 100", "-90", "cuda:0"])
def test_an_override_that_is_no_architecture_is_named(monkeypatch, text):
    monkeypatch.setenv("MOE_OPS_ARCH", text)
    with pytest.raises(ValueError, match=rf"MOE_OPS_ARCH must be a compute capability, one of 80, .* \(or sm90, sm_90 and so on\), got '{text}'"):
        arch_of(torch.device("cpu"))


@pytest.mark.parametrize(
    "capability, fp8, wgmma, block_scaled", [(80, False, False, False), (89, True, False, False), (90, True, True, False), (120, True, False, True)]
)
def test_what_an_architecture_has(capability, fp8, wgmma, block_scaled):
    a = arch_of_capability(capability)
    assert (a.has_fp8, a.has_wgmma, a.has_block_scaled_mma) == (fp8, wgmma, block_scaled)
    assert a.smem >= 99 * 1024


def test_cpu_is_supported_and_other_devices_are_refused_by_name():
    assert unsupported_reason(torch.device("cpu")) is None
    assert "'xpu' is not supported; use 'cuda' (SM89 or newer) or 'cpu'" in unsupported_reason(torch.device("xpu"))


def test_gpu_below_sm89_is_refused_with_its_name(monkeypatch):
    monkeypatch.setattr(arch, "_cuda_arch", lambda index: arch.Arch(80, 108, 166912, "NVIDIA A100"))
    reason = unsupported_reason(torch.device("cuda", 0))
    assert "NVIDIA A100 is SM80" in reason and "SM89 or newer" in reason


@pytest.mark.gpu
def test_gpu_is_asked_once():
    a = arch_of(torch.device("cuda"))
    props = torch.cuda.get_device_properties(0)
    assert (a.capability, a.sms, a.name) == (10 * props.major + props.minor, props.multi_processor_count, props.name)
    assert arch_of(torch.device("cuda", 0)) is a
