"""What a process of ours logs: a line on stderr for each record, whatever peers have put into their names and words."""

import logging

from dovetail.protocol.errors import printable


class OneLine(logging.Formatter):
    """The message in one line that no terminal takes for commands; a traceback, which is of our own making, stands below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def log_to_stderr(level: int, form: str = "%(asctime)s %(levelname)s %(message)s") -> None:
    """Log from this level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(form))
    logging.basicConfig(handlers=[handler], level=level)
