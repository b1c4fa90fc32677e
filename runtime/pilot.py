"""How a session's next round is drafted, from what its rounds have cost and brought.

A `Pair` is what a draft and a target have learned together; a `Pilot` steers one session: it prices drafting, stops and resumes it under `goodput`, has it
go on ahead where that pays, and predicts each round before it is made. Pure: rounds are handed in as values; what is decided comes back as values and
sentences.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log

from dovetail.protocol.messages import Drafted, Hello, PairState
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.costs import Average, PairCosts
from dovetail.runtime.metrics import RoundTimes
from dovetail.runtime.policies import floor_of
from dovetail.runtime.switches import AheadTrial, Experience, Switch

WINDOW = 16
"""Rounds over which a session's tokens a second are taken."""
FEW = 4
"""Rounds of a session that count for its rate at least; those that it has not had yet are taken to be as usual."""
CONTROLS = (0, 8, 32)
"""Rounds of a pair before which the target's pass over a single row is measured, as often as they are many, where no profile tells it."""
SURE = 0.8
"""How likely a guess is where text is predictable: to that depth a try goes, whatever was learned before."""
EMPTY = 4
"""Proposals of nothing, one after the other, after which what was learned of the draft is doubted."""
PRIOR_NODES = 2.0
"""Nodes for which the scores of a new session are trusted, before what they bring counts."""
MOST_HONESTY = 2.0
MOST_DEADLINE_MS = 3.6e6
STALE = 0.95
"""tau of a head that grows ahead over that of one that does not: what is below the new root was guessed from guesses. With the embedded Dovetail head at T = 0:
0.92 to 0.95 on shipped prompts and MT-bench, 0.94 to 1.00 on HumanEval and GSM8K. Not seen in scores, which are fitted to both; too little to be counted
soon."""
CALIBRATED = 8
"""Rounds after which what nodes promise is compared with what they bring."""


@dataclass(frozen=True)
class Plan:
    """How a round is drafted: fields of `Draft`; depth and nodes are bounds below the request's own."""

    rate: float | None = None
    floor: float = 0.0
    ahead: bool = False
    deadline_ms: float | None = None
    most_depth: int | None = None


@dataclass(frozen=True)
class Round:
    """A round as it was."""

    times: RoundTimes
    context: int
    tokens: int
    """That it committed."""
    verified: int
    """Drafted nodes in the pass."""
    drafted: Drafted | None
    """The proposal; None where none was asked for."""
    other_rows: int = 1
    """Of the pass, without these: its root, and all of what other sessions had in it."""


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
    experiences: dict[bool, Experience] = field(default_factory=lambda: {True: Experience(), False: Experience()})
    """By whether the sessions are greedy."""
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
        """Whether it has to be found out if drafting ahead pays: where it takes from the other, or where it guesses from guesses."""
        return self.shared or self.reads

    @property
    def honesty(self) -> float:
        """What a promised node is worth."""
        if self.rounds < CALIBRATED or self.promised.value <= 0.0:
            return 1.0
        return min(MOST_HONESTY, self.accepted.value / self.promised.value)

    def state(self) -> PairState:
        costs, alone_s = self.costs, self.costs.alone_s(context=self.context)
        return PairState(
            draft=self.draft,
            target=self.target,
            speculating=self.speculating,
            rounds=self.rounds,
            hit_rate=_known(self.hits),
            gamma=_known(self.gamma),
            tokens_per_s=_ratio(self.tokens, self.seconds),
            alone_tokens_per_s=1.0 / alone_s if alone_s > 0.0 else None,
            predicted_tokens_per_s=_ratio(self.expected, self.predicted),
            hops_us=1e6 * (costs.draft_hop_s.value + costs.target_hop_s.value) if costs.target_hop_s.known else None,
            t_v=costs.target.curve(self.context),
            t_d=costs.draft.curve(),
        )


def _known(average: Average) -> float | None:
    return average.value if average.known else None


def _ratio(above: Average, below: Average) -> float | None:
    return above.value / below.value if below.value > 0.0 else None


def share_device(one: Hello, other: Hello) -> bool:
    """Whether two workers compute on the same device, or may: on one host the same GPU, or cores in common or unknown."""
    gpus = [hello.device.split()[0] if hello.device.startswith("cuda") else "" for hello in (one, other)]
    if one.host != other.host or gpus[0] != gpus[1]:
        return False
    return bool(gpus[0]) or not (one.cores and other.cores) or not set(one.cores).isdisjoint(other.cores)


class Pilot:
    """Steers one session. Without a pair - the target alone - it plans nothing, and only keeps count of what rounds bring."""

    def __init__(
        self, number: int, *, tree: TreeSettings, pair: Pair | None, costs: PairCosts, greedy: bool, ahead: bool | None, say: Callable[[str], None]
    ) -> None:
        """`ahead`: None where it is to be found out; `say` hears of every decision."""
        self._number, self._tree, self._greedy, self._ahead, self._say = number, tree, greedy, ahead, say
        self._promise: tuple[float, float] | None = None
        """Tokens and seconds that are expected of this round."""
        self._promised = 0.0
        """Nodes that are expected to be accepted in it."""
        self._exposed_s: float | None = None
        self.expected_tokens = self.predicted_s = 0.0
        """Of all rounds that could be predicted."""
        self.controls = 0
        """Rounds in which nothing was drafted, to measure the target's pass over a single row."""
        self.work_with(pair, costs)

    def work_with(self, pair: Pair | None, costs: PairCosts) -> None:
        """Go on with these workers; what the session's rounds brought with others says nothing of them."""
        self._pair, self._costs = pair, costs
        self._switch = Switch(pair.experiences[self._greedy]) if pair is not None and self._tree.policy == "goodput" else None
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._promises = PRIOR_NODES
        self._kept_promises = PRIOR_NODES * (pair.honesty if pair is not None else 1.0)
        self._empty = 0
        if self._switch is not None and not self._switch.drafting:
            self._say(f"session {self._number} begins without drafting: with {self._names} {self._lost_of_late(self._switch)}")

    def hopeful(self, pair: Pair) -> bool:
        """Whether a session would be drafted for with this pair from the beginning."""
        return self._tree.policy != "goodput" or not pair.experiences[self._greedy].losing

    @property
    def predicted_tokens_per_s(self) -> float | None:
        return self.expected_tokens / self.predicted_s if self.predicted_s > 0.0 else None

    @property
    def cuts(self) -> bool:
        """Whether it is to be decided which of the offered nodes are verified."""
        return self._switch is not None

    @property
    def off(self) -> str | None:
        """Why nothing is drafted, where that is so."""
        if self._switch is None or self._switch.drafting:
            return None
        return f"session {self._number} decodes with the target alone: drafting with {self._names} does not pay at present"

    @property
    def _names(self) -> str:
        assert self._pair is not None
        return f"{self._pair.draft} and {self._pair.target}"

    def _lost_of_late(self, switch: Switch) -> str:
        assert self._pair is not None
        alone_s = self._costs.alone_s(context=self._pair.context)
        return f"it lost of late: {switch.last_rates(alone_s)}" if alone_s > 0.0 else "it lost of late"

    def leave(self) -> None:
        """The draft is lost."""
        self._pair = self._switch = None

    def rate(self, context: int) -> float:
        """Tokens a second of late; at first those of the pair's last rounds, else of the target alone; 0 where nothing is known."""
        tokens, seconds = (sum(values) for values in zip(*self._recent, strict=True)) if self._recent else (0.0, 0.0)
        if (missing := FEW - len(self._recent)) > 0:
            tokens, seconds = tokens + missing * self._usual(context)[0], seconds + missing * self._usual(context)[1]
        return tokens / seconds if seconds > 0.0 else 0.0

    def _usual(self, context: int) -> tuple[float, float]:
        """Tokens and seconds of a round, as far as is known before the session has had some."""
        pair = self._pair
        if pair is not None and self._switch is not None and self._switch.drafting and pair.seconds.known:
            return pair.tokens.value, pair.seconds.value
        return 1.0, self._costs.alone_s(context=context)

    # -- before the first round: the prompt ---------------------------------------------------------------------------------------------------

    def awaits_draft(self, context: int, tokens: int) -> bool:
        """Whether `goodput` waits until the draft has read a prompt of which the target read so many tokens: the first round without it would cost more."""
        if self._switch is None:
            return False
        assert self._pair is not None
        lag_s, pair = self._pair.costs.reading.expect(tokens), self._pair
        alone_s, rate = self._costs.alone_s(context=context), _ratio(pair.tokens, pair.seconds)
        return lag_s is not None and rate is not None and alone_s > 0.0 and lag_s * rate < alone_s * rate - 1.0

    def draft_read(self, tokens: int, seconds: float) -> None:
        """The draft has read the prompt, so much later than its target read so many tokens of it."""
        if self._pair is not None:
            self._pair.costs.reading.add(tokens, seconds)

    # -- before a round -------------------------------------------------------------------------------------------------------------------------

    def plan(self, context: int, *, ready: bool = True, patient: bool = True) -> Plan | None:
        """How to draft for the next round; None: not at all. `ready`: whether the draft has read the prompt; `patient`: whether it is waited for until it has,
        which `goodput` does only where it `awaits_draft`."""
        self._exposed_s = 0.0
        if self._pair is None:
            return None
        if not ready and not (patient and self._switch is None):
            return None
        if self._switch is not None and not self._switch.drafting:
            return None
        if self._switch is not None and self._control_due:
            self._pair.controls += 1
            self.controls += 1
            return None
        costs = self._pair.costs
        self._exposed_s = costs.exposed_s.value + costs.draft_hop_s.value if costs.exposed_s.known else None
        ahead = self._pair.trial.ahead if self._ahead is None and self._pair.ahead_in_doubt else self._ahead is not False
        return Plan(ahead=ahead) if self._switch is None else self._priced(context, ahead)

    @property
    def _control_due(self) -> bool:
        """Whether the target's pass over a single row has to be measured. One try for each time: other sessions may be in the pass, and have rows there."""
        assert self._pair is not None
        target, pair = self._costs.target, self._pair
        due = sum(pair.rounds >= after for after in CONTROLS)
        return not (target.profiled or target.seen(1) >= due or (target.known and pair.controls >= due))

    def _priced(self, context: int, ahead: bool) -> Plan:
        assert self._pair is not None
        assert self._switch is not None
        alone_s = self._costs.alone_s(context=context)
        if self._switch.state == "try" or self._empty >= EMPTY:
            return Plan(ahead=ahead, most_depth=self._hopeful_depth(alone_s))
        rate = self.rate(context)
        rows = 1 + ceil(self._pair.gamma.value) if self._pair.gamma.known else 1
        most = max(rows, 1 + self._tree.most_nodes)
        floor = floor_of(rate, self._costs.target.table(most + 1, context).__getitem__, rows, most)
        deadline_ms = 1e3 * alone_s * (self._tree.depth if self._pair.rounds else 2)
        return Plan(rate=rate, floor=floor, ahead=ahead, deadline_ms=deadline_ms if 0.0 < deadline_ms < MOST_DEADLINE_MS else None)

    def _hopeful_depth(self, alone_s: float) -> int:
        """Levels that pay where text is predictable; one where nothing is known of their cost."""
        level_s = self._costs.draft.at(1)
        if not 0.0 < level_s < alone_s:
            return 1
        return max(1, min(self._tree.depth, ceil(log(level_s / alone_s) / log(SURE))))

    def sends(self, context: int, scores: Sequence[float], rows: int) -> None:
        """The round's nodes of these scores are verified in a pass of so many rows: predict it."""
        promised = sum(map(exp, scores))
        self._promised = promised
        costs = self._costs
        if self._exposed_s is None or not costs.target.known or not costs.target_hop_s.known:
            self._promise = None
            return
        self._promise = 1.0 + self._honesty * promised, costs.round_s(rows=rows, context=context, exposed_s=self._exposed_s)

    # -- after it -------------------------------------------------------------------------------------------------------------------------------

    def learn(self, done: Round) -> None:
        """A round has ended."""
        seconds = done.times.own_ns / 1e9
        if seconds <= 0.0:
            return
        self._count(done, seconds)
        alone_s = self._costs.alone_s(context=done.context, rows=done.other_rows)
        if done.drafted is None:
            if self._switch is not None and alone_s > 0.0:
                self._tell(self._switch.plain(seconds, alone_s))
        else:
            self._learn_of_draft(done, done.drafted, seconds, alone_s)

    def _tell(self, words: str | None) -> None:
        """Say what was decided, if anything was."""
        if words is not None:
            self._say(f"session {self._number}, {self._names}: {words}")

    def _tell_all(self, words: str | None) -> None:
        """The same of what holds for every session of the pair."""
        if words is not None:
            self._say(f"{self._names}: {words}")

    def _count(self, done: Round, seconds: float) -> None:
        times, costs = done.times, self._costs
        if self._promise is not None:
            self.expected_tokens += self._promise[0]
            self.predicted_s += self._promise[1]
        costs.target_hop_s.add(times.target_hop_ns / 1e9)
        (costs.plain_host_s if done.drafted is None else costs.host_s).add(times.coordinator_ns / 1e9)
        self._recent.append((self._brought(done.tokens), seconds))

    def _brought(self, tokens: int) -> float:
        """What a round has brought, with half of the chance taken out: between its tokens and what its nodes were worth, by what such promises brought."""
        kept = 1.0 - 1.0 / WINDOW
        self._promises = kept * self._promises + self._promised
        self._kept_promises = kept * self._kept_promises + tokens - 1.0
        return 0.5 * (tokens + 1.0 + self._promised * self._honesty)

    @property
    def _honesty(self) -> float:
        """What a promised node was worth of late."""
        return min(MOST_HONESTY, self._kept_promises / self._promises)

    def _learn_of_draft(self, done: Round, drafted: Drafted, seconds: float, alone_s: float) -> None:
        pair, times = self._pair, done.times
        if pair is None:
            return
        pair.costs.exposed_s.add(times.draft_ns / 1e9)
        pair.costs.draft_hop_s.add((times.draft_hop_ns + times.draft_queue_ns) / 1e9)
        for rows, duration_ns in drafted.passes:
            pair.costs.draft.observe(rows, duration_ns / 1e9)
        if self._promise is not None:
            pair.expected.add(self._promise[0])
            pair.predicted.add(self._promise[1])
        pair.rounds += 1
        pair.context = float(done.context)
        for average, value in (
            (pair.hits, float(drafted.hit)),
            (pair.gamma, float(done.verified)),
            (pair.tokens, float(done.tokens)),
            (pair.seconds, seconds),
            (pair.promised, self._promised),
            (pair.accepted, done.tokens - 1.0),
        ):
            average.add(value)
        self._empty = 0 if drafted.tokens else self._empty + 1 if self._empty < EMPTY else 0
        judged_s = seconds + times.missed_ns / 1e9
        if self._switch is not None and alone_s > 0.0:
            self._tell(self._switch.drafted(self._recent[-1][0], judged_s, alone_s))
        pair.speculating = self._switch is None or self._switch.state == "on"
        if self._ahead is None and pair.ahead_in_doubt:
            tokens = 1.0 + self._honesty * self._promised
            self._tell_all(pair.trial.drafted(STALE * tokens if pair.reads and pair.trial.ahead else tokens, seconds))
