"""Shapes of real models, and how their tokens spread over the experts: even groups alone flatter a Mixture-of-Experts kernel."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Model:
    """One MoE layer of a model, on one rank.

    Attributes:
        name: model, with "/EPn" where its experts are spread over n ranks.
        hidden: H.
        intermediate: I of one expert.
        experts: experts of the whole layer.
        top_k: experts a token.
        score: router score, as `moe_ops.route` names it.
        n_group: router groups.
        topk_group: groups kept a token.
        shared: shared experts.
        local_experts: experts on this rank.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    score: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    shared: int = 0
    local_experts: int = 0

    def __post_init__(self) -> None:
        if not self.local_experts:
            object.__setattr__(self, "local_experts", self.experts)

    def ep(self, ranks: int) -> "Model":
        """The same layer with its experts spread over `ranks` ranks."""
        if self.experts % ranks:
            raise ValueError(f"Model.ep: {self.experts} experts of {self.name} do not divide into {ranks} ranks")
        return replace(self, name=f"{self.name}/EP{ranks}", local_experts=self.experts // ranks)

    @property
    def gemms(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the layer's two grouped GEMMs."""
        return {"gate_up": (2 * self.intermediate, self.hidden), "down": (self.hidden, self.intermediate)}


MODELS = {
    m.name: m
    for m in (
        Model("qwen3-30b", 2048, 768, 128, 8),
        Model("qwen3-235b", 4096, 1536, 128, 8),
        Model("deepseek-v3", 7168, 2048, 256, 8, score="sigmoid", n_group=8, topk_group=4, shared=1),
        Model("mixtral-8x7b", 4096, 14336, 8, 2),
        Model("gpt-oss-20b", 2880, 2880, 32, 4, score="topk_softmax"),
        Model("gpt-oss-120b", 2880, 2880, 128, 4, score="topk_softmax"),
    )
}

#: (model, ranks, tokens that reach this rank's experts) of the layer benchmarks.
LAYER_CASES = (
    *(("qwen3-30b", 1, t) for t in (1, 16, 128, 4096)),
    *(("qwen3-235b", 8, t) for t in (4, 64, 1024)),
    *(("qwen3-235b", 1, t) for t in (1, 16, 128, 2048)),
    *(("deepseek-v3", 8, t) for t in (4, 64, 1024)),
    *(("deepseek-v3", 32, t) for t in (256,)),
    *(("mixtral-8x7b", 1, t) for t in (1, 64, 1024)),
    *(("gpt-oss-20b", 1, t) for t in (1, 64, 1024)),
)

DISTRIBUTIONS = ("even", "zipf", "one_hot", "sparse")


def model(name: str) -> Model:
    """The layer of a name such as "qwen3-235b" or "deepseek-v3/EP8".

    Raises:
        ValueError: an unknown model.
    """
    base, _, ranks = name.partition("/EP")
    if base not in MODELS:
        raise ValueError(f"shapes.model: model must be one of {sorted(MODELS)}, got {name!r}")
    return MODELS[base].ep(int(ranks)) if ranks else MODELS[base]


def counts(kind: str, rows: int, experts: int, *, seed: int = 0) -> torch.Tensor:
    """Rows per expert, int32 [experts] on the CPU, with sum `rows`.

    Args:
        kind: "even" (as equal as can be), "zipf" (expert of rank r gets a share 1/r, ranks shuffled), "one_hot" (all rows on one
            expert), "sparse" (rows on every fourth expert).
        rows: routed rows.
        experts: experts on this rank.
        seed: which experts are hot.

    Raises:
        ValueError: an unknown kind.
    """
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
    share = torch.zeros(experts, dtype=torch.float64)
    if kind == "even":
        share[:] = 1
    elif kind == "zipf":
        share[order] = 1.0 / torch.arange(1, experts + 1, dtype=torch.float64)
    elif kind == "one_hot":
        share[order[0]] = 1
    elif kind == "sparse":
        share[order[: -(-experts // 4)]] = 1
    else:
        raise ValueError(f"shapes.counts: kind must be one of {DISTRIBUTIONS}, got {kind!r}")
    exact = share / share.sum() * rows
    filled = exact.floor()
    left = rows - int(filled.sum())
    filled[(exact - filled).argsort(descending=True, stable=True)[:left]] += 1
    return filled.to(torch.int32)


def routed(m: Model, tokens: int, *, skew: float = 0.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Global expert ids [tokens, k] int32 and weights [tokens, k] fp32 for a rank of `m`, on the CPU, as a router would give them.

    Every token has at least one local expert where the layer is spread over ranks: those are the tokens that dispatch sends here.

    Args:
        m: the layer; ranks other than the first are not modelled, so ids below `m.local_experts` are local.
        tokens: T.
        skew: 0 for even routing, larger for hotter low experts (see `core.numerics.random_topk`).
        seed: of the data.
    """
    from moe_ops.core.numerics import random_topk

    ids, weights = random_topk(tokens, m.experts, m.top_k, seed=seed, skew=skew)
    if m.local_experts < m.experts and tokens:
        remote = (ids >= m.local_experts).all(-1)
        g = torch.Generator().manual_seed(seed + 1)
        picked = torch.randint(0, m.local_experts, (tokens,), generator=g, dtype=torch.int32)
        ids[:, 0] = torch.where(remote, picked, ids[:, 0])
    return ids, weights
