"""Several runs side by side: their figures as nested values, and as a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linearize import tables
from linearize.evaluation.perplexity import PROTOCOL
from linearize.evaluation.pictures import read_pictures
from linearize.report import charts
from linearize.report.comparison_charts import by_layer, by_metric, by_position, by_tokens
from linearize.report.page import write_page
from linearize.report.single import memory, read_results, run_name

NOT_COMPARED = ("output",)


def compare_runs(
    folders: Sequence[str | Path], *, settings: Sequence[Mapping[str, Any]], page: str | Path
) -> dict[str, Any]:
    """Figures of several runs, in their order; also written as a page.

    Args:
        folders: Run directories.
        settings: The recipe of each as flat values, {"convert.window": 64, ...}.
        page: The HTML file to write.

    Returns:
        {"runs": {name: {"teacher", "converted", "swa_sinks": rows of its last ablation, "closed",
        "verdict", "state_bytes", "tokens", "seconds"}}, "settings": {key: a value per run} where
        they differ, "comparable": whether all scored the same tokens the same way, "page"}; what a
        run did not measure is None.

    Raises:
        ValueError: Fewer than two runs.
        FileNotFoundError: A folder holds no results.
    """
    if len(folders) < 2:
        raise ValueError("compare: one run has nothing beside it; name two or more")
    results = dict(zip(_names(folders), map(read_results, map(Path, folders)), strict=True))
    places = dict(zip(results, map(Path, folders), strict=True))
    keys = [key for key in settings[0] if key not in NOT_COMPARED]
    keys += sorted({key for one in settings for key in one} - {*keys, *NOT_COMPARED})
    found = {
        "runs": {name: _figures(result, places[name]) for name, result in results.items()},
        "settings": {
            key: [one.get(key) for one in settings]
            for key in keys
            if any(one.get(key) != settings[0].get(key) for one in settings)
        },
        "comparable": _is_comparable(results),
        "page": str(page),
    }
    write_page(
        Path(page),
        "compare.html.jinja",
        charts=_charts(results, places),
        runs=found["runs"],
        settings=found["settings"],
        comparable=found["comparable"],
    )
    return found


def _names(folders: Sequence[str | Path]) -> list[str]:
    """A name for each run, with the folder above where two have the same."""
    short = [run_name(Path(folder)) for folder in folders]
    names = [
        name if short.count(name) == 1 else f"{run_name(Path(folder, '..'))}/{name}"
        for name, folder in zip(short, folders, strict=True)
    ]
    counted = [f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]
    return [
        name if names.count(name) == 1 else again
        for name, again in zip(names, counted, strict=True)
    ]


def last_table(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ablation of the finished model, or the one there is."""
    return results.get("ablation") or results.get("ablation_after_transfer") or {}


def _figures(results: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    rows = last_table(results)
    cost = memory(folder / "model" / "config.json")
    return {
        **{name: rows.get(name) for name in ("teacher", "converted", "swa_sinks")},
        "closed": results.get("gap_closed", {}).get("ablation"),
        "verdict": tables.verdict(rows),
        "state_bytes": cost and cost["state_bytes"],
        "tokens": sum(results.get("tokens", {}).values()) or None,
        "seconds": results.get("seconds"),
    }


def _is_comparable(results: Mapping[str, Mapping[str, Any]]) -> bool:
    converted = [last_table(result).get("converted") for result in results.values()]
    protocols = {tuple(row[key] for key in PROTOCOL) for row in converted if row is not None}
    return len(protocols) <= 1


def _charts(
    results: Mapping[str, Mapping[str, Any]], places: Mapping[str, Path]
) -> dict[str, charts.Charts]:
    """Groups of charts with a line per run."""
    tested = {name: last_table(result) for name, result in results.items()}
    tested = {name: rows for name, rows in tested.items() if "converted" in rows}
    histories = {
        name: result["transfer"]["history"]
        for name, result in results.items()
        if result.get("transfer", {}).get("history")
    }
    pictures = {name: read_pictures(folder / "attention") for name, folder in places.items()}
    return {
        "quality": by_metric(tested),
        "buckets": by_position(tested),
        "transfer": by_tokens(histories),
        "fidelity": by_layer({name: one for name, one in pictures.items() if one is not None}),
    }
