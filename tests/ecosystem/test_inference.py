"""Pipelines, chat templates, device maps and offload hooks: what the model answers through
them is what it answers by itself.
"""

import accelerate
import pytest
import torch
from conftest import random_ids, tiny_linearized
from tinytext import WORDS, chat_tokenizer
from tolerances import LOGITS
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

STEPS = 8
GREEDY = dict(do_sample=False, max_new_tokens=STEPS)
PROMPTS = [" ".join(WORDS[:n]) for n in (14, 1, 6)]
TURNS = [
    {"role": "system", "content": "w9 w8 w7"},
    {"role": "user", "content": "w1 w2 w3 w4 w5 w6"},
    {"role": "assistant", "content": "w20 w21"},
    {"role": "user", "content": "w30"},
]


@pytest.fixture(scope="module")
def model():
    model = tiny_linearized(sinks=2, window=4)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(params=["model", "folder"])
def writer(request, model, folder):
    """A text-generation pipeline, of a model in memory or in a folder."""
    given = dict(model=model, tokenizer=chat_tokenizer())
    given = given if request.param == "model" else dict(model=str(folder))
    return pipeline("text-generation", device="cpu", **given)


@torch.no_grad()
def continued(model, ids):
    """The next tokens of one prompt [1, T], without a cache and a mask."""
    for _ in range(STEPS):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def words(model, prompt):
    tokenizer = chat_tokenizer()
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    new = continued(model, ids)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True).split()


def written(entry, prompt):
    return entry["generated_text"].removeprefix(prompt).split()


# --------------------------------------------------------------------------------------- pipelines
def test_pipeline(model, writer):
    (entry,) = writer(PROMPTS[0], **GREEDY)
    assert written(entry, PROMPTS[0]) == words(model, PROMPTS[0])


def test_pipeline_of_a_padded_batch(model, writer):
    entries = writer(PROMPTS, batch_size=len(PROMPTS), **GREEDY)
    for (entry,), prompt in zip(entries, PROMPTS, strict=True):
        assert written(entry, prompt) == words(model, prompt)


def test_pipeline_of_a_chat(model, writer):
    (entry,) = writer(TURNS, **GREEDY)
    prompt = chat_tokenizer().apply_chat_template(TURNS, add_generation_prompt=True, tokenize=False)
    assert entry["generated_text"][-1]["role"] == "assistant"
    assert entry["generated_text"][-1]["content"].split() == words(model, prompt)


# ---------------------------------------------------------------------------------- chat templates
def test_chat_template_is_saved_and_continues_turn_by_turn(model, folder):
    """A cache that is kept over the turns answers like the whole chat anew."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = dict(return_tensors="pt", return_dict=True)
    whole = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, **template)
    first = tokenizer.apply_chat_template(TURNS[:2], add_generation_prompt=True, **template)
    cache = model.generate(**first, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(cache.sequences, continued(model, first["input_ids"]))
    answer = tokenizer.decode(cache.sequences[0, first["input_ids"].shape[1] :])
    turns = [*TURNS[:2], {"role": "assistant", "content": answer}, TURNS[3]]
    whole = tokenizer.apply_chat_template(turns, add_generation_prompt=True, **template)
    length = cache.sequences.shape[1]
    assert torch.equal(whole["input_ids"][:, :length], cache.sequences)
    name = "cache" if "cache" in cache else "past_key_values"
    again = model.generate(**whole, **GREEDY, **{name: cache[name]})
    assert torch.equal(again, continued(model, whole["input_ids"]))


def test_streamed_text_is_the_text(model):
    tokenizer = chat_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**tokenizer(PROMPTS[0], return_tensors="pt"), **GREEDY, streamer=streamer)
    assert "".join(streamer).split() == words(model, PROMPTS[0])


# ------------------------------------------------------------------------- device maps and offload
@torch.no_grad()
def assert_same(model, other):
    ids = random_ids(2, 30)
    torch.testing.assert_close(other(ids).logits, model(ids).logits, atol=LOGITS, rtol=0)
    settings = dict(GREEDY, pad_token_id=0, attention_mask=torch.ones_like(ids))
    assert torch.equal(other.generate(ids, **settings), model.generate(ids, **settings))


@pytest.mark.parametrize("share", [1.0, 0.9, 0.3], ids=["in-memory", "last-layers", "nearly-all"])
def test_device_map_auto_puts_on_disk_what_does_not_fit(model, folder, tmp_path, share):
    room = int(share * model.get_memory_footprint()) + (share == 1) * 2**20
    where = dict(device_map="auto", max_memory={"cpu": room}, offload_folder=tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder, **where)
    on_disk = "disk" in getattr(loaded, "hf_device_map", {}).values()
    assert on_disk == (share < 1)
    assert_same(model, loaded)


OFFLOADS = {
    "cpu": lambda model, folder: accelerate.cpu_offload(model),
    "disk": lambda model, folder: accelerate.disk_offload(model, folder),
    "cpu-with-hook": lambda model, folder: accelerate.cpu_offload_with_hook(model, "cpu")[0],
}


@pytest.mark.parametrize("offload", OFFLOADS)
def test_offload_hooks_of_accelerate(model, folder, tmp_path, offload):
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert_same(model, OFFLOADS[offload](loaded, tmp_path))


def test_load_checkpoint_and_dispatch(model, folder, tmp_path):
    with accelerate.init_empty_weights(include_buffers=False):
        empty = AutoModelForCausalLM.from_config(model.config)
    empty.tie_weights()
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    loaded = accelerate.load_checkpoint_and_dispatch(
        empty, str(folder), device_map=places, offload_folder=str(tmp_path)
    )
    loaded.generation_config = model.generation_config  # lies in a file that accelerate ignores
    assert_same(model, loaded.eval())
