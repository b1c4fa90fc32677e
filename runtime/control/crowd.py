"""What concurrent sessions learn at a load: whether to draft, and the value of a second. Pure."""

from collections.abc import Callable

from dovetail.runtime.control.on_off import Experience, OnOff
from dovetail.runtime.costs.averages import Average
from dovetail.runtime.costs.rounds import PairCosts

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

    def __init__(self) -> None:
        self.on_off = OnOff(Experience(), many=True)
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
