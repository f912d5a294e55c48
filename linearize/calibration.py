"""Start values of the mixing rule from the teacher's weights, before any training.

Legend: B batch, H query heads, G key/value heads, T tokens, Q queries, D head size, Dv value size,
    n queries of all rows.

For a query t let mu_T be the share of the teacher's weight that lies outside window and sinks, and
mu_S the student's. The divergence of a row's weights from the teacher's is

    KL(teacher || student) = KL(mu_T || mu_S) + mu_T KL(their shapes outside the window)

and the mixing rule acts on the first term alone: logit mu_S falls by one for each unit of
beta + alpha m_t. So beta and alpha are the intercept and the slope of a logistic regression of
mu_T, which is convex; at its minimum the mean of mu_S is that of mu_T.
"""

import math
from typing import NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from linearize.losses import teacher_scores
from linearize.modeling.ops import EMPTY, masks

LARGEST_GATE = math.log(0.99)  # LoLCATs' gate is a sigmoid


class Masses(NamedTuple):
    """What the mixing rule of one layer sees of n queries; fp64."""

    share: torch.Tensor  # [H, n] of the teacher's weight, outside window and sinks
    top: torch.Tensor  # [H, n] m_t, the largest exact score
    odds: torch.Tensor  # [H, n] log odds of the student's linear part
    weight: torch.Tensor  # [H, n] what the query counts; 0 where no mixing gives it linear weight


@torch.no_grad()
def log_masses(linearized, q, k, v, queries, weight, *, sink_logit=None, heads=None, **inputs):
    """`Masses` of a layer's `linearized` module on the rows `queries` [B, Q], which count `weight`
    [B, Q].

    q [B, H, T, D]; k [B, G, T, D]; v [B, G, T, Dv], all of the key/value heads `heads`, None for
    every head; sink_logit and inputs as in `losses.teacher_log_weights`.
    """
    B, T = q.shape[0], q.shape[2]
    valid = inputs.get("valid")
    valid = torch.ones(B, T, dtype=torch.bool, device=q.device) if valid is None else valid
    exact, linear = (
        mask[:, None]
        for mask in masks(
            valid,
            inputs.get("documents"),
            linearized.window,
            linearized.sinks,
            queries,
            linearized.window_kind,
        )
    )

    def mass(log_weights, mask, extra=None):
        total = log_weights.double().masked_fill(~mask, EMPTY).logsumexp(-1)
        return total if extra is None else torch.logaddexp(total, extra.double())

    scores = teacher_scores(q, k, queries, **inputs)  # [B, H, Q, T]
    options = dict(queries=queries, weights=True, sink_logit=sink_logit, heads=heads)
    rows = linearized(q, k, v, **options, **inputs)
    top, at = scores.masked_fill(~exact, EMPTY).max(-1)
    extra = student_extra = None
    if sink_logit is not None:  # one more exact key
        extra = sink_logit.to(scores.dtype)[:, None].expand_as(top)
        student_extra = rows.log_weights.gather(-1, at[..., None])[..., 0] + extra - top
        top = torch.maximum(top, extra)
    odds = mass(rows.log_weights, linear) - mass(rows.log_weights, exact, student_extra)
    share = torch.sigmoid(mass(scores, linear) - mass(scores, exact, extra))
    weight = weight[:, None].double() * (odds > EMPTY / 10)
    found = (share, top.double(), odds, weight)
    return Masses(*(x.transpose(0, 1).flatten(1) for x in found))


@torch.no_grad()
def fit_mixing(linearized, parts, heads, *, slope):
    """Sets beta of the key/value heads `heads` of a layer, and with `slope` alpha, to what fits
    their `Masses` in `parts` best.
    """
    masses = Masses(*(torch.cat(x, 1) for x in zip(*parts)))
    group = linearized.num_heads // linearized.num_kv_heads
    own = [g * group + r for g in heads for r in range(group)]  # their query heads
    beta, alpha = mixing_change(masses, slope=slope)
    if linearized.mixing == "lolcats":
        log_gate = torch.nn.functional.logsigmoid(linearized.gate[own].double()) + beta
        log_gate = log_gate.clamp(max=LARGEST_GATE)
        gate = log_gate - torch.log(-torch.expm1(log_gate))
        linearized.gate[own] = gate.to(linearized.gate.dtype)
        return
    linearized.beta[own] += beta
    if slope:
        linearized.alpha[own] += alpha


def mixing_change(masses, *, slope):
    """(change of beta, change of alpha) [H] that minimises the sum of weight KL(mu_T || mu_S)."""
    total = masses.weight.sum(1, keepdim=True).clamp(min=1e-300)
    center = (masses.weight * masses.top).sum(1, keepdim=True) / total
    spread = (masses.weight * (masses.top - center).square()).sum(1, keepdim=True) / total
    spread = spread.sqrt().clamp(min=1e-6)
    height = (masses.top - center) / spread
    change = torch.zeros(len(center), 2 if slope else 1, dtype=torch.float64, device=center.device)
    change.requires_grad_()
    weight = masses.weight / total

    def fall():
        steps = change[:, :1] + (change[:, 1:] * height if slope else 0.0)
        return binary_cross_entropy_with_logits(
            masses.odds - steps, masses.share, weight, reduction="sum"
        )

    optimizer = torch.optim.LBFGS(
        [change], max_iter=200, tolerance_grad=1e-9, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = fall()
            loss.backward()
        return loss

    optimizer.step(closure)
    change = change.detach()
    if not slope:
        return change[:, 0], torch.zeros_like(change[:, 0])
    alpha = change[:, 1] / spread[:, 0]
    return change[:, 0] - alpha * center[:, 0], alpha
