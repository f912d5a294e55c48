"""The classes, their way to a folder and back, and the private names of transformers in use."""

import copy
import inspect
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from accelerate import infer_auto_device_map, init_empty_weights
from conftest import ROOT, random_ids, randomize, tiny_linearized, tiny_llama, tiny_model
from families import ALL_FULL, VOCAB
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_imports
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from linearize import convert
from linearize.modeling import modeling_linearized
from linearize.modeling.attention import linearized_modules, softmax_attention
from linearize.modeling.cache import LinearizedLayer
from linearize.modeling.configuration_linearized import FORMAT_VERSION, LinearizeConfig
from linearize.modeling.modeling_linearized import FAMILIES, family_classes

GENERATE = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
CODE = {
    "accelerated.py", "attention.py", "cache.py", "configuration_linearized.py", "feature_maps.py",
    "chunked.py", "masking.py", "modeling_linearized.py", "ops.py",
    "rows.py", "softmax.py",
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny_linearized(sinks=1)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ids():
    return random_ids(2, 20)


@pytest.fixture(scope="module")
def logits(model, ids):
    return logits_of(model, ids)


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


# Classes
@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_a_family(family):
    config, model = family_classes(family)
    assert config.model_type == f"linearized_{family}"
    assert AutoConfig.for_model(config.model_type, linearize_config=None).__class__ is config
    assert getattr(modeling_linearized, model.__name__) is model
    assert inspect.signature(model.forward) == inspect.signature(
        MODEL_FOR_CAUSAL_LM_MAPPING[config.__mro__[1]].forward
    )


def test_class_of_a_family_that_is_not_supported():
    with pytest.raises(
        ValueError, match="model_type 'bloom' is not supported; supported are cohere, "
    ):
        family_classes("bloom")
    with pytest.raises(AttributeError, match="has no attribute 'LinearizedBloomConfig'"):
        modeling_linearized.LinearizedBloomConfig  # noqa: B018


def test_config_without_the_section_makes_no_model():
    config, model = family_classes("llama")
    with pytest.raises(
        ValueError, match=r"needs config.linearize_config; make one .* linearize.convert\(model\)"
    ):
        model(config())


def test_sections_of_a_later_format_are_refused(model):
    section = model.config.linearize_config
    with pytest.raises(
        ValueError,
        match=f"linearize_config.version: 99 is newer than this code \\({FORMAT_VERSION}\\)",
    ):
        LinearizeConfig.from_dict({**section, "version": 99})
    with pytest.raises(ValueError, match="linearize_config: unknown key 'decay'; update linearize"):
        LinearizeConfig.from_dict({**section, "decay": 1})
    assert LinearizeConfig.from_dict(section).to_dict() == section


def test_modules_that_a_family_keeps_in_fp32_stay_so():
    model = family_classes("deepseek_v3")[1]
    assert {"linearized", "e_score_correction_bias"} <= set(model._keep_in_fp32_modules_strict)


# A folder with its code
def test_folder_holds_the_code_and_the_map(folder):
    config = json.loads((folder / "config.json").read_text())
    assert {path.name for path in folder.glob("*.py")} == CODE
    assert config["model_type"] == "linearized_llama"
    assert config["auto_map"] == {
        "AutoConfig": "modeling_linearized.LinearizedLlamaConfig",
        "AutoModelForCausalLM": "modeling_linearized.LinearizedLlamaForCausalLM",
    }


def test_code_of_a_folder_needs_nothing_but_torch_and_transformers(folder):
    needed = {name for path in folder.glob("*.py") for name in get_imports(path)}
    assert needed - set(sys.stdlib_module_names) == {"torch", "transformers"}


def test_installed_class_wins_over_the_code_in_the_folder(model, folder, ids, logits):
    for flag in ({}, {"trust_remote_code": True}):
        loaded = load(folder, **flag)
        assert type(loaded) is type(model)
        assert torch.equal(logits_of(loaded, ids), logits)


def test_code_in_the_folder_and_the_package_live_together(
    model, folder, ids, logits, tmp_path, monkeypatch
):
    for module in (transformers.dynamic_module_utils, transformers.utils.hub):
        if hasattr(module, "HF_MODULES_CACHE"):
            monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    cls = get_class_from_dynamic_module(
        "modeling_linearized.LinearizedLlamaForCausalLM", str(folder)
    )
    assert cls is not type(model)
    foreign = cls.from_pretrained(folder)
    assert type(foreign.model.layers[0].self_attn.linearized).__module__.startswith(
        "transformers_modules."
    )
    for one in (foreign, model, foreign):
        assert torch.equal(logits_of(one, ids), logits)
    assert torch.equal(foreign.generate(ids, **GENERATE), model.generate(ids, **GENERATE))
    assert type(AutoConfig.from_pretrained(folder)) is type(model.config)


WITHOUT_PACKAGE = """
import sys
sys.modules["linearize"] = None  # importing it fails, as where it is not installed
import torch
from transformers import AutoModelForCausalLM
GENERATE = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
for name, ids, logits, tokens in torch.load("expected.pt"):
    for generation in (name, name + "-again"):
        model = AutoModelForCausalLM.from_pretrained(generation, trust_remote_code=True)
        with torch.no_grad():
            assert torch.equal(model(ids, use_cache=False).logits, logits), generation
        assert torch.equal(model.generate(ids, **GENERATE), tokens)
        if generation == name:
            model.save_pretrained(name + "-again")
try:
    AutoModelForCausalLM.from_pretrained("adapter", trust_remote_code=True)
except ImportError as error:
    assert "pip install linearize" in str(error), error
else:
    raise SystemExit("an adapter was loaded without its base")
"""


def test_folder_loads_where_the_package_is_missing(tmp_path, monkeypatch):
    """A hybrid, and a family whose experts are stored merged, over two generations of saving."""
    models = {
        "hybrid": tiny_linearized(layers=[1], softmax_heads={1: [0]}),
        "experts": randomize(convert(tiny_model("qwen3_moe", **ALL_FULL["qwen3_moe"]), window=4)),
    }
    expected = []
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        ids = random_ids(1, 15)
        expected.append((name, ids, logits_of(model, ids), model.generate(ids, **GENERATE)))
    torch.save(expected, tmp_path / "expected.pt")
    adapter = copy.deepcopy(models["hybrid"])
    adapter.config.linearize_config["delta"] = {"base_model": "nowhere"}
    adapter.save_pretrained(tmp_path / "adapter")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    run_python(WITHOUT_PACKAGE, tmp_path)


def run_python(code, folder):
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-2000:]


ELSEWHERE = """
import os, sys
sys.modules["triton"] = None
import torch
model = torch.load("model.pt", weights_only=False)  # the first that this process hears of linearize
ids, logits = torch.load("expected.pt")
with torch.no_grad():
    assert torch.equal(model(ids, use_cache=False).logits, logits)
model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
"""


def test_pickled_model_is_read_by_a_fresh_process_without_gpu_or_triton(
    model, ids, logits, tmp_path, monkeypatch
):
    torch.save(model, tmp_path / "model.pt")
    torch.save((ids, logits), tmp_path / "expected.pt")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run_python(ELSEWHERE, tmp_path)


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_independent(model, ids, logits, way):
    other = way(model)
    assert type(other) is type(model)
    assert [type(m) for m in linearized_modules(other).values()] == [
        type(m) for m in linearized_modules(model).values()
    ]
    assert torch.equal(logits_of(other, ids), logits)
    randomize(other)
    assert not torch.equal(logits_of(other, ids), logits)
    assert torch.equal(logits_of(model, ids), logits)


# Weights
def test_shards_load_as_one_file_does(model, ids, logits, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(load(tmp_path), ids), logits)


@pytest.mark.parametrize(
    "sizes", [("10KB", "1GB"), ("1GB", "10KB")], ids=["to-one-file", "to-shards"]
)
def test_saving_over_an_older_save_leaves_one_checkpoint(model, ids, tmp_path, sizes):
    changed = randomize(copy.deepcopy(model), seed=1)
    for one, size in zip((model, changed), sizes, strict=True):
        one.save_pretrained(tmp_path, max_shard_size=size)
    index = tmp_path / "model.safetensors.index.json"
    named = (
        set(json.loads(index.read_text())["weight_map"].values())
        if index.exists()
        else {"model.safetensors"}
    )
    assert {path.name for path in tmp_path.glob("*.safetensors")} == named
    assert torch.equal(logits_of(load(tmp_path), ids), logits_of(changed, ids))


def test_only_the_main_process_tidies_up(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    (tmp_path / "model.safetensors").touch()
    model.save_pretrained(tmp_path, is_main_process=False)
    assert len(list(tmp_path.glob("model.safetensors*"))) == 2


def test_bf16_model_keeps_its_new_parameters_in_fp32(ids, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    model = randomize(convert(load(tmp_path, dtype=torch.bfloat16), window=4))
    model.save_pretrained(tmp_path)
    expected = {True: torch.float32, False: torch.bfloat16}
    loaded = load(tmp_path)
    for tensors in (load_file(tmp_path / "model.safetensors"), dict(loaded.named_parameters())):
        assert all(
            tensor.dtype == expected[".linearized." in name] for name, tensor in tensors.items()
        )
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


def test_transposed_weights_are_saved_as_they_read(model, ids, logits, tmp_path):
    other = copy.deepcopy(model)
    weight = other.model.layers[0].self_attn.linearized.feature_map_q.weight
    weight.data = weight.data.mT.contiguous().mT
    assert not weight.is_contiguous()
    other.save_pretrained(tmp_path)
    assert torch.equal(logits_of(load(tmp_path), ids), logits)


def test_missing_parameters_of_linearized_layers_are_refused(folder, model, tmp_path):
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lacking = [name for name in tensors if "layers.1.self_attn.linearized" in name]
    save_file(
        {k: v for k, v in tensors.items() if k not in lacking},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        ValueError,
        match=rf"{len(lacking)} parameters of the linearized layers are missing.*model\.layers\.1",
    ):
        load(tmp_path)


def test_softmax_folder_does_not_become_linearized(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"needs config\.linearize_config"):
        family_classes("llama")[1].from_pretrained(tmp_path)


def test_class_loads_without_an_auto_class(model, folder, ids, logits):
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(logits_of(loaded, ids), logits)


def test_tensor_parallel_loading_is_refused(folder):
    with pytest.raises(
        NotImplementedError,
        match="tensor parallelism is not supported by linearized layers; use device_map",
    ):
        load(folder, tp_plan="auto")


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_layer_on_disk(ids, tmp_path, tied):
    model = tiny_linearized(model=tiny_llama(tie_word_embeddings=tied), sinks=1)
    model.save_pretrained(tmp_path / "model")
    stay = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(stay, "cpu")
    away = load(
        tmp_path / "model",
        device_map={**places, "model.layers.1": "disk"},
        offload_folder=tmp_path / "disk",
    )
    assert away.model.layers[1].self_attn.q_proj.weight.is_meta
    assert torch.equal(logits_of(away, ids), logits_of(model, ids))
    assert torch.equal(away.generate(ids, **GENERATE), model.generate(ids, **GENERATE))
    away.save_pretrained(tmp_path / "again")
    assert ("lm_head.weight" in load_file(tmp_path / "again" / "model.safetensors")) is not tied
    assert torch.equal(logits_of(load(tmp_path / "again"), ids), logits_of(model, ids))


def test_no_layer_is_cut_by_a_device_map(model):
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(model.config)
    sizes = sum(p.nbytes for p in empty.model.layers[0].parameters())
    blocks = empty._no_split_modules
    placed = infer_auto_device_map(
        empty, max_memory={0: 2 * sizes, "cpu": 10**9}, no_split_module_classes=blocks
    )
    names = [name for name, _ in [*empty.named_parameters(), *empty.named_buffers()]]
    assert all(any(name == key or name.startswith(f"{key}.") for key in placed) for name in names)
    assert not any(".layers." in key and key.count(".") > 2 for key in placed)
    assert len(set(placed.values())) > 1


# PEFT
TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:fan_in_fan_out:UserWarning"
)
@pytest.mark.parametrize("family", TARGETS)
def test_adapter_round_trip_and_merge(family, tmp_path):
    ids = random_ids(2, 20, vocab=VOCAB)
    base = randomize(convert(tiny_model(family, scale=2.0, **ALL_FULL[family]), window=4))
    base.save_pretrained(tmp_path / "model")
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=TARGETS[family], modules_to_save=["linearized"]
    )
    model = get_peft_model(base, config)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or ".linearized.modules_to_save." in name for name in trained)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = logits_of(model.eval(), ids)
    assert not torch.equal(expected, logits_of(load(tmp_path / "model"), ids))
    assert torch.equal(
        model.generate(input_ids=ids, **GENERATE),
        model.generate(input_ids=ids, use_cache=False, **GENERATE),
    )
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        load(tmp_path / "model"), tmp_path / "adapter", is_trainable=True
    )
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trained
    assert torch.equal(logits_of(again.eval(), ids), expected)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits_of(merged, ids), expected, atol=1e-4, rtol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    loaded, info = load(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits_of(loaded, ids), logits_of(merged, ids))


# Private names of transformers
def test_canary_attn_implementation_internal():
    model = tiny_llama()
    seen = []
    AttentionInterface.register(
        "canary",
        lambda module, q, k, v, *a, **kw: (seen.append(1), (v.new_zeros(1, 3, 4, 8), None))[1],
    )
    model.config._attn_implementation_internal = "canary"
    model(random_ids(1, 3))
    assert len(seen) == 2
    assert model.config._attn_implementation == "canary"
    AttentionInterface._global_mapping.pop("canary")


def test_canary_global_mapping():
    assert "sdpa" in AttentionInterface._global_mapping


def test_canary_prepare_cache_for_generation():
    names = list(inspect.signature(GenerationMixin._prepare_cache_for_generation).parameters)
    assert names[:3] == ["self", "generation_config", "model_kwargs"]


def test_canary_initialize_weights():
    assert "initialize_weights" in inspect.getsource(PreTrainedModel._initialize_missing_keys)


def test_canary_all_tied_weights_keys():
    assert dict(tiny_llama(tie_word_embeddings=True).all_tied_weights_keys) == {
        "lm_head.weight": "model.embed_tokens.weight"
    }
    assert not tiny_llama().all_tied_weights_keys


def test_canary_cache_layers():
    cache = DynamicCache()
    assert cache.layers == []
    assert cache.layer_class_to_replicate is DynamicLayer


def test_canary_abstract_members_of_a_cache_layer():
    assert all(name in vars(LinearizedLayer) for name in CacheLayerMixin.__abstractmethods__)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_canary_eager_attention_forward(family):
    model = convert(tiny_model(family, **ALL_FULL[family]))
    module = sys.modules[f"transformers.models.{family}.modeling_{family}"]
    assert model.config._attn_implementation == "eager"
    assert softmax_attention(linearized_modules(model)[0]) is module.eager_attention_forward


def test_canary_checkpoint_conversion_mapping():
    assert get_checkpoint_conversion_mapping("qwen3_moe")
    family_classes("qwen3_moe")
    assert get_checkpoint_conversion_mapping("linearized_qwen3_moe")
    assert get_checkpoint_conversion_mapping("llama") is None


def test_canary_trainer():
    assert list(inspect.signature(Trainer._save).parameters) == ["self", "output_dir", "state_dict"]
    assert list(inspect.signature(Trainer._load_from_checkpoint).parameters)[:2] == [
        "self",
        "resume_from_checkpoint",
    ]


def test_canary_causal_lm_mapping():
    assert MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig] is LlamaForCausalLM


def test_canary_keep_in_fp32():
    assert "_keep_in_fp32_modules_strict" in inspect.getsource(PreTrainedModel)
