"""Writes the tables of docs/results.md and README.md from the results of finished runs.

    python scripts/update_results.py quickstart runs/quickstart
    python scripts/update_results.py smollm2 runs/smollm2-135m-centroids-w64
    linearize evaluate runs/smollm2-135m-centroids-w64/model --efficiency --json > runs/speed.json
    python scripts/update_results.py efficiency runs/speed.json

A table stands between two marks, `<!-- NAME: begin -->` and `<!-- NAME: end -->`; everything
between them is replaced.
"""

import argparse
import json
import re
from datetime import date
from pathlib import Path

from linearize import loading
from linearize.tables import verdict

ROOT = Path(__file__).parent.parent
MODELS = ("converted", "teacher")
COMMANDS = {
    "quickstart": "linearize run recipes/quickstart.yaml",
    "smollm2": "linearize run recipes/smollm2-135m-centroids-w64.yaml",
    "smollm2-hedgehog": "linearize run recipes/smollm2-135m-hedgehog-w64.yaml",
    "efficiency": "linearize evaluate runs/smollm2-135m-centroids-w64/model --efficiency",
}
STAGES = {
    "ablation_after_transfer": "After stage 1 (attention transfer)",
    "ablation": "Result",
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", choices=list(COMMANDS))
    parser.add_argument(
        "source", type=Path, help="a run directory, or the JSON of an efficiency measurement"
    )
    options = parser.parse_args()
    if options.section == "efficiency":
        text = f"`{COMMANDS[options.section]}`\n\n" + efficiency_section(
            json.loads(options.source.read_text())["efficiency"]
        )
        replace(ROOT / "docs" / "results.md", options.section, text)
        return
    results = json.loads((options.source / "results.json").read_text())
    recipe = (options.source / "recipe.yaml").read_text()
    results["evaluation_text"] = re.search(r"^  text: (.*)$", recipe, re.MULTILINE).group(1)
    text = f"`{COMMANDS[options.section]}`\n\n{run_section(results)}"
    replace(ROOT / "docs" / "results.md", options.section, text)
    if options.section == "smollm2":
        replace(ROOT / "README.md", "results", readme_section(results))


def replace(path, name, text):
    """Puts `text` between the marks of `name`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = path.read_text()
    new, count = re.subn(
        f"{begin}.*?{end}", lambda _: f"{begin}\n{text.strip()}\n{end}", old, flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(
            f"{path}: expected the marks {begin} ... {end} once, found them {count} times"
        )
    path.write_text(new)


def run_section(results):
    """Everything worth knowing of a run, as Markdown."""
    parts = [provenance(results), protocol(results)]
    for key, title in STAGES.items():
        if key in results:
            parts += [f"**{title}**" + closed(results, key), ablation_table(results[key])]
            parts += filter(None, [verdict(results[key])])
    if "ablation" in results:
        parts += [
            "**By position in the window of text** (perplexity of the result)",
            bucket_table(results["ablation"]),
        ]
    parts.append(cost_table(results))
    parts += [sample_text(sample) for sample in results["samples"]]
    return "\n\n".join(parts)


def readme_section(results):
    """The table of the README: perplexity, divergence and agreement of the result."""
    title = "SmolLM2-135M-Instruct, every layer converted, W = 64, 4 sinks"
    return "\n\n".join(
        [
            title + closed(results, "ablation") + ". " + protocol(results),
            ablation_table(results["ablation"]),
            f"`{COMMANDS['smollm2']}`. {provenance(results)} More: [results](docs/results.md).",
        ]
    )


def protocol(results):
    """What was scored."""
    row = results["ablation"]["teacher"]
    text = Path(results["evaluation_text"]).name if "evaluation_text" in results else "the text"
    return (
        f"Scored: the first {row['num_tokens']:,} tokens of {text}, in windows of "
        f"{row['length']:,} with stride {row['stride']:,}, BOS {row['bos']}."
    )


def closed(results, key):
    share = results.get("gap_closed", {}).get(key)
    return "" if share is None else f": {share:.0%} of the gap in log perplexity closed"


def provenance(results):
    versions = results["versions"]
    return (
        f"{date.today().isoformat()}, {results['hardware']}, torch {versions['torch']}, "
        "transformers "
        f"{versions['transformers']}, commit `{results['commit'][:12]}`. The resolved recipe lies "
        "beside the results."
    )


def ablation_table(rows):
    lines = [
        "| row | perplexity | KL to teacher (nats) | top-1 agreement |",
        "|---|---:|---:|---:|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| `{name}` | {plus_minus(row, 'perplexity', 2)} | "
            f"{plus_minus(row, 'kl_to_teacher', 4)} | "
            f"{row['top1_agreement']:.1%} |"
        )
    return "\n".join(lines)


def plus_minus(row, key, digits):
    value, error = row[key], row[f"{key}_se"]
    if isinstance(value, str):
        return value
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def bucket_table(rows):
    names = [f"{b['from']}-{b['to']}" for b in rows["teacher"]["buckets"]]
    lines = ["| row | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for name, row in rows.items():
        cells = [
            f"{b['perplexity']:.2f}" if not isinstance(b["perplexity"], str) else b["perplexity"]
            for b in row["buckets"]
        ]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost_table(results):
    lines = ["| step | tokens | minutes |", "|---|---:|---:|"]
    for step, seconds in results["seconds_by_step"].items():
        tokens = (
            results[step]["tokens"]
            if isinstance(results.get(step), dict) and "tokens" in results[step]
            else None
        )
        lines.append(
            f"| {step.replace('_', ' ')} | {'' if tokens is None else f'{tokens:,}'} | "
            f"{seconds / 60:.1f} |"
        )
    return "\n".join(lines)


def sample_text(sample):
    quote = "\n".join(f"> {line}" for line in sample["converted"].splitlines())
    return f'Greedy text of the result, prompt "{sample["prompt"]}":\n\n{quote}'


def efficiency_section(measured):
    """Decode and prefill against the teacher, measured here and now."""
    step, here = measured["transfer_step"], loading.provenance()
    how = (
        f"{date.today().isoformat()}, {here['hardware']}, commit `{here['commit'][:12]}`, "
        f"{measured['dtype']}, {measured['threads']} threads, batch 1; "
        "the fastest of several rounds, both models in turn in one process: read the ratios."
    )
    growth = (
        "A step at the longest context takes "
        f"{measured['decode_growth']:.2f} times as long as one at the shortest."
    )
    transfer = (
        f"One step of attention transfer at {step['tokens']:,} tokens takes {step['ratio']:.2f} "
        f"times as long as the teacher's forward pass ({step['step_s']:.2f} s against "
        f"{step['teacher_s']:.2f} s)."
    )
    decode, prefill = decode_table(measured["decode"]), prefill_table(measured["prefill"])
    return "\n\n".join([how, decode, growth, prefill, transfer])


def decode_table(rows):
    head = ("tokens in the cache", "decode step", "softmax, default cache", "ratio", "cache")
    return side_by_side(
        head, rows, "context", lambda s: f"{s * 1e3:.1f} ms", "cache_bytes", mebibyte_digits=1
    )


def prefill_table(rows):
    head = ("prompt", "prefill", "softmax", "ratio", "memory")
    return side_by_side(
        head, rows, "tokens", lambda s: f"{s:.2f} s", "peak_bytes", mebibyte_digits=0
    )


def side_by_side(head, rows, length, seconds, size, *, mebibyte_digits):
    """Time and bytes of both models by length; the last column is the softmax model's bytes."""
    lines = [f"| {' | '.join(head)} | softmax |", "|" + "---:|" * (len(head) + 1)]
    for row in rows:
        cells = [f"{row[length]:,}", *(seconds(row[f"{m}_s"]) for m in MODELS)]
        cells += [f"{row['speedup']:.2f}"]
        cells += [f"{row[f'{m}_{size}'] / 2**20:.{mebibyte_digits}f} MiB" for m in MODELS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
