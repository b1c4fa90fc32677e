"""The cut: how many of the nodes that drafts offer are verified.

Under `goodput` the offers of all sessions whose verdict is asked for in one pass are merged, the
likeliest node first, and the longest beginning of that list is kept that pays: the number of rows M
with the largest E(M) - rate x T(M), where E are the tokens expected of the pass and T its seconds.
Under every other policy the whole offer is verified. Pure: knows scores, rows and seconds; no
sessions, no messages, no clock.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from math import exp

STEPS = (4, 8, 16, 32)
"""Further rows over which the price of one is looked for: a pass gets dearer in steps, and the
cheapest way to more rows may lead past one."""
MOST_FLOOR = 0.95


def cut(
    offers: Sequence[Sequence[float]],
    *,
    rate: float,
    seconds: Callable[[int], float],
    fixed: int = 0,
    most: int | None = None,
) -> tuple[int, ...]:
    """How many nodes of each offer are verified.

    offers: path log-probabilities, best first, so that every beginning is a tree; `rate`: the
    tokens that a second of the pass is worth; `seconds(M)`: of a pass over M rows; `fixed`: rows of
    the pass that are not up for choice, roots of other sessions included; `most`: rows that it may
    have, where these are fewer. Ties go to fewer rows.
    """
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
    """How many nodes to take, of those that bring these tokens, beside `base` rows."""
    best, most, expected = 0, -rate * seconds(base), 0.0
    for taken, gain in enumerate(gains, 1):
        expected += gain
        worth = expected - rate * seconds(base + taken)
        if worth > most:
            best, most = taken, worth
    return best


def _merged(offers: Sequence[Sequence[float]]) -> Iterator[tuple[int, int]]:
    """(offer, node) of all of them, the likeliest first, each offer in its own order."""
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
    """Seconds that a pass of `ready` sessions should wait for some that are not ready yet; None: it
    should begin.

    waits: in how many seconds each of them will be, ascending. Whoever comes in time does not wait
    for this pass to end; everybody else waits for the last that is waited for.
    """
    gains = [(count * pass_s - (count + ready) * wait, wait) for count, wait in enumerate(waits, 1)]
    most, wait = max(gains, default=(0.0, 0.0))
    return wait if most > 0.0 else None


def floor_of(rate: float, seconds: Callable[[int], float], rows: int, most: int) -> float:
    """How likely a node has to be so that its row may pay, around a pass of so many rows that has
    room for `most`: the least price of a row from there on.

    `seconds` is asked for up to most + 1 rows.
    """
    ends = [end for step in STEPS if (end := rows + step) <= most] or [max(rows + 1, most)]
    price = min((seconds(end) - seconds(rows)) / (end - rows) for end in ends)
    return min(MOST_FLOOR, max(0.0, rate * price))
