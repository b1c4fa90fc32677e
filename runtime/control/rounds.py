"""The values of a speculation controller: the load of a session's workers, a plan, a round at its
beginning and at its end, and the calibration of predictions."""

from dataclasses import dataclass, field
from functools import cache

from dovetail.protocol.messages import Drafted
from dovetail.runtime.session.lookup_memory import Recalled
from dovetail.runtime.telemetry.metrics import RoundTimes

WINDOW = 16  # rounds over which a session's own figures are averaged
PRIOR_NODES = 2.0  # expected nodes for which the pair's calibration outweighs the session's own
MOST_CALIBRATION = 2.0


class Calibration:
    """Compares the nodes expected by scores with those accepted."""

    def __init__(self, prior: float) -> None:
        """`prior`: the calibration of the pair of workers."""
        self._expected, self._accepted = PRIOR_NODES, PRIOR_NODES * prior
        self.factor = min(MOST_CALIBRATION, prior)  # accepted nodes for each expected node

    def learn(self, tokens: int, expected_nodes: float) -> float:
        """Count a round. Return the mean of its committed and expected tokens, which halves the
        effect of chance."""
        kept = 1.0 - 1.0 / WINDOW
        self._expected = kept * self._expected + expected_nodes
        self._accepted = kept * self._accepted + tokens - 1.0
        self.factor = min(MOST_CALIBRATION, self._accepted / self._expected)
        return 0.5 * (tokens + 1.0 + expected_nodes * self.factor)


@dataclass(frozen=True)
class Load:
    """Sessions past prefill on a session's workers, including itself."""

    target: int = 1  # on its target, each with at least one row in a pass
    draft: int = 1  # on its draft
    alone: bool = field(init=False, repr=False)  # True if no other session runs on these workers
    level: tuple[int, int] = field(init=False, repr=False)
    """Loads of one level are treated alike: 1, 2, 3 and 4, 5 to 8, 9 to 16, ..."""

    def __post_init__(self) -> None:
        target, draft = self.target, self.draft
        object.__setattr__(self, "alone", target <= 1 and draft <= 1)
        object.__setattr__(self, "level", ((target - 1).bit_length(), (draft - 1).bit_length()))

    def __str__(self) -> str:
        return f"{self.target} sessions on the target, {self.draft} on the draft"


ALONE = Load()
load_of = cache(Load)  # returns the load with these counts, cached because every round needs it


@dataclass(frozen=True)
class Plan:
    """The plan of a round: fields of `Draft`. Bounds are at most the request's own."""

    rate: float | None = None
    floor: float = 0.0
    ahead: bool = False
    deadline_ms: float | None = None
    most_depth: int | None = None
    recalled: Recalled = ()
    patience_s: float | None = None
    """Seconds that the target waits for the proposal; None for no limit."""


@dataclass
class Begun:
    """A running round: its initial state and its prediction."""

    load: Load = ALONE
    era: int = 0  # the era of the on/off when it began
    sampled: bool = True  # True if the controller learns from it
    unready: bool = False  # True if only the draft's missing prefill prevented drafting
    ordered: bool = False  # True if a proposal was requested
    spared: bool = False  # True if none was requested, since the draft would find nothing
    deciding: bool = False  # True if learning from it may turn drafting on or off
    nodes: float = 0.0  # expected accepted nodes
    expected: tuple[float, float] | None = None  # expected tokens and seconds; None: not known


@dataclass
class Round:
    """A round that has ended."""

    times: RoundTimes
    context: int
    tokens: int  # tokens that it committed
    verified: int  # drafted nodes in the pass
    drafted: Drafted | None  # the proposal; None if none was requested
    other_rows: int = 1
    """Rows of the pass without the drafted nodes: the root, and all rows of other sessions."""
    load: Load = ALONE  # the load when it ended
    disturbed: bool = False  # True if a worker prefilled a prompt meanwhile
    unread: int = 0  # tokens that the draft would first have to prefill
    begun: Begun = field(default_factory=Begun)  # the round as it began

    @property
    def late(self) -> bool:
        """Whether the proposal did not arrive in time."""
        return self.begun.ordered and self.drafted is None

    @property
    def seconds(self) -> float:
        """The seconds from the previous verdict to this round's."""
        return (self.times.own_ns + self.times.target_queue_ns) / 1e9
