"""`dovetail bench --sweep`: one size of the tree over a list of values."""

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.bench.methods import Method, read_method
from dovetail.launch.bench.sweep import VALUES, draw_sweep, points_of, read_sweep, swept
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import SettingsError, UserError
from support.charts import shapes_of, texts_of

RunCommand = Callable[..., subprocess.CompletedProcess[str]]


def method(text: str) -> Method:
    return read_method(configure(environment={}), text)


def told(name: str, prompts: str, speedup: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row and its pass, as `bench` has them."""
    known = {
        "method": name,
        "prompts": prompts,
        "temperature": 0.0,
        "tau": 2.0,
        "tokens_per_s": 9.0,
        "speedup": speedup,
        "hit_rate": None,
        "calls": 4,
    }
    ends = None if speedup is None else 0.1
    row = {
        **known,
        "verified_tokens": 20,
        "draft_failures": 0,
        "speedup_low": ends and speedup and speedup - ends,
        "speedup_high": ends and speedup and speedup + ends,
    }
    return row, {"verify_ms": 3.0, "ratio": 1.5, "draft_ms": 1.0}


@pytest.mark.slow
def test_a_sweep_of_gamma_measures_each_value_on_the_same_processes_and_draws_the_figure(
    run: RunCommand, tmp_path: Path
) -> None:
    prompts, plot = tmp_path / "few.jsonl", tmp_path / "figure.svg"
    prompts.write_text(
        "".join(
            json.dumps({"id": id, "turns": [text]}) + "\n"
            for id, text in (("a", "Hello."), ("b", "What is two plus two?"))
        )
    )
    options = (
        "--prompts",
        str(prompts),
        *shlex.split("--method small --max-tokens 12 --draft.device cpu --plot"),
        str(plot),
        "--json",
    )
    done = run("bench", "--sweep", "gamma", "--values", "4,1", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(row["method"], row["gamma"]) for row in report["rows"]] == [
        ("none", 0),
        ("small,tree.gamma=1", 1),
        ("small,tree.gamma=4", 4),
    ]
    small, large = report["sweep"]["points"]
    assert (report["sweep"]["setting"], small["value"], large["value"]) == ("tree.gamma", 1, 4)
    assert large["verified_tokens"] / large["calls"] > small["verified_tokens"] / small["calls"]
    assert large["tau"] >= small["tau"] > 0
    assert report["rows"][1]["peak_rss_mb"] == report["rows"][2]["peak_rss_mb"]
    texts = texts_of(plot.read_text())
    assert {
        "Acceptance length, tau",
        "Speed-up over the target alone",
        "Target pass, T_V",
    } <= {*texts}


def test_every_value_is_a_method_of_its_own_name_that_shares_the_processes_of_the_first() -> None:
    points = points_of(
        read_sweep("gamma", "8, 2"), [method("none"), method("small"), method("assisted")]
    )
    assert [point.name for point in points] == shlex.split(
        "none small,tree.gamma=2 small,tree.gamma=8 assisted"
    )
    assert [point.shares for point in points] == ["", "small", "small", ""]
    assert [point.configuration.settings.tree.gamma for point in points[1:3]] == [2, 8]


def test_a_beam_that_gets_more_levels_gets_their_nodes() -> None:
    beam, dynamic = method("small,tree.policy=beam,tree.width=6"), method("small")
    shapes = [
        point.configuration.settings.tree for point in read_sweep("depth", "4,48").points(beam)
    ]
    assert [(tree.depth, tree.gamma) for tree in shapes] == [(4, 24), (48, 288)]
    assert {
        point.configuration.settings.tree.gamma
        for point in read_sweep("depth", None).points(dynamic)
    } == {dynamic.configuration.settings.tree.gamma}


@pytest.mark.parametrize("name", list(VALUES))
def test_the_values_of_the_papers_are_possible(name: str) -> None:
    assert len(read_sweep(name, None).points(method("small"))) == len(VALUES[name].split(","))


@pytest.mark.parametrize("values", ["", "1,1", "0,4", "x", "-3", "1,2000"])
def test_values_that_are_none_are_refused(values: str) -> None:
    with pytest.raises((UserError, SettingsError)):
        read_sweep("gamma", values or ",")


def test_what_is_swept_cannot_be_fixed_by_a_method_nor_swept_where_nothing_drafts() -> None:
    with pytest.raises(UserError, match=r"sets tree\.gamma, which --sweep gamma varies"):
        points_of(read_sweep("gamma", "1,2"), [method("small,tree.gamma=6")])
    with pytest.raises(UserError, match="needs a method that drafts"):
        points_of(read_sweep("gamma", "1"), [method("none")])


def test_heterospec_is_swept_over_depth_only_with_thresholds_that_are_numbers() -> None:
    shaped = "small,tree.policy=heterospec,tree.gamma=15,tree.depth=8,tree.width=4"
    base, sweep = configure(environment={}), read_sweep("depth", "4,8")
    numbers = base.over("--tree.thresholds", {"tree.thresholds": (1.0, 2.0)})
    fixed = read_method(numbers, "small,tree.policy=heterospec,tree.gamma=15")
    assert [point.configuration.settings.tree.depth for point in sweep.points(fixed)] == [4, 8]
    for name, value in (("tree.gamma", 15), ("tree.depth", 8), ("tree.width", 4)):
        base = base.over("--config", {name: value})
    with pytest.raises(
        UserError,
        match=r"thresholds of heterospec \(small,tree\.policy=heterospec\) hold for one depth, "
        r"here 8: sweep gamma",
    ):
        sweep.points(read_method(base, "small,tree.policy=heterospec"))
    assert (
        len(read_sweep("gamma", "2,4").points(read_method(base, "small,tree.policy=heterospec")))
        == 2
    )
    with pytest.raises(UserError, match=r"sets tree\.depth, which --sweep depth varies"):
        sweep.points(method(shaped))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--values", "1"), "--values needs --sweep"),
        (("--plot", "a.svg", "--method", "none"), "--plot draws speed-ups over none"),
    ],
)
def test_options_without_what_they_belong_to_are_refused(
    invoke: RunCommand, options: tuple[str, ...], words: str
) -> None:
    done = invoke("bench", *options)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_figure_has_a_curve_for_each_method_and_set_and_leaves_out_what_was_not_found() -> None:
    sweep, methods = read_sweep("gamma", "1,4"), [method("none"), method("small")]
    found = [
        told(f"small,tree.gamma={value}", name, speedup)
        for name, speedup in (("easy", 2.0), ("hard", None))
        for value in (1, 4)
    ]
    result = {"rows": [row for row, _ in found], "passes": [passes for _, passes in found]}
    points = swept(sweep, methods, result)
    assert [(point["method"], point["value"], point["prompts"]) for point in points] == [
        ("small", v, p) for p in ("easy", "hard") for v in (1, 4)
    ]
    svg = draw_sweep(sweep, methods, points)
    assert len(shapes_of(svg, "curve")) == 4 + 3, "two curves a chart, but one of speed-up"
    assert svg.count('class="band"') == 1
    names = texts_of(svg)
    assert (names.count("small easy"), names.count("small hard")) == (1, 1)


def test_a_figure_says_what_was_measured() -> None:
    sweep, (row, passes) = read_sweep("gamma", "4"), told("small,tree.gamma=4", "set", 2.0)
    base = configure(environment={}).over("--policy", {"tree.policy": "goodput"})
    methods = [read_method(base, text) for text in ("none", "small", "small,tree.policy=budget")]
    svg = draw_sweep(sweep, methods, swept(sweep, methods, {"rows": [row], "passes": [passes]}))
    weights = base.settings.target.weights
    origin = f"target demo ({weights}) · draft small · policy goodput, budget · T 0"
    assert {"What gamma brings", origin} <= set(texts_of(svg))
