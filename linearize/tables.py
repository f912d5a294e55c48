"""What the library returns, as rich tables; `cli` prints them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

UNITS = ("", "k", "M", "G", "T", "P")
ROW_NAMES = {
    "teacher": "teacher",
    "control": "control (window covers all)",
    "converted": "converted",
    "window_only": "window only",
    "linear_only": "linear only",
    "swa_sinks": "window + sinks, untrained",
    "teacher_finetuned": "teacher, finetuned",
    "swa_sinks_finetuned": "window + sinks, finetuned",
}


def inspection(report: Mapping[str, Any]) -> RenderableType:
    """Layers, totals, and memory and operations by context length."""
    model = report["model"]
    layers = _table(
        "layer", "heads", "kv", "qk dim", "v dim", "features", "new params", "state", "= KV of"
    )
    notes = []
    for first, last, row in _runs(report["layers"]):
        name = str(first) if first == last else f"{first}-{last}"
        geometry = [row["num_heads"], row["num_key_value_heads"], row["qk_dim"], row["v_dim"]]
        if row["converts"]:
            layers.add_row(
                name, *map(str, geometry), str(row["num_features"]), f"{row['new_parameters']:,}",
                size(row["state_bytes"]), f"{row['break_even_length']:,} tok",
            )  # fmt: skip
        else:
            layers.add_row(name, *map(str, geometry), "softmax", "", "", "")
            notes.append(f"layer {name} stays: {row['reason']}")
    lengths = _table(
        "context", "cache now", "converted", "ratio", "attention FLOPs/tok", "converted", "ratio"
    )
    for row in report["lengths"]:
        lengths.add_row(
            f"{row['length']:,}", size(row["softmax_bytes"]), size(row["linearized_bytes"]),
            _ratio(row["softmax_bytes"], row["linearized_bytes"]), number(row["softmax_flops"]),
            number(row["linearized_flops"]), _ratio(row["softmax_flops"], row["linearized_flops"]),
        )  # fmt: skip
    share = f"{100 * report['new_parameters_share']:.2f} %"
    head = Text(
        f"{model['path'] or model['family']}: {model['family']}, {number(model['num_parameters'])} parameters, "
        f"{model['num_layers']} layers, {model['dtype']}\n"
        f"{sum(row['converts'] for row in report['layers'])} layers convert: {report['new_parameters']:,} new "
        f"parameters ({share}), {size(report['state_bytes'])} state per sequence instead of "
        f"{size(report['kv_bytes_per_token'])} per token"
    )
    if report["break_even_length"]:
        head.append(f"; smaller from {report['break_even_length']:,} tokens on")
    return Group(head, Text(), layers, *map(Text, notes), Text(), lengths)


def results(run: Mapping[str, Any]) -> RenderableType:
    """The ablation tables of a run or an evaluation, what was closed of the gap, samples, time."""
    parts: list[RenderableType] = []
    titles = {"ablation_after_transfer": "after stage 1 (attention transfer)", "ablation": "result"}
    for key, title in titles.items():
        if key in run and not (
            key == "ablation_after_transfer" and run[key] == run.get("ablation")
        ):
            parts += [
                Text(title, style="bold"),
                ablation(run[key]),
                *_gap(run.get("gap_closed", {}).get(key)),
                Text(),
            ]
    for sample in run.get("samples", []):
        parts += [
            Text(f"> {sample['prompt']}", style="bold"),
            Text(f"teacher:   {sample['teacher']}"),
        ]
        parts += [Text(f"converted: {sample['converted']}"), Text()]
    for stage in ("transfer", "finetune"):
        if stage in run:
            metrics = run[stage]
            parts.append(
                Text(
                    f"{stage}: {metrics['tokens']:,} tokens, {metrics['seconds']:.0f} s, {metrics['tokens_per_s']:,.0f} tokens/s"
                )
            )
    if "output" in run:
        parts.append(Text(f"{run['seconds']:.0f} s in all; everything is in {run['output']}"))
    return Group(*parts)


def ablation(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line per row of the ablation."""
    table = _table("row", "perplexity", "+-", "KL to teacher", "+-", "top-1")
    for name, row in rows.items():
        table.add_row(
            ROW_NAMES.get(name, name), f"{row['perplexity']:.3f}", f"{row['perplexity_se']:.3f}",
            f"{row['kl_to_teacher']:.4f}", f"{row['kl_to_teacher_se']:.4f}", f"{100 * row['top1_agreement']:.1f} %",
        )  # fmt: skip
    return table


def perplexity(result: Mapping[str, Any]) -> Table:
    """One line per number of a plain perplexity measurement."""
    table = _table("", "value")
    for name, value in result.items():
        table.add_row(
            name.replace("_", " "), f"{value:,.4f}" if isinstance(value, float) else str(value)
        )
    return table


def flat(result: Mapping[str, Any]) -> Table:
    """Every number of a nested result, one line each."""
    table = _table("", "value")
    for name, value in _leaves(result):
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    return table


def keys(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Recipe keys with default and meaning."""
    table = Table("key", "default", "meaning", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def number(value: float) -> str:
    """A number in three digits and a unit of a thousand: 1.23 M."""
    for unit in UNITS[:-1]:
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}".rstrip()
        value /= 1000
    return f"{value:.3g} {UNITS[-1]}"


def size(num_bytes: float) -> str:
    """Bytes in a unit of 1024: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            break
        num_bytes /= 1024
    else:
        unit = "TiB"
    return (
        f"{num_bytes:.0f} B"
        if unit == "B"
        else f"{num_bytes:.{2 if num_bytes < 10 else 1}f} {unit}"
    )


def _table(*columns: str) -> Table:
    """A plain table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    return table


def _runs(layers: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Yields (first, last, row) of neighbouring layers that are alike."""
    run: list[Mapping[str, Any]] = []
    for row in layers:
        if run and {**run[-1], "layer": 0} != {**row, "layer": 0}:
            yield run[0]["layer"], run[-1]["layer"], run[0]
            run = []
        run.append(row)
    if run:
        yield run[0]["layer"], run[-1]["layer"], run[0]


def _gap(closed: float | None) -> list[Text]:
    return (
        []
        if closed is None
        else [Text(f"{100 * closed:.0f} % of the gap in log perplexity closed")]
    )


def _ratio(before: float, after: float) -> str:
    return f"{before / after:.2g}x" if after else ""


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for position, item in enumerate(value):
                yield from _leaves(item, f"{prefix}{name}[{position}].")
        else:
            yield prefix + name, value
