"""Errors for HTTP clients: OpenAI's error object and its status. Independent of the framework."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.protocol.errors import DovetailError
from dovetail.protocol.messages import Failed

RETRY_AFTER_S = 1
RESTART_S = 5  # a restarted worker must first load its model
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Other statuses below 500 are an `invalid_request_error`, those from 500 on a `server_error`."""
BRANCHES = (
    *("str", "int", "float", "bool", "list", "dict", "constrained", "function", "tagged"),
    *("nullable", "literal", "json"),
)
"""Prefixes of union branches in an error's location, which are not field names."""
KEY = "[key]"  # the part of a location that follows a wrong key of a table


class ApiError(DovetailError):
    """An error response: status, OpenAI's `param` and `code`, and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.allow = allow
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    @property
    def headers(self) -> dict[str, str]:
        wait = {"retry-after": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        wait = {**wait, "allow": self.allow} if self.allow else wait
        return {**wait, **({"www-authenticate": "Bearer"} if self.status == 401 else {})}


ANTHROPIC = "/v1/messages"  # the beginning of the paths of Anthropic's API
OLLAMA = "/api/"
ANTHROPIC_TYPES = {
    **TYPES,
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Other statuses from 500 on are an `api_error`."""


def shaped(error: ApiError, path: str) -> dict[str, Any]:
    """Return the body of an error in the form of the API to which a path belongs."""
    if path.startswith(ANTHROPIC):
        kind = "invalid_request_error" if error.status < 500 else "api_error"
        kind = ANTHROPIC_TYPES.get(error.status, kind)
        return {"type": "error", "error": {"type": kind, "message": str(error)}}
    return {"error": str(error)} if path.startswith(OLLAMA) else error.body


OTHERS: Mapping[str, Sequence[str]] = {
    "/v1/chat/completions": ("/chat/completion",),
    "/v1/completions": ("/generate_stream",),
    "/v1/responses": (),
    "/v1/messages": (),
    "/v1/models": (),
    "/api/generate": (),
    "/api/chat": (),
    "/api/tags": (),
    "/completion": (),
    "/tokenize": (),
    "/detokenize": (),
}
"""Served paths, with the endings of corresponding paths in other APIs."""


EMBEDDINGS = ("/embeddings", "/embedding", "/embed", "/rerank", "/reranking", "/pooling")
MANAGED = ("/api/pull", "/api/create", "/api/copy", "/api/push", "/api/delete")  # ollama's


def wrong_method(method: str, path: str, allow: str) -> ApiError:
    """Return a 405 error; a path that allows GET allows HEAD, too."""
    allow = "GET, HEAD" if "GET" in allow else allow
    text = f"{method} {path} is not served here: use {allow}"
    return ApiError(405, text, allow=f"{allow}, OPTIONS")


def not_served(method: str, path: str) -> ApiError:
    """Return a 404 error that names the path that was probably intended."""
    end, hint = path.rstrip("/"), "/openapi.json lists what is"
    if end.endswith(EMBEDDINGS):
        text = "embeddings are not computed here, since the model writes text: use another server"
        return ApiError(404, f"{method} {path} is not served here: {text}")
    if path in MANAGED:
        hint = "`dovetail pull` on the server's machine fetches a model, `dovetail rm` deletes it"
    for served, others in OTHERS.items():
        if end.endswith((served.removeprefix("/v1").removeprefix("/api"), *others)):
            hint = f"{served} is"
            break
    return ApiError(404, f"{method} {path} is not served here: {hint}")


def unavailable(why: str, *, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Return a 503 error: a coordinator or target is missing, perhaps temporarily."""
    return ApiError(503, why, code="unavailable", retry_after_s=retry_after_s)


def unread(seconds: float) -> ApiError:
    """Return a 408 error: the client does not read its stream."""
    text = (
        f"this client has read nothing for {seconds:g} s (http.receive_s), and its request "
        "was ended: read replies as they arrive"
    )
    return ApiError(408, text, code="client_too_slow")


def of_failure(failed: Failed) -> ApiError:
    """Return the HTTP error for a failure reported by the coordinator."""
    match failed.code:
        case "settings":
            return ApiError(400, failed.text)
        case "constraint":
            return ApiError(400, failed.text, code="unsupported_grammar")
        case "prompt_too_long":
            return ApiError(400, failed.text, code="context_length_exceeded")
        case "capacity":
            return ApiError(
                429, failed.text, code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S
            )
        case "no_target":
            text = (
                "there is no target worker: if one is starting, try again once it has loaded "
                "its model, as /readyz reports"
            )
            return unavailable(text, retry_after_s=RESTART_S)
        case "worker_lost":
            return unavailable(
                "the target worker was lost during this request, and no other one of its "
                "fingerprint could continue it: try again once one is running, or now if /readyz "
                "is ready",
                retry_after_s=RESTART_S,
            )
        case "ticket":
            return ApiError(404, failed.text, code="reply_not_found")
        case "memory" | "vocabulary" | "coordinator_lost" | "ending":
            return unavailable(failed.text)
        case _:
            return ApiError(500, failed.text, code=failed.code)


KINDS = {
    "finite": "a finite number",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model_attributes": "an object",
    "model": "an object",
}
"""Descriptions of valid values, by the beginning of the type of a validation error."""
MOST_SHOWN = 40


def complaint(error: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the text after a field's name: the problem, the value, and the remedy. `others`:
    errors about the same value in other branches of a union."""
    kind, context = str(error["type"]), error.get("ctx", {})
    shown = f" is {_shown(error.get('input'))}"
    bounds = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "more than"),
        "less_than_equal": ("le", "at most"),
        "less_than": ("lt", "less than"),
    }
    if kind == "missing":
        return " is missing"
    if kind in bounds:
        key, words = bounds[kind]
        return f"{shown}: send {words} {_shown(_exact(context[key]))}"
    if kind in ("too_short", "string_too_short"):
        least = context["min_length"]
        one = "one character" if kind == "string_too_short" else "one item"
        short = f" is too short: send at least {least}"
        return f" is empty: send at least {one}" if least == 1 else short
    if kind in ("too_long", "string_too_long"):
        of = "characters" if kind == "string_too_long" else "items"
        return f" is too long: send at most {context['max_length']} {of}"
    if kind in ("literal_error", "enum"):
        return f"{shown}: send {context['expected']}"
    if kind == "string_pattern_mismatch" and error["loc"][-1] != "[key]":
        return f"{shown}: send a text that matches {context['pattern']}"
    if kind == "string_pattern_mismatch":
        return f" has the key {_shown(error.get('input'))}: send token ids as keys"
    if _wanted(kind):
        *most, last = dict.fromkeys(filter(None, (_wanted(e["type"]) for e in (error, *others))))
        return f"{shown}: send {', '.join(most)}{' or ' if most else ''}{last}"
    return f": {str(error['msg']).removeprefix('Value error, ')}"


def _wanted(kind: str) -> str | None:
    """Return a description of the valid values for a field whose value has the wrong type."""
    kind = {"finite_number": "finite", "int_from_float": "int"}.get(kind, kind)
    return KINDS.get(kind.removesuffix("_type").removesuffix("_parsing"))


def _exact(bound: float) -> float:
    """Return a bound as an integer if it is one."""
    return int(bound) if bound == int(bound) else bound


def _shown(value: object) -> str:
    """Return a value as JSON, or its beginning."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def place(loc: Sequence[str | int]) -> str | None:
    """Return the field that a validation error is about, in OpenAI's notation:
    `messages[0].content`."""
    name = ""
    for part in loc[1 : loc.index(KEY) - 1 if KEY in loc else None]:
        if isinstance(part, int) or part.isdigit():  # an item, or a key of logit_bias
            name += f"[{part}]" if name else ""
        elif part.isidentifier() and part not in BRANCHES:
            name += f".{part}" if name else part
    return name or None
