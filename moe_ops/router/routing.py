"""`Routing`: which experts each token goes to, and where its rows lie, all on the device.

    ids [T, k]      weights [T, k]          the choice; -1 / 0 for padding, remote and invalid pairs
    counts [E_local]  offsets [E_local+1]   rows of local expert e: offsets[e] .. offsets[e] + counts[e]
    order [T*k]     inverse [T, k]          row -> pair t*k+j sorted by (local expert, t, j), and pair -> row

How many rows are filled is known on the device alone (offsets[E_local]); buffers have room for T*k rows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_ops.core import checks
from moe_ops.router.layout import MAX_PAIRS, routing_layout
from moe_ops.router.pairs_kernel import MAX_EXPERTS

if TYPE_CHECKING:
    from moe_ops.router.conversions import ExpertRows

#: `local=` of the public functions: None (all experts are here), (first, count), an expert map, or (expert map, count).
Local = tuple[int, int] | torch.Tensor | tuple[torch.Tensor, int] | None

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INT_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Routing:
    """The routing of T tokens to k experts each, with the token layout that later steps need.

    Attributes:
        ids (T, k), int32: global expert ids; -1 where a pair has no expert here (padding, remote, out of range).
        weights (T, k), fp32: what a row's output is multiplied by, every factor inside; 0 where ids is -1.
        counts (E_local,), int32: rows of each local expert.
        offsets (E_local + 1,), int32: first row of each local expert; the last entry is the number of filled rows.
        order (T * k,), int32: pair t*k+j of each row, sorted by (local expert, t, j); -1 past the filled rows.
        inverse (T, k), int32: row of each pair, or -1.
        num_experts: number of global experts.
        first_expert: global number of local expert 0 (of a window; 0 with a map).
        expert_map (num_experts,) or None: local expert of each global one, or -1.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    num_experts: int
    first_expert: int = 0
    expert_map: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens T, padding included."""
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        """Experts per token k."""
        return self.ids.shape[1]

    @property
    def num_local_experts(self) -> int:
        """Local experts E_local."""
        return self.counts.shape[0]

    @staticmethod
    def from_topk(
        ids: torch.Tensor, weights: torch.Tensor, num_experts: int, *, num_valid: torch.Tensor | None = None, local: Local = None
    ) -> "Routing":
        """The `Routing` of expert ids and weights that somebody else chose: one launch up to 1024 pairs (T * k), two above; nothing read on the host.

        Args:
            ids (T, k), int32 or int64, any strides: global expert ids. Whatever lies outside [0, num_experts) means "no expert", be it
                -1, num_experts or anything else. The same expert twice in one token is legal and gives two rows.
            weights (T, k), fp32, bf16 or fp16, any strides: widened to fp32, otherwise unchanged.
            num_experts: number of global experts, at most 2048.
            num_valid: int32 or int64 device tensor of one element: rows from there on are padding and are not read. None: all rows are real.
            local: which experts are here. None: all. (first, count): a window. An expert map (num_experts,), int32 or int64: local number of
                each expert, or -1; then there are `num_experts` local numbers, or `count` of them with (map, count).

        Returns:
            The routing; pairs without a local expert have id -1, weight 0 and inverse -1.

        Numerics:
            Deterministic, no atomics.

        Raises:
            TypeError: another dtype. ValueError: shapes that do not fit, more than 2048 experts or 2**31 - 2**16 pairs, tensors on several
                devices, weights that require grad.

        Cost:
            Up to 1024 pairs each program reads all ids twice, above that only those of its chunk; T * k * 24 bytes of output.

        See Also:
            `moe_ops.route`; tests/router/test_layout.py, benchmarks/router/bench_layout.py.
        """
        op = "Routing.from_topk"
        checks.is_tensor(op, "ids", ids)
        checks.is_tensor(op, "weights", weights)
        checks.dtype(op, "ids", ids, _INT_DTYPES)
        checks.dtype(op, "weights", weights, _WEIGHT_DTYPES)
        checks.ndim(op, "ids", ids, (2,))
        checks.shape(op, "weights", weights, tuple(ids.shape))
        checks.int_range(op, "num_experts", num_experts, 1, MAX_EXPERTS)
        checks.int_range(op, "top_k (the width of ids)", ids.shape[1], 1, 2**16)
        checks.no_grad(op, weights=weights)
        check_pairs(op, ids.shape[0], ids.shape[1])
        num_local, first, expert_map = parse_local(op, local, num_experts)
        check_num_valid(op, num_valid)
        checks.same_device(op, ids=ids, weights=weights, num_valid=num_valid, expert_map=expert_map)
        ids, weights, counts, offsets, order, inverse = routing_layout(ids, weights, num_experts, num_local, first, expert_map, num_valid)
        return Routing(ids, weights, counts, offsets, order, inverse, num_experts, first, expert_map)

    def per_expert(self, capacity: int | None = None) -> "ExpertRows":
        """Each local expert's token ids, weights and count, as views of tables of fixed size; nothing is read on the host.

        Args:
            capacity: rows of each expert in the tables; None takes T, enough for distinct ids. Rows beyond are left out.

        Returns:
            `ExpertRows`: token_ids and weights (E_local, capacity), counts (E_local,); indexing gives one expert's views.

        Cost:
            Writes 20 bytes for each of E_local * capacity rows: give a capacity where T is large.
        """
        from moe_ops.router.conversions import per_expert

        return per_expert(self, capacity)

    def to_offs(self) -> torch.Tensor:
        """End of each expert's rows, int32 (E_local,): the `offs` of torch's grouped GEMMs, as a view."""
        return self.offsets[1:]

    def to_m_indices(self, block: int = 128) -> torch.Tensor:
        """Expert of each row of the block-padded form, int32 (P,), -1 in padding: DeepGEMM's m_indices for `permute(.., block=block)`."""
        from moe_ops.router.padding import spread

        return spread("to_m_indices", self, block, None).experts

    def to_psum(self, block: int = 128) -> torch.Tensor:
        """End of each expert's filled rows in the block-padded form, int32 (E_local,): DeepGEMM's psum layout."""
        from moe_ops.router.conversions import to_psum

        return to_psum(self, block)

    def to_masked_m(self, capacity: int) -> torch.Tensor:
        """Filled rows of each expert, int32 (E_local,), clamped to the capacity: masked_m for `permute(.., capacity=capacity)`."""
        checks.int_range("to_masked_m", "capacity", capacity, 1, MAX_PAIRS)
        return self.counts.clamp(max=capacity)

    def to_m_indptr(self, block: int = 4) -> torch.Tensor:
        """First row of each expert in the block-padded form, int32 (E_local + 1,): FlashInfer's m_indptr, whose entries are multiples of 4."""
        from moe_ops.router.padding import spread

        return spread("to_m_indptr", self, block, None).offsets

    def to_sorted_block(self, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What vLLM's moe_align_block_size returns.

        Returns:
            sorted_ids (P,) int32: pair of each row, T*k in padding. expert_ids (P / block,) int32: local expert of each block, -1 past the end.
            num_tokens_post_pad (1,) int32: rows in use, padding of the blocks included.
        """
        from moe_ops.router.conversions import to_sorted_block

        return to_sorted_block(self, block)


def well_formed(floats: tuple[torch.Tensor, ...], ints: tuple[torch.Tensor, ...], device: torch.device) -> bool:
    """Whether tensors are contiguous fp32 and int32 ones of one device, without a gradient; quick, because hot paths ask."""
    for t in floats:
        if t.dtype is not torch.float32 or t.requires_grad or t.device != device or not t.is_contiguous():
            return False
    for t in ints:
        if t.dtype is not torch.int32 or t.device != device or not t.is_contiguous():
            return False
    return True


def check_tensors(op: str, prefix: str, floats: dict[str, torch.Tensor], ints: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    """Name the first tensor that is not what its kind of field must be; `shapes` holds the shape of each."""
    named = {f"{prefix}.{name}": t for name, t in {**ints, **floats}.items()}
    for name, t in named.items():
        checks.is_tensor(op, name, t)
    for name, t in named.items():
        field = name.removeprefix(f"{prefix}.")
        checks.dtype(op, name, t, (torch.float32,) if field in floats else (torch.int32,))
        checks.shape(op, name, t, shapes[field])
        checks.contiguous(op, name, t)
    checks.same_device(op, **named)
    checks.no_grad(op, **named)


def check_routing(op: str, routing: object) -> None:
    """`routing` is a `Routing` whose tensors kernels can read: dtypes, shapes that belong together, contiguous, one device, no gradient.

    Cheap where all is well (about 2 us), and reads nothing on the device. A `Routing` made by hand can still hold numbers that fit nothing:
    kernels skip rows out of range.

    Raises:
        TypeError: no `Routing`; a field of another dtype. ValueError: shape, stride or device that does not fit, weights that require grad.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"{op}: routing must be a Routing, got {type(routing).__name__}")
    ids, weights, counts, offsets, order, inverse = (
        routing.ids,
        routing.weights,
        routing.counts,
        routing.offsets,
        routing.order,
        routing.inverse,
    )
    try:
        shape = ids.shape
        sound = (
            len(shape) == 2
            and weights.shape == shape
            and inverse.shape == shape
            and order.dim() == counts.dim() == offsets.dim() == 1
            and order.shape[0] == shape[0] * shape[1]
            and offsets.shape[0] == counts.shape[0] + 1
            and well_formed((weights,), (ids, counts, offsets, order, inverse), ids.device)
        )
    except AttributeError:  # a field that is no tensor
        sound = False
    if not sound:
        checks.is_tensor(op, "routing.ids", ids)
        checks.ndim(op, "routing.ids", ids, (2,))
        checks.is_tensor(op, "routing.counts", counts)
        checks.ndim(op, "routing.counts", counts, (1,))
        tokens, top_k = ids.shape
        local = counts.shape[0]
        shapes = {
            "ids": (tokens, top_k),
            "weights": (tokens, top_k),
            "counts": (local,),
            "offsets": (local + 1,),
            "order": (tokens * top_k,),
            "inverse": (tokens, top_k),
        }
        ints = {"ids": ids, "counts": counts, "offsets": offsets, "order": order, "inverse": inverse}
        check_tensors(op, "routing", {"weights": weights}, ints, shapes)


def check_pairs(op: str, tokens: int, top_k: int) -> None:
    """Row numbers are int32."""
    if tokens * top_k > MAX_PAIRS:
        raise ValueError(f"{op}: tokens * top_k must be at most {MAX_PAIRS}, got {tokens} * {top_k}")


def check_num_valid(op: str, num_valid: Any) -> None:
    """`num_valid` is None or one integer on a device."""
    if num_valid is None:
        return
    checks.is_tensor(op, "num_valid", num_valid)
    checks.dtype(op, "num_valid", num_valid, _INT_DTYPES)
    if num_valid.numel() != 1:
        raise ValueError(f"{op}: num_valid must have one element, got shape {tuple(num_valid.shape)}")


def parse_local(op: str, local: Any, num_experts: int) -> tuple[int, int, torch.Tensor | None]:
    """(number of local experts, first, expert map) of a `local=` argument."""
    if local is None:
        return num_experts, 0, None
    count: Any = num_experts
    if isinstance(local, tuple) and len(local) == 2 and isinstance(local[0], torch.Tensor):
        local, count = local
    if isinstance(local, torch.Tensor):
        checks.dtype(op, "local (expert map)", local, _INT_DTYPES)
        checks.shape(op, "local (expert map)", local, (num_experts,))
        checks.contiguous(op, "local (expert map)", local)
        checks.int_range(op, "local[1] (number of local experts)", count, 1, num_experts)
        return count, 0, local
    if not (isinstance(local, tuple) and len(local) == 2):
        raise TypeError(f"{op}: local must be None, (first, count), an expert map tensor or (expert map, count), got {local!r}")
    first, count = local
    checks.int_range(op, "local[0] (first expert)", first, 0, num_experts - 1)
    checks.int_range(op, "local[1] (number of local experts)", count, 1, num_experts - first)
    return count, first, None
