"""This user's files: profile, history, and the runtime directory with announcements of coordinators
(removed when their process ends) and notes of workers (kept until their coordinator ends)."""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import cache_folder

N = TypeVar("N", "Announcement", "WorkerNote")


@dataclass(frozen=True)
class Announcement:
    """A running coordinator, and its process or supervisor. `started_ticks` distinguishes that from
    a later process with the same pid."""

    address: str
    pid: int
    started_ticks: int
    keys: str = ""  # folder of keys of a tcp address
    url: str = ""  # the URL of its HTTP API, if there is one

    @property
    def process(self) -> str:
        """The process of `pid`: `serve`, whose child is the coordinator, or the coordinator
        itself."""
        return f"{'`dovetail serve`, ' if self.url else ''}pid {self.pid}"

    @property
    def alive(self) -> bool:
        """Return whether its process runs; one that has ended and was not reaped yet (Z, X) does
        not."""
        try:
            state, started = _state_and_start(self.pid)
        except OSError:
            return False
        return state not in ("Z", "X") and started == self.started_ticks


@dataclass(frozen=True)
class WorkerNote:
    """A worker on this machine that is or was registered."""

    address: str
    pid: int
    roles: Sequence[str]
    flags: Sequence[str]  # its settings and binding as flags of `dovetail worker`
    fingerprint: str  # a target's fingerprint, else empty
    since_s: float  # when it was registered, in Unix time


def runtime_directory() -> Path:
    """$XDG_RUNTIME_DIR/dovetail, or dovetail-UID in the temporary directory; made with mode 0700,
    and refused if it belongs to another user."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(base) / "dovetail"
        if base and Path(base).is_dir()
        else Path(tempfile.gettempdir()) / f"dovetail-{os.getuid()}"
    )
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        remedy = "remove it, or set XDG_RUNTIME_DIR"
        raise UserError(f"the runtime directory {folder} must be yours, mode 0700: {remedy}")
    return folder


@contextmanager
def announced(address: str, *, keys: str = "", url: str = "") -> Iterator[None]:
    """Within the block, announce that this process is or supervises a coordinator at that
    address."""
    folder = runtime_directory()
    remove_unused_logs(folder)
    path = folder / f"coordinator-{os.getpid()}-{crc32(address.encode()):08x}.json"
    pid, folder_of_keys = os.getpid(), keys and str(Path(keys).absolute())
    _write(path, Announcement(address, pid, _state_and_start(pid)[1], folder_of_keys, url))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        for path, note in _worker_notes():
            if note.address.partition(",")[0] == address:
                path.unlink(missing_ok=True)


def note_worker(address: str, roles: Sequence[str], flags: Sequence[str], fingerprint: str) -> None:
    """Save how this worker was started; remove the notes of ended workers of its roles."""
    note = WorkerNote(address, os.getpid(), roles, flags, fingerprint, time.time())
    _write(_note_path(address), note)
    for path, other in _worker_notes():
        if (other.address, [*other.roles]) == (address, [*roles]) and not _runs(other):
            path.unlink(missing_ok=True)


def forget_worker(address: str) -> None:
    _note_path(address).unlink(missing_ok=True)


def _note_path(address: str) -> Path:
    """The note of this process; other workers may have its name."""
    return runtime_directory() / f"settings-{crc32(address.encode()):08x}-{os.getpid()}.json"


def _runs(note: WorkerNote) -> bool:
    return Path(f"/proc/{note.pid}").exists()


def worker_notes() -> list[WorkerNote]:
    """Return the notes of workers whose coordinators may still run, the latest last."""
    announcements()  # removes notes of coordinators that have gone
    return [note for _, note in _worker_notes()]


def _worker_notes() -> list[tuple[Path, WorkerNote]]:
    found = (
        (path, _read(WorkerNote, path)) for path in runtime_directory().glob("settings-*.json")
    )
    notes = [(path, note) for path, note in found if note is not None]
    return sorted(notes, key=lambda one: one[1].since_s)


def _write(path: Path, noted: Announcement | WorkerNote) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(asdict(noted)), encoding="utf-8")
    draft.replace(path)


def _read(kind: type[N], path: Path) -> N | None:
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def remove_unused_logs(folder: Path) -> None:
    """Remove the logs of swapped-in workers that have ended; running ones hold a lock on theirs."""
    for path in folder.glob("worker-*.log"):
        with suppress(OSError), path.open("rb") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def profile_path() -> Path:
    """Return where measurements are kept: dovetail/profile.json in $XDG_CACHE_HOME or ~/.cache. It
    begins with "~" for a user without a home."""
    return cache_folder() / "profile.json"


def substitutes_path() -> Path | None:
    """The folder of cached quantised weights, next to the profile file; it need not exist. None for
    a user without a home."""
    path = profile_path().with_name("substitutes")
    return path if path.is_absolute() else None


def history_path() -> Path | None:
    """Return where typed lines of chats are kept: dovetail/chat_history in $XDG_STATE_HOME or
    ~/.local/state; None for a user without a home."""
    return None if (folder := _state_folder()) is None else folder / "chat_history"


def _state_folder() -> Path | None:
    """Return dovetail in $XDG_STATE_HOME, else in ~/.local/state; it may be missing. None for a
    user without a home."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~/.local/state"))  # noqa: PTH111 - leaves the ~ if there is no home, and raises nothing
    return base / "dovetail" if base.is_absolute() else None


def journal_path(address: str) -> Path | None:
    """Return the folder of the journal for coordinators at this address; it may be missing. None
    for a user without a home."""
    name = hashlib.sha256(f"{socket.gethostname()} {address}".encode()).hexdigest()[:16]
    return None if (folder := _state_folder()) is None else folder / "journals" / name


def remove_old_journals(folder: Path, keep_s: float) -> None:
    """Remove unused journals in a folder that are too old to be claimed."""
    for journal in folder.glob("*/"):
        with suppress(OSError):
            newest_s = max((path.stat().st_mtime for path in journal.iterdir()), default=0.0)
            if time.time() - newest_s < keep_s:
                continue
            lock = os.open(journal / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(journal, ignore_errors=True)
            finally:
                os.close(lock)


def writable_profile_path() -> Path | None:
    """The profile file if it is writable, its folders created; None if not, as in many containers:
    everything is then measured at each start."""
    path = profile_path()
    if not path.is_absolute():
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    usable = not path.exists() or os.access(path, os.R_OK | os.W_OK)
    return path if usable and os.access(path.parent, os.W_OK) else None


def announcements() -> list[Announcement]:
    """The coordinators of this user that are alive."""
    found = []
    for path in sorted(runtime_directory().glob("coordinator-*.json")):
        announcement = _read(Announcement, path)
        if announcement is not None and announcement.alive:
            found.append(announcement)
        else:
            path.unlink(missing_ok=True)
    led = {announcement.address for announcement in found}
    for path, note in _worker_notes():
        alone = note.address.startswith("ipc://") and note.address not in led
        if alone and not _runs(note):
            path.unlink(missing_ok=True)
    return found


def only_announcement() -> Announcement | None:
    """The only coordinator of this user, or None; `UserError` lists the choices if there are
    several."""
    found = announcements()
    if len(found) > 1:
        over = [f", over HTTP {one.url}" if one.url else "" for one in found]
        ways = zip(found, over, strict=True)
        choices = "; ".join(f"--connect {one.address} ({one.process}{url})" for one, url in ways)
        raise UserError(f"you have {len(found)} coordinators running: choose one with {choices}")
    return found[0] if found else None


def _state_and_start(pid: int) -> tuple[str, int]:
    """A process's state, and its start in ticks since the machine's (proc(5), fields 3 and 22 of
    stat), which, unlike a time of day, never changes."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
