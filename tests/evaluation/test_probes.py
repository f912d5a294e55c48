"""Prompts: the fact is where it is said to be, far enough back, and cannot be guessed."""

from collections import Counter

import pytest
import torch
from conftest import ROOT
from tinytext import tiny_tokenizer
from transformers import AutoTokenizer

from linearize.evaluation.probes import TASKS, Lexicon, make_probe

LENGTH, SAMPLES, SINKS = 120, 6, 4


@pytest.fixture(scope="module")
def english():
    return Lexicon(AutoTokenizer.from_pretrained(ROOT / "linearize" / "assets" / "tiny-english"))


@pytest.fixture(params=["words", "tiny-english", "stories260k"])
def lexicon(request, english):
    if request.param == "stories260k":
        return Lexicon(AutoTokenizer.from_pretrained(request.getfixturevalue("stories260k")))
    return english if request.param == "tiny-english" else Lexicon(tiny_tokenizer())


def probes(lexicon, name, length=LENGTH, **options):
    options = {"sinks": SINKS, "num_samples": SAMPLES} | options
    return [make_probe(lexicon, name, length=length, sample=i, **options) for i in range(SAMPLES)]


@pytest.mark.parametrize("name", TASKS)
def test_the_answer_lies_at_its_distance_and_behind_the_sinks(lexicon, name):
    for probe in probes(lexicon, name):
        prompts = [torch.cat([probe.context, question]) for question in probe.questions]
        assert {len(prompt) for prompt in prompts} == {LENGTH}
        for answer, distance in zip(probe.answers, probe.distances.tolist(), strict=True):
            end = LENGTH - distance
            assert torch.equal(probe.context[end - len(answer) : end], answer)
            assert end - len(answer) - TASKS[name].key_tokens >= SINKS


@pytest.mark.parametrize("name", TASKS)
def test_values_come_from_the_choices_and_nothing_else_does(lexicon, name):
    choices = set(lexicon.values)
    used = {id for ids in (*lexicon.filler, lexicon.keys) for id in ids}
    assert not choices & used and not set(lexicon.keys) & {i for f in lexicon.filler for i in f}
    for probe in probes(lexicon, name):
        assert choices.issuperset(probe.answers.flatten().tolist())
        assert choices.isdisjoint(probe.questions.flatten().tolist())


def test_every_question_has_one_answer(english):
    for name in ("associative", "needle", "key_value"):
        for probe in probes(english, name, length=200):
            assert len({tuple(question) for question in probe.questions.tolist()}) > 1
            assert len(probe.questions.unique(dim=0)) == len(probe.questions)


def test_records_lie_at_all_depths(english):
    ends = [LENGTH - int(probe.distances[0]) for probe in probes(english, "passkey")]
    assert ends == sorted(ends) and ends[0] < LENGTH / 3 and ends[-1] > LENGTH / 2
    distances = torch.cat([p.distances for p in probes(english, "associative", length=400)])
    assert distances.min() < 40 and distances.max() > 330


def test_all_of_a_key_value_context_is_records(english):
    probe = probes(english, "key_value", length=200)[0]
    used = set(english.keys) | set(english.values)
    record = english.fill(TASKS["key_value"].record, [0, 0], [0])
    assert sum(id in used for id in probe.context.tolist()) >= (200 - 20) // len(record) * 3 - 3


def test_values_are_drawn_evenly(english):
    answers = [p.answers for i in range(20) for p in probes(english, "associative", seed=i)]
    counts = Counter(torch.cat(answers).flatten().tolist())
    assert len(counts) == len(english.values) and max(counts.values()) < 3 * 960 / 32


def test_the_seed_decides(english):
    one, same, other = (probes(english, "needle", seed=seed)[2] for seed in (0, 0, 1))
    assert all(map(torch.equal, one, same))
    assert not torch.equal(one.context, other.context)


def test_words_are_words_where_the_tokenizer_has_them(english):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "linearize" / "assets" / "tiny-english")
    assert all(tokenizer.decode([id]).strip().isalpha() for id in english.values + english.keys)
    text = tokenizer.decode(probes(english, "passkey")[0].context)
    assert text.count("The pass key is:") == text.count("is the pass key.") == 1


def test_a_record_needs_room(english):
    with pytest.raises(ValueError, match=r"^recall: a context of 20 tokens has no room for a re"):
        make_probe(english, "passkey", length=20, sample=0, num_samples=1)
    found = []
    for length in range(20, 60):
        try:
            make_probe(english, "passkey", length=length, sample=0, num_samples=1)
        except ValueError as error:
            found.append((length, int(str(error).split()[-4])))
    assert {needed for _, needed in found} == {len(found) + 20}, "the message says what is enough"


def test_a_tokenizer_without_words_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.get_vocab = lambda: {"<unk>": 0, "w0": 3, "w1": 4}
    with pytest.raises(ValueError, match=r"^recall: this tokenizer has 2 tokens beside"):
        Lexicon(tokenizer)
