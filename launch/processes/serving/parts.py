"""The parts of a service, their events, and the resulting actions."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A process of the service, and the parts that must be ready before it is started."""

    name: str
    after: tuple[str, ...] = ()
    known: bool = False  # true if it is ready exactly while it is registered with the root
    needed: bool = True  # true if requests cannot be served without it or a replacement
    beats: bool = False  # true if it sends heartbeats once it is ready


@dataclass(frozen=True)
class Ending:
    """The end of a process: its exit code, also in words."""

    code: int
    words: str
    mistake: bool = False  # true for a user error, which no restart mends
    let_go: bool = False  # true if the root dismissed it
    last_line: str = ""  # the last line that it wrote to stderr


@dataclass(frozen=True)
class Outage:
    """A missing part: why, since when, and when it is restarted."""

    part: str
    why: str
    since_s: float
    retry_s: float | None
    """Seconds until it is restarted; None if it has been started and is not ready yet."""


@dataclass(frozen=True)
class Start:
    """Start this part now."""

    name: str


@dataclass(frozen=True)
class Replace:
    """End this part, which is stuck, after it has dumped its stacks."""

    name: str


@dataclass(frozen=True)
class Stop:
    """End this part, which is restarting: it has been replaced."""

    name: str


@dataclass(frozen=True)
class Tell:
    """A line for the log."""

    text: str


@dataclass(frozen=True)
class GiveUp:
    """End the service with the error of this part; `why` it is not restarted, if that needs
    words."""

    name: str
    why: str = ""


@dataclass(frozen=True)
class Leave:
    """End the service, as requested."""
