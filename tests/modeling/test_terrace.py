"""Windows in terraces: the query's own block and the one before, in every form of the operator."""

from dataclasses import replace

import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama
from definition import define, distance, make_case, start_of
from families import cache_argument
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import assert_same, assert_same_state, chunked, recurrent
from tolerances import FLOAT64, FLOAT64_GRADIENT, GUARD, LOGITS, SOFTMAX_FLOAT32
from transformers import DynamicCache

from linearize import branches, convert
from linearize.data import TokenDataset
from linearize.modeling.chunked import hybrid_chunked, hybrid_packed
from linearize.modeling.configuration_linearized import K_MAPS, MIXING_RULES
from linearize.modeling.ops import hybrid_quadratic, hybrid_recurrent, hybrid_step, masks
from linearize.modeling.rows import hybrid_rows
from linearize.transfer import exact_tokens, transfer_attention

MAPS = ("hedgehog", "taylor", "centroids")


def terrace(feature_map="hedgehog", mixing="lolcats", **options):
    return make_case(feature_map, mixing, window_kind="terrace", **options)


def test_the_window_is_the_own_block_and_the_one_before():
    exact, linear = masks(torch.ones(1, 11, dtype=torch.bool), None, 3, 1, kind="terrace")
    for t in range(11):
        first = max(0, t // 3 - 1) * 3
        seen = {0, *range(first, t + 1)}
        assert set(exact[0, t].nonzero().flatten().tolist()) == seen
        assert set(linear[0, t].nonzero().flatten().tolist()) == set(range(t + 1)) - seen


@pytest.mark.parametrize("mixing", MIXING_RULES)
@pytest.mark.parametrize("feature_map", MAPS)
def test_the_definition(feature_map, mixing):
    case = terrace(feature_map, mixing, tokens=11, window=2, sinks=1)
    valid = torch.tensor([[True] * 11, [False, True, True, False] + [True] * 7])
    documents = torch.tensor([[0] * 11, [0] * 5 + [1] * 6])
    out, _ = define(case, *case.qkv, valid=valid, documents=documents)
    found = hybrid_quadratic(case.op, *case.qkv, valid=valid, documents=documents)
    assert distance(found.out * valid[:, None, :, None], out) < FLOAT64


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_three_forms_agree_everywhere(data):
    tokens = data.draw(st.integers(1, 24))
    case = terrace(
        data.draw(st.sampled_from(MAPS)), data.draw(st.sampled_from(MIXING_RULES)), tokens=tokens,
        window=data.draw(st.sampled_from([0, 1, 3, 4])),
        sinks=data.draw(st.sampled_from([0, 2, 9])),
        kv_heads=data.draw(st.sampled_from([1, 2, 4])), batch=1, seed=data.draw(st.integers(0, 99)),
        k_map=data.draw(st.sampled_from(K_MAPS)),
    )  # fmt: skip
    sizes = dict(chunk=data.draw(st.integers(1, tokens)), segment=data.draw(st.integers(1, tokens)))
    expected = hybrid_quadratic(case.op, *case.qkv).out
    steps, chunks = recurrent(case), chunked(case, **sizes)
    assert_same(case, steps[0], expected)
    assert_same(case, chunks[0], expected)
    assert_same_state(chunks[1], steps[1])


@pytest.mark.parametrize("sizes", [(17,), (1,) * 17, (5, 8, 4), (12, 1, 4), (1, 15, 1)], ids=str)
def test_any_split_over_calls(sizes):
    case = terrace(tokens=17, window=3, sinks=2)
    whole, last = chunked(case, chunk=4)
    outs, state, at = [], start_of(case), 0
    for length in sizes:
        part = [x[:, :, at : at + length] for x in case.qkv]
        form = hybrid_recurrent if length == 1 else hybrid_chunked
        out, state = form(case.op, *part, state)
        outs.append(out)
        at += length
    assert_same(case, torch.cat(outs, 2), whole)
    assert_same_state(state, last)


def test_a_step_once_everything_is_full():
    case = terrace(tokens=19, window=3, sinks=2)
    expected = hybrid_quadratic(case.op, *case.qkv).out
    state = chunked(replace(case, q=case.q[:, :, :8], k=case.k[:, :, :8], v=case.v[:, :, :8]))[1]
    for t in range(8, 19):
        token = [x[:, :, t : t + 1] for x in case.qkv]
        out, state = hybrid_step(case.op, *token, state, settled=True)
        assert distance(out, expected[:, :, t : t + 1]) < FLOAT64


def test_padding_and_documents():
    case = terrace(tokens=15, window=3, sinks=1)
    valid = torch.tensor([[False] * 4 + [True] * 11, [True] * 6 + [False] * 3 + [True] * 6])
    expected = hybrid_quadratic(case.op, *case.qkv, valid=valid).out
    found = chunked(case, valid=valid, chunk=4)[0]
    assert distance(found * valid[:, None, :, None], expected * valid[:, None, :, None]) < FLOAT64
    documents = torch.tensor([[0] * 7 + [1] * 8, [0] * 2 + [1] * 3 + [2] * 10])
    packed = hybrid_packed(case.op, *case.qkv, start_of(case), documents=documents, chunk=4)
    assert distance(packed, hybrid_quadratic(case.op, *case.qkv, documents=documents).out) < FLOAT64


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("feature_map", MAPS)
def test_selected_rows(feature_map, sinks):
    case = terrace(feature_map, tokens=20, window=3, sinks=sinks)
    documents = torch.tensor([[0] * 20, [0] * 9 + [1] * 11])
    queries = torch.tensor([[3, 19, 11, 4, 12], [8, 9, 19, 14, 16]])
    expected = hybrid_quadratic(case.op, *case.qkv, documents=documents, queries=queries).out
    found = hybrid_rows(case.op, *case.qkv, queries, documents=documents)
    assert distance(found, expected) < FLOAT64
    parameters = list(case.heads.parameters())
    pairs = (
        torch.autograd.grad(x.sum(), parameters, allow_unused=True, retain_graph=True)
        for x in (found, expected)
    )
    for one, other in zip(*pairs):
        if one is not None:
            torch.testing.assert_close(one, other, atol=FLOAT64_GRADIENT, rtol=FLOAT64_GRADIENT)


# ------------------------------------------------------------------------------------------- models
def converted(**options):
    settings = dict(window=3, sinks=1, mixing="lolcats", k_map="q_head", window_kind="terrace")
    return tiny_linearized(**settings | options)


@torch.no_grad()
def test_prefill_and_decoding_equal_the_forward():
    model, ids = converted(), random_ids(2, 25)
    whole = model(ids, use_cache=False).logits
    with branches(model, linear=False):
        assert (model(ids, use_cache=False).logits - whole).abs().max() > GUARD
    for sizes in ((25,), (7, 10, 8), (1,) * 25, (10, *(1,) * 15)):
        cache = DynamicCache()
        parts = [model(part, **cache_argument(cache)).logits for part in ids.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=LOGITS, rtol=0)
    assert model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0).equal(
        model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0, use_cache=False)
    )


@torch.no_grad()
def test_a_window_over_everything_is_the_teacher():
    """Twice the window: the text ends inside of the second block."""
    base, ids = tiny_llama(), random_ids(2, 20)
    expected = base(ids).logits
    model = converted(model=base, window=10)
    assert distance(model(ids).logits, expected) < SOFTMAX_FLOAT32 * 10
    longer = random_ids(2, 21)
    assert distance(model(longer).logits, tiny_llama()(longer).logits) > GUARD


@pytest.mark.parametrize(
    ("window", "sinks", "exact"), [(3, 1, 6), (3, 3, 9), (3, 7, 12), (8, 0, 16)]
)
def test_the_first_query_with_a_linear_key(window, sinks, exact):
    linear = masks(torch.ones(1, 40, dtype=torch.bool), None, window, sinks, kind="terrace")[1]
    assert int(linear[0].any(-1).nonzero()[0]) == exact
    assert exact_tokens(converted(window=window, sinks=sinks)) == exact


def test_attention_transfer_lowers_the_loss(tmp_path):
    data = TokenDataset([ids.numpy() for ids in random_ids(8, 32).int()], length=32)
    metrics = transfer_attention(
        converted(), data, output_dir=tmp_path, max_steps=40, batch_size=8, logging_steps=1,
        progress=False, num_queries=None, learning_rate=3e-2,
    )  # fmt: skip
    assert metrics["history"][-1]["loss"] < 0.9 * metrics["history"][0]["loss"]


def test_maps_whose_features_are_logarithms_are_refused():
    with pytest.raises(ValueError, match=r"window_kind: 'terrace' is not possible with.*'favor'"):
        convert(tiny_llama(), window=3, feature_map="favor", window_kind="terrace")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"convert.window_kind: 'stairs' is not known; choose one"):
        convert(tiny_llama(), window=3, window_kind="stairs")
