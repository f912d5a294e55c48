"""The training loop with a plain objective: accumulation, resume, checkpoints, log."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linearize import training
from linearize.training import evaluating, preserved
from tests.conftest import random_ids, tiny_llama
from tests.tolerances import ACCUMULATION

NORM = "model.norm.weight"
TRAINED = ("lm_head.weight", NORM)


class Rows(torch.utils.data.Dataset):
    """Random rows of which the first `scored[i]` tokens count."""

    def __init__(self, scored, length=32):
        self.ids, self.length = random_ids(len(scored), length), length
        self.description = {"sha256": "rows"}
        self.labels = self.ids.clone()
        for row, count in zip(self.labels, scored):
            row[count + 1 :] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class SummedCrossEntropy:
    """A small objective. `noise` draws from both random streams; `fails_at` simulates a kill."""

    def __init__(self, model, *, noise=0.0, fails_at=None):
        self.groups = [[p] for name, p in model.named_parameters() if name in TRAINED]
        self.noise, self.fails_at = noise, fails_at
        self.learning_rates = {}
        self.state, self.calls, self.rows, self.started = {}, 0, [], 0

    def start(self, model, dataset):
        self.started += 1
        self.state = {"scale": 1.5}

    def count(self, batch):
        return int((batch["labels"][:, 1:] != -100).sum())

    def __call__(self, model, batch, generator):
        self.calls += 1
        if self.calls == self.fails_at:
            raise InterruptedError("killed")
        self.rows += batch["input_ids"][:, :2].tolist()
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        noise = self.noise * (torch.rand(1) + torch.rand(1, generator=generator))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1) + noise * torch.rand(logits.shape[-1]),
            batch["labels"][:, 1:].flatten(),
            reduction="sum",
        )
        loss = loss * self.state["scale"]
        return loss, {"ce": loss, "layers.0": loss, "layers.1": 2 * loss}


def run(folder, *, scored=(9,) * 12, noise=0.0, fails_at=None, seed=0, model=None, **options):
    """(metrics, model, objective) of a run that trains the head and the last norm."""
    model = tiny_llama() if model is None else model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in TRAINED)
    objective = SummedCrossEntropy(model, noise=noise, fails_at=fails_at)
    defaults = dict(
        max_tokens=None, max_steps=4, batch_size=2, accumulation=2, learning_rate=1e-2, warmup=0.25,
        clip=1.0, save_steps=None, logging_steps=1, resume="auto", progress=False, stage="test",
        settings={"loss": "ce"}, report_to=(),
    )  # fmt: skip
    metrics = training.train(
        model, Rows(scored), objective, output_dir=folder, seed=seed, **{**defaults, **options}
    )
    return metrics, model, objective


def without_times(history):
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in history]


# ------------------------------------------------------------------------------ accumulation
def gradients_of_one_step(folder, scored, batch_size, accumulation):
    """Gradients before clipping, and the logged loss."""
    model = tiny_llama()
    found = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in TRAINED)
        if name in TRAINED:
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: found.update({name: p.grad.clone()})
            )
    metrics, *_ = run(
        folder, scored=scored, model=model, max_steps=1, batch_size=batch_size,
        accumulation=accumulation,
    )  # fmt: skip
    return found, metrics["history"][0]


def test_eight_batches_of_one_equal_one_batch_of_eight(tmp_path):
    scored = (4, 30, 4, 30, 1, 17, 0, 9)
    small, small_log = gradients_of_one_step(tmp_path / "1x8", scored, 1, 8)
    large, large_log = gradients_of_one_step(tmp_path / "8x1", scored, 8, 1)
    for name in TRAINED:
        gap = (small[name] - large[name]).norm() / large[name].norm()
        assert gap < ACCUMULATION, name
    assert small_log["loss"] == pytest.approx(large_log["loss"], rel=ACCUMULATION)
    assert small_log["grad_norm"] == pytest.approx(large_log["grad_norm"], rel=ACCUMULATION)


def test_the_logged_loss_is_the_mean_over_counted_tokens(tmp_path):
    metrics, *_ = run(tmp_path, scored=(4, 30), batch_size=1, accumulation=2, max_steps=1)
    rows, model = Rows((4, 30)), tiny_llama()
    with torch.no_grad():
        logits = model(input_ids=rows.ids).logits[:, :-1].flatten(0, 1)
    expected = 1.5 * torch.nn.functional.cross_entropy(logits, rows.labels[:, 1:].flatten())
    entry = metrics["history"][0]
    assert entry["loss"] == pytest.approx(expected.item(), rel=ACCUMULATION)
    assert entry["ce"] == pytest.approx(entry["loss"], rel=ACCUMULATION)
    assert entry["layers"]["1"] == pytest.approx(2 * entry["loss"], rel=ACCUMULATION)


def test_each_group_is_clipped_by_its_own_norm(tmp_path, monkeypatch):
    limits = []
    clip = torch.nn.utils.clip_grad_norm_

    def record(parameters, limit):
        limits.append((len(list(parameters)), limit))
        return clip(parameters, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    run(tmp_path, max_steps=1, clip=0.5)
    assert limits == [(1, 0.25), (1, 0.25)]


def test_clip_none_leaves_the_gradient_alone(tmp_path):
    free, *_ = run(tmp_path / "none", max_steps=1, clip=None)
    tight, *_ = run(tmp_path / "tight", max_steps=1, clip=1e-3)
    assert free["history"][0]["grad_norm"] == pytest.approx(tight["history"][0]["grad_norm"])


# ------------------------------------------------------------------------------ resume
OPTIONS = dict(noise=0.5, max_steps=10, save_steps=5, logging_steps=3, warmup=0.3)


def test_a_killed_and_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    whole, model, objective = run(tmp_path / "whole", **OPTIONS)
    with pytest.raises(InterruptedError):
        run(tmp_path / "killed", fails_at=2 * 7 + 1, **OPTIONS)
    again, resumed, rest = run(tmp_path / "killed", **OPTIONS)
    for name in TRAINED:
        assert torch.equal(model.get_parameter(name), resumed.get_parameter(name)), name
    assert not torch.equal(model.get_parameter(NORM), tiny_llama().get_parameter(NORM))
    assert rest.started == 0 and rest.state == objective.state
    assert objective.rows[5 * 4 :] == rest.rows  # 4 rows per step
    assert len({tuple(row) for row in objective.rows[:12]}) == 12  # a pass sees each row once
    assert objective.rows[:12] != objective.rows[12:24]  # and the next is shuffled anew
    assert without_times(whole["history"]) == without_times(again["history"])
    states = [
        torch.load(tmp_path / name / "checkpoint-10" / "optimizer.pt", weights_only=True)
        for name in ("whole", "killed")
    ]
    for a, b in zip(*(state["state"].values() for state in states), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_noise_of_the_resume_test_matters(tmp_path):
    """Guard: without equal random streams the two runs would differ."""
    one, *_ = run(tmp_path / "one", **{**OPTIONS, "max_steps": 2})
    two, *_ = run(tmp_path / "two", **{**OPTIONS, "max_steps": 2, "noise": 0.0})
    assert one["history"][-1]["loss"] != two["history"][-1]["loss"]


def test_a_finished_run_is_only_loaded(tmp_path):
    first, model, _ = run(tmp_path)
    second, loaded, objective = run(tmp_path)
    assert objective.calls == 0 and first == second
    for name in TRAINED:
        assert torch.equal(model.get_parameter(name), loaded.get_parameter(name))


def test_a_run_under_other_settings_is_refused_by_the_key_that_differs(tmp_path):
    run(tmp_path)
    with pytest.raises(
        ValueError, match=r"learning_rate: .* was started with 0.01, this run has 0.02"
    ):
        run(tmp_path, learning_rate=2e-2)
    with pytest.raises(ValueError, match=r"loss: .* was started with 'ce', this run has 'kl'"):
        run(tmp_path, settings={"loss": "kl"})
    with pytest.raises(ValueError, match=r"stage: .* was started with 'test'"):
        run(tmp_path, stage="other")


def test_never_starts_over(tmp_path):
    run(tmp_path)
    metrics, _, objective = run(tmp_path, learning_rate=2e-2, max_steps=2, resume="never")
    assert objective.started == 1 and metrics["steps"] == 2
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_another_word_for_resume_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"resume: True is not allowed; choose from auto, never"):
        run(tmp_path, resume=True)


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path):
    run(tmp_path)
    folder = tmp_path / "checkpoint-4" / training.TENSORS
    tensors = load_file(folder)
    training.save_file({"other": tensors[NORM]}, folder)
    with pytest.raises(
        ValueError, match=r"holds other parameters than this model trains .*lm_head"
    ):
        run(tmp_path)


# ------------------------------------------------------------------------------ checkpoints
def test_a_checkpoint_holds_what_trains_and_nothing_else(tmp_path):
    run(tmp_path, max_steps=6, save_steps=1)
    assert sorted(p.name for p in tmp_path.glob("*")) == [
        "checkpoint-5",
        "checkpoint-6",
        "log.jsonl",
    ]
    folder = tmp_path / "checkpoint-6"
    assert sorted(p.name for p in folder.iterdir()) == [
        "optimizer.pt", "rng_state.pth", "scheduler.pt", "stage.json", "trainable.safetensors",
        "trainer_state.json",
    ]  # fmt: skip
    assert sorted(load_file(folder / training.TENSORS)) == sorted(TRAINED)


def test_a_kill_while_writing_leaves_no_checkpoint(tmp_path, monkeypatch):
    def killed(self, folder):
        raise InterruptedError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(training.StageTrainer, "_save_rng_state", killed)
        with pytest.raises(InterruptedError):
            run(tmp_path, save_steps=2)
    assert not list(tmp_path.glob("checkpoint-*"))
    metrics, *_ = run(tmp_path, save_steps=2)
    assert metrics["steps"] == 4 and not (tmp_path / "unfinished").exists()


def test_a_checkpoint_is_read_without_unpickling_code(tmp_path, monkeypatch):
    with pytest.raises(InterruptedError):
        run(tmp_path, fails_at=2 * 3 + 1, save_steps=2)
    seen, load = [], torch.load

    def record(*args, weights_only=None, **kwargs):
        seen.append(weights_only)
        return load(*args, weights_only=weights_only, **kwargs)

    monkeypatch.setattr(torch, "load", record)
    run(tmp_path, save_steps=2)
    assert seen == [True] * 3


# ------------------------------------------------------------------------------ length and schedule
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (dict(max_steps=None), 3),
        (dict(max_steps=None, max_tokens=2 * 2 * 32 * 5), 5),
        (dict(max_steps=None, max_tokens=1), 1),
        (dict(max_steps=7), 7),
    ],
    ids=["one-pass", "tokens", "few-tokens", "steps"],
)
def test_number_of_steps(tmp_path, options, steps):
    metrics, *_ = run(tmp_path, **options)
    assert metrics["steps"] == steps and metrics["tokens"] == steps * 2 * 2 * 32


def test_tokens_and_steps_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="max_tokens: 100 and max_steps: 4 exclude each other"):
        run(tmp_path, max_tokens=100)


def test_no_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="data: there is not one row to train on"):
        run(tmp_path, scored=())


def test_the_rate_warms_up_and_falls_along_a_cosine(tmp_path):
    metrics, *_ = run(tmp_path, max_steps=8, warmup=0.25)
    rates = [entry["learning_rate"] for entry in metrics["history"]]
    expected = [0.0, 0.5, *(0.5 * (1 + torch.cos(torch.pi * torch.arange(6) / 6)))]
    assert rates == pytest.approx([1e-2 * float(x) for x in expected], abs=1e-9)


# ------------------------------------------------------------------------------ the log
def test_the_log_file_is_the_history(tmp_path):
    with pytest.raises(InterruptedError):
        run(tmp_path, fails_at=2 * 3 + 1, save_steps=2)
    metrics, *_ = run(tmp_path, save_steps=2)
    lines = Path(tmp_path, "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == metrics["history"]
    assert [entry["step"] for entry in metrics["history"]] == [1, 2, 3, 4]


def test_metrics_add_up(tmp_path):
    metrics, *_ = run(tmp_path)
    last = metrics["history"][-1]
    assert metrics["tokens"] == last["tokens"] == 4 * 4 * 32 and metrics["seconds"] > 0
    assert metrics["tokens_per_s"] == pytest.approx(
        metrics["tokens"] / metrics["seconds"], rel=0.01
    )


def test_the_progress_bar_shows_loss_and_speed(tmp_path, capsys):
    run(tmp_path / "shown", progress=True)
    shown = capsys.readouterr()
    run(tmp_path / "hidden", progress=False)
    hidden = capsys.readouterr()
    assert "test: 100%" in shown.err and "loss=" in shown.err and "tokens_per_s=" in shown.err
    assert not shown.out and not hidden.out and not hidden.err


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path):
    model = tiny_llama()
    model.get_parameter(NORM).data.fill_(float("nan"))
    with pytest.raises(
        ValueError, match=r"learning_rate: the loss became nan by step 1 under 0.01"
    ):
        run(tmp_path, model=model)


# ------------------------------------------------------------------------------ the model around it
def test_preserved_gives_back_flags_modes_and_cache_setting():
    model = tiny_llama()
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    model.model.layers[0].train()
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    modes = {n: m.training for n, m in model.named_modules()}

    def interrupted():
        with preserved(model):
            model.requires_grad_(True).train()
            model.config.use_cache = False
            raise InterruptedError

    with pytest.raises(InterruptedError):
        interrupted()
    assert {n: p.requires_grad for n, p in model.named_parameters()} == before
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert model.config.use_cache is True


def test_evaluating_gives_each_module_its_own_mode_back():
    model = tiny_llama()
    model.model.layers[0].train()
    modes = {n: m.training for n, m in model.named_modules()}
    with evaluating(model):
        assert not any(m.training for m in model.modules()) and not torch.is_grad_enabled()
    assert {n: m.training for n, m in model.named_modules()} == modes
