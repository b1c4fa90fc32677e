"""`dovetail serve` with several models: each is loaded when it is asked for."""

import http.client
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from dovetail.launch.processes.serving.models import served_models
from dovetail.launch.settings.configure import configure
from dovetail.launch.settings.models import TARGET_FOLDER
from dovetail.launch.settings.several import models_inside, names_of
from support.patience import PATIENCE_S
from support.served import QUESTION, ask, assert_nothing_is_left, ready, told

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

FLAGS = ("--http.port=0", "--json", "--draft=none", "--weights=int8", "--http.most_models=1")


def models_at(folder: Path, *names: str) -> Path:
    """Make a folder of copies of the embedded target."""
    for name in names:
        shutil.copytree(TARGET_FOLDER, folder / name)
    return folder


def listed(url: str) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in ask(url, "/v1/models")[1]["data"]}


def stream(
    url: str, model: str, begun: Callable[[], object] = lambda: None
) -> tuple[str, list[str]]:
    """Return the text of a streamed reply, and the comments before it; `begun` is called after its
    first text."""
    place, text, comments = urlsplit(url), "", list[str]()
    wanted: dict[str, Any] = {"ignore_eos": True, "seed": 5, "temperature": 1.0, "max_tokens": 200}
    body = json.dumps({**QUESTION, **wanted, "model": model, "stream": True})
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)
    try:
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, kind)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b":"):
                comments.append(line.decode())
            if line.strip() == b"data: [DONE]":
                return text, comments
            if line.startswith(b"data: "):
                chunk = json.loads(line.removeprefix(b"data: "))
                assert "error" not in chunk, chunk
                new = chunk["choices"][0]["delta"].get("content", "")
                if new and not text:
                    begun()
                text += new
    finally:
        connection.close()
    raise AssertionError(f"it ended early, after {text!r}")


def test_models_take_turns_and_no_request_is_lost(start: Start, tmp_path: Path) -> None:
    """Only one may be loaded: a stream of the other ends undisturbed before it is unloaded. One
    that cannot be loaded says why, and the others are served."""
    folder = models_at(tmp_path / "models", "a", "b", "spoilt")
    (folder / "spoilt" / "model.safetensors").write_bytes(b"not weights")
    (folder / "nothing").mkdir()
    process = start("serve", str(folder), *FLAGS, "--http.aliases=gpt-*=b")
    found = ready(process)
    url = found["url"]
    page = urlsplit(url)
    connection = http.client.HTTPConnection(page.hostname or "", page.port, timeout=PATIENCE_S)
    connection.request("GET", "/")
    assert b"<html" in connection.getresponse().read()
    connection.close()
    assert listed(url) == {"a": "unloaded", "b": "unloaded", "spoilt": "unloaded"}

    with ThreadPoolExecutor(1) as pool:
        others = []
        first = stream(url, "a", lambda: others.append(pool.submit(stream, url, "b")))
        second = others[0].result(PATIENCE_S)
    assert first[0] == second[0]
    assert any("a is loading" in comment for comment in first[1])
    assert listed(url) == {"a": "unloaded", "b": "loaded", "spoilt": "unloaded"}
    assert [one["name"] for one in ask(url, "/api/ps")[1]["models"]] == ["b"]
    status, answer = ask(url, "/v1/messages", {**QUESTION, "model": "gpt-4o"})
    assert (status, answer["type"]) == (200, "message"), answer

    for asked in range(2):  # at the second request it is not tried again yet
        status, answer = ask(url, body={**QUESTION, "model": "spoilt"})
        assert status == 503, asked
        assert "spoilt cannot be loaded: " in answer["error"]["message"]
        assert "model.safetensors" in answer["error"]["message"]
    status, answer = ask(url, body={**QUESTION, "model": "c"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = ask(url, body=QUESTION)
    assert (status, answer["error"]["param"]) == (400, "model")
    assert ask(url, "/v1/models/a")[1]["id"] == "a"
    assert [one["name"] for one in ask(url, "/api/tags")[1]["models"]] == ["a", "b", "spoilt"]
    assert ask(url, "/api/chat", {**QUESTION, "model": "c"})[1]["error"].startswith("there is no")

    children = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert_nothing_is_left(children, tmp_path)


@pytest.mark.slow
def test_a_killed_router_or_service_returns_and_nothing_outlives_the_supervisor(
    start: Start, tmp_path: Path
) -> None:
    folder = models_at(tmp_path / "models", "a", "b")
    process = start("serve", str(folder / "a"), str(folder / "b"), *FLAGS[:-1])
    found = ready(process)
    url = found["url"]
    text, _ = stream(url, "a")
    assert stream(url, "b")[0] == text

    os.kill(found["pids"]["router"], signal.SIGKILL)
    told(process, "the router is ready again")
    assert listed(url) == {"a": "loaded", "b": "loaded"}
    assert stream(url, "a")[0] == text

    served = [
        one
        for one in psutil.Process(process.pid).children()
        if one.name() not in ("dovetail:warden", "dovetail:router")
    ]
    assert len(served) == 2
    for one in served:
        one.kill()
        told(process, "was lost: it was killed by SIGKILL")
    with ThreadPoolExecutor(2) as pool:  # each waits until its model is loaded again
        for other, _ in pool.map(lambda name: stream(url, name), "ab"):
            assert other == text

    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(PATIENCE_S)
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []


@pytest.mark.slow
def test_a_model_without_requests_is_unloaded(start: Start, tmp_path: Path) -> None:
    folder = models_at(tmp_path / "models", "a", "b")
    process = start("serve", str(folder), *FLAGS, "--http.unload_s=0.5")
    url = ready(process)["url"]
    text, _ = stream(url, "a")
    told(process, "a is unloaded")
    assert listed(url)["a"] == "unloaded"
    assert stream(url, "a")[0] == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{0}/a", "{0}/nothing"), "{0}/nothing"),
        (
            ("{0}/a", "{0}/b", "--listen=tcp://127.0.0.1:0"),
            "coordinator.listen applies to one",
        ),
        (("{0}/a", "{0}/b", "--engine=ray"), "--engine ray serves one model"),
        (("{0}/a", "{0}/b", "--target={0}/a"), "target.model applies to one"),
        (("{0}/a", "{0}/b", "--http.aliases==x"), "http.aliases = '=x': write NAME=MODEL"),
    ],
)
def test_a_mistake_is_one_line(
    invoke: Run, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    models_at(tmp_path, "a", "b")
    done = invoke("serve", "--http.port=0", *(one.format(tmp_path) for one in arguments))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert words.format(tmp_path) in done.stderr


def test_the_models_of_a_folder_are_its_folders_and_files(tmp_path: Path) -> None:
    for name in ("deep/config.json", "one/x.gguf", "empty/readme", "y-q4.gguf", "y-q8.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for part in range(1, 3):
        (tmp_path / f"z-{part:05}-of-00002.gguf").touch()
    there = [path.name for path in models_inside(tmp_path)]
    assert there == ["deep", "one", "y-q4.gguf", "y-q8.gguf", "z-00001-of-00002.gguf"]
    assert models_inside(tmp_path / "deep") == []
    assert models_inside(tmp_path / "one") == []


def test_the_service_of_a_model_gets_the_settings_of_the_command() -> None:
    own = configure(model=str(TARGET_FOLDER), flags={"cache.disk": "1GB"})
    (served,) = served_models({"a": own})
    assert {"--cache.disk=1GB", "--http.model=a"} <= {*served.arguments}


def test_names_are_short_and_differ() -> None:
    assert names_of(["/m/a", "/m/b.gguf", "owner/c"]) == ["a", "b", "owner/c"]
    assert names_of(["/m/x/a", "/m/y/a", "/m/z"]) == ["x/a", "y/a", "z"]
