"""The layout of published LoLCATs checkpoints, on a small one, against their formula."""

import math
import pickle

import pytest
import torch
import yaml
from conftest import random_ids, tiny_llama
from tinytext import save_base
from tolerances import GUARD, LOGITS
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from linearize import branches
from linearize.importing import import_lolcats, import_lolcats_folder

WINDOW, HEADS, SIZE, HALF, RANK = 4, 4, 8, 4, 2
PROJECTIONS = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}
ATTENTION = dict(
    attention_type="lolcats_llama_window_tk", state_chunk_len=1024, window_size=WINDOW,
    affine_attention_factors=False, init_window_factor=-2.1972245773362196,
    feature_map="softmax_dim", feature_map_kwargs=dict(eps=1e-12, fullspace=True), layer_idx=None,
    learned_kernel="untied_head_einsum", tie_qk_kernels=False, train_qk=False,
    learned_kernel_kwargs=dict(
        feature_dim=HALF, skip_connection=False, bias=False, zero_init=False
    ),
)  # fmt: skip
FINETUNE = dict(finetune=dict(method="lora", kwargs=dict(r=RANK, lora_alpha=4, lora_dropout=0)))


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def maps(layer):
    return {
        "feature_map_q.mlp.layer": normal(HEADS, SIZE, HALF, seed=layer),
        "feature_map_k.mlp.layer": normal(HEADS, SIZE, HALF, seed=10 + layer),
        "window_factors": normal(1, HEADS, 1, 1, seed=20 + layer),
    }


def lora(layer):
    return {
        f"{name}.lora_{half}.default.weight": 0.3 * normal(*shape, seed=30 + layer + width)
        for name, width in PROJECTIONS.items()
        for half, shape in (("A", (RANK, 32)), ("B", (width, RANK)))
    }


def state_dict(parts, prefix, layers=(0, 1)):
    return {
        f"{prefix}layers.{i}.self_attn.{name}": x for i in layers for name, x in parts(i).items()
    }


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a checkpoint: keyword arguments for `import_lolcats`."""

    def write(attention=ATTENTION, prefix="model.", with_lora=True, layers=(0, 1)):
        torch.save(
            {"model_state_dict": state_dict(maps, prefix, layers), "step": 3}, tmp_path / "maps.pt"
        )
        torch.save(state_dict(lora, "base_model.model.model.", layers), tmp_path / "lora.pt")
        (tmp_path / "model.yaml").write_text(yaml.safe_dump({"attention": attention}))
        (tmp_path / "finetune.yaml").write_text(yaml.safe_dump(FINETUNE))
        files = [tmp_path / "maps.pt"] + [tmp_path / "lora.pt"] * with_lora
        return dict(
            files=files, model_config=tmp_path / "model.yaml",
            finetune_config=tmp_path / "finetune.yaml" if with_lora else None,
        )  # fmt: skip

    return write


# ----------------------------------------------------------------------- their formula, on its own
def hybrid(q, k, v, weights, terrace):
    """Zhang et al. 2024, eq. 6: exp(s - max) times a gate in the window, features before it."""
    T = q.shape[2]
    t = torch.arange(T)
    causal = t[:, None] >= t
    near = (t // WINDOW)[:, None] - t // WINDOW < 2 if terrace else t[:, None] - t < WINDOW
    scores = (q @ k.mT / math.sqrt(SIZE)).masked_fill(~(near & causal), -torch.inf)
    exact = torch.exp(scores - scores.amax(-1, keepdim=True))
    exact = torch.sigmoid(weights["window_factors"]) * exact

    def features(x, side):
        z = torch.einsum("hdf,bhtd->bhtf", weights[f"feature_map_{side}.mlp.layer"], x)
        return torch.cat([torch.softmax(z, -1), torch.softmax(-z, -1)], -1).clamp(min=1e-12)

    linear = features(q, "q") @ features(k, "k").mT * (causal & ~near)
    total = exact + linear
    return total @ v / total.sum(-1, keepdim=True)


@torch.no_grad()
def their_logits(model, ids, terrace=True, with_lora=True):
    """A Llama with their attention, from its parts."""
    body = model.model
    x = body.embed_tokens(ids)
    rotary = body.rotary_emb(x, torch.arange(ids.shape[1])[None])
    for i, layer in enumerate(body.layers):
        h, adapters = layer.input_layernorm(x), lora(i)

        def project(name, h, i=i, layer=layer, adapters=adapters):
            weight = getattr(layer.self_attn, name).weight
            if with_lora:
                A, B = (adapters[f"{name}.lora_{half}.default.weight"] for half in "AB")
                weight = weight + 4 / RANK * B @ A
            return h @ weight.T

        q, k, v = (
            project(n, h).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for n in ("q_proj", "k_proj", "v_proj")
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        out = hybrid(q, repeat_kv(k, 2), repeat_kv(v, 2), maps(i), terrace)
        x = x + project("o_proj", out.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(body.norm(x))


# ------------------------------------------------------------------------------------------- tests
@torch.no_grad()
@pytest.mark.parametrize("prefix", ["model.", "base_model.model.model.", "model.model."])
@pytest.mark.parametrize("kind", ["tk", "sw"])
def test_logits_are_those_of_their_formula(checkpoint, kind, prefix):
    attention = ATTENTION | {"attention_type": f"lolcats_llama_window_{kind}"}
    model = import_lolcats(tiny_llama(), **checkpoint(attention, prefix=prefix))
    ids = random_ids(2, 6 * WINDOW + 1)
    expected = their_logits(tiny_llama(), ids, terrace=kind == "tk")
    found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=LOGITS, rtol=0)
    with branches(model, linear=False):
        assert (model(ids, use_cache=False).logits - expected).abs().max() > GUARD
    assert (found - their_logits(tiny_llama(), ids, kind != "tk")).abs().max() > GUARD


@torch.no_grad()
def test_maps_without_lora(checkpoint):
    model, ids = import_lolcats(tiny_llama(), **checkpoint(with_lora=False)), random_ids(1, 24)
    expected = their_logits(tiny_llama(), ids, with_lora=False)
    torch.testing.assert_close(model(ids).logits, expected, atol=LOGITS, rtol=0)


def test_layers_that_stayed_softmax(checkpoint):
    written = checkpoint(ATTENTION | {"softmax_attentions": [0]}, layers=(1,))
    assert import_lolcats(tiny_llama(), **written).config.linearize_config["layers"] == [1]


@torch.no_grad()
def test_a_folder_is_written_and_loads(checkpoint, tmp_path):
    written = checkpoint()
    base = save_base(tmp_path / "base")
    folder = import_lolcats_folder(base, output_dir=tmp_path / "imported", **written)
    ids = random_ids(1, 24)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.config.linearize_config["window_kind"] == "terrace"
    found = again(ids).logits
    torch.testing.assert_close(found, their_logits(tiny_llama(), ids), atol=LOGITS, rtol=0)


REFUSED = [
    (dict(attention_type="lolcats_llama"), r"attention_type 'lolcats_llama' is not supported"),
    (dict(feature_map="relu"), "attention.feature_map is 'relu'; only 'softmax_dim' is"),
    (dict(affine_attention_factors=True), "attention.affine_attention_factors is True; only False"),
    (dict(feature_map_kwargs=dict(fullspace=False)), r"feature_map_kwargs.fullspace is False"),
    (dict(softmax_attentions=[0]), r"the file has layers \[0, 1\], the model converts \[1\]"),
    (dict(learned_kernel_kwargs=dict(feature_dim=8)), r"does not fit \(4, 8, 8\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[next(iter(c)) for c, _ in REFUSED])
def test_other_settings_are_refused_by_name(checkpoint, change, message):
    with pytest.raises(ValueError, match=message):
        import_lolcats(tiny_llama(), **checkpoint(ATTENTION | change))


def edit(path, **tensors):
    stored = torch.load(path, weights_only=True)
    stored["model_state_dict"].update(tensors)
    stored["model_state_dict"] = {
        n: x for n, x in stored["model_state_dict"].items() if x is not None
    }
    torch.save(stored, path)


GATE = "model.layers.1.self_attn.window_factors"
FILES = [
    ({"lm_head.weight": torch.ones(1)}, "'lm_head.weight' is no tensor of an attention layer"),
    ({GATE + "_2": torch.ones(1)}, r"layers.1.window_factors_2: neither a feature map, a gate"),
    ({GATE: None}, r"layers.1.gate: missing in the files; name the file of the feature maps"),
    (
        {"model.layers.0.self_attn.q_proj.lora_A.weight": None,
         "model.layers.0.self_attn.up_proj.lora_A.weight": torch.ones(1)},
        r"layers.0.up_proj: only one half of its LoRA",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), FILES, ids=["head", "unknown", "gate", "half"])
def test_files_that_do_not_fit_are_refused(checkpoint, tensors, message):
    written = checkpoint()
    edit(written["files"][0], **tensors)
    with pytest.raises(ValueError, match=message):
        import_lolcats(tiny_llama(), **written)


def test_lora_needs_its_scale(checkpoint):
    written = checkpoint() | {"finetune_config": None}
    with pytest.raises(ValueError, match="the files hold LoRA weights: name the YAML"):
        import_lolcats(tiny_llama(), **written)
    written = checkpoint()
    written["finetune_config"] = written["model_config"]
    with pytest.raises(ValueError, match=r"finetune.kwargs lacks r and lora_alpha"):
        import_lolcats(tiny_llama(), **written)


class Code:
    """Would run if it were unpickled."""

    def __reduce__(self):
        return pytest.fail, ("code of the file was run",)


def test_code_in_a_file_is_never_run(checkpoint):
    written = checkpoint()
    written["files"][0].write_bytes(pickle.dumps({"model_state_dict": Code()}, 2))
    with pytest.raises(ValueError, match="holds more than tensors and is not read"):
        import_lolcats(tiny_llama(), **written)


def test_missing_and_wrong_files_are_named(checkpoint, tmp_path):
    written = checkpoint()
    with pytest.raises(FileNotFoundError, match=r"gone.pt: no such file; name the .pt file"):
        import_lolcats(tiny_llama(), **written | {"files": tmp_path / "gone.pt"})
    with pytest.raises(FileNotFoundError, match=r"gone.yaml: no such file; name the YAML"):
        import_lolcats(tiny_llama(), **written | {"model_config": tmp_path / "gone.yaml"})
    with pytest.raises(ValueError, match="there is no section 'attention'"):
        import_lolcats(tiny_llama(), **written | {"model_config": written["finetune_config"]})
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="no state dict, and no 'model_state_dict'"):
        import_lolcats(tiny_llama(), **written | {"files": tmp_path / "list.pt"})
