"""The unread rows of a log that a worker prefills in chunks. Pure."""

from dataclasses import dataclass

from dovetail.protocol.messages import Open, ReadItem, Refeed


@dataclass(frozen=True)
class Rest:
    """The unread rows of a log that a worker prefills in chunks."""

    command: Open | Refeed  # the command that started the prefill
    done: int
    """Rows of the log that have been prefilled; -1: not known, since the command was not sent
    yet."""

    @property
    def rows(self) -> int:
        """The number of rows of the log to prefill in all."""
        command = self.command
        return len(command.prompt) if isinstance(command, Open) else command.prefix - 1

    @property
    def left(self) -> int:
        """The number of unread rows, as far as known."""
        return self.rows - max(self.done, 0)

    def item(self, rows: int) -> ReadItem:
        """Return the item for the next `rows` rows."""
        command = self.command
        return ReadItem(
            session=command.session, round=command.round, start=max(self.done, 0), rows=rows
        )
