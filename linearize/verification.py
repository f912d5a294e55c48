"""A folder answers like the model that it was made from: asked in processes of their own.

Legend: B batch, T tokens, V vocabulary.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NEW_TOKENS = 8
TEXT = "Once upon a time, in 1842: naïve café – “quoted”.\n\n  Two lines, 3 spaces   and 日本語."
MESSAGES = [{"role": "user", "content": "Say hello."}]
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # a check of local files needs none
# max |a - b| / max(1, max |b|) of logits: the same arithmetic in another process.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
# Runs in the fresh process. `None` in sys.modules makes an import fail as if nothing were there.
PROBE = """
import json, sys, warnings
folder, asked, answered, device, installed, texts = sys.argv[1:]
text, messages = json.loads(texts)
if installed == "no":
    sys.modules["linearize"] = None
else:
    import linearize
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
flag = {} if installed == "yes" else {"trust_remote_code": True}
model = AutoModelForCausalLM.from_pretrained(folder, **flag).to(device).eval()
question = load_file(asked, device=device)
with torch.no_grad():
    logits = model(question["ids"], use_cache=False).logits
    written = model.generate(
        question["ids"], attention_mask=torch.ones_like(question["ids"]), do_sample=False,
        max_new_tokens=int(question["new_tokens"]), min_new_tokens=int(question["new_tokens"]),
        pad_token_id=0,
    )
save_file({"logits": logits.float().cpu(), "written": written.cpu()}, answered)
tokenizer = AutoTokenizer.from_pretrained(folder, **flag)
chat = None
if tokenizer.chat_template:
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
print(json.dumps({
    "module": type(model).__module__.partition(".")[0],
    "tokens": tokenizer(text)["input_ids"], "chat": chat,
}))
"""


@dataclass(frozen=True)
class Answer:
    """What a model and its tokenizer make of the question: logits [B, T, V], token ids, texts."""

    logits: torch.Tensor
    written: torch.Tensor
    tokens: list[int]
    chat: str | None
    module: str


@torch.no_grad()
def answer(model: Any, tokenizer: Any, ids: torch.Tensor) -> Answer:
    """What the model of this process says."""
    ids = ids.to(model.device)
    logits = model(ids, use_cache=False).logits
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )
    chat = None
    if tokenizer.chat_template:
        chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(TEXT)["input_ids"]
    return Answer(logits.float().cpu(), written.cpu(), tokens, chat, type(model).__module__)


def question(model: Any) -> torch.Tensor:
    """Token ids [B, T] that are long enough for the linear part to matter."""
    section, config = model.config.linearize_config, model.config.get_text_config()
    length = 2 * (section["window"] + section["sinks"]) + 32
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None:
        length = max(1, min(length, longest - NEW_TOKENS))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (1, length), generator=generator)


def verify(
    folder: Path,
    expected: Answer,
    ids: torch.Tensor,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    without_package: bool = True,
) -> dict[str, float]:
    """{"without linearize", "with linearize"}: largest difference of the logits in each process.

    Args:
        folder: What will be published.
        expected: What the original says to `ids`.
        ids: Token ids [B, T].
        dtype: Type of the weights.
        device: Where the fresh processes compute.
        without_package: False: an adapter, which needs the package.

    Raises:
        ValueError: The folder does not load in a fresh process, or answers differently.
    """
    differences = {}
    for installed, process in _processes(without_package):
        found = _ask(folder, ids, device, installed, process)
        where = f"publish: {folder}, loaded in a fresh process {process},"
        if (found.module == "linearize") != (installed == "yes"):
            raise ValueError(f"{where} ran the code of {found.module}; nothing was published")
        scale = max(1.0, float(expected.logits.abs().max()))
        difference = float((found.logits - expected.logits).abs().max()) / scale
        if not difference <= TOLERANCES[dtype]:  # a NaN too
            raise ValueError(
                f"{where} gives other logits than the model it was made from (largest difference "
                f"{difference:.2g}, allowed {TOLERANCES[dtype]:g}); nothing was published"
            )
        for part in ("written", "tokens", "chat"):
            mine, theirs = getattr(expected, part), getattr(found, part)
            same = torch.equal(mine, theirs) if part == "written" else mine == theirs
            if not same:
                raise ValueError(
                    f"{where} differs from the model it was made from in "
                    f"{PARTS[part]}; nothing was published"
                )
        differences[process] = difference
    return differences


PARTS = {
    "written": "the tokens that it writes",
    "tokens": "how its tokenizer cuts a text",
    "chat": "its chat template",
}


def _processes(without_package: bool) -> Iterator[tuple[str, str]]:
    if without_package:
        yield "no", "without linearize"
    yield "yes", "with linearize"


def _ask(folder: Path, ids: torch.Tensor, device: str, installed: str, process: str) -> Answer:
    """The answer of a fresh process, offline, with a cache of its own for Python code."""
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch, "asked.safetensors"), Path(scratch, "answered.safetensors")
        save_file({"ids": ids.contiguous(), "new_tokens": torch.tensor(NEW_TOKENS)}, asked)
        here = str(Path(__file__).parent.parent)
        environment = {key: value for key, value in os.environ.items() if key not in SECRETS}
        environment |= {
            "HF_MODULES_CACHE": str(Path(scratch, "modules")),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
            "PYTHONIOENCODING": "utf-8",
        }
        arguments = [str(folder.resolve()), str(asked), str(answered), device, installed]
        arguments.append(json.dumps([TEXT, MESSAGES]))
        done = subprocess.run(
            [sys.executable, "-c", PROBE, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=environment,
            cwd=scratch,
        )
        if done.returncode:
            raise ValueError(
                f"publish: {folder} does not load in a fresh process {process}: "
                f"{_last_error(done.stderr)}; nothing was published"
            )
        return Answer(**load_file(answered) | json.loads(done.stdout.splitlines()[-1]))


def _last_error(said: str) -> str:
    """The message of the exception that ended a process, on one line."""
    lines = said.strip().splitlines() or ["no message"]
    starts = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return " ".join(line.strip() for line in lines[starts[-1] if starts else -1 :])
