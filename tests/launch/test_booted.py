"""The units of `config export systemd` under a systemd of their own: hardened as they are they
serve, are fed, and are started again when they are stopped."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.launch.files.deployment.systemd import SOCKET, program
from support.patience import PATIENCE_S

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SYSTEMD = Path("/lib/systemd/systemd")
BOOT = Path(__file__).parents[1] / "support" / "boot.sh"
TOOLS = ("unshare", "nsenter", "setpriv", "systemctl")
STUCK_S, WATCHDOG_S = 2, 6
RESTART_S = 5
UNITS = ("coordinator", "http", "worker-target", "worker-draft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0
        or not SYSTEMD.exists()
        or not all(map(shutil.which, TOOLS))
        or subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--cgroup", "true"], capture_output=True
        ).returncode
        != 0,
        reason="needs root, systemd, and namespaces",
    ),
]


class Booted:
    """A systemd in namespaces of its own."""

    def __init__(self, units: Path, scratch: str) -> None:
        boot = [str(BOOT), str(units), scratch]
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--cgroup", "--kill-child", *boot],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def first(self) -> int:
        """The first process of the namespace."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return int(children.read_text().split()[0])

    def run(self, *command: str) -> str:
        within = ["nsenter", "-t", str(self.first), "--mount", "--pid", "--root", "--wd=/"]
        return subprocess.run(
            [*within, *command], capture_output=True, text=True, timeout=PATIENCE_S
        ).stdout

    def show(self, unit: str, *names: str) -> dict[str, str]:
        said = self.run("systemctl", "show", f"dovetail-{unit}.service", f"-p{','.join(names)}")
        return dict(line.split("=", 1) for line in said.splitlines())

    def said(self, unit: str) -> str:
        """The last lines of a unit, and of systemd about it, in the journal."""
        return self.run("journalctl", "--no-pager", "-n", "40", "-u", f"dovetail-{unit}.service")

    def end(self) -> None:
        with contextlib.suppress(OSError, IndexError):
            os.kill(self.first, signal.SIGKILL)
        self._process.kill()
        self._process.wait()


@pytest.fixture
def scratch() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="dt-boot-") as folder:
        yield folder


def wait(until: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < end_s, what
        time.sleep(0.2)


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens local URLs without a proxy."""


def get(url: str) -> bool:
    try:
        with DIRECT.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.timeout(600)
def test_units_serve_and_are_watched(
    run: Run, environment: dict[str, str], tmp_path: Path, scratch: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    units = tmp_path / "units"
    stuck = f"--coordinator.stuck_s={STUCK_S}"
    exported = run(
        *("config", "export", "systemd", "--out", str(units), f"--http.port={port}", stuck),
        env={**environment, "PYTHONPATH": ""},  # a unit has the installation alone
    )
    assert exported.returncode == 0, exported.stderr
    booted = Booted(units, scratch)
    url = f"http://127.0.0.1:{port}"
    try:
        wait(lambda: get(f"{url}/readyz"), "the service is not ready")
        asked = json.dumps({"prompt": "Once upon a time", "max_tokens": 16}).encode()
        request = urllib.request.Request(
            f"{url}/v1/completions", asked, {"Content-Type": "application/json"}
        )
        with DIRECT.open(request, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 16
        time.sleep(2 * WATCHDOG_S)  # whoever is not fed is ended meanwhile
        for unit in UNITS:
            state = booted.show(unit, "SubState", "NRestarts", "WatchdogUSec", "User")
            assert state == {
                "SubState": "running",
                "NRestarts": "0",
                "WatchdogUSec": f"{WATCHDOG_S}s",
                "User": "dovetail",
            }, booted.said(unit)
        booted.run("systemctl", "kill", "--signal=STOP", "dovetail-worker-target.service")
        wait(
            lambda: booted.show("worker-target", "NRestarts")["NRestarts"] != "0",
            "the worker that was stopped is not started again",
        )
        wait(lambda: get(f"{url}/readyz"), "the service is not ready again")
        assert booted.show("coordinator", "NRestarts") == {"NRestarts": "0"}, booted.said(
            "coordinator"
        )
        owner = ("setpriv", "--reuid=dovetail", "--regid=dovetail", "--clear-groups")
        booted.run(*owner, *program(), "drain", "draft", "--connect", SOCKET)
        wait(
            lambda: booted.show("worker-draft", "ActiveState")["ActiveState"] == "inactive",
            "the worker that was drained has not ended",
        )
        time.sleep(2 * RESTART_S)
        state = booted.show("worker-draft", "ActiveState", "NRestarts")
        assert state == {"ActiveState": "inactive", "NRestarts": "0"}, booted.said("worker-draft")
    finally:
        booted.end()
