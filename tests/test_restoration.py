"""Heads restored for a while or for good, and the distances to the teacher."""

import pytest
import torch
from conftest import random_ids, randomize, tiny_linearized, tiny_llama, tiny_model
from families import ALL_FULL, MIXED, VOCAB
from tolerances import GUARD
from transformers import AutoModelForCausalLM

from linearize import convert, teacher
from linearize.evaluation.windows import read_text
from linearize.modeling.attention import linearized_modules
from linearize.restoration import (
    Scorer,
    Unit,
    decoder_layers,
    merged,
    recall_probe,
    recorded,
    restore_,
    restored,
    skipped,
    text_probes,
    units_of,
)

TEXT = read_text(None, random_ids(1, 70, seed=3)[0])
WINDOW, SINKS, LENGTH = 4, 1, 24


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return tiny_linearized(window=WINDOW, sinks=SINKS)


@pytest.fixture
def ids():
    return random_ids(2, 20)


def probes(**options):
    settings = {"exact": WINDOW + SINKS, "length": LENGTH, "positions": 100, "batch_size": 2}
    return list(text_probes(TEXT, **{**settings, **options}))


# -------------------------------------------------------------------------------- restoring heads
def test_restored_is_a_conversion_without_these_heads(model, ids):
    linear = model(ids).logits
    for heads in ({0: [1]}, {0: [0, 1], 1: [1]}):
        other = tiny_linearized(window=WINDOW, sinks=SINKS, softmax_heads=heads)
        with restored(model, heads):
            assert torch.equal(model(ids).logits, other(ids).logits)
        with pytest.raises(KeyError), restored(model, heads):
            raise KeyError
        assert torch.equal(model(ids).logits, linear)
        assert (other(ids).logits - linear).abs().max() > GUARD


def test_restored_adds_to_what_is_softmax_already(ids):
    model = tiny_linearized(softmax_heads={0: [0]})
    with restored(model, {0: [0, 1]}), restored(model, {1: [0]}), restored(model, {1: [1]}):
        assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)
    assert [m.linearize_heads for m in linearized_modules(model).values()] == [(1,), (0, 1)]


def test_restored_for_good_is_saved(model, ids, tmp_path):
    restore_(model, {1: [1]})
    restore_(model, {0: [0]})
    assert model.config.linearize_config["softmax_heads"] == {"0": [0], "1": [1]}
    logits = model(ids, use_cache=False).logits
    other = tiny_linearized(window=WINDOW, sinks=SINKS, softmax_heads={0: [0], 1: [1]})
    assert torch.equal(other(ids).logits, logits)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids, use_cache=False).logits, logits)


@pytest.mark.parametrize("restore", [restore_, lambda *given: restored(*given).__enter__()])
@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({0: [0]}, "restored: layer 0 is not a converted layer"),
        ({1: [0, 2]}, "restored: layer 1 has the key/value heads 0-1, not 2"),
    ],
)
def test_heads_that_are_not_there_are_refused(restore, heads, message):
    with pytest.raises(ValueError, match=message):
        restore(tiny_linearized(layers=[1]), heads)


def test_units_are_what_is_linear():
    model = tiny_linearized(softmax_heads={0: [0], 1: [0, 1]})
    assert units_of(model, by_head=True) == units_of(model, by_head=False) == [Unit(0, (1,))]
    every = tiny_linearized()
    assert units_of(every, by_head=False) == [Unit(0, (0, 1)), Unit(1, (0, 1))]
    assert merged(units_of(every, by_head=True)) == {0: [0, 1], 1: [0, 1]}


# ------------------------------------------------------------------------------------------ probes
def test_positions_are_scored_and_see_linear_keys():
    found = probes()
    assert [probe.input_ids.shape for probe in found] == [(2, 24), (1, 21)]
    for probe in found:
        assert probe.positions.tolist() == list(range(WINDOW + SINKS, probe.input_ids.shape[1]))
        assert probe.counts.all()
    assert [len(probe.positions) for probe in probes(positions=7)] == [7, 7]
    (padded,) = probes(batch_size=3)
    assert padded.counts.sum(1).tolist() == [19, 19, 16]
    assert not probes(exact=24)


def test_answers_stand_after_their_key_and_beyond_the_window():
    probe = recall_probe(TEXT, WINDOW, SINKS, 3, 0)
    known = set(TEXT.streams[0].tolist())
    for row, answers in zip(probe.input_ids.tolist(), probe.answers.tolist(), strict=True):
        assert set(row) <= known
        pairs = row[SINKS + 1 : SINKS + 1 + 2 * len(answers)]
        values = dict(zip(pairs[::2], pairs[1::2], strict=True))
        assert len(set(pairs)) == len(pairs)
        for position, answer in zip(probe.positions.tolist(), answers, strict=True):
            assert values[row[position]] == answer
            assert position - (SINKS + 1 + pairs.index(answer)) > WINDOW + SINKS
    assert not torch.equal(probe.input_ids[0], probe.input_ids[1])
    again, other = (recall_probe(TEXT, WINDOW, SINKS, 3, seed) for seed in (0, 1))
    assert torch.equal(again.input_ids, probe.input_ids)
    assert not torch.equal(other.input_ids, probe.input_ids)


# --------------------------------------------------------------------------------------- distances
def test_distances_equal_brute_force(model):
    text, recall = probes(), recall_probe(TEXT, WINDOW, SINKS, 3, 0)
    units = [Unit(0, (1,)), Unit(1, (0, 1))]
    done = []
    found = Scorer(model, model, [*text, recall], progress=False).measure(
        units[:1], units[1:], done
    )
    assert found.keys() == {"", "1:0,1"} and len(done) == 3
    for name, heads in (("", {0: [1]}), ("1:0,1", {0: [1], 1: [0, 1]})):
        with restored(model, heads):
            mine = [model(probe.input_ids).logits.log_softmax(-1) for probe in (*text, recall)]
        with teacher(model):
            theirs = [model(probe.input_ids).logits.log_softmax(-1) for probe in (*text, recall)]
        rows = [
            torch.nn.functional.kl_div(a, b, log_target=True, reduction="none")
            .sum(-1)[:, probe.positions]
            .flatten()
            for a, b, probe in zip(mine, theirs, text, strict=False)
        ]
        gap = (theirs[-1] - mine[-1])[:, recall.positions].gather(2, recall.answers[..., None])
        assert found[name].kl == pytest.approx(torch.cat(rows).mean().item(), abs=1e-6)
        assert found[name].recall == pytest.approx(gap.mean().item(), abs=1e-6)
    assert found[""].kl > GUARD


def test_everything_restored_is_the_teacher(model):
    units = units_of(model, by_head=True)
    scorer = Scorer(
        model, tiny_llama(), [*probes(), recall_probe(TEXT, 4, 1, 2, 0)], progress=False
    )
    found = scorer.measure(units[1:], units[:1], [])
    assert abs(found["0:0"].kl) < 1e-6 and abs(found["0:0"].recall) < 1e-5
    assert found[""].kl > 1e-4


def test_padded_rows_count_as_they_do_alone(model):
    alone, together = (
        Scorer(model, model, probes(batch_size=size), progress=False).measure((), (), [])
        for size in (1, 3)
    )
    assert alone[""].kl == pytest.approx(together[""].kl, rel=1e-4)


FAMILIES = {
    name: ALL_FULL[name]
    for name in ("llama", "gpt2", "gpt_neox", "opt", "qwen3_moe", "deepseek_v3")
} | {"lfm2": MIXED["lfm2"], "gemma2": ALL_FULL["gemma2"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_from_the_middle_is_the_whole_pass(family):
    model = randomize(convert(tiny_model(family, scale=3.0, **FAMILIES[family]), window=4))
    ids, layers = random_ids(1, 20, vocab=VOCAB), decoder_layers(model)
    last = max(linearized_modules(model))
    outputs, body = recorded(model, layers, ids)
    names = [type(layer).__name__ for layer in layers]
    assert len(outputs) == len(layers) == model.config.num_hidden_layers, names
    with restored(model, {last: [0]}):
        whole = recorded(model, layers, ids)[1].last_hidden_state
        with skipped(layers[:last], outputs[:last]):
            part = recorded(model, layers, ids)[1].last_hidden_state
    assert torch.equal(part, whole)
    assert not torch.equal(part, body.last_hidden_state)
    assert torch.equal(recorded(model, layers, ids)[1].last_hidden_state, body.last_hidden_state)
