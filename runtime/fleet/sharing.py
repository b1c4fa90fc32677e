"""Splits commands into parts, and decides which sessions may share a message. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.protocol.messages import Draft, Open, ReadItem, Refeed, Verify, VerifyItem


@dataclass(frozen=True)
class Rest:
    """The unread rows of a log that a worker prefills in chunks."""

    command: Open | Refeed  # the command that started the prefill
    done: int
    """Rows of the log that have been prefilled; -1: unknown, because the command was not sent
    yet."""

    @property
    def rows(self) -> int:
        """The total number of rows of the log to prefill."""
        command = self.command
        return len(command.prompt) if isinstance(command, Open) else command.prefix - 1

    @property
    def left(self) -> int:
        """The number of unread rows, if known."""
        return self.rows - max(self.done, 0)

    def item(self, rows: int) -> ReadItem:
        """Return the item for the next `rows` rows."""
        command = self.command
        return ReadItem(
            session=command.session, round=command.round, start=max(self.done, 0), rows=rows
        )


def alike(orders: Mapping[int, Draft]) -> dict[int, Draft]:
    """Return, by session, the commands whose features have the first's type and width, or none."""
    kinds = {s: (f.dtype, f.shape[1:]) for s, o in orders.items() if (f := o.features) is not None}
    kind = next(iter(kinds.values()), None)
    return {s: order for s, order in orders.items() if kinds.get(s, kind) == kind}


def drawn_from(command: Verify) -> int:
    """Return the number of tokens from which each child was drawn; 0: none was drawn."""
    return command.candidates.shape[1] if command.candidates else 0


def beginning(item: VerifyItem, nodes: int) -> VerifyItem:
    """Return the item with its first `nodes` nodes only."""
    if nodes == len(item.tokens):
        return item
    return VerifyItem.unchecked(
        session=item.session,
        round=item.round,
        prefix=item.prefix,
        tokens=item.tokens[:nodes],
        parents=item.parents[:nodes],
        hold=item.hold,
    )
