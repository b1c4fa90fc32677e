"""The decision whether drafting pays, from rounds that were made up."""

import random
import re
from collections.abc import Callable

import pytest

from dovetail.runtime.control.on_off import (
    ALLOWANCE,
    CARE_OF_A_TRY,
    LASTING,
    MOST_CARE,
    TRY_SHARE,
    Crowd,
    Experience,
    OnOff,
)
from dovetail.runtime.control.pairs import BLOCK, FIRST_PAUSE, TURNS, AheadTrial
from support.loaded import passes_of

ALONE_S = 0.02


def live_through(
    on_off: OnOff, rounds: int, tokens: Callable[[int], float], seconds: Callable[[int], float]
) -> tuple[float, float, list[str]]:
    """(tokens, seconds, decisions) of so many rounds, which are as said where there is drafting."""
    said, spent_s, words = 0.0, 0.0, []
    for at in range(rounds):
        if on_off.drafting:
            said, spent_s = said + tokens(at), spent_s + seconds(at)
            if (decision := on_off.drafted(tokens(at), seconds(at), ALONE_S)) is not None:
                words.append(decision)
        else:
            said, spent_s = said + 1.0, spent_s + ALONE_S
            if (decision := on_off.undrafted(ALONE_S, ALONE_S)) is not None:
                words.append(decision)
    return said, spent_s, words


def test_drafting_that_loses_is_stopped_and_costs_little() -> None:
    on_off = OnOff(Experience())
    said, spent_s, words = live_through(on_off, 400, lambda _: 1.0, lambda _: 1.6 * ALONE_S)
    assert on_off.state != "on"
    assert said * ALONE_S / spent_s > 0.97
    assert words[0].startswith(
        "drafting stopped because it was slower: 31.2 tokens/s with a draft, 50.0 without"
    )


@pytest.mark.parametrize("cost", [1.1, 2.0, 10.0, 100.0])
def test_in_the_long_run_trying_costs_two_percent_at_most(cost: float) -> None:
    experience = Experience()
    live_through(OnOff(experience), 50, lambda _: 1.0, lambda _: cost * ALONE_S)
    said, spent_s, _ = live_through(
        OnOff(experience), 30_000, lambda _: 1.0, lambda _: cost * ALONE_S
    )
    assert said * ALONE_S / spent_s >= 0.98


def test_drafting_that_pays_is_never_stopped_by_chance_for_long() -> None:
    rng = random.Random(2)
    said, spent_s, _ = live_through(
        OnOff(Experience()),
        3000,
        lambda _: float(rng.choice((1, 1, 1, 2, 2, 3, 5))),
        lambda _: 1.5 * ALONE_S,
    )
    assert said * ALONE_S / spent_s > 0.97 * (15 / 7) / 1.5


@pytest.mark.parametrize(("stalls", "drafting"), [(1, True), (2, True), (3, False)])
def test_one_that_has_long_paid_survives_a_machine_that_stands_still_now_and_then_and_not_for_good(
    stalls: int, drafting: bool
) -> None:
    on_off = OnOff(Experience())
    live_through(on_off, 2 * LASTING, lambda _: 3.0, lambda _: 1.5 * ALONE_S)
    live_through(on_off, stalls, lambda _: 3.0, lambda _: 500 * ALONE_S)
    assert on_off.drafting == drafting
    _, _, words = live_through(on_off, 60, lambda _: 3.0, lambda _: 1.5 * ALONE_S)
    assert on_off.state == "on"
    assert len(words) == (0 if drafting else 2)


def test_drafting_resumes_where_text_becomes_predictable() -> None:
    experience = Experience()
    on_off = OnOff(experience)
    live_through(on_off, 200, lambda _: 1.0, lambda _: 1.5 * ALONE_S)
    assert experience.losing
    said, spent_s, words = live_through(on_off, 300, lambda _: 4.0, lambda _: 1.5 * ALONE_S)
    assert said * ALONE_S / spent_s > 2.0
    assert any(word.startswith("drafting resumed because it is faster") for word in words)
    assert not experience.losing


def test_one_round_is_told_as_one_and_rates_of_many_sessions_as_those_of_each() -> None:
    on_off = OnOff(Experience(), many=True)
    while not on_off.drafting:
        on_off.undrafted(ALONE_S, ALONE_S)
    told = (on_off.drafted(1.0, 100 * ALONE_S, ALONE_S, among=8) for _ in range(100))
    assert next(filter(None, told)) == (
        "drafting was tried (1 round) and stopped because it was slower: "
        "0.5 tokens/s per session with a draft, 50.0 without"
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_reason_for_a_change_agrees_with_the_printed_rates(seed: int) -> None:
    """Drafting that roughly breaks even or pays for a while, with varying pass times."""
    rng, on_off, told = random.Random(seed), OnOff(Experience(), many=seed % 2 == 1), list[str]()
    for at in range(1500):
        alone_s = ALONE_S * rng.uniform(0.7, 1.5)
        tokens = 3.0 if at % 400 < 100 else float(rng.choice((1, 1, 2, 4)))
        seconds = (1.9 + 0.02 * (seed % 12)) * alone_s * rng.uniform(0.5, 1.5)
        words = (
            on_off.drafted(tokens, seconds, alone_s)
            if on_off.drafting
            else on_off.undrafted(alone_s, alone_s)
        )
        told += [words] if words and "because" in words else []
    assert told
    for words in told:
        pattern = r".*because (it [^:]*): ([\d.]+) .*draft, ([\d.]+) without$"
        found = re.match(pattern, words)
        assert found is not None, words
        why, drafted, alone = found[1], float(found[2]), float(found[3])
        agrees = {
            "it is faster": drafted > alone,
            "it was slower": drafted < alone,
            "it was no faster": drafted == alone,
            "it was less than 3 % faster": alone < drafted < 1.03 * alone + 0.1,
        }
        assert agrees[why], words


def test_every_change_is_told_with_both_rates() -> None:
    on_off = OnOff(Experience())
    states, told = [on_off.state], []
    for at in range(400):
        tokens = 4.0 if at > 200 else 1.0
        words = (
            on_off.drafted(tokens, 1.6 * ALONE_S, ALONE_S)
            if on_off.drafting
            else on_off.undrafted(ALONE_S, ALONE_S)
        )
        assert (words is not None) == (on_off.state != states[-1])
        if words is not None:
            states.append(on_off.state)
            told.append(words)
    assert {"on", "off", "try"} == {*states}
    assert told[:3] == [
        "drafting stopped because it was slower: 31.2 tokens/s with a draft, 50.0 without",
        "drafting is tested again after 8 rounds without a draft: it was stopped because it was "
        "slower: 31.2 tokens/s with a draft, 50.0 without",
        "drafting was tried (3 rounds) and stopped because it was slower: 31.2 tokens/s with "
        "a draft, 50.0 without",
    ]
    assert (
        told[-1]
        == "drafting resumed because it is faster: 125.0 tokens/s with a draft, 50.0 without"
    )


def test_a_session_begins_as_the_last_change_left_the_pair_and_tries_early() -> None:
    experience = Experience()
    live_through(OnOff(experience), 100, lambda _: 1.0, lambda _: 1.5 * ALONE_S)
    later = OnOff(experience)
    assert later.state == "off"
    said, spent_s, _ = live_through(later, 120, lambda _: 4.0, lambda _: 1.5 * ALONE_S)
    assert later.state == "on"
    assert said * ALONE_S / spent_s > 1.2


def test_a_disaster_is_ended_by_its_first_round() -> None:
    on_off = OnOff(Experience())
    on_off.drafted(1.0, 50 * ALONE_S, ALONE_S)
    assert on_off.state == "off"


def trial_of(
    trial: AheadTrial, rounds: int, without: float, with_: float, seed: int = 1
) -> tuple[int, list[str]]:
    """(rounds ahead, decisions) where a round without and with growth ahead takes so long."""
    rng, ahead, words = random.Random(seed), 0, []
    for _ in range(rounds):
        ahead += trial.ahead
        if (
            decision := trial.drafted(rng.uniform(1.5, 3.0), with_ if trial.ahead else without)
        ) is not None:
            words.append(decision)
    return ahead, words


@pytest.mark.parametrize(
    ("without", "with_", "pays"), [(0.03, 0.024, True), (0.024, 0.03, False), (0.03, 0.03, False)]
)
def test_growing_ahead_on_a_shared_device_is_kept_where_it_is_better(
    without: float, with_: float, pays: bool
) -> None:
    trial = AheadTrial()
    _, words = trial_of(trial, BLOCK * len(TURNS), without, with_)
    assert trial.ahead == pays
    assert len(words) == 1
    assert ("is off because" in words[0]) != pays


def test_what_was_found_out_is_looked_at_again_ever_more_rarely() -> None:
    trial, once = AheadTrial(), BLOCK * len(TURNS)
    ahead, words = trial_of(trial, once + FIRST_PAUSE + once, 0.024, 0.03)
    assert ahead == once
    assert len(words) == 1
    more, words = trial_of(trial, 20 * FIRST_PAUSE, 0.024, 0.03)
    assert more <= 0.02 * 20 * FIRST_PAUSE
    assert words == []


def test_a_change_of_the_machine_is_found() -> None:
    trial = AheadTrial()
    trial_of(trial, BLOCK * len(TURNS), 0.024, 0.03)
    _, words = trial_of(trial, 2 * FIRST_PAUSE, 0.03, 0.02)
    assert trial.ahead
    assert len(words) == 1


def test_drafting_that_lasts_is_forgiven_more() -> None:
    on_off = OnOff(Experience())
    live_through(on_off, LASTING, lambda _: 3.0, lambda _: 1.5 * ALONE_S)
    for _ in range(3):
        on_off.drafted(0.0, 1.5 * ALONE_S, ALONE_S)
    assert on_off.state == "on"
    on_off.drafted(0.0, 1.8 * ALONE_S, ALONE_S)
    assert on_off.state == "off"


def test_a_try_that_has_prompts_read_first_waits_until_its_share_of_time_pays() -> None:
    experience = Experience(losing=True)
    switch, reading_s = OnOff(experience), 40 * ALONE_S
    rounds = 0
    while switch.undrafted(ALONE_S, ALONE_S, before_s=reading_s) is None:
        rounds += 1
    assert rounds == pytest.approx((reading_s / ALONE_S - ALLOWANCE) / TRY_SHARE, rel=0.01)


def test_a_try_among_several_does_not_begin_at_a_price_at_which_nothing_is_drafted() -> None:
    crowd = Crowd()

    def undrafted() -> None:
        while not crowd.on_off.drafting:
            crowd.undrafted(
                ALONE_S, passes_of(ALONE_S), rows=2, context=0.0, before_s=0.0, hope=lambda: 1.0
            )

    undrafted()
    while crowd.on_off.drafting:
        crowd.drafted(1.0, 2 * ALONE_S, ALONE_S, rate=lambda: 0.5 / ALONE_S, among=2)
    crowd.care = MOST_CARE
    undrafted()
    assert crowd.care == CARE_OF_A_TRY
