"""The kernels in Triton's interpreter against the definition in float64."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from conftest import random_ids, tiny_linearized
from definition import Case, distance, make_case, start_of
from tolerances import (
    BFLOAT16_KERNEL,
    CONSTANT_FLOAT32,
    FLOAT16_KERNEL,
    FLOAT32,
    FLOAT32_GRADIENT,
    GUARD,
    LOGITS,
    SHARP_FLOAT32,
    SOFTMAX_FLOAT32,
)
from torch.nn.functional import scaled_dot_product_attention

from linearize.kernels import configs, operators
from linearize.modeling.accelerated import step_in_place
from linearize.modeling.chunked import hybrid_chunked, hybrid_packed
from linearize.modeling.ops import hybrid_quadratic, hybrid_step

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.repair()

OUTPUT = {torch.float32: FLOAT32, torch.float16: FLOAT16_KERNEL, torch.bfloat16: BFLOAT16_KERNEL}
# prefix states of fp16 inputs are bf16, whose gradients are no better than those of bf16
GRADIENT = {
    torch.float32: FLOAT32_GRADIENT,
    torch.float16: BFLOAT16_KERNEL,
    torch.bfloat16: BFLOAT16_KERNEL,
}


@pytest.fixture(autouse=True)
def use(monkeypatch):
    """use(mode) chooses the path; chunks of 16 in fp32, so that few tokens are many chunks."""
    monkeypatch.setattr(configs, "CHUNK_FP32", 16)

    def choose(mode):
        monkeypatch.setenv("LINEARIZE_KERNELS", mode)

    choose("triton")
    return choose


def double(case):
    """The same numbers in float64, as leaves."""
    heads = copy.deepcopy(case.heads).double()
    op = replace(heads.operator(scaling=case.op.scaling), window=case.op.window)
    qkv = (x.detach().double().requires_grad_() for x in case.qkv)
    return Case(case.feature_map, heads, op, *qkv)


def small(name="centroids", **settings):
    """A case in fp32 with narrow heads, and a window that is no multiple of a chunk."""
    default = dict(
        tokens=45, window=7, sinks=2, batch=1, heads=2, kv_heads=1, dim=16, v_dim=16,
        feature_dim=12, dtype=torch.float32,
    )  # fmt: skip
    return make_case(name, **{**default, **settings})


def run(case):
    return hybrid_chunked(case.op, *case.qkv, start_of(case))


def compare(case, output=None, gradient=None):
    """Outputs and all gradients agree with the definition in float64; returns the latter."""
    exact, dtype = double(case), case.v.dtype
    out, expected = run(case)[0], hybrid_quadratic(exact.op, *exact.qkv).out
    assert out.dtype == dtype and distance(out, expected) < (output or OUTPUT[dtype])
    got, wanted = case.gradients(out), exact.gradients(expected)
    for name, value in got.items():
        assert distance(value, wanted[name]) < (gradient or GRADIENT[dtype]), name
    return exact, expected


# -------------------------------------------------------------------------- outputs and gradients
SHAPES = {
    "hedgehog-R4-lolcats": dict(name="hedgehog", mixing="lolcats", heads=4, tokens=20),
    "HS=H-B2": dict(k_map="q_head", heads=2, kv_heads=1, batch=2, tokens=20),
    "kernel-rule-no-sinks": dict(mixing="kernel", sinks=0),
    "signed-features-F15": dict(name="taylor", feature_dim=4, heads=1),
    "zero-features": dict(name="t2r", heads=1),
    "D24-Dv40": dict(dim=24, v_dim=40, tokens=33, heads=1),
    "more-sinks-than-a-chunk": dict(sinks=19, window=16, heads=1),
    "T1": dict(tokens=1, heads=1),
    "T=W-1": dict(tokens=31, window=32, heads=1),
    "T=W+1": dict(tokens=33, window=32, sinks=0, heads=1),
    "T=3W+7": dict(tokens=55, window=16, heads=1),
    "W1": dict(window=1, sinks=0, tokens=35, heads=1),
}


@pytest.mark.parametrize("settings", SHAPES.values(), ids=SHAPES)
def test_outputs_and_gradients(settings):
    compare(small(**settings))


def test_sharp_rows():
    compare(small(size=6.0, heads=1), SHARP_FLOAT32, SHARP_FLOAT32)


LARGE = {
    "centroids-D64-F128-bf16": dict(dim=64, feature_dim=128, dtype=torch.bfloat16),
    "hedgehog-D64-F128-fp16": dict(name="hedgehog", dim=64, feature_dim=64, dtype=torch.float16),
    "centroids-D128-F256-bf16": dict(dim=128, feature_dim=256, dtype=torch.bfloat16, heads=1),
    "elu1-D80-bf16": dict(name="elu1", dim=80, feature_dim=None, dtype=torch.bfloat16, heads=1),
    "centroids-D96-F192-bf16": dict(dim=96, feature_dim=192, dtype=torch.bfloat16, heads=1),
}


@pytest.mark.parametrize("settings", LARGE.values(), ids=LARGE)
def test_the_sizes_of_real_models(settings):
    exact, expected = compare(small(**settings, window=64, tokens=150, v_dim=settings["dim"]))
    without = hybrid_quadratic(replace(exact.op, linear=False), *exact.qkv).out
    assert distance(without, expected) > GUARD


def test_the_gradient_of_the_row_scale():
    case = small(tokens=20, window=4, sinks=0)
    q, k, v = case.qkv
    fq, fk = (torch.rand(1, n, 20, 12, requires_grad=True) for n in (2, 1))
    scale = torch.randn(1, 2, 20, requires_grad=True)
    leaves = (fq, fk, scale)

    def logs(x):
        return (fq.to(x).log() + scale.to(x)[..., None]) if x.shape[1] == 2 else fk.to(x)

    state, op = start_of(case), replace(double(case).op, phi_q=logs, phi_k=logs)
    keys, values = (torch.cat(x, 2) for x in ((state.window_k, k), (state.window_v, v)))
    out, _, _ = operators.hybrid(
        q, keys, values, state.sink_k, state.sink_v, fq, fk, scale, case.op.beta, case.op.alpha,
        state.S, state.z, state.seen, window=4, scaling=case.op.scaling,
    )  # fmt: skip
    # the kernel is handed the features of the keys that leave, here the first 20 of 23
    fk_of_keys = torch.cat([fk[:, :, 3:], fk[:, :, :3]], 2)
    expected = hybrid_quadratic(
        replace(op, phi_k=lambda x: fk_of_keys.to(x)), *(x.double() for x in case.qkv)
    ).out
    assert distance(out, expected) < FLOAT32
    for got, wanted in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
    ):
        assert distance(got, wanted) < FLOAT32_GRADIENT


# --------------------------------------------------------------------------------------- invariants
def test_splits_carry_the_state_and_its_gradient():
    case, sizes = small(tokens=40), (13, 1, 26)
    exact, state, outs = double(case), start_of(case), []
    for part in zip(*(x.split(sizes, 2) for x in case.qkv)):
        out, state = hybrid_chunked(case.op, *part, state)
        outs.append(out)
    out, expected = torch.cat(outs, 2), hybrid_quadratic(exact.op, *exact.qkv).out
    assert distance(out, expected) < FLOAT32
    wanted = exact.gradients(expected)
    for name, value in case.gradients(out).items():
        assert distance(value, wanted[name]) < FLOAT32_GRADIENT, name
    for name, got, whole in zip(state._fields, state, run(case)[1]):
        assert distance(got, whole) < FLOAT32, name


def test_rows_that_have_seen_different_numbers_of_tokens(use):
    case = small(tokens=30, batch=2, heads=1)
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, :17] = False
    use("torch")
    with torch.no_grad():
        first, second = zip(*(x.split((20, 10), 2) for x in case.qkv))
        state = hybrid_chunked(case.op, *first, start_of(case), valid=valid)[1]
        expected, after = hybrid_chunked(case.op, *second, state)
        use("triton")
        out, reached = hybrid_chunked(case.op, *second, state)
    assert state.seen.tolist() == [20, 3] and distance(out, expected) < FLOAT32
    assert all(distance(a, b) < FLOAT32 for a, b in zip(reached, after))


def test_packed_documents_do_not_meet():
    case = small(tokens=40, heads=1)
    documents = torch.tensor([[0] * 23 + [1] * 17])
    out = hybrid_packed(case.op, *case.qkv, start_of(case), documents=documents)
    exact = double(case)
    expected = hybrid_quadratic(exact.op, *exact.qkv, documents=documents).out
    assert distance(out, expected) < FLOAT32


def test_later_tokens_change_no_bit_of_earlier_rows_and_two_runs_agree_in_all_bits():
    case = small(heads=1)
    q, k, v = (x.detach().clone() for x in case.qkv)
    for x in (q, k, v):
        x[:, :, 35:] += 3
    with torch.no_grad():
        out, other = run(case)[0], hybrid_chunked(case.op, q, k, v, start_of(case))[0]
    assert torch.equal(out[:, :, :35], other[:, :, :35])
    assert not torch.equal(out[:, :, 35:], other[:, :, 35:])
    first, second = (case.gradients(run(case)[0]) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_constant_values_and_the_softmax_limit():
    case = small(heads=1)
    with torch.no_grad():
        ones = hybrid_chunked(case.op, case.q, case.k, torch.ones_like(case.v), start_of(case))[0]
        assert distance(ones, torch.ones_like(ones)) < CONSTANT_FLOAT32
        case = small(window=45, sinks=0, kv_heads=2)
        expected = scaled_dot_product_attention(*(x.double() for x in case.qkv), is_causal=True)
        assert distance(run(case)[0], expected) < SOFTMAX_FLOAT32


# ------------------------------------------------------------------------------------ one token
STEPS = {
    "hedgehog": dict(name="hedgehog", window=3),
    "centroids-HS=H": dict(k_map="q_head", window=3, sinks=0, batch=2),
    "W1": dict(window=1, sinks=1),
    "bf16-D24": dict(name="hedgehog", window=3, dtype=torch.bfloat16, dim=24),
}


@pytest.mark.parametrize("settings", STEPS.values(), ids=STEPS)
def test_steps_in_place(settings):
    case = small(**settings, tokens=7)
    state, tolerance = start_of(case), OUTPUT[case.v.dtype]
    mine = type(state)(*(x.clone() for x in state))
    places = [x.data_ptr() for x in mine]
    with torch.no_grad():
        for token in zip(*(x.split(1, 2) for x in case.qkv)):
            expected, state = hybrid_step(case.op, *token, state)
            assert distance(step_in_place(case.op, *token, mine), expected) < tolerance
    assert places == [x.data_ptr() for x in mine]
    for name, got, wanted in zip(state._fields, mine, state):
        assert distance(got, wanted) < tolerance, name


@pytest.mark.parametrize("feature_map", ["hedgehog", "centroids"])
def test_a_model_writes_what_it_writes_without_kernels(feature_map, use):
    model, ids = tiny_linearized(feature_map=feature_map, sinks=1), random_ids(1, 14)
    with torch.no_grad():
        logits = model(ids).logits
        written = model.generate(ids, max_new_tokens=3, do_sample=False)
        use("torch")
        assert torch.allclose(model(ids).logits, logits, atol=LOGITS)
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), written)


# -------------------------------------------------------------------------------------- operators
def test_the_operators_are_what_torch_expects():
    case = small(tokens=17, heads=1, feature_dim=8, window=4)
    state, op = start_of(case), case.op
    keys, values = (
        torch.cat([old, new], 2).detach().requires_grad_()
        for old, new in ((state.window_k, case.k), (state.window_v, case.v))
    )
    fq, fk = (torch.rand(1, 1, 17, 8, requires_grad=True) for _ in range(2))
    beta, alpha = (x.detach().requires_grad_() for x in (op.beta, op.alpha))
    sums = (state.S.requires_grad_(), state.z.requires_grad_())
    tensors = (case.q, keys, values, state.sink_k, state.sink_v, fq, fk, None, beta, alpha, *sums)
    torch.library.opcheck(operators.hybrid_forward, (*tensors, state.seen, 4, op.scaling, True))
    with torch.no_grad():
        token = [x[:, :, :1].detach().contiguous() for x in case.qkv]
        maps = (op.phi_q.weight, op.phi_q.bias, op.phi_k.weight, op.phi_k.bias)
        state = [x.detach().clone() for i, x in enumerate(start_of(case)) if i != 2]
        arguments = (*token, *(x.detach() for x in (*maps, beta, alpha)), *state, op.scaling)
        torch.library.opcheck(operators._hybrid_step, arguments)


def test_the_interpreters_product_of_bf16_needs_its_repair():
    """If this fails, Triton repaired its interpreter: delete interpreter.py."""
    case = small(tokens=8, heads=1, dtype=torch.bfloat16, window=8, sinks=0)
    with torch.no_grad():
        expected = hybrid_quadratic(double(case).op, *(x.double() for x in case.qkv)).out
        interpreter.undo()
        try:
            broken = run(case)[0]
        finally:
            interpreter.repair()
        assert distance(broken, expected) > 1 and distance(run(case)[0], expected) < BFLOAT16_KERNEL
