"""Buffers of which few rows are filled: time has to follow the filled rows, whatever the capacity."""

import torch

FORMS = ("packed", "masked")
#: Experts that the filled rows belong to, as many each.
EXPERTS = 32


def buffer(
    form: str, capacity: int, filled: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, counts): `filled` random rows in room for `capacity`, NaN in the others; the same rows for every capacity.

    Args:
        form: "packed", x (capacity, columns), or "masked", x (EXPERTS, capacity / EXPERTS, columns).
        capacity: rows in all, a multiple of EXPERTS.
        filled: filled rows in all, a multiple of EXPERTS.
        columns: K.
        dtype: of x.
        device: of both.
        seed: of the data.
    """
    each = filled // EXPERTS
    g = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(filled, columns, device=device, generator=g).to(dtype)
    counts = torch.full((EXPERTS,), each, dtype=torch.int32, device=device)
    shape = (capacity,) if form == "packed" else (EXPERTS, capacity // EXPERTS)
    x = torch.full((*shape, columns), float("nan"), dtype=dtype, device=device)
    taken = rows_of(x, form, filled)
    taken.copy_(rows.view(taken.shape))
    return x, counts


def rows_of(t: torch.Tensor, form: str, filled: int) -> torch.Tensor:
    """The filled rows of t, a view: (filled, ..) or (EXPERTS, filled / EXPERTS, ..)."""
    return t[:filled] if form == "packed" else t[:, : filled // EXPERTS]
