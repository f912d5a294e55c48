"""A softmax model becomes a linearized one: the same weights, plus the new parameters of each
converted layer.
"""

import warnings

import torch
import transformers
from transformers import AttentionInterface
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from linearize.modeling.attention import LinearizedAttentionMixin, LinearizedHeads, stock_class
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.modeling.modeling_linearized import FAMILIES, family_classes

_NO_INTERFACE = "does not use the attention interface of transformers"
REFUSED = {
    "bloom": f"its attention adds position biases (ALiBi) and {_NO_INTERFACE}",
    "falcon": f"its attention {_NO_INTERFACE}",
    "mpt": f"its attention adds position biases (ALiBi) and {_NO_INTERFACE}",
}
_GEOMETRY = ("num_heads", "num_key_value_heads", "qk_dim", "v_dim", "scaling")  # stored
_NOT_CONFIG = ("model_type", "architectures", "transformers_version", "auto_map")


def check_family(config):
    """Refuses, by name and with the reason, what cannot be converted.

    Raises:
        ValueError: naming the model_type, the reason and what to do.
    """
    kind = config.model_type
    if kind.startswith("linearized_"):
        raise ValueError(
            f"model_type {kind!r} is converted already; convert the softmax model it came from"
        )
    if kind in FAMILIES:
        return
    supported = f"Supported: {', '.join(FAMILIES)}."
    if kind in REFUSED:
        reason = REFUSED[kind]
    elif config.is_encoder_decoder:
        reason = "it is an encoder-decoder; only decoder-only language models are converted"
    elif config.get_text_config(decoder=True) is not config:
        inner = config.get_text_config(decoder=True).model_type
        reason = f"it is a multimodal one; load the text model ({inner}) and convert that"
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        reason = "transformers has no causal language model of this type"
    elif not getattr(config, "is_decoder", True):
        reason = "it is an encoder (is_decoder is false); only decoder-only models are converted"
    else:
        reason = "it has not passed the tests of a supported family"
    raise ValueError(f"model_type {kind!r} cannot be converted: {reason}. {supported}")


def check_model(model):
    """Refuses what cannot be converted, or not as it was loaded.

    Raises:
        ValueError: the family, the class, the devices or the quantisation of the model, and what to
        do.
    """
    check_family(model.config)
    expected = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    if not isinstance(model, expected):
        raise ValueError(
            f"{type(model).__name__} cannot be converted, but {expected.__name__} can; load it "
            "with AutoModelForCausalLM, and merge adapters before (merge_and_unload)"
        )
    devices = {p.device for p in model.parameters()}
    offloaded = any("_hf_hook" in vars(module) for module in model.modules())  # by accelerate
    if len(devices) > 1 or (offloaded and torch.device("meta") in devices):
        raise ValueError(
            "the model is spread over several devices, or offloaded; load it onto one device and "
            "convert it there"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "the model is quantized, and its weights cannot be taken over; load it dequantized "
            "(for GGUF: quantization_config=GgufConfig(dequantize=True))"
        )


def probe_geometry(model):
    """What reaches the attention function in each layer, seen in one forward of 4 tokens.

    Returns:
        {layer: {num_heads, num_key_value_heads, qk_dim, v_dim, scaling, sliding, capped}}; sliding
        is true where the layer hides old keys itself, capped where it caps its scores. Config
        attributes are wrong for some families, such as those with latent attention.
    """
    seen, config = {}, model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)

    def probe(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        dropout=0.0,
        sliding_window=None,
        **kwargs,
    ):
        hides = kinds is not None and kinds[module.layer_idx] in (
            "sliding_attention",
            "chunked_attention",
        )
        seen[module.layer_idx] = {
            "num_heads": query.shape[1],
            "num_key_value_heads": key.shape[1],
            "qk_dim": query.shape[-1],
            "v_dim": value.shape[-1],
            "scaling": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            "sliding": hides or bool(sliding_window),
            "capped": kwargs.get("softcap") is not None,
        }
        return value.new_zeros(
            query.shape[0], query.shape[2], query.shape[1], value.shape[-1]
        ), None

    name = "linearize_probe"
    AttentionInterface.register(name, probe)
    implementation = config._attn_implementation
    try:
        config._attn_implementation_internal = name
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        config._attn_implementation_internal = implementation
        AttentionInterface._global_mapping.pop(name)
    if not seen:
        raise ValueError(
            f"model_type {config.model_type!r} cannot be converted: no layer uses the attention "
            f"interface in transformers {transformers.__version__}; a newer release may"
        )
    return seen


def resolve_layers(layers, geometry):
    """The layer indices that `layers` means.

    Args:
        layers: "all": every layer that sees the whole past; "every:n": every n-th of those; or a
            list of indices.
        geometry: from `probe_geometry`.

    Raises:
        ValueError: a layer that the model does not have, an empty selection, or a form that is not
        known.
    """
    full = [i for i in sorted(geometry) if not geometry[i]["sliding"]]
    if isinstance(layers, str):
        every = layers.removeprefix("every:")
        if layers != "all" and not (every != layers and every.isdigit() and int(every) > 0):
            raise ValueError(
                f'convert.layers: {layers!r} is not known; give "all", "every:2" or a list of '
                "layer indices"
            )
        chosen = full if layers == "all" else full[:: int(every)]
        if not chosen:
            raise ValueError(
                f"convert.layers: {layers!r} selects nothing, because every layer of this model "
                "has a sliding window of its own; "
                "give a list of layer indices to convert them all the same"
            )
        return chosen
    for layer in layers:
        if layer not in geometry:
            last = max(geometry)
            raise ValueError(
                f"convert.layers: {layer} is not a layer of this model with attention (0-{last})"
            )
    if not layers:
        raise ValueError('convert.layers: the list is empty; give "all" or at least one layer')
    sliding = sorted(i for i in set(layers) if geometry[i]["sliding"])
    if sliding:
        warnings.warn(
            f"convert.layers: layers {sliding} have a sliding window of their own; linearized, "
            "they will see the whole past",
            stacklevel=3,
        )
    return sorted(set(layers))


def resolve_softmax_heads(softmax_heads, chosen, geometry):
    """{layer: [heads]} as `LinearizeConfig` stores it, with the layers as strings.

    Raises:
        ValueError: a layer that is not converted, or that has a sliding window of its own.
    """
    stored = {}
    for layer, heads in (softmax_heads or {}).items():
        layer = int(layer)
        if layer in chosen and geometry[layer]["sliding"]:
            raise ValueError(
                f"convert.softmax_heads: layer {layer} has a sliding window of its own, and its "
                "heads cannot stay softmax one by one; leave the layer out of convert.layers"
            )
        stored[str(layer)] = sorted(set(heads))
    return stored


def convert(
    model,
    *,
    layers="all",
    softmax_heads=None,
    window=64,
    sinks=4,
    feature_map="hedgehog",
    feature_dim=None,
    mixing="calibrated",
    k_map="kv_head",
    window_kind="sliding",
    seed=0,
):
    """The linearized form of a softmax causal LM.

    The new model takes over the weights without a copy: give up the old one. With the start values
    it is a model to be trained: see `transfer_attention`.

    Args:
        model: a stock transformers causal LM of a supported family.
        layers: "all", "every:n" or a list of layer indices; the other layers stay softmax.
        softmax_heads: {layer: [key/value heads]} of converted layers that stay softmax, with the
            query heads of their groups; a cache keeps their keys and values.
        window: exact keys per query, its own included.
        sinks: number of first tokens that stay exact for ever.
        feature_map: a name in FEATURE_MAPS.
        feature_dim: size of the map's projection; None for the map's default.
        mixing: how exact and linear weights are brought to one scale: "calibrated", "lolcats" or
            "kernel".
        k_map: "kv_head" shares the map of k, and the state, among the query heads of a group;
            "q_head" does not.
        window_kind: "sliding", the last `window` keys; or "terrace", as in published LoLCATs: the
            query's own block of `window` positions and the block before.
        seed: of random start values.

    Raises:
        ValueError: a family, layer or option that is not possible.
    """
    check_model(model)
    geometry = probe_geometry(model)
    chosen = resolve_layers(layers, geometry)
    config_class, model_class = family_classes(model.config.model_type)
    section = LinearizeConfig(
        base_model_type=model.config.model_type,
        layers=chosen,
        softmax_heads=resolve_softmax_heads(softmax_heads, chosen, geometry),
        geometry={str(i): {k: geometry[i][k] for k in _GEOMETRY} for i in chosen},
        window=window,
        sinks=sinks,
        feature_map=feature_map,
        feature_dim=feature_dim,
        mixing=mixing,
        k_map=k_map,
        window_kind=window_kind,
        seed=seed,
    )
    if mixing == "kernel" and feature_map == "hedgehog":
        warnings.warn(
            "convert.mixing: 'kernel' reads phi_q.phi_k as an estimate of exp(score), but the "
            "features of 'hedgehog' are "
            "normalised, so their size says nothing; use feature_map 'hedgehog_exp' or mixing "
            "'calibrated'",
            stacklevel=2,
        )
    if getattr(model.config, "attention_dropout", 0.0):
        warnings.warn(
            f"attention_dropout is {model.config.attention_dropout} in the base model; linearized "
            "layers do not drop weights",
            stacklevel=2,
        )
    settings = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_CONFIG}
    config = config_class(**settings, linearize_config=section.to_dict())
    config._attn_implementation_internal = _implementation(model.config, geometry)
    config._name_or_path = model.config._name_or_path
    with torch.device("meta"):
        converted = model_class(config)
    _take_over(converted, model)
    found = len([m for m in converted.modules() if isinstance(m, LinearizedHeads)])
    if found != len(chosen):
        raise ValueError(
            f"{len(chosen)} layers were asked for and {found} converted; please report this "
            "model's config"
        )
    return converted.train(model.training)


def _implementation(config, geometry):
    """The attention implementation of the teacher and of layers that stay softmax."""
    name = config._attn_implementation
    if name == "sdpa" and any(layer["capped"] for layer in geometry.values()):
        warnings.warn(
            "the base model was loaded with attn_implementation 'sdpa', which drops its soft cap; "
            "the converted model uses 'eager'",
            stacklevel=3,
        )
        return "eager"
    return name


def _check_modules(converted, model):
    """Refuses modules that the model's class does not make: what they do would be lost.

    Raises:
        ValueError: such as for layers that hold LoRA, or quantized ones, put in by hand.
    """
    made = {name: type(module) for name, module in converted.named_modules()}
    made |= {
        name: stock_class(module)
        for name, module in converted.named_modules()
        if isinstance(module, LinearizedAttentionMixin)
    }
    for name, module in model.named_modules():
        if name and made.get(name) is not type(module):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which {type(model).__name__} does not have "
                "by itself: merge adapters (merge_and_unload) and convert the unquantized model; "
                "quantize, or add adapters to, the converted one"
            )


def _take_over(converted, model):
    """Moves every tensor of `model` into `converted`, which is on meta, and starts the new
    parameters.
    """
    _check_modules(converted, model)
    state = model.state_dict()
    missing, unexpected = converted.load_state_dict(state, strict=False, assign=True)
    tied = converted.all_tied_weights_keys
    lost = [k for k in missing if ".linearized." not in k and k not in tied]
    assert not unexpected and not lost, (unexpected, lost)
    for name, buffer in model.named_buffers():  # those outside the state dict, such as inv_freq
        owner, _, leaf = name.rpartition(".")
        setattr(converted.get_submodule(owner), leaf, buffer)
    for name, module in converted.named_modules():
        if isinstance(module, LinearizedHeads):
            device = next(converted.get_submodule(name.rpartition(".")[0]).parameters()).device
            module.to_empty(device=device)
            module.reset_parameters()
    converted.tie_weights()
    converted.generation_config = model.generation_config
