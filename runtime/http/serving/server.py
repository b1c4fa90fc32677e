"""uvicorn with deadlines: connections that send their request or read their response too slowly are
closed, as are those beyond a limit. uvicorn itself waits for ever for a header, a body or a reader.
All connections are checked once a second, outside the token path. The only door to `uvicorn`."""

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.serving.guard import UNREAD, App
from dovetail.runtime.http.serving.listening import BACKLOG

log = logging.getLogger("dovetail.http")

LOOK_EVERY_S = 1.0
MAX_HEAD_BYTES = 64 << 10
BODY_LENGTH = (b"content-length", b"transfer-encoding")
"""Headers that determine where the body of a request ends."""
KEEP_ALIVE_S = 30
GRACE_S = 5.0  # seconds for running requests to end after a signal
LAST_WORDS_S = 2.0  # further seconds for sending the error that ends them


class Connections:
    """The connections of a server, with their limits and checks."""

    def __init__(self, *, receive_s: float, most: int) -> None:
        self.receive_s, self.most = receive_s, most
        self.let_go = 0  # disconnected clients that did not read
        self.open: set[PatientProtocol] = set()

    def look(self, now_s: float) -> None:
        """Close slow connections."""
        for connection in [*self.open]:
            connection.look(now_s)


class PatientProtocol(HttpToolsProtocol):
    """A connection with timeouts."""

    shared: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._began_s: float | None = self.loop.time()
        """When the incoming request began; None if there is none."""
        self._unread = 0
        self._unread_s = self._began_s
        self._told_s: float | None = None
        """When its stream was ended because its client did not read."""
        self._head = 0
        self._refused = self._repeats = False
        if len(self.shared.open) >= self.shared.most:
            self._refuse(
                ApiError(
                    503,
                    f"{self.shared.most} connections are open, which is the limit: try again later",
                    retry_after_s=1,
                )
            )
        else:
            self.shared.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._began_s is None:
            self._began_s = self.loop.time()
        self._left = data
        while self._left and self.parser is not None and not self._refused:
            self._fed, self._left = self._left, b""
            super().data_received(self._fed)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore upgrades (h2c, websocket): a new parser gets the headers for the body's length."""
        self._left = self._fed[getattr(sys.exception(), "args", (0,))[0] :]
        self.parser = type(self.parser)(self)
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] in BODY_LENGTH]
        self._repeats = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines))
        self._repeats = False

    def on_message_begin(self) -> None:
        self._head = 0
        self._told_s = None
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._repeats:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # the body follows
            return
        self._began_s = None
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD_BYTES:
            # the parser reports it as its own error
            raise ValueError("the head of the request is too large")

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with our own error."""
        if self._head > MAX_HEAD_BYTES:
            self._refuse(
                ApiError(
                    431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes: send less"
                )
            )
        else:
            self._refuse(ApiError(400, "this is not an HTTP request"))

    def _refuse(self, error: ApiError) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        body = json.dumps(error.body).encode()
        head = (
            f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: "
            f"{len(body)}\r\nconnection: close\r\n"
        )
        head += "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
        self.transport.write(head.encode() + b"\r\n" + body)
        self.transport.close()

    def look(self, now_s: float) -> None:
        """End a connection whose request does not arrive or whose client does not read."""
        patience = self.shared.receive_s
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread < self._unread:
            self._unread_s = now_s
        self._unread = unread
        if unread and now_s - self._unread_s > patience:
            self._let_go(now_s)
        elif self._awaits_request() and now_s - (self._began_s or now_s) > patience:
            self.transport.abort()

    def _let_go(self, now_s: float) -> None:
        """End the stream of a client that does not read, with an error that it may still read."""
        if self._told_s is None:
            self.shared.let_go += 1
            log.warning(
                "the client at %s has read nothing for %g s (http.receive_s) and is disconnected",
                self.client,
                self.shared.receive_s,
            )
            streaming = self.cycle is not None and not self.cycle.response_complete
            if streaming and callable(tell := self.cycle.scope.get(UNREAD)):
                self._told_s = now_s
                tell()
                self.flow.resume_writing()
                return
        elif now_s - self._told_s <= self.shared.receive_s:
            return
        self.transport.abort()

    def _awaits_request(self) -> bool:
        """Return whether this connection waits only for the rest of a request."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body


async def serve(
    app: App,
    listener: socket.socket,
    connections: Connections,
    *,
    hurry: Callable[[], None],
    ready: Callable[[], None],
    progress: Callable[[], None],
) -> None:
    """Answer requests until SIGTERM or SIGINT; running ones then have `GRACE_S` before `hurry` ends
    them. `progress` is called once a second by the event loop."""
    loop = asyncio.get_running_loop()
    protocol = type("Protocol", (PatientProtocol,), {"shared": connections})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(GRACE_S + LAST_WORDS_S),
    )
    server = _Server(config, ready)

    def stop() -> None:
        server.should_exit = True
        loop.call_later(GRACE_S, hurry)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    looking = asyncio.create_task(_look(connections, progress))
    try:
        await server._serve([listener])  # without uvicorn's own signal handlers
    finally:
        looking.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, *args: Any, **kwargs: Any) -> None:
        await super().startup(*args, **kwargs)
        self._ready()


async def _look(connections: Connections, progress: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        connections.look(asyncio.get_running_loop().time())
        progress()
