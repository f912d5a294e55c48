"""Models by folder or name: what is found, and what is said when nothing is."""

import pytest
import torch
from conftest import tiny_linearized, tiny_llama
from tinytext import save_base, tiny_tokenizer

import linearize
from linearize.loading import choose_device, load, load_config, locate, provenance, save


def test_a_saved_model_comes_back(tmp_path):
    model, ids = tiny_linearized(), torch.arange(3, 30)[None]
    save(model, tiny_tokenizer(), tmp_path / "model")
    again, tokenizer = load(tmp_path / "model", device="cpu")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert tokenizer("w0")["input_ids"] == [3]
    assert not again.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_is_that_of_the_weights(tmp_path, dtype):
    model, _ = load(save_base(tmp_path), dtype=dtype, device="cpu")
    assert model.dtype == getattr(torch, dtype)


def test_gguf_weights_are_dequantised(tmp_path):
    gguf = pytest.importorskip("gguf", reason="reading GGUF files needs the package gguf")
    write_gguf(gguf, tiny_llama(), tmp_path / "tiny.gguf")
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _ = load(tmp_path, gguf_file="tiny.gguf", device="cpu")
    ids = torch.arange(3, 30)[None]
    assert (model(ids).logits - tiny_llama()(ids).logits).abs().max() < 1e-4
    assert linearize.convert(model, window=4).config.model_type == "linearized_llama"


def write_gguf(gguf, model, file):
    """Writes a tiny Llama as a GGUF file, in fp32 and in the row order of that format."""
    config, vocab = model.config, tiny_tokenizer().get_vocab()
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_merges(["w 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm", "model.layers": "blk",
    }  # fmt: skip
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        for projection, count in heads.items():
            if projection in name:  # interleaved rotary pairs
                halves = tensor.view(count, 2, -1, tensor.shape[-1])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_config_is_read_without_weights(tmp_path):
    tiny_llama().config.save_pretrained(tmp_path)
    assert load_config(tmp_path).hidden_size == 32


def test_hub_names_pass():
    assert locate("owner/name") == "owner/name"
    assert locate("gpt2") == "gpt2"


@pytest.mark.parametrize("name", ["./nothing", "no/such/folder", "~/nothing-at-all"])
def test_missing_folders_are_named(name):
    with pytest.raises(FileNotFoundError, match=f"model {name}: no such folder"):
        locate(name)


def test_a_missing_folder_in_a_folder_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(FileNotFoundError, match="model models/mine: no such folder"):
        locate("models/mine")


def test_a_typo_in_the_embedded_name_is_seen():
    with pytest.raises(FileNotFoundError, match=r"did you mean tiny-english\?"):
        locate("tiny-englsh")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder holds no config\.json"):
        locate(tmp_path)
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ValueError, match="this is a file; name its folder"):
        locate(tmp_path / "weights.gguf")


def test_unknown_dtypes_and_devices_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.dtype: 'int8' is not known; choose one of auto"):
        load(tmp_path, dtype="int8")
    with pytest.raises(ValueError, match="device: 'toaster' is not known; use cpu, cuda"):
        choose_device("toaster")


def test_auto_is_some_device():
    assert choose_device("auto").type in {"cpu", "cuda", "mps", "xpu"}
    assert choose_device("cpu") == torch.device("cpu")


def test_provenance_names_versions_and_hardware():
    found = provenance()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["linearize"] == linearize.__version__
    assert "cores" in found["hardware"]
    assert found["commit"] is None or len(found["commit"].removesuffix("+changes")) == 40
