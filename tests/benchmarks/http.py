"""The command `http`: what the HTTP process costs, and whether many connections or many that leave
harm the others.

A real server before a coordinator whose workers are scripted, so that nothing here is the time of a
model: the target thinks for a while about each pass, as a model would. Text that comes within the
coordinator's patience is told in one piece.
"""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import click
import psutil

from benchmarks.measure import Estimate, estimate, ratio
from benchmarks.options import Command, option, options, report, verdict
from dovetail.launch.console.terminal import print_table, progress_bar
from support.scripted import ScriptedDraft, ScriptedTarget
from support.web import Api, Backend, api, backend

TOKEN_US, FIRST_TOKEN = 100.0, 1.2
"""The figures: microseconds of the HTTP process for a streamed token, and the share of a healthy
client's time to its first token among many others."""
CONTEXT = 8192
TOKEN_S = 0.004
"""The least time of a pass over the sessions that wait."""
OTHER_CHUNKS = 3
"""Chunks of a stream that tell no token: the one that begins it, the one that ends it, and
[DONE]."""
DRIP_S = 1.0
AT_ONCE = 32
PATIENCE_S = 60.0
CHATS = "/v1/chat/completions"


@click.command(cls=Command)
@option(
    "--tokens",
    type=click.IntRange(min=10),
    default=1000,
    help="Tokens of each of the streams whose cost is measured.",
)
@option("--streams", type=click.IntRange(min=1), default=4, help="Streams at a time.")
@option(
    "--connections",
    type=click.IntRange(min=2),
    default=1000,
    help="Connections, half of them idle, half sending a byte a second.",
)
@option(
    "--requests",
    type=click.IntRange(min=1),
    default=10_000,
    help="Requests that come and, by chance, leave.",
)
@options("pairs", "json")
def http(
    tokens: int, streams: int, connections: int, requests: int, pairs: int, as_json: bool
) -> None:
    """Measure what the HTTP process costs a token, what others cost a healthy client, and what is
    left of requests that come and go."""
    with (
        progress_bar(2 * pairs + requests, "steps") as step,
        backend(target=False, draft=False) as house,
    ):
        for kind, role in ((ScriptedTarget, "target"), (ScriptedDraft, "draft")):
            house.add(kind, role, limits={"context": CONTEXT, "sessions": 1024})
        with api(
            house.address,
            "--http.receive_s=3600",
            f"--http.connections={connections + 1000}",
            "--policy=dynamic",
            "--tree.insist=true",
        ) as server:
            server.chat(max_tokens=2)
            drafted, plain, alone, among = [], [], [], []
            for _ in range(pairs):
                step("streams")
                drafted.append(stream_cost(server, house, tokens, streams, speculate=True))
                plain.append(stream_cost(server, house, tokens, streams, speculate=False))
            for _ in range(pairs):
                step("among others")
                by_itself, beside = first_tokens(server, connections)
                alone.append(by_itself)
                among.append(beside)
            churned = churn(server, house, requests, step)
    found = Found(
        Cost.of(drafted),
        Cost.of(plain),
        ratio(among, alone),
        estimate([1e3 * s for s in alone]),
        churned,
    )
    report(found.as_json(), as_json, lambda: found.show(connections))


@dataclass(frozen=True)
class Cost:
    """Microseconds of the HTTP process for a streamed token, and how many tokens a chunk told."""

    token_us: Estimate
    tokens_a_chunk: float

    @classmethod
    def of(cls, turns: Sequence[tuple[float, float]]) -> "Cost":
        return cls(
            estimate([us for us, _ in turns]), sum(tokens for _, tokens in turns) / len(turns)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "token_us": self.token_us.as_json(),
            "tokens_a_chunk": self.tokens_a_chunk,
            "holds": self.token_us.holds(TOKEN_US),
        }


@dataclass(frozen=True)
class Churned:
    """The HTTP process before and after requests that came and went, and what the workers still
    held."""

    requests: int
    left: int
    files: tuple[int, int]
    rss_mb: tuple[float, float, float]
    """Memory at first, after a tenth of the requests, and at last."""
    sessions: int
    seconds: float

    @property
    def clean(self) -> bool:
        return self.files[1] <= self.files[0] and self.sessions == 0


@dataclass(frozen=True)
class Found:
    drafted: Cost
    plain: Cost
    first_token: Estimate
    first_token_ms: Estimate
    churned: Churned

    def as_json(self) -> dict[str, Any]:
        return {
            "drafted": self.drafted.as_json(),
            "plain": self.plain.as_json(),
            "first_token": self.first_token.as_json(),
            "first_token_ms": self.first_token_ms.as_json(),
            "first_token_holds": self.first_token.holds(FIRST_TOKEN),
            "churn": {**self.churned.__dict__, "clean": self.churned.clean},
        }

    def show(self, connections: int) -> None:
        costs = (
            (
                f"CPU of HTTP a streamed token, {cost.tokens_a_chunk:.1f} a chunk, µs",
                cost.token_us,
                TOKEN_US,
            )
            for cost in (self.drafted, self.plain)
        )
        rows = [
            *((name, str(found), *verdict(found, most)) for name, found, most in costs),
            (
                f"time to first token among {connections}, share",
                str(self.first_token),
                *verdict(self.first_token, FIRST_TOKEN),
            ),
            ("time to first token alone, ms", str(self.first_token_ms), "-", "-"),
        ]
        print_table(("", "median (95 %)", "figure", "holds"), rows)
        done = self.churned
        click.echo(
            f"{done.requests} requests, {done.left} of which left, in {done.seconds:.0f} s: "
            f"files {done.files[0]} -> {done.files[1]}, ",
            nl=False,
        )
        click.echo(
            f"RSS {' -> '.join(f'{mb:.0f}' for mb in done.rss_mb)} MB, sessions left "
            f"{done.sessions}"
        )


def stream_cost(
    server: Api, house: Backend, tokens: int, streams: int, *, speculate: bool
) -> tuple[float, float]:
    """Microseconds of the HTTP process for a token of streams that run beside each other, and how
    many tokens a chunk told."""
    process, house.token_s = psutil.Process(server.process.pid), TOKEN_S
    before = process.cpu_times()
    chunks = asyncio.run(_streams(server, tokens, streams, speculate))
    after, house.token_s = process.cpu_times(), 0.0
    return (after.user + after.system - before.user - before.system) * 1e6 / (
        tokens * streams
    ), tokens * streams / chunks


async def _streams(server: Api, tokens: int, streams: int, speculate: bool) -> int:
    """The chunks with text that were told."""
    told = await asyncio.gather(
        *(visit(server, tokens, None, speculate=speculate) for _ in range(streams))
    )
    return sum(told) - OTHER_CHUNKS * streams


def first_tokens(server: Api, connections: int, times: int = 20) -> tuple[float, float]:
    """Median seconds to the first token of a client that is alone, and of one among many others."""
    alone = first_token(server, times)
    with others(server, connections):
        return alone, first_token(server, times)


def first_token(server: Api, times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        with server.client.stream("POST", CHATS, json=_body(2)) as reply:
            lines = reply.iter_lines()
            next(lines)
            seconds.append(time.perf_counter() - began)
            for _ in lines:
                pass
    return estimate(seconds).median


@contextmanager
def others(server: Api, connections: int) -> Iterator[None]:
    """Half of them say nothing, half send a header a byte a second."""
    ended = threading.Event()
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(server.address))
            for _ in range(connections)
        ]
        for connection in opened[::2]:
            connection.sendall(b"GET /health HTTP/1.1\r\nx: ")

        def drip() -> None:
            while not ended.wait(DRIP_S):
                for connection in opened[::2]:
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def churn(server: Api, house: Backend, requests: int, step: Callable[[str], None]) -> Churned:
    """Have requests come and, by chance, leave."""
    process, began = psutil.Process(server.process.pid), time.monotonic()
    files, rss, chance = process.num_fds(), [process.memory_info().rss / 1e6], random.Random(1)
    left = asyncio.run(_churn(server, max(1, requests // 10), chance, step))
    rss.append(process.memory_info().rss / 1e6)
    left += asyncio.run(_churn(server, requests - max(1, requests // 10), chance, step))
    house.until_idle()
    deadline = time.monotonic() + PATIENCE_S
    while process.num_fds() > files and time.monotonic() < deadline:
        time.sleep(0.1)
    rss.append(process.memory_info().rss / 1e6)
    held = sum(len(worker.logs) for worker in house.workers) + house.sessions
    return Churned(
        requests,
        left,
        (files, process.num_fds()),
        (rss[0], rss[1], rss[2]),
        held,
        time.monotonic() - began,
    )


async def _churn(
    server: Api, requests: int, chance: random.Random, step: Callable[[str], None]
) -> int:
    """Have so many requests come and go; return how many of them left before they had their
    answer."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(tokens: int, leave: int | None, stream: bool) -> int:
        async with free:
            await visit(server, tokens, leave, stream=stream)
            step("come and gone")
            return leave is not None

    plans = [
        (
            chance.randint(1, 60),
            chance.choice((None, 0, chance.randint(1, 5))),
            chance.random() < 0.7,
        )
        for _ in range(requests)
    ]
    return sum(await asyncio.gather(*(one(*plan) for plan in plans)))


async def visit(
    server: Api, tokens: int, leave: int | None, *, stream: bool = True, speculate: bool = True
) -> int:
    """Ask for a reply, and read it to its end or leave after so many reads; the chunks that were
    read."""
    reader, writer = await asyncio.open_connection(*server.address)
    body = json.dumps(
        {**_body(tokens), "stream": stream, "dovetail": {"speculate": speculate}}
    ).encode()
    head = (
        f"POST {CHATS} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    chunks = reads = 0
    while (leave is None or reads < leave) and (part := await reader.read(1 << 16)):
        chunks, reads = chunks + part.count(b"data: "), reads + 1
    writer.close()
    return chunks


def _body(tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "w5 w6"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
