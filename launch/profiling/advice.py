"""Advises what would make a run faster, and by how much: changes of its settings, each priced with
what its rounds cost and brought. Pure: records in, advice out.

A proposal is a list of nodes, best first, in which every beginning is a tree, and which nodes the
target chose is known. So what a smaller tree, or one of fewer levels, would have brought is read
off the rounds of a larger one, and what it would have cost off the passes: T_V over its rows, and
the draft's first levels. Predicted gains are quotients of two such predictions, of the changed
settings and of those in force, so that what the prediction leaves out is left out of both.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from dovetail.launch.profiling.forecast import GAMMAS, Forecast, Outcome, Tree
from dovetail.launch.profiling.situation import Situation

WORTH = 1.02
"""A smaller gain is none: it is within what two runs differ by."""
TABLE_7 = (4.99, 5.71, 5.96, 6.03, 6.25, 6.26)
"""tau of Dovetail's head with 1 to 6 blocks (Dovetail paper, Table 7: Vicuna 13B on HumanEval, T =
0)."""


@dataclass(frozen=True)
class Advice:
    """A change, and what it would bring."""

    name: str
    """The kind of change, in a word: tree, levels, policy, ahead, threads, weights, blocks,
    placement, alone."""
    what: str
    flags: tuple[str, ...]
    """The settings to change, as a command line has them; none: it is no matter of a setting."""
    gain: float
    """Tokens a second over those of the settings in force."""
    tau: float | None
    basis: str
    """The way the gain was found."""
    certain: bool = True
    """True if `gain` is what is expected; else the most that it can be, or what it would be under a
    condition that `basis` names."""
    same: bool = True
    """True if the target stays the same function."""

    @property
    def worth(self) -> bool:
        return self.gain >= WORTH

    @property
    def tells(self) -> bool:
        """Return whether the printed gain is above 1.00."""
        return round(self.gain, 2) > 1.0


UNKNOWN = ""


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
            f"verify {word} nodes: gamma {nodes.gamma} instead of {tree.gamma}",
            (f"--tree.gamma={nodes.gamma}",),
            brought,
            now,
        )
    levels, brought = best([Tree(tree.gamma, depth) for depth in depths])
    if levels.depth != tree.depth:
        word = "fewer" if levels.depth < tree.depth else "more"
        yield _advice(
            "levels",
            f"draft {word} levels: depth {levels.depth} instead of {tree.depth}",
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
        ("draft only once the verdict has come", "false")
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
        f"give the target {threads} threads instead of {situation.threads}",
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
        outcome = forecast.of(tree, prices=replace(forecast.prices, pass_s=verify_s))
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
        same = ("--target.cache=fp32",) if weights == "half" else ()
        what = (
            "weights in the 16 bits of the checkpoint: the same function"
            if weights == "half"
            else "weights in 8 bits: another function, with other tokens"
        )
        advice = _advice(
            "weights",
            what,
            (f"--target.weights={weights}", *same),
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
        f"a head of {best[0]} blocks instead of {situation.blocks} (it has to be trained: dovetail "
        "train dovetail)",
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
        f"draft on {situation.idle_gpu}, which is idle",
        (f"--draft.device={situation.idle_gpu.split()[0]}",),
        least,
        now,
    )
    yield replace(advice, basis="at most: if drafting cost nothing there", certain=False)


def _advice(name: str, what: str, flags: tuple[str, ...], outcome: Outcome, now: Outcome) -> Advice:
    return Advice(name, what, flags, outcome.rate / now.rate, outcome.tokens, REPLAYED)
