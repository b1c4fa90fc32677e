"""A hub of each kind, with keys where it needs them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.protocol import keys
from dovetail.protocol.links import addresses
from support.wires import Wire, open_wire


@pytest.fixture
def heartbeats() -> None:
    """Heartbeats are missed as soon as in a service."""


@pytest.fixture(autouse=True)
def _patient_heartbeats(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `heartbeats` is not asked for, a busy machine breaks no connection off."""
    if "heartbeats" not in request.fixturenames:
        monkeypatch.setattr(addresses, "_HEARTBEAT_MS", {})


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of keys that no test changes."""
    folder = tmp_path_factory.mktemp("deployment") / "keys"
    keys.generate_keys(folder)
    return folder


@pytest.fixture(params=["memory", "ipc", "tcp"])
def wire(request: pytest.FixtureRequest, deployment: Path) -> Iterator[Wire]:
    """A hub of each kind."""
    with contextlib.ExitStack() as stack:
        yield open_wire(request.param, deployment if request.param == "tcp" else None, stack)


@pytest.fixture(params=["ipc", "tcp"])
def socket_wire(request: pytest.FixtureRequest, deployment: Path) -> Iterator[Wire]:
    """A hub of each kind that has sockets."""
    with contextlib.ExitStack() as stack:
        yield open_wire(request.param, deployment if request.param == "tcp" else None, stack)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Closes at the end of the test what the test gives it."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def ipc_wire() -> Iterator[Wire]:
    with contextlib.ExitStack() as stack:
        yield open_wire("ipc", None, stack)


@pytest.fixture
def tcp_wire(tmp_path: Path) -> Iterator[Wire]:
    """A hub over tcp with keys of its own, for the test to change."""
    keys.generate_keys(tmp_path / "keys")
    with contextlib.ExitStack() as stack:
        yield open_wire("tcp", tmp_path / "keys", stack)
