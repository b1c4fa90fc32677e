"""CURVE keys of a deployment: who may connect to the coordinator over tcp, and in which roles.

A folder of keys, mode 0700, holds for each name one file `NAME.key` (JSON: name, roles, public,
secret; mode 0600) and one file `NAME.pub` (the same without the secret). `coordinator` is the
coordinator's own key; every other one is a peer's, and `roles` in its `.pub` file on the
coordinator's machine lists its allowed roles, whatever the peer claims: draft, target, client or
operator (a client that may swap and dismiss workers). With several machines, each needs:

    the coordinator's machine   coordinator.key and the NAME.pub of every peer
    a worker's or a client's    its own NAME.key and coordinator.pub, nothing else

To revoke a peer, remove its `.pub` file from the coordinator's machine; no restart is needed: its
further messages are dropped, and its next handshake is refused. Handles files only;
`links/handshakes.py` checks handshakes.
"""

import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import zmq
from zmq.utils import z85

from dovetail.protocol.errors import KeysError
from dovetail.protocol.files import unread
from dovetail.protocol.messages import Role

COORDINATOR = "coordinator"
OPERATOR = "operator"  # the mark of a key whose holder is a client that may change workers
ROLES: tuple[str, ...] = (*get_args(Role), OPERATOR)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class PeerKey:
    """An authenticated peer: name, allowed roles, and public key (Z85, 40 characters)."""

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
    """Create the keys of a new deployment in `folder`: the coordinator's, and one peer per role,
    named after it; `KeysError` if it holds keys already."""
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
    """Add the peer `name` with these `roles` to the deployment in `folder`; `KeysError` if the name
    is taken or invalid, or a role is unknown."""
    check_folder(folder)
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
    """Replace the key pair `name` by a new one with the same roles; the old one is refused from now
    on (the coordinator's old key, once it has restarted). Copy the new files to where the old ones
    were: `NAME.key` to the machine of the peer; after rotating the coordinator, `coordinator.pub`
    to every peer, and the coordinator must be restarted."""
    roles = read_public(_existing(folder, name)).roles
    _write_pair(folder, name, roles)


def revoke(folder: Path, name: str) -> None:
    """Remove the peer `name`: its messages are dropped and its next handshake is refused."""
    if name == COORDINATOR:
        raise KeysError(
            "the coordinator's own key cannot be revoked: replace it with `dovetail keygen "
            "--rotate coordinator`"
        )
    _existing(folder, name).unlink()
    (folder / f"{name}.key").unlink(missing_ok=True)


# -- reading them ----------------------------------------------------------------------------------


def load_own_key(folder: Path, name: str) -> OwnKey:
    """Read the key pair `name`; `KeysError` if it is missing, damaged or readable by others."""
    path = folder / f"{name}.key"
    check_folder(folder)
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
            f"{path}: the public key does not belong to the secret one; make a new pair with "
            f"`dovetail keygen --rotate {name}`"
        )
    return key


def own_key_for(folder: Path, role: str) -> OwnKey:
    """Return this machine's key pair for `role`: the one of that name, else the only one with that
    role; `KeysError` if there is none."""
    check_folder(folder)
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
    raise KeysError(f"{folder} must hold the key of a {role}, and holds {found}")


def _remedy(folder: Path, role: str) -> str:
    """Return how to get a key for a role; old deployments have no operator key."""
    if (folder / f"{COORDINATOR}.key").exists():
        return f"make it with `dovetail keygen --out {folder} --name {role} --role {role}`"
    made = "copy it from where `dovetail keygen` made it"
    return (
        f"{made}, or make it there with --name {role} --role {role}" if role == OPERATOR else made
    )


def _allows(held: Sequence[str], roles: Iterable[str]) -> bool:
    """Return whether a key with the roles `held` may take these; an operator is also a client."""
    return {*roles} <= {*held, *(("client",) if OPERATOR in held else ())}


def coordinator_public(folder: Path) -> str:
    """Return the coordinator's public key, with which a peer authenticates it."""
    check_folder(folder)
    return read_public(folder / f"{COORDINATOR}.pub").public


# -- files -----------------------------------------------------------------------------------------


def _write_pair(folder: Path, name: str, roles: tuple[str, ...]) -> None:
    public, secret = (half.decode() for half in zmq.curve_keypair())
    shown: dict[str, Any] = {"name": name, "roles": list(roles), "public": public}
    with _reported(folder):
        _replace(folder / f"{name}.key", json.dumps({**shown, "secret": secret}, indent=1))
        _replace(folder / f"{name}.pub", json.dumps(shown, indent=1))


def _replace(path: Path, text: str) -> None:
    """Write a file of mode 0600 atomically."""
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


def check_folder(folder: Path) -> None:
    if folder.is_file():
        raise KeysError(f"{folder} is a file: name the folder that the keys are in")
    if not folder.is_dir():
        raise KeysError(f"there is no folder of keys {folder}: make one with `dovetail keygen`")
    if folder.stat().st_mode & 0o022:
        raise KeysError(f"others can write to the folder of keys {folder}: chmod 700 {folder}")


def _existing(folder: Path, name: str) -> Path:
    check_folder(folder)
    path = folder / f"{name}.pub"
    if not _NAME.fullmatch(name) or not path.exists():
        names = ", ".join(sorted(p.stem for p in folder.glob("*.pub"))) or "none"
        raise KeysError(f"{folder} has no key named {name!r}; it has {names}")
    return path


def read_public(path: Path) -> PeerKey:
    content = _read(path, forbidden=0o022)
    return PeerKey(path.stem, _roles(path, content), _key_text(path, content, "public"))


def _read(path: Path, *, forbidden: int) -> dict[str, Any]:
    """Return the content of a key file; `KeysError` if it is invalid or has `forbidden` bits."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1 << 16)
    except OSError as error:
        raise KeysError(
            f"cannot read the key file {path}: "
            + unread(error, "make keys with `dovetail keygen`, or copy it from its machine")
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
