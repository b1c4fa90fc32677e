"""The command `losses`: how soon a reply goes on when a worker of it is lost, and how soon a worker
that is stopped is missed.

Real processes and signals. A draft is killed in the middle of a reply, and a target beside which
another one waits; what the client sees is the time from the signal to the next tokens, with a round
of the reply beside it, and with what the other target takes to read as many tokens. A target that
is stopped (SIGSTOP) has no reply: it is missed when the coordinator does not know it any more.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import click

from benchmarks.options import Command, option, options, report
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.launch.processes.stack import (
    layout_of,
    start_stack,
    wait_until_ready,
    worker_arguments,
)
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.protocol.errors import DovetailError
from dovetail.protocol.messages import Emitted, Failed, Finished, Role
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.inflated import inflated

TREE = TreeSettings(policy="dynamic", insist=True, gamma=15, depth=8, width=4)
BEFORE = 24
"""Tokens of a reply after which something happens; rounds are timed until then."""
TOKENS = 160
LOOK_S = 0.005
PATIENCE_S = 60.0
PROMPT = "Could you tell me a story about a young hedgehog who lost his red balloon?"


@click.command(cls=Command)
@option(
    "--draft", default="small", help="Draft of the embedded pair: small, dovetail, eagle or ngram."
)
@option("--inflate", default="256MiB", help="Size to which the target is inflated.")
@option("--times", type=click.IntRange(min=1), default=10, help="Losses of each kind.")
@options("json")
def losses(draft: str, inflate: str, times: int, as_json: bool) -> None:
    """Time to the next token when a draft or a target is killed, and until a stopped worker is
    missed."""
    with house(draft, inflate) as there, progress_bar(3 * times, "losses") as step:
        found = {name: [lose(there, step) for _ in range(times)] for name, lose in KINDS.items()}
    report(
        {name: [loss.as_json() for loss in rows] for name, rows in found.items()},
        as_json,
        lambda: show(found),
    )


@dataclass(frozen=True)
class Loss:
    """Seconds from a signal to what follows, and what they are to be compared with."""

    after_s: float
    round_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def beyond_s(self) -> float:
        """More than the round, or the reading of the log, that it takes anyhow."""
        return self.after_s - max(self.round_s, self.prefill_s)

    def as_json(self) -> dict[str, float]:
        return {
            "after_ms": 1e3 * self.after_s,
            "round_ms": 1e3 * self.round_s,
            "prefill_ms": 1e3 * self.prefill_s,
            "beyond_ms": 1e3 * self.beyond_s,
        }


@dataclass
class House:
    """Two targets and a draft, started again when they are lost, and a client for replies and one
    that looks on."""

    supervisor: Supervisor
    configuration: Configuration
    address: str
    client: Client
    onlooker: Client
    workers: list[Child]
    chance: random.Random

    def start(self, role: Role) -> None:
        """A worker of this role more; returns when it is registered."""
        arguments = worker_arguments(
            self.configuration, role, self.address, layout_of(self.configuration.settings)
        )
        child = self.supervisor.start(f"{role} worker", arguments)
        self.workers.append(child)
        self.until(lambda: child.process.pid in self.pids(role))

    def pids(self, role: Role) -> dict[int, int]:
        """The sessions of each worker of a role, by its number."""
        return {
            worker.pid: worker.sessions
            for worker in self.onlooker.status().workers
            if role in worker.roles
        }

    def child(self, pid: int) -> Child:
        return next(child for child in self.workers if child.process.pid == pid)

    def lose(self, child: Child) -> None:
        self.workers.remove(child)
        self.supervisor.end([child])

    def until(self, condition: Callable[[], bool]) -> float:
        """Wait until a condition is true, and return when that was."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise DovetailError(f"what was waited for did not happen within {PATIENCE_S:g} s")
            time.sleep(LOOK_S)
        return time.monotonic()


@contextmanager
def house(draft: str, inflate: str) -> Iterator[House]:
    """Everything is registered."""
    configuration = configure(
        flags={"draft.device": "cpu", **inflated(inflate, draft)},
        environment={},
    )
    with Supervisor() as supervisor:
        stack = start_stack(supervisor, configuration)
        wait_until_ready(supervisor, stack)
        with stack.connect() as client, stack.connect() as onlooker:
            there = House(
                supervisor,
                configuration,
                stack.address,
                client,
                onlooker,
                [*stack.workers],
                random.Random(1),
            )
            there.start("target")
            yield there


def interrupted(there: House, interrupt: Callable[[], float]) -> tuple[float, float, int]:
    """Seconds from an interruption of a reply to its next tokens; a round of it, the median; the
    tokens of its log then."""
    request = there.client.submit(
        turns=[PROMPT],
        max_tokens=TOKENS,
        seed=there.chance.randrange(1 << 30),
        tree=TREE,
        sampling=Sampling(min_tokens=TOKENS),
    )
    told, times = 0, list[float]()
    while told < BEFORE:
        told += len(next_tokens(there, request))
        times.append(time.monotonic())
    gap_s = median(after - before for before, after in pairwise(times))
    time.sleep(there.chance.uniform(0.0, gap_s))
    while (reply := there.client.receive(0.0)) is not None:  # what had been said by then
        told += len(reply.tokens) if isinstance(reply, Emitted) else 0
    lost_s = interrupt()
    next_tokens(there, request)
    after_s = time.monotonic() - lost_s
    finished = there.client.complete(request)
    return after_s, gap_s, finished.result.prompt_tokens + told


def next_tokens(there: House, request: int) -> tuple[int, ...]:
    reply = there.client.receive(PATIENCE_S)
    if isinstance(reply, Failed):
        raise DovetailError(reply.text)
    if not isinstance(reply, Emitted) or reply.request != request:
        raise DovetailError(f"the reply was over before its worker was: {type(reply).__name__}")
    return reply.tokens


def kill(child: Child) -> float:
    at_s = time.monotonic()
    child.process.kill()
    return at_s


def lose_draft(there: House, step: Callable[[str], None]) -> Loss:
    """The draft is killed in the middle of a reply."""
    draft = there.child(next(iter(there.pids("draft"))))
    after_s, round_s, _ = interrupted(there, lambda: kill(draft))
    there.lose(draft)
    there.start("draft")
    step("draft killed")
    return Loss(after_s, round_s)


def lose_target(there: House, step: Callable[[str], None]) -> Loss:
    """The target of a reply is killed, and another one is there; what that takes to read as many
    tokens is measured behind it."""
    lost: list[Child] = []

    def interrupt() -> float:
        lost.append(there.child(max(there.pids("target").items(), key=lambda item: item[1])[0]))
        return kill(lost[0])

    after_s, round_s, length = interrupted(there, interrupt)
    there.lose(lost[0])
    tokens = [there.chance.randrange(2, 4000) for _ in range(length)]
    reading: Finished = there.client.complete(
        there.client.submit(tokens=tokens, max_tokens=1, seed=0, speculate=False)
    )
    there.start("target")
    step("target killed")
    return Loss(after_s, round_s, reading.result.prefill_s)


def stop_target(there: House, step: Callable[[str], None]) -> Loss:
    """A target is stopped; how long until the coordinator knows it no more."""
    pid = there.chance.choice([*there.pids("target")])
    time.sleep(there.chance.uniform(0.0, 0.5))
    child = there.child(pid)
    stopped_s = time.monotonic()
    child.process.send_signal(signal.SIGSTOP)
    missed_s = there.until(lambda: pid not in there.pids("target"))
    child.process.send_signal(signal.SIGCONT)
    there.until(lambda: pid in there.pids("target"))
    step("target stopped")
    return Loss(missed_s - stopped_s)


KINDS = {"draft killed": lose_draft, "target killed": lose_target, "target stopped": stop_target}


def show(found: dict[str, list[Loss]]) -> None:
    titles = (
        "what",
        "next token or missed after, ms: median",
        "most",
        "a round",
        "reading the log",
        "beyond: median",
        "most",
    )
    print_table(titles, [_cells(name, rows) for name, rows in found.items()])


def _cells(name: str, rows: list[Loss]) -> tuple[str, ...]:
    def milliseconds(values: list[float]) -> str:
        return f"{1e3 * median(values):.0f}"

    after, beyond = [row.after_s for row in rows], [row.beyond_s for row in rows]
    own = milliseconds([row.round_s for row in rows]), milliseconds([row.prefill_s for row in rows])
    return (
        name,
        milliseconds(after),
        f"{1e3 * max(after):.0f}",
        *own,
        milliseconds(beyond),
        f"{1e3 * max(beyond):.0f}",
    )
