"""The kinds of placements that a plan compares, each at its best: layers, tree and draft decided
together by the planner, then drafting ahead.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dovetail.launch.planning.candidates import Candidate
from dovetail.launch.planning.designs import LOOKUP
from dovetail.runtime.planner import Draft, Option, Places, Planner, by_budget

Step = Callable[[str], None]
KINDS = 15  # the largest number of kinds of placements, for the bar


@dataclass(frozen=True)
class Offered:
    """A draft as the planner takes it, and whose it is."""

    candidate: Candidate
    draft: Draft
    spread: bool = False
    """True with a target that is spread over memory nodes: it has the cores that this leaves."""

    @property
    def shared(self) -> bool:
        return self.draft.shares


@dataclass(frozen=True)
class Alternative:
    """A kind of placement, and the expected performance of the best one."""

    name: str
    option: Option
    offered: Offered | None
    tokens_per_s: float

    @property
    def candidate(self) -> Candidate | None:
        return self.offered.candidate if self.offered is not None else None


def alternatives(
    planner: Planner, offered: Sequence[Offered], *, ahead: Callable[[Option], bool], step: Step
) -> list[Alternative]:
    """Return all possible alternatives, the fastest first. `ahead`: whether target and draft of an
    option compute at the same time."""
    found = [_alone(own, name, places) for own, name, places in _without_draft(planner)]
    for kind in dict.fromkeys(one.candidate.kind for one in offered):
        own = [one for one in offered if one.candidate.kind == kind]
        for of, name, places, drafts in _with_draft(planner, own):
            step(f"{name}, {kind}")
            one = _best(of, name, places, drafts, ahead)
            if one is not None and kind == LOOKUP:  # it costs nothing where it finds nothing
                alone = of.option(one.option.computed, one.option.resident, None, None, 1.0)
                one = replace(one, tokens_per_s=max(alone.tokens_per_s, one.tokens_per_s))
            found.append(one)
    return sorted(
        (one for one in found if one is not None),
        key=lambda one: (-one.tokens_per_s, one.candidate is None),
    )


def ready_of(every: Sequence[Alternative]) -> Alternative | None:
    """Return the first of these alternatives, fastest first, that needs nothing else first. `plan`
    proposes it, and `serve` uses its draft."""
    return next((one for one in every if one.candidate is None or not one.candidate.lacks), None)


def names_of(planner: Planner, offered: Sequence[Offered]) -> list[str]:
    """Return the names of all kinds of placements that this machine could have, if it had the
    memory."""
    plain = [name for _, name, places in _without_draft(planner) if places]
    return [
        *plain,
        *dict.fromkeys(
            name for _, name, places, drafts in _with_draft(planner, offered) if places and drafts
        ),
    ]


def _without_draft(planner: Planner) -> Iterator[tuple[Planner, str, Places]]:
    yield planner, "target alone", planner.on_cpu()
    yield planner, "split target alone", planner.split()
    yield planner, "plain offloading", planner.streamed()
    yield planner, "all on the device", planner.whole()
    if (apart := planner.apart) is not None:
        yield apart, "experts on the CPU", [*apart.split(), *apart.whole()]
    if (spread := planner.spread) is not None:
        yield spread, "target alone, over memory nodes", spread.on_cpu()


def _with_draft(
    planner: Planner, offered: Sequence[Offered]
) -> Iterator[tuple[Planner, str, Places, Sequence[Offered]]]:
    shared = [one for one in offered if one.shared]
    apart, spread = (
        [one for one in offered if not one.shared and one.spread is over] for over in (False, True)
    )
    yield planner, "Dovetail", planner.on_cpu(), apart
    yield planner, "Dovetail, split target", planner.split(), apart
    yield planner, "Dovetail, some layers streamed", planner.mixed(), apart
    yield planner, "offloading with a draft", planner.streamed(), apart
    yield (
        planner,
        "offloading with a large tree (SpecExec)",
        planner.streamed(),
        [replace(one, draft=by_budget(one.draft)) for one in apart],
    )
    yield planner, "all on the device, with a draft", planner.whole(), apart
    yield planner, "SubSpec", [*planner.streamed(), *planner.whole()], shared
    if (own := planner.apart) is not None:
        yield own, "Dovetail, experts on the CPU", [*own.split(), *own.whole()], apart
    if (own := planner.spread) is not None:
        yield own, "Dovetail, over memory nodes", own.on_cpu(), spread


def _alone(planner: Planner, name: str, places: Places) -> Alternative | None:
    option = planner.best(places, [None])
    return None if option is None else expected(planner, name, option, None, ahead=False)


def _best(
    planner: Planner,
    name: str,
    places: Places,
    offered: Sequence[Offered],
    ahead: Callable[[Option], bool],
) -> Alternative | None:
    option = planner.best(places, [one.draft for one in offered])
    if option is None:
        return None
    own = next(one for one in offered if one.draft is option.draft)
    return expected(planner, name, option, own, ahead=ahead(option))


def expected(
    planner: Planner, name: str, option: Option, offered: Offered | None, *, ahead: bool
) -> Alternative:
    """An option with its expected performance. `ahead`: the draft may continue while the target
    verifies."""
    if ahead:
        place = option.computed, option.resident
        option = planner.option(*place, option.draft, option.tree, option.tau, ahead=True)
    return Alternative(name, option, offered, option.tokens_per_s)
