"""Ranking and choice: equal to brute force, inside the budget, resumable, usable as a recipe."""

import json

import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama
from transformers import AutoModelForCausalLM

from linearize import convert
from linearize.inspection import inspect
from linearize.modeling.attention import linearized_modules
from linearize.restoration import Scorer, restored
from linearize.selection import select

DOCUMENTS = [random_ids(1, 60, seed=5)[0], random_ids(1, 40, seed=6)[0]]
SETTINGS = dict(length=24, positions=40, context=100, device="cpu", progress=False)


class NoTokenizer:
    """The documents are token ids already."""


def chosen(model, **settings):
    return select(model, DOCUMENTS, tokenizer=NoTokenizer(), **{**SETTINGS, **settings})


@pytest.fixture
def model():
    return tiny_linearized(window=4, sinks=1)


def heads_of(rows):
    return [(row["layer"], *row["heads"]) for row in rows]


def test_ranking_and_greedy_choice_equal_brute_force(model):
    result = chosen(model, budget=3, candidates=None, recall_weight=0)
    left, taken, distances = {(i, g) for i in (0, 1) for g in (0, 1)}, [], []
    while len(taken) < 3:
        kl = {}
        for layer, head in left:
            heads = {i: [g for j, g in (*taken, (layer, head)) if i == j] for i in (0, 1)}
            with restored(model, heads):
                kl[layer, head] = chosen(model, recall_weight=0)["before"]["kl"]
        if not taken:
            gains = {unit: result["before"]["kl"] - value for unit, value in kl.items()}
            order = sorted(gains, key=lambda unit: -gains[unit])
            assert heads_of(result["ranking"]) == order
            found = [row["kl_gain"] for row in result["ranking"]]
            assert found == pytest.approx([gains[unit] for unit in order], abs=1e-6)
        taken.append(min(kl, key=lambda unit: kl[unit]))
        distances.append(kl[taken[-1]])
        left -= {taken[-1]}
    assert heads_of(result["chosen"]) == taken
    assert [row["kl"] for row in result["chosen"]] == pytest.approx(distances, abs=1e-6)


def test_every_unit_in_budget_is_the_teacher(model):
    for unit, budget in (("head", 4), ("layer", 2)):
        result = chosen(model, unit=unit, budget=budget)
        last = result["chosen"][-1]
        assert abs(last["kl"]) < 1e-6 and abs(last["recall"]) < 1e-5
        assert last["score"] == pytest.approx(2, abs=1e-3) or result["before"]["recall"] < 1e-3
        assert result["convert"] == {"layers": [], "softmax_heads": {}}


def test_without_a_budget_units_are_ranked_only(model):
    result = chosen(model)
    assert len(result["ranking"]) == 4 and result["chosen"] == []
    assert result["convert"] == {"layers": [0, 1], "softmax_heads": {}}


def test_some_layers_only(model):
    result, every = chosen(model, layers=[1]), chosen(model)
    assert result["ranking"] == [row for row in every["ranking"] if row["layer"] == 1]


def test_recall_has_its_weight(model):
    with_recall, without = chosen(model), chosen(model, recall_weight=0)
    start = with_recall["before"]
    assert without["before"]["recall"] == 0
    for row in with_recall["ranking"]:
        expected = row["kl_gain"] / start["kl"]
        if start["recall"] > 1e-3:
            expected += row["recall_gain"] / start["recall"]
        assert row["score"] == pytest.approx(expected)


def test_bytes_are_those_that_inspection_counts(model):
    options = dict(window=4, sinks=1)
    result = chosen(model, budget=3)
    kept = {}
    for row in result["chosen"]:
        kept.setdefault(row["layer"], []).extend(row["heads"])
        report = inspect(tiny_llama(), **options, softmax_heads=kept, lengths=(100,))
        assert row["cache_bytes"] == report["lengths"][0]["linearized_bytes"]
    all_linear = inspect(tiny_llama(), **options, lengths=(100,))["state_bytes"]
    assert result["before"]["cache_bytes"] == all_linear
    limit = result["chosen"][1]["cache_bytes"]
    assert heads_of(chosen(model, cache_bytes=limit)["chosen"]) == heads_of(result["chosen"][:2])
    assert len(chosen(model, cache_bytes=limit - 9)["chosen"]) == 1


def test_choice_is_a_recipe_and_a_model(model, tmp_path):
    ids = random_ids(1, 20)
    result = chosen(model, budget=3, save_model=None)
    converted = convert(tiny_llama(), window=4, sinks=1, **result["convert"])
    heads = {i: m.linearize_heads for i, m in linearized_modules(converted).items()}
    assert sum(map(len, heads.values())) == 1
    assert len(result["convert"]["layers"]) == 1  # the other layer is softmax throughout
    (layer,) = heads
    own = {name: p for name, p in model.state_dict().items() if f"layers.{layer}." in name}
    converted.load_state_dict(own, strict=False)
    saved = {}

    class Tokenizer(NoTokenizer):
        def save_pretrained(self, folder):
            saved["folder"] = folder

    select(model, DOCUMENTS, tokenizer=Tokenizer(), budget=3, save_model=tmp_path, **SETTINGS)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, converted(ids).logits)
    assert saved


def test_heads_that_are_softmax_already_stay(model):
    model = tiny_linearized(window=4, sinks=1, softmax_heads={0: [1]})
    result = chosen(model, budget=1)
    assert (0, 1) not in heads_of(result["ranking"])
    (row,) = result["chosen"]
    expected = {0: {"layers": [1], "softmax_heads": {}}}
    expected[1] = {"layers": [0, 1], "softmax_heads": {"0": [1], "1": row["heads"]}}
    assert result["convert"] == expected[row["layer"]]


def test_a_finetuned_model_has_another_teacher(model):
    base = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight * 2)
    result = chosen(model, base=base, budget=4)
    assert result["chosen"][-1]["kl"] > 1e-3
    assert chosen(model, budget=4)["chosen"][-1]["kl"] < 1e-6


# ---------------------------------------------------------------------------------- the same again
def test_stopped_equals_uninterrupted(model, tmp_path, monkeypatch):
    whole = chosen(model, budget=3, candidates=2)
    output, sums, calls = tmp_path / "deep" / "selection.json", Scorer._sums, []

    def counted(self, *args):
        calls.append(1)
        if len(calls) % 5 == 2:
            raise KeyboardInterrupt
        return sums(self, *args)

    monkeypatch.setattr(Scorer, "_sums", counted)
    for _ in range(20):
        try:
            result = chosen(model, budget=3, candidates=2, output=output, batch_size=3)
        except KeyboardInterrupt:
            assert json.loads(output.read_text())["measured"]
            continue
        break
    assert heads_of(result["chosen"]) == heads_of(whole["chosen"])
    assert json.loads(output.read_text()) == result
    before = len(calls)
    again = chosen(model, budget=3, candidates=2, output=output, batch_size=3)
    assert again == result and len(calls) == before
    fewer = chosen(model, budget=2, candidates=2, output=output, batch_size=3)
    assert fewer["chosen"] == result["chosen"][:2] and len(calls) == before


def test_another_selection_in_the_file_is_refused(model, tmp_path):
    output = tmp_path / "selection.json"
    chosen(model, output=output)
    refusal = r"select.output: .*selection.json holds another selection"
    with pytest.raises(ValueError, match=refusal):
        chosen(model, output=output, length=20)
    with torch.no_grad():
        linearized_modules(model)[1].linearized.beta[0] += 1
    with pytest.raises(ValueError, match=refusal):
        chosen(model, output=output)


def test_budgets_share_a_file(model, tmp_path):
    output = tmp_path / "selection.json"
    three = chosen(model, budget=3, output=output)
    limit = three["chosen"][1]["cache_bytes"] - 1
    bytes_only = chosen(model, cache_bytes=limit)
    assert chosen(model, cache_bytes=limit, output=output)["chosen"] == bytes_only["chosen"]
    assert chosen(model, budget=2, output=output)["chosen"] == three["chosen"][:2]


# ---------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(unit="neuron"), "select.unit: 'neuron' is not allowed; choose from head, layer"),
        (dict(budget=1, cache_bytes=10**6), "select.budget: give a number of units or cache_bytes"),
        (dict(layers=[0, 2]), "select.layers: layer 2 has no linear head in this model"),
        (dict(budget=0), "select.budget: 0 is not a positive number"),
        (dict(cache_bytes=10), "select.cache_bytes: 10 bytes are less than the"),
        (dict(length=5), r"select.length: no window of text is longer than window \+ sinks = 5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(model, settings, message):
    with pytest.raises(ValueError, match=message):
        chosen(model, **settings)


def test_a_model_without_linear_heads_is_refused():
    for model in (tiny_llama(), tiny_linearized(softmax_heads={0: [0, 1], 1: [0, 1]})):
        with pytest.raises(ValueError, match="select: this model has no linear head; convert"):
            chosen(model)
