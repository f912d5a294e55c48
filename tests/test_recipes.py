"""Every file in recipes/ is complete, short, says what it is, and loads."""

import pytest
from conftest import ROOT, SHARED

from linearize.recipe import load_recipe
from linearize.sources import parse_sources

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


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


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipe_sees_beyond_its_window(file):
    recipe = load_recipe(file)
    assert recipe.data.length >= 4 * (recipe.convert.window + recipe.convert.sinks)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_data_of_a_recipe_is_there(file, monkeypatch):
    recipe = load_recipe(file)
    if recipe.data.sources == ("self",):
        return
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is missing: it holds the text of this recipe")
    monkeypatch.chdir(ROOT)
    names = [source.path for source in parse_sources(list(recipe.data.sources))]
    for name in [*names, recipe.evaluate.text]:
        assert list(ROOT.glob(name)), f"{name} matches nothing"
