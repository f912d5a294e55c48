"""Licences: inherited, overridden, doubted, and written beside the weights."""

import pytest

from linearize import licences
from linearize.licences import inherited, read_base, write_texts


def card(folder, text):
    (folder / "README.md").write_text(f"---\n{text}\n---\n# A model\n")
    return folder


def test_card_and_texts_of_a_folder_are_read(tmp_path):
    card(tmp_path, "license: llama3.2\nlanguage: [en, de]")
    for name in ("LICENSE.txt", "USE_POLICY.md", "NOTICE", "weights.txt"):
        (tmp_path / name).write_text(name)
    metadata, texts = read_base(str(tmp_path))
    assert metadata == {"license": "llama3.2", "language": ["en", "de"]}
    assert [file.name for file in texts] == ["LICENSE.txt", "NOTICE", "USE_POLICY.md"]
    assert inherited(metadata, texts).name == "llama3.2"


def test_a_folder_without_a_card_says_nothing(tmp_path):
    assert read_base(str(tmp_path)) == ({}, [])


@pytest.mark.filterwarnings("ignore:the card of")
def test_a_hub_that_cannot_be_read_warns_and_says_nothing(monkeypatch):
    def unreachable(*args, **kwargs):
        raise TimeoutError

    monkeypatch.setattr(licences, "list_repo_files", unreachable)
    with pytest.warns(UserWarning, match="the card of me/model could not be read: TimeoutError"):
        assert read_base("me/model") == ({}, [])


def test_a_hub_model_is_read_file_by_file(monkeypatch, tmp_path):
    card(tmp_path, "license: mit")
    (tmp_path / "LICENSE").write_text("text")
    (tmp_path / "model.safetensors").write_text("large")
    asked = []

    def download(base, name, revision):
        asked.append((base, name, revision))
        return str(tmp_path / name)

    names = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(licences, "list_repo_files", lambda base, revision: names)
    monkeypatch.setattr(licences, "hf_hub_download", download)
    metadata, texts = read_base("me/model", revision="v1")
    assert metadata == {"license": "mit"} and [file.name for file in texts] == ["LICENSE"]
    assert asked == [("me/model", "LICENSE", "v1"), ("me/model", "README.md", "v1")]


@pytest.mark.parametrize(
    ("metadata", "name", "shown"),
    [
        ({"license": "apache-2.0"}, None, "apache-2.0"),
        ({"license": ["mit", "apache-2.0"]}, None, "mit"),
        ({"license": "other", "license_name": "my-licence"}, None, "my-licence"),
        ({"license": "other"}, None, "other"),
        ({"license": "mit"}, "Apache-2.0", "apache-2.0"),
        ({}, None, None),
    ],
)
def test_the_name_of_a_licence(metadata, name, shown):
    assert inherited(metadata, name=name).name == shown


@pytest.mark.parametrize(
    ("name", "doubt"),
    [
        (None, "the licence of the base model is unknown; read it before you publish"),
        ("cc-by-nc-nd-4.0", "licence cc-by-nc-nd-4.0: it forbids derived works"),
        ("cc-by-nd-4.0", "it forbids derived works"),
        ("llama3.2", "licence llama3.2: it asks for 'Built with Llama'"),
        ("gemma", "licence gemma: it asks to pass on its terms"),
        ("apache-2.0", None),
        ("mit", None),
        ("cc-by-sa-4.0", None),
    ],
)
def test_doubts(name, doubt):
    said = list(inherited({}, name=name).doubts())
    assert (doubt in said[0]) if doubt else said == []


def test_texts_of_the_base_model_travel_and_the_code_has_its_own(tmp_path):
    base, folder = tmp_path / "base", tmp_path / "folder"
    base.mkdir(), folder.mkdir()
    (base / "LICENSE").write_text("the licence of the base")
    write_texts(inherited({"license": "other"}, [base / "LICENSE"]), folder, "me/base")
    assert (folder / "LICENSE").read_text() == "the licence of the base"
    assert "Apache License" in (folder / "LICENSE.code").read_text()


def test_a_notice_alone_is_no_licence(tmp_path):
    base, folder = tmp_path / "base", tmp_path / "folder"
    base.mkdir(), folder.mkdir()
    (base / "NOTICE").write_text("made by us")
    write_texts(inherited({"license": "apache-2.0"}, [base / "NOTICE"]), folder, "me/base")
    assert (folder / "NOTICE").read_text() == "made by us"
    assert "Apache License" in (folder / "LICENSE").read_text()


def test_apache_is_written_out(tmp_path):
    write_texts(inherited({"license": "apache-2.0"}), tmp_path, "me/base")
    assert "Apache License" in (tmp_path / "LICENSE").read_text()
    assert not (tmp_path / "LICENSE.code").exists()


@pytest.mark.parametrize(("name", "said"), [("llama3.2", "llama3.2"), (None, "not known")])
def test_a_licence_without_a_text_is_named(tmp_path, name, said):
    write_texts(inherited({}, name=name), tmp_path, "me/base")
    text = (tmp_path / "LICENSE").read_text()
    assert "derived from me/base" in text and said in text
    assert "Apache License" in (tmp_path / "LICENSE.code").read_text()
