"""What a training run tells while it runs: its log file, its progress bar, experiment trackers."""

import json
import time
from pathlib import Path

from tqdm import tqdm
from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

LOG = "log.jsonl"


class Log(TrainerCallback):
    """Writes log.jsonl and, if wanted, draws a progress bar with the loss and tokens/s."""

    def __init__(self, stage, progress):
        self.stage, self.progress = stage, progress

    def on_train_begin(self, args, state, control, **kwargs):
        self.file = Path(args.output_dir, LOG)
        self.tokens, self.started = state.num_input_tokens_seen, time.perf_counter()
        self.bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc=self.stage,
            unit="step",
            disable=not (self.progress and state.is_world_process_zero),
        )
        if state.is_world_process_zero:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text("".join(json.dumps(entry) + "\n" for entry in state.log_history))

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()
        control.should_log = (
            control.should_log or control.should_save
        )  # so that a resumed run logs the same lines

    def on_log(self, args, state, control, **kwargs):
        entry = state.log_history[-1]
        speed = (state.num_input_tokens_seen - self.tokens) / (time.perf_counter() - self.started)
        self.bar.set_postfix(loss=f"{entry['loss']:.4g}", tokens_per_s=f"{speed:.0f}")
        if state.is_world_process_zero:
            with self.file.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def trackers(report_to):
    """The callbacks that report to experiment trackers, by the names that TrainingArguments knows.

    report_to: such as "wandb", ["trackio", "tensorboard"], "all" that are installed, or "none".

    Raises:
        ValueError: a tracker that transformers does not know, or whose package is not installed.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    try:
        found = get_reporting_integration_callbacks(
            names[0] if names in (["all"], ["none"]) else names
        )
        return [make() for make in found]
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"report_to: {error}") from None


def flat(entry, stage):
    """{"loss": 1, "layers": {"0": 2}} becomes {"stage/loss": 1, "stage/layers/0": 2}."""
    result = {}
    for name, value in entry.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        result |= {f"{stage}/{name}/{part}".rstrip("/"): number for part, number in parts}
    return result


def nested(items):
    """{"a": 1, "b.c": 2} from pairs becomes {"a": 1, "b": {"c": 2}}."""
    result = {}
    for name, value in items:
        outer, dot, inner = name.partition(".")
        if dot:
            result.setdefault(outer, {})[inner] = value
        else:
            result[outer] = value
    return result
