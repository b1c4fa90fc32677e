"""The README's three machines, on loopback: every process with only the keys that it is told to
bring, over tcp with CURVE."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.launch.machine.topology import format_numbers, read_topology
from dovetail.launch.processes.stack import Stack, layout_of
from dovetail.protocol.links import open_link
from dovetail.runtime.client import Client
from support.patience import PATIENCE_S

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

CORES = [str(core) for core in sorted(os.sched_getaffinity(0))]
ONE_NODE = len(read_topology().computing) == 1
ASK = ("Name five fruits.", "--max-tokens", "32", "--temperature", "1", "--seed", "5", "--json")


def machine(keys: Path, name: str) -> str:
    """A machine's own folder of keys: its secret and the coordinator's public key, nothing else."""
    folder = keys.parent / f"machine-{name}"
    folder.mkdir(mode=0o700)
    for file in (f"{name}.key", "coordinator.pub"):
        shutil.copy2(keys / file, folder / file)
    return str(folder)


def wait_until_loaded(*workers: subprocess.Popen[str]) -> None:
    """Wait until each has said on stderr that it is loaded; to be registered, it has only to say
    hello then."""
    for worker in workers:
        assert worker.stderr is not None
        assert any("is loaded" in line for line in worker.stderr)


@pytest.mark.slow
def test_three_machines_give_what_one_gives(
    start: Start, run: Run, stack: Stack, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    assert run("keygen", "--out", str(keys)).returncode == 0
    coordinator = start("coordinator", "--listen", "tcp://127.0.0.1:*", "--keys", str(keys))
    assert coordinator.stdout is not None
    place = ("--connect", coordinator.stdout.readline().strip())
    workers = [
        start("worker", "--role", role, *place, "--keys", machine(keys, role), "--cores", core)
        for role, core in (("target", CORES[0]), ("draft", CORES[-1]))
    ]
    client = machine(keys, "client")
    wait_until_loaded(*workers)
    with Client(open_link(place[1], keys=Path(client), role="client")) as asking:
        while len(asking.status().workers) < 2:
            assert all(worker.poll() is None for worker in workers)
    far = json.loads(run("generate", *place, "--keys", client, *ASK).stdout)
    near = json.loads(run("generate", "--connect", stack.address, *ASK).stdout)
    assert far["token_ids"] == near["token_ids"]
    assert far["drafted_tokens"] > 0
    coordinator.terminate()
    assert coordinator.wait(PATIENCE_S) == 0
    assert [worker.wait(PATIENCE_S) for worker in workers] == [0, 0]


def test_workers_say_what_they_are_bound_to(stack: Stack, invoke: Run) -> None:
    workers = json.loads(invoke("status", "--connect", stack.address, "--json").stdout)["workers"]
    layout = layout_of(stack.configuration.settings)
    places = {"target": layout.target, "draft": layout.draft}
    expected = {
        name: ("full: cores " if place.nodes else "cores ") + format_numbers(place.cores)
        for name, place in places.items()
    }
    assert {w["name"]: re.split(r", memory| \(", w["binding"])[0] for w in workers} == expected
    assert (
        f"binding of target: {next(w['binding'] for w in workers if w['name'] == 'target')}"
        in invoke("status", "--connect", stack.address).stdout
    )


@pytest.mark.slow
def test_a_worker_by_hand_is_bound_nowhere_and_says_so(start: Start) -> None:
    coordinator = start("coordinator")
    assert coordinator.stdout is not None
    address = coordinator.stdout.readline().strip()
    worker = start("worker", "--role", "target", "--connect", address, "--target.numa", "off")
    wait_until_loaded(worker)
    with Client(open_link(address, role="client")) as asking:
        while not (workers := asking.status().workers):
            assert worker.poll() is None
    assert workers[0].binding == "none"


@pytest.mark.skipif(len(CORES) < 2, reason="two shards need two cores")
@pytest.mark.slow
def test_a_target_over_shards_says_so_and_is_the_one_that_it_would_be_undivided(
    start: Start, run: Run, stack: Stack
) -> None:
    coordinator = start("coordinator")
    assert coordinator.stdout is not None
    address = coordinator.stdout.readline().strip()
    shards = f"{CORES[0]}/{CORES[-1]}"
    worker = start("worker", "--role", "target", "--connect", address, "--cores", shards)
    assert worker.stderr is not None
    spread, loaded = (
        next(line for line in worker.stderr if words in line)
        for words in ("target: spread over 2 shards; where", "is loaded, 2 threads")
    )
    assert "the kernel does not report" in spread
    assert f"cores {shards} in 2 shards" in loaded
    with Client(open_link(address, role="client")) as asking:
        while not (workers := asking.status().workers):
            assert worker.poll() is None
    with Client(open_link(stack.address, role="client")) as asking:
        others = asking.status().workers
    undivided = next(one for one in others if "target" in one.roles)
    assert workers[0].binding == f"cores {shards} in 2 shards, memory not bound"
    assert workers[0].fingerprint == undivided.fingerprint
    far = json.loads(run("generate", "--connect", address, *ASK).stdout)
    near = json.loads(run("generate", "--connect", stack.address, *ASK).stdout)
    assert far["token_ids"] == near["token_ids"]


def test_a_place_that_makes_no_sense_is_refused_before_anything_is_loaded(run: Run) -> None:
    target = ("worker", "--role", "target", "--connect", "ipc:///tmp/nowhere")
    for arguments, words in (
        (("--memory-nodes", "0"), "--memory-nodes needs --cores"),
        (("--cores", CORES[0], "--memory-nodes", "x"), "is not a list of nodes"),
        (("--target.numa", "63"), "there is no node 63"),
        (("--cores", f"{CORES[0]}/{CORES[0]}"), "in two shards"),
        *([(("--target.numa", "shard"), "needs several memory nodes")] if ONE_NODE else []),
    ):
        refused = run(*target, *arguments)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
        assert words in refused.stderr
