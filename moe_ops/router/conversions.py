"""The token layout in the words of other libraries, and back. Nothing is read on the host; buffers are sized by what can happen at most.

| form                        | library                       | tensors                                                                  |
|-----------------------------|-------------------------------|--------------------------------------------------------------------------|
| offs                        | torch grouped GEMMs           | int32 [E], end of each expert's rows                                     |
| m_indices                   | DeepGEMM contiguous           | int32 [P], expert of each row, -1 padding; experts start at 128s         |
| psum                        | DeepGEMM contiguous, psum     | int32 [E], end of each expert's filled rows; experts start at 128s       |
| masked_m                    | DeepGEMM masked, DeepEP       | int32 [E], filled rows of each expert in [E, capacity, .]                |
| m_indptr                    | FlashInfer                    | int32 [E + 1], starts, each a multiple of 4, padding counted as rows     |
| sorted ids                  | vLLM, SGLang                  | int32 [P] pair (T*k = padding), int32 [P / block] expert, int32 [1] rows |

`from_*` reads rows that already lie in such a form: each row becomes a token with one expert and weight 1, so that row-wise ops and grouped
GEMMs work on them; vLLM's sorted ids name the pairs and so give the whole routing back.
"""

from dataclasses import dataclass

import torch

from moe_ops.core import checks
from moe_ops.router.padding import PaddedRouting, spread
from moe_ops.router.routing import Routing


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """What each local expert has to compute. `rows[e]` gives views (token_ids, weights, count) of one expert.

    Attributes:
        token_ids (E_local, capacity), int32: token of each of the expert's rows in rising (t, j) order, then -1.
        weights (E_local, capacity), fp32: its routing weight, then 0.
        counts (E_local,), int32: filled rows, clamped to the capacity.
        padded: the masked routing behind it, for `permute` and `combine`.
    """

    token_ids: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    padded: PaddedRouting

    def __len__(self) -> int:
        return self.counts.shape[0]

    def __getitem__(self, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.token_ids[expert], self.weights[expert], self.counts[expert]


def per_expert(routing: Routing, capacity: int | None = None) -> ExpertRows:
    """Each expert's token ids, weights and count; see `Routing.per_expert`."""
    padded = spread("per_expert", routing, None, max(1, routing.num_tokens) if capacity is None else capacity)
    shape = (routing.num_local_experts, -1)
    tokens = torch.div(padded.order, routing.top_k, rounding_mode="floor")
    return ExpertRows(tokens.view(shape), padded.row_weights.view(shape), padded.counts, padded)


def to_sorted_block(routing: Routing, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The form of vLLM's moe_align_block_size; see `Routing.to_sorted_block`."""
    padded = spread("to_sorted_block", routing, block, None)
    pairs = routing.order.shape[0]
    sorted_ids = torch.where(padded.order < 0, pairs, padded.order)
    return sorted_ids, padded.experts[::block].contiguous(), padded.offsets[-1:]


def to_psum(routing: Routing, block: int) -> torch.Tensor:
    """End of each expert's filled rows; see `Routing.to_psum`."""
    padded = spread("to_psum", routing, block, None)
    return padded.offsets[:-1] + padded.counts


def _from_rows(experts: torch.Tensor, num_experts: int) -> Routing:
    """A routing of rows that each belong to one expert, or to none (-1)."""
    weights = torch.ones((experts.shape[0], 1), dtype=torch.float32, device=experts.device)
    return Routing.from_topk(experts.view(-1, 1), weights, num_experts)


def _one_per_expert(op: str, name: str, t: torch.Tensor) -> None:
    checks.is_tensor(op, name, t)
    checks.dtype(op, name, t, (torch.int32, torch.int64))
    checks.ndim(op, name, t, (1,))


def from_offs(offs: torch.Tensor, rows: int) -> Routing:
    """Routing of `rows` rows sorted by expert, from the end of each expert's rows (torch's `offs`).

    Args:
        offs (E,), int32 or int64: ends, not falling; rows from offs[E-1] on belong to no expert.
        rows: rows of the buffer.

    Returns:
        A routing with T = rows and k = 1: row r is token r, weight 1.

    Raises:
        TypeError, ValueError: another dtype or shape.
    """
    op = "from_offs"
    _one_per_expert(op, "offs", offs)
    checks.int_range(op, "rows", rows, 0, 2**31 - 2**16)
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype)
    return _from_rows(torch.searchsorted(offs.contiguous(), row, right=True, out_int32=True), offs.shape[0])


def from_m_indptr(m_indptr: torch.Tensor, rows: int) -> Routing:
    """Routing of `rows` rows from FlashInfer's m_indptr (E + 1,); like `from_offs(m_indptr[1:], rows)`, padding rows count as rows."""
    _one_per_expert("from_m_indptr", "m_indptr", m_indptr)
    return from_offs(m_indptr[1:], rows)


def from_m_indices(m_indices: torch.Tensor, num_experts: int) -> Routing:
    """Routing of rows from DeepGEMM's m_indices (P,), int32 or int64: expert of each row, -1 for padding.

    Returns:
        A routing with T = P and k = 1. Padding rows get no place, so packed row numbers skip them: `inverse` leads from one to the other.
    """
    _one_per_expert("from_m_indices", "m_indices", m_indices)
    return _from_rows(m_indices, num_experts)


def from_psum(psum: torch.Tensor, rows: int, block: int = 128) -> Routing:
    """Routing of `rows` rows from DeepGEMM's psum (E,): ends of the filled rows of experts that start at multiples of `block`."""
    op = "from_psum"
    _one_per_expert(op, "psum", psum)
    checks.int_range(op, "rows", rows, 0, 2**31 - 2**16)
    checks.int_range(op, "block", block, 1, 65536)
    row = torch.arange(rows, device=psum.device, dtype=psum.dtype)
    expert = torch.searchsorted(psum.contiguous(), row, right=True)
    begin = torch.nn.functional.pad((psum + block - 1) // block * block, (1, 0))
    return _from_rows(torch.where(row >= begin[expert], expert, -1), psum.shape[0])


def from_masked_m(masked_m: torch.Tensor, capacity: int) -> Routing:
    """Routing of the rows of a masked buffer [E, capacity, .], seen as [E * capacity, .], from the filled rows of each expert (E,)."""
    op = "from_masked_m"
    _one_per_expert(op, "masked_m", masked_m)
    checks.int_range(op, "capacity", capacity, 1, 2**31 - 2**16)
    expert = torch.arange(masked_m.shape[0], device=masked_m.device, dtype=torch.int32)[:, None]
    rank = torch.arange(capacity, device=masked_m.device, dtype=torch.int32)[None, :]
    return _from_rows(torch.where(rank < masked_m[:, None], expert, -1).view(-1), masked_m.shape[0])


def from_sorted_block(
    sorted_ids: torch.Tensor, expert_ids: torch.Tensor, num_tokens_post_pad: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> Routing:
    """The routing behind vLLM's block-padded sorted ids.

    Args:
        sorted_ids (P,), int32: pair t*k+j of each row; anything outside [0, T*k) is padding.
        expert_ids (P / block,), int32: local expert of each block, or -1.
        num_tokens_post_pad (1,), int32: rows in use.
        weights (T, k), fp32, bf16 or fp16: routing weights.
        num_experts: number of local experts.

    Raises:
        TypeError, ValueError: another dtype or shape.
    """
    op = "from_sorted_block"
    _one_per_expert(op, "sorted_ids", sorted_ids)
    _one_per_expert(op, "expert_ids", expert_ids)
    checks.device_counts(op, "num_tokens_post_pad", num_tokens_post_pad, 1)
    checks.is_tensor(op, "weights", weights)
    checks.ndim(op, "weights", weights, (2,))
    blocks, rows = expert_ids.shape[0], sorted_ids.shape[0]
    if blocks == 0 or rows % blocks:
        if rows or blocks:
            raise ValueError(f"{op}: sorted_ids must hold a whole number of rows for each of the {blocks} blocks, got {rows}")
    pairs = weights.numel()
    row = torch.arange(rows, device=sorted_ids.device)
    used = (sorted_ids >= 0) & (sorted_ids < pairs) & (row < num_tokens_post_pad.reshape(()))
    expert = expert_ids[row // max(1, rows // max(1, blocks))] if rows else expert_ids
    ids = torch.full((pairs + 1,), -1, dtype=expert_ids.dtype, device=sorted_ids.device)
    ids.scatter_(0, torch.where(used, sorted_ids, pairs).long(), torch.where(used, expert, -1))
    return Routing.from_topk(ids[:pairs].view(weights.shape), weights, num_experts)
