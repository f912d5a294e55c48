"""The main job on a real model: download, convert, train a little, score, save, load in a fresh
process, generate.
"""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize
from linearize.evaluation.ablation import ablation
from linearize.evaluation.perplexity import perplexity

pytestmark = pytest.mark.slow
SCORING = {"length": 256, "max_tokens": 4096}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    spec = importlib.util.spec_from_file_location(
        "get_smollm2", ROOT / "scripts" / "get_smollm2.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.build(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The project's own documents: real English that every clone has."""
    pages = [page.read_text() for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])]
    folder = tmp_path_factory.mktemp("corpus")
    train, test = folder / "train.jsonl", folder / "test.txt"
    train.write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    test.write_text((ROOT / "LICENSE").read_text())
    return train, test


@pytest.fixture(scope="module")
def finished(smollm2, corpus, tmp_path_factory):
    train, test = corpus
    folder = tmp_path_factory.mktemp("run")
    recipe = {
        "model": {"path": str(smollm2), "dtype": "bfloat16"},
        "data": {"sources": [str(train)], "length": 256, "held_out": 0.1},
        "transfer": {"max_steps": 30, "batch_size": 2, "num_queries": 32},
        "evaluate": {"text": str(test), **SCORING},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    results = linearize.run(
        linearize.load_recipe(folder / "recipe.yaml"),
        output_dir=folder / "run",
        device="cpu",
        progress=False,
    )
    return folder / "run", results


def test_a_short_transfer_makes_the_converted_model_far_better(finished, smollm2, corpus):
    _folder, results = finished
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    untrained = perplexity(linearize.convert(base), tokenizer, corpus[1].read_text(), **SCORING)[
        "perplexity"
    ]
    rows = results["ablation"]
    assert rows["converted"]["perplexity"] < untrained / 3
    assert rows["teacher"]["perplexity"] < rows["converted"]["perplexity"]
    assert rows["linear_only"]["perplexity"] > rows["converted"]["perplexity"]
    history = results["transfer"]["history"]
    assert history[-1]["loss"] < history[0]["loss"] / 2


def test_the_control_answers_like_the_teacher(finished):
    control = finished[1]["ablation"]["control"]
    assert control["kl_to_teacher"] < 0.01  # bf16
    assert control["top1_agreement"] > 0.95


def test_a_fresh_process_scores_the_saved_model_the_same(finished, corpus):
    folder, results = finished
    command = [
        sys.executable,
        "-m",
        "linearize",
        "evaluate",
        str(folder / "model"),
        "--text",
        str(corpus[1]),
    ]
    command += ["--length", "256", "--max-tokens", "4096", "--json", "--no-progress"]
    printed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    again, before = printed["ablation"]["converted"], results["ablation"]["converted"]
    assert again["perplexity"] == pytest.approx(before["perplexity"], rel=1e-3)


def test_a_fresh_process_generates(finished):
    folder, _results = finished
    command = [
        sys.executable,
        "-m",
        "linearize",
        "generate",
        str(folder / "model"),
        "The capital of France is",
        "--json",
    ]
    command += ["--max-new-tokens", "8"]
    printed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert "Paris" in printed["text"]


def test_the_adapter_of_this_repository_fits_the_model_and_uses_its_memory(
    smollm2, corpus, tmp_path
):
    folder = tmp_path / "adapter"
    shutil.copytree(ROOT / "recipes" / "smollm2-135m-centroids-w64-t2048", folder)
    config = json.loads((folder / "config.json").read_text())
    config["linearize_config"]["delta"]["base_model"] = str(smollm2)
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"length": 1024, "max_tokens": 2048, "progress": False}
    rows = ablation(model, tokenizer, corpus[1].read_text(), base_model=base, **options)
    assert rows["converted"]["perplexity"] < 0.9 * rows["window_only"]["perplexity"]
    assert rows["converted"]["perplexity"] < 2 * rows["teacher"]["perplexity"]
