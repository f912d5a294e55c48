"""What each part of a converted model is worth: the same tokens scored in every mode, one table.

Legend: B batch, T tokens of a window of text (`length`), V vocabulary, W attention window, N sinks.

The rows are those of `rows` (Zhang et al. 2024 give the full model only; the other rows show what
does the work).
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from linearize.evaluation.perplexity import (
    check_length,
    exponential,
    mean_and_se,
    scored_slices,
)
from linearize.evaluation.rows import ROWS, Row, choose_rows, equal_bytes_windows, position_edges
from linearize.evaluation.windows import UNSCORED, Documents, read_text
from linearize.logits import head_logits, run_body
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.training import evaluating

LOG_ZERO = -1e4  # stands for a logit of minus infinity, so that differences are finite
CONTROL_KL = 1e-5  # nats per token in fp32: rounding stays far below, a wrong code path far above


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
        control also has "max_logit_difference" to the teacher, swa_sinks_equal_bytes the "windows"
        of its layers. Next to window_only, the converted row has "linear_branch": the "gain" in
        nats per token over it with the "gain_se" of the paired difference, and the same by bucket.

    Raises:
        ValueError: The model is not converted, a row is unknown, or a setting makes no sense.
    """
    table = choose_rows(model, base_model, rows, length)
    scored = read_text(tokenizer, text, bos=bos, max_tokens=max_tokens)
    windows = scored.windows(length=length, stride=stride)
    check_length(model, length)
    section = LinearizeConfig.from_dict(model.config.linearize_config)
    edges = position_edges(section.window, length)
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
    if "swa_sinks_equal_bytes" in reported:
        base_dtype: Any = table["swa_sinks_equal_bytes"].model.dtype
        windows_of_layers = equal_bytes_windows(section, base_dtype)
        results["swa_sinks_equal_bytes"]["windows"] = list(windows_of_layers.values())
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
        return cls(logits, logits.softmax(-1), logits.logsumexp(-1), logits.max(-1).indices)


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
        best = logits.max(-1).indices  # argmax, but faster on a CPU
        gap = reference.logits - logits
        kl = (reference.p * gap).sum(-1) - reference.total + total  # 0 for the teacher itself
        agrees = (best == reference.best).float()
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
