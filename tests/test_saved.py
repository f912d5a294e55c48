"""Scoring, timing and writing with saved models."""

import pytest
from conftest import tiny_linearized, tiny_llama
from tinytext import save_base, save_corpus, tiny_tokenizer

from linearize.evaluation.probes import TASKS
from linearize.saved import evaluate, generate


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    tiny_linearized(sinks=2).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return save_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl", documents=4)


def test_a_converted_model_gives_the_ablation_table(converted, corpus):
    found = evaluate(converted, corpus, length=16, device="cpu", progress=False)
    assert found["ablation"]["converted"]["kl_to_teacher"] > 0


def test_the_table_comes_with_its_certificate(converted, corpus):
    found = evaluate(converted, corpus, length=16, device="cpu", progress=False)
    assert set(found) == {"ablation", "linear_mass", "parity"}
    assert found["parity"]["agrees"] and 0 < found["linear_mass"]["linear"] < 1


def test_everything_that_is_asked_for_is_measured(base, converted, corpus):
    options = dict(recall=True, contexts=(64,), limit=2, device="cpu", progress=False)
    found = evaluate(converted, base=base, **options)["recall"]
    assert {cell["task"] for cell in found["cells"]} == set(TASKS)
    assert found["samples"] == 2 and {cell["length"] for cell in found["cells"]} == {64}
    both = evaluate(base, corpus, length=16, **options)
    assert set(both) == {"perplexity", "recall"}
    teacher, stock = (x["cells"][0]["rows"]["teacher"] for x in (found, both["recall"]))
    assert teacher["log_prob"] == pytest.approx(stock["log_prob"], abs=1e-4)


def test_tasks_are_handed_to_the_harness(converted, monkeypatch):
    seen = {}

    def harness(model, tokenizer, tasks, **options):
        seen.update(options, tasks=tasks)
        return {"tasks": []}

    monkeypatch.setattr("linearize.saved.harness.harness", harness)
    options = dict(tasks=("piqa", "own.jsonl"), limit=7, batch_size=3, device="cpu")
    assert evaluate(converted, **options, progress=False) == {"tasks": {"tasks": []}}
    assert seen["tasks"] == ("piqa", "own.jsonl")
    assert (seen["limit"], seen["batch_size"], seen["base_model"]) == (7, 3, None)


def test_a_stock_model_gives_its_perplexity(base, converted, corpus):
    options = dict(length=16, device="cpu", progress=False)
    stock = evaluate(base, corpus, **options)["perplexity"]
    teacher = evaluate(converted, corpus, **options)["ablation"]["teacher"]
    assert stock["perplexity"] == pytest.approx(teacher["perplexity"], rel=1e-5)


def test_the_base_model_is_the_teacher_if_it_is_named(base, converted, corpus):
    options = dict(length=16, device="cpu", progress=False)
    named, own = (evaluate(converted, corpus, base=b, **options) for b in (base, None))
    assert named["ablation"]["teacher"] == own["ablation"]["teacher"]


def test_models_and_documents_may_be_objects():
    options = dict(tokenizer=tiny_tokenizer(), length=16, max_tokens=40, progress=False)
    found = evaluate(tiny_llama(), ["w1 w2 w3 " * 20], **options)
    assert found["perplexity"]["num_tokens"] == 39


def test_efficiency_needs_no_text(converted):
    options = dict(efficiency=True, contexts=(16, 32), device="cpu")
    found = evaluate(converted, **options)["efficiency"]
    assert [row["context"] for row in found["decode"]] == [16, 32]


def test_nothing_to_measure_is_said(base):
    with pytest.raises(ValueError, match="evaluate: nothing to measure; name a text or tasks"):
        evaluate(base)


def test_a_model_without_tokenizer_is_refused():
    with pytest.raises(ValueError, match="needs its tokenizer"):
        evaluate(tiny_llama(), ["w1 w2 w3"])


def test_a_missing_text_is_named_as_evaluate_text(base):
    with pytest.raises(FileNotFoundError, match=r"evaluate\.text: no\.txt does not exist"):
        evaluate(base, "no.txt")


def test_greedy_text_is_the_same_every_time(converted):
    texts = [generate(converted, "w5 w6", max_new_tokens=5, device="cpu") for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0]["prompt"] == "w5 w6" and texts[0]["text"].startswith("w5 w6")


def test_sampled_text_follows_the_seed(converted):
    options = dict(max_new_tokens=20, temperature=5.0, device="cpu")
    texts = [generate(converted, "w5", seed=seed, **options)["text"] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
