"""The pure parts of a profile, on made-up time lines, rounds and machines."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file

from dovetail.launch.machine.cores import lay_out
from dovetail.launch.machine.topology import read_topology
from dovetail.launch.profiling import pictures, report, rounds, tables, timeline
from dovetail.launch.profiling.advice import advise
from dovetail.launch.profiling.bounds import (
    Bounds,
    Model,
    Offloading,
    Pass,
    Roofline,
    linears_of,
    read_model,
)
from dovetail.launch.profiling.drawing import COLOURS, HATCHED, gantt, stacked
from dovetail.launch.profiling.findings import find
from dovetail.launch.profiling.forecast import Forecast, Offer, Prices, Tree, offers_of, prices_of
from dovetail.launch.profiling.rounds import Waterfall
from dovetail.launch.profiling.samplers import (
    Absent,
    Gpu,
    Nvml,
    Rapl,
    Sample,
    Samplers,
    busy_cores,
    energy_j,
    node_memory,
)
from dovetail.launch.profiling.situation import Card, Elsewhere, Situation
from dovetail.launch.profiling.stages import other_nodes
from dovetail.launch.profiling.timeline import Actor, Slice
from dovetail.launch.profiling.watching import Watch
from dovetail.launch.profiling.workload import Soundings
from dovetail.protocol.calibration import MachineLimits
from dovetail.protocol.experts import Routing
from dovetail.protocol.messages import RoundRecord, Seen, SeenRound, SeenWorker
from dovetail.protocol.settings import TargetSettings
from dovetail.runtime.costs.passes import RowCosts
from support.cases import everyday
from support.profiled import made_up_run, with_experts
from support.sysfs import ONE_NODE, SPARSE, TWO_SOCKETS, WITH_CXL, FakeNode, write_machine

TARGET, DRAFT, COORDINATOR = (
    Actor("target", ("target",)),
    Actor("draft", ("draft",)),
    Actor("coordinator", ("coordinator",)),
)
ACTORS = (TARGET, DRAFT, COORDINATOR)
MS = 1_000_000


def piece(
    process: str,
    name: str,
    start_ms: float,
    end_ms: float,
    session: int | None = 1,
    round: int | None = 1,
) -> Slice:
    return Slice(process, name, int(start_ms * MS), int(end_ms * MS), session, round)


# a round of 10 ms: drafting, the message, verification; then nothing for 5 ms
ROUND = [
    piece("draft", "draft", 0, 3),
    piece("draft", "level", 1, 3),
    piece("coordinator", "link", 3, 4),
    piece("target", "verify", 4, 9),
    piece("target", "linears", 4, 8),
    piece("draft", "grow", 5, 8),
    piece("coordinator", "handle", 9, 10),
]


# -- the time line ---------------------------------------------------------------------------------


def test_a_device_is_busy_or_waits_for_whoever_works_and_it_adds_up_to_the_whole() -> None:
    uses = timeline.uses(ROUND, ACTORS, 0, 15 * MS)
    target, draft, coordinator = (uses[actor.name] for actor in ACTORS)
    assert target.busy_s == pytest.approx(5e-3)
    assert dict(target.waiting_s) == pytest.approx(
        {"draft": 3e-3, "transport": 1e-3, "coordinator": 1e-3, "no work": 5e-3}
    )
    assert (draft.busy_s, draft.ahead_s) == pytest.approx((6e-3, 3e-3))
    assert dict(draft.waiting_s) == pytest.approx(
        {"target": 2e-3, "transport": 1e-3, "coordinator": 1e-3, "no work": 5e-3}
    )
    assert dict(coordinator.waiting_s) == pytest.approx(
        {"draft": 3e-3, "target": 5e-3, "transport": 1e-3, "no work": 5e-3}
    )
    assert all(use.whole_s == pytest.approx(15e-3) for use in uses.values())
    assert target.by_name_s["linears"] == pytest.approx(4e-3)


def test_the_sweep_finds_what_looking_at_every_moment_finds() -> None:
    random = Random(3)
    for _ in range(20):
        slices = []
        for _ in range(40):
            start = random.randrange(200)
            name = random.choice(["verify", "draft", "grow", "handle", "link", "queue"])
            slices.append(
                piece(
                    random.choice(["target", "draft", "coordinator"]),
                    name,
                    start,
                    start + random.randrange(1, 30),
                    random.choice([1, 2, None]),
                )
            )
        uses = timeline.uses(slices, ACTORS, 20 * MS, 180 * MS)
        for actor in ACTORS:
            moments = [
                moment
                for moment in range(20, 180)
                if any(
                    p.process == actor.name and p.works and p.start_ns <= moment * MS < p.end_ns
                    for p in slices
                )
            ]
            assert uses[actor.name].busy_s == pytest.approx(len(moments) / 1e3)
            assert uses[actor.name].whole_s == pytest.approx(0.16)


def test_growth_ahead_is_nothing_that_the_target_waits_for() -> None:
    uses = timeline.uses(
        [piece("draft", "grow", 0, 10), piece("coordinator", "handle", 0, 2)], ACTORS, 0, 10 * MS
    )
    assert dict(uses["target"].waiting_s) == pytest.approx({"coordinator": 2e-3, "transport": 8e-3})


def test_busy_shares_over_time_add_up_to_the_busy_time() -> None:
    shares = timeline.shares_over_time(ROUND, "target", 0, 15 * MS, 7)
    assert sum(shares) * 15e-3 / 7 == pytest.approx(5e-3)
    assert max(shares) <= 1.0


def record(number: int, **fields: object) -> RoundRecord:
    empty = {
        "prefix": 10,
        "tokens": (),
        "parents": (),
        "scores": (),
        "verified": 0,
        "accepted": (),
        "bonus": 1,
    }
    return RoundRecord(**{"round": number, **empty, **fields})  # type: ignore[arg-type]


def seen(number: int, at_ms: float, session: int = 1, **fields: object) -> SeenRound:
    return SeenRound(
        number=number,
        session=session,
        target="target",
        at_ns=int(at_ms * MS),
        record=record(number, **fields),
    )


def test_the_parts_of_a_round_are_means_and_what_is_left_over_is_told() -> None:
    parts = {"draft_ns": 3 * MS, "verify_ns": 5 * MS, "transport_ns": MS, "coordinator_ns": MS // 2}
    split = rounds.split_of(
        [seen(1, 0, **parts), seen(2, 10, **parts), seen(3, 20, **parts), seen(7, 100, **parts)]
    )
    assert split is not None
    assert (split.rounds, split.wall_s) == (2, pytest.approx(10e-3))
    assert split.unaccounted_share == pytest.approx(0.05)
    assert rounds.split_of([seen(1, 0)]) is None


def test_the_mean_round_has_the_mean_bars() -> None:
    later = [
        Slice(
            p.process,
            p.name,
            p.start_ns + 10 * MS,
            p.end_ns + 10 * MS + (MS if p.name == "verify" else 0),
            1,
            2,
        )
        for p in ROUND
    ]
    every = rounds.every_round([seen(1, 0), seen(2, 10), seen(3, 21)], [*ROUND, *later])
    assert [fall.length_s for fall in every] == pytest.approx([10e-3, 11e-3])
    mean = rounds.mean_of(every)
    verify = next(bar for bar in mean.bars if bar.name == "verify")
    assert (verify.start_s, verify.length_s) == pytest.approx((4e-3, 5.5e-3))
    assert rounds.telling(every, alone=True)[0].title == "the mean of 2 rounds"


def test_sessions_that_ran_side_by_side_are_told_from_those_that_took_turns() -> None:
    assert timeline.one_by_one(
        [seen(1, 0), seen(2, 10), seen(1, 12, session=2), seen(2, 20, session=2)]
    )
    assert not timeline.one_by_one(
        [seen(1, 0), seen(2, 15), seen(1, 12, session=2), seen(2, 20, session=2)]
    )


def test_a_bubble_lies_where_neither_draft_nor_target_works() -> None:
    every = rounds.every_round([seen(1, 0), seen(2, 10)], ROUND)
    assert [
        (b.after, b.before, round(b.seconds * 1e3, 6))
        for b in rounds.bubbles(every, ["draft", "target"])
    ] == [
        ("draft", "verify", 1.0),
        ("verify", "verdict", 1.0),
    ]


# -- bounds ----------------------------------------------------------------------------------------

LIMITS = MachineLimits(
    bandwidth_gb_s=20.0, peak_gflop_s={"fp32": 100.0, "int8": 400.0}, probe="made up"
)
MODEL = Model(100_000_000, "fp32")


def test_a_pass_is_bound_by_memory_below_the_crossover_and_by_arithmetic_above() -> None:
    roofline = Roofline(MODEL, LIMITS)
    assert roofline.least.whole_s == pytest.approx(0.02)
    assert roofline.crossover == pytest.approx(10.0)
    bound = [Pass.of(roofline, rows, 0.05).bound for rows in (1, 10, 16)]
    assert bound == ["memory", "both", "compute"]
    measured = Pass.of(
        roofline, 5, 0.025
    )  # reading 20 ms, arithmetic 10 ms: half of the shorter one is not hidden
    assert (measured.efficiency, measured.overlap) == pytest.approx((0.8, 0.5))


def test_weights_of_a_smaller_type_are_read_faster_and_multiplied_by_their_own_arithmetic() -> None:
    half, int8 = (Roofline(MODEL.with_weights(weights), LIMITS) for weights in ("half", "int8"))
    assert (half.least.whole_s, half.peak_gflop_s) == (pytest.approx(0.01), 100.0)
    assert (int8.least.whole_s, int8.peak_gflop_s) == (pytest.approx(0.005), 400.0)


def test_the_bounds_of_a_run() -> None:
    bounds = Bounds(
        tau=4.0,
        t_v_s=0.025,
        alone_s=0.021,
        round_s=0.035,
        drafting_s=0.015,
        exposed_s=0.008,
    )
    assert bounds.speedup == pytest.approx(4.0 * 0.021 / 0.035)
    assert bounds.most_speedup == pytest.approx(4.0 * 0.021 / 0.025)
    assert bounds.most_overlap_gain == pytest.approx(1.6)
    assert bounds.overlap_gain == pytest.approx(0.040 / 0.033)
    assert bounds.speedup < bounds.most_speedup


def test_offloading_wins_where_the_bus_carries_the_weights_faster_than_a_token_takes() -> None:
    bounds = Bounds(
        tau=4.0,
        t_v_s=0.025,
        alone_s=0.021,
        round_s=0.04,
        drafting_s=0.015,
        exposed_s=0.008,
    )
    slow, fast, none = (Offloading.of(MODEL, bounds, bus) for bus in (16.0, 64.0, None))
    assert slow.needed_gb_s == pytest.approx(40.0)  # 0.4 GB in 10 ms a token
    assert slow.needed_with_tree_gb_s == pytest.approx(16.0)
    assert (slow.right, fast.right, none.right) == (True, False, None)
    assert "40.0 GB/s" in none.in_words()


def test_the_weights_of_a_model_are_counted_from_its_headers(tmp_path: Path) -> None:
    tied = {
        "model.embed_tokens.weight": np.zeros((10, 4), np.float16),
        "model.layers.0.mlp.up_proj.weight": np.zeros((8, 4), np.float16),
        "norm": np.zeros(4),
    }
    save_file(tied, str(tmp_path / "model.safetensors"))
    found = linears_of(tmp_path, "half")
    assert found is not None
    assert found.parameters == 10 * 4 + 8 * 4
    save_file(
        {**tied, "lm_head.weight": np.zeros((10, 4), np.float16)},
        str(tmp_path / "model.safetensors"),
    )
    found = linears_of(tmp_path, "half")
    assert found is not None
    assert found.parameters == 10 * 4 + 8 * 4
    assert read_model(tmp_path, "half", "") == Model(72, "half")
    assert read_model(None, "fp32", "512MiB") == Model(134_217_728, "fp32")
    assert read_model(None, "fp32", "") is None


@pytest.mark.parametrize("form", ["each", "stacked", "mxfp4"])
def test_experts_are_counted_in_every_form_and_apart(form: str, tmp_path: Path) -> None:
    """Eight experts of 6 by 4, of which a row goes through two, beside a linear of 8 by 4."""
    name = "model.layers.0.mlp.experts"
    experts: dict[str, Any] = {
        "each": {
            f"{name}.{expert}.down_proj.weight": np.zeros((6, 4), np.float16) for expert in range(8)
        },
        "stacked": {f"{name}.down_proj": np.zeros((8, 6, 4), np.float16)},
        "mxfp4": {
            f"{name}.down_proj_blocks": np.zeros((8, 6, 1, 2), np.uint8),
            f"{name}.down_proj_scales": np.zeros((8, 6, 1), np.uint8),
            f"{name}.down_proj_bias": np.zeros((8, 6), np.float16),
        },
    }[form]
    shared = {"model.layers.0.mlp.shared_experts.up_proj.weight": np.zeros((8, 4), np.float16)}
    save_file({**experts, **shared}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text('{"num_local_experts": 8, "num_experts_per_tok": 2}')
    found = linears_of(tmp_path, "int8")
    assert found is not None
    assert (found.parameters, found.active) == (8 * 24 + 32, 2 * 24 + 32)
    assert found.bytes_read(1) == pytest.approx(found.active)
    assert found.bytes_read(1000) == pytest.approx(found.parameters)


# -- advice ----------------------------------------------------------------------------------------


def chain(number: int, levels: int, accepted: int, *, hit: bool = False) -> RoundRecord:
    """A round whose tree is a chain, of which the target took the first nodes; a level of the draft
    takes 1 ms."""
    fields = {
        "tokens": tuple(range(levels)),
        "parents": tuple(range(-1, levels - 1)),
        "scores": tuple(-0.1 * level for level in range(1, levels + 1)),
    }
    passes = tuple((1, MS) for _ in range(levels))
    return record(
        number,
        **fields,
        verified=levels,
        accepted=tuple(range(accepted)),
        passes=passes,
        draft_ns=(levels + 1) * MS,
        verify_ns=20 * MS,
        hit=hit,
    )


def flat(rows: int) -> float:
    """T_V: 20 ms up to 8 rows, then 2 ms a row."""
    return 0.020 + 0.002 * max(0, rows - 8)


PRICES = Prices(flat, drafted_s=0.001, undrafted_s=0.001)
PLAIN = Situation("dynamic", False, "small", False, True, "fp32", True, 1, 0)


def forecast(rounds: list[RoundRecord]) -> Forecast:
    return Forecast(offers_of([rounds]), PRICES, tree=Tree(12, 12), width=1, ahead=False)


def test_a_smaller_tree_brings_what_the_beginning_of_the_larger_one_brought() -> None:
    found = forecast(
        [chain(number, 12, accepted) for number, accepted in enumerate((0, 2, 5, 12, 3, 0))]
    )
    kept = [min(6, accepted) for accepted in (0, 2, 5, 12, 3)]
    outcome = found.of(Tree(6, 12))
    assert outcome.tokens == pytest.approx(1 + sum(kept) / 5)
    assert outcome.seconds == pytest.approx(0.013 + flat(7) + 0.001)
    levels = found.of(Tree(12, 4))
    assert levels.tokens == pytest.approx(
        1 + sum(min(4, accepted) for accepted in (0, 2, 5, 12, 3)) / 5
    )
    assert levels.seconds == pytest.approx(0.005 + flat(5) + 0.001)


def test_levels_that_are_left_out_make_room_for_nodes_that_cost_and_of_which_nothing_is_hoped() -> (
    None
):
    rounds = [chain(number, 12, accepted) for number, accepted in enumerate((0, 2, 5, 12, 3, 0))]
    found = Forecast(offers_of([rounds]), PRICES, tree=Tree(12, 12), width=2, ahead=False)
    assert (
        found.of(Tree(12, 3)).rows == 1 + 2 + 2 * 4
    )  # two children of the root, and twice two of each of two nodes
    assert found.of(Tree(12, 3)).tokens == forecast(rounds).of(Tree(12, 3)).tokens
    assert found.of(Tree(5, 3)).rows == 6
    assert found.of(Tree(12, 12)).rows == 13
    assert (
        Forecast(offers_of([rounds]), PRICES, tree=Tree(12, 12), ahead=False).of(Tree(12, 3)).rows
        == 13
    ), "no width is known"


def test_a_replayed_tree_is_the_one_that_a_slow_look_at_its_nodes_finds() -> None:
    random = Random(1)
    for _ in range(50):
        count = random.randrange(1, 20)
        parents = tuple(random.randrange(-1, node) for node in range(count))
        node, path = -1, list[int]()
        while children := [child for child, parent in enumerate(parents) if parent == node]:
            node = random.choice(children)
            path.append(node)
        accepted = tuple(path[: random.randrange(len(path) + 1)])
        offer = Offer.of(
            record(
                1,
                tokens=parents and tuple(range(count)),
                parents=parents,
                scores=(0.0,) * count,
                verified=count,
                accepted=accepted,
            ),
            False,
        )
        tree = Tree(random.randrange(1, 20), random.randrange(1, 8))

        def level(node: int, parents: tuple[int, ...] = parents) -> int:
            return 1 if parents[node] == -1 else 1 + level(parents[node])

        slow = [node for node in range(count) if level(node) <= tree.depth][: tree.gamma]
        assert offer.kept(tree) == slow
        brought = 0
        for node in accepted:
            if node not in slow:
                break
            brought += 1
        assert offer.brings(slow) == brought


def test_a_draft_that_is_mostly_wrong_is_advised_to_draft_less_or_not_at_all() -> None:
    found = advise(
        forecast([chain(number, 12, int(number % 8 == 0)) for number in range(40)]), PLAIN
    )
    by_name = {advice.name: advice for advice in reversed(found)}
    assert by_name["alone"].gain > 1.2
    assert by_name["levels"].flags == ("--tree.depth=1",)
    assert all(
        one.gain >= other.gain
        for one, other in pairwise(found)
        if (one.worth, one.certain, one.same) == (other.worth, other.certain, other.same)
    )


def test_a_draft_that_is_always_right_is_kept_and_drafting_ahead_hides_it() -> None:
    rounds = [chain(number, 12, 12, hit=True) for number in range(10)]
    by_name = {advice.name: advice for advice in advise(forecast(rounds), PLAIN)}
    assert by_name["alone"].gain < 0.5
    assert not by_name["alone"].tells, "nobody is advised to do what is slower"
    whole = 0.013 + flat(13) + 0.001
    assert by_name["ahead"].gain == pytest.approx(whole / (flat(13) + 0.001))
    assert by_name["ahead"].flags == ("--draft.ahead=true",)


def test_goodput_is_worth_at_least_the_best_tree_of_one_size_where_the_scores_tell() -> None:
    random = Random(2)
    sure = [chain(number, 12, 12 if random.random() < 0.5 else 0) for number in range(60)]
    told = [
        r.model_copy(
            update={
                "scores": tuple((-0.01 if r.accepted else -3.0) * level for level in range(1, 13))
            }
        )
        for r in sure
    ]
    found = forecast(told)
    best = max(found.of(Tree(gamma, 12)).rate for gamma in range(1, 13))
    assert found.goodput(12).rate >= best


def test_more_threads_and_smaller_weights_gain_what_the_hardware_allows() -> None:
    twice = MachineLimits(
        bandwidth_gb_s=40.0, peak_gflop_s={"fp32": 200.0, "int8": 800.0}, probe="made up"
    )
    situation = Situation(
        "dynamic",
        False,
        "small",
        False,
        False,
        "fp32",
        True,
        1,
        1,
        Roofline(MODEL, LIMITS),
        Roofline(MODEL, twice),
    )
    by_flags = {
        advice.flags: advice
        for advice in advise(Forecast([], PRICES, tree=Tree(0, 0), ahead=False), situation)
    }
    assert by_flags[("--target.threads=2",)].gain == pytest.approx(0.021 / 0.011)
    half = ("--target.weights=half", "--target.cache=fp32")
    assert by_flags[half].gain == pytest.approx(0.021 / 0.011)
    assert by_flags[("--target.weights=int8",)].gain == pytest.approx(0.021 / 0.006)


def test_other_memory_nodes_gain_what_their_cores_and_memory_allow() -> None:
    faster = MachineLimits(bandwidth_gb_s=30.0, peak_gflop_s={"fp32": 150.0}, probe="made up")
    elsewhere = (Elsewhere("on the best node", ("--target.numa=auto",), Roofline(MODEL, faster)),)
    situation = replace(PLAIN, roofline=Roofline(MODEL, LIMITS), elsewhere=elsewhere)
    (advice,) = [
        one
        for one in advise(forecast([chain(number, 12, 6) for number in range(5)]), situation)
        if one.name == "placement"
    ]
    assert advice.flags == ("--target.numa=auto",)
    assert advice.gain == pytest.approx(
        (0.013 + flat(13) + 0.001) / (0.013 + flat(13) / 1.5 + 0.001)
    )


@pytest.mark.parametrize(
    ("nodes", "numa", "expected"),
    [
        (ONE_NODE, "auto", {}),
        (TWO_SOCKETS, "auto", {"0-1": (0, 1), "shard": (0, 1)}),
        (TWO_SOCKETS, "shard", {"auto": (0,), "0-1": (0, 1)}),
        (TWO_SOCKETS, "off", {"auto": (0,), "0-1": (0, 1), "shard": (0, 1)}),
        (SPARSE, "0", {"auto": (8,), "0,8": (0, 8), "shard": (0, 8)}),
        (WITH_CXL, "1", {"auto": (0,), "0-1": (0, 1), "shard": (0, 1)}),
    ],
    ids=["one", "two", "two, spread", "two, off", "the smaller one", "with memory alone"],
)
def test_on_several_memory_nodes_the_best_one_and_all_of_them_are_looked_at(
    tmp_path: Path, nodes: dict[int, FakeNode], numa: str, expected: dict[str, tuple[int, ...]]
) -> None:
    machine = read_topology(write_machine(tmp_path, nodes), affinity=range(128))
    now = lay_out(machine, numa=numa).target
    found = other_nodes(machine, TargetSettings(numa=numa), now)
    assert {name: place.nodes for name, place in found.items()} == expected
    assert other_nodes(machine, TargetSettings(numa=numa, threads=99), now) == {}


def test_a_card_takes_as_many_layers_as_fit_and_streams_the_others_where_its_slot_is_faster() -> (
    None
):
    rounds = forecast([chain(number, 12, 6) for number in range(5)])
    here = replace(PLAIN, layers=10, weight_bytes=10 << 30)

    def placed(card: Card) -> dict[tuple[str, ...], float]:
        return {
            one.flags: one.gain
            for one in advise(rounds, replace(here, card=card))
            if one.name == "placement"
        }

    whole = 0.013 + flat(13) + 0.001
    assert placed(Card("cuda:0", "Card", 12 << 30, 16.0)) == {
        ("--target.device=cuda:0",): pytest.approx(whole / 0.014)
    }
    found = placed(Card("cuda:0", "Card", 5 << 30, 1000.0))
    assert found["--target.split.device=cuda:0", "--target.split.layers=4"] == pytest.approx(
        whole / (0.014 + 0.6 * flat(13))
    )
    streamed = found[
        "--target.split.device=cuda:0", "--target.split.layers=10", "--target.resident=4"
    ]
    assert streamed == pytest.approx(whole / (0.014 + 6 * (1 << 30) / 1000e9))
    assert len(placed(Card("cuda:0", "Card", 0, None))) == 0
    assert not any(
        one.certain
        for one in advise(rounds, replace(here, card=Card("cuda:0", "Card", 5 << 30, 16.0)))
        if one.name == "placement"
    )


def test_waiting_for_workers_that_serve_others_grows_with_the_rest_of_a_round() -> None:
    rounds = [
        chain(number, 12, 6).model_copy(update={"queue_ns": 17 * MS, "transport_ns": MS})
        for number in range(5)
    ]
    costs = RowCosts()
    for rows in (1, 13, 26):
        costs.observe(rows, 0.020)
    prices = prices_of(rounds, [], costs, 2.0)
    assert prices.waiting == pytest.approx(17 / (13 + 20 + 1))
    found = Forecast(offers_of([rounds]), prices, tree=Tree(12, 12), width=1, ahead=False)
    assert found.now.seconds == pytest.approx((0.013 + prices.verify_s(13) + 0.001) * 1.5)
    assert found.alone.seconds == pytest.approx((prices.verify_s(1) + 0.0005) * 1.5)


def test_the_measured_wait_for_the_draft_outweighs_the_guessed_one() -> None:
    rounds = [chain(number, 12, 6) for number in range(5)]
    twice = Forecast(
        offers_of([rounds]), PRICES, exposed_s=0.026, tree=Tree(12, 12), width=1, ahead=False
    )
    assert twice.now.seconds == pytest.approx(0.026 + flat(13) + 0.001)
    assert twice.of(Tree(12, 6)).seconds == pytest.approx(0.014 + flat(7) + 0.001)


def test_what_waiting_for_the_draft_costs_is_that_of_rounds_that_waited_and_hits_are_those_of_the_run() -> (  # noqa: E501
    None
):
    """The trees that larger ones are judged by are drafted without going ahead: they say what
    waiting costs, and nothing of how often a run foresees."""
    rounds = [chain(number, 12, 6, hit=number % 10 == 0) for number in range(41)]
    ran = Forecast(
        offers_of([rounds]),
        PRICES,
        exposed_s=0.003,
        tree=Tree(12, 12),
        width=1,
        ahead=True,
        hit_rate=0.9,
        alone_from="somehow",
    )
    assert ran.exposed_s == pytest.approx(0.003)
    assert ran.in_turn_s == pytest.approx(0.013)
    assert ran.of(Tree(12, 12), ahead=False).seconds == pytest.approx(0.013 + flat(13) + 0.001)
    by_name = {advice.name: advice for advice in advise(ran, PLAIN)}
    assert by_name["ahead"].gain == pytest.approx(
        (0.003 + flat(13) + 0.001) / (0.013 + flat(13) + 0.001)
    )
    assert "90%" in by_name["ahead"].basis
    assert by_name["alone"].basis == "the target alone: somehow"


def test_rounds_whose_drafting_was_done_ahead_do_not_say_what_it_costs() -> None:
    begun = [
        chain(number, 12, 6, hit=True).model_copy(update={"ahead": 8, "draft_ns": MS, "passes": ()})
        for number in range(1, 9)
    ]
    waited = [chain(number, 12, 6) for number in range(9, 12)]
    found = Forecast(
        offers_of([[*begun, *waited]]),
        PRICES,
        exposed_s=0.004,
        tree=Tree(12, 12),
        width=1,
        ahead=True,
        hit_rate=0.8,
    )
    assert found.in_turn_s == pytest.approx(0.013)


# -- samplers --------------------------------------------------------------------------------------


def rapl(root: Path, zone: str, name: str, value: int, most: int = 1_000_000) -> None:
    folder = root / "sys/class/powercap" / zone
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (
        ("name", name),
        ("energy_uj", str(value)),
        ("max_energy_range_uj", str(most)),
    ):
        (folder / file).write_text(f"{content}\n")


def test_the_energy_of_packages_and_their_memory_is_counted_across_a_wrap(tmp_path: Path) -> None:
    rapl(tmp_path, "intel-rapl:0", "package-0", 900_000)
    rapl(tmp_path, "intel-rapl:0:0", "core", 5)
    rapl(tmp_path, "intel-rapl:0:1", "dram", 100)
    counter = Rapl(tmp_path)
    rapl(tmp_path, "intel-rapl:0", "package-0", 400_000)
    rapl(tmp_path, "intel-rapl:0:1", "dram", 300_100)
    assert counter.read() == pytest.approx({"package-0": 0.5, "package-0 dram": 0.3})


def test_what_is_not_there_says_why_and_is_never_zero(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="no /sys/class/powercap"):
        Rapl(tmp_path)
    samplers = Samplers(root=tmp_path)
    assert {name for name in samplers.absent if "RAPL" in name}
    one, two = samplers.take(), samplers.take()
    assert energy_j(one, two) == {}
    assert busy_cores(one, two, [4096]) is None


NVML = """
from types import SimpleNamespace as Told
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return "Card"
def nvmlDeviceGetUtilizationRates(handle): {busy}
def nvmlDeviceGetMemoryInfo(handle): return Told(used=3 << 30, total=8 << 30)
def nvmlDeviceGetTotalEnergyConsumption(handle): {energy}
def nvmlDeviceGetMaxPcieLinkGeneration(handle): return 4
def nvmlDeviceGetMaxPcieLinkWidth(handle): return 16
"""
"""A stand-in for NVIDIA's library (nvidia-ml-py) with the functions that are called."""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a module that is found before all others, here and by processes that are started."""

    def write(name: str, content: str) -> None:
        (tmp_path / f"{name}.py").write_text(content, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


@pytest.mark.parametrize(
    ("energy", "joules"), [("return 5000", 5.0), ("raise NVMLError('not supported')", None)]
)
def test_a_card_of_nvidia_says_what_it_does_and_what_it_does_not_tell_is_none(
    library: Callable[[str, str], None], energy: str, joules: float | None
) -> None:
    library("pynvml", NVML.format(busy="return Told(gpu=40)", energy=energy))
    assert Nvml().read() == {
        "cuda:0": Gpu("Card", 0.4, 3 << 30, 8 << 30, joules, pytest.approx(1.969 * 16))
    }


def test_a_card_that_does_not_say_how_busy_it_is_is_absent_with_the_reason(
    library: Callable[[str, str], None],
) -> None:
    library("pynvml", NVML.format(busy="raise NVMLError('a part of a card')", energy="return 0"))
    with pytest.raises(Absent, match="does not tell how busy the card is: a part of a card"):
        Nvml()


def test_busy_shares_are_of_the_time_between_two_samples() -> None:
    def sample(at_ns: int, busy: float, whole: float) -> Sample:
        return Sample(at_ns, {0: (busy, whole), 1: (0.0, whole)}, {}, {}, {}, {})

    one, two = sample(0, 10.0, 100.0), sample(10**9, 11.5, 102.0)
    assert busy_cores(one, two, [0]) == pytest.approx(0.75)
    assert busy_cores(one, two, [0, 1]) == pytest.approx(0.375)


def test_memory_in_use_is_told_node_by_node(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/node/node1"
    folder.mkdir(parents=True)
    (folder / "meminfo").write_text(
        "Node 1 MemTotal:       1000 kB\nNode 1 MemFree:         400 kB\n"
    )
    assert node_memory(tmp_path) == {1: 600 * 1024}


# -- pictures --------------------------------------------------------------------------------------


def test_pictures_are_svg_that_says_what_every_bar_is() -> None:
    (fall,) = rounds.every_round([seen(1, 0), seen(2, 10)], ROUND)
    for svg in (
        gantt(fall, ["coordinator", "draft", "target"]),
        stacked("devices", {"target": [("busy", "target", 0.5), ("waits: draft", "idle", 0.5)]}),
    ):
        root = ElementTree.fromstring(svg)
        told = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
        assert any(words.startswith(("verify: 5.000 ms", "busy: 50.0%")) for words in told)
    assert gantt(Waterfall("empty", 0.0, ()), [])


def test_every_colour_of_a_picture_has_one_that_takes_its_place_on_a_dark_page() -> None:
    parts = [(name, name, 0.1) for name in (*COLOURS, *HATCHED)]
    svg = stacked("devices", {"target": parts})
    style = " ".join(re.findall(r"<style>@media \(prefers-color-scheme:dark\)(.*?)</style>", svg))
    drawn = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)
    styled = re.findall(r"(fill|stroke): (#[0-9a-f]{6})", drawn)
    given = re.findall(r'(fill|stroke)="(#[0-9a-f]{6})"', drawn)
    assert styled
    assert given, "the grounds of hatches"
    assert all(f'[style*="{kind}: {colour}"]' in style for kind, colour in styled)
    assert all(f'[{kind}="{colour}"]' in style for kind, colour in given)


def test_every_name_of_a_span_has_a_colour_and_the_records_are_json() -> None:
    from dovetail.launch.profiling.drawing import OF_SPAN
    from dovetail.protocol.spans import NAMES

    assert set(OF_SPAN) <= set(NAMES)
    assert set(OF_SPAN.values()) <= set(COLOURS)
    assert (
        json.loads(json.dumps(Pass.of(Roofline(MODEL, LIMITS), 3, 0.03).as_json()))["bound"]
        == "memory"
    )


# -- all of it -------------------------------------------------------------------------------------


def test_a_made_up_run_comes_to_figures_that_agree_with_each_other() -> None:
    told = find(made_up_run()).told
    for device in told["devices"].values():
        assert device["busy"] + sum(device["waiting"].values()) == pytest.approx(1.0)
        assert device["idle"] == pytest.approx(1.0 - device["busy"])
    assert told["devices"]["target"]["waiting"]["draft"] > 0.15
    assert told["devices"]["draft"]["waiting"]["target"] > 0.2
    assert told["devices"]["target"]["sampled"]["process"] == pytest.approx(0.66)
    assert told["devices"]["target"]["sampled"]["cores"] == pytest.approx(0.7)
    assert told["nodes"]["0"]["busy"] == pytest.approx(0.625)
    assert abs(told["unaccounted_share"]) < 0.02
    assert told["bounds"]["speedup"] < told["bounds"]["most_speedup"]
    assert told["bounds"]["pass"]["bound"] == "compute"
    assert told["energy"] == {"joules": {}, "joules_per_token": None}
    advice = {one["name"]: one for one in told["verdict"]["advice"]}
    assert advice["ahead"]["gain"] > 1.05
    assert all(one["gain"] > 1.0 for one in advice.values())
    json.dumps(told)


def test_the_verdict_and_the_advice_speak_of_one_rate_of_the_target_alone() -> None:
    told = find(made_up_run()).told
    alone = next(one for one in told["verdict"]["no_gain"] if one["name"] == "alone")
    assert alone["gain"] == pytest.approx(1.0 / told["bounds"]["speedup"])
    assert told["bounds"]["alone_from"] == "measured in 8 rounds without a draft"
    words = " ".join(told["verdict"]["in_words"])
    assert (
        f"{told['bounds']['speedup']:.2f} times as fast as the target alone "
        f"({1 / told['bounds']['alone_s']:.1f} tokens/s, measured in 8 rounds" in words
    )


def test_the_experts_of_passes_are_told_beside_those_of_rows_that_choose_independently() -> None:
    run = made_up_run()
    assert find(run).told["experts"] is None
    routed = with_experts(run, row=24, drafted=120)
    told = find(routed).told
    independent = Routing(row=24, most=384).unique(16)
    assert told["experts"]["a_pass"] == 120
    assert (told["experts"]["row"], told["experts"]["most"]) == (24, 384)
    assert told["experts"]["independent"] == pytest.approx(independent)
    words = "goes through 120 of the 384 experts of all layers"
    assert any(words in sentence for sentence in told["verdict"]["in_words"])


def test_tokens_and_tau_are_those_of_the_reply_where_it_ended_within_a_path() -> None:
    run = made_up_run()
    whole = find(run).told
    last = run.rounds[-1].record
    cut = run.rounds[-1].model_copy(update={"record": last.model_copy(update={"committed": 0})})
    told = find(replace(run, rounds=[*run.rounds[:-1], cut])).told
    assert whole["tokens"] == 1 + sum(len(seen.record.accepted) + 1 for seen in run.rounds), (
        "the first one came with the prompt"
    )
    assert whole["tau"] == pytest.approx((whole["tokens"] - 1) / 40)
    assert whole["tokens"] - told["tokens"] == len(last.accepted) + 1


def test_the_curve_over_gamma_goes_through_what_the_run_had() -> None:
    told = find(made_up_run()).told
    curves, run = told["curves"], told["curves"]["run"]
    assert (run["gamma"], run["speedup"], run["tau"]) == (
        15,
        told["bounds"]["speedup"],
        told["tau"],
    )
    assert curves["speedup_by_gamma"]["15"] == pytest.approx(run["speedup"])
    assert curves["tau_by_gamma"]["15"] == pytest.approx(run["tau"])
    assert curves["speedup_by_gamma"]["0"] == 1.0
    best = next(one for one in told["verdict"]["advice"] if one["name"] == "tree")
    assert all(
        gain <= best["gain"] * run["speedup"] * 1.001
        for gain in curves["speedup_by_gamma"].values()
    )


def test_programs_that_take_the_cores_are_named_first_and_the_hardware_is_not_judged() -> None:
    run = made_up_run()
    busy = [
        replace(sample, cores={core: (every, every) for core, (_, every) in sample.cores.items()})
        for sample in run.samples
    ]
    told = find(replace(run, samples=busy)).told
    assert told["other_programs"] == {
        "cores": "0-1",
        "busy": pytest.approx(1.0),
        "ours": pytest.approx(0.58),
        "share": pytest.approx(0.42),
    }
    first, *others = told["verdict"]["in_words"]
    assert first.startswith("Other programs took 42% of the time of cores 0-1")
    assert not any("of what the hardware allows" in words for words in others)
    assert any("not judged" in row[-1] for row in tables.bound_rows(told))
    assert "Other programs" not in " ".join(find(run).told["verdict"]["in_words"])


def test_a_short_run_says_so() -> None:
    assert (
        find(made_up_run(rounds=12))
        .told["verdict"]["in_words"][0]
        .startswith("Only 12 rounds in 0.5")
    )
    assert not any(
        words.startswith("Only") for words in find(made_up_run()).told["verdict"]["in_words"]
    )


def test_what_messages_wait_for_while_the_draft_grows_ahead_is_told_apart() -> None:
    pieces = [
        Slice("coordinator", "link", 0, 3 * MS, 1, 1),
        Slice("draft", "grow", MS, 2 * MS, 1, 1),
        Slice("draft", "prepare", 2 * MS, 5 * MS, 1, 1),
        Slice("coordinator", "link", 8 * MS, 9 * MS, 1, 2),
        Slice("draft", "draft", 8 * MS, 10 * MS, 1, 2),
    ]
    assert timeline.ahead_on_the_way_ms(pieces, 2) == pytest.approx(1.0)
    assert timeline.ahead_on_the_way_ms(pieces, 0) is None


def test_a_card_gives_joules_a_token_and_a_bus_to_compare_with() -> None:
    told = find(made_up_run(gpu=True)).told
    assert told["energy"]["joules_per_token"] == pytest.approx(
        sum(told["energy"]["joules"].values()) / told["tokens"]
    )
    assert told["energy"]["joules_per_token"] > 0.0
    assert told["verdict"]["offloading"]["bus_gb_s"] == 15.76
    assert told["verdict"]["offloading"]["right"] is True


def test_passes_of_several_sessions_are_priced_by_all_their_rows_and_none_is_left_out() -> None:
    run = made_up_run(rounds=6)
    twins = [seen.model_copy(update={"session": 2}) for seen in run.rounds]
    slices = [
        replace(
            piece,
            session=None,
            round=None,
            shared=((1, piece.round or 0), (2, piece.round or 0)),
            end_ns=piece.start_ns + 50 * MS,
        )
        if piece.name == "verify"
        else piece
        for piece in run.slices
    ]
    shared = replace(
        run, rounds=[*run.rounds, *twins], slices=slices, soundings=Soundings(), pairs=()
    )
    told = find(shared).told
    assert told["sessions_a_pass"] == 2.0
    assert told["round_ms"]["verify"] == pytest.approx(50 / 2)
    assert told["curves"]["t_v"]["32"] == pytest.approx(0.050)


def test_what_is_not_known_is_said_to_be_not_available() -> None:
    findings = find(made_up_run(roofline=False))
    assert findings.told["bounds"]["pass"] is None
    words = " ".join(findings.told["verdict"]["in_words"])
    assert "Whether memory or arithmetic bounds a pass is not known" in words
    text = report.page(findings, pictures.pictures(findings), "made")
    assert "dovetail calibrate" in text


def test_a_run_without_a_draft_has_a_report_too() -> None:
    findings = find(made_up_run(nodes=0))
    assert findings.told["tau"] == 1.0
    assert {one["name"] for one in findings.told["verdict"]["advice"]} == {"weights"}
    assert {name for name, *_ in tables.bound_rows(findings.told)} == {
        "weights read, GB/s",
        "operations, 10^9/s",
        "a pass, ms",
    }
    assert "peculation" not in " ".join(findings.told["verdict"]["in_words"])
    assert report.page(findings, pictures.pictures(findings), "made")


def test_workers_that_came_or_went_meanwhile_are_named_first_and_nobody_is_taken_for_a_foreign_program() -> (  # noqa: E501
    None
):
    findings = find(replace(made_up_run(), changes={"target-2": "came", "target": "went"}))
    first, *_ = findings.told["verdict"]["in_words"]
    assert "target-2 came, target went" in first


def test_a_round_under_a_long_span_is_found_as_quickly_as_any() -> None:
    run = made_up_run()
    waiting = Slice("coordinator", "queue", run.start_ns, run.end_ns, 99, 1)
    plain, beside = (
        rounds.every_round(run.rounds, pieces) for pieces in (run.slices, [waiting, *run.slices])
    )
    assert [len(fall.bars) + 1 for fall in plain] == [len(fall.bars) for fall in beside]
    assert [fall.bars for fall in plain] == [
        tuple(bar for bar in fall.bars if bar.name != "queue" or bar.length_s < fall.length_s)
        for fall in beside
    ]


@pytest.mark.parametrize(
    "name",
    everyday(
        [
            "rack1/target",
            "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 80,
            "a\x00b\x1b[31m",
            "<script>x</script>",
            "..",
        ],
        "<script>x</script>",
    ),
)
def test_a_workers_name_is_its_own_and_breaks_no_file_and_no_picture(
    tmp_path: Path, name: str
) -> None:
    run = made_up_run()
    workers = [
        worker.model_copy(update={"name": name}) if worker.name == "target" else worker
        for worker in run.workers
    ]
    slices = [
        replace(piece, process=name) if piece.process == "target" else piece for piece in run.slices
    ]
    findings = find(replace(run, workers=workers, slices=slices))
    drawn = pictures.pictures(findings)
    for file, svg in drawn.items():
        assert re.fullmatch(r"[\w.-]+", file, re.ASCII)
        ElementTree.fromstring(svg)
        (tmp_path / f"{file}.svg").write_text(svg, encoding="utf-8")
    assert "<script>" not in report.page(findings, drawn, "made")


def test_the_report_is_one_page_that_asks_nothing_of_the_world() -> None:
    findings = find(made_up_run(gpu=True))
    drawn = pictures.pictures(findings)
    assert {
        "devices",
        "parts",
        "round-0",
        "round-1",
        "round-2",
        "over-time-target",
        "passes",
        "gamma",
        "positions",
    } <= set(drawn)
    for svg in drawn.values():
        ElementTree.fromstring(svg)
    text = report.page(findings, drawn, "made")
    outside = [
        address
        for address in re.findall(r"https?://[^\"'\s<]+", text)
        if not address.startswith("http://www.w3.org/")
    ]
    assert not outside
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", text)
    assert findings.told["title"] in text


class Looks:
    """A coordinator's answers, look by look: the workers that are there, by name and epoch."""

    def __init__(self, *looks: dict[str, int]) -> None:
        self._looks = iter(looks)

    def look(self, after: int, *, spans: bool) -> Seen:
        there = next(self._looks)
        workers = tuple(
            SeenWorker(name=n, worker_epoch=e, roles=("target",), device="cpu", busy_ns=0, at_ns=1)
            for n, e in there.items()
        )
        return Seen(epoch=1, request=1, at_ns=after + 1, next=after + 1, workers=workers)


def test_a_watch_keeps_every_worker_that_was_there_and_tells_what_changed() -> None:
    looks: Any = Looks(
        {"gone before": 1, "a": 2, "b": 3},
        {"a": 2, "b": 3},
        {"a": 2, "b": 4},
        {"a": 2, "b": 4, "c": 5},
        {"b": 4, "c": 5},
    )
    watch = Watch(looks, Samplers([]))
    watch._look()
    watch.begin()
    for _ in range(3):
        watch._look()
    assert [worker.name for worker in watch.workers] == ["a", "b", "c"]
    assert watch.changes == {"b": "was restarted", "c": "came", "a": "went"}
