"""Parts of messages: a session's share of a pass, and the comparison of commands."""

from collections.abc import Sequence

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages import (
    Command,
    Draft,
    Drafts,
    Event,
    Open,
    Refeed,
    Verified,
    VerifiedItem,
    Verify,
)
from dovetail.runtime.session.draft_sync import features_of_items


def own_part(command: Verify | Drafts, session: int) -> Verify | Draft:
    """Return this session's part of a pass over several sessions, or of orders for several."""
    if isinstance(command, Drafts):
        orders = command.split()
        return next((order for order in orders if order.session == session), orders[0])
    return _own_part(command, session)


def _own_part(verify: Verify, session: int) -> Verify:
    first = 0
    for item in verify.items:
        rows = 1 + len(item.tokens)
        if item.session == session:
            drawn = {
                name: _rows(getattr(verify, name), first, first + rows)
                for name in ("candidates", "probabilities")
            }
            return verify.model_copy(update={"items": (item,), "reads": (), **drawn})
        first += rows
    return verify


def own_verdicts(event: Event, session: int) -> Sequence[tuple[VerifiedItem, Array | None]]:
    """Return this session's verdicts of a pass, with features if their count is right."""
    if not isinstance(event, Verified):
        return []
    every = zip(event.items, features_of_items(event), strict=True)
    return [(item, features) for item, features in every if item.session == session]


def _rows(array: Array | None, start: int, stop: int) -> Array | None:
    return None if array is None else array.rows(start, stop)


def is_sent_as(asked: Command, sent: Command) -> bool:
    """Return whether a command is the requested one, with all or, except under rejection sampling,
    a prefix of its tree. A log may be read in parts."""
    if isinstance(sent, Open | Refeed):
        return asked == sent.model_copy(update={"read": None})
    if isinstance(asked, Verify) and isinstance(sent, Verify) and asked.candidates is None:
        (item,), nodes = asked.items, len(sent.items[0].tokens)
        asked = asked.model_copy(
            update={
                "items": (
                    item.model_copy(
                        update={"tokens": item.tokens[:nodes], "parents": item.parents[:nodes]}
                    ),
                )
            }
        )
    return asked == sent
