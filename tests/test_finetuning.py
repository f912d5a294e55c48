"""Finetuning: what trains, the teacher, the loss, packing, resume, and the families' own heads."""

import pytest
import torch
import torch.nn.functional as F

from linearize import branches, convert, teacher
from linearize.finetuning import (
    LogitObjective,
    add_lora,
    attention_projections,
    finetune,
)
from linearize.logits import head_logits, run_body
from linearize.losses import logit_kl, top_k_of
from linearize.modeling.attention import linearized_modules
from linearize.teacher_cache import TeacherCache
from tests.conftest import random_ids, randomize, tiny_linearized, tiny_llama, tiny_model
from tests.families import ALL_FULL
from tests.test_transfer import Packed, linearized, relative
from tests.tolerances import ACCUMULATION, GUARD, LOGITS, SOFTMAX_FLOAT32

QKVO = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LONG = Packed((24,), (24,), seed=1)
STAGE = dict(
    max_steps=4, batch_size=1, accumulation=2, learning_rate=1e-2, progress=False, logging_steps=1
)
WEIGHTS = {"ce": (1.0, 0.0), "kl": (0.0, 1.0), "mix": (0.4, 0.6)}


class Scored(Packed):
    """Rows of which only the first few targets count."""

    def __init__(self, *counts, length=32):
        super().__init__(*[(length,)] * len(counts))
        self.counts = counts

    def __getitem__(self, index):
        row = super().__getitem__(index)
        row["labels"][self.counts[index] + 1 :] = -100
        return row


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def adapted(model=None, std=0.1, **options):
    """A PeftModel with LoRA on the attention, its weights random."""
    model = tiny_linearized() if model is None else model
    defaults = dict(rank=2, alpha=4, train_linearized=True)
    model = add_lora(model, attention_projections(model), **{**defaults, **options})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += std * torch.randn(parameter.shape, generator=generator)
    return model


def measure(objective, model, batch):
    """(summed loss, parts, gradients by name)."""
    model.zero_grad()
    loss, parts = objective(model, batch, None)
    loss.backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {n: v.item() for n, v in parts.items()}, named


# ------------------------------------------------------------------------------ the loss
def test_ce_and_kl_equal_the_formulas_on_whole_logits():
    original, model = tiny_llama(), adapted()
    batch = Scored(4, 30).batch()
    objective = LogitObjective(model, 0.4, 0.6)
    loss, parts, _ = measure(objective, model, batch)
    there = batch["labels"][:, 1:] != -100
    log_t = logits_of(original, batch["input_ids"])[:, :-1].log_softmax(-1)[there]
    log_s = logits_of(model, batch["input_ids"])[:, :-1].log_softmax(-1)[there]
    assert (log_t - log_s).abs().max() > GUARD
    ce = F.nll_loss(log_s, batch["labels"][:, 1:][there], reduction="sum").item()
    kl = F.kl_div(log_s, log_t, log_target=True, reduction="sum").item()
    assert objective.count(batch) == there.sum() == 34
    assert parts == pytest.approx({"ce": ce, "kl": kl}, rel=1e-5)
    assert loss == pytest.approx(0.4 * ce + 0.6 * kl, rel=1e-5)


@pytest.mark.parametrize("loss", WEIGHTS)
def test_micro_batches_equal_the_large_batch(loss):
    model, data = adapted(), Scored(4, 30, 4, 30)
    objective = LogitObjective(model, *WEIGHTS[loss])
    large = measure(objective, model, data.batch())
    model.zero_grad()
    total = 0.0
    for row in data:
        value, _ = objective(model, {k: v[None] for k, v in row.items()}, None)
        value.backward()
        total += value.item()
    small = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert total == pytest.approx(large[0], rel=ACCUMULATION)
    assert relative(small, large[2]) < ACCUMULATION


@pytest.mark.parametrize("loss", WEIGHTS)
def test_packed_documents_equal_separate_ones(loss):
    model, data = adapted(), Packed((5, 9, 10), seed=2)
    objective = LogitObjective(model, *WEIGHTS[loss])
    packed = measure(objective, model, data.batch())
    model.zero_grad()
    total = 0.0
    for ids in data.ids[0].split((5, 9, 10)):
        labels = ids.clone()
        labels[0] = -100
        value, _ = objective(model, {"input_ids": ids[None], "labels": labels[None]}, None)
        value.backward()
        total += value.item()
    apart = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert total == pytest.approx(packed[0], rel=1e-5)
    assert relative(packed[2], apart) < 1e-4


def test_replacing_a_packed_document_leaves_the_next_one_alone():
    model, data = adapted(), Packed((9, 15), seed=2)
    objective, batch = LogitObjective(model, 1.0, 1.0), data.batch()
    batch["labels"][:, :9] = -100
    before = measure(objective, model, batch)[0]
    batch["input_ids"][:, :9] = random_ids(1, 9, seed=9)
    assert measure(objective, model, batch)[0] == before


def test_every_projection_and_new_parameter_gets_the_gradient_of_the_plain_loss():
    model, batch = adapted(), LONG.batch()
    found = measure(LogitObjective(model, 1.0, 0.0), model, batch)[2]
    model.zero_grad()
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    ).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert relative(found, expected) < ACCUMULATION
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(found)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_all_weights_get_the_gradient_of_the_plain_loss(tied):
    """The head trains too, also where it is the embedding."""
    model, batch = tiny_linearized(model=tiny_llama(tie_word_embeddings=tied)), LONG.batch()
    found = measure(LogitObjective(model, 1.0, 0.0), model, batch)[2]
    model.zero_grad()
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    ).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert relative(found, expected) < ACCUMULATION
    assert ("lm_head.weight" in found) != tied and "model.embed_tokens.weight" in found


# ------------------------------------------------------------------------------ the teacher
def test_the_teacher_is_the_original_in_eval_mode_and_the_student_keeps_its_dropout():
    model = adapted(linearized(model=tiny_llama(attention_dropout=0.5)))
    dropout = torch.nn.Dropout(0.5)
    layer = model.get_base_model().model.layers[0].mlp
    layer.register_module("extra", dropout)
    layer.register_forward_hook(lambda module, args, out: module.extra(out))
    objective = LogitObjective(model, 0.0, 1.0)
    model.train()
    with objective._teacher() as language_model:
        bodies = [run_body(language_model, input_ids=LONG.ids) for _ in "ab"]
        hidden = [body.last_hidden_state for body in bodies]
        assert torch.equal(*hidden) and not hidden[0].requires_grad
        logits = head_logits(language_model, bodies[0], hidden[0])
    expected = logits_of(tiny_llama(), LONG.ids)
    assert torch.allclose(logits, expected, rtol=0, atol=LOGITS)
    assert dropout.training and model.training
    language_model = model.get_base_model()
    students = [run_body(language_model, call=model, input_ids=LONG.ids) for _ in "ab"]
    assert not torch.allclose(*(body.last_hidden_state for body in students))


def test_the_teacher_leaves_what_trains_alone():
    model = adapted()
    before = {n for n, p in model.named_parameters() if p.requires_grad}
    with LogitObjective(model, 0.0, 1.0)._teacher():
        pass
    assert {n for n, p in model.named_parameters() if p.requires_grad} == before


def test_a_window_over_everything_starts_at_the_teacher(tmp_path):
    model = tiny_linearized(window=24)
    options = {**STAGE, "max_steps": 1}
    _, metrics = finetune(model, LONG, output_dir=tmp_path, targets=["q_proj"], **options)
    assert abs(metrics["history"][0]["kl"]) < SOFTMAX_FLOAT32


# ------------------------------------------------------------------------------ top k and its cache
def asked(monkeypatch):
    """A list that grows by one entry for each forward pass of the teacher."""
    calls, ask = [], LogitObjective._ask_teacher

    def counted(self, *args):
        calls.append(1)
        return ask(self, *args)

    monkeypatch.setattr(LogitObjective, "_ask_teacher", counted)
    return calls


def test_the_top_k_divergence_is_that_of_whole_logits():
    original, model, batch = tiny_llama(), adapted(), Scored(4, 30).batch()
    there = batch["labels"][:, 1:] != -100
    log_t = logits_of(original, batch["input_ids"])[:, :-1].log_softmax(-1)[there]
    log_s = logits_of(model, batch["input_ids"])[:, :-1].log_softmax(-1)[there]
    full = measure(LogitObjective(model, 0.0, 1.0), model, batch)
    for k in (1, 5, 64):
        loss, parts, gradient = measure(LogitObjective(model, 0.0, 1.0, top_k=k), model, batch)
        expected = logit_kl(top_k_of(log_t, k), log_s).item()
        assert loss == pytest.approx(expected, rel=1e-5) == parts["kl"]
        assert (loss < 0.99 * full[0]) == (k < 64)
    assert loss == pytest.approx(full[0], rel=1e-5)
    assert relative(gradient, full[2]) < ACCUMULATION


def test_a_batch_without_targets_has_no_top_k():
    model = adapted()
    batch = Scored(0).batch()
    assert measure(LogitObjective(model, 0.0, 1.0, top_k=3), model, batch)[0] == 0


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_cache_changes_nothing_and_asks_the_teacher_once(tmp_path, monkeypatch, method):
    data, calls = Packed((24,), (9, 15), (24,), seed=1), asked(monkeypatch)
    options = {**STAGE, "max_steps": 6, "top_k": 5, "method": method}
    models = [
        finetune(tiny_linearized(), data, output_dir=tmp_path / name, **options, **extra)[0]
        for name, extra in (
            ("plain", {}),
            ("first", {"teacher_cache": tmp_path / "cache"}),
            ("second", {"teacher_cache": tmp_path / "cache"}),
        )
    ]
    assert len(calls) == 9 + 3 + 0  # micro-batches of three epochs; rows; nothing
    for model in models[1:]:
        for name, tensor in models[0].state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name


def test_baselines_read_the_cache_of_the_stage(tmp_path, monkeypatch):
    calls = asked(monkeypatch)
    options = {**STAGE, "top_k": 5, "teacher_cache": tmp_path / "cache"}
    finetune(tiny_linearized(), LONG, output_dir=tmp_path / "linear", **options)
    assert len(calls) == 2
    finetune(tiny_linearized(), LONG, output_dir=tmp_path / "window", mode="window", **options)
    assert len(calls) == 2
    other = tiny_linearized(model=tiny_llama(seed=1))
    finetune(other, LONG, output_dir=tmp_path / "other", **options)
    assert len(calls) == 4


def test_a_killed_stage_goes_on_with_the_rows_in_its_cache(tmp_path, monkeypatch):
    calls = asked(monkeypatch)
    options = {**STAGE, "top_k": 5, "teacher_cache": tmp_path / "cache", "accumulation": 1}
    write = TeacherCache.write

    def killed(self, row, top):
        if list(self.folder.glob("*/*.safetensors")):
            raise InterruptedError
        write(self, row, top)

    with monkeypatch.context() as patch:
        patch.setattr(TeacherCache, "write", killed)
        with pytest.raises(InterruptedError):
            finetune(tiny_linearized(), LONG, output_dir=tmp_path / "run", **options)
    assert len(calls) == 2
    finetune(tiny_linearized(), LONG, output_dir=tmp_path / "run", **options)
    assert len(calls) == 3


def test_the_size_of_the_cache_is_limited_by_the_length_of_training(tmp_path, caplog):
    caplog.set_level("INFO", logger="linearize")
    options = {**STAGE, "top_k": 5, "teacher_cache": tmp_path / "cache", "accumulation": 1}
    for name, length, tokens in (
        ("rows", dict(max_steps=9), 48), ("steps", dict(max_steps=1), 24),
        ("tokens", dict(max_steps=None, max_tokens=30), 30),
    ):  # fmt: skip
        finetune(tiny_linearized(), LONG, output_dir=tmp_path / name, **{**options, **length})
        assert f"top 5 of {tokens} tokens" in caplog.text
        caplog.clear()


def test_without_a_teacher_there_is_no_cache(tmp_path):
    options = {**STAGE, "loss": "ce", "teacher_cache": tmp_path / "cache"}
    finetune(tiny_linearized(), LONG, output_dir=tmp_path / "run", **options)
    assert not (tmp_path / "cache").exists()


# ------------------------------------------------------------------------------ what trains
def test_lora_changes_nothing_but_its_targets_and_the_new_parameters(tmp_path):
    model = tiny_linearized()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    out, metrics = finetune(model, LONG, output_dir=tmp_path, **STAGE)
    changed = {n for n, p in out.state_dict().items() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if ".linearized." in n or n.rpartition(".")[0][-6:] in
                       ("q_proj", "k_proj", "v_proj", "o_proj")}  # fmt: skip
    assert out is model and not out.training and out.config.use_cache is True
    assert all(p.requires_grad for p in out.parameters())
    new = sum(p.numel() for n, p in out.named_parameters() if ".linearized." in n)
    assert metrics["trainable_parameters"] == new + 2 * 8 * (2 * (32 + 32) + 2 * (32 + 16))
    assert metrics["history"][0].keys() >= {"loss", "ce", "kl", "learning_rate", "tokens"}


def test_without_merge_the_adapter_is_returned_and_is_all_that_trains(tmp_path):
    merged, _ = finetune(tiny_linearized(), LONG, output_dir=tmp_path / "a", **STAGE)
    kept, _ = finetune(tiny_linearized(), LONG, output_dir=tmp_path / "b", merge=False, **STAGE)
    gap = (logits_of(merged, LONG.ids) - logits_of(kept, LONG.ids)).abs().max()
    assert gap < LOGITS and not kept.training
    trains = {n for n, p in kept.named_parameters() if p.requires_grad}
    assert trains == {n for n, _ in kept.named_parameters() if "lora_" in n or "modules_to" in n}


@pytest.mark.parametrize("method", ["lora", "full"])
def test_new_parameters_can_have_a_learning_rate_of_their_own(tmp_path, method):
    """The first step of Adam moves every weight that has a gradient by its learning rate."""

    def largest_moves(name, **options):
        model = tiny_linearized()
        if method == "lora":
            model, _ = finetune(
                model, LONG, output_dir=tmp_path / name, **STAGE | one | options, merge=False
            )
            before = add_lora(tiny_linearized(), attention_projections(tiny_linearized()),
                              rank=8, alpha=16, train_linearized=True)  # fmt: skip
        else:
            before, method_options = tiny_linearized(), {"method": "full"}
            model, _ = finetune(
                model, LONG, output_dir=tmp_path / name, **STAGE | one | options | method_options
            )
        start, new, rest = dict(before.named_parameters()), 0.0, 0.0
        for key, parameter in model.named_parameters():
            if "lora_A" in key:
                continue  # random start
            move = (parameter - start[key]).abs().max().item()
            new, rest = (max(new, move), rest) if ".linearized." in key else (new, max(rest, move))
        return new, rest

    one = dict(max_steps=1, warmup=0.0, learning_rate=1e-3, loss="ce")
    assert largest_moves("same") == pytest.approx((1e-3, 1e-3), rel=1e-3)
    assert largest_moves("own", linearized_learning_rate=3e-2) == pytest.approx(
        (3e-2, 1e-3), rel=1e-3
    )


def test_new_parameters_can_stay_as_they_are(tmp_path):
    model = tiny_linearized()
    before = {n: p.clone() for n, p in model.named_parameters() if ".linearized." in n}
    out, _ = finetune(model, LONG, output_dir=tmp_path, train_linearized=False, **STAGE)
    assert all(torch.equal(out.get_parameter(n), p) for n, p in before.items())


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", QKVO),
        ("phi3", ["self_attn.qkv_proj", "self_attn.o_proj"]),
        ("gpt2", ["attn.c_attn", "attn.c_proj"]),
        ("gpt_neox", ["attention.query_key_value", "attention.dense"]),
    ],
)
def test_default_targets_are_the_projections_of_attention(family, expected):
    model = convert(tiny_model(family, **ALL_FULL[family]), window=4)
    assert sorted(attention_projections(model)) == sorted(expected)
    matched = {n.rpartition(".lora_A")[0] for n, _ in adapted(model).named_parameters()} - {""}
    assert len(matched) == 2 * len(expected) and not any(".mlp." in name for name in matched)


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_other_layouts_train_and_merge(tmp_path, family):
    model = randomize(convert(tiny_model(family, scale=1.0, **ALL_FULL[family]), window=4))
    out, metrics = finetune(model, LONG, output_dir=tmp_path, **STAGE)
    assert metrics["steps"] == 4 and type(out) is type(model)


def test_a_target_that_matches_nothing_is_refused_by_name(tmp_path):
    with pytest.raises(
        ValueError, match=r"finetune\.targets: 'NOPE' is no linear layer of this mo"
    ):
        finetune(tiny_linearized(), LONG, output_dir=tmp_path, targets=["q_proj", "NOPE"])


def test_no_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"finetune\.targets: empty"):
        finetune(tiny_linearized(), LONG, output_dir=tmp_path, targets=[])


def test_lora_of_a_bf16_model_is_fp32(tmp_path):
    model = convert(tiny_llama().bfloat16(), window=4)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    adapter = adapted(model)
    assert {p.dtype for p in adapter.parameters() if p.requires_grad} == {torch.float32}
    model = convert(tiny_llama().bfloat16(), window=4)
    out, metrics = finetune(model, LONG, output_dir=tmp_path, **STAGE)
    assert {n: p.dtype for n, p in out.named_parameters()} == dtypes
    assert metrics["history"][-1]["loss"] < 1


# ------------------------------------------------------------------------------ all weights
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_full_finetuning_trains_every_weight_and_keeps_dtypes(tmp_path, loss, dtype):
    model = randomize(convert(tiny_llama().to(dtype), window=4))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    out, metrics = finetune(model, LONG, output_dir=tmp_path, method="full", loss=loss, **STAGE)
    assert out is model
    assert {n: p.dtype for n, p in out.named_parameters()} == {
        n: p.dtype for n, p in before.items()
    }
    assert all(not torch.equal(p, before[n]) for n, p in out.named_parameters())
    assert metrics["trainable_parameters"] == sum(p.numel() for p in model.parameters())
    assert metrics["history"][-1]["loss"] < metrics["history"][0]["loss"]


def test_full_finetuning_of_a_bf16_model_adds_up_steps_that_bf16_cannot_see(tmp_path):
    """The masters are fp32: one step of 1e-4 is below half the spacing of bf16 at 1/8."""
    moved = []
    for steps in (1, 40):
        model = convert(tiny_llama().bfloat16(), window=4)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        options = {**STAGE, "max_steps": steps, "learning_rate": 1e-4, "warmup": 0.0, "clip": None}
        out, _ = finetune(
            model, LONG, output_dir=tmp_path / str(steps), method="full", loss="ce", **options
        )
        pairs = [
            (before[n][before[n].abs() > 0.13], p[before[n].abs() > 0.13])
            for n, p in out.named_parameters()
            if p.dtype == torch.bfloat16 and p.ndim == 2
        ]
        changed = sum(int((a != b).sum()) for a, b in pairs)
        moved.append(changed / sum(a.numel() for a, _ in pairs))
    assert moved[0] == 0 and moved[1] > 0.3


# ------------------------------------------------------------------------------ modes
@pytest.mark.parametrize("mode", ["linear", "softmax", "window"])
def test_the_first_loss_is_that_of_the_mode(tmp_path, mode):
    model = tiny_linearized()
    contexts = {"softmax": teacher, "window": lambda m: branches(m, linear=False)}
    ids, labels = LONG.ids, LONG.batch()["labels"]

    def cross_entropy(context=None):
        if context is None:
            logits = logits_of(model, ids)
        else:
            with context(model):
                logits = logits_of(model, ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()

    values = {name: cross_entropy(contexts.get(name)) for name in ("linear", "softmax", "window")}
    assert len({round(v, 3) for v in values.values()}) == 3  # guard: the modes differ
    new = {n: p.clone() for n, p in model.named_parameters() if ".linearized." in n}
    out, metrics = finetune(model, LONG, output_dir=tmp_path, loss="ce", mode=mode, **STAGE)
    assert metrics["history"][0]["loss"] == pytest.approx(values[mode], rel=1e-4)
    assert metrics["history"][-1]["loss"] < values[mode]
    moved = any(not torch.equal(out.get_parameter(n), p) for n, p in new.items())
    assert moved == (mode == "linear")
    assert all(m.linearize_mode == "linear" for m in linearized_modules(out).values())


# ------------------------------------------------------------------------------ the run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_resumed_equals_uninterrupted(tmp_path, monkeypatch, method, dtype):
    options = {**STAGE, "save_steps": 2, "method": method, "loss": "mix", "ce_weight": 0.5}

    def student():
        return randomize(convert(tiny_llama().to(dtype), window=4, sinks=0))

    whole, expected = finetune(student(), LONG, output_dir=tmp_path / "whole", **options)
    calls, forward = [], LogitObjective.__call__

    def killed(self, *args):
        calls.append(1)
        if len(calls) == 2 * 3 + 1:
            raise InterruptedError
        return forward(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LogitObjective, "__call__", killed)
        with pytest.raises(InterruptedError):
            finetune(student(), LONG, output_dir=tmp_path / "cut", **options)
    resumed, found = finetune(student(), LONG, output_dir=tmp_path / "cut", **options)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    drop = [{k: v for k, v in e.items() if k != "seconds"} for e in expected["history"]]
    assert drop == [{k: v for k, v in e.items() if k != "seconds"} for e in found["history"]]
    loaded, again = finetune(student(), LONG, output_dir=tmp_path / "cut", **options)
    assert again == found
    assert all(torch.equal(t, whole.state_dict()[n]) for n, t in loaded.state_dict().items())


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path):
    plain, _ = finetune(tiny_linearized(), LONG, output_dir=tmp_path / "a", **STAGE)
    saved, _ = finetune(
        tiny_linearized(), LONG, output_dir=tmp_path / "b", gradient_checkpointing=True, **STAGE
    )
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(tensor, saved.state_dict()[name], rtol=0, atol=1e-6), name
    assert not any(getattr(m, "gradient_checkpointing", False) for m in saved.modules())


def test_gradient_checkpointing_recomputes_layers_in_the_mode_of_the_run(tmp_path, monkeypatch):
    calls, modes = [], set()
    layer_class = type(tiny_llama().model.layers[0].mlp)
    forward = layer_class.forward

    def record(self, x):
        calls.append(torch.is_grad_enabled())
        return forward(self, x)

    monkeypatch.setattr(layer_class, "forward", record)
    model = tiny_linearized()
    attention = linearized_modules(model)[0]
    attention.register_forward_hook(lambda m, args, out: modes.add(m.linearize_mode))
    finetune(
        model, LONG, output_dir=tmp_path, mode="softmax", loss="ce", gradient_checkpointing=True,
        **{**STAGE, "max_steps": 1},
    )  # fmt: skip
    assert sum(calls) == 2 * 2 * 2  # micro-batches, layers, forward and recomputation
    assert modes == {"softmax"}


def test_gradient_checkpointing_that_a_model_lacks_is_refused(tmp_path):
    model = tiny_linearized()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="gradient_checkpointing: LinearizedLlamaForCausalLM does"):
        finetune(model, LONG, output_dir=tmp_path, gradient_checkpointing=True, **STAGE)


# ------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(method="qlora"), r"finetune\.method: 'qlora' is not allowed; choose from lora, full"),
        (dict(loss="both"), r"finetune\.loss: 'both' is not allowed; choose from kl, ce, mix"),
        (dict(mode="off"), r"finetune\.mode: 'off' is not allowed; choose from linear, softmax, w"),
        (dict(loss="mix", kl_weight=0.0), r"finetune\.loss: 'mix' with ce_weight 0 and kl_weight"),
        (dict(top_k=0), r"finetune\.top_k: 0 is not allowed; give a positive number, or null"),
        (
            dict(teacher_cache="cache"),
            r"teacher_cache: it holds .* set finetune\.top_k, 64 for exam",
        ),
    ],
    ids=["method", "loss", "mode", "mix", "top-k", "cache"],
)
def test_unknown_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        finetune(tiny_linearized(), LONG, output_dir=tmp_path, **options)


def test_a_softmax_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="finetune: this model has no linearized layer"):
        finetune(tiny_llama(), LONG, output_dir=tmp_path)
