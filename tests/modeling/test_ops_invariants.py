"""What holds for any weights: causality, normalisation, padding, packing, range, precision."""

from dataclasses import replace

import pytest
import torch
from definition import ALWAYS_POSITIVE, LOG_SPACE, distance, make_case, start_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import (
    CONSTANT_FLOAT32,
    DRIFT,
    EXTREME_FLOAT32,
    FLOAT32,
    FLOAT32_GRADIENT,
    FLOAT64,
    FLOAT64_GRADIENT,
    HALF_LARGE_VALUES,
    SOFTMAX_FLOAT32,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from linearize.modeling.chunked import hybrid_chunked, hybrid_packed
from linearize.modeling.configuration_linearized import MIXING_RULES
from linearize.modeling.feature_maps import FEATURE_MAPS
from linearize.modeling.ops import hybrid_quadratic, hybrid_recurrent, hybrid_step, masks

MAPS = list(FEATURE_MAPS)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMS = {
    "quadratic": lambda case: hybrid_quadratic(case.op, *case.qkv).out,
    "recurrent": lambda case: hybrid_recurrent(case.op, *case.qkv, start_of(case))[0],
    "chunked": lambda case: hybrid_chunked(case.op, *case.qkv, start_of(case), chunk=4)[0],
}


def all_forms(function):
    return pytest.mark.parametrize("form", FORMS)(function)


def all_maps(function):
    return pytest.mark.parametrize("name", MAPS)(function)


def all_rules(function):
    return pytest.mark.parametrize("mixing", MIXING_RULES)(function)


# ---------------------------------------------------------------- weights
@all_forms
@all_maps
def test_constant_values_stay(form, name):
    for dtype, tolerance in ((torch.float64, FLOAT64), (torch.float32, CONSTANT_FLOAT32)):
        case = make_case(name, dtype=dtype, tokens=21)
        case.v = torch.ones_like(case.v)
        out = FORMS[form](case)
        assert distance(out, torch.ones_like(out)) < tolerance


@all_forms
@pytest.mark.parametrize("name", ALWAYS_POSITIVE)
def test_one_hot_values_show_the_weights(form, name):
    case = make_case(name, tokens=15, v_dim=15, batch=1)
    case.v = torch.eye(15, dtype=torch.float64).expand(1, 2, -1, -1)
    weights = FORMS[form](case)  # [1, H, T, T]
    causal = torch.ones(15, 15, dtype=torch.bool).tril()
    assert (weights[..., causal] > 0).all()
    assert (weights[..., ~causal] == 0).all()
    assert distance(weights.sum(-1), torch.ones(1, 4, 15)) < FLOAT64
    assert distance(weights, hybrid_quadratic(case.op, *case.qkv).log_weights.exp()) < FLOAT64


@all_forms
def test_a_branch_owns_its_keys(form):
    """Without the linear branch exact weights keep their ratios; without the window, the others."""
    case = make_case(tokens=15, v_dim=15, batch=1)
    case.v = torch.eye(15, dtype=torch.float64).expand(1, 2, -1, -1)
    both = FORMS[form](case)
    exact, linear = masks(torch.ones(1, 15, dtype=torch.bool), None, case.op.window, case.op.sinks)
    for op, mask in (
        (replace(case.op, linear=False), exact),
        (replace(case.op, window=0, sinks=0), linear),
    ):
        alone = FORMS[form](replace(case, op=op))
        rows = mask[0].any(-1)
        kept = [torch.where(mask, x, 0)[:, :, rows] for x in (alone, both)]
        kept = [x / x.sum(-1, keepdim=True) for x in kept]
        assert distance(*kept) < FLOAT64
        if op.linear is False:
            assert (alone[..., ~exact[0]] == 0).all()


@all_rules
@all_maps
def test_short_rows_are_softmax_attention(name, mixing):
    for tokens, window, sinks in ((9, 7, 2), (9, 9, 0), (9, 1, 8), (40, 64, 4)):
        case = make_case(
            name, mixing, tokens=tokens, window=window, sinks=sinks, dtype=torch.float32
        )
        expected = scaled_dot_product_attention(*case.qkv, is_causal=True, enable_gqa=True)
        for form in ("recurrent", "chunked"):
            assert distance(FORMS[form](case), expected) < SOFTMAX_FLOAT32, form


@all_forms
def test_window_and_sinks_alone_are_banded_softmax_attention(form):
    case = make_case(tokens=21, window=4, sinks=2, linear=False)
    i, j = torch.arange(21)[:, None], torch.arange(21)
    band = (j <= i) & ((i - j < 4) | (j < 2))
    expected = scaled_dot_product_attention(*case.qkv, attn_mask=band, enable_gqa=True)
    assert distance(FORMS[form](case), expected) < FLOAT64


@all_forms
def test_softcap_and_sink_logit_are_softmax_with_them(form):
    """As gemma2 and gpt_oss have them: cap before mask; an extra logit, dropped afterwards."""
    case = make_case(tokens=9, window=9, sinks=0, softcap=0.5, sink_logit=True, kv_heads=4)
    scores = 0.5 * torch.tanh(case.q @ case.k.mT * case.op.scaling / 0.5)
    scores = scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
    extra = case.op.sink_logit[:, None, None].expand(2, 4, 9, 1)
    expected = torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ case.v
    assert distance(FORMS[form](case), expected) < FLOAT64


# ---------------------------------------------------------------- causality
@pytest.mark.parametrize("cut", [1, 6, 16, 20])
@all_maps
def test_later_tokens_do_not_touch_earlier_rows(name, cut):
    """Bit for bit, in the forms that run."""
    case = make_case(name, tokens=21, dtype=torch.float32)
    changed = make_case(name, tokens=21, dtype=torch.float32)
    with torch.no_grad():
        for x, y in zip(
            changed.qkv, make_case(name, tokens=21, dtype=torch.float32, seed=5, size=7).qkv
        ):
            x[:, :, cut:] = y[:, :, cut:]
    for form in ("recurrent", "chunked"):
        before, after = FORMS[form](case), FORMS[form](changed)
        assert torch.equal(before[:, :, :cut], after[:, :, :cut])
        assert not torch.equal(before[:, :, cut:], after[:, :, cut:])


@all_forms
def test_rows_of_a_batch_are_strangers(form):
    case = make_case("hedgehog_exp", tokens=15, batch=3)
    alone = replace(case, q=case.q[1:2], k=case.k[1:2], v=case.v[1:2])
    assert distance(FORMS[form](case)[1:2], FORMS[form](alone)) < FLOAT64


# ---------------------------------------------------------------- padding and packing
PADDING = {
    "left": [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
    "holes": [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0],
    "one-token": [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
}


def assert_padding_is_nothing(case, valid, **sizes):
    """Real rows, gradients and the final state equal those of the tokens without padding."""
    out, state = hybrid_chunked(case.op, *case.qkv, start_of(case), valid=valid, **sizes)
    assert torch.isfinite(out).all()
    parts = []
    for b, row in enumerate(valid):
        part = [x[b : b + 1, :, row] for x in case.qkv]
        alone, last = hybrid_chunked(case.op, *part, start_of(case, slice(b, b + 1)), **sizes)
        parts.append(alone)
        assert distance(out[b : b + 1, :, row], alone) < FLOAT64
        for name, a, b_ in zip(state._fields, (x[b : b + 1] for x in state), last):
            if name.startswith(
                ("sink", "window")
            ):  # slots that no token has filled yet hold anything
                held = min(int(last.seen), a.shape[2])
                held = slice(held) if name.startswith("sink") else slice(a.shape[2] - held, None)
                a, b_ = a[:, :, held], b_[:, :, held]
            assert distance(a, b_) < FLOAT64, name
    if not valid.any():
        return
    direction = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    got = case.gradients(out, direction * valid[:, None, :, None])
    expected = case.gradients(
        torch.cat(parts, 2), torch.cat([d[None, :, row] for d, row in zip(direction, valid)], 2)
    )
    for name in got:
        assert distance(got[name], expected[name]) < FLOAT64_GRADIENT, name


@pytest.mark.parametrize("padding", PADDING)
@all_maps
def test_padding_is_nothing(name, padding):
    valid = torch.tensor([PADDING[padding], [1] * 17], dtype=torch.bool)
    assert_padding_is_nothing(make_case(name, tokens=17), valid, chunk=4)


@given(
    holes=st.lists(st.booleans(), min_size=34, max_size=34), name=st.sampled_from(MAPS),
    chunk=st.integers(1, 17), segment=st.integers(1, 17), window=st.sampled_from([1, 4, 7]),
    sinks=st.sampled_from([0, 2, 9]),
)  # fmt: skip
@settings(max_examples=25, deadline=None, derandomize=True)
def test_padding_anywhere_is_nothing(holes, name, chunk, segment, window, sinks):
    case = make_case(name, tokens=17, window=window, sinks=sinks)
    assert_padding_is_nothing(case, torch.tensor(holes).view(2, 17), chunk=chunk, segment=segment)


@all_maps
def test_content_of_padding_is_never_read(name):
    valid = torch.tensor([PADDING["holes"], PADDING["left"]], dtype=torch.bool)
    case, other = make_case(name, tokens=17), make_case(name, tokens=17)
    with torch.no_grad():
        for x in other.qkv:
            x.copy_(torch.where(valid[:, None, :, None], x, 50 * torch.randn_like(x)))
    outs, states = zip(
        *(hybrid_chunked(c.op, *c.qkv, start_of(c), valid=valid) for c in (case, other))
    )
    real = valid[:, None].expand(-1, 4, -1)
    assert torch.equal(outs[0][real], outs[1][real])
    assert all(torch.equal(a, b) for a, b in zip(*states))


@pytest.mark.parametrize("lengths", [(5, 9, 3), (1, 1, 15), (16, 1), (4, 4, 4, 5)], ids=str)
@all_maps
def test_packed_documents_are_strangers(name, lengths):
    case, other = (
        make_case(name, tokens=17, dtype=torch.float32),
        make_case(name, tokens=17, dtype=torch.float32),
    )
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(
        2, -1
    )
    packed = hybrid_packed(case.op, *case.qkv, start_of(case), documents=documents)
    at = 0
    for length in lengths:
        part = [x[:1, :, at : at + length] for x in case.qkv]
        alone = hybrid_chunked(case.op, *part, start_of(case, slice(1)))[0]
        assert torch.equal(packed[:1, :, at : at + length], alone)
        at += length
    with torch.no_grad():
        for x in other.qkv:
            x[:, :, : lengths[0]] = 3 * torch.randn_like(x[:, :, : lengths[0]])
    replaced = hybrid_packed(other.op, *other.qkv, start_of(other), documents=documents)
    assert torch.equal(replaced[:, :, lengths[0] :], packed[:, :, lengths[0] :])
    assert not torch.equal(replaced[:, :, : lengths[0]], packed[:, :, : lengths[0]])


def test_packed_documents_with_padding_are_the_definition():
    case = make_case(tokens=17)
    documents = torch.tensor([[0] * 5 + [1] * 9 + [2] * 3, [0] * 17])
    valid = torch.tensor([PADDING["holes"], PADDING["left"]], dtype=torch.bool)
    packed = hybrid_packed(case.op, *case.qkv, start_of(case), valid=valid, documents=documents)
    expected = hybrid_quadratic(case.op, *case.qkv, valid=valid, documents=documents).out
    real = valid[:, None].expand(-1, 4, -1)
    assert distance(packed[real], expected[real]) < FLOAT64


# ---------------------------------------------------------------- precision
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@all_maps
def test_state_is_fp32_for_half_inputs(name, dtype):
    case = make_case(name, dtype=DTYPES[dtype], tokens=13)
    for form in (hybrid_recurrent, hybrid_chunked):
        out, state = form(case.op, *case.qkv, start_of(case))
        assert {x.dtype for x in (state.S, state.z, state.shift)} == {torch.float32}
        assert {x.dtype for x in (state.sink_k, state.window_v, out)} == {DTYPES[dtype]}


def test_state_does_not_drift():
    """4096 times the same bf16 token: a bf16 sum would stop growing after some hundreds."""
    case = make_case(
        dtype=torch.bfloat16, tokens=1, batch=1, heads=1, kv_heads=1, window=1, sinks=0
    )
    state, features = start_of(case), case.heads.feature_map_k(case.k)[:, :, 0].double()
    with torch.no_grad():
        for _ in range(4097):  # the last one is still in the window
            out, state = hybrid_step(case.op, *case.qkv, state)
    expected = 4096 * features
    assert ((state.z - expected) / expected).abs().max() < DRIFT
    assert distance(out, case.v) < 1e-2  # bf16


@all_rules
@all_maps
def test_fp32_against_float64(name, mixing):
    case, exact = (
        make_case(name, mixing, dtype=x, tokens=200, window=16)
        for x in (torch.float32, torch.float64)
    )
    expected = FORMS["chunked"](exact)
    wanted = exact.gradients(expected)
    for form, function in FORMS.items():
        out = function(case)
        assert distance(out, expected) < FLOAT32, form
        if form != "recurrent":
            for leaf, gradient in case.gradients(out).items():
                assert distance(gradient, wanted[leaf]) < FLOAT32_GRADIENT, leaf


@pytest.mark.parametrize("size", [0, 1e-20, 1e-6, 80, 1e4], ids=lambda size: f"times-{size:g}")
@pytest.mark.parametrize("dtype", DTYPES)
@all_maps
def test_extreme_inputs_stay_finite(name, dtype, size):
    for mixing in MIXING_RULES:
        for tokens in (1, 64):
            case = make_case(
                name,
                mixing,
                dtype=DTYPES[dtype],
                tokens=tokens,
                size=size,
                batch=1,
                heads=2,
                kv_heads=1,
            )
            outs = {
                "chunked": hybrid_chunked(case.op, *case.qkv, start_of(case))[0],
                "quadratic": hybrid_quadratic(case.op, *case.qkv).out,
            }
            for form, out in outs.items():
                assert torch.isfinite(out).all(), form
                for leaf, gradient in case.gradients(out).items():
                    assert torch.isfinite(gradient).all(), (mixing, form, tokens, leaf)


LARGE_INPUTS = [(name, "lolcats") for name in MAPS if name != "centroids"] + [
    (name, rule) for name in LOG_SPACE for rule in MIXING_RULES[::2]
]  # a key's weight on a far centroid, below 1e-38, is lost in fp32


@pytest.mark.parametrize(("name", "mixing"), LARGE_INPUTS)
def test_large_feature_inputs_keep_their_digits(name, mixing):
    """fp32 loses bounded features below 1e-38; under `lolcats` the window outweighs them anyway."""
    case, exact = (
        make_case(name, mixing, dtype=x, tokens=64) for x in (torch.float32, torch.float64)
    )
    with torch.no_grad():
        for x, y in zip(case.qkv[:2], exact.qkv[:2]):
            y.copy_(x.mul_(80))
        exact.v.copy_(case.v)
    out, expected = FORMS["chunked"](case), FORMS["chunked"](exact)
    assert distance(out, expected) < EXTREME_FLOAT32
    wanted = exact.gradients(expected)
    for leaf, gradient in case.gradients(out).items():
        assert distance(gradient, wanted[leaf]) < EXTREME_FLOAT32, leaf


@all_maps
def test_large_values_in_fp16(name):
    case, wide = (
        make_case(name, dtype=x, tokens=256, window=16) for x in (torch.float16, torch.float32)
    )
    with torch.no_grad():
        for x, y in zip(case.qkv, wide.qkv):
            y.copy_(x)
        case.v *= 1e4
        wide.v.copy_(case.v)
    out, expected = FORMS["chunked"](case), FORMS["chunked"](wide)
    assert torch.isfinite(out).all()
    assert distance(out, expected) < HALF_LARGE_VALUES


# ---------------------------------------------------------------- memory
class Largest(TorchDispatchMode):
    """Records the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return made


@pytest.mark.parametrize("name", ["hedgehog", "favor"])
def test_memory_is_linear_in_the_length(name):
    sizes = []
    for tokens in (1024, 2048):
        case = make_case(
            name, tokens=tokens, batch=1, heads=1, kv_heads=1, dtype=torch.float32, window=16
        )
        with Largest() as seen, torch.no_grad():
            hybrid_chunked(case.op, *case.qkv, start_of(case))
        sizes.append(seen.numel)
    assert sizes[0] == sizes[1] < 1024 * 1024


def test_no_tokens_change_nothing():
    case = make_case(tokens=5)
    state = hybrid_chunked(case.op, *case.qkv, start_of(case))[1]
    out, same = hybrid_chunked(case.op, *(x[:, :, :0] for x in case.qkv), state)
    assert out.shape == (2, 4, 0, 5)
    assert all(torch.equal(a, b) for a, b in zip(state, same))
