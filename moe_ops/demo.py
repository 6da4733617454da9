"""`moe-ops demo`: four families of models with quantized experts, and on a GPU two layers of real size.

Small random Qwen3-MoE, DeepSeek-V3, Mixtral and gpt-oss models (`moe_ops.hf.small`) run prefill and greedy decoding in bf16 with
Transformers' own experts, then with ours in bf16, fp8_block and mxfp8. On a GPU one layer of Qwen3-235B and one of DeepSeek-V3, each as
rank 0 of 8, run under a CUDA graph.

Exit status 0: every experts call within 1e-2 of our reference, logits within 0.15 of bf16, real layers within 1e-2 on 64 tokens.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moe_ops.bench.provenance import provenance
from moe_ops.bench.roofline import KNOWN, median_seconds, roof_of
from moe_ops.bench.shapes import MODELS, Model
from moe_ops.core.arch import unsupported_reason
from moe_ops.core.numerics import relative_error
from moe_ops.hf.small import FAMILIES, VOCAB, build, experts_bytes, greedy

FORMATS = ("fp8_block", "mxfp8")
#: Bound of one experts call against the reference; and of a model's logits against bf16.
LAYER_BOUND, LOGITS_BOUND = 1e-2, 0.15


@dataclass
class ModelRow:
    """One line of the models' table; times in milliseconds, errors as ||a - b|| / ||b||."""

    model: str
    format: str
    impl: str
    logits_error: float
    layer_error: float
    token_agreement: float
    experts_mib: float
    prefill_ms: float
    decode_ms: float
    ok: bool


@dataclass
class LayerRow:
    """One line of the real layers' table; `share` is the limit's time over the measured one."""

    layer: str
    format: str
    tokens: int
    rows: int
    error: float
    us: float
    limit_us: float
    share: float
    ok: bool


@torch.no_grad()
def _logits_and_layer_error(model: Any, ids: torch.Tensor, ours: bool) -> tuple[torch.Tensor, float]:
    """Logits of a prefill, and the largest error of an experts call against our reference on the same inputs."""
    from moe_ops.hf.experts import experts_modules, run

    errors = [0.0]

    def compare(module: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        errors.append(relative_error(out, run(module, *args, impl="torch")))

    hooks = [m.register_forward_hook(compare) for _, m in experts_modules(model)] if ours else []
    try:
        return model(ids).logits.float(), max(errors)
    finally:
        for hook in hooks:
            hook.remove()


def run_family(family: str, ids: torch.Tensor, steps: int) -> list[ModelRow]:
    """The rows of one family on the device of `ids`: bf16 with Transformers' experts, then ours in bf16 and in both formats."""
    from moe_ops.hf import quantize_model_, register

    register()
    rows, bf16, tokens = [], torch.empty(0), torch.empty(0)
    for fmt in ("baseline", "bf16", *FORMATS):
        model = build(family, device=ids.device)
        if fmt in FORMATS:
            quantize_model_(model, fmt)
        elif fmt == "bf16":
            model.set_experts_implementation("moe_ops")
        logits, layer_error = _logits_and_layer_error(model, ids, fmt != "baseline")
        # Transformers' loop over the experts reads the host, so its decode cannot be captured
        graph = ids.is_cuda and fmt != "baseline"
        got, prefill, decode = greedy(model, ids, steps, graph=graph)
        if fmt == "baseline":
            bf16, tokens = logits, got
        error = relative_error(logits, bf16)
        rows.append(
            ModelRow(
                family,
                "bf16" if fmt == "baseline" else fmt,
                "transformers" if fmt == "baseline" else "moe_ops",
                error,
                layer_error,
                float((got == tokens).float().mean()),
                experts_bytes(model) / 2**20,
                prefill * 1e3,
                decode * 1e3,
                error <= LOGITS_BOUND and layer_error <= LAYER_BOUND,
            )
        )
    return rows


def real_layer(shape: Model, fmt: str, *, seed: int = 0) -> Any:
    """A `MoELayer` of real size with random weights on the current GPU; the experts of rank 0."""
    from moe_ops.layer.module import MoELayer

    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=g, device="cuda", dtype=torch.bfloat16)

    e, h, i = shape.local_experts, shape.hidden, shape.intermediate
    layer = MoELayer.from_weights(
        normal(shape.experts, h) * h**-0.5,
        normal(e, 2 * i, h) * h**-0.5,
        normal(e, h, i) * i**-0.5,
        top_k=shape.top_k,
        format=fmt,
        score=shape.score,
        correction_bias=torch.randn(shape.experts, generator=g, device="cuda") * 0.01 if shape.score == "sigmoid" else None,
        n_group=shape.n_group,
        topk_group=shape.topk_group,
        renormalize=True,
        local=(0, e),
    )
    return layer


@torch.no_grad()
def run_layer(shape: Model, fmt: str, token_counts: Sequence[int]) -> list[LayerRow]:
    """Times of one real layer (router included) under a CUDA graph, and its error on 64 of the same tokens."""
    from moe_ops.router.route import route

    layer = real_layer(shape, fmt)
    roof = roof_of(torch.cuda.get_device_name()) or KNOWN["NVIDIA H200"]
    rows = []
    for tokens in token_counts:
        x = torch.randn((tokens, shape.hidden), generator=torch.Generator("cuda").manual_seed(tokens), device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x)
        layer(x, out=out)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            layer(x, out=out)
        us = median_seconds(graph.replay, reps=30) * 1e6
        sample = slice(0, min(64, tokens))
        error = relative_error(out[sample], layer(x[sample], impl="torch"))
        o = layer.routing
        options = {"score": o.score, "n_group": o.n_group, "topk_group": o.topk_group, "renormalize": o.renormalize, "local": layer.local}
        counts = route(layer.router_logits(x), o.top_k, bias=layer.gate.e_score_correction_bias, **options).counts
        routed, active = int(counts.sum()), int((counts > 0).sum())
        w13, w2 = layer.ready()
        nbytes = active / shape.local_experts * (w13.nbytes + w2.nbytes) + 2 * x.numel() * x.element_size()
        flops = 6.0 * routed * shape.hidden * shape.intermediate
        limit = roof.limit(nbytes, flops, memory="read") * 1e6
        rows.append(LayerRow(shape.name, fmt, tokens, routed, error, us, limit, limit / us, error <= LAYER_BOUND))
    return rows


def _print_models(rows: Sequence[ModelRow]) -> None:
    head = f"{'model':<12} {'format':<10} {'experts by':<13} {'logits error':>12} {'layer error':>11} {'tokens equal':>12}"
    print(f"{head} {'experts MiB':>11} {'prefill ms':>10} {'decode ms':>9}")
    for r in rows:
        print(
            f"{r.model:<12} {r.format:<10} {r.impl:<13} {r.logits_error:>12.2e} {r.layer_error:>11.2e} {r.token_agreement:>12.0%} "
            f"{r.experts_mib:>11.2f} {r.prefill_ms:>10.2f} {r.decode_ms:>9.2f}{'' if r.ok else '  FAILED'}"
        )
    print(f"logits error: against bf16, at most {LOGITS_BOUND}; layer error: an experts call against our reference, at most {LAYER_BOUND}")


def _print_layers(rows: Sequence[LayerRow]) -> None:
    print(f"\n{'layer':<18} {'format':<10} {'tokens':>6} {'rows':>6} {'error':>9} {'us':>8} {'limit us':>8} {'share':>6}")
    for r in rows:
        print(
            f"{r.layer:<18} {r.format:<10} {r.tokens:>6} {r.rows:>6} {r.error:>9.2e} {r.us:>8.1f} {r.limit_us:>8.1f} {r.share:>6.0%}"
            f"{'' if r.ok else '  FAILED'}"
        )
    print("us: router and experts under a CUDA graph; limit: bytes / bandwidth or FLOPs / rate, whichever is longer (moe_ops.bench.roofline)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and print its tables.

    Args:
        argv: arguments, default `sys.argv[1:]`.

    Returns:
        0 when every bound holds, 1 when one does not, 2 when the demo cannot run here.
    """
    parser = argparse.ArgumentParser(prog="moe-ops demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--model", action="append", choices=sorted(FAMILIES), help="only this family (may be repeated)")
    parser.add_argument("--steps", type=int, default=16, help="tokens to decode, at least 3 (default 16)")
    parser.add_argument("--no-layers", action="store_true", help="leave the real-size layers out")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file too, with versions, date and commit")
    parser.add_argument("--commit", default="", help="commit that --json names (default: that of the checkout)")
    args = parser.parse_args(argv)
    if args.steps < 3:
        parser.error(f"--steps must be at least 3, got {args.steps}")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    reason = f"no {device.type} device here" if device.type == "cuda" and not torch.cuda.is_available() else unsupported_reason(device)
    if reason is None:
        try:
            from moe_ops.hf import register

            register()
        except ImportError as error:
            reason = str(error)
    if reason is not None:
        print(f"moe-ops demo: cannot run: {reason}")
        return 2
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU (reference implementation)"
    print(f"{where}, torch {torch.__version__}")
    ids = torch.randint(1, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0)).to(device)
    models = [row for family in (args.model or FAMILIES) for row in run_family(family, ids, args.steps)]
    _print_models(models)
    layers: list[LayerRow] = []
    if device.type == "cuda" and not args.no_layers:
        for name in ("qwen3-235b", "deepseek-v3"):
            for fmt in FORMATS:
                layers += run_layer(MODELS[name].ep(8), fmt, (64, 4096))
        _print_layers(layers)
    if device.type == "cpu":
        print("on a CPU moe_ops is that reference, so its layer error compares the reference with itself: 0 says nothing of the kernels")
    if args.json:
        record = {**provenance(args.commit), "models": [asdict(r) for r in models], "layers": [asdict(r) for r in layers]}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    failed = [r for r in (*models, *layers) if not r.ok]
    print(f"{len(failed)} of {len(models) + len(layers)} rows are out of bounds" if failed else "all bounds hold")
    return 1 if failed else 0
