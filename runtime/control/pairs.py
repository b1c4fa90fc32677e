"""Pairs of a draft and a target: what their sessions have learned about costs, the yield of rounds,
and whether drafting pays off at each load. Pure: rounds are arguments."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.protocol.messages import Drafted, Hello, PairState
from dovetail.runtime.control.on_off import SETTLING, Crowd, Experience, OnOff
from dovetail.runtime.control.rounds import MOST_CALIBRATION, Load, Round
from dovetail.runtime.costs.rounds import Average, PairCosts

BLOCK = 12  # rounds of a block of a trial
TURNS: Sequence[bool] = (False, True, True, False, False, True, True, False)
WORTH = 1.02  # how much faster growth ahead must be
FIRST_PAUSE, MOST_PAUSE = 512, 8192


class AheadTrial:
    """Tries growing ahead in blocks of rounds, keeps the better choice, and tests again later."""

    def __init__(self, decided: bool | None = None) -> None:
        """`decided`: the result of an earlier trial, if there was one."""
        self.ahead = TURNS[0] if decided is None else decided
        self._round = self._block = 0
        self._pause = 0 if decided is None else FIRST_PAUSE
        self._next_pause = FIRST_PAUSE
        self._sums = {False: [0.0, 0.0], True: [0.0, 0.0]}
        self.decided = decided  # the last result

    def drafted(self, tokens: float, seconds: float) -> str | None:
        """Count a round with drafting. Return a new decision in words, or None."""
        if self._pause:
            self._pause -= 1
            if not self._pause:
                self.ahead = TURNS[0]
            return None
        self._round += 1
        if self._round > SETTLING:
            sums = self._sums[self.ahead]
            sums[0], sums[1] = sums[0] + tokens, sums[1] + seconds
        if self._round < BLOCK:
            return None
        self._round, self._block = 0, self._block + 1
        if self._block < len(TURNS):
            self.ahead = TURNS[self._block]
            return None
        return self._judge()

    def _judge(self) -> str | None:
        without, with_ = (
            sums[0] / max(1e-9, sums[1]) for sums in (self._sums[False], self._sums[True])
        )
        self.ahead = with_ > WORTH * without
        self._block, self._pause = 0, self._next_pause
        self._next_pause = (
            min(2 * self._next_pause, MOST_PAUSE)
            if self.ahead == self.decided or self.decided is None
            else FIRST_PAUSE
        )
        self._sums = {False: [0.0, 0.0], True: [0.0, 0.0]}
        changed, self.decided = self.ahead != self.decided, self.ahead
        if self.ahead:
            verdict = "is on because it is faster"
        elif with_ <= without:
            verdict = "is off because it was not faster"
        else:
            verdict = f"is off because it was not {100 * (WORTH - 1):.0f} % faster"
        rates = f"{with_:.1f} tokens/s with it, {without:.1f} without"
        return f"drafting ahead {verdict}: {rates}" if changed else None


CPU = "cpu"  # a device that is shared by workers with common cores
MAX_WORDS = 512  # most characters of a reason or a decision; it contains names chosen by workers
NEW = 2  # first rounds of a pair, not judged because the draft's caches are cold
CALIBRATED = 8  # rounds before expected and accepted nodes are compared


@dataclass
class Pair:
    """A draft and its target."""

    draft: str
    target: str
    costs: PairCosts
    shared: bool  # True if both compute on one device
    in_turns: bool = False
    """True if both compute on the same cores; then nothing is drafted ahead."""
    reads: bool = False  # true if the draft reads its target's states
    looks_up: bool = False  # true if it is known without asking whether the draft has a proposal
    experiences: dict[bool, Experience] = field(
        default_factory=lambda: {True: Experience(), False: Experience()}
    )
    """What sessions that run alone have learned, by whether they are greedy."""
    alone: dict[bool, OnOff] = field(init=False)
    """The decision for them, kept from session to session: a short reply alone never learns that
    drafting loses."""
    crowds: dict[tuple[bool, tuple[int, int]], Crowd] = field(default_factory=dict)
    """Experience of concurrent sessions, by greediness and level of load."""
    trial: AheadTrial = field(default_factory=AheadTrial)
    rounds: int = 0  # rounds with a draft
    late: int = 0  # rounds whose proposal arrived too late
    controls: int = 0  # measurements of rounds without a draft
    hits: Average = field(default_factory=Average)
    gamma: Average = field(default_factory=Average)
    tokens: Average = field(default_factory=Average)
    """Tokens of a round with a draft; `seconds` likewise."""
    seconds: Average = field(default_factory=Average)
    expected_nodes: Average = field(default_factory=lambda: Average(128.0))
    """Expected accepted nodes per round, by scores; `accepted`: actual ones."""
    accepted: Average = field(default_factory=lambda: Average(128.0))
    expected_tokens: Average = field(default_factory=Average)
    """Predicted tokens of a round, and its predicted seconds."""
    predicted_s: Average = field(default_factory=Average)
    context: float = 0.0
    on_off: OnOff | None = None  # decided on drafting in the last round, if set

    ahead_in_doubt: bool = field(init=False)
    """Return whether drafting ahead needs a trial: on a shared device, or for a head."""

    def __post_init__(self) -> None:
        self.ahead_in_doubt = not self.in_turns and (self.shared or self.reads)
        self.alone = {greedy: OnOff(learned) for greedy, learned in self.experiences.items()}

    @property
    def calibration(self) -> float:
        """The ratio of accepted nodes to those expected by scores."""
        if self.expected_nodes.count < CALIBRATED or self.expected_nodes.value <= 0.0:
            return 1.0
        return min(MOST_CALIBRATION, self.accepted.value / self.expected_nodes.value)

    @property
    def new(self) -> bool:
        """Whether the draft's caches may still be cold."""
        return self.rounds + self.late < NEW

    def crowd(self, *, greedy: bool, load: Load) -> Crowd:
        """Return the experience at a load of several sessions; it applies to no other load."""
        key = greedy, load.level
        if key not in self.crowds:
            self.crowds[key] = Crowd()
        return self.crowds[key]

    def learn(self, done: Round, drafted: Drafted, seconds: float) -> None:
        """Learn from a drafted round and its seconds, without the wait for the target."""
        times, costs = done.times, self.costs
        costs.draft.observe_all(drafted.passes)
        if not self.new and costs.exposed_s.count == self.rounds <= NEW:  # measured while cold
            costs.exposed_s, costs.draft_hop_s = Average(), Average()
        costs.exposed_s.add(times.draft_ns / 1e9)
        costs.draft_hop_s.add(times.draft_hop_ns / 1e9)
        self.hits.add(drafted.hit)
        self.gamma.add(done.verified)
        self.tokens.add(done.tokens)
        self.seconds.add(seconds)
        self.expected_nodes.add(done.begun.nodes)
        self.accepted.add(done.tokens - 1)
        if (expected := done.begun.expected) is not None:
            self.expected_tokens.add(expected[0])
            self.predicted_s.add(expected[1])
        self.rounds += 1
        self.context = float(done.context)

    def state(self, offs: Sequence[str | None] = ()) -> PairState:
        """Return the pair's figures for `dovetail status`. `offs`: why sessions do not draft."""
        costs, alone_s = self.costs, self.costs.alone_s(context=self.context)
        return PairState(
            draft=self.draft,
            target=self.target,
            speculating=None in offs
            if offs
            else self.rounds > 0 and (self.on_off is None or self.on_off.state == "on"),
            undrafted="; ".join(
                f"{count} session{'s are' if count > 1 else ' is'} decoded without a draft: {why}"
                for why, count in Counter(filter(None, offs)).items()
            )[:MAX_WORDS],
            rounds=self.rounds,
            hit_rate=_known(self.hits),
            gamma=_known(self.gamma),
            tokens_per_s=ratio(self.tokens, self.seconds),
            alone_tokens_per_s=1.0 / alone_s if alone_s > 0.0 else None,
            predicted_tokens_per_s=ratio(self.expected_tokens, self.predicted_s),
            hops_us=1e6 * (costs.draft_hop_s.value + costs.target_hop_s.value)
            if costs.target_hop_s.known
            else None,
            t_v=costs.target.curve(self.context),
            t_d=costs.draft.curve(),
        )


def share_cores(one: Hello, other: Hello) -> bool:
    """Return whether two workers are known to share cores of one host."""
    on_cores = all(next(iter(hello.device.split()), CPU) == CPU for hello in (one, other))
    return on_cores and one.host == other.host and not set(one.cores).isdisjoint(other.cores)


def _known(average: Average) -> float | None:
    return average.value if average.known else None


def ratio(above: Average, below: Average) -> float | None:
    """Return one mean over another; None if nothing is known."""
    return above.value / below.value if below.value > 0.0 else None


def share_device(one: Hello, other: Hello) -> bool:
    """Return whether two workers compute on the same device, or may."""
    places = [next(iter(hello.device.split()), CPU) for hello in (one, other)]
    if one.host != other.host or places[0] != places[1]:
        return False
    return places[0] != CPU or not (one.cores and other.cores) or share_cores(one, other)
