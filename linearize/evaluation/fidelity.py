"""How close each head's attention is to the teacher's.

Legend: L converted layers, H query heads, T tokens, Q queries, W window, N sinks.

Every layer gets the teacher's own q, k, v, as in attention transfer, so the model is measured
before its other weights are finetuned.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linearize.evaluation.windows import UNSCORED, Documents, read_text
from linearize.losses import LOWEST_LOG_WEIGHT, teacher_log_weights
from linearize.modeling.attention import linearized_modules, transfer
from linearize.modeling.ops import masks
from linearize.modeling.rows import take_rows
from linearize.modeling.softmax import place_heads
from linearize.training import evaluating
from linearize.transfer import exact_tokens

MEASURES = ("output_error", "attention_kl", "beyond_window", "student_beyond_window")
MAX_QUERIES = 128  # rows of weights of one text


def fidelity(
    model: nn.Module,
    tokenizer: Any,
    text: Documents,
    *,
    length: int = 1024,
    max_windows: int = 8,
) -> dict[str, Tensor]:
    """Four measures of every converted head, each [L, H] in float64; rows in the order of layers.

    - output_error: |student - teacher|^2 over |teacher|^2 of the head's output.
    - attention_kl: KL(teacher || student) of the weights, in nats.
    - beyond_window: share of the teacher's weight on keys that only the linear branch sees.
    - student_beyond_window: the same share of the student's weight.

    They are taken over at most 128 evenly spread queries of each window of text, out of those that
    have keys beyond W + N. A layer with fewer heads than another ends in nan;
    heads that stay softmax have nan.

    Args:
        model: A converted model whose other weights are the teacher's.
        tokenizer: Its tokenizer.
        text: One or several documents, as text or token ids.
        length: Tokens of a window of text.
        max_windows: Windows that are read; the longest ones.

    Returns:
        {measure: [L, H]}; empty if no window reaches beyond W + N.

    Raises:
        ValueError: The model is not converted.
    """
    check_converted(model, "fidelity")
    sums: dict[int, Tensor] = {layer: torch.zeros(6, 1) for layer in linearized_modules(model)}
    exact = exact_tokens(model)
    windows = read_text(tokenizer, text).windows(length=length)
    read = 0
    with evaluating(model):
        for inputs, targets in windows.batches(1):
            num_tokens = int((targets != UNSCORED).sum())
            if read == max_windows or num_tokens <= exact:
                break
            ids = inputs[:, :num_tokens].to(model.device)
            for layer, found in _sums_of_window(model, ids).items():
                sums[layer] = sums[layer] + found
            read += 1
    if not read:
        return {}
    rows = [torch.stack([s[0] / s[1], *(s[2:5] / s[5])]).T for s in sums.values()]  # [H, 4] each
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan)
    return {name: padded[..., i].contiguous() for i, name in enumerate(MEASURES)}


def _sums_of_window(model: nn.Module, ids: Tensor) -> dict[int, Tensor]:
    """Sums over queries of ids [1, T], [6, H] by layer: squared error, squared output, KL, the
    teacher's and the student's weight beyond the window, and the number of queries.
    """
    window, sinks = window_and_sinks(model)
    queries = spread(exact_tokens(model), ids.shape[1]).to(ids.device)[None]  # [1, Q]
    everything = torch.ones_like(ids, dtype=torch.bool)
    sums = {}

    def observe(module, q, k, v, teacher_out, *, attention_mask, heads=None, **inputs):
        rows = module.linearized(q, k, v, queries=queries, weights=True, heads=heads, **inputs)
        target = teacher_log_weights(q, k, queries, **inputs)  # [1, H, Q, T]
        kind = module.linearized.window_kind
        beyond = masks(everything, None, window, sinks, queries, kind)[1]  # [1, Q, T]
        out, weights = take_rows(teacher_out, queries).double(), target.exp()
        gap = target.masked_fill(weights == 0, 0) - rows.log_weights.clamp(min=LOWEST_LOG_WEIGHT)
        found = (
            (rows.out.double() - out).square().sum(-1),
            out.square().sum(-1),
            (weights * gap).sum(-1),
            (weights * beyond[:, None]).sum(-1),
            rows.linear_mass,
            torch.ones_like(rows.linear_mass),
        )  # [1, H, Q] each
        total = torch.stack([x.double().sum((0, 2)) for x in found]).cpu()
        sums[module.layer_idx] = place_heads(total, heads, module.linearized.num_kv_heads)

    with transfer(model, observe):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    return sums


def choose_heads(found: Mapping[str, Tensor], count: int = 12) -> list[tuple[int, int]]:
    """Up to `count` (row, head) of a `fidelity` that tell most, in the order of layers.

    A third are those whose teacher looks furthest beyond the window, the work of the linear branch;
    the others are evenly spread from the best to the worst KL.
    """
    kl, beyond = found["attention_kl"], found["beyond_window"]
    heads = [(row, head) for row, head in (~kl.isnan()).nonzero().tolist()]
    by_kl = sorted(heads, key=lambda head: kl[head].item())
    by_reach = sorted(heads, key=lambda head: -beyond[head].item())
    chosen = set(by_reach[: math.ceil(count / 3)])
    others = [head for head in by_kl if head not in chosen]
    places = np.linspace(0, len(others) - 1, max(min(count - len(chosen), len(others)), 0))
    return sorted(chosen | {others[round(place)] for place in places})


def spread(first: int, end: int) -> Tensor:
    """At most 128 positions from `first` to `end` - 1, evenly spread, with the last one."""
    count = min(MAX_QUERIES, end - first)
    return torch.linspace(first, end - 1, count, dtype=torch.float64).round().long()


def window_and_sinks(model: nn.Module) -> tuple[int, int]:
    section: Any = model.config.linearize_config
    return section["window"], section["sinks"]


def check_converted(model: nn.Module, what: str) -> None:
    if not linearized_modules(model):
        raise ValueError(f"{what}: this model has no linearized layer; convert it first")
