"""Inspection: what it promises is what `convert` and the cache then do."""

import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama
from transformers import BloomConfig, Gemma3TextConfig, LlamaConfig, MixtralConfig
from transformers.cache_utils import Cache

from linearize.conversion import convert
from linearize.evaluation.efficiency import cache_bytes
from linearize.inspection import hybrid_flops, inspect, softmax_flops
from linearize.modeling.attention import linearized_modules
from linearize.modeling.feature_maps import FEATURE_MAPS

LLAMA_8B = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128,
    dtype="bfloat16",
)
SHAPE_8B = {"num_heads": 32, "num_key_value_heads": 8, "qk_dim": 128, "v_dim": 128}


@pytest.fixture
def config_folder(tmp_path):
    def save(config):
        config.save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize("feature_map", sorted(FEATURE_MAPS))
def test_new_parameters_are_those_that_convert_adds(feature_map):
    options = dict(window=4, sinks=2, feature_map=feature_map, k_map="q_head", layers=[1])
    report = inspect(tiny_llama(), **options)
    heads = linearized_modules(convert(tiny_llama(), **options))[1].linearized
    assert report["new_parameters"] == sum(p.numel() for p in heads.parameters())
    assert report["convert"]["layers"] == [1]


@pytest.mark.parametrize("mixing", ["calibrated", "kernel"])
@pytest.mark.parametrize("k_map", ["kv_head", "q_head"])
def test_state_bytes_are_those_of_a_filled_cache(k_map, mixing):
    options = dict(window=4, sinks=2, feature_map="hedgehog_exp", mixing=mixing, k_map=k_map)
    report = inspect(tiny_llama(), **options)
    with torch.no_grad():
        output = tiny_linearized(**options)(torch.arange(3, 33)[None], use_cache=True)
    (cache,) = (value for value in output.values() if isinstance(value, Cache))
    held = sum(tensor.nbytes for layer in cache.layers for tensor in layer.state)
    assert report["state_bytes"] == held


@pytest.mark.parametrize("k_map", ["kv_head", "q_head"])
@pytest.mark.parametrize("length", [30, 40])
def test_bytes_with_softmax_heads_are_those_of_a_filled_cache(k_map, length):
    kept = {0: [0, 1], 1: [1]}
    options = dict(window=4, sinks=2, k_map=k_map, softmax_heads=kept)
    report = inspect(tiny_llama(), **options, lengths=(length,))
    with torch.no_grad():
        output = tiny_linearized(**options)(random_ids(1, length), use_cache=True)
    (cache,) = (value for value in output.values() if isinstance(value, Cache))
    assert report["lengths"][0]["linearized_bytes"] == cache_bytes(cache)
    assert [row["softmax_heads"] for row in report["layers"]] == [[0, 1], [1]]
    assert report["layers"][0]["break_even_length"] is None


def test_flops_with_softmax_heads_lie_between():
    def flops(**options):
        return inspect(tiny_llama(), window=4, lengths=(64,), **options)["lengths"][0]

    every, none = flops(softmax_heads={0: [0, 1], 1: [0, 1]}), flops()
    half = flops(softmax_heads={0: [0], 1: [1]})["linearized_flops"]
    assert every["linearized_flops"] == every["softmax_flops"]
    assert 2 * half == every["linearized_flops"] + none["linearized_flops"]


def test_a_config_without_weights_is_enough(config_folder):
    folder = config_folder(tiny_llama().config)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    report = inspect(folder, window=4, lengths=(100, 200))
    assert report["model"]["num_parameters"] == tiny_llama().num_parameters()
    assert report["new_parameters"] == inspect(tiny_llama(), window=4)["new_parameters"]
    assert [row["length"] for row in report["lengths"]] == [100, 200]


@pytest.mark.parametrize(("k_map", "state_heads"), [("kv_head", 8), ("q_head", 32)])
def test_bytes_of_llama_8b_shapes(config_folder, k_map, state_heads):
    report = inspect(config_folder(LlamaConfig(**LLAMA_8B)), window=64, sinks=4, k_map=k_map)
    layer = report["layers"][0]
    state = state_heads * (256 * 128 + 256) * 4  # S and z, fp32
    keys = 8 * (63 + 4) * (128 + 128) * 2  # keys and values of window and sinks, bf16
    counter = 8
    assert layer["state_bytes"] == state + keys + counter
    assert layer["kv_bytes_per_token"] == 4096
    assert layer["break_even_length"] == -(-layer["state_bytes"] // 4096)


def test_the_state_is_smaller_from_the_break_even_length_on():
    report = inspect(tiny_llama(), window=4, lengths=(1,))
    even = report["break_even_length"]
    before, at = inspect(tiny_llama(), window=4, lengths=(even - 1, even))["lengths"]
    assert before["linearized_bytes"] > before["softmax_bytes"]
    assert at["linearized_bytes"] <= at["softmax_bytes"]


@pytest.mark.parametrize(
    ("state_heads", "flops", "equal_at"), [(8, 159_744, 624), (32, 196_608, 768)], ids=["kv", "q"]
)
def test_prefill_operations_are_the_known_answers(state_heads, flops, equal_at):
    options = dict(window=64, state_heads=state_heads, num_features=128, feature_dim=64)
    assert hybrid_flops(SHAPE_8B, **options) == 32 * flops
    assert softmax_flops(SHAPE_8B, equal_at) == 32 * flops


def test_layers_that_stay_say_why():
    report = inspect(tiny_llama(num_hidden_layers=4), window=4, layers="every:2")
    assert [row["converts"] for row in report["layers"]] == [True, False, True, False]
    assert report["layers"][1]["reason"] == "not among convert.layers"
    long = report["lengths"][-1]
    kept = 2 * report["layers"][1]["kv_bytes_per_token"] * long["length"]
    assert long["linearized_bytes"] == report["state_bytes"] + kept


def test_layers_with_a_window_of_their_own_stay_and_are_counted_by_it(config_folder):
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    report = inspect(config_folder(config), window=4, lengths=(1000, 2000))
    own, converted = report["layers"]
    assert own["reason"] == "has a sliding window of its own (16 tokens)"
    assert converted["converts"]
    first, second = report["lengths"]
    assert first["linearized_bytes"] == second["linearized_bytes"]
    assert first["softmax_bytes"] == 16 * own["kv_bytes_per_token"] + 1000 * 128


def test_mixtures_of_experts_are_inspected_without_memory(config_folder):
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    assert inspect(config_folder(config), window=4)["model"]["dtype"] == "float32"


def test_dtype_changes_the_cache_and_not_the_state():
    wide, narrow = (inspect(tiny_llama(), window=4, dtype=d) for d in ("float32", "bfloat16"))
    assert wide["kv_bytes_per_token"] == 2 * narrow["kv_bytes_per_token"]
    assert wide["new_parameters"] == narrow["new_parameters"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [0, 31]}, r"convert.layers: 31 is not a layer of this model .*\(0-1\)"),
        ({"window": 0}, "convert.window: 0 is not allowed"),
        ({"feature_map": "nope"}, "convert.feature_map: 'nope' is not known"),
        ({"dtype": "int8"}, "dtype: 'int8' is not known; choose one of auto, float32"),
    ],
    ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
)  # fmt: skip
def test_settings_that_are_not_possible_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        inspect(tiny_llama(), **options)


def test_a_family_that_cannot_be_converted_is_refused_by_name(config_folder):
    folder = config_folder(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="model_type 'bloom' cannot be converted"):
        inspect(folder)
