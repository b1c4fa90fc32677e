"""Weights int4: matrices are quantised to GGUF blocks at the first load, and cached on disk by the
checkpoint's digest, a file a matrix or stack of experts. Layers become Q4_K, or Q5_0 if 256 does
not divide their width; head and tables, which matter most, Q6_K or Q8_0; widths that are no
multiple of 32 stay."""

import hashlib
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import cache_folder, check_home, refusal, tidy
from dovetail.workers.kernels.blocks import search
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS, int4_kind
from dovetail.workers.models.checkpoints.gguf.rows import Rows
from dovetail.workers.models.checkpoints.loader import Skeleton
from dovetail.workers.models.checkpoints.pieces import UnreadStack
from dovetail.workers.models.families.matrices import (
    expert_layouts,
    layer_matrices,
    tables_and_head,
)
from dovetail.workers.progress import count_bytes

NUMBER_BYTES = 8  # bytes of the length of the header, and of each checksum


class Stack:
    """The blocks of one matrix, or of a layer's experts, in one safetensors file: blocks [matrices,
    out, bytes] and a checksum of each. They are searched for and read one at a time."""

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
        blocks. `stored_bytes`: bytes of the checkpoint that are not read with a cache. `not_kept`
        reports write errors."""
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
            why = refusal(error, writes=False)
            raise CheckpointError(f"{path} cannot be read any more ({why}): start again") from None
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
                why = "its content has changed"
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
        """Return a checksum of blocks, their file and folder (named by checkpoint), and their
        number."""
        assert self._path is not None
        name = f"{self._path.parent.name}/{self._path.name} {index}"
        return zlib.crc32(content, zlib.crc32(name.encode()))


SEARCH = "search-1"  # version of the search and its types: part of fingerprints and cache names
TYPES = ("int4-int8", "int4-fp32")  # types that are searched for, with their activations
FOLDER = "int4"
MOST_KEPT = 8  # checkpoints whose blocks are kept; the least recently used are removed
PIECE_WEIGHTS = 1 << 19  # weights that a thread quantises at a time
SAMPLED = 16  # rows of a matrix that are compared with the blocks found for them
MOST_OFF = 0.3  # largest distance of blocks from a matrix, relative to it: 0.07 is usual
LARGEST = 65504.0  # the largest number that 16 bits hold, and that blocks are searched for

log = logging.getLogger(__name__)


def in_blocks(skeleton: Skeleton, checkpoint: Checkpoint | None, weights: str) -> Skeleton:
    """Return a skeleton that reads matrices as searched blocks of these weights; `checkpoint`: the
    key of the cache, or None."""
    if weights not in TYPES:
        return skeleton
    searched = Searched(skeleton, checkpoint)
    if searched.layouts and skeleton.experts is None:
        source = "random weights" if checkpoint is None else checkpoint.source
        raise CheckpointError(
            f"{source}: its experts cannot be read one by one, which weights int4 require: use "
            "weights int8"
        )
    return replace(skeleton, rows=searched.rows, experts=searched.experts)


class Searched:
    """The blocks of a model's matrices: searched for if not cached, and stored."""

    def __init__(self, skeleton: Skeleton, checkpoint: Checkpoint | None) -> None:
        self._skeleton, self._tensors = skeleton, {} if checkpoint is None else checkpoint.tensors
        self._layers = frozenset(layer_matrices(skeleton.model))
        self.layouts = expert_layouts(skeleton.model)  # the stacks of experts' matrices
        self._ends = frozenset(tables_and_head(skeleton.model))
        self._folder = None if checkpoint is None else _open_folder(checkpoint.digest)

    def rows(self, name: str, part: nn.Module) -> Rows | None:
        """Return the rows of a module's weight as blocks; None: it stays as stored."""
        weight: Any = part.weight
        count, width = weight.shape
        end = name in self._ends
        if not (end or name in self._layers) or (kind := int4_kind(width, end=end)) is None:
            return None
        stored = (self._skeleton.stored or {}).get(name, name)  # a tied head is stored once
        held = self._tensors.get(stored)
        stack = Stack(
            self._file(stored, kind),
            (1, count, KINDS[kind].size_of((width,))),
            lambda _: _found(name, kind, self._numbers(name, weight)),
            stored_bytes=0 if held is None else held.size_bytes,
            not_kept=self._give_up,
        )
        return Rows(kind, stack.content(0))

    def experts(self, name: str) -> UnreadStack:
        """Return a stack's experts, to be read one by one, as blocks if possible."""
        assert self._skeleton.experts is not None
        own, layout = self._skeleton.experts(name), self.layouts[name]
        part, _, last = name.rpartition(".")
        count, *stored = getattr(self._skeleton.model.get_submodule(part), last).shape
        outputs, inputs = reversed(stored) if layout.transposed else stored
        if (kind := int4_kind(inputs, end=False)) is None:
            return own
        stack = Stack(
            self._file(name, kind),
            (count, outputs, KINDS[kind].size_of((inputs,))),
            lambda index: _found(name, kind, layout.rows(own.numbers(index))),
            stored_bytes=count * own.size_bytes,
            not_kept=self._give_up,
        )
        return UnreadStack(
            lambda index: layout.stored(Rows(kind, stack.content(index)).numbers()),
            own.size_bytes if self._folder is None else 0,  # which are counted as they are read
            lambda index: [Rows(kind, stack.content(index))],
        )

    def _numbers(self, name: str, weight: Tensor) -> Tensor:
        if not weight.is_meta:
            return weight.detach()
        found = self._skeleton.read(name)
        return found.t() if name in self._skeleton.transposed else found

    def _file(self, name: str, kind: int) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{name}.{KINDS[kind].name}.safetensors"

    def _give_up(self, folder: Path, error: OSError) -> None:
        """Cache no more; log the first failure."""
        if self._folder is not None:
            _not_kept(folder, error)
        self._folder = None


def _open_folder(digest: str) -> Path | None:
    """Return the folder of a checkpoint's cached blocks, which only this user can read."""
    whole = cache_folder() / FOLDER
    folder = whole / hashlib.sha256(f"{digest}\0{SEARCH}\0stacks".encode()).hexdigest()[:32]
    try:
        check_home(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.touch()
        tidy(whole, MOST_KEPT)
    except OSError as error:
        _not_kept(folder, error)
        return None
    return folder


def _not_kept(folder: Path, error: OSError) -> None:
    log.warning(
        "int4 weights cannot be saved in %s (%s): every start quantises them again",
        folder,
        refusal(error),
    )


@torch.inference_mode()
def _found(name: str, kind: int, weight: Tensor) -> Tensor:
    """Return the blocks uint8 [out, bytes] of a matrix; `CheckpointError` if none represent it."""
    count, width = weight.shape
    content = torch.empty(count, KINDS[kind].size_of((width,)), dtype=torch.uint8)
    step = max(1, PIECE_WEIGHTS // width)

    def find(first: int) -> None:
        rows = slice(first, first + step)
        numbers = weight[rows].float().contiguous()
        if float(numbers.abs().max()) > LARGEST:
            raise _unfit(name)
        search(kind, numbers, content[rows])

    _in_pieces(find, range(0, count, step))
    places = torch.linspace(0, count - 1, min(SAMPLED, count)).long()
    expected, rows = weight[places].double(), Rows(kind, content).taken(places)
    if not float((rows.numbers() - expected).norm()) <= MOST_OFF * float(expected.norm()):
        raise _unfit(name)
    return content


def _unfit(name: str) -> CheckpointError:
    text = f"the numbers of {name} are too large or too small for blocks of 4 bits"
    return CheckpointError(f"{text}, whose scales are halves: use weights int8")


def _in_pieces(find: Callable[[int], None], firsts: range) -> None:
    if len(firsts) == 1:
        find(firsts[0])
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in pool.map(find, firsts):
            assert done is None
