"""The classes `Linearized<Family>Config` and `Linearized<Family>ForCausalLM`, made from the stock
ones.

The class of a family is made when it is asked for: `family_classes("llama")`, or by attribute
access on this module, which is how transformers finds it when this file travels inside a
checkpoint.
"""

import functools
import inspect
import sys
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from .attention import LinearizedHeads, linearize_, linearized_modules
from .configuration_linearized import LinearizeConfig
from .masking import check_mask

# every family here passes the same test: see docs/families.md
FAMILIES = [
    "cohere",
    "cohere2",
    "deepseek_v3",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "hunyuan_v1_dense",
    "lfm2",
    "llama",
    "llama4_text",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmo3",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
]
# families that do not hand their positions to the attention function
NO_POSITIONS = ("llama4_text",)

# what tells where on the hub, or in the local cache, files lie
HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
)

_MADE = {}


def attention_modules(model):
    """Decoder self-attention modules of a causal LM, {layer_idx: module}, found by structure."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return {
        m.layer_idx: m
        for m in decoder.modules()
        if type(m).__name__.endswith("Attention") and getattr(m, "layer_idx", None) is not None
    }


class LinearizedCausalLMMixin:
    """Stands in front of a stock causal LM class."""

    def __init__(self, config, *args, **kwargs):
        if config.linearize_config is None:
            raise ValueError(
                f"{type(self).__name__} needs config.linearize_config; make one from a softmax "
                "model with linearize.convert(model)"
            )
        super().__init__(config, *args, **kwargs)
        section = LinearizeConfig.from_dict(config.linearize_config)
        modules = attention_modules(self)
        for layer in section.layers:
            linearize_(modules[layer], section)

    @torch.no_grad()
    def initialize_weights(self):
        """Start values of parameters that a checkpoint lacks.

        `_init_weights` of this class would not be reached.
        """
        super().initialize_weights()
        for module in self.modules():
            if isinstance(module, LinearizedHeads):
                module.reset_parameters()

    def forward(self, *args, **kwargs):
        bound = self._signature.bind_partial(self, *args, **kwargs).arguments
        arguments = {**bound, **bound.get("kwargs", {})}
        if "position_ids" in self._signature.parameters and arguments.get("position_ids") is None:
            positions = _positions_from_mask(arguments.get("attention_mask"), arguments)
            if positions is not None:
                kwargs["position_ids"] = positions
        elif arguments.get("attention_mask") is None:
            self._check_packing(arguments)
        mask = arguments.get("attention_mask")
        if (
            isinstance(mask, torch.Tensor)
            and mask.ndim == 4
            and not torch.compiler.is_compiling()
            and self._is_linear()
        ):
            cache = _cache_of(arguments)
            check_mask(mask, 0 if cache is None else int(cache.get_seq_length()))
        return super().forward(*args, **kwargs)

    def _is_linear(self):
        return any(m.linearize_state for m in linearized_modules(self).values())

    def _check_packing(self, arguments):
        """Refuses packed documents where they would leak: with a cache, or in a family that drops
        the positions.
        """
        positions = arguments.get("position_ids")
        if (
            positions is None
            or positions.ndim != 2
            or positions.shape[1] < 2
            or torch.compiler.is_compiling()
        ):
            return
        modules = linearized_modules(self).values()
        is_softmax = all(m.linearize_mode == "softmax" or not m.linearize_heads for m in modules)
        if is_softmax or not bool((positions.diff(dim=1) != 1).any()):
            return
        use_cache = arguments.get("use_cache")
        if _cache_of(arguments) is not None or (
            self.config.use_cache if use_cache is None else use_cache
        ):
            raise ValueError(
                "position_ids restart, so these are packed documents, which a cache cannot hold; "
                "pass use_cache=False"
            )
        if self.config.linearize_config["base_model_type"] in NO_POSITIONS:
            raise ValueError(
                "packed documents are not supported for "
                f"{self.config.linearize_config['base_model_type']}, whose attention is not "
                "told the positions; run the documents one by one"
            )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """Claims the cache layers before prefill, so that past recording for assisted decoding
        reaches them.
        """
        out = super()._prepare_cache_for_generation(
            generation_config, model_kwargs, *args, **kwargs
        )
        cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        if isinstance(cache, Cache):
            for module in linearized_modules(self).values():
                if module.linearize_state:
                    claimed = module.claim(cache)
                    if getattr(generation_config, "is_assistant", False):
                        claimed.activate_past_recording()
        return out

    def generate_batch(self, *args, **kwargs):
        raise NotImplementedError(
            "continuous batching (generate_batch) keeps paged keys and values and cannot hold a "
            "linear state; use generate()"
        )

    init_continuous_batching = generate_batch

    def save_pretrained(self, save_directory, *args, **kwargs):
        super().save_pretrained(save_directory, *args, **kwargs)
        names = ("model.safetensors", "model.safetensors.index.json")
        written = [file for file in (Path(save_directory, name) for name in names) if file.exists()]
        if len(written) == 2 and kwargs.get(
            "is_main_process", True
        ):  # an earlier save, in shards or not, left one of them
            min(written, key=lambda file: file.stat().st_mtime_ns).unlink()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs
    ):
        config = kwargs.get("config")
        if config is None:
            config = cls.config_class.from_pretrained(
                pretrained_model_name_or_path,
                **{name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs},
            )
        section = getattr(config, "linearize_config", None) or {}
        if section.get("delta"):
            try:  # in a `try`, or transformers would ask every user of this file for the package
                from linearize.checkpoint import load_adapter
            except ImportError as error:
                raise ImportError(
                    f"{pretrained_model_name_or_path} holds an adapter and the new parameters "
                    "only; putting them on the base model "
                    "needs the package: pip install linearize"
                ) from error
            kwargs.pop("config", None)
            model = load_adapter(pretrained_model_name_or_path, config, **kwargs)
            return (
                (model, {"missing_keys": set(), "unexpected_keys": set()})
                if output_loading_info
                else model
            )
        if kwargs.get("tp_plan") is not None:
            raise NotImplementedError(
                "tp_plan: tensor parallelism is not supported by linearized layers; use device_map"
            )
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        missing = sorted(key for key in info["missing_keys"] if ".linearized." in key)
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path}: {len(missing)} parameters of the linearized "
                "layers are missing, the first is "
                f"{missing[0]}. Load the softmax model and call linearize.convert(model) to start "
                "from it."
            )
        return (model, info) if output_loading_info else model


def _cache_of(arguments):
    return next(
        (
            arguments[name]
            for name in ("cache", "past_key_values")
            if arguments.get(name) is not None
        ),
        None,
    )


def _positions_from_mask(mask, arguments):
    """position_ids [B, T] that do not count padding, or None where the model's own are right."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return None
    tokens = next(
        (arguments[n] for n in ("input_ids", "inputs_embeds") if arguments.get(n) is not None), None
    )
    if tokens is None:
        return None
    return (mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]


def family_classes(family):
    """(config class, model class) of a family, made once.

    Raises:
        ValueError: the family is not supported.
    """
    if family in _MADE:
        return _MADE[family]
    if family not in FAMILIES:
        raise ValueError(
            f"model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    base_config = CONFIG_MAPPING[family]
    base_model = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    here = sys.modules[__name__]
    config = type(
        f"Linearized{base_config.__name__}",
        (base_config,),
        {
            "__module__": __name__,
            "__doc__": f"{base_config.__name__} with the section `linearize_config`.",
            "model_type": f"linearized_{family}",
            "__annotations__": {
                "linearize_config": "dict | None"
            },  # configs become dataclasses by themselves
            "linearize_config": None,
        },
    )

    @functools.wraps(base_model.forward)  # generate and Trainer read the signature
    def forward(self, *args, **kwargs):
        return LinearizedCausalLMMixin.forward(self, *args, **kwargs)

    model = type(
        f"Linearized{base_model.__name__}",
        (LinearizedCausalLMMixin, base_model),
        {
            "__module__": __name__,
            "__doc__": f"{base_model.__name__} with linearized attention layers.",
            "config_class": config,
            "_keep_in_fp32_modules_strict": [
                "linearized",
                *(base_model._keep_in_fp32_modules_strict or ()),
            ],
            "_signature": inspect.signature(base_model.forward),
            "forward": forward,
        },
    )
    setattr(here, config.__name__, config)
    setattr(here, model.__name__, model)
    mapping = get_checkpoint_conversion_mapping(family)  # such as the merging of experts
    if mapping is not None:
        register_checkpoint_conversion_mapping(config.model_type, mapping, overwrite=True)
    config.register_for_auto_class()  # save_pretrained puts these files beside the weights
    model.register_for_auto_class("AutoModelForCausalLM")
    _MADE[family] = config, model
    return config, model


def register(families=FAMILIES):
    """Enters the families in the Auto classes.

    For the installed package only: code that travels in a checkpoint must not serve every later
    checkpoint of its model_type.
    """
    for family in families:
        config, model = family_classes(family)
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)


def __getattr__(name):
    """Linearized<Family>Config and Linearized<Family>ForCausalLM on demand."""
    if name.startswith("Linearized") and not name.endswith("Mixin"):
        for family in FAMILIES:
            base = CONFIG_MAPPING[family].__name__.removesuffix("Config")
            model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
            if name in (f"Linearized{base}Config", f"Linearized{model}"):
                return next(made for made in family_classes(family) if made.__name__ == name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
