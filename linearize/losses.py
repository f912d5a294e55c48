"""What the stages minimise, as pure functions: errors of attention outputs, weights, and logits.

Legend: B batch, H query heads, G key/value heads, T tokens, Q queries, D head size, Dv value size,
    V vocabulary, N targets.
Every loss is a *sum*: the caller divides by the count of the whole effective batch, so that
splitting a batch into micro-batches changes nothing. Everything is computed in fp32 (fp64 for fp64
input).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from linearize.modeling.ops import EMPTY, compute_dtype, masks, take

LOWEST_LOG_WEIGHT = (
    -23.0
)  # 1e-10: a student that gives a key no weight at all costs this much, not infinity
CHUNK = 128  # targets whose logits exist at one time


# ------------------------------------------------------------------------------- attention outputs
def output_error(student, teacher, weight):
    """Sum over queries of weight * |student - teacher|^2; outputs [B, H, Q, Dv], weight [B, Q].

    Divided by the layer's mean |teacher|^2 and by the number of queries this is objective (a) of
    docs/concepts.md.
    """
    dtype = compute_dtype(student)
    error = (student.to(dtype) - teacher.to(dtype)).square().sum((1, 3))  # [B, Q]
    return (error * weight).sum()


def output_energy(teacher, weight):
    """Sum over queries of weight * |teacher|^2 in float64; teacher [B, H, Q, Dv], weight [B, Q]."""
    return (teacher.double().square().sum((1, 3)) * weight).sum()


# ------------------------------------------------------------------------------- attention weights
def teacher_log_weights(
    q, k, queries, *, scaling, softcap=None, sink_logit=None, valid=None, documents=None
):
    """Log weights [B, H, Q, T] of causal softmax attention for some queries; -inf: not seen.

    q [B, H, T, D]; k [B, G, T, D]; queries [B, Q] int64; sink_logit [H], the extra logit some
    families keep in every row's normaliser; valid [B, T] bool; documents [B, T] int. A row of
    padding is -inf throughout.
    """
    scores = teacher_scores(
        q, k, queries, scaling=scaling, softcap=softcap, valid=valid, documents=documents
    )
    normaliser = scores.logsumexp(-1, keepdim=True)
    if sink_logit is not None:
        normaliser = torch.logaddexp(normaliser, sink_logit.to(scores.dtype)[:, None, None])
    return scores - normaliser.clamp(min=torch.finfo(scores.dtype).min)


def teacher_scores(q, k, queries, *, scaling, softcap=None, valid=None, documents=None):
    """Scores [B, H, Q, T] of causal softmax attention; as in `teacher_log_weights`."""
    B, _, T, _ = q.shape
    dtype = compute_dtype(q)
    valid = torch.ones(B, T, dtype=torch.bool, device=q.device) if valid is None else valid
    exact, linear = masks(valid, documents, T, 0, queries)
    q = take(q, queries)
    grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))  # [B, G, H / G, Q, D]
    scores = scaling * (grouped @ k.to(dtype).mT.unsqueeze(2)).flatten(1, 2)  # [B, H, Q, T]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~(exact | linear)[:, None], -torch.inf)


def attention_kl(teacher, student, weight):
    """Sum over queries of weight * KL(teacher row || student row), averaged over heads.

    teacher, student [B, H, Q, T] log weights, weight [B, Q]. Cross-entropy minus the teacher's
    entropy: 0 is perfect, and layers compare. Student weights below 1e-10 count as 1e-10, since
    some maps give exact zeros. Source: the attention-weight objective of Zhang et al. 2024,
    arXiv:2402.04347, eq. 4. Differs: the entropy is subtracted.
    """
    probability = teacher.exp()
    gap = teacher.masked_fill(probability == 0, 0) - student.clamp(min=LOWEST_LOG_WEIGHT)
    return ((probability * gap).sum(-1).mean(1) * weight).sum()


# ------------------------------------------------------------------------------- next-token logits
class TopK(NamedTuple):
    """The k most probable of V tokens, and all the others as one: logarithms of probabilities."""

    ids: torch.Tensor  # [N, k] int64
    log_p: torch.Tensor  # [N, k]
    log_rest: torch.Tensor  # [N]; about EMPTY if k = V

    def part(self, rows):
        """The same for some of the rows."""
        return TopK(*(x[rows] for x in self))


def top_k_of(log_p, k):
    """`TopK` of rows of log probabilities [N, V]."""
    values, ids = log_p.topk(min(k, log_p.shape[-1]), sorted=False)
    return TopK(ids, values, _log_rest(log_p, ids))


def _log_rest(log_p, ids):
    return log_p.scatter(-1, ids, EMPTY).logsumexp(-1)


def logit_kl(teacher, student):
    """Sum over rows of KL(teacher || student); student [N, V] log probabilities, teacher too, or a
    `TopK` with p_i, r = 1 - sum p_i:

        sum_i p_i log(p_i / q_i) + r log(r / (1 - sum_i q_i))

    Never more than the full divergence, since tokens that are counted as one cannot differ; equal
    to it for k = V. Without the last term probability outside the top k would cost nothing.
    """
    if not isinstance(teacher, TopK):
        return F.kl_div(student, teacher, reduction="sum", log_target=True)
    gap = teacher.log_p - student.gather(-1, teacher.ids)
    rest = teacher.log_rest - _log_rest(student, teacher.ids)
    return (teacher.log_p.exp() * gap).sum() + (teacher.log_rest.exp() * rest).sum()


def token_losses(
    hidden, targets, logits, *, ce_weight, kl_weight, teacher=None, parameters=(), chunk=CHUNK
):
    """(ce_weight * CE + kl_weight * KL(teacher || student), {"ce", "kl"}): sums over N targets.

    hidden [N, D]: the decoder's output where a target is predicted; targets [N] int64; logits: a
    function from [n, D] to [n, V]; teacher: None, or a function from a slice of the N rows to the
    teacher's log probabilities [n, V] or `TopK`. `parameters` are those of `logits` that train. The
    gradient is taken chunk by chunk as the loss is computed, so that [N, V] never exists; nothing
    is computed twice. Backward gives the gradient to `hidden` and `parameters`.
    """
    tensors = [t for t in (hidden, *parameters) if t.requires_grad and torch.is_grad_enabled()]
    gradients = [torch.zeros_like(t) for t in tensors]
    total = torch.zeros((), device=hidden.device)
    sums = dict.fromkeys(("ce",) if teacher is None else ("ce", "kl"), total)
    for start in range(0, len(targets), chunk):
        part = slice(start, start + chunk)
        leaves = [hidden[part].detach().requires_grad_() if t is hidden else t for t in tensors]
        rows = leaves[0] if leaves and tensors[0] is hidden else hidden[part].detach()
        with torch.set_grad_enabled(bool(leaves)):
            loss, parts = _chunk_losses(
                rows, targets[part], logits, ce_weight, kl_weight, teacher, part
            )
        found = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
        for gradient, leaf, new in zip(gradients, leaves, found, strict=True):
            if new is not None:
                (gradient[part] if leaf is rows else gradient).add_(new)
        total = total + loss.detach()
        sums = {name: value + parts[name].detach() for name, value in sums.items()}
    return with_gradient(total, tensors, gradients), sums


def _chunk_losses(rows, targets, logits, ce_weight, kl_weight, teacher, part):
    """The weighted loss of one chunk and its parts."""
    student = logits(rows)
    student = student.to(compute_dtype(student)).log_softmax(-1)
    ce = F.nll_loss(student, targets, reduction="sum")
    if teacher is None:
        return ce_weight * ce, {"ce": ce}
    with torch.no_grad():
        target = teacher(part)
    kl = logit_kl(target, student)
    return ce_weight * ce + kl_weight * kl, {"ce": ce, "kl": kl}


# --------------------------------------------------------------------------------- early gradients
def with_gradient(value, tensors, gradients):
    """`value` as a scalar whose gradient with respect to `tensors` is the given one.

    For losses whose gradient is worked out while they are computed: what autograd would keep until
    `backward` (rows of weights, logits) can be freed at once.
    """
    if not tensors:
        return value
    return _WithGradient.apply(value.detach(), len(tensors), *tensors, *gradients)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, num_tensors, *tensors_and_gradients):
        ctx.save_for_backward(*tensors_and_gradients[num_tensors:])
        return value.clone()

    @staticmethod
    def backward(ctx, scale):
        gradients = ctx.saved_tensors
        return None, None, *(scale.to(g.dtype) * g for g in gradients), *(None for _ in gradients)
