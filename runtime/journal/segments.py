"""Records on disk: a folder of segments, each an append-only file of records with check sums.

A record is its length and CRC-32 (little-endian, 4 bytes each) and that many bytes, a MessagePack
array that begins with a word. What a process that was killed has begun to write is cut off: a
segment may end in a record that is not whole. Where it is damaged before its end, it is read on
from the next record that is whole. The folder is its owner's alone, and one process's at a time.
Knows nothing of what the records say.
"""

import fcntl
import logging
import mmap
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dovetail.protocol.errors import DecodeError, UserError
from dovetail.protocol.files import refusal

log = logging.getLogger("dovetail.coordinator")

Content = bytes | mmap.mmap

OWNER_ALONE = 0o700
MAGIC = b"dovetail journal 1\n"
ANY_MAGIC = re.compile(rb"dovetail journal [0-9]+\n")
HEAD = struct.Struct("<II")
MAX_RECORD = 64 << 20
MAX_SEGMENT = 1 << 30
"""Size in bytes of the largest file that is read as a segment."""
LOOK = 1 << 20
"""Bytes of a segment that are in memory at a time."""
MOST_CHECKED = 8
"""Multiple of a segment's size that is checksummed, at most, to find a record behind damage."""
NAME = "segment-{:08}"
NAME_PATTERN = re.compile(r"segment-([0-9]{8,})")
BEGUN = "begun"
"""The name of a segment until all that it begins with has been written."""
LOCK = "lock"
BEGINNING = re.compile(rb"[\x91-\x9f][\xa1-\xbf][a-z]")
"""The bytes that a record begins with: of an array, of a word in it, and its first letter."""


def packed(record: bytes) -> bytes:
    """Return a record as it is written."""
    return HEAD.pack(len(record), zlib.crc32(record)) + record


def _of_others(folder: Path) -> str | None:
    """Return the name of a file that is no journal's, in a folder that has no segment: its rights
    are somebody else's to say."""
    names = sorted(path.name for path in folder.iterdir())
    if any(NAME_PATTERN.fullmatch(name) for name in names):
        return None
    return next((name for name in names if name not in (LOCK, BEGUN)), None)


@dataclass(frozen=True)
class Gap:
    """A part of a file that cannot be read as records."""

    file: Path
    offset: int
    size: int
    """In bytes."""


def _at(content: Content, place: int) -> bytes | None:
    """Return the record at a place; None: there is none that is whole."""
    if place + HEAD.size > len(content):
        return None
    size, check = HEAD.unpack_from(content, place)
    record = content[place + HEAD.size : place + HEAD.size + size] if size <= MAX_RECORD else b""
    return record if record and len(record) == size and zlib.crc32(record) == check else None


def _behind(content: Content, place: int) -> int:
    """Return the place of the first whole record behind one that is not whole; the end of the
    content if there is none."""
    if place + HEAD.size <= len(content):
        size, _ = HEAD.unpack_from(content, place)
        if _at(content, place + HEAD.size + size) is not None:
            return int(place + HEAD.size + size)
    left = MOST_CHECKED * len(content)
    for found in BEGINNING.finditer(content, place + HEAD.size + 1):
        size, _ = HEAD.unpack_from(content, found.start() - HEAD.size)
        left -= size if size <= min(MAX_RECORD, len(content) - found.start()) else 0
        if left < 0:
            break
        if _at(content, found.start() - HEAD.size) is not None:
            return found.start() - HEAD.size
    return len(content)


def _torn(content: Content, place: int) -> bool:
    """Return whether the rest of a content is what was being written when a process or its machine
    ended: one record, or nothing yet."""
    rest = len(content) - place
    pieces = (content[at : at + LOOK] for at in range(place, len(content), LOOK))
    if rest < HEAD.size or all(piece.count(0) == len(piece) for piece in pieces):
        return True
    size: int = HEAD.unpack_from(content, place)[0]
    return size <= MAX_RECORD and HEAD.size + size >= rest


class Segments:
    """The segments of one folder, open for appending to the newest."""

    def __init__(self, folder: Path) -> None:
        """`UserError` if the folder cannot be used, has other files, or another process uses it."""
        self.folder = folder
        try:
            folder.mkdir(mode=OWNER_ALONE, parents=True, exist_ok=True)
            if (other := _of_others(folder)) is not None:
                raise UserError(
                    f"the journal cannot be kept in {folder}, which has other files, such as "
                    f"{other}: name a folder for it alone with coordinator.journal"
                )
            open_to_others = folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
            folder.chmod(OWNER_ALONE)
            if open_to_others:
                log.warning("%s, which others could open, is open to its owner alone now", folder)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise UserError(
                f"the journal cannot be kept in {folder}, which is no folder: name one with "
                "coordinator.journal"
            ) from None
        except OSError as error:
            raise UserError(
                f"the journal cannot be kept in {folder}: {refusal(error)}, or do without one with "
                "coordinator.journal = 'off'"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UserError(
                f"the journal in {folder} is another coordinator's, which runs: stop that one, or "
                "name another folder with coordinator.journal"
            ) from None
        self._sizes = {number: self._path(number).stat().st_size for number in self._numbers()}
        self._file = -1

    def _numbers(self) -> list[int]:
        """Return the numbers of the segments that are there, the oldest first."""
        names = (NAME_PATTERN.fullmatch(path.name) for path in self.folder.iterdir())
        numbers = {int(name[1]) for name in names if name is not None}
        return sorted(number for number in numbers if self._is_segment(self._path(number)))

    def _is_segment(self, path: Path) -> bool:
        """Return whether this is a file that is not too large for a segment."""
        size = path.stat().st_size if path.is_file() else -1
        if size > MAX_SEGMENT:
            log.error("%s is not read: its %d bytes are too many for a segment", path, size)
        return 0 <= size <= MAX_SEGMENT

    def _path(self, number: int) -> Path:
        return self.folder / NAME.format(number)

    @property
    def all(self) -> list[int]:
        """Return the numbers of the segments, the oldest first."""
        return [*self._sizes]

    @property
    def size(self) -> int:
        """Return the bytes of all segments."""
        return sum(self._sizes.values())

    @property
    def newest_size(self) -> int:
        """Return the bytes of the segment that is written."""
        return self._sizes[self.all[-1]] if self._file >= 0 else 0

    def read(self, number: int) -> Iterator[bytes | Gap]:
        """Yield the records of a segment, and the gaps between them; a last record that is torn is
        none. `DecodeError` for a file that is no segment, or one of another release."""
        file = self._path(number)
        with file.open("rb") as opened:
            empty = os.fstat(opened.fileno()).st_size == 0
            content = b"" if empty else mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        place = len(MAGIC)
        if content[:place] != MAGIC:
            place = _behind(content, 0)
            if other := ANY_MAGIC.match(content):
                raise DecodeError(
                    f"{file} is of {other[0].decode().strip()!r}, and this release reads "
                    f"{MAGIC.decode().strip()!r}: go on with the release that wrote it, or name "
                    "another folder with coordinator.journal"
                )
            if place == len(content):
                raise DecodeError(f"{file} is no segment of a journal")
            yield Gap(file, 0, place)
        while place < len(content):
            if (record := _at(content, place)) is not None:
                yield record
                place += HEAD.size + len(record)
                continue
            begin, place = place, _behind(content, place)
            if place < len(content) or not _torn(content, begin):
                yield Gap(file, begin, place - begin)

    def begin(self, content: bytes = b"") -> int:
        """Begin a segment with these packed records, which is the newest from now on, and return
        its number. It is there with all of them or not at all. `OSError` where that cannot be: the
        one before goes on."""
        number = max(self._sizes, default=0) + 1
        while self._path(number).exists():  # of somebody else, and no file
            number += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        begun = self.folder / BEGUN
        begun.unlink(missing_ok=True)  # whatever it is: a pipe would be waited for
        file = os.open(begun, flags, 0o600)
        try:
            _write(file, MAGIC + content)
            begun.rename(self._path(number))
        except OSError:
            os.close(file)
            begun.unlink(missing_ok=True)
            raise
        self._close_file()
        self._file, self._sizes[number] = file, len(MAGIC) + len(content)
        return number

    def append(self, content: bytes) -> None:
        """Write packed records to the end of the newest segment."""
        _write(self._file, content)
        self._sizes[self.all[-1]] += len(content)

    def sync(self) -> None:
        """Have the disk hold what was appended; takes its time, and may be called in a thread."""
        os.fdatasync(self._file)

    def remove(self, number: int) -> None:
        """Remove a segment, which is not the newest."""
        self._path(number).unlink(missing_ok=True)
        del self._sizes[number]

    def close(self, *, remove: bool = False) -> None:
        """Let the folder go; `remove`: and everything in it."""
        self._close_file()
        if remove:
            for number in self.all:
                self.remove(number)
            for name in (BEGUN, LOCK):
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # files of somebody else are in it
                self.folder.rmdir()
        os.close(self._lock)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]
