"""Links of all kinds: what they promise is tested over memory, ipc and tcp alike; what only sockets
do, over sockets."""

import asyncio
import contextlib
import gc
import os
import select
import signal
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
import zmq

from dovetail.protocol import codec, links
from dovetail.protocol.errors import KeysError, LinkClosed, PeerBusy, PeerGone, UserError
from dovetail.protocol.links import addresses, open_hub, open_link
from dovetail.protocol.links.addresses import MAX_IPC_PATH_BYTES, WORKERS_SUFFIX
from dovetail.protocol.links.sockets import QUEUE_MESSAGES
from support.memory_links import MemoryHub, memory_links
from support.patience import PATIENCE_S
from support.wires import Wire, open_wire, readable, spawn, until

SETTLED_S = 0.1
"""Seconds without a change after which descriptors are taken to be all closed that will be."""

LINK = """
import ctypes, sys, time
from pathlib import Path
from dovetail.protocol.links import open_link
address, keys, role, kind = [*sys.argv[1:], *["target", ""][len(sys.argv) - 3 :]]
link = open_link(address, keys=Path(keys) if keys else None, role=role)
link.send([b"hello"])
print("ready", flush=True)
if kind == "computes":
    ctypes.PyDLL(None).sleep(3)  # which keeps the lock
    link.send([b"computed"])
while kind == "busy":
    link.send([b"again"])
    time.sleep(0.01)
link.send(link.receive(None))
link.receive(None)
"""
HUB = """
import sys
import tempfile
from dovetail.protocol.links import open_hub
hub = open_hub(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


# -- what all kinds promise ------------------------------------------------------------------------


def test_frames_go_there_and_back_unchanged(wire: Wire) -> None:
    link = wire.dial()
    frames = [b"", b"\x00" * 3, os.urandom(100_000), b"x"]
    link.send(frames)
    peer, arrived = wire.arrived()
    assert arrived == frames
    wire.hub.send(peer, arrived)
    assert link.receive(PATIENCE_S) == frames


def test_messages_keep_the_order_of_each_of_many_senders(wire: Wire) -> None:
    senders = {i: wire.dial() for i in range(12)}
    for number in range(40):
        for i, link in senders.items():
            link.send([b"%d" % i, b"%d" % number])
    heard: dict[bytes, list[bytes]] = {}
    names: dict[bytes, bytes] = {}
    for _ in range(12 * 40):
        peer, (name, number_text) = wire.arrived()
        assert names.setdefault(peer, name) == name
        heard.setdefault(peer, []).append(number_text)
    assert len(heard) == 12
    assert all(numbers == [b"%d" % n for n in range(40)] for numbers in heard.values())
    for peer in heard:
        for number in range(40):
            wire.hub.send(peer, [names[peer], b"%d" % number])
    for i, link in senders.items():
        assert [link.receive(PATIENCE_S) for _ in range(40)] == [
            [b"%d" % i, b"%d" % number] for number in range(40)
        ]


def test_receive_gives_nothing_when_nothing_came(wire: Wire) -> None:
    link = wire.dial()
    assert wire.hub.receive() is None
    assert link.receive(0.0) is None
    assert link.receive(0.01) is None


def test_a_message_to_a_peer_that_left_raises(wire: Wire) -> None:
    link, other = wire.dial(), wire.dial()
    peer, stays = wire.greet(link), wire.greet(other)
    assert wire.hub.disconnects() == 0
    link.close()
    assert wire.departed() == 1
    with pytest.raises(PeerGone):
        wire.hub.send(peer, [b"x"])
    wire.hub.send(stays, [b"x"])
    assert other.receive(PATIENCE_S) == [b"x"]
    assert wire.hub.disconnects() == 0


def test_a_message_to_nobody_raises(wire: Wire) -> None:
    with pytest.raises(PeerGone):
        wire.hub.send(b"\x00none", [b"x"])


def test_what_a_peer_sent_before_it_left_arrives(wire: Wire) -> None:
    link = wire.dial()
    wire.greet(link)
    link.send([b"result"])
    assert wire.arrived()[1] == [b"result"]
    link.close()
    wire.departed()


def test_a_link_learns_that_the_coordinator_has_gone(wire: Wire) -> None:
    link = wire.dial()
    peer = wire.greet(link)
    wire.hub.send(peer, [b"first"])
    wire.hub.send(peer, [b"last"])
    assert [link.receive(PATIENCE_S), link.receive(PATIENCE_S)] == [[b"first"], [b"last"]]
    wire.hub.close()
    with pytest.raises(LinkClosed, match=r"the coordinator .*disconnected"):
        link.receive(PATIENCE_S)
    with pytest.raises(LinkClosed):
        link.send([b"x"])


def test_a_link_can_be_asked_whether_the_coordinator_is_there_while_messages_wait(
    wire: Wire,
) -> None:
    link = wire.dial()
    wire.hub.send(wire.greet(link), [b"waits"])
    link.check()
    wire.hub.close()
    with pytest.raises(LinkClosed):
        until(lambda: link.check() is not None, lambda: time.sleep(0.001))
    assert link.receive(PATIENCE_S) == [b"waits"]


def test_a_waiting_link_is_woken_when_the_coordinator_goes(wire: Wire) -> None:
    link = wire.dial()
    wire.greet(link)
    closing = threading.Thread(target=wire.hub.close)
    closing.start()
    with pytest.raises(LinkClosed):
        link.receive(None)
    closing.join()


def test_a_loop_hears_of_what_arrives_and_of_the_end(wire: Wire) -> None:
    link = wire.dial()
    link.offer([b"hello"])
    peer, _ = wire.arrived()
    assert link.take() is None
    wire.hub.send(peer, [b"one"])
    assert readable(link.fileno())
    assert link.take() == [b"one"]
    assert link.take() is None
    wire.hub.close()
    assert readable(link.monitor_fileno())
    with pytest.raises(LinkClosed):
        link.receive(PATIENCE_S)


def test_what_is_offered_never_waits(wire: Wire) -> None:
    link = wire.dial()

    def offer_for_ever() -> None:
        for _ in range(100 * QUEUE_MESSAGES):
            link.offer([b"x" * 1000])

    with pytest.raises(PeerBusy):
        offer_for_ever()


def test_a_link_closed_here_says_so(wire: Wire) -> None:
    link = wire.dial()
    link.close()
    link.close()
    with pytest.raises(LinkClosed, match="closed here"):
        link.send([b"x"])
    with pytest.raises(LinkClosed, match="closed here"):
        link.receive(0.0)


def fill(wire: Wire, peer: bytes) -> int:
    """Return how many numbered messages it took until the peer was busy."""
    for number in range(100 * QUEUE_MESSAGES):
        try:
            wire.hub.send(peer, [b"%d" % number, bytes(8192)])
        except PeerBusy:
            return number
    pytest.fail("a peer that reads nothing never was busy")


def test_a_slow_peer_is_busy_and_holds_up_nobody(wire: Wire) -> None:
    slow, quick = wire.dial(), wire.dial()
    slow_peer, quick_peer = wire.greet(slow), wire.greet(quick)
    fill(wire, slow_peer)
    wire.hub.send(quick_peer, [b"question"])
    assert quick.receive(PATIENCE_S) == [b"question"]
    quick.send([b"answer"])
    assert wire.arrived() == (quick_peer, [b"answer"])


def test_a_busy_peer_that_reads_again_is_served_again(wire: Wire) -> None:
    link = wire.dial()
    peer = wire.greet(link)
    for number in range(fill(wire, peer)):
        frames = link.receive(PATIENCE_S)
        assert frames is not None
        assert frames[0] == b"%d" % number
    wire.hub.send(peer, [b"again"])
    assert link.receive(PATIENCE_S) == [b"again"]


def test_a_sender_waits_while_the_coordinator_takes_nothing(wire: Wire) -> None:
    link = wire.dial()
    wire.greet(link)
    many = 4 * QUEUE_MESSAGES
    sending = threading.Thread(
        target=lambda: [link.send([b"%d" % number, bytes(4096)]) for number in range(many)]
    )
    sending.start()
    assert [int(wire.arrived()[1][0]) for _ in range(many)] == list(range(many))
    sending.join()


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""] * 5,
        [bytes(codec.MAX_FRAME_BYTES + 1)],
        [bytes(codec.MAX_FRAME_BYTES), bytes(codec.MAX_BODY_BYTES + 1)],
    ],
)
def test_what_no_receiver_would_take_is_not_sent(wire: Wire, frames: list[bytes]) -> None:
    link = wire.dial()
    peer = wire.greet(link)
    with pytest.raises(ValueError, match="a message has 1 to 4 frames"):
        link.send(frames)
    with pytest.raises(ValueError, match="a message has 1 to 4 frames"):
        wire.hub.send(peer, frames)


def test_an_event_loop_can_watch_a_hub(wire: Wire) -> None:
    """asyncio with `add_reader` on both descriptors, a peer in a thread: every message and the
    departure are seen."""
    link = wire.dial()
    number = 50

    async def serve() -> tuple[int, int]:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        heard = gone = 0

        def arrived() -> None:
            nonlocal heard
            while (message := wire.hub.receive()) is not None:
                heard += 1
                wire.hub.send(message[0], message[1])

        def departed() -> None:
            nonlocal gone
            gone += wire.hub.disconnects()
            arrived()
            if gone:
                done.set()

        loop.add_reader(wire.hub.fileno(), arrived)
        loop.add_reader(wire.hub.monitor_fileno(), departed)
        arrived()
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        loop.remove_reader(wire.hub.fileno())
        loop.remove_reader(wire.hub.monitor_fileno())
        return heard, gone

    def ask() -> None:
        for i in range(number):
            link.send([b"%d" % i])
            assert link.receive(PATIENCE_S) == [b"%d" % i]
        link.close()

    asking = threading.Thread(target=ask)
    asking.start()
    assert asyncio.run(serve()) == (number, 1)
    asking.join()


def settle() -> None:
    """Wait until descriptors have stayed as many for some time: connections whose other end has
    gone are closed behind our back."""
    count, settled_s = -1, time.monotonic() + SETTLED_S
    while time.monotonic() < settled_s:
        if (now := len(os.listdir("/proc/self/fd"))) != count:  # noqa: PTH208
            count, settled_s = now, time.monotonic() + SETTLED_S
        time.sleep(0.005)


def test_closing_gives_back_every_descriptor_and_thread(wire: Wire) -> None:
    for role in ("target", "draft"):
        wire.greet(wire.dial(role))
    wire.hub.close()
    wire.hub.close()
    gc.collect()  # what tests before this one have left to the collector is not to go in between
    settle()
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208
    with contextlib.ExitStack() as stack:
        hub = (
            memory_links()
            if wire.hub.address == "memory"
            else open_hub("ipc" if wire.keys is None else wire.hub.address, keys=wire.keys)
        )
        stack.callback(hub.close)
        again = Wire(
            hub,
            wire.keys,
            lambda role: (
                hub.connect()
                if isinstance(hub, MemoryHub)
                else open_link(hub.address, keys=wire.keys, role=role)
            ),
            stack,
        )
        again.greet(again.dial())
    settle()
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
    end_s = time.monotonic() + PATIENCE_S
    # the kernel lists a thread for a moment after it has been joined
    while (left := len(os.listdir("/proc/self/task"))) > threads and time.monotonic() < end_s:  # noqa: PTH208
        time.sleep(0.001)
    assert left == threads


# -- processes that die ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_killed_process_is_noticed_without_waiting_for_a_heartbeat(
    kind: str, deployment: Path, stack: contextlib.ExitStack
) -> None:
    wire = open_wire(kind, deployment if kind == "tcp" else None, stack)
    child = spawn(stack, LINK, wire.hub.address, str(wire.keys or ""))
    peer, frames = wire.arrived()
    assert frames == [b"hello"]
    os.kill(child.pid, signal.SIGKILL)
    assert wire.departed() == 1
    with pytest.raises(PeerGone):
        wire.hub.send(peer, [b"x"])


@pytest.mark.usefixtures("heartbeats")
@pytest.mark.parametrize("busy", ["", "busy"], ids=["idle", "busy"])
def test_a_stopped_process_is_noticed_by_its_missing_heartbeat(
    socket_wire: Wire, stack: contextlib.ExitStack, busy: str
) -> None:
    """One that was in the middle of saying much is noticed too."""
    wire = socket_wire
    child = spawn(stack, LINK, wire.hub.address, str(wire.keys or ""), "target", busy)
    peer, _ = wire.arrived()
    os.kill(child.pid, signal.SIGSTOP)
    assert wire.departed() == 1
    with pytest.raises(PeerGone):
        wire.hub.send(peer, [b"x"])


@pytest.mark.usefixtures("heartbeats")
def test_a_process_that_holds_the_interpreter_for_long_is_not_taken_for_a_stopped_one(
    ipc_wire: Wire, stack: contextlib.ExitStack
) -> None:
    child = spawn(stack, LINK, ipc_wire.hub.address, "", "target", "computes")
    assert ipc_wire.arrived()[1] == [b"hello"]
    peer, frames = ipc_wire.arrived()
    assert frames == [b"computed"]
    assert ipc_wire.hub.disconnects() == 0
    ipc_wire.hub.send(peer, [b"x"])
    assert child.poll() is None


@pytest.mark.usefixtures("heartbeats")
def test_a_client_that_was_stopped_goes_on_over_ipc(
    ipc_wire: Wire, stack: contextlib.ExitStack
) -> None:
    """Ctrl-Z stops a client so."""
    child = spawn(stack, LINK, ipc_wire.hub.address, "", "client")
    peer, _ = ipc_wire.arrived()
    os.kill(child.pid, signal.SIGSTOP)
    ipc_wire.hub.send(peer, [b"while stopped"])
    assert (
        select.select([ipc_wire.hub.monitor_fileno()], [], [], 2.5)[0] == []
    )  # longer than heartbeats allow
    os.kill(child.pid, signal.SIGCONT)
    assert ipc_wire.arrived() == (peer, [b"while stopped"])
    ipc_wire.hub.send(peer, [b"x"])


@pytest.mark.usefixtures("heartbeats")
def test_a_worker_notices_a_stopped_coordinator(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path / 'socket'}"
    child = spawn(stack, HUB, address)
    link = stack.enter_context(contextlib.closing(open_link(address, role="target")))
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(LinkClosed, match=f"the coordinator at {address} disconnected"):
        link.receive(PATIENCE_S)


def test_a_link_notices_a_killed_coordinator_and_another_may_take_its_place(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path / 'socket'}"
    child = spawn(stack, HUB, address)
    link = stack.enter_context(contextlib.closing(open_link(address, role="draft")))
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(LinkClosed, match=f"the coordinator at {address} disconnected"):
        link.receive(PATIENCE_S)
    child.wait()
    stack.enter_context(contextlib.closing(open_hub(address)))
    stack.enter_context(contextlib.closing(open_link(address, role="draft")))


# -- connecting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_link_without_a_coordinator_says_where_it_looked(
    kind: str, tmp_path: Path, deployment: Path
) -> None:
    with contextlib.closing(open_hub("tcp://127.0.0.1:*", keys=deployment)) as hub:
        address = hub.address if kind == "tcp" else f"ipc://{tmp_path / 'nobody'}"
    tmp_path.chmod(0o700)
    with pytest.raises(LinkClosed, match=f"no coordinator answers at {address} within 0.2 s"):
        open_link(address, keys=deployment if kind == "tcp" else None, role="draft", timeout_s=0.2)


def test_a_link_waits_for_a_coordinator_that_starts_later(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path / 'socket'}"
    opened: list[links.Link] = []
    opening = threading.Thread(
        target=lambda: opened.append(open_link(address, role="draft", timeout_s=PATIENCE_S))
    )
    opening.start()
    with contextlib.closing(open_hub(address)):
        opening.join()
        assert len(opened) == 1
        opened[0].close()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "ipc:",
        "ipc://",
        "tcp://",
        "tcp",
        "/tmp/x",
        "inproc://x",
        "http://127.0.0.1:80",
        "udp://127.0.0.1:5",
    ],
)
def test_what_is_no_address_is_refused(address: str, deployment: Path) -> None:
    with pytest.raises(
        UserError, match="is not an address: write ipc, ipc://PATH or tcp://HOST:PORT"
    ):
        open_hub(address, keys=deployment)
    with pytest.raises(
        UserError, match="is not an address: write ipc, ipc://PATH or tcp://HOST:PORT"
    ):
        open_link(address, keys=deployment, role="draft")


def test_a_place_to_which_one_cannot_connect_is_refused(deployment: Path) -> None:
    for place in ("127.0.0.1:*", "127.0.0.1", ":5", "127.0.0.1:70000"):
        with pytest.raises(
            UserError,
            match=r"is not (a tcp address|an address to connect to .*): write .*tcp://HOST:PORT",
        ):
            open_link(f"tcp://{place}", keys=deployment, role="draft", timeout_s=0.2)


def test_a_host_that_is_none_is_named(deployment: Path) -> None:
    with pytest.raises(
        LinkClosed,
        match=r"'no-such-host.invalid' in tcp://no-such-host.invalid:5 is not a host known "
        r"here",
    ):
        open_link("tcp://no-such-host.invalid:5", keys=deployment, role="draft", timeout_s=0.2)


# -- ipc -------------------------------------------------------------------------------------------


def test_ipc_alone_listens_in_a_private_folder_and_leaves_nothing_behind() -> None:
    hub = open_hub("ipc")
    path = Path(hub.address.removeprefix("ipc://"))
    assert path.is_socket()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    hub.close()
    assert not path.parent.exists()


def test_the_next_hub_removes_the_folders_of_killed_ones_and_no_others(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dt-")))  # short enough
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    killed, lives, fresh, other = (
        place / f"dovetail-{name}" for name in ("0" * 16, "1" * 16, "2" * 16, "notes")
    )
    for folder in (killed, fresh, other):
        folder.mkdir(mode=0o700)
        (folder / "coordinator.lock").touch()
    stack.enter_context(contextlib.closing(open_hub(f"ipc://{lives}/coordinator")))
    for folder in (killed, lives, other):
        os.utime(folder, (0, 0))
    open_hub("ipc").close()
    assert {*place.iterdir()} == {lives, fresh, other}


def test_an_ipc_path_leaves_neither_socket_nor_lock_behind(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    hub = open_hub(f"ipc://{folder / 'socket'}")
    assert hub.address == f"ipc://{folder / 'socket'}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == [
        "socket",
        "socket.lock",
        f"socket{WORKERS_SUFFIX}",
    ]
    hub.close()
    assert not folder.exists()


def test_a_hub_takes_over_the_folder_that_a_killed_one_left_and_removes_it(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    folder = tmp_path / "made"
    child = spawn(stack, HUB, f"ipc://{folder / 'socket'}")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert len(list(folder.iterdir())) == 3
    hub = open_hub(f"ipc://{folder / 'socket'}", own_folder=True)
    stack.enter_context(contextlib.closing(open_link(hub.address, role="draft")))
    hub.close()
    assert not folder.exists()


def test_a_folder_that_was_there_or_holds_something_else_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    open_hub(f"ipc://{tmp_path}/socket").close()
    assert list(tmp_path.iterdir()) == []
    hub = open_hub(f"ipc://{tmp_path}/outer/inner/socket")
    (tmp_path / "outer" / "note").write_text("")
    hub.close()
    assert list(tmp_path.rglob("*")) == [tmp_path / "outer", tmp_path / "outer" / "note"]


def test_a_hub_that_is_interrupted_while_it_opens_leaves_nothing_behind(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stack.enter_context(
        tempfile.TemporaryDirectory(prefix="dt-")
    )  # pytest's own paths may be too long for a socket

    def interrupt(folder: Path) -> None:
        assert folder.is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", folder)
    monkeypatch.setattr(addresses, "check_private", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_hub("ipc")
    assert list(Path(folder).iterdir()) == []


def test_a_second_coordinator_on_a_path_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path / 'made' / 'socket'}"
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(contextlib.closing(open_hub(address)))
        with pytest.raises(
            UserError,
            match=f"another coordinator listens at {address}: use it, stop it, or choose "
            "another path",
        ):
            open_hub(address)
        wire = Wire(hub, None, lambda role: open_link(address, role=role), stack)
        wire.greet(wire.dial())
    with contextlib.closing(open_hub(address)):
        pass


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    for opening in (
        lambda: open_hub(f"ipc://{folder}/socket"),
        lambda: open_link(f"ipc://{folder}/socket", role="draft"),
    ):
        with pytest.raises(
            UserError,
            match=f"the folder {folder} of the socket is open to others: choose a path in a "
            "folder that only you can enter",
        ):
            opening()
    with pytest.raises(
        UserError, match=f"no process listens at ipc://{folder}/socket, and no coordinator could"
    ):
        open_link(f"ipc://{folder}/socket", role="client")
    assert list(folder.iterdir()) == []


def test_the_longest_path_works_and_a_longer_one_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    longest = tmp_path / ("x" * (MAX_IPC_PATH_BYTES - len(os.fsencode(tmp_path)) - 1))
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(contextlib.closing(open_hub(f"ipc://{longest}")))
        wire = Wire(hub, None, lambda role: open_link(hub.address, role=role), stack)
        wire.greet(wire.dial())
    for opening in (
        lambda: open_hub(f"ipc://{longest}x"),
        lambda: open_link(f"ipc://{longest}x", role="draft"),
    ):
        with pytest.raises(
            UserError,
            match=f"has {MAX_IPC_PATH_BYTES + 1} bytes, and a socket's has at most "
            f"{MAX_IPC_PATH_BYTES}: choose a shorter one",
        ):
            opening()


def test_a_path_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot listen at .*: choose another path"):
        open_hub(f"ipc://{tmp_path / 'file' / 'socket'}")


def test_ipc_peers_have_no_keys(ipc_wire: Wire) -> None:
    assert ipc_wire.hub.user(ipc_wire.greet(ipc_wire.dial())) is None


# -- tcp -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "*", "localhost", "[::1]"])
def test_tcp_without_keys_is_refused_everywhere(host: str) -> None:
    with pytest.raises(
        KeysError,
        match="requires keys, like every tcp address: create them once with `dovetail keygen",
    ):
        open_hub(f"tcp://{host}:*")
    with pytest.raises(KeysError, match="requires keys"):
        open_link(f"tcp://{host}:4000", role="draft")


@pytest.mark.parametrize("port", ["*", "0"])
def test_the_address_names_the_port_that_was_found(port: str, deployment: Path) -> None:
    with contextlib.closing(open_hub(f"tcp://127.0.0.1:{port}", keys=deployment)) as hub:
        assert int(hub.address.removeprefix("tcp://127.0.0.1:")) > 0


def test_a_port_in_use_is_named(deployment: Path) -> None:
    with (
        contextlib.closing(open_hub("tcp://127.0.0.1:*", keys=deployment)) as hub,
        pytest.raises(
            UserError,
            match=f"{hub.address} is in use: stop the process that listens there, or choose "
            "another port",
        ),
    ):
        open_hub(hub.address, keys=deployment)


@pytest.mark.parametrize(
    "place",
    [
        "127.0.0.1",
        "127.0.0.1:",
        ":5",
        "127.0.0.1:x",
        "127.0.0.1:65536",
        "127.0.0.1:-1",
        "192.0.2.1:*",
        "no such host:*",
    ],
)
def test_a_place_where_one_cannot_listen_is_refused(place: str, deployment: Path) -> None:
    with pytest.raises(UserError, match=r"tcp://.*(write tcp://HOST:PORT|give the IP address)"):
        open_hub(f"tcp://{place}", keys=deployment)


# -- strangers and broken peers --------------------------------------------------------------------


def test_messages_of_too_many_frames_are_dropped_and_counted(ipc_wire: Wire) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(ipc_wire.hub.address)
        for frames in ([b""] * 5, [b""] * 20_000, [b"good"]):
            stranger.send_multipart(frames)
        assert ipc_wire.arrived()[1] == [b"good"]
    assert ipc_wire.hub.refused() == 2


def test_a_frame_beyond_the_limit_costs_the_peer_its_connection_and_others_nothing(
    ipc_wire: Wire,
) -> None:
    link = ipc_wire.dial()
    peer = ipc_wire.greet(link)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(ipc_wire.hub.address)
        stranger.send(bytes(codec.MAX_FRAME_BYTES + 4096))
        ipc_wire.departed()
        assert ipc_wire.hub.receive() is None
    ipc_wire.hub.send(peer, [b"x"])
    assert link.receive(PATIENCE_S) == [b"x"]


def test_a_stranger_that_speaks_something_else_is_cut_off(tcp_wire: Wire) -> None:
    host, port = tcp_wire.hub.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(4096))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    assert tcp_wire.greet(tcp_wire.dial()), "the hub goes on"
