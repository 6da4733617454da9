"""The activation of an experts module is read off its behaviour; whatever behaves like no `Activation` is refused with a reason."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from moe_ops.hf.gate import activation_of
from moe_ops.quant.activation import Activation

pytest.importorskip("transformers")
from transformers.activations import ACT2FN  # noqa: E402


def default(act):
    fn = ACT2FN[act]
    return lambda x: fn(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def odd(x):
    g, u = x.chunk(2, -1)
    return g * torch.sigmoid(g * 1.2345678) * u


def of_class(path, **attributes):
    """`_apply_gate` of a class of Transformers on a stand-in for its module."""
    module, _, name = path.rpartition(".")
    cls = getattr(__import__(f"transformers.models.{module}", fromlist=[name]), name)
    me = SimpleNamespace(act_fn=ACT2FN["silu"], **attributes)
    return lambda x: cls._apply_gate(me, x)


KNOWN = [
    ("silu", default("silu"), Activation()),
    ("tanh gelu", default("gelu_pytorch_tanh"), Activation.gelu_tanh()),
    ("new gelu", default("gelu_new"), Activation.gelu_tanh()),
    ("x * sigmoid(1.702 x)", default("quick_gelu"), Activation(alpha=1.702)),
    ("gpt-oss", of_class("gpt_oss.modeling_gpt_oss.GptOssExperts", alpha=1.702, limit=7.0), Activation.gpt_oss(interleaved=True)),
    (
        "MiniMax-M3",
        of_class("minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts", swiglu_alpha=1.702, swiglu_limit=7.0),
        Activation.gpt_oss(),
    ),
    ("DeepSeek-V4", of_class("deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts", limit=10.0), Activation.clamped(10.0)),
    ("a small clamp", of_class("deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts", limit=0.3), Activation.clamped(0.3)),
    ("GLM-5", of_class("glm5_next.modeling_glm5_next.Glm5NextTextExperts", swiglu_limit=7.0), Activation.clamped(7.0)),
    ("an odd alpha", odd, Activation(alpha=1.2345678)),
]


@pytest.mark.parametrize(("apply_gate", "want"), [k[1:] for k in KNOWN], ids=[k[0] for k in KNOWN])
def test_known_gates(apply_gate, want):
    got = activation_of(apply_gate, "Experts")
    assert (got.kind, got.interleaved) == (want.kind, want.interleaved)
    assert got.alpha == pytest.approx(want.alpha, rel=1e-6) and got.up_offset == pytest.approx(want.up_offset, abs=1e-6)
    assert got.limit == (None if want.limit is None else pytest.approx(want.limit, rel=1e-6))
    if want.alpha in (1.0, 1.702):
        assert got == want


def gate_clamped_only(x):
    g, u = x.chunk(2, -1)
    return F.silu(g.clamp(max=7)) * u


def up_first(x):
    u, g = x.chunk(2, -1)
    return F.silu(g) * u


def raises(x):
    raise RuntimeError("needs a mask")


UNKNOWN = [
    ("erf gelu", default("gelu"), "none of silu, gelu_tanh.*is off at gate"),
    ("squared relu", default("relu2"), "none of silu, gelu_tanh"),
    ("clamp after silu", of_class("step3p7.modeling_step3p7.Step3p7Experts", limit=7.0), "none of silu, gelu_tanh"),
    ("clamp of the gate alone", gate_clamped_only, "none of silu, gelu_tanh"),
    ("up first", up_first, "none of silu, gelu_tanh"),
    ("no up", lambda x: F.silu(x.chunk(2, -1)[0]), "none of silu, gelu_tanh"),
    ("zero", lambda x: x.chunk(2, -1)[0] * 0, "none of silu, gelu_tanh"),
    ("wrong width", lambda x: x, r"cannot be understood \(it returns shape"),
    ("raises", raises, r"cannot be understood \(needs a mask\)"),
    ("other order", lambda x: F.silu(x[..., 0::2].flip(-1)) * x[..., 1::2], "neither concatenated nor interleaved"),
]


@pytest.mark.parametrize(("apply_gate", "text"), [u[1:] for u in UNKNOWN], ids=[u[0] for u in UNKNOWN])
def test_unknown_gates_are_refused_with_a_reason(apply_gate, text):
    with pytest.raises(ValueError, match=f"moe_ops: Experts._apply_gate.*{text}"):
        activation_of(apply_gate, "Experts")


def test_gate_with_fp32_tensors_of_its_own():
    def only_fp32(x):
        g, u = x.chunk(2, -1)
        return F.linear(g.unsqueeze(-1), torch.ones(1, 1))[..., 0] * torch.sigmoid(g) * u

    assert activation_of(only_fp32, "Experts") == Activation()
