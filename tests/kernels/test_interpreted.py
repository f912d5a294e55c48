"""The kernels in Triton's interpreter against the definition in float64."""

import copy
from dataclasses import replace

import pytest
import torch
from definition import Case, distance, make_case, start_of
from tolerances import (
    BFLOAT16_KERNEL,
    CONSTANT_FLOAT32,
    FLOAT16_KERNEL,
    FLOAT32,
    FLOAT32_GRADIENT,
    GUARD,
    SOFTMAX_FLOAT32,
)
from torch.nn.functional import scaled_dot_product_attention

from linearize import kernels
from linearize.kernels import configs
from linearize.modeling.chunked import hybrid_chunked, hybrid_packed
from linearize.modeling.ops import hybrid_quadratic, hybrid_recurrent

pytestmark = pytest.mark.usefixtures("forced")

OUTPUT = {torch.float32: FLOAT32, torch.float16: FLOAT16_KERNEL, torch.bfloat16: BFLOAT16_KERNEL}
GRADIENT = {**OUTPUT, torch.float32: FLOAT32_GRADIENT}


def double(case):
    """The same numbers in float64, as leaves."""
    heads = copy.deepcopy(case.heads).double()
    op = replace(
        heads.operator(scaling=case.op.scaling, linear=case.op.linear), window=case.op.window
    )
    qkv = (x.detach().double().requires_grad_() for x in case.qkv)
    return Case(case.feature_map, heads, op, *qkv)


def small(name="centroids", **settings):
    """A case in fp32 with narrow heads, tiles of 16, and a window that is no multiple of them."""
    default = dict(
        tokens=45, window=7, sinks=2, batch=1, heads=2, kv_heads=1, dim=16, v_dim=16,
        feature_dim=12, dtype=torch.float32,
    )  # fmt: skip
    return make_case(name, **{**default, **settings})


@pytest.fixture
def narrow(monkeypatch):
    """Chunks of 16, so that few tokens are many chunks."""
    monkeypatch.setattr(configs, "CHUNK_FP32", 16)
    monkeypatch.setattr(configs, "CHUNK", 16)


def run(case, **options):
    return hybrid_chunked(case.op, *case.qkv, start_of(case), **options)


def compare(case):
    """Outputs and all gradients agree with the definition in float64, at the dtype's tolerance."""
    exact = double(case)
    out, expected = run(case)[0], hybrid_quadratic(exact.op, *exact.qkv).out
    dtype = case.v.dtype
    assert out.dtype == dtype and distance(out, expected) < OUTPUT[dtype]
    got, wanted = case.gradients(out), exact.gradients(expected)
    for name, gradient in got.items():
        assert distance(gradient, wanted[name]) < GRADIENT[dtype], name
    return out, expected


# ------------------------------------------------------------------------------------------ forward
SHAPES = {
    "hedgehog-G1-lolcats": dict(name="hedgehog", mixing="lolcats", heads=4),
    "centroids-HS=H": dict(k_map="q_head", heads=4, kv_heads=2, batch=2, tokens=20),
    "kernel-rule": dict(mixing="kernel"),
    "signed-features-F15": dict(name="taylor", feature_dim=4, mixing="calibrated"),
    "zero-features": dict(name="t2r"),
    "no-sinks": dict(sinks=0),
    "D24-Dv40": dict(dim=24, v_dim=40, tokens=33),
    "more-sinks-than-a-chunk": dict(sinks=19, window=16),
    "T1": dict(tokens=1),
    "T=W-1": dict(tokens=31, window=32),
    "T=W": dict(tokens=32, window=32),
    "T=W+1": dict(tokens=33, window=32, sinks=0),
    "T=3W+7": dict(tokens=55, window=16),
    "W1": dict(window=1, sinks=0, tokens=35),
    "R8": dict(heads=8, tokens=20),
}


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("settings", SHAPES.values(), ids=SHAPES)
def test_outputs_and_gradients(settings):
    compare(small(**settings))


LARGE = {
    "hedgehog-D64-F128-fp32": dict(name="hedgehog", dim=64, feature_dim=64, dtype=torch.float32),
    "centroids-D64-F128-bf16": dict(dim=64, feature_dim=128, dtype=torch.bfloat16),
    "hedgehog-D64-F128-fp16": dict(name="hedgehog", dim=64, feature_dim=64, dtype=torch.float16),
    "centroids-D128-F256-bf16": dict(dim=128, feature_dim=256, dtype=torch.bfloat16),
    "elu1-D80-bf16": dict(name="elu1", dim=80, feature_dim=None, dtype=torch.bfloat16),
    "centroids-D96-F192-fp32": dict(dim=96, feature_dim=192, dtype=torch.float32),
}


@pytest.mark.parametrize("settings", LARGE.values(), ids=LARGE)
def test_the_sizes_of_real_models(settings):
    settings = dict(settings, window=64, tokens=150, v_dim=settings["dim"])
    case = small(**settings)
    out, expected = compare(case)
    without = hybrid_quadratic(replace(double(case).op, linear=False), *double(case).qkv).out
    assert distance(without, expected) > GUARD
