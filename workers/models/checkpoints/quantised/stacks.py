"""Blocks of a layer's experts, cached in one safetensors file: blocks [experts, out, bytes] and a
checksum of each. They are searched for and read one expert at a time."""

import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import refusal
from dovetail.workers.progress import count_bytes

NUMBER_BYTES = 8  # bytes of the length of the header, and of each checksum

log = logging.getLogger(__name__)


def check_of(path: Path, content: bytes | memoryview, index: int = 0) -> int:
    """Return a checksum of blocks, their file and folder (named by checkpoint), and their
    expert."""
    return zlib.crc32(content, zlib.crc32(f"{path.parent.name}/{path.name} {index}".encode()))


class Stack:
    """The blocks of a stack of matrices [out, bytes], made once and cached."""

    def __init__(
        self,
        file: Path | None,
        shape: tuple[int, int, int],
        find: Callable[[int], Tensor],
        *,
        stored_bytes: int,
        not_kept: Callable[[Path, OSError], None],
    ) -> None:
        """`file`: the cache, or None. `shape`: [experts, out, bytes]. `find` searches for one's
        blocks. `stored_bytes`: what the checkpoint need not read with a cache. `not_kept` reports
        write errors."""
        self._path, self._shape, self._find = file, shape, find
        self._stored_bytes, self._not_kept = stored_bytes, not_kept
        self._there = False
        self._lock = Lock()
        count, outputs, width = shape
        self._size, checks = outputs * width, count * NUMBER_BYTES
        blocks = count * self._size
        own = {"dtype": "U8", "shape": shape, "data_offsets": (0, blocks)}
        rest = {"dtype": "I64", "shape": (count,), "data_offsets": (blocks, blocks + checks)}
        entries = {"blocks": own, "checks": rest}
        content = json.dumps(entries).encode()
        content += b" " * (-len(content) % NUMBER_BYTES)
        self._header = len(content).to_bytes(NUMBER_BYTES, "little") + content
        self._whole = len(self._header) + blocks + checks

    def content(self, index: int) -> Tensor:
        """Return an expert's blocks uint8 [out, bytes]; `CheckpointError` if the file is removed or
        cut."""
        with self._lock:
            self._open()
        if (path := self._path) is None:
            return self._find(index)
        try:
            with path.open("rb", buffering=0) as source:
                found = bytearray(self._read(source, index))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read any more ({refusal(error, writes=False)}): start again"
            ) from None
        return torch.frombuffer(found, dtype=torch.uint8).view(self._shape[1:])

    def _open(self) -> None:
        if self._path is None or self._there:
            return
        try:
            if not (self._path.is_file() and self._is_whole(self._path)):
                self._make(self._path)
        except OSError as error:
            self._not_kept(self._path.parent, error)
            self._path = None
        self._there = True

    def _is_whole(self, path: Path) -> bool:
        """Return whether an existing file can be used; log why not."""
        with path.open("rb", buffering=0) as source:
            found = source.read(len(self._header)), os.fstat(source.fileno()).st_size
            if found != (self._header, self._whole):
                why = "it holds blocks of other matrices, or not all"
            elif self._checks(source) != [*self._computed(source)]:
                why = "it is not what was written"
            else:
                count_bytes(self._stored_bytes)
                return True
        log.warning("%s is made again: %s", path, why)
        return False

    def _make(self, path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made, checks = Path(folder) / path.name, []
            with made.open("wb") as file:
                file.write(self._header)
                for index in range(self._shape[0]):
                    content = self._find(index).contiguous().numpy().data
                    file.write(content)
                    checks.append(self._check(index, content))
                file.write(torch.tensor(checks, dtype=torch.int64).numpy().tobytes())
            made.replace(path)

    def _read(self, source: FileIO, index: int) -> bytes:
        found = os.pread(source.fileno(), self._size, len(self._header) + index * self._size)
        if len(found) != self._size:
            raise OSError(None, "it has been cut")
        return found

    def _checks(self, source: FileIO) -> list[int]:
        size = self._shape[0] * NUMBER_BYTES
        found = bytearray(os.pread(source.fileno(), size, self._whole - size))
        checks: list[int] = torch.frombuffer(found, dtype=torch.int64).tolist()
        return checks

    def _computed(self, source: FileIO) -> Iterator[int]:
        return (self._check(i, self._read(source, i)) for i in range(self._shape[0]))

    def _check(self, index: int, content: bytes | memoryview) -> int:
        assert self._path is not None
        return check_of(self._path, content, index)
