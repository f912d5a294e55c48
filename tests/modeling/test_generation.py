"""Every way to generate gives what the uncached forward gives; what cannot work is refused."""

import copy

import pytest
import torch
from conftest import random_ids, randomize, tiny_model
from families import ALL_FULL, CACHE_NAME, MIXED, VOCAB, cache_argument
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.cache_utils import Cache, QuantizedLayer

from linearize import branches, convert, teacher
from linearize.modeling.attention import linearized_modules
from linearize.modeling.cache import LinearizedLayer
from linearize.modeling.masking import check_mask

STEPS = 12
GENERATE = dict(do_sample=False, max_new_tokens=STEPS, eos_token_id=None, pad_token_id=0)
STATIC = dict(cache_implementation="static", disable_compile=True)
KINDS = {
    "llama": dict(family="llama"),
    "llama-hybrid": dict(family="llama", layers=[0]),
    "llama-heads": dict(family="llama", softmax_heads={0: [0, 1], 1: [1]}),
    "log-space": dict(family="llama", feature_map="hedgehog_exp", softmax_heads={0: [0]}),
    "qwen3-sliding": dict(family="qwen3", mixed=True),
}


def make(family, mixed=False, seed=0, scale=6.0, window=6, **options):
    settings = (MIXED if mixed else ALL_FULL)[family]
    return randomize(
        convert(
            tiny_model(family, seed=seed, scale=scale, **settings),
            window=window,
            sinks=2,
            **options,
        )
    )


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def model(request):
    return make(**request.param)


@pytest.fixture(scope="module")
def llama():
    return make("llama")


@pytest.fixture(scope="module")
def draft():
    """Another linearized model with the same vocabulary."""
    return make("llama", seed=1, scale=1.0, window=5)


@pytest.fixture(scope="module")
def softmax():
    return tiny_model("llama", scale=1.0, **ALL_FULL["llama"])


@pytest.fixture(scope="module")
def ids():
    return random_ids(2, 31, vocab=VOCAB)


@pytest.fixture(scope="module")
def gold(model, ids):
    return generate(model, ids, use_cache=False)


@pytest.fixture(scope="module")
def llama_gold(llama, ids):
    return generate(llama, ids, use_cache=False)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def generate(model, ids, **settings):
    return model.generate(ids, **{**GENERATE, **settings})


# Equal to no cache
WAYS = {
    "default": {},
    "prefill in chunks": dict(prefill_chunk_size=7),
    "static": STATIC,
    "static, prefill in chunks": dict(**STATIC, prefill_chunk_size=7),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_greedy(model, ids, gold, way):
    assert torch.equal(generate(model, ids, **way), gold)


def test_own_cache_goes_on_over_turns(model, ids):
    cache = DynamicCache(config=model.config)
    first = generate(model, ids[:, :20], max_new_tokens=3, **cache_argument(cache))
    prompt = torch.cat([first, ids[:, 20:]], 1)
    assert torch.equal(
        generate(model, prompt, **cache_argument(cache)), generate(model, prompt, use_cache=False)
    )
    linear = [cache.layers[i].get_seq_length() for i in linearized_modules(model)]
    assert linear == [prompt.shape[1] + STEPS - 1] * len(linear)


def test_beams(model, ids):
    settings = dict(num_beams=3, num_return_sequences=2)
    assert torch.equal(
        generate(model, ids, **settings), generate(model, ids, use_cache=False, **settings)
    )


def test_sampling_with_several_return_sequences(model, ids):
    results = []
    for cached in (True, False):
        torch.manual_seed(1)
        results.append(
            generate(model, ids, do_sample=True, num_return_sequences=3, use_cache=cached)
        )
    assert torch.equal(*results)
    assert not torch.equal(results[0][0], results[0][1])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_left_padded_batch_equals_each_alone(model, way):
    prompts = [random_ids(1, length, seed=length, vocab=VOCAB) for length in (3, 11, 24)]
    padded = torch.cat([torch.nn.functional.pad(p, (24 - p.shape[1], 0)) for p in prompts])
    batch = generate(model, padded, attention_mask=(padded > 0).long(), **way)[:, 24:]
    alone = torch.cat([generate(model, p)[:, p.shape[1] :] for p in prompts])
    assert torch.equal(batch, alone)


def test_scores_of_a_batch_equal_those_of_each_alone(llama):
    settings = dict(return_dict_in_generate=True, output_scores=True, max_new_tokens=20)
    prompts = [random_ids(1, length, seed=length, vocab=VOCAB) for length in (2, 5, 11)]
    padded = torch.cat([torch.nn.functional.pad(p, (11 - p.shape[1], 0)) for p in prompts])
    batch = torch.stack(
        generate(llama, padded, attention_mask=(padded > 0).long(), **settings).scores
    )
    alone = torch.cat([torch.stack(generate(llama, p, **settings).scores) for p in prompts], 1)
    torch.testing.assert_close(batch, alone, atol=1e-4, rtol=1e-5)


def test_hidden_states_are_recorded(model, ids):
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == len(list(model.model.layers)) + 1
    settings = dict(return_dict_in_generate=True, output_hidden_states=True, max_new_tokens=2)
    step = generate(model, ids, **settings).hidden_states[1]
    assert [tuple(x.shape) for x in step] == [(2, 1, 64)] * len(states)


def test_linear_branch_matters(model, ids, gold):
    with branches(model, linear=False):
        assert not torch.equal(generate(model, ids), gold)


def test_cache_stays_as_large_as_it_is(llama, ids):
    def held(steps):
        cache = DynamicCache(config=llama.config)
        generate(llama, ids, max_new_tokens=steps, **cache_argument(cache))
        return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in layer.state)

    assert held(2) == held(40) > 0


@pytest.mark.skipif(CACHE_NAME != "cache", reason="the old name is the only one in this release")
def test_old_name_of_the_cache_argument(llama, ids, llama_gold):
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
        out = llama(ids[:, :9], past_key_values=(cache := DynamicCache(config=llama.config)))
    assert [type(layer) for layer in cache.layers] == [LinearizedLayer] * 2
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
        rest = llama(ids[:, 9:], past_key_values=cache)
    whole = llama(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat([out.logits, rest.logits], 1), whole, atol=1e-4, rtol=1e-5)


def test_teacher_generates_as_the_original(ids):
    gold = generate(tiny_model("llama", **ALL_FULL["llama"]), ids)
    with teacher(model := make("llama")):
        assert torch.equal(generate(model, ids), gold)
    assert not torch.equal(generate(model, ids), gold)


def test_bf16_keeps_fp32_sums(ids):
    model = make("llama", scale=3.0).to(torch.bfloat16)
    cache = DynamicCache(config=model.config)
    generate(model, ids, max_new_tokens=4, **cache_argument(cache))
    assert {(layer.state.S.dtype, layer.state.z.dtype) for layer in cache.layers} == {
        (torch.float32, torch.float32)
    }


def test_every_layer_gets_the_raw_mask_when_the_model_asks_for_it(llama):
    """All-linear models need no T x T mask."""
    model, prompts = copy.deepcopy(llama), random_ids(2, 24, vocab=VOCAB)
    mask = torch.ones_like(prompts)
    prompts[0, :13], mask[0, :13] = 0, 0
    gold = generate(model, prompts, attention_mask=mask)
    model.set_attn_implementation("linearized")
    assert torch.equal(generate(model, prompts, attention_mask=mask), gold)


# Assisted decoding
def test_prompt_lookup(model, ids, gold):
    text = torch.cat([ids, ids[:, :9]], 1)[:1]
    whole = generate(model, text, use_cache=False)
    assert torch.equal(generate(model, text, prompt_lookup_num_tokens=4), whole)
    assert torch.equal(generate(model, ids[:1], prompt_lookup_num_tokens=4), gold[:1])


@pytest.mark.parametrize("assistant", ["softmax", "draft", "itself"])
def test_assisted(request, model, ids, gold, assistant):
    helper = model if assistant == "itself" else request.getfixturevalue(assistant)
    assert torch.equal(generate(model, ids[:1], assistant_model=helper), gold[:1])


def test_linearized_draft_for_a_softmax_model(softmax, draft, ids):
    assert torch.equal(
        generate(softmax, ids[:1], assistant_model=draft), generate(softmax, ids[:1])
    )


def test_own_cache_after_assisted_decoding_is_still_right(llama, draft, ids):
    cache = DynamicCache(config=llama.config)
    first = generate(llama, ids[:1, :20], assistant_model=draft, **cache_argument(cache))
    prompt = torch.cat([first, ids[:1, 20:]], 1)
    assert torch.equal(
        generate(llama, prompt, **cache_argument(cache)), generate(llama, prompt, use_cache=False)
    )


# Other features
def test_guidance_keeps_two_caches(llama, ids):
    settings = dict(guidance_scale=1.5, return_dict_in_generate=True, output_scores=True)
    cached, uncached = (
        torch.stack(generate(llama, ids, use_cache=use_cache, **settings).scores)
        for use_cache in (True, False)
    )
    torch.testing.assert_close(cached, uncached, atol=1e-4, rtol=1e-5)
    plain = torch.stack(
        generate(llama, ids, return_dict_in_generate=True, output_scores=True).scores
    )
    assert (plain - cached).abs().max() > 1e-2


def test_logits_processors_and_streaming_work(llama, ids, llama_gold):
    seen = []

    class Streamer:
        def put(self, value):
            seen.extend(value.flatten().tolist())

        def end(self):
            seen.append("end")

    generate(
        llama,
        ids[:1],
        streamer=Streamer(),
        logits_processor=LogitsProcessorList([lambda _, scores: scores]),
    )
    assert seen == [*llama_gold[0].tolist(), "end"]


class UnquantizedLayer(QuantizedLayer):
    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def test_quantized_cache_keeps_linear_layers_as_they_are(ids):
    model = make("llama", layers=[0])
    cache = Cache(layers=[UnquantizedLayer(residual_length=4) for _ in range(2)])
    assert torch.equal(
        generate(model, ids, **cache_argument(cache)), generate(model, ids, use_cache=False)
    )
    assert [type(layer) for layer in cache.layers] == [LinearizedLayer, UnquantizedLayer]


# Packed documents
LENGTHS = (5, 9, 3)


@pytest.fixture(scope="module")
def row():
    return random_ids(1, sum(LENGTHS), vocab=VOCAB)


@pytest.fixture(scope="module")
def positions():
    return torch.cat([torch.arange(n) for n in LENGTHS])[None]


def separate(model, row, **settings):
    return torch.cat(
        [model(part, use_cache=False, **settings).logits for part in row.split(LENGTHS, 1)], 1
    )


BORDERS = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
PACKINGS = {
    "position_ids": {},
    "seq_idx": dict(seq_idx=torch.tensor([[0] * 5 + [1] * 9 + [2] * 3])),
    "cu_seq_lens": dict(
        cu_seq_lens_q=BORDERS, cu_seq_lens_k=BORDERS, max_length_q=9, max_length_k=9
    ),
}


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_packed_documents_do_not_see_each_other(model, row, positions, packing):
    packed = model(row, position_ids=positions, use_cache=False, **packing).logits
    torch.testing.assert_close(packed, separate(model, row), atol=1e-4, rtol=1e-5)
    other = row.clone()
    other[:, :5] = random_ids(1, 5, seed=1, vocab=VOCAB)
    again = model(other, position_ids=positions, use_cache=False, **packing).logits
    assert torch.equal(again[:, 5:], packed[:, 5:])


def test_rows_of_a_batch_may_be_packed_differently(llama, row, positions):
    both = torch.cat([row, row])
    places = torch.cat([positions, torch.arange(row.shape[1])[None]])
    packed = llama(both, position_ids=places, use_cache=False).logits
    whole = llama(row, use_cache=False).logits
    torch.testing.assert_close(
        packed, torch.cat([separate(llama, row), whole]), atol=1e-4, rtol=1e-5
    )


def test_packed_documents_have_the_gradients_of_separate_runs(llama, row, positions):
    model = copy.deepcopy(llama)
    with torch.enable_grad():
        results = []
        for logits in (
            lambda: model(row, position_ids=positions, use_cache=False).logits,
            lambda: separate(model, row),
        ):
            model.zero_grad()
            logits().square().mean().backward()
            results.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_packed_documents_with_a_cache_are_refused(llama, row, positions, packing):
    with pytest.raises(ValueError, match="pass use_cache=False"):
        llama(row, position_ids=positions, **packing)
    if packing:
        with pytest.raises(
            ValueError, match="a cache cannot hold packed documents; pass use_cache=False"
        ):
            llama(row, **packing)


def test_borders_of_one_row_are_refused_for_a_batch(llama, row):
    with pytest.raises(
        ValueError, match=r"cu_seq_lens_q describes one packed row, but the batch has 2"
    ):
        llama(torch.cat([row, row]), use_cache=False, **PACKINGS["cu_seq_lens"])


# Refusals
def test_continuous_batching_is_refused(llama):
    with pytest.raises(NotImplementedError, match="continuous batching"):
        llama.generate_batch(
            inputs=[[5, 6, 7]], generation_config=GenerationConfig(max_new_tokens=2)
        )
    with pytest.raises(NotImplementedError, match="continuous batching"):
        llama.init_continuous_batching()


def test_block_masks_of_flex_attention_are_refused(llama, ids):
    blocks = create_block_mask(lambda b, h, q, k: q >= k, 2, 1, 31, 31, device="cpu")
    with pytest.raises(
        NotImplementedError, match=r'BlockMask is not supported .*"sdpa" or "eager"'
    ):
        llama(ids, attention_mask=blocks)


def mask_4d(kind, batch=2, length=12):
    allowed = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, -1, -1).clone()
    if kind == "left padding":
        allowed[0, :, :, :4] = False
    elif kind == "documents":
        allowed[:, :, 6:, :6] = False
    elif kind == "prefix":
        allowed[:, :, :4, :4] = True
    elif kind == "per head":
        allowed = allowed.expand(-1, 4, -1, -1)
    return allowed


@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("kind", ["causal", "left padding"])
def test_4d_masks_of_padding_work(llama, ids, kind, form):
    mask, ids = mask_4d(kind), ids[:, :12]
    real = torch.ones(2, 12, dtype=torch.long)
    real[0, : 4 * (kind == "left padding")] = 0
    expected = llama(ids, attention_mask=real, use_cache=False).logits[:, 4:]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    given = (
        mask if form == "bool" else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo().min)
    )
    out = llama(ids, attention_mask=given, position_ids=positions, use_cache=False).logits[:, 4:]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", ["documents", "prefix", "per head"])
def test_4d_masks_that_a_state_cannot_follow_are_refused(llama, ids, kind):
    with pytest.raises(
        NotImplementedError, match="a 4D mask may hide padding and later tokens only"
    ):
        llama(ids[:, :12], attention_mask=mask_4d(kind), use_cache=False)
    with teacher(llama):
        assert (
            llama(ids[:, :12], attention_mask=mask_4d(kind), use_cache=False)
            .logits.isfinite()
            .all()
        )


def test_4d_mask_over_a_filled_cache_is_checked():
    mask = mask_4d("left padding")[:, :, 7:]
    check_mask(mask, past=7)
    check_mask(
        torch.nn.functional.pad(mask, (0, 5)), past=7
    )  # of a static cache with room for 5 more
    tree = mask.clone()
    tree[:, :, 3, 8] = False
    with pytest.raises(NotImplementedError, match="4D mask"):
        check_mask(tree, past=7)
    forgetful = mask.clone()
    forgetful[:, :, 3, 5] = False
    with pytest.raises(NotImplementedError, match="4D mask"):
        check_mask(forgetful, past=7)
