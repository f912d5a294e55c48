"""Perplexity of a causal language model on a text, every token scored exactly once.

Legend: B batch, T tokens of a window (`length`), V vocabulary.

What is scored, and with which context, is the protocol of `windows`. Other protocols give other
numbers (llama.cpp scores half of each chunk): compare results where `check_comparable` lets you.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from linearize.evaluation.windows import UNSCORED, Documents, read_text
from linearize.logits import head_logits, run_body
from linearize.training import evaluating

PROTOCOL = ("length", "stride", "bos", "num_tokens", "sha256")


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    text_or_ids: Documents,
    *,
    length: int = 1024,
    stride: int | None = None,
    batch_size: int = 8,
    bos: str = "auto",
    max_tokens: int | None = None,
    logits_chunk: int = 256,
    progress: bool = False,
) -> dict[str, Any]:
    """Token, word and byte perplexity with standard errors, and the protocol that gave them.

    Tokens of a text are not independent, so the errors come from the sums of whole windows:
    with S_k the loss and n_k the tokens of window k of K, var(mean) =
    K/(K-1) * sum (S_k - mean n_k)^2 / (sum n_k)^2, and se(exp x) = exp(x) se(x) (delta method).
    One window gives no error (None).
    Words are counted as lm-evaluation-harness does (pieces between white space, empty ends too) and
    bytes in UTF-8, both on the original text of exactly the scored tokens. A perplexity too large
    for a float is `inf` (see `json_ready`).

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        text_or_ids: A document or several, as text or as token ids (then without word and byte
            perplexity).
        length: Tokens that a window reads, T.
        stride: Tokens that a later window scores; None: T, the fastest.
        batch_size: Windows per forward pass, B.
        bos: "auto", "none", "first" or "each", see `windows`.
        max_tokens: Use only so many tokens of the text.
        logits_chunk: Logits that exist at one time are [logits_chunk, V], fp32.
        progress: Show a bar.

    Raises:
        ValueError: A setting makes no sense for this model, tokenizer or text.
    """
    text = read_text(tokenizer, text_or_ids, bos=bos, max_tokens=max_tokens)
    windows = text.windows(length=length, stride=stride)
    check_length(model, length)
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    with evaluating(model), tqdm(total=len(windows), unit="window", disable=not progress) as bar:
        for input_ids, targets in windows.batches(batch_size):
            nll = token_nll(model, input_ids, targets, logits_chunk=logits_chunk)
            sums.append(nll.double().sum(1))
            counts.append((targets != UNSCORED).sum(1))
            bar.update(len(targets))
    nll_sums, num_scored = torch.cat(sums), torch.cat(counts)
    nll, nll_se = mean_and_se(nll_sums, num_scored)
    num_tokens = int(num_scored.sum())
    return {
        **exponential("perplexity", nll, nll_se),
        "nll": nll,
        "nll_se": nll_se,
        "num_tokens": num_tokens,
        **_per_unit("word", text.num_words, nll, nll_se, num_tokens),
        **_per_unit("byte", text.num_bytes, nll, nll_se, num_tokens),
        "num_words": text.num_words,
        "num_bytes": text.num_bytes,
        "num_documents": len(text.streams),
        "num_windows": len(windows),
        "length": length,
        "stride": windows.stride,
        "bos": text.bos,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "sha256": text.sha256(),
    }


def check_comparable(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Passes in silence when named results of `perplexity` scored the same tokens the same way.

    Raises:
        ValueError: They did not; says which settings differ.
    """
    for key in PROTOCOL:
        values = {name: result[key] for name, result in results.items()}
        if len(set(values.values())) > 1:
            listing = ", ".join(f"{name} {value}" for name, value in values.items())
            raise ValueError(f"these perplexities cannot be compared: {key} differs ({listing})")


def json_ready(value: Any) -> Any:
    """The same nested value with "inf", "-inf", "nan" for numbers that JSON has no form for."""
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def check_length(model: nn.Module, length: int) -> None:
    """Raises ValueError when a model with a table of positions cannot read windows of T tokens."""
    config = model.config.get_text_config()
    has_table = "rope_parameters" not in config.to_dict()
    limit = getattr(config, "max_position_embeddings", None)
    if has_table and limit is not None and length > limit:
        raise ValueError(
            f"evaluate.length: {length} is more than the {limit} positions of this model"
        )


def token_nll(
    model: nn.Module, input_ids: Tensor, targets: Tensor, *, logits_chunk: int = 256
) -> Tensor:
    """Negative log-likelihood [B, T] of the targets in nats, fp32; 0 where target is -100."""
    input_ids, targets = input_ids.to(model.device), targets.to(model.device)
    body = run_body(model, input_ids=input_ids)
    nll = torch.zeros(targets.shape, device=targets.device)
    for part in scored_slices(targets, logits_chunk):
        logits = head_logits(model, body, body.last_hidden_state[:, part]).float()
        wanted = targets[:, part]
        nll[:, part] = F.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=UNSCORED, reduction="none"
        ).view_as(wanted)
    return nll.cpu()


def scored_slices(targets: Tensor, logits_chunk: int) -> Iterator[slice]:
    """Yields slices of T that hold all scored targets [B, T], `logits_chunk` at most in each."""
    scored = (targets != UNSCORED).any(0).nonzero().flatten().tolist()
    width = max(1, logits_chunk // len(targets))
    for begin in range(scored[0], scored[-1] + 1, width):
        yield slice(begin, min(begin + width, scored[-1] + 1))


def mean_and_se(sums: Tensor, counts: Tensor) -> tuple[float, float | None]:
    """Mean per token and its standard error from sums and numbers of tokens per window, both [K].

    None is the error where fewer than two windows hold a token.
    """
    filled = counts > 0
    sums, counts = sums[filled].double(), counts[filled].double()
    mean = float(sums.sum() / counts.sum())
    k = len(counts)
    if k < 2:
        return mean, None
    variance = k / (k - 1) * (sums - mean * counts).square().sum() / counts.sum().square()
    return mean, float(variance.sqrt())


def exponential(name: str, mean: float, se: float | None) -> dict[str, float | None]:
    """`exp(mean)` under a name, and its standard error; `inf` where no float can hold it."""
    try:
        value = math.exp(mean)
    except OverflowError:
        return {name: math.inf, f"{name}_se": None if se is None else math.inf}
    return {name: value, f"{name}_se": None if se is None else value * se}


def _per_unit(
    unit: str, num_units: int | None, nll: float, nll_se: float | None, num_tokens: int
) -> dict[str, float | None]:
    """Perplexity per word or byte; None where the number of units is unknown."""
    name = f"{unit}_perplexity"
    if not num_units:
        return {name: None, f"{name}_se": None}
    ratio = num_tokens / num_units
    return exponential(name, nll * ratio, None if nll_se is None else nll_se * ratio)
