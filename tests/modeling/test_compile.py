"""torch.compile: one graph, no recompilation as a sequence grows, the numbers of the eager run."""

import shutil

import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama
from families import cache_argument
from torch._dynamo.utils import counters
from transformers import DynamicCache
from transformers.generation.configuration_utils import CompileConfig

# the default compiler of torch writes C++, which takes a minute to compile
WITH_A_C_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
GENERATE = dict(do_sample=False, max_new_tokens=30, eos_token_id=None, pad_token_id=0)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def one_layer(**options):
    return tiny_linearized(sinks=1, model=tiny_llama(num_hidden_layers=1), **options)


def graphs():
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def compile_config():
    config = CompileConfig(fullgraph=True, mode=None, backend="aot_eager")
    config._compile_all_devices = True  # by itself generate compiles on accelerators only
    return config


KINDS = {
    "hybrid": lambda: tiny_linearized(sinks=1, layers=[0]),
    "some heads": lambda: one_layer(softmax_heads={0: [1]}),
    "log-space": lambda: one_layer(feature_map="hedgehog_exp"),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_static_cache_is_compiled_once(kind):
    model = kind()
    ids = random_ids(2, 19)
    gold = model.generate(ids, use_cache=False, **GENERATE)
    for _ in range(2):
        out = model.generate(
            ids, cache_implementation="static", compile_config=compile_config(), **GENERATE
        )
        assert torch.equal(out, gold)
        assert graphs() == 2  # of a first decode step, and of one with the length as a variable


def test_left_padding_with_a_compiled_static_cache():
    model, ids = one_layer(), random_ids(2, 19)
    mask = torch.ones_like(ids)
    ids[0, :7], mask[0, :7] = 0, 0
    gold = model.generate(ids, attention_mask=mask, use_cache=False, **GENERATE)
    static = dict(cache_implementation="static", compile_config=compile_config())
    assert torch.equal(model.generate(ids, attention_mask=mask, **static, **GENERATE), gold)
    assert graphs() == 2


@torch.no_grad()
def test_decoding_step_is_not_recompiled():
    model, ids, cache = one_layer(), random_ids(1, 40), DynamicCache()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = [model(ids[:, :10], **cache_argument(cache)).logits]
    after = []
    for t in range(10, 40):
        logits.append(step(ids[:, t : t + 1], **cache_argument(cache)).logits)
        after.append(graphs())
    assert after[2] == after[-1]
    torch.testing.assert_close(
        torch.cat(logits, 1), model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-5
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
@pytest.mark.parametrize(
    ("backend", "length"),
    [("aot_eager", 70), pytest.param("inductor", 40, marks=[pytest.mark.slow, WITH_A_C_COMPILER])],
)
def test_training_step(backend, length):
    model, ids, gradients = one_layer().train(), random_ids(2, length), []
    for run in (model, torch.compile(model, fullgraph=True, backend=backend)):
        model.zero_grad()
        loss = run(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        gradients.append({"loss": loss.detach(), **found})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-4, rtol=1e-4, msg=name)


def test_packed_documents_are_refused_when_compiled():
    model, ids = one_layer(), random_ids(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="packed documents cannot be compiled"):
        compiled(ids, position_ids=positions, use_cache=False)
