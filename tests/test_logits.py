"""Decoder and head apart: every family's own head, and a model that is left as it was."""

import pytest
import torch
from conftest import random_ids, tiny_llama, tiny_model
from families import ALL_FULL, skip_if_unavailable
from tolerances import LOGITS

from linearize import convert
from linearize.logits import decoder_of, head_logits, run_body

SCALES = {"cohere": {"logit_scale": 0.3}, "granite": {"logits_scaling": 3.0}}


@pytest.mark.parametrize("converted", [False, True], ids=["softmax", "linearized"])
@pytest.mark.parametrize("family", ALL_FULL)
def test_slices_equal_the_family_s_own_logits(family, converted):
    """Soft caps, scales and biases of the head included; the head never sees all tokens."""
    skip_if_unavailable(family)
    model = tiny_model(family, scale=1.0, **ALL_FULL[family], **SCALES.get(family, {}))
    model = convert(model, window=4) if converted else model
    ids, seen = random_ids(2, 12), []
    with torch.no_grad():
        full = model(ids).logits
        head = model.get_output_embeddings().register_forward_hook(
            lambda module, args, out: seen.append(out.shape[1])
        )
        body = run_body(model, input_ids=ids)
        parts = [head_logits(model, body, body.last_hidden_state[:, i : i + 5]) for i in (0, 5, 10)]
        head.remove()
        after = model(ids).logits
    assert seen == [1, 5, 5, 2]
    assert torch.allclose(torch.cat(parts, 1), full, rtol=0, atol=LOGITS)
    assert torch.equal(after, full)
    assert full.std() > 1e-2, "constant logits would prove nothing"
    assert "forward" not in vars(decoder_of(model))
    assert not decoder_of(model)._forward_hooks


def test_a_failing_head_leaves_the_model_intact():
    model, ids = tiny_llama(), random_ids(1, 37)
    body = run_body(model, input_ids=ids)
    head, model.lm_head = model.lm_head, torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        head_logits(model, body, body.last_hidden_state[:, :4])
    model.lm_head = head
    assert model(ids).logits.shape == (1, 37, 64)
    assert "forward" not in vars(decoder_of(model))
