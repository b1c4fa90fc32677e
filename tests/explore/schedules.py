"""Schedules as values: workers, and which requests and faults come when. What a failing one prints
can be pasted into a test and played again."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Literal, get_args

from dovetail.protocol.messages import TokenLogprobs

Kind = Literal[
    "kill",
    "stop",
    "stick",
    "cut",
    "sever",
    "silence",
    "silence up",
    "silence down",
    "slow",
    "twice",
    "asked twice",
    "late",
    "babble",
    "refuse",
    "forget",
    "drop",
    "fault",
    "handler",
    "join",
    "swap",
    "drain",
    "cancel",
    "leave",
    "deaf",
    "crash",
]
"""Faults: of a process (kill, stop, stick, forget), of its connection (cut, silence, slow; sever:
of all at once), of what is said over it (twice, asked twice, late, babble), of its answers (refuse,
drop), of the coordinator's code (`fault`: about one session; `handler`: in one of its rooms), of
the coordinator itself (crash), of a client (cancel, leave, deaf); and workers that come and go
(join, swap, drain)."""
KINDS: tuple[Kind, ...] = get_args(Kind)
KEPT = 1 << 16  # tokens of ended sessions that a worker keeps, if nothing else is said: all of them


@dataclass(frozen=True)
class Wish:
    """A request."""

    prompt: tuple[int, ...] = (5, 6, 7)
    tokens: int = 24
    policy: str = "dynamic"
    speculate: bool = True
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    scored: bool = False
    temperature: float = 0.0
    owner: str = ""  # its owner: requests of several owners are served in turn


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with a worker, `who` counted around, for some time; or with a
    client or the coordinator. Where a fault has no duration `for_ms` says which of its forms it
    has."""

    kind: Kind
    who: int = 0
    for_ms: int = 1000


@dataclass(frozen=True)
class Swerve:
    """A deviation from first in, first out: of what may happen next within `clock.WINDOW_NS`, that
    at this place happens, counted around. 0 would be the order in which things happen anyway."""

    place: int = 1


Step = Wish | Fault | Swerve


@dataclass(frozen=True)
class Schedule:
    """Workers, and what happens after how many other events."""

    targets: int = 1
    drafts: int = 1
    reads: bool = False  # true if drafts read features of their target
    part: int = 0  # rows of a log that workers read at a time; 0: they read it whole
    sessions: int = 64  # the most sessions that a worker holds; further requests wait
    row_ms: float = 0.2
    """Milliseconds that each row adds to a target's pass. With much more, sessions move."""
    kept: int = KEPT  # tokens of ended sessions that a worker keeps
    room: int | None = None  # tokens of all its sessions that a worker has room for
    shares: bool = False  # true if sessions begin with rows of others that stay
    journal: bool = False
    """True if requests outlive their coordinator: another one goes on with them."""
    steps: tuple[tuple[int, Step], ...] = ()


@dataclass(frozen=True)
class Reply:
    """The reply that a request must have."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    logprobs: tuple[TokenLogprobs, ...] = field(repr=False)
    scored: tuple[TokenLogprobs, ...] = field(repr=False)


def as_code(value: object) -> str:
    """Return the expression that makes a schedule, without what goes without saying."""
    if isinstance(value, tuple):
        inner = ", ".join(map(as_code, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    said = [
        f"{about.name}={as_code(given)}"
        for about in fields(value)
        if (given := getattr(value, about.name)) != about.default
    ]
    return f"{type(value).__name__}({', '.join(said)})"
