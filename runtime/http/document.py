"""The document of the API, /openapi.json: which route answers what, by the models in `schemas.py`.
Nothing here decides anything: a fuzzer holds the API to it."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dovetail.runtime.http.schemas import (
    ChatEvent,
    ChatReply,
    DetokenizeReply,
    ErrorReply,
    LoadReply,
    Model,
    Models,
    ReadyReply,
    TextEvent,
    TextReply,
    TokenizeReply,
    VersionReply,
)

STATUSES = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "Without an API key only this machine is served, under the name localhost.",
    404: "There is no such model, or no reply with this id that is known to this client.",
    413: "The body is too large.",
    415: "The Content-Encoding of the body is not supported.",
    429: "The queue is full; `Retry-After` has the seconds to wait.",
    500: "The server failed.",
    503: "There is no coordinator or no target; `Retry-After` has the seconds to wait.",
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
ASKING = (400, 404, 413, 415, 503)
DECODING = (*ASKING, 429, 500, 504)
ANSWERS: Mapping[str, tuple[type[BaseModel] | None, tuple[int, ...]]] = {
    "chat": (ChatReply, DECODING),
    "text": (TextReply, DECODING),
    "chat_again": (ChatReply, DECODING),
    "text_again": (TextReply, DECODING),
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
STREAMED: Mapping[str, type[BaseModel]] = {
    "chat": ChatEvent,
    "text": TextEvent,
    "chat_again": ChatEvent,
    "text_again": TextEvent,
}
"""Route -> the server-sent events of its streams."""
SCHEMAS = "#/components/schemas/{model}"
"""The place of a model's schema in the document."""


def documented(name: str) -> dict[str, Any]:
    """Return the arguments with which a route is declared, so that the document has its answers."""
    model, errors = ANSWERS[name]
    responses: dict[int | str, dict[str, Any]] = {
        status: {
            "model": ErrorReply,
            "description": STATUSES[status],
            **({"headers": HEADERS[status]} if status in HEADERS else {}),
        }
        for status in sorted((*errors, *EVERYWHERE))
    }
    declared: dict[str, Any] = {
        "response_model": model,
        "response_description": "Done.",
        "responses": responses,
    }
    if name in STREAMED:
        event = {"$ref": SCHEMAS.format(model=STREAMED[name].__name__)}
        responses[200] = {"content": {"text/event-stream": {"itemSchema": event}}}
    if name == "readyz":
        responses[503] = {"model": ReadyReply, "description": "Requests are not served."}
    if name == "health":
        responses[503] = {"description": "There is no coordinator."}
    if name == "metrics":
        responses[200] = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    return declared if model is not None else {**declared, "response_class": Response}


class Documented(FastAPI):
    """An app whose document has two things that FastAPI's parameters cannot express: the events of
    routes that answer whole or streamed, and status 400, not 422, for a wrong field."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = super().openapi()
        schemas = document["components"]["schemas"]
        _, events = models_json_schema(
            [(event, "validation") for event in STREAMED.values()], ref_template=SCHEMAS
        )
        schemas.update(events["$defs"])
        for operation in (
            operation for path in document["paths"].values() for operation in path.values()
        ):
            operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        return document
