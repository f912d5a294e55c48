"""The charts of several runs: a line or a row per run, each with a colour, a dash and a marker."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from linearize.evaluation.pictures import Pictures
from linearize.report.figures import (
    MEASURES,
    METRICS,
    SERIES,
    Charts,
    empty_figure,
    error_bars,
    line_of,
    log_axis,
    number,
    perplexity_axis,
    row_name,
    short,
    span,
    tokens_axis,
)

Rows = Mapping[str, Any]
SHOWN = ("teacher", "converted", "swa_sinks")  # rows of each run


def by_metric(runs: Mapping[str, Rows]) -> Charts:
    """Converted model between teacher and floor, a row per run and a chart per metric."""
    charts = {}
    for key, label in METRICS.items() if runs else ():
        figure = empty_figure(height=130 + 34 * len(runs), xaxis={"title": label})
        for row in SHOWN:
            known = {name: rows[row] for name, rows in runs.items() if row in rows}
            look = line_of(row_name(row), *_row_look(row))
            figure.add_scatter(
                name=look["name"], mode="markers", marker=look["marker"] | {"size": 11},
                x=[found[key] for found in known.values()], y=list(known),
                error_x=error_bars(known.values(), key, _row_look(row)[0]),
                hovertemplate="%{y}: %{x:.4g}",
            )  # fmt: skip
        order = {"categoryorder": "array", "categoryarray": list(reversed(runs))}
        figure.update_yaxes(**order, range=[-0.5, len(runs) - 0.5])
        if key == "perplexity":
            figure.update_xaxes(**perplexity_axis(x for trace in figure.data for x in trace.x))
        if key == "top1_agreement":
            figure.update_xaxes(tickformat=".0%")
        charts[label] = figure
    return charts


def by_position(runs: Mapping[str, Rows]) -> Charts:
    """The converted model of every run by position in the window of text."""
    charts = {}
    places = {name: rows["converted"]["buckets"] for name, rows in runs.items()}
    ends = sorted({place["to"] for buckets in places.values() for place in buckets})
    for key, label in METRICS.items() if runs else ():
        figure = empty_figure(
            xaxis={
                "title": "position in the window of text, up to",
                "type": "log",
                "tickvals": ends,
                "ticktext": [short(end) for end in ends],
            },
            yaxis={"title": label},
        )
        for turn, (name, buckets) in enumerate(places.items()):
            look = _look(turn)
            figure.add_scatter(
                **line_of(name, *look), x=[place["to"] for place in buckets],
                y=[number(place[key]) for place in buckets],
                error_y=error_bars(buckets, key, look[0]), text=[span(place) for place in buckets],
                hovertemplate="%{text}: %{y:.4g}",
            )  # fmt: skip
        if key == "top1_agreement":
            figure.update_yaxes(tickformat=".0%")
        charts[label] = figure
    return charts


def by_tokens(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> Charts:
    """The mean loss of stage 1 of every run."""
    if not histories:
        return {}
    figure = empty_figure(xaxis=tokens_axis(), yaxis=log_axis("loss"))
    for turn, (name, history) in enumerate(histories.items()):
        figure.add_scatter(
            **line_of(name, *_look(turn)), x=[entry["tokens"] for entry in history],
            y=[entry["loss"] for entry in history], hovertemplate="%{x:,} tokens: %{y:.4g}",
        )  # fmt: skip
    return {"loss": figure}


def by_layer(pictures: Mapping[str, Pictures]) -> Charts:
    """The mean over heads of every measure of fidelity, by layer."""
    charts = {}
    for key, label in MEASURES.items() if pictures else ():
        is_share = "beyond" in key
        axis = {"title": label, "tickformat": ".0%"} if is_share else log_axis(label)
        figure = empty_figure(xaxis={"title": "layer"}, yaxis=axis)
        for turn, (name, one) in enumerate(pictures.items()):
            figure.add_scatter(
                **line_of(name, *_look(turn)), x=one.layers,
                y=np.nanmean(one.measures[key], 1).tolist(),
                hovertemplate="layer %{x}: %{y:.3g}",
            )  # fmt: skip
        charts[label] = figure
    return charts


def _look(turn: int) -> tuple[str, str, str]:
    """Colour, dash and marker of a run; they come again after nine runs."""
    return SERIES[turn % len(SERIES)]


def _row_look(row: str) -> tuple[str, str, str]:
    return {"teacher": SERIES[0], "converted": SERIES[1], "swa_sinks": SERIES[5]}[row]
