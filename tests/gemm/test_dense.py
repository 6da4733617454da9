"""Dense GEMM: the kernels against the fp32 product of the dequantized operands, splits against each other, and the public function's checks."""

from dataclasses import replace

import pytest
import torch
import triton

from moe_ops import dense_gemm, quantize, quantize_weight
from moe_ops.core.arch import arch_of_capability
from moe_ops.core.formats import as_bytes
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm.dense import _dense_gemm_triton, dense_gemm_into, dense_gemm_ref, dense_gemm_workspace
from moe_ops.gemm.dense_config import (
    DenseGemmConfig,
    DenseGemmProblem,
    heuristic,
    is_legal,
    quantizes_inside,
    search_space,
    shared_bytes,
)
from moe_ops.gemm.dense_roles import roles_reason
from moe_ops.quant.fold import fold_weight

BOUND = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 5e-4}
MX_K = 128 if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10 else 32
BLOCK_K = {"fp8_block": 128, "mxfp8": MX_K, "plain": 64}
FORMATS = ("fp8_block", "mxfp8", "plain")


def config(which, fmt, split=1):
    if which == "swap":
        return DenseGemmConfig(16, 64, BLOCK_K[fmt], 4, 3, split, True)
    return DenseGemmConfig(64, 64, BLOCK_K[fmt], 4, 3, split, False)


def operands(fmt, m, n, k, device, fused=False):
    """(a, a_scale, w, w_scale, format, rule) as the op takes them."""
    x = uneven((m, k), seed=1).to(device)
    w = uneven((n, k), block=(128, 128) if fmt == "fp8_block" else (1, 32), seed=2, spread=2).to(device)
    if fmt == "plain":
        return x, None, w, None, fmt, "given"
    qw = quantize_weight(w, fmt)
    weight = (as_bytes(qw.data), qw.scale, fmt)
    if fused:
        return x, None, *weight, qw.format.rules[0]
    qx = quantize(x, fmt)
    return as_bytes(qx.data), qx.scale, *weight, "given"


def call(launcher, parts, bias=None, residual=None, dtype=torch.float32, cfg=None):
    a, sa, w, sw, fmt, rule = parts
    return launcher(a, sa, w, sw, bias, residual, fmt, rule, dtype, None if cfg is None else cfg.ints())


CASES = [
    # (id, M, N, K)
    ("one row", 1, 128, 256),
    ("N off the block grid, as 576 is off 128", 5, 80, 128),
    ("K off the block grid, rows over one tile", 65, 64, 576),
    ("K below one block", 3, 192, 96),
    ("K not a multiple of 16: no tensor descriptor", 17, 64, 136),
]


@pytest.mark.parametrize("which,split", [("swap", 1), ("swap", 3), ("rows", 2)])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("m,n,k", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_matches_reference(device, which, split, fmt, m, n, k):
    if fmt == "mxfp8" and k % 32:
        k = 160
    parts = operands(fmt, m, n, k, device)
    g = torch.Generator().manual_seed(3)
    bias, residual = torch.randn(n, generator=g).to(device), torch.randn(m, n, generator=g).bfloat16().to(device)
    out = call(_dense_gemm_triton, parts, bias, residual, cfg=config(which, fmt, split))
    assert relative_error(out, call(dense_gemm_ref, parts, bias, residual)) <= BOUND[torch.float32]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("k", [128, 384, 576])
def test_splitk_any_split_is_as_good_as_none(device, fmt, k):
    """SPLITK: every split, more splits than blocks of K too, in memory that held NaN; bias, residual and rounding come after the whole sum."""
    m, n = 3, 96
    parts = operands(fmt, m, n, k, device)
    bias, residual = torch.randn(n).to(device), torch.randn(m, n).to(device)
    exact = call(dense_gemm_ref, parts, bias, residual)
    whole = call(_dense_gemm_triton, parts, bias, residual, cfg=config("swap", fmt))
    for split in (2, 3, 7, 16):
        out = call(_dense_gemm_triton, parts, bias, residual, cfg=config("swap", fmt, split))
        assert relative_error(out, exact) <= relative_error(whole, exact) + 1e-5
        again = call(_dense_gemm_triton, parts, bias, residual, cfg=config("swap", fmt, split))
        assert torch.equal(out, again)
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(call(_dense_gemm_triton, parts, bias, residual, dtype, config("swap", fmt, split)), out.to(dtype))


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("fmt,k", [("fp8_block", 576), ("mxfp8", 160)])
def test_quantizing_inside_is_quantizing_before(device, fmt, k, split):
    """Up to 16 rows in the GEMM's kernel, more by the quantizer's; an infinity and a NaN stay in their own row."""
    for m in (1, 16, 20):
        inside, before = operands(fmt, m, 80, k, device, fused=True), operands(fmt, m, 80, k, device)
        cfg = config("swap", fmt, split)
        assert relative_error(call(_dense_gemm_triton, inside, cfg=cfg), call(_dense_gemm_triton, before, cfg=cfg)) <= 1e-6
        assert relative_error(call(_dense_gemm_triton, inside, cfg=cfg), call(dense_gemm_ref, inside)) <= BOUND[torch.float32]
    x = inside[0].clone()
    x[3, 7], x[5, 0] = float("inf"), float("nan")
    out = call(_dense_gemm_triton, (x[:16], *inside[1:]), cfg=cfg)
    assert torch.isfinite(out[[i for i in range(16) if i != 5]]).all() and torch.isnan(out[5]).all()


def test_folded_weights_take_folded_activations(device):
    w, x = uneven((80, 256), seed=2).to(device), uneven((5, 256), seed=1).to(device)
    folded, report = fold_weight(quantize_weight(w, "mxfp8"))
    assert report.folded
    args = (x, None, as_bytes(folded.data), folded.scale, None, None, "fp8_block", "folded", torch.float32)
    assert relative_error(_dense_gemm_triton(*args), dense_gemm_ref(*args)) <= BOUND[torch.float32]
    assert relative_error(dense_gemm(x, folded, out_dtype=torch.float32), dense_gemm(x, quantize_weight(w, "mxfp8"), out_dtype=torch.float32)) < 1e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for Blackwell on machines without a GPU")
@pytest.mark.skipif(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8), reason="Triton's interpreter has tl.dot_scaled from 3.8 on")
@pytest.mark.parametrize("m,fused", [(5, False), (5, True), (70, False)])
def test_block_scaled_instruction_in_the_interpreter(monkeypatch, m, fused):
    """The path of SM100: the instruction applies both E8M0 scales; ragged K."""
    monkeypatch.setenv("MOE_OPS_ARCH", "100")
    parts = operands("mxfp8", m, 192, 416, torch.device("cpu"), fused)
    assert relative_error(call(_dense_gemm_triton, parts), call(dense_gemm_ref, parts)) < 5e-4


@pytest.mark.parametrize("fmt", FORMATS)
def test_layout_strided_operands_and_outputs(device, fmt):
    """LAYOUT: a column slice, every other row, one row expanded, a base off 16 bytes; out and residual inside larger buffers, residual = out."""
    m, n, k = 6, 64, 256
    if fmt == "plain":
        w = uneven((n, k), seed=2).to(device)
        weight = (w, None, fmt, "given")
    else:
        q = quantize_weight(uneven((n, k), seed=2).to(device), fmt)
        weight = (as_bytes(q.data), q.scale, fmt, q.format.rules[0])
    big = uneven((2 * m, k + 72), seed=1).to(device)
    for x in (big[:m, 64 : 64 + k], big[::2, :k], big[:1, :k].expand(m, k), big[:m, 1 : 1 + k]):
        assert torch.equal(call(_dense_gemm_triton, (x, None, *weight)), call(_dense_gemm_triton, (x.contiguous(), None, *weight)))
    x = big[:m, :k]
    room = torch.full((m, n + 40), float("nan"), device=device)
    out = room[:, 8 : 8 + n]
    out.copy_(torch.randn(m, n))
    wanted = call(dense_gemm_ref, (x, None, *weight), residual=out.clone())
    dense_gemm_into(x, None, *weight[:2], None, out, *weight[2:], out, None, config("swap", fmt, 2).ints())
    assert relative_error(out, wanted) <= BOUND[torch.float32]
    assert torch.isnan(room[:, :8]).all() and torch.isnan(room[:, 8 + n :]).all()


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("fmt,k", [("fp8_block", 576), ("fp8_block", 200), ("mxfp8", 224), ("plain", 200)])
def test_tail_nothing_beyond_k_or_m_is_read(device, fmt, k, split):
    """TAIL: K off the block grid inside a buffer of NaN, with NaN rows below: the result is that of the activation alone."""
    for m, which in ((1, "swap"), (63, "rows")):
        clean = uneven((m, k), seed=1).to(device)
        room = torch.full((m + 3, k + 136), float("nan"), dtype=clean.dtype, device=device)
        room[:m, 64 : 64 + k] = clean
        parts, cfg = operands(fmt, m, 80, k, device, fused=fmt != "plain"), config(which, fmt, split)
        got = call(_dense_gemm_triton, (room[:m, 64 : 64 + k], *parts[1:]), cfg=cfg)
        assert torch.equal(got, call(_dense_gemm_triton, (clean, *parts[1:]), cfg=cfg)) and torch.isfinite(got).all()


@pytest.mark.parametrize("layout", ["row_major", "mn_major"])
def test_activation_scales_in_both_stride_orders(device, layout):
    x, w = uneven((9, 256), seed=1).to(device), quantize_weight(uneven((64, 256), seed=2).to(device), "fp8_block")
    q = quantize(x, "fp8_block", layout=layout)
    parts = (as_bytes(q.data), q.scale, as_bytes(w.data), w.scale, "fp8_block", "given")
    assert relative_error(call(_dense_gemm_triton, parts), call(dense_gemm_ref, parts)) < 5e-4


@pytest.mark.parametrize("fmt", FORMATS)
def test_workspace_is_enough_for_every_row_count(device, fmt):
    n, k = 64, 1024
    w = uneven((n, k), seed=2).to(device)
    w = w if fmt == "plain" else quantize_weight(w, fmt)
    data, scale = (w, None) if fmt == "plain" else (as_bytes(w.data), w.scale)
    workspace = dense_gemm_workspace(40, w)
    rule = "given" if fmt == "plain" else w.format.rules[0]
    for m in (1, 17, 40):
        x = uneven((m, k), seed=m).to(device)
        out = torch.full((m, n), float("nan"), device=device)
        dense_gemm_into(x, None, data, scale, None, None, fmt, rule, out, workspace)
        assert relative_error(out, dense_gemm_ref(x, None, data, scale, None, None, fmt, rule, torch.float32)) <= BOUND[torch.float32]
    with pytest.raises(ValueError, match="dense_gemm: workspace has 3 bytes, this call needs"):
        dense_gemm_into(x, None, data, scale, None, None, fmt, rule, out, workspace[:3], config("rows", fmt, 2).ints())
    with pytest.raises(ValueError, match="dense_gemm: workspace must start at a multiple of 16 bytes"):
        room = torch.zeros(workspace.numel() + 1, dtype=torch.uint8, device=device)
        dense_gemm_into(x, None, data, scale, None, None, fmt, rule, out, room[1:], config("rows", fmt, 1 + (fmt == "plain")).ints())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [1, 40])
def test_a_bad_workspace_is_an_error_on_every_device_in_the_same_words(device, fmt, rows):
    """The reference uses no workspace, and refuses what the launcher refuses."""
    w, x = uneven((64, 1024), seed=2).to(device), uneven((rows, 1024), seed=1).to(device)
    w = w if fmt == "plain" else quantize_weight(w, fmt)
    parts = (as_bytes(w.data), w.scale, None, None, fmt, w.format.rules[0]) if fmt != "plain" else (w, None, None, None, fmt, "given")
    out, room = torch.zeros(rows, 64, device=device), dense_gemm_workspace(40, w)
    off = torch.zeros(room.numel() + 1, dtype=torch.uint8, device=device)[1:]
    for bad, text in ((room[:3], "workspace has 3 bytes, this call needs"), (off, "workspace must start at a multiple of 16 bytes")):
        with pytest.raises(ValueError, match=f"dense_gemm: {text}") as public:
            dense_gemm(x, w, out=out, workspace=bad)
        with pytest.raises(ValueError) as launcher:
            dense_gemm_into(x, None, *parts, out, bad)
        assert str(public.value) == str(launcher.value)
    assert dense_gemm(x, w, out=out, workspace=room) is out


@pytest.mark.parametrize("kind", ["quantized", "16-bit activation", "plain"])
def test_public_function(device, kind):
    x, w = uneven((6, 256), seed=1).to(device), uneven((80, 256), seed=2).to(device)
    bias, residual = torch.randn(80).to(device), torch.randn(6, 80).bfloat16().to(device)
    exact = x.float() @ w.float().T + bias + residual.float()
    a = quantize(x, "mxfp8") if kind == "quantized" else x
    b = w if kind == "plain" else quantize_weight(w, "mxfp8")
    y = dense_gemm(a, b, bias=bias, residual=residual)
    assert y.dtype == torch.bfloat16 and relative_error(y, exact) < 0.06
    out = torch.empty(6, 80, dtype=torch.float16, device=device)
    assert dense_gemm(a, b, bias=bias, residual=residual, out=out, workspace=dense_gemm_workspace(6, b)) is out and relative_error(out, y) < 5e-3
    assert relative_error(dense_gemm(a, b, bias=bias, residual=residual, impl="torch"), y) < 5e-3


@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_rows_and_zero_columns(device, fmt):
    """EMPTY: shapes and dtypes of empty results; nothing is launched."""
    make = (lambda w: w) if fmt == "plain" else (lambda w: quantize_weight(w, fmt))
    x = torch.zeros(0, 128, dtype=torch.bfloat16, device=device)
    out = dense_gemm(x, make(uneven((64, 128)).to(device)), out_dtype=torch.float16)
    assert out.shape == (0, 64) and out.dtype == torch.float16 and out.device.type == device.type
    parts = (x, None, torch.zeros(64, 128, dtype=torch.bfloat16, device=device), None, "plain", "given")
    assert call(_dense_gemm_triton, parts).shape == (0, 64)


def _x(m=4, k=128, dtype=torch.bfloat16):
    return torch.ones(m, k, dtype=dtype)


def _w(n=64, k=128, fmt="fp8_block"):
    return quantize_weight(torch.ones(n, k, dtype=torch.bfloat16), fmt)


@pytest.mark.parametrize(
    "wrong,error,text",
    [
        (lambda: dense_gemm(quantize(_x(), "fp8_block"), _x(64)), TypeError, "a and w must both be QTensor or both be 16-bit tensors"),
        (lambda: dense_gemm(quantize(_x(), "mxfp8"), _w()), ValueError, "a is mxfp8 and w is fp8_block; both must have one format"),
        (lambda: dense_gemm(_w(), _w()), ValueError, r"a must have activation blocks \(1, 128\), got \(128, 128\)"),
        (lambda: dense_gemm(_x(dtype=torch.float32), _w()), TypeError, "a must be bfloat16 or float16, got float32"),
        (lambda: dense_gemm(_x(), quantize(_x(64), "fp8_block")), ValueError, r"w must have weight blocks \(128, 128\), got \(1, 128\)"),
        (lambda: dense_gemm(_x(k=256), _w()), ValueError, "a has K = 256 and w has K = 128"),
        (lambda: dense_gemm(_x(k=0), _x(64, k=0)), ValueError, "K must not be 0, got K = 0"),
        (lambda: dense_gemm(_x().half(), _x(64)), TypeError, "w must have a's dtype torch.float16, got torch.bfloat16"),
        (lambda: dense_gemm(_x()[None], _w()), ValueError, "a must be 2-D, got shape"),
        (lambda: dense_gemm(_x(), _w(), bias=torch.zeros(63)), ValueError, r"bias must have shape \(64\)"),
        (lambda: dense_gemm(_x(), _w(), residual=torch.zeros(3, 64)), ValueError, r"residual must have shape \(4, 64\)"),
        (lambda: dense_gemm(_x(), _w(), residual=torch.zeros(64, 4).T), ValueError, "residual must have last stride 1"),
        (lambda: dense_gemm(_x(), _w(), out_dtype=torch.float64), ValueError, "out_dtype must be one of"),
        (lambda: dense_gemm(_x(), _w(), out=torch.zeros(4, 63)), ValueError, r"out must have shape \(4, 64\)"),
        (lambda: dense_gemm(_x(), _w(), workspace=torch.zeros(9, dtype=torch.uint8)), ValueError, "workspace is for calls with out"),
        (lambda: dense_gemm(_x(), _w(), out=torch.zeros(4, 64), workspace=torch.zeros(9)), TypeError, "workspace must be uint8, got float32"),
        (lambda: dense_gemm(_x(), _w(), out=torch.zeros(4, 64), workspace=9), TypeError, "workspace must be a torch.Tensor, got int"),
        (lambda: dense_gemm(_x(), _w(), out=torch.zeros(1, 64).expand(4, 64)), ValueError, r"out must not be expanded .*, got shape \(4, 64\)"),
        (lambda: dense_gemm(_x(), _w(), out=torch.zeros(999).as_strided((4, 64), (63, 1))), ValueError, "overlap itself"),
        (lambda: dense_gemm(x := torch.ones(4, 64).bfloat16(), torch.ones(64, 64).bfloat16(), out=x), ValueError, "out must not be a"),
        (lambda: dense_gemm_workspace(-1, _w()), ValueError, "rows must be between 0 and"),
        (lambda: dense_gemm_workspace(4, 64), TypeError, "w must be a torch.Tensor, got int"),
        (lambda: dense_gemm_workspace(4, _x()[None]), ValueError, "w must be 2-D"),
        (lambda: dense_gemm(_x(), replace(_w(), layout="ue8m0_packed")), ValueError, "scales of w must be row_major, got ue8m0_packed"),
        (lambda: dense_gemm(_x(), replace(_w(), scale=torch.ones(2, 2))), ValueError, r"w.scale must have shape \(1, 1\)"),
        (
            lambda: dense_gemm(_x(), quantize_weight(_x(384), "fp8_block", segments=2)),
            ValueError,
            "segments = 2 of 192 rows; they",
        ),
        (lambda: dense_gemm(_x(), _w(), config=(1, 2)), TypeError, "config must be a DenseGemmConfig, got tuple"),
        (
            lambda: dense_gemm(_x(), _w(), config=DenseGemmConfig(8, 64, 128, 4, 2, 1, True)),
            ValueError,
            "cannot run here: block_m must be",
        ),
        (lambda: dense_gemm(_x(), _w(), config=DenseGemmConfig(16, 64, 128, 4, 2, 65, True)), ValueError, "split must be between 1 and 64, got 65"),
        (lambda: dense_gemm(_x(), _w(), impl="cuda"), ValueError, "impl must be one of .*got 'cuda'"),
        (lambda: dense_gemm(_x().requires_grad_(), _w()), ValueError, "a requires grad, and this op is for inference only"),
        (lambda: dense_gemm(torch.ones(4, 256).bfloat16()[:, ::2], _w()), ValueError, r"a must have last stride 1, got shape \(4, 128\)"),
    ],
)
def test_bad_input_is_named(wrong, error, text):
    with pytest.raises(error, match=f"dense_gemm(_workspace)?: .*{text}"):
        wrong()


LINEARS = [(1536, 7168), (576, 7168), (2112, 7168), (24576, 1536), (7168, 16384), (18432, 7168), (7168, 18432), (9216, 4096), (4096, 8192), (64, 96)]


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_heuristic_is_legal_everywhere(capability):
    arch = arch_of_capability(capability)
    for n, k in LINEARS:
        for m in (1, 8, 16, 17, 64, 128, 4096):
            for fmt in FORMATS:
                for fused in (False, True)[: 1 + (fmt != "plain" and m <= 16)]:
                    problem = DenseGemmProblem(m, 1, n, k, fmt, fused)
                    cfg = heuristic(problem, arch)
                    assert is_legal(cfg, problem, arch) is None, (problem, cfg)
                    assert shared_bytes(cfg, problem) <= arch.smem
                    assert DenseGemmConfig.of_ints(cfg.ints()) == cfg


def test_heuristic_fills_the_machine_at_few_rows():
    """Few columns and a long K: one program a column tile would leave most multiprocessors idle."""
    arch = arch_of_capability(90)
    for n, k in LINEARS[:-1]:
        one, some, most = (DenseGemmProblem(rows, 1, n, k, "fp8_block", quantizes_inside(rows, n)) for rows in (1, 13, 16))
        cfg = heuristic(one, arch)
        assert -(-n // cfg.block_n) * cfg.split >= arch.sms, (n, k, cfg)
        assert heuristic(some, arch) == heuristic(most, arch)


def test_search_space_is_legal_and_not_empty():
    arch = arch_of_capability(90)
    for fmt in FORMATS:
        for m in (1, 64, 300):
            problem = DenseGemmProblem(m, 1, 576, 7168, fmt)
            space = search_space(problem, arch)
            assert space and all(is_legal(c, problem, arch) is None for c in space) and len(set(space)) == len(space)


@pytest.mark.parametrize("k", [512, 4096, 16384])
def test_choice_of_the_kernel_with_warp_roles(k):
    """It needs a Hopper GPU, whole tiles and scale blocks, and tiles enough; one answer for all M up to the same power of two."""
    hopper = arch_of_capability(90)

    def takes(rows, n=7168, k=k, fmt="fp8_block", arch=hopper, **more):
        return roles_reason(DenseGemmProblem(rows, 1, n, k, fmt, **{"aligned": True, **more}), arch) is None

    assert takes(8192) and takes(2048) and not takes(64, n=24576) and not takes(128, n=4096) and not takes(256, n=256, k=16384)
    assert takes(128, n=129280, k=7168) and not takes(64, n=129280, k=7168) and not takes(128, n=24576, k=1536)
    assert not takes(128, n=18432, k=7168) and takes(129, n=18432, k=7168)
    assert not takes(2048, n=7168 + 128) and not takes(2048, k=k + 16) and not takes(2048, fmt="mxfp8") and not takes(2048, fused=True)
    assert not takes(2048, aligned=False) and not takes(2048, arch=arch_of_capability(100)) and not takes(2**27) and not takes(2048, n=0)
    for n in (256, 1536, 9216):
        assert len({takes(rows, n) for rows in (513, 600, 1000, 1024)}) == 1
