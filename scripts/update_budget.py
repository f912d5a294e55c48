"""Writes the table of docs/first-8b.md: memory, operations and estimated hours of an 8B conversion.

    python scripts/update_budget.py

Needs no network and loads no weights: the geometry is that of tests/configs.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from linearize.recipe import load_recipe
from linearize.stages import preview

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "first-8b.md"
RECIPE = ROOT / "recipes" / "llama-3.1-8b-centroids-w64.yaml"
CONFIG = ROOT / "tests" / "configs" / "llama-3.1-8b.json"
BEGIN, END = "<!-- budget: begin -->", "<!-- budget: end -->"
UTILISATION = 0.25  # of the peak; stated, not measured
FREE = 0.1  # of the card, for what is not counted
CARDS = {  # GiB, dense bf16 TFLOP/s with fp32 sums, as the maker's data sheets say
    "RTX 4090": (24, 165.2),
    "A100 40 GB": (40, 312.0),
    "H100 80 GB (SXM)": (80, 989.4),
}
PARTS = ("weights", "trained", "activations", "logits")


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{section()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def section():
    """Both tables, as Markdown."""
    plain, again = estimate(), estimate("transfer=null", gradient_checkpointing=True)
    columns = {
        "stage 1": plain["transfer"],
        "stage 2": plain["finetune"],
        "stage 2, checkpointing": again["finetune"],
    }
    batches = ", ".join(
        f"{getattr(load_recipe(RECIPE), name).batch_size} in stage {number}"
        for number, name in ((1, "transfer"), (2, "finetune"))
    )
    needs = (
        "`python scripts/update_budget.py`, from `linearize inspect "
        f"recipes/{RECIPE.name}`: rows of {plain['length']:,} tokens, {batches}."
    )
    hours = (
        f"Estimated hours at {UTILISATION:.0%} of the peak, and whether it fits with "
        f"{FREE:.0%} of the card left free:"
    )
    return "\n\n".join([needs, needs_table(columns), hours, cards_table(columns)])


def estimate(*overrides, gradient_checkpointing=False):
    """The budget of the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(CONFIG, Path(folder) / "config.json")
        recipe = load_recipe(RECIPE, [f"model.path={folder}", *overrides])
        return preview(recipe, gradient_checkpointing=gradient_checkpointing)["training"]


def needs_table(columns):
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for part in PARTS:
        held = (stage["memory_bytes"].get(part) for stage in columns.values())
        lines.append(f"| {part} | {' | '.join('' if b is None else gib(b) for b in held)} |")
    cells = (f"**{gib(stage['total_bytes'])}**" for stage in columns.values())
    lines.append(f"| **memory in all** | {' | '.join(cells)} |")
    cells = (f"{stage['flops_per_token'] / 1e9:.1f} G" for stage in columns.values())
    lines.append(f"| operations per token | {' | '.join(cells)} |")
    cells = (f"{stage['tokens']:,}" for stage in columns.values())
    lines.append(f"| tokens | {' | '.join(cells)} |")
    cells = (f"{stage['flops'] / 1e18:.2f} · 10¹⁸" for stage in columns.values())
    lines.append(f"| operations | {' | '.join(cells)} |")
    return "\n".join(lines)


def cards_table(columns):
    lines = [
        f"| card | peak, bf16 | {' | '.join(columns)} |",
        "|---|---:|" + "---:|" * len(columns),
    ]
    for name, (size, peak) in CARDS.items():
        cells = []
        for stage in columns.values():
            fits = stage["total_bytes"] <= (1 - FREE) * size * 2**30
            hours = stage["flops"] / (peak * 1e12 * UTILISATION) / 3600
            cells.append(f"{hours:.1f} h" if fits else "does not fit")
        lines.append(f"| {name} | {peak:,.0f} TFLOP/s | {' | '.join(cells)} |")
    return "\n".join(lines)


def gib(num_bytes):
    return f"{num_bytes / 2**30:.1f} GiB"


if __name__ == "__main__":
    main()
