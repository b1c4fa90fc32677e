"""Blocks of cached prompts on disk: a safetensors file for each in a folder that only its owner may
open. The least recently used files are deleted beyond a bound, damaged ones when they are read."""

import os
import sys
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import ABOUT_PROMPTS, check_home, refusal
from dovetail.protocol.prefixes import NAME_BYTES
from dovetail.workers.models.checkpoints.checkpoint import load_tensors, save_tensors

SUFFIX = ".safetensors"
HEADER_BYTES = 4096  # at most: the header of a file and its small tensors


class Content(Protocol):
    """The content of a block."""

    @property
    def parent(self) -> bytes: ...
    @property
    def tokens(self) -> bytes: ...
    @property
    def rows(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class BlockFile:
    """The content of a file."""

    parent: bytes
    tokens: bytes
    rows: tuple[Tensor, ...]
    digest: bytes


class BlockFiles:
    """The files of one worker's blocks by name, the least recently used first."""

    def __init__(self, folder: Path, most_bytes: int, name: str, model: str = "") -> None:
        """`name`: of the worker, for messages; `model`: what it computes. Raises `OSError` if the
        folder cannot be used."""
        check_home(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for private in (folder.parent, folder):
            private.chmod(0o700)
        if model:
            (folder / ABOUT_PROMPTS).write_text(model, encoding="utf-8")
        self._folder, self._most_bytes, self._name = folder, most_bytes, name
        self._refused = False  # True once the disk has refused a file
        self.damaged = 0  # files that were deleted since they did not have their digest
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        for path, found in sorted(_files(folder), key=lambda file: file[1].st_mtime_ns):
            self._sizes[bytes.fromhex(path.stem)] = found.st_size
        self._bytes = sum(self._sizes.values())
        self._make_room(0)

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    @property
    def names(self) -> Collection[bytes]:
        return self._sizes.keys()

    def write(self, name: bytes, block: Content, digest: bytes) -> Sequence[bytes]:
        """Write a block, and return the names of those deleted for it. If the disk refuses, nothing
        more is written, which is reported once."""
        if self._refused:
            return ()
        gone = self._make_room(HEADER_BYTES + sum(part.nbytes for part in block.rows))
        tensors = {f"rows.{place}": part for place, part in enumerate(block.rows)}
        for what, content in (("parent", block.parent), ("tokens", block.tokens)):
            tensors[what] = _bytes_of(content)
        tensors["digest"] = _bytes_of(digest)
        path = self._path(name)
        try:
            save_tensors(path, tensors)
            size = path.stat().st_size
        except OSError as error:
            self._refused = True
            text = f"prompts are no longer cached in {self._folder}: {refusal(error)}"
            print(f"{self._name}: {text}", file=sys.stderr)
            return gone
        self._sizes[name] = size
        self._bytes += size
        return gone

    def read(self, name: bytes) -> BlockFile | None:
        """Return the content of a file, whose digest was not checked; None if there is no such
        file, or if it is incomplete."""
        if name not in self._sizes:
            return None
        path = self._path(name)
        if not path.exists():  # another worker or a user has deleted it
            self.drop(name)
            return None
        try:
            tensors = {key: part.clone() for key, part in load_tensors(path).items()}
            parent, tokens, digest = (
                tensors.pop(key).numpy().tobytes() for key in ("parent", "tokens", "digest")
            )
            rows = tuple(tensors[f"rows.{place}"] for place in range(len(tensors)))
        except (CheckpointError, KeyError, TypeError, OSError):
            self.drop_damaged(name)
            return None
        return BlockFile(parent, tokens, rows, digest)

    def use(self, names: Sequence[bytes]) -> None:
        """Note the use of a chain: blocks behind others are deleted first."""
        for name in reversed(names):
            if name in self._sizes:
                self._sizes.move_to_end(name)
                with suppress(OSError):
                    os.utime(self._path(name))

    def drop_damaged(self, name: bytes) -> None:
        """Delete a damaged file and count it."""
        self.damaged += 1
        text = f"{self._path(name).name} in {self._folder} is damaged: it is deleted"
        print(f"{self._name}: {text}", file=sys.stderr)
        self.drop(name)

    def _make_room(self, size: int) -> Sequence[bytes]:
        gone = []
        while self._sizes and self._bytes + size > self._most_bytes:
            gone.append(next(iter(self._sizes)))
            self.drop(gone[-1])
        return gone

    def drop(self, name: bytes) -> None:
        """Delete a file."""
        self._bytes -= self._sizes.pop(name)
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{SUFFIX}"


def _files(folder: Path) -> Sequence[tuple[Path, os.stat_result]]:
    """Return the files of blocks in a folder."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        if len(path.stem) == 2 * NAME_BYTES and not set(path.stem) - set("0123456789abcdef"):
            with suppress(FileNotFoundError):  # a link to nothing, or another worker has deleted it
                found.append((path, path.stat()))
    return found


def _bytes_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
