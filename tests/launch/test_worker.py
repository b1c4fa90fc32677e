"""A worker that is started by hand: where it is bound, how many threads it takes, and what becomes
of it when its coordinator goes or it is stuck."""

import contextlib
import hashlib
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.launch.machine.topology import Place
from dovetail.launch.processes.child import LET_GO, SHARE, pace
from dovetail.launch.processes.replacement import wait_for
from dovetail.launch.processes.worker import place_of, thread_count
from dovetail.protocol.codec import EVENT, encode
from dovetail.protocol.errors import PeerGone, UserError
from dovetail.protocol.links import open_hub, open_link
from dovetail.protocol.messages import Hello, Welcome, WorkerState
from dovetail.protocol.settings import TargetSettings
from dovetail.runtime.client import Client
from support import stuck
from support.patience import PATIENCE_S

Start = Callable[..., "subprocess.Popen[str]"]

ELSEWHERE = TargetSettings(numa=7, threads=999)
"""Settings of a target on another, larger machine."""


def test_a_draft_does_not_mind_where_the_target_is() -> None:
    assert place_of("draft", ELSEWHERE, None, "") is None
    assert thread_count("draft", ELSEWHERE, None) >= 1


def test_a_target_on_a_smaller_machine_than_the_settings_are_for_is_refused() -> None:
    with pytest.raises(UserError, match="there is no node 7"):
        place_of("target", ELSEWHERE, None, "")
    with pytest.raises(UserError, match=r"target.threads = 999"):
        place_of("target", TargetSettings(threads=999), None, "")


def test_a_target_takes_no_more_threads_than_the_cores_that_it_is_bound_to() -> None:
    core = min(os.sched_getaffinity(0))
    assert place_of("target", ELSEWHERE, str(core), "") == Place((core,))
    assert thread_count("target", TargetSettings(), Place((core,))) == 1
    with pytest.raises(UserError, match=rf"target.threads = 2 is more than its cores, {core}$"):
        thread_count("target", TargetSettings(threads=2), Place((core,)))


@pytest.mark.parametrize(("quota", "most"), [(0.4, 0.4 * SHARE), (1.0, 1.0), (None, 1.0)])
def test_a_worker_that_loads_beside_others_takes_a_part_of_a_fraction_of_a_cpu(
    quota: float | None,
    most: float,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, pauses = time.process_time(), list[float]()
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "monotonic", time.process_time)
    pace(quota)
    assert ("25% of the CPU quota of 0.4" in capsys.readouterr().err) == (quota == 0.4)
    while (used := time.process_time() - began) < 0.15:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 150_000)  # native code, which no signal interrupts
    pace(None)
    assert 0.5 * most < used / (used + sum(pauses)) < 1.5 * most
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


@pytest.fixture
def address(temporary: Path) -> str:
    (temporary / "private").mkdir(mode=0o700)
    return f"ipc://{temporary / 'private' / 'hub'}"


def coordinate(start: Start, address: str) -> "subprocess.Popen[str]":
    """A coordinator that listens."""
    coordinator = start("coordinator", "--listen", address)
    assert coordinator.stdout is not None
    assert coordinator.stdout.readline().strip() == address
    return coordinator


def registered(address: str) -> WorkerState:
    """The one worker that a coordinator knows, once there is one."""
    with Client(open_link(address, role="client")) as client:
        deadline = time.monotonic() + PATIENCE_S
        while not (workers := client.status().workers):
            assert time.monotonic() < deadline, "nobody has registered"
            time.sleep(0.01)
    (worker,) = workers
    return worker


def gone(address: str) -> None:
    """Wait until the coordinator knows nobody."""
    deadline = time.monotonic() + PATIENCE_S
    with Client(open_link(address, role="client")) as client:
        while client.status().workers:
            assert time.monotonic() < deadline, "it is still there"
            time.sleep(0.01)


def test_a_worker_comes_back_to_the_next_coordinator_at_the_same_address_and_ends_with_it(
    start: Start, address: str
) -> None:
    coordinator = coordinate(start, address)
    worker = start("worker", "--role", "draft", "--draft", "ngram", "--connect", address)
    before = registered(address)
    coordinator.kill()
    coordinator.wait()
    coordinator = coordinate(start, address)
    after = registered(address)
    assert (after.pid, after.worker_epoch == before.worker_epoch) == (worker.pid, False)
    coordinator.terminate()
    assert (coordinator.wait(PATIENCE_S), worker.wait(PATIENCE_S)) == (0, 0)
    assert worker.stderr is not None
    said = worker.stderr.read()
    assert f"the coordinator at {address} disconnected; reconnecting for up to 300 s" in said
    assert f"registered again at {address}\n" in said
    assert said.endswith("draft worker draft ends: its coordinator released it\n")


def test_a_worker_tells_who_looks_after_it_whether_it_was_let_go_or_told_to_end(
    start: Start, address: str
) -> None:
    coordinator = coordinate(start, address)
    arguments = (
        *shlex.split("worker --role draft --draft ngram --connect"),
        address,
        "--parent",
        str(os.getpid()),
    )
    told = start(*arguments)
    registered(address)
    told.terminate()
    assert told.wait(PATIENCE_S) == 0
    gone(address)
    let_go = start(*arguments)
    registered(address)
    coordinator.terminate()
    assert let_go.wait(PATIENCE_S) == LET_GO


def test_a_worker_of_nobody_tells_by_its_exit_code_whether_it_was_drained(
    start: Start, address: str
) -> None:
    coordinator = coordinate(start, address)
    arguments = ("worker", "--role", "draft", "--draft", "ngram", "--connect", address)
    drained = start(*arguments)
    epoch = registered(address).worker_epoch
    with Client(open_link(address, role="operator")) as client:
        wait_for(client, client.dismiss(epoch))
    assert drained.wait(PATIENCE_S) == LET_GO
    other = start(*arguments)
    registered(address)
    coordinator.terminate()
    assert other.wait(PATIENCE_S) == 0


def test_a_worker_waits_for_no_other_coordinator_where_it_is_told_so(
    start: Start, address: str
) -> None:
    coordinator = coordinate(start, address)
    worker = start(
        "worker", "--role", "draft", "--draft", "ngram", "--connect", address, "--reconnect-s", "0"
    )
    registered(address)
    coordinator.kill()
    assert worker.wait(PATIENCE_S) == 0
    assert worker.stderr is not None
    assert worker.stderr.read().endswith("draft worker draft ends: its coordinator disconnected\n")


def test_a_worker_that_is_stuck_says_where_and_ends(start: Start, address: str) -> None:
    with contextlib.closing(open_hub(address)) as hub:
        worker = start(
            *("worker", "--role", "draft", "--draft", "ngram", "--connect", address),
            *("--coordinator.stuck_s", "50"),
            command=stuck.HASTENED,
        )
        assert worker.stdout is not None
        ready: list[object] = []
        while worker.stdout not in ready:
            while (received := hub.receive()) is not None:
                if isinstance(
                    EVENT.decode(received[1]), Hello
                ):  # one that was stopped says it again
                    with contextlib.suppress(PeerGone):
                        for message in (Welcome(epoch=1), *stuck.opening()):
                            hub.send(received[0], encode(message))
            ready = select.select([hub.fileno(), worker.stdout], [], [], PATIENCE_S)[0]
            assert ready, "nothing came"
        assert worker.wait(PATIENCE_S) == 1
    assert worker.stderr is not None
    said = worker.stderr.read()
    assert (
        "draft worker draft has made no progress for 50 s (coordinator.stuck_s) and exits; "
        "its stack:" in said
    )
    assert "in propose_for_ever" in said


def test_a_worker_shows_where_it_is_when_it_is_asked(start: Start, address: str) -> None:
    coordinate(start, address)
    worker = start("worker", "--role", "draft", "--draft", "ngram", "--connect", address)
    registered(address)
    worker.send_signal(signal.SIGUSR1)
    assert registered(address).pid == worker.pid
    worker.terminate()
    assert " in serve\n" in worker.communicate(timeout=PATIENCE_S)[1]
    assert worker.returncode == 0
