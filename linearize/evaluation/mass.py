"""Where the weight of the attention rows lies: the share of the linear branch, by layer and head.

Legend: B batch, H query heads, Q queries, T tokens, W attention window, N sinks.

A linear branch whose share is near zero idles, whatever the scores say. Beside it stands what
softmax attention gives the same keys for the same queries: the tokens that have left the window.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from linearize.evaluation.perplexity import mean_and_se
from linearize.evaluation.windows import Documents, read_text
from linearize.logits import run_body
from linearize.losses import teacher_log_weights
from linearize.modeling.attention import linearized_modules
from linearize.modeling.ops import masks
from linearize.modeling.softmax import place_heads
from linearize.training import evaluating
from linearize.transfer import exact_tokens

SCORES = ("scaling", "softcap", "sink_logit", "valid", "documents")


def linear_mass(
    model: nn.Module,
    tokenizer: Any,
    text: Documents,
    *,
    length: int = 1024,
    num_windows: int = 8,
    num_queries: int = 64,
    bos: str = "auto",
) -> dict[str, Any]:
    """Share of the attention weight that lies in the linear branch, mean over queries beyond W + N.

    The model runs as it is, so that a layer's queries and keys are those of converted layers below.

    Args:
        model: A converted model.
        tokenizer: Its tokenizer.
        text: As in `ablation`.
        length: Tokens of a window of text, T.
        num_windows: The first windows with such queries are read.
        num_queries: Evenly spaced in each.
        bos: As in `ablation`.

    Returns:
        {"linear", "softmax", "layers", "num_windows", "num_queries"}: a layer has "linear",
        "linear_se", "softmax", lists with one number per head; "softmax" is the weight that softmax
        attention gives the keys of the linear branch. Heads that stay softmax have 0. At the top
        are the means. An empty "layers" says that no window of text reaches beyond W + N.

    Raises:
        ValueError: The model is not converted, or there is no text.
    """
    layers = linearized_modules(model)
    if not layers:
        raise ValueError("linear_mass: this model has no linearized layer; convert it first")
    exact = exact_tokens(model)
    windows = read_text(tokenizer, text, bos=bos).windows(length=length)
    shares: dict[int, list[Tensor]] = {layer: [] for layer in layers}  # [2, H] per window
    queries = torch.zeros(1, 0, dtype=torch.long)

    def observe(heads: nn.Module, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        shares[owners[heads]].append(_shares(heads, *args, queries=queries, **kwargs))

    owners = {module.linearized: layer for layer, module in layers.items()}
    read = 0
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for heads in owners:
            hook = heads.register_forward_hook(observe, with_kwargs=True)
            stack.callback(hook.remove)
        for input_ids, _ in windows.batches(1):
            if read == num_windows or input_ids.shape[1] <= exact:
                break  # longer windows come first
            spaced = torch.linspace(exact, input_ids.shape[1] - 1, num_queries).long()
            queries = spaced.unique()[None].to(model.device)
            run_body(model, input_ids=input_ids.to(model.device))
            read += 1
    found = {str(layer): _by_head(torch.stack(x)) for layer, x in shares.items() if x}
    return {
        **{name: _mean(found, name) for name in ("linear", "softmax") if found},
        "layers": found,
        "num_windows": read,
        "num_queries": num_queries,
    }


def _shares(
    heads: Any, q: Tensor, k: Tensor, v: Tensor, *, queries: Tensor, **kwargs: Any
) -> Tensor:
    """[2, H] for one window: weight of the linear keys here, and under softmax attention."""
    scores = {name: kwargs[name] for name in SCORES if name in kwargs}
    some = kwargs.get("heads")
    rows = heads.forward(q, k, v, queries=queries, weights=True, heads=some, **scores)
    softmax = teacher_log_weights(q, k, queries, **scores).exp()  # [1, H, Q, T]
    everything = torch.ones(1, q.shape[2], dtype=torch.bool, device=q.device)
    valid = kwargs.get("valid")
    linear = masks(
        everything if valid is None else valid,
        kwargs.get("documents"),
        heads.window,
        heads.sinks,
        queries,
        heads.window_kind,
    )[1]
    teacher = (softmax * linear[:, None]).sum(-1)
    found = torch.stack([rows.linear_mass[0].mean(-1), teacher[0].mean(-1)]).double().cpu()
    return place_heads(found, some, heads.num_kv_heads)


def _by_head(shares: Tensor) -> dict[str, list[float | None]]:
    """Means and errors over windows, from shares [K, 2, H]."""
    ones = torch.ones(len(shares))
    linear = [mean_and_se(x, ones) for x in shares[:, 0].T]
    return {
        "linear": [mean for mean, _ in linear],
        "linear_se": [se for _, se in linear],
        "softmax": shares[:, 1].mean(0).tolist(),
    }


def _mean(layers: dict[str, Any], name: str) -> float:
    values = [value for layer in layers.values() for value in layer[name]]
    return sum(values) / len(values)
