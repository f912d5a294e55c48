"""The original attention of a converted layer, for all of its heads or for those that stay softmax.

Legend: B batch, H query heads, G key/value heads, T tokens, S keys, D head size, Dv value size.

Heads are named by key/value head; the H / G query heads of a group go with it.
"""

import sys

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION = "linearized"


def stock_class(module):
    """The class of a linearized attention module before it was one."""
    return next(c for c in type(module).__mro__ if not getattr(c, "is_linearized_attention", False))


def softmax_attention(module):
    """The attention function that the unmodified model would use here."""
    name = module.base_config._attn_implementation
    eager = getattr(sys.modules[stock_class(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface("sdpa" if name == IMPLEMENTATION else name, eager)


def take_heads(x, heads, num_kv_heads, dim=1):
    """The entries of x along `dim` that belong to some key/value heads: of G, H or HS there."""
    size = x.shape[dim] // num_kv_heads
    return torch.cat([x.narrow(dim, g * size, size) for g in heads], dim)


def place_heads(x, heads, num_kv_heads, dim=1):
    """The inverse of `take_heads`, with zeros for the other heads; x as it is if heads is None."""
    if heads is None:
        return x
    size = x.shape[dim] // len(heads)
    index = [g * size + r for g in heads for r in range(size)]
    shape = list(x.shape)
    shape[dim] = num_kv_heads * size
    return x.new_zeros(shape).index_copy_(dim, torch.tensor(index, device=x.device), x)


def join_heads(parts, num_kv_heads):
    """[B, H, T, Dv] from parts {heads: [B, some of H, T, Dv]} that name each head once."""
    size = sum(x.shape[1] for x in parts.values()) // num_kv_heads
    found = {
        g: x.narrow(1, i * size, size) for heads, x in parts.items() for i, g in enumerate(heads)
    }
    return torch.cat([found[g] for g in range(num_kv_heads)], 1)


def attend_softmax(module, heads, query, key, value, attention_mask, *, layer, **options):
    """Outputs [B, some of H, T, Dv] of the heads that stay softmax, by the model's own function.

    query [B, H, T, D], key [B, G, T, D], value [B, G, T, Dv] are those of all heads; layer, a
    LinearizedLayer or None, holds earlier keys and values of these heads, and keeps the new ones.
    """
    G = key.shape[1]
    if module.base_config._attn_implementation == IMPLEMENTATION:
        raise ValueError(
            "attn_implementation 'linearized' makes no mask for the heads that stay softmax; load "
            'the model with "sdpa" or "eager"'
        )
    if options.get("s_aux") is not None:
        raise NotImplementedError(
            f"convert.softmax_heads: {module.base_config.model_type} keeps a learned logit per "
            "head, and its attention cannot run for some heads only; leave the whole layer out "
            "of convert.layers"
        )
    query, key, value = (take_heads(x, heads, G) for x in (query, key, value))
    if layer is not None:
        key, value = layer.keep(key, value)
    out, _ = softmax_attention(module)(module, query, key, value, attention_mask, **options)
    return out.transpose(1, 2)
