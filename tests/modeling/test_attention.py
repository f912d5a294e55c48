"""The linearized attention of a layer: parameters, modes, masks and positions, the observer."""

import copy
import math

import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama
from definition import make_case, start_of
from peft import LoraConfig, get_peft_model
from tolerances import GUARD, LOGITS, TEACHER
from torch.nn.functional import scaled_dot_product_attention

from linearize import branches, convert, teacher
from linearize.modeling.attention import (
    LinearizedHeads,
    linearized_modules,
    softmax_attention,
    transfer,
)
from linearize.modeling.chunked import hybrid_chunked, hybrid_packed
from linearize.modeling.configuration_linearized import MIXING_RULES, LinearizeConfig
from linearize.modeling.feature_maps import FEATURE_MAPS
from linearize.modeling.masking import documents_of, padding_of
from linearize.modeling.ops import Rows, hybrid_quadratic
from linearize.modeling.rows import hybrid_rows

GEOMETRY = {
    "0": {"num_heads": 4, "num_key_value_heads": 2, "qk_dim": 8, "v_dim": 8, "scaling": 8**-0.5}
}


def heads(**options):
    module = LinearizedHeads(
        LinearizeConfig(base_model_type="llama", layers=[0], geometry=GEOMETRY, **options), 0
    )
    module.reset_parameters()
    return module


@pytest.fixture(scope="module")
def model():
    return tiny_linearized(window=4, sinks=2)


@pytest.fixture
def ids():
    return random_ids(2, 20)


def recorded_outputs(model, *args, **kwargs):
    """Output of every self-attention module, by layer."""
    outs = {}
    modules = [m for m in model.modules() if hasattr(m, "o_proj")]
    hooks = [
        m.register_forward_hook(lambda m, _, out: outs.__setitem__(m.layer_idx, out[0].detach()))
        for m in modules
    ]
    model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return outs


# ---------------------------------------------------------------- new parameters
def test_window_starts_with_a_tenth():
    gate = heads(mixing="lolcats").gate
    assert torch.equal(gate, torch.full((4,), -2.1972245773362196))
    assert torch.allclose(torch.sigmoid(gate), torch.tensor(0.1))
    calibrated = heads(mixing="calibrated")
    assert torch.equal(calibrated.beta, torch.full((4,), math.log(0.1)))
    assert torch.equal(calibrated.alpha, torch.zeros(4))
    assert torch.equal(heads(mixing="kernel", feature_map="hedgehog_exp").beta, torch.zeros(4))


def test_calibrated_starts_as_lolcats():
    case = make_case(tokens=21)
    first, second = (heads(mixing=mixing) for mixing in ("calibrated", "lolcats"))
    q, k, v = (torch.nn.functional.pad(x.detach().float(), (0, 8 - x.shape[-1])) for x in case.qkv)
    assert torch.allclose(first(q, k, v, scaling=0.3), second(q, k, v, scaling=0.3), atol=1e-6)


@pytest.mark.parametrize("mixing", MIXING_RULES)
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_trained_parameters(name, mixing):
    module = heads(feature_map=name, mixing=mixing)
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    mixed = {"calibrated": {"beta", "alpha"}, "lolcats": {"gate"}, "kernel": {"beta"}}[mixing]
    if (name, mixing) == (
        "favor",
        "kernel",
    ):  # an unbiased estimate of exp(score) has no free scale
        mixed = set()
    maps = {
        f"feature_map_{x}.{n}" for x in "qk" for n, _ in module.feature_map_q.named_parameters()
    }
    assert trained == mixed | maps


@pytest.mark.parametrize("k_map", ["kv_head", "q_head"])
def test_state_heads(k_map):
    module = heads(k_map=k_map)
    assert module.feature_map_q.weight.shape[0] == 4
    assert (
        module.feature_map_k.weight.shape[0]
        == module.state_heads
        == {"kv_head": 2, "q_head": 4}[k_map]
    )


def test_new_parameters_are_fp32_in_a_bf16_model(ids):
    half = convert(tiny_llama().bfloat16(), window=4, sinks=0)
    dtypes = {".linearized." in n: p.dtype for n, p in half.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert half(ids).logits.dtype == torch.bfloat16


def test_seed_and_layer_decide_random_maps():
    section = LinearizeConfig(
        base_model_type="llama",
        layers=[0, 1],
        geometry={**GEOMETRY, "1": GEOMETRY["0"]},
        feature_map="favor",
        seed=3,
    )
    layers = [LinearizedHeads(section, i) for i in (0, 1, 0)]
    for layer in layers:
        layer.reset_parameters()
    omegas = [layer.feature_map_q.omega for layer in layers]
    assert torch.equal(omegas[0], omegas[2])
    assert not torch.equal(omegas[0], omegas[1])
    assert torch.equal(
        omegas[0], layers[0].feature_map_k.omega
    )  # one Omega, or the estimate means nothing


def test_unknown_feature_map_is_named():
    with pytest.raises(
        ValueError, match=r"convert.feature_map: 'hedgehog2' is not known; choose one of hedgehog, "
    ):
        heads(feature_map="hedgehog2")


# ---------------------------------------------------------------- the module
def test_module_runs_the_operator():
    case = make_case("hedgehog_exp", dtype=torch.float32, tokens=17)
    op, scaling = case.op, case.op.scaling
    documents = torch.tensor([[0] * 8 + [1] * 9] * 2)
    valid = torch.tensor([[False] * 3 + [True] * 14, [True] * 17])
    empty = case.heads(*(x[:, :, :0] for x in case.qkv), scaling=scaling)
    assert empty.shape == (2, 4, 0, 5)
    start = start_of(case)
    run = lambda **options: case.heads(*case.qkv, scaling=scaling, **options)  # noqa: E731
    assert torch.equal(run(), hybrid_chunked(op, *case.qkv, start)[0])
    assert torch.equal(run(valid=valid), hybrid_chunked(op, *case.qkv, start, valid=valid)[0])
    packed = hybrid_packed(op, *case.qkv, start, valid=valid, documents=documents)
    assert torch.equal(run(valid=valid, documents=documents), packed)
    queries = torch.tensor([[4, 16], [0, 9]])
    rows = run(valid=valid, documents=documents, queries=queries, weights=True)
    assert isinstance(rows, Rows)
    expected = hybrid_quadratic(op, *case.qkv, valid=valid, documents=documents, queries=queries)
    assert all(torch.equal(a, b) for a, b in zip(rows, expected))
    assert torch.equal(run(valid=valid, documents=documents, queries=queries).out, expected.out)
    few = run(documents=documents, queries=queries)
    assert torch.equal(few.out, hybrid_rows(op, *case.qkv, queries, documents=documents))
    assert few.log_weights is None


def test_no_branch_is_refused():
    with pytest.raises(ValueError, match="window and linear are both off"):
        heads().operator(scaling=1.0, window=False, linear=False)


# ---------------------------------------------------------------- masks and positions
NO, YES = [False], [True]


@pytest.mark.parametrize(
    ("mask", "past", "expected"),
    [
        (None, None, None),
        (torch.ones(2, 3), None, None),
        (torch.tensor([[0, 1, 1], [1, 1, 1]]), None, [NO + 2 * YES, 3 * YES]),
        (
            torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]),
            2,
            [3 * YES, 2 * YES + NO],
        ),  # the past is cut off
    ],
    ids=["none", "all-ones", "two-rows", "longer-than-the-tokens"],
)
def test_padding_of_2d_masks(mask, past, expected):
    valid = padding_of(mask, 2, 3, past)
    assert (valid if valid is None else valid.tolist()) == expected


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_padding_of_4d_masks(additive):
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    mask = (torch.ones(5, 5, dtype=torch.bool).tril() & real[:, None])[:, None]
    wide = torch.nn.functional.pad(
        mask[:, :, 2:], (0, 3)
    )  # a static cache of 8 places, 2 tokens before
    if additive:
        mask, wide = (
            torch.zeros(m.shape).masked_fill(~m, torch.finfo(torch.float32).min)
            for m in (mask, wide)
        )
    assert padding_of(mask, 2, 5, None).tolist() == real.tolist()
    assert padding_of(mask[:, :, 1:], 2, 4, 1).tolist() == real[:, 1:].tolist()
    assert padding_of(mask[:, :, 2:], 2, 3, 2) is None
    assert padding_of(wide, 2, 3, 2) is None


@pytest.mark.parametrize(
    ("positions", "seq_idx", "cu_seq_lens", "expected"),
    [
        (None, None, None, None),
        ([[0, 1, 2, 3, 4]], None, None, None),
        ([[7, 8, 9, 10, 11]], None, None, None),
        ([[0, 1, 0, 1, 2]], None, None, [[0, 0, 1, 1, 1]]),
        ([[0, 0, 0, 1, 2]], None, None, [[0, 1, 2, 2, 2]]),
        ([[0, 1, 2, 3, 4]], [[3, 3, 3, 5, 5]], None, [[3, 3, 3, 5, 5]]),
        ([[0, 1, 0, 1, 2]], [[1, 1, 1, 1, 1]], None, None),
        (None, None, [0, 1, 4, 5], [[0, 1, 1, 1, 2]]),
        (None, None, [0, 5], None),
    ],
)
def test_documents_of(positions, seq_idx, cu_seq_lens, expected):
    positions, seq_idx, cu_seq_lens = (
        None if x is None else torch.tensor(x) for x in (positions, seq_idx, cu_seq_lens)
    )
    documents = documents_of(positions, seq_idx, cu_seq_lens, 1, 5, "cpu")
    assert (documents if documents is None else documents.tolist()) == expected


def test_one_row_of_positions_serves_the_batch():
    documents = documents_of(torch.tensor([[0, 1, 0, 1]]), None, None, 3, 4, "cpu")
    assert documents.tolist() == [[0, 0, 1, 1]] * 3


# ---------------------------------------------------------------- modes
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_teacher_is_the_original_bit_for_bit(ids, implementation):
    original = tiny_llama(attn_implementation=implementation)
    expected = original(ids).logits
    outs = recorded_outputs(original, ids)
    model = tiny_linearized(model=original)
    student = model(ids).logits
    assert (student - expected).abs().max() > GUARD
    with teacher(model):
        assert torch.equal(model(ids).logits, expected)
        for layer, out in recorded_outputs(model, ids).items():
            assert torch.equal(out, outs[layer])
    assert torch.equal(model(ids).logits, student)


def test_teacher_of_an_unconverted_model_is_itself(ids):
    llama = tiny_llama()
    expected = llama(ids).logits
    with teacher(llama):
        assert torch.equal(llama(ids).logits, expected)


def test_modes_end_with_their_context(model, ids):
    student = model(ids).logits
    with pytest.raises(KeyError), teacher(model), branches(model, linear=False):
        raise KeyError
    assert torch.equal(model(ids).logits, student)
    with branches(model, linear=False):
        outer = model(ids).logits
        with branches(model, window=False):
            assert not torch.equal(model(ids).logits, outer)
        assert torch.equal(model(ids).logits, outer)


def test_window_alone_is_the_original_behind_a_band(ids):
    """Window 4 and 2 sinks, as a mask for stock attention."""
    original = tiny_llama()
    i, j = torch.arange(20)[:, None], torch.arange(20)
    band = ((j <= i) & ((i - j < 4) | (j < 2))).expand(2, 1, -1, -1)
    expected = original(ids, attention_mask=band).logits
    model = tiny_linearized(model=original, sinks=2)
    with branches(model, linear=False):
        assert torch.allclose(model(ids).logits, expected, atol=LOGITS)
    assert (model(ids).logits - expected).abs().max() > GUARD


def test_without_window_every_key_is_linear(model, ids):
    """Larger windows and more sinks change nothing then."""
    other = tiny_linearized(window=9, sinks=5)
    with branches(model, window=False), branches(other, window=False):
        assert torch.equal(model(ids).logits, other(ids).logits)
    assert not torch.equal(model(ids).logits, other(ids).logits)


def test_both_branches_off_is_refused(model):
    with pytest.raises(
        ValueError, match="window and linear are both off; a layer needs one of them"
    ):
        branches(model, window=False, linear=False)


def test_two_models_keep_their_own_settings(ids):
    first, second = tiny_linearized(window=4), tiny_linearized(window=20)
    expected = second(ids).logits
    with branches(first, linear=False), teacher(first):
        assert torch.equal(second(ids).logits, expected)


def test_copies_are_linearized_too(model, ids):
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids).logits, model(ids).logits)
    with teacher(twin):
        assert not torch.equal(twin(ids).logits, model(ids).logits)


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # peft 0.21 asks for it
def test_modules_are_found_inside_peft():
    model = tiny_linearized(layers=[1])
    assert list(linearized_modules(model)) == [1]
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert linearized_modules(wrapped)[1] is model.model.layers[1].self_attn


def test_softmax_attention_is_that_of_the_base_model():
    for name in ("sdpa", "eager"):
        module = linearized_modules(convert(tiny_llama(attn_implementation=name), window=4))[0]
        assert softmax_attention(module).__name__ == f"{name}_attention_forward"


# ---------------------------------------------------------------- transfer
def observe(model, *args, **kwargs):
    """What the observer is told, by layer, and the logits."""
    told = {}

    def observer(module, q, k, v, out, **inputs):
        told[module.layer_idx] = dict(q=q, k=k, v=v, out=out, **inputs)

    with transfer(model, observer):
        logits = model(*args, **kwargs).logits
    return told, logits


def test_observer_sees_what_the_teacher_does(ids):
    original = tiny_llama()
    expected, outs = original(ids).logits, recorded_outputs(original, ids)
    model = tiny_linearized(model=original)
    told, logits = observe(model, ids)
    assert torch.equal(logits, expected)  # every layer's input is the teacher's hidden state
    assert list(told) == [0, 1]
    for layer, module in linearized_modules(model).items():
        x = told[layer]
        assert (x["q"].shape, x["k"].shape, x["v"].shape) == (
            (2, 4, 20, 8),
            (2, 2, 20, 8),
            (2, 2, 20, 8),
        )
        softmax = scaled_dot_product_attention(
            x["q"], x["k"], x["v"], is_causal=True, scale=x["scaling"], enable_gqa=True
        )
        assert torch.allclose(x["out"], softmax, atol=TEACHER)
        assert torch.allclose(
            module.o_proj(x["out"].transpose(1, 2).flatten(2)), outs[layer], atol=TEACHER
        )
        assert not x["out"].requires_grad
        assert (x["valid"], x["documents"], x["softcap"], x["sink_logit"]) == (
            None,
            None,
            None,
            None,
        )
        assert x["scaling"] == 8**-0.5


def test_observer_is_told_of_padding_and_documents(model, ids):
    mask = torch.tensor([[0] * 5 + [1] * 15, [1] * 20])
    told, _ = observe(model, ids, attention_mask=mask)
    assert torch.equal(told[1]["valid"], mask.bool())
    assert told[1]["documents"] is None
    positions = torch.cat([torch.arange(9), torch.arange(11)]).expand(2, -1)
    told, _ = observe(model, ids, position_ids=positions, use_cache=False)
    assert told[0]["documents"].tolist() == [[0] * 9 + [1] * 11] * 2
    assert told[0]["valid"] is None


def test_loss_of_a_layer_moves_that_layer_alone(model, ids):
    losses = {}

    def observer(module, q, k, v, out, *, attention_mask, **inputs):
        losses[module.layer_idx] = (module.linearized(q, k, v, **inputs) - out).square().mean()

    with transfer(model, observer):
        model(ids)
    names = {n: p for n, p in model.named_parameters() if ".linearized." in n}
    grads = torch.autograd.grad(losses[1], list(names.values()), allow_unused=True)
    for name, gradient in zip(names, grads):
        assert (gradient is not None and bool(gradient.any())) is (".1.self_attn." in name), name


def test_teacher_does_not_drop_weights_while_training(ids):
    with pytest.warns(UserWarning, match="attention_dropout is 0.5"):
        model = tiny_linearized(model=tiny_llama(attention_dropout=0.5)).train()
    first, second = (observe(model, ids)[0] for _ in range(2))
    assert torch.equal(first[1]["out"], second[1]["out"])


@pytest.mark.parametrize("name", ["hedgehog", "favor"])
def test_autocast_leaves_the_operator_in_fp32(name):
    """fp32 queries and keys beside bf16 values, as a norm after the projections makes them."""
    case = make_case(name, tokens=24)
    heads, (q, k, v) = case.heads.float(), (x.float() for x in case.qkv)
    v = v.bfloat16()
    expected = heads(q, k, v, scaling=case.op.scaling)
    with torch.autocast("cpu", torch.bfloat16):
        out = heads(q, k, v, scaling=case.op.scaling)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
