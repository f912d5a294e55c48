"""A run directory: recipe, results so far, checkpoints, model; every file whole or absent."""

import json
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from linearize.data import Splits, TokenDataset
from linearize.evaluation.perplexity import json_ready

SPLITS = ("train", "held_out")


class RunDirectory:
    """The folder of one run. The same recipe may come back to it, another one may not."""

    def __init__(
        self,
        path: str | Path,
        recipe: str,
        differences: Callable[[Path], list[str]],
        *,
        resume: bool = True,
    ) -> None:
        """Opens the folder, or makes it.

        Args:
            path: The folder.
            recipe: The resolved recipe, as YAML.
            differences: Says how the recipe differs from the one in a file.
            resume: False refuses a folder that holds a run.

        Raises:
            ValueError: The folder holds another recipe's run, or something else.
        """
        self.path = Path(path)
        self.checkpoints, self.model = self.path / "checkpoints", self.path / "model"
        self.attention = self.path / "attention"
        stored, self._results = self.path / "recipe.yaml", self.path / "results.json"
        remedy = "choose another folder or delete this one"
        if stored.exists():
            if not resume:
                raise ValueError(f"output: {self.path} holds a run already; {remedy}")
            if differing := differences(stored):
                listing = "; ".join(differing[:5]) + ("; ..." if len(differing) > 5 else "")
                raise ValueError(
                    f"output: {self.path} holds the run of another recipe ({listing}); {remedy}"
                )
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(f"output: {self.path} is there already and holds no run; {remedy}")
        self.path.mkdir(parents=True, exist_ok=True)
        if not stored.exists():
            write_whole(stored, recipe)
        self.results: dict[str, Any] = {}
        if self._results.exists():
            self.results = json.loads(self._results.read_text(encoding="utf-8"))

    def record(self, **entries: Any) -> None:
        """Adds entries to `results.json`."""
        self.results.update(json_ready(entries))
        write_whole(
            self._results, json.dumps(self.results, indent=2, ensure_ascii=False, allow_nan=False)
        )

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The entry of that name; made, timed and recorded unless it is there already."""
        if name not in self.results:
            with self.timed(name):
                value = make()
            self.record(**{name: value})
        return self.results[name]

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Records what the block takes."""
        started = time.perf_counter()
        yield
        self.set_seconds(name, time.perf_counter() - started)

    def set_seconds(self, name: str, seconds: float) -> None:
        """Records what a step took."""
        known: Mapping[str, float] = self.results.get("seconds_by_step", {})
        self.record(seconds_by_step={**known, name: round(seconds, 2)})


def save_splits(splits: Splits, file: Path) -> None:
    """Writes the documents of both splits and what is known about them."""
    tensors: dict[str, np.ndarray] = {}
    for name in SPLITS:
        documents = [document.numpy() for document in getattr(splits, name).documents()]
        tensors[f"{name}_tokens"] = np.concatenate([np.empty(0, dtype=np.int64), *documents])
        tensors[f"{name}_lengths"] = np.array([len(document) for document in documents], np.int64)
    descriptions = {name: json.dumps(getattr(splits, name).description) for name in SPLITS}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata=descriptions)
    os.replace(unfinished, file)


def load_splits(file: Path, *, length: int, pad_id: int) -> Splits:
    """Splits as `save_splits` wrote them."""
    parts = []
    with safe_open(file, "np") as stored:
        for name in SPLITS:
            description = stored.metadata()[name]
            borders = np.cumsum(stored.get_tensor(f"{name}_lengths"))[:-1]
            documents = np.split(stored.get_tensor(f"{name}_tokens"), borders)
            parts.append(
                TokenDataset(
                    documents, length=length, pad_id=pad_id, description=json.loads(description)
                )
            )
    return Splits(*parts)


def write_whole(file: Path, text: str) -> None:
    """Replaces a file in one step: a reader or a kill never meets half of it."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)
