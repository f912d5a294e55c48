"""The hybrid operator in plain torch: its definition, its recurrent form, and the parts that its
forms share.

Legend: B batch, H query heads, G key/value heads, HS state heads (G, or H when every query head has
its own map of k), R = H / HS, T tokens, D head size, Dv value size, F features, C chunk, W window,
N sinks, P earlier tokens that a window needs: W - 1, or 2 W - 1 in a terrace, and 0 without a
window. Layout [B, H, T, D]. Scores, features, normaliser and state are fp32 (fp64 for fp64 input).

For a query t of one document, with positions counted among the valid tokens of the document,

    E_t    the last W positions including t, and the first N positions: exact weights. With window
           kind "terrace" the window is t's own block of W positions, up to t, and the block before
    Lin_t  every other position <= t: linear weights
    m_t    the largest score s_ts over E_t
    a_ts = exp(beta + alpha m_t) exp(s_ts - m_t)  on E_t
    a_ts = phi_q(q_t) . phi_k(k_s)                on Lin_t
    o_t  = sum_s a_ts v_s / sum_s a_ts

The three mixing rules are this one formula: `calibrated` learns beta and alpha per head, `lolcats`
(Zhang et al. 2024, arXiv:2410.10254) has alpha = 0 and exp(beta) = sigmoid(w), `kernel` has alpha =
1. m_t is part of the function, so gradients flow through it. See docs/concepts.md. The chunked form
is in `chunked`.

The fast forms compute the exact part and the linear part apart, each with the logarithm of its
mass, and join them by

    o = share o_exact + (1 - share) o_linear,    share = sigmoid(log mass_exact - log mass_linear)

which is the formula above, reordered so that no exponential has a positive argument.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

NEGLIGIBLE = -80.0  # exp of it, against a sum of at least 1, is below the resolution of fp64
EMPTY = (
    -1e30
)  # the logarithm of an empty sum: finite, so that differences and gradients stay finite


@dataclass(frozen=True)
class Hybrid:
    """What the operator is, apart from its inputs.

    phi_q maps [B, H, T, D] to [B, H, T, F], phi_k maps [B, HS, T, D] to [B, HS, T, F]; log_q and
    log_k say which of them give log features, and log_k requires log_q. beta and alpha are [H];
    sink_logit [H] is the learned extra logit that some teachers keep in every row's normaliser (a
    key with value zero). `linear=False` leaves the linear part out.
    """

    phi_q: Callable
    phi_k: Callable
    beta: torch.Tensor
    alpha: torch.Tensor
    window: int
    sinks: int
    scaling: float
    state_heads: int
    log_q: bool = False
    log_k: bool = False
    softcap: float | None = None
    sink_logit: torch.Tensor | None = None
    linear: bool = True
    window_kind: str = "sliding"

    @property
    def terraced(self):
        return self.window_kind == "terrace" and self.window > 0

    @property
    def reach(self):
        """Keys that are held because a window may need them, the query's own included."""
        return 2 * self.window if self.terraced else self.window

    @property
    def past(self):
        return max(self.reach - 1, 0)

    def near(self, query, key):
        """Whether keys at positions `key` lie in the windows of queries at `query`, not before."""
        return in_window(query, key, self.window, self.window_kind)

    @property
    def per_head(self):
        return self.beta, self.alpha, self.sink_logit

    def scores(self, dots):
        """Final scores from the products q.k."""
        scores = dots * self.scaling
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


class State(NamedTuple):
    """All that later tokens need: constant in size.

    S and z hold the tokens that have left the window. With log_k feature f of both is scaled by
    exp(-shift_f), shift_f the largest log feature so far; other maps have an empty shift.
    """

    S: torch.Tensor  # [B, HS, F, Dv] fp32
    z: torch.Tensor  # [B, HS, F] fp32
    shift: torch.Tensor  # [B, HS, F] or [B, HS, 0] fp32
    sink_k: torch.Tensor  # [B, G, N, D]
    sink_v: torch.Tensor  # [B, G, N, Dv]
    window_k: torch.Tensor  # [B, G, P, D] the last P valid tokens, right-aligned
    window_v: torch.Tensor  # [B, G, P, Dv]
    seen: torch.Tensor  # [B] int64, valid tokens so far


class Rows(NamedTuple):
    """Rows of the definition for Q queries."""

    out: torch.Tensor  # [B, H, Q, Dv]
    log_weights: torch.Tensor  # [B, H, Q, T], normalised; EMPTY where there is no weight
    linear_mass: torch.Tensor  # [B, H, Q], the share of the row's weight that is linear


def in_window(query, key, window, kind):
    """Whether positions `key` <= `query` are in the window."""
    if kind == "terrace" and window:
        return key // window >= query // window - 1
    return query - key < window


def compute_dtype(x):
    return torch.promote_types(x.dtype, torch.float32)


def empty_state(op, q, k, v, num_features):
    """The state before the first token, for tensors shaped like q, k, v."""
    (B, G, _, D), Dv, HS = k.shape, v.shape[-1], op.state_heads
    wide = dict(device=k.device, dtype=compute_dtype(k))
    return State(
        S=torch.zeros(B, HS, num_features, Dv, **wide),
        z=torch.zeros(B, HS, num_features, **wide),
        shift=torch.full((B, HS, num_features if op.log_k else 0), EMPTY, **wide),
        sink_k=k.new_zeros(B, G, op.sinks, D),
        sink_v=v.new_zeros(B, G, op.sinks, Dv),
        window_k=k.new_zeros(B, G, op.past, D),
        window_v=v.new_zeros(B, G, op.past, Dv),
        seen=torch.zeros(B, dtype=torch.int64, device=k.device),
    )


# --------------------------------------------------------------------------------------- definition
def positions(valid, documents):
    """Positions [B, T] among the valid tokens of each document.

    valid [B, T] bool; documents [B, T] int or None.
    """
    count = valid.long().cumsum(1) - 1
    if documents is None:
        return count
    border = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    before = F.pad(count, (1, 0), value=-1)[:, :-1] + 1  # valid tokens before each token
    return count - torch.where(border, before, 0).cummax(1).values


def masks(valid, documents, window, sinks, queries=None, kind="sliding"):
    """Which pairs are exact and which are linear: two bool masks [B, Q, T]; each causal pair is in
    exactly one.

    queries [B, Q] are indices into T, all rows by default.
    """
    B, T = valid.shape
    place = positions(valid, documents)
    index = torch.arange(T, device=valid.device).expand(B, T)
    queries = index if queries is None else queries
    seen = (
        (index[:, None] <= queries[..., None])
        & valid[:, None]
        & valid.gather(1, queries)[..., None]
    )
    if documents is not None:
        seen = seen & (documents[:, None] == documents.gather(1, queries)[..., None])
    at, place = place.gather(1, queries)[..., None], place[:, None]  # [B, Q, 1], [B, 1, T]
    exact = in_window(at, place, window, kind) | (place < sinks)
    return seen & exact, seen & ~exact


def hybrid_quadratic(op, q, k, v, *, valid=None, documents=None, queries=None):
    """The definition, row by row, for all queries or for some: every weight is formed. O(Q T)
    memory.

    q [B, H, T, D]; k [B, G, T, D]; v [B, G, T, Dv]; valid [B, T] bool, documents [B, T] int,
    queries [B, Q] int64 indices. Returns Rows. With log_k one shift per feature covers all keys:
    exact in exact arithmetic, but a key far above the visible ones costs digits; the chunked form
    has no such limit.
    """
    B, _, T, _ = q.shape
    valid = torch.ones(B, T, dtype=torch.bool, device=q.device) if valid is None else valid
    settings = op.window, op.sinks, queries, op.window_kind
    exact, linear = (m[:, None] for m in masks(valid, documents, *settings))
    if queries is not None:
        q = take(q, queries)
    wide, G = compute_dtype(q), k.shape[1]
    scores = op.scores(
        (group(q.to(wide), G) @ k.to(wide).mT.unsqueeze(2)).flatten(1, 2)
    )  # [B, H, Q, T]
    scores = scores.masked_fill(~exact, EMPTY)
    beta, alpha, sink_logit = (
        None if p is None else p.to(wide)[:, None, None] for p in op.per_head
    )
    if sink_logit is not None:  # one more exact key, with value zero
        scores = torch.cat([scores, sink_logit.expand(B, -1, scores.shape[2], -1)], -1)
    top = scores.amax(-1, keepdim=True).clamp(min=EMPTY / 10)
    log_a = torch.where(scores > EMPTY, beta + (alpha - 1) * top + scores, EMPTY)
    log_a, extra = log_a[..., :T], log_a[..., T:]
    if op.linear:
        log_a = torch.where(linear, _linear_log_weights(op, q, k), log_a)
    total = torch.cat([log_a, extra], -1).logsumexp(-1, keepdim=True)
    log_weights = torch.where(
        log_a > EMPTY / 2, log_a - total, EMPTY
    )  # all EMPTY in a row without any weight
    weights = log_weights.exp()
    out = (group(weights, G) @ v.to(wide).unsqueeze(2)).flatten(1, 2)
    return Rows(out.to(v.dtype), log_weights, (weights * linear).sum(-1))


def group(x, heads):
    """[B, H, ...] -> [B, heads, H / heads, ...]."""
    return x.unflatten(1, (heads, -1))


def state_heads_of(op, x):
    """Keys or values [B, G, T, .] repeated for the heads that own a state, [B, HS, T, .]."""
    return (
        x if x.shape[1] == op.state_heads else x.repeat_interleave(op.state_heads // x.shape[1], 1)
    )


def _linear_log_weights(op, q, k):
    """log phi_q(q).phi_k(k) [B, H, Q, T]; EMPTY where the product is zero."""
    fq, fk, scale = linear_features(op, q, k)
    return (_log(fq @ fk.mT.unsqueeze(2)) + scale).flatten(1, 2)


def linear_features(op, q, k):
    """(fq [B, HS, R, Q, F], fk [B, HS, T, F], scale) with phi_q.phi_k = exp(scale) fq.fk: no
    logarithms, and with log_k one shift per feature covers all keys.
    """
    fq, fk = group(op.phi_q(q), op.state_heads), op.phi_k(state_heads_of(op, k))
    if op.log_k:
        shift = fk.amax(2, keepdim=True).detach()  # [B, HS, 1, F]
        fq, fk = fq + shift.unsqueeze(2), (fk - shift).exp()
    fq, scale = row_scaled(op, fq)
    return fq, fk, scale


def row_scaled(op, features):
    """(features, scale): those of queries [..., F] without their logarithm, times exp(-scale) where
    log_q is set: at most 1.
    """
    if not op.log_q:
        return features, 0.0
    scale = features.amax(-1, keepdim=True).detach()
    return (features - scale).clamp(min=NEGLIGIBLE).exp(), scale


def _counts(x):
    """Where a sum of linear weights counts as one.

    Below about 1e-28 (fp32) it is zero: the gradient 1 / x would overflow.
    """
    return x > torch.finfo(x.dtype).tiny ** 0.75


def _log(x):
    """log x, and EMPTY with a zero gradient where x counts as zero."""
    return torch.where(_counts(x), torch.where(_counts(x), x, 1).log(), EMPTY)


# -------------------------------------------------------------------------------- joining the parts
def join(op, exact, linear):
    """One output from two parts, each (output [..., Dv], log mass [..., 1]) or None."""
    if linear is None:
        return exact[0]
    if exact is None:
        return linear[0]
    return torch.lerp(linear[0], exact[0], torch.sigmoid(exact[1] - linear[1]))


def exact_part(op, q, k, v, mask, beta, alpha, sink_logit):
    """(output, log mass) of exact attention of rows q [..., R C, D] on the keys k, v [..., U, .].

    mask [..., 1, C, U] is bool, or None if C = 1 and every row sees every key; beta, alpha,
    sink_logit broadcast over [..., R, C, 1]. A row without a key gives 0 and EMPTY. Masks are sums
    and products and the argument of exp has a floor, because selections, and exponentials that
    underflow, cost a CPU ten times as much.
    """
    C = 1 if mask is None else mask.shape[-2]
    scores = op.scores(q @ k.mT).unflatten(-2, (-1, C))  # [..., R, C, U]
    if mask is not None:
        there = mask.to(q.dtype)
        scores = scores + (there - 1) * -EMPTY
    top = scores.amax(-1, keepdim=True)
    if sink_logit is not None:
        top = torch.maximum(top, sink_logit)
    shift = top.detach() if mask is None else top.detach().clamp(min=EMPTY / 10)
    weights = F.threshold(scores - shift, NEGLIGIBLE, NEGLIGIBLE).exp()
    if mask is not None:
        weights = weights * there
    mass = weights.sum(-1, keepdim=True)
    if sink_logit is not None:
        mass = mass + (sink_logit - shift).exp()
    empty = None if mask is None else mass == 0
    mass = mass if empty is None else mass.masked_fill(empty, 1)
    out = weights.flatten(-3, -2) @ v / mass.flatten(-3, -2)
    log_mass = beta + (alpha - 1) * top + shift + mass.log()
    log_mass = log_mass if empty is None else log_mass.masked_fill(empty, EMPTY)
    return out, log_mass.flatten(-3, -2)


def linear_part(num, den, scale=0.0):
    """(output, log mass) from sums scaled by exp(-scale)."""
    counts = _counts(den)
    den = torch.where(counts, den, 1)
    return num / den, torch.where(counts, den.log() + scale, EMPTY)


# ----------------------------------------------------------------------------- parts of the state
def take(x, order):
    """x [B, heads, L, d] with the L axis in the given order [B, L]."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def update_sinks(state, keys, values, start, first):
    """The sink keys and values after the tokens `keys` [B, G, L, .] at positions start to
    start + L - 1.
    """
    N = state.sink_k.shape[2]
    if not N:
        return state.sink_k, state.sink_v
    slot = torch.arange(N, device=keys.device)
    index = slot - start  # [B, N] where each sink lies in keys
    fresh = ((slot >= first) & (index < keys.shape[2]))[:, None, :, None]
    index = index.clamp(0, keys.shape[2] - 1)
    return tuple(
        torch.where(fresh, take(x, index), old)
        for x, old in ((keys, state.sink_k), (values, state.sink_v))
    )


# ----------------------------------------------------------------------------------- recurrent form
def fold(op, state, k, v, weight=None):
    """(S, z, shift) with the tokens k [B, G, n, D], v [B, G, n, Dv] added, weight [B, n] 0 or 1."""
    S, z, shift = state.S, state.z, state.shift
    features, values = op.phi_k(state_heads_of(op, k)), state_heads_of(op, v).to(S.dtype)
    if op.log_k:
        if weight is not None:
            features = features.masked_fill(~weight[:, None, :, None], EMPTY)
        new = torch.maximum(shift, features.amax(2)).detach()
        features, decay = (features - new.unsqueeze(2)).exp(), (shift - new).exp()
        S, z, shift = S * decay.unsqueeze(-1), z * decay, new
    if weight is not None:
        features = features * weight[:, None, :, None]
    return S + features.mT @ values, z + features.sum(2), shift


def hybrid_step(op, q, k, v, state, *, settled=False):
    """One valid token per row: (o [B, H, 1, Dv], state).

    q [B, H, 1, D]; k [B, G, 1, D]; v [B, G, 1, Dv]. settled says that every row has seen W + N
    tokens, so that sinks and window are full and nothing needs a mask.
    """
    G, wide, N, P = k.shape[1], compute_dtype(q), op.sinks, op.past
    sink_k, sink_v, seen = state.sink_k, state.sink_v, state.seen
    if N and not settled:
        arrives = (torch.arange(N, device=q.device) == seen[:, None])[:, None, :, None]
        sink_k, sink_v = torch.where(arrives, k, sink_k), torch.where(arrives, v, sink_v)
    all_k = torch.cat([sink_k, state.window_k, k], 2)  # [B, G, N + P + 1, D]
    all_v = torch.cat([sink_v, state.window_v, v], 2)
    q, wide_k, wide_v = q.to(wide), all_k.to(wide), all_v.to(wide)  # once for all parts
    leaves = None if settled else (seen - P >= N)[:, None]
    leaving = slice(N, N + 1)  # the token that leaves the window now
    added = state[:3]
    if op.linear:
        added = fold(op, state, wide_k[:, :, leaving], wide_v[:, :, leaving], leaves)
    S, z, shift = state[:3] if op.window else added  # without a window a token reads itself

    exact = None
    if N or op.window:
        exact_keys = slice(None) if op.window else slice(N)
        per_head = (None if p is None else p.to(wide).view(G, -1, 1, 1) for p in op.per_head)
        exact = exact_part(
            op,
            group(q.squeeze(2), G),
            wide_k[:, :, exact_keys],
            wide_v[:, :, exact_keys],
            None if settled and not op.terraced else _step_mask(op, seen),
            *per_head,
        )
        exact = tuple(x.flatten(1, 2) for x in exact)  # [B, H, Dv], [B, H, 1]
    linear = None
    if op.linear:
        fq = group(op.phi_q(q).squeeze(2), op.state_heads)  # [B, HS, R, F]
        fq, scale = row_scaled(op, fq + shift.unsqueeze(2) if op.log_k else fq)
        num, den = fq @ S, fq @ z.unsqueeze(-1)
        if op.terraced:  # keys that are held, and not in the window
            place = _held(op, seen)
            far = (place >= N) & ~op.near(seen[:, None], place)
            features = op.phi_k(state_heads_of(op, wide_k[:, :, N:])) * far[:, None, :, None]
            weights = fq @ features.mT  # [B, HS, R, 2 W]
            num = num + weights @ state_heads_of(op, wide_v[:, :, N:]).to(weights.dtype)
            den = den + weights.sum(-1, keepdim=True)
        linear = tuple(x.flatten(1, 2) for x in linear_part(num, den, scale))
    out = join(op, exact, linear).unsqueeze(2).to(v.dtype)
    window_k, window_v = all_k[:, :, N + 1 :], all_v[:, :, N + 1 :]
    return out, State(*added, sink_k, sink_v, window_k, window_v, seen + 1)


def _step_mask(op, seen):
    """Which of the sinks and of the keys that are held the next token sees, [B, 1, 1, 1, N +
    reach].
    """
    sinks = torch.arange(op.sinks, device=seen.device) <= seen[:, None]
    place = _held(op, seen)
    window = place >= op.sinks
    if op.terraced:
        window = window & op.near(seen[:, None], place)
    return torch.cat([sinks, window], 1)[:, None, None, None]


def _held(op, seen):
    """Positions [B, reach] of the keys that are held for windows, at token `seen`."""
    return torch.arange(op.reach, device=seen.device) + (seen - op.past)[:, None]


def hybrid_recurrent(op, q, k, v, state):
    """The operator token by token: `hybrid_step` over T. Returns (o [B, H, T, Dv], state)."""
    outs = []
    for t in range(q.shape[2]):
        out, state = hybrid_step(op, *(x[:, :, t : t + 1] for x in (q, k, v)), state)
        outs.append(out)
    return torch.cat(outs, 2), state
