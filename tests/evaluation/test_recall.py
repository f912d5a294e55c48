"""Recall: what surely remembers is right, what cannot see is at chance, and all ways of computing
agree.
"""

import math

import pytest
import torch
from conftest import ROOT, tiny_linearized, tiny_llama
from memory import Copier, induction_llama
from tinytext import tiny_tokenizer
from transformers import AutoTokenizer

import linearize
from linearize.evaluation.probes import TASKS, Lexicon, make_probe
from linearize.evaluation.recall import METRICS, answer_scores, recall
from linearize.evaluation.rows import Row

WINDOW = 16
TOKENIZER = tiny_tokenizer()


def written(model, prompt, count):
    """What `generate` adds to a prompt: so many token ids."""
    inputs = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt[None])}
    options = {"do_sample": False, "pad_token_id": 2}
    return model.generate(**inputs, max_new_tokens=count, **options)[0, len(prompt) :]


def probes(name, count, length=100, tokenizer=TOKENIZER):
    lexicon = Lexicon(tokenizer)
    options = {"length": length, "num_samples": count, "sinks": 2}
    made = [make_probe(lexicon, name, sample=i, **options) for i in range(count)]
    return made, torch.tensor(lexicon.values)


@pytest.fixture(scope="module")
def remembers():
    """A model whose softmax attention finds whatever is in sight, converted and not trained."""
    return linearize.convert(induction_llama(), window=WINDOW, sinks=2)


@pytest.fixture(scope="module")
def found(remembers):
    return recall(remembers, TOKENIZER, tasks=["associative"], lengths=[64, 128], samples=8)


def test_the_teacher_is_right_and_the_window_alone_is_at_chance(found):
    assert found["chance"] == 1 / found["num_choices"] == 1 / 30
    for cell in found["cells"]:
        teacher, window_only = (cell["rows"][name] for name in ("teacher", "window_only"))
        assert teacher["exact_match"] == teacher["choice_accuracy"] == 1
        assert teacher["log_prob"] > -0.01
        near, *far = window_only["buckets"]
        assert (near["from"], near["to"]) == (0, WINDOW) and near["exact_match"] == 1
        assert len(far) >= 2 and all(bucket["exact_match"] == 0 for bucket in far)
        beyond = window_only["beyond_window"]
        n, chance = beyond["num_questions"], found["chance"]
        assert beyond["choice_accuracy"] < chance + 4 * math.sqrt(chance / n)
        assert beyond["log_prob"] < math.log(chance)


def test_the_linear_branch_is_what_remembers_beyond_the_window(found):
    for cell in found["cells"]:
        rows, gain = cell["rows"], cell["linear_branch"]
        converted, without = (rows[n]["beyond_window"] for n in ("converted", "window_only"))
        for name in METRICS:
            assert gain[name] == pytest.approx(converted[name] - without[name], abs=1e-9)
        assert gain["choice_accuracy"] > 3 * gain["choice_accuracy_se"] > 0
        assert gain["log_prob"] > 3 * gain["log_prob_se"] > 0


def test_a_window_over_everything_remembers_everything():
    model = linearize.convert(induction_llama(), window=64, sinks=2)
    cell = recall(model, TOKENIZER, tasks=["associative"], lengths=[64], samples=4)["cells"][0]
    for row in cell["rows"].values():
        assert row["exact_match"] == 1
        assert row["beyond_window"] is None and len(row["buckets"]) == 1
    assert "linear_branch" not in cell


@pytest.mark.parametrize("name", TASKS)
def test_a_copier_is_right_exactly_as_far_as_it_sees(name):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "linearize" / "assets" / "tiny-english")
    made, choices = probes(name, 12, tokenizer=tokenizer)
    distances = torch.stack([probe.distances for probe in made])
    _, seen, exact = answer_scores(Copier(len(tokenizer)), made, choices)
    assert exact.eq(1).all() and seen.eq(1).all()
    log_prob, seen, exact = answer_scores(Copier(len(tokenizer), sight=40), made, choices)
    hidden = distances >= 40
    a = TASKS[name].value_tokens
    assert hidden.any() and (exact[hidden].eq(0).all() or a == 1)
    chance = 1 / len(choices)
    deviation = math.sqrt(chance / (hidden.sum() * a))
    assert seen[hidden].mean() < chance + 4 * deviation
    assert log_prob[hidden].mean() < math.log(chance)
    if name != "passkey":
        near = distances < 40 - 8
        assert near.any() and exact[near].eq(1).all()


@pytest.mark.parametrize("linear", [True, False], ids=["converted", "window-only"])
@pytest.mark.parametrize("name", ["needle", "key_value"])
def test_scores_equal_a_pass_over_the_whole_text_and_generate(name, linear):
    model = tiny_linearized(window=8, sinks=2)
    made, choices = probes(name, 3, length=40)
    with torch.no_grad(), linearize.branches(model, linear=linear):
        scores = answer_scores(model, made, choices)
        for i, probe in enumerate(made):
            for j, (question, answer) in enumerate(zip(probe.questions, probe.answers)):
                prompt = torch.cat([probe.context, question])
                logits = model(torch.cat([prompt, answer])[None], use_cache=False).logits[0]
                logits = logits[len(prompt) - 1 : -1].double()
                wanted = logits.log_softmax(-1).gather(1, answer[:, None]).mean()
                chosen = choices[logits[:, choices].argmax(-1)]
                assert scores[0, i, j] == pytest.approx(wanted.item(), abs=1e-4)
                assert scores[1, i, j] == (chosen == answer).double().mean()
                assert scores[2, i, j] == torch.equal(written(model, prompt, len(answer)), answer)


def test_what_generate_writes_is_an_exact_match(remembers):
    made, choices = probes("associative", 3)
    with torch.no_grad(), linearize.branches(remembers, linear=False):
        exact = answer_scores(remembers, made, choices)[2]
        for i, probe in enumerate(made):
            for j, (question, answer) in enumerate(zip(probe.questions, probe.answers)):
                prompt = torch.cat([probe.context, question])
                assert exact[i, j] == torch.equal(written(remembers, prompt, 1), answer)
    assert 0 < exact.mean() < 1


def test_batches_change_nothing_and_the_seed_decides():
    model = tiny_linearized(window=8, sinks=2)
    options = dict(tasks=["needle", "key_value"], lengths=[40], samples=3)
    one, batched, other = (
        recall(model, TOKENIZER, **options, batch_size=b, seed=s)
        for b, s in ((1, 0), (3, 0), (3, 1))
    )
    for a, b, c in zip(one["cells"], batched["cells"], other["cells"], strict=True):
        for name, row in a["rows"].items():
            assert b["rows"][name]["log_prob"] == pytest.approx(row["log_prob"], abs=1e-4)
            assert b["rows"][name]["exact_match"] == row["exact_match"]
            assert c["rows"][name]["log_prob"] != pytest.approx(row["log_prob"], abs=1e-4)


def test_buckets_add_up_and_errors_are_over_contexts():
    model = tiny_linearized(window=8, sinks=2)
    found = recall(model, TOKENIZER, tasks=["associative"], lengths=[50], samples=4)
    for row in found["cells"][0]["rows"].values():
        total = sum(bucket["num_questions"] for bucket in row["buckets"])
        assert total == row["num_questions"] == 4 * 8
        mean = sum(b["log_prob"] * b["num_questions"] for b in row["buckets"]) / total
        assert mean == pytest.approx(row["log_prob"])
        assert row["buckets"][0]["num_questions"] + row["beyond_window"]["num_questions"] == total
    made, choices = probes("associative", 4, length=50)
    with torch.no_grad(), linearize.teacher(model):
        means = answer_scores(model, made, choices)[0].mean(1)
    expected = means.std() / 2
    teacher = found["cells"][0]["rows"]["teacher"]
    assert teacher["log_prob_se"] == pytest.approx(expected.item(), rel=1e-4)


def test_a_softmax_model_is_its_own_only_row_and_the_teacher_of_its_conversion():
    options = dict(tasks=["passkey"], lengths=[80], samples=2)
    alone = recall(tiny_llama(), TOKENIZER, **options)
    converted = recall(tiny_linearized(window=8), TOKENIZER, **options, base_model=tiny_llama())
    assert list(alone["cells"][0]["rows"]) == ["teacher"]
    one, two = (found["cells"][0]["rows"]["teacher"] for found in (alone, converted))
    assert one["log_prob"] == pytest.approx(two["log_prob"], abs=1e-5)


def test_rows_of_your_own():
    model = tiny_linearized(window=8)
    rows = ["swa_sinks", Row("other", model)]
    options = dict(tasks=["associative"], lengths=[40], samples=2)
    found = recall(model, TOKENIZER, rows=rows, **options)
    assert list(found["cells"][0]["rows"]) == ["swa_sinks", "other"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["needles"]}, r"^recall\.tasks: 'needles' is not known; use associative, pass"),
        ({"samples": 0}, r"^recall\.samples: 0 is not a positive number"),
        ({"lengths": [9]}, r"^recall: a context of 9 tokens has no room for a record of 'passk"),
    ],
    ids=["task", "samples", "length"],
)
def test_impossible_measurements_are_refused(options, message):
    settings = {"tasks": ["passkey"], "lengths": [80], "samples": 1} | options
    with pytest.raises(ValueError, match=message):
        recall(tiny_llama(), TOKENIZER, **settings)
