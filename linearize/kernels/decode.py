"""One token: feature maps, window, sinks and state in one kernel, the state in place.

Legend: B batch, H query heads, G key/value heads, HS state heads, R = H / HS, D head size, Dv value
size, F features, f the size of a map's projection, N sinks, P = W - 1 keys of the window besides
the new one. A program owns one state head with its whole value width: it reads each tile of the
state once, for the R query heads that share it, adds the key that leaves the window, and writes it.

The window is right-aligned, so it moves by one row: a program that alone owns its key/value head
does that itself, otherwise a second kernel does. All reads of a tile come before its writes, which
a barrier separates.
"""

import torch
import triton
import triton.language as tl

from .configs import choose, padded
from .tiles import HIGHEST, LOG2E, LOWEST, load_columns, load_rows, store_rows


@triton.jit
def _project(X, W, BIAS, rd, rf, D: tl.constexpr, f: tl.constexpr, HALVES: tl.constexpr):
    """The projection xW + b of one row, for the features rf: fp32, -inf beyond f."""
    x = tl.load(X + rd, mask=rd < D, other=0.0).to(tl.float32)
    there = (rd < D)[:, None] & (rf < f)[None, :]
    w = tl.load(W + rd[:, None] * f + rf[None, :], mask=there, other=0.0).to(tl.float32)
    y = tl.sum(x[:, None] * w, 0)
    if HALVES == 1:
        y += tl.load(BIAS + rf, mask=rf < f, other=0.0).to(tl.float32)
    return y


@triton.jit
def _attend(m, mass, acc, q, k, v, visible, scale, PREC: tl.constexpr):
    """One tile of keys k [D, keys] and values into the running softmax in base 2."""
    scores = tl.where(visible[None, :], tl.dot(q, k, input_precision=PREC) * scale, float("-inf"))
    new = tl.maximum(m, tl.max(scores, 1))
    decay = tl.exp2(m - new)
    p = tl.exp2(scores - new[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PREC)
    return new, mass * decay + tl.sum(p, 1), acc


@triton.jit
def _shift(X, NEW, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BW: tl.constexpr):
    """Moves the rows of X [P, D] up by one and writes NEW [D] into the last."""
    rd = tl.arange(0, DP)
    new = tl.load(NEW + rd, mask=rd < D, other=0.0)
    for j in range(0, P, BW):
        i = j + tl.arange(0, BW)
        rows = load_rows(X, i + 1, rd, i + 1 < P, D, DP, D)
        rows = tl.where((i == P - 1)[:, None], new[None, :], rows)
        tl.debug_barrier()
        store_rows(X, rows, i, rd, i < P, D, DP, D)


@triton.jit
def shift_windows(
    K, V, WK_, WV_, k_b, k_g, v_b, v_g, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    P: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    # Grid (B G).
    i_g = tl.program_id(0).to(tl.int64)
    b, g = i_g // G, i_g % G
    _shift(WK_ + i_g * P * D, K + b * k_b + g * k_g, P, D, DP, BW)
    _shift(WV_ + i_g * P * DV, V + b * v_b + g * v_g, P, DV, VP, BW)


@triton.jit
def _exact(
    q, k, v, SK, SV, WK_, WV_, seen, scale, D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
    RP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(m in base 2, mass, acc) of q [RP, D] on the new key, the sinks and the window."""
    rd, rv, rn = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, BN)
    m = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    mass = tl.full([RP], 1.0, tl.float32)
    acc = tl.zeros([RP, VP], tl.float32) + v.to(tl.float32)[None, :]
    if N > 0:
        old = (rn < N) & (rn < seen)
        sk = load_columns(SK, rn, rd, old, D, DP, D)
        sv = load_rows(SV, rn, rv, old, DV, VP, DV)
        m, mass, acc = _attend(m, mass, acc, q, sk, sv, old, scale, PREC)
    for j in range(0, P, BW):
        i = j + tl.arange(0, BW)
        there = (i < P) & (seen - P + i >= N)
        wk = load_columns(WK_, i, rd, there, D, DP, D)
        wv = load_rows(WV_, i, rv, there, DV, VP, DV)
        m, mass, acc = _attend(m, mass, acc, q, wk, wv, there, scale, PREC)
    return m, mass, acc


@triton.jit
def _normalisers(
    X, W, BIAS, rd, D: tl.constexpr, f: tl.constexpr, BF: tl.constexpr, HALVES: tl.constexpr
):
    """(max y, sum exp(y - max), min y, sum exp(min - y)) of a projection y; the last two only for
    two halves.
    """
    top, low = float("-inf"), float("inf")
    up, down = 0.0, 0.0
    for j in range(0, f, BF):
        rf = j + tl.arange(0, BF)
        y = _project(X, W, BIAS, rd, rf, D, f, HALVES)
        new = tl.maximum(top, tl.max(tl.where(rf < f, y, float("-inf")), 0))
        up = up * tl.exp(top - new) + tl.sum(tl.where(rf < f, tl.exp(y - new), 0.0), 0)
        top = new
        if HALVES == 2:
            new = tl.minimum(low, tl.min(tl.where(rf < f, y, float("inf")), 0))
            down = down * tl.exp(new - low) + tl.sum(tl.where(rf < f, tl.exp(new - y), 0.0), 0)
            low = new
    return top, up, low, down


@triton.jit
def _query_logs(
    Q, q_h, W, BIAS, rd, rf, rr, half: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BF: tl.constexpr, D: tl.constexpr, f: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Log features rf of R query heads, [RP, BF]; -inf where there is none."""
    logs = tl.full([RP, BF], float("-inf"), tl.float32)
    for r in tl.static_range(R):
        y = _project(Q + r * q_h, W + r * D * f, BIAS + r * f, rd, rf, D, f, HALVES)
        y = -y if half == 1 else y
        logs = tl.where((rr == r)[:, None] & (rf < f)[None, :], y[None, :], logs)
    return logs


@triton.jit
def _read_and_write(
    Q, q_h, MQ, BIAS_Q, LEAVING, leaving_v, leaves, MK, BIAS_K, extreme, normaliser, S, Z,
    narrow: tl.constexpr, half: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    f: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, RP: tl.constexpr, BF: tl.constexpr,
    HALVES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(sum e S, sum e z, sum e, best) of R queries, e = exp(log feature - best), for one half of
    the features; then the key that leaves the window is added to S and z.
    """
    rd, rv, rr = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, RP)
    best = tl.full([RP], float("-inf"), tl.float32)
    total = tl.zeros([RP], tl.float32)
    part = tl.zeros([RP, VP], tl.float32)
    weight = tl.zeros([RP], tl.float32)
    for j in range(0, f, BF):
        rf = j + tl.arange(0, BF)
        logs = _query_logs(Q, q_h, MQ, BIAS_Q, rd, rf, rr, half, R, RP, BF, D, f, HALVES)
        new = tl.maximum(best, tl.max(logs, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # the rows beyond R
        decay = tl.exp(best - safe)
        e = tl.exp(logs - safe[:, None])
        best = new
        at = rf[:, None] * DV + rv[None, :]
        there = (rf < f)[:, None] & (rv < DV)[None, :]
        state = tl.load(S + at, mask=there, other=0.0)
        z = tl.load(Z + rf, mask=rf < f, other=0.0)
        total = total * decay + tl.sum(e, 1)
        weight = weight * decay + tl.sum(e * z[None, :], 1)
        part = tl.dot(e, state, part * decay[:, None], input_precision=PREC)
        y = _project(LEAVING, MK, BIAS_K, rd, rf, D, f, HALVES)
        y = extreme - y if half == 1 else y - extreme
        # rounded as in prefill, so that both build the same state
        phi = tl.where(rf < f, tl.exp(y) / normaliser, 0.0) * leaves
        phi = phi.to(narrow).to(tl.float32)
        tl.store(S + at, state + phi[:, None] * leaving_v[None, :], mask=there)
        tl.store(Z + rf, z + phi, mask=rf < f)
    return part, weight, total, best


@triton.jit
def step_forward(
    Q, K, V, MQ, BIAS_Q, MK, BIAS_K, BETA, ALPHA, S, Z, SK, SV, WK_, WV_, SEEN, OUT,
    q_b, q_h, k_b, k_g, v_b, v_g, scaling,
    H: tl.constexpr, G: tl.constexpr, HS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    f: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    DP: tl.constexpr, VP: tl.constexpr, RP: tl.constexpr, BF: tl.constexpr,
    HALVES: tl.constexpr, PREC: tl.constexpr, PREC_STATE: tl.constexpr,
):  # fmt: skip
    # Grid (B HS).
    i_h = tl.program_id(0).to(tl.int64)
    b, hs = i_h // HS, i_h % HS
    g, own = hs // (HS // G), b * G + hs // (HS // G)
    R: tl.constexpr = H // HS
    rd, rv, rr = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, RP)
    head = hs * R
    K, V, Q = K + b * k_b + g * k_g, V + b * v_b + g * v_g, Q + b * q_b + head * q_h
    SK, SV = SK + own * N * D, SV + own * N * DV
    WK_, WV_ = WK_ + own * P * D, WV_ + own * P * DV
    MQ, MK, BIAS_Q, BIAS_K = MQ + head * D * f, MK + hs * D * f, BIAS_Q + head * f, BIAS_K + hs * f
    S, Z = S + i_h * HALVES * f * DV, Z + i_h * HALVES * f
    seen = tl.load(SEEN + b).to(tl.int32)
    q = load_rows(Q, rr, rd, rr < R, D, DP, q_h)
    k = tl.load(K + rd, mask=rd < D, other=0.0)
    v = tl.load(V + rv, mask=rv < DV, other=0.0)
    m, mass, acc = _exact(
        q, k, v, SK, SV, WK_, WV_, seen, scaling * LOG2E, D, DV, P, N, BN, BW, DP, VP, RP, PREC
    )
    if (seen < N) & (hs % (HS // G) == 0):
        tl.store(SK + seen * D + rd, k, mask=rd < D)
        tl.store(SV + seen * DV + rv, v, mask=rv < DV)

    # the state, tile by tile: read for R queries, then the key that leaves the window is added
    leaves = (seen - P >= N).to(tl.float32)
    LEAVING = WK_ if P > 0 else K
    leaving_v = tl.load((WV_ if P > 0 else V) + rv, mask=rv < DV, other=0.0).to(tl.float32)
    top, up, low, down = _normalisers(LEAVING, MK, BIAS_K, rd, D, f, BF, HALVES)
    num = tl.zeros([RP, VP], tl.float32)
    den = tl.zeros([RP], tl.float32)
    scale = tl.zeros([RP], tl.float32)
    for half in tl.static_range(HALVES):
        part, weight, total, best = _read_and_write(
            Q, q_h, MQ, BIAS_Q, LEAVING, leaving_v, leaves, MK, BIAS_K, low if half else top,
            down if half else up, S + half * f * DV, Z + half * f, K.dtype.element_ty, half, R, D,
            DV, f, DP, VP, RP, BF, HALVES, PREC_STATE,
        )  # fmt: skip
        if HALVES == 2:
            total = tl.where(rr < R, total, 1.0)
            num += part / total[:, None]
            den += weight / total
        else:
            num, den, scale = part, weight, tl.where(rr < R, best, 0.0)

    row = tl.where(rr < R, head + rr, 0)
    log_r = tl.load(BETA + row) + tl.load(ALPHA + row) * m / LOG2E - scale
    r = tl.exp(tl.where(seen - P > N, tl.minimum(tl.maximum(log_r, LOWEST), HIGHEST), 0.0))
    out = (acc * r[:, None] + num) / (mass * r + den)[:, None]
    store_rows(OUT + (b * H + head) * DV, out, rr, rv, rr < R, DV, VP, DV)
    if HS == G and P > 0:
        _shift(WK_, K, P, D, DP, BW)
        _shift(WV_, V, P, DV, VP, BW)


def step(
    q, k, v, map_q, bias_q, map_k, bias_k, beta, alpha, S, z, sink_k, sink_v, window_k, window_v,
    seen, *, scaling, precision, precision_state,
):  # fmt: skip
    """o [B, H, 1, Dv]; all of the state but seen advances in place. See `operators.hybrid_step`."""
    (B, H, _, D), (G, _, DV), HS, f = q.shape, v.shape[1:], S.shape[1], map_k.shape[-1]
    N, P = sink_k.shape[2], window_k.shape[2]
    o = torch.empty(B, H, 1, DV, dtype=v.dtype, device=v.device)
    config = choose("step", v, F=f, DV=DV, D=D, N=N)
    meta = dict(config.meta, BW=min(config.meta["BW"], padded(P)))
    meta.pop("FP")
    strides = (x for tensor in (q, k, v) for x in tensor.stride()[:2])
    hedgehog = bias_q is None
    if hedgehog:
        bias_q = bias_k = beta  # not read
    step_forward[(B * HS,)](
        q, k, v, map_q, bias_q, map_k, bias_k, beta, alpha, S, z, sink_k, sink_v, window_k,
        window_v, seen, o, *strides, scaling, H=H, G=G, HS=HS, D=D, DV=DV, f=f, P=P, N=N,
        RP=padded(H // HS), HALVES=2 if hedgehog else 1, PREC=precision,
        PREC_STATE=precision_state, **meta,
    )  # fmt: skip
    if HS != G and P:
        shift_windows[(B * G,)](
            k, v, window_k, window_v, *k.stride()[:2], *v.stride()[:2], G=G, D=D, DV=DV, P=P,
            DP=meta["DP"], VP=meta["VP"], BW=meta["BW"],
        )  # fmt: skip
    return o
