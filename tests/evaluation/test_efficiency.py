import pytest
from conftest import random_ids, tiny_linearized, tiny_llama
from transformers import DynamicCache

from linearize.evaluation.efficiency import cache_bytes, efficiency


def test_the_report_holds_both_models_and_consistent_ratios():
    result = efficiency(
        tiny_linearized(),
        contexts=(16, 64),
        prefills=(16, 32),
        transfer_tokens=32,
        decode_tokens=2,
        rounds=1,
    )
    assert [row["context"] for row in result["decode"]] == [16, 64]
    assert [row["tokens"] for row in result["prefill"]] == [16, 32]
    for row in result["decode"] + result["prefill"]:
        assert row["speedup"] == pytest.approx(row["teacher_s"] / row["converted_s"])
        assert row["converted_s"] > 0
    step = result["transfer_step"]
    assert step["tokens"] == 32 and step["ratio"] == pytest.approx(
        step["step_s"] / step["teacher_s"]
    )


def test_the_converted_cache_is_constant_and_the_softmax_cache_grows():
    short, long = efficiency(
        tiny_linearized(),
        contexts=(16, 64),
        prefills=(16,),
        transfer_tokens=32,
        decode_tokens=1,
        rounds=1,
    )["decode"]
    assert short["converted_cache_bytes"] == long["converted_cache_bytes"]
    # 2 layers, keys and values, 2 heads of size 8, fp32; the context and the two decoded tokens
    assert long["teacher_cache_bytes"] == 2 * 2 * 2 * 8 * 4 * (64 + 2)


def test_cache_bytes_counts_every_tensor_of_the_state():
    model = tiny_linearized(window=4, sinks=2)
    cache = DynamicCache(config=model.config)
    model(random_ids(1, 9), cache=cache, use_cache=True)
    state = 2 * (16 * 8 + 16)  # 2 heads, S [16, 8] and z [16]
    keys = 2 * 2 * (3 + 2) * 8  # keys and values of 2 heads: window - 1 and sinks
    assert cache_bytes(cache) == 2 * ((state + keys) * 4 + 8)  # fp32, and one int64 count per layer


def test_training_state_is_given_back():
    model = tiny_linearized()
    before = [p.requires_grad for p in model.parameters()]
    efficiency(model, contexts=(8,), prefills=(8,), transfer_tokens=16, decode_tokens=1, rounds=1)
    assert [p.requires_grad for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters())


def test_a_softmax_model_is_refused():
    with pytest.raises(ValueError, match="no linearized layer"):
        efficiency(tiny_llama())
