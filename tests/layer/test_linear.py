"""`Linear`: results against torch's own, state dicts and dialects, several layers in one, folding, and what it refuses."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from moe_ops import Linear, dequantize, freeze, quantize, quantize_weight, warmup
from moe_ops.core.numerics import relative_error, uneven
from moe_ops.gemm.dense import dense_gemm_workspace
from moe_ops.layer import linear
from moe_ops.layer.dialects import quantization_config
from moe_ops.quant.fold import fold_weight, is_folded

FORMATS = (None, "fp8_block", "mxfp8")
ERROR = {None: 4e-3, "fp8_block": 0.06, "mxfp8": 0.06}


def make(fmt, n=192, k=256, bias=True, device="cpu"):
    w = uneven((n, k), seed=2).to(device)
    return Linear.from_weight(w, torch.randn(n, generator=torch.Generator().manual_seed(3)).to(device) if bias else None, format=fmt), w


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(1, 256), (2, 3, 256), (40, 256), (0, 256), (256,)], ids=str)
def test_forward_is_linear(device, fmt, shape):
    layer, w = make(fmt, device=device)
    x = uneven((1, *shape), seed=1)[0].to(device)
    y = layer(x)
    assert y.shape == (*shape[:-1], 192) and y.dtype == x.dtype
    if x.numel():
        assert relative_error(y, F.linear(x.float(), w.float(), layer.bias)) < ERROR[fmt]


@pytest.mark.parametrize("fmt", FORMATS)
def test_out_residual_and_workspace(device, fmt):
    layer, _ = make(fmt, device=device)
    x = uneven((2, 20, 256), seed=1).to(device)
    residual = torch.randn(2, 20, 192, generator=torch.Generator().manual_seed(4)).bfloat16().to(device)
    wanted = layer(x).float() + residual.float()
    out = residual.clone()
    assert layer(x, residual=out, out=out, workspace=layer.make_workspace(64)) is out
    assert relative_error(out, wanted) < 5e-3
    assert relative_error(layer(x, residual=residual), wanted) < 5e-3
    assert relative_error(layer(x.transpose(0, 1)), layer(x).transpose(0, 1)) == 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_state_dict_round_trip(fmt):
    layer, _ = make(fmt)
    sd = {f"m.{k}": v for k, v in layer.state_dict().items()}
    assert set(sd) == {"m.weight", "m.bias"} | ({"m.weight_scale_inv"} if fmt else set())
    again = Linear.from_state_dict(sd, "m.")
    x = uneven((3, 256), seed=1)
    assert again.format is layer.format and torch.equal(again(x), layer(x))
    other, _ = make(fmt)
    with torch.no_grad():
        other.weight.view(torch.uint8).zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


DIALECTS = ["fp8_block", "fp8_block_compressed_tensors", "fp8_block_modelopt", "mxfp8", "mxfp8_compressed_tensors", "mxfp8_modelopt"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_checkpoint_dialects(dialect):
    fmt = dialect.split("_compressed")[0].split("_modelopt")[0]
    layer, w = make(fmt, bias=False)
    name = "weight_scale" if dialect not in ("fp8_block", "mxfp8") else "weight_scale_inv"
    sd = {"a.o_proj.weight": layer.weight.detach(), f"a.o_proj.{name}": layer.weight_scale_inv.detach(), "a.other.weight": w}
    read = Linear.from_state_dict(sd, "a.o_proj.", {"quantization_config": quantization_config(dialect)})
    x = uneven((3, 256), seed=1)
    assert torch.equal(read(x), layer(x))
    # a module that the checkpoint left in 16 bit, quantized on loading
    assert Linear.from_state_dict(sd, "a.other.", {"quantization_config": quantization_config(dialect)}).format is None
    assert torch.equal(Linear.from_state_dict({"b.weight": w}, "b.", format=fmt)(x), layer(x))
    with pytest.raises(KeyError, match=r"Linear\.from_state_dict: tensor 'c\.weight' is missing"):
        Linear.from_state_dict(sd, "c.")


@pytest.mark.parametrize("fmt", FORMATS)
def test_side_by_side_is_one_layer(device, fmt):
    """q_a_proj (a multiple of 128 rows) and kv_a_proj (576 is none) in one."""
    parts = [make(fmt, n, 256, device=device)[0] for n in (256, 96)]
    both = Linear.cat(parts)
    x = uneven((5, 256), seed=1).to(device)
    assert both.weight.shape == (352, 256) and relative_error(both(x), torch.cat([p(x) for p in parts], -1)) < 4e-3
    if fmt == "fp8_block":
        with pytest.raises(ValueError, match="Linear: cat of layers with 128 rows a scale needs N % 128 == 0 but for the last"):
            Linear.cat(parts[::-1])
    with pytest.raises(ValueError, match="Linear: cat needs layers of one K, dtype, format and block, all or none with a bias"):
        Linear.cat([parts[0], make(fmt, 256, 256, bias=False, device=device)[0]])


def test_quantized_input_is_shared(device):
    first, second = (make("fp8_block", n, device=device)[0] for n in (128, 64))
    x = uneven((7, 256), seed=1).to(device)
    q = quantize(x, "fp8_block")
    for layer in (first, second):
        assert relative_error(layer(q), layer(x)) <= 1e-3


def test_mxfp8_is_folded_on_hopper(monkeypatch):
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    layer, w = make("mxfp8")
    x = uneven((4, 256), seed=1)
    y = layer(x)
    assert is_folded(layer.ready()) and relative_error(y, layer(quantize(x, "mxfp8"))) < 5e-3
    copy_before = layer.ready()
    with torch.no_grad():
        layer.weight.view(torch.uint8).zero_()
    assert torch.equal(layer(x), layer.bias.to(x.dtype).expand(4, -1)) and layer.ready() is copy_before  # remade where it was
    layer.fold = False
    layer(x)
    assert not is_folded(layer.ready())
    folded = Linear(fold_weight(quantize_weight(w, "mxfp8"))[0])
    assert relative_error(folded(x), x.float() @ w.float().T) < 0.06


def test_cat_of_layers_that_differ_in_rule_and_fold():
    """Scales of which only some are powers of two are not taken for such; a copy that one part does not want is not made."""
    a, b = (Linear(quantize_weight(uneven((128, 256), seed=i), "fp8_block", rule=rule)) for i, rule in ((1, "pow2"), (2, "fp32")))
    assert Linear.cat([a, b]).rule == "unknown" and Linear.cat([a, a]).rule == "pow2" and Linear.cat([a, b]).fold
    b.fold = False
    assert not Linear.cat([a, b]).fold


def test_what_torch_does_not_count_is_made_again_when_asked(monkeypatch):
    """Writes through .data, as loaders make them."""
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    layer, _ = make("mxfp8")
    x = uneven((4, 256), seed=1)
    layer(x)
    copy_before = layer.ready()
    layer.weight.data.view(torch.uint8).zero_()
    assert layer.prepare(again=True) is layer and layer.ready() is copy_before
    assert torch.equal(layer(x), layer.bias.to(x.dtype).expand(4, -1))


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8"])
def test_dtype_changes_leave_quantized_bits(fmt):
    layer, _ = make(fmt)
    data, scale = layer.weight.view(torch.uint8).clone(), layer.weight_scale_inv.clone()
    layer.half().to(torch.float32).bfloat16()
    assert torch.equal(layer.weight.view(torch.uint8), data) and torch.equal(layer.weight_scale_inv, scale)
    assert layer.bias.dtype == torch.bfloat16
    x = uneven((3, 256), seed=1)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), layer(x)) and other.format is layer.format


def test_compiles_with_any_number_of_rows(device):
    layer, _ = make("mxfp8", device=device)
    compiled = torch.compile(lambda x: layer(x), backend="eager", fullgraph=True, dynamic=True)
    for rows in (3, 8, 40):
        x = uneven((rows, 256), seed=rows).to(device)
        assert torch.equal(compiled(x), layer(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("fmt", FORMATS)
def test_compiled_with_out_and_workspace_serves_every_number_of_rows(device, monkeypatch, fmt):
    """Through AOTAutograd, which has to see that out and workspace are written; on Hopper an mxfp8 layer reads its folded copy."""
    if device.type == "cpu":
        monkeypatch.setenv("MOE_OPS_ARCH", "90")
    layer, _ = make(fmt, device=device)
    workspace = layer.make_workspace(129)

    def call(x, out):
        layer(x, residual=out, out=out, workspace=workspace)
        return layer(x) + out

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for rows in (5, 16, 17, 40, 129):
        x = uneven((rows, 256), seed=rows).to(device)
        first, second = (torch.ones(rows, 192, dtype=x.dtype, device=device) for _ in range(2))
        for t in (x, first):
            torch._dynamo.mark_dynamic(t, 0)
        assert torch.equal(compiled(x, first), call(x, second)) and torch.equal(first, second) and not (first == 1).all()
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_compiled_code_reads_what_was_loaded(monkeypatch):
    """It reads the folded copy and never asks whether the weight is still the one it was made of."""
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    layer, other = make("mxfp8")[0], Linear.from_weight(uneven((192, 256), seed=9), torch.ones(192), format="mxfp8")
    x = uneven((3, 256), seed=1)
    compiled = torch.compile(lambda x: layer(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x)) and is_folded(layer.ready())
    layer.load_state_dict(other.state_dict())
    assert torch.equal(compiled(x), other(x))
    torch._dynamo.reset()


def test_warmup_leaves_nothing_to_compile(device):
    layer, _ = make("fp8_block", device=device)
    warmup(layer, 70)
    freeze()
    try:
        for rows in (1, 16, 17, 33, 70):
            layer(uneven((rows, 256), seed=1).to(device))
    finally:
        freeze(False)


@pytest.mark.parametrize("fmt", FORMATS)
def test_warmup_reaches_residuals_and_quantized_inputs(device, monkeypatch, fmt):
    """Either is another kernel variant, which must not be first compiled after `freeze`."""
    layer, _ = make(fmt, device=device)
    seen, run = set(), linear.dense_gemm

    def spy(a, w, **options):
        seen.add((isinstance(a, torch.Tensor), options["residual"] is not None))
        return run(a, w, **options)

    monkeypatch.setattr(linear, "dense_gemm", spy)
    warmup(layer, 20)
    assert seen == {(True, False), (True, True)} | ({(False, False), (False, True)} if fmt else set())


def test_workspace_is_enough_for_the_stored_weight_too(monkeypatch):
    """A quantized x, and a call under capture whose folded copy is out of date, run on the weight as it is stored."""
    monkeypatch.setenv("MOE_OPS_ARCH", "90")
    layer = Linear.from_weight(uneven((80, 1024), seed=2), format="mxfp8")
    workspace = layer.make_workspace(128)
    assert is_folded(layer.ready())
    assert workspace.numel() >= max(dense_gemm_workspace(128, w).numel() for w in (layer.ready(), layer.weights()))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_graph_replay_with_other_contents_no_sync_no_allocation(fmt):
    """GRAPH: both forms captured and replayed over changed inputs, residuals and weights equal eager calls bit for bit; out= with a workspace
    allocates nothing and waits for nothing, on a quantized input too."""
    n, k = 576, 7168
    layer, other = make(fmt, n, k, device="cuda")[0], Linear.from_weight(uneven((n, k), seed=7).cuda(), torch.ones(n, device="cuda"), format=fmt)
    workspace = layer.make_workspace(64)

    def call(x, second, residual, out, second_out):
        layer(x, residual=residual, out=out, workspace=workspace)
        layer(second, out=second_out, workspace=workspace)

    for rows in (1, 16, 40):
        x, residual = uneven((rows, k), seed=1).cuda(), uneven((rows, n), seed=2).cuda()
        q = None if fmt is None else quantize(x, fmt)
        outs = [torch.empty(rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

        args = (x, x if q is None else q, residual, *outs)
        call(*args)
        layer(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(*args)
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert after == before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(*args)
            alone = layer(x)
        for seed in (3, 4):
            if seed == 4:
                layer.load_state_dict(other.state_dict())
            x.copy_(uneven((rows, k), seed=seed))
            residual.copy_(uneven((rows, n), seed=seed + 5))
            if q is not None:
                again = quantize(x, fmt)
                q.data.view(torch.uint8).copy_(again.data.view(torch.uint8))
                q.scale.copy_(again.scale)
            for out in (*outs, alone):
                out.fill_(float("nan"))
            graph.replay()
            got = [t.clone() for t in (*outs, alone)]
            call(*args)
            for a, b in zip(got, (*outs, layer(x)), strict=True):
                assert torch.equal(a, b) and torch.isfinite(a).all()


def test_values_survive_the_layer():
    layer, w = make("fp8_block", bias=False)
    assert relative_error(dequantize(layer.weights()), w) < 0.05
    assert repr(layer) == "Linear(fp8_block, N=192, K=256, bias=False)"


W = torch.ones(64, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "wrong,error,text",
    [
        (lambda: Linear(W.float()), TypeError, "weight must be bfloat16 or float16, got float32"),
        (lambda: Linear(W[None]), ValueError, "weight must be 2-D"),
        (lambda: Linear(W.T), ValueError, "weight must be contiguous"),
        (lambda: Linear(quantize(W, "fp8_block")), ValueError, "weight must have weight blocks and row_major scales"),
        (lambda: Linear(W, torch.zeros(63)), ValueError, r"bias must have shape \(64\)"),
        (lambda: Linear(3), TypeError, "weight must be a torch.Tensor, got int"),
        (lambda: Linear.from_weight(quantize_weight(W, "mxfp8"), format="fp8_block"), ValueError, "weight is mxfp8 and format='fp8_block' was asked"),
        (lambda: Linear(W).requires_grad_(), ValueError, "for inference only and has no gradients"),
        (lambda: Linear(W)(torch.ones(3, 128).bfloat16(), residual=torch.ones(3, 63)), ValueError, r"residual must have shape \(3, 64\)"),
        (lambda: Linear(W)(torch.ones(3, 128).bfloat16(), out=torch.ones(64, 3).T), ValueError, "out must be contiguous"),
        (lambda: Linear(W)(torch.tensor(1.0)), ValueError, "x must have K = 128 columns, got shape"),
        (lambda: Linear(W)(torch.zeros(3, 0).bfloat16()), ValueError, r"x must have K = 128 columns, got shape \(3, 0\)"),
        (lambda: Linear(W)(W.float()), TypeError, "x must be bfloat16, got float32"),
        (lambda: Linear(W)(W.half()), TypeError, "x must be bfloat16, got float16"),
        (lambda: make("fp8_block", 64, 128)[0](W.float()), TypeError, "x must be bfloat16 or float16, got float32"),
        (lambda: Linear(W)(W, workspace=torch.zeros(9, dtype=torch.uint8)), ValueError, "workspace is for calls with out"),
        (lambda: Linear.cat([]), ValueError, "cat needs at least one layer"),
        (lambda: Linear(W).load_state_dict(make("mxfp8", 64, 128, bias=False)[0].state_dict()), ValueError, "'weight_scale_inv' is quantized, but"),
        (
            lambda: make("fp8_block", 64, 128, bias=False)[0].load_state_dict({"weight": W, "weight_scale_inv": torch.ones(1, 1)}),
            ValueError,
            "'weight' must be torch.float8_e4m3fn as in this layer, got torch.bfloat16",
        ),
        (
            lambda: make("fp8_block", 64, 128, bias=False)[0].load_state_dict({"weight_scale_inv": torch.zeros(1, 1)}, strict=False),
            ValueError,
            "'weight_scale_inv' holds a scale that is NaN, infinite, zero or negative",
        ),
    ],
)
def test_bad_input_is_named(wrong, error, text):
    with pytest.raises(error, match=f"Linear: .*{text}"):
        wrong()
