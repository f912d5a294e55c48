"""TRL's SFTTrainer on a converted model: packed and padding-free rows train as the padded batch."""

import pytest
import torch
from conftest import tiny_linearized
from datasets import Dataset
from peft import LoraConfig
from tinytext import WORDS, chat_tokenizer
from transformers import AutoModelForCausalLM

trl = pytest.importorskip("trl", reason='needs pip install -e ".[ecosystem]"')
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

LENGTHS = (12, 30, 7, 25)
TEXTS = [" ".join(WORDS[(5 * n + 3 * i) % 61] for i in range(n)) for n in LENGTHS]
LORA = dict(
    task_type="CAUSAL_LM", r=4, modules_to_save=["linearized"],
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
)  # fmt: skip


@pytest.fixture
def sft(tmp_path):
    def make(lora=False, model=None, data=None, **options):
        arguments = trl.SFTConfig(
            **{
                "output_dir": str(tmp_path), "max_steps": 2, "per_device_train_batch_size": 4,
                "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no",
                "logging_steps": 1, "disable_tqdm": True, "max_length": None, "seed": 0,
                "learning_rate": 1e-2, **options,
            }
        )  # fmt: skip
        return trl.SFTTrainer(
            tiny_linearized(sinks=1) if model is None else model,
            args=arguments,
            train_dataset=Dataset.from_dict({"text": TEXTS}) if data is None else data,
            processing_class=chat_tokenizer(),
            peft_config=LoraConfig(**LORA) if lora else None,
        )

    return make


def trained(trainer):
    """(losses, what training changed)."""
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    moved = {n: p for n, p in trainer.model.named_parameters() if n in before}
    assert all(not torch.equal(moved[name], value) for name, value in before.items())
    return losses, moved


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "way",
    [dict(padding_free=True), dict(packing=True, max_length=80)],
    ids=["padding-free", "packing"],
)  # fmt: skip
def test_packed_documents_train_as_a_padded_batch(sft, lora, way):
    losses, padded = trained(sft(lora))
    trainer = sft(lora, **way)
    batch = next(iter(trainer.get_train_dataloader()))
    assert len(batch["input_ids"]) == 1 and "attention_mask" not in batch
    found, packed = trained(trainer)
    assert found == pytest.approx(losses, rel=1e-5)
    for name, value in padded.items():
        torch.testing.assert_close(packed[name], value, atol=1e-4, rtol=1e-4, msg=name)


def test_without_gradient_checkpointing_nothing_changes(sft):
    """TRL switches it on by itself."""
    assert trained(sft(gradient_checkpointing=False))[0] == pytest.approx(trained(sft())[0])


def test_chat_messages_from_a_folder(sft, tmp_path):
    folder = tmp_path / "model"
    tiny_linearized(sinks=1).save_pretrained(folder)
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    trainer = sft(model=str(folder), data=Dataset.from_dict({"messages": [turns] * 8}))
    first, second = trained(trainer)[0]
    assert second < first
    trainer.save_model(tmp_path / "trained")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert type(loaded).__name__ == "LinearizedLlamaForCausalLM"
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
