"""Records on disk: one SQLite database in a folder, in WAL mode.

A row has a record of a reply, its number within the reply, and a checksum. A committed transaction
outlives the process; `sync`, for a thread, flushes it to disk. Only its owner may open the folder,
one process at a time. Nothing here depends on the content of records.
"""

import fcntl
import itertools
import logging
import os
import sqlite3
import stat
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import refusal

log = logging.getLogger("dovetail.coordinator")

OWNER_ALONE = 0o700
FILE, LOCK = "journal.sqlite", "lock"
LOGGED = f"{FILE}-wal"
OURS = (FILE, LOGGED, f"{FILE}-shm", LOCK)
UNREADABLE = f"{FILE}.unreadable"  # what the name of a file that was put aside begins with
MAGIC, HEAD = b"SQLite format 3\0", 48
"""The beginning of a file, and the bytes that are checked (https://sqlite.org/fileformat.html)."""
NEWEST, SCHEMA = 2, 4
"""The newest version to read and write (bytes 18, 19; 2 is WAL), and that of the schema (44-47)."""
EARLIER = "segment-*"  # the files of a journal of an earlier release
PRAGMAS = ("journal_mode=wal", "synchronous=normal", "wal_autocheckpoint=0", "secure_delete=on")
"""A commit does not wait for the disk: `sync` does. Deleted rows are overwritten."""
TABLE = (
    "create table if not exists records (place integer primary key, reply integer, "
    "number integer, record blob, checksum integer)"
)
"""Rows are written one after the other, since the time of a transaction grows with its pages."""
COLUMNS = ["place", "reply", "number", "record", "checksum"]
ROWS = "select place, reply, number, record, checksum from records"
INSERT = "insert or replace into records values (?, ?, ?, ?, ?)"
DAMAGED = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_FORMAT,
)
"""The errors of a file with wrong content, as opposed to disk errors."""
WAL_BYTES = 16 << 20  # size of the write-ahead log at which it is moved into the database
ERASED_S = 60.0  # how long deleted rows may stay in the write-ahead log

Row = tuple[int, int, bytes]
"""The number of a reply, the number of a record in it, from 0, and the record."""
Stored = tuple[int, int, int, bytes, int]
"""A stored row: its place, the fields above, and the checksum."""


def checksum(reply: int, number: int, record: bytes) -> int:
    """Return the checksum of a row."""
    return zlib.crc32(record, (reply << 16 ^ number) & 0xFFFFFFFF)


def fits(row: Stored) -> bool:
    """Return whether a stored row is intact; damage may change types, too."""
    _, reply, number, record, check = row
    typed = isinstance(record, bytes) and isinstance(reply, int) and isinstance(number, int)
    return typed and check == checksum(reply, number, record)


class Database:
    """The records of one folder."""

    def __init__(self, folder: Path) -> None:
        """Raises `UserError` if the folder is unusable, in use, or has other files or an old
        journal."""
        self.folder, self._file = folder, folder / FILE
        self._lock = _locked(folder)
        self._erased, self._moved_s = False, time.monotonic()
        self._spans: dict[int, tuple[int, int]] = {}
        """The places of the first and the last record of each reply."""
        self._place = 0  # the place of the last record
        self.damaged = False  # True if written records were lost
        try:
            self._base = self._open()
        except sqlite3.DatabaseError as error:
            self._renew(self._damage(error), [])
        self._check()

    def _open(self) -> sqlite3.Connection:
        file = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        head = os.read(file, HEAD)
        os.close(file)
        newer = max(head[18:20], default=0) > NEWEST or int.from_bytes(head[44:]) > SCHEMA
        if head.startswith(MAGIC) and newer:
            raise self._foreign("its SQLite format is newer than this Python reads")
        base = sqlite3.connect(self._file, isolation_level=None, check_same_thread=False)
        try:
            sql = "select type, name from sqlite_schema where (type, name) != ('table', 'records')"
            other = base.execute(sql).fetchone()
            columns = [name for _, name, *_ in base.execute("pragma table_info(records)")]
            if other or columns not in ([], COLUMNS):
                found = f"the {other[0]} {other[1]!r}" if other else f"columns {columns}"
                raise self._foreign(f"it has {found}, written by another release or program")
            for pragma in PRAGMAS:
                base.execute(f"pragma {pragma}")
            if base.execute("pragma journal_mode").fetchone() != ("wal",):
                raise UserError(
                    f"the journal cannot be kept in {self.folder}: SQLite has no write-ahead log "
                    "there, as on some network disks; name a folder of a local disk with "
                    "coordinator.journal"
                )
            base.execute(TABLE)
        except (sqlite3.Error, UserError):
            base.close()
            raise
        return base

    def _foreign(self, why: str) -> UserError:
        return UserError(
            f"the journal {self._file} cannot be used: {why}; remove it, or name another folder "
            "with coordinator.journal"
        )

    def _damage(self, error: sqlite3.DatabaseError) -> str:
        """Return how the file is damaged; raise `UserError` if it is intact but unreadable."""
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in DAMAGED:
            return str(error)
        raise UserError(
            f"the journal in {self.folder} cannot be opened: {error}; name another folder with "
            "coordinator.journal"
        ) from None

    def _check(self) -> None:
        """Read everything; if some of it is damaged, rewrite the file with the intact rows."""
        wrong, counts = "", Counter[int]()
        try:
            for row in self._base.execute(f"{ROWS} order by place"):
                if not self._follows(row, counts):
                    wrong = "a checksum is wrong, or a row is missing"
        except sqlite3.DatabaseError as error:
            wrong = self._damage(error)
        if wrong:
            rows, counts = self._readable(), Counter()
            self._base.close()
            self._renew(wrong, [row for row in rows if self._follows(row, counts)])

    def _follows(self, row: Stored, counts: Counter[int]) -> bool:
        """Return whether a row is intact and the next one of its reply, and count it if so."""
        if not fits(row) or row[2] != counts[row[1]]:
            return False
        counts[row[1]] += 1
        self._spread(row[0], row[1])
        return True

    def _renew(self, why: str, rows: Sequence[Stored]) -> None:
        """Rewrite the file with these rows; without any, keep it under another name."""
        self.damaged = True
        if rows:
            kept = "replies continue from their last token before the damage"
        else:
            kept = f"it is kept as {self._put_aside().name}, and a new journal begins"
        log.error("%s is damaged (%s): %d records are read; %s", self._file, why, len(rows), kept)
        for name in OURS[:3]:
            (self.folder / name).unlink(missing_ok=True)
        self._base = self._open()
        self._base.execute("begin")
        self._base.executemany(INSERT, rows)
        self._base.execute("commit")

    def _put_aside(self) -> Path:
        """Rename the file and its write-ahead log; return the new name of the file."""
        names = (self.folder / f"{UNREADABLE}-{number}" for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        self._file.rename(aside)
        with suppress(FileNotFoundError):
            (self.folder / LOGGED).rename(f"{aside}-wal")
        return aside

    def _readable(self) -> list[Stored]:
        """Return the rows before the first damaged page and after the last one, in order."""
        rows = {}
        for order in ("asc", "desc"):
            with suppress(sqlite3.DatabaseError):
                for row in self._base.execute(f"{ROWS} order by place {order}"):
                    rows[row[0]] = row
        return [rows[place] for place in sorted(rows)]

    # -- reading -----------------------------------------------------------------------------------

    def read(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield each reply: its number, and its records."""
        for reply in sorted(self._spans):
            yield reply, self.find(reply)

    def find(self, reply: int) -> list[bytes]:
        """Return the records of a reply."""
        sql = "select record from records where place between ? and ? and reply = ?"
        rows = self._base.execute(sql, (*self._spans.get(reply, (0, -1)), reply))
        return [record for (record,) in rows]

    # -- writing -----------------------------------------------------------------------------------

    def write(self, rows: Iterable[Row], deleted: Sequence[int] = ()) -> None:
        """Write rows and delete replies in one transaction; reply 0 has one record."""
        self._base.execute("begin immediate")
        try:
            self._base.executemany(
                INSERT, [(self._placed(row), *row, checksum(*row)) for row in rows]
            )
            gone = [(*self._spans.pop(reply, (0, -1)), reply) for reply in deleted]
            sql = "delete from records where place between ? and ? and reply = ?"
            self._base.executemany(sql, gone)
            self._base.execute("commit")
        except sqlite3.Error:
            with suppress(sqlite3.Error):  # a full disk has ended it already
                self._base.execute("rollback")
            raise
        self._erased = self._erased or bool(deleted)

    def _placed(self, row: Row) -> int:
        """Return the place of a new row: the only one of reply 0 is always the first."""
        reply, _, _ = row
        place = self._place + 1 if reply else 0
        self._spread(place, reply)
        return place

    def _spread(self, place: int, reply: int) -> None:
        first, last = self._spans.get(reply, (place, place))
        self._spans[reply] = min(first, place), max(last, place)
        self._place = max(self._place, place)

    def sync(self) -> None:
        """Flush what was written to disk; slow, and may be called in a thread."""
        with (self.folder / LOGGED).open("rb") as log_file:
            os.fdatasync(log_file.fileno())
            size = os.fstat(log_file.fileno()).st_size
        now_s = time.monotonic()
        if size > WAL_BYTES or (self._erased and now_s - self._moved_s > ERASED_S):
            self._erased, self._moved_s = False, now_s
            with closing(sqlite3.connect(self._file, timeout=0, isolation_level=None)) as base:
                base.execute("pragma wal_checkpoint(passive)")  # writers do not wait for most of it
                if base.execute("pragma wal_checkpoint(truncate)").fetchone()[0]:
                    self._erased = True  # not yet: a reader is active

    @property
    def size(self) -> int:
        """Return the bytes of its files."""
        files = (self.folder / name for name in OURS[:2])
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self, *, remove: bool = False) -> None:
        """Release the folder; `remove`: delete its files, too."""
        self._base.close()
        if remove:
            for name in OURS:
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # it contains other files
                self.folder.rmdir()
        os.close(self._lock)


def _locked(folder: Path) -> int:
    """Create a folder if it is missing, restrict it to its owner, and return its lock."""
    why = ""
    try:
        folder.mkdir(mode=OWNER_ALONE, parents=True, exist_ok=True)
        if (earlier := next(folder.glob(EARLIER), None)) and not (folder / FILE).exists():
            why = (
                f"{earlier} belongs to a journal of an earlier release: remove that folder, or "
                "name another one with coordinator.journal"
            )
        elif other := _other(folder):
            why = (
                f"the journal cannot be kept in {folder}, which has other files, such as {other}: "
                "name a folder of its own with coordinator.journal"
            )
        else:
            open_to_others = folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
            folder.chmod(OWNER_ALONE)
            if open_to_others:
                log.warning(
                    "%s, which other users could open, is now open to its owner only", folder
                )
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        why = (
            f"the journal cannot be kept in {folder}, which is not a folder: name one with "
            "coordinator.journal"
        )
    except OSError as error:
        why = (
            f"the journal cannot be kept in {folder}: {refusal(error)}, or disable it with "
            "coordinator.journal = 'off'"
        )
    if why:
        raise UserError(why)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(
            f"the journal in {folder} is used by another coordinator: stop that one, or "
            "name another folder with coordinator.journal"
        ) from None
    return lock


def _other(folder: Path) -> str | None:
    """Return a file that does not belong to a journal: any in a folder without one, or one with a
    journal's name that is not a regular file."""
    names = sorted(path.name for path in folder.iterdir())
    names = [name for name in names if not name.startswith(UNREADABLE)]
    if FILE not in names and (other := next((name for name in names if name not in OURS), None)):
        return other
    ours = (name for name in OURS if name in names)
    return next((name for name in ours if not stat.S_ISREG((folder / name).lstat().st_mode)), None)
