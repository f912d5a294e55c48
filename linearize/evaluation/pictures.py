"""Attention weights of a few heads on a few passages: teacher and student, small enough to keep.

Legend: L converted layers, H query heads, S passages, P pictured heads, T tokens, Q queries.
"""

import json
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from linearize.evaluation.fidelity import (
    MAX_QUERIES,
    MEASURES,
    check_converted,
    choose_heads,
    spread,
    window_and_sinks,
)
from linearize.evaluation.windows import Documents, read_text
from linearize.losses import teacher_log_weights
from linearize.modeling.attention import linearized_modules, transfer
from linearize.modeling.softmax import place_heads
from linearize.training import evaluating

CODES_PER_DECADE = 51
LOWEST_DECADE = -5  # code 0 stands for a weight of 1e-5 or less, code 255 for 1
MAX_CODES = 1_500_000  # in the pictures of one model

TEACHER, STUDENT = "teacher.safetensors", "student.safetensors"


@dataclass(frozen=True)
class Pictures:
    """What a folder of pictures holds."""

    layers: list[int]  # of the rows of the measures
    measures: dict[str, np.ndarray]  # [L, H] each, see `fidelity`
    window: int
    sinks: int
    texts: list[list[str]]  # T pieces of each of S passages
    heads: list[tuple[int, int]]  # (layer_idx, head) of P pictures
    queries: np.ndarray  # [Q]
    teacher: np.ndarray | None  # codes [S, P, Q, T]
    student: np.ndarray | None


def picture_teacher(
    model: nn.Module,
    tokenizer: Any,
    text: Documents,
    measures: dict[str, Tensor],
    folder: str | Path,
    *,
    max_length: int = 1024,
) -> None:
    """Writes the teacher's weights of telling heads on up to three passages, and the measures.

    A weight w is stored as the byte 51 (5 + log10 w), which is exact to 2.3 %. Heads and passages
    are few enough that all pictures of a model take 1.5 MB or less, before compression.

    Args:
        model: A converted model whose other weights are the teacher's.
        tokenizer: Its tokenizer.
        text: Documents to choose from.
        measures: What `fidelity` found.
        folder: Where teacher.safetensors goes.
        max_length: Most tokens of a passage.

    Raises:
        ValueError: The model is not converted.
    """
    check_converted(model, "pictures")
    texts = _passages(model, tokenizer, text, max_length)
    layers = sorted(linearized_modules(model))
    per_head = sum(min(len(text), MAX_QUERIES) * len(text) for text in texts)
    affordable = min(max(MAX_CODES // per_head, 3), 12)
    heads = [(layers[row], head) for row, head in choose_heads(measures, affordable)]
    queries = spread(0, len(texts[0]))
    window, sinks = window_and_sinks(model)
    known = {
        "layers": layers,
        "heads": heads,
        "window": window,
        "sinks": sinks,
        "texts": [[tokenizer.decode([token]) for token in text.tolist()] for text in texts],
    }
    ids = torch.stack(texts)
    tensors = {name: value.float().numpy() for name, value in measures.items()}
    tensors |= {"ids": ids.numpy(), "queries": queries.numpy()}
    tensors["weights"] = _picture(model, ids, queries, heads, teacher=True)
    _write(Path(folder, TEACHER), tensors, known)


def picture_student(model: nn.Module, folder: str | Path) -> None:
    """Writes the weights of the same heads in a converted model as it runs.

    There a layer reads what the converted layers before it have made of the passage.

    Args:
        model: A converted model.
        folder: Holds teacher.safetensors; student.safetensors is added.
    """
    with safe_open(Path(folder, TEACHER), "pt") as stored:
        heads = [(layer, head) for layer, head in json.loads(stored.metadata()["known"])["heads"]]
        ids, queries = stored.get_tensor("ids"), stored.get_tensor("queries")
    weights = _picture(model, ids, queries, heads, teacher=False)
    _write(Path(folder, STUDENT), {"weights": weights}, {})


def read_pictures(folder: str | Path) -> Pictures | None:
    """What was written into a folder; None if nothing was."""
    if not Path(folder, TEACHER).is_file():
        return None
    with safe_open(Path(folder, TEACHER), "np") as stored:
        known = json.loads(stored.metadata()["known"])
        measures = {name: stored.get_tensor(name) for name in MEASURES}
        queries, teacher = stored.get_tensor("queries"), stored.get_tensor("weights")
    student = None
    if Path(folder, STUDENT).is_file():
        with safe_open(Path(folder, STUDENT), "np") as stored:
            student = stored.get_tensor("weights")
    known["heads"] = [(layer, head) for layer, head in known["heads"]]
    return Pictures(**known, measures=measures, queries=queries, teacher=teacher, student=student)


def _passages(
    model: nn.Module, tokenizer: Any, text: Documents, max_length: int, *, count: int = 3
) -> list[Tensor]:
    """Up to `count` passages [T] of a text, all of one length, to picture a model on.

    They are the beginnings of documents, or of equal parts of the longest one; T is about twice
    what the window and the sinks cover, or what there is.
    """
    streams = read_text(tokenizer, text).streams
    length = min(max(2 * sum(window_and_sinks(model)) + 24, 96), max_length)
    enough = [stream for stream in streams if len(stream) >= length]
    if len(enough) < count:
        longest = max(streams, key=len)
        length = min(length, len(longest))
        enough = list(longest.split(max(length, len(longest) // count)))
    return [stream[:length] for stream in enough if len(stream) >= length][:count]


def _picture(
    model: nn.Module,
    ids: Tensor,
    queries: Tensor,
    heads: Sequence[tuple[int, int]],
    *,
    teacher: bool,
) -> np.ndarray:
    """Codes [S, P, Q, T] of passages ids [S, T]."""
    codes = np.zeros((len(ids), len(heads), len(queries), ids.shape[1]), np.uint8)
    watch = _teacher_log_weights if teacher else _student_log_weights
    for pictures, passage in zip(codes, ids, strict=True):
        with evaluating(model):
            found = watch(
                model,
                passage[None].to(model.device),
                queries[None].to(model.device),
                {layer for layer, _ in heads},
            )
        for place, (layer, head) in enumerate(heads):
            decades = found[layer][0, head].double().cpu().numpy() / math.log(10)
            code = CODES_PER_DECADE * (decades - LOWEST_DECADE)
            pictures[place] = np.rint(code.clip(0, 255))
    return codes


def _teacher_log_weights(
    model: nn.Module, ids: Tensor, queries: Tensor, layers: Collection[int]
) -> dict[int, Tensor]:
    """{layer: log weights [1, H, Q, T]} of the softmax attention of the model's own weights."""
    found = {}

    def observe(module, q, k, v, out, *, attention_mask, heads=None, **inputs):
        if module.layer_idx in layers:
            weights = teacher_log_weights(q, k, queries, **inputs)
            heads_of = module.linearized.num_kv_heads
            found[module.layer_idx] = place_heads(weights, heads, heads_of)

    with transfer(model, observe):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    return found


def _student_log_weights(
    model: nn.Module, ids: Tensor, queries: Tensor, layers: Collection[int]
) -> dict[int, Tensor]:
    """{layer: log weights [1, H, Q, T]} of the converted layers as they run."""
    found = {}

    def watch(layer):
        def before(linearized, qkv, options):
            options = {**options, "queries": queries, "weights": True}
            weights = linearized.forward(*qkv, **options).log_weights
            heads = options.get("heads")
            found[layer] = place_heads(weights, heads, linearized.num_kv_heads)

        return before

    modules = linearized_modules(model)
    handles = [
        modules[layer].linearized.register_forward_pre_hook(watch(layer), with_kwargs=True)
        for layer in layers
    ]
    try:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _write(file: Path, tensors: dict[str, np.ndarray], known: dict[str, Any]) -> None:
    """Writes a file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"known": json.dumps(known)})
    os.replace(unfinished, file)
