"""`MoELayer`: router, experts and an optional shared expert as one module, in bf16 or quantized.

forward: logits = hidden @ gate^T (fp32) -> route -> fused_moe (+ shared expert). On CUDA, with the router in hidden's 16-bit dtype, every
step is a kernel of this library: one for the logits, two for the routing (three above 1024 pairs of token and expert), at most five for the experts.
A router in fp32 goes through torch.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from moe_ops.core import checks
from moe_ops.core.formats import Format, QTensor
from moe_ops.gemm.grouped import grouped_gemm
from moe_ops.layer.arguments import check_layer, check_local
from moe_ops.layer.dialects import errors_of
from moe_ops.layer.folding import prepare_at
from moe_ops.layer.from_checkpoint import read_layer
from moe_ops.layer.fused import Workspace, fused_moe, make_workspace
from moe_ops.layer.holders import Experts, Gate
from moe_ops.layer.load import ExpertWeights, in_format
from moe_ops.layer.models import RoutingOptions, model_moe, routing_options
from moe_ops.quant.activation import Activation
from moe_ops.router.route import route
from moe_ops.router.routing import Routing, check_num_valid

__all__ = ["MoELayer"]

#: "All rows": the GEMM clamps counts to the capacity, so the router needs no count for each batch size.
_ALL_ROWS = 2**31 - 1
_HIDDEN = (torch.bfloat16, torch.float16, torch.float32)


class MoELayer(Experts):
    """A Mixture-of-Experts layer for inference: y = sum over the chosen experts of weight * expert(hidden), plus the shared expert.

    State dict: `gate.weight` (E, H); `gate.bias` (E,) and `gate.e_score_correction_bias` (E,) fp32 where the router has them;
    `gate_up_proj` (E, 2I, H), gate rows then up rows, and `down_proj` (E, H, I), in bf16 or e4m3; `gate_up_proj_scale_inv` and
    `down_proj_scale_inv` where quantized (fp32 for fp8_block, in 128x128 blocks of gate and of up apart; uint8 E8M0 for mxfp8);
    `gate_up_proj_bias`, `down_proj_bias`; `shared_expert.*` (the same names, E = 1) and `shared_expert_gate.weight` (1, H).
    Nothing derived is saved. `.to(dtype)` never converts quantized data, scales or the correction bias.

    Args:
        gate: router weight (E, H), over all experts, also when `local` keeps a part of them here.
        experts: stacked weights of the local experts: bf16 or fp16, or quantized with row-major scales, both in one format. fp8_block w13 (and
            mxfp8 folded to 128x128, which is kept as it is) has segments=2; where I % 128 = 0, segments=1 means the same.
        routing: `RoutingOptions`.
        act: activation of the experts and of the shared expert.
        gate_bias: (E,) added to the logits (gpt-oss), or None.
        correction_bias: (E,) added to the scores for ranking alone (DeepSeek), or None.
        local: (first, count) of the experts that live here; None: all. Pairs of other experts contribute nothing.
        shared: weights of the shared expert as a stack of one, or None.
        shared_gate: (1, H): the shared expert's output is multiplied by sigmoid(hidden @ shared_gate^T) (Qwen2-MoE), or None.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, or a GPU without FP8 (older than SM89); the text names the argument.
    """

    _all_rows: torch.Tensor

    def __init__(
        self,
        gate: torch.Tensor,
        experts: ExpertWeights,
        routing: RoutingOptions,
        *,
        act: Activation | None = None,
        gate_bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
        local: tuple[int, int] | None = None,
        shared: ExpertWeights | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> None:
        experts, shared = check_layer(gate, experts, routing, act, gate_bias, correction_bias, local, shared, shared_gate)
        super().__init__(experts)
        self.routing, self.act, self.local = routing, act or Activation(), local
        self.gate = Gate(gate, gate_bias, correction_bias)
        self.shared_expert = None if shared is None else Experts(shared)
        self.shared_expert_gate = None if shared_gate is None else Gate(shared_gate, None, None)
        self.register_buffer("_all_rows", torch.full((1,), _ALL_ROWS, dtype=torch.int32, device=gate.device), persistent=False)

    # ---- making one

    @classmethod
    def from_weights(
        cls,
        gate: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        *,
        top_k: int,
        format: str | Format | None = None,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        shared_w13: torch.Tensor | None = None,
        shared_w2: torch.Tensor | None = None,
        act: Activation | None = None,
        gate_bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
        local: tuple[int, int] | None = None,
        **routing: Any,
    ) -> "MoELayer":
        """A layer from floating weights, quantized to `format` or kept as they are.

        Args:
            gate: router weight (E, H).
            w13: (E, 2I, H), gate rows then up rows; only the local experts where `local` is given.
            w2: (E, H, I).
            top_k: experts per token.
            format: "fp8_block", "mxfp8", or None to keep the weights' dtype (bf16 or fp16).
            b13: biases (E, 2I) in the order of w13's rows, or None.
            b2: biases (E, H), or None.
            shared_w13: (2I', H) of the shared expert, or None.
            shared_w2: (H, I') of the shared expert, or None.
            act: see `MoELayer`.
            gate_bias: see `MoELayer`.
            correction_bias: see `MoELayer`.
            shared_gate: see `MoELayer`.
            local: see `MoELayer`.
            routing: further fields of `RoutingOptions`: score, n_group, topk_group, renormalize, scale.

        Raises:
            TypeError, ValueError: as `MoELayer`, or an unknown format.
        """
        if (shared_w13 is None) != (shared_w2 is None):
            raise ValueError("MoELayer: shared_w13 and shared_w2 must be given together")
        for name, w in (("gate", gate), ("w13", w13), ("w2", w2), ("shared_w13", shared_w13), ("shared_w2", shared_w2)):
            if w is not None or name in ("gate", "w13", "w2"):
                checks.is_tensor("MoELayer", name, w)
        shared = None
        if shared_w13 is not None and shared_w2 is not None:
            shared = in_format(ExpertWeights(shared_w13[None], shared_w2[None]), format, "shared expert")
        experts = in_format(ExpertWeights(w13, w2, b13, b2), format, "w13")
        options = routing_options("MoELayer.from_weights", top_k, routing)
        return cls(
            gate, experts, options, act=act, gate_bias=gate_bias, correction_bias=correction_bias, local=local, shared=shared, shared_gate=shared_gate
        )

    @classmethod
    def from_quantized(
        cls,
        gate: torch.Tensor,
        w13: QTensor,
        w2: QTensor,
        *,
        top_k: int,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        shared: tuple[QTensor, QTensor] | None = None,
        act: Activation | None = None,
        gate_bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
        local: tuple[int, int] | None = None,
        **routing: Any,
    ) -> "MoELayer":
        """A layer over quantized weights, which are used as they are; arguments as in `from_weights`, `shared` is (w13, w2) with E = 1.

        Raises:
            TypeError, ValueError: as `MoELayer`; scales that hold NaN, which are looked for on the host.
        """
        if not (isinstance(w13, QTensor) and isinstance(w2, QTensor)):
            raise TypeError(f"MoELayer: w13 and w2 must be QTensor, got {type(w13).__name__} and {type(w2).__name__}")
        if shared is not None and not (isinstance(shared, tuple) and len(shared) == 2 and all(isinstance(w, QTensor) for w in shared)):
            raise TypeError("MoELayer: shared must be None or a tuple of two QTensor, (w13, w2)")
        return cls(
            gate,
            ExpertWeights(w13, w2, b13, b2),
            routing_options("MoELayer.from_quantized", top_k, routing),
            act=act,
            gate_bias=gate_bias,
            correction_bias=correction_bias,
            local=local,
            shared=None if shared is None else ExpertWeights(*shared),
            shared_gate=shared_gate,
        )

    @classmethod
    def from_state_dict(
        cls,
        sd: Mapping[str, torch.Tensor],
        prefix: str,
        config: Any,
        *,
        format: str | Format | None = None,
        local: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        **routing: Any,
    ) -> "MoELayer":
        """A layer read from a checkpoint in any dialect (`moe_ops.layer.dialects`), or from a `MoELayer`'s own state dict.

        Args:
            sd: name -> tensor; read lazily, and only below `prefix`.
            prefix: of the layer, with its dot: "model.layers.3.mlp." or "model.layers.3.block_sparse_moe.".
            config: model config: the content of config.json, or Transformers' object; gives routing, activation and `quantization_config`.
            format: quantize floating experts to this format; None keeps what is stored.
            local: (first, count) of the experts to read; None reads all.
            device: where the layer goes; None leaves tensors where they are.
            routing: fields of `RoutingOptions` that win over the config.

        Raises:
            KeyError: a missing tensor, named.
            ValueError: an unknown model_type or dialect, or a tensor that contradicts it, named.
        """
        model = model_moe(config, **routing)
        check_local(local, model.num_experts)  # before anything large is read
        with errors_of("MoELayer.from_state_dict"):
            arguments = read_layer(sd, prefix, model, format, local, device)
        return cls(**arguments)

    # ---- running it

    def forward(
        self,
        hidden: torch.Tensor,
        num_valid: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        workspace: Workspace | None = None,
        impl: str | None = None,
    ) -> torch.Tensor:
        """Route and run `hidden` through the experts.

        Args:
            hidden: (.., H), bf16, fp16 or fp32, contiguous; unquantized experts need hidden in their own dtype.
            num_valid: int32 device tensor of one element: rows (of the flattened hidden) from there on are padding and can hold anything.
            out: tensor like `hidden` that receives the result; may be `hidden`.
            workspace: from `make_workspace`; with `out`, the experts then allocate nothing.
            impl: of the experts: "triton", "torch" (the reference; reads counts on the host) or None.

        Returns:
            (.., H) of hidden's dtype (`out` if given). Padded rows are 0.

        Numerics: logits in fp32 from the products of hidden and gate as they are; then as `route` and `fused_moe`. The shared expert's output
            is rounded to hidden's dtype and added in it.

        Raises:
            TypeError, ValueError: arguments that do not fit, named.
            RuntimeError: a first compile under graph capture or after `freeze()`.

        Cost: at most eight launches, nine above 1024 pairs (T * top_k) where GEMM1 is not fused; about ten more for a shared expert.
        """
        op = "MoELayer"
        checks.is_tensor(op, "hidden", hidden)
        checks.dtype(op, "hidden", hidden, _HIDDEN if self.format is not None else (self.gate_up_proj.dtype,))
        checks.contiguous(op, "hidden", hidden)
        check_num_valid(op, num_valid)
        checks.same_device(op, hidden=hidden, num_valid=num_valid, out=out if isinstance(out, torch.Tensor) else None, gate=self.gate.weight)
        checks.no_grad(op, hidden=hidden, **{"gate.weight": self.gate.weight})
        if hidden.dim() == 0 or hidden.shape[-1] != self.gate.weight.shape[1]:
            raise ValueError(f"{op}: hidden must have H = {self.gate.weight.shape[1]} columns, got shape {tuple(hidden.shape)}")
        if torch.compiler.is_compiling():
            prepare_at(id(self))
        else:
            self.prepare()
        x = hidden.view(-1, hidden.shape[-1])
        flat = None
        if out is not None:
            checks.is_tensor(op, "out", out)
            checks.shape(op, "out", out, tuple(hidden.shape))
            checks.dtype(op, "out", out, (hidden.dtype,))
            checks.contiguous(op, "out", out)
            flat = out.view(x.shape)
        o = self.routing
        routing = route(
            self.router_logits(x, num_valid),
            o.top_k,
            score=o.score,
            bias=self.gate.e_score_correction_bias,
            n_group=o.n_group,
            topk_group=o.topk_group,
            renormalize=o.renormalize,
            scale=o.scale,
            num_valid=num_valid,
            local=self.local,
        )
        w13, w2 = self.ready()
        b13, b2 = self.gate_up_proj_bias, self.down_proj_bias
        shared = None if self.shared_expert is None else self._shared(x, num_valid, impl)  # first: `out` may lie over hidden
        y = fused_moe(x, w13, w2, routing, b13=b13, b2=b2, act=self.act, out=flat, workspace=workspace, impl=impl)
        if shared is not None:
            y.add_(shared)
        return out if out is not None else y.view(hidden.shape)

    def router_logits(self, x: torch.Tensor, num_valid: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (T, E) fp32 of x (T, H); rows from `num_valid` on are undefined."""
        return _linear(x, self.gate, num_valid, self._all_rows)

    def _shared(self, x: torch.Tensor, num_valid: torch.Tensor | None, impl: str | None) -> torch.Tensor:
        """The shared expert as a layer of one expert, whose weight is 1 or the sigmoid of its gate."""
        assert self.shared_expert is not None
        ids = torch.zeros((x.shape[0], 1), dtype=torch.int32, device=x.device)
        if self.shared_expert_gate is None:
            weights = torch.ones((x.shape[0], 1), dtype=torch.float32, device=x.device)
        else:
            weights = torch.sigmoid(_linear(x, self.shared_expert_gate, num_valid, self._all_rows))
        w13, w2 = self.shared_expert.ready()
        return fused_moe(x, w13, w2, Routing.from_topk(ids, weights, 1, num_valid=num_valid), act=self.act, impl=impl)

    # ---- getting it ready

    def prepare(self, again: bool = False) -> "MoELayer":
        """Make what is derived from the weights; idempotent, never saved, and done by the first `forward` too.

        On Hopper, mxfp8 weights whose H and I are multiples of 128 are folded (`moe_ops.quant.fold`): a second copy of the experts, read
        instead of the stored ones. `layer.fold = False` trades the speed for that memory. Copies are remade after the weights changed, by the
        next `forward` or `prepare` outside of a capture, in the memory they had. Reads the device when it makes or remakes them.
        Changes are those that torch counts: writes through `.data` and into tensors of inference mode are not, and want `again=True` afterwards.
        """
        for experts in (self, self.shared_expert):
            if again and experts is not None:
                experts._folded_from = ()
        self.prepare_weights()
        if self.shared_expert is not None:
            self.shared_expert.fold = self.fold
            self.shared_expert.prepare_weights()
        return self

    def make_workspace(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Workspace:
        """Buffers for `forward(.., out=, workspace=)` with up to `tokens` tokens; they fit the prepared layer, so it is prepared here."""
        return make_workspace(tokens, self.routing.top_k, self.prepare().ready()[0], dtype)

    def warmup_call(self, tokens: int) -> None:
        """One call with `tokens` zero tokens, with and without `num_valid`; what `moe_ops.warmup` runs."""
        dtype = self.gate_up_proj.dtype if self.format is None else self.gate.weight.dtype
        if dtype == torch.float32:  # a router kept in fp32 says nothing about the activations
            dtype = torch.bfloat16
        hidden = torch.zeros((tokens, self.gate.weight.shape[1]), dtype=dtype, device=self.gate.weight.device)
        self(hidden)
        self(hidden, num_valid=torch.full((1,), tokens, dtype=torch.int32, device=hidden.device))

    def exact(self) -> list[str]:
        """Also the count that the router reads, under `type(dtype)`."""
        return [*super().exact(), "_all_rows"]

    def _apply(self, fn: Any, recurse: bool = True) -> "MoELayer":
        super()._apply(fn, recurse)
        self._all_rows.fill_(_ALL_ROWS)  # to_empty() leaves buffers undefined
        return self

    def extra_repr(self) -> str:
        """Shapes and options, for print(layer)."""
        e, rows, h = self.gate_up_proj.shape
        fmt = self.format.name if self.format is not None else str(self.gate_up_proj.dtype).removeprefix("torch.")
        local = "" if self.local is None else f", local={self.local}"
        return f"{fmt}, experts={e}, H={h}, I={rows // 2}, {self.routing}, {self.act}{local}"


def _linear(x: torch.Tensor, gate: Gate, num_valid: torch.Tensor | None, all_rows: torch.Tensor) -> torch.Tensor:
    """x @ gate^T + bias in fp32: on CUDA with our own GEMM, as one expert whose capacity is T."""
    w, bias = gate.weight, gate.bias
    if x.is_cuda and w.dtype == x.dtype and w.dtype in (torch.bfloat16, torch.float16):
        counts = num_valid.view(1) if num_valid is not None and num_valid.dtype == torch.int32 else all_rows
        rows = None if bias is None else bias.unsqueeze(0)
        return grouped_gemm(x.unsqueeze(0), w.unsqueeze(0), counts, bias=rows, out_dtype=torch.float32).squeeze(0)
    return F.linear(x.float(), w.float(), None if bias is None else bias.float())
