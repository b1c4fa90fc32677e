"""The API keys of the HTTP API, read from a file that only its owner can read."""

import logging
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

from dovetail.protocol.errors import SettingsError, UserError
from dovetail.protocol.files import read_text, unread
from dovetail.protocol.settings import HttpSettings
from dovetail.runtime.http.serving.guard import is_loopback

SHORTEST_KEY = 16
LOOK_EVERY_S = 1.0

_log = logging.getLogger(__name__)


class KeyFile(Sequence[str]):
    """The API keys, reread when their file changes. Errors in the new file are logged, and the
    previous keys remain valid."""

    def __init__(
        self, settings: HttpSettings, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`UserError` as in `read_keys`."""
        self._settings, self._now_s = settings, now_s
        self._looked_s, self._stamp = now_s(), self._look()
        self._keys = read_keys(settings)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        return self._present()[place]

    def __len__(self) -> int:
        return len(self._present())

    def __iter__(self) -> Iterator[str]:
        return iter(self._present())

    def _present(self) -> tuple[str, ...]:
        """Return the keys; the file is checked at most once a second."""
        if self._settings.api_key_file and self._now_s() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = self._now_s()
            if (stamp := self._look()) != self._stamp:
                self._stamp = stamp
                try:
                    self._keys = read_keys(self._settings)
                except UserError as error:
                    _log.warning("%s; until then the previous keys are valid", error)
        return self._keys

    def _look(self) -> tuple[int, ...]:
        try:
            status = Path(self._settings.api_key_file).expanduser().stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def read_keys(settings: HttpSettings) -> tuple[str, ...]:
    """The API keys; `UserError` if they are required but missing, if other users can read them, or
    if the file is not a file of keys."""
    if not settings.api_key_file:
        if not is_here_only(settings.host):
            text = f"http.host = {settings.host!r} is open to other machines, which needs a key"
            raise SettingsError(f"{text}: write one into a file: --http.api_key_file FILE")
        return ()
    path = Path(settings.api_key_file).expanduser()
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # reading a pipe would block
            raise SettingsError(f"http.api_key_file {path} is not a regular file")
        text = read_text(path, f"http.api_key_file {path}")
    except OSError as error:
        maker = f"`(umask 077; openssl rand -hex 32 > {shlex.quote(str(path))})` makes it"
        why = unread(error, maker)
        raise SettingsError(f"http.api_key_file {path} cannot be read: {why}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        remedy = f"chmod 600 {shlex.quote(str(path))}"
        raise SettingsError(f"http.api_key_file {path} can be read by others: {remedy}")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    keys = {number: line for number, line in lines if line}
    wrong = {number: what for number, key in keys.items() if (what := _fault(key))}
    if wrong or not keys:
        place, what = next(iter(wrong.items()), (1, "holds no key"))
        raise SettingsError(
            f"http.api_key_file {path}, line {place}, {what}: write one key of at least "
            f"{SHORTEST_KEY} ASCII characters per line, such as `openssl rand -hex 32` prints"
        )
    return tuple(keys.values())


def _fault(line: str) -> str:
    """Return what is wrong with a line, without quoting it; empty for a key."""
    if line.startswith("#") or len(line.split()) > 1:
        return "has more than one key"
    if len(line) < SHORTEST_KEY:
        return f"has {len(line)} characters"
    return "" if line.isascii() else "has characters that are not ASCII"


def is_here_only(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        found = socket.getaddrinfo(host or None, 0, type=kind, flags=flags)
        return all(is_loopback(str(address[4][0])) for address in found)
    except (OSError, UnicodeError):
        return True  # not an address: `listen` reports it
