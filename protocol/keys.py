"""CURVE keys of a deployment: who may speak with the coordinator over tcp, and in which roles.

A folder of keys, mode 0700, holds for each name one file `NAME.key` (JSON: name, roles, public,
secret; mode 0600) and one file `NAME.pub` (the same without the secret). The one named
`coordinator` is the coordinator's own; every other one is a peer, and `roles` in its `.pub` file on
the coordinator's machine says what it may be - draft, target, client, operator, who is a client
that may put workers in place and let them go - whatever it says of itself. What belongs where when
there are several machines:

    the coordinator's machine   coordinator.key and the NAME.pub of every peer
    a worker's or a client's    its own NAME.key and coordinator.pub, nothing else

A peer is revoked by the removal of its `.pub` file from the coordinator's machine, without a
restart: what it sends from then on is dropped, and its next handshake is refused. Knows how a
handshake is judged (ZAP, ZeroMQ RFC 27), not what is said after it (`links.py`).
"""

import json
import logging
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import zmq
from zmq.utils import z85

from dovetail.protocol.errors import KeysError
from dovetail.protocol.messages import Role

COORDINATOR = "coordinator"
OPERATOR = "operator"
"""The mark of a key whose holder is a client that may change workers."""
ROLES: tuple[str, ...] = (*get_args(Role), OPERATOR)
DOMAIN = b"dovetail"
"""The ZAP domain: the hub's socket and its handler must name the same one, else libzmq lets
everybody in or nobody."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_SAY_EVERY_S = 10.0
"""So often at most refused handshakes are a line of the log; a worker tries again every second, and
strangers as often as they like."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerKey:
    """The authenticated key of a peer: its name, the roles that it may take, and its public key
    (Z85, 40 characters)."""

    name: str
    roles: tuple[str, ...]
    public: str

    def may_be(self, roles: Iterable[str]) -> bool:
        """Return whether a peer with this key may take these roles."""
        return _allows(self.roles, roles)


@dataclass(frozen=True)
class OwnKey:
    """A key pair of this process (Z85); the secret stays out of every repr."""

    name: str
    roles: tuple[str, ...]
    public: str
    secret: str = field(repr=False)


# -- making, changing and withdrawing keys ---------------------------------------------------------


def generate_keys(folder: Path) -> None:
    """Make the keys of a new deployment in `folder`: coordinator, and one peer for each role, named
    like it; `KeysError` if it holds keys already."""
    if folder.is_dir() and (
        present := sorted(path.name for path in (*folder.glob("*.key"), *folder.glob("*.pub")))
    ):
        raise KeysError(
            f"{folder} holds keys already ({present[0]}): choose a new folder, or replace a "
            "key with `dovetail keygen --rotate NAME`"
        )
    with _private_umask(), _reported(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    _write_pair(folder, COORDINATOR, ())
    for role in ROLES:
        _write_pair(folder, role, (role,))


def generate_peer(folder: Path, name: str, roles: Sequence[str]) -> None:
    """Add the peer `name`, who may take `roles`, to the deployment in `folder`; `KeysError` if the
    name is taken or no name, or a role is none."""
    _check_folder(folder)
    if not _NAME.fullmatch(name):
        raise KeysError(
            f"{name!r} cannot name a key: use lower-case letters, digits, '.', '_' and '-', at "
            "most 64"
        )
    if not roles or not set(roles) <= set(ROLES):
        raise KeysError(
            f"a key needs roles among {', '.join(ROLES)}, given with --role"
            + (f", not {', '.join(roles)}" if roles else "")
        )
    if (folder / f"{name}.pub").exists() or (folder / f"{name}.key").exists():
        raise KeysError(
            f"{folder} has a key named {name!r} already: replace it with `dovetail keygen "
            f"--rotate {name}` or choose another name"
        )
    _write_pair(folder, name, tuple(roles))


def rotate(folder: Path, name: str) -> None:
    """Replace the key pair `name` by a new one of the same roles; the old one is refused from now
    on, that of the coordinator once it is started again.

    The new files must go where the old ones were: `NAME.key` to the machine of the peer; after
    rotating the coordinator, `coordinator.pub` to every peer, and the coordinator must be
    restarted.
    """
    roles = _read_public(_existing(folder, name)).roles
    _write_pair(folder, name, roles)


def revoke(folder: Path, name: str) -> None:
    """Remove the peer `name`: a running coordinator drops what it sends and refuses its next
    handshake."""
    if name == COORDINATOR:
        raise KeysError(
            "the coordinator's own key cannot be revoked: replace it with `dovetail keygen "
            "--rotate coordinator`"
        )
    _existing(folder, name).unlink()
    (folder / f"{name}.key").unlink(missing_ok=True)


# -- reading them ----------------------------------------------------------------------------------


def load_own_key(folder: Path, name: str) -> OwnKey:
    """The key pair `name`; `KeysError` if it is missing, damaged, or readable by anybody but its
    owner."""
    path = folder / f"{name}.key"
    _check_folder(folder)
    content = _read(path, forbidden=0o077)
    key = OwnKey(
        str(content.get("name")),
        _roles(path, content),
        _key_text(path, content, "public"),
        _key_text(path, content, "secret"),
    )
    if key.name != name:
        raise KeysError(
            f"{path} holds the key {key.name!r}: name the file as the key, or copy the right one"
        )
    if zmq.curve_public(key.secret.encode()).decode() != key.public:
        raise KeysError(
            f"{path}: the public key is not that of the secret one; make a new pair with "
            f"`dovetail keygen --rotate {name}`"
        )
    return key


def own_key_for(folder: Path, role: str) -> OwnKey:
    """The key pair with which this machine takes `role`: the one named like it, else the only one
    that may; `KeysError` if there is none."""
    _check_folder(folder)
    if (folder / f"{role}.key").exists():
        return load_own_key(folder, role)
    names = [path.stem for path in sorted(folder.glob("*.key")) if path.stem != COORDINATOR]
    able = [key for name in names if _allows((key := load_own_key(folder, name)).roles, (role,))]
    if len(able) == 1:
        return able[0]
    found = (
        f"several keys for it: {', '.join(key.name for key in able)}; leave one"
        if able
        else f"no {role}.key; {_remedy(folder, role)}"
    )
    raise KeysError(f"{folder} is to give the key of a {role} and holds {found}")


def _remedy(folder: Path, role: str) -> str:
    """Return how a machine comes to the key of a role; deployments were made once without one of an
    operator."""
    if (folder / f"{COORDINATOR}.key").exists():
        return f"make it with `dovetail keygen --out {folder} --name {role} --role {role}`"
    made = "copy it from where `dovetail keygen` made it"
    return (
        f"{made}, or make it there with --name {role} --role {role}" if role == OPERATOR else made
    )


def _allows(held: Sequence[str], roles: Iterable[str]) -> bool:
    """Return whether a key of the roles `held` is good for these: an operator is a client, too."""
    return {*roles} <= {*held, *(("client",) if OPERATOR in held else ())}


def coordinator_public(folder: Path) -> str:
    """The coordinator's public key, by which a peer knows that it speaks with the right one."""
    _check_folder(folder)
    return _read_public(folder / f"{COORDINATOR}.pub").public


class AllowedPeers:
    """The peers whose keys the coordinator accepts, as the `.pub` files of a folder name them now.

    A file that appears, changes or goes while this is in use counts at once: a key that was read is
    believed only while its file is the very same (device, inode and time of change).
    """

    def __init__(self, folder: Path) -> None:
        _check_folder(folder)
        self._folder = folder
        self._former: dict[str, str] = {}
        """Public keys that were allowed since this began, and their names."""
        self._known: dict[str, tuple[PeerKey, Path, tuple[int, ...] | None]] = {}
        for path in self._files():
            self._add(path, self._known)

    def find(self, public: str) -> PeerKey | None:
        """The peer with this public key (Z85); None if there is none, or none any more."""
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
        """A key that is not allowed, in words."""
        former = self._former.get(public)
        return (
            f"the key {former!r}, which is not allowed any more"
            if former is not None
            else f"a key {public!r} that is in no .pub file of {self._folder}"
        )

    def _add(
        self, path: Path, known: dict[str, tuple[PeerKey, Path, tuple[int, ...] | None]]
    ) -> None:
        identity = _identity(path)
        peer = _read_public(path)
        known[peer.public] = (peer, path, identity)

    def _files(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("*.pub") if path.stem != COORDINATOR)


# -- judging handshakes ----------------------------------------------------------------------------


def start_judge(context: "zmq.Context[zmq.Socket[bytes]]", peers: AllowedPeers) -> threading.Thread:
    """A thread that answers libzmq's question about every CURVE handshake of `context`; it ends
    when the context is terminated.

    A key that is allowed is let in with itself as User-Id, which libzmq attaches to every message
    of that connection; any other is refused, and the log says whose and from where.
    """
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
    """Says which handshakes were refused, and not more often than somebody can read."""

    def __init__(self) -> None:
        self._said_s = -_SAY_EVERY_S
        self._unsaid = 0

    def tell(self, key: str, address: str) -> None:
        """Tell of a handshake with a key, in words, from an address."""
        now_s = time.monotonic()
        if now_s - self._said_s < _SAY_EVERY_S:
            self._unsaid += 1
            return
        beside = f"; {self._unsaid} more were refused before" if self._unsaid else ""
        _log.warning("refused at the door: %s shows %s%s", address, key, beside)
        self._said_s, self._unsaid = now_s, 0


def _verdict(
    question: Sequence[bytes],
    find: Callable[[str], PeerKey | None],
    refused: Callable[[str, str], None],
) -> list[bytes]:
    """The answer of RFC 27 to (version, request, domain, address, identity, mechanism, 32-byte
    public key); `refused` hears of keys that are not allowed."""
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


# -- files -----------------------------------------------------------------------------------------


def _write_pair(folder: Path, name: str, roles: tuple[str, ...]) -> None:
    public, secret = (half.decode() for half in zmq.curve_keypair())
    shown: dict[str, Any] = {"name": name, "roles": list(roles), "public": public}
    with _reported(folder):
        _replace(folder / f"{name}.key", json.dumps({**shown, "secret": secret}, indent=1))
        _replace(folder / f"{name}.pub", json.dumps(shown, indent=1))


def _replace(path: Path, text: str) -> None:
    """Write a file of mode 0600 so that at every moment it is the old or the new one as a whole."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with (
        _private_umask(),
        os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
    ):
        file.write(text + "\n")
    fresh.replace(path)


@contextmanager
def _private_umask() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _reported(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KeysError(
            f"cannot write keys to {folder} ({error.strerror}): choose another folder"
        ) from None


def _check_folder(folder: Path) -> None:
    if folder.is_file():
        raise KeysError(f"{folder} is a file: name the folder that the keys are in")
    if not folder.is_dir():
        raise KeysError(f"there is no folder of keys {folder}: make one with `dovetail keygen`")
    if folder.stat().st_mode & 0o022:
        raise KeysError(f"others can write to the folder of keys {folder}: chmod 700 {folder}")


def _existing(folder: Path, name: str) -> Path:
    _check_folder(folder)
    path = folder / f"{name}.pub"
    if not _NAME.fullmatch(name) or not path.exists():
        names = ", ".join(sorted(p.stem for p in folder.glob("*.pub"))) or "none"
        raise KeysError(f"{folder} has no key named {name!r}; it has {names}")
    return path


def _read_public(path: Path) -> PeerKey:
    content = _read(path, forbidden=0o022)
    return PeerKey(path.stem, _roles(path, content), _key_text(path, content, "public"))


def _read(path: Path, *, forbidden: int) -> dict[str, Any]:
    """The content of a key file; `KeysError` if its mode has one of the `forbidden` bits or it is
    not what it should be."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1 << 16)
    except OSError as error:
        raise KeysError(
            f"cannot read the key file {path} ({error.strerror}): make keys with `dovetail "
            "keygen`, or copy the file from where they were made"
        ) from None
    if mode & forbidden:
        raise KeysError(
            f"the key file {path} has mode {mode:04o}, so that others can read or change it: "
            f"chmod 600 {path}, and rotate the key if they may have"
        )
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise KeysError(
            f"{path} is not a key file: copy it again, or make keys with `dovetail keygen`"
        )
    return content


def _roles(path: Path, content: dict[str, Any]) -> tuple[str, ...]:
    roles = content.get("roles")
    if not isinstance(roles, list) or not all(role in ROLES for role in roles):
        raise KeysError(
            f"{path} names unknown roles: {str(roles)[:100]}; known are {', '.join(ROLES)}"
        )
    return tuple(roles)


def _key_text(path: Path, content: dict[str, Any], half: str) -> str:
    text = content.get(half)
    try:
        if isinstance(text, str) and len(text) == 40 and len(z85.decode(text)) == 32:
            return text
    except (ValueError, KeyError, struct.error):
        pass
    raise KeysError(
        f"{path} holds no {half} key: copy it again, or make keys with `dovetail keygen`"
    )


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
