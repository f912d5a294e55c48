"""Publishing: the folder, its verification, what travels in it, and loading it back from a hub."""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, random_ids, tiny_linearized
from fakehub import TOKEN, FakeHub
from huggingface_hub import ModelCard
from test_stages import FINETUNE, recipe_for
from tinytext import save_base, save_corpus, tiny_tokenizer
from transformers import AutoModelForCausalLM

from linearize import publishing
from linearize.card import PLACEHOLDER
from linearize.publishing import find, publish
from linearize.recipe import load_recipe
from linearize.stages import run

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:.*base_model_name_or_path.*:UserWarning",
    "ignore:the licence of the base model is unknown:UserWarning",
)
CODE = {path.name for path in (ROOT / "linearize" / "modeling").glob("*.py")} - {"__init__.py"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model with a card that names its licence."""
    folder = save_base(tmp_path_factory.mktemp("private") / "base")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# Base\n")
    return folder


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    """The folder of a finished run with LoRA."""
    folder = tmp_path_factory.mktemp("private") / "my-run"
    corpus = save_corpus(base.parent / "text.jsonl")
    finetune = FINETUNE | {"baselines": False}
    run(recipe_for(base, corpus, folder, finetune=finetune), device="cpu", progress=False)
    return folder


@pytest.fixture(scope="module")
def published(finished):
    """What publishing the run returned, after a real verification."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return publish(finished, base_model="me/base", max_shard_size="20KB", device="cpu")


@pytest.fixture
def trusting(monkeypatch):
    """Verification is left out: it has tests of its own."""
    monkeypatch.setattr(publishing, "verify", lambda *args, **kwargs: {"without linearize": 0.0})


@pytest.fixture
def converted(tmp_path):
    """A model without a run."""
    folder = tmp_path / "model-alone"
    tiny_linearized(sinks=2).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def contents(folder):
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in Path(folder).rglob("*.*")}


def test_the_folder_holds_all_that_is_needed(finished, published):
    folder = finished / "publish"
    assert published["folder"] == str(folder) and published["pushed"] is None
    names = {path.name for path in folder.iterdir()}
    assert published["files"] == sorted(names)
    others = {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "recipe.yaml", "results.json", "README.md", "LICENSE", "model.safetensors.index.json",
    }  # fmt: skip
    shards = {name for name in names if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)}
    assert names == CODE | others | shards and len(shards) > 1
    assert published["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert not folder.with_name("publish-unfinished").exists()


def test_it_answers_the_same_in_both_fresh_processes(published):
    assert published["differences"] == {"without linearize": 0.0, "with linearize": 0.0}


def test_config_names_the_code_and_recipe_and_results_are_the_runs(finished, published):
    folder = Path(published["folder"])
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"].endswith("LinearizedLlamaForCausalLM")
    assert config["use_cache"] is True
    mine, its = load_recipe(finished / "recipe.yaml"), load_recipe(folder / "recipe.yaml")
    assert (its.convert, its.transfer, its.finetune) == (mine.convert, mine.transfer, mine.finetune)
    assert its.model.path == "me/base" and its.data.sources == ("text.jsonl",)
    results = json.loads((folder / "results.json").read_text())
    assert results["ablation"] == json.loads((finished / "results.json").read_text())["ablation"]


def test_nothing_says_where_it_was_made_by_whom_or_with_which_token(base, finished, published):
    private = {str(base.parent), str(finished.parent), str(Path.home()), os.getcwd(), TOKEN}
    private |= {socket.gethostname(), str(base.parent.parent)}
    if getpass.getuser() not in ("root", "user"):  # words that a text may hold
        private.add(getpass.getuser())
    for name, content in contents(published["folder"]).items():
        for text in private:
            assert text.encode() not in content, (name, text)
        if not name.endswith((".py", ".safetensors", "tokenizer.json")):
            found = re.search(rb"""["'\s(](/[\w.-]+){2,}""", content)
            assert found is None, (name, found)


def test_the_card_is_that_of_the_run(published):
    card = ModelCard.load(Path(published["folder"]) / "README.md")
    assert (card.data.base_model, card.data.license, card.data.language) == (
        "me/base", "apache-2.0", ["en"],
    )  # fmt: skip
    assert card.data.eval_results[0].metric_type == "perplexity"
    assert "# my-run" in card.text and PLACEHOLDER in card.text


def test_it_comes_back_from_a_hub_by_its_name(published, tmp_path):
    """The card's own lines, in a process that cannot import linearize, with HF_ENDPOINT."""
    text = (Path(published["folder"]) / "README.md").read_text()
    lines = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    assert len(lines.splitlines()) == 5
    code = "import sys; sys.modules['linearize'] = None\n" + lines.replace(PLACEHOLDER, "me/x")
    code += "print(type(model).__module__.partition('.')[0])"
    with FakeHub() as hub:
        hub.add("me/x", **contents(published["folder"]))
        environment = dict(os.environ, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1")
        environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "PYTHONWARNINGS": "ignore"}
        environment |= {"HF_HUB_ETAG_TIMEOUT": "300", "HF_HUB_DOWNLOAD_TIMEOUT": "300"}
        command = [sys.executable, "-c", code.replace("Once upon a time", "w1 w2")]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path
        )
    assert done.returncode == 0, done.stderr
    text, module = done.stdout.strip().splitlines()
    assert "w1 w2" in text and module == "transformers_modules"
    assert TOKEN not in done.stdout + done.stderr


def test_publishing_again_replaces_the_folder(finished, published, trusting):
    folder = finished / "publish"
    before = contents(folder)
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"old")
    publish(finished, base_model="me/base", max_shard_size="20KB", device="cpu")
    assert contents(folder) == before


def test_a_folder_made_before_is_pushed_as_it_is_with_its_card(published, tmp_path, trusting):
    folder = shutil.copytree(published["folder"], tmp_path / "edited")
    card = folder / "README.md"
    card.write_text(card.read_text().replace("## Limits", "## My own words\n\n## Limits"))
    found = publish(folder, repo_id="me/x", dry_run=True, device="cpu")
    assert found["folder"] == str(folder) and found["pushed"] is None
    text = card.read_text()
    assert "## My own words" in text and "me/x" in text and PLACEHOLDER not in text
    card.write_text(text.replace("license: apache-2.0", "license: My Own"))
    with pytest.raises(ValueError, match="--license: 'My Own' is no identifier"):
        publish(folder, repo_id="me/x", dry_run=True, device="cpu")


def test_push_gets_what_was_asked(published, tmp_path, trusting, monkeypatch):
    folder, calls = shutil.copytree(published["folder"], tmp_path / "x"), []
    monkeypatch.setattr(publishing.hub, "sign_in", lambda: calls.append("signed in"))
    monkeypatch.setattr(
        publishing.hub, "push", lambda *a, **k: calls.append((*a, k)) or {"url": "u"}
    )
    found = publish(folder, repo_id="me/x", branch="b", private=False, device="cpu")
    options = {"private": False, "branch": "b", "pull_request": False}
    assert calls == ["signed in", (folder, "me/x", options)] and found["pushed"] == {"url": "u"}


def test_a_model_without_a_run(converted, trusting):
    with pytest.warns(UserWarning, match="the licence of the base model is unknown"):
        found = publish(converted, device="cpu")
    folder = converted.with_name("model-alone-publish")
    assert found["folder"] == str(folder)
    assert not {"recipe.yaml", "results.json"} & {path.name for path in folder.iterdir()}
    assert "Nothing was measured" in (folder / "README.md").read_text()
    ids = random_ids(1, 30)
    with torch.no_grad():
        mine, its = (
            AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (converted, folder)
        )
    assert torch.equal(mine, its)


def test_what_the_user_says_goes_before_what_is_found(finished, tmp_path, trusting):
    output = tmp_path / "out"
    options = dict(license="mit", languages=["de", "fr"], repo_id="me/named", dry_run=True)
    publish(finished, output=output, device="cpu", **options)
    data = ModelCard.load(output / "README.md").data
    assert (data.license, data.language, data.base_model) == ("mit", ["de", "fr"], None)
    assert "# named" in (output / "README.md").read_text()


def test_the_model_folder_of_a_run_is_the_run(finished):
    assert find(finished / "model") == find(finished)


# ------------------------------------------------------------------------------------- adapters
def test_an_adapter_is_verified_on_its_base_and_names_it_by_its_public_name(
    finished, base, tmp_path, monkeypatch
):
    ids, seen = random_ids(2, 30), {}

    def compare(folder, expected, *args, without_package, **kwargs):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            seen["logits"] = loaded(ids).logits
        assert not without_package
        delta = json.loads((folder / "config.json").read_text())["linearize_config"]["delta"]
        assert Path(delta["base_model"]) == base.resolve()  # a fresh process is elsewhere
        return {"with linearize": 0.0}

    monkeypatch.setattr(publishing, "verify", compare)
    monkeypatch.chdir(base.parent)  # where the base model has a relative path
    copy, output = shutil.copytree(finished, tmp_path / "copy"), tmp_path / "adapter"
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text())
    recipe["model"]["path"] = f"./{base.name}"
    (copy / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    publish(copy, output=output, adapter_only=True, base_model="me/base", device="cpu")
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(finished / "model")(ids).logits
    torch.testing.assert_close(seen["logits"], whole, atol=1e-5, rtol=1e-5)
    config = json.loads((output / "config.json").read_text())
    assert config["linearize_config"]["delta"]["base_model"] == "me/base"
    assert config["linearize_config"]["delta"]["lora"]
    assert not list(output.glob("*.safetensors")) and len(list(output.rglob("*.safetensors"))) == 2
    assert not (output / "adapter" / "README.md").exists()
    for name, content in contents(output).items():
        assert str(base.parent).encode() not in content, name
    assert ModelCard.load(output / "README.md").data.base_model_relation == "adapter"


def test_an_adapter_needs_a_base_that_others_can_load(finished, converted, trusting, tmp_path):
    options = dict(output=tmp_path / "out", adapter_only=True, device="cpu")
    with pytest.raises(
        ValueError, match="--base-model: whoever loads the adapter needs the base mo"
    ):
        publish(finished, **options)
    with pytest.raises(ValueError, match="--base-model: an adapter needs it; name what the model"):
        publish(converted, **options)


def test_an_adapter_without_its_checkpoint_is_refused(finished, trusting, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(
        ValueError, match=r"finetune, which holds no checkpoint any more; publish the"
    ):
        publish(copy, adapter_only=True, base_model="me/base", device="cpu")


def test_all_weights_finetuned_are_no_adapter(finished, trusting, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text())
    recipe["finetune"]["method"] = "full"
    (copy / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(ValueError, match=r"--adapter-only: finetune\.method is full"):
        publish(copy, adapter_only=True, base_model="me/base", device="cpu")


def test_an_adapter_of_a_gguf_file_is_refused(finished, trusting, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text())
    recipe["model"]["gguf_file"] = "base-q4.gguf"
    (copy / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(
        ValueError, match=r"cannot name a GGUF file as its base model \(base-q4\.gguf"
    ):
        publish(copy, adapter_only=True, base_model="me/base", device="cpu")


# ------------------------------------------------------------------------------------- refusals
def test_what_is_no_folder_of_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"publish: .*nowhere is no folder"):
        publish(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds neither a run \(recipe.yaml\) nor a model"):
        publish(tmp_path)


def test_an_unfinished_run_is_refused_with_the_command_that_finishes_it(finished, tmp_path):
    shutil.copy(finished / "recipe.yaml", tmp_path)
    with pytest.raises(ValueError, match=f"is not finished; go on with: linearize run {tmp_path}"):
        publish(tmp_path)


def test_a_softmax_model_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match="holds a LlamaForCausalLM, which is not converted"):
        publish(base, output=tmp_path / "out", device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_ours_is_not_replaced(converted, tmp_path):
    (tmp_path / "thesis").mkdir()
    with pytest.raises(
        ValueError, match=r"--output: .*thesis is there already and was not made by"
    ):
        publish(converted, output=tmp_path / "thesis", device="cpu")


def test_a_branch_without_a_repository_is_refused(converted):
    with pytest.raises(ValueError, match="--repo-id: needed to know where branch or pull request"):
        publish(converted, branch="x")
