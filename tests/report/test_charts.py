"""Charts of a run: the right numbers, told apart without colour, and nothing that breaks them."""

import numpy as np
import pytest
from sampleruns import efficiency, history, recall, table

from linearize.report import charts
from linearize.report.figures import LOOKS, error_bars, perplexity_axis
from linearize.tables import ROW_NAMES


def test_every_row_has_a_look_of_its_own():
    assert set(ROW_NAMES) <= set(LOOKS)
    assert len({look[1:] for look in LOOKS.values()}) == len(LOOKS)  # dash and marker


def test_ablation_has_a_chart_per_metric_and_leaves_out_the_infinite():
    found = charts.ablation({"before": table(), "after": table()})
    assert len(found) == 3
    first = found["perplexity"].data
    assert [trace.name for trace in first] == ["before", "after"]
    assert list(first[0].x) == [20.0, 24.0, 30.0, 29.0]
    assert len(found["KL to teacher, nats"].data[0].x) == 5


def test_bars_are_two_standard_errors_and_never_below_zero():
    rows = [
        {"perplexity": 10.0, "perplexity_se": 9.0},
        {"perplexity": "inf", "perplexity_se": None},
    ]
    bars = error_bars(rows, "perplexity", "text")
    assert 0 < bars["arrayminus"][0] < 10 < 18 < bars["array"][0]
    assert bars["array"][1] == 0
    bars = error_bars([{"nll": 3.0, "nll_se": 0.5}], "nll", "text")
    assert bars["array"] == bars["arrayminus"] == [1.0]


def test_buckets_show_what_the_linear_branch_gains():
    found = charts.buckets(table())
    assert list(found)[-1] == "what the linear branch gains"
    assert list(found["what the linear branch gains"].data[0].y) == [0.1, 0.1, 0.1]
    by_name = {trace.name: trace for trace in found["perplexity"].data}
    assert by_name["linear only"].visible == "legendonly"
    assert list(by_name["teacher"].x) == ["0–4", "4–8", "8–16"]
    del table()["converted"]
    assert len(charts.buckets({"teacher": table()["teacher"]})) == 3


def test_curves_have_the_mean_every_layer_and_a_map():
    found = charts.transfer_curves(history(layers=range(12)))
    assert list(found["mean"].data[0].y) == [1, 1 / 2, 1 / 3]
    lines = found["layers"].data
    assert len(lines) == 12
    assert [line.name for line in lines if line.showlegend] == ["layer 11", "layer 10", "layer 9"]
    assert list(found["map"].data[0].y)[-1] == "layer 11"
    np.testing.assert_allclose(found["map"].data[0].customdata[0], [1, 1 / 2, 1 / 3], rtol=1e-6)


def test_finetuning_shows_the_parts_it_has():
    stages = {"finetune": [{"tokens": 1, "loss": 2.0, "ce": 2.0}]}
    assert list(charts.finetune_curves(stages)) == ["loss", "cross-entropy"]


def test_recall_takes_the_longest_length_of_each_task():
    found = charts.recall(recall()["cells"], 0.1)
    assert list(found) == ["pairs, 16 tokens"]


def test_efficiency_is_tokens_per_second():
    found = charts.efficiency(efficiency())
    speeds = {trace.name: trace.y[0] for trace in found["decode"].data}
    assert speeds == pytest.approx({"teacher": 50, "converted": 100})
    assert found["prefill"].data[0].y[0] == pytest.approx(51200)
    assert found["cache"].data[0].y[0] == 16


def test_an_axis_is_logarithmic_where_perplexities_are_far_apart():
    assert perplexity_axis([20, 30, None]) == {}
    assert perplexity_axis([]) == {}
    axis = perplexity_axis([20.0, 618.0])
    assert axis["type"] == "log" and {20, 50, 100, 500} <= set(axis["tickvals"])
