"""Predicts what would make a run faster, from its rounds and from this machine's costs elsewhere.
Gains are quotients of two predictions, so that common errors cancel."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from dovetail.launch.planning.candidates import Reader
from dovetail.launch.planning.planner import Option, Planner, Seconds, Tree
from dovetail.launch.planning.subject import Subject, folder_of, subject_here
from dovetail.launch.planning.words import placement, settings
from dovetail.launch.profiling.evidence import Evidence
from dovetail.launch.profiling.measured import Replayed, draft_of, planner_of
from dovetail.launch.settings.catalog import SETTINGS
from dovetail.launch.settings.embedded import with_draft, with_target
from dovetail.protocol.settings import DRAFT_KINDS
from dovetail.runtime.costs.rounds import PairCosts
from dovetail.workers.models.checkpoints.footprint import half_of, read_tensors

WORTH = 1.02  # a smaller gain is none: it is within what two runs differ by
REPLAYED = "replayed from the offered trees, with the measured passes"


@dataclass(frozen=True)
class Advice:
    """A change, and its expected gain."""

    name: str  # the kind of change, in a word: tree, policy, ahead, alone, weights, placement
    what: str
    flags: tuple[str, ...]  # the settings to change, as a command line has them
    gain: float  # tokens a second over those of the settings in force
    basis: str  # the way the gain was found
    same: bool = True  # true if the target stays the same function

    @property
    def worth(self) -> bool:
        return self.gain >= WORTH


class Rates:
    """Tokens a second of a run with other settings."""

    def __init__(self, evidence: Evidence, costs: PairCosts, found: Replayed) -> None:
        self.evidence, self.found, self.tree = evidence, found, evidence.tree
        if evidence.adapts and evidence.drafted:
            verified = fmean(record.verified for record in evidence.drafted)
            self.tree = replace(evidence.tree, gamma=round(verified))
        self.planner = planner_of(evidence, costs)
        self.draft = draft_of(evidence, costs, found) if found.offers else None
        self._factor = 1.0
        if self.draft is not None and (expected_s := self.option(self.tree).draft_s):
            self._factor = costs.exposed_s.value / expected_s
        self.now = self.rate(self.option(self.tree))

    def option(
        self, tree: Tree, *, ahead: bool | None = None, planner: Planner | None = None
    ) -> Option:
        """Return rounds with a tree; `ahead`: None is as in the run."""
        planner, ahead = planner or self.planner, self.evidence.ahead if ahead is None else ahead
        if self.draft is None:
            return planner.option(0, 0, None, None, 1.0)
        return planner.option(0, 0, self.draft, tree, self.found.tokens(tree), ahead=ahead)

    def rate(self, option: Option) -> float:
        """Return the tokens a second of an option, whose wait for the draft is taken in proportion
        to the one that was measured."""
        return option.tau / (self._factor * option.draft_s + option.verify_s + option.beside_s)

    @property
    def alone(self) -> float:
        return self.rate(self.planner.option(0, 0, None, None, 1.0))

    @property
    def in_turn_s(self) -> float:
        """Return the drafting of a round if none of it were done ahead."""
        return self._factor * self.option(self.tree, ahead=False).draft_s

    def best(self) -> Tree:
        trees = (replace(self.evidence.tree, gamma=g, depth=d) for g, d in self.found.trees)
        return max(trees, key=lambda tree: self.rate(self.option(tree)))


def advise(
    rates: Rates, measured: float | None, subject: Subject | None, say: Callable[[str], None]
) -> list[Advice]:
    """Return every change, those that keep the target first, then by gain. `measured`: tokens/s of
    the run, if known; `subject`: the target on this machine, None if unknown."""
    found = [*_drafting(rates, measured)] if rates.draft is not None else []
    if subject is not None and rates.evidence.on_cpu:
        found += [*_weights(rates, subject, say), *_placements(rates, subject)]
    return sorted(found, key=lambda one: (not one.worth, not one.same, -one.gain))


def _drafting(rates: Rates, measured: float | None) -> Iterator[Advice]:
    evidence, now = rates.evidence, rates.tree
    best = rates.best()
    gain = rates.rate(rates.option(best)) / rates.now
    if not evidence.adapts and (best.gamma, best.depth) != (now.gamma, now.depth):
        sizes = {"gamma": (now.gamma, best.gamma), "depth": (now.depth, best.depth)}
        changed = tuple(f"--tree.{name}={new}" for name, (old, new) in sizes.items() if old != new)
        old, new = (f"gamma {one.gamma} and depth {one.depth}" for one in (now, best))
        what = f"another tree: {new} instead of {old}"
        yield Advice("tree", what, changed, gain, REPLAYED)
    if not evidence.adapts and evidence.set_here:
        gammas, depths = zip(*rates.found.trees, (now.gamma, now.depth), strict=True)
        flags = (
            *("--tree.policy=goodput", "--tree.insist=false"),
            *(f"--tree.gamma={max(gammas)}", f"--tree.depth={max(depths)}"),
        )
        what = "let the tree's size follow what pays: policy goodput"
        yield Advice(
            "policy", what, flags, max(1.0, gain), f"at least the best tree of one size, {REPLAYED}"
        )
    if evidence.own_device:
        other = not evidence.ahead
        gain = rates.rate(rates.option(now, ahead=other)) / rates.now
        what = (
            "keep drafting while the target verifies"
            if other
            else "draft only once the verdict has come"
        )
        yield Advice("ahead", what, (f"--draft.ahead={str(other).lower()}",), gain, REPLAYED)
    gain = rates.alone / (measured or rates.now)
    yield Advice(
        "alone", "decode with the target alone", ("--draft=none",), gain, "measured passes"
    )


def _weights(rates: Rates, subject: Subject, say: Callable[[str], None]) -> Iterator[Advice]:
    base = subject.configuration
    tensors = read_tensors(folder_of(with_target(base.settings.target).model))
    halves = ["half"] if half_of(tensors) and subject.weights == "fp32" else []
    for weights in [*halves, "int8"] if subject.weights in ("fp32", "half") else []:
        other = subject_here(base.over("profile", {"target.weights": weights}), say, subject)
        share = _quotient(_whole(other), _whole(subject))
        machine = rates.planner.machine
        assert machine.host is not None
        host = replace(machine.host, layer_s=_product(machine.host.layer_s, share))
        planner = replace(rates.planner, machine=replace(machine, host=host))
        gain = rates.rate(rates.option(rates.tree, planner=planner)) / rates.now
        same = weights == "half"
        what = (
            "weights in the 16 bits of the checkpoint: the same function"
            if same
            else "weights in 8 bits: another function, with other tokens"
        )
        flags = (f"--target.weights={weights}", *(("--target.cache=fp32",) if same else ()))
        basis = "measured passes, in proportion to what the plan expects of both types"
        yield Advice("weights", what, flags, gain, basis, same=same)


def _whole(subject: Subject) -> Seconds:
    host = subject.machine.host
    assert host is not None
    return lambda rows: subject.target.layers * host.layer_s(rows) + host.head_s(rows)


def _quotient(one: Seconds, other: Seconds) -> Seconds:
    return lambda rows: one(rows) / other(rows)


def _product(one: Seconds, other: Seconds) -> Seconds:
    return lambda rows: one(rows) * other(rows)


def _placements(rates: Rates, subject: Subject) -> Iterator[Advice]:
    base, found = subject.configuration, rates.found
    draft, candidates = base.settings.draft, []
    if found.offers and DRAFT_KINDS[draft.kind].own_model:
        reader = Reader(
            base,
            subject.design,
            [],
            folder_of,
            embedded=subject.embedded,
            width=rates.evidence.tree.width,
        )
        trees = [replace(rates.evidence.tree, gamma=g, depth=d) for g, d in found.trees]
        (candidate,) = reader.read([with_draft(draft).model])
        candidates = [replace(candidate, acceptance=found, trees=trees)]
    every = subject.search(candidates, lambda _: None)
    stays = [one for one in every if not one.computed and one.nodes == 1]
    now = [one for one in stays if (one.draft is not None) is bool(candidates)]
    for one in every if now else ():
        if not one.computed and one.nodes == 1:
            continue
        device = subject.device or "cpu"
        flags = _flags(settings(one, device, device, base), base)
        gain = one.tokens_per_s / now[0].tokens_per_s
        basis = "the plan's estimates for both placements, each with its best tree"
        yield Advice("placement", placement(one, device), flags, gain, basis)


def _flags(changed: dict[str, Any], base: Any) -> tuple[str, ...]:
    return tuple(
        f"--{name}={SETTINGS[name].flag_text(value)}"
        for name, value in changed.items()
        if value != base.value(name)
    )
