"""The hybrid operator in chunks: what training, prefill and every machine without a kernel run.

Legend as in `ops`: B batch, H query heads, G key/value heads, HS state heads, R query heads per
group, T tokens, D head size, Dv value size, F features, C chunk, n chunks, W window, N sinks, P
earlier tokens that a window needs, see `ops`.

A segment of T tokens stands behind the P tokens before it on one axis of P + T keys. Query t is key
P + t, so the exact keys of chunk c are the P + C that end with its last query, and the key that
becomes linear at query t is key t: the linear keys of chunk c are those before c C, which the state
holds, and a triangle inside the chunk.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F

from .accelerated import find_kernel, run_kernel
from .ops import (
    EMPTY,
    State,
    compute_dtype,
    exact_part,
    fold,
    group,
    join,
    linear_part,
    row_scaled,
    state_heads_of,
    take,
    update_sinks,
)

CHUNK = 64
CHUNK_LOG = 16  # chunk of maps with log_k, whose diagonal blocks hold [C, C, F]
SEGMENT = 512  # tokens whose intermediate tensors exist at one time
SEGMENT_KERNEL = 8192  # of the kernels, whose intermediate tensors are prefix states and features


def hybrid_chunked(op, q, k, v, state, *, valid=None, chunk=None, segment=None):
    """The operator in chunks that carry a constant-size state: memory linear in T, differentiable,
    any T and any split.

    q [B, H, T, D]; k [B, G, T, D]; v [B, G, T, Dv]; valid [B, T] bool or None (all real); chunk and
    segment as they are best, by default. Returns (o [B, H, T, Dv], state). Rows of padding are
    finite and mean nothing. Splitting T over calls changes nothing beyond rounding.
    """
    kernel = None if chunk else find_kernel(op, q, k, v, state, valid)
    chunk = chunk or (CHUNK_LOG if op.log_k else CHUNK)
    segment = segment or (SEGMENT if kernel is None else SEGMENT_KERNEL)
    outs = [] if q.shape[2] else [q.new_zeros(*q.shape[:3], v.shape[-1])]
    for start in range(0, q.shape[2], segment):
        part = slice(start, start + segment)
        tokens = q[:, :, part], k[:, :, part], v[:, :, part]
        if kernel is None:
            mask = None if valid is None else valid[:, part]
            out, state = _segment(op, *tokens, state, mask, chunk)
        else:
            out, state = run_kernel(kernel, op, *tokens, state)
        outs.append(out)
    return (torch.cat(outs, 2) if len(outs) != 1 else outs[0]), state


def advance(op, state, k, v, valid=None):
    """The state after the tokens k [B, G, T, D], v [B, G, T, Dv], valid [B, T] or None, without
    their outputs.
    """
    B, _, T, D = k.shape
    return hybrid_chunked(op, k.new_zeros(B, op.beta.shape[0], T, D), k, v, state, valid=valid)[1]


def hybrid_packed(op, q, k, v, state, *, valid=None, documents=None, chunk=None):
    """`hybrid_chunked` on rows that hold several documents: each runs alone, so nothing can leak.
    Returns o.

    documents [B, T] int, constant within a document. state is the empty state of one row batch.
    """
    border = F.pad(documents[:, 1:] != documents[:, :-1], (1, 1), value=True)
    rows = []
    for b in range(q.shape[0]):
        edges = border[b].nonzero().flatten().tolist()
        alone = State(*(x[b : b + 1] for x in state))
        parts = [
            hybrid_chunked(
                op, *(x[b : b + 1, :, i:j] for x in (q, k, v)), alone,
                valid=None if valid is None else valid[b : b + 1, i:j], chunk=chunk,
            )[0]
            for i, j in pairwise(edges)
        ]  # fmt: skip
        rows.append(torch.cat(parts, 2))
    return torch.cat(rows)


def _segment(op, q, k, v, state, valid, C):
    T, P, N = q.shape[2], op.past, op.sinks
    C = min(C, T)
    keys, values = (
        torch.cat([state.window_k, k], 2),
        torch.cat([state.window_v, v], 2),
    )  # [B, G, P + T, .]
    start = (state.seen - P)[:, None]  # position of keys[0]
    first = start.clamp(min=0)  # the oldest position that keys still hold
    seen = state.seen + T
    order = None
    if valid is not None:  # move the real tokens of each row to the right, in order
        real = torch.cat([start + torch.arange(P, device=q.device) >= 0, valid], 1)
        order = real.to(torch.uint8).argsort(dim=1, stable=True)
        keys, values = take(keys, order), take(values, order)
        q = take(F.pad(q, (0, 0, P, 0)), order)[:, :, P:]
        seen = state.seen + valid.sum(1)
        start = (seen - P - T)[:, None]
    place = start + torch.arange(P + T, device=q.device)  # [B, P + T]
    there = place >= first
    sink_k, sink_v = update_sinks(state, keys, values, start, first)

    n = math.ceil(T / C)
    pad = n * C - T
    if pad:
        q, keys, values = (F.pad(x, (0, 0, 0, pad)) for x in (q, keys, values))
        place, there = F.pad(place, (0, pad), value=-1), F.pad(there, (0, pad))
    exact = None
    if N or op.window:
        exact = _exact_chunks(op, q, keys, values, sink_k, sink_v, place, there, C)
    linear, carry = None, state[:3]
    if op.linear:
        counts = there & (place >= N)
        counts[:, T:] = False
        inner = _linear_chunks_log if op.log_k else _linear_chunks
        linear, carry = inner(
            op, q, keys[:, :, : n * C], values[:, :, : n * C], counts[:, : n * C], state, C,
            *([_far_chunks(op, q, keys, values, place, there, C)] if op.terraced else []),
        )  # fmt: skip
    out = join(op, exact, linear)[:, :, :T].to(v.dtype)
    if (
        order is not None
    ):  # back to where the rows came from; what came from before this call is dropped
        index = torch.where(order[:, P:] >= P, order[:, P:] - P, T)[:, None, :, None].expand_as(out)
        out = out.new_zeros(*out.shape[:2], T + 1, out.shape[-1]).scatter(2, index, out)[:, :, :T]
    return out, State(*carry, sink_k, sink_v, keys[:, :, T : T + P], values[:, :, T : T + P], seen)


def _chunks(x, heads, C):
    """Rows [B, H, n C, d] -> [B, heads, n, H / heads * C, d]: the heads of a group share one
    product.
    """
    return group(x, heads).unflatten(3, (-1, C)).transpose(2, 3).flatten(3, 4)


def _unchunk(x, C):
    """The inverse of `_chunks`: [B, heads, n, R C, d] -> [B, H, n C, d]."""
    return x.unflatten(3, (-1, C)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _exact_chunks(op, q, keys, values, sink_k, sink_v, place, there, C):
    """Exact part of all chunks: each sees the sinks and the P + C keys that end with its own."""
    G, N, P, wide = keys.shape[1], op.sinks, op.past, compute_dtype(q)
    n, R = q.shape[2] // C, q.shape[1] // keys.shape[1]
    rows = _chunks(q, G, C).to(wide)  # [B, G, n, R C, D]
    at = place[:, P:].unflatten(1, (n, C))[..., None]  # [B, n, C, 1] positions of the queries
    mask = [(torch.arange(N, device=q.device) <= at)]
    spans = [(x.to(wide)[:, :, None].expand(-1, -1, n, -1, -1),) for x in (sink_k, sink_v)]
    if op.window:
        age = torch.arange(C, device=q.device)[:, None] + P - torch.arange(P + C, device=q.device)
        counts = (there & (place >= N)).unfold(1, P + C, C)[:, :, None]  # [B, n, 1, P + C]
        near = (
            op.near(at, place.unfold(1, P + C, C)[:, :, None]) if op.terraced else age < op.window
        )
        mask.append((age >= 0) & near & counts)
        spans = [(*s, x.to(wide).unfold(2, P + C, C).mT) for s, x in zip(spans, (keys, values))]
    mask = torch.cat(mask, -1)[:, None, :, None]  # [B, 1, n, 1, C, N + P + C]
    per_head = (None if p is None else p.to(wide).view(G, 1, R, 1, 1) for p in op.per_head)
    k, v = (torch.cat(s, 3) for s in spans)
    return tuple(_unchunk(x, C) for x in exact_part(op, rows, k, v, mask, *per_head))


def _triangle(op, C, heads, device):
    """Which keys of its own chunk a query reads linearly: those before it, and itself if there is
    no window.
    """
    return (
        torch.ones(C, C, dtype=torch.bool, device=device)
        .tril(-1 if op.window else 0)
        .repeat(heads, 1)
    )


def _far_chunks(op, q, keys, values, place, there, C):
    """(features of keys [B, HS, n, F, P + C], their values, mask [B, 1, n, R C, P + C]): what the
    queries of each chunk read linearly among the keys that are held for other queries' terraces.
    """
    P, HS = op.past, op.state_heads
    features = op.phi_k(state_heads_of(op, keys)).unfold(2, P + C, C)
    values = state_heads_of(op, values).to(features.dtype).unfold(2, P + C, C).mT
    at = place[:, P:].unflatten(1, (-1, C))[..., None]  # [B, n, C, 1]
    held = place.unfold(1, P + C, C)[:, :, None]
    age = torch.arange(C, device=q.device)[:, None] + P - torch.arange(P + C, device=q.device)
    counts = (there & (place >= op.sinks)).unfold(1, P + C, C)[:, :, None]
    mask = ((age >= 0) & (age <= P) & counts & ~op.near(at, held)).repeat(1, 1, q.shape[1] // HS, 1)
    return features, values, mask[:, None]


def _linear_chunks(op, q, keys, values, counts, state, C, far=None):
    """Linear part of all chunks, and (S, z, shift) after them.

    keys[t] is the key that leaves what is held at query t; `far` is from `_far_chunks`.
    """
    HS = op.state_heads
    fk = op.phi_k(state_heads_of(op, keys)) * counts[:, None, :, None]
    fk = fk.unflatten(2, (-1, C))  # [B, HS, n, C, F]
    v = state_heads_of(op, values).to(fk.dtype).unflatten(2, (-1, C))
    fq, scale = row_scaled(op, _chunks(op.phi_q(q), HS, C))  # [B, HS, n, R C, F]
    S = torch.cat([state.S[:, :, None], fk.mT @ v], 2).cumsum(
        2
    )  # [B, HS, n + 1, F, Dv], S[c] before chunk c
    z = torch.cat([state.z[:, :, None], fk.sum(3)], 2).cumsum(2)
    inner = (fq @ fk.mT) * _triangle(op, C, q.shape[1] // HS, q.device)
    num = fq @ S[:, :, :-1] + inner @ v
    den = fq @ z[:, :, :-1, :, None] + inner.sum(-1, keepdim=True)
    if far is not None:
        features, held_v, mask = far
        weights = (fq @ features) * mask  # [B, HS, n, R C, P + C]
        num, den = num + weights @ held_v, den + weights.sum(-1, keepdim=True)
    return tuple(_unchunk(x, C) for x in linear_part(num, den, scale)), (
        S[:, :, -1],
        z[:, :, -1],
        state.shift,
    )


def _linear_chunks_log(op, q, keys, values, counts, state, C):
    """`_linear_chunks` for log features: a shift per feature and chunk, and exact sums of
    logarithms inside a chunk.
    """
    HS = op.state_heads
    lk = (
        op.phi_k(state_heads_of(op, keys))
        .masked_fill(~counts[:, None, :, None], EMPTY)
        .unflatten(2, (-1, C))
    )
    v = state_heads_of(op, values).to(lk.dtype).unflatten(2, (-1, C))
    lq = _chunks(op.phi_q(q), HS, C)
    triangle = _triangle(op, C, q.shape[1] // HS, q.device)
    parts, carry = [], state
    for c in range(lk.shape[2]):
        rows = lq[:, :, c]  # [B, HS, R C, F]
        shifted = rows + carry.shift.unsqueeze(2)
        inner = (rows.unsqueeze(3) + lk[:, :, c].unsqueeze(2)).logsumexp(-1)  # [B, HS, R C, C]
        visible = triangle & counts.unflatten(1, (-1, C))[:, c][:, None, None]
        inner = inner.masked_fill(~visible, EMPTY)
        scale = torch.maximum(shifted.amax(-1, keepdim=True), inner.amax(-1, keepdim=True)).detach()
        outer, inner = (shifted - scale).exp(), (inner - scale).exp() * visible
        num = outer @ carry.S + inner @ v[:, :, c]
        den = outer @ carry.z.unsqueeze(-1) + inner.sum(-1, keepdim=True)
        parts.append(linear_part(num, den, scale))
        span = slice(c * C, (c + 1) * C)
        carry = State(
            *fold(op, carry, keys[:, :, span], values[:, :, span], counts[:, span]), *state[3:]
        )
    return tuple(_unchunk(torch.stack(x, 2), C) for x in zip(*parts)), carry[:3]
