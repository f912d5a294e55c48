"""Texts of the sources that a recipe names: local files, globs, hub datasets."""

import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HUB_CHARACTERS_PER_TOKEN = 10  # reads enough of an endless hub dataset for `max_tokens`


@dataclass(frozen=True)
class Source:
    """A file, glob or hub dataset, its column of text, its share of the tokens.

    `key` is where the recipe names it, for error messages.
    """

    path: str
    column: str = "text"
    weight: float | None = None
    key: str = "data.sources"


Entry = str | Mapping[str, Any]


def parse_sources(entries: Entry | Sequence[Entry], *, key: str = "data.sources") -> list[Source]:
    """Sources as a recipe writes them: a string, a mapping with `path`, or a list of these.

    Raises ValueError for an entry that is not understood, and for weights that only some have.
    """
    entries = [entries] if isinstance(entries, str | Mapping) else list(entries)
    if not entries:
        raise ValueError(f"{key}: the list is empty; name a file, a glob or a hub dataset")
    sources = []
    for entry in entries:
        values: dict[str, Any] = {"path": entry} if isinstance(entry, str) else dict(entry)
        if "path" not in values or values.keys() - {"path", "column", "weight"}:
            raise ValueError(f"{key}: {entry} must have a path, and may have a column and a weight")
        source = Source(**values, key=key)
        if source.path == "self":
            raise ValueError(
                f"{key}: 'self' is text that the teacher writes (generate_data); use it alone"
            )
        if source.weight is not None and not source.weight > 0:
            raise ValueError(f"{key}: weight {source.weight} of {source.path} is not above 0")
        sources.append(source)
    if len({source.weight is None for source in sources}) > 1:
        raise ValueError(f"{key}: only some sources have a weight; give one to all of them or none")
    return sources


def read_documents(
    source: Entry | Source, *, max_tokens: int | None = None, key: str = "data.sources"
) -> list[str]:
    """Texts of one source, in its own order, without empty ones.

    Args:
        source: As in `parse_sources`.
        max_tokens: Read no more of a hub dataset than so many tokens can need; files: all.
        key: Where the recipe names the source, for error messages.

    Raises:
        FileNotFoundError: A file or hub dataset is not there.
        ValueError: A file cannot be read as asked, or the source holds no text.
    """
    (parsed,) = [source] if isinstance(source, Source) else parse_sources(source, key=key)
    texts = [text for text in _read(parsed, max_tokens) if text.strip()]
    if not texts:
        raise ValueError(f"{parsed.key}: {parsed.path} holds no text")
    return texts


def distinct(texts: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Yields the texts whose hash is not in `seen`, and adds it."""
    for text in texts:
        digest = sha256([text])
        if digest not in seen:
            seen.add(digest)
            yield text


def sha256(pieces: Iterable[str | bytes]) -> str:
    """Hexadecimal SHA-256 of pieces whose borders count."""
    digest = hashlib.sha256()
    for piece in pieces:
        content = piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _read(source: Source, max_tokens: int | None) -> Iterator[str]:
    """Yields the texts of a path that exists or looks like a file, else of a hub dataset."""
    path = Path(source.path).expanduser()
    if path.is_dir():
        raise ValueError(
            f"{source.key}: {path} is a folder; name its files, for example {path / '*.jsonl'}"
        )
    is_glob = glob.escape(str(path)) != str(path) and not path.exists()
    if not is_glob and not path.exists() and path.suffix.lower() not in READERS:
        yield from _read_hub(source, max_tokens)
        return
    files = sorted(map(Path, glob.glob(str(path), recursive=True))) if is_glob else [path]
    if not files or not files[0].exists():
        problem = "matches no file" if is_glob else "does not exist"
        raise FileNotFoundError(f"{source.key}: {path} {problem} (seen from {Path.cwd()})")
    for file in files:
        if file.suffix.lower() not in READERS:
            allowed = ", ".join(READERS)
            raise ValueError(f"{source.key}: {file} has an unknown suffix; allowed are {allowed}")
        if file.stat().st_size == 0:
            raise ValueError(f"{source.key}: {file} is empty")
        yield from READERS[file.suffix.lower()](file, source)


def _read_text(file: Path, source: Source) -> Iterator[str]:
    yield _decoded(file, source)


def _read_json_lines(file: Path, source: Source) -> Iterator[str]:
    for number, line in enumerate(_decoded(file, source).split("\n"), start=1):
        if line.strip():
            place = f"{file} line {number}"
            yield _text(_json(line, source, place), source, place)


def _read_json(file: Path, source: Source) -> Iterator[str]:
    content = _decoded(file, source)
    if not content.lstrip().startswith("["):
        yield from _read_json_lines(file, source)
        return
    for number, row in enumerate(_json(content, source, str(file)), start=1):
        yield _text(row, source, f"{file} entry {number}")


def _read_parquet(file: Path, source: Source) -> Iterator[str]:
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(file)
    _check_column(table.schema_arrow.names, source, str(file))
    for batch in table.iter_batches(columns=[source.column]):
        for row in batch.to_pylist():
            yield _text(row, source, str(file))


READERS: dict[str, Callable[[Path, Source], Iterator[str]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _read_hub(source: Source, max_tokens: int | None) -> Iterator[str]:
    """Yields the first texts of a hub dataset's train split, as many as `max_tokens` can need."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    name, _, rest = source.path.partition(":")
    config, _, column = rest.partition(":")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise FileNotFoundError(
            f"{source.key}: {source.path} is no file (seen from {Path.cwd()}) and no name of a "
            "hub dataset"
        )
    source = replace(source, column=column or source.column)
    characters = 0
    try:
        for row in load_dataset(name, config or None, split="train", streaming=True):
            text = _text(row, source, f"hub dataset {name}")
            yield text
            characters += len(text)
            if max_tokens is not None and characters > max_tokens * HUB_CHARACTERS_PER_TOKEN:
                return
    except (DatasetsError, OSError) as error:
        raise FileNotFoundError(
            f"{source.key}: {source.path} is no file (seen from {Path.cwd()}) and could not be "
            f"read as a hub dataset: {error}"
        ) from error


def _decoded(file: Path, source: Source) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source.key}: {file} is not UTF-8 text ({error})") from error


def _json(content: str, source: Source, place: str) -> Any:
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source.key}: {place} is not valid JSON: {error}") from error


def _text(row: Any, source: Source, place: str) -> str:
    """Text of a row: the row itself, or its column; null counts as empty."""
    if isinstance(row, str):
        return row
    if not isinstance(row, Mapping):
        raise ValueError(f"{source.key}: {place} is neither text nor an object")
    _check_column(row, source, place)
    text = row[source.column]
    if not isinstance(text, str | None):
        kind = type(text).__name__
        raise ValueError(f"{source.key}: column '{source.column}' of {place} is {kind}, not text")
    return text or ""


def _check_column(names: Iterable[str], source: Source, place: str) -> None:
    names = sorted(names)
    if source.column not in names:
        raise ValueError(
            f"{source.key}: {place} has no column '{source.column}', only {', '.join(names)}; "
            "set column to one of these"
        )
