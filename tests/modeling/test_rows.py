"""Selected rows equal the definition, in value and in the gradient of the operator's parameters."""

from dataclasses import replace

import pytest
import torch
from definition import make_case
from tolerances import FLOAT64, FLOAT64_GRADIENT

from linearize.modeling.configuration_linearized import K_MAPS, MIXING_RULES
from linearize.modeling.feature_maps import FEATURE_MAPS
from linearize.modeling.ops import hybrid_quadratic
from linearize.modeling.rows import hybrid_rows


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("k_map", K_MAPS)
@pytest.mark.parametrize("mixing", MIXING_RULES)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_rows_equal_the_definition(feature_map, mixing, k_map, sinks):
    case = make_case(feature_map, mixing, k_map=k_map, tokens=24, sinks=sinks, softcap=3.0)
    documents = torch.tensor([[0] * 24, [0] * 9 + [1] * 15])
    queries = torch.tensor([[3, 23, 11, 4, 12], [8, 9, 23, 14, 16]])
    sink_logit = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    op = case.heads.operator(scaling=case.op.scaling, softcap=3.0, sink_logit=sink_logit)
    expected = hybrid_quadratic(op, *case.qkv, documents=documents, queries=queries).out
    found = hybrid_rows(op, *case.qkv, queries, documents=documents)
    assert torch.allclose(found, expected, rtol=0, atol=FLOAT64)
    direction = torch.randn(found.shape, dtype=torch.float64)
    parameters = {n: p for n, p in case.heads.named_parameters() if p.requires_grad}
    if parameters:
        a, b = (
            torch.autograd.grad(
                (out * direction).sum(), list(parameters.values()), materialize_grads=True,
                allow_unused=True, retain_graph=True,
            )
            for out in (found, expected)
        )  # fmt: skip
        for name, x, y in zip(parameters, a, b):
            assert torch.allclose(x, y, rtol=FLOAT64_GRADIENT, atol=FLOAT64_GRADIENT), name


@pytest.mark.parametrize("size", [20.0, 80.0])
@pytest.mark.parametrize("mixing", MIXING_RULES)
@pytest.mark.parametrize("feature_map", ["hedgehog", "hedgehog_exp"])
def test_rows_stay_finite_for_extreme_inputs(feature_map, mixing, size):
    """Sums of features that underflow count as zero, in the output and in the gradient."""
    case = make_case(feature_map, mixing, tokens=64)
    heads = case.heads.float()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (size * torch.randn(x.shape, generator=generator) for x in case.qkv)
    queries = torch.arange(20, 64).expand(len(q), -1)
    out = hybrid_rows(heads.operator(scaling=case.op.scaling), q, k, v, queries)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in heads.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "off", [dict(linear=False), dict(window=0, sinks=0), dict(window=0)], ids=str
)
def test_rows_of_one_branch_equal_the_definition(off):
    case = make_case(tokens=24)
    op, queries = replace(case.op, **off), torch.tensor([[3, 23, 11], [8, 9, 0]])
    expected = hybrid_quadratic(op, *case.qkv, queries=queries).out
    found = hybrid_rows(op, *case.qkv, queries)
    assert torch.allclose(found, expected, rtol=0, atol=FLOAT64)
    assert any(p.requires_grad for p in case.qkv)
    assert not found.requires_grad or torch.autograd.grad(
        found.sum(), case.qkv, allow_unused=True
    ) == (None, None, None)
