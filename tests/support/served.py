"""`dovetail serve` as a process: what it says, and requests to it."""

import http.client
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from support.patience import PATIENCE_S

QUESTION = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8}


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a server says when it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    told: dict[str, Any] = json.loads(line)
    return told


def told(process: subprocess.Popen[str], *words: str) -> str:
    """Wait for a line of its log with all of these words."""
    assert process.stderr is not None
    lines = []
    while line := process.stderr.readline():
        lines.append(line)
        if all(word in line for word in words):
            return line
    raise AssertionError(f"{words} was not said: {lines}")


def ask(
    url: str, path: str = "/v1/chat/completions", body: dict[str, Any] | None = None
) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)
    try:
        connection.request(
            "POST" if body else "GET",
            path,
            json.dumps(body) if body else None,
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content) if content else None
    finally:
        connection.close()


def streamed(url: str, begun: Callable[[], object] = lambda: None, *, seed: int = 5) -> str:
    """Return the text of a reply that is streamed, and check that it ends as it should; `begun` is
    called when it has begun."""
    asked = {
        **QUESTION,
        "max_tokens": 160,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": seed,
        "stream": True,
    }
    place, said, chunks = urlsplit(url), "", 0
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"}
        )
        for line in connection.getresponse():
            if line.strip() == b"data: [DONE]":
                return said
            if line.startswith(b"data: "):
                chunk = json.loads(line.removeprefix(b"data: "))
                said += chunk["choices"][0]["delta"].get("content", "")
                chunks += 1
                if chunks == 5:
                    begun()
    finally:
        connection.close()
    raise AssertionError(f"it ended without a word, behind {said!r}")


def assert_nothing_is_left(pids: list[int], tmp_path: Path) -> None:
    """Hold that these processes end, and that no file of a user's runtime and temporary directories
    is theirs."""
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=PATIENCE_S
    )
    assert not alive
    assert [*(tmp_path / "run").rglob("*.json")] == []
    assert [*(tmp_path / "tmp").glob("dovetail*")] == []
