"""What `explain` says of the kernel that would run: its config, and why that one; the words agree with the choice they describe."""

import itertools

import pytest

from moe_ops import explain
from moe_ops.core.arch import arch_of_capability
from moe_ops.gemm import dense_impls, grouped_impls
from moe_ops.gemm.dense_config import DenseGemmProblem, heuristic
from moe_ops.gemm.dense_roles import roles_reason
from moe_ops.gemm.grouped_config import GroupedGemmProblem, hopper_kernel, stream_tile

HOPPER = arch_of_capability(90)
DECODE = dict(op="grouped_gemm", rows=16, n=3072, k=4096, groups=8)
LINEAR = dict(op="dense_gemm", rows=8, n=1536, k=7168)
HEADS = dict(op="bmm", n=512, k=128, groups=128, unquantized=True)


@pytest.mark.parametrize(
    "question,device,parts",
    [
        (DECODE, "sm90", ["Gluon kernel that streams the weights, 64 weight rows x 16 rows a tile, 10 stages", "few rows: 2 an expert on average"]),
        ({**DECODE, "rows": 8192}, "sm90", ["warp roles, 128 rows x 256 weight rows a tile, 4 stages", "many rows: 1024 an expert on average"]),
        ({**DECODE, "rows": 1024, "masked": True}, "sm90", ["Gluon kernel with warp roles", "masked rows, 128 an expert"]),
        (
            {**DECODE, "rows": 400, "n": 256},
            "sm90",
            ["Triton kernel, GroupedGemmConfig(", "too few tiles for the kernel with warp roles to fill 132"],
        ),
        ({**DECODE, "rows": 1024, "n": 384}, "sm90", ["Triton kernel, GroupedGemmConfig(", "128 rows an expert", "wants N % 256 == 0"]),
        ({**DECODE, "n": 2880}, "sm90", ["Triton kernel, GroupedGemmConfig(", "want N, K and a segment's rows in whole 128s"]),
        ({**DECODE, "groups": 513}, "sm90", ["Triton kernel, GroupedGemmConfig(", "at most 512 experts"]),
        (
            {**DECODE, "rows": 2**27},
            "sm90",
            ["Triton kernel, GroupedGemmConfig(", "fewer than 134217728 rows", "rows enough to be the instruction's M"],
        ),
        ({**DECODE, "format": "mxfp8"}, "sm90", ["the Gluon kernels take fp8_block", "few rows, so the weights are the instruction's M"]),
        (DECODE, "sm100", ["the Gluon kernels are for SM90"]),
        ({**LINEAR, "n": 576, "unquantized": True}, "sm90", ["K in 28 parts", "quantizes inside: at most 16 rows and 1024 columns"]),
        (
            {**LINEAR, "unquantized": True},
            "sm90",
            ["Gluon kernel whose programs share K", "after a kernel that quantizes: 1536 columns, more than 1024"],
        ),
        ({**LINEAR, "n": 576, "rows": 17, "unquantized": True}, "sm90", ["after a kernel that quantizes: 17 rows, more than 16"]),
        ({**LINEAR, "rows": 200}, "sm90", ["Triton kernel, DenseGemmConfig(", "the Gluon kernel takes at most 128 rows"]),
        ({**LINEAR, "rows": 200}, "sm90", ["the kernel with warp roles would take longer"]),
        ({**LINEAR, "rows": 2048, "n": 1600}, "sm90", ["Triton kernel, DenseGemmConfig(", "wants N % 256 == 0 and K % 128 == 0"]),
        (
            {**LINEAR, "rows": 2048, "unquantized": True},
            "sm90",
            ["Gluon kernel with warp roles, 128 rows x 256", "with a residual, or an out off the 16-byte grid, Triton", "2048 rows, more than 16"],
        ),
        (LINEAR, "sm90", ["at most 128 quantized rows on SM90; 72 programs by the estimate of its time"]),
        ({**LINEAR, "rows": 100}, "sm90", ["96 programs by the estimate of its time, two of each tile, which exchange their sums"]),
        ({**LINEAR, "format": "plain"}, "sm90", ["the Gluon kernel takes fp8_block"]),
        ({**LINEAR, "k": 7176}, "sm90", ["the Gluon kernel wants K % 16 == 0"]),
        (LINEAR, "sm120", ["the Gluon kernel is for SM90"]),
        ({**HEADS, "rows": 8}, "sm90", ["Gluon kernel for at most 32 tokens, quantizing inside, programs a head: 2", "off the 16-byte grid, Triton"]),
        ({**HEADS, "rows": 33}, "sm90", ["Gluon kernel with warp roles, quantizing inside, 64 rows an item, a head's weights kept in shared memory"]),
        (
            {**HEADS, "rows": 65, "n": 1024},
            "sm90",
            ["128 rows an item, weights read for each item", "at one distance of rows or columns, Triton kernel"],
        ),
        (
            {**HEADS, "rows": 33, "n": 384},
            "sm90",
            ["Triton kernel, quantizing inside, DenseGemmConfig(", "N or K of 128 and the other in whole 256s"],
        ),
        ({**HEADS, "rows": 8}, "sm100", ["the Gluon kernels are for SM90", "quantizes inside: bmm has no kernel before it"]),
        ({**HEADS, "rows": 8, "format": "mxfp8"}, "sm90", ["the Gluon kernels take fp8_block"]),
        ({**HEADS, "rows": 8, "k": 192}, "sm90", ["the Gluon kernels want N and K in whole 128s"]),
    ],
)
def test_the_chosen_plan_says_its_config_and_why(question, device, parts):
    answer = explain(**question, device=device)
    assert answer.chosen == "triton"
    assert all(part in answer["triton"].plan for part in parts), answer["triton"].plan


@pytest.mark.parametrize("experts,n", [*itertools.product((1, 8, 32, 128, 512), (128, 256, 1024, 3072, 4224, 7168))])
def test_words_of_the_grouped_gemm_agree_with_its_choice(experts, n):
    for mean, masked in itertools.product((1, 2, 4, 8, 9, 16, 17, 64, 1000), (False, True)):
        problem = GroupedGemmProblem(experts * mean, experts, n, 1024, "fp8_block")
        kernel = hopper_kernel(problem, 1, masked, HOPPER)
        plan = explain("grouped_gemm", rows=problem.rows, n=n, k=1024, groups=experts, masked=masked, device="sm90")["triton"].plan
        few = mean <= grouped_impls.streamed_rows(problem, HOPPER)
        assert (kernel == "stream") == (few and not masked) == ("streams the weights" in plan)
        assert (kernel == "hopper") == plan.startswith("Gluon kernel with warp roles")
        if kernel == "stream":
            tile = stream_tile(problem.rows, experts, n, False, HOPPER)[0]
            assert f"{tile.weights} weight rows x {tile.rows} rows a tile, {tile.stages} stages, {tile.programs} programs an SM" in plan
        if kernel is None:
            assert ("wants N % 256 == 0" in plan) == (n % 256 != 0) and ("too few tiles" in plan) == (n % 256 == 0)


def test_the_tile_with_warp_roles_is_the_kernels():
    hopper = pytest.importorskip("moe_ops.gemm.grouped_hopper")
    assert grouped_impls.HOPPER_TILE[2] == hopper.STAGES


@pytest.mark.parametrize("fmt,fused", [("fp8_block", False), ("fp8_block", True), ("mxfp8", False), ("plain", False)])
def test_words_of_the_dense_gemm_agree_with_its_choice(fmt, fused):
    for capability, rows, n, k in itertools.product((90, 100), (1, 16, 17, 100, 128, 129, 4000), (64, 576, 7168), (512, 7168, 7184, 7200)):
        arch = arch_of_capability(capability)
        problem = DenseGemmProblem(rows, 1, n, k, fmt, fused, True)
        against = dense_impls.gluon_reason(problem, arch)
        assert (against is None) == bool(heuristic(problem, arch).programs), (problem, against)
        if fmt == "fp8_block" and not fused:
            plan = explain("dense_gemm", rows=rows, n=n, k=k, device=f"sm{capability}")["triton"].plan
            assert (roles_reason(problem, arch) is None) == plan.startswith("Gluon kernel with warp roles")
