"""The conclusions that a session draws from its rounds, which are made up."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest

from dovetail.protocol.messages import Drafted
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.control.controller import Controller
from dovetail.runtime.control.on_off import Experience
from dovetail.runtime.control.pairs import Pair
from dovetail.runtime.control.pricing import Pricing, Situation
from dovetail.runtime.control.rounds import ALONE, Load, Round
from dovetail.runtime.costs.rounds import PairCosts
from dovetail.runtime.telemetry.metrics import RoundTimes

PROPOSAL = Drafted(
    epoch=1,
    session=1,
    round=1,
    tokens=(4, 5, 6),
    parents=(-1, 0, 1),
    scores=(-0.1, -0.2, -0.3),
    grown=3,
    hit=False,
)
ROW_NS = 1_000_000


def after(
    rounds: int, *, tokens: int, other_rows: int, queue_ns: int = 0, prompt_ns: int = 0
) -> Controller:
    """A controller after drafted rounds whose pass took a millisecond a row."""
    costs = PairCosts()
    for rows in (1, other_rows, other_rows + 3):
        for _ in range(8):
            costs.target.observe(rows, rows * ROW_NS / 1e9)
    pair = Pair("draft", "target", costs, shared=False)
    controller = Controller(
        1,
        tree=TreeSettings(policy="goodput"),
        pair=pair,
        costs=costs,
        greedy=True,
        ahead=None,
        say=lambda _: None,
    )
    for _ in range(rounds):
        controller.sends(100, PROPOSAL.scores, other_rows + 3)
        verify_ns = (other_rows + 3) * ROW_NS
        times = RoundTimes(verify_ns=verify_ns, target_queue_ns=queue_ns, draft_ns=prompt_ns)
        controller.learn(
            Round(
                times,
                100,
                tokens,
                verified=3,
                drafted=PROPOSAL,
                other_rows=other_rows,
                disturbed=prompt_ns > 0,
                begun=controller.end_round(),
            )
        )
    return controller


def test_drafting_is_not_blamed_for_the_rows_that_other_sessions_have_in_a_pass() -> None:
    assert after(40, tokens=2, other_rows=61).off is None
    assert after(40, tokens=2, other_rows=1).off is not None


def test_drafting_that_loses_while_prompts_are_read_pauses_until_none_are() -> None:
    """Nothing is held against it: a burst that begins would else have single streams that come
    after it decoded without a draft."""
    controller = after(10, tokens=2, other_rows=1, prompt_ns=10**9)
    assert controller.off is not None
    pair = controller._now.pair
    assert pair is not None
    assert pair.experiences[True] == Experience()
    alone = Round(RoundTimes(verify_ns=ROW_NS), 100, 1, verified=0, drafted=None)
    controller.learn(replace(alone, disturbed=True, begun=controller.end_round()))
    assert controller.off is not None
    controller.begin_round(ALONE)
    controller.learn(replace(alone, begun=controller.end_round()))
    assert controller.off is None


def test_a_draft_reads_prompts_while_drafting_is_on_however_slow_it_was_last() -> None:
    """Nothing else would tell that it has become faster."""
    pair = replace(pair_of(), shared=True)
    pair.costs.prompts.add(30, 0.1)
    pair.experiences[True].token_s = 0.05
    controller = controller_of(pair)
    assert controller.drafts_at(ALONE)
    assert controller.worth_reading(30, 80, ALONE)
    assert not controller.worth_reading(30, 8, ALONE)


def test_drafting_is_blamed_for_the_pass_that_it_made_a_session_miss_and_not_for_a_prompt_that_was_read() -> (  # noqa: E501
    None
):
    assert (
        after(40, tokens=3, other_rows=1).off is not None
    )  # three further rows take four times as long
    assert after(40, tokens=2, other_rows=40).off is None
    assert after(40, tokens=2, other_rows=40, queue_ns=43 * ROW_NS).off is not None
    assert after(40, tokens=3, other_rows=40, queue_ns=10**12).off is None


def pair_of(*, alone_s: float = 0.01, tokens: int = 0, reads: bool = False) -> Pair:
    """A pair whose rounds have brought so many tokens in 1.5 times what a round of the target alone
    takes."""
    costs = PairCosts()
    for _ in range(8):
        costs.target.observe(1, alone_s)
    pair = Pair("draft", "target", costs, shared=False, reads=reads)
    if tokens:
        pair.tokens.add(tokens)
        pair.seconds.add(1.5 * alone_s)
    return pair


def controller_of(
    pair: Pair,
    *,
    policy: Literal["goodput", "dynamic"] = "goodput",
    say: Callable[[str], None] = lambda _: None,
) -> Controller:
    return Controller(
        1,
        tree=TreeSettings(policy=policy, insist=policy != "goodput"),
        pair=pair,
        costs=pair.costs,
        greedy=True,
        ahead=None,
        say=say,
    )


@pytest.mark.parametrize(
    ("tokens", "lag_s", "waits"),
    [(4, 0.002, True), (4, 0.008, False), (1, 0.002, False), (0, 0.002, False), (4, None, False)],
)
def test_the_first_round_waits_for_a_draft_that_has_nearly_read_the_prompt(
    tokens: int, lag_s: float | None, waits: bool
) -> None:
    """A drafted round brings 4 tokens in 15 ms here; the 10 ms of a round without a draft are worth
    2.7 and bring 1."""
    pair = pair_of(tokens=tokens)
    if lag_s is not None:
        controller_of(pair).draft_read(100, lag_s)
    assert controller_of(pair).awaits_draft(100, 100) == waits


def test_a_session_begins_at_the_rate_of_its_pair_and_goes_over_to_its_own() -> None:
    assert controller_of(pair_of()).rate(100) == pytest.approx(100.0)
    controller = controller_of(pair_of(tokens=3))
    assert controller.rate(100) == pytest.approx(200.0)
    rates = []
    for _ in range(6):
        controller.learn(Round(RoundTimes(verify_ns=10_000_000), 100, 1, verified=0, drafted=None))
        rates.append(controller.rate(100))
    assert rates == sorted(rates, reverse=True)
    assert rates[2] > rates[3] == pytest.approx(rates[5])


@pytest.mark.parametrize("faster", [1.02, 1.3])
def test_a_head_grows_ahead_where_that_saves_more_time_than_guesses_from_guesses_cost(
    faster: float,
) -> None:
    pair, said = pair_of(reads=True), list[str]()
    controller = controller_of(pair, policy="dynamic", say=said.append)
    for _ in range(12 * 8):
        controller.begin_round(ALONE)
        plan = controller.plan(100)
        assert plan is not None
        controller.sends(100, PROPOSAL.scores, 4)
        controller.learn(
            Round(
                RoundTimes(verify_ns=round(1e7 / (faster if plan.ahead else 1.0))),
                100,
                3,
                verified=3,
                drafted=PROPOSAL,
                begun=controller.end_round(),
            )
        )
    plan = controller.plan(100)
    assert plan is not None
    assert plan.ahead == (faster > 1.1)
    assert [
        ("drafting ahead is on" in words, "drafting ahead is off" in words) for words in said
    ] == [(True, False) if faster > 1.1 else (False, True)]


def test_a_draft_of_its_own_device_that_reads_no_states_always_grows_ahead() -> None:
    plan = controller_of(pair_of(), policy="dynamic").plan(100)
    assert plan is not None
    assert plan.ahead


def test_a_session_that_loses_its_draft_beside_others_is_learned_from_again() -> None:
    controller = controller_of(pair_of())
    for _ in range(3):
        controller.begin_round(Load(4, 4))
    assert not controller.begun.sampled
    controller.leave()
    assert controller.begun.sampled


@pytest.mark.parametrize(("load", "pass_s"), [(ALONE, 0.004), (Load(target=3, draft=3), 0.001)])
def test_more_levels_are_hoped_for_where_one_pass_predicts_all_of_them(
    load: Load, pass_s: float
) -> None:
    def priced(levels: int, pass_s: float) -> tuple[int, float]:
        costs = PairCosts(levels=levels)
        for rows in range(1, 9):
            costs.target.observe(rows, 0.010)
            costs.draft.observe(rows, pass_s)
        pair = Pair("draft", "target", costs, shared=False)
        pricing = Pricing(TreeSettings(depth=12), Situation(pair, costs, load))
        depth = pricing.plan(100, pair, trying=True, doubted=False, ahead=False).most_depth
        assert depth is not None
        return depth, pricing.hope(100)

    alone, block = priced(1, pass_s), priced(8, pass_s)
    assert block[0] == 8 > alone[0] > 1
    assert block[1] > alone[1]
    assert priced(3, pass_s)[0] == 3  # none are deeper than the block
    assert priced(8, 0.050)[1] < 0  # five rounds of the target pay for no pass
