"""The router as an application: passes a request to one replica, and returns its unchanged reply.

A request goes to the next best replica if one cannot be reached, is full (429, 503), or disconnects
before the first byte of its reply (the head of a stream and comments do not count). A reply
requested again by its id is looked up at all replicas. If a replica disconnects later, the client's
connection ends, too: a stream can be requested again with the seed in its first chunk."""

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from dovetail.runtime.http.errors import (
    ANTHROPIC,
    ApiError,
    not_served,
    shaped,
    unavailable,
    wrong_method,
)
from dovetail.runtime.http.serving.guard import Message, Receive, Scope, Send, answer, respond
from dovetail.runtime.router.choice import (
    Replica,
    ReplicaLoad,
    Wanted,
    agree_on_rates,
    choose,
    wanted,
)
from dovetail.runtime.router.upstream import Broken, Connection, Upstream

log = logging.getLogger("dovetail.router")

LOOK_EVERY_S = 0.5
ANSWER_S = 2.0  # seconds within which a replica must report
LOAD = TypeAdapter(ReplicaLoad)  # parses a replica's report, ignoring fields of later versions


class Fleet:
    """Replicas by their URLs."""

    def __init__(self, listed: Callable[[], Sequence[str]], upstream: Upstream) -> None:
        """`listed` returns the URLs of the replicas to use at present."""
        self._listed, self._upstream = listed, upstream
        self._all: dict[str, Replica] = {}

    @property
    def replicas(self) -> Sequence[Replica]:
        return [*self._all.values()]

    async def run(self) -> None:
        """Poll the replicas for ever."""
        while True:
            try:
                await self.look()
            except Exception:  # an internal error, which may not recur
                log.exception("the replicas could not be polled")
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Read a changed list and each replica's report; unlisted replicas only finish their
        requests."""
        urls = self._listed()
        for url in urls:
            if self._all.setdefault(url, Replica(url)).draining:
                self._all[url].draining = False
        for replica in self.replicas:
            replica.draining = replica.url not in urls
            if replica.draining and not replica.in_flight:
                del self._all[replica.url]
                self._upstream.close(replica.url)
                log.info("the replica %s was removed", replica.url)
        await asyncio.gather(*(self._ask(replica) for replica in self.replicas))
        agree_on_rates(self.replicas, time.monotonic())

    def lost(self, replica: Replica, why: str) -> None:
        """Do not use a replica until it answers again."""
        if replica.ready:
            log.warning("the replica %s gets no requests: %s", replica.url, why)
        replica.ready = False
        self._upstream.close(replica.url)

    async def _ask(self, replica: Replica) -> None:
        """Query a replica's state; its running requests include ours."""
        asked = replica.in_flight - replica.sent
        try:
            async with asyncio.timeout(ANSWER_S):
                status, content = await self._upstream.get(replica.url, b"/readyz")
            report = json.loads(content)
            load = LOAD.validate_python(report["load"]) if report["load"] else None
        except (Broken, TimeoutError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.lost(replica, str(error) or "it does not answer")
            return
        if load is not None:
            replica.told(replace(load, in_flight=asked + replica.sent), time.monotonic())
        if status == 200 and not replica.ready:
            log.info("the replica %s gets requests", replica.url)
        elif status != 200 and replica.ready:
            log.warning("the replica %s gets no requests: it is not ready", replica.url)
        replica.ready = status == 200


KEPT = ("/v1/chat/completions", "/v1/completions")
COMPLETIONS = (
    *(*KEPT, "/chat/completions", "/completions", "/completion", "/v1/responses", "/v1/messages"),
    *("/api/chat", "/api/generate"),
)
PASSED = (
    *(*COMPLETIONS, "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/apply-template"),
    *("/props", "/slots", "/models", "/api/tags", "/api/ps", "/api/show", "/api/version"),
    *("/version", "/openapi.json"),
)
MODELS = "/v1/models"
AGAIN = tuple(f"{path}/" for path in KEPT)
"""Below these paths a reply is requested again by its id."""
BELOW = (f"{MODELS}/", *AGAIN)
FULL = (429, 503)  # statuses of a replica without room or without a target
KEPT_BACK = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade http2-settings host content-length expect x-forwarded-for".split()
)
"""Headers of a request that are about the connection to us."""
OURS = frozenset(b"connection keep-alive transfer-encoding date server".split())
"""Headers of a reply that are about the connection to the replica, or that our server adds."""
NOTHING = Wanted((), 0.0, 0.0)


class Call:
    """One request of a client, with its present connection to a replica."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.gone = self.headed = False
        """`headed`: the client has the head of a stream, but no data."""
        self.connection: Connection | None = None

    def end(self) -> None:
        """Cancel the replica's request, because the client has gone or the router ends."""
        self.gone = True
        if self.connection is not None:
            self.connection.close()


class Front(ABC):
    """Answers requests to the router itself, and passes on the others."""

    TO = "replica"  # what requests are passed to, in metrics

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._calls: set[Call] = set()
        self.counts: Counter[tuple[str, str]] = Counter()
        """Numbers of events by kind (requests, retries, broken) and replica or model."""

    def end(self) -> None:
        """Cancel running requests."""
        for call in self._calls:
            call.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        own: dict[str, Callable[[Send], Awaitable[None]]] = {
            "/health": self._health,
            "/readyz": self._readyz,
            "/load": self._load,
            "/metrics": self._metrics,
        }
        if path in own:
            wrong = wrong_method(scope["method"], path, "GET")
            await (answer(wrong, send) if scope["method"] != "GET" else own[path](send))
        elif self._passes(path):
            body, call = await _whole(receive), Call(scope["path"])
            self._calls.add(call)
            watching = _watch(receive, call)
            try:
                await self._pass_on(scope, body, call, send)
            finally:
                self._calls.discard(call)
                watching.cancel()
        else:
            await answer(not_served(scope["method"], path), send, path)

    @abstractmethod
    def _passes(self, path: str) -> bool:
        """Return whether requests to a path are passed on."""

    @abstractmethod
    async def _pass_on(self, scope: Scope, body: bytes, call: Call, send: Send) -> None:
        """Pass on a request."""

    @abstractmethod
    def _lost(self, replica: Replica, why: str) -> None:
        """Handle the loss of a replica."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the answer to /readyz."""

    @abstractmethod
    def _gauges(self) -> dict[str, dict[str, int]]:
        """Return the numbers of /metrics by their names, and then by replica or model."""

    @property
    @abstractmethod
    def _serving(self) -> bool:
        """Whether requests can be answered."""

    async def _ask(
        self, replica: Replica, scope: Scope, body: bytes, call: Call, send: Send
    ) -> tuple[Message, bytes] | None:
        """Pass on the reply of one replica; return a refusal if another replica may accept the
        request. Raises `Broken` if nothing was sent to the client yet."""
        target = scope["raw_path"] + (
            b"?" + scope["query_string"] if scope["query_string"] else b""
        )
        headers = _headers(scope, replica.url)
        for fresh in (False, True):
            connection = call.connection = await self._upstream.take(replica.url, fresh=fresh)
            try:
                status, received = await connection.request(scope["method"], target, headers, body)
                break
            except Broken:
                connection.close()
                if fresh or call.gone or not connection.used:
                    raise
        kept = [(name, value) for name, value in received if name not in OURS]
        head = {"type": "http.response.start", "status": status, "headers": kept}
        if (
            status in FULL
            or (status == 404 and _asks_again(scope))
            or (call.headed and status != 200)
        ):
            content = b"".join([piece async for piece in connection.pieces()])
            self._upstream.give_back(replica.url, connection)
            return head, content
        if not call.headed:
            await send(head)
        call.headed = any(b"text/event-stream" in value for _, value in kept)
        try:
            async for piece in connection.pieces():
                call.headed = call.headed and all(
                    line[:1] in (b"", b":") for line in piece.splitlines()
                )
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Broken as error:
            connection.close()
            if call.headed:
                raise
            if not call.gone:
                self.counts["broken", replica.url] += 1
                log.warning("the replica %s broke off a reply: %s", replica.url, error)
                self._lost(replica, str(error))
            return None  # the server ends the client's connection, since the reply has no end
        await send({"type": "http.response.body", "body": b""})
        self._upstream.give_back(replica.url, connection)
        return None

    async def _refuse(
        self, call: Call, refusal: ApiError | tuple[Message, bytes], send: Send
    ) -> None:
        """Send an error, or a replica's refusal; in a stream that has begun, as an event."""
        if call.headed:
            if isinstance(refusal, ApiError):
                text = json.dumps(shaped(refusal, call.path))
            else:
                text = refusal[1].decode()
            kind = "event: error\n" if call.path.startswith(ANTHROPIC) else ""
            event = f"{kind}data: {text}\n\n".encode()
            await send({"type": "http.response.body", "body": event})
        elif isinstance(refusal, ApiError):
            await answer(refusal, send, call.path)
        else:
            head, content = refusal
            await send(head)
            await send({"type": "http.response.body", "body": content})

    # -- requests to the router itself -------------------------------------------------------------

    async def _health(self, send: Send) -> None:
        await json_answer({}, send, 200 if self._serving else 503)

    async def _readyz(self, send: Send) -> None:
        await json_answer(self._state(), send, 200 if self._serving else 503)

    async def _load(self, send: Send) -> None:
        await json_answer({"server_load": len(self._calls)}, send)

    async def _metrics(self, send: Send) -> None:
        lines = []
        for what in ("requests", "retries", "broken"):
            lines.append(f"# TYPE dovetail_router_{what}_total counter")
            lines += [
                f'dovetail_router_{what}_total{{{self.TO}="{name}"}} {count}'
                for (event, name), count in sorted(self.counts.items())
                if event == what
            ]
        for what, values in self._gauges().items():
            lines.append(f"# TYPE dovetail_router_{what} gauge")
            lines += [
                f'dovetail_router_{what}{{{self.TO}="{name}"}} {value}'
                for name, value in values.items()
            ]
        text = "\n".join([*lines, ""]).encode()
        await respond(send, text, kind=b"text/plain; version=0.0.4; charset=utf-8")


class Router(Front):
    """Passes each request to one of several replicas."""

    def __init__(self, fleet: Fleet, upstream: Upstream) -> None:
        super().__init__(upstream)
        self._fleet = fleet

    def _passes(self, path: str) -> bool:
        return path in PASSED or path == MODELS or path.startswith(BELOW)

    def _lost(self, replica: Replica, why: str) -> None:
        self._fleet.lost(replica, why)

    async def _pass_on(self, scope: Scope, body: bytes, call: Call, send: Send) -> None:
        """Pass the request to the first replica that can answer it."""
        request = _wanted(scope, body)
        tried: set[str] = set()
        refusal: tuple[Message, bytes] | None = None
        while not call.gone:
            left = [replica for replica in self._fleet.replicas if replica.url not in tried]
            replica = choose(left, request, time.monotonic())
            if replica is None:
                break
            noted = replica.noted
            tried.add(replica.url)
            self.counts["requests", replica.url] += 1
            replica.in_flight += request.samples
            replica.sent += request.samples
            try:
                refused = await self._ask(replica, scope, body, call, send)
                if refused is None:
                    return
                refusal = refused
            except Broken as error:
                if call.gone:
                    return
                self._lost(replica, str(error))
            finally:
                replica.in_flight -= request.samples
                if not replica.in_flight:  # it has prefilled everything, whatever was predicted
                    replica.unread_s = 0.0
                call.connection = None
            replica.refused(request.blocks, noted)
            self.counts["retries", replica.url] += 1
        if not call.gone:
            await self._refuse(call, refusal or _nobody(self._fleet.replicas, tried), send)

    def _state(self) -> dict[str, Any]:
        replicas = [
            {
                "url": replica.url,
                "ready": replica.ready,
                "draining": replica.draining,
                "in_flight": replica.in_flight,
                "running": replica.running,
                "seconds_per_token": replica.load.seconds_per_token,
            }
            for replica in self._fleet.replicas
        ]
        return {"ready": self._serving, "load": None, "replicas": replicas}

    def _gauges(self) -> dict[str, dict[str, int]]:
        replicas = self._fleet.replicas
        return {
            "ready": {replica.url: int(replica.ready) for replica in replicas},
            "in_flight": {replica.url: replica.in_flight for replica in replicas},
        }

    @property
    def _serving(self) -> bool:
        return any(replica.ready and not replica.draining for replica in self._fleet.replicas)


def _asks_again(scope: Scope) -> bool:
    """Return whether a client requests a reply again."""
    back = any(name == b"last-event-id" for name, _ in scope["headers"])
    return back or bool(scope["path"].startswith(AGAIN))


async def _whole(receive: Receive) -> bytes:
    """Return the body of a request."""
    pieces, more = [], True
    while more:
        message = await receive()
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


def _watch(receive: Receive, call: Call) -> "asyncio.Task[None]":
    """End a call when its client leaves."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.end()

    return asyncio.create_task(watch())


def _wanted(scope: Scope, body: bytes) -> Wanted:
    if scope["path"] not in COMPLETIONS:
        return NOTHING
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # its replica reports it
        return NOTHING
    headers = dict(scope["headers"])
    return wanted(fields, headers.get(b"authorization") or headers.get(b"x-api-key", b""))


def _headers(scope: Scope, url: str) -> list[tuple[bytes, bytes]]:
    """Return the headers for a replica: the client's, including the API key."""
    kept = [(name, value) for name, value in scope["headers"] if name not in KEPT_BACK]
    client = scope.get("client")
    origin = [(b"x-forwarded-for", client[0].encode())] if client else []
    return [(b"host", urlsplit(url).netloc.encode()), *kept, *origin]


def _nobody(replicas: Any, tried: set[str]) -> ApiError:
    if tried:
        return unavailable(f"no replica answered this request ({len(tried)} tried): try again soon")
    count = len(replicas)
    return unavailable(
        f"none of the {count} replicas is serving at present: /readyz shows their state"
        if count
        else "this router has no replica: name one with --connect, or list it in the file of "
        "--replicas"
    )


async def json_answer(value: Any, send: Send, status: int = 200) -> None:
    await respond(send, json.dumps(value, separators=(",", ":")).encode(), status)
