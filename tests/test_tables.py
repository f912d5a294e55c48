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
