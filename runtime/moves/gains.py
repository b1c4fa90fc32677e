"""The gain of a move: the seconds that running sessions are done earlier if one of them goes over
to another target, and what reading its log there costs. Pure.

A session that has a number of tokens to go takes them in rounds, which last as long as the pass
that all sessions of its target share. So one that leaves shortens the rounds of those that stay and
lengthens those of the ones that it joins, and the gain is what all of them save together. Where
passes take hardly longer for several sessions than for one there is nothing to gain.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

WORTH = 2.0  # least ratio of what a move saves to what it costs: both are predictions
LEAST_GAIN = 0.05
"""A move must save at least this share of the remaining seconds of both targets' sessions, so that
noise in the passes moves no session back and forth."""
LEAST_S = 0.5  # seconds that a move must save at least, to be noticeable


@dataclass(frozen=True)
class Seat:
    """A session on its target, with what a move of it would take."""

    session: int
    rounds: float  # rounds that it may still have to go
    tokens: float = 1.0  # tokens that a round brings it
    movable: bool = True


@dataclass(frozen=True)
class Place:
    """A target with its sessions."""

    name: bytes
    round_s: Callable[[int], float]  # seconds of a round of this many sessions
    seats: Sequence[Seat] = ()

    def left_s(self, more: float = 0.0, sessions: int = 0) -> float:
        """Return the remaining seconds of all sessions if this many join and `more` rounds go."""
        count = len(self.seats) + sessions
        if not count:
            return 0.0
        return (sum(seat.rounds for seat in self.seats) + more) * self.round_s(count)


@dataclass(frozen=True)
class Price:
    """The cost of a move, in seconds of the sessions that are delayed."""

    reading_s: float
    """Seconds that the new target takes to read the log; each session there is delayed by them."""
    pause_s: float  # seconds in which the session that moves gets no token
    lag_s: float = 0.0  # seconds until the session moves, in which it goes on where it is


@dataclass(frozen=True)
class Gain:
    """A move of one session, and what it brings."""

    session: int
    old: bytes
    new: bytes
    saved_s: float  # seconds that all sessions of both targets are done earlier, together
    cost_s: float
    rate: float  # tokens a second that are predicted for the session where it is; `new_rate`: there
    new_rate: float


Asks = Callable[[int, bytes], Price | None]
"""Function that returns the price of moving a session to a target; None: it may not go there."""


def best_move(places: Sequence[Place], price: Asks) -> Gain | None:
    """Return the move of one session that brings most; None: none is worth it."""
    worth = [
        gain for gain in _gains(places, price) if gain.saved_s >= max(LEAST_S, WORTH * gain.cost_s)
    ]
    return max(worth, key=lambda gain: gain.saved_s - gain.cost_s, default=None)


def _gains(places: Sequence[Place], price: Asks) -> Iterator[Gain]:
    for old in places:
        for new in places:
            if new is not old:
                yield from _between(old, new, price)


def _between(old: Place, new: Place, price: Asks) -> Iterable[Gain]:
    """Yield the moves from one target to another that save enough."""
    before_s = old.left_s() + new.left_s()
    for seat in old.seats:
        if not seat.movable:
            continue
        saved_s = before_s - old.left_s(-seat.rounds, -1) - new.left_s(seat.rounds, 1)
        if saved_s <= max(LEAST_S, LEAST_GAIN * before_s):
            continue
        if (paid := price(seat.session, new.name)) is None:
            continue
        own_s = seat.rounds * old.round_s(len(old.seats))
        saved_s *= max(0.0, 1.0 - paid.lag_s / own_s)
        yield Gain(
            seat.session,
            old.name,
            new.name,
            saved_s,
            paid.pause_s + paid.reading_s * len(new.seats),
            seat.tokens / old.round_s(len(old.seats)),
            seat.tokens / new.round_s(len(new.seats) + 1),
        )
