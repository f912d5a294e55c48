"""`linearize serve` and `transformers chat`: the server and the client of transformers, from
processes of their own on loopback.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import tiny_linearized
from tinytext import chat_tokenizer
from transformers.cli.serving.model_manager import ModelManager
from transformers.utils.import_utils import is_serve_available

pytestmark = pytest.mark.skipif(
    not is_serve_available(), reason='needs pip install -e ".[ecosystem]"'
)
STARTS_WITHIN_S = 120
QUESTION = [{"role": "user", "content": "w1 w2 w3 w4 w5 w6 w7 w8 w9"}]
OTHER = [{"role": "user", "content": "w30 w20 w10"}]


@pytest.fixture(scope="module")
def model():
    model = tiny_linearized(sinks=1, window=4)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """Address of a server that runs for this module."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    address = f"http://localhost:{port}"
    command = [sys.executable, "-m", "linearize", "serve", folder, "--port", str(port)]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--device", "cpu"], stdout=out, stderr=out)
    try:
        wait_for(f"{address}/health", process, log)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_for(url, process, log):
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except urllib.error.URLError:
            time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text()}")


def post(address, path, **body):
    """The response as text."""
    request = urllib.request.Request(
        f"{address}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def chat(address, folder, messages, **options):
    body = dict(model=str(folder), messages=messages, max_tokens=8, **options)
    return post(address, "chat/completions", **body)


def answer(address, folder, messages):
    return json.loads(chat(address, folder, messages))["choices"][0]["message"]["content"]


def expected(model, messages):
    """What `generate` says in this process, without a cache."""
    tokenizer = chat_tokenizer()
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False, use_cache=False)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_chat_of_two_turns(model, folder, server):
    first = answer(server, folder, QUESTION)
    assert first == expected(model, QUESTION)
    turns = [*QUESTION, {"role": "assistant", "content": first}, *OTHER]
    assert answer(server, folder, turns) == expected(model, turns)


def test_a_stream_says_the_same_piece_by_piece(model, folder, server):
    lines = chat(server, folder, QUESTION, stream=True).splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data:")]
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert sum(map(bool, pieces)) > 4
    assert "".join(pieces) == expected(model, QUESTION)


def test_requests_at_the_same_time_do_not_mix(model, folder, server):
    requests = [QUESTION, OTHER] * 3
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda messages: answer(server, folder, messages), requests))
    assert answers == [expected(model, messages) for messages in requests]
    assert answers[0] != answers[1]


def test_a_text_is_continued(folder, server):
    body = dict(model=str(folder), prompt="w1 w2 w3", max_tokens=5)
    assert len(json.loads(post(server, "completions", **body))["choices"][0]["text"].split()) == 5


def test_the_chat_client_of_transformers(model, folder, server):
    code = "from transformers.cli.transformers import app; app()"  # looks for no update
    settings = ["chat", folder, f"{server}/v1", "max_new_tokens=8", "do_sample=False"]
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", code, *settings], text=True, capture_output=True, timeout=120,
        input=f"{QUESTION[0]['content']}\nn\n!exit\n", env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert expected(model, QUESTION) in " ".join(done.stdout.split())


def test_the_server_of_transformers_alone_finds_no_class_of_another_package(folder):
    """When this begins to pass, docs/ecosystem.md can recommend `transformers serve`."""
    for trusting in (False, True):
        manager = ModelManager(device="cpu", model_timeout=-1, trust_remote_code=trusting)
        with pytest.raises(
            AttributeError, match=r"transformers has no .*LinearizedLlamaForCausalLM"
        ):
            manager.load_model_and_processor(str(folder))
