"""A causal language model in two steps, so that logits exist for a few tokens at a time.

Legend: B batch, T tokens, D hidden size, V vocabulary.

Both steps run the model's own forward, so that soft caps, logit scales and whatever else a family
does around its head are its own.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.utils import ModelOutput


def run_body(model: nn.Module, *, call: Callable[..., Any] | None = None, **inputs: Any) -> Any:
    """Output of the decoder of `model`: last_hidden_state [B, T, D] and whatever its head needs.

    The head runs too, on the first token only. `call` is called in place of the model: a wrapper
    of it.
    """
    outputs: list[ModelOutput] = []

    def keep(module: nn.Module, args: Any, output: ModelOutput) -> ModelOutput:
        outputs.append(output)
        return with_hidden(output, output.last_hidden_state[:, :1])

    handle = decoder_of(model).register_forward_hook(keep)
    try:
        (call or model)(**inputs, use_cache=False, return_dict=True)
    finally:
        handle.remove()
    return outputs[0]


def head_logits(model: nn.Module, body: ModelOutput, hidden: Tensor) -> Tensor:
    """Logits [B, t, V] of hidden states [B, t, D], taken from the output of `run_body`."""
    decoder = decoder_of(model)
    shown = with_hidden(body, hidden)
    previous = vars(decoder).get("forward")
    decoder.forward = lambda *args, **kwargs: shown
    try:
        placeholder = hidden.new_zeros(hidden.shape[:2]).long()
        return model(input_ids=placeholder, use_cache=False, return_dict=True).logits
    finally:
        del decoder.forward
        if previous is not None:
            decoder.forward = previous


def decoder_of(model: Any) -> nn.Module:
    """The model without its head. For Llama 4 `get_decoder` returns the whole model."""
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder


def with_hidden(body: ModelOutput, hidden: Tensor) -> ModelOutput:
    """The decoder's output with other hidden states."""
    return type(body)(**{**body, "last_hidden_state": hidden})
