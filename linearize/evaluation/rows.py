"""The rows of a comparison: which model answers, and in which mode.

Legend: W attention window, N sinks, T tokens.

- teacher: softmax attention, base weights.
- converted: the model as it is.
- window_only: linear branch off; the window and the sinks stay.
- linear_only: window and sinks off; the linear branch gets their keys.
- no_attention: converted layers give nothing to the residual stream.
- swa_sinks: base weights, last W and first N keys (4 where the conversion has no sinks), nothing
  trained. The floor that a conversion must beat.
- swa_sinks_equal_bytes: the same with a window so wide that its keys and values take the bytes of
  the converted layer's state. What the memory would be worth without any training.
- control: base weights, our code with W >= T. It must equal the teacher.

Layers and heads that the conversion left alone keep their softmax attention in every row.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from linearize.conversion import convert
from linearize.inspection import kv_bytes_per_token, state_bytes
from linearize.modeling.attention import branches, linearized_modules, no_attention, teacher
from linearize.modeling.configuration_linearized import LinearizeConfig

ROWS = (
    "teacher", "converted", "window_only", "linear_only", "no_attention", "swa_sinks",
    "swa_sinks_equal_bytes", "control",
)  # fmt: skip
FLOOR_SINKS = 4


@dataclass(frozen=True)
class Row:
    """One line of a table: a model, and the mode in which it answers.

    `mode` takes the model and returns the context in which it runs, such as `linearize.teacher`.
    """

    name: str
    model: nn.Module
    mode: Callable[[nn.Module], AbstractContextManager] = nullcontext

    @property
    def answer(self) -> tuple[int, int]:
        """Equal for rows that answer the same, which are scored once."""
        return id(self.model), id(self.mode)


def choose_rows(
    model: nn.Module, base_model: nn.Module | None, wanted: Sequence[str | Row], length: int
) -> dict[str, Row]:
    """The wanted rows by name, the teacher first whether it is wanted or not.

    Args:
        model: A converted model.
        base_model: Holds the base weights where those of `model` have changed: the softmax model,
            or a conversion of it. Not changed, not copied. None: `model` itself holds them.
        wanted: Names out of `ROWS`, and rows of your own.
        length: Tokens T that the control's window covers.

    Raises:
        ValueError: The model is not converted, or a row is unknown.
    """
    if not linearized_modules(model):
        raise ValueError("rows: this model has no linearized layer; convert it first")
    section = LinearizeConfig.from_dict(model.config.linearize_config)
    base: Any = _linearized_base(model, base_model, section)
    no_linear = partial(branches, linear=False)
    floor_sinks = section.sinks or FLOOR_SINKS
    if base is model and section.sinks > 0:
        floor = no_linear
    else:
        floor = partial(exact_keys, sinks=floor_sinks, linear=False)
    equal_bytes = equal_bytes_windows(section, base.dtype)
    known = {
        row.name: row
        for row in (
            Row("teacher", model if base_model is None else base_model, teacher),
            Row("converted", model),
            Row("window_only", model, no_linear),
            Row("linear_only", model, partial(branches, window=False)),
            Row("no_attention", model, no_attention),
            Row("swa_sinks", base, floor),
            Row(
                "swa_sinks_equal_bytes",
                base,
                partial(exact_keys, window=equal_bytes, sinks=floor_sinks, linear=False),
            ),
            Row("control", base, partial(exact_keys, window=length)),
        )
    }
    rows = {"teacher": known["teacher"]}
    for row in wanted:
        if isinstance(row, str) and row not in known:
            raise ValueError(f"rows: '{row}' is not a row; use {', '.join(ROWS)} or a Row")
        if isinstance(row, Row) and row.name in known:
            raise ValueError(f"rows: '{row.name}' is a row already; give yours another name")
        rows |= {row: known[row]} if isinstance(row, str) else {row.name: row}
    return rows


def equal_bytes_windows(section: LinearizeConfig, dtype: torch.dtype) -> dict[int, int]:
    """The window of each layer whose keys and values, sinks included, take its state's bytes.

    Keys and values are those of the linear heads. Rounded down, and never narrower than the
    conversion's own window.
    """
    sinks = section.sinks or FLOOR_SINKS
    windows = {}
    for layer in section.layers:
        shape = section.geometry[str(layer)]
        linear = {"num_key_value_heads": max(len(section.linear_heads(layer)), 1)}
        token = kv_bytes_per_token(shape | linear, dtype.itemsize)
        windows[layer] = max(section.window, state_bytes(section, layer, dtype) // token - sinks)
    return windows


@contextmanager
def exact_keys(
    model: nn.Module,
    *,
    window: int | Mapping[int, int] | None = None,
    sinks: int | None = None,
    linear: bool = True,
) -> Generator[None]:
    """Runs the block with another number of exact keys in every converted layer.

    `window` is one number, or one per layer.
    """
    heads = {layer: module.linearized for layer, module in linearized_modules(model).items()}
    before = {layer: (head.window, head.sinks) for layer, head in heads.items()}
    try:
        for layer, head in heads.items():
            wide = window[layer] if isinstance(window, Mapping) else window
            head.window = head.window if wide is None else wide
            head.sinks = head.sinks if sinks is None else sinks
        with branches(model, linear=linear):
            yield
    finally:
        for layer, head in heads.items():
            head.window, head.sinks = before[layer]


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
    kept = ("layers", "softmax_heads", "window", "sinks", "window_kind")
    return convert(twin, **{name: getattr(section, name) for name in kept})


def position_edges(window: int, length: int) -> list[int]:
    """0, W, 2W, 4W, ... below T, and T."""
    edges = [0]
    edge = window
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]
