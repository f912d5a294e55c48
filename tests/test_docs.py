"""The docs say what is so: links, commands, code, recipes, tables, where figures come from."""

import ast
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest
import typer
from families import ALL_FULL, CHUNKED, MIXED, SLIDING
from test_scripts import load

import linearize
from linearize.cli import app
from linearize.conversion import REFUSED
from linearize.modeling.configuration_linearized import MIXING_RULES
from linearize.modeling.modeling_linearized import FAMILIES
from linearize.recipe import describe, load_recipe

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FIGURES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{page}.md" for page in ("results", "log", "first-8b")),
]
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
    if words[1].startswith("--"):
        assert words[1] in {name for option in group.params for name in option.opts}
        return
    command = group.commands[words[1]]
    context = click.Context(group, info_name="linearize")
    arguments = words[2 : words.index(">")] if ">" in words else words[2:]
    if arguments == ["--help"]:
        return
    with command.make_context(words[1], list(arguments), parent=context) as parsed:
        assert parsed.params


def test_files_that_commands_name_exist():
    words = {word for line in commands() for word in line}
    ours = {word for word in words if re.match(r"(recipes|scripts)/\w[\w.-]*$", word)}
    assert {"recipes/quickstart.yaml", "scripts/get_smollm2.py"} <= ours
    files = {word: ROOT / word for word in ours}
    models = {word: file / "config.json" for word, file in files.items() if file.is_dir()}
    assert [word for word, file in sorted((files | models).items()) if not file.is_file()] == []


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


def test_notes_of_the_families_are_those_of_the_tested_configs():
    page = read("docs/families.md").partition("| `model_type` |")[2].partition("\n\n")[0]
    notes = dict(re.findall(r"^\| `(\w+)` \| ?(.*?) ?\|$", page, re.MULTILINE))
    for family, settings in ALL_FULL.items():
        kinds = MIXED.get(family, {}).get("layer_types", ())
        experts = any("experts" in key for key in settings)
        assert ("mixture of experts" in notes[family]) == experts, family
        assert ("sliding layers stay softmax" in notes[family]) == (SLIDING in kinds), family
        assert ("chunked layers stay softmax" in notes[family]) == (CHUNKED in kinds), family
        assert ("convolution layers stay" in notes[family]) == ("conv" in kinds), family


def test_every_recipe_stands_in_the_docs():
    page = read("docs/recipes.md").partition("## The recipes that come with it")[2]
    for file in (ROOT / "recipes").glob("*.yaml"):
        short = file.name.removesuffix("-centroids-w64.yaml")
        assert f"`{file.name}`" in page or f"`{short}`" in page, file.name


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


def messages():
    """Every text in the package, with `…` where a value is filled in."""
    found = set()
    for file in (ROOT / "linearize").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_every_message_of_troubleshooting_is_one_of_the_package():
    rows = re.findall(r"^\| `(.+?)` \| (.+) \| (.+) \|$", read("docs/troubleshooting.md"), re.M)
    assert len(rows) > 30 and len({message for message, *_ in rows}) == len(rows)
    known = messages()
    assert [m for m, *_ in rows if not any(m in text for text in known)] == []


class Page(HTMLParser):
    """Anchors and links of one page of the site."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        self.links |= {attrs[key] for key in ("href", "src") if attrs.get(key)}


@pytest.mark.slow
def test_the_site_builds_and_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("zensical", reason='needs pip install -e ".[docs]"')
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert {path.parent.name for path in pages} >= {
        path.stem for path in ROOT.glob("docs/[!i]*.md")
    }
    lost = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            file, _, anchor = link.partition("#")
            goal = (path.parent / file.partition("?")[0]).resolve() if file else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.is_file() or (anchor and anchor not in pages[goal].ids):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert lost == []
    assert 'id="linearize.conversion.convert"' in (site / "api" / "index.html").read_text()
    assert 'class="mermaid"' in (site / "concepts" / "index.html").read_text()


@pytest.mark.slow
def test_the_budget_in_the_docs_is_what_inspect_computes():
    page = read("docs/first-8b.md")
    script = load("update_budget")
    assert page.partition(script.BEGIN)[2].partition(script.END)[0].strip() == script.section()


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
