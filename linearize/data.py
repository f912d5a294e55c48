"""Packed token rows with document boundaries: from files, a hub dataset, or the teacher's own text.

Legend: B batch, T tokens of a row (`length`).

A document is tokenised once, with the tokenizer's own special tokens, and closed by the end-of-text
token. Documents are shuffled by the seed, split into train and held-out, and laid end to end into
rows of T tokens. `position_ids` restart at every document and at every row; that is how models tell
documents apart where there is no attention mask, so batches carry none. Labels equal the inputs
(the loss shifts them) except -100 at the first token of a document or row, which nothing predicts,
and at padding.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from linearize.sources import Entry, Source, distinct, parse_sources, read_documents, sha256

IGNORED = -100
TEXTS_PER_CALL = 256


class TokenDataset(Dataset):
    """Rows of T token ids; item i never changes, so a sampler's seed fixes the order of training.

    An item is `{"input_ids": [T], "position_ids": [T], "labels": [T]}`, int64. What does not fill
    the last row is dropped, unless it is the only row: then it is padded, and the padding is a
    document of its own.
    """

    def __init__(
        self,
        documents: Sequence[np.ndarray],
        *,
        length: int,
        pad_id: int = 0,
        description: Mapping[str, Any] | None = None,
    ):
        """Packs documents, each a one-dimensional array of token ids, in the given order."""
        if length < 2:
            raise ValueError(f"data.length: {length} is too short, a row needs at least 2 tokens")
        documents = [document for document in documents if len(document)]
        tokens = _joined(documents)
        if len(tokens) >= length:
            tokens = tokens[: len(tokens) // length * length]
        self.length = length
        self.num_tokens = len(tokens)
        offsets = np.cumsum([0, *map(len, documents)])[:-1]
        self._offsets = offsets[offsets < self.num_tokens]
        self._tokens = np.pad(tokens, (0, -len(tokens) % length), constant_values=pad_id)
        self._starts = np.zeros(len(self._tokens), dtype=bool)
        self._starts[self._offsets] = True
        self._starts[self.num_tokens : self.num_tokens + 1] = True
        self._starts[::length] = True
        self.description = {
            **(description or {}),
            "documents": len(self._offsets),
            "tokens": self.num_tokens,
            "rows": len(self),
            "length": length,
            "sha256": sha256(
                [
                    self._tokens[: self.num_tokens].tobytes(),
                    self._offsets.astype(np.int64).tobytes(),
                ]
            ),
        }

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Row `index`, its positions inside each document, and its labels."""
        begin = range(len(self))[index] * self.length
        row = slice(begin, begin + self.length)
        input_ids = torch.from_numpy(self._tokens[row].astype(np.int64))
        starts = torch.from_numpy(self._starts[row])
        steps = torch.arange(self.length)
        labels = input_ids.masked_fill(starts | (steps + begin >= self.num_tokens), IGNORED)
        position_ids = steps - steps.where(starts, 0).cummax(0).values
        return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}

    def documents(self) -> list[torch.Tensor]:
        """Token ids of each document, whole again across rows; the last one may have been cut."""
        pieces = np.split(self._tokens[: self.num_tokens].astype(np.int64), self._offsets[1:])
        return [torch.from_numpy(piece) for piece in pieces if len(piece)]


@dataclass(frozen=True)
class Splits:
    """Train and held-out rows; no document is in both."""

    train: TokenDataset
    held_out: TokenDataset


def load_data(
    sources: Entry | Sequence[Entry],
    tokenizer: Any,
    *,
    length: int,
    seed: int = 0,
    held_out: float = 0.02,
    max_tokens: int | None = None,
    eos_between: bool = True,
    cache_dir: str | Path | None = None,
) -> Splits:
    """Train and held-out rows of real text.

    Empty documents and exact repetitions are dropped. The split is by document, so that train and
    held-out share none; a text that is one single document is split by position, its end held out.

    Args:
        sources: One source or several. A source is a path or glob of .txt (a document per file),
            .jsonl, .json or .parquet (a document per row), or the name of a hub dataset, "name",
            "name:config" or "name:config:column". As a mapping it may say more:
            `{"path": ..., "column": ..., "weight": ...}`. Weights are shares of the tokens; no
            document is repeated to reach a share, the total becomes smaller.
        tokenizer: A Hugging Face tokenizer.
        length: Tokens per row, T.
        seed: Order of the documents, and by it the split.
        held_out: Share of the tokens that is held out; 0 for none.
        max_tokens: Tokens to use of all the text, both splits together.
        eos_between: Close each document with the tokenizer's end-of-text token.
        cache_dir: Folder that keeps the tokenised documents for the next time.

    Raises:
        FileNotFoundError: A file or hub dataset is not there.
        ValueError: A source cannot be read as asked, or holds too little text.
    """
    parsed = parse_sources(sources)
    _check_amounts(length=length, held_out=held_out, max_tokens=max_tokens)
    if eos_between and tokenizer.eos_token_id is None:
        raise ValueError(
            "data.eos_between: the tokenizer has no end-of-text token; use eos_between: false"
        )
    seen: set[str] = set()
    texts = [
        list(distinct(read_documents(source, max_tokens=max_tokens), seen)) for source in parsed
    ]
    origins = [_describe(source, own) for source, own in zip(parsed, texts, strict=True)]
    shares = [source.weight for source in parsed if source.weight is not None]
    if not shares:  # one pool in which every document counts the same
        texts, shares = [list(chain.from_iterable(texts))], [1.0]
    rng = np.random.default_rng(seed)
    pools = []
    for share, pool in zip(shares, texts, strict=True):
        budget = None if max_tokens is None else round(share / sum(shares) * max_tokens)
        order = [pool[i] for i in rng.permutation(len(pool))]
        pools.append(_tokenise_cached(order, tokenizer, budget, eos_between, cache_dir))
    unit = min(_count(pool) / share for share, pool in zip(shares, pools, strict=True))
    pools = [_trim(pool, round(share * unit)) for share, pool in zip(shares, pools, strict=True)]
    return _splits(pools, rng, tokenizer, origins, length=length, held_out=held_out, seed=seed)


@torch.no_grad()
def generate_data(
    model: Any,
    tokenizer: Any,
    *,
    num_tokens: int,
    length: int,
    seed: int = 0,
    held_out: float = 0.05,
    batch_size: int = 32,
    temperature: float = 1.0,
    progress: bool = True,
) -> Splits:
    """Train and held-out rows of text that the model writes itself: no data set needed.

    Documents are sampled from the model's own distribution (all tokens allowed, whatever its
    generation settings say), from the begin-of-text token on, or from random ordinary tokens where
    the tokenizer has none. They end at an end-of-text token or at T tokens. The same seed and batch
    size give the same text on the same computer. A converted model writes as itself; inside
    `teacher(model)` it writes as its teacher.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        num_tokens: Tokens to write, both splits together.
        length: Tokens per row, T, and at most per document.
        seed: Seeds start tokens, sampling, and the split.
        held_out: Share of the tokens that is held out; 0 for none.
        batch_size: Documents written at the same time; more is faster.
        temperature: 1 samples what the model believes; below 1 is more predictable.
        progress: Show a bar.

    Raises:
        ValueError: An amount makes no sense, or is too small for one row.
    """
    _check_amounts(length=length, held_out=held_out, max_tokens=num_tokens)
    if temperature <= 0:
        raise ValueError(
            f"data.temperature: {temperature} is not above 0; the teacher's text must be sampled"
        )
    if num_tokens < length:
        raise ValueError(
            f"data.max_tokens: {num_tokens} tokens do not fill one row of data.length {length}"
        )
    documents: list[np.ndarray] = []
    devices = [model.device] if model.device.type == "cuda" else []
    bar = tqdm(total=num_tokens, desc="teacher writes", unit="tok", disable=not progress)
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=devices), bar:
            torch.manual_seed(seed)
            while (missing := num_tokens - _count(documents)) > 0:
                written = _write(model, tokenizer, batch_size, length, temperature)
                documents += written
                bar.update(min(missing, _count(written)))
    finally:
        model.train(was_training)
    pool = _trim(documents, num_tokens)
    origin = {"name": "self", "documents": len(pool), "temperature": temperature}
    rng = np.random.default_rng(seed)
    return _splits([pool], rng, tokenizer, [origin], length=length, held_out=held_out, seed=seed)


def _tokenise_cached(
    texts: Sequence[str],
    tokenizer: Any,
    budget: int | None,
    eos: bool,
    cache_dir: str | Path | None,
) -> list[np.ndarray]:
    """Documents of token ids, from the cache where the same texts met the same tokenizer before."""
    if cache_dir is None:
        return list(_tokenise(texts, tokenizer, budget, eos))
    key = sha256([sha256(texts), _tokenizer_state(tokenizer), repr((budget, eos))])
    file = Path(cache_dir) / f"tokens-{key[:32]}.safetensors"
    if not file.exists():
        documents = list(_tokenise(texts, tokenizer, budget, eos))
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        _save_atomically(file, {"tokens": _joined(documents), "lengths": lengths})
        return documents
    stored = load_file(file)
    return np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])


def _tokenise(
    texts: Sequence[str], tokenizer: Any, budget: int | None, eos: bool
) -> Iterator[np.ndarray]:
    """Yields documents until together they hold `budget` tokens; the last one is cut to fit."""
    missing = budget
    remaining = iter(texts)
    while batch := list(islice(remaining, TEXTS_PER_CALL)):
        for ids in tokenizer(batch, return_attention_mask=False, verbose=False)["input_ids"]:
            if eos and ids[-1:] != [tokenizer.eos_token_id]:
                ids = [*ids, tokenizer.eos_token_id]
            document = np.array(ids[:missing], dtype=np.int32)
            if len(document):
                yield document
            if missing is not None:
                missing -= len(document)
                if missing <= 0:
                    return


def _tokenizer_state(tokenizer: Any) -> str:
    """Everything that decides how a tokenizer splits text."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    return json.dumps(
        [
            type(tokenizer).__name__,
            sorted(tokenizer.get_vocab().items()),
            str(tokenizer.init_kwargs),
        ]
    )


def _save_atomically(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a file that is either whole or not there, also when two processes write it at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".unfinished-") as folder:
        save_file(tensors, Path(folder) / file.name)
        os.replace(Path(folder) / file.name, file)


def _write(
    model: Any, tokenizer: Any, batch_size: int, length: int, temperature: float
) -> list[np.ndarray]:
    """A batch of documents that the model writes, each up to its first end-of-text token."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    starts = _start_tokens(tokenizer, batch_size).to(model.device)
    longest = min(
        length, getattr(model.config.get_text_config(), "max_position_embeddings", length)
    )
    written = model.generate(
        starts,
        attention_mask=torch.ones_like(starts),
        max_new_tokens=longest - 1,
        min_new_tokens=0,
        do_sample=True,
        num_beams=1,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        eos_token_id=sorted(ends) or None,
        pad_token_id=min(ends, default=0),
    )
    documents = []
    for ids in written.cpu().numpy().astype(np.int32):
        stops = np.flatnonzero(np.isin(ids[1:], sorted(ends)))
        documents.append(ids[: stops[0] + 2] if len(stops) else ids)
    return documents


def _start_tokens(tokenizer: Any, batch_size: int) -> torch.Tensor:
    """First tokens [B, 1]: begin-of-text, or random ordinary ones."""
    if tokenizer.bos_token_id is not None:
        return torch.full((batch_size, 1), tokenizer.bos_token_id)
    ordinary = torch.tensor(
        sorted(set(range(tokenizer.vocab_size)) - set(tokenizer.all_special_ids))
    )
    return ordinary[torch.randint(len(ordinary), (batch_size, 1))]


def _check_amounts(*, length: int, held_out: float, max_tokens: int | None) -> None:
    if length < 2:
        raise ValueError(f"data.length: {length} is too short, a row needs at least 2 tokens")
    if not 0 <= held_out < 1:
        raise ValueError(f"data.held_out: {held_out} is not a share; use at least 0 and below 1")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"data.max_tokens: {max_tokens} is not a positive number of tokens")


def _splits(
    pools: Sequence[Sequence[np.ndarray]],
    rng: np.random.Generator,
    tokenizer: Any,
    origins: Sequence[Mapping[str, Any]],
    *,
    length: int,
    held_out: float,
    seed: int,
) -> Splits:
    """Splits each pool, shuffles what is trained on, packs both."""
    parts = [_split(pool, held_out) for pool in pools]
    train = list(chain.from_iterable(kept for kept, _ in parts))
    held = list(chain.from_iterable(out for _, out in parts))
    if _count(train) < length:
        raise ValueError(
            f"data.length: {_count(train)} tokens of training text do not fill one row of "
            f"{length}; use a shorter length or more text"
        )
    train = [train[i] for i in rng.permutation(len(train))]
    origin = {"sources": list(origins), "tokenizer": tokenizer.name_or_path, "seed": seed}
    pad_id = tokenizer.eos_token_id or 0
    return Splits(
        train=TokenDataset(train, length=length, pad_id=pad_id, description=origin),
        held_out=TokenDataset(held, length=length, pad_id=pad_id, description=origin),
    )


def _split(
    documents: Sequence[np.ndarray], share: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Documents to train on, and held-out ones with about that share of the tokens."""
    target = round(share * _count(documents))
    if target == 0:
        return list(documents), []
    if len(documents) == 1:
        return [documents[0][:-target]], [documents[0][-target:]]
    chosen: set[int] = set()
    missing = target
    for i, document in enumerate(documents):
        if len(document) <= missing:
            chosen.add(i)
            missing -= len(document)
    if not chosen:
        chosen = {min(range(len(documents)), key=lambda i: len(documents[i]))}
    return (
        [document for i, document in enumerate(documents) if i not in chosen],
        [documents[i] for i in sorted(chosen)],
    )


def _trim(documents: Sequence[np.ndarray], budget: int) -> list[np.ndarray]:
    """The first documents that hold `budget` tokens, the last one cut to fit."""
    kept = []
    for document in documents:
        if budget <= 0:
            break
        kept.append(document[:budget])
        budget -= len(document)
    return kept


def _describe(source: Source, texts: Sequence[str]) -> dict[str, Any]:
    weight = {} if source.weight is None else {"weight": source.weight}
    return {"name": source.path, "documents": len(texts), "sha256": sha256(texts), **weight}


def _count(documents: Iterable[np.ndarray]) -> int:
    return sum(len(document) for document in documents)


def _joined(documents: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int32), *documents]).astype(np.int32)
