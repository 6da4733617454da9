"""Padded forms of the token layout: each expert's rows start at a multiple of a block, or at expert * capacity (the masked form).

    packed  | e0 e0 e0 | e2 e2 | ..                    offsets 0 3 3 5
    block 4 | e0 e0 e0 -- | e2 e2 -- -- | ..           offsets 0 4 4 8
    masked, capacity 4 | e0 e0 e0 -- | -- -- -- -- | e2 e2 -- -- |

Every form of another library is a view of these (moe_ops/router/conversions.py). Buffers are sized by what can happen at most; how much is
filled lives on the device.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.core import checks
from moe_ops.core.formats import ceil_div
from moe_ops.core.launch import launch
from moe_ops.core.ops import register
from moe_ops.router.layout import MAX_PAIRS
from moe_ops.router.routing import Routing, check_routing, check_tensors, well_formed

PaddedTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class PaddedRouting:
    """A `Routing` whose rows are spread out: experts start at multiples of a block, or each has room for `capacity` rows.

    Attributes:
        order (P,), int32: pair t*k+j of each row; -1 in padding and past the end.
        experts (P,), int32: local expert of each row that holds a pair, else -1 (DeepGEMM's m_indices).
        row_weights (P,), fp32: routing weight of each row, 0 in padding.
        counts (E_local,), int32: filled rows of each expert (clamped to the capacity in the masked form; DeepGEMM's masked_m).
        offsets (E_local + 1,), int32: first row of each expert; the last entry is the end of the last expert, padding included.
        inverse (T, k), int32: row of each pair, or -1 (no expert here, or above the capacity).
        weights (T, k), fp32: those of the routing.
        packed: the routing this was made from.
        block: rows that an expert's start is a multiple of (block form), or None.
        capacity: rows of each expert (masked form), or None.
    """

    order: torch.Tensor
    experts: torch.Tensor
    row_weights: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    inverse: torch.Tensor
    weights: torch.Tensor
    packed: Routing
    block: int | None
    capacity: int | None

    @property
    def num_rows(self) -> int:
        """Rows P that the form has room for."""
        return self.order.shape[0]


def padded_rows(pairs: int, num_local: int, block: int, masked: bool) -> int:
    """Rows that the form needs at most: all experts full (masked), or as many experts as possible with one row over."""
    if masked:
        return num_local * block
    touched: Any = torch.sym_min(num_local, pairs)  # min() would specialise a traced graph
    return (pairs + touched * (block - 1)) // block * block


def routing_pad_ref(
    order: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, block: int, masked: bool
) -> PaddedTensors:
    """Definition of `moe_ops::routing_pad`."""
    num_local, pairs = counts.shape[0], order.shape[0]
    rows = padded_rows(pairs, num_local, block, masked)
    new_counts = counts.long().clamp(max=block) if masked else counts.long()
    new_offsets = torch.zeros(num_local + 1, dtype=torch.int64, device=order.device)
    new_offsets[1:] = (torch.full_like(new_counts, block) if masked else (new_counts + block - 1) // block * block).cumsum(0)
    row = torch.arange(rows, device=order.device)
    expert = torch.searchsorted(new_offsets[1:], row, right=True).clamp(max=num_local - 1)
    rank = row - new_offsets[expert]
    filled = rank < new_counts[expert]
    pair = torch.full_like(row, -1)
    row_weights = torch.zeros(rows, dtype=torch.float32, device=order.device)
    new_inverse = torch.full((pairs + 1,), -1, dtype=torch.int64, device=order.device)
    if pairs:
        source = offsets.long()[expert] + rank
        filled = filled & (source >= 0) & (source < pairs)
        pair = torch.where(filled, order.long()[torch.where(filled, source, 0)], -1)
        filled = filled & (pair >= 0) & (pair < pairs)
        pair = torch.where(filled, pair, -1)
        row_weights = torch.where(filled, weights.flatten()[pair.clamp(min=0)], 0.0)
        new_inverse[torch.where(filled, pair, pairs)] = row
    experts = torch.where(filled, expert, -1)
    out_inverse = new_inverse[:pairs].view(inverse.shape)
    pair, experts, new_counts, new_offsets, out_inverse = (t.to(torch.int32) for t in (pair, experts, new_counts, new_offsets, out_inverse))
    return pair, experts, row_weights, new_counts, new_offsets, out_inverse


@triton.jit(do_not_specialize=["pairs", "rows", "spacing"])
def _routing_pad_kernel(
    order_ptr,
    counts_ptr,
    offsets_ptr,
    inverse_ptr,
    weights_ptr,
    new_order_ptr,
    experts_ptr,
    row_weights_ptr,
    new_counts_ptr,
    new_offsets_ptr,
    new_inverse_ptr,
    pairs,
    rows,
    spacing,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """BLOCK_R rows of the padded form, and a share of the pairs that have no row. Numbers out of range, of a routing made by hand, are skipped.

    `spacing` is no constant: by default the capacity is the number of tokens.
    """
    expert = tl.arange(0, E_PADDED)
    counts = tl.load(counts_ptr + expert, mask=expert < E, other=0)
    if MASKED:
        counts = tl.minimum(counts, spacing)
        extent = tl.where(expert < E, spacing, 0)
    else:
        extent = tl.cdiv(counts, spacing) * spacing
    end = tl.cumsum(extent, axis=0)
    if tl.program_id(0) == 0:
        tl.store(new_counts_ptr + expert, counts, mask=expert < E)
        tl.store(new_offsets_ptr + expert, end - extent, mask=expert < E)
        tl.store(new_offsets_ptr + E, tl.sum(extent, axis=0))

    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    passed = (end[None, :] <= row[:, None]) & (expert < E)[None, :]
    owner = tl.sum(passed.to(tl.int32), axis=1)
    rank = row - tl.sum(tl.where(passed, extent[None, :], 0), axis=1)
    present = (owner < E) & (row < rows)
    count = tl.load(counts_ptr + owner, mask=present, other=0)
    if MASKED:
        count = tl.minimum(count, spacing)
    filled = present & (rank < count)
    source = tl.load(offsets_ptr + owner, mask=filled, other=0) + rank
    filled = filled & (source >= 0) & (source < pairs)
    pair = tl.load(order_ptr + source, mask=filled, other=-1)
    filled = filled & (pair >= 0) & (pair < pairs)
    pair = tl.where(filled, pair, -1)
    tl.store(new_order_ptr + row, pair, mask=row < rows)
    tl.store(experts_ptr + row, tl.where(filled, owner, -1), mask=row < rows)
    tl.store(row_weights_ptr + row, tl.load(weights_ptr + pair, mask=filled, other=0.0), mask=row < rows)
    tl.store(new_inverse_ptr + pair, row, mask=filled)

    # Pairs without a row: no expert here, or (masked) a place beyond the capacity.
    # The step alone can be near 2^31.
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK_R, pairs, tl.num_programs(0) * BLOCK_R):
        position = tl.cast(start, tl.int32) + tl.arange(0, BLOCK_R)
        inside = position < pairs
        absent = tl.load(inverse_ptr + position, mask=inside, other=0) < 0
        tl.store(new_inverse_ptr + position, tl.full([BLOCK_R], -1, tl.int32), mask=inside & absent)
        if MASKED:
            pair = tl.load(order_ptr + position, mask=inside, other=-1)
            begin = tl.load(offsets_ptr + expert, mask=expert < E, other=2147483647)
            owner = tl.sum((begin[None, :] <= position[:, None]).to(tl.int32), axis=1) - 1
            rank = position - tl.load(offsets_ptr + owner, mask=inside & (owner >= 0), other=0)
            over = (pair >= 0) & (pair < pairs) & (rank >= spacing)
            tl.store(new_inverse_ptr + pair, tl.full([BLOCK_R], -1, tl.int32), mask=over)


def _routing_pad_triton(
    order: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, block: int, masked: bool
) -> PaddedTensors:
    outs = _routing_pad_fake(order, counts, offsets, inverse, weights, block, masked)
    num_local, rows = counts.shape[0], outs[0].shape[0]
    padded_experts = 1 << (num_local - 1).bit_length()
    block_r = max(16, min(256, 16384 // padded_experts))
    launch(
        "routing_pad",
        _routing_pad_kernel,
        (max(1, ceil_div(rows, block_r)),),
        order,
        counts,
        offsets,
        inverse,
        weights,
        *outs,
        order.shape[0],
        rows,
        block,
        E=num_local,
        E_PADDED=padded_experts,
        MASKED=masked,
        BLOCK_R=block_r,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return outs


def _routing_pad_fake(
    order: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, block: int, masked: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = padded_rows(order.shape[0], counts.shape[0], block, masked)
    return (
        order.new_empty(rows),
        order.new_empty(rows),
        weights.new_empty(rows),
        torch.empty_like(counts),
        torch.empty_like(offsets),
        torch.empty_like(inverse),
    )


_routing_pad = register("routing_pad", cuda=_routing_pad_triton, cpu=routing_pad_ref, fake=_routing_pad_fake)


def pad_routing(routing: Routing, *, block: int | None = None, capacity: int | None = None) -> PaddedRouting:
    """Spread the rows of a routing: every expert starts at a multiple of `block`, or at expert * `capacity` (masked form).

    Args:
        routing: the packed routing.
        block: rows that each expert's start is a multiple of, 1 to 65536.
        capacity: rows of each expert; what an expert has beyond is dropped (inverse -1, counts clamped). Exactly one of the two is given.

    Returns:
        The padded routing, with room for the worst case: T * k + min(E_local, T * k) * (block - 1) rows rounded down to a block, or
        E_local * capacity.

    Numerics:
        Deterministic.

    Raises:
        TypeError: `routing` is no Routing, or has fields of another dtype. ValueError: fields that do not belong together; neither or both of
            block and capacity, one out of range, or more than 2**31 - 2**16 rows.

    Cost:
        One launch that writes 12 bytes a row.

    See Also:
        `moe_ops.router.permute.permute`, `moe_ops.combine`; tests/router/test_padding.py.
    """
    return spread("pad_routing", routing, block, capacity)


def spread(op: str, routing: Routing, block: int | None, capacity: int | None) -> PaddedRouting:
    """`pad_routing` on behalf of `op`, which errors name."""
    check_routing(op, routing)
    if (block is None) == (capacity is None):
        raise ValueError(f"{op}: give exactly one of block and capacity, got block={block} and capacity={capacity}")
    masked = block is None
    spacing = capacity if block is None else block
    checks.int_range(op, "capacity" if masked else "block", spacing, 1, MAX_PAIRS if masked else 65536)
    assert spacing is not None
    if not torch.compiler.is_compiling():  # torch 2.11 cannot trace sym_min
        rows = padded_rows(routing.order.shape[0], routing.num_local_experts, spacing, masked)
        if rows > MAX_PAIRS:
            raise ValueError(f"{op}: the padded form would have {rows} rows, more than {MAX_PAIRS}")
    order, experts, row_weights, counts, offsets, inverse = _routing_pad(
        routing.order, routing.counts, routing.offsets, routing.inverse, routing.weights, spacing, masked
    )
    return PaddedRouting(order, experts, row_weights, counts, offsets, inverse, routing.weights, routing, block, capacity)


def check_padded(op: str, padded: PaddedRouting) -> None:
    """Like `check_routing`: tensors of `padded` that kernels can read."""
    check_routing(op, padded.packed)
    floats = {"row_weights": padded.row_weights, "weights": padded.weights}
    ints = {name: getattr(padded, name) for name in ("order", "experts", "counts", "offsets", "inverse")}
    pairs, local, rows = tuple(padded.packed.ids.shape), padded.packed.num_local_experts, (padded.num_rows,)
    shapes = {"order": rows, "experts": rows, "row_weights": rows, "counts": (local,), "offsets": (local + 1,), "inverse": pairs, "weights": pairs}
    if not (
        all(isinstance(t, torch.Tensor) and tuple(t.shape) == shapes[name] for name, t in {**floats, **ints}.items())
        and well_formed(tuple(floats.values()), tuple(ints.values()), padded.packed.ids.device)
    ):
        check_tensors(op, "routing", floats, {**ints, "packed.ids": padded.packed.ids}, {**shapes, "packed.ids": pairs})
