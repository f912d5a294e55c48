"""The training loop of both stages: one transformers Trainer with exact accumulation and resume.

A stage is an *objective*: it says what the loss of a batch is and what it is divided by. The loop
does the rest. A checkpoint holds the tensors that train, never the frozen model, and is complete or
absent.
"""

import hashlib
import json
import math
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from linearize.tracking import Log, flat, nested, trackers

TENSORS = "trainable.safetensors"
STAGE = "stage.json"
RESUME = ("auto", "never")


class Objective(Protocol):
    """What a stage minimises."""

    groups: list  # [[parameter, ...], ...]; the loss is the mean over groups, clipped per group
    learning_rates: dict  # {part of a parameter's name: its own largest learning rate}
    state: dict  # numbers that belong to the objective and travel in the checkpoint, as JSON
    progress: float  # share of the optimiser steps that are done; set before each

    def start(self, model, dataset):
        """Sets `state` before the first step; not called when a run is resumed."""

    def count(self, batch) -> int:
        """What the summed loss is divided by, together with the rest of the effective batch."""

    def __call__(self, model, batch, generator):
        """(summed loss, {name: summed part}); a part "a.b" is nested in the log.

        `generator` is reseeded at each optimiser step.
        """


def train(
    model,
    dataset,
    objective,
    *,
    stage,
    settings,
    output_dir,
    max_tokens,
    max_steps,
    batch_size,
    accumulation,
    learning_rate,
    warmup,
    clip,
    seed,
    save_steps,
    logging_steps,
    resume,
    progress,
    report_to,
):
    """Metrics of a training run; trains what requires a gradient.

    `settings` is what defines the result besides the arguments here: a run is only resumed under
    equal settings, and one that is finished is only loaded. The number of steps is `max_steps`, or
    as many as fit into `max_tokens`, or one pass over the data. The learning rate warms up over the
    fraction `warmup` of the steps and then follows a cosine to zero. `clip` 0 or None: no clipping.
    `resume` "auto" or "never" (start over). `report_to` as in `trackers`.
    """
    output_dir = Path(output_dir)
    args = _arguments(
        model, output_dir, batch_size, accumulation, learning_rate, clip, seed, logging_steps
    )
    args.max_steps = _num_steps(args, dataset, max_tokens, max_steps)
    args.warmup_steps = round(warmup * args.max_steps)
    args.save_steps = save_steps or args.max_steps
    args.run_name = stage  # what trackers call it
    settings = dict(
        stage=stage,
        steps=args.max_steps,
        batch_size=batch_size,
        accumulation=accumulation,
        learning_rate=learning_rate,
        warmup=warmup,
        clip=clip,
        seed=seed,
        length=dataset.length,
        data=dataset.description,
        **settings,
    )
    checkpoint = _checkpoint_to_resume(output_dir, settings, resume)
    callbacks = [Log(stage, progress), *trackers(report_to)]
    trainer = StageTrainer(model, args, dataset, objective, settings, callbacks)
    if checkpoint is None:
        objective.start(trainer.model, dataset)
        trainer.train()
    elif _step(Path(checkpoint)) < args.max_steps:
        trainer.train(resume_from_checkpoint=checkpoint)
    else:
        trainer.load_finished(checkpoint)
    return trainer.metrics()


def _arguments(
    model, output_dir, batch_size, accumulation, learning_rate, clip, seed, logging_steps
):
    """Trainer's arguments; the model stays on the kind of device that it is on."""
    on_cpu = model.device.type == "cpu"
    return TrainingArguments(
        str(output_dir),
        use_cpu=on_cpu,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        weight_decay=0.0,
        max_grad_norm=clip or 0.0,
        seed=seed,
        logging_steps=logging_steps,
        logging_nan_inf_filter=False,
        include_num_input_tokens_seen="all",
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to=[],  # see `trackers`
    )


def _num_steps(args, dataset, max_tokens, max_steps):
    if max_tokens is not None and max_steps is not None:
        raise ValueError(
            f"max_tokens: {max_tokens} and max_steps: {max_steps} exclude each other; give one"
        )
    if not len(dataset):
        raise ValueError(
            "data: there is not one row to train on; add text or choose a smaller length"
        )
    batch = (
        args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    )  # rows
    if max_steps is None:
        max_steps = (
            len(dataset) // batch if max_tokens is None else max_tokens // (batch * dataset.length)
        )
    return max(1, max_steps)


# ---------------------------------------------------------------------------------------- the loop
class StageTrainer(Trainer):
    """A Trainer whose loss is an objective's sum over the count of the whole effective batch."""

    def __init__(self, model, args, dataset, objective, settings, callbacks):
        self.objective, self.settings = objective, settings
        super().__init__(
            model,
            args,
            train_dataset=dataset,
            data_collator=collate,
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
        self.seconds_before, self.started = 0.0, time.perf_counter()
        self.parts, self.steps_in_parts = {}, 0

    # -- the step
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        key = f"{self.args.seed}/{self.state.global_step}/{self.args.process_index}".encode()
        self.generator = torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(key).digest()[:7])
        )
        self.objective.progress = self.state.global_step / self.args.max_steps
        self.steps_in_parts += 1
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples, device):
        count = sum(self.objective.count(batch) for batch in batch_samples)
        return self.accelerator.reduce(torch.tensor(count, device=device), "sum").clamp(min=1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        total, parts = self.objective(model, inputs, self.generator)
        scale = (
            self.accelerator.num_processes / num_items_in_batch
        )  # gradients are averaged over processes
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value.detach() * scale
        return total * scale

    def _clip_grad_norm(self, model):
        groups = self.objective.groups
        limit = self.args.max_grad_norm / len(groups)
        return torch.stack(
            [torch.nn.utils.clip_grad_norm_(group, limit) for group in groups]
        ).norm()

    def create_optimizer(self, model=None):
        own = self.objective.learning_rates
        if own and self.optimizer is None:
            groups = {self.args.learning_rate: []}  # the first is the one that is logged
            for name, parameter in (model or self.model).named_parameters():
                if parameter.requires_grad:
                    rates = (rate for part, rate in own.items() if part in name.split("."))
                    groups.setdefault(next(rates, self.args.learning_rate), []).append(parameter)
            groups = [
                {"params": group, "lr": rate, "weight_decay": self.args.weight_decay}
                for rate, group in groups.items()
            ]
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer_cls_and_kwargs = kind, options | {"params": groups}
        return super().create_optimizer(model)

    # -- the log
    def log(self, logs, start_time=None):
        if "loss" not in logs:  # Trainer's closing summary; metrics() is ours
            return
        values = torch.stack(
            [torch.as_tensor(v, device=self.args.device) for v in self.parts.values()]
        )
        values = self.accelerator.reduce(values, "mean") / self.steps_in_parts
        entry = {"step": self.state.global_step, "loss": logs["loss"]}
        entry |= nested(zip(self.parts, values.tolist(), strict=True))
        entry |= {"learning_rate": logs["learning_rate"], "grad_norm": logs["grad_norm"]}
        entry |= {"tokens": self.state.num_input_tokens_seen, "seconds": round(self.seconds, 3)}
        if not math.isfinite(entry["loss"]):
            raise ValueError(
                f"learning_rate: the loss became {entry['loss']} by step {entry['step']} under "
                f"{self.args.learning_rate:g}; lower it or clip, or lengthen warmup"
            )
        self.parts, self.steps_in_parts = {}, 0
        self.state.log_history.append(entry)
        self.control = self.callback_handler.on_log(
            self.args, self.state, self.control, flat(entry, self.settings["stage"])
        )

    @property
    def seconds(self):
        return self.seconds_before + time.perf_counter() - self.started

    def metrics(self):
        """What the run cost and how its loss went."""
        last = self.state.log_history[-1]  # the last step is always logged
        return {
            "tokens": last["tokens"],
            "steps": last["step"],
            "seconds": last["seconds"],
            "tokens_per_s": round(last["tokens"] / last["seconds"], 1),
            "history": self.state.log_history,
        }

    # -- checkpoints
    def _save_checkpoint(self, model, trial):
        """Writes the checkpoint aside and then renames it: a kill leaves no half of one."""
        output_dir, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        self._clear(output_dir / "unfinished")
        self.args.output_dir = str(output_dir / "unfinished")
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.output_dir = str(output_dir)
        self._clear(output_dir / name)
        if self.is_world_process_zero():
            (output_dir / "unfinished" / name).rename(output_dir / name)
            (output_dir / "unfinished").rmdir()
            for old in sorted(output_dir.glob("checkpoint-*"), key=_step)[:-2]:
                shutil.rmtree(old)

    def _clear(self, folder):
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero() and folder.exists():
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir=None, state_dict=None):
        if not self.args.should_save:
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: p.detach().cpu().contiguous() for name, p in self.tensors()}, folder / TENSORS
        )
        stage = {"settings": self.settings, "objective": self.objective.state}
        (folder / STAGE).write_text(json.dumps(stage, indent=1))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.objective.state = json.loads(Path(resume_from_checkpoint, STAGE).read_text())[
            "objective"
        ]
        self.seconds_before = _read_state(resume_from_checkpoint).log_history[-1][
            "seconds"
        ]  # a save always logs
        self.load_tensors(resume_from_checkpoint)

    def load_finished(self, checkpoint):
        """Takes weights and history from the last checkpoint of a finished run."""
        self.load_tensors(checkpoint)
        self.state = _read_state(checkpoint)

    def tensors(self):
        """(name, parameter) of everything that trains."""
        return [
            (name, p)
            for name, p in self.accelerator.unwrap_model(self.model).named_parameters()
            if p.requires_grad
        ]

    @torch.no_grad()
    def load_tensors(self, checkpoint):
        """Gives the parameters that train the values of a checkpoint."""
        saved, own = load_file(Path(checkpoint, TENSORS)), dict(self.tensors())
        if differing := sorted(saved.keys() ^ own.keys()):
            raise ValueError(
                f"output_dir: {checkpoint} holds other parameters than this model trains (first "
                f"difference: {differing[0]}); "
                'use another output_dir, or resume="never" to start over'
            )
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def collate(rows):
    """Rows of a TokenDataset as one batch of tensors [B, T]."""
    return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}


# ------------------------------------------------------------------------------------------ resume
def _checkpoint_to_resume(output_dir, settings, resume):
    """The newest checkpoint if it belongs to the same run, or None."""
    if resume not in RESUME:
        raise ValueError(f"resume: {resume!r} is not allowed; choose from {', '.join(RESUME)}")
    checkpoint = get_last_checkpoint(output_dir) if output_dir.is_dir() else None
    if resume == "never":
        for folder in output_dir.glob("checkpoint-*"):
            shutil.rmtree(folder, ignore_errors=True)  # every process does it
        return None
    if checkpoint is None:
        return None
    saved = json.loads(Path(checkpoint, STAGE).read_text())["settings"]
    settings = json.loads(json.dumps(settings))
    for key in settings | saved:
        if saved.get(key) != settings.get(key):
            raise ValueError(
                f"{key}: {output_dir} was started with {saved.get(key)!r}, this run has "
                f"{settings.get(key)!r}; "
                'use the same settings, another output_dir, or resume="never" to start over'
            )
    return checkpoint


def _step(folder):
    return int(folder.name.rpartition("-")[2])


def _read_state(checkpoint):
    return TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))


# ----------------------------------------------------------------------- the model during training
@contextmanager
def preserved(model):
    """Gives back what training changes besides weights: requires_grad, modes, config.use_cache."""
    trainable = [(p, p.requires_grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    config, use_cache = model.config, model.config.use_cache
    try:
        yield
    finally:
        config.use_cache = use_cache
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)
        for module, flag in modes:
            module.training = flag


@contextmanager
def evaluating(model):
    """Every module in eval mode, without gradients; each gets its own mode back."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in modes:
            module.training = flag
