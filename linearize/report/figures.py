"""What all charts share: the look of a row, axes, bars of errors, maps.

A colour is the name of a variable of the style sheet, `var(--teacher)`: the page puts in what the
variable stands for in light, dark and print. Lines also differ by dash and marker.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

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
    "swa_sinks_equal_bytes": ("floor", "longdashdot", "hexagon"),
    "control": ("text", "dot", "star"),
    "teacher_finetuned": ("teacher", "dash", "circle-open"),
    "swa_sinks_finetuned": ("floor", "dash", "cross-open"),
}
SERIES = tuple(LOOKS.values())
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


def short(tokens: float) -> str:
    """A number of tokens, 4,096 as 4K."""
    return f"{tokens / 1024:.0f}K" if tokens % 1024 == 0 else f"{tokens:,}"


def two_errors(row: Row, key: str) -> float:
    """Two standard errors."""
    return 2 * (number(row[f"{key}_se"]) or 0)


def error_bars(rows: Iterable[Row], key: str, color: str) -> dict[str, Any]:
    """Bars of two standard errors; of a perplexity those of its logarithm, which stay positive."""
    rows = list(rows)
    up = down = [two_errors(row, key) for row in rows]
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


def perplexity_axis(values: Iterable[Any]) -> dict[str, Any]:
    """Logarithmic, with ticks at 1, 2 and 5 of every decade, where perplexities are far apart."""
    known = [value for value in map(number, values) if value is not None]
    if not known or max(known) < 4 * min(known):
        return {}
    powers = range(math.floor(math.log10(min(known))), math.ceil(math.log10(max(known))) + 1)
    ticks = [round(step * 10.0**power, 10) for power in powers for step in (1, 2, 5)]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def heatmap(
    values: np.ndarray, *, x: Sequence[Any], y: Sequence[str], log: bool, hover: str
) -> go.Figure:
    """A map of numbers, the first row on top; `log` colours by powers of ten."""
    figure = empty_figure(showlegend=False, height=130 + 16 * max(len(y), 8))
    bar: dict[str, Any] = {"thickness": 12, "outlinewidth": 0, "tickfont": {"size": 11}}
    shown = values
    if log:
        shown = np.log10(np.maximum(values, 1e-9))
        low, high = np.nanmin(shown), np.nanmax(shown)
        ticks = list(range(math.floor(low), math.ceil(high) + 1))
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
            figure.update_layout({name: titled(layout.pop(name))})
    return figure.update_layout(**layout)


def titled(axis: dict[str, Any]) -> dict[str, Any]:
    """An axis whose title keeps the font that all have."""
    return axis | {"title": {"text": axis.pop("title")}} if "title" in axis else axis
