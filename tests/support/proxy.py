"""A proxy between a coordinator and a worker, in user space, that does to a connection what
networks do: it delays, limits, falls silent, forgets one end, breaks off, corrupts, repeats.

It carries bytes, in a thread of its own, between addresses of the forms tcp://HOST:PORT and
ipc://PATH, and knows nothing of what they mean: over tcp they are encrypted (CURVE), so that
whatever is changed on the way is noticed and ends the connection. Every connection made to it
becomes one to the address behind it.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

CHUNK_BYTES = 1 << 16
MOST_HELD_BYTES = 4 << 20
"""Bytes on their way in one direction; beyond that nothing more is read, as where a network's
buffers are full."""
R = TypeVar("R")


@dataclass(frozen=True)
class Weather:
    """The state of one direction of a connection."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """The most that is added to the delay, drawn anew for each chunk; the order stays."""
    rate: float | None = None
    """Bytes a second, if there is a limit."""
    silent: bool = False
    """Nothing arrives; what is sent meanwhile does when that is over, if the connection still is
    there."""
    slice_bytes: int = CHUNK_BYTES
    """No chunk is larger."""


FAIR = Weather()


class Proxy:
    """Listens at `address` for connections to `behind`. Every method may be called from any thread,
    and holds for connections that are there and to come."""

    def __init__(self, behind: str, *, listen: str = "tcp://127.0.0.1:0", seed: int = 0) -> None:
        self.address = listen
        self.behind = behind
        self.up, self.down = FAIR, FAIR
        """The weather towards `behind`, and back from it."""
        self.refusing = False
        """True if nobody can connect."""
        self.made = 0
        """Connections so far; `bytes_up`, `bytes_down`: carried."""
        self.bytes_up = self.bytes_down = 0
        self.chance = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._pairs: set[_Pair] = set()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        try:
            self._server: asyncio.Server = self._do(self._listen())
        except BaseException:
            self._leave()
            raise

    # -- what may happen ---------------------------------------------------------------------------

    def set(self, *, up: Weather | None = None, down: Weather | None = None) -> None:
        """The weather in one direction or both, from now on."""
        self._call(lambda: self._set(up, down))

    def delay(self, seconds: float, *, jitter_s: float = 0.0) -> None:
        """Each message takes so much longer, in both directions."""
        self.set(
            up=replace(self.up, delay_s=seconds, jitter_s=jitter_s),
            down=replace(self.down, delay_s=seconds, jitter_s=jitter_s),
        )

    def limit(self, bytes_per_s: float | None) -> None:
        """No more than this is carried, in each direction."""
        self.set(up=replace(self.up, rate=bytes_per_s), down=replace(self.down, rate=bytes_per_s))

    def silence(self, *, up: bool = True, down: bool = True) -> None:
        """Nothing arrives in these directions from now on, and nobody learns of it; with False it
        does again."""
        self.set(up=replace(self.up, silent=up), down=replace(self.down, silent=down))

    def heal(self) -> None:
        """Fair weather, and connections are taken."""
        self.refusing = False
        self.set(up=FAIR, down=FAIR)

    def refuse(self, refusing: bool = True) -> None:
        """Take no more connections: whoever tries is turned away at once."""
        self.refusing = refusing

    def cut(self) -> int:
        """Break all connections off, so that both ends are told; how many there were."""
        return self._call(lambda: sum(pair.break_off() for pair in [*self._pairs]))

    def half_open(self) -> int:
        """Break all connections off towards `behind`, and tell the other end nothing; how many
        there were."""
        return self._call(lambda: sum(pair.forget_behind() for pair in [*self._pairs]))

    def corrupt(self, *, up: bool = True) -> None:
        """Turn one bit of the next chunk in this direction."""
        self._call(lambda: [setattr(pair.way(up), "corrupts", True) for pair in self._pairs])

    def repeat(self, *, up: bool = True) -> None:
        """Carry the next chunk in this direction twice."""
        self._call(lambda: [setattr(pair.way(up), "repeats", True) for pair in self._pairs])

    @property
    def connections(self) -> int:
        return len(self._pairs)

    def close(self) -> None:
        """Break everything off and listen no more. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._do(self._end())
        self._leave()
        if self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _leave(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- in the thread -----------------------------------------------------------------------------

    def _call(self, action: Callable[[], R]) -> R:
        async def act() -> R:
            return action()

        return self._do(act())

    def _do(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _set(self, up: Weather | None, down: Weather | None) -> None:
        self.up, self.down = up or self.up, down or self.down
        self._changed.set()
        self._changed = asyncio.Event()

    async def _listen(self) -> asyncio.Server:
        scheme, _, place = self.address.partition("://")
        if scheme == "ipc":
            return await asyncio.start_unix_server(self._connected, place)
        host, _, port = place.rpartition(":")
        server = await asyncio.start_server(self._connected, host, int(port))
        self.address = f"tcp://{host}:{server.sockets[0].getsockname()[1]}"
        return server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            _reset(writer)
            return
        try:
            behind = await self._open_behind()
        except OSError:
            _reset(writer)
            return
        self.made += 1
        pair = _Pair(self, (reader, writer), behind)
        self._pairs.add(pair)
        try:
            await pair.carry()
        finally:
            self._pairs.discard(pair)

    async def _open_behind(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        scheme, _, place = self.behind.partition("://")
        if scheme == "ipc":
            return await asyncio.open_unix_connection(place)
        host, _, port = place.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _end(self) -> None:
        self._server.close()
        for pair in [*self._pairs]:
            pair.end()
        await asyncio.gather(
            *(task for task in asyncio.all_tasks() if task is not asyncio.current_task()),
            return_exceptions=True,
        )
        await asyncio.sleep(0)  # transports that were aborted close in the loop's next turn

    async def while_silent(self, weather: Callable[[], Weather]) -> None:
        """Wait until something arrives again."""
        while weather().silent:
            await self._changed.wait()


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False)
class _Way:
    """One direction: what is read at one end is written at the other, when its time has come."""

    weather: Callable[[], Weather]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    corrupts: bool = False
    repeats: bool = False
    due: "asyncio.Queue[tuple[float, bytes]]" = field(default_factory=asyncio.Queue)
    held: int = 0
    room: asyncio.Event = field(default_factory=asyncio.Event)


class _Pair:
    """A connection to the proxy and the one behind it."""

    def __init__(self, proxy: Proxy, front: Ends, behind: Ends) -> None:
        self._proxy = proxy
        self._front, self._behind = front[1], behind[1]
        self._ways = {
            True: _Way(lambda: proxy.up, front[0], behind[1]),
            False: _Way(lambda: proxy.down, behind[0], front[1]),
        }
        for end in (self._front, self._behind):
            if (plug := end.get_extra_info("socket")).family != socket.AF_UNIX:
                plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deaf = False
        self._jobs: list[asyncio.Future[None]] = []

    def way(self, up: bool) -> _Way:
        return self._ways[up]

    async def carry(self) -> None:
        """Carry until one end closes; then the other is told, unless it is to know nothing."""
        readers, writers = (
            [asyncio.ensure_future(job(way)) for way in self._ways.values()]
            for job in (self._read, self._write)
        )
        self._jobs = [*readers, *writers]
        await asyncio.wait(writers, return_when=asyncio.FIRST_COMPLETED)
        self._stop()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        if self._deaf:
            await self._swallow()
        self.break_off()

    async def _swallow(self) -> None:
        """Whatever the end that knows nothing goes on sending vanishes."""
        with suppress(OSError):
            while await self._ways[True].reader.read(CHUNK_BYTES):
                pass

    async def _read(self, way: _Way) -> None:
        loop, last_s = asyncio.get_running_loop(), 0.0
        with suppress(OSError):
            while chunk := await way.reader.read(way.weather().slice_bytes):
                weather = way.weather()
                last_s = max(
                    last_s,
                    loop.time()
                    + weather.delay_s
                    + self._proxy.chance.uniform(0.0, weather.jitter_s),
                )
                way.due.put_nowait((last_s, self._changed(way, chunk)))
                way.held += len(chunk)
                while way.held > MOST_HELD_BYTES:
                    way.room.clear()
                    await way.room.wait()
        way.due.put_nowait((last_s, b""))

    def _changed(self, way: _Way, chunk: bytes) -> bytes:
        if way.corrupts:
            way.corrupts = False
            place = self._proxy.chance.randrange(
                len(chunk) // 2, len(chunk)
            )  # not in a frame's header, some bits of which mean nothing
            chunk = (
                chunk[:place]
                + bytes([chunk[place] ^ 1 << self._proxy.chance.randrange(8)])
                + chunk[place + 1 :]
            )
        if way.repeats:
            way.repeats = False
            chunk += chunk
        return chunk

    async def _write(self, way: _Way) -> None:
        loop, free_s = asyncio.get_running_loop(), 0.0
        with suppress(OSError):
            while True:
                due_s, chunk = await way.due.get()
                if (rate := way.weather().rate) is not None:
                    free_s = max(free_s, loop.time()) + len(chunk) / rate
                    due_s = max(due_s, free_s)
                if (wait_s := due_s - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                await self._proxy.while_silent(way.weather)
                if not chunk:  # who sent has closed
                    return
                way.writer.write(chunk)
                await way.writer.drain()
                way.held -= len(chunk)
                way.room.set()
                self._count(way, len(chunk))

    def _count(self, way: _Way, size: int) -> None:
        if way is self._ways[True]:
            self._proxy.bytes_up += size
        else:
            self._proxy.bytes_down += size

    def _stop(self) -> None:
        for job in self._jobs:
            job.cancel()

    def end(self) -> None:
        """Carry nothing more, whatever is on its way."""
        self._deaf = False
        self._stop()
        self.break_off()

    def break_off(self) -> bool:
        """Both ends are told that the connection is no more."""
        there = not self._front.is_closing()
        _reset(self._front)
        _reset(self._behind)
        return there

    def forget_behind(self) -> bool:
        """The end behind is told, the other is not."""
        there = not self._behind.is_closing()
        self._deaf = True
        _reset(self._behind)
        return there


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once, with RST where there is one, whatever has not been sent."""
    with suppress(OSError, AttributeError):
        plug = writer.get_extra_info("socket")
        if plug.family != socket.AF_UNIX:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def proxied(behind: str, *, listen: str = "tcp://127.0.0.1:0", seed: int = 0) -> Iterator[Proxy]:
    """A proxy that is closed with the block."""
    with contextlib.closing(Proxy(behind, listen=listen, seed=seed)) as proxy:
        yield proxy
