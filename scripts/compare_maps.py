"""Trains the new parameters of a few layers apart, with several settings, and compares them.

    python scripts/compare_maps.py --layers 18 20 -- feature_map=hedgehog feature_map=centroids \
        feature_map=centroids,feature_dim=256

Layers do not influence each other in attention transfer, so what enters them is computed once, and
a setting costs seconds. Prints the squared error of the attention output on held-out rows, divided
by the energy of the teacher's, over the positions that see linear keys; `window + sinks` is what
the exact part alone leaves. Text (not `self`), length, queries and rate are those of the recipe.
"""

import argparse
import math
import time

import torch
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from linearize import convert, loading
from linearize.data import load_data
from linearize.losses import output_energy, output_error
from linearize.modeling.attention import LinearizedHeads, transfer
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.recipe import load_recipe
from linearize.training import collate
from linearize.transfer import draw_queries, eligible, layer_loss

KEYS_PER_ROW = 512
NUMBERS = {"feature_dim": int, "window": int, "sinks": int, "seed": int}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="+", help="key=value,... on top of the recipe's convert")
    parser.add_argument("--recipe", default="recipes/smollm2-135m-centroids-w64.yaml")
    parser.add_argument("--layers", type=int, nargs="+", default=[18, 20])
    parser.add_argument("--rows", type=int, default=64, help="of training, used again and again")
    parser.add_argument("--held-out-rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    recipe = load_recipe(options.recipe, [])
    with torch.no_grad():
        train, held_out, section = capture(recipe, options)
    exact = {"window + sinks": {"linear": False}}
    names = list(exact) + options.settings
    table = Table("setting", *(f"layer {i}" for i in options.layers), "mean", "seconds")
    for name in names:
        started, errors = time.perf_counter(), []
        changes = {} if name in exact else parse(name)
        for layer in options.layers:
            heads = make(section, changes, layer)
            if name not in exact:
                fit(heads, train[layer], recipe, options)
            errors.append(error(heads, held_out[layer], **exact.get(name, {})))
        cells = [f"{e:.4f}" for e in (*errors, sum(errors) / len(errors))]
        table.add_row(name, *cells, f"{time.perf_counter() - started:.0f}")
    Console().print(table)


def parse(setting):
    """{"feature_map": "hedgehog", "feature_dim": 64} from the text of the command line."""
    pairs = (pair.split("=", 1) for pair in setting.split(","))
    return {key: NUMBERS.get(key, str)(value) for key, value in pairs}


def capture(recipe, options):
    """What enters and leaves the attention of each layer: {layer: [(qkv, out, inputs, there)]}."""
    base, tokenizer = loading.load(**recipe.model.model_dump(), device="cpu")
    data = recipe.data.model_dump(include={"sources", "length", "max_tokens", "held_out"})
    splits = load_data(data.pop("sources"), tokenizer, seed=recipe.seed, **data)
    model = convert(base, **recipe.convert.model_dump(), seed=recipe.seed)
    section = model.config.linearize_config
    exact = section["window"] + section["sinks"]
    found = []
    for split, count in ((splits.train, options.rows), (splits.held_out, options.held_out_rows)):
        layers = {i: [] for i in options.layers}
        for index in tqdm(range(min(count, len(split))), desc="teacher", unit="row"):
            batch = collate([split[index]])
            with transfer(model, recorder(layers, eligible(batch, exact))):
                inputs = {key: value for key, value in batch.items() if key != "labels"}
                model(**inputs, use_cache=False, logits_to_keep=1)
        found.append(layers)
    return *found, section


def recorder(layers, there):
    """An observer that keeps what it is told of some layers."""

    def observe(module, q, k, v, out, *, attention_mask, **inputs):
        if module.layer_idx in layers:
            kept = tuple(x.clone() for x in (q, k, v))
            layers[module.layer_idx].append((kept, out.clone(), inputs, there))

    return observe


def make(section, changes, layer):
    heads = LinearizedHeads(LinearizeConfig.from_dict({**section, **changes}), layer)
    heads.reset_parameters()
    return heads


def fit(heads, rows, recipe, options):
    """Adam with a cosine, as attention transfer does it, one row a step."""
    generator = torch.Generator().manual_seed(options.seed)
    if heads.fits_keys:
        sampled = [qkv[1][0] for qkv, *_ in rows[:16]]
        every = max(1, sampled[0].shape[1] // KEYS_PER_ROW)
        heads.fit(torch.cat([k[:, ::every] for k in sampled], 1))
    parameters = [p for p in heads.parameters() if p.requires_grad]
    if not parameters:
        return
    energy = mean_energy(rows)
    optimizer = torch.optim.AdamW(parameters, lr=recipe.transfer.learning_rate, weight_decay=0)
    warmup = max(1, round(0.03 * options.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * i / options.steps)),
    )
    for _ in range(options.steps):
        qkv, out, inputs, there = rows[torch.randint(len(rows), (), generator=generator)]
        queries, weight = draw_queries(there, recipe.transfer.num_queries, generator)
        loss = layer_loss(heads, qkv, out, queries, weight / there.sum(), energy, **inputs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def mean_energy(rows):
    total = sum(output_energy(out, there).item() for _, out, _, there in rows)
    return total / sum(int(there.sum()) for *_, there in rows)


@torch.no_grad()
def error(heads, rows, linear=True):
    """Relative squared error over all positions that see linear keys."""
    total = 0.0
    for qkv, out, inputs, there in rows:
        total += output_error(heads(*qkv, linear=linear, **inputs), out, there).item()
    return total / sum(int(there.sum()) for *_, there in rows) / mean_energy(rows)


if __name__ == "__main__":
    main()
