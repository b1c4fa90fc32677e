"""A target is spread over memory nodes if the settings say so, or if that was measured to be
faster."""

from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.machine.cores import lay_out
from dovetail.launch.machine.sharding import (
    ROWS,
    choose_numa,
    known_times,
    may_be_sharded,
    node_times,
    other_layout,
)
from dovetail.launch.machine.topology import Topology, read_topology
from dovetail.launch.processes.preflight import check_shards
from dovetail.protocol.calibration import Calibration, MachineLimits, RowsSeconds
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.profile import Profile, load_profile, rewrite_profile
from dovetail.protocol.settings import Settings, TargetSettings
from support.sysfs import ONE_NODE, TWO_SOCKETS, WITH_CXL, write_machine

TARGET = TargetSettings(model="OWNER/NAME")


@pytest.fixture
def two(tmp_path: Path) -> Topology:
    return read_topology(write_machine(tmp_path / "two", TWO_SOCKETS), affinity=range(16))


def taking(seconds: float) -> Calibration:
    curve = RowsSeconds(rows=(1, ROWS), seconds=(seconds / 2, seconds))
    limits = MachineLimits(bandwidth_gb_s=1.0, peak_gflop_s={}, probe="made up")
    return Calibration(
        measured="now", backend="kernels", context=0, t_v=curve, t_v_limit=curve,
        t_v_by_context=(), layers=1,
        layers_measured=1, limits=limits,
    )  # fmt: skip


def test_what_is_measured_decides_and_is_said(two: Topology, tmp_path: Path) -> None:
    assert choose_numa(TARGET, two, Profile()).numa == "auto"
    assert "`dovetail calibrate` measures" in choose_numa(TARGET, two, Profile()).words
    path = tmp_path / "profile.json"
    for alone, sharded, numa, words in (
        (0.055, 0.031, "shard", "spread over memory nodes 0-1: a pass of 16 rows takes 31 ms"),
        (0.030, 0.031, "auto", "on one memory node: a pass of 16 rows takes 30 ms"),
    ):
        times = node_times(TARGET, two, taking(alone), taking(sharded))
        rewrite_profile(path, lambda known, times=times: known.with_nodes(times))
        known = load_profile(path)
        assert len(known.nodes) == 1
        assert known_times(TARGET, two, known) == times
        found = choose_numa(TARGET, two, known)
        assert found.numa == numa
        assert words in found.words
    other = TARGET.model_copy(update={"weights": "int8"})
    assert known_times(other, two, known) is None
    assert choose_numa(TARGET, two, known, shares=True).numa == "auto"


def test_where_there_is_one_node_or_one_is_named_there_is_nothing_to_say(
    two: Topology, tmp_path: Path
) -> None:
    one = read_topology(write_machine(tmp_path, ONE_NODE), affinity=range(4))
    found = choose_numa(TARGET, one, Profile())
    assert (found.numa, found.words) == (
        "auto", "",
    )  # fmt: skip
    named = TARGET.model_copy(update={"numa": 1})
    assert choose_numa(named, two, Profile()).words == ""
    asked = TARGET.model_copy(update={"numa": "shard"})
    assert "nodes 0-1 (target.numa)" in choose_numa(asked, two, Profile()).words


def test_the_other_way_is_measured_beside_the_one_in_use(two: Topology, tmp_path: Path) -> None:
    now = lay_out(two)
    other = other_layout(TARGET, two, now)
    assert other.target.nodes == (0, 1)
    assert other_layout(TARGET, two, other) == now
    assert may_be_sharded(TARGET, two)
    assert not may_be_sharded(TARGET.model_copy(update={"threads": 1}), two)
    cxl = read_topology(write_machine(tmp_path, WITH_CXL), affinity=range(8))
    assert may_be_sharded(TARGET, cxl)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "cuda:0"}, "target.device is 'cuda:0'"),
        ({"split": {"device": "cuda:0"}}, "last layers"),
        ({"prefill": "cuda:0"}, "reads prompts"),
        ({"backend": "library"}, "torch computes it"),
        ({"weights": "bf16"}, "bf16 weights"),
    ],
)
def test_what_the_kernels_do_not_compute_on_the_cpu_is_refused_in_a_sentence(
    fields: dict[str, Any], words: str, two: Topology
) -> None:
    check_shards(Settings(target={"numa": "shard"}))
    with pytest.raises(SettingsError, match=words):
        check_shards(Settings(target={"numa": "shard", **fields}))
    assert not may_be_sharded(TargetSettings(**fields), two)
    with pytest.raises(SettingsError, match=r"draft\.share"):
        check_shards(Settings(target={"numa": "shard"}, draft={"share": True}))
