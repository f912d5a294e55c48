"""The docs say what is so: links, commands, code, recipes, tables, where figures come from."""

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest
import typer

import linearize
from linearize.cli import app
from linearize.conversion import REFUSED
from linearize.modeling.configuration_linearized import MIXING_RULES
from linearize.modeling.modeling_linearized import FAMILIES
from linearize.recipe import describe, load_recipe

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FIGURES = [ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "log.md"]
LATER = (  # first line of a block that needs what another command leaves behind
    "# after the quickstart",
    "# after publishing",
)


def name(path):
    return path.relative_to(ROOT).as_posix()


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def blocks(language, pages=PAGES):
    """(id, code) of every fenced block of a language."""
    found = []
    for path in pages:
        codes = re.findall(rf"^```{language}\n(.*?)^```", read(path), re.MULTILINE | re.DOTALL)
        found += [(f"{name(path)}-{i}", code) for i, code in enumerate(codes)]
    return found


def commands():
    """Every shell command of the docs as a list of words; continued lines are joined."""
    lines = "\n".join(code for _, code in blocks("bash")).replace("&&\n", "\n").splitlines()
    lines += re.findall(
        r"`((?:linearize \w+|python) [^`]+)`", "\n".join(read(path) for path in PAGES)
    )
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def first_column(path, start):
    """What stands between backticks in the first column of the section that begins at `start`."""
    section = re.split(r"^## ", read(path).partition(start)[2], flags=re.MULTILINE)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]


def anchors(text):
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_resolve(path):
    text = re.sub(r"```.*?```", "", read(path), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        goal = (path.parent / file).resolve() if file else path
        assert goal.is_file(), f"{name(path)}: {target}"
        assert not anchor or anchor in anchors(goal.read_text(encoding="utf-8")), target


PYTHON = {id: code for id, code in blocks("python") if not code.startswith(LATER)}


@pytest.mark.parametrize("code", PYTHON.values(), ids=PYTHON)
def test_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "block", "exec"), {})


OURS = {shlex.join(words): words for words in commands() if words[0] == "linearize"}


@pytest.mark.parametrize("words", OURS.values(), ids=OURS)
def test_a_linearize_command_has_these_options(words):
    group = typer.main.get_command(app)
    command = group.commands[words[1]]
    context = click.Context(group, info_name="linearize")
    arguments = words[2 : words.index(">")] if ">" in words else words[2:]
    with command.make_context(words[1], list(arguments), parent=context) as parsed:
        assert parsed.params


def test_files_that_commands_name_exist():
    words = {word for line in commands() for word in line}
    ours = {word for word in words if re.match(r"(recipes|scripts)/\w[\w.-]*$", word)}
    assert {"recipes/quickstart.yaml", "scripts/get_smollm2.py"} <= ours
    assert [word for word in sorted(ours) if not (ROOT / word).is_file()] == []


def test_ci_runs_what_the_readme_says():
    install, tests = (code for id, code in blocks("bash", [ROOT / "README.md"])[:2])
    ci = read(".ci/run")
    assert "linearize run recipes/quickstart.yaml" in install
    assert "linearize run recipes/quickstart.yaml" in ci
    assert tests.removeprefix(".venv/bin/").strip() in ci
    torch = re.search(r"pip install (.*torch==\S+ .*whl/cpu)", install).group(1)
    assert torch in ci and torch in read("CONTRIBUTING.md")
    assert re.search(r"torch==\S+", torch).group() in read("constraints.txt").split()


YAML = dict(blocks("yaml"))


@pytest.mark.parametrize("code", YAML.values(), ids=YAML)
def test_recipes_in_the_docs_are_valid(code, tmp_path):
    path = tmp_path / "block.yaml"
    path.write_text(code, encoding="utf-8")
    load_recipe(path)


def test_every_key_of_a_recipe_stands_in_the_docs_with_its_default():
    rows = [
        f"| `{key}` | {f'`{value}`' if value else ''} | {text} |" for key, value, text in describe()
    ]
    table = read("docs/recipes.md").partition("|---|---|---|\n")[2].splitlines()
    assert table == rows, "docs/recipes.md should hold:\n" + "\n".join(rows)


def test_every_family_stands_in_the_docs():
    assert first_column("docs/families.md", "| `model_type` |") == sorted(FAMILIES)
    assert f"{len(FAMILIES)} causal families" in read("README.md")


def test_every_refused_family_stands_in_the_docs():
    assert set(REFUSED) <= set(first_column("docs/families.md", "## Refused"))


def test_every_feature_map_stands_in_the_docs():
    assert first_column("docs/feature-maps.md", "| name |") == list(linearize.FEATURE_MAPS)
    assert set(re.findall(r"`(\w+)`", read("docs/papers.md"))) >= set(linearize.FEATURE_MAPS) - {
        "relu"
    }


def test_every_mixing_rule_stands_in_the_docs():
    assert tuple(first_column("docs/concepts.md", "| `mixing` |")) == MIXING_RULES


def test_every_public_name_stands_in_the_docs():
    page = read("docs/api.md")
    assert set(re.findall(r"^## linearize\.(\w+)$", page, re.MULTILINE)) == set(linearize.__all__)
    for public, path in re.findall(r"^## linearize\.(\w+)\n\n::: ([\w.]+)$", page, re.MULTILINE):
        module, _, attribute = path.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is getattr(linearize, public)
        assert getattr(linearize, public).__doc__


def test_every_module_stands_in_the_architecture():
    page = read("docs/architecture.md")
    modules = [*(ROOT / "linearize").glob("*.py"), *(ROOT / "linearize" / "modeling").glob("*.py")]
    assert [path.name for path in modules if not re.search(rf"^ +{path.name} ", page, re.M)] == []


@pytest.mark.parametrize("path", FIGURES, ids=name)
def test_a_section_with_figures_names_the_command_that_prints_them(path):
    for section in re.split(r"^##+ ", read(path), flags=re.MULTILINE)[1:]:
        if re.search(
            r"^\|.*\| *[\d.,]+ *(±[^|]*|%)? *\|", section, re.MULTILINE
        ):  # a cell with a number
            title = section.splitlines()[0]
            assert re.search(r"linearize (run|evaluate|inspect)|python scripts/", section), title


def test_agents_are_sent_to_contributing_in_one_line():
    assert read("AGENTS.md").count("\n") == 1 and "CONTRIBUTING.md" in read("AGENTS.md")
