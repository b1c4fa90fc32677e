"""Links: frames from one process to another. A `Hub` is the coordinator's end of all links, a
`Link` the other end of one.

Two kinds behave alike: ipc (a socket in a folder that only its owner can enter) and tcp (CURVE keys
required, on loopback too). Messages arrive whole, in the order of each sender, at most once. A
message to a disconnected peer raises `PeerGone`, and one to a peer with a full queue `PeerBusy`, so
that nothing is lost silently and no sender blocks. A link that loses its coordinator raises
`LinkClosed` and never reconnects. Handles frames, not their content (`codec.py`).

Liveness relies on libzmq. A closed connection is noticed at once, and the kernel closes those of a
process that dies. Heartbeats detect a peer that is stopped (SIGSTOP) or unreachable within 1.2 to
1.7 s, on both ends; libzmq's I/O thread answers them, so a process that computes for minutes, with
or without the interpreter's lock, never counts as stopped. Over ipc there are no heartbeats between
the coordinator and its clients: a terminal's Ctrl-Z stops a client, and its user expects it to
continue later. Deadlines for stuck peers are the caller's task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from dovetail.protocol.keys import PeerKey
from dovetail.protocol.links.addresses import (
    IpcPlace,
    TcpPlace,
    check_length,
    check_way,
    fresh_path,
    host_and_port,
    keys_for,
    no_address,
)
from dovetail.protocol.links.sockets import CONNECT_TIMEOUT_S, ZmqHub, ZmqLink


class Hub(Protocol):
    """The coordinator's end of all links; used by one thread."""

    @property
    def address(self) -> str:
        """The address that links connect to, with the real port or path."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when something may have arrived.

        It is edge-triggered: once at the start, after it fires, and after every `send` and
        `disconnects`, call `receive` until it returns None.
        """

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """Return the next message as (peer, frames), or None; never blocks. Messages that exceed
        the bounds on frames or come from a revoked key are dropped and counted."""

    def send(self, peer: bytes, frames: Sequence[bytes]) -> None:
        """Queue a message; never blocks. Raises `PeerGone`, or `PeerBusy` if the queue is full."""

    def turn_away(self, peer: bytes, frames: Sequence[bytes]) -> None:
        """Queue a last message for a peer whose key may be revoked, if possible; never blocks."""

    def user(self, peer: bytes) -> PeerKey | None:
        """Return the key of a peer over tcp, without a name if revoked; None without keys."""

    def monitor_fileno(self) -> int:
        """Return a descriptor that is readable when `disconnects` should be called."""

    def disconnects(self) -> int:
        """Return how many peers disconnected since the last call. To find out which, probe all of
        them with `send`. Takes milliseconds if there are any."""

    def refused(self) -> int:
        """Return how many handshakes and messages have been refused so far."""

    def close(self) -> None:
        """Close everything and remove its files. Idempotent."""


class Link(Protocol):
    """A worker's or a client's end of one link; used by one thread."""

    address: str  # the address that it was connected to

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue a message, waiting while the queue is full; may raise `LinkClosed`."""

    def offer(self, frames: Sequence[bytes]) -> None:
        """Queue a message for the coordinator; never blocks. `PeerBusy` if the queue is full,
        `LinkClosed` if the coordinator is gone."""

    def receive(self, timeout_s: float | None) -> list[bytes] | None:
        """Return the next message, or None if none comes within the timeout (None: no timeout).

        `LinkClosed` when the coordinator is gone and everything that it sent has been received."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when something may have arrived.

        It is edge-triggered: once at the start, after it fires, and after every `offer`, call
        `take` until it returns None.
        """

    def take(self) -> list[bytes] | None:
        """Return the next message, or None; never waits or checks the coordinator."""

    def monitor_fileno(self) -> int:
        """Return a descriptor that becomes readable when the coordinator may be gone; then call
        `receive(0)` until it returns None or raises."""

    def check(self) -> None:
        """Raise `LinkClosed` if the coordinator is gone; reads no message, never waits."""

    def close(self) -> None:
        """Close everything that was opened. Idempotent."""


def open_hub(address: str, *, keys: Path | None = None, own_folder: bool = False) -> Hub:
    """Listen at "ipc" (a fresh private folder), ipc://PATH or tcp://HOST:PORT (port * or 0: any
    free one). `own_folder`: PATH's folder holds nothing else.

    The I/O thread inherits the core binding of the calling thread. `KeysError` for tcp without
    keys; `UserError` if the address cannot be used."""
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
    """Connect to the coordinator at ipc://PATH or tcp://HOST:PORT and wait until it accepts.

    `LinkClosed`, naming the address, if none answers within `timeout_s`; `LinkRefused` if it
    refuses the key; `KeysError` if tcp lacks the key of `role`."""
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
