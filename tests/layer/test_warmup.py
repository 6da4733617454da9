"""Warm-up reaches every variant that the heuristics can choose."""

import pytest
import torch

from moe_ops import warmup
from moe_ops.core.arch import arch_of_capability
from moe_ops.gemm.grouped_config import GroupedGemmProblem, heuristic
from moe_ops.layer.warmup import _changes, _grid, representatives


def test_every_choice_of_the_gemms_is_reached(monkeypatch):
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    w13 = torch.empty((16, 3072, 4096), dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr("moe_ops.layer.warmup.arch_of", lambda _: arch_of_capability(90))
    counts = representatives(w13, 8, 3000)
    arch = arch_of_capability(90)
    reached = {heuristic(GroupedGemmProblem(t * 8, 16, 3072, 4096, "plain"), arch) for t in counts}
    assert reached == {heuristic(GroupedGemmProblem(t * 8, 16, 3072, 4096, "plain"), arch) for t in range(1, 3001)}
    assert counts[0] == 1 and counts[-1] == 3000 and len(counts) < 80


def test_grid_and_changes():
    assert _grid(1) == [1] and _grid(2) == [1, 2]
    grid = _grid(100)
    assert {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 100} <= set(grid)
    assert all(b <= 1.5 * a + 1 for a, b in zip(grid, grid[1:], strict=False))
    assert _changes(lambda t: t > 7, 100) == [1, 8]


def test_bad_input_is_named():
    w = torch.zeros(2, 64, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="warmup: top_k is needed for a pair of weights"):
        warmup((w, w))
    with pytest.raises(ValueError, match="warmup: Linear holds no MoELayer"):
        warmup(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="warmup: max_tokens must be between 1 and"):
        warmup((w, w), 0, top_k=1)
