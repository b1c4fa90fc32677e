"""The command `journal`: the tokens/s of a service with a journal over those of one without, and
the microseconds of a write, beside those of SQLite.

Two `dovetail serve` stay up, one with a journal, and take turns at the same streams. The writes are
those of a pass over some sessions, each of which commits some tokens: in one go behind the end of a
file, as the journal writes them, and as one transaction of SQLite in WAL mode with
`synchronous=NORMAL`, which waits for the disk as seldom.
"""

import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks.gaps import PATIENCE_S, order, server, words
from benchmarks.measure import Estimate, ratio, take_turns
from benchmarks.options import Command, option, options, report
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.protocol.messages import Submit
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.journal.entries import Entry
from dovetail.runtime.journal.segments import Segments, packed
from dovetail.runtime.session.actions import Emit

MOST_SHARE = 0.02
"""The figure: the tokens/s that a journal may cost."""
WRITES = 2000
ROUND = (101, 2002, 303, 44)
"""Tokens that a session commits in a round."""


@click.command(cls=Command)
@option("--pairs", type=click.IntRange(min=1), default=60, help="Turns of each service.")
@option("--streams", type=click.IntRange(min=1), default=4, help="Streams of a turn.")
@option("--max-tokens", "tokens", type=click.IntRange(min=1), default=200, help="Tokens of each.")
@option("--inflate", default="64MiB", help="Size to which the targets are inflated.")
@options("json")
def journal(pairs: int, streams: int, tokens: int, inflate: str, as_json: bool) -> None:
    """Tokens/s with a journal over those without, and microseconds of a write."""
    plain_us, sqlite_us = writes_us(streams)
    rates: dict[str, list[float]] = {"auto": [], "off": []}
    with ExitStack() as stack, progress_bar(2 * pairs, "turns") as step:
        urls = {
            kind: stack.enter_context(
                server("small", [f"--target.inflate={inflate}", f"--coordinator.journal={kind}"])
            )
            for kind in rates
        }
        for url in urls.values():
            rate(url, streams, tokens, seed=0)

        def side(kind: str, turn: int) -> float:
            reached = rate(urls[kind], streams, tokens, seed=turn)
            step(kind)
            return reached

        for turn in range(pairs):
            turns = take_turns([partial(side, kind, turn) for kind in rates], turn)
            for those, reached in zip(rates.values(), turns, strict=True):
                those.append(reached)
    share = ratio(rates["auto"], rates["off"])
    found = {
        "tokens_per_s": {kind: statistics.median(those) for kind, those in rates.items()},
        "ratio": share.as_json(),
        "write_us": {"journal": plain_us, "sqlite": sqlite_us},
    }
    report(found, as_json, lambda: show(found, share))


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


def writes_us(sessions: int) -> tuple[float, float]:
    """Return the microseconds of the writes of a round of so many sessions: as the journal has it,
    and as SQLite has it."""
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
    emit = Emit(ROUND, len(ROUND) - 1, "some text")
    rounds = [
        [entry.committed(emit, [0.5] * len(ROUND)) for entry in entries] for _ in range(WRITES)
    ]
    with tempfile.TemporaryDirectory() as folder:
        segments = Segments(Path(folder) / "journal")
        segments.begin()
        began_s = time.perf_counter()
        for records in rounds:
            segments.append(b"".join(map(packed, records)))
        plain_s = time.perf_counter() - began_s
        segments.close()
        with closing(sqlite3.connect(f"{folder}/journal.db", isolation_level=None)) as base:
            base.execute("pragma journal_mode=wal")
            base.execute("pragma synchronous=normal")
            base.execute("create table records (number integer primary key, record blob)")
            began_s = time.perf_counter()
            for records in rounds:
                base.execute("begin")
                base.executemany("insert into records (record) values (?)", zip(records))
                base.execute("commit")
            sqlite_s = time.perf_counter() - began_s
    return plain_s / WRITES * 1e6, sqlite_s / WRITES * 1e6


def show(found: Mapping[str, Any], share: Estimate) -> None:
    """Print the table, the ratio with its 95 % interval, and the microseconds of a write."""
    rates, writes = found["tokens_per_s"], found["write_us"]
    print_table(
        ("", "tokens/s"),
        [("with a journal", rates["auto"]), ("without", rates["off"])],
    )
    least = 1 - MOST_SHARE
    told = "reached" if share.low >= least else "missed" if share.high < least else "not decided"
    click.echo(f"with a journal over without: {share}; at least {least:.2f} wanted: {told}")
    click.echo(
        f"a write of a round: {writes['journal']:.1f} us; by SQLite {writes['sqlite']:.1f} us"
    )
