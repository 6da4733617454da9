"""A small DeepSeek-V3 whose linear layers are `Linear` and whose latent attention is absorbed over `bmm`: prefill and decode against bf16."""

import pytest
import torch
from torch import nn

from moe_ops import Linear, bmm
from moe_ops.core.numerics import relative_error
from moe_ops.layer.mla import absorbed_kv_b

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek  # noqa: E402

from moe_ops.hf.small import build  # noqa: E402


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
        self.k_b, self.v_b = absorbed_kv_b(old.kv_b_proj.weight.detach(), self.nope, self.v, format=fmt)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
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
        if past_key_values is not None:
            latent, k_rot = past_key_values.update(latent, k_rot, self.layer_idx)
        latent, k_rot = latent[0, 0].float(), k_rot[0, 0].float()
        scores = torch.einsum("thr,sr->hts", bmm(q[..., : self.nope], self.k_b, out_dtype=torch.float32), latent)
        scores = (scores + q_rot[0].float() @ k_rot.T) * self.scaling
        past = latent.shape[0]
        future = torch.arange(past, device=scores.device) > torch.arange(past - t, past, device=scores.device)[:, None]
        p = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed = torch.einsum("hts,sr->thr", p, latent).to(hidden_states.dtype)
        return self.o(bmm(mixed, self.v_b).reshape(1, t, self.heads * self.v)), None


def converted(model, fmt):
    """`model` with its attention absorbed and every other linear layer but the head a `Linear`."""
    for layer in model.model.layers:
        layer.self_attn = AbsorbedAttention(layer.self_attn, fmt)
        for module in list(layer.mlp.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Linear.from_weight(child.weight.detach(), child.bias, format=fmt))
    return model


@pytest.mark.parametrize("fmt,bound", [(None, 0.02), ("fp8_block", 0.1), ("mxfp8", 0.1)])
@torch.no_grad()
def test_prefill_and_decode_of_a_small_deepseek(device, fmt, bound):
    reference, model = build("deepseek-v3", device=device), converted(build("deepseek-v3", device=device), fmt)
    linears = sum(isinstance(m, Linear) for m in model.modules())
    left = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert linears >= 2 * 4 + 3 and left == ["lm_head"]
    ids = torch.randint(1, 500, (1, 24), generator=torch.Generator().manual_seed(5)).to(device)
    wanted, got = (m(ids, use_cache=True) for m in (reference, model))
    errors = [relative_error(got.logits, wanted.logits)]
    for token in ids[0, :3]:  # decode over the caches that the prefill left
        wanted, got = (m(token.view(1, 1), past_key_values=o.past_key_values, use_cache=True) for m, o in ((reference, wanted), (model, got)))
        errors.append(relative_error(got.logits, wanted.logits))
    assert max(errors) < bound, errors
