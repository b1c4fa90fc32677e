"""The rest of a log of which a worker has been asked to read a part. Pure."""

from dataclasses import dataclass

from dovetail.protocol.messages import Open, ReadItem, Refeed


@dataclass(frozen=True)
class Rest:
    """The rest of a log that is being read."""

    command: Open | Refeed
    """It began with this command."""
    done: int
    """Rows of the log that have been read; -1: none is known to be, since it has not begun."""

    @property
    def rows(self) -> int:
        """Return how many rows the log has that are read."""
        command = self.command
        return len(command.prompt) if isinstance(command, Open) else command.prefix - 1

    @property
    def left(self) -> int:
        """Return how many rows are missing, as far as that is known."""
        return self.rows - max(self.done, 0)

    def item(self, rows: int) -> ReadItem:
        """Return the order for so many of them."""
        command = self.command
        return ReadItem(
            session=command.session, round=command.round, start=max(self.done, 0), rows=rows
        )
