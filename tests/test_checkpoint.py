"""Adapters: a few MB beside a base model, which must be the right one."""

import copy
import json

import accelerate
import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from linearize import checkpoint
from linearize.checkpoint import base_hash, save_adapter
from linearize.modeling.attention import linearized_modules

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:.*base_model_name_or_path.*:UserWarning",
)


@pytest.fixture(scope="module")
def ids():
    return random_ids(2, 20)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


def trained(base, lora=True):
    """The base model, converted, with random new parameters and LoRA weights."""
    model = tiny_linearized(model=AutoModelForCausalLM.from_pretrained(base), window=5, sinks=1)
    if not lora:
        return model
    targets = ["q_proj", "o_proj"]
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=targets, modules_to_save=["linearized"]
    )
    model = get_peft_model(model, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or ".modules_to_save." in name:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "new-parameters-only"])
def test_adapter_comes_back_on_its_base(base, ids, tmp_path, lora):
    model = trained(base, lora)
    save_adapter(model, tmp_path, str(base))
    assert not list(tmp_path.glob("*.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "LinearizedLlamaForCausalLM"
    assert not loaded.training
    torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), atol=1e-5, rtol=1e-5)
    plain = type(loaded).from_pretrained(tmp_path)  # by the class itself
    assert torch.equal(logits_of(plain, ids), logits_of(loaded, ids))


def test_loaded_model_is_saved_whole(base, ids, tmp_path):
    save_adapter(trained(base), tmp_path / "adapter", base)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    loaded.save_pretrained(tmp_path / "whole")
    assert (
        json.loads((tmp_path / "whole" / "config.json").read_text())["linearize_config"]["delta"]
        is None
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert torch.equal(logits_of(again, ids), logits_of(loaded, ids))


def test_bf16_adapter_answers_like_its_model(base, ids, tmp_path):
    folder = tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(folder)
    model = trained(folder, lora=False)
    save_adapter(model, tmp_path / "adapter", folder)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


def test_dtype_and_loading_info_are_heard(base, ids, tmp_path):
    save_adapter(trained(base), tmp_path, base)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert info["missing_keys"] == set()
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == (torch.float32 if ".linearized." in name else torch.bfloat16), (
            name
        )


def test_other_base_is_refused(base, tmp_path):
    other = tmp_path / "other"
    tiny_llama(seed=1).save_pretrained(other)
    with pytest.raises(
        ValueError, match=r"the base weights of this model are not those of .*other"
    ):
        save_adapter(trained(base), tmp_path / "adapter", other)
    same = tmp_path / "same"
    tiny_llama().save_pretrained(same)
    save_adapter(trained(base), tmp_path / "adapter", same)
    tiny_llama(seed=1).save_pretrained(same)  # replaced behind the adapter's back
    with pytest.raises(
        ValueError, match=r"this adapter was trained on another base model than the .*same"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_merged_model_is_no_adapter(base, tmp_path):
    with pytest.raises(
        ValueError, match=r"save the adapter before LoRA is merged, finetune\(..., merge=False\)"
    ):
        save_adapter(trained(base).merge_and_unload(), tmp_path, base)


def test_softmax_model_has_no_adapter(base, tmp_path):
    with pytest.raises(
        ValueError, match="LlamaForCausalLM is not converted: there is no adapter to save"
    ):
        save_adapter(tiny_llama(), tmp_path, base)


def test_missing_base_is_named(base, tmp_path):
    save_adapter(trained(base, lora=False), tmp_path, base)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["linearize_config"]["delta"]["base_model"] = str(tmp_path / "gone")
    file.write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match=r"model .*gone: no such folder"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_incomplete_adapter_is_refused(base, tmp_path):
    save_adapter(trained(base, lora=False), tmp_path, base)
    file = tmp_path / "adapter" / "linearized.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.linearized.beta"]
    save_file(tensors, file)
    with pytest.raises(
        ValueError,
        match=r"does not fit the config, first at model.layers.1.self_attn.linearized.beta",
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_offloaded_weights_are_refused(base, tmp_path):
    """On the way in and on the way out."""
    message = "the model is offloaded to memory or disk, and an adapter needs its weights"
    offloaded = trained(base, lora=False)
    accelerate.cpu_offload(offloaded)
    with pytest.raises(ValueError, match=message):
        save_adapter(offloaded, tmp_path, base)
    save_adapter(trained(base, lora=False), tmp_path, base)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.layers.0": "cpu"}
    places |= {"lm_head": "cpu", "model.rotary_emb": "cpu", "model.layers.1": "disk"}
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, device_map=places, offload_folder=tmp_path / "offloaded"
        )


def test_quantized_base_is_refused(base, tmp_path, monkeypatch):
    save_adapter(trained(base, lora=False), tmp_path, base)

    def load_quantized(*args, **kwargs):
        model = AutoModelForCausalLM.from_pretrained(base)
        model.hf_quantizer = object()
        return model

    monkeypatch.setattr(checkpoint, "_load_base", load_quantized)
    with pytest.raises(ValueError, match=r"put on unquantized weights.*save_pretrained"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_hash_is_that_of_the_base_weights_only(base):
    plain = AutoModelForCausalLM.from_pretrained(base)
    expected = base_hash(plain)
    assert base_hash(copy.deepcopy(plain).to(torch.bfloat16)) == expected
    assert base_hash(trained(base, lora=False)) == expected
    assert base_hash(trained(base).get_base_model()) == expected
    for name, parameter in plain.named_parameters():
        with torch.no_grad():
            parameter.mul_(1.5)
        assert base_hash(plain) != expected, name
        with torch.no_grad():
            parameter.div_(1.5)


def test_all_converted_layers_are_there(base, tmp_path):
    model = trained(base, lora=False)
    save_adapter(model, tmp_path, base)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert linearized_modules(loaded).keys() == linearized_modules(model).keys()
    before, after = model.config.linearize_config, loaded.config.linearize_config
    assert before == after
