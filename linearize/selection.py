"""Which layers or heads of a converted model should stay softmax: a ranking, and a few in budget.

The score of a unit, a layer or one key/value head with its query heads, is what restoring it takes
off the distances of `restoration`: the share of the KL that goes, plus `recall_weight` times the
share of the recall. Under a budget the choice is greedy: units interact, so each step scores the
best ones again with those chosen before.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linearize import loading
from linearize.evaluation.perplexity import check_length
from linearize.evaluation.windows import read_text
from linearize.inspection import layer_bytes
from linearize.modeling.attention import linearized_modules
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.restoration import (
    Distance,
    Scorer,
    Unit,
    merged,
    recall_probe,
    restore_,
    text_probes,
    units_of,
    weights_hash,
)
from linearize.rundir import write_whole
from linearize.saved import read_evaluation_text
from linearize.training import evaluating

UNITS = ("head", "layer")
NEGLIGIBLE = 1e-3  # nats: a distance below it is no scale to measure gains by


def select(
    model: Any,
    text: str | Path | Sequence[str],
    *,
    tokenizer: Any = None,
    base: str | Path | nn.Module | None = None,
    unit: str = "head",
    layers: Sequence[int] | None = None,
    budget: int | None = None,
    cache_bytes: int | None = None,
    context: int = 4096,
    candidates: int | None = 8,
    recall_weight: float = 1.0,
    length: int = 1024,
    max_tokens: int | None = 4096,
    positions: int = 256,
    prompts: int = 4,
    batch_size: int = 1,
    seed: int = 0,
    output: str | Path | None = None,
    save_model: str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """The units of a converted model by what restoring each to softmax gains, and the best few.

    Args:
        model: A converted model whose new parameters are trained, or where it is.
        text: A text or JSON-lines file, or documents.
        tokenizer: The tokenizer of a model that is not loaded here.
        base: The unconverted model, needed as teacher where stage 2 has changed the weights.
        unit: "head" (key/value head) or "layer".
        layers: Only units of these layers; None: of all.
        budget: How many units may stay softmax. With neither budget, units are ranked only.
        cache_bytes: The most bytes that the caches of the converted layers may take per sequence,
            instead of `budget`.
        context: Tokens at which cache bytes are counted.
        candidates: How many of the best units each step scores again; None: all.
        recall_weight: Weight of recall in the score; 0 leaves recall out.
        length: Tokens per window of text.
        max_tokens: Read only the first tokens of the text.
        positions: Positions per window at which KL is measured.
        prompts: Recall prompts, of up to 32 answers each.
        batch_size: Windows per forward pass.
        seed: Of the recall prompts.
        output: A JSON file for the result, written after every step; the same call goes on from it.
        save_model: A folder for the model with the chosen units softmax.
        dtype, device, trust_remote_code: As in `evaluate`.
        progress: Show a progress bar.

    Returns:
        {"unit", "context", "before": {"kl", "recall", "cache_bytes"}, with no unit restored,
        "ranking": [{"layer", "heads", "kl_gain", "recall_gain", "score"}], best first,
        "chosen": [{"layer", "heads", "kl", "recall", "score", "cache_bytes"}], in order and with
        the distances that are left, "convert": {"layers", "softmax_heads"}}, and "settings",
        "measured" and "steps", from which the same call goes on.

    Raises:
        ValueError: The model is not converted, or a setting makes no sense.
        FileNotFoundError: The model or the text is not there.
    """
    _check_settings(unit, budget, cache_bytes)
    where = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    if not isinstance(model, nn.Module):
        model, tokenizer = loading.load(model, **where)
    if base is not None and not isinstance(base, nn.Module):
        base = loading.load(base, **where)[0]
    section = _section(model)
    units = _units(model, unit, layers)
    limit = _Limit(section, model.dtype, context, budget, cache_bytes)
    documents = read_evaluation_text(text) if isinstance(text, str | Path) else text
    scored = read_text(tokenizer, documents, max_tokens=max_tokens)
    check_length(model, length)
    exact = section.window + section.sinks
    probes = list(text_probes(scored, exact, length, positions, batch_size))
    if not probes:
        raise ValueError(
            f"select.length: no window of text is longer than window + sinks = {exact}, up to "
            f"which every unit is exact; use a length of at least {4 * exact} and a longer text"
        )
    if recall_weight:
        probes.append(recall_probe(scored, section.window, section.sinks, prompts, seed))
    settings = {
        "unit": unit, "layers": layers, "candidates": candidates,
        "recall_weight": recall_weight, "length": length, "positions": positions,
        "prompts": prompts, "batch_size": batch_size, "seed": seed, "sha256": scored.sha256(),
        "linearize": section.to_dict(),
        "weights": [weights_hash(owner) for owner in (model, base or model)],
    }  # fmt: skip
    record = _Record(output, settings)
    with ExitStack() as stack:  # without gradients, as `evaluating` says
        for owner in {id(owner): owner for owner in (model, base or model)}.values():
            stack.enter_context(evaluating(owner))
        scorer = Scorer(model, base or model, probes, progress)
        choice = _Choice(scorer, units, record, limit, recall_weight)
        choice.rank()
        choice.choose(candidates)
    record.save(choice.result(unit))
    if save_model is not None:
        restore_(model, merged(choice.chosen))
        loading.save(model, tokenizer, save_model)
    return record.entries


def _check_settings(unit: str, budget: int | None, cache_bytes: int | None) -> None:
    if unit not in UNITS:
        raise ValueError(f"select.unit: {unit!r} is not allowed; choose from {', '.join(UNITS)}")
    if budget is not None and cache_bytes is not None:
        raise ValueError("select.budget: give a number of units or cache_bytes, not both")
    if budget is not None and budget < 1:
        raise ValueError(f"select.budget: {budget} is not a positive number of units")


def _section(model: nn.Module) -> LinearizeConfig:
    if not any(module.linearize_heads for module in linearized_modules(model).values()):
        raise ValueError("select: this model has no linear head; convert and train it first")
    return LinearizeConfig.from_dict(model.config.linearize_config)


def _units(model: Any, unit: str, layers: Sequence[int] | None) -> list[Unit]:
    units = units_of(model, by_head=unit == "head")
    known = [u.layer for u in units]
    for layer in layers or ():
        if layer not in known:
            raise ValueError(f"select.layers: layer {layer} has no linear head in this model")
    return [u for u in units if layers is None or u.layer in layers]


class _Record:
    """A JSON file, whole at any time, with what has been measured so far; or memory only."""

    def __init__(self, path: str | Path | None, settings: dict[str, Any]) -> None:
        """Opens the file; one of another selection is refused."""
        self.path = None if path is None else Path(path)
        settings = json.loads(json.dumps(settings))
        self.entries: dict[str, Any] = {"settings": settings, "measured": [], "steps": {}}
        if self.path is not None and self.path.exists():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found.get("settings") != settings:
                raise ValueError(
                    f"select.output: {self.path} holds another selection (model, text or "
                    "settings differ); choose another file or delete this one"
                )
            self.entries = found

    def save(self, entries: dict[str, Any] | None = None) -> None:
        """Adds entries and writes the file."""
        self.entries.update(entries or {})
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self.entries, indent=1))


@dataclass(frozen=True)
class _Limit:
    """What may stay softmax."""

    section: LinearizeConfig
    dtype: torch.dtype
    context: int
    budget: int | None
    cache_bytes: int | None

    def __post_init__(self) -> None:
        if self.cache_bytes is not None and self.cache_bytes < self.bytes(()):
            raise ValueError(
                f"select.cache_bytes: {self.cache_bytes} bytes are less than the {self.bytes(())} "
                "that the model takes with no unit restored; raise it"
            )

    def bytes(self, chosen: Sequence[Unit]) -> int:
        """Of the caches of the converted layers per sequence at `context` tokens."""
        kept = {int(layer): heads for layer, heads in self.section.softmax_heads.items()}
        kept = merged([*(Unit(layer, tuple(heads)) for layer, heads in kept.items()), *chosen])
        section = replace(self.section, softmax_heads={str(i): x for i, x in kept.items()})
        layers = section.layers
        return sum(layer_bytes(section, layer, self.dtype, self.context) for layer in layers)

    @property
    def name(self) -> str:
        """Equal for limits under which the same steps are taken, as far as each goes."""
        return "units" if self.cache_bytes is None else f"{self.cache_bytes} B at {self.context}"

    def allows(self, chosen: Sequence[Unit]) -> bool:
        if self.cache_bytes is not None:
            return self.bytes(chosen) <= self.cache_bytes
        return len(chosen) <= (self.budget or 0)


class _Choice:
    """The ranking, and the units chosen so far."""

    def __init__(
        self,
        scorer: Scorer,
        units: Sequence[Unit],
        record: _Record,
        limit: _Limit,
        recall_weight: float,
    ) -> None:
        self.scorer, self.units, self.record, self.limit = scorer, units, record, limit
        self.recall_weight = recall_weight
        self.chosen: list[Unit] = []
        self.first: dict[str, Distance] = {}  # by unit, "" for none
        self.gains: dict[str, float] = {}  # last known, by unit

    def rank(self) -> None:
        """Measures every unit alone."""
        self.first = self.scorer.measure(
            (), self.units, self.record.entries["measured"], self.record.save
        )
        self.gains = {unit.name: self.score(self.first[unit.name]) for unit in self.units}

    def score(self, distance: Distance) -> float:
        """Which share of the distances of the model without restored units is gone."""
        start = self.first[""]
        score = (start.kl - distance.kl) / max(start.kl, NEGLIGIBLE)
        if start.recall > NEGLIGIBLE:
            score += self.recall_weight * (start.recall - distance.recall) / start.recall
        return score

    def choose(self, candidates: int | None) -> None:
        """Takes the best unit, whatever it costs, until nothing more fits."""
        steps = self.record.entries["steps"].setdefault(self.limit.name, [])
        while True:
            left = [
                unit
                for unit in self.units
                if unit not in self.chosen and self.limit.allows((*self.chosen, unit))
            ]
            if not left:
                return
            if len(self.chosen) == len(steps):
                steps.append(self._step(left, candidates))
                self.record.save()
            step = steps[len(self.chosen)]
            self.gains |= step["gains"]
            self.chosen.append(next(unit for unit in left if unit.name == step["unit"]))

    def _step(self, left: Sequence[Unit], candidates: int | None) -> dict[str, Any]:
        """Scores the best of the units that are left again, and takes one."""
        best = sorted(left, key=lambda unit: -self.gains[unit.name])[:candidates]
        found = self.first
        if self.chosen:
            found = self.scorer.measure(self.chosen, best, [])
        before = self.score(found[""])
        gains = {unit.name: self.score(found[unit.name]) - before for unit in best}
        name = max(gains, key=lambda name: gains[name])
        return {"unit": name, **found[name]._asdict(), "gains": gains}

    def result(self, unit: str) -> dict[str, Any]:
        """The ranking and the choice."""
        start = self.first[""]
        order = sorted(self.units, key=lambda unit: -self.score(self.first[unit.name]))
        ranking = [
            {
                "layer": u.layer,
                "heads": list(u.heads),
                "kl_gain": start.kl - self.first[u.name].kl,
                "recall_gain": start.recall - self.first[u.name].recall,
                "score": self.score(self.first[u.name]),
            }
            for u in order
        ]
        chosen = []
        steps = self.record.entries["steps"].get(self.limit.name, [])
        for n, (u, step) in enumerate(zip(self.chosen, steps, strict=False)):
            distance = Distance(step["kl"], step["recall"])
            chosen.append(
                {
                    "layer": u.layer,
                    "heads": list(u.heads),
                    **distance._asdict(),
                    "score": self.score(distance),
                    "cache_bytes": self.limit.bytes(self.chosen[: n + 1]),
                }
            )
        return {
            "unit": unit,
            "context": self.limit.context,
            "before": {**start._asdict(), "cache_bytes": self.limit.bytes(())},
            "ranking": ranking,
            "chosen": chosen,
            "convert": self._convert(),
        }

    def _convert(self) -> dict[str, Any]:
        """What a recipe says to convert with this choice."""
        kept = merged(self.chosen)
        layers, heads = [], {}
        for layer, module in linearized_modules(self.scorer.model).items():
            softmax = sorted({*module.softmax_heads(), *kept.get(layer, ())})
            if len(softmax) < module.linearize_kv_heads:
                layers.append(layer)
                if softmax:
                    heads[str(layer)] = softmax
        return {"layers": layers, "softmax_heads": heads}
