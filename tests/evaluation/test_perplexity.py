"""Perplexity against brute force, and what must not change it."""

import json
import math

import pytest
import torch
from conftest import tiny_llama, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.evaluation.perplexity import (
    check_comparable,
    json_ready,
    mean_and_se,
    perplexity,
)

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
KV = dict(num_key_value_heads=2)
FAMILIES = {
    "llama": {**SIZES, **KV},
    "gemma2": {**SIZES, **KV, "head_dim": 8, "final_logit_softcapping": 5.0},
    "cohere": {**SIZES, **KV, "logit_scale": 0.25},
    "granite": {**SIZES, **KV, "logits_scaling": 4.0},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "phi": {**SIZES, **KV},
    "mixtral": {**SIZES, **KV, "num_local_experts": 4, "output_router_logits": True},
}
TOKENS = torch.randint(3, 64, (37,), generator=torch.Generator().manual_seed(0))


def brute_force(model, tokens, length, stride):
    """Loss of every token but the first, each from a forward pass of its own."""
    losses = []
    for target in range(1, len(tokens)):
        window = 0 if target <= length else -(-(target - length) // stride)
        context = tokens[window * stride : target]
        with torch.no_grad():
            logits = model(context[None]).logits[0, -1].double()
        losses.append(-logits.log_softmax(-1)[tokens[target]].item())
    return losses


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("stride", [8, 3])
def test_equals_brute_force(stride, batch_size):
    model = tiny_llama()
    result = perplexity(model, None, TOKENS, length=8, stride=stride, batch_size=batch_size)
    losses = brute_force(model, TOKENS, 8, stride)
    assert result["num_tokens"] == 36
    assert result["nll"] * 36 == pytest.approx(sum(losses), abs=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(sum(losses) / 36), rel=1e-5)
    assert (result["length"], result["stride"], result["bos"]) == (8, stride, "none")


@pytest.mark.parametrize("bos", ["first", "each"])
def test_prefix_token_is_read_and_never_scored(stories260k, bos):
    model = AutoModelForCausalLM.from_pretrained(stories260k)
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    text = "Once upon a time there was a little girl who had a red ball. " * 3
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    losses = []
    for begin in range(0, len(ids), 16):
        before = [1] if bos == "each" or begin == 0 else [ids[begin - 1]]
        row = torch.tensor([before + ids[begin : begin + 16]])
        with torch.no_grad():
            log_p = model(row[:, :-1]).logits[0].double().log_softmax(-1)
        losses += (-log_p.gather(1, row[0, 1:, None])).flatten().tolist()
    result = perplexity(model, tokenizer, text, length=16, bos=bos)
    assert result["num_tokens"] == len(ids) == len(losses)
    assert result["nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert result["bos"] == bos


def test_uniform_logits_give_the_vocabulary_size():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = perplexity(model, None, TOKENS, length=8)
    assert result["perplexity"] == pytest.approx(64, rel=1e-6)
    assert result["perplexity_se"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 1}, {"batch_size": 5}, {"logits_chunk": 1}, {"logits_chunk": 7}],
    ids=["batch-1", "batch-5", "chunk-1", "chunk-7"],
)
def test_batches_and_slices_change_nothing(options):
    model = tiny_llama()
    documents = [TOKENS[:20], TOKENS[20:23], TOKENS[23:]]
    plain = perplexity(model, None, documents, length=8)
    other = perplexity(model, None, documents, length=8, **options)
    assert other == {name: pytest.approx(value, abs=1e-5) for name, value in plain.items()}


def test_model_is_left_as_it_was():
    model = tiny_llama(attention_dropout=0.9).train()
    state = set(vars(model.model))
    results = [perplexity(model, None, TOKENS, length=8) for _ in range(2)]
    assert results[0] == results[1], "dropout is off"
    assert model.training
    assert set(vars(model.model)) == state
    assert not model.model._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_stays_far_below_all_logits():
    """B40: 4096 positions and 50k words, logits in slices."""
    from torch.profiler import ProfilerActivity, profile

    model = tiny_llama(vocab_size=50_000, max_position_embeddings=4096, num_hidden_layers=1)
    ids = torch.randint(50_000, (4097,), generator=torch.Generator().manual_seed(0))
    everything = 4096 * 50_000 * 4
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = perplexity(model, None, ids, length=4096)
    total = peak = 0
    events = [
        event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    for event in events:
        total += event.nbytes()
        peak = max(peak, total)
    assert events
    assert peak < everything / 4
    with torch.no_grad():
        logits = model(ids[None, :512]).logits[0].double()
    whole = torch.nn.functional.cross_entropy(logits, ids[1:513]).item()
    assert perplexity(model, None, ids[:513], length=4096)["nll"] == pytest.approx(whole, abs=1e-6)
    assert result["num_tokens"] == 4096


def test_hopeless_model_gives_inf_and_valid_json():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    result = perplexity(model, None, TOKENS, length=8)
    assert result["perplexity"] == result["perplexity_se"] == math.inf
    assert math.isfinite(result["nll"])
    text = json.dumps(json_ready(result), allow_nan=False)
    assert json.loads(text)["perplexity"] == "inf"


def test_json_ready_reaches_every_level():
    value = {"a": [1.5, math.nan, (-math.inf, None)], "b": {"c": "x", "d": 3}}
    assert json_ready(value) == {"a": [1.5, "nan", ["-inf", None]], "b": {"c": "x", "d": 3}}


def test_word_and_byte_perplexity_share_the_loss(stories260k):
    model = AutoModelForCausalLM.from_pretrained(stories260k)
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    texts = ["Tom had a big dog. The dog was happy.", "One day, a cat sat on the mat."]
    result = perplexity(model, tokenizer, texts, length=8)
    loss = result["nll"] * result["num_tokens"]
    assert result["bos"] == "first"
    assert (result["num_words"], result["num_bytes"]) == (17, sum(map(len, texts)))
    assert result["word_perplexity"] == pytest.approx(math.exp(loss / 17))
    assert result["byte_perplexity"] == pytest.approx(math.exp(loss / result["num_bytes"]))
    relative = result["word_perplexity_se"] / result["word_perplexity"]
    assert relative == pytest.approx(result["nll_se"] * result["num_tokens"] / 17)
    assert 2 < result["perplexity"] < 20, "this model knows such stories"


def test_standard_error_is_right_for_blocks_of_equal_losses():
    """Tokens of a block are copies of each other: the error is that of the blocks, not tokens."""
    generator = torch.Generator().manual_seed(0)
    means, errors = [], []
    for _ in range(400):
        sums = 2 + torch.randn(50, generator=generator, dtype=torch.float64)
        mean, se = mean_and_se(sums * 16, torch.full((50,), 16))
        means.append(mean)
        errors.append(se)
    spread = torch.tensor(means).std().item()
    assert sum(errors) / 400 == pytest.approx(spread, rel=0.1)


def test_standard_error_with_windows_of_different_sizes():
    sums, counts = torch.tensor([6.0, 0.0, 10.0]), torch.tensor([2, 0, 8])
    mean, se = mean_and_se(sums, counts)
    assert mean == pytest.approx(1.6)
    assert se == pytest.approx(math.sqrt(2 * 2 * 2.8**2) / 10)
    assert mean_and_se(torch.tensor([6.0]), torch.tensor([2])) == (3.0, None)


def test_error_of_one_window_is_unknown():
    result = perplexity(tiny_llama(), None, TOKENS, length=64)
    assert result["num_windows"] == 1
    assert result["perplexity_se"] is None
    assert result["word_perplexity"] is None


def test_context_longer_than_the_table_of_positions_is_refused():
    model = tiny_model("gpt2", **FAMILIES["gpt2"])
    with pytest.raises(ValueError, match=r"^evaluate\.length: 65 is more than the 64 positions"):
        perplexity(model, None, TOKENS, length=65)
    assert perplexity(model, None, TOKENS, length=64)["num_tokens"] == 36
    assert perplexity(tiny_llama(), None, TOKENS, length=512)["num_tokens"] == 36


def test_only_equal_protocols_are_compared():
    model = tiny_llama()
    a, same = (perplexity(model, None, TOKENS, length=8) for _ in range(2))
    longer = perplexity(model, None, TOKENS, length=16)
    other_text = perplexity(model, None, TOKENS.flip(0), length=8)
    check_comparable({"base": a, "converted": same})
    with pytest.raises(
        ValueError, match=r"cannot be compared: length differs \(base 8, conv.* 16\)"
    ):
        check_comparable({"base": a, "converted": longer})
    with pytest.raises(ValueError, match=r"cannot be compared: sha256 differs"):
        check_comparable({"base": a, "converted": other_text})
