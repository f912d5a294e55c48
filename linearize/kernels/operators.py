"""The kernels as custom operators of torch: they trace, have shapes without data, and gradients.

Legend: B batch, H query heads, G key/value heads, HS state heads, T tokens, L = P + T keys, P = W -
1 earlier keys, D head size, Dv value size, F features, N sinks, W window. Triton is imported when
an operator runs, not before.
"""

import torch
from torch import Tensor

from .configs import chunk_of, precision_of, precision_of_state


@torch.library.custom_op("linearize::hybrid_forward", mutates_args=())
def hybrid_forward(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, fq: Tensor, fk: Tensor,
    log_scale: Tensor | None, beta: Tensor, alpha: Tensor, S: Tensor, z: Tensor, seen: Tensor,
    window: int, scaling: float, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, S, z, m, lse, den, best), see `out.outputs`; the last four are empty unless `save`."""
    from .out import outputs
    from .state import prefixes

    shared = dict(window=window, chunk=chunk_of(v), precision=precision_of(v))
    h, hz, S, z = prefixes(fk, v, S, z, seen, sinks=sink_k.shape[2], **shared)
    o, *rows = outputs(
        q, k, v, sink_k, sink_v, fq, fk, log_scale, beta, alpha, seen, h, hz, scaling=scaling,
        save=save, **shared,
    )  # fmt: skip
    return o, S, z, *rows


@hybrid_forward.register_fake
def _(q, k, v, sink_k, sink_v, fq, fk, log_scale, beta, alpha, S, z, seen, window, scaling, save):
    B, H, T, _ = q.shape
    o = v.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)
    shape = (B, H, T) if save else (0,)
    m, lse, den = (torch.empty(shape, dtype=torch.float32, device=v.device) for _ in range(3))
    best = torch.empty(shape, dtype=torch.int32, device=v.device)
    return o, torch.empty_like(S), torch.empty_like(z), m, lse, den, best


@torch.library.custom_op("linearize::hybrid_backward", mutates_args=())
def hybrid_backward(
    do: Tensor, dS: Tensor, dz: Tensor, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor,
    sink_v: Tensor, fq: Tensor, fk: Tensor, alpha: Tensor, S: Tensor, z: Tensor, seen: Tensor,
    o: Tensor, lse: Tensor, den: Tensor, best: Tensor, window: int, scaling: float,
) -> list[Tensor]:  # fmt: skip
    """(dq, dk, dv, dsink_k, dsink_v, dfq, dfk, E, dS, dz); E [B, H, T] fp32 is the gradient of the
    log mass of each row's exact part.
    """
    from .backward import (
        features_gradients,
        keys_gradients,
        queries_gradients,
        rows_gradients,
    )
    from .state import prefix_gradients, prefixes

    grid = dict(chunk=chunk_of(v), precision=precision_of(v))
    exact = dict(window=window, scaling=scaling, **grid)
    linear = dict(window=window, sinks=sink_k.shape[2], **grid)
    T, HS = q.shape[2], fk.shape[1]
    h, hz, _, _ = prefixes(fk, v, S, z, seen, **linear)
    dfq, delta, Y = queries_gradients(v, fq, fk, seen, h, hz, o, do, den, **linear)
    dq, E = rows_gradients(q, k, v, sink_k, sink_v, alpha, seen, do, lse, best, delta, Y, **exact)
    dk, dv, dsink_k, dsink_v = keys_gradients(
        q, k, v, sink_k, sink_v, alpha, seen, do, lse, delta, E, best, **exact
    )
    dh, dhz, dS, dz = prefix_gradients(fq, do, delta, den, dS, dz, state_heads=HS, **grid)
    dfk, dv_linear = features_gradients(v, fq, fk, seen, do, delta, den, dh, dhz, **linear)
    dv[:, :, :T] += dv_linear.unflatten(1, (v.shape[1], -1)).sum(2)
    return [dq, dk, dv.to(v.dtype), dsink_k, dsink_v, dfq, dfk, E, dS, dz]


@hybrid_backward.register_fake
def _(
    do, dS, dz, q, k, v, sink_k, sink_v, fq, fk, alpha, S, z, seen, o, lse, den, best, window,
    scaling,
):  # fmt: skip
    like = (k, v, sink_k, sink_v, fq, fk, lse, dS, dz)
    return [q.new_empty(q.shape), *(torch.empty_like(x) for x in like)]


def _setup(ctx, inputs, output):
    *tensors, ctx.window, ctx.scaling, _ = inputs
    o, _, _, m, lse, den, best = output
    ctx.mark_non_differentiable(m, lse, den, best)
    ctx.scaled = tensors[7] is not None
    ctx.save_for_backward(*(x for x in tensors if x is not None), o, m, lse, den, best)


def _backward(ctx, do, dS, dz, *_):
    tensors = list(ctx.saved_tensors)
    if ctx.scaled:
        del tensors[7]
    q, k, v, sink_k, sink_v, fq, fk, _, alpha, S, z, seen, o, m, lse, den, best = tensors
    do = o.new_zeros(()).expand_as(o) if do is None else do
    do = do if do.stride(-1) == 1 else do.contiguous()
    dS, dz = (torch.zeros_like(x) if g is None else g.contiguous() for x, g in ((S, dS), (z, dz)))
    *first, E, dS, dz = hybrid_backward(
        do, dS, dz, q, k, v, sink_k, sink_v, fq, fk, alpha, S, z, seen, o, lse, den, best,
        ctx.window, ctx.scaling,
    )  # fmt: skip
    dbeta, dalpha = E.sum((0, 2)), (E * m).sum((0, 2))
    return *first, -E if ctx.scaled else None, dbeta, dalpha, dS, dz, None, None, None, None


hybrid_forward.register_autograd(_backward, setup_context=_setup)


def hybrid(
    q, k, v, sink_k, sink_v, fq, fk, log_scale, beta, alpha, S, z, seen, *, window, scaling
):  # fmt: skip
    """(o [B, H, T, Dv], S, z) of T tokens after a state: the function of `modeling/ops.py`.

    Args:
        q: [B, H, T, D] queries.
        k: [B, G, P + T, D] the P keys before the call, then those of the call.
        v: [B, G, P + T, Dv] values.
        sink_k: [B, G, N, D] the first N keys of the document, those of this call included.
        sink_v: [B, G, N, Dv] their values.
        fq: [B, H, T, F] features of the queries.
        fk: [B, HS, T, F] features of the first T keys, those that leave the window.
        log_scale: [B, H, T] fp32 or None: the linear weights of row t count exp(log_scale_t) times.
        beta: [H] and
        alpha: [H], of the exact part's log weight beta + alpha m_t.
        S: [B, HS, F, Dv] fp32 and
        z: [B, HS, F] fp32, the sums over the tokens that had left the window before the call.
        seen: [B] int64, tokens before the call.
        window: W; keys at a smaller age are exact.
        scaling: the factor of the products q.k.

    Everything but seen has a gradient.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    tensors = [q, *(x.contiguous() for x in (k, v, sink_k, sink_v, fq.to(v.dtype), fk.to(v.dtype)))]
    tensors.append(None if log_scale is None else log_scale.float().contiguous())
    tensors += [beta.float(), alpha.float(), S.contiguous(), z.contiguous()]
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return hybrid_forward(*tensors, seen, window, scaling, save)[:3]


@torch.library.custom_op(
    "linearize::hybrid_step",
    mutates_args=("S", "z", "sink_k", "sink_v", "window_k", "window_v", "seen"),
)
def _hybrid_step(
    q: Tensor, k: Tensor, v: Tensor, map_q: Tensor, bias_q: Tensor | None, map_k: Tensor,
    bias_k: Tensor | None, beta: Tensor, alpha: Tensor, S: Tensor, z: Tensor, sink_k: Tensor,
    sink_v: Tensor, window_k: Tensor, window_v: Tensor, seen: Tensor, scaling: float,
) -> Tensor:  # fmt: skip
    from .decode import step

    out = step(
        q, k, v, map_q, bias_q, map_k, bias_k, beta, alpha, S, z, sink_k, sink_v, window_k,
        window_v, seen, scaling=scaling, precision=precision_of(v),
        precision_state=precision_of_state(v.device),
    )  # fmt: skip
    seen.add_(1)
    return out


@_hybrid_step.register_fake
def _(q, k, v, *_):
    return v.new_empty(*q.shape[:3], v.shape[-1])


def hybrid_step(q, k, v, maps, beta, alpha, S, z, sinks, window, seen, *, scaling):
    """o [B, H, 1, Dv] of one token; the state is advanced in place, and there is no gradient.

    Args:
        q: [B, H, 1, D] the query.
        k: [B, G, 1, D] the key.
        v: [B, G, 1, Dv] the value.
        maps: (weight [H, D, f], bias [H, f], weight [HS, D, f], bias [HS, f]) of the queries' and
            the keys' map: `hedgehog` has None for biases, `centroids` has both.
        beta: [H] and
        alpha: [H], of the exact part's log weight beta + alpha m.
        S: [B, HS, F, Dv] fp32 and
        z: [B, HS, F] fp32, the sums over the tokens that have left the window.
        sinks: (keys [B, G, N, D], values [B, G, N, Dv]).
        window: (keys [B, G, W - 1, D], values [B, G, W - 1, Dv]), right-aligned.
        seen: [B] int64, tokens so far.
        scaling: the factor of the products q.k.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    maps = (None if x is None else x.contiguous() for x in maps)
    tensors = (*maps, beta.float(), alpha.float(), S, z, *sinks, *window, seen)
    return _hybrid_step(q, k, v, *tensors, scaling)
