"""Expert choice: scores, groups, index-tracking top-k and weights of T tokens, one kernel source for every router.

    score s = softmax(x) | sigmoid(x) | sqrt(softplus(x)) | x ("topk_softmax")        value v = s + bias
    groups: score of a group = sum of its two best v; only experts of the best `topk_group` groups can be chosen
    ids = the k largest v, ties to the lower id         weights = s of the chosen (never the bias) | softmax over the chosen x

Rankings compare integers: the bits of fp32 v, mapped so that signed order is numeric order and -0 equals +0. Three keys lie below those of all
numbers, so that nothing real can lose to them: NaN, then experts of dropped groups, then columns that are padding or already taken. The k
rounds take the largest key and then the smallest column that holds it. Both are 32-bit integer reductions over one warp,
which are single instructions (redux.sync). Counted in code compiled for SM90, E = 256: at k = 8 the rounds take 386 instructions and 16 redux,
a bitonic top-k on 64-bit keys (value and inverted column in one) 1143 and 152 shuffles; they meet near k = 24.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_ops.core.arch import Arch, arch_of
from moe_ops.core.device_math import exp_accurate, sigmoid_accurate
from moe_ops.core.formats import ceil_div
from moe_ops.core.launch import launch, runs_kernels
from moe_ops.core.pdl import after_previous
from moe_ops.router.layout import local_ids_ref
from moe_ops.router.pairs_kernel import local_expert, valid_tokens

SCORES = ("softmax", "topk_softmax", "sigmoid", "sqrt_softplus")
MAX_TOP_K = 64

# Sort keys below those of all numbers (-inf has -2139095041); the comment at the top says why in this order.
NAN = tl.constexpr(-(2**31) + 2)
DROPPED = tl.constexpr(-(2**31) + 1)
TAKEN = tl.constexpr(-(2**31))

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class TopkConfig:
    """Tokens of one program and warps."""

    block_t: int
    num_warps: int


def padded_columns(num_experts: int, n_group: int) -> tuple[int, int]:
    """Groups and experts per group, each rounded up to a power of two."""
    return 1 << (n_group - 1).bit_length(), 1 << (num_experts // n_group - 1).bit_length()


def heuristic(tokens: int, columns: int, arch: Arch) -> TopkConfig:
    """One warp a token as long as all tokens are resident at once (32 blocks an SM); beyond that a warp takes several."""
    block_t = 1 if tokens <= 32 * arch.sms else max(1, min(16, 1024 // columns))
    return TopkConfig(block_t, max(1, min(16, columns // 512)))


@dataclass(frozen=True)
class Choice:
    """How experts are chosen: the arguments of `route` that are not tensors, plus its bias."""

    top_k: int
    score: str
    bias: torch.Tensor | None
    n_group: int
    topk_group: int
    renormalize: bool
    scale: float


def _falling(v: torch.Tensor, last: torch.Tensor | None = None) -> torch.Tensor:
    """Indices that sort the rows of v: falling, ties to the lower index, NaN behind the numbers, entries with `last` behind those."""
    behind = v.isnan().int()
    if last is not None:
        behind = behind + 2 * last.int()
    index = torch.where(v.isnan(), -torch.inf, v).sort(dim=-1, descending=True, stable=True).indices
    return index.gather(-1, behind.gather(-1, index).sort(dim=-1, stable=True).indices)


def _softmax_ref(x: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """Softmax of finite x in which NaN entries weigh nothing; all zero where every entry is NaN."""
    e = torch.where(nan, 0.0, (x - x.amax(-1, keepdim=True)).exp())
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0, 1.0, total)


def topk_ref(
    logits: torch.Tensor, choice: Choice, num_valid: torch.Tensor | None, num_local: int, first: int, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of the choice: ids int32 [T, k] and weights fp32 [T, k]."""
    tokens, experts = logits.shape
    x = logits.float()
    nan = x.isnan()
    x = torch.where(nan, -_LARGEST, x.clamp(-_LARGEST, _LARGEST))  # infinities become the largest numbers: no inf - inf
    if choice.score == "softmax":
        s = _softmax_ref(x, nan)
    elif choice.score == "sigmoid":
        s = 1.0 / (1.0 + (-x).exp())
    elif choice.score == "sqrt_softplus":
        half = (-0.5 * x.abs()).exp()  # of exp(-|x|): its square underflows at -88 already, the score only at -206
        s = torch.where(x < -20.0, half, (x.clamp(min=0.0) + (half * half).log1p()).sqrt())
    else:
        s = x
    v = s if choice.bias is None else s + choice.bias
    v = torch.where(nan, torch.nan, v)
    dropped = None
    if choice.n_group > 1:
        best = (
            torch.where(v.isnan(), -torch.inf, v)
            .view(tokens, choice.n_group, experts // choice.n_group)
            .sort(dim=-1, descending=True)
            .values[..., :2]
        )
        kept = _falling(best.sum(-1))[:, : choice.topk_group]
        dropped = torch.ones(tokens, choice.n_group, dtype=torch.bool, device=x.device).scatter_(1, kept, False)
        dropped = dropped.repeat_interleave(experts // choice.n_group, -1)
    ids = _falling(v, dropped)[:, : choice.top_k]
    chosen_nan = nan.gather(1, ids)
    if choice.score == "topk_softmax":
        weights = _softmax_ref(x.gather(1, ids), chosen_nan)
    else:
        weights = torch.where(chosen_nan, 0.0, s.gather(1, ids))
        if choice.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * choice.scale
    here = local_ids_ref(ids, experts, num_local, first, expert_map, num_valid) >= 0
    return torch.where(here, ids, -1).to(torch.int32), torch.where(here, weights, 0.0)


@triton.jit
def _log1p_of_unit(u):
    """ln(1 + u) for 0 <= u <= 1 to 4 ulp: 2 atanh(u / (2 + u)) by its series, whose ninth term is below 2e-9 of the sum."""
    s = tl.div_rn(u, 2.0 + u)
    q = s * s
    p = tl.fma(q, 1.0 / 15.0, 1.0 / 13.0)
    p = tl.fma(p, q, 1.0 / 11.0)
    p = tl.fma(p, q, 1.0 / 9.0)
    p = tl.fma(p, q, 1.0 / 7.0)
    p = tl.fma(p, q, 1.0 / 5.0)
    p = tl.fma(p, q, 1.0 / 3.0)
    p = tl.fma(p, q, 1.0)
    return 2.0 * s * p


@triton.jit
def _load_logits(ptrs, mask):
    """Logits as finite fp32, and which of them are NaN or absent."""
    x = tl.load(ptrs, mask=mask, other=float("nan")).to(tl.float32)
    missing = x != x
    x = tl.where(missing, -3.4028234663852886e38, x)
    return tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38), missing


@triton.jit
def _softmax_terms(x, missing):
    """Numerators of the row softmax and its row sums (1 where nothing is there)."""
    e = tl.where(missing, 0.0, exp_accurate(x - tl.max(x, axis=1)[:, None]))
    total = tl.sum(e, axis=1)
    return e, tl.where(total == 0.0, 1.0, total)


@triton.jit
def _score(x, SCORE: tl.constexpr):
    if SCORE == "sigmoid":
        return sigmoid_accurate(x)
    elif SCORE == "sqrt_softplus":
        half = exp_accurate(-0.5 * tl.abs(x))
        return tl.where(x < -20.0, half, tl.sqrt_rn(tl.maximum(x, 0.0) + _log1p_of_unit(half * half)))
    else:
        return x


@triton.jit
def _key_of(v):
    """int32 whose signed order is the order of v; NaN gets the key below -inf's range."""
    bits = v.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(key == -1, 0, key)  # -0.0
    return tl.where(v != v, NAN, key)


@triton.jit
def _value_of(key):
    """Inverse of `_key_of`; -inf for the keys that are no numbers."""
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key <= NAN, float("-inf"), value)


@triton.jit
def _drop_groups(key, TOPK_GROUP: tl.constexpr, N_GROUP: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Give the experts outside the best groups the key that loses to every expert inside."""
    member = tl.arange(0, MEMBERS)[None, None, :]
    group = tl.arange(0, GROUPS)[None, :]
    keys = tl.reshape(key, [BLOCK_T, GROUPS, MEMBERS])
    best = tl.max(keys, axis=2)
    group_value = _value_of(best)
    if MEMBERS > 1:
        best_at = tl.min(tl.where(keys == best[:, :, None], member, MEMBERS), axis=2)
        second = tl.max(tl.where(member == best_at[:, :, None], TAKEN, keys), axis=2)
        group_value += _value_of(second)
    group_key = tl.where(group < N_GROUP, _key_of(group_value), TAKEN)
    dropped = tl.full([BLOCK_T, GROUPS], 1, tl.int32)
    for _ in range(TOPK_GROUP):
        top = tl.max(group_key, axis=1)
        at = tl.min(tl.where(group_key == top[:, None], group, GROUPS), axis=1)
        dropped = tl.where(group == at[:, None], 0, dropped)
        group_key = tl.where(group == at[:, None], TAKEN, group_key)
    keys = tl.where((dropped[:, :, None] != 0) & (keys > TAKEN), DROPPED, keys)
    return tl.reshape(keys, [BLOCK_T, GROUPS * MEMBERS])


@triton.jit(do_not_specialize=["T", "stride_lt", "num_local", "first", "scale"])
def _topk_kernel(
    logits_ptr,
    bias_ptr,
    num_valid_ptr,
    map_ptr,
    ids_ptr,
    weights_ptr,
    T,
    stride_lt,
    num_local,
    first,
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PADDED: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    N_GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ids and weights of BLOCK_T tokens. Columns are experts, each group padded to MEMBERS and the groups to GROUPS."""
    after_previous(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.arange(0, K_PADDED)
    out = token.to(tl.int64)[:, None] * TOP_K + slot[None, :]
    inside = (token < T)[:, None] & (slot < TOP_K)[None, :]
    valid = valid_tokens(num_valid_ptr, T)
    if tl.program_id(0) * BLOCK_T >= valid:
        tl.store(ids_ptr + out, tl.full([BLOCK_T, K_PADDED], -1, tl.int32), mask=inside)
        tl.store(weights_ptr + out, tl.zeros([BLOCK_T, K_PADDED], tl.float32), mask=inside)
        return

    size: tl.constexpr = E // N_GROUP
    column = tl.arange(0, GROUPS * MEMBERS)
    expert = (column // MEMBERS) * size + column % MEMBERS
    exists = (column // MEMBERS < N_GROUP) & (column % MEMBERS < size)
    row = logits_ptr + token.to(tl.int64)[:, None] * stride_lt
    real = (token < valid)[:, None]
    x, missing = _load_logits(row + expert[None, :], real & exists[None, :])
    if SCORE == "softmax":
        terms, total = _softmax_terms(x, missing)
        v = tl.div_rn(terms, tl.broadcast_to(total[:, None], terms.shape))
    else:
        v = _score(x, SCORE)
    if bias_ptr is not None:
        v += tl.load(bias_ptr + expert, mask=exists, other=0.0)[None, :]
    key = _key_of(tl.where(missing, float("nan"), v))
    key = tl.where(exists[None, :], key, TAKEN)
    if N_GROUP > 1:
        key = _drop_groups(key, TOPK_GROUP, N_GROUP, GROUPS, MEMBERS, BLOCK_T)

    chosen = tl.zeros([BLOCK_T, K_PADDED], tl.int32)
    for j in range(TOP_K):
        top = tl.max(key, axis=1)
        at = tl.min(tl.where(key == top[:, None], column[None, :], GROUPS * MEMBERS - 1), axis=1)
        key = tl.where(column[None, :] == at[:, None], TAKEN, key)
        chosen = tl.where(slot[None, :] == j, at[:, None], chosen)

    chosen = (chosen // MEMBERS) * size + chosen % MEMBERS
    taken = real & (slot < TOP_K)[None, :]
    y, missing = _load_logits(row + chosen, taken)
    if SCORE == "topk_softmax":
        terms, total = _softmax_terms(y, missing)
        weight = tl.div_rn(terms, tl.broadcast_to(total[:, None], terms.shape))
    else:
        if SCORE == "softmax":
            weight = tl.div_rn(exp_accurate(y - tl.max(x, axis=1)[:, None]), tl.broadcast_to(total[:, None], y.shape))
        else:
            weight = _score(y, SCORE)
        weight = tl.where(missing, 0.0, weight)
        if RENORMALIZE:
            weight = tl.div_rn(weight, tl.broadcast_to((tl.sum(weight, axis=1) + 1e-20)[:, None], weight.shape))
    here = local_expert(chosen, taken, map_ptr, E, num_local, first) >= 0
    tl.store(ids_ptr + out, tl.where(here, chosen, -1), mask=inside)
    tl.store(weights_ptr + out, tl.where(here, weight * scale, 0.0), mask=inside)


def topk_into(
    logits: torch.Tensor,
    choice: Choice,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_valid: torch.Tensor | None = None,
    num_local: int | None = None,
    first: int = 0,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Write the choice of each token into given buffers; one launch, no allocation, no checks.

    Args:
        logits: (T, E) fp32, bf16 or fp16, last stride 1.
        choice: what to choose, and how.
        ids, weights: (T, k) int32 and fp32, contiguous, written.
        num_valid, num_local, first, expert_map: as for `moe_ops.router.layout.layout_into`; num_local None means all experts.
    """
    tokens, experts = logits.shape
    num_local = experts if num_local is None else num_local
    if not runs_kernels(logits):
        for out, result in zip((ids, weights), topk_ref(logits, choice, num_valid, num_local, first, expert_map), strict=True):
            out.copy_(result)
        return
    groups, members = padded_columns(experts, choice.n_group)
    config = heuristic(tokens, groups * members, arch_of(logits.device))
    launch(
        "route",
        _topk_kernel,
        (ceil_div(tokens, config.block_t),),
        logits,
        choice.bias,
        num_valid,
        expert_map,
        ids,
        weights,
        tokens,
        logits.stride(0),
        num_local,
        first,
        choice.scale,
        E=experts,
        TOP_K=choice.top_k,
        K_PADDED=1 << (choice.top_k - 1).bit_length(),
        SCORE=choice.score,
        RENORMALIZE=choice.renormalize and choice.score != "topk_softmax",
        N_GROUP=choice.n_group,
        TOPK_GROUP=choice.topk_group,
        GROUPS=groups,
        MEMBERS=members,
        BLOCK_T=config.block_t,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )
