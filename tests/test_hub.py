"""Pushing to a hub: real HTTP on loopback, with its refusals and interruptions."""

import hashlib
import socket

import pytest
from fakehub import ROUTES, TOKEN, FakeHub
from huggingface_hub import constants
from huggingface_hub.utils import _http

from linearize import hub

WEIGHTS = {"model-1.safetensors": b"a" * 600, "model-2.safetensors": b"b" * 600}
FILES = WEIGHTS | {
    "config.json": b'{"linearize_config": {}}',
    "README.md": b"---\nlicense: mit\n---\n",
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub that huggingface_hub takes for its own, without the protocol of xet."""
    with FakeHub() as fake:
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            fake.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)  # between its retries
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield fake


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "publish"
    (made / "sub").mkdir(parents=True)
    for name, content in FILES.items():
        (made / name).write_bytes(content)
    return made


def test_a_new_repository_is_private_and_holds_every_file(server, folder):
    done = hub.push(folder, "me/model")
    assert server.repos["me/model"]["private"]
    assert server.files("me/model") == FILES
    assert done["url"] == f"{server.url}/me/model"
    assert done["commit"] == server.sha("me/model", "main")
    assert done["branch"] is None and done["pull_request"] is None


def test_public_and_organisation(server, folder):
    hub.push(folder, "my-org/model", private=False)
    assert not server.repos["my-org/model"]["private"]


def test_the_protocol_with_xet_installed_brings_the_same_files(server, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.push(folder, "me/model")
    assert server.files("me/model") == FILES
    hub.push(folder, "me/model")  # nothing has changed
    assert server.files("me/model") == FILES


def test_a_branch_is_made_and_main_stays(server, folder):
    server.add("me/model", **{"config.json": b"{}"})  # some other model
    done = hub.push(folder, "me/model", branch="linear")
    assert server.files("me/model", "linear") == FILES
    assert server.files("me/model") == {"config.json": b"{}"}
    assert done["branch"] == "linear"
    hub.push(folder, "me/model", branch="linear")


def test_a_pull_request_leaves_main_and_can_be_pushed_to_again(server, folder):
    server.add("other/model", private=False, **{"config.json": b"{}"})
    done = hub.push(folder, "other/model", pull_request=True)
    assert done["pull_request"] == f"{server.url}/other/model/discussions/1"
    assert server.files("other/model", "refs/pr/1") == FILES
    assert server.files("other/model") == {"config.json": b"{}"}
    (folder / "README.md").write_bytes(b"---\nlicense: mit\n---\nmore")
    hub.push(folder, "other/model", branch="refs/pr/1")
    assert server.files("other/model", "refs/pr/1")["README.md"].endswith(b"more")


@pytest.mark.filterwarnings(
    "ignore:Use 'content=<...>':DeprecationWarning"
)  # huggingface_hub's own
def test_an_upload_that_breaks_off_goes_on_where_it_stopped(server, folder):
    oids = [hashlib.sha256(content).hexdigest() for content in WEIGHTS.values()]
    server.large, server.broken = ".safetensors", oids[1]
    with pytest.raises(ConnectionError, match="the upload to me/model broke off") as stop:
        hub.push(folder, "me/model")
    assert f"linearize publish {folder} --repo-id me/model" in str(stop.value)
    assert TOKEN not in str(stop.value)
    assert server.files("me/model") == {}
    assert list(server.objects) == oids[:1]
    server.broken = None
    before = len(server.uploads())
    hub.push(folder, "me/model")
    assert server.files("me/model") == FILES
    assert server.uploads()[before:] == [f"/objects/{oids[1]}"]


def test_what_an_earlier_version_left_is_removed_and_the_rest_stays(server, folder):
    server.add(
        "me/model",
        **{"model-3.safetensors": b"old", "model.safetensors.index.json": b"{}", "old.py": b""},
        **{"config.json": FILES["config.json"], "picture.png": b"png", ".gitattributes": b"*"},
    )
    hub.push(folder, "me/model")
    assert server.files("me/model") == FILES | {"picture.png": b"png", ".gitattributes": b"*"}


def test_another_model_is_not_overwritten(server, folder):
    server.add("me/model", **{"config.json": b'{"model_type": "llama"}'})
    with pytest.raises(ValueError, match="me/model exists and holds a model that is not converted"):
        hub.push(folder, "me/model")
    assert server.files("me/model") == {"config.json": b'{"model_type": "llama"}'}


def test_what_everybody_can_read_needs_public(server, folder):
    server.add("me/model", private=False)
    with pytest.raises(ValueError, match="me/model exists and everybody can read it; add --public"):
        hub.push(folder, "me/model")
    assert server.files("me/model") == {}
    hub.push(folder, "me/model", private=False)
    assert server.files("me/model") == FILES


def test_a_wrong_token_is_refused_and_not_repeated(server, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_thewrongtokenthewrongtoken")
    with pytest.raises(
        ValueError, match=r"HF_TOKEN: http.* does not accept this token \(401\)"
    ) as no:
        hub.push(folder, "me/model")
    assert "thewrong" not in str(no.value)
    assert server.repos == {}


def test_no_token_is_said_before_anything_is_asked(server, folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(
        ValueError, match="HF_TOKEN: no token was found; make one with write access"
    ):
        hub.push(folder, "me/model")
    assert server.log == []


def test_a_namespace_that_is_not_ours_is_refused(server, folder):
    with pytest.raises(
        ValueError, match=r"does not let this token write to stranger/model \(403\)"
    ):
        hub.push(folder, "stranger/model")


def test_a_hub_that_refuses_the_upload_is_quoted(server, folder, monkeypatch):
    def full(handler, body, *names):
        handler.answer(413, {"error": "storage is full"})

    patched = [(*route[:3], full) if "preupload" in route[1] else route for route in ROUTES]
    monkeypatch.setattr("fakehub.ROUTES", patched)
    with pytest.raises(
        ConnectionError, match=r"refused the upload to me/model \(413: storage is full"
    ):
        hub.push(folder, "me/model")


def test_a_hub_with_a_fault_is_named(server, folder, monkeypatch):
    def broken(handler, body, *names):
        handler.answer(500, {"error": "oops"})

    patched = [(*route[:3], broken) if "whoami" in route[1] else route for route in ROUTES]
    monkeypatch.setattr("fakehub.ROUTES", patched)
    with pytest.raises(ConnectionError, match=r"HF_ENDPOINT: .* answers 500; try later"):
        hub.push(folder, "me/model")


def test_a_hub_that_is_not_there_is_named(server, folder, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    with pytest.raises(ConnectionError, match=f"HF_ENDPOINT: {nobody} does not answer"):
        hub.push(folder, "me/model")


def test_metadata_that_the_hub_refuses_stops_before_the_first_file(server, folder):
    (folder / "README.md").write_text("---\nlicense: no-such-licence\n---\n")
    with pytest.raises(ValueError, match="license"):
        hub.push(folder, "me/model")
    assert server.files("me/model") == {} and server.uploads() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repo_id": "model"}, "--repo-id: 'model' has no owner; write owner/model"),
        ({"repo_id": "me/mo del"}, "--repo-id: "),
        ({"repo_id": "a/b/c"}, "--repo-id: "),
        (
            {"repo_id": "me/model", "branch": "x", "pull_request": True},
            "--pull-request: goes to the main branch, and --branch names x; choose one",
        ),
    ],
    ids=["no-owner", "space", "three-parts", "branch-and-pull-request"],
)
def test_a_name_that_no_hub_takes_is_refused_first(options, message):
    with pytest.raises(ValueError, match=message):
        hub.check(**options)
