"""Fidelity of heads: the measures are what they say, and the heads chosen are those that tell."""

import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama
from tinytext import tiny_tokenizer

from linearize.evaluation.fidelity import MEASURES, choose_heads, fidelity, spread
from linearize.losses import teacher_log_weights
from linearize.modeling.attention import transfer


def test_measures_are_those_of_the_definition():
    model, ids = tiny_linearized(window=4, sinks=2), random_ids(1, 40)
    found = fidelity(model, tiny_tokenizer(), list(ids), length=64)
    assert set(found) == set(MEASURES)
    assert all(values.shape == (2, 4) for values in found.values())
    seen = {}
    with (
        transfer(
            model,
            lambda module, *args, **kwargs: seen.update({module.layer_idx: (module, args, kwargs)}),
        ),
        torch.no_grad(),
    ):
        model(ids[:, :39], use_cache=False)
    module, (q, k, v, out), inputs = seen[1]
    inputs.pop("attention_mask")
    queries = torch.arange(6, 39)[None]
    with torch.no_grad():
        rows = module.linearized(q, k, v, queries=queries, weights=True, **inputs)
    target = teacher_log_weights(q, k, queries, **inputs)
    wanted, weights = out[:, :, 6:], target.exp()
    error = (rows.out - wanted).square().sum((0, 2, 3)) / wanted.square().sum((0, 2, 3))
    kl = (weights * (target - rows.log_weights)).nan_to_num().sum(-1).mean((0, 2))
    far = torch.stack([weights[0, :, i, 2 : i + 3].sum(-1) for i in range(33)]).mean(0)
    student = torch.stack([rows.log_weights[0, :, i, 2 : i + 3].exp().sum(-1) for i in range(33)])
    for name, values in zip(MEASURES, (error, kl, far, student.mean(0)), strict=True):
        torch.testing.assert_close(found[name][1], values.double(), rtol=1e-4, atol=1e-6)
    assert found["output_error"].min() > 0 and found["beyond_window"].min() > 0.1


def test_several_windows_count_by_their_queries():
    model, tokenizer = tiny_linearized(window=4, sinks=2), tiny_tokenizer()
    long, short = random_ids(1, 41, seed=1)[0], random_ids(1, 11, seed=2)[0]
    both = fidelity(model, tokenizer, [long, short])["attention_kl"]
    apart = [fidelity(model, tokenizer, [ids])["attention_kl"] for ids in (long, short)]
    torch.testing.assert_close(both, (34 * apart[0] + 4 * apart[1]) / 38)
    first = fidelity(model, tokenizer, [short, long], max_windows=1)["attention_kl"]
    torch.testing.assert_close(first, apart[0])


def test_a_text_inside_the_window_says_nothing():
    assert fidelity(tiny_linearized(window=4, sinks=2), tiny_tokenizer(), "w1 w2 w3 w4 w5") == {}


def test_an_unconverted_model_is_refused():
    with pytest.raises(ValueError, match="fidelity: this model has no linearized layer"):
        fidelity(tiny_llama(), tiny_tokenizer(), "w1 w2")


def test_chosen_heads_reach_far_or_span_the_fit():
    kl = torch.arange(20.0).view(4, 5)
    beyond = torch.zeros(4, 5)
    beyond[2, 3], beyond[1, 1] = 0.9, 0.8
    kl[3, 4] = torch.nan  # a layer with four heads
    chosen = choose_heads({"attention_kl": kl, "beyond_window": beyond}, 6)
    assert len(chosen) == 6 and chosen == sorted(chosen)
    assert {(2, 3), (1, 1), (0, 0), (3, 3)} <= set(chosen)
    everything = choose_heads({"attention_kl": kl, "beyond_window": beyond}, 99)
    assert len(everything) == 19


@pytest.mark.parametrize(("first", "end", "count"), [(0, 5, 5), (3, 4, 1), (6, 1000, 128)])
def test_queries_are_spread_to_the_last_one(first, end, count):
    queries = spread(first, end)
    assert len(queries.unique()) == count
    assert queries[-1] == end - 1 and queries.min() >= first
