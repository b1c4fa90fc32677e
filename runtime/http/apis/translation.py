"""Translates the bodies of other APIs into the bodies of completions."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import from_json

from dovetail.runtime.http.bodies import LONGEST_KIND, ChatBody, CompletionBody
from dovetail.runtime.http.errors import ApiError

INVALID = "INVALID_JSON"  # the key of arguments that are no object
B = TypeVar("B", ChatBody, CompletionBody)


def as_body(kind: type[B], fields: Mapping[str, Any]) -> B:
    """Return the body of a completion with these fields, without those that are None; its errors
    are those of the request."""
    try:
        return kind.model_validate({n: v for n, v in fields.items() if v is not None})
    except ValidationError as error:
        raise _of_request(error) from None


def _of_request(error: ValidationError) -> RequestValidationError:
    return RequestValidationError(
        [{**wrong, "loc": ("body", *wrong["loc"])} for wrong in error.errors()]
    )


def unsupported(place: str, what: str, remedy: str) -> ApiError:
    """Return the error for a part of a request; `place` names it."""
    text = f"{place} {what}: {remedy}"
    return ApiError(400, text, param=_param(place), code="unsupported_parameter")


def _param(place: str) -> str:
    """Return the field that contains a place, such as messages for messages[0].content."""
    return re.split(r"[.\[]", place, maxsplit=1)[0]


def kind_of(part: Any, place: str, known: Sequence[str]) -> str:
    """Return the `type` of an object, one of those known; raise `ApiError` for others."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in known:
        shown = repr(kind)[:LONGEST_KIND] if kind is not None else "no type"
        raise unsupported(place, f"has {shown}", f"send {' or '.join(known)}")
    return str(kind)


def text_of(part: Mapping[str, Any], name: str, place: str) -> str:
    """Return a string within an object; raise `ApiError` for another value."""
    if not isinstance(text := part.get(name), str):
        raise ApiError(400, f"{place}.{name} is not a string", param=_param(place))
    return text


def texts_of(content: Any, place: str, kinds: Sequence[str] = ("text",)) -> list[str]:
    """Return the texts of content: a string, or a list of parts of these types."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        text = f"{place} is neither a string nor a list of parts"
        raise ApiError(400, text, param=_param(place))
    found = []
    for index, part in enumerate(content):
        at = f"{place}[{index}]"
        kind_of(part, at, kinds)
        found.append(text_of(part, "text", at))
    return found


def content_of(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Return the content of a message: several texts remain parts."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def function(name: Any, description: Any, parameters: Any, **more: Any) -> dict[str, Any]:
    """Return a function as OpenAI's chat completions describe it, without what is None."""
    described = {"name": name, "description": description, "parameters": parameters, **more}
    given = {name: value for name, value in described.items() if value is not None}
    return {"type": "function", "function": given}


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, or their beginning if the reply was cut off;
    other text under the key that Anthropic's documentation proposes."""
    try:
        value = from_json(text, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    return {INVALID: text} if text else {}


def call(number: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call of a conversation; its arguments are an object or JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": number, "type": "function", "function": {"name": name, "arguments": text}}
