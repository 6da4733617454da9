"""Row tiles of a packed layout as a list in device memory: (expert, first row, rows) of each, and how many there are.

Persistent kernels walk the list; the search over the experts' offsets is paid once and not in every tile.
"""

import torch

from moe_ops.core.formats import ceil_div

#: int32 words before the first entry; word 0 holds the number of tiles.
HEADER = 4
ENTRY = 4


def max_tiles(rows: int, experts: int, block_m: int) -> int:
    """Most tiles that `rows` rows over `experts` experts can make."""
    return min(experts, rows) + rows // block_m


def list_size(rows: int, experts: int, block_m: int) -> int:
    """int32 words of a list."""
    return HEADER + max_tiles(rows, experts, block_m) * ENTRY


def tile_list_ref(offsets: torch.Tensor, rows: int, block_m: int) -> torch.Tensor:
    """The definition: [HEADER + max_tiles * ENTRY] int32; entries past the count are -1."""
    host = [min(max(int(v), 0), rows) for v in offsets.tolist()]
    out = torch.full((list_size(rows, len(host) - 1, block_m),), -1, dtype=torch.int32)
    entries = []
    for e, (low, high) in enumerate(zip(host, host[1:], strict=False)):
        entries += [(e, r, min(block_m, high - r), 0) for r in range(low, high, block_m)]
    out[:HEADER] = torch.tensor([len(entries), 0, 0, 0], dtype=torch.int32)
    if entries:
        out[HEADER : HEADER + len(entries) * ENTRY] = torch.tensor(entries, dtype=torch.int32).flatten()
    return out.to(offsets.device)


def tile_list_into(offsets: torch.Tensor, rows: int, block_m: int, out: torch.Tensor) -> None:
    """Write the list of `offsets` (E + 1,) int32 into `out`, int32 [HEADER + max_tiles * ENTRY]; one launch."""
    from moe_ops.core.launch import launch
    from moe_ops.gemm.tile_list_kernel import _tile_list_kernel

    experts = offsets.shape[0] - 1
    slots = max_tiles(rows, experts, block_m)
    block = 64 if experts <= 256 else 16
    launch(
        "tile_list", _tile_list_kernel, (max(1, ceil_div(slots, block)),), offsets, out, rows, slots,
        E=experts, E2=max(2, 1 << (experts - 1).bit_length()), BLOCK_M=block_m, BLOCK=block, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
