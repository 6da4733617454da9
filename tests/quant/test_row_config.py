"""Work sharing of the row kernels: the heuristic and the search space are legal, and what is not says why."""

import pytest

from moe_ops.core.arch import arch_of_capability
from moe_ops.quant.row_config import RowConfig, heuristic, is_legal, search_space

ARCH = arch_of_capability(90)


@pytest.mark.parametrize("group", (32, 128))
def test_search_space_and_heuristic_are_legal(group):
    space = search_space(group)
    assert len(space) == len(set(space)) > 20 and all(is_legal(cfg, group) is None for cfg in space)
    for rows in (0, 1, 64, 10**4, 10**6):
        for k in (1, 128, 513, 7168):
            for block_r in (2, 4):
                assert is_legal(heuristic(rows, k, ARCH, block_r), group) is None


def test_heuristic_gives_few_rows_more_programs_and_many_rows_larger_tiles():
    assert heuristic(64, 7168, ARCH).block_r == 1
    assert heuristic(32768, 7168, ARCH).block_r == 4
    assert heuristic(32768, 7168, ARCH, 2).block_r == 2
    assert heuristic(64, 512, ARCH).columns == 512


@pytest.mark.parametrize(
    ("cfg", "text"),
    (
        (RowConfig(block_r=3), "block_r must be a power of two, got 3"),
        (RowConfig(columns=1000), "columns must be a power of two, got 1000"),
        (RowConfig(columns=256), "columns must hold at least 4 groups of 128, got 256"),
        (RowConfig(block_r=32), "a tile may hold at most 16384 elements, got 32 x 1024"),
        (RowConfig(warps=32), "warps must be at most 16 and programs at least 1, got 32 and 8"),
        (RowConfig(programs=0), "warps must be at most 16 and programs at least 1, got 4 and 0"),
    ),
)
def test_illegal_configs_say_why(cfg, text):
    assert is_legal(cfg, 128) == text
