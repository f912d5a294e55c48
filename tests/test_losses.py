"""The losses against plain formulas: values, gradients, masks, chunks."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from linearize.losses import (
    attention_kl,
    logit_kl,
    output_energy,
    output_error,
    teacher_log_weights,
    token_losses,
    top_k_of,
    with_gradient,
)

TOLERANCE = 1e-5  # relative, fp32
EXACT = 1e-12  # float64


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ------------------------------------------------------------------------------ attention outputs
def test_output_error_is_the_weighted_sum_of_squares():
    student, teacher, weight = normal(2, 3, 5, 4), normal(2, 3, 5, 4, seed=1), normal(2, 5, seed=2)
    expected = sum(
        weight[b, i] * (student[b, :, i] - teacher[b, :, i]).square().sum()
        for b in range(2)
        for i in range(5)
    )
    assert torch.allclose(output_error(student, teacher, weight), expected, rtol=EXACT)


def test_output_energy_is_the_error_of_answering_zero():
    teacher, weight = normal(2, 3, 5, 4), normal(2, 5, seed=2).abs()
    error = output_error(torch.zeros_like(teacher), teacher, weight)
    assert torch.allclose(output_energy(teacher, weight), error, rtol=EXACT)


def test_output_error_of_bf16_outputs_is_fp32():
    student = normal(1, 1, 4, 4).bfloat16()
    error = output_error(student, torch.zeros_like(student), torch.ones(1, 4))
    assert error.dtype == torch.float32
    assert torch.allclose(error, student.float().square().sum(), rtol=TOLERANCE)


# ------------------------------------------------------------------------------ attention weights
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
def test_teacher_log_weights_are_causal_softmax_within_documents(softcap):
    q, k = normal(2, 4, 7, 3), normal(2, 2, 7, 3, seed=1)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0] * 7])
    queries = torch.tensor([[0, 2, 5], [6, 3, 1]])
    rows = teacher_log_weights(q, k, queries, scaling=0.7, softcap=softcap, documents=documents)
    for b in range(2):
        for h in range(4):
            for n, t in enumerate(queries[b].tolist()):
                seen = [s for s in range(t + 1) if documents[b, s] == documents[b, t]]
                scores = k[b, h // 2, seen] @ q[b, h, t] * 0.7
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                expected = torch.full((7,), -torch.inf, dtype=torch.float64)
                expected[seen] = scores.log_softmax(0)
                assert torch.allclose(rows[b, h, n], expected, rtol=0, atol=EXACT)


def test_teacher_log_weights_leave_padding_out():
    q, k, valid = normal(1, 2, 6, 3), normal(1, 2, 6, 3, seed=1), torch.ones(1, 6, dtype=torch.bool)
    valid[0, :2] = False
    queries = torch.tensor([[1, 4]])
    rows = teacher_log_weights(q, k, queries, scaling=1.0, valid=valid)
    assert rows[:, :, 0].eq(-torch.inf).all()  # a padded query
    alone = teacher_log_weights(q[:, :, 2:], k[:, :, 2:], torch.tensor([[2]]), scaling=1.0)
    assert torch.allclose(rows[:, :, 1:, 2:], alone, rtol=0, atol=EXACT)


def test_teacher_log_weights_count_a_sink_logit_in_the_normaliser():
    q, k, sink = normal(1, 2, 5, 3), normal(1, 2, 5, 3, seed=1), normal(2, seed=2)
    queries = torch.tensor([[4]])
    rows = teacher_log_weights(q, k, queries, scaling=1.0, sink_logit=sink)
    scores = torch.einsum("bhd,bhtd->bht", q[:, :, 4], k)
    expected = torch.cat([scores, sink.expand(1, -1)[..., None]], -1).softmax(-1)[..., :-1]
    assert torch.allclose(rows[:, :, 0].exp(), expected, rtol=0, atol=EXACT)


def test_attention_kl_is_zero_for_the_teacher_and_kl_divergence_otherwise():
    teacher, student = (normal(2, 3, 4, 6, seed=s).log_softmax(-1) for s in (0, 1))
    weight = normal(2, 4, seed=2).abs()
    assert attention_kl(teacher, teacher, weight).abs() < EXACT
    rows = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1).mean(1)
    assert torch.allclose(attention_kl(teacher, student, weight), (rows * weight).sum(), rtol=EXACT)


def test_attention_kl_ignores_keys_that_the_teacher_does_not_see():
    teacher = torch.tensor([0.5, 0.5, 0.0]).log().view(1, 1, 1, 3)
    student = torch.tensor([-1.0, -2.0, -1e30]).view(1, 1, 1, 3).requires_grad_()
    loss = attention_kl(teacher, student, torch.ones(1, 1))
    loss.backward()
    assert torch.allclose(loss, torch.tensor(0.5).log() + 1.5, atol=1e-6)
    assert student.grad[..., 2] == 0 and student.grad.isfinite().all()


def test_attention_kl_of_a_weight_of_zero_is_finite():
    teacher = torch.zeros(1, 1, 1, 1)
    loss = attention_kl(teacher, torch.full((1, 1, 1, 1), -1e30), torch.ones(1, 1))
    assert loss == 23


# ------------------------------------------------------------------------------ next-token logits
def head_case(targets=11, dim=6, vocab=13):
    """(student hidden, teacher hidden, targets, student head, teacher head) in float64."""
    weight = normal(vocab, dim, seed=3).requires_grad_()
    other = normal(vocab, dim, seed=4)
    ids = torch.randint(0, vocab, (targets,), generator=torch.Generator().manual_seed(5))
    student, teacher = normal(targets, dim).requires_grad_(), normal(targets, dim, seed=1)
    return student, teacher, ids, weight, lambda h: 3 * torch.tanh(h @ other.T / 3)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.3, 0.7)], ids=["ce", "kl", "mix"])
def test_token_losses_and_gradients_equal_the_unsliced_formula(chunk, weights):
    student, teacher, ids, weight, teacher_head = head_case()
    ce_weight, kl_weight = weights
    loss, parts = token_losses(
        student,
        ids,
        lambda h: h @ weight.T,
        ce_weight=ce_weight,
        kl_weight=kl_weight,
        teacher=lambda part: teacher_head(teacher[part]).log_softmax(-1),
        parameters=[weight],
        chunk=chunk,
    )
    found = torch.autograd.grad(2.5 * loss, [student, weight])
    log_p = (student @ weight.T).log_softmax(-1)
    ce = F.nll_loss(log_p, ids, reduction="sum")
    target = teacher_head(teacher).log_softmax(-1)
    kl = (target.exp() * (target - log_p)).sum()
    expected = torch.autograd.grad(2.5 * (ce_weight * ce + kl_weight * kl), [student, weight])
    assert torch.allclose(parts["ce"], ce, rtol=EXACT) and torch.allclose(
        parts["kl"], kl, rtol=EXACT
    )
    assert torch.allclose(loss, ce_weight * ce + kl_weight * kl, rtol=EXACT)
    for a, b in zip(found, expected):
        assert torch.allclose(a, b, rtol=0, atol=EXACT)


def test_the_divergence_of_the_top_k_is_the_formula():
    teacher, student = (3 * normal(5, 9, seed=s) for s in (0, 1))
    p, q = teacher.softmax(-1), student.softmax(-1)
    expected = 0
    for n in range(5):
        best = p[n].argsort(descending=True)[:3]
        rest_p, rest_q = 1 - p[n, best].sum(), 1 - q[n, best].sum()
        expected += (p[n, best] * (p[n, best] / q[n, best]).log()).sum()
        expected += rest_p * (rest_p / rest_q).log()
    found = logit_kl(top_k_of(teacher.log_softmax(-1), 3), student.log_softmax(-1))
    assert torch.allclose(found, expected, rtol=1e-10)


def test_the_divergence_of_the_top_k_rises_to_the_full_one():
    teacher, student = (3 * normal(5, 9, seed=s).log_softmax(-1) for s in (0, 1))
    teacher, student = teacher.log_softmax(-1), student.log_softmax(-1).requires_grad_()
    full = logit_kl(teacher, student)
    values = [logit_kl(top_k_of(teacher, k), student) for k in range(1, 10)]
    assert all(a < b for a, b in pairwise(values[:8])) and values[0] > 0
    assert torch.allclose(values[7], full, rtol=EXACT)  # one token is left
    for value in (values[8], logit_kl(top_k_of(teacher, 50), student)):
        assert torch.allclose(value, full, rtol=EXACT)
        gradients = [torch.autograd.grad(x, student, retain_graph=True)[0] for x in (value, full)]
        assert torch.allclose(*gradients, rtol=0, atol=EXACT)
    assert logit_kl(top_k_of(teacher, 2), teacher).abs() < EXACT


def test_probability_outside_the_top_k_costs():
    """A student that agrees on the ratios of the top k but gives away half of their mass."""
    teacher = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).double().log()
    student = torch.tensor([[0.25, 0.15, 0.3, 0.3]]).double().log()
    loss = logit_kl(top_k_of(teacher, 2), student)
    expected = 0.8 * torch.tensor(2.0).double().log() + 0.2 * torch.tensor(0.2 / 0.6).double().log()
    assert torch.allclose(loss, expected, rtol=EXACT)


def test_a_student_that_is_certain_has_a_finite_gradient():
    student = torch.tensor([[80.0, 0.0, -90.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 1.0, 2.0]]).log_softmax(-1)
    for k in (1, 2, 3):
        loss = logit_kl(top_k_of(teacher, k), student.log_softmax(-1))
        (gradient,) = torch.autograd.grad(loss, student)
        assert loss.isfinite() and gradient.isfinite().all()


def test_token_losses_without_teacher_have_no_kl():
    student, _, ids, weight, _ = head_case()
    _, parts = token_losses(student, ids, lambda h: h @ weight.T, ce_weight=1.0, kl_weight=0.0)
    assert list(parts) == ["ce"]


def test_token_losses_of_no_target_are_zero_with_zero_gradient():
    student = normal(0, 6).requires_grad_()
    head = normal(13, 6)
    none = torch.zeros(0, dtype=torch.long)
    loss, parts = token_losses(student, none, lambda h: h @ head.T, ce_weight=1.0, kl_weight=0.0)
    loss.backward()
    assert loss == 0 and parts["ce"] == 0 and student.grad.shape == student.shape


def test_token_losses_never_hold_all_logits():
    """Logits of one chunk at a time are asked for, and none is kept for the backward pass."""
    student, teacher, ids, weight, teacher_head = head_case(targets=20)
    asked, alive = [], []

    def head(rows):
        logits = rows @ weight.T
        asked.append(len(rows))
        alive.append(torch.utils.weak.WeakTensorKeyDictionary({logits: True}))
        assert sum(len(kept) for kept in alive[:-1]) == 0
        return logits

    def target(part):
        return teacher_head(teacher[part]).log_softmax(-1)

    loss, _ = token_losses(
        student, ids, head, ce_weight=1.0, kl_weight=1.0, teacher=target, chunk=8
    )
    assert asked == [8, 8, 4] and sum(len(kept) for kept in alive) == 0
    loss.backward()


def test_token_losses_of_bf16_logits_are_computed_in_fp32():
    hidden, weight = normal(5, 6, dtype=torch.float32).bfloat16(), normal(13, 6).bfloat16()
    ids = torch.arange(5)
    loss, _ = token_losses(hidden, ids, lambda h: h @ weight.T, ce_weight=1.0, kl_weight=0.0)
    expected = F.cross_entropy((hidden @ weight.T).float(), ids, reduction="sum")
    assert loss.dtype == torch.float32 and torch.allclose(loss, expected, rtol=TOLERANCE)


# ------------------------------------------------------------------------------ early gradients
def test_with_gradient_scales_the_given_gradient():
    a, b = torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    loss = with_gradient(torch.tensor(7.0), [a, b], [torch.ones(3), torch.tensor([1.0, 2.0])])
    (3 * loss).backward()
    assert loss == 7 and a.grad.tolist() == [3, 3, 3] and b.grad.tolist() == [3, 6]


def test_with_gradient_of_nothing_is_the_value():
    value = torch.tensor(7.0)
    assert with_gradient(value, [], []) is value
