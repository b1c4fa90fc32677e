"""What would make a run faster, and by how much: changes of its settings, each priced with what its
rounds cost and brought. Pure: records in, advice out.

A proposal is a list of nodes, best first, in which every beginning is a tree, and which nodes the
target chose is known. So what a smaller tree, or one of fewer levels, would have brought is read
off the rounds of a larger one, and what it would have cost off the passes: T_V over its rows, and
the draft's first levels. Predicted gains are quotients of two such predictions, of the changed
settings and of those in force, so that what the prediction leaves out is left out of both.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

from dovetail.launch.profiling.bounds import Roofline
from dovetail.launch.profiling.timeline import NS, PARTS
from dovetail.protocol.messages import RoundRecord
from dovetail.protocol.tree import ROOT
from dovetail.runtime.costs import RowCosts
from dovetail.runtime.planner import DRAFTED_HOPS, PLAIN_HOPS
from dovetail.runtime.policies import cut

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 19, 23, 27, 31, 39, 47, 55, 63)
WORTH = 1.02
"""A smaller gain is none: it is within what two runs differ by."""
SWITCHED = 8
"""Times that the rate which goodput goes by is taken from its own result; it moves no further
then."""
LEAST_PLAIN = 4
"""Rounds without a draft that tell what is beside one; the first of a session is often one, and
slow."""
USABLE = 0.9
"""Of a card's free memory, what layers may take."""
TABLE_7 = (4.99, 5.71, 5.96, 6.03, 6.25, 6.26)
"""tau of Dovetail's head with 1 to 6 blocks (Dovetail paper, Table 7: Vicuna 13B on HumanEval, T =
0)."""


@dataclass(frozen=True)
class Tree:
    """A size: nodes verified at most, and levels."""

    gamma: int
    depth: int


@dataclass(frozen=True)
class Outcome:
    """What rounds of some settings bring, on average."""

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
    """Whether the next root was in the tree too."""
    passes_s: tuple[float, ...]
    """Of the draft, those that the proposal waited for."""
    beside_s: float
    """Drafting that was waited for in no pass."""
    begun: bool
    """Whether some of its drafting was done ahead, and is not among the passes."""

    @classmethod
    def of(cls, record: RoundRecord, foreseen: bool) -> "Offer":
        """Of the nodes that were verified: of the others it is not known whether the target would
        have chosen them."""
        sums = [0, *accumulate(taken for _, taken in record.passes)]
        own = max(place for place, total in enumerate(sums) if total <= max(record.draft_ns, 0))
        passes = tuple(taken / NS for _, taken in record.passes[:own])
        levels, scores = (
            levels_of(record.parents[: record.verified]),
            record.scores[: record.verified],
        )
        return cls(
            levels,
            scores,
            record.accepted,
            foreseen,
            passes,
            record.draft_ns / NS - sum(passes),
            record.hit and record.ahead > 0,
        )

    def kept(self, tree: Tree) -> list[int]:
        """The nodes that such a tree would have had."""
        return [node for node, level in enumerate(self.levels) if level <= tree.depth][: tree.gamma]

    def brings(self, kept: Sequence[int]) -> int:
        """How many of the chosen nodes are among those that are kept: the beginning of the path."""
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
    """What everything in a round costs, but for drafting, which stands with each offer."""

    verify_s: Callable[[int], float]
    """T_V over the rows that a session has in a pass."""
    beside_s: float
    """Messages and the coordinator, a drafted round; `plain_beside_s`: without a draft."""
    plain_beside_s: float
    waiting: float = 0.0
    """For workers that serve other sessions, over the rest of a round: the longer that is, the
    longer are those of others."""

    @property
    def alone_s(self) -> float:
        """A round of the target alone."""
        return (self.verify_s(1) + self.plain_beside_s) * (1.0 + self.waiting)

    def scaled(self, factor: Callable[[int], float]) -> "Prices":
        """With passes that take `factor(rows)` times as long."""
        return replace(self, verify_s=lambda rows: self.verify_s(rows) * factor(rows))


def prices_of(
    records: Sequence[RoundRecord],
    plain: Sequence[RoundRecord],
    costs: RowCosts,
    sessions: float = 1.0,
) -> Prices:
    """From rounds with a draft and some without; `costs` has seen the passes of both, which serve
    so many `sessions` with as many rows each."""
    every = [*records, *plain]
    context = fmean(record.prefix for record in every)
    drafted = fmean(_beside(records or every))
    alone = (
        median(_beside(plain))
        if len(plain) >= LEAST_PLAIN or not records
        else drafted * PLAIN_HOPS / DRAFTED_HOPS
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
    """What rounds of other settings would cost and bring."""

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
        return Outcome(1.0, self.prices.alone_s, 1.0)

    @property
    def off(self) -> float | None:
        """By how much the forecast of the settings in force misses what was measured."""
        return self.now.rate / self.rate - 1.0 if self.rate else None

    def of(self, tree: Tree, *, ahead: bool | None = None, prices: Prices | None = None) -> Outcome:
        """Rounds with a tree of that size."""
        prices = prices or self.prices
        if not self.offers:
            return Outcome(1.0, prices.alone_s, 1.0)
        kept = [offer.kept(tree) for offer in self.offers]
        tokens = fmean(
            1 + offer.brings(nodes) for offer, nodes in zip(self.offers, kept, strict=True)
        )
        rows = [
            self._rows(offer, nodes, tree) for offer, nodes in zip(self.offers, kept, strict=True)
        ]
        verify_s = fmean(prices.verify_s(count) for count in rows)
        exposed_s = self._waited_s(tree, self.ahead if ahead is None else ahead)
        return Outcome(
            tokens, (exposed_s + verify_s + prices.beside_s) * (1.0 + prices.waiting), fmean(rows)
        )

    def _rows(self, offer: Offer, kept: Sequence[int], tree: Tree) -> int:
        """Of the pass: where levels are left out, other nodes take their place, as many as `width`
        allows; what those bring is not known, and left out."""
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
        seconds = exposed_s + fmean(verify_s) + self.prices.beside_s
        return Outcome(fmean(tokens), seconds * (1.0 + self.prices.waiting), fmean(rows))

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
        """The same, as much as was measured where that was so."""
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


@dataclass(frozen=True)
class Advice:
    """A change, and what it would bring."""

    name: str
    """What kind of change, in a word: tree, levels, policy, ahead, threads, weights, blocks,
    placement, alone."""
    what: str
    flags: tuple[str, ...]
    """The settings to change, as a command line has them; none: it is no matter of a setting."""
    gain: float
    """Tokens a second over those of the settings in force."""
    tau: float | None
    basis: str
    """How the gain was found."""
    certain: bool = True
    """Whether `gain` is what is expected; else the most that it can be, or what it would be under a
    condition that `basis` names."""
    same: bool = True
    """Whether the target stays the same function."""

    @property
    def worth(self) -> bool:
        return self.gain >= WORTH

    @property
    def tells(self) -> bool:
        """Whether it says anything: what changes nothing is of no use to anybody."""
        return f"{self.gain:.2f}" != "1.00"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tells": self.tells}


UNKNOWN = ""


@dataclass(frozen=True)
class Elsewhere:
    """Cores and memory nodes that the target could have in place of its own."""

    what: str
    flags: tuple[str, ...]
    roofline: Roofline


@dataclass(frozen=True)
class Card:
    """A GPU beside a target that is on the CPU."""

    device: str
    name: str
    free_bytes: int
    link_gb_s: float | None
    """What its slot carries one way at best; None: not known."""

    def holds(self, layer_bytes: float) -> int:
        """Layers that stay on it, with some room for keys, values and what a pass needs."""
        return int(self.free_bytes * USABLE // layer_bytes)


@dataclass(frozen=True)
class Situation:
    """What else is known of a run."""

    policy: str
    """UNKNOWN where others' requests were watched."""
    cuts: bool
    """Return True if the size of a tree follows what pays."""
    draft_kind: str
    reads: bool
    """Whether the draft is a head, which reads its target's states."""
    ahead_possible: bool
    """Whether the draft could go on while the target verifies: it has a device, or cores, of its
    own."""
    weights: str
    stored_16_bits: bool
    threads: int
    spare_threads: int
    """Cores that neither target nor draft has."""
    roofline: Roofline | None = None
    wider: Roofline | None = None
    """The same on the target's cores and the spare ones together."""
    blocks: int | None = None
    """Of a Dovetail head."""
    idle_gpu: str = ""
    """A GPU that nobody uses."""
    elsewhere: tuple[Elsewhere, ...] = ()
    card: Card | None = None
    layers: int = 0
    """Of the target; 0: not known."""
    weight_bytes: int = 0
    """The same of the bytes that a pass reads."""


REPLAYED = "replayed from the offered trees, with the measured passes"


def advise(forecast: Forecast, situation: Situation) -> list[Advice]:
    """Every change that was looked at, the largest gain first; those that are certain before those
    that are not, and what keeps the target as it is first."""
    found = [
        *_threads(forecast, situation),
        *_nodes(forecast, situation),
        *_weights(forecast, situation),
        *_layers(forecast, situation),
    ]
    if forecast.offers:
        found += [
            *_sizes(forecast),
            *_policy(forecast, situation),
            *_ahead(forecast, situation),
            *_alone(forecast),
        ]
        found += [*_blocks(forecast, situation), *_placement(forecast, situation)]
    return sorted(
        found,
        key=lambda advice: (not advice.worth, not advice.certain, not advice.same, -advice.gain),
    )


def _sizes(forecast: Forecast) -> Iterator[Advice]:
    """The best tree of the same levels, of the same number of nodes, and of all; goodput finds it
    by itself."""
    if forecast.cuts:
        return
    now, tree, most = forecast.now, forecast.tree, forecast.most
    gammas = sorted(
        {gamma for gamma in GAMMAS if gamma <= most.gamma} | {min(tree.gamma, most.gamma)}
    )
    depths = range(1, most.depth + 1)

    def best(trees: Sequence[Tree]) -> tuple[Tree, Outcome]:
        return max(((one, forecast.of(one)) for one in trees), key=lambda pair: pair[1].rate)

    nodes, brought = best([Tree(gamma, tree.depth) for gamma in gammas])
    if nodes.gamma != tree.gamma:
        word = "fewer" if nodes.gamma < tree.gamma else "more"
        yield _advice(
            "tree",
            f"verify {word} nodes: gamma {nodes.gamma} in place of {tree.gamma}",
            (f"--tree.gamma={nodes.gamma}",),
            brought,
            now,
        )
    levels, brought = best([Tree(tree.gamma, depth) for depth in depths])
    if levels.depth != tree.depth:
        word = "fewer" if levels.depth < tree.depth else "more"
        yield _advice(
            "levels",
            f"draft {word} levels: depth {levels.depth} in place of {tree.depth}",
            (f"--tree.depth={levels.depth}",),
            brought,
            now,
        )
    both, brought = best([Tree(gamma, depth) for gamma in gammas for depth in depths])
    if both.gamma != tree.gamma and both.depth != tree.depth:
        flags = (f"--tree.gamma={both.gamma}", f"--tree.depth={both.depth}")
        yield _advice(
            "tree", f"another tree: gamma {both.gamma} and depth {both.depth}", flags, brought, now
        )


def _policy(forecast: Forecast, situation: Situation) -> Iterator[Advice]:
    if forecast.cuts or situation.policy == UNKNOWN:
        return
    depth, outcome = max(
        ((depth, forecast.goodput(depth)) for depth in range(1, forecast.most.depth + 1)),
        key=lambda pair: pair[1].rate,
    )
    flags = (
        "--tree.policy=goodput",
        "--tree.insist=false",
        f"--tree.gamma={max(forecast.tree.gamma, forecast.most.gamma)}",
        f"--tree.depth={max(forecast.tree.depth, depth)}",
    )
    basis = (
        "replayed: its cut over the offered trees, at the prices measured; it also drafts "
        "no more levels than pay"
    )
    yield replace(
        _advice(
            "policy",
            "let the tree's size follow what pays: policy goodput",
            flags,
            outcome,
            forecast.now,
        ),
        basis=basis,
    )


def _ahead(forecast: Forecast, situation: Situation) -> Iterator[Advice]:
    if not situation.ahead_possible or situation.draft_kind == "ngram":
        return
    outcome = forecast.of(forecast.tree, ahead=not forecast.ahead)
    hits, of = (
        fmean(offer.foreseen for offer in forecast.offers),
        "those in offered trees alone; what is grown ahead adds to it",
    )
    if forecast.hit_rate is not None:
        hits, of = forecast.hit_rate, "as in this run"
    basis = f"E[round] = T_V + hops + (1 - hit) T_D, with hits in {hits:.0%} of the rounds ({of})"
    what, value = (
        ("wait with drafting until the verdict is there", "false")
        if forecast.ahead
        else ("keep drafting while the target verifies", "true")
    )
    yield replace(
        _advice("ahead", what, (f"--draft.ahead={value}",), outcome, forecast.now), basis=basis
    )


def _alone(forecast: Forecast) -> Iterator[Advice]:
    advice = _advice(
        "alone", "decode with the target alone", ("--draft=none",), forecast.alone, forecast.now
    )
    if forecast.rate:
        advice = replace(advice, gain=forecast.alone.rate / forecast.rate)
    yield replace(advice, basis=f"the target alone: {forecast.alone_from}", tau=None)


def _threads(forecast: Forecast, situation: Situation) -> Iterator[Advice]:
    if situation.roofline is None or situation.wider is None or situation.spare_threads < 1:
        return
    here, there = situation.roofline, situation.wider
    threads = situation.threads + situation.spare_threads
    outcome = forecast.of(
        forecast.tree,
        prices=forecast.prices.scaled(lambda rows: there.least_s(rows) / here.least_s(rows)),
    )
    basis = "T_V in proportion to what bandwidth and arithmetic of these cores allow"
    advice = _advice(
        "threads",
        f"give the target {threads} threads in place of {situation.threads}",
        (f"--target.threads={threads}",),
        outcome,
        forecast.now,
    )
    yield replace(advice, basis=basis)


def _nodes(forecast: Forecast, situation: Situation) -> Iterator[Advice]:
    """Other memory nodes for the target, whose cores and memory were probed as its own were."""
    here = situation.roofline
    for one in situation.elsewhere if here is not None else ():
        prices = forecast.prices.scaled(
            lambda rows, there=one.roofline, here=here: there.least_s(rows) / here.least_s(rows)  # type: ignore[misc]
        )
        advice = _advice(
            "placement",
            one.what,
            one.flags,
            forecast.of(forecast.tree, prices=prices),
            forecast.now,
        )
        yield replace(
            advice,
            basis="T_V in proportion to what bandwidth and arithmetic of these cores and this "
            "memory allow",
        )


def _layers(forecast: Forecast, situation: Situation) -> Iterator[Advice]:
    """Layers of the target on a card: as many as fit, and the others on the CPU, or streaming
    through the card where its slot carries them faster than the CPU computes them. What the card
    itself takes is not known, and left out."""
    card, layers, tree = situation.card, situation.layers, forecast.tree
    if card is None or not layers or not situation.weight_bytes:
        return
    layer_bytes = situation.weight_bytes / layers
    held = min(layers, card.holds(layer_bytes))
    basis = "at most: if the card's own arithmetic cost nothing; dovetail plan measures it"

    def placed(what: str, flags: tuple[str, ...], verify_s: Callable[[int], float]) -> Advice:
        outcome = forecast.of(tree, prices=replace(forecast.prices, verify_s=verify_s))
        return replace(
            _advice("placement", what, flags, outcome, forecast.now), basis=basis, certain=False
        )

    if held == layers:
        yield placed(
            f"the whole target on {card.device} {card.name}, which has room for it",
            (f"--target.device={card.device}",),
            lambda _: 0.0,
        )
        return
    split = f"--target.split.device={card.device}"
    if held:
        flags = (split, f"--target.split.layers={held}")
        left = (layers - held) / layers
        yield placed(
            f"the last {held} of {layers} layers on {card.device} {card.name}",
            flags,
            lambda rows: left * forecast.prices.verify_s(rows),
        )
    if card.link_gb_s is not None:
        through = (split, f"--target.split.layers={layers}", f"--target.resident={held}")
        streaming_s = (layers - held) * layer_bytes / (card.link_gb_s * 1e9)
        stay = f" and {held} that stay there" if held else ""
        yield placed(
            f"{layers - held} of {layers} layers streaming through {card.device} {card.name}{stay}",
            through,
            lambda _: streaming_s,
        )


def _weights(forecast: Forecast, situation: Situation) -> Iterator[Advice]:
    here = situation.roofline
    if here is None or situation.weights not in ("fp32", "half"):
        return
    for weights in ("half", "int8"):
        if weights == situation.weights or (weights == "half" and not situation.stored_16_bits):
            continue
        there = replace(here, model=here.model.with_weights(weights))
        factor = forecast.prices.scaled(
            lambda rows, there=there: there.least_s(rows) / here.least_s(rows)  # type: ignore[misc]
        )
        what = (
            "weights in the 16 bits of the checkpoint: the same function"
            if weights == "half"
            else "weights in 8 bits: another function, with other tokens"
        )
        advice = _advice(
            "weights",
            what,
            (f"--target.weights={weights}",),
            forecast.of(forecast.tree, prices=factor),
            forecast.now,
        )
        yield replace(
            advice,
            basis="T_V in proportion to what bandwidth and arithmetic allow for these weights",
            same=weights == "half",
        )


def _blocks(forecast: Forecast, situation: Situation) -> Iterator[Advice]:
    """A Dovetail head with more blocks: each costs as much as the first, and tau grows as in the
    paper's Table 7."""
    if situation.blocks is None or not 1 <= situation.blocks < len(TABLE_7):
        return
    now, best = forecast.now, None
    for blocks in range(situation.blocks + 1, len(TABLE_7) + 1):
        slower_s = forecast.exposed_s * (blocks / situation.blocks - 1)
        outcome = Outcome(
            now.tokens * TABLE_7[blocks - 1] / TABLE_7[situation.blocks - 1],
            now.seconds + slower_s,
            now.rows,
        )
        best = max(best or (blocks, outcome), (blocks, outcome), key=lambda pair: pair[1].rate)
    assert best is not None
    advice = _advice(
        "blocks",
        f"a head of {best[0]} blocks in place of {situation.blocks} (it has to be trained: "
        "dovetail train dovetail)",
        (),
        best[1],
        now,
    )
    yield replace(
        advice,
        basis="if tau grows with blocks as in Table 7 of the Dovetail paper, and a block costs "
        "what the head costs now",
        certain=False,
    )


def _placement(forecast: Forecast, situation: Situation) -> Iterator[Advice]:
    if not situation.idle_gpu:
        return
    now = forecast.now
    least = Outcome(now.tokens, now.seconds - forecast.exposed_s, now.rows)
    advice = _advice(
        "placement",
        f"draft on {situation.idle_gpu}, which nobody uses",
        (f"--draft.device={situation.idle_gpu.split()[0]}",),
        least,
        now,
    )
    yield replace(advice, basis="at most: if drafting cost nothing there", certain=False)


def _advice(name: str, what: str, flags: tuple[str, ...], outcome: Outcome, now: Outcome) -> Advice:
    return Advice(name, what, flags, outcome.rate / now.rate, outcome.tokens, REPLAYED)


def curve_of(forecast: Forecast) -> Mapping[int, Outcome]:
    """What trees of the same levels would bring, by gamma; 0 is the target alone."""
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
