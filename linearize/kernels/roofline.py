"""Bytes and FLOPs of the kernels, on paper: what a GPU could do at best.

Legend: B batch, H query heads, G key/value heads, HS state heads, T tokens, D head size, Dv value
size, F features, C chunk, W window, N sinks. Bytes count each tensor once per kernel that reads or
writes it, as if caches were perfect; FLOPs count the products of whole tiles, masked halves
included. Sizes that are padded inside tiles are rounded up.
"""

from dataclasses import dataclass

from .configs import CHUNK, padded

# peak memory bytes/s and dense bf16 FLOP/s of the vendor's data sheets (SXM boards)
DEVICES = {
    "A100": (2.039e12, 312e12),
    "H100": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
}


@dataclass(frozen=True)
class Shape:
    """One attention layer; item is the bytes of an element of the model's dtype."""

    B: int
    H: int
    G: int
    HS: int
    T: int
    D: int
    Dv: int
    F: int
    W: int = 64
    N: int = 4
    C: int = CHUNK
    item: int = 2

    @property
    def chunks(self):
        return -(-self.T // self.C)

    @property
    def keys(self):
        return self.T + self.W - 1


def prefill(s):
    """{kernel: (bytes, FLOPs)} of a layer's prefill, without the feature maps."""
    DP, VP = padded(s.D), padded(s.Dv)
    keys = s.B * s.G * (s.keys + s.N) * (s.D + s.Dv) * s.item
    features_k = s.B * s.HS * s.T * s.F * s.item
    prefixes = s.B * s.HS * s.chunks * s.F * (s.Dv * s.item + 4)
    state = s.B * s.HS * s.F * (s.Dv + 1) * 4
    rows = s.B * s.H * s.T * (s.D + s.Dv + s.F) * s.item  # q, o, features of q
    values = s.B * s.G * s.keys * s.Dv * s.item
    tiles = -(-(s.W - 1 + s.C) // s.C)
    exact = (tiles * s.C + (padded(s.N) if s.N else 0)) * (DP + VP)
    linear = s.F * VP + s.C * (s.F + VP)
    programs = s.B * s.H * s.chunks
    return {
        "state": (
            features_k + values + prefixes + 2 * state,
            2 * s.B * s.HS * s.chunks * s.C * s.F * VP,
        ),
        "out": (
            keys + features_k + prefixes + rows,
            2 * programs * s.C * (exact + linear),
        ),
    }


def step_bytes(s, *, map_bytes=0):
    """Bytes of one decoded token of a layer: the state is read and written, so is the window.

    map_bytes are those of the feature maps' weights, which all rows of the batch share.
    """
    state = s.HS * s.F * (s.Dv + 1) * 4
    window = s.G * (s.W - 1) * (s.D + s.Dv) * s.item
    sinks = s.G * s.N * (s.D + s.Dv) * s.item
    token = (s.H + s.G) * (s.D + s.Dv) * s.item
    return s.B * (2 * state + 2 * window + sinks + token) + map_bytes


def softmax_step_bytes(s):
    """Bytes of one decoded token of softmax attention with T tokens of cache."""
    return s.B * s.T * s.G * (s.D + s.Dv) * s.item


def break_even_tokens(s):
    """The context from which a step moves fewer bytes than softmax attention's; batch of one."""
    alone = Shape(**{**s.__dict__, "B": 1})
    return -(-step_bytes(alone) // (s.G * (s.D + s.Dv) * s.item))


def softmax_prefill_flops(s):
    """FLOPs of causal softmax attention, without its masked half."""
    return s.B * s.H * s.T * s.T * (s.D + s.Dv)


def seconds(work, device):
    """The least time of {kernel: (bytes, FLOPs)} on a device of `DEVICES`, kernel after kernel."""
    bandwidth, peak = DEVICES[device]
    return sum(max(b / bandwidth, f / peak) for b, f in work.values())
