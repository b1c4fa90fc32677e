"""Rebalancing: running sessions move to a target of the same fingerprint that has joined, has
returned or has fewer sessions than before, if that pays off.

One session moves at a time, once the new target has prefilled its log (`reading_ahead.py`); if that
target keeps no rows, the session pauses until its whole log is prefilled. The fingerprint is the
same, so no byte changes, and the draft continues. A move that fails before the session has left the
old target changes nothing; later failures count as a loss. The next move is considered when the
moved session has had some rounds, which show the present time of passes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dovetail.protocol.messages import Failed
from dovetail.runtime.control.pairs import CPU, share_cores, share_device
from dovetail.runtime.costs.passes import PooledPasses
from dovetail.runtime.engine.acts import EngineState
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.moves.moving import Moving
from dovetail.runtime.moves.reading_ahead import Reading, ReadingAhead
from dovetail.runtime.session.state import State

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
    """Return the most profitable move of one session; None: none is worth it. Its remaining rounds
    last as long as the pass shared by all sessions of its target, so one that leaves shortens the
    rounds of those that stay and lengthens those of the ones that it joins."""
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


LEAST_LEFT = 64  # fewest further tokens expected of a session; longer ones are expected to double
MOST_OPENING = 0.25
"""Share of sessions in prefill from which on nothing moves, since costs are unknown."""
SETTLED_ROUNDS = 3
"""Rounds of a moved session on its new target before the next move is considered."""
STAY_NS = 5_000_000_000  # nanoseconds for which a moved session is not moved again
REFUSED_NS = 30_000_000_000
"""Nanoseconds for which no session moves to a target after a failed move to it."""


@dataclass
class Under:
    """The move in progress."""

    running: RunningRequest
    old: Worker
    new: Worker
    gain: Gain
    phase: Literal["reading", "settling"] = "reading"
    reading: Reading | None = None
    """The log that is prefilled ahead; None: the session itself will prefill it."""
    rounds: int = 0  # rounds of the session when it moved


class Rebalancing:
    """Finds moves that pay off, and makes them one at a time."""

    def __init__(self, state: EngineState, moving: Moving, ahead: ReadingAhead) -> None:
        self._service, self._running, self._registry = state.service, state.running, state.registry
        self._placement, self._tally, self._now_ns = state.placement, state.tally, state.now_ns
        self._acts, self._moving, self._ahead = state.acts, moving, ahead
        self._under: Under | None = None
        self._ways: tuple[bytes, bytes] | None = None
        """The best move at the last check; it begins if it is the best twice in a row."""
        self._refused: dict[bytes, int] = {}
        """By peer: time until which a target is left alone, in nanoseconds."""
        self._moved: dict[int, int] = {}
        """By number: time of the last move of each running session, in nanoseconds."""

    @property
    def under_way(self) -> bool:
        """Whether a session is moving, or has just moved."""
        return self._under is not None

    # -- events ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Begin the best move, if there is one and none is in progress."""
        if self._under is not None or self._service.ending:
            return
        now_ns = self._now_ns()
        self._refused = {peer: until for peer, until in self._refused.items() if until > now_ns}
        self._moved = {n: at_ns for n, at_ns in self._moved.items() if n in self._running}
        gains = (best_move(self._places(targets), self._price) for targets in self._alike())
        gain = next(filter(None, gains), None)
        ways, before = None if gain is None else (gain.old, gain.new), self._ways
        self._ways = ways
        if gain is not None and ways == before:
            self._begin(gain)

    def step(self, *, changing: bool) -> None:
        """Take the next step of a move, if due. `changing`: a worker is being replaced."""
        if (under := self._under) is None:
            return
        if under.phase == "settling":
            self._settle(under)
        elif under.reading is not None and isinstance(under.reading.heard, Failed):
            self._refuse(under)
        elif changing or not self._is_open(under):
            self.break_off()
        elif under.reading is not None and under.reading.heard is not None:
            if self._ahead.lags(under.reading):
                under.reading = self._ahead.begin(under.running, under.new)
            else:
                self._go(under)

    def break_off(self) -> None:
        """Abandon the current move; the session stays where it is."""
        under, self._under = self._under, None
        self._ahead.abandon(under.reading if under is not None else None)

    def _begin(self, gain: Gain) -> None:
        running, workers = self._running[gain.session], self._registry.workers
        under = self._under = Under(running, workers[gain.old], workers[gain.new], gain)
        if self._ahead.able(running, under.new):
            under.reading = self._ahead.begin(running, under.new)
        else:
            self._go(under)

    def _go(self, under: Under) -> None:
        """Move the session."""
        running, gain = under.running, under.gain
        if not self._fits(running, under.new):
            self._refuse(under)
            return
        under.phase, under.rounds = "settling", running.session.accounts.rounds
        self._moved[running.session.number] = self._now_ns()
        self._tally.rebalanced += 1
        self._acts.decide(
            f"session {running.session.number} moves from {under.old.name} to {under.new.name}: "
            f"{gain.new_rate:.3g} tokens/s are predicted there, {gain.rate:.3g} here; "
            f"all sessions of both targets save {gain.saved_s:.3g} s for {gain.cost_s:.3g} s of "
            "prefill"
        )
        self._moving.move(running, under.new)

    def _settle(self, under: Under) -> None:
        """Check whether the session has had some rounds on its new target, or has ended."""
        running = under.running
        if self._running.get(running.session.number) is not running:
            self._under = None
        elif running.target is not under.new or running.loss is not None:
            self._refuse(under)
        elif running.session.accounts.rounds >= under.rounds + SETTLED_ROUNDS:
            self._under = None

    def _refuse(self, under: Under) -> None:
        """Exclude a target for a time after a failed move to it."""
        self._refused[under.new.peer] = self._now_ns() + REFUSED_NS
        self._under = None

    # -- possible moves ----------------------------------------------------------------------------

    def _is_open(self, under: Under) -> bool:
        """Return whether the session is still where it was, and both targets are available."""
        running, workers = under.running, self._registry.workers
        return (
            self._running.get(running.session.number) is running
            and running.target is under.old
            and _may_leave(running)
            and workers.get(under.new.peer) is under.new
            and under.new.available
        )

    def _fits(self, running: RunningRequest, target: Worker) -> bool:
        """Return whether a target has room for the session, and no other session waits for it."""
        full = target.sessions >= target.limits.sessions or self._moving.awaits(target)
        return not full and self._moving.has_room(running, target)

    def _alike(self) -> Iterator[Sequence[Worker]]:
        """Yield the targets of each fingerprint that has several."""
        groups: dict[str, list[Worker]] = {}
        for worker in self._registry.workers.values():
            if worker.plays("target") and worker.available:
                groups.setdefault(str(worker.hello.fingerprint), []).append(worker)
        yield from (targets for targets in groups.values() if len(targets) > 1)

    # -- gains -------------------------------------------------------------------------------------

    def _places(self, targets: Sequence[Worker]) -> Sequence[TargetLoad]:
        """Return the targets with their sessions, and the time of rounds there."""
        held = {
            target.peer: [
                one
                for one in self._running.values()
                if one.target is target and one.loss is None and not one.trial
            ]
            for target in targets
        }
        every = [one for sessions in held.values() for one in sessions]
        opening = sum(one.session.state is State.OPENING for one in every)
        if opening >= MOST_OPENING * len(every):
            return ()
        rows = 1.0 + sum(len(one.session.tree.tokens) for one in every) / len(every)
        context = sum(one.session.length for one in every) / len(every)
        beside_s = sum(self._beside_s(one) for one in every) / len(every)
        now_ns = self._now_ns()
        return [
            TargetLoad(
                target.peer,
                partial(
                    _round_s, _passes_of(target, targets, context), rows, beside_s + target.hop_s
                ),
                [self._seat(one, now_ns) for one in held[target.peer]],
            )
            for target in targets
        ]

    def _seat(self, running: RunningRequest, now_ns: int) -> Seat:
        session = running.session
        tokens = len(session.tokens) / max(1, session.accounts.rounds)
        left = min(session.room, max(LEAST_LEFT, len(session.tokens)))
        moved_ns = self._moved.get(session.number)
        stays = moved_ns is not None and now_ns - moved_ns < STAY_NS
        per_round = max(1.0, tokens)
        return Seat(
            session.number, left / per_round, per_round, movable=_may_leave(running) and not stays
        )

    def _beside_s(self, running: RunningRequest) -> float:
        """Return the seconds of a session's round outside its pass."""
        if running.draft is None or not running.session.tree.tokens:
            return 0.0
        return self._placement.pair(running.draft, running.target)[1].order_s

    def _price(self, number: int, peer: bytes) -> Price | None:
        """Return the cost of moving a session to a target; None: it may not move there."""
        running, target = self._running[number], self._registry.workers[peer]
        if not (
            peer not in self._refused
            and self._moving.suits(running, target)
            and target.hello.fingerprint == running.target.hello.fingerprint
            and not _in_common(running.target, target)
            and (running.draft is None or self._placement.goes_with(running.draft, target))
            and self._fits(running, target)
        ):
            return None
        session = running.session
        base = self._placement.begins_with(session.packed(), session.request, target)
        rows = session.length - (base.tokens if base is not None else 0)
        row_s = target.reading.row_s or running.target.reading.row_s
        if not row_s:
            row_s = running.target.verifying.at(1, session.length)
        reading_s = rows * row_s
        pass_s = running.target.verifying.at(1 + len(session.tree.tokens), session.length)
        if self._ahead.able(running, target):
            return Price(reading_s, pass_s, lag_s=reading_s)
        return Price(reading_s, pass_s + reading_s)


def _may_leave(running: RunningRequest) -> bool:
    """Return whether a session only decodes, and its tokens do not depend on drafts."""
    return (
        running.session.state in (State.DRAFTING, State.VERIFYING)
        and running.loss is None
        and running.session.accounts.rounds >= SETTLED_ROUNDS
        and not running.joining
        and not running.session.request.rejects
        and running.draft is not running.target
    )


def _in_common(one: Worker, other: Worker) -> bool:
    """Return whether two targets are known to share a device."""
    if next(iter(one.hello.device.split()), CPU) == CPU:
        return share_cores(one.hello, other.hello)
    return share_device(one.hello, other.hello)


def _passes_of(target: Worker, targets: Sequence[Worker], context: float) -> Callable[[int], float]:
    """Return a target's pass times: from its profile, its passes, or those of its fingerprint."""
    if target.verifying.profiled:
        return partial(target.verifying.at, context=context)
    others = [other.verifying.curve(context) for other in targets if other is not target]
    return PooledPasses(target.verifying.curve(context), others).at


def _round_s(pass_s: Callable[[int], float], rows: float, beside_s: float, sessions: int) -> float:
    """Return the seconds of a round of this many sessions, each with this many rows."""
    return pass_s(round(rows * sessions)) + beside_s
