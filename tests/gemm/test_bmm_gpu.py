"""The Gluon kernels of `bmm`: every form of the activation, tails, the quantizer's bytes, heads that keep to themselves."""

import pytest
import torch

from moe_ops import bmm, make_qtensor, quantize, quantize_weight
from moe_ops.core.arch import arch_of
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm.bmm_config import FEW_TOKENS
from moe_ops.gemm.grouped import dequantized
from moe_ops.quant.fold import fold_weight
from moe_ops.quant.rows import rows_ref

HOPPER = torch.cuda.is_available() and arch_of(torch.device("cuda")).has_wgmma
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")]

PROJECTIONS = [
    *(pytest.param(512, 128, id="k_b_proj"), pytest.param(128, 512, id="v_b_proj"), pytest.param(128, 128, id="one step")),
    *(pytest.param(768, 128, id="more blocks of N than slots"), pytest.param(128, 1280, id="more blocks of K than slots")),
]
#: (tokens, heads): both kernels, one to three warpgroups of rows, tails, more items than multiprocessors, shares that end inside a head
SIZES = [(1, 3), (16, 16), (17, 5), (32, 128), (33, 3), (64, 128), (65, 7), (129, 5), (200, 140), (513, 3), (1030, 17)]
BOUND = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 5e-4}


def weight(heads, n, k, folded, seed=2):
    w = uneven((heads, n, k), block=(1, 32) if folded else (128, 128), seed=seed, spread=0 if folded else 1).cuda()
    return fold_weight(quantize_weight(w, "mxfp8"))[0] if folded else quantize_weight(w, "fp8_block")


def check(x, w, dtype, offset=8):
    """In the middle of a wider buffer full of NaN: what is not written, and what is written beside it, shows."""
    tokens, heads = x.shape[:2]
    n = w.shape[1]
    room = torch.full((tokens, heads, n + 2 * offset), float("nan"), device="cuda", dtype=dtype)
    out = room[..., offset : offset + n]
    bmm(x, w, out=out)
    assert relative_error(out, bmm(x, w, out_dtype=torch.float32, impl="torch")) <= BOUND[dtype]
    assert torch.isnan(room[..., :offset]).all() and torch.isnan(room[..., offset + n :]).all()
    assert torch.equal(out, bmm(x, w, out_dtype=dtype))


@pytest.mark.parametrize("tokens,heads", SIZES)
@pytest.mark.parametrize("n,k", PROJECTIONS)
def test_every_form_of_the_activation(n, k, tokens, heads):
    """LAYOUT, TAIL: a slice of a wider head, heads first, fp16, quantized before with scales in both orders, folded mxfp8."""
    x = uneven((tokens, heads, k + 64), seed=1).cuda()
    first = uneven((heads, tokens, k), seed=3).cuda()
    w = weight(heads, n, k, False)
    check(x[..., :k], w, torch.bfloat16)
    check(x[..., 64:].half(), w, torch.float16)
    check(first.transpose(0, 1), w, torch.float32)
    check(x[:, :1, :k].expand(tokens, heads, k), w, torch.bfloat16)
    for layout in ("row_major", "mn_major"):
        check(quantize(x[..., :k].contiguous(), "fp8_block", layout=layout), w, torch.bfloat16)
    check(x[..., :k], weight(heads, n, k, True), torch.float32)


def rooms(tokens, heads, n, dtype):
    """(name, buffer full of NaN, the (T, heads, N) inside it): what TMA can store, last what it cannot."""
    for name, shape, inside in (
        ("heads first", (heads, tokens, n), lambda r: r.transpose(0, 1)),
        ("heads first, rows between them", (heads, tokens + 100, n + 16), lambda r: r[:, 30 : 30 + tokens, 8 : 8 + n].transpose(0, 1)),
        ("token-major", (tokens + 200, heads, n), lambda r: r[100 : 100 + tokens]),
        ("token-major, columns between", (tokens + 200, heads, n + 16), lambda r: r[100 : 100 + tokens, :, 8 : 8 + n]),
        ("off the 16-byte grid", (tokens + 200, heads, n + 6), lambda r: r[100 : 100 + tokens, :, 3 : 3 + n]),
    ):
        room = torch.full(shape, float("nan"), device="cuda", dtype=dtype)
        yield name, room, inside(room)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "given", "given mn_major", "folded", "fp32 out"])
@pytest.mark.parametrize("tokens,heads", [(40, 5), (64, 3), (65, 3), (128, 2), (129, 5), (193, 140), (200, 3), (450, 4), (600, 33)])
@pytest.mark.parametrize("n,k", PROJECTIONS[:2])
def test_tail_no_layout_of_the_result_touches_its_neighbours(n, k, tokens, heads, kind):
    """TAIL, LAYOUT: a warpgroup's last rows are fewer than 64; the next head's rows, and whatever lies around, keep what they hold."""
    x = uneven((tokens, heads, k), seed=1).cuda()
    dtype = {"fp16": torch.float16, "fp32 out": torch.float32}.get(kind, torch.bfloat16)
    if kind == "fp16":
        x = x.half()
    elif kind.startswith("given"):
        x = quantize(x, "fp8_block", layout="mn_major" if kind.endswith("mn_major") else "row_major")
    w = weight(heads, n, k, kind == "folded")
    first = None
    for name, room, out in rooms(tokens, heads, n, dtype):
        bmm(x, w, out=out)
        assert int(torch.isnan(room).sum()) == room.numel() - out.numel() and not torch.isnan(out).any(), name
        first = out.clone() if first is None else first
        assert torch.equal(out, first), name
    assert relative_error(first, bmm(x, w, out_dtype=torch.float32, impl="torch")) <= BOUND[dtype]
    assert torch.equal(first, bmm(x, w, out_dtype=torch.float32).to(dtype))  # fp32 has two warpgroups of rows where others have three


@pytest.mark.parametrize("folded", [False, True], ids=["fp8_block", "mxfp8 folded"])
@pytest.mark.parametrize("tokens", [FEW_TOKENS, 64, 130])
def test_quantizes_as_the_quantizer(tokens, folded):
    """Weights that are the identity hand the quantized activation out: the quantizer's own values, of ties, infinities, NaN and zeros too."""
    x = uneven((tokens, 2, 128), seed=1).cuda()
    steps = torch.tensor([448.0, 1.0625, 1.1875, -1.3125, 0.0, -0.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10], device="cuda")  # ties of e4m3 at scale 1
    x[0, 0, : len(steps)] = steps
    x[0, 0, len(steps) :] = 0
    x[1, 0, 5], x[1, 1, 7], x[2, 0, 9], x[3, 0] = float("inf"), float("-inf"), float("nan"), 0
    x[4:] *= torch.exp2(-9.0 * torch.arange(4, device="cuda")).repeat_interleave(32).to(x.dtype)  # groups of 32 far below their row's largest
    eye = torch.eye(128, device="cuda").expand(2, 128, 128).contiguous()
    q = make_qtensor(eye.to(torch.float8_e4m3fn), torch.ones(2, 1, 1, device="cuda"), "fp8_block")
    if folded:
        q = fold_weight(make_qtensor(eye.to(torch.float8_e4m3fn), torch.full((2, 128, 4), 127, dtype=torch.uint8, device="cuda"), "mxfp8"))[0]
    wanted = dequantized(*rows_ref(x, "fp8_block", "folded" if folded else "fp32"), "fp8_block", 1, 1)
    out = bmm(x, q, out_dtype=torch.float32)
    clean = torch.isfinite(wanted).all(-1)  # a NaN meets the identity's zeros and takes its row
    assert torch.equal(out[clean] + 0.0, wanted[clean] + 0.0) and clean.sum() == tokens * 2 - 1
    assert torch.isnan(out[~clean]).all()


@pytest.mark.parametrize("tokens", [5, 64, 300])
@pytest.mark.parametrize("n,k", PROJECTIONS)
def test_tail_heads_and_tokens_keep_to_themselves(n, k, tokens):
    """TAIL: NaN in one head's weights, in one token and in the columns beside a head's slice reach nobody else."""
    heads = 3
    room = uneven((tokens, heads, k + 64), seed=1).cuda()
    room[..., k:] = float("nan")
    w = weight(heads, n, k, False)
    sound = bmm(room[..., :k], w)
    assert torch.isfinite(sound).all()
    w.data.view(torch.uint8)[1] = 0x7F
    room[2, 0] = float("nan")
    out = bmm(room[..., :k], w)
    assert torch.isnan(out[:, 1]).all() and torch.isnan(out[2, 0]).all()
    kept = torch.ones(tokens, heads, dtype=torch.bool, device="cuda")
    kept[:, 1], kept[2, 0] = False, False
    assert torch.equal(out[kept], sound[kept])


@pytest.mark.parametrize("tokens", [7, 48, 260])
def test_graph_replay_over_changed_activations(tokens):
    """GRAPH: capture, other activations, replay: the bits of an eager call."""
    x, w = uneven((tokens, 16, 576), seed=1).cuda()[..., :512], weight(16, 128, 512, False)
    out = torch.empty(tokens, 16, 128, dtype=torch.bfloat16, device="cuda")
    bmm(x, w, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bmm(x, w, out=out)
    x.copy_(uneven((tokens, 16, 512), seed=5).cuda())
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, bmm(x, w))


@pytest.mark.parametrize("tokens,n,k", [(5, 640, 128), (40, 128, 1792), (200, 128, 1792)], ids=["few", "a tile of 64 rows", "rows shared"])
def test_first_call_under_capture_is_one_error_and_the_process_goes_on(tokens, n, k):
    """GRAPH: nothing compiles under capture; eager and a later capture work. Shapes that no other test uses."""
    x, w = uneven((tokens, 3, k), seed=1).cuda(), weight(3, n, k, False)
    with pytest.raises(RuntimeError, match=r"bmm: kernel \w+ has never been compiled for \(.*\) and cannot be compiled while a CUDA graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            bmm(x, w)
    torch.cuda.synchronize()
    eager, graph = bmm(x, w), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bmm(x, w)
    graph.replay()
    assert torch.equal(out, eager)
