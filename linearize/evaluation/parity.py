"""The same tokens by different ways through a converted model: how far the logits are apart.

Legend: T tokens, V vocabulary, W attention window, N sinks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from linearize.evaluation.efficiency import CACHE
from linearize.evaluation.rows import exact_keys
from linearize.modeling.attention import linearized_modules, teacher
from linearize.modeling.modeling_linearized import NO_POSITIONS
from linearize.training import evaluating

DECODED = 16  # tokens
LARGEST_KL = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.02}  # nats per token


def parity(model: Any, *, length: int | None = None, seed: int = 0) -> dict[str, Any]:
    """Distances between ways of computing that must agree, measured on random tokens.

    - chunked: the prompt read piece by piece into a cache, against all of it without one.
    - decode: its last tokens read one at a time, against the same.
    - padding: padded on the left in a batch, against alone.
    - packing: two documents in one row, against each alone. Missing for families whose attention is
      not told the positions.
    - window_covers_all: the window as wide as the text, against softmax attention.

    Args:
        model: A converted model.
        length: Tokens T; None: 4 (W + N).
        seed: Of the tokens.

    Returns:
        {"checks": {name: {"max_logit_difference", "kl", "agrees"}}, "tokens", "dtype",
        "largest_kl", "agrees"}: kl is the mean in nats per token; `agrees` that it is at most
        "largest_kl", the rounding that the dtype allows.

    Raises:
        ValueError: The model is not converted.
    """
    if not linearized_modules(model):
        raise ValueError("parity: this model has no linearized layer; convert it first")
    section = model.config.linearize_config
    length = 4 * (section["window"] + section["sinks"]) if length is None else length
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (1, length), generator=generator).to(model.device)
    ways: dict[str, Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]] = {
        "chunked": _chunked, "decode": _decode, "padding": _padding, "packing": _packing,
        "window_covers_all": _window_covers_all,
    }  # fmt: skip
    if section["base_model_type"] in NO_POSITIONS:
        del ways["packing"]
    limit = LARGEST_KL.get(model.dtype, LARGEST_KL[torch.float32])
    checks = {}
    with evaluating(model):
        for name, way in ways.items():
            distances = _distances(*(x.float() for x in way(model, ids)))
            checks[name] = distances | {"agrees": distances["kl"] <= limit}
    return {
        "checks": checks,
        "tokens": length,
        "dtype": str(model.dtype).removeprefix("torch."),
        "largest_kl": limit,
        "agrees": all(check["agrees"] for check in checks.values()),
    }


def _distances(expected: Tensor, found: Tensor) -> dict[str, float]:
    """Of logits [1, t, V]."""
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    return {
        "max_logit_difference": float((expected - found).abs().max()),
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
    }


def _whole(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    return model(ids, use_cache=False, **options).logits


def _in_pieces(model: Any, ids: Tensor, sizes: list[int]) -> Tensor:
    """Logits of tokens that are read in pieces of so many, by way of a cache."""
    cache = DynamicCache(config=model.config)
    pieces = ids.split(sizes, 1)
    return torch.cat([model(x, use_cache=True, **{CACHE: cache}).logits for x in pieces], 1)


def _chunked(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    T = ids.shape[1]
    return _whole(model, ids), _in_pieces(model, ids, [T // 3, 1, T // 2, T - 1 - T // 3 - T // 2])


def _decode(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    n = min(DECODED, ids.shape[1] // 2)
    found = _in_pieces(model, ids, [ids.shape[1] - n] + [1] * n)
    return _whole(model, ids)[:, -n:], found[:, -n:]


def _padding(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    pads = ids.shape[1] // 4
    mask = torch.ones_like(ids).repeat(2, 1)
    mask[1, :pads] = 0
    batch = torch.cat([ids, ids.roll(pads, 1)])  # the second row: padding, then the first tokens
    found = _whole(model, batch, attention_mask=mask)[1:, pads:]
    return _whole(model, ids[:, : ids.shape[1] - pads]), found


def _packing(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    documents = ids.split([ids.shape[1] // 3, ids.shape[1] - ids.shape[1] // 3], 1)
    alone = torch.cat([_whole(model, document) for document in documents], 1)
    positions = torch.cat([torch.arange(x.shape[1], device=ids.device) for x in documents])
    return alone, _whole(model, ids, position_ids=positions[None])


def _window_covers_all(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    with teacher(model):
        expected = _whole(model, ids)
    with exact_keys(model, window=ids.shape[1]):
        return expected, _whole(model, ids)
