"""The experts implementation "moe_ops": one function for prefill and decode, bf16 and quantized, registered in both of Transformers' tables.

What a module needs once (its activation, its format, rearranged or folded copies) is a plan kept in `module._moe_ops`, beside the parameters and
never in the state dict. The weights themselves are read from the module at every call.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moe_ops.core.formats import E4M3, FORMATS, FP8_BLOCK, MXFP8, Format, QTensor, as_bytes, get_format, make_qtensor
from moe_ops.core.numerics import decode_e8m0
from moe_ops.hf.gate import activation_of
from moe_ops.layer.folding import capturing, fold_pair, object_at, state_of
from moe_ops.layer.fused import fused_moe
from moe_ops.layer.load import canonical_b13, canonical_w13
from moe_ops.quant.activation import Activation
from moe_ops.router.routing import Routing

#: The name under which `register` adds the implementation.
NAME = "moe_ops"
_PLAN = "_moe_ops"
#: Set on a module whose weights quantize_model_ stored in our order, whatever layout its class declares.
CANONICAL = "_moe_ops_canonical"
#: Name of the format of a module whose weights were stored folded, so that its block size does not tell.
FOLDED_FORMAT = "_moe_ops_format"
#: False on a module that shall not fold its mxfp8 weights on Hopper, which saves a second copy of them.
FOLD = "_moe_ops_fold"

_16BIT = (torch.bfloat16, torch.float16)
_FORMAT_OF_BLOCK = {f.weight_block: f for f in FORMATS.values()}


def register() -> None:
    """Add the experts implementation "moe_ops" to Transformers; idempotent.

    Then `from_pretrained(.., experts_implementation="moe_ops")` or `model.set_experts_implementation("moe_ops")` selects it.

    Raises:
        ImportError: Transformers is missing or has no experts interface (older than 5.17).
    """
    for interface in _interfaces():
        interface.register(NAME, experts_forward)


def _interfaces() -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("moe_ops.hf needs transformers >= 5.17, which is not installed: pip install 'transformers>=5.17,<6' accelerate") from error
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        version = getattr(transformers, "__version__", "?")
        raise ImportError(f"moe_ops.hf needs transformers >= 5.17 with its experts interface, got {version}: {error}") from error
    # names are checked against the union of both tables, but looked up in one of them
    return ExpertsInterface, FP8ExpertsInterface


@dataclass(eq=False)
class Plan:
    """What one experts module needs, apart from its parameters.

    Attributes:
        act: its activation, in the order of the weights that are used.
        format: of its weights; None for 16 bit.
        block: (rows, columns) of one scale of the weights that are used.
        names: parameters that `derived` was made from.
        key: identifies the state of those parameters.
        dtypes: of the parameters when the plan was made.
        w13, w2, b13, s13, s2: what replaces the parameter of that role, or None: rearranged copies of weights in another layout, folded copies
            (`moe_ops.quant.fold`), scales in the dtype the kernels read.
        owned: those of them that are copies, not views of a parameter.
    """

    act: Activation
    format: Format | None
    block: tuple[int, int] = (1, 1)
    names: tuple[str, ...] = ()
    key: tuple[Any, ...] = ()
    dtypes: tuple[torch.dtype | None, ...] = ()
    w13: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    b13: torch.Tensor | None = None
    s13: torch.Tensor | None = None
    s2: torch.Tensor | None = None
    owned: set[str] = field(default_factory=set)

    def __getstate__(self) -> dict[str, Any]:
        # copies belong to the module they were made for: a pickled or copied model makes its own
        return self.__dict__ | {"key": (), "owned": set()} | dict.fromkeys(("w13", "w2", "b13", "s13", "s2"))


def experts_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of every experts module that Transformers dispatches through its experts interface."""
    for name, module in model.named_modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            yield name, module


def prepare_model(model: nn.Module, *, fold: bool = True) -> int:
    """Make or refresh the plan of every experts module now, instead of at its first call; returns their number.

    A first call does the same, so this is needed only to fail early, to say `fold=False`, and after weights of a compiled or captured model
    changed in place: rearranged and folded copies are refreshed where they lie.

    Args:
        model: a model of Transformers.
        fold: whether mxfp8 experts on Hopper may be folded, which is faster and keeps a second copy of those that Transformers loaded itself.

    Raises:
        ValueError: a module that cannot run through moe_ops; the text says why.
    """
    count = 0
    for _, module in experts_modules(model):
        setattr(module, FOLD, fold)
        prepare(module)
        count += 1
    return count


def experts_forward(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """The registered function: run `hidden_states` through the experts that the model's own router chose.

    Args:
        module: an experts module of Transformers.
        hidden_states: (T, H).
        top_k_index: (T, k); an id outside [0, num_experts) is skipped (the expert-parallel sentinel).
        top_k_weights: (T, k).

    Returns:
        (T, H) of hidden_states' dtype.

    Raises:
        ValueError: a module that cannot run through moe_ops, or gradients wanted.
    """
    return run(module, hidden_states, top_k_index, top_k_weights)


def run(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, impl: str | None = None) -> torch.Tensor:
    """`experts_forward` with a choice of implementation: None, "triton" or "torch" (the reference)."""
    if torch.compiler.is_compiling():
        _prepare_at(id(module))
    else:
        prepare(module)
    plan: Plan = getattr(module, _PLAN)
    if torch.is_grad_enabled():
        _refuse_grad(module, hidden_states)
    w13 = plan.w13 if plan.w13 is not None else module.gate_up_proj
    w2 = plan.w2 if plan.w2 is not None else module.down_proj
    b13 = b2 = None
    if module.has_bias:
        b13 = plan.b13 if plan.b13 is not None else module.gate_up_proj_bias
        b2 = module.down_proj_bias
    if plan.format is not None:
        f = plan.format
        s13 = plan.s13 if plan.s13 is not None else module.gate_up_proj_scale_inv
        s2 = plan.s2 if plan.s2 is not None else module.down_proj_scale_inv
        w13 = QTensor(w13, s13, f, plan.block, "row_major", "unknown", 2 if plan.block[0] > 1 else 1)
        w2 = QTensor(w2, s2, f, plan.block, "row_major", "unknown", 1)
    elif not hidden_states.dtype == w13.dtype == w2.dtype:
        raise ValueError(
            f"moe_ops: {type(module).__name__} has hidden_states in {hidden_states.dtype}, gate_up_proj in {w13.dtype} and down_proj in {w2.dtype}; "
            f"16-bit experts need one dtype: load or convert the whole model to it"
        )
    x = hidden_states if hidden_states.dim() == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
    routing = Routing.from_topk(top_k_index, top_k_weights, w13.shape[0])
    return fused_moe(x, w13, w2, routing, b13=b13, b2=b2, act=plan.act, impl=impl).view(hidden_states.shape)


@torch.compiler.assume_constant_result
def _prepare_at(address: int) -> int:
    """`prepare` while torch.compile traces: it runs at trace time, on the real module."""
    prepare(object_at(address))
    return 0


def prepare(module: Any) -> None:
    """Make or refresh `module._moe_ops`.

    Raises:
        ValueError: the module cannot run through moe_ops.
    """
    plan = module.__dict__.get(_PLAN)
    dtypes = tuple(getattr(getattr(module, n, None), "dtype", None) for n in _QUANTIZED_NAMES)
    if plan is None or plan.dtypes != dtypes:  # .half() and its kind write other numbers into the parameters of a plan that still looks right
        if capturing():
            raise RuntimeError(f"moe_ops: {type(module).__name__} was never run before capture: call the model or moe_ops.hf.prepare_model first")
        plan = _make_plan(module)
        plan.dtypes = dtypes
        module.__dict__[_PLAN] = plan
    if plan.names:
        key = (getattr(module, FOLD, True), *state_of(*(getattr(module, n) for n in plan.names)))
        if key != plan.key:
            if capturing():
                raise RuntimeError(f"moe_ops: weights of {type(module).__name__} changed since its last call: call moe_ops.hf.prepare_model first")
            _derive(module, plan)
            plan.key = key


def forget(module: Any) -> None:
    """Drop the plan, because the module's layout or format changed."""
    module.__dict__.pop(_PLAN, None)


def _refuse_grad(module: Any, hidden_states: torch.Tensor) -> None:
    if hidden_states.requires_grad or any(p.requires_grad for p in module.parameters(recurse=False)):
        raise ValueError(
            "moe_ops: experts are for inference only and have no backward: call the model under torch.no_grad() or torch.inference_mode(), "
            "or use model.requires_grad_(False)"
        )


def inspect(module: Any) -> Activation:
    """The activation of a module, after checking that moe_ops can run it whatever the dtype of its weights.

    Raises:
        ValueError: it cannot; the text says why.
    """
    owner = type(module).__name__
    w13, w2 = _parameters(module, owner)
    act = activation_of(module._apply_gate, owner)
    if act.interleaved == bool(module.is_concatenated) and not getattr(module, CANONICAL, False):
        raise ValueError(f"moe_ops: {owner} declares is_concatenated={module.is_concatenated}, but its _apply_gate reads columns the other way")
    up, down = (tuple(w.transpose(1, 2).shape if module.is_transposed else w.shape) for w in (w13, w2))
    if up[1] % 2 or down != (up[0], up[2], up[1] // 2):
        raise ValueError(f"moe_ops: {owner} has gate_up_proj {tuple(w13.shape)} and down_proj {tuple(w2.shape)}, which do not belong together")
    return Activation(act.kind, act.alpha, act.limit, act.up_offset)


def _make_plan(module: Any) -> Plan:
    owner, act = type(module).__name__, inspect(module)
    plan = Plan(act, _format_of(module, module.gate_up_proj, owner))
    if module.down_proj.dtype != module.gate_up_proj.dtype:
        raise ValueError(
            f"moe_ops: {owner} has gate_up_proj in {module.gate_up_proj.dtype} and down_proj in {module.down_proj.dtype}; they must agree"
        )
    rearranged = bool(module.is_transposed) or not module.is_concatenated
    if plan.format is None:
        if rearranged:
            plan.names = ("gate_up_proj", "down_proj") + (("gate_up_proj_bias",) if module.has_bias and not module.is_concatenated else ())
        return plan
    if rearranged:
        raise ValueError(f"moe_ops: {owner} is quantized in a transposed or interleaved layout, whose scale blocks run along the wrong dimension")
    folded = hasattr(module, FOLDED_FORMAT)
    plan.block = (128, 128) if folded else plan.format.weight_block
    for name, segments in (("gate_up_proj", 2 if plan.block[0] > 1 else 1), ("down_proj", 1)):
        scale = getattr(module, f"{name}_scale_inv")
        _check_scale(owner, name, getattr(module, name), scale, FP8_BLOCK if folded else plan.format, segments)
        if scale.dtype != plan.format.scale_dtype and not folded:
            plan.names = _QUANTIZED_NAMES
    if plan.format is MXFP8 and not folded:
        plan.names = _QUANTIZED_NAMES
    return plan


_QUANTIZED_NAMES = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")


def _parameters(module: Any, owner: str) -> tuple[torch.Tensor, torch.Tensor]:
    if not module.has_gate:
        raise ValueError(f"moe_ops: {owner} has no gate (has_gate=False), and only gated experts are supported; use another experts implementation")
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        raise ValueError(f"moe_ops: {owner} has activation_scheme={module.activation_scheme!r}; activations are quantized at run time ('dynamic')")
    w13, w2 = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not (isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor) and w13.dim() == w2.dim() == 3):
        raise ValueError(f"moe_ops: {owner} must hold 3-D gate_up_proj and down_proj")
    if w13.is_meta or w2.is_meta:
        raise ValueError(f"moe_ops: {owner} is on the meta device: load its weights first")
    return w13, w2


def _format_of(module: Any, w13: torch.Tensor, owner: str) -> Format | None:
    scale = getattr(module, "gate_up_proj_scale_inv", None)
    if w13.dtype == E4M3:
        if scale is not None and hasattr(module, FOLDED_FORMAT):
            return get_format(getattr(module, FOLDED_FORMAT))
        block = getattr(module, "block_size", None)
        fmt = _FORMAT_OF_BLOCK.get(tuple(block)) if block is not None else None
        if fmt is None or scale is None:
            raise ValueError(f"moe_ops: {owner} is float8_e4m3fn with block_size={block}; supported are (128, 128) and (1, 32) with scales")
        return fmt
    if w13.dtype in _16BIT and scale is None:
        return None
    if w13.dtype.is_floating_point and scale is not None:
        raise ValueError(f"moe_ops: {owner}.gate_up_proj is {w13.dtype} but has a scale: was a quantized model converted by .to(dtype)?")
    hint = "FP4 packed in int8 is not supported" if w13.dtype == torch.int8 else "load the model with dtype=torch.bfloat16"
    raise ValueError(f"moe_ops: {owner}.gate_up_proj must be bfloat16, float16 or float8_e4m3fn, got {w13.dtype}: {hint}")


def _check_scale(owner: str, name: str, w: torch.Tensor, scale: torch.Tensor, fmt: Format, segments: int) -> None:
    try:
        q = make_qtensor(w.detach(), _scale(scale, fmt), fmt, segments=segments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"moe_ops: {owner}.{name}_scale_inv: {error}") from error
    if q.scale.dtype == torch.uint8 and bool((q.scale == 255).any()):
        raise ValueError(f"moe_ops: {owner}.{name}_scale_inv holds the E8M0 byte 255, which is NaN")


def _scale(scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """A scale as the kernels read it: fp32, or E8M0 bytes (a view: graphs that touch the E8M0 dtype cannot be compiled by Inductor)."""
    scale = scale.detach()
    if fmt is not FP8_BLOCK:
        return as_bytes(scale)
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        return decode_e8m0(as_bytes(scale)).clamp_min(2.0**-126)
    return scale.float()


def _put(plan: Plan, role: str, new: torch.Tensor, source: torch.Tensor) -> None:
    """Keep `new`, made from `source`; a copy goes where the last copy lies if it fits, because compiled and captured graphs read there."""
    old = getattr(plan, role)
    if new.data_ptr() == source.data_ptr():
        plan.owned.discard(role)
    elif role in plan.owned and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device):
        as_bytes(old).copy_(as_bytes(new))
        return
    else:
        plan.owned.add(role)
    setattr(plan, role, new)


@torch.no_grad()
def _derive(module: Any, plan: Plan) -> None:
    if plan.format is not None:
        stored = {n: getattr(module, n) for n in _QUANTIZED_NAMES}
        s13, s2 = (_scale(stored[f"{n}_scale_inv"], plan.format) for n in ("gate_up_proj", "down_proj"))
        pair = None
        if plan.format is MXFP8 and getattr(module, FOLD, True):
            block = MXFP8.weight_block
            pair = fold_pair(QTensor(stored["gate_up_proj"].detach(), s13, MXFP8, block), QTensor(stored["down_proj"].detach(), s2, MXFP8, block))
        plan.block = plan.format.weight_block if pair is None else pair[0].block
        if pair is None:
            plan.w13 = plan.w2 = None
            plan.owned -= {"w13", "w2"}
            if stored["gate_up_proj_scale_inv"].dtype == stored["down_proj_scale_inv"].dtype == plan.format.scale_dtype:
                plan.s13 = plan.s2 = None  # the parameters are read as they are
                plan.owned -= {"s13", "s2"}
                return
        else:
            s13, s2 = (q.scale for q in pair)
            _put(plan, "w13", pair[0].data, stored["gate_up_proj"])
            _put(plan, "w2", pair[1].data, stored["down_proj"])
        _put(plan, "s13", s13, stored["gate_up_proj_scale_inv"])
        _put(plan, "s2", s2, stored["down_proj_scale_inv"])
        return
    w13, w2 = module.gate_up_proj.detach(), module.down_proj.detach()
    transposed, interleaved = bool(module.is_transposed), not module.is_concatenated
    _put(plan, "w13", canonical_w13(w13, transposed=transposed, interleaved=interleaved), w13)
    _put(plan, "w2", w2.transpose(1, 2).contiguous() if transposed else w2, w2)
    if module.has_bias and interleaved:
        bias = module.gate_up_proj_bias.detach()
        _put(plan, "b13", canonical_b13(bias, interleaved=True), bias)
