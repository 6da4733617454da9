"""Every checkpoint dialect and naming gives the same stacks, bit for bit; what no dialect knows is refused with the tensor's name."""

import pytest
import torch

from moe_ops import Linear
from moe_ops.core.formats import FP8_BLOCK, MXFP8, QTensor
from moe_ops.core.numerics import decode_e8m0
from moe_ops.layer.dialects import DIALECTS, detect, quantization_config, read_weight
from moe_ops.layer.load import load_experts, load_mlp

E, H, INTER = 3, 192, 320  # H and I not multiples of 128: ragged fp8 blocks
PREFIX = "model.layers.4.mlp.experts."
NAMINGS = {"gate_proj": ("gate_proj", "up_proj", "down_proj"), "w1w3w2": ("w1", "w3", "w2")}


def cdiv(a, b):
    return -(-a // b)


def e4m3(g, *shape):
    """All 256 byte patterns but the two NaNs."""
    b = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    return torch.where((b & 0x7F) == 0x7F, torch.zeros_like(b), b).view(torch.float8_e4m3fn)


def one_expert(g, fmt, h=H, inter=INTER):
    """{"gate": (data, scale), ..}: scale is fp32 (a power of two) or E8M0 bytes."""
    out = {}
    for name, (n, k) in {"gate": (inter, h), "up": (inter, h), "down": (h, inter)}.items():
        if fmt == "bf16":
            out[name] = (torch.randn(n, k, generator=g).bfloat16(), None)
        elif fmt == "fp8_block":
            out[name] = (e4m3(g, n, k), torch.randint(-9, 3, (cdiv(n, 128), cdiv(k, 128)), generator=g).float().exp2())
        else:
            out[name] = (e4m3(g, n, k), torch.randint(100, 140, (n, k // 32), generator=g, dtype=torch.uint8))
    return out


def written(data, scale, dialect, variant):
    """Suffix -> tensor, as one dialect writes this weight."""
    if scale is None:
        return {"weight": data}
    suffix = DIALECTS[dialect].suffixes[0]
    if variant == "scale":
        suffix = "scale"
    if variant == "rank4":
        scale = scale[:, None, :, None]
    if variant == "bf16":
        scale = scale.bfloat16()
    if variant == "e8m0":
        if scale.dtype == torch.float32:
            scale = (torch.log2(scale) + 127).to(torch.uint8)
        scale = scale.view(torch.float8_e8m0fnu)
    if variant == "fp32":
        scale = decode_e8m0(scale)
    if variant == "squeezed" and scale.shape[-1] == 1:
        scale = scale.squeeze(-1)
    return {"weight": data, suffix: scale}


# (dialect, variant)
WRITERS = [
    ("bf16", ""),
    ("fp8_block", ""),
    ("fp8_block", "bf16"),
    ("fp8_block", "scale"),
    ("fp8_block_ue8m0", ""),
    ("fp8_block_ue8m0", "e8m0"),
    ("fp8_block_modelopt", "rank4"),
    ("fp8_block_modelopt", ""),
    ("fp8_block_compressed_tensors", ""),
    ("mxfp8", ""),
    ("mxfp8", "e8m0"),
    ("mxfp8", "fp32"),
    ("mxfp8_compressed_tensors", ""),
    ("mxfp8_modelopt", ""),
]


def checkpoint(dialect, variant="", naming="gate_proj", bias=False, h=H, inter=INTER):
    g = torch.Generator().manual_seed(7)
    fmt = DIALECTS[dialect].format
    experts = [one_expert(g, fmt.name if fmt else "bf16", h, inter) for _ in range(E)]
    sd = {}
    for e, x in enumerate(experts):
        for part, leaf in zip(("gate", "up", "down"), NAMINGS[naming], strict=True):
            for suffix, t in written(*x[part], dialect, variant).items():
                sd[f"{PREFIX}{e}.{leaf}.{suffix}"] = t
            if bias:
                sd[f"{PREFIX}{e}.{leaf}.bias"] = torch.randn(x[part][0].shape[0], generator=g)
    return sd, experts


def raw(t):
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(("dialect", "variant"), WRITERS)
def test_every_dialect_loads_bit_for_bit(dialect, variant, naming):
    sd, experts = checkpoint(dialect, variant, naming, bias=True)
    got = load_experts(sd, PREFIX, quantization_config(dialect), num_experts=E)
    for e, x in enumerate(experts):
        for stack, parts in ((got.w13, ("gate", "up")), (got.w2, ("down",))):
            data = stack.data if isinstance(stack, QTensor) else stack
            assert torch.equal(raw(data[e]), torch.cat([raw(x[p][0]) for p in parts]))
            if isinstance(stack, QTensor):
                assert torch.equal(stack.scale[e], torch.cat([x[p][1] for p in parts]))
    fmt = DIALECTS[dialect].format
    if fmt is FP8_BLOCK:
        assert got.w13.segments == 2 and got.w13.scale.shape == (E, 2 * cdiv(INTER, 128), cdiv(H, 128))
    if fmt is MXFP8:
        assert got.w13.scale.dtype == torch.uint8
    leaf = NAMINGS[naming]
    assert torch.equal(got.b13[1], torch.cat((sd[f"{PREFIX}1.{leaf[0]}.bias"], sd[f"{PREFIX}1.{leaf[1]}.bias"])))
    assert torch.equal(got.b2[2], sd[f"{PREFIX}2.{leaf[2]}.bias"])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_config_written_is_detected(dialect):
    config = quantization_config(dialect, ("lm_head",))
    assert detect(config).name == dialect
    if dialect.endswith("_modelopt"):
        assert detect({"producer": {"name": "modelopt"}, "quantization": config}).name == dialect


def test_scale_of_one_block_column_saved_1d():
    """Writers squeeze a last dimension of 1: K = 32 for MXFP8."""
    sd, experts = checkpoint("mxfp8", "squeezed", h=32, inter=64)
    assert sd[f"{PREFIX}0.gate_proj.weight_scale_inv"].dim() == 1
    got = load_experts(sd, PREFIX, quantization_config("mxfp8"))
    assert torch.equal(got.w13.scale[1], torch.cat((experts[1]["gate"][1], experts[1]["up"][1])))


def test_LAYOUT_stacked_transposed_interleaved():
    g = torch.Generator().manual_seed(3)
    gate, up, down = torch.randn(E, INTER, H, generator=g), torch.randn(E, INTER, H, generator=g), torch.randn(E, H, INTER, generator=g)
    bg, bu, b2 = torch.randn(E, INTER, generator=g), torch.randn(E, INTER, generator=g), torch.randn(E, H, generator=g)
    mixed, bias = torch.stack((gate, up), dim=2).reshape(E, 2 * INTER, H), torch.stack((bg, bu), dim=2).reshape(E, 2 * INTER)
    want13, want_b13 = torch.cat((gate, up), dim=1), torch.cat((bg, bu), dim=1)
    stacks = {
        (False, False): (want13, down, want_b13),
        (False, True): (mixed, down, bias),
        (True, False): (want13.transpose(1, 2), down.transpose(1, 2), want_b13),
        (True, True): (mixed.transpose(1, 2), down.transpose(1, 2), bias),
    }
    for (transposed, interleaved), (w13, w2, b13) in stacks.items():
        sd = {f"{PREFIX}gate_up_proj": w13, f"{PREFIX}down_proj": w2, f"{PREFIX}gate_up_proj_bias": b13, f"{PREFIX}down_proj_bias": b2}
        got = load_experts(sd, PREFIX, transposed=transposed, interleaved=interleaved, num_experts=E)
        assert torch.equal(got.w13, want13) and torch.equal(got.w2, down) and torch.equal(got.b13, want_b13) and torch.equal(got.b2, b2)
        assert got.w13.is_contiguous() and got.w2.is_contiguous()
    with pytest.raises(ValueError, match="do not belong together as stacks"):
        load_experts({f"{PREFIX}gate_up_proj": want13.transpose(1, 2), f"{PREFIX}down_proj": down.transpose(1, 2)}, PREFIX)


def test_stacked_quantized_equals_per_expert():
    """The same experts stored one by one and as stacks give the same bytes; MXFP8 rows may even alternate."""
    for dialect in ("fp8_block", "mxfp8"):
        sd, _ = checkpoint(dialect)
        a = load_experts(sd, PREFIX, quantization_config(dialect))
        stacked = {
            f"{PREFIX}gate_up_proj": a.w13.data,
            f"{PREFIX}gate_up_proj_scale_inv": a.w13.scale,
            f"{PREFIX}down_proj": a.w2.data,
            f"{PREFIX}down_proj_scale_inv": a.w2.scale,
        }
        b = load_experts(stacked, PREFIX, quantization_config(dialect))
        assert torch.equal(raw(a.w13.data), raw(b.w13.data)) and torch.equal(a.w13.scale, b.w13.scale)
        assert torch.equal(raw(a.w2.data), raw(b.w2.data)) and torch.equal(a.w2.scale, b.w2.scale)
        mixed = dict(stacked)
        for key in (f"{PREFIX}gate_up_proj", f"{PREFIX}gate_up_proj_scale_inv"):
            t = raw(stacked[key])
            half = t.shape[1] // 2
            mixed[key] = torch.stack((t[:, :half], t[:, half:]), dim=2).reshape(t.shape).view(stacked[key].dtype)
        if dialect == "mxfp8":
            c = load_experts(mixed, PREFIX, quantization_config(dialect), interleaved=True)
            assert torch.equal(raw(a.w13.data), raw(c.w13.data)) and torch.equal(a.w13.scale, c.w13.scale)
        else:
            with pytest.raises(ValueError, match="quantized in an interleaved layout"):
                load_experts(mixed, PREFIX, quantization_config(dialect), interleaved=True)


@pytest.mark.parametrize("naming", ["per expert", "stacked"])
def test_local_window(naming):
    sd, _ = checkpoint("mxfp8")
    full = load_experts(sd, PREFIX, quantization_config("mxfp8"))
    if naming == "stacked":
        sd = {
            f"{PREFIX}gate_up_proj": full.w13.data,
            f"{PREFIX}gate_up_proj_scale_inv": full.w13.scale,
            f"{PREFIX}down_proj": full.w2.data,
            f"{PREFIX}down_proj_scale_inv": full.w2.scale,
        }
    got = load_experts(sd, PREFIX, quantization_config("mxfp8"), num_experts=E, local=(1, 2))
    assert torch.equal(raw(got.w13.data), raw(full.w13.data[1:])) and torch.equal(got.w2.scale, full.w2.scale[1:])
    with pytest.raises(ValueError, match=r"local must lie within the 3 experts.*\(2, 2\)"):
        load_experts(sd, PREFIX, quantization_config("mxfp8"), local=(2, 2))


def test_only_what_is_needed_is_read():
    sd, _ = checkpoint("mxfp8")

    class Lazy(dict):
        read = []

        def __getitem__(self, key):
            self.read.append(key)
            return super().__getitem__(key)

    lazy = Lazy(sd)
    load_experts(lazy, PREFIX, quantization_config("mxfp8"), local=(1, 1))
    assert {k.removeprefix(PREFIX).split(".")[0] for k in lazy.read} == {"1"}
    assert len(lazy.read) == len(set(lazy.read)) == 6


def test_shared_expert_is_a_stack_of_one():
    sd, experts = checkpoint("fp8_block")
    sd = {k.replace(f"{PREFIX}1.", "mlp.shared_experts."): v for k, v in sd.items() if k.startswith(f"{PREFIX}1.")}
    got = load_mlp(sd, "mlp.shared_experts.", quantization_config("fp8_block"))
    assert got.w13.shape == (1, 2 * INTER, H) and torch.equal(raw(got.w2.data[0]), raw(experts[1]["down"][0]))
    with pytest.raises(KeyError, match=r"no gated MLP below 'mlp.other.'"):
        load_mlp(sd, "mlp.other.")


# ---- bad input: each error names the tensor


def _edit(dialect, change, **kw):
    sd, _ = checkpoint(dialect, **kw)
    change(sd)
    return lambda: load_experts(sd, PREFIX, quantization_config(dialect), num_experts=E)


G = f"{PREFIX}1.gate_proj."
S = f"{G}weight_scale_inv"


def put(key, value):
    return lambda sd: sd.update({key: value})


def drop(*keys):
    return lambda sd: [sd.pop(k) for k in keys]


def drop_expert(sd):
    for key in [k for k in sd if k.startswith(f"{PREFIX}2.")]:
        sd.pop(key)


def unquantize_expert(sd):
    for key in [k for k in sd if k.startswith(f"{PREFIX}2.")]:
        t = sd.pop(key)
        if key.endswith(".weight"):
            sd[key] = t.bfloat16()


BAD = [
    ("missing weight", "fp8_block", drop(f"{G}weight"), ValueError, rf"{S}' is an orphan scale"),
    ("missing weight and scale", "fp8_block", drop(f"{G}weight", S), KeyError, rf"{G}weight' is missing"),
    ("missing scale", "fp8_block", drop(S), ValueError, rf"its scale '{S}' is missing"),
    ("missing scale C", "mxfp8_modelopt", drop(f"{G}weight_scale"), ValueError, rf"its scale '{G}weight_scale' is missing"),
    ("scale beside bf16", "bf16", put(S, torch.ones(3, 2)), ValueError, rf"{S}' is an orphan scale"),
    ("two scales", "fp8_block", put(f"{G}scale", torch.ones(3, 2)), ValueError, "has 2 scales"),
    ("wrong shape", "fp8_block", put(S, torch.ones(2, 2)), ValueError, rf"{S}' must have shape \(3, 2\).*got \(2, 2\)"),
    ("transposed scale", "fp8_block", put(S, torch.ones(2, 3)), ValueError, r"must have shape \(3, 2\).*got \(2, 3\)"),
    ("NaN byte", "mxfp8", lambda sd: sd[S].view(-1)[5:].fill_(255), ValueError, rf"{S}' holds the E8M0 byte 255"),
    ("NaN scale", "fp8_block", lambda sd: sd[S].fill_(float("nan")), ValueError, "NaN, infinite, zero or negative"),
    ("zero scale", "fp8_block", lambda sd: sd[S].zero_(), ValueError, "NaN, infinite, zero or negative"),
    ("not a power of two", "fp8_block_ue8m0", lambda sd: sd[S].mul_(1.5), ValueError, "must hold powers of two"),
    ("scale dtype", "mxfp8_modelopt", put(f"{G}weight_scale", torch.ones(INTER, 6)), ValueError, "must be uint8 or float8_e8m0fnu.*got float32"),
    (
        "name of another dialect",
        "mxfp8_compressed_tensors",
        lambda sd: sd.update({S: sd.pop(f"{G}weight_scale")}),
        ValueError,
        "not belong to dialect",
    ),
    ("FP4", "fp8_block", put(f"{G}weight", torch.zeros(INTER, 96, dtype=torch.int8)), ValueError, "FP4 packed in int8 is not supported"),
    ("static activations", "fp8_block", put(f"{G}input_scale", torch.ones(())), ValueError, rf"{G}input_scale' among the experts is not known"),
    ("one expert unquantized", "mxfp8", unquantize_expert, ValueError, "all experts of a layer must be alike"),
    ("up of another shape", "bf16", put(f"{PREFIX}1.up_proj.weight", torch.zeros(8, H)), ValueError, "gate and up of .* differ"),
    ("down transposed", "bf16", put(f"{PREFIX}0.down_proj.weight", torch.zeros(INTER, H)), ValueError, "down of .* must be"),
    ("last expert missing", "bf16", drop_expert, KeyError, rf"{PREFIX}2.gate_proj.weight' is missing"),
    ("one bias missing", "bf16", put(f"{G}bias", torch.zeros(INTER)), KeyError, r"1.up_proj.bias' is missing"),
    ("nothing there", "bf16", lambda sd: sd.clear(), KeyError, "no experts below"),
]


@pytest.mark.parametrize(("dialect", "change", "error", "text"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_checkpoint_names_the_tensor(dialect, change, error, text):
    with pytest.raises(error, match=text):
        _edit(dialect, change)()


def test_float8_without_config_is_refused():
    sd, _ = checkpoint("fp8_block")
    with pytest.raises(ValueError, match="has no quantization_config"):
        load_experts(sd, PREFIX)


def _fused(inter, rows=None):
    w = torch.zeros(E, 2 * inter, H, dtype=torch.uint8).view(torch.float8_e4m3fn)
    rows = cdiv(2 * inter, 128) if rows is None else rows
    return {
        f"{PREFIX}gate_up_proj": w,
        f"{PREFIX}gate_up_proj_scale_inv": torch.ones(E, rows, cdiv(H, 128)),
        f"{PREFIX}down_proj": torch.zeros(E, H, inter, dtype=torch.uint8).view(torch.float8_e4m3fn),
        f"{PREFIX}down_proj_scale_inv": torch.ones(E, cdiv(H, 128), cdiv(inter, 128)),
    }


def test_TAIL_fused_gate_up_scale_is_refused_with_the_reason():
    """I = 192: one 384-row matrix has 3 scale rows, gate and up apart have 2 + 2. I = 96: both have 2, so the shape does not tell."""
    with pytest.raises(ValueError, match=r"gate_up_proj_scale_inv' must have shape \(3, 4, 2\).*one scale covers gate and up rows together"):
        load_experts(_fused(192), PREFIX, quantization_config("fp8_block"))
    with pytest.raises(ValueError, match="may be the scale of one fused gate|up matrix or of two"):
        load_experts(_fused(96), PREFIX, quantization_config("fp8_block"))
    assert load_experts(_fused(96), PREFIX, quantization_config("fp8_block"), halves=True).w13.segments == 2
    assert load_experts(_fused(192, 4), PREFIX, quantization_config("fp8_block")).w13.segments == 2
    assert load_experts(_fused(256), PREFIX, quantization_config("fp8_block")).w13.segments == 2


UNKNOWN = [
    ({"quant_method": "awq"}, "quant_method 'awq' is not supported"),
    ({"quant_method": "fp8"}, "without weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
    ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, "quant_method 'mxfp8' with weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "activation_scheme 'static'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    ({"producer": {}, "quantization": {"quant_algo": "FP8"}}, "quant_algo 'FP8'"),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}}, "weights of"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "declare no weights"),
]


@pytest.mark.parametrize(("config", "text"), UNKNOWN)
def test_unknown_formats_are_refused(config, text):
    with pytest.raises(ValueError, match=text):
        detect(config)


def test_unquantized_module_in_a_quantized_checkpoint():
    """Modules that the config leaves alone stay floating; the tensor's dtype says so, and it has no scale."""
    sd = {"mlp.gate.weight": torch.ones(4, 8, dtype=torch.bfloat16)}
    assert read_weight(sd, "mlp.gate.weight", DIALECTS["fp8_block"]) is sd["mlp.gate.weight"]


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8"])
@pytest.mark.parametrize("prefix", ["", "a.b."])
def test_a_module_may_be_the_whole_state_dict(fmt, prefix):
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    layer = Linear.from_weight(w, format=fmt)
    again = Linear.from_state_dict({prefix + k: v for k, v in layer.state_dict().items()}, prefix)
    assert torch.equal(again.weight.view(torch.uint8), layer.weight.view(torch.uint8)) and torch.equal(again.weight_scale_inv, layer.weight_scale_inv)
