"""Batched GEMM over heads: the kernel against the fp32 product of the dequantized operands, attention layouts, and the public function's checks."""

import pytest
import torch

from moe_ops import bmm, explain, quantize, quantize_weight
from moe_ops.core.arch import arch_of_capability
from moe_ops.core.formats import as_bytes
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm.bmm import _bmm_triton, bmm_into, bmm_ref
from moe_ops.gemm.bmm_config import W_SLOTS, few_parts, hopper_consumers, hopper_kernel, hopper_rows, hopper_slots, view_of_heads
from moe_ops.gemm.dense_config import DenseGemmConfig, DenseGemmProblem, heuristic, is_legal
from moe_ops.quant.fold import fold_weight

BOUND = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 5e-4}
MX_K = 128 if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10 else 32
BLOCK_K = {"fp8_block": 128, "mxfp8": MX_K, "plain": 64}
FORMATS = ("fp8_block", "mxfp8", "plain")


def config(which, fmt, split=1):
    if which == "swap":
        return DenseGemmConfig(16, 64, BLOCK_K[fmt], 4, 3, split, True)
    return DenseGemmConfig(64, 64, BLOCK_K[fmt], 4, 3, split, False)


def weight(fmt, heads, n, k, device):
    """(w, w_scale, format, rule for a 16-bit activation)."""
    w = uneven((heads, n, k), block=(128, 128) if fmt == "fp8_block" else (1, 32), seed=2, spread=2).to(device)
    if fmt == "plain":
        return w, None, fmt, "given"
    q = quantize_weight(w, fmt)
    return as_bytes(q.data), q.scale, fmt, q.format.rules[0]


CASES = [
    # (id, tokens, heads, N, K)
    ("one token", 1, 3, 128, 128),
    ("N off the block grid: the next head's rows lie in the tile", 5, 2, 80, 128),
    ("K off the block grid, tokens over one tile", 66, 2, 64, 160),
    ("one head", 17, 1, 64, 256),
]


@pytest.mark.parametrize("which,split", [("swap", 1), ("rows", 1), ("swap", 2)])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("inside", [True, False], ids=["quantized inside", "quantized before"])
@pytest.mark.parametrize("tokens,heads,n,k", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_matches_reference(device, which, split, fmt, inside, tokens, heads, n, k):
    w, sw, fmt, rule = weight(fmt, heads, n, k, device)
    a, sa = uneven((tokens, heads, k), seed=1).to(device), None
    if fmt != "plain" and not inside:
        q = quantize(a, fmt)
        a, sa, rule = as_bytes(q.data), q.scale, "given"
    args = (a, sa, w, sw, fmt, rule, torch.float32)
    assert relative_error(_bmm_triton(*args, config(which, fmt, split).ints()), bmm_ref(*args)) <= BOUND[torch.float32]


def test_reference_is_one_product_a_head(device):
    x, w = uneven((7, 3, 128), seed=1).to(device), uneven((3, 64, 128), seed=2).to(device)
    y = torch.stack([x[:, h].float() @ w[h].float().T for h in range(3)], 1)
    assert relative_error(bmm(x, w, out_dtype=torch.float32), y) < 1e-5
    for fmt in ("fp8_block", "mxfp8"):
        q = quantize_weight(w, fmt)
        assert relative_error(bmm(x, q), y) < 0.06 and relative_error(bmm(quantize(x, fmt), q), y) < 0.06
    w = torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    folded, report = fold_weight(quantize_weight(w, "mxfp8"))
    assert report.folded and relative_error(bmm(x, folded), bmm(x, w)) < 0.06


@pytest.mark.parametrize("fmt", FORMATS)
def test_layout_attention_strides_in_and_out(device, fmt):
    """LAYOUT: q_nope as a slice of (T, heads, nope + rope); heads first; one token expanded; the result into a slice of a wider buffer."""
    tokens, heads, n, k = 5, 3, 64, 128
    w, sw, fmt, rule = weight(fmt, heads, n, k, device)
    q = uneven((tokens, heads, k + 64), seed=1).to(device)
    first = uneven((heads, tokens, k), seed=2).to(device)
    cases = (q[..., :k], q[..., 64:], first.transpose(0, 1), q[:1, :, :k].expand(tokens, heads, k))
    for a in cases:
        rest = (None, w, sw, fmt, rule, torch.float32)
        assert torch.equal(_bmm_triton(a, *rest), _bmm_triton(a.contiguous(), *rest))
        assert relative_error(_bmm_triton(a, *rest), bmm_ref(a, *rest)) <= BOUND[torch.float32]
    room = torch.full((tokens, heads, n + 32), float("nan"), device=device)
    bmm_into(cases[0], None, w, sw, fmt, rule, room[..., 16 : 16 + n])
    assert relative_error(room[..., 16 : 16 + n], bmm_ref(cases[0], None, w, sw, fmt, rule, torch.float32)) <= BOUND[torch.float32]
    assert torch.isnan(room[..., :16]).all() and torch.isnan(room[..., 16 + n :]).all()
    turned = torch.full((heads, tokens, n), float("nan"), device=device)
    bmm_into(cases[0], None, w, sw, fmt, rule, turned.transpose(0, 1))
    assert torch.equal(turned.transpose(0, 1), room[..., 16 : 16 + n])


@pytest.mark.parametrize("layout", ["row_major", "mn_major"])
def test_activation_scales_in_both_stride_orders(device, layout):
    w, sw, fmt, _ = weight("fp8_block", 2, 64, 256, device)
    q = quantize(uneven((9, 2, 256), seed=1).to(device), fmt, layout=layout)
    args = (as_bytes(q.data), q.scale, w, sw, fmt, "given", torch.float32)
    assert relative_error(_bmm_triton(*args), bmm_ref(*args)) < 5e-4


@pytest.mark.parametrize("fmt", FORMATS)
def test_tail_a_tile_never_takes_the_next_heads_rows(device, fmt):
    """TAIL: N = 80 in tiles of 64: the second head's weights are NaN, the first head's result is not; NaN activations stay in their head."""
    w, sw, fmt, rule = weight(fmt, 2, 80, 128, device)
    w = w.clone()
    if fmt == "plain":
        w[1] = float("nan")
    else:
        w[1] = 0x7F
    a = uneven((3, 2, 128), seed=1).to(device)
    out = _bmm_triton(a, None, w, sw, fmt, rule, torch.float32, config("swap", fmt).ints())
    assert torch.isfinite(out[:, 0]).all() and torch.isnan(out[:, 1]).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens,heads", [(0, 2), (3, 0)])
def test_empty(device, fmt, tokens, heads):
    """EMPTY: no tokens, no heads or no columns; nothing is launched."""
    if fmt == "fp8_block":
        none = (torch.zeros(0, dtype=torch.float32, device=device).view(2, 0, 1), fmt, "fp32", torch.float32)
        x = torch.zeros(4, 2, 128, dtype=torch.bfloat16, device=device)
        assert _bmm_triton(x, None, torch.zeros(2, 0, 128, dtype=torch.uint8, device=device), *none).shape == (4, 2, 0)
    w = torch.zeros(heads, 64, 128, dtype=torch.bfloat16, device=device)
    x = torch.zeros(tokens, heads, 128, dtype=torch.bfloat16, device=device)
    if fmt == "plain" or heads:
        out = bmm(x, w if fmt == "plain" else quantize_weight(w, fmt), out_dtype=torch.float16)
        assert out.shape == (tokens, heads, 64) and out.dtype == torch.float16


@pytest.mark.parametrize("n,k", [(512, 128), (128, 2048)], ids=["few", "ring"])
def test_empty_launches_no_gluon_kernel(monkeypatch, n, k):
    """EMPTY: no tokens, no heads, whatever the strides, where Hopper's kernels would be taken; a grid of 0 is the driver's error."""
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    for module in ("gemm.bmm_few", "gemm.bmm_hopper", "core.launch"):
        monkeypatch.setattr(f"moe_ops.{module}.launch", lambda *args, **meta: pytest.fail(f"launched {args[1]}"))
    for tokens, heads in ((0, 3), (3, 0), (0, 0)):
        first = torch.zeros(heads, tokens, k, dtype=torch.bfloat16)
        w, sw = torch.zeros(heads, n, k, dtype=torch.uint8), torch.ones(heads, n // 128, k // 128)
        expanded = torch.zeros(1, heads, k, dtype=torch.bfloat16).expand(5, heads, k)[:tokens]
        for a in (first.transpose(0, 1), first.transpose(0, 1).contiguous(), expanded):
            assert _bmm_triton(a, None, w, sw, "fp8_block", "fp32", torch.bfloat16).shape == (tokens, heads, n)
            q = (a.to(torch.uint8), torch.ones(tokens, heads, k // 128))
            assert _bmm_triton(*q, w, sw, "fp8_block", "given", torch.bfloat16).shape == (tokens, heads, n)


def test_out_and_same_bits(device):
    x, w = uneven((6, 2, 128), seed=1).to(device), quantize_weight(uneven((2, 64, 128), seed=2).to(device), "mxfp8")
    out = torch.empty(6, 2, 64, dtype=torch.float16, device=device)
    assert bmm(x, w, out=out) is out and torch.equal(out, bmm(x, w, out_dtype=torch.float16))
    assert relative_error(bmm(x, w, impl="torch"), out) < 5e-3


@pytest.mark.parametrize("fmt,inside", [("fp8_block", False), ("fp8_block", True), ("mxfp8", True), ("plain", False)])
def test_opcheck(device, fmt, inside):
    w, sw, fmt, rule = weight(fmt, 2, 64, 128, device)
    a, sa = uneven((5, 2, 128), seed=1).to(device), None
    if fmt != "plain" and not inside:
        q = quantize(a, fmt)
        a, sa, rule = as_bytes(q.data), q.scale, "given"
    args = (a, sa, w, sw, fmt, rule)
    torch.library.opcheck(torch.ops.moe_ops.bmm.default, (*args, torch.bfloat16, None))
    torch.library.opcheck(torch.ops.moe_ops.bmm_out.default, (*args, torch.zeros(5, 2, 64, device=device), None))


def test_compiles_once_for_any_number_of_tokens(device):
    w = quantize_weight(uneven((2, 64, 128), seed=2).to(device), "fp8_block")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: bmm(x[..., :128], w), backend=backend, fullgraph=True, dynamic=True)
    for tokens in (5, 8, 40):
        x = uneven((tokens, 2, 160), seed=tokens).to(device)
        assert torch.equal(compiled(x), bmm(x[..., :128], w))
    assert len(graphs) == 1
    torch._dynamo.reset()


def _x(t=4, h=2, k=128):
    return torch.ones(t, h, k, dtype=torch.bfloat16)


def _w(h=2, n=64, k=128, fmt="fp8_block"):
    return quantize_weight(torch.ones(h, n, k, dtype=torch.bfloat16), fmt)


@pytest.mark.parametrize(
    "wrong,error,text",
    [
        (lambda: bmm(_x()[0], _w()), ValueError, "a must be 3-D"),
        (lambda: bmm(_x(), _w()[0]), ValueError, "w must be 3-D"),
        (lambda: bmm(_x(h=3), _w()), ValueError, "a has 3 heads and w has 2; they must be equal"),
        (lambda: bmm(_x(k=256), _w()), ValueError, "a has K = 256 and w has K = 128"),
        (lambda: bmm(_x().float(), _w()), TypeError, "a must be bfloat16 or float16, got float32"),
        (lambda: bmm(quantize(_x(), "mxfp8"), _w()), ValueError, "a is mxfp8 and w is fp8_block"),
        (lambda: bmm(_x(), _x(2, 64).transpose(1, 2)), ValueError, "a has K = 128 and w has K = 64"),
        (lambda: bmm(_x(), _x(2, 128).transpose(1, 2)), ValueError, "w must be contiguous"),
        (lambda: bmm(_x(k=256)[..., ::2], _w()), ValueError, "a must have last stride 1"),
        (lambda: bmm(_x(), _w(), out=torch.zeros(4, 2, 63)), ValueError, r"out must have shape \(4, 2, 64\)"),
        (lambda: bmm(_x(), _w(), out=torch.zeros(4, 1, 64).expand(4, 2, 64)), ValueError, "out must not be expanded"),
        (lambda: bmm(_x(), _w(), out_dtype=torch.int8), ValueError, "out_dtype must be one of"),
        (lambda: bmm(_x(), _w(), config=3), TypeError, "config must be a DenseGemmConfig, got int"),
        (lambda: bmm(_x(), _w(), config=DenseGemmConfig(16, 256, 128, 4, 2, 1, True)), ValueError, "block_n must be between 16 and 128"),
        (lambda: bmm(_x(h=1), _w(h=1), config=DenseGemmConfig(16, 64, 128, 4, 2, 1, True, 1)), ValueError, "programs must be 0"),
        (lambda: bmm(_x(), _w(), impl="cuda"), ValueError, "impl must be one of"),
        (lambda: bmm(_x().requires_grad_(), _w()), ValueError, "a requires grad"),
    ],
)
def test_bad_input_is_named(wrong, error, text):
    with pytest.raises(error, match=f"bmm: .*{text}"):
        wrong()


def test_one_head_takes_no_config_of_the_kernel_with_programs():
    """One head is one product, and yet not `dense_gemm`'s: its launcher has the plain kernel alone."""
    arch = arch_of_capability(90)
    for n in (576, 17024, 24576):
        for tokens in (1, 16, 65, 128):
            assert heuristic(DenseGemmProblem(tokens, 1, n, 512, "fp8_block"), arch).programs == 0
            assert heuristic(DenseGemmProblem(tokens, 1, n, 512, "fp8_block", aligned=True), arch).programs > 0
            plan = explain("bmm", rows=tokens, n=n, k=512, groups=1, device="sm90")["triton"].plan
            assert "programs=0" in plan


def test_which_gluon_kernel():
    arch = arch_of_capability(90)
    assert hopper_kernel("fp8_block", 32, 128, 512, 128, arch) == "few" and hopper_kernel("fp8_block", 33, 128, 512, 128, arch) == "ring"
    assert hopper_kernel("fp8_block", 1, 128, 128, 4096, arch) == "ring"  # too many blocks for one program
    for other in (
        (64, 128, 384, 128),
        (64, 128, 256, 256),
        (1, 128, 80, 128),
        (1, 128, 512, 64),
        (1, 128, 0, 128),
        (64, 128, 0, 128),
        (1, 2**22, 512, 128),
    ):
        assert hopper_kernel("fp8_block", *other, arch) is None
    assert hopper_kernel("mxfp8", 1, 128, 512, 128, arch) is None and hopper_kernel("fp8_block", 1, 128, 512, 128, arch_of_capability(100)) is None
    assert (few_parts(128, 512, arch), few_parts(16, 512, arch), few_parts(128, 128, arch)) == (2, 4, 1)


@pytest.mark.parametrize(
    "tokens,k,dtype,rule,out_dtype,rows",
    [
        (64, 512, torch.bfloat16, "fp32", torch.bfloat16, 64),
        (65, 512, torch.bfloat16, "fp32", torch.float16, 192),
        (65, 512, torch.float16, "fp32", torch.float16, 128),
        (65, 512, torch.bfloat16, "fp32", torch.float32, 128),
        (65, 128, torch.bfloat16, "fp32", torch.bfloat16, 128),
        (512, 1024, torch.bfloat16, "fp32", torch.bfloat16, 128),
        (512, 256, torch.bfloat16, "fp32", torch.bfloat16, 128),
        (512, 512, torch.bfloat16, "folded", torch.bfloat16, 192),
        (512, 512, torch.float16, "folded", torch.bfloat16, 128),
        (128, 512, torch.uint8, "given", torch.bfloat16, 128),
        (129, 512, torch.uint8, "given", torch.bfloat16, 192),
        (129, 512, torch.uint8, "given", torch.float32, 128),
        (129, 128, torch.uint8, "given", torch.bfloat16, 128),
    ],
)
def test_rows_and_slots_of_the_gluon_kernel(tokens, k, dtype, rule, out_dtype, rows):
    assert hopper_rows(tokens, k, dtype, rule, out_dtype) == rows
    assert rows == 64 or rows == 64 * hopper_consumers(tokens, k, dtype, rule, out_dtype)
    slots = hopper_slots(rows, dtype.itemsize, out_dtype.itemsize)
    used = W_SLOTS * 128 * 128 + rows * (slots * (128 * dtype.itemsize + 4 * (rule == "given")) + 128 * out_dtype.itemsize)
    assert slots >= 2 and used <= arch_of_capability(90).smem
    unquantized = rule != "given"
    plan = explain("bmm", rows=tokens, n=128, k=k, groups=8, device="sm90", unquantized=unquantized, out_dtype=out_dtype)["triton"].plan
    if dtype == torch.float16:
        assert f"192 rows an item ({rows} of float16)" in plan
    else:
        assert f"{rows} rows an item" in plan


@pytest.mark.parametrize(
    "a,view",
    [
        (torch.empty(5, 3, 128, dtype=torch.bfloat16), ([5, 384], [384, 1], 0, 128)),
        (torch.empty(5, 3, 192, dtype=torch.bfloat16)[..., 64:], ([5, 512], [576, 1], 0, 192)),
        (torch.empty(3, 5, 128, dtype=torch.bfloat16).transpose(0, 1), ([15, 128], [128, 1], 5, 0)),
        (torch.empty(3, 9, 136, dtype=torch.bfloat16)[:, :5, :128].transpose(0, 1), ([23, 128], [136, 1], 9, 0)),
        (torch.empty(5, 1, 128, dtype=torch.bfloat16).expand(5, 3, 128), ([5, 128], [128, 1], 0, 0)),
        (torch.empty(5, 1, 160, dtype=torch.bfloat16)[..., :128], ([5, 128], [160, 1], 0, 0)),
        (torch.empty(1, 3, 128, dtype=torch.bfloat16), ([3, 128], [128, 1], 1, 0)),
        (torch.empty(3, 4096, 128, dtype=torch.bfloat16)[:, :1].transpose(0, 1), ([3, 128], [4096 * 128, 1], 1, 0)),
        (torch.empty(1, 3, 128, dtype=torch.bfloat16).expand(5, 3, 128), None),  # all tokens are one
        (torch.empty(5, 3, 132, dtype=torch.bfloat16)[..., :128], None),  # heads off the grid
        (torch.empty(5, 3, 136, dtype=torch.uint8)[..., :128], None),
        (torch.empty(5, 3, 144, dtype=torch.uint8)[..., :128], ([5, 416], [432, 1], 0, 144)),
        (torch.empty(5, 3, 256, dtype=torch.bfloat16)[..., 4:132], None),  # the first row off the grid
    ],
)
def test_heads_as_one_matrix(a, view):
    """LAYOUT: heads beside each other, one after another, all the same one; what TMA cannot take is left to the other kernel."""
    assert view_of_heads(a) == view
    if view is not None:  # every row that the kernel addresses is the head's own
        shape, strides, rows, columns = view
        for t in {0, a.shape[0] - 1}:
            for h in {0, a.shape[1] - 1}:
                assert (t + h * rows) * strides[0] + h * columns == t * a.stride(0) * (a.shape[0] > 1) + h * a.stride(1)
                assert t + h * rows < shape[0] and h * columns + a.shape[2] <= shape[1]


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_heuristic_is_legal_everywhere(capability):
    arch = arch_of_capability(capability)
    for heads in (1, 16, 128):
        for n, k in ((512, 128), (128, 512), (80, 96)):
            for tokens in (1, 16, 17, 32, 64, 512, 4096):
                for fmt in FORMATS:
                    problem = DenseGemmProblem(tokens, heads, n, k, fmt, fmt != "plain")
                    assert is_legal(heuristic(problem, arch), problem, arch) is None, problem


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "mxfp8 folded", "plain"])
@pytest.mark.parametrize("tokens", [1, 32, 128, 512])
@pytest.mark.parametrize("n,k", [(512, 128), (128, 512)], ids=["k_b_proj", "v_b_proj"])
def test_absorbed_mla_projections(n, k, tokens, fmt):
    heads = 128
    g = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(tokens, heads, k + 64, device="cuda", dtype=torch.bfloat16, generator=g)[..., :k]
    w = torch.randn(heads, n, k, device="cuda", dtype=torch.bfloat16, generator=g)
    if fmt != "plain":
        w = quantize_weight(w, fmt.removesuffix(" folded"))
        w = fold_weight(w)[0] if fmt.endswith("folded") else w
    out = bmm(x, w)
    assert relative_error(out, bmm(x, w, out_dtype=torch.float32, impl="torch")) <= 3e-3
    assert torch.equal(out.view(torch.int16), bmm(x, w).view(torch.int16))


@pytest.mark.gpu
def test_graph_no_sync_no_allocation():
    """GRAPH: capture and replay over changed activations equal eager bit for bit; the out form allocates nothing and never waits."""
    x = torch.randn(32, 128, 128, device="cuda", dtype=torch.bfloat16)
    w = quantize_weight(torch.randn(128, 512, 128, device="cuda", dtype=torch.bfloat16), "fp8_block")
    out = torch.empty(32, 128, 512, device="cuda", dtype=torch.bfloat16)
    bmm(x, w, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        bmm(x, w, out=out)
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert after == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bmm(x, w, out=out)
    x.copy_(torch.randn_like(x))
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out.view(torch.int16), bmm(x, w).view(torch.int16))


def e4m3_bytes(x):
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def test_folding_in_16_bits_has_the_bytes_of_fp32():
    """What the Hopper kernels' "folded" computes by pairs: every e4m3 by every power of two in fp16; every bf16 that a group can hold in bf16."""
    powers = torch.arange(128, dtype=torch.int32).mul(1 << 23).view(torch.float32)[:, None]  # 0, 2^-126 .. 1
    q = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(e4m3_bytes(q.half() * powers.half()), e4m3_bytes(q.float() * powers))
    amax = torch.arange(0x7F80, dtype=torch.int32)
    wide = amax << 16
    byte = ((wide >> 23) - 8 + ((wide & 0x7FFFFF) > 0x600000).int()).clamp(0, 254)
    field = ((amax + 0x1F) & 0x7F80).clamp(min=0x0400)
    assert torch.equal(field, (byte + 8) << 7)
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for b in byte.unique().tolist():
        fits = x[(x.int() & 0x7FFF) <= int(amax[byte == b].max())].view(torch.bfloat16)
        inverse = torch.tensor((254 - b) << 7, dtype=torch.int16).view(torch.bfloat16)
        assert torch.equal(e4m3_bytes((fits * inverse).float()), e4m3_bytes(fits.float() * inverse.float()))
