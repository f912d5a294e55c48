"""What one does with a model that lies in a folder: score it, time it, let it write, serve it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from linearize import loading
from linearize.evaluation import efficiency as timing
from linearize.evaluation import harness
from linearize.evaluation import recall as probing
from linearize.evaluation.ablation import ablation
from linearize.evaluation.mass import linear_mass
from linearize.evaluation.parity import parity
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
    recall: bool = False,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    efficiency: bool = False,
    contexts: Sequence[int] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Everything that is asked for, by name.

    A text gives {"ablation", "linear_mass", "parity"} of a converted model and {"perplexity"} of
    another one; recall, tasks and efficiency give an entry of that name.

    Args:
        model: A model, or where it is.
        text: A text or JSON-lines file, or documents.
        tokenizer: The tokenizer of a model that is not loaded here.
        base: The unconverted model, needed as teacher where stage 2 has changed the weights.
        length: Tokens per window of text.
        max_tokens: Score only the first tokens of the text.
        batch_size: Windows per forward pass.
        recall: Ask for facts that lie far back.
        tasks: Names of lm-evaluation-harness tasks, task files (YAML), and JSON-lines files of
            questions with choices. Needs the extra "eval".
        limit: Items of each task, and contexts of each kind and length of recall.
        efficiency: Measure time and memory.
        contexts: Tokens at which recall and efficiency measure.
        dtype: Type of the weights.
        device: As in `run`.
        trust_remote_code: Run Python code that comes with the model.
        progress: Show progress bars.

    Raises:
        ValueError: Nothing is asked for, or a setting makes no sense.
        ImportError: Tasks are asked for, and the extra "eval" is not installed.
        FileNotFoundError: The model or the text is not there.
    """
    if text is None and not (recall or tasks or efficiency):
        raise ValueError(
            "evaluate: nothing to measure; name a text or tasks, or ask for recall or efficiency"
        )
    documents = read_evaluation_text(text) if isinstance(text, str | Path) else text
    options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    if not isinstance(model, nn.Module):
        model, tokenizer = loading.load(model, **options)
    if base is not None and not isinstance(base, nn.Module):
        base = loading.load(base, **options)[0]
    if tokenizer is None and (documents is not None or recall or tasks):
        raise ValueError("evaluate: a model without a folder needs its tokenizer; give tokenizer=")
    shared = {"base_model": base, "batch_size": batch_size, "progress": progress}
    found: dict[str, Any] = {}
    if documents is not None:
        found |= _on_text(model, tokenizer, documents, length, max_tokens, shared)
    if recall:
        given = {"samples": limit, "lengths": contexts}
        sizes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        found["recall"] = probing.recall(model, tokenizer, **sizes, **shared)
    if tasks:
        found["tasks"] = harness.harness(model, tokenizer, tasks, limit=limit, **shared)
    if efficiency:
        where = {} if contexts is None else {"contexts": contexts, "prefills": contexts}
        found["efficiency"] = timing.efficiency(model, **where)
    return json_ready(found)


def _on_text(
    model: nn.Module,
    tokenizer: Any,
    documents: Sequence[str],
    length: int,
    max_tokens: int | None,
    shared: dict[str, Any],
) -> dict[str, Any]:
    """The ablation table and what certifies it, or the perplexity of a softmax model."""
    scoring = {"length": length, "max_tokens": max_tokens}
    if not linearized_modules(model):
        settings = {key: value for key, value in shared.items() if key != "base_model"}
        return {"perplexity": perplexity(model, tokenizer, documents, **scoring, **settings)}
    return {
        "ablation": ablation(model, tokenizer, documents, **scoring, **shared),
        "linear_mass": linear_mass(model, tokenizer, documents, length=length),
        "parity": parity(model),
    }


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
    import transformers  # here: it replaces its own module while models are registered
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
