"""The teacher's logits on disk: what is written comes back, whole or not at all."""

import logging
import shutil

import pytest
import torch

from linearize import teacher_cache
from linearize.losses import TopK, top_k_of
from linearize.teacher_cache import TeacherCache


def make(folder, **changes):
    options = dict(dataset="d", teacher="t", k=3, vocabulary=64)
    return TeacherCache(folder, **{**options, **changes})


def row_of(seed, length=6):
    ids = torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(length)}


def top_of(seed, rows=5, vocabulary=64):
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    return top_k_of(logits.log_softmax(-1), 3)


@pytest.mark.parametrize("vocabulary", [64, 2**16, 2**16 + 1], ids=["small", "edge", "large"])
def test_what_is_written_comes_back_exactly(tmp_path, vocabulary):
    cache, top = make(tmp_path, vocabulary=vocabulary), top_of(1, vocabulary=vocabulary)
    top = top._replace(ids=torch.cat([top.ids[:-1], torch.full((1, 3), vocabulary - 1)]))
    assert cache.read(row_of(0)) is None
    cache.write(row_of(0), top)
    found = make(tmp_path, vocabulary=vocabulary).read(row_of(0))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, top, strict=True))
    assert cache.read(row_of(1)) is None


def test_a_row_without_targets_is_kept(tmp_path):
    cache = make(tmp_path)
    cache.write(row_of(0), top_of(1, rows=5).part(slice(0, 0)))
    assert isinstance(cache.read(row_of(0)), TopK) and len(cache.read(row_of(0)).ids) == 0


@pytest.mark.parametrize(
    "change", [dict(dataset="e"), dict(teacher="u"), dict(k=4)], ids=lambda x: next(iter(x))
)
def test_other_data_teachers_and_k_have_folders_of_their_own(tmp_path, change):
    make(tmp_path).write(row_of(0), top_of(1))
    assert make(tmp_path, **change).read(row_of(0)) is None


def test_rows_with_other_labels_differ(tmp_path):
    cache, row = make(tmp_path), row_of(0)
    cache.write(row, top_of(1))
    assert cache.read({**row, "labels": row["labels"].masked_fill(row["labels"] > 9, -100)}) is None
    assert cache.read({**row, "position_ids": torch.zeros(6, dtype=torch.long)}) is None


def test_a_kill_leaves_no_half_of_a_file(tmp_path, monkeypatch):
    cache = make(tmp_path)

    def killed(arrays, file):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(teacher_cache, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.write(row_of(0), top_of(1))
    assert cache.read(row_of(0)) is None
    cache.write(row_of(0), top_of(1))
    assert torch.equal(cache.read(row_of(0)).ids, top_of(1).ids)


def test_the_size_is_said_before_anything_is_written(tmp_path, caplog):
    cache = make(tmp_path)
    with caplog.at_level(logging.INFO):
        cache.expect(1_000_000)
    assert "top 3 of 1,000,000 tokens take up to 22.00 MB" in caplog.text
    assert not list(tmp_path.rglob("*.safetensors"))
    cache.write(row_of(0), top_of(1, rows=1000))
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert size == pytest.approx(22_000, rel=0.02)  # 3 (4 + 2) + 4 bytes per target


def test_a_disk_that_is_too_small_is_named(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(teacher_cache.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=r"teacher_cache: up to 0\.02 MB more .* smaller finetune"):
        make(tmp_path).expect(1000)
