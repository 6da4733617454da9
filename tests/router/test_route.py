"""`route`: the choice of experts equals the reference (ids exactly, weights within 1e-6), and the reference equals what papers and models say.

Logits lie on a grid of 1/8, so that scores either tie exactly or differ by far more than rounding.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops.router import route as route_module
from moe_ops.router.route import route
from moe_ops.router.topk import SCORES, Choice, TopkConfig, topk_into

OP = torch.ops.moe_ops.route.default
DEEPSEEK = dict(score="sigmoid", n_group=8, topk_group=4, renormalize=True, scale=2.5)


def grid(tokens, experts, seed=0, span=64, dtype=torch.float32):
    """Logits that are multiples of 1/8."""
    return (torch.randint(-span, span + 1, (tokens, experts), generator=torch.Generator().manual_seed(seed)) / 8).to(dtype)


def arguments(logits, top_k, score="softmax", bias=None, n_group=1, topk_group=1, renormalize=False, scale=1.0, num_valid=None, local=None):
    first, count, expert_map = 0, logits.shape[1], None
    if isinstance(local, torch.Tensor):
        expert_map = local
    elif local is not None:
        first, count = local
    return [logits, top_k, score, bias, n_group, topk_group, renormalize, scale, num_valid, count, first, expert_map]


def choice_alone(logits, top_k, score, bias, n_group, topk_group, renormalize, scale, num_valid, num_local, first, expert_map):
    """The first of the two kernels: the layout of many experts is slow in the interpreter, and has tests of its own."""
    ids, weights = (torch.empty(logits.shape[0], top_k, dtype=d, device=logits.device) for d in (torch.int32, torch.float32))
    choice = Choice(top_k, score, bias, n_group, topk_group, renormalize, scale)
    topk_into(logits, choice, ids, weights, num_valid=num_valid, num_local=num_local, first=first, expert_map=expert_map)
    return ids, weights


def check(device, *args, **kwargs):
    """Kernels (and on a GPU the op too) against the reference; returns the reference's (ids, weights, ..)."""
    args = arguments(*args, **kwargs)
    wanted = route_module._route_cpu(*args)
    moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
    for call in (choice_alone if device.type == "cpu" and args[0].shape[1] > 64 else route_module._route_triton, OP):
        ids, weights, *layout = [t.cpu() for t in call(*moved)]
        assert torch.equal(ids, wanted[0]), f"ids {ids} instead of {wanted[0]}"
        torch.testing.assert_close(weights, wanted[1], rtol=1e-6, atol=1e-37)
        for got, want in zip(layout, wanted[2:], strict=False):
            assert torch.equal(got, want)
    return wanted


MODELS = {
    "mixtral": dict(experts=8, top_k=2, score="softmax", renormalize=True),
    "qwen3-bf16": dict(experts=128, top_k=8, score="softmax", renormalize=True, dtype=torch.bfloat16),
    "gpt-oss-fp16": dict(experts=32, top_k=4, score="topk_softmax", dtype=torch.float16),
    "deepseek-v3": dict(experts=256, top_k=8, bias=True, **DEEPSEEK),
    "deepseek-v4": dict(experts=384, top_k=6, score="sqrt_softplus", bias=True, renormalize=True, scale=1.5),
    "glm-one-group": dict(experts=160, top_k=8, score="sigmoid", bias=True, renormalize=True),
    "72-experts-no-power-of-two": dict(experts=72, top_k=6, score="softmax"),
    "odd-groups-of-odd-size": dict(experts=33, top_k=5, score="sigmoid", n_group=11, topk_group=3),
    "groups-of-one": dict(experts=6, top_k=3, score="softmax", n_group=6, topk_group=4, bias=True),
    "groups-of-two": dict(experts=8, top_k=4, score="sigmoid", n_group=4, topk_group=2, bias=True),
    "all-experts": dict(experts=7, top_k=7, score="topk_softmax", bias=True),
    "one-expert": dict(experts=1, top_k=1, score="softmax"),
    "two-warps-k-not-a-power": dict(experts=1030, top_k=3, score="sigmoid"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_the_reference(name, device):
    model = dict(MODELS[name])
    experts, top_k, dtype = model.pop("experts"), model.pop("top_k"), model.pop("dtype", torch.float32)
    bias = grid(1, experts, seed=7, span=9)[0] if model.pop("bias", False) else None
    check(device, grid(5, experts, dtype=dtype), top_k, bias=bias, **model)


def test_several_tokens_a_program_equal_the_reference(device, monkeypatch):
    monkeypatch.setattr("moe_ops.router.topk.heuristic", lambda *_: TopkConfig(4, 1))
    check(device, grid(11, 16), 3, num_valid=torch.tensor(6), **{**DEEPSEEK, "n_group": 4, "topk_group": 2})


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_fuzz_against_the_reference(data):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    n_group = data.draw(st.sampled_from([1, 2, 3]), label="n_group")
    experts = n_group * data.draw(st.sampled_from([1, 2, 5]), label="group size")
    topk_group = data.draw(st.integers(1, n_group), label="topk_group")
    top_k = data.draw(st.integers(1, topk_group * experts // n_group), label="top_k")
    tokens = data.draw(st.integers(1, 6), label="tokens")
    value = st.one_of(st.integers(-40, 40).map(lambda i: i / 8), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 300.0, -300.0]))
    row = st.lists(value, min_size=experts, max_size=experts)
    logits = torch.tensor(data.draw(st.lists(row, min_size=tokens, max_size=tokens), label="logits"))
    bias = torch.tensor(data.draw(row, label="bias")) if data.draw(st.booleans(), label="with bias") else None
    valid = data.draw(st.one_of(st.none(), st.integers(-1, tokens + 1)), label="num_valid")
    got = check(
        device,
        logits,
        top_k,
        score=data.draw(st.sampled_from(SCORES), label="score"),
        bias=bias,
        n_group=n_group,
        topk_group=topk_group,
        renormalize=data.draw(st.booleans(), label="renormalize"),
        scale=data.draw(st.sampled_from([1.0, 2.5]), label="scale"),
        num_valid=None if valid is None else torch.tensor(valid, dtype=torch.int32),
    )
    inside = tokens if valid is None else min(max(valid, 0), tokens)
    ids, weights = got[0], got[1]
    assert all(len(set(r)) == top_k and min(r) >= 0 and max(r) < experts for r in ids[:inside].tolist())
    assert bool((ids[inside:] == -1).all()) and bool((weights[inside:] == 0).all()) and bool(weights.isfinite().all())


# ---- scores and weights by hand


def test_softmax_renormalised_or_not():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for renormalize, wanted in ((False, [0.6439, 0.2369]), (True, [0.7311, 0.2689])):
        routing = route(logits, 2, renormalize=renormalize)
        assert routing.ids.tolist() == [[0, 1]]
        torch.testing.assert_close(routing.weights, torch.tensor([wanted]), atol=5e-5, rtol=0)
    torch.testing.assert_close(route(logits, 2, score="topk_softmax").weights, torch.tensor([[0.7311, 0.2689]]), atol=5e-5, rtol=0)


@pytest.mark.parametrize("score", SCORES)
def test_scores_are_accurate_everywhere(score, device):
    x = torch.cat([torch.linspace(-200, 200, 801), torch.linspace(-1, 1, 201), torch.tensor([1e-30, -1e-30, 1e-6, 17.0, -17.3])])
    x = x.view(-1, 1).expand(-1, 2).contiguous()
    x[:, 1] -= 1.0
    _, weights, *_ = route_module._route_triton(*arguments(x.to(device), 2, score=score))
    wide = x.double()
    exact = {
        "softmax": wide.softmax(-1),
        "topk_softmax": wide.softmax(-1),
        "sigmoid": wide.sigmoid(),
        "sqrt_softplus": (wide.clamp(min=0) + (-wide.abs()).exp().log1p()).sqrt(),
    }[score]
    torch.testing.assert_close(weights.cpu().double(), exact, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_logits_of_any_dtype_give_the_same_result(dtype, device):
    wide = check(device, grid(6, 40), 5)
    narrow = check(device, grid(6, 40, dtype=dtype), 5)
    assert torch.equal(wide[0], narrow[0]) and torch.equal(wide[1], narrow[1])


SWEEP = [(64, 1), (64, 8), (128, 6), (160, 8), (256, 4), (256, 8), (384, 10), (512, 16), (512, 2)]


@pytest.mark.parametrize("experts, top_k", SWEEP)
def test_bias_chooses_and_never_weighs(experts, top_k, device):
    logits = grid(3, experts, seed=experts)
    bias = torch.zeros(experts)
    bias[:top_k] = 10.0
    ids, weights, *_ = check(device, logits, top_k, score="sigmoid", bias=bias, renormalize=True)
    assert ids.sort(-1).values.tolist() == [list(range(top_k))] * 3
    chosen = logits.gather(1, ids.long()).sigmoid()
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True), rtol=1e-6, atol=0)
    again = check(device, logits, top_k, score="sigmoid", bias=10 * bias, renormalize=True)
    assert torch.equal(again[0].sort(-1).values, ids.sort(-1).values)


def test_fp32_bias_is_not_narrowed(device):
    bias = torch.full((256,), 6.0)
    bias[:238] = torch.linspace(6.817, 7.063, 238)
    ids, *_ = check(device, torch.zeros(2, 256, dtype=torch.bfloat16), 8, score="sigmoid", bias=bias)
    assert ids.tolist() == [list(range(237, 229, -1))] * 2
    with pytest.raises(TypeError, match="route: bias must be float32, got bfloat16"):
        route(torch.zeros(2, 256), 8, bias=bias.bfloat16())


def test_scale_is_applied_once(device):
    for renormalize in (False, True):
        once = check(device, grid(4, 32), 4, score="sigmoid", renormalize=renormalize)
        scaled = check(device, grid(4, 32), 4, score="sigmoid", renormalize=renormalize, scale=2.5)
        assert torch.equal(scaled[1], once[1] * 2.5)
    torch.testing.assert_close(scaled[1].sum(-1), torch.full((4,), 2.5))


# ---- groups


def logits_of(scores):
    return torch.logit(scores.double()).float()


def test_group_score_is_the_sum_of_its_two_best(device):
    scores = torch.full((8, 32), 0.01)
    scores[:, :2] = torch.tensor([[0.9, 0.05], [0.6, 0.6], [0.55, 0.55], [0.5, 0.5], [0.45, 0.45], [0.8, 0.011], [0.7, 0.011], [0.65, 0.011]])
    ids, *_ = check(device, logits_of(scores).view(1, 256), 8, score="sigmoid", n_group=8, topk_group=4)
    assert {i // 32 for i in ids[0].tolist()} == {0, 1, 2, 3}


def test_dropped_groups_never_win_against_negative_values(device):
    logits = grid(4, 256, seed=5)
    plain = check(device, logits, 8, **DEEPSEEK)
    lowered = check(device, logits, 8, bias=torch.full((256,), -2.0), **DEEPSEEK)
    for ids in (plain[0], lowered[0]):
        assert all(len({i // 32 for i in row}) <= 4 for row in ids.tolist())
    assert torch.equal(plain[0], lowered[0])


def test_members_of_a_kept_group_are_chosen_even_when_nan(device):
    logits = torch.zeros(1, 8)
    logits[0, 0], logits[0, 1:4] = 5.0, math.nan
    ids, weights, *_ = check(device, logits, 4, score="sigmoid", n_group=2, topk_group=1, bias=torch.tensor([9.0] * 4 + [-9.0] * 4))
    assert ids.tolist() in ([[0, 1, 2, 3]], [[4, 5, 6, 7]])
    assert bool(weights.isfinite().all())


def test_one_expert_a_group_is_its_own_score(device):
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0, 5.0, 4.0, -2.0]])
    assert check(device, logits, 3, n_group=8, topk_group=3)[0].tolist() == [[5, 6, 1]]


# ---- ties, NaN, infinities


def test_ties_go_to_the_lower_id_and_the_lower_group(device):
    for score in SCORES:
        ids, *_ = check(device, torch.zeros(2, 64), 5, score=score)
        assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    boundary = torch.zeros(1, 16)
    boundary[0, 9] = 1.0
    assert check(device, boundary, 3)[0].tolist() == [[9, 0, 1]]
    assert check(device, torch.zeros(1, 16), 4, n_group=4, topk_group=2)[0].tolist() == [[0, 1, 2, 3]]
    assert check(device, torch.tensor([[0.0, -0.0, 0.0]]), 3, score="topk_softmax", bias=torch.tensor([-0.0, 0.0, -0.0]))[0].tolist() == [[0, 1, 2]]


def test_small_differences_are_no_ties(device):
    scores = torch.full((1, 256), 0.25)
    scores[0, 3], scores[0, 200] = 0.5, 0.5 + 2e-5
    assert check(device, logits_of(scores), 2, score="sigmoid")[0].tolist() == [[200, 3]]


def test_ranking_is_by_score_where_large_logits_saturate(device):
    logits = torch.tensor([[20.0, 60.0, 40.0, 0.0]])
    assert check(device, logits, 3, score="sigmoid")[0].tolist() == [[0, 1, 2]]
    assert check(device, logits, 3, score="topk_softmax")[0].tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalize", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_rows_of_nan_and_infinities_give_distinct_ids_and_finite_weights(score, renormalize, dtype, device):
    logits = grid(5, 128, dtype=dtype)
    logits[0], logits[1], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 1:] = math.nan
    ids, weights, *_ = check(device, logits, 8, score=score, renormalize=renormalize)
    assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 128 for row in ids.tolist())
    assert bool(weights.isfinite().all())
    assert ids[3, 0] == 0 and bool((weights[3, 1:] == 0).all()) and bool((weights[0] == 0).all())
    alone = check(device, logits[4:], 8, score=score, renormalize=renormalize)
    assert torch.equal(ids[4:], alone[0]) and torch.equal(weights[4:], alone[1])


def test_renormalising_zeros_gives_zeros_and_leaves_normal_rows_alone(device):
    bias = torch.arange(8.0)
    ids, weights, *_ = check(device, torch.full((2, 8), -200.0), 3, score="sigmoid", bias=bias, renormalize=True)
    assert ids.tolist() == [[7, 6, 5]] * 2 and weights.tolist() == [[0.0] * 3] * 2
    huge = torch.zeros(1, 8)
    huge[0, 2] = 1e30
    assert check(device, huge, 2, renormalize=True)[1].tolist() == [[1.0, 0.0]]
    plain, divided = (check(device, grid(6, 32), 4, score="sigmoid", renormalize=r)[1] for r in (False, True))
    assert torch.equal(divided, plain / plain.sum(-1, keepdim=True))


def test_twenty_calls_give_the_same_bits(device):
    args = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments(grid(3, 32, span=3), 4)]
    first = route_module._route_triton(*args)
    for _ in range(20 if device.type == "cuda" else 3):
        assert all(torch.equal(a, b) for a, b in zip(first, route_module._route_triton(*args), strict=True))


# ---- padding, experts elsewhere, strides, sizes


@pytest.mark.parametrize("valid", (0, 1, 5, 64, 70))
def test_padding_rows_are_not_routed(valid, device):
    logits = grid(64, 16, seed=2)
    clean = check(device, logits, 2)
    inside = min(valid, 64)
    logits[inside:] = math.nan
    padded = check(device, logits, 2, num_valid=torch.tensor([valid], dtype=torch.int32))
    assert torch.equal(padded[0][:inside], clean[0][:inside]) and torch.equal(padded[1][:inside], clean[1][:inside])
    assert bool((padded[0][inside:] == -1).all()) and int(padded[2].sum()) == 2 * inside


def test_remote_experts_keep_their_place_in_the_choice(device):
    whole = check(device, grid(9, 16), 4, renormalize=True)
    window = check(device, grid(9, 16), 4, renormalize=True, local=(4, 6))
    here = (whole[0] >= 4) & (whole[0] < 10)
    assert torch.equal(window[0], torch.where(here, whole[0], -1)) and torch.equal(window[1], torch.where(here, whole[1], 0.0))
    expert_map = torch.full((16,), -1, dtype=torch.int64)
    expert_map[4:10] = torch.arange(6)
    mapped = check(device, grid(9, 16), 4, renormalize=True, local=expert_map)
    assert all(torch.equal(a, b) for a, b in zip(mapped[4:], window[4:], strict=True)) and torch.equal(mapped[2][:6], window[2])


def test_strided_rows_equal_contiguous(device):
    logits = grid(6, 40)
    wanted = check(device, logits, 3)
    for same in (
        torch.cat([logits, logits], 1)[:, :40],
        torch.stack([logits, logits], 1).flatten(0, 1)[::2],
        torch.cat([logits[:, :1], logits], 1)[:, 1:],
    ):
        assert all(torch.equal(a, b) for a, b in zip(check(device, same, 3), wanted, strict=True))
    one = check(device, logits[:1].expand(6, 40), 3)
    assert torch.equal(one[0], wanted[0][:1].expand(6, 3))


def test_zero_tokens(device):
    routing = route(torch.zeros(0, 16, device=device), 4, score="sigmoid")
    assert routing.ids.shape == (0, 4) and routing.counts.tolist() == [0] * 16 and routing.offsets.tolist() == [0] * 17


@pytest.mark.parametrize("experts", (1, 3, 6, 60, 72))
def test_any_number_of_experts(experts, device):
    check(device, grid(2, experts), min(experts, 22))


def test_limits_are_the_same_for_every_batch_size():
    for tokens in (0, 1, 4096):
        with pytest.raises(ValueError, match=r"route: logits must have 1 to 2048 experts \(columns\), got 2049 with top_k 8"):
            route(torch.zeros(1, 2049).expand(tokens, 2049), 8)
        with pytest.raises(ValueError, match="route: top_k must be between 1 and 64 for 128 experts in 1 groups of which 1 are kept .*, got 65"):
            route(torch.zeros(1, 128).expand(tokens, 128), 65)


def bad_calls():
    yield "logits must be a torch.Tensor, got list", TypeError, dict(logits=[1.0])
    yield "logits must be float32 or bfloat16 or float16, got float64", TypeError, dict(logits=torch.zeros(2, 8).double())
    yield "logits must be 2-D, got shape (8,)", ValueError, dict(logits=torch.zeros(8))
    yield "logits must have last stride 1, got shape (8, 8) with strides (1, 8)", ValueError, dict(logits=torch.zeros(8, 8).t())
    yield "logits must have 1 to 2048 experts (columns), got 0", ValueError, dict(logits=torch.zeros(2, 0))
    yield "logits requires grad", ValueError, dict(logits=torch.zeros(2, 8, requires_grad=True))
    yield "score must be one of 'softmax', 'topk_softmax', 'sigmoid', 'sqrt_softplus', got 'relu'", ValueError, dict(score="relu")
    yield "top_k must be between 1 and 8 for 8 experts", ValueError, dict(top_k=9)
    yield "top_k must be between 1 and 8 for 8 experts", ValueError, dict(top_k=0)
    yield "top_k must be an int, got float", TypeError, dict(top_k=2.0)
    yield "top_k must be between 1 and 2 for 8 experts in 4 groups of which 1 are kept", ValueError, dict(top_k=3, n_group=4)
    yield "n_group must divide the number of experts 8, got 3", ValueError, dict(n_group=3)
    yield "n_group must divide the number of experts 8, got 0", ValueError, dict(n_group=0)
    yield "topk_group must be between 1 and n_group 2, got 3", ValueError, dict(n_group=2, topk_group=3)
    yield "bias must be a torch.Tensor, got float", TypeError, dict(bias=1.0)
    yield "bias must have shape (8", ValueError, dict(bias=torch.zeros(9))
    yield "bias must be contiguous", ValueError, dict(bias=torch.zeros(16)[::2])
    yield "num_valid must be int32 or int64, got float32", TypeError, dict(num_valid=torch.ones(1))
    yield "local[0] (first expert) must be between 0 and 7, got 8", ValueError, dict(local=(8, 1))
    yield "tokens * top_k must be at most", ValueError, dict(logits=torch.zeros(1, 8).expand(2**29, 8), top_k=4)
    yield "scale must be a float, got str", TypeError, dict(scale="a")
    yield "scale must be a float, got NoneType", TypeError, dict(scale=None)
    yield "scale must be a float, got Tensor", TypeError, dict(scale=torch.ones(()))  # a float of it would wait for the device
    yield "scale must be a float, got bool", TypeError, dict(scale=True)
    yield "renormalize must be a bool, got str", TypeError, dict(renormalize="a")
    yield "n_group must be an int, got str", TypeError, dict(n_group="a")
    yield "topk_group must be an int, got NoneType", TypeError, dict(topk_group=None)
    yield "score must be one of 'softmax', 'topk_softmax', 'sigmoid', 'sqrt_softplus', got None", ValueError, dict(score=None)
    yield "local[0] (first expert) must be an int, got str", TypeError, dict(local=("a", 2))
    yield "num_valid must be a torch.Tensor, got str", TypeError, dict(num_valid="a")


@pytest.mark.parametrize("text, error, change", list(bad_calls()), ids=lambda v: v[:40].replace(" ", "-") if isinstance(v, str) else "")
def test_bad_input_is_named(text, error, change):
    call = {"logits": torch.zeros(2, 8), "top_k": 2, **change}
    with pytest.raises(error) as raised:
        route(call.pop("logits"), call.pop("top_k"), **call)
    assert text in str(raised.value) and str(raised.value).startswith("route: ")


@pytest.mark.parametrize("tokens", (0, 1, 7))
def test_opcheck(tokens, device):
    logits, bias = grid(tokens, 16).to(device), torch.zeros(16, device=device)
    torch.library.opcheck(OP, (logits, 4, "sigmoid", bias, 4, 2, True, 2.5, torch.tensor(3, device=device), 5, 2, None))
    torch.library.opcheck(OP, (logits.bfloat16(), 2, "softmax", None, 1, 1, False, 1.0, None, 16, 0, torch.arange(16, device=device)))
