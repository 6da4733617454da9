"""Dense and batched GEMM against the kinds of public bug reports: SPLITK, EMPTY, TAIL, LAYOUT; what test_dense.py and test_bmm.py leave open."""

import pytest
import torch

from moe_ops import bmm, dense_gemm, make_qtensor, quantize, quantize_weight
from moe_ops.core.arch import arch_of
from moe_ops.core.formats import as_bytes
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm.bmm import _bmm_triton, bmm_into, bmm_ref
from moe_ops.gemm.dense import _dense_gemm_triton, dense_gemm_into, dense_gemm_ref, dense_gemm_workspace
from moe_ops.gemm.dense_config import DenseGemmConfig, DenseGemmProblem, heuristic

FP32_BOUND = 5e-4
MX_K = 128 if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10 else 32
BLOCK_K = {"fp8_block": 128, "mxfp8": MX_K, "plain": 64}
FORMATS = ("fp8_block", "mxfp8", "plain")


def config(fmt, split=1):
    return DenseGemmConfig(16, 64, BLOCK_K[fmt], 4, 3, split, True)


def parts_of(x, w, fmt, inside=False):
    """(a, a_scale, w, w_scale, format, rule) as the ops take them, of 16-bit tensors."""
    if fmt == "plain":
        return x, None, w, None, fmt, "given"
    qw = quantize_weight(w, fmt)
    if inside:
        return x, None, as_bytes(qw.data), qw.scale, fmt, qw.format.rules[0]
    qx = quantize(x, fmt)
    return as_bytes(qx.data), qx.scale, as_bytes(qw.data), qw.scale, fmt, "given"


def dense(parts, dtype=torch.float32, cfg=None, launcher=_dense_gemm_triton):
    a, sa, w, sw, fmt, rule = parts
    return launcher(a, sa, w, sw, None, None, fmt, rule, dtype, None if cfg is None else cfg.ints())


def heads(parts, dtype=torch.float32, cfg=None, launcher=_bmm_triton):
    return launcher(*parts, dtype, None if cfg is None else cfg.ints())


# ---- SPLITK


def cancelling(fmt, device):
    """x (1, 256) and w (64, 256), exact in every format and in tensor cores: the first 128 of K sum to 487680, the others to -487424."""
    x, w = torch.full((1, 256), 64.0), torch.full((64, 256), 64.0)
    w[:, 128:] = -64.0
    x[:, ::32], w[:, ::32] = 448.0, 0.0  # every block's largest is 448, so that its scale is 1; these two add nothing
    x[:, 1::32], w[:, 1::32] = 0.0, 448.0
    x[:, 127] = w[:, 127] = 16.0
    x[:, 255] = w[:, 255] = 0.0
    return parts_of(x.bfloat16().to(device), w.bfloat16().to(device), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_splitk_partials_are_fp32(device, fmt, dtype):
    """Partials of 487680 and -487424: infinite in fp16, equal but for the sign in bf16; their sum is 256 whatever the result's dtype."""
    parts = cancelling(fmt, device)
    for split in (1, 2, 3):
        assert (dense(parts, dtype, config(fmt, split)) == 256.0).all()
        one = tuple(t[:, None] if t is not None and i < 2 else t if i > 3 or t is None else t[None] for i, t in enumerate(parts))
        assert (heads(one, dtype, config(fmt, split)) == 256.0).all()


@pytest.mark.parametrize("fmt,inside", [("plain", False), *((fmt, inside) for fmt in ("fp8_block", "mxfp8") for inside in (False, True))])
def test_splitk_a_row_has_the_same_bits_whatever_its_neighbours(device, fmt, inside):
    """Under pinned configs, the heuristic's own among them: alone, among others, beside infinity and NaN; twice the same."""
    m, n, k = 16, 80, 640
    x = uneven((m, k), seed=1).to(device)
    parts = parts_of(x, uneven((n, k), seed=2).to(device), fmt, inside)
    chosen = heuristic(DenseGemmProblem(m, 1, n, k, fmt, inside), arch_of(device))
    for cfg in (config(fmt, 3), config(fmt, 16), chosen):
        whole = dense(parts, cfg=cfg)
        assert torch.equal(whole, dense(parts, cfg=cfg))
        for rows in (slice(3, 5), slice(15, 16)):
            some = tuple(t[rows] if i < 2 and t is not None else t for i, t in enumerate(parts))
            assert torch.equal(dense(some, cfg=cfg), whole[rows])
    if inside or fmt == "plain":
        spoilt = x.clone()
        spoilt[2], spoilt[7] = float("nan"), float("inf")
        left = [i for i in range(m) if i not in (2, 7)]
        assert torch.equal(dense((spoilt, *parts[1:]), cfg=config(fmt, 3))[left], dense(parts, cfg=config(fmt, 3))[left])


@pytest.mark.parametrize("split", [2, 3, 7])
@pytest.mark.parametrize("fmt", FORMATS)
def test_splitk_of_heads(device, fmt, split):
    """More splits than there are 128s, uneven shares, slots of several heads; the same bits twice, and for a token alone."""
    x, w = uneven((5, 3, 384), seed=1).to(device), uneven((3, 80, 384), seed=2).to(device)
    parts = parts_of(x, w, fmt)
    out = heads(parts, cfg=config(fmt, split))
    assert relative_error(out, heads(parts, launcher=bmm_ref)) <= FP32_BOUND
    assert torch.equal(out, heads(parts, cfg=config(fmt, split)))
    alone = tuple(t[2:3] if i < 2 and t is not None else t for i, t in enumerate(parts))
    assert torch.equal(heads(alone, cfg=config(fmt, split)), out[2:3])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(heads(parts, dtype, config(fmt, split)), out.to(dtype))


# ---- EMPTY


@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_rows_and_columns_launch_nothing(device, fmt, monkeypatch):
    """M = 0 in every form of the call, N = 0 where a weight can have no rows; a launch would be an error of the driver."""
    w = uneven((64, 256), seed=2).to(device)
    parts = parts_of(None, w, fmt, inside=True)
    monkeypatch.setattr("moe_ops.core.launch.launch", lambda *args, **meta: pytest.fail(f"launched {args[0]}"))
    x = torch.zeros(0, 256, dtype=torch.bfloat16, device=device)
    out, workspace = torch.zeros(0, 64, device=device), torch.zeros(0, dtype=torch.uint8, device=device)
    three = (x[:, None], None, parts[2][None], None if parts[3] is None else parts[3][None], *parts[4:])
    for cfg in (None, config(fmt, 3)):
        pinned = None if cfg is None else cfg.ints()
        assert dense((x, *parts[1:]), torch.float16, cfg).shape == (0, 64)
        dense_gemm_into(x, *parts[1:4], None, None, *parts[4:], out, workspace, pinned)
        assert heads(three, torch.float16, cfg).shape == (0, 1, 64)
        bmm_into(*three, out[:, None], pinned)
    some = torch.zeros(3, 256, dtype=torch.bfloat16, device=device)
    assert dense_gemm(some, w[:0]).shape == (3, 0) and bmm(some[:, None], w[None, :0]).shape == (3, 1, 0)
    assert dense((some, None, w[:0], None, "plain", "given")).shape == (3, 0)
    assert heads((some[:, None], None, w[None, :0], None, "plain", "given")).shape == (3, 1, 0)


def test_empty_call_with_out_and_what_follows(device):
    """EMPTY: the call after one without rows is right; the same workspace serves both."""
    w = quantize_weight(uneven((64, 256), seed=2).to(device), "fp8_block")
    x, workspace = uneven((20, 256), seed=1).to(device), dense_gemm_workspace(20, w)
    for rows in (0, 20, 0, 1):
        out, residual = (torch.full((rows, 64), 2.0, dtype=torch.bfloat16, device=device) for _ in range(2))
        assert dense_gemm(x[:rows], w, residual=residual, out=out, workspace=workspace) is out and out.shape == (rows, 64)
        if rows:
            wanted = dense_gemm(x[:rows], w, residual=residual, impl="torch", out_dtype=torch.float32)
            assert relative_error(out, wanted) <= 3e-3
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- TAIL


def check_tail(device, fmt, m, n, k, inside, **options):
    """The result alone is written: everything around it in a buffer of NaN stays, and so does what lies between its rows."""
    parts = parts_of(uneven((m, k), seed=1).to(device), uneven((n, k), seed=2).to(device), fmt, inside)
    room = torch.full((m + 2, n + 11), float("nan"), device=device)
    out = room[1 : m + 1, 3 : 3 + n]
    dense_gemm_into(*parts[:4], None, None, *parts[4:], out, **options)
    assert relative_error(out, dense(parts, launcher=dense_gemm_ref)) <= FP32_BOUND
    out.fill_(float("nan"))
    assert torch.isnan(room).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "m,n,k",
    [(1, 1, 192), (3, 24, 64), (17, 1, 320), (65, 24, 192), (3, 576, 192), (129, 24, 192)],
    ids=["one by one", "K of half a block", "one column", "rows over a tile", "kv_a_proj", "rows over two tiles"],
)
def test_tail_sizes_off_every_grid(device, fmt, m, n, k):
    """Configs of the heuristic, which the other tests pin."""
    for inside in (False, True)[: 1 + (fmt != "plain")]:
        check_tail(device, fmt, m, n, k, inside)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("n,k", [(1, 192), (24, 1088), (576, 7232)])
def test_tail_on_a_gpu(fmt, n, k):
    for m in (1, 3, 17, 65, 129):
        for inside in (False, True)[: 1 + (fmt != "plain")]:
            check_tail(torch.device("cuda"), fmt, m, n, k, inside)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens,n,k", [(1, 1, 192), (17, 24, 64), (65, 24, 192)])
def test_tail_of_heads(device, fmt, tokens, n, k):
    parts = parts_of(uneven((tokens, 2, k), seed=1).to(device), uneven((2, n, k), seed=2).to(device), fmt)
    room = torch.full((tokens + 2, 2, n + 11), float("nan"), device=device)
    out = room[1 : tokens + 1, :, 3 : 3 + n]
    bmm_into(*parts, out)
    assert relative_error(out, heads(parts, launcher=bmm_ref)) <= FP32_BOUND
    out.fill_(float("nan"))
    assert torch.isnan(room).all()


# ---- LAYOUT


@pytest.mark.parametrize("rows", [1, 9, 20])
def test_layout_padding_of_mn_major_scales_is_never_read(device, rows):
    """Rows are padded to fours in memory; NaN there changes nothing, in neither function."""
    w = quantize_weight(uneven((2, 64, 256), seed=2).to(device), "fp8_block")
    x = uneven((rows, 256), seed=1).to(device)
    plain, mn = quantize(x, "fp8_block"), quantize(x, "fp8_block", layout="mn_major")
    padded = -(-rows // 4) * 4
    buffer = torch.full((2, padded), float("nan"), device=device)
    scale = buffer[:, :rows].T
    scale.copy_(mn.scale)
    assert scale.stride() == mn.scale.stride() == (1, padded) and torch.equal(scale, plain.scale)
    spoilt = make_qtensor(mn.data, scale, "fp8_block", weight=False, layout="mn_major")
    args = (as_bytes(w.data[0]), w.scale[0], "fp8_block", "given")
    for cfg in (None, config("fp8_block", 2)):
        assert torch.equal(dense((as_bytes(mn.data), scale, *args), cfg=cfg), dense((as_bytes(plain.data), plain.scale, *args), cfg=cfg))
    assert torch.equal(dense_gemm(spoilt, w[0]), dense_gemm(plain, w[0]))
    assert relative_error(dense_gemm(spoilt, w[0], impl="torch"), dense_gemm(plain, w[0], impl="torch")) <= 1e-6
    both = tuple(torch.stack([t, t], 1) for t in (as_bytes(mn.data), plain.scale))
    turned = torch.full((2, 2, padded), float("nan"), device=device)[..., :rows].permute(2, 0, 1)
    turned.copy_(both[1])
    rest = (as_bytes(w.data), w.scale, "fp8_block", "given")
    assert torch.equal(heads((both[0], turned, *rest)), heads((*both, *rest)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_layout_public_functions_on_views(device, fmt):
    """Each equals the call on a contiguous copy: a slice, every other row, one row expanded, off 16 bytes, one row with odd strides."""
    w = uneven((3, 64, 256), seed=2).to(device)
    w = w if fmt == "plain" else quantize_weight(w, fmt)
    big = uneven((12, 3, 256 + 72), seed=1).to(device)
    one = big.flatten()[: 4 * 256].as_strided((1, 256), (7, 1))
    for x in (big[:6, 0, 64:320], big[::2, 0, :256], big[:1, 0, :256].expand(6, 256), big[:6, 0, 1:257], one):
        room = torch.full((x.shape[0], 2, 64), float("nan"), dtype=torch.bfloat16, device=device)
        out = room[:, 1]
        assert dense_gemm(x, w[0], out=out) is out
        assert torch.equal(out, dense_gemm(x.contiguous(), w[0])) and torch.isnan(room[:, 0]).all()
    first = big[:5, :, :256].transpose(0, 1).contiguous()
    for x in (big[:5, :, 64:320], big[:5, :, 1:257], first.transpose(0, 1), big[:1, :, :256].expand(5, 3, 256), big[:1, :1, :256].expand(5, 3, 256)):
        room = torch.full((3, 5, 2, 64), float("nan"), dtype=torch.bfloat16, device=device)
        out = room[:, :, 1].transpose(0, 1)
        assert bmm(x, w, out=out) is out
        assert torch.equal(out, bmm(x.contiguous(), w)) and torch.isnan(room[:, :, 0]).all()
    with pytest.raises(ValueError, match="dense_gemm: a must have last stride 1"):
        dense_gemm(big[:6, 0, :256].t().contiguous().t(), w[0])
    with pytest.raises(ValueError, match="bmm: out must have last stride 1"):
        bmm(big[:5, :, :256], w, out=torch.empty(5, 64, 3, dtype=torch.bfloat16, device=device).transpose(1, 2))
