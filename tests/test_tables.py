"""Tables: readable units, alike layers on one line, gaps and infinities shown as such."""

import io

import pytest
from conftest import tiny_llama
from rich.console import Console

from linearize import tables
from linearize.inspection import inspect


def printed(renderable):
    console = Console(width=160, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1 k"),
        (1234, "1.23 k"),
        (5e7, "50 M"),
        (3e20, "300 E"),
        (3e23, "3e+05 E"),
    ],
)
def test_numbers(value, text):
    assert tables.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1536, "1.5 KiB")]
)
def test_sizes(value, text):
    assert tables.size(value) == text


def test_alike_layers_share_a_line_and_kept_ones_are_explained():
    model = tiny_llama(num_hidden_layers=5)
    text = printed(tables.inspection(inspect(model, window=4, layers=[0, 1, 3])))
    lines = [line.split()[0] for line in text.splitlines() if line[:1].isdigit()]
    assert lines[1:5] == ["0-1", "2", "3", "4"]
    assert "layer 2 stays: not among convert.layers" in text


def test_missing_errors_and_infinite_perplexities_are_shown():
    row = {"perplexity": "inf", "perplexity_se": None, "kl_to_teacher": 0.5,
           "kl_to_teacher_se": 0.25, "top1_agreement": 0.125}  # fmt: skip
    text = printed(tables.ablation({"window_only": row, "other": row}))
    assert "window only" in text and "other" in text
    cells = text.splitlines()[1].split()
    assert cells == ["window", "only", "inf", "-", "0.5000", "0.2500", "12.5", "%"]


def test_results_show_gap_samples_and_costs():
    metrics = {"tokens": 1000, "seconds": 2.0, "tokens_per_s": 500.0}
    found = {
        "ablation": {}, "gap_closed": {"ablation": 0.5}, "transfer": metrics, "seconds": 9.0,
        "samples": [{"prompt": "a", "teacher": "a b", "converted": "a c"}], "output": "runs/x",
    }  # fmt: skip
    text = printed(tables.results(found))
    for part in ("50 % of the gap", "a b", "a c", "1,000 tokens in 2 s, 500 tokens/s", "runs/x"):
        assert part in text


@pytest.mark.parametrize(
    ("pushed", "words"),
    [
        (None, ("nothing was pushed",)),
        (
            {"url": "https://hub/me/x", "branch": "v2", "commit": "01ab", "pull_request": None},
            ("pushed to https://hub/me/x (branch v2), commit 01ab",),
        ),
        (
            {
                "url": "https://hub/x",
                "branch": None,
                "commit": "01",
                "pull_request": "https://pr/1",
            },
            ("pushed to https://pr/1, commit 01",),
        ),
    ],
    ids=["no", "branch", "pull-request"],
)
def test_publication(pushed, words):
    found = {"folder": "runs/x/publish", "files": ["a", "b"], "bytes": 2048, "pushed": pushed}
    text = printed(tables.publication(found | {"differences": {"with linearize": 1e-6}}))
    shown = ("runs/x/publish: 2 files, 2 KiB", "loads with linearize: largest difference", *words)
    assert all(part in text for part in shown)


@pytest.mark.parametrize(
    ("gain", "words"),
    [(0.5, "lowers the loss by 0.500"), (-0.5, "raises the loss by 0.500"),
     (0.01, "makes no measurable difference: 0.010")],
)  # fmt: skip
def test_verdict(gain, words):
    rows = {"converted": {"linear_branch": {"gain": gain, "gain_se": 0.02}}}
    assert words in tables.verdict(rows)
    assert "± 0.020 nats per token" in tables.verdict(rows)
    assert tables.verdict({"converted": {}}) is None
    rows["converted"]["linear_branch"]["gain_se"] = None
    assert tables.verdict(rows) is None


def test_certificate_names_what_does_not_agree():
    check = {"max_logit_difference": 0.5, "kl": 0.25}
    found = {
        "linear_mass": {"linear": 0.25, "softmax": 0.5,
                        "layers": {"0": {"linear": [0.1, 0.3]}, "1": {"linear": [0.3]}}},
        "parity": {"agrees": False, "dtype": "float32",
                   "checks": {"decode": check | {"agrees": False},
                              "window_covers_all": check | {"agrees": True}}},
    }  # fmt: skip
    text = printed(tables.results(found)).replace("\n", " ")
    assert "25.0 % (softmax attention: 50.0 %), by layer 20.0 % to 30.0 %" in text
    assert "DO NOT AGREE (nats per token, float32): decode 2.5e-01 (TOO FAR), window covers" in text
    assert list(tables.certificate({"linear_mass": {"layers": {}}})) == []


def test_recall_lists_rows_and_distances():
    row = {"log_prob": -1.5, "log_prob_se": None, "choice_accuracy": 0.5, "exact_match": 0.25,
           "exact_match_se": 0.125,
           "buckets": [{"from": 0, "to": 64, "exact_match": 1.0}]}  # fmt: skip
    cells = [{"task": "key_value", "length": 64, "rows": {"teacher": row, "window_only": row}}]
    found = {"cells": cells, "samples": 4, "num_choices": 20, "chance": 0.05, "window": 64}
    head, line, *_ = printed(tables.recall(found)).splitlines()
    assert head.split()[-1] == "<64"
    assert line.split() == ["key-value", "64", "teacher", "-1.50", "-", "50.0", "%", "25.0", "%",
                            "12.5", "%", "100.0", "%"]  # fmt: skip


def test_tasks_list_metrics_by_row():
    rows = {"teacher": {"acc": 0.5, "acc_se": 0.1}, "converted": {"acc": 0.25, "acc_se": "nan"}}
    task = {"task": "own", "num_items": 8, "rows": rows, "linear_branch": {"acc": 0, "acc_se": 0}}
    text = printed(tables.tasks({"tasks": [task], "limit": 8, "lm_eval": "1.2"}))
    assert "0.500 ± 0.100" in text and "0.250 ± nan" in text and "0.000 ± 0.000" in text
    assert "lm-evaluation-harness 1.2, the first 8 items of each" in text
