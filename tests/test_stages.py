"""The pipeline on a tiny model: everything is written, kills are survived, results add up."""

import json
import shutil

import pytest
import torch
from tinytext import save_base, save_corpus
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.integrations import integration_utils

from linearize import stages
from linearize.evaluation.fidelity import MEASURES
from linearize.evaluation.pictures import picture_student, read_pictures
from linearize.evaluation.rows import ROWS
from linearize.recipe import Recipe, load_recipe
from linearize.saved import evaluate
from linearize.stages import gap_closed, run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return save_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


def recipe_for(base, corpus, output, **sections):
    settings = {
        "model": {"path": str(base)},
        "convert": {"window": 4, "sinks": 2},
        "data": {"sources": str(corpus), "length": 32, "held_out": 0.2},
        "transfer": {"max_steps": 3, "batch_size": 2, "num_queries": 8},
        "evaluate": {"length": 32, "batch_size": 4},
        "generate": {"prompts": ["w1 w2 w3"], "max_new_tokens": 4},
        "output": str(output),
    }
    return Recipe.model_validate(settings | sections)


FINETUNE = {"max_steps": 2, "batch_size": 2, "accumulation": 1, "rank": 2}


@pytest.fixture(scope="module")
def finished(base, corpus, tmp_path_factory):
    """A finished run of both stages: recipe, folder, results."""
    folder = tmp_path_factory.mktemp("runs") / "both"
    recipe = recipe_for(base, corpus, folder, finetune=FINETUNE)
    return recipe, folder, run(recipe, device="cpu", progress=False)


def test_the_run_directory_holds_recipe_results_checkpoints_and_model(finished):
    recipe, folder, results = finished
    assert load_recipe(folder / "recipe.yaml") == recipe
    assert json.loads((folder / "results.json").read_text()) == results
    assert (folder / "checkpoints").is_dir()
    assert not list(folder.glob(".*"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.model_type == "linearized_llama"


def test_results_hold_every_row_and_what_they_cost(finished):
    results = finished[2]
    first = set(ROWS)
    assert set(results["ablation_after_transfer"]) == first
    assert set(results["ablation"]) == first | {"teacher_finetuned", "swa_sinks_finetuned"}
    keys = {"perplexity", "perplexity_se", "kl_to_teacher", "top1_agreement", "buckets"}
    assert all(keys <= row.keys() for row in results["ablation"].values())
    assert results["tokens"] == {"transfer": 3 * 2 * 32, "finetune": 2 * 2 * 32}
    assert results["seconds"] > 0 and results["finished"]
    assert results["versions"]["torch"] == torch.__version__
    assert set(results["gap_closed"]) == {"ablation_after_transfer", "ablation"}
    assert results["parity"]["agrees"] and set(results["linear_mass"]["layers"]) == {"0", "1"}
    assert "recall" not in results
    (sample,) = results["samples"]
    assert sample["teacher"].startswith("w1 w2 w3") and sample["converted"].startswith("w1 w2 w3")


def test_the_rows_of_the_base_model_are_the_same_before_and_after_stage_2(finished):
    results = finished[2]
    for row in ("teacher", "swa_sinks", "control"):
        assert results["ablation"][row] == results["ablation_after_transfer"][row]
    assert results["ablation"]["converted"] != results["ablation_after_transfer"]["converted"]
    assert results["ablation"]["teacher"]["kl_to_teacher"] == 0
    # under the teacher's own divergence there is nothing to learn for it
    assert results["ablation"]["teacher_finetuned"] == results["ablation"]["teacher"]


def test_the_report_is_written_last_and_can_be_written_again(finished):
    _recipe, folder, results = finished
    page = folder / "report.html"
    first = page.read_text(encoding="utf-8")
    for section in ("quality", "training", "attention", "samples", "recipe"):
        assert f'id="{section}"' in first
    assert 'id="viewer"' in first
    assert set(results["fidelity"]) == set(MEASURES)
    page.unlink()
    assert stages.report(folder) == {"report": str(page)}
    assert page.read_text(encoding="utf-8") == first


def test_a_finished_run_without_a_report_gets_one(finished):
    recipe, folder, _results = finished
    (folder / "report.html").unlink()
    run(recipe, device="cpu", progress=False)
    assert (folder / "report.html").exists()


def test_a_failing_report_costs_nothing(finished, monkeypatch, caplog):
    recipe, folder, results = finished
    (folder / "report.html").unlink()

    def broken(*args, **kwargs):
        raise KeyError("buckets")

    with monkeypatch.context() as patch:
        patch.setattr(stages, "write_report", broken)
        assert run(recipe, device="cpu", progress=False) == results
    assert "the report could not be written (KeyError: 'buckets'); `linearize report" in caplog.text
    run(recipe, device="cpu", progress=False)


def test_the_pictures_are_of_teacher_and_finished_model(finished, base):
    folder = finished[1]
    pictures = read_pictures(folder / "attention")
    assert pictures.teacher.shape == pictures.student.shape
    assert not (pictures.teacher == pictures.student).all()
    again = folder.parent / "pictures"
    shutil.copytree(folder / "attention", again)
    picture_student(AutoModelForCausalLM.from_pretrained(folder / "model"), again)
    assert abs(read_pictures(again).student.astype(int) - pictures.student).max() <= 1


def test_the_saved_model_has_the_reported_perplexity(finished, corpus, base):
    _recipe, folder, _results = finished
    again = evaluate(
        folder / "model", str(corpus), base=base, length=32, device="cpu", progress=False
    )
    assert again["ablation"]["teacher"]["kl_to_teacher"] == 0
    stock = evaluate(base, str(corpus), length=32, device="cpu", progress=False)["perplexity"]
    assert stock["perplexity"] == pytest.approx(
        again["ablation"]["teacher"]["perplexity"], rel=1e-5
    )


def test_a_finished_run_is_not_run_again(finished, monkeypatch):
    recipe, _, results = finished
    monkeypatch.setattr(stages, "_Job", None)
    assert run(recipe, device="cpu", progress=False) == results


def test_another_recipe_in_the_same_folder_is_refused(finished):
    recipe, _folder, _ = finished
    other = recipe.model_copy(update={"seed": 1})
    with pytest.raises(
        ValueError, match=r"holds the run of another recipe \(seed: 0 there, 1 here\)"
    ):
        run(other, device="cpu", progress=False)
    with pytest.raises(ValueError, match="holds a run already; choose another folder"):
        run(recipe, device="cpu", resume=False, progress=False)


def test_a_tracker_that_is_missing_is_named_before_anything_starts(
    base, corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    recipe = recipe_for(base, corpus, tmp_path / "run")
    with pytest.raises(ValueError, match=r"report_to: .* requires wandb to be installed"):
        run(recipe, device="cpu", progress=False, report_to="wandb")
    assert not (tmp_path / "run").exists()


def test_trackers_hear_of_both_stages(base, corpus, tmp_path, monkeypatch):
    heard = set()

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            heard.update(logs)

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Tracker)
    recipe = recipe_for(base, corpus, tmp_path / "run", finetune=FINETUNE, evaluate=None)
    run(recipe, device="cpu", progress=False, report_to=["wandb"])
    assert {"transfer/loss", "transfer/layers/1", "finetune/loss"} <= heard


def test_a_folder_with_other_things_is_refused(base, corpus, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is there already and holds no run"):
        run(recipe_for(base, corpus, tmp_path), device="cpu", progress=False)


@pytest.mark.parametrize("stop_at", ["transfer_attention", "ablation", "finetune", "write"])
def test_a_killed_run_ends_as_if_it_had_not_been_killed(
    finished, base, corpus, tmp_path, monkeypatch, stop_at
):
    _, _, expected = finished
    recipe = recipe_for(base, corpus, tmp_path / "run", finetune=FINETUNE)
    real, calls = getattr(stages, stop_at), []

    def killed(*args, **kwargs):
        calls.append(stop_at)
        if len(calls) == (1 if stop_at == "transfer_attention" else 2):
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(stages, stop_at, killed)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, device="cpu", progress=False)
    results = run(recipe, device="cpu", progress=False)
    assert results["ablation"] == expected["ablation"]
    assert results["samples"] == expected["samples"]
    assert results["fidelity"] == expected["fidelity"]


def test_without_stage_2_the_result_is_that_of_stage_1(base, corpus, tmp_path):
    results = run(recipe_for(base, corpus, tmp_path / "run"), device="cpu", progress=False)
    assert "ablation_after_transfer" not in results and "finetune" not in results
    assert results["ablation"]["converted"]["kl_to_teacher"] > 0
    assert set(results["gap_closed"]) == {"ablation"}


def test_recall_is_recorded_if_the_recipe_asks_for_it(base, corpus, tmp_path):
    section = {"length": 32, "recall": {"tasks": "passkey", "lengths": 60, "samples": 2}}
    recipe = recipe_for(base, corpus, tmp_path / "run", evaluate=section, finetune=FINETUNE)
    results = run(recipe, device="cpu", progress=False)
    (cell,) = results["recall"]["cells"]
    assert (cell["task"], cell["length"], results["recall"]["samples"]) == ("passkey", 60, 2)
    alone = evaluate(base, recall=True, contexts=(60,), limit=2, device="cpu", progress=False)
    (expected,) = (x for x in alone["recall"]["cells"] if x["task"] == "passkey")
    found = cell["rows"]["teacher"]["log_prob"]
    assert found == pytest.approx(expected["rows"]["teacher"]["log_prob"], abs=1e-4)


def test_the_teacher_can_write_the_data(base, tmp_path):
    recipe = recipe_for(base, "", tmp_path / "run", data={"sources": "self", "length": 32,
                        "max_tokens": 600, "held_out": 0.3}, generate=None)  # fmt: skip
    results = run(recipe, device="cpu", progress=False)
    assert results["data"]["train"]["sources"][0]["name"] == "self"
    assert results["samples"] == []


def test_untrained_conversions_can_be_measured(base, corpus, tmp_path):
    recipe = recipe_for(base, corpus, tmp_path / "run", transfer=None,
                        evaluate={"text": str(corpus), "length": 32})  # fmt: skip
    results = run(recipe, device="cpu", progress=False)
    assert "data" not in results and "transfer" not in results
    assert results["ablation"]["converted"]["num_tokens"] == 20 * 59


def test_a_wrong_evaluation_text_is_found_before_the_model_loads(base, corpus, tmp_path):
    recipe = recipe_for("nowhere/at/all", corpus, tmp_path / "run", evaluate={"text": "no.txt"})
    with pytest.raises(FileNotFoundError, match=r"evaluate\.text: no\.txt does not exist"):
        run(recipe, device="cpu", progress=False)


def test_held_out_text_must_exist(base, corpus, tmp_path):
    data = {"sources": str(corpus), "length": 32, "held_out": 0}
    with pytest.raises(ValueError, match=r"data\.held_out: 0\.0 of this text is not one document"):
        run(recipe_for(base, corpus, tmp_path / "run", data=data), device="cpu", progress=False)


def test_a_cache_of_the_teacher_serves_stage_2_and_its_baselines(base, corpus, tmp_path):
    sections = {"finetune": {**FINETUNE, "top_k": 5}, "generate": None, "evaluate": {"length": 32}}
    tables = []
    for name, cache in (("plain", None), ("cached", tmp_path / "cache")):
        recipe = recipe_for(base, corpus, tmp_path / name, **sections)
        results = run(recipe, device="cpu", progress=False, teacher_cache=cache)
        tables.append(results["ablation"])
    assert tables[0] == tables[1]
    rows = len(list((tmp_path / "cache").rglob("*.safetensors")))
    assert rows == FINETUNE["max_steps"] * FINETUNE["batch_size"]


def test_a_cache_without_top_k_is_refused_before_anything_is_written(base, corpus, tmp_path):
    recipe = recipe_for(base, corpus, tmp_path / "run", finetune=FINETUNE)
    with pytest.raises(ValueError, match=r"teacher_cache: .* set finetune\.top_k, for example to"):
        run(recipe, device="cpu", progress=False, teacher_cache=tmp_path / "cache")
    assert not (tmp_path / "run").exists()


def test_run_takes_the_path_of_a_recipe(base, corpus, tmp_path, finished):
    _recipe, folder, results = finished
    assert run(folder / "recipe.yaml", device="cpu") == results


def test_gap_closed_is_a_share_of_log_perplexity():
    rows = {
        "teacher": {"perplexity": 1},
        "converted": {"perplexity": 10},
        "floor": {"perplexity": 100},
    }
    assert gap_closed(rows, floor="floor", ceiling="teacher") == pytest.approx(0.5)
    assert gap_closed(rows, floor="missing", ceiling="teacher") is None
