"""A coordinator with scripted workers in a thread, and `dovetail http` before it as a real process:
what clients of the API see, without a model."""

import contextlib
import functools
import json
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import psutil

from dovetail.launch.processes.forked import Forked
from dovetail.protocol.links import open_hub, open_link
from dovetail.protocol.messages import VocabularyFacts
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.protocol.vocabulary import read_vocabulary, vocabulary_digest
from dovetail.runtime.engine.coordinator import DEFAULTS, Coordinator
from dovetail.runtime.engine.loop import PROBE_EVERY_S
from dovetail.runtime.journal.journal import Journal
from support.patience import PATIENCE_S
from support.scripted import (
    END,
    VOCABULARY,
    ScriptedDraft,
    ScriptedTarget,
    ScriptedWorker,
    tokenizer_bytes,
)
from support.stacks import Nursery, environment

SERVER = "dovetail.launch.commands.http"
"""The module that imports all that a server needs."""
TEMPLATE = (
    "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}{% if "
    "add_generation_prompt %}w2{% endif %}"
)
"""The messages of a chat, each after w1; w2 begins the reply."""
CHAT = (1, 5, 6, 2)
"""The tokens of the message "w5 w6" with it."""


class Backend:
    """A coordinator and its workers, in a thread that `still` stops for as long as a test looks."""

    def __init__(
        self,
        *,
        target: bool = True,
        draft: bool = True,
        address: str = "ipc",
        settings: CoordinatorSettings = DEFAULTS,
        journal: Journal | None = None,
    ) -> None:
        self.hub = open_hub(address)
        self.address = self.hub.address
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.coordinator = Coordinator(
            self.hub,
            later=lambda seconds, action: self._later.append((time.monotonic() + seconds, action)),
            settings=settings,
            journal=journal,
        )
        self.workers: list[ScriptedWorker] = []
        self.held = False
        """The workers rest: what they are asked stays undone."""
        self.token_s = 0.0
        """Seconds that the target thinks about a command."""
        self._lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if target:
            self.add(ScriptedTarget, "target")
        if draft:
            self.add(ScriptedDraft, "draft")

    def add(
        self,
        kind: type[ScriptedWorker],
        role: str,
        *,
        prefix: str = "w",
        template: str = TEMPLATE,
        tokenizer: bytes = b"",
        **changes: object,
    ) -> ScriptedWorker:
        """Register a worker whose vocabulary has this prefix or comes from a tokenizer."""
        tokenizer = tokenizer or tokenizer_bytes(prefix=prefix)
        facts = VocabularyFacts(
            digest=vocabulary_digest(read_vocabulary(tokenizer)),
            size=VOCABULARY,
            end=(END,),
            template=template,
        )
        worker = kind(open_link(self.address, role=role), role, epoch=100 + len(self.workers))
        worker.register(tokenizer=tokenizer, vocabulary=facts, **changes)
        with self._lock:
            self.workers.append(worker)
        self.until(lambda: worker.coordinator_epoch != -1)
        return worker

    @contextlib.contextmanager
    def still(self) -> Iterator[Coordinator]:
        with self._lock:
            yield self.coordinator

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self._lock:
                if condition():
                    return
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.002)

    def until_idle(self) -> None:
        """Wait until nobody decodes anything, and nobody waits for it."""
        self.until(
            lambda: self.coordinator.idle and not any(worker.logs for worker in self.workers)
        )

    @property
    def sessions(self) -> int:
        return self.coordinator.report().sessions

    def lose(self, worker: ScriptedWorker) -> None:
        with self._lock:
            self.workers.remove(worker)
            worker.link.close()

    def die(self) -> None:
        """The coordinator goes without a word, as one that is killed."""
        self._ended = True
        self._thread.join()
        self.hub.close()
        for worker in self.workers:
            worker.link.close()

    def _run(self) -> None:
        ticked_s = 0.0
        while not self._ended:
            with self._lock:
                self.coordinator.look_around()
                self.coordinator.pump()
                if (now_s := time.monotonic()) - ticked_s >= PROBE_EVERY_S:
                    self.coordinator.tick()
                    ticked_s = now_s
                self._act(now_s)
                busy = 0 if self.held else sum(worker.step() for worker in self.workers)
            if not busy:
                select.select([self.hub.fileno()], [], [], 0.001)
            elif self.token_s:
                time.sleep(self.token_s)

    def _act(self, now_s: float) -> None:
        """Do what is due by now."""
        due = [action for due_s, action in self._later if due_s <= now_s]
        self._later = [(due_s, action) for due_s, action in self._later if due_s > now_s]
        for action in due:
            action()

    def close(self) -> None:
        """End them all; a second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self._thread.join()
        self.coordinator.end()
        for worker in self.workers:
            worker.link.close()
        self.hub.close()


@contextlib.contextmanager
def backend(**options: Any) -> Iterator[Backend]:
    house = Backend(**options)
    try:
        yield house
    finally:
        house.close()


class Api:
    """A running `dovetail http`, and a client of it."""

    def __init__(self, process: Forked, url: str) -> None:
        self.process, self.url = process, url
        # certificates, which nobody needs here, would take longer to read than most tests do
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False, verify=False)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def cpu_s(self) -> float:
        """Return the processor time that the server has taken so far, which a busy machine does not
        lengthen."""
        user, system, *_ = psutil.Process(self.process.pid).cpu_times()
        return float(user + system)

    def chat(self, content: str = "w5 w6", **fields: Any) -> dict[str, Any]:
        """A whole chat completion of one message."""
        return self.ask(
            "/v1/chat/completions", messages=[{"role": "user", "content": content}], **fields
        )

    def complete(self, prompt: Any = "w5 w6", **fields: Any) -> dict[str, Any]:
        return self.ask("/v1/completions", prompt=prompt, **fields)

    def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        reply = self.client.post(path, json=fields)
        assert reply.status_code == 200, reply.text
        value: dict[str, Any] = reply.json()
        return value

    def refusal(self, path: str, body: Mapping[str, Any], status: int = 400) -> dict[str, Any]:
        """The error object of a request that is refused."""
        reply = self.client.post(path, json=body)
        assert reply.status_code == status, reply.text
        error: dict[str, Any] = reply.json()["error"]
        return error

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """The events of a streamed completion, the last one "[DONE]" if it is."""
        with self.client.stream("POST", path, json={**fields, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            return [*events(reply)]

    def metric(self, name: str) -> float:
        """The value of a metric without labels, or of the first with them."""
        lines = self.client.get("/metrics").text.splitlines()
        return next(
            float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))
        )


def events(reply: httpx.Response) -> Iterator[Any]:
    for line in reply.iter_lines():
        if line and not line.startswith(":"):  # a comment
            data = line.removeprefix("data: ")
            assert line.startswith("data: ")
            yield data if data == "[DONE]" else json.loads(data)


@functools.cache
def nursery_of_servers() -> Nursery:
    """What servers write to stdout is read from there."""
    own = {name: one for name, one in environment().items() if not name.startswith("DOVETAIL_")}
    return Nursery(SERVER, environment=own, stdout=subprocess.PIPE)


@contextlib.contextmanager
def api(address: str, *flags: str) -> Iterator[Api]:
    """`dovetail http` for the coordinator at this address, on a free port."""
    stdout = nursery_of_servers().process.stdout
    assert stdout is not None
    with open(2, "wb", closefd=False) as stderr:
        process = nursery_of_servers().talk.fork(
            ["http", f"--connect={address}", "--http.port=0", *flags], stderr
        )
    try:
        while not select.select([stdout], [], [], 0.1)[0]:
            assert process.poll() is None, process.returncode
        url = stdout.readline().strip()
        assert url.startswith("http://"), url
        served = Api(process, url)
        with contextlib.closing(served.client):  # an open one would fail the next test too
            yield served
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()
