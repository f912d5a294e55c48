"""The charts of a run, as Plotly figures.

A colour is the name of a variable of the style sheet, `var(--teacher)`: the page puts in what the
variable stands for in light, dark and print. Lines also differ by dash and marker.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from linearize.evaluation.pictures import Pictures
from linearize.tables import ROW_NAMES

Row = Mapping[str, Any]
Charts = dict[str, go.Figure]  # by the name on the switch

LOOKS = {  # row: colour, dash, marker
    "teacher": ("teacher", "solid", "circle"),
    "converted": ("converted", "solid", "diamond"),
    "window_only": ("window", "dash", "square"),
    "linear_only": ("linear", "dot", "triangle-up"),
    "no_attention": ("off", "longdash", "x"),
    "swa_sinks": ("floor", "dashdot", "cross"),
    "control": ("text", "dot", "star"),
    "teacher_finetuned": ("teacher", "dash", "circle-open"),
    "swa_sinks_finetuned": ("floor", "dash", "cross-open"),
}
SERIES = tuple(LOOKS.values())
FAR = ("linear_only", "no_attention")  # would squeeze the other lines; shown by a click
METRICS = {  # entry of a row: what the axis says
    "perplexity": "perplexity",
    "kl_to_teacher": "KL to teacher, nats",
    "top1_agreement": "top-1 agreement with teacher",
}
WHO = ("teacher", "converted")
MEASURES = {
    "output_error": "output error",
    "attention_kl": "KL of the weights",
    "beyond_window": "teacher beyond the window",
    "student_beyond_window": "student beyond the window",
}


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
            customdata=[_two(row, key) for row in known.values()],
            marker={"size": 11, "color": colors if last else "var(--page)",
                    "symbol": [symbol for _, _, symbol in looks] if last else "circle",
                    "line": {"color": colors, "width": 2}},
            hovertemplate="%{y}: %{x:.4g} ± %{customdata:.2g}<extra>" + title + "</extra>",
        )  # fmt: skip
    order = [row_name(name) for name in reversed(names)]
    figure.update_yaxes(categoryorder="array", categoryarray=order, automargin=True)
    figure.update_xaxes(title_text=label)
    if key == "perplexity":
        values = [x for trace in figure.data for x in trace.x]
        figure.update_xaxes(type="log", **decade_ticks(min(values), max(values)))
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
                customdata=[_two(place, key) for place in places],
                hovertemplate="%{x}: %{y:.4g} ± %{customdata:.2g}",
            )
        if key == "perplexity":
            values = [y for trace in figure.data for y in trace.y if y is not None]
            figure.update_yaxes(type="log", **decade_ticks(min(values), max(values)))
        if key == "top1_agreement":
            figure.update_yaxes(tickformat=".0%")
        charts[label] = figure
    gains = rows.get("converted", {}).get("linear_branch")
    if gains is not None:
        places, color = gains["buckets"], "converted"
        figure = empty_figure(yaxis={"title": "nats per token", "rangemode": "tozero"},
                         xaxis={"title": "position in the window of text"}, showlegend=False)  # fmt: skip
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
        lines.add_scatter(**line, x=tokens, y=values[name], showlegend=marked,
                          opacity=1 if marked else 0.55, hovertemplate="%{x:,} tokens: %{y:.4g}")  # fmt: skip
    table = np.array([values[name] for name in layers])
    layer_map = _heatmap(
        table, x=tokens, y=[f"layer {name}" for name in layers], log=True,
        hover="%{y}, %{x:,} tokens: %{customdata:.4g}<extra></extra>",
    )  # fmt: skip
    layer_map.update_xaxes(**_titled(tokens_axis()))
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
        figure = _heatmap(
            values, x=list(range(values.shape[1])), y=[f"layer {i}" for i in pictures.layers],
            log=not share,
            hover="%{y}, head %{x}: %{customdata:" + (".1%" if share else ".3g") + "}<extra></extra>",
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
        figure.add_hline(y=chance, line={"color": "var(--muted)", "dash": "dot", "width": 1},
                         annotation={"text": "chance", "font": {"color": "var(--muted)"}})  # fmt: skip
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
        figure.add_scatter(**line_of(row_name(name), *look(name)), x=[a for a, _ in points],
                           y=[b for _, b in points], hovertemplate="%{x:,} tokens: %{y:.3g}")  # fmt: skip
    places = sorted({a for points in lines.values() for a, _ in points})
    figure.update_xaxes(tickvals=places, ticktext=[_short(place) for place in places])
    return figure


# -------------------------------------------------------------------------------------- shared parts
def row_name(name: str) -> str:
    """A row as a reader calls it."""
    return ROW_NAMES.get(name, "converted" if name == "finetune" else name)


def look(name: str) -> tuple[str, str, str]:
    """Colour, dash and marker of a row."""
    return LOOKS.get("converted" if name == "finetune" else name, ("text", "solid", "circle"))


def number(value: Any) -> float | None:
    """A finite number, or None for what is missing or infinite."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def span(place: Row) -> str:
    """A bucket as text."""
    return f"{place['from']:,}–{place['to']:,}"


def _short(tokens: int) -> str:
    """A number of tokens, 4,096 as 4K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def _two(row: Row, key: str) -> float:
    """Two standard errors."""
    return 2 * (number(row[f"{key}_se"]) or 0)


def error_bars(rows: Iterable[Row], key: str, color: str) -> dict[str, Any]:
    """Bars of two standard errors; of a perplexity those of its logarithm, which stay positive."""
    rows = list(rows)
    up = down = [_two(row, key) for row in rows]
    if key == "perplexity":
        values = [number(row[key]) or 0.0 for row in rows]
        shares = [two / value if value else 0.0 for two, value in zip(up, values, strict=True)]
        up = [value * math.expm1(share) for value, share in zip(values, shares, strict=True)]
        down = [-value * math.expm1(-share) for value, share in zip(values, shares, strict=True)]
    bars = {"array": up, "arrayminus": down, "symmetric": False}
    return {"type": "data", **bars, "color": f"var(--{color})", "thickness": 1.2}


def line_of(name: str, color: str, dash: str, symbol: str) -> dict[str, Any]:
    color = f"var(--{color})"
    return {
        "name": name,
        "mode": "lines+markers",
        "line": {"color": color, "dash": dash, "width": 2},
        "marker": {"color": color, "symbol": symbol, "size": 8},
    }


def tokens_axis() -> dict[str, Any]:
    return {"title": "tokens", "tickformat": "~s", "rangemode": "tozero"}


def log_axis(title: str) -> dict[str, Any]:
    return {"title": title, "type": "log", "dtick": "D1", "tickformat": "~g"}


def decade_ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks 1, 2, 5 of every decade between two positive numbers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [round(step * 10.0**power, 10) for power in powers for step in (1, 2, 5)]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _heatmap(
    values: np.ndarray, *, x: Sequence[Any], y: Sequence[str], log: bool, hover: str
) -> go.Figure:
    """A map of numbers, the first row on top; `log` colours by powers of ten."""
    figure = empty_figure(showlegend=False, height=130 + 16 * max(len(y), 8))
    bar: dict[str, Any] = {"thickness": 12, "outlinewidth": 0, "tickfont": {"size": 11}}
    shown = values
    if log:
        shown = np.log10(np.maximum(values, 1e-9))
        low, high = np.nanmin(shown), np.nanmax(shown)
        ticks = [step for step in range(math.floor(low), math.ceil(high) + 1)]
        bar |= {"tickvals": ticks, "ticktext": [f"{10.0**tick:g}" for tick in ticks]}
    figure.add_heatmap(
        z=shown.astype(np.float32), x=list(x), y=list(y), customdata=values.astype(np.float32),
        colorscale="Cividis", colorbar=bar, xgap=1, ygap=1, hoverongaps=False, hovertemplate=hover,
    )  # fmt: skip
    figure.update_yaxes(range=[len(y) - 0.5, -0.5], showgrid=False)
    figure.update_xaxes(showgrid=False)
    return figure


def empty_figure(**layout: Any) -> go.Figure:
    """An empty figure in the page's colours."""
    axis = {
        "gridcolor": "var(--grid)",
        "zerolinecolor": "var(--grid)",
        "linecolor": "var(--grid)",
        "automargin": True,
        "title": {"font": {"size": 13}, "standoff": 10},
    }
    figure = go.Figure(
        layout={
            "template": go.layout.Template(),
            "height": 380,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": "var(--text)", "size": 13},
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "hoverlabel": {
                "bgcolor": "var(--raised)",
                "bordercolor": "var(--grid)",
                "font": {"color": "var(--text)"},
            },
            "xaxis": axis,
            "yaxis": axis,
        }
    )
    for name in ("xaxis", "yaxis"):
        if name in layout:
            figure.update_layout({name: _titled(layout.pop(name))})
    return figure.update_layout(**layout)


def _titled(axis: dict[str, Any]) -> dict[str, Any]:
    """An axis whose title keeps the font that all have."""
    return axis | {"title": {"text": axis.pop("title")}} if "title" in axis else axis
