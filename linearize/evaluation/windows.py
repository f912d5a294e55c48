"""Windows over the tokens of a text, made so that every token is scored exactly once.

Legend: B batch, T tokens of a window (`length`).

Protocol. A document is a stream of tokens. With stride s, window k reads tokens k*s .. k*s + T - 1
with a fresh state and scores those next tokens that no earlier window has scored: T of them in the
first window, s in each later one. A token's context depends on nothing after it, and is at least
T - s + 1 tokens long as soon as the stream is. Documents are scored one by one.

The begin-of-text token (`bos`) is recorded in the result and never scored:

- "none": the stream is the text, and its first token is only context.
- "first": the prefix token precedes the text, so that all tokens of the text are scored.
- "each": as "first", and every later window reads the prefix token in place of its first token.
- "auto": "first" if the tokenizer itself begins a text with its begin-of-text token, else "none".

The prefix token is the tokenizer's begin-of-text token, or else its end-of-text token. Token ids
given in place of text are taken as they are: there "auto" is "none".
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BOS_POLICIES = ("auto", "none", "first", "each")
UNSCORED = -100

Documents = str | Sequence[str] | Sequence[int] | Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Text:
    """Documents as streams of token ids, and how much text their scored tokens stand for."""

    streams: Sequence[Tensor]
    bos: str
    prefix: int | None
    num_words: int | None
    num_bytes: int | None

    def windows(self, *, length: int, stride: int | None = None) -> "Windows":
        """The windows that score each token once."""
        stride = length if stride is None else stride
        if length < 1:
            raise ValueError(f"evaluate.length: {length} is not a positive number of tokens")
        if not 1 <= stride <= length:
            raise ValueError(
                f"evaluate.stride: {stride} must be at least 1 and at most the length {length}"
            )
        first_input = self.prefix if self.bos == "each" else None
        return Windows(self.streams, length=length, stride=stride, first_input=first_input)

    def sha256(self) -> str:
        """Hash of the token ids, so that two results can show that they scored the same."""
        digest = hashlib.sha256()
        for stream in self.streams:
            digest.update(len(stream).to_bytes(8, "little") + stream.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Windows:
    """Windows of T inputs over streams; `first_input` replaces the first input of each."""

    streams: Sequence[Tensor]
    length: int
    stride: int
    first_input: int | None = None

    def __len__(self) -> int:
        """Number of windows."""
        return len(self._places())

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields inputs and targets, both [B, T]; target -100: not scored.

        Longer windows come first. Shorter ones of a batch are padded on the right, where a causal
        model's scored tokens cannot see it.
        """
        if batch_size < 1:
            raise ValueError(f"evaluate.batch_size: {batch_size} is not a positive number")
        places = self._places()
        for i in range(0, len(places), batch_size):
            rows = [self._window(*place) for place in places[i : i + batch_size]]
            inputs, targets = zip(*rows, strict=True)
            yield (
                nn.utils.rnn.pad_sequence(list(inputs), batch_first=True),
                nn.utils.rnn.pad_sequence(list(targets), batch_first=True, padding_value=UNSCORED),
            )

    def _places(self) -> list[tuple[int, int]]:
        """Stream and first token of each window, longest window first."""
        new_target = self.length - self.stride + 1  # of a later window, relative to its begin
        places = [
            (number, begin)
            for number, stream in enumerate(self.streams)
            for begin in range(0, len(stream) - 1, self.stride)
            if begin == 0 or begin + new_target < len(stream)
        ]
        return sorted(
            places, key=lambda place: -min(self.length, len(self.streams[place[0]]) - 1 - place[1])
        )

    def _window(self, number: int, begin: int) -> tuple[Tensor, Tensor]:
        tokens = self.streams[number][begin : begin + self.length + 1]
        inputs, targets = tokens[:-1].clone(), tokens[1:].clone()
        if begin > 0:
            targets[: self.length - self.stride] = UNSCORED
        if self.first_input is not None:
            inputs[0] = self.first_input
        return inputs, targets


def prefix_token(tokenizer: Any) -> int | None:
    """The token that stands before a text: begin-of-text, else end-of-text, else None."""
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    return tokenizer.eos_token_id


def read_text(
    tokenizer: Any,
    text_or_ids: Documents,
    *,
    bos: str = "auto",
    max_tokens: int | None = None,
) -> Text:
    """Documents as token streams under a policy for the begin-of-text token.

    Raises:
        ValueError: An unknown policy, no token to put first, or nothing to score.
    """
    if bos not in BOS_POLICIES:
        raise ValueError(f"evaluate.bos: '{bos}' is not one of {', '.join(BOS_POLICIES)}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"evaluate.max_tokens: {max_tokens} is not a positive number of tokens")
    documents = _documents(text_or_ids)
    is_text = all(isinstance(document, str) for document in documents)
    if bos == "auto":
        bos = "first" if is_text and begins_texts(tokenizer) else "none"
    prefix = None if bos == "none" else prefix_token(tokenizer)
    if bos != "none" and prefix is None:
        raise ValueError(
            f"evaluate.bos: '{bos}' needs a begin- or end-of-text token and the tokenizer has "
            "none; use 'none'"
        )
    head = [] if prefix is None else [prefix]
    streams: list[Tensor] = []
    pieces: list[str | None] = []
    for document in documents:
        ids, piece = _tokens(tokenizer, document, max_tokens, skip_first=prefix is None)
        if max_tokens is not None:
            max_tokens -= len(ids)
        if len(head) + len(ids) > 1:
            streams.append(torch.tensor(head + ids))
            pieces.append(piece)
    if not streams:
        raise ValueError("evaluate.text: there is no token to score; the text is too short")
    counted = [piece for piece in pieces if piece is not None]
    has_all = len(counted) == len(pieces)
    return Text(
        streams,
        bos=bos,
        prefix=prefix,
        num_words=sum(len(re.split(r"\s+", piece)) for piece in counted) if has_all else None,
        num_bytes=sum(len(piece.encode()) for piece in counted) if has_all else None,
    )


def _documents(text_or_ids: Any) -> list[Any]:
    """A list of documents, each a string or a list of ids."""
    if isinstance(text_or_ids, str):
        return [text_or_ids]
    items = list(text_or_ids)
    if all(isinstance(item, str) for item in items):
        return items
    if isinstance(text_or_ids, Tensor):
        return [text_or_ids.tolist()] if text_or_ids.dim() == 1 else text_or_ids.tolist()
    if all(isinstance(item, int) for item in items):
        return [items]
    return [torch.as_tensor(item).tolist() for item in items]


def begins_texts(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a begin-of-text token before a text by itself."""
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def _tokens(
    tokenizer: Any, document: str | list[int], max_tokens: int | None, *, skip_first: bool
) -> tuple[list[int], str | None]:
    """Token ids of a document, and the part of its text that is scored (None: unknown)."""
    if not isinstance(document, str):
        return document[:max_tokens], None
    encoded = tokenizer(
        document,
        add_special_tokens=False,
        return_offsets_mapping=tokenizer.is_fast,
        verbose=False,
    )
    ids = encoded["input_ids"][:max_tokens]
    is_cut = len(ids) < len(encoded["input_ids"])
    if not tokenizer.is_fast:
        return ids, None if is_cut or skip_first else document
    offsets = encoded["offset_mapping"]
    begin = offsets[0][1] if skip_first and ids else 0
    end = offsets[len(ids) - 1][1] if is_cut and ids else len(document)
    return ids, document[begin:end]
