"""Selected rows of the operator at little cost: what attention transfer computes.

Legend as in `ops`; Q queries.
"""

import torch

from .ops import (
    compute_dtype,
    exact_part,
    group,
    join,
    linear_features,
    linear_part,
    positions,
    state_heads_of,
)


def hybrid_rows(op, q, k, v, queries, *, documents=None):
    """The definition's output [B, H, Q, Dv] for the rows `queries` [B, Q] of unpadded input.

    q [B, H, T, D]; k [B, G, T, D]; v [B, G, T, Dv]; documents [B, T] int or None. Equal to
    `hybrid_quadratic`, which forms T exact scores per row where this gathers W + N keys. q, k and v
    are constants: they get no gradient, and only the operator's own parameters do.
    """
    q, k, v = q.detach(), k.detach(), v.detach()
    index = torch.arange(q.shape[2], device=q.device).expand(len(q), -1)
    place = positions(torch.ones_like(index, dtype=torch.bool), documents)
    start = queries - place.gather(1, queries)  # [B, Q] first token of the query's document
    q = take_rows(q, queries)
    exact = _exact_rows(op, q, k, v, queries, start) if op.window or op.sinks else None
    linear = None
    if op.linear:
        index, first = index[:, None], start[..., None] + op.sinks
        at = (queries - start)[..., None]
        far = ~op.near(at, index - start[..., None])
        there = (first <= index) & (index <= queries[..., None]) & far
        linear = _linear_rows(op, q, k, v, there)
    return join(op, exact, linear)


def _exact_rows(op, q, k, v, queries, start):
    """(output [B, H, Q, Dv], log mass [B, H, Q, 1]) of each query's window and sinks."""
    wide, G = compute_dtype(q), k.shape[1]
    window = queries[..., None] - torch.arange(op.reach, device=q.device)  # [B, Q, reach]
    sinks = start[..., None] + torch.arange(op.sinks, device=q.device)  # [B, Q, N]
    there = [window >= start[..., None], sinks <= queries[..., None] - op.reach]
    if op.terraced:
        place = window - start[..., None]
        there[0] = there[0] & (op.near((queries - start)[..., None], place) | (place < op.sinks))
    there = torch.cat(there, -1)
    index = torch.cat([window, sinks], -1).clamp(min=0, max=k.shape[2] - 1).flatten(1)
    keys, values = (
        take_rows(x, index).unflatten(2, (queries.shape[1], -1)).to(wide) for x in (k, v)
    )  # [B, G, Q, W + N, D]
    rows = group(q.to(wide), G).transpose(2, 3)  # [B, G, Q, R, D]
    per_head = (None if p is None else p.to(wide).view(G, 1, -1, 1, 1) for p in op.per_head)
    parts = exact_part(op, rows, keys, values, there[:, None, :, None, None], *per_head)
    return tuple(x.transpose(2, 3).flatten(1, 2) for x in parts)


def take_rows(x, index):
    """Tokens index [B, n] of x [B, H, T, D]: [B, H, n, D]; copies whole rows, unlike `gather`."""
    B, H, T, D = x.shape
    flat = x.transpose(1, 2).reshape(B * T, H * D)
    offset = T * torch.arange(B, device=x.device)[:, None]
    return flat.index_select(0, (index + offset).flatten()).view(B, -1, H, D).transpose(1, 2)


def _linear_rows(op, q, k, v, there):
    """(output [B, H, Q, Dv], log mass [B, H, Q, 1]) of the linear keys, `there` [B, Q, T]."""
    fq, fk, scale = linear_features(op, q, k)  # [B, HS, R, Q, F], [B, HS, T, F]
    weights = (fq.flatten(2, 3) @ fk.mT).unflatten(2, fq.shape[2:4])  # [B, HS, R, Q, T]
    weights = weights * there[:, None, None].to(weights.dtype)
    values = state_heads_of(op, v).to(weights.dtype)
    num = (weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4])
    out, log_mass = linear_part(num, weights.sum(-1, keepdim=True), scale)
    return out.flatten(1, 2), log_mass.flatten(1, 2)
