"""`python tests/simulation`: played rounds beside sums by hand, and beside real processes."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.launch.files.outputs import open_records
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.machine.topology import Place
from dovetail.launch.planning import planner as places
from dovetail.launch.planning.acceptance import (
    ABOUT,
    About,
    Library,
    Position,
    Recorded,
    Recording,
    read_library,
)
from dovetail.launch.planning.machines import machine_names, read_machine
from dovetail.launch.planning.planner import Draft, Machine, Planner, Target, Tree
from dovetail.launch.settings.configure import configure
from dovetail.launch.settings.models import DEMO_FOLDER, with_draft, with_target
from dovetail.protocol.calibration import ContextCurve, RowsSeconds
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import RoundRecord
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.runtime.costs.passes import PassCurves
from dovetail.runtime.costs.rounds import Messages
from dovetail.workers.draft import DraftWorker
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.target import TargetWorker
from simulation.clockwork import Clock
from simulation.commands import execute
from simulation.draft import below, children
from simulation.figures import figures
from simulation.folder import Folder
from simulation.measured import measured_costs
from simulation.methods import Method, read_method, vary
from simulation.play import Actor, Play, Stage, open_stage, play_all
from simulation.prices import PlacedCosts, placed_costs, read_size
from simulation.survey import Order, Recorder
from simulation.validation import as_on, decode_all
from support.cases import everyday

Children = Callable[[tuple[int, ...]], Sequence[tuple[int, float]]]

CHAIN = TreeSettings(policy="static", insist=True, gamma=3, depth=3, width=1, sharpening=1.0)
T_V = RowsSeconds.rising((1, 2, 4), (0.010, 0.011, 0.013))
T_D = RowsSeconds.rising((1, 4), (0.001, 0.002))
COSTS = PlacedCosts(
    PassCurves([ContextCurve(context=0, t_v=T_V)]), T_D, 0.0005, Messages(0.0001, 0.0002)
)
PROMPT, END = (90, 91), 0


def about(**changes: object) -> About:
    values: dict[str, object] = {
        "target": "t",
        "target_model": "target",
        "draft_model": "draft",
        "head": False,
        "vocabulary_size": 97,
        "end": (END,),
        "context": 512,
        "sampling": Sampling(),
        "seed": 0,
        "sharpening": 1.0,
        "nodes": 16,
        "depth": 8,
        "width": 4,
        "max_tokens": 64,
    }
    return About.model_validate({**values, **changes})


def grown(said: Children, depth: int) -> Position:
    """The tree of all that is said, down to `depth` levels, level by level."""
    tokens, parents, gains, expanded = [], [], [], []
    paths: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
    for level in range(1, depth + 1):
        below = []
        for parent, path in paths:
            for token, gain in said(path):
                below.append((len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(parent)
                gains.append(gain)
                expanded.append(level < depth)
        paths = below
    return Position(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(gains, np.float32),
        np.array(expanded, bool),
    )


def recording(
    tokens: Sequence[int],
    said: Callable[[int], Children],
    *,
    depth: int = 8,
    id: str = "one",
    prompt: tuple[int, ...] = PROMPT,
) -> Recording:
    """A reply, and what is said at each of its positions."""
    return Recording(
        id,
        prompt,
        tuple(tokens),
        tuple(grown(said(place), depth) for place in range(len(tokens) - 1)),
    )


def seer(tokens: Sequence[int]) -> Callable[[int], Children]:
    """A draft that knows the reply, and says what is wrong behind its end."""
    return lambda place: (
        lambda path: [
            (tokens[place + 1 + len(path)] if place + 1 + len(path) < len(tokens) else 7, -0.1)
        ]
    )


def fool(_place: int) -> Children:
    """A draft that is always wrong."""
    return lambda _path: [(7, -0.1)]


REPLY = (*range(11, 31), END)
KNOWING = Library(about(), (recording(REPLY, seer(REPLY)),))
FOOLED = Library(about(), (recording(REPLY, fool),))


def played(library: Library, tree: TreeSettings = CHAIN, **options: bool) -> Play:
    plays, coverage = play_all(library, COSTS, tree, **options)
    assert not coverage.missing, "all that somebody waited for was recorded"
    return plays[0]


# -- the planner beside the simulator --------------------------------------------------------------


def wavering(place: int) -> Children:
    """A draft that knows three of four tokens, and half of the others by its second guess."""

    def said(path: tuple[int, ...]) -> list[tuple[int, float]]:
        at = place + 1 + len(path)
        right = REPLY[at] if at < len(REPLY) else 7
        known = at % 4 or at % 8 == 0
        return [(right if known else 8, -0.3), (9 if known else right, -1.4)]

    return said


@pytest.mark.parametrize(
    ("policy", "ahead"), [("dynamic", False), ("dynamic", True), ("budget", False)]
)
def test_a_plan_of_recorded_rounds_expects_what_the_simulator_plays(
    policy: str, ahead: bool
) -> None:
    library = Library(about(), (recording(REPLY, wavering, depth=10),))
    tree = Tree(policy, 6, 4, 2)
    settings = CHAIN.model_copy(update={"policy": policy, "gamma": 6, "depth": 4, "width": 2})
    plays, _ = play_all(library, COSTS, settings, ahead=ahead)
    measured = figures([plays[0].result])
    recorded = Recorded(library, "a test")
    draft = Draft(
        *("small", lambda rows, _: T_D.at(rows), lambda _: 0, 0),
        *(recorded.tokens, [tree], recorded.passes, COSTS.proposal_s),
    )
    planner = Planner(
        Target(1, 1, 0, lambda *_: 0, lambda *_: 0),
        Machine(places.PartCosts(T_V.at, lambda _: 0.0), None, None, messages=COSTS.messages),
    )
    option = planner.option(0, 0, draft, tree, recorded.tokens(tree), ahead=ahead)
    assert option.tau == pytest.approx(measured.tau, rel=0.05)
    if not ahead:
        assert option.draft_s == pytest.approx(measured.draft_s, rel=0.15, abs=1e-4)
    assert option.tokens_per_s == pytest.approx(measured.tokens_per_s, rel=0.1)


# -- a recording -----------------------------------------------------------------------------------


def test_a_position_says_what_follows_a_path() -> None:
    position = grown(lambda path: [(len(path) * 10 + 1, -0.5), (len(path) * 10 + 2, -1.5)], depth=2)
    found = below(position, (), 4)
    assert found is not None
    assert (found[0].tolist(), found[1].tolist()) == ([1, 2], [-0.5, -1.5])
    deeper = below(position, (2,), 1)
    assert deeper is not None
    assert deeper[0].tolist() == [11]
    assert below(position, (2, 11), 4) is None, "it was never expanded"
    assert below(position, (3,), 4) is None, "it is not there"


def test_on_the_targets_path_a_small_draft_says_below_any_root_what_it_says_below_the_next_one_and_a_head_what_it_guessed_there() -> (  # noqa: E501
    None
):
    """Position 0 is two levels deep here: what is deeper comes from the positions on the way."""
    reply = (5, 6, 7, 8)
    one = recording(
        reply,
        lambda place: lambda path: [(reply[min(place + 1 + len(path), 3)], -0.25 * (place + 1))],
        depth=2,
    )
    for head, gain in ((False, -0.5), (True, -0.25)):
        found = children(one, 0, (6,), 4, head=head)
        assert found is not None
        assert (found[0].tolist(), found[1].tolist()) == ([7], [gain])
        deeper = children(one, 0, (6, 7), 4, head=head)
        assert deeper is not None
        assert (deeper[0].tolist(), deeper[1].tolist()) == ([8], [-0.75])
    assert children(one, 0, (9,), 4, head=False) is None


def test_a_recording_is_read_as_it_was_written_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "r", about())
    folder.write(0, KNOWING.recordings[0])
    again = Folder(tmp_path / "r", about())
    assert again.has(0, "one")
    assert not again.has(1, "another")
    library = read_library(tmp_path / "r")
    assert library.about == about()
    read, written = library.recordings[0], KNOWING.recordings[0]
    assert (read.id, read.prompt, read.tokens) == (written.id, written.prompt, written.tokens)
    for ours, theirs in zip(read.positions, written.positions, strict=True):
        for name in ("tokens", "parents", "gains", "expanded"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_what_is_wrong_with_a_folder_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a recording: make one with"):
        read_library(tmp_path / "nowhere")
    Folder(tmp_path / "r", about())
    with pytest.raises(UserError, match="has no reply yet"):
        read_library(tmp_path / "r")
    with pytest.raises(UserError, match="another seed, width: name a new folder"):
        Folder(tmp_path / "r", about(seed=3, width=5))
    (tmp_path / "r" / "00000-x.npz").write_bytes(b"PK torn")
    with pytest.raises(UserError, match=r"00000-x\.npz is damaged .*remove it"):
        read_library(tmp_path / "r")
    (tmp_path / "r" / ABOUT).write_text("{}")
    with pytest.raises(UserError, match="is damaged or of another version"):
        read_library(tmp_path / "r")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds something other"):
        Folder(tmp_path / "other", about())


# -- costs -----------------------------------------------------------------------------------------


def test_a_pass_costs_what_lies_between_the_lengths_that_are_known() -> None:
    longer = ContextCurve(context=100, t_v=RowsSeconds.rising((1, 2, 4), (0.020, 0.021, 0.023)))
    costs = replace(COSTS, t_v=PassCurves([*COSTS.t_v.curves, longer]))
    assert costs.verify_s(2, 0) == pytest.approx(0.011)
    assert costs.verify_s(3, 50) == pytest.approx(0.017)
    assert costs.verify_s(1, 200) == pytest.approx(0.030)


def test_a_noisy_curve_never_falls() -> None:
    assert RowsSeconds.rising((1, 2, 3), (2.0, 1.0, 3.0)).seconds == (2.0, 2.0, 3.0)


def test_costs_are_the_means_of_what_was_measured() -> None:
    base = RoundRecord(
        round=1,
        prefix=3,
        tokens=(1,),
        parents=(-1,),
        scores=(-0.1,),
        verified=1,
        accepted=(),
        bonus=2,
        transport_ns=400,
        coordinator_ns=40,
    )
    rounds = [
        base.model_copy(
            update={"verify_ns": 1000, "draft_ns": 350, "passes": ((1, 100), (4, 200))}
        ),
        base.model_copy(
            update={"verify_ns": 3000, "draft_ns": 150, "passes": ((1, 100), (4, 400))}
        ),  # the second one was ahead of the order
        base.model_copy(
            update={
                "verify_ns": 500,
                "verified": 0,
                "tokens": (),
                "parents": (),
                "scores": (),
                "transport_ns": 200,
                "coordinator_ns": 20,
            }
        ),
    ]
    costs = measured_costs(rounds)
    assert costs.verify_s(1, 0) == pytest.approx(500e-9)
    assert costs.verify_s(2, 0) == pytest.approx(2000e-9)
    assert [costs.t_d.at(1), costs.t_d.at(4)] == pytest.approx([100e-9, 300e-9])
    assert (costs.proposal_s, costs.messages.hop_s, costs.messages.coordinator_s) == pytest.approx(
        (50e-9, 100e-9, 20e-9)
    )
    with pytest.raises(UserError, match="nothing was drafted"):
        measured_costs(rounds[2:])


def test_more_numbers_of_rows_than_a_curve_has_room_for_are_taken_together() -> None:
    base = RoundRecord(
        round=1, prefix=3, tokens=(), parents=(), scores=(), verified=0, accepted=(), bonus=2
    )
    costs = measured_costs(
        [
            base.model_copy(
                update={
                    "verified": rows - 1,
                    "verify_ns": 1000 * rows,
                    "passes": ((rows, 10 * rows),),
                }
            )
            for rows in range(1, 1001)
        ]
    )
    for rows in (10, 500, 990):
        assert costs.verify_s(rows, 0) == pytest.approx(1e-6 * rows, rel=0.2)
        assert costs.t_d.at(rows) == pytest.approx(1e-8 * rows, rel=0.2)


def test_a_machine_takes_what_its_bandwidth_and_arithmetic_allow(tmp_path: Path) -> None:
    """7B in fp32: 6,607 million weights of linears; a token of the cache has 2 x 32 x 4,096
    numbers."""
    file = tmp_path / "m.toml"
    file.write_text(
        'title = "m"\nweights = "fp32"\n[target]\nbandwidth_gb_s = 100\npeak_gflop_s = { fp32 '
        "= 1000 }\nlayer_us = 10\nkv_bytes = 4\n"
        "[draft]\nbandwidth_gb_s = 200\npeak_gflop_s = 1e5\nblocks = 2\nblock_us = "
        "100\npass_us = 50\n[link]\nhop_us = 3\ncoordinator_us = 4\n"
    )
    costs = placed_costs(read_machine(str(file)), read_size("7B"), "fp32")
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert costs.verify_s(1, 0) == pytest.approx(4 * weights / 100e9 + 320e-6)
    assert costs.verify_s(64, 0) == pytest.approx(2 * 64 * weights / 1e12 + 320e-6)
    assert costs.verify_s(1, 512) - costs.verify_s(1, 0) == pytest.approx(
        512 * 2 * 32 * 4096 * 4 / 100e9
    )
    head = 2 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 4096**2 + 4096 * 32000
    assert costs.t_d.at(10) == pytest.approx(2 * head / 200e9 + 250e-6)
    assert (costs.messages.hop_s, costs.messages.coordinator_s) == pytest.approx((3e-6, 4e-6))
    with pytest.raises(UserError, match="has no figures for int8 weights: choose fp32"):
        placed_costs(read_machine(str(file)), read_size("7B"), "int8")


def test_of_a_machine_without_a_gpu_the_data_sheet_is_enough(tmp_path: Path) -> None:
    """0.8 of what channels carry and of what cores compute, and something for each layer."""
    file = tmp_path / "m.toml"
    sheet = "channels = 4\nmt_s = 2400\ncores = 14\nghz = 2.4\nisa = 'avx2'\n"
    file.write_text(f"title = 'm'\nweights = 'half'\n[processor]\n{sheet}")
    costs = placed_costs(read_machine(str(file)), read_size("7B"), "half")
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    layers = 32 * 30e-6
    assert costs.verify_s(1, 0) == pytest.approx(2 * weights / 61.44e9 + layers)
    assert costs.verify_s(64, 0) == pytest.approx(128 * weights / (0.8 * 14 * 2.4e9 * 32) + layers)
    file.write_text(f"title = 'm'\nweights = 'half'\n[processor]\n{sheet}".replace("2'", "9'"))
    with pytest.raises(UserError, match="isa: Input should be 'sse', 'avx', 'avx2' or 'avx512'"):
        read_machine(str(file))


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_that_comes_along_is_slower_with_more_rows_and_larger_models(name: str) -> None:
    machine = read_machine(name)
    small, large = (
        placed_costs(machine, read_size(size), machine.weights) for size in ("7B", "70B")
    )
    assert 0.0 < small.verify_s(1, 0) <= small.verify_s(64, 0) <= small.verify_s(64, 4096)
    assert large.verify_s(1, 0) > small.verify_s(1, 0)
    assert small.t_d.at(10) < small.verify_s(1, 0)


def test_the_server_of_the_paper_is_as_fast_as_the_paper_says() -> None:
    """Dovetail, Tables 3 and 4: Llama-2 7B alone 2.14 tokens/s, with 5 blocks 2.25 times that at
    tau 4.73; Vicuna 13B 2.50 times at tau 5.00. The first was fitted, the last was not."""
    machine = read_machine("dovetail-server")
    for size, tau, speedup in (("7B", 4.73, 2.25), ("13B", 5.00, 2.50)):
        costs = placed_costs(machine, read_size(size), "fp32")
        round_s = costs.verify_s(16, 0) + costs.t_d.at(1) + 7 * costs.t_d.at(10)
        assert tau * costs.verify_s(1, 0) / round_s == pytest.approx(speedup, rel=0.05)
    assert 1 / placed_costs(machine, read_size("7B"), "fp32").verify_s(1, 0) == pytest.approx(
        2.14, rel=0.03
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title = 3", "title: Input should be a valid string"),
        ("weights", "cannot be read"),
        (None, "there is no machine .*choose dovetail-laptop"),
    ],
)
def test_what_is_wrong_with_a_machine_is_told_in_one_line(
    tmp_path: Path, text: str | None, words: str
) -> None:
    file = tmp_path / "m.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=words):
        read_machine(str(file))


# -- playing ---------------------------------------------------------------------------------------


def test_a_round_takes_the_sum_of_its_parts() -> None:
    """Twenty tokens behind the first: five rounds of a chain of three and a bonus. Passes of one
    row each; a root that the draft has no row of yet, since it was the bonus, and the last node
    offered, which has none either, are two rows more."""
    play = played(KNOWING, ahead=False)
    assert (play.result.rounds, play.result.tau) == (5, 4.0)
    first = 3 * T_D.at(1)
    later = T_D.at(2) + 2 * T_D.at(1)
    round_s = COSTS.proposal_s + T_V.at(4) + COSTS.messages.beside_s(drafted=True)
    assert play.result.verify_s == pytest.approx(5 * T_V.at(4))
    assert play.result.draft_exposed_s == pytest.approx(first + 4 * later + 5 * COSTS.proposal_s)
    assert play.result.transport_s == pytest.approx(5 * 4 * COSTS.messages.hop_s, rel=0.2)
    found = figures([play.result])
    assert found.decode_s == pytest.approx(first + 4 * later + 5 * round_s, rel=0.01)
    assert found.tokens_per_s == pytest.approx(20 / found.decode_s)


def test_a_draft_that_is_always_wrong_costs_its_time_and_brings_nothing() -> None:
    play = played(FOOLED, ahead=False)
    assert (play.result.rounds, play.result.tau, play.result.accepted_tokens) == (20, 1.0, 0)
    alone = played(FOOLED, speculate=False)
    assert (alone.result.rounds, alone.result.verify_s) == (20, pytest.approx(20 * T_V.at(1)))
    assert figures([play.result]).tokens_per_s < figures([alone.result]).tokens_per_s


def test_a_worker_whose_pass_takes_minutes_is_not_taken_for_lost() -> None:
    slow = replace(
        COSTS,
        t_v=PassCurves(
            [ContextCurve(context=0, t_v=RowsSeconds.rising((1, 2, 4), (100.0, 110.0, 130.0)))]
        ),
    )
    (play,), _ = play_all(KNOWING, slow, CHAIN, ahead=False)
    assert (play.result.rounds, play.result.moves) == (5, 0)


def test_drafting_ahead_hides_the_draft_behind_the_target() -> None:
    """A chain of three takes some 3 ms, the target 13: with ahead, all but the first proposal lie
    there when they are asked for."""
    waiting, ahead = (figures([played(KNOWING, ahead=choice).result]) for choice in (False, True))
    assert ahead.tau == waiting.tau
    assert ahead.hit_rate is not None
    assert ahead.hit_rate >= 0.8
    assert ahead.draft_s < 0.5 * waiting.draft_s
    assert ahead.tokens_per_s > 1.1 * waiting.tokens_per_s


def test_goodput_leaves_a_draft_alone_that_is_always_wrong() -> None:
    long = tuple(11 + place % 60 for place in range(300))
    library = Library(about(max_tokens=300), (recording(long, fool),))
    tree = TreeSettings(policy="goodput", gamma=8, depth=3, width=1, sharpening=1.0)
    speculating, alone = (
        figures([played(library, tree, speculate=choice).result]) for choice in (True, False)
    )
    assert speculating.plain_share > 0.8
    assert speculating.tokens_per_s > 0.95 * alone.tokens_per_s


def test_a_stage_plays_several_replies_and_learns_from_one_to_the_next() -> None:
    other = recording((*REPLY[:8], END), fool, id="two", prompt=(92,))
    library = Library(about(), (KNOWING.recordings[0], other))
    stage, _ = open_stage(library, COSTS)
    plays = [stage.play(one, CHAIN, ahead=False, records=True) for one in library.recordings]
    assert [play.result.token_ids for play in plays] == [one.tokens for one in library.recordings]
    assert [len(play.rounds) for play in plays] == [5, 8]
    assert [record.accepted for record in plays[0].rounds] == [(0, 1, 2)] * 5
    assert figures([play.result for play in plays]).tau == pytest.approx(28 / 13)


def test_what_was_not_recorded_has_no_children_and_is_counted() -> None:
    shallow = Library(about(), (recording(REPLY, fool, depth=1),))
    plays, coverage = play_all(shallow, COSTS, CHAIN, ahead=False)
    assert plays[0].result.tau == 1.0
    assert coverage.missing_share == pytest.approx(0.5, abs=0.05)


# -- methods ---------------------------------------------------------------------------------------


def test_a_method_is_a_policy_with_settings_behind_it() -> None:
    base = configure(environment={})
    method = read_method(base, "dynamic,gamma=59,tree.depth=6,width=4,ahead=false", about())
    assert (
        method.tree.policy,
        method.tree.gamma,
        method.tree.depth,
        method.tree.width,
        method.ahead,
    ) == ("dynamic", 59, 6, 4, False)
    assert method.tree.sharpening == 1.0
    assert vary(read_method(base, "beam,width=4", about()), "depth", 5).tree.gamma == 20
    for text, words in (
        ("sturdy", "is not a tree policy"),
        ("dynamic,gamma", "is not a setting"),
        ("dynamic,width=5", "4 children of a node were recorded"),
        ("dynamic,sharpening=2,width=4", "recorded with a sharpening of 1"),
    ):
        with pytest.raises(UserError, match=words):
            read_method(base, text, about())


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder with a recording."""
    folder = Folder(tmp_path / "recording", about())
    folder.write(0, KNOWING.recordings[0])
    return tmp_path / "recording"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line of ours."""
    code = execute(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_run_prints_a_table_writes_json_and_draws(
    capsys: pytest.CaptureFixture[str], shelf: Path, tmp_path: Path
) -> None:
    plot, out = tmp_path / "p.svg", tmp_path / "o.json"
    machine = ("--machine=dovetail-laptop", "--target-size=13B", "--tree.width=1")
    methods = ("--method=static,gamma=3,depth=3", "--method=static,gamma=1,depth=1,ahead=false")
    code, printed, complained = told(
        capsys, "run", f"--rounds={shelf}", *machine, *methods, f"--plot={plot}", f"--out={out}"
    )
    assert (code, complained) == (0, "")
    assert "Dovetail's laptop" in printed
    long, short = json.loads(out.read_text())["rows"]
    assert long["tau"] == 4.0
    assert short["tau"] == 2.0
    assert long["speedup"] > short["speedup"] > 1.0
    assert 'class="curve"' in plot.read_text()


def test_a_sweep_over_ratios_sets_ahead_beside_not(
    capsys: pytest.CaptureFixture[str], shelf: Path
) -> None:
    sweep = ("--sweep=ratio", "--values=0.1,1", "--tree.width=1", "--method=static,gamma=3,depth=3")
    code, printed, complained = told(capsys, "run", f"--rounds={shelf}", *sweep, "--json")
    assert (code, complained) == (0, "")
    slight, equal = json.loads(printed)["rows"]
    assert (slight["value"], equal["value"]) == (0.1, 1.0)
    assert equal["waiting"]["draft_s"] == pytest.approx(equal["waiting"]["verify_s"], rel=0.3)
    assert equal["gain"] > slight["gain"] > 1.0


def test_rounds_that_generate_recorded_are_costs_to_play_with(
    capsys: pytest.CaptureFixture[str], shelf: Path, tmp_path: Path
) -> None:
    """Played with the costs of its own rounds, a reply takes as long again."""
    play = open_stage(KNOWING, COSTS)[0].play(
        KNOWING.recordings[0], CHAIN, ahead=False, records=True
    )
    with open_records(tmp_path / "rounds.jsonl") as file:
        for record in play.rounds:
            file.write("one", 0, record)
    costs = ("--tree.width=1", f"--costs={tmp_path / 'rounds.jsonl'}")
    code, printed, _ = told(
        capsys,
        "run",
        f"--rounds={shelf}",
        *costs,
        "--method=static,gamma=3,depth=3,ahead=false",
        "--json",
    )
    assert code == 0
    assert json.loads(printed)["rows"][0]["tokens_per_s"] == pytest.approx(
        figures([play.result]).tokens_per_s, rel=0.02
    )


def test_a_name_of_no_draft_is_refused_before_models_are_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, printed, complained = told(capsys, "record", "--draft=foo", f"--out={tmp_path / 'r'}")
    assert (code, printed) == (2, "")
    assert "foo is no kind of draft" in complained
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--machine=toaster",), "there is no machine 'toaster'"),
        (("--values=3",), "--values says nothing without --sweep"),
        (("--sweep=ratio", "--values=a"), "not a list of ratios"),
        (("--sweep=ratio", "--machine=heterospec-h20"), "share a device"),
        (("--machine=heterospec-h20", "--method=dynamic,ahead=true"), "share a device"),
        (("--plot=p.png",), "a plot is an SVG"),
        (("--costs=nowhere.jsonl",), "nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], shelf: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, printed, complained = told(
        capsys, "run", f"--rounds={shelf}", "--tree.width=4", *arguments
    )
    assert (code, printed) == (2, "")
    assert words in complained
    assert len(complained.splitlines()) == 1


def test_the_machines_are_listed_by_the_program() -> None:
    program = [sys.executable, str(Path(__file__).parent / "simulation")]
    done = subprocess.run(
        [*program, "machines", "--target-size=70B"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in machine_names())


def test_a_round_on_the_die_of_the_paper_takes_as_many_passes_as_the_paper_says() -> None:
    """Jakiro, Table 1, Vicuna 7B on MT-bench at temperature 0: 2.99 times the target alone at tau
    4.96, EAGLE-2, with a level more, 2.75 times at 4.94."""
    machine = read_machine("jakiro-mi250")
    costs = placed_costs(machine, read_size("7B"), machine.weights)
    for passes, tau, speedup in ((5, 4.96, 2.99), (6, 4.94, 2.75)):
        round_s = costs.verify_s(60, 512) + passes * costs.t_d.at(10)
        assert round_s / costs.verify_s(1, 512) == pytest.approx(tau / speedup, rel=0.05)


# -- beside real workers ---------------------------------------------------------------------------


TEXTS = ("dynamic,gamma=15,depth=8,ahead=false", "static,gamma=9,depth=4,width=4,ahead=false")
"""Trees that no measured time has a say in."""


def opened(kind: str) -> tuple[TargetWorker, DraftWorker[Any]]:
    """The embedded pair."""
    target = with_target(TargetSettings())
    draft = open_draft_worker(
        with_draft(DraftSettings(kind=kind)), name="draft", threads=1, target=target.model
    )
    return open_target_worker(target, name="target", threads=1), draft


def recorded(folder: Path, kind: str, temperature: float, tokens: int) -> Library:
    """The first shipped prompts, recorded with the embedded pair."""
    recorder = Recorder(
        *opened(kind), Order(Sampling(temperature=temperature), 5, 1.0, 256, 10, 10, tokens)
    )
    prompts = read_prompts(DEMO_FOLDER / "prompts.jsonl")[:2]
    assert recorder.record_all(prompts, Folder(folder, recorder.about), lambda _: None) == 2
    assert recorder.record_all(prompts, Folder(folder, recorder.about), lambda _: None) == 0, (
        "all of it is there"
    )
    return read_library(folder)


def rounds_of(records: Sequence[RoundRecord]) -> list[object]:
    """Return what was offered and accepted, round by round."""
    return [(record.tokens, record.parents, record.accepted, record.bonus) for record in records]


@pytest.mark.parametrize(
    ("kind", "temperature"), everyday([("small", 1.0), ("dovetail", 0.0)], ("small", 1.0))
)
def test_rounds_are_those_of_the_workers_themselves(
    tmp_path: Path, kind: str, temperature: float
) -> None:
    """A recording offers the same trees, and the same paths are accepted, as when the models
    compute them on the same stage."""
    library = recorded(tmp_path / "r", kind, temperature, 32)
    real = Stage(library.about, COSTS, *(Actor(worker, Clock()) for worker in opened(kind)))
    for text in TEXTS:
        method = read_method(configure(environment={}), text, library.about)
        simulated, coverage = open_stage(library, COSTS)
        for one in library.recordings:
            ours, theirs = (
                stage.play(one, method.tree, ahead=False, records=True)
                for stage in (simulated, real)
            )
            assert rounds_of(ours.rounds) == rounds_of(theirs.rounds)
            assert ours.result.tau == theirs.result.tau
        assert not coverage.missing


def test_a_draft_that_shares_a_core_with_its_target_is_compared_without_what_it_does_ahead() -> (
    None
):
    alone, apart = (CoreLayout(Place((0,)), Place((core,)), Place((core,))) for core in (0, 1))
    found_out, waiting, ahead = (
        Method("goodput", TreeSettings(policy="goodput"), wish) for wish in (None, False, True)
    )
    assert as_on(apart, [found_out, waiting, ahead]) == [found_out, waiting, ahead]
    assert as_on(alone, [found_out, waiting]) == [waiting, waiting]
    with pytest.raises(
        UserError, match=r"share core 0 here.*: write --method goodput,ahead=false$"
    ):
        as_on(alone, [waiting, ahead])
    named = Method("goodput,ahead=true,gamma=6", TreeSettings(policy="goodput"), True)
    with pytest.raises(UserError, match=r": write --method goodput,gamma=6,ahead=false$"):
        as_on(alone, [named])


@pytest.mark.slow
def test_rounds_are_those_of_real_processes(tmp_path: Path) -> None:
    library = recorded(tmp_path / "r", "small", 1.0, 48)
    configuration = configure(environment={})
    methods = [read_method(configuration, text, library.about) for text in TEXTS]
    for method, replies in decode_all(configuration, library, methods):
        plays, _ = play_all(
            library,
            measured_costs([record for reply in replies for record in reply.rounds]),
            method.tree,
            ahead=False,
        )
        for play, reply in zip(plays, replies, strict=True):
            assert (play.result.rounds, play.result.tau) == (reply.result.rounds, reply.result.tau)
