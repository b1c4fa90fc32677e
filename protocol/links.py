"""Links: frames from one process to another. A `Hub` is the coordinator's end of all links, a
`Link` the other end of one.

Two kinds behave alike: ipc (a socket in a folder that only its owner can enter) and tcp (CURVE keys
required, on loopback too). Frames arrive whole, in the order of each sender, at most once. A
message to a peer that has gone raises `PeerGone` and one to a peer that takes nothing off its full
queue `PeerBusy`, so that nothing vanishes unseen and nobody waits for a slow peer. A link whose
coordinator has gone raises `LinkClosed` and never connects again. Knows frames, not what they mean
(`codec.py`).

Liveness is libzmq's own. A closed connection is seen at once, and the kernel closes that of a
process that dies. Heartbeats find a peer that is stopped (SIGSTOP), or that the way to is cut,
within 1.2 to 1.7 s, on both ends; libzmq's I/O thread answers them, so that a process that computes
for minutes, with the interpreter's lock or without, is never taken for one that is stopped. Over
ipc there are none between the coordinator and its clients: a terminal's Ctrl-Z stops one, and its
user expects it to go on. Deadlines for the work of a peer that is stuck are its user's business.
"""

import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Protocol

import zmq

from dovetail.protocol import keys as keyring
from dovetail.protocol.addresses import (
    WORKERS_SUFFIX,
    IpcPlace,
    Socket,
    TcpPlace,
    check_length,
    check_way,
    fresh_path,
    host_and_port,
    keys_for,
    no_address,
    watch,
)
from dovetail.protocol.codec import MAX_BODY_BYTES, MAX_FRAME_BYTES, MAX_FRAMES
from dovetail.protocol.errors import (
    LinkClosed,
    LinkRefused,
    PeerBusy,
    PeerGone,
    UserError,
)
from dovetail.protocol.keys import PeerKey

MAX_MESSAGE_BYTES = MAX_BODY_BYTES + MAX_FRAME_BYTES
QUEUE_MESSAGES = 1000
"""Messages that wait for one peer before it counts as busy."""
CONNECT_TIMEOUT_S = 10.0

_HANDSHAKE_MS = 5000
_FAREWELL_MS = 200
"""So long, at most, a hub that closes waits until what it sent last has left: that it lets its
workers go."""
_CURVE_OVERHEAD_BYTES = 1024
_SETTLE_S = 0.002
_CLIENTS = ("client", keyring.OPERATOR)
_MAX_KNOWN_PEERS = 4096

_READABLE = int(zmq.POLLIN)
"""As a number: a flag of an enumeration costs more to look at than the socket."""
_GONE = zmq.EVENT_DISCONNECTED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Without EVENT_HANDSHAKE_FAILED_PROTOCOL: libzmq (4.3.5) reports with it a frame that was changed
on the way, forgets over it to close the connection, and aborts the process at the next
heartbeat."""

Context = zmq.Context[Socket]


class Hub(Protocol):
    """The coordinator's end of all links. One thread uses it."""

    @property
    def address(self) -> str:
        """The address that links connect to, with the real port or path."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when something may have arrived.

        It is edge-triggered: once at the start, after it fires, and after every `send` and
        `disconnects`, call `receive` until it returns None.
        """

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next message as (peer, frames), or None; never blocks. What breaks the bounds on
        frames or comes from a revoked key is dropped and counted."""

    def send(self, peer: bytes, frames: Sequence[bytes]) -> None:
        """Queue a message for a peer; never blocks. `PeerGone` if it is not connected, `PeerBusy`
        if its queue is full."""

    def turn_away(self, peer: bytes, frames: Sequence[bytes]) -> None:
        """Queue a last message for a peer, whose key may have been revoked, if that is possible;
        never blocks."""

    def user(self, peer: bytes) -> PeerKey | None:
        """The key of a peer that has been heard over tcp: its name and the roles that it may take,
        none if it was revoked. None where there are no keys."""

    def monitor_fileno(self) -> int:
        """A descriptor that becomes readable when peers may have disconnected or were refused; call
        `disconnects` then."""

    def disconnects(self) -> int:
        """Return how many peers disconnected since the last call. Which ones, `send` tells: probe
        them all. Takes some milliseconds if there are any."""

    def refused(self) -> int:
        """Handshakes and messages refused so far."""

    def close(self) -> None:
        """Close everything that was opened, and remove what it left in the file system. A second
        call does nothing."""


class Link(Protocol):
    """A worker's or a client's end of one link. One thread uses it."""

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue a message for the coordinator, waiting while the queue is full; `LinkClosed` if the
        coordinator has gone."""

    def offer(self, frames: Sequence[bytes]) -> None:
        """Queue a message for the coordinator; never blocks. `PeerBusy` if the queue is full,
        `LinkClosed` if the coordinator has gone."""

    def receive(self, timeout_s: float | None) -> list[bytes] | None:
        """The next message, or None if none comes within the time (None: wait for ever).

        `LinkClosed` when the coordinator has gone and all that it sent has been received.
        """

    def fileno(self) -> int:
        """A descriptor that becomes readable when something may have arrived.

        It is edge-triggered: once at the start, after it fires, and after every `offer`, call
        `take` until it returns None.
        """

    def take(self) -> list[bytes] | None:
        """The next message that has arrived, or None; never waits, and does not look whether the
        coordinator has gone."""

    def monitor_fileno(self) -> int:
        """A descriptor that becomes readable when the coordinator may have gone; call `receive(0)`
        then until it returns None or raises."""

    def check(self) -> None:
        """`LinkClosed` if the coordinator has gone, though what it sent before may wait; takes
        nothing and never waits."""

    def close(self) -> None:
        """Close everything that was opened. A second call does nothing."""


def open_hub(address: str, *, keys: Path | None = None, own_folder: bool = False) -> Hub:
    """Listen at "ipc" (a fresh private folder), ipc://PATH or tcp://HOST:PORT (port * or 0: any
    free one). `own_folder`: nothing else is in PATH's folder.

    The I/O thread takes over the core binding of the calling thread. `KeysError` for tcp without
    keys; `UserError` if the address cannot be had.
    """
    scheme, _, place = address.partition("://")
    if address == "ipc" or (scheme == "ipc" and place):
        return ZmqHub(
            IpcPlace(Path(place).absolute(), own=own_folder)
            if place
            else IpcPlace(fresh_path(), own=True),
            None,
        )
    if scheme == "tcp" and place:
        return ZmqHub(TcpPlace(address), keys_for(address, keys))
    raise no_address(address)


def open_link(
    address: str, *, keys: Path | None = None, role: str, timeout_s: float = CONNECT_TIMEOUT_S
) -> Link:
    """Connect to the coordinator at ipc://PATH or tcp://HOST:PORT and wait until it has taken the
    connection.

    `LinkClosed`, naming the address, if none answers within `timeout_s`; `LinkRefused` if it
    refuses the key; `KeysError` if tcp lacks the key of `role`.
    """
    scheme, _, place = address.partition("://")
    if scheme == "ipc" and place:
        path = Path(place).absolute()
        check_length(path)
        if path.parent.is_dir():
            check_way(path)
        return ZmqLink(f"ipc://{path}", None, role, timeout_s)
    if scheme == "tcp" and place:
        host_and_port(address)
        return ZmqLink(address, keys_for(address, keys), role, timeout_s)
    raise no_address(address)


# -- zmq -------------------------------------------------------------------------------------------


class ZmqHub:
    """A bound ROUTER socket with its monitor and, for tcp, the thread that judges keys."""

    def __init__(self, place: "IpcPlace | TcpPlace", keys: Path | None) -> None:
        self._place = place
        self._peers: keyring.AllowedPeers | None = None
        self._judge: threading.Thread | None = None
        self._known: dict[bytes, str] = {}
        self._gone = 0
        self._refused = 0
        self._context: Context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor: _Monitor | None = None
        try:
            _configure(self._socket)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if keys is not None:
                self._demand_keys(keys)
            self._monitor = _Monitor(self._context, self._socket, _GONE | _REFUSED)
            self._address = place.bind(self._socket)
            self._socket.getsockopt(
                zmq.EVENTS
            )  # the descriptor fires only after a read that found nothing
        except BaseException:
            self.close()
            raise

    def _demand_keys(self, folder: Path) -> None:
        own = keyring.load_own_key(folder, keyring.COORDINATOR)
        self._peers = keyring.AllowedPeers(folder)
        self._judge = keyring.start_judge(self._context, self._peers)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, keyring.DOMAIN)
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())

    @property
    def address(self) -> str:
        return self._address

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        while True:
            try:
                peer, frames = self._take()
            except zmq.Again:
                return None
            if _bounded(frames):
                return peer, frames
            self._refused += 1

    def _take(self) -> tuple[bytes, list[bytes]]:
        """The next message; one from a key that is no longer allowed has lost its frames.
        `zmq.Again` if there is none."""
        if self._peers is None:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            return peer, frames
        first, *rest = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        peer, public = first.bytes, str(rest[0].get("User-Id")) if rest else ""
        if self._peers.find(public) is None:
            return peer, []
        if peer not in self._known and len(self._known) >= _MAX_KNOWN_PEERS:
            self._known.pop(next(iter(self._known)))
        self._known[peer] = public
        return peer, [frame.bytes for frame in rest] if len(rest) <= MAX_FRAMES else []

    def send(self, peer: bytes, frames: Sequence[bytes]) -> None:
        check_outgoing(frames)
        if (
            self._peers is not None
            and peer in self._known
            and self._peers.find(self._known[peer]) is None
        ):
            raise PeerGone(f"the key of peer {peer.hex()} was revoked")
        try:
            self._socket.send_multipart((peer, *frames), zmq.NOBLOCK)
        except zmq.Again:
            raise PeerBusy(
                f"peer {peer.hex()} takes nothing off its queue of {QUEUE_MESSAGES} messages"
            ) from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._known.pop(peer, None)
            raise PeerGone(f"peer {peer.hex()} is not connected") from None

    def turn_away(self, peer: bytes, frames: Sequence[bytes]) -> None:
        check_outgoing(frames)
        with suppress(zmq.ZMQError):
            self._socket.send_multipart((peer, *frames), zmq.NOBLOCK)

    def user(self, peer: bytes) -> PeerKey | None:
        if self._peers is None:
            return None
        public = self._known.get(peer, "")
        return self._peers.find(public) or PeerKey("", (), public)

    def monitor_fileno(self) -> int:
        assert self._monitor is not None
        return self._monitor.fileno()

    def disconnects(self) -> int:
        self._read_monitor()
        gone, self._gone = self._gone, 0
        if gone:
            self._settle()
        return gone

    def _settle(self) -> None:
        """Let libzmq take down the pipes of who disconnected.

        It reports a disconnect first and takes the pipe down afterwards, in three steps that its
        I/O thread and this one take in turn; a message sent in between would vanish instead of
        raising `PeerGone`. Reading EVENTS is what lets this thread take its steps.
        """
        end = time.monotonic() + _SETTLE_S
        while time.monotonic() < end:
            self._socket.getsockopt(zmq.EVENTS)
            time.sleep(_SETTLE_S / 20)

    def refused(self) -> int:
        self._read_monitor()
        return self._refused

    def _read_monitor(self) -> None:
        assert self._monitor is not None
        for event, _value in self._monitor.take():
            self._gone += event == _GONE
            self._refused += bool(event & _REFUSED)

    def close(self) -> None:
        if self._context.closed:
            return
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close(_FAREWELL_MS)
        self._context.term()
        if self._judge is not None:
            self._judge.join()
        self._place.close()


class ZmqLink:
    """A connected DEALER socket with its monitor."""

    def __init__(self, address: str, keys: Path | None, role: str, timeout_s: float) -> None:
        self._address = address
        works = role not in _CLIENTS
        self._entrance = WORKERS_SUFFIX if keys is None and works else ""
        self._gone = ""
        self._key_name = ""
        self._context: Context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._monitor: _Monitor | None = None
        try:
            _configure(self._socket)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            if keys is not None:
                self._show_key(keys, role)
            if keys is not None or works:
                watch(self._socket)
            self._monitor = _Monitor(
                self._context, self._socket, _GONE | _REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED
            )
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(self._monitor.socket, zmq.POLLIN)
            self._connect(timeout_s)
        except BaseException:
            self.close()
            raise

    def _show_key(self, folder: Path, role: str) -> None:
        own = keyring.own_key_for(folder, role)
        self._key_name = own.name
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keyring.coordinator_public(folder).encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())

    def _connect(self, timeout_s: float) -> None:
        """Wait for the handshake; a coordinator that is not there yet is tried again until the time
        is over."""
        assert self._monitor is not None
        try:
            self._socket.connect(self._address + self._entrance)
        except zmq.ZMQError as error:
            raise UserError(
                f"{self._address!r} is not an address to connect to ({error.strerror}): write "
                "ipc://PATH or tcp://HOST:PORT"
            ) from None
        deadline = time.monotonic() + timeout_s
        lost = False
        while (left := deadline - time.monotonic()) > 0:
            self._monitor.socket.poll(ceil(left * 1000))
            for event, _value in self._monitor.take():
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise LinkRefused(
                        f"the coordinator at {self._address} refuses the key "
                        f"{self._key_name!r}: allow its public key there, or copy the present "
                        "one here"
                    )
                lost = True
        if lost:
            advice = (
                "it may need keys, have other keys than coordinator.pub says, or not be a "
                "coordinator"
            )
            raise LinkRefused(
                f"what answers at {self._address} breaks the connection off: {advice}"
            )
        self._check_host()
        raise LinkClosed(
            f"no coordinator answers at {self._address} within {timeout_s:g} s: start it, or "
            "correct the address"
        )

    def _check_host(self) -> None:
        """`LinkClosed` for the name of a host that is none here."""
        if not self._address.startswith("tcp://"):
            return
        host, _ = host_and_port(self._address)
        try:
            socket.getaddrinfo(host.strip("[]"), None)
        except OSError as error:
            raise LinkClosed(
                f"{host!r} in {self._address} is not a host that is known here ({error.strerror}): "
                "correct the address"
            ) from None

    def send(self, frames: Sequence[bytes]) -> None:
        check_outgoing(frames)
        while True:
            self._check_open()
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                self._notice()
                if not self._gone:
                    zmq.zmq_poll(
                        [(self._socket, zmq.POLLOUT), (self._monitor_socket(), zmq.POLLIN)], -1
                    )

    def offer(self, frames: Sequence[bytes]) -> None:
        check_outgoing(frames)
        self._check_open()
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._notice()
            self._check_open()
            raise PeerBusy(
                f"the coordinator at {self._address} takes nothing off its queue of "
                f"{QUEUE_MESSAGES} messages"
            ) from None

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def take(self) -> list[bytes] | None:
        return self._take() if int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE else None

    def monitor_fileno(self) -> int:
        return int(self._monitor_socket().getsockopt(zmq.FD))

    def receive(self, timeout_s: float | None) -> list[bytes] | None:
        if (frames := self._take()) is not None:
            return frames
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._notice()
            if (frames := self._take()) is not None:
                return frames
            self._check_open()
            left_ms = None if deadline is None else (deadline - time.monotonic()) * 1000
            if left_ms is not None and left_ms <= 0:
                return None
            self._poller.poll(None if left_ms is None else ceil(left_ms))

    def _take(self) -> list[bytes] | None:
        """The next message that keeps the bounds, or None."""
        if self._socket.closed:
            return None
        try:
            while not _bounded(frames := self._socket.recv_multipart(zmq.NOBLOCK)):
                self._gone = (
                    f"the coordinator at {self._address} sent a message of "
                    f"{len(frames)} frames and {sum(map(len, frames))} bytes, beyond the bounds"
                )
        except zmq.Again:
            return None
        return frames

    def _notice(self) -> None:
        """Learn from the monitor whether the coordinator has gone."""
        if (
            self._monitor is not None
            and not self._gone
            and any(
                event != zmq.EVENT_HANDSHAKE_SUCCEEDED for event, _value in self._monitor.take()
            )
        ):
            self._gone = f"the coordinator at {self._address} disconnected"

    def check(self) -> None:
        self._notice()
        self._check_open()

    def _check_open(self) -> None:
        if self._gone:
            raise LinkClosed(self._gone)

    def _monitor_socket(self) -> Socket:
        assert self._monitor is not None
        return self._monitor.socket

    def close(self) -> None:
        if self._context.closed:
            return
        self._gone = self._gone or f"the link to {self._address} was closed here"
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        self._socket.close(0)
        self._context.term()


class _Monitor:
    """The events that libzmq reports of a socket's connections."""

    def __init__(self, context: Context, watched: Socket, events: int) -> None:
        endpoint = f"inproc://monitor-{id(self)}"
        self._watched = watched
        watched.monitor(endpoint, events)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(
            zmq.RCVHWM, 0
        )  # a full queue would stop the I/O thread, and with it all links
        self.socket.connect(endpoint)
        self.take()  # the descriptor fires only after a read that found nothing

    def fileno(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    def take(self) -> list[tuple[int, int]]:
        """The (event, value) pairs since the last call."""
        taken: list[tuple[int, int]] = []
        with suppress(zmq.Again):
            while True:
                header, _endpoint = self.socket.recv_multipart(zmq.NOBLOCK)
                taken.append(struct.unpack("=Hi", header))
        return taken

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(0)


def _configure(socket: Socket) -> None:
    """The options that both ends share."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _CURVE_OVERHEAD_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def _bounded(frames: Sequence[bytes]) -> bool:
    """Return whether what arrived keeps the bounds; libzmq bounds single frames only."""
    return 1 <= len(frames) <= MAX_FRAMES and sum(map(len, frames)) <= MAX_MESSAGE_BYTES


def check_outgoing(frames: Sequence[bytes]) -> None:
    """Our own mistake is loud: the other end would drop such a message, or the connection."""
    if not _bounded(frames) or max(map(len, frames)) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a message has 1 to {MAX_FRAMES} frames of at most {MAX_FRAME_BYTES} bytes and "
            f"{MAX_MESSAGE_BYTES} in all, not {list(map(len, frames))}"
        )
