"""A router for several models, of which the supervisor loads those that are wanted: a request waits
until its model is loaded, as a stream with comments. They exchange lines of JSON:
{"revision": N, "models": [NAME, ...]} are the wanted models, numbered by their changes, and the
supervisor answers {"revision": N, "models": [REPORT, ...]} whenever a state changes."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from pydantic import BaseModel, ValidationError

from dovetail.protocol.memory import read_room
from dovetail.runtime.http.asked import Aliases
from dovetail.runtime.http.errors import OLLAMA, ApiError, unavailable
from dovetail.runtime.http.serving.guard import Message, Scope, Send
from dovetail.runtime.router.app import (
    AGAIN,
    LOOK_EVERY_S,
    MODELS,
    Call,
    Front,
    json_answer,
)
from dovetail.runtime.router.choice import Replica
from dovetail.runtime.router.loading import Model, Pool, Report
from dovetail.runtime.router.upstream import Broken, Upstream

log = logging.getLogger("dovetail.router")

COMMENT_S = 1.0  # seconds after which a waiting stream gets its head and a comment, and then again
ATTEMPTS = 3  # the most attempts to send a request to its model, which may be lost meanwhile
STREAM_HEAD = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
UNAVAILABLE = 503
TAGS, RUNNING, LATEST = "/api/tags", "/api/ps", ":latest"  # of ollama's API


Files = Mapping[str, tuple[Sequence[tuple[bytes, bytes]], bytes]]
"""Path -> headers and content of a file of the pages."""


class Reports(BaseModel):
    """A line of the supervisor."""

    revision: int
    models: list[Report]


class ModelRouter(Front):
    """Passes each request to the model that it names."""

    TO = "model"

    def __init__(
        self,
        pool: Pool,
        upstream: Upstream,
        write: Callable[[str], None],
        *,
        aliases: Aliases,
        deadline_s: float,
        files: Files,
    ) -> None:
        """`write` sends a line to the supervisor; `deadline_s`: the longest wait for a model;
        `files`: those of the pages, by their paths."""
        super().__init__(upstream)
        self._aliases, self._files = aliases, files
        self._pool, self._write, self._deadline_s = pool, write, deadline_s
        self._revision, self._sent = 0, list[str]()
        self._replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()
        self._began = int(time.time())
        self._requests = 0

    async def run(self) -> None:
        """Decide and send the wanted models periodically, which also shows that this process makes
        progress."""
        while True:
            try:
                self._decide()
                self._send_wanted()
            except Exception:  # an internal error, which may not recur
                log.exception("the wanted models could not be decided")
            await asyncio.sleep(LOOK_EVERY_S)

    def receive(self, line: bytes) -> None:
        """Handle a line of the supervisor; one of an earlier revision is ignored."""
        try:
            received = Reports.model_validate_json(line)
        except ValidationError as error:
            log.error("a line of the supervisor is malformed: %s", error)
            return
        if received.revision != self._revision:
            return  # it was written before the last change arrived
        for report in received.models:
            before = self._replicas.get(report.name)
            if report.url and (before is None or before.url != report.url):
                self._replicas[report.name] = Replica(report.url)
                if before is not None:
                    self._upstream.close(before.url)
        first = not self._pool.models
        self._pool.update(received.models, time.monotonic())
        if first:
            self._sent = self._pool.wanted
        self._decide()
        self._changed.set()
        self._changed = asyncio.Event()

    def _decide(self) -> None:
        room = read_room() if self._pool.queues else None
        self._pool.step(time.monotonic(), None if room is None else room.size)
        if (wanted := self._pool.wanted) != self._sent:
            self._sent = wanted
            self._revision += 1
            self._send_wanted()

    def _send_wanted(self) -> None:
        self._write(json.dumps({"revision": self._revision, "models": self._sent}))

    # -- requests ----------------------------------------------------------------------------------

    def _passes(self, path: str) -> bool:
        return True

    def _lost(self, replica: Replica, why: str) -> None:
        self._upstream.close(replica.url)

    async def _pass_on(self, scope: Scope, body: bytes, call: Call, send: Send) -> None:
        path = scope["path"]
        try:
            if scope["method"] == "GET" and (file := self._files.get(path)) is not None:
                headers, content = file
                await send({"type": "http.response.start", "status": 200, "headers": [*headers]})
                await send({"type": "http.response.body", "body": content})
            elif scope["method"] == "GET" and (listed := self._listed(path)) is not None:
                await json_answer(listed, send)
            else:
                await self._to_model(scope, body, call, send)
        except ApiError as error:
            if not call.gone:
                await self._refuse(call, error, send)

    def _listed(self, path: str) -> dict[str, Any] | None:
        """Return the answer to a path that lists models, in the form of its API; None for any
        other."""
        models = self._pool.models
        if path in (MODELS, "/models"):
            return {"object": "list", "data": [self._entry(name) for name in models]}
        if path.startswith(f"{MODELS}/"):
            return self._entry(path.removeprefix(f"{MODELS}/"))
        if path in (TAGS, RUNNING):
            shown = [
                {"name": name, "model": name, "size": model.report.size, "details": {}}
                for name, model in models.items()
                if path == TAGS or model.report.state == "loaded"
            ]
            return {"models": shown}
        return None

    async def _to_model(self, scope: Scope, body: bytes, call: Call, send: Send) -> None:
        """Pass a request to its model; a reply requested again by its id is looked up in all that
        are loaded."""
        fields = _fields(body)
        ollama = scope["path"].startswith(OLLAMA)  # its streams have no comments
        streams = fields.get("stream") is True and not ollama
        refused: tuple[Message, bytes] | None = None
        for name in self._named(scope, fields):
            refused = await self._to_one(name, scope, body, call, send, streams=streams)
            if refused is None:
                return
        if refused is not None:
            await self._refuse(call, refused, send)

    async def _to_one(
        self, name: str, scope: Scope, body: bytes, call: Call, send: Send, *, streams: bool
    ) -> tuple[Message, bytes] | None:
        """Pass a request to a model once that is loaded; return its refusal, if it refuses. Pages
        and live figures neither load a model nor keep it loaded."""
        model, counts = self._pool.models[name], scope["method"] != "GET"
        for _ in range(ATTEMPTS):
            if counts:
                await self._loaded(name, call, send, streams=streams)
            elif model.report.state != "loaded":
                raise unavailable(f"{name} is {model.report.state}: a request to it loads it")
            if call.gone:
                return None
            replica = self._replicas[name]
            self.counts["requests", name] += 1
            model.running += counts
            try:
                refused = await self._ask(replica, scope, body, call, send)
                if refused is None or not await self._is_lost(replica, model, refused):
                    return refused
            except Broken as error:
                if call.gone:
                    return None
                self.counts["retries", name] += 1
                log.warning("%s was lost during a request: %s", name, error)
                self._lost(replica, str(error))
                await self._news(COMMENT_S)  # its supervisor notices the loss
            finally:
                model.running -= counts
                model.used_s = time.monotonic() if counts else model.used_s
                call.connection = None
                self._decide()
        raise unavailable(f"{name} was lost during this request: try again soon")

    async def _loaded(self, name: str, call: Call, send: Send, *, streams: bool) -> None:
        """Wait until a model is usable, or the client has gone; raise `ApiError` if it cannot be
        loaded."""
        model, begun_s = self._pool.models[name], time.monotonic()
        failures, self._requests = model.failures, self._requests + 1
        number = self._requests
        if pause_s := self._pool.pause_s(name, begun_s):
            raise _failure(name, model, pause_s)
        model.waiting[number] = model.used_s = begun_s
        try:
            self._decide()
            while not model.admits(begun_s) and not call.gone:
                if model.failures != failures:
                    raise _failure(name, model, self._pool.pause_s(name, time.monotonic()))
                if time.monotonic() - begun_s > self._deadline_s:
                    text = f"{name} was not loaded within {self._deadline_s:g} s: try again later"
                    raise unavailable(text)
                if not await self._news(COMMENT_S) and streams and not call.gone:
                    await _comment(model, call, send)
        finally:
            del model.waiting[number]

    async def _is_lost(
        self, replica: Replica, model: Model, refused: tuple[Message, bytes]
    ) -> bool:
        """Return whether a refusal comes from a service that is ending because it was lost; its
        supervisor notices that soon."""
        if refused[0]["status"] != UNAVAILABLE:
            return False
        await asyncio.sleep(LOOK_EVERY_S)
        return model.report.url != replica.url

    async def _news(self, longest_s: float) -> bool:
        """Wait until a state changes; False if none has."""
        try:
            await asyncio.wait_for(self._changed.wait(), longest_s)
        except TimeoutError:
            return False
        return True

    def _named(self, scope: Scope, fields: dict[str, Any]) -> list[str]:
        """Return the model that a request names, or the last used one for a page; a reply may be
        looked up in several."""
        last = sorted(self._pool.models, key=lambda name: -self._pool.models[name].used_s)
        if scope["path"].startswith(AGAIN):
            there = [name for name in last if self._pool.models[name].wanted]
            return there or last[:1]
        query = parse_qs(scope["query_string"].decode("latin-1"))
        named = fields.get("model", fields.get("name", query.get("model", [None])[0]))
        if scope["path"].startswith(OLLAMA) and isinstance(named, str):
            named = named.removesuffix(LATEST)
        if named is None and (scope["method"] != "POST" or len(self._pool.models) == 1):
            return last[:1]
        if named is None:
            text = f"model is missing: send one of {', '.join(self._pool.models)}"
            raise ApiError(400, text, param="model")
        return [self._model(named)]

    def _model(self, named: object) -> str:
        """Return the model of this name or alias; raise `ApiError` if there is none."""
        for name in self._pool.models:
            if named == name or self._aliases.covers(str(named), name):
                return name
        served = ", ".join(self._pool.models)
        text = f"there is no model {named!r} here: send one of {served}"
        raise ApiError(404, text, param="model", code="model_not_found")

    def _entry(self, name: str) -> dict[str, Any]:
        """Return a model as OpenAI lists it, with its state as in llama-server's router."""
        report = self._pool.models[name := self._model(name)].report
        status = {
            "value": report.state,
            **({"failed": True, "why": report.why} if report.why else {}),
        }
        entry = {"id": name, "object": "model", "created": self._began, "owned_by": "dovetail"}
        return {**entry, "root": name, "status": status}

    # -- requests to the router itself -------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        models = [
            {
                "name": name,
                "state": model.report.state,
                "url": model.report.url,
                "why": model.report.why,
                "running": model.running,
                "waiting": len(model.waiting),
            }
            for name, model in self._pool.models.items()
        ]
        return {"ready": self._serving, "load": None, "models": models}

    def _gauges(self) -> dict[str, dict[str, int]]:
        models = self._pool.models.items()
        return {
            "loaded": {name: int(model.report.state == "loaded") for name, model in models},
            "in_flight": {name: model.running for name, model in models},
            "waiting": {name: len(model.waiting) for name, model in models},
        }

    @property
    def _serving(self) -> bool:
        return bool(self._pool.models)


def _failure(name: str, model: Model, pause_s: float) -> ApiError:
    text = f"{name} cannot be loaded: {model.report.why}"
    return unavailable(text, retry_after_s=max(1, round(pause_s)))


async def _comment(model: Model, call: Call, send: Send) -> None:
    """Send the head of a stream once, and a comment that its client ignores."""
    if not call.headed:
        head = {"type": "http.response.start", "status": 200, "headers": [*STREAM_HEAD]}
        await send(head)
        call.headed = True
    text = f": {model.report.name} is {model.report.state}\n\n".encode()
    await send({"type": "http.response.body", "body": text, "more_body": True})


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
    return fields if isinstance(fields, dict) else {}
