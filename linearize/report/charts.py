"""The charts of a run, as Plotly figures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from linearize.evaluation.pictures import Pictures
from linearize.report.figures import (
    MEASURES,
    METRICS,
    SERIES,
    WHO,
    Charts,
    Row,
    empty_figure,
    error_bars,
    heatmap,
    line_of,
    log_axis,
    look,
    number,
    perplexity_axis,
    row_name,
    short,
    span,
    titled,
    tokens_axis,
    two_errors,
)

FAR = ("linear_only", "no_attention")  # would squeeze the other lines; shown by a click


def ablation(tables: Mapping[str, Mapping[str, Row]]) -> Charts:
    """Every row of the ablation as a point with two standard errors, one chart per metric."""
    return {label: _rows(tables, key, label) for key, label in METRICS.items()}


def _rows(tables: Mapping[str, Mapping[str, Row]], key: str, label: str) -> go.Figure:
    figure, names = empty_figure(), []
    for title, rows in tables.items():
        known = {name: row for name, row in rows.items() if number(row[key]) is not None}
        last = title == list(tables)[-1]
        names = [*known, *(name for name in names if name not in known)]
        looks = [look(name) for name in known]
        colors = [f"var(--{color})" for color, _, _ in looks]
        figure.add_scatter(
            name=title,
            mode="markers",
            x=[row[key] for row in known.values()],
            y=[row_name(name) for name in known],
            error_x=error_bars(known.values(), key, "muted"),
            customdata=[two_errors(row, key) for row in known.values()],
            marker={"size": 11, "color": colors if last else "var(--page)",
                    "symbol": [symbol for _, _, symbol in looks] if last else "circle",
                    "line": {"color": colors, "width": 2}},
            hovertemplate="%{y}: %{x:.4g} ± %{customdata:.2g}<extra>" + title + "</extra>",
        )  # fmt: skip
    order = [row_name(name) for name in reversed(names)]
    figure.update_yaxes(categoryorder="array", categoryarray=order, automargin=True)
    figure.update_xaxes(title_text=label)
    if key == "perplexity":
        figure.update_xaxes(**perplexity_axis(x for trace in figure.data for x in trace.x))
    if key == "top1_agreement":
        figure.update_xaxes(tickformat=".0%")
    figure.update_layout(height=110 + 32 * len(names), showlegend=len(tables) > 1)
    return figure


def buckets(rows: Mapping[str, Row]) -> Charts:
    """Every metric by position in the window of text, and what the linear branch gains there."""
    charts = {}
    for key, label in METRICS.items():
        figure = empty_figure(
            yaxis={"title": label}, xaxis={"title": "position in the window of text"}
        )
        for name, row in rows.items():
            color, dash, symbol = look(name)
            places = row["buckets"]
            figure.add_scatter(
                **line_of(row_name(name), color, dash, symbol),
                visible="legendonly" if name in FAR else True,
                x=[span(place) for place in places],
                y=[number(place[key]) for place in places],
                error_y=error_bars(places, key, color),
                customdata=[two_errors(place, key) for place in places],
                hovertemplate="%{x}: %{y:.4g} ± %{customdata:.2g}",
            )
        if key == "perplexity":
            figure.update_yaxes(**perplexity_axis(y for trace in figure.data for y in trace.y))
        if key == "top1_agreement":
            figure.update_yaxes(tickformat=".0%")
        charts[label] = figure
    gains = rows.get("converted", {}).get("linear_branch")
    if gains is not None:
        places, color = gains["buckets"], "converted"
        figure = empty_figure(
            yaxis={"title": "nats per token", "rangemode": "tozero"},
            xaxis={"title": "position in the window of text"},
            showlegend=False,
        )
        figure.add_bar(
            name="gain",
            x=[span(place) for place in places],
            y=[place["gain"] for place in places],
            error_y=error_bars(places, "gain", "text"),
            marker={"color": f"var(--{color})"},
            hovertemplate="%{x}: %{y:.4f} ± %{error_y.array:.2g}<extra></extra>",
        )
        charts["what the linear branch gains"] = figure
    return charts


def transfer_curves(history: Sequence[Row]) -> Charts:
    """Stage 1: the mean loss, the loss of every layer as lines, and as a map of layer and step."""
    tokens = [entry["tokens"] for entry in history]
    mean = empty_figure(xaxis=tokens_axis(), yaxis=log_axis("loss"), showlegend=False)
    mean.add_scatter(
        **line_of("mean of all layers", *look("converted")), x=tokens,
        y=[entry["loss"] for entry in history], hovertemplate="%{x:,} tokens: %{y:.4g}",
    )  # fmt: skip
    layers = sorted(history[0]["layers"], key=int)
    values = {name: [entry["layers"][name] for entry in history] for name in layers}
    worst = sorted(layers, key=lambda name: -values[name][-1])[:3]
    lines = empty_figure(xaxis=tokens_axis(), yaxis=log_axis("loss"))
    for name in [*(name for name in layers if name not in worst), *worst]:
        marked = name in worst
        color, dash, symbol = SERIES[worst.index(name)] if marked else ("muted", "solid", "circle")
        line = line_of(f"layer {name}", color, dash, symbol)
        line["line"]["width"] = 2 if marked else 1
        line["mode"] = "lines+markers" if marked else "lines"
        lines.add_scatter(
            **line, x=tokens, y=values[name], showlegend=marked, opacity=1 if marked else 0.55,
            hovertemplate="%{x:,} tokens: %{y:.4g}",
        )  # fmt: skip
    table = np.array([values[name] for name in layers])
    layer_map = heatmap(
        table, x=tokens, y=[f"layer {name}" for name in layers], log=True,
        hover="%{y}, %{x:,} tokens: %{customdata:.4g}<extra></extra>",
    )  # fmt: skip
    layer_map.update_xaxes(**titled(tokens_axis()))
    return {"mean": mean, "layers": lines, "map": layer_map}


def finetune_curves(stages: Mapping[str, Sequence[Row]]) -> Charts:
    """Stage 2 and its baselines: one chart per part of the loss."""
    parts = {"loss": "loss", "kl": "KL to teacher", "ce": "cross-entropy"}
    charts = {}
    for key, label in parts.items():
        figure = empty_figure(xaxis=tokens_axis(), yaxis={"title": f"{label}, nats per token"})
        for name, history in stages.items():
            points = [entry for entry in history if key in entry]
            if points:
                figure.add_scatter(
                    **line_of(row_name(name), *look(name)), x=[entry["tokens"] for entry in points],
                    y=[entry[key] for entry in points], hovertemplate="%{x:,} tokens: %{y:.4g}",
                )  # fmt: skip
        if figure.data:
            charts[label] = figure
    return charts


def fidelity(pictures: Pictures) -> Charts:
    """A map of layers and heads for each measure; squares mark the heads that are pictured."""
    charts = {}
    rows = {layer: row for row, layer in enumerate(pictures.layers)}
    for key, label in MEASURES.items():
        values = pictures.measures[key]
        share = "beyond" in key
        figure = heatmap(
            values, x=list(range(values.shape[1])), y=[f"layer {i}" for i in pictures.layers],
            log=not share,
            hover="%{y}, head %{x}: %{customdata:.3g}<extra></extra>",
        )  # fmt: skip
        if share:
            figure.update_traces(zmin=0, zmax=1, colorbar_tickformat=".0%")
        figure.add_scatter(
            name="pictured below",
            mode="markers",
            x=[head for _, head in pictures.heads],
            y=[f"layer {layer}" for layer, _ in pictures.heads],
            marker={"symbol": "square-open", "size": 13, "color": "#ffffff", "line_width": 2},
            customdata=[float(values[rows[layer], head]) for layer, head in pictures.heads],
            hovertemplate="%{y}, head %{x}: %{customdata:.3g}, pictured below<extra></extra>",
        )
        figure.update_xaxes(title_text="head", dtick=1 if values.shape[1] <= 16 else 4)
        charts[label] = figure
    return charts


def recall(cells: Sequence[Row], chance: float) -> Charts:
    """Share of facts recalled by distance, a line per row; a chart per task, its longest length."""
    charts = {}
    longest = {cell["task"]: cell for cell in sorted(cells, key=lambda cell: cell["length"])}
    for task, cell in longest.items():
        figure = empty_figure(
            xaxis={"title": "tokens between the fact and the question"},
            yaxis={"title": "tokens of the answer chosen right", "tickformat": ".0%",
                   "range": [-0.03, 1.05]},
        )  # fmt: skip
        for name, row in cell["rows"].items():
            color, dash, symbol = look(name)
            figure.add_scatter(
                **line_of(row_name(name), color, dash, symbol),
                x=[span(place) for place in row["buckets"]],
                y=[place["choice_accuracy"] for place in row["buckets"]],
                error_y=error_bars(row["buckets"], "choice_accuracy", color),
                hovertemplate="%{x}: %{y:.1%} ± %{error_y.array:.1%}",
            )
        figure.add_hline(
            y=chance, line={"color": "var(--muted)", "dash": "dot", "width": 1},
            annotation={"text": "chance", "font": {"color": "var(--muted)"}},
        )  # fmt: skip
        charts[f"{task.replace('_', ' ')}, {cell['length']:,} tokens"] = figure
    return charts


def efficiency(found: Mapping[str, Any]) -> Charts:
    """Measured tokens per second and cache by context, and the speed of a prefill."""
    decode, prefill = found["decode"], found["prefill"]
    return {
        "decode": _against(
            "tokens in the cache", "tokens per second",
            {who: [(row["context"], 1 / row[f"{who}_s"]) for row in decode] for who in WHO},
        ),
        "prefill": _against(
            "tokens of the prompt", "tokens per second",
            {who: [(row["tokens"], row["tokens"] / row[f"{who}_s"]) for row in prefill]
             for who in WHO},
        ),
        "cache": _against(
            "tokens in the cache", "MiB",
            {who: [(row["context"], row[f"{who}_cache_bytes"] / 2**20) for row in decode]
             for who in WHO},
        ),
    }  # fmt: skip


def memory(lengths: Sequence[int], kv_bytes: Sequence[int], state_bytes: int) -> Charts:
    """Bytes that the converted layers remember of a sequence, before and after."""
    return {
        "memory": _against(
            "tokens of context", "MiB per sequence",
            {"teacher": [(n, kv / 2**20) for n, kv in zip(lengths, kv_bytes, strict=True)],
             "converted": [(n, state_bytes / 2**20) for n in lengths]},
        )
    }  # fmt: skip


def _against(x: str, y: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> go.Figure:
    """Lines of teacher and converted model over a number of tokens, both axes by powers."""
    figure = empty_figure(xaxis={"title": x, "type": "log", "dtick": 0.60206, "tickformat": "~s"},
                     yaxis={"title": y, "type": "log", "tickformat": "~g"})  # fmt: skip
    for name, points in lines.items():
        figure.add_scatter(
            **line_of(row_name(name), *look(name)), x=[a for a, _ in points],
            y=[b for _, b in points], hovertemplate="%{x:,} tokens: %{y:.3g}",
        )  # fmt: skip
    places = sorted({a for points in lines.values() for a, _ in points})
    figure.update_xaxes(tickvals=places, ticktext=[short(place) for place in places])
    return figure
