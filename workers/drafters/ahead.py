"""Growth ahead of the orders: what a tree expands while its target verifies, and whether it pays.

A node is used if it lies on the target's path, and that has the node's path probability: the next
root is a node of the pool, and what is below it survives.
"""

from collections.abc import Callable

from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.session import (
    MAX_TREE_ROWS,
    NO_NODES,
    THE_ROOT,
    GrowingSession,
    WaitingTime,
)
from dovetail.workers.speculation.growth import Nodes, best_first
from dovetail.workers.speculation.prices import PassTimes, most_used
from dovetail.workers.speculation.proposal import Shape

LEAST_USED = 1e-3
"""A node that lies on the target's path with a smaller probability is not expanded ahead of the
orders."""
WIDEST_AHEAD = 64
"""Rows of a pass ahead at most."""


class GrowthAhead:
    """Chooses the passes that nobody waits for. `times`: how long passes take."""

    def __init__(self, times: PassTimes, clock: Callable[[], int]) -> None:
        self._times, self._clock = times, clock

    def end(self, session: GrowingSession) -> WaitingTime:
        """Return what was done until an order came, which ends it."""
        waited = session.waiting_time
        if waited.since_ns is not None:
            session.waits.add(self._clock() - waited.since_ns)
        return waited

    def next_nodes(self, session: GrowingSession) -> Nodes:
        """Return what the next pass ahead expands; nothing, from then on, if the last order did not
        ask for it or nothing is worth it any more."""
        waiting = session.waiting_time
        nodes = (
            self._likeliest_to_be_used(session)
            if waiting.ahead and not waiting.done and session.readable
            else NO_NODES
        )
        waiting.done = not len(nodes) or self._comes_too_late(session, nodes)
        return NO_NODES if waiting.done else nodes

    def _comes_too_late(self, session: GrowingSession, nodes: Nodes) -> bool:
        """Return whether a pass over `nodes` would end after the next order is expected, and rather
        not be used: it would keep the order waiting for nothing."""
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
        """Return what a pass ahead may expand, best first: the root if it has not been, else nodes
        without a row."""
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
