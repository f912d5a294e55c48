"""The hybrid operator written a second time, straight from its formula: one row at a time.

Shares no code with `linearize.modeling.ops`, so that the two can be compared. Legend as there.
Also the random operators that several test files use.
"""

import math
from dataclasses import dataclass, replace

import torch

from linearize.modeling.attention import LinearizedHeads
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.modeling.ops import Hybrid, empty_state

# size of each map's projection in the tests: D = 6, Dv = 5 and F differ where they can
FEATURE_DIMS = {
    "hedgehog": 4, "hedgehog_exp": 4, "hedgehog_norm": 4, "t2r": 7, "elu1": None, "relu": None,
    "taylor": 3, "favor": 9, "centroids": 7,
}  # fmt: skip
LOG_SPACE = ("hedgehog_exp", "favor")  # of keys and queries
ALWAYS_POSITIVE = (
    "hedgehog",
    "hedgehog_exp",
    "hedgehog_norm",
    "elu1",
    "taylor",
    "favor",
    "centroids",
)


def plain_features(name, module, head, x):
    """phi(x) [T, F] of one head, x [T, D], as the papers write it, no logs, no merged terms."""
    if name == "elu1":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    if name == "relu":
        return x.clamp(min=0)
    if name == "favor":
        y = x * math.sqrt(module.scaling)
        omega = module.omega.to(x.dtype)
        return torch.exp(y @ omega.T - (y * y).sum(1, keepdim=True) / 2) / math.sqrt(omega.shape[0])
    weight = module.weight[head]
    if name in ("hedgehog", "hedgehog_norm"):
        z = x @ weight
        halves = [
            z.exp() / z.exp().sum(1, keepdim=True),
            (-z).exp() / (-z).exp().sum(1, keepdim=True),
        ]
        features = torch.cat(halves, 1)
        if name == "hedgehog":
            return features
        return features * ((x * x).sum(1) / (features * features).sum(1)).sqrt()[:, None]
    if name == "taylor":
        y = math.sqrt(module.scaling) * (x @ weight)
        outer = (y[:, :, None] * y[:, None, :]).flatten(1)
        return torch.cat([torch.ones_like(y[:, :1]), y, outer / math.sqrt(2)], 1)
    z = x @ weight + module.bias[head]
    if name == "centroids":
        e = z.exp()
        return e if module.log_space else e / e.sum(1, keepdim=True)
    return z.clamp(min=0) if name == "t2r" else torch.cat([z.exp(), (-z).exp()], 1)


def row_weights(heads, head, exact_scores, similarities, sink_logit=None):
    """Unnormalised weights of one row: exact, linear, and of the extra key that has no value."""
    extra = exact_scores.new_zeros(0) if sink_logit is None else sink_logit[head : head + 1]
    scores = torch.cat([exact_scores, extra])
    top = scores.max() if len(scores) else None
    if heads.mixing == "kernel":
        exact, linear = scores.exp(), torch.exp(-heads.beta[head]) * similarities
    else:
        if heads.mixing == "lolcats":
            factor = torch.sigmoid(heads.gate[head])
        else:
            factor = torch.exp(heads.beta[head] + heads.alpha[head] * top) if len(scores) else None
        exact = factor * torch.exp(scores - top) if len(scores) else scores
        linear = similarities
    return exact[: len(exact_scores)], linear, exact[len(exact_scores) :]


def visible_keys(t, valid, documents, window, sinks, kind="sliding"):
    """(exact, linear): lists of the keys that query t of one row sees."""
    seen = [s for s in range(t + 1) if valid[s] and documents[s] == documents[t]]
    newest = len(seen) - 1
    first = newest - window + 1
    if kind == "terrace" and window:  # the query's own block, and the one before
        first = (newest // window - 1) * window
    exact = [s for position, s in enumerate(seen) if position >= first or position < sinks]
    return exact, [s for s in seen if s not in exact]


def define(case, q, k, v, *, valid=None, documents=None):
    """Outputs [B, H, T, Dv] and weights [B, H, T, T] of the operator; rows of padding are zero."""
    (B, H, T, _), G, heads, op = q.shape, k.shape[1], case.heads, case.op
    valid = [[True] * T] * B if valid is None else valid.tolist()
    documents = [[0] * T] * B if documents is None else documents.tolist()
    weights = []
    for b in range(B):
        for h in range(H):
            g, state_head = h * G // H, h * heads.state_heads // H
            phi_q = plain_features(case.feature_map, heads.feature_map_q, h, q[b, h])
            phi_k = plain_features(case.feature_map, heads.feature_map_k, state_head, k[b, g])
            for t in range(T):
                row = q.new_zeros(T)
                weights.append(row)
                if not valid[b][t]:
                    continue
                exact, linear = visible_keys(
                    t, valid[b], documents[b], op.window, op.sinks, op.window_kind
                )
                linear = linear if op.linear else []
                scores = k[b, g, exact] @ q[b, h, t] * op.scaling
                if op.softcap is not None:
                    scores = op.softcap * torch.tanh(scores / op.softcap)
                a, c, extra = row_weights(heads, h, scores, phi_k[linear] @ phi_q[t], op.sink_logit)
                total = a.sum() + c.sum() + extra.sum()
                if total > 0:
                    index = torch.tensor(exact + linear)
                    weights[-1] = row.index_put((index,), torch.cat([a, c]) / total)
    weights = torch.stack(weights).view(B, H, T, T)
    return weights @ v.repeat_interleave(H // G, 1), weights


@dataclass
class Case:
    """A random operator with inputs."""

    feature_map: str
    heads: LinearizedHeads
    op: Hybrid
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def qkv(self):
        return self.q, self.k, self.v

    @property
    def leaves(self):
        """All that has a gradient, by name."""
        named = {n: p for n, p in self.heads.named_parameters() if p.requires_grad}
        extra = {} if self.op.sink_logit is None else {"sink_logit": self.op.sink_logit}
        return {"q": self.q, "k": self.k, "v": self.v, **named, **extra}

    def gradients(self, out, direction=None):
        """d(out . direction), by name of the leaf; random direction by default."""
        if direction is None:
            direction = torch.randn(
                out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
            )
        grads = torch.autograd.grad(
            (out * direction.to(out.dtype)).sum(),
            list(self.leaves.values()),
            allow_unused=True,
            retain_graph=True,
        )
        return {
            n: torch.zeros_like(x) if g is None else g
            for (n, x), g in zip(self.leaves.items(), grads)
        }


def make_case(
    feature_map="hedgehog", mixing="calibrated", *, tokens=13, window=4, sinks=2, batch=2, heads=4,
    kv_heads=2, k_map="kv_head", dim=6, v_dim=5, dtype=torch.float64, seed=0, size=1.0, linear=True,
    softcap=None, sink_logit=False, feature_dim=None, window_kind="sliding",
):  # fmt: skip
    """A Case with random weights in every map and mixing parameter."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shape = {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "qk_dim": dim,
        "v_dim": v_dim,
        "scaling": dim**-0.5,
    }
    section = LinearizeConfig(
        base_model_type="llama", layers=[0], geometry={"0": shape}, window=max(window, 1),
        sinks=sinks, feature_map=feature_map,
        feature_dim=feature_dim or FEATURE_DIMS[feature_map],
        mixing=mixing, k_map=k_map, seed=seed, window_kind=window_kind,
    )  # fmt: skip
    module = LinearizedHeads(section, 0)
    module.reset_parameters()
    wide = torch.promote_types(dtype, torch.float32)
    module.to(wide)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * normal(*parameter.shape).to(parameter.dtype)
    extra = normal(heads).to(wide).requires_grad_() if sink_logit else None
    op = module.operator(scaling=dim**-0.5, softcap=softcap, sink_logit=extra, linear=linear)
    q, k, v = (
        (size * normal(batch, n, tokens, d)).to(dtype).requires_grad_()
        for n, d in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim))
    )
    return Case(feature_map, module, replace(op, window=window), q, k, v)


def distance(a, b):
    """max |a - b| / max(1, max |b|); infinite where a or b is not finite."""
    a, b = a.detach().double(), b.detach().double()
    assert a.shape == b.shape, (a.shape, b.shape)
    if not a.numel():
        return 0.0
    gap = ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
    return gap if math.isfinite(gap) else math.inf


def start_of(case, rows=slice(None)):
    """The empty state for a case, or for some rows of its batch."""
    q, k, v = (x[rows] for x in case.qkv)
    return empty_state(case.op, q, k, v, case.heads.feature_map_k.num_features)
