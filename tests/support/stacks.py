"""A coordinator and its workers as real processes, and requests to them."""

import atexit
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from dovetail.launch.processes import nursery
from dovetail.launch.processes.forked import Talk
from dovetail.launch.processes.stack import (
    POLL_S,
    Played,
    Stack,
    begin_stack,
    layout_of,
    wait_until_ready,
    worker_arguments,
)
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.settings.configure import configure
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Failed, Finished, Role
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.patience import PATIENCE_S

PROMPTS: list[list[str]] = [
    json.loads(line)["turns"]
    for line in (DEMO_FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
"""The shipped ones, each as its turns."""


def environment() -> dict[str, str]:
    """The environment of processes that a test starts."""
    return {name: one for name, one in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


class Nursery:
    """A process with imports of its own that forks others until this one ends, since importing
    takes most of a start; they inherit its environment."""

    def __init__(
        self, *modules: str, environment: Mapping[str, str], stdout: int = subprocess.DEVNULL
    ) -> None:
        self.environment, self.talk = environment, Talk()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", nursery.__name__, *modules, f"--parent={os.getpid()}"],
            stdin=self.talk.theirs.fileno(),
            stdout=stdout,
            text=True,
            env=environment,
        )
        atexit.register(self._end)
        assert self.talk.begun()

    def _end(self) -> None:
        self.talk.close()
        self.process.communicate(timeout=PATIENCE_S)


@functools.cache
def nursery_of_workers() -> Nursery:
    return Nursery(*nursery.MODULES, nursery.PROVING, environment=environment())


class Forking(Supervisor):
    """Forks workers from one process for all tests, unless a test has changed the environment."""

    def start(self, name: str, arguments: Sequence[str], **how: Any) -> Child:
        alone = arguments[0] != "worker" or "--draft.kind=ngram" in arguments  # that needs no torch
        if alone or nursery_of_workers().environment != environment():
            return super().start(name, arguments, **how)
        return self._own(name, partial(nursery_of_workers().talk.fork, arguments))

    def start_forked(self, _: object, commands: Mapping[str, Sequence[str]]) -> dict[str, Child]:
        return {name: self.start(name, one, asks=True) for name, one in commands.items()}

    def start_nursery(self, modules: Sequence[str] = ()) -> Any:
        return modules  # see `start_forked`


class Another(Protocol):
    """Starts one more worker of a role, with the settings of those that are there."""

    def __call__(self, role: Role | Played, *, cores: str | None = None) -> Child:
        """`cores`: those that it runs on; None: those of its role; empty: any, and which ones it
        tells nobody."""


@contextmanager
def growing(flags: dict[str, str]) -> Iterator[tuple[Stack, Client, Another]]:
    """Processes with these settings that are ready, a client of them, and how to start more.

    Unless the settings say otherwise a reply outlives a worker that misses its heartbeats, as one
    may on a machine that is loaded: it comes back by itself.
    """
    with Forking() as supervisor:
        stack = begin_stack(
            supervisor, configure(flags={"coordinator.recovery_s": "60", **flags}, environment={})
        )()
        wait_until_ready(supervisor, stack)
        layout = layout_of(stack.configuration.settings)

        def another(role: Role | Played, *, cores: str | None = None) -> Child:
            arguments = worker_arguments(stack.configuration, role, stack.address, layout)
            if cores is not None:
                bound = ("--cores", "--memory-nodes")
                arguments = [one for one in arguments if not one.startswith(bound)]
                arguments += [f"--cores={cores}"] if cores else []
            return supervisor.start(f"another {role} worker", arguments)

        with stack.connect() as client:
            yield stack, client, another


@contextmanager
def started(flags: dict[str, str]) -> Iterator[tuple[Stack, Client]]:
    """Processes with these settings that are ready, and a client of them."""
    with growing(flags) as (stack, client, _):
        yield stack, client


def wait_for(client: Client, child: Child) -> Child:
    """Wait until a worker is registered that was started; looks are counted, so that it costs
    nothing where all processes are stopped meanwhile."""
    for _ in range(round(PATIENCE_S / POLL_S)):
        if any(worker.pid == child.process.pid for worker in client.status().workers):
            return child
        assert not child.ended, child.last_words()
        time.sleep(POLL_S)
    raise AssertionError(f"it never registered: {child.last_words()}")


@contextmanager
def running(flags: dict[str, str]) -> Iterator[Client]:
    """A client of processes with these settings."""
    with started(flags) as (_, client):
        yield client


def submit(
    client: Client,
    turns: Sequence[str],
    *,
    sampling: Sampling,
    tokens: int,
    seed: int = 0,
    tree: TreeSettings | None = None,
) -> int:
    """The number of a request that is drafted for with this tree; without one it is decoded by the
    target alone."""
    return client.submit(
        turns=turns,
        sampling=sampling,
        max_tokens=tokens,
        seed=seed,
        tree=tree or TreeSettings(),
        speculate=tree is not None,
    )


def complete_all(client: Client, requests: Sequence[int]) -> list[Finished]:
    """The ends of requests that run side by side, in the order of `requests`; `RequestError` for
    the first that fails."""
    ends: dict[int, Finished] = {}
    while len(ends) < len(requests):
        reply = client.receive(PATIENCE_S)
        assert reply is not None, (
            f"nothing was heard of {set(requests) - set(ends)} for {PATIENCE_S:g} s"
        )
        if isinstance(reply, Failed):
            raise RequestError(reply.code, reply.text)
        if isinstance(reply, Finished):
            ends[reply.request] = reply
    return [ends[request] for request in requests]
