"""Chunked prefill: the command that reads another chunk of a log after its Open or Refeed, and the
event that answers every chunk but the last."""

from typing import Annotated, Literal

from pydantic import Field

from dovetail.protocol.messages.parts import MAX_TOKENS, AboutSession, Count, Message, SpanFields
from dovetail.protocol.settings import Frozen


class ReadItem(Frozen):
    """A chunk of a log to be read."""

    session: Count
    round: Count
    """The round of the Open or Refeed."""
    start: Count
    """Rows of the log that have been read so far, those of a base included."""
    rows: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """The most additional rows to read."""


class Read(Message):
    """Read another chunk of the log of an Open or a Refeed whose `read` did not cover all of it."""

    type: Literal["read"] = "read"
    item: ReadItem


class Reading(AboutSession):
    """A chunk of a log has been read, and rows are left. Answers an Open, a Refeed, a Read and each
    of the `reads` of a Verify. The last chunk is answered by Opened or Refed instead."""

    type: Literal["reading"] = "reading"
    round: Count = 0
    done: Count
    """Rows of the log that have been read so far, those of a base included."""
    spans: SpanFields = ()
