"""The values that a speculation controller gives and takes: a plan before a round, what is known
of the round as it begins, and the round as it was."""

from dataclasses import dataclass, field

from dovetail.protocol.messages import Drafted
from dovetail.runtime.control.loads import ALONE, Load
from dovetail.runtime.telemetry.metrics import RoundTimes


@dataclass(frozen=True)
class Plan:
    """The plan of a round: fields of `Draft`. Bounds are below the request's own."""

    rate: float | None = None
    floor: float = 0.0
    ahead: bool = False
    deadline_ms: float | None = None
    most_depth: int | None = None
    patience_s: float | None = None
    """Seconds that the target waits for the proposal; None for no limit."""


@dataclass
class Begun:
    """A round that runs: what it began with, and what is expected of it."""

    load: Load = ALONE
    era: int = 0  # the era of the on/off when it began
    sampled: bool = True  # true if it is to be learned from
    unready: bool = False  # true if it would have been drafted, had the draft read the prompt
    ordered: bool = False  # true if a proposal was requested; without one, the round waited in vain
    deciding: bool = False
    """True if what it teaches, once it has ended, may turn drafting on or off."""
    nodes: float = 0.0  # nodes that are expected to be accepted
    expected: tuple[float, float] | None = None
    """Tokens and seconds that are expected of it; None: not known."""


@dataclass(frozen=True)
class Round:
    """A round that has ended."""

    times: RoundTimes
    context: int
    tokens: int  # tokens that it committed
    verified: int  # drafted nodes in the pass
    drafted: Drafted | None  # the proposal; None if none was asked for
    other_rows: int = 1
    """Rows of the pass without the drafted nodes: the root, and all rows of other sessions."""
    load: Load = ALONE  # the load when it ended
    disturbed: bool = False  # true if a worker read a prompt meanwhile
    unread: int = 0  # tokens that the draft would have to read before it could be asked
    begun: Begun = field(default_factory=Begun)  # the round as it began

    @property
    def late(self) -> bool:
        """Return whether the proposal did not arrive in time."""
        return self.begun.ordered and self.drafted is None

    @property
    def seconds(self) -> float:
        """Return the seconds from the verdict before it to its own."""
        return (self.times.own_ns + self.times.target_queue_ns) / 1e9
