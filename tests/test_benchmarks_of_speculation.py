"""The parts of tests/benchmarks that judge drafting ahead and tree sizes: sizes that make a ratio,
halves, ratios of bouts, waterfalls, ledgers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ahead, goodput
from benchmarks.adversary import write_adversary
from benchmarks.ahead import MIB, Probe, size_for
from benchmarks.duels import Bout, Share, as_json, bout_of
from benchmarks.ledger import Ledger
from benchmarks.rounds import Waterfall, told
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import RoundRecord
from dovetail.workers.models.loading import load_language_model

BENCHMARKS = Path(__file__).parent / "benchmarks"
REPLY = Share(
    seconds=1.0,
    tokens=60,
    rounds=20,
    exposed_s=0.2,
    verify_s=0.6,
    hit_rate=None,
    grown=300,
    ahead=0,
    wasted=0,
    plain=0,
    rows=320,
)


def reply(**figures: Any) -> Share:
    return replace(REPLY, **figures)


# -- sizes that make a ratio -----------------------------------------------------------------------


def test_the_size_for_a_ratio_lies_on_the_line_through_two_measured_ones() -> None:
    probes = [Probe(64 * MIB, 2.0, 2.0), Probe(256 * MIB, 2.0, 8.0)]
    assert size_for(0.5, probes, 32 * MIB, 1024 * MIB) == 128 * MIB
    assert size_for(0.125, probes, 32 * MIB, 1024 * MIB) == 512 * MIB


def test_drafting_is_averaged_over_the_rounds_that_drafted_and_the_pass_over_all() -> None:
    probe = Probe.of(
        7,
        [
            reply(rounds=20, plain=10, exposed_s=0.2, verify_s=0.6),
            reply(rounds=10, plain=10, exposed_s=0.0, verify_s=0.3),
        ],
    )
    assert (probe.draft_ms, probe.verify_ms) == (pytest.approx(20.0), pytest.approx(30.0))


# -- drafting ahead --------------------------------------------------------------------------------


def pairs(count: int, faster: float, exposed_s: float = 0.02) -> list[Bout]:
    """Bouts in which drafting ahead is so many times as fast."""
    later = reply(seconds=1.0 / faster, exposed_s=exposed_s, hit_rate=0.5, ahead=200, wasted=40)
    return [
        {
            "none": reply(),
            "dynamic waits": reply(exposed_s=0.5, verify_s=0.5),
            "dynamic goes on": later,
        }
        for _ in range(count)
    ]


def test_ahead_is_judged_by_the_figure_for_its_ratio() -> None:
    fast, slow = ahead.judged(pairs(5, 1.4), "dynamic"), ahead.judged(pairs(5, 1.1), "dynamic")
    assert fast["ratio"] == pytest.approx(1.0)
    assert fast["rate"]["median"] == pytest.approx(1.4)
    assert fast["exposed"]["median"] == pytest.approx(0.04)
    assert (fast["hit_rate"], fast["grown"], fast["ahead"], fast["wasted"]) == (
        0.5,
        1500,
        1000,
        200,
    )
    assert (fast["holds"], slow["holds"]) == (True, False)
    assert not ahead.judged(pairs(5, 1.4, exposed_s=0.4), "dynamic")["holds"], (
        "drafting that is still waited for"
    )


# -- sizes that pay --------------------------------------------------------------------------------


def rates(**by_name: float) -> list[Bout]:
    """One bout of replies at these rates."""
    return [
        {
            "none": reply(seconds=60 / 20.0),
            **{name.replace("_", "/"): reply(seconds=60 / rate) for name, rate in by_name.items()},
        }
    ]


def test_the_best_fixed_tree_is_picked_on_one_half_and_judged_on_the_other() -> None:
    even = rates(a=50.0, b=100.0, goodput=90.0, preset=60.0, heterospec=60.0)
    odd = rates(a=80.0, b=40.0, goodput=80.0, preset=60.0, heterospec=100.0)
    found = goodput.judged([even, odd, even, odd], ["a", "b"])
    assert found["picked"] == ["b", "a"]
    assert found["best_fixed"]["median"] == pytest.approx((90 / 50 + 80 / 40) / 2), (
        "even prompts against a, which won the odd ones, and the other way round"
    )
    assert found["preset"]["median"] == pytest.approx((90 / 60 + 80 / 60) / 2)
    assert found["heterospec"]["median"] == pytest.approx((0.9 * 60 / 60 * 100 / 60 + 0.8) / 2)
    assert found["alone"]["median"] == pytest.approx((90 / 20 + 80 / 20) / 2)
    assert found["tokens_per_s"]["goodput"] == pytest.approx(4 * 60 / (2 * 60 / 90 + 2 * 60 / 80))


def test_without_heterospec_and_with_a_prompt_of_no_reply_the_others_are_judged() -> None:
    one = rates(a=50.0, goodput=49.0, preset=60.0)
    found = goodput.judged([one, [], one], ["a"])
    assert "heterospec" not in found
    assert (found["pairs"], found["best_fixed"]["holds"], found["preset"]["holds"]) == (
        2,
        True,
        False,
    )


def test_a_tree_is_no_deeper_than_it_has_nodes() -> None:
    settings = {
        "gammas": (2, 8),
        "depths": (2, 8),
        "widths": (4,),
        "preset": (15, 8, 10),
        "most": (63, 16, 10),
        "no_heterospec": True,
    }
    assert list(goodput.variants(settings)) == ["2/2/4", "8/2/4", "8/8/4", "preset", "goodput"]


def test_the_random_draft_speaks_the_target_s_vocabulary_and_is_sure_of_nonsense(
    tmp_path: Path,
) -> None:
    folder = write_adversary(tmp_path / "draft", DEMO_FOLDER / "target")
    model = load_language_model(str(folder), weights="fp32", device="cpu", backend="library")
    assert (
        model.vocabulary_size
        == json.loads((DEMO_FOLDER / "target" / "config.json").read_text())["vocab_size"]
    )
    assert (folder / "tokenizer.json").read_bytes() == (
        DEMO_FOLDER / "target" / "tokenizer.json"
    ).read_bytes()
    again = write_adversary(tmp_path / "again", DEMO_FOLDER / "target")
    assert (folder / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


# -- waterfalls ------------------------------------------------------------------------------------


def test_the_parts_of_later_rounds_are_held_against_the_time_between_the_records() -> None:
    first = RoundRecord(
        round=1,
        prefix=9,
        tokens=(4,),
        parents=(-1,),
        scores=(-0.1,),
        verified=1,
        accepted=(0,),
        bonus=3,
        verify_ns=10**9,
    )
    later = first.model_copy(
        update={
            "draft_ns": 2_000_000,
            "verify_ns": 6_000_000,
            "transport_ns": 1_000_000,
            "coordinator_ns": 500_000,
        }
    )
    fall = Waterfall.of([1_000_000_000, 1_010_000_000, 1_020_000_000], [first, later, later])
    assert (fall.rounds, fall.tokens, fall.seconds) == (2, 4, pytest.approx(0.02))
    assert fall.explained == pytest.approx(0.95)
    assert fall.reached == pytest.approx(0.9)
    found = told([fall, fall])
    assert (found["tau"], found["round_ms"], found["verify_ms"]) == (
        2.0,
        pytest.approx(10.0),
        pytest.approx(6.0),
    )
    assert (found["explained"]["holds"], found["reached"]["holds"]) == (False, False)
    whole = replace(fall, parts={**fall.parts, "verify_ns": 0.0134})
    assert (told([whole])["explained"]["holds"], told([whole])["reached"]["holds"]) == (True, True)


# -- ledgers ---------------------------------------------------------------------------------------


def test_a_run_that_was_interrupted_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, {"pairs": 2, "tree": (1, 2)})
    ledger.add("a", as_json({"none": REPLY}))
    with path.open("a") as file:
        file.write('{"name": "b", "fo')
    ledger = Ledger(path, {"pairs": 2, "tree": (1, 2)})
    assert ("a" in ledger, "b" in ledger) == (True, False)
    assert bout_of(ledger.found["a"]) == {"none": REPLY}
    ledger.add("b", 5)
    assert Ledger(path, {"pairs": 2, "tree": (1, 2)}).found["b"] == 5


def test_a_ledger_of_other_settings_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path, {"pairs": 2}).add("a", 1)
    before = path.read_text()
    with pytest.raises(UserError, match="another measurement"):
        Ledger(path, {"pairs": 3})
    assert path.read_text() == before


# -- the commands ----------------------------------------------------------------------------------
