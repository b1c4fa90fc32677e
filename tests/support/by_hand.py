"""A service whose processes are started by hand, so that its coordinator can be killed as often as
a test likes, and streams of its HTTP API."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from dovetail.protocol.keys import generate_keys
from support.inflated import as_flags, models_at
from support.patience import PATIENCE_S
from support.stacks import PROMPTS

CHATS = "/v1/chat/completions"


def slower() -> tuple[str, ...]:
    """Weights that take their time, so that there is something to kill."""
    return (*as_flags(models_at("64MiB")),)


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Requests, every other one of which is sampled."""
    return [
        {
            "messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)][0]}],
            "max_tokens": tokens,
            "temperature": float(number % 2),
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(count)
    ]


@dataclass
class Stream:
    """One streamed reply, read by a thread of its own."""

    body: dict[str, Any]
    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    event: str = ""
    """The id of the last event that had one."""
    name: str = ""
    """The id of the response."""
    heard_s: list[float] = field(default_factory=list)

    def read(self, url: str, *, most: int | None = None, headers: Any = None) -> "Stream":
        """Read the stream to its end, or break it off behind so many chunks."""
        asked = {**self.body, "stream": True}
        try:
            with httpx.stream(
                "POST",
                f"{url}{CHATS}",
                json=asked,
                headers=headers,
                timeout=PATIENCE_S,
                verify=False,
                trust_env=False,
            ) as reply:
                for line in reply.iter_lines():
                    self._take(line)
                    if not line and most is not None and len(self.heard_s) >= most:
                        break  # behind the line that ends an event, which is whole then
        except httpx.HTTPError as error:
            self.error = repr(error)
        return self

    def _take(self, line: str) -> None:
        if line.startswith("id: "):
            self.event = line.removeprefix("id: ")
        if not line.startswith("data: {"):
            return
        chunk = json.loads(line.removeprefix("data: "))
        self.heard_s.append(time.monotonic())
        if "error" in chunk:
            self.error = str(chunk["error"])
            return
        self.name = chunk["id"]
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    @property
    def outcome(self) -> tuple[str, str | None, str]:
        return self.text, self.finish_reason, self.error

    @property
    def longest_pause_s(self) -> float:
        pairs = zip(self.heard_s, self.heard_s[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)


@dataclass
class ByHand:
    """The processes of a service: one coordinator after the other at one address."""

    folder: Path
    settings: tuple[str, ...]
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    url: str = ""
    address: str = ""
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.address = self.address or f"ipc://{self.folder}/hub/coordinator"

    @property
    def meeting(self) -> list[str]:
        """The flags of those who connect."""
        return [f"--connect={self.address}", *self.keys]

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        program = [sys.executable, "-P", "-m", "dovetail.launch.cli"]
        command = [*program, *arguments]
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.processes[name] = process
        return process

    def coordinate(self) -> None:
        """Start a coordinator, and wait until it listens."""
        process = self.start(
            "coordinator",
            "coordinator",
            f"--coordinator.listen={self.address}",
            f"--coordinator.journal={self.folder}/journal",
            *self.keys,
            *self.settings,
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == self.address

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a process with a signal, and wait until it has ended."""
        process = self.processes[name]
        process.send_signal(number)
        _end(process)

    def serve_http(self) -> None:
        """Start the HTTP API, and wait until it listens."""
        process = self.start("http", "http", *self.meeting, "--http.port=0", "--http.model=demo")
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()
        assert self.url.startswith("http://"), (self.folder / "http.log").read_text()

    def work(self, workers: tuple[str, ...]) -> None:
        """Start a target and a draft, with those flags that are about them."""
        for role in ("target", "draft"):
            cores = [f"--cores={sorted(os.sched_getaffinity(0))[-1]}"] if role == "draft" else []
            own = [one for one in workers if one.startswith(f"--{role}.")]
            self.start(role, "worker", f"--role={role}", *self.meeting, *cores, *own)

    def until_ready(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            # without TLS no certificates are read, which takes longer than the answer
            state = httpx.get(f"{self.url}/readyz", verify=False, trust_env=False).json()
            if state["ready"] and not state["degraded"]:
                return
            time.sleep(0.05)
        raise AssertionError(f"not ready: {state}")


def _end(process: subprocess.Popen[str]) -> None:
    process.wait(PATIENCE_S)
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def by_hand(
    folder: Path, *settings: str, workers: tuple[str, ...] = (), tcp: bool = False
) -> Iterator[ByHand]:
    """A coordinator with a journal, a target, a draft and the HTTP API. `settings`: of the
    coordinator; `workers`: flags of both workers; `tcp`: the links are tcp, with keys."""
    service = ByHand(folder, settings)
    if tcp:
        generate_keys(folder / "keys")
        service.address, service.keys = f"tcp://127.0.0.1:{free_port()}", (f"--keys={folder}/keys",)
    with ended(service):
        service.coordinate()
        service.work(workers)
        service.serve_http()
        service.until_ready()
        yield service


@contextmanager
def ended(service: ByHand) -> Iterator[None]:
    """Have all processes of a service end behind the block."""
    try:
        yield
    finally:
        for process in service.processes.values():
            process.kill()
        for process in service.processes.values():
            _end(process)


def free_port() -> int:
    """Return a port of loopback at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def together(
    service: ByHand, bodies: list[dict[str, Any]], *, headers: Any = None
) -> tuple[list[Stream], list[Thread]]:
    """Streams that run at the same time, and the threads that read them."""
    streams = [Stream(body) for body in bodies]
    asked = {"headers": headers}
    threads = [Thread(target=s.read, args=(service.url,), kwargs=asked) for s in streams]
    for thread in threads:
        thread.start()
    return streams, threads
