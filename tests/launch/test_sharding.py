"""A target is spread over memory nodes if the settings say so, or if that was measured to be
faster; a service whose target is spread writes what it would undivided, whatever happens to it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from dovetail.launch.machine import sharding
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
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.calibration import Calibration, MachineLimits, RowsSeconds
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.links import open_link
from dovetail.protocol.messages import Reported, Role, WorkerState
from dovetail.protocol.profile import Profile, load_profile, rewrite_profile, update_profile
from dovetail.protocol.settings import Settings, TargetSettings
from dovetail.runtime.client import Client
from dovetail.runtime.costs.rounds import MEETING_S
from dovetail.workers.calibration.devices import keys_of
from support.by_hand import Stream, bodies
from support.kernels import needs_kernels
from support.patience import PATIENCE_S
from support.served import ask, assert_nothing_is_left, ready
from support.sysfs import ONE_NODE, TWO_SOCKETS, WITH_CXL, FakeNode, write_machine

TARGET = TargetSettings(model="OWNER/NAME")
CORES = sorted(os.sched_getaffinity(0))
ELSEWHERE = (
    sys.executable,
    "-P",
    "-c",
    "import sys; from pathlib import Path; from dovetail.launch import cli; "
    "from dovetail.launch.machine.topology import read_topology; "
    "read_topology.__defaults__ = (Path(sys.argv.pop(1)),); cli.main()",
)
"""A command line on the machine whose files lie in the folder that is its first argument."""
SERVE = ("--http.port=0", "--json", "--draft.device=cpu")
LONG_S = 600.0
"""The limit, in seconds, of what takes long on a machine that has other things to do."""
PATIENT = f"--coordinator.recovery_s={LONG_S:.0f}"
TREE = ("--policy=dynamic", "--tree.insist=true", "--gamma=7")


@pytest.fixture
def two(tmp_path: Path) -> Topology:
    return read_topology(write_machine(tmp_path / "two", TWO_SOCKETS), affinity=range(16))


def taking(seconds: float) -> Calibration:
    curve = RowsSeconds(rows=(1, ROWS), seconds=(seconds / 2, seconds))
    limits = MachineLimits(bandwidth_gb_s=1.0, peak_gflop_s={"fp32": 1.0}, probe="made up")
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
        rewrite_profile(path, lambda known, times=times: known.holding(times))
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


Start = Callable[..., subprocess.Popen[str]]
LEFT = 8
"""Chunks behind which a client leaves."""


def mixed(undivided: str) -> list[dict[str, Any]]:
    """Requests of every kind: short and long prompts, greedy and sampled, two that end at a text
    which the replies of a service at this address have."""
    asked = [{**body, "min_tokens": body["max_tokens"]} for body in bodies(10, 72)]
    for body in asked[4:8]:
        body["messages"] = [{"role": "user", "content": body["messages"][0]["content"] * 16}]
    for body in asked[8:]:
        words = Stream(body).read(undivided).text.split()
        body["stop"] = " ".join(words[len(words) // 2 :][:2])
        del body["min_tokens"]
    return asked


@pytest.fixture
def plan(
    invoke: Callable[..., Any],
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., dict[str, Any]]:
    """Return a function that returns what `dovetail plan` says of the target alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def plan(*arguments: str) -> dict[str, Any]:
        own = {**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        said = invoke("plan", "--json", "--draft=none", *arguments, env=own)
        assert said.returncode == 0, said.stderr
        return dict(json.loads(said.stdout))

    return plan


def test_a_plan_spreads_a_large_target_of_a_described_machine_and_a_tiny_one_not(
    plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    large = plan("--machine=two-xeons", "--target-size=7B")
    spread, alone = large["alternatives"]
    assert spread["settings"] == {"target.numa": "shard", "draft.kind": "none"}
    assert spread["memory_nodes"] == 2
    assert alone["settings"] == {"draft.kind": "none"}
    rest_s = 1 / spread["tokens_per_s"] - 1 / (2 * alone["tokens_per_s"])
    assert rest_s == pytest.approx(32 * MEETING_S, rel=0.4)  # half of the messages are in it
    passes = large["origins"]["passes over 2 memory nodes"]
    assert "50 us a layer for traffic between nodes (assumed" in passes
    assert "over 2 memory nodes (target.numa = 'shard'): 1.9" in " ".join(large["verdict"])
    shape = {"hidden_size": 256, "num_hidden_layers": 16, "intermediate_size": 512}
    heads = {"num_attention_heads": 4, "vocab_size": 512}
    config = json.dumps({"model_type": "llama", **shape, **heads})
    (tmp_path / "config.json").write_text(config)
    tiny = plan("--machine=two-xeons", f"--target={tmp_path}")
    assert [one["memory_nodes"] for one in tiny["alternatives"]] == [1, 2]
    assert "target.numa" not in tiny["choice"]["settings"]
    (only,) = plan("--machine=two-xeons", "--target-size=7B", "--target.numa=shard")["alternatives"]
    assert only == spread | {"speedup": 1.0}


@needs_kernels
def test_a_plan_of_this_machine_spreads_a_target_by_what_was_measured_of_it_or_of_another(
    plan: Callable[..., dict[str, Any]],
    two: Topology,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven threads over both nodes, four on one."""
    monkeypatch.setattr(sharding, "read_topology", lambda: two)
    file, over = tmp_path / "cache/dovetail/profile.json", "passes over 2 memory nodes"

    def keep(weights: str, shards: int, threads: int, seconds: float) -> None:
        own = TargetSettings(model=str(DEMO_FOLDER / "target"), weights=weights)
        key = next(keys_of(own, shards, threads))
        update_profile(file, key, lambda entry: entry.having(taking(seconds)))

    def origin() -> str:
        return str(plan("--weights=fp32")["origins"][over])

    keep("fp32", 1, 4, 0.07)
    assert origin().startswith("1/1.75 of a pass on one node (measured, now), and 50 us a layer")
    keep("half", 1, 4, 0.035)
    keep("half", 2, 7, 0.021)
    assert origin().endswith("and 1e+03 us a layer (measured with another model)")
    for seconds, settings in ((0.05, {"target.numa": "shard"}), (0.08, {})):
        keep("fp32", 2, 7, seconds)
        found = plan("--weights=fp32")
        assert found["origins"][over] == "measured, now"
        assert found["choice"]["settings"] == {**settings, "draft.kind": "none"}
        assert found["choice"]["round_ms"]["verify"] == pytest.approx(min(seconds, 0.07) * 500)


@dataclass
class Users:
    """Clients of a service whose target is spread, each of whose replies is known."""

    url: str
    asked: list[dict[str, Any]]
    whole: list[Stream]

    def during(self, happens: Callable[[], object]) -> None:
        """Have all requests run at once, and one client more who leaves; once all have begun,
        something happens."""
        streams = [Stream(body) for body in (*self.asked, self.asked[0])]
        most = [None] * len(self.asked) + [LEFT]
        threads = [
            Thread(target=stream.read, args=(self.url,), kwargs={"most": count})
            for stream, count in zip(streams, most, strict=True)
        ]
        for thread in threads:
            thread.start()
        while not all(stream.heard_s for stream in streams):
            assert not any(stream.error for stream in streams), streams
            time.sleep(0.01)
        assert any(thread.is_alive() for thread in threads)
        happens()
        for thread in threads:
            thread.join()
        *streams, left = streams
        assert self.whole[0].text.startswith(left.text)
        assert left.text
        assert [stream.error for stream in streams if stream.error] == []
        for found, expected in zip(streams, self.whole, strict=True):
            assert found.outcome == expected.outcome


@pytest.mark.skipif(len(CORES) < 2, reason="two nodes need a core each")
@needs_kernels
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_service_over_memory_nodes_writes_what_it_would_undivided_whatever_happens_to_it(
    start: Start, tmp_path: Path
) -> None:
    """The second node has a core of this machine and memory of none."""
    nodes = {0: FakeNode([[CORES[0]]], 64), 1: FakeNode([[CORES[-1]]], 64)}
    command = (*ELSEWHERE, str(write_machine(tmp_path / "two", nodes)))
    alone = start("serve", *SERVE, "--draft=none", "--coordinator.journal=off")
    undivided = ready(alone)
    asked = mixed(undivided["url"])
    whole = [Stream(body).read(undivided["url"]) for body in asked]
    alone.terminate()
    assert alone.wait(PATIENCE_S) == 0
    assert [stream.finish_reason for stream in whole] == ["length"] * 8 + ["stop"] * 2

    journal = f"--coordinator.journal={tmp_path}/journal"
    service = start(
        "serve", *SERVE, *TREE, "--target.numa=shard", journal, PATIENT, command=command
    )
    found = ready(service)
    users = Users(found["url"], asked, whole)

    def run(*arguments: str) -> None:
        process = start(*arguments, command=command)
        assert process.wait(LONG_S) == 0, process.communicate()

    def status() -> Reported:
        with Client(open_link(found["address"], role="client")) as client:
            return client.status()

    def worker(role: Role) -> WorkerState:
        """Return the state of the only worker of a role, once there is one."""
        end_s = time.monotonic() + LONG_S
        while len(workers := [one for one in status().workers if role in one.roles]) != 1:
            assert time.monotonic() < end_s, workers
            time.sleep(0.01)
        pids.add(workers[0].pid)
        return workers[0]

    def kill(*killed: int) -> None:
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    pids = {child.pid for child in psutil.Process(service.pid).children(recursive=True)}
    spread, function = f"cores {CORES[0]}/{CORES[-1]} in 2 shards", worker("target").fingerprint
    assert spread in worker("target").binding
    users.during(lambda: None)
    assert status().totals.accepted_tokens > 0
    users.during(lambda: kill(worker("target").pid))
    users.during(lambda: kill(worker("draft").pid))
    users.during(lambda: kill(found["pids"]["coordinator"]))
    for numa in ("off", "shard"):
        users.during(lambda numa=numa: run("swap", "--role=target", f"--target.numa={numa}"))
        assert (spread in worker("target").binding) == (numa == "shard")
        assert worker("target").fingerprint == function
    users.during(lambda: kill(status().pid, worker("target").pid))
    assert spread in worker("target").binding
    users.during(lambda: run("drain", str(worker("target").pid), "--last"))
    assert ask(users.url, body=asked[0])[0] == 503
    service.terminate()
    assert service.wait(PATIENCE_S) == 0, service.communicate()
    assert_nothing_is_left([*pids], tmp_path)
