"""The pure parts of a profile, on made-up time lines, rounds and machines."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from subprocess import CompletedProcess, Popen
from typing import Any
from xml.etree import ElementTree

import pytest

from dovetail.launch.commands.profile import _made, show
from dovetail.launch.console import terminal
from dovetail.launch.planning.planner import Tree
from dovetail.launch.planning.words import against_offloading
from dovetail.launch.profiling import figure, timeline
from dovetail.launch.profiling.findings import Rates, advise, find
from dovetail.launch.profiling.measured import (
    Evidence,
    Offer,
    Replayed,
    Soundings,
    costs_of,
    levels_of,
    replayed,
)
from dovetail.launch.profiling.samplers import (
    Absent,
    CardReading,
    Nvml,
    Sample,
    Samplers,
    busy_cores,
)
from dovetail.launch.profiling.stages import RunWatch
from dovetail.launch.profiling.timeline import Actor, Slice
from dovetail.protocol.experts import Mixture, Routing
from dovetail.protocol.messages import RoundRecord, Seen, SeenRound, SeenWorker
from dovetail.protocol.settings.models import BLOCK_KINDS
from support.block_heads import write_drafter
from support.cases import everyday
from support.models import tiny_llama
from support.mtp import write_mtp
from support.parallel_heads import write_parallel_head
from support.patience import PATIENCE_S
from support.profiled import made_up_run, with_experts

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
    split = timeline.split_of(
        [seen(1, 0, **parts), seen(2, 10, **parts), seen(3, 20, **parts), seen(7, 100, **parts)]
    )
    assert split is not None
    assert split.wall_s == pytest.approx(10e-3)
    assert split.unaccounted_share == pytest.approx(0.05)
    assert timeline.split_of([seen(1, 0)]) is None


def test_sessions_that_ran_side_by_side_are_told_from_those_that_took_turns() -> None:
    assert timeline.one_by_one(
        [seen(1, 0), seen(2, 10), seen(1, 12, session=2), seen(2, 20, session=2)]
    )
    assert not timeline.one_by_one(
        [seen(1, 0), seen(2, 15), seen(1, 12, session=2), seen(2, 20, session=2)]
    )


def test_offloading_wins_where_the_bus_carries_the_weights_faster_than_a_token_takes() -> None:
    slow, fast, none = (against_offloading(40.0, bus) for bus in (16.0, 64.0, None))
    assert (slow[:6], fast[:6]) == ("right:", "wrong:")
    assert "40.0 GB/s" in none


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


def run_of(rounds: list[RoundRecord], **fields: Any) -> Evidence:
    """A run of such rounds, whose tree is a chain of twelve, and passes that take 20 ms up to 8
    rows, then 2 ms a row more."""
    passes = [
        record(number, verify_ns=int(20 + 2 * max(0, rows - 8)) * MS, verified=rows - 1)
        for number, rows in enumerate((1, 1, 1, 1, 4, 8, 9, 10, 11, 12, 13, 13))
    ]
    drafted = [one.model_copy(update={"verify_ns": 30 * MS}) for one in rounds]
    lone = [one for one in passes if not one.verified]
    others = [one for one in passes if one.verified]
    every = [seen(n, 45.0 * n).model_copy(update={"record": one}) for n, one in enumerate(drafted)]
    base = replace(made_up_run(rounds=1), slices=[], tree=Tree("dynamic", 12, 12, 1), ahead=False)
    return replace(base, rounds=every, soundings=Soundings((), lone, others), **fields)


def rates_of(rounds: list[RoundRecord], **fields: Any) -> Rates:
    run = run_of(rounds, **fields)
    return Rates(run, costs_of(run), replayed(run))


def test_a_smaller_tree_brings_what_the_beginning_of_the_larger_one_brought() -> None:
    accepted = (0, 2, 5, 12, 3, 0)
    rates = rates_of([chain(number, 12, count) for number, count in enumerate(accepted)])
    option = rates.option(replace(rates.tree, gamma=6))
    assert option.tau == pytest.approx(1 + sum(min(6, count) for count in accepted[:5]) / 5)
    assert option.draft_s == pytest.approx(0.013)
    assert option.verify_s == pytest.approx(0.020, rel=0.03)
    levels = rates.option(replace(rates.tree, depth=4))
    assert levels.tau == pytest.approx(1 + sum(min(4, count) for count in accepted[:5]) / 5)
    assert levels.draft_s == pytest.approx(0.005)


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
        offer = Offer(levels_of(parents), accepted, (), False)
        tree = Tree("dynamic", random.randrange(1, 20), random.randrange(1, 8), 1)

        def level(node: int, parents: tuple[int, ...] = parents) -> int:
            return 1 if parents[node] == -1 else 1 + level(parents[node])

        slow = [node for node in range(count) if level(node) <= tree.depth][: tree.gamma]
        brought = 0
        for node in accepted:
            if node not in slow:
                break
            brought += 1
        assert offer.brings(tree) == brought


def advised(rates: Rates) -> dict[str, Any]:
    return {one.name: one for one in advise(rates, None, None, lambda _: None)}


def test_a_draft_that_is_mostly_wrong_is_advised_to_draft_less_or_not_at_all() -> None:
    found = advised(rates_of([chain(number, 12, int(number % 8 == 0)) for number in range(40)]))
    assert found["alone"].gain > 1.2
    assert "--tree.depth=1" in found["tree"].flags
    gains = [one.gain for one in found.values() if one.worth]
    assert gains == sorted(gains, reverse=True)


def test_a_draft_that_is_always_right_is_kept_and_drafting_ahead_hides_it() -> None:
    rounds = [chain(number, 12, 12, hit=True) for number in range(10)]
    rates = rates_of(rounds)
    found = advised(rates)
    assert found["alone"].gain < 0.5
    assert found["ahead"].flags == ("--draft.ahead=true",)
    now = rates.option(rates.tree)
    kept = now.round_s - 0.012  # all passes are made meanwhile; what is beside them is waited for
    assert found["ahead"].gain == pytest.approx(now.round_s / kept, rel=0.01)
    reads = Replayed([rounds], reads=True)
    assert dict(reads.passes(rates.tree, 99.0)) == {1: 1.0}, "a head makes its first pass anyway"


def test_a_tree_that_sizes_itself_is_left_alone() -> None:
    rounds = [chain(number, 12, 3) for number in range(10)]
    assert {"tree", "policy"} <= advised(rates_of(rounds)).keys()
    assert advised(rates_of(rounds, adapts=True)).keys() == {"ahead", "alone"}
    watched = advised(rates_of(rounds, set_here=False, own_device=False))
    assert watched.keys() == {"tree", "alone"}


def test_the_measured_wait_for_the_draft_outweighs_the_expected_one() -> None:
    rounds = [chain(n, 12, 6).model_copy(update={"draft_ns": 26 * MS}) for n in range(5)]
    rates = rates_of(rounds)
    now = rates.option(rates.tree)
    assert rates.now == pytest.approx(now.tau / (0.026 + now.verify_s + now.beside_s), rel=0.01)


def test_what_is_not_there_says_why_and_is_never_zero(tmp_path: Path) -> None:
    samplers = Samplers(root=tmp_path)
    assert "AMD and Intel cards (sysfs)" in samplers.absent
    one, two = samplers.take(), samplers.take()
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
def nvmlDeviceGetMaxPcieLinkGeneration(handle): {link}
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
    ("link", "rate"), [("return 4", 1.969 * 16), ("raise NVMLError('not supported')", None)]
)
def test_a_card_of_nvidia_says_what_it_does_and_what_it_does_not_tell_is_none(
    library: Callable[[str, str], None], link: str, rate: float | None
) -> None:
    library("pynvml", NVML.format(busy="return Told(gpu=40)", link=link))
    bus = None if rate is None else pytest.approx(rate)
    assert Nvml().read() == {"cuda:0": CardReading("Card", 0.4, 3 << 30, 8 << 30, bus)}


def test_a_card_that_does_not_say_how_busy_it_is_is_absent_with_the_reason(
    library: Callable[[str, str], None],
) -> None:
    library("pynvml", NVML.format(busy="raise NVMLError('a part of a card')", link="return 4"))
    with pytest.raises(Absent, match="does not report how busy the card is: a part of a card"):
        Nvml()


def test_busy_shares_are_of_the_time_between_two_samples() -> None:
    def sample(at_ns: int, busy: float, whole: float) -> Sample:
        return Sample(at_ns, {0: (busy, whole), 1: (0.0, whole)}, {}, {})

    one, two = sample(0, 10.0, 100.0), sample(10**9, 11.5, 102.0)
    assert busy_cores(one, two, [0]) == pytest.approx(0.75)
    assert busy_cores(one, two, [0, 1]) == pytest.approx(0.375)


def test_a_made_up_run_comes_to_figures_that_agree_with_each_other() -> None:
    found = find(made_up_run(), None)
    for device in found["devices"].values():
        assert device["busy"] + sum(device["waiting"].values()) == pytest.approx(1.0)
    assert found["devices"]["target"]["waiting"]["draft"] > 0.15
    assert found["devices"]["draft"]["waiting"]["target"] > 0.2
    assert found["devices"]["target"]["sampled"]["process"] == pytest.approx(0.66)
    assert found["devices"]["target"]["sampled"]["cores"] == pytest.approx(0.7)
    assert abs(found["unaccounted_share"]) < 0.02
    assert found["bounds"]["speedup"] < found["bounds"]["most_speedup"]
    advice = {one["name"]: one for one in found["advice"]}
    assert advice["ahead"]["gain"] > 1.05
    assert all(one["gain"] > 1.0 for one in advice.values())


def test_the_verdict_and_the_advice_speak_of_one_rate_of_the_target_alone() -> None:
    found = find(made_up_run(), None)
    alone = next(one for one in found["no_gain"] if one["name"] == "alone")
    assert alone["gain"] == pytest.approx(1.0 / found["bounds"]["speedup"])
    words = " ".join(found["in_words"])
    assert (
        f"{found['bounds']['speedup']:.2f} times as fast as the target alone "
        f"({1 / found['bounds']['alone_s']:.1f} tokens/s, measured in 8 rounds" in words
    )


def test_the_experts_of_passes_are_shown_with_those_of_rows_that_choose_independently() -> None:
    run = with_experts(made_up_run(), row=24, drafted=120)
    costs = costs_of(run, Mixture(64, 4, 0.9))
    assert costs.target.experts is not None
    assert costs.target.experts.routing == Routing(row=24, most=384)
    assert find(run, None)["experts"] is None, "how many the target has is not known"


def test_tokens_and_tau_are_those_of_the_reply_where_it_ended_within_a_path() -> None:
    run = made_up_run()
    whole = find(run, None)
    last = run.rounds[-1].record
    cut = run.rounds[-1].model_copy(update={"record": last.model_copy(update={"committed": 0})})
    told = find(replace(run, rounds=[*run.rounds[:-1], cut]), None)
    assert whole["tokens"] == 1 + sum(len(seen.record.accepted) + 1 for seen in run.rounds), (
        "the first one came with the prompt"
    )
    assert whole["tau"] == pytest.approx((whole["tokens"] - 1) / 40)
    assert whole["tokens"] - told["tokens"] == len(last.accepted) + 1


def test_programs_that_take_the_cores_are_named_first() -> None:
    run = made_up_run()
    busy = [
        replace(sample, cores={core: (every, every) for core, (_, every) in sample.cores.items()})
        for sample in run.samples
    ]
    found = find(replace(run, samples=busy), None)
    assert found["other_programs"] == {
        "cores": "0-1",
        "busy": pytest.approx(1.0),
        "ours": pytest.approx(0.58),
        "share": pytest.approx(0.42),
    }
    assert found["in_words"][0].startswith("Other programs took 42% of the time of cores 0-1")
    assert not found["bounds"]["judged"]
    assert "Other programs" not in " ".join(find(run, None)["in_words"])


def test_a_short_run_says_so() -> None:
    assert find(made_up_run(rounds=12), None)["in_words"][0].startswith("Only 12 rounds in 0.5")
    assert not any(words.startswith("Only") for words in find(made_up_run(), None)["in_words"])


def test_a_run_whose_draft_was_never_used_is_judged_like_one_without_a_draft() -> None:
    run = replace(made_up_run(nodes=0), soundings=made_up_run().soundings)
    assert find(run, None)["plain_share"] == 1.0


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
    told = find(shared, None)
    assert told["sessions_a_pass"] == 2.0
    assert told["round_ms"]["verify"] == pytest.approx(50 / 2)
    assert costs_of(shared).target.at(32) == pytest.approx(0.050)


def test_workers_that_came_or_went_meanwhile_are_named_first() -> None:
    found = find(replace(made_up_run(), changes={"target-2": "came", "target": "went"}), None)
    assert "target-2 came, target went" in found["in_words"][0]
    assert found["other_programs"] is None


@pytest.mark.parametrize("nodes", [15, 0])
def test_the_figure_has_a_bar_for_every_device_and_for_a_round(nodes: int) -> None:
    found = find(made_up_run(gpu=True, nodes=nodes), None)
    root = ElementTree.fromstring(svg := figure.draw(found))
    bars = svg.count('class="bar"')
    assert bars >= 6
    words = " ".join(text for text in root.itertext() if text.strip())
    for name, device in found["devices"].items():
        assert f"{device['busy']:.0%} busy" in words
        assert name in words
    assert f"a round: {found['round_wall_ms']:.2f} ms" in words
    assert "waits for the target" in words


@pytest.mark.parametrize(
    "name",
    everyday(
        [
            "rack1/target",
            "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 80,
            "a\x00b\x1b[31m",
            "<script>x</script>",
        ],
        "<script>x</script>",
    ),
)
def test_a_workers_name_is_its_own_and_breaks_no_picture(name: str) -> None:
    run = made_up_run()
    workers = [
        worker.model_copy(update={"name": name}) if worker.name == "target" else worker
        for worker in run.workers
    ]
    slices = [
        replace(piece, process=name) if piece.process == "target" else piece for piece in run.slices
    ]
    svg = figure.draw(find(replace(run, workers=workers, slices=slices), None))
    ElementTree.fromstring(svg)
    assert "<script>" not in svg


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
    watch = RunWatch(looks, Samplers([]))
    watch._look()
    watch.begin()
    for _ in range(3):
        watch._look()
    assert [worker.name for worker in watch.workers] == ["a", "b", "c"]
    assert watch.changes == {"b": "was restarted", "c": "came", "a": "went"}


Run = Callable[..., CompletedProcess[str]]
FILES = ["profile.json", "profile.svg", "trace.json"]


@pytest.mark.slow
def test_a_run_of_its_own_says_for_every_device_where_its_time_went_and_what_would_help(
    run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fixed = ("--policy", "dynamic", "--tree.insist", "true")
    result = run(
        "profile",
        "--prompt",
        "Tell me a story.",
        "--out",
        str(out),
        *shlex.split("--max-tokens 48 --json --draft.device cpu"),
        *fixed,
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert {"devices", "round_ms", "unaccounted_share", "bounds", "advice", "files"} <= set(told)
    assert set(told["devices"]) == {"target", "draft", "coordinator"}
    for device in told["devices"].values():
        assert device["busy"] + sum(device["waiting"].values()) == pytest.approx(1.0)
    assert 0.0 < told["devices"]["target"]["busy"] < 1.0
    assert told["devices"]["target"]["sampled"]["process"] > 0.0
    assert {"verify", "draft", "linears", "level", "handle", "link"} <= set(told["round_ms"])
    assert abs(told["unaccounted_share"]) < 1.0
    assert told["bounds"]["pass"]["bound"] in ("memory", "compute", "both")
    looked_at = [*told["advice"], *told["no_gain"]]
    assert {"alone", "policy", "weights"} <= {one["name"] for one in looked_at}
    assert all(one["gain"] > 1.0 for one in told["advice"])
    assert told["files"] == FILES
    assert all((out / name).stat().st_size for name in told["files"])
    assert json.loads((out / "profile.json").read_text(encoding="utf-8")) == told
    _check_trace(json.loads((out / "trace.json").read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", *BLOCK_KINDS])
def test_a_draft_of_any_published_kind_is_profiled(run: Run, tmp_path: Path, kind: str) -> None:
    if kind == "mtp":
        write_mtp("nemotron_h", target := tmp_path / "model")
        draft = kind
    else:
        target, draft = tiny_llama(tmp_path / "model"), str(tmp_path / "draft")
        names = {"dflash": "dflash-mixed", "dspark": "dspark-deepspec", "dflash2": "dflash2"}
        if kind == "peagle":
            write_parallel_head(Path(draft))
        else:
            write_drafter(Path(draft), names[kind])
    options = shlex.split("--max-tokens 24 --json --draft.device cpu --policy dynamic")
    options += ["--tree.insist", "true", "--prompt", "Tell me a story.", "--draft", draft]
    result = run("profile", "--target.model", str(target), "--out", str(tmp_path / "out"), *options)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert {"draft", "verify"} <= set(told["round_ms"])
    assert {"alone", "ahead"} <= {one["name"] for one in [*told["advice"], *told["no_gain"]]}
    assert told["devices"]["draft"]["busy"] > 0.0


def _check_trace(trace: dict[str, Any]) -> None:
    """All processes are rows with slices, and a tree's trip is a chain of arrows whose ends lie in
    slices."""
    events = trace["traceEvents"]
    names = {
        event["args"]["name"].partition(" (")[0]: event["pid"]
        for event in events
        if event["name"] == "process_name"
    }
    assert {"coordinator", "target", "draft"} <= set(names)
    slices = [event for event in events if event["ph"] == "X"]
    assert set(names.values()) == {event["pid"] for event in slices}
    begins, ends = ({event["id"] for event in events if event["ph"] == kind} for kind in ("s", "f"))
    assert begins == ends
    assert begins


@pytest.mark.slow
def test_a_server_is_watched_while_somebody_asks_it(
    start: Callable[..., Popen[str]], run: Run, tmp_path: Path
) -> None:
    server = start("serve", "--http.port", "0", "--json", "--draft.device", "cpu")
    assert server.stdout is not None
    told = json.loads(server.stdout.readline())
    asking = start("generate", "--connect", told["address"], "Tell me a long story.")
    watched = run(
        "profile",
        "--connect",
        told["url"].replace("127.0.0.1", "localhost"),
        "--seconds",
        "8",
        "--out",
        str(tmp_path / "watched"),
        "--json",
    )
    assert watched.returncode == 0, watched.stderr
    found = json.loads(watched.stdout)
    assert found["rounds"] > 1
    assert found["devices"]["target"]["busy"] > 0.0
    assert asking.wait(PATIENCE_S) == 0
    with_prompt = run(
        "profile",
        "--connect",
        told["address"],
        "--prompt",
        "Tell me a story.",
        "--max-tokens",
        "32",
        "--out",
        str(tmp_path / "asked"),
    )
    assert with_prompt.returncode == 0, with_prompt.stderr
    assert "speed-up over the target alone" in with_prompt.stdout
    idle = run(
        "profile", "--connect", told["address"], "--seconds", "0.5", "--out", str(tmp_path / "idle")
    )
    assert (idle.returncode, "nothing was decoded" in idle.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "a", "--prompts", "b"), "--prompt and --prompts cannot be combined"),
        (("--prompt", "  "), "--prompt is empty"),
        (("--connect", "http://127.0.0.1:9"), "none of your servers here serves"),
        (("--connect", "http://127.0.0.1:nine"), "is not an address"),
        (("--seconds", "3"), "--seconds is for watching a server: it needs --connect"),
    ],
)
def test_a_mistake_is_one_line(
    invoke: Run, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = invoke("profile", "--out", str(tmp_path / "out"), *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    invoke: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    result = invoke("profile", "--prompt", "a", "--out", str(tmp_path / "file" / "out"))
    assert result.returncode == 2
    assert re.search(r"cannot write the profile to .*out: ", result.stderr)


@pytest.mark.parametrize("there", [False, True])
def test_what_is_interrupted_leaves_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    out = tmp_path / "new" / "out"
    if there:
        out.mkdir(parents=True)
        (out / "profile.json").write_text("{}")

    def interrupted() -> None:
        with _made(out):
            assert (out / "profile.json").is_file()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.rglob("*")] == (
        ["new", "out", "profile.json"] if there else []
    )
    assert capsys.readouterr().err == f"interrupted: nothing was written to {out}\n"


@pytest.mark.parametrize(
    "run_", [made_up_run(gpu=True), made_up_run(nodes=0)], ids=["all", "no draft"]
)
def test_the_tables_fit_eighty_columns_and_begin_with_what_matters_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_: Evidence
) -> None:
    monkeypatch.setattr(terminal, "WIDTH_WITHOUT_TERMINAL", 80)
    told = find(run_, None)
    show(told)
    title, workload, first, second, *lines = capsys.readouterr().out.splitlines()
    assert (title, workload) == (told["title"], told["workload"])
    assert first.startswith(f"{told['tokens_per_s']:.1f} tokens/s · tau {told['tau']:.2f} · ")
    assert ("times the target alone" in first) is bool(run_.soundings.wide)
    assert second.startswith(f"{told['tokens']} tokens in ")
    tables = [line for line in lines if line.startswith(" ")]
    assert max(map(len, tables)) <= 80
    heads = [line.split() for line in tables]
    assert ["of", "the", "time", *told["devices"]] in heads
    assert "-0.0%" not in " ".join(tables)
