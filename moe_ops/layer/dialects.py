"""The checkpoint dialects: one table of names, suffixes, dtypes and config keys, and the reading of one weight with its scale.

A dialect says how a checkpoint writes a quantized weight. All store e4m3 weights [N, K] row-major and scales that multiply back:

| dialect                      | scale key after `<module>.`              | scale on disk                              |
|------------------------------|------------------------------------------|--------------------------------------------|
| bf16                         | none                                     |                                            |
| fp8_block, fp8_block_ue8m0   | weight_scale_inv, scale                  | F32, BF16, F8_E8M0 (or U8) [N/128, K/128]  |
| fp8_block_modelopt           | weight_scale, weight_scale_inv           | F32 [N/128, 1, K/128, 1] or [N/128, K/128] |
| fp8_block_compressed_tensors | weight_scale                             | F32 [N/128, K/128]                         |
| mxfp8 (A)                    | weight_scale_inv, weight_scale, scale    | U8 or F8_E8M0 [N, K/32]                    |
| mxfp8_compressed_tensors (B) | weight_scale                             | U8 [N, K/32]                               |
| mxfp8_modelopt (C)           | weight_scale, weight_scale_inv           | U8 [N, K/32]                               |

N/128 and K/128 round up. `quantization_config` gives the config keys of each and `detect` reads them. The dialect comes from the config
alone; a tensor that contradicts it is an error that names the tensor.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.core.formats import E4M3, FP8_BLOCK, MIN_SCALE, MXFP8, Format, QTensor, as_bytes, make_qtensor, scale_shape
from moe_ops.core.numerics import decode_e8m0

#: Every suffix that any dialect gives to a scale; a key that ends with one of them is a scale, never a weight.
SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Dialect:
    """How a checkpoint writes quantized weights.

    Attributes:
        name: its name in the table above.
        format: the format of the weights, or None for bf16.
        suffixes: what may follow `<module>.` in the scale's key; the first is what we write.
        scale_dtypes: dtypes that the scale may have on disk; the first is what we write.
        pow2: the config promises scales that are powers of two (`scale_fmt: ue8m0`).
        rank4: scales may come as [N/128, 1, K/128, 1].
    """

    name: str
    format: Format | None
    suffixes: tuple[str, ...] = ()
    scale_dtypes: tuple[torch.dtype, ...] = ()
    pow2: bool = False
    rank4: bool = False


BF16 = Dialect("bf16", None)
DIALECTS: dict[str, Dialect] = {
    d.name: d
    for d in (
        BF16,
        Dialect("fp8_block", FP8_BLOCK, ("weight_scale_inv", "scale"), (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)),
        Dialect("fp8_block_ue8m0", FP8_BLOCK, ("weight_scale_inv", "scale"), (torch.float32, torch.bfloat16, *_E8M0), pow2=True),
        Dialect("fp8_block_modelopt", FP8_BLOCK, ("weight_scale", "weight_scale_inv"), _FLOATS[::-1], rank4=True),
        Dialect("fp8_block_compressed_tensors", FP8_BLOCK, ("weight_scale",), _FLOATS[::-1]),
        Dialect("mxfp8", MXFP8, ("weight_scale_inv", "weight_scale", "scale"), (*_E8M0, torch.float32), pow2=True),
        Dialect("mxfp8_compressed_tensors", MXFP8, ("weight_scale",), _E8M0, pow2=True),
        Dialect("mxfp8_modelopt", MXFP8, ("weight_scale", "weight_scale_inv"), _E8M0, pow2=True),
    )
}


def quantization_config(dialect: str, skipped: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """The `quantization_config` that declares a dialect in config.json; `skipped` names the modules left unquantized.

    Raises:
        ValueError: an unknown dialect.
    """
    if dialect not in DIALECTS:
        raise ValueError(f"quantization_config: dialect must be one of {sorted(DIALECTS)}, got {dialect!r}")
    skip = list(skipped)
    if dialect == "bf16":
        return None
    if dialect in ("fp8_block", "fp8_block_ue8m0", "mxfp8"):
        mx = dialect == "mxfp8"
        out: dict[str, Any] = {"quant_method": "mxfp8" if mx else "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        out["weight_block_size"] = [1, 32] if mx else [128, 128]
        if dialect != "fp8_block":
            out["scale_fmt"] = "ue8m0"
        # servers read one key or the other
        return out | {"modules_to_not_convert": skip, "ignored_layers": skip}
    if dialect.endswith("_modelopt"):
        algo = "MXFP8" if dialect.startswith("mxfp8") else "FP8_PB_WO"
        return {"quant_method": "modelopt", "quant_algo": algo, "ignore": skip, "kv_cache_scheme": None}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "group"}
    if dialect.startswith("mxfp8"):
        weights |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        inputs |= {"group_size": 32, "scale_dtype": "torch.uint8"}
    else:
        weights |= {"strategy": "block", "block_structure": [128, 128]}
        inputs |= {"group_size": 128}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    form = "mxfp8-quantized" if dialect.startswith("mxfp8") else "float-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": skip}


@contextlib.contextmanager
def errors_of(op: str) -> Iterator[None]:
    """Errors about a checkpoint begin with the name of the function that was asked to read it."""
    try:
        yield
    except (KeyError, ValueError) as error:
        text = error.args[0] if error.args else None
        if isinstance(text, str) and text.startswith("checkpoint: "):
            error.args = (f"{op}: {text.removeprefix('checkpoint: ')}", *error.args[1:])
        raise


def _refuse(reason: str) -> ValueError:
    return ValueError(f"checkpoint: {reason}; supported are bf16, FP8 in 128x128 blocks and MXFP8 (see moe_ops.layer.dialects)")


def detect(config: Mapping[str, Any] | None) -> Dialect:
    """The dialect that a `quantization_config` (or the content of hf_quant_config.json) declares; None or {} is bf16.

    Raises:
        ValueError: a format, block size or activation scheme that this library does not read, with the value found.
    """
    if not config:
        return BF16
    config = {**config, **(config.get("quantization") or {})}
    method = str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else None))
    if method in ("fp8", "mxfp8"):
        if config.get("activation_scheme", "dynamic") != "dynamic":
            raise _refuse(f"activation_scheme {config['activation_scheme']!r} is not supported: activations are quantized at run time")
        block = config.get("weight_block_size")
        if block is None and method == "mxfp8":
            block = (1, 32)
        if block is None:
            raise _refuse("quant_method 'fp8' without weight_block_size means one scale for a whole tensor, which is not supported")
        block = tuple(block)
        if block == (1, 32):
            return DIALECTS["mxfp8"]
        if block == (128, 128) and method == "fp8":
            return DIALECTS["fp8_block_ue8m0" if config.get("scale_fmt") == "ue8m0" else "fp8_block"]
        raise _refuse(f"quant_method {method!r} with weight_block_size {list(block)} is not supported")
    if method == "modelopt":
        algo = config.get("quant_algo")
        if algo not in ("MXFP8", "FP8_PB_WO"):
            raise _refuse(f"modelopt quant_algo {algo!r} is not supported")
        return DIALECTS["mxfp8_modelopt" if algo == "MXFP8" else "fp8_block_modelopt"]
    if method == "compressed-tensors":
        return _detect_compressed_tensors(config)
    raise _refuse(f"quant_method {config.get('quant_method')!r} is not supported")


def _detect_compressed_tensors(config: Mapping[str, Any]) -> Dialect:
    groups = list((config.get("config_groups") or {}).values())
    found = set()
    for group in groups:
        w = group.get("weights") or {}
        if (group.get("input_activations") or {}).get("dynamic") is False:
            raise _refuse("compressed-tensors input_activations with dynamic false are not supported: activations are quantized at run time")
        kind = (w.get("num_bits"), w.get("type"), w.get("strategy"))
        if kind == (8, "float", "group") and w.get("group_size") == 32 and "uint8" in str(w.get("scale_dtype", "uint8")):
            found.add("mxfp8_compressed_tensors")
        elif kind == (8, "float", "block") and list(w.get("block_structure") or []) == [128, 128]:
            found.add("fp8_block_compressed_tensors")
        else:
            raise _refuse(f"compressed-tensors weights of {dict(w)} are not supported")
    if not found and config.get("format") == "mxfp8-quantized":
        found.add("mxfp8_compressed_tensors")
    if len(found) != 1:
        raise _refuse(f"compressed-tensors config_groups declare {sorted(found) or 'no weights'}, not one format")
    return DIALECTS[found.pop()]


def is_module_weight(name: str) -> bool:
    """Whether `name` is a module's `weight`: `m.weight`, or `weight` alone where the module is the whole state dict."""
    return name.rpartition(".")[2] == "weight"


def scale_keys(name: str) -> list[str]:
    """Keys under which the scale of weight `name` may be stored: `m.weight` -> `m.weight_scale_inv`, ..; a stack `m.x` -> `m.x_scale_inv`, ..."""
    stem, dot, leaf = name.rpartition(".")
    if leaf == "weight":
        return [f"{stem}{dot}{s}" for s in SCALE_SUFFIXES]
    return [f"{name}_{s}" for s in ("scale_inv", *SCALE_SUFFIXES)]


def read_weight(sd: Mapping[str, torch.Tensor], name: str, dialect: Dialect, *, segments: int = 1, halves: bool = False) -> QTensor | torch.Tensor:
    """One weight with its scale, as it is stored, bits untouched.

    Args:
        sd: name -> tensor; only the entries needed are read.
        name: key of the weight ([N, K], or a stack [E, N, K]).
        dialect: from `detect`.
        segments: 2 where the rows are a gate block and an up block (see `QTensor`).
        halves: with segments = 2, the writer is known to have scaled gate and up apart (as this library does). A scale whose shape does
            not tell is refused otherwise.

    Returns:
        A QTensor (data, row-major scales) or, for a module that the checkpoint left unquantized, the floating tensor.

    Raises:
        KeyError: the weight is missing.
        ValueError: a missing, orphaned, doubled or wrongly shaped scale, a scale with NaN (E8M0 byte 255), infinity or zero, or a
            weight whose dtype contradicts the dialect; the text names the tensor.
    """
    w, key, scale = _pair(sd, name, dialect, segments, halves)
    if key is None or scale is None:
        return w
    scale, rule = _read_scale(scale, key, dialect, w, segments, halves)
    assert dialect.format is not None
    if dialect.format is FP8_BLOCK and rule == "pow2":
        scale = scale.clamp_min(MIN_SCALE)  # 2^-127, byte 0, is not a normal number, as this format's scales are
    return make_qtensor(w, scale, dialect.format, segments=segments, rule=rule)


def scale_key(sd: Mapping[str, torch.Tensor], name: str, dialect: Dialect, *, segments: int = 1, halves: bool = False) -> str | None:
    """Key of the scale of weight `name`, or None where the weight is stored in a floating dtype.

    Looks at names, dtypes and shapes alone, so meta tensors will do. Arguments and errors as for `read_weight`, but for what a scale holds.
    """
    return _pair(sd, name, dialect, segments, halves)[1]


def _pair(
    sd: Mapping[str, torch.Tensor], name: str, dialect: Dialect, segments: int, halves: bool
) -> tuple[torch.Tensor, str | None, torch.Tensor | None]:
    """(weight, key of its scale, scale): names, dtypes and shapes fit; (weight, None, None) for a floating one."""
    if name not in sd:
        raise KeyError(f"checkpoint: tensor {name!r} is missing")
    w = sd[name]
    keys = [k for k in scale_keys(name) if k in sd]
    if w.dtype in _FLOATS:
        if keys:
            raise ValueError(f"checkpoint: {keys[0]!r} is an orphan scale: its weight {name!r} is {_dt(w)}, not float8_e4m3fn")
        return w, None, None
    if w.dtype != E4M3:
        what = " (FP4 packed in int8 is not supported)" if w.dtype in (torch.int8, torch.uint8) else ""
        raise ValueError(f"checkpoint: {name!r} must be float8_e4m3fn or a floating dtype, got {_dt(w)}{what}")
    if dialect.format is None:
        raise ValueError(f"checkpoint: {name!r} is float8_e4m3fn but the config has no quantization_config: its format is unknown")
    if not keys:
        wanted = f"{name.removesuffix('weight')}{dialect.suffixes[0]}" if is_module_weight(name) else f"{name}_scale_inv"
        raise ValueError(f"checkpoint: {name!r} is float8_e4m3fn but its scale {wanted!r} is missing")
    if len(keys) > 1:
        raise ValueError(f"checkpoint: {name!r} has {len(keys)} scales, {keys}; exactly one is allowed")
    allowed = [f"{name.removesuffix('weight')}{s}" for s in dialect.suffixes]
    if is_module_weight(name) and keys[0] not in allowed:
        raise ValueError(f"checkpoint: scale {keys[0]!r} does not belong to dialect {dialect.name!r}, which names it {allowed[0]!r}")
    scale = sd[keys[0]]
    if scale.dtype not in dialect.scale_dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dialect.scale_dtypes)
        raise ValueError(f"checkpoint: {keys[0]!r} must be {names} in dialect {dialect.name!r}, got {_dt(scale)}")
    _shaped(scale, keys[0], dialect, tuple(w.shape), segments, halves)
    return w, keys[0], scale


def _dt(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def read_scale(scale: torch.Tensor, key: str, dialect: Dialect, shape: tuple[int, ...]) -> torch.Tensor:
    """The scale of a weight of `shape` as its format wants it: fp32 for fp8_block, E8M0 bytes for mxfp8.

    Args:
        scale: as it is stored.
        key: what errors call it.
        dialect: from `detect`.
        shape: (N, K) of the weight.

    Raises:
        ValueError: a wrong shape, or a scale with NaN (E8M0 byte 255), infinity, zero, or no power of two where the config promises them.
    """
    return _read_scale(scale, key, dialect, torch.empty(shape, dtype=E4M3, device="meta"), 1, False)[0]


def _read_scale(scale: torch.Tensor, key: str, dialect: Dialect, w: torch.Tensor, segments: int, halves: bool) -> tuple[torch.Tensor, str]:
    """The scale as the format wants it (fp32, or E8M0 bytes), of the right shape; and its rule where it is known."""
    fmt = dialect.format
    assert fmt is not None
    scale = _shaped(scale, key, dialect, tuple(w.shape), segments, halves)
    if scale.dtype in _E8M0:
        scale = as_bytes(scale)
        if bool((scale == 255).any()):
            raise ValueError(f"checkpoint: {key!r} holds the E8M0 byte 255, which is NaN")
        if fmt is MXFP8:
            return scale, "unknown"
        return decode_e8m0(scale), "pow2"
    scale = scale.float()
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(f"checkpoint: {key!r} holds a scale that is NaN, infinite, zero or negative")
    if not dialect.pow2:
        return scale, "unknown"
    bits = scale.contiguous().view(torch.int32)
    if bool(((bits & 0x7FFFFF) != 0)[bits != 0x00400000].any()):  # 2^-127, byte 0, is subnormal in fp32
        raise ValueError(f"checkpoint: {key!r} must hold powers of two (scale_fmt ue8m0), but does not")
    return ((bits >> 23).to(torch.uint8), "unknown") if fmt is MXFP8 else (scale, "pow2")


def _shaped(scale: torch.Tensor, key: str, dialect: Dialect, shape: tuple[int, ...], segments: int, halves: bool) -> torch.Tensor:
    fmt = dialect.format
    assert fmt is not None
    wanted, block, got = scale_shape(shape, fmt.weight_block, segments), fmt.weight_block, tuple(scale.shape)
    if got == wanted:
        if segments == 2 and not halves and (shape[-2] // 2) % block[0] > block[0] // 2:
            raise ValueError(
                f"checkpoint: {key!r} of shape {got} may be the scale of one fused gate|up matrix or of two: with I = {shape[-2] // 2} rows each, "
                f"not a multiple of {block[0]}, both have this shape; store gate and up apart"
            )
        return scale
    if dialect.rank4 and len(got) == len(wanted) + 2 and got == (*wanted[:-1], 1, wanted[-1], 1):
        return scale.reshape(wanted)
    if got == wanted[:-1] and wanted[-1] == 1:  # writers squeeze a last dimension of 1
        return scale.unsqueeze(-1)
    reason = ""
    if segments == 2 and got == scale_shape(shape, block):
        reason = f": it is the scale of one fused gate|up matrix, where I = {shape[-2] // 2} is not a multiple of {block[0]}, so that one scale "
        reason += "covers gate and up rows together; store gate and up apart"
    raise ValueError(f"checkpoint: scale {key!r} must have shape {wanted} for a weight {shape} in blocks {block}, got {got}{reason}")
