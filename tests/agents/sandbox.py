"""Agents in a network that has loopback only, with a home and a folder that go with them."""

import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agents.catalogue import TASK, AgentKind
from dovetail.launch.console.terminal import note

AGENT_TIMEOUT_S = 900.0
SET_FLAGS = 0x8914
"""SIOCSIFFLAGS of linux/sockios.h."""
UP_AND_RUNNING = 0x41
"""IFF_UP and IFF_RUNNING of linux/if.h."""


def isolate() -> None:
    """Run this command again in a network namespace of its own, where only loopback is up."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        mapped = [] if os.geteuid() == 0 else ["--map-root-user"]
        os.execvp("unshare", ["unshare", "--net", *mapped, sys.executable, *sys.argv])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SET_FLAGS, struct.pack("16sh14x", b"lo", UP_AND_RUNNING))


def environment_of(agent: AgentKind, folder: Path) -> Path:
    """The agent's `node_modules`, which npm makes if they are not there."""
    return install(folder.resolve() / agent.name, (f"{agent.package}@{agent.version}",))


def install(home: Path, packages: tuple[str, ...]) -> Path:
    """Install npm packages into a folder unless they are there; none of their scripts is run."""
    wanted, complete = "\n".join(packages), home / "complete"
    if not complete.exists() or complete.read_text(encoding="utf-8") != wanted:
        note(f"installing {' '.join(packages)}")
        home.mkdir(parents=True, exist_ok=True)
        flags = ["--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--silent"]
        subprocess.run(
            ["npm", "install", "--prefix", str(home), *flags, *packages],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        complete.write_text(wanted, encoding="utf-8")
    return home / "node_modules"


@dataclass(frozen=True)
class Place:
    """An empty home, and the folder in it that an agent works in."""

    home: Path

    @property
    def work(self) -> Path:
        return self.home / "work"


@contextmanager
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="dovetail-agent-") as folder:
        found = Place(Path(folder).resolve())
        found.work.mkdir()
        yield found


def run_agent(agent: AgentKind, modules: Path, at: Place, url: str) -> str:
    """Give an agent its task against the server at `url`; return what it prints.

    Raises `SystemExit` with the end of what it printed if it fails.
    """
    assert [name for _, name in socket.if_nameindex()] == ["lo"], "an agent reaches loopback only"
    for name, text in agent.files(url).items():
        path = at.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    *interpreter, program = agent.program
    done = subprocess.run(
        [*interpreter, str(modules / program), *agent.arguments, TASK],
        cwd=at.work,
        env={
            "HOME": str(at.home),
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_COLOR": "1",
            **agent.environment(url),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=AGENT_TIMEOUT_S,
    )
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-30:])
        raise SystemExit(f"{agent.name} ended with exit code {done.returncode}:\n{end}")
    return done.stdout
