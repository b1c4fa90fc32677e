"""The messages between a coordinator and its standby, which copies its journal."""

from typing import Annotated, Literal

from pydantic import Field

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages.parts import VERSION, Count, Message, Name, Version

MAX_COPIED = 1 << 20
"""Bytes of records that travel in one message."""
MAX_VOTERS = 64

Voters = Annotated[tuple[Name, ...], Field(max_length=MAX_VOTERS, fail_fast=True)]


class Follow(Message):
    """A standby asks a coordinator for its journal; the answers are Copied, all of it first and
    then what is added. One that has taken over says so with its higher term, and the coordinator
    that hears it steps down. Heard over tcp only, with the coordinator's own key."""

    type: Literal["follow"] = "follow"
    version: Version = VERSION
    host: Name
    pid: Count
    term: Count
    """The highest term that the sender knows of."""
    address: Name
    """The address at which the sender listens."""


class Copied(Message):
    """A part of a coordinator's journal, for its standby."""

    ARRAYS = ("records",)
    type: Literal["copied"] = "copied"
    number: Count
    """The number of this message on its link, from 0 without a gap."""
    records: Array | None = None
    """uint8: a part of records as they are written, each behind its length and CRC-32."""
    whole: bool = True
    """True if the last record is whole, and all that belongs to it is there; False: the records of
    the next message are the rest."""
    voters: Voters
    """The workers on other machines than the coordinator's, each as "HOST/PID/NAME": more than half
    of them decide with the standby that the coordinator has gone."""


class Confirmed(Message):
    """A standby goes by what a Copied brought, and by its voters."""

    type: Literal["confirmed"] = "confirmed"
    number: Count
