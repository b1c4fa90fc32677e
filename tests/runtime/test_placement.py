"""The choice of the worker that gets a session."""

from collections.abc import Sequence

import pytest

from dovetail.protocol.calibration import ContextCurve, RowsSeconds
from dovetail.protocol.messages import Finished, Limits, Open
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.control.pairs import Pair
from dovetail.runtime.costs.rounds import PairCosts
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.fleet.placement import (
    are_alike,
    best,
    candidates,
    draft_rate,
    next_of,
    target_rate,
)
from dovetail.runtime.fleet.registry import Registry
from support.houses import House
from support.scripted import (
    ROOMY,
    ScriptedDraft,
    ScriptedTarget,
    ScriptedWorker,
    continuation,
    hello,
)

SMALL = Limits(context=12)


def worker(
    role: str = "target",
    *,
    sessions: int = 0,
    row_ms: float | None = None,
    most: int = 64,
    trip_ms: float = 0.0,
) -> Worker:
    """A worker whose passes take so long a row."""
    curve = (
        RowsSeconds(rows=(1, 1024), seconds=(row_ms / 1e3, 1024 * row_ms / 1e3))
        if row_ms is not None
        else None
    )
    curves = (ContextCurve(context=512, t_v=curve),) if curve is not None else ()
    found = Registry(epoch=1).admit(
        b"peer",
        hello(role, epoch=7, curves=curves, limits=Limits(context=512, sessions=most)),
        None,
        0,
    )
    assert isinstance(found, Worker)
    found.sessions, found.round_trip_ns = sessions, round(1e6 * trip_ms)
    return found


def chosen(*targets: Worker) -> int:
    """The place of the target that gets the next session."""
    found = best(targets, [target_rate(target, {}, 0) for target in targets])
    return next(place for place, target in enumerate(targets) if target is found)


def test_where_not_all_is_known_the_worker_with_the_fewest_sessions_gets_the_next() -> None:
    assert chosen(worker(sessions=2, row_ms=1), worker(sessions=1), worker(sessions=3)) == 1
    assert chosen(worker(row_ms=1), worker(), worker()) == 1, (
        "it would never be known else where one request comes after the other"
    )
    assert best([], []) is None


def test_a_target_that_is_twice_as_fast_gets_twice_as_many_sessions() -> None:
    targets = [worker(row_ms=2), worker(row_ms=1)]
    for _ in range(30):
        targets[chosen(*targets)].sessions += 1
    assert [target.sessions for target in targets] == pytest.approx([10, 20], abs=1)


def test_of_targets_of_one_fingerprint_equally_fast_ones_get_equally_many() -> None:
    """Whatever else their few passes let guess of passes over more rows."""
    targets = [worker() for _ in range(3)]
    for target, seconds in zip(targets, ((1.0, 1.0), (1.0, 1.1), (0.5, 0.5)), strict=True):
        for rows, pass_s in enumerate(seconds, 1):
            target.verifying.observe(rows, pass_s)
    assert are_alike(targets)
    for _ in range(40):
        next_of(targets, 0).sessions += 1
    assert [target.sessions for target in targets] == pytest.approx([10, 10, 20], abs=1)


def test_the_way_to_a_worker_counts() -> None:
    assert chosen(worker(row_ms=1, trip_ms=50), worker(row_ms=2)) == 1


def test_a_draft_is_chosen_by_what_it_brought_and_by_who_else_waits_for_it() -> None:
    target = worker(row_ms=1)
    better, worse = (
        pair(target, tokens=4.0, exposed_ms=2.0),
        pair(target, tokens=2.0, exposed_ms=1.0),
    )
    idle = [worker("draft"), worker("draft")]
    rates = [
        draft_rate(draft, target, known, 0)
        for draft, known in zip(idle, (better, worse), strict=True)
    ]
    assert rates[0] > rates[1]
    busy = worker("draft", sessions=10)
    assert draft_rate(busy, target, better, 0) < rates[1]
    assert draft_rate(idle[0], target, None, 0) == 0.0


def pair(target: Worker, *, tokens: float, exposed_ms: float) -> Pair:
    known = Pair("draft", "target", PairCosts(target.verifying), shared=False, rounds=9)
    known.tokens.add(tokens)
    known.gamma.add(3.0)
    known.costs.exposed_s.add(exposed_ms / 1e3)
    return known


def test_who_is_full_or_owes_an_answer_for_too_long_gets_nothing() -> None:
    full, stuck, free = worker(sessions=3, most=3), worker(), worker(sessions=5)
    stuck.stuck = True
    assert candidates([full, stuck, free, worker("draft")], "target") == [free]


def sessions_of(house: House, workers: Sequence[ScriptedWorker]) -> list[int]:
    return [
        next(
            state.sessions for state in house.report().workers if state.worker_epoch == worker.epoch
        )
        for worker in workers
    ]


def test_sessions_spread_over_several_drafts_and_targets_and_each_gets_its_own_continuation() -> (
    None
):
    house = House()
    targets = [
        house.target,
        *(house.add(ScriptedTarget, "target", name=f"target-{i}") for i in range(2)),
    ]
    drafts = [
        house.draft,
        *(house.add(ScriptedDraft, "draft", name=f"draft-{i}") for i in range(2)),
    ]
    house.coordinator.pump()
    requests = {
        house.submit((i, 3), max_tokens=40, tree=TreeSettings(policy="dynamic", insist=True)): (
            i,
            3,
        )
        for i in range(1, 10)
    }
    house.coordinator.pump()
    held = [
        [
            worker.sessions
            for worker in house.coordinator.registry.workers.values()
            if worker.plays(role)
        ]
        for role in ("target", "draft")
    ]
    assert held == [[3, 3, 3], [3, 3, 3]]
    for request, prompt in requests.items():
        assert list(house.client.complete(request).result.token_ids) == continuation(prompt, 40)
    assert (
        sessions_of(house, [worker for worker in (*targets, *drafts) if worker is not None])
        == [0] * 6
    )


# -- contexts of different lengths -----------------------------------------------------------------


@pytest.mark.parametrize("smaller_first", [True, False])
def test_how_long_a_request_may_be_hangs_on_the_target_with_the_longest_context_alone(
    smaller_first: bool,
) -> None:
    house = House(target=False)
    sizes = (SMALL, ROOMY) if smaller_first else (ROOMY, SMALL)
    for place, limits in enumerate(sizes):
        house.add(ScriptedTarget, "target", name=f"target-{place}", limits=limits)
    prompts = [tuple(range(3, 3 + count)) for count in (2, 20, 2, 20, 2)]
    requests = {house.submit(prompt, max_tokens=8): prompt for prompt in prompts}
    ends = {reply.request: reply for reply in house.replies() if isinstance(reply, Finished)}
    assert {request: list(end.result.token_ids) for request, end in ends.items()} == {
        r: continuation(prompt, 8) for r, prompt in requests.items()
    }
    served = {
        len(command.prompt)
        for worker in house.workers
        if worker.limits == SMALL
        for command in worker.seen
        if isinstance(command, Open)
    }
    assert served == {2}, "the smaller one has its share of what it can hold"
