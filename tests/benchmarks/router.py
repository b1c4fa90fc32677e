"""The command `router`: what a decision and a request that is passed on cost the router, in
processor time, and the ceiling that follows.

The router is the real process; the replicas behind it answer at once, from this one, so that the
router's own time is all that is counted. Processor time, not wall time, since both share the cores.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import click
import psutil

from benchmarks.options import Command, option, options, report
from benchmarks.replicas import shown, started
from dovetail.runtime.router.app import LOOK_EVERY_S
from dovetail.runtime.router.choice import Replica, ReplicaLoad, agree_on_rates, choose, wanted

READY = b'{"ready":true,"load":null}'
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
ASKED = json.dumps({"messages": [{"role": "user", "content": "Tell me a story."}]}).encode()
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
"""The unit in which the kernel counts processor time."""
SIZES = {"chat of 1 kB": 1_000, "chat of 16 kB": 16_000}


@click.command(cls=Command)
@option("--replicas", type=click.IntRange(min=1), default=4)
@option("--decisions", type=click.IntRange(min=100), default=20_000)
@option("--requests", type=click.IntRange(min=10), default=4000, help="Number of each kind.")
@option("--chunks", type=click.IntRange(min=1), default=200, help="Chunks of a stream.")
@option("--together", type=click.IntRange(min=1), default=16, help="Requests in flight.")
@options("json")
def router(
    replicas: int, decisions: int, requests: int, chunks: int, together: int, as_json: bool
) -> None:
    """Decisions of the router a second on one core, and requests and chunks that it passes on."""
    rows = [
        {"what": f"decisions, {name}", "per_s": decided(replicas, size, decisions)}
        for name, size in SIZES.items()
    ]
    whole_s = asyncio.run(passed(replicas, requests, 0, together))
    stream_s = asyncio.run(passed(replicas, max(10, requests // chunks * 4), chunks, together))
    rows += [
        {"what": "requests with a whole reply", "per_s": 1.0 / whole_s},
        {"what": "chunks of streams", "per_s": chunks / max(1e-9, stream_s - whole_s)},
        {"what": f"streams of {chunks} chunks", "per_s": 1.0 / stream_s},
    ]
    report({"router": rows}, as_json, lambda: shown(rows))


def decided(count: int, size: int, decisions: int) -> float:
    """Decisions a second of processor time: a body is read, hashed and given to a replica."""
    load = ReplicaLoad("1", 4, 0, 0.01, 0.012, 0.0005)
    there = [Replica(f"http://r{n}:1", ready=True, load=load) for n in range(count)]
    agree_on_rates(there)
    bodies = []
    for number in range(64):
        told = [{"role": "user", "content": f"{number} " + "some words of a story " * (size // 22)}]
        bodies.append(json.dumps({"messages": told, "max_tokens": 128}).encode())
    began_s = time.process_time()
    for turn in range(decisions):
        choose(there, wanted(json.loads(bodies[turn % 64]), b"Bearer key"), float(turn))
    return decisions / (time.process_time() - began_s)


async def passed(count: int, requests: int, chunks: int, together: int) -> float:
    """Seconds of the router's processor for a request; `chunks` of a stream, 0: a whole reply."""
    async with replicas_of(count, chunks) as urls:
        with started("router", *(f"--connect={url}" for url in urls)) as router:
            port = int(router.url.rpartition(":")[2])
            while not await serves(port):  # noqa: ASYNC110 - another process, which looks first now
                await asyncio.sleep(LOOK_EVERY_S)
            await load(port, together * 4, together)
            before = psutil.Process(router.pid).cpu_times()
            await load(port, requests, together)
            after = psutil.Process(router.pid).cpu_times()
    took_s = after.user + after.system - before.user - before.system
    return max(TICK_S, took_s) / requests


@asynccontextmanager
async def replicas_of(count: int, chunks: int) -> AsyncIterator[list[str]]:
    """Servers that say that they are ready, and answer everything else at once."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()).strip():
                    if header.lower().startswith(b"content-length"):
                        length = int(header.partition(b":")[2])
                await reader.readexactly(length)
                if chunks and b"/readyz" not in line:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
                    writer.write(b"transfer-encoding: chunked\r\n\r\n")
                    for _ in range(chunks):
                        writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
                        await asyncio.sleep(0.002)
                    writer.write(b"0\r\n\r\n")
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                    writer.write(b"content-length: %d\r\n\r\n%b" % (len(READY), READY))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for _ in range(count)]
    try:
        yield [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    finally:
        for server in servers:
            server.close()


async def serves(port: int) -> bool:
    """Return whether the router has a replica."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    head = await reader.readline()
    writer.close()
    return b" 200 " in head


async def load(port: int, requests: int, together: int) -> None:
    """Send requests, so many at a time, each client on one connection."""

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(number):
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(ASKED), ASKED)
            )
            await read_reply(reader)
        writer.close()

    share, more = divmod(requests, together)
    await asyncio.gather(*(client(share + (n < more)) for n in range(together)))


async def read_reply(reader: asyncio.StreamReader) -> Any:
    """Read one reply to its end."""
    length: int | None = None
    assert b" 200 " in await reader.readline()
    while (header := await reader.readline()).strip():
        if header.lower().startswith(b"content-length"):
            length = int(header.partition(b":")[2])
    if length is not None:
        return await reader.readexactly(length)
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    return await reader.readline()
