"""Tasks of the harness: scored as by hand, the same in batches, and each mistake named."""

import json
import sys

import pytest
import torch
from conftest import SHARED, tiny_linearized, tiny_llama
from tinytext import WORDS, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize
from linearize.evaluation.harness import harness

WINDOW = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lm_eval"),
]


@pytest.fixture(autouse=True)
def installed(request):
    if "missing" not in request.node.name:
        pytest.importorskip("lm_eval", reason="needs the extra 'eval'")


def lm_eval_tasks():
    import lm_eval.tasks

    return lm_eval.tasks


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Keeps what `datasets` writes out of the home directory."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def questions(file, key="question", count=6):
    """Writes a file of questions in the words of `tiny_tokenizer`; returns their lines."""
    generator = torch.Generator().manual_seed(0)
    lines = []
    for i in range(count):
        words = [WORDS[j] for j in torch.randint(61, (10 + 3 * i,), generator=generator)]
        choices = [f"{words[0]} {WORDS[i]}", words[1], f"{words[2]} {words[3]} {words[4]}"]
        lines.append({key: " ".join(words), "choices": choices, "label": i % 3})
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return lines


def by_hand(model, lines, prompt):
    """Accuracy of the likeliest choice, by the sum and by the mean per byte."""
    tokenizer, right, right_norm = tiny_tokenizer(), [], []
    for line in lines:
        context = prompt(line)
        scores = []
        for choice in line["choices"]:
            start = tokenizer(context)["input_ids"]
            ids = tokenizer(f"{context} {choice}")["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0].double()
            found = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
            scores.append(found[len(start) - 1 :].sum().item())
        lengths = [len(choice) for choice in line["choices"]]
        normed = [score / length for score, length in zip(scores, lengths, strict=True)]
        right.append(scores.index(max(scores)) == line["label"])
        right_norm.append(normed.index(max(normed)) == line["label"])
    return sum(right) / len(lines), sum(right_norm) / len(lines)


PROMPTS = {
    "question": lambda line: f"Question: {line['question']}\nAnswer:",
    "ctx": lambda line: line["ctx"],
}


@pytest.mark.parametrize("key", PROMPTS)
def test_lines_are_scored_as_by_hand_in_every_row(cache, tmp_path, key):
    lines = questions(tmp_path / "own.jsonl", key, count=12)
    model = tiny_linearized(sinks=1)
    found = harness(model, tiny_tokenizer(), [str(tmp_path / "own.jsonl")], batch_size=5)
    (task,) = found["tasks"]
    assert (task["task"], task["num_items"]) == ("own", 12)
    modes = {
        "teacher": linearize.teacher(model),
        "converted": linearize.branches(model),
        "window_only": linearize.branches(model, linear=False),
    }
    seen = {}
    for name, mode in modes.items():
        with mode:
            acc, acc_norm = seen[name] = by_hand(model, lines, PROMPTS[key])
        row = task["rows"][name]
        assert (row["acc"], row["acc_norm"]) == pytest.approx((acc, acc_norm))
        assert row["acc_se"] == pytest.approx((acc * (1 - acc) / 11) ** 0.5)
    gain = task["linear_branch"]
    assert gain["acc"] == pytest.approx(seen["converted"][0] - seen["window_only"][0], abs=1e-6)
    assert gain["acc_se"] is not None


def test_batches_are_as_good_as_one_by_one(cache, tmp_path):
    """Left padding for generation and right padding for likelihoods change nothing."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from linearize.evaluation import harness as module

    lines = questions(tmp_path / "own.jsonl", "ctx")
    model = tiny_linearized(sinks=1)
    likelihoods = [
        Instance("loglikelihood", line, (line["ctx"], f" {choice}"), i)
        for i, line in enumerate(lines)
        for choice in line["choices"]
    ]
    settings = {"until": ["</s>"], "max_gen_toks": 6, "do_sample": False}
    writings = [
        Instance("generate_until", line, (line["ctx"], settings), i) for i, line in enumerate(lines)
    ]
    found = []
    for batch_size in (1, 4):
        wrapped = module._wrap(module._import_harness(), model, tiny_tokenizer(), batch_size, False)
        assert isinstance(wrapped, HFLM)
        found.append((wrapped.loglikelihood(likelihoods), wrapped.generate_until(writings)))
    (one, written_one), (many, written_many) = found
    assert [x[0] for x in many] == pytest.approx([x[0] for x in one], abs=1e-4)
    assert [x[1] for x in many] == [x[1] for x in one]
    assert written_many == written_one and len(set(written_one)) > 1
    ids = tiny_tokenizer()(lines[2]["ctx"], return_tensors="pt", return_token_type_ids=False)
    alone = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=2)
    text = tiny_tokenizer().decode(alone[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert written_one[2] == text


def test_task_files_and_limits(cache, tmp_path):
    lines = questions(tmp_path / "data.jsonl", "ctx")
    (tmp_path / "mine.yaml").write_text(
        f"""
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "data.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{ctx}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    found = harness(tiny_llama(), tiny_tokenizer(), [str(tmp_path / "mine.yaml")], limit=4)
    (task,) = found["tasks"]
    assert (task["task"], task["num_items"], found["limit"]) == ("mine", 4, 4)
    assert list(task["rows"]) == ["teacher"] and "linear_branch" not in task
    assert task["rows"]["teacher"]["acc"] == by_hand(tiny_llama(), lines[:4], PROMPTS["ctx"])[0]


def test_tasks_at_hand(cache, stories260k):
    folder = SHARED / "data" / "tasks"
    if not folder.exists():
        pytest.skip(f"{folder} is missing: this test needs the task files")
    files = sorted(map(str, folder.glob("*.jsonl")))
    model = AutoModelForCausalLM.from_pretrained(stories260k)
    model = linearize.convert(model, window=16, sinks=2)
    found = harness(model, AutoTokenizer.from_pretrained(stories260k), files, limit=3)
    assert [task["num_items"] for task in found["tasks"]] == [3] * len(files)
    for task in found["tasks"]:
        assert set(task["rows"]) == {"teacher", "converted", "window_only"}
        assert all(0 <= row["acc_norm"] <= 1 for row in task["rows"].values())


def test_unknown_tasks_are_refused(monkeypatch):
    manager = lm_eval_tasks().TaskManager
    monkeypatch.setattr(lm_eval_tasks(), "TaskManager", lambda **_: manager(include_defaults=False))
    with pytest.raises(ValueError, match=r"^evaluate\.tasks: 'piqqa' is not a task of lm-eval"):
        harness(tiny_llama(), tiny_tokenizer(), ["piqqa"])


def test_files_must_be_there():
    with pytest.raises(FileNotFoundError, match=r"^evaluate\.tasks: no\.jsonl does not exist"):
        harness(tiny_llama(), tiny_tokenizer(), ["no.jsonl"])


def test_lines_must_be_questions(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "a"}')
    with pytest.raises(ValueError, match=r"a line needs 'question' or 'ctx', .* first has text"):
        harness(tiny_llama(), tiny_tokenizer(), [str(tmp_path / "text.jsonl")])


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"needs lm-evaluation-harness.*pip install 'linearize\["):
        harness(tiny_llama(), tiny_tokenizer(), ["piqa"])
