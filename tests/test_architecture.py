"""The house: who imports whom, what travels in a checkpoint, what importing costs, sizes, names."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from transformers.dynamic_module_utils import get_imports

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "linearize"
MODULES = sorted(PACKAGE.rglob("*.py"))
TRAVELS = sorted((PACKAGE / "modeling").glob("*.py"))
SOURCES = [
    *MODULES,
    *sorted((ROOT / "scripts").glob("*.py")),
    *sorted((ROOT / "tests").rglob("*.py")),
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]

LONGEST_FILE = 450
LONGEST_FUNCTION = 60
LONGEST_KERNEL = 120  # on a GPU a call costs registers, or is inlined and hides what it costs
LAZY = (
    "datasets", "jinja2", "pandas", "peft", "plotly", "pyarrow", "pydantic", "rich", "triton",
    "typer",
)  # fmt: skip
NOT_NAMES = {"base", "common", "core", "helper", "helpers", "manager", "misc", "util", "utils"}


def name(path):
    return path.relative_to(ROOT).as_posix()


def imported_packages(path):
    """Top-level names of all absolute imports of a file, inside functions too."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    from_ = [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.level == 0]
    return {module.split(".")[0] for module in (*plain, *from_)}


def third_party(packages):
    return packages - set(sys.stdlib_module_names) - {"linearize"}


def test_imports_go_one_way():
    """In a process of its own: import-linter turns off every logger that is there already."""
    code = (
        "import sys; from importlinter.cli import lint_imports;"
        f"sys.exit(lint_imports(config_filename={str(ROOT / 'pyproject.toml')!r}, no_cache=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_modeling_is_flat_and_its_siblings_are_imported_by_name():
    assert [
        name(p) for p in (PACKAGE / "modeling").iterdir() if p.is_dir() and p.name[0] != "_"
    ] == []
    names = {path.stem for path in TRAVELS}
    for path in TRAVELS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                place = f"{name(path)}:{node.lineno}"
                assert node.level == 1 and node.module in names, (
                    f"{place}: write `from .name import`"
                )


@pytest.mark.parametrize("path", TRAVELS, ids=lambda path: path.stem)
def test_code_in_a_checkpoint_needs_torch_and_transformers_only(path):
    # What transformers demands to be installed before it runs the code of a checkpoint.
    assert set(get_imports(str(path))) - set(sys.stdlib_module_names) <= {"torch", "transformers"}
    assert third_party(imported_packages(path)) <= {"torch", "transformers"}


def test_yaml_and_pydantic_stop_at_recipe():
    """Apart from the YAML files of other projects' checkpoints."""
    users = {name(path) for path in MODULES if {"pydantic", "yaml"} & imported_packages(path)}
    assert users == {"linearize/importing.py", "linearize/recipe.py", "linearize/notation.py"}


def test_the_terminal_stops_at_cli():
    users = {name(path) for path in MODULES if {"rich", "typer"} & imported_packages(path)}
    assert users <= {*(name(path) for path in PACKAGE.glob("cli/*.py")), "linearize/tables.py"}


def test_every_third_party_import_is_a_declared_dependency():
    declared = {Requirement(line).name.replace("-", "_") for line in PROJECT["dependencies"]}
    used = set().union(*(third_party(imported_packages(path)) for path in MODULES))
    needed_by_trainer = {"accelerate"}
    optional = {"lm_eval"}  # imported where it is used, by those who installed the extra
    brought_by_torch = {"triton"}  # its builds for GPUs; imported when a kernel runs
    assert (
        used - {"yaml"} - optional - brought_by_torch | {"pyyaml"} | needed_by_trainer == declared
    )
    assert {Requirement(line).name for line in PROJECT["optional-dependencies"]["eval"]} == {
        "lm-eval"
    }


def test_importing_the_package_is_light():
    code = (
        # torch's compiler, which transformers loads, imports Triton where it is installed
        "import sys, torch._dynamo, transformers; before = set(sys.modules); import linearize;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "linearize" in done.stdout.split()
    assert set(done.stdout.split()) & set(LAZY) == set()


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_files_and_functions_are_small(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            first = node.body[1 if ast.get_docstring(node) else 0]
            length = node.end_lineno - first.lineno + 1
            kernel = any("jit" in ast.unparse(mark) for mark in node.decorator_list)
            assert length <= (LONGEST_KERNEL if kernel else LONGEST_FUNCTION), (
                f"{name(path)}:{node.lineno}: {node.name}, {length} lines"
            )


def test_names_say_something():
    assert [name(p) for p in PACKAGE.rglob("*") if NOT_NAMES & set(p.stem.lower().split("_"))] == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_leftovers_in_the_code(path):
    text = path.read_text(encoding="utf-8")
    left = re.findall(r"\b(?:[T]ODO|[F]IXME|[X]XX)\b|/(?:home|root|tmp|work|Users)/", text)
    assert left == []


def test_the_tested_set_of_versions_satisfies_what_is_declared():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and line[0] != "#")
    tested = {key.lower().replace("_", "-"): Version(version) for key, version in pins.items()}
    extras = [line for name in ("test", "dev", "gguf", "eval") for line in EXTRAS[name]]
    declared = [*PROJECT["dependencies"], *extras]
    for requirement in map(Requirement, declared):
        if requirement.name != PROJECT["name"]:
            key = requirement.name.lower().replace("_", "-")
            assert tested[key] in requirement.specifier, requirement.name
