"""The embedded teacher: small, offline, able to read English, and in need of more than a window."""

import importlib.util
import json
import re

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from linearize.loading import EMBEDDED

FOLDER = EMBEDDED["tiny-english"]
STORY = (
    "Once upon a time, there was a little girl named Mia. Mia had a small red boat. Every morning "
    "she took the red boat to the pond behind the house. One day the wind was strong, and the red "
    "boat went far away over the water. Mia was very sad. She sat down in the grass and began to "
    'cry. Then a big green frog came out of the water. "Why do you cry?" asked the frog. "My boat '
    'is gone," said Mia. "I can help you," said the frog. "I can swim very well." The frog jumped '
    "into the pond and swam and swam. Soon he came back, and he pushed the red boat with his nose. "
    'Mia was so happy. "Thank you, big green frog!" she said. The frog smiled. From that day on, '
    "Mia and the big green frog were good friends, and every morning they took the red boat to the "
    "pond behind the house.\n"
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def script():
    path = ROOT / "scripts" / "train_tiny_teacher.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nll(model, ids, window=None, sinks=4):
    """Nats per token [T-1] of ids [T], each layer limited to `window` and `sinks`."""
    query, key = torch.arange(len(ids))[:, None], torch.arange(len(ids))[None]
    seen = key <= query
    if window:
        seen &= (query - key < window) | (key < sinks)
    with torch.no_grad():
        logits = model(input_ids=ids[None], attention_mask=seen[None, None]).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")


class TestFolder:
    def test_is_at_most_four_megabytes(self):
        assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 4_000_000

    def test_holds_a_stock_llama_of_one_to_three_million_bf16_parameters(self):
        stored = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
        assert type(stored) is LlamaForCausalLM
        assert {p.dtype for p in stored.parameters()} == {torch.bfloat16}
        assert 1e6 <= sum(p.numel() for p in stored.parameters()) <= 3e6

    def test_groups_query_heads(self, model):
        assert model.config.num_attention_heads > model.config.num_key_value_heads > 1

    def test_card_names_licences_and_both_commands(self):
        card = (FOLDER / "README.md").read_text(encoding="utf-8")
        for phrase in ("CDLA-Sharing-1.0", "public domain", "--evaluate", "--tokens"):
            assert phrase in card


class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        [STORY, "  two  spaces\n\n\ttab ", "1984 and 3.14", "naïve café — 東京 🙂", ""],
        ids=["story", "blanks", "digits", "unicode", "empty"],
    )
    def test_returns_every_text_unchanged(self, tokenizer, text):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text

    def test_begins_a_text_with_bos(self, tokenizer):
        ids = tokenizer("A dog.")["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1

    def test_agrees_with_the_model_on_special_tokens(self, tokenizer, model):
        for config in (model.config, model.generation_config):
            assert config.bos_token_id == tokenizer.bos_token_id
            assert config.eos_token_id == tokenizer.eos_token_id
            assert config.pad_token_id == tokenizer.pad_token_id
        assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
        assert len(tokenizer) == model.config.vocab_size

    def test_is_shorter_than_bytes(self, tokenizer):
        assert len(tokenizer(STORY)["input_ids"]) < len(STORY.encode()) / 2.5


class TestModel:
    def test_has_learned_english(self, model, tokenizer):
        ids = tokenizer(STORY, return_tensors="pt")["input_ids"][0]
        assert nll(model, ids).mean().exp() < model.config.vocab_size / 40

    def test_prefers_english_to_shuffled_english(self, model, tokenizer):
        ids = tokenizer(STORY, return_tensors="pt")["input_ids"][0]
        order = 1 + torch.randperm(len(ids) - 1, generator=torch.Generator().manual_seed(0))
        shuffled = torch.cat([ids[:1], ids[order]])
        assert nll(model, shuffled).mean() > nll(model, ids).mean() + 1.5

    @pytest.mark.parametrize("window", [16, 32])
    def test_needs_more_than_a_window(self, model, tokenizer, window):
        ids = tokenizer(STORY, return_tensors="pt")["input_ids"][0]
        assert len(ids) > 4 * window
        banded, full = nll(model, ids, window)[64:].mean(), nll(model, ids)[64:].mean()
        assert banded > full + 0.15

    def test_copies_a_passage_from_beyond_the_window(self, model, tokenizer):
        sentences = STORY.split(". ")
        passage, between = ". ".join(sentences[:3]) + ". ", ". ".join(sentences[4:9]) + ".\n"
        ids, away, again = (
            tokenizer(text, return_tensors="pt")["input_ids"][0][1:]
            for text in (passage, between, passage)
        )
        row = torch.cat([torch.tensor([tokenizer.bos_token_id]), ids, away, again])
        returned = slice(len(ids) + len(away) + 8, None)
        assert len(away) > 32
        assert nll(model, row)[returned].mean() < nll(model, row, 32)[returned].mean() - 1.0

    def test_writes_words(self, model, tokenizer):
        prompt = tokenizer("Once upon a time", return_tensors="pt")
        out = model.generate(**prompt, max_new_tokens=40, do_sample=False)
        text = tokenizer.decode(out[0], skip_special_tokens=True)
        assert text.startswith("Once upon a time")
        assert "there was a" in text


@pytest.fixture
def corpus(tmp_path, script):
    """A folder with a little text in each of the sources' files."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number, source in enumerate(script.SOURCES):
        texts = [f"{STORY} This is story {n} of {number}." * 2 for n in range(42)]
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / source.file).write_text("\n".join(lines), encoding="utf-8")
    return folder


class TestTraining:
    def options(self, corpus, tmp_path, name):
        return [
            str(corpus), "--work-dir", str(tmp_path / name / "work"), "--output",
            str(tmp_path / name / "model"), "--tokens", "3072", "--batch-tokens", "512",
            "--context", "256", "--vocab", "300", "--rows", "2", "--save-minutes", "0",
            "--threads", "1",
        ]  # fmt: skip

    def test_resumed_equals_uninterrupted(self, script, corpus, tmp_path, monkeypatch):
        script.main(self.options(corpus, tmp_path, "whole"))
        whole, calls, row_loss = tmp_path / "whole" / "model", [], script.row_loss

        def killed(model, ids):
            calls.append(ids)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return row_loss(model, ids)

        monkeypatch.setattr(script, "row_loss", killed)
        with pytest.raises(KeyboardInterrupt):
            script.main(self.options(corpus, tmp_path, "killed"))
        assert not (tmp_path / "killed" / "model").exists()
        script.main(self.options(corpus, tmp_path, "killed"))
        weights = (whole / "model.safetensors").read_bytes()
        assert (tmp_path / "killed" / "model" / "model.safetensors").read_bytes() == weights
        card = (whole / "README.md").read_text(encoding="utf-8")
        assert "3,072 tokens" in card
        assert not re.search(r"\{(config|figures|sample|seed|date)", card)

    def test_missing_text_is_named(self, script, corpus):
        (corpus / script.SOURCES[1].file).unlink()
        with pytest.raises(FileNotFoundError, match=f"{script.SOURCES[1].file} is missing"):
            script.read_documents(corpus, seed=0)

    def test_a_folder_too_large_is_refused(self, script, corpus, tmp_path, monkeypatch):
        monkeypatch.setattr(script, "MAX_BYTES", 1000)
        with pytest.raises(ValueError, match=r"bytes, 1,000 are allowed: lower --vocab"):
            script.main(self.options(corpus, tmp_path, "large"))
        assert not (tmp_path / "large" / "model").exists()

    def test_held_out_documents_are_not_trained_on(self, script, corpus):
        for train, held_out in script.read_documents(corpus, seed=0).values():
            assert len(held_out) == 2
            assert len(train) == 40
            assert not set(train) & set(held_out)

    def test_band_keeps_window_and_sinks(self, script):
        seen = script.band(8, 2, sinks=1)[0, 0]
        assert seen[6].nonzero().flatten().tolist() == [0, 5, 6]
        assert script.band(8, None)[0, 0].equal(torch.ones(8, 8).tril().bool())
