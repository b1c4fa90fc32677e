"""Addresses: where a hub listens, and checks of an address or a socket's folder. Knows nothing of
frames."""

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import zmq

from dovetail.protocol.errors import KeysError, UserError

HOST = re.compile(r"[^\s,/]+")  # a name or a number, without separators
WORKERS_SUFFIX = ".w"
"""Suffix of an ipc path for the socket of workers, whose connections have heartbeats."""
MAX_IPC_PATH_BYTES = 107 - len(WORKERS_SUFFIX)
"""sun_path of a Unix socket has 108 bytes and ends with a zero."""
SHORT = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders for sockets if the name of the temporary directory is too long."""
ABANDONED_S = 60.0  # age after which an unlocked folder of sockets counts as abandoned

SILENT_S = 1.2  # a connection without heartbeats for this long is cut
_HEARTBEAT_MS = {
    zmq.HEARTBEAT_IVL: 500,
    **dict.fromkeys((zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL), round(1000 * SILENT_S)),
}

Socket = zmq.Socket[bytes]


class TcpPlace:
    """A tcp address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def bind(self, socket: Socket) -> str:
        """Listen there; return the address with its real port."""
        host, port = host_and_port(self._address)
        watch(socket)
        socket.setsockopt(zmq.IPV6, int(host.startswith("[")))
        try:
            socket.bind(f"tcp://{host}:{'*' if port == '0' else port}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise UserError(
                    f"{self._address} is in use: stop the process that listens there, or "
                    "choose another port (* for any free one)"
                ) from None
            raise UserError(
                f"cannot listen at {self._address} ({error.strerror}): give the IP address of "
                "an interface of this machine"
            ) from None
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Do nothing: a tcp address leaves nothing behind."""


class IpcPlace:
    """A path for the Unix sockets of clients and workers, in a folder that only its owner can
    enter, locked against a second launcher.

    Without the lock a second bind would silently take the path away from a running coordinator."""

    def __init__(self, path: Path, *, own: bool) -> None:
        """`own`: the folder is private to us, so its content may be removed."""
        self._path = path
        self._own = own
        self._workers_path = path.with_name(path.name + WORKERS_SUFFIX)
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock: int | None = None
        self._made: list[Path] = []

    def bind(self, socket: Socket) -> str:
        """Listen there; return the address."""
        check_length(self._path)
        try:
            self._lock = self._take_lock()
            socket.bind(f"ipc://{self._path}")
            watch(socket)
            socket.bind(f"ipc://{self._workers_path}")
        except (zmq.ZMQError, OSError) as error:
            raise UserError(
                f"cannot listen at ipc://{self._path} ({error.strerror}): choose another path"
            ) from None
        return f"ipc://{self._path}"

    def _take_lock(self) -> int:
        """Return the locked descriptor; `UserError` if another process holds the lock."""
        while True:
            self._make_folder()
            try:
                lock = os.open(
                    self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except FileNotFoundError:
                if self._path.parent.is_dir():
                    raise
                continue  # the former owner of the path removed the folder, which it had made
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise UserError(
                    f"another coordinator listens at ipc://{self._path}: use it, stop it, or "
                    "choose another path"
                ) from None
            with suppress(FileNotFoundError):
                if os.fstat(lock).st_ino == self._lock_path.stat().st_ino:
                    return lock
            os.close(lock)  # its former owner removed the file between our open and our lock

    def _make_folder(self) -> None:
        """Record the folder, then make it, so that an interruption leaves nothing behind."""
        folder = self._path.parent
        self._made += [
            place
            for place in (folder, *folder.parents)
            if place not in self._made and not place.exists()
        ]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)

    def close(self) -> None:
        """Remove the sockets, the lock, and the folders made for them if they are empty."""
        if self._lock is not None:
            self._path.unlink(missing_ok=True)
            self._workers_path.unlink(missing_ok=True)
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
        if self._own:
            shutil.rmtree(self._path.parent, ignore_errors=True)
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()


def fresh_path() -> Path:
    """Return a path in a folder that does not exist yet, under the temporary directory or, if its
    name is too long for a socket, under the first writable folder of `SHORT`. Folders left there by
    killed coordinators of this user are removed."""
    name = f"dovetail-{secrets.token_hex(8)}/coordinator"
    places = [Path(tempfile.gettempdir()).absolute(), *map(Path, SHORT)]
    usable = (p for p in places if _fits(p / name) and os.access(p, os.W_OK | os.X_OK))
    place = next(usable, places[0])
    for folder in place.glob(f"dovetail-{'[0-9a-f]' * 16}"):
        with suppress(OSError):
            _remove_abandoned(folder)
    return place / name


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_IPC_PATH_BYTES


def _remove_abandoned(folder: Path) -> None:
    """Remove an old folder of sockets; `OSError` if it is locked."""
    status = folder.lstat()
    if status.st_uid != os.geteuid() or time.time() - status.st_mtime < ABANDONED_S:
        return
    lock = os.open(folder / "coordinator.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    numbered = port.isascii() and port.isdigit() and int(port) < 65536
    if not HOST.fullmatch(host) or not (port == "*" or numbered):
        raise UserError(
            f"{address!r} is not a tcp address: write tcp://HOST:PORT (to listen, port * is any "
            "free one)"
        )
    return host, port


def check_length(path: Path) -> None:
    if not _fits(path):
        raise UserError(
            f"the path {path} has {len(os.fsencode(path))} bytes, and a socket's has at most "
            f"{MAX_IPC_PATH_BYTES}: choose a shorter one"
        )


def check_private(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise UserError(
            f"the folder {folder} of the socket belongs to another user: choose a path in a "
            "folder of your own"
        )
    if status.st_mode & 0o077:
        raise UserError(
            f"the folder {folder} of the socket is open to others: choose a path in a folder "
            "that only you can enter, such as a new one in it"
        )


def check_way(path: Path) -> None:
    """Check the folder of a coordinator's socket; report a missing socket before that."""
    try:
        check_private(path.parent)
    except UserError as error:
        if path.exists():
            raise
        raise UserError(
            f"no process listens at ipc://{path}, and no coordinator could: {error}"
        ) from None


def keys_for(address: str, keys: Path | None) -> Path:
    if keys is None:
        raise KeysError(
            f"{address} requires keys, like every tcp address: create them once with `dovetail "
            "keygen --out FOLDER` and pass that folder, or a copy of it, with --keys FOLDER"
        )
    return keys


def no_address(address: str) -> UserError:
    return UserError(f"{address!r} is not an address: write ipc, ipc://PATH or tcp://HOST:PORT")


def watch(socket: Socket) -> None:
    """Enable detection of silently lost connections, for later binds and connects of the socket."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    for option, milliseconds in _HEARTBEAT_MS.items():
        socket.setsockopt(option, milliseconds)
