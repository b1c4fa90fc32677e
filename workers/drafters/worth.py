"""The worth of another pass that an order waits for: by the order's price, or, if the tree grows
ahead anyway, by what is left to gain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.session import GrowingSession
from dovetail.workers.speculation.growth import NO_ROW, Nodes
from dovetail.workers.speculation.prices import Candidates, PassTimes, worth_expanding
from dovetail.workers.speculation.proposal import FREE, Shape

SessionT = TypeVar("SessionT", bound=GrowingSession)


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


@dataclass(frozen=True)
class Wanted:
    """Nodes of one tree that the next pass may expand, best first."""

    nodes: Nodes
    candidates: Candidates | None  # their worth; None: all are expanded at any cost


def wanted_of(
    session: SessionT, nodes: Nodes, rows_of_pass: Callable[[SessionT, Nodes], Nodes]
) -> Wanted:
    """Return which of `nodes` the next pass may expand, by the order's price. `rows_of_pass`: how
    many rows the first 1, 2, ... of them take."""
    if session.price == FREE:
        return Wanted(nodes, None)
    if nodes[0] == ROOT:
        probabilities, rows = np.ones(1, np.float32), np.array([session.missing_rows])
    else:
        nodes = nodes[(-session.tree.scores[nodes]).argsort(kind="stable")]
        probabilities, rows = session.tree.probabilities(nodes), rows_of_pass(session, nodes)
    return Wanted(nodes, Candidates(probabilities, rows, session.price, session.chance))


def worth_together(wanted: Sequence[Wanted], times: PassTimes) -> list[int]:
    """Return how many nodes of each tree the next pass should expand."""
    priced = [one.candidates for one in wanted if one.candidates is not None]
    free = sum(len(one.nodes) for one in wanted if one.candidates is None)
    counts = iter(worth_expanding(priced, times, beside=free) if priced else ())
    return [len(one.nodes) if one.candidates is None else next(counts) for one in wanted]
