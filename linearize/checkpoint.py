"""Adapters: what training added to a base model, without the base model.

The folder holds config.json, whose `linearize_config.delta` names the base model, and adapter/ with
the new parameters and the LoRA weights: a few MB. `AutoModelForCausalLM.from_pretrained` puts them
together.
"""

import copy
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import cached_file

from linearize.conversion import convert
from linearize.loading import locate
from linearize.modeling.attention import linearized_modules
from linearize.modeling.configuration_linearized import LinearizeConfig

# In a subfolder: an adapter_config.json in the root makes the Auto classes load the base alone.
ADAPTER, NEW_PARAMETERS = "adapter", "linearized.safetensors"
NEW = ".linearized."
CONVERT = (
    "layers", "softmax_heads", "window", "sinks", "feature_map", "feature_dim", "mixing", "k_map",
    "window_kind",
    "seed",
)  # fmt: skip
SAMPLES = 1024  # values of each tensor that enter the hash
# Arguments of from_pretrained that concern the base model too.
FOR_THE_BASE = (
    "attn_implementation", "cache_dir", "device_map", "force_download", "local_files_only",
    "quantization_config", "token",
)  # fmt: skip
FOR_THE_FILES = ("cache_dir", "force_download", "local_files_only", "revision", "token")


def save_adapter(
    model: nn.Module, folder: str | Path, base_model: str | Path, *, revision: str | None = None
) -> None:
    """Writes the new parameters, LoRA weights if there are any, and the name of the base model.

    Args:
        model: A converted model whose base weights are untouched, or a PeftModel of one (as
            `finetune(..., merge=False)` returns).
        folder: Where to write.
        base_model: The model that was converted, by the name that a reader can load it from.
        revision: Of the base model.

    Raises:
        ValueError: The model is not converted, or its base weights are not those of `base_model`.
    """
    lora = isinstance(model, PeftModel)
    converted: Any = model.get_base_model() if lora else model
    if not linearized_modules(converted):
        raise ValueError(
            f"{type(converted).__name__} is not converted: there is no adapter to save"
        )
    found = base_hash(converted)
    base = _load_base(base_model, revision)
    if base_hash(base) != found:
        raise ValueError(
            f"the base weights of this model are not those of {base_model}; save the adapter "
            "before LoRA is merged, finetune(..., merge=False), or save the whole model with "
            "save_pretrained"
        )
    folder = Path(folder)
    (folder / ADAPTER).mkdir(parents=True, exist_ok=True)
    save_file(new_parameters(converted), folder / ADAPTER / NEW_PARAMETERS, {"format": "pt"})
    if lora:
        model.save_pretrained(str(folder / ADAPTER), save_embedding_layers=False)
    config = copy.deepcopy(converted.config)
    config.architectures = [type(converted).__name__]
    config.linearize_config = {
        **config.linearize_config,
        "delta": {
            "base_model": str(base_model),
            "revision": revision,
            "subfolder": ADAPTER,
            "lora": lora,
            "base_hash": found,
        },
    }
    custom_object_save(converted, folder, config=config)
    config.save_pretrained(folder)


def load_adapter(path: str | Path, config: PreTrainedConfig, **kwargs: Any) -> nn.Module:
    """The base model, converted, with an adapter on it; LoRA merged. In eval mode.

    Args:
        path: Folder or hub name of the adapter.
        config: Its config.
        kwargs: As `from_pretrained` got them; dtype and what says where files lie are used.

    Raises:
        ValueError: The base model has other weights than the one that the adapter was trained on.
    """
    section = LinearizeConfig.from_dict(config.linearize_config)
    delta = section.delta
    where = {name: kwargs[name] for name in FOR_THE_BASE if name in kwargs}
    base = _load_base(delta["base_model"], delta["revision"], **where)
    if getattr(base, "hf_quantizer", None) is not None:
        raise ValueError(
            f"{path}: an adapter is put on unquantized weights, but {delta['base_model']} was "
            "loaded quantized; load the adapter as it is, save it whole (save_pretrained), and "
            "load that with quantization_config"
        )
    if base_hash(base) != delta["base_hash"]:
        raise ValueError(
            f"{path}: this adapter was trained on another base model than the "
            f"{delta['base_model']} that was found (revision {delta['revision']}): its weights "
            "differ"
        )
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    dtype = config.dtype if dtype in (None, "auto") else dtype
    if base.dtype != dtype:  # .to() would round rotary frequencies, which stay fp32
        base = _load_base(delta["base_model"], delta["revision"], dtype=dtype, **where)
    model: Any = convert(base, **{name: getattr(section, name) for name in CONVERT})
    files = {name: kwargs[name] for name in FOR_THE_FILES if kwargs.get(name) is not None}
    stored: Any = cached_file(path, NEW_PARAMETERS, subfolder=delta["subfolder"], **files)
    _put(model, load_file(stored), path)
    if delta["lora"]:
        with warnings.catch_warnings():  # peft asks for a property that transformers will rename
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            model = PeftModel.from_pretrained(model, path, subfolder=delta["subfolder"], **files)
        model = model.merge_and_unload()
    model.config._name_or_path = str(path)
    return model.eval()


def base_hash(model: nn.Module) -> str:
    """A hash of the weights that a model has from its base, on samples of each tensor.

    The same for the base model, the converted model and a PeftModel of it, and for fp32 and bf16
    copies: values are rounded to bf16.

    Raises:
        ValueError: The model is offloaded, so that its weights are not here.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_base_parameters(model)):
        if tensor.is_meta:
            raise ValueError(
                "the model is offloaded to memory or disk, and an adapter needs its weights: load "
                "it onto one device; a model saved whole (save_pretrained) can be offloaded"
            )
        values = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLES)]
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _base_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if not (NEW in name or ".lora_" in name or ".modules_to_save." in name):
            yield name.replace(".base_layer.", ".").replace(".original_module.", "."), parameter


def new_parameters(converted: nn.Module) -> dict[str, torch.Tensor]:
    """The new parameters under the names of a model without PEFT."""
    return {
        name.replace(".modules_to_save.default.", "."): tensor.contiguous()
        for name, tensor in converted.state_dict().items()
        if NEW in name and ".original_module." not in name
    }


def _put(model: nn.Module, parameters: dict[str, torch.Tensor], path: str | Path) -> None:
    expected = new_parameters(model)
    if expected.keys() != parameters.keys():
        wrong = sorted(expected.keys() ^ parameters.keys())
        raise ValueError(
            f"{path}: the file {NEW_PARAMETERS} does not fit the config, first at {wrong[0]}; save "
            "the adapter again"
        )
    model.load_state_dict(parameters, strict=False)


def _load_base(
    name: str | Path, revision: str | None, *, dtype: Any = "auto", **where: Any
) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        locate(name), revision=revision, dtype=dtype, **where
    )
