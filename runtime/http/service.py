"""The service behind the routes: from a request's body to its response. A disconnected client, a
deadline or the end of the server cancels running replies."""

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.protocol.messages import Emitted, PromptRead, Reported
from dovetail.runtime.http.apis.openai import open_writer
from dovetail.runtime.http.apis.writers import OpenWriter, Writer
from dovetail.runtime.http.asked import Aliases, RequestTarget, Told
from dovetail.runtime.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from dovetail.runtime.http.constraints import Compilers
from dovetail.runtime.http.decoding import Gone, Run, WrongVocabulary
from dovetail.runtime.http.errors import ApiError, unavailable, unread
from dovetail.runtime.http.exposition import Exposition, ReplyWatch
from dovetail.runtime.http.gateway import Gateway
from dovetail.runtime.http.orders import Defaults, Order, chat_order, completion_order, tokens_of
from dovetail.runtime.http.pages.site import Front
from dovetail.runtime.http.pages.watch import Shown, Watch
from dovetail.runtime.http.resuming import (
    Resumed,
    check_same,
    no_event,
    read_event_id,
    remembered,
    ticketed,
)
from dovetail.runtime.http.serving.guard import OWNER, STRAIGHT, UNREAD
from dovetail.runtime.http.serving.server import Connections
from dovetail.runtime.telemetry.picture import folder_name, load_of
from dovetail.runtime.text.templates import RENDERERS
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.runtime.tools.support import Support, support_of

SMALL_CHARACTERS = 4096  # texts up to this length are tokenized at once, longer ones in a thread
REFUSAL_S = 1.0  # seconds without a token after which a stream's head, with its status, is sent
SILENCE_S = 5.0  # seconds after which a silent stream gets a comment, for proxies and clients
CLIENT_GONE = 499  # nginx's status; the client has gone
STREAMED = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # headers of a stream

ChatOrTextBody = ChatBody | CompletionBody
R = TypeVar("R")


NO_ALIASES = Aliases()


@dataclass(frozen=True)
class Terms:
    """Settings of one HTTP server."""

    defaults: Defaults
    model: str = ""  # name under which the target is served; empty: its own
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of targets, by the ends of their paths; others are named after their folder."""
    called: Callable[[str], str] = folder_name  # returns a model's name in the dashboard
    version: str = ""
    keys: Sequence[str] = ()
    aliases: Aliases = NO_ALIASES
    """Other names of models."""
    deadline_s: float = 600.0
    most_body_bytes: int = 8 << 20
    only_local_names: bool = False
    cors: str = ""  # the setting http.cors
    dashboard: Shown = "off"
    """Whether there is a dashboard, and whether it shows the tokens of requests."""
    page: Front = "off"  # the page at /


class Service:
    """Answers requests; the common part of all routes."""

    def __init__(self, gateway: Gateway, terms: Terms, connections: Connections) -> None:
        self.gateway, self.terms, self.connections = gateway, terms, connections
        self.exposition = Exposition()
        self.began = int(time.time())
        self.runs: set[Run] = set()
        self.watch = self._watch() if terms.dashboard != "off" else None
        self._compilers = Compilers()
        self._reading = ThreadPoolExecutor(RENDERERS, "reading")
        self._readings: defaultdict[str, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, RENDERERS // 2)
        )
        """Limits the concurrent tokenizations of each owner, so that none takes all threads."""

    def _watch(self) -> Watch:
        terms = self.terms
        about = {
            "version": terms.version,
            "began": self.began,
            "pid": os.getpid(),
            "chat": terms.page == "chat",
        }
        return Watch(
            self.gateway,
            shown=terms.dashboard,
            name=self.name_of,
            called=terms.called,
            about=about,
            used=self.exposition.used,
        )

    def end(self) -> None:
        """Fail all waiting requests, since the server ends."""
        for run in [*self.runs]:
            run.fail(unavailable("the server is ending: try again once another one is running"))

    def name_of(self, target: RequestTarget) -> str:
        """Return the name under which the target is served."""
        return self.terms.model or target.name(self.terms.names)

    async def target(self, model: str | None = None) -> RequestTarget:
        """Return the target; raise `ApiError` if there is none, or if a client requests another
        model."""
        target = await self.gateway.target()
        name = self.name_of(target)
        if (
            model is not None
            and model not in (name, target.described.model)
            and not self.terms.aliases.covers(model, name)
        ):
            text = f"there is no model {model!r} here: {name!r} is served"
            raise ApiError(404, text, param="model", code="model_not_found")
        return target

    async def answer(
        self, body: ChatOrTextBody, request: Request, write: OpenWriter | None = None
    ) -> Response:
        """Return the response to a completion, or its rest if there is a Last-Event-ID. `write`: in
        the form of another API, which has no such ids."""
        event = request.headers.get("last-event-id", "")
        if not event or write is not None:
            return await self._answer(body, request, write=write or open_writer)
        name, _ = read_event_id(event)
        if not name:
            raise no_event(event)
        return await self.resume(name, request, stream=bool(body.stream), sent=body)

    async def resume(
        self, name: str, request: Request, *, stream: bool, sent: ChatOrTextBody | None = None
    ) -> Response:
        """Return a known response, after its Last-Event-ID; raise `ApiError` if unknown or
        different."""
        event = request.headers.get("last-event-id", "")
        named, places = read_event_id(event) if event else ("", ())
        if named not in ("", name):
            raise no_event(event)
        memo = await self.gateway.recall(f"{name}/0", request.scope.get(OWNER, ""))
        body, created = remembered(memo)
        if sent is not None:
            check_same(sent, body)
        body = body.model_copy(update={"stream": stream})
        if not stream and body.stream_options is not None:
            body = body.model_copy(update={"stream_options": None})
        return await self._answer(body, request, Resumed(name, created, places))

    async def _answer(
        self,
        body: ChatOrTextBody,
        request: Request,
        resumed: Resumed | None = None,
        write: OpenWriter = open_writer,
    ) -> Response:
        run = Run(self.gateway, self.terms.deadline_s)
        self.runs.add(run)
        watching = asyncio.create_task(_until_gone(request, run))

        def done() -> None:
            self.runs.discard(run)
            watching.cancel()
            run.close()

        try:
            owner = request.scope.get(OWNER, "")
            writer, model = await self._begin(body, run, owner, resumed, write)
            watches = [
                self.exposition.watch(model, run.began_s, owner, reply.prompt_tokens)
                for reply in writer.replies
            ]
            answer = Answer(run, writer, watches)
            if body.stream:
                request.scope[UNREAD] = partial(run.fail, unread(self.connections.receive_s))
                return Stream(answer, writer.content_type, done)
            whole = await answer.whole()
        except Gone:
            done()
            return Response(status_code=CLIENT_GONE)
        except BaseException:
            done()
            raise
        done()
        return json_response(whole)

    async def _begin(
        self,
        body: ChatOrTextBody,
        run: Run,
        owner: str,
        resumed: Resumed | None,
        write: OpenWriter,
    ) -> tuple[Writer, str]:
        """Start the replies and wait for the first message; start again if the target changes."""
        for _ in range(2):
            target = await self.target(body.model)
            order = await self._order(body, target, owner)
            if resumed is not None:
                order = replace(order, name=resumed.name, created=resumed.created)
            if self.gateway.journal:
                order = ticketed(order, body, again=resumed is not None)
            try:
                await run.begin(order, REFUSAL_S if body.stream else None)
            except WrongVocabulary:
                self.gateway.forget_target()
                continue
            places = resumed.places if resumed is not None else ()
            writer = write(order, target, self.name_of(target), places)
            return writer, self.name_of(target)
        raise unavailable("the target's vocabulary keeps changing: try again later")

    async def support(self, target: RequestTarget) -> Support:
        """Return what the target's chat template can do with thoughts and tools."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reading, support_of, target.text)

    async def prompt_of(self, body: ChatBody, request: Request) -> tuple[int, ...]:
        """Return the token ids of a chat's prompt."""
        target = await self.target(body.model)
        order = await self._order(body, target, request.scope.get(OWNER, ""))
        return order.submits[0].tokens or ()

    async def _order(self, body: ChatOrTextBody, target: RequestTarget, owner: str) -> Order:
        constraint = await self._compilers.constraint(body, target)

        def read() -> Order:
            if isinstance(body, ChatBody):
                return chat_order(body, target, self.terms.defaults, owner, constraint)
            order = completion_order(body, target, self.terms.defaults, owner)
            return order if constraint is None else order.under(constraint)

        return await self._read(read, body, owner)

    async def _read(
        self, read: Callable[[], R], body: ChatOrTextBody | TokenizeBody, owner: str
    ) -> R:
        """Tokenize a prompt: a short text at once, a long one and a chat in a thread."""
        if (isinstance(body, CompletionBody) or not body.messages) and (
            _size(body) <= SMALL_CHARACTERS
        ):
            return read()
        async with self._readings[owner]:
            return await asyncio.get_running_loop().run_in_executor(self._reading, read)

    async def tokenize(self, body: TokenizeBody, request: Request) -> dict[str, Any]:
        """Return the token ids of a text, or of a conversation."""
        target = await self.target(body.model)
        tokens = await self._read(
            lambda: tokens_of(body, target, self.terms.defaults), body, request.scope.get(OWNER, "")
        )
        if body.content is not None:
            pieces = [{"id": one, "piece": _piece(target.text, one)} for one in tokens]
            return {"tokens": pieces if body.with_pieces else list(tokens)}
        words = [target.text.token(token) for token in tokens] if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": target.context,
            "tokens": list(tokens),
            "token_strs": words,
        }

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """Return the text of token ids."""
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
        text = await _here_or_elsewhere(
            lambda: target.text.decode(body.tokens, special=True), len(body.tokens)
        )
        return {"prompt": text, "content": text}  # vLLM's field, and llama-server's

    async def model(self, name: str | None = None) -> dict[str, Any]:
        """Return the served model, as OpenAI lists it."""
        target = await self.target(name)
        return {
            "id": self.name_of(target),
            "object": "model",
            "created": self.began,
            "owned_by": "dovetail",
            "root": self.name_of(target),
            "max_model_len": target.context,
            "sampling": self.terms.defaults.sampling.model_dump(mode="json"),
        }

    async def reported(self) -> Reported | None:
        """Return the coordinator's state; None if it does not answer."""
        with suppress(ApiError):
            return await self.gateway.status()
        return None

    async def ready(self) -> tuple[bool, dict[str, Any]]:
        """Return whether requests are served, and what is missing."""
        if (state := await self.reported()) is None:
            missing = [self.gateway.missing or "the coordinator does not answer"]
            waits = {"ready": False, "status": "waiting", "degraded": True, "missing": missing}
            return False, {**waits, "faults": [], "loading": [], "load": None}
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
            "load": load_of(state),
        }

    async def metrics(self) -> bytes:
        """Return the figures for Prometheus."""
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
    """One response while it is written, with its metrics."""

    def __init__(self, run: Run, writer: Writer, watches: Sequence[ReplyWatch]) -> None:
        self._run, self._writer, self._watches = run, writer, watches
        self._read: PromptRead | None = None  # the last progress of a prompt, before any token

    async def whole(self) -> dict[str, Any]:
        """Return the response once it is complete."""
        while heard := await self._run.take():
            for index, told in heard:
                self._note(index, told)
                reply = self._writer.replies[index]
                self._writer.keep(reply, reply.hear(told))
        return self._writer.whole()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the response as it is decoded, with comments while nothing arrives; any error is
        last."""
        try:
            if opening := self._writer.opening():
                yield opening.encode()
            sent_s = time.monotonic()
            while True:
                lines = ""
                try:
                    heard = await self._run.take(sent_s + SILENCE_S - time.monotonic())
                    if not heard:
                        break
                    for index, told in heard:
                        lines += self._line(index, told)
                except TimeoutError:
                    heard = []
                now_s = time.monotonic()
                if lines:
                    sent_s = now_s
                    yield lines.encode()
                elif not heard or now_s >= sent_s + SILENCE_S:
                    sent_s = now_s
                    yield self._writer.comment(self._read)
            yield self._writer.last_lines()
        except ApiError as error:
            yield self._writer.failed(error)

    def _line(self, index: int, told: Told) -> str:
        """Return what a stream gets for a message about a reply."""
        if isinstance(told, PromptRead):
            self._read = told
            return self._writer.progress(told, index, time.monotonic() - self._run.began_s)
        self._read = None
        self._note(index, told)
        reply = self._writer.replies[index]
        return self._writer.lines(reply, reply.hear(told))

    def _note(self, index: int, told: Any) -> None:
        watch = self._watches[index]
        if isinstance(told, Emitted) and told.tokens:
            watch.tokens(len(told.tokens))
        elif told.type == "finished":
            watch.ended()


class Stream(Response):
    """A response written as it arrives; `done` is called in any case at the end."""

    def __init__(self, answer: Answer, content_type: str, done: Callable[[], None]) -> None:
        super().__init__(headers={"content-type": content_type, **STREAMED})
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


def _piece(text: TextCodec, token: int) -> str | list[int]:
    """Return a token as text; as its bytes, if it is not valid text."""
    piece = text.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def _until_gone(request: Request, run: Run) -> None:
    """End a run when its client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    run.fail(Gone())


async def _here_or_elsewhere(work: Callable[[], R], size: int) -> R:
    """Do short work at once, long work in a thread."""
    if size <= SMALL_CHARACTERS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


def _size(body: ChatOrTextBody | TokenizeBody) -> int:
    """Return the number of characters or token ids to read; 0 for a chat."""
    given = body.prompt if isinstance(body, CompletionBody | TokenizeBody) else None
    if isinstance(body, TokenizeBody) and given is None:
        given = body.content
    if isinstance(given, list):
        return sum(1 if isinstance(part, int) else len(part) for part in given)
    return len(given or "")


def json_response(value: Any, status: int = 200, headers: Any = None) -> Response:
    """Return a response with compact JSON."""
    return Response(
        json.dumps(value, separators=(",", ":")),
        status,
        headers=dict(headers or {}),
        media_type="application/json",
    )
