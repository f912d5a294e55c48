"""The command line: help that teaches, JSON everywhere, and no traceback for a user's mistake."""

import json
import subprocess
import sys
import warnings

import pytest
from conftest import ROOT, tiny_linearized
from tinytext import save_base, save_corpus, tiny_tokenizer

from linearize import cli

COMMANDS = ("inspect", "run", "evaluate", "generate", "schema")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    tiny_linearized(sinks=2).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return save_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


@pytest.fixture
def recipe(base, corpus, tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(
        f"""
model: {{path: {base}}}
convert: {{window: 4, sinks: 2}}
data: {{sources: {corpus}, length: 32, held_out: 0.2}}
transfer: {{max_steps: 2, batch_size: 2}}
evaluate: {{length: 32}}
generate: {{prompts: [w1 w2], max_new_tokens: 3}}
output: {tmp_path / "run"}
"""
    )
    return file


@pytest.fixture
def call(capsys):
    """Runs a command; returns exit code, standard output and standard error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        return stop.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_examples(call, wide, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert f"linearize {command} " in out.partition("Examples")[2]
    assert "--json" in out


def test_help_lists_the_commands(call, wide):
    code, out, _ = call("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)
    assert "recipes/quickstart.yaml" in out


def test_python_m_linearize_is_the_same_command_line():
    command = [sys.executable, "-m", "linearize", "schema", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout)["title"] == "linearize recipe"


def test_inspect_shows_geometry_memory_and_break_even(call, wide, base):
    code, out, err = call("inspect", base, "--window", 4, "--length", 1000, "--length", 2000)
    assert (code, err) == (0, "")
    assert "2 layers convert" in out and "smaller from" in out
    assert "0-1" in out and "1,000" in out and "2,000" in out


@pytest.mark.parametrize(
    ("layers", "converted"), [("all", [0, 1]), ("every:2", [0]), ("1", [1]), ("0,1", [0, 1])]
)
def test_inspect_json_is_the_report(call, base, layers, converted):
    code, out, _ = call("inspect", base, "--window", 4, "--layers", layers, "--json")
    assert code == 0
    assert json.loads(out)["convert"]["layers"] == converted


def test_run_prints_the_table_and_then_goes_on_where_it_was(call, wide, recipe):
    code, out, _ = call("run", recipe, "--device", "cpu", "--no-progress")
    assert code == 0
    for text in ("teacher", "window + sinks, untrained", "of the gap", "transfer: 128 tokens"):
        assert text in out
    again, found, _ = call("run", recipe, "--device", "cpu", "--no-progress", "--json")
    assert again == 0
    assert set(json.loads(found)["ablation"]) >= {"teacher", "converted", "swa_sinks"}


def test_run_takes_overrides_and_a_folder(call, recipe, tmp_path):
    options = ("--output-dir", tmp_path / "other", "--no-progress", "--device", "cpu", "--json")
    code, out, _ = call("run", recipe, "convert.window=3", "transfer=null", *options)
    assert code == 0
    assert "transfer" not in json.loads(out)
    assert "window: 3" in (tmp_path / "other" / "recipe.yaml").read_text()


def test_import_of_a_checkpoint_that_is_not_there(call, base, tmp_path):
    options = ("--file", tmp_path / "maps.pt", "--model-config", tmp_path / "model.yaml")
    code, _, err = call("import-lolcats", base, tmp_path / "out", *options)
    assert code == 2
    assert "model.yaml: no such file; name the YAML file of the checkpoint" in err


def test_serve_names_a_model_that_is_not_there(call, tmp_path):
    code, _, err = call("serve", tmp_path / "gone")
    assert code == 2 and "gone" in err


def test_run_names_a_tracker_that_nobody_knows(call, recipe):
    code, _, err = call("run", recipe, "--report-to", "paper", "--device", "cpu")
    assert code == 2
    assert "report_to: paper is not supported, only" in err


def test_evaluate_a_converted_and_a_stock_model(call, wide, base, converted, corpus):
    options = ("--text", corpus, "--length", 16, "--device", "cpu", "--no-progress")
    code, out, _ = call("evaluate", converted, *options)
    assert code == 0 and "linear only" in out
    code, out, _ = call("evaluate", base, *options)
    assert code == 0 and "word perplexity" in out
    code, out, _ = call("evaluate", base, *options, "--json")
    assert code == 0 and json.loads(out)["perplexity"]["length"] == 16


def test_evaluate_efficiency(call, wide, converted):
    options = ("--context", 16, "--context", 32, "--device", "cpu")
    code, out, _ = call("evaluate", converted, "--efficiency", *options)
    assert code == 0
    assert "decode at" in out and "32 tokens" in out and "prefill of" in out


def test_generate_prints_the_text(call, wide, converted):
    code, out, _ = call("generate", converted, "w1 w2", "--max-new-tokens", 3, "--device", "cpu")
    assert code == 0 and out.startswith("w1 w2")
    code, found, _ = call("generate", converted, "w1 w2", "--max-new-tokens", 3, "--json")
    assert code == 0 and json.loads(found)["text"] == out.strip()


def test_schema_lists_every_key(call, wide):
    code, out, _ = call("schema")
    assert code == 0
    assert "convert.feature_map" in out and "hedgehog" in out


def test_a_typo_in_a_recipe_exits_2_before_anything_loads(call, recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "linearize.stages", None)  # importing it would fail
    recipe.write_text(recipe.read_text().replace("window: 4", "windw: 4"))
    code, out, err = call("run", recipe)
    assert (code, out) == (2, "")
    assert f"{recipe}:3: convert.windw: unknown key; did you mean convert.window?" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nowhere.yaml"), "recipe nowhere.yaml does not exist"),
        (("inspect", "./nowhere"), "model ./nowhere: no such folder"),
        (("evaluate", "./nowhere"), "nothing to measure; name a text"),
        (("generate", "tiny-englsh", "a"), "did you mean tiny-english?"),
        (("generate", "./nowhere", "a", "--dtype", "int8"), "model.dtype: 'int8' is not known"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, tuple) else "",
)
def test_a_mistake_is_one_message_and_exit_code_2(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err
    assert "Traceback" not in err


def test_a_mistake_in_options_exits_2_too(call, base):
    code, _, err = call("inspect", base, "--windw", 4)
    assert code == 2 and "--window" in err


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("LINEARIZE_DEBUG", "1")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        cli.main(["inspect", "./nowhere"])


def test_a_stop_by_the_user_is_no_traceback(call, recipe, monkeypatch):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("linearize.stages.run", stopped)
    code, _, err = call("run", recipe)
    assert code == 130 and "Traceback" not in err


@pytest.mark.filterwarnings("always")
def test_doubts_are_one_line_on_standard_error(call, recipe, monkeypatch):
    monkeypatch.setattr("linearize.stages.run", lambda *args, **kwargs: {})
    before = warnings.showwarning
    code, out, err = call("run", recipe, "evaluate.length=6", "--json")
    assert code == 0 and json.loads(out) == {}
    assert err.startswith("warning: evaluate.length: 6 tokens fit into")
    assert warnings.showwarning is before
