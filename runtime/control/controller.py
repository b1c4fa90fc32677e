"""The speculation controller: how a session's next round is drafted.

It prices drafting by the other rows in the pass, turns it off and on again, enables growth ahead
where that pays off, and predicts each round. The tree size of a policy is an upper bound, unless
the request insists. Pure: rounds are arguments; decisions are returned as values and sentences."""

from collections.abc import Callable, Sequence
from math import exp

from dovetail.protocol.lookup import SearchedLog
from dovetail.protocol.messages import Drafted
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.control.on_off import DOUBTED, LEAST_HOPE, Crowd, OnOff
from dovetail.runtime.control.pairs import Pair, ratio
from dovetail.runtime.control.pricing import Pricing, Situation
from dovetail.runtime.control.rounds import Begun, Calibration, Load, Plan, Round
from dovetail.runtime.costs.rounds import PairCosts

CONTROLS = (0, 8, 32)
"""Rounds of a pair after which rounds without a draft are measured, unless enough have been."""
CONTROLLED = 3  # consecutive rounds of such a measurement: from the second on passes can overlap
EMPTY = 4  # consecutive empty proposals after which the draft's statistics are doubted
RESTING = 16  # rounds without a command after that, if other sessions wait for the draft
FORESEEN, LEAST_CHANCE = 8, 0.05
"""Tokens of a look-up's continuation to consider before asking the draft, and the lowest
probability that counts."""
STALE = 0.95
"""Ratio of a head's tau with growth ahead to that without, since it continues from its own guesses:
0.92 to 1.00 with the embedded Dovetail head at T = 0. Scores do not show it."""


class Controller:
    """Controls one session's speculation. Without a pair it plans nothing and only counts."""

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
        """`ahead`: None to find out by trial; `say` is called with every decision; `drawn`: the
        reply depends on the drafts, so decisions must not depend on a clock."""
        self._number, self._greedy, self._ahead, self._say = number, greedy, ahead, say
        self._fixed = tree.insist or drawn
        self._now = Situation(pair, costs)
        self._pricing = Pricing(tree, self._now)
        self.begun = Begun()  # the running round; only the controller changes it
        self._priced: tuple[int, Plan] | None = None
        """The plan of the next round, and the era in which it was made."""
        self.expected_tokens = self.predicted_s = 0.0
        """Sums over all predicted rounds."""
        self.controls = 0  # rounds without a draft that were measurements
        self._was_ordered = True  # the last round had a draft, which delays the next one
        self.work_with(pair, costs)

    # -- the pair and the load ---------------------------------------------------------------------

    def work_with(self, pair: Pair | None, costs: PairCosts) -> None:
        """Continue with these workers, without the statistics of others."""
        self._now.pair, self._now.costs = pair, costs
        self._own = pair.alone[self._greedy] if pair is not None and not self._fixed else None
        """The decision for a session that runs alone."""
        if self._own is not None:
            self._own.begin()
        self._pricing.forget()
        self._calibration = Calibration(pair.calibration if pair is not None else 1.0)
        self._empty = self._resting = self._controls_left = 0
        self._settle()
        if pair is not None and self._own is not None and not self._own.drafting:
            self._say(
                f"session {self._number} begins without a draft ({self._names}): "
                f"{self._own.why_off}"
            )

    def leave(self) -> None:
        """Continue without the draft, which is lost."""
        self._now.pair = self._own = None
        self._settle()

    def _settle(self) -> None:
        """Look up the `OnOff` for the present load."""
        now = self._now
        now.crowd, now.on_off, self._priced = None, self._own, None
        self.begun = Begun(now.load)
        if self._own is not None and now.pair is not None and not now.load.alone:
            now.crowd = now.pair.crowd(greedy=self._greedy, load=now.load)
            now.on_off = now.crowd.on_off

    def _on_off_at(self, load: Load) -> OnOff | None:
        """Return the `OnOff` for a load; None: every round is drafted."""
        now = self._now
        if load.level == now.load.level:
            return now.on_off
        if now.pair is None or self._own is None:
            return None
        if load.alone:
            return self._own
        return now.pair.crowd(greedy=self._greedy, load=load).on_off

    def hopeful(self, pair: Pair) -> bool:
        """Return whether a session would be drafted for with this pair from the beginning."""
        return self._fixed or pair.alone[self._greedy].drafting

    def drafts_at(self, load: Load) -> bool:
        """Return whether a session is drafted for, or drafting is tested, at this load."""
        if (on_off := self._on_off_at(load)) is None:
            return self._now.pair is not None
        return on_off.drafting

    def drafts_soon(self, load: Load) -> bool:
        """Return whether a session is drafted for at this load, or may be after a few rounds."""
        if (on_off := self._on_off_at(load)) is None:
            return self._now.pair is not None
        return on_off.drafting or on_off.untried

    # -- figures -----------------------------------------------------------------------------------

    @property
    def predicted_tokens_per_s(self) -> float | None:
        """The predicted rate over all predicted rounds; None without any."""
        return self.expected_tokens / self.predicted_s if self.predicted_s > 0.0 else None

    @property
    def cuts(self) -> bool:
        """Whether the coordinator decides which of the offered nodes are verified."""
        return self._now.on_off is not None

    @property
    def idle(self) -> bool:
        """Whether drafting is off at present: it does not pay off, or plain rounds are measured."""
        on_off = self._now.on_off
        return on_off is not None and (self._controls_left > 0 or not on_off.drafting)

    @property
    def off(self) -> str | None:
        """Why nothing is drafted; None if something is."""
        on_off = self._now.on_off
        if on_off is None or on_off.drafting:
            return None
        return f"{self._names}: {on_off.why_off}"

    @property
    def pair(self) -> Pair | None:
        """The pair that decodes the session; None for the target alone."""
        return self._now.pair

    @property
    def _names(self) -> str:
        assert self._now.pair is not None
        return f"{self._now.pair.draft} and {self._now.pair.target}"

    @property
    def order_s(self) -> float:
        """The seconds from an order to its proposal by a free draft; 0: not known."""
        return self._now.costs.order_s

    def rate(self, context: int) -> float:
        """Return the value of a second to this session, in tokens; 0 if nothing is known."""
        return self._pricing.rate(context)

    # -- before the first round: the prompt --------------------------------------------------------

    def awaits_draft(self, context: int, tokens: int) -> bool:
        """Return whether to wait until the draft has prefilled a prompt of this many tokens."""
        pair = self._now.pair
        if self._own is None or pair is None:
            return False
        lag_s, rate = pair.costs.reading.expect(tokens), ratio(pair.tokens, pair.seconds)
        alone_s = self._now.costs.alone_s(context=context)
        return (
            lag_s is not None
            and rate is not None
            and alone_s > 0.0
            and lag_s * rate < alone_s * rate - 1.0
        )

    def draft_read(self, tokens: int, seconds: float) -> None:
        """Learn how much later than its target the draft finished a prompt of `tokens` tokens."""
        if self._now.pair is not None:
            self._now.pair.costs.reading.add(tokens, seconds)

    def late(self, event: Drafted) -> None:
        """Learn the cost of draft levels from a late proposal."""
        self._now.costs.draft.observe_all(event.passes)

    def prompt_read(self, tokens: int, seconds: float) -> None:
        """Learn how long the draft took to prefill this many tokens of a prompt or log."""
        if self._now.pair is not None:
            self._now.pair.costs.prompts.add(tokens, seconds)

    def worth_reading(self, tokens: int, room: int, load: Load) -> bool:
        """Return whether drafting is worth the draft's prefill; `room`: tokens to come."""
        on_off = self._on_off_at(load)
        if self._now.pair is None or on_off is None:
            return True
        return self._pricing.worth_reading(tokens, room, load, on_off)

    # -- before a round ----------------------------------------------------------------------------

    def begin_round(self, load: Load) -> bool:
        """Begin a round at this load; return whether it may be drafted."""
        now = self._now
        changed, now.load = load.level != now.load.level, load
        if changed:
            self._settle()
            self._pricing.forget()
            self._controls_left = 0
            if now.crowd is not None:
                now.crowd.on_off.begin()
        sampled = now.crowd is None or now.crowd.due(load.draft)
        if (on_off := now.on_off) is None:
            self.begun = Begun(load, sampled=sampled)
            return now.pair is not None
        self.begun = Begun(load, on_off.era, sampled)
        if self._controls_left:
            self._controls_left -= 1
            self.controls += 1
            return False
        return on_off.drafting

    def foresees(self, searched: SearchedLog, context: int, *, later: int = 0) -> bool:
        """Return whether a look-up draft would find something in this log that is worth a message;
        `later`: after that many further tokens. If not, the draft costs the round nothing."""
        if self._now.on_off is None:
            return bool(searched.chances(1, 0.0))
        if not searched.recurs:
            return False
        factor = min(1.0, self._calibration.factor)  # the draft offers nothing less likely
        chances = searched.chances(FORESEEN, LEAST_CHANCE)[later:]
        return self._pricing.worth_asking(context, [factor * chance for chance in chances])

    def spare(self) -> None:
        """Note that the draft has nothing for this round."""
        self.begun.spared = True

    def plan(self, context: int, *, ready: bool = True, patient: bool = True) -> Plan | None:
        """Return how to draft for the round; None: not at all. `ready`: the draft has prefilled the
        prompt; `patient`: wait for that if the request requires drafting."""
        load, pair, on_off, begun = self._now.load, self._now.pair, self._now.on_off, self.begun
        begun.unready = not ready
        if pair is None or (not ready and not (patient and on_off is None)):
            return None
        if on_off is not None:
            if not on_off.drafting or self._rests():
                return None
            if load.alone and self._is_control_due(pair):
                pair.controls += 1
                self.controls += 1
                self._controls_left = CONTROLLED - 1
                return None
        begun.ordered = True
        era = on_off.era if on_off is not None else 0
        (priced_in, plan), self._priced = self._priced or (-1, None), None
        return plan if plan is not None and priced_in == era else self._price(context, pair, on_off)

    def _price(self, context: int, pair: Pair, on_off: OnOff | None) -> Plan:
        """Return the plan for drafting in a round by current knowledge."""
        load, ahead = self._now.load, self._ahead
        if ahead is None and pair.ahead_in_doubt:
            # On a shared device growth ahead slows the passes of other sessions.
            ahead = pair.trial.ahead and (load.alone or not pair.shared)
        elif ahead is None:
            ahead = not pair.in_turns
        if on_off is None:
            return Plan(ahead=ahead)
        trying, doubted = on_off.state == "try", self._empty >= EMPTY
        if pair.looks_up:  # its levels are free, and it is not asked where it has nothing
            trying = doubted = False
        return self._pricing.plan(context, pair, trying=trying, doubted=doubted, ahead=ahead)

    def _rests(self) -> bool:
        """Return whether to leave a draft that has long proposed nothing to other sessions."""
        if self._now.load.alone or not self._resting:
            return False
        self._resting -= 1
        return True

    def _is_control_due(self, pair: Pair) -> bool:
        """Return whether rounds without a draft must be measured."""
        due = sum(pair.rounds >= after for after in CONTROLS)
        return max(pair.controls, self._now.costs.undrafted_s.count) < due

    def sends(self, context: float, scores: Sequence[float], rows: int) -> None:
        """Predict a round with nodes of these scores, in a pass of `rows` at mean `context`."""
        begun, costs, pair = self.begun, self._now.costs, self._now.pair
        begun.nodes = nodes = sum(map(exp, scores))
        begun.expected = None
        known = costs.target.known and costs.target_hop_s.known
        if begun.ordered and begun.sampled and known and pair and pair.costs.exposed_s.known:
            begun.expected = (
                1.0 + self._calibration.factor * nodes,
                costs.round_s(rows=rows, context=context, exposed_s=pair.costs.order_s),
            )

    # -- after it ----------------------------------------------------------------------------------

    def end_round(self) -> Begun:
        """End the current round, and count its prediction."""
        ended, on_off = self.begun, self._now.on_off
        self.begun = Begun(ended.load, ended.era, ended.sampled)
        ended.deciding = on_off is not None and (  # the next rounds may turn drafting on or off
            on_off.state == "try" or (on_off.state == "on" and on_off.balance >= DOUBTED)
        )
        if ended.expected is not None:
            self.expected_tokens += ended.expected[0]
            self.predicted_s += ended.expected[1]
        return ended

    def learn(self, done: Round) -> None:
        """Learn from a round that has ended, perhaps during the next one, and price another."""
        now, times, begun = self._now, done.times, done.begun
        seconds = times.own_ns / 1e9
        if seconds <= 0.0:
            return
        judged_s = seconds + times.missed_ns / 1e9
        costs, hop_s, own_s = now.costs, times.target_hop_ns / 1e9, times.coordinator_ns / 1e9
        if not (times.early and costs.target_hop_s.known):
            costs.target_hop_s.add(hop_s)
        if done.drafted is not None:
            costs.host_s.add(own_s)
        elif not (begun.ordered or self._was_ordered):
            costs.undrafted_s.add(own_s + hop_s)
        self._was_ordered = begun.ordered
        tokens = self._calibration.learn(done.tokens, begun.nodes)
        on_off = now.on_off
        if begun.load.level == now.load.level:
            self._pricing.count(tokens, judged_s)
            if on_off is not None and done.load.level == now.load.level:
                self._weigh(on_off, done, tokens, judged_s)
        if now.pair is not None:
            now.pair.on_off = on_off
        if now.pair is not None and done.drafted is not None:
            self._learn_of_draft(now.pair, done, done.drafted, seconds)
        elif now.pair is not None:
            now.pair.late += done.late
        if on_off is not None and on_off.drafting and now.pair and not now.pair.looks_up:
            self._priced = on_off.era, self._price(done.context + done.tokens, now.pair, on_off)

    def _weigh(self, on_off: OnOff, done: Round, tokens: float, judged_s: float) -> None:
        """Judge whether drafting pays off, by a round at the present load."""
        if done.begun.spared and self._now.crowd is not None and on_off.drafting:
            return  # it cost nothing and is no evidence
        if done.disturbed and self._now.crowd is None:
            if (done.drafted is not None or done.late) and on_off.era == done.begun.era:
                alone_s = self._pricing.alone_s(done.context)
                self.report(on_off.beside_prompts(tokens, judged_s, alone_s))
        elif on_off.era != done.begun.era:
            alone_s, among = self._pricing.alone_s(done.context), done.begun.load.draft
            on_off.straggled(done.begun.era, tokens, judged_s, alone_s, among=among)
        elif self._now.crowd is not None:
            self._judge_crowd(self._now.crowd, done, tokens, judged_s)
        else:
            self._judge(on_off, done, tokens, judged_s)

    def _judge(self, on_off: OnOff, done: Round, tokens: float, seconds: float) -> None:
        """Judge whether drafting pays off for this session, which runs alone."""
        pair = self._now.pair
        if (alone_s := self._now.costs.alone_s(context=done.context, rows=done.other_rows)) <= 0.0:
            return
        words = None
        in_vain = done.begun.spared and on_off.drafting  # its pass waited for the last verdict
        if done.drafted is None and not done.late and not in_vain:
            before_s = self._pricing.reading_s(done.unread)
            words = on_off.undrafted(
                seconds,
                alone_s,
                before_s=before_s,
                worth_trying=lambda: self._pricing.hope(done.context) >= LEAST_HOPE,
            )
        elif pair is None or not pair.new or (done.late and pair.late):  # the first may be cold
            rows, pass_s = done.other_rows + done.verified, done.times.verify_ns / 1e9
            slowness = self._now.costs.slowness(
                pass_s, rows=rows, context=done.context, experts=done.times.experts
            )
            words = on_off.drafted(tokens, seconds, slowness * alone_s, late=done.late)
        self.report(words)

    def report(self, words: str | None) -> None:
        """Report a decision for this session, if there was one."""
        if words is not None:
            self._say(f"session {self._number}, {self._names}: {words}")

    def _judge_crowd(self, crowd: Crowd, done: Round, tokens: float, seconds: float) -> None:
        """Judge by a round, including its waits, whether drafting pays for all sessions."""
        load, costs, pricing = done.begun.load, self._now.costs, self._pricing
        if done.disturbed or (done.begun.unready and crowd.on_off.drafting):
            alone_s = pricing.alone_s(done.context)
            crowd.on_off.catching_up(done.tokens, seconds, alone_s, among=load.draft)
            return
        if (expected_s := costs.alone_s(context=done.context, rows=load.target)) <= 0.0:
            return
        if crowd.on_off.drafting:
            crowd.compare(costs)
            words = crowd.drafted(
                tokens,
                seconds,
                expected_s,
                rate=lambda: pricing.rate_of_late(done.context),
                among=load.draft,
                barren=not done.verified,
                late=done.late,
            )
        else:
            words = crowd.undrafted(
                seconds,
                costs,
                rows=load.target,
                context=done.context,
                before_s=load.draft * pricing.reading_s(done.unread),
                hope=lambda: pricing.hope(done.context),
            )
        if words is not None:
            self._say(f"{self._names}: {load}: {words}")

    def _learn_of_draft(self, pair: Pair, done: Round, drafted: Drafted, seconds: float) -> None:
        alone = self._now.load.alone
        pair.learn(done, drafted, seconds)
        self._empty = 0 if drafted.tokens or self._empty >= EMPTY else self._empty + 1
        if self._empty == EMPTY and not alone:
            self._resting, self._empty = RESTING, EMPTY - 1
        if self._ahead is None and pair.ahead_in_doubt and alone:
            tokens = 1.0 + self._calibration.factor * done.begun.nodes
            if pair.reads and pair.trial.ahead:
                tokens *= STALE
            if (words := pair.trial.drafted(tokens, seconds)) is not None:
                self._say(f"{self._names}: {words}")
