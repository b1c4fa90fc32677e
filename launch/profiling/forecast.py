"""Forecasts for other trees and settings: tokens and time of their rounds, from the run so far."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import fmean, median

from dovetail.launch.profiling.rounds import PARTS
from dovetail.launch.profiling.timeline import NS
from dovetail.protocol.messages import RoundRecord
from dovetail.protocol.tree import ROOT
from dovetail.runtime.control.pricing import cut
from dovetail.runtime.costs.passes import RowCosts
from dovetail.runtime.costs.rounds import DRAFTED_HOPS, UNDRAFTED_HOPS

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 19, 23, 27, 31, 39, 47, 55, 63)
SWITCHED = 8
"""Times that the rate which goodput goes by is taken from its own result; it moves no further
then."""
LEAST_PLAIN = 4
"""Rounds without a draft that tell what is beside one; the first of a session is often one, and
slow."""


@dataclass(frozen=True)
class Tree:
    """A size: nodes verified at most, and levels."""

    gamma: int
    depth: int


@dataclass(frozen=True)
class Outcome:
    """The average outcome of rounds with some settings."""

    tokens: float
    seconds: float
    rows: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Offer:
    """A round: the levels of its nodes, best first, their log-probabilities, and which the target
    chose."""

    levels: tuple[int, ...]
    scores: tuple[float, ...]
    accepted: tuple[int, ...]
    foreseen: bool
    """True if the next root was in the tree too."""
    passes_s: tuple[float, ...]
    """Seconds of the draft's passes that the proposal waited for."""
    beside_s: float
    """Drafting that was waited for in no pass."""
    begun: bool
    """True if some of its drafting was done ahead, and is not among the passes."""

    @classmethod
    def of(cls, record: RoundRecord, foreseen: bool) -> "Offer":
        """Return the offer of the nodes that were verified: of the others it is not known whether
        the target would have chosen them."""
        passes_ns, beside_ns = waited_for(record)
        levels, scores = (
            levels_of(record.parents[: record.verified]),
            record.scores[: record.verified],
        )
        return cls(
            levels,
            scores,
            record.accepted,
            foreseen,
            tuple(taken / NS for taken in passes_ns),
            beside_ns / NS,
            record.hit and record.ahead > 0,
        )

    def kept(self, tree: Tree) -> list[int]:
        """The nodes that such a tree would have had."""
        return [node for node, level in enumerate(self.levels) if level <= tree.depth][: tree.gamma]

    def brings(self, kept: Sequence[int]) -> int:
        """Return how many of the chosen nodes are among those that are kept: the beginning of the
        path."""
        there = set(kept)
        return next(
            (place for place, node in enumerate(self.accepted) if node not in there),
            len(self.accepted),
        )


def levels_of(parents: Sequence[int]) -> tuple[int, ...]:
    """The level of every node of a tree; children of the root are at level 1."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 if parent == ROOT else levels[parent] + 1)
    return tuple(levels)


def offers_of(records: Sequence[Sequence[RoundRecord]]) -> list[Offer]:
    """The drafted rounds of replies, each with whether the next one found its root in the tree."""
    found = []
    for reply in records:
        found += [
            Offer.of(record, after.hit)
            for record, after in pairwise(reply)
            if record.verified and record.draft_ns
        ]
    return found


@dataclass(frozen=True)
class Prices:
    """The costs of a run's rounds at its mean context; drafting stands with each offer."""

    pass_s: Callable[[int], float]
    """T_V over the rows that a session has in a pass."""
    drafted_s: float
    """Messages and the coordinator, a drafted round; `undrafted_s`: without a draft."""
    undrafted_s: float
    waiting: float = 0.0

    def verify_s(self, rows: int) -> float:
        return self.pass_s(rows)

    def alone_s(self) -> float:
        return self.sum_s(self.pass_s(1), drafted=False)

    def sum_s(self, verify_s: float, exposed_s: float = 0.0, *, drafted: bool) -> float:
        beside_s = self.drafted_s if drafted else self.undrafted_s
        return (exposed_s + verify_s + beside_s) * (1.0 + self.waiting)

    def scaled(self, factor: Callable[[int], float]) -> "Prices":
        """Return these prices with passes that take `factor(rows)` times as long."""
        return replace(self, pass_s=lambda rows: self.pass_s(rows) * factor(rows))


def prices_of(
    records: Sequence[RoundRecord],
    plain: Sequence[RoundRecord],
    costs: RowCosts,
    sessions: float = 1.0,
) -> Prices:
    """Compute prices from rounds with a draft and some without; `costs` has seen the passes of
    both, which serve so many `sessions` with as many rows each."""
    every = [*records, *plain]
    context = fmean(record.prefix for record in every)
    drafted = fmean(_beside(records or every))
    alone = (
        median(_beside(plain))
        if len(plain) >= LEAST_PLAIN or not records
        else drafted * UNDRAFTED_HOPS / DRAFTED_HOPS
    )
    queue_ns = sum(record.queue_ns for record in every)
    rest_ns = sum(
        getattr(record, f"{part}_ns") for record in every for part in PARTS if part != "queue"
    )
    table = costs.table(1 + max(*GAMMAS, *(record.verified for record in every)), context)

    def verify_s(rows: int) -> float:
        every_row = round(rows * sessions)
        return table[every_row] if every_row < len(table) else costs.at(every_row, context)

    return Prices(verify_s, drafted, alone, queue_ns / rest_ns if rest_ns else 0.0)


def _beside(records: Sequence[RoundRecord]) -> list[float]:
    return [(record.transport_ns + record.coordinator_ns) / NS for record in records]


class Forecast:
    """Forecasts what rounds with other settings would cost and bring."""

    def __init__(
        self,
        offers: Sequence[Offer],
        prices: Prices,
        *,
        exposed_s: float | None = None,
        rate: float | None = None,
        tree: Tree,
        width: int | None = None,
        ahead: bool,
        hit_rate: float | None = None,
        alone_from: str = "",
        reads: bool = False,
        cuts: bool = False,
    ) -> None:
        """`offers`: none where nothing is drafted; `exposed_s`: drafting that a round of the
        settings in force waits for, and `rate`: its tokens a second, where they were measured;
        `tree`, `width` and `ahead` are these settings; `hit_rate`: of rounds that were drafted
        ahead, where there were any; `alone_from`: how the rate of the target alone is known;
        `reads`: whether the draft is a head, which makes a pass in any case; `cuts`: whether the
        tree's size follows what pays."""
        (
            self.offers,
            self.prices,
            self.rate,
            self.tree,
            self.width,
            self.ahead,
            self.reads,
            self.cuts,
        ) = offers, prices, rate, tree, width, ahead, reads, cuts
        self.hit_rate, self.alone_from = hit_rate, alone_from
        self._factor = 1.0
        if offers and exposed_s is not None and (guessed := self._exposed_s(tree, ahead)) > 0.0:
            self._factor = exposed_s / guessed

    @property
    def most(self) -> Tree:
        """The largest tree that the offers tell anything of."""
        return Tree(
            max(len(offer.levels) for offer in self.offers),
            max(max(offer.levels) for offer in self.offers),
        )

    @cached_property
    def now(self) -> Outcome:
        """The settings in force."""
        return self.goodput(self.tree.depth) if self.cuts and self.offers else self.of(self.tree)

    @property
    def alone(self) -> Outcome:
        """The target without a draft."""
        return Outcome(1.0, self.prices.alone_s(), 1.0)

    @property
    def off(self) -> float | None:
        """Relative error of the forecast of the settings in force against the measured rate."""
        return self.now.rate / self.rate - 1.0 if self.rate else None

    def of(self, tree: Tree, *, ahead: bool | None = None, prices: Prices | None = None) -> Outcome:
        """Rounds with a tree of that size."""
        prices = prices or self.prices
        if not self.offers:
            return Outcome(1.0, prices.alone_s(), 1.0)
        kept = [offer.kept(tree) for offer in self.offers]
        tokens = fmean(
            1 + offer.brings(nodes) for offer, nodes in zip(self.offers, kept, strict=True)
        )
        rows = [
            self._rows(offer, nodes, tree) for offer, nodes in zip(self.offers, kept, strict=True)
        ]
        verify_s = fmean(prices.verify_s(count) for count in rows)
        exposed_s = self._waited_s(tree, self.ahead if ahead is None else ahead)
        return Outcome(tokens, prices.sum_s(verify_s, exposed_s, drafted=True), fmean(rows))

    def _rows(self, offer: Offer, kept: Sequence[int], tree: Tree) -> int:
        """Return the rows of the pass: where levels are left out, other nodes take their place, as
        many as `width` allows; what those bring is not known, and left out."""
        if tree.depth >= max(offer.levels):
            return 1 + len(kept)
        room = (
            len(offer.levels)
            if self.width is None
            else self.width + (tree.depth - 1) * self.width**2
        )
        return 1 + max(len(kept), min(tree.gamma, len(offer.levels), room))

    def goodput(self, depth: int) -> Outcome:
        """Rounds of so many levels, of which as many nodes are verified as pay."""
        outcome = self.of(Tree(self.tree.gamma, depth))
        most = len(self.offers[0].levels)
        for _ in range(SWITCHED):
            outcome = self._cut(outcome.rate, Tree(most, depth))
        return outcome

    def _cut(self, rate: float, tree: Tree) -> Outcome:
        tokens, verify_s, rows = [], [], []
        for offer in self.offers:
            kept = offer.kept(tree)
            (count,) = cut(
                [[offer.scores[node] for node in kept]], rate=rate, seconds=self.prices.verify_s
            )
            tokens.append(1 + offer.brings(kept[:count]))
            verify_s.append(self.prices.verify_s(1 + count))
            rows.append(1 + count)
        exposed_s = self._waited_s(tree, self.ahead)
        seconds = self.prices.sum_s(fmean(verify_s), exposed_s, drafted=True)
        return Outcome(fmean(tokens), seconds, fmean(rows))

    def _exposed_s(self, tree: Tree, ahead: bool) -> float:
        """Drafting that a round waits for: as many passes as there are levels; ahead, on a hit,
        only what the target's pass leaves of them."""
        whole, total = [offer for offer in self.offers if not offer.begun] or self.offers, 0.0
        for offer in whole:
            drafting_s = sum(offer.passes_s[: tree.depth]) + offer.beside_s
            if ahead:
                kept = offer.kept(tree)
                left_s = max(0.0, drafting_s - self.prices.verify_s(self._rows(offer, kept, tree)))
                least_s = (
                    offer.passes_s[0] + offer.beside_s if self.reads and offer.passes_s else 0.0
                )
                hit = float(offer.foreseen) if self.hit_rate is None else self.hit_rate
                hit = 1.0 if offer.brings(kept) < len(offer.accepted) else hit
                drafting_s += hit * (max(left_s, least_s) - drafting_s)
            total += drafting_s
        return total / len(whole)

    def _waited_s(self, tree: Tree, ahead: bool) -> float:
        """Return the seconds waited for drafting, as measured where the settings are those of the
        run."""
        return self._exposed_s(tree, ahead) * (self._factor if ahead is self.ahead else 1.0)

    @property
    def in_turn_s(self) -> float:
        """Drafting of a round of the settings in force if none of it were done ahead."""
        return self._waited_s(self.tree, False) if self.offers else 0.0

    @property
    def exposed_s(self) -> float:
        """Drafting that a round of the settings in force waits for, with the waiting that comes of
        it."""
        return self._waited_s(self.tree, self.ahead) * (1.0 + self.prices.waiting)


def curve_of(forecast: Forecast) -> Mapping[int, Outcome]:
    """Return what trees of the same levels would bring, by gamma; 0 is the target alone."""
    if not forecast.offers:
        return {0: forecast.alone}
    gammas = sorted(
        {gamma for gamma in GAMMAS if gamma <= forecast.most.gamma}
        | {min(forecast.tree.gamma, forecast.most.gamma)}
    )
    return {
        0: forecast.alone,
        **{gamma: forecast.of(Tree(gamma, forecast.tree.depth)) for gamma in gammas},
    }


def at_positions(records: Sequence[RoundRecord]) -> list[float]:
    """Share of the drafted rounds that accepted a node at depth 1, 2, ..."""
    drafted = [record for record in records if record.verified]
    counts: dict[int, int] = defaultdict(int)
    for record in drafted:
        for depth in range(len(record.accepted)):
            counts[depth] += 1
    return [counts[depth] / len(drafted) for depth in range(len(counts))]


def waited_for(record: RoundRecord) -> tuple[list[int], int]:
    """Return the nanoseconds of each pass of the draft that the proposal waited for, which come
    before those ahead of it, and of the drafting that was waited for in no pass."""
    sums = [0, *accumulate(taken for _, taken in record.passes)]
    waited = max(place for place, total in enumerate(sums) if total <= max(record.draft_ns, 0))
    return [taken for _, taken in record.passes[:waited]], record.draft_ns - sums[waited]
