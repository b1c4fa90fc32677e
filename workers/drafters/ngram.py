"""The engine of a draft without a model: it proposes what followed earlier occurrences of the last
tokens, in the prompt or in the reply.

Prompt lookup (Saxena, "Prompt lookup decoding", 2023) proposes one such continuation; here all
earlier occurrences of the log's ending vote together, and the tree goes down where the votes are.
An occurrence whose preceding m tokens are those before the place in question gives the token that
follows it a vote of ODDS[m]; all that was never seen has the weight 1 together. So a token's
probability is the sum of its votes over 1 + all votes; a level deeper the occurrences that agreed
so far have matched one token more, and the others have no vote. An occurrence that runs into the
end of the log goes on with what it has proposed itself: what repeats is continued.

The logarithms of the votes are this draft's logits, relative to the unseen's 0, and the processors
that look back are applied to them. Temperature and truncation are not: what is looked up was
written under these already. Nor is the noise: these probabilities are too coarse to gain by it
(measured at temperature 1: acceptance unchanged, the scores two to three times too high). Nothing
here can change the output, only how fast it comes.

The tree is grown best first; since no pass is to be saved this is what the policies `dynamic` and
`budget` (without its decay) both come to, and the others are refused. So is acceptance by
rejection: nothing is drawn here. Knows no model, no device and no vocabulary; imports no torch.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Open
from dovetail.protocol.settings import misfit
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.speculation.history import History
from dovetail.workers.speculation.proposal import FREE, Order, Price, Proposal, Shape

SIZES = (4, 3, 2, 1)
"""Lengths of the n-grams that are indexed; from an occurrence on, longer matches are found by
comparing backwards."""
OCCURRENCES = 24
"""So many earlier occurrences vote at most, those of the longest indexed n-grams first, of these
the newest."""
ODDS = (0.0, 0.14, 0.75, 0.75, 1.0, 2.0, 2.0, 2.0, 10.0)
"""Odds by the length of the match, the last for all longer ones. Fitted (greatest likelihood,
rounded) to 11,300 tokens of replies of the embedded target, to the shipped prompts and 72 of other
kinds, at temperature 0 and 1: where the last token had been said before, 5,200 times, it is 1.0 bit
a token."""
SHARPENING = 1.0
LEAST = 0.07
"""The least probability that is offered where no price is told: about the share of a pass over one
row that another row costs the target, where sixteen rows cost two."""
NEGLIGIBLE = 1e-4
"""The least probability that is ever offered."""


class Index:
    """An index of all n-grams of a log, the newest first: a chain through the positions for each
    length. Costs the same for every token of the log."""

    def __init__(self, log: Sequence[int]) -> None:
        """`log` may grow at its end; what has been added is indexed when it is asked for."""
        self._log = log
        self._newest: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in SIZES)
        self._older: tuple[list[int], ...] = tuple([] for _ in SIZES)

    def occurrences(self) -> Iterator[tuple[int, int]]:
        """(position, match): where the log's ending stood before the next token now, and how many
        tokens before it are the same."""
        self._catch_up()
        found: dict[int, None] = {}
        for size, newest, older in zip(SIZES, self._newest, self._older, strict=True):
            end = newest.get(tuple(self._log[-size:]), -1)
            while end >= 0 and len(found) < OCCURRENCES:
                found[end + 1] = None
                end = older[end]
        return ((position, self._match(position)) for position in found)

    def _catch_up(self) -> None:
        """Index the n-grams that end before the last token: the log's ending itself is no earlier
        occurrence."""
        for size, newest, older in zip(SIZES, self._newest, self._older, strict=True):
            for end in range(len(older), len(self._log) - 1):
                gram = tuple(self._log[max(0, end + 1 - size) : end + 1])
                older.append(newest.get(gram, -1))
                newest[gram] = end

    def _match(self, position: int) -> int:
        """Return how many tokens before `position` are the log's last ones, as far as it
        matters."""
        log, most = self._log, min(position, len(ODDS) - 1)
        return next(
            (n for n in range(most) if log[position - 1 - n] != log[len(log) - 1 - n]), most
        )


@dataclass(order=True, frozen=True)
class _Node:
    """A candidate in the order in which candidates are offered: best first, and of equals the one
    that was found first."""

    badness: float
    """Minus the score, the log-probability of the path."""
    number: int
    parent: int = field(compare=False)
    path: tuple[int, ...] = field(compare=False)
    occurrences: Sequence[tuple[int, int]] = field(compare=False)


@dataclass
class LookupSession:
    """One sequence, its index, and the last proposal."""

    log: list[int]
    index: Index
    history: History
    sharpening: float
    capacity: int
    offered: TokenTree = field(default_factory=TokenTree)
    readable: bool = True
    """There is no context that a log could exceed."""


class Lookup:
    """Opens sessions and proposes; an engine of the draft worker."""

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Passes whatever a session consists of: there is no vocabulary here."""

    def open(self, order: Open) -> LookupSession:
        """Return a session with the prompt indexed; there is no use for the key.

        `RequestError` if it has a token at or beyond `vocabulary_size`, which could be proposed.
        """
        if (text := misfit(order.sampling, order.tree, "ngram")) is not None:
            raise RequestError("settings", text)
        if (largest := max(order.prompt)) >= order.vocabulary_size:
            raise RequestError(
                "vocabulary",
                f"the prompt has token {largest}, beyond the target's vocabulary of "
                f"{order.vocabulary_size}",
            )
        log = list(order.prompt)
        sharpening = SHARPENING if order.tree.sharpening == "auto" else order.tree.sharpening
        history = History(order.sampling, log, order.end, order.replied)
        return LookupSession(log, Index(log), history, sharpening, order.capacity)

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
    ) -> Proposal:
        """Append the `accepted` nodes of the last proposal, `bonus` and `more` to the log, and
        propose; candidates found after `deadline_ns` are left out.

        There are no passes: of the `price` only the floor counts, which stands for LEAST where
        there is a rate, and nothing is left to do `ahead`.
        """
        committed = [*(session.offered.tokens[node] for node in accepted), bonus, *more]
        session.log += committed
        session.history.extend(committed)
        depth = min(shape.depth, session.capacity - len(session.log) - 1)
        worst = -math.log(max(price.floor, LEAST if price.rate is None else NEGLIGIBLE))
        waiting = [_Node(0.0, 0, ROOT, (), tuple(session.index.occurrences()))]
        taken: list[_Node] = []
        grown = 0
        while (
            waiting
            and len(taken) <= shape.nodes
            and (deadline_ns is None or self._clock() <= deadline_ns)
        ):
            node = heapq.heappop(waiting)
            taken.append(node)
            if len(node.path) < depth and len(taken) <= shape.nodes:
                for child in self._children(
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
        session.offered = TokenTree(
            tuple(node.path[-1] for node in nodes), tuple(node.parent - 1 for node in nodes)
        )
        return Proposal(session.offered, tuple(-node.badness for node in nodes), grown, hit=False)

    def prepare(self, session: LookupSession) -> bool:
        """There is nothing to do ahead."""
        return False

    def learn(self) -> bool:
        """Nor to learn."""
        return False

    def grow_all_ahead(self, sessions: Sequence[LookupSession]) -> Sequence[int]:
        """Return no places: there is nothing to grow ahead."""
        return ()

    def draft_all(
        self, orders: Sequence[Order[LookupSession]]
    ) -> Iterator[tuple[int, Proposal | Exception]]:
        """Propose for one session after the other, since there is no pass that they could share."""
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
                )
            except Exception as error:
                outcome = error
            yield place, outcome

    def _children(
        self,
        session: LookupSession,
        node: _Node,
        *,
        number: int,
        first: int,
        width: int,
        worst: float,
    ) -> Iterator[_Node]:
        """Yield what may follow `node`, the taken one of that number (0: the root), and is no
        worse than `worst`: best first, numbered from `first` on."""
        if node.path and node.path[-1] in session.history.end:
            return
        followers: dict[int, list[tuple[int, int]]] = {}
        votes: dict[int, float] = {}
        for position, match in node.occurrences:
            token = (
                session.log[position]
                if position < len(session.log)
                else node.path[position - len(session.log)]
            )
            followers.setdefault(token, []).append((position + 1, min(match + 1, len(ODDS) - 1)))
            votes[token] = votes.get(token, 0.0) + ODDS[match]
        logits = {
            token: session.history.process(token, math.log(weight), node.path) / session.sharpening
            for token, weight in votes.items()
        }
        largest = (
            max(0.0, *logits.values()) if logits else 0.0
        )  # what was never seen has the logit 0
        total = largest + math.log(
            math.fsum(math.exp(z - largest) for z in (0.0, *logits.values()))
        )
        for token in sorted(logits, key=logits.__getitem__, reverse=True)[:width]:
            badness = node.badness + max(0.0, total - logits[token])
            if not badness <= worst:
                return
            yield _Node(badness, first, number, (*node.path, token), followers[token])
            first += 1
