"""What one does with a model that lies in a folder: score it, time it, let it write, serve it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from linearize import loading
from linearize.evaluation import efficiency as timing
from linearize.evaluation.ablation import ablation
from linearize.evaluation.perplexity import json_ready, perplexity
from linearize.modeling.attention import linearized_modules
from linearize.sources import read_documents


def evaluate(
    model: str | Path | nn.Module,
    text: str | Path | Sequence[str] | None = None,
    *,
    tokenizer: Any = None,
    base: str | Path | nn.Module | None = None,
    length: int = 1024,
    max_tokens: int | None = None,
    batch_size: int = 8,
    efficiency: bool = False,
    contexts: Sequence[int] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Scores of a model: {"ablation"} if it is converted, {"perplexity"} if it is not.

    Args:
        model: A model, or where it is.
        text: A text or JSON-lines file, or documents.
        tokenizer: The tokenizer of a model that is not loaded here.
        base: The unconverted model, needed as teacher where stage 2 has changed the weights.
        length: Tokens per window of text.
        max_tokens: Score only the first tokens of the text.
        batch_size: Windows per forward pass.
        efficiency: Measure time and memory instead: {"efficiency"}.
        contexts: Tokens at which `efficiency` measures.
        dtype: Type of the weights.
        device: As in `run`.
        trust_remote_code: Run Python code that comes with the model.
        progress: Show progress bars.

    Raises:
        ValueError: Neither a text nor efficiency is asked for, or a setting makes no sense.
        FileNotFoundError: The model or the text is not there.
    """
    if not efficiency and text is None:
        raise ValueError("evaluate: nothing to measure; name a text, or ask for efficiency")
    documents = read_evaluation_text(text) if isinstance(text, str | Path) else text or ()
    options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    if not isinstance(model, nn.Module):
        model, tokenizer = loading.load(model, **options)
    if efficiency:
        where = {} if contexts is None else {"contexts": contexts, "prefills": contexts}
        return json_ready({"efficiency": timing.efficiency(model, **where)})
    if tokenizer is None:
        raise ValueError("evaluate: a model without a folder needs its tokenizer; give tokenizer=")
    scoring = {"length": length, "max_tokens": max_tokens, "batch_size": batch_size}
    if not linearized_modules(model):
        found = perplexity(model, tokenizer, documents, progress=progress, **scoring)
        return json_ready({"perplexity": found})
    if base is not None and not isinstance(base, nn.Module):
        base = loading.load(base, **options)[0]
    table = ablation(model, tokenizer, documents, base_model=base, progress=progress, **scoring)
    return json_ready({"ablation": table})


def generate(
    model: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """{"prompt", "text"}: a prompt with what a saved model adds to it."""
    loaded, tokenizer = loading.load(
        model, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    return {"prompt": prompt, "text": write(loaded, tokenizer, [prompt], **options)[0]}


def serve(
    model: str | Path,
    *,
    host: str = "localhost",
    port: int = 8000,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Answers over HTTP until it is stopped: the server of transformers, with the API of OpenAI.

    `transformers serve` itself looks a model's class up among its own names, so it cannot load one
    of another package.

    Raises:
        ImportError: The packages of the server are not installed.
        FileNotFoundError: The model is not there.
    """
    from transformers.cli.serve import Serve

    place, config = loading.locate(model), loading.load_config(model)
    made = AutoModelForCausalLM._model_mapping[type(config)]
    setattr(transformers, made.__name__, made)
    where = {"host": host, "port": port, "device": str(loading.choose_device(device))}
    Serve(force_model=place, dtype=dtype, **where)


def read_evaluation_text(source: str | Path) -> list[str]:
    """Documents of a text or JSON-lines file that is scored."""
    try:
        return read_documents(str(source))
    except (ValueError, FileNotFoundError) as error:
        message = str(error).replace("data.sources", "evaluate.text", 1)
        raise type(error)(message) from None


def write(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Prompts with what the model adds to each; temperature 0 takes the likeliest token."""
    torch.manual_seed(seed)
    sampling = (
        {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    )
    pad_id = (
        tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    )
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(
            model.device
        )
        ids = model.generate(
            **inputs, max_new_tokens=max_new_tokens, pad_token_id=pad_id, **sampling
        )
        texts.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    return texts
