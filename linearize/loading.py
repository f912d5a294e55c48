"""Models and tokenizers from a folder, the hub or the package; where results come from."""

import difflib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from linearize import __version__

EMBEDDED = {"tiny-english": Path(__file__).parent / "assets" / "tiny-english"}
DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors")


def locate(path: str | Path, *, gguf_file: str | None = None) -> str:
    """What `from_pretrained` understands: a folder, or a hub name.

    Raises FileNotFoundError for what looks like a folder and is none, ValueError for a file.
    """
    name = str(path)
    folder = Path(EMBEDDED.get(name, name)).expanduser()
    if folder.is_dir():
        if gguf_file is None and not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"model {name}: the folder holds no config.json; name the folder of a saved model"
            )
        return str(folder)
    if folder.is_file():
        raise ValueError(
            f"model {name}: this is a file; name its folder {folder.parent} (and the file as "
            "gguf_file, if it is a GGUF)"
        )
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    near = difflib.get_close_matches(name, EMBEDDED, n=1)
    if looks_like_a_path or near or ("/" in name and folder.parent.is_dir()):
        hint = f"did you mean {near[0]}?" if near else "use a folder or a hub name (owner/name)"
        raise FileNotFoundError(f"model {name}: no such folder (seen from {Path.cwd()}); {hint}")
    return name


def load_config(
    path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Config of a model, without its weights."""
    return AutoConfig.from_pretrained(
        locate(path), revision=revision, trust_remote_code=trust_remote_code
    )


def load(
    path: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
) -> tuple[Any, Any]:
    """Model in eval mode on its device, and its tokenizer; GGUF weights are dequantised.

    Raises FileNotFoundError or ValueError that name the path and what is allowed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"model.dtype: {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    place = locate(path, gguf_file=gguf_file)
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    quantization = {}
    if gguf_file is not None:
        common["gguf_file"] = gguf_file
        quantization = {"quantization_config": GgufConfig(dequantize=True)}
    tokenizer = AutoTokenizer.from_pretrained(place, **common)
    model = AutoModelForCausalLM.from_pretrained(
        place, dtype=DTYPES[dtype], **common, **quantization
    )
    return model.to(choose_device(device)).eval(), tokenizer


def save(model: Any, tokenizer: Any, folder: str | Path) -> None:
    """Writes weights and tokenizer, so that `from_pretrained` reads them back."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is the accelerator of this computer, or its CPU."""
    if name == "auto":
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"device: {name!r} is not known; use cpu, cuda, cuda:1, mps or auto"
        ) from None


def provenance() -> dict[str, Any]:
    """Versions, commit and hardware: what made a result."""
    return {
        "versions": {
            "linearize": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "commit": _commit(),
        "hardware": _hardware(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that this package runs from, or None; "+changes" if it was changed."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + (
            "+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _hardware() -> str:
    """One line: processor or accelerator, cores, threads in use, memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [f"{_processor()}, {cores} cores, {torch.get_num_threads()} threads"]
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return "; ".join(parts)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
