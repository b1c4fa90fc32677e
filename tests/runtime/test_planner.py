"""The planner against looking at everything, within limits, and in the shapes that papers
report."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from dovetail.launch.planning.acceptance import Assumed, published
from dovetail.launch.planning.designs import Design, config_of
from dovetail.launch.planning.planner import (
    BUFFERS,
    Draft,
    Link,
    Machine,
    Option,
    PartCosts,
    Planner,
    Target,
    Tree,
    by_budget,
)
from dovetail.runtime.costs.rounds import Messages
from dovetail.workers.models.backends import placement
from dovetail.workers.models.backends.placement import Demand, place_layers
from dovetail.workers.models.backends.sizes import sizes_of
from dovetail.workers.models.checkpoints.footprint import PROCESS_BYTES

LAYERS = 6


def device_bytes(computed: int, resident: int) -> int:
    return 100 * (resident + min(BUFFERS, computed - resident)) + 100 + 10 * computed


def host_bytes(computed: int, resident: int) -> int:
    return 70 + 100 * (LAYERS - resident) + (0 if computed else 60)


TARGET = Target(LAYERS, 100, 60, device_bytes, host_bytes)
TREES = [
    Tree("dynamic", gamma, depth, 4)
    for gamma in (1, 3, 7, 15)
    for depth in (1, 2, 4)
    if depth <= gamma
] + [Tree("budget", 128, 8, 32)]
SLOW_HOST = PartCosts(lambda rows: 1e-3 * max(1.0, rows / 8), lambda rows: 1e-4)
FAST_DEVICE = PartCosts(lambda rows: 1e-4 * max(1.0, rows / 256), lambda rows: 1e-5)
LINK = Link(lambda rows: 2e-3, overlaps=True)
MACHINE = Machine(SLOW_HOST, FAST_DEVICE, LINK, device_bytes=500, messages=Messages(1e-5, 2e-5))


def draft(
    name: str = "small",
    *,
    right: float = 0.8,
    level_s: float = 1e-4,
    size: int = 50,
    shares: bool = False,
) -> Draft:
    acceptance = Assumed(right, 0.5, "")

    def bytes_beside(resident: int) -> int:
        return size - 5 * resident if shares else size

    return Draft(
        name,
        lambda rows, resident: level_s * (1 + resident * shares / 10),
        bytes_beside,
        0,
        acceptance.tokens,
        TREES,
        shares=shares,
    )


def looked_at(planner: Planner, drafts: list[Draft | None]) -> list[Option]:
    """Every placement with every tree of every draft, within the limits, by the slow obvious
    way."""
    found = []
    for computed, resident, one in product(range(LAYERS + 1), range(LAYERS + 1), drafts):
        if resident > computed or computed - resident in range(1, BUFFERS + 1):
            continue
        device = (device_bytes(computed, resident) if computed else 0) + (
            one.device_bytes(resident) if one is not None else 0
        )
        if planner.machine.device_bytes is not None and device > planner.machine.device_bytes:
            continue
        found += [
            planner.option(computed, resident, one, tree, one.tokens(tree) if one and tree else 1.0)
            for tree in (one.trees if one else [None])
        ]
    return found


def everywhere(planner: Planner) -> list[tuple[int, int]]:
    return [
        *planner.on_cpu(),
        *planner.split(),
        *planner.mixed(),
        *planner.streamed(),
        *planner.whole(),
    ]


@pytest.mark.parametrize("limit", [None, 150, 400, 500, 640, 760, 10_000])
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_the_best_of_all_is_found(limit: int | None, overlaps: bool, shares: bool) -> None:
    planner = Planner(
        TARGET, replace(MACHINE, device_bytes=limit, link=replace(LINK, overlaps=overlaps))
    )
    drafts: list[Draft | None] = [
        None,
        draft(shares=shares),
        draft("slow and sure", right=0.95, level_s=4e-4, size=120),
    ]
    best = planner.best(everywhere(planner), drafts)
    assert best is not None
    assert best.tokens_per_s == pytest.approx(
        max(option.tokens_per_s for option in looked_at(planner, drafts))
    )


@pytest.mark.parametrize("room", range(0, 1000, 50))
def test_no_option_is_beyond_a_limit(room: int) -> None:
    planner = Planner(TARGET, replace(MACHINE, device_bytes=room, host_bytes=690))
    best = planner.best(everywhere(planner), [None, draft()])
    assert best is None or (best.device_bytes <= room and best.host_bytes <= 690)


def test_more_memory_never_makes_it_slower() -> None:
    rates = []
    for room in range(0, 1200, 40):
        planner = Planner(TARGET, replace(MACHINE, device_bytes=room))
        best = planner.best(everywhere(planner), [None, draft()])
        assert best is not None
        rates.append(best.tokens_per_s)
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0]


def test_sizes_are_those_that_layers_are_placed_by() -> None:
    config = config_of("8B")
    sizes, target = sizes_of(config, "half"), Design(config).target("half", "cuda:0")
    for computed, resident in ((1, 1), (8, 8), (32, 0), (32, 20), (20, 4)):
        placed = place_layers(sizes, Demand(device="cuda:0", computed=computed, resident=resident))
        assert target.device_bytes(computed, resident) == placed.device_bytes
        assert target.host_bytes(computed, resident) == placed.host_bytes + PROCESS_BYTES


def test_a_layer_is_streamed_for_many_rows_and_stays_on_the_cpu_for_few() -> None:
    planner = Planner(
        TARGET, replace(MACHINE, device_bytes=450, link=Link(lambda rows: 8e-3, overlaps=True))
    )

    def best_with(gamma: int) -> Option:
        tree = Tree("beam", gamma, 1, gamma)
        found = planner.best(
            everywhere(planner), [replace(draft(), trees=[tree], tokens=lambda _: 4.0)]
        )
        assert found is not None
        return found

    assert best_with(15).streamed == 0
    assert best_with(15).on_cpu == LAYERS - best_with(15).resident > 0
    assert best_with(288).on_cpu == 0
    assert best_with(288).streamed > BUFFERS


def test_with_a_draft_that_is_never_right_the_target_alone_wins() -> None:
    planner = Planner(TARGET, MACHINE)
    never = replace(draft(right=0.0), tokens=lambda _: 1.0)
    best = planner.best(everywhere(planner), [None, never])
    assert best is not None
    assert best.draft is None


def test_large_trees_are_those_of_offloading() -> None:
    assert [tree.gamma for tree in by_budget(draft()).trees] == [128]


def test_what_streams_takes_as_long_as_the_link_or_as_what_is_computed() -> None:
    planner = Planner(TARGET, MACHINE)
    copying = LAYERS * 2e-3
    assert planner.pass_s(1, LAYERS, 0) == pytest.approx(copying - 1e-5 + 1e-5, rel=0.01)
    assert planner.pass_s(1, LAYERS, 0, gap_s=1.0) == pytest.approx(
        (LAYERS - BUFFERS) * 2e-3 + 1e-5
    )
    assert planner.pass_s(1 << 16, LAYERS, 0) == pytest.approx(
        LAYERS * FAST_DEVICE.layer_s(1 << 16) + 1e-5
    )
    assert planner.pass_s(1, LAYERS, LAYERS - BUFFERS) == planner.pass_s(1, LAYERS, LAYERS)


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("eagle", 1),
        ("dovetail", 1),
        ("dovetail", 5),
        ("small", 1),
        ("substitute", 1),
        ("eagle3", 1),
        ("jakiro", 1),
    ],
)
def test_what_is_assumed_of_a_draft_is_what_the_paper_reports(kind: str, blocks: int) -> None:
    source = published(kind, blocks)
    assert Assumed.of(source).tokens(source.tree) == pytest.approx(source.tokens, rel=1e-4)


def test_the_assumption_grows_with_nodes_levels_and_children() -> None:
    tokens: Callable[[Tree], float] = Assumed.of(published("eagle")).tokens
    assert tokens(Tree("dynamic", 59, 8, 10)) == pytest.approx(
        4.49, rel=0.02
    )  # EAGLE-2 in the Dovetail paper, Table 3
    for small, large in (
        (Tree("dynamic", 3, 3, 4), Tree("dynamic", 7, 3, 4)),
        (Tree("dynamic", 7, 2, 4), Tree("dynamic", 7, 4, 4)),
    ):
        assert 1.0 < tokens(small) < tokens(large)
    assert tokens(Tree("dynamic", 31, 4, 1)) < tokens(Tree("dynamic", 31, 4, 2))


def test_it_reckons_with_as_many_buffers_as_there_are() -> None:
    assert BUFFERS == placement.BUFFERS
