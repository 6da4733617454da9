"""Small random models of four families, and greedy decoding with a static cache: what the demo and the tests run.

The sizes keep the real models' divisibility: gpt-oss has H = I = 320, where 320 % 128 = 2880 % 128 = 64; the others divide by 128.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from moe_ops.hf.experts import experts_modules

VOCAB = 512
_COMMON = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 512, "pad_token_id": 0}
#: family -> (config class, sizes); H, I and the expert counts keep what divides the real ones.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 256,
            "moe_intermediate_size": 384,
            "intermediate_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "hidden_size": 256,
            "moe_intermediate_size": 128,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 32,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 64,
            "q_lora_rank": 96,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "hidden_size": 320,
            "intermediate_size": 320,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
}


def build(family: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> Any:
    """A small random model of a family, the same for the same seed; experts implementation "eager".

    Embedding and router are wider than the rest, so that the residual stream carries the token and the router decides clearly, and each
    token's row of the head leans to one predecessor: otherwise the logits and tokens of a random model show which near-tie flipped.

    Args:
        family: a key of `FAMILIES`.
        seed: of the weights, which are drawn on the CPU.
        dtype: of the model.
        device: where it goes.
    """
    import transformers

    name, sizes = FAMILIES[family]
    config = getattr(transformers, name)(**_COMMON, **sizes)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # each from_config prints the generation config
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        transformers.logging.set_verbosity(verbosity)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in [*model.named_parameters(), *model.named_buffers()]:
            correction = key.endswith("e_score_correction_bias")
            if "norm" in key or not (isinstance(p, torch.nn.Parameter) or correction):
                continue
            router = key.endswith(("gate.weight", "router.weight"))
            std = 0.4 if router else 0.5 if "embed" in key else 0.1 if correction else 0.05
            p.copy_(torch.randn(p.shape, generator=g) * std)
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        head.add_(embedding[torch.randperm(VOCAB, generator=g)], alpha=0.06)
    model.set_experts_implementation("eager")
    return model.requires_grad_(False).eval().to(device)


def experts_bytes(model: Any) -> int:
    """Bytes of the routed experts: data, scales and biases."""
    return sum(p.numel() * p.element_size() for _, m in experts_modules(model) for p in m.parameters(recurse=False))


@torch.no_grad()
def greedy(model: Any, ids: torch.Tensor, steps: int, *, graph: bool = False) -> tuple[torch.Tensor, float, float]:
    """Greedy decoding with a static cache; (tokens (B, steps), seconds of the prefill, seconds of one decode step).

    Args:
        model: a causal language model of Transformers.
        ids: (B, T) prompt, without padding.
        steps: tokens to decode, at least 3.
        graph: capture one decode step in a CUDA graph and replay it.

    Raises:
        ValueError: prompt and steps do not fit into the model's sliding window.
    """
    from transformers import StaticCache

    batch, prompt = ids.shape
    length = prompt + steps
    if length > (getattr(model.config, "sliding_window", None) or length):
        raise ValueError(f"greedy: prompt and steps must fit into the sliding window of {model.config.sliding_window}, got {prompt} + {steps}")
    cache = StaticCache(config=model.config, max_cache_len=length)
    slots = torch.arange(length, device=ids.device)
    position = torch.full((batch, 1), prompt, dtype=torch.int64, device=ids.device)
    start = now(ids.device)
    token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    prefill = now(ids.device) - start
    out = [token.clone()]

    def step() -> None:
        # our own mask, from the position on the device: Transformers' reads a length that Python counts, which a replay does not advance
        mask: Any = (slots > position)[:, None, None].to(model.dtype) * torch.finfo(model.dtype).min
        if hasattr(model.config, "layer_types"):
            mask = dict.fromkeys(model.config.layer_types, mask)
        logits = model(token, attention_mask=mask, past_key_values=cache, position_ids=position, use_cache=True).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        position.add_(1)

    replay: Callable[[], None] = step
    step()
    out.append(token.clone())
    if graph:
        captured = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(captured):  # records the step; it runs when replayed
            step()
        replay = captured.replay
    start = now(ids.device)
    for _ in range(steps - 2):
        replay()
        out.append(token.clone())
    return torch.cat(out, dim=1), prefill, (now(ids.device) - start) / (steps - 2)


def now(device: torch.device) -> float:
    """Seconds, after everything launched on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
