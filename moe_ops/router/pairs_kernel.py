"""Jit helpers for reading (token, choice) pairs, shared by the router's kernels."""

import triton
import triton.language as tl

#: Most experts of a routing, global or local: tables of counts hold a row of all local experts, and kernels are tried up to here.
MAX_EXPERTS = 2048


@triton.jit
def local_expert(raw, ok, map_ptr, num_experts, num_local, first):
    """Local expert of each raw global id (int32 or int64), -1 where `ok` is false or the expert is not here."""
    ok = ok & (raw >= 0) & (raw < num_experts)
    local = tl.where(ok, raw, 0).to(tl.int32)
    if map_ptr is None:
        local = local - first
    else:
        local = tl.load(map_ptr + local, mask=ok, other=-1).to(tl.int32)
    return tl.where(ok & (local >= 0) & (local < num_local), local, -1)


@triton.jit
def valid_tokens(num_valid_ptr, T):
    """How many of the T rows are real: the device scalar clamped to [0, T]."""
    valid = T
    if num_valid_ptr is not None:
        valid = tl.minimum(tl.maximum(tl.load(num_valid_ptr), 0), T).to(tl.int32)
    return valid


@triton.jit
def pair_offsets(pair, stride_t, stride_j, TOP_K: tl.constexpr, FLAT: tl.constexpr):
    """Element offsets of pairs in a (T, k) tensor; FLAT where it is contiguous."""
    if FLAT:
        return pair
    else:  # two returns of different types need the branch to be known when compiling
        return (pair // TOP_K).to(tl.int64) * stride_t + (pair % TOP_K).to(tl.int64) * stride_j


@triton.jit
def load_pairs(ids_ptr, map_ptr, pair, filled, num_experts, num_local, first, stride_it, stride_ij, TOP_K: tl.constexpr, FLAT: tl.constexpr):
    """Raw ids of pairs, and their local experts (-1 for none); pairs from `filled` on are not read."""
    raw = tl.load(ids_ptr + pair_offsets(pair, stride_it, stride_ij, TOP_K, FLAT), mask=pair < filled, other=-1)
    return raw, local_expert(raw, pair < filled, map_ptr, num_experts, num_local, first)


@triton.jit
def store_canonical(
    weights_ptr, out_ids_ptr, out_weights_ptr, pair, pairs, raw, local, stride_wt, stride_wj, TOP_K: tl.constexpr, FLAT: tl.constexpr
):
    """Canonical ids and fp32 weights of pairs; nothing where no buffers are given."""
    if out_ids_ptr is not None:
        weight = tl.load(weights_ptr + pair_offsets(pair, stride_wt, stride_wj, TOP_K, FLAT), mask=local >= 0, other=0.0)
        tl.store(out_ids_ptr + pair, tl.where(local >= 0, raw.to(tl.int32), -1), mask=pair < pairs)
        tl.store(out_weights_ptr + pair, weight.to(tl.float32), mask=pair < pairs)


@triton.jit
def _compare_exchange(x, index, N: tl.constexpr, DISTANCE: tl.constexpr, RUN: tl.constexpr):
    pairs = tl.reshape(x, [N // (2 * DISTANCE), 2, DISTANCE])
    other = tl.reshape(tl.sum(pairs, axis=1, keep_dims=True) - pairs, [N])
    keeps_smaller = ((index & DISTANCE) == 0) == ((index & RUN) == 0)
    return tl.where(keeps_smaller, tl.minimum(x, other), tl.maximum(x, other))


@triton.jit
def sort_rising(x, N: tl.constexpr):
    """N integers (a power of two, sums of two in range) in rising order: a bitonic network.

    `tl.sort` gives the same with 10 to 20% more instructions, and takes the interpreter six times as long.
    """
    index = tl.arange(0, N)
    for run in tl.static_range(1, N.bit_length()):
        for step in tl.static_range(1, run + 1):
            x = _compare_exchange(x, index, N, 1 << (run - step), 1 << run)
    return x
