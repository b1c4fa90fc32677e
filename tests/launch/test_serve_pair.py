"""`dovetail serve` as one of a pair: its coordinator steps back for the standby that has taken
over, and takes over from it in turn, while streams run through its HTTP API."""

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail.launch import cli
from dovetail.launch.processes.serving.parts import GiveUp, Part, Replace, Start
from dovetail.launch.processes.serving.service import Service
from dovetail.launch.processes.serving.watch import Watch
from dovetail.protocol.errors import DovetailError
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
from support.deployed import settings

PATIENCE_S = 60.0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--standby=tcp://192.0.2.2:5555",), r"--listen ipc: a coordinator and its standby are"),
        (("--standby=host:5555", "--listen=tcp://127.0.0.1:1"), r"--standby host:5555: .*machines"),
        (
            (
                "--standby=tcp://192.0.2.2:5555",
                "--listen=tcp://127.0.0.1:1",
                "--coordinator.journal=off",
            ),
            r"journal = 'off': a standby copies the journal",
        ),
    ],
)
def test_a_service_that_could_not_be_one_of_a_pair_is_refused(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate_keys(tmp_path / "keys")
    assert cli.run(("serve", f"--keys={tmp_path}/keys", "--http.port=0", *flags)) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert re.search(said, told), told


def test_a_coordinator_that_follows_another_is_not_stuck_when_that_one_is_silent() -> None:
    watch = Watch([Part("coordinator")], 0.0, stuck_s=10.0)
    assert watch.due(0.0) == [Start("coordinator")]
    watch.ready("coordinator", 1.0)
    assert watch.serving
    watch.follows = True
    assert not [one for now_s in range(2, 20) for one in watch.due(float(now_s))]
    watch.follows = False
    assert Replace("coordinator") in watch.due(20.0)


def test_what_the_coordinator_has_warned_of_is_said_when_another_part_cannot_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    site = SimpleNamespace(workers={}, keys=None, standby="")
    hub = SimpleNamespace(listen=lambda: ["the journal was copied from another one"])
    http = SimpleNamespace(failure=lambda: DovetailError("nobody leads"))
    service = Service(site, settings())  # type: ignore[arg-type]
    service._running["coordinator"] = hub  # type: ignore[assignment]
    with pytest.raises(DovetailError, match="nobody leads"):
        service._perform([GiveUp("http")], http)  # type: ignore[arg-type]
    assert "coordinator: the journal was copied from another one" in caplog.text


class Served(Doubled):
    """A service, with a standby and a spare target on machines of other names."""

    pids: dict[str, int]

    def serve(self) -> None:
        """Start the service, and wait until it is ready."""
        process = self.start(
            "serve",
            "serve",
            "--json",
            "--http.port=0",
            f"--coordinator.listen={self.addresses['first']}",
            f"--coordinator.journal={self.folder}/journal-first",
            f"--keys={self.folder}/keys",
            f"--standby={self.addresses['second']}",
            *SLOWER,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, self.said("serve")
        told = json.loads(line)
        self.url, self.pids = told["url"], told["pids"]

    def says(self, name: str, words: str) -> None:
        self.until(lambda: words in self.said(name), f"{name} does not say {words!r}")


@pytest.mark.slow
def test_a_service_steps_back_for_its_standby_and_takes_over_from_it(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"namespaces are not permitted here: {reason}")
    generate_keys(tmp_path / "keys")
    service = Served(tmp_path, ())
    service.addresses = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("first", "second")}
    service.machines = {name: elsewhere(f"{name}-machine") for name in ("second", "spare")}
    asked = bodies(2, 150)
    with ended(service):
        service.serve()
        service.stand_by("second", "first")
        service.start("spare", "worker", "--role=target", *service.meeting, *SLOWER)
        service.says("second", "wait here: spare-machine/")
        whole = [Stream(body).read(service.url).outcome for body in asked]
        assert all(reason == "length" for _, reason, _ in whole), whole

        def stream_through(killed: int) -> None:
            streams, threads = together(service, asked)
            while not all(stream.heard_s for stream in streams):
                time.sleep(0.01)
            os.kill(killed, signal.SIGKILL)
            for thread in threads:
                thread.join()
            assert [stream.outcome for stream in streams] == whole, service.said("serve")

        stream_through(service.pids["coordinator"])
        service.says("second", "taking over in term 1")
        service.says("serve", "has taken over, in term 1")
        service.says("serve", "from now on it is the standby of")
        service.until_ready()
        service.says("second", "copies the journal")
        stream_through(service.processes["second"].pid)
        service.says("serve", "taking over in term 2")
        service.says("serve", "the coordinator here leads again, in term 2")
        service.kill("second")
        service.again("second")
        service.until_ready()
        assert [Stream(body).read(service.url).outcome for body in asked] == whole
        service.processes["serve"].terminate()
        assert service.processes["serve"].wait(PATIENCE_S) == 0
