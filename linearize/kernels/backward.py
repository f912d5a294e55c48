"""Gradients of the outputs. No atomics: a program owns what it writes, so two runs agree bitwise.

Legend as in `out`. With probabilities p = exp(s - lse) of exact keys and fq.fk / den of linear
ones, and delta = do.o,

    dv_s  = sum_t p_ts do_t                       dp_ts = do_t.v_s - delta_t
    ds_ts = p_ts dp_ts + [s is the best key of t] (alpha - 1) E_t
    dfq_t = sum_s dp_ts fk_s / den_t              dfk_s = sum_t dp_ts fq_t / den_t
    E_t   = share_linear X_t - share_exact Y_t,   X = sum of p dp over exact keys, Y over linear

E_t is the gradient of the exact part's log mass beta + alpha m + ..: dbeta = sum E, dalpha = sum m
E, and -E_t that of the row's log scale. In exact arithmetic E = X = -Y; the combination is free of
the rounding of delta. The max term makes m_t part of the function: see docs/concepts.md.
"""

import torch
import triton
import triton.language as tl

from .configs import choose
from .tiles import load_columns, load_rows, store_rows

SPLITS = 16  # programs that share the rows of one head in the sinks' gradient


@triton.jit
def _probabilities(scores, lse, visible):
    return tl.where(visible, tl.exp(tl.where(visible, scores - lse, 0.0)), 0.0)


@triton.jit
def queries_backward(
    V, FQ, FK, SEEN, HST, HZ, OUT, DO, DEN, DFQ, DELTA, Y_,
    o_b, o_h, o_t, d_b, d_h, d_t, T, chunks,
    H: tl.constexpr, G: tl.constexpr, HS: tl.constexpr, DV: tl.constexpr, F: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, N: tl.constexpr, VP: tl.constexpr, FP: tl.constexpr,
    BF: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # Grid (chunks, B H). The linear part's gradient of the queries' features, and the row sums
    # delta and Y.
    c, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = i_h // H, i_h % H
    hs = b * HS + h // (H // HS)
    rc, rv = tl.arange(0, C), tl.arange(0, VP)
    t = c * C + rc  # the queries of the chunk, and the keys of its triangle
    real = t < T
    low = N + P - tl.load(SEEN + b).to(tl.int32)
    do = load_rows(DO + b * d_b + h * d_h, t, rv, real, DV, VP, d_t)
    o = load_rows(OUT + b * o_b + h * o_h, t, rv, real, DV, VP, o_t)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    inverse = 1.0 / tl.load(DEN + i_h * T + t, mask=real, other=1.0)
    v = load_columns(V + (b * G + h // (H // G)) * (T + P) * DV, t, rv, real, DV, VP, DV)
    dA = (tl.dot(do, v, input_precision=PREC) - delta[:, None]) * inverse[:, None]
    dA = tl.where((t[None, :] < t[:, None]) & (t >= low)[None, :], dA, 0.0)
    dA = dA.to(FK.dtype.element_ty)
    HST += (hs * chunks + c) * F * DV
    HZ += (hs * chunks + c) * F
    Y = tl.zeros([C], tl.float32)
    for f in range(0, FP, BF):
        rf = f + tl.arange(0, BF)
        fq = load_rows(FQ + i_h * T * F, t, rf, real, F, FP, F)
        fk = load_rows(FK + hs * T * F, t, rf, real, F, FP, F)
        state = load_columns(HST, rf, rv, rf < F, DV, VP, DV)  # [VP, BF]
        z = tl.load(HZ + rf, mask=rf < F, other=0.0)
        dfq = tl.dot(do.to(state.dtype), state, input_precision=PREC) - delta[:, None] * z[None, :]
        dfq = dfq * inverse[:, None] + tl.dot(dA, fk, input_precision=PREC)
        Y += tl.sum(dfq * fq.to(tl.float32), 1)
        store_rows(DFQ + i_h * T * F, dfq, t, rf, real, F, FP, F)
    tl.store(DELTA + i_h * T + t, delta, mask=real)
    tl.store(Y_ + i_h * T + t, Y, mask=real)


@triton.jit
def _add_keys(dq, X, share, q, do, k, v, lse, delta, visible, scaling, PREC: tl.constexpr):
    """dq, X and the share of the exact part with one more tile of k [keys, D], v [Dv, keys]."""
    s = tl.dot(q, tl.trans(k), input_precision=PREC) * scaling
    p = _probabilities(s, lse[:, None], visible)
    ds = p * (tl.dot(do, v, input_precision=PREC) - delta[:, None])
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PREC)
    return dq, X + tl.sum(ds, 1), share + tl.sum(p, 1)


@triton.jit
def rows_backward(
    Q, K, V, SK, SV, ALPHA, SEEN, DO, LSE, BEST, DELTA, Y_, DQ, E,
    q_b, q_h, q_t, d_b, d_h, d_t, T, scaling,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    # Grid (chunks, B H). The exact part's gradient of the queries, and the row sum E.
    c, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = i_h // H, i_h % H
    g = b * G + h // (H // G)
    L = T + P
    rc, rd, rv = tl.arange(0, C), tl.arange(0, DP), tl.arange(0, VP)
    t = c * C + rc
    real = t < T
    seen = tl.load(SEEN + b).to(tl.int32)
    low = N + P - seen
    K += g * L * D
    q = load_rows(Q + b * q_b + h * q_h, t, rd, real, D, DP, q_t)
    do = load_rows(DO + b * d_b + h * d_h, t, rv, real, DV, VP, d_t)
    lse = tl.load(LSE + i_h * T + t, mask=real, other=0.0)
    delta = tl.load(DELTA + i_h * T + t, mask=real, other=0.0)
    dq = tl.zeros([C, DP], tl.float32)
    X = tl.zeros([C], tl.float32)
    share = tl.zeros([C], tl.float32)
    for j in range((P + C + C - 1) // C):
        i = (c + j) * C + rc
        k = load_rows(K, i, rd, i < L, D, DP, D)
        v = load_columns(V + g * L * DV, i, rv, i < L, DV, VP, DV)
        age = i[None, :] - t[:, None]
        visible = (age >= 0) & (age <= P) & (i >= low)[None, :] & real[:, None]
        dq, X, share = _add_keys(dq, X, share, q, do, k, v, lse, delta, visible, scaling, PREC)
    if N > 0:
        rn = tl.arange(0, BN)
        sk = load_rows(SK + g * N * D, rn, rd, rn < N, D, DP, D)
        sv = load_columns(SV + g * N * DV, rn, rv, rn < N, DV, VP, DV)
        visible = (rn < N)[None, :] & (rn[None, :] <= seen + t[:, None]) & real[:, None]
        dq, X, share = _add_keys(dq, X, share, q, do, sk, sv, lse, delta, visible, scaling, PREC)
    Y = tl.load(Y_ + i_h * T + t, mask=real, other=0.0)
    row = tl.where(t > low, (1 - share) * X - share * Y, 0.0)
    tl.store(E + i_h * T + t, row, mask=real)
    best = tl.load(BEST + i_h * T + t, mask=real, other=0)
    key = load_rows(K, tl.maximum(best, 0), rd, real & (best >= 0), D, DP, D).to(tl.float32)
    if N > 0:
        sink = load_rows(SK + g * N * D, tl.maximum(-1 - best, 0), rd, real & (best < 0), D, DP, D)
        key += sink.to(tl.float32)
    extra = row * (tl.load(ALPHA + h).to(tl.float32) - 1)
    store_rows(DQ + i_h * T * D, (dq + extra[:, None] * key) * scaling, t, rd, real, D, DP, D)


@triton.jit
def _transposed(q, do, k, v, lse, delta, extra, visible, scaling, PREC: tl.constexpr):
    """(p, ds), [keys, queries], of rows q, do and keys k, v, all [rows, width]."""
    s = tl.dot(k, tl.trans(q), input_precision=PREC) * scaling
    p = _probabilities(s, lse[None, :], visible)
    ds = p * (tl.dot(v, tl.trans(do), input_precision=PREC) - delta[None, :]) + extra
    return p, ds


@triton.jit
def keys_backward(
    Q, K, V, ALPHA, SEEN, DO, LSE, DELTA, E, BEST, DK, DV_,
    q_b, q_h, q_t, d_b, d_h, d_t, T, scaling,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BQ: tl.constexpr, W: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    # Grid (chunks of L, B G). The exact part's gradient of the keys and values of one chunk, from
    # the queries n C - P to n C + C - 1 in tiles of BQ.
    n, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    R: tl.constexpr = H // G
    P: tl.constexpr = W - 1
    b, g = i_g // G, i_g % G
    L = T + P
    rc, rd, rv = tl.arange(0, C), tl.arange(0, DP), tl.arange(0, VP)
    i = n * C + rc
    low = N + P - tl.load(SEEN + b).to(tl.int32)
    k = load_rows(K + i_g * L * D, i, rd, i < L, D, DP, D)
    v = load_rows(V + i_g * L * DV, i, rv, i < L, DV, VP, DV)
    dk = tl.zeros([C, DP], tl.float32)
    dv = tl.zeros([C, VP], tl.float32)
    first = tl.maximum(n * C - P, 0) // BQ
    last = tl.cdiv(tl.minimum(n * C + C, T), BQ)
    for r in range(R):
        h = g * R + r
        head = b * H + h
        factor = tl.load(ALPHA + h).to(tl.float32) - 1
        for c in range(first, last):
            t = c * BQ + tl.arange(0, BQ)
            real = t < T
            q = load_rows(Q + b * q_b + h * q_h, t, rd, real, D, DP, q_t)
            do = load_rows(DO + b * d_b + h * d_h, t, rv, real, DV, VP, d_t)
            lse = tl.load(LSE + head * T + t, mask=real, other=0.0)
            delta = tl.load(DELTA + head * T + t, mask=real, other=0.0)
            row = tl.load(E + head * T + t, mask=real, other=0.0) * factor
            best = tl.load(BEST + head * T + t, mask=real, other=-1)
            age = i[:, None] - t[None, :]
            visible = (age >= 0) & (age <= P) & (i >= low)[:, None] & real[None, :]
            extra = tl.where(best[None, :] == i[:, None], row[None, :], 0.0)
            p, ds = _transposed(q, do, k, v, lse, delta, extra, visible, scaling, PREC)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PREC)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PREC)
    store_rows(DK + i_g * L * D, dk * scaling, i, rd, i < L, D, DP, D)
    store_rows(DV_ + i_g * L * DV, dv, i, rv, i < L, DV, VP, DV)


@triton.jit
def sinks_backward(
    Q, SK, SV, ALPHA, SEEN, DO, LSE, DELTA, E, BEST, DK, DV_,
    q_b, q_h, q_t, d_b, d_h, d_t, T, scaling, splits,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # Grid (splits, B H). Every splits-th chunk of one head; DK, DV_ [B, H, splits, N, .] fp32.
    i_s, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = i_h // H, i_h % H
    g = b * G + h // (H // G)
    rc, rd, rv, rn = tl.arange(0, C), tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, BN)
    seen = tl.load(SEEN + b).to(tl.int32)
    k = load_rows(SK + g * N * D, rn, rd, rn < N, D, DP, D)
    v = load_rows(SV + g * N * DV, rn, rv, rn < N, DV, VP, DV)
    factor = tl.load(ALPHA + h).to(tl.float32) - 1
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, VP], tl.float32)
    for c in range(i_s, tl.cdiv(T, C), splits):
        t = c * C + rc
        real = t < T
        q = load_rows(Q + b * q_b + h * q_h, t, rd, real, D, DP, q_t)
        do = load_rows(DO + b * d_b + h * d_h, t, rv, real, DV, VP, d_t)
        lse = tl.load(LSE + i_h * T + t, mask=real, other=0.0)
        delta = tl.load(DELTA + i_h * T + t, mask=real, other=0.0)
        row = tl.load(E + i_h * T + t, mask=real, other=0.0) * factor
        best = tl.load(BEST + i_h * T + t, mask=real, other=0)
        visible = (rn < N)[:, None] & (rn[:, None] <= seen + t[None, :]) & real[None, :]
        extra = tl.where(best[None, :] == -1 - rn[:, None], row[None, :], 0.0)
        p, ds = _transposed(q, do, k, v, lse, delta, extra, visible, scaling, PREC)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PREC)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PREC)
    base = i_h * splits + i_s
    store_rows(DK + base * N * D, dk * scaling, rn, rd, rn < N, D, DP, D)
    store_rows(DV_ + base * N * DV, dv, rn, rv, rn < N, DV, VP, DV)


@triton.jit
def features_backward(
    V, FQ, FK, SEEN, DO, DELTA, DEN, DH, DHZ, DFK, DV_, d_b, d_h, d_t, T, L, chunks,
    H: tl.constexpr, G: tl.constexpr, HS: tl.constexpr, DV: tl.constexpr, F: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, N: tl.constexpr, VP: tl.constexpr, FP: tl.constexpr,
    BF: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # Grid (chunks of T, B HS). The linear part's gradient of the features and values of one chunk.
    n, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    R: tl.constexpr = H // HS
    b, hs = i_h // HS, i_h % HS
    rc, rv = tl.arange(0, C), tl.arange(0, VP)
    i = n * C + rc  # the keys of the chunk, and the queries of its triangle
    low = N + P - tl.load(SEEN + b).to(tl.int32)
    counts = (i >= low) & (i < T)
    pair = (i[:, None] < i[None, :]) & counts[:, None] & (i < T)[None, :]
    V += (b * G + hs // (HS // G)) * L * DV
    FK += i_h * T * F
    DH += (i_h * chunks + n) * F * DV
    DHZ += (i_h * chunks + n) * F
    v = load_rows(V, i, rv, counts, DV, VP, DV)
    narrow = FQ.dtype.element_ty
    dv = tl.zeros([C, VP], tl.float32)
    for r in range(R):
        head = b * H + hs * R + r
        do = load_rows(DO + b * d_b + (hs * R + r) * d_h, i, rv, i < T, DV, VP, d_t)
        inverse = 1.0 / tl.load(DEN + head * T + i, mask=i < T, other=1.0)
        A = tl.zeros([C, C], tl.float32)
        for f in range(0, FP, BF):
            rf = f + tl.arange(0, BF)
            fk = load_rows(FK, i, rf, counts, F, FP, F)
            fq = load_columns(FQ + head * T * F, i, rf, i < T, F, FP, F)
            A = tl.dot(fk, fq, A, input_precision=PREC)
        A = tl.where(pair, A * inverse[None, :], 0.0)
        dv = tl.dot(A.to(narrow), do, dv, input_precision=PREC)
    for f in range(0, FP, BF):
        rf = f + tl.arange(0, BF)
        state = load_rows(DH, rf, rv, rf < F, DV, VP, DV)  # [BF, VP]
        z = tl.load(DHZ + rf, mask=rf < F, other=0.0)
        fk = load_rows(FK, i, rf, counts, F, FP, F)
        dv = tl.dot(fk.to(state.dtype), state, dv, input_precision=PREC)
        dfk = tl.dot(v.to(state.dtype), tl.trans(state), input_precision=PREC) + z[None, :]
        for r in range(R):
            head = b * H + hs * R + r
            do = load_columns(DO + b * d_b + (hs * R + r) * d_h, i, rv, i < T, DV, VP, d_t)
            inverse = 1.0 / tl.load(DEN + head * T + i, mask=i < T, other=1.0)
            delta = tl.load(DELTA + head * T + i, mask=i < T, other=0.0)
            dA = (tl.dot(v, do, input_precision=PREC) - delta[None, :]) * inverse[None, :]
            dA = tl.where(pair, dA, 0.0)
            fq = load_rows(FQ + head * T * F, i, rf, i < T, F, FP, F)
            dfk = tl.dot(dA.to(narrow), fq, dfk, input_precision=PREC)
        dfk = tl.where(counts[:, None], dfk, 0.0)
        store_rows(DFK + i_h * T * F, dfk, i, rf, i < T, F, FP, F)
    store_rows(DV_ + i_h * T * DV, dv, i, rv, i < T, DV, VP, DV)


def queries_gradients(v, fq, fk, seen, h, hz, o, do, den, *, window, sinks, chunk, precision):
    """(dfq [B, H, T, F], delta, Y [B, H, T] fp32) of the linear part."""
    (B, H, T, F), (G, _, DV), HS = fq.shape, v.shape[1:], fk.shape[1]
    dfq, delta, Y = torch.empty_like(fq), torch.empty_like(den), torch.empty_like(den)
    config = choose("queries", v, F=F, DV=DV)
    queries_backward[(h.shape[2], B * H)](
        v, fq, fk, seen, h, hz, o, do, den, dfq, delta, Y, *o.stride()[:3], *do.stride()[:3], T,
        h.shape[2], H=H, G=G, HS=HS, DV=DV, F=F, C=chunk, P=window - 1, N=sinks, PREC=precision,
        **config.meta,
    )  # fmt: skip
    return dfq, delta, Y


def rows_gradients(
    q, k, v, sink_k, sink_v, alpha, seen, do, lse, best, delta, Y, *, window, scaling, chunk,
    precision,
):  # fmt: skip
    """(dq [B, H, T, D], E [B, H, T] fp32) of the exact part."""
    (B, H, T, D), (G, _, DV), N = q.shape, v.shape[1:], sink_k.shape[2]
    dq, E = q.new_empty(q.shape), torch.empty_like(lse)
    config = choose("rows", v, DV=DV, D=D, N=N)
    rows_backward[(triton.cdiv(T, chunk), B * H)](
        q, k, v, sink_k, sink_v, alpha, seen, do, lse, best, delta, Y, dq, E, *q.stride()[:3],
        *do.stride()[:3], T, scaling, H=H, G=G, D=D, DV=DV, C=chunk, P=window - 1, N=N,
        PREC=precision, **config.meta,
    )  # fmt: skip
    return dq, E


def keys_gradients(
    q, k, v, sink_k, sink_v, alpha, seen, do, lse, delta, E, best, *, window, scaling, chunk,
    precision,
):  # fmt: skip
    """The exact part's (dk, dv, dsink_k, dsink_v)."""
    (B, H, T, D), (G, L, DV), N = q.shape, v.shape[1:], sink_k.shape[2]
    dk, dv = torch.empty_like(k), torch.empty(v.shape, dtype=torch.float32, device=v.device)
    rows = (alpha, seen, do, lse, delta, E, best)
    strides = (*q.stride()[:3], *do.stride()[:3])
    shape = dict(H=H, G=G, D=D, DV=DV, C=chunk, N=N, PREC=precision)
    config = choose("keys", v, DV=DV, D=D)
    keys_backward[(triton.cdiv(L, chunk), B * G)](
        q, k, v, *rows, dk, dv, *strides, T, scaling, W=window, **shape, **config.meta
    )
    if not N:
        return dk, dv, torch.empty_like(sink_k), torch.empty_like(sink_v)
    splits = min(triton.cdiv(T, chunk), SPLITS)
    wide = dict(dtype=torch.float32, device=v.device)
    parts = [torch.empty(B, H, splits, N, size, **wide) for size in (D, DV)]
    config = choose("sinks", v, DV=DV, D=D, N=N)
    sinks_backward[(splits, B * H)](
        q, sink_k, sink_v, *rows, *parts, *strides, T, scaling, splits, **shape, **config.meta
    )
    dsinks = (x.unflatten(1, (G, -1)).sum((2, 3)).to(v.dtype) for x in parts)
    return dk, dv, *dsinks


def features_gradients(
    v, fq, fk, seen, do, delta, den, dh, dhz, *, window, sinks, chunk, precision
):
    """The linear part's (dfk [B, HS, T, F], dv [B, HS, T, Dv] fp32)."""
    (B, H, T, F), (G, L, DV), HS = fq.shape, v.shape[1:], fk.shape[1]
    dfk = torch.empty_like(fk)
    dv = torch.empty(B, HS, T, DV, dtype=torch.float32, device=v.device)
    config = choose("features", v, F=F, DV=DV)
    features_backward[(dh.shape[2], B * HS)](
        v, fq, fk, seen, do, delta, den, dh, dhz, dfk, dv, *do.stride()[:3], T, L, dh.shape[2], H=H,
        G=G, HS=HS, DV=DV, F=F, C=chunk, P=window - 1, N=sinks, PREC=precision, **config.meta,
    )  # fmt: skip
    return dfk, dv
