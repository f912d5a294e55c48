"""PEFT on top of a converted model: what trains, what is saved, what comes back, what merges."""

import copy

import pytest
import torch
from conftest import random_ids, tiny_linearized
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from tolerances import GUARD, LOGITS
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:`gradient_checkpointing:FutureWarning",
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
NEW = ["linearized"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_linearized(sinks=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ids():
    return random_ids(4, 24)


@torch.no_grad()
def logits_of(model, ids):
    return model.eval()(input_ids=ids, use_cache=False).logits


def with_lora(folder, **options):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=PROJECTIONS, **options)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)


def train(model, ids, output, **options):
    arguments = TrainingArguments(
        str(output), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", **options,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model, arguments, train_dataset=rows).train()
    return model


@pytest.mark.parametrize("new", [NEW, None], ids=["new-parameters-too", "lora-only"])
def test_trained_saved_loaded_merged(folder, ids, tmp_path, new):
    model = with_lora(folder, modules_to_save=new)
    untrained = copy.deepcopy(model.state_dict())
    model = train(model, ids, tmp_path / "training")
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, untrained[name])}
    kinds = [".lora_A.", ".lora_B."] + [".modules_to_save."] * bool(new)
    assert all(any(kind in name for kind in kinds) for name in moved)
    assert {kind for kind in kinds if any(kind in name for name in moved)} == set(kinds)
    after = logits_of(model, ids)
    assert (
        after - logits_of(AutoModelForCausalLM.from_pretrained(folder), ids)
    ).abs().max() > GUARD

    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits_of(loaded, ids), after)
    onto = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits_of(PeftModel.from_pretrained(onto, tmp_path / "adapter"), ids), after)

    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits_of(merged, ids), after, atol=LOGITS, rtol=0)
    merged.save_pretrained(tmp_path / "merged")
    plain, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits_of(plain, ids), after, atol=LOGITS, rtol=0)


def test_gradient_checkpointing_gives_the_same_weights(folder, ids, tmp_path):
    def trained(name, **options):
        torch.manual_seed(0)
        return train(with_lora(folder, modules_to_save=NEW), ids, tmp_path / name, **options)

    plain = dict(trained("plain").named_parameters())
    settings = dict(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, x in trained("less", gradient_checkpointing=True, **settings).named_parameters():
        torch.testing.assert_close(x, plain[name], atol=1e-6, rtol=1e-5, msg=name)


def test_an_adapter_that_is_off_leaves_the_converted_model(folder, ids, tmp_path):
    model = train(with_lora(folder, modules_to_save=NEW), ids, tmp_path)
    converted = logits_of(AutoModelForCausalLM.from_pretrained(folder), ids)
    with model.disable_adapter():
        assert torch.equal(logits_of(model, ids), converted)
    assert not torch.equal(logits_of(model, ids), converted)


def test_two_adapters_take_turns(folder, ids, tmp_path):
    one = train(with_lora(folder, modules_to_save=NEW), ids, tmp_path / "one")
    other = train(with_lora(folder, modules_to_save=NEW), ids.flip(1), tmp_path / "other")
    for name, model in (("one", one), ("other", other)):
        model.save_pretrained(tmp_path / name)
    both = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "one", adapter_name="one"
    )
    both.load_adapter(tmp_path / "other", "other")
    for name, model in (("other", other), ("one", one)):
        both.set_adapter(name)
        assert torch.equal(logits_of(both, ids), logits_of(model, ids))
    assert not torch.equal(logits_of(one, ids), logits_of(other, ids))


def test_all_linear_leaves_the_new_parameters_alone(folder):
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    adapted = {n.rpartition(".")[2] for n, m in model.named_modules() if hasattr(m, "lora_A")}
    assert adapted == {*PROJECTIONS, "gate_proj", "up_proj", "down_proj"}


def test_targets_have_no_default(folder):
    with pytest.raises(ValueError, match="Please specify `target_modules`"):
        get_peft_model(
            AutoModelForCausalLM.from_pretrained(folder), LoraConfig(task_type="CAUSAL_LM")
        )
