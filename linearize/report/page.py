"""One HTML file out of a template, charts and data; it asks the network for nothing.

Plotly and the charts lie compressed in the page, which takes a third of the space. A content
security policy names the hash of each script: text from a model cannot become one, and no script
can reach a server.
"""

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from plotly.offline import get_plotlyjs

from linearize import tables
from linearize.report.figures import Charts, row_name

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {scripts}; "
    "base-uri 'none'; form-action 'none'"
)


def write_page(
    file: Path,
    template: str,
    *,
    charts: Mapping[str, Charts],
    attention: Mapping[str, Any] | None = None,
    **values: Any,
) -> None:
    """Writes the page of a template, whole or not at all.

    Args:
        file: Where to.
        template: Name of a template of this package.
        charts: Groups of charts that share a place on the page; an empty one is left out.
        attention: What the viewer of attention weights shows.
        values: What else the template reads; escaped wherever it lands.
    """
    shown = {name: group for name, group in charts.items() if group}
    figures = {
        name: [figure.to_dict() for figure in group.values()] for name, group in shown.items()
    }
    data = {"charts": figures, "attention": attention}
    script = files("linearize.report").joinpath("page.js").read_text(encoding="utf-8")
    page = _environment().get_template(template)
    text = page.render(
        switches={name: list(group) for name, group in shown.items()},
        attention=attention is not None,
        style=files("linearize.report").joinpath("page.css").read_text(encoding="utf-8"),
        script=script,
        policy=POLICY.format(scripts=f"{_hash(script)} {_hash(get_plotlyjs())}"),
        plotly=_plotly(),
        data=_packed(json.dumps(data)),
        **values,
    )
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)


def public(value: Any) -> Any:
    """The same nested value, where a path outside the current folder is only its last part."""
    if isinstance(value, Mapping):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public(item) for item in value]
    is_place = isinstance(value, str) and (value[:1] in "/~\\" or value[1:3] in (":\\", ":/"))
    if is_place and len(value) > 1:
        return value.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return value


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("linearize.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "row_name": row_name,
        "size": tables.size,
        "number": tables.number,
        "fixed": lambda value, digits: (
            f"{value:,.{digits}f}" if _is_number(value) else value or "–"
        ),
        "percent": lambda value, digits=1: f"{100 * value:.{digits}f} %",
        "duration": _duration,
    }
    return environment


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


@cache
def _plotly() -> str:
    return _packed(get_plotlyjs())


def _packed(text: str) -> str:
    """gzip, in base64; the same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
