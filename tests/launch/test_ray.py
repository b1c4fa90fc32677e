"""`dovetail serve --engine ray` on a cluster of several nodes, which are processes of this machine.

Needs the extra `ray`. Each cluster is the test's own, and ends with it.
"""

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.inflated import as_flags, inflated
from support.patience import PATIENCE_S
from support.served import QUESTION, ask, assert_nothing_is_left, ready, streamed, told

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs the extra ray: pip install -e '.[ray]'", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., subprocess.Popen[str]]
Run = Callable[..., subprocess.CompletedProcess[str]]

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
PLACED = ("--ray.target=CPU=1,t=1", "--ray.draft=CPU=0,d=1")


@contextmanager
def cluster(*nodes: dict[str, Any]) -> Iterator[Any]:
    """A cluster with these nodes, the first of which has its head."""
    os.environ.update(QUIET)
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=nodes[0])
    try:
        for node in nodes[1:]:
            made.add_node(**node)
        yield made
    finally:
        made.shutdown()


def node(cores: int, **resources: float) -> dict[str, Any]:
    return {"num_cpus": cores, "resources": resources, "include_dashboard": False}


def kill_node_of(pid: int) -> None:
    """Have the node of a process go as if its machine had lost its power: all of it at once."""
    raylet = psutil.Process(raylet_of(pid))
    doomed = [raylet, *raylet.children(recursive=True)]
    for process in doomed:
        process.suspend()
    for process in doomed:
        process.kill()


def test_a_killed_node_is_replaced_and_its_streams_go_on_with_the_same_bytes(
    start: Start, run: Run
) -> None:
    local = start("serve", "--http.port=0", "--json", *as_flags(inflated("64MiB")))
    url = ready(local)["url"]
    whole = {seed: streamed(url, seed=seed) for seed in (3, 4, 5)}
    local.terminate()
    local.communicate(timeout=PATIENCE_S)
    nodes = [node(0, front=1), node(1, t=1), node(1, t=1), node(1, d=1), node(1, d=1)]
    with cluster(*nodes) as made:
        process = start(
            "serve",
            "--engine=ray",
            f"--ray.address={made.address}",
            *PLACED,
            "--http.port=0",
            "--json",
            *as_flags(inflated("64MiB")),
        )
        found = ready(process)
        assert found["address"].startswith("tcp://")
        for part in ("target worker", "draft worker"):
            pid = {worker["name"]: worker["pid"] for worker in workers(run, found)}[
                part.removesuffix(" worker")
            ]
            once = threading.Barrier(3, action=lambda pid=pid: kill_node_of(pid))
            with ThreadPoolExecutor(3) as pool:
                said = pool.map(
                    lambda seed, once=once: streamed(found["url"], once.wait, seed=seed), whole
                )
                assert dict(zip(whole, said, strict=True)) == whole
            told(process, f"the {part} is ready again")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, process.communicate()
        assert not [child for child in psutil.process_iter() if child.pid in found["pids"].values()]


def workers(run: Run, found: dict[str, Any]) -> list[dict[str, Any]]:
    done = run("status", "--json")
    assert done.returncode == 0, done.stderr
    state: list[dict[str, Any]] = json.loads(done.stdout)["workers"]
    return state


def test_on_one_machine_everything_meets_over_ipc_and_leaves_nothing_behind(start: Start) -> None:
    process = start("serve", "--engine=ray", "--http.port=0", "--json")
    found = ready(process)
    assert found["address"].startswith("ipc://")
    assert ask(found["url"], body=QUESTION)[0] == 200
    assert {psutil.Process(pid).nice() for pid in found["pids"].values()} == {os.nice(0)}
    affinities = [
        psutil.Process(found["pids"][part]).cpu_affinity()
        for part in ("target worker", "draft worker")
    ]
    assert not {*affinities[0]} & {*affinities[1]} or os.cpu_count() == 1
    os.kill(found["pids"]["target worker"], signal.SIGKILL)
    told(process, "the target worker is ready again")
    assert ask(found["url"], body=QUESTION)[0] == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0, process.communicate()
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in found["pids"].values() if psutil.pid_exists(pid)],
        timeout=PATIENCE_S,
    )
    assert not alive


def test_without_the_only_node_of_its_own_cluster_it_ends_with_one_sentence(
    start: Start, tmp_path: Path
) -> None:
    process = start("serve", "--engine=ray", "--http.port=0", "--json")
    found = ready(process)
    os.kill(raylet_of(found["pids"]["target worker"]), signal.SIGKILL)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, said
    (told_last,) = [line for line in said.splitlines() if line.startswith("dovetail: ")]
    assert "was lost (raylet has ended), and with it the coordinator, the http" in told_last
    assert_nothing_is_left([*found["pids"].values()], tmp_path)


def test_no_key_stays_of_a_lost_node_or_of_a_service_that_is_killed(
    start: Start, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    with cluster(node(0, front=1), node(1, t=1), node(1, t=1)) as made:
        flags = (f"--ray.address={made.address}", PLACED[0], "--draft=none", "--http.port=0")
        process = start("serve", "--engine=ray", *flags, "--json")
        found = ready(process)
        seat = psutil.Process(found["pids"]["target worker"]).parent()
        assert seat is not None
        os.kill(raylet_of(found["pids"]["target worker"]), signal.SIGKILL)
        told(process, "the target worker is ready again")
        psutil.wait_procs([seat], PATIENCE_S)
        assert not seat.is_running()
        process.kill()
        assert await_none(lambda: [*temporary.glob("dovetail-keys-*")]) == []


@pytest.mark.parametrize("begun", ["gcs_server", "raylet"])
def test_sigterm_while_a_cluster_starts_is_no_failure(start: Start, begun: str) -> None:
    process = start("serve", "--engine=ray", "--http.port=0", "--json")
    here = psutil.Process(process.pid)
    while begun not in [child.name() for child in here.children()]:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE_S) == ("", "")
    assert process.returncode == 0


def test_what_no_node_has_is_named_with_what_the_cluster_has(run: Run) -> None:
    with cluster(node(1, front=1), node(2, t=1)) as made:
        flags = ("--engine=ray", f"--ray.address={made.address}", "--ray.wait_s=1")
        done = run("serve", *flags, "--ray.target=CPU=64", "--http.port=0")
        assert (done.returncode, done.stdout) == (2, "")
        last = done.stderr.splitlines()[-1]
        assert "no node of the cluster has the resources of the target worker, CPU=64" in last
        assert "ray.target" in last
        assert "CPU=2" in last


def test_replicas_stand_behind_one_router_and_a_lost_one_comes_back(start: Start) -> None:
    flags = ("--draft=none", "--http.port=0", "--json", "--ray.target=CPU=1")
    process = start("serve", "--engine=ray", "--ray.replicas=2", *flags)
    found = ready(process)
    targets = [name for name in found["pids"] if name.endswith("target worker")]
    assert targets == ["replica 1 target worker", "replica 2 target worker"]
    assert not set.intersection(
        *({*psutil.Process(found["pids"][name]).cpu_affinity()} for name in targets)
    )
    alone = start("serve", *flags[:3])
    whole = {seed: streamed(ready(alone)["url"], seed=seed) for seed in (3,)}
    with ThreadPoolExecutor(4) as pool:
        said = [*pool.map(lambda _: streamed(found["url"], seed=3), range(4))]
    assert said == [whole[3]] * 4
    os.kill(found["pids"]["replica 1 target worker"], signal.SIGKILL)
    os.kill(found["pids"]["router"], signal.SIGKILL)
    told(process, "the router is ready again")
    told(process, "replica 1: the target worker is ready again")
    assert streamed(found["url"], seed=3) == whole[3]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0, process.communicate()


def test_a_cluster_that_nobody_has_is_told_in_one_line(run: Run) -> None:
    for address, words in (
        ("127.0.0.1:1", "no answer"),
        ("ray://127.0.0.1:10001", "is not HOST:PORT"),
        ("nowhere", "is not HOST:PORT"),
    ):
        done = run("serve", "--engine=ray", f"--ray.address={address}", "--http.port=0")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert words in done.stderr.splitlines()[-1]


def test_the_coordinator_is_on_another_machine_only_with_an_api_key(
    start: Start, run: Run, tmp_path: Path
) -> None:
    nodes = [node(0), {**node(1), "labels": {"zone": "front"}}, node(1, t=1)]
    with cluster(*nodes) as made:
        flags = (
            "--engine=ray",
            f"--ray.address={made.address}",
            *shlex.split(
                "--ray.coordinator=label:zone=front --ray.target=CPU=1,t=1 --draft=none "
                "--http.port=0"
            ),
        )
        done = run("serve", *flags)
        assert done.returncode == 2, done.stderr
        assert "requires http.api_key_file" in done.stderr.splitlines()[-1]
        keys = tmp_path / "keys"
        keys.touch(mode=0o600)
        keys.write_text("0123456789abcdef\n")
        process = start("serve", *flags, "--json", f"--http.api_key_file={keys}")
        found = ready(process)
        assert ask(found["url"], body=QUESTION)[0] == 401
        front = [raylet_of(found["pids"][part]) for part in ("coordinator", "http")]
        assert front[0] == front[1] != raylet_of(found["pids"]["target worker"])
        done = run("generate", "--max-tokens=8", "Hello.")
        assert done.returncode == 0, done.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, process.communicate()


def await_none(look: Callable[[], list[Path]]) -> list[Path]:
    """Wait until nothing is seen, and return what still is after a while."""
    end_s = time.monotonic() + PATIENCE_S
    while (left := look()) and time.monotonic() < end_s:
        time.sleep(0.2)
    return left


def raylet_of(pid: int) -> int:
    """The process of the node that a process is on."""
    return next(one.pid for one in psutil.Process(pid).parents() if "raylet" in one.name())
