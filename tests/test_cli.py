"""The command line: help that teaches, JSON everywhere, and no traceback for a user's mistake."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import typer
from conftest import ROOT, tiny_linearized
from sampleruns import save_run
from tinytext import save_base, save_corpus, tiny_tokenizer

from linearize import cli

COMMANDS = tuple(typer.main.get_command(cli.app).commands)
AS_COMMAND = """
import sys
sys.argv[0] = "linearize"
from linearize.cli import main
try:
    main()
finally:
    print(*sorted({"torch", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


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
    assert "--json" in out or command == "serve"  # which prints nothing of its own


def test_help_lists_the_commands(call, wide):
    code, out, _ = call("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)
    assert "recipes/quickstart.yaml" in out


def test_python_m_linearize_is_the_same_command_line():
    command = [sys.executable, "-m", "linearize", "schema", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout)["title"] == "linearize recipe"


def as_command(*arguments, **environment):
    """Runs the command in a process of its own; returns what ended and the heavy packages it had
    imported.
    """
    done = subprocess.run(
        [sys.executable, "-c", AS_COMMAND, *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip
    *messages, heavy = done.stderr.splitlines()
    return done.returncode, done.stdout, "\n".join(messages), heavy.split()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--help",), 0, "recipes/quickstart.yaml"),
        (("run", "--help"), 0, "Examples"),
        (("schema",), 0, "convert.feature_map"),
        (("run", "nowhere.yaml"), 2, "recipe nowhere.yaml does not exist"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, tuple) else "",
)
def test_what_needs_no_model_does_not_wait_for_torch(arguments, code, text):
    ended, out, messages, heavy = as_command(*arguments, COLUMNS="200")
    assert (ended, heavy) == (code, [])
    assert text in out + messages


def test_completion_knows_the_commands_and_does_not_wait_for_torch():
    wanted = {"COMP_WORDS": "linearize ", "COMP_CWORD": "1"}
    code, out, _, heavy = as_command(_LINEARIZE_COMPLETE="complete_bash", **wanted)
    assert (code, heavy) == (0, [])
    assert out.split() == list(COMMANDS)


def test_the_command_knows_converted_models(converted):
    arguments = ("w1 w2", "--max-new-tokens", 3, "--device", "cpu")
    code, out, _, heavy = as_command("generate", converted, *arguments)
    assert (code, heavy) == (0, ["torch", "transformers"])
    assert out.startswith("w1 w2")


def test_inspect_shows_geometry_memory_and_break_even(call, wide, base):
    code, out, err = call("inspect", base, "--window", 4, "--length", 1000, "--length", 2000)
    assert (code, err) == (0, "")
    assert "2 layers convert" in out and "smaller from" in out
    assert "0-1" in out and "1,000" in out and "2,000" in out


def test_inspect_of_a_recipe_shows_what_training_needs(call, wide, recipe):
    arguments = ("inspect", recipe, "finetune.max_tokens=640", "--gradient-checkpointing")
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert "training, rows of 32 tokens" in out and "memory in all" in out
    code, found, _ = call(*arguments, "--json")
    report = json.loads(found)
    assert code == 0 and report["convert"]["window"] == 4
    assert report["training"]["transfer"]["tokens"] == 2 * 2 * 32
    assert report["training"]["finetune"]["tokens"] == 640


@pytest.mark.parametrize(
    ("layers", "converted"), [("all", [0, 1]), ("every:2", [0]), ("1", [1]), ("0,1", [0, 1])]
)
def test_inspect_json_is_the_report(call, base, layers, converted):
    code, out, _ = call("inspect", base, "--window", 4, "--layers", layers, "--json")
    assert code == 0
    assert json.loads(out)["convert"]["layers"] == converted


def test_inspect_names_the_heads_that_stay(call, wide, base):
    options = ("--window", 4, "--softmax-heads", "0:0,1", "--softmax-heads", "1:1")
    code, out, _ = call("inspect", base, *options)
    assert code == 0
    assert "layer 0: key/value heads 0, 1 stay softmax" in out
    assert "layer 1: key/value heads 1 stay softmax" in out
    code, _, err = call("inspect", base, "--softmax-heads", "0")
    assert code == 2 and "'0' is not layer:head,head such as 17:0,2" in err


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


def test_select_ranks_chooses_and_saves(call, wide, converted, corpus, tmp_path):
    where = ("--text", corpus, "--length", 16, "--device", "cpu", "--no-progress")
    saved = ("--output", tmp_path / "heads.json", "--save-model", tmp_path / "hybrid")
    code, out, _ = call("select", converted, *where, "--budget", 1, "--layers", "1", *saved)
    assert code == 0
    for text in ("restored alone", "layer 1, head 0", "restored in turn", "layers: [0, 1]"):
        assert text in out
    found = json.loads((tmp_path / "heads.json").read_text())
    kept = found["convert"]["softmax_heads"]
    assert f"softmax_heads: {{1: {kept['1']}}}" in out
    config = json.loads((tmp_path / "hybrid" / "config.json").read_text())
    assert config["linearize_config"]["softmax_heads"] == kept
    code, out, _ = call("select", converted, *where, "--unit", "layer", "--json")
    assert code == 0 and len(json.loads(out)["ranking"]) == 2
    code, _, err = call("select", converted, *where, "--layers", "every:2")
    assert code == 2 and "'every:2' is not a list of layers such as 17,20" in err


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


def test_evaluate_recall(call, wide, converted):
    options = ("--context", 64, "--limit", 2, "--device", "cpu", "--no-progress")
    code, out, _ = call("evaluate", converted, "--recall", *options)
    assert code == 0
    assert "associative" in out and "key-value" in out and "window only" in out and "chance" in out
    code, out, _ = call("evaluate", converted, "--recall", *options, "--json")
    assert code == 0 and json.loads(out)["recall"]["samples"] == 2


def test_evaluate_tasks_needs_the_extra(call, converted, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, out, err = call("evaluate", converted, "--tasks", "piqa,arc_easy", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "pip install 'linearize[eval]'" in err and "Traceback" not in err


def test_generate_prints_the_text(call, wide, converted):
    code, out, _ = call("generate", converted, "w1 w2", "--max-new-tokens", 3, "--device", "cpu")
    assert code == 0 and out.startswith("w1 w2")
    code, found, _ = call("generate", converted, "w1 w2", "--max-new-tokens", 3, "--json")
    assert code == 0 and json.loads(found)["text"] == out.strip()


def test_publish_makes_a_folder(call, wide, converted, tmp_path, monkeypatch):
    found = {"with linearize": 0.0}
    monkeypatch.setattr("linearize.publishing.verify", lambda *args, **kwargs: found)
    options = ("--output", tmp_path / "out", "--license", "mit", "--language", "en", "--dry-run")
    code, out, err = call("publish", converted, *options, "--device", "cpu")
    assert code == 0, err
    assert "nothing was pushed" in out and (tmp_path / "out" / "README.md").is_file()
    again = ("publish", tmp_path / "out", "--repo-id", "me/x", "--dry-run", "--device", "cpu")
    code, out, _ = call(*again, "--json")
    assert code == 0 and json.loads(out)["differences"] == found


def test_report_and_compare_write_pages(call, wide, tmp_path):
    first = save_run(tmp_path / "first", pictures=False)
    second = save_run(tmp_path / "second", pictures=False, convert={"window": 32})
    code, out, _ = call("report", first)
    assert code == 0 and out.replace("\n", "") == str(first / "report.html")
    assert (first / "report.html").is_file()
    page = tmp_path / "c.html"
    code, out, _ = call("compare", first, second, "--page", page)
    assert code == 0 and page.is_file()
    assert "first" in out and "24.000" in out and "convert.window" in out
    assert "did not score the same" not in out
    code, out, _ = call("compare", first, second, "--page", page, "--json")
    assert code == 0 and json.loads(out)["settings"] == {"convert.window": [64, 32]}


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
        (("publish", "./nowhere"), "publish: nowhere is no folder"),
        (("publish", "./nowhere", "--repo-id", "x"), "--repo-id: 'x' has no owner"),
        (("inspect", "tiny-english", "seed=1"), "seed=1: key=value belongs to a recipe"),
        (("evaluate", "./nowhere"), "nothing to measure; name a text"),
        (("report", "nowhere"), "recipe nowhere/recipe.yaml does not exist"),
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
