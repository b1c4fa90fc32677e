"""Grows the trees of several sessions in shared passes. Each session is done as soon as nothing in
its own tree is worth a pass.

A tree's policy chooses which nodes a pass may expand; how many of them are worth their rows is
decided by the order's price or, if the tree grows ahead anyway, by what is left to gain."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.devices.memory import is_out_of_memory, without_graphs
from dovetail.workers.drafters.ngram import Guesses
from dovetail.workers.drafters.passes import Reading, read_together
from dovetail.workers.drafters.session import NO_NODES, GrowingSession, WaitingTime
from dovetail.workers.speculation.growth import NO_ROW, Nodes
from dovetail.workers.speculation.prices import Candidates, PassTimes, worth_expanding
from dovetail.workers.speculation.proposal import FREE, Shape

if TYPE_CHECKING:
    from dovetail.workers.drafters.tree import Grower

LEAST_LEFT = 1e-9  # the least probability of a choice beyond the guesses

SessionT = TypeVar("SessionT", bound=GrowingSession)


class Pass(NamedTuple):
    """One pass for a session: nodes added to its pool, rows computed (of all sessions), start and
    end."""

    added: int
    rows: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Wanted:
    """Nodes of one tree that the next pass may expand, best first."""

    nodes: Nodes
    candidates: Candidates | None  # their worth; None: all are expanded at any cost


@dataclass(eq=False)
class Growth(Generic[SessionT]):
    """The tree of one session while its order is carried out."""

    place: int  # the place of its order in the command
    session: SessionT
    shape: Shape
    deadline_ns: int | None
    hit: bool
    unused: int
    """The number of nodes that were neither in the last proposal nor on the accepted path."""
    waited: WaitingTime  # the pause before the order
    passes: list[Pass] = field(default_factory=list)
    wanted: Wanted | None = None  # nodes that its next pass may expand
    reading: Reading | None = None  # rows that are being computed for it
    error: Exception | None = None
    guesses: Guesses | None = None  # of a look-up
    guessed: int = 0  # nodes that joined the pool for them

    def __post_init__(self) -> None:
        self._offers = self.session.policy.passes(self.session.tree, self.shape)
        self._offer = self._left_out = NO_NODES

    def look(self, engine: "Grower[SessionT]") -> bool:
        """Find nodes for the next pass; return False if the tree is done. Nodes are left out if no
        rows are left, or if they were not worth it last time."""
        session = self.session
        for offer in self._offers:
            at_root, free = offer[0] == ROOT, session.free_rows
            if not at_root and session.tree.guesses:  # the rows of their parents come first
                offer = offer[session.tree.below_rows(offer)]
            again = len(self._left_out) and np.array_equal(offer, self._left_out)
            if again or not offer.size or not (at_root or free):
                return False
            self._offer = offer
            if at_root or not hardly_matters(session, self.shape, engine.given_up):
                nodes = offer if at_root else offer[:free]
                self.wanted = wanted_of(session, nodes, engine.rows_of_pass)
                return True
            self._left_out = offer
        return False

    def choose(self, count: int, engine: "Grower[SessionT]") -> None:
        """Expand the first `count` of the wanted nodes in the next pass."""
        assert self.wanted is not None
        session, shape, nodes = self.session, self.shape, self.wanted.nodes[:count]
        self.wanted = None
        if count:
            self.reading = Reading(nodes, lambda: engine.steps(session, nodes, shape))
        else:
            self._left_out = self._offer

    def past(self, end_ns: int) -> bool:
        """Return whether the deadline has passed."""
        return self.deadline_ns is not None and end_ns > self.deadline_ns


@dataclass(frozen=True)
class SideBySide(Generic[SessionT]):
    """Grows the trees of several sessions, pass by pass."""

    engine: "Grower[SessionT]"
    times: PassTimes  # learns how long passes take
    spans: Spans

    def grow(self, growths: Sequence[Growth[SessionT]]) -> Iterator[Growth[SessionT]]:
        """Grow the trees; yield each as soon as it is done or has failed."""
        growing = [*growths]
        while growing:
            for growth in [*growing]:
                if growth.error is not None or not self._goes_on(growth):
                    growing.remove(growth)
                    yield growth
            self._choose([growth for growth in growing if growth.wanted is not None])
            if reading := [growth for growth in growing if growth.reading is not None]:
                for growth in self._pass(reading):
                    growing.remove(growth)
                    yield growth

    def _goes_on(self, growth: Growth[SessionT]) -> bool:
        """Return whether a tree should grow further."""
        if growth.reading is not None:
            return True
        try:
            return growth.look(self.engine)
        except Exception as error:
            growth.error = error
            return False

    def _choose(self, growths: Sequence[Growth[SessionT]]) -> None:
        """Choose the nodes of the next pass, with the cost of the rows of all trees."""
        wanted = [growth.wanted for growth in growths if growth.wanted is not None]
        for growth, count in zip(growths, worth_together(wanted, self.times), strict=True):
            growth.choose(count, self.engine)

    def _pass(self, growths: Sequence[Growth[SessionT]]) -> list[Growth[SessionT]]:
        """Make a pass for which an order waits; only these have spans. Return the growths whose
        deadlines have passed at its end."""
        readings = [growth.reading for growth in growths if growth.reading is not None]
        at_root = all(reading.nodes[0] == ROOT for reading in readings)
        with self.spans.measure("root" if at_root else "level"):
            start_ns = self.engine.now_ns()
            read_together(readings, self.engine.compute, start_ns)
            done = [
                growth
                for growth, reading in zip(growths, readings, strict=True)
                if reading.over and self._take(growth, reading)
            ]
            end_ns = self.engine.now_ns()
        return self._note(done, end_ns)

    def _take(self, growth: Growth[SessionT], reading: Reading) -> bool:
        """Put results into the tree; return False if that failed."""
        growth.reading, growth.error = None, reading.error
        if reading.error is None:
            try:
                added = without_graphs(partial(self.engine.take, growth.session, reading))
                growth.passes.append(Pass(added, reading.rows, reading.since_ns, 0))
            except Exception as error:
                growth.error = error
        if growth.error is not None and is_out_of_memory(growth.error):
            growth.error = growth.error.with_traceback(None)  # its frames keep tensors alive
            self.engine.release(growth.session)
        return growth.error is None

    def _note(self, done: Sequence[Growth[SessionT]], end_ns: int) -> list[Growth[SessionT]]:
        """Record the end of the pass for these growths, and return those past their deadlines."""
        for growth in done:
            growth.passes[-1] = growth.passes[-1]._replace(end_ns=end_ns)
        for rows, start_ns in {
            (growth.passes[-1].rows, growth.passes[-1].start_ns) for growth in done
        }:
            if rows:
                self.times.add(rows, end_ns - start_ns)
        return [growth for growth in done if growth.past(end_ns)]


def hardly_matters(session: GrowingSession, shape: Shape, given_up: float) -> bool:
    """Return whether the tree grows ahead without a price, and expanding the remaining nodes of the
    proposal would add less than the share `given_up` of the expected tokens. A child replaces the
    last node of a full proposal."""
    tree = session.tree
    if not session.waiting_time.ahead or session.price.rate is not None:
        return False
    best = session.policy.select(tree, shape)
    probabilities = tree.probabilities(best)
    replaced = probabilities.min(initial=1.0) if len(best) == shape.nodes else 0.0
    left = (tree.rows[best] == NO_ROW) & (tree.levels[best] < shape.depth)
    gains = np.maximum(session.chance.value * probabilities[left] - replaced, 0.0)
    return bool(gains.sum() <= given_up * (1.0 + probabilities.sum()))


def wanted_of(
    session: SessionT, nodes: Nodes, rows_of_pass: Callable[[SessionT, Nodes], Nodes]
) -> Wanted:
    """Return which of `nodes` the next pass may expand, by the order's price. `rows_of_pass`: how
    many rows the first 1, 2, ... of them take."""
    if session.price == FREE:
        return Wanted(nodes, None)
    tree, at_root = session.tree, nodes[0] == ROOT
    scores = np.zeros(1, np.float32) if at_root else tree.scores[nodes]
    if tree.guesses:  # the target's choice may be among the guesses already
        scores = scores + np.log(np.maximum(1.0 - tree.guessed_below(nodes), LEAST_LEFT))
    order = (-scores).argsort(kind="stable")
    nodes, probabilities = nodes[order], np.exp(scores[order], dtype=np.float32)
    rows = np.array([session.missing_rows]) if at_root else rows_of_pass(session, nodes)
    return Wanted(nodes, Candidates(probabilities, rows, session.price, session.chance))


def worth_together(wanted: Sequence[Wanted], times: PassTimes) -> list[int]:
    """Return how many nodes of each tree the next pass should expand."""
    priced = [one.candidates for one in wanted if one.candidates is not None]
    free = sum(len(one.nodes) for one in wanted if one.candidates is None)
    counts = iter(worth_expanding(priced, times, others=free) if priced else ())
    return [len(one.nodes) if one.candidates is None else next(counts) for one in wanted]
