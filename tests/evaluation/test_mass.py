"""The linear branch's share of the attention weight, against the definition row by row."""

import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama

from linearize.evaluation.mass import linear_mass
from linearize.modeling import attention

WINDOW, SINKS, LENGTH = 4, 2, 24
IDS = random_ids(1, 2 * LENGTH + 1)[0]


def all_queries(model, **options):
    return linear_mass(model, None, IDS, length=LENGTH, num_queries=10**3, **options)


def test_shares_are_those_of_the_definition(monkeypatch):
    model = tiny_linearized(sinks=SINKS)
    found = all_queries(model)
    assert (found["num_windows"], set(found["layers"])) == (2, {"0", "1"})
    seen = {0: [], 1: []}
    owners = {m.linearized: i for i, m in attention.linearized_modules(model).items()}
    forward = attention.LinearizedHeads.forward

    def record(self, q, k, v, **inputs):
        rows = attention.hybrid_quadratic(self.operator(scaling=inputs["scaling"]), q, k, v)
        wide = attention.hybrid_quadratic(
            attention.Hybrid(**{**vars(self.operator(scaling=inputs["scaling"])), "window": LENGTH,
                                "linear": False}), q, k, v,
        )  # fmt: skip
        i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
        past = (j <= i - WINDOW) & (j >= SINKS)
        softmax = (wide.log_weights.exp() * past).sum(-1)
        beyond = slice(WINDOW + SINKS, None)
        layer = owners[self]
        seen[layer].append(
            (rows.linear_mass[0, :, beyond].mean(-1), softmax[0, :, beyond].mean(-1))
        )
        return forward(self, q, k, v, **inputs)

    monkeypatch.setattr(attention.LinearizedHeads, "forward", record)
    with torch.no_grad():
        for begin in (0, LENGTH):
            model(IDS[None, begin : begin + LENGTH], use_cache=False)
    for layer, windows in seen.items():
        linear, softmax = (torch.stack(x) for x in zip(*windows, strict=True))
        row = found["layers"][str(layer)]
        assert row["linear"] == pytest.approx(linear.mean(0).tolist(), abs=1e-5)
        assert row["softmax"] == pytest.approx(softmax.mean(0).tolist(), abs=1e-5)
        error = (linear.double().std(0) / 2**0.5).tolist()
        assert row["linear_se"] == pytest.approx(error, abs=1e-5)
    means = [sum(found["layers"][x]["linear"]) / 4 for x in "01"]
    assert found["linear"] == pytest.approx(sum(means) / 2)
    assert 0.01 < found["linear"] < 0.99 and 0.01 < found["softmax"] < 0.99


def test_a_silent_branch_has_no_share():
    model = tiny_linearized(sinks=SINKS)
    with torch.no_grad():
        for module in attention.linearized_modules(model).values():
            module.linearized.beta += 60  # the weight of the window's best key
    found = all_queries(model)
    assert found["linear"] < 1e-6 < found["softmax"]


def test_short_texts_have_nothing_beyond_the_window():
    found = linear_mass(tiny_linearized(sinks=SINKS), None, IDS[:6], length=LENGTH)
    assert found["layers"] == {} and found["num_windows"] == 0 and "linear" not in found


def test_so_many_windows_and_no_more():
    found = all_queries(tiny_linearized(), num_windows=1)
    assert found["num_windows"] == 1
    assert found["layers"]["0"]["linear_se"] == [None] * 4


def test_the_model_keeps_no_hook():
    model = tiny_linearized(sinks=SINKS)
    all_queries(model)
    hooks = [module._forward_hooks for module in model.modules()]
    assert not any(hooks)


def test_a_softmax_model_is_refused():
    with pytest.raises(ValueError, match=r"^linear_mass: this model has no linearized layer"):
        linear_mass(tiny_llama(), None, IDS)
