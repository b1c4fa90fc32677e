"""The worth of another pass that an order waits for: by the price that the order names, or, while
the tree grows ahead anyway, by what is left to gain."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.session import GrowingSession
from dovetail.workers.speculation.growth import NO_ROW, Nodes
from dovetail.workers.speculation.prices import PassTimes, worth_expanding
from dovetail.workers.speculation.proposal import FREE, Shape

SessionT = TypeVar("SessionT", bound=GrowingSession)


def hardly_matters(session: GrowingSession, shape: Shape, given_up: float) -> bool:
    """Return whether the tree grows ahead, and by no price, and what the policy has not expanded of
    what it would offer would add less than the share `given_up` of the expected tokens.

    One of a node's children takes the place of the last node of a full proposal.
    """
    tree = session.tree
    if not session.waiting_time.ahead or session.price.rate is not None:
        return False
    best = session.policy.select(tree, shape)
    probabilities = tree.probabilities(best)
    replaced = probabilities.min(initial=1.0) if len(best) == shape.nodes else 0.0
    left = (tree.rows[best] == NO_ROW) & (tree.levels[best] < shape.depth)
    gains = np.maximum(session.chance.value * probabilities[left] - replaced, 0.0)
    return bool(gains.sum() <= given_up * (1.0 + probabilities.sum()))


def worth_a_pass(
    session: SessionT,
    nodes: Nodes,
    times: PassTimes,
    rows_of_pass: Callable[[SessionT, Nodes], Nodes],
) -> Nodes:
    """Return those of `nodes` that the next pass should expand, by the order's price; without one,
    all. `rows_of_pass`: how many rows the first 1, 2, ... of them take."""
    if session.price == FREE:
        return nodes
    if nodes[0] == ROOT:
        probabilities, rows = np.ones(1, np.float32), np.array([session.missing_rows])
    else:
        nodes = nodes[(-session.tree.scores[nodes]).argsort(kind="stable")]
        probabilities, rows = (
            session.tree.probabilities(nodes),
            rows_of_pass(session, nodes),
        )
    return nodes[: worth_expanding(probabilities, rows, session.price, times, session.chance)]
