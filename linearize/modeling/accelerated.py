"""Where the operator meets the GPU kernels: they live in the package, not in the checkpoint.

Legend as in `ops`. A checkpoint's code is right without `linearize`, and faster where it is
installed and there is a GPU. LINEARIZE_KERNELS chooses, see `linearize.kernels`.
"""

import torch
from torch import nn

from .ops import State, row_scaled, state_heads_of, update_sinks

try:
    from linearize import kernels
except ImportError:
    kernels = None


def find_kernel(op, q, k, v, state, valid):
    """The function that does these tokens on a GPU, or None."""
    if kernels is None:
        return None
    return kernels.find(
        q, k, v, window=op.window, sinks=op.sinks, features=state.z.shape[-1], log_k=op.log_k,
        softcap=op.softcap, sink_logit=op.sink_logit, linear=op.linear, terraced=op.terraced,
        padded=valid is not None,
    )  # fmt: skip


def run_kernel(kernel, op, q, k, v, state):
    """(o [B, H, T, Dv], state) of the tokens q, k, v after a state, without padding."""
    T = q.shape[2]
    keys, values = (
        torch.cat([state.window_k, k], 2),
        torch.cat([state.window_v, v], 2),
    )  # [B, G, P + T, .]
    start = (state.seen - op.past)[:, None]
    sinks = update_sinks(state, keys, values, start, start.clamp(min=0))
    fq, scale = row_scaled(op, op.phi_q(q))
    out, S, z = kernel(
        q, keys, values, *sinks, fq, op.phi_k(state_heads_of(op, keys[:, :, :T])),
        scale.squeeze(-1) if op.log_q else None, op.beta, op.alpha, state.S, state.z, state.seen,
        window=op.window, scaling=op.scaling,
    )  # fmt: skip
    window = keys[:, :, T:], values[:, :, T:]
    return out, State(S, z, state.shift, *sinks, *window, state.seen + T)


def step_in_place(op, q, k, v, state):
    """o [B, H, 1, Dv] of one token, with `state` advanced in place; or None, and nothing done."""
    if kernels is None:
        return None
    whole = isinstance(op.phi_k, nn.Module)  # a function where some heads stay softmax
    step = kernels.find_step(
        q, k, v, state, feature_map=op.phi_k.step_kernel if whole else None, window=op.window,
        sinks=op.sinks, softcap=op.softcap, sink_logit=op.sink_logit, linear=op.linear,
        terraced=op.terraced,
    )  # fmt: skip
    if step is None:
        return None
    maps = (op.phi_q.weight, op.phi_q.bias, op.phi_k.weight, op.phi_k.bias)
    return step(
        q, k, v, maps, op.beta, op.alpha, state.S, state.z, (state.sink_k, state.sink_v),
        (state.window_k, state.window_v), state.seen, scaling=op.scaling,
    )  # fmt: skip
