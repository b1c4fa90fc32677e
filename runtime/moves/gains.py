"""The gain of a move: the seconds saved by all running sessions if one of them moves to another
target, and the cost of prefilling its log there. Pure.

A session takes its remaining tokens in rounds, which last as long as the pass shared by all
sessions of its target. So a session that moves shortens the rounds of those that stay and lengthens
those of its new neighbours; the gain is the total saving. If passes take hardly longer for several
sessions than for one, there is nothing to gain."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

WORTH = 2.0  # least ratio of a move's saving to its cost, since both are predictions
LEAST_GAIN = 0.05
"""A move must save this share of both targets' remaining seconds, so that noise causes none."""
LEAST_S = 0.5  # least saving of a move in seconds, to be noticeable


@dataclass(frozen=True)
class Seat:
    """A session on its target, with the figures that decide on a move."""

    session: int
    rounds: float  # rounds that it may still need
    tokens: float = 1.0  # tokens of a round
    movable: bool = True


@dataclass(frozen=True)
class TargetLoad:
    """A target with its sessions."""

    name: bytes
    round_s: Callable[[int], float]  # seconds of a round of this many sessions
    seats: Sequence[Seat] = ()

    def left_s(self, more: float = 0.0, sessions: int = 0) -> float:
        """Return the remaining seconds of all sessions if this many join with `more` rounds."""
        count = len(self.seats) + sessions
        if not count:
            return 0.0
        return (sum(seat.rounds for seat in self.seats) + more) * self.round_s(count)


@dataclass(frozen=True)
class Price:
    """The cost of a move, in seconds of the sessions that are delayed."""

    reading_s: float
    """Seconds that the new target takes to prefill the log, which delay each session there."""
    pause_s: float  # seconds in which the moving session gets no token
    lag_s: float = 0.0  # seconds until the move, in which the session continues where it is


@dataclass(frozen=True)
class Gain:
    """A move of one session, and its gain."""

    session: int
    old: bytes
    new: bytes
    saved_s: float  # seconds saved by all sessions of both targets together
    cost_s: float
    rate: float  # predicted tokens per second on the present target; `new_rate`: on the new one
    new_rate: float


Asks = Callable[[int, bytes], Price | None]
"""Returns the price of moving a session to a target; None: it may not move there."""


def best_move(places: Sequence[TargetLoad], price: Asks) -> Gain | None:
    """Return the most profitable move of one session; None: none is worth it."""
    worth = [
        gain for gain in _gains(places, price) if gain.saved_s >= max(LEAST_S, WORTH * gain.cost_s)
    ]
    return max(worth, key=lambda gain: gain.saved_s - gain.cost_s, default=None)


def _gains(places: Sequence[TargetLoad], price: Asks) -> Iterator[Gain]:
    for old in places:
        for new in places:
            if new is not old:
                yield from _between(old, new, price)


def _between(old: TargetLoad, new: TargetLoad, price: Asks) -> Iterable[Gain]:
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
