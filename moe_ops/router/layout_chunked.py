"""The token layout of many pairs, in two launches whose work grows with the pairs alone: counts of each chunk, then placing.

The single launch of moe_ops/router/layout.py scans all pairs for every two experts. Here each program owns a chunk of pairs instead: the first
kernel counts the chunk's pairs of each expert, the second adds up the counts of the chunks before its own, which gives the row where each
expert goes on, and sorts its pairs by expert, a step at a time. No atomics, and no program waits for another.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.core.arch import arch_of
from moe_ops.core.formats import ceil_div
from moe_ops.core.launch import launch
from moe_ops.core.pdl import after_previous
from moe_ops.router.pairs_kernel import load_pairs, sort_rising, store_canonical, valid_tokens

#: Pairs that are sorted at once.
STEP = 256


@triton.jit(do_not_specialize=["T", "num_experts", "num_local", "first", "stride_it", "stride_ij", "steps"])
def _chunk_counts_kernel(
    ids_ptr,
    num_valid_ptr,
    map_ptr,
    chunk_counts_ptr,
    T,
    num_experts,
    num_local,
    first,
    stride_it,
    stride_ij,
    steps,
    TOP_K: tl.constexpr,
    FLAT: tl.constexpr,
    E_PADDED: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pairs of each local expert among the steps * STEP pairs of one chunk."""
    after_previous(PDL)
    filled = valid_tokens(num_valid_ptr, T) * TOP_K
    counts = tl.zeros([E_PADDED], tl.int32)
    begin = tl.program_id(0) * steps * STEP
    for start in range(begin, tl.minimum(begin + steps * STEP, filled), STEP):
        pair = start + tl.arange(0, STEP)
        _, local = load_pairs(ids_ptr, map_ptr, pair, filled, num_experts, num_local, first, stride_it, stride_ij, TOP_K, FLAT)
        counts += tl.histogram(tl.maximum(local, 0), E_PADDED, mask=local >= 0)
    tl.store(chunk_counts_ptr + tl.program_id(0) * E_PADDED + tl.arange(0, E_PADDED), counts)


@triton.jit(do_not_specialize=["T", "num_experts", "num_local", "first", "stride_it", "stride_ij", "stride_wt", "stride_wj", "steps"])
def _chunk_place_kernel(
    ids_ptr,
    weights_ptr,
    num_valid_ptr,
    map_ptr,
    chunk_counts_ptr,
    out_ids_ptr,
    out_weights_ptr,
    counts_ptr,
    offsets_ptr,
    order_ptr,
    inverse_ptr,
    T,
    num_experts,
    num_local,
    first,
    stride_it,
    stride_ij,
    stride_wt,
    stride_wj,
    steps,
    TOP_K: tl.constexpr,
    FLAT: tl.constexpr,
    E_PADDED: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of one chunk's pairs; the first program also writes counts and offsets."""
    after_previous(PDL)
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    expert = tl.arange(0, E_PADDED)
    all_counts = tl.zeros([BLOCK_C, E_PADDED], tl.int32)
    earlier_counts = tl.zeros([BLOCK_C, E_PADDED], tl.int32)
    for start in range(0, chunks, BLOCK_C):
        other = start + tl.arange(0, BLOCK_C)
        part = tl.load(chunk_counts_ptr + other[:, None] * E_PADDED + expert[None, :], mask=(other < chunks)[:, None], other=0)
        all_counts += part
        earlier_counts += tl.where((other < chunk)[:, None], part, 0)
    count = tl.sum(all_counts, axis=0)
    end = tl.cumsum(count, axis=0)
    total = tl.sum(count, axis=0)
    if chunk == 0:
        tl.store(counts_ptr + expert, count, mask=expert < num_local)
        tl.store(offsets_ptr + expert, end - count, mask=expert < num_local)
        tl.store(offsets_ptr + num_local, total)

    next_row = end - count + tl.sum(earlier_counts, axis=0)
    lanes = tl.arange(0, STEP)
    pairs = T * TOP_K
    filled = valid_tokens(num_valid_ptr, T) * TOP_K
    begin = chunk * steps * STEP
    for start in range(begin, tl.minimum(begin + steps * STEP, pairs), STEP):
        pair = start + lanes
        raw, local = load_pairs(ids_ptr, map_ptr, pair, filled, num_experts, num_local, first, stride_it, stride_ij, TOP_K, FLAT)
        here = tl.histogram(tl.maximum(local, 0), E_PADDED, mask=local >= 0)
        # Sorted by (expert, pair), an expert's pairs lie side by side: their rows are their places, shifted by one number for each expert.
        key = sort_rising(tl.where(local >= 0, local, E_PADDED) * STEP + lanes, STEP)
        owner = key // STEP
        shift = next_row - (tl.cumsum(here, axis=0) - here)
        row = lanes + tl.gather(shift, tl.minimum(owner, E_PADDED - 1), axis=0)
        tl.store(order_ptr + row, start + key % STEP, mask=owner < E_PADDED)
        tl.store(inverse_ptr + start + key % STEP, row, mask=owner < E_PADDED)
        next_row += here

        tl.store(inverse_ptr + pair, tl.full([STEP], -1, tl.int32), mask=(pair < pairs) & (local < 0))
        tl.store(order_ptr + pair, tl.full([STEP], -1, tl.int32), mask=(pair < pairs) & (pair >= total))
        store_canonical(weights_ptr, out_ids_ptr, out_weights_ptr, pair, pairs, raw, local, stride_wt, stride_wj, TOP_K, FLAT)


def chunked_layout(
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    num_valid: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    outs: tuple[torch.Tensor | None, ...],
    num_experts: int,
    first: int,
) -> None:
    """Write the token layout of `ids` into `outs` (ids, weights, counts, offsets, order, inverse); arguments as for `layout_into`.

    Allocates a table of one row of counts for each chunk.
    """
    tokens, top_k = ids.shape
    out_ids, out_weights, counts, offsets, order, inverse = outs
    assert counts is not None
    num_local = counts.shape[0]
    padded = max(64, 1 << (num_local - 1).bit_length())
    steps = ceil_div(ceil_div(tokens * top_k, STEP), arch_of(ids.device).sms)
    chunks = ceil_div(tokens * top_k, steps * STEP)
    table = torch.empty((chunks, padded), dtype=torch.int32, device=ids.device)
    flat = ids.is_contiguous() and (weights is None or weights.is_contiguous())
    common: dict[str, Any] = {"TOP_K": top_k, "FLAT": flat, "E_PADDED": padded, "STEP": STEP}
    sizes = (tokens, num_experts, num_local, first, *ids.stride())
    launch(
        "routing_layout",
        _chunk_counts_kernel,
        (chunks,),
        ids,
        num_valid,
        expert_map,
        table,
        *sizes,
        steps,
        **common,
        num_warps=4,
        enable_fp_fusion=False,
    )
    launch(
        "routing_layout",
        _chunk_place_kernel,
        (chunks,),
        ids,
        weights,
        num_valid,
        expert_map,
        table,
        out_ids,
        out_weights,
        counts,
        offsets,
        order,
        inverse,
        *sizes,
        *(ids.stride() if weights is None else weights.stride()),
        steps,
        **common,
        BLOCK_C=max(1, (8192 if padded <= 1024 else 4096) // padded),
        num_warps=4,
        enable_fp_fusion=False,
    )
