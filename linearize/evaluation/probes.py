"""Texts that hide a fact far back and then ask for it, made of any tokenizer's tokens.

Legend: R questions about one context, q tokens of a question, a of an answer, N sinks.

A context is filler with records in it; each question about it follows the whole context and has
the same number of tokens, so that contexts batch without padding and are read once for all their
questions. The tasks:

- associative: pairs of a key and a value, one token each; the key asks for its value. Several keys
  of one context are asked: multi-query associative recall (Arora et al. 2023, arXiv:2312.04927).
  Differs: each query follows the context by itself, so that no earlier answer gives a hint.
- passkey: one record in the filler (Mohtashami & Jaggi 2023, arXiv:2305.16300).
- needle: several records that differ in their key; the others of them distract.
- key_value: nothing but records, as many as fit (Liu et al. 2023, arXiv:2307.03172).

Each token of a value is drawn uniformly, and anew, from the same few words, the choices. So a
model that cannot see the record is right among the choices with probability 1 / choices, whatever
it is: there is nothing to guess from. A record never lies among the sinks.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linearize.evaluation.windows import begins_texts

KEY, VALUE = object(), object()  # slots of a record
Piece = Any  # text or a slot

NUM_CHOICES = 32
NUM_KEYS = 128
FEWEST_WORDS = 48  # below, ever less wordlike tokens are taken
# fmt: off
NOUNS = (
    "apple", "arm", "baby", "bag", "ball", "bank", "bed", "bell", "bird", "boat", "body", "book",
    "bottle", "bowl", "box", "boy", "bread", "bridge", "brother", "bus", "cake", "camp", "car",
    "card", "castle", "cat", "chair", "church", "circle", "city", "clock", "cloth", "cloud", "coat",
    "coin", "corn", "cow", "cup", "daughter", "desk", "doctor", "dog", "dress", "drum", "egg",
    "engine", "eye", "face", "farm", "father", "field", "finger", "fire", "fish", "flag", "flower",
    "foot", "forest", "friend", "fruit", "garden", "gate", "gift", "girl", "glass", "gold",
    "hair", "hall", "hand", "hat", "heart", "hill", "horse", "hotel", "island", "key", "king",
    "kitchen", "knife", "lady", "lake", "lamp", "leaf", "leg", "letter", "lion", "map", "market",
    "meat", "milk", "mirror", "money", "moon", "mother", "mountain", "mouth", "nose", "ocean",
    "office", "paper", "pen", "pencil", "picture", "plate", "pocket", "queen", "ring", "roof",
    "rope", "rose", "salt", "sand", "ship", "shirt", "shoe", "shop", "silver", "sister", "snow",
    "soldier", "song", "star", "stone", "sugar", "table", "tail", "teacher", "tower", "town",
    "train", "tree", "uncle", "valley", "village", "wall", "watch", "wheel", "window", "wine",
    "winter", "wolf", "wood",
)
# fmt: on
WORDLIKE = (r"[▁Ġ][a-z]{2,}", r"[▁Ġ]?[A-Za-z]+", r"(?s:.*)")
FILLER = (
    " It had rained all night, and now it was quiet.",
    " Nobody was in a hurry, and nobody said much.",
    " Somebody had left the light on again.",
    " In the end they all went back to where they came from.",
    " There was still a lot to do before it got dark.",
    " What they wanted was simple enough.",
    " It took longer than anyone had thought.",
    " Later, when it was warm again, they talked about it.",
    " The others were already there, waiting.",
    " So it went on, day after day, as it always had.",
)


@dataclass(frozen=True)
class Task:
    """A kind of record, and how it is asked for."""

    record: tuple[Piece, ...]
    question: tuple[Piece, ...]
    key_tokens: int
    value_tokens: int
    num_questions: int
    num_records: int | None  # None: as many as fit, without filler


TASKS = {
    "associative": Task(
        record=(KEY, VALUE),
        question=(KEY,),
        key_tokens=1,
        value_tokens=1,
        num_questions=8,
        num_records=16,
    ),
    "passkey": Task(
        record=(" The pass key is:", VALUE, ". Remember it:", VALUE, " is the pass key."),
        question=(" What is the pass key? The pass key is:",),
        key_tokens=0,
        value_tokens=3,
        num_questions=1,
        num_records=1,
    ),
    "needle": Task(
        record=("\nThe word for", KEY, ":", VALUE, "\n"),
        question=("\nThe word for", KEY, ":"),
        key_tokens=1,
        value_tokens=2,
        num_questions=4,
        num_records=4,
    ),
    "key_value": Task(
        record=(KEY, ":", VALUE, "\n"),
        question=(KEY, ":"),
        key_tokens=2,
        value_tokens=1,
        num_questions=8,
        num_records=None,
    ),
}


class Probe(NamedTuple):
    """One context and its questions.

    `distances` are the tokens from the last of a record's value to the end of its question: from W
    on, no token of the value is in the window of the question's last token.
    """

    context: Tensor  # [length - q]
    questions: Tensor  # [R, q]
    answers: Tensor  # [R, a]
    distances: Tensor  # [R]


class Lexicon:
    """What probes are made of: a tokenizer's keys, values and filler, as token ids.

    No key and no value occurs in the filler or in the words of a record.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.prefix = [tokenizer.bos_token_id] if begins_texts(tokenizer) else []
        self.encode = _encoder(tokenizer)
        self.filler = [self.encode(sentence) for sentence in FILLER]
        pieces = {
            piece
            for task in TASKS.values()
            for piece in (*task.record, *task.question)
            if isinstance(piece, str)
        }
        used = {id for ids in (*self.filler, *map(self.encode, pieces)) for id in ids}
        words = _words(tokenizer, used)
        if len(words) < 4:
            raise ValueError(
                f"recall: this tokenizer has {len(words)} tokens beside those of the filler; "
                "4 are needed for keys and values"
            )
        num_choices = min(NUM_CHOICES, len(words) // 2)
        self.values = words[:num_choices]
        self.keys = words[num_choices:][:NUM_KEYS]

    def fill(self, pieces: Sequence[Piece], key: Sequence[int], value: Sequence[int]) -> list[int]:
        """Token ids of a record or question."""
        ids: list[int] = []
        for piece in pieces:
            slot = key if piece is KEY else value
            ids += self.encode(piece) if isinstance(piece, str) else slot
        return ids


def make_probe(
    lexicon: Lexicon,
    name: str,
    *,
    length: int,
    sample: int,
    num_samples: int,
    sinks: int = 0,
    seed: int = 0,
) -> Probe:
    """The sample-th of so many probes of a task; `length` tokens lead to the first of an answer.

    Over the samples, records lie evenly from the first token after the sinks to the last.

    Raises:
        ValueError: No record fits into the length.
    """
    task, draw = TASKS[name], random.Random(f"{seed} {name} {length} {sample}")
    dummy_key, dummy_value = [0] * task.key_tokens, [0] * task.value_tokens
    size = len(lexicon.fill(task.record, dummy_key, dummy_value))
    room = length - len(lexicon.fill(task.question, dummy_key, ()))
    lead = max(sinks, len(lexicon.prefix))
    fit = (room - lead) // size
    num_keys = len(lexicon.keys) ** task.key_tokens
    count = min(fit, task.num_records or fit, num_keys)
    if count < 1:
        raise ValueError(
            f"recall: a context of {length} tokens has no room for a record of '{name}'; "
            f"use {length + size - room + lead} tokens or more"
        )
    keys = _different(lexicon.keys, task.key_tokens, count, draw)
    values = [draw.choices(lexicon.values, k=task.value_tokens) for _ in range(count)]
    records = [lexicon.fill(task.record, *pair) for pair in zip(keys, values, strict=True)]
    filler, borders = _filler(lexicon, room - count * size - len(lexicon.prefix), draw)
    if task.num_records is None:
        borders = borders[-1:]
    borders = [border for border in borders if border + len(lexicon.prefix) >= lead]
    depths = [(i + (sample + 0.5) / num_samples) / count for i in range(count)]
    context, ends = _insert(records, depths, filler, borders)
    asked = draw.sample(range(count), min(count, task.num_questions))
    return Probe(
        context=torch.tensor(lexicon.prefix + context),
        questions=torch.tensor([lexicon.fill(task.question, keys[i], ()) for i in asked]),
        answers=torch.tensor([values[i] for i in asked]),
        distances=torch.tensor(
            [length - len(lexicon.prefix) - ends[i] + _trailing(lexicon, task) for i in asked]
        ),
    )


def _trailing(lexicon: Lexicon, task: Task) -> int:
    """Tokens of a record after its value, which may stand there twice."""
    last = len(task.record) - 1 - task.record[::-1].index(VALUE)
    return len(lexicon.fill(task.record[last + 1 :], (), ()))


def _filler(lexicon: Lexicon, size: int, draw: random.Random) -> tuple[list[int], list[int]]:
    """So many tokens of filler, and where in it a sentence ends; its first sentence may be cut."""
    sentences: list[list[int]] = []
    while sum(map(len, sentences)) < size:
        sentences.append(draw.choice(lexicon.filler))
    total = sum(map(len, sentences))
    ids = [id for sentence in sentences for id in sentence][total - size :]
    borders, end = [], size - total
    for sentence in sentences:
        end += len(sentence)
        borders.append(end)
    return ids, borders or [0]


def _insert(
    records: Sequence[list[int]], depths: Sequence[float], filler: list[int], borders: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Filler with the records at the borders nearest their depths, and where each record ends."""
    spots = [min(borders, key=lambda x: abs(x - depth * len(filler))) for depth in depths]
    context: list[int] = []
    ends, begin = [], 0
    for record, spot in zip(records, spots, strict=True):
        context += filler[begin:spot] + record
        ends.append(len(context))
        begin = spot
    return context + filler[begin:], ends


def _different(
    alphabet: Sequence[int], size: int, count: int, draw: random.Random
) -> list[tuple[int, ...]]:
    """So many different tuples of tokens, in random order; all empty if `size` is 0."""
    if size == 0:
        return [()] * count
    numbers = draw.sample(range(len(alphabet) ** size), count)
    base = len(alphabet)
    return [tuple(alphabet[number // base**i % base] for i in range(size)) for number in numbers]


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """A function from text to the tokens it has in the middle of a sentence."""
    before = tokenizer("a", add_special_tokens=False)["input_ids"]

    def encode(text: str) -> list[int]:
        ids = tokenizer("a" + text, add_special_tokens=False)["input_ids"]
        if ids[: len(before)] == before:
            return ids[len(before) :]
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return encode


def _words(tokenizer: Any, used: set[int]) -> list[int]:
    """Tokens that are not used otherwise: nouns, or else whatever is most like a word.

    Values come from the front of the list and keys from behind, so it is mixed once and for all.
    """
    vocabulary = tokenizer.get_vocab()
    taken = used | set(tokenizer.all_special_ids)
    free = {token: id for token, id in vocabulary.items() if id not in taken}
    words = [free[mark + noun] for noun in NOUNS for mark in "Ġ▁" if mark + noun in free]
    for pattern in WORDLIKE:
        if len(words) >= FEWEST_WORDS:
            break
        words = sorted(id for token, id in free.items() if re.fullmatch(pattern, token))
    random.Random(0).shuffle(words)
    return words
