"""The exceptions of the whole project, as one tree. A `UserError` is answered with one line: the
thing, the value and the remedy (exit code 2). A `ProtocolError` is a peer's error: the message is
dropped and counted, without further effects. Any other exception is a bug, and is logged with its
traceback.
"""


def printable(text: str) -> str:
    """One line that no terminal takes for commands, whatever a peer or a file put into it."""
    return "".join(c if c.isprintable() else "?" for c in text)


class DovetailError(Exception):
    """Every exception that this project declares."""


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
    """Bytes that are no message: truncated, oversized, mistyped, nested too deep."""

    request: int | None = None
    """The number of the client's request, if it can be read nevertheless."""


class StaleError(ProtocolError):
    """A message that is late, duplicate or of another incarnation: counted, without effect."""


class OverError(StaleError):
    """An answer about a session that has ended in the meantime: this is normal, and not counted."""


class TreeError(ProtocolError):
    """An invalid token tree: a parent behind its child, equal siblings, an unknown id."""


class LinkError(DovetailError):
    """A message that could not be delivered."""


class PeerGone(LinkError):
    """The peer that a message is meant for is not connected."""


class PeerBusy(LinkError):
    """The peer does not take messages off its queue, which is full."""


class LinkClosed(LinkError):
    """The other end of the link has gone, or the link was closed here."""


class LinkRefused(LinkClosed):
    """The peer refuses our connection: because of the keys, or it is another program."""
