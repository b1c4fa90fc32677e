"""`dovetail top`: once, as JSON, live in a terminal; over ipc, over tcp with keys, and over
HTTP."""

import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from dovetail.launch.commands.top import _next
from dovetail.launch.console.screen import MARKS, PAGES, Standing, everything, page
from dovetail.launch.settings.models import DEMO_FOLDER, TARGET_FOLDER
from dovetail.protocol.links import open_link
from dovetail.runtime.client import Client
from dovetail.runtime.telemetry.live_stats import LiveStats
from support.patience import PATIENCE_S
from support.scripted import ScriptedDraft, ScriptedTarget
from support.terminals import Terminal, terminal
from support.web import Backend, api, backend

COMMAND = (sys.executable, "-P", "-m", "dovetail.launch.cli", "top")
EVIL = "\x1b[2Jboo"
KEY = "0123456789abcdef"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def house() -> Iterator[Backend]:
    with backend() as started:
        yield started


def decode(house: Backend) -> None:
    """Have something to see."""
    with Client(open_link(house.address, role="client")) as client:
        for first in range(8):
            client.complete(client.submit(tokens=(5, 6, 7 + first), max_tokens=40, seed=1))


@pytest.fixture
def picture(house: Backend) -> dict[str, Any]:
    decode(house)
    live_stats = LiveStats()
    with Client(open_link(house.address, role="client")) as client:
        live_stats.see(client.look())
        live_stats.hear(client.status())
    return live_stats.view(spell=lambda token: f"w{token}")


def test_once_shows_workers_figures_and_sessions_within_80_columns(
    house: Backend, run: Run
) -> None:
    decode(house)
    shown = run("top", "--connect", house.address, "--once")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert all(
        word in shown.stdout
        for word in (
            "coordinator pid",
            *shlex.split("speculation tokens/s tau target draft fingerprint binding memory"),
            f"coordinator (pid {os.getpid()}) CPU ",
            "epoch",
        )
    )
    assert max(map(cell_len, shown.stdout.splitlines())) <= 80
    assert "\x1b" not in shown.stdout, "no terminal, no colours"


def test_the_same_is_json_over_ipc_and_over_http(house: Backend, invoke: Run) -> None:
    decode(house)
    near = json.loads(invoke("top", "--connect", house.address, "--json").stdout)
    with api(house.address) as server:
        far = json.loads(invoke("top", "--connect", server.url, "--json").stdout)
    assert set(far) - set(near) == {"server", "every_s", "shown", "model", "keys"}
    assert near["coordinator"]["epoch"] == far["coordinator"]["epoch"]
    assert (
        [worker["name"] for worker in near["workers"]]
        == [worker["name"] for worker in far["workers"]]
        == ["target", "draft"]
    )
    assert near["tree"]["texts"] is not None


def test_the_load_of_other_programs_is_shown_if_workers_run_on_this_machine(invoke: Run) -> None:
    with backend(target=False, draft=False) as house:
        house.add(ScriptedTarget, "target", host="another")
        far = invoke("top", "--connect", house.address, "--json").stdout
        assert json.loads(far)["others"] is None
        house.add(ScriptedDraft, "draft", host=socket.gethostname())
        near = invoke("top", "--connect", house.address, "--json").stdout
        assert json.loads(near)["others"]["words"].startswith("use ")
        shown = invoke("top", "--connect", house.address, "--once").stdout
    assert "other programs on this machine use " in " ".join(shown.split())


def test_models_are_called_as_in_status(invoke: Run) -> None:
    folders = {"target": TARGET_FOLDER, "draft": DEMO_FOLDER / "heads" / "dovetail"}
    with backend(target=False, draft=False) as house:
        house.add(ScriptedTarget, "target", model=str(folders["target"]))
        house.add(ScriptedDraft, "draft", model=str(folders["draft"]))
        status = invoke("status", "--connect", house.address).stdout
        near = invoke("top", "--connect", house.address, "--once").stdout
        with api(house.address) as server:
            far = invoke("top", "--connect", server.url, "--once").stdout
    for shown in (status, near, far):
        assert re.search(r"\bdemo dovetail\b", shown)
        assert re.search(r"\bdemo(?! dovetail)\b", shown)


def test_over_http_the_key_of_the_environment_is_sent(
    house: Backend, invoke: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY, encoding="utf-8")
    file.chmod(0o600)
    with api(house.address, f"--http.api_key_file={file}") as server:
        refused = invoke("top", "--connect", server.url, "--once")
        allowed = invoke(
            "top", "--connect", server.url, "--json", env={**environment, "DOVETAIL_API_KEY": KEY}
        )
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "DOVETAIL_API_KEY" in refused.stderr
    assert json.loads(allowed.stdout)["shown"] == "anonymous"


def test_a_server_without_a_dashboard_is_named_with_the_remedy(house: Backend, invoke: Run) -> None:
    with api(house.address, "--http.dashboard=off") as server:
        shown = invoke("top", "--connect", server.url, "--once")
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
    assert "set http.dashboard there" in shown.stderr


@pytest.mark.parametrize(
    "address",
    [
        (),
        pytest.param(
            ("--connect", "ipc:///tmp/dovetail-nobody/hub"),  # is waited for
            marks=pytest.mark.slow,
        ),
        ("--connect", "http://127.0.0.1:9"),
    ],
)
def test_nobody_there_is_one_line(invoke: Run, address: tuple[str, ...]) -> None:
    shown = invoke("top", "--once", *address)
    assert shown.returncode in (1, 2), shown.stderr
    assert (shown.stdout, shown.stderr.count("\n")) == ("", 1)


@pytest.mark.parametrize("height", [8, 24, 60])
@pytest.mark.parametrize("place", range(len(PAGES)))
def test_every_page_fits_into_its_terminal(
    picture: dict[str, Any], place: int, height: int
) -> None:
    console = Console(width=80, height=height, force_terminal=True, record=True, file=io.StringIO())
    console.print(page(picture, Standing(page=place), console), end="")
    lines = console.export_text().rstrip("\n").splitlines()
    assert len(lines) == height
    assert max(map(cell_len, lines)) <= 80
    assert lines[-1].startswith("q quit")


def test_the_tree_has_every_node_with_its_mark(picture: dict[str, Any]) -> None:
    tree = {
        **picture["tree"],
        "parents": [-1, -1, 0, 0],
        "fates": "arar",
        "texts": ["one", "two", "three", "four"],
        "likely": [0.5] * 4,
        "bonus": "five",
    }
    tree |= {"bonus_parent": 2, "root": "zero", "offered": 4, "verified": 4, "accepted": 2}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(everything({**picture, "tree": tree}))
    shown = console.export_text()
    expected = [
        "● zero",
        "├─ ✓ 1 one  50 %",
        "│  ├─ ✓ 3 three  50 %",
        "│  │  └─ ★ five",
        "│  └─ ✗ 4 four  50 %",
        "└─ ✗ 2 two  50 %",
    ]
    lines = shown.splitlines()
    assert [
        line.rstrip() for line in lines[lines.index(expected[0]) :][: len(expected)]
    ] == expected
    assert len({mark for mark, _, _ in MARKS.values()}) == len(MARKS)


def test_up_and_down_walk_through_the_sessions_and_the_newest() -> None:
    assert [_next([4, 7], chosen, 1) for chosen in (None, 4, 7)] == [4, 7, None]
    assert [_next([4, 7], chosen, -1) for chosen in (None, 4, 7)] == [7, None, 4]
    assert _next([4, 7], 99, 1) is None


@contextmanager
def screen(environment: dict[str, str], *arguments: str) -> Iterator[Terminal]:
    with terminal(environment, *COMMAND, *arguments) as shown:
        yield shown


def test_in_a_terminal_it_is_live_turns_its_pages_pauses_and_ends(
    house: Backend, environment: dict[str, str]
) -> None:
    decode(house)
    with screen(environment, "--connect", house.address) as shown:
        before = termios.tcgetattr(shown.ours)
        shown.until("live")
        shown.until("just now")
        shown.press("\x1b[C")
        shown.until("tree of session")
        shown.press("\x1b[D\x1b[D")
        shown.until("fingerprint")
        shown.press("p")
        shown.until("paused")
        shown.press("p")
        shown.until("live")
        shown.press("\x1b[B")
        shown.until(r"session: \d")
        shown.press("q")
        assert shown.process.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(shown.ours) == before


def test_ctrl_c_leaves_the_terminal_as_it_was(house: Backend, environment: dict[str, str]) -> None:
    with screen(environment, "--connect", house.address) as shown:
        before = termios.tcgetattr(shown.ours)
        shown.until("just now")
        shown.press("\x03")
        assert shown.process.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(shown.ours) == before


def test_a_coordinator_that_is_lost_is_told_and_its_successor_shown(
    environment: dict[str, str],
) -> None:
    with backend() as first:
        address = first.address
        with screen(environment, "--connect", address) as shown:
            shown.until("just now")
            first.close()
            shown.until("LOST")
            with backend(address=address, target=False, draft=False):
                shown.until("no target worker is registered")
                assert shown.process.poll() is None


def test_what_peers_say_commands_no_terminal(invoke: Run) -> None:
    with backend(target=False, draft=False) as house:
        house.add(ScriptedTarget, "target", name=EVIL, binding=EVIL)
        shown = invoke("top", "--connect", house.address, "--once")
    assert "\x1b" not in shown.stdout
    assert "?[2Jboo" in shown.stdout


def test_over_tcp_it_asks_with_a_key(
    start: Callable[..., "subprocess.Popen[str]"], invoke: Run, tmp_path: Path
) -> None:
    keys = str(tmp_path / "keys")
    assert invoke("keygen", "--out", keys).returncode == 0
    process = start("coordinator", "--listen", "tcp://127.0.0.1:*", "--keys", keys)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    shown = invoke("top", "--connect", address, "--keys", keys, "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["speculation"] == {
        "state": "none",
        "why": "no target worker is registered",
        "words": "not possible: no target worker is registered",
        "fault": False,
    }
    refused = invoke("top", "--connect", address, "--once")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
