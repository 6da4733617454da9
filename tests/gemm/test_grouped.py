"""Grouped GEMM: the kernel against the fp32 product of the dequantized operands, and the public function's checks."""

from dataclasses import replace

import pytest
import torch
import triton

from moe_ops import grouped_gemm, make_qtensor, quantize, quantize_weight
from moe_ops.core.arch import arch_of_capability
from moe_ops.core.numerics import random_topk, relative_error, uneven
from moe_ops.gemm.grouped import _grouped_gemm_triton, grouped_gemm_ref
from moe_ops.gemm.grouped_config import GroupedGemmConfig, GroupedGemmProblem, heuristic, is_legal, search_space
from moe_ops.router.routing import Routing

BOUND = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 5e-4}
MX_K = 128 if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10 else 32
CONFIGS = {
    "swap": {f: GroupedGemmConfig(16, 64, b, 4, 3, 2, True) for f, b in (("fp8_block", 128), ("mxfp8", MX_K), ("plain", 64))},
    "rows": {f: GroupedGemmConfig(64, 64, b, 4, 3, 0, False) for f, b in (("fp8_block", 128), ("mxfp8", MX_K), ("plain", 64))},
}


def operands(fmt, a_shape, e, n, k, device, segments=1):
    a = uneven((*a_shape, k), seed=1)
    w = uneven((e, n, k), block=(128, 128) if fmt == "fp8_block" else (1, 32), seed=2, spread=2)
    if fmt == "plain":
        return a.to(device), None, w.to(device), None
    qa, qw = quantize(a, fmt), quantize_weight(w, fmt, segments=segments)
    return qa.data.view(torch.uint8).to(device), qa.scale.to(device), qw.data.view(torch.uint8).to(device), qw.scale.to(device)


def check(out, ref, filled, dtype):
    """`filled` rows agree within the bound; nothing else was promised."""
    error = relative_error(out[filled], ref[filled])
    assert error <= BOUND[dtype], error


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("k", [64, 200, 512])
def test_long_steps_of_16_bit_operands(device, block_m, k):
    """The tile of a router's product on Hopper: 256 of K a step, whatever K is; packed by row index, and masked."""
    config = GroupedGemmConfig(block_m, 64, 256, 4, 3, 3, True)
    n, counts = 80, torch.tensor([3, 0, 40], dtype=torch.int32)
    w = uneven((3, n, k), seed=2).to(device)
    masked = (uneven((3, 40, k), seed=1).to(device), None, w, None, None, counts.to(device), None, 1, "plain", 1, torch.float32)
    out, ref = _grouped_gemm_triton(*masked, config.ints()), grouped_gemm_ref(*masked)
    for e, filled in enumerate(counts.tolist()):
        assert filled == 0 or relative_error(out[e, :filled], ref[e, :filled]) <= BOUND[torch.float32]
        assert torch.isnan(out[e, filled:]).all()
    order = torch.tensor([5, 1, 0, *range(2, 42)], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 3, 3, 43], dtype=torch.int32, device=device)
    packed = (uneven((21, k), seed=1).to(device), None, w, None, None, offsets, order, 2, "plain", 1, torch.float32)
    check(_grouped_gemm_triton(*packed, config.ints()), grouped_gemm_ref(*packed), slice(0, 43), torch.float32)


CASES = [
    # (id, counts, N, K, segments)
    ("one row a expert", [1, 1, 1], 128, 256, 1),
    ("empty experts between, tile edges", [0, 17, 0, 63, 1, 0], 64, 128, 1),
    ("all rows on one expert", [0, 0, 70], 192, 128, 1),
    ("no rows at all", [0, 0], 64, 128, 1),
    ("N off the block grid", [5, 3], 80, 128, 1),
    ("gate and up apart, I % 128 != 0", [4, 2], 2 * 192, 128, 2),
    ("ragged K", [3, 9], 64, 576, 1),
    ("K not a multiple of 16: no tensor descriptor", [3, 2], 64, 136, 1),
]


@pytest.mark.parametrize("which", ["swap", "rows"])
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "plain"])
@pytest.mark.parametrize("counts,n,k,segments", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_packed_matches_reference(device, which, fmt, counts, n, k, segments):
    if fmt == "mxfp8" and k % 32:
        k = 160
    if fmt != "fp8_block":
        segments = 1
    rows, e = sum(counts) + 3, len(counts)  # three rows of room beyond the filled ones
    a, sa, w, sw = operands(fmt, (rows,), e, n, k, device, segments)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
    bias = torch.randn(e, n, generator=torch.Generator().manual_seed(3)).to(device)
    args = (a, sa, w, sw, bias, offsets, None, 1, fmt, segments, torch.float32)
    out = _grouped_gemm_triton(*args, CONFIGS[which][fmt].ints())
    ref = grouped_gemm_ref(*args)
    check(out, ref, slice(0, sum(counts)), torch.float32)
    assert torch.isnan(out[sum(counts) :]).all()  # rows of no expert are not written


@pytest.mark.parametrize("which", ["swap", "rows"])
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "plain"])
@pytest.mark.parametrize("capacity", [1, 8, 63, 65])
def test_masked_rows_beyond_a_count_are_neither_read_nor_written(device, which, fmt, capacity):
    counts = [0, 1, capacity, max(0, capacity - 1), capacity + 9]  # the last is clamped
    e, n, k = len(counts), 64, 128
    a, sa, w, sw = operands(fmt, (e, capacity), e, n, k, device)
    for i, c in enumerate(counts):
        if fmt == "plain":
            a[i, c:] = float("nan")
        else:
            a[i, c:] = 0x7F
            sa[i, c:] = float("nan") if fmt == "fp8_block" else 255
    args = (a, sa, w, sw, None, torch.tensor(counts, dtype=torch.int32, device=device), None, 1, fmt, 1, torch.float32)
    out = _grouped_gemm_triton(*args, CONFIGS[which][fmt].ints())
    ref = grouped_gemm_ref(*args)
    for i, c in enumerate(counts):
        check(out[i], ref[i], slice(0, c), torch.float32)
        assert torch.isnan(out[i, c:]).all()


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gather_reads_tokens_in_place(device, fmt, dtype):
    tokens, e, k_top, n, k = 13, 5, 3, 128, 256
    ids, weights = random_topk(tokens, e, k_top, seed=4)
    ids[2] = -1
    routing = Routing.from_topk(ids.to(device), weights.to(device), e)
    a, sa, w, sw = operands(fmt, (tokens,), e, n, k, device)
    args = (a, sa, w, sw, None, routing.offsets, routing.order, k_top, fmt, 1, dtype)
    out, ref = _grouped_gemm_triton(*args), grouped_gemm_ref(*args[:-1], torch.float32)
    filled = int(routing.offsets[-1])
    check(out, ref, slice(0, filled), dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for Blackwell on machines without a GPU")
@pytest.mark.skipif(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8), reason="Triton's interpreter has tl.dot_scaled from 3.8 on")
@pytest.mark.parametrize("rows", [5, 300], ids=["weights first", "rows first"])
def test_block_scaled_instruction_in_the_interpreter(monkeypatch, rows):
    """The path of SM100: the instruction applies both E8M0 scales; ragged K."""
    monkeypatch.setenv("MOE_OPS_ARCH", "100")
    e, n, k = 2, 192, 160
    a, sa, w, sw = operands("mxfp8", (rows,), e, n, k, torch.device("cpu"))
    offsets = torch.tensor([0, rows // 3, rows], dtype=torch.int32)
    args = (a, sa, w, sw, None, offsets, None, 1, "mxfp8", 1, torch.float32)
    assert relative_error(_grouped_gemm_triton(*args), grouped_gemm_ref(*args)) < 5e-4


@pytest.mark.parametrize("layout", ["row_major", "mn_major"])
def test_activation_scales_in_both_stride_orders(device, layout):
    x, w = uneven((9, 256), seed=1).to(device), quantize_weight(uneven((2, 64, 256), seed=2).to(device), "fp8_block")
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    q = quantize(x, "fp8_block", layout=layout)
    args = (q.data.view(torch.uint8), q.scale, w.data.view(torch.uint8), w.scale, None, offsets, None, 1, "fp8_block", 1, torch.float32)
    assert relative_error(_grouped_gemm_triton(*args), grouped_gemm_ref(*args)) < 5e-4


def test_out_of_range_offsets_and_order_stay_inside(device):
    """Garbage in offsets and order reads and writes nothing out of bounds (clamped), and ends."""
    a, sa, w, sw = operands("fp8_block", (4,), 3, 64, 128, device)
    for offsets in ([0, 10**6, -5, 8], [-(2**31), 2**31 - 1, 0, 3], [5, 4, 3, 2], [0, 8, -(2**31), 8], [7, -(2**31), 0, 8]):
        order = torch.tensor([-7, 2**31 - 1, 3, 0, 1, 2, 9, 8], dtype=torch.int32, device=device)
        given = torch.tensor(offsets, dtype=torch.int32, device=device)
        out = _grouped_gemm_triton(a, sa, w, sw, None, given, order, 2, "fp8_block", 1, torch.float32)
        assert out.shape == (8, 64)


def test_same_call_same_bits_and_pinned_config_across_shapes(device):
    a, sa, w, sw = operands("fp8_block", (40,), 3, 128, 256, device)
    offsets = torch.tensor([0, 1, 21, 40], dtype=torch.int32, device=device)
    cfg = CONFIGS["rows"]["fp8_block"].ints()
    args = (w, sw, None, offsets, None, 1, "fp8_block", 1, torch.float32, cfg)
    first, second = (_grouped_gemm_triton(a, sa, *args) for _ in range(2))
    assert torch.equal(first, second)
    # one expert alone, same config: same bits
    alone = _grouped_gemm_triton(a[1:21].contiguous(), sa[1:21].contiguous(), w[1:2].contiguous(), sw[1:2].contiguous(), None,
                                 torch.tensor([0, 20], dtype=torch.int32, device=device), None, 1, "fp8_block", 1, torch.float32, cfg)  # fmt: skip
    assert torch.equal(alone, first[1:21])


def test_public_function_masked_packed_gather(device):
    x, w = uneven((6, 256), seed=1).to(device), uneven((2, 64, 256), seed=2, spread=1).to(device)
    qx, qw = quantize(x, "mxfp8"), quantize_weight(w, "mxfp8")
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    y = grouped_gemm(qx, qw, offsets)
    ref = torch.cat([x[:2].float() @ w[0].float().T, x[2:].float() @ w[1].float().T])
    assert y.dtype == torch.bfloat16 and relative_error(y, ref) < 0.06
    masked = make_qtensor(qx.data.view(2, 3, 256), qx.scale.view(2, 3, 8), "mxfp8", weight=False)
    z = grouped_gemm(masked, qw, torch.tensor([3, 1], dtype=torch.int32, device=device), out_dtype=torch.float32)
    assert z.shape == (2, 3, 64) and relative_error(z[1, :1], x[3:4].float() @ w[1].float().T) < 0.06


def test_zero_rows_and_shapes_of_empty_results(device):
    w = quantize_weight(uneven((2, 64, 128)).to(device), "fp8_block")
    q = quantize(torch.zeros(0, 128, dtype=torch.bfloat16, device=device), "fp8_block")
    out = grouped_gemm(q, w, torch.zeros(3, dtype=torch.int32, device=device), out_dtype=torch.float16)
    assert out.shape == (0, 64) and out.dtype == torch.float16 and out.device.type == device.type


def _q(rows=4, k=128, fmt="fp8_block", dtype=torch.bfloat16):
    return quantize(torch.ones(rows, k, dtype=dtype), fmt)


def _w(e=2, n=64, k=128, fmt="fp8_block"):
    return quantize_weight(torch.ones(e, n, k, dtype=torch.bfloat16), fmt)


OFFS = torch.tensor([0, 2, 4], dtype=torch.int32)
ROUTED = Routing.from_topk(torch.tensor([[0, 1]] * 4, dtype=torch.int32), torch.ones(4, 2), 2)


@pytest.mark.parametrize(
    "call,error,text",
    [
        (lambda: grouped_gemm(_q().data, _w(), OFFS), TypeError, "a and w must both be QTensor or both be 16-bit tensors, got Tensor and QTensor"),
        (lambda: grouped_gemm(_q(fmt="mxfp8"), _w(), OFFS), ValueError, "a is mxfp8 and w is fp8_block; both must have one format"),
        (lambda: grouped_gemm(_w(), _w(), OFFS), ValueError, r"a must have activation blocks \(1, 128\), got \(128, 128\)"),
        (lambda: grouped_gemm(_q(k=256), _w(), OFFS), ValueError, "a has K = 256 and w has K = 128"),
        (lambda: grouped_gemm(_q(), _w(e=3), OFFS), ValueError, r"routing \(offsets of packed rows\) must be 1-D with 4 entries"),
        (lambda: grouped_gemm(_q(), _w(), OFFS.long()), TypeError, r"must be int32, got int64"),
        (lambda: grouped_gemm(_q(), _w(), OFFS, gather=True), ValueError, "gather needs a Routing"),
        (lambda: grouped_gemm(_q(), _w(), ROUTED), ValueError, "a row for each of the 8 entries of routing.order, got 4; gather=True"),
        (lambda: grouped_gemm(_q(), _w(), OFFS, bias=torch.zeros(2, 63)), ValueError, r"bias must have shape \(2, 64\)"),
        (lambda: grouped_gemm(_q(), _w(), OFFS, out_dtype=torch.float64), ValueError, "out_dtype must be one of"),
        (lambda: grouped_gemm(None, _w(), OFFS), TypeError, "a must be a QTensor or a torch.Tensor, got NoneType"),
        (lambda: grouped_gemm(_q(), replace(_w(), scale=torch.ones(1, 1, 1)), OFFS), ValueError, r"w.scale must have shape \(2, 1, 1\)"),
        (lambda: grouped_gemm(_q(), replace(_w(), segments=3), OFFS), ValueError, "w has 64 rows, which do not divide into segments = 3"),
        (lambda: grouped_gemm(_q(), _w(), None), TypeError, "routing must be a Routing"),
        (lambda: grouped_gemm(_q(), _w(), OFFS, bias=3.0), TypeError, "bias must be a torch.Tensor, got float"),
        (lambda: grouped_gemm(_q(), _w(), OFFS, config=(1, 2)), TypeError, "config must be a GroupedGemmConfig, got tuple"),
        (lambda: grouped_gemm(_q(), _w(), OFFS, config=GroupedGemmConfig(8, 64, 128, 4, 2, 1, True)), ValueError, "cannot run here: block_m must be"),
        (
            lambda: grouped_gemm(_q(), _w(), OFFS, impl="cuda"),
            ValueError,
            "impl must be one of 'triton', 'deep_gemm', 'cutlass', 'torch', got 'cuda'",
        ),
        (lambda: grouped_gemm(torch.ones(4, 128), torch.ones(2, 64, 128), OFFS), TypeError, "a must be bfloat16 or float16, got float32"),
        (
            lambda: grouped_gemm(torch.ones(4, 128).bfloat16().requires_grad_(), torch.ones(2, 64, 128).bfloat16(), OFFS),
            ValueError,
            "a requires grad, and this op is for inference only",
        ),
        (
            lambda: grouped_gemm(torch.ones(4, 256).bfloat16()[:, ::2], torch.ones(2, 64, 128).bfloat16(), OFFS),
            ValueError,
            r"a must have last stride 1, got shape \(4, 128\) with strides \(256, 2\)",
        ),
    ],
)
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=f"grouped_gemm: .*{text}"):
        call()


PROBLEMS = [
    GroupedGemmProblem(r, e, n, k, f)
    for r in (1, 8, 100, 1024, 12000, 131072)
    for e in (1, 8, 128, 512)
    for n, k in ((64, 128), (3072, 4096), (7168, 2048), (5760, 2880))
    for f in ("fp8_block", "mxfp8", "plain")
]


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_heuristic_is_always_legal(capability):
    arch = arch_of_capability(capability)
    for problem in PROBLEMS:
        assert is_legal(heuristic(problem, arch), problem, arch) is None, problem


def test_illegal_configs_say_why():
    arch, problem = arch_of_capability(120), GroupedGemmProblem(64, 4, 256, 512, "fp8_block")
    big = GroupedGemmConfig(128, 128, 128, 8, 4, 1, False)
    assert "bytes of shared memory, sm_120 has 101376" in str(is_legal(big, problem, arch))
    assert "block_k = 128" in str(is_legal(GroupedGemmConfig(64, 64, 64, 4, 2, 1, False), problem, arch))
    assert all(is_legal(c, problem, arch) is None for c in search_space(problem, arch)) and search_space(problem, arch)
    with pytest.raises(ValueError, match=r"config GroupedGemmConfig\(block_m=8.* cannot run here: block_m must be at least 16"):
        a, sa, w, sw = operands("fp8_block", (4,), 2, 64, 128, torch.device("cpu"))
        _grouped_gemm_triton(a, sa, w, sw, None, OFFS, None, 1, "fp8_block", 1, torch.float32, [8, 64, 128, 4, 3, 2, 1])
