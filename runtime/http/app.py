"""The routes and the error responses. A request is parsed (`bodies.py`), tokenized (`orders.py`),
decoded (`decoding.py`, `replies.py`) and written (`apis/`); `service.py` combines these steps."""

from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from dovetail.runtime.http.apis.anthropic import add_anthropic
from dovetail.runtime.http.apis.documents import Documented, documented
from dovetail.runtime.http.apis.llama_server import add_llama_server
from dovetail.runtime.http.apis.ollama import add_ollama
from dovetail.runtime.http.apis.responses import add_responses
from dovetail.runtime.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from dovetail.runtime.http.errors import (
    ApiError,
    complaint,
    not_served,
    place,
    shaped,
    wrong_method,
)
from dovetail.runtime.http.exposition import CONTENT_TYPE
from dovetail.runtime.http.pages.site import add_pages, page_files
from dovetail.runtime.http.pages.watch import add_state
from dovetail.runtime.http.service import Service, json_response
from dovetail.runtime.http.serving.guard import OPEN_PATHS, OWNER, App, Guard, shared

BEARER = HTTPBearer(scheme_name="key", auto_error=False)
"""The API key, only for the document: the guard has checked it before a route is called."""


def open_app(service: Service) -> App:
    """Return the whole API, with its guard before it."""
    terms = service.terms
    app = Documented(
        title="dovetail",
        version=terms.version or "0",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
        dependencies=[Depends(BEARER)] if terms.keys else (),
    )
    _add_completions(app, service)
    _add_texts(app, service)
    _add_state(app, service)
    add_anthropic(app, service)
    add_responses(app, service)
    add_ollama(app, service)
    add_llama_server(app, service)
    _add_errors(app)
    files = page_files(terms.page, dashboard=service.watch is not None)
    add_pages(app, files)
    if service.watch is not None:
        add_state(app, service.watch)
    guard = Guard(
        app,
        keys=terms.keys,
        most_body_bytes=terms.most_body_bytes,
        only_local_names=terms.only_local_names,
        open_paths=(*OPEN_PATHS, *files),
    )
    return shared(guard, terms.cors)


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/chat/completions", include_in_schema=False)
    @app.post("/v1/chat/completions", **documented("chat"))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """The reply to a conversation."""
        return await service.answer(body, request)

    @app.post("/completions", include_in_schema=False)
    @app.post("/v1/completions", **documented("text"))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """The continuation of a text."""
        return await service.answer(body, request)

    @app.get("/v1/chat/completions/{name}", **documented("chat_again"))
    async def chat_again(name: str, request: Request, stream: bool | None = None) -> Response:
        """An earlier reply to a conversation, by the id of the response, as long as the journal has
        it. A stream begins after the part given by the header Last-Event-ID. With that header the
        reply is streamed unless `stream` is false."""
        return await service.resume(name, request, stream=_streamed(stream, request))

    @app.get("/v1/completions/{name}", **documented("text_again"))
    async def text_again(name: str, request: Request, stream: bool | None = None) -> Response:
        """An earlier continuation of a text, as for a conversation."""
        return await service.resume(name, request, stream=_streamed(stream, request))


def _streamed(asked: bool | None, request: Request) -> bool:
    """True if a returning client gets a stream; by default if it has received a part of one."""
    return bool(request.headers.get("last-event-id")) if asked is None else asked


def _add_texts(app: FastAPI, service: Service) -> None:
    @app.get("/models", include_in_schema=False)
    @app.get("/v1/models", **documented("models"))
    async def models() -> Response:
        """The served model and its aliases, in a list."""
        model = await service.model()
        also = [{**model, "id": name} for name in service.terms.aliases.listed(model["id"])]
        return json_response({"object": "list", "data": [model, *also]})

    @app.get("/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}", **documented("model"))
    async def model(name: str) -> Response:
        """The served model."""
        return json_response(await service.model(name))

    @app.post("/tokenize", **documented("tokenize"))
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """The token ids of a text, or of a conversation."""
        return json_response(await service.tokenize(body, request))

    @app.post("/detokenize", **documented("detokenize"))
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        return json_response(await service.detokenize(body))


def _add_state(app: FastAPI, service: Service) -> None:
    @app.delete("/v1/lookup_memory", **documented("forget"))
    async def forget(request: Request) -> Response:
        """Forget the earlier prompts and replies of this API key, in which look-ups search.
        `deleted` is false if there were none, or if none are kept."""
        found = await service.gateway.forget(request.scope.get(OWNER, ""))
        return json_response({"deleted": found})

    @app.get("/health", **documented("health"))
    async def health() -> Response:
        """Return whether this server is alive and has a coordinator."""
        return Response(status_code=503 if service.gateway.missing else 200)

    @app.get("/readyz", **documented("readyz"))
    async def readyz() -> Response:
        """Return whether requests are served, and what is missing."""
        ready, state = await service.ready()
        return json_response(state, 200 if ready else 503)

    @app.get("/version", **documented("version"))
    async def version() -> Response:
        """The version of dovetail."""
        return json_response({"version": service.terms.version})

    @app.get("/load", **documented("load"))
    async def load() -> Response:
        """Return the number of running requests."""
        return json_response({"server_load": len(service.runs)})

    @app.get("/metrics", **documented("metrics"))
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(await service.metrics(), headers={"content-type": CONTENT_TYPE})


UNPARSED = "There was an error parsing the body"
"""FastAPI's message for an unreadable body whose JSON syntax is valid."""


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return json_response(shaped(error, request.url.path), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first, *others = _most_telling(error.errors())
        field = place(first["loc"])
        text = _no_object(request, first) if field is None else f"{field}{complaint(first, others)}"
        return await known(request, ApiError(400, text, param=field))

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        asked = (request.method, request.url.path)
        if error.status_code == 404:
            return await known(request, not_served(*asked))
        if error.status_code == 405:
            wrong = wrong_method(*asked, (error.headers or {}).get("Allow", ""))
            if request.method == "OPTIONS":
                return Response(status_code=204, headers=wrong.headers)
            return await known(request, wrong)
        if error.detail == UNPARSED:
            text = "the body is not valid JSON in UTF-8, or nested too deeply"
        else:
            text = str(error.detail)
        return await known(request, ApiError(error.status_code, text))

    @app.exception_handler(Exception)
    async def ours(request: Request, error: Exception) -> Response:
        text = f"the server failed: {type(error).__name__}"
        return await known(request, ApiError(500, text, code="internal"))


def _no_object(request: Request, error: Any) -> str:
    """Return why there are no fields: for example, curl's -d does not send a JSON Content-Type."""
    kind = request.headers.get("content-type", "")
    if "json" in kind and error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}"
    if "json" in kind:
        return "the body is not a JSON object: send the fields within { and }"
    found = f"with Content-Type: {kind[:80]}" if kind else "without a Content-Type header"
    return f"the body came {found}: send it with Content-Type: application/json"


def _most_telling(errors: Sequence[Any]) -> list[Any]:
    """Return the most specific error about the first wrong field, preferably one about a value of
    the right type, followed by those of other branches about the same value. Of branches for lists,
    the one with the most valid items is the most specific."""
    same = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]

    def rank(error: Any) -> tuple[bool, int, list[int]]:
        loc = error["loc"]
        return not error["type"].endswith("_type"), len(loc), [i for i in loc if type(i) is int]

    best = max(same, key=rank)
    at = place(best["loc"])
    return [best, *(other for other in same if other is not best and place(other["loc"]) == at)]
