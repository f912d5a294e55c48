"""The budget: what it counts on tensors without memory is what a real step does."""

import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama
from torch import nn

from linearize import budget
from linearize.conversion import convert
from linearize.finetuning import add_lora, attention_projections
from linearize.inspection import build_empty, inspect
from linearize.logits import decoder_of, run_body

T, W, N, Q = 48, 4, 2, 8
SECTION = dict(window=W, sinks=N, feature_map="centroids")
TRANSFER = dict(num_queries=Q, batch_size=2, accumulation=3, max_tokens=None, max_steps=5)
LORA = dict(
    method="lora", targets=None, rank=4, alpha=8, loss="kl", train_linearized=True, batch_size=2,
    accumulation=2, max_tokens=960, max_steps=None,
)  # fmt: skip
# tiny_llama: H = 4, G = 2, D = Dv = 8, hidden 32, MLP 48, vocabulary 64, 2 layers; f = F = 2D
H, G, D, F, LAYERS, VOCABULARY, HIDDEN = 4, 2, 8, 16, 2, 64, 32
BODY = LAYERS * (HIDDEN * (H + 2 * G + H) * D + 3 * HIDDEN * 48)
SOFTMAX = LAYERS * H * 2 * D * T
ADDED = 4 * LAYERS * ((HIDDEN + H * D) * 2 + (HIDDEN + G * D) * 2)  # rank 4 on q, o, k, v
NEW = LAYERS * ((H + G) * (D + 1) * F + 2 * H)


@pytest.fixture
def folder(tmp_path):
    tiny_llama().config.save_pretrained(tmp_path)
    return tmp_path


def count(folder, section=SECTION, **options):
    rows = inspect(folder, **section)["layers"]
    model = build_empty(folder).float()
    return budget.training(model, section, rows, length=T, **options)


def test_operations_of_transfer_are_those_of_the_formula(folder):
    found = count(folder, transfer=TRANSFER)["transfer"]
    keys = 2 * 2 * G * D * F * T  # features, and the gradient of their weights
    rows = Q * H * (2 * 2 * D * F + 3 * 2 * F * T + 2 * 2 * T * D + 2 * 2 * D * (W + N))
    expected = 2 * BODY + SOFTMAX + LAYERS * (keys + rows) / T
    assert found["flops_per_token"] == round(expected)


def test_operations_of_finetuning_are_those_of_the_formula(folder):
    found = count(folder, finetune=LORA)["finetune"]
    again = count(folder, finetune=LORA, gradient_checkpointing=True)["finetune"]
    operator = round(sum(row["flops"] for row in inspect(folder, **SECTION)["layers"]))
    teacher = 2 * BODY + SOFTMAX
    student = 4 * BODY + 6 * ADDED
    head = 6 * HIDDEN * VOCABULARY
    attention = found["flops_per_token"] - teacher - student - head
    assert 1.5 * operator < attention < 4 * operator  # two matrix products back for one forward
    second = again["flops_per_token"] - found["flops_per_token"] - 2 * BODY - 2 * ADDED
    assert 0.5 * operator < second < 1.5 * operator


def test_without_a_teacher_its_pass_is_left_out(folder):
    both = count(folder, finetune=LORA)["finetune"]
    alone = count(folder, finetune={**LORA, "loss": "ce"})["finetune"]
    saved = 2 * BODY + SOFTMAX + 2 * HIDDEN * VOCABULARY
    assert both["flops_per_token"] - alone["flops_per_token"] == pytest.approx(saved, abs=1)


def test_kept_bytes_are_those_of_a_real_step(folder):
    found = count(folder, finetune=LORA)["finetune"]["memory_bytes"]["activations"]
    model = tiny_linearized(**SECTION)
    trained = add_lora(model, attention_projections(model), rank=4, alpha=8, train_linearized=True)
    with budget._kept(trained) as kept:
        run_body(model, call=trained, input_ids=random_ids(LORA["batch_size"], T))
    assert found == pytest.approx(kept(), rel=0.1)
    assert kept() > 100_000


def test_trained_numbers_and_weights(folder):
    found = count(folder, transfer=TRANSFER, finetune=LORA)
    weights = 4 * tiny_llama().num_parameters()
    assert found["transfer"]["memory_bytes"]["weights"] == weights
    assert found["transfer"]["memory_bytes"]["trained"] == 16 * NEW
    assert found["finetune"]["memory_bytes"]["trained"] == 16 * (NEW + ADDED)
    only = count(folder, finetune={**LORA, "train_linearized": False})["finetune"]
    assert only["memory_bytes"]["trained"] == 16 * ADDED
    total = sum(found["finetune"]["memory_bytes"].values())
    assert found["finetune"]["total_bytes"] == total


def test_all_weights_need_their_own_optimizer_and_a_teacher(folder):
    full = {**LORA, "method": "full"}
    with_teacher = count(folder, finetune=full)["finetune"]["memory_bytes"]
    alone = count(folder, finetune={**full, "loss": "ce"})["finetune"]["memory_bytes"]
    weights = tiny_llama().num_parameters()
    assert with_teacher["trained"] == alone["trained"] == 16 * (weights + NEW)
    assert (with_teacher["weights"], alone["weights"]) == (4 * weights, 0)


def test_checkpointing_keeps_less_and_a_longer_batch_more(folder):
    usual = count(folder, finetune=LORA)["finetune"]["memory_bytes"]
    again = count(folder, finetune=LORA, gradient_checkpointing=True)["finetune"]["memory_bytes"]
    double = count(folder, finetune={**LORA, "batch_size": 4})["finetune"]["memory_bytes"]
    assert again["activations"] < usual["activations"]
    assert double["activations"] == 2 * usual["activations"]


def test_length_of_a_stage(folder):
    found = count(folder, transfer=TRANSFER, finetune=LORA)
    assert found["transfer"]["tokens"] == 5 * 2 * 3 * T
    assert found["finetune"]["tokens"] == 960
    assert found["finetune"]["flops"] == 960 * found["finetune"]["flops_per_token"]
    unknown = count(folder, transfer={**TRANSFER, "max_steps": None})["transfer"]
    assert unknown["tokens"] is None and unknown["flops"] is None


def test_layers_that_stay_softmax_cost_what_softmax_costs(folder):
    whole = count(folder, finetune=LORA)["finetune"]
    half = count(folder, {**SECTION, "layers": [0]}, finetune={**LORA, "targets": ["q_proj"]})
    assert half["finetune"]["memory_bytes"]["activations"] > 0
    assert half["finetune"]["memory_bytes"]["activations"] < whole["memory_bytes"]["activations"]


def test_the_model_is_left_with_its_own_attention(folder):
    model = convert(build_empty(folder), **SECTION)
    before = model.config._attn_implementation
    with budget._no_attention(model):
        assert decoder_of(model).config._attn_implementation == budget.NAME
    assert model.config._attn_implementation == before
    assert isinstance(model, nn.Module) and torch.is_grad_enabled()
