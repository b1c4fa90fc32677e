"""The values of a speculation controller: a plan, a round as it begins, and as it was."""

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
    """A running round: its initial state and its prediction."""

    load: Load = ALONE
    era: int = 0  # the era of the on/off when it began
    sampled: bool = True  # True if it is learned from
    unready: bool = False  # True if only the draft's missing prefill prevented drafting
    ordered: bool = False  # True if a proposal was requested
    deciding: bool = False  # True if learning from it may turn drafting on or off
    nodes: float = 0.0  # expected accepted nodes
    expected: tuple[float, float] | None = None  # expected tokens and seconds; None: not known


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
    disturbed: bool = False  # True if a worker prefilled a prompt meanwhile
    unread: int = 0  # tokens that the draft would have to prefill first
    begun: Begun = field(default_factory=Begun)  # the round as it began

    @property
    def late(self) -> bool:
        """Whether the proposal did not arrive in time."""
        return self.begun.ordered and self.drafted is None

    @property
    def seconds(self) -> float:
        """The seconds from the previous verdict to its own."""
        return (self.times.own_ns + self.times.target_queue_ns) / 1e9
