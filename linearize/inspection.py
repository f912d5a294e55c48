"""What a conversion would give, before anything is trained: new parameters, memory, operations.

Legend: H query heads, G key/value heads, HS state heads, D head size, Dv value size, F features,
f feature_dim, C chunk, W window, N sinks, T tokens of context.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from linearize.conversion import check_family, probe_geometry, resolve_layers, resolve_softmax_heads
from linearize.loading import DTYPES, load_config
from linearize.modeling.attention import LinearizedHeads
from linearize.modeling.chunked import CHUNK
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.modeling.ops import empty_state

LENGTHS = (1024, 4096, 16384, 65536, 131072)


def inspect(
    model: str | Path | nn.Module,
    *,
    layers: str | Sequence[int] = "all",
    softmax_heads: Mapping[int, Sequence[int]] | None = None,
    window: int = 64,
    sinks: int = 4,
    feature_map: str = "hedgehog",
    feature_dim: int | None = None,
    mixing: str = "calibrated",
    k_map: str = "kv_head",
    window_kind: str = "sliding",
    lengths: Sequence[int] = LENGTHS,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """What `convert` with the same arguments would do to a model; weights are not loaded.

    Args:
        model: A softmax model, or where its config is.
        layers: As in `convert`, like all up to window_kind.
        lengths: Context lengths to list.
        dtype: Type of the weights and of the key/value cache; "auto" is the config's own.

    Returns:
        {"model", "convert", "layers": [per layer], "new_parameters", "state_bytes" (per sequence,
        all converted layers), "kv_bytes_per_token" (of the cache that they replace),
        "break_even_length" (tokens from which the state is the smaller one), "lengths":
        [{"length", "softmax_bytes", "linearized_bytes", "softmax_flops", "linearized_flops"}]}.
        Bytes are those of the whole model's cache for one sequence. FLOPs are those of attention
        per token of a prefill, projections left out.

    Raises:
        ValueError: A setting is not possible for this model.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    if not isinstance(model, nn.Module):
        model = build_empty(model, revision=revision, trust_remote_code=trust_remote_code)
    own: Any = model.config.dtype or torch.float32
    wanted = own if dtype == "auto" else DTYPES[dtype]
    check_family(model.config)
    geometry = probe_geometry(model)
    chosen = resolve_layers(layers, geometry)
    section = LinearizeConfig(
        base_model_type=model.config.model_type,
        layers=chosen,
        softmax_heads=resolve_softmax_heads(softmax_heads, chosen, geometry),
        geometry={str(i): geometry[i] for i in chosen},
        window=window,
        sinks=sinks,
        feature_map=feature_map,
        feature_dim=feature_dim,
        mixing=mixing,
        k_map=k_map,
        window_kind=window_kind,
    )
    hidden = _own_window(model.config)
    rows = [
        _converted(section, i, geometry[i], wanted)
        if i in chosen
        else _kept(i, geometry[i], wanted, hidden)
        for i in sorted(geometry)
    ]
    return _report(model, section, rows, lengths, wanted)


def build_empty(
    path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> nn.Module:
    """The model of a config without memory for its weights, on the meta device.

    Its type is bfloat16, in which mixtures of experts run there too.
    """
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    dtype = config.dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
    model.config.dtype = dtype
    return model.eval()


def state_bytes(section: LinearizeConfig, layer: int, dtype: torch.dtype) -> int:
    """Bytes that the linear heads of a layer remember per sequence, at any length."""
    shape, heads = section.geometry[str(layer)], LinearizedHeads(section, layer, device="meta")
    linear = section.linear_heads(layer)
    if not linear:
        return 0
    G, D, Dv = len(linear), shape["qk_dim"], shape["v_dim"]
    q, k, v = (
        torch.empty(1, n, 1, d, device="meta", dtype=dtype) for n, d in ((1, D), (G, D), (G, Dv))
    )
    op = heads.operator(scaling=1.0, heads=linear)
    state = empty_state(op, q, k, v, heads.feature_map_k.num_features)
    return sum(tensor.nbytes for tensor in state)


def kv_bytes_per_token(shape: Mapping[str, Any], itemsize: int) -> int:
    """Bytes of one token's keys and values in one softmax layer."""
    return shape["num_key_value_heads"] * (shape["qk_dim"] + shape["v_dim"]) * itemsize


def layer_bytes(section: LinearizeConfig, layer: int, dtype: torch.dtype, length: int) -> int:
    """Bytes of a converted layer's cache per sequence after `length` tokens."""
    shape = section.geometry[str(layer)]
    token_bytes = kv_bytes_per_token(shape, dtype.itemsize) // shape["num_key_value_heads"]
    kept = shape["num_key_value_heads"] - len(section.linear_heads(layer))
    return state_bytes(section, layer, dtype) + kept * token_bytes * length


def softmax_flops(shape: Mapping[str, Any], length: int) -> int:
    """Operations of causal softmax attention per token of a prefill of T tokens: H (D + Dv) T."""
    seen = min(length, 2 * shape.get("own_window", length))
    return shape["num_heads"] * (shape["qk_dim"] + shape["v_dim"]) * seen


def hybrid_flops(
    shape: Mapping[str, Any],
    *,
    window: int,
    state_heads: int,
    num_features: int,
    feature_dim: int,
    chunk: int = CHUNK,
) -> int:
    """Operations of the chunked hybrid per token of a prefill.

    Per query head, with r = HS / H: 2 (D + Dv)(W + C) for the window, 2 F Dv (1 + r) to read and
    write the state, 2 C (F + Dv) inside the chunk, 2 D f (1 + r) for the maps.
    """
    D, Dv, F = shape["qk_dim"], shape["v_dim"], num_features
    r = state_heads / max(shape["num_heads"], 1)
    exact = 2 * (D + Dv) * (window + chunk)
    linear = 2 * F * Dv * (1 + r) + 2 * chunk * (F + Dv) + 2 * D * feature_dim * (1 + r)
    return round(shape["num_heads"] * (exact + linear))


def _converted(
    section: LinearizeConfig, layer: int, shape: dict[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    heads = LinearizedHeads(section, layer, device="meta")
    features, linear = heads.feature_map_k, section.linear_heads(layer)
    G = shape["num_key_value_heads"]
    share = len(linear) / G
    token_bytes = kv_bytes_per_token(shape, dtype.itemsize)
    replaced = token_bytes // G * len(linear)
    held = state_bytes(section, layer, dtype)
    learned = any(True for _ in features.parameters())
    return {
        "layer": layer,
        "converts": True,
        "reason": None,
        **shape,
        "state_heads": heads.state_heads,
        "num_features": features.num_features,
        "new_parameters": sum(p.numel() for p in heads.parameters()),
        "state_bytes": held,
        "softmax_heads": [g for g in range(G) if g not in linear],
        "kv_bytes_per_token": token_bytes,
        "kept_bytes_per_token": token_bytes - replaced,
        "break_even_length": -(-held // replaced) if replaced else None,
        "flops": hybrid_flops(
            shape | {"num_heads": round(shape["num_heads"] * share)},
            window=section.window + section.sinks,
            state_heads=heads.num_states(linear),
            num_features=features.num_features,
            feature_dim=features.feature_dim if learned else 0,
        ),
    }


def _kept(
    layer: int, shape: dict[str, Any], dtype: torch.dtype, own_window: int | None
) -> dict[str, Any]:
    row = {
        "layer": layer,
        "converts": False,
        "reason": "not among convert.layers",
        **shape,
        "new_parameters": 0,
        "state_bytes": 0,
        "kv_bytes_per_token": kv_bytes_per_token(shape, dtype.itemsize),
    }
    if shape["sliding"] and own_window is not None:
        row |= {
            "reason": f"has a sliding window of its own ({own_window} tokens)",
            "own_window": own_window,
        }
    return row


def _own_window(config: Any) -> int | None:
    """Tokens that layers with a sliding or chunked window of their own remember."""
    settings = config.get_text_config().to_dict()
    return settings.get("sliding_window") or settings.get("attention_chunk_size")


def _report(
    model: nn.Module,
    section: LinearizeConfig,
    rows: list[dict[str, Any]],
    lengths: Sequence[int],
    dtype: torch.dtype,
) -> dict[str, Any]:
    converted = [row for row in rows if row["converts"]]
    state = sum(row["state_bytes"] for row in converted)
    replaced = sum(row["kv_bytes_per_token"] - row["kept_bytes_per_token"] for row in converted)
    num_parameters = model.num_parameters()
    new_parameters = sum(row["new_parameters"] for row in converted)
    return {
        "model": {
            "path": model.config.name_or_path,
            "family": section.base_model_type,
            "num_parameters": num_parameters,
            "num_layers": len(rows),
            "dtype": str(dtype).removeprefix("torch."),
        },
        "convert": {
            key: value
            for key, value in section.to_dict().items()
            if key not in ("geometry", "version", "delta")
        },
        "layers": rows,
        "new_parameters": new_parameters,
        "new_parameters_share": new_parameters / num_parameters,
        "state_bytes": state,
        "kv_bytes_per_token": replaced,
        "break_even_length": -(-state // replaced) if replaced else None,
        "lengths": [_at_length(rows, length) for length in lengths],
    }


def _at_length(rows: list[dict[str, Any]], length: int) -> dict[str, Any]:
    softmax = [
        row["kv_bytes_per_token"] * min(length, row.get("own_window", length)) for row in rows
    ]
    linearized = [
        row["state_bytes"] + row["kept_bytes_per_token"] * length if row["converts"] else kv
        for row, kv in zip(rows, softmax, strict=True)
    ]
    flops = [softmax_flops(row, length) for row in rows]
    hybrid = [
        row["flops"] + old * len(row["softmax_heads"]) // row["num_key_value_heads"]
        if row["converts"]
        else old
        for row, old in zip(rows, flops, strict=True)
    ]
    return {
        "length": length,
        "softmax_bytes": sum(softmax),
        "linearized_bytes": sum(linearized),
        "softmax_flops": sum(flops),
        "linearized_flops": sum(hybrid),
    }
