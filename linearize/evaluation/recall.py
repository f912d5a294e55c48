"""What a model remembers of a fact that has left its attention window.

Legend: B contexts of a batch, R questions about a context, q tokens of a question, a of an answer,
V vocabulary, W attention window.

The tasks are those of `probes`. A context is read once into a cache; every question about it goes
on from a copy. The answer is then decoded one token at a time with the right tokens fed back. One
pass so gives the likelihood of the answer and greedy generation: greedy decoding writes the answer
if and only if each of its tokens is the likeliest after the ones before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import DynamicCache

from linearize.evaluation.efficiency import CACHE
from linearize.evaluation.perplexity import check_length, mean_and_se
from linearize.evaluation.probes import TASKS, Lexicon, Probe, make_probe
from linearize.evaluation.rows import Row, choose_rows, position_edges
from linearize.modeling.attention import linearized_modules
from linearize.training import evaluating

RECALL_ROWS = ("teacher", "converted", "window_only")
METRICS = ("log_prob", "choice_accuracy", "exact_match")
STOCK_WINDOW = 64  # first edge of the distances of a model without a window


def recall(
    model: nn.Module,
    tokenizer: Any,
    *,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int] = (256, 1024),
    samples: int = 32,
    rows: Sequence[str | Row] = RECALL_ROWS,
    base_model: nn.Module | None = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """How well facts are recalled, by task, length, row and distance.

    All rows answer the same questions. Standard errors are over contexts, whose questions belong
    together.

    Args:
        model: A converted model, or a softmax model, which is the only row then.
        tokenizer: Its tokenizer, whatever it is.
        tasks: Names out of `TASKS`.
        lengths: Tokens that a model reads before the answer.
        samples: Contexts of each task and length.
        rows: As in `ablation`.
        base_model: As in `ablation`.
        batch_size: Contexts per forward pass, B.
        seed: Of the contexts.
        progress: Show a bar.

    Returns:
        {"cells", "window", "sinks", "samples", "seed", "num_choices", "chance"}. A cell has "task",
        "length" and "rows": {row: {"log_prob", "choice_accuracy", "exact_match", each with "_se",
        "num_questions", "buckets", "beyond_window"}}. log_prob is in nats per token of the answer;
        choice_accuracy the share of its tokens that are the likeliest among the choices, "chance"
        for a model that does not see the record; exact_match the share of answers that greedy
        decoding writes. `buckets` split them by distance, with edges 0, W, 2W, 4W, ...;
        "beyond_window" are those at W or farther. "linear_branch" is the gain of converted over
        window_only beyond the window, paired by context.

    Raises:
        ValueError: A task or row is unknown, or a length leaves no room.
    """
    unknown = [name for name in tasks if name not in TASKS]
    if unknown:
        raise ValueError(f"recall.tasks: '{unknown[0]}' is not known; use {', '.join(TASKS)}")
    if samples < 1:
        raise ValueError(f"recall.samples: {samples} is not a positive number")
    check_length(model, max(lengths) + max(TASKS[name].value_tokens for name in tasks))
    window, sinks, table = STOCK_WINDOW, 0, {"teacher": Row("teacher", model)}
    if linearized_modules(model):
        window = model.config.linearize_config["window"]
        sinks = model.config.linearize_config["sinks"]
        table = choose_rows(model, base_model, rows, max(lengths))
        names = [row if isinstance(row, str) else row.name for row in rows]
        table = {name: table[name] for name in names}
    lexicon = Lexicon(tokenizer)
    choices = torch.tensor(lexicon.values)
    cells = []
    with ExitStack() as stack:
        for owner in {id(row.model): row.model for row in table.values()}.values():
            stack.enter_context(evaluating(owner))
        total = len(tasks) * len(lengths) * samples
        bar = stack.enter_context(tqdm(total=total, unit="context", disable=not progress))
        for task in tasks:
            for length in lengths:
                make = partial(
                    make_probe, lexicon, task, length=length, num_samples=samples, sinks=sinks,
                    seed=seed,
                )  # fmt: skip
                probes = [make(sample=i) for i in range(samples)]
                batches = (probes[i : i + batch_size] for i in range(0, samples, batch_size))
                scores = _score(table, batches, choices, position_edges(window, length), bar)
                cells.append({"task": task, "length": length, **_cell(scores, window, length)})
    return {
        "cells": cells,
        "window": window,
        "sinks": sinks,
        "samples": samples,
        "seed": seed,
        "num_choices": len(choices),
        "chance": 1 / len(choices),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }


def _score(
    table: Mapping[str, Row],
    batches: Iterator[list[Probe]],
    choices: Tensor,
    edges: list[int],
    bar: tqdm,
) -> dict[str, Tensor]:
    """Sums of every row, [metrics + count, contexts, buckets]."""
    sums: dict[str, list[Tensor]] = {name: [] for name in table}
    inner = torch.tensor(edges[1:-1])
    for probes in batches:
        distances = torch.stack([probe.distances for probe in probes])  # [B, R]
        bucket = torch.bucketize(distances, inner, right=True)
        for name, row in table.items():
            with row.mode(row.model):
                values = answer_scores(row.model, probes, choices)  # [3, B, R]
            values = torch.cat([values, torch.ones_like(values[:1])])
            empty = torch.zeros(*values.shape[:2], len(edges) - 1, dtype=torch.float64)
            sums[name].append(empty.scatter_add_(2, bucket.expand_as(values), values))
        bar.update(len(probes))
    return {name: torch.cat(parts, 1) for name, parts in sums.items()}


def answer_scores(model: Any, probes: Sequence[Probe], choices: Tensor) -> Tensor:
    """Log-probability, choice accuracy and exact match of the answers, [3, B, R] in float64."""
    context = torch.stack([probe.context for probe in probes]).to(model.device)
    questions = torch.stack([probe.questions for probe in probes]).to(model.device)  # [B, R, q]
    answers = torch.stack([probe.answers for probe in probes]).to(model.device)  # [B, R, a]
    cache = DynamicCache(config=model.config)
    model(context, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    last = questions.shape[1] - 1
    scores = [
        _decode(model, questions[:, i], answers[:, i], choices.to(model.device),
                cache if i == last else deepcopy(cache))
        for i in range(last + 1)
    ]  # fmt: skip
    return torch.stack(scores, -1).double().cpu()


def _decode(
    model: nn.Module, question: Tensor, answer: Tensor, choices: Tensor, cache: DynamicCache
) -> Tensor:
    """Scores [3, B] of answers [B, a] to questions [B, q]; advances the cache."""
    read, found = question, []
    for wanted in answer.unbind(1):
        logits = model(read, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits[:, -1]
        log_probs = logits.float().log_softmax(-1)  # [B, V]
        chosen = choices[log_probs[:, choices].argmax(-1)]
        found.append(
            torch.stack(
                [
                    log_probs.gather(1, wanted[:, None])[:, 0],
                    (chosen == wanted).float(),
                    (log_probs.argmax(-1) == wanted).float(),
                ]
            )
        )
        read = wanted[:, None]
    log_prob, choice, exact = torch.stack(found, -1)  # [B, a] each
    return torch.stack([log_prob.mean(-1), choice.mean(-1), exact.prod(-1)])


def _cell(scores: Mapping[str, Tensor], window: int, length: int) -> dict[str, Any]:
    """Rows of one task and length, and the gain of the linear branch."""
    edges = position_edges(window, length)
    cell: dict[str, Any] = {"rows": {}}
    for name, sums in scores.items():
        buckets = [
            {"from": low, "to": high, **_summary(sums[..., i])}
            for i, (low, high) in enumerate(pairwise(edges))
            if sums[-1, :, i].any()
        ]
        cell["rows"][name] = {**_summary(sums.sum(-1)), "buckets": buckets}
        far = sums[..., 1:].sum(-1)
        cell["rows"][name]["beyond_window"] = _summary(far) if far[-1].any() else None
    if {"converted", "window_only"} <= scores.keys():
        with_branch, without = (scores[n][..., 1:].sum(-1) for n in ("converted", "window_only"))
        if without[-1].any():
            paired = torch.cat([with_branch[:-1] - without[:-1], without[-1:]])
            gains = _summary(paired)
            cell["linear_branch"] = {
                f"{name}{end}": gains[f"{name}{end}"] for name in METRICS for end in ("", "_se")
            }
    return cell


def _summary(sums: Tensor) -> dict[str, float | int | None]:
    """Means and errors from sums [metrics + count, contexts]."""
    result: dict[str, float | int | None] = {}
    for name, values in zip(METRICS, sums, strict=False):
        result[name], result[f"{name}_se"] = mean_and_se(values, sums[-1])
    return {**result, "num_questions": int(sums[-1].sum())}
