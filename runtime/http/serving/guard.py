"""The guard before every route: it checks keys, host names, body sizes and encodings. A plain ASGI
layer, since every token passes through it. Handles headers and addresses only."""

import hashlib
import hmac
import ipaddress
import json
import zlib
from collections.abc import Awaitable, Callable, Container, MutableMapping, Sequence
from typing import Any

from dovetail.runtime.http.errors import OLLAMA, ApiError, shaped

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS: tuple[str, ...] = ("/health", "/readyz")  # paths for supervisors, which have no API key
LOCAL_PATHS = ("/metrics",)  # open without a key on the machine itself
STRAIGHT = "dovetail.send"
"""Scope key of a stream's path around the framework, whose layers cost microseconds per token."""
OWNER = "dovetail.owner"
"""The scope's key for a request's owner: a digest of its API key; absent without one."""
UNREAD = "dovetail.unread"
"""The scope's key for the function that ends an unread stream with an error."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1", "")
ENCODINGS = (b"gzip", b"x-gzip", b"deflate")  # content encodings that are decompressed
ANY_HEADER = 32 + zlib.MAX_WBITS  # zlib's `wbits` that accepts both gzip and zlib headers
PLAIN = (b"", b"identity")
ENCODED = (b"content-encoding", b"content-length")
"""Headers that no longer apply once a body is decompressed."""


class Guard:
    """Passes on permitted requests, and answers the others with an error."""

    def __init__(
        self,
        app: App,
        *,
        keys: Sequence[str],
        most_body_bytes: int,
        only_local_names: bool,
        open_paths: Container[str] = OPEN_PATHS,
    ) -> None:
        """`keys` are checked for every request, and may change. `open_paths` answer without a key.
        `only_local_names`: without a key, refuse other host names, so that a web page whose name
        resolves to this machine cannot reach the server (DNS rebinding)."""
        self._app = app
        self._keys = keys
        self._most = most_body_bytes
        self._only_local_names = only_local_names
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        error = self._why_not(scope, headers)
        if error is not None:
            await answer(error, send, scope["path"])
            return
        scope[STRAIGHT], unpack = send, None
        if scope["method"] == "HEAD":  # the server omits the body
            scope = {**scope, "method": "GET"}
        if scope["path"].startswith(OLLAMA) and b"origin" not in headers:
            # Bodies are JSON whatever their Content-Type, as in ollama's examples with `curl -d`;
            # those of web pages are not, since any site could send them without a preflight.
            others = [one for one in scope["headers"] if one[0] != b"content-type"]
            scope["headers"] = [*others, (b"content-type", b"application/json")]
        if (encoding := _encoding(headers)) not in PLAIN:
            scope["headers"] = [one for one in scope["headers"] if one[0] not in ENCODED]
            unpack = Unpacking(encoding, self._most)
        try:
            await self._app(scope, self._bounded(receive, unpack), send)
        except Refused as refused:
            await answer(refused.error or self._too_large(), send, scope["path"])

    def _why_not(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._only_local_names and host_name(headers.get(b"host", b"")) not in LOCAL_NAMES:
            text = (
                "without an API key only this machine is served, under the name localhost: "
                "set http.api_key_file to serve others"
            )
            return ApiError(403, text, code="host")
        path = scope["path"]
        free = path in self._open_paths or (path in LOCAL_PATHS and is_local(scope, headers))
        key = self._key(headers)
        if key is not None:
            scope[OWNER] = hashlib.sha256(b"dovetail owner\0" + key).hexdigest()
        elif self._keys and not free:
            return ApiError(
                401,
                "the API key is missing or wrong: send the header `Authorization: Bearer KEY`, or "
                "`x-api-key: KEY`",
                code="invalid_api_key",
            )
        if (encoding := _encoding(headers)) not in (*PLAIN, *ENCODINGS):
            shown = encoding[:80].decode("latin-1")
            text = f"Content-Encoding {shown!r} is not supported: use gzip, deflate or none"
            return ApiError(415, text)
        length = headers.get(b"content-length", b"0")
        return self._too_large() if length.isdigit() and int(length[:20]) > self._most else None

    def _key(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the request's key if it is valid; compared with all keys in constant time."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":  # Anthropic's clients send x-api-key
            given = headers.get(b"x-api-key", b"")
        keys = [key.encode() for key in self._keys]
        equal = [key for key in keys if hmac.compare_digest(given.strip(), key)]
        return equal[0] if equal else None

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._most} bytes: send less, or raise http.body",
            code="request_too_large",
        )

    def _bounded(self, receive: Receive, unpack: "Unpacking | None") -> Receive:
        """Limit the size of a body while it arrives, and decompress it."""
        arrived = 0

        async def bounded() -> Message:
            nonlocal arrived
            message = await receive()
            body = message.get("body", b"")
            arrived += len(body)
            if arrived > self._most:
                raise Refused
            if unpack is None or message["type"] != "http.request":
                return message
            return {**message, "body": unpack.read(body, last=not message.get("more_body"))}

        return bounded


class Refused(BaseException):
    """A body is refused while it arrives: with an error, or None if it is too large. Not an
    `Exception`, so that readers of the body do not catch it."""

    def __init__(self, error: ApiError | None = None) -> None:
        self.error = error


class Unpacking:
    """Decompresses a body piece by piece; `Refused` beyond `most` bytes or for invalid data."""

    def __init__(self, encoding: bytes, most: int) -> None:
        self._encoding, self._room = encoding.decode(), most + 1
        self._stream: zlib._Decompress | None = None

    def read(self, data: bytes, *, last: bool) -> bytes:
        """Decompress the next piece."""
        read = b""
        try:
            while data:
                if self._stream is None or self._stream.eof:  # gzip allows several members
                    bare = self._encoding == "deflate" and data[0] & 15 != 8  # no zlib header
                    self._stream = zlib.decompressobj(-zlib.MAX_WBITS if bare else ANY_HEADER)
                piece = self._stream.decompress(data, self._room)
                self._room -= len(piece)
                if not self._room:
                    raise Refused
                read, data = read + piece, self._stream.unused_data
            if last and self._stream is not None and not self._stream.eof:
                raise zlib.error("unexpected end of data")
        except zlib.error as error:
            text = f"the body is not valid {self._encoding} (Content-Encoding): {error}"
            raise Refused(ApiError(400, text)) from None
        return read


def _encoding(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-encoding", b"").strip().lower()


def shared(app: App, cors: str) -> App:
    """Let web pages of these comma-separated origins (*: all) call an app."""
    if not cors:
        return app
    from starlette.middleware.cors import CORSMiddleware  # late: slow to import

    return CORSMiddleware(
        app,
        allow_origins=cors.split(","),
        allow_methods=("GET", "HEAD", "POST", "OPTIONS"),
        allow_headers=("*",),
        allow_credentials="*" not in cors,
        expose_headers=("Retry-After", "WWW-Authenticate"),
    )


async def answer(error: ApiError, send: Send, path: str = "") -> None:
    """Answer with an error, in the form of the API of `path`; the connection stays open for clients
    that are still sending."""
    body = json.dumps(shaped(error, path)).encode()
    more = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await respond(send, body, error.status, headers=more)


async def respond(
    send: Send,
    content: bytes,
    status: int = 200,
    *,
    kind: bytes = b"application/json",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Answer with this content, in one piece."""
    about = [(b"content-type", kind), (b"content-length", str(len(content)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": about})
    await send({"type": "http.response.body", "body": content})


def is_local(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Return whether the request comes from this machine, and not through a proxy, which would add
    a header."""
    client = scope.get("client")
    return (
        client is not None
        and is_loopback(client[0])
        and not {b"forwarded", b"x-forwarded-for", b"x-real-ip"} & headers.keys()
    )


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name(header: bytes) -> str:
    """Return the name in a Host header, without its port."""
    text = header.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]
