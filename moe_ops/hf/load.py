"""`load_quantized`: a checkpoint folder in any dialect as a Transformers model whose experts run through moe_ops.

For the models whose quantized form Transformers itself cannot hold: experts with biases (gpt-oss), intermediate sizes that are not a multiple
of 128, scales under other names. Experts keep their quantized bits; every other quantized weight is dequantized to `dtype`.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_ops.core.formats import E4M3, Format, QTensor
from moe_ops.hf.checkpoint import CheckpointFolder, Renamed
from moe_ops.hf.experts import NAME, experts_modules, register
from moe_ops.hf.quantize import install, refuse_saving
from moe_ops.layer.dialects import SCALE_SUFFIXES, Dialect, detect, read_weight
from moe_ops.layer.load import in_format, load_experts
from moe_ops.quant.quantize import dequantize


def load_quantized(
    path: str | Path,
    *,
    format: str | Format | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    model_class: Any = None,
    fold: bool = True,
) -> Any:
    """Build the model of a checkpoint folder and load it, experts in the format they are stored in.

    Args:
        path: folder with config.json and safetensors files, in any dialect of `moe_ops.layer.dialects`.
        format: quantize experts that are stored in 16 bit to this format; None keeps them.
        dtype: of everything but quantized experts.
        device: where the model goes, tensor by tensor; None is the CPU.
        model_class: class with `from_config`; None takes AutoModelForCausalLM.
        fold: as in `quantize_model_`.

    Returns:
        The model in eval mode, without gradients, with experts implementation "moe_ops".

    Raises:
        ImportError: Transformers or accelerate is missing or too old.
        FileNotFoundError: no config.json, no safetensors file, or a missing shard.
        KeyError: a missing tensor, named.
        ValueError: a quantization that is not supported, a tensor that contradicts it, or tensors that the model has no place for.
    """
    register()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise ImportError("load_quantized needs accelerate: pip install accelerate") from error
    if not (Path(path) / "config.json").is_file():
        raise FileNotFoundError(f"load_quantized: {path} has no config.json")
    folder = CheckpointFolder(path)
    quantization = folder.config("config.json").get("quantization_config") or folder.config("hf_quant_config.json")
    dialect = detect(quantization)
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    # parameters on meta, buffers real: those that are not saved (rotary frequencies) are computed here
    with init_empty_weights(include_buffers=False):
        model = (model_class or AutoModelForCausalLM).from_config(config, dtype=dtype)

    view = Renamed(folder, _names(model, folder))
    modules = dict(experts_modules(model))
    if not modules:
        raise ValueError(f"load_quantized: {type(model).__name__} has no experts module that Transformers dispatches")
    for name, module in modules.items():
        weights = load_experts(
            view,
            f"{name}.",
            quantization or None,
            num_experts=module.num_experts,
            transposed=bool(module.is_transposed),
            interleaved=not module.is_concatenated,
            device=device,
        )
        if not isinstance(weights.w13, QTensor) and format is None and weights.w13.dtype != dtype:
            raise ValueError(f"load_quantized: {name} is stored in {weights.w13.dtype}, but dtype={dtype} was asked for")
        install(module, in_format(weights, format, name), fold)
    _load_rest(model, view, dialect, tuple(f"{n}." for n in modules), dtype, device)
    model.to(device)
    model.requires_grad_(False)
    model.eval()
    model.set_experts_implementation(NAME)
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_pretrained(path)
    refuse_saving(model)
    return model


def _names(model: Any, folder: CheckpointFolder) -> dict[str, str]:
    """The model's name of each tensor -> the checkpoint's, by Transformers' own renamings."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    renamings = [t for t in get_model_conversion_mapping(model) if not isinstance(t, WeightConverter)]
    out: dict[str, str] = {}
    for name in folder:
        renamed = name
        for transform in renamings:
            renamed, _ = transform.rename_source_key(renamed)
        if renamed in out:
            raise ValueError(f"load_quantized: {name!r} and {out[renamed]!r} both become {renamed!r}")
        out[renamed] = name
    return out


def _load_rest(model: Any, view: Renamed, dialect: Dialect, experts: tuple[str, ...], dtype: torch.dtype, device: torch.device | str | None) -> None:
    """Everything but experts; quantized weights are dequantized."""
    places = {n for n, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
    fp32 = [re.compile(p) for p in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unexpected, loaded = [], set()
    for name in view:
        if name.startswith(experts):
            continue
        if name not in places:
            stem, _, leaf = name.rpartition(".")
            belongs = leaf in SCALE_SUFFIXES and f"{stem}.weight" in view
            if not belongs and not any(p.search(name) for p in ignored):
                unexpected.append(name)
            continue
        t: Any = read_weight(view, name, dialect) if name.endswith(".weight") else view[name]
        if isinstance(t, torch.Tensor) and t.dtype == E4M3:
            raise ValueError(f"load_quantized: {name!r} is float8_e4m3fn, but is no weight of a linear layer")
        t = dequantize(t) if isinstance(t, QTensor) else t
        if t.is_floating_point():
            t = t.to(torch.float32 if any(p.search(name) for p in fp32) else dtype)
        _assign(model, name, t.to(device) if device is not None else t)
        loaded.add(name)
    if unexpected:
        raise ValueError(f"load_quantized: the model has no place for {len(unexpected)} tensors: {', '.join(unexpected[:5])}")
    model.tie_weights()
    buffers = {n for n, _ in model.named_buffers()} & set(model.state_dict())
    missing = [n for n, p in model.named_parameters() if p.is_meta] + sorted(buffers - loaded)
    if missing:
        raise KeyError(f"load_quantized: the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:5])}")


def _assign(model: nn.Module, name: str, t: torch.Tensor) -> None:
    stem, _, leaf = name.rpartition(".")
    module = model.get_submodule(stem)
    old = getattr(module, leaf)
    if tuple(old.shape) != tuple(t.shape):
        raise ValueError(f"load_quantized: {name!r} must have shape {tuple(old.shape)}, got {tuple(t.shape)}")
    if leaf in module._parameters:
        setattr(module, leaf, nn.Parameter(t, requires_grad=False))
    else:
        module._buffers[leaf] = t
