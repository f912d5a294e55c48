"""What training would need, before anything is trained: memory by part, and operations.

Legend: B batch, T tokens, Q queries, V vocabulary, D hidden size.

The model is built without memory for its weights and converted, and one row goes through the code
of the stages. Autograd then says what it would keep for the backward pass, and torch's counter
counts the operations of matrix products. Attention that stays softmax is left out there and added
by formula, its causal half. Nothing here is measured on a device.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface

from linearize.conversion import convert
from linearize.finetuning import add_lora, attention_projections
from linearize.inspection import softmax_flops
from linearize.logits import decoder_of
from linearize.modeling.attention import linearized_modules
from linearize.transfer import layer_loss

ADAM = 4 + 4 + 8  # bytes per trained number: fp32 weight, gradient, two moments
LOGIT_ROWS = 128  # tokens whose logits exist at one time, see `losses.token_losses`
LOGIT_COPIES = 8  # fp32 tensors of that size: both models' logits, their logarithms, gradients
NAME = "linearize_budget"


def training(
    model: nn.Module,
    section: Mapping[str, Any],
    layers: list[Mapping[str, Any]],
    *,
    length: int = 1024,
    transfer: Mapping[str, Any] | None = None,
    finetune: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
) -> dict[str, Any]:
    """Memory and operations of the two stages on one device.

    Args:
        model: What `inspection.build_empty` returned; it is converted in place.
        section: The arguments of `convert`.
        layers: The rows of `inspect`.
        length: Tokens per row.
        transfer, finetune: The arguments of the stages that matter here, or None: skipped.
        gradient_checkpointing: As in `run`.

    Returns:
        {"length", "transfer": stage, "finetune": stage}, without a skipped stage; a stage is
        {"memory_bytes": {part: bytes}, "total_bytes", "flops_per_token", "tokens", "flops"}. The
        last two are None where the stage takes what data there is. docs/first-8b.md explains the
        parts.
    """
    converted = convert(model, **section)
    row = torch.zeros(1, length, dtype=torch.long, device="meta")
    rows = [dict(item) for item in layers]
    stages: dict[str, Any] = {"length": length}
    if transfer is not None:
        stages["transfer"] = _stage(_transfer(converted, rows, row, transfer), transfer, length)
    if finetune is not None:
        found = _finetune(converted, rows, row, finetune, gradient_checkpointing)
        stages["finetune"] = _stage(found, finetune, length)
    return stages


def _stage(found: dict[str, Any], options: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Totals of a stage."""
    tokens, steps = options.get("max_tokens"), options.get("max_steps")
    if steps is not None:
        tokens = steps * options["batch_size"] * options.get("accumulation", 1) * length
    return {
        **found,
        "total_bytes": sum(found["memory_bytes"].values()),
        "tokens": tokens,
        "flops": None if tokens is None else tokens * found["flops_per_token"],
    }


def _transfer(
    model: Any, rows: list[dict[str, Any]], row: Tensor, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Stage 1: the teacher's forward, and per layer the rows of the drawn queries."""
    T = row.shape[1]
    queries = torch.zeros(1, min(options["num_queries"] or T, T), dtype=torch.long, device="meta")

    def one_layer(module: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Counts:
        heads, out = module.linearized, q.new_zeros(*q.shape[:3], v.shape[-1])
        with FlopCounterMode(display=False) as counter, _kept(heads) as kept:
            loss = layer_loss(heads, (q, k, v), out, queries, queries.float(), 1.0, scaling=scaling)
            torch.autograd.grad(loss, list(heads.parameters()), allow_unused=True)
        return Counts(kept(), 0, counter.get_total_flops())

    learned = _each_layer(model, rows, T, one_layer)
    body = _body(model, row)
    teacher = body.forward + T * sum(softmax_flops(item, T) for item in rows)
    memory = {
        "weights": _weights(model),
        "trained": ADAM * sum(p.numel() for p in _new_parameters(model)),
        "activations": options["batch_size"]
        * (max(layer.kept for layer in learned) + body.kept // len(rows)),
    }
    flops = teacher + sum(layer.both for layer in learned)
    return {"memory_bytes": memory, "flops_per_token": round(flops / T)}


def _finetune(
    model: Any, rows: list[dict[str, Any]], row: Tensor, options: Mapping[str, Any], again: bool
) -> dict[str, Any]:
    """Stage 2: the teacher's forward, the student's forward and backward, logits."""
    T, full, teaches = row.shape[1], options["method"] == "full", options["loss"] != "ce"
    head, weights = model.get_output_embeddings().weight, _weights(model)
    trained, added = _prepare(model, options)
    body = _body(model, row, backward=True)
    heads = _each_layer(model, rows, T, _operator)
    outside = [item for item in rows if not item["converts"]]
    softmax = T * sum(softmax_flops(item, T) for item in outside)
    size, width = model.dtype.itemsize, model.config.get_text_config().hidden_size
    kept = body.kept + sum(layer.kept for layer in heads)
    kept += T * size * sum(map(_softmax_width, outside))
    student = body.both + sum(layer.both for layer in heads) + 3 * softmax
    if again:
        kept = kept // len(rows) + len(rows) * T * width * size
        student += body.forward + sum(layer.forward for layer in heads) + softmax
    teacher = body.forward - 2 * T * added + T * sum(softmax_flops(item, T) for item in rows)
    passes = 2 * (2 + teaches + full)  # of the head, two operations per weight each
    memory = {
        "weights": weights if not full else weights * teaches,
        "trained": ADAM * trained,
        "activations": options["batch_size"] * kept,
        "logits": LOGIT_COPIES * 4 * LOGIT_ROWS * head.shape[0],
    }
    flops = (student + teacher * teaches) / T + passes * head.numel()
    return {"memory_bytes": memory, "flops_per_token": round(flops)}


class Counts(NamedTuple):
    """What one row costs a part of the model."""

    kept: int  # bytes for the backward pass
    forward: int  # operations
    both: int  # operations of forward and backward


def _operator(module: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Counts:
    """Stage 2's attention of one layer."""
    with FlopCounterMode(display=False) as counter, _kept(module.linearized) as kept:
        out = module.linearized(*(x.requires_grad_() for x in (q, k, v)), scaling=scaling)
        forward = counter.get_total_flops()
        out.backward(torch.empty_like(out))
    return Counts(kept(), forward, counter.get_total_flops())


def _each_layer(
    model: Any, rows: list[dict[str, Any]], T: int, count: Callable[..., Counts]
) -> list[Counts]:
    """`count(module, q, k, v, scaling)` of every converted layer; equal layers are counted once."""
    modules, found, counts = linearized_modules(model), {}, []
    for item in rows:
        if item["converts"]:
            H, G = item["num_heads"], item["num_key_value_heads"]
            D, Dv, scaling = item["qk_dim"], item["v_dim"], item["scaling"]
            key = (H, G, D, Dv, scaling)
            if key not in found:
                q, k, v = (
                    torch.empty(1, n, T, d, dtype=model.dtype, device="meta")
                    for n, d in ((H, D), (G, D), (G, Dv))
                )
                found[key] = count(modules[item["layer"]], q, k, v, scaling)
            counts.append(found[key])
    return counts


def _body(model: Any, row: Tensor, *, backward: bool = False) -> Counts:
    """Everything between the embeddings and the head but the attention itself."""
    embedded = model.get_input_embeddings()(row).detach().requires_grad_()
    decoder = decoder_of(model)
    with _no_attention(model), FlopCounterMode(display=False) as counter, _kept(model) as kept:
        out = decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
        forward = counter.get_total_flops()
        if backward:
            out.backward(torch.empty_like(out))
    return Counts(kept(), forward, counter.get_total_flops())


def _prepare(model: Any, options: Mapping[str, Any]) -> tuple[int, int]:
    """Makes trainable what the stage trains: (how many numbers that are, those of LoRA)."""
    model.requires_grad_(options["method"] == "full")
    before = model.num_parameters()
    if options["method"] == "lora":
        targets = options["targets"] or attention_projections(model)
        add_lora(
            model, list(targets), rank=options["rank"], alpha=options["alpha"],
            train_linearized=False,
        )  # fmt: skip
    for parameter in _new_parameters(model):
        parameter.requires_grad_(options["train_linearized"])
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained, model.num_parameters() - before


def _new_parameters(model: Any) -> Iterator[nn.Parameter]:
    for module in linearized_modules(model).values():
        yield from module.linearized.parameters()


def _weights(model: Any) -> int:
    """Bytes of the original weights."""
    new = set(_new_parameters(model))
    return sum(p.nbytes for p in model.parameters() if p not in new)


def _softmax_width(item: Mapping[str, Any]) -> int:
    """Numbers per token that softmax attention keeps: queries, keys, values, outputs."""
    heads = item["num_heads"] + item["num_key_value_heads"]
    return heads * (item["qk_dim"] + item["v_dim"])


# --------------------------------------------------------------------------------------- counting
@contextmanager
def _kept(model: nn.Module) -> Generator[Callable[[], int]]:
    """Gives a function that says how many bytes autograd has kept inside, parameters left out."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage  # kept alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for storage in storages.values())


@contextmanager
def _no_attention(model: Any) -> Generator[None]:
    """Every attention gives zeros for its values, and no mask is made."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any):
        # depends on all three, so that their projections have a backward pass
        zeros = q[..., :1] * 0 + (k[..., :1] * 0).sum(1, keepdim=True)
        return (zeros + v.sum(1, keepdim=True) * 0).transpose(1, 2), None

    configs = [module.config for module in linearized_modules(model).values()]
    configs.append(model.config.get_text_config(decoder=True))
    before = [config._attn_implementation for config in configs]
    AttentionInterface.register(NAME, attend)
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
        AttentionInterface._global_mapping.pop(NAME)
