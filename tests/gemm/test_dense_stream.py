"""The dense GEMM whose programs share K, without a GPU: which config is taken, what is refused, and the kernel that adds the parts of a tile."""

import itertools
from dataclasses import replace

import pytest
import torch

from moe_ops.core.arch import arch_of_capability
from moe_ops.gemm.dense_config import (
    DenseGemmConfig,
    DenseGemmProblem,
    boxes,
    heuristic,
    in_pairs,
    is_legal,
    most_parts,
    part_bytes,
    shared_bytes,
    steps_ahead,
    steps_in_flight,
    stream_configs,
)
from moe_ops.gemm.dense_kernel import add_parts

HOPPER = replace(arch_of_capability(90), sms=132)
GOOD = DenseGemmConfig(64, 128, 128, 4, 6, 1, False, 7)
PROBLEM = DenseGemmProblem(40, 1, 576, 1024, "fp8_block", aligned=True)


def shares(n, k, cfg):
    """(program, tile, first step, last step) of every stretch of work, by the definition: the line of all steps in equal parts."""
    steps = -(-k // 128)
    total = -(-n // cfg.block_n) * steps
    for p in range(cfg.programs):
        step, end = p * total // cfg.programs, (p + 1) * total // cfg.programs
        while step < end:
            last = min(end, (step // steps + 1) * steps)
            yield p, step // steps, step % steps, last - step // steps * steps
            step = last


@pytest.mark.parametrize(
    "tile,programs",
    [
        *itertools.product([(16, 64), (32, 128), (64, 128)], [2, 4, 7, 11, 30]),
        *itertools.product([(64, 32), (128, 96), (128, 192)], [4, 7, 11, 30]),  # two programs would have whole tiles
    ],
    ids=str,
)
def test_parts_are_added_in_the_order_of_k(tile, programs, device):
    """SPLITK: cut tiles get the sum of their parts, bias and residual once; whole tiles and slots that nobody wrote are left alone."""
    m, n, k = tile[0] - 3, 571 if tile[1] % 96 == 0 else 576, 1024  # 571 ends inside a second box
    programs = min(programs, 8 * -(-n // tile[1]))  # a step each, at least
    cfg = DenseGemmConfig(*tile, 128, 4, 4, 1, tile[0] <= 32, programs)
    assert most_parts(cfg, n, k) > 1
    g = torch.Generator().manual_seed(programs)
    part = torch.full((2 * programs, *tile), float("nan"))
    assert part.numel() * 4 == part_bytes(cfg, m, n, k)
    bias, residual = torch.randn(n, generator=g), torch.randn(m, n, generator=g).bfloat16()
    expected = torch.full((m, n), 7.0)
    tiles, (wide, narrow) = -(-n // tile[1]), boxes(tile[1])
    for tile_i in range(tiles):
        # a tile's first box, then its second, which lies behind all first ones
        columns = torch.tensor(
            [*range(tile_i * wide, (tile_i + 1) * wide), *range(tiles * wide + tile_i * narrow, tiles * wide + (tile_i + 1) * narrow)]
        )
        inside, columns = columns < n, columns[columns < n]
        mine = [(p, first) for p, t, first, last in shares(n, k, cfg) if t == tile_i]
        if len(mine) > 1:
            total = 0
            for p, first in mine:
                values = torch.randn(m, len(columns), generator=g)
                part[2 * p + (first == 0), :m, inside] = values
                total = total + values
            expected[:, columns] = total + bias[columns] + residual[:, columns].float()
    out = torch.full((m, n + 5), 7.0, device=device)
    add_parts("test", part.to(device), bias.to(device), residual.to(device), out[:, :n], k, cfg)
    assert (out[:, n:] == 7).all()
    assert torch.equal(out[:, :n].cpu(), expected) or (out[:, :n].cpu() - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "change,problem,reason",
    [
        ({}, {}, None),
        ({"stages": 5}, {}, "must be even"),
        ({"block_m": 32}, {}, "hold all 40 rows"),
        ({"block_n": 256}, {}, "block_n must be one of"),
        ({"block_n": 72}, {}, "must each fall to one program"),
        ({"block_n": 72, "programs": 4}, {}, None),
        ({"block_m": 128, "block_n": 96, "stages": 7}, {}, None),
        ({"block_m": 128, "block_n": 64, "stages": 7}, {}, "must be even"),
        ({"programs": 10**6}, {}, "programs between 1 and"),
        ({"block_m": 128, "block_n": 32, "stages": 8, "programs": 256}, {"n": 4096, "k": 8192}, "must all find an SM"),
        ({"split": 2}, {}, "split 1"),
        ({"stages": 10}, {}, "shared memory"),
        ({}, {"fmt": "mxfp8"}, "fp8_block operands"),
        ({}, {"aligned": False}, "16-byte boundaries"),
        ({}, {"fused": True}, "quantized fp8_block operands"),
    ],
    ids=str,
)
def test_legality(change, problem, reason):
    found = is_legal(replace(GOOD, **change), replace(PROBLEM, **problem), HOPPER)
    assert found is None if reason is None else reason in found
    assert "is for Hopper" in is_legal(GOOD, PROBLEM, arch_of_capability(100))


@pytest.mark.parametrize(
    "n,k",
    [
        *((1536, 7168), (576, 7168), (24576, 1536), (7168, 18432), (9216, 4096), (129280, 7168), (151936, 4096)),
        *((64, 128), (1, 16), (100, 48)),
    ],
)
def test_choice(n, k):
    """Legal for every number of rows, the same for all of an octave, and never more programs than two an SM."""
    for rows in (1, 3, 16, 17, 40, 64, 65, 128, 129, 4000):
        problem = DenseGemmProblem(rows, 1, n, k, "fp8_block", aligned=True)
        cfg = heuristic(problem, HOPPER)
        assert is_legal(cfg, problem, HOPPER) is None
        assert (cfg.programs > 0) == (rows <= 128) and cfg.programs <= 2 * 132
        assert not heuristic(replace(problem, aligned=False), HOPPER).programs and not heuristic(problem, arch_of_capability(89)).programs
    assert not stream_configs(replace(problem, n=0, rows=3), HOPPER) and not heuristic(replace(problem, n=0, rows=0), HOPPER).programs
    assert heuristic(replace(problem, rows=17), HOPPER) == heuristic(replace(problem, rows=32), HOPPER)
    assert all(is_legal(c, replace(problem, rows=64), HOPPER) is None for c in stream_configs(replace(problem, rows=64), HOPPER))


@pytest.mark.parametrize("n,k,pairs", [(4096, 8192, True), (1536, 7168, True), (2112, 7168, True), (576, 7168, False), (7168, 16384, False)])
def test_programs_that_exchange_sums(n, k, pairs):
    """All programs run at once, and need no memory of the caller; not on a small slice of a GPU."""
    problem = DenseGemmProblem(128, 1, n, k, "fp8_block", aligned=True)
    cfg = heuristic(problem, HOPPER)
    assert in_pairs(cfg, n) == pairs
    if pairs:
        assert cfg.programs <= HOPPER.sms and part_bytes(cfg, 128, n, k) == 0 < part_bytes(replace(cfg, programs=cfg.programs - 1), 128, n, k)
        assert "must all find an SM" in is_legal(cfg, problem, replace(HOPPER, sms=cfg.programs - 1))
        assert shared_bytes(cfg, problem) < shared_bytes(replace(cfg, programs=cfg.programs - 1), problem)
    assert not any(in_pairs(c, n) for c in stream_configs(replace(problem, rows=64), HOPPER) + stream_configs(problem, replace(HOPPER, sms=48)))


def test_steps_asked_for():
    """At least as many as hide the memory, at most what the ring holds; fewer where many rows and a long K let programs starve each other."""
    for rows in (1, 16, 32, 64, 128):
        for n, k in ((18432, 7168), (7168, 16384), (24576, 1536), (9216, 4096), (4096, 8192)):
            for cfg in stream_configs(DenseGemmProblem(rows, 1, n, k, "fp8_block", aligned=True), HOPPER):
                assert (3 if cfg.block_m == 128 else 4) <= steps_in_flight(cfg, k) or steps_in_flight(cfg, k) == cfg.stages
                assert 0 <= steps_ahead(cfg) <= max(cfg.stages, 4) and (rows > 32 or steps_in_flight(cfg, k) == cfg.stages)
    up, o = (
        heuristic(DenseGemmProblem(128, 1, 18432, 7168, "fp8_block", aligned=True), HOPPER),
        heuristic(DenseGemmProblem(64, 1, 7168, 16384, "fp8_block", aligned=True), HOPPER),
    )
    assert (steps_in_flight(up, 7168), steps_in_flight(o, 16384), steps_in_flight(o, 1536)) == (3, 8, o.stages)
