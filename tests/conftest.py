"""Fixtures and small models that many tests share, and which tests of kernels run.

TRITON_INTERPRET is read when a kernel is decorated, so a process can either interpret kernels or
compile them:

    TRITON_INTERPRET=1 pytest tests/kernels     on the CPU, against the definition
    TRITON_INTERPRET=0 pytest tests/kernels     for GPUs that are not here, against budgets.json
"""

import os
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from linearize import convert

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
INTERPRET = {"test_interpreted": "1", "test_compiled": "0"}  # the kernel tests' TRITON_INTERPRET
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton 3.9 does, and warns about


def pytest_collection_modifyitems(items):
    for item in items:
        value = INTERPRET.get(item.path.stem)
        if value is not None and os.environ.get("TRITON_INTERPRET") != value:
            reason = f"runs with TRITON_INTERPRET={value}, see tests/conftest.py"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def gradients_stay_on():
    """No test, and nothing that it calls, leaves torch without gradients for the next one."""
    yield
    left_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert left_on, "gradients are off after this test"


@pytest.fixture
def stories260k():
    """Folder of a tiny Llama that has learned to tell stories."""
    folder = SHARED / "models" / "stories260k"
    if not folder.exists():
        pytest.skip(f"{folder} is missing: this test needs the tiny pretrained model")
    return folder


def tiny_llama(seed=0, **settings):
    """A random Llama: 2 layers, 4 heads, 2 key/value heads of size 8, vocabulary 64."""
    torch.manual_seed(seed)
    config = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(LlamaConfig(**{**config, **settings})).eval()


def randomize(model, std=0.5, seed=0):
    """Random values for the new parameters: at their start values the linear branch could hide
    faults.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linearized." in name:
                parameter += std * torch.randn(parameter.shape, generator=generator)
    return model


def tiny_linearized(seed=0, window=4, sinks=0, model=None, **options):
    """`tiny_llama`, converted with a small window and random new parameters."""
    model = tiny_llama(seed) if model is None else model
    return randomize(convert(model, window=window, sinks=sinks, **options), seed=seed)


def random_ids(batch, length, seed=0, vocab=64):
    return torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def tiny_model(family, seed=0, scale=6.0, **settings):
    """A random model of a family; `scale` enlarges the weight matrices, so that attention is far
    from uniform.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter *= scale
    return model
