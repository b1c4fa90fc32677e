"""The speculation controller: how a session's next round is drafted.

It prices drafting by what else is in the pass, turns it off and on again, lets the draft go on
ahead where that pays, and predicts each round before it is made. Whatever shapes the tree, its size
is a bound, unless the request insists. Pure: rounds are handed in as values; what is decided comes
back as values and sentences.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, log

from dovetail.protocol.messages import Drafted
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.control.costs import PairCosts
from dovetail.runtime.control.loads import ALONE, Load
from dovetail.runtime.control.pairs import MOST_HONESTY, Crowd, Pair, ratio
from dovetail.runtime.control.switch import Switch
from dovetail.runtime.control.tree_size import floor_of
from dovetail.runtime.telemetry.metrics import RoundTimes

WINDOW = 16
"""Rounds over which a session's tokens a second are taken."""
FEW = 4
"""Rounds of a session that count for its rate at least; those that it has not had yet are taken to
be as usual."""
CONTROLS = (0, 8, 32)
"""Rounds of a pair before which the target's pass over a single row is measured, as often as they
are many, where no profile tells it."""
SURE = 0.8
"""How likely a guess is where text is predictable: to that depth a try goes, whatever was learned
before."""
COLD = 2
"""Rounds of a new pair that are not judged: a draft's first passes find nothing in any cache."""
EMPTY = 4
"""Proposals of nothing, one after the other, after which what was learned of the draft is
doubted."""
PRIOR_NODES = 2.0
"""Nodes for which the scores of a new session are trusted, before what they bring counts."""
BEHIND = 0.97
"""Of the rate without drafting, below which a session beside others suffers from what these
draft."""
LEAST_HOPE = 0.1
"""Tokens a round that drafting beside other sessions has to bring where text is predictable, at
known costs, to be tried."""
HOPED_GAIN = 0.5
"""What a token is hoped to take with a draft that is tried, in parts of what it takes without."""
RESTING = 16
"""Rounds without an order after so many, where other sessions wait for the draft meanwhile."""
MOST_DEADLINE_MS = 3.6e6
STALE = 0.95
"""tau of a head that grows ahead over that of one that does not: what is below the new root was
guessed from guesses. With the embedded Dovetail head at T = 0:
0.92 to 0.95 on shipped prompts and MT-bench, 0.94 to 1.00 on HumanEval and GSM8K. Not seen in
scores, which are fitted to both; too little to be counted
soon."""


@dataclass(frozen=True)
class Plan:
    """How a round is drafted: fields of `Draft`; depth and nodes are bounds below the request's
    own."""

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
    load: Load = ALONE
    """When it ended."""
    disturbed: bool = False
    """Whether a worker read a prompt meanwhile."""


class Controller:
    """Steers one session. Without a pair - the target alone - it plans nothing, and only keeps
    count of what rounds bring."""

    def __init__(
        self,
        number: int,
        *,
        tree: TreeSettings,
        pair: Pair | None,
        costs: PairCosts,
        greedy: bool,
        ahead: bool | None,
        say: Callable[[str], None],
        drawn: bool = False,
    ) -> None:
        """`ahead`: None where it is to be found out; `say` hears of every decision; `drawn`: the
        reply hangs on what is drafted, and so on no clock."""
        self._number, self._tree, self._greedy, self._ahead, self._say = (
            number,
            tree,
            greedy,
            ahead,
            say,
        )
        self._fixed = tree.insist or drawn
        self._most_nodes = tree.most_nodes
        self._load = ALONE
        self._era = 0
        """Of the switch, when the round was planned."""
        self._unready = False
        """Whether the round would have been drafted, had the draft read the prompt."""
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
        """Go on with these workers; what the session's rounds brought with others says nothing of
        them."""
        self._pair, self._costs = pair, costs
        self._own = (
            Switch(pair.experiences[self._greedy]) if pair is not None and not self._fixed else None
        )
        """For when it runs alone."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._promises = PRIOR_NODES
        self._kept_promises = PRIOR_NODES * (pair.honesty if pair is not None else 1.0)
        self._empty = self._resting = 0
        self._settle()
        if self._own is not None and not self._own.drafting:
            self._say(
                f"session {self._number} begins without a draft: with {self._names} "
                f"{self._lost_of_late(self._own)}"
            )

    def _settle(self) -> None:
        """Look up what decides at the present load whether is drafted."""
        self._crowd: Crowd | None = None
        """What the sessions that run beside each other at this load have learned."""
        self._switch = self._own
        """None: nothing decides, and every round is drafted."""
        if self._own is not None and self._pair is not None and not self._load.alone:
            self._crowd = self._pair.crowd(greedy=self._greedy, load=self._load)
            self._switch = self._crowd.switch

    def hopeful(self, pair: Pair) -> bool:
        """Whether a session would be drafted for with this pair from the beginning."""
        return self._fixed or not pair.experiences[self._greedy].losing

    @property
    def predicted_tokens_per_s(self) -> float | None:
        return self.expected_tokens / self.predicted_s if self.predicted_s > 0.0 else None

    @property
    def cuts(self) -> bool:
        """Whether it is to be decided which of the offered nodes are verified."""
        return self._switch is not None

    def drafts_at(self, load: Load) -> bool:
        """Return whether a session is drafted for at this load, or that is tried."""
        if (switch := self._switch_at(load)) is None:
            return self._pair is not None
        return switch.drafting

    def drafts_soon(self, load: Load) -> bool:
        """Return whether a session is drafted for at this load, or may be after a few rounds."""
        if (switch := self._switch_at(load)) is None:
            return self._pair is not None
        return switch.drafting or switch.untried

    def _switch_at(self, load: Load) -> Switch | None:
        """Return what decides at a load whether is drafted; None: nothing does."""
        if load.level == self._load.level:
            return self._switch
        if self._pair is None or self._own is None:
            return None
        if load.alone:
            return self._own
        return self._pair.crowd(greedy=self._greedy, load=load).switch

    @property
    def off(self) -> str | None:
        """Why nothing is drafted, where that is so."""
        if self._switch is None or self._switch.drafting:
            return None
        return (
            f"session {self._number} is decoded without a draft: {self._names} are slower "
            "with drafting at present"
        )

    @property
    def _names(self) -> str:
        assert self._pair is not None
        return f"{self._pair.draft} and {self._pair.target}"

    def _lost_of_late(self, switch: Switch) -> str:
        assert self._pair is not None
        alone_s = self._costs.alone_s(context=self._pair.context)
        return (
            f"drafting was slower: {switch.last_rates(alone_s)}"
            if alone_s > 0.0
            else "drafting was slower"
        )

    def leave(self) -> None:
        """The draft is lost."""
        self._pair = self._own = None
        self._settle()

    @property
    def order_s(self) -> float:
        """Seconds from an order to its proposal, where the draft is free; 0 where nothing is
        known."""
        costs = self._costs
        return costs.exposed_s.value + costs.draft_hop_s.value

    def rate(self, context: int) -> float:
        """Tokens a second of late; at first those of the pair's last rounds, else of the target
        alone; 0 where nothing is known.

        Beside others not less than without any drafting: a second that is wasted is wasted for all
        of them.
        """
        rate = self._rate_of_late(context)
        if self._load.alone or (alone_s := self._alone_s(context)) <= 0.0:
            return rate
        return max(rate, 1.0 / alone_s) * (self._crowd.care if self._crowd is not None else 1.0)

    def _alone_s(self, context: float) -> float:
        """Seconds of a round without any drafting at this load; 0 where nothing is known."""
        expected_s = self._costs.alone_s(context=context, rows=self._load.target)
        return expected_s if self._crowd is None else self._crowd.alone_s(expected_s)

    def _rate_of_late(self, context: int) -> float:
        tokens, seconds = (
            (sum(values) for values in zip(*self._recent, strict=True))
            if self._recent
            else (0.0, 0.0)
        )
        if (missing := FEW - len(self._recent)) > 0:
            tokens, seconds = (
                tokens + missing * self._usual(context)[0],
                seconds + missing * self._usual(context)[1],
            )
        return tokens / seconds if seconds > 0.0 else 0.0

    def _usual(self, context: int) -> tuple[float, float]:
        """Tokens and seconds of a round, as far as is known before the session has had some."""
        pair, switch = self._pair, self._switch
        if pair is not None and switch is not None and switch.drafting:
            known = pair if self._crowd is None else self._crowd
            if known.seconds.known:
                return known.tokens.value, known.seconds.value
        return 1.0, self._alone_s(context)

    # -- before the first round: the prompt --------------------------------------------------------

    def awaits_draft(self, context: int, tokens: int) -> bool:
        """Whether a session waits until the draft has read a prompt of which the target read so
        many tokens: the first round without it would cost more."""
        if self._own is None:
            return False
        assert self._pair is not None
        lag_s, pair = self._pair.costs.reading.expect(tokens), self._pair
        alone_s, rate = self._costs.alone_s(context=context), ratio(pair.tokens, pair.seconds)
        return (
            lag_s is not None
            and rate is not None
            and alone_s > 0.0
            and lag_s * rate < alone_s * rate - 1.0
        )

    def draft_read(self, tokens: int, seconds: float) -> None:
        """The draft has read the prompt, so much later than its target read so many tokens of
        it."""
        if self._pair is not None:
            self._pair.costs.reading.add(tokens, seconds)

    def prompt_read(self, tokens: int, seconds: float) -> None:
        """The draft has read so many tokens of a prompt, or of a log, and taken so long for it."""
        if self._pair is not None:
            self._pair.costs.prompts.add(tokens, seconds)

    def worth_reading(self, tokens: int, room: int, load: Load) -> bool:
        """Return whether drafting at this load saves more time in `room` tokens than the draft
        takes to read `tokens` tokens first, as far as both are known. Where draft and target share
        a device, all sessions that run lose that time."""
        pair, switch = self._pair, self._switch_at(load)
        if pair is None or switch is None:
            return True
        reading_s = pair.costs.prompts.expect(tokens)
        alone_s = self._costs.alone_s(context=pair.context, rows=load.target)
        drafted_s = switch.token_s
        if switch.state == "try":  # it is to be found out whether it has become better
            drafted_s = HOPED_GAIN * alone_s
        if reading_s is None or drafted_s is None or alone_s <= 0.0:
            return True
        if pair.shared:
            return room * (alone_s - drafted_s) > reading_s * load.target
        return reading_s < room * alone_s

    # -- before a round ----------------------------------------------------------------------------

    def plan(
        self, context: int, *, load: Load = ALONE, ready: bool = True, patient: bool = True
    ) -> Plan | None:
        """How to draft for the next round; None: not at all. `ready`: whether the draft is there
        for it, and has read the prompt; `patient`: whether it is waited for until it has, which
        only a request that insists does, unless it `awaits_draft`."""
        self._meet(load)
        self._exposed_s = 0.0
        pair, switch = self._pair, self._switch
        self._unready = not ready
        if pair is None:
            return None
        if not ready and not (patient and switch is None):
            return None
        if switch is not None and (not switch.drafting or self._rests()):
            return None
        if switch is not None and load.alone and self._control_due:
            pair.controls += 1
            self.controls += 1
            return None
        self._exposed_s = self.order_s if pair.costs.exposed_s.known else None
        ahead = self._grows_ahead(pair)
        return Plan(ahead=ahead) if switch is None else self._priced(context, switch, ahead)

    def _grows_ahead(self, pair: Pair) -> bool:
        """Return whether the draft goes on while the target verifies. Where both share a device and
        other sessions run, that takes from somebody's pass and is not tried."""
        if self._ahead is not None:
            return self._ahead
        if not pair.ahead_in_doubt:
            return True
        return pair.trial.ahead and (self._load.alone or not pair.shared)

    def _meet(self, load: Load) -> None:
        """A round begins at this load: what others brought at another level says nothing of it."""
        changed, self._load = load.level != self._load.level, load
        if changed:
            self._settle()
            self._recent.clear()
        switch = self._switch
        if changed and self._crowd is not None:
            self._crowd.switch.begin()
        self._era = switch.era if switch is not None else 0

    def _rests(self) -> bool:
        """Whether the draft, which had nothing to propose for long, is left to other sessions in
        this round."""
        if self._load.alone or not self._resting:
            return False
        self._resting -= 1
        return True

    @property
    def _control_due(self) -> bool:
        """Whether the target's pass over a single row has to be measured. One try for each time:
        other sessions may be in the pass, and have rows there."""
        assert self._pair is not None
        target, pair = self._costs.target, self._pair
        due = sum(pair.rounds >= after for after in CONTROLS)
        return not (
            target.profiled or target.seen(1) >= due or (target.known and pair.controls >= due)
        )

    def _priced(self, context: int, switch: Switch, ahead: bool) -> Plan:
        """By what a second is worth to everybody who waits meanwhile: for the draft, those that
        have it; for the target, all that run there."""
        assert self._pair is not None
        load, trying = self._load, switch.state == "try"
        depth = self._hopeful_depth(context) if trying else None
        if load.alone and (trying or self._empty >= EMPTY):
            return Plan(ahead=ahead, most_depth=self._hopeful_depth(context))
        rate, alone_s = self.rate(context), self._alone_s(context)
        nodes = (
            ceil(load.draft * self._pair.gamma.value)
            if self._pair.gamma.known and not trying
            else 0
        )
        rows = load.target + nodes
        most = max(rows, load.target + self._most_nodes)
        floor = floor_of(
            rate * load.target, self._costs.target.table(most + 1, context).__getitem__, rows, most
        )
        deadline_ms = 1e3 * alone_s * (self._tree.depth if self._pair.rounds else 2)
        deadline = deadline_ms if 0.0 < deadline_ms < MOST_DEADLINE_MS else None
        return Plan(
            rate=rate * load.draft, floor=floor, ahead=ahead, deadline_ms=deadline, most_depth=depth
        )

    def _hopeful_depth(self, context: int) -> int:
        """Levels that pay where text is predictable, at least one; one where nothing is known of
        their cost."""
        if not self._load.alone:
            return max(1, self._hope(context)[0])
        level_s, alone_s = self._costs.draft.at(1), self._alone_s(context)
        if not 0.0 < level_s < alone_s:
            return 1
        return max(1, min(self._tree.depth, ceil(log(level_s / alone_s) / log(SURE))))

    def _hope(self, context: int) -> tuple[int, float]:
        """Levels of one node that bring most where text is predictable, and what they bring above
        their cost, in tokens: that of the order and of drafting all who share the draft pay, that
        of rows all who share the pass."""
        target, draft = self._load.target, self._load.draft
        costs, alone_s = self._costs, self._alone_s(context)
        if alone_s <= 0.0:
            return 1, 0.0
        rows_s = costs.target.at(2 * target, context) - costs.target.at(target, context)
        price = (draft * costs.draft.at(1) + rows_s) / alone_s
        levels = max(
            0,
            min(
                self._tree.depth,
                int(log(price) / log(SURE))
                if 0.0 < price < 1.0
                else self._tree.depth
                if price <= 0.0
                else 0,
            ),
        )
        gain = sum(SURE**level for level in range(1, levels + 1))
        return levels, gain - levels * price - draft * costs.draft_hop_s.value / alone_s

    def sends(self, context: int, scores: Sequence[float], rows: int) -> None:
        """The round's nodes of these scores are verified in a pass of so many rows: predict it."""
        promised = sum(map(exp, scores))
        self._promised = promised
        costs = self._costs
        if self._exposed_s is None or not costs.target.known or not costs.target_hop_s.known:
            self._promise = None
            return
        self._promise = (
            1.0 + self._honesty * promised,
            costs.round_s(rows=rows, context=context, exposed_s=self._exposed_s),
        )

    # -- after it ----------------------------------------------------------------------------------

    def learn(self, done: Round) -> None:
        """A round has ended."""
        seconds = done.times.own_ns / 1e9
        if seconds <= 0.0:
            return
        self._count(done, seconds)
        judged_s, switch = seconds + done.times.missed_ns / 1e9, self._switch
        if done.load.level == self._load.level and switch is not None and switch.era == self._era:
            if self._crowd is None:
                self._judge(switch, done, judged_s)
            elif done.disturbed or (self._unready and switch.drafting):
                alone_s = self._alone_s(done.context)
                switch.catching_up(done.tokens, judged_s, alone_s, among=self._load.draft)
            else:
                self._judge_crowd(self._crowd, done, judged_s)
        if done.drafted is not None:
            self._learn_of_draft(done, done.drafted, seconds)

    def _judge(self, switch: Switch, done: Round, seconds: float) -> None:
        """Whether drafting for this session pays, which runs alone."""
        alone_s = self._costs.alone_s(context=done.context, rows=done.other_rows)
        cold = done.drafted is not None and self._pair is not None and self._pair.rounds < COLD
        if alone_s > 0.0 and not cold:
            self._tell(
                switch.plain(seconds, alone_s)
                if done.drafted is None
                else switch.drafted(self._recent[-1][0], seconds, alone_s)
            )

    def _judge_crowd(self, crowd: Crowd, done: Round, seconds: float) -> None:
        """Whether drafting for all who run at once pays: a round of this session, drafted or not,
        with everything that it waited for. Of rounds without drafting, which are alike, one stands
        for all of its pass."""
        switch, among = crowd.switch, self._load.draft
        if not switch.drafting and not crowd.due(among):
            return
        expected_s = self._costs.alone_s(context=done.context, rows=self._load.target)
        if expected_s <= 0.0:
            return
        if switch.drafting:
            tokens = self._recent[-1][0]
            crowd.drafted(tokens, seconds)
            crowd.mind(
                behind=self._rate_of_late(done.context) * crowd.alone_s(expected_s) < BEHIND,
                among=among,
            )
            words = switch.drafted(tokens, seconds, crowd.alone_s(expected_s), among=among)
        else:
            crowd.plain(seconds, expected_s)
            words = switch.plain(
                seconds,
                crowd.alone_s(expected_s),
                worth_trying=lambda: self._hope(done.context)[1] >= LEAST_HOPE,
            )
        self._tell_all(words if words is None else f"{self._load}: {words} each")

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
        (costs.plain_host_s if done.drafted is None else costs.host_s).add(
            times.coordinator_ns / 1e9
        )
        self._recent.append((self._brought(done.tokens), seconds + times.missed_ns / 1e9))

    def _brought(self, tokens: int) -> float:
        """What a round has brought, with half of the chance taken out: between its tokens and what
        its nodes were worth, by what such promises brought."""
        kept = 1.0 - 1.0 / WINDOW
        self._promises = kept * self._promises + self._promised
        self._kept_promises = kept * self._kept_promises + tokens - 1.0
        return 0.5 * (tokens + 1.0 + self._promised * self._honesty)

    @property
    def _honesty(self) -> float:
        """What a promised node was worth of late."""
        return min(MOST_HONESTY, self._kept_promises / self._promises)

    def _learn_of_draft(self, done: Round, drafted: Drafted, seconds: float) -> None:
        pair, times = self._pair, done.times
        if pair is None:
            return
        pair.costs.exposed_s.add(times.draft_ns / 1e9)
        pair.costs.draft_hop_s.add(times.draft_hop_ns / 1e9)
        pair.costs.draft.observe_all(drafted.passes)
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
        if self._empty == EMPTY and not self._load.alone:
            self._resting, self._empty = RESTING, EMPTY - 1
        switch = self._switch
        pair.speculating = switch is None or switch.state == "on"
        if self._ahead is None and pair.ahead_in_doubt and self._load.alone:
            tokens = 1.0 + self._honesty * self._promised
            self._tell_all(
                pair.trial.drafted(
                    STALE * tokens if pair.reads and pair.trial.ahead else tokens, seconds
                )
            )
