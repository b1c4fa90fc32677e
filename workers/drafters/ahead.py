"""Growth ahead: expanding a draft tree while the target verifies its last proposal, and whether
that pays off. A node is used if it is on the target's path, which has the node's path probability:
the next root is then a node of the pool, and its subtree survives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from dovetail.protocol.tree import ROOT
from dovetail.workers.devices.memory import is_out_of_memory
from dovetail.workers.drafters.passes import Reading, read_together
from dovetail.workers.drafters.session import (
    MAX_TREE_ROWS,
    NO_NODES,
    THE_ROOT,
    GrowingSession,
    WaitingTime,
)
from dovetail.workers.speculation.growth import Ints, Nodes, best_first
from dovetail.workers.speculation.prices import LONGER, PassTimes, most_used
from dovetail.workers.speculation.proposal import Shape

if TYPE_CHECKING:
    from dovetail.workers.drafters.tree import Grower

LEAST_USED = 1e-3  # nodes whose path probability is below this are not expanded ahead
WIDEST_AHEAD = 64  # the most rows of a pass ahead


SessionT = TypeVar("SessionT", bound=GrowingSession)


@dataclass
class _Grown(Generic[SessionT]):
    """A tree that grows in a pass ahead, and the number of its rows before the pass."""

    place: int
    session: SessionT
    reading: Reading
    rows: Ints
    used: int


class GrowthAhead:
    """Chooses the passes of growth ahead. `times`: how long passes take."""

    def __init__(self, times: PassTimes, clock: Callable[[], int]) -> None:
        self._times, self._clock = times, clock

    def end(self, session: GrowingSession) -> WaitingTime:
        """End growth ahead because an order arrived; return its results."""
        waited = session.waiting_time
        if waited.since_ns is not None:
            session.waits.add(self._clock() - waited.since_ns)
        return waited

    def grow(
        self, sessions: Sequence[tuple[int, SessionT]], engine: "Grower[SessionT]"
    ) -> Sequence[int]:
        """Make one pass ahead, for the first of these sessions that have nodes to expand, and
        return their places. If it fails for one session, the exception is raised after the others
        are done."""
        if not (growing := self._next_pass(sessions, engine)):
            return []
        start_ns = engine.now_ns()
        readings = [grown.reading for grown in growing]
        while left := [reading for reading in readings if not reading.over]:
            read_together(left, engine.compute, start_ns)
        added = [_take(grown, engine) for grown in growing]
        duration_ns = engine.now_ns() - start_ns
        if rows := max(reading.rows for reading in readings):
            self._times.add(rows, duration_ns)
        for grown, count in zip(growing, added, strict=True):
            waiting = grown.session.waiting_time
            waiting.joined += count
            if grown.reading.error is None and grown.reading.rows:
                waiting.passes.append((grown.reading.rows, duration_ns))
        for error in filter(None, (reading.error for reading in readings)):
            # a command may still have room, and reports an error if not
            if not is_out_of_memory(error):
                raise error
        return [grown.place for grown in growing]

    def _next_pass(
        self, sessions: Sequence[tuple[int, SessionT]], engine: "Grower[SessionT]"
    ) -> list[_Grown[SessionT]]:
        """Return trees for a pass that takes little longer than one for a single session, since an
        order that arrives meanwhile waits for its end."""
        growing: list[_Grown[SessionT]] = []
        rows = 0
        for place, session in sessions:
            if not len(nodes := self.next_nodes(session)):
                continue
            rows += session.missing_rows if nodes[0] == ROOT else len(nodes)
            usual_ns = self._times.estimate_ns(session.waiting_time.width)
            if growing and self._times.estimate_ns(rows) > LONGER * usual_ns:
                break
            tree = session.tree
            steps = partial(engine.steps_ahead, session, nodes)
            growing.append(
                _Grown(place, session, Reading(nodes, steps), tree.rows_of(nodes), tree.rows_used)
            )
        return growing

    def next_nodes(self, session: GrowingSession) -> Nodes:
        """Return the nodes to expand in the next pass ahead. If the last order did not ask for
        growth ahead, or no node is worth a pass, return none and mark the pause as done."""
        waiting = session.waiting_time
        nodes = (
            self._likeliest_to_be_used(session)
            if waiting.ahead and not waiting.done and session.readable
            else NO_NODES
        )
        waiting.done = not len(nodes) or self._comes_too_late(session, nodes)
        return NO_NODES if waiting.done else nodes

    def _comes_too_late(self, session: GrowingSession, nodes: Nodes) -> bool:
        """Return whether a pass over `nodes` would end after the next order is expected. Its nodes
        would probably not be used, and the order would wait for it."""
        since_ns, expected_ns = session.waiting_time.since_ns, session.waits.median_ns
        if (
            since_ns is None
            or expected_ns is None
            or nodes[0] == ROOT
            or session.tree.probabilities(nodes).sum() > 0.5
        ):
            return False
        return self._clock() - since_ns + self._times.estimate_ns(len(nodes)) > expected_ns

    def _likeliest_to_be_used(self, session: GrowingSession) -> Nodes:
        """Return what a pass ahead may expand, best first: the root if it has not been expanded,
        otherwise nodes without a row."""
        tree, width = session.tree, session.waiting_time.width
        reach = session.within_reach(Shape(MAX_TREE_ROWS, MAX_TREE_ROWS, width)).depth
        if not tree.root_expanded:
            return THE_ROOT if reach > 0 else NO_NODES
        free = min(WIDEST_AHEAD, session.free_rows, session.rows_ahead - tree.rows_used)
        nodes = best_first(tree.expandable(reach, LEAST_USED), tree.scores, max(free, 0))
        return (
            nodes[: most_used(tree.probabilities(nodes), width, self._times)]
            if len(nodes)
            else nodes
        )


def _take(grown: _Grown[SessionT], engine: "Grower[SessionT]") -> int:
    """Put a pass's results into the tree; return how many nodes joined it. On failure the nodes get
    their former rows back, and the tree stops growing ahead."""
    session, reading = grown.session, grown.reading
    if reading.error is None:
        try:
            return engine.take(session, reading)
        except Exception as error:
            reading.error = error
    session.waiting_time.done = True
    session.tree.restore_rows(reading.nodes, grown.rows, grown.used)
    return 0
