"""The responses and errors of the routes in the OpenAPI document."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Response

STATUSES = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "Without an API key only this machine is served, under the name localhost.",
    404: "There is no such model, or no reply of this client with this id.",
    413: "The body is too large.",
    415: "The Content-Encoding of the body is not supported.",
    429: "The queue is full; `Retry-After` has the seconds to wait.",
    500: "The server failed.",
    503: "There is no coordinator or no target; `Retry-After` has the seconds to wait.",
    504: "The request took longer than http.deadline_s.",
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds until then.", "schema": {"type": "integer"}}}
HEADERS = {  # of errors, by status
    401: {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}},
    429: RETRY_AFTER,
    503: RETRY_AFTER,
}
EVERYWHERE = (401, 403)
ASKING = (400, 404, 413, 415, 503)
DECODING = (*ASKING, 429, 500, 504)
STREAMED = (
    *("chat", "text", "chat_again", "text_again", "messages", "responses", "completion"),
    *("ollama_chat", "ollama_generate"),
)
TEXTS = ("tokenize", "detokenize", "count_tokens", "apply_template", "ollama_show")
ERRORS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(STREAMED, DECODING),
    **dict.fromkeys(TEXTS, ASKING),
    **dict.fromkeys(("models", "forget", "props", "slots", "ollama_tags", "ollama_ps"), (503,)),
    "model": (404, 503),
    **dict.fromkeys(("readyz", "version", "load", "health", "metrics", "ollama_version"), ()),
}
"""Route -> its possible errors."""
ERROR = {  # the schema of an error's body in OpenAI's form
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                **{name: {"type": "string"} for name in ("message", "type")},
                **{name: {"type": ["string", "null"]} for name in ("param", "code")},
            },
        }
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {name: {"type": "string"} for name in ("type", "message")},
        },
    },
}
OLLAMA_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}


def _error_schema(name: str) -> dict[str, Any]:
    """Return the schema of the errors of a route, in the form of its API."""
    if name in ("messages", "count_tokens"):
        return ANTHROPIC_ERROR
    return OLLAMA_ERROR if name.startswith("ollama_") else ERROR


def documented(name: str) -> dict[str, Any]:
    """Return the arguments for declaring a route, so that the document has its responses."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {
            "content": {"application/json": {"schema": _error_schema(name)}},
            "description": STATUSES[status],
            **({"headers": HEADERS[status]} if status in HEADERS else {}),
        }
        for status in sorted((*ERRORS[name], *EVERYWHERE))
    }
    declared: dict[str, Any] = {"response_description": "Done.", "responses": responses}
    if name in STREAMED:
        lines = "application/x-ndjson" if name.startswith("ollama_") else "text/event-stream"
        responses[200] = {"content": {lines: {}}}
    if name == "readyz":
        responses[503] = {"description": "Requests are not served."}
    if name == "health":
        responses[503] = {"description": "There is no coordinator."}
    if name == "metrics":
        responses[200] = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    return {**declared, "response_class": Response} if name in ("health", "metrics") else declared


class Documented(FastAPI):
    """An app that documents status 400, not FastAPI's 422, for a wrong field."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                document["components"]["schemas"].pop(name, None)
        return super().openapi()
