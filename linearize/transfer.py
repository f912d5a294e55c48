"""Stage 1, attention transfer: the new parameters learn the teacher's attention, layer by layer.

Legend: B batch, H query heads, G key/value heads, T tokens, Q queries, D head size, Dv value size,
    W window, N sinks.

Teacher and student are one model. The residual stream carries the teacher's attention outputs, and
each converted layer's student reads the teacher's own q, k, v, so layers are independent: the loss
of one has no gradient for another, gradients are clipped per layer, and training them together
equals training them apart.
"""

import warnings

import torch

from linearize.calibration import fit_mixing, log_masses
from linearize.losses import (
    attention_kl,
    output_energy,
    output_error,
    teacher_log_weights,
    with_gradient,
)
from linearize.modeling.attention import linearized_modules, transfer
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.modeling.rows import take_rows
from linearize.queries import draw_queries, eligible, position_table, spread, weigh_positions
from linearize.training import collate, preserved, train

LOSSES = ("output", "attention", "both")
POSITION_WEIGHTS = ("uniform", "buckets", "distance")
MIXING_STARTS = ("fixed", "beta", "beta_alpha")
CALIBRATION_ROWS = 16  # rows on which each layer's energy, and the start of its maps, is measured
CALIBRATION_QUERIES = 64  # of each of them, for the start of the mixing rule
POSITION_ROWS = 1024  # rows whose positions are counted, which needs no forward pass
DROPOUT_ENDS = 0.9  # share of the steps after which the window is never dropped
PLAIN = {"window_dropout": 0.0, "position_weights": "uniform", "mixing_start": "fixed"}
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
    window_dropout=0.0,
    position_weights="uniform",
    mixing_start="fixed",
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
        window_dropout: probability that a layer answers without window and sinks in a step, all
            keys handed to the linear part; it falls linearly, to zero after 90 % of the steps.
        position_weights: what a query counts: "uniform"; "buckets", every doubling of the distance
            from the document's start counts the same; "distance", as many as the linear keys that
            it sees. 1 on average.
        mixing_start: "fixed" start values of beta and alpha; or "beta", "beta_alpha": set from the
            teacher's weight outside window and sinks on some rows, before the first step.
        max_tokens, max_steps: length of training; one pass over the data by default.
        clip: limit of each layer's own gradient norm.
        resume: "auto" goes on from the newest checkpoint in output_dir, "never" starts over.
        report_to: experiment trackers by the names of TrainingArguments, such as "wandb" or "all".

    Returns:
        {"tokens", "steps", "seconds", "tokens_per_s", "history"}; an entry of history has "step",
        "loss", the mean over layers, and "layers", {"0": ...}.
    """
    layers = linearized_modules(model)
    options = {
        "window_dropout": window_dropout,
        "position_weights": position_weights,
        "mixing_start": mixing_start,
    }
    _check(model, layers, dataset, loss, num_queries, **options)
    settings = {
        "loss": loss,
        "attention_weight": attention_weight if loss == "both" else None,
        "num_queries": num_queries,
        "linearize": model.config.linearize_config,
    }
    settings |= {name: value for name, value in options.items() if value != PLAIN[name]}
    with preserved(model):
        own = {p for module in layers.values() for p in module.linearized.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter in own)
        objective = TransferObjective(
            model, loss=loss, attention_weight=attention_weight, num_queries=num_queries, **options
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


def _check(
    model, layers, dataset, loss, num_queries, window_dropout, position_weights, mixing_start
):
    if not layers:
        raise ValueError("transfer: this model has no linearized layer; convert it first")
    if not any(module.linearize_heads for module in layers.values()):
        raise ValueError(
            "transfer: every head of the converted layers stays softmax, so there is nothing to "
            "train; leave this stage out"
        )
    if not any(
        p.requires_grad for module in layers.values() for p in module.linearized.parameters()
    ):
        section = model.config.linearize_config
        raise ValueError(
            f"transfer: feature map {section['feature_map']} under mixing {section['mixing']} has "
            "nothing to train; leave this stage out"
        )
    for key, value, allowed in (
        ("loss", loss, LOSSES),
        ("position_weights", position_weights, POSITION_WEIGHTS),
        ("mixing_start", mixing_start, MIXING_STARTS),
    ):
        if value not in allowed:
            raise ValueError(
                f"transfer.{key}: {value!r} is not allowed; choose from {', '.join(allowed)}"
            )
    section = model.config.linearize_config
    if mixing_start == "beta_alpha" and section["mixing"] != "calibrated":
        raise ValueError(
            "transfer.mixing_start: 'beta_alpha' needs convert.mixing 'calibrated', which has an "
            f"alpha to set; under {section['mixing']!r} use 'beta'"
        )
    if not 0 <= window_dropout <= 1:
        raise ValueError(
            f"transfer.window_dropout: {window_dropout} is not a probability; give 0 to 1"
        )
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
    if dataset.length < 4 * section["window"]:
        warnings.warn(
            f"data.length: rows of {dataset.length} tokens are shorter than 4 windows of "
            f"{section['window']}, so that few queries see a key far away; use longer rows or a "
            "smaller window",
            stacklevel=3,
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

    progress = 0.0

    def __init__(
        self,
        model,
        *,
        loss,
        attention_weight,
        num_queries,
        window_dropout=0.0,
        position_weights="uniform",
        mixing_start="fixed",
    ):
        self.layers = {i: m for i, m in linearized_modules(model).items() if m.linearize_heads}
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
        self.num_queries, self.window_dropout = num_queries, window_dropout
        self.position_weights, self.mixing_start = position_weights, mixing_start
        self.learning_rates, self.state = {}, {}

    def start(self, model, dataset):
        """Measures each layer's energy, the mean of |teacher output|^2: a constant from here on.

        Feature maps that start from real keys get them here, and mixing rules that start from the
        teacher's weights.
        """
        rows = [dataset[i] for i in range(min(CALIBRATION_ROWS, len(dataset)))]
        sums, count = dict.fromkeys(self.layers, 0.0), 0
        keys = {i: [] for i, module in self.layers.items() if module.linearized.fits_keys}

        def observe(module, q, k, v, teacher_out, **kwargs):
            sums[module.layer_idx] += output_energy(teacher_out, there).item()
            if module.layer_idx in keys:
                keys[module.layer_idx].append(k[0, :, sample])

        batches = [{k: x.to(model.device) for k, x in collate([row]).items()} for row in rows]
        for batch in batches:
            there = eligible(batch, self.exact)
            sample = spread(batch, KEYS_PER_ROW)
            count += int(there.sum())
            self._forward(model, batch, observe)
        if not count:
            raise ValueError(
                f"data: no document in the first {len(rows)} rows is longer than window + sinks = "
                f"{self.exact} tokens, so there is nothing to learn; use longer documents, or a "
                "smaller window"
            )
        for i, found in keys.items():
            self.layers[i].linearized.fit(torch.cat(found, 1), self.layers[i].linearize_heads)
        self.state = {"energy": {str(i): total / count for i, total in sums.items()}}
        if self.position_weights != "uniform":
            counted = (collate([dataset[i]]) for i in range(min(POSITION_ROWS, len(dataset))))
            self.state["position_weights"] = position_table(
                self.position_weights, counted, self.exact
            )
        if self.mixing_start != "fixed":
            self._fit_mixing(model, batches)

    def _fit_mixing(self, model, batches):
        """Start values of beta, and of alpha, from the teacher's weights on some queries."""
        found = {i: [] for i in self.layers}

        def observe(module, q, k, v, teacher_out, *, attention_mask, **inputs):
            found[module.layer_idx].append(
                log_masses(module.linearized, q, k, v, queries, weight, **inputs)
            )

        for batch in batches:
            generator = torch.Generator().manual_seed(0)
            there = eligible(batch, self.exact)
            queries, weight = draw_queries(there, CALIBRATION_QUERIES, generator)
            self._forward(model, batch, observe)
        for i, parts in found.items():
            linearized, heads = self.layers[i].linearized, self.layers[i].linearize_heads
            fit_mixing(linearized, parts, heads, slope=self.mixing_start == "beta_alpha")

    def count(self, batch):
        return int(eligible(batch, self.exact).sum())

    def __call__(self, model, batch, generator):
        queries, weight = draw_queries(eligible(batch, self.exact), self.num_queries, generator)
        if self.position_weights != "uniform":
            table = self.state["position_weights"]
            weight = weight * weigh_positions(
                self.position_weights, batch, self.exact, table
            ).gather(1, queries)
        dropped = self._without_window(generator)
        losses = {}

        def observe(module, q, k, v, teacher_out, *, attention_mask, **inputs):
            window = module.layer_idx not in dropped
            losses[module.layer_idx] = self._layer_loss(
                module, (q, k, v), teacher_out, queries, weight, window=window, **inputs
            )

        self._forward(model, batch, observe)
        parts = {f"layers.{i}": value.detach() for i, value in losses.items()}
        if self.window_dropout:
            share = torch.tensor(len(dropped) / len(self.layers), device=weight.device)
            parts["without_window"] = share * self.count(batch)
        return torch.stack(list(losses.values())).mean(), parts

    def _without_window(self, generator):
        """Layers whose window branch is off in this step, in every micro-batch of it."""
        probability = self.window_dropout * max(0.0, 1 - self.progress / DROPOUT_ENDS)
        own = torch.Generator().manual_seed(generator.initial_seed() + 1)
        draws = torch.rand(len(self.layers), generator=own).tolist()
        return {i for i, draw in zip(self.layers, draws) if draw < probability}

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


def layer_loss(
    linearized, qkv, teacher_out, queries, weight, energy, weights=(1.0, 0.0), *, window=True,
    heads=None, **inputs,
):  # fmt: skip
    """Sum over queries of weight * the loss of one layer; queries, weight [B, Q].

    linearized is the layer's module of that name; qkv is (q [B, H, T, D], k [B, G, T, D], v [B, G,
    T, Dv]) after the rotary embedding, teacher_out [B, H, T, Dv], all of the linear heads; heads
    and inputs (scaling, softcap, sink_logit, valid and documents) are as an observer of
    `modeling.attention.transfer` receives them; weights those of the output error and of the
    attention KL. window=False: the student answers without its window branch.
    """
    output_weight, attention_weight = weights
    total = torch.zeros((), device=queries.device)
    options = dict(queries=queries, weights=bool(attention_weight), window=window, heads=heads)
    rows = linearized(*qkv, **options, **inputs)
    if output_weight:
        error = output_error(rows.out, take_rows(teacher_out, queries), weight)
        total = total + output_weight * error / energy
    if attention_weight:
        target = teacher_log_weights(*qkv[:2], queries, **inputs)
        total = total + attention_weight * attention_kl(target, rows.log_weights, weight)
    return total
