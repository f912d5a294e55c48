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
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.modeling.ops import positions
from linearize.modeling.rows import take_rows
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
    report_to=(),
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
        report_to: experiment trackers by the names of TrainingArguments, such as "wandb" or "all".

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
            report_to=report_to,
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
    """Queries at earlier positions of a document see no linear key: W + N, or the first block that
    neither the sinks nor the block before its own reaches.
    """
    section = LinearizeConfig.from_dict(model.config.linearize_config)
    if section.window_kind == "terrace":
        return section.window * (section.sinks // section.window + 2)
    return section.window + section.sinks


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
        self.learning_rates, self.state = {}, {}

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
    rows = heads(*qkv, queries=queries, weights=bool(attention_weight), **inputs)
    if output_weight:
        error = output_error(rows.out, take_rows(teacher_out, queries), weight)
        total = total + output_weight * error / energy
    if attention_weight:
        target = teacher_log_weights(*qkv[:2], queries, **inputs)
        total = total + attention_weight * attention_kl(target, rows.log_weights, weight)
    return total


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
