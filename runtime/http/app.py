"""The routes: which address answers what. The only door to `fastapi`.

A request is read (`bodies.py`), put into the target's terms (`orders.py`), decoded (`decoding.py`)
and written (`replies.py`); this file ties them together and sees to it that a client who leaves, a
deadline or the end of the server cancels what runs.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from dovetail.protocol.messages import Emitted, Reported
from dovetail.runtime.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from dovetail.runtime.http.dashboard import Shown, Watch, add_dashboard, page_files
from dovetail.runtime.http.decoding import Gone, Run, WrongVocabulary
from dovetail.runtime.http.document import describe, documented
from dovetail.runtime.http.errors import ApiError, complaint, place, unavailable, unread
from dovetail.runtime.http.exposition import CONTENT_TYPE, Exposition
from dovetail.runtime.http.gateway import Gateway, Target
from dovetail.runtime.http.guard import OPEN_PATHS, OWNER, STRAIGHT, UNREAD, App, Guard
from dovetail.runtime.http.orders import Defaults, Order, chat_order, completion_order, tokens_of
from dovetail.runtime.http.replies import Writer, error_event, open_writer
from dovetail.runtime.http.server import Connections

log = logging.getLogger("dovetail.http")

SMALL_CHARACTERS = 4096
"""Texts up to this are tokenized at once; longer ones elsewhere, so that nobody waits for them."""
CLIENT_GONE = 499
"""A status that nobody reads (nginx's)."""
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

ChatOrTextBody = ChatBody | CompletionBody
R = TypeVar("R")


@dataclass(frozen=True)
class Terms:
    """What one HTTP server offers, and to whom."""

    defaults: Defaults
    model: str = ""
    """Name under which the target is served; empty: its own."""
    version: str = ""
    keys: Sequence[str] = ()
    deadline_s: float = 600.0
    most_body_bytes: int = 8 << 20
    only_local_names: bool = False
    dashboard: Shown = "off"
    """Whether the page shows the tokens of requests."""


class Service:
    """What the routes share."""

    def __init__(self, gateway: Gateway, terms: Terms, connections: Connections) -> None:
        self.gateway, self.terms, self.connections = gateway, terms, connections
        self.exposition = Exposition()
        self.began = int(time.time())
        self.runs: set[Run] = set()

    def end(self) -> None:
        """The server ends: tell those who still wait."""
        for run in [*self.runs]:
            run.fail(unavailable("the server is ending: ask again when another is there"))

    def name_of(self, target: Target) -> str:
        """Under which the target is served; of a model that is a folder, its name says nothing of
        where it lies."""
        own = target.described.model
        return self.terms.model or (
            own.rstrip("/").rpartition("/")[2] if own.startswith(("/", "./", "../", "~")) else own
        )

    async def target(self, model: str | None = None) -> Target:
        """The target; `ApiError` if there is none, or if a client asks for another model."""
        target = await self.gateway.target()
        if model is not None and model not in (self.name_of(target), target.described.model):
            text = f"there is no model {model!r} here: {self.name_of(target)!r} is served"
            raise ApiError(404, text, param="model", code="model_not_found")
        return target

    async def answer(self, body: ChatOrTextBody, request: Request) -> Response:
        """The answer to a completion of either kind."""
        run = Run(self.gateway)
        self.runs.add(run)
        deadline = asyncio.get_running_loop().call_later(
            self.terms.deadline_s, run.fail, _late(self.terms.deadline_s)
        )
        watching = asyncio.create_task(_until_gone(request, run))

        def done() -> None:
            self.runs.discard(run)
            deadline.cancel()
            watching.cancel()
            run.close()

        try:
            writer, model = await self._begin(body, run, request.scope.get(OWNER, ""))
            answer = Answer(run, writer, self.exposition, model)
            if body.stream:
                request.scope[UNREAD] = partial(run.fail, unread(self.connections.receive_s))
                return Stream(answer, done)
            whole = await answer.whole()
        except Gone:
            done()
            return Response(status_code=CLIENT_GONE)
        except BaseException:
            done()
            raise
        done()
        return _json(whole)

    async def _begin(self, body: ChatOrTextBody, run: Run, owner: str) -> tuple[Writer, str]:
        """Have the replies begun, up to the first word of any; once more if the target has become
        another meanwhile."""
        for _ in range(2):
            target = await self.target(body.model)
            order = await self._order(body, target, owner)
            try:
                await run.begin(order)
            except WrongVocabulary:
                self.gateway.forget_target()
                continue
            return open_writer(order, target, self.name_of(target)), self.name_of(target)
        raise unavailable(
            "the target changes its vocabulary all the time: ask again when one stays"
        )

    async def _order(self, body: ChatOrTextBody, target: Target, owner: str) -> Order:
        def read() -> Order:
            if isinstance(body, ChatBody):
                return chat_order(body, target, self.terms.defaults, owner)
            return completion_order(body, target, self.terms.defaults, owner)

        return await _here_or_elsewhere(read, _size(body))

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        target = await self.target(body.model)
        tokens = await _here_or_elsewhere(lambda: tokens_of(body, target), _size(body))
        words = [target.text.token(token) for token in tokens] if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": target.context,
            "tokens": list(tokens),
            "token_strs": words,
        }

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        target = await self.target(body.model)
        if (
            beyond := next(
                (token for token in body.tokens if token >= target.described.vocabulary.size), None
            )
        ) is not None:
            raise ApiError(
                400,
                f"token id {beyond} is beyond the vocabulary of {target.described.vocabulary.size}",
                param="tokens",
            )
        return {
            "prompt": await _here_or_elsewhere(
                lambda: target.text.decode(body.tokens, special=True), len(body.tokens)
            )
        }

    async def model(self, name: str | None = None) -> dict[str, Any]:
        """The served model, as OpenAI lists it."""
        target = await self.target(name)
        return {
            "id": self.name_of(target),
            "object": "model",
            "created": self.began,
            "owned_by": "dovetail",
            "root": self.name_of(target),
            "max_model_len": target.context,
        }

    async def reported(self) -> Reported | None:
        with suppress(ApiError):
            return await self.gateway.status()
        return None

    async def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests are served, and what is missing; a draft that is missing makes them
        slower, no worse."""
        if (state := await self.reported()) is None:
            missing = [self.gateway.missing or "the coordinator does not answer"]
            return False, {
                "ready": False,
                "status": "waiting",
                "degraded": True,
                "missing": missing,
                "faults": [],
                "loading": [],
            }
        there = any(
            "target" in worker.roles and not (worker.standby or worker.stuck)
            for worker in state.workers
        )
        faults = [fault.model_dump() for fault in state.faults]
        loading = [{**told.model_dump(), "left_s": told.left_s} for told in state.loading]
        status = (
            "ready"
            if there
            else "loading"
            if any("target" in told.roles for told in state.loading)
            else "waiting"
        )
        return there, {
            "ready": there,
            "status": status,
            "degraded": state.degraded,
            "missing": list(state.reasons),
            "faults": faults,
            "loading": loading,
        }

    async def metrics(self) -> bytes:
        reported, name = await self.reported(), self.terms.model
        if reported is not None and not name:
            with suppress(ApiError):
                name = self.name_of(await self.gateway.target())
        return self.exposition.text(
            reported,
            name,
            answering=len(self.runs),
            connections=len(self.connections.open),
            let_go=self.connections.let_go,
        )


class Answer:
    """One answer while it is written, with what it is worth to the metrics."""

    def __init__(self, run: Run, writer: Writer, exposition: Exposition, model: str) -> None:
        self._run, self._writer = run, writer
        self._watches = [exposition.watch(model, run.began_s) for _ in writer.replies]

    async def whole(self) -> dict[str, Any]:
        """The answer, when all of it is there."""
        while heard := await self._run.take():
            for index, told in heard:
                self._note(index, told)
                reply = self._writer.replies[index]
                self._writer.keep(reply, reply.hear(told))
        return self._writer.whole()

    async def lines(self) -> AsyncIterator[bytes]:
        """The answer as it comes; an error is the last line."""
        try:
            while heard := await self._run.take():
                said = ""
                for index, told in heard:
                    self._note(index, told)
                    reply = self._writer.replies[index]
                    said += self._writer.lines(reply, reply.hear(told))
                if said:
                    yield said.encode()
            yield self._writer.last_lines()
        except ApiError as error:
            yield error_event(error)

    def _note(self, index: int, told: Any) -> None:
        watch = self._watches[index]
        if isinstance(told, Emitted) and told.tokens:
            watch.tokens(len(told.tokens))
        elif told.type == "finished":
            watch.ended()


class Stream(Response):
    """Server-sent events, written as they come; `done` is called however it ends."""

    def __init__(self, answer: Answer, done: Callable[[], None]) -> None:
        super().__init__(headers=EVENT_STREAM)
        del self.headers["content-length"]
        self._answer, self._done = answer, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            send = scope.get(STRAIGHT, send)
            async for lines in self._answer.lines():
                await send({"type": "http.response.body", "body": lines, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except Gone:
            return
        finally:
            self._done()


def open_app(service: Service) -> App:
    """The whole API, with its guard before it."""
    terms = service.terms
    app = FastAPI(
        title="dovetail",
        version=terms.version or "0",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    _add_completions(app, service)
    _add_texts(app, service)
    _add_state(app, service)
    _add_errors(app)
    open_paths = OPEN_PATHS
    if terms.dashboard != "off":
        about = {"version": terms.version, "began": service.began, "pid": os.getpid()}
        add_dashboard(
            app, Watch(service.gateway, shown=terms.dashboard, name=service.name_of, about=about)
        )
        open_paths += tuple(page_files())
    describe(app, keyed=bool(terms.keys))
    return Guard(
        app,
        keys=terms.keys,
        most_body_bytes=terms.most_body_bytes,
        only_local_names=terms.only_local_names,
        open_paths=open_paths,
    )


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", **documented("chat"))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """The reply to a conversation."""
        return await service.answer(body, request)

    @app.post("/v1/completions", **documented("text"))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """The continuation of a text."""
        return await service.answer(body, request)


def _add_texts(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", **documented("models"))
    async def models() -> Response:
        """The served model, in a list."""
        return _json({"object": "list", "data": [await service.model()]})

    @app.get("/v1/models/{name:path}", **documented("model"))
    async def model(name: str) -> Response:
        """The served model."""
        return _json(await service.model(name))

    @app.post("/tokenize", **documented("tokenize"))
    async def tokenize(body: TokenizeBody) -> Response:
        """The token ids of a text, or of a conversation."""
        return _json(await service.tokenize(body))

    @app.post("/detokenize", **documented("detokenize"))
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        return _json(await service.detokenize(body))


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", **documented("health"))
    async def health() -> Response:
        """Whether this server lives and has a coordinator."""
        return Response(status_code=503 if service.gateway.missing else 200)

    @app.get("/readyz", **documented("readyz"))
    async def readyz() -> Response:
        """Whether requests are served, and what is missing."""
        ready, state = await service.ready()
        return _json(state, 200 if ready else 503)

    @app.get("/version", **documented("version"))
    async def version() -> Response:
        """The version of dovetail."""
        return _json({"version": service.terms.version})

    @app.get("/load", **documented("load"))
    async def load() -> Response:
        """How many requests are being answered."""
        return _json({"server_load": len(service.runs)})

    @app.get("/metrics", **documented("metrics"))
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(await service.metrics(), headers={"content-type": CONTENT_TYPE})


UNPARSED = "There was an error parsing the body"
"""FastAPI's words for every body that it cannot read for another reason than its JSON's syntax."""


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> Response:
        return _json(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = _most_telling(error.errors())
        field = place(first["loc"])
        text = _no_object(request, first) if field is None else f"{field}{complaint(first)}"
        return _json(ApiError(400, text, param=field).body, 400)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        if error.status_code in (404, 405):
            text = f"{request.method} {request.url.path} is not served here{_allowed(error)}"
        elif error.detail == UNPARSED:
            text = "the body is not valid JSON in UTF-8, or nested too deeply"
        else:
            text = str(error.detail)
        return _json(ApiError(error.status_code, text).body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def ours(_: Request, error: Exception) -> Response:
        return _json(
            ApiError(500, f"the server failed: {type(error).__name__}", code="internal").body, 500
        )


def _allowed(error: HTTPException) -> str:
    """Return what may be asked instead, of a path that takes other methods."""
    methods = (error.headers or {}).get("Allow", "")
    return f": use {methods}" if methods else ""


def _no_object(request: Request, error: Any) -> str:
    """Why there are no fields: curl's -d has a header of its own, which is no JSON's."""
    kind = request.headers.get("content-type", "")
    if "json" in kind and error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}"
    if "json" in kind:
        return "the body is no JSON object: send the fields within { and }"
    return (
        "the body came with the header "
        f"{f'Content-Type: {kind[:80]}' if kind else 'of no type'}: send it with Content-Type: "
        "application/json"
    )


def _most_telling(errors: Sequence[Any]) -> Any:
    """Of the complaints about the first wrong field, the one about the form that it was meant to
    have: of the right type, and exact about the place."""
    same = (error for error in errors if error["loc"][:2] == errors[0]["loc"][:2])
    return max(same, key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])))


async def _until_gone(request: Request, run: Run) -> None:
    """End a run when its client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    run.fail(Gone())


async def _here_or_elsewhere(work: Callable[[], R], size: int) -> R:
    """What is short is done at once, what is long in a thread."""
    if size <= SMALL_CHARACTERS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


def _size(body: ChatOrTextBody | TokenizeBody) -> int:
    """Characters or token ids to read."""
    if isinstance(body, CompletionBody):
        given = body.prompt
        return (
            len(given)
            if isinstance(given, str)
            else sum(1 if isinstance(part, int) else len(part) for part in given)
        )
    prompt = body.prompt if isinstance(body, TokenizeBody) else None
    return len(prompt or "") + sum(len(message.text) for message in body.messages or ())


def _late(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the request has taken longer than {seconds:g} s (http.deadline_s) and was cancelled",
        code="timeout",
    )


def _json(value: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(
        json.dumps(value, separators=(",", ":")),
        status,
        headers=dict(headers or {}),
        media_type="application/json",
    )
