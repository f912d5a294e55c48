"""Parity: equal ways are found equal, and a fault in any one of them is found."""

import pytest
import torch
from conftest import tiny_linearized, tiny_llama

from linearize.evaluation.parity import LARGEST_KL, parity
from linearize.modeling import cache
from linearize.modeling.attention import LinearizedHeads

NAMES = ("chunked", "decode", "padding", "packing", "window_covers_all")


def failing(found):
    return {name for name, check in found["checks"].items() if not check["agrees"]}


def test_all_ways_agree_and_say_how_closely():
    found = parity(tiny_linearized(sinks=2))
    assert tuple(found["checks"]) == NAMES
    assert found["agrees"] and failing(found) == set()
    assert found["tokens"] == 4 * (4 + 2) and found["dtype"] == "float32"
    for check in found["checks"].values():
        assert check["max_logit_difference"] < 1e-4 and abs(check["kl"]) < 1e-6
    assert found["largest_kl"] == LARGEST_KL[torch.float32]


def test_rounding_of_bfloat16_is_allowed_for():
    found = parity(tiny_linearized(sinks=2).to(torch.bfloat16))
    assert found["agrees"]
    assert max(check["max_logit_difference"] for check in found["checks"].values()) > 1e-4


def test_a_state_that_forgets_is_found(monkeypatch):
    write = cache.LinearizedLayer.write

    def forgetful(self, state, k, v, valid):
        write(self, state._replace(S=state.S * 0.5), k, v, valid)

    monkeypatch.setattr(cache.LinearizedLayer, "write", forgetful)
    assert failing(parity(tiny_linearized(sinks=2))) == {"chunked", "decode"}


@pytest.mark.parametrize(("argument", "check"), [("valid", "padding"), ("documents", "packing")])
def test_borders_that_are_ignored_are_found(monkeypatch, argument, check):
    forward = LinearizedHeads.forward

    def blind(self, q, k, v, **inputs):
        return forward(self, q, k, v, **inputs | {argument: None})

    monkeypatch.setattr(LinearizedHeads, "forward", blind)
    assert failing(parity(tiny_linearized(sinks=2))) == {check}


def test_a_window_that_does_not_cover_all_is_found(monkeypatch):
    from linearize.evaluation import parity as module

    exact_keys = module.exact_keys

    def short(model, *, window):
        return exact_keys(model, window=window - 4, linear=False)

    monkeypatch.setattr(module, "exact_keys", short)
    assert failing(parity(tiny_linearized())) == {"window_covers_all"}


def test_families_without_positions_leave_packing_out(monkeypatch):
    monkeypatch.setattr("linearize.evaluation.parity.NO_POSITIONS", ("llama",))
    assert "packing" not in parity(tiny_linearized())["checks"]


def test_the_model_is_left_as_it_was():
    model = tiny_linearized(sinks=2).train()
    parity(model, length=20)
    assert model.training and model.model.layers[0].self_attn.linearized.window == 4


def test_a_softmax_model_is_refused():
    with pytest.raises(ValueError, match=r"^parity: this model has no linearized layer"):
        parity(tiny_llama())
