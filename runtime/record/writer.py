"""The thread that writes recordings, so that nothing else waits for a disk. It creates their files,
readable by their owner only, and keeps a folder within its bound by removing the oldest. A file
that cannot be written is abandoned, which is logged once. Contents are opaque here."""

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from dovetail.protocol.errors import UserError
from dovetail.runtime.record import recording

log = logging.getLogger("dovetail.coordinator")

MAX_FOLDER_BYTES = 1 << 30  # most bytes of all recordings in a folder, except those being written
MAX_WAITING_BYTES = 128 << 20  # most bytes that wait for the disk


@dataclass(frozen=True)
class _Piece:
    """A piece of a file. `content` is called by the thread; None: the file is complete."""

    path: Path
    size: int = 0
    content: Callable[[], bytes] | None = None


class FileWriter:
    """Writes into one folder. Its methods do not block, except `close`."""

    def __init__(self, folder: Path) -> None:
        """Raises `UserError` if the folder cannot be created or written to."""
        self._queue: SimpleQueue[_Piece | None] = SimpleQueue()
        self._added = self._written = 0
        """Bytes added by the callers, and bytes handled by the thread."""
        self._files: dict[Path, BinaryIO | None] = {}  # None: it could not be written
        self._tokenizer: tuple[bytes, bytes] = (b"", b"")  # the last tokenizer, and its entry
        self._done = _recordings(folder)  # complete files with their sizes, oldest first
        self._done_bytes = sum(size for _, size in self._done)
        self._thread = threading.Thread(target=self._run, name="recordings", daemon=True)
        self._thread.start()

    def add(self, path: Path, pieces: Sequence[bytes]) -> bool:
        """Add pieces; return False, ending the file, if they do not fit."""
        size = sum(map(len, pieces))
        room = self._added - self._written + size <= MAX_WAITING_BYTES
        if room:
            self._added += size
            self._queue.put(_Piece(path, size, lambda: b"".join(pieces)))
        else:
            self.finish(path)
        return room

    def add_tokenizer(self, path: Path, content: bytes) -> None:
        """Add the tokenizer's packed entry, shared by all recordings."""
        self._queue.put(_Piece(path, 0, lambda: self._deflated(content)))

    def finish(self, path: Path) -> None:
        """Note that a file is complete."""
        self._queue.put(_Piece(path))

    def close(self) -> None:
        """Write all waiting pieces."""
        self._queue.put(None)
        self._thread.join()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (piece := self._queue.get()) is not None:
            try:
                self._do(piece)
            except OSError as error:
                log.warning("the recording %s ends early: %s", piece.path, error.strerror or error)
                self._close(piece.path)
                if piece.content is not None:
                    self._files[piece.path] = None
            self._written += piece.size
        for path in list(self._files):
            self._close(path)

    def _do(self, piece: _Piece) -> None:
        if piece.content is None:
            self._close(piece.path)
            return
        if piece.path not in self._files:
            self._files[piece.path] = open(piece.path, "xb", buffering=0, opener=_for_its_owner)  # noqa: SIM115 - closed when it is done
        file = self._files[piece.path]
        left = memoryview(piece.content() if file is not None else b"")
        while left and file is not None:
            left = left[file.write(left) or 0 :]

    def _deflated(self, content: bytes) -> bytes:
        if self._tokenizer[0] != content:
            self._tokenizer = content, recording.deflated(content)
        return self._tokenizer[1]

    def _close(self, path: Path) -> None:
        """Close a complete file, and remove the oldest ones if necessary."""
        if (file := self._files.pop(path, None)) is None:
            return
        size = file.tell()
        file.close()
        self._done.append((path, size))
        self._done_bytes += size
        while self._done_bytes > MAX_FOLDER_BYTES:
            oldest, size = self._done.popleft()
            self._done_bytes -= size
            try:
                oldest.unlink(missing_ok=True)
            except OSError as error:
                log.warning(
                    "the recording %s could not be removed to make room: %s",
                    oldest,
                    error.strerror or error,
                )


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _recordings(folder: Path) -> deque[tuple[Path, int]]:
    """Return the existing recordings, oldest first; raise `UserError` if no more can be written."""
    probe = folder / f"{secrets.token_hex(8)}.new"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.touch(mode=0o600)
        probe.unlink()
        found = [(path, path.stat()) for path in folder.glob(f"*{recording.SUFFIX}")]
    except OSError as error:
        raise UserError(
            f"cannot record into {folder} (coordinator.record): {error.strerror}; name a "
            "folder that you can write to"
        ) from None
    return deque(
        (path, state.st_size) for path, state in sorted(found, key=lambda one: one[1].st_mtime_ns)
    )
