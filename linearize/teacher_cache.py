"""The teacher's most probable next tokens on disk, so that a row asks the teacher once.

One file per row of tokens, named after its content, in a folder named after the data, the teacher
and k. A file is whole or absent, so a run that was killed goes on with what it left, and any other
stage or run with the same teacher, data and k reads it.
"""

import hashlib
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from linearize.losses import TopK

logger = logging.getLogger(__name__)

SMALL = 2**16  # vocabularies below it have ids of two bytes


class TeacherCache:
    """`TopK` of the targets of rows, in a subfolder of `folder`."""

    def __init__(self, folder, *, dataset, teacher, k, vocabulary):
        """`dataset` is its hash, `teacher` a hash of the teacher's weights."""
        key = hashlib.sha256(f"{dataset} {teacher} {k}".encode()).hexdigest()[:16]
        self.folder = Path(folder) / f"{key}-top{k}"
        self.k = min(k, vocabulary)
        self.id_dtype = np.uint16 if vocabulary <= SMALL else np.int32

    def expect(self, num_tokens):
        """Says how large the cache can become.

        Raises:
            ValueError: the disk has less room than what is missing.
        """
        size = num_tokens * (self.k * (4 + self.id_dtype().itemsize) + 4)
        there = sum(file.stat().st_size for file in self.folder.glob("*/*.safetensors"))
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        logger.info(
            "the teacher's top %d of %s tokens take up to %s in %s (%s there)",
            self.k, f"{num_tokens:,}", _readable(size), self.folder, _readable(there),
        )  # fmt: skip
        if size - there > free:
            raise ValueError(
                f"teacher_cache: up to {_readable(size - there)} more are needed and "
                f"{_readable(free)} are free in {self.folder}; use a smaller finetune.top_k, "
                "another folder, or no cache"
            )

    def read(self, row):
        """`TopK` of a row {name: tensor [T]}, or None."""
        file = self._file(row)
        if not file.exists():
            return None
        found = load_file(file)
        ids = torch.from_numpy(found["ids"].astype(np.int64))
        return TopK(ids, *(torch.from_numpy(found[name]) for name in ("log_p", "log_rest")))

    def write(self, row, top):
        """Keeps the `TopK` of a row."""
        file = self._file(row)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        arrays = {name: x.cpu().numpy() for name, x in top._asdict().items()}
        save_file(arrays | {"ids": arrays["ids"].astype(self.id_dtype)}, unfinished)
        os.replace(unfinished, file)

    def _file(self, row):
        digest = hashlib.sha256()
        for name in sorted(row):
            digest.update(f"{name} {tuple(row[name].shape)}".encode())
            digest.update(row[name].cpu().numpy().tobytes())
        name = digest.hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.safetensors"


def _readable(size):
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
