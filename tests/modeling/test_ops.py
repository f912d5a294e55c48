"""The three forms of the operator against its definition: outputs, gradients, states."""

import math
from dataclasses import replace

import pytest
import torch
from definition import LOG_SPACE, Case, define, distance, make_case, start_of, visible_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import FLOAT64, FLOAT64_GRADIENT

from linearize.modeling.chunked import advance, hybrid_chunked
from linearize.modeling.configuration_linearized import K_MAPS, MIXING_RULES
from linearize.modeling.feature_maps import FEATURE_MAPS
from linearize.modeling.ops import hybrid_quadratic, hybrid_recurrent, hybrid_step, masks, positions

MAPS = list(FEATURE_MAPS)
many = settings(max_examples=20, deadline=None, derandomize=True)


def chunked(case, **options):
    return hybrid_chunked(case.op, *case.qkv, start_of(case), **options)


def recurrent(case):
    return hybrid_recurrent(case.op, *case.qkv, start_of(case))


def sums(state):
    """S and z of a state without the shift of maps in log space."""
    scale = state.shift.exp() if state.shift.shape[-1] else torch.ones_like(state.z)
    return state.S * scale[..., None], state.z * scale


def assert_same(case, out, expected):
    """Outputs and every gradient agree."""
    assert distance(out, expected) < FLOAT64
    got, wanted = case.gradients(out), case.gradients(expected)
    for name, gradient in got.items():
        assert distance(gradient, wanted[name]) < FLOAT64_GRADIENT, name


def assert_same_state(state, expected):
    assert torch.equal(state.seen, expected.seen)
    for name, a, b in zip(("S", "z"), sums(state), sums(expected)):
        assert distance(a, b) < FLOAT64, name
    for name in ("sink_k", "sink_v", "window_k", "window_v"):
        assert torch.equal(getattr(state, name), getattr(expected, name)), name


# ---------------------------------------------------------------- worked examples
def golden(mixing, window, sinks=0, gamma=0.5):
    """The three tokens of docs/concepts.md with elu1, D = Dv = 2, scaling 1, one head."""
    case = make_case(
        "elu1",
        mixing,
        tokens=3,
        window=1,
        sinks=sinks,
        batch=1,
        heads=1,
        kv_heads=1,
        dim=2,
        v_dim=2,
    )
    rows = dict(
        q=[[0, 0], [1, 0], [0, 1]], k=[[1, 0], [0, 1], [0, 0]], v=[[1, 0], [0, 1], [1, 1]]
    )  # fmt: skip
    q, k, v = (torch.tensor(x, dtype=torch.float64)[None, None] for x in rows.values())
    with torch.no_grad():
        if mixing == "lolcats":
            case.heads.gate.fill_(math.log(gamma / (1 - gamma)))
        else:
            case.heads.beta.fill_(0.0 if mixing == "kernel" else math.log(gamma))
        if mixing == "calibrated":
            case.heads.alpha.zero_()
    op = replace(case.heads.operator(scaling=1.0), window=window)
    return Case("elu1", case.heads, op, q, k, v)


FORMS = {
    "quadratic": lambda case: hybrid_quadratic(case.op, *case.qkv).out,
    "recurrent": lambda case: recurrent(case)[0],
    "chunked": lambda case: chunked(case, chunk=2)[0],
    "definition": lambda case: define(case, *case.qkv)[0],
}


@pytest.mark.parametrize("form", FORMS)
def test_three_tokens_of_plain_linear_attention(form):
    out = FORMS[form](golden("lolcats", window=0))[0, 0]
    expected = torch.tensor([[1, 0], [5 / 9, 4 / 9], [7 / 12, 2 / 3]], dtype=torch.float64)
    assert distance(out, expected) < FLOAT64


def test_states_of_the_three_tokens():
    case = golden("lolcats", window=0)
    for tokens, S, z in (
        (1, [[2, 0], [1, 0]], [2, 1]),
        (2, [[2, 1], [1, 2]], [3, 3]),
        (3, [[3, 2], [2, 3]], [4, 4]),
    ):
        state = advance(case.op, start_of(case), case.k[:, :, :tokens], case.v[:, :, :tokens])
        assert state.S[0, 0].tolist() == S
        assert state.z[0, 0].tolist() == z


HYBRID_ROWS = {  # mixing: the third row as a formula, and as docs/concepts.md prints it
    "lolcats": (
        torch.tensor([4 + 0.5 / math.e, 0.5 + 0.5 / math.e]) / (4.5 + 0.5 / math.e),
        [0.8932523, 0.1460180],
    ),
    "kernel": (torch.tensor([5, 1 + math.e]) / (5 + math.e), [0.6478126, 0.4817499]),
}
HYBRID_ROWS["calibrated"] = HYBRID_ROWS["lolcats"]  # with alpha = 0 they are one rule


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mixing", MIXING_RULES)
def test_three_tokens_of_the_hybrid(form, mixing):
    out = FORMS[form](golden(mixing, window=2))[0, 0]
    formula, printed = HYBRID_ROWS[mixing]
    assert distance(out[2], formula) < 1e-6
    assert distance(out[2], torch.tensor(printed)) < 1e-6
    softmax = torch.tensor([[1, 0], [math.e / (1 + math.e), 1 / (1 + math.e)]], dtype=torch.float64)
    assert distance(out[:2], softmax) < FLOAT64


@pytest.mark.parametrize("form", FORMS)
def test_three_tokens_with_a_sink_are_plain_softmax(form):
    out = FORMS[form](golden("kernel", window=2, sinks=1))[0, 0, 2]
    weights = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64).softmax(0)
    assert distance(out, weights @ golden("kernel", window=2).v[0, 0]) < FLOAT64


# ---------------------------------------------------------------- the definition
@pytest.mark.parametrize("mixing", MIXING_RULES)
@pytest.mark.parametrize("name", MAPS)
def test_definition_row_by_row(name, mixing):
    case = make_case(name, mixing, tokens=11, window=3, sinks=2)
    rows = hybrid_quadratic(case.op, *case.qkv)
    out, weights = define(case, *case.qkv)
    assert_same(case, rows.out, out)
    assert distance(rows.log_weights.exp(), weights) < FLOAT64


@given(data=st.data())
@many
def test_definition_with_every_option(data):
    options = data.draw(
        st.fixed_dictionaries(
            dict(
                feature_map=st.sampled_from(MAPS), mixing=st.sampled_from(MIXING_RULES),
                tokens=st.integers(1, 12), window=st.integers(1, 3),
                sinks=st.sampled_from([0, 2, 9]), kv_heads=st.sampled_from([1, 2, 4]),
                k_map=st.sampled_from(K_MAPS), softcap=st.sampled_from([None, 0.7]),
                linear=st.booleans(), sink_logit=st.booleans(), seed=st.integers(0, 99),
            )
        )
    )  # fmt: skip
    case = make_case(**options)
    T = options["tokens"]
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=2 * T, max_size=2 * T))).view(
        2, T
    )
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=T, max_size=T))
    documents = torch.repeat_interleave(torch.arange(T), torch.tensor(lengths))[:T].expand(2, T)
    rows = hybrid_quadratic(case.op, *case.qkv, valid=valid, documents=documents)
    out, weights = define(case, *case.qkv, valid=valid, documents=documents)
    assert_same(case, rows.out, out)
    assert distance(rows.log_weights.exp(), weights) < FLOAT64
    linear = masks(valid, documents, case.op.window, case.op.sinks)[1][:, None]
    assert distance(rows.linear_mass, (weights * linear).sum(-1)) < FLOAT64


@pytest.mark.parametrize("name", ["hedgehog", "hedgehog_exp"])
def test_definition_for_some_queries(name):
    case = make_case(name, tokens=14)
    queries = torch.tensor([[0, 5, 13], [2, 2, 9]])
    every, some = (hybrid_quadratic(case.op, *case.qkv, queries=x) for x in (None, queries))
    for whole, part in zip(every, some):
        index = queries[:, None].expand(-1, 4, -1)
        index = index if whole.ndim == 3 else index[..., None].expand(-1, -1, -1, whole.shape[-1])
        assert distance(part, whole.gather(2, index)) < FLOAT64


def test_positions_count_the_valid_tokens_of_each_document():
    valid = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1], [5, 5, 5, 2, 2, 2]])
    assert positions(valid, None).tolist() == [[0, 1, 1, 2, 3, 4], [-1, 0, 1, 1, 2, 3]]
    assert positions(valid, documents).tolist() == [[0, 1, 1, 2, 0, 1], [-1, 0, 1, -1, 0, 1]]


@pytest.mark.parametrize("window", [0, 1, 4, 7])
@pytest.mark.parametrize("sinks", [0, 2, 9])
def test_masks_hold_each_pair_once(window, sinks):
    for tokens in {
        1,
        max(window - 1, 1),
        max(window, 1),
        window + 1,
        window + sinks + 1,
        3 * window + 1,
    }:
        exact, linear = masks(torch.ones(1, tokens, dtype=torch.bool), None, window, sinks)
        causal = torch.ones(tokens, tokens, dtype=torch.int64).tril()
        assert torch.equal(exact[0].long() + linear[0].long(), causal)
        for t in range(tokens):
            keys = visible_keys(t, [True] * tokens, [0] * tokens, window, sinks)
            assert [m[0, t].nonzero().flatten().tolist() for m in (exact, linear)] == [
                sorted(x) for x in keys
            ]


# ---------------------------------------------------------------- three forms, one function
@pytest.mark.parametrize("mixing", MIXING_RULES)
@pytest.mark.parametrize("name", MAPS)
def test_three_forms_agree(name, mixing):
    case = make_case(name, mixing, tokens=13, window=4, sinks=2)
    expected = hybrid_quadratic(case.op, *case.qkv).out
    steps, chunks = recurrent(case), chunked(case, chunk=4)
    assert_same(case, steps[0], expected)
    assert_same(case, chunks[0], expected)
    assert_same_state(chunks[1], steps[1])


def lengths_around(window, sinks):
    """Lengths where something can go wrong."""
    return sorted(
        {max(x, 1) for x in (1, window - 1, window, window + 1, window + sinks, 3 * window + 1)}
    )


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_three_forms_agree_everywhere(data):
    window, sinks = data.draw(st.sampled_from([0, 1, 4, 7])), data.draw(st.sampled_from([0, 2, 9]))
    tokens = data.draw(st.sampled_from(lengths_around(window, sinks)) | st.integers(1, 24))
    case = make_case(
        data.draw(st.sampled_from(MAPS)), data.draw(st.sampled_from(MIXING_RULES)), tokens=tokens,
        window=window, sinks=sinks, kv_heads=data.draw(st.sampled_from([1, 2, 4])), batch=1,
        k_map=data.draw(st.sampled_from(K_MAPS)), softcap=data.draw(st.sampled_from([None, 0.7])),
        seed=data.draw(st.integers(0, 99)),
        sink_logit=window > 0 and data.draw(st.booleans()),
    )  # fmt: skip
    sizes = dict(chunk=data.draw(st.integers(1, tokens)), segment=data.draw(st.integers(1, tokens)))
    expected = hybrid_quadratic(case.op, *case.qkv).out
    steps, chunks = recurrent(case), chunked(case, **sizes)
    assert_same(case, steps[0], expected)
    assert_same(case, chunks[0], expected)
    assert_same_state(chunks[1], steps[1])


@given(data=st.data())
@many
def test_any_split_over_calls(data):
    case = make_case(
        data.draw(st.sampled_from(MAPS)), tokens=17, window=data.draw(st.sampled_from([1, 4, 7])),
        sinks=data.draw(st.sampled_from([0, 2, 9])), batch=1,
        k_map=data.draw(st.sampled_from(K_MAPS)),
    )  # fmt: skip
    whole, last = chunked(case, chunk=3)
    outs, state, at = [], start_of(case), 0
    while at < 17:
        length = data.draw(st.integers(1, 17 - at))
        part = [x[:, :, at : at + length] for x in case.qkv]
        form = hybrid_recurrent if length == 1 else hybrid_chunked
        out, state = form(case.op, *part, state)
        outs.append(out)
        at += length
    assert_same(case, torch.cat(outs, 2), whole)
    assert_same_state(state, last)


@pytest.mark.parametrize(("window", "sinks"), [(4, 2), (1, 0), (1, 3), (5, 0)])
@pytest.mark.parametrize("name", MAPS)
def test_step_without_masks_once_sinks_and_window_are_full(name, window, sinks):
    case = make_case(name, tokens=window + sinks + 5, window=window, sinks=sinks, sink_logit=True)
    full = window + sinks
    state = recurrent(first_tokens(case, full))[1]
    for t in range(full, full + 5):
        token = [x[:, :, t : t + 1] for x in case.qkv]
        expected, after = hybrid_step(case.op, *token, state)
        out, state = hybrid_step(case.op, *token, state, settled=True)
        assert distance(out, expected) < FLOAT64
        assert_same_state(state, after)


def first_tokens(case, count):
    q, k, v = (x[:, :, :count] for x in case.qkv)
    return replace(case, q=q, k=k, v=v)


@pytest.mark.parametrize("name", MAPS)
def test_state_is_the_sum_over_keys_that_left(name):
    case = make_case(name, tokens=13, window=4, sinks=2)
    features = case.heads.feature_map_k(case.k)[
        :, :, 2:10
    ]  # positions 2 .. 9 are neither sinks nor among the last 3
    features = features.exp() if name in LOG_SPACE else features
    for _, state in (recurrent(case), chunked(case, chunk=4), chunked(case, segment=5)):
        S, z = sums(state)
        assert distance(S, features.mT @ case.v[:, :, 2:10]) < FLOAT64
        assert distance(z, features.sum(2)) < FLOAT64
        assert torch.equal(state.window_k, case.k[:, :, -3:])
        assert torch.equal(state.sink_v, case.v[:, :, :2])
        assert state.seen.tolist() == [13, 13]


@pytest.mark.parametrize("name", LOG_SPACE)
def test_log_space_is_the_plain_exponential(name):
    case = make_case(name, tokens=13)
    plain = replace(
        case.op,
        log_q=False,
        log_k=False,
        phi_q=lambda x: case.op.phi_q(x).exp(),
        phi_k=lambda x: case.op.phi_k(x).exp(),
    )
    expected = Case(name, case.heads, plain, *case.qkv)
    for form in ("quadratic", "recurrent", "chunked"):
        assert_same(case, FORMS[form](case), FORMS[form](expected))


@pytest.mark.parametrize("name", MAPS)
def test_shared_key_map_is_the_map_of_every_head(name):
    shared, each = (make_case(name, k_map=k_map) for k_map in K_MAPS)
    weights = dict(shared.heads.named_parameters())
    with torch.no_grad():
        for key, parameter in each.heads.named_parameters():
            same = weights[key]
            parameter.copy_(same if same.shape == parameter.shape else same.repeat_interleave(2, 0))
    each.op = replace(each.heads.operator(scaling=shared.op.scaling), window=4)
    if name == "favor":
        assert torch.equal(each.heads.feature_map_k.omega, shared.heads.feature_map_k.omega)
    for form in ("recurrent", "chunked"):
        each.q, each.k, each.v = shared.qkv
        assert distance(FORMS[form](each), FORMS[form](shared)) < FLOAT64
    assert chunked(shared)[1].S.shape[1] == 2
    assert chunked(each)[1].S.shape[1] == 4


@pytest.mark.parametrize("mixing", MIXING_RULES)
@pytest.mark.parametrize("name", MAPS)
def test_gradcheck_of_the_chunked_form(name, mixing):
    case = make_case(
        name,
        mixing,
        tokens=7,
        window=2,
        sinks=1,
        batch=1,
        heads=2,
        kv_heads=1,
        dim=3,
        v_dim=2,
        seed=3,
    )
    names = list(case.leaves)

    def outputs(*tensors):
        values = dict(zip(names, tensors))
        parameters = {n: x for n, x in values.items() if n not in "qkv"}

        def run(q, k, v):
            op = case.heads.operator(scaling=case.op.scaling)
            return hybrid_chunked(op, q, k, v, start_of(case), chunk=3)[0]

        return torch.func.functional_call(
            Bound(case.heads, run), parameters, tuple(values[n] for n in "qkv")
        )

    fast = (name, mixing) != (
        "hedgehog",
        "calibrated",
    )  # every entry of the Jacobian, or a random projection of it
    assert torch.autograd.gradcheck(outputs, tuple(case.leaves.values()), fast_mode=fast)


class Bound(torch.nn.Module):
    """`run` as the forward of a module whose parameters are those of `heads`."""

    def __init__(self, heads, run):
        super().__init__()
        self.run = run
        for name, child in heads.named_children():
            self.add_module(name, child)
        for name, parameter in heads.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def forward(self, *args):
        return self.run(*args)
