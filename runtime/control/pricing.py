"""Pricing: the value of a second to a session, and thereby how its next round is drafted and how
many drafted nodes are verified.

The rate of a session is the tokens per second that it loses while it waits. A node is worth
drafting if it yields more tokens than its rows and levels cost all waiting sessions, at their
rates: for the draft, the sessions that use it; for the target, all that run there. If several
sessions share a draft's passes, the sum of their gains from a level is weighed against its time.

The offers of all sessions in one pass are merged, the likeliest node first, and the longest prefix
that pays off is kept: the number of rows M with the largest E(M) - rate x T(M), where E are the
expected tokens of the pass and T its seconds. Trees of requests that insist are verified whole.
Pure: knows scores, costs and rounds; no messages, no clock."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import islice
from math import ceil, exp, log

from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.control.on_off import Crowd, OnOff
from dovetail.runtime.control.pairs import Pair
from dovetail.runtime.control.rounds import ALONE, WINDOW, Load, Plan
from dovetail.runtime.costs.rounds import PairCosts

FEW = 4
"""The minimum number of rounds for a session's rate; missing ones are assumed to be typical."""
SURE = 0.8  # probability of a guess in predictable text: it determines the depth of a test
HOPED_GAIN = 0.5  # hoped-for time per token in a test, as a share of that without a draft
MOST_DEADLINE_MS = 3.6e6
HASTE = 0.4
"""Share of the waiting time after which a new draft starts no further level, so that two fit."""
LEAST_WAIT_S = 2e-3  # precision of timers and schedulers on a busy machine
USUAL = 2.0  # a proposal that takes more than this multiple of its usual time cannot pay off
STEPS = (4, 8, 16, 32)  # rows over which the price of one is averaged: passes get dearer in steps
MOST_FLOOR = 0.95
SURPLUS = 1.5  # asking must gain this multiple of its cost, since both are estimates


@dataclass
class Situation:
    """The pair, costs and load by which a session is priced."""

    pair: Pair | None  # None: the target decodes alone
    costs: PairCosts
    load: Load = ALONE
    crowd: Crowd | None = None
    """Experience of the concurrent sessions at this load; None for a single session."""
    on_off: OnOff | None = None
    """Decides whether to draft for the session; None: every round is drafted."""


class Pricing:
    """Prices the rounds of one session."""

    def __init__(self, tree: TreeSettings, now: Situation) -> None:
        """`now`: kept up to date by the controller of the session."""
        self._depth, self._most_nodes, self._now = tree.depth, tree.most_nodes, now
        self._tokens, self._seconds = deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW)
        """Tokens and seconds of each of the last rounds."""

    def count(self, tokens: float, seconds: float) -> None:
        """Count a round for the rate."""
        self._tokens.append(tokens)
        self._seconds.append(seconds)

    def forget(self) -> None:
        """Forget the session's rounds, which no longer apply."""
        self._tokens.clear()
        self._seconds.clear()

    # -- the value of a second ---------------------------------------------------------------------

    def rate(self, context: int) -> float:
        """Return the value of a second in tokens, 0 if unknown: the recent rate; with other
        sessions at least that without drafting, since all of them lose a wasted second."""
        now, rate = self._now, self.rate_of_late(context)
        if now.load.alone or (alone_s := self.alone_s(context)) <= 0.0:
            return rate
        return max(rate, 1.0 / alone_s) * (now.crowd.care if now.crowd is not None else 1.0)

    def rate_of_late(self, context: int) -> float:
        """Return the recent tokens/s, at first the pair's or the target's; 0 if unknown."""
        tokens, seconds = sum(self._tokens), sum(self._seconds)
        if (missing := FEW - len(self._tokens)) > 0:
            usual_tokens, usual_s = self._usual(context)
            tokens, seconds = tokens + missing * usual_tokens, seconds + missing * usual_s
        return tokens / seconds if seconds > 0.0 else 0.0

    def alone_s(self, context: float) -> float:
        """Return the seconds of a round without drafting at this load; 0 if unknown."""
        now = self._now
        expected_s = now.costs.alone_s(context=context, rows=now.load.target)
        return expected_s if now.crowd is None else now.crowd.alone_s(expected_s)

    def _usual(self, context: int) -> tuple[float, float]:
        """Return tokens and seconds of a round, as known before the session's first rounds."""
        now = self._now
        if now.pair is not None and now.on_off is not None and now.on_off.drafting:
            known = now.pair if now.crowd is None else now.crowd
            if known.seconds.known:
                return known.tokens.value, known.seconds.value
        return 1.0, self.alone_s(context)

    # -- what is drafted ---------------------------------------------------------------------------

    def plan(self, context: int, pair: Pair, *, trying: bool, doubted: bool, ahead: bool) -> Plan:
        """Return a plan for a round. `trying`: a test; `doubted`: recent proposals were empty."""
        load = self._now.load
        depth = self._hopeful_depth(context) if trying or (doubted and load.alone) else None
        alone_s = self.alone_s(context)
        wait_s = self._wait_s(alone_s, pair, depth)
        if load.alone and (trying or doubted):
            return Plan(ahead=ahead, most_depth=depth, patience_s=wait_s)
        rate = self.rate(context)
        nodes = ceil(load.draft * pair.gamma.value) if pair.gamma.known and not trying else 0
        rows = load.target + nodes
        most = max(rows, load.target + self._most_nodes)
        seconds = self._now.costs.target.up_to(most + 1, context)
        floor = least_probability(rate * load.target, seconds, rows, most)
        deadline_ms = 1e3 * (wait_s or 0.0) * (HASTE if pair.new else 1.0)
        return Plan(
            rate=rate * load.draft,
            floor=floor,
            ahead=ahead,
            deadline_ms=deadline_ms if 0.0 < deadline_ms < MOST_DEADLINE_MS else None,
            most_depth=depth,
            patience_s=None if wait_s is None else wait_s + min(wait_s, self._level_s(pair)),
        )

    def worth_asking(self, context: int, chances: Sequence[float]) -> bool:
        """Return whether a chain of nodes with these acceptance probabilities is worth its rows and
        messages; all sessions of the pass wait for both."""
        now, waiting = self._now, self._now.load.target
        rate, seconds = self.rate(context), now.costs.target.up_to(waiting + len(chances), context)
        gain = most = 0.0
        for rows, chance in enumerate(chances, waiting + 1):
            gain += chance
            most = max(most, gain - rate * waiting * (seconds(rows) - seconds(waiting)))
        return most > SURPLUS * rate * now.costs.asking_s

    def _wait_s(self, alone_s: float, pair: Pair, depth: int | None) -> float | None:
        """Return the seconds to wait for a proposal, None if unknown: a round of the target alone,
        longer if drafting pays off, at least `LEAST_WAIT_S`. `depth`: of a test."""
        if alone_s <= 0.0:
            return None
        now = self._now
        if depth is not None:
            hoped = sum(SURE**level for level in range(1, depth + 1)) if self._level_s(pair) else 0
            return max(LEAST_WAIT_S, alone_s * max(1.0, hoped))
        known = pair if now.crowd is None else now.crowd
        gain = known.tokens.value - 1.0 if not pair.new else 0.0
        return max(
            LEAST_WAIT_S, alone_s, min(gain * alone_s, USUAL * now.costs.order_s * now.load.draft)
        )

    def _level_s(self, pair: Pair) -> float:
        """Return the seconds of a level, which a draft always completes; 0 for a new pair."""
        return self._now.costs.draft.at(1) if not pair.new else 0.0

    def _hopeful_depth(self, context: int) -> int:
        """Return how many levels pay off in predictable text, at least one; one if unknown."""
        if not self._now.load.alone:
            return max(1, self._hope(context)[0])
        costs, alone_s = self._now.costs, self.alone_s(context)
        if costs.levels > 1:  # a test makes one pass, whatever the depth
            return costs.most_levels(self._depth)
        if not 0.0 < (level_s := costs.draft.at(1)) < alone_s:
            return 1
        return max(1, min(self._depth, ceil(log(level_s / alone_s) / log(SURE))))

    def hope(self, context: int) -> float:
        """Return the tokens per round that drafting may gain in predictable text."""
        return self._hope(context)[1]

    def _hope(self, context: int) -> tuple[int, float]:
        """Return the number of one-node levels with the highest gain in predictable text, and that
        gain in tokens. All sessions share the draft's passes and the cost of the target's rows."""
        now = self._now
        target, draft, costs = now.load.target, now.load.draft, now.costs
        alone_s = self.alone_s(context)
        if alone_s <= 0.0:
            return 1, 0.0
        rows_s = costs.target.at(2 * target, context) - costs.target.at(target, context)
        price = (costs.level_s(draft) + rows_s) / alone_s
        depth = costs.most_levels(self._depth)
        if price <= 0.0:
            levels = depth
        else:
            levels = min(depth, int(log(price) / log(SURE))) if price < 1.0 else 0
        gain = sum(SURE**level for level in range(1, levels + 1))
        return levels, gain - levels * price - costs.orders_s(draft) / alone_s

    def reading_s(self, tokens: int) -> float:
        """Return the target's delay by the draft's prefill; 0 on separate devices or if unknown."""
        pair = self._now.pair
        if pair is None or not tokens or not pair.shared:
            return 0.0
        return pair.costs.prompts.expect(tokens) or 0.0

    def worth_reading(self, tokens: int, room: int, load: Load, on_off: OnOff) -> bool:
        """Return whether drafting saves more time over `room` tokens than the draft needs to read
        `tokens`. On a shared device all sessions lose that time."""
        pair = self._now.pair
        assert pair is not None
        reading_s = pair.costs.prompts.expect(tokens)
        alone_s = self._now.costs.alone_s(context=pair.context, rows=load.target)
        drafted_s = on_off.token_s
        slower = load.alone and drafted_s is not None and drafted_s >= alone_s
        if on_off.state == "try" or slower:  # only drafted rounds show whether it still pays off
            drafted_s = HOPED_GAIN * alone_s
        if reading_s is None or drafted_s is None or alone_s <= 0.0:
            return True
        if pair.shared:
            return room * (alone_s - drafted_s) > reading_s * load.target
        return reading_s < room * alone_s


def least_probability(rate: float, seconds: Callable[[int], float], rows: int, most: int) -> float:
    """Return the minimum probability of a node worth a row in a pass of about this many rows: the
    lowest price of a further row, up to `most`. `seconds(M)`: of a pass over M <= most + 1 rows."""
    ends = [end for step in STEPS if (end := rows + step) <= most] or [max(rows + 1, most)]
    price = min((seconds(end) - seconds(rows)) / (end - rows) for end in ends)
    return min(MOST_FLOOR, max(0.0, rate * price))


def cut(
    offers: Sequence[Sequence[float]],
    *,
    rate: float,
    seconds: Callable[[int], float],
    fixed: int = 0,
    most: int | None = None,
) -> tuple[int, ...]:
    """Return how many nodes of each offer are verified. offers: path log-probabilities, best first,
    so that every prefix is a tree; `rate`: the value of a second of the pass in tokens;
    `seconds(M)`: of a pass over M rows; `fixed`: given rows of the pass, including roots of other
    sessions; `most`: the maximum number of its rows, if limited. Ties go to fewer rows."""
    base = fixed + len(offers)
    room = None if most is None else max(0, most - base)
    if not offers:
        return ()
    if len(offers) == 1:
        return (_best(map(exp, offers[0][:room]), base, rate, seconds),)
    order = [*islice(_merged(offers), room)]
    kept = order[
        : _best((exp(offers[session][node]) for session, node in order), base, rate, seconds)
    ]
    counts = [0] * len(offers)
    for session, _ in kept:
        counts[session] += 1
    return tuple(counts)


def _best(gains: Iterator[float], base: int, rate: float, seconds: Callable[[int], float]) -> int:
    """Return how many nodes with these expected tokens to take in addition to `base` rows."""
    best, most, expected = 0, -rate * seconds(base), 0.0
    for taken, gain in enumerate(gains, 1):
        expected += gain
        worth = expected - rate * seconds(base + taken)
        if worth > most:
            best, most = taken, worth
    return best


def _merged(offers: Sequence[Sequence[float]]) -> Iterator[tuple[int, int]]:
    """Yield (offer, node) of all offers, the likeliest first, nodes of an offer in its order."""
    heads = [(-offer[0], session, 0) for session, offer in enumerate(offers) if offer]
    heapify(heads)
    while heads:
        _, session, node = heads[0]
        yield session, node
        if node + 1 < len(offers[session]):
            heapreplace(heads, (-offers[session][node + 1], session, node + 1))
        else:
            heappop(heads)


def worth_waiting(waits: Sequence[float], *, ready: int, pass_s: float) -> float | None:
    """Return the seconds that a pass of `ready` sessions should wait for others; None: it should
    begin. waits: seconds until each of the others is ready, ascending. A session that joins does
    not have to wait for the end of this pass, but all in the pass wait for the last one to join."""
    if not waits:
        return None
    most, wait = max(
        [(count * pass_s - (count + ready) * wait, wait) for count, wait in enumerate(waits, 1)]
    )
    return wait if most > 0.0 else None
