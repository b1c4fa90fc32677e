"""Costs of rounds of a draft and a target, from any source of numbers. The time of a round is the
drafting for which it waits, the target's pass T_V(M, context) over M rows, and the time of messages
and the coordinator. Drafting takes t_D(rows) per pass, plus a constant per proposal."""

from collections import deque
from dataclasses import dataclass, field
from math import ceil, log

from dovetail.protocol.calibration import RowsSeconds
from dovetail.runtime.costs.passes import RowCosts

RECENT = 32.0  # values after which the weight of an older value has fallen to about a third
LAST = 16  # the number of remembered durations with their amounts


class Average:
    """A running mean of the last values; the first values have equal weights."""

    def __init__(self, recent: float = RECENT) -> None:
        self.recent, self.count = recent, 0  # values that count, and all values
        self.known = False
        self.value = 0.0  # 0 if nothing is known

    def add(self, value: float) -> None:
        """Add a value."""
        self.count = count = self.count + 1
        self.known = True
        self.value += (value - self.value) / (count if count < self.recent else self.recent)


class Lags:
    """The last durations of something with their amounts."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=LAST)

    def add(self, tokens: int, seconds: float) -> None:
        """Record the duration of this many tokens; zero tokens are ignored."""
        if tokens > 0:
            self._last.append((tokens, seconds))

    def record(self) -> list[tuple[int, float]]:
        """Return the remembered durations, oldest first."""
        return [*self._last]

    def expect(self, tokens: int) -> float | None:
        """Return seconds for this many, scaled from the nearest known number; None if unknown."""
        if not self._last:
            return None
        length, seconds = min(
            reversed(self._last), key=lambda last: abs(log(last[0] / max(1, tokens)))
        )
        return seconds * max(1.0, tokens / length)


MOST_SLOWNESS = 1.5  # a pass slower by up to this factor than similar ones is noise
DRAFTED_HOPS, UNDRAFTED_HOPS = 4, 2
"""Messages of a round with and without a draft; the coordinator receives half of them."""


@dataclass(frozen=True)
class Origin:
    """The source of a number: `dovetail calibrate`, or an estimate from limits."""

    words: str
    estimated: bool = False

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Messages:
    """Seconds that messages take."""

    hop_s: float = 0.0  # a message on its way
    coordinator_s: float = 0.0  # seconds of the coordinator for a message that it receives
    reply_s: float = 0.0  # seconds of the HTTP process per round, on the cores that compute passes

    def beside_s(self, *, drafted: bool) -> float:
        """Return the seconds of a round's messages, and of the coordinator."""
        hops = DRAFTED_HOPS if drafted else UNDRAFTED_HOPS
        return hops * self.hop_s + hops / 2 * self.coordinator_s + self.reply_s

    def scaled(self, undrafted_s: float) -> "Messages":
        """Return a copy scaled so that a round without a draft takes `undrafted_s`."""
        factor = undrafted_s / self.beside_s(drafted=False)
        return Messages(factor * self.hop_s, factor * self.coordinator_s, factor * self.reply_s)


NO_MESSAGES = Messages()


@dataclass
class PairCosts:
    """Costs of a pair of draft and target, from their rounds, else from their profiles."""

    target: RowCosts = field(default_factory=RowCosts)  # shared by all pairs of this target
    draft: RowCosts = field(default_factory=RowCosts)
    together: int = 1  # the most sessions in a pass of the draft
    levels: int = 1  # the levels that a pass of the draft predicts
    reading: Lags = field(default_factory=Lags)
    """How much later than its target the draft finishes a prefill."""
    prompts: Lags = field(default_factory=Lags)
    """Seconds that the draft took to prefill prompts, without its waits for features."""
    exposed_s: Average = field(default_factory=Average)
    """Drafting that a round with a draft waited for."""
    draft_hop_s: Average = field(default_factory=Average)
    """From the command to the proposal, without drafting."""
    target_hop_s: Average = field(default_factory=Average)
    """From Verify to Verified, without the pass."""
    host_s: Average = field(default_factory=Average)
    """Seconds that the coordinator takes for a round with a draft."""
    undrafted_s: Average = field(default_factory=Average)
    """Seconds of a round without a draft, except for the pass."""

    @property
    def order_s(self) -> float:
        """Return the seconds from an order to its proposal if the draft is free; 0: unknown."""
        return self.exposed_s.value + self.draft_hop_s.value

    @property
    def asking_s(self) -> float:
        """Return the seconds that asking its draft adds to a round; 0: unknown."""
        host_s = self.beside_s(drafted=True) - self.beside_s(drafted=False)
        return self.order_s + max(0.0, host_s)

    def most_levels(self, depth: int) -> int:
        """Return how many of `depth` levels the draft can have: a draft with several levels in a
        pass makes one pass a round."""
        return min(depth, self.levels) if self.levels > 1 else depth

    def level_s(self, sessions: int) -> float:
        """Return the seconds of a further level for this many sessions: of a pass, or 0 if the
        first pass predicts it."""
        return self.pass_s(sessions) if self.levels == 1 else 0.0

    def pass_s(self, sessions: int) -> float:
        """Return the seconds of passes over one node of each of this many sessions."""
        full, rest = divmod(sessions, self.together)
        return full * self.draft.at(self.together) + (self.draft.at(rest) if rest else 0.0)

    def orders_s(self, sessions: int) -> float:
        """Return the seconds of commands and proposals of this many sessions, and of the passes
        that are made once a round."""
        once_s = self.pass_s(sessions) - self.level_s(sessions)
        return ceil(sessions / self.together) * self.draft_hop_s.value + once_s

    def slowness(self, pass_s: float, *, rows: int, context: float, experts: int = 0) -> float:
        """Return how much slower a pass, and so its round, was than similar ones; bounded."""
        usual_s = self.target.at(rows, context, experts)
        if usual_s <= 0.0:
            return 1.0
        return min(MOST_SLOWNESS, max(1.0 / MOST_SLOWNESS, pass_s / usual_s))

    def beside_s(self, *, drafted: bool) -> float:
        """Return the seconds of a round apart from drafting and pass."""
        if self.undrafted_s.known and not drafted:
            return self.undrafted_s.value
        return self.target_hop_s.value + (self.host_s.value if drafted else 0.0)

    def alone_s(self, *, context: float = 0.0, rows: int = 1) -> float:
        """Return the seconds of an undrafted round of `rows` rows in total; 0 if unknown."""
        if not self.target.known:
            return 0.0
        return self.target.at(rows, context) + self.beside_s(drafted=False)

    def round_s(self, *, rows: int, context: float = 0.0, exposed_s: float) -> float:
        """Return the seconds of a round of this many rows that waits `exposed_s` for the draft."""
        pass_s = self.target.at(rows, context)
        return exposed_s + pass_s + self.beside_s(drafted=exposed_s > 0.0)


MEETING_S = 50e-6
"""Additional seconds of a spread layer: four synchronisations of 1 us, and half of the activations
of 16 rows (0.75 MB) at 16 GB/s. An estimate, measured on no machine."""
ASSUMED = f"{MEETING_S * 1e6:.0f} us a layer for traffic between nodes (assumed, not measured)"


@dataclass(frozen=True)
class Nodes:
    """Memory nodes over which a target can be spread."""

    count: int
    times: float  # ratio of the threads on all nodes to those on one
    meeting_s: float = MEETING_S  # additional seconds of a layer
    meeting: str = ASSUMED  # its origin, in words

    def spread_s(self, alone_s: float, layers: float) -> float:
        """Return the seconds on all nodes of this many layers that take `alone_s` on one."""
        return alone_s / self.times + layers * self.meeting_s

    def origin_of(self, alone: Origin) -> Origin:
        """Return the origin of passes over all nodes, from that of passes on one."""
        words = f"1/{self.times:.3g} of a pass on one node ({alone}), and {self.meeting}"
        return Origin(words, estimated=True)


def measured_meeting_s(
    alone: RowsSeconds, spread: RowsSeconds, *, rows: int, times: float, layers: int
) -> float:
    """Return the additional seconds of a layer on all nodes, from measured times."""
    return max(0.0, spread.at(rows) - alone.at(rows) / times) / layers
