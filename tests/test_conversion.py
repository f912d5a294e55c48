"""What `convert` does to a model, which layers it takes, and whom it refuses."""

import copy

import accelerate
import pytest
import torch
from conftest import random_ids, tiny_llama, tiny_model
from families import ALL_FULL, MIXED, VOCAB
from peft import LoraConfig, get_peft_model
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3Config,
    LlamaModel,
    LlavaConfig,
)

from linearize import convert, teacher
from linearize.conversion import check_family, probe_geometry, resolve_layers
from linearize.modeling import modeling_linearized
from linearize.modeling.attention import linearized_modules
from linearize.modeling.configuration_linearized import K_MAPS, MIXING_RULES
from linearize.modeling.modeling_linearized import FAMILIES


# What comes out
def test_weights_are_taken_over_without_a_copy():
    base = tiny_llama()
    places = {name: p.data_ptr() for name, p in base.named_parameters()}
    model = convert(base)
    new = {name for name, _ in model.named_parameters()} - places.keys()
    assert {name: p.data_ptr() for name, p in model.named_parameters() if name not in new} == places
    assert all(".self_attn.linearized." in name for name in new)
    assert new


def test_buffers_and_settings_come_along():
    base = tiny_llama()
    base.generation_config.temperature = 0.5
    buffers = {name: b.clone() for name, b in base.named_buffers()}
    model = convert(base)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert model.generation_config.temperature == 0.5
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    assert not model.training
    assert convert(tiny_llama().train()).training


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embeddings_stay_tied_or_untied(tied):
    model = convert(tiny_llama(tie_word_embeddings=tied))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_new_parameters_are_fp32_beside_bf16_weights():
    model = convert(tiny_llama().to(torch.bfloat16))
    kinds = {(".linearized." in name, p.dtype) for name, p in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    assert model(random_ids(1, 9)).logits.dtype == torch.bfloat16


def test_config_tells_what_was_done():
    options = dict(
        window=7,
        sinks=1,
        feature_map="taylor",
        feature_dim=3,
        mixing="kernel",
        k_map="q_head",
        seed=5,
    )
    section = convert(tiny_llama(), layers=[1], **options).config.linearize_config
    assert {name: section[name] for name in options} == options
    assert (section["base_model_type"], section["layers"], section["delta"]) == ("llama", [1], None)
    shape = dict(num_heads=4, num_key_value_heads=2, qk_dim=8, v_dim=8, scaling=8**-0.5)
    assert section["geometry"] == {"1": shape}


def test_same_seed_same_start():
    starts = []
    for seed in (0, 0, 1):
        modules = linearized_modules(convert(tiny_llama(), feature_map="taylor", seed=seed))
        parameters = [p.flatten() for m in modules.values() for p in m.linearized.parameters()]
        starts.append(torch.cat(parameters))
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


# Geometry
def test_geometry_is_what_attention_sees():
    """Latent attention: the config's head size is neither that of keys nor that of values."""
    seen = probe_geometry(tiny_model("deepseek_v3", **dict(ALL_FULL["deepseek_v3"], v_head_dim=12)))
    assert (seen[0]["qk_dim"], seen[0]["v_dim"]) == (16, 12)
    assert seen[0]["num_key_value_heads"] == 4


def test_geometry_tells_which_layers_hide_old_keys():
    seen = probe_geometry(tiny_model("gemma2", **MIXED["gemma2"]))
    assert [bool(seen[i]["sliding"]) for i in range(4)] == [True, False, True, False]


def test_probe_leaves_no_trace():
    model = tiny_llama()
    before = copy.deepcopy(model.config.to_dict()), model.config._attn_implementation
    ids = random_ids(1, 9)
    logits = model(ids).logits
    probe_geometry(model)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert torch.equal(model(ids).logits, logits)


def test_model_that_never_calls_the_interface_is_refused():
    config = CONFIG_MAPPING["bloom"](vocab_size=VOCAB, hidden_size=64, n_layer=1, n_head=4)
    with pytest.raises(
        ValueError,
        match="model_type 'bloom' cannot be converted: no layer uses the attention interface",
    ):
        probe_geometry(AutoModelForCausalLM.from_config(config))


# Layers
FIVE = {layer: {"sliding": layer == 2} for layer in range(5)}


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ("all", [0, 1, 3, 4]),
        ("every:1", [0, 1, 3, 4]),
        ("every:2", [0, 3]),
        ([3, 0, 3], [0, 3]),
        ([4], [4]),
    ],
    ids=str,
)
def test_layers(layers, chosen):
    assert resolve_layers(layers, FIVE) == chosen


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([31], r"convert.layers: 31 is not a layer of this model with attention \(0-4\)"),
        ([-1], r"convert.layers: -1 is not a layer of this model with attention \(0-4\)"),
        ([], "convert.layers: the list is empty"),
        ("some", 'convert.layers: \'some\' is not known; give "all", "every:2" or a list'),
        ("every:0", "convert.layers: 'every:0' is not known"),
        ("every:x", "convert.layers: 'every:x' is not known"),
        ("2", "convert.layers: '2' is not known"),
    ],
    ids=str,
)
def test_layers_that_make_no_sense_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        resolve_layers(layers, FIVE)


def test_sliding_layers_are_converted_with_a_warning_only():
    with pytest.warns(UserWarning, match=r"layers \[2\] have a sliding window of their own"):
        assert resolve_layers([2, 1], FIVE) == [1, 2]
    with pytest.raises(
        ValueError,
        match="'all' selects nothing, because every layer of this model has a sliding window",
    ):
        resolve_layers("all", {0: {"sliding": True}})


@pytest.mark.parametrize("layers", [[1], "every:2"], ids=str)
def test_other_layers_stay_softmax(layers):
    model = convert(tiny_llama(num_hidden_layers=3), layers=layers)
    expected = [1] if layers == [1] else [0, 2]
    assert list(linearized_modules(model)) == model.config.linearize_config["layers"] == expected


# Refusals
CANNOT = {
    "bloom": r"its attention adds position biases \(ALiBi\)",
    "falcon": "its attention does not use the attention interface",
    "mpt": r"its attention adds position biases \(ALiBi\)",
    "bert": r"it is an encoder \(is_decoder is false\)",
    "t5": "it is an encoder-decoder",
    "bart": "it is an encoder-decoder",
    "vit": "transformers has no causal language model of this type",
    "mamba": "it has not passed the tests of a supported family",
}


@pytest.mark.parametrize("family", CANNOT)
def test_families_that_cannot_work_are_refused_by_name(family):
    with pytest.raises(
        ValueError,
        match=f"model_type '{family}' cannot be converted: ({CANNOT[family]}).* Supported: ",
    ):
        check_family(CONFIG_MAPPING[family]())


@pytest.mark.parametrize("config", [Gemma3Config, LlavaConfig], ids=["gemma3", "llava"])
def test_multimodal_wrappers_are_sent_to_their_text_model(config):
    with pytest.raises(
        ValueError,
        match=r"a multimodal one; load the text model \((gemma3_text|llama)\) and convert that",
    ):
        check_family(config())


def test_refusal_comes_before_anything_is_touched():
    config = CONFIG_MAPPING["falcon"](
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(ValueError, match="model_type 'falcon' cannot be converted"):
        convert(AutoModelForCausalLM.from_config(config))


def test_supported_families_pass():
    for family in FAMILIES:
        check_family(CONFIG_MAPPING[family]())


def test_converting_twice_is_refused():
    with pytest.raises(ValueError, match="model_type 'linearized_llama' is converted already"):
        convert(convert(tiny_llama()))


def test_conversion_that_misses_layers_is_an_error(monkeypatch):
    monkeypatch.setattr(modeling_linearized, "linearize_", lambda module, section: None)
    with pytest.raises(ValueError, match="2 layers were asked for and 0 converted"):
        convert(tiny_llama())


def test_body_without_a_head_is_refused():
    with pytest.raises(
        ValueError, match="LlamaModel cannot be converted, but LlamaForCausalLM can"
    ):
        convert(LlamaModel(tiny_llama().config))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_are_merged_before():
    model = get_peft_model(
        tiny_llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    with pytest.raises(
        ValueError, match=r"PeftModelForCausalLM cannot be converted.*merge_and_unload"
    ):
        convert(model)


def test_quantized_model_is_refused():
    model = tiny_llama()
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match=r"the model is quantized.*GgufConfig\(dequantize=True\)"):
        convert(model)


class Linear4bit(torch.nn.Linear):
    """Stands for the layers of quantization libraries, put in without transformers' knowledge."""


def test_modules_that_the_class_does_not_make_are_refused():
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj = Linear4bit(32, 48, bias=False)
    message = r"layers\.1\.mlp\.up_proj is a Linear4bit, which LlamaForCausalLM does not have"
    with pytest.raises(ValueError, match=message):
        convert(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_inside_of_a_stock_model_are_refused():
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    inside = get_peft_model(tiny_llama(), config).get_base_model()
    with pytest.raises(ValueError, match=r"q_proj is a Linear.*merge_and_unload"):
        convert(inside)


def test_offloaded_model_is_refused():
    for offload in (lambda m: m.model.layers[1].to("meta"), accelerate.cpu_offload):
        model = tiny_llama()
        offload(model)
        with pytest.raises(ValueError, match="spread over several devices, or offloaded"):
            convert(model)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("window", 0, "convert.window: 0 is not allowed; give a whole number of at least 1"),
        ("window", 2.5, "convert.window: 2.5 is not allowed"),
        ("sinks", -1, "convert.sinks: -1 is not allowed; give a whole number of at least 0"),
        ("sinks", True, "convert.sinks: True is not allowed"),
        (
            "mixing",
            "sum",
            f"convert.mixing: 'sum' is not known; choose one of {', '.join(MIXING_RULES)}",
        ),
        (
            "k_map",
            "layer",
            f"convert.k_map: 'layer' is not known; choose one of {', '.join(K_MAPS)}",
        ),
        (
            "feature_map",
            "hedgehogs",
            "convert.feature_map: 'hedgehogs' is not known; choose one of hedgehog, ",
        ),
        ("feature_dim", 0, "convert.feature_dim: 0 is not allowed"),
    ],
    ids=lambda x: str(x)[:12],
)
def test_options_that_make_no_sense_are_refused(option, value, message):
    with pytest.raises(ValueError, match=message):
        convert(tiny_llama(), **{option: value})


def test_kernel_rule_with_normalised_features_is_warned_of():
    with pytest.warns(UserWarning, match="convert.mixing: 'kernel' reads"):
        convert(tiny_llama(), mixing="kernel", feature_map="hedgehog")


def test_attention_dropout_is_warned_of():
    with pytest.warns(UserWarning, match="attention_dropout is 0.1 in the base model"):
        convert(tiny_llama(attention_dropout=0.1))


# The teacher's own terms
WIDE = dict(window=64)


def assert_is_the_original(model):
    ids = random_ids(2, 20, vocab=VOCAB)
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(
            convert(model, **WIDE)(ids).logits, expected, atol=1e-4, rtol=1e-5
        )
    return expected


def test_soft_capping_and_own_scale_are_kept():
    capped = dict(ALL_FULL["gemma2"], attn_logit_softcapping=1.0, query_pre_attn_scalar=7)
    expected = assert_is_the_original(tiny_model("gemma2", **capped))
    without = tiny_model("gemma2", **dict(capped, attn_logit_softcapping=None))
    assert (without(random_ids(2, 20, vocab=VOCAB)).logits - expected).abs().max() > 1e-2


def test_soft_capping_is_kept_where_the_model_was_loaded_with_sdpa():
    """Which has none: some releases of transformers accept it and drop the cap."""
    settings = dict(ALL_FULL["gemma2"], attn_logit_softcapping=1.0)
    expected, model = (tiny_model("gemma2", **settings) for _ in range(2))
    model.config._attn_implementation_internal = "sdpa"
    with pytest.warns(UserWarning, match="'sdpa', which drops its soft cap; .* uses 'eager'"):
        model = convert(model, **WIDE)
    ids = random_ids(2, 20, vocab=VOCAB)
    with torch.no_grad(), teacher(model):
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-5)


def test_learned_sinks_of_the_teacher_are_kept():
    model = tiny_model("gpt_oss", **ALL_FULL["gpt_oss"])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(1.0)
    assert_is_the_original(model)


def test_two_rotary_bases_are_kept():
    bases = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    model = tiny_model("gemma3_text", **dict(MIXED["gemma3_text"], rope_parameters=bases))
    ids = random_ids(2, 20, vocab=VOCAB)
    with torch.no_grad():
        expected = model(ids).logits
        with pytest.warns(UserWarning, match="sliding window of their own"):
            both = convert(
                copy.deepcopy(model), layers=[0, 3], window=8
            )  # layer 0 hides keys older than 8
        full = convert(model, **WIDE)
    torch.testing.assert_close(full(ids).logits, expected, atol=1e-4, rtol=1e-5)
    assert list(linearized_modules(both)) == [0, 3]


@pytest.mark.parametrize("switched_on", [True, False], ids=["on", "off"])
def test_own_sliding_windows_are_read_from_what_they_resolve_to(switched_on):
    settings = dict(ALL_FULL["qwen2"], num_hidden_layers=3, sliding_window=4, max_window_layers=1)
    model = tiny_model("qwen2", use_sliding_window=switched_on, **settings)
    ids = random_ids(2, 20, vocab=VOCAB)
    with torch.no_grad():
        expected = model(ids).logits
        model = convert(model, **WIDE)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-5)
    assert list(linearized_modules(model)) == ([0] if switched_on else [0, 1, 2])
