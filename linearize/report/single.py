"""The report of one run: what its folder holds, as a page."""

import base64
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from linearize import tables
from linearize.evaluation.pictures import (
    CODES_PER_DECADE,
    LOWEST_DECADE,
    Pictures,
    read_pictures,
)
from linearize.inspection import state_bytes
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.report import charts
from linearize.report.figures import Charts
from linearize.report.page import public, write_page

PAGE = "report.html"
STAGES = ("finetune", "teacher_finetuned", "swa_sinks_finetuned")
LENGTHS = tuple(2**power for power in range(9, 18))


def write_report(folder: str | Path, *, settings: Mapping[str, Any], recipe: str) -> Path:
    """Writes `report.html` of a run from what lies in its folder, and returns the file.

    The page shows what was measured; a section without figures is not there. Needs no model.

    Args:
        folder: The run directory.
        settings: The recipe as nested values, without places of this computer.
        recipe: The same as YAML.

    Raises:
        FileNotFoundError: The folder holds no results.
    """
    folder = Path(folder)
    results = read_results(folder)
    pictures = read_pictures(folder / "attention")
    cost = memory(folder / "model" / "config.json")
    rows = results.get("ablation") or results.get("ablation_after_transfer") or {}
    write_page(
        folder / PAGE,
        "report.html.jinja",
        charts=_charts(results, pictures, cost),
        attention=_viewer(pictures),
        name=run_name(folder),
        teacher_name=public(settings["model"]["path"]).rpartition("/")[2],
        settings=settings,
        recipe=recipe,
        results=results,
        tables={title: results[key] for key, title in tables.TABLES.items() if results.get(key)},
        rows=rows,
        verdict=tables.verdict(rows),
        closed=results.get("gap_closed", {}).get("ablation"),
        cost=cost,
        pictures=pictures,
        samples=[_sample(**sample) for sample in results.get("samples", [])],
        sources=public(results.get("data", {}).get("train", {}).get("sources", [])),
    )
    return folder / PAGE


def read_results(folder: Path) -> dict[str, Any]:
    """What a run found.

    Raises:
        FileNotFoundError: The folder is not that of a run.
    """
    file = folder / "results.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"report: {folder} holds no results.json; name the folder of a run, such as "
            "runs/quickstart"
        )
    return json.loads(file.read_text(encoding="utf-8"))


def run_name(folder: Path) -> str:
    """How a run is called: its folder."""
    return folder.resolve().name


def curves(results: Mapping[str, Any]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Histories of stage 2 and of its baselines, where they ran."""
    return {name: results[name]["history"] for name in STAGES if name in results}


def memory(config: Path) -> dict[str, Any] | None:
    """Bytes per sequence of the converted layers, from the geometry in a model's config."""
    if not config.is_file():
        return None
    stored = json.loads(config.read_text(encoding="utf-8"))
    section = LinearizeConfig.from_dict(stored["linearize_config"])
    dtype = getattr(torch, stored.get("dtype") or "float32")
    per_token = sum(
        shape["num_key_value_heads"] * (shape["qk_dim"] + shape["v_dim"]) * dtype.itemsize
        for shape in section.geometry.values()
    )
    state = sum(state_bytes(section, layer, dtype) for layer in section.layers)
    return {
        "state_bytes": state,
        "kv_bytes_per_token": per_token,
        "break_even": -(-state // per_token),
        "num_layers": len(section.layers),
        "lengths": list(LENGTHS),
        "kv_bytes": [per_token * length for length in LENGTHS],
    }


def _charts(
    results: Mapping[str, Any], pictures: Pictures | None, cost: Mapping[str, Any] | None
) -> dict[str, Charts]:
    """Every group of charts that the results have figures for."""
    measured = {title: results[key] for key, title in tables.TABLES.items() if results.get(key)}
    groups: dict[str, Charts] = {}
    if measured:
        groups["ablation"] = charts.ablation(measured)
        groups["buckets"] = charts.buckets(list(measured.values())[-1])
    if results.get("transfer", {}).get("history"):
        groups["transfer"] = charts.transfer_curves(results["transfer"]["history"])
    if stages := curves(results):
        groups["finetune"] = charts.finetune_curves(stages)
    if pictures is not None:
        groups["fidelity"] = charts.fidelity(pictures)
    if "recall" in results:
        groups["recall"] = charts.recall(results["recall"]["cells"], results["recall"]["chance"])
    if "efficiency" in results:
        groups["efficiency"] = charts.efficiency(results["efficiency"])
    if cost is not None:
        groups["memory"] = charts.memory(cost["lengths"], cost["kv_bytes"], cost["state_bytes"])
    return groups


def _viewer(pictures: Pictures | None) -> dict[str, Any] | None:
    """What the page's viewer of attention weights reads."""
    if pictures is None or pictures.student is None:
        return None
    rows = {layer: row for row, layer in enumerate(pictures.layers)}
    kl, beyond = (pictures.measures[name] for name in ("attention_kl", "beyond_window"))
    return {
        "texts": pictures.texts,
        "heads": [
            {
                "layer": layer,
                "head": head,
                "label": f"layer {layer}, head {head}: KL {kl[rows[layer], head]:.2g}, "
                f"{beyond[rows[layer], head]:.0%} beyond the window",
            }
            for layer, head in pictures.heads
        ],
        "start": max(
            range(len(pictures.heads)),
            key=lambda i: beyond[rows[pictures.heads[i][0]], pictures.heads[i][1]],
        ),
        "queries": pictures.queries.tolist(),
        "window": pictures.window,
        "sinks": pictures.sinks,
        "codes_per_decade": CODES_PER_DECADE,
        "lowest_decade": LOWEST_DECADE,
        "teacher": _bytes(pictures.teacher),
        "student": _bytes(pictures.student),
    }


def _bytes(codes: Any) -> list[list[str]]:
    """Codes [S, P, Q, T] as base64 of each [Q, T]."""
    return [[base64.b64encode(head.tobytes()).decode() for head in text] for text in codes]


def _common(one: str, other: str) -> str:
    """The beginning that two texts share."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in pairs)


def _sample(prompt: str, teacher: str, converted: str) -> dict[str, Any]:
    """Two texts, cut where the prompt ends and where they part."""
    prompt = _common(prompt, _common(teacher, converted))
    same = _common(teacher, converted)
    if same not in (teacher, converted):
        same = same[: max(same.rfind(" ") + 1, len(prompt))]  # at a word
    return {
        "prompt": prompt,
        "texts": {
            who: {"same": text[len(prompt) : len(same)], "rest": text[len(same) :]}
            for who, text in (("teacher", teacher), ("converted", converted))
        },
        "is_same": teacher == converted,
    }
