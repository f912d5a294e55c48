"""Models of other projects become ours: the published LoLCATs checkpoints.

Legend: H query heads, D head size, f features of one half.

A LoLCATs checkpoint (Zhang et al. 2024, arXiv:2410.10254; github.com/HazyResearch/lolcats) is a
softmax model by name, a YAML file that says what its attention became, and one or two torch files:
maps `feature_map_{q,k}.mlp.layer` [H, D, f] and gates `window_factors` [1, H, 1, 1] of each layer,
and LoRA weights of the second stage. The map is [softmax(xW), softmax(-xW)] per query head, the
gate a sigmoid, and "tk" windows are terraces: our `hedgehog`, `lolcats`, `q_head` and `terrace`.
"""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from linearize import loading
from linearize.conversion import convert
from linearize.modeling.attention import linearized_modules

WINDOW_KINDS = {"window_tk": "terrace", "window_sw": "sliding"}
EXPECTED = {  # what our operator computes; anything else is refused by its key
    "feature_map": "softmax_dim",
    "learned_kernel": "untied_head_einsum",
    "affine_attention_factors": False,
    "tie_qk_kernels": False,
    "feature_map_kwargs.fullspace": True,
    "learned_kernel_kwargs.skip_connection": False,
    "learned_kernel_kwargs.bias": False,
}
LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(.+)")
NEW = {
    "feature_map_q.mlp.layer": "feature_map_q.weight",
    "feature_map_k.mlp.layer": "feature_map_k.weight",
    "window_factors": "gate",
    "window_factor": "gate",  # a second name of the same tensor
}
LORA = re.compile(r"(\w+)\.lora_([AB])(?:\.default)?\.weight")


def import_lolcats(
    base: nn.Module,
    files: str | Path | list[str | Path],
    model_config: str | Path,
    *,
    finetune_config: str | Path | None = None,
) -> nn.Module:
    """The linearized model of a LoLCATs checkpoint; takes over the weights of `base`.

    Args:
        base: The softmax model that was linearized, in the dtype to keep.
        files: The torch file of the feature maps, and that of LoRA if there is one; a later file
            wins. They are read as tensors, and nothing in them is run.
        model_config: The YAML file of the model (`configs/model/...`).
        finetune_config: The YAML file of the second stage (`configs/experiment/finetune_...`),
            needed for the scale of LoRA, which is merged.

    Differs from their code: a terrace begins at the first token, where theirs ends at the last one
    (the same for multiples of the window, such as their training rows); a text shorter than one
    window, and decoding, follow the same formula, where theirs count keys twice or slide.

    Raises:
        FileNotFoundError: A file is not there.
        ValueError: A setting that our operator does not have, or files that do not fit the model.
    """
    attention = _read_yaml(model_config).get("attention")
    if not isinstance(attention, Mapping):
        raise ValueError(f"{model_config}: there is no section 'attention'; name the model's YAML")
    options = _options(attention, model_config, base)
    model = convert(
        base, sinks=0, mixing="lolcats", k_map="q_head", feature_map="hedgehog", **options
    )
    paths = files if isinstance(files, list) else [files]
    found: dict[int, dict[str, torch.Tensor]] = {}
    for path in paths:
        for name, tensor in _read_tensors(path).items():
            match = LAYER.fullmatch(name)
            if match is None:
                raise ValueError(f"{path}: {name!r} is no tensor of an attention layer")
            found.setdefault(int(match[1]), {})[match[2]] = tensor
    scale = _lora_scale(finetune_config)
    modules = linearized_modules(model)
    if found.keys() != modules.keys():
        raise ValueError(
            f"{paths[0]}: the file has layers {sorted(found)}, the model converts "
            f"{sorted(modules)}; name the checkpoint and YAML of one model"
        )
    with torch.no_grad():
        for layer, module in modules.items():
            _fill(module, found[layer], scale, f"layers.{layer}")
    return model


def import_lolcats_folder(
    base: str | Path,
    files: list[str | Path],
    model_config: str | Path,
    output_dir: str | Path,
    *,
    finetune_config: str | Path | None = None,
    dtype: str = "auto",
) -> Path:
    """The folder `output_dir` with the model of `import_lolcats`, saved with its tokenizer."""
    model, tokenizer = loading.load(base, dtype=dtype, device="cpu")
    model = import_lolcats(model, files, model_config, finetune_config=finetune_config)
    loading.save(model, tokenizer, output_dir)
    return Path(output_dir)


def _options(attention: Mapping[str, Any], path: str | Path, base: nn.Module) -> dict[str, Any]:
    """Arguments of `convert` that a section `attention` stands for."""
    kind = str(attention.get("attention_type"))
    windows = [ours for theirs, ours in WINDOW_KINDS.items() if kind.endswith(theirs)]
    if not windows:
        raise ValueError(
            f"{path}: attention_type {kind!r} is not supported; supported are those that end in "
            f"{', '.join(WINDOW_KINDS)}"
        )
    for key, expected in EXPECTED.items():
        section, _, name = key.rpartition(".")
        given = (attention.get(section) or {} if section else attention).get(name, expected)
        if given != expected:
            raise ValueError(
                f"{path}: attention.{key} is {given!r}; only {expected!r} is supported"
            )
    softmax = set(attention.get("softmax_attentions") or ())
    layers = [i for i in range(base.config.num_hidden_layers) if i not in softmax]
    return {
        "layers": layers,
        "window": attention["window_size"],
        "window_kind": windows[0],
        "feature_dim": attention["learned_kernel_kwargs"]["feature_dim"],
    }


def _fill(
    module: nn.Module, tensors: dict[str, torch.Tensor], scale: float | None, at: str
) -> None:
    """Sets the new parameters of one layer, and adds its LoRA to the projections."""
    own = dict(module.linearized.named_parameters())
    filled, lora = set(), {}
    for name, tensor in tensors.items():
        if name in NEW:
            target = own[NEW[name]]
            if tensor.squeeze().shape != target.squeeze().shape:
                raise ValueError(
                    f"{at}.{name}: {tuple(tensor.shape)} does not fit {tuple(target.shape)}; "
                    "name the model that was linearized"
                )
            target.copy_(tensor.reshape(target.shape))
            filled.add(NEW[name])
        elif match := LORA.fullmatch(name):
            lora.setdefault(match[1], {})[match[2]] = tensor.float()
        else:
            raise ValueError(f"{at}.{name}: neither a feature map, a gate, nor LoRA")
    if missing := sorted(own.keys() - filled):
        raise ValueError(
            f"{at}.{missing[0]}: missing in the files; name the file of the feature maps"
        )
    if lora and scale is None:
        raise ValueError("the files hold LoRA weights: name the YAML of the second stage, for r")
    for name, pair in lora.items():
        if pair.keys() != {"A", "B"}:
            raise ValueError(f"{at}.{name}: only one half of its LoRA is in the files")
        weight = module.get_submodule(name).weight
        weight.add_((scale * pair["B"] @ pair["A"]).to(weight))


def _read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a torch file, which is read without running anything in it."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file; name the .pt file of the checkpoint")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: holds more than tensors and is not read, because reading it would run code "
            "from it; ask for a file of tensors"
        ) from error
    stored = stored.get("model_state_dict", stored) if isinstance(stored, dict) else None
    if not stored or not all(isinstance(x, torch.Tensor) for x in stored.values()):
        raise ValueError(f"{path}: no state dict, and no 'model_state_dict', is in this file")
    return stored


def _lora_scale(path: str | Path | None) -> float | None:
    if path is None:
        return None
    settings = ((_read_yaml(path).get("finetune") or {}).get("kwargs")) or {}
    if not {"r", "lora_alpha"} <= settings.keys():
        raise ValueError(
            f"{path}: finetune.kwargs lacks r and lora_alpha; name the YAML of stage 2"
        )
    return settings["lora_alpha"] / settings["r"]


def _read_yaml(path: str | Path) -> dict[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file; name the YAML file of the checkpoint")
    found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}
