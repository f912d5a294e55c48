"""Runs side by side: figures, differing settings, and whether they may be compared."""

import pytest
from sampleruns import results, save_run, table

from linearize.stages import compare


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first = save_run(folder / "first")
    second = save_run(folder / "second", convert={"window": 32}, found=results(seconds=1.0))
    return first, second


def test_figures_stand_side_by_side(runs, tmp_path):
    found = compare(runs, page=tmp_path / "c.html")
    assert list(found["runs"]) == ["first", "second"]
    assert found["runs"]["first"]["converted"]["perplexity"] == 24.0
    assert found["runs"]["second"]["seconds"] == 1.0
    assert found["runs"]["second"]["closed"] == 0.5
    assert found["settings"] == {"convert.window": [64, 32]}
    assert found["comparable"]
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "2 runs, side by side" in page and "convert.window" in page
    assert "did not score the same tokens" not in page
    assert "somebody" not in page


def test_other_tokens_are_not_comparable(runs, tmp_path):
    other = table()
    other["converted"]["sha256"] = "0" * 64
    third = save_run(tmp_path / "third", pictures=False, found=results(ablation=other))
    found = compare([*runs, third], page=tmp_path / "c.html")
    assert not found["comparable"]
    assert "did not score the same tokens" in (tmp_path / "c.html").read_text(encoding="utf-8")


def test_a_run_without_figures_has_dashes(runs, tmp_path):
    bare = save_run(tmp_path / "bare", pictures=False, found={"output": "runs/bare"})
    found = compare([runs[0], bare], page=tmp_path / "c.html")
    assert set(found["runs"]["bare"].values()) == {None}
    assert "<td>–</td>" in (tmp_path / "c.html").read_text(encoding="utf-8")


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    again = save_run(tmp_path / "other" / "first", pictures=False)
    found = compare([runs[0], again, again], page=tmp_path / "c.html")
    assert list(found["runs"])[1:] == ["other/first (1)", "other/first (2)"]


def test_one_run_is_refused(runs, tmp_path):
    with pytest.raises(
        ValueError, match="compare: one run has nothing beside it; name two or more"
    ):
        compare(runs[:1], page=tmp_path / "c.html")
