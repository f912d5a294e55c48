"""Quantized weights: a converted model can be quantized, a quantized model cannot be converted.

The new parameters stay fp32 under every quantization.
"""

import pytest
import torch
from conftest import random_ids, tiny_linearized, tiny_llama
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from tolerances import GUARD, LOGITS
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from linearize import convert, teacher
from linearize.checkpoint import save_adapter
from linearize.modeling.attention import linearized_modules

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)  # the libraries' own
GREEDY = dict(do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0)


def needs(package):
    return lambda: pytest.importorskip(package, reason='needs pip install -e ".[ecosystem]"')


def torchao_int8():
    needs("torchao")()
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def bitsandbytes(**options):
    def config():
        needs("bitsandbytes")()
        return BitsAndBytesConfig(**options)

    return config


QUANTIZATIONS = {
    "torchao-int8": torchao_int8,
    "bitsandbytes-8bit": bitsandbytes(load_in_8bit=True),
    "bitsandbytes-4bit": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}


@pytest.fixture(params=QUANTIZATIONS)
def config(request):
    return QUANTIZATIONS[request.param]()


def softmax():
    return tiny_llama(hidden_size=64, intermediate_size=128)  # a block of 4-bit weights is 64 wide


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    softmax().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    tiny_linearized(sinks=1, model=softmax()).save_pretrained(folder)
    return folder


def load(folder, config=None):
    settings = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


def test_a_quantized_model_is_not_converted(base, config):
    with pytest.raises(ValueError, match="the model is quantized, and its weights cannot"):
        convert(load(base, config))


def test_an_adapter_is_not_put_on_a_quantized_base(base, tmp_path, config):
    save_adapter(convert(load(base), window=4), tmp_path, base)
    with pytest.raises(ValueError, match="an adapter is put on unquantized weights"):
        load(tmp_path, config)


@torch.no_grad()
def test_a_converted_model_is_quantized(base, folder, config):
    """Its teacher is the quantized softmax model, and the new parameters stay as they were."""
    model, stock, plain = load(folder, config), load(base, config), load(folder)
    for i, module in linearized_modules(model).items():
        for name, x in linearized_modules(plain)[i].linearized.named_parameters():
            assert module.linearized.get_parameter(name).dtype == torch.float32
            assert torch.equal(module.linearized.get_parameter(name), x), name
    ids = random_ids(2, 24)
    with teacher(model):
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, atol=LOGITS, rtol=0)
    exact, quantized, softmax_logits = (m(ids).logits for m in (plain, model, stock))
    far = (quantized - softmax_logits).abs().mean()
    assert GUARD < (quantized - exact).abs().mean() < far / 2


def test_a_quantized_model_generates_with_its_cache(folder, config):
    model, ids = load(folder, config), random_ids(2, 24)
    whole = model.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), whole)


def test_a_quantized_model_comes_back(folder, tmp_path, config):
    model, ids = load(folder, config), random_ids(2, 24)
    model.save_pretrained(tmp_path)  # before a forward, which repacks 4-bit weights on a CPU
    with torch.no_grad():
        logits = model(ids).logits
        torch.testing.assert_close(load(tmp_path)(ids).logits, logits, atol=LOGITS, rtol=0)


def test_lora_on_a_quantized_converted_model(folder, config):
    model, ids = prepare_model_for_kbit_training(load(folder, config)), random_ids(2, 24)
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"],
        modules_to_save=["linearized"],
    )  # fmt: skip
    model = get_peft_model(model, lora).train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_torchao_before_and_after_the_conversion_is_the_same():
    """`quantize_` changes tensors, not layers: they are taken over as they are."""
    needs("torchao")()
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    before, after, ids = softmax(), tiny_linearized(sinks=1, model=softmax()), random_ids(2, 24)
    quantize_(before, Int8WeightOnlyConfig())
    before = tiny_linearized(sinks=1, model=before)
    quantize_(after, Int8WeightOnlyConfig())
    assert type(before.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)


def test_layers_of_bitsandbytes_put_in_by_hand_are_refused():
    bnb = needs("bitsandbytes")()
    model = softmax()
    model.model.layers[0].mlp.up_proj = bnb.nn.Linear8bitLt(64, 128, bias=False)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj is a Linear8bitLt, which"):
        convert(model)
