"""The answers in /openapi.json; models describe the bodies. Nothing here decides anything: a fuzzer
holds the API to it."""

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel

STATUSES = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "Without an API key only this machine is served, under the name localhost.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "The target is full; `Retry-After` says when to try again.",
    500: "The server failed.",
    503: "There is no coordinator or no target; `Retry-After` says when to try again.",
    504: "The request took longer than http.deadline_s.",
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds until then.", "schema": {"type": "integer"}}}
HEADERS = {
    401: {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}},
    429: RETRY_AFTER,
    503: RETRY_AFTER,
}
"""The headers of errors, by status."""
EVERYWHERE = (401, 403)
ASKING = (400, 404, 413, 503)
DECODING = (*ASKING, 429, 500, 504)


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every error."""

    error: ErrorFields


class CachedTokens(BaseModel):
    cached_tokens: int


class PredictedTokens(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens read and written, and how many of the drafted ones were right."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictedTokens


class ReplyMessage(BaseModel):
    role: str
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ReplyMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatReply(BaseModel):
    """A whole chat completion."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: dict[str, Any] | None = None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class TextReply(BaseModel):
    """A whole text completion."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    metrics: dict[str, Any] | None = None


class Model(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(BaseModel):
    object: str
    data: list[Model]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    prompt: str


class PartFault(BaseModel):
    part: str
    why: str
    since_s: float
    retry_s: float | None


class LoadingReply(BaseModel):
    name: str
    roles: list[str]
    host: str
    pid: int
    model: str
    doing: Literal["checking", "loading"]
    done: int
    total: int
    bytes_per_s: float
    left_s: float | None


class ReadyReply(BaseModel):
    ready: bool
    status: Literal["ready", "loading", "waiting"]
    degraded: bool
    missing: list[str]
    faults: list[PartFault]
    loading: list[LoadingReply]


class VersionReply(BaseModel):
    version: str


class LoadReply(BaseModel):
    server_load: int


EVENTS: Mapping[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
ANSWERS: Mapping[str, tuple[Any, tuple[int, ...]]] = {
    "chat": (ChatReply, DECODING),
    "text": (TextReply, DECODING),
    "models": (Models, (503,)),
    "model": (Model, (404, 503)),
    "tokenize": (TokenizeReply, ASKING),
    "detokenize": (DetokenizeReply, ASKING),
    "readyz": (ReadyReply, ()),
    "version": (VersionReply, ()),
    "load": (LoadReply, ()),
    "health": (None, ()),
    "metrics": (None, ()),
}
"""Route -> what it answers, and with which errors."""


def documented(name: str) -> dict[str, Any]:
    """The arguments with which a route is declared, so that the document says how it answers."""
    model, errors = ANSWERS[name]
    responses: dict[int | str, dict[str, Any]] = {
        status: {
            "model": ErrorReply,
            "description": STATUSES[status],
            **({"headers": HEADERS[status]} if status in HEADERS else {}),
        }
        for status in sorted((*errors, *EVERYWHERE))
    }
    responses[200] = {"description": "Done.", **({"model": model} if model is not None else {})}
    if name in ("chat", "text"):
        responses[200]["content"] = EVENTS
    if name == "readyz":
        responses[503] = {"model": ReadyReply, "description": "Requests are not served."}
    if name == "health":
        responses[503] = {"description": "There is no coordinator."}
    if name == "metrics":
        responses[200]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "responses": responses,
        "response_model": None,
        **({"response_class": Response} if model is None else {}),
    }


def describe(app: FastAPI, *, keyed: bool) -> None:
    """Have the app document itself: errors as they are, and the key if one is wanted."""
    made: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not made:
            made.update(FastAPI.openapi(app))
            for operation in (
                operation for path in made["paths"].values() for operation in path.values()
            ):
                operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                made["components"]["schemas"].pop(name, None)
            if keyed:
                made["components"]["securitySchemes"] = {
                    "key": {"type": "http", "scheme": "bearer"}
                }
                made["security"] = [{"key": []}]
        return made

    app.openapi = openapi  # type: ignore[method-assign]
