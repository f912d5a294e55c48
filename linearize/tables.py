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
    "swa_sinks_equal_bytes": "the same, as many bytes",
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
            cells += [size(row["state_bytes"]), _tokens(row["break_even_length"])]
            if row["softmax_heads"]:
                kept = ", ".join(map(str, row["softmax_heads"]))
                notes.append(Text(f"layer {name}: key/value heads {kept} stay softmax"))
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
        f"smaller from {_tokens(report['break_even_length'])} on"
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
    parts += [Text(said) for said in certificate(found)]
    for key, table in (("recall", recall), ("tasks", tasks), ("efficiency", efficiency)):
        if key in found:
            parts.append(table(found[key]))
    for sample in found.get("samples", []):
        for who in ("teacher", "converted"):
            parts += [Text(f"{who}:", style="bold"), Text(sample[who])]
        parts.append(Text())
    parts += [
        Text(_cost(stage, found[stage])) for stage in ("transfer", "finetune") if stage in found
    ]
    if "seconds" in found:
        where = f"Everything is in {found['output']}; report.html shows it"
        parts.append(Text(f"{found['seconds']:.0f} s in all. {where}"))
    return Group(*parts)


def ablation(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line per row of the ablation."""
    table = _table("row", "perplexity", "+-", "KL to teacher", "+-", "top-1")
    for name, row in rows.items():
        table.add_row(
            ROW_NAMES.get(name, name),
            fixed(row["perplexity"], 3),
            fixed(row["perplexity_se"], 3),
            fixed(row["kl_to_teacher"], 4),
            fixed(row["kl_to_teacher_se"], 4),
            f"{100 * row['top1_agreement']:.1f} %",
        )
    return table


def comparison(found: Mapping[str, Any]) -> RenderableType:
    """Runs side by side, and the settings in which they differ."""
    runs = _table("run", "teacher", "converted", "+-", "floor", "gap", "KL", "state")
    settings = Table("setting", *found["runs"], box=None, pad_edge=False, padding=(0, 2, 0, 0))
    settings.columns[0].no_wrap = True
    for name, run in found["runs"].items():
        teacher, converted, floor = (
            run[row] or {} for row in ("teacher", "converted", "swa_sinks")
        )
        runs.add_row(
            Text(name),
            fixed(teacher.get("perplexity"), 3),
            fixed(converted.get("perplexity"), 3),
            fixed(converted.get("perplexity_se"), 3),
            fixed(floor.get("perplexity"), 3),
            "-" if run["closed"] is None else f"{100 * run['closed']:.0f} %",
            fixed(converted.get("kl_to_teacher"), 4),
            "-" if run["state_bytes"] is None else size(run["state_bytes"]),
        )
    for key, values in found["settings"].items():
        settings.add_row(key, *(Text("-" if value is None else str(value)) for value in values))
    parts: list[RenderableType] = [runs]
    if not found["comparable"]:
        parts.append(Text("these runs did not score the same tokens the same way", style="bold"))
    return Group(*parts, Text(), settings, Text(), Text(f"Charts: {found['page']}"))


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


def certificate(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what attention weights and parity checks say, one sentence each."""
    mass = found.get("linear_mass")
    if mass and mass["layers"]:
        shares = [sum(row["linear"]) / len(row["linear"]) for row in mass["layers"].values()]
        yield (
            f"Attention weight of the linear branch beyond the window: {_percent(mass['linear'])} "
            f"(softmax attention: {_percent(mass['softmax'])}), by layer "
            f"{_percent(min(shares))} to {_percent(max(shares))}."
        )
    parity = found.get("parity")
    if parity:
        distances = ", ".join(
            f"{name.replace('_', ' ')} {check['kl']:.1e}{'' if check['agrees'] else ' (TOO FAR)'}"
            for name, check in parity["checks"].items()
        )
        said = "agree" if parity["agrees"] else "DO NOT AGREE"
        yield f"Ways of computing {said} (nats per token, {parity['dtype']}): {distances}."


def recall(found: Mapping[str, Any]) -> RenderableType:
    """One line per task, length and row; exact matches by distance."""
    edges = sorted({_edge(b) for cell in found["cells"] for b in _buckets(cell)})
    columns = ("recall", "tokens", "row", "log p", "+-", "of choices", "exact", "+-")
    table = _table(*columns, *(f"<{high:,}" for _, high in edges))
    for cell in found["cells"]:
        for name, row in cell["rows"].items():
            by_distance = {_edge(b): _percent(b["exact_match"]) for b in row["buckets"]}
            table.add_row(
                cell["task"].replace("_", "-"),
                f"{cell['length']:,}",
                ROW_NAMES.get(name, name),
                fixed(row["log_prob"], 2),
                fixed(row["log_prob_se"], 2),
                _percent(row["choice_accuracy"]),
                _percent(row["exact_match"]),
                _percent(row["exact_match_se"]),
                *(by_distance.get(edge, "") for edge in edges),
            )
    note = Text(
        f"{found['samples']} contexts per task and length; chance among {found['num_choices']} "
        f"choices: {_percent(found['chance'])}; exact matches by distance in tokens, the window "
        f"holds {found['window']}"
    )
    return Group(table, note, Text())


def _buckets(cell: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for row in cell["rows"].values():
        yield from row["buckets"]


def _edge(bucket: Mapping[str, Any]) -> tuple[int, int]:
    return bucket["from"], bucket["to"]


def tasks(found: Mapping[str, Any]) -> RenderableType:
    """One line per task and metric, a column per row."""
    rows = list(found["tasks"][0]["rows"])
    gain = "linear branch adds"
    table = _table("task", "items", "metric", *(ROW_NAMES.get(r, r) for r in rows), gain)
    for task in found["tasks"]:
        metrics = dict.fromkeys(key for row in task["rows"].values() for key in row)
        for metric in (key for key in metrics if f"{key}_se" in metrics):
            gains = task.get("linear_branch", {})
            table.add_row(
                task["task"],
                "" if task["num_items"] is None else f"{task['num_items']:,}",
                metric,
                *(_with_error(task["rows"][row], metric) for row in rows),
                _with_error(gains, metric) if metric in gains else "",
            )
    limit = "" if found["limit"] is None else f", the first {found['limit']} items of each"
    return Group(table, Text(f"lm-evaluation-harness {found['lm_eval']}{limit}"), Text())


def _with_error(values: Mapping[str, Any], name: str) -> str:
    return f"{fixed(values[name], 3)} ± {fixed(values[f'{name}_se'], 3)}"


def _percent(share: float | str | None) -> str:
    return fixed(share, 1) if not isinstance(share, int | float) else f"{100 * share:.1f} %"


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


def publication(found: Mapping[str, Any]) -> RenderableType:
    """The folder that was made, what its verification found, and where it was pushed."""
    lines = [f"{found['folder']}: {len(found['files'])} files, {size(found['bytes'])}"]
    lines += [
        f"loads {process}: largest difference of the logits {difference:.2g}"
        for process, difference in found["differences"].items()
    ]
    pushed = found["pushed"]
    if pushed is None:
        lines.append("nothing was pushed")
    else:
        place = pushed["pull_request"] or pushed["url"]
        branch = f" (branch {pushed['branch']})" if pushed["branch"] else ""
        lines.append(f"pushed to {place}{branch}, commit {pushed['commit']}")
    return Text("\n".join(lines))


def selection(found: Mapping[str, Any]) -> RenderableType:
    """The ranking, the choice step by step, and what a recipe says to convert that way."""
    start = found["before"]
    headline = Text(
        f"before: KL to the teacher {start['kl']:.4f} nats per token, recall {start['recall']:.3f} "
        f"nats per answer behind it, {size(start['cache_bytes'])} of cache at "
        f"{found['context']:,} tokens"
    )
    ranking = _table("restored alone", "score", "KL gain", "recall gain")
    for row in found["ranking"]:
        digits = ((row["score"], 3), (row["kl_gain"], 4), (row["recall_gain"], 3))
        ranking.add_row(_unit(row, found["unit"]), *(fixed(x, n) for x, n in digits))
    parts: list[RenderableType] = [headline, Text(), ranking, Text()]
    if found["chosen"]:
        chosen = _table("restored in turn", "score", "KL left", "recall left", "cache")
        for row in found["chosen"]:
            digits = ((row["score"], 3), (row["kl"], 4), (row["recall"], 3))
            cells = [fixed(x, n) for x, n in digits]
            chosen.add_row(_unit(row, found["unit"]), *cells, size(row["cache_bytes"]))
        parts += [chosen, Text(), Text(recipe_lines(found["convert"]))]
    return Group(*parts)


def recipe_lines(convert: Mapping[str, Any]) -> str:
    """The lines of a recipe's section `convert` that leave the chosen units softmax."""
    heads = ", ".join(f"{layer}: {kept}" for layer, kept in convert["softmax_heads"].items())
    lines = ["convert:", f"  layers: {convert['layers']}"]
    return "\n".join([*lines, f"  softmax_heads: {{{heads}}}"] if heads else lines)


def _unit(row: Mapping[str, Any], unit: str) -> str:
    head = f", head {row['heads'][0]}" if unit == "head" else ""
    return f"layer {row['layer']}{head}"


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


def fixed(value: float | str | None, digits: int) -> str:
    """A number with so many decimals; "inf" and a missing one as they are."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{round(value, digits) + 0.0:.{digits}f}"


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


def _tokens(length: int | None) -> str:
    return "-" if length is None else f"{length:,} tokens"


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
