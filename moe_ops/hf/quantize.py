"""`quantize_model_`: replace the experts of a loaded 16-bit model by quantized ones, in place and one expert at a time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from moe_ops.core.formats import E4M3, FP8_BLOCK, Format, QTensor, get_format, make_qtensor
from moe_ops.hf.experts import CANONICAL, FOLD, FOLDED_FORMAT, NAME, experts_modules, forget, inspect, register
from moe_ops.layer.folding import fold_pair
from moe_ops.layer.load import ExpertWeights, canonical_b13, canonical_w13
from moe_ops.quant.quantize import quantize_weight


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize_model_` did.

    Attributes:
        format: name of the format.
        modules: names of the experts modules that were quantized.
        skipped: names of those that were left alone.
        bytes_before: bytes of the quantized modules' weights and biases before.
        bytes_after: bytes of their data, scales and biases after.
    """

    format: str
    modules: tuple[str, ...]
    skipped: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        gib = 2**30
        return (
            f"{len(self.modules)} experts modules quantized to {self.format}, {len(self.skipped)} skipped: "
            f"{self.bytes_before / gib:.3f} -> {self.bytes_after / gib:.3f} GiB"
        )


def quantize_model_(
    model: Any, format: str | Format, *, rule: str | None = None, skip: str | Iterable[str] = (), fold: bool = True
) -> QuantizeReport:
    """Quantize the experts of a loaded model in place and let it run them through moe_ops.

    Each experts module then holds `gate_up_proj` and `down_proj` in e4m3, in the order [E, 2I, H] (gate rows, then up rows) and [E, H, I]
    also where its class stores them otherwise (gpt-oss), with `gate_up_proj_scale_inv` and `down_proj_scale_inv`. Everything else of the
    model stays as it is. Nothing is changed before every module was checked.

    Args:
        model: a model of Transformers in bf16, fp16 or fp32.
        format: "fp8_block" or "mxfp8".
        rule: scale rule of the format; None takes its default.
        skip: names (or one name) of experts modules to leave in 16 bit, exactly as in `model.named_modules()`.
        fold: on Hopper, keep mxfp8 experts folded to 128x128 scales (`moe_ops.quant.fold`) where that keeps their values: faster, no extra
            memory, and data and scales then are the folded ones.

    Returns:
        A `QuantizeReport`.

    Raises:
        ImportError: Transformers is missing or too old.
        TypeError: a model without `set_experts_implementation`.
        ValueError: no experts module, a name in `skip` that is none, a module that moe_ops cannot run, experts that are quantized already
            in another format, or a width that the format does not take; the text says why.

    Cost: reads and writes each expert once; needs one expert's weights of memory beyond the result and the largest module.
    """
    fmt = get_format(format, "quantize_model_")
    if rule is not None and rule not in fmt.rules:
        raise ValueError(f"quantize_model_: rule must be one of {fmt.rules} for {fmt.name}, got {rule!r}")
    register()
    if not hasattr(model, "set_experts_implementation"):
        raise TypeError(f"quantize_model_: model must be a Transformers model with set_experts_implementation, got {type(model).__name__}")
    skip = {skip} if isinstance(skip, str) else set(skip)
    found = dict(experts_modules(model))
    if skip - set(found):
        raise ValueError(f"quantize_model_: skip names no experts module: {sorted(skip - set(found))}; the model has {list(found)[:3]}, ..")
    _refuse_unknown(model, set(found) | skip)
    todo = [(name, module) for name, module in found.items() if name not in skip and not _is_quantized(name, module, fmt)]
    for name, module in todo:
        _check(name, module, fmt)
    before = sum(_bytes(m) for _, m in todo)
    for _, module in todo:
        _quantize_module(module, fmt, rule, fold)
    model.set_experts_implementation(NAME)
    refuse_saving(model)
    left = tuple(name for name in found if name not in {n for n, _ in todo})
    return QuantizeReport(fmt.name, tuple(n for n, _ in todo), left, before, sum(_bytes(m) for _, m in todo))


def _refuse_unknown(model: nn.Module, known: set[str]) -> None:
    """Experts that no interface dispatches would stay 16 bit without a word."""
    if not known:
        raise ValueError(f"quantize_model_: {type(model).__name__} has no experts module that Transformers dispatches (use_experts_implementation)")
    for name, module in model.named_modules():
        p = getattr(module, "gate_up_proj", None)
        if name not in known and isinstance(p, torch.Tensor) and p.dim() == 3:
            raise ValueError(f"quantize_model_: {name or 'the model'} ({type(module).__name__}) holds experts that Transformers does not dispatch")


def _is_quantized(name: str, module: Any, fmt: Format) -> bool:
    w = getattr(module, "gate_up_proj", None)
    if not isinstance(w, torch.Tensor) or w.dtype != E4M3:
        return False
    block = getattr(module, "block_size", None)
    stored = getattr(module, FOLDED_FORMAT, None)
    if stored == fmt.name:
        return True
    if stored is not None or block is None or tuple(block) != fmt.weight_block:
        raise ValueError(f"quantize_model_: {name} is quantized already, in blocks of {block}, not {fmt.weight_block}; load the 16-bit model")
    return True


def _check(name: str, module: Any, fmt: Format) -> None:
    inspect(module)
    w = module.gate_up_proj
    if w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"quantize_model_: {name} must be bfloat16, float16 or float32, got {w.dtype}")
    hidden, rows = w.shape[1:] if module.is_transposed else (w.shape[2], w.shape[1])
    width = fmt.weight_block[1]
    if fmt is not FP8_BLOCK and (hidden % width or (rows // 2) % width):
        raise ValueError(f"quantize_model_: {name} has H = {hidden} and I = {rows // 2}; {fmt.name} needs multiples of {width}")


def _bytes(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))


@torch.no_grad()
def _quantize_module(module: Any, fmt: Format, rule: str | None, fold: bool) -> None:
    transposed, interleaved = bool(module.is_transposed), not module.is_concatenated
    segments = 2 if fmt is FP8_BLOCK else 1
    w13 = _stack(module.gate_up_proj, lambda w: canonical_w13(w, transposed=transposed, interleaved=interleaved), fmt, rule, segments)
    module.gate_up_proj = None  # half of the memory, before the other half is needed twice
    w2 = _stack(module.down_proj, lambda w: w.transpose(-1, -2).contiguous() if transposed else w, fmt, rule, 1)
    b13 = b2 = None
    if module.has_bias:
        b13 = canonical_b13(module.gate_up_proj_bias.detach(), interleaved=interleaved).clone()
        b2 = module.down_proj_bias.detach()
    install(module, ExpertWeights(w13, w2, b13, b2), fold)


def install(module: Any, weights: ExpertWeights, fold: bool = True) -> None:
    """Make stacks in our order the parameters of an experts module, whatever layout its class declares; folded where that pays."""
    setattr(module, FOLD, fold)
    pair = fold_pair(weights.w13, weights.w2) if fold else None
    w13, w2 = (weights.w13, weights.w2) if pair is None else pair
    if pair is not None:
        setattr(module, FOLDED_FORMAT, pair[0].format.name)
    for name, w in (("gate_up_proj", w13), ("down_proj", w2)):
        setattr(module, name, nn.Parameter(w.data if isinstance(w, QTensor) else w, requires_grad=False))
        if isinstance(w, QTensor):
            module.register_parameter(f"{name}_scale_inv", nn.Parameter(w.scale, requires_grad=False))
            module.block_size = w.block
    if not module.has_bias and weights.b13 is not None:
        raise ValueError(f"moe_ops: {type(module).__name__} has no biases, but there are some for it")
    if weights.b13 is not None and weights.b2 is not None:
        module.gate_up_proj_bias = nn.Parameter(weights.b13, requires_grad=False)
        module.down_proj_bias = nn.Parameter(weights.b2, requires_grad=False)
    elif module.has_bias:
        raise KeyError(f"moe_ops: {type(module).__name__} has biases, but there are none for it")
    module.is_transposed, module.is_concatenated = False, True
    setattr(module, CANONICAL, True)
    forget(module)


def _stack(stored: torch.Tensor, arrange: Callable[[torch.Tensor], torch.Tensor], fmt: Format, rule: str | None, segments: int) -> QTensor:
    """Quantize a stack expert by expert: memory for one rearranged expert instead of all."""
    experts = stored.shape[0]
    first = quantize_weight(arrange(stored[0].detach()), fmt, segments=segments, rule=rule)
    data = torch.empty((experts, *first.data.shape), dtype=torch.uint8, device=stored.device)
    scale = torch.empty((experts, *first.scale.shape), dtype=first.scale.dtype, device=stored.device)
    for e in range(experts):
        q = first if e == 0 else quantize_weight(arrange(stored[e].detach()), fmt, segments=segments, rule=rule)
        data[e].copy_(q.data.view(torch.uint8))
        scale[e].copy_(q.scale)
    return make_qtensor(data, scale, fmt, segments=segments, rule=first.rule)


def _refuse_save_pretrained(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "moe_ops: a model whose experts were quantized in memory cannot be saved by Transformers: its files would lose the scales. "
        "Convert the checkpoint instead"
    )


def refuse_saving(model: Any) -> None:
    """save_pretrained would write e4m3 weights apart from scales and without a quantization_config: files that load as garbage."""
    model.save_pretrained = _refuse_save_pretrained  # a function of this module: the model can still be pickled
