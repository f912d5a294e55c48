"""Every token once, in windows of the stated context, under each policy for the first token."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from linearize.evaluation.windows import UNSCORED, Windows, prefix_token, read_text

BOS, EOS = 1, 2


def make_tokenizer(*, bos=True, eos=True, begins_texts=False):
    """Tokenizer of the words a .. z with ids 4 .. 29."""
    words = ["<unk>", "<s>", "</s>", ".", *"abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.WordLevel(dict(zip(words, range(30))), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins_texts:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    names = {"bos_token": "<s>"} if bos else {}
    names |= {"eos_token": "</s>"} if eos else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **names)


def scored(windows, batch_size=3):
    """{target token: its context}, from all windows; each token of the streams is different."""
    found = {}
    for inputs, targets in windows.batches(batch_size):
        for row_in, row_out in zip(inputs.tolist(), targets.tolist(), strict=True):
            for i, target in enumerate(row_out):
                if target != UNSCORED:
                    assert target not in found
                    found[target] = row_in[: i + 1]
    return found


@pytest.mark.parametrize("stride", [1, 3, 5, 8])
@pytest.mark.parametrize("num_tokens", [2, 8, 9, 10, 37])
def test_every_token_once_with_the_promised_context(num_tokens, stride):
    stream = torch.arange(100, 100 + num_tokens)
    found = scored(Windows([stream], length=8, stride=stride))
    assert sorted(found) == stream[1:].tolist()
    for target, context in found.items():
        assert context == list(range(target - len(context), target))
        assert len(context) >= min(target - 100, 8 - stride + 1)


def test_context_does_not_depend_on_what_follows():
    streams = [torch.arange(100, 100 + n) for n in (23, 37)]
    short, long = (scored(Windows([stream], length=8, stride=3)) for stream in streams)
    assert short == {target: long[target] for target in short}


def test_documents_are_scored_one_by_one():
    streams = [torch.arange(100, 103), torch.arange(200, 217), torch.arange(300, 302)]
    windows = Windows(streams, length=4, stride=4)
    found = scored(windows)
    assert sorted(found) == [t for stream in streams for t in stream[1:].tolist()]
    assert all(context[0] // 100 == target // 100 for target, context in found.items())
    assert len(windows) == 1 + 4 + 1
    lengths = [inputs.shape[1] for inputs, _ in windows.batches(1)]
    assert lengths == sorted(lengths, reverse=True)


def test_each_window_can_begin_with_the_prefix():
    stream = torch.tensor([BOS, *range(100, 130)])
    windows = Windows([stream], length=8, stride=8, first_input=BOS)
    found = scored(windows)
    assert sorted(found) == list(range(100, 130))
    assert all(context[0] == BOS and BOS not in context[1:] for context in found.values())
    assert max(len(context) for context in found.values()) == 8
    assert stream.tolist() == [BOS, *range(100, 130)]


@pytest.mark.parametrize(
    ("bos", "eos", "expected"), [(True, True, 1), (False, True, 2), (False, False, None)]
)
def test_prefix_is_begin_then_end_then_none(bos, eos, expected):
    assert prefix_token(make_tokenizer(bos=bos, eos=eos)) == expected


@pytest.mark.parametrize(
    ("policy", "begins_texts", "recorded", "stream"),
    [
        ("none", True, "none", [4, 5, 6]),
        ("first", False, "first", [BOS, 4, 5, 6]),
        ("each", False, "each", [BOS, 4, 5, 6]),
        ("auto", True, "first", [BOS, 4, 5, 6]),
        ("auto", False, "none", [4, 5, 6]),
    ],
)
def test_policy_decides_how_a_text_begins(policy, begins_texts, recorded, stream):
    text = read_text(make_tokenizer(begins_texts=begins_texts), "a b c", bos=policy)
    assert text.bos == recorded
    assert [ids.tolist() for ids in text.streams] == [stream]
    first_input = BOS if recorded == "each" else None
    assert text.windows(length=4).first_input == first_input


@pytest.mark.parametrize(
    "ids",
    [[7, 8, 9], torch.tensor([7, 8, 9]), [torch.tensor([7, 8, 9])], torch.tensor([[7, 8, 9]])],
    ids=["list", "tensor", "tensors", "rows"],
)
def test_ids_are_taken_as_they_are(ids):
    text = read_text(make_tokenizer(begins_texts=True), ids)
    assert [stream.tolist() for stream in text.streams] == [[7, 8, 9]]
    assert (text.bos, text.num_words, text.num_bytes) == ("none", None, None)


def test_words_and_bytes_are_those_of_the_original_page():
    text = read_text(make_tokenizer(), " a b , c . ", bos="first")
    assert (text.num_words, text.num_bytes) == (7, 11)


def test_words_and_bytes_cover_exactly_the_scored_tokens():
    tokenizer = make_tokenizer()
    cut = read_text(tokenizer, ["a b", "c d é f g"], bos="first", max_tokens=5)
    assert [stream.tolist()[1:] for stream in cut.streams] == [[4, 5], [6, 7, 0]]
    assert (cut.num_words, cut.num_bytes) == (2 + 3, 3 + 6)
    context_only = read_text(tokenizer, "a b c", bos="none")
    assert context_only.num_bytes == len(" b c")


def test_text_of_a_cut_document_is_unknown_where_the_tokenizer_tells_no_offsets():
    tokenizer = ByT5Tokenizer()
    whole = read_text(tokenizer, "a b c", bos="first")
    assert (whole.prefix, whole.num_words, whole.num_bytes) == (1, 3, 5)
    cut = read_text(tokenizer, "a b c", bos="first", max_tokens=3)
    assert (cut.num_words, cut.num_bytes) == (None, None)


def test_token_limit_runs_over_documents():
    text = read_text(make_tokenizer(), ["a b", "c d", "e f"], bos="none", max_tokens=3)
    assert [stream.tolist() for stream in text.streams] == [[4, 5]]
    assert text.num_bytes == len(" b")


def test_documents_without_a_token_to_score_are_left_out():
    text = read_text(make_tokenizer(), ["", "a", "b c"], bos="none")
    assert [stream.tolist() for stream in text.streams] == [[5, 6]]


def test_hash_sees_tokens_and_documents():
    tokenizer = make_tokenizer()
    texts = (["a b c"], ["a b", "c d"], ["a b c d"], ["a b d"])
    assert len({read_text(tokenizer, text, bos="none").sha256() for text in texts}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bos": "second"}, r"^evaluate\.bos: 'second' is not one of auto, none, first, each"),
        ({"bos": "first"}, r"^evaluate\.bos: 'first' needs a begin- or end-of-text token"),
        ({"max_tokens": 0}, r"^evaluate\.max_tokens: 0 is not a positive number"),
        ({"max_tokens": 1}, r"^evaluate\.text: there is no token to score"),
    ],
)
def test_text_that_cannot_be_scored_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        read_text(make_tokenizer(bos=False, eos=False), "a b c", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, r"^evaluate\.length: 0 is not a positive number"),
        ({"length": 4, "stride": 5}, r"^evaluate\.stride: 5 must be at least 1 and at most the le"),
        ({"length": 4, "stride": 0}, r"^evaluate\.stride: 0 must be"),
    ],
)
def test_impossible_windows_are_refused(options, message):
    text = read_text(make_tokenizer(), "a b c")
    with pytest.raises(ValueError, match=message):
        text.windows(**options)


def test_impossible_batch_is_refused():
    with pytest.raises(ValueError, match=r"^evaluate\.batch_size: 0 is not a positive number"):
        next(Windows([torch.arange(9)], length=4, stride=4).batches(0))
