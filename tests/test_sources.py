"""Reading of text files, globs and hub datasets."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from linearize.sources import distinct, parse_sources, read_documents, sha256

ROWS = [{"text": "one two"}, {"text": ""}, {"text": None}, {"text": "three"}]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def json_lines(rows):
    return "\n".join(map(json.dumps, rows)) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\n\ntwo\n", ["one\n\ntwo\n"]),
        ("a.TXT", "\ufeffone", ["one"]),
        ("a.jsonl", json_lines(ROWS), ["one two", "three"]),
        ("a.jsonl", '{"text": "a\u2028b"}\n\n"bare"\n', ["a\u2028b", "bare"]),
        ("a.json", json.dumps(ROWS), ["one two", "three"]),
        ("a.json", json.dumps(["one", "two"]), ["one", "two"]),
        ("a.json", json_lines(ROWS), ["one two", "three"]),
    ],
    ids=["txt", "txt-bom", "jsonl", "jsonl-bare", "json-rows", "json-strings", "json-lines"],
)
def test_file_gives_its_documents(tmp_path, name, content, expected):
    assert read_documents(write(tmp_path / name, content)) == expected


def test_parquet_gives_its_documents(tmp_path):
    table = pyarrow.table({"body": [row["text"] for row in ROWS], "id": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    source = {"path": str(tmp_path / "a.parquet"), "column": "body"}
    assert read_documents(source) == ["one two", "three"]


def test_glob_reads_files_in_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.txt", name)
    write(tmp_path / "d.jsonl", '"other"')
    assert read_documents(str(tmp_path / "*.txt")) == ["a", "b", "c"]


def test_file_whose_name_looks_like_a_glob(tmp_path):
    assert read_documents(write(tmp_path / "a[1].txt", "found")) == ["found"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", r"a\.csv has an unknown suffix; allowed are \.txt, \.jsonl, \.json, \.parq"),
        ("a.txt", "", r"a\.txt is empty"),
        ("a.txt", " \n ", r"a\.txt holds no text"),
        ("a.txt", b"\xff\xfe\xfa", r"a\.txt is not UTF-8 text"),
        ("a.jsonl", '{"text": "x"}\n{"text"', r"a\.jsonl line 2 is not valid JSON"),
        ("a.jsonl", '{"body": "x", "a": 1}', r"line 1 has no column 'text', only a, body; set col"),
        ("a.jsonl", "3", r"line 1 is neither text nor an object"),
        ("a.json", '[{"text": 3}]', r"column 'text' of .*a\.json entry 1 is int, not text"),
        ("a.json", '["a"', r"a\.json is not valid JSON"),
    ],
)
def test_unreadable_file_is_refused_by_name(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=rf"^data\.sources: .*{message}"):
        read_documents(write(tmp_path / name, content))


def test_parquet_without_the_column_is_refused(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'text', only body"):
        read_documents(str(tmp_path / "a.parquet"))


def test_folder_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder; name its files, for example .*\*\.jsonl"):
        read_documents(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", r"^evaluate\.text: .*missing\.txt does not exist \(seen from "),
        ("*.txt", r"^evaluate\.text: .*\*\.txt matches no file \(seen from "),
        ("a b/c", r"^evaluate\.text: .* is no file .* and no name of a hub dataset"),
    ],
)
def test_missing_file_is_named_with_the_key_of_the_recipe(tmp_path, name, message):
    with pytest.raises(FileNotFoundError, match=message):
        read_documents(str(tmp_path / name), key="evaluate.text")


def test_hub_dataset_is_read_as_far_as_needed(monkeypatch):
    calls = []

    def load_dataset(name, config, **options):
        calls.append((name, config, options))
        return ({"body": f"text number {i}"} for i in range(10**9))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    texts = read_documents("owner/name:small:body", max_tokens=10)
    assert texts == [f"text number {i}" for i in range(len(texts))]
    assert 100 < sum(map(len, texts)) < 120
    assert calls == [("owner/name", "small", {"split": "train", "streaming": True})]


def test_hub_dataset_that_cannot_be_read(monkeypatch):
    def load_dataset(name, config, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(
        FileNotFoundError, match=r"owner/name is no file .* hub dataset: no network"
    ):
        read_documents("owner/name")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], r"the list is empty"),
        ([{"file": "a.txt"}], r"\{'file': 'a\.txt'\} must have a path"),
        ([{"path": "a.txt", "share": 1}], r"must have a path, and may have a column and a weight"),
        (["self", "a.txt"], r"'self' is text that the teacher writes"),
        ([{"path": "a.txt", "weight": 0}], r"weight 0 of a\.txt is not above 0"),
        ([{"path": "a.txt", "weight": 1}, "b.txt"], r"only some sources have a weight"),
    ],
    ids=["empty", "no-path", "unknown-key", "self", "zero-weight", "half-weighted"],
)
def test_entries_that_are_not_understood(entries, message):
    with pytest.raises(ValueError, match=rf"^data\.sources: .*{message}"):
        parse_sources(entries)


def test_distinct_drops_what_was_seen():
    seen = {sha256(["b"])}
    assert list(distinct(["a", "b", "c", "a"], seen)) == ["a", "c"]


def test_hash_sees_borders():
    assert sha256(["ab", "c"]) != sha256(["a", "bc"])
    assert sha256(["ab"]) == sha256([b"ab"])
