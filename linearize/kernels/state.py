"""Prefix states per chunk, forward, and their gradients, backward.

Legend: B batch, H query heads, G key/value heads, HS state heads, T tokens, L = P + T keys, P = W -
1 earlier keys, Dv value size, F features, C chunk, n chunks, N sinks. Chunk c holds the keys c C to
c C + C - 1 of the axis of L; those from T on are still in the window when the call ends. Key i has
position seen - P + i and counts from position N on: sinks are never part of the state.
"""

import torch
import triton
import triton.language as tl

from .configs import choose
from .tiles import load_columns, load_rows


@triton.jit
def state_forward(
    FK, V, S0, Z0, SEEN, HS_, HZ, S1, Z1, T, L, chunks,
    G: tl.constexpr, HS: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, FP: tl.constexpr,
    VP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # Grid (VP / BV, FP / BF, B HS). One pass over the chunks; the prefix is stored before each.
    i_v, i_f, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, hs = i_h // HS, i_h % HS
    FK += i_h * T * F
    V += (b * G + hs // (HS // G)) * L * DV
    rc = tl.arange(0, C)
    rf, rv = i_f * BF + tl.arange(0, BF), i_v * BV + tl.arange(0, BV)
    low = (N + P - tl.load(SEEN + b)).to(tl.int32)  # the first key that counts
    there = (rf < F)[:, None] & (rv < DV)[None, :]
    at = rf[:, None] * DV + rv[None, :]
    S = tl.load(S0 + i_h * F * DV + at, mask=there, other=0.0)
    z = tl.load(Z0 + i_h * F + rf, mask=rf < F, other=0.0)
    for c in range(chunks):
        base = (i_h * chunks + c) * F
        tl.store(HS_ + base * DV + at, S.to(HS_.dtype.element_ty), mask=there)
        if i_v == 0:
            tl.store(HZ + base + rf, z, mask=rf < F)
        i = c * C + rc
        counts = (i >= low) & (i < T)
        f = load_columns(FK, i, rf, counts, F, FP, F)  # [BF, C]
        v = load_rows(V, i, rv, counts, DV, VP, DV)
        z += tl.sum(f.to(tl.float32), 1)
        S = tl.dot(f, v, S, input_precision=PREC)
    tl.store(S1 + i_h * F * DV + at, S, mask=there)
    if i_v == 0:
        tl.store(Z1 + i_h * F + rf, z, mask=rf < F)


@triton.jit
def state_backward(
    FQ, DO, DELTA, DEN, DS1, DZ1, DH, DHZ, DS0, DZ0, o_b, o_h, o_t, T, chunks,
    H: tl.constexpr, HS: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr, FP: tl.constexpr, VP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # Grid (VP / BV, FP / BF, B HS). From the last chunk to the first; stored before the chunk, so
    # that chunk c gets what later queries read of it.
    i_v, i_f, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    R: tl.constexpr = H // HS
    b, hs = i_h // HS, i_h % HS
    rc = tl.arange(0, C)
    rf, rv = i_f * BF + tl.arange(0, BF), i_v * BV + tl.arange(0, BV)
    there = (rf < F)[:, None] & (rv < DV)[None, :]
    at = rf[:, None] * DV + rv[None, :]
    S = tl.load(DS1 + i_h * F * DV + at, mask=there, other=0.0)
    z = tl.load(DZ1 + i_h * F + rf, mask=rf < F, other=0.0)
    narrow = DH.dtype.element_ty
    for step in range(chunks):
        c = chunks - 1 - step
        base = (i_h * chunks + c) * F
        tl.store(DH + base * DV + at, S.to(narrow), mask=there)
        if i_v == 0:
            tl.store(DHZ + base + rf, z, mask=rf < F)
        t = c * C + rc
        for r in range(R):
            head = b * H + hs * R + r
            inverse = 1.0 / tl.load(DEN + head * T + t, mask=t < T, other=1.0)
            delta = tl.load(DELTA + head * T + t, mask=t < T, other=0.0)
            fq = load_columns(FQ + head * T * F, t, rf, t < T, F, FP, F)  # [BF, C]
            do = load_rows(DO + b * o_b + (hs * R + r) * o_h, t, rv, t < T, DV, VP, o_t)
            do = (do.to(tl.float32) * inverse[:, None]).to(narrow)
            z -= tl.sum(fq.to(tl.float32) * (delta * inverse)[None, :], 1)
            S = tl.dot(fq.to(narrow), do, S, input_precision=PREC)
    tl.store(DS0 + i_h * F * DV + at, S, mask=there)
    if i_v == 0:
        tl.store(DZ0 + i_h * F + rf, z, mask=rf < F)


def _prefixes(B, HS, chunks, F, DV, like):
    """Empty prefixes (h [B, HS, n, F, Dv], hz [B, HS, n, F] fp32); h is bf16 for 16-bit inputs,
    since sums of values overflow fp16.
    """
    dtype = torch.float32 if like.dtype == torch.float32 else torch.bfloat16
    return (
        torch.empty(B, HS, chunks, F, DV, dtype=dtype, device=like.device),
        torch.empty(B, HS, chunks, F, dtype=torch.float32, device=like.device),
    )


def prefixes(fk, v, S, z, seen, *, window, sinks, chunk, precision):
    """(h, hz, S, z): the state before each chunk, and after all.

    fk [B, HS, T, F]; v [B, G, P + T, Dv]; S [B, HS, F, Dv], z [B, HS, F] fp32; seen [B] int64.
    """
    (B, HS, T, F), (G, L, DV) = fk.shape, v.shape[1:]
    chunks = triton.cdiv(T, chunk)
    h, hz = _prefixes(B, HS, chunks, F, DV, v)
    S1, z1 = torch.empty_like(S), torch.empty_like(z)
    config = choose("state", v, F=F, DV=DV)
    grid = (config.VP // config.BV, config.FP // config.BF, B * HS)
    state_forward[grid](
        fk, v, S, z, seen, h, hz, S1, z1, T, L, chunks, G=G, HS=HS, DV=DV, F=F, C=chunk,
        P=window - 1, N=sinks, PREC=precision, **config.meta,
    )  # fmt: skip
    return h, hz, S1, z1


def prefix_gradients(fq, do, delta, den, dS, dz, *, state_heads, chunk, precision):
    """(dh, dhz, dS0, dz0): the gradient of the sums that hold each chunk's keys, and of the first
    state.

    fq [B, H, T, F]; do [B, H, T, Dv]; delta, den [B, H, T] fp32; dS, dz the last state's gradient.
    """
    (B, H, T, F), DV = fq.shape, do.shape[-1]
    chunks = triton.cdiv(T, chunk)
    dh, dhz = _prefixes(B, state_heads, chunks, F, DV, fq)
    dS0, dz0 = torch.empty_like(dS), torch.empty_like(dz)
    config = choose("state", fq, F=F, DV=DV)
    grid = (config.VP // config.BV, config.FP // config.BF, B * state_heads)
    state_backward[grid](
        fq, do, delta, den, dS, dz, dh, dhz, dS0, dz0, *do.stride()[:3], T, chunks, H=H,
        HS=state_heads, DV=DV, F=F, C=chunk, PREC=precision, **config.meta,
    )  # fmt: skip
    return dh, dhz, dS0, dz0
