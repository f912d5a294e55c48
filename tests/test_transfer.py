"""Attention transfer: targets, estimate, what trains, and that layers are independent."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file

from linearize import convert
from linearize.losses import output_error
from linearize.modeling.attention import branches, linearized_modules, transfer
from linearize.modeling.configuration_linearized import K_MAPS, MIXING_RULES
from linearize.modeling.feature_maps import FEATURE_MAPS
from linearize.modeling.rows import take_rows
from linearize.queries import draw_queries, eligible
from linearize.transfer import (
    LOSSES,
    TransferObjective,
    layer_loss,
    transfer_attention,
)
from tests.conftest import ROOT, random_ids, randomize, tiny_linearized, tiny_llama
from tests.definition import make_case
from tests.tolerances import (
    ACCUMULATION,
    GUARD,
    SOFTMAX_FLOAT32,
    TEACHER,
)

UNTRAINABLE = ("favor", "kernel")  # an unbiased estimate of exp(score) has nothing to learn


class Packed(torch.utils.data.Dataset):
    """Rows of random tokens, each cut into documents of the given lengths."""

    def __init__(self, *rows, seed=0):
        self.length = sum(rows[0])
        self.ids = random_ids(len(rows), self.length, seed)
        self.positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
        self.description = {"sha256": str(rows)}

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids, positions = self.ids[index], self.positions[index]
        labels = ids.masked_fill(positions == 0, -100)
        return {"input_ids": ids, "position_ids": positions, "labels": labels}

    def batch(self):
        return {key: torch.stack([row[key] for row in self]) for key in self[0]}

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def linearized(**options):
    with warnings.catch_warnings():  # of pairs that are not recommended, and of dropout
        warnings.simplefilter("ignore")
        return tiny_linearized(**options)


def objective_for(model, data, *, loss="output", num_queries=None, **options):
    """A started objective; only the new parameters require a gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and ".linearized." in name)
    objective = TransferObjective(
        model, loss=loss, attention_weight=0.3, num_queries=num_queries, **options
    )
    objective.start(model, data)
    return objective


def measure(objective, model, batch, seed=0):
    """(summed loss, {layer: summed loss}, gradients by name)."""
    model.zero_grad()
    loss, parts = objective(model, batch, torch.Generator().manual_seed(seed))
    loss.backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {name: value.item() for name, value in parts.items()}, named


def relative(a, b):
    """|a - b| / |b| of two dicts of gradients."""
    assert a.keys() == b.keys() and a
    gap = torch.cat([(a[n] - b[n]).flatten() for n in a]).norm()
    return (gap / torch.cat([b[n].flatten() for n in b]).norm()).item()


LONG = Packed((24,), (24,), seed=1)
MIXED = Packed((5, 9, 10), (24,), (2, 22), (12, 12), seed=2)
STAGE = dict(
    max_steps=6, batch_size=2, accumulation=2, learning_rate=1e-2, num_queries=4, progress=False,
    logging_steps=1,
)  # fmt: skip


# ------------------------------------------------------------------------------ targets
@pytest.mark.parametrize("data", [LONG, MIXED], ids=["one-document", "packed"])
def test_targets_are_the_attention_outputs_of_the_original(data):
    """The inputs of every output projection, recorded in the original, equal the targets."""
    original, seen, targets = tiny_llama(), [], {}
    inputs = {k: v for k, v in data.batch().items() if k != "labels"}
    for layer in original.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        original(**inputs, use_cache=False)

    def observe(module, q, k, v, out, **kwargs):
        targets[module.layer_idx] = out.transpose(1, 2).flatten(2)

    model = tiny_linearized()
    with torch.no_grad(), transfer(model, observe):
        model(**inputs, use_cache=False)
    for layer, expected in enumerate(seen):
        assert torch.allclose(targets[layer], expected, rtol=0, atol=TEACHER)


def test_the_linear_branch_matters_here():
    """Guard: rows of these tests are long enough for the linear branch to change the logits."""
    model, ids = tiny_linearized(), LONG.ids
    with torch.no_grad():
        whole = model(ids).logits
        with branches(model, linear=False):
            assert (model(ids).logits - whole).abs().max() > GUARD


def test_targets_have_no_dropout():
    model = linearized(model=tiny_llama(attention_dropout=0.5))
    objective = objective_for(model, LONG)
    model.train()
    first = measure(objective, model, LONG.batch())
    model.train()
    second = measure(objective, model, LONG.batch())
    assert first[0] == second[0] and first[0] > 0


def test_sdpa_and_eager_teachers_give_the_same_losses():
    losses = []
    for name in ("sdpa", "eager"):
        original = tiny_llama()
        original.set_attn_implementation(name)
        model = tiny_linearized(model=original)
        losses.append(measure(objective_for(model, MIXED), model, MIXED.batch())[1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_window_over_everything_gives_zero_loss(loss):
    """Every query is asked for, though training would draw none of them."""
    data, queries = MIXED, torch.arange(24).expand(4, -1)
    model = tiny_linearized(window=24)
    weights = {"output": (1.0, 0.0), "attention": (0.0, 1.0), "both": (1.0, 1.0)}[loss]
    found = []

    def observe(module, q, k, v, out, *, attention_mask, **inputs):
        ones = torch.ones(queries.shape)
        loss = layer_loss(module.linearized, (q, k, v), out, queries, ones, 1.0, weights, **inputs)
        found.append(loss.item() / queries.numel())

    inputs = {k: v for k, v in data.batch().items() if k != "labels"}
    with torch.no_grad(), transfer(model, observe):
        model(**inputs, use_cache=False)
    assert len(found) == 2 and max(abs(x) for x in found) < SOFTMAX_FLOAT32
    model = tiny_linearized(window=4)
    with torch.no_grad(), transfer(model, observe):  # guard: a small window is far from zero
        model(**inputs, use_cache=False)
    assert min(found[2:]) > GUARD


# ------------------------------------------------------------------------------ the student
def test_losses_of_padded_rows_come_from_the_definition():
    """A padded batch gives the loss of its rows alone."""
    model = tiny_linearized()
    objective = objective_for(model, LONG)
    alone = {"input_ids": LONG.ids[:1]}
    ids = torch.cat([torch.zeros(1, 6, dtype=torch.long), LONG.ids[:1]], 1)
    padded = {"input_ids": ids, "attention_mask": (torch.arange(30) >= 6)[None].long()}
    padded["position_ids"] = (torch.arange(30) - 6).clamp(min=0)[None]
    assert objective.count(padded) == objective.count(alone) == 20
    expected, found = (measure(objective, model, batch) for batch in (alone, padded))
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert relative(found[2], expected[2]) < 1e-4


# ------------------------------------------------------------------------------ which queries
@pytest.mark.parametrize("loss", LOSSES)
def test_the_losses_of_a_partition_of_queries_add_up_to_the_full_loss(loss):
    """In float64; with weights n / Q this makes the estimate of `draw_queries` unbiased."""
    model = tiny_linearized()
    objective = objective_for(model, MIXED, loss=loss)
    batch = MIXED.batch()
    full = measure(objective, model, batch)[1]
    queries, weight = draw_queries(eligible(batch, objective.exact), None, torch.Generator())
    sums = dict.fromkeys(full, 0.0)

    def observe(module, q, k, v, out, *, attention_mask, **inputs):
        for part in torch.arange(queries.shape[1]).chunk(5):
            where = (module.linearized, (q, k, v), out, queries[:, part], weight[:, part])
            energy = objective.state["energy"][str(module.layer_idx)]
            value = layer_loss(*where, energy, objective.weights, **inputs)
            sums[f"layers.{module.layer_idx}"] += value.item()

    objective._forward(model, batch, observe)
    assert sums == pytest.approx(full, rel=1e-6)


def test_the_subsampled_loss_is_close_to_the_full_loss_on_average():
    model = tiny_linearized()
    objective = objective_for(model, MIXED)
    full = measure(objective, model, MIXED.batch())[0]
    objective.num_queries = 3
    draws = [measure(objective, model, MIXED.batch(), seed)[0] for seed in range(80)]
    draws = torch.tensor(draws)
    assert draws.std() > 0.01 * full  # guard: the draws differ
    assert abs(draws.mean() - full) < 4 * draws.std() / 80**0.5


# ------------------------------------------------------------------------------ the effective batch
@pytest.mark.parametrize("num_queries", [None, 3], ids=["all", "three"])
@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_equal_the_large_batch(loss, num_queries):
    model = tiny_linearized()
    objective = objective_for(model, MIXED, loss=loss, num_queries=num_queries)
    large = measure(objective, model, MIXED.batch())
    model.zero_grad()
    generator, total = torch.Generator().manual_seed(0), 0.0
    for row in MIXED:
        value, _ = objective(model, {k: v[None] for k, v in row.items()}, generator)
        value.backward()
        total += value.item()
    small = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert total == pytest.approx(large[0], rel=ACCUMULATION)
    assert relative(small, large[2]) < ACCUMULATION


@pytest.mark.parametrize("loss", LOSSES)
def test_packed_documents_equal_separate_ones(loss):
    model = tiny_linearized()
    data = Packed((5, 9, 10), seed=2)
    objective = objective_for(model, data, loss=loss)
    packed = measure(objective, model, data.batch())
    assert objective.count(data.batch()) == 1 + 5 + 6
    model.zero_grad()
    total = 0.0
    for ids in data.ids[0].split((5, 9, 10)):
        value, _ = objective(model, {"input_ids": ids[None]}, torch.Generator())
        value.backward()
        total += value.item()
    apart = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert total == pytest.approx(packed[0], rel=1e-5)
    assert relative(packed[2], apart) < 1e-4


def test_a_batch_without_queries_has_zero_loss_and_zero_gradient():
    model = tiny_linearized()
    objective = objective_for(model, LONG)
    loss, _, gradients = measure(objective, model, {"input_ids": LONG.ids[:, :4]})
    assert loss == 0 and gradients and all(g.eq(0).all() for g in gradients.values())


# ------------------------------------------------------------------------------ independence
def test_the_loss_of_a_layer_has_no_gradient_for_another():
    model = tiny_linearized()
    objective = objective_for(model, LONG)
    both = measure(objective, model, LONG.batch())
    own = linearized_modules(model)
    objective.layers = {1: own[1]}
    model.zero_grad()
    losses = {}

    def observe(module, q, k, v, out, *, attention_mask, **inputs):
        queries, weight = draw_queries(eligible(LONG.batch(), 4), None, torch.Generator())
        energy = objective.state["energy"][str(module.layer_idx)]
        losses[module.layer_idx] = layer_loss(
            module.linearized, (q, k, v), out, queries, weight, energy, **inputs
        )

    objective._forward(model, LONG.batch(), observe)
    losses[1].backward()
    assert all(p.grad is None for p in own[0].parameters())
    alone = {n: 0.5 * p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected = {n: g for n, g in both[2].items() if n in alone}  # mean over 2 layers
    assert relative(alone, expected) < ACCUMULATION


# ------------------------------------------------------------------------------ the stage
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("feature_map", ["hedgehog", "centroids"])
def test_softmax_heads_have_no_error_and_no_gradient(loss, feature_map):
    """Key/value head 1 of layer 0, and all of layer 1."""
    options = dict(window=4, sinks=1, feature_map=feature_map)
    some, every = linearized(softmax_heads={0: [1], 1: [0, 1]}, **options), linearized(**options)
    objective, other = (objective_for(model, LONG, loss=loss) for model in (some, every))
    assert objective.state["energy"].keys() == {"0"} and objective.state["energy"]["0"] > 0
    total, parts, found = measure(objective, some, LONG.batch())
    expected = measure(other, every, LONG.batch())[2]
    assert parts.keys() == {"layers.0"} and total > 0
    if loss == "output":
        scale = other.state["energy"]["0"] / objective.state["energy"]["0"]
    for name, gradient in found.items():
        part, rest = gradient.chunk(2)
        assert part.any() and not rest.any(), name
        if loss == "output":  # a mean over two layers there, over one here
            assert relative({0: part}, {0: 2 * scale * expected[name].chunk(2)[0]}) < TEACHER, name


def test_a_model_whose_every_head_is_softmax_is_refused(tmp_path):
    model = linearized(softmax_heads={0: [0, 1], 1: [0, 1]})
    with pytest.raises(ValueError, match="transfer: every head of the converted layers stays"):
        transfer_attention(model, LONG, output_dir=tmp_path, **STAGE)


def test_only_new_parameters_change_and_the_model_is_given_back(tmp_path):
    model = tiny_linearized()
    model.config.use_cache = True
    before = {n: p.clone() for n, p in model.state_dict().items()}
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    metrics = transfer_attention(model, LONG, output_dir=tmp_path, **STAGE)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (".linearized." not in name), name
    assert flags == {n: p.requires_grad for n, p in model.named_parameters()}
    assert model.config.use_cache is True and not model.training
    assert metrics["steps"] == 6
    entry = metrics["history"][0]
    assert entry["loss"] == pytest.approx(sum(entry["layers"].values()) / 2)


@pytest.mark.parametrize("mixing", MIXING_RULES)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_fifty_steps_lower_the_loss_of_every_layer(tmp_path, feature_map, mixing):
    model = linearized(window=4, sinks=1, feature_map=feature_map, mixing=mixing)
    if (feature_map, mixing) == UNTRAINABLE:
        with pytest.raises(ValueError, match="favor under mixing kernel has nothing to train"):
            transfer_attention(model, LONG, output_dir=tmp_path, **STAGE)
        return
    objective, batch = objective_for(model, LONG), LONG.batch()
    optimizer = torch.optim.AdamW([p for group in objective.groups for p in group], lr=1e-2)
    before = measure(objective, model, batch)[1]
    for _ in range(50):
        measure(objective, model, batch)
        optimizer.step()
    after = measure(objective, model, batch)[1]
    assert all(after[layer] < before[layer] for layer in before), (before, after)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_stage_lowers_the_loss_of_every_layer(tmp_path, loss):
    model = tiny_linearized(sinks=1)
    options = {**STAGE, "max_steps": 50, "accumulation": 1}
    history = transfer_attention(model, LONG, output_dir=tmp_path, loss=loss, **options)["history"]
    for layer in ("0", "1"):
        first, last = (
            sum(entry["layers"][layer] for entry in part) for part in (history[:5], history[-5:])
        )
        assert last < first


ADDITIONS = dict(window_dropout=0.9, position_weights="buckets", mixing_start="beta_alpha")


@pytest.mark.parametrize(
    ("feature_map", "additions"),
    [("hedgehog", {}), ("centroids", {}), ("hedgehog", ADDITIONS)],
    ids=["hedgehog", "centroids", "additions"],
)
def test_resumed_equals_uninterrupted(tmp_path, monkeypatch, feature_map, additions):
    options = {**STAGE, "save_steps": 3, **additions}
    whole = tiny_linearized(feature_map=feature_map)
    expected = transfer_attention(whole, MIXED, output_dir=tmp_path / "whole", **options)
    calls, forward = [], TransferObjective.__call__

    def killed(self, *args):
        calls.append(1)
        if len(calls) == 2 * 4 + 2:
            raise InterruptedError
        return forward(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TransferObjective, "__call__", killed)
        cut = tiny_linearized(feature_map=feature_map)
        with pytest.raises(InterruptedError):
            transfer_attention(cut, MIXED, output_dir=tmp_path / "cut", **options)
    resumed = tiny_linearized(feature_map=feature_map)
    with monkeypatch.context() as patch:  # energy and fitted maps come from the checkpoint
        patch.setattr(TransferObjective, "start", None)
        found = transfer_attention(resumed, MIXED, output_dir=tmp_path / "cut", **options)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    drop = [{k: v for k, v in e.items() if k != "seconds"} for e in expected["history"]]
    assert drop == [{k: v for k, v in e.items() if k != "seconds"} for e in found["history"]]


@pytest.mark.parametrize("k_map", K_MAPS)
@pytest.mark.parametrize("mixing", ["calibrated", "kernel"])
def test_a_centroid_for_every_key_is_the_teacher(mixing, k_map):
    """Before any training, with the start values of the mixing rule."""
    model = linearized(
        window=4, sinks=1, feature_map="centroids", feature_dim=512, mixing=mixing, k_map=k_map
    )
    objective = objective_for(model, LONG)
    with torch.no_grad():
        for module in linearized_modules(model).values():
            module.linearized.beta.zero_()
            if mixing == "calibrated":
                module.linearized.alpha.fill_(1)
    assert all(loss < 1e-6 for loss in measure(objective, model, LONG.batch())[1].values())


def test_centroids_begin_on_the_scale_of_the_scores():
    heads = make_case("centroids").heads
    heads.apply(lambda m: [setattr(p, "_is_hf_initialized", False) for p in m.parameters()])
    heads.reset_parameters()
    assert not heads.beta.any()
    assert (heads.alpha == 1).all()


# ------------------------------------------------------------------------------ window dropout
def test_window_dropout_falls_to_zero():
    objective = objective_for(tiny_linearized(), LONG, window_dropout=0.8)

    def share(progress, draws=400):
        objective.progress = progress
        generators = (torch.Generator().manual_seed(i) for i in range(draws))
        return sum(len(objective._without_window(g)) for g in generators) / (2 * draws)

    assert share(0.0) == pytest.approx(0.8, abs=0.06)  # 4 standard errors
    assert share(0.45) == pytest.approx(0.4, abs=0.07)
    assert share(0.9) == share(0.95) == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_without_its_window_a_layer_answers_by_its_linear_part(loss):
    """The loss of a layer that is dropped is that of `branches(window=False)`: same queries, same
    count.
    """
    model = tiny_linearized(sinks=1)
    objective = objective_for(model, MIXED, loss=loss, window_dropout=1.0)
    found = measure(objective, model, MIXED.batch())[1]
    outputs = {}

    def observe(module, q, k, v, out, *, attention_mask, **inputs):
        queries, weight = draw_queries(
            eligible(MIXED.batch(), objective.exact), None, torch.Generator()
        )
        energy = objective.state["energy"][str(module.layer_idx)]
        rows = module.linearized(q, k, v, window=False, **inputs)  # the chunked form
        error = output_error(take_rows(rows, queries), take_rows(out, queries), weight)
        outputs[f"layers.{module.layer_idx}"] = error.item() / energy

    with torch.no_grad():
        objective._forward(model, MIXED.batch(), observe)
    if loss == "output":
        assert {n: found[n] for n in outputs} == pytest.approx(outputs, rel=1e-5)
    objective.window_dropout = 0.0
    assert all(
        abs(value / found[name] - 1) > 0.01
        for name, value in measure(objective, model, MIXED.batch())[1].items()
    )


def test_the_micro_batches_of_a_step_drop_the_same_windows():
    model = tiny_linearized()
    objective = objective_for(
        model, MIXED, num_queries=3, window_dropout=0.5, position_weights="distance"
    )
    large = measure(objective, model, MIXED.batch())
    assert large[1]["without_window"] == 0.5 * objective.count(MIXED.batch())
    model.zero_grad()
    generator, total = torch.Generator().manual_seed(0), 0.0
    for row in MIXED:
        value, _ = objective(model, {k: v[None] for k, v in row.items()}, generator)
        value.backward()
        total += value.item()
    small = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert total == pytest.approx(large[0], rel=ACCUMULATION)
    assert relative(small, large[2]) < ACCUMULATION


def test_the_log_says_how_many_windows_were_dropped(tmp_path):
    options = {**STAGE, "window_dropout": 1.0, "max_steps": 20, "num_queries": None}
    history = transfer_attention(tiny_linearized(), MIXED, output_dir=tmp_path, **options)[
        "history"
    ]
    shares = [entry["without_window"] for entry in history]
    assert set(shares) <= {0.0, 0.5, 1.0} and shares[0] == 1 and shares[-2:] == [0, 0]
    plain = transfer_attention(tiny_linearized(), LONG, output_dir=tmp_path / "plain", **STAGE)
    assert "without_window" not in plain["history"][0]


def test_position_weights_multiply_the_loss_of_a_query():
    model = tiny_linearized()
    plain = objective_for(model, MIXED)
    weighted = objective_for(model, MIXED, position_weights="distance")
    table = weighted.state["position_weights"]
    losses = [measure(objective, model, MIXED.batch())[0] for objective in (plain, weighted)]
    assert abs(losses[1] / losses[0] - 1) > 1e-3
    weighted.state["position_weights"] = [2 * table[0]]
    assert measure(weighted, model, MIXED.batch())[0] == pytest.approx(2 * losses[1], rel=1e-5)
    weighted.num_queries = 3
    draws = [measure(weighted, model, MIXED.batch(), seed)[0] for seed in range(80)]
    draws = torch.tensor(draws)
    assert abs(draws.mean() - 2 * losses[1]) < 4 * draws.std() / 80**0.5


def test_a_run_with_another_window_is_refused(tmp_path):
    transfer_attention(tiny_linearized(window=4), LONG, output_dir=tmp_path, **STAGE)
    with pytest.raises(ValueError, match=r"linearize: .* was started with .*'window': 4"):
        transfer_attention(tiny_linearized(window=5), LONG, output_dir=tmp_path, **STAGE)


def test_a_bf16_model_keeps_its_dtypes(tmp_path):
    model = randomize(convert(tiny_llama().bfloat16(), window=4, sinks=0))
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    metrics = transfer_attention(model, LONG, output_dir=tmp_path, **STAGE)
    assert {n: p.dtype for n, p in model.named_parameters()} == dtypes
    assert {p.dtype for n, p in model.named_parameters() if ".linearized." in n} == {torch.float32}
    assert metrics["history"][-1]["loss"] < 1


def test_the_language_model_head_sees_one_token():
    model, seen = tiny_linearized(), []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    objective = objective_for(model, LONG)
    measure(objective, model, LONG.batch())
    assert set(seen) == {1}


# ------------------------------------------------------------------------------ refusals
def test_a_softmax_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="transfer: this model has no linearized layer"):
        transfer_attention(tiny_llama(), LONG, output_dir=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(loss="mse"), r"transfer\.loss: 'mse' is not allowed; choose from output, attention"),
        (dict(position_weights="far"), r"transfer\.position_weights: 'far' .*uniform, buckets, di"),
        (dict(mixing_start="best"), r"transfer\.mixing_start: 'best' is not .*fixed, beta, beta_a"),
        (dict(window_dropout=1.5), r"transfer\.window_dropout: 1\.5 is not a probability; give 0"),
    ],
    ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
)
def test_unknown_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        transfer_attention(tiny_linearized(), LONG, output_dir=tmp_path, **options)


def test_a_rule_without_alpha_cannot_start_from_one(tmp_path):
    model = tiny_linearized(mixing="lolcats")
    with pytest.raises(ValueError, match=r"'beta_alpha' needs convert\.mixing 'calibrated'.*'lol"):
        transfer_attention(model, LONG, output_dir=tmp_path, mixing_start="beta_alpha")


def test_rows_below_four_windows_are_allowed_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"data\.length: rows of 24 tokens are shorter than 4 win"):
        transfer_attention(tiny_linearized(window=7), LONG, output_dir=tmp_path, **STAGE)


def test_no_queries_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"transfer\.num_queries: 0 is not allowed"):
        transfer_attention(tiny_linearized(), LONG, output_dir=tmp_path, num_queries=0)


def test_rows_within_the_window_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.length: rows of 24 tokens never reach .* = 24"):
        transfer_attention(tiny_linearized(window=22, sinks=2), LONG, output_dir=tmp_path)


def test_documents_within_the_window_are_refused(tmp_path):
    data = Packed((4, 4, 4, 6, 6), (6, 6, 6, 6))
    with pytest.raises(ValueError, match="data: no document in the first 2 rows is longer than"):
        transfer_attention(tiny_linearized(window=6), data, output_dir=tmp_path, progress=False)


# ------------------------------------------------------------------------------ two processes
TWO = """
import sys, torch
from linearize.transfer import transfer_attention
from tests.conftest import tiny_linearized
from tests.test_transfer import MIXED, STAGE
model = tiny_linearized()
options = {**STAGE, "max_steps": 2, "num_queries": None, "accumulation": 1, "clip": None}
transfer_attention(model, MIXED, output_dir=sys.argv[1], **{**options, "batch_size": 1})
"""


@pytest.mark.slow
def test_two_processes_equal_one_with_the_double_batch(tmp_path):
    """Without DDP's search for unused parameters: all that trains has a gradient."""
    script = tmp_path / "two.py"
    script.write_text(TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "two")], env=environment, cwd=ROOT,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    model = tiny_linearized()
    options = {**STAGE, "max_steps": 2, "num_queries": None, "accumulation": 1, "clip": None}
    metrics = transfer_attention(model, MIXED, output_dir=tmp_path / "one", **options)
    tensors = load_file(tmp_path / "two" / "checkpoint-2" / "trainable.safetensors")
    assert tensors.keys() == {n for n, _ in model.named_parameters() if ".linearized." in n}
    for name, tensor in tensors.items():
        assert torch.allclose(tensor, model.get_parameter(name), rtol=0, atol=1e-5), name
    log = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    for ours, theirs in zip(log, metrics["history"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["layers"] == pytest.approx(theirs["layers"], rel=1e-4)
        assert ours["tokens"] == theirs["tokens"]
