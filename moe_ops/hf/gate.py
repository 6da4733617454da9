"""Which `Activation` an experts module applies, found by watching what its `_apply_gate` does, not by its name.

The function is sampled at points where the parameters of `Activation` can be read off, and the result is accepted only if it then
agrees with `activation_ref` on a grid that crosses every clamp.
"""

import math
from collections.abc import Callable

import torch

from moe_ops.quant.activation import Activation, activation_ref

#: Far beyond any clamp, and exact in fp32.
_FAR = 2.0**40
_GRID = (-100.0, -30.0, -9.0, -3.0, -1.0, -0.5, -0.125, 0.0, 0.125, 0.5, 1.0, 2.0, 3.0, 5.0, 6.5, 9.0, 15.0, 30.0, 100.0, 1000.0)

ApplyGate = Callable[[torch.Tensor], torch.Tensor]


def activation_of(apply_gate: ApplyGate, owner: str) -> Activation:
    """The `Activation` that behaves like `apply_gate`, a function from (rows, 2I) gate and up columns to (rows, I).

    Args:
        apply_gate: the function; it is called on small CPU tensors.
        owner: names the module in errors.

    Raises:
        ValueError: it behaves like no `Activation`; the text says where it differs.
    """
    # one column of each: here the two layouts are the same
    with torch.no_grad():
        act = _fit(lambda g, u: _call(apply_gate, torch.stack((g, u), dim=-1), owner)[..., 0], owner)
        interleaved = _layout(apply_gate, act, owner)
    return Activation(act.kind, act.alpha, act.limit, act.up_offset, interleaved)


def _call(apply_gate: ApplyGate, x: torch.Tensor, owner: str) -> torch.Tensor:
    """`apply_gate` in fp64, or in fp32 where it brings fp32 tensors of its own."""
    failure: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            out = apply_gate(x.to(dtype))
        except Exception as error:  # whatever a foreign function raises is the reason
            failure = error
            continue
        if out.shape == (*x.shape[:-1], x.shape[-1] // 2):
            return out.double()
        failure = ValueError(f"it returns shape {tuple(out.shape)} for {tuple(x.shape)}")
    raise ValueError(f"moe_ops: {owner}._apply_gate cannot be understood ({failure}); use another experts implementation") from failure


def _fit(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], owner: str) -> Activation:
    def at(g: float, u: float) -> float:
        return float(f(torch.tensor([g], dtype=torch.float64, device="cpu"), torch.tensor([u], dtype=torch.float64, device="cpu"))[0])

    step = 2.0**-10
    slope = (at(1.0, step) - at(1.0, 0.0)) / step
    offset = at(1.0, 0.0) / slope if slope else math.nan
    far = at(1.0, _FAR) / slope - offset if slope else math.nan
    limit = None if far > 0.99 * _FAR else far
    small = 0.5 if limit is None else min(0.5, limit / 2)
    ratio = (at(small, step) - at(small, 0.0)) / step / small  # sigmoid(alpha * small) for silu
    alpha = math.log(ratio / (1 - ratio)) / small if 0 < ratio < 1 else math.nan
    worst = "nothing that could be measured"
    for digits in (4, 7, 17):  # 1.702 rather than 1.70200003, if that agrees as well
        params = [None if v is None else float(f"{v:.{digits}g}") for v in (alpha, limit, offset)]
        if any(v is not None and not math.isfinite(v) for v in params) or (params[1] is not None and params[1] <= 0):
            break
        a, lim, off = params
        candidates = [Activation("gelu_tanh", 1.0, lim, off or 0.0)]
        if a is not None and a > 0:
            candidates.insert(0, Activation("silu", a, lim, off or 0.0))
        for act in candidates:
            difference = _differs(f, act)
            if difference is None:
                return act
            if act.kind == "silu":
                worst = difference
    raise ValueError(
        f"moe_ops: {owner}._apply_gate is none of silu, gelu_tanh and their clamped forms (the closest is off at {worst}); "
        f"use another experts implementation"
    )


def _grid(limit: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    points = list(_GRID)
    if limit is not None:
        points += [s * limit * r for s in (-1, 1) for r in (0.5, 0.99, 1.0, 1.01, 2.0)]
    p = torch.tensor(points, dtype=torch.float32, device="cpu")
    g, u = torch.meshgrid(p, p, indexing="ij")
    return g.reshape(-1), u.reshape(-1)


def _differs(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], act: Activation) -> str | None:
    g, u = _grid(act.limit)
    got, want = f(g, u), activation_ref(torch.stack((g, u), dim=-1), act)[..., 0].double()
    bad = ~((got - want).abs() <= 2e-6 * want.abs() + 1e-6)
    if not bool(bad.any()):
        return None
    i = int(bad.nonzero()[0])
    return f"gate {float(g[i]):g}, up {float(u[i]):g}: {float(got[i]):g}, not {float(want[i]):g}"


def _layout(apply_gate: ApplyGate, act: Activation, owner: str) -> bool:
    """Whether gate and up columns alternate."""
    x = torch.tensor([[0.5, -1.25, 2.0, 0.75, -0.5, 3.0]], dtype=torch.float32, device="cpu")
    got = _call(apply_gate, x, owner)
    for interleaved in (False, True):
        want = activation_ref(x, Activation(act.kind, act.alpha, act.limit, act.up_offset, interleaved)).double()
        if torch.allclose(got, want, rtol=2e-6, atol=1e-6):
            return interleaved
    raise ValueError(f"moe_ops: {owner}._apply_gate takes gate and up columns in an order that is neither concatenated nor interleaved")
