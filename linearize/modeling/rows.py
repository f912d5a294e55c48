"""Selected rows of the operator at little cost: what attention transfer computes.

Legend as in `ops`; Q queries.
"""

import torch

from .ops import compute_dtype, linear_part, positions, row_scaled


def hybrid_rows(op, q, k, v, queries, *, documents=None):
    """The definition's output [B, H, Q, Dv] for the rows `queries` [B, Q] of unpadded input.

    q [B, H, T, D]; k [B, G, T, D]; v [B, G, T, Dv]; documents [B, T] int or None. Equal to
    `hybrid_quadratic`, which forms T exact scores per row where this gathers W + N keys. q, k and v
    are constants: they get no gradient, and only the operator's own parameters do.
    """
    index = torch.arange(q.shape[2], device=q.device).expand(len(q), -1)
    place = positions(torch.ones_like(index, dtype=torch.bool), documents)
    start = queries - place.gather(1, queries)  # [B, Q] first token of the query's document
    q = take_rows(q, queries)
    out, top, mass = _exact_rows(op, q, k, v, queries, start)
    beta, alpha = (p[:, None, None] for p in (op.beta, op.alpha))
    log_exact = beta + alpha * top + mass.log()  # [B, H, Q, 1]
    index, first, last = index[:, None], start[..., None] + op.sinks, queries[..., None] - op.window
    linear = (first <= index) & (index <= last)
    linear_out, log_linear = _linear_rows(op, q, k, v, linear)
    share = torch.sigmoid(log_exact - log_linear)
    return share * out + (1 - share) * linear_out


@torch.no_grad()
def _exact_rows(op, q, k, v, queries, start):
    """(output [B, H, Q, Dv], largest score, mass relative to it) of each window and sinks."""
    dtype, G = compute_dtype(q), k.shape[1]
    window = queries[..., None] - torch.arange(op.window, device=q.device)  # [B, Q, W]
    sinks = start[..., None] + torch.arange(op.sinks, device=q.device)  # [B, Q, N]
    there = torch.cat([window >= start[..., None], sinks <= queries[..., None] - op.window], -1)[
        :, None, :, None
    ]
    index = torch.cat([window, sinks], -1).clamp(min=0, max=k.shape[2] - 1).flatten(1)
    keys, values = (
        take_rows(x, index).unflatten(2, (queries.shape[1], -1)).to(dtype) for x in (k, v)
    )  # [B, G, Q, W + N, D]
    grouped = q.to(dtype).unflatten(1, (G, -1)).transpose(2, 3)  # [B, G, Q, H / G, D]
    scores = op.scores(grouped @ keys.mT).masked_fill(~there, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if op.sink_logit is not None:
        extra = op.sink_logit.to(dtype).view(G, 1, -1, 1)
        top = torch.maximum(top, extra)
    weights = (scores - top).exp()
    mass = weights.sum(-1, keepdim=True)
    if op.sink_logit is not None:
        mass = mass + (extra - top).exp()
    return tuple(x.transpose(2, 3).flatten(1, 2) for x in ((weights @ values) / mass, top, mass))


def take_rows(x, index):
    """Tokens index [B, n] of x [B, H, T, D]: [B, H, n, D]; copies whole rows, unlike `gather`."""
    B, H, T, D = x.shape
    flat = x.transpose(1, 2).reshape(B * T, H * D)
    offset = T * torch.arange(B, device=x.device)[:, None]
    return flat.index_select(0, (index + offset).flatten()).view(B, -1, H, D).transpose(1, 2)


def _linear_rows(op, q, k, v, there):
    """(output [B, H, Q, Dv], log mass [B, H, Q, 1]) of the linear keys, `there` [B, Q, T]."""
    repeat = op.state_heads // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
    features_q, features_k = op.phi_q(q).unflatten(1, (op.state_heads, -1)), op.phi_k(k)
    if op.log_k:
        shift = features_k.amax(2, keepdim=True).detach()  # [B, HS, 1, F]
        features_q, features_k = features_q + shift.unsqueeze(2), (features_k - shift).exp()
    features_q, scale = row_scaled(op, features_q)
    weights = (features_q.flatten(2, 3) @ features_k.mT).unflatten(
        2, features_q.shape[2:4]
    )  # [B, HS, R, Q, T]
    weights = weights * there[:, None, None].to(weights.dtype)
    num = (weights.flatten(2, 3) @ v.to(weights.dtype)).unflatten(2, weights.shape[2:4])
    out, log_mass = linear_part(num, weights.sum(-1, keepdim=True), scale)
    return out.flatten(1, 2), log_mass.flatten(1, 2)
