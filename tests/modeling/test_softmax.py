"""Heads that stay softmax inside a converted layer: all, none, some; with and without a cache.

That some heads work in every way of generating is tested in test_generation and test_cache, where
such a model stands among the others.
"""

import copy

import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama, tiny_model
from definition import distance, make_case
from families import ALL_FULL, MIXED, VOCAB, cache_argument
from tolerances import FLOAT64, FLOAT64_GRADIENT, GUARD, LOGITS
from transformers import DynamicCache

from linearize import branches, convert, teacher
from linearize.modeling.attention import linearized_modules, no_attention, transfer
from linearize.modeling.cache import LinearizedLayer
from linearize.modeling.configuration_linearized import K_MAPS, LinearizeConfig
from linearize.modeling.softmax import join_heads, take_heads

ALL, SOME = {0: [0, 1], 1: [0, 1]}, {0: [1], 1: [0]}
PADDED = torch.tensor([[0] * 5 + [1] * 15, [1] * 20])
POSITIONS = torch.cat([torch.arange(9), torch.arange(11)]).expand(2, -1)
INPUTS = {
    "plain": {},
    "padded": dict(attention_mask=PADDED, position_ids=(PADDED.cumsum(1) - 1).clamp(min=0)),
    "packed": dict(position_ids=POSITIONS, use_cache=False),
}


@pytest.fixture
def ids():
    return random_ids(2, 20)


def attention_outputs(model, *args, **kwargs):
    """What goes into the output projection of layer 0, [B, T, H, Dv] of 4 heads."""
    seen = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0])
    )
    model(*args, **kwargs)
    hook.remove()
    return seen[0].unflatten(-1, (4, -1)).detach()


# ------------------------------------------------------------------------------------- all and none
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_all_heads_are_the_original_bit_for_bit(ids, implementation, inputs):
    original = tiny_llama(attn_implementation=implementation)
    expected = original(ids, **inputs).logits
    assert (tiny_linearized(model=copy.deepcopy(original))(ids).logits - expected).abs().max() > (
        GUARD
    )
    model = tiny_linearized(model=original, softmax_heads=ALL)
    assert torch.equal(model(ids, **inputs).logits, expected)


def test_a_layer_whose_every_head_is_softmax_keeps_an_ordinary_cache(ids):
    model, cache = tiny_linearized(softmax_heads={1: [0, 1]}), DynamicCache()
    model(ids, **cache_argument(cache))
    assert [type(layer).__name__ for layer in cache.layers] == ["LinearizedLayer", "DynamicLayer"]
    without = tiny_linearized(layers=[0])
    without.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(without(ids).logits, model(ids).logits)


def test_no_heads_is_the_default(ids):
    assert torch.equal(
        tiny_linearized(softmax_heads={0: []})(ids).logits, tiny_linearized()(ids).logits
    )
    section = tiny_linearized().config.linearize_config
    assert section["softmax_heads"] == {}
    older = {key: value for key, value in section.items() if key != "softmax_heads"}
    assert LinearizeConfig.from_dict(older) == LinearizeConfig.from_dict(section)


# ------------------------------------------------------------------------------------------- some
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_each_head_answers_as_it_would_alone(ids, inputs):
    """Heads 2 and 3 belong to key/value head 1."""
    mixed, linear = tiny_linearized(softmax_heads={0: [1]}, sinks=2), tiny_linearized(sinks=2)
    out = attention_outputs(mixed, ids, **inputs)
    without = attention_outputs(linear, ids, **inputs)
    with teacher(linear):
        exact = attention_outputs(linear, ids, **inputs)
    real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    assert torch.equal(out[..., 2:, :][real], exact[..., 2:, :][real])
    assert torch.allclose(out[..., :2, :][real], without[..., :2, :][real], atol=1e-6)
    assert (exact - without)[real].abs().amax((0, 2)).min() > GUARD


def test_branches_and_modes_leave_softmax_heads_alone(ids):
    model = tiny_linearized(softmax_heads=SOME)
    exact = attention_outputs(model, ids)[..., 2:, :]
    for context in (branches(model, linear=False), branches(model, window=False)):
        with context:
            out = attention_outputs(model, ids)
            assert torch.equal(out[..., 2:, :], exact)
    with no_attention(model):
        out = attention_outputs(model, ids)
        assert torch.equal(out[..., 2:, :], exact) and not out[..., :2, :].any()


@pytest.mark.parametrize("k_map", K_MAPS)
@pytest.mark.parametrize("feature_map", ["hedgehog", "hedgehog_exp", "favor", "centroids"])
def test_operator_of_some_heads_is_a_part_of_the_whole(feature_map, k_map):
    case = make_case(feature_map, tokens=21, k_map=k_map, heads=6, kv_heads=3, sink_logit=True)
    heads, scaling, logit = (2, 0), case.op.scaling, case.op.sink_logit
    whole = case.heads(*case.qkv, scaling=scaling, sink_logit=logit)
    whole = take_heads(whole, heads, 3)
    some = [take_heads(x, heads, 3) for x in case.qkv]
    logit = take_heads(logit, heads, 3, dim=0)
    part = case.heads(*some, scaling=scaling, sink_logit=logit, heads=heads)
    assert distance(part, whole) < FLOAT64
    expected = case.gradients(whole)
    for name, gradient in case.gradients(part).items():
        assert distance(gradient, expected[name]) < FLOAT64_GRADIENT, name


def test_heads_taken_apart_and_joined():
    x = torch.arange(2 * 6 * 3).view(2, 6, 3, 1)
    parts = {(1,): take_heads(x, (1,), 3), (2, 0): take_heads(x, (2, 0), 3)}
    assert torch.equal(parts[1,], x[:, 2:4])
    assert torch.equal(join_heads(parts, 3), x)


# ---------------------------------------------------------------------------------------- transfer
def test_transfer_is_told_of_linear_heads_only(ids):
    model, told = tiny_linearized(softmax_heads={0: [1], 1: [0, 1]}), {}

    def observer(module, *tensors, heads, **inputs):
        told[module.layer_idx] = heads, [x.shape[1] for x in tensors]

    with transfer(model, observer):
        logits = model(ids).logits
    assert told == {0: ((0,), [2, 1, 1, 2])}
    assert torch.equal(logits, tiny_llama()(ids).logits)


# ------------------------------------------------------------------------------------------- cache
def test_kept_keys_are_those_of_the_softmax_heads(ids):
    model, cache = tiny_linearized(softmax_heads={0: [1]}), DynamicCache()
    model(ids, **cache_argument(cache))
    original = DynamicCache()
    with teacher(model):
        model(ids, **cache_argument(original))
    assert torch.equal(cache.layers[0].kept.keys, original.layers[0].keys[:, 1:])
    assert torch.equal(cache.layers[0].kept.values, original.layers[0].values[:, 1:])
    assert cache.layers[0].state.window_k.shape[1] == 1
    assert not cache.layers[1].kept.is_initialized


def test_a_cache_filled_with_other_heads_is_refused(ids):
    cache, model = DynamicCache(), tiny_linearized()
    model(ids, **cache_argument(cache))
    other = tiny_linearized(softmax_heads=SOME)
    with pytest.raises(ValueError, match=r"filled with other branches .*heads"):
        other(ids[:, :1], **cache_argument(cache))
    cache.reset()
    full = other(ids, use_cache=False).logits
    parts = [other(x, **cache_argument(cache)).logits for x in ids.split(12, 1)]
    assert torch.allclose(torch.cat(parts, 1), full, atol=LOGITS)


def test_layers_with_a_window_of_their_own_are_refused():
    settings = {**MIXED["qwen3"]}
    with (
        pytest.warns(UserWarning, match="sliding window of their own"),
        pytest.raises(ValueError, match=r"convert.softmax_heads: layer 0 has a sliding window"),
    ):
        convert(tiny_model("qwen3", **settings), layers=[0, 1], softmax_heads={0: [1]})
    cache = DynamicCache(config=tiny_model("qwen3", **settings).config)
    layer = linearized_modules(tiny_linearized(softmax_heads=SOME))[0]
    with pytest.raises(ValueError, match=r"convert.softmax_heads: layer 0 has a sliding window"):
        layer.claim(cache)


# ---------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({1: [0]}, r"convert.softmax_heads: layer 1 is not converted"),
        ({0: [2]}, r"convert.softmax_heads: layer 0 has the key/value heads 0-1, not 2"),
    ],
)
def test_heads_that_are_not_there_are_refused(heads, message):
    with pytest.raises(ValueError, match=message):
        convert(tiny_llama(), layers=[0], softmax_heads=heads)


def test_an_implementation_without_masks_is_refused(ids):
    model = tiny_linearized(softmax_heads=SOME)
    model.set_attn_implementation("linearized")
    with pytest.raises(ValueError, match="'linearized' makes no mask for the heads that stay"):
        model(ids)


def test_a_learned_logit_per_head_needs_whole_layers():
    base = tiny_model("gpt_oss", **ALL_FULL["gpt_oss"])
    ids, whole = random_ids(1, 9, vocab=VOCAB), {0: [0, 1]}
    expected = base(ids).logits
    model = convert(base, window=4, softmax_heads={**whole, 1: [0]})
    with pytest.raises(NotImplementedError, match="gpt_oss keeps a learned logit per head"):
        model(ids)
    told = {}
    with transfer(model, lambda module, *_, sink_logit, **__: told.update({1: sink_logit})):
        assert torch.equal(model(ids).logits, expected)
    assert torch.equal(told[1], linearized_modules(model)[1].sinks[2:])


def test_copies_and_layers_without_a_cache_object_stay_whole():
    layer = LinearizedLayer()
    assert layer.is_compileable and not layer.keeps and layer.get_max_length() == -1
    twin = copy.deepcopy(tiny_linearized(softmax_heads=SOME))
    assert linearized_modules(twin)[0].softmax_heads() == (1,)
