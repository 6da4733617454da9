"""What is quantized in which model family, and what never is.

One row a family. A module's name is a tensor's name without `.weight`; patterns match it whole. What no row and no pattern of the user
names is quantized where it is a weight [N, K].

| family      | model types                                              | never quantized, beside what holds for all |
|-------------|----------------------------------------------------------|--------------------------------------------|
| qwen_moe    | qwen2_moe, qwen3_moe                                     | gate of the shared expert                  |
| qwen3_5_moe | qwen3_next, qwen3_5_moe(_text)                           | the same, gates of linear attention, vision |
| deepseek    | deepseek_v2, deepseek_v3, deepseek_v32                   | indexer's head weights; kv_b_proj in mxfp8 |
| kimi        | kimi_k2, kimi_k25                                        | as deepseek, vision                        |
| glm4_moe    | glm4_moe, glm4_moe_lite, glm4v_moe, glm_moe_dsa          | as deepseek, vision                        |
| mixtral     | mixtral                                                  |                                            |
| minimax     | minimax, minimax_text_01, minimax_m1, minimax_m2         |                                            |
| gpt_oss     | gpt_oss                                                  | attention, as its publishers do            |

For all: embeddings, the head, routers and their biases, norms, the projection of multi-token prediction (eh_proj), vision and audio towers,
and every tensor that is no matrix. The converter keeps `kv_b_proj` of latent attention in 16 bit when it writes mxfp8: SGLang 0.5.23 absorbs
it into per-tensor FP8 block by block in Python otherwise, and the whole of it is a few parts in a thousand of a model.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stacks:
    """How a family stores stacks of experts on disk: [E, 2I, H] and [E, H, I], or transposed; gate and up apart, or alternating."""

    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: of the row.
        model_types: of config.json.
        never: (pattern of module names, what they are): kept in every format.
        never_mxfp8: the same, in mxfp8 alone.
        stacks: layout of stacked experts.
        leaves: names of (gate, up, down) below one expert, for stacks that are taken apart.
    """

    name: str
    model_types: tuple[str, ...]
    never: tuple[tuple[str, str], ...] = ()
    never_mxfp8: tuple[tuple[str, str], ...] = ()
    stacks: Stacks = Stacks()
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def why_kept(self, module: str, fmt: str) -> str | None:
        """What a module is that is never quantized, or None."""
        return _first(self.never + (self.never_mxfp8 if fmt == "mxfp8" else ()) + ALWAYS, module)


#: (pattern, what it is), in every family and in unknown ones.
ALWAYS = (
    (r"(.*\.)?lm_head", "output head"),
    (r"(.*\.)?(embed_tokens|tok_embeddings|wte|(word|position|token_type)_embeddings)(_per_layer)?", "embedding"),
    (r"(.*\.)?(gate|router|routers?\.layer|gate\.wg)", "router"),
    (r"(.*\.)?shared_expert_gate", "gate of the shared expert"),
    (r"(.*\.)?(eh_proj|mtp\.fc)", "projection of multi-token prediction"),
    (r"(.*\.)?shared_head\.head", "head of multi-token prediction"),
    (r"(.*[._])?(layer)?norm\d*", "norm"),
    (r"(.*\.)?(visual|vision_(tower|model)|mm_projector|multi_modal_projector|audio_tower)(\..*)?", "vision or audio tower"),
    (r"(.*\.)?conv1d", "convolution"),
)
_LATENT = ((r".*\.self_attn\.kv_b_proj", "latent attention's kv_b_proj, which servers absorb"),)
_INDEXER = ((r".*\.indexer\.weights_proj", "head weights of the sparse attention's indexer"),)

FAMILIES: tuple[Family, ...] = (
    Family("qwen_moe", ("qwen2_moe", "qwen3_moe")),
    Family(
        "qwen3_5_moe",
        ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
        never=((r".*\.linear_attn\.in_proj_(a|b|ba)", "gates of linear attention"),),
    ),
    Family("deepseek", ("deepseek_v2", "deepseek_v3", "deepseek_v32"), never=_INDEXER, never_mxfp8=_LATENT),
    Family("kimi", ("kimi_k2", "kimi_k25"), never=_INDEXER, never_mxfp8=_LATENT),
    Family("glm4_moe", ("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "glm_moe_dsa"), never=_INDEXER, never_mxfp8=_LATENT),
    Family("mixtral", ("mixtral",), leaves=("w1", "w3", "w2")),
    Family("minimax", ("minimax", "minimax_text_01", "minimax_m1", "minimax_m2"), leaves=("w1", "w3", "w2")),
    Family("gpt_oss", ("gpt_oss",), never=((r".*\.self_attn\.\w+", "attention"),), stacks=Stacks(transposed=True, interleaved=True)),
)
#: Rules for a model type without a row.
UNKNOWN = Family("unknown", ())

_BY_TYPE = {t: f for f in FAMILIES for t in f.model_types}


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The row of a model's config (of its text model, where it has several), or None."""
    for part in (config, *(c for c in (config.get("text_config"), config.get("llm_config")) if isinstance(c, Mapping))):
        found = _BY_TYPE.get(str(part.get("model_type", "")).lower())
        if found is not None:
            return found
    return None


def known_types() -> str:
    """All model types of the table, for errors."""
    return ", ".join(sorted(_BY_TYPE))


def _first(rows: Iterable[tuple[str, str]], module: str) -> str | None:
    return next((what for pattern, what in rows if re.fullmatch(pattern, module)), None)


class Patterns:
    """The user's patterns, and which of them ever matched.

    A pattern is `re:REGEX`, which must match a module's name from end to end, or a name, which covers the module and all below it.

    Raises:
        ValueError: a regular expression that does not compile.
    """

    def __init__(self, what: str, patterns: Iterable[str]) -> None:
        self.what = what
        self.unused: dict[str, re.Pattern[str]] = {}
        self.patterns: list[tuple[str, re.Pattern[str]]] = []
        for p in patterns:
            try:
                compiled = re.compile(p[3:] if p.startswith("re:") else rf"{re.escape(p)}(\..*)?")
            except re.error as error:
                raise ValueError(f"convert: --{what} {p!r} is no regular expression: {error}") from None
            self.patterns.append((p, compiled))
            self.unused[p] = compiled

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def match(self, module: str) -> str | None:
        """The first pattern that matches, or None; all that match count as used."""
        hits = [p for p, compiled in self.patterns if compiled.fullmatch(module)]
        for p in hits:
            self.unused.pop(p, None)
        return hits[0] if hits else None

    def check_used(self) -> None:
        """Refuse a pattern that matched nothing: it is a typing error, and a silent one would change what is quantized.

        Raises:
            ValueError: with the patterns.
        """
        if self.unused:
            text = ", ".join(map(repr, self.unused))
            raise ValueError(f"convert: --{self.what} {text} matches no weight; patterns match a module's whole name, without '.weight'")
