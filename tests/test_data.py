"""Packed rows: boundaries, labels, splits, mixtures, cache, and text that the teacher writes."""

import json

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tolerances import FLOAT32, GUARD
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
)

import linearize.data
from linearize.data import TokenDataset, generate_data, load_data

BOS, EOS = 1, 2
WORDS = [f"w{i}" for i in range(60)]


def make_tokenizer(*, bos=False, eos=True):
    """Tokenizer of the words w0 .. w59 with ids 4 .. 63."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<x>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    names = {"unk_token": "<unk>"} | ({"bos_token": "<s>"} if bos else {})
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **names, **({"eos_token": "</s>"} if eos else {})
    )


def pack(*documents, length, **options):
    return TokenDataset([np.array(ids) for ids in documents], length=length, **options)


def write_documents(path, count, *, first=0, words=20):
    """JSON lines of `count` different documents of `words` words each."""
    rng = np.random.default_rng(first)
    rows = [{"text": " ".join(rng.choice(WORDS, words))} for _ in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def contents(dataset):
    return [tuple(document.tolist()) for document in dataset.documents()]


# Packing


def test_rows_positions_and_labels():
    dataset = pack([10, 11, 12], [20, 21], [30, 31, 32, 33, 34, 35], length=4)
    assert len(dataset) == 2
    assert dataset.num_tokens == 8
    first, second = dataset
    assert first["input_ids"].tolist() == [10, 11, 12, 20]
    assert first["position_ids"].tolist() == [0, 1, 2, 0]
    assert first["labels"].tolist() == [-100, 11, 12, -100]
    assert second["input_ids"].tolist() == [21, 30, 31, 32]
    assert second["position_ids"].tolist() == [0, 0, 1, 2]
    assert second["labels"].tolist() == [-100, -100, 31, 32]
    assert {tensor.dtype for item in dataset for tensor in item.values()} == {torch.int64}


def test_only_row_is_kept_and_padded_as_a_document_of_its_own():
    dataset = pack([10, 11, 12], length=6, pad_id=2)
    (row,) = dataset
    assert dataset.num_tokens == 3
    assert row["input_ids"].tolist() == [10, 11, 12, 2, 2, 2]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    assert row["labels"].tolist() == [-100, 11, 12, -100, -100, -100]


def test_documents_come_back_whole_across_rows():
    dataset = pack([10, 11, 12], [20, 21], [30, 31, 32, 33, 34, 35], length=4)
    assert contents(dataset) == [(10, 11, 12), (20, 21), (30, 31, 32)]
    assert dataset.description["documents"] == 3
    assert dataset.description["tokens"] == 8


def test_empty_documents_change_nothing():
    full, holes = pack([10, 11], [20, 21], length=2), pack([], [10, 11], [], [20, 21], [], length=2)
    assert holes.description == full.description
    for a, b in zip(full, holes, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_dataset_of_nothing_has_no_rows():
    dataset = pack(length=4)
    assert (len(dataset), dataset.num_tokens, dataset.documents()) == (0, 0, [])


def test_index_counts_from_both_ends():
    dataset = pack([1, 2, 3, 4], length=2)
    assert dataset[-1]["input_ids"].tolist() == [3, 4]
    with pytest.raises(IndexError):
        dataset[2]


def test_hash_sees_tokens_and_borders():
    hashes = {
        pack(*documents, length=4).description["sha256"]
        for documents in ([[1, 2, 3, 4]], [[1, 2], [3, 4]], [[1, 2, 3, 5]])
    }
    assert len(hashes) == 3


def test_packed_documents_do_not_see_each_other():
    """A row of a stock model equals its documents run one by one: losses, logits, gradients."""
    model = tiny_llama(attn_implementation="sdpa")
    documents = [[4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [18, 19, 20]]
    row = {name: tensor[None] for name, tensor in pack(*documents, length=17)[0].items()}
    packed = model(**row, use_cache=False)
    packed.loss.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    ids = [torch.tensor([document]) for document in documents]
    alone = [model(input_ids=i, labels=i, use_cache=False) for i in ids]
    counts = [len(document) - 1 for document in documents]
    loss = sum(out.loss * n for out, n in zip(alone, counts, strict=True)) / sum(counts)
    loss.backward()
    logits = torch.cat([out.logits for out in alone], dim=1)
    torch.testing.assert_close(packed.logits, logits, atol=FLOAT32, rtol=0)
    torch.testing.assert_close(packed.loss, loss, atol=FLOAT32, rtol=0)
    torch.testing.assert_close(gradient, model.lm_head.weight.grad, atol=FLOAT32, rtol=0)
    separated = pack(*documents, length=17)[0]["position_ids"]
    joined = model(input_ids=row["input_ids"], position_ids=torch.arange(17)[None], use_cache=False)
    assert not torch.allclose(joined.logits, logits, atol=GUARD), "positions must matter"
    assert separated.tolist() == [*range(5), *range(9), *range(3)]


# Loading


def test_documents_are_closed_by_the_end_token(tmp_path):
    (tmp_path / "a.jsonl").write_text('"w0 w1 w2"\n""\n"w3 w4"\n')
    splits = load_data(str(tmp_path / "a.jsonl"), make_tokenizer(bos=True), length=9, held_out=0)
    assert sorted(contents(splits.train)) == [(BOS, 4, 5, 6, EOS), (BOS, 7, 8, EOS)]
    bare = load_data(
        str(tmp_path / "a.jsonl"), make_tokenizer(), length=5, held_out=0, eos_between=False
    )
    assert sorted(contents(bare.train)) == [(4, 5, 6), (7, 8)]
    assert len(bare.held_out) == 0


def test_splits_share_no_document(tmp_path):
    path = write_documents(tmp_path / "a.jsonl", 50)
    splits = load_data(path, make_tokenizer(), length=21, held_out=0.2)
    train, held_out = set(contents(splits.train)), set(contents(splits.held_out))
    assert not train & held_out
    assert len(train) == 40
    assert len(held_out) == 10


def test_repeated_documents_are_used_once(tmp_path):
    path = write_documents(tmp_path / "a.jsonl", 10)
    again = write_documents(tmp_path / "b.jsonl", 10)
    once = load_data(path, make_tokenizer(), length=21, held_out=0.2)
    twice = load_data([path, again, path], make_tokenizer(), length=21, held_out=0.2)
    assert contents(twice.train) == contents(once.train)


def test_one_document_is_split_by_position(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(WORDS))
    splits = load_data(str(tmp_path / "a.txt"), make_tokenizer(), length=10, held_out=0.3)
    ids = [*range(4, 64), EOS]
    assert contents(splits.train) == [tuple(ids[:40])]
    assert contents(splits.held_out) == [tuple(ids[43:53])]


def test_longest_documents_stay_in_training_where_none_fits_the_held_out_share(tmp_path):
    texts = [" ".join(WORDS[i : i + n]) for i, n in ((0, 30), (1, 20), (2, 40))]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, texts)))
    splits = load_data(str(tmp_path / "a.jsonl"), make_tokenizer(), length=4, held_out=0.02)
    assert splits.held_out.num_tokens == 20
    assert splits.train.num_tokens == 72


def test_seed_decides_order_and_split(tmp_path):
    path = write_documents(tmp_path / "a.jsonl", 30)
    first, same, other = (
        load_data(path, make_tokenizer(), length=21, held_out=0.2, seed=seed) for seed in (0, 0, 1)
    )
    assert same.train.description == first.train.description
    assert same.held_out.description == first.held_out.description
    assert contents(other.train) != contents(first.train)
    assert sorted(contents(other.held_out)) != sorted(contents(first.held_out))


def test_max_tokens_counts_both_splits(tmp_path):
    path = write_documents(tmp_path / "a.jsonl", 100)
    splits = load_data(path, make_tokenizer(), length=10, held_out=0.25, max_tokens=800)
    assert 0 <= 800 - splits.train.num_tokens - splits.held_out.num_tokens < 20
    assert 150 <= splits.held_out.num_tokens <= 200


def test_weights_are_shares_of_tokens(tmp_path):
    sources = [
        {"path": write_documents(tmp_path / "a.jsonl", 99, first=1), "weight": 3},
        {"path": write_documents(tmp_path / "b.jsonl", 100, first=2), "weight": 1},
    ]
    texts = [
        set(contents(load_data(s["path"], make_tokenizer(), length=21, held_out=0).train))
        for s in sources
    ]
    mixed = load_data(sources, make_tokenizer(), length=21, held_out=0, max_tokens=21 * 40)
    used = contents(mixed.train)
    assert [len(own & set(used)) for own in texts] == [30, 10]
    assert [source["weight"] for source in mixed.train.description["sources"]] == [3, 1]
    scarce = load_data(sources, make_tokenizer(), length=21, held_out=0)
    assert [len(own & set(contents(scarce.train))) for own in texts] == [99, 33]
    assert [own in texts[0] for own in used] != sorted([own in texts[0] for own in used])


def test_description_tells_what_was_read(tmp_path):
    path = write_documents(tmp_path / "a.jsonl", 10)
    description = load_data(path, make_tokenizer(), length=21, held_out=0.2).train.description
    (source,) = description["sources"]
    assert source["name"] == path
    assert source["documents"] == 10
    assert len(source["sha256"]) == len(description["sha256"]) == 64
    assert description["documents"] == description["rows"] == 8
    assert json.loads(json.dumps(description)) == description


def test_cache_gives_the_same_without_tokenising(tmp_path, monkeypatch):
    path = write_documents(tmp_path / "a.jsonl", 20)
    options = {"length": 21, "held_out": 0.2, "cache_dir": tmp_path / "cache"}
    first = load_data(path, make_tokenizer(), **options)
    other = load_data(path, make_tokenizer(bos=True), **options)
    assert len(list((tmp_path / "cache").iterdir())) == 2, "another tokenizer, another entry"
    assert contents(other.train) != contents(first.train)
    monkeypatch.setattr(linearize.data, "_tokenise", None)
    again = load_data(path, make_tokenizer(), **options)
    assert again.train.description == first.train.description
    assert again.held_out.description == first.held_out.description
    write_documents(tmp_path / "a.jsonl", 20, first=1)
    with pytest.raises(TypeError):
        load_data(path, make_tokenizer(), **options)


def test_cache_knows_tokenizers_written_in_python(tmp_path):
    path = write_documents(tmp_path / "a.jsonl", 20)
    options = {"length": 21, "held_out": 0.2, "cache_dir": tmp_path / "cache"}
    plain, longer = ByT5Tokenizer(), ByT5Tokenizer(extra_ids=130)
    assert not plain.is_fast
    first, again = (load_data(path, plain, **options) for _ in range(2))
    assert again.train.description == first.train.description
    assert len(list((tmp_path / "cache").iterdir())) == 1
    load_data(path, longer, **options)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_interrupted_write_leaves_no_cache_entry(tmp_path, monkeypatch):
    def interrupted(tensors, file):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    path = write_documents(tmp_path / "a.jsonl", 20)
    monkeypatch.setattr(linearize.data, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_data(path, make_tokenizer(), length=21, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, r"^data\.length: 1 is too short"),
        ({"length": 500}, r"^data\.length: 206 tokens of training text do not fill one row of 500"),
        ({"length": 21, "held_out": 1.0}, r"^data\.held_out: 1\.0 is not a share"),
        ({"length": 21, "held_out": -0.1}, r"^data\.held_out: -0\.1 is not a share"),
        ({"length": 21, "max_tokens": 0}, r"^data\.max_tokens: 0 is not a positive number"),
    ],
)
def test_impossible_amounts_are_refused(tmp_path, options, message):
    (tmp_path / "a.txt").write_text(" ".join(WORDS * 4)[:-1])
    rows = load_data(str(tmp_path / "a.txt"), make_tokenizer(), length=241, held_out=0).train
    assert rows.num_tokens == 241
    with pytest.raises(ValueError, match=message):
        load_data(str(tmp_path / "a.txt"), make_tokenizer(), **{"held_out": 35 / 241, **options})


def test_tokenizer_without_end_token_is_refused(tmp_path):
    path = write_documents(tmp_path / "a.jsonl", 20)
    with pytest.raises(
        ValueError, match=r"^data\.eos_between: .* no end-of-text token; use eos_bet"
    ):
        load_data(path, make_tokenizer(eos=False), length=21)
    assert len(load_data(path, make_tokenizer(eos=False), length=20, eos_between=False).train)


# Text that the teacher writes


def test_teacher_writes_documents_that_end(stories260k):
    model = AutoModelForCausalLM.from_pretrained(stories260k)
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    model.train()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    options = {"num_tokens": 1000, "length": 128, "batch_size": 8, "progress": False}
    splits = generate_data(model, tokenizer, **options)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert splits.train.num_tokens + splits.held_out.num_tokens <= 1000
    for document in [*splits.train.documents(), *splits.held_out.documents()]:
        assert document[0] == BOS
        assert not (document[1:-1] == EOS).any()
        assert len(document) <= 128
    assert "Once upon a time" in tokenizer.decode(torch.cat(splits.train.documents()))
    again = generate_data(model, tokenizer, **options)
    other = generate_data(model, tokenizer, **options, seed=1)
    assert again.train.description == splits.train.description
    assert contents(other.train) != contents(splits.train)


def test_teacher_without_begin_token_starts_anywhere():
    model = tiny_llama(eos_token_id=[2, 60])
    options = {"num_tokens": 2000, "length": 64, "batch_size": 16, "progress": False}
    splits = generate_data(model, make_tokenizer(), **options)
    documents = [document.tolist() for document in splits.train.documents()]
    starts = {document[0] for document in documents}
    assert len(starts) > 5
    assert not starts & {0, EOS}
    ends = [document[-1] for document in documents[:-1] if len(document) < 64]
    assert {2, 60} <= set(ends)
    assert sum(end not in (2, 60) for end in ends) <= 1, "only the last document written is cut"
    assert all(token not in (2, 60) for document in documents for token in document[1:-1])


def test_teacher_may_write_every_token_whatever_its_generation_settings():
    model = tiny_llama()
    model.generation_config.update(do_sample=True, top_k=1, repetition_penalty=5.0)
    options = {"num_tokens": 2000, "length": 100, "batch_size": 16, "progress": False}
    splits = generate_data(model, make_tokenizer(bos=True), **options, temperature=100.0)
    tokens = torch.cat(splits.train.documents())
    assert len(tokens.unique()) >= 60
    assert model.generation_config.top_k == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 10, "length": 20}, r"^data\.max_tokens: 10 tokens do not fill one row"),
        (
            {"num_tokens": 10, "length": 5, "temperature": 0},
            r"^data\.temperature: 0 is not above 0",
        ),
        ({"num_tokens": 0, "length": 5}, r"^data\.max_tokens: 0 is not a positive number"),
    ],
)
def test_teacher_is_not_asked_for_the_impossible(options, message):
    with pytest.raises(ValueError, match=message):
        generate_data(None, make_tokenizer(), **options)
