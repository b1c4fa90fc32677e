"""What a draft and a target that work together have learned of each other: costs, what rounds
bring, and whether drafting pays, at each load apart.

Pure: rounds are handed in by the controllers of sessions.
"""

from dataclasses import dataclass, field

from dovetail.protocol.messages import Hello, PairState
from dovetail.runtime.control.costs import Average, PairCosts
from dovetail.runtime.control.loads import Load
from dovetail.runtime.control.switch import AheadTrial, Experience, Switch

CALIBRATED = 8
"""Rounds after which what nodes promise is compared with what they bring."""
MOST_HONESTY = 2.0
PLAIN_PASSES = 16.0
"""Passes without drafting over which their time is compared with what they should take."""
MOST_SLOWDOWN = 1.5
MORE_CARE, LESS_CARE, MOST_CARE = 1.25, 0.98, 8.0
"""A round: it is kept where about a twelfth of the sessions are behind."""


class Crowd:
    """What sessions that run at once have learned at one load: one verdict holds for all of them,
    since each slows the others' passes and drafts down.

    It is judged by what all of their rounds bring in their whole time, waits for each other
    included, against rounds of as many sessions without drafting.
    """

    def __init__(self) -> None:
        self.switch = Switch(Experience(), many=True)
        self.tokens, self.seconds = Average(), Average()
        """Of a round while drafting is on."""
        self.care = 1.0
        """By how much more than its tokens a second is taken to be worth, so that no session pays
        for what others gain."""
        self._plain = Average(PLAIN_PASSES)
        """Rounds without drafting, in parts of what was expected of them."""
        self._rounds = 0
        """Without drafting, since one was judged."""

    def due(self, among: int) -> bool:
        """Count a round without drafting and return whether it is judged: one of so many sessions
        is, which share their passes."""
        self._rounds = (self._rounds + 1) % max(1, among)
        return not self._rounds

    def plain(self, seconds: float, expected_s: float) -> None:
        """A round without drafting took so long; `expected_s`: a pass over one row of every
        session, and what goes with it."""
        self._plain.add(min(MOST_SLOWDOWN, seconds / expected_s))

    def alone_s(self, expected_s: float) -> float:
        """Seconds of such a round here."""
        return expected_s * max(1.0, self._plain.value)

    def mind(self, *, behind: bool, among: int) -> None:
        """A session is behind what it would have without any drafting, or is not; `among`: sessions
        that say so, each once a round."""
        self.care = min(
            MOST_CARE, max(1.0, self.care * (MORE_CARE if behind else LESS_CARE) ** (1.0 / among))
        )

    def drafted(self, tokens: float, seconds: float) -> None:
        """A round while drafting is on has brought so much."""
        self.tokens.add(tokens)
        self.seconds.add(seconds)


@dataclass
class Pair:
    """A draft and a target that work together."""

    draft: str
    target: str
    costs: PairCosts
    shared: bool
    """Whether both compute on one device."""
    reads: bool = False
    """Whether the draft reads its target's states."""
    experiences: dict[bool, Experience] = field(
        default_factory=lambda: {True: Experience(), False: Experience()}
    )
    """Of sessions that run alone, by whether they are greedy."""
    crowds: dict[tuple[bool, tuple[int, int]], "Crowd"] = field(default_factory=dict)
    """Of sessions that run beside others, by that and the level of their load."""
    trial: AheadTrial = field(default_factory=AheadTrial)
    rounds: int = 0
    """In which was drafted."""
    controls: int = 0
    """Rounds in which nothing was, to measure the target's pass over a single row."""
    hits: Average = field(default_factory=Average)
    gamma: Average = field(default_factory=Average)
    tokens: Average = field(default_factory=Average)
    """Of a round, of those that were drafted; `seconds` likewise."""
    seconds: Average = field(default_factory=Average)
    promised: Average = field(default_factory=lambda: Average(128.0))
    """Nodes that the scores let expect to be accepted, a round; `accepted` were."""
    accepted: Average = field(default_factory=lambda: Average(128.0))
    expected: Average = field(default_factory=Average)
    """Tokens of a round that were predicted; `predicted` seconds."""
    predicted: Average = field(default_factory=Average)
    context: float = 0.0
    speculating: bool = False

    @property
    def ahead_in_doubt(self) -> bool:
        """Whether it has to be found out if drafting ahead pays: where it takes from the other, or
        where it guesses from guesses."""
        return self.shared or self.reads

    @property
    def honesty(self) -> float:
        """What a promised node is worth."""
        if self.rounds < CALIBRATED or self.promised.value <= 0.0:
            return 1.0
        return min(MOST_HONESTY, self.accepted.value / self.promised.value)

    def crowd(self, *, greedy: bool, load: Load) -> "Crowd":
        """What was learned at a load beyond a single session; nothing of it holds at another
        one."""
        key = greedy, load.level
        if key not in self.crowds:
            self.crowds[key] = Crowd()
        return self.crowds[key]

    def state(self) -> PairState:
        costs, alone_s = self.costs, self.costs.alone_s(context=self.context)
        return PairState(
            draft=self.draft,
            target=self.target,
            speculating=self.speculating,
            rounds=self.rounds,
            hit_rate=_known(self.hits),
            gamma=_known(self.gamma),
            tokens_per_s=ratio(self.tokens, self.seconds),
            alone_tokens_per_s=1.0 / alone_s if alone_s > 0.0 else None,
            predicted_tokens_per_s=ratio(self.expected, self.predicted),
            hops_us=1e6 * (costs.draft_hop_s.value + costs.target_hop_s.value)
            if costs.target_hop_s.known
            else None,
            t_v=costs.target.curve(self.context),
            t_d=costs.draft.curve(),
        )


def _known(average: Average) -> float | None:
    return average.value if average.known else None


def ratio(above: Average, below: Average) -> float | None:
    """One mean over another; None where nothing is known."""
    return above.value / below.value if below.value > 0.0 else None


def share_device(one: Hello, other: Hello) -> bool:
    """Whether two workers compute on the same device, or may: on one host the same GPU, or cores in
    common or unknown."""
    gpus = [
        hello.device.split()[0] if hello.device.startswith("cuda") else "" for hello in (one, other)
    ]
    if one.host != other.host or gpus[0] != gpus[1]:
        return False
    return (
        bool(gpus[0])
        or not (one.cores and other.cores)
        or not set(one.cores).isdisjoint(other.cores)
    )
