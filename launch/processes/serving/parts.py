"""The parts of a service, what happens to them, and what is to be done about it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A process of the service by its name, and which parts must have been ready before it is
    started."""

    name: str
    after: tuple[str, ...] = ()
    known: bool = False
    """True if it is ready when the root knows it, and only as long as it does."""
    needed: bool = True
    """True if requests cannot be served without it, or somebody else in its place."""
    beats: bool = False
    """True if it sends heartbeats once it is ready."""


@dataclass(frozen=True)
class Ending:
    """The end of a process: its exit code, and what it means in words."""

    code: int
    words: str
    mistake: bool = False
    """True if it said that the user did something wrong, which no restart mends."""
    let_go: bool = False
    """True if it ended because the root wants it no more."""
    last_line: str = ""
    """The last line that it wrote to stderr."""


@dataclass(frozen=True)
class Outage:
    """A part that was there, or was to be, and is not: why, since when, and when it is started
    again."""

    part: str
    why: str
    since_s: float
    retry_s: float | None
    """Seconds until it is restarted; None: it has been started and is not ready yet."""


@dataclass(frozen=True)
class Start:
    """Start this part now."""

    name: str


@dataclass(frozen=True)
class Replace:
    """End this part, which is alive and stuck; what it can still say of itself should be heard."""

    name: str


@dataclass(frozen=True)
class Stop:
    """End this part, which was on its way back: somebody was given its place."""

    name: str


@dataclass(frozen=True)
class Tell:
    """A line for the log."""

    text: str


@dataclass(frozen=True)
class GiveUp:
    """End the service with what this part has to say; `why` it is not started again, where that
    needs words."""

    name: str
    why: str = ""


@dataclass(frozen=True)
class Leave:
    """End the service: that was asked for."""
