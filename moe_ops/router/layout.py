"""The token layout: from expert ids [T, k] to counts, offsets, row order and its inverse, without atomics, in one launch up to 1024 pairs.

    pair p = t * k + j chose expert e        rows of expert e:   offsets[e] .. offsets[e] + counts[e]
    order[row] = p                           inverse[t, j] = row      (both -1 where there is nothing)

Rows are sorted by (local expert, t, j). Each program owns two experts and scans all pairs twice: once to count its experts and all pairs
before them, once to place its pairs by a running sum. So no program waits for another, and the same input gives the same order in every run.
The same kernel brings foreign ids into canonical form (int32, -1 for whatever is not a local expert) in the same launch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_ops.core.formats import ceil_div
from moe_ops.core.launch import launch, runs_kernels
from moe_ops.core.ops import register
from moe_ops.core.pdl import after_previous
from moe_ops.router.layout_chunked import chunked_layout
from moe_ops.router.pairs_kernel import load_pairs, store_canonical, valid_tokens

#: Most pairs (tokens * top_k) of one call: row numbers are int32, and a scan looks up to one block past the end.
MAX_PAIRS = 2**31 - 2**16

#: Pairs up to which one launch does everything. H200, Triton 3.6, 2026-11-30: 2048 pairs take 6.9 us so and 5.9 in chunks, 8192 pairs 11.8 and 5.9.
LARGEST_STEP = 1024

LayoutTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LayoutConfig:
    """Pairs of one scan step, and warps."""

    block_n: int
    num_warps: int


def heuristic(pairs: int) -> LayoutConfig:
    """Two sizes of scan step, so that batch sizes share compiled kernels; the smallest needs no barrier.

    Every program scans every pair, so its time grows with the pairs: above the largest step the chunked form takes over.
    """
    return LayoutConfig(256, 1) if pairs <= 256 else LayoutConfig(LARGEST_STEP, 4)


def valid_rows(num_valid: torch.Tensor | None, rows: int) -> torch.Tensor | int:
    """`num_valid` clamped to [0, rows], still on its device."""
    return rows if num_valid is None else num_valid.reshape(()).clamp(0, rows)


def local_ids_ref(
    ids: torch.Tensor, num_experts: int, num_local: int, first: int, expert_map: torch.Tensor | None, num_valid: torch.Tensor | None
) -> torch.Tensor:
    """Local expert of each pair, int64 [T, k]; -1 for padding, out of range and remote."""
    ids = ids.long()
    real = torch.arange(ids.shape[0], device=ids.device)[:, None] < valid_rows(num_valid, ids.shape[0])
    ok = real & (ids >= 0) & (ids < num_experts)
    safe = torch.where(ok, ids, 0)
    local = safe - first if expert_map is None else expert_map.long()[safe]
    return torch.where(ok & (local >= 0) & (local < num_local), local, -1)


def routing_layout_ref(
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    num_local: int,
    first: int,
    expert_map: torch.Tensor | None,
    num_valid: torch.Tensor | None,
) -> LayoutTensors:
    """Definition of `moe_ops::routing_layout`: a stable sort of the pairs by local expert."""
    local = local_ids_ref(ids, num_experts, num_local, first, expert_map, num_valid)
    out_ids = torch.where(local >= 0, ids.long(), -1).to(torch.int32)
    out_weights = torch.where(local >= 0, weights.float(), 0.0)
    n = local.numel()
    key = torch.where(local >= 0, local, num_local).flatten()
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=ids.device).scatter_add_(0, key, torch.ones_like(key))[:num_local]
    offsets = torch.zeros(num_local + 1, dtype=torch.int64, device=ids.device)
    offsets[1:] = counts.cumsum(0)
    row = torch.arange(n, device=ids.device)
    pair = key.sort(stable=True).indices
    order = torch.where(row < offsets[-1], pair, -1)
    inverse = torch.empty_like(row).scatter_(0, pair, row)
    inverse = torch.where(key < num_local, inverse, -1).view_as(local)
    counts, offsets, order, inverse = (t.to(torch.int32) for t in (counts, offsets, order, inverse))
    return out_ids, out_weights, counts, offsets, order, inverse


@triton.jit(do_not_specialize=["T", "num_experts", "num_local", "first", "stride_it", "stride_ij", "stride_wt", "stride_wj"])
def _routing_layout_kernel(
    ids_ptr,
    weights_ptr,
    num_valid_ptr,
    map_ptr,
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
    TOP_K: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counts, offsets and rows of two experts, and an interleaved share of what belongs to pairs or rows without an expert."""
    after_previous(PDL)
    even = tl.program_id(0) * 2
    odd = even + 1
    lanes = tl.arange(0, BLOCK_N)
    pairs = T * TOP_K
    filled = valid_tokens(num_valid_ptr, T) * TOP_K

    before = tl.zeros([BLOCK_N], tl.int32)
    placed = tl.zeros([BLOCK_N], tl.int32)
    evens = tl.zeros([BLOCK_N], tl.int32)
    odds = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, filled, BLOCK_N):
        pair = start + lanes
        _, local = load_pairs(ids_ptr, map_ptr, pair, filled, num_experts, num_local, first, stride_it, stride_ij, TOP_K, FLAT)  # pyright: ignore[reportGeneralTypeIssues]
        before += ((local >= 0) & (local < even)).to(tl.int32)
        placed += (local >= 0).to(tl.int32)
        evens += (local == even).to(tl.int32)
        odds += (local == odd).to(tl.int32)
    even_row = tl.sum(before, axis=0)
    even_count = tl.sum(evens, axis=0)
    odd_count = tl.sum(odds, axis=0)
    odd_row = even_row + even_count
    total = tl.sum(placed, axis=0)
    tl.store(counts_ptr + even, even_count)
    tl.store(counts_ptr + odd, odd_count, mask=odd < num_local)
    tl.store(offsets_ptr + even, even_row)
    tl.store(offsets_ptr + odd, odd_row)  # with an odd number of experts this is the last entry, which holds the total
    if even == 0:
        tl.store(offsets_ptr + num_local, total)

    for start in range(0, filled, BLOCK_N):
        pair = start + lanes
        _, local = load_pairs(ids_ptr, map_ptr, pair, filled, num_experts, num_local, first, stride_it, stride_ij, TOP_K, FLAT)
        is_odd = local == odd
        hits = tl.where(is_odd, 65536, tl.where(local == even, 1, 0))  # one running sum for both: a step has fewer than 2^16 pairs
        rank = tl.cumsum(hits, axis=0)
        row = tl.where(is_odd, odd_row + (rank >> 16), even_row + (rank & 65535)) - 1
        tl.store(order_ptr + row, pair, mask=hits > 0)
        tl.store(inverse_ptr + pair, row, mask=hits > 0)
        seen = tl.sum(hits, axis=0)
        even_row += seen & 65535
        odd_row += seen >> 16

    for start in range(tl.program_id(0) * BLOCK_N, pairs, tl.num_programs(0) * BLOCK_N):
        pair = start + lanes
        raw, local = load_pairs(ids_ptr, map_ptr, pair, filled, num_experts, num_local, first, stride_it, stride_ij, TOP_K, FLAT)
        inside = pair < pairs
        tl.store(inverse_ptr + pair, tl.full([BLOCK_N], -1, tl.int32), mask=inside & (local < 0))
        tl.store(order_ptr + pair, tl.full([BLOCK_N], -1, tl.int32), mask=inside & (pair >= total))
        store_canonical(weights_ptr, out_ids_ptr, out_weights_ptr, pair, pairs, raw, local, stride_wt, stride_wj, TOP_K, FLAT)


def layout_into(
    ids: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    order: torch.Tensor,
    inverse: torch.Tensor,
    *,
    num_experts: int,
    first: int = 0,
    expert_map: torch.Tensor | None = None,
    num_valid: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
) -> None:
    """Write the token layout of `ids` into given buffers; no checks.

    One launch and no allocation up to 1024 pairs; above, two launches and a table of counts for a chunk of pairs on each SM.

    Args:
        ids: (T, k) int32 or int64, any strides: global expert ids; anything outside [0, num_experts) counts as none.
        counts: (E_local,) int32, written; its size says how many local experts there are.
        offsets: (E_local + 1,) int32, written.
        order: (T * k,) int32, written.
        inverse: (T, k) int32 contiguous, written.
        num_experts: number of global experts.
        first: first global expert of the local window (unused with `expert_map`).
        expert_map: (num_experts,) int32 or int64 contiguous: local expert of each global one, or -1.
        num_valid: int32 or int64 device scalar; rows from there on are not read.
        weights, out_ids, out_weights: all three or none: (T, k) weights of any float dtype and strides, and contiguous int32 / fp32
            buffers for the canonical ids (-1 where no local expert) and weights (0 there).
    """
    if not runs_kernels(ids):
        given = ids if weights is None else weights
        results = routing_layout_ref(ids, given, num_experts, counts.shape[0], first, expert_map, num_valid)
        for out, result in zip((out_ids, out_weights, counts, offsets, order, inverse), results, strict=True):
            if out is not None:
                out.copy_(result.view(out.shape))
        return
    tokens, top_k = ids.shape
    if tokens * top_k > LARGEST_STEP:
        outs = (out_ids, out_weights, counts, offsets, order, inverse)
        chunked_layout(ids, weights, num_valid, expert_map, outs, num_experts, first)
        return
    config = heuristic(tokens * top_k)
    launch(
        "routing_layout",
        _routing_layout_kernel,
        (ceil_div(counts.shape[0], 2),),
        ids,
        weights,
        num_valid,
        expert_map,
        out_ids,
        out_weights,
        counts,
        offsets,
        order,
        inverse,
        tokens,
        num_experts,
        counts.shape[0],
        first,
        *ids.stride(),
        *(ids.stride() if weights is None else weights.stride()),
        TOP_K=top_k,
        FLAT=ids.is_contiguous() and (weights is None or weights.is_contiguous()),
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )


def _routing_layout_triton(
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    num_local: int,
    first: int,
    expert_map: torch.Tensor | None,
    num_valid: torch.Tensor | None,
) -> LayoutTensors:
    outs = empty_layout(ids.shape[0], ids.shape[1], num_local, ids.device)
    out_ids, out_weights, counts, offsets, order, inverse = outs
    layout_into(
        ids,
        counts,
        offsets,
        order,
        inverse,
        num_experts=num_experts,
        first=first,
        expert_map=expert_map,
        num_valid=num_valid,
        weights=weights,
        out_ids=out_ids,
        out_weights=out_weights,
    )
    return outs


def empty_layout(tokens: int, top_k: int, num_local: int, device: torch.device) -> LayoutTensors:
    """Buffers for ids, weights, counts, offsets, order and inverse."""

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return (
        new(tokens, top_k),
        new(tokens, top_k, dtype=torch.float32),
        new(num_local),
        new(num_local + 1),
        new(tokens * top_k),
        new(tokens, top_k),
    )


def _routing_layout_fake(
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    num_local: int,
    first: int,
    expert_map: torch.Tensor | None,
    num_valid: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty_layout(ids.shape[0], ids.shape[1], num_local, ids.device)


routing_layout = register("routing_layout", cuda=_routing_layout_triton, cpu=routing_layout_ref, fake=_routing_layout_fake)
