"""`goodput` in virtual time: whatever drafting costs and brings, a reply takes hardly longer than
with the target alone, nor than with the best fixed tree.

Workers take the time that they are told to take; nothing here depends on the machine.
"""

import re
from collections.abc import Sequence
from itertools import product
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.calibration import ContextCurve, RowsSeconds
from dovetail.protocol.messages import Emitted, Finished, Result, Verify
from dovetail.protocol.noise import mix
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.control.controller import CONTROLLED
from dovetail.runtime.control.pricing import MOST_FLOOR, cut, least_probability
from dovetail.runtime.session.session import Session
from dovetail.runtime.telemetry.picture import speculation
from support.timed import HOST_S, Costs, TimedHouse

OFFER = st.lists(st.floats(-6.0, -0.01), max_size=5).map(
    lambda scores: sorted(scores, reverse=True)
)


def flat(rows: int) -> float:
    return 0.02 + 0.001 * rows


@given(
    offers=st.lists(OFFER, min_size=1, max_size=3),
    rate=st.floats(0.0, 500.0),
    steps=st.lists(st.floats(0.0, 0.01), min_size=24, max_size=24),
    fixed=st.integers(0, 5),
    most=st.none() | st.integers(0, 24),
)
def test_nothing_is_worth_more_than_what_is_cut(
    offers: list[list[float]], rate: float, steps: list[float], fixed: int, most: int | None
) -> None:
    def seconds(rows: int) -> float:
        return 0.01 + sum(steps[:rows])

    def worth(counts: tuple[int, ...]) -> float:
        tokens = sum(
            sum(map(exp, offer[:count])) for offer, count in zip(offers, counts, strict=True)
        )
        return tokens - rate * seconds(fixed + len(offers) + sum(counts))

    base = fixed + len(offers)
    chosen = cut(offers, rate=rate, seconds=seconds, fixed=fixed, most=most)
    allowed = [
        counts
        for counts in product(*(range(len(offer) + 1) for offer in offers))
        if most is None or base + sum(counts) <= max(most, base)
    ]
    assert chosen in allowed
    assert worth(chosen) == pytest.approx(max(map(worth, allowed)), abs=1e-9)


def test_ties_go_to_fewer_rows() -> None:
    assert cut([[log(0.5), log(0.25)]], rate=1.0, seconds=lambda rows: 0.5 * rows) == (0,)


def test_where_rows_are_free_all_is_verified_and_where_they_are_dear_nothing() -> None:
    offers = [[-0.1, -0.5, -3.0], [], [-0.2]]
    assert cut(offers, rate=10.0, seconds=lambda _: 1.0) == (3, 0, 1)
    assert cut(offers, rate=10.0, seconds=float) == (0, 0, 0)
    assert cut([], rate=10.0, seconds=float) == ()


def test_the_likelier_nodes_of_all_sessions_go_first() -> None:
    sure, unsure = [-0.01, -0.02, -0.03], [-2.0, -2.1, -2.2]
    assert cut([unsure, sure], rate=400.0, seconds=flat) == (0, 3)


def test_a_step_of_the_pass_is_climbed_only_for_enough_nodes() -> None:
    def stairs(rows: int) -> float:
        return 0.02 + 0.01 * ((rows - 1) // 4)

    assert cut([[log(0.6)] * 4], rate=80.0, seconds=stairs) == (3,)
    assert cut([[log(0.6)] * 7], rate=80.0, seconds=stairs) == (7,)


def test_an_offer_that_is_not_in_order_is_cut_at_a_beginning() -> None:
    assert cut([[-3.0, -0.1]], rate=100.0, seconds=flat) == (2,)
    assert cut([[-3.0, -0.1], [-1.0]], rate=200.0, seconds=flat) == (2, 1)


def test_a_node_need_be_no_likelier_than_the_cheapest_way_to_more_rows() -> None:
    assert least_probability(50.0, flat, 4, 16) == pytest.approx(0.05)
    assert least_probability(50.0, lambda rows: 1.0 if rows < 13 else 2.0, 4, 12) == 0.0
    assert least_probability(1e6, flat, 4, 16) == MOST_FLOOR
    assert least_probability(50.0, flat, 16, 16) == pytest.approx(0.05)


TOKENS = 300
NEVER_RIGHT = Costs(right=lambda _: 0.0, belief=lambda _: 0.5)


def best_fixed(costs: Costs) -> float:
    """Tokens a second with the best chain of a fixed length, in expectation: not on a text that
    happens to suit it."""
    return max(expected(costs, length) for length in range(1, 16))


def expected(costs: Costs, length: int) -> float:
    """Tokens a second with a chain of this length: the coordinator looks twice at a round's
    messages."""
    tokens = sum(costs.right(0) ** depth for depth in range(length + 1))
    work_s = (1.0 + costs.noise) * costs.pass_s(1 + length, 0) + length * costs.level_s(0)
    return tokens / (work_s + costs.target_hop_s + costs.draft_hop_s + 2 * HOST_S)


def test_the_expectation_is_what_a_fixed_chain_does() -> None:
    costs = Costs(right=lambda _: 0.6)
    assert TimedHouse(costs).rate(600, policy="static", gamma=3, depth=3) == pytest.approx(
        expected(costs, 3), rel=0.04
    )


def stretched(house: TimedHouse, replies: int = 2) -> float:
    """Tokens a second of several replies, one after the other, each another text."""
    results = [house.complete(TOKENS, prompt=8 + TOKENS * reply).result for reply in range(replies)]
    return replies / sum(1.0 / result.tokens_per_s for result in results)


@pytest.mark.parametrize(
    "costs",
    [
        pytest.param(NEVER_RIGHT, id="a draft that is never right"),
        pytest.param(Costs(draft_hop_s=0.08), id="a slow link"),
        pytest.param(Costs(drafted_hop_s=0.08), id="longer hops in rounds with a draft"),
        pytest.param(Costs(right=lambda _: 0.5, level_s=lambda _: 0.015), id="a slow draft"),
        pytest.param(
            Costs(level_s=lambda context: 2e-4 * context), id="a draft that the context slows down"
        ),
        pytest.param(
            Costs(
                right=lambda _: 0.3,
                pass_s=lambda rows, context: 0.01 + 1e-5 * context + 0.01 * rows,
            ),
            id="rows that are dear",
        ),
    ],
)
def test_where_drafting_does_not_pay_next_to_nothing_is_lost(costs: Costs) -> None:
    replies = [
        TimedHouse(costs).rate(TOKENS, prompt=8 + TOKENS * reply, speculate=False)
        for reply in range(2)
    ]
    alone = len(replies) / sum(1.0 / rate for rate in replies)
    assert stretched(TimedHouse(costs)) >= 0.95 * alone


def share_of_alone(house: TimedHouse, replies: int, tokens: int, begin: int = 0) -> float:
    """The rate of short replies with different texts, as a share of the target's rate alone."""
    with_draft = alone = 0.0
    for reply in range(begin, begin + replies):
        prompt = 8 + 17 * reply
        with_draft += 1.0 / house.rate(tokens, prompt=prompt)
        alone += 1.0 / TimedHouse(house.target.costs).rate(tokens, prompt=prompt, speculate=False)
    return alone / with_draft


def test_short_replies_find_out_together_that_drafting_does_not_pay() -> None:
    house = TimedHouse(NEVER_RIGHT)
    share_of_alone(house, 4, 8)
    assert share_of_alone(house, 40, 8, begin=4) >= 0.97


@pytest.mark.parametrize(
    "costs",
    [
        pytest.param(Costs(right=lambda _: 0.6), id="guesses that are often right"),
        pytest.param(
            Costs(right=lambda _: 0.8, level_s=lambda _: 0.012), id="a slow draft that is right"
        ),
        pytest.param(
            Costs(right=lambda _: 0.9, pass_s=lambda rows, _: 0.01 + 0.008 * rows),
            id="rows that are dear",
        ),
        pytest.param(Costs(right=lambda _: 0.8, noise=0.2), id="passes that vary"),
    ],
)
def test_where_drafting_pays_hardly_any_fixed_tree_is_better(costs: Costs) -> None:
    house = TimedHouse(costs)
    house.complete(TOKENS // 2)  # finds out what passes cost
    assert stretched(house, replies=4) >= 0.97 * best_fixed(costs)


def test_a_draft_that_is_hopelessly_slow_is_asked_for_a_single_level_once() -> None:
    house = TimedHouse(Costs(level_s=lambda _: 0.5))
    records, _ = house.records(TOKENS)
    assert sum(record.draft_ns for record in records) == 500_000_000
    again, _ = house.records(TOKENS)
    assert sum(record.draft_ns for record in again) == 0


@pytest.mark.parametrize("gamma", [1, 2, 15])
def test_every_bound_of_the_tree_will_do(gamma: int) -> None:
    finished = TimedHouse(Costs(right=lambda _: 0.99)).complete(60, gamma=gamma)
    assert finished.result.accepted_tokens > 0
    assert finished.result.drafted_tokens <= gamma * finished.result.rounds


def test_drafting_comes_back_where_text_becomes_predictable_and_every_change_is_told() -> None:
    def right(context: int) -> float:
        return 0.0 if context < 200 else 0.9

    house = TimedHouse(Costs(right=right, belief=lambda _: 0.6))
    records, finished = house.records(500)
    drafted = [bool(record.tokens) for record in records]
    assert not any(drafted[60:70])
    assert sum(drafted[-20:]) >= 18
    changes = [line for line in house.client.status().decisions if "session 1" in line]
    assert "drafting stopped because it" in changes[0]
    assert "drafting resumed because it is faster" in changes[-1]
    assert any("drafting is tested" in line for line in changes)
    assert finished.result.plain_rounds == sum(record.verified == 0 for record in records)


def test_rounds_that_only_measure_the_target_are_counted() -> None:
    result = TimedHouse(Costs(right=lambda _: 0.9)).complete(TOKENS).result
    assert result.control_rounds == CONTROLLED
    assert result.plain_rounds > result.control_rounds


def test_what_a_profile_says_of_the_draft_is_where_its_costs_start() -> None:
    levels = ContextCurve(context=512, t_v=RowsSeconds(rows=(1, 16), seconds=(0.004, 0.019)))
    house = TimedHouse(Costs(right=lambda _: 0.9), draft={"curves": (levels,)})
    (worker,) = (one for one in house.coordinator.registry.workers.values() if one.plays("draft"))
    assert [worker.drafting.at(rows) for rows in (1, 6)] == pytest.approx([0.004, 0.009])
    assert not worker.verifying.known


def test_while_drafting_is_off_status_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    house = TimedHouse(NEVER_RIGHT)
    house.complete(200)
    reports = []
    verified = Session.verified

    def look(self: Session, *args: object) -> object:
        if self.round == 5:
            reports.append(house.coordinator.report())
        return verified(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "verified", look)
    house.complete(20)
    (reason,) = reports[0].reasons
    assert reason.startswith("1 session is decoded without a draft: ")
    assert not reports[0].degraded
    assert not reports[0].pairs[0].speculating
    assert reports[0].pairs[0].undrafted == reason
    assert speculation(reports[0])["words"] == f"off: {reason}"
    (beginning,) = (
        line for line in reports[0].decisions if "session 2 begins without a draft" in line
    )
    assert re.search(
        r"drafting was stopped because it was slower: \d+\.\d tokens/s with a draft, "
        r"4\d\.\d without$",
        beginning,
    )
    assert house.client.status().reasons == ()
    (pair,) = house.client.status().pairs
    assert not pair.speculating
    assert pair.undrafted == ""
    assert pair.alone_tokens_per_s == pytest.approx(
        TimedHouse(NEVER_RIGHT).rate(TOKENS, speculate=False), rel=0.03
    )


def test_status_is_told_however_long_the_names_of_workers_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = TimedHouse(NEVER_RIGHT, target={"name": "t" * 500}, draft={"name": "d" * 500})
    house.complete(200)
    told = []
    verified = Session.verified

    def look(self: Session, *args: object) -> object:
        told.extend(house.coordinator.report().reasons)
        return verified(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "verified", look)
    house.complete(5)
    assert told
    assert all(reason.startswith("1 session is decoded without a draft: dddd") for reason in told)


def test_a_round_is_predicted_before_it_is_made_and_its_times_add_up() -> None:
    house = TimedHouse(Costs(right=lambda _: 0.7, noise=0.1))
    house.complete(TOKENS)
    records, finished = house.records(TOKENS)
    result = finished.result
    assert result.predicted_tokens_per_s == pytest.approx(result.tokens_per_s, rel=0.1)
    parts = [
        record.draft_ns
        + record.verify_ns
        + record.transport_ns
        + record.queue_ns
        + record.coordinator_ns
        for record in records
    ]
    assert sum(parts) / 1e9 == pytest.approx(result.wall_s - result.time_to_first_token_s, rel=0.02)
    assert sum(record.draft_ns for record in records) / 1e9 == pytest.approx(
        result.draft_exposed_s, rel=1e-6
    )
    assert result.predicted_tokens_per_s is not None
    (pair,) = house.client.status().pairs
    assert pair.t_v is not None
    assert pair.t_v.at(1) == pytest.approx(0.0225, rel=0.1)
    assert pair.t_d is not None
    assert pair.t_d.at(1) == pytest.approx(0.002, rel=0.01)


def test_a_machine_whose_speed_changes_does_not_stop_drafting_that_pays() -> None:
    houses = list[TimedHouse]()

    def pass_s(rows: int, _context: int) -> float:
        slower = houses and houses[0].clock.now_ns // 2_000_000_000 % 2
        return (1.5 if slower else 1.0) * max(0.0225, 0.0075 + 0.0107 * rows)

    costs = Costs(pass_s=pass_s, level_s=lambda _: 0.001, right=lambda _: 0.7, draft_hop_s=0.002)
    houses.append(TimedHouse(costs))
    results = [houses[0].complete(TOKENS, prompt=8 + TOKENS * at).result for at in range(4)]
    assert [line for line in houses[0].client.status().decisions if "stopped" in line] == []
    assert all(result.plain_rounds < 0.2 * result.rounds for result in results)


def test_passes_that_vary_do_not_stop_drafting_that_pays_now_and_then() -> None:
    def right(context: int) -> float:
        part = mix(context // 3 + 777) % 100
        return 0.95 if part < 30 else 0.6 if part < 60 else 0.2

    costs = Costs(
        pass_s=lambda rows, _: max(0.0225, 0.0075 + 0.0107 * rows),
        level_s=lambda _: 0.001,
        right=right,
        draft_hop_s=0.0025,
        noise=0.1,
    )
    results = []
    for start in (8, 1008, 2008, 3008):
        house = TimedHouse(costs)
        house.target.chance.seed(start)
        results += [house.complete(64, prompt=start + 192 * reply).result for reply in range(6)]
    plain = sum(result.plain_rounds for result in results)
    assert plain < 0.78 * sum(result.rounds for result in results)


def test_on_a_shared_device_drafting_ahead_is_dropped_where_it_slows_the_target() -> None:
    on_gpu = {"device": "cuda:0"}
    house = TimedHouse(Costs(ahead_slows=1.4), target=on_gpu, draft=on_gpu)
    while not (
        found := [line for line in house.client.status().decisions if "drafting ahead" in line]
    ):
        house.complete(TOKENS)
    assert "is off because" in found[0]
    house.draft.orders.clear()
    house.complete(TOKENS)
    assert not any(order.ahead for order in house.draft.orders)


@pytest.mark.parametrize(("core", "ahead"), [(0, False), (2, True)])
def test_on_a_core_of_its_target_nothing_is_drafted_ahead(core: int, ahead: bool) -> None:
    house = TimedHouse(Costs(), target={"cores": (0, 1)}, draft={"cores": (core,)})
    house.complete(TOKENS)  # more rounds than the first ones of a trial, which go ahead of nothing
    assert {order.ahead for order in house.draft.orders} == {ahead}


def together(
    house: TimedHouse, trees: Sequence[TreeSettings], tokens: int = TOKENS
) -> list[Result]:
    """The results of requests that come at once, in their order."""
    requests = [
        house.client.submit(tokens=[3] * 8, max_tokens=tokens, seed=1, tree=tree) for tree in trees
    ]
    finished: dict[int, Result] = {}
    while len(finished) < len(requests):
        reply = house.client.receive(0)
        assert isinstance(reply, Emitted | Finished)
        if isinstance(reply, Finished):
            finished[reply.request] = reply.result
    return [finished[request] for request in requests]


def test_sessions_that_begin_together_draft_though_no_pass_has_a_single_row() -> None:
    costs = Costs(right=lambda _: 0.8, level_s=lambda _: 0.0005)
    for result in together(TimedHouse(costs), [TreeSettings(policy="goodput")] * 2):
        assert result.tau is not None
        assert result.tau > 3.0
        assert result.plain_rounds <= 4


def test_sessions_that_share_a_pass_are_cut_together_and_one_that_insists_is_left_whole() -> None:
    house = TimedHouse(Costs(right=lambda _: 0.8, pass_s=lambda rows, _: 0.01 + 0.004 * rows))
    house.complete(TOKENS)
    house.target.seen.clear()
    trees = [
        TreeSettings(policy=policy, gamma=6, depth=6, insist=policy == "static")
        for policy in ("goodput", "goodput", "static")
    ]
    results = together(house, trees, 60)
    assert len({result.token_ids for result in results}) == 1
    passes = [
        command
        for command in house.target.seen
        if isinstance(command, Verify) and len(command.items) > 1
    ]
    static = results[-1]
    assert passes
    assert {
        len(item.tokens)
        for command in passes
        for item in command.items
        if item.session == 4 and item.prefix < 8 + 60 - 7
    } == {6}
    assert static.drafted_tokens > 1.2 * results[0].drafted_tokens
