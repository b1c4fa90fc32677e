"""`dovetail calibrate` as users have it."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from dovetail.launch.commands import calibrate as command
from dovetail.launch.commands.calibrate import _parts
from dovetail.launch.machine import sharding
from dovetail.launch.machine.topology import read_topology
from dovetail.protocol.calibration import DeviceCosts, RowsSeconds
from dovetail.protocol.profile import load_profile
from support.charts import shapes_of
from support.models import tiny_llama
from support.sysfs import FakeNode, write_machine

Calibrate = Callable[..., CompletedProcess[str]]


@pytest.fixture
def calibrate(run: Any, tmp_path: Path, environment: dict[str, str]) -> Calibrate:
    """Runs the command shortly, with a cache directory of its own."""
    changed = {**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return lambda *arguments, **variables: run(
        *("calibrate", "--seconds", "0.2", "--keep-anyway", *arguments),
        env={**changed, **variables},
    )  # type: ignore[no-any-return]


@pytest.fixture
def refused(invoke: Any, tmp_path: Path, environment: dict[str, str]) -> Calibrate:
    """Runs the command in this process, to be told what is wrong."""
    changed = {**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return lambda *arguments: invoke("calibrate", *arguments, env=changed)  # type: ignore[no-any-return]


def config_alone(folder: Path) -> Path:
    """A tiny model without weights or a tokenizer, which cannot be served."""
    tiny_llama(folder)
    for file in (*folder.glob("*.safetensors"), folder / "tokenizer.json"):
        file.unlink()
    return folder


@pytest.mark.slow
def test_the_embedded_pair_is_measured_and_kept(calibrate: Calibrate, tmp_path: Path) -> None:
    result = calibrate("--json", "--draft.device", "cpu", "--plot", str(tmp_path / "plot.svg"))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    names = {
        "t_v",
        "t_v_limit",
        "t_v_by_context",
        "t_d",
        "bandwidth_gb_s",
        "peak_gflop_s",
        "backends",
    }
    assert names <= set(found)
    assert found["overhead_ms"] is None or found["overhead_ms"] > 0.0
    assert not {"key", "calibration"} & set(found)
    assert (len(found["t_v"]), found["context"], next(iter(found["t_d"]))) == (64, 384, "1")
    (entry,) = (
        entry
        for entry in load_profile(tmp_path / "cache/dovetail/profile.json").entries
        if entry.calibrations
    )
    assert entry.calibrations[0].t_v.at(16) == found["t_v"]["16"]
    (levels,) = (
        entry.levels
        for entry in load_profile(tmp_path / "cache/dovetail/profile.json").entries
        if entry.levels
    )
    assert levels.t_v.at(10) == found["t_d"]["10"]
    curves = shapes_of((tmp_path / "plot.svg").read_text(), "curve")
    assert len(curves) == len(found["t_v_by_context"]) + 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two nodes need a core each")
@pytest.mark.slow
def test_on_two_memory_nodes_a_target_is_measured_on_one_and_over_both(
    refused: Calibrate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node has a core of this machine and memory of none: its policy is refused, and
    pages are those of the core that writes first."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    nodes = {0: FakeNode([[first]], 16), 1: FakeNode([[last]], 16)}
    topology = read_topology(write_machine(tmp_path / "two", nodes), affinity=(first, last))
    monkeypatch.setattr(sharding, "read_topology", lambda: topology)
    monkeypatch.setattr(command, "read_topology", lambda: topology)
    result = refused("--seconds", "0.2", "--draft", "none", "--keep-anyway")
    assert result.returncode == 0, result.stderr
    known = load_profile(tmp_path / "cache/dovetail/profile.json")
    assert sorted((entry.key.shards, entry.key.threads) for entry in known.entries) == [
        (1, 1),
        (2, 2),
    ]
    (times,) = known.nodes
    faster = "spread over" if times.sharded_s < times.alone_s else "on one memory node: a pass"
    assert f"the target is {faster}" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_an_instruction_set_is_kept_and_what_a_library_prints_is_not_taken_for_a_finding(
    calibrate: Calibrate, tmp_path: Path
) -> None:
    model = str(tiny_llama(tmp_path / "model"))
    result = calibrate(
        "--target",
        model,
        *shlex.split("--target.isa plain --keep-anyway --backend library --json"),
        ONEDNN_VERBOSE="1",
        MKL_VERBOSE="1",
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["backends"]["backend"] == "library"
    (entry,) = load_profile(tmp_path / "cache/dovetail/profile.json").entries
    assert entry.calibrations[0].limits.probe == "kernels plain C++"


def test_parts_that_were_measured_at_other_rows_are_told_together() -> None:
    few, many = (
        RowsSeconds(rows=(1, 2), seconds=(0.001, 0.003)),
        RowsSeconds(rows=(1, 2, 4), seconds=(0.001, 0.002, 0.004)),
    )
    costs = DeviceCosts(
        device="cpu",
        link_gb_s=1.0,
        layer=many,
        streamed=few,
        head=few,
        host_layer=few,
        host_head=few,
    )
    assert _parts(costs.model_dump(mode="json")).endswith("4 rows 7; 4; 7 ms")


def test_on_a_busy_machine_nothing_is_saved_and_the_busy_programs_are_reported(
    run: Any, tmp_path: Path, environment: dict[str, str]
) -> None:
    cache = {**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    model = str(config_alone(tmp_path / "model"))
    with subprocess.Popen([sys.executable, "-c", "while 1: pass"]) as busy:
        try:
            flags = ("--seconds=0.1", "--target", model, "--draft=none", "--json")
            result = run("calibrate", *flags, env=cache)
        finally:
            busy.kill()
    assert result.returncode == 1
    assert "nothing was saved because other programs use" in result.stderr
    found = json.loads(result.stdout)["others"]
    assert found["share"] > 0.1
    assert found["programs"]
    assert not (tmp_path / "cache" / "dovetail" / "profile.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "/nowhere"), "has no config.json"),
        pytest.param(("--target.device", "cuda:99"), "there is no cuda:99", marks=pytest.mark.slow),
        (("--target.resident", "3"), "leave it out"),
        (
            ("--weights", "file", "--target.split.device", "cpu"),
            "layers on cpu are measured with random weights, not with target.weights = 'file'",
        ),
        (("--plot", "plot.png"), "plot.svg"),
        (("--target.numa", "7"), "there is no node 7"),
        (("--target.numa", "everywhere"), "target.numa"),
        pytest.param(("--context", "100000"), "--context 100000", marks=pytest.mark.slow),
        (("--seconds", "nan"), "is not a number"),
        (("--seconds", "inf"), "--seconds"),
    ],
)
def test_a_mistake_is_one_line(refused: Calibrate, arguments: tuple[str, ...], words: str) -> None:
    result = refused(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_where_nothing_can_be_kept_it_is_measured_all_the_same(
    calibrate: Calibrate, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    flags = ("--target", str(config_alone(tmp_path / "model")), "--draft=none")
    result = calibrate(*flags, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert (result.returncode, "cannot be written" in result.stderr) == (0, True), result.stderr


def test_a_damaged_profile_file_is_told_by_name(refused: Calibrate, tmp_path: Path) -> None:
    path = tmp_path / "cache/dovetail/profile.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    result = refused("--seconds", "3600")  # told before anything is measured
    assert result.returncode == 2
    assert f"the profile file {path} is damaged" in result.stderr
