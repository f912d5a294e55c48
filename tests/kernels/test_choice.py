"""Which path a call takes, and what is said about it. No kernel runs here."""

import logging
import subprocess
import sys

import pytest
import torch

from linearize.kernels import choice, configs, find, find_step
from linearize.kernels.operators import hybrid, hybrid_step

CALL = dict(window=4, sinks=1, features=8)


def tensors(dtype=torch.float32, dim=8, device="cpu"):
    return [torch.zeros(1, heads, 3, dim, dtype=dtype, device=device) for heads in (2, 1, 1)]


@pytest.fixture
def here(monkeypatch):
    """As if the kernels could run."""
    monkeypatch.setattr(choice, "_unavailable", lambda device, mode: None)
    monkeypatch.setattr(choice, "architecture", lambda device: "sm_90")


@pytest.fixture
def said(caplog):
    choice._log.cache_clear()
    caplog.set_level(logging.INFO, "linearize.kernels")
    return caplog


def test_a_cpu_takes_the_torch_path_and_says_so_once(said, monkeypatch):
    monkeypatch.delenv("LINEARIZE_KERNELS", raising=False)
    monkeypatch.setattr(choice, "INSTALLED", True)
    assert find(*tensors(), **CALL) is None
    assert find(*tensors(), **CALL) is None
    assert said.messages == [
        "linearized attention, prefill and training: torch (the tensors are on cpu, not on a GPU)"
    ]


@pytest.mark.usefixtures("here")
def test_the_kernels_are_found_unless_torch_is_wanted(said, monkeypatch):
    assert find(*tensors(), **CALL) is hybrid
    assert "triton kernels (sm_90, float32)" in said.messages[-1]
    assert find(*tensors(), **CALL, mode="torch") is None
    monkeypatch.setenv("LINEARIZE_KERNELS", "torch")
    assert find(*tensors(), **CALL) is None
    assert "torch (LINEARIZE_KERNELS=torch)" in said.messages[-1]


REFUSALS = {
    "dtype float64": dict(dtype=torch.float64),
    "head size 160 is above 128": dict(dim=160),
    "320 features are above 256": dict(features=320),
    "65 sinks are above 64": dict(sinks=65),
    "there is no window": dict(window=0),
    "the linear part is off": dict(linear=False),
    "the window is a terrace": dict(terraced=True),
    "scores are soft-capped": dict(softcap=30.0),
    "the teacher has a learned sink logit": dict(sink_logit=torch.zeros(2)),
    "the keys have log features": dict(log_k=True),
    "rows are padded": dict(padded=True),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("reason", "settings"), REFUSALS.items(), ids=REFUSALS)
def test_what_the_kernels_cannot_do_is_said(reason, settings, said):
    shape = {key: settings[key] for key in ("dtype", "dim") if key in settings}
    call = {**CALL, **{key: x for key, x in settings.items() if key not in shape}}
    assert find(*tensors(**shape), **call, mode="auto") is None
    assert reason in said.messages[-1]
    with pytest.raises(ValueError, match=f"the kernels cannot do this .*{reason}"):
        find(*tensors(**shape), **call, mode="triton")


@pytest.mark.usefixtures("here")
def test_dtypes_that_differ():
    q, k, v = tensors()
    assert find(q, k, v.half(), **CALL, mode="auto") is None


@pytest.mark.usefixtures("here")
def test_the_step_knows_two_maps_and_owns_its_state(said):
    q, k, v = (x[:, :, :1] for x in tensors())
    state = (torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8))
    call = dict(window=4, sinks=1, mode="auto")
    assert find_step(q, k, v, state, feature_map="centroids", **call) is hybrid_step
    assert find_step(q, k, v, state, feature_map=None, **call) is None
    assert "hedgehog and centroids" in said.messages[-1]
    assert find_step(q, k, v, (torch.zeros(1, 2, 8, 4).mT,), feature_map="hedgehog", **call) is None
    assert "view" in said.messages[-1]


def test_an_unknown_mode():
    with pytest.raises(ValueError, match="LINEARIZE_KERNELS: 'gpu' is not known; choose one of"):
        find(*tensors(), **CALL, mode="gpu")


def test_without_triton(monkeypatch):
    monkeypatch.setattr(choice, "INSTALLED", False)
    with pytest.raises(ValueError, match="pip install triton"):
        find(*tensors(), **CALL, mode="triton")


def test_a_gpu_without_a_row(monkeypatch):
    monkeypatch.setattr(choice, "INSTALLED", True)
    monkeypatch.setattr(choice, "interpreted", lambda: False)
    monkeypatch.setattr(choice, "architecture", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU 9000")
    assert choice._unavailable(torch.device("cuda"), "auto").startswith("GPU 9000 is none of")


def test_asking_for_a_kernel_loads_none_on_a_cpu():
    code = (
        "import sys, torch; from linearize import kernels; x = torch.zeros(1, 1, 3, 8);"
        "kernels.find(x, x, x, window=4, sinks=1, features=8);"
        "print(*(m for m in sys.modules if m.startswith('linearize.kernels.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"linearize.kernels.choice", "linearize.kernels.configs"}


def test_every_architecture_has_every_row():
    rows = set(configs.TABLE["sm_90"])
    assert all(set(table) == rows for table in configs.TABLE.values())
    assert {size for _, size in rows} == {64, 128}


@pytest.mark.parametrize(
    ("size", "tile"), [(1, 16), (16, 16), (17, 32), (80, 128), (128, 128)], ids=str
)
def test_padded(size, tile):
    assert configs.padded(size) == tile
