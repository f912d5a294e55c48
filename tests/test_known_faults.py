"""Faults that users of neighbouring projects reported: the fifteen that must never come back.

The comment above a test names where it was seen. What is not here stands with its subject:

A1  state in half precision              modeling/test_ops_invariants.py, modeling/test_cache.py
A2  window edge                          here, modeling/test_ops.py, modeling/test_ops_invariants.py
A3  left padding without positions       here, modeling/test_cache.py
A4  mask that never arrives              modeling/test_cache.py
A5  several tokens onto a filled cache   modeling/test_cache.py
A6  length counter, bytes of the cache   modeling/test_cache.py
A7  saved model does not come back       modeling/test_modeling_linearized.py
A8  loading overwrites or leaves tensors here
A9  tied embeddings                      here, test_conversion.py
A10 packed documents see each other      test_data.py, test_finetuning.py, test_generation.py
A11 transfer without the teacher         test_transfer.py, modeling/test_attention.py
A12 accumulation changes the objective   here, test_{training,transfer,finetuning}.py
A13 a resume that is none                here, test_{training,transfer,finetuning}.py
A14 tokens misaligned or scored twice    evaluation/test_perplexity.py, evaluation/test_windows.py
A15 head size, biases, q/k norm          here, modeling/test_families.py
"""

import numpy as np
import pytest
import torch
from conftest import random_ids, randomize, tiny_linearized, tiny_llama, tiny_model
from families import cache_argument
from safetensors.torch import load_file
from tolerances import ACCUMULATION, GUARD, LOGITS, TEACHER
from transformers import AutoModelForCausalLM, DynamicCache

from linearize import branches, convert
from linearize.data import TokenDataset
from linearize.finetuning import finetune
from linearize.modeling.attention import linearized_modules, transfer
from linearize.transfer import transfer_attention

WINDOW = 4


def logits_of(model, ids, **settings):
    with torch.no_grad():
        return model(ids, use_cache=False, **settings).logits


def assert_linear_branch_matters(model, ids):
    """Else the test proves nothing."""
    with branches(model, linear=False):
        window_only = logits_of(model, ids)
    assert (window_only - logits_of(model, ids)).abs().max() > GUARD


def dataset(lengths, *, length, seed=0):
    """Rows of `length` tokens from random documents of the given lengths."""
    rng = np.random.default_rng(seed)
    return TokenDataset([rng.integers(3, 64, n).astype(np.int32) for n in lengths], length=length)


# ---------------------------------------------------------------- A2
# https://github.com/ml-explore/mlx-lm/pull/390 , https://github.com/huggingface/transformers/issues/29623
@pytest.mark.parametrize("path", ["forward", "decode", "two-parts"])
def test_window_is_the_token_and_the_three_before_it(path):
    """One layer, 12 tokens: position 10 reacts to 7 to 10, with the linear branch to 0 to 10."""
    model = tiny_linearized(model=tiny_llama(num_hidden_layers=1), window=WINDOW)
    ids = random_ids(1, 12)

    def at_10(ids):
        if path == "forward":
            return logits_of(model, ids)[:, 10]
        cache = DynamicCache()
        for part in ids[:, :11].split(1 if path == "decode" else 6, dim=1):
            with torch.no_grad():
                logits = model(part, **cache_argument(cache)).logits
        return logits[:, -1]

    def reacts_to():
        before = at_10(ids)
        changed = [torch.where(torch.arange(12) == j, (ids + 7) % 64, ids) for j in range(12)]
        return [j for j, x in enumerate(changed) if not torch.equal(at_10(x), before)]

    assert reacts_to() == list(range(11))
    with branches(model, linear=False):
        assert reacts_to() == [7, 8, 9, 10]


# ---------------------------------------------------------------- A3
# https://github.com/TransformerLensOrg/TransformerLens/pull/1610 , https://github.com/huggingface/transformers/pull/48946
def test_left_padding_without_position_ids():
    model, mask = tiny_linearized(window=1), torch.tensor([[0, 0, 0, 1, 1, 1]])
    ids = torch.tensor([[0, 0, 0, 5, 6, 7]])
    alone = logits_of(model, ids[:, 3:])
    assert_linear_branch_matters(model, ids[:, 3:])
    assert torch.allclose(logits_of(model, ids, attention_mask=mask)[:, 3:], alone, atol=LOGITS)
    shifted = logits_of(
        model, ids, attention_mask=mask, position_ids=torch.arange(6)[None]
    )  # explicit ones win
    assert (shifted[:, 3:] - alone).abs().max() > GUARD


# ---------------------------------------------------------------- A8
# https://github.com/huggingface/transformers/issues/46620 , /issues/48892 , /issues/34234
ROUTES = {
    "plain": {},
    "device-map": dict(device_map="cpu"),
    "low-memory": dict(low_cpu_mem_usage=True),
    "bf16": dict(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["hedgehog_exp", "favor"])
def test_loading_leaves_every_tensor_as_it_was_saved(tmp_path, name, route):
    model = tiny_linearized(feature_map=name, sinks=2)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".linearized." in key:
                parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, **ROUTES[route]
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    saved = model.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    for key, tensor in loaded.state_dict().items():
        low = route == "bf16" and ".linearized." not in key
        assert tensor.dtype == (torch.bfloat16 if low else torch.float32), key
        assert torch.equal(tensor, saved[key].to(tensor.dtype)), key
    fresh = dict(tiny_llama().named_buffers())  # those outside the state dict
    computed = {key: b for key, b in loaded.named_buffers() if ".linearized." not in key}
    assert computed.keys() == fresh.keys() != set()
    assert all(torch.equal(b, fresh[key]) for key, b in computed.items())


# ---------------------------------------------------------------- A9
# https://github.com/huggingface/transformers/issues/30202 , /issues/41038 , /issues/38870
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tied_embeddings_stay_tied_and_others_do_not(tmp_path, tied):
    model, ids = tiny_linearized(model=tiny_llama(tie_word_embeddings=tied)), random_ids(2, 20)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    assert all(tensor.numel() for tensor in stored.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for one in (model, loaded):
        pointers = {
            x.weight.data_ptr() for x in (one.get_input_embeddings(), one.get_output_embeddings())
        }
        assert len(pointers) == (1 if tied else 2)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


# ---------------------------------------------------------------- A10
# https://github.com/huggingface/trl/issues/1230 , https://github.com/huggingface/nanoVLM/pull/204
def test_teacher_targets_of_packed_documents_are_those_of_separate_runs():
    model, lengths = tiny_linearized(), (5, 9, 3)
    ids, positions = random_ids(1, 17), torch.cat([torch.arange(n) for n in lengths])[None]

    def targets(ids, **settings):
        told = []

        def observer(module, q, k, v, out, **inputs):
            told.append(out)

        with transfer(model, observer), torch.no_grad():
            model(ids, use_cache=False, **settings)
        return torch.stack(told)  # [layers, B, H, T, Dv]

    packed = targets(ids, position_ids=positions)
    alone = torch.cat([targets(part) for part in ids.split(lengths, 1)], 3)
    assert torch.allclose(packed, alone, atol=TEACHER)
    other = torch.cat([random_ids(1, 5, seed=3), ids[:, 5:]], 1)
    assert torch.equal(targets(other, position_ids=positions)[..., 5:, :], packed[..., 5:, :])
    joined = targets(ids, position_ids=torch.arange(17)[None])
    assert (joined - packed).abs().max() > GUARD


# ---------------------------------------------------------------- A12
# https://github.com/huggingface/transformers/pull/34191 , https://github.com/huggingface/trl/pull/6006
def run_stage(stage, model, rows, folder, **settings):
    """(the trained model, metrics) of one stage."""
    settings = {"progress": False, "seed": 3, "logging_steps": 1, "output_dir": folder, **settings}
    if stage == "transfer":
        return model, transfer_attention(model, rows, num_queries=None, **settings)
    return finetune(model, rows, loss=stage, method="full", **settings)


STAGES = ["transfer", "kl", "ce"]


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_is_the_large_batch(tmp_path, stage):
    """Documents of 4, 30, 4 and 30 tokens in four rows: their losses have very different counts."""
    rows = dataset([4, 26, 30, 4, 26, 30], length=30)  # rows: 4 + 26, 30, 4 + 26, 30
    settings = dict(max_steps=1, clip=0.0, learning_rate=1e-2, warmup=0.0)
    models, losses, start = [], [], tiny_linearized()
    for batch, accumulation in ((4, 1), (1, 4)):
        sizes = dict(batch_size=batch, accumulation=accumulation)
        model, result = run_stage(
            stage, tiny_linearized(), rows, tmp_path / str(batch), **settings, **sizes
        )
        models.append(dict(model.named_parameters()))
        losses.append(result["history"][-1]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=ACCUMULATION)
    moved = 0.0
    for name, begin in start.named_parameters():
        step, other = (m[name] - begin for m in models)
        moved += step.norm()
        assert (step - other).norm() <= ACCUMULATION * max(step.norm(), 1.0), name
    assert moved > 1e-2


# ---------------------------------------------------------------- A13
# https://github.com/huggingface/transformers/issues/24252 , https://github.com/huggingface/lerobot/issues/3459
class Killed(Exception):
    pass


class Dying:
    """A data set that raises after some rows have been read, and notes which they were."""

    def __init__(self, rows, after=None):
        self.rows, self.after, self.seen = rows, after, []
        self.length, self.num_tokens, self.description = (
            rows.length,
            rows.num_tokens,
            rows.description,
        )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if len(self.seen) == self.after:
            raise Killed
        self.seen.append(index)
        return self.rows[index]


@pytest.mark.parametrize("stage", ["transfer", "kl"])
def test_resumed_run_is_the_uninterrupted_run(tmp_path, stage):
    rows = dataset([24] * 9, length=24)
    settings = dict(max_steps=10, save_steps=5, batch_size=2, accumulation=1, warmup=0.3)
    measured = 9 if stage == "transfer" else 0  # rows that are read before the first step
    first, killed, second = Dying(rows), Dying(rows, after=measured + 13), Dying(rows)
    whole, broken = (tmp_path / name for name in ("whole", "broken"))
    expected, result = run_stage(stage, tiny_linearized(), first, whole, **settings)
    with pytest.raises(Killed):
        run_stage(stage, tiny_linearized(), killed, broken, **settings)
    assert sorted(x.name for x in broken.glob("checkpoint-*")) == ["checkpoint-5"]
    resumed, again = run_stage(stage, tiny_linearized(), second, broken, **settings)
    assert second.seen[-8:] == first.seen[-8:]
    for (name, a), b in zip(expected.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    keys = ("step", "loss", "learning_rate", "grad_norm", "tokens")
    assert [[x[key] for key in keys] for x in again["history"]] == [
        [x[key] for key in keys] for x in result["history"]
    ]
    for name in ("optimizer.pt", "scheduler.pt"):
        saved = [torch.load(folder / "checkpoint-10" / name) for folder in (whole, broken)]
        assert_equal(*saved)
    done, third = run_stage(
        stage, tiny_linearized(), Dying(rows, after=0), broken, **settings
    )  # reads nothing
    assert third["history"] == again["history"]
    assert all(
        torch.equal(a, b) for a, b in zip(done.parameters(), expected.parameters(), strict=True)
    )
    with pytest.raises(ValueError, match=r"learning_rate: .* was started with"):
        run_stage(stage, tiny_linearized(), Dying(rows), broken, **settings, learning_rate=0.5)


def assert_equal(a, b):
    """Nested containers with equal tensors."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_equal(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def test_a_checkpoint_of_another_stage_is_recognised(tmp_path):
    rows = dataset([24] * 4, length=24)
    run_stage("transfer", tiny_linearized(), rows, tmp_path, max_steps=1)
    with pytest.raises(
        ValueError, match=r"stage: .* was started with 'transfer', this run has 'finetune'"
    ):
        run_stage("kl", tiny_linearized(), rows, tmp_path, max_steps=1)


# ---------------------------------------------------------------- A15
# https://github.com/huggingface/transformers/issues/38373 , https://github.com/SafeAILab/EAGLE/issues/223
HEAD_SIZES = {
    "llama": 8,
    "mistral": 8,
    "qwen2": 8,
    "qwen3": 16,
}  # qwen3: 4 x 16 is not the hidden size of 32


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", HEAD_SIZES)
def test_biases_norms_and_head_size_of_the_base_model_are_kept(family, kv_heads):
    settings = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=HEAD_SIZES[family],
        max_position_embeddings=256,
    )  # fmt: skip
    if family == "mistral":
        settings["sliding_window"] = None

    def original():
        model = tiny_model(family, **settings)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter += torch.randn(parameter.shape, generator=generator)
        return model

    ids = random_ids(2, 20)
    names = {
        n.rpartition("self_attn.")[2] for n, _ in original().named_parameters() if "self_attn" in n
    }
    assert ("q_proj.bias" in names) is (family == "qwen2")
    assert ("q_norm.weight" in names) is (family == "qwen3")
    expected = logits_of(original(), ids)
    everything = randomize(convert(original(), window=20, sinks=0))
    assert torch.allclose(logits_of(everything, ids), expected, atol=LOGITS)
    small, cache = randomize(convert(original(), window=WINDOW)), DynamicCache()
    assert_linear_branch_matters(small, ids)
    with torch.no_grad():
        small(ids, **cache_argument(cache))
    size = HEAD_SIZES[family]
    for layer, module in linearized_modules(small).items():
        state = cache.layers[layer].state
        assert state.S.shape == (2, kv_heads, 2 * size, size)
        assert state.window_k.shape == (2, kv_heads, WINDOW - 1, size)
        assert module.linearized.feature_map_q.weight.shape == (4, size, size)
