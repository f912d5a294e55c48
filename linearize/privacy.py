"""What says something about a computer or its user, and must not travel with a model.

A path becomes the name of what it leads to; the rest of a recipe and of its results is the model's.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from linearize.loading import EMBEDDED
from linearize.sources import READERS

# Of tokenizer_config.json: how and from where the tokenizer was loaded.
LOADING = ("is_local", "local_files_only", "name_or_path", "tokenizer_file", "vocab_file")
# Words that a tokenizer knows may look like anything.
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
HOMES = rb"(?<![\w.])(?:/(?:home|Users)/|[A-Za-z]:\\+Users\\+)[\w.-]+"
TOKENS = rb"hf_[A-Za-z0-9]{20,}"


def public_name(path: str) -> str:
    """The last part of a path; the name of something on the hub as it is."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] if is_local(path) else path


def is_local(path: str) -> bool:
    """Whether a path leads to a file or folder of this computer, or would on another one."""
    if path in EMBEDDED:
        return False
    return (
        re.match(r"[.~\\/]|[A-Za-z]:[\\/]", path) is not None
        or path.count("/") > 1
        or re.search(r"[*?\[]", path) is not None
        or Path(path).suffix.lower() in READERS
        or Path(path).exists()
    )


def public_recipe(recipe: Mapping[str, Any], base_name: str | None) -> dict[str, Any]:
    """A recipe as `model_dump` gives it, without folders; `base_name` is the model's path."""
    model = recipe["model"]
    data, evaluate = recipe["data"], recipe["evaluate"]
    sources = [
        public_name(entry)
        if isinstance(entry, str)
        else entry | {"path": public_name(entry["path"])}
        for entry in data["sources"]
    ]
    return {
        **recipe,
        "model": model | {"path": base_name or public_name(model["path"])},
        "data": data | {"sources": sources},
        "evaluate": evaluate and evaluate | {"text": public_name(evaluate["text"])},
        "output": f"runs/{public_name(recipe['output'])}"
        if is_local(recipe["output"])
        else recipe["output"],
    }


def public_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results of a run without folders."""
    data = {}
    for split, description in results.get("data", {}).items():
        sources = [entry | {"name": public_name(entry["name"])} for entry in description["sources"]]
        data[split] = description | {"sources": sources}
        if "tokenizer" in description:
            data[split]["tokenizer"] = public_name(description["tokenizer"])
    public = {key: value for key, value in results.items() if key != "output"}
    return public | ({"data": data} if data else {})


def clean_tokenizer(folder: Path) -> None:
    """Takes out of tokenizer_config.json what says where the tokenizer was loaded from."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    kept = {key: value for key, value in settings.items() if key not in LOADING}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_private(folder: Path, token: str | None = None) -> None:
    """Refuses a folder with a path, a home directory or a token of this computer in a text file.

    Raises:
        ValueError: It names the file and the line; a token is not repeated.
    """
    for file in _texts(folder):
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            place = f"{file.relative_to(folder)}:{number}"
            if re.search(TOKENS, line) or (token and token.encode() in line):
                raise ValueError(
                    f"{place}: this line holds an access token; take it out of the recipe, the "
                    "tokenizer or the card, and revoke it"
                )
            for private in _of_this_computer(folder):
                if found := re.search(private, line):
                    said = found.group().decode(errors="replace")
                    raise ValueError(
                        f"{place}: {said} is a path of this computer; take it out of the recipe, "
                        "the tokenizer or the card"
                    )


def _texts(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in VOCABULARIES:
            yield file


def _of_this_computer(folder: Path) -> Iterator[bytes]:
    """Yields patterns of the home directories and of the folders that the work is done in."""
    yield HOMES
    for path in {Path.home(), Path.cwd(), folder.resolve().parent}:
        if len(path.parts) > 1:
            yield rb"(?<![\w.])" + re.escape(str(path)).encode() + rb"(?![\w.-])"
