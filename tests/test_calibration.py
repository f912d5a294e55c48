"""Start values of the mixing rule: what a perfect map must not change, and what others gain."""

import math

import pytest
import torch

from linearize.calibration import Masses, fit_mixing, log_masses, mixing_change
from linearize.modeling.attention import linearized_modules
from linearize.queries import eligible
from linearize.transfer import TransferObjective, draw_queries
from tests.definition import make_case
from tests.test_transfer import LONG, MIXED, linearized, measure, objective_for

UNCHANGED = 1e-4  # |change of beta or alpha| that counts as none, from fp32 weights


def masses_of(case, sink_logit=None, queries=8):
    """`Masses` of the last queries of a case."""
    T = case.q.shape[2]
    index = torch.arange(T - queries, T).expand(len(case.q), -1)
    inputs = dict(scaling=case.op.scaling, softcap=case.op.softcap)
    ones = torch.ones(index.shape)
    return log_masses(case.heads, *case.qkv, index, ones, sink_logit=sink_logit, **inputs)


def odds_of(masses, heads, beta, alpha):
    """Log odds of the linear part under other beta and alpha."""
    change = (beta - heads.beta) + 0.0 * alpha
    return masses.odds - change[:, None] - (alpha - heads.alpha)[:, None] * masses.top


@pytest.mark.parametrize("sink_logit", [False, True], ids=["", "sink-logit"])
def test_masses_follow_beta_and_alpha_as_the_module_says(sink_logit):
    """The operator itself, with other beta and alpha, has the predicted share of linear weight."""
    case = make_case("hedgehog_exp", tokens=21, sink_logit=sink_logit)
    masses = masses_of(case, case.op.sink_logit)
    beta, alpha = torch.full((4,), 0.7).double(), torch.full((4,), -0.4).double()
    predicted = torch.sigmoid(odds_of(masses, case.heads, beta, alpha))
    with torch.no_grad():
        case.heads.beta.copy_(beta)
        case.heads.alpha.copy_(alpha)
        index = torch.arange(13, 21).expand(2, -1)
        rows = case.heads(
            *case.qkv, queries=index, weights=True, scaling=case.op.scaling,
            sink_logit=case.op.sink_logit,
        )  # fmt: skip
    found = rows.linear_mass.transpose(0, 1).flatten(1)
    assert torch.allclose(predicted, found, rtol=0, atol=1e-9)
    assert found.std() > 1e-3


def test_the_share_is_that_of_the_teacher():
    case = make_case(tokens=21, window=4, sinks=2)
    masses = masses_of(case)
    q, k = case.q[0, 3, 20], case.k[0, 1]
    weights = (case.op.scaling * k @ q).softmax(0)
    assert masses.share[3, 7] == pytest.approx(weights[2:17].sum().item(), rel=1e-9)
    exact = (case.op.scaling * k @ q)[[0, 1, 17, 18, 19, 20]]
    assert masses.top[3, 7] == pytest.approx(exact.max().item(), rel=1e-9)


@pytest.mark.parametrize("slope", [False, True], ids=["beta", "beta_alpha"])
def test_the_mean_share_becomes_that_of_the_teacher(slope):
    """Far from it at the start; and no other beta, alpha gives a lower divergence."""
    generator = torch.Generator().manual_seed(0)
    share, noise = torch.rand(2, 5, 300, generator=generator, dtype=torch.float64)
    top = 3 + torch.randn(5, 300, generator=generator, dtype=torch.float64)
    odds = torch.logit(share) + 40 - 1.5 * top + noise
    weight = torch.rand(5, 300, generator=generator, dtype=torch.float64) + 0.5
    masses = Masses(share, top, odds, weight)
    beta, alpha = mixing_change(masses, slope=slope)
    assert bool(alpha.any()) == slope

    def divergence(beta, alpha):
        mu = torch.sigmoid(odds - beta[:, None] - alpha[:, None] * top)
        kl = share * (share / mu).log() + (1 - share) * ((1 - share) / (1 - mu)).log()
        return (kl * weight).sum(1)

    after = torch.sigmoid(odds - beta[:, None] - alpha[:, None] * top)
    means = [(x * weight).sum(1) / weight.sum(1) for x in (after, share)]
    assert torch.allclose(*means, rtol=0, atol=1e-6)
    best = divergence(beta, alpha)
    for step in (-0.01, 0.01):
        assert (divergence(beta + step, alpha) > best).all()
        assert not slope or (divergence(beta, alpha + step) > best).all()
    if slope:
        assert torch.allclose(alpha, torch.full_like(alpha, -1.5), atol=0.2)


def test_queries_of_weight_zero_and_rows_without_features_say_nothing():
    share = torch.full((1, 4), 0.5).double()
    odds = torch.tensor([[2.0, 2.0, 9.0, -1e30]]).double()
    masses = Masses(share, torch.zeros_like(share), odds, torch.tensor([[1.0, 1, 0, 0]]).double())
    beta, _ = mixing_change(masses, slope=False)
    assert beta.item() == pytest.approx(2, abs=1e-5)
    case = make_case("relu", tokens=21)
    with torch.no_grad():
        case.k.copy_(-case.k.abs())  # relu gives zero everywhere
    assert masses_of(case).weight.eq(0).all()


def test_lolcats_has_a_gate_below_one():
    case = make_case(mixing="lolcats", tokens=21)
    masses = masses_of(case)
    for wanted, shift in ((None, 0.0), (0.99, 50.0)):
        fit_mixing(
            case.heads, [replace_odds(masses, shift)], range(case.heads.num_kv_heads), slope=False
        )
        gate = torch.sigmoid(case.heads.gate.double())
        if wanted:
            assert torch.allclose(gate, torch.full_like(gate, wanted), atol=1e-6)
        else:
            means = [masses_of(case).share.mean(1), torch.sigmoid(masses_of(case).odds).mean(1)]
            low = gate < 0.989  # where the gate's limit is not reached
            assert low.any() and torch.allclose(means[0][low], means[1][low], atol=1e-5)


def replace_odds(masses, shift):
    return masses._replace(odds=masses.odds + shift)


# ------------------------------------------------------------------------------ in the stage
@pytest.mark.parametrize("mixing", ["calibrated", "kernel"])
@pytest.mark.parametrize("data", [LONG, MIXED], ids=["one-document", "packed"])
def test_a_map_that_estimates_exp_exactly_keeps_its_start(mixing, data):
    """A centroid for every key gives exp(score): beta = 0 and alpha = 1 are right already."""
    start = "beta_alpha" if mixing == "calibrated" else "beta"
    model = linearized(window=4, sinks=1, feature_map="centroids", feature_dim=512, mixing=mixing)
    for module in linearized_modules(model).values():
        with torch.no_grad():
            module.linearized.beta.zero_()
            if mixing == "calibrated":
                module.linearized.alpha.fill_(1)
    objective_for(model, data, mixing_start=start)
    for module in linearized_modules(model).values():
        assert module.linearized.beta.abs().max() < UNCHANGED
        if mixing == "calibrated":
            assert (module.linearized.alpha - 1).abs().max() < UNCHANGED


@pytest.mark.parametrize(
    ("mixing", "feature_map"), [("calibrated", "hedgehog"), ("kernel", "hedgehog_exp")]
)
def test_the_student_starts_with_the_teachers_mass(mixing, feature_map):
    found = []
    for start in ("fixed", "beta"):
        model = linearized(window=4, sinks=1, feature_map=feature_map, mixing=mixing)
        objective = objective_for(model, MIXED, mixing_start=start, loss="attention")
        found.append(measure(objective, model, MIXED.batch())[1])
        gaps = mass_gaps(objective, model)
    assert max(gaps) < 1e-4
    assert all(found[1][layer] < found[0][layer] for layer in found[0])


def mass_gaps(objective: TransferObjective, model):
    """|mean share of the student - that of the teacher| per layer and head, over all queries."""
    gaps = []
    batch = MIXED.batch()
    queries, weight = draw_queries(eligible(batch, objective.exact), None, torch.Generator())

    def observe(module, q, k, v, out, *, attention_mask, **inputs):
        masses = log_masses(module.linearized, q, k, v, queries, weight, **inputs)
        total = masses.weight.sum(1)
        gap = ((torch.sigmoid(masses.odds) - masses.share) * masses.weight).sum(1) / total
        gaps.extend(gap.abs().tolist())

    objective._forward(model, batch, observe)
    assert math.isfinite(max(gaps))
    return gaps
