"""The command `journal`: the tokens/s of a service with a journal over those of one without, the
processor time of coordinator and HTTP API a token, and the microseconds of a write.

Two `dovetail serve`, one with a journal, take turns at the same streams, and are started anew some
times, since where the pages of a process lie makes it slower or faster to its end. The writes are
those of a pass over some sessions, each of which commits some tokens: one transaction.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
import psutil

from benchmarks.gaps import PATIENCE_S, order, server, words
from benchmarks.measure import Estimate, ratio, take_turns
from benchmarks.options import Command, option, options, report
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.protocol.messages import Submit
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.journal.database import Database
from dovetail.runtime.journal.entries import Entry
from dovetail.runtime.session.actions import Emit

MOST_SHARE = 0.02
"""The figure: the tokens/s that a journal may cost."""
WRITES = 2000
ROUND = (101, 2002, 303, 44)
"""Tokens that a session commits in a round."""


@click.command(cls=Command)
@option("--pairs", type=click.IntRange(min=1), default=15, help="Turns of each service, a start.")
@option("--starts", type=click.IntRange(min=1), default=4, help="Starts of each service.")
@option("--streams", type=click.IntRange(min=1), default=4, help="Streams of a turn.")
@option("--max-tokens", "tokens", type=click.IntRange(min=1), default=200, help="Tokens of each.")
@option("--inflate", default="64MiB", help="Size to which the targets are inflated.")
@options("json")
def journal(
    pairs: int, starts: int, streams: int, tokens: int, inflate: str, as_json: bool
) -> None:
    """Tokens/s with a journal over those without, processor time, microseconds of a write."""
    write_us = writes_us(streams)
    sides = {kind: Side() for kind in ("auto", "off")}
    with progress_bar(2 * pairs * starts, "turns") as step:
        for start in range(starts):
            with ExitStack() as stack:
                for kind, side in sides.items():
                    flags = [f"--coordinator.journal={kind}"]
                    side.url = stack.enter_context(server("small", flags, inflate))
                    rate(side.url, streams, tokens, seed=0)
                for turn in range(start * pairs, (start + 1) * pairs):
                    turns = [partial(side.take, streams, tokens, turn) for side in sides.values()]
                    take_turns(turns, turn)
                    step("")
                    step("")
    with_it, without = sides.values()
    share = ratio(with_it.rates, without.rates)
    found = {
        "tokens_per_s": {kind: statistics.median(side.rates) for kind, side in sides.items()},
        "ratio": share.as_json(),
        "processor_us": {
            kind: statistics.median(side.processor_us) for kind, side in sides.items()
        },
        "write_us": write_us,
    }
    report(found, as_json, lambda: show(found, share))


@dataclass
class Side:
    """One of the two services, and what was measured of it."""

    url: str = ""
    rates: list[float] = field(default_factory=list)
    """Tokens/s of its turns."""
    processor_us: list[float] = field(default_factory=list)
    """Processor time of its coordinator and its HTTP API a token, in these."""

    def take(self, streams: int, tokens: int, turn: int) -> float:
        """Take its turn; return the tokens/s."""
        front, began_s = front_of(self.url), time.monotonic()
        before_s = processor_s(front)
        reached = rate(self.url, streams, tokens, seed=turn)
        written = reached * (time.monotonic() - began_s)
        self.rates.append(reached)
        self.processor_us.append(1e6 * (processor_s(front) - before_s) / written)
        return reached


def front_of(url: str) -> list[psutil.Process]:
    """Return the coordinator and the HTTP API of the service at this address: who listens there,
    and who has bound the coordinator's socket."""
    port = urlsplit(url).port
    (pid,) = {
        one.pid
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid
    }
    http = psutil.Process(pid)
    service = http.parent()
    assert service is not None
    (coordinator,) = [
        process
        for process in service.children(recursive=True)
        if any(str(one.laddr).endswith("/coordinator") for one in process.net_connections("unix"))
    ]
    return [coordinator, http]


def processor_s(processes: Sequence[psutil.Process]) -> float:
    """Return the processor time that these have taken so far."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def rate(url: str, streams: int, tokens: int, *, seed: int) -> float:
    """Return the tokens/s of so many streams at the same time."""
    done: list[int] = []

    def read(number: int) -> None:
        body = {**order(words(16, 100 * seed + number), tokens), "seed": number}
        reply = httpx.post(
            f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False
        ).json()
        done.append(reply["usage"]["completion_tokens"])

    began_s = time.monotonic()
    threads = [threading.Thread(target=read, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.monotonic() - began_s)


def writes_us(sessions: int) -> float:
    """Return the microseconds of the write of a round of this many sessions."""
    entries = [
        Entry(
            Submit(
                epoch=0,
                request=0,
                tokens=(1,),
                sampling=Sampling(),
                tree=TreeSettings(),
                max_tokens=1 << 20,
                ticket=f"chatcmpl-{number:032x}/0",
            ),
            "",
        )
        for number in range(sessions)
    ]
    emit = Emit(ROUND, len(ROUND) - 1, "some text".__str__)
    rounds = [
        [entry.committed(emit, [0.5] * len(ROUND)) for entry in entries] for _ in range(WRITES)
    ]
    with tempfile.TemporaryDirectory() as folder:
        base = Database(Path(folder) / "journal")
        began_s = time.perf_counter()
        for number, records in enumerate(rounds):
            base.write([(reply, number, record) for reply, record in enumerate(records)])
        taken_s = time.perf_counter() - began_s
        base.close()
    return taken_s / WRITES * 1e6


def show(found: Mapping[str, Any], share: Estimate) -> None:
    """Print the table, the ratio with its 95 % interval, and the microseconds of a write."""
    rates, processor_us = found["tokens_per_s"], found["processor_us"]
    print_table(
        ("", "tokens/s", "us of coordinator and HTTP API a token"),
        [
            (words, f"{rates[kind]:.1f}", f"{processor_us[kind]:.0f}")
            for words, kind in (("with a journal", "auto"), ("without", "off"))
        ],
    )
    least = 1 - MOST_SHARE
    told = "reached" if share.low >= least else "missed" if share.high < least else "not decided"
    click.echo(f"with a journal over without: {share}; at least {least:.2f} wanted: {told}")
    click.echo(f"a write of a round: {found['write_us']:.1f} us")
