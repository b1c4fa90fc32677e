"""Real processes tell a service manager that they are ready and that they get on, and nothing while
they are stuck."""

import contextlib
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.launch.processes.notification import FEEDS, Notifier
from dovetail.protocol.codec import EVENT, encode
from dovetail.protocol.errors import UserError
from dovetail.protocol.links import open_hub
from dovetail.protocol.messages import Event, Hello, Opened, Probe, Probed, Welcome
from support import stuck
from support.patience import PATIENCE_S

Start = Callable[..., "subprocess.Popen[str]"]
SILENCE_S = 1.0
"""A process that gets on would have said so five times meanwhile."""
WATCHDOG_S = 0.8


class Manager:
    """The socket of a service manager."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def variables(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.name, "WATCHDOG_USEC": str(round(WATCHDOG_S * 1e6))}

    def hear(self, patience_s: float = PATIENCE_S) -> str | None:
        """The next message; None: nothing comes."""
        there, _, _ = select.select([self._socket], [], [], patience_s)
        return self._socket.recv(4096).decode() if there else None

    def until(self, text: str) -> None:
        """Hear a message, whatever comes before it."""
        while (heard := self.hear()) != text:
            assert heard is not None, f"{text} was never said"

    def forget(self) -> None:
        """Leave what has been said already."""
        while self.hear(0.0) is not None:
            pass


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, temporary: Path) -> Iterator[Manager]:
    name = str(temporary / "notify") if request.param == "path" else f"@{temporary.name}-notify"
    with Manager(name) as manager:
        yield manager


def notifier(manager: Manager, *parts: str, **changes: str) -> tuple[Notifier, list[float]]:
    """A notifier on a clock of its own."""
    now_s = [0.0]
    return Notifier(
        parts or ("",), environment={**manager.variables, **changes}, clock_s=lambda: now_s[0]
    ), now_s


def test_progress_is_told_a_few_times_within_what_the_watchdog_allows(manager: Manager) -> None:
    one, now_s = notifier(manager)
    one.ready()
    one.ready()
    for tick in range(40):
        now_s[0] = tick * WATCHDOG_S / 20
        one.progress()
    said = [manager.hear(0.0) for _ in range(1 + 2 * FEEDS)]
    assert said == ["READY=1", *["WATCHDOG=1"] * 2 * FEEDS]
    assert manager.hear(0.0) is None


def test_a_process_of_two_loops_gets_on_only_if_both_do(manager: Manager) -> None:
    both, now_s = notifier(manager, "target", "draft")
    both.part("target").ready()
    assert manager.hear(0.0) is None
    both.part("draft").ready()
    assert manager.hear(0.0) == "READY=1"
    for tick in range(8):
        now_s[0] = tick * WATCHDOG_S
        both.part("target").progress()
    assert manager.hear(0.0) is None
    both.part("draft").progress()
    assert manager.hear(0.0) == "WATCHDOG=1"


def test_a_model_that_is_read_asks_for_time(manager: Manager) -> None:
    one, now_s = notifier(manager)
    one.loading()
    one.loading()
    now_s[0] = 2.0
    one.loading()
    assert manager.hear(0.0) == manager.hear(0.0) == "EXTEND_TIMEOUT_USEC=900000000"
    assert manager.hear(0.0) is None


def test_the_watchdog_of_another_process_is_not_fed(manager: Manager) -> None:
    one, _ = notifier(manager, WATCHDOG_PID="1")
    one.progress()
    assert manager.hear(0.0) is None


def test_a_socket_of_another_family_is_a_mistake() -> None:
    with pytest.raises(UserError, match="NOTIFY_SOCKET = 'vsock:2:1'"):
        Notifier(environment={"NOTIFY_SOCKET": "vsock:2:1"})


@pytest.fixture
def address(temporary: Path) -> str:
    (temporary / "private").mkdir(mode=0o700)
    return f"ipc://{temporary / 'private' / 'hub'}"


def test_coordinator_worker_and_server_are_ready_and_get_on(
    start: Start, address: str, temporary: Path
) -> None:
    with contextlib.ExitStack() as open_:
        hub, worker, server = (
            open_.enter_context(Manager(str(temporary / name))) for name in ("c", "w", "h")
        )
        coordinator = start("coordinator", "--listen", address, more=hub.variables)
        hub.until("READY=1")
        to = ("--connect", address)
        start("worker", "--role", "draft", "--draft", "ngram", *to, more=worker.variables)
        start("http", *to, "--http.port=0", more=server.variables)
        for one in (worker, server, hub):
            if one is not hub:
                one.until("READY=1")
            for _ in range(3):
                one.until("WATCHDOG=1")
        coordinator.send_signal(signal.SIGSTOP)
        hub.forget()
        assert hub.hear(SILENCE_S) is None
        coordinator.send_signal(signal.SIGCONT)
        hub.until("WATCHDOG=1")


def test_a_worker_that_is_stuck_is_not_fed(start: Start, address: str, temporary: Path) -> None:
    with contextlib.closing(open_hub(address)) as hub, Manager(str(temporary / "w")) as manager:

        def next_event() -> tuple[bytes, Event]:
            while (received := hub.receive()) is None:
                assert select.select([hub.fileno()], [], [], PATIENCE_S)[0], "nothing came"
            event: Event = EVENT.decode(received[1])
            return received[0], event

        worker = start(
            *("worker", "--role", "draft", "--draft", "ngram", "--connect", address),
            command=stuck.COMMAND,
            more=manager.variables,
        )
        peer, hello = next_event()
        assert isinstance(hello, Hello)
        hub.send(peer, encode(Welcome(epoch=1)))
        manager.until("READY=1")
        hub.send(peer, encode(Probe(epoch=1, sent_ns=1)))
        assert isinstance(next_event()[1], Probed)
        manager.until("WATCHDOG=1")
        for message in (*stuck.opening(), Probe(epoch=1, sent_ns=2)):
            hub.send(peer, encode(message))
        assert isinstance(next_event()[1], Opened)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "stuck\n"
        manager.forget()
        assert manager.hear(SILENCE_S) is None
        assert worker.poll() is None
