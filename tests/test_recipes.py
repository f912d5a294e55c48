"""Every file in recipes/ is complete, short, says what it is, and loads.

A recipe for a model of the hub is resolved against tests/configs, which hold the geometry that the
family publishes in its config.json there; the number of parameters, which the hub shows too, checks
them.
"""

import json
import re
import shutil

import pytest
from conftest import ROOT, SHARED

from linearize.inspection import inspect
from linearize.recipe import load_recipe
from linearize.sources import READERS, parse_sources

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
CONFIGS = ROOT / "tests" / "configs"
HUB_DATA = r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}"
NOT_RUN = "Not yet run"
# Worked out by hand for W = 64, N = 4 and centroids with f = F = 2D, per converted layer:
#   new parameters  (H + G)(D + 1) f + 2H     the maps of queries and keys; beta and alpha
#   state           4 G F (D + 1) + 2 G D b (63 + 4) + 8     b bytes per number of the cache
#   cache           2 G D b per token
#         name               layers  H   G    D  b   parameters     new         state       cache
FIGURES = {
    "gpt2":            (12, 12, 12,  64, 4,   124_439_808,  2_396_448,  9_732_192,  73_728),
    "llama-3.1-8b":    (32, 32,  8, 128, 2, 8_030_261_248, 42_272_768, 42_598_656, 131_072),
    "llama-3.2-1b":    (16, 32,  8,  64, 2, 1_235_814_400,  5_325_824,  6_455_424,  32_768),
    "llama-3.2-3b":    (28, 24,  8, 128, 2, 3_212_749_824, 29_590_848, 37_273_824, 114_688),
    "mistral-7b-v0.3": (32, 32,  8, 128, 2, 7_248_023_552, 42_272_768, 42_598_656, 131_072),
    "qwen3-0.6b":      (28, 16,  8, 128, 2,   596_049_920, 22_193_024, 37_273_824, 114_688),
    "qwen3-1.7b":      (28, 16,  8, 128, 2, 1_720_574_976, 22_193_024, 37_273_824, 114_688),
    "qwen3-8b":        (36, 32,  8, 128, 2, 8_190_735_360, 47_556_864, 47_923_488, 147_456),
    "smollm2-1.7b":    (24, 32, 32,  64, 2, 1_711_376_384, 12_781_056, 38_731_968, 196_608),
    "smollm2-135m":    (30,  9,  3,  64, 2,   134_515_008,  2_995_740,  4_539_120,  23_040),
    "smollm2-360m":    (32, 15,  5,  64, 2,   361_821_120,  5_325_760,  8_069_376,  40_960),
}  # fmt: skip


def hub_recipes():
    """{name of a config: recipe file} of every recipe whose model lies on the hub."""
    found = {}
    for file in RECIPES:
        path = load_recipe(file).model.path
        if path.count("/") == 1 and not path.startswith("models/"):
            found[path.partition("/")[2].lower().removesuffix("-base")] = file
    return found


HUB = hub_recipes()


def test_there_are_recipes():
    assert {
        "quickstart.yaml",
        "smollm2-135m-centroids-w64.yaml",
        "smollm2-135m-hedgehog-w64.yaml",
        "smollm2-135m-lolcats-w64.yaml",
    } <= {file.name for file in RECIPES}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipe_loads_without_a_warning_and_is_short(file):
    recipe = load_recipe(file)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ") and f"linearize run recipes/{file.name}" in "\n".join(lines)
    assert recipe.output == f"runs/{file.stem}"


ADAPTERS = [file.with_suffix("") for file in RECIPES if file.with_suffix("").is_dir()]


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda folder: folder.name)
def test_an_adapter_is_what_its_recipe_says_and_small(folder):
    recipe = load_recipe(folder.with_name(f"{folder.name}.yaml"))
    stored = json.loads((folder / "config.json").read_text())["linearize_config"]
    section = recipe.convert.model_dump()
    for key in ("window", "sinks", "feature_map", "mixing", "k_map"):
        assert stored[key] == section[key], key
    assert stored["delta"]["base_model"] == recipe.model.path
    lora = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (lora["r"], lora["lora_alpha"]) == (recipe.finetune.rank, recipe.finetune.alpha)
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 20e6


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipe_sees_beyond_its_window(file):
    recipe = load_recipe(file)
    assert recipe.data.length >= 4 * (recipe.convert.window + recipe.convert.sinks)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_data_of_a_recipe_is_there(file, monkeypatch):
    recipe = load_recipe(file)
    if recipe.data.sources == ("self",) or file in HUB.values():
        return
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is missing: it holds the text of this recipe")
    monkeypatch.chdir(ROOT)
    names = [source.path for source in parse_sources(list(recipe.data.sources))]
    for name in [*names, recipe.evaluate.text]:
        assert list(ROOT.glob(name)), f"{name} matches nothing"


def test_what_people_convert_has_a_recipe_and_a_config():
    assert set(HUB) == set(FIGURES) == {file.stem for file in CONFIGS.glob("*.json")}


@pytest.mark.parametrize("name", HUB)
def test_a_recipe_for_the_hub_says_what_it_is(name):
    file, recipe = HUB[name], load_recipe(HUB[name])
    head = file.read_text(encoding="utf-8").partition("model:")[0]
    assert all(line.startswith("#") and len(line) <= 100 for line in head.splitlines())
    assert NOT_RUN in head or re.search(r"commit `?[0-9a-f]{7}", head), "say whether it was run"
    assert f"all {FIGURES[name][0]} layers" in head and recipe.convert.layers == "all"
    assert file.stem.endswith(f"-{recipe.convert.feature_map}-w{recipe.convert.window}")
    assert recipe.evaluate.text == "held_out"
    for source in parse_sources(list(recipe.data.sources)):
        assert re.fullmatch(HUB_DATA, source.path) and not source.path.endswith(tuple(READERS))


@pytest.mark.parametrize("name", HUB)
def test_inspect_of_a_recipe_for_the_hub_is_what_was_worked_out_by_hand(name, tmp_path):
    layers, H, G, D, b, parameters, new, state, cache = FIGURES[name]
    recipe = load_recipe(HUB[name])
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    report = inspect(tmp_path, **recipe.convert.model_dump(), dtype=recipe.model.dtype)
    shape = [report["layers"][-1][key] for key in ("num_heads", "num_key_value_heads", "qk_dim")]
    assert shape == [H, G, D] and report["convert"]["layers"] == list(range(layers))
    assert report["model"]["num_parameters"] == parameters
    assert report["new_parameters"] == new == layers * ((H + G) * (D + 1) * 2 * D + 2 * H)
    keys = 2 * G * D * b * (63 + 4)
    assert report["state_bytes"] == state == layers * (4 * G * 2 * D * (D + 1) + keys + 8)
    assert report["kv_bytes_per_token"] == cache == layers * 2 * G * D * b
    assert report["break_even_length"] == -(-state // cache)
