"""What each part of a converted model is worth: the same tokens scored in every mode, one table.

Legend: B batch, T tokens of a window of text (`length`), V vocabulary, W attention window, N sinks.

Rows (Zhang et al. 2024 give the full model only; the other rows show what does the work):

- teacher: softmax attention, base weights.
- converted: the model as it is.
- window_only: linear branch off; the window and the sinks stay.
- linear_only: window and sinks off; the linear branch gets their keys.
- no_attention: converted layers give nothing to the residual stream.
- swa_sinks: base weights, last W and first N keys (4 where the conversion has no sinks), nothing
  trained. The floor that a conversion must beat.
- control: base weights, our code with W >= T. It must equal the teacher.

Layers that the conversion left alone keep their softmax attention in every row.
"""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from linearize.conversion import convert
from linearize.evaluation.perplexity import (
    check_length,
    exponential,
    mean_and_se,
    scored_slices,
)
from linearize.evaluation.windows import UNSCORED, Documents, read_text
from linearize.logits import head_logits, run_body
from linearize.modeling.attention import branches, linearized_modules, no_attention, teacher
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.training import evaluating

ROWS = (
    "teacher", "converted", "window_only", "linear_only", "no_attention", "swa_sinks", "control"
)  # fmt: skip
FLOOR_SINKS = 4
LOG_ZERO = -1e4  # stands for a logit of minus infinity, so that differences are finite
CONTROL_KL = 1e-5  # nats per token in fp32: rounding stays far below, a wrong code path far above


@dataclass(frozen=True)
class Row:
    """One line of the table: a model, and the mode in which it answers.

    `mode` takes the model and returns the context in which it runs, such as `linearize.teacher`.
    """

    name: str
    model: nn.Module
    mode: Callable[[nn.Module], AbstractContextManager] = nullcontext

    @property
    def answer(self) -> tuple[int, int]:
        """Equal for rows that answer the same, which are scored once."""
        return id(self.model), id(self.mode)


def ablation(
    model: nn.Module,
    tokenizer: Any,
    text: Documents,
    *,
    rows: Sequence[str | Row] = ROWS,
    base_model: nn.Module | None = None,
    length: int = 1024,
    stride: int | None = None,
    batch_size: int = 8,
    bos: str = "auto",
    max_tokens: int | None = None,
    logits_chunk: int = 256,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Perplexity, KL to the teacher and top-1 agreement of every row, overall and by position.

    All rows score the same tokens with the same context in one pass. KL(teacher || row) is in nats
    per token, over the whole vocabulary, in fp32. `buckets` split the tokens by their position in
    the window of text, with edges 0, W, 2W, 4W, ..., T: before W nothing can be missing from the
    attention window. Standard errors are those of `perplexity`.

    Args:
        model: A converted model.
        tokenizer: Its tokenizer.
        text: One or several documents, as text or token ids.
        rows: Names out of `ROWS`, and rows of your own, such as
            `Row("teacher_finetuned", other_model, linearize.teacher)`.
        base_model: Holds the base weights, where those of `model` have been changed: the softmax
            model, or a conversion of it that was never finetuned. Not changed, not copied. None:
            `model` itself holds them.
        length: Tokens of a window of text, T.
        stride: Tokens that a later window scores; None: T.
        batch_size: Windows per forward pass, B.
        bos: The begin-of-text policy of `perplexity`.
        max_tokens: Use only so many tokens of the text.
        logits_chunk: Logits that exist at one time are [logits_chunk, V], fp32, of two rows.
        progress: Show a bar.

    Returns:
        {row: {"perplexity", "perplexity_se", "nll", "nll_se", "kl_to_teacher", "kl_to_teacher_se",
        "top1_agreement", "top1_agreement_se", "num_tokens", "buckets", and the protocol}}. The
        control also has "max_logit_difference" to the teacher. Next to window_only, the converted
        row has "linear_branch": the "gain" in nats per token over it with the "gain_se" of the
        paired difference, and the same by bucket.

    Raises:
        ValueError: The model is not converted, a row is unknown, or a setting makes no sense.
    """
    table = _rows(model, base_model, rows, length)
    scored = read_text(tokenizer, text, bos=bos, max_tokens=max_tokens)
    windows = scored.windows(length=length, stride=stride)
    check_length(model, length)
    window = LinearizeConfig.from_dict(model.config.linearize_config).window
    edges = _edges(window, length)
    scores = {row.answer: _Scores(edges) for row in table.values()}
    with ExitStack() as stack:
        for owner in {id(row.model): row.model for row in table.values()}.values():
            stack.enter_context(evaluating(owner))
        bar = stack.enter_context(tqdm(total=len(windows), unit="window", disable=not progress))
        for input_ids, targets in windows.batches(batch_size):
            _score_batch(list(table.values()), scores, input_ids, targets, logits_chunk)
            bar.update(len(targets))
    protocol = {
        "length": length,
        "stride": windows.stride,
        "bos": scored.bos,
        "sha256": scored.sha256(),
    }
    reported = [row if isinstance(row, str) else row.name for row in rows]
    results = {name: scores[table[name].answer].summary() | protocol for name in reported}
    if {"converted", "window_only"} <= set(reported):
        with_branch, without = (scores[table[n].answer] for n in ("converted", "window_only"))
        results["converted"]["linear_branch"] = with_branch.gain_over(without)
    if "control" in reported:
        control, score = results["control"], scores[table["control"].answer]
        control["max_logit_difference"] = score.max_logit_difference
        distance = float(control["kl_to_teacher"])
        if model.dtype == torch.float32 and not abs(distance) <= CONTROL_KL:
            warnings.warn(
                f"ablation: the control row is {distance:.2g} nats away from the teacher and must "
                "equal it; do not trust this table",
                stacklevel=2,
            )
    return results


def _rows(
    model: nn.Module, base_model: nn.Module | None, wanted: Sequence[str | Row], length: int
) -> dict[str, Row]:
    """The rows to score by name, the teacher first whether it is reported or not."""
    if not linearized_modules(model):
        raise ValueError("ablation: this model has no linearized layer; use perplexity")
    section = LinearizeConfig.from_dict(model.config.linearize_config)
    base = _linearized_base(model, base_model, section)
    no_linear = partial(branches, linear=False)
    if base is model and section.sinks > 0:
        floor = no_linear
    else:
        floor = partial(_exact_keys, sinks=section.sinks or FLOOR_SINKS, linear=False)
    known = {
        row.name: row
        for row in (
            Row("teacher", model if base_model is None else base_model, teacher),
            Row("converted", model),
            Row("window_only", model, no_linear),
            Row("linear_only", model, partial(branches, window=False)),
            Row("no_attention", model, no_attention),
            Row("swa_sinks", base, floor),
            Row("control", base, partial(_exact_keys, window=length)),
        )
    }
    rows = {"teacher": known["teacher"]}
    for row in wanted:
        if isinstance(row, str) and row not in known:
            raise ValueError(f"ablation: '{row}' is not a row; use {', '.join(ROWS)} or a Row")
        if isinstance(row, Row) and row.name in known:
            raise ValueError(f"ablation: '{row.name}' is a row already; give yours another name")
        rows |= {row: known[row]} if isinstance(row, str) else {row.name: row}
    return rows


def _linearized_base(
    model: nn.Module, base_model: nn.Module | None, section: LinearizeConfig
) -> nn.Module:
    """A linearized model with the base weights.

    A softmax base is converted in a copy of its modules that shares its weights.
    """
    if base_model is None:
        return model
    if linearized_modules(base_model):
        return base_model
    weights = chain(base_model.parameters(), base_model.buffers())
    twin = deepcopy(base_model, {id(tensor): tensor for tensor in weights})
    names = ("layers", "window", "sinks", "window_kind")
    return convert(twin, **{name: getattr(section, name) for name in names})


@contextmanager
def _exact_keys(
    model: nn.Module, *, window: int | None = None, sinks: int | None = None, linear: bool = True
) -> Generator[None]:
    """Runs the block with another number of exact keys in every converted layer."""
    heads = [module.linearized for module in linearized_modules(model).values()]
    before = [(head.window, head.sinks) for head in heads]
    try:
        for head in heads:
            head.window = head.window if window is None else window
            head.sinks = head.sinks if sinks is None else sinks
        with branches(model, linear=linear):
            yield
    finally:
        for head, (old_window, old_sinks) in zip(heads, before, strict=True):
            head.window, head.sinks = old_window, old_sinks


def _score_batch(
    table: Sequence[Row],
    scores: dict[tuple[int, int], "_Scores"],
    input_ids: Tensor,
    targets: Tensor,
    logits_chunk: int,
) -> None:
    """Adds one batch of windows, input_ids and targets [B, T], to the scores of every row."""
    different = {row.answer: row for row in table}
    bodies = {}
    for key, row in different.items():
        with row.mode(row.model):
            bodies[key] = run_body(row.model, input_ids=input_ids.to(row.model.device))
        scores[key].open_windows(len(targets))
    for part in scored_slices(targets, logits_chunk):
        reference = None
        for key, row in different.items():
            with row.mode(row.model):
                hidden = bodies[key].last_hidden_state[:, part]
                logits = head_logits(row.model, bodies[key], hidden).float()
            logits.clamp_(min=LOG_ZERO)
            if reference is None:
                reference = _Reference.of(logits)
            scores[key].add(logits, reference, targets[:, part].to(logits.device), part.start)


class _Reference(NamedTuple):
    """The teacher's answer for a slice: logits and probabilities [B, t, V], the logarithm of their
    sum and the best token [B, t].
    """

    logits: Tensor
    p: Tensor
    total: Tensor
    best: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> "_Reference":
        return cls(logits, logits.softmax(-1), logits.logsumexp(-1), logits.argmax(-1))


@dataclass
class _Scores:
    """Sums of one row by window and bucket of positions."""

    edges: list[int]
    sums: list[Tensor] = field(default_factory=list)  # per batch [4, B, buckets]
    max_logit_difference: float = 0.0

    def open_windows(self, count: int) -> None:
        """Begins a batch of so many windows."""
        self.sums.append(torch.zeros(4, count, len(self.edges) - 1, dtype=torch.float64))

    def add(self, logits: Tensor, reference: _Reference, targets: Tensor, begin: int) -> None:
        """Adds a slice from position `begin` on: logits [B, t, V], targets [B, t]."""
        is_scored = targets != UNSCORED
        total = logits.logsumexp(-1)
        nll = total - logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        gap = reference.logits - logits
        kl = (reference.p * gap).sum(-1) - reference.total + total  # 0 for the teacher itself
        agrees = (logits.argmax(-1) == reference.best).float()
        values = torch.stack([nll, kl, agrees, torch.ones_like(nll)])
        values = torch.where(is_scored, values, 0).double().cpu()  # [4, B, t]
        positions = torch.arange(begin, begin + targets.shape[1])
        bucket = torch.bucketize(positions, torch.tensor(self.edges[1:-1]), right=True)
        self.sums[-1].index_add_(2, bucket, values)
        difference = gap.abs().amax(-1)[is_scored]
        self.max_logit_difference = max(self.max_logit_difference, float(difference.max()))

    def gain_over(self, other: "_Scores") -> dict[str, Any]:
        """How much smaller the loss is than that of another row, paired by window of text."""
        sums, others = (torch.cat(x.sums, dim=1) for x in (self, other))
        return self._by_bucket(torch.stack([others[0] - sums[0], sums[3]]), _gain)

    def summary(self) -> dict[str, Any]:
        """Means, standard errors and buckets."""
        return self._by_bucket(torch.cat(self.sums, dim=1), _summarize)

    def _by_bucket(
        self, sums: Tensor, summarize: Callable[[Tensor], dict[str, Any]]
    ) -> dict[str, Any]:
        """A summary of sums [n, K, buckets], whose last are counts, overall and of each bucket."""
        buckets = [
            {"from": low, "to": high, **summarize(sums[..., i])}
            for i, (low, high) in enumerate(zip(self.edges, self.edges[1:], strict=False))
            if sums[-1, :, i].any()
        ]
        return {**summarize(sums.sum(-1)), "buckets": buckets}


def _summarize(sums: Tensor) -> dict[str, Any]:
    """Means with errors from sums [4, K] of nll, KL, agreement and number of tokens per window."""
    nll, kl, agreement, counts = sums
    mean, se = mean_and_se(nll, counts)
    result = {**exponential("perplexity", mean, se), "nll": mean, "nll_se": se}
    for name, values in (("kl_to_teacher", kl), ("top1_agreement", agreement)):
        result[name], result[f"{name}_se"] = mean_and_se(values, counts)
    return {**result, "num_tokens": int(counts.sum())}


def _gain(sums: Tensor) -> dict[str, float | None]:
    """Mean saving per token and its error, from sums [2, K] of savings and number of tokens."""
    mean, se = mean_and_se(*sums)
    return {"gain": mean, "gain_se": se}


def _edges(window: int, length: int) -> list[int]:
    """0, W, 2W, 4W, ... below T, and T."""
    edges = [0]
    edge = window
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]
