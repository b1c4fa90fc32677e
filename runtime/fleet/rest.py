"""The unread rows of a log that a worker reads in chunks. Pure."""

from dataclasses import dataclass

from dovetail.protocol.messages import Open, ReadItem, Refeed


@dataclass(frozen=True)
class Rest:
    """The unread rows of a log that a worker reads in chunks."""

    command: Open | Refeed  # the command that the log began to be read with
    done: int
    """Rows of the log that have been read; -1: not known, since the command was not sent yet."""

    @property
    def rows(self) -> int:
        """Return how many rows of the log are to be read in all."""
        command = self.command
        return len(command.prompt) if isinstance(command, Open) else command.prefix - 1

    @property
    def left(self) -> int:
        """Return how many rows are unread, as far as known."""
        return self.rows - max(self.done, 0)

    def item(self, rows: int) -> ReadItem:
        """Return the item for the next `rows` rows."""
        command = self.command
        return ReadItem(
            session=command.session, round=command.round, start=max(self.done, 0), rows=rows
        )
