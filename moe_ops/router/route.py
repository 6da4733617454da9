"""`route`: from router logits to a `Routing`, one launch for the choice and one or two for the token layout, nothing read on the host."""

import torch

from moe_ops.core import checks
from moe_ops.core.ops import register
from moe_ops.router.layout import LayoutTensors, empty_layout, layout_into, routing_layout_ref
from moe_ops.router.pairs_kernel import MAX_EXPERTS
from moe_ops.router.routing import Local, Routing, check_num_valid, check_pairs, parse_local
from moe_ops.router.topk import MAX_TOP_K, SCORES, Choice, topk_into, topk_ref


def _route_triton(
    logits: torch.Tensor,
    top_k: int,
    score: str,
    bias: torch.Tensor | None,
    n_group: int,
    topk_group: int,
    renormalize: bool,
    scale: float,
    num_valid: torch.Tensor | None,
    num_local: int,
    first: int,
    expert_map: torch.Tensor | None,
) -> LayoutTensors:
    choice = Choice(top_k, score, bias, n_group, topk_group, renormalize, scale)
    outs = empty_layout(logits.shape[0], top_k, num_local, logits.device)
    ids, weights, counts, offsets, order, inverse = outs
    topk_into(logits, choice, ids, weights, num_valid=num_valid, num_local=num_local, first=first, expert_map=expert_map)
    layout_into(ids, counts, offsets, order, inverse, num_experts=logits.shape[1], first=first, expert_map=expert_map, num_valid=num_valid)
    return outs


def _route_cpu(
    logits: torch.Tensor,
    top_k: int,
    score: str,
    bias: torch.Tensor | None,
    n_group: int,
    topk_group: int,
    renormalize: bool,
    scale: float,
    num_valid: torch.Tensor | None,
    num_local: int,
    first: int,
    expert_map: torch.Tensor | None,
) -> LayoutTensors:
    choice = Choice(top_k, score, bias, n_group, topk_group, renormalize, scale)
    ids, weights = topk_ref(logits, choice, num_valid, num_local, first, expert_map)
    return routing_layout_ref(ids, weights, logits.shape[1], num_local, first, expert_map, num_valid)


def _route_fake(
    logits: torch.Tensor,
    top_k: int,
    score: str,
    bias: torch.Tensor | None,
    n_group: int,
    topk_group: int,
    renormalize: bool,
    scale: float,
    num_valid: torch.Tensor | None,
    num_local: int,
    first: int,
    expert_map: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty_layout(logits.shape[0], top_k, num_local, logits.device)


_route = register("route", cuda=_route_triton, cpu=_route_cpu, fake=_route_fake)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
    num_valid: torch.Tensor | None = None,
    local: Local = None,
) -> Routing:
    """Choose top_k experts for each token from its router logits, with weights and the token layout.

    Args:
        logits (T, E), fp32, bf16 or fp16, last stride 1: router outputs. Infinities count as the largest numbers; NaN ranks behind every number
            and weighs 0.
        top_k: experts per token, at most min(64, topk_group * E / n_group).
        score: "softmax" over all experts; "sigmoid"; "sqrt_softplus" (sqrt(log(1 + exp(x)))); "topk_softmax" ranks the logits themselves and
            takes the softmax over the chosen ones.
        bias (E,), fp32, contiguous: added to the score for ranking alone, never part of a weight (DeepSeek's e_score_correction_bias).
        n_group, topk_group: experts in n_group consecutive groups of equal size, of which the topk_group best may be chosen from. A group's
            score is the sum of its two best score + bias (its only one in groups of one expert). Mixtral and Qwen3 are n_group = 1.
        renormalize: divide the weights by their sum + 1e-20, which leaves sums above 1e-12 unchanged bit for bit and makes weights that are
            all zero stay 0. No effect for "topk_softmax", whose weights sum to 1 already.
        scale: factor of the weights, applied here and nowhere else (DeepSeek's routed_scaling_factor).
        num_valid: int32 or int64 device tensor of one element, clamped to [0, T]: rows from there on are padding and are not read; they get
            ids -1 and weights 0. None: all rows are real.
        local: which experts are here, see `Routing.from_topk`; pairs of other experts get id -1 and weight 0.

    Returns:
        The routing. Each real row chose top_k distinct experts in range, whatever its logits hold, in the order of falling score + bias.

    Numerics:
        fp32; ranking is by the rounded fp32 score + bias, ties to the lower expert and the lower group; weights within 1e-6 relative of the
        reference. Deterministic.

    Raises:
        TypeError: another dtype or type. ValueError: an unknown score; E above 2048, top_k or groups out of range; a shape, stride or device that
            does not fit; an input that requires grad.

    Cost:
        Two launches up to 1024 pairs (T * k), three above. Reads T * E logits; the choice costs about top_k passes over them in registers.

    See Also:
        `Routing`; tests/router/test_route.py, benchmarks/router/bench_route.py.
    """
    op = "route"
    checks.is_tensor(op, "logits", logits)
    checks.dtype(op, "logits", logits, (torch.float32, torch.bfloat16, torch.float16))
    checks.ndim(op, "logits", logits, (2,))
    checks.last_stride_one(op, "logits", logits)
    checks.one_of(op, "score", score, SCORES)
    tokens, experts = logits.shape
    _check_sizes(op, experts, top_k, n_group, topk_group)
    check_pairs(op, tokens, top_k)
    if not isinstance(renormalize, bool):
        raise TypeError(f"{op}: renormalize must be a bool, got {type(renormalize).__name__}")
    if isinstance(scale, bool) or not isinstance(scale, int | float | torch.SymInt | torch.SymFloat):
        raise TypeError(f"{op}: scale must be a float, got {type(scale).__name__}")
    if bias is not None:
        checks.is_tensor(op, "bias", bias)
        checks.dtype(op, "bias", bias, (torch.float32,))
        checks.shape(op, "bias", bias, (experts,))
        checks.contiguous(op, "bias", bias)
    checks.no_grad(op, logits=logits, bias=bias)
    num_local, first, expert_map = parse_local(op, local, experts)
    check_num_valid(op, num_valid)
    checks.same_device(op, logits=logits, bias=bias, num_valid=num_valid, expert_map=expert_map)
    ids, weights, counts, offsets, order, inverse = _route(
        logits, top_k, score, bias, n_group, topk_group, renormalize, float(scale), num_valid, num_local, first, expert_map
    )
    return Routing(ids, weights, counts, offsets, order, inverse, experts, first, expert_map)


def _check_sizes(op: str, experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    for name, value in (("top_k", top_k), ("n_group", n_group), ("topk_group", topk_group)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: logits must have 1 to {MAX_EXPERTS} experts (columns), got {experts} with top_k {top_k}")
    if n_group < 1 or experts % n_group:
        raise ValueError(f"{op}: n_group must divide the number of experts {experts}, got {n_group}")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"{op}: topk_group must be between 1 and n_group {n_group}, got {topk_group}")
    limit = min(MAX_TOP_K, topk_group * (experts // n_group))
    if not 1 <= top_k <= limit:
        raise ValueError(
            f"{op}: top_k must be between 1 and {limit} for {experts} experts in {n_group} groups of which {topk_group} are kept "
            f"(and never above {MAX_TOP_K}), got {top_k}"
        )
