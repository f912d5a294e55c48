"""Stage 2, finetuning: LoRA or all weights, against the labels, the teacher's logits, or both.

Legend: B batch, T tokens, D hidden size, V vocabulary, N targets.

With LoRA the teacher is the same model with adapters off and softmax attention: no second copy.
Logits are computed for some targets at a time, so that [B, T, V] never exists.
"""

import copy
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import set_seed
from transformers.pytorch_utils import Conv1D

from linearize.logits import decoder_of, head_logits, run_body
from linearize.losses import token_losses
from linearize.modeling.attention import branches, linearized_modules, teacher
from linearize.training import evaluating, preserved, train

METHODS = ("lora", "full")
LOSSES = ("kl", "ce", "mix")
MODES = ("linear", "softmax", "window")
NEW = "linearized"  # the child module that owns a layer's new parameters


def finetune(
    model,
    dataset,
    *,
    output_dir,
    method="lora",
    targets=None,
    rank=8,
    alpha=16,
    loss="kl",
    kl_weight=1.0,
    ce_weight=0.0,
    train_linearized=True,
    mode="linear",
    max_tokens=None,
    max_steps=None,
    batch_size=2,
    accumulation=4,
    learning_rate=1e-4,
    linearized_learning_rate=None,
    warmup=0.03,
    clip=1.0,
    gradient_checkpointing=False,
    seed=0,
    save_steps=None,
    logging_steps=10,
    resume="auto",
    progress=True,
    report_to=(),
    merge=True,
):
    """(model, metrics): the finetuned model and what its training cost.

    Args:
        model: a converted model.
        dataset: a `TokenDataset`.
        output_dir: where checkpoints and log.jsonl go.
        method: "lora", or "full" for all weights; a bf16 model trains fp32 weights under bf16
            autocast, and with a KL loss "full" holds a frozen copy of the teacher.
        targets: names of the layers that get LoRA, as in "q_proj" or "self_attn.q_proj"; None for
            every projection of the attention modules (q, k, v, o).
        rank, alpha: of LoRA; its weights are fp32.
        loss: KL to the teacher, cross-entropy on the labels, or "mix", kl_weight * KL + ce_weight *
            CE. Each is the mean over the valid targets of the effective batch.
        train_linearized: whether the new parameters train too; they have a gradient in mode
            "linear" only.
        linearized_learning_rate: the largest learning rate of the new parameters; None: the same.
        mode: what is trained: the "linear" model; the teacher with "softmax" attention; or
            "window", the window and sinks alone. The last two are baselines.
        merge: merge LoRA into the weights and return a plain model; False returns the PeftModel.
        resume: "auto" goes on from the newest checkpoint in output_dir, "never" starts over.
        report_to: experiment trackers by the names of TrainingArguments, such as "wandb" or "all".

    Returns:
        The model, and {"tokens", "steps", "seconds", "tokens_per_s", "trainable_parameters",
        "history"}; an entry of history has "step", "loss", "ce" and, with a teacher, "kl".
    """
    weights = {"kl": (0.0, 1.0), "ce": (1.0, 0.0), "mix": (ce_weight, kl_weight)}.get(loss)
    _check(model, method, loss, mode, weights)
    train_new = train_linearized and mode == "linear"
    settings = {"method": method, "mode": mode, "ce_weight": weights[0], "kl_weight": weights[1]}
    settings |= {"train_linearized": train_new, "linearize": model.config.linearize_config}
    rates = {NEW: linearized_learning_rate} if train_new and linearized_learning_rate else {}
    settings |= {"learning_rates": rates} if rates else {}
    if method == "lora":
        targets = attention_projections(model) if targets is None else list(targets)
        settings |= {"targets": targets, "rank": rank, "alpha": alpha}
    was_training = model.training
    with ExitStack() as stack:
        stack.enter_context(preserved(model))
        set_seed(seed)
        frozen = (
            copy.deepcopy(model).requires_grad_(False) if method == "full" and weights[1] else None
        )
        if method == "lora":
            trained = add_lora(model, targets, rank=rank, alpha=alpha, train_linearized=train_new)
            autocast = None
        else:
            trained, autocast = model, model.dtype if model.dtype == torch.bfloat16 else None
            stack.enter_context(_fp32_weights(model, train_linearized=train_new))
        stack.enter_context(
            {"linear": nullcontext, "softmax": teacher, "window": _window_only}[mode](model)
        )
        if gradient_checkpointing:
            stack.enter_context(_checkpointed(model))
        trainable = [p for p in trained.parameters() if p.requires_grad]
        metrics = train(
            trained,
            dataset,
            LogitObjective(
                trained, *weights, learning_rates=rates, frozen=frozen, autocast=autocast
            ),
            stage="finetune",
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
    metrics["trainable_parameters"] = sum(p.numel() for p in trainable)
    if method == "lora" and merge:
        trained = trained.merge_and_unload()
    elif method == "lora":
        trained.requires_grad_(False)
        for parameter in trainable:
            parameter.requires_grad_(True)
    return trained.train(was_training), metrics


def _check(model, method, loss, mode, weights):
    for key, value, allowed in (
        ("method", method, METHODS),
        ("loss", loss, LOSSES),
        ("mode", mode, MODES),
    ):
        if value not in allowed:
            raise ValueError(
                f"finetune.{key}: {value!r} is not allowed; choose from {', '.join(allowed)}"
            )
    if not any(weights):
        raise ValueError(
            "finetune.loss: 'mix' with ce_weight 0 and kl_weight 0 trains nothing; raise one"
        )
    if not linearized_modules(model):
        raise ValueError("finetune: this model has no linearized layer; convert it first")


# ------------------------------------------------------------------------------------- what trains
def attention_projections(model):
    """Names such as "self_attn.q_proj": every linear layer of the converted attention modules."""
    names = {}
    attention = set(linearized_modules(model).values())
    for path, module in model.named_modules():
        if module in attention:
            parent = path.rpartition(".")[2]
            for name, child in module.named_modules():
                if isinstance(child, (nn.Linear, Conv1D)) and name.partition(".")[0] != NEW:
                    names[f"{parent}.{name}"] = None
    return list(names)


def add_lora(model, targets, *, rank, alpha, train_linearized):
    """A PeftModel of `model`, in place, with fp32 LoRA on `targets`, each of which must match."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    if not targets:
        raise ValueError("finetune.targets: empty; name the projections that get LoRA")
    found = {t: [m for name, m in layers.items() if f".{name}".endswith(f".{t}")] for t in targets}
    for target, modules in found.items():
        if not modules:
            names = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise ValueError(
                f"finetune.targets: {target!r} is no linear layer of this model; "
                f"choose from {names}"
            )
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets),
        modules_to_save=[NEW] if train_linearized else None,
        fan_in_fan_out=any(isinstance(m, Conv1D) for modules in found.values() for m in modules),
    )
    with warnings.catch_warnings():  # peft asks for a property that transformers is about to rename
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(model, config)


@contextmanager
def _fp32_weights(model, *, train_linearized):
    """The model with every weight in fp32 and trainable; each gets its own dtype back."""
    dtypes = [(p, p.dtype) for p in model.parameters()]
    new = {
        p for module in linearized_modules(model).values() for p in module.linearized.parameters()
    }
    for parameter, _ in dtypes:
        parameter.data = parameter.data.float()
        parameter.requires_grad_(
            parameter not in new or (train_linearized and parameter.requires_grad)
        )
    try:
        yield model
    finally:
        for parameter, dtype in dtypes:
            parameter.data = parameter.data.to(dtype)


def _window_only(model):
    return branches(model, linear=False)


@contextmanager
def _checkpointed(model):
    """Activations of a layer are recomputed in the backward pass."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"gradient_checkpointing: {type(model).__name__} does not support it; leave it off"
        )
    model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
    try:
        yield
    finally:
        model._set_gradient_checkpointing(False)


# ----------------------------------------------------------------------------------- the objective
class LogitObjective:
    """ce_weight * CE + kl_weight * KL(teacher || student); see `training.Objective`."""

    def __init__(
        self, model, ce_weight, kl_weight, *, learning_rates=None, frozen=None, autocast=None
    ):
        """`frozen` is a copy that serves as teacher; None: the model itself, with adapters off."""
        self.adapted = model if isinstance(model, PeftModel) else None
        self.student = model.get_base_model() if self.adapted else model
        self.frozen, self.autocast = frozen, autocast
        self.ce_weight, self.kl_weight = ce_weight, kl_weight
        self.groups = [[p for p in model.parameters() if p.requires_grad]]
        inside = set(decoder_of(self.student).parameters()) - set(
            self.student.get_output_embeddings().parameters()
        )
        self.head = [p for p in self.student.parameters() if p.requires_grad and p not in inside]
        self.learning_rates, self.state = learning_rates or {}, {}

    def start(self, model, dataset):
        pass

    def count(self, batch):
        return int((batch["labels"][:, 1:] != -100).sum())

    def __call__(self, model, batch, generator):
        following = batch["labels"][:, 1:]
        there = following != -100  # [B, T - 1]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        taught = None
        if self.kl_weight:
            with self._teacher() as language_model:
                said = run_body(language_model, **inputs)
            taught = said.last_hidden_state[:, :-1][there], partial(self._teacher_logits, said)
        with self._autocast():
            body = run_body(self.student, call=model, **inputs)
            return token_losses(
                body.last_hidden_state[:, :-1][there],
                following[there],
                lambda rows: head_logits(self.student, body, rows[None])[0],
                ce_weight=self.ce_weight,
                kl_weight=self.kl_weight,
                teacher=taught,
                parameters=self.head,
            )

    def _autocast(self):
        device = self.student.device.type
        return torch.autocast(device, self.autocast) if self.autocast else nullcontext()

    @contextmanager
    def _teacher(self):
        """The model before this stage: softmax attention, in eval mode, without gradients."""
        language_model = self.frozen or self.student
        adapters_off = self.adapted.disable_adapter() if self.adapted else nullcontext()
        with adapters_off, teacher(language_model), evaluating(language_model):
            yield language_model

    def _teacher_logits(self, body, rows):
        with self._teacher() as language_model:
            return head_logits(language_model, body, rows[None])[0]
