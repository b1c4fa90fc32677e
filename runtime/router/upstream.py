"""The router's connections to replicas: passes requests on unchanged, and replies piece by piece as
they arrive. The only door to `httptools`. Idle connections are reused; one that a replica has
closed meanwhile is detected before the first byte of a reply and replaced. Bodies are neither read
nor changed."""

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

import httptools

CONNECT_S = 2.0  # seconds within which a replica must accept a connection
PIECE = 64 << 10
MOST_KEPT = 256  # the most idle connections to one replica
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""Keep-alive probes, which detect a lost machine after some ten seconds."""

Headers = Sequence[tuple[bytes, bytes]]


class Broken(Exception):
    """A replica cannot be reached or has disconnected, with the reason."""


class Connection:
    """One connection; also the callbacks of httptools for parsing a reply."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.used = False  # True if it has carried a request before

    async def request(
        self, method: str, target: bytes, headers: Headers, body: bytes
    ) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Send a request and wait for the status and headers of its reply."""
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._headed = self._over = False
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target)]
        lines += [b"%b: %b" % header for header in headers]
        lines += [b"content-length: %d" % len(body)] if body or method == "POST" else []
        self._writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        while not self._headed:
            await self._read()
        return self._parser.get_status_code(), self._headers

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body of the reply, as it arrives."""
        while True:
            pieces, self._pieces = self._pieces, []
            if pieces:
                yield b"".join(pieces)
            elif self._over:
                return
            else:
                await self._read()

    @property
    def closed(self) -> bool:
        """Whether the replica has closed it."""
        return self._reader.at_eof()

    @property
    def reusable(self) -> bool:
        """Whether another request can follow."""
        return self._over and self._parser.should_keep_alive() and not self.closed

    def close(self) -> None:
        self._writer.close()

    async def _read(self) -> None:
        try:
            data = await self._reader.read(PIECE)
            if not data:
                raise Broken("it closed the connection")
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise Broken(f"the connection broke ({error})") from None

    # -- callbacks of httptools --------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._headed = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._over = True


class Upstream:
    """Connections to all replicas, by their URLs."""

    def __init__(self) -> None:
        self._kept: defaultdict[str, list[Connection]] = defaultdict(list)

    async def take(self, url: str, *, fresh: bool = False) -> Connection:
        """Return a connection to a replica, an idle one unless `fresh`; raise `Broken` if it cannot
        be reached."""
        kept = self._kept[url]
        while kept and not fresh:
            connection = kept.pop()
            if not connection.closed:
                return connection
            connection.close()
        place = urlsplit(url)
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
        except (OSError, TimeoutError) as error:
            raise Broken(f"it cannot be reached ({error or 'it does not answer'})") from None
        wire = writer.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            wire.setsockopt(socket.IPPROTO_TCP, option, value)
        return Connection(reader, writer)

    async def get(self, url: str, target: bytes) -> tuple[int, bytes]:
        """Return status and body of the reply to a GET without a key, on a new connection."""
        connection = await self.take(url, fresh=True)
        try:
            host = [(b"host", urlsplit(url).netloc.encode()), (b"connection", b"close")]
            status, _ = await connection.request("GET", target, host, b"")
            return status, b"".join([piece async for piece in connection.pieces()])
        finally:
            connection.close()

    def give_back(self, url: str, connection: Connection) -> None:
        """Keep a connection whose reply has been read completely; close any other."""
        if connection.reusable and len(self._kept[url]) < MOST_KEPT:
            connection.used = True
            self._kept[url].append(connection)
        else:
            connection.close()

    def close(self, url: str) -> None:
        """Close the kept connections to a replica."""
        for connection in self._kept.pop(url, []):
            connection.close()
