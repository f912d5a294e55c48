"""The constant-size cache layer, and how it takes its place in a cache that somebody else made.

Where some heads of a layer stay softmax, it also keeps their keys and values, which grow, in the
layer whose place it took.

Legend: B batch, G key/value heads, T tokens, D head size.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .ops import State


class LinearizedLayer(CacheLayerMixin):
    """The memory of one linearized layer: a `State`, constant in size at any length.

    `update`, which the stock attention calls, hands keys and values back unchanged; the attention
    function, which receives this object, reads the state and advances it. Tensors change in place
    while no gradient is wanted (their addresses stay, as CUDA graphs need), and are replaced
    otherwise.

    Rollback (assisted decoding): while past recording is on, the state at the last crop is kept
    together with the keys and values since. `crop(-n)` drops the last n of them; the next forward
    replays what is left.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, siblings=(), kept=None):
        """A layer among its `siblings`, the layers of the owning cache, in the place of `kept`."""
        super().__init__()
        self.siblings = siblings
        self.kept = DynamicLayer() if kept is None else kept  # of the heads that stay softmax
        self.keeps = 0  # how many such heads there are
        self.record_past = getattr(kept, "record_past", False)
        self.cumulative_length = 0
        self.state, self.settings, self.padded = None, None, False
        self._base, self._log, self._stale = None, [], False

    # ---------------------------------------------------------------------------------------- state
    def read(self, advance):
        """The current State, or None before the first token.

        advance(state, k, v, valid) -> State replays after a crop.
        """
        if self._stale:
            state = self._base
            for k, v, valid in self._log:
                state = advance(state, k, v, valid)
            self.state, self._base, self._log, self._stale = state, state, [], False
        return self.state if self.cumulative_length else None

    def write(self, state, k, v, valid):
        """Stores the state after the tokens k [B, G, T, D], v, valid ([B, T] or None)."""
        if self.record_past:
            if not self._log:
                self._base = self.state if self.cumulative_length else None
            self._log.append((k, v, valid))
        if self.record_past or torch.is_grad_enabled():
            self.state = state
        elif self._fits(state):
            for old, new in zip(self.state, state):
                if old is not new:
                    old.copy_(new)
        else:  # own memory: these tensors are views into those of the whole prompt
            self.state = State(*(tensor.clone() for tensor in state))
            if not torch.compiler.is_compiling():
                for tensor in self.state:
                    torch._dynamo.mark_static_address(tensor)
        self.is_initialized, self.device = True, k.device
        self.padded = self.padded or valid is not None
        self.cumulative_length += k.shape[2]

    def keep(self, k, v):
        """All keys and values so far of the heads that stay softmax, k [B, G, T, D] and v added."""
        return self.kept.update(k, v)

    def owns(self, state):
        """Whether `state` may change in place: no gradient and no rollback needs what it was."""
        return (
            state is self.state
            and not (self.record_past or torch.is_grad_enabled())
            and self._fits(state)
        )

    def has_seen(self, tokens):
        """Whether every row surely holds so many tokens; False while compiling, where the answer
        would change the graph.
        """
        return (
            not (torch.compiler.is_compiling() or self.padded) and self.cumulative_length >= tokens
        )

    def _fits(self, state):
        """Whether `state` can be written into the tensors that are there."""
        if self.state is None or self.state.S.shape != state.S.shape:
            return False
        return (
            torch.compiler.is_compiling()
            or torch.is_inference_mode_enabled()
            or not self.state.S.is_inference()
        )

    def _map(self, function):
        apply = lambda state: None if state is None else State(*map(function, state))  # noqa: E731
        self.state, self._base = apply(self.state), apply(self._base)
        self._log = [
            tuple(None if x is None else function(x) for x in entry) for entry in self._log
        ]

    # ------------------------------------------------------------------------------ CacheLayerMixin
    def lazy_initialization(self, key_states, value_states):
        """Nothing to do: the attention function makes the first state."""

    def update(self, key_states, value_states, *args, **kwargs):
        return key_states, value_states

    def get_seq_length(self):
        return self.cumulative_length

    @property
    def is_compileable(self):
        return self.kept.is_compileable if self.keeps else True

    def get_max_length(self):
        return self.kept.get_max_length() if self.keeps else -1

    get_max_cache_shape = get_max_length  # the abstract name in earlier releases of 5

    def get_mask_sizes(self, query_length):
        # One mask serves the whole model and may be sized by this layer: answer for the softmax
        # layers and heads that are left.
        held = [x.kept if isinstance(x, LinearizedLayer) and x.keeps else x for x in self.siblings]
        softmax = [
            x for x in held if isinstance(x, CacheLayerMixin) and not isinstance(x, LinearizedLayer)
        ]
        full = [x for x in softmax if not getattr(x, "is_sliding", False)] or softmax
        return (
            full[0].get_mask_sizes(query_length) if full else (query_length, self.cumulative_length)
        )

    def reset(self):
        # the tensors stay, and so do their addresses; at length 0 nobody reads them
        self._base, self._log, self._stale = None, [], False
        self.cumulative_length, self.settings = 0, None
        self.is_initialized = self.padded = False
        self.kept.reset()

    def reorder_cache(self, beam_idx):
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))
        if self.keeps:
            self.kept.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats):
        self._map(lambda x: x.repeat_interleave(repeats, 0))
        if self.keeps:
            self.kept.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices):
        self._map(lambda x: x[indices, ...])
        if self.keeps:
            self.kept.batch_select_indices(indices)

    def offload(self):
        """Nothing to do: the state is small, and `Cache.update` asks for this before attention
        reads it; so kept keys stay on their device too.
        """

    prefetch = offload

    # ------------------------------------------------------------------------------------- rollback
    @property
    def is_croppable(self):
        return self.record_past and (self.kept.is_croppable if self.keeps else True)

    def activate_past_recording(self):
        self.record_past = True

    def crop(self, tokens_to_remove):
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give the number of tokens to remove as a negative "
                "number; an absolute length, "
                "as in transformers before 5, is not supported"
            )
        if not self.record_past:
            if not tokens_to_remove:
                return
            raise RuntimeError(
                "crop: a constant-size state cannot be cropped; call activate_past_recording() "
                "before it is filled"
            )
        remove = -tokens_to_remove
        held = sum(k.shape[2] for k, _, _ in self._log)
        if remove > held:
            raise RuntimeError(
                f"crop(-{remove}): only the {held} tokens since the last crop can be removed"
            )
        self.cumulative_length -= remove
        if self.keeps:
            self.kept.crop(tokens_to_remove)
        if not remove:
            if not self._stale:
                self._base, self._log = None, []
            return
        while remove:
            k, v, valid = self._log.pop()
            keep = max(k.shape[2] - remove, 0)
            remove -= k.shape[2] - keep
            if keep:
                self._log.append(
                    (k[:, :, :keep], v[:, :, :keep], None if valid is None else valid[:, :keep])
                )
        self._stale = True


def claim_cache_layer(cache, layer_idx, keep=0):
    """The LinearizedLayer of a cache: on first touch it replaces the layer that lies there, which
    must be empty. keep is the number of key/value heads that stay softmax.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    while len(cache.layers) <= layer_idx:
        cache.layers.append((cache.layer_class_to_replicate or DynamicLayer)())
    layer = cache.layers[layer_idx]
    if not isinstance(layer, LinearizedLayer):
        if layer.is_initialized and int(layer.get_seq_length()) > 0:
            raise ValueError(
                f"layer {layer_idx} of this cache holds the keys and values of softmax attention; "
                "a linearized layer cannot go "
                "on from them. Start from an empty cache."
            )
        layer = cache.layers[layer_idx] = LinearizedLayer(cache.layers, layer)
    if not layer.cumulative_length:
        layer.keeps = keep
        if keep and layer.kept.is_sliding:
            raise ValueError(
                f"convert.softmax_heads: layer {layer_idx} has a sliding window of its own, and "
                "its heads cannot stay softmax one by one; leave the layer out of convert.layers"
            )
        if keep and layer.kept.is_initialized and layer.kept.keys.shape[1] != keep:
            # a static layer made room for all heads
            layer.kept.lazy_initialization(layer.kept.keys[:, :keep], layer.kept.values[:, :keep])
    return layer


def find_cache(kwargs):
    """The cache among the arguments of an attention module, or None; an unknown kind of cache is
    refused.
    """
    for name in ("cache", "past_key_values", "layer_past"):  # 5.24, up to 5.20, gpt_neox
        cache = kwargs.get(name)
        if isinstance(cache, Cache):
            return cache
        if cache is not None:
            raise NotImplementedError(
                f"{type(cache).__name__}: linearized layers keep a constant-size state and need a "
                "transformers Cache "
                "(DynamicCache, StaticCache); continuous batching with paged caches is not "
                "supported. Use generate()."
            )
    return None


def check_softmax_layer(cache, layer_idx):
    """Raises ValueError where softmax attention would go on from a linear state."""
    if len(cache.layers) > layer_idx and isinstance(cache.layers[layer_idx], LinearizedLayer):
        raise ValueError(
            f"layer {layer_idx} of this cache holds a linear state; softmax attention cannot go on "
            "from it. Start from an empty cache."
        )
