"""The run directory: who may come back, and what survives a kill."""

import json

import numpy as np
import pytest
import torch

from linearize.data import Splits, TokenDataset
from linearize.rundir import RunDirectory, load_splits, save_splits


def same(stored):
    return []


def test_results_are_written_whole_and_read_again(tmp_path):
    directory = RunDirectory(tmp_path / "run", "seed: 0\n", same)
    directory.record(a=1, b={"c": float("inf")})
    again = RunDirectory(tmp_path / "run", "seed: 0\n", same)
    assert again.results == {"a": 1, "b": {"c": "inf"}}
    assert (tmp_path / "run" / "recipe.yaml").read_text() == "seed: 0\n"
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"recipe.yaml", "results.json"}


def test_a_kill_while_writing_leaves_the_last_results(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path / "run", "", same)
    directory.record(a=1)

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            directory.record(a=2)
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == {"a": 1}


def test_what_is_there_is_not_made_again(tmp_path):
    directory = RunDirectory(tmp_path / "run", "", same)
    assert directory.once("table", lambda: {"row": 1}) == {"row": 1}
    assert directory.once("table", lambda: pytest.fail("made twice")) == {"row": 1}
    assert set(directory.results["seconds_by_step"]) == {"table"}


def test_another_recipe_is_refused_with_what_differs(tmp_path):
    RunDirectory(tmp_path / "run", "", same)
    many = [f"key{i}: 1 there, 2 here" for i in range(7)]
    with pytest.raises(
        ValueError, match=r"another recipe \(key0: 1 there, 2 here; .*key4.*; \.\.\.\)"
    ):
        RunDirectory(tmp_path / "run", "", lambda stored: many)


def test_without_resume_a_run_is_refused(tmp_path):
    RunDirectory(tmp_path / "run", "", same)
    with pytest.raises(ValueError, match="holds a run already; choose another folder or delete"):
        RunDirectory(tmp_path / "run", "", same, resume=False)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_run_is_left_alone(tmp_path, kind):
    place = tmp_path if kind == "folder" else tmp_path / "thesis.tex"
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is there already and holds no run"):
        RunDirectory(place, "", same)


@pytest.mark.parametrize("held_out", [[np.arange(5, 12)], []], ids=["held out", "none held out"])
def test_splits_come_back_row_by_row(tmp_path, held_out):
    documents = [np.arange(3, 20), np.arange(30, 35), np.arange(40, 62)]
    splits = Splits(
        TokenDataset(documents, length=8, pad_id=2, description={"seed": 3}),
        TokenDataset(held_out, length=8, pad_id=2),
    )
    save_splits(splits, tmp_path / "deep" / "data.safetensors")
    again = load_splits(tmp_path / "deep" / "data.safetensors", length=8, pad_id=2)
    for part in ("train", "held_out"):
        before, after = getattr(splits, part), getattr(again, part)
        assert len(before) == len(after) and before.description == after.description
        for old, new in zip(before, after, strict=True):
            assert all(torch.equal(old[key], new[key]) for key in old)
