"""Stage 1, attention transfer: the new parameters learn the teacher's attention, layer by layer.

Legend: B batch, H query heads, G key/value heads, T tokens, Q queries, D head size, Dv value size,
    W window, N sinks.

Teacher and student are one model. The residual stream carries the teacher's attention outputs, and
each converted layer's student reads the teacher's own q, k, v, so layers are independent: the loss
of one has no gradient for another, gradients are clipped per layer, and training them together
equals training them apart.
"""

import torch

from linearize.losses import (
    attention_kl,
    output_energy,
    output_error,
    teacher_log_weights,
    with_gradient,
)
from linearize.modeling.attention import linearized_modules, transfer
from linearize.modeling.ops import compute_dtype, linear_part, positions, row_scaled
from linearize.training import collate, preserved, train

LOSSES = ("output", "attention", "both")
CALIBRATION_ROWS = 16  # rows on which each layer's energy, and the start of its maps, is measured
KEYS_PER_ROW = 512  # that feature maps start from
QUERY_BLOCK = 256  # rows of weights held at once


def transfer_attention(
    model,
    dataset,
    *,
    output_dir,
    loss="output",
    attention_weight=0.1,
    num_queries=64,
    max_tokens=None,
    max_steps=None,
    batch_size=4,
    accumulation=1,
    learning_rate=1e-2,
    warmup=0.03,
    clip=1.0,
    seed=0,
    save_steps=None,
    logging_steps=10,
    resume="auto",
    progress=True,
):
    """Metrics of attention transfer, which trains the new parameters in place and nothing else.

    Args:
        model: what `convert` returned.
        dataset: a `TokenDataset`; rows should be at least 4 windows long.
        output_dir: where checkpoints and log.jsonl go.
        loss: "output", the squared error of the attention output, divided by the layer's mean
            |output|^2; "attention", KL(teacher's weights || student's) per head; "both", output +
            attention_weight * attention.
        num_queries: query positions per row that the loss is computed on, one from each of as many
            equal strata, so that the estimate is unbiased; None for all. Positions whose keys are
            all exact (the first W + N of a document) are never drawn: their error is zero whatever
            the maps are.
        max_tokens, max_steps: length of training; one pass over the data by default.
        clip: limit of each layer's own gradient norm.
        resume: "auto" goes on from the newest checkpoint in output_dir, "never" starts over.

    Returns:
        {"tokens", "steps", "seconds", "tokens_per_s", "history"}; an entry of history has "step",
        "loss", the mean over layers, and "layers", {"0": ...}.
    """
    layers = linearized_modules(model)
    _check(model, layers, dataset, loss, num_queries)
    settings = {
        "loss": loss,
        "attention_weight": attention_weight if loss == "both" else None,
        "num_queries": num_queries,
        "linearize": model.config.linearize_config,
    }
    with preserved(model):
        own = {p for module in layers.values() for p in module.linearized.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter in own)
        objective = TransferObjective(
            model, loss=loss, attention_weight=attention_weight, num_queries=num_queries
        )
        return train(
            model,
            dataset,
            objective,
            stage="transfer",
            settings=settings,
            output_dir=output_dir,
            max_tokens=max_tokens,
            max_steps=max_steps,
            batch_size=batch_size,
            accumulation=accumulation,
            learning_rate=learning_rate,
            warmup=warmup,
            clip=clip,
            seed=seed,
            save_steps=save_steps,
            logging_steps=logging_steps,
            resume=resume,
            progress=progress,
        )


def _check(model, layers, dataset, loss, num_queries):
    if not layers:
        raise ValueError("transfer: this model has no linearized layer; convert it first")
    if not any(
        p.requires_grad for module in layers.values() for p in module.linearized.parameters()
    ):
        section = model.config.linearize_config
        raise ValueError(
            f"transfer: feature map {section['feature_map']} under mixing {section['mixing']} has "
            "nothing to train; leave this stage out"
        )
    if loss not in LOSSES:
        raise ValueError(f"transfer.loss: {loss!r} is not allowed; choose from {', '.join(LOSSES)}")
    if num_queries is not None and num_queries < 1:
        raise ValueError(
            f"transfer.num_queries: {num_queries} is not allowed; give a positive number, or null "
            "for all"
        )
    exact = exact_tokens(model)
    if dataset.length <= exact:
        raise ValueError(
            f"data.length: rows of {dataset.length} tokens never reach beyond window + sinks = "
            f"{exact}, so there is nothing to learn; use {4 * exact} or more"
        )


def exact_tokens(model):
    """W + N: queries at earlier positions of a document see no linear key."""
    return model.config.linearize_config["window"] + model.config.linearize_config["sinks"]


class TransferObjective:
    """The mean over layers of the transfer loss; see `training.Objective`."""

    def __init__(self, model, *, loss, attention_weight, num_queries):
        self.layers = linearized_modules(model)
        self.parameters = {
            i: [p for p in module.linearized.parameters() if p.requires_grad]
            for i, module in self.layers.items()
        }
        self.groups = list(self.parameters.values())
        self.exact = exact_tokens(model)
        self.weights = {
            "output": (1.0, 0.0),
            "attention": (0.0, 1.0),
            "both": (1.0, attention_weight),
        }[loss]
        self.num_queries = num_queries
        self.state = {}

    def start(self, model, dataset):
        """Measures each layer's energy, the mean of |teacher output|^2: a constant from here on.

        Feature maps that start from real keys get them here.
        """
        rows = [dataset[i] for i in range(min(CALIBRATION_ROWS, len(dataset)))]
        sums, count = dict.fromkeys(self.layers, 0.0), 0
        keys = {i: [] for i, module in self.layers.items() if module.linearized.fits_keys}

        def observe(module, q, k, v, teacher_out, **kwargs):
            sums[module.layer_idx] += output_energy(teacher_out, there).item()
            if module.layer_idx in keys:
                keys[module.layer_idx].append(k[0, :, sample])

        for row in rows:
            batch = {key: value.to(model.device) for key, value in collate([row]).items()}
            there = eligible(batch, self.exact)
            sample = _spread(batch, KEYS_PER_ROW)
            count += int(there.sum())
            self._forward(model, batch, observe)
        if not count:
            raise ValueError(
                f"data: no document in the first {len(rows)} rows is longer than window + sinks = "
                f"{self.exact} tokens, so there is nothing to learn; use longer documents, or a "
                "smaller window"
            )
        for i, found in keys.items():
            self.layers[i].linearized.fit(torch.cat(found, 1))
        self.state = {"energy": {str(i): total / count for i, total in sums.items()}}

    def count(self, batch):
        return int(eligible(batch, self.exact).sum())

    def __call__(self, model, batch, generator):
        queries, weight = draw_queries(eligible(batch, self.exact), self.num_queries, generator)
        losses = {}

        def observe(module, q, k, v, teacher_out, *, attention_mask, **inputs):
            losses[module.layer_idx] = self._layer_loss(
                module, (q, k, v), teacher_out, queries, weight, **inputs
            )

        self._forward(model, batch, observe)
        parts = {f"layers.{i}": value.detach() for i, value in losses.items()}
        return torch.stack(list(losses.values())).mean(), parts

    def _forward(self, model, batch, observe):
        """One pass of the teacher, without gradients; the language-model head sees one token."""
        model.eval()  # no dropout in the targets
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        with transfer(model, observe):
            model(**inputs, use_cache=False, logits_to_keep=1)

    def _layer_loss(self, module, qkv, teacher_out, queries, weight, **inputs):
        """The layer's summed loss, its gradient worked out at once: one layer's rows in memory."""
        parameters = self.parameters[module.layer_idx]
        energy = self.state["energy"][str(module.layer_idx)]
        total = torch.zeros((), device=queries.device)
        gradients = [torch.zeros_like(p) for p in parameters]
        blocks = zip(queries.split(QUERY_BLOCK, 1), weight.split(QUERY_BLOCK, 1))
        with torch.enable_grad():
            for block in blocks:
                loss = layer_loss(
                    module.linearized, qkv, teacher_out, *block, energy, self.weights, **inputs
                )
                found = torch.autograd.grad(
                    loss, parameters, allow_unused=True, materialize_grads=True
                )
                torch._foreach_add_(gradients, found)
                total = total + loss.detach()
        return with_gradient(total, parameters, gradients)


def layer_loss(heads, qkv, teacher_out, queries, weight, energy, weights=(1.0, 0.0), **inputs):
    """Sum over queries of weight * the loss of one layer; queries, weight [B, Q].

    heads is the layer's `linearized` module; qkv is (q [B, H, T, D], k [B, G, T, D], v [B, G, T,
    Dv]) after the rotary embedding, teacher_out [B, H, T, Dv]; inputs are scaling, softcap,
    sink_logit, valid and documents, as an observer of `modeling.attention.transfer` receives them;
    weights those of the output error and of the attention KL.
    """
    output_weight, attention_weight = weights
    total = torch.zeros((), device=queries.device)
    if attention_weight or inputs["valid"] is not None:
        rows = heads(*qkv, queries=queries, **inputs)
        out = rows.out
    else:
        out = student_output(heads, *qkv, queries, **inputs)
    if output_weight:
        error = output_error(out, _take(teacher_out, queries), weight)
        total = total + output_weight * error / energy
    if attention_weight:
        target = teacher_log_weights(*qkv[:2], queries, **inputs)
        total = total + attention_weight * attention_kl(target, rows.log_weights, weight)
    return total


# ------------------------------------------------------------------------------ the student's rows
def student_output(
    heads, q, k, v, queries, *, scaling, softcap=None, sink_logit=None, valid=None, documents=None
):
    """The definition's output [B, H, Q, Dv] for rows `queries` [B, Q] of unpadded input.

    Equal to `hybrid_quadratic`, which forms T exact scores per row where this gathers W + N keys.
    q, k and v are the teacher's, so nothing here gives them a gradient and the exact part is a
    constant.
    """
    op = heads.operator(scaling=scaling, softcap=softcap, sink_logit=sink_logit)
    index = torch.arange(q.shape[2], device=q.device).expand(len(q), -1)
    place = positions(torch.ones_like(index, dtype=torch.bool), documents)
    start = queries - place.gather(1, queries)  # [B, Q] first token of the query's document
    q = _take(q, queries)
    out, top, mass = _exact_rows(op, q, k, v, queries, start)
    beta, alpha = (p[:, None, None] for p in (op.beta, op.alpha))
    log_exact = beta + alpha * top + mass.log()  # [B, H, Q, 1]
    index, first, last = index[:, None], start[..., None] + op.sinks, queries[..., None] - op.window
    linear = (first <= index) & (index <= last)
    linear_out, log_linear = _linear_rows(op, q, k, v, linear)
    share = torch.sigmoid(log_exact - log_linear)
    return share * out + (1 - share) * linear_out


@torch.no_grad()
def _exact_rows(op, q, k, v, queries, start):
    """(output [B, H, Q, Dv], largest score, mass relative to it) of each window and sinks."""
    dtype, G = compute_dtype(q), k.shape[1]
    window = queries[..., None] - torch.arange(op.window, device=q.device)  # [B, Q, W]
    sinks = start[..., None] + torch.arange(op.sinks, device=q.device)  # [B, Q, N]
    there = torch.cat([window >= start[..., None], sinks <= queries[..., None] - op.window], -1)[
        :, None, :, None
    ]
    index = torch.cat([window, sinks], -1).clamp(min=0, max=k.shape[2] - 1).flatten(1)
    keys, values = (
        _take(x, index).unflatten(2, (queries.shape[1], -1)).to(dtype) for x in (k, v)
    )  # [B, G, Q, W + N, D]
    grouped = q.to(dtype).unflatten(1, (G, -1)).transpose(2, 3)  # [B, G, Q, H / G, D]
    scores = op.scores(grouped @ keys.mT).masked_fill(~there, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if op.sink_logit is not None:
        extra = op.sink_logit.to(dtype).view(G, 1, -1, 1)
        top = torch.maximum(top, extra)
    weights = (scores - top).exp()
    mass = weights.sum(-1, keepdim=True)
    if op.sink_logit is not None:
        mass = mass + (extra - top).exp()
    return tuple(x.transpose(2, 3).flatten(1, 2) for x in ((weights @ values) / mass, top, mass))


def _take(x, index):
    """Tokens index [B, n] of x [B, H, T, D]: [B, H, n, D]; copies whole rows, unlike `gather`."""
    B, H, T, D = x.shape
    flat = x.transpose(1, 2).reshape(B * T, H * D)
    offset = T * torch.arange(B, device=x.device)[:, None]
    return flat.index_select(0, (index + offset).flatten()).view(B, -1, H, D).transpose(1, 2)


def _linear_rows(op, q, k, v, there):
    """(output [B, H, Q, Dv], log mass [B, H, Q, 1]) of the linear keys, `there` [B, Q, T]."""
    repeat = op.state_heads // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
    features_q, features_k = op.phi_q(q).unflatten(1, (op.state_heads, -1)), op.phi_k(k)
    if op.log_k:
        shift = features_k.amax(2, keepdim=True).detach()  # [B, HS, 1, F]
        features_q, features_k = features_q + shift.unsqueeze(2), (features_k - shift).exp()
    features_q, scale = row_scaled(op, features_q)
    weights = (features_q.flatten(2, 3) @ features_k.mT).unflatten(
        2, features_q.shape[2:4]
    )  # [B, HS, R, Q, T]
    weights = weights * there[:, None, None].to(weights.dtype)
    num = (weights.flatten(2, 3) @ v.to(weights.dtype)).unflatten(2, weights.shape[2:4])
    out, log_mass = linear_part(num, weights.sum(-1, keepdim=True), scale)
    return out.flatten(1, 2), log_mass.flatten(1, 2)


# ------------------------------------------------------------------------- which keys and queries
def _spread(batch, most):
    """At most `most` indices of real tokens of a batch of one, evenly spread."""
    mask = batch.get("attention_mask")
    real = torch.ones_like(batch["input_ids"][0]) if mask is None else mask[0]
    index = real.nonzero().flatten()
    return index[torch.linspace(0, len(index) - 1, min(most, len(index))).long()]


def eligible(batch, exact):
    """bool [B, T]: tokens that see a linear key, `exact` = W + N or more into their document."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    documents = None
    if mask is None and "position_ids" in batch:
        borders = batch["position_ids"].diff(dim=1) != 1
        documents = torch.nn.functional.pad(borders.long().cumsum(1), (1, 0))
    return valid & (positions(valid, documents) >= exact)


def draw_queries(there, num_queries, generator):
    """(queries, weight) [B, Q]: some true entries of `there` [B, T] and what each stands for.

    The n true entries of a row are cut into Q equal strata, one uniform draw from each, with weight
    n / Q: the weighted sum of any function of the entries is an unbiased estimate of its sum over
    all n. A row with n <= Q, or num_queries None, has all its entries with weight 1; what is left
    of its Q places has weight 0.
    """
    count = there.sum(1)  # [B]
    width = max(1, int(count.max()))
    width = width if num_queries is None else min(num_queries, width)
    order = torch.sort(~there, dim=1, stable=True).indices  # the true entries first
    place = torch.arange(width, device=there.device).expand(len(there), width)
    weight = (place < count[:, None]).float()
    if num_queries is not None:
        jitter = torch.rand(len(there), num_queries, generator=generator)[:, :width].to(
            there.device, torch.float64
        )
        size = (count[:, None] / num_queries).double()
        drawn = ((place + jitter) * size).long().clamp(max=(count[:, None] - 1).clamp(min=0))
        many = count[:, None] > num_queries
        place, weight = torch.where(many, drawn, place), torch.where(many, size.float(), weight)
    return order.gather(1, place), weight
