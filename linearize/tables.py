"""What the library returns, as rich tables; `cli` prints them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

UNITS = ("", "k", "M", "G", "T", "P", "E")
BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
ROW_NAMES = {
    "control": "control (window covers all)",
    "window_only": "window only",
    "linear_only": "linear only",
    "no_attention": "no attention",
    "swa_sinks": "window + sinks, untrained",
    "teacher_finetuned": "teacher, finetuned",
    "swa_sinks_finetuned": "window + sinks, finetuned",
}
TABLES = {"ablation_after_transfer": "After attention transfer", "ablation": "Result"}


def inspection(report: Mapping[str, Any]) -> RenderableType:
    """Totals, layers, and memory and operations by context length."""
    columns = ("layer", "heads", "kv", "qk dim", "v dim", "features", "new params", "state")
    layers = _table(*columns, "= KV of")
    notes = []
    for first, last, row in _runs(report["layers"]):
        name = str(first) if first == last else f"{first}-{last}"
        keys = ("num_heads", "num_key_value_heads", "qk_dim", "v_dim")
        cells = [name, *(str(row[key]) for key in keys)]
        if row["converts"]:
            cells += [str(row["num_features"]), f"{row['new_parameters']:,}"]
            cells += [size(row["state_bytes"]), f"{row['break_even_length']:,} tok"]
        else:
            cells += ["softmax"]
            notes.append(Text(f"layer {name} stays: {row['reason']}"))
        layers.add_row(*cells)
    parts = [_headline(report), Text(), layers, *notes, Text(), _by_length(report["lengths"])]
    if "training" in report:
        parts += [Text(), _training(report["training"])]
    return Group(*parts)


def _headline(report: Mapping[str, Any]) -> Text:
    model = report["model"]
    text = (
        f"{model['path'] or model['family']}: {model['family']}, "
        f"{number(model['num_parameters'])} parameters, {model['num_layers']} layers, "
        f"{model['dtype']}\n"
        f"{len(report['convert']['layers'])} layers convert: {report['new_parameters']:,} new "
        f"parameters ({100 * report['new_parameters_share']:.2f} %), "
        f"{size(report['state_bytes'])} of state per sequence instead of "
        f"{size(report['kv_bytes_per_token'])} per token; "
        f"smaller from {report['break_even_length']:,} tokens on"
    )
    return Text(text)


def _by_length(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = _table("context", "cache", "converted", "ratio", "FLOPs/token", "converted", "ratio")
    for row in rows:
        table.add_row(
            f"{row['length']:,}",
            size(row["softmax_bytes"]),
            size(row["linearized_bytes"]),
            _ratio(row["softmax_bytes"], row["linearized_bytes"]),
            number(row["softmax_flops"]),
            number(row["linearized_flops"]),
            _ratio(row["softmax_flops"], row["linearized_flops"]),
        )
    return table


def _training(found: Mapping[str, Any]) -> Table:
    """Memory and operations of the stages, one column each."""
    stages = {name: found[name] for name in ("transfer", "finetune") if name in found}
    table = _table(f"training, rows of {found['length']:,} tokens", *stages)
    parts = dict.fromkeys(part for stage in stages.values() for part in stage["memory_bytes"])
    for part in parts:
        held = (stage["memory_bytes"].get(part) for stage in stages.values())
        table.add_row(part, *("-" if value is None else size(value) for value in held))
    table.add_row("memory in all", *(size(stage["total_bytes"]) for stage in stages.values()))
    for name in ("flops_per_token", "tokens", "flops"):
        values = (stage[name] for stage in stages.values())
        label = name.replace("flops", "FLOPs").replace("_", " ")
        table.add_row(label, *("-" if value is None else number(value) for value in values))
    return table


def results(found: Mapping[str, Any]) -> RenderableType:
    """Ablation tables, samples and costs of a run, or the numbers of an evaluation."""
    parts: list[RenderableType] = []
    for key, title in TABLES.items():
        if key in found:
            parts += [Text(title, style="bold"), ablation(found[key])]
            said = verdict(found[key])
            if said is not None:
                parts.append(Text(said))
            closed = found.get("gap_closed", {}).get(key)
            if closed is not None:
                parts.append(Text(f"{100 * closed:.0f} % of the gap in log perplexity is closed"))
            parts.append(Text())
    if "perplexity" in found:
        parts.append(numbers(found["perplexity"]))
    if "efficiency" in found:
        parts.append(efficiency(found["efficiency"]))
    for sample in found.get("samples", []):
        for who in ("teacher", "converted"):
            parts += [Text(f"{who}:", style="bold"), Text(sample[who])]
        parts.append(Text())
    parts += [
        Text(_cost(stage, found[stage])) for stage in ("transfer", "finetune") if stage in found
    ]
    if "seconds" in found:
        parts.append(Text(f"{found['seconds']:.0f} s in all. Everything is in {found['output']}"))
    return Group(*parts)


def ablation(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line per row of the ablation."""
    table = _table("row", "perplexity", "+-", "KL to teacher", "+-", "top-1")
    for name, row in rows.items():
        table.add_row(
            ROW_NAMES.get(name, name),
            _fixed(row["perplexity"], 3),
            _fixed(row["perplexity_se"], 3),
            _fixed(row["kl_to_teacher"], 4),
            _fixed(row["kl_to_teacher_se"], 4),
            f"{100 * row['top1_agreement']:.1f} %",
        )
    return table


def verdict(rows: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What the table says of the linear branch, in one sentence; None without the two rows."""
    branch = rows.get("converted", {}).get("linear_branch")
    if branch is None or not branch["gain_se"]:
        return None
    gain, se = branch["gain"], branch["gain_se"]
    measured = f"{abs(gain):.3f} ± {se:.3f} nats per token ({abs(gain) / se:.0f} standard errors)"
    if abs(gain) < 2 * se:
        return f"The linear branch makes no measurable difference: {measured}."
    return f"The linear branch {'lowers' if gain > 0 else 'raises'} the loss by {measured}."


def efficiency(found: Mapping[str, Any]) -> RenderableType:
    """Time and memory of a decode step and of a prefill, by number of tokens."""
    columns = ("converted", "teacher", "speedup", "converted", "teacher")
    decode, prefill = _table("decode at", *columns), _table("prefill of", *columns)
    for table, rows, tokens, held in (
        (decode, found["decode"], "context", "cache_bytes"),
        (prefill, found["prefill"], "tokens", "peak_bytes"),
    ):
        for row in rows:
            table.add_row(
                f"{row[tokens]:,} tokens",
                f"{1000 * row['converted_s']:,.1f} ms",
                f"{1000 * row['teacher_s']:,.1f} ms",
                f"{row['speedup']:.2f}x",
                size(row[f"converted_{held}"]),
                size(row[f"teacher_{held}"]),
            )
    growth = Text(
        f"time per token at the longest context: {found['decode_growth']:.2f} times that at the "
        f"shortest; {found['dtype']}, {found['threads']} threads"
    )
    return Group(decode, growth, Text(), prefill)


def numbers(found: Mapping[str, Any]) -> Table:
    """Every number of a nested result, one line each."""
    table = _table("", "value")
    for name, value in _leaves(found):
        table.add_row(
            name.replace("_", " "), f"{value:,.6g}" if isinstance(value, float) else str(value)
        )
    return table


def keys(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Recipe keys with default and meaning."""
    table = Table("key", "default", "meaning", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def number(value: float) -> str:
    """A number in three digits and a unit of a thousand: 1.23 M."""
    return _scaled(value, UNITS, 1000)


def size(num_bytes: float) -> str:
    """Bytes in three digits and a unit of 1024: 1.5 MiB."""
    return _scaled(num_bytes, BYTES, 1024)


def _scaled(value: float, units: Iterable[str], step: int) -> str:
    *smaller, largest = units
    for unit in smaller:
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}".rstrip()
        value /= step
    return f"{value:.3g} {largest}"


def _table(*columns: str) -> Table:
    """A plain table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    return table


def _runs(
    layers: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Yields (first, last, row) of neighbouring layers that are alike."""
    run: list[Mapping[str, Any]] = []
    for row in layers:
        if run and {**run[-1], "layer": 0} != {**row, "layer": 0}:
            yield run[0]["layer"], run[-1]["layer"], run[0]
            run = []
        run.append(row)
    if run:
        yield run[0]["layer"], run[-1]["layer"], run[0]


def _cost(stage: str, metrics: Mapping[str, Any]) -> str:
    return (
        f"{stage}: {metrics['tokens']:,} tokens in {metrics['seconds']:.0f} s, "
        f"{metrics['tokens_per_s']:,.0f} tokens/s"
    )


def _fixed(value: float | str | None, digits: int) -> str:
    """A number with so many decimals; "inf" and a missing one as they are."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{round(value, digits) + 0.0:.{digits}f}"


def _ratio(before: float, after: float) -> str:
    ratio = before / after
    return f"{ratio:.1f}x" if ratio < 10 else f"{ratio:,.0f}x"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for position, item in enumerate(value):
                yield from _leaves(item, f"{prefix}{name}[{position}].")
        else:
            yield prefix + name, value
