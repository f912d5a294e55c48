"""The linearized attention of one layer: the module that owns the new parameters, the attention
function, the mixin.

Legend: B batch, H query heads, G key/value heads, T tokens, D head size, Dv value size, Q selected
queries.

`linearize_(module, ...)` turns a stock attention module into a linearized one by exchanging its
class: the stock `forward` goes on doing projections, q/k norms, rotary embedding and output
projection, and calls the attention function "linearized".
"""

import copy
import math
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.func import functional_call
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import initialization as init

from .accelerated import step_in_place
from .cache import check_softmax_layer, claim_cache_layer, find_cache
from .chunked import advance, hybrid_chunked, hybrid_packed
from .feature_maps import FEATURE_MAPS
from .masking import documents_of, merge_padding, padding_mask, padding_of
from .ops import Hybrid, Rows, empty_state, hybrid_quadratic, hybrid_step
from .rows import hybrid_rows
from .softmax import (
    IMPLEMENTATION,
    attend_softmax,
    join_heads,
    softmax_attention,
    stock_class,
    take_heads,
)

START_WEIGHT = (
    0.1  # of the window's best key, against linear weights of order 1 (Zhang et al. 2024)
)


class LinearizedHeads(nn.Module):
    """Every new parameter of one attention layer: state-dict prefix `...self_attn.linearized.`,
    always fp32. Heads that stay softmax have theirs too, unused.

    All that touches these parameters happens inside `forward`, where the hooks of accelerate, PEFT
    and FSDP act.
    """

    def __init__(self, section, layer_idx, device=None):
        super().__init__()
        shape = section.geometry[str(layer_idx)]
        if section.feature_map not in FEATURE_MAPS:
            known = ", ".join(FEATURE_MAPS)
            raise ValueError(
                f"convert.feature_map: {section.feature_map!r} is not known; choose one of {known}"
            )
        self.window, self.sinks, self.mixing = section.window, section.sinks, section.mixing
        self.window_kind = section.window_kind
        self.num_heads, self.num_kv_heads = shape["num_heads"], shape["num_key_value_heads"]
        self.state_heads = self.num_kv_heads if section.k_map == "kv_head" else self.num_heads
        make = FEATURE_MAPS[section.feature_map]
        options = dict(scaling=shape["scaling"], seed=section.seed + layer_idx)
        with torch.device(device or "cpu"):
            self.feature_map_q = (make.query_map or make)(
                self.num_heads, shape["qk_dim"], section.feature_dim, **options
            )
            self.feature_map_k = make(
                self.state_heads, shape["qk_dim"], section.feature_dim, **options
            )
            if self.mixing == "lolcats":
                self.gate = nn.Parameter(torch.empty(self.num_heads))
            elif self.mixing == "kernel" and section.feature_map == "favor":
                # an unbiased estimator of exp(score) has no free scale against exp(score)
                self.register_buffer("beta", torch.empty(self.num_heads))
            else:
                self.beta = nn.Parameter(torch.empty(self.num_heads))
            if self.mixing == "calibrated":
                self.alpha = nn.Parameter(torch.empty(self.num_heads))
        self.float()
        if self.window_kind == "terrace" and self.feature_map_k.log_space:
            raise ValueError(
                "convert.window_kind: 'terrace' is not possible with feature_map "
                f"{section.feature_map!r}, whose features are logarithms; use 'sliding'"
            )

    def reset_parameters(self):
        """Start values; tensors that were just loaded are left alone."""
        self.feature_map_q.reset_parameters()
        self.feature_map_k.reset_parameters()
        estimates = self.feature_map_k.estimates_exp
        if self.mixing == "lolcats":
            init.constant_(self.gate, math.log(START_WEIGHT / (1 - START_WEIGHT)))
        else:
            plain = self.mixing == "calibrated" and not estimates
            init.constant_(self.beta, math.log(START_WEIGHT) if plain else 0.0)
        if self.mixing == "calibrated":
            init.constant_(self.alpha, float(estimates))

    @property
    def fits_keys(self):
        """Whether the feature maps can start from real keys, by `fit`."""
        return hasattr(self.feature_map_k, "fit")

    def fit(self, keys, heads):
        """Start values of the feature maps from the keys [G, n, D] of the linear heads, after the
        rotary embedding; maps of softmax heads, which nobody reads, start from the first of them.
        """
        found = dict(zip(heads, keys, strict=True))
        every = torch.stack([found.get(g, keys[0]) for g in range(self.num_kv_heads)])
        repeat = self.state_heads // self.num_kv_heads
        self.feature_map_k.fit(self.feature_map_q, every.repeat_interleave(repeat, 0))

    def num_states(self, heads):
        """How many states some key/value heads have."""
        return self.state_heads // self.num_kv_heads * len(heads)

    def operator(
        self, *, scaling, softcap=None, sink_logit=None, window=True, linear=True, heads=None
    ):
        """The operator with this layer's parameters; window=False hands every key to the linear
        part; heads are the key/value heads whose parameters it has, None for all.
        """
        if not (window or linear):
            raise ValueError("branches: window and linear are both off; a layer needs one of them")
        if self.mixing == "lolcats":
            beta, alpha = nn.functional.logsigmoid(self.gate), torch.zeros_like(self.gate)
        else:
            beta = self.beta
            alpha = self.alpha if self.mixing == "calibrated" else torch.ones_like(beta)
        phi_q, phi_k, state_heads = self.feature_map_q, self.feature_map_k, self.state_heads
        if heads is not None:
            take = partial(take_heads, heads=heads, num_kv_heads=self.num_kv_heads, dim=0)
            beta, alpha, state_heads = take(beta), take(alpha), self.num_states(heads)
            phi_q, phi_k = (_map_of(take, feature_map) for feature_map in (phi_q, phi_k))
        return Hybrid(
            phi_q=phi_q,
            phi_k=phi_k,
            beta=beta,
            alpha=alpha,
            window=self.window if window else 0,
            sinks=self.sinks if window else 0,
            scaling=scaling,
            state_heads=state_heads,
            log_q=self.feature_map_q.log_space,
            log_k=self.feature_map_k.log_space,
            softcap=softcap,
            sink_logit=sink_logit if window else None,
            linear=linear,
            window_kind=self.window_kind,
        )

    def forward(
        self, q, k, v, *, valid=None, documents=None, queries=None, weights=False,
        cache_layer=None, **operator,
    ):  # fmt: skip
        """Attention outputs of one layer, or of those of its heads that q, k and v hold.

        Args:
            q: [B, H, T, D] queries, after the rotary embedding.
            k: [B, G, T, D] keys.
            v: [B, G, T, Dv] values.
            valid: [B, T] bool, False for padding; None if all tokens are real.
            documents: [B, T] int, the document of each token; None if every row is one document.
            queries: [B, Q] indices into T; only these rows are computed, and q, k, v are constants.
            weights: with queries, also the weights of all keys.
            cache_layer: a LinearizedLayer that holds what came before, and is advanced.
            operator: scaling, softcap, sink_logit, window, linear, heads; see `operator`.

        Returns:
            [B, H, T, Dv], or ops.Rows if queries are given: without `weights` only its `out`.
        """
        kind = q.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # scores and state stay fp32
            given = dict(valid=valid, documents=documents, cache_layer=cache_layer)
            given |= dict(queries=queries, weights=weights)
            with torch.autocast(kind, enabled=False):
                return self.forward(q, k, v, **given, **operator)
        op = self.operator(**operator)
        if queries is not None and (weights or valid is not None):
            return hybrid_quadratic(op, q, k, v, valid=valid, documents=documents, queries=queries)
        if queries is not None:
            return Rows(hybrid_rows(op, q, k, v, queries, documents=documents), None, None)

        def start():
            return empty_state(op, q, k, v, self.feature_map_k.num_features)

        if cache_layer is None:
            if documents is None:
                return hybrid_chunked(op, q, k, v, start(), valid=valid)[0]
            return hybrid_packed(op, q, k, v, start(), valid=valid, documents=documents)
        settings = (op.window, op.sinks, op.linear, operator.get("heads"))
        if cache_layer.settings not in (None, settings):
            raise ValueError(
                "this cache was filled with other branches (window, sinks, linear, heads = "
                f"{cache_layer.settings}, now {settings}); start from an empty cache"
            )
        cache_layer.settings = settings

        def replay(state, *tokens):
            return advance(op, start() if state is None else state, *tokens)

        state = cache_layer.read(replay) or start()
        if q.shape[2] == 1 and valid is None:
            out = step_in_place(op, q, k, v, state) if cache_layer.owns(state) else None
            if out is None:
                out, state = hybrid_step(
                    op, q, k, v, state, settled=cache_layer.has_seen(op.reach + op.sinks)
                )
        else:
            out, state = hybrid_chunked(op, q, k, v, state, valid=valid)
        cache_layer.write(state, k, v, valid)
        return out


def _map_of(take, feature_map):
    """A feature map for the heads whose parameters `take` takes."""
    parameters = {name: take(p) for name, p in feature_map.named_parameters()}
    return lambda x: functional_call(feature_map, parameters, (x,))


# ------------------------------------------------------------------------------- attention function
def linearized_attention(module, *args, **kwargs):
    """Only dispatches: the name is global, while each module brings its own version of the code."""
    return module.attend(*args, **kwargs)


AttentionInterface.register(IMPLEMENTATION, linearized_attention)
AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)


class LinearizedAttentionMixin:
    """Stands in front of a stock attention class; see `linearize_`.

    linearize_mode: "linear" the converted layer; "softmax" the original one, from the same weights;
    "transfer" the original one, and linearize_observer is told what went in and came out; "off" a
    layer whose attention output is zero. linearize_heads are the key/value heads that are linear:
    in every mode the others answer as in the original layer.
    """

    is_linearized_attention = True
    linearize_mode = "linear"
    linearize_branches = (True, True)  # window, linear
    linearize_observer = None

    @property
    def linearize_state(self):
        """Whether the layer needs a state: some heads are linear now."""
        return self.linearize_mode == "linear" and bool(self.linearize_heads)

    def softmax_heads(self):
        """The key/value heads that stay softmax."""
        return tuple(g for g in range(self.linearize_kv_heads) if g not in self.linearize_heads)

    def claim(self, cache):
        """This layer's place in a cache."""
        return claim_cache_layer(cache, self.layer_idx, keep=len(self.softmax_heads()))

    def forward(self, *args, **kwargs):
        cache = find_cache(kwargs)
        if cache is not None and self.linearize_state:
            kwargs["linearize_cache_layer"] = self.claim(cache)
        elif cache is not None:
            check_softmax_layer(cache, self.layer_idx)
        if "position_ids" in kwargs:  # some families do not hand it on
            kwargs["linearize_position_ids"] = kwargs["position_ids"]
        return super().forward(*args, **kwargs)

    def __reduce__(self):
        """Pickled and copied by way of the stock class: the class of this module may not exist yet
        where it is read.
        """
        return _restore, (stock_class(self),), self.__dict__

    def attend(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        dropout=0.0,
        softcap=None,
        s_aux=None,
        position_ids=None,
        linearize_cache_layer=None,
        linearize_position_ids=None,
        **kwargs,
    ):
        B, _, T, D = query.shape
        teacher = {"scaling": scaling, "position_ids": position_ids, **kwargs}
        teacher.update({n: x for n, x in (("softcap", softcap), ("s_aux", s_aux)) if x is not None})
        if self.linearize_mode == "softmax" or not self.linearize_heads:
            return softmax_attention(self)(
                self, query, key, value, attention_mask, dropout=dropout, **teacher
            )
        scaling = D**-0.5 if scaling is None else scaling
        layer = linearize_cache_layer
        valid = padding_of(attention_mask, B, T, None if layer is None else layer.cumulative_length)
        documents = None
        seq_idx, cu_seq_lens = kwargs.get("seq_idx"), kwargs.get("cu_seq_lens_q")
        if layer is None:
            position_ids = linearize_position_ids if position_ids is None else position_ids
            documents = documents_of(position_ids, seq_idx, cu_seq_lens, B, T, query.device)
            if valid is not None and documents is not None and seq_idx is None:
                documents = merge_padding(documents, valid)
        elif seq_idx is not None or cu_seq_lens is not None:
            raise ValueError(
                "seq_idx, cu_seq_lens: a cache cannot hold packed documents; pass use_cache=False"
            )
        inputs = dict(scaling=scaling, softcap=softcap, valid=valid, documents=documents)
        kept = self.softmax_heads()
        qkv, sink_logit = (query, key, value), s_aux
        if kept:
            inputs["heads"] = self.linearize_heads
            take = partial(take_heads, heads=self.linearize_heads, num_kv_heads=key.shape[1])
            qkv = tuple(map(take, qkv))
            sink_logit = None if s_aux is None else take(s_aux, dim=0)
        if self.linearize_mode == "transfer":
            with torch.no_grad():
                out, _ = softmax_attention(self)(
                    self, query, key, value, attention_mask, dropout=0.0, **teacher
                )
            target = out.transpose(1, 2)
            target = take(target) if kept else target
            inputs |= dict(attention_mask=attention_mask, sink_logit=sink_logit)
            self.linearize_observer(self, *qkv, target, **inputs)
            return out, None
        if self.linearize_mode == "off":
            out = query.new_zeros(B, qkv[0].shape[1], T, value.shape[-1])
        else:
            window, linear = self.linearize_branches
            inputs |= dict(sink_logit=sink_logit, window=window, linear=linear)
            out = self.linearized(*qkv, cache_layer=layer, **inputs)
        if kept:
            qkv = (query, key, value)
            options = dict(layer=layer, dropout=dropout, **teacher)
            exact = attend_softmax(self, kept, *qkv, attention_mask, **options)
            out = join_heads({self.linearize_heads: out, kept: exact}, key.shape[1])
        return out.transpose(1, 2).contiguous(), None


# ----------------------------------------------------------------------------------- module surgery
def linearized_class(cls):
    """The class Linearized<cls>, made once and importable from this module."""
    name = f"Linearized{cls.__name__}"
    made = globals().get(name)
    if made is None or made.__mro__[2] is not cls:
        made = globals()[name] = type(
            name, (LinearizedAttentionMixin, cls), {"__module__": __name__}
        )
    return made


def _restore(cls):
    return linearized_class(cls).__new__(linearized_class(cls))


def linearize_(module, section):
    """Turns a stock attention module into a linearized one, in place; new parameters lie on the
    module's device.
    """
    heads = LinearizedHeads(section, module.layer_idx, next(module.parameters()).device)
    module.add_module("linearized", heads)
    module.linearize_kv_heads = heads.num_kv_heads
    module.linearize_heads = section.linear_heads(module.layer_idx)
    module.base_config, module.config = module.config, copy.copy(module.config)
    module.config._attn_implementation_internal = IMPLEMENTATION
    module.__class__ = linearized_class(type(module))


def linearized_modules(model):
    """The converted attention modules of a model, {layer_idx: module}; also of a PeftModel."""
    return {m.layer_idx: m for m in model.modules() if getattr(m, "is_linearized_attention", False)}


@contextmanager
def _set(model, **attributes):
    modules = list(linearized_modules(model).values())
    before = [{name: getattr(m, name) for name in attributes} for m in modules]
    for m in modules:
        for name, value in attributes.items():
            setattr(m, name, value)
    try:
        yield model
    finally:
        for m, old in zip(modules, before):
            for name, value in old.items():
                setattr(m, name, value)


def teacher(model):
    """Context in which a converted model is the original one: softmax attention from the same
    weights.

    On a model without converted layers it changes nothing.
    """
    return _set(model, linearize_mode="softmax")


def branches(model, *, window=True, linear=True):
    """Context in which one branch of every converted layer is off.

    linear=False leaves the window and the sinks; window=False gives every key to the linear branch,
    so that rows stay normalised.

    Raises:
        ValueError: both are off.
    """
    if not (window or linear):
        raise ValueError("branches: window and linear are both off; a layer needs one of them")
    return _set(model, linearize_branches=(window, linear))


def no_attention(model):
    """Context in which the attention output of every linear head is zero."""
    return _set(model, linearize_mode="off")


def transfer(model, observer):
    """Context in which every converted layer runs the original attention and tells `observer` of
    it.

    observer(module, q [B, H, T, D], k [B, G, T, D], v [B, G, T, Dv], out [B, H, T, Dv], *,
    attention_mask, scaling, softcap, sink_logit, valid [B, T] or None, documents [B, T] or None) is
    called once per forward and layer with linear heads. Where some heads stay softmax, it is told
    of the others only, and of their key/value heads as `heads`.
    """
    return _set(model, linearize_mode="transfer", linearize_observer=observer)
