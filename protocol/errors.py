"""The exceptions of the whole project, as one tree. A `UserError` is shown as one line with the
problem, the value and the remedy (exit code 2). A `ProtocolError` is a peer's error: the message is
dropped and counted. Any other exception is a bug, and is logged with its traceback."""


def printable(text: str) -> str:
    """Return the text without control characters, for text from a peer or a file."""
    return "".join(c if c.isprintable() else "?" for c in text)


class DovetailError(Exception):
    """The base of all exceptions that this project declares."""


class UserError(DovetailError):
    """A mistake of the user: a missing model, a misspelt setting, a prompt that is too long."""


class SettingsError(UserError):
    """A setting that is unknown, of the wrong type or out of range."""


class CheckpointError(UserError):
    """A model folder that cannot be loaded: one printable line with the file and the tensor."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class OutputError(DovetailError):
    """A file that cannot be written, with the system's error and the remedy."""


class KeysError(UserError):
    """CURVE keys that are missing, unreadable or readable by others."""


class RequestError(UserError):
    """A request that cannot be served: `code` as in `messages.Failed`, and one printable line."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(printable(text))
        self.code = code


class ProtocolError(DovetailError):
    """A message that breaks the protocol; its receiver drops it."""


class DecodeError(ProtocolError):
    """Bytes that are not a valid message: truncated, oversized, mistyped, or nested too deep."""

    request: int | None = None
    """The number of the client's request, if it could still be read."""


class StaleError(ProtocolError):
    """A message that is late, duplicate or of another incarnation; it is counted and ignored."""


class OverError(StaleError):
    """An answer about a session that has ended in the meantime: normal, and not counted."""


class TreeError(ProtocolError):
    """An invalid token tree: a parent after its child, equal siblings, an unknown id."""


class LinkError(DovetailError):
    """A message that could not be delivered."""


class PeerGone(LinkError):
    """The recipient is not connected."""


class PeerBusy(LinkError):
    """The recipient's queue is full because it does not read."""


class LinkClosed(LinkError):
    """The other end of the link is gone, or the link was closed here."""


class LinkRefused(LinkClosed):
    """The peer refuses our connection: because of the keys, or because it is another program."""
