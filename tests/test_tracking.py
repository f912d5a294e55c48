"""What training tells experiment trackers; its log file and bar are tested in test_training."""

import json

import pytest
import torch
from test_training import run
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from linearize import tracking
from linearize.tracking import flat, trackers


class Recorder(TrainerCallback):
    """A tracker that keeps what it hears."""

    heard = ()

    def on_train_begin(self, args, state, control, **kwargs):
        self.heard.append(args.run_name)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.heard.append(logs)


@pytest.fixture
def recorder(monkeypatch):
    """The tracker "wandb" is a Recorder."""
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Recorder)
    monkeypatch.setattr(Recorder, "heard", [])
    return Recorder


@pytest.mark.parametrize("report_to", ["wandb", ["wandb"]], ids=["name", "list"])
def test_a_tracker_hears_the_stage_and_every_number_of_the_log(tmp_path, recorder, report_to):
    run(tmp_path, report_to=report_to, max_steps=2)
    name, *logged = recorder.heard
    entries = [json.loads(line) for line in (tmp_path / tracking.LOG).read_text().splitlines()]
    assert name == "test" and len(logged) == len(entries) == 2
    for numbers, entry in zip(logged, entries):
        assert numbers == flat(entry, "test")
        assert numbers["test/layers/1"] == entry["layers"]["1"]
        assert all(isinstance(number, int | float) for number in numbers.values())


def test_a_tracker_changes_no_result(tmp_path, recorder):
    (_, alone, _), (_, watched, _) = run(tmp_path / "a"), run(tmp_path / "b", report_to="wandb")
    for one, other in zip(alone.parameters(), watched.parameters()):
        assert torch.equal(one, other)
    assert recorder.heard


@pytest.mark.parametrize("report_to", [(), "none", ["none"]], ids=str)
def test_nobody_is_told_unless_somebody_is_named(recorder, report_to):
    assert trackers(report_to) == []


@pytest.mark.parametrize("report_to", ["all", ["all"]], ids=str)
def test_all_are_those_that_are_installed(monkeypatch, recorder, report_to):
    monkeypatch.setattr(
        integration_utils, "get_available_reporting_integrations", lambda: ["wandb"]
    )
    assert [type(tracker) for tracker in trackers(report_to)] == [Recorder]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: False)
    with pytest.raises(ValueError, match=r"report_to: .* requires trackio to be installed"):
        trackers(["trackio"])


def test_an_unknown_tracker_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"report_to: paper is not supported, only .*wandb"):
        trackers("paper")
