"""lm-eval's own `hf` model scores a converted model as a plain forward does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_linearized
from tinytext import WORDS, chat_tokenizer
from tolerances import LOGITS

lm_eval = pytest.importorskip("lm_eval", reason='needs pip install -e ".[eval]"')
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CONTEXTS = [" ".join(WORDS[:n]) for n in (12, 3, 20)]
TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: DATA}
output_type: multiple_choice
test_split: train
doc_to_text: "{{context}}"
doc_to_choice: ["w1 w2", "w3", "w4 w5 w6"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_linearized(sinks=1).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def log_likelihood(model, context, continuation):
    tokenizer = chat_tokenizer()
    before, after = (
        tokenizer(x, return_tensors="pt")["input_ids"] for x in (context, continuation)
    )
    logits = model(torch.cat([before, after], 1), use_cache=False).logits.log_softmax(-1)
    said = logits[0, before.shape[1] - 1 : -1]
    return said.gather(1, after[0, :, None]).sum().item()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_likelihoods_are_those_of_a_forward(folder, batch_size):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=str(folder), device="cpu", batch_size=batch_size)
    requests = [
        Instance("loglikelihood", {}, (context, " " + answer), i)
        for i, context in enumerate(CONTEXTS)
        for answer in ("w30 w31", "w7")
    ]
    found = [score for score, _ in harness.loglikelihood(requests, disable_tqdm=True)]
    model = tiny_linearized(sinks=1)
    expected = [log_likelihood(model, *request.args) for request in requests]
    assert found == pytest.approx(expected, abs=LOGITS)


def test_the_command_runs_where_the_code_in_the_folder_is_trusted(folder, tmp_path):
    """lm-eval does not import this package, so the checkpoint brings the code."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"context": c}) + "\n" for c in CONTEXTS))
    (tmp_path / "words.yaml").write_text(TASK.replace("DATA", json.dumps(str(data))))
    model = f"pretrained={folder},trust_remote_code=True"
    where = ["--include_path", tmp_path, "--tasks", "words", "--output_path", tmp_path / "out"]
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", model]
    done = subprocess.run(
        [*command, *where, "--device", "cpu"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (results,) = Path(tmp_path / "out").rglob("results*.json")
    scored = json.loads(results.read_text())
    assert scored["n-samples"]["words"]["effective"] == len(CONTEXTS)
    assert 0 <= scored["results"]["words"]["acc,none"] <= 1
