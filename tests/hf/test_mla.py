"""A small DeepSeek-V3 whose linear layers are `Linear`, whose latent attention is absorbed over `bmm` and whose experts are ours: prefill and decode
against bf16."""

import pytest
import torch
from torch import nn

from moe_ops import Linear, bmm, quantize_weight
from moe_ops.core.numerics import relative_error
from moe_ops.layer.mla import absorbed_kv_b

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek  # noqa: E402

from moe_ops.hf import quantize_model_, register, small  # noqa: E402

#: DeepSeek-V3's own head sizes, where scale blocks of kv_b_proj fall on heads and q_a_proj ends on a block, so that kv_a_proj can follow it
REAL_HEADS = {"kv_lora_rank": 256, "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


class AbsorbedAttention(nn.Module):
    """DeepSeek's attention over the cached latents, never expanded to keys and values; one sequence, no padding."""

    def __init__(self, old, fmt):
        super().__init__()
        self.layer_idx, self.scaling, self.rank = old.layer_idx, old.scaling, old.kv_lora_rank
        self.nope, self.rope, self.v = old.qk_nope_head_dim, old.qk_rope_head_dim, old.v_head_dim
        self.heads, self.interleaved = old.num_heads, old.config.rope_interleave
        parts = [Linear.from_weight(p.weight.detach(), format=fmt) for p in (old.q_a_proj, old.kv_a_proj_with_mqa)]
        joins = fmt != "fp8_block" or parts[0].weight.shape[0] % 128 == 0
        self.q_a, self.kv_a = parts
        self.both = Linear.cat(parts) if joins else None
        self.q_a_layernorm, self.kv_a_layernorm = old.q_a_layernorm, old.kv_a_layernorm
        self.q_b = Linear.from_weight(old.q_b_proj.weight.detach(), format=fmt)
        self.o = Linear.from_weight(old.o_proj.weight.detach(), format=fmt)
        kv_b = old.kv_b_proj.weight.detach()
        self.k_b, self.v_b = absorbed_kv_b(kv_b if fmt is None else quantize_weight(kv_b, fmt), self.nope, self.v)  # as a checkpoint stores it

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, cache=None, **kwargs):
        batch, t, _ = hidden_states.shape
        assert batch == 1
        if self.both is None:
            q_a, kv_a = self.q_a(hidden_states), self.kv_a(hidden_states)
        else:
            q_a, kv_a = self.both(hidden_states).split([self.q_a.weight.shape[0], self.kv_a.weight.shape[0]], -1)
        q = self.q_b(self.q_a_layernorm(q_a)).view(t, self.heads, self.nope + self.rope)
        latent, k_rot = kv_a.split([self.rank, self.rope], -1)
        latent, k_rot = self.kv_a_layernorm(latent).view(1, 1, t, self.rank), k_rot.view(1, 1, t, self.rope)
        rotate = deepseek.apply_rotary_pos_emb_interleave if self.interleaved else deepseek.apply_rotary_pos_emb
        q_rot, k_rot = rotate(q[None, ..., self.nope :].transpose(1, 2), k_rot, *position_embeddings)
        cache = past_key_values if cache is None else cache  # Transformers 5.24 renamed the argument
        if cache is not None:
            latent, k_rot = cache.update(latent, k_rot, self.layer_idx)
        latent, k_rot = latent[0, 0].float(), k_rot[0, 0].float()
        scores = torch.einsum("thr,sr->hts", bmm(q[..., : self.nope], self.k_b, out_dtype=torch.float32), latent)
        scores = (scores + q_rot[0].float() @ k_rot.T) * self.scaling
        past = latent.shape[0]
        future = torch.arange(past, device=scores.device) > torch.arange(past - t, past, device=scores.device)[:, None]
        p = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed = torch.einsum("hts,sr->thr", p, latent).to(hidden_states.dtype)
        return self.o(bmm(mixed, self.v_b).reshape(1, t, self.heads * self.v)), None


def converted(model, fmt):
    """`model` with its attention absorbed, its experts ours and every linear layer a `Linear`; the head stays in 16 bits, as in the checkpoints."""
    if fmt is None:
        register()
        model.set_experts_implementation("moe_ops")
    else:
        quantize_model_(model, fmt)
    for layer in model.model.layers:
        layer.self_attn = AbsorbedAttention(layer.self_attn, fmt)
        for module in list(layer.mlp.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Linear.from_weight(child.weight.detach(), child.bias, format=fmt))
    model.lm_head = Linear.from_weight(model.lm_head.weight.detach())
    return model


@pytest.mark.parametrize("heads", ["small heads", "real heads"])
@pytest.mark.parametrize("fmt,bound", [(None, 0.01), ("fp8_block", 0.08), ("mxfp8", 0.08)])
@torch.no_grad()
def test_prefill_and_decode_of_a_small_deepseek(device, monkeypatch, heads, fmt, bound):
    """Logits within 1% of bf16 in 16 bits, within 8% with all operands in 8 bits (7.2% at most on a CPU).

    The router decides for both by the logits of the reference: a near-tie that falls otherwise would be most of the error.
    """
    name, sizes = small.FAMILIES["deepseek-v3"]
    monkeypatch.setitem(small.FAMILIES, "deepseek-v3", (name, sizes | (REAL_HEADS if heads == "real heads" else {})))
    reference, model = (small.build("deepseek-v3", device=device) for _ in range(2))
    routed: list[torch.Tensor] = []
    reference.model.layers[1].mlp.gate.register_forward_hook(lambda module, args, out: routed.append(out))
    model = converted(model, fmt)
    model.model.layers[1].mlp.gate.register_forward_hook(lambda module, args, out: routed.pop(0))
    assert not [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    attention = model.model.layers[0].self_attn
    assert (attention.both is None) == (heads == "small heads" and fmt == "fp8_block")
    ran = set()
    for n, m in model.named_modules():
        if isinstance(m, Linear):
            m.register_forward_hook(lambda module, args, out, n=n: ran.add(n))
    ids = torch.randint(1, 500, (1, 24), generator=torch.Generator().manual_seed(5)).to(device)
    wanted, got = (m(ids, use_cache=True) for m in (reference, model))
    errors = [relative_error(got.logits, wanted.logits)]
    for token in ids[0, :3]:  # decode over the caches that the prefill left
        wanted, got = (m(token.view(1, 1), past_key_values=o.past_key_values, use_cache=True) for m, o in ((reference, wanted), (model, got)))
        errors.append(relative_error(got.logits, wanted.logits))
    assert max(errors) < bound, errors
    assert not routed and (got.logits.argmax(-1) == wanted.logits.argmax(-1)).all()
    joined = ("both",) if attention.both is not None else ("q_a", "kv_a")
    attended = {f"model.layers.{i}.self_attn.{part}" for i in (0, 1) for part in (*joined, "q_b", "o")}
    dense = {f"model.layers.{mlp}.{part}_proj" for mlp in ("0.mlp", "1.mlp.shared_experts") for part in ("gate", "up", "down")}
    assert ran == attended | dense | {"lm_head"}
