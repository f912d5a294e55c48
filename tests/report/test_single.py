"""The report of a run: everything measured is there, nothing else, and nothing private."""

import json

import pytest
from sampleruns import EVIL, results, save_run

from linearize.report.single import memory, read_results
from linearize.stages import report


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = save_run(tmp_path_factory.mktemp("runs") / "my-run", generate={"prompts": ["w1"]})
    return folder, report(folder)["report"]


def text_of(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def test_everything_measured_has_its_section(run):
    folder, file = run
    page = text_of(folder)
    assert file == str(folder / "report.html")
    for section in ("quality", "recall", "training", "attention", "cost", "samples", "recipe"):
        assert f'id="{section}"' in page and f'href="#{section}"' in page
    for words in ("tiny, linearized", "24.00", "50 %", "lowers the loss by 0.200", "0123456789ab"):
        assert words in page
    assert 'id="viewer"' in page
    assert "linearize run recipe.yaml --output-dir runs/my-run" in page
    assert not list(folder.glob(".*"))


def test_what_was_not_measured_is_left_out(tmp_path):
    found = {key: results()[key] for key in ("output", "versions", "samples")}
    page = text_of(save_and_report(tmp_path / "bare", found=found, pictures=False))
    for section in ("quality", "recall", "training", "attention", "cost"):
        assert f'id="{section}"' not in page and f'href="#{section}"' not in page
    assert 'id="samples"' in page and 'id="viewer"' not in page


def save_and_report(folder, **options):
    report(save_run(folder, **options))
    return folder


def test_no_place_of_the_computer_is_in_it(run):
    page = text_of(run[0])
    assert "somebody" not in page and str(run[0].parent) not in page
    assert "text.txt" in page and "path: tiny" in page


def test_text_of_models_is_text(run):
    page = text_of(run[0])
    assert EVIL not in page
    assert page.count("<script") == 3 and page.count("</script>") == 3


def test_a_page_stays_small(run):
    assert (run[0] / "report.html").stat().st_size < 3_000_000


def test_memory_is_that_of_the_geometry(run):
    cost = memory(run[0] / "model" / "config.json")
    assert cost["kv_bytes_per_token"] == 2 * 2 * (8 + 8) * 4  # layers, heads, keys and values, fp32
    assert cost["kv_bytes"][0] == 512 * cost["kv_bytes_per_token"]
    assert cost["break_even"] * cost["kv_bytes_per_token"] >= cost["state_bytes"] > 0
    assert memory(run[0] / "config.json") is None


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"holds no results\.json; name the folder of a run"
    ):
        read_results(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        report(tmp_path)


def test_results_are_those_of_the_folder(run):
    assert read_results(run[0]) == json.loads((run[0] / "results.json").read_text())
