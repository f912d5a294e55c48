"""A folder is compared with its model in processes of their own, and what differs stops."""

import dataclasses
import re
import subprocess

import pytest
import torch
from conftest import tiny_linearized
from tinytext import tiny_tokenizer

from linearize import verification
from linearize.verification import answer, question, verify

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def model():
    return tiny_linearized(sinks=2)


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def said(model, tokenizer):
    """(ids, the model's own answer)."""
    ids = question(model)
    return ids, answer(model, tokenizer, ids)


def check(tmp_path, monkeypatch, said, **changed):
    """Verifies against a process that answers the same but for `changed`."""
    ids, expected = said
    modules = {"no": "transformers_modules", "yes": "linearize"}

    def ask(folder, ids, device, installed, process):
        found = dataclasses.replace(expected, module=modules[installed])
        return dataclasses.replace(found, **changed)

    monkeypatch.setattr(verification, "_ask", ask)
    return verify(tmp_path, expected, ids, dtype=torch.float32)


def test_the_question_is_longer_than_window_and_sinks_and_fits_the_model(model):
    ids = question(model)
    assert ids.shape == (1, 2 * (4 + 2) + 32) and int(ids.max()) < 64
    model.config.max_position_embeddings, before = 20, model.config.max_position_embeddings
    assert question(model).shape[1] + verification.NEW_TOKENS == 20
    model.config.max_position_embeddings = before


def test_the_answer_covers_model_and_tokenizer(said):
    ids, found = said
    assert found.logits.shape == (1, ids.shape[1], 64)
    assert found.written.shape[1] == ids.shape[1] + verification.NEW_TOKENS
    assert found.tokens and found.chat == "Say hello. "


def test_the_same_answer_passes_with_and_without_the_package(tmp_path, monkeypatch, said):
    found = check(tmp_path, monkeypatch, said)
    assert found == {"without linearize": 0.0, "with linearize": 0.0}


@pytest.mark.parametrize("value", [0.1, float("nan")])
def test_other_logits_stop(tmp_path, monkeypatch, said, value):
    logits = said[1].logits.clone()
    logits[0, -1, 0] += value * logits.abs().max()
    with pytest.raises(
        ValueError, match=r"without linearize, gives other logits .*nothing was pub"
    ):
        check(tmp_path, monkeypatch, said, logits=logits)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"written": torch.zeros(1, 3, dtype=torch.long)}, "in the tokens that it writes"),
        ({"tokens": [1]}, "in how its tokenizer cuts a text"),
        ({"chat": None}, "in its chat template"),
        ({"module": "linearize"}, "without linearize, ran the code of linearize"),
        (
            {"module": "transformers_modules"},
            "with linearize, ran the code of transformers_modules",
        ),
    ],
    ids=["written", "tokens", "chat", "package-in-the-way", "package-not-used"],
)
def test_any_other_difference_stops(tmp_path, monkeypatch, said, changed, message):
    with pytest.raises(ValueError, match=message):
        check(tmp_path, monkeypatch, said, **changed)


def test_a_folder_that_does_not_load_stops_with_its_reason(tmp_path, said, monkeypatch):
    said_by_python = "Traceback ...\nOSError: no ops.py\nin this folder\n"

    def fail(command, env, **options):
        assert "HF_TOKEN" not in env and env["HF_HUB_OFFLINE"] == "1"
        return subprocess.CompletedProcess(command, 1, "", said_by_python)

    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setattr(verification.subprocess, "run", fail)
    ids, expected = said
    message = "in a fresh process without linearize: OSError: no ops.py in this folder; nothing was"
    with pytest.raises(ValueError, match=re.escape(message)):
        verify(tmp_path, expected, ids, dtype=torch.float32)
