"""Replies that clients request again by the id of the response: the part that the client has, and
the memo with which the response is written again. An event id is the id of the response and, for
each reply, how much of it has been streamed: characters, tokens whose text has been shown, and e
after its last chunk. Pure."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.protocol.messages import MAX_MEMO
from dovetail.runtime.http.bodies import ChatBody, CompletionBody
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.orders import Order

PLACE = re.compile(r"(\d{1,12})(?:\.(\d{1,12})(e?))?")


@dataclass(frozen=True)
class StreamPlace:
    """The part of a reply that has been streamed."""

    characters: int = 0
    tokens: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.characters}.{self.tokens}{'e' if self.ended else ''}"

    @property
    def words(self) -> str:
        """Return the position for an error message."""
        end = ", to its end," if self.ended else ""
        return f"{self.characters} characters and {self.tokens} tokens{end}"


@dataclass(frozen=True)
class Resumed:
    """A known response, and how much of it the client has."""

    name: str
    created: int
    places: Sequence[StreamPlace | None] = ()
    """For each reply; None or missing: nothing has been streamed."""


def event_id(name: str, places: Sequence[StreamPlace | None]) -> str:
    """Return the id of an event, after which this much has been streamed."""
    return f"{name}:{','.join('' if place is None else str(place) for place in places)}"


def read_event_id(text: str) -> tuple[str, tuple[StreamPlace | None, ...]]:
    """Return a response's id, or "", and the streamed parts; a plain number is characters."""
    name, _, told = text.strip().rpartition(":")
    places: list[StreamPlace | None] = []
    for part in told.split(","):
        found = PLACE.fullmatch(part)
        if part and found is None:
            raise no_event(text)
        places.append(
            StreamPlace(int(found[1]), int(found[2] or 0), bool(found[3]))
            if found is not None
            else None
        )
    return name, tuple(places)


def no_event(text: str) -> ApiError:
    """Return the error for an invalid Last-Event-ID, or one of another response."""
    return ApiError(
        400,
        f"Last-Event-ID {text[:80]!r} is not the id of an event of this response: send the id "
        "unchanged",
        code="invalid_event_id",
    )


def beyond(place: StreamPlace, whole: StreamPlace) -> ApiError:
    """Return the error for a Last-Event-ID beyond the end of its reply."""
    return ApiError(
        400,
        f"Last-Event-ID counts {place.words} of a reply of {replace(whole, ended=False).words}: "
        "send the id of the last event unchanged",
        code="invalid_event_id",
    )


def check_same(sent: ChatBody | CompletionBody, kept: ChatBody | CompletionBody) -> None:
    """Raise `ApiError` unless a repeated request is the same, except for streaming and seed."""
    if type(sent) is type(kept) and sent.seed in (None, kept.seed) and _asked(sent) == _asked(kept):
        return
    raise ApiError(
        400,
        "Last-Event-ID belongs to another request: send it with the body of that one, or with GET "
        "and the response's id",
        code="invalid_event_id",
    )


def _asked(body: ChatBody | CompletionBody) -> dict[str, Any]:
    apart = {"seed", "stream", "stream_options"}
    return body.model_dump(mode="json", exclude_none=True, exclude=apart)


def ticketed(order: Order, body: ChatBody | CompletionBody, *, again: bool) -> Order:
    """Return the order with tickets for the journal, and a memo for writing the response again."""
    seed = order.submits[0].seed
    kept = {
        "kind": order.kind,
        "created": order.created,
        "body": body.model_copy(update={"seed": seed}).model_dump(mode="json", exclude_none=True),
    }
    memo = json.dumps(kept, separators=(",", ":")).encode()
    if len(memo) > MAX_MEMO:
        memo = b""
    submits = tuple(
        submit.model_copy(
            update={
                "ticket": f"{order.name}/{index}",
                "memo": memo if index == 0 else b"",
                "again": again,
            }
        )
        for index, submit in enumerate(order.submits)
    )
    return replace(order, submits=submits)


def remembered(memo: bytes) -> tuple[ChatBody | CompletionBody, int]:
    """Return a request's body and arrival in s since 1970; `ApiError` if it was not kept."""
    if not memo:
        text = "the request of this response was too long to be kept: send it again, with its seed"
        raise ApiError(404, text, code="reply_not_found")
    kept = json.loads(memo)
    kind = ChatBody if kept["kind"] == "chat" else CompletionBody
    return kind.model_validate(kept["body"]), int(kept["created"])
