"""The reading of a log in parts: the commands behind its Open or Refeed, and the event that answers
all parts but the last."""

from typing import Annotated, Literal

from pydantic import Field

from dovetail.protocol.messages.parts import (
    MAX_TOKENS,
    AboutSession,
    Count,
    Message,
    SpanFields,
)
from dovetail.protocol.settings import Frozen


class ReadItem(Frozen):
    """A part of a log that is to be read."""

    session: Count
    round: Count
    """That of the Open or Refeed."""
    start: Count
    """Rows of the log that have been read, those of a base among them."""
    rows: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """At most so many more are read."""


class Read(Message):
    """Go on reading the log of an Open or a Refeed that was not to read all of it."""

    type: Literal["read"] = "read"
    item: ReadItem


class Reading(AboutSession):
    """A part of a log has been read, and there is more of it. Answers an Open, a Refeed, a Read and
    each of the `reads` of a Verify, where that is not the last part: then Opened or Refed does."""

    type: Literal["reading"] = "reading"
    round: Count = 0
    done: Count
    """Rows of the log that have been read, those of a base among them."""
    spans: SpanFields = ()
