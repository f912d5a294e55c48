"""Runs attention transfer of a few layers under several settings, and compares them.

    python scripts/compare_settings.py --layers 18 20 -- feature_map=hedgehog \
        window=32,sinks=0 loss=both,learning_rate=3e-3
    python scripts/compare_settings.py --design-space --seeds 0 1 --json design.json

A setting is key=value,... of the recipe's sections `convert` and `transfer`, on top of the recipe;
an empty one is the recipe itself. Layers do not influence each other in attention transfer, so what
enters or leaves them in the teacher is recorded once, and each setting is the stage itself on these
recordings: the same tokens, in minutes. Text (not `self`) and length are those of the recipe.

On held-out rows, over the positions beyond the largest window + sinks of all settings: the squared
error of the attention output by layer and on average, divided by the energy of the teacher's;
`linear only`, the same without the window branch; `KL` of the attention weights on 64 queries per
row; `state`, numbers per layer. `window 64, sinks 4` is what an exact part alone leaves.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm.auto import tqdm
from transformers.utils import logging

from linearize import convert, loading
from linearize.data import load_data
from linearize.losses import attention_kl, output_energy, output_error, teacher_log_weights
from linearize.modeling.attention import LinearizedHeads, transfer
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.queries import draw_queries, eligible
from linearize.recipe import ConvertSection, load_recipe
from linearize.training import collate
from linearize.transfer import transfer_attention

NOT_HEADS = ("layers", "softmax_heads")  # of `convert`: what is recorded decides it
KL_QUERIES = 64


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="key=value,... on top of the recipe")
    parser.add_argument("--design-space", action="store_true", help="the settings of the table")
    parser.add_argument("--recipe", default="recipes/smollm2-135m-centroids-w64.yaml")
    parser.add_argument("--layers", type=int, nargs="+", default=[5, 18, 20])
    parser.add_argument("--rows", type=int, default=64, help="of training, used again and again")
    parser.add_argument("--held-out-rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300_000, help="that each setting sees")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    logging.set_verbosity_error()
    with torch.no_grad():
        train, held_out, section = capture(load_recipe(options.recipe, []), options)
    settings = options.settings
    if options.design_space:
        head_dim = section["geometry"][str(options.layers[0])]["qk_dim"]
        settings = [*design_space(head_dim), *settings]
    recipes = {name: recipe_for(options.recipe, name) for name in dict.fromkeys(settings)}
    if not recipes:
        parser.error("no setting: name at least one, or use --design-space")
    exact = max(recipe.convert.window + recipe.convert.sinks for recipe in recipes.values())
    results = floors(recipes.values(), held_out, section, options, exact)
    for name, recipe in tqdm(recipes.items(), desc="settings", unit="setting"):
        started, runs = time.perf_counter(), []
        for seed in options.seeds:
            model = Recorded(train, make(section, recipe, options.layers, seed))
            train_layers(model, train, recipe, options, seed)
            runs.append(measure(model, held_out, exact))
        results.append(summary(name or "(recipe)", runs, time.perf_counter() - started))
        if options.json:
            options.json.write_text(json.dumps(described(options, results), indent=1))
    Console(width=None if Console().is_terminal else 160).print(table(results, options))


def design_space(D):
    """The settings of the table: one change at a time, and those that belong together."""
    hedgehog = "feature_map=hedgehog"
    return [
        "", "mixing=kernel", "mixing=lolcats", "k_map=q_head", "mixing_start=beta_alpha",
        hedgehog, f"{hedgehog},mixing=lolcats", f"{hedgehog},k_map=q_head",
        f"{hedgehog},mixing_start=beta", f"{hedgehog},mixing_start=beta_alpha",
        f"{hedgehog},feature_dim={D // 2}", f"{hedgehog},feature_dim={2 * D}",
        f"{hedgehog},feature_dim={D // 2},mixing=lolcats,k_map=q_head,sinks=0",
        "feature_map=hedgehog_norm", "feature_map=hedgehog_exp",
        "feature_map=hedgehog_exp,mixing=kernel",
        "feature_map=hedgehog_exp,mixing=kernel,mixing_start=beta",
        "feature_map=hedgehog_exp,mixing_start=beta_alpha",
        f"feature_dim={D // 2}", f"feature_dim={D}", f"feature_dim={4 * D}",
        "window=32", "window=128", "sinks=0",
        "loss=attention", "loss=both", "loss=both,attention_weight=1",
        "learning_rate=1e-3", "learning_rate=3e-3", "learning_rate=3e-2",
        "window_dropout=0.5", "window_dropout=0.9",
        "position_weights=buckets", "position_weights=distance",
    ]  # fmt: skip


def recipe_for(path, setting):
    """The recipe with a setting on top; keys of `convert` and `transfer` need no section."""
    pairs = [pair for pair in setting.split(",") if pair]
    sections = ("convert" if p.split("=")[0] in ConvertSection.model_fields else "transfer"
                for p in pairs)  # fmt: skip
    return load_recipe(path, [f"{s}.{pair}" for s, pair in zip(sections, pairs)])


# ----------------------------------------------------------------------------------- the recordings
def capture(recipe, options):
    """(train, held out, config section): what enters and leaves the layers, row by row."""
    base, tokenizer = loading.load(**recipe.model.model_dump(), device="cpu")
    data = recipe.data.model_dump(include={"sources", "length", "max_tokens", "held_out"})
    splits = load_data(data.pop("sources"), tokenizer, seed=recipe.seed, **data)
    settings = recipe.convert.model_dump() | {"layers": options.layers}
    model = convert(base, **settings, seed=recipe.seed)
    found = []
    for split, count in ((splits.train, options.rows), (splits.held_out, options.held_out_rows)):
        rows = Recordings(split, count)
        for row in tqdm(rows, desc="teacher", unit="row"):
            layers, batch = {}, collate([row])

            def observe(module, q, k, v, out, *, attention_mask, layers=layers, **inputs):
                tensors = tuple(x.clone() for x in (q, k, v, out))
                layers[module.layer_idx] = tensors, inputs

            with transfer(model, observe):
                inputs = {key: value for key, value in batch.items() if key != "labels"}
                model(**inputs, use_cache=False, logits_to_keep=1)
            rows.layers.append(layers)
        found.append(rows)
    return *found, model.config.linearize_config


class Recordings(torch.utils.data.Dataset):
    """The first rows of a split, and {layer: ((q, k, v, out), inputs)} for each."""

    def __init__(self, split, count):
        self.rows = [split[i] for i in range(min(count, len(split)))]
        self.layers, self.length = [], split.length
        self.description = {"sha256": split.description["sha256"], "rows": len(self.rows)}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def place(self, input_ids):
        """Index of a row of tokens."""
        return next(i for i, r in enumerate(self.rows) if torch.equal(r["input_ids"], input_ids))


class RecordedLayer(nn.Module):
    """Stands for one attention module of a converted model."""

    is_linearized_attention = True
    linearize_mode, linearize_observer = "transfer", None

    def __init__(self, heads, layer_idx):
        super().__init__()
        self.linearized, self.layer_idx = heads, layer_idx
        self.linearize_heads = tuple(range(heads.num_kv_heads))


class Recorded(nn.Module):
    """Stands for a converted model: tells the observers of its layers what was recorded."""

    def __init__(self, recordings, made):
        super().__init__()
        section, heads = made
        self.recordings, self.device = recordings, torch.device("cpu")
        self.config = SimpleNamespace(linearize_config=section, use_cache=False)
        self.layers = nn.ModuleList(RecordedLayer(h, i) for i, h in heads.items())

    def forward(self, input_ids, **options):
        rows = [self.recordings.layers[self.recordings.place(ids)] for ids in input_ids]
        for layer in self.layers:
            found = [row[layer.layer_idx] for row in rows]
            tensors = (torch.cat(x) for x in zip(*(tensors for tensors, _ in found)))
            inputs = {**found[0][1], "documents": joined([x["documents"] for _, x in found])}
            layer.linearize_observer(layer, *tensors, attention_mask=None, **inputs)


def joined(documents):
    """documents [B, T] of rows that are one document each (None) or several."""
    given = [x for x in documents if x is not None]
    if not given:
        return None
    return torch.cat([torch.zeros_like(given[0]) if x is None else x for x in documents])


# ------------------------------------------------------------------------------- train and measure
def make(section, recipe, layers, seed):
    """(config section, {layer: its new parameters}) of a setting."""
    changes = recipe.convert.model_dump(exclude=set(NOT_HEADS)) | {"seed": seed}
    config = LinearizeConfig.from_dict({**section, **changes})
    heads = {i: LinearizedHeads(config, i) for i in layers}
    for module in heads.values():
        module.reset_parameters()
    return config.to_dict(), heads


def train_layers(model, rows, recipe, options, seed):
    """Stage 1 on recorded rows."""
    if not any(p.requires_grad for p in model.parameters()):
        return
    settings = recipe.transfer.model_dump() | {"max_tokens": options.tokens, "max_steps": None}
    with tempfile.TemporaryDirectory() as folder:
        transfer_attention(
            model, rows, output_dir=folder, seed=seed, progress=False, logging_steps=1000,
            **settings,
        )  # fmt: skip


@torch.no_grad()
def measure(model, rows, exact, *, linear=True):
    """{layer: {"error", "linear_only", "kl"}} on recorded rows, and "state"."""
    results = {}
    for layer in model.layers:
        heads, sums = layer.linearized, dict.fromkeys(("error", "linear_only", "kl"), 0.0)
        energy = count = 0.0
        for row, layers in zip(rows, rows.layers, strict=True):
            (q, k, v, out), inputs = layers[layer.layer_idx]
            there = eligible(collate([row]), exact)
            energy += output_energy(out, there).item()
            count += int(there.sum())
            sums["error"] += output_error(heads(q, k, v, linear=linear, **inputs), out, there)
            if linear:
                sums["linear_only"] += output_error(
                    heads(q, k, v, window=False, **inputs), out, there
                )
            queries, weight = draw_queries(there, KL_QUERIES, torch.Generator().manual_seed(0))
            chosen = heads(q, k, v, queries=queries, weights=True, linear=linear, **inputs)
            target = teacher_log_weights(q, k, queries, **inputs)
            sums["kl"] += attention_kl(target, chosen.log_weights, weight)
        scale = {"error": energy, "linear_only": energy, "kl": count}
        results[layer.layer_idx] = {name: float(x) / scale[name] for name, x in sums.items()}
        v_dim = layers[layer.layer_idx][0][2].shape[-1]
        state = heads.state_heads * heads.feature_map_k.num_features * (v_dim + 1)
        results[layer.layer_idx]["state"] = state
    return results


def floors(recipes, held_out, section, options, exact):
    """Rows of what windows and sinks alone leave."""
    found = {}
    for recipe in recipes:
        name = f"window {recipe.convert.window}, sinks {recipe.convert.sinks}"
        if name not in found:
            model = Recorded(held_out, make(section, recipe, options.layers, 0))
            found[name] = summary(name, [measure(model, held_out, exact, linear=False)], 0.0)
            found[name] |= {"linear_only": None, "state": 0}
    return list(found.values())


def summary(name, runs, seconds):
    """One row: means over seeds and layers, and the half range over seeds."""

    def mean(key, layers):
        values = [sum(run[i][key] for i in layers) / len(layers) for run in runs]
        return sum(values) / len(values), (max(values) - min(values)) / 2

    layers = list(runs[0])
    error, spread = mean("error", layers)
    row = {"setting": name, "layers": {i: mean("error", [i])[0] for i in layers}}
    row |= {"error": error, "spread": spread, "state": runs[0][layers[0]]["state"]}
    row |= {key: mean(key, layers)[0] for key in ("linear_only", "kl")}
    return row | {"seconds": round(seconds)}


def described(options, results):
    """What is written as JSON."""
    settings = {k: v for k, v in vars(options).items() if k not in ("json", "settings")}
    return {"options": settings, **loading.provenance(), "results": results}


def table(results, options):
    columns = (f"layer {i}" for i in options.layers)
    shown = Table("setting", *columns, "mean", "linear only", "KL", "state", "seconds")
    for row in results:
        spread = f" ± {row['spread']:.4f}" if len(options.seeds) > 1 and row["seconds"] else ""
        only = "" if row["linear_only"] is None else f"{row['linear_only']:.3f}"
        shown.add_row(
            row["setting"], *(f"{x:.4f}" for x in row["layers"].values()),
            f"{row['error']:.4f}{spread}", only, f"{row['kl']:.3f}", f"{row['state']:,}",
            str(row["seconds"]),
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    main()
