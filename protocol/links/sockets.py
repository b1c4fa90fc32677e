"""Hub and link over ZeroMQ: a ROUTER and a DEALER socket with the guarantees of this folder.
`handshakes.py` decides who may connect."""

import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path

import zmq

from dovetail.protocol import keys as keyring
from dovetail.protocol.codec import MAX_BODY_BYTES, MAX_FRAME_BYTES, MAX_FRAMES
from dovetail.protocol.errors import LinkClosed, LinkRefused, PeerBusy, PeerGone, UserError
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.links.addresses import (
    WORKERS_SUFFIX,
    IpcPlace,
    Socket,
    TcpPlace,
    host_and_port,
    watch,
)
from dovetail.protocol.links.handshakes import DOMAIN, AllowedPeers, start_judge

Context = zmq.Context[Socket]

GONE = zmq.EVENT_DISCONNECTED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Without EVENT_HANDSHAKE_FAILED_PROTOCOL: libzmq (4.3.5) also reports it for a frame that was
altered in transit, but then does not close the connection and aborts the process at the next
heartbeat."""


class Monitor:
    """The connection events of one socket."""

    def __init__(self, context: Context, watched: Socket, events: int) -> None:
        endpoint = f"inproc://monitor-{id(self)}"
        self._watched = watched
        watched.monitor(endpoint, events)
        self.socket = context.socket(zmq.PAIR)
        # a full queue would stop the I/O thread, and with it all links
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(endpoint)
        self.take()  # the descriptor fires only after a read that found nothing

    def fileno(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    def take(self) -> list[tuple[int, int]]:
        """Return the (event, value) pairs since the last call."""
        taken: list[tuple[int, int]] = []
        with suppress(zmq.Again):
            while True:
                header, _endpoint = self.socket.recv_multipart(zmq.NOBLOCK)
                taken.append(struct.unpack("=Hi", header))
        return taken

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(0)


MAX_MESSAGE_BYTES = MAX_BODY_BYTES + MAX_FRAME_BYTES
QUEUE_MESSAGES = 1000  # messages that wait for one peer before it counts as busy
CONNECT_TIMEOUT_S = 10.0

_HANDSHAKE_MS = 5000
_FAREWELL_MS = 200  # the longest time that a closing hub waits for its last messages to leave
_CURVE_OVERHEAD_BYTES = 1024
_SETTLE_S = 0.002
_CLIENTS = ("client", keyring.OPERATOR)
_MAX_KNOWN_PEERS = 4096

_READABLE = int(zmq.POLLIN)
"""The flag as an int: testing an enumeration member costs more than the socket call."""


class ZmqHub:
    """A bound ROUTER socket with its monitor and, for tcp, the thread that checks keys."""

    def __init__(self, place: "IpcPlace | TcpPlace", keys: Path | None) -> None:
        self._place = place
        self._peers: AllowedPeers | None = None
        self._judge: threading.Thread | None = None
        self._known: dict[bytes, str] = {}
        self._gone = 0
        self._refused = 0
        self._context: Context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor: Monitor | None = None
        try:
            _configure(self._socket)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if keys is not None:
                self._demand_keys(keys)
            self._monitor = Monitor(self._context, self._socket, GONE | REFUSED)
            self._address = place.bind(self._socket)
            # the descriptor fires only after a read that found nothing
            self._socket.getsockopt(zmq.EVENTS)
        except BaseException:
            self.close()
            raise

    def _demand_keys(self, folder: Path) -> None:
        own = keyring.load_own_key(folder, keyring.COORDINATOR)
        self._peers = AllowedPeers(folder)
        self._judge = start_judge(self._context, self._peers)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
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
        """Return the next message, without frames if its key is revoked; raise `zmq.Again` if there
        is none."""
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
                f"peer {peer.hex()} reads nothing from its queue of {QUEUE_MESSAGES} messages"
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
        """Let libzmq tear down the pipes of disconnected peers.

        It reports a disconnect first and tears the pipe down afterwards, in three steps that
        alternate between its I/O thread and this one; a message sent in between would vanish
        instead of raising `PeerGone`. Reading EVENTS makes this thread take its steps."""
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
            self._gone += event == GONE
            self._refused += bool(event & REFUSED)

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
        self.address = address
        works = role not in _CLIENTS
        self._entrance = WORKERS_SUFFIX if keys is None and works else ""
        self._gone = ""
        self._key_name = ""
        self._context: Context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._monitor: Monitor | None = None
        try:
            _configure(self._socket)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            if keys is not None:
                self._show_key(keys, role)
            if keys is not None or works:
                watch(self._socket)
            self._monitor = Monitor(
                self._context, self._socket, GONE | REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED
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
        """Wait for the handshake, retrying until the timeout."""
        assert self._monitor is not None
        try:
            self._socket.connect(self.address + self._entrance)
        except zmq.ZMQError as error:
            raise UserError(
                f"{self.address!r} is not an address to connect to ({error.strerror}): write "
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
                        f"the coordinator at {self.address} refuses the key {self._key_name!r}: "
                        "allow its public key there, or copy the current key here"
                    )
                lost = True
        if lost:
            advice = (
                "it may need keys, have a key other than coordinator.pub, or not be a coordinator"
            )
            raise LinkRefused(f"the peer at {self.address} breaks off the connection: {advice}")
        self._check_host()
        raise LinkClosed(
            f"no coordinator answers at {self.address} within {timeout_s:g} s: start it, or "
            "correct the address"
        )

    def _check_host(self) -> None:
        """Raise `LinkClosed` if the host name cannot be resolved."""
        if not self.address.startswith("tcp://"):
            return
        host, _ = host_and_port(self.address)
        try:
            socket.getaddrinfo(host.strip("[]"), None)
        except OSError as error:
            raise LinkClosed(
                f"{host!r} in {self.address} is not a host known here ({error.strerror}): "
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
                f"the coordinator at {self.address} reads nothing from its queue of "
                f"{QUEUE_MESSAGES} messages"
            ) from None

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def take(self) -> list[bytes] | None:
        return self._take() if int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE else None

    def monitor_fileno(self) -> int:
        return int(self._monitor_socket().getsockopt(zmq.FD))

    def receive(self, timeout_s: float | None) -> list[bytes] | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (frames := self._take()) is None:  # what arrived before a disconnect comes first
            self._check_open()
            self._notice()
            left_ms = None if deadline is None else ceil((deadline - time.monotonic()) * 1000)
            if not self._gone:
                if left_ms is not None and left_ms <= 0:
                    return None
                self._poller.poll(left_ms)
        return frames

    def _take(self) -> list[bytes] | None:
        """Return the next message within the bounds, or None."""
        if self._socket.closed:
            return None
        try:
            while not _bounded(frames := self._socket.recv_multipart(zmq.NOBLOCK)):
                self._gone = (
                    f"the coordinator at {self.address} sent a message of "
                    f"{len(frames)} frames and {sum(map(len, frames))} bytes, beyond the bounds"
                )
        except zmq.Again:
            return None
        return frames

    def _notice(self) -> None:
        """Read from the monitor whether the coordinator is gone."""
        if (
            self._monitor is not None
            and not self._gone
            and any(
                event != zmq.EVENT_HANDSHAKE_SUCCEEDED for event, _value in self._monitor.take()
            )
        ):
            self._gone = f"the coordinator at {self.address} disconnected"

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
        self._gone = self._gone or f"the link to {self.address} was closed here"
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        self._socket.close(0)
        self._context.term()


def _configure(socket: Socket) -> None:
    """Set the options that both ends share."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _CURVE_OVERHEAD_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def _bounded(frames: Sequence[bytes]) -> bool:
    """Return whether a received message keeps the bounds; libzmq bounds single frames only."""
    return 1 <= len(frames) <= MAX_FRAMES and sum(map(len, frames)) <= MAX_MESSAGE_BYTES


def check_outgoing(frames: Sequence[bytes]) -> None:
    """Raise `ValueError` for a message that exceeds the bounds: the other end would drop it, or the
    connection."""
    if not _bounded(frames) or max(map(len, frames)) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a message has 1 to {MAX_FRAMES} frames of at most {MAX_FRAME_BYTES} bytes and "
            f"{MAX_MESSAGE_BYTES} in all, not {list(map(len, frames))}"
        )
