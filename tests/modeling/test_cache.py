"""The constant-size cache layer: splits, size, padding, batch operations, rollback, refusals."""

import copy
from itertools import pairwise

import pytest
import torch
from conftest import random_ids, tiny_linearized
from families import cache_argument
from transformers import DynamicCache, StaticCache

from linearize import branches, teacher
from linearize.modeling.attention import linearized_modules
from linearize.modeling.cache import LinearizedLayer, claim_cache_layer, find_cache
from linearize.modeling.ops import State

TOLERANCE = dict(atol=1e-4, rtol=1e-5)
WINDOW = 4


@pytest.fixture(scope="module")
def model():
    return tiny_linearized(window=WINDOW, sinks=1)


@pytest.fixture(scope="module")
def log_space_model():
    return tiny_linearized(window=WINDOW, sinks=1, feature_map="hedgehog_exp")


@pytest.fixture(scope="module")
def half_linear():
    """Layer 0 linearized, layer 1 softmax."""
    return tiny_linearized(window=WINDOW, sinks=1, layers=[0])


@pytest.fixture(scope="module")
def some_heads():
    """One of two key/value heads of each layer stays softmax."""
    return tiny_linearized(window=WINDOW, sinks=1, softmax_heads={0: [1], 1: [0]})


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def gradients(no_grad):
    with torch.enable_grad():
        yield


def feed(model, ids, cache, sizes=None, **kwargs):
    """Logits of ids given to the model in parts of the given sizes."""
    edges = [0]
    for size in sizes or [ids.shape[1]]:
        edges.append(edges[-1] + size)
    parts = [
        model(ids[:, i:j], use_cache=True, **cache_argument(cache), **kwargs).logits
        for i, j in pairwise(edges)
    ]
    return torch.cat(parts, 1)


def recording_cache(model):
    """As assisted decoding makes it."""
    cache = DynamicCache(config=model.config)
    for layer in linearized_modules(model):
        claim_cache_layer(cache, layer)
    cache.activate_past_recording()
    return cache


def tensors_of(cache):
    return [tensor for layer in cache.layers for tensor in layer.state]


# Splits
SPLITS = {
    "whole": [13],
    "singles": [1] * 13,
    "5-8": [5, 8],
    "4-4-5": [4, 4, 5],
    "12-1": [12, 1],
    "3-1-9": [3, 1, 9],
}


@pytest.mark.parametrize("kind", ["model", "log_space_model", "half_linear", "some_heads"])
@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
def test_every_split_gives_the_same_logits_and_state(request, kind, sizes):
    model, ids = request.getfixturevalue(kind), random_ids(2, 13)
    full = model(ids, use_cache=False).logits
    whole, cache = DynamicCache(), DynamicCache()
    feed(model, ids, whole)
    torch.testing.assert_close(feed(model, ids, cache, sizes), full, **TOLERANCE)
    for a, b in zip(whole.layers[0].state, cache.layers[0].state, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
    with branches(model, linear=False):
        assert (model(ids, use_cache=False).logits - full).abs().max() > 1e-3


def test_appending_to_a_window_of_any_fill(model):
    ids = random_ids(1, 18)
    full = model(ids, use_cache=False).logits
    for first in range(1, 10):
        for second in range(1, 10):
            logits = feed(model, ids, DynamicCache(), [first, second])
            torch.testing.assert_close(logits, full[:, : first + second], **TOLERANCE)


def test_output_is_as_long_as_the_query(model):
    cache = DynamicCache()
    for _ in range(WINDOW + 2):
        assert feed(model, random_ids(2, 1), cache).shape[1] == 1


# Size
def test_each_layer_counts_its_own_tokens(model):
    cache = DynamicCache()
    feed(model, random_ids(1, 12), cache, [7, 1, 1, 1, 1, 1])
    assert [cache.get_seq_length(layer) for layer in range(2)] == [12, 12]
    assert cache.layers[0].get_max_length() == cache.layers[0].get_max_cache_shape() == -1


def held_bytes(cache):
    """Of the memory behind the tensors, so that a view into something longer counts whole."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(cache))


def test_bytes_do_not_grow_and_nothing_longer_is_kept_alive(model):
    cache, sizes = DynamicCache(), []
    for count in (50, 200, 1):
        feed(model, random_ids(1, count), cache)
        sizes.append(held_bytes(cache))
    assert sizes == [sum(tensor.nbytes for tensor in tensors_of(cache))] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_fp32_whatever_the_model_is(dtype):
    model, cache = tiny_linearized(window=WINDOW).to(dtype), DynamicCache()
    feed(model, random_ids(1, 12), cache, [10, 1, 1])
    state = cache.layers[0].state
    assert {state.S.dtype, state.z.dtype, state.shift.dtype} == {torch.float32}
    assert state.window_k.dtype == dtype


def test_normaliser_counts_every_token_that_left_the_window(model):
    """Each half of the hedgehog map sums to one, so the sums of z count tokens."""
    cache = DynamicCache()
    feed(model, random_ids(1, 300), cache, [290] + [1] * 10)
    z = cache.layers[0].state.z
    torch.testing.assert_close(
        z.sum(-1), torch.full_like(z[..., 0], 2.0 * (300 - (WINDOW - 1) - 1))
    )


# Padding
def test_mask_longer_than_the_window():
    model, ids = tiny_linearized(window=WINDOW), random_ids(2, 13)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    full = model(ids, attention_mask=mask, use_cache=False).logits
    cache = DynamicCache()
    feed(model, ids[:, :10], cache, attention_mask=mask[:, :10])
    last = feed(model, ids[:, 10:], cache, attention_mask=mask)
    torch.testing.assert_close(last, full[:, 10:], **TOLERANCE)


def test_right_padding_leaves_no_trace_in_the_state(model):
    ids, mask = torch.tensor([[5, 6, 7, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    cache = DynamicCache()
    feed(model, ids, cache, attention_mask=mask)
    more = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
    after = feed(
        model, torch.tensor([[8]]), cache, attention_mask=more, position_ids=torch.tensor([[3]])
    )
    alone = model(torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits
    torch.testing.assert_close(after[:, -1], alone[:, -1], **TOLERANCE)


def test_row_that_is_all_padding_harms_nobody(model):
    ids = random_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[0] = 0
    out = model(ids, attention_mask=mask, use_cache=False).logits
    assert out.isfinite().all()
    torch.testing.assert_close(out[1], model(ids[1:], use_cache=False).logits[0], **TOLERANCE)
    cached = feed(model, ids, DynamicCache(), attention_mask=mask)
    torch.testing.assert_close(cached[1], out[1], **TOLERANCE)


@pytest.mark.usefixtures("gradients")
def test_gradients_of_a_batch_with_an_empty_row_are_finite(model):
    ids = random_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[0] = 0
    model(ids, attention_mask=mask, use_cache=False).logits[1].sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("positions", ["derived", "explicit"])
def test_pads_reach_neither_state_nor_window(batch, positions):
    model = tiny_linearized(window=2)
    ids = torch.tensor([[0, 0, 0, 5, 6, 7, 8, 9]] * batch)
    mask = (ids > 0).long()
    given = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if positions == "explicit" else {}
    alone = model(ids[:, 3:], use_cache=False).logits
    for pads in (0, 33):
        padded = torch.where(mask.bool(), ids, pads)
        for cache in (None, DynamicCache()):
            use = {"use_cache": False} if cache is None else cache_argument(cache)
            out = model(padded, attention_mask=mask, **given, **use).logits
            torch.testing.assert_close(out[:, 3:], alone, **TOLERANCE)


# Batch operations
def test_rows_are_reordered_repeated_and_selected(model):
    ids = random_ids(3, 14)
    full = model(ids, use_cache=False).logits[:, -1:]
    cache = DynamicCache()
    feed(model, ids[:, :-1], cache)
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)
    torch.testing.assert_close(
        feed(model, ids[order, -1:], copy.deepcopy(cache)), full[order], **TOLERANCE
    )
    cache.batch_repeat_interleave(2)
    wide = order.repeat_interleave(2)
    torch.testing.assert_close(
        feed(model, ids[wide, -1:], copy.deepcopy(cache)), full[wide], **TOLERANCE
    )
    chosen = torch.tensor([5, 1])
    cache.batch_select_indices(chosen)
    torch.testing.assert_close(
        feed(model, ids[wide[chosen], -1:], cache), full[wide[chosen]], **TOLERANCE
    )


def test_copy_of_a_prefix_serves_several_continuations(model):
    prefix, ends = random_ids(1, 20), random_ids(2, 6, seed=1)
    cache = DynamicCache()
    feed(model, prefix, cache)
    for end in ends:
        whole = model(torch.cat([prefix, end[None]], 1), use_cache=False).logits[:, 20:]
        torch.testing.assert_close(
            feed(model, end[None], copy.deepcopy(cache), [2, 4]), whole, **TOLERANCE
        )


@pytest.mark.parametrize("batch", [2, 3])
def test_reset_forgets_everything(model, batch):
    cache = DynamicCache()
    feed(model, random_ids(2, 14), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = random_ids(batch, 14, seed=1)
    with branches(model, linear=False):  # other branches may follow a reset
        torch.testing.assert_close(
            feed(model, ids, cache, [9, 5]), model(ids, use_cache=False).logits, **TOLERANCE
        )


def test_reset_while_past_is_recorded(model):
    ids, cache = random_ids(1, 14), recording_cache(model)
    feed(model, random_ids(1, 9, seed=1), cache)
    cache.reset()
    feed(model, ids[:, :8], cache)
    cache.crop(-3)
    full = model(ids, use_cache=False).logits
    torch.testing.assert_close(feed(model, ids[:, 5:], cache), full[:, 5:], **TOLERANCE)


def test_state_stays_on_its_device(model):
    """A cache that offloads calls this between projection and attention."""
    ids, cache = random_ids(1, 14), DynamicCache()
    feed(model, ids[:, :9], cache)
    before = tensors_of(cache)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert all(a is b for a, b in zip(before, tensors_of(cache), strict=True))


def test_state_of_inference_mode_goes_on_outside_of_it(model):
    ids, cache = random_ids(1, 14), DynamicCache()
    with torch.inference_mode():
        feed(model, ids[:, :9], cache)
    torch.testing.assert_close(
        feed(model, ids[:, 9:], cache), model(ids, use_cache=False).logits[:, 9:], **TOLERANCE
    )


@pytest.mark.usefixtures("gradients")
def test_gradients_flow_through_a_cache(model):
    ids = random_ids(1, 14)
    gradients = []
    for sizes in ([14], [9, 1, 4]):
        model.zero_grad()
        feed(model, ids, DynamicCache(), sizes).square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    model.zero_grad()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, **TOLERANCE, msg=name)


# Rollback
@pytest.mark.parametrize("kind", ["model", "log_space_model", "half_linear", "some_heads"])
def test_cropped_tokens_never_were(request, kind):
    model, ids = request.getfixturevalue(kind), random_ids(1, 24)
    full = model(ids, use_cache=False).logits
    wrong = random_ids(1, 24, seed=1)
    cache, done = recording_cache(model), 9
    feed(model, ids[:, :done], cache)
    for accepted, rejected in ((1, 3), (0, 2), (4, 0), (2, 5)):
        cache.crop(0)
        draft = torch.cat([ids[:, done : done + accepted], wrong[:, :rejected]], 1)
        logits = feed(model, draft, cache)
        torch.testing.assert_close(
            logits[:, :accepted], full[:, done : done + accepted], **TOLERANCE
        )
        cache.crop(-rejected)
        done += accepted
        assert cache.get_seq_length() == done
    torch.testing.assert_close(feed(model, ids[:, done:], cache), full[:, done:], **TOLERANCE)


def test_crop_over_several_writes_and_twice_in_a_row(model):
    ids, cache = random_ids(1, 20), recording_cache(model)
    feed(model, ids, cache, [6, 1, 1, 5, 7])
    cache.crop(-8)
    cache.crop(-3)
    assert cache.get_seq_length() == 9
    torch.testing.assert_close(
        feed(model, ids[:, 9:], cache), model(ids, use_cache=False).logits[:, 9:], **TOLERANCE
    )


def test_batch_operations_reach_what_a_crop_needs(model):
    ids, cache = random_ids(2, 14), recording_cache(model)
    feed(model, ids, cache, [8, 6])
    cache.crop(-4)
    order = torch.tensor([1, 0])
    cache.reorder_cache(order)
    full = model(ids, use_cache=False).logits[order, 10:]
    torch.testing.assert_close(feed(model, ids[order, 10:], cache), full, **TOLERANCE)


def test_crop_is_refused_where_it_cannot_work(model):
    layer = LinearizedLayer()
    layer.crop(0)
    assert not layer.is_croppable
    with pytest.raises(RuntimeError, match="a constant-size state cannot be cropped"):
        layer.crop(-1)
    layer.activate_past_recording()
    assert layer.is_croppable
    with pytest.raises(
        ValueError, match=r"crop\(3\): give the number of tokens to remove as a negative number"
    ):
        layer.crop(3)
    cache = recording_cache(model)
    feed(model, random_ids(1, 6), cache)
    cache.crop(0)
    feed(model, random_ids(1, 2), cache)
    with pytest.raises(RuntimeError, match=r"crop\(-3\): only the 2 tokens since the last crop"):
        cache.layers[0].crop(-3)


# Whose cache it is
def test_layers_are_claimed_in_place(half_linear):
    cache = DynamicCache(config=half_linear.config)
    feed(half_linear, random_ids(1, 5), cache)
    assert [type(layer).__name__ for layer in cache.layers] == ["LinearizedLayer", "DynamicLayer"]
    assert cache.layers[0].get_mask_sizes(3) == cache.layers[1].get_mask_sizes(3) == (8, 0)
    assert isinstance(cache.layers[0].state, State)


def test_mask_sizes_without_a_softmax_layer(model):
    cache = DynamicCache()
    feed(model, random_ids(1, 5), cache)
    assert cache.layers[0].get_mask_sizes(3) == (3, 5)


def test_static_cache_is_claimed_too(half_linear):
    ids, cache = random_ids(1, 9), StaticCache(config=half_linear.config, max_cache_len=16)
    full = half_linear(ids, use_cache=False).logits
    torch.testing.assert_close(feed(half_linear, ids, cache, [5, 1, 3]), full, **TOLERANCE)


def test_cache_of_softmax_attention_is_refused(model):
    cache = DynamicCache()
    with teacher(model):
        feed(model, random_ids(1, 5), cache)
    with pytest.raises(
        ValueError, match="layer 0 of this cache holds the keys and values of softmax attention"
    ):
        feed(model, random_ids(1, 1), cache)


def test_linear_state_is_refused_by_softmax_attention(model):
    cache = DynamicCache()
    feed(model, random_ids(1, 5), cache)
    with (
        teacher(model),
        pytest.raises(ValueError, match="layer 0 of this cache holds a linear state"),
    ):
        feed(model, random_ids(1, 1), cache)


def test_cache_of_other_branches_is_refused(model):
    cache = DynamicCache()
    feed(model, random_ids(1, 5), cache)
    with (
        branches(model, linear=False),
        pytest.raises(ValueError, match="this cache was filled with other branches"),
    ):
        feed(model, random_ids(1, 1), cache)


@pytest.mark.parametrize("name", ["cache", "past_key_values", "layer_past"])
def test_unknown_kind_of_cache_is_refused(name):
    class PagedAttentionCache:
        pass

    assert find_cache({name: None}) is None
    with pytest.raises(
        NotImplementedError,
        match="PagedAttentionCache: linearized layers keep a constant-size state",
    ):
        find_cache({name: PagedAttentionCache()})


def test_claim_extends_a_cache_that_is_too_short():
    cache = DynamicCache()
    layer = claim_cache_layer(cache, 2)
    assert len(cache.layers) == 3
    assert claim_cache_layer(cache, 2) is layer
