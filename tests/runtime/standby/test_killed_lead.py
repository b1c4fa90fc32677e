"""Coordinators that are killed or told to end under streams, and standbys that take over, as real
processes whose workers are on machines of other names: no text differs, and streams go on within
three seconds."""

import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dovetail.protocol.keys import generate_keys
from support.by_hand import (
    SLOWER,
    Doubled,
    Stream,
    bodies,
    elsewhere,
    ended,
    free_port,
    together,
    why_not,
)

KILLS = 6
MOST_S = 3.0


@pytest.fixture(autouse=True)
def permitted() -> None:
    if reason := why_not():
        pytest.skip(f"namespaces are not permitted here: {reason}")


@contextmanager
def doubled(folder: Path, *, workers: tuple[str, ...]) -> Iterator[Doubled]:
    """Two coordinators, a target and a draft on machines of other names, and the HTTP API."""
    generate_keys(folder / "keys")
    service = Doubled(folder, ())
    service.addresses = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("first", "second")}
    service.machines = {role: elsewhere(f"{role}-machine") for role in ("target", "draft")}
    with ended(service):
        service.lead("first")
        service.work(workers)
        service.serve_http()
        service.until_ready()
        service.stand_by("second", "first")
        yield service


@pytest.mark.slow
def test_streams_go_on_with_the_standby_when_the_coordinator_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that was killed, or told to end, is started again as it was, and is the next standby,
    so that both take over in turn."""
    asked = bodies(4, 150)
    pauses: list[float] = []
    with doubled(tmp_path, workers=SLOWER) as service:
        whole = [Stream(body).read(service.url).outcome for body in asked]
        assert all(reason == "length" for _, reason, _ in whole), whole
        lead, standby = "first", "second"
        for number in range(KILLS):
            streams, threads = together(service, asked)
            while not all(stream.heard_s for stream in streams):
                time.sleep(0.01)
            service.kill(lead, signal.SIGTERM if number % 2 else signal.SIGKILL)
            for thread in threads:
                thread.join()
            assert [stream.outcome for stream in streams] == whole, service.said(standby)
            pauses += [stream.longest_pause_s for stream in streams]
            lead, standby = standby, lead
            service.again(standby)
            service.until_ready()
    with capsys.disabled():
        print(
            f"\n{KILLS} kills, {len(pauses)} streams, 0 texts differ; longest pause of a stream: "
            f"median {statistics.median(pauses):.2f} s, most {max(pauses):.2f} s"
        )
    assert max(pauses) <= MOST_S
