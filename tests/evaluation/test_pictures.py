"""Pictures of heads: the bytes decode to the weights, and what is written is read."""

import numpy as np
import pytest
import torch
from conftest import tiny_linearized, tiny_llama
from tinytext import WORDS, tiny_tokenizer

from linearize.evaluation.fidelity import fidelity
from linearize.evaluation.pictures import picture_student, picture_teacher, read_pictures

TEXT = [" ".join(WORDS[(7 * i + j) % 61] for i in range(120)) for j in range(3)]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    model, tokenizer = tiny_linearized(sinks=2), tiny_tokenizer()
    picture_teacher(model, tokenizer, TEXT, fidelity(model, tokenizer, TEXT), folder)
    picture_student(model, folder)
    return model, folder, read_pictures(folder)


def weights(codes):
    return np.where(codes == 0, 0.0, 10.0 ** (codes / 51 - 5))


def test_the_teacher_is_the_softmax_model(drawn):
    pictures = drawn[2]
    assert len(pictures.texts) == 3 and len(pictures.texts[0]) == 96
    assert pictures.heads == [(layer, head) for layer in (0, 1) for head in range(4)]
    ids = torch.tensor([tiny_tokenizer()(TEXT[1])["input_ids"][:96]])
    stock = tiny_llama()
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = stock(ids, output_attentions=True).attentions
    for place, (layer, head) in enumerate(pictures.heads):
        wanted = attentions[layer][0, head].numpy()
        np.testing.assert_allclose(
            weights(pictures.teacher[1, place]), np.where(wanted > 1.1e-5, wanted, 0),
            rtol=0.024, atol=1.2e-5,
        )  # fmt: skip


def test_the_student_is_exact_inside_the_window_and_normalised(drawn):
    _model, _folder, pictures = drawn
    student, teacher = weights(pictures.student), weights(pictures.teacher)
    np.testing.assert_allclose(student.sum(-1), 1, rtol=0.03)
    assert (np.triu(student[0, 0], 1) == 0).all()
    first = [place for place, (layer, _) in enumerate(pictures.heads) if layer == 0]
    np.testing.assert_array_equal(pictures.student[:, first, :6], pictures.teacher[:, first, :6])
    assert np.abs(student - teacher)[:, :, 30:].max() > 0.05


def test_the_model_is_left_as_it_was(drawn):
    model, _folder, _ = drawn
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_measures_and_settings_are_kept(drawn):
    model, _folder, pictures = drawn
    found = fidelity(model, tiny_tokenizer(), TEXT)
    np.testing.assert_allclose(pictures.measures["attention_kl"], found["attention_kl"], rtol=1e-6)
    assert (pictures.layers, pictures.window, pictures.sinks) == ([0, 1], 4, 2)


def test_one_short_text_is_enough(tmp_path):
    model, tokenizer = tiny_linearized(sinks=2), tiny_tokenizer()
    text = " ".join(WORDS[:20])
    picture_teacher(model, tokenizer, text, fidelity(model, tokenizer, text), tmp_path)
    assert [len(pieces) for pieces in read_pictures(tmp_path).texts] == [20]
    picture_teacher(
        model, tokenizer, TEXT, fidelity(model, tokenizer, TEXT), tmp_path, max_length=12
    )
    assert [len(pieces) for pieces in read_pictures(tmp_path).texts] == [12, 12, 12]


def test_nothing_written_is_nothing_read(tmp_path):
    assert read_pictures(tmp_path) is None


def test_an_unconverted_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pictures: this model has no linearized layer"):
        picture_teacher(tiny_llama(), tiny_tokenizer(), TEXT, {}, tmp_path)
