"""Handshakes of peers over tcp: which keys are accepted (ZAP, ZeroMQ RFC 27)."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from zmq.utils import z85

from dovetail.protocol.errors import KeysError
from dovetail.protocol.keys import COORDINATOR, PeerKey, check_folder, read_public

DOMAIN = b"dovetail"
"""The ZAP domain; if socket and handler disagree, libzmq accepts all peers or none."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_SAY_EVERY_S = 10.0
"""The shortest time between log lines about refused handshakes; a worker retries every second,
strangers perhaps more often."""

_log = logging.getLogger(__name__)


class AllowedPeers:
    """The peers whose keys the coordinator accepts, as the `.pub` files of a folder currently
    define them.

    Added, changed and removed files take effect at once: a cached key is accepted only while its
    file is the same (device, inode and time of change)."""

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        self._folder = folder
        self._former: dict[str, str] = {}
        """Public keys that have been allowed since the start, and their names."""
        self._known: dict[str, tuple[PeerKey, Path, tuple[int, ...] | None]] = {}
        for path in self._files():
            self._add(path, self._known)

    def find(self, public: str) -> PeerKey | None:
        """Return the peer with this public key (Z85); None if it is unknown or revoked."""
        entry = self._known.get(public)
        if entry is None or _identity(entry[1]) != entry[2]:
            self._reload()
            entry = self._known.get(public)
        return entry[0] if entry else None

    def _reload(self) -> None:
        known: dict[str, tuple[PeerKey, Path, tuple[int, ...] | None]] = {}
        for path in self._files():
            try:
                self._add(path, known)
            except KeysError as error:
                _log.warning("peer refused: %s", error)
        self._former.update(
            {public: peer.name for public, (peer, *_) in self._known.items() if public not in known}
        )
        self._known = known

    def told(self, public: str) -> str:
        """Describe a key that is not allowed."""
        former = self._former.get(public)
        return (
            f"the key {former!r}, which is no longer allowed"
            if former is not None
            else f"a key {public!r} that is in no .pub file of {self._folder}"
        )

    def _add(
        self, path: Path, known: dict[str, tuple[PeerKey, Path, tuple[int, ...] | None]]
    ) -> None:
        identity = _identity(path)
        peer = read_public(path)
        known[peer.public] = (peer, path, identity)

    def _files(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("*.pub") if path.stem != COORDINATOR)


# -- answering handshakes --------------------------------------------------------------------------


def start_judge(context: "zmq.Context[zmq.Socket[bytes]]", peers: AllowedPeers) -> threading.Thread:
    """Start a thread that answers libzmq's request for every CURVE handshake of `context`; it ends
    when the context is terminated. For an allowed key the User-Id is the key itself, which libzmq
    attaches to every message of that connection; any other key is refused and logged with its
    address."""
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(_ZAP_ENDPOINT)
    thread = threading.Thread(
        target=_judge, args=(socket, peers), name="dovetail-keys", daemon=True
    )
    thread.start()
    return thread


def _judge(socket: "zmq.Socket[bytes]", peers: AllowedPeers) -> None:
    refusals = _Refusals()
    try:
        while True:
            socket.send_multipart(
                _verdict(
                    socket.recv_multipart(),
                    peers.find,
                    lambda public, address: refusals.tell(peers.told(public), address),
                )
            )
    except zmq.ContextTerminated:
        socket.close()


class _Refusals:
    """Logs refused handshakes, at a limited rate."""

    def __init__(self) -> None:
        self._said_s = -_SAY_EVERY_S
        self._unsaid = 0

    def tell(self, key: str, address: str) -> None:
        """Log a refused handshake: a description of the key, and the address."""
        now_s = time.monotonic()
        if now_s - self._said_s < _SAY_EVERY_S:
            self._unsaid += 1
            return
        beside = f"; {self._unsaid} more were refused before" if self._unsaid else ""
        _log.warning("connection refused: %s shows %s%s", address, key, beside)
        self._said_s, self._unsaid = now_s, 0


def _verdict(
    question: Sequence[bytes],
    find: Callable[[str], PeerKey | None],
    refused: Callable[[str, str], None],
) -> list[bytes]:
    """Return the answer of RFC 27 to (version, request, domain, address, identity, mechanism,
    32-byte public key); `refused` is called with keys that are not allowed."""
    version, request, domain, address, _identity, mechanism, *credentials = question
    known = None
    if (
        domain == DOMAIN
        and mechanism == b"CURVE"
        and len(credentials) == 1
        and len(credentials[0]) == 32
    ):
        public = z85.encode(credentials[0]).decode()
        known = find(public)
        if known is None:
            refused(public, address.decode(errors="replace"))
    if known is None:
        return [version, request, b"400", b"this key is not allowed", b"", b""]
    return [version, request, b"200", b"", known.public.encode(), b""]


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
