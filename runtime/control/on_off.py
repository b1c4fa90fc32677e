"""Turns drafting on and off by comparing past rounds.

`OnOff` turns drafting off when it loses against the target alone, and tests it again from time to
time; `Experience` is what the sessions of a pair have learned together. Rounds are given in tokens
and seconds; a decision is returned as a sentence. Pure: no clock, no messages."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dovetail.runtime.costs.rounds import Average, PairCosts

LOSS = 3.0  # rounds that a session may lose before its drafting stops; gains do not accumulate
DOUBTED = 1.0
"""Total lost rounds from which on every further lost round may end drafting."""
LOSS_OF_A_WINNER = 6.0
"""Rounds that a session may lose if drafting has paid off for long: misses may be chance."""
MOST_LOSS_OF_A_WINNER = 2.5
"""The most lost rounds that one round counts as: a pause of the machine is no evidence."""
LATE = 1.5
"""Lost rounds that a late proposal counts as, in addition to its wait; more tend to follow."""
FIRST_TRY = 8  # rounds without drafting before it is tested again; doubled by every failed test
MOST_DOUBLINGS = 3
TRY_SHARE = 0.0125  # share of all time that tests may cost, in the long run
ALLOWANCE = 2.0  # rounds of the target alone that tests may cost in advance
MOST_ALLOWANCE = 30.0
TRY_GAIN, TRY_LOSS = 1.5, 1.0
"""Gain or loss, in rounds of the target alone, at which a test ends early."""
LEAST_TRY, MOST_TRY = 3, 8
"""The rounds of a test, not counting the first, in which the draft catches up."""
TRY_ROUNDS = 2  # assumed rounds of a failing test
TRY_MARGIN = 1.03
LASTING = 32  # rounds of drafting after which it is assumed to pay off
HOPELESS = 256  # rounds before a test that known costs do not justify; doubled by each failure
FIRST_OF_MANY = 2
"""Rounds before drafting is first tested with several sessions: they measure a pass."""
WORTH_OF_MANY = 1.02  # factor by which drafting must be better if several sessions run
BARREN = 8  # rounds without a worthwhile node after which drafting stops, with several sessions
PAUSED = "drafting is paused while prompts are prefilled"
UNTRIED = "drafting has not been tested at this load yet"
SETTLING = 2  # rounds after a change that do not count, since they are still affected


@dataclass
class Experience:
    """State shared by the sessions of a pair: whether drafting pays off; the budget of tests."""

    losing: bool = False  # True if the last change was to stop drafting
    credit_s: float = 0.0  # the budget of tests
    try_s: float = 0.0  # cost of the last test, or expected cost of the next
    why: str = ""  # why drafting last stopped, worded to follow "because"; empty if it never did
    granted: bool = False
    hopeless: int = 0
    """Consecutive tests that failed as predicted from known costs, or that drafted nothing."""
    fruitless: bool = False  # True if the last of them drafted nothing
    token_s: float | None = None  # recent seconds a token with drafting; None: never drafted

    def earn(self, seconds: float, alone_s: float, *, before_s: float = 0.0) -> None:
        """Count a round's seconds, a share of which tests may take. `before_s`: before a test."""
        if not self.granted:
            self.granted, self.credit_s = True, ALLOWANCE * alone_s
        most_s = max(MOST_ALLOWANCE * alone_s, 2.0 * self.try_s, before_s + self.try_s)
        self.credit_s = min(self.credit_s + TRY_SHARE * seconds, most_s)

    def affords(self, before_s: float) -> bool:
        """Return whether the budget allows a test with this much time of preparation."""
        return self.credit_s >= self.try_s + before_s

    def pay(self, seconds: float) -> None:
        """Deduct the cost of the last test."""
        self.credit_s -= seconds
        self.try_s += seconds


@dataclass
class Compared:
    """Tokens of rounds with drafting, and of the target alone in the same time."""

    tokens: float = 0.0
    seconds: float = 0.0
    alone: float = 0.0  # rounds of the target alone in those seconds, at one token each
    late: int = 0  # proposals that arrived too late

    def add(self, tokens: float, seconds: float, alone_s: float) -> None:
        """Count a round; `alone_s`: seconds of a round of the target alone."""
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.alone += seconds / alone_s

    def words(self, unit: str, *, on: bool) -> str:
        """Return why drafting is turned on or off, consistent with the two printed rates."""
        rates = self.tokens / self.seconds, self.alone / self.seconds
        drafted, alone = (f"{rate:.1f}" if rate >= 10.0 else f"{rate:.3g}" for rate in rates)
        if on:
            why = "it is faster"
        elif self.late:
            why = f"{_counted(self.late, 'proposal')} arrived too late"
        elif drafted == alone:
            why = "it was no faster"
        elif rates[0] < rates[1]:
            why = "it was slower"
        else:
            why = f"it was less than {100 * (TRY_MARGIN - 1):.0f} % faster"
        return f"{why}: {drafted} {unit} with a draft, {alone} without"


class OnOff:
    """On, off or testing, for one session, or for all concurrent sessions."""

    def __init__(self, experience: Experience, *, many: bool = False) -> None:
        """`many`: for rounds of concurrent sessions; it begins without drafting, unless drafting
        paid off in an earlier run."""
        self._experience, self._many = experience, many
        untried = many and not experience.granted
        self.state: Literal["on", "off", "try"] = "off" if experience.losing or untried else "on"
        self.drafting = self.state != "off"
        self.era = int(experience.granted)
        """Counts changes of state: rounds that began before the last change do not count."""
        self._before: Literal["on", "off", "try"] = self.state  # the state of the era before
        self._rounds = 0.0  # rounds with drafting since it began, or without since it ended
        self._failed = 0
        self.balance = 0.0  # in rounds of the target alone; on: lost, testing: won
        self._tokens = self._seconds = 0.0
        self._compared = Compared()
        """On: the rounds over which `balance` was lost. Testing: the rounds that count."""
        self._tried = self._doubted = False
        """`_doubted`: the current test is made although known costs predict a loss."""
        self._cost_s = 0.0  # time that the current test has cost
        self._worst_s = 0.0  # time lost by the worst round with drafting
        self._won_s = 0.0  # time gained by drafting since it was resumed
        self._barren = 0.0  # consecutive rounds in which no proposed node was verified
        self._beside = 0.0  # rounds of the target alone lost during prefill
        self._paused: Literal["on", "try"] | None = None
        """The state to return to when no prompts are being prefilled."""

    @property
    def settling(self) -> bool:
        """Whether drafting has just ended, so that rounds are still affected."""
        return self.state == "off" and self.era > 0 and self._rounds < SETTLING

    @property
    def untried(self) -> bool:
        """Whether these are the first rounds at this load, before drafting is tested."""
        return self._many and not self.era and self._rounds < FIRST_OF_MANY

    @property
    def why_off(self) -> str:
        """Why nothing is drafted while drafting is off."""
        if self._paused is not None:
            return PAUSED
        why = self._experience.why
        return f"drafting was stopped because {why}" if why else UNTRIED

    @property
    def token_s(self) -> float | None:
        """Return the recent seconds a token with drafting, of any session; None if unknown."""
        return self._experience.token_s

    def record(self) -> dict[str, Any]:
        """Return the experience, for a later run."""
        losing = "on" not in (self.state, self._paused)
        return {**asdict(self._experience), "losing": losing}

    def begin(self) -> None:
        """Begin a session at this load: forget failed tests, but not their budget. While drafting
        is on, a new session may lose no more than the first one."""
        self._failed = 0
        if self.state == "on" and not self._many:
            self._rounds = 0.0

    def undrafted(
        self,
        seconds: float,
        alone_s: float,
        *,
        before_s: float = 0.0,
        worth_trying: Callable[[], bool] = lambda: True,
    ) -> str | None:
        """Count a round without drafting. Return a decision in words, or None. If several sessions
        share a pass, only one counts its round. `before_s`: the drafts' prefill time before a test.
        `worth_trying`: whether a test can pay off at known costs. They may be out of date, so after
        `HOPELESS` rounds a test is always made."""
        self._experience.earn(seconds, alone_s, before_s=before_s)
        if self.state != "off":
            return None
        if self._paused is not None:
            self._enter(self._paused)
            return "drafting resumes: no prompt is being prefilled"
        self._rounds += 1
        if self._rounds < self._patience or not self._experience.affords(before_s):
            return None
        doubted = self._experience.fruitless or not worth_trying()
        if doubted and self._rounds < _doubled(HOPELESS, self._experience.hopeless):
            return None
        without = f"{_counted(self._rounds)} without a draft"
        if why := self._experience.why:
            words = f"drafting is tested again after {without}: it was stopped because {why}"
        else:
            rate = f"{1 / alone_s:.1f} {self._unit}"
            words = f"drafting is tested after {without} at {rate}"
        self._enter("try")
        self._doubted = doubted
        return words

    @property
    def _unit(self) -> str:
        """The unit of rates: with several sessions, the rate of each."""
        return "tokens/s per session" if self._many else "tokens/s"

    @property
    def _patience(self) -> int:
        """Rounds without drafting before it is tested."""
        return FIRST_OF_MANY if self._many and not self.era else _doubled(FIRST_TRY, self._failed)

    def drafted(
        self,
        tokens: float,
        seconds: float,
        alone_s: float,
        *,
        among: int = 1,
        barren: bool = False,
        late: bool = False,
    ) -> str | None:
        """Count a round while drafting is on. Return the decision in words, None if there is none.
        `alone_s`: seconds of a round of the target alone; `among`: the counted sessions; `barren`:
        no proposed node was worth verifying; `late`: no proposal arrived in time."""
        self._experience.earn(seconds / among, alone_s)
        self._rounds += 1 / among
        self._barren = self._barren + 1 / among if barren else 0.0
        won = (tokens - (WORTH_OF_MANY if self._many else 1.0) * seconds / alone_s) / among
        self._compared.late += late
        charge = LATE * late / among
        if self.state == "try":
            return self._tested(tokens, seconds, alone_s, won - charge, among)
        self._count(tokens, seconds, alone_s)
        if self._rounds >= LASTING:
            won = max(won, -MOST_LOSS_OF_A_WINNER / among)
        self._won_s += won * alone_s
        self.balance = max(0.0, self.balance - won + charge)
        self._worst_s = max(self._worst_s, -won * alone_s)
        if self.balance == 0.0:
            self._compared = Compared()
        if self._rounds >= LASTING and self.balance == 0.0:
            self._failed, self._tried, self._experience.losing = 0, False, False
            self._experience.hopeless, self._experience.fruitless = 0, False
        most = LOSS_OF_A_WINNER if self._rounds >= LASTING else LOSS
        fruitless = self._many and self._barren >= BARREN
        if not fruitless and self.balance <= most / among**0.5:  # more rounds, less chance
            return None
        return self._stop(alone_s, fruitless=fruitless)

    def beside_prompts(self, tokens: float, seconds: float, alone_s: float) -> str | None:
        """Count a drafted round during prefill, which is no evidence for other rounds. If such
        rounds lose, drafting pauses until the prefill ends. Return a decision, or None."""
        if self.state == "off" or alone_s <= 0.0:
            return None
        self._beside = max(0.0, self._beside + seconds / alone_s - tokens)
        if self._beside <= LOSS:
            return None
        going_on = self.state
        self._enter("off")
        self._paused = going_on
        return PAUSED

    def _stop(self, alone_s: float, *, fruitless: bool) -> str:
        """Turn drafting off, and charge its losses to the budget; return the reason."""
        lost_s = max(0.0, -self._won_s)
        if self._tried:  # the test was too optimistic
            self._failed, lost_s = self._failed + 1, max(lost_s, self.balance * alone_s)
        if self.era:  # the first look is free
            self._experience.credit_s -= lost_s
        self._experience.losing = True
        self._experience.try_s = TRY_ROUNDS * self._worst_s
        if not fruitless:
            return self._judged("off", "drafting stopped because")
        self._experience.hopeless += 1
        self._experience.fruitless = True
        self._experience.why = (
            "no drafted node has been worth verifying lately: "
            f"{1 / alone_s:.1f} {self._unit} without a draft"
        )
        self._enter("off")
        return f"drafting stopped because {self._experience.why}"

    def _tested(
        self, tokens: float, seconds: float, alone_s: float, won: float, among: int
    ) -> str | None:
        self._cost_s += max(0.0, -won * alone_s)
        if self._rounds < 1.0 + 0.5 / among and not self._compared.late:
            return None
        self._count(tokens, seconds, alone_s)
        self.balance += won
        judged = self._rounds - 1.0 + 0.5 / among  # 0.5 allows for rounding of summed fractions
        if (self.balance >= TRY_GAIN and judged >= LEAST_TRY) or (
            judged >= MOST_TRY and self._compared.tokens > TRY_MARGIN * self._compared.alone
        ):
            self._pay()
            self._tried, self._experience.losing = True, False
            return self._judged("on", "drafting resumed because")
        if self.balance <= -TRY_LOSS / among**0.5 or judged >= MOST_TRY:
            self._pay()
            self._failed += 1
            self._experience.hopeless += self._doubted
            tried = f"drafting was tried ({_counted(self._rounds)}) and stopped because"
            return self._judged("off", tried)
        return None

    def catching_up(self, tokens: float, seconds: float, alone_s: float, *, among: int) -> None:
        """Count a round during a draft's prefill, at the cost of drafting or its test."""
        cost_s = max(0.0, seconds - tokens * alone_s) / among
        if self.state == "try":
            self._cost_s += cost_s
        elif self.state == "on":
            self._won_s -= cost_s

    def straggled(
        self, era: int, tokens: float, seconds: float, alone_s: float, *, among: int
    ) -> None:
        """Count a round of an earlier era: a cost of the drafting or test that just ended."""
        if self.state != "off" or self._before == "off" or era != self.era - 1:
            return
        cost_s = max(0.0, seconds - tokens * alone_s) / among
        if self._before == "try":
            self._experience.pay(cost_s)
        else:
            self._experience.credit_s -= cost_s

    def _judged(self, state: Literal["on", "off"], verdict: str) -> str:
        """Enter a state, and return a sentence that begins with `verdict` and gives the rates."""
        why = self._compared.words(self._unit, on=state == "on")
        if state == "off":
            self._experience.why = why
        self._enter(state)
        return f"{verdict} {why}"

    def _pay(self) -> None:
        self._experience.try_s = 0.0
        self._experience.pay(self._cost_s)

    def _enter(self, state: Literal["on", "off", "try"]) -> None:
        self._before, self.state, self.era = self.state, state, self.era + 1
        self.drafting = state != "off"
        self._rounds, self.balance, self._cost_s, self._worst_s = 0.0, 0.0, 0.0, 0.0
        self._won_s = 0.0
        self._tokens = self._seconds = self._barren = self._beside = 0.0
        self._paused, self._compared = None, Compared()

    def _count(self, tokens: float, seconds: float, alone_s: float) -> None:
        """Count a round in the comparison and in the decaying rate with drafting."""
        self._compared.add(tokens, seconds, alone_s)
        kept = 1.0 - 1.0 / 16
        self._tokens, self._seconds = kept * self._tokens + tokens, kept * self._seconds + seconds
        self._experience.token_s = self._seconds / self._tokens


def _doubled(rounds: int, times: int) -> int:
    return rounds << min(times, MOST_DOUBLINGS)


def _counted(number: float, what: str = "round") -> str:
    return f"{number:.0f} {what}{'' if round(number) == 1 else 's'}"


UNDRAFTED_PASSES = 16.0
"""Passes without drafting over which their time is compared with the expected one."""
MOST_SLOWDOWN = 1.5
MORE_CARE, LESS_CARE, MOST_CARE = 1.25, 0.98, 8.0
"""Factors per round: the care stays constant if about a twelfth of the sessions are far behind."""
FAR = 0.25  # a session is far behind if it is this share below its rate without drafting
CARE_OF_A_TRY = 2.0  # the most care when drafting is tested again
BEHIND = 0.97
"""A session below this share of its rate without drafting suffers from the drafting of others."""
LEAST_HOPE = 0.1  # tokens per round that drafting must gain with several sessions to be tried


class Crowd:
    """The experience of concurrent sessions at one load. One decision holds for all of them, since
    each slows down the others' passes and drafts. It compares the tokens of all rounds over their
    total time, including waits for each other, with undrafted rounds of as many sessions."""

    def __init__(self, experience: Experience | None = None) -> None:
        self.on_off = OnOff(experience or Experience(), many=True)
        self.tokens, self.seconds = Average(), Average()  # means of a round while drafting is on
        self.care = 1.0  # factor on the value of a second, so that none pays for others' gains
        self._undrafted = Average(UNDRAFTED_PASSES)
        """Mean seconds of rounds without drafting, with mean `_rows` and `_context`."""
        self._rows, self._context = Average(UNDRAFTED_PASSES), Average(UNDRAFTED_PASSES)
        self._slowdown = 1.0
        """How much longer those rounds took than is expected now."""
        self._undue = 0  # rounds without drafting since the last judged one

    def alone_s(self, expected_s: float) -> float:
        """Return the seconds of an undrafted round; `expected_s`: for a row per session."""
        return expected_s * self._slowdown

    def compare(self, costs: PairCosts) -> None:
        """Compare undrafted rounds with their present prediction, since costs become known."""
        expected_s = costs.alone_s(context=self._context.value, rows=round(self._rows.value))
        if self._undrafted.known and expected_s > 0.0:
            slowdown = self._undrafted.value / expected_s
            self._slowdown = min(MOST_SLOWDOWN, max(1.0, slowdown))

    def due(self, among: int) -> bool:
        """Return whether to judge a round: every drafted one, else one in `among`."""
        if self.on_off.drafting:
            return True
        self._undue = (self._undue + 1) % max(1, among)
        return not self._undue

    def drafted(
        self,
        tokens: float,
        seconds: float,
        expected_s: float,
        *,
        rate: Callable[[], float],
        among: int,
        barren: bool = False,
        late: bool = False,
    ) -> str | None:
        """Judge a session's round while drafting is on, including its waits. Return the decision in
        words, None if there is none. `rate`: tokens a second of that session, including this round;
        `barren`: no proposed node was worth verifying; `late`: no proposal arrived in time."""
        self.tokens.add(tokens)
        self.seconds.add(seconds)
        alone_s = self.alone_s(expected_s)
        if (share := rate() * alone_s) < BEHIND:
            change = MORE_CARE ** min(1.0, (1.0 - share) / FAR)
        else:
            change = LESS_CARE
        self.care = min(MOST_CARE, max(1.0, self.care * change ** (1.0 / among)))
        return self.on_off.drafted(tokens, seconds, alone_s, among=among, barren=barren, late=late)

    def undrafted(
        self,
        seconds: float,
        costs: PairCosts,
        *,
        rows: int,
        context: float,
        before_s: float,
        hope: Callable[[], float],
    ) -> str | None:
        """Judge a round of `rows` sessions while drafting is off; return a decision in words, or
        None. `before_s`: prefill time before a try; `hope`: tokens per round to gain."""
        expected_s = costs.alone_s(context=context, rows=rows)
        if not self.on_off.settling:
            most_s = MOST_SLOWDOWN * max(expected_s, self._undrafted.value)
            self._undrafted.add(min(most_s, seconds))
            self._rows.add(rows)
            self._context.add(context)
            self.compare(costs)
        words = self.on_off.undrafted(
            seconds,
            self.alone_s(expected_s),
            before_s=before_s,
            worth_trying=lambda: hope() >= LEAST_HOPE,
        )
        if self.on_off.drafting:  # at the last price a trial might find nothing to draft
            self.care = min(self.care, CARE_OF_A_TRY)
        return words
