"""Every supported family: what a linearized model must keep of the model that it came from."""

import families
import pytest
import torch
from conftest import random_ids, randomize, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

from linearize import branches, convert, teacher
from linearize.modeling.attention import linearized_modules
from linearize.modeling.modeling_linearized import FAMILIES, NO_POSITIONS, family_classes

CHUNKS = (11, 9, 1, 1, 7, 1, 1)  # prefill in odd chunks, then token by token
PADDING = 13
GENERATE = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
TOLERANCE = dict(atol=1e-4, rtol=1e-5)

pytestmark = pytest.mark.filterwarnings("ignore:attention_dropout is:UserWarning")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    families.skip_if_unavailable(request.param)
    return request.param


@pytest.fixture(scope="module")
def ids():
    return random_ids(2, sum(CHUNKS), vocab=families.VOCAB)


@pytest.fixture(scope="module")
def logits(family, ids):
    """Of the original model."""
    with torch.no_grad():
        return original(family, families.ALL_FULL)(ids).logits


@pytest.fixture(scope="module")
def model(family):
    return randomize(convert(original(family, families.ALL_FULL), window=6, sinks=2))


@pytest.fixture(scope="module")
def full(model, ids):
    """Logits of the linearized model in one forward without a cache."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def original(family, settings):
    """The softmax model, with random biases and norms: a path that drops them must show."""
    model = tiny_model(family, **settings[family])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def in_chunks(model, ids, cache):
    position, outs = 0, []
    for size in CHUNKS:
        outs.append(
            model(
                ids[:, position : position + size], use_cache=True, **families.cache_argument(cache)
            ).logits
        )
        position += size
    return torch.cat(outs, 1)


def test_every_family_has_a_small_config():
    assert sorted(families.ALL_FULL) == sorted(FAMILIES)


def test_all_layers_are_linearized(model, family):
    assert list(linearized_modules(model)) == [0, 1]
    assert type(model) is family_classes(family)[1]
    assert model.config.model_type == f"linearized_{family}"


def test_linear_branch_matters(model, ids, full):
    with branches(model, linear=False):
        assert (model(ids, use_cache=False).logits - full).abs().max() > 1e-2


def test_window_that_covers_everything_is_the_original(family, ids, logits):
    model = convert(original(family, families.ALL_FULL), window=sum(CHUNKS))
    torch.testing.assert_close(model(ids).logits, logits, **TOLERANCE)


def test_teacher_is_the_original_bit_for_bit(model, ids, logits):
    with teacher(model):
        assert torch.equal(model(ids).logits, logits)


def test_odd_chunks_and_single_tokens_equal_one_forward(model, ids, full):
    cache = DynamicCache(config=model.config)
    torch.testing.assert_close(in_chunks(model, ids, cache), full, **TOLERANCE)
    assert [cache.get_seq_length(layer) for layer in range(2)] == [sum(CHUNKS)] * 2


def test_cached_generation_equals_uncached(model, ids):
    cached = model.generate(ids, **GENERATE)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **GENERATE))


def test_left_padded_equals_alone(model, ids):
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :PADDING], mask[0, :PADDING] = 0, 0
    alone = model(ids[:1, PADDING:]).logits[0]
    torch.testing.assert_close(
        model(padded, attention_mask=mask).logits[0, PADDING:], alone, **TOLERANCE
    )
    batch = model.generate(padded, attention_mask=mask, **GENERATE)
    assert torch.equal(batch[0, PADDING:], model.generate(ids[:1, PADDING:], **GENERATE)[0])


def test_packed_documents_equal_separate_runs_or_are_refused(model, family, ids):
    row = ids[:1]
    positions = torch.cat([torch.arange(12), torch.arange(row.shape[1] - 12)])[None]
    if family in NO_POSITIONS:
        with pytest.raises(ValueError, match="packed documents are not supported for llama4_text"):
            model(row, position_ids=positions, use_cache=False)
        return
    packed = model(row, position_ids=positions, use_cache=False).logits
    alone = torch.cat(
        [model(part, use_cache=False).logits for part in (row[:, :12], row[:, 12:])], 1
    )
    torch.testing.assert_close(packed, alone, **TOLERANCE)


def test_saved_and_loaded_is_equal(model, ids, full, tmp_path):
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(loaded(ids, use_cache=False).logits, full)


@pytest.mark.parametrize("family", families.MIXED)
def test_layers_with_their_own_window_stay(family, ids):
    logits = original(family, families.MIXED)(ids).logits
    wide = convert(original(family, families.MIXED), window=sum(CHUNKS))
    torch.testing.assert_close(wide(ids).logits, logits, **TOLERANCE)

    model = randomize(convert(original(family, families.MIXED), window=6, sinks=2))
    full_layers = [0, 1, 2, 3] if family == "smollm3" else [1, 3]
    assert list(linearized_modules(model)) == full_layers
    full = model(ids, use_cache=False).logits
    torch.testing.assert_close(
        in_chunks(model, ids, DynamicCache(config=model.config)), full, **TOLERANCE
    )
    assert torch.equal(
        model.generate(ids, **GENERATE), model.generate(ids, use_cache=False, **GENERATE)
    )
    with teacher(model):
        assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("family", [f for f in families.MIXED if f not in ("lfm2", "smollm3")])
def test_layers_with_their_own_window_can_be_converted_by_name(family, ids):
    with pytest.warns(UserWarning, match=r"layers \[0\] have a sliding window of their own"):
        model = convert(original(family, families.MIXED), layers=[0, 3], window=6, sinks=2)
    randomize(model)
    full = model(ids, use_cache=False).logits
    torch.testing.assert_close(
        in_chunks(model, ids, DynamicCache(config=model.config)), full, **TOLERANCE
    )
