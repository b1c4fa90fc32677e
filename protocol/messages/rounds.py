"""The record of a round, for clients that request it."""

from typing import Annotated

from pydantic import Field

from dovetail.protocol.experts import Experts
from dovetail.protocol.messages.parts import (
    MAX_NODES,
    MAX_PASSES,
    MAX_SESSIONS,
    MAX_TOKENS,
    Count,
    Name,
    Nanoseconds,
    NodeParents,
    Nodes,
    NodeTokens,
    SpanField,
    Token,
)
from dovetail.protocol.settings import Frozen


class RoundRecord(Frozen):
    """The record of a round: the proposal, the verified part of it, the verdict, and where the time
    went."""

    round: Count
    prefix: Count
    """Tokens committed before the round; the last one is the root."""
    tokens: NodeTokens
    parents: NodeParents
    """The whole proposal, best first; the target verified the first `verified` nodes."""
    scores: Annotated[tuple[float, ...], Field(max_length=MAX_NODES, fail_fast=True)]
    verified: Count
    accepted: Nodes
    bonus: Token
    committed: Count | None = None
    """Tokens added to the reply, if it ended within the accepted path; None: the whole path and the
    bonus."""
    entropy: float | None = None
    hit: bool = False
    grown: Count = 0
    ahead: Count = 0
    wasted: Count = 0
    passes: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1, le=MAX_TOKENS)], Nanoseconds], ...],
        Field(max_length=MAX_PASSES, fail_fast=True),
    ] = ()
    draft_ns: Nanoseconds = 0
    """Drafting time that the round waited for."""
    verify_ns: Nanoseconds = 0
    experts: Experts = 0
    """Experts that the target's pass used, from Verified; 0: not counted."""
    transport_ns: Nanoseconds = 0
    queue_ns: Nanoseconds = 0
    coordinator_ns: Nanoseconds = 0

    @property
    def brought(self) -> int:
        """Tokens that the round added to the reply."""
        return len(self.accepted) + 1 if self.committed is None else self.committed


class SeenSpan(Frozen):
    """A span: an interval in which a process did one thing."""

    process: Name
    device: Name = ""
    session: Count | None = None
    """None: the span belongs to no session, or to several."""
    round: Count | None = None
    shared: Annotated[
        tuple[tuple[Count, Count], ...], Field(max_length=MAX_SESSIONS, fail_fast=True)
    ] = ()
    """Session and round of each, if it belongs to several."""
    span: SpanField
    """On the coordinator's clock; the clock of another machine is aligned to it within its
    `clock_bound_ns`."""
