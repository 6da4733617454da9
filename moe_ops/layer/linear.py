"""`Linear`: a linear layer for inference over `dense_gemm`, in bf16 or fp16, or quantized: the projections around the experts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moe_ops.core import checks
from moe_ops.core.formats import FP8_BLOCK, MXFP8, Format, QTensor, get_format
from moe_ops.gemm.dense import dense_gemm, dense_gemm_workspace
from moe_ops.layer.arguments import check_scales
from moe_ops.layer.dialects import detect, errors_of, quantization_config, read_weight
from moe_ops.layer.folding import capturing, prepare_at, state_of, wants_folding
from moe_ops.layer.holders import Exact, _frozen
from moe_ops.layer.load import Weight
from moe_ops.quant.fold import fold_weight, is_folded
from moe_ops.quant.quantize import quantize, quantize_folded, quantize_weight

__all__ = ["Linear"]

_OP = "Linear"
_16BIT = (torch.bfloat16, torch.float16)


class Linear(Exact):
    """y = x @ weight^T + bias, for inference.

    State dict: `weight` (N, K) in bf16, fp16 or e4m3; `weight_scale_inv` where quantized (fp32 in 128x128 blocks for fp8_block, uint8 E8M0 in 1x32
    for mxfp8); `bias` (N,). Nothing derived is saved. `.to(dtype)` never converts quantized data or scales.

    Args:
        weight: (N, K), contiguous: a QTensor with weight blocks and row-major scales, or bf16 / fp16.
        bias: (N,) bf16, fp16 or fp32, or None.

    Raises:
        TypeError, ValueError: shapes, dtypes, blocks or devices that do not fit, or scales that hold NaN, which are looked for on the host.
    """

    owner = _OP
    weight: nn.Parameter
    weight_scale_inv: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        _check(weight, bias)
        quantized = isinstance(weight, QTensor)
        self.format: Format | None = weight.format if quantized else None
        self.block, self.rule = (weight.block, weight.rule) if quantized else ((1, 1), "unknown")
        self.fold = True
        self._folded: QTensor | None = None
        self._folded_from: tuple[object, ...] = ()
        self.weight = _frozen(weight.data if quantized else weight)
        self.register_parameter("weight_scale_inv", _frozen(weight.scale) if quantized else None)
        self.register_parameter("bias", None if bias is None else _frozen(bias))

    # ---- making one

    @classmethod
    def from_weight(cls, weight: Weight, bias: torch.Tensor | None = None, *, format: str | Format | None = None) -> "Linear":
        """A layer from a weight (N, K), quantized to `format` ("fp8_block" or "mxfp8"), or kept as it is for None.

        Raises:
            TypeError, ValueError: as `Linear`; an unknown format, or a weight that is quantized in the other one.
        """
        if format is None:
            return cls(weight, bias)
        f = get_format(format, _OP)
        if isinstance(weight, QTensor):
            if weight.format is not f:
                raise ValueError(f"{_OP}: weight is {weight.format.name} and format={f.name!r} was asked for; dequantize it first, which is lossy")
            return cls(weight, bias)
        return cls(quantize_weight(weight, f), bias)

    @classmethod
    def from_state_dict(
        cls,
        sd: Mapping[str, torch.Tensor],
        prefix: str,
        config: Any = None,
        *,
        format: str | Format | None = None,
        device: torch.device | str | None = None,
    ) -> "Linear":
        """A layer read from a checkpoint in any dialect (`moe_ops.layer.dialects`), or from a `Linear`'s own state dict.

        Args:
            sd: name -> tensor; only `prefix` + weight, its scale and `prefix` + bias are read.
            prefix: of the layer, with its dot: "model.layers.3.self_attn.o_proj.".
            config: model config with its `quantization_config` (the content of config.json, or Transformers' object). Without one, a scale
                `weight_scale_inv` is read as this library writes it.
            format: quantize a floating weight to this format; None keeps what is stored.
            device: where the layer goes; None leaves tensors where they are.

        Raises:
            KeyError: a missing tensor, named.
            ValueError: a tensor that contradicts the dialect, named; a format other than the stored one.
        """
        declared = config.get("quantization_config") if isinstance(config, Mapping) else getattr(config, "quantization_config", None)
        if declared is not None and not isinstance(declared, Mapping):
            declared = declared.to_dict()
        own = sd[f"{prefix}weight_scale_inv"] if f"{prefix}weight_scale_inv" in sd else None
        if declared is None and own is not None and own.dtype in (torch.uint8, torch.float32):
            declared = quantization_config("mxfp8" if own.dtype == torch.uint8 else "fp8_block")
        with errors_of("Linear.from_state_dict"):
            weight = read_weight(sd, f"{prefix}weight", detect(declared))
        bias = sd[f"{prefix}bias"] if f"{prefix}bias" in sd else None
        if device is not None:
            weight, bias = weight.to(device), None if bias is None else bias.to(device)
        return cls.from_weight(weight, bias, format=format)

    @classmethod
    def cat(cls, parts: Sequence["Linear"]) -> "Linear":
        """One layer whose output is that of `parts` side by side (q_a_proj and kv_a_proj in one read of the input); copies the weights.

        Raises:
            ValueError: no parts, parts of other K, formats, blocks or dtypes, some with a bias and some without, or, with 128x128 blocks, a part
                other than the last whose N is not a multiple of 128.
        """
        if not parts:
            raise ValueError(f"{_OP}: cat needs at least one layer")
        first = parts[0]
        for i, p in enumerate(parts):
            kinds = [(q.weight.shape[1], q.weight.dtype, q.format, q.block, q.bias is None) for q in (first, p)]
            if kinds[0] != kinds[1]:
                raise ValueError(f"{_OP}: cat needs layers of one K, dtype, format and block, all or none with a bias; {first} and {p} differ")
            if p.block[0] > 1 and i + 1 < len(parts) and p.weight.shape[0] % p.block[0]:
                raise ValueError(f"{_OP}: cat of layers with {p.block[0]} rows a scale needs N % {p.block[0]} == 0 but for the last, got {p}")
        data = torch.cat([p.weight.view(torch.uint8) if p.format else p.weight for p in parts])
        bias = None if first.bias is None else torch.cat([p.bias for p in parts if p.bias is not None])
        if first.format is None:
            return cls(data, bias)
        scale = torch.cat([p.weight_scale_inv for p in parts if p.weight_scale_inv is not None])
        rule = first.rule if all(p.rule == first.rule for p in parts) else "unknown"
        made = cls(QTensor(data.view(first.weight.dtype), scale, first.format, first.block, rule=rule), bias)
        made.fold = all(p.fold for p in parts)
        return made

    # ---- running it

    def forward(
        self,
        x: "torch.Tensor | QTensor",
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        impl: str | None = None,
    ) -> torch.Tensor:
        """The layer's output.

        Args:
            x: (.., K) bf16 or fp16 (the weight's dtype where it is not quantized); or (M, K) quantized in the weight's format, to share one
                quantization among layers.
            residual: (.., N), added in fp32 before rounding, or None.
            out: (.., N) contiguous, receives the result; may be `residual`.
            workspace: from `make_workspace`; with `out`, the call then allocates nothing.
            impl: see `dense_gemm`.

        Returns:
            (.., N) of x's dtype, bf16 for a quantized x (`out` if given).

        Raises:
            TypeError, ValueError, RuntimeError: as `dense_gemm`.
        """
        if torch.compiler.is_compiling():
            prepare_at(id(self))
        else:
            self.prepare()
        n = self.weight.shape[0]
        weight = self.ready()
        if isinstance(x, QTensor):
            a, lead, dtype = x, x.data.shape[:-1], torch.bfloat16
            if isinstance(weight, QTensor) and weight.scheme != x.scheme:  # folded, and x is not
                weight = self.weights()
        else:
            checks.is_tensor(_OP, "x", x)
            if x.dim() == 0 or x.shape[-1] != self.weight.shape[1]:
                raise ValueError(f"{_OP}: x must have K = {self.weight.shape[1]} columns, got shape {tuple(x.shape)}")
            checks.dtype(_OP, "x", x, _16BIT if self.format is not None else (self.weight.dtype,))
            a, lead, dtype = x.reshape(-1, x.shape[-1]), x.shape[:-1], x.dtype
        flat = None
        if residual is not None:
            checks.is_tensor(_OP, "residual", residual)
            checks.shape(_OP, "residual", residual, (*lead, n))
            residual = residual.reshape(-1, n)
        if out is None and workspace is not None:
            raise ValueError(f"{_OP}: workspace is for calls with out")
        if out is not None:
            checks.is_tensor(_OP, "out", out)
            checks.shape(_OP, "out", out, (*lead, n))
            checks.contiguous(_OP, "out", out)
            flat = out.view(-1, n)
        options: dict[str, Any] = {"out_dtype": dtype} if flat is None else {"out": flat, "workspace": workspace}
        y = dense_gemm(a, weight, bias=self.bias, residual=residual, impl=impl, **options)
        return out if out is not None else y.view(*lead, n)

    def weights(self) -> Weight:
        """The weight over the module's own storage."""
        if self.format is None:
            return self.weight
        assert self.weight_scale_inv is not None
        return QTensor(self.weight, self.weight_scale_inv, self.format, self.block, "row_major", self.rule)

    def ready(self) -> Weight:
        """The weight as the kernels read it: the folded copy where `prepare` made one, else the stored weight."""
        return self.weights() if self._folded is None else self._folded

    def prepare(self, again: bool = False) -> "Linear":
        """Fold an mxfp8 weight on Hopper (`moe_ops.quant.fold`), once and after every change; idempotent, done by the first `forward` too.

        Changes are those that torch counts: writes through `.data` and into tensors of inference mode are not, and want `again=True` afterwards.

        A second copy of the weight, read instead of the stored one; `layer.fold = False` trades the speed for that memory. Under capture
        nothing is read: a copy that is out of date is dropped, and the stored weight runs.
        """
        if self.format is not MXFP8:
            return self
        if again:
            self._folded_from = ()
        state = (self.fold, *state_of(self.weight, self.weight_scale_inv))
        if state == self._folded_from:
            return self
        if capturing():
            self._folded = None
            return self
        stored, new = self.weights(), None
        if self.fold and isinstance(stored, QTensor) and wants_folding(stored, stored):
            with torch.no_grad():
                folded, report = fold_weight(stored)
            new = folded if report.folded else None
        old = self._folded
        if new is not None and old is not None and old.device == new.device and old.shape == new.shape:
            old.data.view(torch.uint8).copy_(new.data.view(torch.uint8))  # captured graphs read there
            old.scale.copy_(new.scale)
            new = old
        self._folded, self._folded_from = new, state
        return self

    def make_workspace(self, rows: int) -> torch.Tensor:
        """Memory for `forward(.., out=, workspace=)` with up to `rows` rows, on the folded copy or the stored weight, whichever it will run on."""
        return max((dense_gemm_workspace(rows, w) for w in (self.prepare().ready(), self.weights())), key=torch.Tensor.numel)

    def warmup_call(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
        """Calls with `tokens` zero rows, without and with a residual; what `moe_ops.warmup` runs.

        A quantized weight gets 16-bit rows of `dtype`, and quantized ones: as it is stored, and as it is folded.
        """
        dtype, device = (self.weight.dtype if self.format is None else dtype), self.weight.device
        n, k = self.weight.shape
        x, residual = torch.zeros((tokens, k), dtype=dtype, device=device), torch.zeros((tokens, n), dtype=dtype, device=device)
        rows: list[torch.Tensor | QTensor] = [x]
        if self.format is not None and self.block == self.format.weight_block:
            rows.append(quantize(x, self.format))
        if any(isinstance(w, QTensor) and is_folded(w) for w in (self.prepare().ready(), self.weights())):
            rows.append(quantize_folded(x))
        for a in rows:
            self(a)
            self(a, residual=residual)

    # ---- what Module asks

    def exact(self) -> list[str]:
        """Data and scales, where quantized."""
        return [] if self.format is None else ["weight", "weight_scale_inv"]

    def loadable(self, state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        """See `Exact.loadable`; also refuses a quantized weight for a layer in 16 bit, where the base class would convert the elements."""
        data, scale = f"{prefix}weight", f"{prefix}weight_scale_inv"
        if self.format is None and (scale in state or (data in state and state[data].element_size() == 1)):
            what = scale if scale in state else data
            raise ValueError(f"{_OP}: {what!r} is quantized, but this layer holds {self.weight.dtype}; build the layer with from_state_dict instead")
        return super().loadable(state, prefix)

    def loaded(self) -> None:
        """See `Exact.loaded`; what was never prepared stays so."""
        if self._folded_from:
            self._folded_from = ()
            self.prepare()

    def requires_grad_(self, requires_grad: bool = True) -> "Linear":
        """As `Module.requires_grad_`; this layer has no gradients and refuses True."""
        if requires_grad:
            raise ValueError(f"{_OP}: requires_grad_(True) on a layer that is for inference only and has no gradients")
        super().requires_grad_(False)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Linear":
        self._folded, self._folded_from = None, ()
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_folded": None, "_folded_from": ()}

    def extra_repr(self) -> str:
        """Shape and format, for print(layer)."""
        n, k = self.weight.shape
        fmt = self.format.name if self.format is not None else str(self.weight.dtype).removeprefix("torch.")
        return f"{fmt}, N={n}, K={k}, bias={self.bias is not None}"


def _check(weight: object, bias: object) -> None:
    """What `Linear` holds, checked when it is made."""
    if isinstance(weight, QTensor):
        checks.qtensor(_OP, "weight", weight)
        allowed = (weight.format.weight_block, FP8_BLOCK.weight_block)
        if weight.block not in allowed or weight.layout != "row_major":
            raise ValueError(f"{_OP}: weight must have weight blocks and row_major scales, got {weight}; use quantize_weight")
        checks.contiguous(_OP, "weight.scale", weight.scale)
        check_scales("weight.scale", weight.scale, _OP)
        data = weight.data
        if weight.block[0] > 1 and weight.segments > 1 and (data.shape[0] // weight.segments) % weight.block[0]:
            raise ValueError(f"{_OP}: weight has segments = {weight.segments} of {data.shape[0] // weight.segments} rows; a Linear has one")
    else:
        checks.is_tensor(_OP, "weight", weight)
        assert isinstance(weight, torch.Tensor)
        checks.dtype(_OP, "weight", weight, _16BIT)
        data = weight
    checks.ndim(_OP, "weight", data, (2,))
    checks.contiguous(_OP, "weight", data)
    if bias is not None:
        checks.is_tensor(_OP, "bias", bias)
        assert isinstance(bias, torch.Tensor)
        checks.shape(_OP, "bias", bias, (data.shape[0],))
        checks.dtype(_OP, "bias", bias, (*_16BIT, torch.float32))
        checks.last_stride_one(_OP, "bias", bias)
    checks.same_device(_OP, weight=data, scale=weight.scale if isinstance(weight, QTensor) else None, bias=bias)
