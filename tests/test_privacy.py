"""What says something about a computer or its user stays at home."""

import json
from pathlib import Path

import pytest

from linearize.privacy import (
    check_private,
    clean_tokenizer,
    public_name,
    public_recipe,
    public_results,
)
from linearize.recipe import Recipe

HOME = "/" + "home/ada"  # written so that no path of a computer stands in the code


@pytest.mark.parametrize(
    ("path", "public"),
    [
        (f"{HOME}/data/books.jsonl", "books.jsonl"),
        ("../shared/data/wiki.txt", "wiki.txt"),
        ("books/*.txt", "*.txt"),
        ("~/models/tiny/", "tiny"),
        ("C:\\Users\\ada\\text.json", "text.json"),
        ("news.jsonl", "news.jsonl"),
        ("tiny-english", "tiny-english"),
        ("Salesforce/wikitext:wikitext-2-raw-v1", "Salesforce/wikitext:wikitext-2-raw-v1"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("self", "self"),
    ],
)
def test_a_path_becomes_its_name(path, public):
    assert public_name(path) == public


def test_a_folder_that_exists_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name("models/mine") == "mine"


def recipe(**settings):
    sources = [f"{HOME}/a.jsonl", {"path": "b/*.txt", "weight": None, "column": "text"}]
    model = {"path": f"{HOME}/models/base"}
    data = {"sources": sources, "max_tokens": 1000}
    given = {"model": model, "data": data, "evaluate": {"text": f"{HOME}/e.txt"}, **settings}
    return Recipe.model_validate(given | {"output": f"{HOME}/runs/x"}).model_dump(mode="json")


def test_a_recipe_keeps_everything_but_folders_and_stays_valid():
    before = recipe()
    after = public_recipe(before, "me/base")
    assert "ada" not in json.dumps(after)
    assert after["model"]["path"] == "me/base"
    assert [after["data"]["sources"][0], after["data"]["sources"][1]["path"]] == [
        "a.jsonl",
        "*.txt",
    ]
    assert after["evaluate"]["text"] == "e.txt" and after["output"] == "runs/x"
    assert after["convert"] == before["convert"] and after["transfer"] == before["transfer"]
    Recipe.model_validate(after)


def test_a_recipe_without_evaluation_or_known_base():
    after = public_recipe(recipe(evaluate=None), None)
    assert after["evaluate"] is None and after["model"]["path"] == "base"


def test_results_keep_their_numbers_and_lose_their_folders():
    description = {
        "sources": [{"name": f"{HOME}/a.jsonl", "sha256": "00"}],
        "tokenizer": f"{HOME}/models/base",
        "rows": 3,
    }
    results = {"output": f"{HOME}/runs/x", "seconds": 3.0, "data": {"train": description}}
    after = public_results(results)
    assert after == {
        "seconds": 3.0,
        "data": {
            "train": {
                "sources": [{"name": "a.jsonl", "sha256": "00"}],
                "tokenizer": "base",
                "rows": 3,
            }
        },
    }
    assert public_results({}) == {}


def test_a_tokenizer_forgets_whence_it_came(tmp_path):
    settings = {"name_or_path": HOME, "is_local": True, "model_max_length": 512}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    clean_tokenizer(tmp_path)
    kept = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert kept == {"model_max_length": 512}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "publish"
    made.mkdir()
    (made / "README.md").write_text(
        "One\nhttps://example.org/" + "home/page and/or a </s> of 1/2/3\n"
    )
    (made / "tokenizer.json").write_text(json.dumps({"vocab": {HOME: 1}}))
    return made


def test_a_clean_folder_passes(folder):
    check_private(folder, "hf_secretsecretsecretsecret")


@pytest.mark.parametrize("kind", ["home", "users", "windows", "work", "own-home"])
def test_a_path_is_found(folder, kind):
    path = {
        "home": f"{HOME}/x.txt",
        "users": HOME.replace("home", "Users"),
        "windows": "C:\\\\Users\\\\ada\\\\x",
        "work": str(folder.parent / "model"),
        "own-home": str(Path.home() / "x"),
    }[kind]
    (folder / "results.json").write_text(f'{{"a": 1,\n"text": "{path}"}}')
    with pytest.raises(ValueError, match=r"results\.json:2: .* is a path of this computer"):
        check_private(folder)


@pytest.mark.parametrize("known", [True, False])
def test_a_token_is_found_and_not_repeated(folder, known):
    token = "mysecret-of-another-shape" if known else "hf_" + "a1B2" * 8
    (folder / "sub").mkdir()
    (folder / "sub" / "recipe.yaml").write_text(f"token: {token}\n")
    with pytest.raises(ValueError, match="this line holds an access token") as found:
        check_private(folder, token if known else None)
    assert token not in str(found.value) and "recipe.yaml:1" in str(found.value)
