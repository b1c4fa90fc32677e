"""The engine of a draft without a model: it proposes what followed earlier occurrences of the last
tokens, in the prompt or in the reply.

All earlier occurrences of the log's last tokens vote (`protocol/lookup.py`), and the tree follows
the votes.

The logarithms of the votes are this draft's logits, relative to 0 for unseen tokens, and processors
that look back are applied to them. Temperature and truncation are not, since the earlier text was
already sampled with them. Nor is the noise: these probabilities are too coarse to gain from it
(measured at temperature 1: acceptance unchanged, scores two to three times too high).

A draft with a model can take the same guesses into its own tree (`tree.py`).

The tree is grown best first; since there are no passes to save, the policies `dynamic` and `budget`
(without its decay) are the same here, and others are refused. So is rejection sampling: nothing is
drawn here. Imports no torch."""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.protocol.errors import RequestError
from dovetail.protocol.lookup import CLASSES, Matches, SearchedLog
from dovetail.protocol.messages import Open
from dovetail.protocol.settings import misfit
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.drafters.engine import Engine
from dovetail.workers.speculation.history import History
from dovetail.workers.speculation.proposal import FREE, Order, Price, Proposal, Shape

if TYPE_CHECKING:
    from dovetail.workers.speculation.constrained import Constrained

SHARPENING = 1.0
LEAST = 0.07
"""The minimum probability offered if the order has no price: about the cost of another row as a
share of a one-row pass, if sixteen rows cost two."""
NEGLIGIBLE = 1e-4  # the least probability ever offered


@dataclass(order=True, frozen=True)
class _Node:
    """A candidate. Candidates are offered best first, and ties in the order in which they were
    found."""

    badness: float  # minus the score (the log-probability of the path)
    number: int
    parent: int = field(compare=False)
    path: tuple[int, ...] = field(compare=False)
    matches: Matches = field(compare=False)


@dataclass(frozen=True)
class Guesses:
    """What a look-up proposes, best first."""

    tree: TokenTree
    scores: tuple[float, ...]  # the log-probability of each path
    kinds: tuple[int, ...]  # the class of the longest match of each node
    grown: int  # candidates looked at


@dataclass
class LookupSession:
    """One sequence, and the last proposal."""

    log: list[int]
    searched: SearchedLog
    history: History
    sharpening: float
    capacity: int
    unbounded: bool
    """Whether paths may have more levels than the order's, which bound the passes of a model."""
    offered: TokenTree = field(default_factory=TokenTree)
    readable: bool = True  # always true: a log has no maximum length here


def look_up(order: Open, log: list[int], constrained: "Constrained | None" = None) -> LookupSession:
    """Return the look-up in `log`, which begins as the prompt of `order`."""
    sharpening = SHARPENING if order.tree.sharpening == "auto" else order.tree.sharpening
    history = History(order.sampling, log, order.end, order.replied, (), constrained)
    unbounded = order.tree.traits.sizes_itself
    return LookupSession(log, SearchedLog(log), history, sharpening, order.capacity, unbounded)


def guesses(
    session: LookupSession,
    shape: Shape,
    price: Price,
    *,
    past: Callable[[], bool] = lambda: False,
) -> Guesses:
    """Return what is expected after the session's log; `past`: whether to stop here."""
    levels = shape.nodes if session.unbounded else shape.depth
    depth = min(levels, session.capacity - len(session.log) - 1)
    worst = -math.log(max(price.floor, LEAST if price.rate is None else NEGLIGIBLE))
    waiting = [_Node(0.0, 0, ROOT, (), session.searched.occurrences())]
    taken: list[_Node] = []
    grown = 0
    while waiting and len(taken) <= shape.nodes and not past():
        node = heapq.heappop(waiting)
        taken.append(node)
        if len(node.path) < depth and len(taken) <= shape.nodes:
            for child in _children(
                session,
                node,
                number=len(taken) - 1,
                first=grown + 1,
                width=shape.width,
                worst=worst,
            ):
                heapq.heappush(waiting, child)
                grown += 1
    nodes = taken[1 : shape.nodes + 1]
    tree = TokenTree(
        tuple(node.path[-1] for node in nodes), tuple(node.parent - 1 for node in nodes)
    )
    scores = tuple(-node.badness for node in nodes)
    kinds = tuple(CLASSES[max(match for _, _, match in node.matches) - 1] for node in nodes)
    return Guesses(tree, scores, kinds, grown)


def _children(
    session: LookupSession,
    node: _Node,
    *,
    number: int,
    first: int,
    width: int,
    worst: float,
) -> Iterator[_Node]:
    """Yield candidates below `node`, which has the number `number` (0: the root), that are no
    worse than `worst`: best first, numbered from `first` on."""
    if node.path and node.path[-1] in session.history.end:
        return
    votes, agreeing = session.searched.followers(node.matches, node.path)
    logits = {
        token: session.history.process(token, math.log(weight), node.path) / session.sharpening
        for token, weight in votes.items()
    }
    largest = max(0.0, *logits.values()) if logits else 0.0  # unseen tokens have logit 0
    total = largest + math.log(math.fsum(math.exp(z - largest) for z in (0.0, *logits.values())))
    for token in sorted(logits, key=logits.__getitem__, reverse=True)[:width]:
        badness = node.badness + max(0.0, total - logits[token])
        if not badness <= worst:
            return
        yield _Node(badness, first, number, (*node.path, token), agreeing[token])
        first += 1


class Lookup(Engine[LookupSession]):
    """The lookup engine."""

    looks_up = True

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock

    def open(self, order: Open, base: None = None) -> LookupSession:
        """Open a session; `Open.key` is not used. Raises `RequestError` if a token of the prompt is
        at or beyond `vocabulary_size`, since it could be proposed."""
        if (text := misfit(order.sampling, order.tree, "ngram")) is not None:
            raise RequestError("settings", text)
        if (largest := max(order.prompt)) >= order.vocabulary_size:
            size = order.vocabulary_size
            text = f"the prompt has token {largest}, beyond the target's vocabulary of {size}"
            raise RequestError("vocabulary", text)
        return look_up(order, list(order.prompt), self.constrained(order))

    def draft(
        self,
        session: LookupSession,
        accepted: Sequence[int],
        bonus: int,
        shape: Shape,
        deadline_ns: int | None = None,
        *,
        more: Sequence[int] = (),
        price: Price = FREE,
        recalled: Matches = (),
    ) -> Proposal:
        """Append the `accepted` nodes of the last proposal, `bonus` and `more` to the log, and
        propose; candidates found after `deadline_ns` are left out. There are no passes, so only the
        floor of `price` counts: with a rate it replaces LEAST."""
        committed = [*(session.offered.tokens[node] for node in accepted), bonus, *more]
        session.log += committed
        session.history.extend(committed)
        session.searched.recalled = recalled
        found = guesses(
            session,
            shape,
            price,
            past=lambda: deadline_ns is not None and self._clock() > deadline_ns,
        )
        session.offered = found.tree
        return Proposal(found.tree, found.scores, found.grown, hit=False)

    def draft_all(
        self, orders: Sequence[Order[LookupSession]]
    ) -> Iterator[tuple[int, Proposal | Exception]]:
        """Propose for the sessions in turn: there is no pass to share."""
        for place, order in enumerate(orders):
            try:
                outcome: Proposal | Exception = self.draft(
                    order.session,
                    order.accepted,
                    order.bonus,
                    order.shape,
                    order.deadline_ns,
                    more=order.more,
                    price=order.price,
                    recalled=order.recalled,
                )
            except Exception as error:
                outcome = error
            yield place, outcome
