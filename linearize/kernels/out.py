"""The outputs of a chunk: window, sinks and linear part under one normaliser.

Legend: B batch, H query heads, G key/value heads, HS state heads, T tokens, L = P + T keys, P = W -
1 earlier keys, D head size, Dv value size, F features, C chunk, N sinks. Query t is key P + t of
the axis of L, so its window is the keys t to t + P, and its linear keys are those before t: the
prefix state of its chunk, and a triangle in the chunk of the same number. See `modeling/ops.py` for
the function, and docs/performance.md for the form computed here.

Weights of a row are kept divided by exp(scale_t): exact ones are r_t exp(s_ts - m_t) with
log r_t = beta + alpha m_t - scale_t, linear ones are fq.fk.
"""

import torch
import triton
import triton.language as tl

from .configs import choose
from .tiles import HIGHEST, LOG2E, LOWEST, load_columns, load_rows, store_rows


@triton.jit
def _attend(m, mass, best, acc, scores, v, index, SAVE: tl.constexpr, PREC: tl.constexpr):
    """One tile of keys into the running softmax; scores are in base 2, -inf where hidden."""
    top = tl.max(scores, 1)
    if SAVE:
        hit = tl.min(tl.where(scores == top[:, None], index[None, :], 2147483647), 1)
        best = tl.where(top > m, hit, best)
    new = tl.maximum(m, top)
    safe = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
    decay = tl.exp2(m - safe)
    p = tl.exp2(scores - safe[:, None])
    mass = mass * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PREC)
    return new, mass, best, acc


@triton.jit
def _add_linear(
    acc, den, FQ, FK, V, HST, HZ, t, rv, real, low, DV: tl.constexpr, VP: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """acc and den with the prefix state and the triangle of keys t before queries t."""
    A = tl.zeros([C, C], tl.float32)
    for f in range(0, FP, BF):
        rf = f + tl.arange(0, BF)
        fq = load_rows(FQ, t, rf, real, F, FP, F)
        fk = load_columns(FK, t, rf, real, F, FP, F)
        state = load_rows(HST, rf, rv, rf < F, DV, VP, DV)
        z = tl.load(HZ + rf, mask=rf < F, other=0.0)
        den += tl.sum(fq.to(tl.float32) * z[None, :], 1)
        acc = tl.dot(fq.to(state.dtype), state, acc, input_precision=PREC)
        A = tl.dot(fq, fk, A, input_precision=PREC)
    A = tl.where((t[None, :] < t[:, None]) & (t >= low)[None, :], A, 0.0)
    v = load_rows(V, t, rv, real, DV, VP, DV)
    return tl.dot(A.to(v.dtype), v, acc, input_precision=PREC), den + tl.sum(A, 1)


@triton.jit
def output_forward(
    Q, K, V, SK, SV, FQ, FK, SCALE, BETA, ALPHA, SEEN, HST, HZ, OUT, M, LSE, DEN, BEST,
    q_b, q_h, q_t, o_b, o_h, o_t, T, chunks, scaling,
    H: tl.constexpr, G: tl.constexpr, HS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    F: tl.constexpr, C: tl.constexpr, W: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
    DP: tl.constexpr, VP: tl.constexpr, FP: tl.constexpr, BF: tl.constexpr,
    SCALED: tl.constexpr, SAVE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # Grid (chunks, B H).
    c, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = i_h // H, i_h % H
    g, hs = h // (H // G), b * HS + h // (H // HS)
    P: tl.constexpr = W - 1
    L = T + P
    rc, rd, rv = tl.arange(0, C), tl.arange(0, DP), tl.arange(0, VP)
    t = c * C + rc
    real = t < T
    seen = tl.load(SEEN + b).to(tl.int32)
    low = N + P - seen  # the first key that is not a sink and not from before the document
    K += (b * G + g) * L * D
    V += (b * G + g) * L * DV
    q = load_rows(Q + b * q_b + h * q_h, t, rd, real, D, DP, q_t)

    m = tl.full([C], float("-inf"), tl.float32)
    mass = tl.zeros([C], tl.float32)
    best = tl.zeros([C], tl.int32)
    acc = tl.zeros([C, VP], tl.float32)
    if N > 0:
        rn = tl.arange(0, BN)
        sk = load_columns(SK + (b * G + g) * N * D, rn, rd, rn < N, D, DP, D)
        sv = load_rows(SV + (b * G + g) * N * DV, rn, rv, rn < N, DV, VP, DV)
        to_sinks = tl.dot(q, sk, input_precision=PREC) * (scaling * LOG2E)
        visible = (rn < N)[None, :] & (rn[None, :] <= seen + t[:, None])
        to_sinks = tl.where(visible, to_sinks, float("-inf"))
        m, mass, best, acc = _attend(m, mass, best, acc, to_sinks, sv, -1 - rn, SAVE, PREC)
    for j in range((P + C + C - 1) // C):
        i = (c + j) * C + rc
        k = load_columns(K, i, rd, i < L, D, DP, D)
        v = load_rows(V, i, rv, i < L, DV, VP, DV)
        a = tl.dot(q, k, input_precision=PREC) * (scaling * LOG2E)
        age = i[None, :] - t[:, None]
        a = tl.where((age >= 0) & (age <= P) & (i >= low)[None, :], a, float("-inf"))
        m, mass, best, acc = _attend(m, mass, best, acc, a, v, i, SAVE, PREC)

    m = tl.where(real, m, 0.0) / LOG2E
    log_r = tl.load(BETA + h).to(tl.float32) + tl.load(ALPHA + h).to(tl.float32) * m
    if SCALED:
        log_r -= tl.load(SCALE + i_h * T + t, mask=real, other=0.0)
    log_r = tl.minimum(tl.maximum(log_r, LOWEST), HIGHEST)
    log_r = tl.where(t > low, log_r, 0.0)  # without linear keys the factor cancels
    r = tl.exp2(log_r * LOG2E)
    acc = acc * r[:, None]
    den = mass * r

    acc, den = _add_linear(
        acc, den, FQ + i_h * T * F, FK + hs * T * F, V, HST + (hs * chunks + c) * F * DV,
        HZ + (hs * chunks + c) * F, t, rv, real, low, DV, VP, F, FP, BF, C, PREC,
    )  # fmt: skip
    den = tl.where(real, den, 1.0)
    store_rows(OUT + b * o_b + h * o_h, acc / den[:, None], t, rv, real, DV, VP, o_t)
    if SAVE:
        tl.store(M + i_h * T + t, m, mask=real)
        tl.store(LSE + i_h * T + t, m - log_r + tl.log2(den) / LOG2E, mask=real)
        tl.store(DEN + i_h * T + t, den, mask=real)
        tl.store(BEST + i_h * T + t, best, mask=real)


def outputs(
    q, k, v, sink_k, sink_v, fq, fk, log_scale, beta, alpha, seen, h, hz, *, window, scaling, chunk,
    save, precision,
):  # fmt: skip
    """(o [B, H, T, Dv], m, lse, den [B, H, T] fp32, best [B, H, T] int32).

    m is the best exact score of a row, best its key (sink n is -1 - n); exact probabilities are
    exp(s - lse), linear ones fq.fk / den. The last four are empty unless `save`.
    """
    (B, H, T, D), (G, _, DV), (HS, _, F) = q.shape, v.shape[1:], fk.shape[1:]
    N = sink_k.shape[2]
    o = torch.empty(B, T, H, DV, dtype=v.dtype, device=v.device).transpose(1, 2)
    shape = (B, H, T) if save else (0,)
    m, lse, den = (torch.empty(shape, dtype=torch.float32, device=v.device) for _ in range(3))
    best = torch.empty(shape, dtype=torch.int32, device=v.device)
    config = choose("out", v, F=F, DV=DV, D=D, N=N)
    output_forward[(triton.cdiv(T, chunk), B * H)](
        q, k, v, sink_k, sink_v, fq, fk, beta if log_scale is None else log_scale, beta, alpha,
        seen, h, hz, o, m, lse, den, best, *q.stride()[:3], *o.stride()[:3], T, h.shape[2], scaling,
        H=H, G=G, HS=HS, D=D, DV=DV, F=F, C=chunk, W=window, N=N, SCALED=log_scale is not None,
        SAVE=save, PREC=precision, **config.meta,
    )  # fmt: skip
    return o, m, lse, den, best
